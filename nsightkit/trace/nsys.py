"""Reader for Nsight Systems exports: SQLite of every schema since 2.9 (2022.2), and ``parquetdir``.

nsys writes tables lazily, renames them between versions and adds columns; everything optional is probed,
nothing assumed. Columns are streamed through ADBC into numpy arrays, only those that are asked for:
for 5 M kernels this took about a tenth of the CPU time of ``pandas.read_sql``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import sqlite3
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from nsightkit.errors import TraceError, reading
from nsightkit.trace import parquet, programs, sqlite_pages, store
from nsightkit.trace.clean import private_names
from nsightkit.trace.files import require_regular
from nsightkit.trace.model import (
    EVENT_TABLES,
    GPU_TABLES,
    Gpu,
    Source,
    TraceMeta,
    capability,
    categorical,
    complete,
    lost_work,
)
from nsightkit.trace.nesting import nesting

__all__ = ["ParquetDir", "Sqlite", "open_parquetdir", "open_report", "open_sqlite", "quoted", "uri"]

Array = npt.NDArray[Any]

_MEMCPY, _MEMSET = "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"
_NVTX, _OSRT = "NVTX_EVENTS", "OSRT_API"
_SAMPLES, _FRAMES = "COMPOSITE_EVENTS", "SAMPLING_CALLCHAINS"

#: The exporter's tables behind each of ours.
_BACKING = {
    "kernels": ("CUPTI_ACTIVITY_KIND_KERNEL",),
    "memops": (_MEMCPY, _MEMSET),
    "graphs": ("CUPTI_ACTIVITY_KIND_GRAPH_TRACE",),
    "calls": ("CUPTI_ACTIVITY_KIND_RUNTIME",),
    "syncs": ("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",),
    "ranges": (_NVTX,),
    "ops": (),
    "frames": (),
    "os_calls": (_OSRT,),
    "overhead": ("PROFILER_OVERHEAD", "CUPTI_ACTIVITY_KIND_OVERHEAD"),
    "samples": (_SAMPLES,),
}
_CUDA = tuple(name for table in (*GPU_TABLES, "calls", "syncs") for name in _BACKING[table])
#: Tables that were recorded where any of these is there: nsys writes no table without events, so one CUDA table alone
#: proves that CUDA was traced, and none proves nothing.
_SHOWN_BY = _BACKING | dict.fromkeys((*GPU_TABLES, "calls", "syncs"), _CUDA)
#: Tables that were recorded, too, where the capture says that it was asked for such events.
_ASKED_FOR = {"ranges": "NvtxEvents", "os_calls": "OSRuntime"}
#: Tables that show as well that it is an export, and those that only add to what is known.
_OTHERS = ("StringIds", "ANALYSIS_DETAILS", "META_DATA_EXPORT", "EXPORT_META_DATA")
_DETAILS = (
    "META_DATA_CAPTURE",
    "TARGET_INFO_SYSTEM_ENV",
    "TARGET_INFO_GPU",
    "TARGET_INFO_CUDA_DEVICE",
    "DIAGNOSTIC_EVENT",
    "ThreadNames",
    _FRAMES,
)
_READ = frozenset([*itertools.chain(*_BACKING.values()), *_OTHERS, *_DETAILS])

#: cuptiActivityMemcpyKind and cuptiActivityMemoryKind (ENUM_CUDA_MEMCPY_OPER, ENUM_CUDA_MEM_KIND in an export).
_COPY_KINDS = ["other", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP"]
_COPY_KINDS += ["unified HtoD", "unified DtoH", "unified DtoD"]
_MEM_KINDS = ["pageable", "pinned", "device", "array", "managed", "device static", "managed static"]
_SYNC_KINDS = ["other", "event", "stream-wait-event", "stream", "context"]

#: NVTX_EVENTS.eventType: push/pop and start/end ranges, live and from NVTXT files; 75 announces a domain.
_PUSH_POP, _START_END, _DOMAIN = (59, 70), (60, 71), 75
_RANGES = (*_PUSH_POP, *_START_END)

#: How SQLite spells a table in its schema, whatever the schema says that it is, and the columns of the schema.
_TABLE = re.compile(r"""CREATE TABLE (["'`]?)(?P<name>\w+)\1\s*\(""", re.ASCII)
_SCHEMA = ("type", "name", "tbl_name", "rootpage", "sql")
#: Before anything is read: nothing of the schema runs, nothing is written, damaged pages are errors.
_CAREFUL = ("trusted_schema = OFF", "query_only = ON", "cell_size_check = ON", "mmap_size = 0")
#: Steps of SQLite between two looks at how many there were, and how many looks a file of any size gets.
_TICK, _STEPS = 100_000, 200
#: Bytes of a text, and rows of a table of details, that a file of any size may have.
_LONGEST, _RECORDS = 16 << 20, 1 << 18
#: Bytes of a name and letters of a fact about the capture that are kept, and bytes of a column's default.
_NAME, _FACT, _DEFAULT = 1 << 16, 200, 20

_NULL = sqlite_pages.NULL
_NO_EVENT = np.iinfo(np.int64).max
_EXPORT = "export the report with nsys export --type sqlite"

#: OSRT_API.eventClass of "OS runtime libraries profiling started" and "finished", which are not calls.
_OSRT_MARKS = (31, 32)

#: States of a thread that does not run (ENUM_SAMPLING_THREAD_STATE).
_ASLEEP = tuple(range(2, 11))

#: Of tables that hold more than events: the column that tells, its values, and whether they are those of events.
_EVENTS = {
    _NVTX: ("eventType", _RANGES, True),
    _OSRT: ("eventClass", _OSRT_MARKS, False),
    _SAMPLES: ("threadState", _ASLEEP, False),
}

#: Nsight Systems samples a running thread at 100 Hz or more.
_SLOWEST_NS = 10_000_000
#: Names of functions that were not found. And modules whose functions say less than those that call them.
_NO_FUNCTION = re.compile(r"0x|#|\[|(_start|_init)?$")
_SYSTEM = re.compile(r"(.*/)?((libc|libpthread|ld|ld-linux[\w-]*)[-.]|\[)")

#: `cudaLaunchKernel_v7000` is cudaLaunchKernel as introduced by CUDA 7.0; `cuGetProcAddress_v2` is a name of its own.
_CALL_VERSION = re.compile(r"_v\d{4,}$")


def _process_of(global_id: Any) -> Any:
    """Process id of nsys's serialised global process or thread id (bits 24 to 47)."""
    return (global_id >> 24) & 0xFF_FFFF


def _thread_of(global_id: Any) -> Any:
    """The model's thread: process id and thread id, without nsys's host bits."""
    return global_id & 0xFFFF_FFFF_FFFF


def _decode(raw: Any) -> str:
    # Real exports hold non-UTF-8 bytes in TEXT columns.
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)


