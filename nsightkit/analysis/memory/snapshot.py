"""Where the memory went, from a snapshot of PyTorch's caching allocator.

Four amounts, as ``torch.cuda.memory_stats`` counts them: *requested*, the bytes that were asked for; *allocated*, the
blocks that hold them, from allocation to ``free_requested``; *active*, the same until ``free_completed`` (a block that
another stream still uses is active, no longer allocated); *reserved*, all segments.

A snapshot holds the state at its end, and the last events before it. Everything is reconstructed backwards from that
end, so it is right also when the ring buffer of events dropped its beginning. Events carry requested sizes only. A
block's own size is known where the block is still there at the end; else it follows from the allocator's rules
(c10/cuda/CUDACachingAllocator.cpp): sizes are rounded to 512 B; in the pool of blocks above 1 MiB a remainder of at
most 1 MiB is not split off and stays with the block, which therefore reaches to whatever came next when it was
allocated. The one thing that cannot be known is such a remainder of a block that was there before the first event and
was freed later; its greatest possible sum is given as ``uncertain_bytes``.

A *category* is read from call stacks and lifetimes. The stack says which phase made a block: forward, backward,
optimizer, set-up. What is freed within the run of events of its own phase is ``temporary``, but not what a forward pass
keeps from layer to layer; what outlives it is an activation, a gradient, an optimizer state or a weight; a gradient is
also what ``AccumulateGrad`` allocates, and what ``zero_grad`` frees of backward's blocks. Some stacks name what they
make, whatever its lifetime: ``logits`` (what the loss makes), ``autocast copies``, ``KV cache``, ``communication``,
``workspaces``, ``inputs``. ``before recording`` is what was there before the first event and has no stack; ``unknown``
is what no rule covers. In a snapshot with Python frames only, a block without any frame counts as backward's, because
autograd's threads have none, and sizes and counts say which activations are really autocast's copies of weights, as
they say it of its casts; cuBLAS's workspace is known by its size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core.intervals import merge
from nsightkit.analysis.core.names import compiled
from nsightkit.analysis.core.text import count_text
from nsightkit.errors import UsageError
from nsightkit.trace.snapshot import ACTIONS, Snapshot

__all__ = [
    "CATEGORIES",
    "allocations",
    "at",
    "bands",
    "growth",
    "ranges",
    "segments",
    "sites",
    "summary",
    "timeline",
]

#: What a block can be; the order in which figures stack them.
CATEGORIES = (
    *("weights", "optimizer states", "gradients", "activations", "logits", "autocast copies", "KV cache"),
    *("communication", "workspaces", "inputs", "temporary", "before recording", "unknown"),
)

# c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize, kSmallSize, kLargeBuffer.
_MIN_BLOCK, _SMALL, _LARGE_BUFFER = 512, 1 << 20, 20 << 20
# aten/src/ATen/cuda/CublasHandlePool.cpp: the default, CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8, and that of Hopper.
_CUBLAS, _CUBLAS_HOPPER = 8_519_680, 32 << 20
#: What is still there when its own line has allocated so many more is kept.
_LAYERS = 2
_CODE = {action: code for code, action in enumerate(ACTIONS)}
#: Whether an action, by its code, adds to what is reserved or takes from it.
_RESERVES = np.array(
    [(action in ("segment_alloc", "segment_map")) - (action in ("segment_free", "segment_unmap")) for action in ACTIONS]
)

_OF_BLOCK = [
    *("address", "requested_bytes", "size_bytes", "first", "free_requested", "free_completed", "stream", "stack")
]
_Ints = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]
_P = ParamSpec("_P")
_T = TypeVar("_T")
Moment = int | Literal["start", "peak", "oom", "end"]


def _once(compute: Callable[Concatenate[Snapshot, _P], _T]) -> Callable[Concatenate[Snapshot, _P], _T]:
    """Keep what a function works out beside its snapshot."""

    def ask(snapshot: Snapshot, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        found: _T = snapshot.derived((compute.__name__, *args), lambda: compute(snapshot, *args, **kwargs))
        return found

    return ask


@_once
def _events(snapshot: Snapshot, device: int) -> pd.DataFrame:
    return snapshot.events[snapshot.events["device"] == device].reset_index(drop=True)


def _segments(snapshot: Snapshot, device: int, *, expandable: bool | None = None) -> pd.DataFrame:
    """Segments of a device at the end: all, or one kind of them."""
    ours = snapshot.segments[snapshot.segments["device"] == device]
    return ours if expandable is None else ours[ours["expandable"] == expandable]


# ---------------------------------------------------------------- what was allocated, from when to when


def allocations(snapshot: Snapshot, device: int | None = None) -> pd.DataFrame:
    """List every allocation the snapshot knows of, with its lifetime, size and category.

    Parameters
    ----------
    snapshot : Snapshot
    device : int, optional
        Default: the device with the highest peak.

    Returns
    -------
    DataFrame
        ``address, requested_bytes, size_bytes`` (the block), ``uncertain_bytes`` (how much larger it may be),
        ``first, free_requested, free_completed`` (rows of the device's events: the event that begins it, -1 where that
        was before the first event, and those that end it, the number of events where it is there at the end),
        ``stream, stack, category, metadata``. In order of `first`, then of address.

    Raises
    ------
    UsageError
        The snapshot has no such device.
    """
    return _allocations(snapshot, _device(snapshot, device))


@_once
def _allocations(snapshot: Snapshot, device: int) -> pd.DataFrame:
    table = _lifetimes(snapshot, device)
    size, uncertain = _sizes(snapshot, device, table)
    table["size_bytes"] = size
    table.insert(3, "uncertain_bytes", uncertain)
    table["category"] = _categories(snapshot, device, table)
    return table


def _lifetimes(snapshot: Snapshot, device: int) -> pd.DataFrame:
    """Pair events by address; join what is left with the blocks that are there at the end."""
    events = _events(snapshot, device)
    count = len(events)
    pairs = _paired(events, ("alloc", "free_requested", "free_completed"))
    blocks = snapshot.blocks
    blocks = blocks[(blocks["device"] == device) & (blocks["state"] != "inactive")].drop_duplicates("address")
    match = pd.Index(blocks["address"]).get_indexer(pd.Index(pairs["address"]))
    there = (match >= 0) & ~pairs.duplicated("address", keep="last").to_numpy()
    asked, completed, successor = (pairs[c] for c in ("requested", "completed", "successor"))
    # Where an event of a kind was not recorded (skip_actions) the other free, or the address's next use, stands in.
    ended = (completed >= 0) | (successor < count) | (~there & (asked >= 0))
    completed = completed.where(completed >= 0, asked.where(asked >= 0, successor).where(ended, count))
    # A free that only completes here was asked for before the first event, if such events are recorded at all.
    early = (pairs["first"] < 0) & ended & (events["action"] == "free_requested").any()
    stays = there & ~ended
    # Of each pair's block; where there is none, any value.
    size, stack = (np.append(blocks[c].to_numpy(np.int64), 0)[match] for c in ("size_bytes", "stack"))
    known = pairs.assign(
        requested_bytes=pairs["size_bytes"],
        size_bytes=np.where(stays, size, -1),
        free_requested=asked.where(asked >= 0, completed.mask(early, -1)),
        free_completed=completed,
        stack=pairs["stack"].mask(stays & (pairs["stack"] < 0), stack),
    )
    # The other blocks of the end: there before the first event, or (where the events say that what was at the address
    # is freed) from an allocation that was not recorded.
    since = np.full(len(blocks), -1, np.int64)
    since[match[there & ended]] = completed[there & ended]
    older = blocks.assign(
        first=since,
        free_requested=np.where(blocks["state"] == "active_pending_free", -1, count),
        free_completed=count,
        stream=snapshot.segments["stream"].to_numpy()[blocks["segment"].to_numpy()],
        row=-1,
    )[~np.isin(np.arange(len(blocks)), match[stays])]
    both = pd.concat([known[[*_OF_BLOCK, "row"]], older[[*_OF_BLOCK, "row"]]], ignore_index=True).astype(np.int64)
    both = both.sort_values(["first", "address"], kind="stable", ignore_index=True)
    row = both.pop("row").to_numpy()
    for column, source in (("metadata", "metadata"), ("given", "category")):
        names = events[source].cat
        codes = np.append(names.codes, 0)[row]  # -1: the empty text, which is the first
        both[column] = pd.Categorical.from_codes(codes, categories=names.categories)
    return both


def _paired(events: pd.DataFrame, kinds: tuple[str, str, str]) -> pd.DataFrame:
    """Make one row of each chain ``begin, ask, end`` of events at an address; each part may be absent.

    Columns: ``address, size_bytes, first`` (-1: before the first event), ``requested, completed`` (-1: no such event),
    ``successor`` (where the next chain at this address begins, else the number of events), ``stream, stack, row``
    (the beginning's event, -1 without one).
    """
    count, action = len(events), events["action"].cat.codes.to_numpy()
    begin, ask, end = (_CODE[kind] for kind in kinds)
    action = np.where((action == _CODE["free"]) & (begin == _CODE["alloc"]), end, action)
    chosen = np.flatnonzero(np.isin(action, [begin, ask, end]))
    order = chosen[np.argsort(events["address"].to_numpy()[chosen], kind="stable")]
    address, what = events["address"].to_numpy()[order], action[order]
    # The first of all opens a chain in any case: it does not matter that it sees the last as the one before it.
    moved = np.append(True, address[1:] != address[:-1])[: len(order)]
    before = np.roll(what, 1)
    opens = moved | (what == begin) | (before == end) | ((what == ask) & (before == ask))
    heads = np.flatnonzero(opens)
    chain = np.cumsum(opens) - 1

    def where(kind: int) -> _Ints:
        found = np.full(len(heads), -1, np.int64)
        found[chain[what == kind]] = order[what == kind]
        return found

    began, asked, completed = map(where, (begin, ask, end))
    following = np.roll(heads, -1)
    # A chain without a beginning that is not the address's first: it began after the one before had ended.
    ended = np.roll(np.maximum(completed, asked), 1)
    heading = events[["address", "size_bytes", "stream", "stack"]].take(order[heads]).reset_index(drop=True)
    return heading.assign(
        first=np.where((began < 0) & ~moved[heads], ended, began),
        requested=asked,
        completed=completed,
        successor=np.where(moved[following], count, order[following]),
        stack=heading["stack"].where(began >= 0, -1),
        row=began,
    )


# ---------------------------------------------------------------- how large the blocks were


def _rounded(snapshot: Snapshot, requested: _Ints) -> _Ints:
    """Round sizes as DeviceCachingAllocator::round_size does."""
    plain = np.maximum(-(-requested // _MIN_BLOCK) * _MIN_BLOCK, _MIN_BLOCK)
    divisions = snapshot.settings.get("roundup_power2_divisions") or {}
    log2 = np.frexp(np.maximum(requested, 1).astype(float))[1] - 1
    by_size = np.array([divisions.get(str(1 << i), 0) for i in range(16)], np.int64)
    into = by_size[np.clip(log2 - 20, 0, 15)]
    floor = np.int64(1) << log2
    step = np.maximum(floor >> (np.frexp(np.maximum(into, 1).astype(float))[1] - 1), 1)
    stepped = -(-requested // step) * step
    return np.where((into > 1) & (requested > _MIN_BLOCK * into), stepped, plain)


def _sizes(snapshot: Snapshot, device: int, table: pd.DataFrame) -> tuple[_Ints, _Ints]:
    """Work out the sizes of blocks that are gone by the end, and how much larger each may have been."""
    size, requested, first = (table[c].to_numpy() for c in ("size_bytes", "requested_bytes", "first"))
    gone, uncertain = size < 0, np.zeros(len(table), np.int64)
    if (snapshot.blocks["size_bytes"] % _MIN_BLOCK > 0).any():
        # Not of the caching allocator: `_memory_viz.profile_plot` makes such snapshots of the CPU's memory too.
        return np.where(gone, requested, size), uncertain
    rounded = _rounded(snapshot, requested)
    size = np.where(gone, rounded, size)
    most = snapshot.settings.get("max_split_size", -1)
    limit = np.where(rounded >= (most if isinstance(most, int) and most > 0 else 1 << 62), _LARGE_BUFFER, _SMALL)
    in_expandable = _place(table["address"].to_numpy(), *_expandable(snapshot, device)) >= 0
    asking = np.flatnonzero(gone & (rounded > _SMALL) & ~in_expandable)
    limit, old = limit[asking], first[asking] < 0
    begin = (table["address"].to_numpy() + rounded)[asking]
    # What began before the first event may have reached to something that is gone, or to something seen later.
    until = np.where(old, table["free_completed"].to_numpy()[asking], first[asking])
    held = _held(snapshot, device)
    ends = held.assign(address=held["address"] + held["total_bytes"])
    gap = np.minimum(*(_distance(begin, limit, first[asking], until, boundaries) for boundaries in (table, ends)))
    found = gap <= limit
    size[asking[found]] += gap[found]
    uncertain[asking] = np.where(old & ~found, limit, 0)
    return size, uncertain


def _distance(begin: _Ints, limit: _Ints, since: _Ints, until: _Ints, boundaries: pd.DataFrame) -> _Ints:
    """Measure from each `begin` to the nearest boundary that existed at a time in [since, until]; 2**62 beyond `limit`.

    A boundary is an address that means something from one event (exclusive) to another: the start of a block that is in
    use, or the end of a segment.
    """
    boundaries = boundaries.sort_values(["address", "first"], kind="stable")
    address, first, last = (boundaries[c].to_numpy() for c in ("address", "first", "free_completed"))
    distinct, head, rank = np.unique(address, return_index=True, return_inverse=True)
    low = np.searchsorted(distinct, begin)
    high = np.searchsorted(distinct, begin + limit, side="right")
    result = np.full(len(begin), 1 << 62, np.int64)
    # Lifetimes at one address follow one another: the last that began before `until` is the one that counts.
    width = np.int64(max(int(last.max(initial=0)), 0) + 3)
    keys = rank * width + first + 1
    open_ = np.flatnonzero(low < high)
    while len(open_):
        candidate = low[open_]
        row = np.searchsorted(keys, candidate * width + until[open_] + 1, side="left") - 1
        good = (row >= head[candidate]) & (last[np.maximum(row, 0)] > since[open_])
        result[open_[good]] = (distinct[candidate] - begin[open_])[good]
        low[open_] += 1
        open_ = open_[~good & (low[open_] < high[open_])]
    return result


def _place(address: _Ints, begin: _Ints, end: _Ints) -> _Ints:
    """Say in which of some disjoint ranges, given in order, each address lies; -1 in none."""
    which = np.searchsorted(begin, address, side="right") - 1
    return np.where(address < np.append(end, 0)[which], which, -1)


def _expandable(snapshot: Snapshot, device: int) -> tuple[_Ints, _Ints]:
    """Where expandable segments ever were, as disjoint ranges."""
    mapped = _mappings(_events(snapshot, device))
    there = _segments(snapshot, device, expandable=True)
    begin = np.concatenate([mapped["address"], there["address"]]).astype(np.int64)
    return merge(begin, begin + np.concatenate([mapped["size_bytes"], there["total_bytes"]]).astype(np.int64))


def _mappings(events: pd.DataFrame) -> pd.DataFrame:
    return events[events["action"].isin(["segment_map", "segment_unmap"])]


def _held(snapshot: Snapshot, device: int) -> pd.DataFrame:
    """List ordinary segments with their lifetimes: ``address, total_bytes, first, free_completed, stream``."""
    events, at_end = _events(snapshot, device), _segments(snapshot, device, expandable=False)
    pairs = _paired(events, ("segment_alloc", "segment_free", "segment_free")).rename(
        columns={"size_bytes": "total_bytes"}
    )
    pairs["free_completed"] = pairs["completed"].where(pairs["completed"] >= 0, pairs["successor"])
    stays = pairs["free_completed"] >= len(events)
    # A segment whose end no event tells of, and that is not there: its end was not recorded.
    known = pairs[~stays | pairs["address"].isin(at_end["address"])]
    older = at_end[~at_end["address"].isin(pairs.loc[stays, "address"])].assign(first=-1, free_completed=len(events))
    columns = ["address", "total_bytes", "first", "free_completed", "stream"]
    return pd.concat([known[columns], older[columns]], ignore_index=True).astype(np.int64)


# ---------------------------------------------------------------- over time


def timeline(snapshot: Snapshot, device: int | None = None) -> pd.DataFrame:
    """Give the four amounts after every event.

    Parameters
    ----------
    snapshot : Snapshot
    device : int, optional
        Default: the device with the highest peak.

    Returns
    -------
    DataFrame
        ``event`` (-1: the state before the first), ``time_ns`` (since the snapshot's first event; -1 where events are
        not timed), ``action, allocated_bytes, active_bytes, requested_bytes, reserved_bytes``. ``requested_bytes`` are
        those of active blocks, as torch counts them.

    Raises
    ------
    UsageError
        The snapshot has no such device.
    """
    return _timeline(snapshot, _device(snapshot, device))


@_once
def _timeline(snapshot: Snapshot, device: int) -> pd.DataFrame:
    events, blocks = _events(snapshot, device), allocations(snapshot, device)
    time, action = events["time_ns"].to_numpy(), events["action"].cat.codes.to_numpy()
    # What is reserved is known at the end, and walked back from there.
    reserved = np.append(0, np.cumsum(_RESERVES[action] * events["size_bytes"].to_numpy()))
    return pd.DataFrame(
        {
            "event": np.arange(-1, len(events)),
            "time_ns": np.append(time[:1], time) if len(events) else np.full(1, -1),
            "action": pd.Categorical.from_codes(np.append(-1, action).astype(np.int64), categories=pd.Index(ACTIONS)),
            "allocated_bytes": _level(len(events), blocks, "size_bytes", "free_requested"),
            "active_bytes": _level(len(events), blocks, "size_bytes", "free_completed"),
            "requested_bytes": _level(len(events), blocks, "requested_bytes", "free_completed"),
            "reserved_bytes": reserved + (int(_segments(snapshot, device)["total_bytes"].sum()) - reserved[-1]),
        }
    )


def _level(count: int, blocks: pd.DataFrame, amount: str, last: str) -> _Ints:
    """Sum amounts over [first, last), at -1, 0, … count - 1."""
    change = np.zeros(count + 2, np.int64)
    np.add.at(change, blocks["first"] + 1, blocks[amount])
    np.add.at(change, blocks[last] + 1, -blocks[amount])
    return np.cumsum(change)[: count + 1]


def bands(snapshot: Snapshot, device: int | None = None, top: int = 1000, points: int = 1500) -> pd.DataFrame:
    """Stack the largest allocations over time: what PyTorch's memory_viz draws.

    Each allocation is a band as high as its block; it lies on those that began before it, and sinks when one of them
    goes.

    Parameters
    ----------
    snapshot : Snapshot
    device : int, optional
        Default: the device with the highest peak.
    top : int, default 1000
        How many allocations get a band; all others are one band on top.
    points : int, default 1500
        In how many stretches of equally many events the band of the others is given; of each its highest total counts.

    Returns
    -------
    DataFrame
        ``band`` (from the bottom up; the last is the others'), ``from_event, to_event`` (the first and one past the
        last after which it lies there), ``bottom_bytes, top_bytes, category`` (missing for the others), ``site``.

    Raises
    ------
    UsageError
        The snapshot has no such device, or `top` is negative.
    """
    if top < 0:
        raise UsageError(f"a figure cannot have {top} bands")
    device = _device(snapshot, device)
    blocks = allocations(snapshot, device)
    over_time = timeline(snapshot, device)
    count = len(over_time) - 1
    chosen = blocks[blocks["first"] < blocks["free_requested"]].nlargest(top, "size_bytes", keep="first").sort_index()
    size, first, last = (chosen[c].to_numpy() for c in ("size_bytes", "first", "free_requested"))
    moments = np.unique(np.concatenate([first, last, [-1, count]]))
    begin = moments[:-1]
    # shape (bands, stretches); at most `top` by twice that
    live = (first[:, None] <= begin) & (begin < last[:, None])
    height = size[:, None] * live
    top_bytes = np.cumsum(height, axis=0)
    bottom = np.where(live, top_bytes - height, -1)
    # A band keeps its place until it moves again or ends.
    band, stretch = np.nonzero(live & (np.diff(bottom, axis=1, prepend=-2) != 0))
    moves_again = np.append(band[1:] == band[:-1], False)
    table = pd.DataFrame(
        {
            "band": band,
            "from_event": begin[stretch],
            "to_event": np.where(moves_again, np.roll(begin[stretch], -1), last[band]),
            "bottom_bytes": bottom[band, stretch],
            "top_bytes": top_bytes[band, stretch],
            "category": chosen["category"].to_numpy()[band],
            "site": _site_of(snapshot, chosen["stack"].to_numpy())[band],
        }
    )
    even = np.floor(np.linspace(-1, count, points, endpoint=False)).astype(np.int64)
    cuts = np.union1d(begin, even)
    others = pd.DataFrame(
        {
            "band": len(chosen),
            "from_event": cuts,
            "to_event": np.append(cuts[1:], count),
            "bottom_bytes": height.sum(axis=0)[np.searchsorted(begin, cuts, side="right") - 1],
            "top_bytes": np.maximum.reduceat(over_time["allocated_bytes"].to_numpy(), cuts + 1),
            "category": None,
            "site": "smaller allocations",
        }
    )
    return pd.concat([table.astype({"category": object}), others], ignore_index=True)


def _device(snapshot: Snapshot, device: int | None) -> int:
    """Give the device that was asked for, or else the one with the highest peak."""
    count = snapshot.devices
    if device is None and count == 0:
        raise UsageError("the snapshot is empty: no device, no segment, no event")
    if device is not None and not 0 <= device < count:
        there = "device 0" if count == 1 else f"devices 0 to {count - 1}"
        raise UsageError(f"the snapshot has no device {device}, only {there}")
    peaks = (int(_timeline(snapshot, each)["allocated_bytes"].max()) for each in range(count))
    return int(np.argmax(list(peaks))) if device is None else device


# ---------------------------------------------------------------- one moment


def at(snapshot: Snapshot, moment: Moment = "peak", device: int | None = None) -> pd.DataFrame:
    """List the blocks that were live at a moment.

    Parameters
    ----------
    snapshot : Snapshot
    moment : int or {"start", "peak", "oom", "end"}
        An event's number (its row of the timeline's ``event``: the state after it), the state before the first event,
        the highest allocated bytes, the last out-of-memory error, or the end.
    device : int, optional
        Default: the device with the highest peak.

    Returns
    -------
    DataFrame
        The rows of :func:`allocations` with ``site`` (who allocated it) and ``pending`` (freed, but waiting for another
        stream: active, not allocated), the largest first.

    Raises
    ------
    UsageError
        There is no such device or event, or no out-of-memory error.
    """
    device = _device(snapshot, device)
    event = _event(snapshot, moment, device)
    blocks = allocations(snapshot, device)
    live = blocks[(blocks["first"] <= event) & (event < blocks["free_completed"])]
    live = live.assign(pending=live["free_requested"] <= event, site=_site_of(snapshot, live["stack"].to_numpy()))
    return live.sort_values(["size_bytes", "address"], ascending=[False, True], ignore_index=True)


def _event(snapshot: Snapshot, moment: Moment, device: int) -> int:
    events = _events(snapshot, device)
    ooms = _ooms(events)
    if isinstance(moment, int) and not -1 <= moment < len(events):
        raise UsageError(f"there is no event {moment}: events of device {device} run from 0 to {len(events) - 1}")
    if moment == "oom" and not len(ooms):
        raise UsageError(f"the snapshot holds no out-of-memory error of device {device}")
    peak = int(_timeline(snapshot, device)["allocated_bytes"].to_numpy().argmax()) - 1
    named: dict[object, int] = {"start": -1, "peak": peak, "oom": max(ooms, default=-1), "end": len(events) - 1}
    if isinstance(moment, str) and moment not in named:
        raise UsageError(f"a moment is an event's number, start, peak, oom or end, not {moment!r}")
    return int(named.get(moment, moment))


def _ooms(events: pd.DataFrame) -> _Ints:
    return np.flatnonzero(events["action"] == "oom")


def segments(snapshot: Snapshot, moment: Moment = "end", device: int | None = None) -> pd.DataFrame:
    """List the segments of a moment and how full they were.

    Parameters
    ----------
    snapshot : Snapshot
    moment : int or {"start", "peak", "oom", "end"}
        As in :func:`at`.
    device : int, optional
        Default: the device with the highest peak.

    Returns
    -------
    DataFrame
        ``address, total_bytes, stream, expandable, allocated_bytes, pending_bytes, free_bytes, largest_free_bytes,
        blocks`` (live ones), in order of address.

    Raises
    ------
    UsageError
        There is no such device or event.
    """
    device = _device(snapshot, device)
    event = _event(snapshot, moment, device)
    held = _held(snapshot, device)
    held = held[(held["first"] <= event) & (event < held["free_completed"])].assign(expandable=False)
    columns = ["address", "total_bytes", "stream", "expandable"]
    table = pd.concat([held[columns], _mapped_at(snapshot, device, event)[columns]], ignore_index=True)
    table = table.astype(dict.fromkeys(columns[:3], np.int64) | {"expandable": bool})
    table = table.sort_values("address", kind="stable", ignore_index=True)
    end = table["address"] + table["total_bytes"]
    live = at(snapshot, event, device).sort_values("address", kind="stable")
    live["segment"] = _place(live["address"].to_numpy(), table["address"].to_numpy(), end.to_numpy())
    live = live[live["segment"] >= 0]
    size, pending, segment = live["size_bytes"], live["pending"], live["segment"]
    # Free space lies before each live block and after the last of a segment.
    until = (live["address"] + size).groupby(segment)
    before = live["address"] - until.shift().fillna(segment.map(table["address"]))
    after = end - until.max().reindex(table.index).fillna(table["address"])
    sums = pd.DataFrame({"allocated_bytes": size * ~pending, "pending_bytes": size * pending, "blocks": 1})
    sums = sums.groupby(segment).sum().reindex(table.index, fill_value=0)
    return table.assign(
        allocated_bytes=sums["allocated_bytes"],
        pending_bytes=sums["pending_bytes"],
        free_bytes=table["total_bytes"] - sums["allocated_bytes"] - sums["pending_bytes"],
        largest_free_bytes=np.fmax(before.groupby(segment).max().reindex(table.index), after.clip(0)).astype(np.int64),
        blocks=sums["blocks"],
    )


def _mapped_at(snapshot: Snapshot, device: int, event: int) -> pd.DataFrame:
    """Undo the mappings after an event: what of the expandable segments was mapped, as contiguous ranges."""
    there = _segments(snapshot, device, expandable=True)
    later = _mappings(_events(snapshot, device).iloc[event + 1 :])
    undone = later.assign(total_bytes=later["size_bytes"], sign=np.where(later["action"] == "segment_map", -1, 1))
    columns = ["address", "total_bytes", "stream", "sign"]
    parts = pd.concat([there.assign(sign=1)[columns], undone[columns]]).astype(np.int64)
    signs = parts["sign"].to_numpy()
    ends = parts["address"] + parts["total_bytes"]
    change = pd.Series(np.append(signs, -signs), np.append(parts["address"], ends)).groupby(level=0).sum()
    edges = np.diff((change.cumsum() > 0).astype(int), prepend=0)
    address = change.index[edges > 0]
    streams = parts.drop_duplicates("address", keep="last").set_index("address")["stream"]
    return pd.DataFrame(
        {
            "address": address,
            "total_bytes": change.index[edges < 0] - address,
            "stream": streams.reindex(address, fill_value=0).to_numpy(),
            "expandable": True,
        }
    )


# ---------------------------------------------------------------- who allocated it, and for what

_LIBRARY = re.compile(r"(?:^|[/\\])(?:(?:site|dist)-packages[/\\]|lib[/\\]python\d)|^<|torchinductor_|^torch[/\\]")
_FOLDERS = re.compile(r".*[/\\]")
_FORWARD, _BACKWARD, _OPTIMIZER, _SETUP = 1, 2, 4, 8
_LOSS, _COMMUNICATION, _WORKSPACE, _AUTOCAST, _CACHE, _INPUT = 16, 32, 64, 128, 256, 512
_PYTHON, _ACCUMULATE, _ZERO_GRAD, _PRODUCT = 1024, 2048, 4096, 8192

#: What a frame says: flag, pattern of the function's name, pattern of the file's (both must be found).
_SIGNS: tuple[tuple[int, str, str], ...] = (
    (_FORWARD, r"^forward$|^_forward$", r""),
    (_FORWARD, r"^(_call_impl|_wrapped_call_impl)$", r"nn[/\\]modules[/\\]module\.py$"),
    (_BACKWARD, r"torch::autograd::(Engine|Node|generated::\w+Backward|PyNode|AccumulateGrad)", r""),
    (_ACCUMULATE, r"torch::autograd::AccumulateGrad", r""),
    (_ZERO_GRAD, r"^zero_grad$", r""),
    (_BACKWARD, r"^_engine_run_backward$", r""),
    (_BACKWARD, r"^grad$", r"torch[/\\]autograd[/\\]__init__\.py$"),
    (_BACKWARD, r"^backward$", r"\.py$"),
    (_OPTIMIZER, r"^(?!zero_grad|__init__)", r"(?:^|[/\\])torch[/\\]optim[/\\]"),
    (_OPTIMIZER, r"^(step|_single_tensor_\w+|_multi_tensor_\w+|_fused_\w+)$", r"(?i)optim[^/\\]*\.py$"),
    (_SETUP, r"^(_apply|reset_parameters|to_empty|_load_from_state_dict|load_state_dict)$", r""),
    (_SETUP, r"", r"(?:^|[/\\])torch[/\\]nn[/\\](init|parameter)\.py$"),
    (_SETUP, r"^__init__$", r"(?:^|[/\\])torch[/\\]nn[/\\]modules[/\\]"),
    (_LOSS, r"^(cross_entropy|log_softmax|nll_loss)$", r"torch[/\\]nn[/\\]functional\.py$"),
    (_LOSS, r"::\w*(cross_entropy|log_softmax|nll_loss)", r""),
    (_COMMUNICATION, r"^c10d::|::c10d::|ProcessGroup|Reducer::", r""),
    (_COMMUNICATION, r"", r"distributed_c10d\.py$|_functional_collectives\.py$|_fsdp_collectives\.py$"),
    (_WORKSPACE, r"CUDABlas(Lt)?Workspace|getCurrentCUDABlasHandle|gemm_and_bias|cudnn.*[wW]orkspace", r""),
    (_AUTOCAST, r"at::autocast::cached_cast", r""),
    (_CACHE, r"", r"(?:^|[/\\])cache_utils\w*\.py$"),
    (_INPUT, r"", r"(?:^|[/\\])torch[/\\]utils[/\\]data[/\\]"),
    (_PYTHON, r"", r"\.py$|^<"),
)
#: The same of the frame that allocated. Further out such names say nothing: a trainer's `__init__` may run everything.
_SITE_SIGNS: tuple[tuple[int, str, str], ...] = (
    (_SETUP, r"^__init__$", r"\.py$"),
    (_LOSS, r"cross_entropy|log_softmax|nll_loss", r"\.py$"),
    (_CACHE, r"(?i)(^|_)kv_?cache", r"\.py$"),
    (_CACHE, r"", r"(?i)(^|[/\\])[^/\\]*kv_?cache[^/\\]*\.py$"),
    (_INPUT, r"^_?(get|load|next|make|sample|random)_batch$|^collate", r"\.py$"),
)
#: The same of the innermost frame.
_INNERMOST_SIGNS: tuple[tuple[int, str, str], ...] = (
    (_PRODUCT, r"", r"torch[/\\]nn[/\\]modules[/\\](linear|conv)\.py$"),
    (_PRODUCT, r"^(linear|einsum|conv\w*|b?matmul|b?mm)$", r"torch[/\\](nn[/\\])?functional\.py$"),
)
#: What outlives its phase, by the set of flags that say the phase. The first that holds decides, as the innermost cause
#: does: a forward pass recomputed in backward is backward's, a closure's passes inside an optimizer's step are forward
#: and backward.
_KEPT_BY_PHASE = {
    _BACKWARD: "gradients",
    _FORWARD | _LOSS: "activations",
    _OPTIMIZER: "optimizer states",
    _SETUP: "weights",
}
#: What a stack says whatever its phase; the last that holds decides.
_NAMED = {
    _LOSS: "logits",
    _INPUT: "inputs",
    _CACHE: "KV cache",
    _WORKSPACE: "workspaces",
    _COMMUNICATION: "communication",
}
#: Names of torch.profiler's own memory categories, which `_memory_viz.profile_plot` writes into events.
_GIVEN = {
    "parameter": "weights",
    "optimizer_state": "optimizer states",
    "gradient": "gradients",
    "activation": "activations",
    "autograd_detail": "activations",
    "temporary": "temporary",
    "input": "inputs",
}
_ANNOTATED = (
    (_BACKWARD, r"(?i)backward"),
    (_OPTIMIZER, r"(?i)optimizer"),
    (_FORWARD | _LOSS, r"(?i)forward"),
)


def _frame_flags(frames: pd.DataFrame, signs: tuple[tuple[int, str, str], ...]) -> _Ints:
    patterns = [(flag, re.compile(name), re.compile(file)) for flag, name, file in signs]
    flags = [
        sum({flag for flag, name, file in patterns if name.search(n) and file.search(f)})
        for n, f in zip(frames["name"], frames["filename"], strict=True)
    ]
    return np.array(flags, np.int64)


@_once
def _flags(snapshot: Snapshot) -> _Ints:
    """Say what the frames of each stack tell, as bits."""
    anywhere = _frame_flags(snapshot.frames, _SIGNS)[snapshot.stack_frames]
    at_site = _frame_flags(snapshot.frames, _SITE_SIGNS)[_site_rows(snapshot)]
    innermost = _frame_flags(snapshot.frames, _INNERMOST_SIGNS)[snapshot.stack_frames[snapshot.stack_bounds[:-1]]]
    return np.asarray(np.bitwise_or.reduceat(anywhere, snapshot.stack_bounds[:-1]) | at_site | innermost)


def _categories(snapshot: Snapshot, device: int, table: pd.DataFrame) -> pd.Categorical[Any]:
    """Decide each allocation's category by its stack's phase and by whether it outlives that phase's run."""
    stack, first = table["stack"].to_numpy(), table["first"].to_numpy()
    flags = np.append(_flags(snapshot), 0)[stack]
    phase = np.select([(flags & bits) > 0 for bits in _KEPT_BY_PHASE], list(_KEPT_BY_PHASE), 0)
    phase = np.where(phase > 0, phase, _annotated(snapshot, device, first))
    # Autograd's threads have no Python frames: where stacks are recorded and hold Python only, a block with none at all
    # was made by them. Where C++ frames were recorded, the stack would say so itself.
    born = first >= 0
    native = snapshot.frames["name"].str.contains("::").any()
    python_only = ((flags & _PYTHON) > 0)[born].any() and not native
    phase = np.where(python_only & born & (stack < 0) & (phase == 0), _BACKWARD, phase)
    events, freed = _events(snapshot, device), table["free_requested"].to_numpy()
    # A gradient may come and go while nothing but backward allocates. A hook with Python frames that runs inside of
    # AccumulateGrad makes what it likes.
    freeing = np.append(np.append(_flags(snapshot), 0)[events["stack"].to_numpy()], 0)[freed]
    gradient = ((flags & (_ACCUMULATE | _PYTHON)) == _ACCUMULATE) | ((freeing & _ZERO_GRAD) > 0)
    outlives = _outlives(phase, first, freed, events) | ((phase == _BACKWARD) & gradient)
    # A forward pass that no backward follows keeps its activations all the same, where autograd is on: a layer's are
    # still there when two more layers have made theirs.
    again = table.groupby("stack")["first"].shift(-_LAYERS).to_numpy()
    outlives |= (phase == _FORWARD | _LOSS) & (stack >= 0) & (freed > again)
    result = np.full(len(table), "unknown", object)
    for chosen, category in (
        (~born & (stack < 0), "before recording"),
        (born & (phase == 0) & ((freeing & _BACKWARD) > 0), "activations"),  # of a function that is not a module's
        *(((phase == bits) & outlives, category) for bits, category in _KEPT_BY_PHASE.items()),
        ((phase > 0) & ~outlives, "temporary"),
        *(((flags & bits) > 0, category) for bits, category in _NAMED.items()),
    ):
        result[chosen] = category
    casts = (flags & _AUTOCAST) > 0 if native else python_only & (result == "activations")
    result[_copies_of_weights(table, result, casts, bool(native))] = "autocast copies"
    if not native:
        # cuBLAS's handle makes a workspace in its first product on a stream, and keeps it. An activation that happens
        # to have its size seldom is the only one that stays.
        size = table["requested_bytes"]
        default = (size == _CUBLAS) | ((size == _CUBLAS_HOPPER) & ((flags & _PRODUCT) > 0))
        stays = table[default & (result == "activations") & (freed == len(events))]
        result[stays.index[~stays.duplicated("stream", keep=False)]] = "workspaces"
    given = table.pop("given").astype(object).map(_GIVEN)
    return pd.Categorical(np.where(given.notna(), given, result), categories=pd.Index(CATEGORIES))


