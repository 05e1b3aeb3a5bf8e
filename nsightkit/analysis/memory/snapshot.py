"""Where the memory went, from a snapshot of PyTorch's caching allocator.

Four amounts, as ``torch.cuda.memory_stats`` counts them: *requested*, the bytes that were asked for; *allocated*, the
blocks that hold them, from allocation to ``free_requested``; *active*, the same until ``free_completed`` (a block that
another stream still uses is active, no longer allocated); *reserved*, all segments.

:mod:`nsightkit.analysis.memory.blocks` reconstructs them; the greatest sum of what cannot be known is given as
``uncertain_bytes``. :mod:`nsightkit.analysis.memory.categories` says for what a block was allocated.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core.names import compiled
from nsightkit.analysis.core.text import count_text
from nsightkit.analysis.memory.blocks import (
    events_of,
    held_blocks,
    held_segments,
    mapped_ranges,
    segments_of,
    total_by_event,
)
from nsightkit.analysis.memory.categories import CATEGORIES, categorize, frame_text, is_python, sites_of
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

_AMOUNTS = ("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes")
#: What adds to the reserved bytes, and what takes from them.
_RESERVING = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_FRAMES = 12
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
        ``address, requested_bytes, size_bytes`` (the block), ``uncertain_bytes`` (how much larger it may be),
        ``first, free_requested, free_completed`` (rows of the device's events: the event that begins it, -1 where that
        was before the first event, and those that end it, the number of events where it is there at the end),
        ``stream, stack, category``. In order of `first`, then of address.

    Raises
    ------
    UsageError
        The snapshot has no such device.
    """
    device = _device(snapshot, device)
    allocations: pd.DataFrame = snapshot.derived(("allocations", device), lambda: _allocations(snapshot, device))
    return allocations


def _allocations(snapshot: Snapshot, device: int) -> pd.DataFrame:
    table = held_blocks(snapshot, device)
    category = categorize(snapshot, device, table)
    return table.assign(category=pd.Categorical(category, categories=pd.Index(CATEGORIES)))


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
    device = _device(snapshot, device)
    return _timeline(snapshot, device)


def _timeline(snapshot: Snapshot, device: int) -> pd.DataFrame:
    amounts: pd.DataFrame = snapshot.derived(("timeline", device), lambda: _amounts_by_event(snapshot, device))
    return amounts


def _amounts_by_event(snapshot: Snapshot, device: int) -> pd.DataFrame:
    events = events_of(snapshot, device)
    blocks = snapshot.derived(("allocations", device), lambda: _allocations(snapshot, device))
    count = len(events)
    time = events["time_ns"].to_numpy()
    # What is reserved is known at the end, and walked back from there.
    signs = events["action"].astype(object).map(_RESERVING).fillna(0).to_numpy(np.int64)
    change = np.append(0, np.cumsum(signs * events["size_bytes"].to_numpy()))
    at_end = int(segments_of(snapshot, device)["total_bytes"].sum())
    actions = np.append(-1, events["action"].cat.codes).astype(np.int64)
    return pd.DataFrame(
        {
            "event": np.arange(-1, count),
            "time_ns": np.append(time[:1], time) if count else np.array([-1]),
            "action": pd.Categorical.from_codes(actions, categories=pd.Index(ACTIONS)),
            "allocated_bytes": total_by_event(count, blocks, "size_bytes", "free_requested"),
            "active_bytes": total_by_event(count, blocks, "size_bytes", "free_completed"),
            "requested_bytes": total_by_event(count, blocks, "requested_bytes", "free_completed"),
            "reserved_bytes": at_end + change - change[-1],
        }
    )


