"""Span, busy, idle and captured time, per device and summed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import nsightkit
from nsightkit.analysis import verdict
from nsightkit.analysis.timeline import overview
from nsightkit.analysis.timeline.selection import select
from nsightkit.trace.model import Gpu, Trace, TraceMeta

FACTS = ("devices", "tool", "tool_version", "missing")


def _frame(*rows: tuple[int, int, int]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["device", "start_ns", "end_ns"])


def two_devices(meta: TraceMeta | None = None) -> Trace:
    return Trace.from_frames(
        {
            # device 0: two kernels overlap on two streams, a copy touches, a graph stands alone
            "kernels": _frame((0, 100, 200), (0, 150, 250), (1, 1000, 1100)),
            "memops": _frame((0, 250, 300)),
            "graphs": _frame((0, 400, 500)),
            "calls": pd.DataFrame({"start_ns": [0, 1150], "end_ns": [10, 1300]}),
        },
        meta,
    )


def test_every_figure_of_two_devices():
    meta = TraceMeta(tool="Nsight Systems", tool_version="2025.1", gpus=[Gpu(0, "NVIDIA H200")], missing=["ops"])
    result = overview.summary(two_devices(meta))
    devices = result.pop("devices")
    assert result == {
        "span_ns": 400 + 100,
        "busy_ns": 300 + 100,
        "idle_ns": 100,
        "kernel_ns": 300,  # a sum of durations: overlapping kernels count each in full
        "memop_ns": 50,
        "graph_ns": 100,
        "wall_ns": 1000,
        "lead_ns": 100,
        "tail_ns": 200,
        "window_ns": None,
        "window_idle_ns": None,
        "kernel_count": 3,
        "density": (250 + 100) / 500,
        "memory_overhead": 50 / 300,
        "tool": "Nsight Systems",
        "tool_version": "2025.1",
        "missing": ["ops"],
    }
    first, second = devices
    assert (first["device"], first["name"], first["start_ns"], first["end_ns"]) == (0, "NVIDIA H200", 100, 500)
    assert (first["span_ns"], first["idle_ns"], first["kernel_count"], first["density"]) == (400, 100, 2, 250 / 400)
    assert (second["device"], second["name"], second["density"], second["memory_overhead"]) == (1, None, 1.0, 0.0)


def test_the_captured_window_is_the_sources():
    # On the source's clock; the trace's begins with the first event, which here is at 0.
    result = overview.summary(two_devices(TraceMeta(window_ns=(-50, 5000))))
    assert (result["lead_ns"], result["tail_ns"]) == (150, 3900)


def test_the_window_is_the_steps():
    # The step begins 900 before the GPU does, on both of its devices.
    trace = Trace.from_frames(
        {
            "ranges": pd.DataFrame({"start_ns": [0], "end_ns": [950], "name": pd.Categorical(["step"])}),
            "calls": pd.DataFrame({"start_ns": [880, 890], "end_ns": [885, 895], "correlation": [1, 2]}),
            "kernels": _frame((0, 900, 1000), (1, 900, 960)).assign(correlation=[1, 2]),
        }
    )
    result = overview.summary(trace)
    assert (result["window_ns"], result["window_idle_ns"], result["idle_ns"]) == (1000, 900 + 940, 0)
    assert overview.note_on_idle_shares(trace, result) == (
        "The GPU was idle for 92% of the steps, but for 0% of its span, which runs from its first operation to its "
        "last."
    )
    whole = trace.masked({"ranges": np.zeros(1, bool)})
    assert overview.note_on_idle_shares(whole, overview.summary(whole)) is None


def test_not_recorded_is_not_zero():
    meta = TraceMeta(missing=["kernels", "memops", "graphs", "calls"])
    result = overview.summary(Trace.from_frames({"os_calls": pd.DataFrame({"start_ns": [0], "end_ns": [5]})}, meta))
    assert {value for key, value in result.items() if key not in FACTS} == {None}
    assert result["devices"] == []


def test_recorded_but_idle_is_zero():
    result = overview.summary(Trace.from_frames({"calls": pd.DataFrame({"start_ns": [3], "end_ns": [5]})}))
    assert (result["span_ns"], result["busy_ns"], result["kernel_count"], result["wall_ns"]) == (0, 0, 0, 0)
    assert result["density"] is None
    assert result["memory_overhead"] is None


@pytest.mark.parametrize(
    ("name", "busy_ns", "span_ns"),
    [
        # A tool that reads only the kernel table calls this one 100% idle.
        ("cs336-zx3xyy/result_2_7B_compile_ro.sqlite", 7_811_200_000, 7_811_600_000),
        # A CPU-side launcher event carries a stream argument and is not a kernel.
        ("hta/triton_example__triton_example.json.gz", 1_760, 1_760),
    ],
)
def test_what_others_get_wrong(name: str, busy_ns: int, span_ns: int, shared_traces: Path):
    result = overview.summary(nsightkit.load(shared_traces / name, cache=False))
    assert result["busy_ns"] == pytest.approx(busy_ns, abs=busy_ns * 1e-5)
    assert result["span_ns"] == pytest.approx(span_ns, abs=span_ns * 1e-5)


def test_a_filter_that_leaves_nothing_says_so():
    """Nothing left to measure is not 0: the trace has work, of which the filter takes none."""
    trace = Trace.from_frames({"kernels": _frame((0, 10, 20))})
    assert overview.warning_without_gpu_work(trace) is None
    nothing = select(trace, time_ns=(50, None))
    found = overview.summary(nothing)
    assert {value for key, value in found.items() if key not in FACTS} == {None}
    assert overview.note_on_idle_shares(nothing, found) == overview.warning_without_gpu_work(nothing)
    answer = verdict.summary(nothing)
    assert answer["evidence"] == [overview.warning_without_gpu_work(nothing)]
    assert "filters" in answer["next_steps"][0]