def _check_complete(path: Path) -> None:
    """Refuse a database that is shorter than it says, or not finished: SQLite fails, or not, on what is gone."""
    require_regular(path)
    with path.open("rb") as stream:
        head = stream.read(100)
    size, page = path.stat().st_size, int.from_bytes(head[16:18], "big")
    whole = int.from_bytes(head[28:32], "big") * (65536 if page == 1 else page)
    current = head[24:28] == head[92:96]  # the page count is valid only when these agree
    if len(head) < 100 or (current and size < whole):
        raise TraceError(
            path,
            f"is truncated ({size:,} of {whole:,} bytes)" if len(head) == 100 else "is truncated",
            "copy or export it again: nsys export --type sqlite --force-overwrite true",
        )
    for tail in ("-wal", "-journal"):
        # To take it in would write beside the trace, and a journal may name files for SQLite to delete.
        journal = path.resolve().with_name(path.resolve().name + tail)
        if journal.is_file() and journal.stat().st_size:
            problem = f"has changes in {journal.name} that are not in the file yet"
            raise TraceError(path, problem, "close the program that writes it, or export it again")


def _check_few(path: Path, rows: int) -> None:
    """Refuse a table of details that has more rows than any export."""
    if rows > _RECORDS:
        raise TraceError(path, f"has a table of details with over {_RECORDS:,} rows", _EXPORT)


