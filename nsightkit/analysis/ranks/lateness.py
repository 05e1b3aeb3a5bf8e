"""Which ranks are late too often for chance, what that costs the others, and what they do differently."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core.intervals import uncovered
from nsightkit.analysis.ranks.one_rank import COUNT, TIME, WAITING

__all__ = ["COLUMNS", "chance_of_places", "find", "lateness"]

Float = npt.NDArray[np.float64]

#: A rank is named if so rarely a rank would be placed so late by chance (in all tests of a job together) ...
_SIGNIFICANT = 0.01
#: ... and if its lateness is at least this share of the time watched.
_WORTH = 0.01
#: Up to so many (units times ranks) the distribution of a sum of places is counted out, beyond it is a normal one.
_EXACT = 20_000
#: Steps with collectives from which on lateness is judged step by step; with fewer, collective by collective.
_ENOUGH_STEPS = 6
#: What a rank does differently is not a reason if it explains less of its lateness than this.
_EXPLAINED = 0.25
#: Others make it late if it waits for them, in another group, for at least this share of its lateness.
_HELD_UP_SHARE = 0.5
_HELD_UP = "waiting in"
#: Ranks that one is compared with; more make no difference.
_MOST_OTHERS = 33
#: Reasons that explain less of the lateness are not listed.
_REASON = 0.1
#: As many kernels as the others, but for this: the same work.
_SAME_COUNT = 0.02

COLUMNS = [
    "rank",
    "cause",
    "late_ns",
    "median_late_ns",
    "late_units",
    "units",
    "unit",
    "last_count",
    "collectives",
    "waited_for_ns",
    "gain_ns",
    "gain_share",
    "p_value",
    "because",
    "text",
]


def lateness(arrivals: pd.DataFrame) -> pd.Series:
    """How much later than the middle of its ranks each arrival at a collective was, 0 for the earlier ones.

    Parameters
    ----------
    arrivals : DataFrame
        See :class:`nsightkit.analysis.ranks.job.Job`.

    Returns
    -------
    Series of float
        In nanoseconds, NaN where ranks do not wait for each other. The middle is the lower median: of two ranks, the
        earlier one. Of collectives of a group that wait for a rank at the same time each has what the ones before have
        not, so that sums are times.
    """
    middle = arrivals.groupby("collective")["start_ns"].quantile(0.5, interpolation="lower")
    rows = arrivals[arrivals["wait_ns"].notna()]
    in_time = rows["collective"].map(middle).astype(np.int64)
    rank_and_group = rows.groupby(["rank", "group"]).ngroup()
    late = uncovered(in_time, rows["start_ns"], rank_and_group)
    return pd.Series(late, rows.index, "float64").reindex(arrivals.index)


def find(
    arrivals: pd.DataFrame,
    steps: Mapping[int, pd.DataFrame],
    floors: Mapping[int, float],
    wall_ns: float,
    groups: Mapping[int, str] | None = None,
) -> tuple[pd.DataFrame, int]:
    """Name the stragglers of a job.

    In each step the ranks of a process group are placed by how late they came to its collectives. If lateness were
    chance, every place would be as likely for every rank; a rank is a straggler if the sum of its places is so high
    that chance gives it to one rank in less than one job in a hundred, and if its lateness is at least one per cent of
    the time watched. Lateness below the spread of the clocks counts as none. The ranks that are left are then judged
    once more among themselves: of two that are late together, one hides the other.

    Parameters
    ----------
    arrivals : DataFrame
        See :class:`nsightkit.analysis.ranks.job.Job`.
    steps : mapping of int to DataFrame
        What each rank's steps were spent on (:func:`nsightkit.analysis.ranks.one_rank.time_spent`).
    floors : mapping of int to float
        Lateness of each rank that its clock's uncertainty may feign, in nanoseconds.
    wall_ns : float
        The time watched.
    groups : mapping of int to str, optional
        Names of the process groups.

    Returns
    -------
    stragglers : DataFrame
        Those that are late of themselves first, by falling ``late_ns``: ``rank``; ``cause`` (what it spends more time
        on; ``waiting in …``, the group in which it is held up by others; or ``not explained``); ``late_ns``
        (:func:`lateness`, over all collectives) and ``median_late_ns`` of ``units`` (``unit``: step or collective), of
        which it was late in ``late_units``; ``last_count`` of ``collectives`` to which it came last; ``waited_for_ns``
        (what the other ranks, together, waited for it beyond the one before); ``gain_ns, gain_share`` (at most so much
        all would save if it alone were on time: the part of its lateness in which others did nothing else, and no more
        than what it spends more than they do); ``p_value`` (of all tests together);
        ``because`` (a list of ``what, extra_ns, share`` of all extra time, and ``count_ratio``, its kernels over
        those of the others); ``text``.
    gain_ns : int
        The same for all of them on time.
    """
    table = arrivals.assign(late=lateness(arrivals)).dropna(subset="late")
    table["late"] = table["late"].where(table["late"] > table["rank"].map(floors), 0.0)
    units_of = _lateness_by_group(table)
    stragglers = _late_beyond_chance(units_of, wall_ns)
    if not stragglers:
        return pd.DataFrame({column: [] for column in COLUMNS}), 0
    last = _last_to_arrive(table)
    rows = []
    extra_of_all = 0.0
    for rank, (p_value, group) in stragglers.items():
        units = units_of[group]
        others = [other for other in map(int, units.columns.tolist()) if other != rank]
        on_time = [other for other in others if other not in stragglers]
        because, extra_ns = _reasons(rank, steps, on_time or others)
        row = _figures(rank, table, last, units[rank].dropna())
        row["unit"] = units.index.name
        row["p_value"] = min(p_value, 1.0)
        row["gain_ns"] = _time_saved(table, {rank})
        if extra_ns >= _EXPLAINED * row["late_ns"]:
            # It alone on time cannot save more than what it spends more than the others.
            row["gain_ns"] = min(row["gain_ns"], extra_ns)
            extra_of_all += extra_ns
        else:
            because = _held_up(table, last, rank, group, groups or {})
            if not because:
                extra_of_all = math.inf
        row["gain_share"] = row["gain_ns"] / wall_ns if wall_ns else 0.0
        row["because"] = because
        row["cause"] = because[0]["what"] if because else "not explained"
        row["text"] = _text(row)
        rows.append(row)
    # Those that are late of themselves come first.
    rows.sort(key=lambda row: (row["cause"].startswith(_HELD_UP), -row["late_ns"]))
    gain_ns = min(_time_saved(table, set(stragglers)), extra_of_all)
    return pd.DataFrame(rows, columns=COLUMNS), int(gain_ns)


def _figures(rank: int, table: pd.DataFrame, last: pd.DataFrame, late_by_unit: pd.Series) -> dict[str, Any]:
    """How late a rank is, how often, and what that costs the others."""
    own = table[table["rank"] == rank]
    own_last = last[last["rank"] == rank]
    late = late_by_unit[late_by_unit > 0]
    return {
        "rank": rank,
        "late_ns": int(own["late"].sum()),
        "median_late_ns": int(late.median()),
        "late_units": len(late),
        "units": len(late_by_unit),
        "last_count": len(own_last),
        "collectives": len(own),
        "waited_for_ns": int((own_last["by"] * (own_last["ranks"] - 1)).sum()),
    }


def _lateness_by_group(table: pd.DataFrame) -> dict[int, pd.DataFrame]:
    """Lateness of each process group's ranks (columns) in each step, or at each collective where steps are too few."""
    result = {}
    for group, rows in table.groupby("group"):
        unit = "collective"
        in_steps = rows[rows["step"] >= 0]
        if in_steps["step"].nunique() >= _ENOUGH_STEPS:
            unit, rows = "step", in_steps  # noqa: PLW2901
        result[int(str(group))] = rows.pivot_table(index=unit, columns="rank", values="late", aggfunc="sum")
    return result


