"""Copies of files without secrets, of the same kind and with the same answers."""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nsightkit.errors import TraceError, UsageError, reading
from nsightkit.trace import ncu, ncu_tool, nsys_tool, snapshot, store
from nsightkit.trace.files import drafted
from nsightkit.trace.model import Trace
from nsightkit.trace.open import kind_of, load
from nsightkit.trace.share import nsys as exports
from nsightkit.trace.share.clean import CleanSource
from nsightkit.trace.share.documents import copy_json, learn_json
from nsightkit.trace.share.secrets import Ledger, Scrubber
from nsightkit.trace.share.snapshots import clean_snapshot, write_snapshot

__all__ = ["Copied", "copy", "learn"]


def learn(path: Path, scrubber: Scrubber) -> None:
    """Learn from the file behind a trace who and where made it: a host's name has no form of its own.

    Parameters
    ----------
    path : Path
    scrubber : Scrubber
    """
    kind = kind_of(path)
    if kind in ("nsys-rep", "sqlite", "parquetdir"):
        exports.learn_export(nsys_tool.exported(path) if kind == "nsys-rep" else path, scrubber)
    elif kind == "json":
        learn_json(path, scrubber)


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

    Parameters
    ----------
    path : path-like
        An Nsight Systems SQLite or ``parquetdir`` export, a PyTorch profiler trace, a memory snapshot, a CSV that
        ``ncu`` printed, or a folder that ``convert`` wrote. Only read.
    out : path-like
        The copy; appears whole or not at all. JSON is gzipped if the name ends in ``.gz``, or if neither name tells and
        the trace is.
    overwrite : bool
        Replace what is there, if it is not a folder of something else.

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
    try:
        with drafted(out) as draft:
            _COPIERS[kind](path, draft, ledger)
            for other in _beside(out):
                other.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"{out}: cannot be written ({error.strerror or error})") from error
    rows = sorted(ledger.removed.items(), key=lambda item: (-item[1], item[0]))
    return Copied(out, [{"kind": kind, "place": place, "count": count} for (kind, place), count in rows if count])


def _check_kind(path: Path, kind: str) -> None:
    """Refuse what is not a trace, and what is one in a form that hides its texts."""
    if kind in ("nsys-rep", "ncu-rep"):
        nsys = shlex.join(nsys_tool.export_command(path.name, path.with_suffix(".sqlite").name))
        ncu_page = f"{shlex.join(ncu_tool.export_command(path.name))} > {shlex.quote(path.stem + '.csv')}"
        command = nsys if kind == "nsys-rep" else ncu_page
        raise TraceError(path, "is a binary report, which cannot be scrubbed", f"export it first: {command}")
    if kind not in _COPIERS:
        load(path, cache=False)  # says what it is
        raise TraceError(path, "is not a trace that can be scrubbed", "give an export, a JSON trace or a snapshot")


def _check_out(path: Path, out: Path, folder: bool, overwrite: bool) -> None:
    there, trace = out.resolve(), path.resolve()
    beside = [other for other in _beside(out) if other.exists()]
    taken = out.exists() or out.is_symlink() or bool(beside)
    is_folder = out.is_dir() and not out.is_symlink()
    ours = is_folder and overwrite and (store.is_store(out) or not any(out.iterdir()) or any(out.glob("*.parquet")))
    rename = "give another name for the copy"
    for refused, why in (
        (not out.absolute().parent.is_dir(), f"{out}: its folder does not exist; make it first"),
        (there == trace or (out.exists() and out.samefile(path)), f"{out} is the trace itself; {rename}"),
        (path.is_dir() and there.is_relative_to(trace), f"{out} is in the trace's own folder; {rename}"),
        (trace.is_relative_to(there), f"{out} holds the trace; {rename}"),
        (taken and not overwrite, f"{beside[0] if beside else out} is there; give another name, or --overwrite"),
        (is_folder and not (folder and ours), f"{out} is a folder of something else; give another name"),
        (folder and out.exists() and not is_folder, f"{out} is a file; give another name for the folder"),
    ):
        if refused:
            raise UsageError(why)


def _beside(out: Path) -> list[Path]:
    """What SQLite would take for parts of the copy, if it were there."""
    return [out.with_name(out.name + end) for end in ("-wal", "-journal", "-shm")]


def _copy_store(path: Path, draft: Path, ledger: Ledger) -> None:
    store.write(Trace(CleanSource(Trace(store.open_store(path), str(path)), ledger.scrubber)), draft)
    for kind in ledger.scrubber.removed:
        ledger.removed[kind, "names"] += 1


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
            ledger.scrubber.learn("host", cells[host] if lines[-1][3] >= 0 else None)
        ledger.scrubber.learn_from(line)
    with io.StringIO(newline="") as out:
        for line, end, cells, host in lines:
            new = [ledger.text(cell, "cells") for cell in cells]
            if host >= 0:
                new[host] = ledger.apply(Scrubber.value, "Host Name", cells[host], "hostname")
            if new != cells:
                csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator=end).writerow(new)
            else:
                out.write((line if cells else ledger.text(line, "output")) + end)
        draft.write_bytes(out.getvalue().encode(*codec))


_COPIERS: dict[str, Callable[[Path, Path, Ledger], None]] = {
    "sqlite": exports.copy_sqlite,
    "parquetdir": exports.copy_parquetdir,
    "store": _copy_store,
    "json": copy_json,
    "snapshot": _copy_snapshot,
    "ncu-csv": _copy_ncu_csv,
}
