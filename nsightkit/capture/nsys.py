"""Watch a program with Nsight Systems, whatever its installed version, and check what came back.

nsys exits with 0 when it captured nothing, when its range never opened and when its importer failed. A
capture is therefore judged by the report alone: it must exist, export, and hold what was asked for.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from nsightkit.capture.profiling import Captured, checked, ended, target, unexpanded, watch
from nsightkit.errors import NsightkitError, UsageError
from nsightkit.trace.open import load
from nsightkit.trace.programs import LIBRARIES, NSYS, environment, run, tail, to_sqlite

__all__ = ["features", "importer", "parse_help", "profile"]

# By table of a trace: why it may have no rows.
_TABLES = {
    "kernels": "no kernel ran while it was recording",
    "memops": "nothing was copied to or from a GPU while it was recording",
    "calls": "the program made no CUDA call while it was recording",
    "ranges": (
        "the program opened no NVTX range, or its nvtx package (0.2.12 and later) emits none under nsys 2023.4 and "
        "older: install nvtx==0.2.11"
    ),
    "os_calls": "no operating-system call lasted longer than --osrt-threshold (1000 ns)",
}
# Tables of which one has rows if a traced kind was there; the first says why it may not have been.
_EVIDENCE = {"cuda": ("calls", "kernels"), "nvtx": ("ranges",), "osrt": ("os_calls",)}
#: Where no report was written, by the capture range; the name of a range has a remedy of its own.
_REMEDIES = {
    None: "run the program without nsys first; then check the free space of the temporary folder",
    "cudaProfilerApi": (
        "the program must call torch.cuda.profiler.start(), or cudaProfilerStart, after it has used the GPU"
    ),
}
#: What nsys says when its own helper process stopped answering: the program and the options are not at fault.
_LOST = "Connection to Agent lost"
#: Options that nsightkit sets itself, each with the argument to give instead.
_OURS = {
    "--output": "output",
    "-o": "output",
    "--capture-range-end": "repeat",
    "--force-overwrite": "overwrite",
    "-f": "overwrite",
}


def parse_help(text: str) -> dict[str, list[str]]:
    """Read the options from the text of ``nsys profile --help``.

    Parameters
    ----------
    text : str

    Returns
    -------
    dict of str to list of str
        By option, with its dashes: the values in quotes that the help lists for it.
    """
    options: dict[str, list[str]] = {}
    # An option stands at the start of a line, after an optional remark: "\\t(Experimental) -x, --name=<value>".
    heading = re.compile(r"^\s{0,8}(?:\([A-Za-z]+\)\s+)?(-[A-Za-z], )?(--[a-z][\w-]*(?:\[[\w|]+\])?)", re.MULTILINE)
    _, *found = heading.split(text)  # of each option the short name, the long one, and what is said of it
    for short, name, said in zip(found[::3], found[1::3], found[2::3], strict=True):
        stem, _, choice = name.partition("[")
        names = [stem + part for part in choice.rstrip("]").split("|")]  # --nvtx-domain-[include|exclude]
        values = re.search(r"Possible values are(.*?)\.\s", said, re.DOTALL)
        options |= dict.fromkeys(
            [*names, *([short[:2]] if short else [])], re.findall(r"'([\w-]+)'", values[1] if values else "")
        )
    return options


def features(nsys: Path) -> Mapping[str, list[str]]:
    """Ask an installed nsys what it can do.

    Parameters
    ----------
    nsys : Path

    Returns
    -------
    mapping of str to list of str
        As from :func:`parse_help`.

    Raises
    ------
    NsightkitError
        Its help cannot be had or read.
    """
    said = NSYS.ask(nsys, "profile", "--help", timeout_s=30.0)
    parsed = parse_help(said)
    if not {"--output", "--trace"} <= parsed.keys():
        raise NsightkitError(
            f"{nsys}: its help names no --trace and --output ({tail(said, 2)}); set NSIGHTKIT_NSYS to a working nsys"
        )
    return parsed


def profile(
    command: Sequence[str],
    output: str | os.PathLike[str],
    *,
    trace: Sequence[str] = ("cuda", "nvtx", "osrt"),
    capture_range: str | None = None,
    repeat: int | None = None,
    graph_nodes: bool = False,
    extra: Sequence[str] = (),
    expect: Sequence[str] | None = None,
    timeout_s: float = 1800.0,
    env: Mapping[str, str] | None = None,
    export: bool = True,
    overwrite: bool = False,
    show: bool = True,
) -> Captured:
    """Run a program under ``nsys profile``.

    Parameters
    ----------
    command : sequence of str
        The program and its arguments; no shell sees them.
    output : path-like
        Name of the report; ``.nsys-rep`` is added when it is missing. The export gets the same name
        with ``.sqlite``.
    trace : sequence of str
        What to record: values of ``--trace`` that the installed version knows.
    capture_range : str, optional
        Record only while this NVTX range is open (``name`` in the default domain, ``name@domain``, or
        ``name@*`` in any), or between ``cudaProfilerStart`` and ``Stop`` with ``"cudaProfilerApi"``.
        The program runs on after it.
    repeat : int, optional
        Record the range's first so many occurrences, each into a report of its own.
    graph_nodes : bool
        Record each kernel of a CUDA graph (costs time for each) instead of one interval a replay.
    extra : sequence of str
        Further options of ``nsys profile``, ``--name=value`` each; checked against its help.
    expect : sequence of str, optional
        Tables that must hold rows: ``kernels``, ``memops``, ``calls``, ``ranges``, ``os_calls``. What
        was traced and stayed empty, but is not named here, gives a note.
    timeout_s : float
        The program is interrupted then, and the trace keeps what it had.
    env : mapping, optional
        The program's whole environment; the present one when omitted.
    export : bool
        Export to SQLite, and check the tables.
    overwrite : bool
        Replace existing files.
    show : bool
        Let the program and nsys write to stderr; else their words are kept for an error message.

    Returns
    -------
    Captured

    Raises
    ------
    UsageError
        An argument that this nsys, or we, cannot honour.
    NsightkitError
        No usable nsys, or the run left no report, or one without what `expect` names.
    """
    if not command:
        raise UsageError("no command given; say which program to profile")
    if repeat is not None and (capture_range is None or repeat < 1):
        raise UsageError("repeat needs a capture range and a positive number")
    unknown = [table for table in expect or () if table not in _TABLES]
    if unknown:
        raise UsageError(f"no table {unknown[0]!r} to expect; there are {', '.join(_TABLES)}")
    report = target(output, ".nsys-rep", overwrite=overwrite)
    if export:
        target(report.with_suffix(".sqlite"), ".sqlite", overwrite=overwrite)
    nsys = NSYS.require()
    can = features(nsys)
    options = _options(can, trace, capture_range, repeat, graph_nodes) + checked(extra, nsys, can, _OURS)
    if bare := [option for option in extra if option.startswith("--") and "=" not in option]:
        raise UsageError(f"give the value of {bare[0]} with an equals sign: {bare[0]}=VALUE")
    # With a range that opens several times nsys numbers its reports: they are collected from a folder of their own.
    with tempfile.TemporaryDirectory(prefix=".nsightkit-", dir=report.parent) as folder:
        made = Path(folder) / "report"
        ran = [str(nsys), "profile", *options, f"--output={unexpanded(made)}", "--force-overwrite=true", *command]
        notes, done = watch(
            ran,
            timeout_s,
            tool="nsys",
            result="trace",
            advice="profile fewer steps (a capture range), or allow more time",
            env=environment(env),
            show=show,
            interrupt_s=120.0,
        )
        reports = _collect(made, report, nsys, done, capture_range)
        numbered = [report.with_name(f"{report.stem}.{i}.nsys-rep") for i in range(1, len(reports) + 1)]
        if repeat is not None and len(reports) < repeat:
            notes.append(f"the range was captured {len(reports)} times, not {repeat}: it occurred no more often")
        pairs = zip(reports, [report] if repeat is None else numbered, strict=False)
        places = [source.replace(place) for source, place in pairs]
    shown = [str(nsys), "profile", *options, f"--output={unexpanded(report.with_suffix(''))}", *command]
    notes += ended(done.returncode)
    traces = [to_sqlite(place, place.with_suffix(".sqlite")) for place in places] if export else places
    if export:
        notes += _check(traces[0], trace, expect)
    notes.append("the report holds this machine's environment variables and host name: do not publish it as it is")
    return Captured(traces[0], places[0], traces, shown, done.returncode, notes)


def _options(
    can: Mapping[str, list[str]], trace: Sequence[str], capture_range: str | None, repeat: int | None, graph_nodes: bool
) -> list[str]:
    kinds = list(dict.fromkeys(trace)) or ["none"]
    known = can["--trace"]
    unknown = [kind for kind in kinds if known and kind not in known]
    if unknown:
        raise UsageError(f"this nsys cannot trace {unknown[0]!r}; it knows {', '.join(sorted(known))}")
    if graph_nodes and "--cuda-graph-trace" not in can:
        raise UsageError("this nsys cannot record the nodes of CUDA graphs")
    by_name = capture_range and capture_range != "cudaProfilerApi"
    if by_name and "nvtx" not in kinds:
        raise UsageError("a capture range needs nvtx among the traced kinds")
    # By default only registered strings open the range, and torch.cuda.nvtx pushes plain ones:
    # nothing is captured, no report is written, and the exit code is 0.
    nvtx = [f"--nvtx-capture={capture_range}", "--env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0"] if by_name else []
    # The default, stop-shutdown, ends the program with SIGTERM when the range closes.
    end = f"--capture-range-end={f'repeat:{repeat}' if repeat else 'stop'}"
    return [
        f"--trace={','.join(kinds)}",
        # CPU sampling needs rights that containers rarely give, costs time, and no analysis here reads it.
        *(o for o in ("--sample=none", "--cpuctxsw=none") if o.partition("=")[0] in can),
        *(["--cuda-graph-trace=node"] if graph_nodes else []),
        *([f"--capture-range={'nvtx' if by_name else capture_range}", *nvtx, end] if capture_range else []),
    ]


def _collect(
    made: Path, wanted: Path, nsys: Path, done: subprocess.CompletedProcess[str], capture_range: str | None
) -> list[Path]:
    """Find the reports that a run left, importing what nsys failed to import itself."""
    for unfinished in sorted(made.parent.glob("*.qdstrm")):
        if not unfinished.with_suffix(".nsys-rep").exists():
            _import(unfinished, wanted, nsys)
    # report.nsys-rep, or report.1.nsys-rep, report.2.nsys-rep, … with repeat
    reports = made.parent.glob(f"{made.name}*.nsys-rep")
    found = sorted(reports, key=lambda p: [int(n) for n in re.findall(r"\d+", p.name)])
    if found:
        return found
    if _LOST in done.stdout:
        raise NsightkitError(
            f"nsys lost its own helper process and wrote no report (its words: {_LOST}); it happens where every "
            "processor is busy: record again, with less running beside it"
        )
    said = tail(done.stdout, 4)
    name = (capture_range or "").partition("@")[0]
    trap = "; under this nsys the nvtx package emits nothing from 0.2.12 on: install nvtx==0.2.11"
    unopened = (
        f"no range {capture_range!r} was opened: check its spelling, and name its domain if it has one ({name}@DOMAIN, "
        f"or {name}@* for any){trap if NSYS.version(nsys) < (2024, 1) else ''}"
    )
    raise NsightkitError(
        f"nsys wrote no report (exit code {done.returncode}){f'; nsys said: {said}' if said else ''}; "
        f"{_REMEDIES.get(capture_range, unopened)}"
    )


def _import(unfinished: Path, wanted: Path, nsys: Path) -> None:
    program, report = importer(nsys), unfinished.with_suffix(".nsys-rep")
    kept = wanted.with_suffix(".qdstrm")  # the run may have been costly: its raw capture is not thrown away
    why = (
        f"there is no QdstrmImporter beside {nsys} (the raw capture is kept as {kept}); "
        "install the host part of Nsight Systems too (Debian: nsight-systems, not only nsight-systems-target)"
    )
    if program is not None:
        said = "gave no answer within 600 s"
        with contextlib.suppress(subprocess.TimeoutExpired):
            # Its libraries lie beside it, and some packages forget to say so.
            env = environment(None, program.parent)
            said = tail(run([str(program), "-i", str(unfinished), "-o", str(report), "-f"], 600.0, env=env).stdout, 3)
        why = (
            f"by hand it failed too ({said}; the raw capture is kept as {kept}); 'ldd {program}' names a library that "
            f"is missing, often libdw.so.1: install it, or name its folder in {LIBRARIES}"
        )
    if not report.is_file():
        unfinished.replace(kept)
        raise NsightkitError(f"nsys could not run its importer, which turns the raw capture into a report: {why}")


def importer(nsys: Path) -> Path | None:
    """Find the program that turns nsys's raw captures into reports.

    Parameters
    ----------
    nsys : Path

    Returns
    -------
    Path or None
    """
    above = list(collector(nsys).parents)[:3]
    return next((found for folder in above for found in sorted(folder.glob("host*/**/QdstrmImporter"))), None)


def collector(nsys: Path) -> Path:
    """Find the program itself where a link or a small script stands for it.

    Parameters
    ----------
    nsys : Path

    Returns
    -------
    Path
    """
    real = nsys.resolve()
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if real.stat().st_size < 10_000:
            named = re.search(r"""(/[^"'\n]*/nsys)\b""", real.read_text())
            real = Path(named[1]).resolve() if named else real
    return real


def _check(export: Path, trace: Sequence[str], expect: Sequence[str] | None) -> list[str]:
    opened = load(export, cache=False)

    def absent(table: str) -> bool:
        return not opened.size(table) and not (table == "kernels" and opened.size("graphs"))

    if lacking := list(filter(absent, expect or ())):
        raise NsightkitError(f"{export}: the capture recorded no {lacking[0]}; {_TABLES[lacking[0]]}")
    return [
        f"{kind} was traced and nothing of it was recorded: {_TABLES[tables[0]]}"
        for kind, tables in _EVIDENCE.items()
        if kind in trace and all(map(absent, tables))
    ]
