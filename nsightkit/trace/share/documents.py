"""Copies of PyTorch profiler traces without secrets: the keys, fields and arguments that are known, and nothing else.

A trace is read in slices of a few megabytes, as its reader does. Numbers are never converted: microseconds with three
decimals need more digits than a float64 has. Each distinct text is cleaned once.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from nsightkit.errors import TraceError
from nsightkit.trace import kineto
from nsightkit.trace.share.ledger import Ledger
from nsightkit.trace.share.secrets import Scrubber

__all__ = ["copy_json", "learn_json"]

_READ_BYTES = 4 << 20
#: Deflate packs at most a thousand to one; a trace of a profiler packs ten to fifty to one.
_RATIO, SMALL_BYTES = 400, 1 << 30
_TOP = frozenset(
    [
        *(
            "schemaVersion",
            "deviceProperties",
            "distributedInfo",
            "traceName",
            "displayTimeUnit",
            "baseTimeNanoseconds",
        ),
        *("cupti_version", "cuda_runtime_version", "cuda_driver_version", "record_shapes", "profile_memory"),
        *("with_stack", "with_flops", "with_modules", "trace_id", "nsightkit"),
    ]
)
_FIELDS = frozenset(["ph", "cat", "name", "pid", "tid", "ts", "dur", "id", "bp", "s", "place", "args"])
_ARGS = frozenset(
    [
        *(
            "name",
            "labels",
            "sort_index",
            "External id",
            "external id",
            "correlation",
            "Call stack",
            "Module Hierarchy",
        ),
        *("Input Dims", "Input type", "Input Strides", "Concrete Inputs", "Sequence number", "Fwd thread id", "Ev Idx"),
        *("Record function id", "Profiler Event Index", "Python id", "Python parent id", "Python module id"),
        *("device", "Device", "Device Id", "Device Type", "context", "stream", "queued", "cbid", "grid", "block"),
        *("registers per thread", "shared memory", "blocks per SM", "warps per SM", "est. achieved occupancy %"),
        *("graph node id", "graph id", "bytes", "Bytes", "memory bandwidth (GB/s)", "Addr", "Total Reserved"),
        *("Total Allocated", "cuda_sync_kind", "wait_on_stream", "wait_on_cuda_event_record_corr_id"),
        *("wait_on_cuda_event_id", "kernel_hash", "kernel_file", "kernel_backend", "Trace name", "Trace iteration"),
        *("external ts", "Op count", "priority", "Collective name", "In msg nelems", "Out msg nelems", "dtype"),
        *("In split size", "Out split size", "Process Group Name", "Process Group Description", "Group size"),
        *("Process Group Ranks", "Src Rank", "Dst Rank", "Seq", "Rank", "Comms Id", "Global rank start"),
        *("Global rank stride", "flops", "static shared memory", "short name", "process", "domain", "kind", "open"),
        *("end thread", "duration_ns"),
    ]
)
#: What `tensorboard_trace_handler` calls its files: the host, the process, the time.
_WORKER = re.compile(r"(?:.*[/\\])?(.+)_\d+\.\d{10,}(?:\.pt)?\.trace\.json(?:\.gz)?")
_AGAIN = "capture or copy it again"
_NO_TRACE = "give a trace that torch.profiler exported (export_chrome_trace)"
_RAW = dict[str, msgspec.Raw]
_DECODE = msgspec.json.Decoder(_RAW).decode
_ENCODE = msgspec.json.Encoder().encode


def _is_packed(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


class _Bounded:
    """A packed file's bytes, up to a size that an honest file may have."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self._path, self._stream = path, stream
        self._left = max(SMALL_BYTES, _RATIO * path.stat().st_size)

    def read(self, size: int = -1) -> bytes:
        """At most so many bytes; all if it is negative."""
        if size < 0:
            return b"".join(iter(lambda: self.read(_READ_BYTES), b""))
        block = self._stream.read(size)
        self._left -= len(block)
        if self._left < 0:
            raise TraceError(self._path, f"unpacks to more than {_RATIO} times its size", "unpack and look at it first")
        return block


def _documents(path: Path, attempt: int) -> Iterator[_RAW]:
    """The file in small documents with some of the events each; else in one piece; else in one piece and mended."""
    with kineto.unpacked(path) as file:
        stream = cast("BinaryIO", _Bounded(path, file))
        if attempt == 0:
            texts = kineto.slices(stream)
        else:
            text, bare = kineto.all_of(stream)
            texts = iter([text if attempt == 1 else kineto.mended(text, bare)])
        yield from map(_DECODE, texts)


