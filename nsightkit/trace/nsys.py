"""Reader for Nsight Systems exports: SQLite of every schema since 2.9 (2022.2), and ``parquetdir``.

nsys writes tables lazily, renames them between versions and adds columns; everything optional is probed,
nothing assumed. Columns are streamed through ADBC into numpy arrays, only those that are asked for:
for 5 M kernels this took about a tenth of the CPU time of ``pandas.read_sql``.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.errors import TraceError
from nsightkit.trace import sqlite_pages
from nsightkit.trace.model import TABLES, Gpu, Source, TraceMeta, categorical, complete

__all__ = ["check_complete", "open_parquetdir", "open_sqlite", "quoted"]

Array = npt.NDArray[Any]

_KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
_MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
_MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"
_GRAPH = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
_SYNC = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
_NVTX = "NVTX_EVENTS"
_OSRT = "OSRT_API"
_OVERHEAD = ("PROFILER_OVERHEAD", "CUPTI_ACTIVITY_KIND_OVERHEAD")

#: The exporter's tables behind each of ours.
_BACKING = {
    "kernels": (_KERNEL,),
    "memops": (_MEMCPY, _MEMSET),
    "graphs": (_GRAPH,),
    "calls": (_RUNTIME,),
    "syncs": (_SYNC,),
    "ranges": (_NVTX,),
    "ops": (),
    "os_calls": (_OSRT,),
    "overhead": _OVERHEAD,
}
_CUDA = (_KERNEL, _MEMCPY, _MEMSET, _GRAPH, _RUNTIME, _SYNC)

#: cuptiActivityMemcpyKind and cuptiActivityMemoryKind (ENUM_CUDA_MEMCPY_OPER, ENUM_CUDA_MEM_KIND in an export).
_COPY_KINDS = ["other", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP"]
_COPY_KINDS += ["unified HtoD", "unified DtoH", "unified DtoD", "memset"]
_MEMSET_KIND = 14
_MEM_KINDS = ["pageable", "pinned", "device", "array", "managed", "device static", "managed static", "unknown", ""]
_UNKNOWN_MEM, _NO_MEM = 7, 8
_SYNC_KINDS = ["other", "event", "stream-wait-event", "stream", "context"]

#: NVTX_EVENTS.eventType: push/pop and start/end ranges, live and from NVTXT files; 75 announces a domain.
_PUSH_POP, _START_END, _DOMAIN = (59, 70), (60, 71), 75

#: OSRT_API.eventClass of "OS runtime libraries profiling started" and "finished", which are no calls.
_OSRT_MARKS = (31, 32)

#: `cudaLaunchKernel_v7000` is cudaLaunchKernel as introduced by CUDA 7.0; `cuGetProcAddress_v2` is a name of its own.
_CALL_VERSION = re.compile(r"_v\d{4,}$")

_ID_24_BITS = 0xFFFFFF


def _process_of(global_id: Array) -> Array:
    """Process id of nsys's serialised global process or thread id (bits 24 to 47)."""
    return (global_id >> 24) & _ID_24_BITS


def _thread_of(global_id: Array) -> Array:
    """The model's thread: process id and thread id, without nsys's host bits."""
    return global_id & 0xFFFF_FFFF_FFFF


class _Tables(Protocol):
    """An export as named integer columns and strings."""

    path: Path

    def tables(self) -> set[str]: ...

    def columns(self, table: str) -> list[str]: ...

    def size(self, table: str) -> int: ...

    def integers(self, table: str, columns: Sequence[str], kinds: Sequence[int] | None = None) -> dict[str, Array]:
        """Integer columns, NULL as the smallest int64; `kinds` keeps the rows with these `eventType`."""
        ...

    def texts(self, table: str, column: str, kinds: Sequence[int] | None = None) -> tuple[Array, list[str]]:
        """A text column as codes (-1 for NULL) into distinct strings."""
        ...

    def least(self, table: str, column: str) -> int | None: ...

    def strings(self, ids: Array) -> list[str]: ...

    def records(self, table: str) -> list[dict[str, Any]]:
        """All of a small table."""
        ...


_NULL = sqlite_pages.NULL


def _decode(raw: Any) -> str:
    # Real exports hold non-UTF-8 bytes in TEXT columns.
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)


def check_complete(path: Path) -> None:
    """Refuse a database that is shorter than it says.

    Parameters
    ----------
    path : Path

    Raises
    ------
    TraceError
    """
    # SQLite opens a truncated file without complaint and fails, or not, on the pages that are gone.
    with path.open("rb") as stream:
        head = stream.read(100)
    size = path.stat().st_size
    page = int.from_bytes(head[16:18], "big")
    page = 65536 if page == 1 else page
    pages = int.from_bytes(head[28:32], "big")
    current = head[24:28] == head[92:96]  # the page count is valid only when these agree
    if len(head) < 100 or (current and pages and size < pages * page):
        raise TraceError(
            path,
            f"is truncated ({size:,} of {pages * page:,} bytes)" if len(head) == 100 else "is truncated",
            "copy or export it again: nsys export --type sqlite --force-overwrite true",
        )


