"""The tables of an Nsight Systems export, which may be anybody's: an SQLite database or a folder of Parquet files.

Columns are streamed through ADBC or Parquet into numpy arrays on demand: for 5 M kernels this
takes about a tenth of the CPU time of ``pandas.read_sql``.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
import time
import urllib.parse
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from nsightkit.errors import TraceError, reading
from nsightkit.trace import parquet, programs
from nsightkit.trace.files import require_regular

__all__ = ["EXPORT_AGAIN", "NO_EVENT", "NULL", "ParquetDir", "Sqlite", "Tables"]

Array = npt.NDArray[Any]

EXPORT_AGAIN = "export the report with nsys export --type sqlite"
#: How a NULL among integers is given.
NULL = np.iinfo(np.int64).min
#: The start of no event.
NO_EVENT = np.iinfo(np.int64).max

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
_STEPS = 1000
#: A value may be this much longer than the file: SQL and what is bound to it count, too.
_VALUE_BYTES = 16 << 20
#: Rows that ADBC gives at a time, of integers and with texts. It takes the columns' types from the first of them.
_BATCH_ROWS = 4096
_TEXT_ROWS = 512


class Tables:
    """An export's tables.

    Parameters
    ----------
    path : Path
    tables : dict
        What is known about each table, by its name.
    """

    def __init__(self, path: Path, tables: dict[str, Any]) -> None:
        self.path = path
        self.tables = tables

    def columns(self, table: str) -> list[str]:
        """Give a table's columns; none where it is absent."""
        raise NotImplementedError

    def records(self, table: str) -> list[dict[str, Any]]:
        """Give a small table's rows; none where it is absent."""
        raise NotImplementedError

    def _guard(self, table: str) -> contextlib.AbstractContextManager[None]:
        """Turn the errors of a damaged file into one that names it."""
        raise NotImplementedError

    def _batches(self, table: str, integers: Sequence[str], texts: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Give columns of integers, then columns of texts, some rows at a time."""
        raise NotImplementedError

    def integers(self, table: str, columns: Sequence[str]) -> dict[str, Array]:
        """Integer columns, NULL as :data:`NULL`."""
        parts = {column: [np.empty(0, np.int64)] for column in columns}
        with self._guard(table):
            for batch in self._batches(table, columns, ()):
                for part, values in zip(parts.values(), batch.columns, strict=True):
                    part.append(_as_int64(values))
        # One by one: memory holds no column but this twice.
        return {column: np.concatenate(parts.pop(column)) for column in columns}

    def texts(self, table: str, column: str, kinds: Collection[int]) -> tuple[Array, list[str]]:
        """A text column as codes into texts, NULL as "", of the rows with these `eventType`."""
        _, codes, texts = self._chosen(table, "eventType", column, np.array(list(kinds)))
        return codes, texts

    def strings(self, ids: Array) -> dict[int, str]:
        """Texts of the string ids that have one."""
        if "StringIds" not in self.tables:
            return {}
        numbers, codes, texts = self._chosen("StringIds", "id", "value", ids)
        return dict(zip(numbers.tolist(), map(texts.__getitem__, codes.tolist()), strict=True))

    def _chosen(self, table: str, integer: str, text: str, wanted: Array) -> tuple[Array, Array, list[str]]:
        """An integer and a text of the rows with a wanted integer: numbers, codes, texts. Texts may be equal."""
        numbers = [np.empty(0, np.int64)]
        codes = [np.empty(0, np.int64)]
        texts: list[str] = []
        with self._guard(table):
            for batch in self._batches(table, [integer], [text]):
                number = _as_int64(batch.column(0))
                chosen = np.isin(number, wanted)
                column = batch.column(1).filter(pa.array(chosen))
                if not pa.types.is_dictionary(column.type):
                    column = column.cast(pa.binary()).fill_null(b"").dictionary_encode()
                numbers.append(number[chosen])
                # A NULL of a dictionary has no code: it gets that of the empty text after the batch.
                codes.append(np.asarray(column.indices.fill_null(len(column.dictionary))) + len(texts))
                shortened = pc.binary_slice(column.dictionary.cast(pa.binary()), 0, _TEXT_BYTES)
                texts += [*map(_decoded, shortened.to_pylist()), ""]
        return np.concatenate(numbers), np.concatenate(codes).astype(np.int64), texts


class Sqlite(Tables):
    """An export in SQLite: only plain tables are read, and no more of them than the file can hold.

    SQLite would run views, virtual tables and computed columns. And it trusts the file: crafted pages can give the same
    rows without end, or one long text for every row. But no two rows share bytes in a file that SQLite wrote, so
    rows and bytes beyond the file's size are an error, and so is reading for longer than any file of its size takes.
    Identifiers come from constants of this package and are quoted; values are bound.

    Parameters
    ----------
    path : Path
    read : collection of str
        Tables that have to be plain ones; others are not looked at.
    export : Export, optional
        Of a report, held as long as this is: a temporary one goes with it.
    """

    def __init__(self, path: Path, read: Collection[str], export: programs.Export | None = None) -> None:
        _require_settled(path)
        super().__init__(path, {})
        self._read = read
        self._export = export
        # Immutable: SQLite would look for journals and create files.
        self._uri = f"file:{urllib.parse.quote(str(path.resolve()))}?mode=ro&immutable=1"
        self._size = path.stat().st_size
        with self._connected("sqlite_master") as connection:
            for kind, name, sql in self._rows(connection, "sqlite_master", "SELECT type, name, sql FROM sqlite_master"):
                if kind in (b"table", b"view"):
                    self._learn(connection, _decoded(name), _decoded(sql))

    def _learn(self, connection: sqlite3.Connection, table: str, sql: str) -> None:
        """Note a table's columns, if it is a plain one; refuse one that is read and is not."""
        plain = _PLAIN_TABLE.match(sql)
        problem = "view or a virtual table"
        if plain and plain[2] == table:
            columns = connection.execute(f"PRAGMA table_xinfo({_quoted(table)})").fetchall()
            problem = "table with computed columns"
            if not any(hidden for *_, hidden in columns):
                self.tables[table] = [_decoded(name) for _, name, *_ in columns]
                return
        if table in self._read:
            raise TraceError(self.path, f"has a {problem} in place of the table {table}", EXPORT_AGAIN)

    def columns(self, table: str) -> list[str]:
        """See :class:`Tables`."""
        return list(self.tables.get(table, []))

    def records(self, table: str) -> list[dict[str, Any]]:
        """See :class:`Tables`."""
        names = self.columns(table)
        if not names:
            return []
        query = f"{_query(table, map(_quoted, names))} LIMIT {_MOST_RECORDS + 1}"
        with self._connected(table) as connection:
            rows = list(self._rows(connection, table, query))
        _require_few(self.path, len(rows))
        return [dict(zip(names, map(_decoded_text, row), strict=True)) for row in rows]

    def _guard(self, table: str) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002 - all are in one file
        remedy = "copy it again, or export it again with nsys export --type sqlite"
        return reading(self.path, "is damaged or is not an Nsight Systems export", remedy)

    @contextlib.contextmanager
    def _connected(self, table: str) -> Iterator[sqlite3.Connection]:
        """A connection that gives up on what is too long or takes too long for a file of this size."""
        deadline = self._deadline()
        with self._guard(table), contextlib.closing(sqlite3.connect(self._uri, uri=True)) as connection:
            connection.text_factory = bytes
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, min(_VALUE_BYTES + self._size, 2**31 - 1))
            connection.set_progress_handler(lambda: time.thread_time() > deadline, _STEPS)
            for pragma in _CAREFUL:
                connection.execute(f"PRAGMA {pragma}")
            yield connection

    def _rows(self, connection: sqlite3.Connection, table: str, query: str) -> Iterator[tuple[Any, ...]]:
        """Rows of a table, with texts as bytes."""
        held_bytes = 0
        for row in connection.execute(query):
            held_bytes += len(row)
            for value in row:
                if isinstance(value, bytes):
                    held_bytes += len(value)
            self._require_possible(table, held_bytes)
            yield row

    def _batches(self, table: str, integers: Sequence[str], texts: Sequence[str]) -> Iterator[pa.RecordBatch]:
        from adbc_driver_sqlite import dbapi

        self._require_integers(table, integers)
        expressions = [_quoted(column) for column in integers]
        for column in texts:
            # A blob that is never NULL: ADBC takes a column's type from its first rows, and text may be no UTF-8.
            blob = f"coalesce(CAST({_quoted(column)} AS BLOB), x'')"
            expressions.append(f"CAST(substr({blob}, 1, {_TEXT_BYTES}) AS BLOB)")
        batch_rows = _TEXT_ROWS if texts else _BATCH_ROWS
        deadline = self._deadline()
        row_bytes = len(self.tables[table]) + 1  # a row starts with its length and with the type of each column
        held_bytes = 0
        with dbapi.connect(self._uri, autocommit=True) as connection, connection.cursor() as cursor:
            for pragma in _CAREFUL:
                cursor.execute(f"PRAGMA {pragma}")
            cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": batch_rows})
            cursor.execute(_query(table, expressions))
            for batch in cursor.fetch_record_batch():
                if not len(batch):  # no rows, no types
                    continue
                held_bytes += len(batch) * row_bytes
                for text in batch.columns[len(integers) :]:
                    held_bytes += pc.sum(pc.binary_length(text)).as_py()
                self._require_possible(table, held_bytes)
                if time.thread_time() > deadline:
                    raise TraceError(self.path, f"has a damaged table {table}: it takes too long to read", EXPORT_AGAIN)
                yield batch

    def _require_integers(self, table: str, columns: Sequence[str]) -> None:
        """Refuse anything else than integers in the first rows.

        ADBC would make a column of texts of any length of them. In later rows they are an error.
        """
        if not columns:
            return
        types = [f"typeof({_quoted(column)})" for column in columns]
        with self._connected(table) as connection:
            rows = connection.execute(f"{_query(table, types)} LIMIT {_BATCH_ROWS}").fetchall()
        if not set().union(*rows).issubset((b"integer", b"null")):
            raise self._other_than_integers(table)

    def _other_than_integers(self, table: str) -> TraceError:
        return TraceError(self.path, f"has a table {table} with text or fractions in place of integers", EXPORT_AGAIN)

    def _require_possible(self, table: str, held_bytes: int) -> None:
        if held_bytes > self._size:
            problem = f"has a damaged table {table}: it gives more than the {self._size:,} bytes of the file"
            raise TraceError(self.path, problem, EXPORT_AGAIN)

    def _deadline(self) -> float:
        return time.thread_time() + _SECONDS + self._size / _BYTES_PER_SECOND


