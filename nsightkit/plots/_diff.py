"""What changed between two captures: a point a row, with the interval that it lies in."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nsightkit.analysis.core.text import short_name
from nsightkit.plots._style import (
    BLUE,
    GREY,
    OCHRE,
    VERMILION,
    duration,
    name_rows,
    new_figure,
    nothing,
    plain,
    spoken,
    time_unit,
)

#: How sure a change is, in the order of the legend; by marker as well as by colour.
_MARKS = {
    "significant": (VERMILION, "o"),
    "exceeds step spread": (VERMILION, "D"),
    "unsure": (OCHRE, "^"),
    "within noise": (BLUE, "s"),
    "small": (BLUE, "v"),
    "cannot tell": (GREY, "D"),
    "negligible": (GREY, "v"),
}


def change_intervals(rows: pd.DataFrame, *, top: int = 12, title: str = "What changed") -> Figure:
    """Changes of a step's parts as points, each with its interval; 0 is not a change.

    Parameters
    ----------
    rows : DataFrame
        A table of :func:`nsightkit.analysis.compare.diff.compare`, or several, one below the other: ``delta_ns, low_ns,
        high_ns, before_ns, after_ns, significance``, and ``name``, ``cause`` or ``kind``, with ``clock`` where there is
        one.
    top : int, default 12
        How many to draw, from the first.
    title : str, default "What changed"

    Returns
    -------
    matplotlib.figure.Figure
    """
    shown = rows.head(top)
    figure, axes = new_figure(1.5 + 0.34 * max(len(shown), 2))
    # Over the whole width: names of rows leave the axes too little of it.
    figure.suptitle(plain(title), x=0.01, ha="left", fontsize="large")
    if shown.empty:
        return nothing(figure, axes, title, "nothing to compare")
    delta, low, high = (shown[c].to_numpy(np.float64) for c in ("delta_ns", "low_ns", "high_ns"))
    low, high = (np.where(np.isfinite(end), end, delta) for end in (low, high))
    scale, unit = time_unit(max(float(np.abs([low, high, delta]).max()), 1.0))
    axes.axvline(0, color=GREY, linewidth=1)
    kinds = shown["significance"].to_numpy(object)
    for kind, (colour, marker) in _MARKS.items():
        at = np.flatnonzero(kinds == kind)
        if len(at):
            axes.hlines(at, low[at] / scale, high[at] / scale, color=colour, linewidth=2)
            axes.plot(delta[at] / scale, at, marker, color=colour, markersize=6, label=kind, linestyle="none")
    names = [_named(row) for row in shown.to_dict("records")]
    name_rows(axes, names)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlabel(f"change of a step's time ({unit}), with its interval")
    figure.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=len(_MARKS))
    said = [
        (name, f"{duration(row['before_ns'])} then {duration(row['after_ns'])}, {row['significance']}")
        for name, row in zip(names, shown.to_dict("records"), strict=True)
    ]
    figure.set_label(f"{title}, points with intervals around no change: {spoken(said, most=12)}.")
    return figure


def _named(row: Mapping[Hashable, Any]) -> str:
    name = next((str(row[c]) for c in ("name", "cause", "kind") if isinstance(row.get(c), str)), "").removesuffix("_ns")
    if isinstance(row.get("before_names"), list):  # a kernel
        name = short_name(name)
    return f"{name} ({row['clock']})" if isinstance(row.get("clock"), str) else name
