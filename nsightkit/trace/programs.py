"""Other programs: run with a time limit that also holds for what they start; nsys and ncu, and what they export.

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
from stat import S_ISREG

from nsightkit.errors import NsightkitError, TraceError, UsageError, reading
from nsightkit.trace.files import drafted, make_private, replacing, user_cache

__all__ = [
    "LIBRARIES", "NCU", "NSYS", "Export", "Tool", "csv_command", "csv_of", "descendants", "dotted", "dying_with_parent",
    "end", "environment", "exported", "run", "said", "sqlite_command", "tail", "to_sqlite",
]  # fmt: skip

#: Of Linux's prctl: the signal a process gets when its parent dies.
_PARENT_DEATH_SIGNAL = 1


def run(
    command: Sequence[str],
    timeout_s: float,
    *,
    cwd: str | os.PathLike[str] | None = None,
    env: dict[str, str] | None = None,
    show: bool = False,
    interrupt_s: float = 0.0,
) -> subprocess.CompletedProcess[str]:
    """Run a command, never through a shell, and end all it started when the time is up.

    ``subprocess.run(timeout=...)`` ends only the first process: a profiler's agents and the profiled
    program would live on and hold the pipes open. On Linux the command dies with this process, however this one ends.

    Parameters
    ----------
    command : sequence of str
    timeout_s : float
    cwd : path-like, optional
    env : dict, optional
        The whole environment; the present one when omitted.
    show : bool
        Let the program write to this process's own stderr (both its streams), instead of keeping its output.
    interrupt_s : float
        When the time is up, first interrupt it (as Ctrl-C does) and give it so long to finish what it has.

    Returns
    -------
    CompletedProcess
        ``stdout`` holds both streams, empty with `show`; undecodable bytes are replaced. After an
        interruption that it obeyed, ``returncode`` is the program's own.

    Raises
    ------
    subprocess.TimeoutExpired
        ``output`` holds what it had written.
    FileNotFoundError, PermissionError
        The program cannot be started.
    """
    # 2: the descriptor, not sys.stderr, which a test or a notebook may have replaced by an object without one
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
        preexec_fn=dying_with_parent(),  # noqa: PLW1509 - one call of the C library, looked up before the fork
    )
    with process:
        try:
            output = _output(process, timeout_s, interrupt_s)
        except subprocess.TimeoutExpired:
            end(process.pid)
            output, _ = process.communicate()
            raise subprocess.TimeoutExpired(list(command), timeout_s, output=output) from None
        except BaseException:
            end(process.pid)
            raise
    return subprocess.CompletedProcess(list(command), process.returncode, output or "", "")


def _output(process: subprocess.Popen[str], timeout_s: float, interrupt_s: float) -> str:
    """Wait for a process; when the time is up, interrupt it if it may finish what it has."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        if not interrupt_s:
            raise
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=interrupt_s)
    return output


