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
from typing import Any

import msgspec

from nsightkit.errors import TraceError, reading
from nsightkit.trace import kineto
from nsightkit.trace.share.secrets import Ledger, Scrubber

__all__ = ["copy_json", "learn_json"]

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
_NO_TRACE = "give a trace that torch.profiler exported (export_chrome_trace)"
_DECODE = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_ENCODE = msgspec.json.Encoder().encode


def learn_json(path: Path, scrubber: Scrubber) -> str:
    """Learn from a trace where and by whom it was made.

    Parameters
    ----------
    path : Path
    scrubber : Scrubber

    Returns
    -------
    str
        In which of :data:`nsightkit.trace.kineto.FORMS` the file could be read.

    Raises
    ------
    TraceError
        Damaged gzip, or JSON that cannot be mended.
    """

    def learn(texts: Iterator[bytes]) -> None:
        for document in map(_DECODE, texts):
            for key, raw in document.items():
                (_learn_events if key == "traceEvents" else _learn_key)(scrubber, bytes(raw), key)

    return kineto.first_that_decodes(path, learn)[1]


def _learn_key(scrubber: Scrubber, raw: bytes, key: str) -> None:
    value = json.loads(raw)
    scrubber.learn_value(value, key)
    if key == "traceName" and (worker := _WORKER.fullmatch(str(value))):
        scrubber.learn("host", worker[1])


def _learn_events(scrubber: Scrubber, raw: bytes, _: str) -> None:
    if any(hint in raw for hint in (b"/home", b"Users", b"homes", b"\\u0000")):
        scrubber.learn_from(raw.replace(b"\\/", b"/").decode("utf-8", "replace"))
    for text in re.findall(rb'"[^"\\]*(?:\\.[^"\\]*)*"', raw) if b"\\u0000" in raw else ():
        if b"\\u0000" in text:
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
    form = learn_json(path, ledger.scrubber)
    packed = draft.suffix == ".gz" or (kineto.is_packed(path) and draft.suffix != ".json")
    # No name and no time in the header: the same trace gives the same bytes.
    with draft.open("wb") as file, gzip.GzipFile("", "wb", 5, file, 0) if packed else file as stream:
        stream.writelines(_copied(path, form, ledger))


def _copied(path: Path, form: str, ledger: Ledger) -> Iterator[bytes]:
    """The copy, piece by piece."""
    tail: dict[str, Any] = {}
    between, lists = b"", 0
    yield b'{"traceEvents":[\n'
    for document in map(_DECODE, kineto.documents(path, form)):
        lists += "traceEvents" in document
        with reading(path, "is JSON, but no Chrome trace", _NO_TRACE):
            events = msgspec.json.decode(document.pop("traceEvents", b"[]"), type=list[msgspec.Raw])
        kept = [_kept(_DECODE(event), _FIELDS, ledger) for event in map(bytes, events) if event[:1] == b"{"]
        if kept:
            yield between + b",\n".join(map(_ENCODE, kept))
            between = b",\n"
        tail |= _kept(document, _TOP, ledger)
    if not lists:
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
