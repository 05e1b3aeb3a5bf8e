"""Interval arithmetic against a line of booleans."""

import numpy as np
import pandas as pd
import pytest

from nsightkit.analysis.core import intervals
from nsightkit.trace import Trace

SIZE = 400


def drawn(start, end):
    line = np.zeros(SIZE, bool)
    for a, b in zip(start, end, strict=True):
        line[a:b] = True
    return line


@pytest.fixture(params=range(5))
def some(request):
    rng = np.random.default_rng(request.param)
    start = rng.integers(0, SIZE - 40, 30)
    return start, start + rng.integers(0, 40, 30)


def test_merge_is_disjoint_and_ordered(some):
    start, end = intervals.merge(*some)
    assert (drawn(start, end) == drawn(*some)).all()
    assert (start[1:] > end[:-1]).all()
    assert intervals.Coverage(*some).length == drawn(*some).sum()


def test_what_intervals_add_to_their_union():
    start, end, key = [5, 0, 2, 30, 0, 8], [9, 10, 12, 40, 3, 20], [1, 1, 1, 1, 2, 1]
    added = intervals.uncovered(start, end, key)
    assert added.tolist() == [0, 10, 2, 10, 3, 8]
    assert intervals.uncovered([], [], []).tolist() == []


def test_coverage_of_windows(some):
    line, covered = drawn(*some), intervals.Coverage(*some)
    rng = np.random.default_rng(1)
    a = rng.integers(0, SIZE, 200)
    b = a + rng.integers(-5, 80, 200)
    assert covered.of(a, b).tolist() == [line[x : max(x, y)].sum() for x, y in zip(a, b, strict=True)]


def test_nothing():
    assert intervals.Coverage([], []).length == 0
    assert intervals.Coverage([], []).of([1], [5]).tolist() == [0]
    empty = Trace.from_frames({})
    assert (
        len(intervals.gpu_intervals(empty)) == len(intervals.busy(empty)) == len(intervals.idle_intervals(empty)) == 0
    )


def trace(**tables):
    return Trace.from_frames({name: pd.DataFrame(rows) for name, rows in tables.items()})


def test_busy_is_the_union_over_streams_of_kernels_copies_memsets_and_graphs():
    t = trace(
        kernels={"start_ns": [100, 150], "end_ns": [200, 260], "device": [0, 0], "stream": [7, 8]},
        memops={"start_ns": [255, 400], "end_ns": [300, 410], "device": [0, 1]},
        graphs={"start_ns": [350], "end_ns": [380], "device": [0]},
    )
    busy = intervals.busy(t).set_index("device")
    assert busy.loc[0, ["span_ns", "busy_ns", "idle_ns", "compute_ns"]].tolist() == [280, 230, 50, 190]
    assert busy.loc[1, ["span_ns", "busy_ns", "idle_ns"]].tolist() == [10, 10, 0]
    gaps = intervals.idle_intervals(t)
    assert gaps[["device", "start_ns", "end_ns"]].to_numpy().tolist() == [[0, 200, 250]]


def test_launches_are_found_by_process_and_outermost_call():
    a, b = (10 << 24) | 1, (20 << 24) | 1
    t = trace(
        calls={
            # A driver call inside a runtime call, written first; the same id in another process.
            "start_ns": [105, 100, 300],
            "end_ns": [108, 110, 310],
            "thread": [a, a, b],
            "process": [10, 10, 20],
            "correlation": [2**40, 2**40, 2**40],
        }
    )
    assert intervals.launch_of(t, [10, 20, 30, 10, 10], [2**40, 2**40, 2**40, 6, 0]).tolist() == [1, 2, -1, -1, -1]


def test_when_operations_were_launched():
    calls = pd.DataFrame({"start_ns": [5, 9], "end_ns": [6, 10], "process": 1, "correlation": [1, 2]})
    calls["thread"] = 1 << 24
    kernels = pd.DataFrame({"start_ns": [20, 30, 40], "end_ns": [21, 31, 41], "process": 1, "correlation": [2, 1, 3]})
    known = Trace.from_frames({"calls": calls, "kernels": kernels})
    earliest = np.iinfo(np.int64).min
    # The third was launched before the capture began, else its call would be there.
    assert (intervals.launch_times(known, "kernels") + known.t0_ns).tolist()[:2] == [9, 5]
    assert intervals.launch_times(known, "kernels")[2] == earliest
    alone = Trace.from_frames({"kernels": kernels})
    assert (intervals.launch_times(alone, "kernels") + alone.t0_ns).tolist() == [20, 30, 40]
