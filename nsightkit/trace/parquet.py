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
#: Every row counts with all columns of the model's widest table, of eight bytes: missing columns are filled in.
_ROW_BYTES = 20 * 8
#: Overhead of a dictionary entry beside its text.
_ENTRY_BYTES = 16

#: Page types.
_DATA, _INDEX, _DICTIONARY, _DATA_V2 = range(4)
#: PLAIN, PLAIN_DICTIONARY, RLE, DELTA_BINARY_PACKED, RLE_DICTIONARY, BYTE_STREAM_SPLIT. The others can
#: expand a few bytes to any amount of text.
_ENCODINGS = {0, 2, 3, 5, 8, 9}

# Types in Thrift's compact protocol.
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _, _BINARY, _LIST, _SET, _, _STRUCT = range(1, 13)
_INTEGERS = (_I16, _I32, _I64)
# Fields by number and type, as in the format's parquet.thrift: of the footer, ...
_FOOTER_ROWS = (3, _I64)
_FOOTER_GROUPS = (4, _LIST)
# ... of a row group, ...
_GROUP_CHUNKS = (1, _LIST)
_GROUP_ROWS = (3, _I64)
# ... of one column in it, ...
_CHUNK_COLUMN = (3, _STRUCT)
_COLUMN_VALUES = (5, _I64)
_COLUMN_PACKED = (7, _I64)
_COLUMN_DATA = (9, _I64)
_COLUMN_DICTIONARY = (11, _I64)
# ... and of a page's header.
_PAGE_TYPE = (1, _I32)
_PAGE_UNPACKED = (2, _I32)
_PAGE_PACKED = (3, _I32)
#: The field with the details of each type of page, and in these the fields of the values and of the encoding.
_DETAILS = {_DATA: (5, _STRUCT), _DICTIONARY: (7, _STRUCT), _DATA_V2: (8, _STRUCT)}
_VALUES = (1, _I32)
_ENCODING = {_DATA: (2, _I32), _DICTIONARY: (2, _I32), _DATA_V2: (4, _I32)}
#: Element types of the footer's lists, by depth and field. pyarrow assumes these and ignores the type in the file.
_ELEMENTS = {
    **dict.fromkeys([(0, 2), (0, 4), (0, 5), (0, 7), (1, 1), (1, 4), (3, 8), (3, 13)], (_STRUCT,)),
    **dict.fromkeys([(3, 2), (4, 2), (4, 3)], _INTEGERS),
    **dict.fromkeys([(3, 3), (4, 1)], (_BINARY,)),
}
_DEPTH = 12
#: A Thrift struct: values by field number and type.
_Struct: TypeAlias = dict[tuple[int, int], Any]


def schema_names(path: Path) -> list[str]:
    """List the columns of a Parquet file.

    Parameters
    ----------
    path : Path

    Returns
    -------
    list of str

    Raises
    ------
    TraceError
        The path is not a regular file. pyarrow's own errors about a damaged file pass through.
    """
    require_regular(path)
    with pa.OSFile(str(path)) as opened:
        return list(pq.ParquetFile(opened).schema_arrow.names)


def read_table(path: Path, columns: list[str]) -> pa.Table:
    """Read columns of a Parquet file if its contents are in proportion to its size.

    Parameters
    ----------
    path : Path
    columns : list of str

    Returns
    -------
    Table
        Every text column is a dictionary. Its schema has no metadata.

    Raises
    ------
    TraceError
        The path is not a regular file, or the file expands to too much.
    ValueError
        The file is damaged, or has columns of other types than numbers, booleans, times and text. pyarrow's own errors
        pass through.
    """
    require_regular(path)
    with pa.OSFile(str(path)) as opened:
        schema = pq.ParquetFile(opened).schema_arrow
        if not set(columns).issubset(schema.names) or len(set(schema.names)) < len(schema):
            raise ValueError("a column is missing, or twice there")
        texts = []
        for field in schema:
            if _is_text(field.type):
                texts.append(field.name)
            elif not (pa.types.is_primitive(field.type) or pa.types.is_null(field.type)):
                raise ValueError(f"column {field.name} has an unsupported type")
        _require_proportion(path, len(schema))
        opened.seek(0)
        table = pq.ParquetFile(opened, read_dictionary=texts).read(columns, use_threads=False)
    for name in set(columns).intersection(texts):
        _require_texts(table[name])
    return table.select(columns).replace_schema_metadata()


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def _require_texts(column: pa.ChunkedArray) -> None:
    """Refuse codes outside their dictionary: pyarrow does not check them and would read past its end."""
    for chunk in column.chunks:
        bounds = pc.min_max(chunk.indices).as_py()
        if bounds["max"] is not None and not 0 <= bounds["min"] <= bounds["max"] < len(chunk.dictionary):
            raise ValueError("a text column has a code outside its dictionary")


