"""Run other programs with a time limit that also holds for what they start, above all nsys and ncu.

Some versions of nsys hang, exit codes say little, and report names come from people: every call here has a time limit,
checks the file it should have made, and passes names as arguments, never through a shell. Nothing needs a GPU.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import functools
import glob
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

from nsightkit.errors import AnyPath, NsightkitError, TraceError, UsageError, reading
from nsightkit.trace.files import drafted, make_private, user_cache

#: Of Linux's prctl: the signal a process gets when its parent dies.
_PARENT_DEATH_SIGNAL = 1
#: A multi-gigabyte report takes minutes to export.
_EXPORT_TIMEOUT_S = 1800.0


def run(
    command: Sequence[str],
    timeout_s: float,
    *,
    cwd: AnyPath | None = None,
    env: dict[str, str] | None = None,
    show: bool = False,
    interrupt_s: float = 0.0,
) -> subprocess.CompletedProcess[str]:
    """Run a command, never through a shell, and end all it started when the time is up.

    ``subprocess.run(timeout=...)`` ends only the first process: a profiler's agents and the profiled
    program would live on and hold the pipes open. On Linux the command dies with this process.

    Parameters
    ----------
    command : sequence of str
    timeout_s : float
    cwd : path-like, optional
    env : dict, optional
        The whole environment; the present one when omitted.
    show : bool
        Let the program write both its streams to this process's stderr, instead of keeping its output.
    interrupt_s : float
        When the time is up, first interrupt it (as Ctrl-C does) and wait this long for it to finish.

    Returns
    -------
    CompletedProcess
        ``stdout`` holds both streams, empty with `show`; undecodable bytes are replaced. After an interruption that the
        program obeyed, ``returncode`` is its own.

    Raises
    ------
    subprocess.TimeoutExpired
        ``output`` holds what it had written.
    FileNotFoundError, PermissionError
        The program cannot be started.
    """
    # 2: the descriptor, because a test or a notebook may have replaced sys.stderr by an object without one
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=2 if show else subprocess.PIPE,
        stderr=2 if show else subprocess.STDOUT,
        cwd=cwd,
        env=env,
        start_new_session=True,
        text=True,
        errors="replace",
        preexec_fn=_dying_with_parent(),  # noqa: PLW1509 - it only calls the C library, which is loaded before the fork
    )
    with process:
        try:
            output = _wait_for_output(process, timeout_s, interrupt_s)
        except subprocess.TimeoutExpired:
            _kill_with_descendants(process.pid)
            output, _ = process.communicate()
            raise subprocess.TimeoutExpired(list(command), timeout_s, output=output) from None
        except BaseException:
            _kill_with_descendants(process.pid)
            raise
    return subprocess.CompletedProcess(list(command), process.returncode, output or "", "")


def _wait_for_output(process: subprocess.Popen[str], timeout_s: float, interrupt_s: float) -> str | None:
    """Wait for a process and return its output, None if that does not go into a pipe.

    When the time is up, interrupt the process and give it `interrupt_s` more to finish, unless that is 0.
    """
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        if not interrupt_s:
            raise
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=interrupt_s)
    return output


def output_of(*command: str, timeout_s: float = 20.0, env: dict[str, str] | None = None) -> str:
    """Return a command's standard output, "" if it does not start, fails or hangs.

    Parameters
    ----------
    *command : str
    timeout_s : float
    env : dict, optional
        The whole environment; the present one when omitted.
    """
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command,
            timeout=timeout_s,
            check=True,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
        return done.stdout
    return ""


def _dying_with_parent() -> Callable[[], None] | None:
    """Return a preexec hook that kills the child when this process exits (Linux only).

    Linux watches the thread that forks: that thread has to wait for the child.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def bind_to_parent() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs would ignore it
        prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before Linux watched it for this process
            os._exit(1)

    return bind_to_parent


def _kill_with_descendants(pid: int) -> None:
    """Kill a process and its descendants, also a profiled program, which its profiler starts in another session."""
    for process in [pid, *_descendant_processes(pid)]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)


