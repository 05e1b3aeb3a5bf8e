"""Ranks of a job side by side: who waits for whom in their collectives, and how late each comes."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nsightkit.analysis.core.intervals import uncovered
from nsightkit.plots._style import (
    BLUE,
    DARK_GREY,
    OCHRE,
    VERMILION,
    duration,
    name_rows,
    new_figure,
    nothing,
    spoken,
    time_unit,
)

__all__ = ["rank_arrivals", "rank_lateness"]

#: Rows of a figure; of more ranks the ones that are latest, and their neighbours, are drawn.
_MOST_RANKS = 24


def rank_arrivals(arrivals: pd.DataFrame, *, steps: int = 2, title: str = "Who waits for whom") -> Figure:
    """Draw some collectives of all ranks on one clock: waiting for the last rank, and the transfer after it.

    Parameters
    ----------
    arrivals : DataFrame
        Of :class:`nsightkit.analysis.ranks.job.Job`.
    steps : int, default 2
        How many steps, from the middle of the run; as many collectives' worth where no steps are known.
    title : str

    Returns
    -------
    matplotlib.figure.Figure
    """
    figure, axes = new_figure(1.8, title)
    waits = arrivals[arrivals["wait_ns"].notna()]
    if not len(waits):
        return nothing(figure, axes, title, "no collectives that ranks wait in")
    chosen = _middle(waits, steps)
    ranks = _some(waits, sorted(chosen["rank"].unique()))
    figure.set_size_inches(7.6, 1.9 + 0.28 * len(ranks))
    place = {rank: row for row, rank in enumerate(ranks)}
    chosen = chosen[chosen["rank"].isin(ranks)]
    row = chosen["rank"].map(place).to_numpy()
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
    name_rows(axes, [f"rank {rank}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"time ({unit})")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    begin, whole = (waits[c].to_numpy(np.int64) for c in ("start_ns", "wait_ns"))
    total = pd.Series(uncovered(begin, begin + whole, waits["rank"])).groupby(waits["rank"].to_numpy()).sum()
    said = [(f"rank {rank}", duration(float(total[rank]))) for rank in ranks]
    figure.set_label(
        f"{title}, a row of bars a rank, from its arrival at each collective to its end. Waited over the whole run: "
        f"{spoken(said)}."
    )
    return figure


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
    figure, axes = new_figure(1.8, title)
    known = arrivals.assign(late=late_ns)[late_ns.notna()]
    if not len(known):
        return nothing(figure, axes, title, "no collectives that ranks wait in")
    ranks = _some(known, sorted(known["rank"].unique()))
    figure.set_size_inches(7.6, 1.4 + 0.28 * len(ranks))
    unit_of = "step" if (known["step"] >= 0).all() else "collective"
    each = known.groupby(["rank", unit_of])["late"].sum()
    scale, unit = time_unit(float(each.max()))
    said = []
    for row, rank in enumerate(ranks):
        values = each[rank].to_numpy() / scale
        # Dots of one row, side by side where they would hide each other.
        shift = 0.22 * np.sin(2.4 * np.arange(len(values)))
        label = f"a {unit_of}" if row == 0 else None
        axes.scatter(values, row + shift, s=14, color=BLUE, alpha=0.7, linewidths=0, label=label)
        middle = float(np.median(values))
        axes.plot(
            [middle] * 2, [row - 0.36, row + 0.36], color=VERMILION, linewidth=2.2, label="median" if row == 0 else None
        )
        said.append((f"rank {rank}", duration(middle * scale)))
    name_rows(axes, [f"rank {rank}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.grid(axis="y", color=DARK_GREY, alpha=0.15)
    axes.set_xlabel(f"later than the middle rank, in a {unit_of} ({unit})")
    axes.set_xlim(left=min(0.0, float(each.min()) / scale) - 0.02 * float(each.max()) / scale)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.set_label(f"{title}, dots, one a {unit_of}; medians: {spoken(said)}.")
    return figure


def _middle(waits: pd.DataFrame, steps: int) -> pd.DataFrame:
    """Arrivals of a few steps in the middle of the run."""
    unit = "step" if (waits["step"] >= 0).all() else "collective"
    numbers = np.sort(waits[unit].unique())
    low = max((len(numbers) - steps) // 2, 0)
    return waits[waits[unit].isin(numbers[low : low + steps])]


def _some(waits: pd.DataFrame, ranks: list[int]) -> list[int]:
    """Ranks to draw: all, or those that waited least (and so were waited for) among evenly chosen others."""
    if len(ranks) <= _MOST_RANKS:
        return ranks
    least = waits.groupby("rank")["wait_ns"].sum().sort_values().index[: _MOST_RANKS // 3].tolist()
    even = [ranks[i] for i in np.linspace(0, len(ranks) - 1, _MOST_RANKS).round().astype(int)]
    return sorted({*least, *even[: _MOST_RANKS - len(least)]})
