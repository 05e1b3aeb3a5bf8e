#!/usr/bin/env python3
"""Damage files of every format, ask nsightkit about them, and report whatever is not an error of its own.

``python tools/fuzz.py --count 30000 --seed 1``. Each input has a number, which decides its format, its seed and its
damage: ``--format store --seed 4711 --count 1`` makes input 4711 again. Exits with 1 when anything failed.
"""

# ruff: noqa: S608 - the tables and columns of seeds made here

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import gzip
import json
import mmap
import os
import pickle
import random
import resource
import shutil
import signal
import sqlite3
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import make_kineto  # noqa: E402 - the writers of synthetic traces lie beside the tests
import make_snapshot  # noqa: E402
from bench import make_sqlite  # noqa: E402

import nsightkit  # noqa: E402
from nsightkit.analysis.memory import snapshot as memory  # noqa: E402
from nsightkit.analysis.roofline import counters  # noqa: E402
from nsightkit.errors import NsightkitError  # noqa: E402
from nsightkit.trace import chrome, ncu, snapshot, store  # noqa: E402

CASES = ROOT / "docs" / "cases"
#: Rows of each table of a seed: enough for gaps, steps and nested ranges, few enough for a hundred inputs a second.
ROWS = 80
#: What one input may take: of a processor's time, and of memory.
SECONDS, BYTES = 20, 2 << 30

_STORES = (
    "v100-eight-ranks/worker0",
    "v100-starved-loader/workers-0",
    "a100-cuda-graphs/graphs",
    "a100-cuda-graphs/eager-nvtx",
    "h100-all-copies/two-gpus-1s",
    "vllm-graphs/decode-capture",
    "b200-eager/gpt-oss-eager",
)


