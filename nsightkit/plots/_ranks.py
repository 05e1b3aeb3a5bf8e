"""Ranks of a job side by side: who waits for whom in their collectives, and how late each comes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nsightkit.analysis.core.intervals import uncovered
from nsightkit.plots import style
from nsightkit.plots.looks import BLUE, DARK_GREY, OCHRE, VERMILION, duration, spoken, time_unit

#: Rows of a figure; of more ranks the ones that are latest, and their neighbours, are drawn.
_MOST_RANKS = 24
_EMPTY = "no collectives that ranks wait in"


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
    ranks = _shown_ranks(known)
    figure, axes = style.new_figure(1.9 + 0.28 * len(ranks), title)
    if not ranks:
        return style.nothing(figure, axes, title, _EMPTY)
    unit_of_work = _unit_of_work(known)
    numbers = np.sort(known[unit_of_work].unique())
    middle = max((len(numbers) - 2) // 2, 0)
    drawn = known[known[unit_of_work].isin(numbers[middle : middle + 2]) & known["rank"].isin(ranks)]
    origin = int(drawn["start_ns"].min())
    size, unit = time_unit(int(drawn["end_ns"].max()) - origin)
    start = (drawn["start_ns"].to_numpy(float) - origin) / size
    end = (drawn["end_ns"].to_numpy(float) - origin) / size
    wait = drawn["wait_ns"].to_numpy(float) / size
    row = np.searchsorted(ranks, drawn["rank"])
    bar: dict[str, Any] = {"height": 0.62, "edgecolor": "white", "linewidth": 0.3}
    axes.barh(row, wait, left=start, color=OCHRE, hatch="//", label="waiting for the last rank", **bar)
    axes.barh(row, end - start - wait, left=start + wait, color=BLUE, label="transfer, all ranks there", **bar)
    last = wait == 0
    axes.plot(start[last], row[last], "k>", markersize=6, label="came last", linestyle="none")
    style.name_rows(axes, [f"rank {rank}" for rank in ranks])
    axes.set(xlim=(0, None), ylim=(len(ranks) - 0.5, -0.5), xlabel=f"time ({unit})")
    style.legend(figure, 3)
    waited = _waited(known)
    pairs = [(f"rank {rank}", duration(float(waited[rank]))) for rank in ranks]
    return style.described(
        figure,
        f"{title}, a row of bars a rank, from its arrival at each collective to its end. Waited over the whole run: "
        f"{spoken(pairs)}.",
    )


def _waited(known: pd.DataFrame) -> pd.Series:
    """How long each rank waited, in nanoseconds; what overlaps counts once."""
    begin = known["start_ns"].to_numpy(np.int64)
    wait = known["wait_ns"].to_numpy(np.int64)
    apart = pd.Series(uncovered(begin, begin + wait, known["rank"]))
    return apart.groupby(known["rank"].to_numpy()).sum()


def rank_lateness(arrivals: pd.DataFrame, late_ns: pd.Series, *, title: str = "How late each rank comes") -> Figure:
    """Draw how late each rank was in each step, one dot a step, and the median.

    Parameters
    ----------
    arrivals : DataFrame
        Of :class:`nsightkit.analysis.ranks.job.Job`.
    late_ns : Series of float
        :func:`nsightkit.analysis.ranks.lateness.lateness` of them.
    title : str

    Returns
    -------
    matplotlib.figure.Figure
    """
    known = arrivals.assign(late=late_ns)[late_ns.notna()]
    ranks = _shown_ranks(known)
    figure, axes = style.new_figure(1.5 + 0.28 * len(ranks), title)
    if not ranks:
        return style.nothing(figure, axes, title, _EMPTY)
    unit_of_work = _unit_of_work(known)
    late = known.groupby(["rank", unit_of_work])["late"].sum()
    size, unit = time_unit(float(late.max()))
    pairs = []
    for row, rank in enumerate(ranks):
        values = late[rank].to_numpy() / size
        median = float(np.median(values))
        # Dots of one row, side by side where they would hide each other.
        shift = 0.22 * np.sin(2.4 * np.arange(len(values)))
        axes.scatter(values, row + shift, s=14, color=BLUE, alpha=0.7, linewidths=0, label=f"a {unit_of_work}")
        axes.plot([median] * 2, [row - 0.36, row + 0.36], color=VERMILION, linewidth=2.2, label="median")
        pairs.append((f"rank {rank}", duration(median * size)))
    style.name_rows(axes, [f"rank {rank}" for rank in ranks])
    axes.grid(axis="y", color=DARK_GREY, alpha=0.15)
    left = min(0.0, float(late.min())) - 0.02 * float(late.max())
    axes.set(xlim=(left / size, None), ylim=(len(ranks) - 0.5, -0.5))
    axes.set_xlabel(f"later than the middle rank, in a {unit_of_work} ({unit})")
    handles, labels = axes.get_legend_handles_labels()
    style.legend(figure, 2, dict(zip(labels, handles, strict=True)))
    return style.described(figure, f"{title}, dots, one a {unit_of_work}; medians: {spoken(pairs)}.")


def _unit_of_work(known: pd.DataFrame) -> str:
    """What waits are counted by: steps, where all are in one."""
    return "step" if (known["step"] >= 0).all() else "collective"


def _shown_ranks(known: pd.DataFrame) -> list[int]:
    """All ranks; of many the latest (who waited least), and others evenly chosen."""
    ranks = sorted(known["rank"].unique())
    if len(ranks) <= _MOST_RANKS:
        return ranks
    waited = known.groupby("rank")["wait_ns"].sum().sort_values()
    shown = set(waited.index[: _MOST_RANKS // 3])
    for place in np.linspace(0, len(ranks) - 1, _MOST_RANKS - len(shown)).round().astype(int):
        shown.add(ranks[place])
    return sorted(shown)
