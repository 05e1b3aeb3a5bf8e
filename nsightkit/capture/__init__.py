"""How a program is watched: nsys, ncu, torch.profiler, the allocator's history, timers.

Everything is loaded when it is first used: importing this package loads neither torch nor pandas.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nsightkit._moved import moved_names, moved_to

if TYPE_CHECKING:
    from nsightkit.capture import bench, doctor, memory, ncu, nsys, provenance, timing, torch_profiler
    from nsightkit.capture.profiling import Captured
    from nsightkit.workloads.phases import phase

__all__ = [
    "Captured",
    "bench",
    "doctor",
    "memory",
    "ncu",
    "nsys",
    "phase",
    "provenance",
    "timing",
    "torch_profiler",
]

#: Where the names are that are not modules of this package.
_LAZY = {"Captured": "nsightkit.capture.profiling", "phase": "nsightkit.workloads.phases"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    old = (
        moved_to(__name__, "nsightkit.investigations") if name in ("Measurement", "measure") else moved_names(__name__)
    )
    return old(name)


def __dir__() -> list[str]:
    return sorted(__all__)
