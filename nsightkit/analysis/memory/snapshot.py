"""Where the memory went, from a snapshot of PyTorch's caching allocator.

Four amounts, as ``torch.cuda.memory_stats`` counts them: *requested*, the bytes that were asked for; *allocated*, the
blocks that hold them, from allocation to ``free_requested``; *active*, the same until ``free_completed`` (a block that
another stream still uses is active, no longer allocated); *reserved*, all segments.

:mod:`nsightkit.analysis.memory.blocks` reconstructs them, and :mod:`nsightkit.analysis.memory.categories` says for what
a block was allocated.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import pandas as pd

from nsightkit.analysis.memory.blocks import events_of, free_space, held_blocks, segments_of, total_by_event
from nsightkit.analysis.memory.categories import categorize, sites_of
from nsightkit.errors import UsageError
from nsightkit.text import Json
from nsightkit.trace.model import memoised
from nsightkit.trace.snapshot import Snapshot

#: What adds to the reserved bytes, and what takes from them.
_RESERVING = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
Moment = int | Literal["start", "peak", "oom", "end"]


# ---------------------------------------------------------------- over time


@memoised
def allocations(snapshot: Snapshot, device: int) -> pd.DataFrame:
    """List every allocation the snapshot knows of, with its lifetime, size and category.

    Parameters
    ----------
    snapshot : Snapshot
    device : int

    Returns
    -------
    DataFrame
        ``address, requested_bytes, size_bytes`` (of the block), ``first, free_requested, free_completed`` (rows of the
        device's events: the event that begins it, or -1 if it is older than the first, and the events that end it, or
        the number of events if it is there at the end), ``stack, category``. In order of `first`, then of address.
    """
    table = held_blocks(snapshot, device)
    return table.assign(category=categorize(snapshot, device, table))


@memoised
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
    device = _chosen_device(snapshot, device)
    events = events_of(snapshot, device)
    blocks = allocations(snapshot, device)
    count = len(events)
    # What is reserved is known at the end, and walked back from there.
    signs = events["action"].astype(object).map(_RESERVING).fillna(0).astype(np.int64)
    since_start = np.append(0, (signs * events["size_bytes"]).cumsum())
    at_end = int(segments_of(snapshot, device)["total_bytes"].sum())
    table = pd.DataFrame({"event": np.arange(-1, count)})
    table["allocated_bytes"] = total_by_event(count, blocks, "size_bytes", "free_requested")
    table["active_bytes"] = total_by_event(count, blocks, "size_bytes", "free_completed")
    table["requested_bytes"] = total_by_event(count, blocks, "requested_bytes", "free_completed")
    table["reserved_bytes"] = at_end - since_start[-1] + since_start
    return table


def _chosen_device(snapshot: Snapshot, device: int | None) -> int:
    """Give the device that was asked for, or else the one with the highest peak."""
    if not snapshot.devices:
        raise UsageError("the snapshot is empty: no device, no segment, no event")
    if device is None:
        peaks = [timeline(snapshot, number)["allocated_bytes"].max() for number in range(snapshot.devices)]
        return int(np.argmax(peaks))
    if not 0 <= device < snapshot.devices:
        raise UsageError(f"the snapshot has no device {device}, only devices 0 to {snapshot.devices - 1}")
    return device


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
        The rows of ``allocations`` with ``site`` (who allocated it) and ``pending`` (freed, but waiting for another
        stream: active, not allocated), the largest first.

    Raises
    ------
    UsageError
        The device or event does not exist, or the snapshot holds no out-of-memory error.
    """
    device = _chosen_device(snapshot, device)
    event = _event_number(snapshot, moment, device)
    blocks = allocations(snapshot, device)
    is_live = (blocks["first"] <= event) & (event < blocks["free_completed"])
    live = blocks[is_live].copy()
    live["pending"] = live["free_requested"] <= event
    live["site"] = sites_of(snapshot, live["stack"].to_numpy())
    return live.sort_values(["size_bytes", "address"], ascending=[False, True], ignore_index=True)


