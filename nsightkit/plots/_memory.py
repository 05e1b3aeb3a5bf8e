"""Memory over time."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from nsightkit.plots import style
from nsightkit.plots.looks import MEMORY, amount, byte_unit

_OTHERS = "smaller allocations"


def memory_timeline(bands: pd.DataFrame, timeline: pd.DataFrame, *, title: str = "Memory over time") -> Figure:
    """Every large allocation as a band over the allocator's events, stacked, as PyTorch's memory_viz draws it.

    Parameters
    ----------
    bands : DataFrame
        As :func:`nsightkit.analysis.memory.snapshot.bands` returns it.
    timeline : DataFrame
        As :func:`nsightkit.analysis.memory.snapshot.timeline` returns it: a line for what is reserved.
    title : str, default "Memory over time"

    Returns
    -------
    matplotlib.figure.Figure
        The x axis counts events, so that a moment with many allocations is as wide as it is busy.
    """
    figure, axes = style.new_figure(4.2, title)
    if bands.empty or not bands["top_bytes"].max() > 0:
        return style.nothing(figure, axes, title, "nothing was allocated")
    allocated = float(bands["top_bytes"].max())
    highest = max(allocated, float(timeline["reserved_bytes"].max()))
    size, unit = byte_unit(highest)
    categories = bands["category"].astype(object).fillna(_OTHERS).astype(str)
    handles: list[Any] = []
    for name in MEMORY:
        rows = bands[categories == name]
        if rows.empty:
            continue
        colour, hatch = style.look_of(name)
        low, high = rows["bottom_bytes"] / size, rows["top_bytes"] / size
        corners: Any = style.rectangles(rows["from_event"], rows["to_event"], low, high)
        # Small ones lie close together: white edges would fill their area.
        edge = "face" if name == _OTHERS else "white"
        axes.add_collection(PolyCollection(corners, facecolor=colour, edgecolor=edge, linewidth=0.15, hatch=hatch))
        handles.append(Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=name))
    reserved = timeline["reserved_bytes"] / size
    handles += axes.step(timeline["event"], reserved, where="post", color="black", linewidth=1.2, label="reserved")
    axes.legend(handles=handles[::-1], frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    last = int(bands["to_event"].max())
    axes.set(xlim=(bands["from_event"].min(), last), ylim=(0, 1.06 * highest / size))
    axes.set(xlabel="allocator event", ylabel=f"allocated ({unit})")
    what = f"allocations stacked over {last:,} allocator events; the highest point is at {amount(allocated)}"
    return style.described(figure, f"{title}: {what}.")
