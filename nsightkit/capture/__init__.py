"""How a program is watched: nsys, ncu, torch.profiler, the allocator's history, timers.

Everything is loaded when it is first used: importing this package loads neither torch nor pandas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsightkit._moved import lazy

if TYPE_CHECKING:
    from nsightkit.capture import bench, children, doctor, memory, ncu, nsys, provenance, timing, torch_profiler
    from nsightkit.capture.profiling import Captured
    from nsightkit.workloads.phases import phase

__all__ = [
    "Captured",
    "bench",
    "children",
    "doctor",
    "memory",
    "ncu",
    "nsys",
    "phase",
    "provenance",
    "timing",
    "torch_profiler",
]

__getattr__, __dir__ = lazy(
    __name__,
    __all__,
    {"Captured": "nsightkit.capture.profiling", "phase": "nsightkit.workloads.phases"},
    moved=dict.fromkeys(("Measurement", "measure"), "nsightkit.investigations"),
)
