"""Integer columns straight from the pages of an SQLite file, and how much a scan of a table would read.

SQLite's virtual machine costs about 0.25 us of CPU time a row before a single value has been handed over. An
export is written once and then only read, its rows are almost all small integers, and the file format is fixed and
documented (https://www.sqlite.org/fileformat2.html), so whole columns can be decoded with numpy instead. Of five
million kernels a whole cold ``nsightkit summary`` takes 6.8 s of CPU time in place of 10.0 s with ADBC, and a whole
``nsightkit gaps`` 8.1 s in place of 10.9 s (medians of three and five runs, two cores). Whatever is out of the ordinary
(overflow pages, text or floats in a wanted column) raises :class:`Unusual`, and the caller takes the ordinary way.

SQLite trusts the file: it follows a child page that was visited before, and many rows may share one long text, so a
scan of a crafted megabyte can yield gigabytes or never end. :func:`extent` walks the same pages first, each once, and
adds up what the rows hold: honest rows never hold more than the file. Neither function reads a page twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["NULL", "Unusual", "extent", "integer_columns"]

Int = npt.NDArray[np.int64]

#: How a NULL is given back.
NULL = np.iinfo(np.int64).min

_BLOCK = 4 << 20  # bytes of pages decoded together: their cells' arrays stay in the processor's cache
_INTERIOR, _LEAF = 5, 13
#: Bytes of the file's header, which stands before that of the first page.
_SCHEMA_HEADER = 100
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
        The database, with no journal or write-ahead log that changes it.
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
    with _opened(path) as file:
        # More rows than fit: each has a pointer, two lengths, its number and a type a column. What is never written
        # to costs nothing.
        leaves = _leaves(file, root)
        out, n = [np.empty(len(leaves) * file.page_size // (max(columns) + 6), np.int64) for _ in columns], 0
        for block in _blocks(file, leaves):
            decoded = _decode(block, file.page_size, file.usable, columns)
            for column, values in zip(out, decoded, strict=True):
                column[n : n + len(values)] = values
            n += len(decoded[0])
    return [column[:n] for column in out]


def extent(path: Path, root: int) -> tuple[int, int]:
    """Count a table's rows and the bytes that they claim to hold.

    Parameters
    ----------
    path : Path
        The database.
    root : int
        Root page of the table; 1 is the schema's.

    Returns
    -------
    rows, payload : int

    Raises
    ------
    Unusual
        The pages are no tree of a table, or one is used twice.
    """
    rows = payload = 0
    with _opened(path) as file:
        leaves = _leaves(file, root)
        header = _SCHEMA_HEADER if leaves[0] == 1 else 0
        for block in _blocks(file, leaves):
            sizes, _ = _varint(block, _cells(block, file.page_size, header), 5)
            rows += len(sizes)
            payload += int(sizes.sum())
    return rows, payload


@dataclasses.dataclass(frozen=True)
class _File:
    handle: int
    page_size: int
    usable: int
    pages: int


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[_File]:
    with path.open("rb", buffering=0) as stream:
        head = os.pread(stream.fileno(), 100, 0)
        page_size = int.from_bytes(head[16:18], "big")
        page_size = 65536 if page_size == 1 else page_size
        if len(head) < 100 or page_size < 512:
            raise Unusual("no database")
        yield _File(stream.fileno(), page_size, page_size - head[20], path.stat().st_size // page_size)


def _leaves(file: _File, root: int) -> Int:
    """Numbers of the table's leaf pages, in order of rowid."""
    level, visited = np.array([root], np.int64), 0
    seen = np.zeros(file.pages + 1, bool)
    for _ in range(20):
        if level.min() < (1 if root == 1 else 2) or level.max() > file.pages:
            raise Unusual("a damaged tree")
        seen[level] = True
        visited += len(level)
        if np.count_nonzero(seen) < visited:
            raise Unusual("a page that is used twice")
        header = _SCHEMA_HEADER if visited == root == 1 else 0
        ends = (level[[0, -1]] - 1) * file.page_size + header
        if all(os.pread(file.handle, 1, at) == bytes([_LEAF]) for at in ends.tolist()):
            return level
        children = []
        buffer = np.empty(len(level) * file.page_size + 2 * _PAD, np.uint8)
        read = _read(file.handle, level, file.page_size, buffer)
        for page in read[_PAD:-_PAD].reshape(-1, file.page_size):
            if page[header] != _INTERIOR:
                raise Unusual("no table tree, or a damaged page")
            # The right-most child stands in the header, the others each begin a cell.
            count = int.from_bytes(page[header + 3 : header + 5].tobytes(), "big")
            pointers = page[header + 12 :][: 2 * count].view(">u2").astype(np.int64)
            places = np.append(pointers, header + 8)[:, None] + np.arange(4)
            children.append(page[places].view(">u4")[:, 0].astype(np.int64))
        level = np.concatenate(children)
    raise Unusual("a tree too deep to be one")


def _blocks(file: _File, leaves: Int) -> Iterator[npt.NDArray[np.uint8]]:
    """The leaf pages, a few megabytes at a time."""
    pages = max(1, _BLOCK // file.page_size)
    buffer = np.zeros(pages * file.page_size + 2 * _PAD, np.uint8)
    for low in range(0, len(leaves), pages):
        yield _read(file.handle, leaves[low : low + pages], file.page_size, buffer)


def _read(handle: int, pages: Int, page_size: int, buffer: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Read pages into a buffer, and give the part of it that holds them and something around them."""
    filled = _PAD
    for run in np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1):
        size = len(run) * page_size
        if os.preadv(handle, [buffer.data[filled : filled + size]], (int(run[0]) - 1) * page_size) != size:
            raise Unusual("a short read")
        filled += size
    return buffer[: filled + _PAD]


def _cells(block: npt.NDArray[np.uint8], page_size: int, header: int = 0) -> Int:
    """Where the cells of a block of leaf pages begin."""
    pages = (len(block) - 2 * _PAD) // page_size
    start = _PAD + page_size * np.arange(pages, dtype=np.int64)
    base = start + header
    if (block[base] != _LEAF).any():
        raise Unusual("a page that is not a leaf")
    cells = block[base + 3].astype(np.int64) << 8 | block[base + 4]
    if int(cells.max(initial=0)) > (page_size - 8) // 6:
        raise Unusual("more cells than a page can hold")
    page = np.repeat(np.arange(pages), cells)
    first = np.cumsum(cells) - cells
    slot = np.arange(len(page)) - first[page]
    # Page starts, headers and slots are even, so the cell pointers can be read as big-endian pairs.
    return np.asarray(block.view(">u2")[(base[page] + 8 >> 1) + slot] + start[page], np.int64)


def _decode(block: npt.NDArray[np.uint8], page_size: int, usable: int, columns: Sequence[int]) -> list[Int]:
    """The wanted columns of the cells of a block of leaf pages."""
    size, at = _varint(block, _cells(block, page_size), 3)
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
