"""Read Parquet files safely: a few hundred bytes can expand to gigabytes, so measure before decoding.

The footer of a Parquet file can lie about sizes, but decoding follows the page headers. We add those up first and
refuse a file that expands to far more than a real trace of its size.

This module parses footers and page headers itself. pyarrow cannot list pages, and its Python metadata API aborts the
process on some damaged footers.
"""

from __future__ import annotations

import functools
import io
import os
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from nsightkit.errors import TraceError
from nsightkit.trace.files import require_regular

__all__ = ["read_table", "schema_names"]

#: A file may expand to `_SMALL_BYTES` plus `_RATIO` times its size. Real traces expand to at most 50 times their size.
_SMALL_BYTES = 64 << 20
_RATIO = 128
#: Every value becomes an int64, a float64 or a dictionary code.
_VALUE_BYTES = 8
#: Every row counts with all columns of the model's widest table, because missing columns are filled in.
_ROW_BYTES = 20 * _VALUE_BYTES
#: Overhead of a dictionary entry beside its text.
_ENTRY_BYTES = 16

#: Page types, the header field with each type's details, and the field of the encoding in those details.
_DATA, _INDEX, _DICTIONARY, _DATA_V2 = range(4)
_DETAILS = {_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}
_ENCODING = {_DATA: 2, _DICTIONARY: 2, _DATA_V2: 4}
#: PLAIN, PLAIN_DICTIONARY, RLE, DELTA_BINARY_PACKED, RLE_DICTIONARY, BYTE_STREAM_SPLIT. The others can
#: expand a few bytes to any amount of text.
_ENCODINGS = {0, 2, 3, 5, 8, 9}

# Types in Thrift's compact protocol.
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _, _STRUCT = range(1, 13)
_INTEGERS = (_I16, _I32, _I64)
#: Element types of the footer's lists, by depth and field. pyarrow assumes these and ignores the type in the file.
_ELEMENTS = {
    **dict.fromkeys([(0, 2), (0, 4), (0, 5), (0, 7), (1, 1), (1, 4), (3, 8), (3, 13)], (_STRUCT,)),
    **dict.fromkeys([(3, 2), (4, 2), (4, 3)], _INTEGERS),
    **dict.fromkeys([(3, 3), (4, 1)], (_BINARY,)),
}
_DEPTH = 12
#: A Thrift struct: values by field number and type.
_Struct: TypeAlias = dict[tuple[int, int], Any]


def schema_names(path: str | os.PathLike[str]) -> list[str]:
    """List the columns of a Parquet file.

    Parameters
    ----------
    path : path-like

    Returns
    -------
    list of str

    Raises
    ------
    TraceError
        The path is not a regular file. pyarrow's own errors about a damaged file pass through.
    """
    require_regular(path)
    with pa.OSFile(os.fspath(path)) as opened:
        return list(pq.ParquetFile(opened).schema_arrow.names)


def read_table(
    path: str | os.PathLike[str],
    columns: list[str] | None = None,
    filters: pc.Expression | None = None,
    *,
    dictionaries: bool = False,
    ours: bool = False,
) -> pa.Table:
    """Read a Parquet file if its contents are in proportion to its size and fit in memory.

    Parameters
    ----------
    path : path-like
    columns : list of str, optional
        All columns when omitted. Other types than numbers, booleans, times and text are refused.
    filters : Expression, optional
        Rows to keep.
    dictionaries : bool
        Return every text column as a dictionary. Otherwise text is plain, and its full length counts.
    ours : bool
        This user's nsightkit wrote the file: read it without measuring.

    Returns
    -------
    Table
        Its schema has no metadata.

    Raises
    ------
    TraceError
        The path is not a regular file, or the file expands to too much.
    ValueError
        The file is damaged or has columns of other types. pyarrow's own errors pass through.
    """
    require_regular(path)
    if ours:
        return pq.read_table(path, columns=columns, filters=filters, use_threads=False).replace_schema_metadata()
    with pa.OSFile(os.fspath(path)) as opened:
        schema = pq.ParquetFile(opened).schema_arrow
        wanted = schema.names if columns is None else list(columns)
        # A printed filter contains the names of its columns. An extra match only reads one more column.
        filtering = [] if filters is None else [name for name in schema.names if name in str(filters)]
        reading = list(dict.fromkeys([*wanted, *filtering]))
        readable = [field.name for field in schema if _is_readable(field.type)]
        for name in reading:
            if name not in readable:
                raise ValueError(f"column {name} is missing or has an unsupported type")
        _check(Path(path), tuple(readable), reading)
        texts = [name for name in reading if _is_text(schema.field(name).type)]
        opened.seek(0)
        table = pq.ParquetFile(opened, read_dictionary=texts).read(reading, use_threads=False)
    for name in texts:
        _check_codes(table[name])
    if filters is not None:
        table = table.filter(filters)
    table = table.select(wanted).replace_schema_metadata()
    return table if dictionaries else _plain(Path(path), table, schema)


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return any(
        is_kind(kind)
        for is_kind in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    )


