"""Which collective of one rank is which of another, and how far apart the clocks of ranks are.

Every rank's trace has a clock of its own. What ties them together are collectives that no rank can leave before all
have arrived (all-reduce, all-gather, reduce-scatter, all-to-all, barrier): they end on all ranks at nearly the same
time. The median over many of them gives a clock's offset, whoever came late to some: that shows in their starts, not in
their ends.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.ranks import collectives as communication
from nsightkit.trace.model import Trace

__all__ = ["SYNCHRONIZING", "Alignment", "Matched", "Meetings", "align", "match", "ranks_text", "together"]

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
#: A group is left out if more than this share of its collectives is impossible.
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
        One row for each rank of each collective, by collective, then rank: ``collective`` (a number), ``group`` (a
        number into `groups`), ``rank``, ``row`` (of the rank's table), and the other columns of that table. Only
        collectives that two ranks or more have.
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
        of = self.clocks.set_index("rank").loc[np.asarray(rank)]
        time = np.asarray(time_ns, np.int64)
        drift = (of["drift_ppm"].to_numpy() * 1e-6) * (time - of["middle_ns"].to_numpy())
        return np.asarray(time - of["offset_ns"].to_numpy() - np.rint(drift).astype(np.int64), np.int64)

    def placed(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Put ``start_ns`` and ``end_ns`` of rows of ranks on that clock.

        Parameters
        ----------
        rows : DataFrame
            With the column ``rank``.

        Returns
        -------
        DataFrame
        """
        return rows.assign(**{column: self.aligned(rows["rank"], rows[column]) for column in ("start_ns", "end_ns")})


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
    ranks : mapping of int to DataFrame
        Each rank's :func:`nsightkit.analysis.ranks.collectives.collectives`.
    t0_ns, clock : mapping
        As for :func:`align`.

    Returns
    -------
    matched : Matched
    alignment : Alignment
    """
    matched = match(pd.concat([table.assign(rank=rank) for rank, table in ranks.items()]))
    alignment = align(matched, ranks, t0_ns, clock)
    if wrong := sorted(_contradictory(matched, alignment)):
        groups = matched.groups.loc[wrong]
        said = f"Left out, since their collectives contradict each other: {', '.join(groups['name'])}."
        if groups["guessed"].any():
            said += " There are several process groups, which these traces do not name (torch.profiler's do)."
        kept = matched.arrivals[~matched.arrivals["group"].isin(wrong)].reset_index(drop=True)
        matched = Matched(kept, matched.groups, [*matched.notes, said])
        alignment = align(matched, ranks, t0_ns, clock)
    return matched, alignment


def _contradictory(matched: Matched, alignment: Alignment) -> set[int]:
    """Groups whose collectives cannot be the same ones on all ranks."""
    rows = alignment.placed(matched.arrivals[matched.arrivals["kind"].isin(SYNCHRONIZING)])
    by, guessed = rows.groupby("collective"), matched.groups["guessed"].to_numpy(bool)[rows["group"]]
    lasted = (rows["end_ns"] - rows["start_ns"]).groupby(rows["collective"]).transform("min")
    # A long transfer need not be over everywhere at once; the rank that came last did not wait.
    tolerance = np.maximum(rows["where"].map(_SURE_NS).clip(lower=_END_SPREAD_NS), _END_SPREAD_SHARE * lasted)
    early = by["start_ns"].transform("max") > by["end_ns"].transform("min") + tolerance
    apart = ((rows["end_ns"] - by["end_ns"].transform("median")).abs() > tolerance) & guessed
    of_rank = apart.groupby([rows["group"], rows["rank"]]).mean()
    often = pd.concat([early.groupby(rows["group"]).mean(), of_rank.groupby("group").max()])
    wrong = set(often.index[often > _MOST_WRONG])
    # Of guesses that contradict each other, which one is wrong cannot be known.
    members: dict[Any, set[int]] = rows[guessed].groupby("group")["rank"].agg(set).to_dict()
    doubted = set().union(*(ranks for group, ranks in members.items() if group in wrong))
    return wrong | {group for group, ranks in members.items() if ranks & doubted}


def ranks_text(ranks: Sequence[int]) -> str:
    """Name some ranks, the first few of many.

    Parameters
    ----------
    ranks : sequence of int
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{'…' if len(ranks) > 8 else ''}"


