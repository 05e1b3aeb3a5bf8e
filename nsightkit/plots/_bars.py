"""Bars and points: tables of times and shares as pictures."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from nsightkit.analysis.core.text import short_name
from nsightkit.plots._style import (
    finished,
    first_rows,
    label_bars,
    name_rows,
    new_figure,
    new_grid,
    nothing,
    plain,
    ranked_bars,
    side_by_side,
    stack,
)
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
#: Narrower than this a segment has no room for its share.
_ROOM = 0.055
_DASHES = ("-", "--", ":", "-.")
#: How sure a change is, in the order of the legend; by marker as well as by colour.
_MARKS = {
    "significant": (VERMILION, "o"),
    "exceeds step spread": (VERMILION, "D"),
    "exceeds launch spread": (VERMILION, "P"),
    "unsure": (OCHRE, "^"),
    "within noise": (BLUE, "s"),
    "small": (BLUE, "v"),
    "cannot tell": (GREY, "D"),
    "negligible": (GREY, "v"),
}
#: What all such names begin with: it fills the room in which they differ.
_PREFIX = re.compile(
    r"(void )?(autograd::engine::evaluate_function: )?(at::native::)?(\(anonymous namespace\)::)?(aten::)?"
)


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
    labels = [
        f"{duration(total)} · {share:.1%} of span"
        for total, share in zip(rows["total_ns"], rows["share_of_span"], strict=True)
    ]
    return ranked_bars(
        rows["cause"], rows["total_ns"], labels, [(CAUSE_COLOURS.get(cause, GREY), None) for cause in rows["cause"]],
        title=title, axis="idle time", unit_of=time_unit, row_height=0.36, longest=44,
        empty="no gaps between GPU operations in this trace",
    )  # fmt: skip


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
    shown = first_rows(rows, top, "name", ("total_ns", "share", "count"))
    # The bar of all others is of no category.
    groups = [str(group) for group in shown.get("category", shown["name"])[:top]] + [""] * (len(rows) > top)
    kinds = [group for group in dict.fromkeys(groups) if group]
    by_category = "category" in rows and len(kinds) > 1 and list(rows["category"]) != list(rows["name"])
    palette = dict(zip(kinds, _SERIES, strict=False)) if by_category else dict.fromkeys(kinds, BLUE)
    labels = [f"{share:.1%} · {count:,} runs" for share, count in zip(shown["share"], shown["count"], strict=True)]
    return ranked_bars(
        shown["name"], shown["total_ns"], labels, [(palette.get(group, GREY), None) for group in groups], title=title,
        axis="time on the GPU", unit_of=time_unit, empty="no kernels in this trace", legend_title="category",
        legend={plain(kind): groups.index(kind) for kind in palette} if by_category else None,
    )  # fmt: skip


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
    both = both.loc[both.max(axis=1).sort_values(ascending=False, kind="stable").index[:10]]
    figure, axes = new_figure(1.2 + 0.46 * max(len(both), 2), title)
    if both.empty:
        return nothing(figure, axes, title, "nothing to compare")
    scale, unit = time_unit(both.to_numpy().max())
    looks = ((-0.2, BLUE, None), (0.2, VERMILION, "//"))  # as in other figures, and told apart without colour
    for (_, values), label, (offset, colour, hatch) in zip(both.items(), labels, looks, strict=True):
        rows, look = np.arange(len(both)) + offset, {"height": 0.36, "color": colour, "hatch": hatch}
        label_bars(axes, axes.barh(rows, values / scale, label=plain(label), **look), map(duration, values))
    name_rows(axes, both.index)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    pairs = [(name, f"{duration(b)} then {duration(a)}") for name, b, a in both.itertuples()]
    return finished(
        figure, axes, f"{title}, pairs of bars ({labels[0]}, {labels[1]}): {spoken(pairs)}.", xlabel=f"{axis} ({unit})"
    )


def change_intervals(rows: pd.DataFrame, *, top: int = 12, title: str = "What changed") -> Figure:
    """Changes of a step's parts as points, each with its interval; 0 is not a change.

    Parameters
    ----------
    rows : DataFrame
        A table of :func:`nsightkit.analysis.compare.diff.compare`, or several, one below the other: ``delta_ns, low_ns,
        high_ns, before_ns, after_ns, significance``, and ``name``, ``cause`` or ``kind``, with ``clock`` where there is
        one.
    top : int, default 12
        How many to draw, from the first.
    title : str, default "What changed"

    Returns
    -------
    matplotlib.figure.Figure
    """
    shown = rows.head(top)
    # Names of rows leave the axes too little width for a title of their own.
    figure, ((axes,),) = new_grid(1, 1, 1.5 + 0.34 * max(len(shown), 2), title)
    if shown.empty:
        return nothing(figure, axes, title, "nothing to compare")
    delta, low, high = (shown[c].to_numpy(np.float64) for c in ("delta_ns", "low_ns", "high_ns"))
    low, high = (np.where(np.isfinite(end), end, delta) for end in (low, high))
    scale, unit = time_unit(max(float(np.abs([low, high, delta]).max()), 1.0))
    axes.axvline(0, color=GREY, linewidth=1)
    for kind, (colour, marker) in _MARKS.items():
        at = np.flatnonzero(shown["significance"] == kind)
        if len(at):
            axes.hlines(at, low[at] / scale, high[at] / scale, color=colour, linewidth=2)
            axes.plot(delta[at] / scale, at, marker, color=colour, markersize=6, label=kind, linestyle="none")
    said = [
        (_named(row), f"{duration(row['before_ns'])} then {duration(row['after_ns'])}, {row['significance']}")
        for row in shown.to_dict("records")
    ]
    name_rows(axes, [name for name, _ in said])
    return finished(
        figure, axes, f"{title}, points with intervals around no change: {spoken(said, most=12)}.", legend=len(_MARKS),
        ylim=(len(shown) - 0.4, -0.6), xlabel=f"change of a step's time ({unit}), with its interval",
    )  # fmt: skip


def _named(row: Mapping[Hashable, Any]) -> str:
    name = next((str(row[c]) for c in ("name", "cause", "kind") if isinstance(row.get(c), str)), "").removesuffix("_ns")
    name = short_name(name) if isinstance(row.get("before_names"), list) else name  # which kernels have
    return f"{name} ({row['clock']})" if isinstance(row.get("clock"), str) else name


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
    sizes = side_by_side({label: v for label, v in columns.items() if pd.to_numeric(v).sum() > 0})
    figure, axes = new_figure(1.7 + 0.55 * max(sizes.shape[1], 1), title)
    if sizes.empty:
        return nothing(figure, axes, title, "nothing to divide in this trace")
    table = sizes / sizes.sum()
    looks = _looks(table.index)
    for bars, (colour, _), widths in zip(stack(axes, table, looks), looks, table.to_numpy(), strict=True):
        # On a plate of the segment's colour: a hatch must not run through the digits.
        axes.bar_label(
            bars, [f"{share:.0%}" if share >= _ROOM else "" for share in widths], label_type="center", fontsize=9,
            color="white", fontweight="bold", bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.2},
        )  # fmt: skip
    name_rows(axes, table)
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    said = [
        (label, f"({spoken([(p, f'{s:.0%}') for p, s in column.items() if s > 0], most=9)})")
        for label, column in table.items()
    ]
    return finished(
        figure,
        axes,
        f"{title}, stacked bars: {spoken(said)}.",
        legend=4,
        xlim=(0, 1),
        xlabel="share of the bar's whole",
    )


def _looks(parts: Iterable[str]) -> list[tuple[str, str | None]]:
    """Colours and hatches of a stack's parts: kinds of work have theirs in every figure."""
    each = list(zip(parts, cycle(_COLOURS), cycle(_HATCHES), strict=False))
    # "optimizer" is the name of a phase, too: among phases it has no colour of its own.
    if 2 * sum(part in CATEGORY_COLOURS for part, _, _ in each) >= len(each) > 0:
        return [(CATEGORY_COLOURS.get(part, DARK_GREY), hatch) for part, _, hatch in each]
    # "(unattributed)" is not a part like others.
    return [(GREY, None) if part.startswith("(") else (colour, hatch) for part, colour, hatch in each]