class _Sqlite:
    """An export in SQLite. Identifiers come from constants in this module and are quoted; values are bound."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._uri = f"file:{urllib.parse.quote(str(path.resolve()))}?mode=ro"
        check_complete(self.path)
        with self._guard(), self._connect() as connection:
            rows = connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')").fetchall()
            self._tables = {_decode(name) for (name,) in rows}
            self._columns = {
                t: [_decode(r[1]) for r in connection.execute(f"PRAGMA table_info({quoted(t)})")] for t in self._tables
            }

    @contextlib.contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(self._uri, uri=True)
        connection.text_factory = bytes
        try:
            yield connection
        finally:
            connection.close()

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not isinstance(error, sqlite3.Error | OverflowError | UnicodeError) and not _of_driver(error):
                raise
            detail = " ".join(str(error).split())[:160]
            raise TraceError(
                self.path,
                f"is damaged or no Nsight Systems export ({detail})",
                "export it again with nsys export --type sqlite",
            ) from error

    def tables(self) -> set[str]:
        return self._tables

    def columns(self, table: str) -> list[str]:
        return self._columns.get(table, [])

    def size(self, table: str) -> int:
        with self._guard(), self._connect() as connection:
            return int(connection.execute(f"SELECT count(*) FROM {quoted(table)}").fetchone()[0])  # noqa: S608

    def least(self, table: str, column: str) -> int | None:
        with self._guard(), self._connect() as connection:
            value = connection.execute(f"SELECT min({quoted(column)}) FROM {quoted(table)}").fetchone()[0]  # noqa: S608
            return value if isinstance(value, int) else None

    def _stream(self, expressions: list[str], table: str, kinds: Sequence[int] | None) -> Iterator[Any]:
        """Arrow batches of a query."""
        from adbc_driver_sqlite import dbapi

        where = f" WHERE eventType IN ({', '.join(str(int(k)) for k in kinds)})" if kinds is not None else ""
        query = f"SELECT {', '.join(expressions)} FROM {quoted(table)}{where}"  # noqa: S608
        with dbapi.connect(self._uri, autocommit=True) as connection, connection.cursor() as cursor:
            cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": 65536})
            cursor.execute(query)
            yield from cursor.fetch_record_batch()

    def _capacity(self, table: str) -> int:
        # The largest rowid bounds the row count and costs one descent of the tree; count(*) reads every page.
        with self._connect() as connection:
            try:
                top = connection.execute(f"SELECT max(rowid) FROM {quoted(table)}").fetchone()[0] or 0  # noqa: S608
            except sqlite3.Error:  # a view or a WITHOUT ROWID table
                top = -1
        bound = self.path.stat().st_size // 4  # no row takes less
        return int(top) if 0 <= top <= bound else self.size(table)

    def integers(self, table: str, columns: Sequence[str], kinds: Sequence[int] | None = None) -> dict[str, Array]:
        names = self._columns[table]
        filtered = (names.index("eventType"), kinds) if kinds is not None else None
        try:
            found = sqlite_pages.integer_columns(
                self.path, self._root(table), [names.index(c) for c in columns], filtered
            )
            return dict(zip(columns, found, strict=True))
        except (sqlite_pages.Unusual, IndexError, ValueError, OverflowError):
            return self._integers_by_query(table, columns, kinds)

    def _root(self, table: str) -> int:
        """Root page of a plain table whose columns all stand in its records."""
        with self._guard(), self._connect() as connection:
            query = "SELECT rootpage FROM sqlite_master WHERE type = 'table' AND name = ?"
            row = connection.execute(query, (table,)).fetchone()
            aliases_rowid = any(r[5] for r in connection.execute(f"PRAGMA table_info({quoted(table)})"))
        if row is None or not row[0] or aliases_rowid:
            raise sqlite_pages.Unusual("no plain table")
        return int(row[0])

    def _integers_by_query(self, table: str, columns: Sequence[str], kinds: Sequence[int] | None) -> dict[str, Array]:
        with self._guard():
            capacity = self._capacity(table)
            out = [np.empty(capacity, np.int64) for _ in columns]
            n = 0
            for batch in self._stream([quoted(c) for c in columns], table, kinds):
                m = batch.num_rows
                if n + m > capacity:
                    capacity = max(2 * capacity, n + m)
                    for array in out:
                        array.resize(capacity, refcheck=False)
                for array, column in zip(out, batch.columns, strict=True):
                    array[n : n + m] = _as_int64(column)
                n += m
            return {c: a[:n] for c, a in zip(columns, out, strict=True)}

    def texts(self, table: str, column: str, kinds: Sequence[int] | None = None) -> tuple[Array, list[str]]:
        import pyarrow as pa

        name = quoted(column)
        # As a blob that is never NULL: the driver fixes a column's type on its first rows, and text may be no UTF-8.
        query = [f"CAST(coalesce(CAST({name} AS BLOB), x'') AS BLOB)", f"{name} IS NULL"]
        codes: list[Array] = []
        known: dict[str, int] = {}
        with self._guard():
            for batch in self._stream(query, table, kinds):
                encoded = batch.columns[0].cast(pa.binary()).dictionary_encode()
                distinct = [_decode(v) for v in encoded.dictionary.to_pylist()]
                place = np.array([known.setdefault(v, len(known)) for v in distinct], np.int64)
                code = place[encoded.indices.to_numpy(zero_copy_only=False)] if len(place) else np.empty(0, np.int64)
                codes.append(np.where(_as_int64(batch.columns[1]) == 1, -1, code))
        return (np.concatenate(codes) if codes else np.empty(0, np.int64)), list(known)

    def strings(self, ids: Array) -> list[str]:
        if "StringIds" not in self._tables:
            return [f"#{i}" for i in ids]
        found: dict[int, str] = {}
        with self._guard(), self._connect() as connection:
            if len(ids) <= 2000:
                for one in ids.tolist():
                    row = connection.execute("SELECT value FROM StringIds WHERE id = ?", (one,)).fetchone()
                    if row is not None:
                        found[one] = _decode(row[0])
            else:
                found = {i: _decode(v) for i, v in connection.execute("SELECT id, value FROM StringIds")}
        return [found.get(i, f"#{i}") for i in ids.tolist()]

    def records(self, table: str) -> list[dict[str, Any]]:
        if table not in self._tables:
            return []
        names = self._columns[table]
        with self._guard(), self._connect() as connection:
            rows = connection.execute(f"SELECT * FROM {quoted(table)}").fetchall()  # noqa: S608
        return [{n: _decode(v) if isinstance(v, bytes) else v for n, v in zip(names, row, strict=True)} for row in rows]


def _of_driver(error: Exception) -> bool:
    """Whether ADBC or Arrow raised it; neither is imported to find out."""
    return any(base.__module__.split(".")[0] in ("adbc_driver_manager", "pyarrow") for base in type(error).__mro__)


def quoted(identifier: str) -> str:
    """Quote an SQL identifier.

    Parameters
    ----------
    identifier : str
    """
    return '"' + identifier.replace('"', '""') + '"'


def _as_int64(column: Any) -> Array:
    """An Arrow column as int64, NULL as `_NULL`."""
    import pyarrow as pa

    if pa.types.is_null(column.type):
        return np.full(len(column), _NULL, np.int64)
    if pa.types.is_temporal(column.type) or pa.types.is_unsigned_integer(column.type):
        column = column.cast(pa.int64(), safe=False)
    elif not pa.types.is_int64(column.type):
        column = column.cast(pa.int64())
    if column.null_count:
        column = column.fill_null(int(_NULL))
    return np.asarray(column.to_numpy(zero_copy_only=False), np.int64)


class _ParquetDir:
    """An export as a folder of Parquet files (``nsys export --type parquetdir``), one a table."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = {f.stem: f for f in path.glob("*.parquet")}
        self._columns: dict[str, list[str]] = {}

    @contextlib.contextmanager
    def _guard(self, table: str) -> Iterator[None]:
        import pyarrow as pa

        try:
            yield
        except (pa.ArrowException, OSError, KeyError) as error:
            detail = " ".join(str(error).split())[:160]
            raise TraceError(
                self._files.get(table, self.path),
                f"is no readable Parquet table ({detail})",
                "export it again with nsys export --type parquetdir",
            ) from error

    def _read(self, table: str, columns: Sequence[str] | None, kinds: Sequence[int] | None = None) -> Any:
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        with self._guard(table):
            wanted = (
                None
                if columns is None
                else list(dict.fromkeys([*columns, *(["eventType"] if kinds is not None else [])]))
            )
            read = pq.read_table(self._files[table], columns=wanted)
            if kinds is not None:
                import pyarrow as pa

                kind = read["eventType"].cast(pa.int64())
                read = read.filter(pc.is_in(kind, value_set=pa.array(list(kinds), pa.int64())))
            return read.combine_chunks()

    def tables(self) -> set[str]:
        return set(self._files)

    def columns(self, table: str) -> list[str]:
        import pyarrow.parquet as pq

        if table not in self._files:
            return []
        if table not in self._columns:
            with self._guard(table):
                self._columns[table] = list(pq.read_schema(self._files[table]).names)
        return self._columns[table]

    def size(self, table: str) -> int:
        import pyarrow.parquet as pq

        with self._guard(table):
            return int(pq.read_metadata(self._files[table]).num_rows)

    def least(self, table: str, column: str) -> int | None:
        values = self.integers(table, [column])[column]
        return int(values.min()) if len(values) else None

    def integers(self, table: str, columns: Sequence[str], kinds: Sequence[int] | None = None) -> dict[str, Array]:
        read = self._read(table, list(columns), kinds)
        with self._guard(table):
            return {c: _as_int64(_one_chunk(read[c])) for c in columns}

    def texts(self, table: str, column: str, kinds: Sequence[int] | None = None) -> tuple[Array, list[str]]:
        read = self._read(table, [column], kinds)
        codes, distinct = pd.factorize(np.array(read[column].to_pylist(), dtype=object))
        return np.asarray(codes, np.int64), [_decode(v) for v in distinct]

    def strings(self, ids: Array) -> list[str]:
        if "StringIds" not in self._files:
            return [f"#{i}" for i in ids]
        read = self._read("StringIds", ["id", "value"])
        found = dict(zip(read["id"].to_pylist(), read["value"].to_pylist(), strict=True))
        return [_decode(found.get(i, f"#{i}")) for i in ids.tolist()]

    def records(self, table: str) -> list[dict[str, Any]]:
        return list(self._read(table, None).to_pylist()) if table in self._files else []


