"""Figures of analysis results.

Each function draws the result of an analysis and computes nothing that an analysis should have computed. It returns
a :class:`matplotlib.figure.Figure` whose label (``figure.get_label()``) is the alternative text of the published
figure. ``interactive_timeline`` returns HTML instead. Drawing needs the ``plots`` extra, importing does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsightkit.plots._bars import bars, panels
    from nsightkit.plots._curves import step_times
    from nsightkit.plots._roofline import roofline
    from nsightkit.plots._stacks import stacks
    from nsightkit.plots._tables import table
    from nsightkit.plots._timeline import interactive_timeline, timeline
    from nsightkit.plots.packing import InteractiveTimeline

__all__ = [
    "InteractiveTimeline",
    "bars",
    "interactive_timeline",
    "panels",
    "roofline",
    "stacks",
    "step_times",
    "table",
    "timeline",
]

# Imported when they are asked for: the report draws without matplotlib, and needs a part of this package.
_MODULES = {
    "InteractiveTimeline": "packing",
    "bars": "_bars",
    "interactive_timeline": "_timeline",
    "panels": "_bars",
    "roofline": "_roofline",
    "stacks": "_stacks",
    "step_times": "_curves",
    "table": "_tables",
    "timeline": "_timeline",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
