"""Parquet store: the form of recordings and conversions, and the cache beside a big trace.

A store is a folder with ``trace.json`` (format version and what is known about the capture) and one
``<table>.parquet`` a table. The cache holds the same columns one file each, because it grows by the
columns that answers ask for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
import numpy as np
import pandas as pd
import pyarrow as pa

from nsightkit.errors import NsightkitError, TraceError, UsageError, reading, require_regular
from nsightkit.text import Json
from nsightkit.trace.files import (
    drafted,
    is_output_taken,
    is_private,
    make_private,
    remove_folder,
    replacing,
    user_cache,
    user_secret,
)
from nsightkit.trace.model import TABLES, TIME_COLUMNS, Source, Trace, TraceMeta, complete

_Value = TypeVar("_Value")

#: Version of the folder's form, raised when an older nsightkit could no longer read it.
_FORMAT = 2
_INDEX = "trace.json"
#: A larger file of that name is a PyTorch profiler trace.
_MOST_INDEX_BYTES = 16_000_000
#: Names in a cache: one folder per content of the trace, called by its key, and the files in that.
_CONTENT_FOLDER = re.compile(r"[0-9a-f]{32}")
_CONTENT_FILES = re.compile(r"[\w.-]+\.parquet|(meta|first_ns)\.json")


# -- tables to and from Parquet ---------------------------------------------------------------------------------


def _write_parquet(frame: pd.DataFrame, path: Path | BinaryIO, compression: str) -> None:
    """Write a table as Parquet: integers as differences, all else as codes into a dictionary."""
    import pyarrow.parquet as pq

    # replace_schema_metadata without an argument drops pandas's notes on the frame.
    table = pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata()
    # Most integers are times and ids, which grow steadily: deltas of them take a fifth of the space and of the time.
    delta = {name: "DELTA_BINARY_PACKED" for name in table.column_names if str(table[name].type) in ("int64", "int32")}
    pq.write_table(
        table,
        path,
        compression=compression,
        use_dictionary=[name for name in table.column_names if name not in delta],
        column_encoding=delta or None,
        write_statistics=False,
        store_schema=True,  # so that categories are read as categories
    )


def _to_pandas(table: pa.Table) -> pd.DataFrame:
    """Convert an Arrow table, which is used up, and give freed memory back to the system."""
    frame: pd.DataFrame = table.to_pandas(split_blocks=True, self_destruct=True)
    pa.default_memory_pool().release_unused()
    return frame


# -- the store --------------------------------------------------------------------------------------------------


def write(trace: Trace, folder: Path, *, overwrite: bool = False) -> None:
    """Write a trace as a Parquet folder that :func:`nsightkit.load` opens.

    The source's clock is kept (``start_ns`` in the files is on it), so that times stay comparable with the
    original report. Only what the Trace model names is written, and :func:`nsightkit.trace.clean.clean` has been
    through it: no environment, host or user name, and of other processes on the machine nothing.

    Parameters
    ----------
    trace : Trace
        With the selection it carries.
    folder : Path
        New or empty; nothing is left behind when writing fails.
    overwrite : bool
        Replace an existing trace folder, if it contains nothing else.

    Raises
    ------
    TraceError
        The target exists without `overwrite`, is not a trace folder, or contains other files.
    """
    from nsightkit.trace.clean import clean

    folder.parent.mkdir(parents=True, exist_ok=True)
    require_free(folder, overwrite=overwrite)
    trace = clean(trace)
    with drafted(folder) as draft:
        draft.mkdir()
        for table in filter(trace.size, TABLES):
            frame = trace.table(table)
            frame[list(TIME_COLUMNS)] += trace.t0_ns  # to the source's clock
            if table == "ranges" and (mask := trace.mask(table)) is not None:
                # Parents are rows of the whole table. `new_row` maps them to rows of the selection, -1 if left out; its
                # last entry keeps a parent of -1 (none) as it is.
                new_row = np.append(np.where(mask, np.cumsum(mask) - 1, -1), -1)
                frame["parent"] = new_row[frame["parent"]]
                frame["level"] = _nesting_depth(frame["parent"].to_numpy())
            for column in frame.select_dtypes("category").columns:
                frame[column] = frame[column].cat.remove_unused_categories()
            _write_parquet(frame, draft / f"{table}.parquet", "zstd")
        index = {
            "format": _FORMAT,
            "kind": "nsightkit trace",
            "first_ns": trace.t0_ns,
            "meta": msgspec.to_builtins(
                dataclasses.replace(trace.meta, thread_names=trace.thread_names()), str_keys=True
            ),
        }
        (draft / _INDEX).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _nesting_depth(parent: np.ndarray) -> np.ndarray:
    """Count the ranges around each range, given the row of each one's parent, -1 for none."""
    depth = np.zeros(len(parent), np.int32)
    parent_of_row = np.append(parent, -1)  # index -1 reads this last entry, so that -1 stays -1
    ancestor = parent
    while (ancestor >= 0).any():
        depth += ancestor >= 0
        ancestor = parent_of_row[ancestor]
    return depth


