"""Where the memory went, from a snapshot of PyTorch's caching allocator.

Four amounts, as ``torch.cuda.memory_stats`` counts them: *requested*, the bytes that were asked for; *allocated*, the
blocks that hold them, from allocation to ``free_requested``; *active*, the same until ``free_completed`` (a block that
another stream still uses is active, no longer allocated); *reserved*, all segments.

:mod:`nsightkit.analysis.memory.blocks` reconstructs them, and :mod:`nsightkit.analysis.memory.categories` says for what
a block was allocated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core.text import count_text
from nsightkit.analysis.memory.blocks import events_of, free_space, held_blocks, segments_of, total_by_event
from nsightkit.analysis.memory.categories import CATEGORIES, categorize, sites_of
from nsightkit.errors import UsageError
from nsightkit.trace.snapshot import Snapshot

__all__ = ["CATEGORIES", "allocations", "at", "bands", "growth", "ranges", "sites", "summary", "timeline"]

#: What adds to the reserved bytes, and what takes from them.
_RESERVING = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_Ints = npt.NDArray[np.int64]
Moment = int | Literal["start", "peak", "oom", "end"]


# ---------------------------------------------------------------- over time


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
        ``address, requested_bytes, size_bytes`` (of the block), ``first, free_requested, free_completed`` (rows of the
        device's events: the event that begins it, or -1 if it is older than the first, and the events that end it, or
        the number of events if it is there at the end), ``stack, category``. In order of `first`, then of address.

    Raises
    ------
    UsageError
        The snapshot has no such device.
    """
    device = _device(snapshot, device)

    def compute() -> pd.DataFrame:
        table = held_blocks(snapshot, device)
        return table.assign(category=categorize(snapshot, device, table))

    allocations: pd.DataFrame = snapshot.derived(("allocations", device), compute)
    return allocations


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
        ``event`` (-1: the state before the first), ``allocated_bytes, active_bytes, requested_bytes, reserved_bytes``.
        ``requested_bytes`` are those of active blocks, as torch counts them.

    Raises
    ------
    UsageError
        The snapshot has no such device.
    """
    device = _device(snapshot, device)

    def compute() -> pd.DataFrame:
        events = events_of(snapshot, device)
        blocks = allocations(snapshot, device)
        count = len(events)
        # What is reserved is known at the end, and walked back from there.
        signs = events["action"].astype(object).map(_RESERVING).fillna(0)
        changes = signs.astype(np.int64) * events["size_bytes"]
        change = np.append(0, np.cumsum(changes))
        at_end = int(segments_of(snapshot, device)["total_bytes"].sum())
        table = pd.DataFrame({"event": np.arange(-1, count)})
        table["allocated_bytes"] = total_by_event(count, blocks, "size_bytes", "free_requested")
        table["active_bytes"] = total_by_event(count, blocks, "size_bytes", "free_completed")
        table["requested_bytes"] = total_by_event(count, blocks, "requested_bytes", "free_completed")
        table["reserved_bytes"] = at_end + change - change[-1]
        return table

    amounts: pd.DataFrame = snapshot.derived(("timeline", device), compute)
    return amounts


def _device(snapshot: Snapshot, device: int | None) -> int:
    """Give the device that was asked for, or else the one with the highest peak."""
    devices = range(snapshot.devices)
    if not devices:
        raise UsageError("the snapshot is empty: no device, no segment, no event")
    if device is None:
        peaks = [timeline(snapshot, number)["allocated_bytes"].max() for number in devices]
        return int(np.argmax(peaks))
    if device not in devices:
        raise UsageError(f"the snapshot has no device {device}, only devices 0 to {devices[-1]}")
    return device


def bands(snapshot: Snapshot, device: int | None = None, top: int = 1000, points: int = 1500) -> pd.DataFrame:
    """Stack the largest allocations over time: what PyTorch's memory_viz draws.

    Each allocation is a band as high as its block; it lies on the bands that began before it, and sinks when one of
    them goes.

    Parameters
    ----------
    snapshot : Snapshot
    device : int, optional
        Default: the device with the highest peak.
    top : int, default 1000
        How many allocations get a band; all others are one band on top.
    points : int, default 1500
        In how many stretches of equally many events the band of the others is given, each at its highest total.

    Returns
    -------
    DataFrame
        ``band`` (from the bottom up; the last is the others'), ``from_event, to_event`` (the first and one past the
        last after which it lies there), ``bottom_bytes, top_bytes, category`` (missing for the others).

    Raises
    ------
    UsageError
        The snapshot has no such device.
    """
    blocks = allocations(snapshot, device)
    allocated = timeline(snapshot, device)["allocated_bytes"].to_numpy()
    count = len(allocated) - 1
    lasting = blocks[blocks["first"] < blocks["free_requested"]]
    largest = lasting.nlargest(top, "size_bytes").sort_index()
    first = largest["first"].to_numpy()
    last = largest["free_requested"].to_numpy()
    size = largest["size_bytes"].to_numpy()
    moments = np.unique([-1, count, *first, *last])
    # One row for each moment, one column for each band.
    is_live = (first <= moments[:, None]) & (moments[:, None] < last)
    tops = np.cumsum(is_live * size, axis=1)
    bottoms = np.where(is_live, tops - size, -1)
    moves = np.diff(bottoms, axis=0, prepend=-1) != 0
    band, row = np.nonzero((is_live & moves).T)
    table = pd.DataFrame({"band": band, "from_event": moments[row]})
    next_move = table.groupby("band")["from_event"].shift(-1)
    table["to_event"] = next_move.fillna(pd.Series(last[band])).astype(np.int64)
    table["bottom_bytes"] = bottoms[row, band]
    table["top_bytes"] = tops[row, band]
    table["category"] = largest["category"].to_numpy()[band]

    heights = (is_live * size).sum(axis=1)
    even = np.floor(np.linspace(-1, count, points, endpoint=False))
    cuts = np.union1d(moments[:-1], even.astype(np.int64))
    moment = np.searchsorted(moments, cuts, side="right") - 1
    others = pd.DataFrame({"band": len(largest), "from_event": cuts})
    others["to_event"] = np.append(cuts[1:], count)
    others["bottom_bytes"] = heights[moment]
    others["top_bytes"] = np.maximum.reduceat(allocated, cuts + 1)
    others["category"] = None
    return pd.concat([table, others], ignore_index=True)


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
        The device or event does not exist, or the snapshot holds no out-of-memory error.
    """
    event = _event(snapshot, moment, device)
    blocks = allocations(snapshot, device)
    is_live = (blocks["first"] <= event) & (event < blocks["free_completed"])
    live = blocks[is_live].copy()
    live["pending"] = live["free_requested"] <= event
    live["site"] = sites_of(snapshot, live["stack"].to_numpy())
    return live.sort_values(["size_bytes", "address"], ascending=[False, True], ignore_index=True)