def _is_readable(kind: pa.DataType) -> bool:
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return bool(number or pa.types.is_temporal(kind) or pa.types.is_null(kind) or _is_text(kind))


# -- expanded size ----------------------------------------------------------------------------------------------


def _check(path: Path, readable: tuple[str, ...], reading: list[str]) -> None:
    """Refuse a file that expands out of proportion, or whose requested columns do not fit in memory."""
    stat = path.stat()
    try:
        rows, pages = _unpacked(path, readable, stat.st_size, stat.st_mtime_ns, stat.st_ino)
    except KeyError as error:
        raise ValueError("the footer or a page header lacks a field") from error
    _check_ratio(path, rows * _ROW_BYTES + sum(pages.values()))
    needed, free = sum(rows * _VALUE_BYTES + pages[name] for name in reading), _memory()
    if needed > free:
        raise TraceError(
            path, f"needs {needed / 1e9:,.1f} GB of memory, and {free / 1e9:,.1f} GB are free", "use a larger machine"
        )


def _check_ratio(path: Path, unpacked: int) -> None:
    if unpacked > _SMALL_BYTES + _RATIO * path.stat().st_size:
        problem = f"expands to {unpacked / 1e9:,.1f} GB, far more than a real trace of its size"
        raise TraceError(path, problem, "export or convert it again")


def _memory() -> int:
    """Available memory in bytes; total memory where the system does not report it, or no limit."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = dict(line.split(":", 1) for line in lines)["MemAvailable"]
        return int(available.split()[0]) << 10
    except (OSError, LookupError, ValueError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 1 << 62


@functools.lru_cache(maxsize=256)  # callers read a table a few columns at a time
def _unpacked(path: Path, columns: tuple[str, ...], *_content: int) -> tuple[int, dict[str, int]]:
    """Count the rows of a file and the unpacked page bytes of each column; check that footer and pages agree."""
    with path.open("rb") as stream:
        schema = pq.ParquetFile(stream).schema
        names = [schema.column(place).path for place in range(len(schema))]
        if len(set(names)) < len(names):
            raise ValueError("two columns have the same name")
        footer = _footer(stream)
        rows = packed = 0
        pages = dict.fromkeys(columns, 0)
        for group in footer[4, _LIST]:
            rows += group[3, _I64]
            for name, chunk in zip(names, group[1, _LIST], strict=True):
                if name in pages:
                    details = chunk[3, _STRUCT]
                    packed += details[7, _I64]
                    if packed > path.stat().st_size:
                        raise ValueError("columns overlap")
                    pages[name] += _pages(stream, details, group[3, _I64])
    if rows != footer[3, _I64]:
        raise ValueError("the footer has inconsistent row counts")
    return rows, pages


def _footer(stream: BinaryIO) -> _Struct:
    stream.seek(-8, os.SEEK_END)
    size = int.from_bytes(stream.read(4), "little")
    stream.seek(-8 - size, os.SEEK_END)
    return _struct(io.BytesIO(stream.read(size)))


def _pages(stream: BinaryIO, chunk: _Struct, rows: int) -> int:
    """Unpacked bytes of a column chunk's pages, which must hold exactly `rows` values."""
    values, packed, begin = (chunk[field, _I64] for field in (5, 7, 9))
    dictionary = chunk.get((11, _I64), 0)
    if 0 < dictionary < begin:
        begin = dictionary
    if begin < 0 or packed < 0 or values != rows:
        raise ValueError("the footer has an inconsistent column")
    total, end = 0, begin + packed
    stream.seek(begin)
    while values > 0:
        header = _struct(stream)
        kind, unpacked, packed = (header[field, _I32] for field in (1, 2, 3))
        if unpacked < 0 or not 0 <= packed <= end - stream.tell():
            raise ValueError("a page header is damaged")
        total += unpacked
        if kind != _INDEX:
            details = header[_DETAILS[kind], _STRUCT]
            entries = details[1, _I32]
            if entries < 0 or details[_ENCODING[kind], _I32] not in _ENCODINGS:
                raise ValueError("a page has an unsupported encoding")
            if kind == _DICTIONARY:
                total += entries * _ENTRY_BYTES
            else:
                values -= entries
        stream.seek(packed, os.SEEK_CUR)
    if values:
        raise ValueError("a column has more rows than the footer claims")
    return total


