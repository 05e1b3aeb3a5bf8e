"""What figures share: frames, text that matplotlib can draw, bars, legends, and the sentence that describes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font

from nsightkit import errors
from nsightkit.plots.looks import (
    BLUE,
    CATEGORY_COLOURS,
    CAUSE_COLOURS,
    GREEN,
    MEMORY,
    OCHRE,
    PURPLE,
    RED,
    VERMILION,
)

#: Colour and hatch of what looks the same in every figure: causes, kinds of work and kinds of memory.
LOOKS = {name: [colour, ""] for name, colour in (CAUSE_COLOURS | CATEGORY_COLOURS).items()} | MEMORY
#: Colours of series, in the order in which they are given out.
SERIES = (BLUE, VERMILION, GREEN, PURPLE, OCHRE, RED)


def new_figure(height: float, title: str) -> tuple[Figure, Any]:
    """Make a figure `height` inches high with one pair of axes, known to pyplot, which the gallery asks for figures."""
    figure, (axes,) = new_grid(1, height, title)
    return figure, axes


def new_grid(columns: int, height: float, title: str, **shared: Any) -> tuple[Figure, Any]:
    """Make a figure with axes side by side under one title, which may be as wide as all of them; `height` in inches.

    Of each frame only the left and the bottom line are drawn. `shared` is for :func:`matplotlib.pyplot.subplots`.
    """
    figure, grid = plt.subplots(1, columns, figsize=(7.6, height), layout="constrained", squeeze=False, **shared)
    figure.suptitle(plain(title), x=0.01, ha="left", fontsize="large")
    for axes in grid[0]:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, grid[0]


@lru_cache
def _figure_font() -> Any:
    """The font that figures are written in."""
    return get_font(findfont(FontProperties()))


def plain(text: object, longest: int = 60) -> str:
    """Write text from a trace as matplotlib can draw it, cut to `longest` characters.

    Names come from the profiled program: `$` would start a formula, and a character the font lacks warns.
    """
    words = errors.plain(text)
    if len(words) > longest:
        words = words[: longest - 1] + "…"
    for character in set(words):
        if not _figure_font().get_char_index(ord(character)):
            words = words.replace(character, "□")
    return words.replace("$", r"\$")


def described(figure: Figure, sentence: str) -> Figure:
    """Give a figure its label: the alternative text where it is published."""
    figure.set_label(sentence)
    return figure


def draw_nothing(figure: Figure, axes: Any, title: str, what: str) -> Figure:
    """Say in the axes, and in the figure's label, that there is nothing to draw."""
    axes.text(0.5, 0.5, what, ha="center", va="center", transform=axes.transAxes)
    axes.set(xticks=[], yticks=[])
    return described(figure, f"{title}: {what}.")


def legend(figure: Figure, columns: int) -> None:
    """Name what has a label in the first axes, each label once, below them: inside, no corner is sure to be free."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    handle_of_label = dict(zip(labels, handles, strict=True))
    if handle_of_label:
        place: Any = "outside lower center"  # a constrained layout knows it, the types do not
        figure.legend(
            list(handle_of_label.values()),
            list(handle_of_label),
            loc=place,
            ncols=columns,
            frameon=False,
            fontsize=9,
        )


def name_rows(axes: Any, names: Iterable[object], longest: int = 44) -> None:
    """Write the names of rows on the y axis, the first on top."""
    labels = [plain(name, longest) for name in names]
    axes.set_yticks(np.arange(len(labels)), labels=labels, fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()


def in_unit(axis: Any, size: float = 1) -> None:
    """Write the numbers of an axis in units of `size`, without trailing zeros."""
    axis.set_major_formatter(lambda value, _: f"{value / size:g}")


def side_by_side(columns: Mapping[str, pd.Series]) -> pd.DataFrame:
    """Make a table of series, a column each, by the names in their indexes: the parts of several bars.

    Names stay in the order in which they come. Values of one name in a series are summed; a missing one is 0.
    """
    sums = {}
    for label, values in columns.items():
        numbers = pd.to_numeric(values).fillna(0).astype(float)
        sums[label] = numbers.groupby(values.index.astype(str), sort=False).sum()
    return pd.concat(sums, axis=1).fillna(0)


def rectangles(left: Any, right: Any, low: Any, high: Any) -> np.ndarray:
    """The corners of rectangles, an array of shape (n, 4, 2); a side that is one number is that of all."""
    sides = np.stack(np.broadcast_arrays(left, right, low, high), 1)
    # Corners as numbers of sides: (left, low), (right, low), (right, high), (left, high).
    return sides[:, [[0, 2], [1, 2], [1, 3], [0, 3]]].astype(float)
