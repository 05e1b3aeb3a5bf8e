"""Reader for Nsight Systems exports: SQLite of every schema since 2.9 (2022.2), and ``parquetdir``.

nsys writes tables lazily, renames them between versions and adds columns; everything optional is probed,
nothing assumed. ``nsys.toml`` says which table and column is which of the model's, and
:mod:`nsightkit.trace.nsys_tables` reads them.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.errors import TraceError
from nsightkit.safe import Json
from nsightkit.trace import store
from nsightkit.trace.clean import private_names
from nsightkit.trace.model import (
    EVENT_TABLES,
    GPU_TABLES,
    TABLES,
    Gpu,
    Source,
    TraceMeta,
    capability,
    categorical,
    complete,
    lost_work,
)
from nsightkit.trace.nesting import nesting
from nsightkit.trace.nsys_tables import EXPORT_AGAIN, NULL, Columns, ParquetDir, Rows, Sqlite, Tables

if TYPE_CHECKING:
    from nsightkit.trace.programs import Export

__all__ = ["open_parquetdir", "open_report", "open_sqlite"]

Array = npt.NDArray[Any]

_FACTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_SOURCES = _FACTS["sources"]
_LABELS = _FACTS["labels"]
_LABELS |= dict.fromkeys(("srcKind", "dstKind", "memKind"), _LABELS["memory"])
#: Columns of the exporter's that fill those of the model, by table of the exporter's.
_COLUMNS = {source: {**_FACTS["columns"], **facts["columns"]} for source, facts in _SOURCES.items()}

#: All tables that are read.
_READ = {*_SOURCES, *_FACTS["identify"], *_FACTS["details"]}
_NVTX = "NVTX_EVENTS"
_SAMPLES = "COMPOSITE_EVENTS"
_WAITS = "MPI_START_WAIT_EVENTS"
#: Variables that only launchers of MPI set: MPICH and Cray, Open MPI, PMIx.
_OF_MPI = {"PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK"}
#: Columns that tell which rows are kept.
_NEEDED = {_SAMPLES: ("globalTid",), _WAITS: ("start", "end", "globalTid", "textId")}
_FRAMES = "SAMPLING_CALLCHAINS"
_MPI_RANKS = "MPI_RANKS"
#: nsys writes no table without events, so any CUDA table proves that CUDA was traced, and none proves nothing.
_OF_CUDA = (*GPU_TABLES, "calls", "syncs")
_OF_FACTS = ("TARGET_INFO_SYSTEM_ENV", "META_DATA_CAPTURE", "META_DATA_EXPORT", "EXPORT_META_DATA")

#: NVTX_EVENTS.eventType of start/end ranges, and of the announcement of a domain.
_START_END = (60, 71)
_DOMAIN = 75

#: Nsight Systems samples a running thread at 100 Hz or more.
_SLOWEST_NS = 10_000_000
#: Names of functions that were not found. And modules whose callers are more informative.
_NO_FUNCTION = re.compile(r"0x|#|\[|(_start|_init)?$")
_SYSTEM = re.compile(r"(.*/)?((libc|libpthread|ld|ld-linux[\w-]*)[-.]|\[)")

#: `cudaLaunchKernel_v7000` is cudaLaunchKernel as introduced by CUDA 7.0; `cuGetProcAddress_v2` is another function.
_CALL_VERSION = re.compile(r"_v\d{4,}$")
_SMALL = re.compile(r"\d{1,7}")
#: Letters of a fact about the capture that are kept.
_FACT = 200


class NsysSource:
    """Maps an export's tables to the model's, column by column.

    Parameters
    ----------
    tables : Tables
        The export.

    Raises
    ------
    TraceError
        The file holds none of the tables of an Nsight Systems export.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        _require_export(tables)
        self._gpu_of = _renumbered_gpus(tables)
        self._first: dict[str, int | None] = {}  # the least start of each table of events
        self.meta = self._read_meta()

    # -- the Source protocol ------------------------------------------------------------------------------------

    def read(self, table: str, columns: Sequence[str]) -> pd.DataFrame:
        """See :class:`~nsightkit.trace.model.Source`."""
        parts = [self._part(table, source, columns) for source in self._present(table)]
        if not parts:
            return complete(table, None, columns)
        return pd.DataFrame({column: _joined([part[column] for part in parts]) for column in columns}, copy=False)

    def first_ns(self) -> int:
        """See :class:`~nsightkit.trace.model.Source`."""
        for table in EVENT_TABLES:
            for source in self._present(table):
                if source not in self._first:
                    self._first[source] = self._tables.first(source, self._chosen(source))
        return min((first for first in self._first.values() if first is not None), default=0)

    # -- rows and columns ---------------------------------------------------------------------------------------

    def _present(self, table: str) -> list[str]:
        """The exporter's tables behind one of ours, as far as they are there."""
        tables = self._tables.tables
        return [source for source, facts in _SOURCES.items() if facts["table"] == table and source in tables]

    def _chosen(self, source: str) -> Rows | None:
        """The rows of a table that are events of ours; None for all."""
        rows: Rows | None = _SOURCES[source].get("rows")
        if rows and rows["column"] in self._tables.tables[source]:
            return rows
        return None

    def _part(self, table: str, source: str, columns: Sequence[str]) -> pd.DataFrame:
        """The wanted columns that one of the exporter's tables has."""
        theirs = _COLUMNS[source]
        constants = _SOURCES[source].get("constants", {})
        wanted: set[str] = set()
        for column in columns:
            if column in theirs:
                wanted.update((theirs[column], *_BESIDE.get(column, ())))
        raw = self._rows(source, wanted)
        part: Json = {}
        size = len(next(iter(raw.values())))
        for column in columns:
            if column in constants:
                part[column] = categorical(np.zeros(size, np.int8), [constants[column]])
            elif theirs.get(column) in raw:
                part[column] = self._converted(table, column, theirs[column], raw)
        return complete(table, pd.DataFrame(part, pd.RangeIndex(size), copy=False), columns)

    def _rows(self, source: str, columns: Collection[str]) -> Columns:
        """Integer columns of the rows that are events, as far as they are there.

        What has not ended yet ends with the latest event.
        """
        wanted = set(columns)
        if "end" in wanted or wanted.isdisjoint(self._tables.tables[source]):
            wanted.add("start")
        wanted.update(_NEEDED.get(source, ()))
        present = sorted(wanted.intersection(self._tables.tables[source]))
        raw = self._tables.integers(source, present, self._chosen(source))
        if "start" in raw and len(raw["start"]) and source != _SAMPLES:
            self._first[source] = int(raw["start"].min())
        if "end" in raw:
            is_open = raw["end"] == NULL
            if is_open.any():
                raw["end"][is_open] = max(raw["start"].max(), raw["end"].max())
            raw["open"] = is_open
        keep = np.ones(len(next(iter(raw.values()))), bool)
        if source == _SAMPLES:  # the machine's other processes are not the trace's
            callers = [self._rows(calls, ["globalTid"])["globalTid"] for calls in self._present("calls")]
            processes = np.unique(_process_of(np.concatenate([np.empty(0, np.int64), *callers])))
            keep = np.isin(_process_of(raw["globalTid"]), processes)
        if source == _WAITS:  # a row for each request of an MPI_Waitall
            keep = ~pd.DataFrame(raw)[list(_NEEDED[_WAITS])].duplicated().to_numpy()
        if keep.all():
            return raw
        return {column: values[keep] for column, values in raw.items()}

    def _converted(self, table: str, column: str, theirs: str, raw: Columns) -> Any:
        """A column of the model, of the exporter's column `theirs` and those beside it."""
        values = raw[theirs]
        match table, column:
            case "ranges", "name":
                return self._nvtx_names(values, self._chosen(_NVTX))
            case "ranges", "domain":
                return self._domains(_or_zero(values), raw["globalTid"])
            case "ranges", "level" | "parent":
                if "parent" not in raw:
                    alone = np.isin(raw["eventType"], _START_END)
                    raw["level"], raw["parent"] = nesting(raw["globalTid"], raw["start"], raw["end"], alone=alone)
                return raw[column]
            case "ranges", "open":
                return raw["open"]
            case "ranges", "end_thread":
                return _thread_of(np.where((values == NULL) | (values == 0), raw["globalTid"], values))
            case "calls", "name":
                return self._names(values, _CALL_VERSION)
            case "samples", "end_ns":
                return _sampled_until(values, raw["globalTid"])
            case "samples", "name":
                return self._sample_names(values)
            case _, "process":
                return _process_of(values)
            case _, "thread":
                return _thread_of(values)
            case _, "device":
                return self._devices(_or_zero(values), raw.get("globalPid"))
        if theirs in _LABELS:
            return _labelled(values, _LABELS[theirs])
        if TABLES[table][column] == "category":
            return self._names(values)
        return _or_zero(values)

    # -- names --------------------------------------------------------------------------------------------------

    def _strings(self, ids: Array) -> list[str]:
        texts = {}
        if "StringIds" in self._tables.tables:
            numbers, found = self._tables.texts("StringIds", "id", "value", set(ids.tolist()))
            texts = dict(zip(numbers, found, strict=True))
        return [texts.get(number, f"#{number}") for number in ids.tolist()]

    def _names(self, ids: Array, ending: re.Pattern[str] | None = None) -> pd.Categorical:
        """String ids as a categorical of their texts, without an ending; ids of equal texts become one category."""
        codes, distinct = pd.factorize(ids)
        texts = self._strings(distinct)
        if ending:
            texts = [ending.sub("", text) for text in texts]
        return categorical(codes, texts)

    def _nvtx_names(self, ids: Array, rows: Rows | None) -> pd.Categorical:
        """Registered strings fill textId, plain ones text; an event may have neither."""
        codes, distinct = pd.factorize(ids)
        texts = self._strings(distinct)
        is_plain = ids == NULL
        if is_plain.any() and rows:
            plain = [""] * len(ids)
            if "text" in self._tables.tables[_NVTX]:
                _, plain = self._tables.texts(_NVTX, rows["column"], "text", rows["numbers"])
            plain_codes, plain_texts = pd.factorize(np.array(plain, object))
            codes = np.where(is_plain, plain_codes + len(texts), codes)
            texts += plain_texts.tolist()
        return categorical(codes, texts)

    def _domains(self, ids: Array, thread: Array) -> pd.Categorical:
        """Names of the ranges' domains, "" for the default one."""
        names = self._domain_names() if ids.any() else {}
        codes, places = pd.factorize(_place(_process_of(thread), ids))
        texts = []
        for place in places.tolist():
            domain = place & 0xFFFF_FFFF
            texts.append(names.get(place, f"domain {domain}") if domain else "")
        return categorical(codes, texts)

    def _domain_names(self) -> dict[int, str]:
        """Names of domains by process and number."""
        announced = {"column": "eventType", "numbers": (_DOMAIN,)}
        columns = {"domainId", "globalTid", "textId"}.intersection(self._tables.tables[_NVTX])
        events = self._tables.integers(_NVTX, sorted(columns), announced)
        text = events.get("textId", np.full(len(events["domainId"]), NULL))
        names = self._nvtx_names(text, announced)
        return dict(zip(_place(_process_of(events["globalTid"]), events["domainId"]).tolist(), names, strict=True))

    def _sample_names(self, ids: Array) -> pd.Categorical:
        """The innermost informative function of each sample, else the module of its innermost frame."""
        columns = ["id", "symbol", "module", "stackDepth"]
        if not set(columns).issubset(self._tables.tables.get(_FRAMES, ())):
            return categorical(np.zeros(len(ids), np.int8), [""])
        frames = pd.DataFrame(self._tables.integers(_FRAMES, columns))
        # Names are matched once each: millions of frames have a few thousand.
        functions = self._names(frames["symbol"].to_numpy())
        modules = self._names(frames["module"].to_numpy())
        is_unknown = functions.categories.str.match(_NO_FUNCTION)[functions.codes]
        is_system = modules.categories.str.match(_SYSTEM)[modules.codes]
        files = [module.rpartition("/")[2] for module in modules.categories]
        texts = [*functions.categories, *files, ""]
        frames["name"] = np.where(is_unknown, len(functions.categories) + modules.codes.astype(int), functions.codes)
        frames["rank"] = np.where(is_unknown, 2, is_system)
        best = frames.sort_values(["id", "rank", "stackDepth"]).drop_duplicates("id").set_index("id")["name"]
        return categorical(best.reindex(ids, fill_value=len(texts) - 1).to_numpy(), texts)

    def _devices(self, ordinal: Array, global_pid: Array | None) -> Array:
        """GPU numbers of CUDA ordinals."""
        if not self._gpu_of or global_pid is None:
            return ordinal
        codes, places = pd.factorize(_place(_process_of(global_pid), ordinal))
        gpus = [self._gpu_of.get(place, place & 0xFFFF_FFFF) for place in places.tolist()]
        return np.array(gpus, np.int64)[codes]

    # -- what the export says about itself ----------------------------------------------------------------------

    def _read_meta(self) -> TraceMeta:
        facts = self._facts()
        known = dict(facts)
        lost = [] if any(map(self._present, GPU_TABLES)) else self._lost_work()
        return TraceMeta(
            tool="Nsight Systems",
            tool_version=_text(known.get("EXPORT_PRODUCT_VERSION")),
            schema=_text(known.get("EXPORT_SCHEMA_VERSION")),
            distributed=self._distributed(known),
            gpus=self._gpus(),
            missing=self._missing(facts, bool(lost)),
            notes=[*lost, *self._warnings()],
            window_ns=self._window(),
            thread_names=self._thread_names(),
            private=private_names(facts),
        )

    def _facts(self) -> list[tuple[str, str]]:
        """What the export says about program and capture. nsys keeps the program's whole environment."""
        facts = []
        for table in _OF_FACTS:
            for row in self._tables.records(table):
                name = str(row.get("name")).rpartition(":")[2]
                text = str(row.get("value") or "")
                if "ENVIRON" not in name.upper():
                    facts.append((name, text))
                    continue
                for entry in re.split(r"[\0;\n]", text):
                    variable, _, setting = entry.partition("=")
                    facts.append((variable.strip(), setting.strip("\"'")))
        return facts

    def _missing(self, facts: list[tuple[str, str]], is_lost: bool) -> list[str]:
        """Tables that were not recorded; "MPI" if the program ran under MPI, and its calls were not traced."""
        asked = {value for name, value in facts if name == "CAPTURE_EVENT_TYPE"}
        traced_cuda = any(map(self._present, _OF_CUDA))
        missing = []
        for table in EVENT_TABLES:
            if table in _OF_CUDA:
                is_recorded = traced_cuda and not (table in GPU_TABLES and is_lost)
            else:
                is_recorded = bool(self._present(table)) or _FACTS["asked"].get(table) in asked
            if not is_recorded:
                missing.append(table)
        is_mpi_job = not _OF_MPI.isdisjoint(dict(facts))
        has_mpi_calls = any(table.startswith("MPI_") and table != _MPI_RANKS for table in self._tables.tables)
        may_be_traced = not asked or ("COLLECT_MPI_TRACE", "true") in facts
        if is_mpi_job and not has_mpi_calls and not may_be_traced:
            missing.append("MPI")
        return missing

    def _window(self) -> tuple[int, int] | None:
        """The captured window, if the export records one; clocks of several machines cannot be told apart."""
        windows = set()
        for row in self._tables.records("ANALYSIS_DETAILS"):
            windows.add((_number(row.get("startTime")), _number(row.get("stopTime"))))
        if len(windows) != 1:
            return None
        began, stopped = windows.pop()
        if began is None or stopped is None or stopped < began:
            return None
        # Of the session's clock, on which collection may begin late, while events count from where it began.
        return 0, stopped - began

    def _distributed(self, known: dict[str, str]) -> Json:
        """Rank and world size out of the program's environment; nothing else of it."""
        place: Json = {}
        for what, variables in _FACTS["places"].items():
            numbers = [known[variable] for variable in variables if _SMALL.fullmatch(known.get(variable, ""))]
            if numbers:
                place[what] = int(numbers[0])
        ranks = {row.get("rank") for row in self._tables.records(_MPI_RANKS)}
        if len(ranks) == 1:
            place.setdefault("rank", _number(ranks.pop()))
        if place.get("rank") is not None:
            return place
        return {}

    def _gpus(self) -> list[Gpu]:
        gpus = {}
        for row in self._tables.records("TARGET_INFO_GPU"):
            number = _number(row.get("id", row.get("cuDevice", 0)))
            if number is not None:
                version = capability(_number(row.get("computeMajor")), _number(row.get("computeMinor")))
                gpus[number] = Gpu(number, _text(row.get("name")), version)
        return [gpu for _, gpu in sorted(gpus.items())]

    def _warnings(self) -> Iterator[str]:
        """What nsys itself said was lost, in words of ours: its own are anybody's text, with paths in it."""
        rows = self._tables.records("DIAGNOSTIC_EVENT")
        texts = [str(row.get("text")) for row in rows if row.get("severity") in (2, 3)]  # warnings and errors
        for warning in _FACTS["warnings"]:
            if any(re.search(warning["sign"], text) for text in texts):
                yield f"Nsight Systems warned that {warning['loss']}."

    def _lost_work(self) -> list[str]:
        if not self._present("calls"):
            return []
        return lost_work(self.read("calls", ["name"])["name"])

    def _thread_names(self) -> dict[int, str]:
        names = {}
        for row in self._tables.records("ThreadNames"):
            thread = row.get("globalTid")
            name = row.get("nameId")
            if isinstance(thread, int) and isinstance(name, int):
                names[_thread_of(thread)] = name
        return dict(zip(names, self._strings(np.array(list(names.values()), np.int64)), strict=True))


