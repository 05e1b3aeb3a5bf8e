"""Which blocks and segments a caching allocator held, from when to when, and how large they were.

A snapshot holds the state at its end and the last events before it. Lifetimes agree with that end, also where the ring
buffer of events dropped its beginning. Events carry requested sizes only. The size of a block is known if the block is
still there at the end. The sizes of the others follow from the allocator's rules (c10/cuda/CUDACachingAllocator.cpp):
sizes are rounded up, and a block above 1 MiB keeps a remainder of at most 1 MiB instead of splitting it off, so it
ends where the next block or the end of the segment was at that time. For a block older than the first event the next
block may be unknown; its remainder is then left out.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.trace.model import memoised
from nsightkit.trace.snapshot import Snapshot

# c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize, kSmallSize.
_MIN_BLOCK_BYTES = 512
_SMALL_BYTES = 1_048_576
#: A missing address or distance.
_BEYOND_ALL = 1 << 62
_Ints = npt.NDArray[np.int64]


@memoised
def events_of(snapshot: Snapshot, device: int) -> pd.DataFrame:
    """Give the events of a device, numbered from 0."""
    return snapshot.events[snapshot.events["device"] == device].reset_index(drop=True)


def segments_of(snapshot: Snapshot, device: int) -> pd.DataFrame:
    """Give the segments of a device at the end."""
    return snapshot.segments[snapshot.segments["device"] == device]


def total_by_event(count: int, blocks: pd.DataFrame, amount: str, until: str) -> _Ints:
    """Sum the column `amount` of the blocks that are there after each of `count` events.

    A block is there from the event in its column ``first`` until the event in its column `until`, which removes it.
    The result starts with the state before the first event.
    """
    # Place 0 is before the first event (-1). The last place is of what no event removes, and is cut off.
    change = np.zeros(count + 2, np.int64)
    np.add.at(change, blocks["first"] + 1, blocks[amount])
    np.add.at(change, blocks[until] + 1, -blocks[amount])
    return np.cumsum(change)[: count + 1]


# ---------------------------------------------------------------- lifetimes


def _lifetimes(events: pd.DataFrame, at_end: pd.DataFrame, column_of_action: dict[str, str]) -> pd.DataFrame:
    """Make the lifetimes of blocks or segments from the events at each address and what is there at the end.

    `column_of_action` gives the column of the result that holds events of an action: ``first``, ``free_requested`` or
    ``free_completed``. `at_end` has ``address, requested_bytes, size_bytes, stack, pending``. In the result, ``first``
    is the event of the allocation (-1: before the first event), ``free_requested`` and ``free_completed`` are events
    too (the number of events: never), and ``size_bytes`` is -1 if it is unknown.
    """
    count = len(events)
    column = events["action"].map(column_of_action).astype("category")
    recorded = events[["address"]].assign(
        stack=events["stack"].where(column == "first", -1),  # only the allocation's counts
        requested_bytes=events["size_bytes"],
        size_bytes=-1,
        pending=False,
        column=column,
        event=events.index,
    )
    # What is there at the end is taken as freed just after the last event.
    staying = at_end[["address", "stack", "requested_bytes", "size_bytes", "pending"]]
    rows = pd.concat([recorded.dropna(subset="column"), staying.assign(column="free_completed", event=count)])
    # By address, then time. A lifetime begins at an allocation, at a new address, and after a lifetime's end.
    rows = rows.sort_values("address", kind="stable", ignore_index=True)
    begins_lifetime = (rows["column"] == "first") | (rows["address"] != rows["address"].shift(fill_value=-1))
    begins_lifetime |= rows["column"].shift() == "free_completed"
    for name in ("first", "free_requested", "free_completed"):
        rows[name] = rows["event"].where(rows["column"] == name, -1).astype(np.int64)
    lifetimes = rows.drop(columns=["column", "event"]).groupby(begins_lifetime.cumsum())
    # At most one row of a lifetime knows a column; the others have -1. Only the requested bytes are in all rows, and
    # those of the first row are the allocation's.
    table = lifetimes.max().assign(requested_bytes=lifetimes["requested_bytes"].first())
    completed = table["free_completed"]
    table["free_completed"] = completed.where(completed >= 0, count)
    # Old blocks that are pending at the end, or only complete here, were freed before the first event (-1).
    was_freed = (table["first"] < 0) & ((completed < count) | table["pending"])
    requested = table["free_requested"]
    # A free without a recorded request counts as requested when it completes.
    table["free_requested"] = requested.where((requested >= 0) | was_freed, table["free_completed"])
    return table.sort_values(["first", "address"], kind="stable", ignore_index=True)


@memoised
def _segment_lifetimes(snapshot: Snapshot, device: int) -> pd.DataFrame:
    """List the lifetimes of ordinary segments, with the address of their ``end``; expandable ones are left out.

    ``requested_bytes`` is the length of a segment; the other columns are those of :func:`_lifetimes`.
    """
    segments = segments_of(snapshot, device)
    segments = segments[~segments["expandable"]]
    # To `_lifetimes` a segment is a block that was asked for at its full length; its size needs no rounding up.
    at_end = segments.assign(requested_bytes=segments["total_bytes"], size_bytes=-1, stack=-1, pending=False)
    column_of_action = {"segment_alloc": "first", "segment_free": "free_completed"}
    table = _lifetimes(events_of(snapshot, device), at_end, column_of_action)
    return table.assign(end=table["address"] + table["requested_bytes"])


def held_blocks(snapshot: Snapshot, device: int) -> pd.DataFrame:
    """List the blocks that were ever in use, in order of their beginning, then of address.

    Columns: ``address, requested_bytes, size_bytes, stack, first, free_requested, free_completed``.
    """
    blocks = snapshot.blocks
    is_held = (blocks["device"] == device) & (blocks["state"] != "inactive")
    at_end = blocks[is_held].drop_duplicates("address")
    at_end = at_end.assign(pending=at_end["state"] == "active_pending_free")
    column_of_action = {"alloc": "first", "free_requested": "free_requested"}
    column_of_action |= dict.fromkeys(("free_completed", "free"), "free_completed")  # `free` is an old name of it
    table = _lifetimes(events_of(snapshot, device), at_end, column_of_action).drop(columns="pending")
    return _with_sizes(snapshot, device, table)


# ---------------------------------------------------------------- sizes


def _with_sizes(snapshot: Snapshot, device: int, table: pd.DataFrame) -> pd.DataFrame:
    """Fill in the sizes of blocks that are gone by the end: the requested bytes rounded up, and a remainder."""
    units = -(-table["requested_bytes"] // _MIN_BLOCK_BYTES)  # rounded up
    rounded_bytes = units.clip(lower=1) * _MIN_BLOCK_BYTES
    is_gone = table["size_bytes"] < 0
    table["size_bytes"] = table["size_bytes"].where(~is_gone, rounded_bytes)
    if _has_expandable(snapshot, device):
        return table  # expandable segments split off any remainder
    # Only a block above 1 MiB may keep a remainder, and so reach to the next block or to the end of its segment, which
    # holds no smaller blocks.
    large = table[rounded_bytes > _SMALL_BYTES]
    gone = large[is_gone[large.index]]
    segments = _segment_lifetimes(snapshot, device)
    to_block = _distance_to_boundary(large, gone)
    to_segment_end = _distance_to_boundary(segments.assign(address=segments["end"]), gone)
    remainder_bytes = np.minimum(to_block, to_segment_end)
    # A larger one was split off, or the next block is unknown.
    table.loc[gone.index, "size_bytes"] += np.where(remainder_bytes <= _SMALL_BYTES, remainder_bytes, 0)
    return table


def _distance_to_boundary(boundaries: pd.DataFrame, blocks: pd.DataFrame) -> _Ints:
    """Measure from the end of each block to the next boundary that was there when the block was allocated.

    A boundary has an ``address``, and is there from its event ``first`` to its event ``free_completed``. Those farther
    than 1 MiB are not looked for: the distance is then ``_BEYOND_ALL``.
    """
    boundaries = boundaries.sort_values(["address", "first"])
    gone_at = boundaries["free_completed"].to_numpy()
    addresses, place_of_boundary = np.unique(boundaries["address"], return_inverse=True)
    # One sorted number for a boundary's place among the addresses and its first event, to be searched.
    stride = gone_at.max(initial=0) + 2
    keys = place_of_boundary * stride + boundaries["first"].to_numpy()
    allocated_at = blocks["first"].to_numpy()
    block_end = (blocks["address"] + blocks["size_bytes"]).to_numpy()
    place = np.searchsorted(addresses, block_end)
    addresses = np.append(addresses, _BEYOND_ALL)
    distance = np.full(len(blocks), _BEYOND_ALL)
    # All blocks go from address to address, until a boundary is there or too far.
    searching = np.arange(len(blocks))
    while len(searching):
        gap = addresses[place[searching]] - block_end[searching]
        searching = searching[gap <= _SMALL_BYTES]
        # The last boundary at this address that began by then; it may have ended.
        row = np.searchsorted(keys, place[searching] * stride + allocated_at[searching], side="right") - 1
        is_same_address = (row >= 0) & (place_of_boundary[row] == place[searching])
        is_there = is_same_address & (gone_at[row] > allocated_at[searching])
        reached = searching[is_there]
        distance[reached] = addresses[place[reached]] - block_end[reached]
        searching = searching[~is_there]
        place[searching] += 1
    return distance


# ---------------------------------------------------------------- free space


def free_space(snapshot: Snapshot, device: int, event: int, live: pd.DataFrame) -> tuple[int, int | None]:
    """Measure the free space of ordinary segments after an event, when the blocks of `live` were active.

    Give the bytes of segments without live blocks, and those of the largest free block; None for the latter where a
    segment is expandable.
    """
    segments = _segment_lifetimes(snapshot, device)
    is_there = (segments["first"] <= event) & (event < segments["free_completed"])
    segments = segments[is_there]
    block_starts = np.sort(live["address"])
    # Empty: as many blocks start below the segment's end as below its start.
    blocks_before = np.searchsorted(block_starts, segments["address"])
    is_empty = np.searchsorted(block_starts, segments["end"]) == blocks_before
    releasable_bytes = int(segments["requested_bytes"][is_empty].sum())  # the segments' lengths
    if _has_expandable(snapshot, device):
        return releasable_bytes, None
    # Free space runs from a segment's start or a block's end to the next block's start or the segment's end. In order
    # of address the n-th start belongs to the n-th stop.
    starts = np.append(segments["address"], live["address"] + live["size_bytes"])
    stops = np.append(block_starts, segments["end"])
    free_bytes = np.sort(stops) - np.sort(starts)
    return releasable_bytes, int(free_bytes.max(initial=0))


def _has_expandable(snapshot: Snapshot, device: int) -> bool:
    """Whether a device has or had expandable segments, which grow and shrink page by page."""
    is_mapped = (events_of(snapshot, device)["action"] == "segment_map").any()
    return bool(is_mapped or segments_of(snapshot, device)["expandable"].any())
