"""Copies of files without secrets, of the same kind and with the same answers."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from nsightkit.errors import TraceError, UsageError, reading
from nsightkit.trace import kineto, ncu, programs, snapshot, store
from nsightkit.trace.files import drafted
from nsightkit.trace.model import Trace
from nsightkit.trace.open import caching, kind_of, load
from nsightkit.trace.output import require_free, require_free_folder
from nsightkit.trace.share import nsys as exports
from nsightkit.trace.share.clean import CleanSource, clean_snapshot, write_snapshot
from nsightkit.trace.share.secrets import Ledger, Scrubber

__all__ = ["Copied", "copy", "learn"]


def learn(path: Path, scrubber: Scrubber) -> None:
    """Learn from the file behind a trace who and where made it: a host's name has no form of its own.

    Parameters
    ----------
    path : Path
    scrubber : Scrubber
    """
    match kind_of(path):
        case "sqlite" | "parquetdir":
            exports.learn_export(path, scrubber)
        case "nsys-rep":
            export = programs.exported(path, cache=caching())
            exports.learn_export(export.path, scrubber)
        case "json":
            _learn_json(path, scrubber)


@dataclasses.dataclass(frozen=True)
class Copied:
    """What ``copy`` did.

    Attributes
    ----------
    out : Path
        The copy.
    removed : list of dict
        ``kind``, ``place``, ``count``, the largest count first. Kinds are those of placeholders
        (``nsightkit.trace.share.secrets.Kind``), and what was left out because nothing here knows it: ``table``,
        ``column``, ``property``, ``text``, ``field``, ``view``, ``index``, ``trigger``, ``other file``.
    """

    out: Path
    removed: list[dict[str, Any]]


def copy(path: str | os.PathLike[str], out: str | os.PathLike[str], *, overwrite: bool = False) -> Copied:
    """Write a copy of a trace that is safe to share, of the same kind and with the same answers.

    Samples of call stacks stay behind: what only they explain is not known in the copy.

    Parameters
    ----------
    path : path-like
        An Nsight Systems SQLite or ``parquetdir`` export, a PyTorch profiler trace, a memory snapshot, a CSV that
        ``ncu`` printed, or a folder that ``convert`` wrote. Only read.
    out : path-like
        The copy; appears whole or not at all. JSON is gzipped if the name ends in ``.gz``, or if neither name tells and
        the trace is.
    overwrite : bool
        Replace a file, or a folder that holds a trace of ``convert`` and nothing else.

    Returns
    -------
    Copied

    Raises
    ------
    TraceError
        The file is absent, truncated, damaged, or of a kind that cannot be scrubbed: reports of nsys and ncu are
        binary, and are exported first.
    UsageError
        The copy would replace the trace, or something that is there, or cannot be written.
    """
    path, out = Path(path), Path(out)
    with reading(path):
        kind = kind_of(path)
    _check_kind(path, kind)
    folder = kind in ("parquetdir", "store")
    _check_out(path, out, folder, overwrite)
    ledger = Ledger()
    with drafted(out) as draft:
        _COPIERS[kind](path, draft, ledger)
        for other in _beside(out):
            other.unlink(missing_ok=True)
    rows = sorted(ledger.removed.items(), key=lambda item: (-item[1], item[0]))
    return Copied(out, [{"kind": kind, "place": place, "count": count} for (kind, place), count in rows if count])


def _check_kind(path: Path, kind: str) -> None:
    """Refuse what is not a trace, and what is one in a form that hides its texts."""
    commands = {
        "nsys-rep": shlex.join(programs.sqlite_command(path.name, f"{path.stem}.sqlite")),
        "ncu-rep": f"{shlex.join(programs.csv_command(path.name))} > {shlex.quote(path.stem + '.csv')}",
    }
    if kind in commands:
        raise TraceError(path, "is a binary report, which cannot be scrubbed", f"export it first: {commands[kind]}")
    if kind not in _COPIERS:
        load(path, cache=False)  # says what it is
        raise TraceError(path, "is not a trace that can be scrubbed", "give an export, a JSON trace or a snapshot")


def _check_out(path: Path, out: Path, folder: bool, overwrite: bool) -> None:
    there, trace = out.resolve(), path.resolve()
    rename = "give another name for the copy"
    if there == trace or (out.exists() and out.samefile(path)):
        raise UsageError(f"{out} is the trace itself; {rename}")
    if path.is_dir() and there.is_relative_to(trace):
        raise UsageError(f"{out} is in the trace's own folder; {rename}")
    if trace.is_relative_to(there):
        raise UsageError(f"{out} holds the trace; {rename}")
    if folder:
        require_free_folder(out, overwrite=overwrite)
    else:
        require_free(out, overwrite=overwrite)
    for other in _beside(out):
        require_free(other, overwrite=overwrite)


def _beside(out: Path) -> list[Path]:
    """What SQLite would take for parts of the copy, if it were there."""
    return [out.with_name(out.name + end) for end in ("-wal", "-journal", "-shm")]


def _copy_store(path: Path, draft: Path, ledger: Ledger) -> None:
    store.write(Trace(CleanSource(Trace(store.open_store(path), str(path)), ledger.scrubber)), draft)
    ledger.removed.update((kind, "names") for kind in ledger.scrubber.removed)


def _copy_snapshot(path: Path, draft: Path, ledger: Ledger) -> None:
    with draft.open("wb") as file:
        write_snapshot(clean_snapshot(snapshot.plain(path), ledger), file)


def _copy_ncu_csv(path: Path, draft: Path, ledger: Ledger) -> None:
    ncu.read(path)  # truncated, or something else
    raw = path.read_bytes()
    wide = raw[:2] in (b"\xff\xfe", b"\xfe\xff")
    codec = ("utf-16", "replace") if wide else ("utf-8", "surrogateescape")
    lines, host = [], -1
    for whole in raw.decode(*codec).splitlines(keepends=True):
        line = whole.rstrip("\r\n")
        cells = next(csv.reader([line]), []) if line.startswith('"') else []
        if "Kernel Name" in cells:
            lines.append((line, whole[len(line) :], cells, -1))
            host = cells.index("Host Name") if "Host Name" in cells else -1
        else:
            lines.append((line, whole[len(line) :], cells, host if host < len(cells) else -1))
            ledger.scrubber.learn(cells[host] if lines[-1][3] >= 0 else None, "hostname")
        ledger.scrubber.learn(line)
    with io.StringIO(newline="") as out:
        for line, end, cells, host in lines:
            new = [ledger.apply(Scrubber.text, "cells", cell) for cell in cells]
            if host >= 0:
                new[host] = ledger.apply(Scrubber.value, "Host Name", cells[host], "hostname")
            if new != cells:
                csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator=end).writerow(new)
            else:
                out.write((line if cells else ledger.apply(Scrubber.text, "output", line)) + end)
        draft.write_bytes(out.getvalue().encode(*codec))


# ---------------------------------------------------------------- PyTorch profiler traces
#
# The keys, fields and arguments that are known, and nothing else. A trace is read in slices of a few megabytes, as its
# reader does. Numbers are never converted: microseconds with three decimals need more digits than a float64 has. Each
# distinct text is cleaned once.

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
        *(
            "wait_on_cuda_event_id",
            "kernel",
            "kernel_hash",
            "kernel_file",
            "kernel_backend",
            "Trace name",
            "Trace iteration",
        ),
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


def _learn_json(path: Path, scrubber: Scrubber) -> str:
    """Learn from a trace where and by whom it was made; give in which of kineto's forms the file could be read."""

    def learn(texts: Iterator[bytes]) -> None:
        for document in map(_DECODE, texts):
            events = bytes(document.pop("traceEvents", b""))
            if any(hint in events for hint in (b"/home", b"Users", b"homes", b"\\u0000")):
                scrubber.learn(events.replace(b"\\/", b"/").decode("utf-8", "replace"))
            for text in re.findall(rb'"[^"\\]*(?:\\.[^"\\]*)*"', events) if b"\\u0000" in events else ():
                scrubber.learn(json.loads(text))
            for key, raw in document.items():
                value = json.loads(bytes(raw))
                scrubber.learn(value, key)
                if key == "traceName" and (worker := _WORKER.fullmatch(str(value))):
                    scrubber.learn(worker[1], "hostname")

    return kineto.first_that_decodes(path, learn)[1]


def _copy_json(path: Path, draft: Path, ledger: Ledger) -> None:
    """Copy a Chrome trace: the events, and then the other keys; gzipped as :func:`copy` says."""
    form = _learn_json(path, ledger.scrubber)
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


_COPIERS: dict[str, Callable[[Path, Path, Ledger], None]] = {
    "sqlite": exports.copy_sqlite,
    "parquetdir": exports.copy_parquetdir,
    "store": _copy_store,
    "json": _copy_json,
    "snapshot": _copy_snapshot,
    "ncu-csv": _copy_ncu_csv,
}