def said(*command: str, timeout_s: float = 20.0, env: dict[str, str] | None = None) -> str:
    """Give what a command prints on its standard output; nothing where it does not start, fails, or hangs.

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


def dying_with_parent() -> Callable[[], None] | None:
    """Give what a forked child of this process calls to be killed when this process ends.

    Linux watches the thread that forks, not its process: that thread has to wait for the child.

    Returns
    -------
    callable or None
        None on other systems than Linux.
    """
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def bind() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs would ignore it
        prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before it was watched
            os._exit(1)

    return bind


def end(pid: int) -> None:
    """End a process and all below it; a profiler puts the profiled program into a session of its own.

    Parameters
    ----------
    pid : int
    """
    for process in [pid, *descendants(pid)]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """All processes that a process started, and those that these started, without those that have ended.

    Parameters
    ----------
    pid : int
    """
    children: dict[int, list[int]] = collections.defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name in parentheses may itself hold blanks and parentheses; its state and its parent follow.
            state, parent, *_ = stat.read_text(errors="replace").rpartition(")")[2].split()
            if state not in "ZX":
                children[int(parent)].append(int(stat.parent.name))
    below = list(children[pid])
    for process in below:
        below += children[process]
    return below


def tail(text: str | bytes | None, lines: int = 6) -> str:
    """Give the last lines of a program's output, on one line, for an error message.

    Parameters
    ----------
    text : str or bytes, optional
    lines : int
    """
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    written = []
    for line in (text or "").splitlines():
        # a progress bar is one line with many carriage returns: what stands after the last one counts
        last = line.rpartition("\r")[2].strip()
        if last:
            written.append(last)
    return " | ".join(written[-lines:])


# ---------------------------------------------------------------- nsys and ncu


@dataclasses.dataclass(frozen=True)
class Tool:
    """One of NVIDIA's profilers, as it is installed here.

    Parameters
    ----------
    name : str
        As it is called on the ``PATH``.
    product : str
        What installs it.
    folders : tuple of str
        Absolute glob patterns of where NVIDIA's installers and containers put it.
    inside : str
        The same, below the folders of the ncu on the ``PATH``.
    minimum : tuple of int
        The oldest version that works.
    """

    name: str
    product: str
    folders: tuple[str, ...]
    inside: str = ""
    minimum: tuple[int, ...] = ()

    @property
    def variable(self) -> str:
        """The environment variable that names another program."""
        return f"NSIGHTKIT_{self.name.upper()}"

    def find(self) -> Path | None:
        """Where it is, without starting it.

        Looks at its environment variable, then at the ``PATH``, then where NVIDIA's installers put it (the newest
        first), last inside the Nsight Compute whose ``ncu`` is on the ``PATH``.

        Returns
        -------
        Path or None

        Raises
        ------
        UsageError
            The variable names something that is not a program.
        """
        named = os.environ.get(self.variable)
        if named:
            path = Path(named).expanduser()
            if not _is_program(path):
                problem = f"{self.variable} is {named!r}, which is not a program"
                raise UsageError(f"{problem}; give the path of {self.name}, or unset it")
            return path
        on_path = shutil.which(self.name)
        if on_path:
            return Path(on_path)
        patterns = list(self.folders)
        ncu = shutil.which("ncu")
        if self.inside and ncu:
            for folder in list(Path(ncu).resolve().parents)[:4]:
                patterns.append(f"{glob.escape(str(folder))}/{self.inside}")
        for pattern in patterns:
            installed = filter(_is_program, Path("/").glob(pattern.lstrip("/")))
            newest = max(installed, key=_numbers, default=None)
            if newest:
                return newest
        return None

    def require(self) -> Path:
        """Find one that works, for a caller that cannot go on without.

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
                raise NsightkitError(
                    f"{program}: is {self.name} {dotted(version)}, which is too old; "
                    f"install {self.name} {dotted(self.minimum)} or later, or set {self.variable} to one"
                )
        return program

    @functools.lru_cache(maxsize=32)  # noqa: B019 - there are two
    def ask(self, program: str | Path, *arguments: str, timeout_s: float = 60.0) -> str:
        """Ask it about itself.

        Parameters
        ----------
        program : path-like
        *arguments : str
            Such as ``--help``.
        timeout_s : float

        Returns
        -------
        str
            What it says.

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
        """Ask it for its version, such as ``(2023, 4, 4, 54)``.

        Parameters
        ----------
        program : path-like
        timeout_s : float
            Old versions hang even here; then they are as good as absent.

        Raises
        ------
        NsightkitError
            It does not start, hangs, or says no version.
        """
        answer = self.ask(program, "--version", timeout_s=timeout_s)
        version = re.search(r"\b\d{4}(?:\.\d+)+", answer)
        if version is None:
            problem = f"{program}: said no version ({tail(answer, 2) or 'no word'})"
            raise NsightkitError(f"{problem}; set {self.variable} to a working {self.name}")
        return tuple(map(int, version[0].split(".")))


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _numbers(path: Path) -> list[int]:
    """Numbers in a path, which order versions."""
    return [int(number) for number in re.findall(r"\d+", str(path))]


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
    "host/target-linux-*/nsys",
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
    variables = dict(os.environ if base is None else base)
    added = list(map(str, folders))
    named = os.environ.get(LIBRARIES)
    if named:
        added.insert(0, named)
    if added:
        added.append(variables.get("LD_LIBRARY_PATH", ""))
        variables["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, added))
    return variables


def sqlite_command(report: str | os.PathLike[str], out: str | os.PathLike[str], nsys: str = "nsys") -> list[str]:
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
    return [nsys, "export", "--type", "sqlite", "--force-overwrite", "true", "-o", _no_option(out), _no_option(report)]


def _no_option(path: str | os.PathLike[str]) -> str:
    """A path that does not begin with a dash."""
    name = os.fspath(path)
    return f"./{name}" if name.startswith("-") else name


def to_sqlite(report: str | os.PathLike[str], out: str | os.PathLike[str], *, timeout_s: float = 1800.0) -> Path:
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
    _export(Path(report), Path(out), shlex.join(sqlite_command(report, out)), timeout_s)
    return Path(out)


def _export(report: Path, out: Path, command: str, timeout_s: float) -> None:
    """Export a report; `command` is what the user may run instead."""
    by_hand = f"run it by hand: {command}"
    try:
        nsys = NSYS.require()
    except NsightkitError as error:
        problem = f"has to be exported first and no usable nsys is here ({error})"
        raise TraceError(report, problem, f"run where nsys is: {command}") from error
    try:
        with drafted(out) as whole:
            done = run(sqlite_command(report.absolute(), whole, str(nsys)), timeout_s, env=environment())
            # The exit code says little; the file says all.
            if not _is_sqlite(whole):
                message = tail(done.stdout, 3) or f"exit code {done.returncode}, no message"
                remedy = _WHOLE
                if "Version number is invalid" in done.stdout:  # an older nsys refuses the reports of a newer one
                    remedy = "export it with the nsys that wrote it, or a newer one"
                problem = f"nsys {dotted(NSYS.version(nsys))} cannot export it ({message})"
                raise TraceError(report, problem, f"{remedy}, then {by_hand}")
    except subprocess.TimeoutExpired as error:
        raise TraceError(report, f"nsys export was not done within {timeout_s:g} s", by_hand) from error
    except UsageError as error:
        remedy = "free some space or make the folder writable, or export it elsewhere and give the .sqlite"
        raise TraceError(report, f"cannot be exported ({error})", remedy) from error


#: What to check of a report that cannot be exported: not every version says that the report is of a newer one.
_WHOLE = "check that it is whole, and that this nsys is not older than the one that wrote it"


def _is_sqlite(path: Path) -> bool:
    """Whether it is a database, and not a link to one."""
    with contextlib.suppress(OSError):
        if S_ISREG(path.lstat().st_mode):
            with path.open("rb") as stream:
                return stream.read(16) == b"SQLite format 3\x00"
    return False


class Export:
    """The SQLite export of a report. One that is only for now is removed when nobody holds this object any more.

    Parameters
    ----------
    path : Path
    folder : Path, optional
        To remove with it.
    """

    def __init__(self, path: Path, folder: Path | None = None) -> None:
        self.path = path
        if folder is not None:
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)


#: Exports that are only for now, by what they were made of.
_for_now: weakref.WeakValueDictionary[tuple[Path, int, int], Export] = weakref.WeakValueDictionary()


def exported(report: str | os.PathLike[str], *, cache: bool, timeout_s: float = 1800.0) -> Export:
    """Give the SQLite export of a ``.nsys-rep``. Nothing is written beside the report, or replaced there.

    The user's own export (``x.sqlite`` of ``x.nsys-rep``) is read if it is newer than the report. Otherwise the report
    is exported to the user's cache folder, anew whenever it changed.

    Parameters
    ----------
    report : path-like
    cache : bool
        Without, or where the cache folder cannot be used, the export is a temporary file.
    timeout_s : float
        As of :func:`to_sqlite`.

    Returns
    -------
    Export
        To be held as long as its file is read.

    Raises
    ------
    TraceError
        As :func:`to_sqlite`.
    """
    report = Path(report)
    with reading(report):
        state = report.stat()
        whole = report.resolve()
    beside = report.with_suffix(".sqlite")
    if _is_sqlite(beside) and beside.stat().st_mtime_ns > state.st_mtime_ns:
        return Export(beside)
    content = (whole, state.st_mtime_ns, state.st_size)
    present = _for_now.get(content)
    if present is not None:
        return present
    command = shlex.join(sqlite_command(report, beside))
    kept = _kept(report, whole) if cache else None
    if kept is None:
        folder = Path(tempfile.mkdtemp(prefix="nsightkit-"))
        made = Export(folder / "export.sqlite", folder)
        _export(report, made.path, command, timeout_s)
        _for_now[content] = made
        return made
    stamp = kept.with_suffix(".stamp")
    if not (_is_sqlite(kept) and _read(stamp) == f"{content[1:]}".encode()):
        stamp.unlink(missing_ok=True)
        _export(report, kept, command, timeout_s)
        with replacing(stamp) as file:
            file.write(f"{content[1:]}".encode())
    return Export(kept)


def _kept(report: Path, whole: Path) -> Path | None:
    """Where the export of a report is kept, in a folder that is only this user's; None where there can be none."""
    folder = user_cache() / "exports"
    try:
        folder.parent.mkdir(0o700, parents=True, exist_ok=True)
        make_private(folder)
    except OSError:
        return None
    # The folder tells two reports of one name apart.
    tag = blake2b(os.fsencode(whole), digest_size=8).hexdigest()
    return folder / f"{report.stem[:40]}-{tag}.sqlite"


