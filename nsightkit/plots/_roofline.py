"""What operations reach: their rates under the roofs of a card, and how much of its compute and memory kernels use."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import ListedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, PercentFormatter
from matplotlib.transforms import Bbox

from nsightkit.analysis.roofline.counters import classify
from nsightkit.analysis.roofline.sol import Rates
from nsightkit.plots._style import finished, new_figure, nothing, plain
from nsightkit.plots.looks import BLUE, DARK_GREY, GREEN, GREY, OCHRE, PURPLE, RED, VERMILION, spoken

_ROOFS = ((DARK_GREY, "-"), (BLUE, "--"), (PURPLE, "-."))
_MARKS = (
    *((BLUE, "o"), (VERMILION, "s"), (GREEN, "D"), (PURPLE, "^"), (OCHRE, "v"), (RED, "P"), (BLUE, "X"), (GREEN, "*")),
    *((VERMILION, "<"), (PURPLE, ">"), (OCHRE, "h"), (RED, "d")),
)
#: Where a word stands beside its point, the best place first: across and up.
_AROUND = ((1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1), (0, 1), (0, -1))
#: What all operators begin with.
_AN_OPERATOR = re.compile(r"^aten::_?")
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
        so are those whose bytes are not known. A column ``group`` gives each of its values a marker of its own.
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
    drawable = table[(table["flops"] > 0) & table["intensity"].notna()]
    every = drawable.sort_values("time_ns", ascending=False, kind="stable").astype({"intensity": float})
    every["reached"] = every["flops"].astype(float) / every["time_ns"].astype(float) / 1e3
    shown, rest = every.head(top), every.iloc[top:]
    figure, axes = new_figure(5.4, title)
    if shown.empty:
        return nothing(figure, axes, title, "no operations with FLOPs and a time")
    roofs = [rate for rate in rates if unit in rate.tflops and rate.gb_per_s > 0]
    ridges = [rate.tflops[unit] * 1e3 / rate.gb_per_s for rate in roofs]
    first, last = min([*every["intensity"], *ridges]) / 2, max([*every["intensity"], *ridges]) * 3
    grid = np.geomspace(first, last, 200)
    for rate, (colour, line), ridge in zip(roofs, cycle(_ROOFS), ridges, strict=False):
        roof = np.minimum(grid * rate.gb_per_s / 1e3, rate.tflops[unit])
        said = f"{plain(rate.source, 36)}: {rate.tflops[unit]:,.4g} TFLOP/s, {rate.gb_per_s:,.0f} GB/s"
        axes.plot(grid, roof, color=colour, linestyle=line, linewidth=1.8, label=said)
        axes.plot([ridge], [rate.tflops[unit]], marker="|", color=colour, markersize=9)
        for other in (name for name in lower if name in rate.tflops):
            ceiling = rate.tflops[other]
            begin = max(ceiling * 1e3 / rate.gb_per_s, first)
            axes.plot([begin, last], [ceiling] * 2, color=colour, linestyle=line, linewidth=0.9)
            if plain(other) not in [text.get_text() for text in axes.texts]:  # once: the roofs lie close to each other
                axes.annotate(
                    plain(other), (last, ceiling), (-2, 3), textcoords="offset points", ha="right", fontsize=8,
                )  # fmt: skip
    groups = shown["group"] if "group" in shown else pd.Series("", shown.index)
    for group, (colour, mark) in zip(dict.fromkeys(groups), cycle(_MARKS), strict=False):
        axes.plot(
            shown.loc[groups == group, "intensity"], shown.loc[groups == group, "reached"], linestyle="none",
            marker=mark, color=colour, markersize=7, label=plain(group) or "_",
        )  # fmt: skip
    if len(rest):
        axes.plot(
            rest["intensity"], rest["reached"], linestyle="none", marker=".", color=GREY, markersize=5,
            label=f"{len(rest)} quicker ones",
        )  # fmt: skip
    axes.set(
        xscale="log", yscale="log", xlim=(first, last), ylabel="reached (TFLOP/s)",
        xlabel="arithmetic intensity (FLOPs a byte of compulsory traffic)",
    )  # fmt: skip
    axes.set_ylim(top=3 * max(axes.get_ylim()[1] / 2, *(rate.tflops[unit] for rate in roofs), 0.0))  # room for words
    for axis in (axes.xaxis, axes.yaxis):
        axis.set(major_locator=LogLocator(10), minor_locator=NullLocator(), major_formatter=lambda v, _: f"{v:g}")
    pairs = [
        (name, f"{rate:,.3g} TFLOP/s at {at:,.3g} FLOPs a byte")
        for name, rate, at in shown[["name", "reached", "intensity"]].itertuples(index=False)
    ]
    below = " and ".join(f"{r.source} ({r.tflops[unit]:,.4g} TFLOP/s, {r.gb_per_s:,.0f} GB/s)" for r in roofs)
    said = f"{below or 'no card'}: {spoken(pairs, most=12)}" + (f"; {len(rest)} more" if len(rest) else "")
    finished(figure, axes, f"{title}, points under the roofs of {said}.", legend=2 if len(roofs) > 1 else 1, size=8)
    shares = shown["sol_datasheet"] if "sol_datasheet" in shown else pd.Series(np.nan, shown.index)
    words = [
        plain(_AN_OPERATOR.sub("", name), 30) + (f", {share:.0%}" if np.isfinite(share) else "")
        for name, share in zip(shown["name"].astype(str), shares, strict=True)
    ]
    _label_points(figure, axes, every[["intensity", "reached"]].to_numpy(), words)
    return figure


def _label_points(figure: Figure, axes: Any, points: np.ndarray, words: Sequence[str]) -> None:
    """Write a word beside each of the first points, where it covers no other word, no point and no line."""
    figure.draw_without_rendering()  # from here on the axes have their place
    lines = [line.get_xydata() for line in axes.lines if line.get_linestyle() != "None"]
    dense = [np.geomspace(line[:-1], line[1:], 60).reshape(-1, 2) for line in lines if len(line) > 1]
    taken = [Bbox.from_extents(*(at - 5), *(at + 5)) for at in axes.transData.transform(points)]
    drawn = axes.transData.transform(np.concatenate(dense)) if dense else np.empty((0, 2))
    for point, text in zip(points, words, strict=False):
        label = axes.annotate(text, point, (0, 0), textcoords="offset points", fontsize=8)
        for away, (across, up) in itertools.product((7, 16, 28, 44, 62), _AROUND):
            label.set(ha=("center", "left", "right")[across], va=("center", "bottom", "top")[up])
            label.xyann = (away * across * 1.0, away * up * 1.0)
            box = label.get_window_extent().padded(2)
            inside = axes.bbox.contains(box.x0, box.y0) and axes.bbox.contains(box.x1, box.y1)
            if inside and not any(box.overlaps(other) for other in taken) and not box.count_contains(drawn):
                break
        taken.append(label.get_window_extent())
        if away > 7:  # not close enough for the eye
            axes.annotate(
                "",
                point,
                label.xyann,
                textcoords="offset points",
                arrowprops={"arrowstyle": "-", "color": GREY, "lw": 0.7},
            )


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
    figure, axes = new_figure(5.2, title, width=6.4)
    if shown.empty:
        return nothing(figure, axes, title, "no kernels with both throughputs")
    # By the rule itself, point by point: the picture cannot differ from the classes.
    order = list(_REGIONS)
    grid = [[order.index(classify(y + 0.5, x + 0.5)) for x in range(100)] for y in range(100)]
    tints = ListedColormap([to_rgba(colour, 0.22) for _, colour in _REGIONS.values()])
    axes.imshow(np.array(grid), cmap=tints, vmin=0, vmax=len(order) - 1, extent=(0, 100, 0, 100), origin="lower")
    for region, (place, _) in _REGIONS.items():
        axes.text(*place, region, ha="center", va="center", fontsize=9, style="italic", zorder=1.5)  # below points
    columns = ["name" if "name" in shown else "kernel", "classification", "memory_pct", "sm_pct"]
    said = []
    for (name, bound, x, y), (colour, mark) in zip(shown[columns].itertuples(index=False), cycle(_MARKS), strict=False):
        # The frame keeps apart what lies on one spot, and a point from a region of its colour.
        axes.plot(
            [x], [y], linestyle="none", marker=mark, color=colour, markersize=9, markeredgecolor="white", clip_on=False,
            label=f"{plain(name, 44)}: {bound}",
        )  # fmt: skip
        said.append((name, f"({bound}) at {y:.0f} % of compute and {x:.0f} % of memory"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set(ticks=range(0, 101, 20), major_formatter=PercentFormatter())
    return finished(
        figure, axes, f"{title}, points on the regions of NVIDIA's rule: {spoken(said, most=12)}.",
        legend=1 if len(shown) < 4 else 2, xlim=(0, 100), ylim=(0, 100),
        xlabel="memory throughput, the busiest of L1, L2 and DRAM",
        ylabel="compute throughput, the busiest unit of the SMs",
    )  # fmt: skip
