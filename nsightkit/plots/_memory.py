"""Memory: over time, at its peak, and what it is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from nsightkit.plots import style
from nsightkit.plots.looks import (
    BLUE,
    CATEGORY_COLOURS,
    CAUSE_COLOURS,
    DARK_GREY,
    GREEN,
    GREY,
    OCHRE,
    PURPLE,
    RED,
    VERMILION,
    amount,
    byte_unit,
    spoken,
)

#: Colour and hatch of categories: of kernels, of idle time, and of memory as snapshots and ledgers name it.
#: Hatched ones share a colour with another.
LOOKS: dict[str, style.Look] = {
    **{name: (colour, None) for name, colour in {**CATEGORY_COLOURS, **CAUSE_COLOURS}.items()},
    "weights": (BLUE, None),
    "optimizer states": (OCHRE, None),
    "gradients": (VERMILION, None),
    "activations": (GREEN, None),
    "logits": (PURPLE, None),
    "autocast copies": (BLUE, "//"),
    "KV cache": (PURPLE, "//"),
    "communication": (OCHRE, "//"),
    "workspaces": (VERMILION, "//"),
    "inputs": (GREEN, "//"),
    "temporary": (RED, None),
    "before recording": (DARK_GREY, None),
    "unknown": (GREY, "//"),
    "kept by mistake": (RED, "xx"),
    "smaller allocations": (GREY, ".."),
    "autocast cache": (BLUE, "//"),
    "temporary buffers": (RED, None),
    "communication buckets": (OCHRE, "//"),
    "inputs and tables": (GREEN, "//"),
    "library workspaces": (VERMILION, "//"),
}
_OTHERS = "smaller allocations"
_NO_LOOK: style.Look = (GREY, None)


def memory_timeline(
    bands: pd.DataFrame, timeline: pd.DataFrame | None = None, *, title: str = "Memory over time"
) -> Figure:
    """Every large allocation as a band over the allocator's events, stacked, as PyTorch's memory_viz draws it.

    Parameters
    ----------
    bands : DataFrame
        As :func:`nsightkit.analysis.memory.snapshot.bands` returns it.
    timeline : DataFrame, optional
        As :func:`nsightkit.analysis.memory.snapshot.timeline` returns it: adds a line for what is reserved.
    title : str, default "Memory over time"

    Returns
    -------
    matplotlib.figure.Figure
        The x axis counts events, so that a moment with many allocations is as wide as it is busy.
    """
    figure, axes = style.new_figure(4.2, title)
    if bands.empty or not bands["top_bytes"].max() > 0:
        return style.nothing(figure, axes, title, "nothing was allocated")
    highest = float(bands["top_bytes"].max())
    if timeline is not None:
        highest = max(highest, float(timeline["reserved_bytes"].max()))
    size, unit = byte_unit(highest)
    bands = bands.assign(category=bands["category"].astype(object).fillna(_OTHERS).astype(str))
    handles = _draw_bands(axes, bands, size)
    if timeline is not None:
        level = timeline["reserved_bytes"].to_numpy()
        changes = np.union1d(np.flatnonzero(np.diff(level)) + 1, [0, len(level) - 1])
        events = timeline["event"].to_numpy()[changes]
        handles += axes.step(
            events, level[changes] / size, where="post", color="black", linewidth=1.2, label="reserved"
        )
    axes.legend(handles=handles[::-1], frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.set(xlim=(bands["from_event"].min(), bands["to_event"].max()), ylim=(0, 1.06 * highest / size))
    axes.set(xlabel="allocator event", ylabel=f"allocated ({unit})")
    peak = bands.iloc[int(bands["top_bytes"].to_numpy().argmax())]
    at_peak = bands[(bands["from_event"] <= peak["from_event"]) & (peak["from_event"] < bands["to_event"])]
    heights = (at_peak["top_bytes"] - at_peak["bottom_bytes"]).groupby(at_peak["category"]).sum()
    heights = heights[heights > 0].sort_values(ascending=False)
    parts = [(name, amount(value)) for name, value in heights.items()]
    return style.described(
        figure,
        f"{title}: allocations stacked over {int(bands['to_event'].max()):,} allocator events; the highest point, "
        f"{amount(float(peak['top_bytes']))}, is made of {spoken(parts)}.",
    )


def _draw_bands(axes: Any, bands: pd.DataFrame, size: float) -> list[Any]:
    """Draw the bands of each category; give what a legend needs."""
    handles: list[Any] = []
    for name, (colour, hatch) in LOOKS.items():
        rows = bands[bands["category"] == name]
        if rows.empty:
            continue
        sides = (rows["from_event"], rows["to_event"], rows["bottom_bytes"] / size, rows["top_bytes"] / size)
        if name == _OTHERS:
            # They have no bands of their own; white edges would fill the area.
            shapes, width = _areas(*sides), 0.0
        else:
            shapes, width = style.rectangles(*sides), 0.15
        axes.add_collection(PolyCollection(shapes, facecolor=colour, edgecolor="white", linewidth=width, hatch=hatch))
        handles.append(Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=name))
    return handles


def _areas(left: Any, right: Any, bottom: Any, top: Any) -> list[Any]:
    """Outline rectangles that follow each other as one shape: a hatch is drawn anew for each shape, which is slow."""
    sides = np.stack([left, right, bottom, top], 1).astype(float)
    sides = sides[np.argsort(sides[:, 0], kind="stable")]
    breaks = np.flatnonzero(sides[1:, 0] != sides[:-1, 1]) + 1
    shapes = []
    for run in np.split(sides, breaks):
        upper = run[:, [[0, 3], [1, 3]]].reshape(-1, 2)
        lower = run[:, [[0, 2], [1, 2]]].reshape(-1, 2)
        shapes.append(np.concatenate([upper, lower[::-1]]))
    return shapes


def memory_stacks(columns: Mapping[str, pd.Series], *, title: str = "What the memory is made of") -> Figure:
    """Bytes by item, one stacked bar each, to see totals and parts beside each other.

    Parameters
    ----------
    columns : mapping of str to Series
        One bar each: bytes, by item. Missing and negative values have no length; an item too small to see in any bar
        has no place in the legend.
    title : str, default "What the memory is made of"

    Returns
    -------
    matplotlib.figure.Figure
    """
    items = style.side_by_side(columns).clip(lower=0)
    totals = items.sum()
    visible = items.gt(1e-3 * totals.max()).any(axis=1)
    items = items[visible]
    figure, axes = style.new_figure(1.9 + 0.5 * max(len(columns), 1), title)
    if items.empty:
        return style.nothing(figure, axes, title, "nothing is known of this memory")
    size, unit = byte_unit(float(totals.max()))
    style.stack(axes, items / size, [LOOKS.get(str(item), _NO_LOOK) for item in items.index])
    ends = items.sum() / size
    sentences = []
    for row, (label, total) in enumerate(totals.items()):
        place = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
        axes.annotate(amount(total), (ends.iloc[row], row), **place)
        parts = [(item, amount(value)) for item, value in items.iloc[:, row].items() if value]
        sentences.append((label, f"{amount(total)} ({spoken(parts, most=9)})"))
    axes.set(xlim=(0, 1.14 * float(ends.max())), xlabel=f"memory ({unit})")
    style.legend(figure, 4)
    return style.described(figure, f"{title}, stacked bars: {spoken(sentences)}.")