def _copies_of_weights(table: pd.DataFrame, category: npt.NDArray[np.object_], casts: _Bools, certain: bool) -> _Bools:
    """Find the blocks that are autocast's copies of weights among those that may be, or certainly are, its casts.

    A copy is half as large as its weight. Casts of activations are not more of them at once than there are weights of
    that size. Where no C++ frame names casts, as many copies are there at once as there are weights; what was there
    before the first event may be weights with their gradients and two states of an optimizer.
    """
    halves = (table["requested_bytes"][np.isin(category, ["weights", "before recording"])] / 2).value_counts()
    made = table[casts].assign(one=1)
    copies = np.zeros(len(table), bool)
    for size, mine in made.groupby("requested_bytes"):
        most = _level(int(mine["free_requested"].max()), mine, "one", "free_requested").max()
        weights = halves.get(size, 0)
        copies[mine.index] = most <= weights if certain else weights in most * np.arange(1, 5)
    return copies


def _outlives(phase: _Ints, first: _Ints, freed: _Ints, events: pd.DataFrame) -> _Bools:
    """Say what is freed only after allocations of another phase have begun, or have failed.

    What began before the first event outlives its phase: it survived until the recording began. Blocks that are freed
    only after an out-of-memory error would have stayed longer, so they outlive it too.
    """
    known = np.flatnonzero((phase > 0) & (first >= 0))
    order = known[np.argsort(first[known], kind="stable")]
    starts = np.append(True, phase[order][1:] != phase[order][:-1])[: len(order)]
    ends = np.append(first[order][starts][1:], len(events))[np.cumsum(starts) - 1]
    failed = np.append(_ooms(events), len(events))
    outlives = first < 0
    outlives[order] = freed[order] >= np.minimum(ends, failed[np.searchsorted(failed, first[order])])
    return outlives