# ---------------------------------------------------------------- which is which


def match(collectives: pd.DataFrame) -> Matched:
    """Match the collectives of several ranks.

    By process group and sequence number where traces have them. Else the n-th of one rank is the n-th of another, with
    the shift that lets their ends fit best; and where ranks lack some of their collectives, those are the same whose
    ends coincide. Sends and receives are left out: whose partner is whose is not recorded.

    Parameters
    ----------
    collectives : DataFrame
        Those of all ranks (:func:`nsightkit.analysis.ranks.collectives.collectives`), with the column ``rank``.

    Returns
    -------
    Matched
    """
    every = collectives.assign(row=collectives.index).sort_values("rank", kind="stable", ignore_index=True)
    every, notes = every[every["kind"] != "send/recv"], []
    if alone := len(collectives) - len(every):
        notes.append(f"Sends and receives were left out ({alone:,}): whose partner is whose is not recorded.")
    guessed = list(_guessed_groups(every[every["group"] == ""]))
    if collectives["rank"].nunique() > 2 and sum(rows["rank"].nunique() > 1 for *_, rows in guessed) > 1:
        notes.append("The traces name no process groups: streams whose collectives end together are taken for one.")
    named = list(_named_groups(every[every["group"] != ""]))
    parts, groups = [every[:0].assign(collective=0, group=0)], []
    for number, (label, where, size, rows) in enumerate([*named, *guessed]):
        matched, by, said = _matched_group(rows)
        notes += [f"{label}: {text}" for text in said]
        parts.append(matched.assign(group=number))
        groups.append((number, label, where, rows["rank"].nunique(), size, by, number >= len(named)))
    arrivals = pd.concat(parts)
    # So far each group's collectives are numbered from 0.
    arrivals = arrivals.assign(collective=arrivals.groupby(["group", "collective"]).ngroup())
    arrivals = arrivals.sort_values(["collective", "rank"], ignore_index=True)
    if single := len(every) - len(arrivals):
        notes.append(f"Collectives that match none of another rank were left out: {single:,}.")
    return Matched(arrivals, pd.DataFrame(groups, columns=_OF_GROUP), notes)


_OF_GROUP = ["group", "name", "where", "ranks", "group_size", "matched_by", "guessed"]
_Group = tuple[str, str, int, pd.DataFrame]  # label, where, size (-1 unknown), collectives of its ranks


def _named_groups(collectives: pd.DataFrame) -> Iterator[_Group]:
    """Process groups that the traces name."""
    groups: list[Any] = list(collectives.groupby(["where", "group", "ranks"], sort=False))
    several = Counter(name for (_, name, _), _ in groups)
    for (where, name, of), rows in groups:
        label = f"process group {name}" + (f" of ranks {of}" if several[name] > 1 and of else "")
        yield label, str(where), int(rows["group_size"].max()), rows


def _guessed_groups(collectives: pd.DataFrame) -> Iterator[_Group]:
    """Streams (or the CPU) of ranks on which the same collectives ran, where the traces name no groups."""
    lanes: list[Any] = list(collectives.groupby(["rank", "where", "device", "stream"]))
    while lanes:
        ((first, where, _, stream), reference), *lanes = lanes
        best: dict[int, tuple[float, int]] = {}
        for i, ((rank, other, *_), rows) in enumerate(lanes):
            pairs = _pair(reference, rows) if rank != first and other == where else None
            if pairs is not None and (rank not in best or pairs.spread_ns < best[rank][0]):
                best[rank] = pairs.spread_ns, i
        # Other groups of the same program end their collectives at similar times, but not as closely.
        closest = min((spread for spread, _ in best.values()), default=0.0)
        taken = [i for spread, i in best.values() if spread <= max(_CLOSER * closest, _CLOSE_NS)]
        same = all(lanes[i][0][3] == stream for i in taken)
        label = "CPU" if where == "CPU" else f"stream {stream}" + ("" if same else f" of rank {first}")
        yield label, str(where), -1, pd.concat([reference, *(lanes[i][1] for i in taken)])
        lanes = [lane for i, lane in enumerate(lanes) if i not in taken]


