"""SQLite files page by page, for what SQLite itself would never write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["cell", "interior", "leaf", "record", "write"]


def varint(number: int) -> bytes:
    """A number in SQLite's form of variable length."""
    groups = [number & 127]
    while number := number >> 7:
        groups.append(number & 127 | 128)
    return bytes(reversed(groups))


def record(*values: int | str | bytes | None) -> bytes:
    """A row's content: types, then values."""
    types, body = b"", b""
    for value in values:
        if value is None:
            types += b"\0"
        elif isinstance(value, int):
            types += b"\6"
            body += value.to_bytes(8, "big", signed=True)
        else:
            raw = value.encode() if isinstance(value, str) else value
            types += varint(12 + 2 * len(raw) + isinstance(value, str))
            body += raw
    return varint(len(types) + 1) + types + body


def cell(row: int, content: bytes) -> bytes:
    """A cell of a leaf."""
    return varint(len(content)) + varint(row) + content


def leaf(cells: Sequence[bytes], page_size: int, *, header: int = 0, shared: int = 1) -> bytes:
    """A leaf page; each cell is pointed to `shared` times."""
    page = bytearray(page_size)
    places, end = [], page_size
    for content in cells:
        end -= len(content)
        page[end : end + len(content)] = content
        places += [end] * shared
    pointers = b"".join(place.to_bytes(2, "big") for place in places)
    start = b"\r\0\0" + len(places).to_bytes(2, "big") + (end % 65536).to_bytes(2, "big") + b"\0" + pointers
    assert header + len(start) <= end
    page[header : header + len(start)] = start
    return bytes(page)


def interior(children: Sequence[int], page_size: int) -> bytes:
    """An interior page of a table."""
    page = bytearray(page_size)
    *others, last = children
    cells = [child.to_bytes(4, "big") + varint(place) for place, child in enumerate(others)]
    places, end = [], page_size
    for content in cells:
        end -= len(content)
        page[end : end + len(content)] = content
        places.append(end)
    start = b"\5\0\0" + len(places).to_bytes(2, "big") + (end % 65536).to_bytes(2, "big") + b"\0"
    start += last.to_bytes(4, "big") + b"".join(place.to_bytes(2, "big") for place in places)
    assert len(start) <= end
    page[: len(start)] = start
    return bytes(page)


def write(path: Path, pages: Sequence[bytes]) -> Path:
    """A database of these pages; the first one leaves room for the file's header."""
    size = len(pages[0])
    number = (1 if size == 65536 else size).to_bytes(2, "big")
    count = len(pages).to_bytes(4, "big")
    head = b"SQLite format 3\0" + number + b"\1\1\0\x40\x20\x20" + b"\0\0\0\1" + count + bytes(8)
    head += b"\0\0\0\1\0\0\0\4" + bytes(8) + b"\0\0\0\1" + bytes(32) + b"\0\0\0\1" + b"\0\x2e\x8d\x01"
    assert len(head) == 100
    path.write_bytes(head + pages[0][100:] + b"".join(pages[1:]))
    return path
