"""How a program is watched: nsys, torch.profiler, timers; and where a measurement comes from when there is no GPU.

Everything is loaded when it is first used: importing this package loads neither torch nor pandas.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsightkit.capture import (
        bench,
        doctor,
        memory,
        ncu,
        nsys,
        provenance,
        record,
        recordings,
        timing,
        torch_profiler,
    )
    from nsightkit.capture.captured import Captured
    from nsightkit.capture.investigation import Measurement, measure
    from nsightkit.workloads.phases import phase

__all__ = [
    "Captured",
    "Measurement",
    "bench",
    "doctor",
    "measure",
    "memory",
    "ncu",
    "nsys",
    "phase",
    "provenance",
    "record",
    "recordings",
    "timing",
    "torch_profiler",
]

_LAZY = {
    "Captured": "nsightkit.capture.captured",
    "Measurement": "nsightkit.capture.investigation",
    "measure": "nsightkit.capture.investigation",
    "phase": "nsightkit.workloads.phases",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in __all__:
        return importlib.import_module(f"nsightkit.capture.{name}")
    raise AttributeError(f"module 'nsightkit.capture' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
