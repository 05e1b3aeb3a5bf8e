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
    lower = arrivals.groupby("collective")["start_ns"].quantile(0.5, interpolation="lower")
    mine = arrivals[arrivals["wait_ns"].notna()]
    key = mine["rank"].to_numpy(np.int64) << 32 | mine["group"].to_numpy(np.int64)
    late = uncovered(mine["collective"].map(lower).astype(np.int64), mine["start_ns"], key)
    return pd.Series(late, mine.index).reindex(arrivals.index).astype("float64")


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
    judged = _lateness_by_group(table)
    named = _late_beyond_chance(judged, wall_ns)
    if not named:
        return pd.DataFrame({column: [] for column in COLUMNS}), 0
    last, rows, extras = _last_to_arrive(table), [], 0.0
    for rank, (p, group) in named.items():
        units = judged[group]
        crew = [other for other in units.columns.to_numpy(np.int64).tolist() if other != rank]
        because, extra = _reasons(rank, steps, [other for other in crew if other not in named] or crew)
        late_ns = int(table.loc[table["rank"] == rank, "late"].sum())
        gain = _time_saved(table, {rank})
        if extra >= _EXPLAINED * late_ns:
            # It alone on time cannot save more than what it spends more than the others.
            gain, extras = min(gain, extra), extras + extra
        else:
            because = _held_up(table, last, rank, group, units[rank].sum(), groups or {})
            extras += 0 if because else math.inf
        mine, own = units[rank].dropna(), last[last["rank"] == rank]
        row: dict[str, Any] = {
            "rank": rank,
            "cause": because[0]["what"] if because else "not explained",
            "late_ns": late_ns,
            "median_late_ns": int(mine[mine > 0].median()),
            "late_units": int((mine > 0).sum()),
            "units": len(mine),
            "unit": units.index.name,
            "last_count": len(own),
            "collectives": int((table["rank"] == rank).sum()),
            "waited_for_ns": int((own["by"] * (own["ranks"] - 1)).sum()),
            "gain_ns": gain,
            "gain_share": gain / wall_ns if wall_ns else 0.0,
            "p_value": min(p, 1.0),
            "because": because,
        }
        rows.append(row | {"text": _text(row)})
    rows.sort(key=lambda row: (str(row["cause"]).startswith(_HELD_UP), -row["late_ns"]))
    return pd.DataFrame(rows, columns=COLUMNS), int(min(_time_saved(table, set(named)), extras))


def _lateness_by_group(table: pd.DataFrame) -> dict[int, pd.DataFrame]:
    """Lateness of each process group's ranks (columns) in each step, or at each collective where steps are too few."""
    found = {}
    for group, mine in table.groupby("group"):
        stepped = mine[mine["step"] >= 0]
        unit, rows = ("step", stepped) if stepped["step"].nunique() >= _ENOUGH_STEPS else ("collective", mine)
        found[int(str(group))] = rows.pivot_table(index=unit, columns="rank", values="late", aggfunc="sum")
    return found


def _late_beyond_chance(judged: Mapping[int, pd.DataFrame], wall_ns: float) -> dict[int, tuple[float, int]]:
    """Stragglers, each with its chance, and the group in which it is latest."""
    tests = sum(units.shape[1] for units in judged.values())
    named: dict[int, tuple[float, int]] = {}
    while late := [
        (units[rank].sum(), -group, rank, p * tests)
        for group, units in judged.items()
        for rank, p in _chance_of_each(units.drop(columns=list(named), errors="ignore")).items()
        if p * tests < _SIGNIFICANT and units[rank].sum() >= _WORTH * wall_ns
    ]:
        # Of the groups that a rank is late in, the one in which it is latest comes last.
        named |= {rank: (p, -group) for _, group, rank, p in sorted(late)}
    return named


def _chance_of_each(units: pd.DataFrame) -> dict[int, float]:
    """Chance of each rank to be placed at least as late as it is, if every place were as likely for each."""
    # Where nobody was late, nobody was placed: that says nothing for or against a rank.
    units = units[units.nunique(axis=1) > 1]
    count = units.notna().sum(axis=1)
    # Of ties a rank gets the mean place; rounded down, so that chance is not thought smaller than it is.
    return {
        int(str(rank)): chance_of_places(count[places.notna()].tolist(), math.floor(places.sum()))
        for rank, places in units.rank(axis=1, method="average").items()
    }


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
        ways = functools.reduce(np.convolve, (np.full(n, 1 / n) for n in sides))
        return float(ways[max(total - len(sides), 0) :].sum())  # of all dice at least a one
    mean = sum((n + 1) / 2 for n in sides)
    deviation = math.sqrt(sum((n * n - 1) / 12 for n in sides))
    return 0.5 * math.erfc((total - 0.5 - mean) / deviation / math.sqrt(2)) if deviation else 1.0


