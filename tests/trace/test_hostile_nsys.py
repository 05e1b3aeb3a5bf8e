"""Hostile Nsight Systems exports: read or refused soon, in little memory, and no other file is touched."""

from __future__ import annotations

import contextlib
import gc
import os
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sqlite_pages_by_hand as by_hand
import stand_in_nsight
from child import command
from sqlite_pages_by_hand import cell, interior, leaf, record
from synthetic.planted import training

import nsightkit
from nsightkit.trace import nsys, nsys_tables
from nsightkit.trace.model import Gpu

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
#: A table of kernels with one row, in place of what is replaced.
PLAIN = f"CREATE TABLE {KERNELS} (start INTEGER, end INTEGER)"
TIMES = "start INTEGER, end INTEGER"


def outcome(path: Path) -> str:
    """Read all of a trace in a process of its own, and give what it was refused for."""
    ended = command("convert", path, path.with_name("out.parquet"), address_space_bytes=6 << 30)
    assert ended.cpu_s < 10, ended.error
    assert ended.peak_bytes < 1 << 30, ended.error
    assert ended.code in (0, 2), ended.error
    return ended.error if ended.code else ""


def database(path: Path, *statements: str) -> Path:
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)
    return path


@pytest.fixture
def export(tmp_path: Path) -> Path:
    training(tmp_path / "t.sqlite", None, steps=2)
    return tmp_path / "t.sqlite"


# -- programs in place of tables ----------------------------------------------------------------------------------

