"""Which collective of one rank is which of another, and how far apart the clocks of ranks are.

Every rank's trace has a clock of its own. What ties them together are collectives that no rank can leave before all
have arrived (all-reduce, all-gather, reduce-scatter, all-to-all, barrier): they end on all ranks at nearly the same
time. The median over many of them gives a clock's offset, whoever came late to some: that shows in their starts, not in
their ends.
"""

from __future__ import annotations

import dataclasses
import math
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

#: What ends of a collective surely differ by, and at most, on a GPU and where threads of a CPU must be scheduled first.
_SURE_NS = {"GPU": 20_000, "CPU": 2_000_000}
_SPREAD_NS = {"GPU": 50_000, "CPU": 2_000_000}
#: Or by this share of the usual distance between two of them.
_SPREAD_SHARE = 0.1
#: A group is left out if more than this share of its collectives is impossible.
_MOST_WRONG = 0.2
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
        clock = self.clocks.set_index("rank").loc[np.asarray(rank)]
        time = np.asarray(time_ns, np.int64)
        drift = clock["drift_ppm"].to_numpy() * 1e-6 * (time - clock["middle_ns"].to_numpy())
        return np.asarray(time - clock["offset_ns"].to_numpy() - np.rint(drift).astype(np.int64), np.int64)

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
        start = self.aligned(rows["rank"], rows["start_ns"])
        end = self.aligned(rows["rank"], rows["end_ns"])
        return rows.assign(start_ns=start, end_ns=end)


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
    wrong = sorted(_contradictory(matched, alignment))
    if not wrong:
        return matched, alignment
    groups = matched.groups.loc[wrong]
    note = f"Left out, since their collectives contradict each other: {', '.join(groups['name'])}."
    if groups["guessed"].any():
        note += " There are several process groups, which these traces do not name (torch.profiler's do)."
    kept = matched.arrivals[~matched.arrivals["group"].isin(wrong)].reset_index(drop=True)
    matched = Matched(kept, matched.groups, [*matched.notes, note])
    return matched, align(matched, ranks, t0_ns, clock)


def _contradictory(matched: Matched, alignment: Alignment) -> set[int]:
    """Groups whose collectives cannot be the same ones on all ranks."""
    rows = alignment.placed(matched.arrivals[matched.arrivals["kind"].isin(SYNCHRONIZING)])
    by = rows.groupby("collective")
    too_early = by["start_ns"].transform("max") > by["end_ns"].transform("min") + rows["where"].map(_SPREAD_NS)
    share = too_early.groupby(rows["group"]).mean()
    wrong = set(share.index[share > _MOST_WRONG])
    # Of guesses that contradict each other, which one is wrong cannot be known.
    guesses = rows[matched.groups["guessed"].to_numpy(bool)[rows["group"]]]
    doubted = guesses["rank"][guesses["group"].isin(wrong)]
    return wrong | set(guesses["group"][guesses["rank"].isin(doubted)])


def ranks_text(ranks: Sequence[int]) -> str:
    """Name some ranks, the first few of many.

    Parameters
    ----------
    ranks : sequence of int
    """
    plural = "s" if len(ranks) > 1 else ""
    more = "…" if len(ranks) > 8 else ""
    return f"rank{plural} {', '.join(map(str, ranks[:8]))}{more}"


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
    notes = []
    table = collectives.assign(row=collectives.index).sort_values("rank", kind="stable", ignore_index=True)
    table = table[table["kind"] != "send/recv"]
    if len(table) < len(collectives):
        count = len(collectives) - len(table)
        notes.append(f"Sends and receives were left out ({count:,}): whose partner is whose is not recorded.")
    named = list(_named_groups(table[table["group"] != ""]))
    guessed = list(_guessed_groups(table[table["group"] == ""]))
    shared = [group for group in guessed if group.rows["rank"].nunique() > 1]
    if collectives["rank"].nunique() > 2 and len(shared) > 1:
        notes.append("The traces name no process groups: streams whose collectives end together are taken for one.")
    parts = [table[:0].assign(collective=0, group=0)]
    groups = []
    for number, group in enumerate(named + guessed):
        rows, matched_by, remarks = _matched_group(group.rows)
        notes += [f"{group.name}: {remark}" for remark in remarks]
        parts.append(rows.assign(group=number))
        seen = group.rows["rank"].nunique()
        groups.append((number, group.name, group.where, seen, group.size, matched_by, number >= len(named)))
    arrivals = pd.concat(parts)
    # So far each group's collectives are numbered from 0.
    arrivals = arrivals.assign(collective=arrivals.groupby(["group", "collective"]).ngroup())
    arrivals = arrivals.sort_values(["collective", "rank"], ignore_index=True)
    if len(arrivals) < len(table):
        count = len(table) - len(arrivals)
        notes.append(f"Collectives that match none of another rank were left out: {count:,}.")
    return Matched(arrivals, pd.DataFrame(groups, columns=_GROUP_COLUMNS), notes)