def _one_chunk(column: Any) -> Any:
    import pyarrow as pa

    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


#: Columns of NVTX_EVENTS behind each column of the model.
_NESTING = ["start", "end", "globalTid", "eventType"]
_RANGE_SOURCES = {
    "start_ns": ["start"],
    "end_ns": ["end"],
    "duration_ns": ["start", "end"],
    "process": ["globalTid"],
    "thread": ["globalTid"],
    "end_thread": ["endGlobalTid", "globalTid"],
    "name": ["textId"],
    "domain": ["domainId", "globalTid"],
    "kind": ["eventType"],
    "open": ["end"],
    "level": _NESTING,
    "parent": _NESTING,
}


class NsysSource:
    """Maps an export's tables to the model's, column by column.

    Parameters
    ----------
    tables : _Tables
        The export.

    Raises
    ------
    TraceError
        The file holds none of the tables of an Nsight Systems export.
    """

    def __init__(self, tables: _Tables) -> None:
        self._tables = tables
        present = tables.tables()
        known = {t for backing in _BACKING.values() for t in backing} | {
            "StringIds",
            "ANALYSIS_DETAILS",
            "META_DATA_EXPORT",
            "EXPORT_META_DATA",
        }
        if not present & known:
            raise TraceError(
                tables.path,
                "is a database, but no Nsight Systems export",
                "export the report with nsys export --type sqlite",
            )
        for table in present & known:
            missing = {"start"} - set(tables.columns(table)) if table in (*_CUDA, _NVTX, _OSRT) else set()
            if missing:
                raise TraceError(
                    tables.path,
                    f"has a table {table} without the column start",
                    "export the report again with nsys export --type sqlite",
                )
        self._gpu_of = self._device_map()
        self._first: dict[str, int | None] = {}
        self.meta = self._read_meta()

    # -- the Source protocol ------------------------------------------------------------------------------------

    def read(self, table: str, columns: Sequence[str]) -> pd.DataFrame:
        """See :class:`~nsightkit.trace.model.Source`."""
        parts = [self._part(table, t, list(columns)) for t in _BACKING[table] if t in self._tables.tables()]
        if not parts:
            return complete(table, pd.DataFrame())[[c for c in columns if c != "duration_ns"]].assign(
                **({"duration_ns": np.empty(0, np.int64)} if "duration_ns" in columns else {})
            )
        if "start_ns" in columns:
            for name, part in zip([t for t in _BACKING[table] if t in self._tables.tables()], parts, strict=True):
                starts = part["start_ns"]
                self._first[name] = int(starts.min()) if len(starts) else None
        if len(parts) == 1:
            return pd.DataFrame(parts[0], copy=False)
        joined: dict[str, Any] = {}
        for column in columns:
            values = [p[column] for p in parts]
            if isinstance(values[0], pd.Categorical):
                joined[column] = pd.api.types.union_categoricals(values)
            else:
                joined[column] = np.concatenate(values)
        return pd.DataFrame(joined, copy=False)

    def size(self, table: str) -> int:
        """See :class:`~nsightkit.trace.model.Source`."""
        present = [t for t in _BACKING[table] if t in self._tables.tables()]
        if table == "ranges":
            return len(self._tables.integers(_NVTX, ["start"], (*_PUSH_POP, *_START_END))["start"]) if present else 0
        if table == "os_calls":
            return len(self._rows(_OSRT, ["start"])["start"]) if present else 0
        return sum(self._tables.size(t) for t in present)

    def first_ns(self) -> int:
        """See :class:`~nsightkit.trace.model.Source`."""
        starts = []
        for backing in _BACKING.values():
            for name in backing:
                if name not in self._tables.tables():
                    continue
                if name not in self._first:
                    if name in (_NVTX, _OSRT):  # where not every row is an event
                        kinds = (*_PUSH_POP, *_START_END)
                        nvtx = name == _NVTX
                        rows = self._tables.integers(name, ["start"], kinds) if nvtx else self._rows(name, ["start"])
                        self._first[name] = int(rows["start"].min()) if len(rows["start"]) else None
                    else:
                        self._first[name] = self._tables.least(name, "start")
                first = self._first[name]
                if first is not None:
                    starts.append(first)
        return min(starts, default=0)

    # -- columns ------------------------------------------------------------------------------------------------

    def _part(self, table: str, name: str, columns: list[str]) -> dict[str, Any]:
        """The wanted columns of one of the exporter's tables."""
        if table == "ranges":
            return self._ranges(columns)
        have = set(self._tables.columns(name))
        plan = {c: _PLANS[table][c] for c in columns}
        needed = {s for c in columns for s in plan[c].sources(name, self) if s in have}
        # Never without a column: the number of rows must come from somewhere.
        raw = self._rows(name, sorted(needed) or ["start"])
        n = len(next(iter(raw.values())))
        return {c: plan[c].build(self, name, raw, n) for c in columns}

    def _rows(self, name: str, columns: list[str]) -> dict[str, Array]:
        """Integer columns of the rows that are events: the OS table also marks where its tracing began and ended."""
        if name != _OSRT or "eventClass" not in self._tables.columns(name):
            return self._tables.integers(name, columns)
        raw = self._tables.integers(name, list(dict.fromkeys([*columns, "eventClass"])))
        keep = ~np.isin(raw["eventClass"], _OSRT_MARKS)
        return {c: raw[c][keep] for c in columns}

    def names(self, ids: Array, clean: Callable[[str], str] | None = None) -> pd.Categorical:
        """String ids as a categorical of their texts; ids of equal texts become one category."""
        codes, distinct = pd.factorize(ids)
        texts = self._tables.strings(np.asarray(distinct, np.int64))
        if clean is not None:
            texts = [clean(t) for t in texts]
        return _categorical(np.asarray(codes), texts)

    def _ranges(self, columns: list[str]) -> dict[str, Any]:
        kinds = (*_PUSH_POP, *_START_END)
        have = set(self._tables.columns(_NVTX))
        out: dict[str, Any] = {}
        needed = {s for c in columns for s in _RANGE_SOURCES[c] if s in have} | {"start"}
        raw = self._tables.integers(_NVTX, sorted(needed), kinds)
        n = len(raw["start"])
        if "end" in raw:
            is_open = raw["end"] == _NULL
            if is_open.any():
                closed = raw["end"][~is_open]
                last = int(max(closed.max(initial=_NULL), raw["start"].max()))
                raw["end"] = np.where(is_open, last, raw["end"])
        if {"level", "parent"} & set(columns):
            from nsightkit.trace.nesting import nesting

            stacked = np.flatnonzero(np.isin(raw["eventType"], _PUSH_POP))
            level, parent = np.zeros(n, np.int32), np.full(n, -1, np.int64)
            if len(stacked):
                depth, above = nesting(raw["globalTid"][stacked], raw["start"][stacked], raw["end"][stacked])
                level[stacked] = depth
                parent[stacked] = np.where(above >= 0, stacked[np.maximum(above, 0)], -1)
            out |= {"level": level, "parent": parent}
        for column in columns:
            if column in ("start_ns", "end_ns"):
                out[column] = raw[column.removesuffix("_ns")]
            elif column == "duration_ns":
                out[column] = raw["end"] - raw["start"]
            elif column == "process":
                out[column] = _process_of(raw["globalTid"])
            elif column == "thread":
                out[column] = _thread_of(raw["globalTid"])
            elif column == "end_thread":
                start_thread = raw["globalTid"]
                end_thread = raw.get("endGlobalTid", start_thread)
                out[column] = _thread_of(np.where((end_thread == _NULL) | (end_thread == 0), start_thread, end_thread))
            elif column == "open":
                out[column] = is_open
            elif column == "kind":
                out[column] = _categorical(
                    np.isin(raw["eventType"], _START_END).astype(np.int8), ["pushpop", "startend"]
                )
            elif column == "domain":
                out[column] = self._domains(raw, n)
            elif column == "name":
                out[column] = self._range_names(raw, n, have, kinds)
        return {c: out[c] for c in columns}

    def _range_names(self, raw: Mapping[str, Array], n: int, have: set[str], kinds: Sequence[int]) -> pd.Categorical:
        """Registered strings fill textId, plain ones text; a range may have neither."""
        codes, texts = np.full(n, -1, np.int64), []
        ids = raw.get("textId")
        if ids is not None and (ids != _NULL).any():
            codes, distinct = pd.factorize(ids)
            real = np.asarray(distinct, np.int64)
            texts = self._tables.strings(real)
            codes = np.where(ids == _NULL, -1, codes)
        if "text" in have and (codes < 0).any():
            plain, more = self._tables.texts(_NVTX, "text", kinds)
            codes = np.where((codes < 0) & (plain >= 0), plain + len(texts), codes)
            texts = texts + more
        return _categorical(np.where(codes < 0, len(texts), codes), [*texts, ""])

    def _domains(self, raw: Mapping[str, Array], n: int) -> pd.Categorical:
        ids = raw.get("domainId")
        if ids is None or not ((ids != 0) & (ids != _NULL)).any():
            return _categorical(np.zeros(n, np.int8), [""])
        announced = self._tables.integers(_NVTX, ["domainId", "globalTid"], (_DOMAIN,))
        plain, texts = self._tables.texts(_NVTX, "text", (_DOMAIN,))
        if "textId" in self._tables.columns(_NVTX):
            registered = self._tables.integers(_NVTX, ["textId"], (_DOMAIN,))["textId"]
            named = self._tables.strings(registered)
        else:
            registered, named = np.full(len(plain), _NULL, np.int64), [""] * len(plain)
        name_of = {
            (int(p), int(d)): named[i] if registered[i] != _NULL else (texts[plain[i]] if plain[i] >= 0 else "")
            for i, (p, d) in enumerate(zip(_process_of(announced["globalTid"]), announced["domainId"], strict=True))
        }
        ids = np.where(ids == _NULL, 0, ids)
        key, distinct = pd.factorize(pd.MultiIndex.from_arrays([_process_of(raw["globalTid"]), ids]))
        labels = ["" if d == 0 else name_of.get((int(p), int(d)), f"domain {d}") for p, d in distinct]
        return _categorical(np.asarray(key), labels)

    # -- what the export says about itself ----------------------------------------------------------------------

    def _device_map(self) -> dict[tuple[int, int], int]:
        """{(process, CUDA ordinal): GPU} where the two differ (CUDA_VISIBLE_DEVICES); exports since 2024 say."""
        rows = self._tables.records("TARGET_INFO_CUDA_DEVICE")
        return {
            (int(r["pid"]), int(r["cudaId"])): int(r["gpuId"])
            for r in rows
            if None not in (r.get("pid"), r.get("cudaId"), r.get("gpuId")) and r["cudaId"] != r["gpuId"]
        }

    def devices(self, ordinal: Array, global_pid: Array | None) -> Array:
        """GPU numbers of CUDA ordinals."""
        device = ordinal.astype(np.int32)
        if self._gpu_of and global_pid is not None:
            process = _process_of(global_pid)
            for (pid, cuda), gpu in self._gpu_of.items():
                device[(process == pid) & (ordinal == cuda)] = gpu
        return device

    def _read_meta(self) -> TraceMeta:
        tables = self._tables
        present = tables.tables()
        export = {
            r.get("name"): r.get("value") for t in ("META_DATA_EXPORT", "EXPORT_META_DATA") for r in tables.records(t)
        }
        capture = tables.records("META_DATA_CAPTURE")
        asked = {r.get("value") for r in capture if r.get("name") == "CAPTURE_EVENT_TYPE"}
        missing = ["ops"]
        if not present & set(_CUDA):
            # Lazy tables: one CUDA table alone proves that CUDA was traced, none proves nothing.
            missing += ["kernels", "memops", "graphs", "calls", "syncs"]
        if _NVTX not in present and "NvtxEvents" not in asked:
            missing.append("ranges")
        if _OSRT not in present and "OSRuntime" not in asked:
            missing.append("os_calls")
        if not present & set(_OVERHEAD):
            missing.append("overhead")
        captured = {(r.get("startTime"), r.get("stopTime")) for r in tables.records("ANALYSIS_DETAILS")}
        # Of the session's clock, on which collection may begin late, while events count from where it began.
        began, stopped = captured.pop() if len(captured) == 1 else (None, None)
        environment = {r.get("name"): r.get("value") for r in tables.records("TARGET_INFO_SYSTEM_ENV")}
        return TraceMeta(
            tool="Nsight Systems",
            tool_version=export.get("EXPORT_PRODUCT_VERSION"),
            schema=export.get("EXPORT_SCHEMA_VERSION"),
            driver=str(environment["NvDriverVersion"]) if environment.get("NvDriverVersion") else None,
            distributed=_distributed(environment),
            gpus=self._gpus(),
            missing=[t for t in TABLES if t in missing],
            window_ns=None if began is None or stopped is None else (0, int(stopped) - int(began)),
            thread_names=self._thread_names(),
        )

    def _gpus(self) -> list[Gpu]:
        rows = {}
        for row in self._tables.records("TARGET_INFO_GPU"):
            major, minor = row.get("computeMajor"), row.get("computeMinor")
            number = row.get("id", row.get("cuDevice", 0))
            rows[number] = Gpu(
                device=int(number),
                name=row.get("name"),
                sm_count=row.get("smCount") or None,
                memory_bytes=row.get("totalMemory") or None,
                compute_capability=f"{major}.{minor}" if major is not None and minor is not None else None,
            )
        return [rows[k] for k in sorted(rows)]

    def _thread_names(self) -> dict[int, str]:
        rows = [
            r
            for r in self._tables.records("ThreadNames")
            if isinstance(r.get("globalTid"), int) and isinstance(r.get("nameId"), int)
        ]
        texts = self._tables.strings(np.array([r["nameId"] for r in rows], np.int64))
        return {int(r["globalTid"]) & 0xFFFF_FFFF_FFFF: t for r, t in zip(rows, texts, strict=True)}


