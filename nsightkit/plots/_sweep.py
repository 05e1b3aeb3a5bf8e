"""A sweep over context lengths on logarithmic axes: time with what launching costs, memory with where it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from nsightkit.plots._style import LINES, finished, new_grid, nothing, plain
from nsightkit.plots.looks import DARK_GREY, GREY, duration, spoken, tick

#: An implementation of attention has the same style in every figure that draws each of them once.
_IMPLEMENTATIONS = ("naive", "naive-compiled", "math", "efficient", "flash", "cudnn")
_DIRECTIONS = ("forward", "backward")
_LINE = ["implementation", "precision", "d"]
#: Marks on the line of the limit, by the column that says where: in the figure and in its legend.
_ENDS = {
    "context": ({"marker": "X", "markersize": 8}, {"marker": "X"}),
    "largest_context": (
        {"marker": "|", "markersize": 18, "markeredgewidth": 1.8},
        {"marker": "|", "markersize": 12},
    ),
}


def sweep_times(table: pd.DataFrame, flat: pd.DataFrame | None = None, *, title: str = "Time of a pass") -> Figure:
    """Time of one pass against the context length, one line an implementation, forward and backward.

    Parameters
    ----------
    table : DataFrame
        Rows of a sweep: those to be drawn, one line for each implementation, precision and width among them.
    flat : DataFrame, optional
        Some of the same rows: marks where time does not grow.
    title : str, default "Time of a pass"

    Returns
    -------
    matplotlib.figure.Figure
    """
    figure, panels, lines = _figure(table, "median_ns", title, "median of a pass", "nothing was timed")
    said: list[tuple[object, str]] = []
    for axes, way, drawn in panels:
        for label, rows, style in drawn:
            context, ns = rows["context"].to_numpy(float), rows["median_ns"].to_numpy(float)
            half = ns * rows["spread"].to_numpy(float) / 2
            axes.fill_between(context, np.maximum(ns - half, ns / 2), ns + half, color=style["color"], alpha=0.25, lw=0)
            said.append((label, f"{duration(ns[0])} at {context[0]:.0f}, {duration(ns[-1])} at {context[-1]:.0f}"))
        ends = () if flat is None else flat.loc[(flat["direction"] == way) & (flat["context"] > 0), "context"]
        if len(ends):
            begin = float(table["context"].min())
            axes.axvspan(begin, float(max(ends)), color=GREY, alpha=0.15, lw=0)
            axes.annotate(
                "time does not grow", (begin, 1), xycoords=("data", "axes fraction"), xytext=(3, -4),
                textcoords="offset points", va="top", fontsize=8,
            )  # fmt: skip
        axes.yaxis.set_major_formatter(lambda ns, _: tick(ns))
    return _explained(figure, lines, {}, title, said, most=12)


def sweep_memory(
    table: pd.DataFrame, limit_bytes: float | None = None, forecast: pd.DataFrame | None = None, *,
    limit: str = "limit", title: str = "Peak memory",
) -> Figure:  # fmt: skip
    """Peak memory against the context length, with the limit, where it was forecast to be reached and where it was.

    Parameters
    ----------
    table : DataFrame
        Rows of a sweep: those to be drawn.
    limit_bytes : float, optional
        What tensors can have: drawn as a line.
    forecast : DataFrame, optional
        The longest context that should fit, of each line.
    limit : str, default "limit"
        What the limit is, in words.
    title : str, default "Peak memory"

    Returns
    -------
    matplotlib.figure.Figure
    """
    figure, panels, lines = _figure(table, "peak_bytes", title, "peak of allocated memory", "nothing was measured")
    said: list[tuple[object, str]] = []
    marks: dict[str, Any] = {}
    for axes, way, drawn in panels:
        said += [
            (label, f"{_size(rows['peak_bytes'].iloc[-1])} at {rows['context'].iloc[-1]:.0f}")
            for label, rows, _ in drawn
        ]
        if limit_bytes is not None:
            axes.axhline(limit_bytes, color=DARK_GREY, linewidth=1.2)
            axes.annotate(
                f"{plain(limit)}, {_size(limit_bytes)}", (0, limit_bytes), xycoords=("axes fraction", "data"),
                xytext=(3, 3), textcoords="offset points", fontsize=8,
            )  # fmt: skip
            marks |= _ends(axes, table, forecast, way, limit_bytes, lines, said)
        axes.yaxis.set(
            major_formatter=lambda size, _: _size(size), major_locator=LogLocator(2, numticks=9),
            minor_locator=NullLocator(),
        )  # fmt: skip
    return _explained(figure, lines, marks, title, said, most=16)


def _ends(
    axes: Any, table: pd.DataFrame, forecast: pd.DataFrame | None, way: str, limit: float, lines: dict[Any, Any],
    said: list[tuple[object, str]],
) -> dict[str, Any]:  # fmt: skip
    """Mark on the limit's line where memory was to run out, and where it did."""
    marks: dict[str, Any] = {}
    found = [("measured: out of memory", table[table["status"] == "oom"], "context", "ran out of memory at")]
    if forecast is not None:
        shown = forecast[forecast["largest_context"].between(1, 2 * table["context"].max())]
        found.append(("forecast: the longest that fits", shown, "largest_context", "was to fit up to"))
    for key, (label, style) in lines.items():
        for what, rows, column, words in found:
            for context in rows.loc[_is(rows, key, way), column].iloc[:1].astype(float):
                axes.plot([context], [limit], color=style["color"], lw=0, **_ENDS[column][0])
                said.append((f"{label} {way}", f"{words} {context:.0f}"))
                marks[what] = _ENDS[column][1]
    return marks