def _late_beyond_chance(units_of: Mapping[int, pd.DataFrame], wall_ns: float) -> dict[int, tuple[float, int]]:
    """Stragglers, each with its chance, and the group in which it is latest."""
    tests = sum(units.shape[1] for units in units_of.values())
    stragglers: dict[int, tuple[float, int]] = {}
    while True:
        late = []
        for group, units in units_of.items():
            rest = units.drop(columns=list(stragglers), errors="ignore")
            for rank, chance in _chance_of_each(rest).items():
                late_ns = rest[rank].sum()
                if chance * tests < _SIGNIFICANT and late_ns >= _WORTH * wall_ns:
                    late.append((late_ns, -group, rank, chance * tests))
        if not late:
            return stragglers
        # Of the groups that a rank is late in, the one in which it is latest comes last.
        for _, group, rank, p_value in sorted(late):
            stragglers[rank] = p_value, -group


def _chance_of_each(units: pd.DataFrame) -> dict[int, float]:
    """Chance of each rank to be placed at least as late as it is, if every place were as likely for each."""
    # Where nobody was late, nobody was placed: that says nothing for or against a rank.
    units = units[units.nunique(axis=1) > 1]
    count = units.notna().sum(axis=1)
    result = {}
    for rank, places in units.rank(axis=1, method="average").items():
        sides = count[places.notna()].tolist()
        # Of ties a rank gets the mean place; rounded down, so that chance is not thought smaller than it is.
        result[int(str(rank))] = chance_of_places(sides, math.floor(places.sum()))
    return result


