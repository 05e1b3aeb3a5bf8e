"""Damaged files end in answers or in our own errors; what many threads, processes and devices cost stays in bounds."""

from __future__ import annotations

import importlib.util
import sys
import time
import tracemalloc
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest

from nsightkit.analysis.core.intervals import launch_of
from nsightkit.analysis.replay.whatif import WhatIf
from nsightkit.analysis.timeline import gaps, ranges, selection, where
from nsightkit.errors import TraceError, UsageError
from nsightkit.trace.model import Trace

_TOOL = Path(__file__).parents[1] / "tools" / "fuzz.py"
_FORMATS = ("store", "sqlite", "parquetdir", "kineto", "ncu", "snapshot")
_INPUTS = 80
#: Of formats whose every input is first read by a process of its own.
_INPUTS_WITH_PROCESSES = {"store": 25, "parquetdir": 25, "snapshot": 50}
#: Inputs of which a long run once made something other than an error of our own.
_ONCE_FOUND = {"ncu": [12004]}
_MIB = 1 << 20


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz", _TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz"] = module  # where its dataclasses look for their names
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", _FORMATS)
def test_only_our_own_errors(fuzz: ModuleType, kind: str):
    assert set(_FORMATS) == set(fuzz.FORMATS)
    maker = fuzz.FORMATS[kind]()
    inputs = _INPUTS_WITH_PROCESSES.get(kind, _INPUTS)
    numbers = [*range(inputs), *_ONCE_FOUND.get(kind, ())]
    failures = [fuzz.try_input(kind, maker, number) for number in numbers]
    assert [str(failure) for failure in failures if failure] == []


def _launches(count: int, *, process: Any = 1, thread: Any = 1, device: Any = 0, stream: Any = 7) -> Trace:
    """So many kernels, each with its launch and a range around that, on ids of any kind."""
    number = np.arange(count)
    start = number * 10_000
    process = np.broadcast_to(process, count)
    thread = process << 24 | thread
    name = pd.Categorical.from_codes((number % 2).astype(np.int8), pd.Index(["a", "b"], dtype="str"))
    launch = pd.Categorical.from_codes(np.zeros(count, np.int8), pd.Index(["cudaLaunchKernel"], dtype="str"))
    on_cpu = {"process": process, "thread": thread}
    return Trace.from_frames(
        {
            "kernels": pd.DataFrame(
                {
                    "start_ns": start + 3_000,
                    "end_ns": start + 7_000,
                    "device": device,
                    "stream": stream,
                    "process": process,
                    "correlation": number + 1,
                    "name": name,
                }
            ),
            "calls": pd.DataFrame(
                {"start_ns": start, "end_ns": start + 2_000, **on_cpu, "correlation": number + 1, "name": launch}
            ),
            "ranges": pd.DataFrame(
                {"start_ns": start - 500, "end_ns": start + 2_500, **on_cpu, "name": name, "level": 0, "parent": -1}
            ),
        }
    )


def test_as_many_processes_as_launches_need_no_table_of_all_pairs():
    trace = _launches(20_000, process=np.arange(20_000))
    kernels = trace.table("kernels", ["process", "correlation"])
    tracemalloc.start()
    launch = launch_of(trace, kernels["process"], kernels["correlation"])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert launch.tolist() == list(range(20_000))
    assert peak < 100 * _MIB
    assert launch_of(trace, [5, 5, -1], [6, 7, 6]).tolist() == [5, -1, -1]


@pytest.mark.parametrize("rule", ["window", "thread"])
@pytest.mark.parametrize("many", ["process", "thread"])
def test_thousands_of_threads_are_looked_at_once_each(many: str, rule: Any):
    trace = _launches(30_000, **{many: np.arange(30_000)})
    began = time.process_time()
    table = ranges.summary(trace, rule=rule)
    assert time.process_time() - began < 15
    assert table["kernel_count"].tolist() == [15_000, 15_000]
    assert table["gpu_ns"].tolist() == [15_000 * 4_000] * 2


def test_workers_without_ranges_launch_in_those_of_their_process():
    trace = _launches(3_000, thread=np.arange(3_000) + 2)
    frames = {table: trace.table(table) for table in ("kernels", "calls", "ranges")}
    frames["ranges"]["thread"] = 1 << 24 | 1
    frames["calls"].loc[0, "end_ns"] = 4_000  # outlasts its range
    trace = Trace.from_frames(frames)
    assert ranges.summary(trace)["kernel_count"].sum() == 2_999
    assert ranges.summary(trace, rule="thread")["kernel_count"].sum() == 0
    assert selection.select(trace, within="b").size("kernels") == 1_500
    divided = where.summary(trace, by="range").rows.set_index("where")["count"]
    assert divided.to_dict() == {"a": 1_499, "b": 1_500, where.UNATTRIBUTED: 1}


def test_waits_for_other_devices_cost_one_pass():
    trace = _launches(20_000, device=(np.arange(20_000) % 400).astype(np.int32))
    tracemalloc.start()
    table = gaps.summary(trace)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert table["count"].sum() == 20_000 - 400
    assert peak < 100 * _MIB


def test_a_trace_of_too_many_devices_is_refused():
    with pytest.raises(TraceError, match=r"kernels\.device that names more than 1,024 devices"):
        _launches(2_000, device=np.arange(2_000).astype(np.int32)).table("kernels")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"thread": np.arange(300)}, "300 threads"),
        ({"process": np.arange(300)}, "300 threads"),
    ],
)
def test_waits_of_too_many_threads_are_not_played(more: dict[str, Any], said: str):
    assert said in str(WhatIf(_launches(300, **more)).refused)


@pytest.mark.parametrize("value", [2**31 - 1, -1])
def test_any_device_can_be_moved_aside(value: int):
    trace = _launches(200, device=np.int32(value))
    copies = trace.table("kernels", ["start_ns", "end_ns", "device", "process", "correlation"])
    copies = copies.assign(correlation=copies["correlation"], stream=9, kind="HtoD", bytes=1)
    frames = {table: trace.table(table) for table in ("kernels", "calls", "ranges")} | {"memops": copies}
    frames["calls"] = pd.concat([frames["calls"]] * 2, ignore_index=True)
    frames["calls"]["correlation"] = np.arange(400) + 1
    frames["memops"]["correlation"] += 200
    row = WhatIf(Trace.from_frames(frames)).row("overlap-copies")
    assert row["predicted_ns"] is None or row["predicted_ns"] > 0


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63), 2**40])
@pytest.mark.parametrize("column", ["thread", "process", "stream"])
def test_ids_may_be_any_64_bits(column: str, value: int):
    trace = _launches(300)
    frames = {table: trace.table(table) for table in ("kernels", "calls", "ranges")}
    for frame in frames.values():
        if column in frame:
            frame.loc[::2, column] = value
    trace = Trace.from_frames(frames)
    assert ranges.summary(trace)["count"].sum() == 300
    assert gaps.summary(trace)["count"].sum() == 299
    replayed = WhatIf(trace)
    if replayed.refused is None:
        replayed.row("no-sync")


@pytest.mark.parametrize("device", [1, -1, 2**31, 2**63, 10**30])
def test_a_device_that_is_not_there(device: int):
    with pytest.raises(UsageError, match="no device"):
        selection.select(_launches(3), device=device)


def test_half_a_surrogate_pair_in_a_snapshot_is_replaced(fuzz: ModuleType):
    assert fuzz.try_input("snapshot", fuzz.FORMATS["snapshot"](), 11387) is None