def _descendant_processes(pid: int) -> list[int]:
    """List the processes that a process started, and those that these started, and so on; none without ``/proc``.

    A profiler starts the profiled program in another session, so killing a process group would miss it.
    """
    children: dict[int, list[int]] = collections.defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            # The name in parentheses may itself hold blanks and parentheses; the state and the parent follow it.
            _, parent, *_ = stat.read_text(errors="replace").rpartition(")")[2].split()
            children[int(parent)].append(int(stat.parent.name))
    descendants = list(children[pid])
    for process in descendants:  # the list grows under way, by the children of each process in it
        descendants += children[process]
    return descendants


def tail(text: str | bytes | None, lines: int = 6) -> str:
    """Join the last lines of a program's output in one line, for an error message.

    Parameters
    ----------
    text : str or bytes, optional
    lines : int
    """
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    visible_lines = []
    for line in (text or "").splitlines():
        # a progress bar is one line with many carriage returns: what stands after the last one stays visible
        visible = line.rpartition("\r")[2].strip()
        if visible:
            visible_lines.append(visible)
    return " | ".join(visible_lines[-lines:])


# ---------------------------------------------------------------- nsys and ncu


@dataclasses.dataclass(frozen=True)
class Tool:
    """One of NVIDIA's profilers, as it is installed here.

    Parameters
    ----------
    name : str
        The program's name on the ``PATH``.
    product : str
        The package that installs it.
    folders : tuple of str
        Absolute glob patterns of the places where NVIDIA's installers and containers put it.
    minimum : tuple of int
        Year and number of the oldest version that works; empty for any.
    """

    name: str
    product: str
    folders: tuple[str, ...]
    minimum: tuple[int, ...] = ()

    @property
    def variable(self) -> str:
        """The environment variable that names another program."""
        return f"NSIGHTKIT_{self.name.upper()}"

    def find(self) -> Path | None:
        """Find the program without starting it.

        Looks at its environment variable, then at the ``PATH``, then where NVIDIA's installers put it, the newest
        first.

        Returns
        -------
        Path or None

        Raises
        ------
        UsageError
            The variable names something that is not a program.
        """
        chosen = os.environ.get(self.variable)
        if chosen:
            path = Path(chosen).expanduser()
            if not _is_program(path):
                problem = f"{self.variable} is {chosen!r}, which is not a program"
                raise UsageError(f"{problem}; give the path of {self.name}, or unset it")
            return path
        on_path = shutil.which(self.name)
        if on_path:
            return Path(on_path)
        for pattern in self.folders:
            installed = filter(_is_program, Path("/").glob(pattern.lstrip("/")))
            newest = max(installed, key=_numbers_in, default=None)
            if newest:
                return newest
        return None

    def require(self) -> Path:
        """Find the program, and require a version that works.

        Returns
        -------
        Path

        Raises
        ------
        NsightkitError
            None is installed, or it hangs, or is older than the minimum.
        """
        program = self.find()
        if program is None:
            raise NsightkitError(
                f"{self.name} is not installed (not on the PATH, nor where NVIDIA's installers put it); install "
                f"{self.product}, or set {self.variable} to its {self.name} program"
            )
        if self.minimum:
            version = self.version(program)
            if version[:2] < self.minimum:
                problem = f"{program}: is {self.name} {dotted(version)}, which is too old"
                remedy = f"install {self.name} {dotted(self.minimum)} or later, or set {self.variable} to one"
                raise NsightkitError(f"{problem}; {remedy}")
        return program

    @functools.cache  # noqa: B019 - it keeps the tool, but there are only NSYS and NCU
    def ask(self, program: str | Path, *arguments: str, timeout_s: float = 60.0) -> str:
        """Run the program with arguments that make it tell about itself; the answer is kept.

        Parameters
        ----------
        program : path-like
        *arguments : str
            Such as ``--help``.
        timeout_s : float

        Returns
        -------
        str
            Its answer.

        Raises
        ------
        NsightkitError
            It does not start, or hangs.
        """
        remedy = f"set {self.variable} to a working {self.name}"
        question = f"{program}: '{' '.join(arguments)}'"
        try:
            return run([os.fspath(program), *arguments], timeout_s).stdout
        except subprocess.TimeoutExpired as error:
            raise NsightkitError(f"{question} gave no answer within {timeout_s:g} s; {remedy}") from error
        except OSError as error:
            raise NsightkitError(f"{question} does not start ({error}); {remedy}") from error

    def version(self, program: str | Path, timeout_s: float = 20.0) -> tuple[int, ...]:
        """Ask the program for its version, such as ``(2023, 4, 4, 54)``.

        Parameters
        ----------
        program : path-like
        timeout_s : float
            Old versions hang even here.

        Raises
        ------
        NsightkitError
            It does not start, hangs, or prints no version.
        """
        answer = self.ask(program, "--version", timeout_s=timeout_s)
        version = re.search(r"\b\d{4}(?:\.\d+)+", answer)
        if version is None:
            problem = f"{program}: said no version ({tail(answer, 2)})"
            raise NsightkitError(f"{problem}; set {self.variable} to a working {self.name}")
        return tuple(map(int, version[0].split(".")))


