"""A sweep over context lengths on logarithmic axes: time with what launching costs, memory with where it ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from nsightkit.plots._curves import tick
from nsightkit.plots._style import (
    BLUE,
    DARK_GREY,
    GREEN,
    GREY,
    OCHRE,
    PURPLE,
    RED,
    VERMILION,
    duration,
    nothing,
    plain,
    spoken,
)  # fmt: skip

# Told apart without colour, too; marks stay for those that mean something.
_STYLES = (
    (BLUE, "-"), (VERMILION, "--"), (GREEN, "-."), (PURPLE, ":"), (OCHRE, (0, (5, 1, 1, 1, 1, 1))), (RED, (0, (3, 1))),
)  # fmt: skip
#: An implementation of attention has the same style in every figure that draws each of them once.
_IMPLEMENTATIONS = ("naive", "naive-compiled", "math", "efficient", "flash", "cudnn")
_DIRECTIONS = ("forward", "backward")
_LINE = ["implementation", "precision", "d"]


def sweep_times(table: pd.DataFrame, flat: pd.DataFrame | None = None, *, title: str = "Time of a pass") -> Figure:
    """Time of one pass against the context length, one line an implementation, forward and backward.

    Parameters
    ----------
    table : DataFrame
        Rows of :func:`nsightkit.investigations.pages.sweep.cells`: those to be drawn, one line for each implementation,
        precision and width among them.
    flat : DataFrame, optional
        Of :func:`nsightkit.investigations.pages.sweep.launch_bound`, of the same rows: marks where time does not grow.
    title : str, default "Time of a pass"

    Returns
    -------
    matplotlib.figure.Figure
    """
    figure, grid, lines = _figure(table[table["median_ns"].notna()], title)
    said = []
    for axes, way in zip(grid, _DIRECTIONS, strict=True):
        drawn = list(_drawn(table[table["median_ns"].notna()], way, lines))
        if not drawn:
            nothing(figure, axes, title, "nothing was timed")
            continue
        for label, rows, style in drawn:
            context, ns = rows["context"].to_numpy(float), rows["median_ns"].to_numpy(float)
            half = rows["median_ns"].to_numpy(float) * rows["spread"].to_numpy(float) / 2
            axes.plot(context, ns, **style)
            axes.fill_between(context, np.maximum(ns - half, ns / 2), ns + half, color=style["color"], alpha=0.25, lw=0)
            said.append((f"{label} {way}", f"{duration(ns[0])} at {context[0]:.0f}, {duration(ns[-1])} at {_at(rows)}"))
        longest = max((rows for _, rows, _ in drawn), key=lambda rows: float(rows["median_ns"].iloc[-1]))
        end = longest.iloc[-1]
        _guides(axes, table["context"], float(end["context"]), float(end["median_ns"]))
        if flat is not None:
            mine = flat[(flat["direction"] == way) & (flat["context"] > 0)]
            if len(mine):
                axes.axvspan(float(table["context"].min()), float(mine["context"].max()), color=GREY, alpha=0.15, lw=0)
                axes.annotate(
                    "time does not grow", (float(table["context"].min()), 1), xycoords=("data", "axes fraction"),
                    xytext=(3, -4), textcoords="offset points", va="top", fontsize=8,
                )  # fmt: skip
        axes.yaxis.set_major_formatter(FuncFormatter(lambda ns, _: tick(ns)))
        _context_axis(axes, table["context"])
    grid[0].set_ylabel("median of a pass")
    _legend(figure, lines, [])
    figure.set_label(f"{title}, against the context length on logarithmic axes: {spoken(said, most=12)}.")
    return figure


def sweep_memory(
    table: pd.DataFrame, limit_bytes: float | None = None, forecast: pd.DataFrame | None = None, *,
    limit: str = "limit", title: str = "Peak memory",
) -> Figure:  # fmt: skip
    """Peak memory against the context length, with the limit, where it was forecast to be reached and where it was.

    Parameters
    ----------
    table : DataFrame
        Rows of :func:`nsightkit.investigations.pages.sweep.cells`: those to be drawn.
    limit_bytes : float, optional
        What tensors can have: drawn as a line.
    forecast : DataFrame, optional
        Of :func:`nsightkit.investigations.pages.sweep.forecast`, one or several put together: the longest context that
        should fit.
    limit : str, default "limit"
        What the limit is, in words.
    title : str, default "Peak memory"

    Returns
    -------
    matplotlib.figure.Figure
    """
    figure, grid, lines = _figure(table[table["peak_bytes"].notna()], title)
    said: list[tuple[object, str]] = []
    marks: list[str] = []
    for axes, way in zip(grid, _DIRECTIONS, strict=True):
        drawn = list(_drawn(table[table["peak_bytes"].notna()], way, lines))
        if not drawn:
            nothing(figure, axes, title, "nothing was measured")
            continue
        for label, rows, style in drawn:
            axes.plot(rows["context"].to_numpy(float), rows["peak_bytes"].to_numpy(float), **style)
            said.append((f"{label} {way}", f"{_size(rows['peak_bytes'].iloc[-1])} at {_at(rows)}"))
        end = max((rows.iloc[-1] for _, rows, _ in drawn), key=lambda row: float(row["peak_bytes"]))
        _guides(axes, table["context"], float(end["context"]), float(end["peak_bytes"]))
        if limit_bytes is not None:
            axes.axhline(limit_bytes, color=DARK_GREY, linewidth=1.2)
            axes.annotate(
                f"{plain(limit)}, {_size(limit_bytes)}", (0, limit_bytes), xycoords=("axes fraction", "data"),
                xytext=(3, 3), textcoords="offset points", fontsize=8,
            )  # fmt: skip
            marks += _ends(axes, table, forecast, way, limit_bytes, lines, said)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: _size(size)))
        axes.yaxis.set_major_locator(LogLocator(2, numticks=9))
        axes.yaxis.set_minor_locator(NullLocator())
        _context_axis(axes, table["context"])
    grid[0].set_ylabel("peak of allocated memory")
    _legend(figure, lines, sorted(set(marks)))
    figure.set_label(f"{title}, against the context length on logarithmic axes: {spoken(said, most=16)}.")
    return figure


def _ends(
    axes: Any, table: pd.DataFrame, forecast: pd.DataFrame | None, way: str, limit: float, lines: dict[Any, Any],
    said: list[tuple[object, str]],
) -> list[str]:  # fmt: skip
    """Mark on the limit's line where memory was to run out, and where it did."""
    marks = []
    for key, (label, style) in lines.items():
        ran_out = table[_is(table, key) & (table["direction"] == way) & (table["status"] == "oom")]
        if len(ran_out):
            axes.plot(ran_out["context"].iloc[:1], [limit], marker="X", markersize=9, color=style["color"], lw=0)
            said.append((f"{label} {way}", f"ran out of memory at {ran_out['context'].iloc[0]:.0f}"))
            marks.append("measured: out of memory")
        if forecast is None:
            continue
        mine = forecast[_is(forecast, key) & (forecast["direction"] == way)]
        mine = mine[mine["largest_context"].between(1, 2 * table["context"].max())]
        if len(mine):
            axes.plot(
                mine["largest_context"].iloc[:1].astype(float), [limit], marker="D", markersize=8, lw=0,
                color=style["color"], markerfacecolor="none", markeredgewidth=1.8,
            )  # fmt: skip
            said.append((f"{label} {way}", f"was to fit up to {mine['largest_context'].iloc[0]}"))
            marks.append("forecast: the longest that fits")
    return marks


