"""What operations reach: their rates under the roofs of a card, and how much of its compute and memory kernels use."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import numpy as np
import pandas as pd
from matplotlib.colors import ListedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, PercentFormatter

from nsightkit.analysis.roofline.counters import classify
from nsightkit.analysis.roofline.sol import Rates
from nsightkit.plots._style import finished, new_figure, nothing, plain
from nsightkit.plots.looks import BLUE, DARK_GREY, GREEN, GREY, OCHRE, PURPLE, RED, VERMILION, spoken

_ROOFS = ((DARK_GREY, "-"), (BLUE, "--"), (PURPLE, "-."))
_MARKS = (
    *((BLUE, "o"), (VERMILION, "s"), (GREEN, "D"), (PURPLE, "^"), (OCHRE, "v"), (RED, "P"), (BLUE, "X"), (GREEN, "*")),
    *((VERMILION, "<"), (PURPLE, ">"), (OCHRE, "h"), (RED, "d")),
)
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
        ``name, flops, intensity, time_ns`` and, as the legend shows it, ``sol_datasheet``, as from
        :func:`nsightkit.analysis.roofline.sol.judge`. Operations without FLOPs have no place here and are left out, and
        so are those whose bytes are not known.
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
    if "sol_datasheet" not in shown:
        shown = shown.assign(sol_datasheet=np.nan)
    for row, (colour, mark) in zip(shown.to_dict("records"), cycle(_MARKS), strict=False):
        label = plain(row["name"], 44) + (f", {row['sol_datasheet']:.0%}" if np.isfinite(row["sol_datasheet"]) else "")
        axes.plot(
            [row["intensity"]], [row["reached"]], linestyle="none", marker=mark, color=colour, markersize=7, label=label
        )
    if len(rest):
        axes.plot(
            rest["intensity"], rest["reached"], linestyle="none", marker=".", color=GREY, markersize=5,
            label=f"{len(rest)} quicker ones",
        )  # fmt: skip
    axes.set(
        xscale="log", yscale="log", xlim=(first, last), ylabel="reached (TFLOP/s)",
        xlabel="arithmetic intensity (FLOPs a byte of compulsory traffic)",
    )  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        axis.set(major_locator=LogLocator(10), minor_locator=NullLocator(), major_formatter=lambda v, _: f"{v:g}")
    pairs = [
        (name, f"{rate:,.3g} TFLOP/s at {at:,.3g} FLOPs a byte")
        for name, rate, at in shown[["name", "reached", "intensity"]].itertuples(index=False)
    ]
    below = " and ".join(f"{r.source} ({r.tflops[unit]:,.4g} TFLOP/s, {r.gb_per_s:,.0f} GB/s)" for r in roofs)
    more = f"; {len(rest)} more" if len(rest) else ""
    sentence = f"{title}, points under the roofs of {below or 'no card'}: {spoken(pairs, most=12)}{more}."
    return finished(figure, axes, sentence, legend=1 if len(shown) < 4 else 2, size=8)


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
        axis.set_ticks([0, 20, 40, 60, 80, 100])
        axis.set_major_formatter(PercentFormatter())
    return finished(
        figure, axes, f"{title}, points on the regions of NVIDIA's rule: {spoken(said, most=12)}.",
        legend=1 if len(shown) < 4 else 2, xlim=(0, 100), ylim=(0, 100),
        xlabel="memory throughput, the busiest of L1, L2 and DRAM",
        ylabel="compute throughput, the busiest unit of the SMs",
    )  # fmt: skip