def _read(path: Path) -> bytes:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""


def csv_command(report: str | os.PathLike[str], ncu: str = "ncu") -> list[str]:
    """Spell the command that prints a report as CSV.

    Parameters
    ----------
    report : path-like
    ncu : str

    Returns
    -------
    list of str
        Of the raw page, a column a metric, in units that fit each column: counted values then have six decimals, and
        two in base units.
    """
    return [ncu, f"--import={os.fspath(report)}", "--page=raw", "--csv", "--print-units=auto"]


def csv_of(report: str | os.PathLike[str], ncu: Path, *, timeout_s: float = 600.0) -> str:
    """Print a report as CSV.

    Parameters
    ----------
    report : path-like
    ncu : Path
    timeout_s : float

    Returns
    -------
    str
        What ncu printed: the raw page, or the reason why it gives no page.

    Raises
    ------
    TraceError
        It does not start, or took too long. The remedy is a command to run.
    """
    by_hand = f"run it by hand: {shlex.join(csv_command(report))}"
    try:
        return run(csv_command(Path(report).absolute(), str(ncu)), timeout_s).stdout
    except subprocess.TimeoutExpired as error:
        raise TraceError(report, f"{ncu} did not export it within {timeout_s:g} s", by_hand) from error
    except OSError as error:
        raise TraceError(report, f"{ncu} cannot be started to export it ({error.strerror})", by_hand) from error
