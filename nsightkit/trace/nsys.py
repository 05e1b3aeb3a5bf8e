"""Reader for Nsight Systems exports: SQLite of every schema since 2.9 (2022.2), and ``parquetdir``.

nsys writes tables lazily, renames them between versions and adds columns; everything optional is probed,
nothing assumed. ``nsys.toml`` says which table and column is which of the trace model's, and
:mod:`nsightkit.trace.nsys_tables` reads them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.errors import TraceError
from nsightkit.text import Json, read_toml
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
    is_large,
    lost_work,
    nesting,
    private_names,
)
from nsightkit.trace.nsys_tables import EXPORT_AGAIN, NULL, Columns, ParquetDir, RowFilter, Sqlite, Tables

if TYPE_CHECKING:
    from nsightkit.trace.programs import Export

Array = npt.NDArray[Any]

#: ``nsys.toml``: which of the exporter's tables and columns are which of the trace model's.
_SCHEMA = read_toml(__file__, "nsys")
_SOURCES = _SCHEMA["sources"]
#: Words for the numbers of the exporter's columns of enumerations.
_LABELS = _SCHEMA["labels"]
_LABELS |= dict.fromkeys(("srcKind", "dstKind", "memKind"), _LABELS["memory"])
#: For each of the exporter's tables, its column that fills each of the trace model's.
_COLUMNS = {source: {**_SCHEMA["columns"], **entry["columns"]} for source, entry in _SOURCES.items()}

#: All tables that are read.
_TABLES_TO_READ = {*_SOURCES, *_SCHEMA["identify"], *_SCHEMA["details"]}
_NVTX = "NVTX_EVENTS"
_SAMPLES = "COMPOSITE_EVENTS"
_WAITS = "MPI_START_WAIT_EVENTS"
#: Variables that only launchers of MPI set: MPICH and Cray, Open MPI, PMIx.
_MPI_VARIABLES = {"PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK"}
#: Columns of these tables that tell which rows to keep.
_NEEDED_TO_FILTER = {_SAMPLES: ("globalTid",), _WAITS: ("start", "end", "globalTid", "textId")}
_CALL_CHAINS = "SAMPLING_CALLCHAINS"
_MPI_RANKS = "MPI_RANKS"
#: Tables of the trace model that tracing CUDA fills. nsys writes no table without events, so one of them shows that
#: CUDA was traced and the others are empty; if all are absent, it may not have been traced.
_CUDA_TABLES = (*GPU_TABLES, "calls", "syncs")
#: Tables of names and values that describe the program and the capture.
_FACT_TABLES = ("TARGET_INFO_SYSTEM_ENV", "META_DATA_CAPTURE", "META_DATA_EXPORT", "EXPORT_META_DATA")

#: NVTX_EVENTS.eventType of start/end ranges, and of the event that names a domain.
_START_END = (60, 71)
_DOMAIN = 75

#: The longest sampling period: Nsight Systems samples a running thread at 100 Hz or more.
_LONGEST_PERIOD_NS = 10_000_000
#: Names in place of functions that nsys did not find; and modules whose callers are more informative.
_NO_FUNCTION = re.compile(r"0x|#|\[|(_start|_init)?$")
_SYSTEM = re.compile(r"(.*/)?((libc|libpthread|ld|ld-linux[\w-]*)[-.]|\[)")

#: `cudaLaunchKernel_v7000` is cudaLaunchKernel as introduced by CUDA 7.0; `cuGetProcAddress_v2` is another function.
_CALL_VERSION = re.compile(r"_v\d{4,}$")
#: A rank or world size; anything longer is no such number.
_RANK_NUMBER = re.compile(r"\d{1,7}")
#: Letters that are kept of a version or a GPU's name.
_MOST_LETTERS = 200


class NsysSource:
    """Reads an export's tables as the trace model's, column by column.

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
        _require_nsys_export(tables)
        self._gpu_by_ordinal = _gpu_by_ordinal(tables)
        self._first_ns_by_source: dict[str, int | None] = {}  # None: the table has no rows
        self.meta = self._read_meta()

    # -- the Source protocol ------------------------------------------------------------------------------------

    def read(self, table: str, columns: Sequence[str]) -> pd.DataFrame:
        """See :class:`~nsightkit.trace.model.Source`."""
        parts = [self._read_source(table, source, columns) for source in self._sources_of(table)]
        if not parts:  # not recorded: no rows
            return complete(table, None, columns)
        return pd.DataFrame({column: _concatenated([part[column] for part in parts]) for column in columns}, copy=False)

    def first_ns(self) -> int:
        """See :class:`~nsightkit.trace.model.Source`."""
        for table in EVENT_TABLES:
            for source in self._sources_of(table):
                if source not in self._first_ns_by_source:
                    self._first_ns_by_source[source] = self._tables.least_start(source, self._row_filter(source))
        return min((start_ns for start_ns in self._first_ns_by_source.values() if start_ns is not None), default=0)

    # -- rows and columns ---------------------------------------------------------------------------------------

    def _sources_of(self, table: str) -> list[str]:
        """List the exporter's tables that fill one of the trace model's and are in this export."""
        tables = self._tables.tables
        return [source for source, entry in _SOURCES.items() if entry["table"] == table and source in tables]

    def _row_filter(self, source: str) -> RowFilter | None:
        """Return which rows of the exporter's table are events of the trace model.

        None for all: of most tables, and where the export lacks the column by which rows are chosen.
        """
        rows: RowFilter | None = _SOURCES[source].get("rows")
        if rows and rows["column"] in self._tables.tables[source]:
            return rows
        return None

    def _read_source(self, table: str, source: str, columns: Sequence[str]) -> pd.DataFrame:
        """Read the trace model's columns of one of the exporter's tables; absent ones get their neutral value."""
        exporter_columns = _COLUMNS[source]  # by column of the trace model
        constants = _SOURCES[source].get("constants", {})  # one text for all rows, by column of the trace model
        wanted: set[str] = set()
        for column in columns:
            if column in exporter_columns:
                wanted.update((exporter_columns[column], *_NEEDED_TO_CONVERT.get(column, ())))
        raw = self._read_integers(source, wanted)
        values: Json = {}
        row_count = len(next(iter(raw.values())))
        for column in columns:
            if column in constants:
                values[column] = categorical(np.zeros(row_count, np.int8), [constants[column]])
            elif exporter_columns.get(column) in raw:
                values[column] = self._model_column(table, column, exporter_columns[column], raw)
        return complete(table, pd.DataFrame(values, pd.RangeIndex(row_count), copy=False), columns)

    def _read_integers(self, source: str, columns: Collection[str]) -> Columns:
        """Read the exporter's columns that are there, for the rows that are events of the trace model.

        The result has one column at least, which tells the number of rows. Where ``end`` is read, it also has ``open``:
        which events had not ended yet. These end with the latest event of their table.
        """
        wanted = set(columns)
        # Ends of open events need starts. And if the table has none of the columns, its starts tell the number of rows.
        if "end" in wanted or wanted.isdisjoint(self._tables.tables[source]):
            wanted.add("start")
        wanted.update(_NEEDED_TO_FILTER.get(source, ()))
        present = sorted(wanted.intersection(self._tables.tables[source]))
        raw = self._tables.integers(source, present, self._row_filter(source))
        if "start" in raw and len(raw["start"]) and source != _SAMPLES:
            self._first_ns_by_source[source] = int(raw["start"].min())  # saves `first_ns` a pass over the table
        if "end" in raw:
            raw["open"] = raw["end"] == NULL
            if raw["open"].any():
                raw["end"] = np.where(raw["open"], max(raw["start"].max(), raw["end"].max()), raw["end"])
        keep = np.ones(len(next(iter(raw.values()))), bool)
        if source == _SAMPLES:  # nsys samples the whole machine: keep the processes that call CUDA
            callers = [self._read_integers(calls, ["globalTid"])["globalTid"] for calls in self._sources_of("calls")]
            # The empty array stands for no callers: nothing cannot be concatenated.
            processes = np.unique(_process_of(np.concatenate([np.empty(0, np.int64), *callers])))
            keep = np.isin(_process_of(raw["globalTid"]), processes)
        if source == _WAITS:  # one call of MPI_Waitall has a row for each of its requests: keep the first
            keep = ~pd.DataFrame(raw)[list(_NEEDED_TO_FILTER[_WAITS])].duplicated().to_numpy()
        if keep.all():
            return raw
        return {column: values[keep] for column, values in raw.items()}

    def _model_column(self, table: str, column: str, exporter_column: str, raw: Columns) -> Any:
        """Convert one of the exporter's columns, with those of `raw` that it needs, to a column of the trace model.

        Besides the exporter's columns `raw` holds ``open``, which :meth:`_read_integers` adds.
        """
        values = raw[exporter_column]  # integers: times, sizes, ids, and NULL
        match table, column:
            case "ranges", "name":
                return self._nvtx_names(values, self._row_filter(_NVTX))
            case "ranges", "domain":
                return self._range_domains(_or_zero(values), raw["globalTid"])
            case "ranges", "level" | "parent":
                if "parent" not in raw:  # levels and parents come together, so both are kept for the other column
                    # Start/end ranges may overlap others on their thread in part: they get no parents and no children.
                    alone = np.isin(raw["eventType"], _START_END)
                    raw["level"], raw["parent"] = nesting(raw["globalTid"], raw["start"], raw["end"], alone=alone)
                return raw[column]
            case "ranges", "open":
                return raw["open"]
            case "ranges", "end_thread":  # without a thread of its own, a range ended where it began
                return _thread_of(np.where((values == NULL) | (values == 0), raw["globalTid"], values))
            case "calls", "name":
                return self._texts_of_ids(values, _CALL_VERSION)
            case "samples", "end_ns":  # made of the starts: nsys records no end
                return _sample_ends(values, raw["globalTid"])
            case "samples", "name":
                return self._sample_names(values)
            case _, "process":
                return _process_of(values)
            case _, "thread":
                return _thread_of(values)
            case _, "device":
                return self._gpu_numbers(_or_zero(values), raw.get("globalPid"))
        if exporter_column in _LABELS:
            return _as_labels(values, _LABELS[exporter_column])
        if TABLES[table][column] == "category":  # all other texts are ids of strings
            return self._texts_of_ids(values)
        return _or_zero(values)

    # -- names --------------------------------------------------------------------------------------------------

    def _look_up_strings(self, ids: Array) -> list[str]:
        """Look up the text of each string id; "" for NULL, and ``#7`` for an id 7 that the export does not hold."""
        text_by_id = {NULL: ""}
        if "StringIds" in self._tables.tables:
            numbers, texts = self._tables.texts("StringIds", "id", "value", set(ids.tolist()))
            text_by_id.update(zip(numbers, texts, strict=True))
        return [text_by_id.get(number, f"#{number}") for number in ids.tolist()]

    def _texts_of_ids(self, ids: Array, ending: re.Pattern[str] | None = None) -> pd.Categorical:
        """Turn string ids into a categorical of their texts, without `ending`; equal texts become one category."""
        codes, distinct = pd.factorize(ids)
        texts = self._look_up_strings(distinct)
        if ending:
            texts = [ending.sub("", text) for text in texts]
        return categorical(codes, texts)

    def _nvtx_names(self, ids: Array, rows: RowFilter | None) -> pd.Categorical:
        """Name NVTX events: by a string id (`ids`, of the column textId), else by the column text, else "".

        A string that the program registered with NVTX has an id. `rows` filters the rows of NVTX_EVENTS as it did for
        `ids`, so that both columns have the same rows. Without a filter the column text is not read.
        """
        codes, distinct = pd.factorize(ids)
        texts = self._look_up_strings(distinct)
        has_no_id = ids == NULL
        if has_no_id.any() and rows:
            row_texts = [""] * len(ids)
            if "text" in self._tables.tables[_NVTX]:
                _, row_texts = self._tables.texts(_NVTX, rows["column"], "text", rows["numbers"])
            # The texts of rows follow those of ids in one list, so their codes go on from there.
            row_codes, distinct_row_texts = pd.factorize(np.array(row_texts, object))
            codes = np.where(has_no_id, row_codes + len(texts), codes)
            texts += distinct_row_texts.tolist()
        return categorical(codes, texts)

    def _range_domains(self, domain_ids: Array, global_tid: Array) -> pd.Categorical:
        """Name the domain of each range, "" for the default one, whose id is 0. Each process has its own ids."""
        name_by_key = self._domain_names() if domain_ids.any() else {}
        codes, distinct_keys = pd.factorize(_key_in_process(_process_of(global_tid), domain_ids))
        texts = []
        for key in distinct_keys.tolist():
            domain = key & 0xFFFF_FFFF  # the key's lower half, without the process
            texts.append(name_by_key.get(key, f"domain {domain}") if domain else "")
        return categorical(codes, texts)

    def _domain_names(self) -> dict[int, str]:
        """Read the names of domains from the events that name them, by :func:`_key_in_process` of the domain's id."""
        rows = {"column": "eventType", "numbers": (_DOMAIN,)}
        columns = {"domainId", "globalTid", "textId"}.intersection(self._tables.tables[_NVTX])
        events = self._tables.integers(_NVTX, sorted(columns), rows)
        text_ids = events.get("textId", np.full(len(events["domainId"]), NULL))
        names = self._nvtx_names(text_ids, rows)
        keys = _key_in_process(_process_of(events["globalTid"]), events["domainId"])
        return dict(zip(keys.tolist(), names, strict=True))

    def _sample_names(self, ids: Array) -> pd.Categorical:
        """Name each sample by its innermost informative function, else by the module of its innermost frame.

        `ids` are the samples' ids, which each frame of the call chains refers to; a sample without frames is called "".
        """
        columns = ["id", "symbol", "module", "stackDepth"]
        if not set(columns).issubset(self._tables.tables.get(_CALL_CHAINS, ())):
            return categorical(np.zeros(len(ids), np.int8), [""])
        frames = pd.DataFrame(self._tables.integers(_CALL_CHAINS, columns))
        # Names are matched once each: millions of frames have a few thousand.
        functions = self._texts_of_ids(frames["symbol"].to_numpy())
        modules = self._texts_of_ids(frames["module"].to_numpy())
        is_unknown = functions.categories.str.match(_NO_FUNCTION)[functions.codes]
        is_system = modules.categories.str.match(_SYSTEM)[modules.codes]
        files = [module.rpartition("/")[2] for module in modules.categories]
        # `name` is a position in `texts`: a frame's function, or the file of its module if the function is unknown.
        texts = [*functions.categories, *files, ""]
        frames["name"] = np.where(is_unknown, len(functions.categories) + modules.codes.astype(int), functions.codes)
        # Of a sample's frames the least vague wins. 0: a function of the program, 1: one of the system, 2: a module.
        frames["vagueness"] = np.where(is_unknown, 2, is_system)
        best = frames.sort_values(["id", "vagueness", "stackDepth"]).drop_duplicates("id").set_index("id")["name"]
        return categorical(best.reindex(ids, fill_value=len(texts) - 1).to_numpy(), texts)  # the last is ""

    def _gpu_numbers(self, ordinal: Array, global_pid: Array | None) -> Array:
        """Turn each process's CUDA ordinals into the machine's numbers of GPUs, where the export tells them."""
        if not self._gpu_by_ordinal or global_pid is None:
            return ordinal
        codes, distinct_keys = pd.factorize(_key_in_process(_process_of(global_pid), ordinal))
        # Where nothing else is known, the number is the ordinal, which is the key's lower half.
        gpus = [self._gpu_by_ordinal.get(key, key & 0xFFFF_FFFF) for key in distinct_keys.tolist()]
        return np.array(gpus, np.int64)[codes]

    # -- what the export says about itself ----------------------------------------------------------------------

    def _read_meta(self) -> TraceMeta:
        """Describe the capture: the tool, the machine, the job, and what was not recorded."""
        facts = self._capture_facts()
        fact_by_name = dict(facts)  # for names that come once
        lost_work_notes = [] if any(map(self._sources_of, GPU_TABLES)) else self._lost_work()
        return TraceMeta(
            tool="Nsight Systems",
            tool_version=_short_text(fact_by_name.get("EXPORT_PRODUCT_VERSION")),
            schema=_short_text(fact_by_name.get("EXPORT_SCHEMA_VERSION")),
            distributed=self._rank_and_size(fact_by_name),
            gpus=self._gpus(),
            missing=self._missing_tables(facts, has_lost_work=bool(lost_work_notes)),
            notes=[*lost_work_notes, *self._loss_warnings()],
            window_ns=self._capture_window(),
            thread_names=self._thread_names(),
            private=private_names(facts),
        )

    def _capture_facts(self) -> list[tuple[str, str]]:
        """List what the export says about the program and the capture, as names and values.

        nsys keeps the program's whole environment: each variable is listed as a fact of its own, and callers pick by
        name those that they need. A name may come several times, with different values.
        """
        facts = []
        for table in _FACT_TABLES:
            for row in self._tables.records(table):
                name = str(row.get("name")).rpartition(":")[2]  # "PROCESS_0:USER_NAME": USER_NAME
                text = str(row.get("value") or "")
                if "ENVIRON" not in name.upper():
                    facts.append((name, text))
                    continue
                # One variable or several, with zero bytes, semicolons or line breaks between them.
                for entry in re.split(r"[\0;\n]", text):
                    variable, _, setting = entry.partition("=")
                    facts.append((variable.strip(), setting.strip("\"'")))
        return facts

    def _missing_tables(self, facts: list[tuple[str, str]], *, has_lost_work: bool) -> list[str]:
        """List the tables that were not recorded; "MPI" if the program ran under MPI, and its calls were not traced.

        `has_lost_work` says that calls gave a GPU work of which nothing was recorded.
        """
        # The words of the capture's options: `asked` in nsys.toml has those for a table.
        requested_events = {value for name, value in facts if name == "CAPTURE_EVENT_TYPE"}
        is_cuda_traced = any(map(self._sources_of, _CUDA_TABLES))
        missing = []
        for table in EVENT_TABLES:
            # nsys writes a table only if it saw such events. One CUDA table shows that CUDA was traced, and that the
            # others are empty; without any it may have been asked for and failed, so a request is no evidence.
            if table in _CUDA_TABLES:
                is_recorded = is_cuda_traced and not (table in GPU_TABLES and has_lost_work)
            else:
                is_recorded = bool(self._sources_of(table)) or _SCHEMA["asked"].get(table) in requested_events
            if not is_recorded:
                missing.append(table)
        is_mpi_job = not _MPI_VARIABLES.isdisjoint(dict(facts))
        has_mpi_calls = any(table.startswith("MPI_") and table != _MPI_RANKS for table in self._tables.tables)
        # Without calls of MPI: either the program made none, or they were not traced. Exports that do not list the
        # requested events leave that open.
        may_be_traced = not requested_events or ("COLLECT_MPI_TRACE", "true") in facts
        if is_mpi_job and not has_mpi_calls and not may_be_traced:
            missing.append("MPI")
        return missing

    def _capture_window(self) -> tuple[int, int] | None:
        """Return start and end of the capture, ns; None where the export records none, or several (one per machine)."""
        windows = set()
        for row in self._tables.records("ANALYSIS_DETAILS"):
            windows.add((_unsigned(row.get("startTime")), _unsigned(row.get("stopTime"))))
        if len(windows) != 1:
            return None
        start_ns, stop_ns = windows.pop()
        if start_ns is None or stop_ns is None or stop_ns < start_ns:
            return None
        # Both count from the start of the session. Events count from `start_ns`, at which collection began.
        return 0, stop_ns - start_ns

    def _rank_and_size(self, fact_by_name: dict[str, str]) -> Json:
        """Take rank and world size, and nothing else, from the program's environment, the rank else from MPI_RANKS.

        Without a rank the world size is left out, too: together they are the program's place in a job of several ranks.
        """
        job: Json = {}
        for key, variables in _SCHEMA["places"].items():  # variables in order of preference
            texts = [fact_by_name.get(variable, "") for variable in variables]
            numbers = list(filter(_RANK_NUMBER.fullmatch, texts))
            if numbers:
                job[key] = int(numbers[0])
        ranks = {row.get("rank") for row in self._tables.records(_MPI_RANKS)}
        if len(ranks) == 1:  # else the report is of several ranks, or not of MPI
            job.setdefault("rank", _unsigned(ranks.pop()))
        if job.get("rank") is not None:
            return job
        return {}

    def _gpus(self) -> list[Gpu]:
        """List the machine's GPUs, by number."""
        gpus = {}
        for row in self._tables.records("TARGET_INFO_GPU"):
            # Without a column `id` the CUDA ordinal is the number.
            number = _unsigned(row.get("id", row.get("cuDevice", 0)))
            if number is not None:
                version = capability(_unsigned(row.get("computeMajor")), _unsigned(row.get("computeMinor")))
                gpus[number] = Gpu(number, _short_text(row.get("name")), version)
        return [gpu for _, gpu in sorted(gpus.items())]

    def _loss_warnings(self) -> Iterator[str]:
        """Yield what nsys warned that it lost, in our words: the text in the file may hold paths or anything else."""
        rows = self._tables.records("DIAGNOSTIC_EVENT")
        texts = [str(row.get("text")) for row in rows if row.get("severity") in (2, 3)]  # warnings and errors
        for warning in _SCHEMA["warnings"]:
            if any(re.search(warning["sign"], text) for text in texts):
                yield f"Nsight Systems warned that {warning['loss']}."

    def _lost_work(self) -> list[str]:
        """List one note if calls gave a GPU work; only called where the export holds no work of a GPU."""
        if not self._sources_of("calls"):
            return []
        return lost_work(self.read("calls", ["name"])["name"])

    def _thread_names(self) -> dict[int, str]:
        """Read the names of threads, by thread number as in our tables: nsys's, without the bits of the host."""
        string_ids = {}
        for row in self._tables.records("ThreadNames"):
            thread = row.get("globalTid")
            string_id = row.get("nameId")
            if isinstance(thread, int) and isinstance(string_id, int):
                string_ids[_thread_of(thread)] = string_id
        names = self._look_up_strings(np.array(list(string_ids.values()), np.int64))
        return dict(zip(string_ids, names, strict=True))