def _matched_group(collectives: pd.DataFrame) -> tuple[pd.DataFrame, str, list[str]]:
    """Number the collectives of one group's ranks; also say by what, and what was left out."""
    tables: dict[Any, pd.DataFrame] = dict(list(collectives.groupby("rank")))
    by, notes = "sequence", []
    if len(tables) > 1 and (collectives["sequence"] >= 0).all():
        # A coalesced collective may be several kernels with one number.
        nth = collectives.groupby(["rank", "sequence"]).cumcount()
        whole = collectives.assign(collective=collectives.groupby(["sequence", nth]).ngroup())
    else:
        first, *others = sorted(tables, key=lambda rank: (-len(tables[rank]), rank))
        found = {rank: of for rank in others if (of := _pair(tables[first], tables[rank])) is not None}
        by = "coincidence" if any(of.by_votes for of in found.values()) else "order"
        notes += [f"the collectives of rank {rank} fit those of no other rank." for rank in others if rank not in found]
        if doubtful := [rank for rank, of in found.items() if of.ambiguous]:
            notes.append(f"which collective is which fits several ways nearly as well ({ranks_text(doubtful)}).")
        parts = (tables[rank].iloc[of.other].assign(collective=of.reference) for rank, of in found.items())
        whole = pd.concat([tables[first].assign(collective=np.arange(len(tables[first]))), *parts])
    # All ranks must say the same of it.
    each = whole.groupby("collective")
    if different := int((each["kind"].nunique() > 1).sum()):
        notes.append(f"collectives of different kinds on different ranks were left out: {different:,}.")
    whole = whole[(each["kind"].transform("nunique") == 1) & (each["rank"].transform("nunique") > 1)]
    return whole.assign(collective=whole.groupby("collective").ngroup()), by, notes


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
    # Numbers that are equal where kind and size are.
    both = pd.concat([reference[["kind", "bytes"]], other[["kind", "bytes"]]]).groupby(["kind", "bytes"], sort=False)
    signs: list[Int] = np.split(np.asarray(both.ngroup(), np.int64), [len(reference)])
    sure = _SURE_NS[str(reference["where"].iloc[0])]
    usual = np.median(np.diff(ends[0])) if len(ends[0]) > 1 else 0
    shifted = _by_order(ends, signs, sure)
    if shifted is not None:
        close = shifted.spread_ns <= max(_END_SPREAD_NS, sure, int(_END_SPREAD_SHARE * usual))
        if close or _overlap(reference, other, shifted):
            return shifted
    # First what coincides as closely as ends do: in regular steps many more do so roughly, one step apart.
    return _by_coincidence(ends, signs, sure) or _by_coincidence(ends, signs, _COINCIDING * sure)


def _overlap(reference: pd.DataFrame, other: pd.DataFrame, pairs: _Pairs) -> bool:
    """Whether two ranks have as many collectives, and each began on one before it ended on the other."""
    if not len(reference) == len(other) == len(pairs.reference):
        return False
    (s, e), (t, f) = ((table["start_ns"].to_numpy(), table["end_ns"].to_numpy()) for table in (reference, other))
    apart = int(np.median(e - f))
    return bool(np.mean((t + apart <= e) & (s <= f + apart)) >= 1 - _END_SPREAD_SHARE)


def _by_order(ends: list[Int], signs: list[Int], sure: int) -> _Pairs | None:
    """Match by order: try shifts of one against the other, and take the one that lets the ends fit best."""
    n, m = len(ends[0]), len(ends[1])
    tried: dict[int, _Pairs] = {}
    for shift in sorted(range(-min(m - 1, _MOST_LAG), min(n - 1, _MOST_LAG) + 1), key=abs):
        # reference[i + shift] is other[i]
        at = np.arange(max(0, -shift), min(m, n - shift))
        same = signs[0][at + shift] == signs[1][at]
        all_of_both, kept = shift == 0 and n == m, at[same]
        # Two points fit any line: a shift that leaves so few says nothing, but for the one that leaves all.
        if len(at) >= max(min(n, m) / 2, 1) and same.mean() >= 0.95 and (len(kept) > 3 or all_of_both):
            apart = ends[0][kept + shift] - ends[1][kept]
            tried[shift] = _Pairs(kept + shift, kept, _spread(apart, ends[1][kept]))
            if all_of_both and len(kept) > 2 and tried[0].spread_ns <= sure:
                break
    if not tried:
        return None
    best = min(tried, key=lambda shift: (tried[shift].spread_ns, abs(shift)))
    found, order = tried.pop(best), tried.get(0)
    if n == m and order is not None and order.spread_ns <= _SHIFT_GAIN * found.spread_ns + sure:
        return order
    found.ambiguous = best != 0 and any(other.spread_ns < 2 * found.spread_ns for other in tried.values())
    return found


