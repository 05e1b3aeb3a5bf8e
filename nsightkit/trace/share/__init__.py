"""Traces without secrets: what identifies a person or a machine, or opens a door, is replaced by placeholders.

:func:`clean` does it to an opened trace, for what is written or shown; :func:`copy` to a file, whose copy is of the
same kind and gives the same answers. What counts as a secret is in :mod:`nsightkit.trace.share.secrets`.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import os
import pickle
import re
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pandas as pd

from nsightkit.errors import TraceError, UsageError
from nsightkit.trace import kineto, ncu, ncu_tool, nsys, nsys_tool, snapshot, store
from nsightkit.trace.files import umask
from nsightkit.trace.model import TABLES, TIME_COLUMNS, Trace, TraceMeta, categorical
from nsightkit.trace.open import kind_of, load
from nsightkit.trace.share import documents as scrub_json
from nsightkit.trace.share import nsys as scrub_nsys
from nsightkit.trace.share.ledger import Ledger
from nsightkit.trace.share.secrets import Scrubber, json_text

__all__ = ["Copied", "clean", "clean_snapshot", "clean_text", "copy", "write_snapshot"]

# ---------------------------------------------------------------- an opened trace


def clean(trace: Trace) -> Trace:
    """Give the trace without secrets in its names and in what is known about it.

    Times, sizes, rows and their order are the same; names are the same unless they held a secret. Nothing is read
    before an analysis asks for it, and only distinct names are looked at.

    Parameters
    ----------
    trace : Trace
        With the selection it carries.

    Returns
    -------
    Trace
        Itself when it came from here.
    """
    whole = trace.whole
    if isinstance(whole._source, _CleanSource):
        return trace
    cleaned = whole.memo.get("clean")
    if cleaned is None:
        scrubber = Scrubber()
        if whole.path is not None:
            _learn(Path(whole.path), scrubber)
        cleaned = whole.memo["clean"] = Trace(_CleanSource(whole, scrubber), whole.path)
    return cleaned if trace is whole else cleaned.masked(trace._masks)


def clean_text(trace: Trace, text: str) -> str:
    """Give a text about a trace, such as its file's name, without the secrets that the trace is cleaned of.

    Parameters
    ----------
    trace : Trace
    text : str

    Returns
    -------
    str
    """
    source = clean(trace).whole._source
    assert isinstance(source, _CleanSource)
    return source._scrubber.text(text)


def _learn(path: Path, scrubber: Scrubber) -> None:
    """Learn from the file behind a trace who and where made it: a host's name has no form of its own."""
    kind = kind_of(path)
    if kind == "nsys-rep":
        scrub_nsys.learn_sqlite(nsys_tool.exported(path), scrubber)
    elif kind == "sqlite":
        scrub_nsys.learn_sqlite(path, scrubber)
    elif kind == "parquetdir":
        scrub_nsys.learn_parquetdir(path, scrubber)
    elif kind == "json":
        scrub_json.learn_json(path, scrubber)


class _CleanSource:
    """Reads another trace, and scrubs what it reads."""

    def __init__(self, whole: Trace, scrubber: Scrubber) -> None:
        self._whole = whole
        self._scrubber = scrubber
        self.meta = _clean_meta(whole.meta, scrubber)

    def read(self, table: str, columns: Sequence[str]) -> pd.DataFrame:
        """See :class:`~nsightkit.trace.model.Source`."""
        found = self._whole._read(table, list(columns))
        out: dict[str, pd.Series[Any]] = {}
        for column, series in found.items():
            if TABLES[table].get(column) == "category":
                out[column] = _clean_names(series, self._scrubber)
            elif column in TIME_COLUMNS and self._whole.t0_ns:
                out[column] = series + self._whole.t0_ns  # the new trace moves them to its own clock again
            else:
                out[column] = series
        return pd.DataFrame(out, copy=False)

    def first_ns(self) -> int:
        """See :class:`~nsightkit.trace.model.Source`."""
        return self._whole.t0_ns

    def size(self, table: str) -> int:
        """See :class:`~nsightkit.trace.model.Source`."""
        return self._whole.size(table)


def _clean_names(names: pd.Series[Any], scrubber: Scrubber) -> pd.Series[Any]:
    """Scrub a categorical column; distinct names stay distinct."""
    given = [str(name) for name in names.cat.categories]
    cleaned = [json_text(scrubber, name) for name in given]
    if cleaned == given:
        return names
    taken = {new for new, old in zip(cleaned, given, strict=True) if new == old}
    for i, (new, old) in enumerate(zip(cleaned, given, strict=True)):
        if new == old:
            continue
        unique, number = new, 1
        while unique in taken:  # two that differed in nothing but the case of a host's name
            number += 1
            unique = f"{new} ({number})"
        taken.add(unique)
        cleaned[i] = unique
    return pd.Series(categorical(np.asarray(names.cat.codes), cleaned), index=names.index, name=names.name)


