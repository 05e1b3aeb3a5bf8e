"""Integer columns straight from the pages of an SQLite file, a few thousand pages at a time.

SQLite's virtual machine costs about 0.25 us of CPU time a row before a single value has been handed over. An
export is written once and then only read, its rows are almost all small integers, and the file format is fixed and
documented (https://www.sqlite.org/fileformat2.html), so whole columns can be decoded with numpy instead. Of five
million kernels a whole cold ``nsightkit summary`` takes 6.8 s of CPU time in place of 10.0 s with ADBC, and a whole
``nsightkit gaps`` 8.1 s in place of 10.9 s (medians of three and five runs, two cores). Whatever is out of the ordinary
(a write-ahead log, overflow pages, text or floats in a wanted column) raises :class:`Unusual`, and the caller takes the
ordinary way.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["NULL", "Unusual", "integer_columns"]

Int = npt.NDArray[np.int64]

#: How a NULL is given back.
NULL = np.iinfo(np.int64).min

_PAGES = 1024  # decoded together: their cells' arrays stay in the processor's cache
_INTERIOR, _LEAF = 5, 13
#: Content bytes of serial types 0 to 11: NULL, integers of 1, 2, 3, 4, 6 and 8 bytes, a float, the constants 0 and 1.
_BYTES = np.array([0, 1, 2, 3, 4, 6, 8, 8, 0, 0, 0, 0], np.int64)
_FLOAT = 7
#: Values of the serial types that have no content.
_CONSTANTS = {0: NULL, 8: 0, 9: 1}
#: Bytes before and after the pages, so that eight can be read around any value.
_PAD = 16


class Unusual(Exception):
    """The table cannot be decoded this way; not an error of the file."""


def integer_columns(path: Path, root: int, columns: Sequence[int]) -> list[Int]:
    """Integer columns of a table, in rowid order.

    Parameters
    ----------
    path : Path
        The database.
    root : int
        Root page of the table (``sqlite_master.rootpage``).
    columns : sequence of int
        Positions of the wanted columns in the table.

    Returns
    -------
    list of ndarray of int64
        One a column; NULL as :data:`NULL`.

    Raises
    ------
    Unusual
        The table needs SQLite itself.
    """
    if root < 2 or any(path.with_name(path.name + tail).exists() for tail in ("-wal", "-journal")):
        raise Unusual("not a plain table, or a journal lies beside the file")
    with path.open("rb", buffering=0) as stream:
        head = os.pread(stream.fileno(), 100, 0)
        page_size = int.from_bytes(head[16:18], "big")
        page_size = 65536 if page_size == 1 else page_size
        if len(head) < 100 or page_size < 512 or head[18] > 1 or head[19] > 1:
            raise Unusual("a write-ahead log or no database")
        leaves = _leaves(stream.fileno(), root, page_size, path.stat().st_size // page_size)
        # More rows than fit: each has a pointer, two lengths, its number and a type a column. What is never written
        # to costs nothing.
        out, n = [np.empty(len(leaves) * page_size // (max(columns) + 6), np.int64) for _ in columns], 0
        buffer = np.zeros(_PAGES * page_size + 2 * _PAD, np.uint8)
        for low in range(0, len(leaves), _PAGES):
            block = _read(stream.fileno(), leaves[low : low + _PAGES], page_size, buffer)
            decoded = _decode(block, page_size, page_size - head[20], columns)
            for column, values in zip(out, decoded, strict=True):
                column[n : n + len(values)] = values
            n += len(decoded[0])
    return [column[:n] for column in out]


def _leaves(handle: int, root: int, page_size: int, pages: int) -> Int:
    """Numbers of the table's leaf pages, in order of rowid."""
    level = np.array([root], np.int64)
    for _ in range(20):
        if all(os.pread(handle, 1, (page - 1) * page_size) == bytes([_LEAF]) for page in level[[0, -1]].tolist()):
            return level
        children = []
        read = _read(handle, level, page_size, np.empty(len(level) * page_size + 2 * _PAD, np.uint8))
        for page in read[_PAD:-_PAD].reshape(-1, page_size):
            if page[0] != _INTERIOR:
                raise Unusual("no table tree, or a damaged page")
            # The right-most child stands in the header, the others each begin a cell.
            pointers = page[12:][: 2 * int.from_bytes(page[3:5].tobytes(), "big")].view(">u2").astype(np.int64)
            places = np.append(pointers, 8)[:, None] + np.arange(4)
            children.append(page[places].view(">u4")[:, 0].astype(np.int64))
        level = np.concatenate(children)
        if len(level) > pages or level.min() < 2 or level.max() > pages:
            raise Unusual("a damaged tree")
    raise Unusual("a tree too deep to be one")