ENDLESS = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT x AS start, x AS end FROM r"
#: The numbers from 1 to 300,000.
NUMBERS = "r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r WHERE x < 300000)"
COMPUTED = "CREATE TABLE TARGET_INFO_GPU (id INTEGER, name AS (hex(zeroblob(id))))"
STRINGS = "CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)"
PROGRAMS = {
    "endless view": [STRINGS, f"CREATE VIEW {KERNELS} AS {ENDLESS}"],
    "view of strings": [
        PLAIN,
        f"CREATE VIEW StringIds AS SELECT start AS id, hex(zeroblob(1e9)) AS value FROM ({ENDLESS})",
    ],
    "view of details": [PLAIN, f"CREATE VIEW TARGET_INFO_GPU AS SELECT start AS id, 'x' AS name FROM ({ENDLESS})"],
    "virtual table": [PLAIN, "CREATE VIRTUAL TABLE StringIds USING fts5(id, value)"],
    "computed column": [
        PLAIN,
        "CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT)",
        "INSERT INTO TARGET_INFO_GPU VALUES (400000000, ''), (400000001, ''), (400000002, ''), (400000003, '')",
        "PRAGMA writable_schema = ON",
        f"UPDATE sqlite_master SET sql = '{COMPUTED}' WHERE name = 'TARGET_INFO_GPU'",
    ],
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_what_sqlite_would_have_to_run_is_refused(tmp_path, kind):
    try:
        path = database(tmp_path / "t.sqlite", *PROGRAMS[kind])
    except sqlite3.OperationalError as error:
        pytest.skip(f"this SQLite has no such module ({error})")
    told = outcome(path)
    assert f"{path}: has a " in told
    assert "in place of the table" in told


@pytest.mark.parametrize("sql", [f"CREATE VIEW {KERNELS} AS {ENDLESS}", f"CREATE TABLE hidden AS {ENDLESS}"])
def test_the_schema_does_not_tell_what_a_view_is(tmp_path, sql):
    change = f"UPDATE sqlite_master SET sql = '{sql}' WHERE name = '{KERNELS}'"
    path = database(tmp_path / "t.sqlite", STRINGS, PLAIN, "PRAGMA writable_schema = ON", change)
    assert str(path) in outcome(path)


# -- pages that SQLite never wrote ----------------------------------------------------------------------------------


def schema(*tables: tuple[str, int, str], page_size: int) -> bytes:
    """The first page, of (name, root page, SQL)."""
    rows = [record("table", name, name, root, sql) for name, root, sql in tables]
    return leaf([cell(number + 1, row) for number, row in enumerate(rows)], page_size, header=100)


def default_of_a_column(path: Path) -> Path:
    """Rows without a column that has a long default."""
    return database(
        path,
        PLAIN,
        f"INSERT INTO {KERNELS} VALUES (1, 2)",
        "CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER)",
        f"INSERT INTO NVTX_EVENTS SELECT 1, 2, 59 FROM ({ENDLESS} LIMIT 30000)",
        f"ALTER TABLE NVTX_EVENTS ADD COLUMN text TEXT DEFAULT '{'x' * 400_000}'",
        "ALTER TABLE NVTX_EVENTS ADD COLUMN textId INTEGER",
    )


def pages_used_again(path: Path, name: str, sql: str, *values: int | str) -> Path:
    """A tree of 15 levels in which each page has its one child hundreds of times: more rows than can ever be read."""
    page, levels = 4096, 15
    first = schema((name, 2, sql), page_size=page)
    tree = [interior([3 + level] * 400, page) for level in range(levels)]
    return by_hand.write(path, [first, *tree, leaf([cell(1, record(*values))], page)])


def rows_of_nothing(path: Path, shared: int) -> Path:
    """Millions of rows that are one row: a page points to it again and again."""
    page, leaves = 65536, 13
    columns = ", ".join(["start INTEGER", "end INTEGER", *(f"c{i} INTEGER" for i in range(200))])
    first = schema((KERNELS, 2, f"CREATE TABLE {KERNELS} ({columns})"), page_size=page)
    rows = leaf([cell(1, record(None, None))], page, shared=shared)
    return by_hand.write(path, [first, interior(range(3, 3 + leaves), page), *[rows] * leaves])


def endless(table: str, columns: str, *values: int | str) -> Callable[[Path], Path]:
    return lambda path: pages_used_again(path, table, f"CREATE TABLE {table} ({columns})", *values)


PAGES: dict[str, Callable[[Path], Path]] = {
    "default of a column": default_of_a_column,
    "kernels without end": endless(KERNELS, TIMES, 1, 2),
    "kernels with texts": endless(KERNELS, TIMES, "1", "2"),
    "strings without end": endless("StringIds", "id INTEGER, value TEXT", 1, "name"),
    "details without end": endless("META_DATA_EXPORT", "name TEXT, value TEXT", "name", "value"),
    "rows of nothing": lambda path: rows_of_nothing(path, 10_000),
    "more cells than fit": lambda path: rows_of_nothing(path, 32_000),
}


@pytest.mark.parametrize("kind", PAGES)
def test_pages_that_give_more_than_the_file_holds_are_refused(tmp_path, kind):
    path = PAGES[kind](tmp_path / "t.sqlite")
    assert path.stat().st_size < 1_200_000
    assert str(path) in outcome(path)


def test_text_behind_many_integers_is_refused(tmp_path):
    """ADBC takes a column's type from its first rows."""
    rows = f"INSERT INTO {KERNELS} SELECT x, x + 1 FROM (WITH RECURSIVE {NUMBERS} SELECT x FROM r)"
    path = database(tmp_path / "t.sqlite", PLAIN, rows, f"UPDATE {KERNELS} SET end = 'soon' WHERE rowid > 290000")
    assert "Type mismatch" in outcome(path)


def test_reading_ends_after_a_time(export, monkeypatch):
    monkeypatch.setattr(nsys_tables, "_SECONDS", -1e6)
    with pytest.raises(nsightkit.TraceError, match="takes too long to read"):
        nsightkit.load(export)["kernels"]


# -- what cells hold ----------------------------------------------------------------------------------------------


def test_details_of_any_type_and_length(export):
    values = """
        (0, replace(hex(zeroblob(500000)), '00', 'A100 '), 4611686018427387904, 'many', 1.5, NULL),
        ('first', 'no number', 0, 0, 0, 0), (2, CAST(x'fffe' AS TEXT), -5, 108, 8, 0)"""
    columns = "id, name, totalMemory, smCount, computeMajor, computeMinor"
    database(
        export,
        "DELETE FROM TARGET_INFO_GPU",
        f"INSERT INTO TARGET_INFO_GPU ({columns}) VALUES {values}",
        "UPDATE META_DATA_EXPORT SET value = 2024 WHERE name = 'EXPORT_PRODUCT_VERSION'",
        "UPDATE META_DATA_EXPORT SET value = zeroblob(1000000) WHERE name = 'EXPORT_SCHEMA_VERSION'",
        "CREATE TABLE ANALYSIS_DETAILS (startTime, stopTime)",
        "INSERT INTO ANALYSIS_DETAILS VALUES (-9223372036854775808, 9223372036854775807)",
    )
    meta = nsightkit.load(export).meta
    assert meta.gpus == [Gpu(0, "A100 " * 40, None), Gpu(2, "\ufffd\ufffd", "8.0")]
    assert meta.tool_version == "2024"
    assert meta.schema is None or len(meta.schema) <= 200
    assert meta.window_ns is None


def test_a_name_of_megabytes_is_cut(export):
    database(
        export,
        "UPDATE StringIds SET value = value || hex(zeroblob(400000))",
        "UPDATE NVTX_EVENTS SET text = hex(zeroblob(400000)), textId = NULL WHERE rowid = 1",
    )
    trace = nsightkit.load(export)
    for table in ("kernels", "ranges"):
        assert max(map(len, trace[table]["name"].cat.categories)) == 1 << 16


@pytest.mark.parametrize("column", ["deviceId", "gridX", "registersPerThread"])
def test_a_number_beyond_32_bits_is_not_another_number(export, column):
    database(export, f"UPDATE {KERNELS} SET {column} = 4294967297 WHERE rowid = 5")
    with pytest.raises(nsightkit.TraceError, match="holds int64 where int32 is expected"):
        nsightkit.load(export)["kernels"]


# -- folders of Parquet -------------------------------------------------------------------------------------------


def parquet_folder(folder: Path, **tables: pa.Table) -> Path:
    folder.mkdir()
    kernels = pa.table({"start": [1, 2], "end": [2, 3], "demangledName": [1, 2]})
    for name, table in ({KERNELS: kernels} | tables).items():
        pq.write_table(table, folder / f"{name}.parquet", compression="zstd")
    return folder


def test_a_folder_of_parquet_that_unpacks_to_gigabytes(tmp_path):
    same = pa.array(["x" * 1_000_000]).dictionary_encode()
    indices = pa.array(np.zeros(3000, np.int32))
    value = pa.DictionaryArray.from_arrays(indices, same.dictionary)
    folder = parquet_folder(tmp_path / "f", StringIds=pa.table({"id": np.arange(3000), "value": value}))
    assert sum(file.stat().st_size for file in folder.iterdir()) < 100_000
    assert not outcome(folder)


@pytest.mark.parametrize("table", [KERNELS, "StringIds", "META_DATA_EXPORT"])
def test_a_fifo_in_a_folder_of_parquet_is_not_opened(tmp_path, table):
    folder = parquet_folder(tmp_path / "f")
    (folder / f"{table}.parquet").unlink(missing_ok=True)
    os.mkfifo(folder / f"{table}.parquet")
    assert "is not a regular file" in outcome(folder)


def test_a_fifo_is_no_database(tmp_path):
    os.mkfifo(tmp_path / "t.sqlite")
    with pytest.raises(nsightkit.TraceError, match="is not a regular file"):
        nsys.open_sqlite(tmp_path / "t.sqlite")


# -- reports --------------------------------------------------------------------------------------------------------


@pytest.fixture
def report(tmp_path, monkeypatch):
    """A report in a new folder, and an nsys that exports any report as the same trace and counts its calls."""
    (tmp_path / "bin").mkdir()
    training(tmp_path / "export.sqlite", None, steps=2)
    script = f'echo "$8" >> "{tmp_path}/calls"; cp "{tmp_path}/export.sqlite" "$7"'
    monkeypatch.setenv("NSIGHTKIT_NSYS", str(stand_in_nsight.nsys(tmp_path / "bin", script)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "runs").mkdir()
    path = tmp_path / "runs" / "train.nsys-rep"
    path.write_bytes(b"a report")
    return path


def calls(report: Path) -> int:
    told = report.parents[1] / "calls"
    return len(told.read_text().splitlines()) if told.exists() else 0


def files(folder: Path) -> list[tuple[str, bytes, int]]:
    return [(file.name, file.read_bytes(), file.stat().st_mtime_ns) for file in sorted(folder.iterdir())]


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize(
    ("content", "age", "exports"),
    [("my notes", -1, 1), ("my notes", 1, 1), ("another database", -1, 1), ("export", -1, 1), ("export", 1, 0)],
)
def test_a_users_own_file_beside_a_report_is_never_replaced(report, cache, content, age, exports):
    own = report.with_suffix(".sqlite")
    if content == "export":
        own.write_bytes((report.parents[1] / "export.sqlite").read_bytes())
    else:
        own.write_bytes({"my notes": b"my notes"}.get(content, b"SQLite format 3\0 of something else"))
    moment = report.stat().st_mtime_ns + age * 10**9
    os.utime(own, ns=(moment, moment))
    before = files(report.parent)
    assert nsightkit.load(report, cache=cache).size("kernels")
    assert calls(report) == exports
    assert files(report.parent) == before


def test_a_report_is_exported_once_for_each_of_its_contents(report):
    for _ in range(3):
        assert nsightkit.load(report).size("kernels")
    assert calls(report) == 1
    os.utime(report, ns=(5, 5))  # older than its export, and still another one
    assert nsightkit.load(report).size("kernels")
    assert calls(report) == 2
    written = report.stat().st_mtime_ns
    report.write_bytes(b"a longer report")
    os.utime(report, ns=(written, written))
    assert nsightkit.load(report).size("kernels")
    assert calls(report) == 3
    assert [path.name for path in report.parent.iterdir()] == [report.name]
    exports = report.parents[1] / "cache" / "nsightkit" / "exports"
    assert exports.stat().st_mode & 0o777 == 0o700
    assert len(list(exports.glob("*.sqlite"))) == 1


@pytest.mark.parametrize("how", ["argument", "variable", "no cache folder"])
def test_without_a_cache_an_export_goes_with_its_trace(report, monkeypatch, how):
    temporary = report.parents[1] / "temporary"
    if how == "variable":
        monkeypatch.setenv("NSIGHTKIT_NO_CACHE", "1")
    if how == "no cache folder":
        (report.parents[1] / "cache").write_bytes(b"a file")
    trace = nsightkit.load(report, cache=False if how == "argument" else None)
    assert trace.size("kernels")
    assert len(list(temporary.iterdir())) == 1
    assert next(temporary.iterdir()).stat().st_mode & 0o777 == 0o700
    del trace
    gc.collect()
    assert not list(temporary.iterdir())
    assert not (report.parents[1] / "cache").is_dir()
    assert [path.name for path in report.parent.iterdir()] == [report.name]


def test_a_link_in_place_of_the_kept_export_is_not_followed(report):
    nsightkit.load(report)
    (kept,) = (report.parents[1] / "cache" / "nsightkit" / "exports").glob("*.sqlite")
    precious = report.parents[1] / "precious.sqlite"
    precious.write_bytes(kept.read_bytes())
    kept.unlink()
    kept.symlink_to(precious)
    before = precious.read_bytes()
    assert nsightkit.load(report).size("kernels")
    assert calls(report) == 2
    assert not kept.is_symlink()
    assert precious.read_bytes() == before


def test_exports_in_a_folder_that_others_may_write_to_are_not_trusted(report):
    exports = report.parents[1] / "cache" / "nsightkit" / "exports"
    exports.mkdir(parents=True)
    exports.chmod(0o777)
    assert nsightkit.load(report).size("kernels")
    assert not list(exports.iterdir())