def _clean_meta(meta: TraceMeta, scrubber: Scrubber) -> TraceMeta:
    def text(value: str | None) -> str | None:
        return None if value is None else scrubber.text(str(value))

    scrubber.learn_value([meta.notes, list(meta.thread_names.values()), meta.distributed])
    return dataclasses.replace(
        meta,
        tool=scrubber.text(meta.tool),
        tool_version=text(meta.tool_version),
        schema=text(meta.schema),
        driver=text(meta.driver),
        gpus=[dataclasses.replace(gpu, name=text(gpu.name)) for gpu in meta.gpus],
        missing=list(meta.missing),
        notes=[scrubber.text(note) for note in meta.notes],
        thread_names={thread: scrubber.text(str(name)) for thread, name in meta.thread_names.items()},
        distributed=scrubber.value(dict(meta.distributed)),
    )


# ---------------------------------------------------------------- a memory snapshot


def clean_snapshot(taken: Any, ledger: Ledger | None = None) -> Any:
    """Make a copy of a memory snapshot without folders, host and user names, secrets, or source code.

    A file in a library keeps its path from ``site-packages`` (or ``lib/python3.x``) on, any other only its name. Frames
    keep name, file and line. Sizes, addresses, times and the order of events stay as they are.

    Parameters
    ----------
    taken : dict or list
        What ``torch.cuda.memory._snapshot()`` returned, or only its segments.
    ledger : Ledger, optional
        Counts what was removed.

    Returns
    -------
    dict or list
        Of the same shape. Frames and lists of frames are shared wherever they are equal, which makes the file small.
    """
    ledger = ledger or Ledger()
    frames: dict[int, dict[str, Any]] = {}
    same: dict[tuple[str, Any, str], dict[str, Any]] = {}
    stacks: dict[int, list[dict[str, Any]]] = {}
    alike: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    ledger.scrubber.learn_from("\n".join(_filenames(taken)))
    if isinstance(taken, Mapping):
        many = ("segments", "device_traces")
        ledger.scrubber.learn_value({name: item for name, item in taken.items() if name not in many})

    def frame(given: Mapping[str, Any]) -> dict[str, Any]:
        if id(given) not in frames:
            more = given.keys() - {"filename", "line", "name"}
            if more:  # what PyTorch adds of compiled code: its source
                ledger.note("source", "frames", len(more))
            made = {
                "filename": ledger.path(str(given.get("filename", "")), "frames.filename"),
                "line": given.get("line", 0),
                "name": ledger.text(str(given.get("name", "")), "frames.name"),
            }
            frames[id(given)] = same.setdefault((made["filename"], made["line"], made["name"]), made)
        return frames[id(given)]

    def stack(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        if id(given) not in stacks:
            made = [frame(each) for each in given]
            stacks[id(given)] = alike.setdefault(tuple(map(id, made)), made)
        return stacks[id(given)]

    def copied(value: Any, key: str = "") -> Any:
        if isinstance(value, str):
            return value if value in _SNAPSHOT_WORDS else ledger.keyed(key, value)
        if isinstance(value, bytes):
            return ledger.data(value, key)
        if key == "frames" and isinstance(value, list):
            return stack(value)
        if isinstance(value, Mapping):
            if value and ledger.scrubber.tells_environment(key):
                ledger.note("environment", key, len(value))
                return {}
            return {copied(name): copied(item, name if isinstance(name, str) else "") for name, item in value.items()}
        if isinstance(value, list):
            return [copied(item, key) for item in value]
        return tuple(copied(item) for item in value) if isinstance(value, tuple) else value

    return copied(taken)


def _filenames(taken: Any) -> set[str]:
    """Files of all frames, each list of frames looked at once."""
    found: set[str] = set()
    seen: set[int] = set()
    waiting = [taken]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            if isinstance(value.get("filename"), str):
                found.add(value["filename"])
            waiting += [item for item in value.values() if isinstance(item, list | dict)]
        elif isinstance(value, list) and id(value) not in seen:
            seen.add(id(value))
            waiting += [item for item in value if isinstance(item, list | dict)]
    return found


#: Values that events repeat by the hundred thousand and that say nothing.
_SNAPSHOT_WORDS = frozenset(
    [
        *("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap"),
        *("oom", "snapshot", "active_allocated", "active_pending_free", "inactive", "small", "large", "N/A"),
    ]
)

# ---------------------------------------------------------------- a file


@dataclasses.dataclass(frozen=True)
class Copied:
    """What :func:`copy` did.

    Attributes
    ----------
    out : Path
        The copy.
    removed : list of dict
        ``kind``, ``place``, ``count``, the largest count first. Kinds are ``environment``, ``secret``, ``path``,
        ``host``, ``user``, ``email``, ``address``, ``output`` (what the program printed), ``source`` (code in a
        snapshot), and what of a database or folder was left out: ``trigger``, ``virtual table``, ``other file``.
    """

    out: Path
    removed: list[dict[str, Any]]


def copy(path: str | os.PathLike[str], out: str | os.PathLike[str], *, overwrite: bool = False) -> Copied:
    """Write a copy of a trace that is safe to share, of the same kind and with the same answers.

    Parameters
    ----------
    path : path-like
        An Nsight Systems SQLite or ``parquetdir`` export, a PyTorch profiler trace, a memory snapshot, a CSV that
        ``ncu`` printed, or a folder that ``convert`` wrote. Only read.
    out : path-like
        The copy; appears whole or not at all. JSON is gzipped if the name ends in ``.gz``, or if neither name tells and
        the trace is.
    overwrite : bool
        Replace what is there, if it is no folder of something else.

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
    try:
        kind = kind_of(path)
    except OSError as error:
        raise TraceError(path, f"cannot be read ({error.strerror or error})", "check its owner and mode") from error
    _check_kind(path, kind)
    folder = kind in ("parquetdir", "store")
    _check_out(path, out, folder, overwrite)
    ledger = Ledger()
    try:
        with tempfile.TemporaryDirectory(prefix=f".{out.name[:80]}.", dir=out.absolute().parent) as beside:
            draft = Path(beside) / ("copy" if folder else "copy.part")
            _WRITERS[kind](path, draft, out, ledger)
            _publish(draft, out)
    except OSError as error:
        raise UsageError(f"{out}: cannot be written ({error.strerror or error})") from error
    rows = sorted(ledger.removed.items(), key=lambda item: (-item[1], item[0]))
    removed = [
        {"kind": what, "place": ledger.scrubber.text(place), "count": count} for (what, place), count in rows if count
    ]
    return Copied(out, removed)


def _check_kind(path: Path, kind: str) -> None:
    """Refuse what is no trace, and what is one in a form that hides its texts."""
    if kind in _WRITERS:
        return
    if kind in ("nsys-rep", "ncu-rep"):
        if kind == "nsys-rep":
            command = shlex.join(nsys_tool.export_command(path.name, path.with_suffix(".sqlite").name))
        else:
            command = f"{shlex.join(ncu_tool.export_command(path.name))} > {shlex.quote(path.stem + '.csv')}"
        raise TraceError(path, "is a binary report, which cannot be scrubbed", f"export it first: {command}")
    load(path, cache=False)  # says what it is
    raise TraceError(path, "is no trace that can be scrubbed", "give an export, a JSON trace or a snapshot")


def _check_out(path: Path, out: Path, folder: bool, overwrite: bool) -> None:
    if not out.absolute().parent.is_dir():
        raise UsageError(f"{out}: its folder does not exist; make it first")
    there = out.resolve()
    if (out.exists() and out.samefile(path)) or there == path.resolve():
        raise UsageError(f"{out} is the trace itself; give another name for the copy")
    if path.is_dir() and there.is_relative_to(path.resolve()):
        raise UsageError(f"{out} is in the trace's own folder; give another name for the copy")
    if path.resolve().is_relative_to(there):
        raise UsageError(f"{out} holds the trace; give another name for the copy")
    beside = [other for other in _beside(out) if other.exists()]
    if (out.exists() or out.is_symlink() or beside) and not overwrite:
        raise UsageError(f"{beside[0] if beside else out} is there; give another name, or --overwrite")
    if out.is_dir() and not out.is_symlink():
        if not folder or not (store.is_store(out) or not any(out.iterdir()) or any(out.glob("*.parquet"))):
            raise UsageError(f"{out} is a folder of something else; give another name")
    elif out.exists() and folder:
        raise UsageError(f"{out} is a file; give another name for the folder")


def _beside(out: Path) -> list[Path]:
    """What SQLite would take for parts of the copy, if it were there."""
    return [out.with_name(out.name + end) for end in ("-wal", "-journal", "-shm")]


def _publish(draft: Path, out: Path) -> None:
    draft.chmod((0o777 if draft.is_dir() else 0o666) & ~umask())
    for other in _beside(out):
        other.unlink(missing_ok=True)
    if out.is_dir() and not out.is_symlink():
        old = draft.with_name("old")
        out.replace(old)  # goes with the folder it is put into
    draft.replace(out)


def _write_sqlite(path: Path, draft: Path, _: Path, ledger: Ledger) -> None:
    nsys.open_sqlite(path, cache=False)  # the database of another program is none of our business
    scrub_nsys.copy_sqlite(path, draft, ledger)


def _write_parquetdir(path: Path, draft: Path, _: Path, ledger: Ledger) -> None:
    nsys.open_parquetdir(path)
    draft.mkdir()
    scrub_nsys.copy_parquetdir(path, draft, ledger)


def _write_store(path: Path, draft: Path, _: Path, ledger: Ledger) -> None:
    trace = Trace(store.open_store(path), str(path))
    cleaned = Trace(_CleanSource(trace, ledger.scrubber))
    store.write(cleaned, draft)
    for kind in ledger.scrubber.removed:
        ledger.note(kind, "names")


def _write_json(path: Path, draft: Path, out: Path, ledger: Ledger) -> None:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    packed = out.suffix == ".gz" or (packed and out.suffix != ".json")

    with draft.open("wb") as file:
        if packed:
            # No name and no time in the header: the same trace gives the same bytes.
            with gzip.GzipFile("", "wb", compresslevel=5, fileobj=file, mtime=0) as stream:
                sound = scrub_json.copy_json(path, stream.write, ledger)
        else:
            sound = scrub_json.copy_json(path, file.write, ledger)
    if not sound:
        try:
            kineto.decode(draft)
        except TraceError as error:
            raise TraceError(path, error.problem, error.remedy) from error


def _write_snapshot(path: Path, draft: Path, _: Path, ledger: Ledger) -> None:
    cleaned = clean_snapshot(snapshot.plain(path), ledger)
    with draft.open("wb") as file:
        write_snapshot(cleaned, file)


def write_snapshot(taken: Any, file: BinaryIO) -> None:
    """Write a memory snapshot as PyTorch does.

    Parameters
    ----------
    taken : dict or list
    file : binary file
    """
    pickle.dump(taken, file, protocol=4)  # any Python since 3.4 reads it, whichever wrote it


_CELL = re.compile(r'("(?:[^"]|"")*"|[^,"]*)(,|$)')


def _write_ncu_csv(path: Path, draft: Path, _: Path, ledger: Ledger) -> None:
    ncu.read(path)  # truncated, or something else
    raw = path.read_bytes()
    encoding = "utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"
    text = raw.decode(encoding, "replace" if encoding == "utf-16" else "surrogateescape")
    lines = text.splitlines(keepends=True)
    hosts: list[int] = []
    for line in lines:  # first who it was, then where the name stands
        cells = next(csv.reader([line]), [])
        hosts = _hosts(cells) or hosts
        for place in hosts:
            if place < len(cells) and cells[place] != "Host Name":
                ledger.scrubber.learn("host", cells[place])
        ledger.scrubber.learn_from(line)
    out, hosts = [], []
    for line in lines:
        hosts = _hosts(next(csv.reader([line]), [])) or hosts
        out.append(_clean_line(line, hosts, ledger))
    draft.write_bytes("".join(out).encode(encoding, "strict" if encoding == "utf-16" else "surrogateescape"))


def _hosts(cells: list[str]) -> list[int]:
    return [i for i, cell in enumerate(cells) if cell == "Host Name"] if "Kernel Name" in cells else []


def _clean_line(line: str, hosts: list[int], ledger: Ledger) -> str:
    body = line.rstrip("\r\n")
    if not body.startswith('"'):
        return ledger.text(body, "output") + line[len(body) :]
    out = []
    for number, match in enumerate(_CELL.finditer(body)):
        cell = match[1]
        if len(cell) > 1 and cell[0] == '"':
            given = cell[1:-1].replace('""', '"')
            is_host = number in hosts and given != "Host Name"
            new = ledger.whole("host", given, "Host Name") if is_host else ledger.text(given, "cells")
            cell = cell if new == given else '"' + new.replace('"', '""') + '"'
        out.append(cell + match[2])
        if match.end() == len(body):
            break
    return "".join(out) + line[len(body) :]


_WRITERS: dict[str, Callable[[Path, Path, Path, Ledger], None]] = {
    "sqlite": _write_sqlite,
    "parquetdir": _write_parquetdir,
    "store": _write_store,
    "json": _write_json,
    "snapshot": _write_snapshot,
    "ncu-csv": _write_ncu_csv,
}