#: By column of the trace model, the exporter's columns that it is made of besides its own.
_NEEDED_TO_CONVERT = {
    "device": ("globalPid",),
    "end_thread": ("globalTid",),
    "domain": ("globalTid",),
    "level": ("globalTid", "eventType"),
    "parent": ("globalTid", "eventType"),
}


def _require_nsys_export(tables: Tables) -> None:
    """Refuse a database that has no table of an export, or a table without the columns that every schema has."""
    sources = [source for source in _SOURCES if source in tables.tables]
    if not sources and not any(table in tables.tables for table in _SCHEMA["identify"]):
        raise TraceError(tables.path, "is a database, but not an Nsight Systems export", EXPORT_AGAIN)
    for source in sources:
        # Samples have no end, but need a thread: only those of processes that call CUDA are kept.
        required = ["start", "globalTid" if source == _SAMPLES else "end"]
        for column in required:
            if column not in tables.tables[source]:
                raise TraceError(tables.path, f"has a table {source} without the column {column}", EXPORT_AGAIN)


def _gpu_by_ordinal(tables: Tables) -> dict[int, int]:
    """Map CUDA ordinals to the machine's numbers of GPUs, where the two differ (CUDA_VISIBLE_DEVICES).

    The keys are those of :func:`_key_in_process`: each process has its own ordinals. Exports since 2024 record them.
    """
    gpus = {}
    for row in tables.records("TARGET_INFO_CUDA_DEVICE"):
        process = _unsigned(row.get("pid"))
        ordinal = _unsigned(row.get("cudaId"))
        gpu = _unsigned(row.get("gpuId"))
        if process is not None and ordinal is not None and gpu is not None and ordinal != gpu:
            gpus[_key_in_process(process, ordinal)] = gpu
    return gpus


