"""What operations reach: their rates under the roofs of a card."""

from __future__ import annotations

import re
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
#: The prefix of PyTorch's operators.
_OPERATOR = re.compile(r"^aten::_?")


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
        so are those whose bytes are not known. The legend adds a column ``group`` to the name.
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
    ridges = [_ridge(roof, unit) for roof in roofs]
    span = min([points["intensity"].min(), *ridges]) / 2, max([points["intensity"].max(), *ridges]) * 3
    for roof, (colour, dashes) in zip(roofs, cycle(_ROOFS), strict=False):
        peak = roof.tflops[unit]
        label = f"{style.plain(roof.source, 36)}: {peak:,.4g} TFLOP/s, {roof.gb_per_s:,.0f} GB/s"
        look = {"color": colour, "linestyle": dashes}
        ridge = _ridge(roof, unit)
        axes.plot([span[0], ridge, span[1]], [span[0] * peak / ridge, peak, peak], linewidth=1.8, label=label, **look)
        for other in lower:
            if other in roof.tflops:
                _draw_ceiling(axes, roof, other, span, look)
    _draw_points(axes, points, top)
    axes.set(xscale="log", yscale="log", xlim=span, ylabel="reached (TFLOP/s)")
    axes.set_xlabel("arithmetic intensity (FLOPs a byte of compulsory traffic)")
    axes.set_ylim(top=1.5 * axes.get_ylim()[1])  # room for words
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(10))
        axis.set_minor_locator(NullLocator())
        style.in_unit(axis)
    style.legend(figure, 2)
    reached = points["reached"].map("{:,.3g} TFLOP/s".format) + points["intensity"].map(
        " at {:,.3g} FLOPs a byte".format
    )
    words = spoken(zip(points["name"], reached, strict=True), most=top)
    cards = " and ".join(roof.source for roof in roofs)
    return style.described(figure, f"{title}, points under the roofs of {cards or 'no card'}: {words}.")


def _ridge(rate: Rates, unit: str) -> float:
    """The intensity at which memory and compute take equally long."""
    return rate.tflops[unit] * 1e3 / rate.gb_per_s


def _draw_ceiling(axes: Any, rate: Rates, unit: str, span: tuple[float, float], look: dict[str, str]) -> None:
    """Draw the ceiling of another unit, and name it once, as roofs lie close to each other."""
    ceiling = rate.tflops[unit]
    axes.plot([max(_ridge(rate, unit), span[0]), span[1]], [ceiling] * 2, linewidth=0.9, **look)
    if unit not in [text.get_text() for text in axes.texts]:
        axes.annotate(unit, (span[1], ceiling), (-2, 3), textcoords="offset points", ha="right", fontsize=8)


def _draw_points(axes: Any, points: pd.DataFrame, top: int) -> None:
    """Draw the longest operations, each with its own marker and name, and the others small."""
    shown = points.head(top).to_dict("records")
    for row, colour, marker in zip(shown, cycle(style.SERIES), cycle("osD^vPX*<>hd"), strict=False):
        look = {"linestyle": "none", "marker": marker, "color": colour, "markersize": 7, "markeredgecolor": "white"}
        axes.plot(row["intensity"], row["reached"], label=_named(row), **look)
    rest = points.iloc[top:]
    if len(rest):
        label = f"{len(rest)} shorter ones"
        axes.plot(rest["intensity"], rest["reached"], ".", color=GREY, markersize=5, label=label)


def _named(row: dict[Any, Any]) -> str:
    """Name an operation for the legend, with its share of the datasheet's speed of light where that is known."""
    name = style.plain(_OPERATOR.sub("", str(row["name"])), 30)
    share = row.get("sol_datasheet", np.nan)
    if np.isfinite(share):
        name += f", {share:.0%}"
    return f"{name} ({style.plain(row['group'])})" if "group" in row else name