def _read(handle: int, pages: Int, page_size: int, buffer: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Read pages into a buffer, and give the part of it that holds them and something around them."""
    filled = _PAD
    for run in np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1):
        size = len(run) * page_size
        if os.preadv(handle, [buffer.data[filled : filled + size]], (int(run[0]) - 1) * page_size) != size:
            raise Unusual("a short read")
        filled += size
    return buffer[: filled + _PAD]


def _decode(block: npt.NDArray[np.uint8], page_size: int, usable: int, columns: Sequence[int]) -> list[Int]:
    """The wanted columns of the cells of a block of leaf pages."""
    pages = (len(block) - 2 * _PAD) // page_size
    base = _PAD + page_size * np.arange(pages, dtype=np.int64)
    if (block[base] != _LEAF).any():
        raise Unusual("a page that is not a leaf")
    cells = block[base + 3].astype(np.int64) << 8 | block[base + 4]
    page = np.repeat(np.arange(pages), cells)
    first = np.cumsum(cells) - cells
    slot = np.arange(len(page)) - first[page]
    # Page starts, header and slots are even, so the cell pointers can be read as big-endian pairs.
    at = block.view(">u2")[(base[page] + 8 >> 1) + slot] + base[page]
    size, at = _varint(block, at, 3)
    if len(size) and int(size.max()) > usable - 35:
        raise Unusual("overflow pages")
    _, at = _varint(block, at, 9)  # the row's number
    header, kind = _varint(block, at, 2)
    body = at + header
    wide = np.ndarray((len(block) - 7,), ">i8", block.data, strides=(1,))
    found: dict[int, Int] = {}
    for column in range(max(columns) + 1):
        if len(kind) and (kind >= body).any():
            raise Unusual("rows of different widths")
        serial, kind = _varint(block, kind, 3)
        low, high = (int(serial.min()), int(serial.max())) if len(serial) else (0, 0)
        length: Any
        if high > 11:
            if column in columns:
                raise Unusual("text")
            length = np.where(serial < 12, _BYTES[np.minimum(serial, 11)], (serial - 12) >> 1)
        else:
            length = int(_BYTES[low]) if low == high else _BYTES[serial]
        if column in columns:
            found[column] = _integers(wide, serial, low, high, body, length)
        body = body + length
    return [found[c] for c in columns]


def _integers(wide: Any, serial: Int, low: int, high: int, body: Int, length: Any) -> Int:
    if low == high and low in _CONSTANTS:
        return np.full(len(serial), _CONSTANTS[low], np.int64)
    if high > max(_CONSTANTS) or (low <= _FLOAT <= high and (serial == _FLOAT).any()):
        raise Unusual("a float")
    # The eight bytes that end with the value's last one, then its sign spread over the rest.
    shift = np.minimum(64 - 8 * length, 63)
    value = (wide[body + (length - 8)].astype(np.int64) << shift) >> shift
    for kind, constant in _CONSTANTS.items():
        if low <= kind <= high:
            value = np.where(serial == kind, constant, value)
    return np.asarray(value, np.int64)


def _varint(block: npt.NDArray[np.uint8], at: Int, limit: int) -> tuple[Int, Int]:
    """Values of variable-length integers of at most `limit` bytes, and where they end."""
    value = block[at].astype(np.int64)
    at = at + 1
    if not len(value) or int(value.max()) < 128:
        return value, at
    more = value >= 128
    value &= 127
    for _ in range(limit - 1):
        rows = np.flatnonzero(more)
        byte = block[at[rows]].astype(np.int64)
        value[rows] = value[rows] << 7 | byte & 127
        at[rows] += 1
        more[rows] = byte >= 128
        if not more.any():
            return value, at
    raise Unusual("a very long row")