def _figure(table: pd.DataFrame, title: str) -> tuple[Figure, Any, dict[Any, Any]]:
    figure, grid = plt.subplots(1, 2, figsize=(7.6, 4.0), layout="constrained", sharey=True, sharex=True)
    figure.suptitle(plain(title), x=0.01, ha="left", fontsize="large")
    for axes, way in zip(grid, _DIRECTIONS, strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(way, loc="left", fontsize=10)
    keys = list(table[_LINE].drop_duplicates().itertuples(index=False, name=None))
    widths = table["d"].nunique() > 1
    lines = {}
    names = [key[0] for key in keys]
    known = len(set(names)) == len(names) and set(names) <= set(_IMPLEMENTATIONS)
    styles = [_STYLES[_IMPLEMENTATIONS.index(name)] for name in names] if known else _STYLES * 20
    for key, (colour, dash) in zip(keys, styles, strict=False):
        label = f"{key[0]}, {key[1]}" + (f", d = {key[2]}" if widths else "")
        lines[key] = (label, {"color": colour, "linestyle": dash, "linewidth": 2, "marker": ".", "markersize": 6})
    return figure, grid, lines


def _is(table: pd.DataFrame, key: tuple[Any, ...]) -> pd.Series:
    return (table[_LINE] == list(key)).all(axis=1)


def _drawn(table: pd.DataFrame, way: str, lines: dict[Any, Any]) -> Iterator[tuple[str, pd.DataFrame, dict[str, Any]]]:
    for key, (label, style) in lines.items():
        rows = table[_is(table, key) & (table["direction"] == way)].sort_values("context")
        if len(rows):
            yield label, rows, style


def _guides(axes: Any, contexts: pd.Series, end: float, height: float) -> None:
    """Draw what grows with the context, and with its square, from the end of the highest line back."""
    begin = max(float(contexts.min()), end / 16)
    for power, name in ((1, "O(S)"), (2, "O(S²)")):
        # Above the lines, so that it hides none.
        high = 2.2 * height
        axes.plot([begin, end], [high * (begin / end) ** power, high], color=GREY, linewidth=1, zorder=0)
        axes.annotate(
            name, (begin, high * (begin / end) ** power), xytext=(7, -5), textcoords="offset points", ha="left",
            va="center", fontsize=8,
        )  # fmt: skip


def _context_axis(axes: Any, contexts: pd.Series) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10) if axes.get_yscale() == "linear" else None
    places = sorted(set(contexts.astype(float)))
    axes.xaxis.set_major_locator(FixedLocator(places))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda s, _: f"{s / 1024:g}k" if s >= 1024 else f"{s:g}"))
    axes.tick_params(axis="x", labelsize=8, rotation=45 if len(places) > 7 else 0)
    axes.set_xlim(places[0] / 1.3, places[-1] * 1.3)
    axes.set_xlabel("context length S")


def _legend(figure: Figure, lines: dict[Any, Any], marks: list[str]) -> None:
    handles: list[Any] = [Line2D([], [], label=plain(label, 60), **style) for label, style in lines.values()]
    shapes = {"f": {"marker": "D", "markerfacecolor": "none"}, "m": {"marker": "X"}}
    handles += [Line2D([], [], color=GREY, lw=0, label=mark, **shapes[mark[0]]) for mark in marks]  # type: ignore[arg-type]
    if handles:
        figure.legend(handles=handles, frameon=False, fontsize=9, loc="outside lower center", ncols=3)


def _at(rows: pd.DataFrame) -> str:
    return f"{rows['context'].iloc[-1]:.0f}"


def _size(size: float) -> str:
    for unit, bytes_ in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= bytes_:
            return f"{size / bytes_:.3g} {unit}"
    return f"{size:.0f} B"
