"""Memory over time."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from nsightkit.plots import style
from nsightkit.plots.looks import amount, byte_unit, spoken

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
    highest = max(float(bands["top_bytes"].max()), float(timeline["reserved_bytes"].max()))
    size, unit = byte_unit(highest)
    bands = bands.assign(category=bands["category"].astype(object).fillna(_OTHERS).astype(str))
    handles = _draw_bands(axes, bands, size)
    reserved = timeline["reserved_bytes"] / size
    look = {"color": "black", "linewidth": 1.2, "label": "reserved"}
    handles += axes.step(timeline["event"], reserved, where="post", **look)
    axes.legend(handles=handles[::-1], frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.set(xlim=(bands["from_event"].min(), bands["to_event"].max()), ylim=(0, 1.06 * highest / size))
    axes.set(xlabel="allocator event", ylabel=f"allocated ({unit})")
    return style.described(figure, f"{title}: {_in_words(bands)}.")


def _draw_bands(axes: Any, bands: pd.DataFrame, size: float) -> list[Any]:
    """Draw the bands of each category; give what a legend needs."""
    handles: list[Any] = []
    for name in style.LOOKS:
        rows = bands[bands["category"] == name]
        if rows.empty:
            continue
        colour, hatch = style.look_of(name)
        low, high = rows["bottom_bytes"] / size, rows["top_bytes"] / size
        corners: Any = style.rectangles(rows["from_event"], rows["to_event"], low, high)
        # Small ones lie close together: white edges would fill their area.
        edge = "face" if name == _OTHERS else "white"
        axes.add_collection(PolyCollection(corners, facecolor=colour, edgecolor=edge, linewidth=0.15, hatch=hatch))
        handles.append(Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=name))
    return handles


def _in_words(bands: pd.DataFrame) -> str:
    """What the highest point is made of."""
    peak = bands.iloc[int(bands["top_bytes"].to_numpy(float).argmax())]
    at_peak = bands[(bands["from_event"] <= peak["from_event"]) & (peak["from_event"] < bands["to_event"])]
    heights = (at_peak["top_bytes"] - at_peak["bottom_bytes"]).groupby(at_peak["category"]).sum()
    parts = heights[heights > 0].sort_values(ascending=False).map(amount)
    return (
        f"allocations stacked over {int(bands['to_event'].max()):,} allocator events; the highest point, "
        f"{amount(float(peak['top_bytes']))}, is made of {spoken(parts.items())}"
    )
