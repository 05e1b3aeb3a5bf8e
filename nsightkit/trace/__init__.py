"""The Trace model, one reader a format, and the Parquet store.

:func:`load` is the door for every kind of trace: it looks at the bytes, not at the name, and picks the reader.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from nsightkit.errors import AnyPath, TraceError, reading
from nsightkit.trace.model import GPU_TABLES, TABLES, Gpu, Source, Trace, TraceMeta

__all__ = ["GPU_TABLES", "TABLES", "Gpu", "Trace", "TraceMeta", "caching", "kind_of", "load"]

#: What files are by their first bytes, and, where these do not tell, by the end of their names.
_FIRST_BYTES = {
    rb"\Z": "empty",
    rb"version https://git-lfs": "pointer",
    rb"SQLite format 3\0": "sqlite",
    rb"\x1f\x8b|[\xef\xbb\xbf \t\r\n]*[{\[]": "json",
}
_SUFFIXES = {".nsys-rep": "nsys-rep", ".ncu-rep": "ncu-rep", ".qdrep": "nsys-rep", ".qdstrm": "unfinished"}
#: Of any pickle, which is never loaded to find out more.
_PICKLE = rb"\x80[\x02-\x05]"
_PROGRAM_BYTES = 4 << 20
_SOURCES = (
    "an Nsight Systems .sqlite or parquetdir export, a .nsys-rep, a PyTorch profiler .json or .json.gz, "
    "or a folder written by `nsightkit convert`"
)


def load(path: AnyPath, *, cache: bool | None = None) -> Trace:
    """Open a trace of any supported tool.

    Parameters
    ----------
    path : path-like
        An Nsight Systems SQLite or ``parquetdir`` export or ``.nsys-rep``, a PyTorch profiler Chrome
        trace (``.json``, ``.json.gz``), or one of our own recordings (a Parquet folder).
    cache : bool, optional
        Whether columns of a big trace are kept in a Parquet cache beside it. Default: yes, unless the
        environment variable ``NSIGHTKIT_NO_CACHE`` is ``1``.

    Returns
    -------
    Trace

    Raises
    ------
    TraceError
        The file is absent, truncated, empty or of another kind. Names the file and the remedy.
    """
    path = Path(path)
    with reading(path):
        return Trace(_open(path, caching() if cache is None else cache), str(path))


def caching() -> bool:
    """Whether the user lets caches be kept."""
    return os.environ.get("NSIGHTKIT_NO_CACHE", "") not in ("1", "true", "yes")


def kind_of(path: Path) -> str:
    """Say by its first bytes what a file or folder is.

    Parameters
    ----------
    path : Path

    Returns
    -------
    str
        ``sqlite``, ``json``, ``parquetdir``, ``store``, ``snapshot``, ``ncu-csv``, ``nsys-rep``, ``ncu-rep``,
        ``unfinished``, ``pointer`` (of Git LFS), ``empty``; ``absent``, ``special`` (no regular file), ``folder`` and
        ``other`` are nothing that is known here. It may still be damaged.
    """
    if path.is_dir():
        from nsightkit.trace import store

        if store.is_store(path):
            return "store"
        return "parquetdir" if any(path.glob("*.parquet")) else "folder"
    if not path.is_file():
        if path.exists():
            return "special"
        return "absent"
    with path.open("rb") as stream:
        head = stream.read(4096)
        known = next((kind for pattern, kind in _FIRST_BYTES.items() if re.match(pattern, head)), None)
        known = known or _SUFFIXES.get(path.suffix) or ("snapshot" if re.match(_PICKLE, head) else None)
        if known:
            return known
        page = head + stream.read(_PROGRAM_BYTES)  # the program's own output may stand before ncu's
    page = page.replace(b"\0", b"") if page[:2] in (b"\xff\xfe", b"\xfe\xff") else page
    if b"ID" in page and b"Kernel Name" in page:
        return "ncu-csv"
    return "other"


def _open(path: Path, cache: bool) -> Source:
    # A reader is imported for what it reads: it needs pyarrow and more, which takes time.
    kind = kind_of(path)
    if kind == "store":
        from nsightkit.trace import store

        return store.open_store(path)
    if kind == "json":
        from nsightkit.trace import kineto

        return kineto.open_kineto(path, cache=cache)
    if kind in ("sqlite", "nsys-rep", "parquetdir"):
        from nsightkit.trace import nsys

        if kind == "parquetdir":
            return nsys.open_parquetdir(path)
        if kind == "sqlite":
            return nsys.open_sqlite(path, cache=cache)
        return nsys.open_report(path, cache=cache)
    problem, remedy = _REFUSED.get(kind, ("is not a trace that nsightkit knows", f"give {_SOURCES}"))
    raise TraceError(path, problem, remedy.format(name=path.name))


_COUNTERS = "ask `nsightkit ncu {name}` about it; to compare two, make one a baseline of nsightkit check"
_REFUSED = {
    "absent": ("no such file", "check the path"),
    "special": ("is not a regular file", f"give {_SOURCES}"),
    "folder": ("is a folder without trace tables", f"give {_SOURCES}"),
    "pointer": ("is a pointer of Git LFS, not the file itself", "run `git lfs pull`"),
    "empty": ("is empty", "capture it again, the profiler was probably stopped before it wrote"),
    "unfinished": (
        "is an unfinished Nsight Systems report",
        "open it once in the nsys GUI or run its QdstrmImporter to get a .nsys-rep",
    ),
    "snapshot": ("is a pickle: a memory snapshot, not a trace", "try `nsightkit memory {name}`"),
    "ncu-rep": ("is an Nsight Compute report, which has no timeline", _COUNTERS),
    "ncu-csv": ("is a page of Nsight Compute, which has no timeline", _COUNTERS),
}
