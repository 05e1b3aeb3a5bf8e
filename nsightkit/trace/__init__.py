"""The Trace model, one reader a format, and the Parquet store.

:func:`load` is the door for every kind of trace: it looks at the bytes, not at the name, and picks the reader.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from nsightkit.errors import AnyPath, TraceError, reading
from nsightkit.text import read_toml
from nsightkit.trace.model import GPU_TABLES, TABLES, Gpu, Source, Trace, TraceMeta

__all__ = ["GPU_TABLES", "TABLES", "Gpu", "Trace", "TraceMeta", "caching", "kind_of", "load"]

#: Kinds of files by a pattern of their first bytes; where none matches, by the end of their names.
_FIRST_BYTES = {
    rb"\Z": "empty",
    rb"version https://git-lfs": "pointer",
    rb"SQLite format 3\0": "sqlite",
    rb"\x1f\x8b|[\xef\xbb\xbf \t\r\n]*[{\[]": "json",
}
_SUFFIXES = {".nsys-rep": "nsys-rep", ".ncu-rep": "ncu-rep", ".qdrep": "nsys-rep", ".qdstrm": "unfinished"}
#: How pickles of protocols 2 to 5 begin. No pickle is loaded to find out more.
_PICKLE = rb"\x80[\x02-\x05]"
#: How far into a page of ncu its header is looked for: the profiled program's own output may come first.
_PROGRAM_BYTES = 4_000_000
#: The first two bytes of a UTF-16 text, which give the order of the others.
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
#: What to give instead, for error messages.
_SOURCES = (
    "an Nsight Systems .sqlite or parquetdir export, a .nsys-rep, a PyTorch profiler .json or .json.gz, "
    "or a folder written by `nsightkit convert`"
)
#: For each kind of file that cannot be analysed: the problem and the remedy.
_REFUSED = read_toml(__file__, "refused")


def load(path: AnyPath, *, cache: bool | None = None) -> Trace:
    """Open a trace of any supported tool.

    Parameters
    ----------
    path : path-like
        An Nsight Systems SQLite or ``parquetdir`` export or ``.nsys-rep``, a PyTorch profiler Chrome
        trace (``.json``, ``.json.gz``), or one of our own recordings (a Parquet folder).
    cache : bool, optional
        Whether columns of a big trace are kept in a Parquet cache beside it. Default: yes, unless the
        environment variable ``NSIGHTKIT_NO_CACHE`` is ``1``, ``true`` or ``yes``.

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
        return Trace(_open_with_reader(path, caching() if cache is None else cache), str(path))


def caching() -> bool:
    """Whether caches may be kept: the environment variable ``NSIGHTKIT_NO_CACHE`` is not 1, true or yes."""
    return os.environ.get("NSIGHTKIT_NO_CACHE", "") not in ("1", "true", "yes")


def kind_of(path: Path) -> str:
    """Find out what kind of file or folder a path is, by the file's first bytes.

    Parameters
    ----------
    path : Path

    Returns
    -------
    str
        Of files and folders that nsightkit reads: ``sqlite``, ``json``, ``parquetdir``, ``store`` (a recording of
        ours), ``snapshot`` (a pickle), ``ncu-csv``, ``nsys-rep``, ``ncu-rep``. Of others: ``unfinished``, ``pointer``
        (of Git LFS), ``empty``, ``absent``, ``special`` (not a regular file), ``folder``, ``other``. A file of any
        kind may be damaged.
    """
    if path.is_dir():
        from nsightkit.trace import store

        if store.is_store(path):
            return "store"
        # An nsys export holds files named `*.parquet`. Folders named so are recordings of ours (`nsightkit demo`), of
        # which the user must give one. Anything else of such a name, such as a FIFO, is refused later.
        return "folder" if all(map(Path.is_dir, path.glob("*.parquet"))) else "parquetdir"
    if not path.is_file():
        return "special" if path.exists() else "absent"
    with path.open("rb") as stream:
        head = stream.read(4096)
        kind = next((kind for pattern, kind in _FIRST_BYTES.items() if re.match(pattern, head)), None)
        kind = kind or _SUFFIXES.get(path.suffix) or ("snapshot" if re.match(_PICKLE, head) else None)
        if kind:
            return kind
        page = head + stream.read(_PROGRAM_BYTES)
    # PowerShell redirects output as UTF-16; without its zero bytes the ASCII words can be found.
    page = page.replace(b"\0", b"") if page.startswith(UTF16_MARKS) else page
    if b"ID" in page and b"Kernel Name" in page:
        return "ncu-csv"
    return "other"


def _open_with_reader(path: Path, cache: bool) -> Source:
    """Open a trace with the reader of its kind; refuse any other file, such as a memory snapshot, with a remedy."""
    # Readers are imported only here, when one is needed: pyarrow and other libraries take time to import.
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
    refusal = _REFUSED.get(kind) or _REFUSED["other"]
    raise TraceError(path, refusal["problem"], refusal["remedy"].format(name=path.name, sources=_SOURCES))
