"""What operations reach: their rates under the roofs of a card."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from nsightkit.analysis.roofline.sol import Rates
from nsightkit.plots import style
from nsightkit.plots.looks import BLUE, DARK_GREY, GREY, PURPLE, spoken

_ROOFS = ((DARK_GREY, "-"), (BLUE, "--"), (PURPLE, "-."))


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
        so are those whose bytes are not known.
    rates : sequence of Rates
        A roof each, such as the datasheet's and the measured one.
    unit : str
        Whose peak rate the roofs have.
    lower : sequence of str
        Other units, whose ceilings are drawn below that of `unit`, such as the ordinary cores' ``fp32``.
    title : str, default "Roofline"
    top : int, default 12
        How many operations to name, the longest first. The others are small grey points.

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
    roofs = [rate for rate in rates if unit in rate.tflops]
    places = [*points["intensity"], *(_ridge(roof, unit) for roof in roofs)]
    left, right = min(places) / 2, max(places) * 3
    for roof, (colour, dashes) in zip(roofs, cycle(_ROOFS), strict=False):
        look = {"color": colour, "linestyle": dashes}
        peak, ridge = roof.tflops[unit], _ridge(roof, unit)
        label = f"{style.plain(roof.source, 36)}: {peak:,.4g} TFLOP/s, {roof.gb_per_s:,.0f} GB/s"
        axes.plot([left, ridge, right], [left * peak / ridge, peak, peak], linewidth=1.8, label=label, **look)
        for other in lower:
            if other in roof.tflops:
                ceiling = roof.tflops[other]
                axes.plot([max(_ridge(roof, other), left), right], [ceiling] * 2, linewidth=0.9, **look)
                axes.annotate(other, (right, ceiling), (-2, 3), textcoords="offset points", ha="right", fontsize=8)
    _draw_points(axes, points, top)
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylabel="reached (TFLOP/s)")
    axes.set_xlabel("arithmetic intensity (FLOPs a byte of compulsory traffic)")
    axes.set_ylim(top=1.5 * axes.get_ylim()[1])  # room for words
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(10))
        axis.set_minor_locator(NullLocator())
        style.in_unit(axis)
    style.legend(figure, 2)
    words = spoken(zip(points["name"], points["reached"].map("{:,.3g} TFLOP/s".format), strict=True), most=top)
    cards = " and ".join(roof.source for roof in roofs)
    return style.described(figure, f"{title}, points under the roofs of {cards or 'no card'}: {words}.")


def _ridge(rate: Rates, unit: str) -> float:
    """The intensity at which memory and compute take equally long."""
    return rate.tflops[unit] * 1e3 / rate.gb_per_s


def _draw_points(axes: Any, points: pd.DataFrame, top: int) -> None:
    """Draw the longest operations, each with its own marker and name, and the others small."""
    shown = points.head(top).to_dict("records")
    for row, colour, marker in zip(shown, cycle(style.SERIES), cycle("osD^vPX*<>hd"), strict=False):
        name = style.plain(row["name"].removeprefix("aten::"), 30)
        share = row.get("sol_datasheet", np.nan)
        if np.isfinite(share):
            name += f", {share:.0%}"
        look = {"linestyle": "none", "marker": marker, "color": colour, "markersize": 7, "markeredgecolor": "white"}
        axes.plot(row["intensity"], row["reached"], label=name, **look)
    rest = points.iloc[top:]
    if len(rest):
        label = f"{len(rest)} shorter ones"
        axes.plot(rest["intensity"], rest["reached"], ".", color=GREY, markersize=5, label=label)
