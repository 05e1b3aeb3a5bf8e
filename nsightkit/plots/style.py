"""What figures share: frames, text that matplotlib can draw, bars, legends, and the sentence that describes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ticker import LogLocator, NullLocator

from nsightkit import safe
from nsightkit.plots.looks import BLUE, GREEN, OCHRE, PURPLE, RED, VERMILION, tick

#: A colour and a hatch.
Look = tuple[str, str | None]
#: Colours and dashes of series, which also differ without colour.
LINES: tuple[tuple[str, Any], ...] = (
    (BLUE, "-"),
    (VERMILION, "--"),
    (GREEN, "-."),
    (PURPLE, ":"),
    (OCHRE, (0, (5, 1, 1, 1, 1, 1))),
    (RED, (0, (3, 1))),
)
WIDTH_INCHES = 7.6


def new_figure(height: float, title: str = "", width: float = WIDTH_INCHES) -> tuple[Figure, Any]:
    """Make a figure with one pair of axes, known to pyplot, no frame but the left and the bottom line."""
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(plain(title), loc="left")
    return figure, axes


def new_grid(rows: int, columns: int, height: float, title: str, **shared: Any) -> tuple[Figure, Any]:
    """Make a figure with rows of axes under one title, which may be as wide as all of them."""
    size = (WIDTH_INCHES, height)
    figure, grid = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **shared)
    figure.suptitle(plain(title), x=0.01, ha="left", fontsize="large")
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, grid


@lru_cache
def _font() -> Any:
    return get_font(findfont(FontProperties()))


def plain(text: object, longest: int = 60) -> str:
    """Text from a trace as matplotlib may draw it.

    Names come from the profiled program: `$` would start a formula, and a character the font lacks warns.
    """
    words = safe.plain(text)
    if len(words) > longest:
        words = words[: longest - 1] + "…"
    drawable = ""
    for character in words:
        drawable += character if _font().get_char_index(ord(character)) else "□"
    return drawable.replace("$", r"\$")


def described(figure: Figure, sentence: str) -> Figure:
    """Give a figure its label: the alternative text where it is published."""
    figure.set_label(sentence)
    return figure


def nothing(figure: Figure, axes: Any, title: str, what: str) -> Figure:
    """Say in the axes, and in the figure's label, that there is nothing to draw."""
    axes.text(0.5, 0.5, what, ha="center", va="center", transform=axes.transAxes)
    axes.set(xticks=[], yticks=[])
    return described(figure, f"{title}: {what}.")


def legend(figure: Figure, columns: int, handles: Mapping[str, Any] | None = None, **settings: Any) -> None:
    """Explain what has a label, or the handles that are given, below the axes: inside, no corner is sure to be free."""
    if handles is None:
        drawn, labels = figure.axes[0].get_legend_handles_labels()
    else:
        drawn, labels = list(handles.values()), list(handles)
    if drawn:
        options: dict[str, Any] = {"frameon": False, "fontsize": 9} | settings
        figure.legend(drawn, labels, loc="outside lower center", ncols=columns, **options)


def label_bars(axes: Any, bars: Any, labels: Iterable[str]) -> None:
    """Values at the end of horizontal bars, with room for them."""
    axes.bar_label(bars, list(labels), padding=4, fontsize=9)
    axes.margins(x=0.22)
    axes.set_xlim(left=0)


def name_rows(axes: Any, names: Iterable[object], longest: int = 44) -> None:
    """Row names on the y axis, first row on top."""
    labels = [plain(name, longest) for name in names]
    axes.set_yticks(np.arange(len(labels)), labels=labels, fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()


def side_by_side(columns: Mapping[str, pd.Series]) -> pd.DataFrame:
    """Make a table of numbers by name, a column each, in the order in which the names come; 0 for what is missing."""
    names: dict[str, None] = {}
    numbers = {}
    for label, values in columns.items():
        text = values.index.astype(str)
        names |= dict.fromkeys(text)
        numbers[label] = pd.to_numeric(values).astype("Float64").groupby(text).sum()
    return pd.DataFrame(numbers, index=list(names)).fillna(0).astype(float)


def stack(axes: Any, parts: pd.DataFrame, looks: Sequence[Look]) -> list[Any]:
    """Draw a bar a column, of one segment after another: a row of `parts` each, with its colour and its hatch."""
    places = np.arange(parts.shape[1])
    left = np.zeros(parts.shape[1])
    segments = []
    for (name, widths), (colour, hatch) in zip(parts.iterrows(), looks, strict=True):
        look = {"color": colour, "hatch": hatch, "edgecolor": "white", "label": plain(name, 40)}
        segments.append(axes.barh(places, widths, left=left, height=0.62, **look))
        left = left + widths.to_numpy()
    name_rows(axes, parts.columns)
    return segments


def rectangles(left: Any, right: Any, bottom: Any, top: Any) -> Any:
    """Outline rectangles, each as a shape of its own; a side may be the same of all."""
    sides = np.stack(np.broadcast_arrays(left, right, bottom, top), 1).astype(float)
    return sides[:, [[0, 2], [1, 2], [1, 3], [0, 3]]]


def decades(axis: Any, write: Callable[[float], str], low: float, high: float) -> None:
    """Mark powers of ten on an axis, and between them where there are few."""
    marked = (1.0,) if high / low > 100 else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(10, marked))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: write(value))


def time_axis(axes: Any, label: str, first: float, last: float) -> None:
    """Make the x axis one of times on a logarithmic scale."""
    axes.set(xscale="log", xlim=(first, last), xlabel=label)
    decades(axes.xaxis, tick, first, last)
