"""Filters keep whole events, know processes and threads, and say what is wrong with them."""

from __future__ import annotations

import pandas as pd
import pytest

from nsightkit.analysis.timeline import kernels, selection
from nsightkit.errors import UsageError
from nsightkit.trace.model import Trace, TraceMeta

P, Q = 7, 8
MAIN, AUTOGRAD, WITH_RANGES, FOREIGN = P << 24 | 1, P << 24 | 2, P << 24 | 3, Q << 24 | 1


def planted() -> Trace:
    """Two steps of a forward and a backward; autograd's thread has no ranges, a third has its own."""
    names = ["step", "forward", "backward", "step", "forward", "backward", "loader"]
    starts = [0, 0, 50, 100, 100, 150, 0]
    ends = [100, 50, 100, 200, 150, 200, 300]
    threads = [MAIN] * 6 + [WITH_RANGES]
    # (call start, thread, process, correlation, device); ids collide between the processes
    launches = [
        (10, MAIN, P, 1, 0),
        (60, AUTOGRAD, P, 2, 0),
        (70, WITH_RANGES, P, 3, 1),
        (110, MAIN, P, 4, 0),
        (160, AUTOGRAD, P, 5, 0),
        (60, FOREIGN, Q, 2, 0),
    ]
    calls = pd.DataFrame(launches, columns=["start_ns", "thread", "process", "correlation", "device"])
    kernel = calls.assign(start_ns=calls["start_ns"] + 500, name=pd.Categorical([f"k{i}" for i in range(6)]))
    return Trace.from_frames(
        {
            "ranges": pd.DataFrame(
                {"start_ns": starts, "end_ns": ends, "thread": threads, "process": P, "name": pd.Categorical(names)}
            ),
            "calls": calls.drop(columns="device").assign(end_ns=calls["start_ns"] + 2),
            "kernels": kernel.drop(columns="thread").assign(end_ns=kernel["start_ns"] + 1),
        }
    )


def names(trace: Trace) -> list[str]:
    return sorted(kernels.summary(trace)["name"])


def test_no_filter_is_the_trace_itself():
    trace = planted()
    assert selection.select(trace) is trace


def test_device():
    chosen = selection.select(planted(), device=1)
    assert names(chosen) == ["k2"]
    assert chosen.size("calls") == 6  # what the CPU did stays
    with pytest.raises(UsageError, match="no device 3; it has 0, 1"):
        selection.select(planted(), device=3)
    with pytest.raises(UsageError, match="no GPU operations"):
        selection.select(Trace.from_frames({}), device=0)


def test_time_window_is_half_open_and_by_start():
    assert names(selection.select(planted(), time_ns=(510, 570))) == ["k0", "k1", "k5"]
    assert names(selection.select(planted(), time_ns=(570, None))) == ["k2", "k3", "k4"]
    assert names(selection.select(planted(), time_ns=(None, 511))) == ["k0"]
    for window in ((5, 5), (9, 3)):
        with pytest.raises(UsageError, match="not after its start"):
            selection.select(planted(), time_ns=window)


def test_within_takes_threads_without_ranges_but_not_those_with_their_own():
    assert names(selection.select(planted(), within="forward")) == ["k0", "k3"]
    assert names(selection.select(planted(), within="^backward$")) == ["k1", "k4"]
    chosen = selection.select(planted(), within="backward")
    assert chosen.table("ranges")["name"].tolist() == ["backward", "backward"]
    assert chosen.table("calls")["start_ns"].tolist() == [60, 70, 160]
    assert chosen.whole.size("kernels") == 6


def test_within_says_what_there_is():
    with pytest.raises(UsageError, match="no range matches 'nope'; there are 'step'"):
        selection.select(planted(), within="nope")
    with pytest.raises(UsageError, match="not a regular expression"):
        selection.select(planted(), within="[")
    with pytest.raises(UsageError, match="recorded no ranges"):
        selection.select(Trace.from_frames({}, TraceMeta(missing=["ranges"])), within="x")


def test_last_steps():
    assert names(selection.select(planted(), last_steps=1)) == ["k3", "k4"]
    assert names(selection.select(planted(), last_steps=99)) == ["k0", "k1", "k2", "k3", "k4"]
    with pytest.raises(UsageError, match="must be at least 1"):
        selection.select(planted(), last_steps=0)
    with pytest.raises(UsageError, match="no step ranges"):
        selection.select(Trace.from_frames({}), last_steps=1)


def test_filters_combine_also_one_after_the_other():
    both = selection.select(planted(), within="forward", last_steps=1)
    assert names(both) == ["k3"]
    again = selection.select(selection.select(planted(), within="forward"), last_steps=1)
    assert names(again) == ["k3"]
    assert names(selection.select(planted(), within="backward", device=0, time_ns=(600, None))) == ["k4"]