class TookTooLong(BaseException):
    """An input was not answered in time; no `except Exception` may stop it."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """What came out of an input that was not an error of nsightkit's own.

    Parameters
    ----------
    format : str
    number : int
        Of the input.
    error : str
        The exception's type and message.
    where : str
        The innermost frame of nsightkit.
    """

    format: str
    number: int
    error: str
    where: str

    def __str__(self) -> str:
        return f"{self.format} {self.number}: {self.error} ({self.where})"


# -- odd values -----------------------------------------------------------------------------------------------------

_INTEGERS = (-1, 0, 1, 2, 127, 2**15, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, -(2**31), -(2**63))
_TEXTS = ("", "\0", "x" * 5000, "<svg onload=1>", "\x1b]52;c;x\x07", "\u202e", "ProfilerStep#1", "step", "-1", "1e999")
_JSON = (
    *(None, True, False, 0.5, -0.0, 1e308, float("nan"), float("inf"), 2**64, 10**40),
    *([], {}, [[]], [None], {"": None}, "\ud800", "\udfff x"),
    *_INTEGERS,
    *_TEXTS,
)


def odd_integers(rng: random.Random, size: int) -> np.ndarray:
    """A column of integers that no profiler writes."""
    kind = rng.randrange(4)
    if kind == 0:
        return np.full(size, rng.choice(_INTEGERS), np.int64)
    if kind == 1:
        return np.array([rng.choice(_INTEGERS) for _ in range(size)], np.int64)
    if kind == 2:
        return np.arange(size) * rng.choice((1, -1, 2**24, 2**40))
    return np.array([rng.getrandbits(63) for _ in range(size)], np.int64)


# -- damage to bytes, and to nested values ---------------------------------------------------------------------------


def damaged_bytes(rng: random.Random, data: bytes) -> bytes:
    """Bytes flipped, cut, doubled or put elsewhere."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, to = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
        to = min(to, at + rng.choice((1, 4, 64, 4096)))
        kind = rng.randrange(6)
        if kind == 0:
            data = data[:at] + bytes(255 - byte for byte in data[at:to]) + data[to:]
        elif kind == 1:
            data = data[:at] + rng.randbytes(to - at) + data[to:]
        elif kind == 2:
            data = data[:at] + data[to:]
        elif kind == 3:
            data = data[:to] + data[at:to] + data[to:]
        elif kind == 4:
            other = rng.randrange(len(data) + 1)
            data = data[:other] + data[at:to] + data[other:]
        else:
            data = data[:at] if rng.random() < 0.3 else data[:at] + b"\0" * (to - at) + data[to:]
    return data


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a nested value, with each key or position in it."""
    waiting = [value]
    while waiting:
        container = waiting.pop()
        keys = list(container) if isinstance(container, dict) else range(len(container))
        for key in keys:
            yield container, key
            if isinstance(container[key], dict | list) and container[key]:
                waiting.append(container[key])


def damage_values(rng: random.Random, document: Any, odd: tuple[Any, ...] = _JSON) -> None:
    """Replace, remove, rename or double some values of a nested document, in place."""
    for _ in range(rng.choice((1, 1, 2, 5))):
        known = list(places(document))
        if not known:
            return
        container, key = rng.choice(known)
        kind = rng.randrange(6)
        if kind < 3:
            container[key] = rng.choice(odd)
        elif kind == 3:
            other, place = rng.choice(known)
            if not isinstance(other[place], dict | list):  # else a value could hold itself
                container[key] = other[place]
        elif kind == 4:
            del container[key]
        elif isinstance(container, dict):
            container[rng.choice(_TEXTS)] = container.pop(key)
        else:
            container.insert(key, container[key])


def damage_everywhere(rng: random.Random, document: Any, odd: tuple[Any, ...] = _JSON) -> None:
    """Give one member of many events odd values."""
    members = [(container, key) for container, key in places(document) if isinstance(container, dict)]
    name = rng.choice(members)[1]
    value = rng.choice(odd)
    for container, key in members:
        if key == name and rng.random() < 0.8:
            container[key] = value if rng.random() < 0.5 else rng.choice(odd)


# -- damage to tables ------------------------------------------------------------------------------------------------


def damaged_table(rng: random.Random, table: pa.Table) -> pa.Table:
    """A table with another column, other rows or other types."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        if not table.num_columns:
            return table
        kind = rng.randrange(12)
        at = rng.randrange(table.num_columns)
        name = table.column_names[at]
        if kind == 0:
            table = table.remove_column(at)
        elif kind == 1:
            names = table.column_names
            names[at] = rng.choice((*names, *_TEXTS))
            table = table.rename_columns(names)
        elif kind == 2:
            table = table.slice(rng.randrange(table.num_rows + 1), rng.choice((0, 1, 7, 10**6)))
        elif kind == 3:
            table = pa.concat_tables([table] * rng.choice((2, 3)))
        elif kind == 4 and {"start_ns", "end_ns"} <= set(table.column_names):
            start, end = table.column_names.index("start_ns"), table.column_names.index("end_ns")
            table = table.set_column(start, "start_ns", table["end_ns"]).set_column(end, "end_ns", table["start_ns"])
        else:
            column = damaged_column(rng, table.column(at).combine_chunks(), name)
            if column is not None and len(column) == table.num_rows:
                table = table.set_column(at, name, column)
    return table