#: Variables in which launchers tell a process its place in a job, in order of preference: of torchrun, of PMI (MPICH,
#: Cray), of Open MPI, of Slurm.
_PLACES = {
    "rank": ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"),
    "world_size": ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"),
}


def _distributed(environment: Mapping[Any, Any]) -> dict[str, Any]:
    """Rank and world size out of the environment that nsys keeps whole; nothing else of it."""
    text = str(environment.get("DeviceEnvironment") or "")
    found: dict[str, Any] = {}
    for what, variables in _PLACES.items():
        for variable in variables:
            match = re.search(rf"(?<![\w]){variable}=[\"']?(\d{{1,7}})(?!\w)", text)
            if match:
                found[what] = int(match[1])
                break
    return found if "rank" in found else {}


def _categorical(codes: Array, texts: Sequence[str]) -> pd.Categorical:
    """A categorical whose texts may repeat; equal ones become one category, unused ones go."""
    used = np.zeros(len(texts), bool)
    used[codes] = True
    if used.all() and len(set(texts)) == len(texts):
        return categorical(codes, texts)
    place: dict[str, int] = {}
    renumber = np.array(
        [place.setdefault(t, len(place)) if u else 0 for t, u in zip(texts, used, strict=True)], np.int32
    )
    return categorical(renumber[codes] if len(renumber) else codes, list(place))