def _is_program(path: Path) -> bool:
    """Check that a path is a file that may be executed."""
    return path.is_file() and os.access(path, os.X_OK)


def _numbers_in(path: Path) -> list[int]:
    """Return the numbers in a path, which put its versions in order."""
    return list(map(int, re.findall(r"\d+", str(path))))


#: 2022.4 hangs on recent systems; 2023.4 is the oldest that is known to work.
NSYS = Tool(
    "nsys",
    "Nsight Systems",
    (
        "/usr/local/cuda*/bin/nsys",
        "/opt/nvidia/nsight-systems/*/bin/nsys",
        "/opt/nvidia/nsight-systems/*/target-linux-*/nsys",
        "/opt/nvidia/nsight-systems-cli/*/bin/nsys",
        "/opt/nvidia/nsight-compute/*/host/target-linux-*/nsys",
        "/usr/local/cuda*/nsight-compute-*/host/target-linux-*/nsys",
        "/usr/lib/nsight-compute*/host/target-linux-*/nsys",
    ),
    (2023, 4),
)
NCU = Tool(
    "ncu",
    "Nsight Compute",
    (
        "/usr/local/cuda*/bin/ncu",
        "/opt/nvidia/nsight-compute/*/ncu",
        "/usr/local/cuda*/nsight-compute-*/ncu",
        "/usr/lib/nsight-compute/ncu",
    ),
)
#: Environment variable: folders of libraries that nsys lacks on this machine, such as the libdw of its importer.
LIBRARIES = "NSIGHTKIT_NSYS_LIBRARIES"


def dotted(version: tuple[int, ...]) -> str:
    """Write a version as its program does."""
    return ".".join(map(str, version))