#: The exporter's columns that a column of ours is made of beside its own.
_BESIDE = {
    "device": ("globalPid",),
    "end_thread": ("globalTid",),
    "domain": ("globalTid",),
    "level": ("globalTid", "eventType"),
    "parent": ("globalTid", "eventType"),
}


def _require_export(tables: Tables) -> None:
    """Refuse a database without an export's tables, or without the columns of every schema."""
    present = [source for source in _SOURCES if source in tables.tables]
    if not present and not any(table in tables.tables for table in _FACTS["identify"]):
        raise TraceError(tables.path, "is a database, but not an Nsight Systems export", EXPORT_AGAIN)
    for source in present:
        needed = ["start", "globalTid" if source == _SAMPLES else "end"]
        for column in needed:
            if column not in tables.tables[source]:
                raise TraceError(tables.path, f"has a table {source} without the column {column}", EXPORT_AGAIN)


def _renumbered_gpus(tables: Tables) -> dict[int, int]:
    """GPU by process and CUDA ordinal, where the two differ (CUDA_VISIBLE_DEVICES); exports since 2024 say."""
    gpus = {}
    for row in tables.records("TARGET_INFO_CUDA_DEVICE"):
        process = _number(row.get("pid"))
        ordinal = _number(row.get("cudaId"))
        gpu = _number(row.get("gpuId"))
        if process is not None and ordinal is not None and gpu is not None and ordinal != gpu:
            gpus[_place(process, ordinal)] = gpu
    return gpus