def require_free(folder: Path, *, overwrite: bool = False) -> None:
    """Raise an error unless a trace folder may be written there: where nothing is, or in place of an empty folder.

    Parameters
    ----------
    folder : Path
    overwrite : bool
        Also in place of a trace folder with nothing else in it.
    """
    if not is_output_taken(folder) or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not is_store(folder):
        raise TraceError(folder, "exists and is not a trace folder", "choose another name or remove it")
    if not overwrite:
        raise TraceError(folder, "exists", "give another name or --overwrite")
    ours = {_INDEX, *(f"{table}.parquet" for table in TABLES)}
    for entry in sorted(folder.iterdir()):
        if entry.name not in ours or not stat.S_ISREG(entry.lstat().st_mode):
            raise TraceError(
                folder, f"holds files that are not ours: {entry.name}", "choose another name or move them away"
            )


def is_store(folder: Path) -> bool:
    """Whether a folder was written by :func:`write`.

    Parameters
    ----------
    folder : Path
    """
    return bool(_read_store_index(folder).get("kind") == "nsightkit trace")


def _read_store_index(folder: Path) -> Json:
    """Read a folder's index; empty if it is absent, too large or not a JSON object."""
    file = folder / _INDEX
    if not file.exists():
        return {}
    require_regular(file)
    try:
        text = "" if file.stat().st_size > _MOST_INDEX_BYTES else file.read_text(encoding="utf-8")
        index = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return {}
    if isinstance(index, dict):
        return index
    return {}


class _StoreSource:
    """Reads single columns of a store."""

    def __init__(self, folder: Path) -> None:
        from nsightkit.trace.parquet import columns_of

        index = _read_store_index(folder)
        if index.get("format") != _FORMAT:
            raise TraceError(
                folder,
                f"was written in format {index.get('format')}, this version reads {_FORMAT}",
                "convert the original trace again",
            )
        self._folder = folder
        with reading(folder, f"has a damaged {_INDEX}", "convert the original trace again"):
            self._first_ns = int(index.get("first_ns", 0))
            self.meta = msgspec.convert(index.get("meta"), TraceMeta, str_keys=True)
        files = [folder / f"{table}.parquet" for table in TABLES]
        # By file and column, whether it holds texts; tables without rows have no file.
        self._columns = columns_of(list(filter(os.path.lexists, files)))

    def read(self, table: str, columns: Sequence[str]) -> pd.DataFrame:
        """See :class:`~nsightkit.trace.model.Source`."""
        from nsightkit.trace.parquet import read_table

        file = self._folder / f"{table}.parquet"
        if file not in self._columns:
            return complete(table, None, columns)
        with reading(file, "is not a readable Parquet table", "convert the original trace again"):
            # A store that an older version wrote may lack a column.
            present = {column: is_text for column, is_text in self._columns[file].items() if column in columns}
            # Where none of the columns is there, the starts at least tell how many rows to complete.
            frame = _to_pandas(read_table(file, present or {"start_ns": False}))
            return complete(table, frame, columns)

    def first_ns(self) -> int:
        """See :class:`~nsightkit.trace.model.Source`."""
        return self._first_ns


def open_store(folder: Path) -> Source:
    """Open a folder written by :func:`write`.

    Parameters
    ----------
    folder : Path

    Raises
    ------
    TraceError
        Damaged, or of a format this version does not read.
    """
    return _StoreSource(folder)


# -- the cache --------------------------------------------------------------------------------------------------