_GROUP_COLUMNS = ["group", "name", "where", "ranks", "group_size", "matched_by", "guessed"]


@dataclasses.dataclass
class _Group:
    """Collectives of ranks that run them together; ``size`` is -1 where the trace does not say it."""

    name: str
    where: str
    size: int
    rows: pd.DataFrame


def _named_groups(collectives: pd.DataFrame) -> Iterator[_Group]:
    """Process groups that the traces name."""
    groups = collectives.groupby(["where", "group", "ranks"], sort=False)
    of_name = groups.size().groupby("group").size()
    key: Any
    for key, rows in groups:
        where, group, ranks = key
        name = f"process group {group}"
        if of_name[group] > 1 and ranks:
            name += f" of ranks {ranks}"
        yield _Group(name, where, int(rows["group_size"].max()), rows)


def _guessed_groups(collectives: pd.DataFrame) -> Iterator[_Group]:
    """Streams (or the CPU) of ranks on which the same collectives ran, where the traces name no groups."""
    lanes: Any = dict(list(collectives.groupby(["rank", "where", "device", "stream"])))
    while lanes:
        first = next(iter(lanes))
        rank, where, _, stream = first
        reference = lanes.pop(first)
        partners = _partners(first, reference, lanes)
        name = "CPU" if where == "CPU" else f"stream {stream}"
        if where == "GPU" and any(lane[3] != stream for lane in partners):
            name += f" of rank {rank}"
        yield _Group(name, where, -1, pd.concat([reference, *(lanes.pop(lane) for lane in partners)]))


def _partners(first: Any, reference: pd.DataFrame, lanes: Mapping[Any, pd.DataFrame]) -> list[Any]:
    """The lane of each other rank that fits best."""
    best: dict[int, Any] = {}
    spread_ns: dict[int, float] = {}
    for lane, rows in lanes.items():
        rank, where = lane[:2]
        if rank == first[0] or where != first[1]:
            continue
        pairs = _pair(reference, rows)
        if pairs is not None and pairs.spread_ns < spread_ns.get(rank, math.inf):
            best[rank], spread_ns[rank] = lane, pairs.spread_ns
    return list(best.values())


def _matched_group(collectives: pd.DataFrame) -> tuple[pd.DataFrame, str, list[str]]:
    """Number the collectives of one group's ranks; also say by what, and what was left out."""
    notes: list[str]
    if collectives["rank"].nunique() > 1 and (collectives["sequence"] >= 0).all():
        # A coalesced collective may be several kernels with one number.
        nth = collectives.groupby(["rank", "sequence"]).cumcount()
        rows = collectives.assign(collective=collectives.groupby(["sequence", nth]).ngroup())
        matched_by, notes = "sequence", []
    else:
        rows, matched_by, notes = _matched_by_ends(collectives)
    # All ranks must say the same of it.
    by = rows.groupby("collective")
    different = int((by["kind"].nunique() > 1).sum())
    if different:
        notes.append(f"collectives of different kinds on different ranks were left out: {different:,}.")
    rows = rows[(by["kind"].transform("nunique") == 1) & (by["rank"].transform("nunique") > 1)]
    return rows.assign(collective=rows.groupby("collective").ngroup()), matched_by, notes