def chance_of_places(sides: Sequence[int], total: int) -> float:
    """Chance that dice throw at least a total: that of a rank to be placed so late, if each place is as likely.

    Parameters
    ----------
    sides : sequence of int
        Of each die: how many ranks were placed in that step.
    total : int
        Sum of the places.
    """
    if not sides:
        return 1.0
    if len(sides) * sum(sides) <= _EXACT * max(sides):
        ways = functools.reduce(np.convolve, [np.full(n, 1 / n) for n in sides])
        least = len(sides)  # of all dice a one
        return float(ways[max(total - least, 0) :].sum())
    faces = np.array(sides)
    mean = (faces + 1).sum() / 2
    deviation = math.sqrt((faces * faces - 1).sum() / 12)
    if not deviation:
        return 1.0
    return 0.5 * math.erfc((total - 0.5 - mean) / deviation / math.sqrt(2))


def _last_to_arrive(table: pd.DataFrame) -> pd.DataFrame:
    """The rank that came last to each collective, how much later than the one before, and how many came."""
    by = table.sort_values(["collective", "start_ns", "rank"], kind="stable").groupby("collective")
    last, before = by["start_ns"].nth(-1).to_numpy(), by["start_ns"].nth(-2).to_numpy()
    result = pd.DataFrame({"rank": by["rank"].last(), "group": by["group"].last(), "ranks": by.size()})
    return result.assign(by=uncovered(before, last, result["group"]))


def _time_saved(table: pd.DataFrame, ranks: set[int]) -> int:
    """Time that some ranks' lateness costs: that in which somebody waited for them and did nothing else."""
    by = table.groupby("collective")
    arrived = by["start_ns"].max()
    # When the others were there; where there are no others, when the first was.
    others = table[~table["rank"].isin(ranks)].groupby("collective")["start_ns"].max()
    in_time = others.reindex(arrived.index).fillna(by["start_ns"].min())
    exposed = by["exposed_ns"].max().astype("float64").fillna(np.inf)
    waited = uncovered(in_time, arrived, by["group"].first())
    return int(np.minimum(waited, exposed).sum())


