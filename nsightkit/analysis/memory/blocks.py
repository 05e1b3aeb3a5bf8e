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

from nsightkit.analysis.core.kept import kept
from nsightkit.trace.snapshot import Snapshot

__all__ = ["events_of", "free_space", "held_blocks", "segments_of", "total_by_event"]

# c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize, kSmallSize.
_MIN_BLOCK_BYTES = 512
_SMALL_BYTES = 1 << 20
_FAR = 1 << 62
_Ints = npt.NDArray[np.int64]


@kept
def events_of(snapshot: Snapshot, device: int) -> pd.DataFrame:
    """Give the events of a device, numbered from 0."""
    return snapshot.events[snapshot.events["device"] == device].reset_index(drop=True)


def segments_of(snapshot: Snapshot, device: int) -> pd.DataFrame:
    """Give the segments of a device at the end."""
    return snapshot.segments[snapshot.segments["device"] == device]


def total_by_event(count: int, blocks: pd.DataFrame, amount: str, last: str) -> _Ints:
    """Sum the amounts of what is there from ``first`` (inclusive) to `last` (exclusive), at -1, 0, … count - 1."""
    change = np.zeros(count + 2, np.int64)
    np.add.at(change, blocks["first"] + 1, blocks[amount])
    np.add.at(change, blocks[last] + 1, -blocks[amount])
    return np.cumsum(change)[: count + 1]


# ---------------------------------------------------------------- lifetimes


def _lifetimes(events: pd.DataFrame, at_end: pd.DataFrame, phase_of: dict[str, str]) -> pd.DataFrame:
    """Pair the events at each address; what is there at the end is taken as freed just after the last event.

    `at_end` has ``address, requested_bytes, size_bytes, stack, pending``. The result has ``first``, the event
    of the allocation (-1: before the first event), ``free_requested`` and ``free_completed`` (the number of events:
    never), and a ``size_bytes`` of -1 if it is unknown.
    """
    count = len(events)
    phase = events["action"].map(phase_of).astype("category")
    stack = events["stack"].where(phase == "first", -1)
    recorded = events[["address"]].assign(stack=stack, requested_bytes=events["size_bytes"], size_bytes=-1)
    recorded = recorded.assign(pending=False, phase=phase, event=events.index).dropna(subset="phase")
    staying = at_end[["address", "stack", "requested_bytes", "size_bytes", "pending"]]
    rows = pd.concat([recorded, staying.assign(phase="free_completed", event=count)])
    rows = rows.sort_values("address", kind="stable", ignore_index=True)
    is_head = (rows["phase"] == "first") | (rows["address"] != rows["address"].shift(fill_value=-1))
    is_head |= rows["phase"].shift() == "free_completed"
    for name in ("first", "free_requested", "free_completed"):
        rows[name] = rows["event"].where(rows["phase"] == name, -1).astype(np.int64)
    blocks = rows.drop(columns=["phase", "event"]).groupby(is_head.cumsum())
    table = blocks.max().assign(requested_bytes=blocks["requested_bytes"].first())
    completed = table["free_completed"]
    table["free_completed"] = completed.where(completed >= 0, count)
    # Old blocks that are pending at the end, or only complete here, were freed before the first event.
    was_freed = (table["first"] < 0) & ((completed < count) | table["pending"])
    asked = table["free_requested"]
    table["free_requested"] = asked.where((asked >= 0) | was_freed, table["free_completed"])
    return table.sort_values(["first", "address"], kind="stable", ignore_index=True)


@kept
def _held_segments(snapshot: Snapshot, device: int) -> pd.DataFrame:
    """List the lifetimes of ordinary segments."""
    segments = segments_of(snapshot, device)
    segments = segments[~segments["expandable"]]
    at_end = segments.assign(requested_bytes=segments["total_bytes"], size_bytes=-1, stack=-1, pending=False)
    phase_of = {"segment_alloc": "first", "segment_free": "free_completed"}
    table = _lifetimes(events_of(snapshot, device), at_end, phase_of)
    return table.assign(end=table["address"] + table["requested_bytes"])


