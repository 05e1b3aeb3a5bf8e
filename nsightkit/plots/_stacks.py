"""Stacked bars: how wholes divide among their parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import cycle
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from nsightkit.plots import style
from nsightkit.plots.looks import DARK_GREY, amount, byte_unit, duration, spoken, time_unit

#: Of parts without a colour of their own. They also differ without colour: those with the same hatch are five apart.
_COLOURS, _HATCHES = (*style.SERIES, DARK_GREY), (None, "//", "..", "\\\\", "xx")
#: Narrower than this share of its bar, a segment has no room for a number.
_ROOM = 0.055


def share_bars(columns: Mapping[str, pd.Series], *, title: str = "Shares of the whole") -> Figure:
    """Divide each whole among its parts, one bar a whole, to see where they disagree.

    Parameters
    ----------
    columns : mapping of str to Series
        One bar each: its parts, by name. Units may differ between bars, because each is divided by its sum. A bar
        that sums to zero or holds only missing values is left out.
    title : str, default "Shares of the whole"

    Returns
    -------
    matplotlib.figure.Figure
    """
    sizes = style.side_by_side(columns)
    sizes = sizes.loc[:, sizes.sum() > 0]
    figure, axes = style.new_figure(1.7 + 0.55 * max(sizes.shape[1], 1), title)
    if sizes.empty:
        return style.nothing(figure, axes, title, "nothing to divide in this trace")
    shares = sizes / sizes.sum()
    shares = shares[shares.any(axis=1)]
    for bars in _stacked(axes, shares):
        numbers = [f"{width:.0%}" if width >= _ROOM else "" for width in bars.datavalues]
        # On a plate of the segment's colour: a hatch must not run through the digits.
        plate = {"facecolor": bars[0].get_facecolor(), "edgecolor": "none", "pad": 1.2}
        axes.bar_label(bars, numbers, label_type="center", fontsize=9, color="white", fontweight="bold", bbox=plate)
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.set(xlim=(0, 1), xlabel="share of the bar's whole")
    style.legend(figure, 4)
    return _described(figure, shares, title, "{:.0%}".format)


def stacks(
    columns: Mapping[str, pd.Series],
    *,
    quantity: Literal["time", "memory"] = "time",
    axis: str = "",
    title: str = "Parts and their sums",
) -> Figure:
    """Stack the parts of each whole, one bar a whole, to see totals and parts beside each other.

    Parameters
    ----------
    columns : mapping of str to Series
        One bar each: nanoseconds or bytes of its parts, by name. Missing and negative values have no length; a part
        too small to see in any bar has no place in the legend.
    quantity : {"time", "memory"}
    axis : str, optional
        Label of the x axis. Default: the quantity.
    title : str, default "Parts and their sums"

    Returns
    -------
    matplotlib.figure.Figure
    """
    unit_of, write = (time_unit, duration) if quantity == "time" else (byte_unit, amount)
    parts = style.side_by_side(columns).clip(lower=0)
    totals = parts.sum()
    parts = parts[(parts > 1e-3 * totals.max()).any(axis=1)]
    figure, axes = style.new_figure(1.9 + 0.5 * max(parts.shape[1], 1), title)
    if parts.empty:
        return style.nothing(figure, axes, title, "nothing to draw")
    size, unit = unit_of(totals.max())
    segments = _stacked(axes, parts / size)
    axes.bar_label(segments[-1], totals.map(write), padding=4, fontsize=9)
    axes.set(xlim=(0, 1.14 * totals.max() / size), xlabel=f"{axis or quantity} ({unit})")
    style.legend(figure, 4)
    return _described(figure, parts, title, write)


def _stacked(axes: Any, parts: pd.DataFrame) -> list[Any]:
    """Draw a bar a column, of one segment after another: a row of `parts` each."""
    left = np.zeros(parts.shape[1])
    looks: Iterable[style.Look] = zip(cycle(_COLOURS), cycle(_HATCHES), strict=False)
    if all(style.is_known(name) for name in parts.index):
        looks = map(style.look_of, parts.index)
    segments = []
    for (name, widths), (colour, hatch) in zip(parts.iterrows(), looks, strict=False):
        look = {"color": colour, "hatch": hatch, "edgecolor": "white", "label": style.plain(name, 40)}
        segments.append(axes.barh(np.arange(len(left)), widths, left=left, height=0.62, **look))
        left = left + widths.to_numpy()
    style.name_rows(axes, parts.columns)
    return segments


def _described(figure: Figure, parts: pd.DataFrame, title: str, write: Callable[[float], str]) -> Figure:
    """Write out each bar with its parts."""
    sentences = []
    for label, sizes in parts.items():
        words = sizes[sizes > 0].map(write)
        sentences.append((label, f"({spoken(words.items(), most=9)})"))
    return style.described(figure, f"{title}, stacked bars: {spoken(sentences)}.")