@functools.cache
def _readers_version() -> str:
    """Hash the code of the readers, so that no other version uses what this one cached."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(Path(__file__).parent.iterdir()):
        if file.suffix in (".py", ".toml"):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _content_key(path: Path, reader: str) -> str:
    """Hash a file's content for one reader: its size, times, and 512 blocks of 4 KiB, evenly spread over the file.

    Reading all of a large file would cost more than the answers do. The blocks notice every write to an SQLite file,
    which changes the header in its first block. The key is made with a secret of the user, so that a cache that came
    with somebody else's archive never has the right name: only what this user's nsightkit wrote is read. The change
    time (ctime) keeps out a cache that the user once shared and got back modified.
    """
    digest = hashlib.blake2b(f"{reader} {_readers_version()}".encode(), digest_size=16, key=user_secret())
    state = path.stat()
    digest.update(f"{state.st_size} {state.st_mtime_ns} {state.st_ctime_ns}".encode())
    with path.open("rb") as stream:
        for offset in np.linspace(0, max(state.st_size - 4096, 0), 512).astype(np.int64).tolist():
            stream.seek(offset)
            digest.update(stream.read(4096))
    return digest.hexdigest()


def cache_folder(path: Path) -> Path | None:
    """Find the place for a trace's cache: beside the trace, or in the user's cache folder where that is read-only.

    Parameters
    ----------
    path : Path
        The trace. For a link, the cache lies beside the target, so that all links share it.

    Returns
    -------
    Path or None
        None when neither place can be used: it cannot be written, or a folder is there that is not private (a link,
        another user's, open to others). The folder may not exist yet.
    """
    path = path.resolve()
    beside = path.with_name(path.name + ".nsightkit-cache")
    of_user = user_cache() / hashlib.blake2b(os.fsencode(path), digest_size=12).hexdigest()
    for folder in (beside, of_user):
        exists = os.path.lexists(folder)
        if exists and not is_private(folder):
            continue
        if os.access(folder if exists else folder.parent, os.R_OK | os.W_OK | os.X_OK):
            return folder
    return None


def _content_folder(path: Path, reader: str) -> Path | None:
    """Find the folder for the columns of a trace with its present content; None without a usable cache."""
    with contextlib.suppress(OSError, NsightkitError, RuntimeError):  # RuntimeError: no home folder
        key = _content_key(path, reader)
        cache = cache_folder(path)
        if cache is None:
            return None
        folder = cache / key
        if os.path.lexists(folder) and not is_private(folder):
            return None
        if cache.exists():
            _remove_other_versions(cache, key)
        return folder
    return None


def _remove_other_versions(cache: Path, key: str) -> None:
    """Remove what other versions of nsightkit cached, or this one while the trace had other contents."""
    for entry in cache.iterdir():
        if entry.name != key and _CONTENT_FOLDER.fullmatch(entry.name):
            remove_folder(entry, _CONTENT_FILES)


class _CachedSource:
    """Reads cached columns; opens the trace itself only for what is not cached yet."""

    def __init__(self, folder: Path, open_source: Callable[[], Source]) -> None:
        self._folder = folder
        self._source = functools.cache(open_source)  # opened at the first call
        self.meta = self._read_or_find("meta", TraceMeta, lambda: self._source().meta)

    def read(self, table: str, columns: Sequence[str]) -> pd.DataFrame:
        """See :class:`~nsightkit.trace.model.Source`."""
        cached_frames = {column: self._read_column(f"{table}.{column}") for column in columns}
        uncached = [column for column, frame in cached_frames.items() if frame is None]
        fresh = self._source().read(table, uncached) if uncached else pd.DataFrame()
        for column in uncached:
            self._write_column(f"{table}.{column}", fresh[[column]])
        values = {column: (fresh if frame is None else frame)[column] for column, frame in cached_frames.items()}
        return pd.DataFrame(values, copy=False)

    def first_ns(self) -> int:
        """See :class:`~nsightkit.trace.model.Source`."""
        return self._read_or_find("first_ns", int, lambda: self._source().first_ns())

    def _read_or_find(self, name: str, kind: type[_Value], find: Callable[[], _Value]) -> _Value:
        """Read a value from its JSON file in the cache; where that is absent or damaged, find it and cache it."""
        with contextlib.suppress(OSError, ValueError, msgspec.DecodeError):
            return msgspec.json.decode((self._folder / f"{name}.json").read_bytes(), type=kind)
        value = find()
        # Like all writing to the cache, this does nothing where the disk is full or read-only.
        self._write_file(f"{name}.json", lambda file: file.write(msgspec.json.encode(value)))
        return value

    def _read_column(self, name: str) -> pd.DataFrame | None:
        """Read a column from its file in the cache; None where that is absent or damaged."""
        import pyarrow.parquet as pq

        with contextlib.suppress(Exception):
            return _to_pandas(pq.read_table(self._folder / f"{name}.parquet", use_threads=False))
        return None

    def _write_column(self, name: str, frame: pd.DataFrame) -> None:
        """Write a column, in a frame of its own, to its file in the cache."""
        self._write_file(f"{name}.parquet", lambda file: _write_parquet(frame, file, "none"))

    def _write_file(self, name: str, write_to: Callable[[BinaryIO], Any]) -> None:
        """Write a file of the cache, or do nothing if that is impossible: the cache only saves time."""
        with contextlib.suppress(OSError, UsageError):
            make_private(self._folder.parent)
            make_private(self._folder)
            with replacing(self._folder / name) as file:
                write_to(file)


def cached(path: Path, open_source: Callable[[], Source], reader: str) -> Source:
    """Open a trace by way of its cache.

    Parameters
    ----------
    path : Path
        The trace.
    open_source : callable
        Opens the trace itself.
    reader : str
        Name of the reader, part of the cache's key.

    Returns
    -------
    Source
    """
    folder = _content_folder(path, reader)
    if folder is None:
        return open_source()
    return _CachedSource(folder, open_source)
