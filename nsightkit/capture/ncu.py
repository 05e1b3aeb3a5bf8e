"""Watch a program's kernels with Nsight Compute, and say plainly why nothing came back when nothing did.

ncu exits with 0 when its filter matched no kernel, and with the program's own code when it did: a capture is judged
by its report and by ncu's log. Each profiled launch is replayed until all its metrics are read, dozens of times with
the set full, so that filters decide whether a run takes seconds or hours.
"""

from __future__ import annotations

import functools
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from nsightkit.capture.profiling import Captured, checked, did_you_mean, ended, target, unexpanded, watch
from nsightkit.errors import NsightkitError, UsageError
from nsightkit.trace import ncu_metrics
from nsightkit.trace.programs import NCU, tail

__all__ = ["OURS", "PERMISSION", "options_of", "profile", "range_filter"]

#: What to do about ERR_NVGPUCTRPERM.
PERMISSION = (
    "run as root; in a container give it --cap-add=SYS_ADMIN (CAP_PERFMON is enough from Linux 5.8 on); or let the "
    "host's administrator set NVreg_RestrictProfilingToAdminUsers=0 for the nvidia module and reboot. Timelines "
    "(nsightkit capture nsys, torch) need no counters"
)

#: Options that nsightkit sets itself, each with the argument to give instead, which also checks the value.
OURS = {
    "--export": "output",
    "-o": "output",
    "--log-file": "",
    "--force-overwrite": "overwrite",
    "-f": "overwrite",
    "--kernel-name": "kernel",
    "-k": "kernel",
    "--launch-skip": "skip",
    "-s": "skip",
    "--launch-count": "count",
    "-c": "count",
    "--nvtx": "nvtx",
    "--nvtx-include": "nvtx",
    "--nvtx-exclude": "nvtx_exclude",
    "--set": "section_set",
    "--section": "sections",
    "--metrics": "metrics",
    "--clock-control": "clocks",
    "--cache-control": "keep_caches",
    "--target-processes": "",
    "--csv": "",
    "--page": "",
    "--import": "",
    "-i": "",
    "--mode": "",
}
_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvgpu", "/dev/nvhost-gpu")  # Linux, WSL, Jetson
# Collected without being listed by --query-metrics: attributes of launch and device, samples, what ncu derives.
_UNLISTED = re.compile(
    r"(?:regex|group|breakdown|pmsampling):|(?:launch|device|derived|profiler|sass|nvlink|numa|smsp__pcsamp|memory)_"
    r"|(?:thread_)?inst_executed(?!_pipe)"
)


def options_of(help_text: str) -> frozenset[str]:
    """Read the options from the text of ``ncu --help``.

    Parameters
    ----------
    help_text : str

    Returns
    -------
    frozenset of str
        With their dashes.
    """
    found = re.finditer(r"^  (?:(-\w) \[ (--[a-z][\w-]*) \]|(--[a-z][\w-]*))", help_text, re.MULTILINE)
    return frozenset(option for match in found for option in match.groups() if option)


def range_filter(name: str) -> str:
    """Write a range's name as ncu's NVTX filter.

    ncu takes a plain name for a start/end range; a push/pop range, which ``torch.cuda.nvtx.range`` and
    :func:`nsightkit.workloads.phases.phase` open, needs a slash after its name, and without it nothing is profiled.

    Parameters
    ----------
    name : str
        ``NAME`` or ``DOMAIN@NAME`` of a push/pop range. What holds a slash or a bracket is an expression of ncu's
        own and stays as it is; ``start/end:NAME`` is a start/end range.

    Returns
    -------
    str
    """
    whole = name.removeprefix("start/end:")
    return whole if whole != name or re.search(r"[/\[\]]", name) else f"{name}/"


