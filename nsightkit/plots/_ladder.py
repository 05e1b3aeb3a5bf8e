"""The rungs of a ladder: what each spends its time on, and how little it could be."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nsightkit.plots._shares import _COLOURS, _HATCHES
from nsightkit.plots._style import GREY, duration, name_rows, new_figure, nothing, plain, spoken, time_unit

__all__ = ["ladder_bars"]

_DASHES = ("-", "--", ":", "-.")


def ladder_bars(
    times: pd.DataFrame,
    parts: Mapping[str, pd.Series],
    floors: Mapping[str, float] | None = None,
    *,
    title: str = "Time of a rung",
    most: int = 6,
) -> Figure:
    """Stacked bars of time, one a rung, with lines for the least time there could be.

    Parameters
    ----------
    times : DataFrame
        ``rung``, ``time_ns``, ``low_ns`` and ``high_ns``, as :func:`nsightkit.investigations.pages.ladder.summary`
        returns them.
    parts : mapping of str to Series
        By rung, nanoseconds by kind of work, as :func:`nsightkit.investigations.pages.ladder.kinds` returns them. What
        they leave of the time is drawn as the rest; where they are more than it, for a profiler makes a CPU slower,
        they are drawn in proportion.
    floors : mapping of str to float, optional
        Least times in nanoseconds, by what they are the least of.
    title : str, default "Time of a rung"
    most : int, default 6
        Kinds of work with a colour of their own; the smaller ones are one part.

    Returns
    -------
    matplotlib.figure.Figure
    """
    figure, axes = new_figure(1.9 + 0.38 * max(len(times), 2), title)
    if times.empty:
        return nothing(figure, axes, title, "no rung was measured")
    rungs, total = list(times["rung"]), times["time_ns"].to_numpy(float)
    table = pd.DataFrame({rung: parts.get(rung, pd.Series(dtype=float)) for rung in rungs}).fillna(0.0)
    table = table.loc[table.sum(axis=1).sort_values(ascending=False, kind="stable").index]
    if len(table) > most:
        table = pd.concat([table.iloc[: most - 1], table.iloc[most - 1 :].sum().to_frame("the others").T])
    spent = table.sum().to_numpy()
    shrunk = table * np.minimum(1.0, np.divide(total, spent, out=np.ones_like(total), where=spent > 0))
    scale, unit = time_unit(float(max(total.max(), *(floors or {"": 0.0}).values())))
    rows, left = np.arange(len(rungs)), np.zeros(len(rungs))
    for number, (part, values) in enumerate(shrunk.iterrows()):
        width = values.to_numpy() / scale
        axes.barh(
            rows, width, left=left, height=0.66, color=_COLOURS[number % len(_COLOURS)], edgecolor="white",
            hatch=_HATCHES[number % len(_HATCHES)], label=plain(part, 40),
        )  # fmt: skip
        left += width
    rest = total / scale - left
    if (rest > 1e-3 * total / scale).any():
        axes.barh(rows, rest, left=left, height=0.66, color=GREY, edgecolor="white", label="the rest, or idle")
    spread = np.abs(times[["low_ns", "high_ns"]].to_numpy(float).T - total) / scale
    axes.errorbar(total / scale, rows, xerr=spread, fmt="none", ecolor="black", elinewidth=1.2, capsize=2.5)
    for (what, floor), dashes in zip((floors or {}).items(), _DASHES, strict=False):
        axes.axvline(floor / scale, color="black", linewidth=1.2, linestyle=dashes, label=plain(what, 60))
    name_rows(axes, rungs)
    axes.set_xlabel(f"time of a layer ({unit})")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    said = spoken([(rung, duration(ns)) for rung, ns in zip(rungs, total, strict=True)], most=12)
    least = spoken([(what, duration(ns)) for what, ns in (floors or {}).items()])
    figure.set_label(f"{title}, stacked bars by kind of work: {said}{f'; lines at {least}' if least else ''}.")
    return figure
