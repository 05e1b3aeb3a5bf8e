"""Bars: tables of times and shares as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from nsightkit.plots import style
from nsightkit.plots.looks import BLUE, GREY, QUANTITIES, duration, part_name, spoken, time_unit


def bars(rows: pd.DataFrame, *, top: int = 12, title: str = "The largest") -> Figure:
    """Draw the largest rows of a table: kernels, causes of gaps, or sites that allocated memory.

    Parameters
    ----------
    rows : DataFrame
        As ``kernels``, ``gaps`` and :func:`nsightkit.analysis.memory.snapshot.sites` return it: a name in the first
        column; ``total_ns`` or ``bytes``; ``share`` or ``share_of_span``; ``count``; and perhaps ``category``.
    top : int, default 12
        How many to draw; the rest becomes one bar, their sum.
    title : str

    Returns
    -------
    matplotlib.figure.Figure
    """
    name_column = str(rows.columns[0])
    share_column = "share_of_span"
    if "share" in rows:
        share_column = "share"
    value_column, quantity = ("bytes", "memory") if "bytes" in rows else ("total_ns", "time")
    unit_of, write = QUANTITIES[quantity]
    table = rows.sort_values(value_column, ascending=False, kind="stable")
    shown = table.head(top).to_dict("records")
    rest = table.iloc[top:]
    if len(rest):
        sums = rest[[value_column, share_column, "count"]].sum()
        shown.append({**sums.to_dict(), name_column: f"{len(rest)} others", "category": ""})
    figure, axes = style.new_figure(1.2 + 0.36 * max(len(shown), 2), title)
    if not shown:
        return style.draw_nothing(figure, axes, title, "nothing to draw")
    size, unit = unit_of(max(row[value_column] for row in shown))
    names_and_values: list[tuple[object, str]] = []
    for row in shown:
        name = row[name_column]
        # Kernels have a colour by category. Causes have none: the name itself is the group, and needs no legend.
        group = str(row.get("category", name))
        colour, hatch = style.LOOKS.get(group, (GREY, ""))
        # Matplotlib leaves a label that starts with "_" out of the legend.
        label = "_"
        if group not in ("", name):
            label = style.plain(group)
        bar = axes.barh(
            len(names_and_values),
            row[value_column] / size,
            height=0.68,
            color=colour,
            hatch=hatch,
            edgecolor="white",
            linewidth=0.3,  # a wider edge hides thin bars
            label=label,
        )
        value = f"{write(row[value_column])} · {row[share_column]:.1%} · {row['count']:,.0f}x"
        axes.bar_label(bar, [value], padding=4, fontsize=9)
        names_and_values.append((part_name(name), value))
    axes.margins(x=0.22)  # room for the longest bar's value
    axes.set_xlim(left=0)
    style.name_rows(axes, [name for name, _ in names_and_values])
    axes.set_xlabel(f"{quantity} ({unit})")
    style.legend(figure, 4)
    return style.described(figure, f"{title}, bars: {spoken(names_and_values)}.")


def panels(frame: pd.DataFrame, columns: Sequence[str], *, title: str = "Side by side") -> Figure:
    """Draw several numbers of the same things: a row of bars for each thing, a panel for each number.

    Parameters
    ----------
    frame : DataFrame
        One row per thing; its index names it.
    columns : sequence of str
        The columns to draw. Those named ``share…`` are drawn in percent, those ending in ``_ns`` as times, speedups
        as bars from 1 to the value, others as plain numbers. A missing value has no bar and is labelled ``n/a``.
    title : str, default "Side by side"

    Returns
    -------
    matplotlib.figure.Figure
    """
    figure, grid = style.new_grid(len(columns), 1.3 + 0.32 * max(len(frame), 2), title, sharey=True)
    sentences = []
    for axes, column in zip(grid, columns, strict=True):
        value_labels = _draw_column(axes, column, pd.to_numeric(frame[column]).astype(float))
        sentences.append((axes.get_xlabel(), f"({spoken(value_labels.items(), most=12)})"))
    style.name_rows(grid[0], frame.index, 24)
    return style.described(figure, f"{title}, bars: {spoken(sentences)}.")


def _draw_column(axes: Any, column: str, values: pd.Series) -> pd.Series:
    """Draw one column as bars, without the names of the rows; return the values as text, with the index of `values`."""
    write = _short_number
    label = column
    begin = 0  # of the bars
    if "speedup" in column:
        write = "{:.2f}x".format
        begin = 1
    ends = values.fillna(begin)
    if column.endswith("_ns"):
        write = duration
        size, unit = time_unit(ends.max())
        ends = ends / size
        label = f"{column.removesuffix('_ns').replace('_', ' ')} ({unit})"
    axes.xaxis.set_major_locator(MaxNLocator(3))
    if column.startswith("share"):
        write = "{:.1%}".format
        axes.xaxis.set_major_formatter(PercentFormatter(1))  # its own decimals: small shares need some
    axes.set_xlabel(label, fontsize=9)
    value_labels = values.map(write, na_action="ignore").fillna("n/a")
    lengths = ends - begin
    drawn = axes.barh(np.arange(len(values)), lengths, left=begin, color=BLUE, height=0.66)
    axes.bar_label(drawn, value_labels.tolist(), padding=3, fontsize=8)
    # Room for the label of the longest bar; slowdowns have theirs to the left. An axis without bars is 1 long: 0 comes
    # first, so that it wins against the NaN of no rows.
    axes.set_xlim(begin + 1.45 * min(0, lengths.min()), begin + (1.45 * max(0, lengths.max()) or 1))
    axes.tick_params(axis="x", labelsize=8)
    return value_labels


def _short_number(value: float) -> str:
    """Write a number with three digits, or all digits before the point."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
