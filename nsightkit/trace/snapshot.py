"""Memory snapshots of PyTorch's caching allocator, read without trusting them.

``torch.cuda.memory._dump_snapshot`` writes a pickle, and a pickle is a program. Here it is first read as bytes: every
instruction must be one that makes plain data, and every length and index must fit the file. Only then is it decoded,
by an unpickler that can look nothing up. The result is tables: call stacks become integers, so a million events take
some hundred megabytes.

What the events say is what PyTorch writes: the size of an allocation is the number of bytes *asked for*; what the
allocator set aside for it is only known of the blocks that are there at the end
(:mod:`nsightkit.analysis.memory.snapshot` works out the rest).
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.errors import TraceError, reading
from nsightkit.trace.files import require_regular, uncollected

__all__ = ["ACTIONS", "STATES", "Snapshot", "from_object", "plain", "read"]

#: What an event can be. ``free`` is an old spelling of a free that needs no waiting; ``other`` is a newer action.
ACTIONS = (
    *("alloc", "free_requested", "free_completed", "free"),
    *("segment_alloc", "segment_free", "segment_map", "segment_unmap"),
    *("oom", "snapshot", "user_defined", "other"),
)
#: What a block can be; ``active_awaiting_free`` in PyTorch's documentation is ``active_pending_free`` in its files.
STATES = ("active_allocated", "active_pending_free", "inactive")

_REMEDY = "give a file that torch.cuda.memory._dump_snapshot wrote"
_AGAIN = "copy or take the snapshot again"
_DEVICES = 1024
#: Containers in containers: those of a snapshot are seven deep, and a program's own notes hang below them.
_MOST_LEVELS = 32
#: No time reaches it, so that the sum of two is below 2**63: 146 years.
_BEYOND_NS = 1 << 62
_Ints = npt.NDArray[np.int64]
_Ids = npt.NDArray[np.int32]


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
        `stack_bounds`, -1 without one), ``device_free_bytes`` (of an ``oom``, else -1), ``metadata`` and ``category``
        (categoricals; empty where the file has none).
    segments : DataFrame
        What the allocator holds at the end: ``device, address, total_bytes, allocated_bytes, active_bytes,
        requested_bytes`` (torch's own counters; -1 where the version wrote none), ``stream, kind`` (``small`` or
        ``large``), ``pool, expandable, stack``.
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
        The allocator's settings, as far as they are plain values.
    devices : int
        How many devices the file tells of.
    timed : bool
        Whether events carry times (from PyTorch 2.1 on).
    t0_us : int
        The first event's time as the file has it, µs.
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
    t0_us: int
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
        return [
            (str(name), str(filename), int(line))
            for name, filename, line in self.frames.iloc[rows].itertuples(index=False)
        ]

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
    return _loaded(Path(path))[1]


def plain(path: str | os.PathLike[str]) -> Any:
    """Read a memory snapshot as PyTorch made it, once it is known to be one.

    Parameters
    ----------
    path : path-like

    Returns
    -------
    dict or list
        Of numbers, texts and containers.

    Raises
    ------
    TraceError
        As :func:`read`.
    """
    path = Path(path)
    found = _loaded(path)[0]
    level = [found]
    for _ in range(_MOST_LEVELS):
        inner = {id(item): item for part in level for item in _items(part)}
        level = list(inner.values())
        if not level:
            return found
    raise TraceError(path, f"nests its parts more than {_MOST_LEVELS} deep, or in a circle", _REMEDY)


def _items(part: Any) -> Iterator[Any]:
    """The containers in a container."""
    items = part.values() if isinstance(part, dict) else part
    return (item for item in items if isinstance(item, (dict, list)))


@uncollected()
def _loaded(path: Path) -> tuple[Any, Snapshot]:
    """Give what the file's pickle makes, and its tables."""
    require_regular(path)
    with reading(path):
        data = path.read_bytes()
        _check(path, data)
    with reading(path, "is not a readable pickle", _AGAIN):
        found = _Plain(io.BytesIO(data)).load()
    return found, _converted(path, found, len(data))


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
    return _converted(Path(name), snapshot, None)


# ---------------------------------------------------------------- the pickle, as bytes

