"""Memory over time, at its peak, and in the allocator's segments."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from nsightkit.plots._style import (
    BLUE,
    DARK_GREY,
    GREEN,
    GREY,
    OCHRE,
    PURPLE,
    RED,
    VERMILION,
    first_rows,
    label_bars,
    name_rows,
    new_figure,
    nothing,
    spoken,
)

#: Colour and hatch of a category; hatched ones share a colour with another.
_CATEGORIES: dict[str, tuple[str, str]] = {
    "weights": (BLUE, ""),
    "optimizer states": (OCHRE, ""),
    "gradients": (VERMILION, ""),
    "activations": (GREEN, ""),
    "logits": (PURPLE, ""),
    "autocast copies": (BLUE, "//"),
    "KV cache": (PURPLE, "//"),
    "communication": (OCHRE, "//"),
    "workspaces": (VERMILION, "//"),
    "inputs": (GREEN, "//"),
    "temporary": (RED, ""),
    "before recording": (DARK_GREY, ""),
    "unknown": (GREY, "//"),
}
_OTHERS = "smaller allocations"
_CATEGORIES[_OTHERS] = (GREY, "..")
_STATES = (("allocated", BLUE, ""), ("freed, waiting for a stream", RED, "//"), ("free", "none", ""))


def _scale(largest: float) -> tuple[float, str]:
    return next(((size, unit) for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if largest >= size), (1.0, "B"))


def _amount(value: float) -> str:
    size, unit = _scale(value)
    return f"{value / size:.3g} {unit}" if value / size < 999.5 else f"{value / size:.0f} {unit}"


def _rectangles(left: Any, right: Any, bottom: Any, top: Any) -> Any:
    corners = (left, bottom), (right, bottom), (right, top), (left, top)
    return np.stack([np.stack([np.asarray(x, float), np.asarray(y, float)], -1) for x, y in corners], 1)


def _areas(left: Any, right: Any, bottom: Any, top: Any) -> list[Any]:
    """Outline rectangles that follow each other as one shape: a hatch is drawn anew for each shape, which is slow."""
    order = np.argsort(np.asarray(left), kind="stable")
    left, right, bottom, top = (np.asarray(side, float)[order] for side in (left, right, bottom, top))
    joined = np.flatnonzero(left[1:] != right[:-1]) + 1
    shapes = []
    for run in np.split(np.arange(len(order)), joined):
        x = np.stack([left[run], right[run]], 1).ravel()
        lower, upper = (np.repeat(side[run], 2) for side in (bottom, top))
        shapes.append(np.concatenate([np.stack([x, upper], 1), np.stack([x, lower], 1)[::-1]]))
    return shapes


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
    figure, axes = new_figure(4.2, title)
    if bands.empty or not bands["top_bytes"].max() > 0:
        return nothing(figure, axes, title, "nothing was allocated")
    highest = float(bands["top_bytes"].max())
    if timeline is not None:
        highest = max(highest, float(timeline["reserved_bytes"].max()))
    scale, unit = _scale(highest)
    names = bands["category"].where(bands["category"].notna(), _OTHERS).astype(str)
    known = [c for c in _CATEGORIES if (names == c).any()]
    handles = []
    for name in known:
        rows = bands[names == name]
        colour, hatch = _CATEGORIES.get(name, (GREY, ""))
        outline = _areas if name == _OTHERS else _rectangles
        shapes = outline(rows["from_event"], rows["to_event"], rows["bottom_bytes"] / scale, rows["top_bytes"] / scale)
        # The others have no bands of their own; edges would fill the area.
        axes.add_collection(
            PolyCollection(
                shapes,
                facecolor=colour,
                edgecolor="white" if name != _OTHERS else colour,
                linewidth=0.15 if name != _OTHERS else 0.4,
                hatch=hatch or None,
            )
        )
        handles.append(Patch(facecolor=colour, hatch=hatch or None, edgecolor="white", label=name))
    if timeline is not None:
        at = _thinned(timeline["reserved_bytes"].to_numpy())
        handles += axes.step(
            timeline["event"].to_numpy()[at],
            timeline["reserved_bytes"].to_numpy()[at] / scale,
            where="post",
            color=DARK_GREY,
            linewidth=1.2,
            label="reserved",
        )
    axes.set_xlim(bands["from_event"].min(), bands["to_event"].max())
    axes.set_ylim(0, 1.06 * highest / scale)
    axes.set_xlabel("allocator event")
    axes.set_ylabel(f"allocated ({unit})")
    axes.legend(handles=handles[::-1], frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    peak = bands.iloc[int(bands["top_bytes"].to_numpy().argmax())]
    at_peak = bands[(bands["from_event"] <= peak["from_event"]) & (peak["from_event"] < bands["to_event"])]
    heights = (at_peak["top_bytes"] - at_peak["bottom_bytes"]).groupby(names[at_peak.index]).sum()
    said = [(name, _amount(value)) for name, value in heights.sort_values(ascending=False).items() if value]
    figure.set_label(
        f"{title}: allocations stacked over {int(bands['to_event'].max()):,} allocator events; the highest point, "
        f"{_amount(float(peak['top_bytes']))}, is made of {spoken(said)}."
    )
    return figure


def _thinned(level: Any) -> Any:
    """Keep the points where a step changes."""
    keep = np.ones(len(level), bool)
    keep[1:-1] = level[1:-1] != level[:-2]
    return keep


def memory_bars(sites: pd.DataFrame, *, top: int = 12, title: str = "Memory at the peak by who allocated it") -> Figure:
    """The lines (or categories) that held most memory at a moment.

    Parameters
    ----------
    sites : DataFrame
        One row a site with ``site, category, bytes, count`` and ``share`` (0 to 1), as
        :func:`nsightkit.analysis.memory.snapshot.sites` returns it.
    top : int, default 12
        How many to draw; the rest becomes one bar.
    title : str, default "Memory at the peak by who allocated it"

    Returns
    -------
    matplotlib.figure.Figure
    """
    rows = sites.sort_values("bytes", ascending=False, kind="stable")
    shown = first_rows(rows.astype({"category": str}), top, "site", ("bytes", "count", "share"))
    figure, axes = new_figure(1.2 + 0.34 * max(len(shown), 2), title)
    if rows.empty:
        return nothing(figure, axes, title, "nothing was allocated")
    names, categories = list(shown["site"]), list(shown["category"].fillna(_OTHERS))
    scale, unit = _scale(shown["bytes"].max())
    labels = [
        f"{share:.1%} · {n:,} block{'' if n == 1 else 's'}"
        for share, n in zip(shown["share"], shown["count"], strict=True)
    ]
    looks = [_CATEGORIES.get(category, (GREY, "")) for category in categories]
    bars = axes.barh(
        np.arange(len(names)), shown["bytes"].to_numpy(float) / scale, color=[colour for colour, _ in looks],
        height=0.68, edgecolor="white", hatch=[hatch or None for _, hatch in looks],
    )  # fmt: skip
    label_bars(axes, bars, labels)
    axes.margins(x=0.3)
    name_rows(axes, names, 40)
    known = [category for category in _CATEGORIES if category in categories and category != _OTHERS]
    handles = [bars[categories.index(category)] for category in known]
    axes.legend(handles, known, loc="lower right", frameon=False, fontsize=9)
    axes.set_xlabel(f"allocated ({unit})")
    said = [(f"{name} ({c})", label) for name, c, label in zip(names, categories, labels, strict=True)]
    figure.set_label(f"{title}, horizontal bars: {spoken(said)}.")
    return figure


def segment_map(
    segments: pd.DataFrame,
    blocks: pd.DataFrame,
    *,
    by: Literal["total_bytes", "free_bytes"] = "total_bytes",
    top: int = 30,
    title: str = "The allocator's segments",
) -> Figure:
    """The largest segments as rows, and in each what is allocated, waiting to be free, and free.

    Parameters
    ----------
    segments : DataFrame
        As :func:`nsightkit.analysis.memory.snapshot.segments` returns it.
    blocks : DataFrame
        The live blocks of the same moment, as :func:`nsightkit.analysis.memory.snapshot.at` returns them.
    by : {"total_bytes", "free_bytes"}
        Which segments come first: the largest, or those with most free space.
    top : int, default 30
        How many segments.
    title : str, default "The allocator's segments"

    Returns
    -------
    matplotlib.figure.Figure
    """
    rows = segments.sort_values([by, "total_bytes", "address"], ascending=[False, False, True], kind="stable").head(top)
    figure, axes = new_figure(1.4 + 0.2 * max(len(rows), 3), title)
    if rows.empty:
        return nothing(figure, axes, title, "no segments")
    scale, unit = _scale(float(rows["total_bytes"].max()))
    by_address = rows.reset_index(drop=True).sort_values("address")
    begin, row_of = by_address["address"].to_numpy(), by_address.index.to_numpy()
    end = begin + by_address["total_bytes"].to_numpy()
    address, size = blocks["address"].to_numpy(), blocks["size_bytes"].to_numpy()
    which = np.searchsorted(begin, address, side="right") - 1
    inside = (which >= 0) & (address < end[which])
    which, address, size = which[inside], address[inside], size[inside]
    pending = blocks["pending"].to_numpy(bool)[inside]
    row = np.arange(len(rows))
    totals = rows["total_bytes"].to_numpy() / scale
    axes.add_collection(
        PolyCollection(_rectangles(0 * totals, totals, row - 0.4, row + 0.4), facecolor="none", edgecolor=GREY)
    )
    handles = []
    for (name, colour, hatch), chosen in zip(_STATES, (~pending, pending, None), strict=True):
        handles.append(Patch(facecolor=colour, hatch=hatch or None, edgecolor=GREY, label=name))
        if chosen is None or not chosen.any():
            continue
        left = (address - begin[which])[chosen] / scale
        line = row_of[which[chosen]]
        shapes = _rectangles(left, left + size[chosen] / scale, line - 0.4, line + 0.4)
        axes.add_collection(
            PolyCollection(shapes, facecolor=colour, edgecolor="white", linewidth=0.3, hatch=hatch or None)
        )
    axes.set_xlim(0, 1.02 * float(totals.max()))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks([])
    left_out = len(segments) - len(rows)
    axes.set_ylabel(f"{len(rows)} segments" + (f" of {len(segments)}" if left_out else ""))
    axes.set_xlabel(f"place in the segment ({unit})")
    handles = [h for h in handles if h.get_label() != _STATES[1][0] or pending.any()]
    axes.legend(handles=handles, frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    total, free = int(segments["total_bytes"].sum()), int(segments["free_bytes"].sum())
    figure.set_label(
        f"{title}: {len(rows)} of {len(segments)} segments as rows, each filled with its live blocks. All segments "
        f"hold {_amount(total)}, of which {_amount(free)} are free; the largest free block is "
        f"{_amount(int(segments['largest_free_bytes'].max()))}."
    )
    return figure