def _by_coincidence(ends: list[Int], signs: list[Int], close_ns: int) -> _Pairs | None:
    """Match by ends that coincide: the offset of clocks at which most of them do."""
    sides = [
        pd.DataFrame({name: np.arange(len(end)), "end": end, "sign": sign})
        for name, end, sign in zip(("reference", "other"), ends, signs, strict=True)
    ]
    same = signs[0][:_MOST_VOTES, None] == signs[1][None, :_MOST_VOTES]
    apart = np.sort((ends[0][:_MOST_VOTES, None] - ends[1][None, :_MOST_VOTES])[same])
    if not len(apart):
        return None
    # The window that holds most differences; a collective has one partner, so pairs are counted twice at worst.
    count = np.searchsorted(apart, apart + close_ns, side="right") - np.arange(len(apart))
    at = int(np.argmax(count))
    sides[1]["end"] += int(np.median(apart[at : at + count[at]]))
    first, second = (side.sort_values("end", kind="stable") for side in sides)
    # Each with the nearest that is close enough; of several that are near to one, the first.
    pairs = pd.merge_asof(second, first, on="end", by="sign", tolerance=close_ns, direction="nearest").dropna()
    pairs = pairs.sort_values("other").drop_duplicates("reference").sort_values("reference")
    if len(pairs) < max(3, _LEAST_MATCHED * min(map(len, ends))):
        return None
    one, two = (pairs[name].to_numpy(np.int64) for name in ("reference", "other"))
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
    ranks: Iterable[int],
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
    ranks : iterable of int
        All ranks, also those of which nothing was matched.
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
    telling = matched.arrivals[matched.arrivals["kind"].isin(SYNCHRONIZING)]
    # Below, a rank is its position among the names.
    ends = telling[["collective", "end_ns"]].assign(rank=np.searchsorted(names, telling["rank"]))
    middle, count = (
        ends.groupby("rank")["end_ns"].agg(["median", "size"]).reindex(range(len(names)), fill_value=0).to_numpy().T
    )
    offset, island = _islands(ends, len(names))
    offset, drift = _settled(ends, offset, middle, island)
    rest = _residuals(ends, offset, drift, middle)
    several = ends.groupby("collective")["rank"].transform("size").groupby(ends["rank"]).mean()
    # The moment is taken from the ends themselves, so they lie closer to it than to the true one.
    spread = rest.groupby(ends["rank"]).agg(_deviation) / np.sqrt(1 - 1 / several)
    spread = spread.reindex(range(len(names))).to_numpy(np.float64)
    error = _MEDIAN_ERROR * spread / np.sqrt(np.maximum(count, 1))
    if clock is not None:
        one = [clock[name] for name in names]
        offset, drift = (
            pd.Series(of).groupby(one, sort=False).transform("median").to_numpy() for of in (offset, drift)
        )
    # All against the island, which is called by its lowest rank.
    offset, drift = np.rint(offset - offset[island]).astype(np.int64), drift - drift[island]
    if t0_ns is not None:
        start = np.array([t0_ns[name] for name in names], np.int64)
        # As the sources' clocks have it, which may lie decades apart.
        by_source = start[island] - start
        sure = np.abs(offset - by_source) <= 2 * np.nan_to_num(np.hypot(error, error[island]))
        offset = np.where((drift == 0) & sure, by_source, offset)
    clocks = {
        "rank": names,
        "island": island,
        "offset_ns": offset,
        "drift_ppm": drift * 1e6,
        "middle_ns": np.rint(middle).astype(np.int64),
        "spread_ns": spread,
        "error_ns": error,
        "matched": count.astype(np.int64),
    }
    return Alignment(pd.DataFrame(clocks))