def damaged_column(rng: random.Random, column: Any, name: str) -> Any:
    """A column of other values or of another type; None where it cannot be made."""
    size = len(column)
    kind = rng.randrange(9)
    if name == "parent" and kind < 5:
        return pa.array(np.roll(np.arange(size), rng.choice((0, 1, -1, 3))) + rng.choice((0, 0, 1)))
    if kind < 3:
        numbers = odd_integers(rng, size)
        few = np.array([rng.random() < rng.choice((0.05, 1)) for _ in range(size)], bool)
        if pa.types.is_integer(column.type) and not column.null_count:
            numbers = np.where(few, numbers, column.to_numpy(zero_copy_only=False).astype(np.int64))
        return pa.array(numbers)
    if kind == 3:
        return pa.array([None if rng.random() < 0.1 else value for value in column.to_pylist()], column.type)
    if kind == 4:
        return pa.array([rng.choice(_TEXTS) for _ in range(size)]).dictionary_encode()
    if kind == 5:
        raw = pa.array([rng.choice((b"\xff\xfe", b"a", b"\xed\xa0\x80")) for _ in range(size)])
        return pa.Array.from_buffers(pa.string(), size, raw.buffers())
    if kind == 6:
        return pa.nulls(size, rng.choice((pa.null(), column.type, pa.float64())))
    if kind == 7:
        return pa.array([[0]] * size)
    types = (pa.float64(), pa.string(), pa.uint64(), pa.int8(), pa.timestamp("ns"), pa.bool_(), pa.binary())
    try:
        return column.cast(rng.choice(types), safe=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
        return None


def write_folder(folder: Path, files: dict[str, bytes]) -> Path:
    """A folder of files."""
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def as_parquet(table: pa.Table) -> bytes:
    """A table as a file."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes()


def damage_folder(rng: random.Random, files: dict[str, bytes]) -> None:
    """Damage one file of a folder of Parquet tables, or several."""
    for _ in range(rng.choice((1, 1, 1, 3))):
        name = rng.choice(list(files))
        kind = rng.randrange(10)
        if kind == 0:
            files[name] = damaged_bytes(rng, files[name])
        elif kind == 1:
            files[name] = files[rng.choice(list(files))]
        elif name.endswith(".parquet"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    table = pq.read_table(pa.BufferReader(files[name]))
                    files[name] = as_parquet(damaged_table(rng, table))
                except (pa.ArrowException, OSError, ValueError):  # was damaged before, or cannot be written
                    files[name] = damaged_bytes(rng, files[name])


# -- the formats: seeds, and inputs made of them ---------------------------------------------------------------------


class Store:
    """Folders that ``nsightkit convert`` writes."""

    def __init__(self) -> None:
        self.seeds = [self._cut(CASES / f"{case}.parquet") for case in _STORES]

    @staticmethod
    def _cut(folder: Path) -> dict[str, bytes]:
        files = {"trace.json": (folder / "trace.json").read_bytes()}
        for path in sorted(folder.glob("*.parquet")):
            table = pq.read_table(path).slice(0, ROWS)
            if path.stem == "ranges":
                parent = table["parent"].to_numpy()
                at = table.column_names.index("parent")
                table = table.set_column(at, "parent", pa.array(np.where(parent < len(table), parent, -1)))
            files[path.name] = as_parquet(table)
        return files

    def make(self, rng: random.Random, folder: Path) -> Path:
        """Write an input."""
        files = dict(rng.choice(self.seeds))
        if rng.random() < 0.2:
            index = json.loads(files["trace.json"])
            damage_values(rng, index)
            files["trace.json"] = json.dumps(index).encode()
        else:
            damage_folder(rng, files)
        return write_folder(folder / "t", files)


class Sqlite:
    """Exports of Nsight Systems as SQLite."""

    _MORE = """
        CREATE TABLE OSRT_API (start INTEGER, end INTEGER, eventClass INTEGER, globalTid INTEGER, nameId INTEGER);
        INSERT INTO OSRT_API SELECT start, end + 9000, 27, globalTid, 900 FROM CUPTI_ACTIVITY_KIND_RUNTIME LIMIT 30;
        CREATE TABLE PROFILER_OVERHEAD (start INTEGER, end INTEGER, globalTid INTEGER, nameId INTEGER);
        INSERT INTO PROFILER_OVERHEAD SELECT start, end, globalTid, 901 FROM CUPTI_ACTIVITY_KIND_RUNTIME LIMIT 9;
        CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER,
            correlationId INTEGER, globalPid INTEGER, bytes INTEGER, memKind INTEGER, graphNodeId INTEGER);
        INSERT INTO CUPTI_ACTIVITY_KIND_MEMSET SELECT start + 3, end, 0, 7, correlationId, globalPid, 64, 2, NULL
            FROM CUPTI_ACTIVITY_KIND_KERNEL LIMIT 9;
        CREATE TABLE COMPOSITE_EVENTS (id INTEGER, start INTEGER, cpu INTEGER, threadState INTEGER, globalTid INTEGER);
        INSERT INTO COMPOSITE_EVENTS SELECT rowid, start, 0, 1, globalTid FROM CUPTI_ACTIVITY_KIND_RUNTIME LIMIT 30;
        CREATE TABLE SAMPLING_CALLCHAINS (id INTEGER, symbol INTEGER, module INTEGER, stackDepth INTEGER);
        INSERT INTO SAMPLING_CALLCHAINS SELECT rowid, 900, 901, 0 FROM CUPTI_ACTIVITY_KIND_RUNTIME LIMIT 30;
        CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT, totalMemory INTEGER, smCount INTEGER,
            computeMajor INTEGER, computeMinor INTEGER);
        INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA A100-SXM4-40GB', 42000000000, 108, 8, 0);
        CREATE TABLE TARGET_INFO_CUDA_DEVICE (gpuId INTEGER, cudaId INTEGER, pid INTEGER);
        INSERT INTO TARGET_INFO_CUDA_DEVICE VALUES (0, 1, 4242);
        CREATE TABLE TARGET_INFO_SYSTEM_ENV (name TEXT, value TEXT);
        INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES ('NvDriverVersion', '550.54'),
            ('DeviceEnvironment', 'RANK=1' || char(10) || 'WORLD_SIZE=4');
        CREATE TABLE DIAGNOSTIC_EVENT (timestamp INTEGER, severity INTEGER, text TEXT);
        INSERT INTO DIAGNOSTIC_EVENT VALUES (0, 2, 'Not all CUDA events might have been collected.');
        CREATE TABLE ThreadNames (nameId INTEGER, priority INTEGER, globalTid INTEGER);
        INSERT INTO ThreadNames SELECT 901, 0, globalTid FROM CUPTI_ACTIVITY_KIND_RUNTIME LIMIT 1;
        INSERT INTO StringIds VALUES (900, 'poll'), (901, 'main');
    """

    def __init__(self) -> None:
        self.seeds: list[bytes] = []
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "t.sqlite"
            make_sqlite.make(path, 2 * ROWS)
            connection = sqlite3.connect(path)
            connection.executescript(self._MORE)
            self.seeds.append(path.read_bytes())
            for table in self.tables(connection):  # without constraints any value can stand anywhere
                connection.execute(f"CREATE TABLE other AS SELECT * FROM {table}")
                connection.execute(f"DROP TABLE {table}")
                connection.execute(f"ALTER TABLE other RENAME TO {table}")
            connection.commit()
            connection.execute("VACUUM")
            connection.close()
            self.seeds.append(path.read_bytes())

    @staticmethod
    def tables(connection: sqlite3.Connection) -> list[str]:
        """Names of the tables of a database."""
        return [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]

    def make(self, rng: random.Random, folder: Path) -> Path:
        """Write an input."""
        path = folder / "t.sqlite"
        data = rng.choice(self.seeds)
        if rng.random() < 0.3:
            path.write_bytes(damaged_bytes(rng, data))
            return path
        path.write_bytes(data)
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA journal_mode = OFF")
        for _ in range(rng.choice((1, 1, 2, 4))):
            try:
                connection.execute(*self._statement(rng, connection))
            except (sqlite3.Error, OverflowError):  # a constraint, or a table that is gone
                continue
        connection.commit()
        connection.close()
        return path

    def _statement(self, rng: random.Random, connection: sqlite3.Connection) -> tuple[str, tuple[Any, ...]]:
        table = rng.choice(self.tables(connection))
        column = rng.choice([row[1] for row in connection.execute(f"PRAGMA table_info({table})")])
        other = rng.choice([row[1] for row in connection.execute(f"PRAGMA table_info({table})")])
        value = rng.choice((None, 0.5, 1e300, b"\xff\xfe", "\ud7ff", *_INTEGERS, *_TEXTS))
        some = rng.choice(("1", f"rowid % {rng.choice((2, 7, 50))} = 0"))
        kind = rng.randrange(12)
        if kind < 5:
            return f'UPDATE {table} SET "{column}" = ? WHERE {some}', (value,)
        if kind == 5:
            return f'UPDATE {table} SET "{column}" = "{other}" WHERE {some}', ()
        if kind == 6:
            change = rng.choice(("-{0}", "{0} * 1000003", "rowid << 24", "CAST({0} AS TEXT)", "CAST({0} AS BLOB)"))
            return f'UPDATE {table} SET "{column}" = {change} WHERE {some}'.replace("{0}", f'"{column}"'), ()
        if kind == 7:
            return f'ALTER TABLE {table} DROP COLUMN "{column}"', ()
        if kind == 8:
            return f'ALTER TABLE {table} RENAME COLUMN "{column}" TO "{rng.choice((*_TEXTS[3:], other + "2"))}"', ()
        if kind == 9:
            return rng.choice((f"DROP TABLE {table}", f"DELETE FROM {table}", f"ALTER TABLE {table} RENAME TO x")), ()
        if kind == 10:
            return f"INSERT INTO {table} SELECT * FROM {table}", ()
        return f'ALTER TABLE {table} ADD COLUMN "{rng.choice(("graphNodeId", "text", "x"))}" DEFAULT 7', ()


class ParquetDir(Sqlite):
    """Exports of Nsight Systems as a folder of Parquet tables: those of the SQLite seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.folders: list[dict[str, bytes]] = []
        for seed in self.seeds[::2]:
            connection = sqlite3.connect(":memory:")
            connection.deserialize(seed)
            files = {}
            for table in self.tables(connection):
                cursor = connection.execute(f"SELECT * FROM {table}")
                names = [column[0] for column in cursor.description]
                rows = cursor.fetchall()
                columns = list(zip(*rows, strict=True)) if rows else [()] * len(names)
                files[f"{table}.parquet"] = as_parquet(pa.table(dict(zip(names, map(pa.array, columns), strict=True))))
            self.folders.append(files)

    def make(self, rng: random.Random, folder: Path) -> Path:
        """Write an input."""
        files = dict(rng.choice(self.folders))
        damage_folder(rng, files)
        return write_folder(folder / "t", files)