class _Plan:
    """How one column of the model is made from columns of the export."""

    def __init__(self, *sources: str, make: Callable[..., Any]) -> None:
        self._sources = sources
        self._make = make

    def sources(self, name: str, source: NsysSource) -> tuple[str, ...]:  # noqa: ARG002
        return self._sources

    def build(self, source: NsysSource, name: str, raw: Mapping[str, Array], n: int) -> Any:
        return self._make(source, name, raw, n)


def _copy(column: str, dtype: str = "int64", absent: int = 0) -> _Plan:
    def make(_source: NsysSource, _name: str, raw: Mapping[str, Array], n: int) -> Array:
        values = raw.get(column)
        if values is None:
            return np.full(n, absent, dtype)
        if n and values.min() == _NULL:
            values = np.where(values == _NULL, absent, values)
        return values.astype(dtype, copy=False)

    return _Plan(column, make=make)


def _named(column: str, clean: Callable[[str], str] | None = None) -> _Plan:
    def make(source: NsysSource, _name: str, raw: Mapping[str, Array], n: int) -> pd.Categorical:
        return source.names(raw[column] if column in raw else np.full(n, -1, np.int64), clean)

    return _Plan(column, make=make)


def _enum(column: str, labels: list[str], otherwise: int) -> _Plan:
    def make(_source: NsysSource, _name: str, raw: Mapping[str, Array], n: int) -> pd.Categorical:
        values = raw.get(column)
        codes = (
            np.full(n, otherwise, np.int64)
            if values is None
            else np.where((values >= 0) & (values < len(labels)), values, otherwise)
        )
        return _categorical(codes, labels)

    return _Plan(column, make=make)


