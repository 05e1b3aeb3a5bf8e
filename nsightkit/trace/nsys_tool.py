"""The installed ``nsys``: where it is, which version, and the export of its reports.

Some versions hang, exit codes say little, and report names come from people: every call here has a
time limit, checks the file it should have made, and passes names as arguments, never through a shell.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

from nsightkit.errors import NsightkitError, TraceError, reading
from nsightkit.trace._process import find_program, run, tail, version_of
from nsightkit.trace.files import drafted, user_cache

__all__ = ["LIBRARIES", "MINIMUM", "environment", "export", "export_command", "exported", "find", "require", "version"]

#: The oldest nsys that is known to work without hanging; 2022.4 hangs on recent systems.
MINIMUM = (2023, 4)
#: Environment variable: folders of libraries that nsys lacks on this machine, such as the libdw of its importer.
LIBRARIES = "NSIGHTKIT_NSYS_LIBRARIES"

# Where NVIDIA's installers and containers put it when it is not on the PATH; the one inside Nsight Compute last.
_FOLDERS = (
    "/usr/local/cuda*/bin/nsys",
    "/opt/nvidia/nsight-systems/*/bin/nsys",
    "/opt/nvidia/nsight-systems/*/target-linux-*/nsys",
    "/opt/nvidia/nsight-systems-cli/*/bin/nsys",
    "/opt/nvidia/nsight-compute/*/host/target-linux-*/nsys",
    "/usr/local/cuda*/nsight-compute-*/host/target-linux-*/nsys",
    "/usr/lib/nsight-compute*/host/target-linux-*/nsys",
)


def find() -> Path | None:
    """Where ``nsys`` is.

    Looks at the environment variable ``NSIGHTKIT_NSYS``, then at the ``PATH``, then where NVIDIA's
    installers put it (the newest first), last inside the Nsight Compute whose ``ncu`` is on the ``PATH``. It
    does not start the program.

    Returns
    -------
    Path or None

    Raises
    ------
    UsageError
        ``NSIGHTKIT_NSYS`` names something that is not a program.
    """
    ncu = shutil.which("ncu")
    around_ncu = list(Path(ncu).resolve().parents)[:4] if ncu else []
    inside = [f"{glob.escape(str(folder))}/host/target-linux-*/nsys" for folder in around_ncu]
    return find_program("nsys", "NSIGHTKIT_NSYS", [*_FOLDERS, *inside])


def environment(base: Mapping[str, str] | None = None, *folders: Path) -> dict[str, str]:
    """Give the environment to start nsys, or a part of it, in.

    Parameters
    ----------
    base : mapping, optional
        The present environment when omitted.
    *folders : Path
        Where its libraries lie.

    Returns
    -------
    dict
        With the folders, and before them what :data:`LIBRARIES` names, first on ``LD_LIBRARY_PATH``.
    """
    found = dict(os.environ if base is None else base)
    path = [os.environ.get(LIBRARIES, ""), *map(str, folders), found.get("LD_LIBRARY_PATH", "")]
    if any(path[:-1]):
        found["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, path))
    return found


@functools.lru_cache(maxsize=8)
def version(path: str | os.PathLike[str], timeout_s: float = 20.0) -> tuple[int, ...]:
    """Version of an nsys, such as ``(2023, 4, 4, 54)``.

    Parameters
    ----------
    path : path-like
    timeout_s : float
        Old versions hang even here; then they are as good as absent.

    Returns
    -------
    tuple of int

    Raises
    ------
    NsightkitError
        It does not start, hangs, or does not name its version.
    """
    return tuple(int(part) for part in version_of(path, "nsys", timeout_s).split("."))


def _words(numbers: tuple[int, ...]) -> str:
    return "nsys " + ".".join(str(n) for n in numbers)


def require() -> Path:
    """Find an nsys that works, for a caller that cannot go on without.

    Returns
    -------
    Path

    Raises
    ------
    NsightkitError
        None is installed, or it hangs, or is older than :data:`MINIMUM`.
    """
    nsys = find()
    if nsys is None:
        raise NsightkitError(
            "nsys is not installed (not on the PATH, nor where NVIDIA's installers put it); "
            "install Nsight Systems, or set NSIGHTKIT_NSYS to its nsys program"
        )
    if version(nsys)[:2] < MINIMUM:
        raise NsightkitError(
            f"{nsys}: is {_words(version(nsys))}, which is too old; "
            f"install {_words(MINIMUM)} or later, or set NSIGHTKIT_NSYS to one"
        )
    return nsys


def export_command(report: str | os.PathLike[str], out: str | os.PathLike[str], nsys: str = "nsys") -> list[str]:
    """Spell the command that exports a report to SQLite.

    Parameters
    ----------
    report, out : path-like
    nsys : str

    Returns
    -------
    list of str
        Arguments; file names that begin with a dash are made safe.
    """
    names = [f"./{name}" if name.startswith("-") else name for name in (os.fspath(out), os.fspath(report))]
    return [nsys, "export", "--type", "sqlite", "--force-overwrite", "true", "-o", *names]


def export(report: str | os.PathLike[str], out: str | os.PathLike[str], *, timeout_s: float = 1800.0) -> Path:
    """Export a ``.nsys-rep`` to SQLite; `out` appears whole or not at all.

    Parameters
    ----------
    report : path-like
    out : path-like
        Replaced when it exists.
    timeout_s : float
        A multi-gigabyte report takes minutes.

    Returns
    -------
    Path
        `out`.

    Raises
    ------
    TraceError
        No usable nsys is installed, or it cannot read the report. The remedy is a command to run.
    """
    report, out = Path(report), Path(out)
    command = shlex.join(export_command(report, out))
    try:
        nsys = require()
    except NsightkitError as error:
        raise TraceError(
            report, f"has to be exported first and no usable nsys is here ({error})", f"run where nsys is: {command}"
        ) from error
    by_hand = f"run it by hand: {command}"
    try:
        with drafted(out) as whole:
            done = run(export_command(report.absolute(), whole, str(nsys)), timeout_s, env=environment())
            # The exit code says little; the file says all.
            if not _is_sqlite(whole):
                said = tail(done.stdout, 3) or f"exit code {done.returncode}, no message"
                newer = "Version number is invalid" in done.stdout  # an older nsys refuses the reports of a newer one
                remedy = "export it with the nsys that wrote it, or a newer one" if newer else _WHOLE
                problem = f"{_words(version(nsys))} cannot export it ({said})"
                raise TraceError(report, problem, f"{remedy}, then {by_hand}")
    except subprocess.TimeoutExpired as error:
        raise TraceError(report, f"nsys export was not done within {timeout_s:g} s", by_hand) from error
    except OSError as error:
        raise TraceError(
            report,
            f"its export cannot be written to {out} ({error.strerror or error})",
            "free some space or make the folder writable, or export it elsewhere and give the .sqlite",
        ) from error
    return out


#: What to check of a report that cannot be exported: not every version says that the report is of a newer one.
_WHOLE = "check that it is whole, and that this nsys is not older than the one that wrote it"


def _is_sqlite(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as stream:
        return stream.read(16) == b"SQLite format 3\x00"
    return False


def exported(report: str | os.PathLike[str]) -> Path:
    """Give the SQLite export of a ``.nsys-rep``, made anew unless one is newer than the report.

    It lies beside the report under nsys's own name for it (``x.nsys-rep`` gives ``x.sqlite``), or in the
    user's cache folder when the report's folder is read-only.

    Parameters
    ----------
    report : path-like

    Returns
    -------
    Path

    Raises
    ------
    TraceError
        As :func:`export`.
    """
    report = Path(report)
    with reading(report):
        written_ns = report.stat().st_mtime_ns
    beside = report.with_suffix(".sqlite")
    # The folder tells two reports of one name apart.
    tag = blake2b(os.fsencode(report.resolve()), digest_size=8).hexdigest()
    kept = user_cache() / "exports" / f"{report.stem}-{tag}.sqlite"
    for made in (beside, kept):
        if _is_sqlite(made) and made.stat().st_mtime_ns > written_ns:
            return made
    # `beside` may be there and older: nsys itself treats that name as its own export and replaces it.
    if os.access(beside.absolute().parent, os.W_OK) and not beside.is_dir():
        return export(report, beside)
    with contextlib.suppress(OSError):  # which `export` then says
        kept.parent.mkdir(parents=True, exist_ok=True)
    return export(report, kept)