def _annotated(snapshot: Snapshot, device: int, first: _Ints) -> _Ints:
    """Say which phase's recorded range an event lies in, where PyTorch recorded such ranges."""
    marks, events = snapshot.annotations, _events(snapshot, device)
    marks, result = marks[marks["device"] == device], np.zeros(len(first), np.int64)
    if not snapshot.timed or marks.empty or events.empty:
        return result
    time = events["time_ns"].to_numpy()[np.maximum(first, 0)]
    for bits, pattern in reversed(_ANNOTATED):
        chosen = marks[marks["name"].str.contains(pattern, regex=True)].sort_values("time_ns", kind="stable")
        depth = np.cumsum(np.where(chosen["stage"].str.upper() == "START", 1, -1))
        inside = np.append(0, depth)[np.searchsorted(chosen["time_ns"].to_numpy(), time, side="right")] > 0
        result[inside & (first >= 0)] = bits
    return result


@_once
def _site_rows(snapshot: Snapshot) -> _Ints:
    """Give each stack's telling frame: the innermost of the user's own Python, else of any, else a C++ operator."""
    scores = [
        (3 if _LIBRARY.search(f) is None else 2)
        if f.endswith(".py") or f.startswith("<")
        else int(n.startswith("at::_ops::"))
        for n, f in zip(snapshot.frames["name"], snapshot.frames["filename"], strict=True)
    ]
    score = np.array(scores, np.int64)[snapshot.stack_frames]
    # Of equal scores the first, the innermost, wins.
    size = np.int64(max(len(score), 1))
    best = np.maximum.reduceat(score * size + np.arange(len(score))[::-1], snapshot.stack_bounds[:-1])
    return np.asarray(snapshot.stack_frames[size - 1 - best % size], np.int64)


