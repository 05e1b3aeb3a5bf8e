"""Idle time at the ends of the window that the steps cover, laid out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from synthetic.planted import Export

import nsightkit
from nsightkit.analysis.timeline import gaps, steps
from nsightkit.analysis.timeline.gaps import in_window

US, PID = 1_000, 78
PROCESS, MAIN = Export.process(PID), Export.thread(PID, PID)


def _laid(tmp_path: Path, kernels: list[tuple[int, int, int]], *events: tuple[str, str, int, int]) -> Any:
    """Kernels (launched, start, end) and other events (kind, name, start, end), in µs."""
    out = Export()
    for launched, start, end in kernels:
        correlation = out.call("cudaLaunchKernel_v7000", MAIN, launched * US, (launched + 3) * US)
        out.kernel("a", start * US, end * US, correlation, PROCESS)
    for kind, name, start, end in events:
        getattr(out, kind)(name, MAIN, start * US, end * US)
    return nsightkit.load(out.write(tmp_path / "ends.sqlite"))


@pytest.mark.parametrize(
    ("first", "last_end", "end", "events", "found"),
    [
        (
            1000,
            1200,
            2000,
            [("range", "decode", 5, 990), ("range", "write log", 1210, 1990)],
            [(0, 1000, "cpu-work", "decode"), (1200, 2000, "cpu-work", "write log")],
        ),
        (1000, 1200, 1200, [("range", "dataload", 5, 990)], [(0, 1000, "input-pipeline", "dataload")]),
        # only the step names the work
        (1000, 1200, 1200, [], [(0, 1000, "cpu-work", "step")]),
        # the return of a wait is no work
        (
            10,
            1200,
            1210,
            [("synchronize", "cudaStreamSynchronize", 20, 1208)],
            [(0, 10, "launch-overhead", ""), (1200, 1210, "synchronization", "cudaStreamSynchronize")],
        ),
    ],
)
def test_before_the_first_launch_and_after_the_last_operation(tmp_path, first, last_end, end, events, found):
    middle = (first + last_end) // 2
    kernels = [(first - 4, first, middle), (first, middle, last_end)]
    trace = _laid(tmp_path, kernels, ("range", "step", 0, end), *events)
    ends = in_window(trace)
    assert (ends["start_ns"] // US).tolist() == [row[0] for row in found]
    assert (ends["end_ns"] // US).tolist() == [row[1] for row in found]
    assert ends["cause"].tolist() == [row[2] for row in found]
    assert [name for name, row in zip(ends["name"], found, strict=True) if row[3]] == [r[3] for r in found if r[3]]
    assert gaps.summary(trace).empty  # between the first operation and the last there is no gap


def test_a_window_begins_where_the_gpu_got_to_the_first_step(tmp_path: Path):
    """The GPU was still at work that was launched before the recording: that is not idle time of the step."""
    trace = _laid(tmp_path, [(10, 8_000, 9_000)], ("range", "step", 0, 100))
    assert steps.windows(trace)["begin_ns"].tolist() == [8_000 * US]
    assert in_window(trace).empty
