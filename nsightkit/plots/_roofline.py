"""What operations reach: their rates under the roofs of a card, and how much of its compute and memory kernels use."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import cycle, product
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import ListedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, PercentFormatter

from nsightkit.analysis.roofline.counters import classify
from nsightkit.analysis.roofline.sol import Rates
from nsightkit.plots import style
from nsightkit.plots.looks import BLUE, DARK_GREY, GREEN, GREY, OCHRE, PURPLE, RED, VERMILION, spoken

_ROOFS = ((DARK_GREY, "-"), (BLUE, "--"), (PURPLE, "-."))
_MARKS = (
    (BLUE, "o"),
    (VERMILION, "s"),
    (GREEN, "D"),
    (PURPLE, "^"),
    (OCHRE, "v"),
    (RED, "P"),
    (BLUE, "X"),
    (GREEN, "*"),
    (VERMILION, "<"),
    (PURPLE, ">"),
    (OCHRE, "h"),
    (RED, "d"),
)
#: The prefix of PyTorch's operators.
_OPERATOR = re.compile(r"^aten::_?")
#: Of the regions: where their name stands (memory, compute), and their colour.
_REGIONS = {
    "latency-bound": ((27, 35), GREY),
    "compute-bound": ((27, 72), BLUE),
    "memory-bound": ((80, 35), VERMILION),
    "balanced": ((70, 69), PURPLE),
}


def roofline(
    table: pd.DataFrame,
    rates: Sequence[Rates],
    unit: str,
    *,
    lower: Sequence[str] = (),
    title: str = "Roofline",
    top: int = 12,
) -> Figure:
    """Draw the rate of each operation over its intensity, under one or several roofs.

    Parameters
    ----------
    table : DataFrame
        ``name, flops, intensity, time_ns`` and, written beside the name, ``sol_datasheet``, as from
        :func:`nsightkit.analysis.roofline.sol.judge`. Operations without FLOPs have no place here and are left out, and
        so are those whose bytes are not known. A column ``group`` stands behind the name.
    rates : sequence of Rates
        A roof each, such as the datasheet's and the measured one.
    unit : str
        Whose peak rate the roofs have.
    lower : sequence of str
        Other units, whose ceilings are drawn below that of `unit`, such as the ordinary cores' ``fp32``.
    title : str, default "Roofline"
    top : int, default 12
        How many operations are named, those that took longest. The others are small grey points.

    Returns
    -------
    matplotlib.figure.Figure
    """
    points = table[(table["flops"] > 0) & table["intensity"].notna()]
    points = points.sort_values("time_ns", ascending=False, kind="stable").astype({"intensity": float})
    points["reached"] = points["flops"].astype(float) / points["time_ns"].astype(float) / 1e3
    figure, axes = style.new_figure(5.4, title)
    if points.empty:
        return style.nothing(figure, axes, title, "no operations with FLOPs and a time")
    roofs = [rate for rate in rates if unit in rate.tflops and rate.gb_per_s > 0]
    places = [*points["intensity"], *(_ridge(roof, unit) for roof in roofs)]
    first, last = min(places) / 2, max(places) * 3
    for roof, look in zip(roofs, cycle(_ROOFS), strict=False):
        _draw_roof(axes, roof, unit, lower, (first, last), look)
    _draw_points(axes, points, top)
    axes.set(xscale="log", yscale="log", xlim=(first, last), ylabel="reached (TFLOP/s)")
    axes.set_xlabel("arithmetic intensity (FLOPs a byte of compulsory traffic)")
    highest = max([axes.get_ylim()[1] / 2, *(roof.tflops[unit] for roof in roofs)])
    axes.set_ylim(top=3 * highest)  # room for words
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(10))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    style.legend(figure, 2, fontsize=8)
    return style.described(
        figure, f"{title}, points under the roofs of {_roofline_in_words(points, roofs, unit, top)}."
    )


def _ridge(rate: Rates, unit: str) -> float:
    """The intensity at which memory and compute take equally long."""
    return rate.tflops[unit] * 1e3 / rate.gb_per_s


def _draw_roof(
    axes: Any, rate: Rates, unit: str, lower: Sequence[str], span: tuple[float, float], look: tuple[str, str]
) -> None:
    """Draw one roof, and below it the ceilings of other units, each of which is named once."""
    colour, dashes = look
    peak = rate.tflops[unit]
    grid = np.geomspace(*span, 200)
    label = f"{style.plain(rate.source, 36)}: {peak:,.4g} TFLOP/s, {rate.gb_per_s:,.0f} GB/s"
    roof = np.minimum(grid * rate.gb_per_s / 1e3, peak)
    axes.plot(grid, roof, color=colour, linestyle=dashes, linewidth=1.8, label=label)
    axes.plot([_ridge(rate, unit)], [peak], marker="|", color=colour, markersize=9)
    for other in lower:
        if other not in rate.tflops:
            continue
        ceiling = rate.tflops[other]
        begin = max(_ridge(rate, other), span[0])
        axes.plot([begin, span[1]], [ceiling] * 2, color=colour, linestyle=dashes, linewidth=0.9)
        name = style.plain(other)
        named = [text.get_text() for text in axes.texts]
        if name not in named:  # the roofs lie close to each other
            axes.annotate(name, (span[1], ceiling), (-2, 3), textcoords="offset points", ha="right", fontsize=8)


def _draw_points(axes: Any, points: pd.DataFrame, top: int) -> None:
    """Draw the longest operations, each with a marker of its own that the legend names, and the others small."""
    shown, rest = points.head(top), points.iloc[top:]
    for row, (colour, marker) in zip(shown.to_dict("records"), cycle(_MARKS), strict=False):
        look = {"linestyle": "none", "marker": marker, "color": colour, "markersize": 7, "markeredgecolor": "white"}
        axes.plot(row["intensity"], row["reached"], label=_named(row), **look)
    if len(rest):
        look = {"linestyle": "none", "marker": ".", "color": GREY, "markersize": 5}
        axes.plot(rest["intensity"], rest["reached"], label=f"{len(rest)} shorter ones", **look)


def _named(row: dict[Any, Any]) -> str:
    """Name an operation for the legend, with its share of the datasheet's speed of light where that is known."""
    name = style.plain(_OPERATOR.sub("", str(row["name"])), 30)
    share = row.get("sol_datasheet", np.nan)
    if np.isfinite(share):
        name += f", {share:.0%}"
    return f"{name} ({style.plain(row['group'])})" if "group" in row else name


