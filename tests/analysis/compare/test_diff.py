"""Two captures: exact deltas, sums that add up, noise that is not a change, and the real changes of real pairs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from synthetic import planted

import nsightkit
from nsightkit.analysis.compare import diff
from nsightkit.analysis.core import noise
from nsightkit.analysis.timeline import selection
from nsightkit.trace import Trace, TraceMeta
from nsightkit.trace.model import Gpu

US = 1_000
PID = 9
MAIN = PID << 24 | 1
CARD = "Synthetic GPU"
GEMM, ADD, NORM = "ampere_sgemm_128x64_nn", "vectorized_elementwise_kernel<4, CUDAFunctor_add>", "layer_norm_kernel"
BASE = ((GEMM, 40), (ADD, 20), (NORM, 10), (ADD, 20))

Kernels = Sequence[tuple[str, float]]


def program(kernels: Kernels = BASE, count: int = 8, **options: Any) -> Trace:
    """A trace of steps that launch the same kernels (names, µs); other options are of its meta data.

    `jitter` is relative, of kernels and of the CPU's time; `stalls` are steps that take longer.
    """
    rng = np.random.default_rng(options.pop("seed", 0))
    jitter, stalls = options.pop("jitter", 0.0), options.pop("stalls", ())
    named = options.pop("named", "train_step")
    launches, spans = [], []
    now = 1_000_000

    def noisy(microseconds: float) -> int:
        return round(microseconds * US * (1 + jitter * rng.standard_normal()))

    for number in range(count):
        start = free = now
        for name, microseconds in kernels:
            begin = max(free, now + 2 * US)
            free = begin + noisy(microseconds)
            launches.append((now, begin, free, name))
            now += 2 * US
        now = max(now, free) + noisy(100) + 100 * US * (number in stalls)
        spans.append((start, now - 100, f"{named} {number}"))
    launched = pd.DataFrame(launches, columns=["launch_ns", "start_ns", "end_ns", "name"]).astype({"name": "category"})
    launched = launched.assign(device=0, stream=7, process=PID, thread=MAIN, correlation=range(1, len(launched) + 1))
    calls = launched.assign(start_ns=launched["launch_ns"], end_ns=launched["launch_ns"] + US, name="cudaLaunchKernel")
    ranges = pd.DataFrame(spans if named else [], columns=["start_ns", "end_ns", "name"]).astype({"name": "category"})
    frames = {
        "kernels": launched.drop(columns=["launch_ns", "thread"]),
        "calls": calls[["start_ns", "end_ns", "process", "thread", "correlation", "name"]].astype({"name": "category"}),
        "ranges": ranges.assign(process=PID, thread=MAIN),
    }
    meta: dict[str, Any] = {"tool": "planted", "gpus": [Gpu(0, CARD)], "missing": ["memops", "graphs"]}
    return Trace.from_frames(frames, TraceMeta(**meta | options))


def scaled(factor: float, only: str | None = None) -> Kernels:
    """The kernels of BASE with the times of all, or of one of them, scaled."""
    kernels = []
    for name, microseconds in BASE:
        kernels.append((name, microseconds * (factor if only in (None, name) else 1)))
    return kernels


def row(found: diff.Comparison, table: str, name: str, clock: str | None = None) -> pd.Series:
    frame = found.tables[table]
    frame = frame[frame["cause" if table == "gaps" else "name"] == name]
    if clock:
        frame = frame[frame["clock"] == clock]
    assert len(frame) == 1, (name, frame)
    return frame.iloc[0]


# ---------------------------------------------------------------- exact deltas


def test_a_slower_kernel_is_found_to_the_nanosecond():
    found = diff.compare(program(), program(scaled(1.35, ADD)))
    slower = row(found, "kernels", ADD)
    assert slower[["before_ns", "after_ns", "delta_ns", "low_ns", "high_ns"]].tolist() == [40e3, 54e3, 14e3, 14e3, 14e3]
    counts = ["before_count", "after_count", "before_total_ns", "after_total_ns"]
    assert slower[counts].tolist() == [16, 16, 320e3, 432e3]
    assert slower[["match", "category", "significance"]].tolist() == ["name", "elementwise", "changed"]
    for name in (GEMM, NORM):
        assert row(found, "kernels", name)[["delta_ns", "low_ns", "significance"]].tolist() == [0, 0, "within noise"]
    assert row(found, "figures", "wall_ns")["delta_ns"] == 14e3
    assert row(found, "ranges", "train_step#", clock="GPU")["delta_ns"] == 14e3
    summary = found.summary()
    assert (summary["outcome"], summary["unit"]) == ("slower", "step")
    assert {change["table"] for change in summary["changes"]} == {"figures", "kernels", "ranges"}
    assert summary["headline"].endswith(noise.ONE_RUN)


def test_renamed_and_new_kernels_keep_the_sums():
    after = program([("volta_sgemm_32x128_nn", 60), (ADD, 30), ("exp_kernel", 5)])
    found = diff.compare(program(), after)
    renamed = row(found, "kernels", "volta_sgemm_32x128_nn")
    assert renamed[["match", "before_names", "delta_ns"]].tolist() == ["normalised", [GEMM], 20 * US]
    fresh = row(found, "kernels", "exp_kernel")
    assert fresh[["match", "before_names", "before_ns", "significance"]].tolist() == ["appeared", [], 0, "changed"]
    totals = found.tables["kernels"][["before_total_ns", "after_total_ns"]].sum()
    assert totals.tolist() == [8 * 90 * US, 8 * 95 * US]


def test_a_planted_fault(tmp_path: Path):
    truths, traces = [], []
    for seed, name in enumerate(("sync", None)):
        truths.append(planted.training(tmp_path / f"{seed}.sqlite", name, seed=seed))
        traces.append(nsightkit.load(tmp_path / f"{seed}.sqlite"))
    found = diff.compare(*traces)
    summary = found.summary()
    assert (summary["bottleneck"]["before"], summary["bottleneck"]["after"]) == ("synchronization", "compute-bound")
    assert (summary["moved"], summary["outcome"]) == (True, "faster")
    # The loop without a fault launches ahead of its device: on the CPU's clock its steps would take almost no time.
    assert row(found, "figures", "wall_ns")["after_ns"] == pytest.approx(truths[1]["span_ns"] / 12, rel=0.02)
    cause = row(found, "gaps", "synchronization")
    assert (cause["significance"], cause["delta_ns"] < 0) == ("changed", True)


def test_captures_of_different_length_compare():
    found = diff.compare(program(count=5), program(count=11))
    for table in found.tables.values():
        assert (table["delta_ns"] == 0).all()
    assert row(found, "kernels", GEMM)[["before_total_ns", "after_total_ns"]].tolist() == [5 * 40 * US, 11 * 40 * US]
    summary = found.summary()
    assert (summary["outcome"], summary["warnings"], summary["moved"]) == ("no change", [], None)


# ---------------------------------------------------------------- noise


def test_noise_is_not_called_a_change():
    """Of pairs without a change, a step's time at most once in ten, and of all rows fewer."""
    traces = [program(count=10, jitter=0.08, seed=seed) for seed in range(21)]
    alarms, significances = 0, []
    for before, after in itertools.pairwise(traces):
        found = diff.compare(before, after)
        alarms += row(found, "figures", "wall_ns")["significance"] == "changed"
        for table in found.tables.values():
            significances += table["significance"].tolist()
    assert alarms <= 2
    assert significances.count("changed") / len(significances) < 0.04


