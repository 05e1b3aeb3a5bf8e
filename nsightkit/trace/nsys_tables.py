"""The tables of an Nsight Systems export, which may be anybody's: an SQLite database or a folder of Parquet files.

Columns of integers go through ADBC or Parquet straight into numpy arrays, because ``pandas.read_sql`` takes ten times
the CPU time for 5 million kernels.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import sqlite3
import time
import urllib.parse
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from nsightkit.errors import TraceError, reading
from nsightkit.safe import Json
from nsightkit.trace.files import require_regular

if TYPE_CHECKING:
    from nsightkit.trace.programs import Export

__all__ = ["EXPORT_AGAIN", "NULL", "ParquetDir", "Sqlite", "Tables"]

Array = npt.NDArray[Any]
Columns = dict[str, Array]

EXPORT_AGAIN = "export the report with nsys export --type sqlite"
#: How a NULL among integers is given.
NULL = np.iinfo(np.int64).min

#: Rows that a table of details may have, and bytes of a text that are kept.
_MOST_RECORDS = 1 << 18
_TEXT_BYTES = 1 << 16

#: How SQLite spells an ordinary table in its schema; the declared type may be false.
_PLAIN_TABLE = re.compile(r"""CREATE TABLE (["'`]?)(\w+)\1\s*\(""", re.ASCII)
#: Before anything is read: nothing of the schema runs, nothing is written, damaged pages are errors.
_CAREFUL = ("trusted_schema = OFF", "query_only = ON", "cell_size_check = ON", "mmap_size = 0")
#: CPU time that reading a table may take: so many seconds, and a second for so many bytes of the file.
_SECONDS = 4.0
_BYTES_PER_SECOND = 5 << 20
#: Steps of SQLite between two looks at the time.
_STEPS = 10_000
#: A value may be this much longer than the file: SQL and what is bound to it count, too.
_VALUE_BYTES = 16 << 20
#: Rows that ADBC gives at a time. It takes the columns' types from the first of them.
_BATCH_ROWS = 4096


#: The rows of a table with some integers in a column (`column`, `numbers`), or with any others (`others`).
Rows: TypeAlias = Mapping[str, Any]


class Sqlite:
    """An export in SQLite: only plain tables are read, and no more of them than the file can hold.

    SQLite would run views, virtual tables and computed columns. And it trusts the file: crafted pages can give the same
    rows without end, or one long text for every row. But no two rows share bytes in a file that SQLite wrote, so
    rows and bytes beyond the file's size are an error, and so is reading for longer than any file of its size takes.
    Identifiers come from constants of this package and are quoted.

    Parameters
    ----------
    path : Path
    read : collection of str
        Tables that have to be plain ones; others are not looked at.
    export : Export, optional
        Of a report, held as long as this is: a temporary one goes with it.
    """

    def __init__(self, path: Path, read: Collection[str], export: Export | None = None) -> None:
        _require_settled(path)
        self.path = path
        self.tables: dict[str, list[str]] = {}  # columns by table
        self._export = export
        # Immutable: SQLite would look for journals and create files.
        self._uri = f"file:{urllib.parse.quote(str(path.resolve()))}?mode=ro&immutable=1"
        self._size = path.stat().st_size
        with self._connected() as connection:
            schema = _query("sqlite_master", ["type", "name", "sql"])
            for kind, name, sql in self._rows(connection, "sqlite_master", schema):
                if kind not in (b"table", b"view"):
                    continue
                table = _decoded(name)
                problem = self._learn(connection, table, _decoded(sql))
                if problem and table in read:
                    raise TraceError(self.path, f"has a {problem} in place of the table {table}", EXPORT_AGAIN)

    def _learn(self, connection: sqlite3.Connection, table: str, sql: str) -> str:
        """Note a table's columns, if it is a plain one; else give what it is."""
        plain = _PLAIN_TABLE.match(sql)
        if not plain or plain[2] != table:
            return "view or a virtual table"
        columns = connection.execute(f"PRAGMA table_xinfo({_quoted(table)})").fetchall()
        if any(hidden for *_, hidden in columns):
            return "table with computed columns"
        self.tables[table] = [_decoded(name) for _, name, *_ in columns]
        return ""

    def records(self, table: str) -> list[Json]:
        """Give a small table's rows; none where it is absent."""
        names = self.tables.get(table)
        if not names:
            return []
        records: list[Json] = []
        for row in self._select(table, map(_quoted, names)):
            _require_few(self.path, len(records))
            texts = [_decoded(value) if isinstance(value, bytes) else value for value in row]
            records.append(dict(zip(names, texts, strict=True)))
        return records

    def first(self, table: str, rows: Rows | None = None) -> int | None:
        """Give the least start of a table, or of some of its rows; None without rows."""
        first: int | None
        ((first,),) = self._select(table, ["min(start)"], rows)
        return first

    def integers(self, table: str, columns: Sequence[str], rows: Rows | None = None) -> Columns:
        """Give integer columns, NULL as :data:`NULL`."""
        from adbc_driver_sqlite import dbapi

        self._require_integers(table, columns)
        # Rows are numbered from 1, and each has its length and the type of each column. Memory takes the pages that
        # are filled.
        ((last,),) = self._select(table, ["max(rowid)"])
        space = min(last or 0, self._size // (len(self.tables[table]) + 1))
        found = {column: np.empty(space, np.int64) for column in columns}
        deadline = self._deadline()
        filled = 0
        with self._guard(), dbapi.connect(self._uri, autocommit=True) as connection, connection.cursor() as cursor:
            for pragma in _CAREFUL:
                cursor.execute(f"PRAGMA {pragma}")
            cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": _BATCH_ROWS})
            cursor.execute(_query(table, map(_quoted, columns), rows))
            for batch in cursor.fetch_record_batch():
                if time.thread_time() > deadline:
                    raise TraceError(self.path, f"has a damaged table {table}: it takes too long to read", EXPORT_AGAIN)
                place = slice(filled, filled + len(batch))
                filled += len(batch)
                self._require_possible(table, filled <= space)
                for values, part in zip(found.values(), batch.columns, strict=True):
                    values[place] = _as_int64(part)
        return {column: values[:filled] for column, values in found.items()}

    def texts(self, table: str, key: str, column: str, wanted: Collection[int]) -> tuple[list[int], list[str]]:
        """Give key and text, NULL as "", of the rows with a wanted key. Long texts are cut."""
        numbers = []
        texts = []
        known: dict[bytes | None, str] = {}  # so that equal texts are one object
        expressions = [_quoted(key), f"substr(CAST({_quoted(column)} AS BLOB), 1, {_TEXT_BYTES})"]
        for number, raw in self._select(table, expressions):
            if number in wanted:
                numbers.append(number)
                texts.append(known.setdefault(raw, _decoded(raw)))
        return numbers, texts

    def _guard(self) -> contextlib.AbstractContextManager[None]:
        remedy = "copy it again, or export it again with nsys export --type sqlite"
        return reading(self.path, "is damaged or is not an Nsight Systems export", remedy)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """A connection that gives up on what is too long or takes too long for a file of this size."""
        deadline = self._deadline()
        with self._guard(), contextlib.closing(sqlite3.connect(self._uri, uri=True)) as connection:
            connection.text_factory = bytes
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, min(_VALUE_BYTES + self._size, 2**31 - 1))
            connection.set_progress_handler(lambda: time.thread_time() > deadline, _STEPS)
            try:
                for pragma in _CAREFUL:
                    connection.execute(f"PRAGMA {pragma}")
                yield connection
            except sqlite3.OperationalError as error:
                if time.thread_time() <= deadline:
                    raise
                # SQLite calls it "interrupted".
                raise TraceError(self.path, "is damaged: it takes too long to read", EXPORT_AGAIN) from error

    def _select(self, table: str, expressions: Iterable[str], rows: Rows | None = None) -> Iterator[tuple[Any, ...]]:
        """Rows of a table, with texts as bytes."""
        with self._connected() as connection:
            yield from self._rows(connection, table, _query(table, expressions, rows))

    def _rows(self, connection: sqlite3.Connection, table: str, query: str) -> Iterator[tuple[Any, ...]]:
        held_bytes = 0
        for row in connection.execute(query):
            held_bytes += len(row)
            for value in row:
                if isinstance(value, bytes):
                    held_bytes += len(value)
            self._require_possible(table, held_bytes <= self._size)
            yield row

    def _require_integers(self, table: str, columns: Sequence[str]) -> None:
        """Refuse anything else than integers in the first rows.

        ADBC would make a column of texts of any length of them. In later rows they are an error.
        """
        types = [f"typeof({_quoted(column)}) NOT IN ('integer', 'null')" for column in columns]
        for row in itertools.islice(self._select(table, types), _BATCH_ROWS):
            if any(row):
                problem = f"has a table {table} with text or fractions in place of integers"
                raise TraceError(self.path, problem, EXPORT_AGAIN)

    def _require_possible(self, table: str, is_possible: bool) -> None:
        if not is_possible:
            problem = f"has a damaged table {table}: it gives more than the {self._size:,} bytes of the file"
            raise TraceError(self.path, problem, EXPORT_AGAIN)

    def _deadline(self) -> float:
        return time.thread_time() + _SECONDS + self._size / _BYTES_PER_SECOND


class ParquetDir:
    """An export as a folder of Parquet files (``nsys export --type parquetdir``), one a table."""

    def __init__(self, path: Path, read: Collection[str]) -> None:
        from nsightkit.trace.parquet import columns_of

        self.path = path
        files = [file for file in path.glob("*.parquet") if file.stem in read]
        self.tables = {file.stem: columns for file, columns in columns_of(files).items()}  # columns by table

    def records(self, table: str) -> list[Json]:
        """Give a small table's rows; none where it is absent."""
        if table not in self.tables:
            return []
        rows = self._table(table, list(self.tables[table]))
        _require_few(self.path, len(rows))
        return list(rows.to_pylist())

    def first(self, table: str, rows: Rows | None = None) -> int | None:
        """Give the least start of a table, or of some of its rows; None without rows."""
        starts = self.integers(table, ["start"], rows)["start"]
        if len(starts):
            return int(starts.min())
        return None

    def integers(self, table: str, columns: Sequence[str], rows: Rows | None = None) -> Columns:
        """Give integer columns, NULL as :data:`NULL`."""
        wanted = columns
        if rows:
            wanted = [*columns, rows["column"]]
        read = self._table(table, list(dict.fromkeys(wanted)))
        with self._guard(table):
            found = {column: _as_int64(read[column]) for column in read.column_names}
        if rows:
            chosen = np.isin(found[rows["column"]], rows["numbers"], invert=rows.get("others", False))
            return {column: found[column][chosen] for column in columns}
        return found

    def texts(self, table: str, key: str, column: str, wanted: Collection[int]) -> tuple[list[int], list[str]]:
        """Give key and text, NULL as "", of the rows with a wanted key. Long texts are cut."""
        read = self._table(table, [key, column])
        read = read.filter(pa.array(np.isin(_as_int64(read[key]), np.array(list(wanted), np.int64))))
        coded = read[column].cast(pa.dictionary(pa.int32(), pa.binary())).to_pandas()
        known = [_decoded(text[:_TEXT_BYTES]) for text in coded.cat.categories]
        known.append("")  # of NULL, whose code is -1
        return read[key].to_pylist(), [known[code] for code in coded.cat.codes]

    def _table(self, table: str, columns: list[str]) -> pa.Table:
        from nsightkit.trace.parquet import read_table

        with self._guard(table):
            return read_table(self.path / f"{table}.parquet", {name: self.tables[table][name] for name in columns})

    def _guard(self, table: str) -> contextlib.AbstractContextManager[None]:
        remedy = "export it again with nsys export --type parquetdir"
        return reading(self.path / f"{table}.parquet", "is not a readable Parquet table", remedy)


#: An export of either form.
Tables: TypeAlias = Sqlite | ParquetDir


def _require_settled(path: Path) -> None:
    """Refuse a truncated or unfinished database: SQLite may read it without an error, and without its last rows."""
    require_regular(path)
    with path.open("rb") as stream:
        head = stream.read(100)
    page_bytes = int.from_bytes(head[16:18], "big")
    if page_bytes == 1:
        page_bytes = 65536
    whole_bytes = max(100, int.from_bytes(head[28:32], "big") * page_bytes)
    size_bytes = path.stat().st_size
    if size_bytes < whole_bytes:
        problem = f"is truncated ({size_bytes:,} of {whole_bytes:,} bytes)"
        raise TraceError(path, problem, "copy it again, or export it again with nsys export --type sqlite")
    for suffix in ("-wal", "-journal"):
        # To take it in would write beside the trace, and a journal may name files for SQLite to delete.
        journal = Path(f"{path.resolve()}{suffix}")
        if journal.is_file() and journal.stat().st_size:
            problem = f"has changes in {journal.name} that are not in the file yet"
            raise TraceError(path, problem, "close the program that writes it, or export it again")


def _require_few(path: Path, rows: int) -> None:
    """Refuse a table of details that has more rows than any export."""
    if rows >= _MOST_RECORDS:
        raise TraceError(path, f"has a table of details with over {_MOST_RECORDS:,} rows", EXPORT_AGAIN)


def _query(table: str, expressions: Iterable[str], rows: Rows | None = None) -> str:
    # An index has another order than the rows.
    query = f"SELECT {', '.join(expressions)} FROM {_quoted(table)} NOT INDEXED"  # noqa: S608
    if rows:
        among = "IN"
        if rows.get("others"):
            among = "NOT IN"
        query += f" WHERE {_quoted(rows['column'])} {among} ({', '.join(map(str, rows['numbers']))})"
    return query


def _quoted(identifier: str) -> str:
    return '"' + identifier.replace('"', '""') + '"'


def _decoded(raw: bytes | None) -> str:
    # Real exports hold non-UTF-8 bytes in TEXT columns.
    return (raw or b"").decode("utf-8", "replace")


def _as_int64(column: pa.Array | pa.ChunkedArray) -> Array:
    """An Arrow column as int64, NULL as :data:`NULL`."""
    # Numbers that do not fit are wrong anyway; a text is refused.
    is_safe = not (pa.types.is_temporal(column.type) or pa.types.is_unsigned_integer(column.type))
    numbers = column if column.type == pa.int64() else column.cast(pa.int64(), safe=is_safe)
    if numbers.null_count:
        numbers = numbers.fill_null(int(NULL))
    return np.asarray(numbers)
