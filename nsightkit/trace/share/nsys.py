"""Copies of Nsight Systems exports without secrets: SQLite databases and folders of Parquet files.

nsys writes the whole environment of the profiled program into three tables, host and user names and paths into more,
and what the program printed as well. Here every text of every table is looked at, whatever the table is called, and the
tables whose meaning is known are treated by it: an environment's entries go whole.

A database is copied row by row into a new one. What was removed is never written, so it is in no free page and no
journal either, and nothing of the old one runs: triggers are left out.
"""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from nsightkit.errors import TraceError
from nsightkit.trace.nsys import check_complete, quoted
from nsightkit.trace.share.ledger import Ledger
from nsightkit.trace.share.secrets import PLACEHOLDER, Scrubber

__all__ = ["copy_parquetdir", "copy_sqlite", "learn_parquetdir", "learn_sqlite"]

#: Small tables of names and values; each row is looked at as a whole.
_PROPERTIES = ("TARGET_INFO_SYSTEM_ENV", "META_DATA_CAPTURE", "META_DATA_EXPORT", "EXPORT_META_DATA")
#: Columns whose texts are paths, files, programs.
_PATHS = frozenset(["filename", "filepath", "ctxswdevpath", "ctrldevpath"])
#: Columns that say which target it was, unless it is this very machine.
_STATES = frozenset(["devstatename", "statename"])
_LOCAL = "Local (CLI)"
_SERIALS = frozenset(
    ["uuid", "guid", "serial", "serialnumber", "mac", "macaddress", "gid", "nodeguid", "systemimageguid"]
)
#: Tables with a reference to a text that is a file's name, and to one that is what a program printed.
_MODULES = ("OSRT_CALLCHAINS", "SAMPLING_CALLCHAINS", "CUDA_CALLCHAINS")
_NUMBERS = ("INT", "BIGINT", "REAL", "FLOAT", "DOUBLE", "NUM", "BOOL")
_SURROGATE = re.compile("[\udc80-\udcff]")
_AGAIN = "export it again with nsys export"


class _Rows(Protocol):
    """An export's tables, as far as it takes to learn from them."""

    path: Path

    def tables(self) -> list[str]: ...

    def records(self, table: str) -> Iterator[dict[str, Any]]:
        """Rows of a small table; texts decoded."""
        ...

    def distinct(self, table: str, column: str) -> set[Any]:
        """Distinct values of a column; none if there is no such table or column."""
        ...

    def with_homes(self) -> Iterator[str]:
        """Texts of any table that may name somebody's home folder."""
        ...


# ---------------------------------------------------------------- what an export says about itself


def _property(row: Mapping[str, Any]) -> tuple[str, str]:
    name, value = row.get("name"), row.get("value")
    return ("" if name is None else str(name)), ("" if value is None else str(value))


def _meaning(table: str, name: str) -> str:
    """What a property is: ``environment``, ``host``, ``user``, ``path``, ``argument``, or ``text``."""
    upper = PLACEHOLDER.sub("", name).upper()
    last = upper.rpartition(":")[2]
    if "ENVIRON" in upper:
        return "environment"
    if last in ("HOSTNAME", "DEVICE_DISPLAY_NAME", "EXPORT_HOST", "HOST", "HOST_NAME", "MACHINEID", "SYSTEMUID"):
        return "host"
    if last in ("USER_NAME", "USERNAME", "EXPORT_USER", "USER"):
        return "user"
    if last in ("WORKING_DIR", "COMMAND", "TARGETINSTALLDIR") or "_PATH" in last or last.endswith("PATH"):
        return "path"
    if last.startswith("ARGUMENT") and table == "META_DATA_CAPTURE":
        return "argument"
    return "text"


