"""Capture a program: nsys, ncu, torch.profiler, allocator history, timers, GPU utilization.

Importing this package loads none of its modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsightkit.workloads.phases import phase

__all__ = ["phase"]


def __getattr__(name: str) -> Any:
    """Import `phase` when it is asked for: it needs the nvtx package, and reading a trace does not."""
    if name == "phase":
        from nsightkit.workloads.phases import phase

        return phase
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