class ParquetDir(Tables):
    """An export as a folder of Parquet files (``nsys export --type parquetdir``), one a table."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, {file.stem: file for file in path.glob("*.parquet")})

    def columns(self, table: str) -> list[str]:
        """See :class:`Tables`."""
        if table not in self.tables:
            return []
        with self._guard(table):
            return parquet.schema_names(self.tables[table])

    def records(self, table: str) -> list[dict[str, Any]]:
        """See :class:`Tables`."""
        if table not in self.tables:
            return []
        with self._guard(table):
            rows = parquet.read_table(self.tables[table], self.columns(table))
            _require_few(self.tables[table], len(rows))
            return list(rows.to_pylist())

    def _guard(self, table: str) -> contextlib.AbstractContextManager[None]:
        remedy = "export it again with nsys export --type parquetdir"
        return reading(self.path / f"{table}.parquet", "is not a readable Parquet table", remedy)

    def _batches(self, table: str, integers: Sequence[str], texts: Sequence[str]) -> Iterator[pa.RecordBatch]:
        columns = [*integers, *texts]
        yield from parquet.read_table(self.tables[table], columns).to_batches()


def _require_settled(path: Path) -> None:
    """Refuse a truncated or unfinished database: SQLite may read it without an error, and without its last rows."""
    require_regular(path)
    with path.open("rb") as stream:
        head = stream.read(100)
    page_bytes = int.from_bytes(head[16:18], "big")
    whole_bytes = int.from_bytes(head[28:32], "big") * (65536 if page_bytes == 1 else page_bytes)
    is_current = head[24:28] == head[92:96]  # else an old SQLite wrote it, and the number of pages is not valid
    size_bytes = path.stat().st_size
    if len(head) < 100 or (is_current and size_bytes < whole_bytes):
        problem = f"is truncated ({size_bytes:,} of {whole_bytes:,} bytes)"
        raise TraceError(path, problem, "copy it again, or export it again with nsys export --type sqlite")
    for suffix in ("-wal", "-journal"):
        # To take it in would write beside the trace, and a journal may name files for SQLite to delete.
        journal = path.resolve().with_name(path.resolve().name + suffix)
        if journal.is_file() and journal.stat().st_size:
            problem = f"has changes in {journal.name} that are not in the file yet"
            raise TraceError(path, problem, "close the program that writes it, or export it again")


def _require_few(path: Path, rows: int) -> None:
    """Refuse a table of details that has more rows than any export."""
    if rows > _MOST_RECORDS:
        raise TraceError(path, f"has a table of details with over {_MOST_RECORDS:,} rows", EXPORT_AGAIN)


def _query(table: str, expressions: Iterable[str]) -> str:
    # An index has another order than the rows.
    return f"SELECT {', '.join(expressions)} FROM {_quoted(table)} NOT INDEXED"  # noqa: S608


def _quoted(identifier: str) -> str:
    return '"' + identifier.replace('"', '""') + '"'


def _decoded(raw: bytes | None) -> str:
    # Real exports hold non-UTF-8 bytes in TEXT columns.
    return (raw or b"").decode("utf-8", "replace")


def _decoded_text(value: Any) -> Any:
    """A cell of SQLite, with text as text."""
    return _decoded(value) if isinstance(value, bytes) else value


def _as_int64(column: pa.Array) -> Array:
    """A copy of an Arrow column as int64, NULL as :data:`NULL`."""
    # Numbers that do not fit are wrong anyway; a text is refused.
    is_safe = not (pa.types.is_temporal(column.type) or pa.types.is_unsigned_integer(column.type))
    numbers = column if column.type == pa.int64() else column.cast(pa.int64(), safe=is_safe)
    if numbers.null_count:
        numbers = numbers.fill_null(int(NULL))
    return np.array(numbers, np.int64)
