"""Read Parquet files from strangers: a few hundred bytes can claim billions of rows, so count before unpacking.

The footer of a Parquet file can lie. The headers of its pages cannot: the reader follows them. They are added up
first, and a file that would unpack to far more than a trace of its size holds is refused.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from nsightkit.errors import TraceError
from nsightkit.trace.files import require_regular

__all__ = ["read_table", "schema_names"]

#: A file may unpack to this much, and to `_RATIO` times its size on top. Recordings unpack to at most 33 times theirs.
_SMALL_BYTES = 64 << 20
_RATIO = 256
#: A value becomes an int64, a float64 or a code into texts.
_VALUE_BYTES = 8
#: A row becomes one of the model, in which the columns that the file lacks stand too.
_ROW_BYTES = 20 * _VALUE_BYTES
#: What an entry of a dictionary costs beside its text.
_ENTRY_BYTES = 16

# Of the format: what stands in the header of a page.
_DATA, _INDEX, _DICTIONARY, _DATA_V2 = range(4)
_DETAILS = {_DATA: 5, _INDEX: 6, _DICTIONARY: 7, _DATA_V2: 8}
_ENCODING = {_DATA: 2, _DICTIONARY: 2, _DATA_V2: 4}
#: PLAIN, PLAIN_DICTIONARY, RLE, DELTA_BINARY_PACKED, RLE_DICTIONARY, BYTE_STREAM_SPLIT. In the others, a few bytes of
#: one page can stand for any amount of text.
_ENCODINGS = {0, 2, 3, 5, 8, 9}
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _BINARY, _STRUCT = 1, 2, 3, 4, 5, 6, 8, 12


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
        Not a regular file. What pyarrow raises over a damaged file is passed on.
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
    """Read a Parquet file, if what it holds is in proportion to its size and fits in memory.

    Parameters
    ----------
    path : path-like
    columns : list of str, optional
        All when omitted. Only numbers, booleans, times and texts can be read.
    filters : Expression, optional
        Rows to keep.
    dictionaries : bool
        Return every text column as a dictionary. Without, texts are plain, and their whole length counts.
    ours : bool
        The file was certainly written by this user's nsightkit: read it without counting.

    Returns
    -------
    Table
        Without metadata.

    Raises
    ------
    TraceError
        Not a regular file, or one that unpacks to too much. What pyarrow raises over a damaged file is passed on, and
        damage that it does not see is a ValueError.
    """
    require_regular(path)
    if ours:
        return pq.read_table(path, columns=columns, filters=filters, use_threads=False).replace_schema_metadata()
    with pa.OSFile(os.fspath(path)) as opened:
        schema = pq.ParquetFile(opened).schema_arrow
        wanted = schema.names if columns is None else list(columns)
        # Superfluous columns do no harm: a name in a text of the filter's.
        filtering = [] if filters is None else [name for name in schema.names if name in str(filters)]
        reading = list(dict.fromkeys([*wanted, *filtering]))
        readable = [field.name for field in schema if _is_readable(field.type)]
        for name in reading:
            if name not in readable:
                raise ValueError(f"column {name} is absent or of a type that is not read")
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


# -- what a file unpacks to -------------------------------------------------------------------------------------


def _check(path: Path, readable: tuple[str, ...], reading: list[str]) -> None:
    """Refuse a file that unpacks to too much as a whole, or for this machine in the columns that are read now."""
    stat = path.stat()
    rows, pages = _unpacked(path, readable, stat.st_size, stat.st_mtime_ns, stat.st_ino)
    _check_ratio(path, rows * _ROW_BYTES + sum(pages.values()))
    needed, free = sum(rows * _VALUE_BYTES + pages[name] for name in reading), _memory()
    if needed > free:
        raise TraceError(
            path, f"needs {needed / 1e9:,.1f} GB of memory, and {free / 1e9:,.1f} GB are free", "use a larger machine"
        )


def _check_ratio(path: Path, unpacked: int) -> None:
    if unpacked > _SMALL_BYTES + _RATIO * path.stat().st_size:
        problem = f"would unpack to {unpacked / 1e9:,.1f} GB, far more than a trace of its size holds"
        raise TraceError(path, problem, "export or convert it again")


def _memory() -> int:
    """Bytes of memory that are free; on systems that do not tell, those of the machine, or no bound."""
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


@functools.lru_cache(maxsize=256)  # a table is read a few columns at a time
def _unpacked(path: Path, columns: tuple[str, ...], *_content: int) -> tuple[int, dict[str, int]]:
    """Rows of a file, and unpacked bytes of the pages of some columns. Checks that footer and pages agree."""
    with path.open("rb") as stream:
        metadata = pq.read_metadata(stream)
        names = [metadata.schema.column(place).path for place in range(metadata.num_columns)]
        if len(set(names)) < len(names):
            raise ValueError("two columns have the same name")
        rows = packed = 0
        pages = dict.fromkeys(columns, 0)
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            rows += group.num_rows
            for place, name in enumerate(names):
                if name in pages:
                    chunk = group.column(place)
                    packed += chunk.total_compressed_size
                    if packed > path.stat().st_size:
                        raise ValueError("columns share their bytes")
                    pages[name] += _pages(stream, chunk, group.num_rows)
    if rows != metadata.num_rows:
        raise ValueError("the footer contradicts itself about the rows")
    return rows, pages


def _pages(stream: BinaryIO, chunk: Any, rows: int) -> int:
    """Bytes of the pages of a column chunk, unpacked; they must hold exactly `rows` values."""
    begin = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < begin:
        begin = chunk.dictionary_page_offset
    end = begin + chunk.total_compressed_size
    if begin < 0 or chunk.num_values != rows:
        raise ValueError("the footer contradicts itself about a column")
    total, left = 0, rows
    stream.seek(begin)
    while left > 0:
        header = _struct(stream)
        kind, unpacked, packed = (header.get(field, -1) for field in (1, 2, 3))
        details = header.get(_DETAILS.get(kind, 0))
        if not (isinstance(details, dict) and 0 <= unpacked < 1 << 31 and 0 <= packed <= end - stream.tell()):
            raise ValueError("the header of a page is damaged")
        total += unpacked
        if kind != _INDEX:
            values = details.get(1, -1)
            if values < 0 or details.get(_ENCODING[kind]) not in _ENCODINGS:
                raise ValueError("a page is of an encoding that is not read")
            if kind == _DICTIONARY:
                total += values * _ENTRY_BYTES
            else:
                left -= values
        stream.seek(packed, os.SEEK_CUR)
    if left:
        raise ValueError("the pages of a column hold more rows than the footer says")
    return total


def _struct(stream: BinaryIO, depth: int = 4) -> dict[int, Any]:
    """Read a structure in Thrift's compact protocol: values by number of the field, texts left out."""
    fields: dict[int, Any] = {}
    field = 0
    while kind := (head := _byte(stream)) & 15:
        field = field + (head >> 4) if head >> 4 else _integer(stream)
        if field in fields:
            raise ValueError("a field of a page's header stands there twice")
        fields[field] = None
        if kind in (_TRUE, _FALSE):
            fields[field] = kind == _TRUE
        elif kind == _BYTE:
            fields[field] = _byte(stream)
        elif kind in (_I16, _I32, _I64):
            fields[field] = _integer(stream)
        elif kind == _BINARY:
            stream.seek(_varint(stream), os.SEEK_CUR)
        elif kind == _STRUCT and depth:
            fields[field] = _struct(stream, depth - 1)
        else:
            raise ValueError("the header of a page is damaged")
    return fields