class Sqlite:
    """An export in SQLite, which may be anybody's file: only the rows of plain tables are read.

    A view, a virtual table and a computed column are programs, and SQLite would run them. Of a plain table a scan reads
    what its pages hold; ``sqlite_pages.extent`` bounds that before SQLite sees the table. Identifiers come from
    constants in this module and are quoted; values are bound.
    """

    def __init__(self, path: Path, export: programs.Export | None = None) -> None:
        _check_complete(path)
        self.path = path
        self._export = export  # which may be a temporary one: it goes when this does
        self._uri = uri(path, "ro")
        self._size = path.stat().st_size
        #: columns by table
        self.tables: dict[str, list[str]] = {}
        self._roots: dict[str, int] = {}
        self._keyed: set[str] = set()  # a column of theirs may stand in no record
        self._bounded: set[str] = set()
        self._bound("sqlite_master", 1, len(_SCHEMA))
        with self._opened() as connection:
            entries = connection.execute(f"SELECT {', '.join(_SCHEMA)} FROM sqlite_master").fetchall()  # noqa: S608
            for kind, name, _, root, sql in entries:
                if kind in (b"table", b"view"):
                    self._learn(connection, _decode(name), root, _decode(sql))

    def _learn(self, connection: sqlite3.Connection, table: str, root: Any, sql: str) -> None:
        """Note a table's columns and its root page, if it is a plain one; refuse one that is read and is not."""
        declared = _TABLE.match(sql)
        kind = "view or a virtual table"
        if declared and declared["name"] == table and isinstance(root, int) and root > 1:
            columns = connection.execute(f"PRAGMA table_xinfo({quoted(table)})").fetchall()
            # A row that lacks a column has its default: any text, but no expression.
            if not any(hidden or len(default or b"") > _DEFAULT for *_, default, _, hidden in columns):
                self.tables[table] = [_decode(column[1]) for column in columns]
                self._roots[table] = root
                if any(key for *_, key, _ in columns):
                    self._keyed.add(table)
                return
            kind = "table with computed columns or long defaults"
        if table in _READ:
            raise TraceError(self.path, f"has a {kind} in place of the table {table}", _EXPORT)

    def guard(self, _table: str = "") -> contextlib.AbstractContextManager[None]:
        """Turn the errors of a damaged file into one that names it."""
        remedy = "export it again with nsys export --type sqlite"
        return reading(self.path, "is damaged or is not an Nsight Systems export", remedy)

    def _bound(self, table: str, root: int, columns: int) -> None:
        """Refuse a table of which a scan would give more than the file can hold."""
        if table in self._bounded:
            return
        with self.guard():
            rows, payload = sqlite_pages.extent(self.path, root)
        if payload > self._size or rows * (columns + 1) > payload:  # a row begins with its length and a type a column
            problem = f"has a damaged table {table}: {rows:,} rows of {payload:,} bytes in a file of {self._size:,}"
            raise TraceError(self.path, problem, _EXPORT)
        self._bounded.add(table)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """A connection that gives up on what is too long or takes too many steps for a file of this size."""
        ticks = itertools.count()
        most = _STEPS + 20 * self._size // _TICK
        with self.guard(), contextlib.closing(sqlite3.connect(self._uri, uri=True)) as connection:
            connection.text_factory = bytes
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, min(_LONGEST + 2 * self._size, 2**31 - 1))
            connection.set_progress_handler(lambda: next(ticks) > most, _TICK)
            for pragma in _CAREFUL:
                connection.execute(f"PRAGMA {pragma}")
            yield connection

    def _fetched(self, table: str, columns: Iterable[str], more: str = "", *values: Any) -> list[Any]:
        """Rows of a table as Python objects, texts as bytes."""
        with self._opened() as connection:
            return connection.execute(self._query(table, map(quoted, columns), more), values).fetchall()

    def _query(self, table: str, expressions: Iterable[str], more: str = "") -> str:
        self._bound(table, self._roots[table], len(self.tables[table]))
        # Not by an index, which is another tree: its extent is not known, and its order is not that of the rows.
        return f"SELECT {', '.join(expressions)} FROM {quoted(table)} NOT INDEXED {more}"  # noqa: S608

    def columns(self, table: str) -> list[str]:
        """Give a table's columns; none where it is absent."""
        return self.tables.get(table, [])

    def _selected(self, query: str) -> Any:
        """An Arrow table of what a query gives."""
        from adbc_driver_sqlite import dbapi

        with self.guard(), dbapi.connect(self._uri, autocommit=True) as connection, connection.cursor() as cursor:
            for pragma in _CAREFUL:
                cursor.execute(f"PRAGMA {pragma}")
            cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": 65536})
            cursor.execute(query)
            return cursor.fetch_arrow_table()

    def integers(self, table: str, columns: Sequence[str]) -> dict[str, Array]:
        """Integer columns, NULL as the smallest int64."""
        if table not in self._keyed:
            with contextlib.suppress(sqlite_pages.Unusual, IndexError, ValueError, OverflowError):
                places = [self.tables[table].index(c) for c in columns]
                found = sqlite_pages.integer_columns(self.path, self._roots[table], places)
                return dict(zip(columns, found, strict=True))
        with self.guard():
            read = self._selected(self._query(table, map(quoted, columns))).columns
            return {c: _as_int64(values) for c, values in zip(columns, read, strict=True)}

    def texts(self, table: str, column: str, kinds: Sequence[int] | None = None) -> tuple[Array, list[str]]:
        """A text column as codes into texts, NULL as ""; `kinds` keeps the rows with these `eventType`."""
        where = f"WHERE eventType IN ({', '.join(str(int(k)) for k in kinds)})" if kinds is not None else ""
        # As a blob that is never NULL: the driver fixes a column's type on its first rows, and text may be no UTF-8.
        text = f"CAST(coalesce(CAST({quoted(column)} AS BLOB), x'') AS BLOB)"
        with self.guard():
            return _coded(self._selected(self._query(table, [text], where))[0])

    def strings(self, ids: Array) -> dict[int, str]:
        """Texts of string ids, of those that have one."""
        wanted = "WHERE id IN (SELECT value FROM json_each(?))"
        rows = self._fetched("StringIds", ("id", "value"), wanted, json.dumps(ids.tolist()))
        return {i: _decode(text[:_NAME] if isinstance(text, bytes) else text) for i, text in rows}

    def records(self, table: str) -> list[dict[str, Any]]:
        """Give a small table's rows; none where it is absent."""
        names = self.columns(table)
        rows = self._fetched(table, names, f"LIMIT {_RECORDS + 1}") if names else []
        _check_few(self.path, len(rows))
        return [{n: _decode(v) if isinstance(v, bytes) else v for n, v in zip(names, row, strict=True)} for row in rows]