class Kineto:
    """Traces of PyTorch's profiler."""

    def __init__(self) -> None:
        self.seeds: list[bytes] = []
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "t.json"
            make_kineto.write(path, 60, per_step=15)
            self.seeds.append(path.read_bytes())
            for case in ("v100-eight-ranks/worker0", "vllm-graphs/decode-capture", "a100-cuda-graphs/eager-nvtx"):
                files = Store._cut(CASES / f"{case}.parquet")
                part = nsightkit.load(write_folder(Path(folder) / case.replace("/", "-"), files))
                make_kineto.from_trace(path, part)
                self.seeds.append(path.read_bytes())

    def make(self, rng: random.Random, folder: Path) -> Path:
        """Write an input."""
        data = rng.choice(self.seeds)
        if rng.random() < 0.3:
            data = damaged_bytes(rng, data)
        else:
            document = json.loads(data)
            rng.choice((damage_values, damage_everywhere))(rng, document)
            data = json.dumps(document, ensure_ascii=rng.random() < 0.9).encode(errors="surrogatepass")
        if rng.random() < 0.2:
            data = gzip.compress(data, 1)
            data = damaged_bytes(rng, data) if rng.random() < 0.3 else data
        path = folder / "t.json"
        path.write_bytes(data)
        return path


class Ncu:
    """Pages of Nsight Compute, raw and by section."""

    _DETAILS = (
        '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size",'
        '"Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"\n'
    )

    def __init__(self) -> None:
        raw = (CASES / "ncu-esmm" / "sgemm.csv").read_text(encoding="utf-8")
        place = '"{0}","1","app","host","void f<{0}>(float*)","1","7","(256, 1, 1)","(128, 1, 1)","0","9.0"'
        metrics = (
            ("GPU Speed Of Light Throughput", "Duration", "us", "12.5"),
            ("GPU Speed Of Light Throughput", "Memory Throughput", "%", "71.2"),
            ("GPU Speed Of Light Throughput", "Compute (SM) Throughput", "%", "22.8"),
            ("GPU Speed Of Light Throughput", "DRAM Throughput", "%", "70.0"),
            ("Occupancy", "Achieved Occupancy", "%", "48.1"),
            ("Launch Statistics", "Registers Per Thread", "register/thread", "64"),
        )
        details = self._DETAILS
        for launch in range(4):
            for metric in metrics:
                details += place.format(launch) + "".join(f',"{text}"' for text in metric) + "\n"
        self.seeds = [raw, details]

    def make(self, rng: random.Random, folder: Path) -> Path:
        """Write an input."""
        page = rng.choice(self.seeds)
        if rng.random() < 0.6:
            lines = [line.split('","') for line in page.splitlines()]
            damage_values(rng, lines, (*_TEXTS, "nan", "inf", "-1", "1e400", "1,5", "9" * 400, "n/a", "\ufffd"))
            page = "\n".join('","'.join(line) if isinstance(line, list) else str(line) for line in lines)
        data = page.encode(rng.choice(("utf-8", "utf-8", "utf-16", "latin-1")), errors="replace")
        path = folder / "t.csv"
        path.write_bytes(damaged_bytes(rng, data) if rng.random() < 0.5 else data)
        return path