def ladder_bars(
    times: pd.DataFrame,
    parts: Mapping[str, pd.Series],
    floors: Mapping[str, float],
    *,
    title: str = "Time of a rung",
) -> Figure:
    """Stacked bars of time, one a rung, with lines for the least time there could be.

    Parameters
    ----------
    times : DataFrame
        ``rung``, ``time_ns``, ``low_ns`` and ``high_ns``.
    parts : mapping of str to Series
        By rung, nanoseconds by kind of work; all but the five largest kinds are drawn as one. What they leave of the
        time is drawn as the rest; where they are more than it, for a profiler makes a CPU slower, they are drawn in
        proportion.
    floors : mapping of str to float
        Least times in nanoseconds, by what they are the least of.
    title : str, default "Time of a rung"

    Returns
    -------
    matplotlib.figure.Figure
    """
    figure, axes = new_figure(1.9 + 0.38 * max(len(times), 2), title)
    if times.empty:
        return nothing(figure, axes, title, "no rung was measured")
    rungs, total = list(times["rung"]), times["time_ns"].to_numpy(float)
    table = pd.DataFrame({rung: parts.get(rung, pd.Series(dtype=float)) for rung in rungs}).fillna(0.0)
    table = table.loc[table.sum(axis=1).sort_values(ascending=False, kind="stable").index]
    if len(table) > 6:
        few = table.drop(index="other", errors="ignore").head(5)
        table = pd.concat([few, table.drop(index=few.index).sum().to_frame("other").T])
    spent = table.sum().to_numpy()
    scale, unit = time_unit(float(max(total.max(), 0.0, *floors.values())))
    widths = table * np.minimum(1.0, np.divide(total, spent, out=np.ones_like(total), where=spent > 0)) / scale
    stack(axes, widths, _looks(table.index), height=0.66)
    ends = widths.cumsum().to_numpy()[-1] if len(widths) else np.zeros(len(rungs))
    rows, rest = np.arange(len(rungs)), total / scale - ends
    if (rest > 1e-3 * total / scale).any():
        axes.barh(rows, rest, left=ends, height=0.66, color="white", edgecolor=GREY, hatch="..", label="idle")
    spread = np.abs(times[["low_ns", "high_ns"]].to_numpy(float).T - total) / scale
    axes.errorbar(total / scale, rows, xerr=spread, fmt="none", ecolor="black", elinewidth=1.2, capsize=2.5)
    for (what, floor), dashes in zip(floors.items(), _DASHES, strict=False):
        axes.axvline(floor / scale, color="black", linewidth=1.2, linestyle=dashes, label=plain(what, 60))
    name_rows(axes, rungs)
    said = spoken([(rung, duration(ns)) for rung, ns in zip(rungs, total, strict=True)], most=12)
    least = f"; lines at {spoken([(what, duration(ns)) for what, ns in floors.items()])}" if floors else ""
    return finished(
        figure, axes, f"{title}, stacked bars by kind of work: {said}{least}.", legend=3,
        xlabel=f"time of a layer ({unit})",
    )  # fmt: skip


