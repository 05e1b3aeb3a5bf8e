"""Memory snapshots of PyTorch's caching allocator, read without trusting them.

``torch.cuda.memory._dump_snapshot`` writes a pickle, and a pickle is a program. Here an unpickler decodes it that can
look nothing up, and a process with limits tries it before this one does. The result is tables: call stacks become
integers, so a million events take some hundred megabytes.

What the events say is what PyTorch writes: the size of an allocation is the number of bytes *asked for*; what the
allocator set aside for it is only known of the blocks that are there at the end
(:mod:`nsightkit.analysis.memory.snapshot` works out the rest).
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.errors import TraceError, reading
from nsightkit.trace import snapshot_child
from nsightkit.trace.files import require_regular, uncollected
from nsightkit.trace.limited import name_of_end, run_limited

__all__ = ["ACTIONS", "STATES", "Snapshot", "from_object", "read"]

#: What an event can be. ``free`` is an old spelling of a free that needs no waiting; ``other`` is a newer action.
ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "free",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
    "snapshot",
    "user_defined",
    "other",
)
#: What a block can be; ``active_awaiting_free`` in PyTorch's documentation is ``active_pending_free`` in its files.
STATES = ("active_allocated", "active_pending_free", "inactive")

_ACTION_CODES = {action: code for code, action in enumerate(ACTIONS)}
_STATE_CODES = {"active_allocated": 0, "active_pending_free": 1, "active_awaiting_free": 1, "inactive": 2}
_INACTIVE = _STATE_CODES["inactive"]

_REMEDY = "give a file that torch.cuda.memory._dump_snapshot wrote"
_AGAIN = "copy or take the snapshot again"
_DEVICES = 1024
#: No address and no sum of sizes reaches it, so that the sum of two is below 2**63.
_BEYOND_BYTES = 1 << 62
#: No time reaches it: 146 years.
_BEYOND_US = (1 << 62) // 1000

_Ints = npt.NDArray[np.int64]
_Ids = npt.NDArray[np.int32]
_Row = Mapping[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """A memory snapshot as tables.

    Attributes
    ----------
    path : str
        Where it was read.
    events : DataFrame
        One row an event, in order within each device: ``device, action`` (categorical of :data:`ACTIONS`),
        ``address, size_bytes, stream, time_ns`` (since the first event; -1 if not timed), ``stack`` (index into
        `stack_bounds`, -1 without one), ``device_free_bytes`` (of an ``oom``, else -1).
    segments : DataFrame
        What the allocator holds at the end: ``device, address, total_bytes, allocated_bytes, active_bytes,
        requested_bytes`` (torch's own counters; -1 where the version wrote none), ``stream, expandable, stack``.
    blocks : DataFrame
        The parts of the segments: ``device, segment`` (row of `segments`), ``address, size_bytes, requested_bytes``
        (0 of an inactive block), ``state`` (categorical of :data:`STATES`), ``stack``.
    frames : DataFrame
        Distinct frames: ``name, filename, line``.
    stack_bounds : ndarray of int64, shape (stacks + 1,)
        Stack `s` is ``stack_frames[stack_bounds[s]:stack_bounds[s + 1]]``, innermost first.
    stack_frames : ndarray of int32
        Rows of `frames`.
    annotations : DataFrame
        Ranges that PyTorch recorded beside: ``device, time_ns, name, stage`` (``START`` or ``END``).
    settings : dict
        The allocator's settings that are whole numbers, and ``roundup_power2_divisions`` by size.
    devices : int
        Number of devices in the file.
    timed : bool
        Whether events carry times (from PyTorch 2.1 on).
    """

    path: str
    events: pd.DataFrame
    segments: pd.DataFrame
    blocks: pd.DataFrame
    frames: pd.DataFrame
    stack_bounds: _Ints
    stack_frames: _Ids
    annotations: pd.DataFrame
    settings: dict[str, Any]
    devices: int
    timed: bool
    _derived: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def stack(self, number: int) -> list[tuple[str, str, int]]:
        """Give one call stack.

        Parameters
        ----------
        number : int
            As the column ``stack`` has it.

        Returns
        -------
        list of (name, filename, line)
            Innermost first; empty for -1.
        """
        # Of -1 the bounds are those of nothing: the last and the first.
        rows = self.stack_frames[self.stack_bounds[number] : self.stack_bounds[number + 1]]
        frames = self.frames.iloc[rows].itertuples(index=False)
        return [(str(name), str(filename), int(line)) for name, filename, line in frames]

    def derived(self, what: Any, compute: Callable[[], Any]) -> Any:
        """Keep what an analysis worked out, for the next one that needs it.

        Parameters
        ----------
        what : hashable
        compute : callable

        Returns
        -------
        object
            What `compute` returned, now or before.
        """
        if what not in self._derived:
            self._derived[what] = compute()
        return self._derived[what]


def read(path: str | os.PathLike[str]) -> Snapshot:
    """Read a memory snapshot, of any PyTorch that writes them.

    Parameters
    ----------
    path : path-like
        What ``torch.cuda.memory._dump_snapshot`` wrote, or a pickle of ``torch.cuda.memory_snapshot()``'s list.

    Returns
    -------
    Snapshot

    Raises
    ------
    TraceError
        The file is not a snapshot, is cut off, or asks for anything but plain data. Nothing in it is run.
    """
    path = Path(path)
    require_regular(path)
    with reading(path):
        data = path.read_bytes()
    if not data:
        raise TraceError(path, "is empty", "take the snapshot again; the program may have ended while it was written")
    _try_decoding(path, data)
    with uncollected():
        with reading(path, "is not a readable pickle", _AGAIN):
            decoded = snapshot_child.decode(data)
        return _converted(path, decoded, len(data))


@uncollected()
def from_object(snapshot: Any, name: str = "snapshot") -> Snapshot:
    """Make tables of what ``torch.cuda.memory._snapshot()`` returned.

    Parameters
    ----------
    snapshot : dict or list
        The whole snapshot, or only its segments.
    name : str
        What errors call it.

    Returns
    -------
    Snapshot

    Raises
    ------
    TraceError
        It is not a snapshot.
    """
    return _converted(Path(name), snapshot, sys.maxsize)


# ---------------------------------------------------------------- the pickle


def _try_decoding(path: Path, data: bytes) -> None:
    """Decode in a child first. It may take what an honest file of this size could need, several times over."""
    try:
        output = run_limited(
            snapshot_child.__file__,
            [],
            memory_bytes=(256 << 20) + 32 * len(data),
            seconds=4 + len(data) // 4_000_000,
            output_bytes=10_000,
            data=data,
        )
    except subprocess.CalledProcessError as error:
        problem = f"needs far more memory or time than a snapshot of its size ({name_of_end(error.returncode)})"
        raise TraceError(path, problem, _REMEDY) from error
    except subprocess.TimeoutExpired as error:
        raise TraceError(path, f"was not decoded within {error.timeout:.0f} s", _REMEDY) from error
    if output:
        problem = " ".join(output.decode().split())
        raise TraceError(path, f"is not a readable pickle ({problem}); nothing in it was run", _REMEDY)


# ---------------------------------------------------------------- from Python objects to columns


def _converted(path: Path, decoded: Any, most_rows: int) -> Snapshot:
    """Make tables; `most_rows` is more than an honest file can have."""
    if isinstance(decoded, list):
        decoded = {"segments": decoded}
    if not isinstance(decoded, Mapping) or not isinstance(decoded.get("segments"), list):
        kind = type(decoded).__name__
        raise TraceError(path, f"is a pickle, but holds no memory snapshot (a {kind} without segments)", _REMEDY)
    with reading(path, "is a pickle, but not a memory snapshot", _REMEDY):
        return _tables(path, decoded, most_rows)


def _tables(path: Path, decoded: _Row, most_rows: int) -> Snapshot:
    traces = decoded.get("device_traces") or []
    raw_segments = decoded["segments"]
    _require_few_rows(traces, raw_segments, most_rows)
    # Events that share a list of frames (a block and the event that made it) count it twice, and an honest file has two
    # bytes or more a frame.
    stacks = _Stacks(most_frames=16 * most_rows)
    segments = _segments(raw_segments, stacks)
    blocks = _blocks(raw_segments, stacks)
    blocks.insert(0, "device", segments["device"].to_numpy()[blocks["segment"]])
    events = _events(traces, stacks)
    for table in (events, segments, blocks):
        _require_plausible(table)
    t0_us = _start_us(events)
    if t0_us is None:
        events["time_ns"] = -1
    else:
        events["time_ns"] = (events["time_ns"] - t0_us) * 1000
    frames, stack_bounds, stack_frames = stacks.tables()
    return Snapshot(
        path=str(path),
        events=events,
        segments=segments,
        blocks=blocks,
        frames=frames,
        stack_bounds=stack_bounds,
        stack_frames=stack_frames,
        annotations=_annotations(decoded.get("external_annotations") or [], t0_us or 0),
        settings=_settings(decoded.get("allocator_settings")),
        devices=max(len(traces), int(segments["device"].max()) + 1 if len(segments) else 0),
        timed=t0_us is not None,
    )


def _require_few_rows(traces: Sequence[Any], segments: Sequence[Any], most_rows: int) -> None:
    """Refuse a list that the file holds once and repeats a thousand times: few bytes make many rows."""
    if len(traces) > _DEVICES:
        raise ValueError(f"it has events of {len(traces)} devices")
    rows = len(segments)
    for trace in traces:
        rows += len(trace)
    for segment in segments:
        rows += len(segment.get("blocks") or ())
    if rows > most_rows:
        raise ValueError("it repeats its own parts: it has more events or blocks than bytes")


def _require_plausible(table: pd.DataFrame) -> None:
    """Refuse numbers that no memory has; sums of the others fit 64 bits."""
    if table.empty:
        return
    sizes = table["total_bytes" if "total_bytes" in table else "size_bytes"].astype(float)
    if sizes.min() < 0 or sizes.sum() >= _BEYOND_BYTES:
        raise ValueError("it holds a size that cannot be")
    if not table["address"].between(-_BEYOND_BYTES, _BEYOND_BYTES, inclusive="neither").all():
        raise ValueError("it holds an address that cannot be")
    if not table["device"].between(0, _DEVICES - 1).all():
        raise ValueError("it holds a device that cannot be")


def _start_us(events: pd.DataFrame) -> int | None:
    """Give the time of the first event; None where not all have one."""
    times = events["time_ns"]
    if times.empty or times.min() < 0:
        return None
    if times.max() >= _BEYOND_US:
        raise ValueError("it holds an impossible time (time_us of an event)")
    return int(times.min())


class _Stacks:
    """Frames and stacks as numbers; an equal stack has one number, however often the file writes it out."""

    def __init__(self, most_frames: int) -> None:
        self._left = most_frames
        self._frames: dict[tuple[str, str, int], int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        # By the identity of the objects, which is quicker: a file mostly points at a frame it has written before.
        self._known_frames: dict[int, int] = {}
        self._known_stacks: dict[tuple[int, ...], int] = {}

    def number(self, frames: Any) -> int:
        """Give a list of frames its number, -1 for none."""
        if not frames:
            return -1
        self._left -= len(frames)
        if self._left < 0:
            raise ValueError("it repeats its own parts: it has more frames than bytes")
        identity = tuple(map(id, frames))
        number = self._known_stacks.get(identity)
        if number is None:
            content = tuple([self._frame_number(frame) for frame in frames])
            number = self._stacks.setdefault(content, len(self._stacks))
            self._known_stacks[identity] = number
        return number

    def _frame_number(self, frame: Any) -> int:
        number = self._known_frames.get(id(frame))
        if number is None:
            given = {"name": frame} if isinstance(frame, str) else frame
            content = (_text(given.get("name")), _text(given.get("filename")), int(given.get("line") or 0))
            number = self._frames.setdefault(content, len(self._frames))
            self._known_frames[id(frame)] = number
        return number

    def tables(self) -> tuple[pd.DataFrame, _Ints, _Ids]:
        """Give the frames, and the stacks as bounds and rows."""
        frames = pd.DataFrame(list(self._frames), columns=["name", "filename", "line"], dtype=object)
        lengths = [len(stack) for stack in self._stacks]
        bounds = np.cumsum([0, *lengths], dtype=np.int64)
        rows = np.fromiter(itertools.chain.from_iterable(self._stacks), np.int32, int(bounds[-1]))
        return frames.astype({"line": np.int64}), bounds, rows


def _events(traces: Sequence[Sequence[_Row]], stacks: _Stacks) -> pd.DataFrame:
    """Make the table of the events of all devices; times are still in microseconds, as the file has them."""
    lengths = [len(trace) for trace in traces]
    events = list(itertools.chain.from_iterable(traces))
    actions = [_ACTION_CODES.get(_text(event["action"]), _ACTION_CODES["other"]) for event in events]
    action = pd.Categorical.from_codes(np.array(actions, np.int8), pd.Index(ACTIONS, dtype=object))
    device_free = _integers(events, "device_free", -1)
    return pd.DataFrame(
        {
            "device": np.repeat(np.arange(len(traces), dtype=np.int16), lengths),
            "action": action,
            "address": _integers(events, "addr"),
            "size_bytes": _integers(events, "size"),
            "stream": _integers(events, "stream"),
            "time_ns": _integers(events, "time_us", -1),
            "stack": _stack_numbers(events, stacks),
            "device_free_bytes": np.where(action == "oom", device_free, -1),
        }
    )


def _segments(rows: Sequence[_Row], stacks: _Stacks) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "device": _integers(rows, "device").astype(np.int16),
            "address": np.fromiter((row["address"] for row in rows), np.int64, len(rows)),
            "total_bytes": _integers(rows, "total_size", -1),
            "allocated_bytes": _integers(rows, "allocated_size", -1),
            "active_bytes": _integers(rows, "active_size", -1),
            "requested_bytes": _integers(rows, "requested_size", -1),
            "stream": _integers(rows, "stream"),
            "expandable": np.array([bool(row.get("is_expandable")) for row in rows], bool),
            "stack": _stack_numbers(rows, stacks),
        }
    )


def _blocks(segments: Sequence[_Row], stacks: _Stacks) -> pd.DataFrame:
    rows = []
    for number, segment in enumerate(segments):
        address = segment["address"]
        for block in segment.get("blocks") or ():
            state = _STATE_CODES[_text(block["state"])]
            requested_bytes = 0
            stack = -1
            if state != _INACTIVE:
                # Before PyTorch 2.1 a block had a history instead of a stack, and no address.
                history = block.get("history") or [{}]
                past = history[0]
                requested_bytes = block.get("requested_size", past.get("real_size", block["size"]))
                stack = stacks.number(block.get("frames") or past.get("frames"))
            rows.append((number, block.get("address", address), block["size"], requested_bytes, state, stack))
            address += block["size"]
    types = {
        "segment": np.int64,
        "address": np.int64,
        "size_bytes": np.int64,
        "requested_bytes": np.int64,
        "state": np.int8,
        "stack": np.int32,
    }
    blocks = pd.DataFrame(rows, columns=list(types)).astype(types)
    blocks["state"] = pd.Categorical.from_codes(blocks["state"], pd.Index(STATES))
    return blocks


def _annotations(raw: Any, t0_us: int) -> pd.DataFrame:
    rows = []
    for row in raw:
        time_us = row.get("time_us") if isinstance(row, Mapping) else None
        if isinstance(time_us, int) and abs(time_us) < _BEYOND_US:
            rows.append(row)
    return pd.DataFrame(
        {
            "device": _integers(rows, "device"),
            "time_ns": (_integers(rows, "time_us") - t0_us) * 1000,
            "name": _texts(rows, "name"),
            "stage": _texts(rows, "stage"),
        }
    )


def _settings(given: Any) -> dict[str, Any]:
    """Give the allocator's settings that are whole numbers, and its divisions by size."""
    if not isinstance(given, Mapping):
        return {}
    settings: dict[str, Any] = _whole_numbers(given)
    settings["roundup_power2_divisions"] = {}
    divisions = given.get("roundup_power2_divisions")
    if isinstance(divisions, Mapping):
        settings["roundup_power2_divisions"] = _whole_numbers(divisions)
    return settings


def _whole_numbers(given: Mapping[Any, Any]) -> dict[str, int]:
    """Give what fits 64 bits."""
    return {
        name: value
        for name, value in given.items()
        if isinstance(name, str) and isinstance(value, int) and abs(value) < 1 << 63
    }


# ---------------------------------------------------------------- columns


def _integers(rows: Sequence[_Row], key: str, missing: int = 0) -> _Ints:
    # Unlike numpy.array, fromiter does not look into lists for more dimensions.
    values = [row.get(key) for row in rows]
    return np.fromiter((missing if value is None else value for value in values), np.int64, len(rows))


def _texts(rows: Sequence[_Row], key: str) -> npt.NDArray[np.object_]:
    return np.array([_text(row.get(key))[:200] for row in rows], object)


def _stack_numbers(rows: Sequence[_Row], stacks: _Stacks) -> _Ids:
    return np.array([stacks.number(row.get("frames")) for row in rows], np.int32)


def _text(value: Any) -> str:
    """Take text, and nothing else: a list that holds itself twice, and so on, is long to spell out."""
    if not isinstance(value, str):
        return ""
    if value.isascii():
        return value
    return value.encode("utf-8", "replace").decode("utf-8")  # half of a surrogate pair is invalid text