def _figure(
    table: pd.DataFrame, value: str, title: str, axis: str, empty: str
) -> tuple[Figure, list[tuple[Any, str, list[Any]]], dict[Any, Any]]:
    """Draw the lines of the two directions; give the axes with the lines that each has, and the look of all lines."""
    contexts = sorted(set(table["context"].astype(float)))
    table = table[table[value].notna()]
    figure, (grid,) = new_grid(1, 2, 4.0, title, sharey=True, sharex=True)
    keys = list(table[_LINE].drop_duplicates().itertuples(index=False, name=None))
    names = [key[0] for key in keys]
    known = len(set(names)) == len(names) and set(names) <= set(_IMPLEMENTATIONS)
    styles = [LINES[_IMPLEMENTATIONS.index(name)] for name in names] if known else LINES * 20
    lines = {}
    for key, (colour, dash) in zip(keys, styles, strict=False):
        label = f"{key[0]}, {key[1]}" + (f", d = {key[2]}" if table["d"].nunique() > 1 else "")
        lines[key] = (label, {"color": colour, "linestyle": dash, "linewidth": 2, "marker": ".", "markersize": 6})
    panels = []
    for axes, way in zip(grid, _DIRECTIONS, strict=True):
        axes.set_title(way, loc="left", fontsize=10)
        drawn = [
            (f"{label} {way}", rows, style)
            for key, (label, style) in lines.items()
            if len(rows := table[_is(table, key, way)].sort_values("context"))
        ]
        if drawn:
            panels.append((axes, way, drawn))
        else:
            nothing(figure, axes, title, empty)
    for axes, _, drawn in panels:
        for _, rows, style in drawn:
            axes.plot(rows["context"].to_numpy(float), rows[value].to_numpy(float), **style)
        _guides(axes, contexts[-1], float(table[value].min()))
        _scales(axes, contexts)
    grid[0].set_ylabel(axis)
    return figure, panels, lines


def _is(table: pd.DataFrame, key: tuple[Any, ...], way: str) -> pd.Series:
    return (table[[*_LINE, "direction"]] == [*key, way]).all(axis=1)


def _guides(axes: Any, last: float, lowest: float) -> None:
    """Show how steep a line is that grows with the context, and with its square, below all lines that grow."""
    begin = last / 8
    for power, name in ((1, "O(S)"), (2, "O(S²)")):
        high = lowest * (last / begin) ** power
        axes.plot([begin, last], [lowest, high], color=GREY, linewidth=1, linestyle=(0, (1, 2)), zorder=0)
        axes.annotate(
            name, (last, high), xytext=(3, 0), textcoords="offset points", ha="left", va="center", fontsize=8,
            color=DARK_GREY,
        )  # fmt: skip


def _scales(axes: Any, places: Sequence[float]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set(
        major_locator=FixedLocator(places), minor_locator=NullLocator(),
        major_formatter=lambda s, _: f"{s / 1024:g}k" if s >= 1024 else f"{s:g}",
    )  # fmt: skip
    axes.tick_params(axis="x", labelsize=8, rotation=45 if len(places) > 7 else 0)
    # Right of the lines there is room for the names of the guides.
    axes.set(xlim=(places[0] / 1.3, places[-1] * 2.3), xlabel="context length S")


def _explained(
    figure: Figure, lines: dict[Any, Any], marks: dict[str, Any], title: str, said: list[tuple[object, str]], most: int
) -> Figure:
    """Give the figure its legend and its sentence."""
    handles = {plain(label, 60): Line2D([], [], **style) for label, style in lines.values()}
    handles |= {label: Line2D([], [], color=GREY, lw=0, **marks[label]) for label in sorted(marks)}
    sentence = f"{title}, against the context length on logarithmic axes: {spoken(said, most=most)}."
    return finished(figure, figure.axes[0], sentence, legend=3 if handles else 0, handles=handles)


def _size(size: float) -> str:
    binary = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
    return next((f"{size / bytes_:.3g} {unit}" for bytes_, unit in binary if size >= bytes_), f"{size:.0f} B")
