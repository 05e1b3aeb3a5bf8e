"""Idle time at the ends of the window that the steps cover, laid out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from synthetic.planted import Export

import nsightkit
from nsightkit.analysis.timeline import gaps, steps
from nsightkit.analysis.timeline.gaps import in_window

US, PID = 1_000, 78
PROCESS, MAIN = Export.process(PID), Export.thread(PID, PID)


def window(trace: Any) -> tuple[int, int]:
    found = steps.windows(trace)
    return int(found["begin_ns"].iloc[0]), int(found["end_ns"].iloc[-1])


def _one_step(tmp_path: Path, *, first: int, last_end: int, end: int, **inside: tuple[str, int, int]) -> Any:
    """A step from 0 to `end`, in µs, with two kernels launched 4 µs before `first` and 4 µs after that."""
    out = Export()
    out.range("step", MAIN, 0, end * US)
    middle = (first + last_end) // 2
    for launch, start, stop in ((first - 4, first, middle), (first, middle, last_end)):
        correlation = out.call("cudaLaunchKernel_v7000", MAIN, launch * US, (launch + 3) * US)
        out.kernel("a", start * US, stop * US, correlation, PROCESS)
    for name, begin, stop in inside.values():
        if name.endswith("Synchronize"):
            out.synchronize(name, MAIN, begin * US, stop * US)
        else:
            out.range(name, MAIN, begin * US, stop * US)
    return nsightkit.load(out.write(tmp_path / "ends.sqlite"))


def _rows(trace: Any) -> list[tuple[int, int, str, str]]:
    found = in_window(trace)
    columns = (found["start_ns"] // US, found["end_ns"] // US, found["cause"].astype(str), found["name"].astype(str))
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_work_before_the_first_launch_and_after_the_last_operation(tmp_path: Path) -> None:
    trace = _one_step(tmp_path, first=1000, last_end=1200, end=2000, a=("decode", 5, 990), b=("write log", 1210, 1990))
    assert _rows(trace) == [(0, 1000, "cpu-work", "decode"), (1200, 2000, "cpu-work", "write log")]
    assert gaps.summary(trace).empty  # between the first operation and the last there is no gap


def test_waiting_for_data_before_the_first_launch(tmp_path: Path) -> None:
    trace = _one_step(tmp_path, first=1000, last_end=1200, end=1200, a=("dataload", 5, 990))
    assert _rows(trace) == [(0, 1000, "input-pipeline", "dataload")]


def test_the_return_of_a_wait_is_not_work(tmp_path: Path) -> None:
    trace = _one_step(tmp_path, first=10, last_end=1200, end=1210, a=("cudaStreamSynchronize", 20, 1208))
    assert _rows(trace)[-1] == (1200, 1210, "synchronization", "cudaStreamSynchronize")


def test_what_only_the_step_names_is_named_by_it(tmp_path: Path) -> None:
    assert _rows(_one_step(tmp_path, first=1000, last_end=1200, end=1200)) == [(0, 1000, "cpu-work", "step")]


def test_without_steps_there_is_no_window(tmp_path: Path) -> None:
    out = Export()
    for launch, start, stop in ((0, 5, 20), (300, 305, 320)):
        correlation = out.call("cudaLaunchKernel_v7000", MAIN, launch * US, (launch + 3) * US)
        out.kernel("a", start * US, stop * US, correlation, PROCESS)
    trace = nsightkit.load(out.write(tmp_path / "bare.sqlite"))
    assert in_window(trace).equals(gaps.causes(trace))


def test_a_window_begins_where_the_gpu_got_to_the_first_step(tmp_path: Path) -> None:
    """The GPU was still at work that was launched before the recording: that is not idle time of the step."""
    out = Export()
    out.range("step", MAIN, 0, 100 * US)
    correlation = out.call("cudaGraphLaunch_v10000", MAIN, 10 * US, 15 * US)
    out.kernel("a", 8_000 * US, 9_000 * US, correlation, PROCESS)
    trace = nsightkit.load(out.write(tmp_path / "late.sqlite"))
    assert window(trace) == (8_000 * US, 9_000 * US)
    assert in_window(trace).empty
    # An operation that started as soon as it was launched was not behind anything.
    trace = _one_step(tmp_path, first=1000, last_end=1200, end=1200)
    assert window(trace) == (0, 1200 * US)
