"""How a program is watched: nsys, ncu, torch.profiler, the allocator's history, timers.

Everything is loaded when it is first used: importing this package loads neither torch nor pandas.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsightkit.capture import bench, doctor, memory, ncu, nsys, provenance, timing, torch_profiler
    from nsightkit.capture.captured import Captured
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

#: Where each name is; those that have moved work for one release.
_LAZY = {
    "Captured": "nsightkit.capture.captured",
    "phase": "nsightkit.workloads.phases",
}
_MOVED = {"Measurement", "measure"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _MOVED:
        from nsightkit._moved import moved_to

        return moved_to(__name__, "nsightkit.investigations")(name)
    if name in __all__ or name in ("record", "recordings"):
        return importlib.import_module(f"nsightkit.capture.{name}")
    raise AttributeError(f"module 'nsightkit.capture' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
