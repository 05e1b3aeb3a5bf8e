"""Figures of analysis results.

Each function takes what an analysis returned and draws it; none computes anything an analysis should
have. They return a :class:`matplotlib.figure.Figure` whose label (``figure.get_label()``) is a sentence
that says what the picture shows: the alternative text of the published figure. One is HTML instead:
:func:`interactive_timeline`, with a static figure within. Needs the ``plots`` extra.
"""

from __future__ import annotations

from nsightkit.plots._bars import before_after, gap_bars, kernel_bars, step_times
from nsightkit.plots._bytes import memory_curves, memory_stacks
from nsightkit.plots._curves import distributions, share_curves
from nsightkit.plots._interactive import InteractiveTimeline, interactive_timeline
from nsightkit.plots._ladder import ladder_bars
from nsightkit.plots._many import box_plots, panels, small_multiples
from nsightkit.plots._memory import memory_bars, memory_timeline, segment_map
from nsightkit.plots._roofline import roofline
from nsightkit.plots._shares import share_bars
from nsightkit.plots._sweep import sweep_memory, sweep_times
from nsightkit.plots._tables import table
from nsightkit.plots._timeline import timeline

__all__ = [
    "InteractiveTimeline",
    "before_after",
    "box_plots",
    "distributions",
    "gap_bars",
    "interactive_timeline",
    "kernel_bars",
    "ladder_bars",
    "memory_bars",
    "memory_curves",
    "memory_stacks",
    "memory_timeline",
    "panels",
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