class Snapshot:
    """Pickled memory snapshots of PyTorch."""

    def __init__(self) -> None:
        self.seeds = [
            pickle.dumps(make_snapshot.random_program(seed, 60, **settings).snapshot(), protocol)
            for seed, protocol, settings in ((1, 4, {}), (2, 2, {"expandable": True}), (3, 5, {}))
        ]

    def make(self, rng: random.Random, folder: Path) -> Path:
        """Write an input."""
        data = rng.choice(self.seeds)
        if rng.random() < 0.4:
            data = damaged_bytes(rng, data)
        else:
            found = pickle.loads(data)  # noqa: S301 - our own
            rng.choice((damage_values, damage_everywhere))(rng, found, (*_JSON, b"x", (1, 2), {1: 2}, -(2**70)))
            if rng.random() < 0.05:
                found["segments"] = found  # holds itself
            data = pickle.dumps(found, rng.choice((2, 4, 5)))
        path = folder / "t.pickle"
        path.write_bytes(data)
        return path


FORMATS: dict[str, Callable[[], Any]] = {
    "store": Store,
    "sqlite": Sqlite,
    "parquetdir": ParquetDir,
    "kineto": Kineto,
    "ncu": Ncu,
    "snapshot": Snapshot,
}

# -- questions -------------------------------------------------------------------------------------------------------