def _site_of(snapshot: Snapshot, stack: _Ints) -> npt.NDArray[np.object_]:
    """Name the frame that allocated, for each stack number."""
    rows = _site_rows(snapshot)
    used, which = np.unique(stack, return_inverse=True)
    names = ["no stack" if s < 0 else _frame_text(*snapshot.frames.iloc[rows[s]]) for s in used]
    return np.array(names, dtype=object)[which]


def _frame_text(name: str, filename: str, line: int) -> str:
    """Write a frame without its folders: they name people and machines."""
    if not (filename.endswith(".py") or filename.startswith("<")):
        return name.partition("(")[0][:120] or "no name"
    return f"{_FOLDERS.sub('', filename)}:{line} {name}"[:160]


def sites(snapshot: Snapshot, moment: Moment = "peak", device: int | None = None) -> pd.DataFrame:
    """Sum the allocated bytes of a moment by the line that allocated them.

    Parameters
    ----------
    snapshot : Snapshot
    moment : int or {"start", "peak", "oom", "end"}
        As in :func:`at`.
    device : int, optional
        Default: the device with the highest peak.

    Returns
    -------
    DataFrame
        ``site`` (file and line of the innermost frame of the user's own code, else of a library's, else the operator),
        ``category, bytes, requested_bytes, count, share`` (of all allocated bytes, 0 to 1) and ``stack`` (the one with
        most bytes), the most bytes first. A line that made blocks of two categories has two rows.

    Raises
    ------
    UsageError
        There is no such device or event.
    """
    return _by_site(at(snapshot, moment, device))


