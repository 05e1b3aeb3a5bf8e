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

from nsightkit.trace.snapshot import Snapshot

__all__ = ["events_of", "free_space", "held_blocks", "segments_of", "total_by_event"]

# c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize, kSmallSize, kLargeBuffer.
_MIN_BLOCK_BYTES, _SMALL_BYTES, _LARGE_BUFFER_BYTES = 512, 1 << 20, 20 << 20
_FAR = 1 << 62
_Ints = npt.NDArray[np.int64]


def events_of(snapshot: Snapshot, device: int) -> pd.DataFrame:
    """Give the events of a device, numbered from 0."""

    def select() -> pd.DataFrame:
        return snapshot.events[snapshot.events["device"] == device].reset_index(drop=True)

    events: pd.DataFrame = snapshot.derived(("events", device), select)
    return events


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


def _lifetimes(events: pd.DataFrame, at_end: pd.DataFrame, begin: str, ask: str, ends: tuple[str, ...]) -> pd.DataFrame:
    """Pair the events at each address; what is there at the end is taken as freed just after the last event.

    `at_end` has ``address, requested_bytes, size_bytes, stack, pending``. The result has ``first``, the event
    of the allocation (-1: before the first event), ``free_requested`` and ``free_completed`` (the number of events:
    never), and a ``size_bytes`` of -1 if it is unknown.
    """
    count = len(events)
    action = events["action"]
    event = pd.Series(events.index, dtype=np.int64)
    is_end = action.isin(ends)
    recorded = events[["address"]].copy()
    recorded["requested_bytes"] = events["size_bytes"]
    recorded["size_bytes"] = -1
    recorded["stack"] = events["stack"].where(action == begin, -1)
    recorded["first"] = event.where(action == begin, -1)
    recorded["free_requested"] = event.where(action == ask, -1)
    recorded["free_completed"] = event.where(is_end, -1)
    recorded = recorded[action.isin([begin, ask, *ends])]
    staying = at_end.assign(first=-1, free_completed=count)
    staying["free_requested"] = np.where(at_end["pending"], -1, count)
    rows = pd.concat([recorded, staying[recorded.columns]]).astype(np.int64)
    rows = rows.sort_values("address", kind="stable")
    before = rows.shift(fill_value=-1)
    is_new_address = rows["address"] != before["address"]
    is_head = is_new_address | (rows["first"] >= 0) | (before["free_completed"] >= 0)
    rules = dict.fromkeys(rows, "max")
    rules["requested_bytes"] = "first"
    table = rows.groupby(is_head.cumsum().to_numpy()).agg(rules)
    # The ring buffer may have dropped an allocation, and recording may have skipped either kind of free.
    asked = table["free_requested"]
    completed = table["free_completed"]
    completed = completed.mask(completed < 0, asked)
    table["free_completed"] = completed.mask(completed < 0, count)
    is_old = table["first"] < 0
    previous_end = table.groupby("address")["free_completed"].shift(fill_value=-1)
    table["first"] = table["first"].mask(is_old, previous_end)
    # Old blocks that are pending at the end, or only complete here, were freed before the first event.
    is_pending = is_old & ((completed == count) | bool((action == ask).any()))
    is_unasked = (asked < 0) & ~is_pending
    table["free_requested"] = asked.mask(is_unasked, table["free_completed"])
    return table.sort_values(["first", "address"], kind="stable", ignore_index=True)


def _held_segments(snapshot: Snapshot, device: int) -> pd.DataFrame:
    """List the lifetimes of ordinary segments."""

    def compute() -> pd.DataFrame:
        segments = segments_of(snapshot, device)
        segments = segments[~segments["expandable"]]
        at_end = segments.assign(requested_bytes=segments["total_bytes"], size_bytes=-1, stack=-1, pending=False)
        table = _lifetimes(events_of(snapshot, device), at_end, "segment_alloc", "", ("segment_free",))
        table["end"] = table["address"] + table["requested_bytes"]
        return table

    held: pd.DataFrame = snapshot.derived(("segments", device), compute)
    return held


def held_blocks(snapshot: Snapshot, device: int) -> pd.DataFrame:
    """List the blocks that were ever in use, in order of their beginning, then of address.

    Columns: ``address, requested_bytes, size_bytes, stack, first, free_requested, free_completed``.
    """
    blocks = snapshot.blocks
    is_held = (blocks["device"] == device) & (blocks["state"] != "inactive")
    at_end = blocks[is_held].drop_duplicates("address")
    at_end["pending"] = at_end["state"] == "active_pending_free"
    ends = ("free_completed", "free")
    table = _lifetimes(events_of(snapshot, device), at_end, "alloc", "free_requested", ends)
    return _sized(snapshot, device, table)


# ---------------------------------------------------------------- sizes