def learn_json(path: Path, scrubber: Scrubber) -> int:
    """Learn from a trace where and by whom it was made.

    Parameters
    ----------
    path : Path
    scrubber : Scrubber

    Returns
    -------
    int
        In which way the file could be read.

    Raises
    ------
    TraceError
        Damaged gzip, or JSON that cannot be mended.
    """
    for attempt in range(3):
        try:
            for document in _documents(path, attempt):
                for key, raw in document.items():
                    _learn(scrubber, key, bytes(raw))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            problem = f"holds broken JSON ({error})"
        else:
            return attempt
    raise TraceError(path, problem, _AGAIN)


def _learn(scrubber: Scrubber, key: str, raw: bytes) -> None:
    if key != "traceEvents":
        value = json.loads(raw)
        scrubber.learn_value(value, key)
        worker = _WORKER.fullmatch(value) if key == "traceName" and isinstance(value, str) else None
        scrubber.learn("host", worker[1] if worker else None)
    elif any(hint in raw for hint in (b"/home", b"Users", b"homes", b"\\u0000")):
        scrubber.learn_from(raw.replace(b"\\/", b"/").decode("utf-8", "replace"))
        texts = re.findall(rb'"[^"\\]*(?:\\.[^"\\]*)*"', raw) if b"\\u0000" in raw else ()
        for text in (text for text in texts if b"\\u0000" in text):
            scrubber.learn_environment(json.loads(text).split("\x00"))


def copy_json(path: Path, draft: Path, ledger: Ledger) -> None:
    """Copy a Chrome trace without its secrets.

    Parameters
    ----------
    path : Path
        Only read; gzipped or not.
    draft : Path
        The copy: the events, and then the other keys. Gzipped if its name ends in ``.gz``, or if neither name tells and
        the trace is.
    ledger : Ledger

    Raises
    ------
    TraceError
        Truncated, no trace, or unpacked without end.
    """
    attempt = learn_json(path, ledger.scrubber)
    packed = draft.suffix == ".gz" or (_is_packed(path) and draft.suffix != ".json")
    with draft.open("wb") as file:
        # No name and no time in the header: the same trace gives the same bytes.
        stream = gzip.GzipFile("", "wb", compresslevel=5, fileobj=file, mtime=0) if packed else file
        with stream:
            stream.writelines(_copied(path, attempt, ledger))


def _copied(path: Path, attempt: int, ledger: Ledger) -> Iterator[bytes]:
    """The copy, piece by piece."""
    tail: dict[str, Any] = {}
    between, found = b"", False
    yield b'{"traceEvents":[\n'
    for document in _documents(path, attempt):
        found = found or "traceEvents" in document
        try:
            events = msgspec.json.decode(document.pop("traceEvents", b"[]"), type=list[msgspec.Raw])
        except msgspec.ValidationError as error:
            raise TraceError(path, f"is JSON, but no Chrome trace ({error})", _NO_TRACE) from error
        kept = [_kept(_DECODE(event), _FIELDS, ledger) for event in map(bytes, events) if event[:1] == b"{"]
        if kept:
            yield between + b",\n".join(map(_ENCODE, kept))
            between = b",\n"
        tail |= _kept(document, _TOP, ledger)
    if not found:
        raise TraceError(path, "is JSON, but no Chrome trace (it has no traceEvents)", _NO_TRACE)
    yield b"\n]" + b"".join(b",\n" + _ENCODE({key: value})[1:-1] for key, value in tail.items()) + b"}\n"


def _kept(found: dict[str, Any], known: frozenset[str], ledger: Ledger) -> dict[str, Any]:
    """Leave of an object what is known, cleaned; numbers stay as they are written."""
    for key in [key for key in found if key not in known]:
        del found[key]
        ledger.note("field", key)
    for key, raw in found.items():
        value = bytes(raw)
        if value[0] in b'"[{':
            if key == "args":
                found[key] = _kept(_DECODE(value if value[:1] == b"{" else b"{}"), _ARGS, ledger)
            else:
                found[key] = ledger.apply(_cleaned, key, value, key)
    return found


def _cleaned(scrubber: Scrubber, raw: bytes, key: str) -> msgspec.Raw:
    given = json.loads(raw)
    new = scrubber.value(given, key)
    return msgspec.Raw(raw if new == given else json.dumps(new, separators=(",", ":")).encode())
