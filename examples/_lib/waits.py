"""What waiting calls take and cost, and a synthetic loop whose waits cost nothing (page 03)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from _lib import synthetic
from nsightkit.analysis.core import noise
from nsightkit.api import Trace

if TYPE_CHECKING:
    from nsightkit.guide import Measurement


def of(trace: Trace) -> dict[str, float]:
    """Give the share of time that a thread waits, the idle time after waits, and the replay's speedup without them.

    Parameters
    ----------
    trace : Trace
    """
    calls = trace["calls"]
    calls = calls[calls["name"].str.contains("Synchronize")]
    lasting_ns = calls["end_ns"] - calls["start_ns"]
    longest_ns = lasting_ns.groupby(calls["thread"]).sum().max()
    idle = trace.gaps().set_index("cause")["share_of_span"]
    return {
        "share in waiting calls": longest_ns / trace.summary()["wall_ns"],
        "share idle after them": idle.get("synchronization", 0.0),
        "predicted speedup without waits": trace.whatif("no-sync")["speedup"].iloc[0],
    }


def queued_loop(steps: int = 12, step_ns: int = 5_000_000, launch_ns: int = 10_000) -> Trace:
    """Make a loop that waits for an event of one step earlier, so that a whole step is always queued."""
    events = synthetic.Events()
    for number in range(steps):
        begin = number * step_ns
        call = events.call("cudaLaunchKernel", begin, begin + launch_ns)
        start = (number + 1) * step_ns
        events.kernel("gemm", start, start + step_ns, call)
        events.wait("cudaEventSynchronize", begin + launch_ns, begin + step_ns - launch_ns)
    return events.trace()


def reads(run: Measurement) -> dict[str, Any]:
    """Count reads of one value per step, as operators and as CUDA calls; None for what was not recorded."""
    row: dict[str, Any] = {"run": run.name}
    count = len(run.trace.steps())
    for name, table in (("aten::item", "ops"), ("cudaStreamSynchronize", "calls")):
        row[f"{name} per step"] = None
        if run.trace.recorded(table):
            row[f"{name} per step"] = (run.trace[table]["name"] == name).sum() / count
    return row


def answer(before: Measurement, after: Measurement) -> str:
    """Say how much shorter a step is without the reads, and what the replay predicted.

    Parameters
    ----------
    before, after : Measurement
    """
    was_ms, now_ms = before.median("step_ns") / 1e6, after.median("step_ns") / 1e6
    said = f"The median step went from {was_ms:.1f} to {now_ms:.1f} ms ({now_ms / was_ms - 1:+.0%})"
    predicted = before.trace.whatif("no-sync")["speedup"].iloc[0]
    if pd.notna(predicted):
        said += f"; the replay predicted {1 / predicted - 1:+.0%}"
    apart = abs(before.values("loss") - after.values("loss")).max()
    said += f". The losses of a step differ by at most {apart:.2g}."
    change = noise.ratio(before.values("step_ns"), after.values("step_ns"))
    return said if change.excludes(1) else f"No effect beyond the spread. {said}"
