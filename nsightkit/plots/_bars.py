"""Bars: tables of times and shares as pictures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from nsightkit.errors import UsageError
from nsightkit.plots import style
from nsightkit.plots._memory import LOOKS
from nsightkit.plots.looks import (
    BLUE,
    CATEGORY_COLOURS,
    DARK_GREY,
    GREEN,
    GREY,
    OCHRE,
    PURPLE,
    RED,
    VERMILION,
    amount,
    byte_unit,
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


def bars(rows: pd.DataFrame, *, top: int = 12, title: str = "The largest") -> Figure:
    """Draw the largest rows of a table: kernels, causes of gaps, or sites that allocated memory.

    Parameters
    ----------
    rows : DataFrame
        As ``kernels``, ``gaps`` and :func:`nsightkit.analysis.memory.snapshot.sites` return it: ``name``, ``cause`` or
        ``site``; ``total_ns`` or ``bytes``; ``share`` or ``share_of_span``; ``count``; and perhaps ``category``.
    top : int, default 12
        How many to draw; the rest becomes one bar.
    title : str

    Returns
    -------
    matplotlib.figure.Figure
    """
    key = _first_of(rows, "name", "cause", "site")
    value = _first_of(rows, "total_ns", "bytes")
    share = _first_of(rows, "share", "share_of_span")
    unit_of, written = (byte_unit, amount) if value == "bytes" else (time_unit, duration)
    figure, axes = style.new_figure(1.2 + 0.36 * max(min(len(rows), top + 1), 2), title)
    if rows.empty:
        return style.nothing(figure, axes, title, "nothing to draw")
    table = rows.sort_values(value, ascending=False, kind="stable")
    shown = table.head(top)[[key, value, share, "count"]].astype({key: str})
    groups = _groups(table, key).head(top).tolist()
    rest = table.iloc[top:]
    if len(rest):
        shown.loc[len(table)] = [f"{len(rest)} others", rest[value].sum(), rest[share].sum(), rest["count"].sum()]
        groups.append("")
    size, unit = unit_of(float(shown[value].max()))
    labels = []
    for amount_of, share_of, count in zip(shown[value], shown[share], shown["count"], strict=True):
        labels.append(f"{written(amount_of)} · {share_of:.1%} · {count:,}x")
    looks = [LOOKS.get(group, (GREY, None)) for group in groups]
    drawn = axes.barh(
        np.arange(len(shown)),
        shown[value].to_numpy(float) / size,
        height=0.68,
        color=[colour for colour, _ in looks],
        hatch=[hatch for _, hatch in looks],
        edgecolor="white",
    )
    style.label_bars(axes, drawn, labels)
    style.name_rows(axes, shown[key])
    axes.set_xlabel(f"{'memory' if value == 'bytes' else 'time'} ({unit})")
    first = {group: drawn[groups.index(group)] for group in groups if group}
    if len(first) > 1 and list(first) != list(shown[key].head(len(first))):
        style.legend(figure, 4, {style.plain(group): bar for group, bar in first.items()})
    return style.described(figure, f"{title}, bars: {spoken(zip(shown[key], labels, strict=True))}.")


def _first_of(rows: pd.DataFrame, *names: str) -> str:
    """The first of the columns that a table has."""
    for name in names:
        if name in rows:
            return name
    raise UsageError(f"bars: the table has none of the columns {', '.join(names)}")


def _groups(table: pd.DataFrame, key: str) -> pd.Series:
    """What decides the colour of each row: its category, else its own name; nothing where there is no such look."""
    groups = table["category"] if "category" in table else table[key]
    return groups.astype(object).fillna("").astype(str)


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
