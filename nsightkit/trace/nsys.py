"""Reader for Nsight Systems exports: SQLite of every schema since 2.9 (2022.2), and ``parquetdir``.

nsys writes tables lazily, renames them between versions and adds columns; everything optional is probed,
nothing assumed. What a file may hold is the business of :mod:`nsightkit.trace.nsys_tables`.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.errors import TraceError
from nsightkit.trace import programs, store
from nsightkit.trace.clean import private_names
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
from nsightkit.trace.nsys_tables import EXPORT_AGAIN, NO_EVENT, NULL, ParquetDir, Sqlite, Tables

__all__ = ["open_parquetdir", "open_report", "open_sqlite"]

Array = npt.NDArray[Any]

_MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
_MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"
_NVTX = "NVTX_EVENTS"
_OSRT = "OSRT_API"
_SAMPLES = "COMPOSITE_EVENTS"
_FRAMES = "SAMPLING_CALLCHAINS"
#: Calls of MPI and UCX. UCP_PROGRESS_EVENTS stays out: a message in flight holds no thread. NVSHMEM and NCCL are NVTX
#: domains, hence ranges.
_MESSAGES = [f"MPI_{kind}_EVENTS" for kind in ("COLLECTIVES", "P2P", "START_WAIT", "OTHER")]
_MESSAGES += ["UCP_EVENTS", "UCP_SUBMIT_EVENTS"]
_MPI_RANKS = "MPI_RANKS"

#: The exporter's tables behind each of ours.
_BACKING = {
    "kernels": ["CUPTI_ACTIVITY_KIND_KERNEL"],
    "memops": [_MEMCPY, _MEMSET],
    "graphs": ["CUPTI_ACTIVITY_KIND_GRAPH_TRACE"],
    "calls": ["CUPTI_ACTIVITY_KIND_RUNTIME"],
    "syncs": ["CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"],
    "ranges": [_NVTX],
    "ops": [],
    "frames": [],
    "os_calls": [_OSRT, *_MESSAGES],
    "overhead": ["PROFILER_OVERHEAD", "CUPTI_ACTIVITY_KIND_OVERHEAD"],
    "samples": [_SAMPLES],
}
_EVENT_SOURCES = list(itertools.chain.from_iterable(_BACKING.values()))
#: nsys writes no table without events, so any CUDA table proves that CUDA was traced, and none proves nothing.
_OF_CUDA = (*GPU_TABLES, "calls", "syncs")
_CUDA_SOURCES = list(itertools.chain.from_iterable(_BACKING[table] for table in _OF_CUDA))
#: Tables that count as recorded if the capture's options name such events.
_ASKED_FOR = {"ranges": "NvtxEvents", "os_calls": "OSRuntime"}

_EXPORT_FACTS = ("META_DATA_EXPORT", "EXPORT_META_DATA")
#: Tables that also identify an export, and tables of further details.
_OTHERS = ("StringIds", "ANALYSIS_DETAILS", *_EXPORT_FACTS)
_DETAILS = (
    "META_DATA_CAPTURE",
    "TARGET_INFO_SYSTEM_ENV",
    "TARGET_INFO_GPU",
    "TARGET_INFO_CUDA_DEVICE",
    "DIAGNOSTIC_EVENT",
    "ThreadNames",
    _FRAMES,
    _MPI_RANKS,
)
_READ = frozenset([*_EVENT_SOURCES, *_OTHERS, *_DETAILS])

#: cuptiActivityMemcpyKind and cuptiActivityMemoryKind (ENUM_CUDA_MEMCPY_OPER, ENUM_CUDA_MEM_KIND in an export).
_COPY_KINDS = ["other", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP"]
_COPY_KINDS += ["unified HtoD", "unified DtoH", "unified DtoD"]
_MEM_KINDS = ["pageable", "pinned", "device", "array", "managed", "device static", "managed static"]
_SYNC_KINDS = ["other", "event", "stream-wait-event", "stream", "context"]

#: NVTX_EVENTS.eventType: push/pop and start/end ranges, live and from NVTXT files; 75 announces a domain.
_PUSH_POP = (59, 70)
_START_END = (60, 71)
_RANGES = _PUSH_POP + _START_END
_DOMAIN = 75
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
#: Names of functions that were not found. And modules whose callers are more informative.
_NO_FUNCTION = re.compile(r"0x|#|\[|(_start|_init)?$")
_SYSTEM = re.compile(r"(.*/)?((libc|libpthread|ld|ld-linux[\w-]*)[-.]|\[)")

#: `cudaLaunchKernel_v7000` is cudaLaunchKernel as introduced by CUDA 7.0; `cuGetProcAddress_v2` is another function.
_CALL_VERSION = re.compile(r"_v\d{4,}$")
#: Letters of a fact about the capture that are kept.
_FACT = 200

#: Severities of diagnostics that are warnings or errors, and what those say that mean lost data.
_SERIOUS = (2, 3)
_LOST = {
    r"^Not all CUDA events might have been collected": "not all CUDA events may have been collected",
    r"^Not all NVTX events might have been collected": "not all NVTX events may have been collected",
    r"^Not all OS runtime libraries events might have been collected": "not all OS calls may have been collected",
    r"\bCUPTI_ERROR_": "CUDA's tracing library reported an error, so operations of a GPU may be missing",
    r"\b(lost|dropped)\b": "events were lost",
}

#: Variables in which launchers tell a process its place in a job, in order of preference: of torchrun, of PMI (MPICH,
#: Cray), of Open MPI, of Slurm.
_PLACES = {
    "rank": ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"),
    "world_size": ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"),
}
#: Variables that only launchers of MPI set: MPICH and Cray, Open MPI, PMIx.
_OF_MPI = re.compile(r"(?<!\w)(PMI_RANK|OMPI_COMM_WORLD_RANK|PMIX_RANK)=")


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
        self._first: dict[str, int] = {}  # by table, the earliest start
        self.meta = self._read_meta()

    # -- the Source protocol ------------------------------------------------------------------------------------

    def read(self, table: str, columns: Sequence[str]) -> pd.DataFrame:
        """See :class:`~nsightkit.trace.model.Source`."""
        parts = [self._part(table, source, columns) for source in self._present(table)]
        if not parts:
            return complete(table)[list(columns)]
        joined = {column: _joined([part[column] for part in parts]) for column in columns}
        return pd.DataFrame(joined, copy=False)

    def first_ns(self) -> int:
        """See :class:`~nsightkit.trace.model.Source`."""
        first = NO_EVENT
        for table in EVENT_TABLES:
            for source in self._present(table):
                if source not in self._first:
                    self._rows(source, ["start"])
                first = min(first, self._first[source])
        return 0 if first == NO_EVENT else first

    # -- rows and columns ---------------------------------------------------------------------------------------

    def _present(self, table: str) -> list[str]:
        """The exporter's tables behind one of ours, as far as they are there."""
        return [source for source in _BACKING[table] if source in self._tables.tables]

    def _part(self, table: str, source: str, columns: Sequence[str]) -> dict[str, Any]:
        """The wanted columns of one of the exporter's tables."""
        plans = _PLANS[source] if source in _PLANS else _PLANS[table]
        wanted = {"start"}
        for column in columns:
            wanted.update(plans[column][1:])
        present = sorted(wanted.intersection(self._tables.columns(source)))
        raw = self._sampled(present) if source == _SAMPLES else self._rows(source, present)
        absent = np.broadcast_to(NULL, len(raw["start"]))
        for column in wanted:
            raw.setdefault(column, absent)
        if "level" in columns or "parent" in columns:
            alone = np.isin(raw["eventType"], _START_END)
            raw["level"], raw["parent"] = nesting(raw["globalTid"], raw["start"], raw["end"], alone=alone)
        part = {}
        for column in columns:
            make, *sources = plans[column]
            part[column] = make(self, *(raw[name] for name in sources))
        return part

    def _rows(self, source: str, columns: Sequence[str]) -> dict[str, Array]:
        """Integer columns of the rows that are events: :data:`_EVENTS`.

        Ranges, marked by ``open``, and calls of MPI that have no end yet run to the latest end of any. nsys writes a
        row per request of an MPI_Waitall, of which one is kept.
        """
        wanted = {*columns, "start"}
        if source in _MESSAGES:
            wanted.update(("end", "globalTid", "textId"))
        kind, kinds, are_events = _EVENTS.get(source, ("", (), True))
        is_mixed = kind in self._tables.columns(source)
        raw = self._tables.integers(source, sorted(wanted | {kind} if is_mixed else wanted))
        if is_mixed:
            raw = _kept(raw, np.isin(raw[kind], kinds, invert=not are_events))
        if source in (_NVTX, *_MESSAGES) and "end" in raw:
            raw["open"] = raw["end"] == NULL
            latest = max(raw["start"].max(initial=NULL), raw["end"].max(initial=NULL))
            raw["end"] = np.where(raw["open"], latest, raw["end"])
        if source in _MESSAGES:
            calls = pd.DataFrame({column: raw[column] for column in ("globalTid", "start", "end", "textId")})
            raw = _kept(raw, ~calls.duplicated().to_numpy())
        self._first[source] = int(raw["start"].min(initial=NO_EVENT))
        return raw

    def _sampled(self, columns: Sequence[str]) -> dict[str, Array]:
        """Integer columns of the samples, of processes that called CUDA: the machine's others are not the trace's."""
        raw = self._rows(_SAMPLES, [*columns, "globalTid"])
        callers = np.empty(0, np.int64)
        for source in self._present("calls"):
            threads = self._rows(source, ["globalTid"])["globalTid"]
            callers = np.unique(_process_of(threads))
        return _kept(raw, np.isin(_process_of(raw["globalTid"]), callers))

    # -- names --------------------------------------------------------------------------------------------------

    def _strings(self, ids: Array) -> list[str]:
        texts = self._tables.strings(ids)
        return [texts.get(number, f"#{number}") for number in ids.tolist()]

    def names(self, ids: Array) -> pd.Categorical:
        """String ids as a categorical of their texts; ids of equal texts become one category."""
        codes, distinct = pd.factorize(ids)
        return categorical(codes, self._strings(distinct))

    def call_names(self, ids: Array) -> pd.Categorical:
        """Names of CUDA calls, without their version."""
        codes, distinct = pd.factorize(ids)
        return categorical(codes, [_CALL_VERSION.sub("", name) for name in self._strings(distinct)])

    def range_names(self, ids: Array) -> pd.Categorical:
        """Names of the ranges."""
        return self._nvtx_names(ids, _RANGES)

    def _nvtx_names(self, ids: Array, kinds: Sequence[int]) -> pd.Categorical:
        """Registered strings fill textId, plain ones text; an event may have neither."""
        codes, distinct = pd.factorize(ids)
        texts = self._strings(distinct)
        is_plain = ids == NULL
        if is_plain.any():
            plain, plain_texts = np.zeros(len(ids), np.int64), [""]
            if "text" in self._tables.columns(_NVTX):
                plain, plain_texts = self._tables.texts(_NVTX, "text", kinds)
            codes = np.where(is_plain, plain + len(texts), codes)
            texts += plain_texts
        return categorical(codes, texts)

    def domains(self, ids: Array, thread: Array) -> pd.Categorical:
        """Names of the ranges' domains, "" for the default one."""
        ids = _or_zero(ids)
        if not ids.any():
            return categorical(np.zeros(len(ids), np.int8), [""])
        names = self._domain_names()
        codes, places = pd.factorize(_place(_process_of(thread), ids))
        texts = []
        for place in places.tolist():
            domain = place & 0xFFFF_FFFF
            texts.append(names.get(place, f"domain {domain}") if domain else "")
        return categorical(codes, texts)

    def _domain_names(self) -> dict[int, str]:
        """Names of domains by process and number."""
        columns = {"eventType", "domainId", "globalTid", "textId"}.intersection(self._tables.columns(_NVTX))
        events = self._tables.integers(_NVTX, sorted(columns))
        announced = events["eventType"] == _DOMAIN
        process = _process_of(events["globalTid"][announced])
        domain = events["domainId"][announced]
        text = events["textId"][announced] if "textId" in events else np.full(len(domain), NULL)
        names = self._nvtx_names(text, (_DOMAIN,))
        return dict(zip(_place(process, domain).tolist(), names, strict=True))

    def sample_names(self, ids: Array) -> pd.Categorical:
        """The innermost informative function of each sample, else the module of its innermost frame."""
        columns = ["id", "symbol", "module", "stackDepth"]
        if not set(columns).issubset(self._tables.columns(_FRAMES)):
            return categorical(np.zeros(len(ids), np.int8), [""])
        frames = pd.DataFrame(self._tables.integers(_FRAMES, columns))
        functions = pd.Series(self.names(frames.pop("symbol").to_numpy())).astype("str")
        modules = pd.Series(self.names(frames.pop("module").to_numpy())).astype("str")
        is_unknown = functions.str.match(_NO_FUNCTION)
        frames["name"] = functions.where(~is_unknown, modules.str.rpartition("/")[2])
        frames["rank"] = np.where(is_unknown, 2, modules.str.match(_SYSTEM))
        best = frames.sort_values(["id", "rank", "stackDepth"]).drop_duplicates("id").set_index("id")["name"]
        codes, texts = pd.factorize(best.reindex(ids, fill_value=""))
        return categorical(codes, texts.tolist())

    def sampled_until(self, start: Array, thread: Array) -> Array:
        """When each sample's thread was sampled next, or one sampling period later if that is more than two later.

        A period is the median of what lies between two samples of a thread, of all threads while they ran. It is
        counted in cycles or instructions, so its length varies.
        """
        order = np.lexsort((start, thread))
        in_turn = thread[order]
        apart = np.full(len(start), NO_EVENT)
        apart[:-1] = np.where(in_turn[1:] == in_turn[:-1], np.diff(start[order]), NO_EVENT)
        close = apart[apart <= _SLOWEST_NS]
        period = int(np.median(close)) if len(close) else 0
        until = np.empty_like(start)
        until[order] = start[order] + np.where(apart <= 2 * period, apart, period)
        return until

    def devices(self, ordinal: Array, global_pid: Array) -> Array:
        """GPU numbers of CUDA ordinals."""
        device = _or_zero(ordinal)
        if self._gpu_of:
            codes, places = pd.factorize(_place(_process_of(global_pid), device))
            gpus = [self._gpu_of.get(place, place & 0xFFFF_FFFF) for place in places.tolist()]
            device = np.array(gpus, np.int64)[codes]
        return _as_int32(device)

    # -- what the export says about itself ----------------------------------------------------------------------

    def _read_meta(self) -> TraceMeta:
        export = dict(self._facts(_EXPORT_FACTS))
        environment = dict(self._facts(["TARGET_INFO_SYSTEM_ENV"]))
        lost = [] if any(map(self._present, GPU_TABLES)) else self._lost_work()
        return TraceMeta(
            tool="Nsight Systems",
            tool_version=_text(export.get("EXPORT_PRODUCT_VERSION")),
            schema=_text(export.get("EXPORT_SCHEMA_VERSION")),
            distributed=self._distributed(str(environment.get("DeviceEnvironment") or "")),
            gpus=self._gpus(),
            missing=self._missing(bool(lost)),
            notes=[*lost, *self._warnings()],
            window_ns=self._window(),
            thread_names=self._thread_names(),
            private=self._private(),
        )

    def _facts(self, tables: Sequence[str]) -> list[tuple[str, Any]]:
        """Names and values of tables that hold these."""
        facts = []
        for table in tables:
            for row in self._tables.records(table):
                facts.append((str(row.get("name")), row.get("value")))
        return facts

    def _missing(self, is_lost: bool) -> list[str]:
        """Tables that were not recorded."""
        facts = self._facts(["META_DATA_CAPTURE"])
        asked = {value for name, value in facts if name == "CAPTURE_EVENT_TYPE"}
        missing = []
        for table in EVENT_TABLES:
            sources = _CUDA_SOURCES if table in _OF_CUDA else _BACKING[table]
            is_recorded = any(source in self._tables.tables for source in sources)
            if table in _ASKED_FOR and _ASKED_FOR[table] in asked:
                is_recorded = True
            if table in GPU_TABLES and is_lost:
                is_recorded = False
            if not is_recorded:
                missing.append(table)
        if asked and self._ran_under_mpi() and not set(_MESSAGES).intersection(self._tables.tables):
            options = {value for name, value in facts if name == "MPI_TRACE_OPTIONS:COLLECT_MPI_TRACE"}
            if "true" not in options:
                missing.append("MPI")
        return missing

    def _ran_under_mpi(self) -> bool:
        """Whether a launcher of MPI started the program, by its environment."""
        return any(_OF_MPI.search(str(value)) for _, value in self._facts(["TARGET_INFO_SYSTEM_ENV"]))

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

    def _distributed(self, environment: str) -> dict[str, Any]:
        """Rank and world size out of the environment that nsys keeps whole; nothing else of it."""
        numbers = dict(re.findall(r"(?<!\w)(\w+)=[\"']?(\d{1,7})(?!\w)", environment))
        place: dict[str, Any] = {}
        for what, variables in _PLACES.items():
            for variable in variables:
                if variable in numbers:
                    place.setdefault(what, int(numbers[variable]))
        ranks = {row.get("rank") for row in self._tables.records(_MPI_RANKS)}
        if len(ranks) == 1:
            place.setdefault("rank", _number(ranks.pop()))
        return place if place.get("rank") is not None else {}

    def _gpus(self) -> list[Gpu]:
        gpus = {}
        for row in self._tables.records("TARGET_INFO_GPU"):
            number = _number(row.get("id", row.get("cuDevice", 0)))
            if number is not None:
                gpus[number] = Gpu(
                    device=number,
                    name=_text(row.get("name")),
                    compute_capability=capability(_number(row.get("computeMajor")), _number(row.get("computeMinor"))),
                )
        return [gpu for _, gpu in sorted(gpus.items())]

    def _private(self) -> dict[str, str]:
        """The export's names of people and machines; nsys keeps the whole environment of the profiled program."""
        pairs = []
        for title, value in self._facts(["TARGET_INFO_SYSTEM_ENV", "META_DATA_CAPTURE", *_EXPORT_FACTS]):
            name = title.rpartition(":")[2]
            text = str(value or "")
            if "ENVIRON" not in name.upper():
                pairs.append((name, text))
                continue
            for entry in re.split(r"[\0;\n]", text):
                variable, _, setting = entry.partition("=")
                pairs.append((variable.strip(), setting))
        return private_names(pairs)

    def _warnings(self) -> Iterator[str]:
        """What nsys itself said was lost, in words of ours: its own are anybody's text, with paths in it."""
        rows = self._tables.records("DIAGNOSTIC_EVENT")
        texts = [str(row.get("text")) for row in rows if row.get("severity") in _SERIOUS]
        for sign, loss in _LOST.items():
            if any(re.search(sign, text) for text in texts):
                yield f"Nsight Systems warned that {loss}."

    def _lost_work(self) -> list[str]:
        for source in self._present("calls"):
            if "nameId" in self._tables.columns(source):
                return lost_work(self.names(self._tables.integers(source, ["nameId"])["nameId"]))
        return []

    def _thread_names(self) -> dict[int, str]:
        threads = []
        ids = []
        for row in self._tables.records("ThreadNames"):
            thread, name = row.get("globalTid"), row.get("nameId")
            if isinstance(thread, int) and isinstance(name, int):
                threads.append(_thread_of(thread))
                ids.append(name)
        return dict(zip(threads, self._strings(np.array(ids, np.int64)), strict=True))