def _by_site(live: pd.DataFrame) -> pd.DataFrame:
    # `live` is in order of size, so that the first row of a group is one of its largest blocks.
    return _summed(live[~live["pending"]], ["site", "category"], stack=("stack", "first"))


def _told_apart(snapshot: Snapshot, live: pd.DataFrame) -> pd.DataFrame:
    """Where one line holds most, tell its blocks apart: by the nearest callers that differ, or by callees."""
    held = live.groupby("site")["size_bytes"].sum()
    if 2 * held.max() <= held.sum() or not len(held):
        return live
    site = str(held.idxmax())
    mine = live.loc[live["site"] == site, "stack"]
    stacks = {each: [_frame_text(*frame) for frame in _python(snapshot.stack(each))] for each in mine.unique()}
    if not all(site in frames for frames in stacks.values()):
        return live
    callers = zip(*(frames[frames.index(site) + 1 :] for frames in stacks.values()), strict=False)
    differing = next((("by", level) for level in callers if len(set(level)) > 1), None)
    how, others = differing or ("in", tuple(frames[0] for frames in stacks.values()))
    names = {
        each: site if other == site else f"{other} {how} {site}" for each, other in zip(stacks, others, strict=True)
    }
    return live.assign(site=live["site"].where(live["site"] != site, live["stack"].map(names)))