def _matched_by_ends(collectives: pd.DataFrame) -> tuple[pd.DataFrame, str, list[str]]:
    """Number them as the rank with the most does, by which of the others' are the same."""
    by_rank: Any = collectives.groupby("rank")
    tables: dict[int, pd.DataFrame] = dict(list(by_rank))
    first, *others = sorted(tables, key=lambda rank: (-len(tables[rank]), rank))
    parts = [tables[first].assign(collective=np.arange(len(tables[first])))]
    matched_by, notes = "order", []
    for rank in others:
        pairs = _pair(tables[first], tables[rank])
        if pairs is None:
            notes.append(f"the collectives of rank {rank} fit those of no other rank.")
            continue
        if pairs.coincide:
            matched_by = "coincidence"
        parts.append(tables[rank].iloc[pairs.other].assign(collective=pairs.reference))
    return pd.concat(parts), matched_by, notes


@dataclasses.dataclass
class _Pairs:
    """Positions of the same collectives in two ranks' tables."""

    reference: Int
    other: Int
    spread_ns: float
    coincide: bool = False


def _pair(reference: pd.DataFrame, other: pd.DataFrame) -> _Pairs | None:
    """Find which rows of two ranks are the same collectives, without sequence numbers; None if they are not."""
    both = pd.concat([reference, other], ignore_index=True)
    # Numbers that are equal where kind and size are.
    both["sign"] = both.groupby(["kind", "bytes"], sort=False).ngroup()
    lanes = both[: len(reference)], both[len(reference) :].reset_index(drop=True)
    where = str(reference["where"].iloc[0])
    sure_ns = _SURE_NS[where]
    pairs = _by_order(*lanes, sure_ns)
    usual_ns = reference["end_ns"].diff().median()
    if pairs is not None and pairs.spread_ns <= np.fmax(_SPREAD_NS[where], _SPREAD_SHARE * usual_ns):
        return pairs
    # First what coincides as closely as ends do: in regular steps many more do so roughly, one step apart.
    return _by_coincidence(*lanes, sure_ns) or _by_coincidence(*lanes, _COINCIDING * sure_ns)


def _by_order(reference: pd.DataFrame, other: pd.DataFrame, sure_ns: int) -> _Pairs | None:
    """Match by order: try shifts of one against the other, and take the one that lets the ends fit best."""
    earliest, latest = -min(len(other) - 1, _MOST_LAG), min(len(reference) - 1, _MOST_LAG)
    best = None
    for shift in sorted(range(earliest, latest + 1), key=abs):
        pairs = _shifted(reference, other, shift)
        if pairs is None or (best is not None and pairs.spread_ns >= best.spread_ns):
            continue
        best = pairs
        if len(reference) == len(other) == len(pairs.other) > 2 and pairs.spread_ns <= sure_ns:
            break
    return best


def _shifted(reference: pd.DataFrame, other: pd.DataFrame, shift: int) -> _Pairs | None:
    """Take ``reference[i + shift]`` for ``other[i]``, unless these are too few, or not of one kind and size."""
    n, m = len(reference), len(other)
    at = np.arange(max(0, -shift), min(m, n - shift))
    # Two points fit any line: a shift that leaves so few says nothing, but for the one that leaves all.
    if len(at) <= 3 and not len(at) == n == m:
        return None
    if len(at) < min(n, m) / 2:
        return None
    if (reference["sign"].to_numpy()[at + shift] != other["sign"].to_numpy()[at]).any():
        return None
    return _Pairs(at + shift, at, _spread(reference, at + shift, other, at))