def _sample_ends(start: Array, thread: Array) -> Array:
    """Return each sample's end: its thread's next sample, or one period on if that is over two periods away.

    The period is the median time between two samples of a thread, over all threads; times above `_LONGEST_PERIOD_NS`,
    in which a thread did not run, do not count. nsys counts cycles or instructions between samples, so the time varies.
    """
    samples = pd.DataFrame({"start": start, "thread": thread}).sort_values("start")
    until_next_ns = samples.groupby("thread")["start"].diff(-1).abs()  # missing for a thread's last sample
    period_ns = until_next_ns[until_next_ns <= _LONGEST_PERIOD_NS].median()
    duration_ns = until_next_ns.where(until_next_ns <= 2 * period_ns, period_ns).fillna(0)  # 0 without any period
    return np.asarray(start + duration_ns.sort_index().to_numpy(np.int64))  # back to the order of `start`


def _as_labels(numbers: Array, labels: dict[str, str]) -> pd.Categorical:
    """Turn the numbers of an enumeration into a categorical of their labels."""
    codes, distinct = pd.factorize(numbers)
    return categorical(codes, [labels.get(str(number), labels["other"]) for number in distinct.tolist()])


def _key_in_process(process: Any, number: Any) -> Any:
    """Combine a process and a number within it, such as a domain's, in one key: the number is its lower 32 bits."""
    return (process << 32) + number


