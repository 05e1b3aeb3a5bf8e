"""Ranks that are late more often than chance explains, what that costs the others, and where their time goes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from nsightkit.analysis.core.causes import CAUSES
from nsightkit.analysis.core.intervals import uncovered
from nsightkit.analysis.ranks.one_rank import TIME, WAITING
from nsightkit.text import Json, time_text

#: A rank is a straggler if chance places any rank so late in fewer than one job in a hundred ...
_SIGNIFICANT = 0.01
#: ... and if its lateness is at least this share of the time watched: less is not worth a repair.
_WORTH_SHARE = 0.01
#: Fewer steps cannot rule out chance, so each collective is judged by itself.
_LEAST_STEPS = 6
#: The extra time of a rank is the cause if it explains this share of its lateness.
_EXPLAINED_SHARE = 0.25
#: Other ranks delay a rank if its wait in another group is this share of its lateness.
_HELD_UP_SHARE = 0.5
#: Such a cause reads "waiting in process group 3 for rank 5".
_HELD_UP_PREFIX = "waiting in"

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
    middle_arrival = arrivals.groupby("collective")["start_ns"].quantile(0.5, interpolation="lower")
    rows = arrivals[arrivals["wait_ns"].notna()]
    on_time = rows["collective"].map(middle_arrival).astype(np.int64)
    rank_and_group = rows.groupby(["rank", "group_id"]).ngroup()
    late_ns = uncovered(on_time, rows["start_ns"], key=rank_and_group)
    return pd.Series(late_ns, rows.index, "float64").reindex(arrivals.index)


def find_stragglers(
    arrivals: pd.DataFrame, steps: pd.DataFrame, floors_ns: pd.Series, wall_ns: float
) -> tuple[pd.DataFrame, int]:
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
    floors_ns : Series of float
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
    table = arrivals.assign(late_ns=lateness(arrivals)).dropna(subset="late_ns")
    table["late_ns"] = table["late_ns"].where(table["late_ns"] > table["rank"].map(floors_ns), 0.0)
    late_ns_of_rank = table.groupby("rank")["late_ns"].sum()
    lateness_of_group = _lateness_by_group(table)
    group_of_straggler = _late_beyond_chance(lateness_of_group, wall_ns)
    rows = []
    saved_by_all_ns = 0.0
    for rank, group in group_of_straggler.items():
        lateness_by_unit = lateness_of_group[group]  # a row per step or collective, a column per rank
        # The ranks of the group that are on time; where none is, all but this one.
        others = lateness_by_unit.columns.difference(list(group_of_straggler))
        if others.empty:
            others = lateness_by_unit.columns.drop([rank])
        excess_by_part = _excess_by_part(rank, steps, others)
        # On time, it saves at most what it spends more than the others.
        saved_ns = float(excess_by_part.sum())
        gain_ns = _time_others_waited(table, [rank])
        if saved_ns >= _EXPLAINED_SHARE * late_ns_of_rank[rank]:
            cause = str(excess_by_part.idxmax()).removeprefix(TIME)
            extra_ns: int | None = int(excess_by_part.max())
            gain_ns = min(gain_ns, int(saved_ns))
        else:
            cause, extra_ns = _wait_in_other_group(table, rank, group)
            # A rank that others hold up saves nothing by itself; what an unexplained one may save has no limit.
            saved_ns = math.inf if extra_ns is None else 0
        saved_by_all_ns += saved_ns
        own_lateness = lateness_by_unit[rank].dropna()
        when_late = own_lateness[own_lateness > 0]
        row: Json = {
            "rank": rank,
            "cause": cause,
            "late_ns": int(late_ns_of_rank[rank]),
            "median_late_ns": int(when_late.median()),
            "late_units": len(when_late),
            "units": len(own_lateness),
            "unit": str(lateness_by_unit.index.name),
            "gain_ns": gain_ns,
            "extra_ns": extra_ns,
        }
        rows.append(row | {"text": _late_rank_sentence(row)})
    rows.sort(key=lambda row: (row["cause"].startswith(_HELD_UP_PREFIX), -row["late_ns"]))
    gain_of_all_ns = min(_time_others_waited(table, list(group_of_straggler)), saved_by_all_ns)
    return pd.DataFrame(rows, columns=COLUMNS), int(gain_of_all_ns)


# ---------------------------------------------------------------- chance


def _lateness_by_group(table: pd.DataFrame) -> dict[int, pd.DataFrame]:
    """By group: lateness in ns, a row per step (or per collective if steps are too few) and a column per rank."""
    lateness_of_group = {}
    for group, rows in table.groupby("group_id"):
        unit = "collective"
        judged = rows
        in_steps = rows[rows["step"] >= 0]
        if in_steps["step"].nunique() >= _LEAST_STEPS:
            unit = "step"
            judged = in_steps
        # A group's number is an int, but typed as any hashable key.
        lateness_of_group[int(str(group))] = judged.pivot_table("late_ns", index=unit, columns="rank", aggfunc="sum")
    return lateness_of_group


def _late_beyond_chance(lateness_of_group: Mapping[int, pd.DataFrame], wall_ns: float) -> dict[int, int]:
    """By rank, the stragglers, each with the group in which it is latest."""
    # Each rank is tested in each of its groups: the chance that any test errs is at most their sum (Bonferroni).
    tests = sum(by_unit.shape[1] for by_unit in lateness_of_group.values())
    stragglers: dict[int, int] = {}
    while True:
        newly_late = []
        for group, by_unit in lateness_of_group.items():
            # Beside a rank that is later still, a late rank is never last: judge it again without the stragglers.
            remaining = by_unit.drop(columns=list(stragglers), errors="ignore")
            late_ns = remaining.sum()
            is_late = (tests * chances_of_lateness(remaining) < _SIGNIFICANT) & (late_ns >= _WORTH_SHARE * wall_ns)
            for rank, rank_late_ns in late_ns[is_late].items():
                newly_late.append((rank_late_ns, group, int(str(rank))))
        if not newly_late:
            return stragglers
        # In ascending order of lateness, so that each rank keeps the group in which it is latest.
        stragglers |= {rank: group for _, group, rank in sorted(newly_late)}


def chances_of_lateness(units: pd.DataFrame) -> pd.Series:
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
    count, rank_count = units.shape
    if not count:
        return pd.Series(1.0, units.columns)
    # The sum of a rank's places, of which 1 is the earliest. Tied ranks get the mean place; rounded down, no rank looks
    # later than it is.
    places = np.floor(units.rank(axis=1).sum()).astype(np.int64)
    # By chance, places add up as the numbers of `count` dice with as many sides as there are ranks. Their sums run from
    # `count` upwards; the distribution of a sum is a convolution, which is a power of the Fourier transform.
    sums = count * (rank_count - 1) + 1
    die = np.fft.rfft(np.full(rank_count, 1 / rank_count), sums)
    chance_of_sum = np.fft.irfft(die**count, sums)
    chance_of_sum_or_more = chance_of_sum[::-1].cumsum()[::-1]
    return pd.Series(chance_of_sum_or_more[places - count].clip(0, 1), units.columns)


# ---------------------------------------------------------------- cost


def _time_others_waited(table: pd.DataFrame, ranks: Sequence[int]) -> int:
    """Sum the ns in which the other ranks waited in collectives for `ranks`, and computed nothing at that time.

    That is what the job would save if `ranks` came no later than the others. Waits of one process group at the same
    time count once.
    """
    by_collective = table.groupby("collective")
    all_arrived = by_collective["start_ns"].max()
    # Without others in a collective, the first arrival is taken for theirs.
    others_arrived = table[~table["rank"].isin(ranks)].groupby("collective")["start_ns"].max()
    others_arrived = others_arrived.reindex(all_arrived.index).fillna(by_collective["start_ns"].min())
    # A wait behind which a rank computed costs nothing: count no more than the most that a rank had exposed, if known.
    exposed = by_collective["exposed_ns"].max().astype("float64").fillna(np.inf)
    waited = uncovered(others_arrived, all_arrived, key=by_collective["group_id"].first())
    return int(np.minimum(waited, exposed).sum())


# ---------------------------------------------------------------- cause


def _excess_by_part(rank: int, steps: pd.DataFrame, others: pd.Index) -> pd.Series:
    """By part of a rank's time: how much more it takes than the others' median, in ns, over the steps that all have.

    The time in collectives is left out, since it depends on when the others arrive.
    """
    parts = steps.drop(columns=WAITING, errors="ignore").fillna(0)
    own = parts.loc[rank]
    others_by_step = parts.loc[others].groupby("step")
    has_all_others = others_by_step.size() == len(others)
    usual = others_by_step.median()[has_all_others]
    # NaN for steps that one side lacks.
    return (own - usual).dropna().sum().clip(lower=0)


def _wait_in_other_group(table: pd.DataFrame, rank: int, group: int) -> tuple[str, int | None]:
    """Cause of a rank's lateness in `group`: its wait in another group, and the ns of that; None if not explained."""
    rows = table[table["rank"] == rank]
    is_in_group = rows["group_id"] == group
    waited_ns = rows[~is_in_group].groupby(["group", "last_rank"])["wait_ns"].sum().astype("float64")
    # For a rank of one group only, the maximum is NaN, and names no cause.
    if waited_ns.max() >= _HELD_UP_SHARE * rows["late_ns"][is_in_group].sum():
        other_group, last_rank = waited_ns.index[int(waited_ns.argmax())]
        return f"{_HELD_UP_PREFIX} process group {other_group} for rank {last_rank}", int(waited_ns.max())
    return "not explained", None


def _late_rank_sentence(row: Json) -> str:
    """Write how late a rank is, how often, and where its time goes."""
    how_often = f"{row['late_units']} of {row['units']} {row['unit']}s"
    late = f"Rank {row['rank']} is late by {time_text(row['median_late_ns'])} (median), in {how_often}"
    if row["extra_ns"] is None:
        return f"{late}; the traces do not show why."
    extra = time_text(row["extra_ns"])
    cause = row["cause"]
    if cause.startswith(_HELD_UP_PREFIX):  # "…, after waiting in process group 3 for rank 5 (80 ms)."
        return f"{late}, after {cause} ({extra})."
    if cause.startswith("idle, "):  # the part "idle, input-pipeline", whose name is "idle: waiting for data"
        slug = cause.removeprefix("idle, ")
        cause = f"idle ({CAUSES[slug].plain_name})"
    return f"{late}; it spends {extra} more than the others in {cause}."