def _memory_kind(copies: str, sets: str | None) -> _Plan:
    def make(_source: NsysSource, name: str, raw: Mapping[str, Array], n: int) -> pd.Categorical:
        column = copies if name == _MEMCPY else sets
        values = None if column is None else raw.get(column)
        if values is None:
            codes = np.full(n, _UNKNOWN_MEM if name == _MEMCPY else _NO_MEM, np.int64)
        else:
            codes = np.where((values >= 0) & (values < _UNKNOWN_MEM), values, _UNKNOWN_MEM)
        return _categorical(codes, _MEM_KINDS)

    return _Plan(copies, *(() if sets is None else (sets,)), make=make)


def _op_kind() -> _Plan:
    def make(_source: NsysSource, name: str, raw: Mapping[str, Array], n: int) -> pd.Categorical:
        if name == _MEMSET:
            return _categorical(np.full(n, _MEMSET_KIND), _COPY_KINDS)
        values = raw["copyKind"]
        return _categorical(np.where((values >= 0) & (values < _MEMSET_KIND), values, 0), _COPY_KINDS)

    return _Plan("copyKind", make=make)


_DURATION = _Plan("start", "end", make=lambda _s, _t, raw, _n: raw["end"] - raw["start"])
_START, _END = _copy("start"), _copy("end")
_DEVICE = _Plan(
    "deviceId",
    "globalPid",
    make=lambda s, _t, raw, n: s.devices(raw.get("deviceId", np.zeros(n, np.int64)), raw.get("globalPid")),
)
_PID = _Plan(
    "globalPid",
    make=lambda _s, _t, raw, n: _process_of(raw["globalPid"]) if "globalPid" in raw else np.zeros(n, np.int64),
)
_TID = _Plan(
    "globalTid",
    make=lambda _s, _t, raw, n: _thread_of(raw["globalTid"]) if "globalTid" in raw else np.zeros(n, np.int64),
)
_TID_PID = _Plan(
    "globalTid",
    make=lambda _s, _t, raw, n: _process_of(raw["globalTid"]) if "globalTid" in raw else np.zeros(n, np.int64),
)
_TIMES = {"start_ns": _START, "end_ns": _END, "duration_ns": _DURATION}
_GPU_ROW = {
    **_TIMES,
    "device": _DEVICE,
    "stream": _copy("streamId"),
    "process": _PID,
    "correlation": _copy("correlationId"),
}
_CPU_ROW = {**_TIMES, "process": _TID_PID, "thread": _TID}

