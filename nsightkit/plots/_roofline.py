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

#: Colour and dashes of each roof.
_ROOF_STYLES = ((DARK_GREY, "-"), (BLUE, "--"), (PURPLE, "-."))


def roofline(
    table: pd.DataFrame, rates: Sequence[Rates], unit: str, *, title: str = "Roofline", top: int = 12
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
        Whose peak rate the roofs have, such as ``bf16``; of `rates` without it no roof is drawn.
    title : str, default "Roofline"
    top : int, default 12
        How many operations to name, the longest first. The others are small grey points.

    Returns
    -------
    matplotlib.figure.Figure
    """
    points = table[(table["flops"] > 0) & table["intensity"].notna()]
    points = points.sort_values("time_ns", ascending=False, kind="stable")
    # Matplotlib takes NaN for a missing value, but not the NA of nullable columns.
    points = points.astype(dict.fromkeys(("flops", "intensity", "time_ns"), float))
    points["reached"] = points["flops"] / points["time_ns"] / 1e3  # TFLOP/s
    figure, axes = style.new_figure(5.4, title)
    if points.empty:
        return style.draw_nothing(figure, axes, title, "no operations with FLOPs and a time")
    roofs = [rate for rate in rates if unit in rate.tflops]
    # The intensities at which memory and compute take equally long.
    ridges = [roof.tflops[unit] * 1e3 / roof.gb_per_s for roof in roofs]
    intensities = [*points["intensity"], *ridges]
    left = min(intensities) / 2
    right = max(intensities) * 3
    for roof, ridge, (colour, dashes) in zip(roofs, ridges, cycle(_ROOF_STYLES), strict=False):
        peak = roof.tflops[unit]
        label = f"{style.plain(roof.source, 36)}: {peak:,.4g} TFLOP/s, {roof.gb_per_s:,.0f} GB/s"
        # Up to the ridge the roof rises with the intensity, beyond it is flat.
        heights = [left * peak / ridge, peak, peak]
        axes.plot([left, ridge, right], heights, color=colour, linestyle=dashes, linewidth=1.8, label=label)
    _draw_points(axes, points, top)
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylabel="reached (TFLOP/s)")
    axes.set_xlabel("arithmetic intensity (FLOPs per compulsory byte)")
    axes.set_ylim(top=1.5 * axes.get_ylim()[1])  # room above the highest roof
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(10))
        axis.set_minor_locator(NullLocator())
        style.in_unit(axis)
    style.legend(figure, 2)
    reached = points["reached"].map("{:,.3g} TFLOP/s".format)
    rates_by_name = spoken(zip(points["name"], reached, strict=True), most=top)
    cards = " and ".join(roof.source for roof in roofs)
    return style.described(figure, f"{title}, points under the roofs of {cards or 'no card'}: {rates_by_name}.")


def _draw_points(axes: Any, points: pd.DataFrame, top: int) -> None:
    """Draw the `top` longest operations, each with its own marker and name, and the others small."""
    for row, colour, marker in zip(
        points.head(top).to_dict("records"), cycle(style.SERIES), cycle("osD^vPX*<>hd"), strict=False
    ):
        name = style.plain(row["name"].removeprefix("aten::"), 30)
        sol_share = row.get("sol_datasheet", np.nan)
        if np.isfinite(sol_share):
            name += f", {sol_share:.0%}"
        axes.plot(row["intensity"], row["reached"], marker, color=colour, ms=7, mec="white", label=name)
    rest = points.iloc[top:]
    if len(rest):
        label = f"{len(rest)} shorter ones"
        axes.plot(rest["intensity"], rest["reached"], ".", color=GREY, markersize=5, label=label)
