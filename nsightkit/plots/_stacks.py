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
from nsightkit.plots.looks import DARK_GREY, QUANTITIES, part_name, spoken

#: Of parts without a colour of their own. They differ without colour too: the same hatch returns after five parts.
_COLOURS = (*style.SERIES, DARK_GREY)
_HATCHES = (None, "//", "..", "\\\\", "xx")
#: A part below this share of the longest bar is too small to see.
_LEAST_SHARE = 3e-3
#: Narrower than this share of its bar, a segment has no room for a number.
_LEAST_LABELLED_SHARE = 0.055


def stacks(
    columns: Mapping[str, pd.Series],
    *,
    quantity: Literal["share", "time", "memory"] = "share",
    axis: str = "",
    title: str = "Parts of the whole",
) -> Figure:
    """Divide each whole among its parts, one bar a whole.

    Parameters
    ----------
    columns : mapping of str to Series
        One bar each: its parts, by name, in nanoseconds or bytes. Missing and negative values have no length; a part
        too small to see in any bar has no place in the legend. A bar without any length is left out.
    quantity : {"share", "time", "memory"}
        What is drawn: shares of each bar's sum, whatever its unit, or amounts.
    axis : str, optional
        Label of the x axis. Default: the quantity.
    title : str, default "Parts of the whole"

    Returns
    -------
    matplotlib.figure.Figure
    """
    parts = style.side_by_side(columns).clip(lower=0)
    parts = parts.loc[:, parts.any()]
    figure, axes = style.new_figure(1.8 + 0.53 * max(parts.shape[1], 1), title)
    if parts.empty:
        return style.draw_nothing(figure, axes, title, "nothing to draw")
    sums = parts.sum()  # of each bar
    if quantity == "share":
        parts = parts / sums
        size = 1.0
        write: Callable[[float], str] = "{:.0%}".format
        axes.set(xlim=(0, 1), xlabel=axis or "share of each bar")
        axes.xaxis.set_major_formatter(PercentFormatter(1))
    else:
        unit_of, write = QUANTITIES[quantity]
        size, unit = unit_of(sums.max())
        # With room for the sum beside the longest bar.
        axes.set(xlim=(0, 1.14 * sums.max() / size), xlabel=f"{axis or quantity} ({unit})")
    is_visible = parts > _LEAST_SHARE * parts.sum().max()
    parts = parts[is_visible.any(axis=1)]
    segments = _draw_segments(axes, parts / size)
    if quantity == "share":
        _write_shares(axes, segments)
    else:
        # The last part's segments end where the bars end.
        axes.bar_label(segments[-1], sums.map(write), padding=4, fontsize=9)
    style.legend(figure, 4)
    sentences = []
    for label, amounts in parts.items():
        written = amounts[amounts > 0].map(write).rename(part_name)
        sentences.append((label, f"({spoken(written.items(), most=9)})"))
    return style.described(figure, f"{title}, stacked bars: {spoken(sentences)}.")


def _draw_segments(axes: Any, parts: pd.DataFrame) -> list[Any]:
    """Draw a bar per column of `parts`, with a segment per row; return the segments of each row."""
    left = np.zeros(parts.shape[1])
    looks: Iterable[Any] = zip(cycle(_COLOURS), cycle(_HATCHES), strict=False)
    # Causes, kinds of work and kinds of memory look the same in every figure.
    if style.LOOKS.keys() >= set(parts.index):
        looks = map(style.LOOKS.get, parts.index)
    segments = []
    for (name, widths), (colour, hatch) in zip(parts.iterrows(), looks, strict=False):
        segment = axes.barh(
            np.arange(len(left)),
            widths,
            left=left,
            height=0.62,
            color=colour,
            hatch=hatch,
            edgecolor="white",
            linewidth=0.3,  # a wider edge hides thin parts
            label=style.plain(part_name(str(name)), 40),
        )
        segments.append(segment)
        left = left + widths.to_numpy()
    style.name_rows(axes, parts.columns)
    return segments


def _write_shares(axes: Any, segments: list[Any]) -> None:
    """Write its share into each segment that has room; `segments` of a row look alike."""
    for row in segments:
        labels = [f"{width:.0%}" if width >= _LEAST_LABELLED_SHARE else "" for width in row.datavalues]
        # On a plate of the segment's colour: a hatch must not run through the digits.
        plate = {"facecolor": row[0].get_facecolor(), "edgecolor": "none", "pad": 1.2}
        axes.bar_label(row, labels, label_type="center", fontsize=9, color="white", fontweight="bold", bbox=plate)
