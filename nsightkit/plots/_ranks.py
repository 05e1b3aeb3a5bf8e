"""Ranks of a job side by side: who waits for whom in their collectives, and how late each comes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nsightkit.analysis.core.intervals import uncovered
from nsightkit.plots._style import finished, name_rows, new_figure, nothing
from nsightkit.plots.looks import BLUE, DARK_GREY, OCHRE, VERMILION, duration, spoken, time_unit

#: Rows of a figure; of more ranks the ones that are latest, and their neighbours, are drawn.
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
    waits = arrivals[arrivals["wait_ns"].notna()]
    figure, axes, ranks, unit_of = _figure(waits, 0.5, title)
    if not ranks:
        return figure
    numbers = np.sort(waits[unit_of].unique())
    low = max((len(numbers) - 2) // 2, 0)
    chosen = waits[waits[unit_of].isin(numbers[low : low + 2]) & waits["rank"].isin(ranks)]
    row = np.searchsorted(ranks, chosen["rank"])
    first = int(chosen["start_ns"].min())
    scale, unit = time_unit(int(chosen["end_ns"].max()) - first)
    start, end = ((chosen[c].to_numpy(np.float64) - first) / scale for c in ("start_ns", "end_ns"))
    wait = chosen["wait_ns"].to_numpy(np.float64) / scale
    for left, width, colour, hatch, label in (
        (start, wait, OCHRE, "//", "waiting for the last rank"),
        (start + wait, end - start - wait, BLUE, None, "transfer, all ranks there"),
    ):
        axes.barh(
            row, width, left=left, height=0.62, color=colour, hatch=hatch, edgecolor="white", linewidth=0.3, label=label
        )
    last = wait == 0
    axes.plot(start[last], row[last], "k>", markersize=6, label="came last", linestyle="none")
    axes.set_xlim(left=0)
    begin, whole = (waits[c].to_numpy(np.int64) for c in ("start_ns", "wait_ns"))
    total = pd.Series(uncovered(begin, begin + whole, waits["rank"])).groupby(waits["rank"].to_numpy()).sum()
    said = [(f"rank {rank}", duration(float(total[rank]))) for rank in ranks]
    return finished(
        figure,
        axes,
        f"{title}, a row of bars a rank, from its arrival at each collective to its end. Waited over the whole run: "
        f"{spoken(said)}.",
        legend=3,
        ylim=(len(ranks) - 0.5, -0.5),
        xlabel=f"time ({unit})",
    )


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
    figure, axes, ranks, unit_of = _figure(known, 0.0, title)
    if not ranks:
        return figure
    each = known.groupby(["rank", unit_of])["late"].sum()
    scale, unit = time_unit(float(each.max()))
    said = []
    for row, rank in enumerate(ranks):
        values = each[rank].to_numpy() / scale
        # Dots of one row, side by side where they would hide each other.
        shift = 0.22 * np.sin(2.4 * np.arange(len(values)))
        dots, line = (f"a {unit_of}", "median") if row == 0 else (None, None)
        axes.scatter(values, row + shift, s=14, color=BLUE, alpha=0.7, linewidths=0, label=dots)
        middle = float(np.median(values))
        axes.plot([middle] * 2, [row - 0.36, row + 0.36], color=VERMILION, linewidth=2.2, label=line)
        said.append((f"rank {rank}", duration(middle * scale)))
    axes.grid(axis="y", color=DARK_GREY, alpha=0.15)
    axes.set_xlim(left=min(0.0, float(each.min()) / scale) - 0.02 * float(each.max()) / scale)
    return finished(
        figure, axes, f"{title}, dots, one a {unit_of}; medians: {spoken(said)}.", legend=2,
        ylim=(len(ranks) - 0.5, -0.5), xlabel=f"later than the middle rank, in a {unit_of} ({unit})",
    )  # fmt: skip


def _figure(known: pd.DataFrame, more: float, title: str) -> tuple[Figure, Any, list[int], str]:
    """Make a figure with a row a rank; of many ranks the latest (who waited least), and others evenly chosen."""
    ranks = sorted(known["rank"].unique())
    if len(ranks) > _MOST_RANKS:
        least = known.groupby("rank")["wait_ns"].sum().sort_values().index[: _MOST_RANKS // 3].tolist()
        even = np.linspace(0, len(ranks) - 1, _MOST_RANKS).round().astype(int)[: _MOST_RANKS - len(least)]
        ranks = sorted({*least, *(ranks[i] for i in even)})
    figure, axes = new_figure(1.4 + more + 0.28 * len(ranks) if ranks else 1.8, title)
    if ranks:
        name_rows(axes, [f"rank {rank}" for rank in ranks])
    else:
        nothing(figure, axes, title, "no collectives that ranks wait in")
    return figure, axes, ranks, "step" if (known["step"] >= 0).all() else "collective"