def _event_number(snapshot: Snapshot, moment: Moment | str, device: int) -> int:
    """Give the number of the event that a moment follows; -1 for the state before the first event."""
    over_time = timeline(snapshot, device)
    # The first row is the state before the first event, so row n is that after event n - 1.
    count = len(over_time) - 1
    named = {"start": -1, "end": count - 1, "peak": int(over_time["allocated_bytes"].argmax()) - 1}
    failures = np.flatnonzero(events_of(snapshot, device)["action"] == "oom")
    if len(failures):
        named["oom"] = int(failures[-1])
    event = named.get(moment) if isinstance(moment, str) else moment
    if event is None or not -1 <= event < count:
        raise UsageError(
            f"the snapshot has no moment {moment!r}: give {', '.join(named)} or the number of an event below {count}"
        )
    return event


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
    return _summed_by(at(snapshot, moment, device), ["site", "category"])


def _summed_by(live: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Sum the allocated blocks of a moment by some columns: ``bytes, count, share``, the most bytes first."""
    groups = live[~live["pending"]].groupby(keys, sort=False)["size_bytes"]
    table = groups.agg(bytes="sum", count="size").reset_index()
    table["share"] = table["bytes"] / max(int(table["bytes"].sum()), 1)
    return table.sort_values(["bytes", "count"], ascending=False, kind="stable", ignore_index=True)


# ---------------------------------------------------------------- from moment to moment


def growth(snapshot: Snapshot, match: str = "^step$", device: int | None = None) -> pd.DataFrame:
    """Follow what each line holds at the end of each step: a leak grows every time.

    Ranges are in a snapshot if ``_record_memory_history`` got ``global_record_annotations=True``, for every
    ``record_function``.

    Parameters
    ----------
    snapshot : Snapshot
    match : str
        A regular expression that finds the ranges of steps by their names.
    device : int, optional
        Default: the device with the highest peak.

    Returns
    -------
    DataFrame
        ``site, category, grown_bytes`` (from the first end to the last) and ``least_bytes`` (the smallest growth
        from one end to the next: above 0 only for what grew every time), the largest `least_bytes` first.

    Raises
    ------
    UsageError
        The snapshot has no such device.
    """
    device = _chosen_device(snapshot, device)
    marks = snapshot.annotations
    is_step_end = marks["name"].str.contains(match) & (marks["stage"].str.upper() == "END")
    end_times = marks["time_ns"][is_step_end & (marks["device"] == device)]
    # Times are whole microseconds: an event at the time of a range's end was before it, as freeing is.
    event_times = events_of(snapshot, device)["time_ns"]
    last_events = np.searchsorted(event_times, np.sort(end_times), side="right") - 1
    bytes_at_end = {}
    for step, event in enumerate(last_events.tolist()):
        bytes_at_end[step] = sites(snapshot, event, device).set_index(["site", "category"])["bytes"]
    # A row per line and category, a column per step. Without a step before it, the first column has no growth.
    held_bytes = pd.DataFrame(bytes_at_end).fillna(0)
    grown = held_bytes.diff(axis=1).iloc[:, 1:].astype(np.int64)
    grown = grown[grown.any(axis=1)]
    table = pd.DataFrame({"grown_bytes": grown.sum(axis=1), "least_bytes": grown.min(axis=1)}).reset_index()
    # Without any step the table lacks the columns of lines and categories.
    table = table.reindex(columns=["site", "category", "grown_bytes", "least_bytes"])
    return table.sort_values(["least_bytes", "grown_bytes"], ascending=False, kind="stable", ignore_index=True)


# ---------------------------------------------------------------- the answer


def summary(
    snapshot: Snapshot, device: int | None = None, top: int | None = None, moment: Moment | None = None
) -> Json:
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
        (free, but in expandable segments or in segments that hold live blocks), ``releasable_bytes`` (whole free
        segments, which ``empty_cache`` gives back); ``largest_free_block_bytes`` (None where segments are expandable).

    Raises
    ------
    UsageError
        The device, event or out-of-memory error does not exist.
    """
    device = _chosen_device(snapshot, device)
    over_time = timeline(snapshot, device)
    count = len(over_time) - 1
    peak_bytes = None
    reserved_bytes = None
    if count:
        peak = over_time.iloc[over_time["allocated_bytes"].argmax()]
        peak_bytes = int(peak["allocated_bytes"])
        reserved_bytes = int(peak["reserved_bytes"])
    if moment is None:
        moment = "peak" if count else "end"
    live = at(snapshot, moment, device)
    return {
        "peak_bytes": peak_bytes,
        "reserved_at_peak_bytes": reserved_bytes,
        "by_category": _summed_by(live, ["category"]).to_dict("records"),
        "top_sites": _summed_by(live, ["site", "category"])[:top].to_dict("records"),
        "fragmentation": _fragmentation(snapshot, device, moment),
        "oom": _last_out_of_memory(snapshot, device),
        "moment": moment,
        "device": device,
        "devices": snapshot.devices,
        "events": count,
        "notes": _notes_on_snapshot(snapshot, device),
    }


def _fragmentation(snapshot: Snapshot, device: int, moment: Moment) -> Json:
    """Divide what is reserved but not allocated at a moment; see :func:`summary`."""
    event = _event_number(snapshot, moment, device)
    # Row 0 is before the first event. JSON takes Python's integers, not NumPy's.
    amounts = timeline(snapshot, device).iloc[event + 1].astype(object)
    reserved = amounts["reserved_bytes"]
    allocated = amounts["allocated_bytes"]
    active = amounts["active_bytes"]
    slack = reserved - allocated
    releasable, largest_free = free_space(snapshot, device, event, at(snapshot, event, device))
    return {
        "reserved_bytes": reserved,
        "allocated_bytes": allocated,
        "slack_bytes": slack,
        "share": slack / reserved if reserved else None,
        "pending_bytes": active - allocated,
        "inactive_split_bytes": reserved - active - releasable,
        "releasable_bytes": releasable,
        "largest_free_block_bytes": largest_free,
    }


def _last_out_of_memory(snapshot: Snapshot, device: int) -> Json | None:
    """Describe the last out-of-memory error: who asked for how much, and what was free. None without one."""
    events = events_of(snapshot, device)
    failures = events[events["action"] == "oom"]
    if failures.empty:
        return None
    failure = failures.iloc[-1]
    oom = _fragmentation(snapshot, device, "oom")
    device_free = int(failure["device_free_bytes"])
    oom["site"] = sites_of(snapshot, failure[["stack"]].to_numpy(np.int64))[0]
    oom["requested_bytes"] = int(failure["size_bytes"])
    oom["device_free_bytes"] = device_free if device_free >= 0 else None  # -1: not recorded
    oom["cached_free_bytes"] = oom["inactive_split_bytes"] + oom["releasable_bytes"]
    return oom


def _notes_on_snapshot(snapshot: Snapshot, device: int) -> list[str]:
    """List what the snapshot does not hold."""
    has_older_blocks = (allocations(snapshot, device)["first"] < 0).any()
    notes = []
    if events_of(snapshot, device).empty:
        notes.append("no events were recorded, so the peak is unknown and this is the state at the end")
    elif has_older_blocks:
        notes.append("blocks allocated before recording began have no stack; an earlier peak, if any, is not recorded")
    divisions = snapshot.settings.get("roundup_power2_divisions", {})
    if max(divisions.values(), default=0) > 1 or snapshot.settings.get("max_split_size", -1) > 0:
        notes.append("the allocator's settings round blocks up; freed blocks are counted without that")
    if not len(snapshot.stack_frames):
        notes.append("no call stacks were recorded, so nothing can be attributed")
    return notes
