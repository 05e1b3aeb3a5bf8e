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
import pyarrow.parquet as pq

from nsightkit.errors import TraceError, reading
from nsightkit.trace import sqlite_pages, store
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

__all__ = ["ParquetDir", "Sqlite", "open_parquetdir", "open_sqlite", "quoted", "uri"]

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
#: Tables that show as well that it is an export.
_OTHERS = ("StringIds", "ANALYSIS_DETAILS", "META_DATA_EXPORT", "EXPORT_META_DATA")

#: cuptiActivityMemcpyKind and cuptiActivityMemoryKind (ENUM_CUDA_MEMCPY_OPER, ENUM_CUDA_MEM_KIND in an export).
_COPY_KINDS = ["other", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP"]
_COPY_KINDS += ["unified HtoD", "unified DtoH", "unified DtoD"]
_MEM_KINDS = ["pageable", "pinned", "device", "array", "managed", "device static", "managed static"]
_SYNC_KINDS = ["other", "event", "stream-wait-event", "stream", "context"]

#: NVTX_EVENTS.eventType: push/pop and start/end ranges, live and from NVTXT files; 75 announces a domain.
_PUSH_POP, _START_END, _DOMAIN = (59, 70), (60, 71), 75
_RANGES = (*_PUSH_POP, *_START_END)

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
    """Refuse a database that is shorter than it says: SQLite fails, or not, on the pages that are gone."""
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


class Sqlite:
    """An export in SQLite. Identifiers come from constants in this module and are quoted; values are bound."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._uri = uri(path, "ro")
        #: columns by table
        self.tables: dict[str, list[str]] = {}
        self._roots: dict[str, int] = {}
        _check_complete(path)
        about = "t.type, t.name, t.rootpage, c.name, c.pk FROM sqlite_master AS t, pragma_table_info(t.name) AS c"
        for kind, raw, root, column, key in self._fetched(f"SELECT {about} WHERE t.type IN ('table', 'view')"):
            table = _decode(raw)
            self.tables.setdefault(table, []).append(_decode(column))
            plain = kind == b"table" and not key  # else not every column stands in a record
            self._roots[table] = self._roots.get(table, root) if plain else 0

    def guard(self, _table: str = "") -> contextlib.AbstractContextManager[None]:
        """Turn the errors of a damaged file into one that names it."""
        remedy = "export it again with nsys export --type sqlite"
        return reading(self.path, "is damaged or is not an Nsight Systems export", remedy)

    def _fetched(self, query: str, *values: Any) -> list[Any]:
        with self.guard(), contextlib.closing(sqlite3.connect(self._uri, uri=True)) as connection:
            connection.text_factory = bytes
            return connection.execute(query, values).fetchall()

    def columns(self, table: str) -> list[str]:
        """Give a table's columns; none where it is absent."""
        return self.tables.get(table, [])

    def _selected(self, expressions: Iterable[str], rows: str) -> Any:
        """An Arrow table of what a query gives."""
        from adbc_driver_sqlite import dbapi

        with self.guard(), dbapi.connect(self._uri, autocommit=True) as connection, connection.cursor() as cursor:
            cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": 65536})
            cursor.execute(f"SELECT {', '.join(expressions)} FROM {rows}")  # noqa: S608
            return cursor.fetch_arrow_table()

    def integers(self, table: str, columns: Sequence[str]) -> dict[str, Array]:
        """Integer columns, NULL as the smallest int64."""
        with contextlib.suppress(sqlite_pages.Unusual, IndexError, ValueError, OverflowError):
            places = [self.tables[table].index(c) for c in columns]
            found = sqlite_pages.integer_columns(self.path, self._roots.get(table, 0), places)
            return dict(zip(columns, found, strict=True))
        with self.guard():
            read = self._selected(map(quoted, columns), quoted(table)).columns
            return {c: _as_int64(values) for c, values in zip(columns, read, strict=True)}

    def texts(self, table: str, column: str, kinds: Sequence[int] | None = None) -> tuple[Array, list[str]]:
        """A text column as codes into texts, NULL as ""; `kinds` keeps the rows with these `eventType`."""
        where = f" WHERE eventType IN ({', '.join(str(int(k)) for k in kinds)})" if kinds is not None else ""
        # As a blob that is never NULL: the driver fixes a column's type on its first rows, and text may be no UTF-8.
        text = f"CAST(coalesce(CAST({quoted(column)} AS BLOB), x'') AS BLOB)"
        with self.guard():
            return _coded(self._selected([text], quoted(table) + where)[0])

    def strings(self, ids: Array) -> dict[int, str]:
        """Texts of string ids, of those that have one."""
        query = "SELECT id, value FROM StringIds WHERE id IN (SELECT value FROM json_each(?))"
        return {i: _decode(text) for i, text in self._fetched(query, json.dumps(ids.tolist()))}

    def records(self, table: str) -> list[dict[str, Any]]:
        """Give a small table's rows; none where it is absent."""
        rows = self._fetched(f"SELECT * FROM {quoted(table)}") if table in self.tables else []  # noqa: S608
        names = self.columns(table)
        return [{n: _decode(v) if isinstance(v, bytes) else v for n, v in zip(names, row, strict=True)} for row in rows]


def _coded(column: Any) -> tuple[Array, list[str]]:
    """Codes into texts, of an Arrow column of texts."""
    known = column if len(column) else pa.chunked_array([], pa.binary())  # SQLite has no type for what is not there
    whole = known.cast(pa.binary()).fill_null(b"").dictionary_encode().combine_chunks()
    return np.asarray(whole.indices, np.int64), [_decode(text) for text in whole.dictionary.to_pylist()]


def uri(path: Path, mode: str) -> str:
    """Name a database as SQLite opens it.

    Parameters
    ----------
    path : Path
    mode : str
        Of SQLite: ``ro``, ``rwc``.
    """
    return f"file:{urllib.parse.quote(str(path.resolve()))}?mode={mode}"


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

    def _read(self, table: str, columns: Sequence[str] | None = None, kinds: Sequence[int] | None = None) -> Any:
        filters = None if kinds is None else pc.field("eventType").isin(list(kinds))
        with self.guard(table):
            return pq.read_table(self.tables[table], columns=columns and list(columns), filters=filters)

    def columns(self, table: str) -> list[str]:
        """See :class:`Sqlite`."""
        with self.guard(table):
            return list(pq.read_schema(self.tables[table]).names) if table in self.tables else []

    def integers(self, table: str, columns: Sequence[str]) -> dict[str, Array]:
        """See :class:`Sqlite`."""
        with self.guard(table):
            return {c: _as_int64(values) for c, values in zip(columns, self._read(table, columns).columns, strict=True)}

    def texts(self, table: str, column: str, kinds: Sequence[int] | None = None) -> tuple[Array, list[str]]:
        """See :class:`Sqlite`."""
        with self.guard(table):
            return _coded(self._read(table, [column], kinds)[column])

    def strings(self, _ids: Array) -> dict[int, str]:
        """See :class:`Sqlite`."""
        read = self._read("StringIds", ["id", "value"])
        return dict(zip(read["id"].to_pylist(), map(_decode, read["value"].to_pylist()), strict=True))

    def records(self, table: str) -> list[dict[str, Any]]:
        """See :class:`Sqlite`."""
        return list(self._read(table).to_pylist()) if table in self.tables else []


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
        self._gpu_of = {
            (int(r["pid"]), int(r["cudaId"])): int(r["gpuId"])
            for r in tables.records("TARGET_INFO_CUDA_DEVICE")
            if None not in (r.get("pid"), r.get("cudaId"), r.get("gpuId")) and r["cudaId"] != r["gpuId"]
        }
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
        device = _or_zero(ordinal).astype(np.int32)
        for (process, cuda), gpu in self._gpu_of.items():
            device[(_process_of(global_pid) == process) & (ordinal == cuda)] = gpu
        return device

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
        captured = {(r.get("startTime"), r.get("stopTime")) for r in tables.records("ANALYSIS_DETAILS")}
        # Of the session's clock, on which collection may begin late, while events count from where it began.
        began, stopped = captured.pop() if len(captured) == 1 else (None, None)
        environment = {r.get("name"): r.get("value") for r in tables.records("TARGET_INFO_SYSTEM_ENV")}
        gpus = {r.get("id", r.get("cuDevice", 0)): r for r in tables.records("TARGET_INFO_GPU")}
        return TraceMeta(
            tool="Nsight Systems",
            tool_version=export.get("EXPORT_PRODUCT_VERSION"),
            schema=export.get("EXPORT_SCHEMA_VERSION"),
            driver=str(environment["NvDriverVersion"]) if environment.get("NvDriverVersion") else None,
            distributed=_distributed(str(environment.get("DeviceEnvironment") or "")),
            gpus=[
                Gpu(
                    device=int(number),
                    name=gpu.get("name"),
                    sm_count=gpu.get("smCount") or None,
                    memory_bytes=gpu.get("totalMemory") or None,
                    compute_capability=capability(gpu.get("computeMajor"), gpu.get("computeMinor")),
                )
                for number, gpu in sorted(gpus.items())
            ],
            missing=[t for t in EVENT_TABLES if t not in shown],
            notes=[*lost, *self._warnings()],
            window_ns=None if began is None or stopped is None else (0, int(stopped) - int(began)),
            thread_names=self._thread_names(),
        )

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


def _or_zero(values: Array) -> Array:
    """The values, with 0 in place of NULL."""
    return np.where(values == _NULL, 0, values) if values.min(initial=0) == _NULL else values


#: How one column of the model is made: the function, and the columns of the export that it is given after the source.
#: A column that the export lacks is one of NULLs.
_Plan: TypeAlias = tuple[Any, *tuple[str, ...]]


def _from(column: str, change: Callable[[Array], Any]) -> _Plan:
    return lambda _, values: change(values), column


def _copy(column: str, dtype: str = "int64") -> _Plan:
    return _from(column, lambda values: _or_zero(values).astype(dtype, copy=False))


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
        **{f"{what}_{axis}": _copy(f"{what}{axis.upper()}", "int32") for what in ("grid", "block") for axis in "xyz"},
        "registers": _copy("registersPerThread", "int32"),
        "static_shared_bytes": _copy("staticSharedMemory", "int32"),
        "dynamic_shared_bytes": _copy("dynamicSharedMemory", "int32"),
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
    return store.cached(Path(path), lambda: NsysSource(Sqlite(Path(path))), "nsys" if cache else None)


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
