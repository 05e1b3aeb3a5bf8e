"""The roofline: what operations reach, under what their intensity allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from nsightkit.analysis.sol import Rates
from nsightkit.plots._style import (
    BLUE,
    DARK_GREY,
    GREEN,
    OCHRE,
    PURPLE,
    RED,
    VERMILION,
    new_figure,
    nothing,
    plain,
    spoken,
)

_ROOFS = ((DARK_GREY, "-"), (BLUE, "--"), (PURPLE, "-."))
_MARKS = (
    *((BLUE, "o"), (VERMILION, "s"), (GREEN, "D"), (PURPLE, "^"), (OCHRE, "v"), (RED, "P"), (BLUE, "X"), (GREEN, "*")),
    *((VERMILION, "<"), (PURPLE, ">"), (OCHRE, "h"), (RED, "d")),
)


def roofline(
    table: pd.DataFrame, rates: Sequence[Rates], unit: str, *, title: str = "Roofline", top: int = 12
) -> Figure:
    """Draw the rate of each operation over its intensity, under one or several roofs.

    Parameters
    ----------
    table : DataFrame
        ``name, flops, intensity, time_ns`` and, as the legend shows it, ``sol_datasheet``, as from
        :func:`nsightkit.analysis.sol.judge`. Operations without FLOPs have no place here and are left out.
    rates : sequence of Rates
        A roof each, such as the datasheet's and the measured one.
    unit : str
        Whose peak rate the roofs have.
    title : str, default "Roofline"
    top : int, default 12
        How many operations, those that took longest.

    Returns
    -------
    matplotlib.figure.Figure
    """
    shown = table[table["flops"] > 0].nlargest(top, "time_ns")
    figure, axes = new_figure(5.4)
    axes.set_title(plain(title), loc="left")
    if shown.empty:
        nothing(axes, "no operation with FLOPs and a time")
        figure.set_label(f"{title}: no operations.")
        return figure
    reached = shown["flops"].to_numpy(float) / shown["time_ns"].to_numpy(float) / 1e3
    intensity = shown["intensity"].to_numpy(float)
    roofs = [rate for rate in rates if unit in rate.tflops and rate.gb_per_s > 0]
    ridges = [rate.tflops[unit] * 1e3 / rate.gb_per_s for rate in roofs]
    first = min([*intensity, *ridges]) / 2
    last = max([*intensity, *ridges]) * 3
    grid = np.geomspace(first, last, 200)
    for rate, (colour, line), ridge in zip(roofs, _ROOFS * len(roofs), ridges, strict=False):
        roof = np.minimum(grid * rate.gb_per_s / 1e3, rate.tflops[unit])
        said = f"{plain(rate.source, 36)}: {rate.tflops[unit]:,.4g} TFLOP/s, {rate.gb_per_s:,.0f} GB/s"
        axes.plot(grid, roof, color=colour, linestyle=line, linewidth=1.8, label=said)
        axes.plot([ridge], [rate.tflops[unit]], marker="|", color=colour, markersize=9)
    shares = shown["sol_datasheet"] if "sol_datasheet" in shown else pd.Series(np.nan, index=shown.index)
    for x, y, name, share, (colour, mark) in zip(
        intensity, reached, shown["name"], shares, _MARKS * (len(shown) // len(_MARKS) + 1), strict=False
    ):
        label = plain(name, 44) + (f", {share:.0%}" if np.isfinite(share) else "")
        axes.plot([x], [y], linestyle="none", marker=mark, color=colour, markersize=7, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(first, last)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(10))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("arithmetic intensity (FLOPs a byte of compulsory traffic)")
    axes.set_ylabel("reached (TFLOP/s)")
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=1 if len(shown) < 4 else 2, frameon=False,
        fontsize=8,
    )  # fmt: skip
    pairs: list[tuple[Any, str]] = [
        (name, f"{rate:,.3g} TFLOP/s at {at:,.3g} FLOPs a byte")
        for name, rate, at in zip(shown["name"], reached, intensity, strict=True)
    ]
    below = " and ".join(f"{r.source} ({r.tflops[unit]:,.4g} TFLOP/s, {r.gb_per_s:,.0f} GB/s)" for r in roofs)
    figure.set_label(f"{title}, points under the roofs of {below or 'no card'}: {spoken(pairs, most=12)}.")
    return figure