def _sized(snapshot: Snapshot, device: int, table: pd.DataFrame) -> pd.DataFrame:
    """Work out the sizes of blocks that are gone by the end."""
    rounded = _rounded(snapshot, table["requested_bytes"].to_numpy())
    is_gone = table["size_bytes"] < 0
    table["size_bytes"] = table["size_bytes"].where(~is_gone, rounded)
    is_mapped = (events_of(snapshot, device)["action"] == "segment_map").any()
    if is_mapped or segments_of(snapshot, device)["expandable"].any():
        return table  # expandable segments split off any remainder
    large = table[rounded > _SMALL_BYTES]
    gone = large[is_gone[large.index]]
    most_split = snapshot.settings.get("max_split_size", -1)
    limit = np.full(len(gone), _SMALL_BYTES)
    if most_split > 0:
        limit[gone["size_bytes"] >= most_split] = _LARGE_BUFFER_BYTES
    segments = _held_segments(snapshot, device)
    to_block = _distances(large, gone, limit)
    to_segment_end = _distances(segments.assign(address=segments["end"]), gone, limit)
    remainder = np.minimum(to_block, to_segment_end)
    table.loc[gone.index, "size_bytes"] += np.where(remainder <= limit, remainder, 0)
    return table


def _rounded(snapshot: Snapshot, requested: _Ints) -> _Ints:
    """Round sizes as DeviceCachingAllocator::round_size does."""
    unit = np.full(len(requested), _MIN_BLOCK_BYTES)
    divisions = snapshot.settings.get("roundup_power2_divisions", {})
    exponent = np.frexp(requested)[1].astype(np.int64) - 1
    # The setting names sizes in MiB: the first holds for all smaller blocks, the last for all larger ones.
    place_of = np.clip(exponent - 20, 0, 15)
    for place in range(16):
        parts = divisions.get(str(1 << place), 0)
        if parts > 1:
            is_divided = (place_of == place) & (requested > _MIN_BLOCK_BYTES * parts)
            unit[is_divided] = (1 << exponent[is_divided]) // parts
    rounded: _Ints = np.maximum(-(-requested // unit) * unit, _MIN_BLOCK_BYTES)
    return rounded


def _distances(boundaries: pd.DataFrame, blocks: pd.DataFrame, limit: _Ints) -> _Ints:
    """Measure from the end of each block to the next boundary when it was allocated, if that is within `limit`."""
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
        asking = asking[gap <= limit[asking]]
        # The last boundary at this address that began by then; it may have ended.
        key = place[asking] * stride + moment[asking]
        row = np.searchsorted(keys, key, side="right") - 1
        is_at_place = (row >= 0) & (place_of[row] == place[asking])
        is_there = is_at_place & (last[row] > moment[asking])
        there = asking[is_there]
        distance[there] = places[place[there]] - begin[there]
        asking = asking[~is_there]
        place[asking] += 1
    return distance


# ---------------------------------------------------------------- free space


def _mapped(snapshot: Snapshot, device: int, event: int) -> pd.DataFrame:
    """List what of the expandable segments was mapped after an event: start from the end and undo later mappings."""
    segments = segments_of(snapshot, device)
    at_end = segments[segments["expandable"]].assign(sign=1)
    at_end["size_bytes"] = at_end["total_bytes"]
    later = events_of(snapshot, device).iloc[event + 1 :]
    signs = later["action"].astype(object).map({"segment_map": -1, "segment_unmap": 1})
    later = later.assign(sign=signs).dropna(subset="sign")
    parts = pd.concat([at_end, later])
    ends = parts.assign(address=parts["address"] + parts["size_bytes"], sign=-parts["sign"])
    edges = pd.concat([parts, ends])
    depth = edges.groupby("address")["sign"].sum().cumsum()
    change = np.diff((depth > 0).to_numpy(int), prepend=0)
    return pd.DataFrame({"address": depth.index[change > 0], "end": depth.index[change < 0]}, dtype=np.int64)


def free_space(snapshot: Snapshot, device: int, event: int, live: pd.DataFrame) -> dict[str, int]:
    """Measure the free space after an event, when the blocks of `live` were active.

    Give the free bytes in segments that hold live blocks (``inactive_split_bytes``) and in segments that hold none
    (``releasable_bytes``), and ``largest_free_block_bytes``.
    """
    held = _held_segments(snapshot, device)
    is_held = (held["first"] <= event) & (event < held["free_completed"])
    mapped = _mapped(snapshot, device, event)
    segments = pd.concat([held.loc[is_held, ["address", "end"]], mapped])
    begin = segments["address"].to_numpy()
    end = segments["end"].to_numpy()
    blocks = np.sort(live["address"])
    is_empty = np.searchsorted(blocks, begin) == np.searchsorted(blocks, end)
    releasable = int((end - begin)[is_empty].sum())
    # Free space runs from a segment's begin or a block's end to the next block's begin or the segment's end.
    block_ends = live["address"] + live["size_bytes"]
    starts = np.append(begin, block_ends)
    stops = np.append(blocks, end)
    free = np.sort(stops) - np.sort(starts)
    space = {"inactive_split_bytes": int(free.sum()) - releasable, "releasable_bytes": releasable}
    space["largest_free_block_bytes"] = int(free.max(initial=0))
    return space