def test_too_few_steps_are_inconclusive():
    found = diff.compare(program(count=3), program(scaled(2), count=3))
    summary = found.summary()
    assert summary["outcome"] == "inconclusive"
    assert "3 and 3 steps" in summary["headline"]
    assert found.tables["kernels"]["low_ns"].isna().all()
    # What may be noise is listed as such.
    assert {change["significance"] for change in summary["changes"]} == {"inconclusive"}


def test_a_change_that_is_sure_and_too_small_does_not_matter():
    found = diff.compare(program(), program(scaled(1.0225, GEMM)))  # half a percent of a step
    assert row(found, "kernels", GEMM)[["delta_ns", "low_ns", "significance"]].tolist() == [900, 900, "within noise"]
    assert (found.summary()["outcome"], found.summary()["changes"]) == ("no change", [])


def test_a_stall_does_not_hide_a_change():
    found = diff.compare(program(jitter=0.005), program(scaled(0.5), jitter=0.005, seed=1, stalls=(0, 4)))
    wall = row(found, "figures", "wall_ns")
    assert (wall["significance"], wall["delta_ns"]) == ("changed", pytest.approx(-45 * US, rel=0.1))


def test_more_captures_show_how_much_captures_differ():
    # Steps of one capture agree to a third of a percent; captures differ by eight.
    sides = [[program(jitter=0.003, seed=0)], [program(scaled(1.08), jitter=0.003, seed=1)]]
    single = row(diff.compare(sides[0][0], sides[1][0]), "kernels", GEMM)
    also = {"also_before": sides[1], "also_after": sides[0]}
    several = row(diff.compare(sides[0][0], sides[1][0], **also), "kernels", GEMM)
    assert [single["significance"], several["significance"]] == ["changed", "within noise"]
    # The sums stay those of the two that were named.
    assert several["before_total_ns"] == single["before_total_ns"]
    slowest = [program(scaled(1.6), jitter=0.003, seed=seed) for seed in (4, 5)]
    changed = diff.compare(sides[0][0], slowest[0], also_before=sides[0], also_after=slowest[1:]).summary()
    assert changed["outcome"] == "slower"
    assert "16 and 16 steps" in changed["headline"]
    assert noise.ONE_RUN not in changed["headline"]


