"""Copies of Nsight Systems exports without secrets: SQLite databases and folders of Parquet files.

nsys writes the whole environment of the profiled program into three tables, host and user names and paths into more,
and what the program printed as well. A copy is a new export of the tables and columns that are listed here: what the
readers of this package and the reports of ``nsys stats`` use. Numbers are copied, texts are scrubbed, and of the
strings only those are copied that a listed column refers to. Whatever else is there, or a newer version adds, is left
out, and the ledger names it.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from nsightkit.errors import reading
from nsightkit.trace import nsys
from nsightkit.trace.nsys import quoted, uri
from nsightkit.trace.share.secrets import Ledger, Scrubber

__all__ = ["copy_parquetdir", "copy_sqlite", "learn_export"]

#: Tables that are copied.
_TABLES = re.compile(
    r"StringIds|ThreadNames|PROCESSES|ANALYSIS_DETAILS|NVTX_EVENTS|OSRT_API|PROFILER_OVERHEAD|SCHED_EVENTS|GPU_METRICS"
    r"|CUPTI_ACTIVITY_KIND_[A-Z_]+|CUDA_GRAPH_EVENTS|CUDA_GRAPH_NODE_EVENTS|CUDA_GPU_MEMORY_\w+|CUDA_UM_[CG]PU_PAGE_FAULT_EVENTS"
    r"|CUDNN_EVENTS|CUBLAS_EVENTS|MPI_[A-Z0-9_]+|OPENMP_EVENT_KIND_[A-Z_]+|ENUM_[A-Z0-9_]+|META_DATA_CAPTURE"
    r"|META_DATA_EXPORT|EXPORT_META_DATA|TARGET_INFO_(?:SYSTEM_ENV|SESSION_START_TIME|GPU|GPU_METRICS|NIC_INFO"
    r"|CUDA_DEVICE|CUDA_CONTEXT_INFO|CUDA_NULL_STREAM|CUDA_STREAM|NVTX_CUDA_DEVICE|NVTX_CUDA_CONTEXT|NVTX_CUDA_STREAM)"
)
#: Columns whose numbers are copied, in any of these tables; a text in one of them is not.
_NUMBERS = frozenset(
    """
    id start end duration startTime stopTime timestamp rawTimestamp globalVid globalPid globalTid endGlobalTid pid vmId
    hwId processId deviceId contextId parentContextId isGreenContext greenContextId streamId nullStreamId correlationId
    priority flag cpu isSchedIn threadState threadBlock eventClass eventType rangeId category color domainId nameEnum
    uint64Value int64Value doubleValue uint32Value int32Value floatValue returnValue nestingLevel callchainId
    overheadType launchType cacheConfig registersPerThread gridX gridY gridZ blockX blockY blockZ staticSharedMemory
    dynamicSharedMemory localMemoryPerThread localMemoryTotal gridId sharedMemoryExecuted graphNodeId graphId
    graphExecId originalGraphId originalGraphNodeId sharedMemoryLimitConfig qmdBulkReleaseDone qmdPreexitDone
    qmdLastCtaDone clusterX clusterY clusterZ clusterSchedulingPolicy maxPotentialClusterSize maxActiveClusters
    sharedMemoryRequestedPercentage bytes copyKind deprecatedSrcId srcKind dstKind srcDeviceId srcContextId dstDeviceId
    dstContextId migrationCause virtualAddress copyCount value memKind syncType deprecatedSyncType eventId eventSyncId
    address pc memoryOperationType numberOfPageFaults faultAccessType originalFaultPc CpuInstruction
    localMemoryPoolAddress localMemoryPoolReleaseThreshold localMemoryPoolSize localMemoryPoolUtilizedSize
    importedMemoryPoolAddress importedMemoryPoolProcessId unresolvedFaultPc eventKind DeviceType lineNo cuDeviceId
    cuContextId cuStreamId numGangs numWorkers vectorLength kind waitId parallelId parentTaskId taskId newTaskId
    priorTaskId priorTaskStatus nextTaskId threadId threadType count commHandle rank tag remoteRank rootRank size
    recvSize isDiscrete l2CacheSize totalMemory memoryBandwidth clockRate smCount pwGpuId cuDevice revision nodeMask
    constantMemory maxIPC maxRegistersPerBlock maxShmemPerBlock maxShmemPerBlockOptin maxShmemPerSm maxRegistersPerSm
    threadsPerWarp asyncEngines maxWarpsPerSm maxBlocksPerSm maxThreadsPerBlock maxBlockDimX maxBlockDimY maxBlockDimZ
    maxGridDimX maxGridDimY maxGridDimZ computeMajor computeMinor smMajor smMinor gpuId cudaId nicId vendorId linkLayer
    utcEpochNs systemClockNs typeId metricId sourceId
    """.split()  # noqa: SIM905 - two hundred lines otherwise
)
#: Columns with the number of a text in StringIds.
_REFERENCES = frozenset(["nameId", "endNameId", "demangledName", "shortName", "mangledName", "textId", "kernelName"])
#: Columns whose texts are copied once they are scrubbed.
_TEXTS = frozenset(
    [
        *("StringIds.value", "NVTX_EVENTS.text", "PROCESSES.name", "META_DATA_CAPTURE.name", "META_DATA_CAPTURE.value"),
        *("META_DATA_EXPORT.name", "META_DATA_EXPORT.value", "EXPORT_META_DATA.name", "EXPORT_META_DATA.value"),
        *("TARGET_INFO_SYSTEM_ENV.name", "TARGET_INFO_SYSTEM_ENV.value", "TARGET_INFO_GPU.name"),
        *("TARGET_INFO_GPU.busLocation", "TARGET_INFO_GPU.chipName", "TARGET_INFO_GPU_METRICS.metricName"),
        *("TARGET_INFO_NIC_INFO.name", "TARGET_INFO_NVTX_CUDA_DEVICE.name", "TARGET_INFO_NVTX_CUDA_CONTEXT.name"),
        *("TARGET_INFO_NVTX_CUDA_STREAM.name", "TARGET_INFO_SESSION_START_TIME.utcTime"),
    ]
)
#: Tables of names and values, and the names whose values are copied.
_PROPERTIES = ("TARGET_INFO_SYSTEM_ENV", "META_DATA_CAPTURE", "META_DATA_EXPORT", "EXPORT_META_DATA")
_KNOWN_NAMES = re.compile(
    r"(?:[A-Z0-9_]+:)*(?:CAPTURE_EVENT_TYPE|RATE_HZ|DURATION_THRESHOLD_NS|RUN_DURATION_MS|START_DELAY_MS|SAMPLING_PERIOD|CUDA_TRACE_SCOPE"
    r"|MODE|COLLECT_\w+|CUDA_FLUSH_\w+|EXPORT_PRODUCT_(?:NAME|VERSION|DATE)"
    r"|EXPORT_SCHEMA_VERSION\w*|EXPORT_PLATFORM|EXPORT_ARCH|EXPORT_(?:PARAM_)?LAZY|EXPORT_PARAM_TIME_\w+|EXPORT_TIME_UTC"
    r"|DERIVED_(?:FROM|WINDOW_NS|BY)|Cpu(?:Cores|SpeedMhz|Architecture|Description)|NvDriverVersion|CudaDriverVersion"
    r"|HardwarePlatform|SoftwarePlatform|OsDescription|SoftwareReleaseVersion|KernelVersion|OfedDriverVersion|ExportLevel"
    r"|(?:ALLOW|BACKTRACES|BANDWIDTH|DISABLE|EVENT|FORCE|HAS|HOTKEY|INCLUDE|KHRDEBUG|LAUNCH|POWER|RESOLVE|SAMPLES?|SHOW"
    r"|THREAD|TRACE|USE|CUDA_SKIP)_[A-Z_]+|(?:START|STOP)_TRIGGER|HOW_TO_ATTACH|DEVICE_TYPE|COLLECTION_MODE|RESUME"
    r"|(?:Has|Is|Supports)[A-Z]\w+)"
)


def _is_text(table: str, column: str) -> bool:
    return f"{table}.{column}" in _TEXTS or (table.startswith("ENUM_") and column in ("name", "label"))


def _is_known(table: str, column: str) -> bool:
    return column in _NUMBERS or column in _REFERENCES or _is_text(table, column)


def _known(tables: Iterable[str], ledger: Ledger) -> list[str]:
    # A pattern has room for a secret where nobody expects one.
    return [name for name in tables if _TABLES.fullmatch(name) and ledger.scrubber.text(name) == name]


def _is_property(ledger: Ledger, table: str, name: str) -> bool:
    """Whether a property is copied; what is not is counted."""
    known = _KNOWN_NAMES.fullmatch(name) is not None and ledger.scrubber.text(name) == name
    if not known:
        ledger.note("environment" if "ENVIRON" in name.upper() else "property", table, name)
    return known


def _clean(ledger: Ledger, place: str, text: str) -> str:
    return str(ledger.apply(Scrubber.path if place == "PROCESSES.name" else Scrubber.text, place, text))


def learn_export(path: Path, scrubber: Scrubber) -> None:
    """Learn from an export where and by whom it was made: from its properties, and from texts that may tell.

    Parameters
    ----------
    path : Path
        A database, or a folder of Parquet files.
    scrubber : Scrubber

    Raises
    ------
    TraceError
        Truncated or damaged.
    """
    export = nsys.ParquetDir(path) if path.is_dir() else nsys.Sqlite(path)
    for row in (row for table in _PROPERTIES for row in export.records(table)):
        name, value = str(row.get("name")), str(row.get("value") or "")
        if "ENVIRON" in name.upper():
            # A value may itself hold a separator; its rest is then no entry, and teaches nothing.
            scrubber.learn(value.replace("\x00", ";").split(";"), "environment")
        scrubber.learn(value, name.rpartition(":")[2].lower())
    for table, column in (place.split(".") for place in sorted(_TEXTS)):
        told = table not in _PROPERTIES and column in export.columns(table)
        for text in export.texts(table, column)[1] if told else ():
            scrubber.learn(text)


# ---------------------------------------------------------------- SQLite


def copy_sqlite(path: Path, draft: Path, ledger: Ledger) -> None:
    """Copy an export in SQLite without its secrets.

    Parameters
    ----------
    path : Path
        Only read.
    draft : Path
        The new database, row by row: what was removed has never been in it.
    ledger : Ledger

    Raises
    ------
    TraceError
        Truncated or damaged.
    """
    nsys.open_sqlite(path, cache=False)  # the database of another program is not ours to copy
    learn_export(path, ledger.scrubber)
    with (
        reading(path, "is damaged or cannot be copied", "export it again with nsys export"),
        contextlib.closing(sqlite3.connect(uri(path, "ro"), uri=True)) as db,
    ):
        db.text_factory = lambda raw: raw.decode("utf-8", "replace")
        db.execute("PRAGMA trusted_schema = OFF")  # the schema does nothing but say where columns stand
        schema = (
            "SELECT type, name, rootpage FROM sqlite_master WHERE sql NOTNULL AND name NOT LIKE 'sqlite!_%' ESCAPE '!'"
        )
        entries = db.execute(f"{schema} ORDER BY rowid").fetchall()
        # Views and virtual tables have no page; to read one is to run it.
        stored = [name for kind, name, page in entries if kind == "table" and page]
        tables = _known(stored, ledger)
        for kind, name, _ in entries:
            if name not in tables:
                ledger.note(kind, name, count=_count(db, "*", quoted(name)) if name in stored else 1)
        encoding = db.execute("PRAGMA encoding").fetchone()[0]
        # What is stored as a text may be bytes that are not one.
        codec = ("utf-8", "surrogateescape") if encoding == "UTF-8" else ("utf-16-" + encoding[-2:], "replace")
        db.create_function("clean", 2, lambda place, raw: _clean(ledger, place, raw.decode(*codec)).encode(*codec))
        db.create_function("is_property", 2, lambda table, name: _is_property(ledger, table, str(name)))
        db.execute("ATTACH ? AS copy", (uri(draft, "rwc"),))
        for pragma in ("journal_mode", "synchronous"):
            db.execute(f"PRAGMA copy.{pragma} = OFF")
        columns = {
            table: [row[1:6] for row in db.execute(f"PRAGMA table_xinfo({quoted(table)})") if not row[6]]  # 6: computed
            for table in tables
        }
        refer = [f"SELECT {c} FROM main.{t}" for t in tables for c, *_ in columns[t] if c in _REFERENCES]  # noqa: S608
        kept = dict.fromkeys(_PROPERTIES, "is_property('{table}', name)")
        kept["StringIds"] = f"id IN ({' UNION '.join(refer) or 'NULL'})"
        for table in tables:
            where = kept.get(table, "1").format(table=table)
            if table == "StringIds":
                ledger.note("text", "StringIds", "value", count=_count(db, "*", f"main.StringIds WHERE NOT ({where})"))
            _copy_table(db, table, columns[table], where, ledger)
        db.commit()


def _count(db: sqlite3.Connection, column: str, rows: str) -> int:
    return int(db.execute(f"SELECT count({column}) FROM {rows}").fetchone()[0])  # noqa: S608


def _copy_table(db: sqlite3.Connection, table: str, columns: list[Any], where: str, ledger: Ledger) -> None:
    """Copy the known columns: numbers as they are, texts through ``clean``, what is of another type as NULL."""
    copied = {}
    for name, kind, _, _, key in columns:
        value = quoted(name)
        number = f"WHEN typeof({value}) IN ('integer', 'real') THEN {value} END"
        if _is_text(table, name):
            text = f"CAST(clean('{table}.{name}', CAST({value} AS BLOB)) AS TEXT)"
            copied[f"{value} TEXT"] = f"CASE WHEN typeof({value}) = 'text' THEN {text} {number}"
        elif _is_known(table, name):
            declared = "REAL" if kind.upper().startswith(("REAL", "FLOAT", "DOUBLE")) else "INTEGER"
            copied[f"{value} {declared}{' PRIMARY KEY' if key and name == 'id' else ''}"] = f"CASE {number}"
        else:
            ledger.note("column", table, name, count=_count(db, value, f"main.{table}"))
    if copied:
        db.execute(f"CREATE TABLE copy.{table} ({', '.join(copied)})")
        query = f"SELECT {', '.join(copied.values())} FROM main.{table} WHERE {where} ORDER BY rowid"  # noqa: S608
        db.execute(f"INSERT INTO copy.{table} {query}")


# ---------------------------------------------------------------- Parquet


def copy_parquetdir(path: Path, draft: Path, ledger: Ledger) -> None:
    """Copy an export in a folder of Parquet files without its secrets; other files stay behind.

    Parameters
    ----------
    path : Path
        Only read.
    draft : Path
        The new folder.
    ledger : Ledger

    Raises
    ------
    TraceError
        A table is unreadable.
    """
    nsys.open_parquetdir(path)
    learn_export(path, ledger.scrubber)
    draft.mkdir()
    export = nsys.ParquetDir(path)
    tables = _known(sorted(export.tables), ledger)
    for other in sorted(path.iterdir()):
        if other.suffix != ".parquet" or other.stem not in tables:
            ledger.note("table" if other.suffix == ".parquet" else "other file", other.stem)
    referred = [
        values
        for table in tables
        for values in export.integers(table, sorted(_REFERENCES.intersection(export.columns(table)))).values()
    ]
    strings = pa.array(np.unique(np.concatenate([np.empty(0, np.int64), *referred])))
    for table in tables:
        with export.guard(table):
            _copy_parquet(path / f"{table}.parquet", draft / f"{table}.parquet", strings, ledger)


def _copy_parquet(file: Path, draft: Path, strings: pa.Array, ledger: Ledger) -> None:
    """Copy the known columns, if they are of the type that is expected; `strings` are the ids of texts to copy."""
    table, opened = file.stem, pq.ParquetFile(file)
    known = []
    for field in opened.schema_arrow:
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if (
            _is_text(table, field.name)
            if pa.types.is_string(kind) or pa.types.is_large_string(kind)
            else _is_known(table, field.name) and (pa.types.is_null(kind) or pa.types.is_primitive(kind))
        ):
            known.append(field.remove_metadata())  # which may hold anything, as may that of the schema
        else:
            ledger.note("column", table, field.name, count=opened.metadata.num_rows)
    schema = pa.schema(known)
    with pq.ParquetWriter(draft, schema, compression="zstd") as writer:
        for batch in opened.iter_batches(batch_size=1 << 16, columns=schema.names):
            rows = batch
            if table == "StringIds":
                rows = batch.filter(pc.is_in(batch["id"], strings))
                ledger.note("text", "StringIds", "value", count=batch.num_rows - rows.num_rows)
            elif table in _PROPERTIES:
                kept = [_is_property(ledger, table, str(name)) for name in batch["name"].to_pylist()]
                rows = batch.filter(pa.array(kept, pa.bool_()))
            columns = [_clean_column(ledger, f"{table}.{field.name}", rows[field.name]) for field in schema]
            writer.write_batch(pa.record_batch(columns, schema=schema))


def _clean_column(ledger: Ledger, place: str, column: pa.Array) -> pa.Array:
    if pa.types.is_primitive(column.type) or pa.types.is_null(column.type):
        return column
    plain = column.cast(pa.large_string()).dictionary_encode()
    texts = [None if text is None else _clean(ledger, place, text) for text in plain.dictionary.to_pylist()]
    return pa.array(texts, pa.large_string()).take(plain.indices).cast(column.type)