def _by_coincidence(reference: pd.DataFrame, other: pd.DataFrame, close_ns: int) -> _Pairs | None:
    """Match by ends that coincide: the offset of clocks at which most of them do."""
    columns = ["end_ns", "sign"]
    first, second = (lane[columns].assign(row=np.arange(len(lane))) for lane in (reference, other))
    votes = first[:_MOST_VOTES].merge(second[:_MOST_VOTES], on="sign")
    apart = np.sort(votes["end_ns_x"] - votes["end_ns_y"])
    if not len(apart):
        return None
    # The window that holds most differences; a collective has one partner, so pairs are counted twice at worst.
    count = np.searchsorted(apart, apart + close_ns, side="right") - np.arange(len(apart))
    at = int(np.argmax(count))
    second["end_ns"] += int(np.median(apart[at : at + count[at]]))
    first, second = (lane.sort_values("end_ns", kind="stable") for lane in (first, second))
    # Each with the nearest that is close enough; of several that are near to one, the first.
    pairs = pd.merge_asof(second, first, on="end_ns", by="sign", tolerance=close_ns, direction="nearest").dropna()
    pairs = pairs.sort_values("row_x").drop_duplicates("row_y").sort_values("row_y")
    if len(pairs) < max(3, _LEAST_MATCHED * min(len(reference), len(other))):
        return None
    rows, partners = (pairs[column].to_numpy(np.int64) for column in ("row_y", "row_x"))
    return _Pairs(rows, partners, _spread(reference, rows, other, partners), coincide=True)


def _spread(reference: pd.DataFrame, rows: Int, other: pd.DataFrame, partners: Int) -> float:
    """How far nine in ten differences of ends lie from a straight line through them, the drift of a clock."""
    at = other["end_ns"].to_numpy()[partners]
    apart = reference["end_ns"].to_numpy()[rows] - at
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
    if not run:
        return 0.0
    return float(np.median(y[last]) - np.median(y[first])) / run


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
    positions = range(len(names))
    arrivals = matched.arrivals[matched.arrivals["kind"].isin(SYNCHRONIZING)]
    # Below, a rank is its position among the names.
    ends = arrivals[["collective", "end_ns"]].assign(rank=np.searchsorted(names, arrivals["rank"]))
    by_rank = ends.groupby("rank")["end_ns"]
    middle = by_rank.median().reindex(positions, fill_value=0).to_numpy(np.float64)
    count = by_rank.size().reindex(positions, fill_value=0).to_numpy(np.int64)
    offset, island = _islands(ends, len(names))
    offset, drift = _settled(ends, offset, middle, island)
    spread = _spread_of_ranks(ends, _residuals(ends, offset, drift, middle)).reindex(positions).to_numpy(np.float64)
    error = _MEDIAN_ERROR * spread / np.sqrt(np.maximum(count, 1))
    if clock is not None:
        of_rank = [clock[name] for name in names]
        offset = pd.Series(offset).groupby(of_rank, sort=False).transform("median").to_numpy()
        drift = pd.Series(drift).groupby(of_rank, sort=False).transform("median").to_numpy()
    # All against the island, which is called by its lowest rank.
    offset = np.rint(offset - offset[island]).astype(np.int64)
    drift = drift - drift[island]
    if t0_ns is not None:
        start = np.array([t0_ns[name] for name in names], np.int64)
        # As the sources' clocks have it, which may lie decades apart.
        by_source = start[island] - start
        sure = np.abs(offset - by_source) <= 2 * np.nan_to_num(np.hypot(error, error[island]))
        offset = np.where((drift == 0) & sure, by_source, offset)
    clocks = pd.DataFrame({"rank": names, "island": island, "offset_ns": offset, "drift_ppm": drift * 1e6})
    clocks["middle_ns"] = np.rint(middle).astype(np.int64)
    return Alignment(clocks.assign(spread_ns=spread, error_ns=error, matched=count))


def _spread_of_ranks(ends: pd.DataFrame, rest: pd.Series) -> pd.Series:
    by_rank = rest.groupby(ends["rank"])
    several = ends.groupby("collective")["rank"].transform("size").groupby(ends["rank"]).mean()
    # The moment is taken from the ends themselves, so they lie closer to it than to the true one.
    spread: pd.Series = by_rank.agg(_deviation) / np.sqrt(1 - 1 / several)
    return spread