def held_blocks(snapshot: Snapshot, device: int) -> pd.DataFrame:
    """List the blocks that were ever in use, in order of their beginning, then of address.

    Columns: ``address, requested_bytes, size_bytes, stack, first, free_requested, free_completed``.
    """
    blocks = snapshot.blocks
    is_held = (blocks["device"] == device) & (blocks["state"] != "inactive")
    at_end = blocks[is_held].drop_duplicates("address")
    at_end = at_end.assign(pending=at_end["state"] == "active_pending_free")
    phase_of = {"alloc": "first", "free_requested": "free_requested"}
    phase_of |= dict.fromkeys(("free_completed", "free"), "free_completed")
    table = _lifetimes(events_of(snapshot, device), at_end, phase_of).drop(columns="pending")
    return _sized(snapshot, device, table)


# ---------------------------------------------------------------- sizes


def _sized(snapshot: Snapshot, device: int, table: pd.DataFrame) -> pd.DataFrame:
    """Work out the sizes of blocks that are gone by the end."""
    units = -(-table["requested_bytes"] // _MIN_BLOCK_BYTES)
    rounded = units.clip(lower=1) * _MIN_BLOCK_BYTES
    is_gone = table["size_bytes"] < 0
    table["size_bytes"] = table["size_bytes"].where(~is_gone, rounded)
    if _has_expandable(snapshot, device):
        return table  # expandable segments split off any remainder
    large = table[rounded > _SMALL_BYTES]
    gone = large[is_gone[large.index]]
    segments = _held_segments(snapshot, device)
    to_block = _distances(large, gone)
    to_segment_end = _distances(segments.assign(address=segments["end"]), gone)
    remainder = np.minimum(to_block, to_segment_end)
    table.loc[gone.index, "size_bytes"] += np.where(remainder <= _SMALL_BYTES, remainder, 0)
    return table


def _distances(boundaries: pd.DataFrame, blocks: pd.DataFrame) -> _Ints:
    """Measure from the end of each block to the next boundary when it was allocated, if that is within 1 MiB."""
    boundaries = boundaries.sort_values(["address", "first"])
    last = boundaries["free_completed"].to_numpy()
    places, place_of = np.unique(boundaries["address"], return_inverse=True)
    stride = last.max(initial=0) + 2
    keys = place_of * stride + boundaries["first"].to_numpy()
    moment = blocks["first"].to_numpy()
    begin = (blocks["address"] + blocks["size_bytes"]).to_numpy()
    place = np.searchsorted(places, begin)
    places = np.append(places, _FAR)
    distance = np.full(len(blocks), _FAR)
    asking = np.arange(len(blocks))
    while len(asking):
        gap = places[place[asking]] - begin[asking]
        asking = asking[gap <= _SMALL_BYTES]
        # The last boundary at this address that began by then; it may have ended.
        row = np.searchsorted(keys, place[asking] * stride + moment[asking], side="right") - 1
        is_there = (row >= 0) & (place_of[row] == place[asking]) & (last[row] > moment[asking])
        there = asking[is_there]
        distance[there] = places[place[there]] - begin[there]
        asking = asking[~is_there]
        place[asking] += 1
    return distance


# ---------------------------------------------------------------- free space


def free_space(snapshot: Snapshot, device: int, event: int, live: pd.DataFrame) -> tuple[int, int | None]:
    """Measure the free space of ordinary segments after an event, when the blocks of `live` were active.

    Give the bytes of segments without live blocks, and the largest free block; None where a segment is expandable.
    """
    held = _held_segments(snapshot, device)
    is_there = (held["first"] <= event) & (event < held["free_completed"])
    segments = held[is_there]
    blocks = np.sort(live["address"])
    before = np.searchsorted(blocks, segments["address"])
    is_empty = np.searchsorted(blocks, segments["end"]) == before
    releasable = int(segments["requested_bytes"][is_empty].sum())
    if _has_expandable(snapshot, device):
        return releasable, None
    # Free space runs from a segment's begin or a block's end to the next block's begin or the segment's end.
    starts = np.append(segments["address"], live["address"] + live["size_bytes"])
    stops = np.append(blocks, segments["end"])
    free = np.sort(stops) - np.sort(starts)
    return releasable, int(free.max(initial=0))


def _has_expandable(snapshot: Snapshot, device: int) -> bool:
    is_mapped = (events_of(snapshot, device)["action"] == "segment_map").any()
    return bool(is_mapped or segments_of(snapshot, device)["expandable"].any())