def ladder_slots(
    rungs: pd.DataFrame,
    lines: Mapping[str, float],
    measured: Mapping[str, float] | None = None,
    *,
    title: str = "A ladder",
) -> Figure:
    """Draw how fast each rung of a ladder can be at best, and below it how fast it was, or a place kept for that.

    Parameters
    ----------
    rungs : DataFrame
        ``rung, least_ns, lower_ns``.
    lines : mapping of str to float
        Times in nanoseconds to draw as lines, by what they are.
    measured : mapping of str to float, optional
        Nanoseconds by rung; a rung that is not in it is awaiting a GPU.
    title : str, default "A ladder"

    Returns
    -------
    matplotlib.figure.Figure
    """
    figure, axes = new_figure(2.0 + 0.62 * len(rungs), title)
    least, lower = (rungs[column].to_numpy(float) for column in ("least_ns", "lower_ns"))
    known = {} if measured is None else dict(measured)
    took = rungs["rung"].map(known).to_numpy(float)
    longest = float(np.nanmax([*least, *took, *lines.values()]))
    scale, unit = time_unit(longest)
    rows, height = np.arange(len(rungs)), 0.34
    axes.barh(rows - 0.2, lower / scale, height=height, color=BLUE, label="at best, predicted")
    fused = np.flatnonzero(least > lower)
    if len(fused):
        axes.barh(
            fused - 0.2, (least - lower)[fused] / scale, left=lower[fused] / scale, height=height, color=BLUE,
            hatch="//", alpha=0.6, edgecolor="white", label="what fusing can still remove",
        )  # fmt: skip
    if known:
        axes.barh(rows + 0.2, took / scale, height=height, color=VERMILION, label="measured")
    said = []
    for row, rung in enumerate(rungs["rung"]):
        best = " to ".join(dict.fromkeys(duration(ns) for ns in (lower[row], least[row])))
        here, colour = ("awaiting a GPU", DARK_GREY) if np.isnan(took[row]) else (duration(took[row]), "white")
        # Inside the bars: behind their ends the lines would run through the words.
        beside: dict[str, Any] = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
        axes.annotate(best, (0, row - 0.2), color="white", **beside)
        axes.annotate(here, (0, row + 0.2), color=colour, **beside)
        said.append((rung, f"{best} at best, {here}"))
    for (what, at), dashes in zip(lines.items(), _DASHES[1:], strict=False):
        axes.axvline(at / scale, color=RED, linewidth=1.5, linestyle=dashes, label=plain(f"{what}: {duration(at)}", 70))
    name_rows(axes, rungs["rung"])
    goals = spoken([(what, duration(at)) for what, at in lines.items()])
    return finished(
        figure, axes, f"{title}, bars: {spoken(said)}; lines at {goals}.", legend=2, xlim=(0, 1.2 * longest / scale),
        ylim=(len(rungs) - 0.5, -0.5), xlabel=f"time of a layer ({unit})",
    )  # fmt: skip


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
    figure, grid = new_grid(1, len(columns), 1.3 + 0.32 * max(len(frame), 2), title, sharey=True)
    said = []
    for axes, column in zip(grid[0], columns, strict=True):
        values = pd.to_numeric(frame[column]).to_numpy(dtype=float)
        write, scale, label = _readable(column, values)
        widths, words = np.nan_to_num(values / scale), [write(v) if np.isfinite(v) else "none" for v in values]
        axes.bar_label(axes.barh(np.arange(len(values)), widths, color=BLUE, height=0.66), words, padding=3, fontsize=8)
        axes.set_xlim(0, widths.max(initial=0) * 1.45 or 1)
        axes.xaxis.set_major_locator(MaxNLocator(3))
        if column.startswith("share"):
            axes.xaxis.set_major_formatter(PercentFormatter(1))  # its own decimals: small shares need some
        axes.tick_params(axis="x", labelsize=8)
        axes.set_xlabel(label, fontsize=9)
        said.append((label, f"({spoken(zip(frame.index, words, strict=True), most=12)})"))
    name_rows(grid[0][0], frame.index, 24)
    return finished(figure, grid[0][0], f"{title}, bars: {spoken(said)}.")