def _learn(rows: _Rows, scrubber: Scrubber) -> None:
    for table in rows.tables():
        if table in _PROPERTIES:
            for row in rows.records(table):
                name, value = _property(row)
                meaning = _meaning(table, name)
                if meaning == "environment":
                    # A value may itself hold a separator; its rest is then no entry, and teaches nothing.
                    scrubber.learn_environment(value.replace("\x00", ";").split(";"))
                elif meaning in ("host", "user") and value != _LOCAL:
                    scrubber.learn("host" if meaning == "host" else "user", value)
                elif meaning == "path" and "WORKING" in name.upper():
                    scrubber.learn("path", value)
    for text in rows.distinct("StringIds", "value"):
        if isinstance(text, str) and "\x00" in text:
            scrubber.learn_environment(text.split("\x00"))
    for text in rows.with_homes():
        scrubber.learn_from(text)


def _clean_property(ledger: Ledger, table: str, row: dict[str, Any], flag: str) -> dict[str, Any] | None:
    """One row of a table of properties; None if it goes whole. `flag` is the argument before an argument."""
    name, value = _property(row)
    place = f"{table}.{name.rpartition(':')[2]}" if name else table
    meaning = _meaning(table, name)
    if meaning == "environment":
        ledger.note("environment", table, max(1, value.replace("\x00", ";").count(";") + 1) if value else 1)
        return None
    clean = {}
    for column, given in row.items():
        new = given
        if isinstance(given, str):
            if column.lower() in _STATES:
                new = given if given == _LOCAL else ledger.whole("host", given, f"{table}.{column}")
            elif column != "value":
                new = ledger.text(given, f"{table}.{column}")
            elif meaning == "host":
                new = given if given == _LOCAL else ledger.whole("host", given, place)
            elif meaning == "user":
                new = ledger.whole("user", given, place)
            elif meaning == "path":
                new = ledger.path(given, place)
            elif meaning == "argument":
                new = ledger.argument(flag, given, place)
            else:
                new = _without_serials(ledger, name.rpartition(":")[2], given, place)
        elif isinstance(given, bytes):
            new = ledger.data(given, f"{table}.{column}")
        clean[column] = new
    return clean