def _require_export(tables: Tables) -> None:
    """Refuse a database without an export's tables, or without the columns of every schema."""
    present = [source for source in _EVENT_SOURCES if source in tables.tables]
    if not present and not any(table in tables.tables for table in _OTHERS):
        raise TraceError(tables.path, "is a database, but not an Nsight Systems export", EXPORT_AGAIN)
    for source in present:
        needed = ["start", "globalTid" if source == _SAMPLES else "end"]
        for column in needed:
            if column not in tables.columns(source):
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


def _place(process: Any, number: Any) -> Any:
    """One number for a process and a number within it."""
    return (process << 32) + number


def _kept(rows: dict[str, Array], keep: Array) -> dict[str, Array]:
    """Some rows of columns."""
    return {column: values[keep] for column, values in rows.items()}


def _joined(parts: list[Any]) -> Any:
    """Parts of a column, one below the other."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], pd.Categorical):
        return pd.api.types.union_categoricals(parts)
    return np.concatenate(parts)


def _number(value: Any) -> int | None:
    """A number from 0 to 2**63 - 1, else None: a cell of SQLite may hold anything."""
    if isinstance(value, int) and 0 <= value < 1 << 63:
        return value
    return None


def _text(value: Any) -> str | None:
    """What is known about a capture as a text of sane length; None where it is absent or empty."""
    return str(value)[:_FACT] if value else None


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


def _as_int32(values: Array) -> Array:
    narrow = values.astype(np.int32)
    if (narrow != values).any():
        raise ValueError(f"{int(values[narrow != values][0]):,} stands where numbers of 32 bits do")
    return narrow


# -- how each column of the model is made -----------------------------------------------------------------------
#
# A plan is a function and the columns of the export that it is given after the source. A column that the export lacks
# is one of NULLs.

_Plan: TypeAlias = tuple[Any, *tuple[str, ...]]


def _same(_: NsysSource, values: Array, *_others: Array) -> Array:
    return values


def _copied(_: NsysSource, values: Array) -> Array:
    return _or_zero(values)


def _copied_32(_: NsysSource, values: Array) -> Array:
    return _as_int32(_or_zero(values))


def _process(_: NsysSource, ids: Array) -> Array:
    return np.asarray(_process_of(ids))


def _thread(_: NsysSource, ids: Array) -> Array:
    return np.asarray(_thread_of(ids))


def _end_thread(_: NsysSource, end: Array, start: Array) -> Array:
    return np.asarray(_thread_of(np.where((end == NULL) | (end == 0), start, end)))


def _range_kind(_: NsysSource, kind: Array) -> pd.Categorical:
    return categorical(np.isin(kind, _START_END) * 1, ["pushpop", "startend"])


def _no_sequence(_: NsysSource, start: Array) -> Array:
    return np.full(len(start), -1, np.int64)


def _always(label: str) -> Callable[[NsysSource, Array], pd.Categorical]:
    def make(_: NsysSource, start: Array) -> pd.Categorical:
        return categorical(np.zeros(len(start), np.int8), [label])

    return make


def _enum(labels: Sequence[str], other: str, absent: str) -> Callable[[NsysSource, Array], pd.Categorical]:
    """Numbers as their labels: `other` for one without, and `absent` for NULL."""
    texts = [*labels, other, absent]

    def make(_: NsysSource, values: Array) -> pd.Categorical:
        codes = np.where((values >= 0) & (values < len(labels)), values, len(labels))
        codes[values == NULL] = len(labels) + 1
        return categorical(codes, texts)

    return make


_MEMORY = _enum(_MEM_KINDS, "unknown", "unknown")
_NAME: _Plan = (NsysSource.names, "nameId")
_TIMES: dict[str, _Plan] = {"start_ns": (_copied, "start"), "end_ns": (_copied, "end")}
_GPU_ROW: dict[str, _Plan] = {
    **_TIMES,
    "device": (NsysSource.devices, "deviceId", "globalPid"),
    "stream": (_copied, "streamId"),
    "process": (_process, "globalPid"),
    "correlation": (_copied, "correlationId"),
}
_CPU_ROW: dict[str, _Plan] = {**_TIMES, "process": (_process, "globalTid"), "thread": (_thread, "globalTid")}
_MEMOP: dict[str, _Plan] = {**_GPU_ROW, "bytes": (_copied, "bytes"), "graph_node": (_copied, "graphNodeId")}
_NESTING = ("start", "end", "globalTid", "eventType")

_KERNEL: dict[str, _Plan] = {
    **_GPU_ROW,
    "name": (NsysSource.names, "demangledName"),
    "short_name": (NsysSource.names, "shortName"),
    **{f"{what}_{axis}": (_copied_32, f"{what}{axis.upper()}") for what in ("grid", "block") for axis in "xyz"},
    "registers": (_copied_32, "registersPerThread"),
    "static_shared_bytes": (_copied_32, "staticSharedMemory"),
    "dynamic_shared_bytes": (_copied_32, "dynamicSharedMemory"),
    "graph_node": (_copied, "graphNodeId"),
    # Collectives are described by NCCL's ranges, not by their kernels.
    "collective": (_always(""), "start"),
    "sequence": (_no_sequence, "start"),
}
_COPY: dict[str, _Plan] = {
    **_MEMOP,
    "kind": (_enum(_COPY_KINDS, "other", "other"), "copyKind"),
    "src_kind": (_MEMORY, "srcKind"),
    "dst_kind": (_MEMORY, "dstKind"),
}
_SET: dict[str, _Plan] = {
    **_MEMOP,
    "kind": (_always("memset"), "start"),
    "src_kind": (_always(""), "start"),
    "dst_kind": (_enum(_MEM_KINDS, "unknown", ""), "memKind"),
}
_CALL: dict[str, _Plan] = {
    **_CPU_ROW,
    "correlation": (_copied, "correlationId"),
    "name": (NsysSource.call_names, "nameId"),
    "kernel": (_always(""), "start"),
}
_RANGE: dict[str, _Plan] = {
    **_CPU_ROW,
    "end_thread": (_end_thread, "endGlobalTid", "globalTid"),
    "name": (NsysSource.range_names, "textId"),
    "domain": (NsysSource.domains, "domainId", "globalTid"),
    "kind": (_range_kind, "eventType"),
    "open": (_same, "open", "end"),
    "level": (_same, "level", *_NESTING),
    "parent": (_same, "parent", *_NESTING),
}
_SAMPLE: dict[str, _Plan] = {
    **_CPU_ROW,
    "end_ns": (NsysSource.sampled_until, "start", "globalTid"),
    "name": (NsysSource.sample_names, "id"),
}
_MESSAGE: dict[str, _Plan] = {**_CPU_ROW, "name": (NsysSource.names, "textId")}
#: By table of the model, or of the export where several fill one.
_PLANS: dict[str, dict[str, _Plan]] = {
    "kernels": _KERNEL,
    _MEMCPY: _COPY,
    _MEMSET: _SET,
    "graphs": {**_GPU_ROW, "graph_id": (_copied, "graphId")},
    "calls": _CALL,
    "syncs": {**_GPU_ROW, "kind": (_enum(_SYNC_KINDS, "other", "other"), "syncType")},
    "ranges": _RANGE,
    "os_calls": {**_CPU_ROW, "name": _NAME},
    **dict.fromkeys(_MESSAGES, _MESSAGE),
    "overhead": {**_CPU_ROW, "name": _NAME},
    "samples": _SAMPLE,
}


# -- opening ----------------------------------------------------------------------------------------------------


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
    def open_export() -> NsysSource:
        return NsysSource(Sqlite(path, _READ, export))

    return store.cached(path, open_export, "nsys" if cache else None)


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