def _concatenated(parts: list[Any]) -> Any:
    """Join the parts of a column, one below the other."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0].dtype, pd.CategoricalDtype):
        return pd.api.types.union_categoricals(parts)
    return np.concatenate(parts)


def _unsigned(value: Any) -> int | None:
    """Return an integer from 0 to 2**63 - 1, None for anything else: a cell of SQLite may hold anything."""
    if isinstance(value, int) and 0 <= value < 1 << 63:
        return value
    return None


def _short_text(value: Any) -> str | None:
    """Return a fact about the capture as a text of limited length; None where it is absent or empty."""
    if value:
        return str(value)[:_MOST_LETTERS]
    return None


def _process_of(global_id: Any) -> Any:
    """Take the process id from nsys's global process or thread id: bits 24 to 47, with the host above them."""
    return (global_id >> 24) & 0xFF_FFFF


def _thread_of(global_id: Any) -> Any:
    """Take the trace model's thread from nsys's global thread id: process and thread, without the bits of the host."""
    return global_id & 0xFFFF_FFFF_FFFF


def _or_zero(values: Array) -> Array:
    """Return the values with 0 in place of NULL."""
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
        The export, if it was made of a report. It is kept while its file is read: a temporary one goes with it.

    Raises
    ------
    TraceError
        The file is truncated, damaged, or the database of another program.
    """

    def open_export() -> NsysSource:
        return NsysSource(Sqlite(path, _TABLES_TO_READ, export))

    if not cache or not is_large(path):
        return open_export()
    from nsightkit.trace import store

    return store.cached(path, open_export, "nsys")


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
    return NsysSource(ParquetDir(path, _TABLES_TO_READ))
