"""The roofline: what operations reach, under what their intensity allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from nsightkit.analysis.roofline.sol import Rates
from nsightkit.plots._style import (
    BLUE,
    DARK_GREY,
    GREEN,
    GREY,
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
    every = table[(table["flops"] > 0) & table["intensity"].notna()].sort_values(
        "time_ns", ascending=False, kind="stable"
    )
    shown, rest = every.head(top), every.iloc[top:]
    figure, axes = new_figure(5.4, title)
    if shown.empty:
        return nothing(figure, axes, title, "no operations with FLOPs and a time")
    reached = shown["flops"].to_numpy(float) / shown["time_ns"].to_numpy(float) / 1e3
    intensity = shown["intensity"].to_numpy(float)
    roofs = [rate for rate in rates if unit in rate.tflops and rate.gb_per_s > 0]
    ridges = [rate.tflops[unit] * 1e3 / rate.gb_per_s for rate in roofs]
    all_intensities = every["intensity"].to_numpy(float)
    first = min([*all_intensities, *ridges]) / 2
    last = max([*all_intensities, *ridges]) * 3
    grid = np.geomspace(first, last, 200)
    told: set[str] = set()
    for rate, (colour, line), ridge in zip(roofs, _ROOFS * len(roofs), ridges, strict=False):
        roof = np.minimum(grid * rate.gb_per_s / 1e3, rate.tflops[unit])
        said = f"{plain(rate.source, 36)}: {rate.tflops[unit]:,.4g} TFLOP/s, {rate.gb_per_s:,.0f} GB/s"
        axes.plot(grid, roof, color=colour, linestyle=line, linewidth=1.8, label=said)
        axes.plot([ridge], [rate.tflops[unit]], marker="|", color=colour, markersize=9)
        for other in (name for name in lower if name in rate.tflops):
            ceiling = rate.tflops[other]
            begin = max(ceiling * 1e3 / rate.gb_per_s, first)
            axes.plot([begin, last], [ceiling] * 2, color=colour, linestyle=line, linewidth=0.9)
            if other not in told:  # once: the roofs lie close to each other
                told.add(other)
                axes.annotate(
                    plain(other), (last, ceiling), (-2, 3), textcoords="offset points", ha="right", fontsize=8,
                )  # fmt: skip
    shares = shown["sol_datasheet"] if "sol_datasheet" in shown else pd.Series(np.nan, index=shown.index)
    for x, y, name, share, (colour, mark) in zip(
        intensity, reached, shown["name"], shares, _MARKS * (len(shown) // len(_MARKS) + 1), strict=False
    ):
        label = plain(name, 44) + (f", {share:.0%}" if np.isfinite(share) else "")
        axes.plot([x], [y], linestyle="none", marker=mark, color=colour, markersize=7, label=label)
    if len(rest):
        rates_of_rest = rest["flops"].to_numpy(float) / rest["time_ns"].to_numpy(float) / 1e3
        said = f"{len(rest)} quicker ones"
        at = rest["intensity"].to_numpy(float)
        axes.plot(at, rates_of_rest, linestyle="none", marker=".", color=GREY, markersize=5, label=said)
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
    more = f"; {len(rest)} more" if len(rest) else ""
    figure.set_label(f"{title}, points under the roofs of {below or 'no card'}: {spoken(pairs, most=12)}{more}.")
    return figure