def _last_to_arrive(table: pd.DataFrame) -> pd.DataFrame:
    """The rank that came last to each collective, how much later than the one before, and how many came."""
    by = table.sort_values(["collective", "start_ns", "rank"], kind="stable").groupby("collective")
    last, before = by["start_ns"].nth(-1).to_numpy(), by["start_ns"].nth(-2).to_numpy()
    frame = pd.DataFrame({"rank": by["rank"].last(), "group": by["group"].last(), "ranks": by.size()})
    return frame.assign(by=uncovered(before, last, frame["group"]))


def _time_saved(table: pd.DataFrame, ranks: set[int]) -> int:
    """Time that some ranks' lateness costs: that in which somebody waited for them and did nothing else."""
    by = table.groupby("collective")
    # When the others were there; where there are no others, when the first was.
    others = table[~table["rank"].isin(ranks)].groupby("collective")["start_ns"].max()
    in_time = by["start_ns"].min().to_frame("first").join(others).ffill(axis=1)["start_ns"]
    exposed = by["exposed_ns"].max().astype("float64").fillna(np.inf)
    return int(np.minimum(uncovered(in_time, by["start_ns"].max(), by["group"].first()), exposed).sum())


def _held_up(
    table: pd.DataFrame, last: pd.DataFrame, rank: int, group: int, late_ns: float, groups: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Another group than the one it is late in, in which a rank waits for others so long that this makes it late."""
    mine = table[(table["rank"] == rank) & (table["group"] != group)].join(last["rank"].rename("whom"), on="collective")
    wait = mine["wait_ns"].astype("float64")
    waited = wait.groupby(mine["group"]).sum()
    if not len(waited) or waited.max() < _HELD_UP_SHARE * late_ns:
        return []
    where = int(str(waited.idxmax()))
    whom = wait[mine["group"] == where].groupby(mine["whom"]).sum().idxmax()
    what = f"{_HELD_UP} {groups.get(where, f'group {where}')} for rank {whom}"
    return [{"what": what, "extra_ns": int(waited.max()), "share": 1.0, "count_ratio": None}]


def _reasons(rank: int, steps: Mapping[int, pd.DataFrame], others: list[int]) -> tuple[list[dict[str, Any]], int]:
    """What a rank spends more time on than the median of others, and how much more in all."""
    chosen = [others[i] for i in np.unique(np.linspace(0, len(others) - 1, _MOST_OTHERS).round().astype(int))]
    common = sorted(set.intersection(*(set(steps[one]["step"]) for one in (rank, *chosen))))
    mine, *theirs = (steps[one].set_index("step").loc[common] for one in (rank, *chosen))
    names = [str(c) for c in mine.columns if str(c).startswith(TIME) and c != WAITING]
    usual = np.median([one.reindex(columns=names, fill_value=0).to_numpy(np.float64) for one in theirs], axis=0)
    spent = (mine[names].to_numpy(np.float64) - usual).sum(axis=0).astype(np.int64).tolist()
    extra = {name.removeprefix(TIME): ns for name, ns in zip(names, spent, strict=True)}
    total = sum(ns for ns in extra.values() if ns > 0)
    reasons = [
        {"what": what, "extra_ns": ns, "share": ns / total, "count_ratio": _times_as_many(what, mine, theirs)}
        for what, ns in sorted(extra.items(), key=lambda item: -item[1])
        if total and ns >= _REASON * total
    ]
    return reasons, total


def _times_as_many(what: str, mine: pd.DataFrame, theirs: list[pd.DataFrame]) -> float | None:
    """How many times the others' kernels of a kind a rank runs; None for what is not counted."""
    if (count := f"{COUNT}{what}") not in mine:
        return None
    usual = float(np.median([one[count].sum() for one in theirs if count in one] or [0.0]))
    return float(mine[count].sum()) / usual if usual else math.inf


def _text(row: Mapping[str, Any]) -> str:
    """Say it in a few sentences."""
    often = f"in {row['late_units']} of {row['units']} {row['unit']}s"
    said = f"Rank {row['rank']} comes late {often}, by {_ms(row['median_late_ns'])} at the median"
    share = f"{row['gain_share']:.1%}" if row["gain_share"] < 1 else "all"
    gain = f"If it alone were on time, at most {_ms(row['gain_ns'])} ({share}) would be saved."
    if not row["because"]:
        return f"{said}; what it does differently is not in the trace. {gain}"
    what, extra, ratio = (row["because"][0][of] for of in ("what", "extra_ns", "count_ratio"))
    if what.startswith(_HELD_UP):
        return f"{said}, after {_ms(extra)} of {what}."
    slower = ratio is not None and abs(ratio - 1) <= _SAME_COUNT
    more = "" if ratio is None else f": {ratio:.2f} times as many as on the others"
    why = ": as many as on the others, but slower" if slower else more
    return f"{said}; it spends {_ms(extra)} more than the others on {what}{why}. {gain}"


def _ms(ns: float) -> str:
    return f"{ns / 1e6:,.3f} ms"
