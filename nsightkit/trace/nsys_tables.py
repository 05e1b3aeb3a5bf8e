"""Read the tables of an Nsight Systems export, which anybody may have written: SQLite, or a folder of Parquet files.

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

from nsightkit.errors import TraceError, reading, require_regular
from nsightkit.text import Json

if TYPE_CHECKING:
    from nsightkit.trace.programs import Export

Array = npt.NDArray[Any]
Columns = dict[str, Array]

EXPORT_AGAIN = "export the report with nsys export --type sqlite"
#: The integer that stands for NULL in a column of integers.
NULL = np.iinfo(np.int64).min

#: More rows than a table of details has in any export.
_MOST_RECORDS = 250_000
#: What is kept of a long text.
_MOST_TEXT_BYTES = 65_536

#: How SQLite spells an ordinary table in its schema; the declared type may be false.
_PLAIN_TABLE = re.compile(r"""CREATE TABLE (["'`]?)(\w+)\1\s*\(""", re.ASCII)
#: Set before anything is read: nothing of the schema runs, nothing is written, damaged pages are errors.
_PRAGMAS_FOR_UNTRUSTED = ("trusted_schema = OFF", "query_only = ON", "cell_size_check = ON", "mmap_size = 0")
#: CPU time that reading a table may take: so many seconds, and a second for so many bytes of the file.
_SECONDS = 4.0
_BYTES_PER_SECOND = 5_000_000
#: Steps of SQLite's virtual machine between two checks of the deadline.
_STEPS_BETWEEN_CHECKS = 10_000
#: By how much SQLite's limit of lengths exceeds the file's size: the limit also holds for the text of a query.
_VALUE_MARGIN_BYTES = 16_000_000
#: Rows that ADBC gives at a time. It takes the columns' types from the first of them.
_BATCH_ROWS = 4096


#: Which rows of a table to read: those whose ``column`` holds one of the integers ``numbers`` or, if ``others`` is set,
#: an integer that is none of them. The schema (nsys.toml) gives them; a row without a value is left out either way.
RowFilter: TypeAlias = Mapping[str, Any]


class Sqlite:
    """An export in SQLite: only plain tables are read, and no more of them than the file can hold.

    SQLite would run the code of views, virtual tables and computed columns. And it trusts the file: crafted pages can
    repeat the same rows without end, or one long text in every row. But no two rows share bytes in a file that SQLite
    wrote, so rows and bytes beyond the file's size are an error, and so is reading for longer than any file of its size
    takes. Identifiers come from constants of this package and are quoted.

    Parameters
    ----------
    path : Path
    read : collection of str
        Tables that will be read. Each must be a plain table or be absent.
    export : Export, optional
        The export, if it was made of a report: this object holds it, because a temporary export is removed with the
        last reference to it.
    """

    def __init__(self, path: Path, read: Collection[str], export: Export | None = None) -> None:
        _require_finished_database(path)
        self.path = path
        self.tables: dict[str, list[str]] = {}  # columns by table
        self._export = export  # only kept alive: a temporary export is removed with its last reference
        # Immutable: SQLite would look for journals and create files.
        self._uri = f"file:{urllib.parse.quote(str(path.resolve()))}?mode=ro&immutable=1"
        self._file_bytes = path.stat().st_size
        with self._open_connection() as connection:
            schema = _select_query("sqlite_master", ["type", "name", "sql"])
            for kind, name, sql in self._rows_that_fit(connection, "sqlite_master", schema):
                if kind not in (b"table", b"view"):  # indexes and triggers
                    continue
                table = _decoded(name)
                problem = self._note_columns(connection, table, _decoded(sql))
                if problem and table in read:
                    raise TraceError(self.path, f"has a {problem} in place of the table {table}", EXPORT_AGAIN)

    def _note_columns(self, connection: sqlite3.Connection, table: str, sql: str) -> str:
        """Note the columns of a plain table in `tables` and return ""; else return what the table is.

        nsys writes plain tables only. In a forged file views and computed columns would run expressions of its author.
        """
        plain = _PLAIN_TABLE.match(sql)
        if not plain or plain[2] != table:
            return "view or a virtual table"
        # A row for each column: position, name, type, not null, default, primary key, hidden.
        columns = connection.execute(f"PRAGMA table_xinfo({_quoted(table)})").fetchall()
        if any(hidden for *_, hidden in columns):
            return "table with computed columns"
        self.tables[table] = [_decoded(name) for _, name, *_ in columns]
        return ""

    def records(self, table: str) -> list[Json]:
        """Read a small table's rows; none where it is absent."""
        names = self.tables.get(table)
        if not names:
            return []
        records: list[Json] = []
        for row in self._select_rows(table, map(_quoted, names)):
            _require_few(self.path, len(records))
            texts = [_decoded(value) if isinstance(value, bytes) else value for value in row]
            records.append(dict(zip(names, texts, strict=True)))
        return records

    def least_start(self, table: str, rows: RowFilter | None = None) -> int | None:
        """Find the least start of a table, or of some of its rows; None without rows."""
        least_start: int | None
        ((least_start,),) = self._select_rows(table, ["min(start)"], rows)
        return least_start

    def integers(self, table: str, columns: Sequence[str], rows: RowFilter | None = None) -> Columns:
        """Read integer columns, NULL as :data:`NULL`."""
        from adbc_driver_sqlite import dbapi

        self._require_integer_types(table, columns)
        # The most rows the file can hold: they are numbered from 1, and each takes at least a byte for its length and
        # one for the type of each column. Of arrays that are too long, only the pages that are filled take memory.
        ((last_row,),) = self._select_rows(table, ["max(rowid)"])
        most_rows = min(last_row or 0, self._file_bytes // (len(self.tables[table]) + 1))
        integers = {column: np.empty(most_rows, np.int64) for column in columns}
        deadline = self._deadline()
        row_count = 0
        with (
            self._errors_name_file(),
            dbapi.connect(self._uri, autocommit=True) as connection,
            connection.cursor() as cursor,
        ):
            for pragma in _PRAGMAS_FOR_UNTRUSTED:
                cursor.execute(f"PRAGMA {pragma}")
            cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": _BATCH_ROWS})
            cursor.execute(_select_query(table, map(_quoted, columns), rows))
            for batch in cursor.fetch_record_batch():
                if time.thread_time() > deadline:
                    raise TraceError(self.path, f"has a damaged table {table}: it takes too long to read", EXPORT_AGAIN)
                batch_rows = slice(row_count, row_count + len(batch))
                row_count += len(batch)
                self._require_possible(table, row_count <= most_rows)
                for values, part in zip(integers.values(), batch.columns, strict=True):
                    values[batch_rows] = _as_int64(part)
        return {column: values[:row_count] for column, values in integers.items()}

    def texts(self, table: str, key: str, column: str, wanted: Collection[int]) -> tuple[list[int], list[str]]:
        """Return keys and texts, NULL as "", of the rows with a wanted key. Long texts are cut.

        The filter runs here, as there may be too many keys for a query.
        """
        keys = []
        texts = []
        decoded: dict[bytes | None, str] = {}  # so that equal texts are one object
        expressions = [_quoted(key), f"substr(CAST({_quoted(column)} AS BLOB), 1, {_MOST_TEXT_BYTES})"]
        for number, raw in self._select_rows(table, expressions):
            if number in wanted:
                keys.append(number)
                texts.append(decoded.setdefault(raw, _decoded(raw)))
        return keys, texts

    def _errors_name_file(self) -> contextlib.AbstractContextManager[None]:
        """Turn SQLite's and ADBC's exceptions into a TraceError that names the file."""
        remedy = "copy it again, or export it again with nsys export --type sqlite"
        return reading(self.path, "is damaged or is not an Nsight Systems export", remedy)

    @contextlib.contextmanager
    def _open_connection(self) -> Iterator[sqlite3.Connection]:
        """Open a connection that refuses values too long for a file of this size, and queries that take too long."""
        deadline = self._deadline()
        with self._errors_name_file(), contextlib.closing(sqlite3.connect(self._uri, uri=True)) as connection:
            connection.text_factory = bytes  # texts need not be UTF-8; `_decoded` replaces what is not
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, min(_VALUE_MARGIN_BYTES + self._file_bytes, 2**31 - 1))
            connection.set_progress_handler(lambda: time.thread_time() > deadline, _STEPS_BETWEEN_CHECKS)
            try:
                for pragma in _PRAGMAS_FOR_UNTRUSTED:
                    connection.execute(f"PRAGMA {pragma}")
                yield connection
            except sqlite3.OperationalError as error:
                if time.thread_time() <= deadline:
                    raise
                # The progress handler ended the query, which SQLite only calls "interrupted".
                raise TraceError(self.path, "is damaged: it takes too long to read", EXPORT_AGAIN) from error

    def _select_rows(
        self, table: str, expressions: Iterable[str], rows: RowFilter | None = None
    ) -> Iterator[tuple[Any, ...]]:
        """Yield rows of a table, with texts as bytes."""
        with self._open_connection() as connection:
            yield from self._rows_that_fit(connection, table, _select_query(table, expressions, rows))

    def _rows_that_fit(self, connection: sqlite3.Connection, table: str, query: str) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query; an error where they need more bytes than the file has.

        Each value takes a byte at least, and a text as many as its length.
        """
        needed_bytes = 0
        for row in connection.execute(query):
            needed_bytes += len(row)
            for value in row:
                if isinstance(value, bytes):
                    needed_bytes += len(value)
            self._require_possible(table, needed_bytes <= self._file_bytes)
            yield row

    def _require_integer_types(self, table: str, columns: Sequence[str]) -> None:
        """Refuse texts and fractions in the first rows, from which ADBC takes a column's type.

        With one there, ADBC would read the whole column as texts, of any length. In later rows it refuses them itself.
        """
        types = [f"typeof({_quoted(column)}) NOT IN ('integer', 'null')" for column in columns]
        for has_other_type in itertools.islice(self._select_rows(table, types), _BATCH_ROWS):
            if any(has_other_type):
                problem = f"has a table {table} with text or fractions in place of integers"
                raise TraceError(self.path, problem, EXPORT_AGAIN)

    def _require_possible(self, table: str, is_possible: bool) -> None:
        """Raise a TraceError if a table gives more than its file can hold."""
        if not is_possible:
            problem = f"has a damaged table {table}: it gives more than the {self._file_bytes:,} bytes of the file"
            raise TraceError(self.path, problem, EXPORT_AGAIN)

    def _deadline(self) -> float:
        """Return the CPU time of this thread, in seconds, by which a query that starts now must be done."""
        return time.thread_time() + _SECONDS + self._file_bytes / _BYTES_PER_SECOND


class ParquetDir:
    """An export as a folder of Parquet files (``nsys export --type parquetdir``), one a table."""

    def __init__(self, path: Path, read: Collection[str]) -> None:
        from nsightkit.trace.parquet import columns_of

        self.path = path
        # `read` names the tables that we know; the export's other files are never opened.
        files = [file for file in path.glob("*.parquet") if file.stem in read]
        self.tables = {file.stem: columns for file, columns in columns_of(files).items()}  # of each column: is it text?

    def records(self, table: str) -> list[Json]:
        """Read a small table's rows; none where it is absent."""
        if table not in self.tables:
            return []
        rows = self._read_columns(table, list(self.tables[table]))
        _require_few(self.path, len(rows))
        return list(rows.to_pylist())

    def least_start(self, table: str, rows: RowFilter | None = None) -> int | None:
        """Find the least start of a table, or of some of its rows; None without rows."""
        starts = self.integers(table, ["start"], rows)["start"]
        if len(starts):
            return int(starts.min())
        return None

    def integers(self, table: str, columns: Sequence[str], rows: RowFilter | None = None) -> Columns:
        """Read integer columns, NULL as :data:`NULL`."""
        wanted = [*columns, rows["column"]] if rows else columns
        arrow_table = self._read_columns(table, list(dict.fromkeys(wanted)))
        with self._errors_name_file(table):
            integers = {column: _as_int64(arrow_table[column]) for column in arrow_table.column_names}
        if rows:
            deciding = integers[rows["column"]]
            is_chosen = np.isin(deciding, rows["numbers"], invert=rows.get("others", False)) & (deciding != NULL)
            return {column: integers[column][is_chosen] for column in columns}
        return integers

    def texts(self, table: str, key: str, column: str, wanted: Collection[int]) -> tuple[list[int], list[str]]:
        """Return keys and texts, NULL as "", of the rows with a wanted key. Long texts are cut."""
        rows = self._read_columns(table, [key, column])
        rows = rows.filter(pa.array(np.isin(_as_int64(rows[key]), np.array(list(wanted), np.int64))))
        raw_texts = rows[column].cast(pa.dictionary(pa.int32(), pa.binary())).to_pandas()
        distinct = [_decoded(raw[:_MOST_TEXT_BYTES]) for raw in raw_texts.cat.categories]
        distinct.append("")  # the last, which the code -1 of NULL leads to
        return rows[key].to_pylist(), [distinct[code] for code in raw_texts.cat.codes]

    def _read_columns(self, table: str, columns: list[str]) -> pa.Table:
        """Read columns of one file; `tables` knows which of them hold texts."""
        from nsightkit.trace.parquet import read_table

        with self._errors_name_file(table):
            return read_table(self.path / f"{table}.parquet", {name: self.tables[table][name] for name in columns})

    def _errors_name_file(self, table: str) -> contextlib.AbstractContextManager[None]:
        """Turn pyarrow's exceptions into a TraceError that names the file."""
        remedy = "export it again with nsys export --type parquetdir"
        return reading(self.path / f"{table}.parquet", "is not a readable Parquet table", remedy)


#: An export of either form.
Tables: TypeAlias = Sqlite | ParquetDir


def _require_finished_database(path: Path) -> None:
    """Refuse a truncated or unfinished database: SQLite may read it without an error, and without its last rows."""
    require_regular(path)
    with path.open("rb") as stream:
        header = stream.read(100)  # https://sqlite.org/fileformat.html#the_database_header
    page_bytes = int.from_bytes(header[16:18], "big")
    if page_bytes == 1:  # stands for 65536, which does not fit in the field
        page_bytes = 65536
    page_count = int.from_bytes(header[28:32], "big")
    expected_bytes = max(100, page_count * page_bytes)
    file_bytes = path.stat().st_size
    if file_bytes < expected_bytes:
        problem = f"is truncated ({file_bytes:,} of {expected_bytes:,} bytes)"
        raise TraceError(path, problem, "copy it again, or export it again with nsys export --type sqlite")
    for suffix in ("-wal", "-journal"):
        # SQLite would write a journal's changes into the trace, and a journal may name files for SQLite to delete.
        journal = Path(f"{path.resolve()}{suffix}")
        if journal.is_file() and journal.stat().st_size:
            problem = f"has changes in {journal.name} that are not in the file yet"
            raise TraceError(path, problem, "close the program that writes it, or export it again")


def _require_few(path: Path, row_count: int) -> None:
    """Refuse a table of details that has more rows than in any export."""
    if row_count >= _MOST_RECORDS:
        raise TraceError(path, f"has a table of details with over {_MOST_RECORDS:,} rows", EXPORT_AGAIN)


def _select_query(table: str, expressions: Iterable[str], rows: RowFilter | None = None) -> str:
    """Write a query for some rows of a table, in the table's order."""
    # Without NOT INDEXED the rows could come in the order of an index.
    query = f"SELECT {', '.join(expressions)} FROM {_quoted(table)} NOT INDEXED"  # noqa: S608
    if rows:
        operator = "NOT IN" if rows.get("others") else "IN"
        query += f" WHERE {_quoted(rows['column'])} {operator} ({', '.join(map(str, rows['numbers']))})"
    return query


def _quoted(identifier: str) -> str:
    """Quote the name of a table or a column for SQL."""
    return '"' + identifier.replace('"', '""') + '"'


def _decoded(raw: bytes | None) -> str:
    """Decode a text, NULL as ""; real exports hold bytes that are not UTF-8."""
    return (raw or b"").decode("utf-8", "replace")


def _as_int64(column: pa.Array | pa.ChunkedArray) -> Array:
    """Convert an Arrow column to an int64 array, which may be read-only, and NULL to :data:`NULL`.

    Texts and fractions raise pyarrow's own error.
    """
    # Unsigned numbers of more than 63 bits wrap around: they are wrong anyway, and no reason to refuse the column.
    is_safe = not pa.types.is_unsigned_integer(column.type)
    numbers = column if column.type == pa.int64() else column.cast(pa.int64(), safe=is_safe)
    if numbers.null_count:
        numbers = numbers.fill_null(int(NULL))
    return np.asarray(numbers)