# -- expanded size ----------------------------------------------------------------------------------------------


def _require_proportion(path: Path, columns: int) -> None:
    """Refuse a file that expands out of proportion, or has not so many columns everywhere."""
    state = path.stat()
    try:
        unpacked = _unpacked(path, columns, state.st_size, state.st_mtime_ns, state.st_ino)
    except KeyError as error:
        raise ValueError("the footer or a page header lacks a field") from error
    if unpacked > _SMALL_BYTES + _RATIO * state.st_size:
        problem = f"expands to {unpacked / 1e9:,.1f} GB, far more than a real trace of its size"
        raise TraceError(path, problem, "export or convert it again")


@functools.lru_cache(maxsize=256)  # callers read a table a few columns at a time
def _unpacked(path: Path, columns: int, size: int, *_content: int) -> int:
    """Count the bytes that all columns take in memory; check that footer and pages agree.

    A file whose `size` or content (time and inode stand for it) is another is counted again.
    """
    with path.open("rb") as stream:
        footer = _footer(stream)
        rows = packed = unpacked = 0
        for group in footer[_FOOTER_GROUPS]:
            rows += group[_GROUP_ROWS]
            if len(group[_GROUP_CHUNKS]) != columns:
                raise ValueError("a row group has another number of columns")
            for chunk in group[_GROUP_CHUNKS]:
                column = chunk[_CHUNK_COLUMN]
                packed += column[_COLUMN_PACKED]
                # Columns that share bytes would have the same pages counted again and again.
                if packed > size:
                    raise ValueError("columns overlap")
                unpacked += _pages(stream, column, group[_GROUP_ROWS])
    if rows != footer[_FOOTER_ROWS]:
        raise ValueError("the footer has inconsistent row counts")
    return unpacked + rows * _ROW_BYTES


def _footer(stream: BinaryIO) -> _Struct:
    stream.seek(-8, os.SEEK_END)
    size = int.from_bytes(stream.read(4), "little")
    stream.seek(-8 - size, os.SEEK_END)
    return _struct(io.BytesIO(stream.read(size)))


def _pages(stream: BinaryIO, column: _Struct, rows: int) -> int:
    """Unpacked bytes of a column's pages in one row group, which must hold exactly `rows` values."""
    values = column[_COLUMN_VALUES]
    packed = column[_COLUMN_PACKED]
    begin = column[_COLUMN_DATA]
    dictionary = column.get(_COLUMN_DICTIONARY, 0)
    if 0 < dictionary < begin:
        begin = dictionary
    if begin < 0 or packed < 0 or values != rows:
        raise ValueError("the footer has an inconsistent column")
    end = begin + packed
    total = 0
    stream.seek(begin)
    while values > 0:
        header = _struct(stream)
        kind = header[_PAGE_TYPE]
        unpacked = header[_PAGE_UNPACKED]
        packed = header[_PAGE_PACKED]
        if unpacked < 0 or not 0 <= packed <= end - stream.tell():
            raise ValueError("a page header is damaged")
        total += unpacked
        if kind != _INDEX:
            details = header[_DETAILS[kind]]
            entries = details[_VALUES]
            if entries < 0 or details[_ENCODING[kind]] not in _ENCODINGS:
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
    while True:
        head = _byte(stream)
        kind = head & 15
        step = head >> 4
        if not kind:
            return fields
        field = field + step if step else _integer(stream, _I16)
        if (field, kind) in fields or not 0 < field < 1 << 15:
            raise ValueError("a struct has a duplicate or invalid field")
        if kind in (_TRUE, _FALSE):
            fields[field, kind] = kind == _TRUE
        else:
            fields[field, kind] = _value(stream, kind, depth, field)


def _value(stream: BinaryIO, kind: int, depth: int, field: int) -> Any:
    """Read a field's value, or an element of a field's list."""
    if kind in _INTEGERS:
        return _integer(stream, kind)
    if kind in (_TRUE, _FALSE, _BYTE):
        return _byte(stream)
    if kind == _BINARY:
        return stream.seek(_varint(stream), os.SEEK_CUR)
    if kind == _STRUCT and depth < _DEPTH:
        return _struct(stream, depth + 1)
    if kind in (_LIST, _SET) and depth < _DEPTH:
        return _list(stream, depth, field)
    raise ValueError("a value has an unknown type")


def _list(stream: BinaryIO, depth: int, field: int) -> list[Any]:
    head = _byte(stream)
    size = head >> 4
    kind = head & 15
    if kind in (_LIST, _SET) or kind not in _ELEMENTS.get((depth, field), (kind,)):
        raise ValueError("a list has the wrong element type")
    if size == 15:
        size = _varint(stream)
    return [_value(stream, kind, depth, field) for _ in range(size)]


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
