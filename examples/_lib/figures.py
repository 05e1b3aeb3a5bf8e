"""Figures that one page needs, or two; those of any trace are in ``nsightkit.plots``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.collections import PolyCollection
from matplotlib.colors import ListedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator, PercentFormatter
from numpy.typing import ArrayLike

from nsightkit.analysis.memory import snapshot as snapshots
from nsightkit.analysis.ranks.job import waited
from nsightkit.analysis.roofline.counters import classify
from nsightkit.plots import style
from nsightkit.plots.looks import (
    BLUE,
    DARK_GREY,
    GREEN,
    GREY,
    MEMORY,
    OCHRE,
    PURPLE,
    RED,
    VERMILION,
    amount,
    byte_unit,
    duration,
    part_name,
    spoken,
    time_unit,
)
from nsightkit.text import short_name
from nsightkit.trace.snapshot import Snapshot

_DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (3, 1)))
#: Colours and dashes of series, which also differ without colour.
_LINES = tuple(zip(style.SERIES, _DASHES, strict=True))
_BESIDE: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9}


def _decades(axis: Any, write: Callable[[float], str], low: float, high: float) -> None:
    """Mark powers of ten on an axis, and 2 and 5 times them where there are few."""
    marked = (1.0,) if high / low > 100 else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(10, marked))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: write(value))


def _time_axis(axes: Any, label: str, first: float, last: float) -> None:
    """Make the x axis one of times on a logarithmic scale."""
    axes.set(xscale="log", xlim=(first, last), xlabel=label)
    _decades(axes.xaxis, duration, first, last)


def distributions(samples: Mapping[str, ArrayLike], *, title: str) -> Figure:
    """Draw cumulative distributions of times: for each time, which share of the samples is at most that long.

    Parameters
    ----------
    samples : mapping of str to array of shape (n,)
        Times in nanoseconds by series; those of 0 or less have no place on a logarithmic axis and are left out.
    title : str
    """
    series = {}
    for label, values in samples.items():
        times = np.sort(np.asarray(values, dtype=float))
        series[label] = times[times > 0]
    figure, axes = style.new_figure(3.6, title)
    # From 0 at the left edge to 1 at the right one, so that a series of equal times is a step rather than a dot.
    left = min(times[0] for times in series.values()) / 1.5
    right = max(times[-1] for times in series.values()) * 1.5
    sentences = []
    for (label, times), (colour, dashes) in zip(series.items(), cycle(_LINES), strict=False):
        shares = np.arange(1, len(times) + 1) / len(times)
        median = f"median {duration(float(np.median(times)))}"
        look = {"color": colour, "linestyle": dashes, "linewidth": 2, "label": f"{style.plain(label, 40)}, {median}"}
        axes.step([left, *times, right], [0.0, *shares, 1.0], where="post", **look)
        sentences.append((label, f"{median} of {len(times):,}"))
    _time_axis(axes, "duration", left, right)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set(ylabel="share no longer than this", ylim=(0, 1.03))
    style.legend(figure, 2)
    return style.described(figure, f"{title}, cumulative distributions of the duration: {spoken(sentences)}.")


def share_curves(
    periods_ns: ArrayLike, shares: Mapping[str, ArrayLike], levels: Mapping[str, float], *, title: str
) -> Figure:
    """Draw what a sampler would report against the length of its window, with the true share as a level.

    Parameters
    ----------
    periods_ns : array of shape (n,)
        Nanoseconds, positive and ascending.
    shares : mapping of str to array of shape (n,)
        What it would report, 0 to 1, by series.
    levels : mapping of str to float
        The true share, 0 to 1, of the series that have one: a thin line of its colour.
    title : str
    """
    periods = np.asarray(periods_ns, dtype=float)
    figure, axes = style.new_figure(3.6, title)
    sentences = []
    for (label, series), (colour, dashes) in zip(shares.items(), cycle(_LINES), strict=False):
        values = np.asarray(series, dtype=float)
        axes.plot(periods, values, color=colour, linestyle=dashes, linewidth=2, label=style.plain(label))
        first = f"{values[0]:.1%} at {duration(periods[0])}"
        last = f"{values[-1]:.1%} at {duration(periods[-1])}"
        sentences.append((label, f"from {first} to {last}"))
        if label in levels:
            true = f"true share {levels[label]:.1%}"
            axes.axhline(levels[label], color=colour, linewidth=0.9)
            low = levels[label] < 0.3  # below such a line are the axis and other labels
            place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "ha": "right"}
            place["va"] = "bottom" if low else "top"
            axes.annotate(true, (1, levels[label]), (0, 2 if low else -4), color=colour, **place, **_BESIDE)
            sentences.append((f"{label}, level", true))
    _time_axis(axes, "sampling window", periods[0], periods[-1])
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set(ylabel="reported share", ylim=(0, 1.05))
    style.legend(figure, 2)
    return style.described(figure, f"{title}, reported share by sampling window: {spoken(sentences)}.")


#: How sure a change is: its colour and marker.
_SURE = {"changed": (VERMILION, "o"), "within noise": (BLUE, "s"), "inconclusive": (GREY, "D")}


def change_intervals(rows: pd.DataFrame, *, title: str, top: int = 12) -> Figure:
    """Draw changes of a step's parts as points, each with its interval; 0 is not a change.

    Parameters
    ----------
    rows : DataFrame
        Tables of :func:`nsightkit.analysis.compare.diff.compare`, one below the other: ``name, delta_ns, low_ns,
        high_ns, before_ns, after_ns, significance``, with ``clock`` and ``before_names`` where they have them.
    title : str
    top : int, default 12
        How many to draw, from the first.
    """
    shown = rows.head(top).reset_index(drop=True)
    # Names of rows leave the axes too little width for a separate title.
    figure, (axes,) = style.new_grid(1, 1.5 + 0.34 * max(len(shown), 2), title)
    ends = shown[["delta_ns", "low_ns", "high_ns"]].astype(float)
    ends = ends.apply(lambda column: column.fillna(ends["delta_ns"]))
    size, unit = time_unit(max(ends.abs().max(axis=None), 1.0))
    axes.axvline(0, color=GREY, linewidth=1)
    for word, (colour, marker) in _SURE.items():
        own = ends[shown["significance"] == word] / size
        if len(own):
            axes.hlines(own.index, own["low_ns"], own["high_ns"], color=colour, linewidth=2)
            axes.plot(own["delta_ns"], own.index, marker, color=colour, markersize=6, label=word)
    names, words = [], []
    for row in shown.to_dict("records"):
        name = part_name(str(row["name"]).removesuffix("_ns"))
        if isinstance(row.get("before_names"), list):  # which kernels have
            name = short_name(name)
        if isinstance(row.get("clock"), str):
            name = f"{name} ({row['clock']})"
        names.append(name)
        times = f"{duration(row['before_ns'])} then {duration(row['after_ns'])}"
        words.append((name, f"{times}, {row['significance']}"))
    style.name_rows(axes, names)
    axes.set(ylim=(len(shown) - 0.4, -0.6), xlabel=f"change of a step's time ({unit}), with its interval")
    style.legend(figure, 3)
    return style.described(figure, f"{title}, points with intervals around no change: {spoken(words, most=12)}.")


def ladder(rungs: pd.DataFrame, lines: Mapping[str, float], measured: pd.Series | None = None, *, title: str) -> Figure:
    """Draw the least time of each rung as a bar, and below it what was measured.

    Parameters
    ----------
    rungs : DataFrame
        ``rung``, ``least_ns`` and ``lower_ns``: the least time of what the rung does, and of what no fusion removes.
    lines : mapping of str to float
        Times in nanoseconds to draw as lines, by what they are.
    measured : Series of float, optional
        Nanoseconds by rung; a rung that is not in it is awaiting a GPU. Without any, the bars are a prediction alone.
    title : str
    """
    row_height, shift = (0.62, 0.2) if measured is not None else (0.4, 0.0)
    figure, axes = style.new_figure(2.0 + row_height * len(rungs), title)
    table = rungs.set_index("rung")[["lower_ns", "least_ns"]].astype(float)
    table["took_ns"] = np.nan if measured is None else measured.reindex(table.index)
    longest = float(max(table.max(axis=None), *lines.values()))
    size, unit = time_unit(longest)
    rows = np.arange(len(table))
    lower, fusing = table["lower_ns"] / size, (table["least_ns"] - table["lower_ns"]) / size
    height = 0.34 if shift else 0.6
    axes.barh(rows - shift, lower, height=height, color=BLUE, label="at best, predicted")
    if fusing.any():
        look = {"color": BLUE, "hatch": "//", "alpha": 0.6, "edgecolor": "white"}
        axes.barh(rows - shift, fusing, height=height, left=lower, label="what fusing can still remove", **look)
    if measured is not None:
        axes.barh(rows + 0.2, table["took_ns"].fillna(0) / size, height=0.34, color=VERMILION, label="measured")
    words = []
    for row, rung in enumerate(table.itertuples()):
        best = duration(rung.lower_ns)
        if rung.least_ns > rung.lower_ns:
            best = f"{best} to {duration(rung.least_ns)}"
        # Inside the bars: behind their ends the lines would run through the words.
        axes.annotate(best, (0, row - shift), (5, 0), va="center", color="white", **_BESIDE)
        sentence = f"{best} at best"
        if measured is not None:
            outcome, colour = "awaiting a GPU", DARK_GREY
            if np.isfinite(rung.took_ns):
                outcome, colour = duration(rung.took_ns), "white"
            axes.annotate(outcome, (0, row + shift), (5, 0), va="center", color=colour, **_BESIDE)
            sentence += f", {outcome}"
        words.append((rung.Index, sentence))
    goals = {label: duration(time_ns) for label, time_ns in lines.items()}
    for (label, time_ns), dashes in zip(lines.items(), ("--", ":", "-."), strict=False):
        text = style.plain(f"{label}: {goals[label]}", 70)
        axes.axvline(time_ns / size, color=RED, linewidth=1.5, linestyle=dashes, label=text)
    style.name_rows(axes, table.index)
    axes.set(xlim=(0, 1.2 * longest / size), ylim=(len(table) - 0.5, -0.5), xlabel=f"time of a layer ({unit})")
    style.legend(figure, 2)
    return style.described(figure, f"{title}, bars: {spoken(words)}; lines at {spoken(goals.items())}.")


_CURVES = ((BLUE, "-", "o"), (VERMILION, "--", "s"), (GREEN, "-.", "D"), (PURPLE, ":", "^"), (OCHRE, "-", "v"))


def memory_curves(
    predicted: Mapping[str, tuple[ArrayLike, ArrayLike]],
    measured: Mapping[str, tuple[ArrayLike, ArrayLike]],
    limit_bytes: float,
    failed: Mapping[str, float] | None = None,
    *,
    title: str,
) -> Figure:
    """Draw bytes against the context on logarithmic axes: predicted as lines, measured as points, failures as crosses.

    Parameters
    ----------
    predicted, measured : mapping of str to (array of shape (n,), array of shape (n,))
        Contexts in tokens and bytes by series; a series that was measured was predicted as well.
    limit_bytes : float
        The memory there is: a line, on which failures lie.
    failed : mapping of str to float, optional
        The context at which a series ran out of memory.
    title : str
    """
    figure, axes = style.new_figure(3.8, title)
    failed = failed or {}
    sentences = []
    lowest, highest = limit_bytes, limit_bytes
    kinds = {"predicted": predicted, "measured": measured}
    for name, (colour, dashes, marker) in zip(predicted, cycle(_CURVES), strict=False):
        looks: dict[str, dict[str, Any]] = {
            "predicted": {"linestyle": dashes, "linewidth": 1.8},
            "measured": {"linestyle": "none", "marker": marker, "markersize": 6},
        }
        words = []
        for kind, series in kinds.items():
            contexts, sizes = series.get(name, ([], []))
            values = np.asarray(sizes, dtype=float)
            if len(values):
                axes.plot(contexts, values, color=colour, label=f"{style.plain(name, 40)}, {kind}", **looks[kind])
                lowest, highest = min(lowest, values.min()), max(highest, values.max())
                words.append(f"{kind} {amount(values[0])} to {amount(values[-1])}")
        if name in failed:
            axes.plot([failed[name]], [limit_bytes], "X", color=colour, markersize=10)
            words.append(f"out of memory at {failed[name]:g}")
        sentences.append((name, ", ".join(words)))
    if failed:
        axes.plot([], [], "X", color=GREY, markersize=10, label="out of memory")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set(yscale="log", ylim=(lowest / 2, 3 * highest))
    axes.set(xlabel="context (tokens)", ylabel="memory at the peak")
    _draw_limit(axes, limit_bytes)
    _decades(axes.yaxis, amount, *axes.get_ylim())
    style.legend(figure, 2)
    return style.described(figure, f"{title}, logarithmic axes: {spoken(sentences)}.")


def _draw_limit(axes: Any, limit_bytes: float) -> None:
    axes.axhline(limit_bytes, color=DARK_GREY, linewidth=1.5)
    text = f"limit, {amount(limit_bytes)}"
    axes.annotate(text, (0, limit_bytes), (4, 4), xycoords=("axes fraction", "data"), **_BESIDE)


_OTHERS, _LIGHT_GREY = "smaller allocations", "#c3c9d1"


def bands(snapshot: Snapshot, top: int = 1000) -> pd.DataFrame:
    """Stack the largest allocations over time: what PyTorch's memory_viz draws.

    Each allocation is a band as high as its block; it lies on the bands that began before it, and sinks when one of
    them goes.

    Parameters
    ----------
    snapshot : Snapshot
        Of which the device with the highest peak is shown.
    top : int, default 1000
        How many allocations get a band; all others are one band on top, at its highest until a band begins or goes.

    Returns
    -------
    DataFrame
        ``band`` (from the bottom up; the last is the others'), ``from_event, to_event`` (the first and one past the
        last after which it lies there), ``bottom_bytes, top_bytes, category`` (missing for the others).
    """
    blocks = snapshots.allocations(snapshot, snapshots.summary(snapshot)["device"])
    allocated = snapshots.timeline(snapshot)["allocated_bytes"].to_numpy()
    count = len(allocated) - 1
    largest = blocks.nlargest(top, "size_bytes").sort_index()
    first = largest["first"].to_numpy()
    last = largest["free_requested"].to_numpy()
    moments = np.unique([-1, count, *first, *last])
    begin = moments[:-1, None]
    # One row for each moment, one column for each band.
    is_there = (first <= begin) & (begin < last)
    heights = is_there * largest["size_bytes"].to_numpy()
    tops = np.cumsum(heights, axis=1)
    bottoms = tops - heights
    row, band = np.nonzero(heights)
    table = pd.DataFrame({"band": band, "from_event": moments[row], "to_event": moments[row + 1]})
    table["bottom_bytes"] = bottoms[row, band]
    table["top_bytes"] = tops[row, band]
    table["category"] = largest["category"].to_numpy()[band]
    # While a band stays where it is, it is one row.
    table = table.sort_values(["band", "from_event"], ignore_index=True)
    lies = table[["band", "bottom_bytes"]]
    stretches = table.groupby((lies != lies.shift()).any(axis=1).cumsum())
    table = stretches.first().assign(to_event=stretches["to_event"].max())

    others = pd.DataFrame({"band": top, "from_event": moments[:-1], "to_event": moments[1:]})
    others["bottom_bytes"] = heights.sum(axis=1)
    others["top_bytes"] = np.maximum.reduceat(allocated, moments[:-1] + 1)
    others["category"] = None
    return pd.concat([table, others], ignore_index=True)


def memory_timeline(bands: pd.DataFrame, timeline: pd.DataFrame, *, title: str) -> Figure:
    """Draw every large allocation as a band over the allocator's events, stacked, as PyTorch's memory_viz draws it.

    The x axis counts events, so that a moment with many allocations is as wide as it is busy.

    Parameters
    ----------
    bands : DataFrame
        As :func:`bands` returns it.
    timeline : DataFrame
        As :func:`nsightkit.analysis.memory.snapshot.timeline` returns it: a line for what is reserved.
    title : str
    """
    figure, axes = style.new_figure(4.2, title)
    if bands.empty or not bands["top_bytes"].max() > 0:
        return style.draw_nothing(figure, axes, title, "nothing was allocated")
    allocated = float(bands["top_bytes"].max())
    highest = max(allocated, float(timeline["reserved_bytes"].max()))
    size, unit = byte_unit(highest)
    categories = bands["category"].astype(object).fillna(_OTHERS).astype(str)
    handles: list[Any] = []
    for name in MEMORY:
        rows = bands[categories == name]
        if rows.empty:
            continue
        colour, hatch = style.LOOKS[name]
        if name == _OTHERS:
            colour = _LIGHT_GREY  # "before recording" is grey, too
        low, high = rows["bottom_bytes"] / size, rows["top_bytes"] / size
        corners: Any = style.rectangles(rows["from_event"], rows["to_event"], low, high)
        # Small ones lie close together: white edges would fill their area.
        edge = "face" if name == _OTHERS else "white"
        axes.add_collection(PolyCollection(corners, facecolor=colour, edgecolor=edge, linewidth=0.15, hatch=hatch))
        handles.append(Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=name))
    reserved = timeline["reserved_bytes"] / size
    handles += axes.step(timeline["event"], reserved, where="post", color="black", linewidth=1.2, label="reserved")
    axes.legend(handles=handles[::-1], frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    last = int(bands["to_event"].max())
    axes.set(xlim=(bands["from_event"].min(), last), ylim=(0, 1.06 * highest / size))
    axes.set(xlabel="allocator event", ylabel=f"allocated ({unit})")
    what = f"allocations stacked over {last:,} allocator events; the highest point is at {amount(allocated)}"
    return style.described(figure, f"{title}: {what}.")


_LINE = ["implementation", "precision"]


def sweep(
    table: pd.DataFrame,
    value: str,
    *,
    title: str,
    limit_bytes: float | None = None,
    forecast: pd.DataFrame | None = None,
) -> Figure:
    """Draw time or memory of attention against the context, forward beside backward, on logarithmic axes.

    Parameters
    ----------
    table : DataFrame
        Rows of a sweep: ``implementation, precision, direction, context, status`` and `value`. A line for each
        implementation and precision; runs that ran out of memory are crosses on the limit.
    value : {"median_ns", "peak_bytes"}
    title : str
    limit_bytes : float, optional
        The memory there is, as a line.
    forecast : DataFrame, optional
        ``implementation, precision, direction, largest_context``: the longest context that should fit, a tick on the
        limit.
    """
    write = duration if value == "median_ns" else amount
    known = table[table[value].notna()].sort_values("context", kind="stable")
    figure, grid = style.new_grid(2, 4.0, title, sharey=True, sharex=True)
    contexts = sorted(table["context"].unique())
    marks = []
    if limit_bytes is not None:
        failures = table[table["status"] == "oom"].groupby([*_LINE, "direction"], as_index=False).first()
        marks.append(("X", "measured: out of memory", "ran out of memory at", failures))
    if forecast is not None:
        ends = forecast[forecast["largest_context"].between(1, 2 * contexts[-1])]
        ends = ends.assign(context=ends["largest_context"])
        marks.append(("|", "forecast: the longest that fits", "was to fit up to", ends))
    looks = {"X": {"markersize": 8}, "|": {"markersize": 18, "markeredgewidth": 1.8}}
    words = []
    for axes, direction in zip(grid, ("forward", "backward"), strict=True):
        axes.set_title(direction, loc="left", fontsize=10)
        lines = known.drop_duplicates(_LINE)[_LINE].itertuples(index=False)
        for key, (colour, dashes) in zip(lines, cycle(_LINES), strict=False):
            name = f"{', '.join(key)} {direction}"
            line = _rows_of(known, key, direction)
            look = {"color": colour, "linestyle": dashes, "label": style.plain(", ".join(key))}
            axes.plot(line["context"], line[value], marker=".", linewidth=2, **look)
            if len(line):
                words.append((name, f"{write(line[value].iloc[-1])} at {line['context'].iloc[-1]}"))
            for marker, _, what, rows in marks:
                for context in _rows_of(rows, key, direction)["context"]:
                    axes.plot([context], [limit_bytes], color=colour, marker=marker, **looks[marker])
                    words.append((name, f"{what} {context:.0f}"))
        for marker, label, _, rows in marks:
            if len(rows):
                axes.plot([], [], marker, color=GREY, label=label)
        _sweep_axes(axes, contexts, float(known[value].min()))
        if limit_bytes is not None:
            _draw_limit(axes, limit_bytes)
    _decades(grid[0].yaxis, write, *grid[0].get_ylim())
    grid[0].set_ylabel("median of a pass" if value == "median_ns" else "peak of allocated memory")
    style.legend(figure, 3)
    sentence = f"{title}, against the context length on logarithmic axes: {spoken(words, most=16)}."
    return style.described(figure, sentence)


def _rows_of(table: pd.DataFrame, key: Any, direction: str) -> pd.DataFrame:
    chosen = table["direction"] == direction
    for column, wanted in zip(_LINE, key, strict=True):
        chosen &= table[column] == wanted
    return table[chosen]


def _sweep_axes(axes: Any, contexts: list[int], lowest: float) -> None:
    """Make both axes logarithmic; show how steep lines are that grow with the context, and with its square."""
    last = contexts[-1]
    begin = last / 8
    for power, name in ((1, "O(S)"), (2, "O(S²)")):
        high = lowest * (last / begin) ** power
        axes.plot([begin, last], [lowest, high], color=GREY, linewidth=1, linestyle=(0, (1, 2)), zorder=0)
        axes.annotate(name, (last, high), (3, 0), va="center", color=DARK_GREY, **_BESIDE)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(contexts))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda size, _: f"{size / 1024:g}k" if size >= 1024 else f"{size:g}")
    axes.tick_params(axis="x", labelsize=8, rotation=45 if len(contexts) > 7 else 0)
    # Right of the lines there is room for the names of the guides.
    axes.set(xlim=(contexts[0] / 1.3, last * 2.3), xlabel="context length S")


#: Of the regions of NVIDIA's rule: where their name stands (memory, compute), and their colour.
_REGIONS = {
    "latency-bound": ((27, 35), GREY),
    "compute-bound": ((27, 72), BLUE),
    "memory-bound": ((80, 35), VERMILION),
    "balanced": ((70, 69), PURPLE),
}


def limiter_map(table: pd.DataFrame, *, title: str) -> Figure:
    """Draw kernels over the throughput of memory and of compute, on the regions of NVIDIA's rule.

    Parameters
    ----------
    table : DataFrame
        ``name``, and ``sm_pct``, ``memory_pct`` and ``classification`` as from
        :func:`nsightkit.analysis.roofline.counters.summary`. Rows whose throughputs were not measured are left out.
    title : str
    """
    shown = table.dropna(subset=["sm_pct", "memory_pct"])
    figure, axes = style.new_figure(5.2, title)
    figure.set_figwidth(6.4)
    _draw_regions(axes)
    words = []
    looks = zip(cycle(style.SERIES), cycle("osD^vPX*<>hd"), strict=False)
    for row, (colour, marker) in zip(shown.itertuples(), looks, strict=False):
        # The frame keeps apart what lies on one spot, and a point from a region of its colour.
        look = {"color": colour, "markersize": 9, "markeredgecolor": "white", "clip_on": False, "linestyle": "none"}
        label = f"{style.plain(row.name, 44)}: {row.classification}"
        axes.plot([row.memory_pct], [row.sm_pct], marker=marker, label=label, **look)
        place = f"at {row.sm_pct:.0f}% of compute and {row.memory_pct:.0f}% of memory"
        words.append((row.name, f"({row.classification}) {place}"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set(ticks=range(0, 101, 20), major_formatter=PercentFormatter())
    axes.set(xlim=(0, 100), ylim=(0, 100), xlabel="memory throughput, the busiest of L1, L2 and DRAM")
    axes.set_ylabel("compute throughput, the busiest unit of the SMs")
    style.legend(figure, 1 if len(shown) < 4 else 2)
    return style.described(figure, f"{title}, points on the regions of NVIDIA's rule: {spoken(words, most=12)}.")


def _draw_regions(axes: Any) -> None:
    """Tint each place by the rule itself, point by point: the picture cannot differ from the classes."""
    order = list(_REGIONS)
    grid = np.zeros((100, 100), int)
    for compute, memory in np.ndindex(grid.shape):
        grid[compute, memory] = order.index(classify(compute + 0.5, memory + 0.5))
    tints = ListedColormap([to_rgba(colour, 0.22) for _, colour in _REGIONS.values()])
    axes.imshow(grid, cmap=tints, vmin=0, vmax=len(order) - 1, extent=(0, 100, 0, 100), origin="lower")
    for region, (place, _) in _REGIONS.items():
        axes.text(*place, region, ha="center", va="center", fontsize=9, style="italic", zorder=1.5)  # below points


def rank_lateness(arrivals: pd.DataFrame, late_ns: pd.Series, *, title: str) -> Figure:
    """Draw how late each rank was in each step, one dot a step, and the median.

    Parameters
    ----------
    arrivals : DataFrame
        Of :class:`nsightkit.analysis.ranks.job.Job`.
    late_ns : Series of float
        :func:`nsightkit.analysis.ranks.lateness.lateness` of them.
    title : str
    """
    known = arrivals.assign(late=late_ns)[late_ns.notna()]
    ranks = sorted(known["rank"].unique())
    figure, axes = style.new_figure(1.5 + 0.28 * len(ranks), title)
    late = known.groupby(["rank", "step"])["late"].sum()
    size, unit = time_unit(late.max())
    pairs = []
    for row, rank in enumerate(ranks):
        values = late[rank].to_numpy() / size
        median = np.median(values)
        # Dots of one row, side by side where they would hide each other.
        shift = 0.22 * np.sin(2.4 * np.arange(len(values)))
        axes.scatter(values, row + shift, s=14, color=BLUE, alpha=0.7, linewidths=0, label="a step")
        axes.plot([median] * 2, [row - 0.36, row + 0.36], color=VERMILION, linewidth=2.2, label="median")
        pairs.append((f"rank {rank}", duration(median * size)))
    style.name_rows(axes, [f"rank {rank}" for rank in ranks])
    axes.set(ylim=(len(ranks) - 0.5, -0.5), xlabel=f"delay behind the median rank, per step ({unit})")
    axes.grid(axis="y", color=DARK_GREY, alpha=0.15)
    style.legend(figure, 2)
    return style.described(figure, f"{title}, one dot per step; medians: {spoken(pairs)}.")


def rank_arrivals(arrivals: pd.DataFrame, *, title: str) -> Figure:
    """Draw two steps of all ranks on one clock: in each collective the wait for the last rank, and the transfer.

    The steps are from the middle of the run; where no steps are known, two collectives are.

    Parameters
    ----------
    arrivals : DataFrame
        Of :class:`nsightkit.analysis.ranks.job.Job`.
    title : str
    """
    known = arrivals[arrivals["wait_ns"].notna()]
    waits = waited(known).groupby(known["rank"]).sum()
    figure, axes = style.new_figure(1.9 + 0.28 * len(waits), title)
    if waits.empty:
        return style.draw_nothing(figure, axes, title, "no collectives that ranks wait in")
    numbers = known["step" if (known["step"] >= 0).all() else "collective"]
    every = np.sort(numbers.unique())
    middle = max(len(every) // 2 - 1, 0)
    drawn = known[numbers.isin(every[middle : middle + 2])]
    start = drawn["start_ns"].to_numpy(float) - drawn["start_ns"].min()
    length = (drawn["end_ns"] - drawn["start_ns"]).to_numpy(float)
    wait = drawn["wait_ns"].to_numpy(float)
    size, unit = time_unit((start + length).max())
    row = np.searchsorted(waits.index, drawn["rank"])
    look: dict[str, Any] = {"height": 0.62, "edgecolor": "white", "linewidth": 0.3}
    axes.barh(row, wait, left=start, color=OCHRE, hatch="//", label="waiting for the last rank", **look)
    axes.barh(row, length - wait, left=start + wait, color=BLUE, label="transfer, all ranks there", **look)
    last = wait == 0
    axes.plot(start[last], row[last], "k>", markersize=6, label="arrived last", linestyle="none")
    names = [f"rank {rank}" for rank in waits.index]
    style.name_rows(axes, names)
    style.in_unit(axes.xaxis, size)
    axes.set(xlim=(0, None), ylim=(len(waits) - 0.5, -0.5), xlabel=f"time ({unit})")
    style.legend(figure, 3)
    pairs = zip(names, waits.map(duration), strict=True)
    shown = "a row of bars a rank, from its arrival at each collective to its end"
    return style.described(figure, f"{title}, {shown}. Waited over the whole run: {spoken(pairs)}.")