# ---------------------------------------------------------------- captures without steps


def test_without_steps_a_change_cannot_be_told_from_noise():
    found = diff.compare(program(), program(named="", count=9))
    assert found.unit == "trace"
    assert {change["significance"] for change in found.summary()["changes"]} == {"inconclusive"}


def test_a_selection_is_compared_step_by_step(tmp_path: Path):
    planted.training(tmp_path / "t.sqlite", "starved")
    trace = nsightkit.load(tmp_path / "t.sqlite")
    inside = diff.compare(*[selection.select(trace, within="^forward$")] * 2)
    assert (inside.unit, len(inside.before[0].windows)) == ("step", 12)
    assert set(inside.tables["figures"]["name"]) == {"wall_ns", "busy_ns"}
    point = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int, T2, T3)"
    # Half of these kernels are launched by the forward pass.
    count = (trace.table("kernels")["name"] == point).sum()
    assert row(inside, "kernels", point)["before_count"] == count / 2


# ---------------------------------------------------------------- warnings


def test_kernels_may_hide_in_graphs():
    after = program(missing=[])
    graphs = after.table("kernels", ["start_ns", "end_ns", "device", "stream", "correlation"])
    after = Trace.from_frames({"graphs": graphs, "ranges": after.table("ranges")}, meta=after.meta)
    warnings = diff.compare(program(), after).summary()["warnings"]
    assert sum("of CUDA graphs without their kernels" in warning for warning in warnings) == 1


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({}, {"seed": 3}, []),
        ({}, {"gpus": [Gpu(0, "Another GPU")]}, [f"Different GPUs: {CARD} before, Another GPU after"]),
        ({}, {"tool": "another"}, ["Different profilers: planted before, another after"]),
        (
            {},
            {"missing": ["memops", "graphs", "os_calls"]},
            ["The capture after did not record operating-system calls"],
        ),
        ({"named": ""}, {"named": ""}, ["Whole captures are compared"]),
        (
            {"named": ""},
            {"named": "", "count": 16},
            ["Whole captures are compared", "The captures hold different amounts of work"],
        ),
        # A library chose anew; the time came out the same.
        (
            {"kernels": [("winograd_gemm", 40), ("winograd_gemm", 40), ("implicit_gemm", 5)]},
            {"kernels": [("winograd_gemm", 40), ("implicit_gemm", 23), ("implicit_gemm", 23)]},
            ["A library chose other"],
        ),
        # Two kernels that changed were not exchanged.
        (
            {"kernels": [("winograd_gemm", 40), ("implicit_gemm", 5)]},
            {"kernels": [("winograd_gemm", 10), ("implicit_gemm", 36)]},
            [],
        ),
    ],
)
def test_what_else_differs(before: dict[str, Any], after: dict[str, Any], expected: Sequence[str]):
    summary = diff.compare(program(**before), program(**after)).summary()
    assert len(summary["warnings"]) == len(expected), summary["warnings"]
    for warning, start in zip(summary["warnings"], expected, strict=True):
        assert warning.startswith(start)
    assert summary["headline"].endswith("; the captures hold different amounts of work.") == ("count" in after)