def environment(base: Mapping[str, str] | None = None, *folders: Path) -> dict[str, str]:
    """Make the environment in which to start nsys, or one of its programs, which may lack libraries on this machine.

    Parameters
    ----------
    base : mapping, optional
        The present environment when omitted.
    *folders : Path
        Folders of libraries that the program needs.

    Returns
    -------
    dict
        With the folders of :data:`LIBRARIES`, then the given ones, first on ``LD_LIBRARY_PATH``.
    """
    variables = dict(os.environ if base is None else base)
    added = [os.environ.get(LIBRARIES, ""), *map(str, folders)]
    if any(added):
        added.append(variables.get("LD_LIBRARY_PATH", ""))
        variables["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, added))
    return variables


# ---------------------------------------------------------------- exports of .nsys-rep


def _export_command(nsys: str, report: Path, out: Path) -> list[str]:
    """Build the command that exports a report; with absolute paths, as a name may begin with a dash."""
    return [
        nsys,
        "export",
        "--type",
        "sqlite",
        "--force-overwrite",
        "true",
        "-o",
        *map(str, (out.absolute(), report.absolute())),
    ]


def to_sqlite(report: Path, out: Path) -> Path:
    """Export a ``.nsys-rep`` to SQLite; `out` is written atomically.

    Parameters
    ----------
    report : Path
    out : Path
        Replaced when it exists.

    Returns
    -------
    Path
        `out`.

    Raises
    ------
    TraceError
        No usable nsys is installed, or it cannot read the report. The remedy is a command to run.
    """
    command = shlex.join(_export_command("nsys", report, report.with_suffix(".sqlite")))
    try:
        nsys = NSYS.require()
        with drafted(out) as draft:
            done = run(_export_command(str(nsys), report, draft), _EXPORT_TIMEOUT_S, env=environment())
            # nsys's exit code is not reliable, so look at the file.
            if not _is_sqlite(draft):
                message = tail(done.stdout, 3) or f"exit code {done.returncode}, no message"
                problem = f"{nsys} cannot export it ({message})"
                remedy = "check that it is whole, and that a newer nsys did not write it"
                raise TraceError(report, problem, f"{remedy}, then run it by hand: {command}")
    except subprocess.TimeoutExpired as error:
        problem = f"nsys export was not done within {_EXPORT_TIMEOUT_S:g} s"
        raise TraceError(report, problem, f"run it by hand: {command}") from error
    except TraceError:
        raise
    except NsightkitError as error:
        problem = f"has to be exported first, which failed ({error})"
        raise TraceError(report, problem, f"run where nsys and space are: {command}") from error
    return Path(out)


def _is_sqlite(path: Path) -> bool:
    """Check that a path is a database itself: a link to one does not count."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(16) == b"SQLite format 3\x00"


class Export:
    """The SQLite export of a report. A temporary one is removed with the last reference to this object.

    Parameters
    ----------
    path : Path
    folder : Path, optional
        Of a temporary export: the folder to remove.
    """

    def __init__(self, path: Path, folder: Path | None = None) -> None:
        self.path = path
        if folder is not None:
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)


def exported(report: Path, *, cache: bool) -> Export:
    """Find or make the SQLite export of a ``.nsys-rep``. Nothing is written or replaced beside the report.

    The user's own export (``x.sqlite`` of ``x.nsys-rep``) is read if it is newer than the report. Otherwise the report
    is exported to the user's cache folder, again whenever it changed.

    Parameters
    ----------
    report : Path
    cache : bool
        Without it, or without a usable cache folder, the export is a temporary file.

    Returns
    -------
    Export
        Keep a reference to it as long as its file is read: a temporary one is removed with the last.

    Raises
    ------
    TraceError
        As :func:`to_sqlite`.
    """
    with reading(report):
        state = report.stat()
    beside = report.with_suffix(".sqlite")
    if _is_sqlite(beside) and beside.stat().st_mtime_ns > state.st_mtime_ns:
        return Export(beside)
    folder = _export_folder() if cache else None
    if folder is None:
        temporary_folder = Path(tempfile.mkdtemp(prefix="nsightkit-"))
        temporary_export = Export(temporary_folder / "export.sqlite", temporary_folder)
        to_sqlite(report, temporary_export.path)
        return temporary_export
    # The hash of the whole path tells apart two reports of one name; time and size, two versions of one report.
    name = f"{report.stem[:40]}-{blake2b(os.fsencode(report.resolve()), digest_size=8).hexdigest()}"
    cached_export = folder / f"{name}-{state.st_mtime_ns}-{state.st_size}.sqlite"
    if not _is_sqlite(cached_export):
        for outdated in folder.glob(f"{glob.escape(name)}-*.sqlite"):
            outdated.unlink(missing_ok=True)
        to_sqlite(report, cached_export)
    return Export(cached_export)


def _export_folder() -> Path | None:
    """Make the folder of exports, which only this user can read; None where that is impossible."""
    folder = user_cache() / "exports"
    try:
        folder.parent.mkdir(0o700, parents=True, exist_ok=True)
        make_private(folder)
    except OSError:
        return None
    return folder