def _coded(column: Any) -> tuple[Array, list[str]]:
    """Codes into texts, of an Arrow column of texts."""
    if not len(column):  # SQLite has no type for what is not there
        return np.empty(0, np.int64), []
    if not pa.types.is_dictionary(column.type):
        column = column.cast(pa.binary()).dictionary_encode()
    whole = column.unify_dictionaries().combine_chunks()
    shortened = pc.binary_slice(whole.dictionary.cast(pa.binary()), 0, _NAME)
    texts = ["" if text is None else _decode(text) for text in shortened.to_pylist()]
    return np.asarray(whole.indices.cast(pa.int64()).fill_null(len(texts))), [*texts, ""]


def uri(path: Path, mode: str) -> str:
    """Name a database as SQLite opens it.

    Parameters
    ----------
    path : Path
    mode : str
        Of SQLite: ``ro``, which writes nothing beside the file either, or ``rwc``.
    """
    whole = "&immutable=1" if mode == "ro" else ""  # SQLite would look for journals and make files of its own
    return f"file:{urllib.parse.quote(str(path.resolve()))}?mode={mode}{whole}"


def quoted(identifier: str) -> str:
    """Quote an SQL identifier.

    Parameters
    ----------
    identifier : str
    """
    return '"' + identifier.replace('"', '""') + '"'


def _as_int64(column: Any) -> Array:
    """An Arrow column as int64, NULL as `_NULL`."""
    # Numbers that do not fit are wrong anyway; a text is refused.
    safe = not (pa.types.is_temporal(column.type) or pa.types.is_unsigned_integer(column.type))
    return np.asarray(column.cast(pa.int64(), safe=safe).fill_null(int(_NULL)), np.int64)


class ParquetDir:
    """An export as a folder of Parquet files (``nsys export --type parquetdir``), one a table."""

    def __init__(self, path: Path) -> None:
        self.path = path
        #: files by table
        self.tables = {f.stem: f for f in path.glob("*.parquet")}

    def guard(self, table: str) -> contextlib.AbstractContextManager[None]:
        """Turn the errors of a damaged file into one that names it."""
        remedy = "export it again with nsys export --type parquetdir"
        return reading(self.path / f"{table}.parquet", "is not a readable Parquet table", remedy)

    def _read(self, table: str, columns: Sequence[str], kinds: Sequence[int] | None = None) -> Any:
        filters = None if kinds is None else pc.field("eventType").isin(list(kinds))
        with self.guard(table):
            return parquet.read_table(self.tables[table], list(columns), filters, dictionaries=True)

    def columns(self, table: str) -> list[str]:
        """See :class:`Sqlite`."""
        with self.guard(table):
            return parquet.schema_names(self.tables[table]) if table in self.tables else []

    def integers(self, table: str, columns: Sequence[str]) -> dict[str, Array]:
        """See :class:`Sqlite`."""
        with self.guard(table):
            return {c: _as_int64(values) for c, values in zip(columns, self._read(table, columns).columns, strict=True)}

    def texts(self, table: str, column: str, kinds: Sequence[int] | None = None) -> tuple[Array, list[str]]:
        """See :class:`Sqlite`."""
        with self.guard(table):
            return _coded(self._read(table, [column], kinds)[column])

    def strings(self, ids: Array) -> dict[int, str]:
        """See :class:`Sqlite`."""
        with self.guard("StringIds"):
            read = self._read("StringIds", ["id", "value"])
            read = read.filter(pc.is_in(read["id"], pa.array(ids)))
            codes, texts = _coded(read["value"])
            return {i: texts[code] for i, code in zip(read["id"].to_pylist(), codes.tolist(), strict=True)}

    def records(self, table: str) -> list[dict[str, Any]]:
        """See :class:`Sqlite`."""
        if table not in self.tables:
            return []
        with self.guard(table):
            rows = self._read(table, self.columns(table))
            _check_few(self.tables[table], len(rows))
            return list(rows.to_pylist())