def _byte(stream: BinaryIO) -> int:
    byte = stream.read(1)
    if not byte:
        raise ValueError("the file ends within the header of a page")
    return byte[0]


def _varint(stream: BinaryIO) -> int:
    value = 0
    for shift in range(0, 63, 7):
        byte = _byte(stream)
        value |= (byte & 127) << shift
        if byte < 128:
            return value
    raise ValueError("a number in the header of a page has no end")


def _integer(stream: BinaryIO) -> int:
    value = _varint(stream)
    return (value >> 1) ^ -(value & 1)


# -- texts ------------------------------------------------------------------------------------------------------


def _check_codes(column: pa.ChunkedArray) -> None:
    """Refuse codes beyond their dictionary: pyarrow would read what lies behind it in memory."""
    for chunk in column.chunks:
        bounds = pc.min_max(chunk.indices).as_py()
        if bounds["max"] is not None and not 0 <= bounds["min"] <= bounds["max"] < len(chunk.dictionary):
            raise ValueError("a code has no text")


def _plain(path: Path, table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Write dictionaries out as the texts they stand for, if those are not too long in all."""
    for place, name in enumerate(table.column_names):
        kind = schema.field(name).type
        if _is_text(kind):
            lengths = [pc.sum(pc.binary_length(c.dictionary).take(c.indices)).as_py() or 0 for c in table[name].chunks]
            _check_ratio(path, sum(lengths))
            plain = kind.value_type if pa.types.is_dictionary(kind) else kind
            table = table.set_column(place, name, table[name].cast(plain))
    return table
