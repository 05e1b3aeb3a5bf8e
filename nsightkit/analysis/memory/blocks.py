"""Which blocks and segments a caching allocator held, from when to when, and how large they were.

A snapshot holds the state at its end, and the last events before it. Everything is reconstructed so that it agrees with
that end, and is right also where the ring buffer of events dropped its beginning. Events carry requested sizes only. A
block's own size is known where the block is still there at the end; else it follows from the allocator's rules
(c10/cuda/CUDACachingAllocator.cpp): sizes are rounded to 512 B; in the pool of blocks above 1 MiB a remainder of at
most 1 MiB is not split off and stays with the block, which therefore reaches to whatever came next when it was
allocated. The one thing that cannot be known is such a remainder of a block that was there before the first event and
was freed later.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core.intervals import merge
from nsightkit.trace.snapshot import Snapshot

__all__ = ["Chain", "events_of", "held_blocks", "held_segments", "mapped_ranges", "segments_of", "total_by_event"]

# c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize, kSmallSize, kLargeBuffer.
_MIN_BLOCK_BYTES, _SMALL_BYTES, _LARGE_BUFFER_BYTES = 512, 1 << 20, 20 << 20
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


def total_by_event(count: int, rows: pd.DataFrame, amount: str, last: str) -> _Ints:
    """Sum the amounts of what is there from ``first`` (inclusive) to `last` (exclusive), at -1, 0, … count - 1."""
    change = np.zeros(count + 2, np.int64)
    np.add.at(change, rows["first"] + 1, rows[amount])
    np.add.at(change, rows[last] + 1, -rows[amount])
    return np.cumsum(change)[: count + 1]


# ---------------------------------------------------------------- lifetimes


@dataclass(slots=True)
class Chain:
    """What the events at an address say of one block or segment.

    Attributes
    ----------
    address, size_bytes, stream, stack : int
        Of its first event; no stack where that is not its beginning.
    first : int
        The event that begins it; where that was not recorded, the one that ended what was there before, or -1.
    asked, completed : int
        The events that free it, -1 where they were not recorded.
    """

    address: int
    size_bytes: int
    stream: int
    stack: int
    first: int
    asked: int = -1
    completed: int = -1

    def end(self, event: int) -> None:
        """End where an event says that it is gone, or earlier, where it was freed."""
        self.completed = self.asked if self.asked >= 0 else event


def _chains(events: pd.DataFrame, begin: str, ask: str, ends: tuple[str, ...]) -> list[Chain]:
    """Pair the events of each address. Any of them may be absent: the recording began later, or left some out."""
    chosen = events[events["action"].isin([begin, ask, *ends])]
    columns = [chosen[name].tolist() for name in ("action", "address", "size_bytes", "stream", "stack")]
    chains: list[Chain] = []
    latest: dict[int, Chain] = {}
    for event, action, address, size, stream, stack in zip(chosen.index.tolist(), *columns, strict=True):
        chain = latest.get(address)
        is_open = chain is not None and chain.completed < 0
        if chain is not None and is_open and (action == begin or (action == ask and chain.asked >= 0)):
            chain.end(event)  # its end was not recorded
            is_open = False
        if chain is None or not is_open:
            if action == begin:
                chain = Chain(address, size, stream, stack, first=event)
            else:
                since = -1 if chain is None else chain.completed
                chain = Chain(address, size, stream, -1, first=since)
            chains.append(chain)
            latest[address] = chain
        if action == ask:
            chain.asked = event
        elif action in ends:
            chain.completed = event
    return chains


def _latest(chains: list[Chain]) -> dict[int, Chain]:
    return {chain.address: chain for chain in chains}


def held_segments(snapshot: Snapshot, device: int) -> pd.DataFrame:
    """List the ordinary segments: ``address, total_bytes, first, free_completed, stream``."""
    segments: pd.DataFrame = snapshot.derived(("held segments", device), lambda: _held_segments(snapshot, device))
    return segments


def _held_segments(snapshot: Snapshot, device: int) -> pd.DataFrame:
    events = events_of(snapshot, device)
    segments = segments_of(snapshot, device)
    at_end = segments[~segments["expandable"]]
    addresses = set(at_end["address"].tolist())
    chains = _chains(events, "segment_alloc", "", ("segment_free",))
    seen = set()
    rows = []
    for chain in chains:
        last = chain.completed
        if last < 0:
            if chain.address not in addresses:
                continue  # its end was not recorded
            seen.add(chain.address)
            last = len(events)
        rows.append((chain.address, chain.size_bytes, chain.first, last, chain.stream))
    for address, total, stream in zip(at_end["address"], at_end["total_bytes"], at_end["stream"], strict=True):
        if address not in seen:
            rows.append((address, total, -1, len(events), stream))
    columns = ["address", "total_bytes", "first", "free_completed", "stream"]
    return pd.DataFrame(rows, columns=columns, dtype=np.int64)


def held_blocks(snapshot: Snapshot, device: int) -> pd.DataFrame:
    """List the blocks that were ever in use, in order of their beginning, then of address.

    Columns: ``address, requested_bytes, size_bytes, uncertain_bytes, first, free_requested, free_completed, stream,
    stack``.
    """
    table = _lifetimes(snapshot, device)
    size, uncertain = _sizes(snapshot, device, table)
    table["size_bytes"] = size
    table.insert(3, "uncertain_bytes", uncertain)
    return table


def _lifetimes(snapshot: Snapshot, device: int) -> pd.DataFrame:
    """Join the chains of events with the blocks that are there at the end."""
    events = events_of(snapshot, device)
    count = len(events)
    records_requests = bool((events["action"] == "free_requested").any())
    chains = _chains(events, "alloc", "free_requested", ("free_completed", "free"))
    latest = _latest(chains)
    blocks = snapshot.blocks[(snapshot.blocks["device"] == device) & (snapshot.blocks["state"] != "inactive")]
    at_end: dict[int, Any] = {}
    block: Any
    for block in blocks.drop_duplicates("address").itertuples():
        at_end[block.address] = block
    rows = []
    for chain in chains:
        stays = chain.completed < 0 and chain.address in at_end
        size = -1
        stack = chain.stack
        if stays:
            block = at_end.pop(chain.address)
            size = block.size_bytes
            stack = stack if stack >= 0 else block.stack
        elif chain.completed < 0:
            chain.end(count)
        completed = chain.completed if chain.completed >= 0 else count
        requested = chain.asked
        if requested < 0:
            requested = completed
            # A free that only completes here was asked for before the first event.
            if chain.first < 0 and completed < count and records_requests:
                requested = -1
        rows.append((chain.address, chain.size_bytes, size, chain.first, requested, completed, chain.stream, stack))
    # The other blocks of the end: there before the first event, or, where the events say that what was at the address
    # is freed, from an allocation that was not recorded.
    streams = snapshot.segments["stream"].tolist()
    for address, block in at_end.items():
        since = latest[address].completed if address in latest else -1
        requested = -1 if block.state == "active_pending_free" else count
        stream = streams[block.segment]
        rows.append((address, block.requested_bytes, block.size_bytes, since, requested, count, stream, block.stack))
    columns = ["address", "requested_bytes", "size_bytes", "first", "free_requested", "free_completed", "stream"]
    table = pd.DataFrame(rows, columns=[*columns, "stack"], dtype=np.int64)
    return table.sort_values(["first", "address"], kind="stable", ignore_index=True)


# ---------------------------------------------------------------- sizes


def _rounded(snapshot: Snapshot, requested: _Ints) -> _Ints:
    """Round sizes as DeviceCachingAllocator::round_size does."""
    rounded = np.maximum(-(-requested // _MIN_BLOCK_BYTES) * _MIN_BLOCK_BYTES, _MIN_BLOCK_BYTES)
    divisions: dict[str, int] = snapshot.settings.get("roundup_power2_divisions", {})
    exponent = np.frexp(np.maximum(requested, 1).astype(float))[1] - 1
    by_size = np.array([divisions.get(str(1 << place), 0) for place in range(16)], np.int64)
    parts = by_size[np.clip(exponent - 20, 0, 15)]
    exponent_of_parts = np.frexp(np.maximum(parts, 1).astype(float))[1] - 1
    step = np.maximum((np.int64(1) << exponent) >> exponent_of_parts, 1)
    is_divided = (parts > 1) & (requested > _MIN_BLOCK_BYTES * parts)
    return np.where(is_divided, -(-requested // step) * step, rounded)


def _sizes(snapshot: Snapshot, device: int, table: pd.DataFrame) -> tuple[_Ints, _Ints]:
    """Work out the sizes of blocks that are gone by the end, and how much larger each may have been."""
    size = table["size_bytes"].to_numpy()
    requested = table["requested_bytes"].to_numpy()
    uncertain = np.zeros(len(table), np.int64)
    is_gone = size < 0
    rounded = _rounded(snapshot, requested)
    size = np.where(is_gone, rounded, size)
    max_split = snapshot.settings.get("max_split_size", -1)
    limit = np.full(len(table), _SMALL_BYTES)
    if max_split > 0:
        limit[rounded >= max_split] = _LARGE_BUFFER_BYTES
    is_large = (rounded > _SMALL_BYTES) & ~_in_expandable(snapshot, device, table["address"].to_numpy())
    asking = np.flatnonzero(is_gone & is_large)
    begin = table["address"].to_numpy()[asking] + rounded[asking]
    boundaries = _boundaries(table[is_large], held_segments(snapshot, device))
    gap = _next_addresses(boundaries, begin, table.iloc[asking]) - begin
    reaches = gap <= limit[asking]
    size[asking[reaches]] += gap[reaches]
    is_old = table["first"].to_numpy()[asking] < 0
    unknown = asking[is_old & ~reaches]
    uncertain[unknown] = limit[unknown]
    return size, uncertain


def _boundaries(blocks: pd.DataFrame, segments: pd.DataFrame) -> pd.DataFrame:
    """List what stops a block: the start of another, or the end of a segment, and from when to when it was there."""
    columns = ["address", "first", "free_completed"]
    ends = segments.assign(address=segments["address"] + segments["total_bytes"])
    boundaries = pd.concat([blocks[columns], ends[columns]], ignore_index=True)
    return boundaries[boundaries["first"] < boundaries["free_completed"]]


def _next_addresses(boundaries: pd.DataFrame, begin: _Ints, blocks: pd.DataFrame) -> _Ints:
    """Give for each block the nearest boundary from its `begin` on, 2**62 without one.

    For a block whose allocation was recorded, at that event. One from before the first event may have reached to
    something that is gone, or that was seen later: whatever there was until it was freed.
    """
    starts: dict[int, list[int]] = defaultdict(list)
    ends: dict[int, list[int]] = defaultdict(list)
    questions: dict[int, list[int]] = defaultdict(list)
    for address, first, last in boundaries.to_numpy().tolist():
        starts[first].append(address)
        ends[last].append(address)
    is_old = (blocks["first"] < 0).tolist()
    moments = blocks["first"].where(blocks["first"] >= 0, blocks["free_completed"])
    for number, moment in enumerate(moments.tolist()):
        questions[moment].append(number)
    live: list[int] = []
    ever: list[int] = []
    known: set[int] = set()
    nearest = [1 << 62] * len(blocks)
    addresses = begin.tolist()
    for event in sorted({*starts, *ends, *questions}):
        for address in ends[event]:
            live.pop(bisect_left(live, address))
        for number in questions[event]:
            candidates = ever if is_old[number] else live
            place = bisect_left(candidates, addresses[number])
            if place < len(candidates):
                nearest[number] = candidates[place]
        for address in starts[event]:
            insort(live, address)
            if address not in known:
                known.add(address)
                insort(ever, address)
    return np.array(nearest, np.int64)


def _in_expandable(snapshot: Snapshot, device: int, address: _Ints) -> npt.NDArray[np.bool_]:
    """Check which addresses lie where expandable segments ever were."""
    events = events_of(snapshot, device)
    mapped = events[events["action"].isin(["segment_map", "segment_unmap"])]
    segments = segments_of(snapshot, device)
    at_end = segments[segments["expandable"]]
    begin = np.concatenate([mapped["address"], at_end["address"]]).astype(np.int64)
    size = np.concatenate([mapped["size_bytes"], at_end["total_bytes"]]).astype(np.int64)
    begin, end = merge(begin, begin + size)
    place = np.searchsorted(begin, address, side="right") - 1
    return np.asarray(address < np.append(end, 0)[place])


def mapped_ranges(snapshot: Snapshot, device: int, event: int) -> list[dict[str, Any]]:
    """List what of the expandable segments was mapped after an event, as contiguous ranges: undo the later mappings."""
    segments = segments_of(snapshot, device)
    at_end = segments[segments["expandable"]]
    later = events_of(snapshot, device).iloc[event + 1 :]
    later = later[later["action"].isin(["segment_map", "segment_unmap"])]
    parts = [(*part, 1) for part in zip(at_end["address"], at_end["total_bytes"], at_end["stream"], strict=True)]
    for part in zip(later["address"], later["size_bytes"], later["stream"], later["action"], strict=True):
        parts.append((*part[:3], -1 if part[3] == "segment_map" else 1))
    change: dict[int, int] = defaultdict(int)
    stream_at = {}
    for address, size, stream, sign in parts:
        change[address] += sign
        change[address + size] -= sign
        stream_at[address] = stream
    ranges: list[dict[str, Any]] = []
    depth = 0
    begin = 0
    for address in sorted(change):
        before = depth
        depth += change[address]
        if before <= 0 < depth:
            begin = address
        if depth <= 0 < before:
            stream = stream_at.get(begin, 0)
            ranges.append({"address": begin, "total_bytes": address - begin, "stream": stream, "expandable": True})
    return ranges
