"""Stacked bars: how several columns divide their wholes among the same parts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from nsightkit.plots._style import (
    BLUE,
    DARK_GREY,
    GREEN,
    GREY,
    OCHRE,
    PURPLE,
    RED,
    VERMILION,
    name_rows,
    new_figure,
    nothing,
    plain,
    spoken,
)

# Told apart without colour, too: parts with the same hatch are five apart.
_COLOURS = (BLUE, VERMILION, GREEN, PURPLE, OCHRE, RED, DARK_GREY)
_HATCHES = (None, "//", "..", "\\\\", "xx")
#: Narrower than this a segment has no room for its share.
_ROOM = 0.055


def share_bars(columns: Mapping[str, pd.Series], *, title: str = "Shares of the whole") -> Figure:
    """Divide each whole among its parts, one bar a whole, to see where they disagree.

    Parameters
    ----------
    columns : mapping of str to Series
        One bar each: its parts, by name. Units may differ between bars, as each is drawn as shares of its own sum. A
        bar that sums to zero or holds only missing values is left out.
    title : str, default "Shares of the whole"

    Returns
    -------
    matplotlib.figure.Figure
    """
    sizes = {label: pd.to_numeric(v).astype("Float64").fillna(0).astype(float) for label, v in columns.items()}
    shares = {label: v / v.sum() for label, v in sizes.items() if v.sum() > 0}
    figure, axes = new_figure(1.7 + 0.55 * max(len(shares), 1), title)
    if not shares:
        return nothing(figure, axes, title, "nothing to divide in this trace")
    parts = list(dict.fromkeys(str(part) for v in shares.values() for part in v.index))
    table = pd.DataFrame({label: v.groupby(v.index.astype(str)).sum() for label, v in shares.items()})
    table = table.reindex(parts).fillna(0)
    rows, left = np.arange(len(shares)), np.zeros(len(shares))
    for number, part in enumerate(parts):
        width = table.loc[part].to_numpy()
        unattributed = part.startswith("(")
        colour = GREY if unattributed else _COLOURS[number % len(_COLOURS)]
        bars = axes.barh(
            rows, width, left=left, height=0.62, color=colour, edgecolor="white", label=plain(part, 40),
            hatch=None if unattributed else _HATCHES[number % len(_HATCHES)],
        )  # fmt: skip
        shown = [f"{share:.0%}" if share >= _ROOM else "" for share in width]
        # On a plate of the segment's colour: a hatch must not run through the digits.
        axes.bar_label(
            bars, shown, label_type="center", fontsize=9, color="white", fontweight="bold",
            bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.2},
        )  # fmt: skip
        left += width
    name_rows(axes, shares)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel("share of the bar's whole")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    said = [
        (label, "(" + spoken([(p, f"{s:.0%}") for p, s in table[label].items() if s > 0], most=9) + ")")
        for label in shares
    ]
    figure.set_label(f"{title}, stacked bars: {spoken(said)}.")
    return figure
