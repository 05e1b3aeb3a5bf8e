"""The second capture of a part: the same workload once more, under Nsight Systems.

It never decides whether a part was measured: whatever goes wrong here becomes one line that says why there is none.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsightkit.capture import nsys
from nsightkit.capture.repeating import CAPTURED, STEADY
from nsightkit.errors import NsightkitError
from nsightkit.trace import nsys_tool
from nsightkit.workloads.investigations import Part

if TYPE_CHECKING:
    from nsightkit.trace.model import Trace

__all__ = ["capture", "steady"]

# No OS calls: PyTorch's profile, beside which this is put, has none either, and to watch them costs time and space.
_KINDS = ("cuda", "nvtx")


def capture(
    part: Part, mode: str, folder: Path, *, timeout_s: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run some steps of a part under nsys, where there is one.

    Parameters
    ----------
    part : Part
    mode : {"live", "smoke"}
    folder : Path
        Gets the store ``nsys`` with the trace of the steady steps. The report itself, which holds the
        environment of the process, does not outlive this call.
    timeout_s : float
        For the program; nsys itself takes some seconds more.
    environment : mapping, optional
        Of the program.

    Returns
    -------
    dict
        ``version``, ``command`` and ``steps`` of the capture; or ``notice``: why there is none, in one line.
    """
    from nsightkit.trace import load, store

    place = folder / "nsys"
    try:
        tool = nsys_tool.require()
        program = ["-m", "nsightkit.capture.repeating", part.investigation, part.name, mode]
        done = nsys.profile(
            [sys.executable, *program],
            folder / "second",
            trace=_KINDS,
            capture_range=CAPTURED,
            expect=("ranges", "kernels") if mode == "live" else ("ranges",),
            timeout_s=timeout_s,
            env=environment,
            show=False,
        )
        if done.returncode:
            raise NsightkitError(f"the program ended with exit code {done.returncode} under it")
        store.write(steady(load(done.trace, cache=False)), place)
    # nsys, its report and a program under it can fail in ways nobody has seen yet, and the part has been measured.
    except Exception as error:
        return {"notice": _one_line(f"{error}" or type(error).__name__)}
    finally:
        for left in folder.glob("second*"):
            left.unlink()
    options = done.ran[2 : done.ran.index(sys.executable)]
    shown = ["nsys", "profile", *[o for o in options if not o.startswith("--output=")], "--output=report"]
    return {
        "version": ".".join(map(str, nsys_tool.version(tool))),
        "command": shlex.join([*shown, "python", *program]),
        "steps": part.counts(mode)["active"],
    }


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
    import numpy as np

    from nsightkit.trace.model import TABLES
    from nsightkit.trace.model import Trace as Model
    from nsightkit.trace.nesting import nesting

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
    cut = Model.from_frames(frames, dataclasses.replace(trace.meta, window_ns=window))
    cut.meta.thread_names = cut.thread_names()
    return cut
