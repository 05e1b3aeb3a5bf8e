"""Bytes: what they are made of, and how they grow with a size."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from numpy.typing import ArrayLike

from nsightkit.plots._memory import _CATEGORIES, _amount, _scale
from nsightkit.plots._style import (
    BLUE,
    DARK_GREY,
    GREEN,
    GREY,
    OCHRE,
    PURPLE,
    VERMILION,
    name_rows,
    new_figure,
    nothing,
    plain,
    spoken,
)

#: The ledger's items look as a snapshot's categories do.
_LOOKS = _CATEGORIES | {
    item: _CATEGORIES[category]
    for item, category in (
        ("autocast cache", "autocast copies"),
        ("temporary buffers", "temporary"),
        ("communication buckets", "communication"),
        ("inputs and tables", "inputs"),
        ("library workspaces", "workspaces"),
    )
}
#: A smaller share of the longest bar is too thin to see.
_THIN = 1e-3
# Told apart without colour, too.
_CURVES = ((BLUE, "-", "o"), (VERMILION, "--", "s"), (GREEN, "-.", "D"), (PURPLE, ":", "^"), (OCHRE, "-", "v"))


def memory_stacks(
    columns: Mapping[str, pd.Series], *, limit_bytes: float | None = None, title: str = "What the memory is made of"
) -> Figure:
    """Bytes by item, one stacked bar each, to see totals and parts beside each other.

    Parameters
    ----------
    columns : mapping of str to Series
        One bar each: bytes, by item. Missing and negative values have no length; an item too small to see in any bar
        has no place in the legend.
    limit_bytes : float, optional
        A line that no bar may reach.
    title : str, default "What the memory is made of"

    Returns
    -------
    matplotlib.figure.Figure
    """
    table = pd.DataFrame({label: pd.to_numeric(v).astype("Float64") for label, v in columns.items()})
    table = table.fillna(0).astype(float).clip(lower=0)
    table = table.reindex(list(dict.fromkeys(item for v in columns.values() for item in v.index)))
    totals = table.sum()
    table = table[table.gt(_THIN * totals.max()).any(axis=1)]
    figure, axes = new_figure(1.9 + 0.5 * max(len(columns), 1), title)
    if table.empty:
        return nothing(figure, axes, title, "nothing is known of this memory")
    scale, unit = _scale(max(float(totals.max()), limit_bytes or 0))
    rows, left = np.arange(len(totals)), np.zeros(len(totals))
    for item, sizes in table.iterrows():
        width = sizes.to_numpy(dtype=float) / scale
        colour, hatch = _LOOKS.get(str(item), (GREY, ""))
        axes.barh(
            rows, width, left=left, height=0.62, color=colour, edgecolor="white", label=plain(item, 40),
            hatch=hatch or None,
        )  # fmt: skip
        left += width
    for row, (end, total) in enumerate(zip(left, totals, strict=True)):
        axes.annotate(
            _amount(total), (end, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9
        )  # fmt: skip
    if limit_bytes is not None:
        axes.axvline(limit_bytes / scale, color=DARK_GREY, linestyle="--", label=f"limit, {_amount(limit_bytes)}")
    name_rows(axes, table.columns)
    axes.set_xlim(0, 1.14 * max(float(left.max()), (limit_bytes or 0) / scale))
    axes.set_xlabel(f"memory ({unit})")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    said = [
        (label, f"{_amount(totals[label])} ({spoken([(i, _amount(s)) for i, s in table[label].items() if s], most=9)})")
        for label in table.columns
    ]
    figure.set_label(f"{title}, stacked bars: {spoken(said)}.")
    return figure


def memory_curves(
    predicted: Mapping[str, tuple[ArrayLike, ArrayLike]],
    measured: Mapping[str, tuple[ArrayLike, ArrayLike]],
    *,
    failed: Mapping[str, float] | None = None,
    limit_bytes: float | None = None,
    title: str = "Memory against context",
    axis: str = "context (tokens)",
) -> Figure:
    """Bytes against a size on logarithmic axes: predicted as lines, measured as points, what did not fit as crosses.

    Parameters
    ----------
    predicted, measured : mapping of str to (array of shape (n,), array of shape (n,))
        Sizes and bytes by series; a series has one colour in both.
    failed : mapping of str to float, optional
        The size at which a series ran out of memory.
    limit_bytes : float, optional
        A line: the memory there is. Crosses lie on it, and without it nowhere.
    title : str, default "Memory against context"
    axis : str, default "context (tokens)"

    Returns
    -------
    matplotlib.figure.Figure
    """
    figure, axes = new_figure(3.8, title)
    names = list(dict.fromkeys([*predicted, *measured]))
    if not names:
        return nothing(figure, axes, title, "nothing to draw")
    said, lowest = [], np.inf
    for name, (colour, dash, marker) in zip(names, _CURVES * len(names), strict=False):
        words = []
        for kind, series, style in (
            ("predicted", predicted, {"linestyle": dash, "linewidth": 1.8}),
            ("measured", measured, {"linestyle": "none", "marker": marker, "markersize": 6}),
        ):
            if name in series:
                sizes, values = (np.asarray(part, dtype=float) for part in series[name])
                axes.plot(sizes, values, color=colour, label=f"{plain(name, 40)}, {kind}", **style)
                if len(values):
                    words.append(f"{kind} {_amount(values[0])} to {_amount(values[-1])}")
                    lowest = min(lowest, float(values.min()))
        if failed and name in failed and limit_bytes is not None:
            axes.plot([failed[name]], [limit_bytes], color=colour, marker="X", markersize=10, linestyle="none")
            words.append(f"out of memory at {failed[name]:g}")
        said.append((name, ", ".join(words)))
    if failed and limit_bytes is not None:
        axes.plot([], [], color=GREY, marker="X", markersize=10, linestyle="none", label="out of memory")
    if limit_bytes is not None:
        axes.axhline(limit_bytes, color=DARK_GREY, linewidth=1.5)
        axes.annotate(
            f"limit, {_amount(limit_bytes)}", (0, limit_bytes), xycoords=("axes fraction", "data"), xytext=(4, 4),
            textcoords="offset points", fontsize=9,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(bottom=lowest / 2 if np.isfinite(lowest) else None)
    if limit_bytes is not None:
        axes.set_ylim(top=limit_bytes * 3)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:g}"))
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0,) if high / low > 100 else (1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: _amount(size)))
    axes.set_xlabel(axis)
    axes.set_ylabel("memory at the peak")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.set_label(f"{title}, logarithmic axes: {spoken(said)}.")
    return figure