def _roofline_in_words(points: pd.DataFrame, roofs: Sequence[Rates], unit: str, top: int) -> str:
    rates = [f"{roof.source} ({roof.tflops[unit]:,.4g} TFLOP/s, {roof.gb_per_s:,.0f} GB/s)" for roof in roofs]
    pairs = []
    for row in points.head(top).itertuples():
        pairs.append((row.name, f"{row.reached:,.3g} TFLOP/s at {row.intensity:,.3g} FLOPs a byte"))
    sentence = f"{' and '.join(rates) or 'no card'}: {spoken(pairs, most=12)}"
    if len(points) > top:
        sentence += f"; {len(points) - top} more"
    return sentence


def limiter_map(table: pd.DataFrame, *, title: str = "What limits each kernel") -> Figure:
    """Draw kernels over the throughput of memory and of compute, on the regions of NVIDIA's rule.

    Parameters
    ----------
    table : DataFrame
        ``kernel``, ``sm_pct``, ``memory_pct`` and ``classification``, as from
        :func:`nsightkit.analysis.roofline.counters.summary`; ``name``, where there is one, is what the legend says
        instead of ``kernel``. Rows whose throughputs were not measured are left out.
    title : str, default "What limits each kernel"

    Returns
    -------
    matplotlib.figure.Figure
    """
    shown = table.dropna(subset=["sm_pct", "memory_pct"])
    figure, axes = style.new_figure(5.2, title, width=6.4)
    if shown.empty:
        return style.nothing(figure, axes, title, "no kernels with both throughputs")
    _draw_regions(axes)
    pairs = []
    called = "name" if "name" in shown else "kernel"
    for row, (colour, marker) in zip(shown.to_dict("records"), cycle(_MARKS), strict=False):
        name = row[called]
        label = f"{style.plain(name, 44)}: {row['classification']}"
        # The frame keeps apart what lies on one spot, and a point from a region of its colour.
        look = {"color": colour, "markersize": 9, "markeredgecolor": "white", "clip_on": False}
        axes.plot([row["memory_pct"]], [row["sm_pct"]], linestyle="none", marker=marker, label=label, **look)
        where = f"at {row['sm_pct']:.0f} % of compute and {row['memory_pct']:.0f} % of memory"
        pairs.append((name, f"({row['classification']}) {where}"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set(ticks=range(0, 101, 20), major_formatter=PercentFormatter())
    axes.set(xlim=(0, 100), ylim=(0, 100), xlabel="memory throughput, the busiest of L1, L2 and DRAM")
    axes.set_ylabel("compute throughput, the busiest unit of the SMs")
    style.legend(figure, 1 if len(shown) < 4 else 2)
    return style.described(figure, f"{title}, points on the regions of NVIDIA's rule: {spoken(pairs, most=12)}.")


def _draw_regions(axes: Any) -> None:
    """Tint each place by the rule itself, point by point: the picture cannot differ from the classes."""
    order = list(_REGIONS)
    grid = np.zeros((100, 100), int)
    for compute, memory in product(range(100), range(100)):
        grid[compute, memory] = order.index(classify(compute + 0.5, memory + 0.5))
    tints = ListedColormap([to_rgba(colour, 0.22) for _, colour in _REGIONS.values()])
    axes.imshow(grid, cmap=tints, vmin=0, vmax=len(order) - 1, extent=(0, 100, 0, 100), origin="lower")
    for region, (place, _) in _REGIONS.items():
        axes.text(*place, region, ha="center", va="center", fontsize=9, style="italic", zorder=1.5)  # below points
