"""Match the collectives of several ranks, and estimate how far apart the ranks' clocks are.

Each rank's trace has its own clock. All-reduce, all-gather, reduce-scatter, all-to-all and barrier end on all ranks at
nearly the same time. The median difference between the ends of matched collectives is therefore the offset of a clock.
A late arrival changes the start of a collective, but not this difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.ranks import collectives as communication
from nsightkit.trace.model import Trace

Int = npt.NDArray[np.int64]

#: Kinds of collectives that end on no rank before they began on all.
SYNCHRONIZING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")

#: How far the ends of one collective may lie apart: this much, or this share of the time from one to the next.
#: On a CPU, which may be busy, the operating system has to schedule threads first.
_SPREAD_NS = {"GPU": 50_000, "CPU": 10_000_000}
_SPREAD_SHARE = 0.1
#: This share of the ends must lie that close; the others may be delayed by something else.
_CLOSE_SHARE = 0.75
#: Where one capture began earlier than another: the most collectives that it may be ahead.
_MOST_SHIFT = 300
#: Fewer pairs of ends can lie close by chance.
_LEAST_PAIRS = 4
#: Median absolute deviation to standard deviation, for a normal distribution.
_MAD_TO_SIGMA = 1.4826

#: Columns that two ranks' rows of one collective have in common.
_GROUP_AND_KIND = ["where", "group", "ranks", "kind"]


def match_and_align(
    ranks: Mapping[int, pd.DataFrame], captures: Mapping[int, str] | None = None
) -> tuple[pd.DataFrame, pd.DataFrame, list[str]]:
    """Match the collectives of several ranks and put them on one clock.

    Parameters
    ----------
    ranks : mapping of int to DataFrame
        Each rank's :func:`nsightkit.analysis.ranks.collectives.collectives`.
    captures : mapping of int to str, optional
        The capture of each rank. Ranks of one capture have one clock.

    Returns
    -------
    arrivals : DataFrame
        See :func:`match`, with times on the clock of :func:`align`.
    clocks : DataFrame
        See :func:`align`.
    notes : list of str
        Collectives that were left out.
    """
    table = pd.concat([rows.assign(rank=rank) for rank, rows in ranks.items()])
    arrivals = match(table)
    clocks = align(arrivals, ranks, captures)
    notes = []
    if not _do_ends_agree(on_island_clock(arrivals, clocks)):
        # Sequence numbers are certain and have no limit; only a match by order can be wrong.
        is_numbered = arrivals["limit_ns"].isna()
        arrivals = arrivals[is_numbered]
        clocks = align(arrivals, ranks, captures)
        notes.append(
            "The traces do not number their collectives, whose ends do not fit one process group: they were left out. "
            "torch.profiler of PyTorch 2.4 or later records groups and numbers."
        )
    unmatched = len(table) - len(arrivals)
    if unmatched:
        notes.append(
            f"{unmatched:,} of {len(table):,} collectives have no match on another rank; sends and receives "
            "are never matched."
        )
    return on_island_clock(arrivals, clocks), clocks, notes


def match(collectives: pd.DataFrame) -> pd.DataFrame:
    """Match the collectives of several ranks.

    Process group and sequence number identify a collective where the traces have them. Otherwise the n-th of one rank
    is the n-th of another with the same kind, after the shift at which their ends fit best.

    Parameters
    ----------
    collectives : DataFrame
        Those of all ranks (:func:`nsightkit.analysis.ranks.collectives.collectives`), with the column ``rank``.

    Returns
    -------
    DataFrame
        The rows of collectives that two ranks or more have, with ``collective`` (a number), ``group_id`` (one for all
        kinds of a process group) and ``limit_ns`` (how far ends may lie apart; NA with sequence numbers).
    """
    table = collectives[collectives["kind"] != "send/recv"].sort_values(["rank", "start_ns"], kind="stable")
    numbered = table[table["sequence"] >= 0]
    # A coalesced collective may be several kernels with one number: `nth` counts them on each rank.
    nth = numbered.groupby([*_GROUP_AND_KIND, "sequence", "rank"]).cumcount()
    parts = [numbered.assign(nth=nth, limit_ns=np.nan)]
    for _, rows in table[table["sequence"] < 0].groupby(_GROUP_AND_KIND):
        parts.append(_number_by_order(rows))
    table = pd.concat(parts)
    # Numbered collectives differ by `sequence`; the others have sequence -1 and differ by `nth`.
    table["collective"] = table.groupby([*_GROUP_AND_KIND, "sequence", "nth"]).ngroup()
    table["group_id"] = table.groupby(["where", "group", "ranks"]).ngroup()
    is_shared = table.groupby("collective")["rank"].transform("nunique") > 1
    return table[is_shared].sort_values(["collective", "rank"], ignore_index=True)


def _number_by_order(rows: pd.DataFrame) -> pd.DataFrame:
    """Number the collectives of one kind and group that have no sequence numbers, in order of time.

    Adds ``nth``, a collective's number on the rank that has most, and ``limit_ns``; drops ranks that do not fit.
    """
    ends_of = {rank: end.to_numpy() for rank, end in rows.groupby("rank")["end_ns"]}
    reference_ends = max(ends_of.values(), key=len)
    interval_ns = 0
    if len(reference_ends) > 1:
        interval_ns = np.median(np.diff(reference_ends))
    limit_ns = max(_SPREAD_NS[rows["where"].iloc[0]], _SPREAD_SHARE * interval_ns)
    shifts = {rank: _collective_shift(reference_ends, ends, limit_ns) for rank, ends in ends_of.items()}
    # NaN for a rank without a shift, whose collectives cannot be matched.
    nth = rows.groupby("rank").cumcount() + rows["rank"].map(shifts)
    return rows.assign(nth=nth, limit_ns=limit_ns).dropna(subset="nth")


def _collective_shift(reference_ends: Int, ends: Int, limit_ns: float) -> int | None:
    """Count the collectives that the reference rank recorded before this rank's first; negative: the other way round.

    The arrays are the end times of one kind of collective on the two ranks, each on its own clock. At the right shift
    all pairs of ends are equally far apart, up to `limit_ns`. None if that is so at no shift.
    """
    best_shift = None
    tolerance_ns = limit_ns
    pairs_needed = max(_LEAST_PAIRS, len(ends) / 2)
    if len(reference_ends) == len(ends):
        # Two lists that are shorter than that may match as wholes.
        pairs_needed = min(pairs_needed, len(ends))
    # At most all but one of either rank's collectives lie before the other's first. Small shifts are tried first.
    lowest = max(1 - len(ends), -_MOST_SHIFT)
    highest = min(len(reference_ends) - 1, _MOST_SHIFT)
    for shift in sorted(range(lowest, highest + 1), key=abs):
        paired_reference = reference_ends[max(shift, 0) :]
        paired = ends[max(-shift, 0) :]
        pairs = min(len(paired_reference), len(paired))
        if pairs >= pairs_needed:
            difference_ns = paired_reference[:pairs] - paired[:pairs]
            spread_ns = float(np.quantile(np.abs(difference_ns - np.median(difference_ns)), _CLOSE_SHARE))
            if spread_ns <= tolerance_ns:
                best_shift = shift
                # Steps repeat, so a larger shift has to fit more than twice as well; none beats a perfect fit.
                tolerance_ns = spread_ns / 2 - 1
    return best_shift


def _do_ends_agree(arrivals: pd.DataFrame) -> bool:
    """Whether the ends of collectives that were matched by their order lie as close as they should, on aligned clocks.

    If they do not, the match is wrong. It is enough that most ends do (`_CLOSE_SHARE`): some may be delayed.
    """
    rows = arrivals[arrivals["limit_ns"].notna() & arrivals["kind"].isin(SYNCHRONIZING)]
    is_close = _residuals(rows).abs() <= rows["limit_ns"]
    return bool((is_close.groupby([rows["where"], rows["kind"]]).mean() >= _CLOSE_SHARE).all())


def _residuals(arrivals: pd.DataFrame) -> pd.Series:
    """How far each end lies from the median end of its collective, in ns."""
    median = arrivals.groupby("collective")["end_ns"].transform("median")
    return arrivals["end_ns"] - median


# ---------------------------------------------------------------- clocks


def align(arrivals: pd.DataFrame, ranks: Iterable[int], captures: Mapping[int, str] | None = None) -> pd.DataFrame:
    """Estimate the offset of each rank's clock by the ends of its collectives.

    Parameters
    ----------
    arrivals : DataFrame
        See :func:`match`.
    ranks : iterable of int
        All ranks, also those without matched collectives.
    captures : mapping of int to str, optional
        The capture of each rank. Ranks of one capture have one clock.

    Returns
    -------
    DataFrame
        By ``rank``: ``island`` (its lowest rank; collectives tie the ranks of an island together, and clocks of two
        islands cannot be compared), ``offset_ns`` (this clock minus the one of the island's lowest rank) and
        ``spread_ns`` (robust standard deviation of the ends on the aligned clocks; NaN without matched collectives).
    """
    ends = arrivals[arrivals["kind"].isin(SYNCHRONIZING)]
    clocks = pd.DataFrame({"island": -1, "offset_ns": 0}, pd.Index(sorted(ranks), name="rank"))
    for lowest_rank in clocks.index:
        # A rank without an island (-1) starts one.
        joining = pd.Index([lowest_rank] if clocks.loc[lowest_rank, "island"] < 0 else [])
        while len(joining):
            clocks.loc[joining, "island"] = lowest_rank
            # Each round takes in the ranks that share a collective with the island so far, until none joins.
            # NaN for a collective without a rank of the island.
            island = ends["rank"].map(clocks["island"])
            island_end = on_island_clock(ends[island == lowest_rank], clocks).groupby("collective")["end_ns"].median()
            difference_ns = (ends["end_ns"] - ends["collective"].map(island_end))[island < 0]
            offset = difference_ns.groupby(ends["rank"]).median().dropna().round().astype(np.int64)
            clocks.loc[offset.index, "offset_ns"] = offset
            joining = offset.index
    if captures is not None:
        # Ranks of one capture have one clock: all take the offset of the lowest of them.
        clocks["offset_ns"] = clocks.groupby(clocks.index.map(captures))["offset_ns"].transform("first")
    residual_ns = _residuals(on_island_clock(ends, clocks)).abs()
    clocks["spread_ns"] = _MAD_TO_SIGMA * residual_ns.groupby(ends["rank"]).median()
    return clocks


def on_island_clock(rows: pd.DataFrame, clocks: pd.DataFrame) -> pd.DataFrame:
    """Put ``start_ns`` and ``end_ns`` on the clock of the island's lowest rank.

    An island is a set of ranks that shared collectives tie together (:func:`align`).

    Parameters
    ----------
    rows : DataFrame
        With the column ``rank``.
    clocks : DataFrame
        See :func:`align`.

    Returns
    -------
    DataFrame
    """
    offset = rows["rank"].map(clocks["offset_ns"]).astype(np.int64)
    return rows.assign(start_ns=rows["start_ns"] - offset, end_ns=rows["end_ns"] - offset)


# ---------------------------------------------------------------- devices of one trace


class Meetings:
    """Collectives that several devices of a trace take part in.

    A collective starts its work when the last device has arrived; until then the others wait in it.

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
    """

    def __init__(self, trace: Trace) -> None:
        collectives = communication.collectives(trace)
        collectives = collectives[collectives["where"] == "GPU"]
        self.devices: list[int] = collectives["device"].unique().tolist()
        # The devices of a trace exchange data as the ranks of a job do: match them as if each were a rank.
        arrivals = match(collectives.assign(rank=collectives["device"]))
        by_collective = arrivals.groupby("collective")
        arrivals["until_ns"] = by_collective["start_ns"].transform("max")
        # Where one device is done before the last begins, none waited for it (a broadcast), or the match is wrong.
        is_simultaneous = arrivals["until_ns"] < by_collective["end_ns"].transform("min")
        self.met = arrivals[is_simultaneous]

    def waiting(self, device: int) -> pd.DataFrame:
        """Give the time from a device's arrival at each collective to the last device's arrival.

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