def _device(snapshot: Snapshot, device: int | None) -> int:
    """Give the device that was asked for, or else the one with the highest peak."""
    count = snapshot.devices
    if device is not None:
        if not 0 <= device < count:
            there = "device 0" if count == 1 else f"devices 0 to {count - 1}"
            raise UsageError(f"the snapshot has no device {device}, only {there}")
        return device
    if count == 0:
        raise UsageError("the snapshot is empty: no device, no segment, no event")
    peaks = [int(_timeline(snapshot, number)["allocated_bytes"].max()) for number in range(count)]
    return int(np.argmax(peaks))


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
    allocated = timeline(snapshot, device)["allocated_bytes"].to_numpy()
    count = len(allocated) - 1
    largest = blocks[blocks["first"] < blocks["free_requested"]].nlargest(top, "size_bytes", keep="first").sort_index()
    moments = np.unique([-1, count, *largest["first"], *largest["free_requested"]])
    placed, heights = _stacked(largest, moments.tolist())
    table = pd.DataFrame(placed, columns=["band", "from_event", "to_event", "bottom_bytes", "top_bytes"])
    table = table.sort_values(["band", "from_event"], ignore_index=True)
    table["category"] = largest["category"].astype(object).to_numpy()[table["band"]]
    table["site"] = sites_of(snapshot, largest["stack"].to_numpy())[table["band"]]
    even = np.floor(np.linspace(-1, count, points, endpoint=False)).astype(np.int64)
    cuts = np.union1d(moments[:-1], even)
    others = pd.DataFrame(
        {
            "band": len(largest),
            "from_event": cuts,
            "to_event": np.append(cuts[1:], count),
            "bottom_bytes": np.array(heights)[np.searchsorted(moments[:-1], cuts, side="right") - 1],
            "top_bytes": np.maximum.reduceat(allocated, cuts + 1),
            "category": None,
            "site": "smaller allocations",
        }
    )
    return pd.concat([table, others], ignore_index=True)


def _stacked(blocks: pd.DataFrame, moments: list[int]) -> tuple[list[Any], list[int]]:
    """Lay blocks on those that began before them; give the places of each, and how high all are after each moment."""
    rows = list(zip(blocks["size_bytes"], blocks["first"], blocks["free_requested"], strict=True))
    live: list[int] = []
    place: dict[int, tuple[int, int]] = {}  # of each band, its bottom and since when it lies there
    placed = []
    heights = []
    begun = 0
    for moment in moments:
        while begun < len(rows) and rows[begun][1] <= moment:
            live.append(begun)
            begun += 1
        height = 0
        for band in live:
            size, _, last = rows[band]
            bottom, since = place.get(band, (-1, moment))
            if band in place and (moment >= last or bottom != height):
                placed.append((band, since, moment, bottom, bottom + size))
            if moment < last:
                if bottom != height:
                    place[band] = (height, moment)
                height += size
        live = [band for band in live if moment < rows[band][2]]
        heights.append(height)
    return placed, heights


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
    live = live.assign(pending=live["free_requested"] <= event, site=sites_of(snapshot, live["stack"].to_numpy()))
    return live.sort_values(["size_bytes", "address"], ascending=[False, True], ignore_index=True)


def _event(snapshot: Snapshot, moment: Moment, device: int) -> int:
    """Give the number of the event after which a moment is; -1 for the state before the first."""
    count = len(events_of(snapshot, device))
    if isinstance(moment, int):
        if not -1 <= moment < count:
            raise UsageError(f"there is no event {moment}: events of device {device} run from 0 to {count - 1}")
        return moment
    if moment == "start":
        return -1
    if moment == "end":
        return count - 1
    if moment == "peak":
        return int(_timeline(snapshot, device)["allocated_bytes"].to_numpy().argmax()) - 1
    if moment == "oom":
        failures = _failures(snapshot, device)
        if not failures:
            raise UsageError(f"the snapshot holds no out-of-memory error of device {device}")
        return failures[-1]
    raise UsageError(f"a moment is an event's number, start, peak, oom or end, not {moment!r}")