def _islands(ends: pd.DataFrame, ranks: int) -> tuple[Float, Int]:
    """First offsets, along collectives that ranks share; and of each rank the lowest that these tie it to."""
    offset, island = np.zeros(ranks), np.full(ranks, -1, np.int64)
    for first in range(ranks):
        waiting = [first] if island[first] < 0 else []
        island[waiting] = first
        while waiting and (island < 0).any():
            one = waiting.pop(0)
            here = ends[ends["rank"] == one].set_index("collective")["end_ns"]
            fresh = ends[island[ends["rank"]] < 0]
            apart = (fresh["end_ns"] - fresh["collective"].map(here)).groupby(fresh["rank"]).median().dropna()
            island[apart.index], offset[apart.index] = first, offset[one] + apart.to_numpy()
            waiting += apart.index.tolist()
    return offset, island


def _settled(ends: pd.DataFrame, offset: Float, middle: Float, island: Int) -> tuple[Float, Float]:
    """Offsets (at each rank's `middle`) and drifts at which nothing moves any more."""
    drift = np.zeros(len(offset))
    offset = _offsets(ends, offset, drift, middle)
    for rank, rest in _residuals(ends, offset, drift, middle).groupby(ends["rank"]):
        at = (ends.loc[rest.index, "end_ns"] - middle[rank]).to_numpy()
        slope = _slope(at, rest.to_numpy()) if len(rest) >= _ENOUGH_FOR_DRIFT else 0.0
        if slope and _deviation(rest - slope * at) <= _DRIFT_GAIN * _deviation(rest):
            drift[rank] = slope
    # The lowest rank of an island has the clock that all are put on.
    drift -= drift[island]
    return _offsets(ends, offset, drift, middle), drift


def _offsets(ends: pd.DataFrame, offset: Float, drift: Float, middle: Float) -> Float:
    for _ in range(_ROUNDS):
        rest = _residuals(ends, offset, drift, middle)
        step = rest.groupby(ends["rank"]).median().reindex(range(len(offset)), fill_value=0).to_numpy()
        offset = offset + step
        if np.abs(step).max() < 0.5:
            break
    return offset


def _residuals(ends: pd.DataFrame, offset: Float, drift: Float, middle: Float) -> pd.Series:
    """What each end differs from the collective's moment, the median over its ranks."""
    rank, end = ends["rank"].to_numpy(), ends["end_ns"]
    end = end - offset[rank] - drift[rank] * (end - middle[rank])
    return end - end.groupby(ends["collective"]).transform("median")  # type: ignore[no-any-return]


def _deviation(values: pd.Series) -> float:
    return float(_MAD_TO_SIGMA * np.median(np.abs(values - np.median(values))))


# ---------------------------------------------------------------- devices of one trace


class Meetings:
    """Collectives that several devices of a trace take part in.

    A collective can do its work only when the last device has arrived; until then the others wait in it.

    Parameters
    ----------
    trace : Trace

    Attributes
    ----------
    devices : list of int
        Those with collectives.
    met : DataFrame
        A row for each device in each collective: ``device, start_ns, end_ns, kind``, ``collective`` (its number),
        ``until_ns`` (when the last device arrived).
    matched : int
        Collectives that were found on several devices.
    """

    def __init__(self, trace: Trace) -> None:
        found = communication.collectives(trace)
        found = found[found["where"] == "GPU"]
        self.devices: list[int] = found["device"].unique().tolist()
        met = match(found.assign(rank=found["device"])).arrivals
        by = met.groupby("collective")
        arrived, done = by["start_ns"].transform("max"), by["end_ns"].transform("min")
        # One that ends somewhere before all had arrived is not one collective.
        possible = (arrived < done).groupby(met["collective"]).transform("all")
        self.met: pd.DataFrame = met.assign(until_ns=arrived)[possible]
        self.matched = int(self.met["collective"].nunique())

    def waiting(self, device: int) -> pd.DataFrame:
        """The time from a device's arrival to that of the last.

        Parameters
        ----------
        device : int

        Returns
        -------
        DataFrame
            ``device, start_ns, kind, end_ns``.
        """
        mine = self.met.loc[self.met["device"] == device, ["device", "start_ns", "kind", "until_ns"]]
        return mine.rename(columns={"until_ns": "end_ns"})

    def last(self, device: int) -> int:
        """How often a device was the last to arrive.

        Parameters
        ----------
        device : int
        """
        return int(((self.met["device"] == device) & (self.met["start_ns"] == self.met["until_ns"])).sum())
