"""Figures of analysis results.

Each function takes what an analysis returned and draws it; none computes anything an analysis should
have. They return a :class:`matplotlib.figure.Figure` whose label (``figure.get_label()``) is a sentence
that says what the picture shows: the alternative text of the published figure. One is HTML instead:
:func:`interactive_timeline`, with a static figure within. Needs the ``plots`` extra, but to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsightkit.plots._bars import before_after, gap_bars, kernel_bars, step_times
    from nsightkit.plots._bytes import memory_curves, memory_stacks
    from nsightkit.plots._curves import distributions, share_curves
    from nsightkit.plots._diff import change_intervals
    from nsightkit.plots._interactive import interactive_timeline
    from nsightkit.plots._ladder import ladder_bars
    from nsightkit.plots._limiters import limiter_map
    from nsightkit.plots._many import box_plots, panels, small_multiples
    from nsightkit.plots._memory import memory_bars, memory_timeline, segment_map
    from nsightkit.plots._packing import InteractiveTimeline
    from nsightkit.plots._ranks import rank_arrivals, rank_lateness
    from nsightkit.plots._roofline import roofline
    from nsightkit.plots._shares import share_bars
    from nsightkit.plots._sweep import sweep_memory, sweep_times
    from nsightkit.plots._tables import table
    from nsightkit.plots._timeline import timeline

__all__ = [
    "InteractiveTimeline",
    "before_after",
    "box_plots",
    "change_intervals",
    "distributions",
    "gap_bars",
    "interactive_timeline",
    "kernel_bars",
    "ladder_bars",
    "limiter_map",
    "memory_bars",
    "memory_curves",
    "memory_stacks",
    "memory_timeline",
    "panels",
    "rank_arrivals",
    "rank_lateness",
    "roofline",
    "segment_map",
    "share_bars",
    "share_curves",
    "small_multiples",
    "step_times",
    "sweep_memory",
    "sweep_times",
    "table",
    "timeline",
]

# Imported when they are asked for: what draws without matplotlib lies in this package, too.
_OF = {
    "_bars": (
        "before_after",
        "gap_bars",
        "kernel_bars",
        "step_times",
    ),
    "_bytes": (
        "memory_curves",
        "memory_stacks",
    ),
    "_curves": (
        "distributions",
        "share_curves",
    ),
    "_diff": ("change_intervals",),
    "_interactive": (
        "InteractiveTimeline",
        "interactive_timeline",
    ),
    "_ladder": ("ladder_bars",),
    "_limiters": ("limiter_map",),
    "_many": (
        "box_plots",
        "panels",
        "small_multiples",
    ),
    "_memory": (
        "memory_bars",
        "memory_timeline",
        "segment_map",
    ),
    "_packing": ("InteractiveTimeline",),
    "_ranks": (
        "rank_arrivals",
        "rank_lateness",
    ),
    "_roofline": ("roofline",),
    "_shares": ("share_bars",),
    "_sweep": (
        "sweep_memory",
        "sweep_times",
    ),
    "_tables": ("table",),
    "_timeline": ("timeline",),
}
_MODULE = {name: module for module, names in _OF.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULE:
        return getattr(importlib.import_module(f"nsightkit.plots.{_MODULE[name]}"), name)
    raise AttributeError(f"module 'nsightkit.plots' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