def _failures(snapshot: Snapshot, device: int) -> list[int]:
    """List the events that are out-of-memory errors."""
    return np.flatnonzero(events_of(snapshot, device)["action"] == "oom").tolist()


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
    held = held_segments(snapshot, device)
    held = held[(held["first"] <= event) & (event < held["free_completed"])].assign(expandable=False)
    rows: list[Any] = held[["address", "total_bytes", "stream", "expandable"]].to_dict("records")
    rows += mapped_ranges(snapshot, device, event)
    rows.sort(key=lambda row: row["address"])
    live = at(snapshot, event, device).sort_values("address", kind="stable")
    addresses = live["address"].tolist()
    sizes = live["size_bytes"].tolist()
    pending = live["pending"].tolist()
    for row in rows:
        end = row["address"] + row["total_bytes"]
        row |= {"allocated_bytes": 0, "pending_bytes": 0, "free_bytes": 0, "largest_free_bytes": 0, "blocks": 0}
        position = row["address"]  # free space lies before each live block and after the last
        begin = bisect_left(addresses, position)
        for block in range(begin, bisect_left(addresses, end)):
            row["pending_bytes" if pending[block] else "allocated_bytes"] += sizes[block]
            row["blocks"] += 1
            row["largest_free_bytes"] = max(row["largest_free_bytes"], addresses[block] - position)
            position = addresses[block] + sizes[block]
        row["largest_free_bytes"] = max(row["largest_free_bytes"], end - position)
        row["free_bytes"] = row["total_bytes"] - row["allocated_bytes"] - row["pending_bytes"]
    columns = ["address", "total_bytes", "stream", "expandable", "allocated_bytes", "pending_bytes", "free_bytes"]
    table = pd.DataFrame(rows, columns=[*columns, "largest_free_bytes", "blocks"])
    return table.astype({"expandable": bool} | dict.fromkeys(table.columns.drop("expandable"), np.int64))


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
    allocated = live[~live["pending"]]
    table = _summed(allocated, ["site", "category"])
    # `live` is in order of size: the first row of a group is one of its largest blocks.
    largest = allocated.astype({"category": str}).drop_duplicates(["site", "category"])
    return table.merge(largest[["site", "category", "stack"]], on=["site", "category"], how="left")


