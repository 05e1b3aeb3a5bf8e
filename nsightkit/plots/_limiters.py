"""Kernels among the limiters: how much of the arithmetic and of the memory each uses."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.colors import ListedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from nsightkit.analysis.roofline.counters import classify
from nsightkit.plots._roofline import _MARKS
from nsightkit.plots._style import BLUE, GREY, PURPLE, VERMILION, new_figure, nothing, plain, spoken

__all__ = ["limiter_map"]

#: Of the regions: where their name stands (memory, compute), and their colour.
_REGIONS = {
    "latency-bound": ((27, 35), GREY),
    "compute-bound": ((27, 72), BLUE),
    "memory-bound": ((80, 35), VERMILION),
    "balanced": ((70, 69), PURPLE),
}


def limiter_map(table: pd.DataFrame, *, title: str = "What limits each kernel") -> Figure:
    """Draw kernels over the throughput of memory and of compute, on the regions of NVIDIA's rule.

    Parameters
    ----------
    table : DataFrame
        ``kernel``, ``sm_pct``, ``memory_pct`` and ``classification``, as from
        :func:`nsightkit.analysis.roofline.counters.summary`; ``name``, where there is one, is what the legend says
        instead of
        ``kernel``. Rows whose throughputs were not measured are left out.
    title : str, default "What limits each kernel"

    Returns
    -------
    matplotlib.figure.Figure
    """
    shown = table[table["sm_pct"].notna() & table["memory_pct"].notna()]
    figure, axes = new_figure(5.2, title, width=6.4)
    if shown.empty:
        return nothing(figure, axes, title, "no kernels with both throughputs")
    names = shown["name" if "name" in shown else "kernel"]
    # By the rule itself, point by point: the picture cannot differ from the classes.
    order = list(_REGIONS)
    grid = [[order.index(classify(y + 0.5, x + 0.5)) for x in range(100)] for y in range(100)]
    tints = ListedColormap([to_rgba(colour, 0.22) for _, colour in _REGIONS.values()])
    axes.imshow(np.array(grid), cmap=tints, vmin=0, vmax=len(order) - 1, extent=(0, 100, 0, 100), origin="lower")
    for region, (place, _) in _REGIONS.items():
        axes.text(*place, region, ha="center", va="center", fontsize=9, style="italic", zorder=1.5)  # below points
    for x, y, name, bound, (colour, mark) in zip(
        shown["memory_pct"], shown["sm_pct"], names, shown["classification"], _MARKS * (len(shown) // 12 + 1),
        strict=False,
    ):  # fmt: skip
        # The frame keeps apart what lies on one spot, and a point from a region of its colour.
        axes.plot(
            [x], [y], linestyle="none", marker=mark, color=colour, markersize=9, markeredgecolor="white", clip_on=False,
            label=f"{plain(name, 44)}: {bound}",
        )  # fmt: skip
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 100)
    axes.set_xlabel("memory throughput, the busiest of L1, L2 and DRAM")
    axes.set_ylabel("compute throughput, the busiest unit of the SMs")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks([0, 20, 40, 60, 80, 100])
        axis.set_major_formatter(PercentFormatter())
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=1 if len(shown) < 4 else 2, frameon=False,
        fontsize=9,
    )  # fmt: skip
    said = spoken(
        [
            (name, f"({bound}) at {y:.0f} % of compute and {x:.0f} % of memory")
            for name, bound, x, y in zip(
                names, shown["classification"], shown["memory_pct"], shown["sm_pct"], strict=True
            )
        ],
        most=12,
    )
    figure.set_label(f"{title}, points on the regions of NVIDIA's rule: {said}.")
    return figure
