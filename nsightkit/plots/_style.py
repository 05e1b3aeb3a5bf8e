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
from nsightkit.plots.looks import BLUE, GREEN, OCHRE, PURPLE, RED, VERMILION, spoken, tick

#: A colour and a hatch.
Look = tuple[str, str | None]
#: Series that also differ without colour.
LINES: tuple[tuple[str, Any], ...] = (
    (BLUE, "-"), (VERMILION, "--"), (GREEN, "-."), (PURPLE, ":"), (OCHRE, (0, (5, 1, 1, 1, 1, 1))), (RED, (0, (3, 1))),
)  # fmt: skip


def new_figure(height: float, title: str = "", width: float = 7.6) -> tuple[Figure, Any]:
    """Make a figure with one pair of axes, known to pyplot, no frame but the left and the bottom line."""
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(plain(title), loc="left")
    return figure, axes


def new_grid(rows: int, columns: int, height: float, title: str, **shared: Any) -> tuple[Figure, Any]:
    """Make a figure with rows of axes under one title, which may be as wide as all of them."""
    figure, grid = plt.subplots(
        rows, columns, figsize=(7.6, height), layout="constrained", squeeze=False, **shared
    )  # fmt: skip
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
    words = words if len(words) <= longest else words[: longest - 1] + "…"
    return "".join(c if _font().get_char_index(ord(c)) else "□" for c in words).replace("$", r"\$")


def label_bars(axes: Any, bars: Any, labels: Iterable[str]) -> None:
    """Values at the end of horizontal bars, with room for them."""
    axes.bar_label(bars, list(labels), padding=4, fontsize=9)
    axes.margins(x=0.22)
    axes.set_xlim(left=0)


def ranked_bars(
    names: pd.Series, values: pd.Series, labels: Sequence[str], looks: Sequence[Look], *, title: str, axis: str,
    unit_of: Callable[[float], tuple[float, str]], empty: str, row_height: float = 0.34, longest: int = 40,
    said: Iterable[object] | None = None, legend: Mapping[str, int] | None = None, legend_title: str | None = None,
    **look: Any,
) -> Figure:  # fmt: skip
    """Draw a figure of a named bar a row, with its value in words at its end; a legend names the rows it is given."""
    figure, axes = new_figure(1.2 + row_height * max(len(values), 2), title)
    if values.empty:
        return nothing(figure, axes, title, empty)
    scale, unit = unit_of(values.max())
    colours, hatches = zip(*looks, strict=True)
    bars = axes.barh(
        np.arange(len(values)), values.to_numpy(float) / scale, height=0.68, color=colours, hatch=hatches, **look
    )
    label_bars(axes, bars, labels)
    name_rows(axes, names, longest)
    pairs = zip(names if said is None else said, labels, strict=True)
    return finished(
        figure, axes, f"{title}, horizontal bars: {spoken(pairs)}.", xlabel=f"{axis} ({unit})",
        legend=4 if legend else 0, handles={name: bars[row] for name, row in (legend or {}).items()},
        legend_title=legend_title,
    )  # fmt: skip


def side_by_side(columns: Mapping[str, pd.Series]) -> pd.DataFrame:
    """Make a table of numbers by name, a column each, in the order in which the names come; 0 for what is missing."""
    numbers = {
        label: pd.to_numeric(v).astype("Float64").groupby(v.index.astype(str)).sum() for label, v in columns.items()
    }
    names = dict.fromkeys(str(name) for v in columns.values() for name in v.index)
    return pd.DataFrame(numbers, index=list(names)).fillna(0).astype(float)


def stack(axes: Any, parts: pd.DataFrame, looks: Iterable[Look], height: float = 0.62) -> list[Any]:
    """Draw a bar a column, of one segment after another: a row of `parts` each, with its colour and its hatch."""
    rows, left = np.arange(parts.shape[1]), parts.cumsum().shift(fill_value=0.0)
    return [
        axes.barh(
            rows, parts.iloc[i], left=left.iloc[i], height=height, color=colour, edgecolor="white", hatch=hatch or None,
            label=plain(parts.index[i], 40),
        )
        for i, (colour, hatch) in zip(range(len(parts)), looks, strict=False)
    ]  # fmt: skip


def rectangles(left: Any, right: Any, bottom: Any, top: Any) -> Any:
    """Outline rectangles, each as a shape of its own; a side may be the same of all."""
    sides = np.stack(np.broadcast_arrays(left, right, bottom, top), 1).astype(float)
    return sides[:, [[0, 2], [1, 2], [1, 3], [0, 3]]]


def name_rows(axes: Any, names: Iterable[object], longest: int = 44) -> None:
    """Row names on the y axis, first row on top."""
    labels = [plain(n, longest) for n in names]
    axes.set_yticks(np.arange(len(labels)), labels=labels, fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()


def first_rows(rows: pd.DataFrame, top: int, name: str, sums: Sequence[str]) -> pd.DataFrame:
    """Keep the first rows, and sum up the others in one more."""
    rest = rows.iloc[top:]
    others = pd.DataFrame([{name: f"{len(rest)} others", **{column: rest[column].sum() for column in sums}}])
    return rows if rest.empty else pd.concat([rows.head(top), others], ignore_index=True)


def decades(axis: Any, write: Callable[[float], str], low: float, high: float) -> None:
    """Mark powers of ten on an axis, and between them where there are few."""
    locator = LogLocator(10, (1.0,) if high / low > 100 else (1.0, 2.0, 5.0))
    axis.set(major_locator=locator, minor_locator=NullLocator(), major_formatter=lambda value, _: write(value))


def time_axis(axes: Any, label: str, first: float, last: float) -> None:
    """Make the x axis one of times on a logarithmic scale."""
    axes.set(xscale="log", xlim=(first, last), xlabel=label)
    decades(axes.xaxis, tick, first, last)


def finished(
    figure: Figure, axes: Any, sentence: str, *, legend: int = 0, handles: Mapping[str, Any] | None = None,
    size: float = 9, legend_title: str | None = None, **settings: Any,
) -> Figure:  # fmt: skip
    """Give axes their settings, and a figure its legend, in so many columns, and its label.

    The legend, of what has a label in the axes or of the handles that are given, stands below the axes: inside, no
    corner is sure to be free. The label is the alternative text where the figure is published.
    """
    axes.set(**settings)
    if legend:
        drawn = axes.get_legend_handles_labels() if handles is None else (list(handles.values()), list(handles))
        figure.legend(
            *drawn, loc="outside lower center", ncols=legend, frameon=False, fontsize=size, title=legend_title
        )
    figure.set_label(sentence)
    return figure


def nothing(figure: Figure, axes: Any, title: str, what: str) -> Figure:
    """Say in the axes, and in the figure's label, that there is nothing to draw."""
    axes.text(0.5, 0.5, what, ha="center", va="center", transform=axes.transAxes)
    return finished(figure, axes, f"{title}: {what}.", xticks=[], yticks=[])