def test_what_was_not_recorded_is_not_compared():
    frames = {table: program().table(table) for table in ("calls", "ranges")}
    on_cpu = Trace.from_frames(frames, TraceMeta(tool="planted", missing=["kernels", "memops", "graphs", "ops"]))
    found = diff.compare(on_cpu, on_cpu).summary()
    assert [figure["name"] for figure in found["figures"]] == ["wall_ns"]
    assert {table for table in diff._NAME_COLUMNS if found[table]} == {"figures", "ranges"}
    assert (found["moved"], found["outcome"]) == (None, "no change")
    assert diff.compare(program(), on_cpu).tables["kernels"].empty
    empty = Trace.from_frames({}, TraceMeta(tool="planted"))
    for before in (empty, program()):
        assert diff.compare(before, empty).summary()["headline"].startswith("Nothing to compare")


# ---------------------------------------------------------------- real pairs, read by hand


def test_resnet_with_and_without_loader_workers(shared_traces: Path):
    """PyTorch's own example: ResNet-50 on one V100, with ``num_workers`` 0 and then 4, six profiled steps each.

    By hand, from the two files:

    - The TensorBoard plug-in says that a mean step took 177.592 ms, 59.262 ms (33.4%) of them in the DataLoader, and
      then 141.068 ms with 1.186 ms (0.8%). Its means include two slow steps of the second run; the other four take
      124 to 127 ms.
    - The kernels are the same model: 98.6 ms per step, and 99.1 ms. But cuDNN chose other ones for the gradients of
      weights: ``wgrad_alg0_engine`` 156 and then 90 launches, ``stridedB_splitK_medium`` 6 and then 72.
    - Their twelve copies to the device take 11,492 and then 18,959 µs.
    """
    names = ("num_workers_0__worker0.1623143089861", "num_workers_4__worker0.1623212756351")
    traces = [nsightkit.load(shared_traces / "kineto" / f"resnet50_{name}.pt.trace.json.gz") for name in names]
    found = diff.compare(*traces)
    summary = found.summary()
    assert (summary["outcome"], summary["moved"]) == ("faster", True)
    assert -0.30 < row(found, "figures", "wall_ns")["change"] < -0.28
    assert "moved: the wait for data (33.2% of the time) before, launch overhead" in summary["bottleneck"]["text"]
    loading = row(found, "ranges", "enumerate(DataLoader).__next__", clock="CPU")
    assert (loading["significance"], loading["before_ns"] > 65e6, loading["after_ns"] < 2e6) == ("changed", True, True)
    waiting = row(found, "gaps", "input-pipeline")
    totals = ["before_total_ns", "after_total_ns", "significance"]
    assert waiting[totals].tolist() == [285_214_000, 0, "changed"]
    assert row(found, "memops", "HtoD")[totals].tolist() == [11_492_000, 18_959_000, "within noise"]
    for name, launches in (("wgrad_alg0_engine<float, 128, 6, 7", [156, 90]), ("splitK_medium", [6, 72])):
        (swapped,) = [kernel for kernel in summary["kernels"] if name in kernel["name"]]
        assert [swapped["before_count"], swapped["after_count"]] == launches
    assert [warning[:23] for warning in summary["warnings"]] == ["A library chose other c"]
