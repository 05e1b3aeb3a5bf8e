"""Ranks that are late more often than chance explains, what that costs the others, and where their time goes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from nsightkit.analysis.core.causes import CAUSES
from nsightkit.analysis.core.intervals import uncovered
from nsightkit.analysis.core.text import time_text
from nsightkit.analysis.ranks.one_rank import TIME, WAITING
from nsightkit.safe import Json

__all__ = ["COLUMNS", "chances", "find", "lateness"]

#: A rank is a straggler if chance places any rank so late in fewer than one job in a hundred ...
_SIGNIFICANT = 0.01
#: ... and if its lateness is at least this share of the time watched.
_WORTH = 0.01
#: With fewer steps, each collective is judged by itself.
_ENOUGH_STEPS = 6
#: The extra time of a rank is the cause if it explains this share of its lateness.
_EXPLAINED = 0.25
#: Other ranks delay a rank if its wait in another group is this share of its lateness.
_HELD_UP_SHARE = 0.5
_HELD_UP = "waiting in"

COLUMNS = [
    "rank",
    "cause",
    "late_ns",
    "median_late_ns",
    "late_units",
    "units",
    "unit",
    "gain_ns",
    "extra_ns",
    "text",
]


def lateness(arrivals: pd.DataFrame) -> pd.Series:
    """How much later than the middle rank each rank arrived at a collective; 0 for the earlier ones.

    Parameters
    ----------
    arrivals : DataFrame
        See :class:`nsightkit.analysis.ranks.job.Job`.

    Returns
    -------
    Series of float
        In nanoseconds, NaN for kinds in which ranks do not wait for each other. The middle is the lower median: of
        two ranks, the earlier one. Collectives of a group that wait for a rank at the same time count once.
    """
    middle = arrivals.groupby("collective")["start_ns"].quantile(0.5, interpolation="lower")
    rows = arrivals[arrivals["wait_ns"].notna()]
    in_time = rows["collective"].map(middle).astype(np.int64)
    rank_and_group = rows.groupby(["rank", "group_id"]).ngroup()
    late = uncovered(in_time, rows["start_ns"], rank_and_group)
    return pd.Series(late, rows.index, "float64").reindex(arrivals.index)


def find(arrivals: pd.DataFrame, steps: pd.DataFrame, floors: pd.Series, wall_ns: float) -> tuple[pd.DataFrame, int]:
    """Name the stragglers of a job.

    In each step the ranks of a process group are placed by their lateness. If lateness were chance, each place would be
    as likely for each rank. A rank is a straggler if the sum of its places is so high that chance gives it to any rank
    in fewer than one job in a hundred, and if its lateness is at least 1% of the time watched. The other ranks are then
    judged again among themselves, because two late ranks hide each other.

    Parameters
    ----------
    arrivals : DataFrame
        See :class:`nsightkit.analysis.ranks.job.Job`.
    steps : DataFrame
        Each rank's :func:`nsightkit.analysis.ranks.one_rank.time_spent`, by ``rank`` and ``step``.
    floors : Series of float
        By rank, the lateness that its clock's uncertainty may feign, in nanoseconds. Up to this it counts as none.
    wall_ns : float
        The time watched.

    Returns
    -------
    stragglers : DataFrame
        By falling ``late_ns``, ranks that others delay last: ``rank``; ``cause`` (the part of its time that
        exceeds the others' most; ``waiting in …`` with the group and the rank that delay it; or ``not explained``);
        ``late_ns`` (:func:`lateness`, summed) and ``median_late_ns`` over the ``late_units`` of ``units`` (``unit``:
        step or collective) in which it was late; ``gain_ns`` (the most that the job would save with this rank on
        time); ``extra_ns`` (the excess of the cause); ``text``.
    gain_ns : int
        The most that the job would save with all stragglers on time.
    """
    table = arrivals.assign(late=lateness(arrivals)).dropna(subset="late")
    table["late"] = table["late"].where(table["late"] > table["rank"].map(floors), 0.0)
    late_ns = table.groupby("rank")["late"].sum()
    units_of = _lateness_by_group(table)
    stragglers = _late_beyond_chance(units_of, wall_ns)
    rows = []
    excess_of_all = 0.0
    for rank, group in stragglers.items():
        units = units_of[group]
        others = units.columns.difference(list(stragglers))
        if others.empty:
            others = units.columns.drop([rank])
        excess = _excess(rank, steps, others)
        excess_ns = float(excess.sum())
        gain_ns = _time_saved(table, [rank])
        if excess_ns >= _EXPLAINED * late_ns[rank]:
            cause = str(excess.idxmax()).removeprefix(TIME)
            extra_ns: int | None = int(excess.max())
            # On time, it saves at most what it spends more than the others.
            gain_ns = min(gain_ns, int(excess_ns))
        else:
            cause, extra_ns = _held_up(table, rank, group)
            excess_ns = 0
            if extra_ns is None:
                excess_ns = math.inf
        excess_of_all += excess_ns
        by_unit = units[rank].dropna()
        late = by_unit[by_unit > 0]
        row: Json = {
            "rank": rank,
            "cause": cause,
            "late_ns": int(late_ns[rank]),
            "median_late_ns": int(late.median()),
            "late_units": len(late),
            "units": len(by_unit),
            "unit": str(units.index.name),
            "gain_ns": gain_ns,
            "extra_ns": extra_ns,
        }
        rows.append(row | {"text": _text(row)})
    rows.sort(key=lambda row: (row["cause"].startswith(_HELD_UP), -row["late_ns"]))
    gain_of_all = min(_time_saved(table, list(stragglers)), excess_of_all)
    return pd.DataFrame(rows, columns=COLUMNS), int(gain_of_all)


# ---------------------------------------------------------------- chance


def _lateness_by_group(table: pd.DataFrame) -> dict[int, pd.DataFrame]:
    """Lateness of each group's ranks (columns) in each step, or at each collective if steps are too few."""
    result = {}
    for group, rows in table.groupby("group_id"):
        unit = "collective"
        units = rows
        in_steps = rows[rows["step"] >= 0]
        if in_steps["step"].nunique() >= _ENOUGH_STEPS:
            unit = "step"
            units = in_steps
        result[int(str(group))] = units.pivot_table("late", unit, "rank", "sum")
    return result


def _late_beyond_chance(units_of: Mapping[int, pd.DataFrame], wall_ns: float) -> dict[int, int]:
    """Stragglers, each with the group in which it is latest."""
    tests = sum(units.shape[1] for units in units_of.values())
    stragglers: dict[int, int] = {}
    while True:
        late = []
        for group, units in units_of.items():
            rest = units.drop(columns=list(stragglers), errors="ignore")
            late_ns = rest.sum()
            is_late = (tests * chances(rest) < _SIGNIFICANT) & (late_ns >= _WORTH * wall_ns)
            for rank, rank_ns in late_ns[is_late].items():
                late.append((rank_ns, group, int(str(rank))))
        if not late:
            return stragglers
        # The group in which a rank is latest comes last, and stays.
        stragglers |= {rank: group for _, group, rank in sorted(late)}


def chances(units: pd.DataFrame) -> pd.Series:
    """Chance of each rank to be placed as late as it is or later, if each place is as likely in each unit.

    Parameters
    ----------
    units : DataFrame
        Lateness, a row per unit and a column per rank.

    Returns
    -------
    Series of float
        By rank.
    """
    units = units.dropna()
    # Units without a late rank do not count.
    units = units[units.nunique(axis=1) > 1]
    count, sides = units.shape
    if not count:
        return pd.Series(1.0, units.columns)
    # Tied ranks get the mean place. Rounded down, it makes no rank look later than it is.
    total = np.floor(units.rank(axis=1).sum()).astype(np.int64)
    # The sum of dice with as many sides as there are ranks.
    size = count * (sides - 1) + 1
    die = np.fft.rfft(np.full(sides, 1 / sides), size)
    ways = np.fft.irfft(die**count, size)
    at_least = ways[::-1].cumsum()[::-1]
    return pd.Series(at_least[total - count].clip(0, 1), units.columns)


# ---------------------------------------------------------------- cost


def _time_saved(table: pd.DataFrame, ranks: Sequence[int]) -> int:
    """Time in which other ranks waited for these and did nothing else."""
    by = table.groupby("collective")
    arrived = by["start_ns"].max()
    # When the others were there; without others, when the first was.
    others = table[~table["rank"].isin(ranks)].groupby("collective")["start_ns"].max()
    in_time = others.reindex(arrived.index).fillna(by["start_ns"].min())
    exposed = by["exposed_ns"].max().astype("float64").fillna(np.inf)
    waited = uncovered(in_time, arrived, by["group_id"].first())
    return int(np.minimum(waited, exposed).sum())


# ---------------------------------------------------------------- cause


def _excess(rank: int, steps: pd.DataFrame, others: pd.Index) -> pd.Series:
    """By how much each part of its time exceeds the median of the others, in the steps that all of them recorded."""
    parts = steps.drop(columns=WAITING, errors="ignore").fillna(0)
    own = parts.loc[rank]
    together = parts.loc[others].groupby("step")
    usual = together.median()[together.size() == len(others)]
    return (own - usual).dropna().sum().clip(lower=0)


def _held_up(table: pd.DataFrame, rank: int, group: int) -> tuple[str, int | None]:
    """Another group in which a rank waits for another so long that this makes it late, and for how long."""
    rows = table[table["rank"] == rank]
    is_here = rows["group_id"] == group
    waited = rows[~is_here].groupby(["group", "last_rank"])["wait_ns"].sum().astype("float64")
    if waited.max() >= _HELD_UP_SHARE * rows["late"][is_here].sum():
        name, whom = waited.index[int(waited.argmax())]
        return f"{_HELD_UP} process group {name} for rank {whom}", int(waited.max())
    return "not explained", None


def _text(row: Json) -> str:
    """One sentence for a person: how late the rank is, and where its time goes."""
    often = f"{row['late_units']} of {row['units']} {row['unit']}s"
    late = f"Rank {row['rank']} is late by {time_text(row['median_late_ns'])} per {row['unit']}, in {often}"
    if row["extra_ns"] is None:
        return f"{late}; the traces do not show why."
    extra = time_text(row["extra_ns"])
    cause = row["cause"]
    if cause.startswith(_HELD_UP):
        return f"{late}, after {cause} ({extra})."
    if cause.startswith("idle, "):  # "idle, input-pipeline" reads "idle (waiting for data)"
        cause = f"idle ({CAUSES[cause.removeprefix('idle, ')].name.removeprefix('idle: ')})"
    return f"{late}; it spends {extra} more than the others in {cause}."
