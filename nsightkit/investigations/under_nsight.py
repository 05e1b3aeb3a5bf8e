"""A part once more, under Nsight Systems or Nsight Compute.

Whether a part was measured does not depend on it: whatever goes wrong here becomes one line that says what. The
profiler runs this module: ``python -m nsightkit.investigations.under_nsight INVESTIGATION PART MODE``. A recording of
such a part is valid for exactly the code of :func:`steady_steps` and the list of :data:`SECTIONS` as well.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nsightkit.capture import ncu, nsys
from nsightkit.capture.profiling import Captured
from nsightkit.capture.provenance import scrub
from nsightkit.errors import NsightkitError
from nsightkit.investigations.parts import Part, find, prepared, resolve
from nsightkit.trace import load, store
from nsightkit.trace import ncu as reports
from nsightkit.trace.model import TABLES, Trace
from nsightkit.trace.nesting import nesting
from nsightkit.trace.programs import NCU, NSYS, dotted
from nsightkit.workloads.phases import phase

__all__ = ["CAPTURED", "SECTIONS", "STEADY", "capture", "kept", "steady", "steady_steps"]

#: NVTX range that opens the capture ...
CAPTURED = "nsightkit-captured"
#: ... and, in it, the one around the steps that are kept.
STEADY = "nsightkit-steady"
#: Steps between the two: nsys sets its tracing up when the capture opens, and the first step waits for it.
_SETTLING = 2
# No OS calls: PyTorch's profile, beside which this is put, does not have them, and to watch them costs time and space.
_KINDS = ("cuda", "nvtx")
#: What Nsight Compute collects: all that :mod:`nsightkit.analysis.roofline.counters` asks for, and no samples of the
#: program counter.
SECTIONS = (
    *("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "MemoryWorkloadAnalysis_Tables"),
    *("LaunchStats", "Occupancy", "SchedulerStats", "WarpStateStats"),
)
#: Of a launch's metrics, what is not about the launch: the machine, lists of other metrics.
_NOT_KEPT = re.compile(
    r"device__attribute_(?!display_name|multiprocessor_count|compute_capability_)|group:|nvlink__|numa__"
)


def steady_steps(workload: Any, device: str, parameters: Mapping[str, Any], *, warmup: int, active: int) -> None:
    """Run a workload as for a part's profile by PyTorch: warmed up, then a few steps that count.

    Parameters
    ----------
    workload : callable
        ``start`` of a module in :mod:`nsightkit.workloads`.
    device : str
    parameters : mapping
        Of the workload.
    warmup : int
        Steps before the capture.
    active : int
        Steps that count. The GPU has finished all earlier steps when they begin, and them when they end.
    """
    with workload(device, **parameters) as work:
        for _ in range(warmup):
            work.step()
        _drain(device)
        with phase(CAPTURED):
            for _ in range(_SETTLING):
                work.step()
            _drain(device)
            with phase(STEADY):
                for _ in range(active):
                    work.step()
                _drain(device)


def _drain(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize()


def capture(
    part: Part, mode: str, folder: Path, *, timeout_s: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run some steps of a part under the profiler that it asks for, where there is one.

    Parameters
    ----------
    part : Part
    mode : {"live", "smoke"}
    folder : Path
        Gets the store ``nsys`` with the trace of the steady steps, or ``ncu.csv`` with the counters of their kernels.
        The profiler's own report, which holds the environment of the process, does not outlive this call.
    timeout_s : float
        For the program; the profiler itself takes some seconds more.
    environment : mapping, optional
        Of the program.

    Returns
    -------
    dict
        ``version``, ``command`` and ``steps`` of the capture; ``notice``: in one line, why nothing was captured, or why
        it is not whole.
    """
    program = ["-m", "nsightkit.investigations.under_nsight", part.investigation, part.name, mode]
    run = {"nsys": _under_nsys, "ncu": _under_ncu}[str(part.profiled)]
    try:
        done, found = run(
            program, mode, folder / "profiled", {"timeout_s": timeout_s, "env": environment, "show": False}
        )
    # Profilers, reports and programs under them can fail in new ways, and the part has been measured.
    except Exception as error:
        return {"notice": _one_line(f"{error}" or type(error).__name__)}
    finally:
        for left in folder.glob("profiled*"):
            left.unlink()
    # Without where on this machine the tools and the report are.
    options = [o for o in done.ran[1 : done.ran.index(sys.executable)] if not o.startswith(("--output=", "--export="))]
    output = "--output=report" if part.profiled == "nsys" else "--export=report"
    command = shlex.join([str(part.profiled), *options, output, "python", *program])
    return {"command": command, "steps": part.counts(mode)["active"], **found}