_Ask = Callable[[Any, Path], Any]
#: Questions, and how often each is asked beside the others: the dear ones (a report costs 50 tables) rarely.
QUESTIONS: tuple[tuple[int, _Ask], ...] = (
    (60, lambda trace, _: trace.kernels()),
    (30, lambda trace, _: trace.kernels(by="category")),
    (60, lambda trace, _: trace.calls()),
    (30, lambda trace, _: trace.calls(os=True)),
    (50, lambda trace, _: trace.memops()),
    (20, lambda trace, _: trace.summary()),
    (12, lambda trace, _: trace.ranges()),
    (12, lambda trace, _: trace.ranges(rule="thread")),
    (12, lambda trace, _: trace.gaps()),
    (12, lambda trace, _: trace.gaps(each=True)),
    (12, lambda trace, _: trace.steps()),
    (12, lambda trace, _: trace.sol()),
    (10, lambda trace, _: trace.where()),
    (8, lambda trace, _: trace.where(by="op")),
    (6, lambda trace, _: trace.whatif()),
    (4, lambda trace, _: trace.verdict()),
    (6, lambda trace, _: trace.last_steps(1).summary()),
    (6, lambda trace, _: trace.device(2**40).summary()),
    (4, lambda trace, _: on_a_device(trace).gaps(each=True)),
    (2, lambda trace, _: on_a_device(trace).whatif()),
    (2, lambda trace, _: nsightkit.diff(trace, trace)),
    (6, lambda trace, _: trace.within("a").kernels()),
    (6, lambda trace, _: trace.time(0, 10**6).gaps()),
    (1, lambda trace, folder: trace.report(folder / "report.html")),
    (2, lambda trace, folder: chrome.write(trace, folder / "out.json.gz", overwrite=True)),
    (3, lambda trace, folder: store.write(trace, folder / "out.parquet")),
)


def on_a_device(trace: Any) -> Any:
    """The part of a trace that ran on the last of its devices."""
    return trace.device(int(trace["kernels"]["device"].max()) if len(trace["kernels"]) else 0)


def ask(kind: str, path: Path, rng: random.Random, questions: int) -> None:
    """Open an input and ask so many questions about it. Errors of nsightkit's own are answers."""
    if kind == "snapshot":
        opened = snapshot.read(path)
        for options in ({}, {"moment": "end", "top": 2}):
            with contextlib.suppress(NsightkitError):
                memory.summary(opened, **options)
        return
    if kind == "ncu":
        counters.summary(ncu.read(path))
        return
    trace = nsightkit.load(path, cache=False)
    weights = [weight for weight, _ in QUESTIONS]
    for _, question in rng.choices(QUESTIONS, weights, k=questions):
        with contextlib.suppress(NsightkitError):
            repr(question(trace, path.parent))


# -- the loop --------------------------------------------------------------------------------------------------------


_ALARMS = (signal.SIGPROF, signal.SIGALRM)


def _late(*_: object) -> None:
    raise TookTooLong(f"took more than {SECONDS} s of CPU, or waited for long")