def _held_up(
    table: pd.DataFrame, last: pd.DataFrame, rank: int, group: int, groups: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Another group than the one it is late in, in which a rank waits for others so long that this makes it late."""
    own = table[table["rank"] == rank]
    late_ns = own.loc[own["group"] == group, "late"].sum()
    elsewhere = own[own["group"] != group]
    elsewhere = elsewhere.assign(
        wait=elsewhere["wait_ns"].astype("float64"), whom=elsewhere["collective"].map(last["rank"])
    )
    by_group = elsewhere.groupby("group")["wait"].sum()
    if not len(by_group) or by_group.max() < _HELD_UP_SHARE * late_ns:
        return []
    where: Any = by_group.idxmax()
    whom = elsewhere[elsewhere["group"] == where].groupby("whom")["wait"].sum().idxmax()
    what = f"{_HELD_UP} {groups.get(where, f'group {where}')} for rank {whom}"
    return [{"what": what, "extra_ns": int(by_group.max()), "share": 1.0, "count_ratio": None}]


def _reasons(rank: int, steps: Mapping[int, pd.DataFrame], others: list[int]) -> tuple[list[dict[str, Any]], int]:
    """What a rank spends more time on than the median of others, and how much more in all."""
    chosen = np.unique(np.linspace(0, len(others) - 1, _MOST_OTHERS).round().astype(int))
    tables = [steps[rank], *(steps[others[i]] for i in chosen)]
    names = [name for name in steps[rank].columns if name.startswith(TIME) and name != WAITING]
    together = pd.concat([table.set_index("step") for table in tables], keys=range(len(tables))).fillna(0)
    # Steps that all of them recorded.
    together = together[together.groupby("step")[names[0]].transform("size") == len(tables)]
    own: Any = together.loc[0]
    rest = together.drop(index=0, level=0)
    usual = rest.groupby("step").median()
    extra = (own[names] - usual[names]).sum().astype(np.int64)
    total = int(extra[extra > 0].sum())
    reasons = []
    for name, extra_ns in extra.sort_values(ascending=False, kind="stable").items():
        if not total or extra_ns < _REASON * total:
            break
        what = str(name).removeprefix(TIME)
        ratio = _times_as_many(own, rest, f"{COUNT}{what}")
        reasons.append({"what": what, "extra_ns": int(extra_ns), "share": extra_ns / total, "count_ratio": ratio})
    return reasons, total


def _times_as_many(own: pd.DataFrame, others: pd.DataFrame, count: str) -> float | None:
    """How many times the others' kernels of a kind a rank runs; None for what is not counted."""
    if count not in own:
        return None
    usual = float(others[count].groupby(level=0).sum().median())
    return float(own[count].sum()) / usual if usual else math.inf


def _text(row: Mapping[str, Any]) -> str:
    """Say it in a few sentences."""
    units = f"{row['late_units']} of {row['units']} {row['unit']}s"
    late = f"Rank {row['rank']} comes late in {units}, by {_ms(row['median_late_ns'])} at the median"
    share = f"{row['gain_share']:.1%}" if row["gain_share"] < 1 else "all"
    gain = f"If it alone were on time, at most {_ms(row['gain_ns'])} ({share}) would be saved."
    if not row["because"]:
        return f"{late}; what it does differently is not in the trace. {gain}"
    reason = row["because"][0]
    what, extra = reason["what"], _ms(reason["extra_ns"])
    if what.startswith(_HELD_UP):
        return f"{late}, after {extra} of {what}."
    return f"{late}; it spends {extra} more than the others on {what}{_how_many(reason['count_ratio'])}. {gain}"


def _how_many(count_ratio: float | None) -> str:
    if count_ratio is None:
        return ""
    if abs(count_ratio - 1) <= _SAME_COUNT:
        return ": as many as on the others, but slower"
    return f": {count_ratio:.2f} times as many as on the others"


def _ms(ns: float) -> str:
    return f"{ns / 1e6:,.3f} ms"