def _event(snapshot: Snapshot, moment: Moment | str, device: int | None) -> int:
    """Give the number of the event after which a moment is; -1 for the state before the first."""
    device = _device(snapshot, device)
    events = events_of(snapshot, device)
    if moment == "start":
        return -1
    if moment == "end":
        return len(events) - 1
    if moment == "peak":
        return int(timeline(snapshot, device)["allocated_bytes"].argmax()) - 1
    if moment == "oom":
        failures = np.flatnonzero(events["action"] == "oom")
        if not len(failures):
            raise UsageError(f"the snapshot holds no out-of-memory error of device {device}")
        return int(failures[-1])
    if isinstance(moment, str) or not -1 <= moment < len(events):
        raise UsageError(f"unknown moment {moment!r}: give peak, oom, start, end or an event below {len(events)}")
    return moment


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
        ``category, bytes, count, share`` (of all allocated bytes, 0 to 1), the most bytes first. A line that made
        blocks of two categories has two rows.

    Raises
    ------
    UsageError
        The device or event does not exist.
    """
    return _summed(at(snapshot, moment, device), ["site", "category"])


def _summed(live: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Sum allocated blocks by `keys`, the most bytes first, and give their shares."""
    groups = live[~live["pending"]].groupby(keys, sort=False)["size_bytes"]
    table = groups.agg(bytes="sum", count="size").reset_index()
    table["share"] = table["bytes"] / max(int(table["bytes"].sum()), 1)
    return table.sort_values(["bytes", "count"], ascending=False, kind="stable", ignore_index=True)