def try_input(kind: str, maker: Any, number: int, questions: int = 1, keep: Path | None = None) -> Failure | None:
    """Make an input, ask about it and say what failed.

    Parameters
    ----------
    kind : str
        A key of :data:`FORMATS`.
    maker : object
        What that makes.
    number : int
        Of the input.
    questions : int
        How many to ask.
    keep : Path, optional
        A folder for inputs that fail.

    Returns
    -------
    Failure or None
    """
    rng = random.Random(f"{kind} {number}")  # noqa: S311 - to be repeated
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = maker.make(rng, Path(folder))
        failure = None
        before = [signal.signal(alarm, _late) for alarm in _ALARMS]
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.alarm(10 * SECONDS)
        try:
            with contextlib.suppress(NsightkitError):
                ask(kind, path, rng, questions)
        except (Exception, TookTooLong) as error:
            failure = Failure(kind, number, f"{type(error).__name__}: {error}"[:200], innermost(error))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.alarm(0)
            for alarm, handler in zip(_ALARMS, before, strict=True):
                signal.signal(alarm, handler)
        if failure and keep:
            keep.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if path.is_dir() else shutil.copyfile
            copy(path, keep / f"{kind}-{number}{path.suffix}")
        return failure


def innermost(error: BaseException) -> str:
    """The innermost frame of nsightkit in an exception's traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/nsightkit/" in frame.filename]
    if not own:
        return "outside nsightkit"
    return f"{own[-1].filename.rpartition('/nsightkit/')[2]}:{own[-1].lineno} {own[-1].name}"


def _limit_memory() -> None:
    """Let this process grow by :data:`BYTES` and no more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def work(numbers: range, makers: dict[str, Any], options: argparse.Namespace, done: mmap.mmap, out: Path) -> None:
    """Try inputs in a child process; write each failure down, and how far it is."""
    _limit_memory()
    kinds = list(makers)
    with out.open("a", encoding="utf-8") as lines:
        for number in numbers:
            if time.monotonic() > options.until:
                break
            if number % 1_000 == 0:
                print(f"input {number:,}", file=sys.stderr, flush=True)
            done[:8] = struct.pack("q", number)
            kind = kinds[number % len(kinds)]
            failure = try_input(kind, makers[kind], number, options.questions, options.keep)
            if failure:
                print(failure, flush=True)
                lines.write(json.dumps(dataclasses.astuple(failure)) + "\n")
                lines.flush()


def run(numbers: range, options: argparse.Namespace) -> tuple[list[Failure], int]:
    """Try inputs, in a child process that may die of one.

    Parameters
    ----------
    numbers : range
        Of the inputs.
    options : Namespace
        Those of the command line.

    Returns
    -------
    list of Failure
    int
        How many inputs were tried; fewer than asked for if the time was over.
    """
    first = numbers.start
    kinds = options.format or list(FORMATS)
    makers = {kind: FORMATS[kind]() for kind in kinds}
    done = mmap.mmap(-1, 8)
    failures = []
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        out = Path(folder) / "failures"
        while numbers and time.monotonic() < options.until:
            child = os.fork()
            if not child:
                work(numbers, makers, options, done, out)
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code == 0:
                break
            (number,) = struct.unpack("q", done[:8])
            failures.append(Failure(kinds[number % len(kinds)], number, f"the process died ({code})", "unknown"))
            print(failures[-1], flush=True)
            numbers = range(number + 1, numbers.stop)
        if out.exists():
            failures += [Failure(*json.loads(line)) for line in out.read_text(encoding="utf-8").splitlines()]
    return failures, struct.unpack("q", done[:8])[0] - first + 1


def main() -> int:
    """Read the options, try the inputs and print what failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=30_000, help="how many inputs")
    parser.add_argument("--seed", type=int, default=1, help="number of the first input")
    parser.add_argument("--format", action="append", choices=list(FORMATS), help="only this format; may be repeated")
    parser.add_argument("--questions", type=int, default=1, help="how many to ask about each input")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no input after that")
    parser.add_argument("--keep", type=Path, help="folder for inputs that fail")
    options = parser.parse_args()
    began, used = time.monotonic(), os.times()
    options.until = began + options.seconds
    failures, tried = run(range(options.seed, options.seed + options.count), options)
    spent = os.times()
    cpu = spent.children_user + spent.children_system - used.children_user - used.children_system
    print(f"{tried:,} of {options.count:,} inputs, {time.monotonic() - began:.0f} s, {cpu:.0f} s of CPU")
    causes = collections.Counter(
        (failure.format, failure.error.partition(":")[0], failure.where) for failure in failures
    )
    for (kind, error, where), count in causes.most_common():
        print(f"{count:6,}  {kind}  {error}  {where}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