def profile(
    command: Sequence[str],
    output: str | os.PathLike[str],
    *,
    kernel: str | None = None,
    skip: int = 0,
    count: int | None = None,
    nvtx: Sequence[str] = (),
    nvtx_exclude: Sequence[str] = (),
    section_set: str | None = None,
    sections: Sequence[str] = (),
    metrics: Sequence[str] = (),
    clocks: Literal["none", "base"] = "none",
    keep_caches: bool = False,
    extra: Sequence[str] = (),
    everything: bool = False,
    timeout_s: float = 1800.0,
    env: Mapping[str, str] | None = None,
    overwrite: bool = False,
    show: bool = True,
) -> Captured:
    """Run a program under ``ncu``. Never under nsys or torch.profiler at the same time.

    Parameters
    ----------
    command : sequence of str
        The program and its arguments; no shell sees them.
    output : path-like
        Name of the report; ``.ncu-rep`` is added when it is missing.
    kernel : str, optional
        A regular expression; only kernels whose base name (no namespaces, no template arguments) it finds. ncu's
        own default is an exact match, which finds nothing when it is given an expression.
    skip, count : int
        Of the launches that match, how many to leave out first, and how many to profile then.
    nvtx, nvtx_exclude : sequence of str
        Only launches inside, or outside, these ranges: see :func:`range_filter`.
    section_set : str, optional
        ``basic`` (ncu's default), ``detailed``, ``full``, ``roofline``, …
    sections : sequence of str
        Sections to collect, such as ``SpeedOfLight``.
    metrics : sequence of str
        Metrics to collect: our names (:mod:`nsightkit.trace.ncu_metrics`) or NVIDIA's.
    clocks : {'none', 'base'}
        ``none`` leaves the GPU's clocks alone: times are those of a program under load. ``base``, ncu's own default,
        locks them: runs compare better, and times are longer than in production.
    keep_caches : bool
        Do not flush the caches before each pass: what production finds in L2 is found there too.
    extra : sequence of str
        Further options of ncu, ``--name=value`` or ``--name`` each; checked against its help.
    everything : bool
        Allow the set ``full`` on every launch of the program.
    timeout_s : float
        The program is interrupted then.
    env : mapping, optional
        The program's whole environment; the present one when omitted. It ends up in the report.
    overwrite : bool
        Replace an existing report.
    show : bool
        Let the program write to stderr.

    Returns
    -------
    Captured

    Raises
    ------
    UsageError
        An argument that this ncu, or we, cannot honour.
    NsightkitError
        No usable ncu, or no report: the counters may not be read, no kernel matched, there is no GPU.
    """
    if not command:
        raise UsageError("no command given; say which program to profile")
    if skip < 0 or (count is not None and count < 1):
        raise UsageError("skip must be 0 or more, and count 1 or more")
    if section_set == "full" and not everything and kernel is None and count is None and not nvtx:
        raise UsageError(
            "the set full replays every launch of the program dozens of times: hours, and gigabytes of report; filter "
            "(kernel, count or nvtx), or allow everything"
        )
    report = target(output, ".ncu-rep", overwrite=overwrite)
    ncu = NCU.require()
    pattern = None if kernel is None else kernel.removeprefix("regex:")
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise UsageError(f"kernel: {pattern!r} is not a regular expression ({error})") from error
    can = _can(ncu)
    if clocks not in _CLOCKS:
        raise UsageError(f"clocks can be none or base, not {clocks!r}")
    options = [
        *(["--target-processes=all"] if "--target-processes" in can else []),
        f"--clock-control={clocks}",
        *(["--cache-control=none"] if keep_caches else []),
        *([] if pattern is None else [f"--kernel-name=regex:{pattern}"]),
        *([f"--launch-skip={skip}"] if skip else []),
        *([] if count is None else [f"--launch-count={count}"]),
        *(["--nvtx"] if nvtx or nvtx_exclude else []),
        *(f"--nvtx-include={range_filter(name)}" for name in nvtx),
        *(f"--nvtx-exclude={range_filter(name)}" for name in nvtx_exclude),
        # An unknown set ends in a run that collects nothing, after the program has run to its end.
        *([] if section_set is None else [f"--set={_listed(ncu, '--list-sets', section_set, 'set of sections')}"]),
        *(f"--section={_listed(ncu, '--list-sections', name, 'section')}" for name in sections),
        *([f"--metrics={','.join(_metric(ncu, name) for name in metrics)}"] if metrics else []),
        *checked(extra, ncu, can, OURS),
    ]
    with tempfile.TemporaryDirectory(prefix=".nsightkit-", dir=report.parent) as folder:
        made, log = Path(folder) / "report.ncu-rep", Path(folder) / "log.txt"
        files = [f"--export={unexpanded(made)}", "--force-overwrite", f"--log-file={unexpanded(log)}"]
        ran = [str(ncu), *options, *files, *command]
        notes, done = watch(
            ran,
            timeout_s,
            tool="ncu",
            result="report",
            advice="profile fewer launches (kernel, count, nvtx) or fewer sections, or allow more time",
            env=None if env is None else dict(env),
            show=show,
            interrupt_s=60.0,
        )
        said = log.read_text(errors="replace") if log.is_file() else ""
        _judge(made, said or done.stdout, done.returncode, _why_none(pattern, skip, [*nvtx, *nvtx_exclude]))
        made.replace(report)
    notes += _notes(said, clocks)
    code = re.search(r"application returned an error code \((-?\d+)\)", said)
    returncode = int(code[1]) if code else done.returncode
    notes += ended(returncode)
    shown = [str(ncu), *options, f"--export={unexpanded(report)}", *command]
    return Captured(report, report, [report], shown, returncode, notes)


def _can(ncu: Path) -> frozenset[str]:
    said = NCU.ask(ncu, "--help")
    can = options_of(said)
    if not {"--export", "--kernel-name"} <= can:
        raise NsightkitError(
            f"{ncu}: its help names no --export and --kernel-name ({tail(said, 2)}); set NSIGHTKIT_NCU to a working ncu"
        )
    return can


