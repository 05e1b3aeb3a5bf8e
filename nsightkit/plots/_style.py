"""Colours, units and text that every figure shares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font

from nsightkit.plots._base import (
    BLUE,
    CATEGORY_COLOURS,
    CAUSE_COLOURS,
    DARK_GREY,
    GREEN,
    GREY,
    OCHRE,
    PURPLE,
    RED,
    VERMILION,
    duration,
    spoken,
    time_unit,
)

__all__ = [
    "BLUE",
    "CATEGORY_COLOURS",
    "CAUSE_COLOURS",
    "DARK_GREY",
    "GREEN",
    "GREY",
    "OCHRE",
    "PURPLE",
    "RED",
    "VERMILION",
    "duration",
    "first_rows",
    "label_bars",
    "name_rows",
    "new_figure",
    "nothing",
    "plain",
    "spoken",
    "time_unit",
]


def new_figure(height: float, title: str = "", width: float = 7.6) -> tuple[Figure, Any]:
    """Make a figure with one pair of axes, known to pyplot, no frame but the left and the bottom line."""
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(plain(title), loc="left")
    return figure, axes


@lru_cache
def _font() -> Any:
    return get_font(findfont(FontProperties()))


def plain(text: object, longest: int = 60) -> str:
    """Text from a trace as matplotlib may draw it.

    Names come from the profiled program: `$` would start a formula, and a character the font lacks warns.
    """
    words = " ".join(str(text).split())
    if len(words) > longest:
        words = words[: longest - 1] + "…"
    drawable = "".join(c if _font().get_char_index(ord(c)) else "□" for c in words)
    return drawable.replace("$", r"\$")


def label_bars(axes: Any, bars: Any, labels: Iterable[str]) -> None:
    """Values at the end of horizontal bars, with room for them."""
    axes.bar_label(bars, list(labels), padding=4, fontsize=9)
    axes.margins(x=0.22)
    axes.set_xlim(left=0)


def name_rows(axes: Any, names: Iterable[object], longest: int = 44) -> None:
    """Row names on the y axis, first row on top."""
    labels = [plain(n, longest) for n in names]
    axes.set_yticks(np.arange(len(labels)), labels=labels, fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()


def first_rows(rows: pd.DataFrame, top: int, name: str, sums: Sequence[str]) -> pd.DataFrame:
    """Keep the first rows, and sum up the others in one more."""
    rest = rows.iloc[top:]
    if rest.empty:
        return rows
    others = pd.DataFrame([{name: f"{len(rest)} others", **{column: rest[column].sum() for column in sums}}])
    return pd.concat([rows.head(top), others], ignore_index=True)


def nothing(figure: Figure, axes: Any, title: str, what: str) -> Figure:
    """Say in the axes, and in the figure's label, that there is nothing to draw."""
    figure.set_label(f"{title}: {what}.")
    axes.text(0.5, 0.5, what, ha="center", va="center", transform=axes.transAxes)
    axes.set_xticks([])
    axes.set_yticks([])
    return figure