#: First bytes of files that are not snapshots, and what to do about them.
_FOREIGN = (
    (rb"\Z", "is empty", "take the snapshot again; the program may have ended while it was written"),
    (rb"\x1f\x8b", "is compressed with gzip", "unpack it with gunzip first"),
    (rb"PK\x03\x04", "is a zip archive, such as torch.save writes, not a plain pickle", _REMEDY),
    (rb"SQLite format 3\0", "is an SQLite database, not a memory snapshot", "try `nsightkit summary` on it"),
    (rb"[{\[]", "is text, not a memory snapshot", _REMEDY),
    (rb"<", "is text, not a memory snapshot", "give the .pickle, not the page made of it"),
)


class _Plain(pickle.Unpickler):
    """An unpickler that can look nothing up."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"asks for {module}.{name}"[:200])

    def persistent_load(self, pid: Any) -> NoReturn:  # noqa: ARG002
        raise pickle.UnpicklingError("asks for a persistent id")


def _instructions(size: int) -> re.Pattern[bytes]:
    """Match any run of instructions that make numbers and containers.

    A memo index must be below `size`: the unpickler makes room for all indices below the one it is told.
    """
    # Of the four bytes of an index, low ones first: those that a smaller number than the file's size can have.
    top = max(size.bit_length() - 1, 0) // 8
    index = b"".join(
        b"." if i < top else b"[\\x00-\\x%02x]" % (min(size >> (8 * i), 255) if i == top else 0) for i in range(4)
    )
    long1 = b"|".join(b"\\x%02x.{%d}" % (n, n) for n in (8, 7, 6, 5, 4, 3, 2, 1, 0, 9))
    small = rb"K.|M..|J...."  # BININT1, BININT2, BININT
    integer = small + rb"|\x8a(?:" + long1 + b")"  # LONG1 of at most nine bytes
    return re.compile(
        b"(?s:"
        rb"[(N})\]aesu\x88\x89\x94]++"  # MARK NONE EMPTY_* APPEND* SETITEM* NEWTRUE NEWFALSE MEMOIZE
        rb"|[hq].|j...."  # BINGET, BINPUT, LONG_BINGET
        # A tuple is a pair of integers of 32 bits: a pool's name. Keys that are tuples of tuples take for ever to hash,
        # and of pairs of longer integers any number can be made that have the same hash.
        rb"|(?:" + small + rb"){2}+\x86|" + integer + rb"|r" + index + rb"|[G\x95].{8}"  # LONG_BINPUT; BINFLOAT, FRAME
        rb")*+"
    )


#: Instructions with a length, and how many bytes the length has: text and bytes.
_COUNTED = {0x8C: 1, 0x58: 4, 0x8D: 8, 0x43: 1, 0x42: 4, 0x8E: 8}


def _check(path: Path, data: bytes) -> None:
    """Refuse a file whose instructions do anything but make plain data, or whose lengths do not fit it."""
    for begins, problem, remedy in _FOREIGN:
        if re.match(begins, data):
            raise TraceError(path, problem, remedy)
    if not re.match(rb"\x80[\x02-\x05]", data):
        # The oldest pickles are text. None is read; a look at what this one asks for makes the message clearer.
        if asks := re.search(rb"(?:^|[\n(])[ci]([\w.]{1,80})\n([\w.]{1,80})\n", data[:4096]):
            _refuse(path, data, asks.start(1) - 1, [])
        raise TraceError(path, "is not a pickle of protocol 2 to 5", _REMEDY)
    run, at = _instructions(len(data)).match, 2
    said: list[tuple[int, int]] = []
    while found := run(data, at):
        at = found.end()
        if data[at : at + 1] in (b".", b""):  # STOP, or nothing
            break
        if data[at] not in _COUNTED:
            _refuse(path, data, at, said)
        begin = at + 1 + _COUNTED[data[at]]
        at = begin + int.from_bytes(data[at + 1 : begin], "little")
        said = [*said[-1:], (begin, at)]
    if data[at : at + 1] != b".":
        raise TraceError(path, "is cut off", _AGAIN)


#: What instructions ask for, where their names do not say it.
_ASKED = {
    "PERSID": "a persistent id",
    "BINPERSID": "a persistent id",
    "LONG_BINPUT": "a memo index beyond the file",
    "LONG1": "an integer of more than 9 bytes",
    "TUPLE2": "a pair of anything but integers of 32 bits",
}


def _refuse(path: Path, data: bytes, at: int, said: Sequence[tuple[int, int]]) -> NoReturn:
    """Say by name what a pickle asks for that no snapshot does."""
    import pickletools

    known = pickletools.code2op.get(chr(data[at]))  # type: ignore[attr-defined]
    name = known.name if known else f"unknown instruction {data[at]:#04x}"
    needs = known.arg.n if known and known.arg else 0  # bytes after the instruction; below 0 where these say how many
    if name == "LONG1":
        needs = 1 + int.from_bytes(data[at + 1 : at + 2], "little")
    parts = data[at + 1 : at + 402].split(b"\n")[:2] if name in ("GLOBAL", "INST") else []
    if name == "STACK_GLOBAL" and len(said) == 2:
        parts = [data[begin : min(end, begin + 80)] for begin, end in said]
    if needs > len(data) - at - 1:
        raise TraceError(path, "is cut off", _AGAIN)
    what = ".".join(map(_text, parts)) or _ASKED.get(name, name)
    where = f"at byte {at}" if what == name else f"{name} at byte {at}"
    problem = f"asks for {what}, which is more than plain data ({where}), and was refused; nothing in it was run"
    raise TraceError(path, problem, _REMEDY)


def _text(raw: bytes) -> str:
    return "".join(c if c.isprintable() else "?" for c in raw[:80].decode("utf-8", "replace"))


# ---------------------------------------------------------------- from Python objects to columns


def _converted(path: Path, found: Any, limit: int | None) -> Snapshot:
    """Make tables; `limit` is more rows than an honest file of that many bytes can have."""
    if isinstance(found, list):
        found = {"segments": found}
    if not isinstance(found, Mapping) or not isinstance(found.get("segments"), list):
        kind = type(found).__name__
        raise TraceError(path, f"is a pickle, but holds no memory snapshot (a {kind} without segments)", _REMEDY)
    with reading(path, "is a pickle, but not a memory snapshot", _REMEDY):
        return _tables(path, found, limit)


def _tables(path: Path, found: Mapping[str, Any], limit: int | None) -> Snapshot:
    traces = found.get("device_traces") or []
    raw_segments: list[dict[str, Any]] = found["segments"]
    # A list may stand in the file once and be pointed at a thousand times: few bytes that would make many rows.
    rows = sum(map(len, traces)) + sum(len(segment.get("blocks") or ()) for segment in raw_segments)
    if len(traces) > _DEVICES or (limit is not None and rows + len(raw_segments) > limit):
        raise TraceError(path, "repeats its own parts: it has more events or blocks than bytes", _REMEDY)
    stacks = _Stacks(path, limit)
    segments, blocks = _memory(raw_segments, stacks)
    events = _events(traces, stacks)
    _plausible(path, events, segments, blocks)
    times = events["time_ns"].to_numpy()
    timed = len(times) > 0 and bool((times >= 0).all())
    t0_us = int(times.min()) if timed else 0
    if timed and times.max() >= _BEYOND_NS // 1000:
        raise TraceError(path, "holds an impossible time (time_us of an event)", _REMEDY)
    events["time_ns"] = (times - t0_us) * 1000 if timed else np.full(len(times), -1)
    annotations = _annotations(found.get("external_annotations") or [], t0_us)
    frames, bounds, rows_of_frames = stacks.tables()
    return Snapshot(
        path=str(path),
        events=events,
        segments=segments,
        blocks=blocks,
        frames=frames,
        stack_bounds=bounds,
        stack_frames=rows_of_frames,
        annotations=annotations,
        settings=_settings(found.get("allocator_settings")),
        devices=max(len(traces), int(segments["device"].max()) + 1 if len(segments) else 0),
        timed=timed,
        t0_us=t0_us,
    )


def _settings(given: Any) -> dict[str, Any]:
    """The allocator's settings that are plain values, and its divisions by size."""
    if not isinstance(given, Mapping):
        return {}
    settings = _values(given)
    settings.pop("roundup_power2_divisions", None)
    divisions = given.get("roundup_power2_divisions")
    if isinstance(divisions, Mapping):
        by_size = {name: value for name, value in _values(divisions).items() if isinstance(value, int)}
        settings["roundup_power2_divisions"] = by_size
    return settings