def _python(stack: list[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
    return [frame for frame in stack if frame[1].endswith(".py") or frame[1].startswith("<")]


def ranges(snapshot: Snapshot, match: str | None = None, device: int | None = None) -> pd.DataFrame:
    """Say between which events the ranges lie that PyTorch recorded beside them.

    It does where ``_record_memory_history`` got ``global_record_annotations=True``, for every ``record_function``.

    Parameters
    ----------
    snapshot : Snapshot
    match : str, optional
        Only ranges in whose name this regular expression is found.
    device : int, optional
        Default: the device with the highest peak.

    Returns
    -------
    DataFrame
        ``name, from_event, to_event``: the last event before the range began and the last before it ended, so that both
        are moments for :func:`at`; in order of time. A range that did not end, or that began before the recording,
        is left out.

    Raises
    ------
    UsageError
        The snapshot has no such device, or `match` is not a regular expression.
    """
    device, pattern = _device(snapshot, device), compiled(match or "", "match")
    time = _events(snapshot, device)["time_ns"].to_numpy()
    marks = snapshot.annotations.sort_values("time_ns", kind="stable")
    found = np.array([pattern.search(name) is not None for name in marks["name"]], bool)
    marks = marks[(marks["device"] == device) & found & (snapshot.timed and len(time) > 0)].reset_index(drop=True)
    starts = marks["stage"].str.upper() == "START"
    # Ranges of one name may nest: a beginning belongs to the next end at its depth.
    depth = starts.map({True: 1, False: -1}).groupby(marks["name"]).cumsum() + ~starts
    following = marks.assign(ends=(~starts).astype(int)).groupby([marks["name"], depth])[["time_ns", "ends"]].shift(-1)
    paired = starts & (following["ends"] == 1)
    return pd.DataFrame(
        {
            "name": marks["name"][paired],
            # Times are whole microseconds: what has a range's end's time was before it, as freeing is.
            "from_event": np.searchsorted(time, marks["time_ns"][paired], side="left") - 1,
            "to_event": np.searchsorted(time, following["time_ns"][paired], side="right") - 1,
        }
    ).reset_index(drop=True)


def growth(snapshot: Snapshot, moments: Sequence[Moment], device: int | None = None) -> pd.DataFrame:
    """Follow what each line holds from moment to moment, such as the ends of steps: a leak grows every time.

    Parameters
    ----------
    snapshot : Snapshot
    moments : sequence
        Two or more, in order, each as in :func:`at`.
    device : int, optional
        Default: the device with the highest peak.

    Returns
    -------
    DataFrame
        ``site, category, start_bytes`` and ``end_bytes`` (allocated at the first moment and the last), ``grown_bytes``
        (their difference), ``least_bytes`` (the smallest growth from one moment to the next: above 0 only for what grew
        every time) and ``count`` (by how many blocks). What holds the same at all moments is left out; the
        largest `least_bytes` first.

    Raises
    ------
    UsageError
        There is no such device or event, or only one moment.
    """
    if len(moments) < 2:
        raise UsageError("growth is from one moment to another: give two or more")
    keys = ["site", "category"]
    held = [sites(snapshot, moment, device).set_index(keys) for moment in moments]
    levels = pd.concat([table["bytes"] for table in held], axis=1, keys=range(len(held))).fillna(0).astype(np.int64)
    counts = pd.concat([held[0]["count"], held[-1]["count"]], axis=1).reindex(levels.index).fillna(0).astype(np.int64)
    steps = levels.diff(axis=1).iloc[:, 1:].astype(np.int64)
    table = pd.DataFrame(
        {
            "start_bytes": levels.iloc[:, 0],
            "end_bytes": levels.iloc[:, -1],
            "grown_bytes": levels.iloc[:, -1] - levels.iloc[:, 0],
            "least_bytes": steps.min(axis=1),
            "count": counts.iloc[:, 1] - counts.iloc[:, 0],
        }
    )[(steps != 0).any(axis=1)]
    return (
        table.rename_axis(keys)
        .reset_index()
        .sort_values(["least_bytes", "grown_bytes"], ascending=False, kind="stable", ignore_index=True)
    )


def _summed(live: pd.DataFrame, keys: list[str], **more: tuple[str, str]) -> pd.DataFrame:
    sums = {"bytes": ("size_bytes", "sum"), "requested_bytes": ("requested_bytes", "sum"), "count": ("address", "size")}
    by = live.astype({"category": str}).groupby(keys, observed=True, sort=False)
    table = by.agg(**sums, **more).reset_index()
    table.insert(len(keys) + len(sums), "share", table["bytes"] / max(int(table["bytes"].sum()), 1))
    return table.sort_values(["bytes", "count"], ascending=False, kind="stable", ignore_index=True)


# ---------------------------------------------------------------- the answer


def summary(
    snapshot: Snapshot, device: int | None = None, top: int | None = None, moment: Moment | None = None
) -> dict[str, Any]:
    """Say how high the memory stood, what it was made of, who allocated it, and what was lost between blocks.

    Parameters
    ----------
    snapshot : Snapshot
    device : int, optional
        Default: the device with the highest peak.
    top : int, optional
        Only the first so many sites.
    moment : int or {"start", "peak", "oom", "end"}, optional
        What `by_category`, `top_sites` and `fragmentation` look at, as in :func:`at`; default: the peak, or the end
        where no events were recorded.

    Returns
    -------
    dict
        ``peak_bytes`` and ``reserved_at_peak_bytes`` (None where no events were recorded: the end's state is not a
        peak), ``peak_active_bytes, peak_requested_bytes, peak_time_ns, uncertain_bytes`` (how much higher the peak may
        have been, see the module), ``moment`` and ``event``; ``by_category`` and ``top_sites``, lists of
        ``category`` or ``site``, ``bytes, requested_bytes, count, share``, each summing to the allocated bytes of the
        moment, and a line that holds more than half split by its callers or callees; ``fragmentation``, see below;
        ``oom``, the last out-of-memory error or None; ``start`` and ``end``, the
        amounts before the first event and after the last; ``device, devices, events, segments, streams, notes``.

        ``fragmentation``: ``reserved_bytes, allocated_bytes, slack_bytes`` (their difference), ``share`` (of reserved),
        and the parts of the slack: ``pending_bytes`` (freed, waiting for another stream), ``inactive_split_bytes``
        (free, but in segments that hold live blocks), ``releasable_bytes`` (whole free segments, which ``empty_cache``
        gives back); ``largest_free_block_bytes``; ``rounding_bytes``, what active blocks hold beyond what was asked.

    Raises
    ------
    UsageError
        There is no such device, event or out-of-memory error, or `top` is negative.
    """
    if top is not None and top < 0:
        raise UsageError(f"a list cannot have {top} rows")
    device = _device(snapshot, device)
    events = _events(snapshot, device)
    over_time = timeline(snapshot, device)
    recorded = len(events) > 0
    moment = moment if moment is not None else "peak" if recorded else "end"
    event = _event(snapshot, moment, device)
    peak = over_time.iloc[_event(snapshot, "peak", device) + 1] if recorded else None
    unsure = _level(len(events), allocations(snapshot, device), "uncertain_bytes", "free_requested")
    live = at(snapshot, event, device)
    ours = _segments(snapshot, device)
    return {
        "device": device,
        "peak_bytes": None if peak is None else int(peak["allocated_bytes"]),
        "reserved_at_peak_bytes": None if peak is None else int(peak["reserved_bytes"]),
        "peak_active_bytes": int(over_time["active_bytes"].max()) if recorded else None,
        "peak_requested_bytes": int(over_time["requested_bytes"].max()) if recorded else None,
        "peak_time_ns": int(peak["time_ns"]) if peak is not None and snapshot.timed else None,
        "uncertain_bytes": int(unsure.max()) if recorded else 0,
        "moment": moment,
        "event": event,
        "by_category": _summed(live[~live["pending"]], ["category"]).to_dict("records"),
        "top_sites": _described(snapshot, _by_site(_told_apart(snapshot, live))[:top]),
        "fragmentation": _fragmentation(snapshot, device, event),
        "oom": _oom(snapshot, device, over_time, events),
        "start": _amounts(over_time.iloc[0]) if recorded else None,
        "end": _amounts(over_time.iloc[-1]),
        "devices": [_brief(snapshot, d) for d in range(snapshot.devices)],
        "events": len(events),
        "segments": len(ours),
        "streams": sorted({*events["stream"].tolist(), *ours["stream"].tolist()}),
        "notes": _notes(snapshot, device, over_time),
    }


def _amounts(row: pd.Series) -> dict[str, int]:
    return {name: int(row[name]) for name in ("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes")}


def _brief(snapshot: Snapshot, device: int) -> dict[str, Any]:
    over_time = timeline(snapshot, device)
    return {
        "device": device,
        "peak_bytes": int(over_time["allocated_bytes"].max()) if len(over_time) > 1 else None,
        "reserved_bytes": int(over_time["reserved_bytes"].iloc[-1]),
        "events": len(over_time) - 1,
    }


def _described(snapshot: Snapshot, table: pd.DataFrame) -> list[dict[str, Any]]:
    rows: list[dict[Any, Any]] = table.to_dict("records")
    for row in rows:
        stack = snapshot.stack(row.pop("stack"))
        row["frames"] = [_frame_text(*frame) for frame in (_python(stack) or stack)[:12]]
    return rows


def _fragmentation(snapshot: Snapshot, device: int, event: int) -> dict[str, Any]:
    held = segments(snapshot, event, device)
    now = _amounts(timeline(snapshot, device).iloc[event + 1])
    reserved, allocated = now["reserved_bytes"], now["allocated_bytes"]
    used = held["blocks"] > 0
    return {
        "reserved_bytes": reserved,
        "allocated_bytes": allocated,
        "slack_bytes": reserved - allocated,
        "share": (reserved - allocated) / reserved if reserved else None,
        "pending_bytes": now["active_bytes"] - allocated,
        "inactive_split_bytes": int(held.loc[used, "free_bytes"].sum()),
        "releasable_bytes": int(held.loc[~used, "free_bytes"].sum()),
        "largest_free_block_bytes": int(held["largest_free_bytes"].max()) if len(held) else 0,
        "rounding_bytes": now["active_bytes"] - now["requested_bytes"],
    }


def _oom(snapshot: Snapshot, device: int, over_time: pd.DataFrame, events: pd.DataFrame) -> dict[str, Any] | None:
    found = _ooms(events)
    if not len(found):
        return None
    event = int(found[-1])
    row, now = events.iloc[event], over_time.iloc[event + 1]
    free = _fragmentation(snapshot, device, event)
    live = at(snapshot, event, device)
    return {
        "count": len(found),
        "event": event,
        "time_ns": int(row["time_ns"]) if snapshot.timed else None,
        "requested_bytes": int(row["size_bytes"]),
        "device_free_bytes": int(row["device_free_bytes"]) if row["device_free_bytes"] >= 0 else None,
        "allocated_bytes": int(now["allocated_bytes"]),
        "reserved_bytes": int(now["reserved_bytes"]),
        "cached_free_bytes": free["inactive_split_bytes"] + free["releasable_bytes"],
        "largest_free_block_bytes": free["largest_free_block_bytes"],
        "site": str(_site_of(snapshot, np.array([row["stack"]], np.int64))[0]),
        "by_category": _summed(live[~live["pending"]], ["category"]).to_dict("records"),
    }


def _notes(snapshot: Snapshot, device: int, over_time: pd.DataFrame) -> list[str]:
    """Say what the snapshot cannot tell."""
    recorded = len(over_time) > 1
    before = int((allocations(snapshot, device)["first"] < 0).sum())
    ours, ended = _segments(snapshot, device), over_time.iloc[-1]
    notes = {
        "no events were recorded: there is no peak, and this is the state at the end": not recorded,
        f"{count_text(before, 'block')} from before the first event; an earlier peak is not in this snapshot": recorded
        and before > 0,
        "no call stacks were recorded, so nothing can be attributed": not len(snapshot.stack_frames),
    }
    for counter in ("allocated_bytes", "active_bytes"):
        said = (
            f"the events end at {ended[counter]:,} {counter.replace('_', ' ')}, torch's own counter says "
            f"{ours[counter].sum():,}: some kinds of event were not recorded"
        )
        notes[said] = bool((ours[counter] >= 0).all()) and ours[counter].sum() != ended[counter]
    return [said for said, holds in notes.items() if holds]