def _summed(live: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Sum blocks by `keys`, the most bytes first, and give their shares."""
    groups = live.astype({"category": str}).groupby(keys, observed=True, sort=False)
    table = groups.agg(
        bytes=("size_bytes", "sum"), requested_bytes=("requested_bytes", "sum"), count=("address", "size")
    ).reset_index()
    table["share"] = table["bytes"] / max(int(table["bytes"].sum()), 1)
    return table.sort_values(["bytes", "count"], ascending=False, kind="stable", ignore_index=True)


def _told_apart(snapshot: Snapshot, live: pd.DataFrame) -> pd.DataFrame:
    """Where one line holds most, tell its blocks apart: by the nearest callers that differ, or by callees."""
    held = live.groupby("site")["size_bytes"].sum()
    if held.empty or 2 * held.max() <= held.sum():
        return live
    site = str(held.idxmax())
    is_site = live["site"] == site
    stacks = {}
    for number in live.loc[is_site, "stack"].unique():
        stacks[number] = [frame_text(*frame) for frame in _python_frames(snapshot, number)]
        if site not in stacks[number]:
            return live
    names = {number: name if name == site else f"{name} in {site}" for number, (name, *_) in stacks.items()}
    callers = [frames[frames.index(site) + 1 :] for frames in stacks.values()]
    for level in zip(*callers, strict=False):
        if len(set(level)) > 1:
            names = {number: f"{caller} by {site}" for number, caller in zip(stacks, level, strict=True)}
            break
    return live.assign(site=live["site"].mask(is_site, live["stack"].map(names)))


def _python_frames(snapshot: Snapshot, stack: int) -> list[tuple[str, str, int]]:
    return [frame for frame in snapshot.stack(stack) if is_python(frame[1])]


# ---------------------------------------------------------------- from moment to moment


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
    device = _device(snapshot, device)
    pattern = compiled(match or "", "match")
    time = events_of(snapshot, device)["time_ns"].to_numpy()
    marks = snapshot.annotations
    marks = marks[(marks["device"] == device) & snapshot.timed & (len(time) > 0)]
    marks = marks.sort_values("time_ns", kind="stable")
    rows: list[list[Any]] = []
    open_rows: dict[str, list[list[Any]]] = defaultdict(list)
    for name, stage, time_ns in zip(marks["name"], marks["stage"], marks["time_ns"], strict=True):
        if not pattern.search(name):
            continue
        # Times are whole microseconds: what has a range's end's time was before it, as freeing is.
        if stage.upper() == "START":
            row = [name, int(np.searchsorted(time, time_ns, side="left")) - 1, None]
            rows.append(row)
            open_rows[name].append(row)
        elif open_rows[name]:  # ranges of one name may nest
            open_rows[name].pop()[2] = int(np.searchsorted(time, time_ns, side="right")) - 1
    ended = [row for row in rows if row[2] is not None]
    return pd.DataFrame(ended, columns=["name", "from_event", "to_event"])


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
    held = [sites(snapshot, moment, device).set_index(["site", "category"]) for moment in moments]
    levels = pd.concat([table["bytes"] for table in held], axis=1, keys=range(len(held)))
    levels = levels.fillna(0).astype(np.int64)
    counts = [table["count"].reindex(levels.index).fillna(0).astype(np.int64) for table in (held[0], held[-1])]
    steps = levels.diff(axis=1).iloc[:, 1:].astype(np.int64)
    start, end = levels.iloc[:, 0], levels.iloc[:, -1]
    table = pd.DataFrame(
        {
            "start_bytes": start,
            "end_bytes": end,
            "grown_bytes": end - start,
            "least_bytes": steps.min(axis=1),
            "count": counts[1] - counts[0],
        }
    )
    changed = table[(steps != 0).any(axis=1)].rename_axis(["site", "category"]).reset_index()
    return changed.sort_values(["least_bytes", "grown_bytes"], ascending=False, kind="stable", ignore_index=True)


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
    events = events_of(snapshot, device)
    over_time = timeline(snapshot, device)
    is_recorded = len(events) > 0
    if moment is None:
        moment = "peak" if is_recorded else "end"
    event = _event(snapshot, moment, device)
    live = at(snapshot, event, device)
    own_segments = segments_of(snapshot, device)
    streams = {*events["stream"].tolist(), *own_segments["stream"].tolist()}
    return {
        "device": device,
        **_peak(snapshot, device),
        "moment": moment,
        "event": event,
        "by_category": _by_category(live),
        "top_sites": _described(snapshot, _by_site(_told_apart(snapshot, live))[:top]),
        "fragmentation": _fragmentation(snapshot, device, event),
        "oom": _out_of_memory(snapshot, device),
        "start": _amounts(over_time.iloc[0]) if is_recorded else None,
        "end": _amounts(over_time.iloc[-1]),
        "devices": [_brief(snapshot, number) for number in range(snapshot.devices)],
        "events": len(events),
        "segments": len(own_segments),
        "streams": sorted(streams),
        "notes": _notes(snapshot, device),
    }


def _peak(snapshot: Snapshot, device: int) -> dict[str, int | None]:
    over_time = _timeline(snapshot, device)
    names = ("peak_bytes", "reserved_at_peak_bytes", "peak_active_bytes", "peak_requested_bytes", "peak_time_ns")
    answer: dict[str, int | None] = dict.fromkeys(names)
    answer["uncertain_bytes"] = 0
    if len(over_time) > 1:
        peak = over_time.iloc[_event(snapshot, "peak", device) + 1]
        blocks = allocations(snapshot, device)
        uncertain = total_by_event(len(over_time) - 1, blocks, "uncertain_bytes", "free_requested")
        answer["peak_bytes"] = int(peak["allocated_bytes"])
        answer["reserved_at_peak_bytes"] = int(peak["reserved_bytes"])
        answer["peak_active_bytes"] = int(over_time["active_bytes"].max())
        answer["peak_requested_bytes"] = int(over_time["requested_bytes"].max())
        answer["peak_time_ns"] = int(peak["time_ns"]) if snapshot.timed else None
        answer["uncertain_bytes"] = int(uncertain.max())
    return answer


def _amounts(row: pd.Series) -> dict[str, int]:
    return {name: int(row[name]) for name in _AMOUNTS}


def _brief(snapshot: Snapshot, device: int) -> dict[str, Any]:
    over_time = _timeline(snapshot, device)
    return {
        "device": device,
        "peak_bytes": int(over_time["allocated_bytes"].max()) if len(over_time) > 1 else None,
        "reserved_bytes": int(over_time["reserved_bytes"].iloc[-1]),
        "events": len(over_time) - 1,
    }


def _by_category(live: pd.DataFrame) -> list[dict[Any, Any]]:
    rows: list[dict[Any, Any]] = _summed(live[~live["pending"]], ["category"]).to_dict("records")
    return rows


def _described(snapshot: Snapshot, table: pd.DataFrame) -> list[dict[Any, Any]]:
    rows: list[dict[Any, Any]] = table.to_dict("records")
    for row in rows:
        stack = row.pop("stack")
        frames = _python_frames(snapshot, stack) or snapshot.stack(stack)
        row["frames"] = [frame_text(*frame) for frame in frames[:_FRAMES]]
    return rows


def _fragmentation(snapshot: Snapshot, device: int, event: int) -> dict[str, Any]:
    held = segments(snapshot, event, device)
    now = _amounts(_timeline(snapshot, device).iloc[event + 1])
    reserved, allocated = now["reserved_bytes"], now["allocated_bytes"]
    is_used = held["blocks"] > 0
    return {
        "reserved_bytes": reserved,
        "allocated_bytes": allocated,
        "slack_bytes": reserved - allocated,
        "share": (reserved - allocated) / reserved if reserved else None,
        "pending_bytes": now["active_bytes"] - allocated,
        "inactive_split_bytes": int(held.loc[is_used, "free_bytes"].sum()),
        "releasable_bytes": int(held.loc[~is_used, "free_bytes"].sum()),
        "largest_free_block_bytes": int(held["largest_free_bytes"].max()) if len(held) else 0,
        "rounding_bytes": now["active_bytes"] - now["requested_bytes"],
    }


def _out_of_memory(snapshot: Snapshot, device: int) -> dict[str, Any] | None:
    """Describe the last out-of-memory error."""
    failures = _failures(snapshot, device)
    if not failures:
        return None
    event = failures[-1]
    row = events_of(snapshot, device).iloc[event]
    held = _fragmentation(snapshot, device, event)
    return {
        "count": len(failures),
        "event": event,
        "time_ns": int(row["time_ns"]) if snapshot.timed else None,
        "requested_bytes": int(row["size_bytes"]),
        "device_free_bytes": int(row["device_free_bytes"]) if row["device_free_bytes"] >= 0 else None,
        "allocated_bytes": held["allocated_bytes"],
        "reserved_bytes": held["reserved_bytes"],
        "cached_free_bytes": held["inactive_split_bytes"] + held["releasable_bytes"],
        "largest_free_block_bytes": held["largest_free_block_bytes"],
        "site": str(sites_of(snapshot, np.array([row["stack"]]))[0]),
        "by_category": _by_category(at(snapshot, event, device)),
    }


def _notes(snapshot: Snapshot, device: int) -> list[str]:
    """Say what the snapshot cannot tell."""
    over_time = _timeline(snapshot, device)
    at_end = over_time.iloc[-1]
    before = int((allocations(snapshot, device)["first"] < 0).sum())
    notes = []
    if len(over_time) == 1:
        notes.append("no events were recorded: there is no peak, and this is the state at the end")
    elif before:
        blocks = count_text(before, "block")
        notes.append(f"{blocks} from before the first event; an earlier peak is not in this snapshot")
    if not len(snapshot.stack_frames):
        notes.append("no call stacks were recorded, so nothing can be attributed")
    for counter in ("allocated_bytes", "active_bytes"):
        counted = segments_of(snapshot, device)[counter]
        if (counted >= 0).all() and counted.sum() != at_end[counter]:
            notes.append(
                f"the events end at {at_end[counter]:,} {counter.replace('_', ' ')}, torch's own counter says "
                f"{counted.sum():,}: some kinds of event were not recorded"
            )
    return notes
