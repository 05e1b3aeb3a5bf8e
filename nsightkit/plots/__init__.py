"""Figures of analysis results.

Each function takes what an analysis returned and draws it; none computes anything an analysis should
have. They return a :class:`matplotlib.figure.Figure` whose label (``figure.get_label()``) is a sentence
that says what the picture shows: the alternative text of the published figure. One is HTML instead:
``interactive_timeline``, with a static figure within. Needs the ``plots`` extra, but to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsightkit.plots._bars import (
        before_after,
        change_intervals,
        gap_bars,
        kernel_bars,
        ladder_bars,
        ladder_slots,
        panels,
        share_bars,
        small_multiples,
    )
    from nsightkit.plots._curves import box_plots, distributions, share_curves, step_times
    from nsightkit.plots._memory import memory_bars, memory_curves, memory_stacks, memory_timeline
    from nsightkit.plots._ranks import rank_arrivals, rank_lateness
    from nsightkit.plots._roofline import limiter_map, roofline
    from nsightkit.plots._sweep import sweep_memory, sweep_times
    from nsightkit.plots._tables import table
    from nsightkit.plots._timeline import interactive_timeline, timeline
    from nsightkit.plots.packing import InteractiveTimeline

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
    "ladder_slots",
    "limiter_map",
    "memory_bars",
    "memory_curves",
    "memory_stacks",
    "memory_timeline",
    "panels",
    "rank_arrivals",
    "rank_lateness",
    "roofline",
    "share_bars",
    "share_curves",
    "small_multiples",
    "step_times",
    "sweep_memory",
    "sweep_times",
    "table",
    "timeline",
]

# Imported when they are asked for: the report draws without matplotlib, and needs a part of this package.
_OF = {
    "_bars": (
        "before_after",
        "change_intervals",
        "gap_bars",
        "kernel_bars",
        "ladder_bars",
        "ladder_slots",
        "panels",
        "share_bars",
        "small_multiples",
    ),
    "_curves": ("box_plots", "distributions", "share_curves", "step_times"),
    "_memory": ("memory_bars", "memory_curves", "memory_stacks", "memory_timeline"),
    "packing": ("InteractiveTimeline",),
    "_ranks": ("rank_arrivals", "rank_lateness"),
    "_roofline": ("limiter_map", "roofline"),
    "_sweep": ("sweep_memory", "sweep_times"),
    "_tables": ("table",),
    "_timeline": ("interactive_timeline", "timeline"),
}


def __getattr__(name: str) -> Any:
    for module, names in _OF.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