def _under_nsys(program: list[str], mode: str, report: Path, how: dict[str, Any]) -> tuple[Captured, dict[str, str]]:
    expect = ("ranges", "kernels") if mode == "live" else ("ranges",)
    done = nsys.profile([sys.executable, *program], report, trace=_KINDS, capture_range=CAPTURED, expect=expect, **how)
    if done.returncode:
        raise NsightkitError(f"the program ended with exit code {done.returncode} under it")
    store.write(steady(load(done.trace, cache=False)), report.with_name("nsys"))
    return done, {"version": dotted(NSYS.version(NSYS.require()))}


def _under_ncu(program: list[str], mode: str, report: Path, how: dict[str, Any]) -> tuple[Captured, dict[str, str]]:
    if mode != "live":
        raise NsightkitError("a CPU has no counters that Nsight Compute could read")
    # Caches are emptied before each pass, as is ncu's default; clocks are left alone, as in the runs that are timed.
    done = ncu.profile([sys.executable, *program], report, nvtx=[STEADY], sections=SECTIONS, **how)
    counted = kept(reports.read(done.report))
    reports.write(counted, report.with_name("ncu.csv"))
    found = {"version": dotted(NCU.version(done.ran[0]))}
    broken = [note for note in done.notes if "interrupted" in note]
    if done.returncode:
        broken.append(f"the program ended with exit code {done.returncode} under it")
    if broken:
        # What was counted until then is as good as any.
        found["notice"] = _one_line(f"only {len(counted)} launches were counted: {broken[0]}")
    return done, found


def kept(report: reports.Report) -> reports.Report:
    """Leave out of a report what is about the machine, and this user's and this host's names.

    Parameters
    ----------
    report : Report

    Returns
    -------
    Report
        The same launches; of their metrics all but attributes of the device and lists of other metrics.
    """
    units = {name: unit for name, unit in report.units.items() if not _NOT_KEPT.match(name)}
    metrics = [{name: value for name, value in row.items() if name in units} for row in report.metrics]
    launches = report.launches[list(reports.IDENTITY)].to_dict("records")
    names = [[launch["kernel"], *launch["ranges"]] for launch in launches]
    # All at once, so that one secret has one placeholder; and values only, for the names of metrics are NVIDIA's.
    values, names = scrub([[list(row.values()) for row in metrics], names])
    metrics = [dict(zip(row, found, strict=True)) for row, found in zip(metrics, values, strict=True)]
    identities: list[Any] = [
        {**launch, "kernel": kernel, "ranges": tuple(around)}
        for launch, (kernel, *around) in zip(launches, names, strict=True)
    ]
    return reports.from_metrics(report.path, identities, metrics, units)


def _one_line(problem: str) -> str:
    """Say what went wrong without where on this machine it did."""
    words = " ".join(problem.split())
    return re.sub(r"(?:/[^\s/:;,'\"()]+)+/([^\s/:;,'\"()]+)", r"\1", words)


def steady(trace: Trace) -> Trace:
    """Cut a capture to its steady steps: events that begin in the range around them.

    That range and the capture's own are left out, and so are the names of threads that have no event: nsys lists
    those of every process of the machine.

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    Trace

    Raises
    ------
    NsightkitError
        The range is not there.
    """
    ranges = trace.table("ranges", ["name", "start_ns", "end_ns"])
    around = ranges[ranges["name"] == STEADY]
    if len(around) != 1:
        raise NsightkitError(f"nsys recorded {len(around)} ranges {STEADY!r}, not one")
    begin, end = int(around["start_ns"].iloc[0]), int(around["end_ns"].iloc[0])
    clock = trace.t0_ns  # times stay on the report's own
    frames = {}
    for table in TABLES:
        rows = trace.table(table)
        rows = rows[(rows["start_ns"] >= begin) & (rows["start_ns"] < end)].reset_index(drop=True)
        if table == "ranges":
            rows = rows[~rows["name"].isin([CAPTURED, STEADY])].reset_index(drop=True)
            nested = np.flatnonzero(rows["kind"] != "startend")
            thread, start, until = (rows[c].to_numpy()[nested] for c in ("thread", "start_ns", "end_ns"))
            level, parent = nesting(thread, start, until)
            rows.loc[nested, "level"] = level
            rows.loc[nested, "parent"] = np.where(parent < 0, -1, nested[parent])
        frames[table] = rows.assign(start_ns=rows["start_ns"] + clock, end_ns=rows["end_ns"] + clock)
    window = (begin + clock, end + clock)
    cut = Trace.from_frames(frames, dataclasses.replace(trace.meta, window_ns=window))
    cut.meta.thread_names = cut.thread_names()
    return cut


if __name__ == "__main__":
    _part, _mode = find(sys.argv[1], sys.argv[2]), sys.argv[3]
    _counts = _part.counts(_mode)
    _steps = {"warmup": _counts["warmup"], "active": _counts["active"]}
    steady_steps(resolve(_part.workload), prepared(_mode), _part.parameters(_mode), **_steps)
