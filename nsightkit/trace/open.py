"""One door for every kind of trace: look at the bytes, not at the name, and pick the reader."""

from __future__ import annotations

import os
from pathlib import Path

from nsightkit.errors import TraceError
from nsightkit.trace.model import Source, Trace

__all__ = ["load"]

_SQLITE_MAGIC = b"SQLite format 3\x00"
_GZIP_MAGIC = b"\x1f\x8b"
_SOURCES = (
    "an Nsight Systems .sqlite or parquetdir export, a .nsys-rep, a PyTorch profiler .json or .json.gz, "
    "or a folder written by `nsightkit convert`"
)


def load(path: str | os.PathLike[str], *, cache: bool | None = None) -> Trace:
    """Open a trace, whatever wrote it.

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
    if cache is None:
        cache = os.environ.get("NSIGHTKIT_NO_CACHE", "") not in ("1", "true", "yes")
    try:
        source = _open(path, cache)
    except PermissionError as error:
        raise TraceError(path, "cannot be read (permission denied)", "check its owner and mode") from error
    except OSError as error:
        raise TraceError(path, f"cannot be read ({error.strerror or error})", "check the path and the disk") from error
    return Trace(source, str(path))


def _open(path: Path, cache: bool) -> Source:
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise TraceError(path, "no such file", "check the path")
    if not path.is_file():
        raise TraceError(path, "is not a regular file", f"give {_SOURCES}")
    with path.open("rb") as stream:
        head = stream.read(4096)
    if not head:
        raise TraceError(path, "is empty", "capture it again, the profiler was probably stopped before it wrote")
    if head.startswith(_SQLITE_MAGIC):
        from nsightkit.trace import nsys

        return nsys.open_sqlite(path, cache=cache)
    if head.startswith(_GZIP_MAGIC) or head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
        from nsightkit.trace import kineto

        return kineto.open_kineto(path, cache=cache)
    if path.suffix == ".nsys-rep":
        from nsightkit.trace import nsys, nsys_tool

        return nsys.open_sqlite(nsys_tool.exported(path), cache=cache)
    if path.suffix in (".qdrep", ".qdstrm"):
        raise TraceError(
            path,
            "is an unfinished or old Nsight Systems report",
            "open it once in the nsys GUI or run its importer to get a .nsys-rep",
        )
    if head[0] == 0x80 and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        # By its first bytes, which are those of any pickle: nothing here loads one to see what it is.
        raise TraceError(path, "is a pickle: a memory snapshot, not a trace", f"try `nsightkit memory {path.name}`")
    if path.suffix == ".ncu-rep":
        raise TraceError(path, "is an Nsight Compute report, which has no timeline", "ask nsightkit ncu about it")
    raise TraceError(path, "is no trace that nsightkit knows", f"give {_SOURCES}")


def _open_folder(path: Path) -> Source:
    from nsightkit.trace import store

    if store.is_store(path):
        return store.open_store(path)
    if any(path.glob("*.parquet")):
        from nsightkit.trace import nsys

        return nsys.open_parquetdir(path)
    raise TraceError(path, "is a folder without trace tables", f"give {_SOURCES}")