def _without_serials(ledger: Ledger, name: str, text: str, place: str) -> str:
    """Scrub a property's value, which may be JSON that lists GPUs and network cards with their serial numbers."""

    def by_name(given: str) -> str:
        return ledger.scrubber.keyed(name, given)

    if text[:1] not in "{[":
        return ledger.apply(text, place, name, by_name)

    def walked(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: walked(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [walked(item, key) for item in value]
        if isinstance(value, str) and value and key.lower().replace("_", "") in _SERIALS:
            return value if ledger.scrubber.is_placeholder(value) else ledger.scrubber.placeholder("host", value)
        return value

    def clean(given: str) -> str:
        try:
            found = json.loads(given)
        except (ValueError, RecursionError):
            return given
        new = walked(found)
        return given if new == found else json.dumps(new, separators=(",", ":"), ensure_ascii=False)

    return ledger.apply(ledger.apply(text, place, "serials", clean), place, name, by_name)


class _Texts:
    """How the texts of each column of an export are cleaned."""

    def __init__(self, rows: _Rows, ledger: Ledger) -> None:
        self._ledger = ledger
        _learn(rows, ledger.scrubber)
        self._files: set[Any] = set().union(*(rows.distinct(table, "module") for table in _MODULES))
        self._files |= rows.distinct("ProcessStreams", "filenameId")
        self._printed = rows.distinct("ProcessStreams", "contentId") - self._files

    def column(self, table: str, column: str) -> Callable[[str], str]:
        """Give what cleans a text of a column."""
        place, ledger = f"{table}.{column}", self._ledger
        lower = column.lower()
        if lower in _PATHS or (table, column) == ("PROCESSES", "name"):
            return lambda text: ledger.path(text, place)
        if lower in _STATES:
            return lambda text: text if text == _LOCAL else ledger.whole("host", text, place)
        if _is_serial(table, column):
            return lambda text: ledger.whole("host", text, place)
        return lambda text: ledger.text(text, place)

    def string(self, number: Any, text: str) -> str:
        """Clean a text of StringIds, by what refers to it."""
        # One text of a program may be another's name of a range: what was printed ends its lines.
        if number in self._printed and "\n" in text:
            return self._ledger.whole("output", text, "StringIds.value")
        if number in self._files:
            return self._ledger.path(text, "StringIds.value")
        return self._ledger.text(text, "StringIds.value")


def _is_serial(table: str, column: str) -> bool:
    return column.lower() in _SERIALS and table.startswith("TARGET_INFO")


def _refuse_name(ledger: Ledger, path: Path, names: Iterable[str]) -> None:
    for name in names:
        if ledger.scrubber.text(name) != name:
            raise TraceError(path, "has a table or column whose very name holds a secret", "leave that table out")


# ---------------------------------------------------------------- SQLite


class _Database:
    """A database that is only read."""

    def __init__(self, path: Path) -> None:
        check_complete(path)
        self.path = path
        self.uri = f"file:{urllib.parse.quote(str(path.resolve()))}?mode=ro"

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Have it open."""
        self.connection = sqlite3.connect(self.uri, uri=True)
        try:
            self.connection.execute("PRAGMA trusted_schema = OFF")
            (encoding,) = self.connection.execute("PRAGMA encoding").fetchone()
            self.encoding = str(encoding)
            # A TEXT column may hold bytes that are no text.
            self._codec = (
                ("utf-8", "surrogateescape") if encoding == "UTF-8" else ("utf-16-" + encoding[-2:], "replace")
            )
            self.connection.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
            self._with_texts: dict[str, list[str]] = {}
            declared = {
                table: self._declared(table)
                for (table,) in self.connection.execute(
                    "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
                    " ORDER BY rowid"
                ).fetchall()
            }
            self._columns = {table: list(columns) for table, columns in declared.items()}
            self._for_texts = {
                table: [name for name, kind in columns.items() if not kind.startswith(_NUMBERS)]
                for table, columns in declared.items()
            }
            yield
        finally:
            self.connection.close()

    def _declared(self, table: str) -> dict[str, str]:
        # hidden: 1 of a virtual table, 2 and 3 computed
        rows = self.connection.execute(f"PRAGMA table_xinfo({quoted(table)})").fetchall()
        return {row[1]: row[2].upper() for row in rows if row[6] == 0}

    def tables(self) -> list[str]:
        return list(self._columns)

    def columns(self, table: str) -> list[str]:
        return self._columns[table]

    def records(self, table: str) -> Iterator[dict[str, Any]]:
        if table in self._columns:
            names = self._columns[table]
            chosen = ", ".join(map(quoted, names))
            for row in self.connection.execute(f"SELECT {chosen} FROM {quoted(table)}"):  # noqa: S608
                yield dict(zip(names, row, strict=True))

    def distinct(self, table: str, column: str) -> set[Any]:
        if column not in self._columns.get(table, ()):
            return set()
        query = f"SELECT DISTINCT {quoted(column)} FROM {quoted(table)}"  # noqa: S608
        return {value for (value,) in self.connection.execute(query)}

    def with_homes(self) -> Iterator[str]:
        # Only where texts are meant to be: this also serves traces that are opened, and must not read all of a big one.
        for table, columns in self._for_texts.items():
            for name in map(quoted, columns):
                query = (
                    f"SELECT {name} FROM {quoted(table)} WHERE typeof({name}) = 'text' AND "  # noqa: S608
                    f"(instr({name}, '/home') OR instr({name}, 'Users') OR instr({name}, 'homes/'))"
                )
                for (value,) in self.connection.execute(query):
                    yield value

    def with_texts(self, table: str) -> list[str]:
        """Columns of a table that hold a text or bytes anywhere, whatever they were declared as."""
        if table not in self._with_texts:
            # Texts are greater than any number, and bytes than any text; to compare costs a tenth of to ask for a type.
            names = self._columns[table]
            greater = [f"{quoted(name)} >= ''" for name in names]
            query = f"SELECT 1 FROM {quoted(table)} WHERE {' OR '.join(greater)} LIMIT 1"  # noqa: S608
            found: Sequence[Any] = [0] * len(names)
            if names and self.connection.execute(query).fetchone():
                chosen = ", ".join(f"max({one})" for one in greater)
                found = self.connection.execute(f"SELECT {chosen} FROM {quoted(table)}").fetchone()  # noqa: S608
            self._with_texts[table] = [name for name, has in zip(names, found, strict=True) if has]
        return self._with_texts[table]

    def decoded(self, raw: bytes) -> str:
        return raw.decode(*self._codec)

    @staticmethod
    def bound(text: str) -> str | bytes:
        """A text as a parameter: as it is, unless it was made of bytes that are none."""
        return text if text.isprintable() or not _SURROGATE.search(text) else text.encode("utf-8", "surrogateescape")


def learn_sqlite(path: Path, scrubber: Scrubber) -> None:
    """Learn from an export where and by whom it was made.

    Parameters
    ----------
    path : Path
    scrubber : Scrubber

    Raises
    ------
    TraceError
        Truncated or damaged.
    """
    with _guarded(path):
        database = _Database(path)
        with database.connected():
            _learn(database, scrubber)


@contextlib.contextmanager
def _guarded(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OverflowError, UnicodeError, MemoryError) as error:
        detail = " ".join(str(error).split())[:160]
        raise TraceError(path, f"is damaged or cannot be copied ({detail})", _AGAIN) from error


#: What the definition of a table, an index or a view may make SQLite do; a schema that asks for more is refused.
_DEFINING = {
    getattr(sqlite3, f"SQLITE_{name}")
    for name in (
        *("CREATE_TABLE", "CREATE_INDEX", "CREATE_VIEW", "INSERT", "UPDATE", "DELETE", "READ", "SELECT", "FUNCTION"),
        *("REINDEX", "RECURSIVE"),
    )
}


def copy_sqlite(path: Path, draft: Path, ledger: Ledger) -> None:
    """Copy an export in SQLite without its secrets.

    Parameters
    ----------
    path : Path
        Only read.
    draft : Path
        The copy; must not exist.
    ledger : Ledger

    Raises
    ------
    TraceError
        Truncated, damaged, or with something in its schema that no export has.
    """
    with _guarded(path):
        source = _Database(path)
        with source.connected():
            texts = _Texts(source, ledger)
            _Copy(source, draft, ledger, texts).run()


class _Copy:
    """One database on its way into another."""

    def __init__(self, source: _Database, draft: Path, ledger: Ledger, texts: _Texts) -> None:
        self._source, self._ledger, self._texts = source, ledger, texts
        self._target = sqlite3.connect(f"file:{urllib.parse.quote(str(draft.resolve()))}?mode=rwc", uri=True)
        self._target.text_factory = source.connection.text_factory
        self._functions = 0

    def run(self) -> None:
        try:
            self._prepare()
            later = []
            for kind, name, table, sql in self._schema():
                if kind == "table":
                    self._table(name, sql)
                else:
                    later.append((kind, name, table, sql))
            for _, _, _, sql in sorted(later, key=lambda entry: entry[0]):  # indexes before views
                self._define(sql)
            self._target.commit()
            self._target.execute("DETACH source")
        finally:
            self._target.close()

    def _prepare(self) -> None:
        source, target = self._source.connection, self._target
        for pragma in ("page_size", "user_version", "application_id"):
            target.execute(f"PRAGMA {pragma} = {int(source.execute(f'PRAGMA {pragma}').fetchone()[0])}")
        target.execute(f"PRAGMA encoding = '{self._source.encoding}'")
        for setting in (
            *(
                "trusted_schema = OFF",
                "ignore_check_constraints = ON",
                "foreign_keys = OFF",
                "recursive_triggers = OFF",
            ),
            *("journal_mode = OFF", "synchronous = OFF", "secure_delete = ON", "temp_store = MEMORY"),
        ):
            target.execute(f"PRAGMA {setting}")
        target.execute("ATTACH ? AS source", (self._source.uri,))

    def _schema(self) -> Iterator[tuple[str, str, str, str]]:
        """What the copy shall have of the schema; the rest is left out, and counted."""
        found = self._source.connection.execute(
            "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY rowid"
        ).fetchall()
        virtual = [name for kind, name, _, sql in found if kind == "table" and _is_virtual(sql)]
        for kind, name, table, sql in found:
            if sql is None or name.startswith("sqlite_"):  # SQLite's own: automatic indexes, counters, statistics
                continue
            if kind == "trigger" or table in virtual or any(name.startswith(f"{v}_") for v in virtual):
                self._ledger.note("virtual table" if kind == "table" else kind, "schema")
                continue
            if kind in ("table", "index", "view"):
                yield kind, name, table, sql

    def _define(self, sql: str) -> None:
        clean = self._ledger.text(sql, "schema")
        if not clean.lstrip().upper().startswith("CREATE"):
            raise TraceError(self._source.path, "has a schema that is none", _AGAIN)
        self._target.set_authorizer(
            lambda action, *_: sqlite3.SQLITE_OK if action in _DEFINING else sqlite3.SQLITE_DENY
        )
        try:
            self._target.execute(clean)
        finally:
            self._target.set_authorizer(None)

    def _table(self, table: str, sql: str) -> None:
        columns = self._source.columns(table)
        _refuse_name(self._ledger, self._source.path, [table, *columns])
        self._define(sql)
        if not columns:
            return
        into = f"INSERT INTO main.{quoted(table)} ({', '.join(map(quoted, columns))})"
        if table in _PROPERTIES:
            self._properties(table, columns, into)
            return
        texts = set(self._source.with_texts(table))
        chosen = ", ".join(self._expression(table, c) if c in texts else self._number(table, c) for c in columns)
        order = "NOT INDEXED" if not self._without_rowid(table) else ""
        self._target.execute(f"{into} SELECT {chosen} FROM source.{quoted(table)} {order}")  # noqa: S608

    def _without_rowid(self, table: str) -> bool:
        try:
            self._source.connection.execute(f"SELECT rowid FROM {quoted(table)} LIMIT 1").fetchone()  # noqa: S608
        except sqlite3.OperationalError:
            return True
        return False

    def _properties(self, table: str, columns: Sequence[str], into: str) -> None:
        flag = ""
        for row in self._source.records(table):
            clean = _clean_property(self._ledger, table, row, flag)
            flag = _property(row)[1] if _meaning(table, _property(row)[0]) == "argument" else ""
            if clean is not None:
                values = [self._source.bound(v) if isinstance(v, str) else v for v in map(clean.get, columns)]
                marks = ", ".join("CAST(? AS TEXT)" if isinstance(clean[c], str) else "?" for c in columns)
                self._target.execute(f"{into} VALUES ({marks})", values)

    def _number(self, table: str, column: str) -> str:
        """SQL that gives a column without texts: the serial numbers of network cards are integers."""
        if not _is_serial(table, column):
            return quoted(column)
        query = f"SELECT count(*) FROM {quoted(table)} WHERE {quoted(column)} != 0"  # noqa: S608
        self._ledger.note("host", f"{table}.{column}", self._source.connection.execute(query).fetchone()[0])
        return "0"

    def _expression(self, table: str, column: str) -> str:
        """SQL that gives a column without its secrets, each value in the type it had."""
        name = quoted(column)
        self._functions += 1
        text, data = f"clean_text_{self._functions}", f"clean_data_{self._functions}"
        source, ledger, place = self._source, self._ledger, f"{table}.{column}"

        # NULL says that nothing had to go: then the value itself is taken, whatever it is made of.
        def of_data(raw: bytes) -> bytes | None:
            new = ledger.data(raw, place)
            return None if new == raw else new

        if (table, column) == ("StringIds", "value") and "id" in source.columns(table):

            def of_string(number: Any, raw: bytes) -> str | bytes | None:
                given = source.decoded(raw)
                new = self._texts.string(number, given)
                return None if new is given else source.bound(new)

            self._target.create_function(text, 2, of_string, deterministic=True)
            call = f'{text}("id", CAST({name} AS BLOB))'
        else:
            clean = self._texts.column(table, column)

            def of_text(raw: bytes) -> str | bytes | None:
                given = source.decoded(raw)
                new = clean(given)
                return None if new is given else source.bound(new)

            self._target.create_function(text, 1, of_text, deterministic=True)
            call = f"{text}(CAST({name} AS BLOB))"
        self._target.create_function(data, 1, of_data, deterministic=True)
        return (
            f"CASE typeof({name}) WHEN 'text' THEN coalesce(CAST({call} AS TEXT), {name}) "
            f"WHEN 'blob' THEN coalesce({data}({name}), {name}) ELSE {name} END"
        )


def _is_virtual(sql: str | None) -> bool:
    return sql is not None and sql.split()[1:2] != [] and sql.split()[1].upper() == "VIRTUAL"


# ---------------------------------------------------------------- Parquet


class _Folder:
    """A folder of Parquet files, one a table."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = {file.stem: file for file in sorted(path.glob("*.parquet"))}

    def tables(self) -> list[str]:
        return list(self.files)

    def records(self, table: str) -> Iterator[dict[str, Any]]:
        import pyarrow.parquet as pq

        if table in self.files:
            yield from pq.read_table(self.files[table]).to_pylist()

    def distinct(self, table: str, column: str) -> set[Any]:
        import pyarrow.parquet as pq

        if table not in self.files or column not in pq.read_schema(self.files[table]).names:
            return set()
        return set(pq.read_table(self.files[table], columns=[column])[column].unique().to_pylist())

    def with_homes(self) -> Iterator[str]:
        import pyarrow as pa
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        for file in self.files.values():
            opened = pq.ParquetFile(file)
            names = [field.name for field in opened.schema_arrow if _is_text(field.type)]
            for batch in opened.iter_batches(columns=names) if names else ():
                for column in batch.columns:
                    texts = column.dictionary if pa.types.is_dictionary(column.type) else column
                    found = pc.filter(texts, pc.match_substring_regex(texts, "/home|Users|homes/"))
                    yield from (text for text in found.to_pylist() if text)


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_data(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return _is_data(kind.value_type)
    fixed = pa.types.is_fixed_size_binary(kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind) or fixed)


def _holds_texts(kind: Any) -> bool:
    """Whether a nested type has a text or bytes somewhere in it."""
    if _is_text(kind) or _is_data(kind):
        return True
    return any(_holds_texts(kind.field(i).type) for i in range(kind.num_fields))


@contextlib.contextmanager
def _guarded_file(file: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, KeyError, UnicodeError) as error:
        detail = " ".join(str(error).split())[:160]
        raise TraceError(
            file, f"is no readable Parquet table ({detail})", "export it again with nsys export --type parquetdir"
        ) from error


def learn_parquetdir(path: Path, scrubber: Scrubber) -> None:
    """Learn from an export where and by whom it was made.

    Parameters
    ----------
    path : Path
    scrubber : Scrubber

    Raises
    ------
    TraceError
        A table is unreadable.
    """
    with _guarded_file(path):
        _learn(_Folder(path), scrubber)


def copy_parquetdir(path: Path, draft: Path, ledger: Ledger) -> None:
    """Copy an export in a folder of Parquet files without its secrets; other files stay behind.

    Parameters
    ----------
    path : Path
        Only read.
    draft : Path
        An empty folder.
    ledger : Ledger

    Raises
    ------
    TraceError
        A table is unreadable.
    """
    folder = _Folder(path)
    with _guarded_file(path):
        texts = _Texts(folder, ledger)
    for other in sorted(path.iterdir()):
        if other.suffix != ".parquet":
            ledger.note("other file", path.name)
    for table, file in folder.files.items():
        with _guarded_file(file):
            _refuse_name(ledger, file, [table])
            _copy_parquet(folder, table, draft / file.name, ledger, texts)


def _copy_parquet(folder: _Folder, table: str, draft: Path, ledger: Ledger, texts: _Texts) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    opened = pq.ParquetFile(folder.files[table])
    given = opened.schema_arrow
    _refuse_name(ledger, folder.files[table], given.names)
    # What else a writer put beside the schema may hold anything.
    schema = pa.schema([field.remove_metadata() for field in given])
    metadata = opened.metadata
    codec = metadata.row_group(0).column(0).compression if metadata.num_row_groups and metadata.num_columns else "ZSTD"
    with pq.ParquetWriter(draft, schema, compression="NONE" if codec == "UNCOMPRESSED" else codec) as writer:
        if table in _PROPERTIES:
            flag, rows = "", []
            for row in folder.records(table):
                clean = _clean_property(ledger, table, row, flag)
                flag = _property(row)[1] if _meaning(table, _property(row)[0]) == "argument" else ""
                rows += [] if clean is None else [clean]
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
            return
        for batch in opened.iter_batches(batch_size=1 << 16):
            columns = [_clean_arrow(batch, field, table, ledger, texts) for field in schema]
            writer.write_batch(pa.record_batch(columns, schema=schema))


def _clean_arrow(batch: Any, field: Any, table: str, ledger: Ledger, texts: _Texts) -> Any:
    import pyarrow as pa

    column, place = batch[field.name], f"{table}.{field.name}"
    if pa.types.is_integer(field.type) and _is_serial(table, field.name):
        ledger.note("host", place, sum(1 for value in column.to_pylist() if value))
        return pa.array([0] * len(column), field.type)
    if not _holds_texts(field.type):
        return column
    if (table, field.name) == ("StringIds", "value") and "id" in batch.schema.names:
        numbers = batch["id"].to_pylist()
        values = column.cast(pa.large_string()).to_pylist()
        new = [v if v is None else texts.string(n, v) for n, v in zip(numbers, values, strict=True)]
        return pa.array(new, pa.large_string()).cast(field.type)
    if _is_text(field.type):
        clean = texts.column(table, field.name)
        plain = column.cast(pa.large_string()).dictionary_encode()
        return _recoded(plain, [v if v is None else clean(v) for v in plain.dictionary.to_pylist()], field.type)
    if _is_data(field.type):
        plain = column.cast(pa.large_binary()).dictionary_encode()
        cleaned = [v if v is None else ledger.data(v, place) for v in plain.dictionary.to_pylist()]
        return _recoded(plain, cleaned, field.type)

    def walked(value: Any) -> Any:
        if isinstance(value, str):
            return ledger.text(value, place)
        if isinstance(value, bytes):
            return ledger.data(value, place)
        if isinstance(value, dict):
            return {name: walked(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [walked(item) for item in value]
        return value

    return pa.array([walked(value) for value in column.to_pylist()], field.type)


def _recoded(encoded: Any, values: list[Any], kind: Any) -> Any:
    """Give a dictionary-encoded column other values."""
    import pyarrow as pa

    cleaned = pa.array(values, encoded.dictionary.type).take(encoded.indices)
    return cleaned.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else cleaned.cast(kind)