def _listed(ncu: Path, question: str, name: str, what: str) -> str:
    if name.startswith("regex:"):
        return name
    known = re.findall(r"^(?!Identifier )([A-Za-z]\w*) +\S", NCU.ask(ncu, question), re.MULTILINE)
    if known and name not in known:
        near = did_you_mean(name, known) or f"; there are {', '.join(known)}"
        raise UsageError(f"this ncu has no {what} {name!r}{near}")
    return name


def _metric(ncu: Path, name: str) -> str:
    """Give NVIDIA's name of a metric; a wrong one would end the run at the first kernel."""
    if name in ncu_metrics.names():
        return ncu_metrics.find(name)
    if _UNLISTED.match(name) or name.partition(".")[0] in _query(ncu):
        return name
    return ncu_metrics.find(name, _query(ncu))


@functools.lru_cache(maxsize=2)
def _query(ncu: Path) -> frozenset[str]:
    """List the metrics of all chips an ncu knows: without suffixes, and from no GPU in particular."""
    chips = re.findall(r"\b[a-z]{2}\d\w+", NCU.ask(ncu, "--list-chips"))
    said = NCU.ask(ncu, "--query-metrics", "--chips", ",".join(chips)) if chips else ""
    return frozenset(re.findall(r"^([A-Za-z][\w.]*__\w+) ", said, re.MULTILINE))


#: What ncu says when the counters cannot be read, and what it means. A report that was written is worth nothing then.
_REFUSALS = {
    r"ERR_NVGPUCTRPERM|does not have permission to access NVIDIA GPU Performance Counters": (
        f"the driver does not let this user read the GPU's counters (ERR_NVGPUCTRPERM); {PERMISSION}"
    ),
    r"LibraryNotLoaded": (
        "the GPU's counters cannot be reached from here at all (LibraryNotLoaded), as in sandboxed containers; "
        "profile on another runtime or machine, timelines (nsightkit capture nsys, torch) need no counters"
    ),
}
#: What it says when it has written no report, and why: {0} is what the pattern caught, {why} what the filters tell.
_FAILURES = {
    r"failed to connect to the CUDA driver": (
        "ncu found no CUDA driver, so it did not run the program; run it where a GPU is (nsightkit doctor looks)"
    ),
    r"(?:[Ff]ailed to find metric|[Ii]nvalid metric(?: name)?:?) *['\"]?([\w:.]+)": (
        "this GPU has no metric {0}; leave it out, or see ncu --query-metrics"
    ),
    r"No kernels were profiled": "ncu profiled no kernel; {why}",
}


def _judge(made: Path, said: str, returncode: int, why_none: str) -> None:
    """Raise unless there is a report, with the reason that ncu's log gives."""
    for pattern, message in (_REFUSALS if made.is_file() else _REFUSALS | _FAILURES).items():
        found = re.search(pattern, said)
        if found:
            raise NsightkitError(message.format(*found.groups(), why=why_none))
    if not made.is_file():
        raise NsightkitError(
            f"ncu wrote no report (exit code {returncode}): {tail(said, 3) or 'it said nothing'}; run the program "
            "without ncu first"
        )


def _why_none(pattern: str | None, skip: int, ranges: Sequence[str]) -> str:
    reasons = {
        "there is no NVIDIA GPU here, or this container does not see it": not any(
            Path(device).exists() for device in _DEVICES
        ),
        f"no kernel's base name has {pattern!r} (cuBLAS on Hopper calls its kernels nvjet_…: try "
        "'nvjet|gemm|cutlass|xmma|triton')": pattern is not None,
        "no launch lies in the ranges: check their spelling and domain (DOMAIN@NAME), and that they are push/pop "
        "ranges (else start/end:NAME)": ranges,
        f"fewer than {skip + 1} launches match": skip,
    }
    likely = [reason for reason, holds in reasons.items() if holds]
    return "; or ".join(likely) or "the program launched none: does it use the GPU?"


#: What may be done to the GPU's clocks, and what that means for the times.
_CLOCKS = {
    "none": "the clocks were left alone: the report says at which the kernels ran (sm_clock_hz)",
    "base": "the clocks were locked to base: times compare between runs, and are longer than in production",
}
_PRIVATE = (
    "the report holds the program's environment and command line, and this machine's host name and addresses: do "
    "not publish it as it is"
)


def _notes(said: str, clocks: str) -> list[str]:
    passes = [int(n) for n in re.findall(r"^==PROF== Profiling .*?- (\d+) pass(?:es)?", said, re.MULTILINE)]
    return [
        *([f"{len(passes)} launches were profiled, replayed up to {max(passes)} times each"] if passes else []),
        *(f"ncu said: {line}" for line in re.findall(r"^==(?:WARNING|ERROR)== (.*)", said, re.MULTILINE)[:3]),
        _CLOCKS[clocks],
        _PRIVATE,
    ]
