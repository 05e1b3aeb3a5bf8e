"""Which collective of one rank is which of another, and how far apart the clocks of ranks are.

Every rank's trace has a clock of its own. What ties them together are collectives that no rank can leave before all
have arrived (all-reduce, all-gather, reduce-scatter, all-to-all, barrier): they end on all ranks at nearly the same
time. The median over many of them gives a clock's offset, whoever came late to some: that shows in their starts, not in
their ends.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

__all__ = ["SYNCHRONIZING", "Alignment", "Matched", "align", "column_of", "match", "together"]

Int = npt.NDArray[np.int64]
Float = npt.NDArray[np.float64]

#: Kinds of collectives that end on no rank before they began on all.
SYNCHRONIZING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")

#: Without sequence numbers: ranks' collectives are the same ones if their ends differ by a constant (and a drift) but
#: for this, or for a tenth of the usual distance between two of them.
_END_SPREAD_NS = 50_000
_END_SPREAD_SHARE = 0.1
#: Of several ranks that fit, those are of one group that fit nearly as well as the best, or as closely as this.
_CLOSER = 3.0
_CLOSE_NS = 10_000
#: What ends differ by anyway, on a GPU and where threads of a CPU must be scheduled first.
_SURE_NS = {"GPU": 20_000, "CPU": 2_000_000}
#: A group is none if more than this share of its collectives is impossible.
_MOST_WRONG = 0.2
#: Ranks with as many collectives are not shifted against each other, unless the ends fit so many times better.
_SHIFT_GAIN = 5
#: How many collectives one rank's capture may begin earlier than another's, where they are matched by their order.
_MOST_LAG = 300
#: Collectives of each rank that are looked at to find which ends coincide.
_MOST_VOTES = 600
#: What ends may differ by to coincide, of that, where some collectives of a rank are missing.
_COINCIDING = 10
#: Of the collectives that two ranks have, at least so many must match.
_LEAST_MATCHED = 0.3
#: A drift of a clock is corrected from so many collectives on, if that makes the spread this much smaller.
_ENOUGH_FOR_DRIFT = 8
_DRIFT_GAIN = 0.6
#: Offsets of ranks that share collectives only through others settle in turn.
_ROUNDS = 50
_MAD_TO_SIGMA = 1.4826
#: Of a median, relative to a mean's, for normally distributed samples.
_MEDIAN_ERROR = 1.2533


@dataclasses.dataclass
class Matched:
    """Collectives of several ranks, matched.

    Parameters
    ----------
    arrivals : DataFrame
        One row for each rank of each collective: ``collective`` (a number), ``group`` (a number into `groups`),
        ``rank``, ``row`` (of the rank's table); by collective, then rank. Only collectives that two ranks or more have.
    groups : DataFrame
        ``group, name, where, ranks`` (how many were seen), ``group_size`` (-1 unknown), ``matched_by`` (``sequence`` of
        the trace, ``order``, or ``coincidence`` of ends), ``guessed`` (the traces do not name it).
    notes : list of str
        What was left out, and why.
    """

    arrivals: pd.DataFrame
    groups: pd.DataFrame
    notes: list[str]


@dataclasses.dataclass
class Alignment:
    """Clocks of several ranks, measured against each other.

    Parameters
    ----------
    clocks : DataFrame
        By ``rank``: ``island`` (ranks of the same number are tied by collectives, directly or through others; clocks
        of different islands cannot be compared), ``offset_ns`` (what this clock shows more than that of the island's
        lowest rank, times as in the tables), ``drift_ppm``, ``middle_ns`` (the moment at which the offset holds),
        ``spread_ns`` (robust standard deviation of what remains between the ends of a collective), ``error_ns``
        (standard error of the offset), ``matched`` (how many collectives tell).
    """

    clocks: pd.DataFrame

    def aligned(self, rank: npt.ArrayLike, time_ns: npt.ArrayLike) -> Int:
        """Put times of ranks on the clock of their island's lowest rank.

        Parameters
        ----------
        rank, time_ns : array_like of int

        Returns
        -------
        ndarray of int64
        """
        clock = self.clocks.set_index("rank")
        of = clock.loc[np.asarray(rank)]
        time = np.asarray(time_ns, np.int64)
        drift = (of["drift_ppm"].to_numpy() * 1e-6) * (time - of["middle_ns"].to_numpy())
        return np.asarray(time - of["offset_ns"].to_numpy() - np.rint(drift).astype(np.int64), np.int64)


def together(
    ranks: Mapping[int, pd.DataFrame],
    t0_ns: Mapping[int, int] | None = None,
    clock: Mapping[int, object] | None = None,
) -> tuple[Matched, Alignment]:
    """Match the collectives of several ranks and align their clocks, and leave out what cannot be.

    A group is left out whose collectives, on the aligned clocks, end on one rank before they began on another; and one
    that was guessed from a stream and whose ends do not coincide after all.

    Parameters
    ----------
    ranks, t0_ns, clock : mapping
        As for :func:`match` and :func:`align`.

    Returns
    -------
    matched : Matched
    alignment : Alignment
    """
    matched = match(ranks)
    alignment = align(matched, ranks, t0_ns, clock)
    wrong = _impossible(matched, alignment, ranks)
    if wrong:
        keep = ~matched.arrivals["group"].isin(wrong).to_numpy()
        names = ", ".join(matched.groups.loc[sorted(wrong), "name"])
        said = f"Left out, since their collectives contradict each other: {names}."
        if matched.groups.loc[sorted(wrong), "guessed"].any():
            said += " There are several process groups, which these traces do not name (torch.profiler's do)."
        matched = Matched(matched.arrivals[keep].reset_index(drop=True), matched.groups, [*matched.notes, said])
        alignment = align(matched, ranks, t0_ns, clock)
    return matched, alignment


def _impossible(matched: Matched, alignment: Alignment, ranks: Mapping[int, pd.DataFrame]) -> set[int]:
    """Groups that are none."""
    arrivals = matched.arrivals
    arrivals = arrivals[np.isin(column_of(arrivals, ranks, "kind"), SYNCHRONIZING)]
    if not len(arrivals):
        return set()
    start, end = (alignment.aligned(arrivals["rank"], column_of(arrivals, ranks, c)) for c in ("start_ns", "end_ns"))
    sure = matched.groups["where"].map(_SURE_NS).to_numpy()[arrivals["group"]]
    arrivals = arrivals.assign(start_ns=start, end_ns=end, lasted=end - start)
    by = arrivals.groupby("collective")
    # A long transfer need not be over everywhere at once; the rank that came last waited for nobody.
    tolerance = np.maximum(
        np.maximum(sure, _END_SPREAD_NS), _END_SPREAD_SHARE * by["lasted"].transform("min").to_numpy()
    )
    early = by["start_ns"].transform("max").to_numpy() > by["end_ns"].transform("min").to_numpy() + tolerance
    apart = np.abs(end - by["end_ns"].transform("median").to_numpy()) > tolerance
    apart &= matched.groups["guessed"].to_numpy()[arrivals["group"]]
    arrivals = arrivals.assign(early=early, apart=apart)
    often = [
        arrivals.groupby("group")["early"].mean(),
        arrivals.groupby(["group", "rank"])["apart"].mean().groupby("group").max(),
    ]
    wrong = {int(g) for share in often for g in share.index[share.to_numpy() > _MOST_WRONG]}
    # Of guesses that contradict each other, which is wrong cannot be told.
    members: dict[int, set[int]] = defaultdict(set)
    for group, rank in zip(arrivals["group"].tolist(), arrivals["rank"].tolist(), strict=True):
        members[group].add(rank)
    guessed = set(matched.groups.loc[matched.groups["guessed"], "group"]) & set(members)
    doubted = set().union(*(members[g] for g in wrong & guessed))
    return wrong | {g for g in guessed if members[g] & doubted}


def column_of(arrivals: pd.DataFrame, ranks: Mapping[int, pd.DataFrame], column: str) -> npt.NDArray[Any]:
    """Give a column of the ranks' tables for each row of arrivals.

    Parameters
    ----------
    arrivals : DataFrame
        With ``rank`` and ``row``.
    ranks : mapping of int to DataFrame
    column : str

    Returns
    -------
    ndarray
    """
    out = np.empty(len(arrivals), dtype=object if column in ("kind", "where") else np.int64)
    rank, row = arrivals["rank"].to_numpy(), arrivals["row"].to_numpy()
    for one, table in ranks.items():
        mine = np.flatnonzero(rank == one)
        out[mine] = table[column].loc[row[mine]].to_numpy()
    return out


# ---------------------------------------------------------------- which is which


def match(ranks: Mapping[int, pd.DataFrame]) -> Matched:
    """Match the collectives of several ranks.

    By process group and sequence number where traces have them. Else the n-th of one rank is the n-th of another, with
    the shift that lets their ends fit best; and where ranks lack some of their collectives, those are the same whose
    ends coincide. Sends and receives are left out: whose partner is whose is not recorded.

    Parameters
    ----------
    ranks : mapping of int to DataFrame
        Each rank's :func:`nsightkit.analysis.ranks.collectives.collectives`.

    Returns
    -------
    Matched
    """
    notes: list[str] = []
    mine: dict[int, pd.DataFrame] = {}
    sends = 0
    for rank, table in sorted(ranks.items()):
        alone = (table["kind"] == "send/recv").to_numpy()
        sends += int(alone.sum())
        mine[rank] = table[~alone]
    if sends:
        notes.append(f"{sends:,} sends and receives were left out: whose partner is whose is not recorded.")
    guessed = _unnamed(mine)
    if len(ranks) > 2 and sum(len(of) > 1 for *_, of in guessed) > 1:
        notes.append("The traces name no process groups: streams whose collectives end together are taken for one.")
    found = [*_named(mine), *guessed]
    parts, rows = [], []
    total = single = 0
    for number, (label, where, size, members) in enumerate(found):
        guess = number >= len(found) - len(guessed)
        matched, by, said = _matched(mine, members)
        notes += [f"{label}: {text}" for text in said]
        matched["collective"] += total
        total = int(matched["collective"].max()) + 1 if len(matched) else total
        parts.append(matched.assign(group=number))
        rows.append((number, label, where, len(members), size, by, guess))
        single += sum(len(r) for r in members.values()) - len(matched)
    if single:
        notes.append(f"{single:,} collectives of single ranks match none of another rank and were left out.")
    columns = ["collective", "group", "rank", "row"]
    arrivals = pd.concat(parts) if parts else pd.DataFrame({c: np.empty(0, np.int64) for c in columns})
    names = ["group", "name", "where", "ranks", "group_size", "matched_by", "guessed"]
    groups = pd.DataFrame(rows, columns=names)
    return Matched(arrivals.sort_values(["collective", "rank"], ignore_index=True)[columns], groups, notes)


_Group = tuple[str, str, int, dict[int, Int]]  # label, where, size, {rank: rows in time order}


def _named(ranks: Mapping[int, pd.DataFrame]) -> list[_Group]:
    """Process groups that the traces name."""
    members: dict[tuple[str, str, str], dict[int, Int]] = defaultdict(dict)
    sizes: dict[tuple[str, str, str], int] = {}
    for rank, table in ranks.items():
        for (where, name, of), rows in table[table["group"] != ""].groupby(["where", "group", "ranks"], sort=False):
            key = (str(where), str(name), str(of))
            members[key][rank] = rows.index.to_numpy(np.int64)
            sizes[key] = max(sizes.get(key, -1), int(rows["group_size"].max()))
    several: dict[str, int] = defaultdict(int)
    for _, name, _ in members:
        several[name] += 1
    found = []
    for key, ranks_of in members.items():
        where, name, of = key
        label = f"process group {name}" + (f" of ranks {of}" if several[name] > 1 and of else "")
        found.append((label, where, sizes[key], ranks_of))
    return found


def _unnamed(ranks: Mapping[int, pd.DataFrame]) -> list[_Group]:
    """Streams (or the CPU) of ranks on which the same collectives ran, where the traces name no groups."""
    lanes = [
        (rank, key, table.loc[rows.index])
        for rank, table in ranks.items()
        for key, rows in table[table["group"] == ""].groupby(["where", "device", "stream"], sort=True)
    ]
    found: list[_Group] = []
    while lanes:
        (first, key, reference), *lanes = lanes
        members = {first: reference.index.to_numpy(np.int64)}
        best: dict[int, tuple[float, int]] = {}
        for i, (rank, other, table) in enumerate(lanes):
            if rank in members or other[0] != key[0]:
                continue
            pairs = _pair(reference, table)
            if pairs is not None and (rank not in best or pairs.spread_ns < best[rank][0]):
                best[rank] = (pairs.spread_ns, i)
        # Other groups of the same program end their collectives at similar times, but not as closely.
        closest = min((spread for spread, _ in best.values()), default=0.0)
        best = {rank: found for rank, found in best.items() if found[0] <= max(_CLOSER * closest, _CLOSE_NS)}
        for rank, (_, i) in best.items():
            members[rank] = lanes[i][2].index.to_numpy(np.int64)
        taken = {i for _, i in best.values()}
        taken_keys = [lanes[i][1] for i in taken]
        lanes = [lane for i, lane in enumerate(lanes) if i not in taken]
        same = all(lanes_of[2] == key[2] for lanes_of in taken_keys)
        label = "CPU" if key[0] == "CPU" else f"stream {key[2]}" + ("" if same else f" of rank {first}")
        found.append((label, str(key[0]), -1, members))
    return found


def _matched(ranks: Mapping[int, pd.DataFrame], members: Mapping[int, Int]) -> tuple[pd.DataFrame, str, list[str]]:
    """Match the collectives of one group's ranks."""
    none = pd.DataFrame({c: np.empty(0, np.int64) for c in ("collective", "rank", "row")})
    tables = {rank: ranks[rank].loc[rows] for rank, rows in members.items()}
    if len(tables) < 2:
        return none, "order", []
    notes: list[str] = []
    sequenced = all((table["sequence"] >= 0).all() for table in tables.values())
    if sequenced:
        whole = pd.concat([table.assign(rank=rank, row=table.index) for rank, table in tables.items()])
        # A coalesced collective may be several kernels with one number.
        whole["nth"] = whole.groupby(["rank", "sequence"]).cumcount()
        whole["collective"] = whole.groupby(["sequence", "nth"]).ngroup()
        by = "sequence"
    else:
        order = sorted(tables, key=lambda rank: (-len(tables[rank]), rank))
        reference = tables[order[0]]
        parts = [pd.DataFrame({"collective": np.arange(len(reference)), "rank": order[0], "row": reference.index})]
        by, doubtful, matching = "order", [], [order[0]]
        for rank in order[1:]:
            pairs = _pair(reference, tables[rank])
            if pairs is None:
                notes.append(f"the collectives of rank {rank} fit those of no other rank.")
                continue
            by = "coincidence" if pairs.by_votes else by
            if pairs.ambiguous:
                doubtful.append(rank)
            row = tables[rank].index.to_numpy()[pairs.other]
            parts.append(pd.DataFrame({"collective": pairs.reference, "rank": rank, "row": row}))
            matching.append(rank)
        if doubtful:
            listed = ", ".join(map(str, doubtful[:8])) + ("…" if len(doubtful) > 8 else "")
            notes.append(f"which collective is which fits several ways nearly as well (ranks {listed}).")
        whole = pd.concat(parts, ignore_index=True)
        whole["kind"] = np.concatenate(
            [tables[r].loc[part["row"], "kind"] for r, part in zip(matching, parts, strict=True)]
        )
    # All ranks must say the same of it.
    kinds = whole.groupby("collective")["kind"].nunique()
    different = set(kinds.index[kinds.to_numpy() > 1])
    if different:
        notes.append(f"{len(different):,} collectives are of different kinds on different ranks and were left out.")
    count = whole.groupby("collective")["rank"].nunique()
    keep = whole["collective"].isin(set(count.index[count.to_numpy() > 1]) - different)
    whole = whole[keep]
    number, _ = pd.factorize(whole["collective"], sort=True)
    return whole.assign(collective=number)[["collective", "rank", "row"]], by, notes


@dataclasses.dataclass
class _Pairs:
    """Positions of the same collectives in two ranks' tables."""

    reference: Int
    other: Int
    spread_ns: float
    by_votes: bool = False
    ambiguous: bool = False


def _pair(reference: pd.DataFrame, other: pd.DataFrame) -> _Pairs | None:
    """Find which rows of two ranks are the same collectives, without sequence numbers; None if they are not."""
    ends: list[Int] = [table["end_ns"].to_numpy(np.int64) for table in (reference, other)]
    signs, sure = _signatures(reference, other), _SURE_NS[str(reference["where"].iloc[0])]
    tolerance = max(_END_SPREAD_NS, sure)
    if len(ends[0]) > 1:
        tolerance = max(tolerance, int(_END_SPREAD_SHARE * np.median(np.diff(ends[0]))))
    shifted = _by_order(ends, signs, sure)
    if shifted is not None and (shifted.spread_ns <= tolerance or _meet(reference, other, shifted)):
        return shifted
    # First what coincides as closely as ends do: in regular steps many more do so roughly, one step apart.
    return _by_coincidence(ends, signs, sure) or _by_coincidence(ends, signs, _COINCIDING * sure)


def _meet(reference: pd.DataFrame, other: pd.DataFrame, pairs: _Pairs) -> bool:
    """Whether two ranks have as many collectives, and each began on one before it ended on the other."""
    if not len(reference) == len(other) == len(pairs.reference):
        return False
    (s, e), (t, f) = ((table["start_ns"].to_numpy(), table["end_ns"].to_numpy()) for table in (reference, other))
    apart = int(np.median(e - f))
    return bool(np.mean((t + apart <= e) & (s <= f + apart)) >= 1 - _END_SPREAD_SHARE)


def _signatures(reference: pd.DataFrame, other: pd.DataFrame) -> list[Int]:
    """Numbers that are equal where kind and size are."""
    both = pd.concat([reference[["kind", "bytes"]], other[["kind", "bytes"]]])
    number = both.groupby(["kind", "bytes"], sort=False).ngroup()
    first, second = np.split(np.asarray(number, np.int64), [len(reference)])
    return [first, second]


def _by_order(ends: list[Int], signs: list[Int], sure: int) -> _Pairs | None:
    """Match by order: try shifts of one against the other, and take the one that lets the ends fit best."""
    n, m = len(ends[0]), len(ends[1])
    tried: dict[int, tuple[float, Int]] = {}
    least = max(min(n, m) / 2, 1)
    for shift in sorted(range(-min(m - 1, _MOST_LAG), min(n - 1, _MOST_LAG) + 1), key=abs):
        # reference[i + shift] is other[i]
        low, high = max(0, -shift), min(m, n - shift)
        if high - low < least:
            continue
        at = np.arange(low, high)
        same = signs[0][at + shift] == signs[1][at]
        if same.mean() < 0.95:
            continue
        at = at[same]
        tried[shift] = (_spread(ends[0][at + shift] - ends[1][at], ends[1][at]), at)
        if shift == 0 and n == m and len(at) > 2 and tried[0][0] <= sure:
            break
    # Two points fit any line: a shift that leaves so few says nothing, but for the one that leaves all.
    tried = {shift: found for shift, found in tried.items() if len(found[1]) > 3 or (shift == 0 and n == m)}
    if not tried:
        return None
    best = min(tried, key=lambda shift: (tried[shift][0], abs(shift)))
    if 0 in tried and n == m and tried[0][0] <= _SHIFT_GAIN * tried[best][0] + sure:
        best = 0
    spread, at = tried[best]
    ambiguous = any(found[0] < 2 * spread for shift, found in tried.items() if shift != best)
    return _Pairs(at + best, at, spread, ambiguous=ambiguous and best != 0)


def _by_coincidence(ends: list[Int], signs: list[Int], close_ns: int) -> _Pairs | None:
    """Match by ends that coincide: the offset of clocks at which most of them do."""
    first, second = (end[:_MOST_VOTES] for end in ends)
    same = signs[0][: len(first), None] == signs[1][None, : len(second)]
    apart = np.sort((first[:, None] - second[None, :])[same])
    if not len(apart):
        return None
    # The window that holds most differences; a collective has one partner, so pairs are counted twice at worst.
    count = np.searchsorted(apart, apart + close_ns, side="right") - np.arange(len(apart))
    at = int(np.argmax(count))
    offset = int(np.median(apart[at : at + count[at]]))
    found_reference, found_other = [], []
    for sign in np.unique(signs[1]).tolist():
        here, there = np.flatnonzero(signs[0] == sign), np.flatnonzero(signs[1] == sign)
        if not len(here):
            continue
        moved = ends[1][there] + offset
        order = np.argsort(ends[0][here], kind="stable")
        sorted_ends = ends[0][here][order]
        place = np.clip(np.searchsorted(sorted_ends, moved), 1, max(len(here) - 1, 1))
        left, right = np.maximum(place - 1, 0), np.minimum(place, len(here) - 1)
        nearer = np.where(np.abs(sorted_ends[left] - moved) <= np.abs(sorted_ends[right] - moved), left, right)
        close = np.abs(sorted_ends[nearer] - moved) <= close_ns
        _, once = np.unique(nearer[close], return_index=True)
        found_reference.append(here[order][nearer[close][once]])
        found_other.append(there[close][once])
    if not found_reference:
        return None
    one, two = np.concatenate(found_reference), np.concatenate(found_other)
    if len(one) < max(3, _LEAST_MATCHED * min(len(ends[0]), len(ends[1]))):
        return None
    order = np.argsort(one, kind="stable")
    one, two = one[order], two[order]
    return _Pairs(one, two, _spread(ends[0][one] - ends[1][two], ends[1][two]), by_votes=True)


def _spread(apart: Int, at: Int) -> float:
    """How far nine in ten differences lie from a straight line through them, which is the drift of a clock."""
    rest = (apart - int(np.median(apart))).astype(np.float64)
    if len(apart) > 3:
        rest -= _slope(at.astype(np.float64), rest) * (at - at[len(at) // 2])
    return float(np.quantile(np.abs(rest - np.median(rest)), 0.9))


def _slope(x: Float, y: Float) -> float:
    """Slope of a line that outliers do not turn: between the medians of the first and of the last third."""
    third = max(len(x) // 3, 1)
    order = np.argsort(x, kind="stable")
    first, last = order[:third], order[-third:]
    run = float(np.median(x[last]) - np.median(x[first]))
    return float(np.median(y[last]) - np.median(y[first])) / run if run else 0.0


# ---------------------------------------------------------------- how far apart the clocks are


def align(
    matched: Matched,
    ranks: Mapping[int, pd.DataFrame],
    t0_ns: Mapping[int, int] | None = None,
    clock: Mapping[int, object] | None = None,
) -> Alignment:
    """Measure the clocks of ranks against each other by the ends of their collectives.

    A collective ends at one moment, but for a spread; each clock's offset is the median of what its ends differ from
    that moment, the moment the median over the ranks, in turn until nothing moves. A drift is corrected where that
    explains most of the spread.

    Parameters
    ----------
    matched : Matched
    ranks : mapping of int to DataFrame
        As for :func:`match`.
    t0_ns : mapping of int to int, optional
        The rank's time zero on the clock of its source. Clocks that agree by these within the error of the measurement
        are taken to be one clock: ranks on one machine.
    clock : mapping of int to object, optional
        Ranks that have the same have one clock for certain: processes of one capture.

    Returns
    -------
    Alignment
    """
    names = sorted(ranks)
    ends = _Ends(matched, ranks, names)
    offset, island = ends.islands()
    offset, drift, middle = ends.settled(offset, island)
    spread, error, count = ends.spread(offset, drift, middle)
    lowest = np.array([int(np.argmax(island == one)) for one in island], np.int64)
    for one in set(clock.values()) if clock is not None else ():
        same = np.array([clock is not None and clock[name] == one for name in names])
        offset[same], drift[same] = np.median(offset[same]), np.median(drift[same])
    # All against the lowest rank of the island.
    offset, drift = np.rint(offset - offset[lowest]).astype(np.int64), drift - drift[lowest]
    if t0_ns is not None:
        start = [int(t0_ns[name]) for name in names]
        for i, of in enumerate(lowest.tolist()):
            # As the sources' clocks have it, which may lie decades apart.
            apart = int(offset[i]) + start[i] - start[of]
            if drift[i] == 0 and abs(apart) <= 2 * np.nan_to_num(np.hypot(error[i], error[of])):
                offset[i] = start[of] - start[i]
    columns = {"island": island, "offset_ns": offset, "drift_ppm": drift * 1e6, "middle_ns": np.rint(middle)}
    columns |= {"spread_ns": spread, "error_ns": error, "matched": count}
    return Alignment(pd.DataFrame({"rank": names, **columns}).astype({"middle_ns": "int64"}))


class _Ends:
    """Ends of the collectives that tell of clocks, in columns: which collective, which rank (by position), when."""

    def __init__(self, matched: Matched, ranks: Mapping[int, pd.DataFrame], names: list[int]) -> None:
        self.n = len(names)
        parts: list[tuple[Int, Int, Int]] = []
        for position, name in enumerate(names):
            mine = matched.arrivals[matched.arrivals["rank"] == name]
            table = ranks[name].loc[mine["row"]]
            useful = table["kind"].isin(SYNCHRONIZING).to_numpy()
            collective = mine["collective"].to_numpy(np.int64)[useful]
            end = table["end_ns"].to_numpy(np.int64)[useful]
            parts.append((collective, np.full(len(end), position), end))
        self.collective, self.rank, self.end = (np.concatenate(column) for column in zip(*parts, strict=True))
        self.count = np.bincount(self.rank, minlength=self.n)

    def islands(self) -> tuple[Float, Int]:
        """First offsets, along collectives that ranks share; and which ranks these tie together."""
        offset, island = np.zeros(self.n), np.full(self.n, -1, np.int64)
        of_one = np.full(int(self.collective.max(initial=-1)) + 1, np.nan)
        for first in range(self.n):
            if island[first] >= 0:
                continue
            island[first] = first
            waiting = [first]
            while waiting and (island < 0).any():
                one = waiting.pop(0)
                mine = self.rank == one
                of_one[:] = np.nan
                of_one[self.collective[mine]] = self.end[mine]
                fresh = (island[self.rank] < 0) & ~np.isnan(of_one[self.collective])
                apart = self.end[fresh] - of_one[self.collective[fresh]]
                apart_of = pd.Series(apart).groupby(self.rank[fresh]).median()
                others = apart_of.index.to_numpy(np.int64)
                island[others], offset[others] = first, offset[one] + apart_of.to_numpy()
                waiting += others.tolist()
        return offset, island

    def settled(self, offset: Float, island: Int) -> tuple[Float, Float, Float]:
        """Offsets and drifts at which nothing moves any more, and the moments at which the offsets hold."""
        middle = np.zeros(self.n)
        median = pd.Series(self.end).groupby(self.rank).median()
        middle[median.index.to_numpy(np.int64)] = median.to_numpy()
        drift = np.zeros(self.n)
        offset = self._offsets(offset, drift, middle)
        rest = self._rest(offset, drift, middle)
        for i in np.flatnonzero(self.count >= _ENOUGH_FOR_DRIFT).tolist():
            mine = self.rank == i
            at = self.end[mine] - middle[i]
            slope = _slope(at, rest[mine])
            if slope and _deviation(rest[mine] - slope * at) <= _DRIFT_GAIN * _deviation(rest[mine]):
                drift[i] = slope
        # The lowest rank of an island has the clock that all are put on.
        drift -= drift[np.array([int(np.argmax(island == one)) for one in island], np.int64)]
        return self._offsets(offset, drift, middle), drift, middle

    def spread(self, offset: Float, drift: Float, middle: Float) -> tuple[Float, Float, Int]:
        """Robust deviation of each rank's ends from the collectives' moments, standard error of its offset, ends."""
        rest = self._rest(offset, drift, middle)
        spread, error = np.full(self.n, np.nan), np.full(self.n, np.nan)
        several = np.bincount(self.collective)[self.collective]
        for i in np.flatnonzero(self.count).tolist():
            mine = self.rank == i
            # The moment is taken from the ends themselves, so they lie closer to it than to the true one.
            spread[i] = _deviation(rest[mine]) / np.sqrt(1 - 1 / np.mean(several[mine]))
            error[i] = _MEDIAN_ERROR * spread[i] / np.sqrt(self.count[i])
        return spread, error, self.count

    def _offsets(self, offset: Float, drift: Float, middle: Float) -> Float:
        for _ in range(_ROUNDS):
            rest = self._rest(offset, drift, middle)
            step = pd.Series(rest).groupby(self.rank).median()
            offset = offset.copy()
            offset[step.index.to_numpy(np.int64)] += step.to_numpy()
            if np.abs(step).max() < 0.5:
                break
        return offset

    def _rest(self, offset: Float, drift: Float, middle: Float) -> Float:
        """What each end differs from the collective's moment, the median over its ranks."""
        end = self.end - offset[self.rank] - drift[self.rank] * (self.end - middle[self.rank])
        return np.asarray(end - pd.Series(end).groupby(self.collective).transform("median"), np.float64)


def _deviation(values: Float) -> float:
    return float(_MAD_TO_SIGMA * np.median(np.abs(values - np.median(values))))