_Tables: TypeAlias = Sqlite | ParquetDir


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
        present = set(tables.tables)
        if not present.intersection(itertools.chain(*_BACKING.values(), _OTHERS)):
            raise TraceError(tables.path, "is a database, but not an Nsight Systems export", _EXPORT)
        for table in present.intersection(itertools.chain(*_BACKING.values())):
            for column in {"start", "globalTid" if table == _SAMPLES else "end"}.difference(tables.columns(table)):
                raise TraceError(tables.path, f"has a table {table} without the column {column}", _EXPORT)
        #: {(process, CUDA ordinal): GPU} where the two differ (CUDA_VISIBLE_DEVICES); exports since 2024 say
        self._gpu_of: dict[tuple[int, int], int] = {}
        for row in tables.records("TARGET_INFO_CUDA_DEVICE"):
            process, cuda, gpu = (_number(row.get(column)) for column in ("pid", "cudaId", "gpuId"))
            if process is not None and cuda is not None and gpu is not None and cuda != gpu:
                self._gpu_of[process, cuda] = gpu
        self._first: dict[str, int] = {}  # by table, the earliest start
        self.meta = self._read_meta()

    # -- the Source protocol ------------------------------------------------------------------------------------

    def read(self, table: str, columns: Sequence[str]) -> pd.DataFrame:
        """See :class:`~nsightkit.trace.model.Source`."""
        parts = [self._part(table, name, columns) for name in self._present(table)]
        if not parts:
            return complete(table)[list(columns)]
        return pd.DataFrame({c: _joined([part[c] for part in parts]) for c in columns}, copy=False)

    def first_ns(self) -> int:
        """See :class:`~nsightkit.trace.model.Source`."""
        for name in itertools.chain(*map(self._present, EVENT_TABLES)):
            if name not in self._first:
                self._rows(name, ["start"])
        return min((first for first in self._first.values() if first != _NO_EVENT), default=0)

    # -- columns ------------------------------------------------------------------------------------------------

    def _present(self, table: str) -> list[str]:
        """The exporter's tables behind one of ours, as far as they are there."""
        return [name for name in _BACKING[table] if name in self._tables.tables]

    def _part(self, table: str, name: str, columns: Sequence[str]) -> dict[str, Any]:
        """The wanted columns of one of the exporter's tables."""
        plans = {column: _PLANS[name if name in _PLANS else table][column] for column in columns}
        sources = {source for _, *sources in plans.values() for source in sources} | {"start"}
        rows = self._sampled if name == _SAMPLES else self._rows
        raw: dict[str, Any] = dict(rows(name, sorted(sources.intersection(self._tables.columns(name)))))
        raw = dict.fromkeys(sources, np.broadcast_to(_NULL, len(raw["start"]))) | raw
        if "level" in plans or "parent" in plans:
            raw["level"], raw["parent"] = nesting(
                raw["globalTid"], raw["start"], raw["end"], alone=np.isin(raw["eventType"], _START_END)
            )
        return {column: make(self, *(raw[source] for source in sources)) for column, (make, *sources) in plans.items()}

    def _rows(self, name: str, columns: list[str]) -> dict[str, Array]:
        """Integer columns of the rows that are events: :data:`_EVENTS`.

        A range still open when the capture ended, of which ``open`` says so, runs to the latest end of any.
        """
        which, kinds, wanted = _EVENTS.get(name, ("", (), False))
        told = which in self._tables.columns(name)
        raw = self._tables.integers(name, list(dict.fromkeys([*columns, "start", which])) if told else columns)
        if told:
            keep = np.isin(raw[which], kinds, invert=not wanted)
            raw = {c: values[keep] for c, values in raw.items()}
        if name == _NVTX and "end" in raw:
            raw["open"] = raw["end"] == _NULL
            raw["end"] = np.where(raw["open"], max(raw[c].max(initial=_NULL) for c in ("start", "end")), raw["end"])
        self._first[name] = int(raw["start"].min(initial=_NO_EVENT))
        return raw

    def _sampled(self, name: str, columns: list[str]) -> dict[str, Array]:
        """Integer columns of the samples, of processes that called CUDA: the machine's others are not the trace's."""
        raw = self._rows(name, list(dict.fromkeys([*columns, "globalTid"])))
        del self._first[name]  # no event
        called = [self._rows(of, ["globalTid", "start"])["globalTid"] for of in self._present("calls")]
        keep = np.isin(_process_of(raw["globalTid"]), [np.unique(_process_of(threads)) for threads in called])
        return {column: values[keep] for column, values in raw.items()}

    def sampled_until(self, start: Array, thread: Array) -> Array:
        """When each sample's thread was sampled next, or one sampling period later if that is more than two later.

        A period is the median of what lies between two samples of a thread, of all threads while they ran. It is
        counted in cycles or instructions, so its length varies.
        """
        order = np.lexsort((start, thread))
        of, apart = thread[order], np.full(len(start), _NO_EVENT)
        apart[:-1] = np.where(of[1:] == of[:-1], np.diff(start[order]), _NO_EVENT)
        close = apart[apart <= _SLOWEST_NS]
        until = np.empty_like(start)
        period = int(np.median(close)) if len(close) else 0
        until[order] = start[order] + np.where(apart <= 2 * period, apart, period)
        return until

    def sampled_names(self, ids: Array) -> pd.Categorical:
        """The innermost function of each sample that says something, else the module of its innermost frame."""
        known = set(self._tables.columns(_FRAMES))
        if not known.issuperset(("id", "symbol", "module", "stackDepth")):
            return categorical(np.zeros(len(ids), np.int8), [""])
        frames = self._tables.integers(_FRAMES, ["id", "symbol", "module", "stackDepth"])
        (symbol, symbols), (module, modules) = (pd.factorize(frames[column]) for column in ("symbol", "module"))
        functions, files = self._strings(symbols), self._strings(modules)
        rank = np.array([bool(_SYSTEM.match(file)) for file in files], np.int8)[module]
        rank[np.array([bool(_NO_FUNCTION.match(text)) for text in functions], bool)[symbol]] = 2
        order = np.lexsort((frames["stackDepth"], rank, frames["id"]))
        told, first = np.unique(frames["id"][order], return_index=True)
        best = order[first]
        code = pd.Series(np.where(rank[best] < 2, symbol[best], len(functions) + module[best]), told)
        texts = [*functions, *(file.rpartition("/")[2] for file in files), ""]
        return categorical(code.reindex(ids, fill_value=len(texts) - 1).to_numpy(), texts)

    def _strings(self, ids: Array) -> list[str]:
        found = self._tables.strings(ids) if "StringIds" in self._tables.tables else {}
        return [found.get(i, f"#{i}") for i in ids.tolist()]

    def names(self, ids: Array, clean: Callable[[str], str] = str) -> pd.Categorical:
        """String ids as a categorical of their texts; ids of equal texts become one category."""
        codes, distinct = pd.factorize(ids)
        return categorical(codes, [clean(text) for text in self._strings(distinct)])

    def nvtx_names(self, ids: Array, kinds: Sequence[int] = _RANGES) -> pd.Categorical:
        """Registered strings fill textId, plain ones text; an event may have neither."""
        codes, distinct = pd.factorize(ids)
        texts, absent = self._strings(distinct), ids == _NULL
        told = absent.any() and "text" in self._tables.columns(_NVTX)
        plain, more = self._tables.texts(_NVTX, "text", kinds) if told else (0, [""])
        return categorical(np.where(absent, plain + len(texts), codes), [*texts, *more])

    def domains(self, ids: Array, thread: Array) -> pd.Categorical:
        """Names of the ranges' domains, "" for the default one."""
        ids = _or_zero(ids)
        if not ids.any():
            return categorical(np.zeros(len(ids), np.int8), [""])
        columns = {"eventType", "domainId", "globalTid", "textId"} & set(self._tables.columns(_NVTX))
        events = self._tables.integers(_NVTX, sorted(columns))
        said = {c: values[events["eventType"] == _DOMAIN] for c, values in events.items()}
        process, domain = _process_of(said["globalTid"]).tolist(), said["domainId"].tolist()
        names = self.nvtx_names(said.get("textId", np.full(len(domain), _NULL)), (_DOMAIN,))
        name_of = dict(zip(zip(process, domain, strict=True), names, strict=True))
        key, distinct = pd.factorize(pd.MultiIndex.from_arrays([_process_of(thread), ids]))
        return categorical(key, ["" if d == 0 else name_of.get((p, d), f"domain {d}") for p, d in distinct])

    def devices(self, ordinal: Array, global_pid: Array) -> Array:
        """GPU numbers of CUDA ordinals."""
        device = _or_zero(ordinal)
        if self._gpu_of:
            (process, processes), (cuda, ordinals) = pd.factorize(_process_of(global_pid)), pd.factorize(device)
            pairs, distinct = pd.factorize(process * len(ordinals) + cuda)
            gpus = []
            for pair in distinct.tolist():
                of, number = processes[pair // len(ordinals)], ordinals[pair % len(ordinals)]
                gpus.append(self._gpu_of.get((of, number), number))
            device = np.array(gpus, np.int64)[pairs]
        return _as_int32(device)

    # -- what the export says about itself ----------------------------------------------------------------------

    def _read_meta(self) -> TraceMeta:
        tables = self._tables
        export = {
            r.get("name"): r.get("value") for t in ("META_DATA_EXPORT", "EXPORT_META_DATA") for r in tables.records(t)
        }
        asked = {r.get("value") for r in tables.records("META_DATA_CAPTURE") if r.get("name") == "CAPTURE_EVENT_TYPE"}
        shown = {t for t, names in _SHOWN_BY.items() if not tables.tables.keys().isdisjoint(names)}
        shown |= {t for t, event in _ASKED_FOR.items() if event in asked}
        lost = [] if any(t in tables.tables for of in GPU_TABLES for t in _BACKING[of]) else self._lost_work()
        shown -= set(GPU_TABLES if lost else ())
        details = tables.records("ANALYSIS_DETAILS")
        captured = {(_number(row.get("startTime")), _number(row.get("stopTime"))) for row in details}
        # Of the session's clock, on which collection may begin late, while events count from where it began.
        began, stopped = captured.pop() if len(captured) == 1 else (None, None)
        window = None if began is None or stopped is None or stopped < began else (0, stopped - began)
        environment = {r.get("name"): r.get("value") for r in tables.records("TARGET_INFO_SYSTEM_ENV")}
        gpus = {}
        for row in tables.records("TARGET_INFO_GPU"):
            number = _number(row.get("id", row.get("cuDevice", 0)))
            if number is not None:
                gpus[number] = row
        return TraceMeta(
            tool="Nsight Systems",
            tool_version=_fact(export.get("EXPORT_PRODUCT_VERSION")),
            schema=_fact(export.get("EXPORT_SCHEMA_VERSION")),
            driver=_fact(environment.get("NvDriverVersion")),
            distributed=_distributed(str(environment.get("DeviceEnvironment") or "")),
            gpus=[
                Gpu(
                    device=number,
                    name=_fact(gpu.get("name")),
                    sm_count=_number(gpu.get("smCount")) or None,
                    memory_bytes=_number(gpu.get("totalMemory")) or None,
                    compute_capability=capability(_number(gpu.get("computeMajor")), _number(gpu.get("computeMinor"))),
                )
                for number, gpu in sorted(gpus.items())
            ],
            missing=[t for t in EVENT_TABLES if t not in shown],
            notes=[*lost, *self._warnings()],
            window_ns=window,
            thread_names=self._thread_names(),
            private=self._private(),
        )

    def _private(self) -> dict[str, str]:
        """What the export says of people and machines; nsys keeps the whole environment of the profiled program."""
        pairs = []
        for table in ("TARGET_INFO_SYSTEM_ENV", "META_DATA_CAPTURE", "META_DATA_EXPORT", "EXPORT_META_DATA"):
            for row in self._tables.records(table):
                name = str(row.get("name")).rpartition(":")[2]
                value = str(row.get("value") or "")
                if "ENVIRON" in name.upper():
                    for entry in re.split(r"[\0;\n]", value):
                        variable, _, setting = entry.partition("=")
                        pairs.append((variable.strip(), setting))
                else:
                    pairs.append((name, value))
        return private_names(pairs)

    def _warnings(self) -> Iterator[str]:
        """What nsys itself said was lost, in words of ours: its own are anybody's text, with paths in it."""
        events = [r for r in self._tables.records("DIAGNOSTIC_EVENT") if r.get("severity") in _SERIOUS]
        texts = [_decode(r.get("text")) for r in events]
        for sign, said in _LOST.items():
            if any(re.search(sign, text) for text in texts):
                yield f"Nsight Systems warned that {said}."

    def _lost_work(self) -> list[str]:
        (calls,) = _BACKING["calls"]
        if "nameId" not in self._tables.columns(calls):
            return []
        return lost_work(self.names(self._tables.integers(calls, ["nameId"])["nameId"]))

    def _thread_names(self) -> dict[int, str]:
        rows = [
            r
            for r in self._tables.records("ThreadNames")
            if isinstance(r.get("globalTid"), int) and isinstance(r.get("nameId"), int)
        ]
        texts = self._strings(np.array([r["nameId"] for r in rows], np.int64))
        return dict(zip((_thread_of(r["globalTid"]) for r in rows), texts, strict=True))


#: Variables in which launchers tell a process its place in a job, in order of preference: of torchrun, of PMI (MPICH,
#: Cray), of Open MPI, of Slurm.
_PLACES = {
    "rank": ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"),
    "world_size": ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"),
}


def _distributed(environment: str) -> dict[str, Any]:
    """Rank and world size out of the environment that nsys keeps whole; nothing else of it."""
    numbers = re.findall(r"(?<!\w)(\w+)=[\"']?(\d{1,7})(?!\w)", environment)
    said = dict(reversed(numbers))  # of one that is there twice, the first
    found = {what: next((int(said[v]) for v in names if v in said), None) for what, names in _PLACES.items()}
    return {} if found["rank"] is None else {what: number for what, number in found.items() if number is not None}


def _joined(parts: list[Any]) -> Any:
    """Parts of a column, one below the other."""
    if len(parts) == 1:
        return parts[0]
    return pd.api.types.union_categoricals(parts) if isinstance(parts[0], pd.Categorical) else np.concatenate(parts)


def _number(value: Any) -> int | None:
    """A whole number that is no less than 0 and fits into 64 bits, else None: a cell of SQLite may hold anything."""
    return value if isinstance(value, int) and 0 <= value < 1 << 63 else None


def _fact(value: Any) -> str | None:
    """What is known about a capture as a text of sane length; None where it is absent or empty."""
    return str(value)[:_FACT] if value else None


def _as_int32(values: Array) -> Array:
    narrow = values.astype(np.int32)
    if (narrow != values).any():
        raise ValueError(f"{int(values[narrow != values][0]):,} stands where numbers of 32 bits do")
    return narrow


def _or_zero(values: Array) -> Array:
    """The values, with 0 in place of NULL."""
    return np.where(values == _NULL, 0, values) if values.min(initial=0) == _NULL else values


#: How one column of the model is made: the function, and the columns of the export that it is given after the source.
#: A column that the export lacks is one of NULLs.
_Plan: TypeAlias = tuple[Any, *tuple[str, ...]]


def _from(column: str, change: Callable[[Array], Any]) -> _Plan:
    return lambda _, values: change(values), column


def _copy(column: str) -> _Plan:
    return _from(column, _or_zero)


def _copy_32(column: str) -> _Plan:
    return _from(column, lambda values: _as_int32(_or_zero(values)))


def _always(label: str) -> _Plan:
    return _from("start", lambda start: categorical(np.zeros(len(start), np.int8), [label]))


def _named(column: str, clean: Callable[[str], str] = str) -> _Plan:
    return lambda source, ids: source.names(ids, clean), column


def _enum(column: str, labels: Sequence[str], other: str, absent: str | None = None) -> _Plan:
    """A number as its label: `other` for one without, and `absent` (else `other`) for NULL."""

    def change(values: Array) -> pd.Categorical:
        known = (values >= 0) & (values < len(labels))
        codes = np.where(known, values, np.where(values == _NULL, len(labels) + 1, len(labels)))
        return categorical(codes, [*labels, other, other if absent is None else absent])

    return _from(column, change)


def _as_is(_: NsysSource, values: Array, *_others: Array) -> Array:
    return values


_TIMES = {"start_ns": _copy("start"), "end_ns": _copy("end")}
_GPU_ROW: dict[str, _Plan] = {
    **_TIMES,
    "device": (NsysSource.devices, "deviceId", "globalPid"),
    "stream": _copy("streamId"),
    "process": _from("globalPid", _process_of),
    "correlation": _copy("correlationId"),
}
_CPU_ROW = {**_TIMES, "process": _from("globalTid", _process_of), "thread": _from("globalTid", _thread_of)}
_MEMOP = {**_GPU_ROW, "bytes": _copy("bytes"), "graph_node": _copy("graphNodeId")}
#: Severities of diagnostics that are warnings or errors, and what those say that mean lost data.
_SERIOUS = (2, 3)
_LOST = {
    **{
        rf"^Not all {kind} events might have been collected": f"not all {what} may have been collected"
        for kind, what in (("CUDA", "CUDA events"), ("NVTX", "NVTX events"), ("OS runtime libraries", "OS calls"))
    },
    r"\bCUPTI_ERROR_": "CUDA's tracing library reported an error, so operations of a GPU may be missing",
    r"\b(lost|dropped)\b": "events were lost",
}
_NESTING = ("start", "end", "globalTid", "eventType")

#: By table of the model, or of the export where several stand behind one.
_PLANS: dict[str, dict[str, _Plan]] = {
    "kernels": {
        **_GPU_ROW,
        "name": _named("demangledName"),
        "short_name": _named("shortName"),
        **{f"{what}_{axis}": _copy_32(f"{what}{axis.upper()}") for what in ("grid", "block") for axis in "xyz"},
        "registers": _copy_32("registersPerThread"),
        "static_shared_bytes": _copy_32("staticSharedMemory"),
        "dynamic_shared_bytes": _copy_32("dynamicSharedMemory"),
        "graph_node": _copy("graphNodeId"),
        # Collectives are described by NCCL's ranges, not by their kernels.
        "collective": _always(""),
        "sequence": _from("start", lambda start: np.full(len(start), -1, np.int64)),
    },
    _MEMCPY: {
        **_MEMOP,
        "kind": _enum("copyKind", _COPY_KINDS, "other"),
        "src_kind": _enum("srcKind", _MEM_KINDS, "unknown"),
        "dst_kind": _enum("dstKind", _MEM_KINDS, "unknown"),
    },
    _MEMSET: {
        **_MEMOP,
        "kind": _always("memset"),
        "src_kind": _always(""),
        "dst_kind": _enum("memKind", _MEM_KINDS, "unknown", absent=""),
    },
    "graphs": {**_GPU_ROW, "graph_id": _copy("graphId")},
    "calls": {
        **_CPU_ROW,
        "correlation": _copy("correlationId"),
        "name": _named("nameId", lambda t: _CALL_VERSION.sub("", t)),
        "kernel": _always(""),
    },
    "syncs": {**_GPU_ROW, "kind": _enum("syncType", _SYNC_KINDS, "other")},
    "ranges": {
        **_CPU_ROW,
        "end_thread": (
            lambda _, end, start: _thread_of(np.where((end == _NULL) | (end == 0), start, end)),
            *("endGlobalTid", "globalTid"),
        ),
        "name": (NsysSource.nvtx_names, "textId"),
        "domain": (NsysSource.domains, "domainId", "globalTid"),
        "kind": _from("eventType", lambda kind: categorical(np.isin(kind, _START_END) * 1, ["pushpop", "startend"])),
        "open": (_as_is, "open", "end"),
        "level": (_as_is, "level", *_NESTING),
        "parent": (_as_is, "parent", *_NESTING),
    },
    "os_calls": {**_CPU_ROW, "name": _named("nameId")},
    "overhead": {**_CPU_ROW, "name": _named("nameId")},
    "samples": {
        **_CPU_ROW,
        "end_ns": (NsysSource.sampled_until, "start", "globalTid"),
        "name": (NsysSource.sampled_names, "id"),
    },
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
    return _opened(Path(path), cache)


def open_report(path: str | os.PathLike[str], *, cache: bool = True) -> Source:
    """Open a ``.nsys-rep`` by way of its SQLite export.

    Parameters
    ----------
    path : path-like
    cache : bool
        Keep the export in the user's cache folder, and its columns as :func:`open_sqlite` does.

    Raises
    ------
    TraceError
        No usable nsys is installed, or it cannot read the report.
    """
    export = programs.exported(path, cache=cache)
    return _opened(export.path, cache, export)


def _opened(path: Path, cache: bool, export: programs.Export | None = None) -> Source:
    return store.cached(path, lambda: NsysSource(Sqlite(path, export)), "nsys" if cache else None)


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
    return NsysSource(ParquetDir(Path(path)))