def _readable(column: str, values: Any) -> tuple[Any, float, str]:
    """Say how a column's values are written, what they are divided by, and the name of their axis."""
    if column.endswith("_ns"):
        scale, unit = time_unit(float(np.nan_to_num(values).max(initial=0)) or 1.0)
        return duration, scale, f"{column.removesuffix('_ns').replace('_', ' ')} ({unit})"
    if column.startswith("share"):
        return "{:.1%}".format, 1.0, column
    return lambda v: f"{v:,.0f}" if abs(v) >= 100 else f"{v:.3g}", 1.0, column


def small_multiples(tables: Mapping[str, pd.DataFrame], *, top: int = 5, title: str = "The longest of each") -> Figure:
    """One small chart a trace: the names that took most of its time, with one colour a category in all of them.

    Parameters
    ----------
    tables : mapping of str to DataFrame
        Results of :func:`nsightkit.analysis.timeline.kernels.summary`: ``name``, ``category``, ``total_ns``, ``share``.
    top : int, default 5
        Names a chart.
    title : str, default "The longest of each"

    Returns
    -------
    matplotlib.figure.Figure
    """
    shown = {
        label: table.assign(name=table["name"].astype(str).str.replace(_PREFIX, "", n=1, regex=True)).nlargest(
            top, "total_ns"
        )
        for label, table in tables.items()
        if len(table)
    }
    rows = -(-max(len(shown), 1) // 2)
    figure, grid = new_grid(rows, 2, 0.9 + rows * (0.5 + 0.3 * top), title, sharex=True)
    if not shown:
        return nothing(figure, grid[0][0], title, "nothing to draw")
    handles: dict[str, Any] = {}
    for axes, (label, table) in zip(grid.flat, shown.items(), strict=False):
        axes.set_title(plain(label, 40), loc="left", fontsize=9)
        kinds = ["other" if kind not in CATEGORY_COLOURS else str(kind) for kind in table["category"]]
        bars = axes.barh(
            np.arange(len(table)) + 0.26, table["share"], color=[CATEGORY_COLOURS[kind] for kind in kinds], height=0.34
        )
        # Names stand above their bars: beside them they would take the room of the chart, and on them hide it.
        for row, (name, share) in enumerate(zip(table["name"], table["share"], strict=True)):
            axes.annotate(
                f"{share:.0%}  {plain(name, 46)}", (0, row - 0.16), xytext=(3, 0),
                textcoords="offset points", va="center", fontsize=7.5,
            )  # fmt: skip
        axes.set(yticks=[], ylim=(top - 0.5, -0.5))
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.tick_params(axis="x", labelsize=8)
        handles = dict(zip(kinds, bars, strict=True)) | handles
    for axes in grid.flat[len(shown) :]:
        axes.set_axis_off()
    said = [(label, f"{t['name'].iloc[0]} {t['share'].iloc[0]:.0%}") for label, t in shown.items()]
    return finished(
        figure, grid[0][0], f"{title}, small bar charts; the first of each: {spoken(said, most=12)}.", legend=4,
        handles={kind: handles[kind] for kind in CATEGORY_COLOURS if kind in handles},
    )  # fmt: skip
