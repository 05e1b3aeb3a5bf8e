"""Ranks of a job side by side: who waits for whom in their collectives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nsightkit.analysis.ranks.job import waited
from nsightkit.plots import style
from nsightkit.plots.looks import BLUE, OCHRE, duration, spoken, time_unit

#: Rows of a figure. Of more ranks it shows the late ones, which waited least.
_MOST_RANKS = 24


def rank_arrivals(arrivals: pd.DataFrame, *, title: str = "Who waits for whom") -> Figure:
    """Draw two steps of all ranks on one clock: in each collective the wait for the last rank, and the transfer.

    The steps are from the middle of the run; where no steps are known, two collectives are.

    Parameters
    ----------
    arrivals : DataFrame
        Of :class:`nsightkit.analysis.ranks.job.Job`.
    title : str

    Returns
    -------
    matplotlib.figure.Figure
    """
    known = arrivals[arrivals["wait_ns"].notna()]
    waits = waited(known).groupby(known["rank"]).sum()
    ranks = sorted(waits.nsmallest(_MOST_RANKS).index)
    figure, axes = style.new_figure(1.9 + 0.28 * len(ranks), title)
    if not ranks:
        return style.nothing(figure, axes, title, "no collectives that ranks wait in")
    numbers = known["step" if (known["step"] >= 0).all() else "collective"]
    every = np.sort(numbers.unique())
    middle = max(len(every) // 2 - 1, 0)
    drawn = known[numbers.isin(every[middle : middle + 2]) & known["rank"].isin(ranks)]
    start = drawn["start_ns"].to_numpy(float) - drawn["start_ns"].min()
    length = (drawn["end_ns"] - drawn["start_ns"]).to_numpy(float)
    wait = drawn["wait_ns"].to_numpy(float)
    size, unit = time_unit((start + length).max())
    row = np.searchsorted(ranks, drawn["rank"])
    look: dict[str, Any] = {"height": 0.62, "edgecolor": "white", "linewidth": 0.3}
    axes.barh(row, wait, left=start, color=OCHRE, hatch="//", label="waiting for the last rank", **look)
    axes.barh(row, length - wait, left=start + wait, color=BLUE, label="transfer, all ranks there", **look)
    last = wait == 0
    axes.plot(start[last], row[last], "k>", markersize=6, label="came last", linestyle="none")
    names = [f"rank {rank}" for rank in ranks]
    style.name_rows(axes, names)
    style.in_unit(axes.xaxis, size)
    axes.set(xlim=(0, None), ylim=(len(ranks) - 0.5, -0.5), xlabel=f"time ({unit})")
    style.legend(figure, 3)
    pairs = zip(names, waits[ranks].map(duration), strict=True)
    shown = "a row of bars a rank, from its arrival at each collective to its end"
    return style.described(figure, f"{title}, {shown}. Waited over the whole run: {spoken(pairs)}.")
