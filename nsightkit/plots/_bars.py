"""Bars: tables of times and shares as pictures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

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
    duration,
    spoken,
    time_unit,
)

_SERIES = (BLUE, VERMILION, GREEN, PURPLE, OCHRE, RED)
# Parts of a stack also differ without colour: those with the same hatch are five apart.
_COLOURS = (*_SERIES, DARK_GREY)
_HATCHES = (None, "//", "..", "\\\\", "xx")
#: Narrower than this share of its bar, a segment has no room for a number.
_ROOM = 0.055


def gap_bars(gaps: pd.DataFrame, *, title: str = "GPU idle time by cause") -> Figure:
    """Idle time of the GPU by cause.

    Parameters
    ----------
    gaps : DataFrame
        One row a cause with ``cause``, ``count``, ``total_ns`` and ``share_of_span`` (0 to 1), as
        :func:`nsightkit.analysis.timeline.gaps.summary` returns it.
    title : str, default "GPU idle time by cause"

    Returns
    -------
    matplotlib.figure.Figure
    """
    rows = gaps.sort_values("total_ns", ascending=False, kind="stable")
    shares = zip(rows["total_ns"], rows["share_of_span"], strict=True)
    bars = pd.DataFrame(
        {
            "name": rows["cause"].astype(str),
            "value": rows["total_ns"],
            "label": [f"{duration(total)} · {share:.1%} of span" for total, share in shares],
            "colour": [CAUSE_COLOURS.get(cause, GREY) for cause in rows["cause"]],
            "hatch": None,
        }
    )
    empty = "no gaps between GPU operations in this trace"
    return style.ranked_bars(bars, title=title, axis="idle time", unit_of=time_unit, empty=empty)


def kernel_bars(kernels: pd.DataFrame, *, top: int = 12, title: str = "GPU time by kernel") -> Figure:
    """GPU time of the kernels (or kernel categories) that took most of it.

    Parameters
    ----------
    kernels : DataFrame
        One row a kernel with ``name``, ``total_ns``, ``share`` (0 to 1) and ``count``, and ``category`` where there is
        one, as :func:`nsightkit.analysis.timeline.kernels.summary` returns it.
    top : int, default 12
        How many to draw; the rest becomes one bar.
    title : str, default "GPU time by kernel"

    Returns
    -------
    matplotlib.figure.Figure
    """
    rows = kernels.sort_values("total_ns", ascending=False, kind="stable")
    rows = style.first_rows(rows, top, "name", ("total_ns", "share", "count"))
    shares = zip(rows["share"], rows["count"], strict=True)
    labels = [f"{share:.1%} · {count:,} runs" for share, count in shares]
    bars = pd.DataFrame(
        {
            "name": rows["name"].astype(str),
            "value": rows["total_ns"],
            "label": labels,
            "colour": BLUE,
            "hatch": None,
        }
    )
    if len(kernels) > top:
        bars.loc[bars.index[-1], "colour"] = GREY
    by_category = "category" in rows and list(kernels["category"]) != list(kernels["name"])
    if by_category and rows["category"].nunique() > 1:
        # The bar of all others is of no category.
        bars["group"] = rows["category"].astype(object).fillna("").astype(str)
        palette = dict(zip(bars["group"].loc[bars["group"] != ""].unique(), _SERIES, strict=False))
        bars["colour"] = [palette.get(group, GREY) for group in bars["group"]]
        bars["group"] = bars["group"].where(bars["group"].isin(list(palette)), "")
    empty = "no kernels in this trace"
    return style.ranked_bars(bars, title=title, axis="time on the GPU", unit_of=time_unit, empty=empty)


def before_after(
    before: pd.DataFrame,
    after: pd.DataFrame,
    *,
    key: str = "cause",
    value: str = "total_ns",
    labels: tuple[str, str] = ("before", "after"),
    title: str = "Before and after",
    axis: str = "time",
) -> Figure:
    """Two results beside each other, row by row, to see whether the bottleneck moved.

    The ten rows with the larger of the two values are drawn.

    Parameters
    ----------
    before, after : DataFrame
        Results of the same analysis, one row a ``key``.
    key : str, default "cause"
        The column that names a row.
    value : str, default "total_ns"
        The column drawn, in nanoseconds.
    labels : tuple of str, default ("before", "after")
    title : str, default "Before and after"
    axis : str, default "time"
        What the times are, for the x axis.

    Returns
    -------
    matplotlib.figure.Figure
    """
    sums = [frame.groupby(frame[key].astype(str), sort=False)[value].sum() for frame in (before, after)]
    both = pd.concat(sums, axis=1, keys=("before", "after")).fillna(0)
    longest = both.max(axis=1).sort_values(ascending=False, kind="stable")
    both = both.loc[longest.index[:10]]
    figure, axes = style.new_figure(1.2 + 0.46 * max(len(both), 2), title)
    if both.empty:
        return style.nothing(figure, axes, title, "nothing to compare")
    size, unit = time_unit(both.to_numpy().max())
    places = np.arange(len(both))
    # Colours as in other figures; the hatch tells them apart without colour.
    first = axes.barh(places - 0.2, both["before"] / size, height=0.36, color=BLUE, label=style.plain(labels[0]))
    second = axes.barh(
        places + 0.2, both["after"] / size, height=0.36, color=VERMILION, hatch="//", label=style.plain(labels[1])
    )
    style.label_bars(axes, first, map(duration, both["before"]))
    style.label_bars(axes, second, map(duration, both["after"]))
    style.name_rows(axes, both.index)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    axes.set_xlabel(f"{axis} ({unit})")
    pairs = [(name, f"{duration(old)} then {duration(new)}") for name, old, new in both.itertuples()]
    return style.described(figure, f"{title}, pairs of bars ({labels[0]}, {labels[1]}): {spoken(pairs)}.")


def share_bars(columns: Mapping[str, pd.Series], *, title: str = "Shares of the whole") -> Figure:
    """Divide each whole among its parts, one bar a whole, to see where they disagree.

    Parameters
    ----------
    columns : mapping of str to Series
        One bar each: its parts, by name. Units may differ between bars, as each is drawn as shares of its own sum. A
        bar that sums to zero or holds only missing values is left out.
    title : str, default "Shares of the whole"

    Returns
    -------
    matplotlib.figure.Figure
    """
    sizes = style.side_by_side({label: v for label, v in columns.items() if pd.to_numeric(v).sum() > 0})
    figure, axes = style.new_figure(1.7 + 0.55 * max(sizes.shape[1], 1), title)
    if sizes.empty:
        return style.nothing(figure, axes, title, "nothing to divide in this trace")
    shares = sizes / sizes.sum()
    looks = _looks(shares.index)
    segments = style.stack(axes, shares, looks)
    for bars, (colour, _), widths in zip(segments, looks, shares.to_numpy(), strict=True):
        numbers = [f"{share:.0%}" if share >= _ROOM else "" for share in widths]
        # On a plate of the segment's colour: a hatch must not run through the digits.
        plate = {"facecolor": colour, "edgecolor": "none", "pad": 1.2}
        axes.bar_label(
            bars, numbers, label_type="center", fontsize=9, color="white", fontweight="bold", bbox=plate
        )  # fmt: skip
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.set(xlim=(0, 1), xlabel="share of the bar's whole")
    style.legend(figure, 4)
    sentences = []
    for label, column in shares.items():
        parts = [(part, f"{share:.0%}") for part, share in column.items() if share > 0]
        sentences.append((label, f"({spoken(parts, most=9)})"))
    return style.described(figure, f"{title}, stacked bars: {spoken(sentences)}.")


def _looks(parts: Iterable[str]) -> list[style.Look]:
    """Colours and hatches of a stack's parts: kinds of work have theirs in every figure."""
    parts = list(parts)
    colours = dict(zip(parts, cycle(_COLOURS), strict=False))
    # "optimizer" is the name of a phase, too: among phases it has no colour of its own.
    if 2 * sum(part in CATEGORY_COLOURS for part in parts) >= len(parts):
        colours = {part: CATEGORY_COLOURS.get(part, DARK_GREY) for part in parts}
    looks: list[style.Look] = []
    for part, hatch in zip(parts, cycle(_HATCHES), strict=False):
        if part.startswith("("):  # "(unattributed)" is not a part like others
            looks.append((GREY, None))
        else:
            looks.append((colours[part], hatch))
    return looks