def _sampled_until(start: Array, thread: Array) -> Array:
    """When each sample's thread was sampled next, or one sampling period later if that is more than two later.

    A period is the median of what lies between two samples of a thread, of all threads while they ran. It is
    counted in cycles or instructions, so its length varies.
    """
    samples = pd.DataFrame({"start": start, "thread": thread}).sort_values("start")
    apart = samples.groupby("thread")["start"].diff(-1).abs()
    period = apart[apart <= _SLOWEST_NS].median()
    lasting = apart.where(apart <= 2 * period, period).fillna(0)
    return np.asarray(start + lasting.sort_index().to_numpy(np.int64))


def _labelled(numbers: Array, labels: dict[str, str]) -> pd.Categorical:
    """Numbers of an enumeration as what they are called."""
    codes, distinct = pd.factorize(numbers)
    return categorical(codes, [labels.get(str(number), labels["other"]) for number in distinct.tolist()])


def _place(process: Any, number: Any) -> Any:
    """One number for a process and a number within it."""
    return (process << 32) + number


def _joined(parts: list[Any]) -> Any:
    """Parts of a column, one below the other."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0].dtype, pd.CategoricalDtype):
        return pd.api.types.union_categoricals(parts)
    return np.concatenate(parts)


def _number(value: Any) -> int | None:
    """A number from 0 to 2**63 - 1, else None: a cell of SQLite may hold anything."""
    if isinstance(value, int) and 0 <= value < 1 << 63:
        return value
    return None


def _text(value: Any) -> str | None:
    """What is known about a capture as a text of sane length; None where it is absent or empty."""
    if value:
        return str(value)[:_FACT]
    return None


def _process_of(global_id: Any) -> Any:
    """Process id of nsys's serialised global process or thread id (bits 24 to 47)."""
    return (global_id >> 24) & 0xFF_FFFF