# ---------------------------------------------------------------- from moment to moment


def ranges(snapshot: Snapshot, match: str = "", device: int | None = None) -> pd.DataFrame:
    """Find the events between which each recorded range lies.

    It does if ``_record_memory_history`` got ``global_record_annotations=True``, for every ``record_function``.

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
        The snapshot has no such device.
    """
    device = _device(snapshot, device)
    marks = snapshot.annotations
    is_chosen = (marks["device"] == device) & marks["name"].str.contains(match)
    marks = marks[is_chosen].sort_values("time_ns", kind="stable")
    rows = []
    begins: dict[str, list[int]] = defaultdict(list)
    mark: Any
    for mark in marks.itertuples():
        if mark.stage.upper() == "START":
            begins[mark.name].append(mark.time_ns)
        elif begins[mark.name]:  # ranges of one name may nest
            rows.append((mark.name, begins[mark.name].pop(), mark.time_ns))
    table = pd.DataFrame(rows, columns=["name", "begin", "end"])
    table = table.sort_values("begin", kind="stable", ignore_index=True)
    time = events_of(snapshot, device)["time_ns"].to_numpy()
    # Times are whole microseconds: an event at the time of a range's end was before it, as freeing is.
    table["from_event"] = np.searchsorted(time, table["begin"], side="left") - 1
    table["to_event"] = np.searchsorted(time, table["end"], side="right") - 1
    return table[["name", "from_event", "to_event"]]


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
        ``site, category, grown_bytes`` (from the first moment to the last) and ``least_bytes`` (the smallest growth
        from one moment to the next: above 0 only for what grew every time), the largest `least_bytes` first.

    Raises
    ------
    UsageError
        The device or event does not exist, or there is only one moment.
    """
    if len(moments) < 2:
        raise UsageError("growth needs two or more moments")
    levels = {}
    for number, moment in enumerate(moments):
        levels[number] = sites(snapshot, moment, device).set_index(["site", "category"])["bytes"]
    held = pd.DataFrame(levels).fillna(0)
    steps = held.diff(axis=1).iloc[:, 1:].astype(np.int64)
    table = steps.index.to_frame(index=False)
    table["grown_bytes"] = steps.sum(axis=1).to_numpy()
    table["least_bytes"] = steps.min(axis=1).to_numpy()
    has_changed = (steps != 0).any(axis=1).to_numpy()
    table = table[has_changed]
    return table.sort_values(["least_bytes", "grown_bytes"], ascending=False, kind="stable", ignore_index=True)


# ---------------------------------------------------------------- the answer


def summary(
    snapshot: Snapshot, device: int | None = None, top: int | None = None, moment: Moment | None = None
) -> dict[str, Any]:
    """Show how high the memory stood, what it was made of, who allocated it, and what was lost between blocks.

    Parameters
    ----------
    snapshot : Snapshot
    device : int, optional
        Default: the device with the highest peak.
    top : int, optional
        Only the first so many sites.
    moment : int or {"start", "peak", "oom", "end"}, optional
        What `by_category`, `top_sites` and `fragmentation` look at, as in :func:`at`; default: the peak, or the end
        if no events were recorded.

    Returns
    -------
    dict
        ``peak_bytes`` and ``reserved_at_peak_bytes`` (None if no events were recorded: the end's state is not a
        peak); ``by_category`` and ``top_sites``, lists of ``category`` or ``site``, ``bytes, count, share``, each
        summing to the allocated bytes of the moment; ``fragmentation``, see below; ``oom``, the last out-of-memory
        error or None; ``moment, device, devices`` (how many), ``events`` (how many), ``notes``.

        ``fragmentation``: ``reserved_bytes, allocated_bytes, slack_bytes`` (their difference), ``share`` (of reserved),
        and the parts of the slack: ``pending_bytes`` (freed, waiting for another stream), ``inactive_split_bytes``
        (free, but in segments that hold live blocks), ``releasable_bytes`` (whole free segments, which ``empty_cache``
        gives back); ``largest_free_block_bytes``.

    Raises
    ------
    UsageError
        The device, event or out-of-memory error does not exist.
    """
    device = _device(snapshot, device)
    over_time = timeline(snapshot, device)
    is_recorded = len(over_time) > 1
    if moment is None:
        moment = "peak" if is_recorded else "end"
    live = at(snapshot, moment, device)
    categories = _summed(live, ["category"])
    lines = _summed(live, ["site", "category"])[:top]
    answer: dict[str, Any] = {"peak_bytes": None, "reserved_at_peak_bytes": None}
    if is_recorded:
        peak = over_time.iloc[over_time["allocated_bytes"].argmax()]
        answer["peak_bytes"] = int(peak["allocated_bytes"])
        answer["reserved_at_peak_bytes"] = int(peak["reserved_bytes"])
    answer["by_category"] = categories.to_dict("records")
    answer["top_sites"] = lines.to_dict("records")
    answer["fragmentation"] = _fragmentation(snapshot, device, moment)
    answer["oom"] = _out_of_memory(snapshot, device)
    answer["moment"] = moment
    answer["device"] = device
    answer["devices"] = snapshot.devices
    answer["events"] = len(over_time) - 1
    answer["notes"] = _notes(snapshot, device)
    return answer


def _fragmentation(snapshot: Snapshot, device: int, moment: Moment) -> dict[str, Any]:
    event = _event(snapshot, moment, device)
    live = at(snapshot, event, device)
    now = timeline(snapshot, device).iloc[event + 1].astype(object)
    reserved = now["reserved_bytes"]
    allocated = now["allocated_bytes"]
    slack = reserved - allocated
    lost = {"reserved_bytes": reserved, "allocated_bytes": allocated, "slack_bytes": slack}
    lost["share"] = slack / reserved if reserved else None
    lost["pending_bytes"] = now["active_bytes"] - allocated
    return lost | free_space(snapshot, device, event, live)


def _out_of_memory(snapshot: Snapshot, device: int) -> dict[str, Any] | None:
    """Describe the last out-of-memory error."""
    events = events_of(snapshot, device)
    if not (events["action"] == "oom").any():
        return None
    failure = events.iloc[_event(snapshot, "oom", device)]
    oom = _fragmentation(snapshot, device, "oom")
    device_free = int(failure["device_free_bytes"])
    oom["site"] = sites_of(snapshot, failure[["stack"]].to_numpy(np.int64))[0]
    oom["requested_bytes"] = int(failure["size_bytes"])
    oom["device_free_bytes"] = device_free if device_free >= 0 else None
    oom["cached_free_bytes"] = oom["inactive_split_bytes"] + oom["releasable_bytes"]
    return oom


def _notes(snapshot: Snapshot, device: int) -> list[str]:
    """List what the snapshot does not hold."""
    over_time = timeline(snapshot, device)
    before = int((allocations(snapshot, device)["first"] < 0).sum())
    notes = []
    if len(over_time) == 1:
        notes.append("no events were recorded, so the peak is unknown and this is the state at the end")
    elif before:
        blocks = count_text(before, "block")
        notes.append(f"{blocks} from before the first event; an earlier peak is not in this snapshot")
    if not len(snapshot.stack_frames):
        notes.append("no call stacks were recorded, so nothing can be attributed")
    counted = segments_of(snapshot, device)["allocated_bytes"]
    at_end = over_time["allocated_bytes"].iloc[-1]
    if (counted >= 0).all() and counted.sum() != at_end:
        notes.append(f"the events end at {at_end:,} allocated bytes, torch's own counter at {counted.sum():,}")
    return notes