_PLANS: dict[str, dict[str, _Plan]] = {
    "kernels": {
        **_GPU_ROW,
        "name": _named("demangledName"),
        "short_name": _named("shortName"),
        **{f"{what}_{axis}": _copy(f"{what}{axis.upper()}", "int32") for what in ("grid", "block") for axis in "xyz"},
        "registers": _copy("registersPerThread", "int32"),
        "static_shared_bytes": _copy("staticSharedMemory", "int32"),
        "dynamic_shared_bytes": _copy("dynamicSharedMemory", "int32"),
        "graph_node": _copy("graphNodeId"),
        # Collectives are described by NCCL's ranges, not by their kernels.
        "collective": _Plan(make=lambda _s, _t, _raw, n: _categorical(np.zeros(n, np.int8), [""])),
        "sequence": _Plan(make=lambda _s, _t, _raw, n: np.full(n, -1, np.int64)),
    },
    "memops": {
        **_GPU_ROW,
        "kind": _op_kind(),
        "bytes": _copy("bytes"),
        "src_kind": _memory_kind("srcKind", None),
        "dst_kind": _memory_kind("dstKind", "memKind"),
        "graph_node": _copy("graphNodeId"),
    },
    "graphs": {**_GPU_ROW, "graph_id": _copy("graphId")},
    "calls": {
        **_CPU_ROW,
        "correlation": _copy("correlationId"),
        "name": _named("nameId", lambda t: _CALL_VERSION.sub("", t)),
    },
    "syncs": {**_GPU_ROW, "kind": _enum("syncType", _SYNC_KINDS, 0)},
    "os_calls": {**_CPU_ROW, "name": _named("nameId")},
    "overhead": {**_CPU_ROW, "name": _named("nameId")},
}


def open_sqlite(path: str | os.PathLike[str], *, cache: bool = True) -> Source:
    """Open an Nsight Systems SQLite export.

    Parameters
    ----------
    path : path-like
    cache : bool
        Keep the columns that were read in a Parquet cache when the export is big.

    Raises
    ------
    TraceError
        Truncated, damaged, or the database of another program.
    """
    from nsightkit.trace import store

    path = Path(path)
    return store.cached(path, lambda: NsysSource(_Sqlite(path)), "nsys") if cache else NsysSource(_Sqlite(path))


def open_parquetdir(path: str | os.PathLike[str]) -> Source:
    """Open a folder written by ``nsys export --type parquetdir``.

    Parameters
    ----------
    path : path-like

    Raises
    ------
    TraceError
        The folder holds no tables of Nsight Systems, or one is unreadable.
    """
    return NsysSource(_ParquetDir(Path(path)))
