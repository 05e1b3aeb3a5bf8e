"""Memory: over time, at its peak, what it is made of, and how it grows with a size."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import ArrayLike

from nsightkit.analysis.core.text import count_text
from nsightkit.plots._style import (
    decades,
    finished,
    first_rows,
    name_rows,
    new_figure,
    nothing,
    plain,
    ranked_bars,
    rectangles,
    side_by_side,
    stack,
)
from nsightkit.plots.looks import BLUE, DARK_GREY, GREEN, GREY, OCHRE, PURPLE, RED, VERMILION, spoken

#: Colour and hatch of what memory holds, as snapshots and as ledgers name it; hatched ones share a colour with another.
_LOOKS: dict[str, tuple[str, str | None]] = {
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
# Curves can be told apart without colour.
_CURVES = ((BLUE, "-", "o"), (VERMILION, "--", "s"), (GREEN, "-.", "D"), (PURPLE, ":", "^"), (OCHRE, "-", "v"))


def _scale(largest: float) -> tuple[float, str]:
    return next(((size, unit) for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if largest >= size), (1.0, "B"))


def _amount(value: float) -> str:
    size, unit = _scale(value)
    return f"{value / size:.3g} {unit}" if value / size < 999.5 else f"{value / size:.0f} {unit}"


def _areas(left: Any, right: Any, bottom: Any, top: Any) -> list[Any]:
    """Outline rectangles that follow each other as one shape: a hatch is drawn anew for each shape, which is slow."""
    sides = np.stack([left, right, bottom, top], 1).astype(float)
    sides = sides[np.argsort(sides[:, 0], kind="stable")]
    runs = np.split(sides, np.flatnonzero(sides[1:, 0] != sides[:-1, 1]) + 1)
    # Along the tops, and back along the bottoms.
    along = ([run[:, [[0, side], [1, side]]].reshape(-1, 2) for side in (3, 2)] for run in runs)
    return [np.concatenate([upper, lower[::-1]]) for upper, lower in along]


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
    highest = float(max(bands["top_bytes"].max(), 0 if timeline is None else timeline["reserved_bytes"].max()))
    scale, unit = _scale(highest)
    names = bands["category"].astype(object).fillna(_OTHERS).astype(str)
    handles: list[Any] = []
    for name, (colour, hatch) in _LOOKS.items():
        rows = bands[names == name]
        if rows.empty:
            continue
        # The others have no bands of their own; white edges would fill the area.
        outline, width = (_areas, 0.0) if name == _OTHERS else (rectangles, 0.15)
        shapes = outline(rows["from_event"], rows["to_event"], rows["bottom_bytes"] / scale, rows["top_bytes"] / scale)
        axes.add_collection(PolyCollection(shapes, facecolor=colour, edgecolor="white", linewidth=width, hatch=hatch))
        handles.append(Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=name))
    if timeline is not None:
        event, level = timeline["event"].to_numpy(), timeline["reserved_bytes"].to_numpy()
        at = np.union1d(np.flatnonzero(np.diff(level)) + 1, [0, len(level) - 1])  # only where it changes
        handles += axes.step(event[at], level[at] / scale, where="post", color="black", linewidth=1.2, label="reserved")
    axes.legend(handles=handles[::-1], frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    peak = bands.iloc[int(bands["top_bytes"].to_numpy().argmax())]
    at_peak = bands[(bands["from_event"] <= peak["from_event"]) & (peak["from_event"] < bands["to_event"])]
    heights = (at_peak["top_bytes"] - at_peak["bottom_bytes"]).groupby(names).sum().sort_values(ascending=False)
    said = [(name, _amount(value)) for name, value in heights.items() if value]
    return finished(
        figure,
        axes,
        f"{title}: allocations stacked over {int(bands['to_event'].max()):,} allocator events; the highest point, "
        f"{_amount(float(peak['top_bytes']))}, is made of {spoken(said)}.",
        xlim=(bands["from_event"].min(), bands["to_event"].max()),
        ylim=(0, 1.06 * highest / scale),
        xlabel="allocator event",
        ylabel=f"allocated ({unit})",
    )


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
    rows = sites.astype({"category": str}).sort_values("bytes", ascending=False, kind="stable")
    shown = first_rows(rows, top, "site", ("bytes", "count", "share"))
    categories = list(shown["category"].fillna(_OTHERS))
    labels = [
        f"{share:.1%} · {count_text(n, 'block')}" for share, n in zip(shown["share"], shown["count"], strict=True)
    ]
    return ranked_bars(
        shown["site"], shown["bytes"], labels, [_LOOKS.get(category, (GREY, None)) for category in categories],
        title=title, axis="allocated", unit_of=_scale, empty="nothing was allocated", edgecolor="white",
        said=[f"{name} ({category})" for name, category in zip(shown["site"], categories, strict=True)],
        legend={kind: categories.index(kind) for kind in _LOOKS if kind in categories and kind != _OTHERS},
    )  # fmt: skip


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
    table = side_by_side(columns).clip(lower=0)
    totals = table.sum()
    table = table[table.gt(1e-3 * totals.max()).any(axis=1)]  # less than that of the longest bar is too thin to see
    figure, axes = new_figure(1.9 + 0.5 * max(len(columns), 1), title)
    if table.empty:
        return nothing(figure, axes, title, "nothing is known of this memory")
    scale, unit = _scale(float(totals.max()))
    widths = table / scale
    stack(axes, widths, [_LOOKS.get(str(item), (GREY, None)) for item in table.index])
    ends = widths.cumsum().iloc[-1]
    for row, (end, total) in enumerate(zip(ends, totals, strict=True)):
        axes.annotate(_amount(total), (end, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
    name_rows(axes, table.columns)
    said = [
        (label, f"{_amount(total)} ({spoken([(i, _amount(s)) for i, s in items.items() if s], most=9)})")
        for total, (label, items) in zip(totals, table.items(), strict=True)
    ]
    return finished(
        figure, axes, f"{title}, stacked bars: {spoken(said)}.", legend=4, xlim=(0, 1.14 * float(ends.max())),
        xlabel=f"memory ({unit})",
    )  # fmt: skip


def memory_curves(
    predicted: Mapping[str, tuple[ArrayLike, ArrayLike]],
    measured: Mapping[str, tuple[ArrayLike, ArrayLike]],
    *,
    failed: Mapping[str, float] | None = None,
    limit_bytes: float | None = None,
    title: str = "Memory against context",
) -> Figure:
    """Bytes against the context on logarithmic axes: predicted as lines, measured as points, failures as crosses.

    Parameters
    ----------
    predicted, measured : mapping of str to (array of shape (n,), array of shape (n,))
        Contexts in tokens and bytes by series; a series has one colour in both.
    failed : mapping of str to float, optional
        The context at which a series ran out of memory.
    limit_bytes : float, optional
        A line: the memory there is. Crosses lie on it, and without it nowhere.
    title : str, default "Memory against context"

    Returns
    -------
    matplotlib.figure.Figure
    """
    figure, axes = new_figure(3.8, title)
    names = list(dict.fromkeys([*predicted, *measured]))
    if not names:
        return nothing(figure, axes, title, "nothing to draw")
    failed = failed if failed and limit_bytes is not None else {}
    said, lowest = [], np.inf
    for name, (colour, dash, marker) in zip(names, cycle(_CURVES), strict=False):
        words = []
        for kind, series, style in (
            ("predicted", predicted, {"linestyle": dash, "linewidth": 1.8}),
            ("measured", measured, {"linestyle": "none", "marker": marker, "markersize": 6}),
        ):
            if name in series:
                sizes, values = (np.asarray(part, dtype=float) for part in series[name])
                axes.plot(sizes, values, color=colour, label=f"{plain(name, 40)}, {kind}", **style)
                lowest = values.min(initial=lowest)
                words += [f"{kind} {_amount(values[0])} to {_amount(values[-1])}"] if len(values) else []
        if name in failed:
            axes.plot([failed[name]], [limit_bytes], color=colour, marker="X", markersize=10, linestyle="none")
            words.append(f"out of memory at {failed[name]:g}")
        said.append((name, ", ".join(words)))
    if failed:
        axes.plot([], [], color=GREY, marker="X", markersize=10, linestyle="none", label="out of memory")
    axes.set_xscale("log", base=2)
    axes.set(
        yscale="log", xlabel="context (tokens)", ylabel="memory at the peak",
        ylim=(lowest / 2 if np.isfinite(lowest) else None, limit_bytes and 3 * limit_bytes),
    )  # fmt: skip
    if limit_bytes is not None:
        axes.axhline(limit_bytes, color=DARK_GREY, linewidth=1.5)
        axes.annotate(
            f"limit, {_amount(limit_bytes)}", (0, limit_bytes), xycoords=("axes fraction", "data"), xytext=(4, 4),
            textcoords="offset points", fontsize=9,
        )  # fmt: skip
    axes.xaxis.set_major_formatter("{x:g}")
    decades(axes.yaxis, _amount, *axes.get_ylim())
    return finished(figure, axes, f"{title}, logarithmic axes: {spoken(said)}.", legend=2)