def _values(given: Mapping[Any, Any]) -> dict[str, Any]:
    """What is text, or a number that fits 64 bits."""
    values = {}
    for name, value in given.items():
        small = isinstance(value, (int, float)) and -(2.0**63) < value < 2.0**63  # false of NaN, too
        if isinstance(name, str) and (small or isinstance(value, str)):
            values[name] = value
    return values


def _plausible(path: Path, *tables: pd.DataFrame) -> None:
    """Refuse numbers that no memory has; sums of the others fit 64 bits."""
    for table in tables:
        sizes = table[[c for c in table if c in ("size_bytes", "total_bytes")]].to_numpy()
        if len(table) and (
            table["address"].abs().max() >= 1 << 62
            or sizes.min() < 0
            or float(sizes.sum(dtype=float)) >= 2.0**62
            or not table["device"].between(0, _DEVICES - 1).all()
        ):
            raise TraceError(path, "holds an address, a size or a device that cannot be", _REMEDY)


class _Stacks:
    """Frames and stacks as numbers; an equal stack has one number, however often the file writes it out."""

    def __init__(self, path: Path, limit: int | None) -> None:
        self._path, self._limit = path, limit
        self._frames: dict[tuple[str, str, int], int] = {}
        self._frame_of: dict[int, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        self._last: tuple[Any, int] = (None, -1)
        self._spelt: dict[tuple[int, ...], int] = {}
        self._seen = 0

    def number(self, frames: Any) -> int:
        """Give a list of frames its number, -1 for none; it is known again by its frames' identity, then by content."""
        if not frames:
            return -1
        if frames is self._last[0]:  # a free and its completion share one
            return self._last[1]
        self._seen += len(frames)
        # Events that share a list of frames (a block and the event that made it) count it twice, and an honest file
        # has two bytes or more a frame; far beyond that it points at one list again and again.
        if self._limit is not None and self._seen > 16 * self._limit:
            raise TraceError(self._path, "repeats its own parts: it has more frames than bytes", _REMEDY)
        spelt = tuple(map(id, frames))
        known = self._spelt.get(spelt)
        if known is None:
            content = tuple([self._frame(frame) for frame in frames])
            known = self._spelt[spelt] = self._stacks.setdefault(content, len(self._stacks))
        self._last = (frames, known)
        return known

    def _frame(self, frame: Any) -> int:
        known = self._frame_of.get(id(frame))
        if known is None:
            given = {"name": frame} if isinstance(frame, str) else frame
            key = (_word(given.get("name")), _word(given.get("filename")), int(given.get("line") or 0))
            known = self._frame_of[id(frame)] = self._frames.setdefault(key, len(self._frames))
        return known

    def tables(self) -> tuple[pd.DataFrame, _Ints, _Ids]:
        """Give the frames, and the stacks as bounds and rows."""
        frames = pd.DataFrame(list(self._frames), columns=["name", "filename", "line"], dtype=object)
        lengths = np.fromiter(map(len, self._stacks), np.int64, len(self._stacks))
        bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        rows = np.fromiter((f for stack in self._stacks for f in stack), np.int32, int(bounds[-1]))
        return frames.astype({"line": np.int64}), bounds, rows


def _events(traces: Sequence[Sequence[Mapping[str, Any]]], stacks: _Stacks) -> pd.DataFrame:
    """Make the table of the events of all devices; the only loops over events there are."""
    events = list(itertools.chain.from_iterable(traces))
    code = {action: i for i, action in enumerate(ACTIONS)}
    actions = _integers((code.get(_word(e["action"]), code["other"]) for e in events), np.int8)
    columns: dict[str, Any] = {
        "device": np.repeat(np.arange(len(traces), dtype=np.int16), _integers(map(len, traces))),
        "action": pd.Categorical.from_codes(actions, pd.Index(ACTIONS, dtype=object)),
        "address": _integers(e.get("addr", 0) for e in events),
        "size_bytes": _integers(e.get("size", 0) for e in events),
        "stream": _integers(e.get("stream") or 0 for e in events),
        "time_ns": _integers(e.get("time_us", -1) for e in events),
        "stack": _integers((stacks.number(e.get("frames")) for e in events), np.int32),
        "device_free_bytes": _integers(e.get("device_free", -1) if e["action"] == "oom" else -1 for e in events),
    }
    for column, key in {"metadata": "user_metadata", "category": "category"}.items():
        texts = ["", *(_word(e.get(key)) for e in events)]  # the empty text comes first
        codes, names = pd.factorize(np.array(texts, dtype=object))
        columns[column] = pd.Categorical.from_codes(codes[1:], pd.Index(names, dtype=object))
    return pd.DataFrame(columns)


def _memory(raw: Sequence[Mapping[str, Any]], stacks: _Stacks) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Make the tables of segments and of blocks."""
    segments = pd.DataFrame(
        {
            "device": _integers((s.get("device") or 0 for s in raw), np.int16),
            "address": _integers(s["address"] for s in raw),
            **{
                f"{what}_bytes": _integers(s.get(f"{what}_size", -1) for s in raw)
                for what in ("total", "allocated", "active", "requested")
            },
            "stream": _integers(s.get("stream") or 0 for s in raw),
            "kind": np.array([_word(s.get("segment_type")) for s in raw], object),
            "pool": np.array([".".join(map(str, _pair(s.get("segment_pool_id")))) for s in raw], object),
            "expandable": np.array([bool(s.get("is_expandable", False)) for s in raw], bool),
            "stack": _integers((stacks.number(s.get("frames")) for s in raw), np.int32),
        }
    )
    code = {state: i for i, state in enumerate(STATES)} | {"active_awaiting_free": 1}
    rows: list[tuple[Any, ...]] = []
    for i, segment in enumerate(raw):
        at = segment["address"]
        for block in segment.get("blocks") or ():
            # Before PyTorch 2.1 a block had a history instead of its own stack, and no address.
            past, state = (block.get("history") or [{}])[0], code[_word(block["state"])]
            asked = block.get("requested_size", past.get("real_size", block["size"])) if state < 2 else 0
            stack = stacks.number((block.get("frames") or past.get("frames")) if state < 2 else None)
            rows.append((i, block.get("address", at), block["size"], asked, state, stack))
            at += block["size"]
    blocks = pd.DataFrame(rows, columns=list(_BLOCK_TYPES)).astype(_BLOCK_TYPES)
    blocks.insert(0, "device", segments["device"].to_numpy()[blocks["segment"]])
    blocks["state"] = pd.Categorical.from_codes(blocks["state"], pd.Index(STATES))
    return segments, blocks


_BLOCK_TYPES: dict[str, Any] = {
    "segment": np.int64,
    "address": np.int64,
    "size_bytes": np.int64,
    "requested_bytes": np.int64,
    "state": np.int8,
    "stack": np.int32,
}


def _integers(values: Iterable[Any], dtype: Any = np.int64) -> npt.NDArray[Any]:
    """Make a column; unlike numpy.array it does not look into lists for more dimensions."""
    return np.fromiter(values, dtype)


def _word(value: Any) -> str:
    """Take text, and nothing else: a list that holds itself twice, and so on, is long to spell out."""
    if not isinstance(value, str):
        return ""
    if value.isascii():
        return value
    return value.encode("utf-8", "replace").decode("utf-8")  # half of a surrogate pair is no text


def _pair(value: Any) -> Sequence[int]:
    """Take a pair of integers, and nothing else."""
    fits = isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(number, int) for number in value)
    return value if fits else ()


def _is_moment(time_us: Any) -> bool:
    return isinstance(time_us, int) and abs(time_us) < _BEYOND_NS // 1000


def _annotations(raw: Any, t0_us: int) -> pd.DataFrame:
    rows = [r for r in raw if isinstance(r, Mapping) and _is_moment(r.get("time_us"))]
    return pd.DataFrame(
        {
            "device": _integers(r.get("device", 0) for r in rows),
            "time_ns": _integers((r["time_us"] - t0_us) * 1000 for r in rows),
            "name": np.array([_word(r.get("name"))[:200] for r in rows], object),
            "stage": np.array([_word(r.get("stage"))[:20] for r in rows], object),
        }
    )