def _thread_of(global_id: Any) -> Any:
    """The model's thread: process id and thread id, without nsys's host bits."""
    return global_id & 0xFFFF_FFFF_FFFF


def _or_zero(values: Array) -> Array:
    """The values, with 0 in place of NULL."""
    if values.min(initial=0) == NULL:
        return np.where(values == NULL, 0, values)
    return values


# -- opening ----------------------------------------------------------------------------------------------------


def open_sqlite(path: Path, *, cache: bool = True, export: Export | None = None) -> Source:
    """Open an Nsight Systems SQLite export.

    Parameters
    ----------
    path : Path
    cache : bool
        Keep the columns that were read in a Parquet cache when the export is big.
    export : Export, optional
        Of a report, held as long as its file is read.

    Raises
    ------
    TraceError
        Truncated, damaged, or the database of another program.
    """

    def open_export() -> NsysSource:
        return NsysSource(Sqlite(path, _READ, export))

    return store.cached(path, open_export, "nsys" if cache else None)


def open_report(path: Path, *, cache: bool = True) -> Source:
    """Open a ``.nsys-rep`` by way of its SQLite export, which is kept in the user's cache folder.

    Parameters
    ----------
    path : Path
    cache : bool
        Without it the export is a temporary file.

    Raises
    ------
    TraceError
        No usable nsys is installed, or it cannot read the report.
    """
    from nsightkit.trace.programs import exported

    export = exported(path, cache=cache)
    return open_sqlite(export.path, cache=cache, export=export)


def open_parquetdir(path: Path) -> Source:
    """Open a folder written by ``nsys export --type parquetdir``.

    Parameters
    ----------
    path : Path

    Raises
    ------
    TraceError
        The folder holds no tables of Nsight Systems, or one is unreadable.
    """
    return NsysSource(ParquetDir(path, _READ))