def _islands(ends: pd.DataFrame, ranks: int) -> tuple[Float, Int]:
    """First offsets, along collectives that ranks share; and of each rank the lowest that these tie it to."""
    offset = np.zeros(ranks)
    island = np.full(ranks, -1, np.int64)
    for first in range(ranks):
        waiting = []
        if island[first] < 0:
            island[first] = first
            waiting.append(first)
        while waiting and (island < 0).any():
            rank = waiting.pop(0)
            here = ends[ends["rank"] == rank].set_index("collective")["end_ns"]
            fresh = ends[island[ends["rank"]] < 0]
            apart = (fresh["end_ns"] - fresh["collective"].map(here)).groupby(fresh["rank"]).median().dropna()
            island[apart.index] = first
            offset[apart.index] = offset[rank] + apart
            waiting += apart.index.tolist()
    return offset, island


def _settled(ends: pd.DataFrame, offset: Float, middle: Float, island: Int) -> tuple[Float, Float]:
    """Offsets (at each rank's `middle`) and drifts at which nothing moves any more."""
    drift = np.zeros(len(offset))
    offset = _offsets(ends, offset, drift, middle)
    for rank, rest in _residuals(ends, offset, drift, middle).groupby(ends["rank"]):
        if len(rest) < _ENOUGH_FOR_DRIFT:
            continue
        at = ends.loc[rest.index, "end_ns"].to_numpy() - middle[rank]
        slope = _slope(at, rest.to_numpy())
        if slope and _deviation(rest - slope * at) <= _DRIFT_GAIN * _deviation(rest):
            drift[rank] = slope
    # The lowest rank of an island has the clock that all are put on.
    drift -= drift[island]
    return _offsets(ends, offset, drift, middle), drift


def _offsets(ends: pd.DataFrame, offset: Float, drift: Float, middle: Float) -> Float:
    for _ in range(_ROUNDS):
        rest = _residuals(ends, offset, drift, middle).groupby(ends["rank"])
        step = rest.median().reindex(range(len(offset)), fill_value=0).to_numpy()
        offset = offset + step
        if np.abs(step).max() < 0.5:
            break
    return offset


def _residuals(ends: pd.DataFrame, offset: Float, drift: Float, middle: Float) -> pd.Series:
    """What each end differs from the collective's moment, the median over its ranks."""
    rank = ends["rank"].to_numpy()
    end = ends["end_ns"] - offset[rank] - drift[rank] * (ends["end_ns"] - middle[rank])
    residuals: pd.Series = end - end.groupby(ends["collective"]).transform("median")
    return residuals


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
        Collectives that occurred on several devices.
    """

    def __init__(self, trace: Trace) -> None:
        collectives = communication.collectives(trace)
        collectives = collectives[collectives["where"] == "GPU"]
        self.devices: list[int] = collectives["device"].unique().tolist()
        self.met: pd.DataFrame = _met(collectives)
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
        rows = self.met.loc[self.met["device"] == device, ["device", "start_ns", "kind", "until_ns"]]
        return rows.rename(columns={"until_ns": "end_ns"})

    def last(self, device: int) -> int:
        """How often a device was the last to arrive.

        Parameters
        ----------
        device : int
        """
        rows = self.met[self.met["device"] == device]
        return int((rows["start_ns"] == rows["until_ns"]).sum())


def _met(collectives: pd.DataFrame) -> pd.DataFrame:
    arrivals = match(collectives.assign(rank=collectives["device"])).arrivals
    by = arrivals.groupby("collective")
    arrived = by["start_ns"].transform("max")
    # One that ends somewhere before all had arrived is not one collective.
    possible = (arrived < by["end_ns"].transform("min")).groupby(arrivals["collective"]).transform("all")
    return arrivals.assign(until_ns=arrived)[possible]