def panels(frame: pd.DataFrame, columns: Sequence[str], *, title: str = "Side by side") -> Figure:
    """Several figures of the same things: a row of bars for each thing, a panel for each column.

    Parameters
    ----------
    frame : DataFrame
        One row a thing; its index names it.
    columns : sequence of str
        The columns to draw. Those named ``share…`` are drawn in percent on a scale to at least 100 %, those ending in
        ``_ns`` as times, others as plain numbers. A missing value has no bar and is labelled ``none``.
    title : str, default "Side by side"

    Returns
    -------
    matplotlib.figure.Figure
    """
    figure, grid = style.new_grid(1, len(columns), 1.3 + 0.32 * max(len(frame), 2), title, sharey=True)
    sentences = []
    for axes, column in zip(grid[0], columns, strict=True):
        words = _panel(axes, column, pd.to_numeric(frame[column]).to_numpy(dtype=float))
        sentences.append((axes.get_xlabel(), f"({spoken(zip(frame.index, words, strict=True), most=12)})"))
    style.name_rows(grid[0][0], frame.index, 24)
    return style.described(figure, f"{title}, bars: {spoken(sentences)}.")


def _panel(axes: Any, column: str, values: np.ndarray) -> list[str]:
    """Draw one column as bars; give their labels."""
    size = 1.0
    label = column
    if column.endswith("_ns"):
        size, unit = time_unit(float(np.nan_to_num(values).max(initial=0)) or 1.0)
        label = f"{column.removesuffix('_ns').replace('_', ' ')} ({unit})"
    words = [_written(column, value) for value in values]
    widths = np.nan_to_num(values / size)
    bars = axes.barh(np.arange(len(values)), widths, color=BLUE, height=0.66)
    axes.bar_label(bars, words, padding=3, fontsize=8)
    axes.set_xlim(0, widths.max(initial=0) * 1.45 or 1)
    axes.xaxis.set_major_locator(MaxNLocator(3))
    if column.startswith("share"):
        axes.xaxis.set_major_formatter(PercentFormatter(1))  # its own decimals: small shares need some
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel(label, fontsize=9)
    return words


def _written(column: str, value: float) -> str:
    """Write a value as the name of its column asks for."""
    if not np.isfinite(value):
        return "none"
    if column.endswith("_ns"):
        return duration(value)
    if column.startswith("share"):
        return f"{value:.1%}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