# -- Thrift's compact protocol ----------------------------------------------------------------------------------
#
# Anything that pyarrow would parse differently is refused.


def _struct(stream: BinaryIO, depth: int = 0) -> _Struct:
    """Read a struct, skipping its strings."""
    fields: _Struct = {}
    field = 0
    while kind := (head := _byte(stream)) & 15:
        field = field + (head >> 4) if head >> 4 else _integer(stream, _I16)
        if (field, kind) in fields or not 0 < field < 1 << 15:
            raise ValueError("a struct has a duplicate or invalid field")
        fields[field, kind] = kind == _TRUE if kind in (_TRUE, _FALSE) else _value(stream, kind, depth, field)
    return fields


def _value(stream: BinaryIO, kind: int, depth: int, field: int) -> Any:
    """Read a field's value, or an element of a field's list."""
    if kind in _INTEGERS:
        return _integer(stream, kind)
    if kind in (_TRUE, _FALSE, _BYTE):
        return _byte(stream)
    if kind == _DOUBLE:
        return bytes(_byte(stream) for _ in range(8))
    if kind == _BINARY:
        return stream.seek(_varint(stream), os.SEEK_CUR)
    if kind == _STRUCT and depth < _DEPTH:
        return _struct(stream, depth + 1)
    if kind in (_LIST, _SET) and depth < _DEPTH:
        head = _byte(stream)
        size, kind = head >> 4, head & 15
        if kind in (_LIST, _SET) or kind not in _ELEMENTS.get((depth, field), (kind,)):
            raise ValueError("a list has the wrong element type")
        if size == 15:
            size = _varint(stream)
        return [_value(stream, kind, depth, field) for _ in range(size)]
    raise ValueError("a value has an unknown type")


def _byte(stream: BinaryIO) -> int:
    byte = stream.read(1)
    if not byte:
        raise ValueError("a struct is truncated")
    return byte[0]


def _varint(stream: BinaryIO) -> int:
    value = shift = 0
    while (byte := _byte(stream)) > 127:
        value |= (byte & 127) << shift
        shift += 7
        if shift > 63:
            raise ValueError("an integer is too long")
    return value | byte << shift


def _integer(stream: BinaryIO, kind: int) -> int:
    number = _varint(stream)
    if number >> {_I16: 16, _I32: 32, _I64: 64}[kind]:
        raise ValueError("an integer is too large")
    return (number >> 1) ^ -(number & 1)


# -- text -------------------------------------------------------------------------------------------------------


def _check_codes(column: pa.ChunkedArray) -> None:
    """Refuse codes outside their dictionary: pyarrow does not check them and would read past its end."""
    for chunk in column.chunks:
        bounds = pc.min_max(chunk.indices).as_py()
        if bounds["max"] is not None and not 0 <= bounds["min"] <= bounds["max"] < len(chunk.dictionary):
            raise ValueError("a text column has a code outside its dictionary")


def _plain(path: Path, table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Decode dictionaries to plain text, if the total length is in proportion to the file."""
    for place, name in enumerate(table.column_names):
        kind = schema.field(name).type
        if _is_text(kind):
            lengths = [pc.sum(pc.binary_length(c.dictionary).take(c.indices)).as_py() or 0 for c in table[name].chunks]
            _check_ratio(path, sum(lengths))
            plain = kind.value_type if pa.types.is_dictionary(kind) else kind
            table = table.set_column(place, name, table[name].cast(plain))
    return table
