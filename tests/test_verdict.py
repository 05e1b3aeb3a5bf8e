"""The verdict: a confusion table of planted faults and decoys, exact shares, doubts one by one, and real traces."""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import make_kineto
import numpy as np
import pandas as pd
import pytest

import nsightkit
from nsightkit._show import ready
from nsightkit.analysis import gaps, intervals, overview, verdict
from nsightkit.analysis.selection import select
from nsightkit.errors import UsageError
from nsightkit.trace.model import Gpu, Trace, TraceMeta
from nsightkit.workloads.planted import BOTTLENECK_OF, Export, Fault, training

US, MS = 1_000, 1_000_000
SEEDS = range(5)
#: What Kineto has no events for cannot be found in what it wrote.
IN_KINETO = [fault for fault in BOTTLENECK_OF if fault not in ("starved-unnamed", "graphs")]


def plant(path: Path, fault: Fault | None, seed: int) -> dict[str, Any]:
    """A loop whose size, pace, length and threads vary with the seed."""
    vary = random.Random(1000 * seed + 7)
    return training(
        path,
        fault,
        steps=vary.randint(5, 9),
        layers=vary.randint(3, 7),
        seed=seed,
        scale=vary.uniform(0.6, 1.8),
        one_thread=vary.random() < 0.4,
    )


def amounts(found: dict[str, Any]) -> dict[str, int]:
    return {row["bottleneck"]: row["total_ns"] for row in found["candidates"] + found["busy"]}


# ---------------------------------------------------------------- the confusion table


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", list(BOTTLENECK_OF))
def test_every_fault_and_every_decoy(tmp_path: Path, fault: Fault | None, seed: int) -> None:
    truth = plant(tmp_path / "t.sqlite", fault, seed)
    trace = nsightkit.load(tmp_path / "t.sqlite")
    found = verdict.summary(trace)
    assert found["bottleneck"] == truth["bottleneck"] == BOTTLENECK_OF[fault]
    if fault == "untraced":
        assert found["share_of_span"] is None
        return
    lost, busy = Counter(truth["gaps"]), truth["exposed"]
    lost["memory-transfer"] += busy["memory-transfer"]
    got = amounts(found)
    for cause in gaps.CAUSES:
        # The planter knows when the device ran dry; what ended the wait may count for the next cause in line.
        assert got.get(cause, 0) == pytest.approx(lost[cause], abs=0.002 * truth["span_ns"]), cause
    assert got.get("communication", 0) == busy["communication"]
    ends = len(overview.summary(trace)["devices"]) * overview.summary(trace)["wall_ns"] - truth["span_ns"]
    assert got.get("imbalance", 0) == busy["imbalance"] + ends
    assert sum(got.values()) == pytest.approx(truth["span_ns"], abs=0.01 * truth["span_ns"])
    assert found["span_ns"] == truth["span_ns"]
    assert found["share_of_span"] == pytest.approx(found["total_ns"] / found["span_ns"])
    if fault not in (None, "graphs", "uneven"):
        assert found["confidence"] != "low", found["against"]


@pytest.mark.parametrize("fault", IN_KINETO)
def test_the_same_run_in_the_other_format(tmp_path: Path, fault: Fault | None) -> None:
    training(tmp_path / "t.sqlite", fault, steps=5, layers=4, seed=6)
    trace = nsightkit.load(tmp_path / "t.sqlite")
    again = nsightkit.load(make_kineto.from_trace(tmp_path / "t.json", trace))
    one, other = verdict.summary(trace), verdict.summary(again)
    assert one["bottleneck"] == other["bottleneck"] == BOTTLENECK_OF[fault]
    assert amounts(one) == amounts(other)
    assert one["confidence"] == other["confidence"]


def test_a_wait_that_the_source_cannot_record_is_not_passed_off_as_work(tmp_path: Path) -> None:
    training(tmp_path / "t.sqlite", "starved-unnamed")
    trace = nsightkit.load(make_kineto.from_trace(tmp_path / "t.json", nsightkit.load(tmp_path / "t.sqlite")))
    found = verdict.summary(trace)
    assert gaps.summary(trace)["cause"].iloc[0] == "cpu-work"  # of the step, says the step's range
    assert (found["bottleneck"], found["confidence"]) == ("not-enough-data", "low")
    assert found["best_case_speedup"] is None
    assert found["next_steps"][0].startswith("record OS calls (nsightkit capture nsys")
    # What has a name of its own is work all the same.
    training(tmp_path / "t.sqlite", "augment")
    trace = nsightkit.load(make_kineto.from_trace(tmp_path / "t.json", nsightkit.load(tmp_path / "t.sqlite")))
    assert verdict.summary(trace)["bottleneck"] == "cpu-work"


@pytest.mark.parametrize("fault", ["starved", "sync", "pinned", "uneven", "prefetched"])
def test_the_order_of_rows_does_not_matter(tmp_path: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    training(tmp_path / "t.sqlite", fault, steps=5, layers=5)
    plain = Export.write
    monkeypatch.setattr(Export, "write", lambda self, path: plain(self, path, shuffle=5))
    training(tmp_path / "s.sqlite", fault, steps=5, layers=5)
    one, other = (verdict.summary(nsightkit.load(tmp_path / name)) for name in ("t.sqlite", "s.sqlite"))
    assert one == other


# ---------------------------------------------------------------- the answer's parts


def test_what_an_answer_holds(tmp_path: Path) -> None:
    truth = training(tmp_path / "t.sqlite", "starved")
    trace = nsightkit.load(tmp_path / "t.sqlite")
    found = verdict.summary(trace)
    contract = ["bottleneck", "share_of_span", "confidence", "evidence", "against", "next_steps"]
    assert list(found)[: len(contract)] == contract
    assert json.loads(json.dumps(ready(found))) == ready(found)
    table = verdict.candidates(trace)
    assert list(table.columns) == ["bottleneck", "total_ns", "share_of_span"]
    assert table.to_dict("records") == found["candidates"]
    assert table["total_ns"].is_monotonic_decreasing
    total = truth["gaps"]["input-pipeline"]
    assert found["total_ns"] == total
    assert found["best_case_speedup"] == pytest.approx(truth["span_ns"] / (truth["span_ns"] - total))
    assert f"at most {found['best_case_speedup']:.2f}x" in found["next_steps"][0]
    assert found["confidence"] == "high"
    assert found["against"] == []
    assert found["t0_ns"] == trace.t0_ns
    (named,) = found["named"]
    assert (named["kind"], named["name"], named["count"], named["total_ns"]) == ("range", "dataload", 11, total)
    assert any("dataload" in text for text in found["evidence"])
    assert "11 of 12 steps say the same alone" in found["evidence"]  # the first has nothing before it to wait for
    each = gaps.find(trace).sort_values("duration_ns", ascending=False).head(3)
    assert [row["start_ns"] for row in found["longest"]] == each["start_ns"].tolist()
    assert all(row["ended_by"] == "memcpy HtoD" for row in found["longest"])
    moments = re.findall(r"at ([\d,.]+) ms", found["evidence"][2])
    assert [float(text.replace(",", "")) for text in moments] == pytest.approx(each["start_ns"] / MS, abs=0.001)


def test_a_copy_counts_once_whether_waited_for_or_run(tmp_path: Path) -> None:
    truth = training(tmp_path / "t.sqlite", "pageable")
    trace = nsightkit.load(tmp_path / "t.sqlite")
    found = verdict.summary(trace)
    idle = overview.summary(trace)["idle_ns"]
    waited = int(gaps.summary(trace).set_index("cause").loc["memory-transfer", "total_ns"])
    assert found["total_ns"] == waited + truth["exposed"]["memory-transfer"]
    assert sum(row["total_ns"] for row in found["candidates"]) == idle + truth["exposed"]["memory-transfer"]
    assert "most of it in to_device" in " ".join(found["evidence"])
    assert "pinned memory" in found["next_steps"][0]


def test_the_launching_operator_or_range_is_named(tmp_path: Path) -> None:
    training(tmp_path / "t.sqlite", "sync")
    found = verdict.summary(nsightkit.load(tmp_path / "t.sqlite"))
    assert found["named"][0]["name"] == "cudaStreamSynchronize"
    assert found["named"][0]["inside"] == "forward"


def test_the_rule_is_the_contract(tmp_path: Path) -> None:
    """By hand, over random amounts: what is lost from 5 % on, then what fills the rest."""
    rng = np.random.default_rng(3)
    for _ in range(300):
        row = (rng.integers(0, 100, 13) * rng.choice([0, 1, 5], 13)).astype(np.int64)
        idle, busy = row[:7], row[7:12].copy()
        span = int(row[:12].sum())
        busy[4] += row[12]  # idle at the ends is imbalance
        if idle.sum() >= 0.05 * span and idle.sum() > 0:
            want = int(idle.argmax())
        elif busy[3:].sum() >= 0.25 * busy.sum() and busy[3:].sum() > 0:
            want = 7 + 3 + int(busy[3:].argmax())
        else:
            want = 7 + int(busy.argmax())
        assert int(verdict._decided(row)[0]) == want


# ---------------------------------------------------------------- doubts, laid out by hand

PID = 31
PROCESS, MAIN = Export.process(PID), Export.thread(PID, PID)
GEMM, POINT = "void cutlass::Kernel2<x>(P)", "void at::native::vectorized_elementwise_kernel<4, F>(int)"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(A)"


class Laid:
    """One stream and one thread, event after event."""

    def __init__(self, gpus: int = 1) -> None:
        self.out, self.now = Export(gpus), 5 * MS

    def kernel(self, us: float, name: str = GEMM, **where: Any) -> None:
        start, self.now = self.now, self.now + int(us * US)
        correlation = self.out.call("cudaLaunchKernel_v7000", MAIN, start - 2 * US, start - 1 * US)
        self.out.kernel(name, start, self.now, correlation, PROCESS, **where)

    def copy(self, us: float, kind: str = "HtoD", host: str = "pinned") -> None:
        start, self.now = self.now, self.now + int(us * US)
        correlation = self.out.call("cudaMemcpyAsync_v3020", MAIN, start - 2 * US, start - 1 * US)
        self.out.copy(kind, start, self.now, correlation, PROCESS, 1 << 20, host=host)

    def gap(self, cause: str, us: float) -> None:
        start, self.now = self.now, self.now + int(us * US)
        if cause in ("input-pipeline", "cpu-work"):
            self.out.range({"cpu-work": "augment"}.get(cause, "dataload"), MAIN, start, self.now - 3 * US)
        elif cause == "synchronization":
            self.out.synchronize("cudaStreamSynchronize", MAIN, start - 9 * US, start + 1 * US)
        elif cause == "profiler":
            self.out.overhead("flush", MAIN, start, self.now)
        else:
            assert (cause, us > 500) in (("unknown", True), ("launch-overhead", False))

    @contextlib.contextmanager
    def step(self, name: str = "step") -> Iterator[None]:
        start = self.now - 3 * US
        yield
        self.out.range(name, MAIN, start, self.now - 3 * US)

    def answer(self, tmp_path: Path, **selection: Any) -> dict[str, Any]:
        return verdict.summary(select(self.trace(tmp_path), **selection))

    def trace(self, tmp_path: Path) -> Trace:
        return nsightkit.load(self.out.write(tmp_path / "laid.sqlite", shuffle=1))


def steady(*lost: tuple[str, float], steps: bool = True, name: str = GEMM) -> Laid:
    """Ten rounds of equal kernels, and in each of them the same gaps."""
    laid = Laid()
    for _ in range(10):
        with laid.step() if steps else contextlib.nullcontext():
            for _ in range(5):
                laid.kernel(200, name)
            for cause, us in lost:
                laid.gap(cause, us)
                laid.kernel(10, name)
    laid.kernel(10, name)
    return laid


def one_doubt(found: dict[str, Any], bottleneck: str, words: str) -> None:
    assert (found["bottleneck"], found["confidence"]) == (bottleneck, "medium"), found
    assert words in found["against"][0]


def test_nothing_to_doubt(tmp_path: Path) -> None:
    found = steady(("cpu-work", 200)).answer(tmp_path)
    assert (found["bottleneck"], found["confidence"], found["against"]) == ("cpu-work", "high", [])


def test_a_close_second(tmp_path: Path) -> None:
    found = steady(("cpu-work", 200), ("input-pipeline", 180)).answer(tmp_path)
    one_doubt(found, "cpu-work", "input-pipeline is close: 1.800 ms")
    assert found["next_steps"][1].startswith("then input-pipeline: ")


def test_a_distant_second_is_said_all_the_same(tmp_path: Path) -> None:
    found = steady(("cpu-work", 300), ("input-pipeline", 120)).answer(tmp_path)
    assert (found["bottleneck"], found["confidence"]) == ("cpu-work", "high")
    assert "input-pipeline takes" in found["against"][0]


def test_time_without_explanation_that_could_be_a_rivals(tmp_path: Path) -> None:
    found = steady(("cpu-work", 1000), ("unknown", 600), ("synchronization", 500), steps=False).answer(tmp_path)
    one_doubt(found, "cpu-work", "6.000 ms more have no explanation")


def test_close_to_the_five_percent(tmp_path: Path) -> None:
    one_doubt(steady(("cpu-work", 60)).answer(tmp_path), "cpu-work", "close to the 5 % of the rule: else compute-bound")
    found = steady(("cpu-work", 47)).answer(tmp_path)
    assert found["bottleneck"] == "compute-bound"
    assert "close to the 5 % of the rule: else cpu-work" in found["against"][0]
    assert any(text.startswith("cpu-work takes 4.") for text in found["against"])
    assert not any("rule" in text for text in steady(("cpu-work", 20)).answer(tmp_path)["against"])


def test_what_is_lost_is_ranked_whatever_fills_the_rest(tmp_path: Path) -> None:
    found = steady(("synchronization", 30), ("cpu-work", 40)).answer(tmp_path)
    assert found["bottleneck"] == "cpu-work"
    assert [row["bottleneck"] for row in found["candidates"]] == ["cpu-work", "synchronization"]


def test_the_profiler_in_the_way(tmp_path: Path) -> None:
    found = steady(("cpu-work", 300), ("profiler", 150)).answer(tmp_path)
    one_doubt(found, "cpu-work", "the profiler itself took")


def test_set_up_before_the_steps(tmp_path: Path) -> None:
    laid = Laid()
    for _ in range(20):
        laid.copy(500, host="pageable")
    for _ in range(10):
        with laid.step():
            for _ in range(5):
                laid.kernel(200)
    found = laid.answer(tmp_path)
    one_doubt(found, "memory-transfer", "without what ran outside the steps it would be compute-bound")
    assert "(--last-steps 5)" in found["against"][0]
    assert laid.answer(tmp_path, last_steps=5)["bottleneck"] == "compute-bound"


def test_set_up_without_steps(tmp_path: Path) -> None:
    laid = Laid()
    for _ in range(20):
        laid.copy(100)
    for _ in range(60):
        laid.kernel(200)
    found = laid.answer(tmp_path)
    one_doubt(found, "memory-transfer", "it would be compute-bound")
    (cut,) = re.findall(r"--time (\d+):", found["against"][0])
    assert laid.answer(tmp_path, time_ns=(int(cut), None))["bottleneck"] == "compute-bound"
    assert "names no steps" in " ".join(found["against"])


def test_outlier_steps(tmp_path: Path) -> None:
    laid = Laid()
    for number in range(12):
        with laid.step():
            for _ in range(5):
                laid.kernel(200)
            if number in (4, 9):
                laid.gap("cpu-work", 500)
    laid.kernel(200)
    one_doubt(laid.answer(tmp_path), "cpu-work", "without 2 outliers of 12 steps it would be compute-bound")


def test_one_moment_alone(tmp_path: Path) -> None:
    laid = Laid()
    for number in range(60):
        laid.kernel(200)
        if number == 30:
            laid.gap("cpu-work", 9000)  # several tenths of the time: none of them alone turns the answer
    found = laid.answer(tmp_path)
    one_doubt(found, "cpu-work", "without its longest moment, of 9.000 ms, it would be compute-bound")


def test_one_step_alone(tmp_path: Path) -> None:
    laid = Laid()
    for number in range(12):
        with laid.step(f"step {number}"):
            for _ in range(5):
                laid.kernel(200)
                if number == 7:
                    laid.gap("launch-overhead", 200)
    laid.kernel(200)
    found = laid.answer(tmp_path)
    assert found["bottleneck"] == "launch-overhead"
    assert re.search(r"without (\d outliers? of 12 steps|step 7 at) .*compute-bound", found["against"][0])


def test_now_and_then(tmp_path: Path) -> None:
    laid = Laid()
    for number in range(12):
        with laid.step():
            for _ in range(5):
                laid.kernel(200 + 40 * (number % 4))
            if number % 3 == 0:
                laid.gap("synchronization", 300)
                laid.kernel(5)
    laid.kernel(5)
    found = laid.answer(tmp_path)
    one_doubt(found, "synchronization", "only 4 of 12 steps say so; most others: compute-bound")


@pytest.mark.parametrize("steps", [1, 2])
def test_few_steps(tmp_path: Path, steps: int) -> None:
    laid = Laid()
    for _ in range(steps):
        with laid.step():
            for _ in range(60):
                laid.kernel(50)
                laid.gap("cpu-work", 20)
    laid.kernel(50)
    one_doubt(laid.answer(tmp_path), "cpu-work", f"only {steps} step")


def test_few_operations(tmp_path: Path) -> None:
    laid = Laid()
    for _ in range(9):
        laid.kernel(50)
        laid.gap("cpu-work", 20)
    laid.kernel(50)
    one_doubt(laid.answer(tmp_path), "cpu-work", "only 10 GPU operations")


def test_two_doubts_are_low_confidence(tmp_path: Path) -> None:
    found = steady(("cpu-work", 200), ("input-pipeline", 180), ("profiler", 150)).answer(tmp_path)
    assert (found["bottleneck"], found["confidence"]) == ("cpu-work", "low")
    assert "is close" in found["against"][0]
    assert "profiler" in found["against"][1]


# ---------------------------------------------------------------- busy time


def test_many_streams_count_each_moment_once(tmp_path: Path) -> None:
    """Random intervals of every kind, against a brute-force count of microseconds."""
    rng = random.Random(11)
    out, painted = Export(), {}
    ranks = {GEMM: 0, POINT: 1, "mystery": 2, NCCL: 3, "copy": 4, "memset": 5}
    for i in range(400):
        kind = rng.choice(list(ranks))
        start = rng.randrange(0, 3000)
        end = start + rng.randrange(1, 30)
        call = out.call("cudaLaunchKernel_v7000", MAIN, 1, 2)
        if kind == "copy":
            out.copy("HtoD", start * US, end * US, call, PROCESS, 9, stream=i % 5)
        elif kind == "memset":
            out.memset(start * US, end * US, call, PROCESS, 9, stream=i % 5)
        else:
            out.kernel(kind, start * US, end * US, call, PROCESS, stream=i % 5)
        for at in range(start, end):
            painted[at] = min(painted.get(at, 9), ranks[kind])
    found = verdict.summary(nsightkit.load(out.write(tmp_path / "t.sqlite")))
    counts, got = Counter(painted.values()), amounts(found)
    assert got["compute-bound"] == counts[0] * US
    assert got["memory-bound"] == (counts[1] + counts[5]) * US
    assert got["not-enough-data"] == counts[2] * US
    assert got["communication"] == counts[3] * US
    idle = overview.summary(nsightkit.load(tmp_path / "t.sqlite"))["idle_ns"]
    assert sum(row["total_ns"] for row in found["candidates"]) == counts[4] * US + idle


@pytest.mark.parametrize(
    ("name", "bottleneck"),
    [
        ("ampere_sgemm_128x64_tn", "compute-bound"),
        ("void gemv2T_kernel_val<int, float>(P)", "memory-bound"),
        ("flash_fwd_kernel<128>", "compute-bound"),
        ("flash_fwd_splitkv_kernel<128>", "memory-bound"),
        ("triton_poi_fused_add_0", "memory-bound"),
        (NCCL, "communication"),
        ("mystery", "not-enough-data"),
    ],
)
def test_bound_by_name(tmp_path: Path, name: str, bottleneck: str) -> None:
    found = steady(name=name).answer(tmp_path)
    assert found["bottleneck"] == bottleneck
    by_name = [text for text in found["against"] if "by names of kernels" in text]
    assert len(by_name) == (bottleneck in ("compute-bound", "memory-bound"))
    assert found["best_case_speedup"] is None or bottleneck == "communication"
    if bottleneck == "not-enough-data":
        assert "capture ncu" in found["next_steps"][0]
        assert found["confidence"] == "low"
    if "sgemm" in name:
        assert "TF32" in found["next_steps"][0]


def test_a_quarter_of_the_busy_time_in_collectives(tmp_path: Path) -> None:
    def laid(us: float) -> dict[str, Any]:
        made = Laid()
        for _ in range(10):
            with made.step():
                for _ in range(4):
                    made.kernel(200)
                made.kernel(us, NCCL, stream=20)
        return made.answer(tmp_path)

    found = laid(400)
    assert (found["bottleneck"], found["confidence"]) == ("communication", "high")
    assert found["best_case_speedup"] == pytest.approx(1.5)
    assert "other kernels run for 66.7 % of the span" in found["against"]
    one_doubt(laid(280), "communication", "close to the 25 % of the rule: else compute-bound")
    found = laid(120)
    assert found["bottleneck"] == "compute-bound"
    assert "communication takes 13.0 %, too" in found["against"]
    assert found["next_steps"][-1].startswith("then communication: ")


def shaped(kind: str, us: float, gpu: str | None = "NVIDIA H200") -> Trace:
    """Sixty operators of one kind with their shapes, each a kernel of `us`, back to back."""
    n, thread = 60, 1 << 24 | 1
    element = "c10::BFloat16"
    dims = {"mm": [[4096, 4096], [4096, 4096]], "add": [[8192, 8192], [8192, 8192], []]}[kind]
    types = [element, element, "Scalar"][: len(dims)]
    at = np.arange(n) * 10 * US
    ops = pd.DataFrame({"start_ns": at, "end_ns": at + 9 * US, "name": f"aten::{kind}"})
    ops = ops.assign(inputs=json.dumps([dims, types, []]))
    calls = pd.DataFrame({"start_ns": at + US, "end_ns": at + 2 * US, "name": "cudaLaunchKernel"})
    start = MS + (np.arange(n) * us * US).astype(np.int64)
    kernels = pd.DataFrame({"start_ns": start, "end_ns": start + int(us * US), "name": "thing", "stream": 7})
    frames = {"ops": ops.assign(thread=thread), "calls": calls.assign(thread=thread), "kernels": kernels}
    for name in ("calls", "kernels"):
        frames[name] = frames[name].assign(correlation=range(1, n + 1))
    frames = {name: frame.assign(process=1) for name, frame in frames.items()}
    return Trace.from_frames(frames, TraceMeta(tool="planted", gpus=[Gpu(0, gpu)], missing=["os_calls"]))


def test_shapes_decide_before_names() -> None:
    # 137 GFLOP in 200 µs on a card that does 989 TFLOP/s: 69 % of the datasheet.
    found = verdict.summary(shaped("mm", 200))
    assert (found["bottleneck"], found["confidence"]) == ("compute-bound", "high")
    reached = 2 * 4096**3 / 989.4e12 / 200e-6
    assert found["best_case_speedup"] == pytest.approx(1 / reached, rel=1e-3)
    assert f"at {100 * reached:.1f} % of the datasheet's rate" in " ".join(found["evidence"])
    assert found["named"][0]["inside"] == "aten::mm"
    # 64 Mi elements, three times two bytes, at 4.8 TB/s: 84 µs of 100.
    found = verdict.summary(shaped("add", 100))
    assert (found["bottleneck"], found["confidence"]) == ("memory-bound", "high")
    assert found["best_case_speedup"] == pytest.approx(100 / (6 * 8192**2 / 4.8e12 * 1e6), rel=1e-3)


def test_operators_far_from_their_bound_are_doubted() -> None:
    one_doubt(verdict.summary(shaped("mm", 2000)), "compute-bound", "something else holds these operators")


def test_operators_beyond_physics_do_not_count() -> None:
    found = verdict.summary(shaped("mm", 20))
    assert found["bottleneck"] == "compute-bound"
    assert found["best_case_speedup"] is None
    assert any("quicker than physics allows" in text for text in found["against"])


@pytest.mark.parametrize("gpu", [None, "Voodoo 2"])
def test_an_unknown_card_is_no_obstacle(gpu: str | None) -> None:
    """A large product is bound by arithmetic, and a sum by the memory, on every card there is."""
    for kind, bottleneck in (("mm", "compute-bound"), ("add", "memory-bound")):
        trace = shaped(kind, 200, gpu)
        found = verdict.summary(trace)
        assert (found["bottleneck"], found["best_case_speedup"]) == (bottleneck, None)
        assert not any("by names" in text for text in found["against"])
        assert verdict.summary(trace, gpu="H200")["best_case_speedup"] is not None


def test_a_card_that_is_not_listed_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Voodoo"):
        verdict.summary(shaped("mm", 200), gpu="Voodoo 2")
    with pytest.raises(UsageError, match="Voodoo"):
        verdict.summary(steady().trace(tmp_path), gpu="Voodoo 2")


# ---------------------------------------------------------------- several devices


def pair(
    uneven: float, pids: tuple[int, int] = (PID, PID), reduce: float = 100, lacks: int = 0, rounds: Any = (1000,) * 10
) -> Export:
    """Two devices with ten rounds of work, the second with a share of it, that meet in a reduction."""
    out, at = Export(2), 10 * US
    for number, us in enumerate(rounds):
        arrived = at + us * US
        for device, pid in enumerate(pids):
            process, thread = Export.process(pid), Export.thread(pid, pid + device)
            ends = at + int(us * US * (uneven if device else 1))
            for i in range(5):
                begin, end = (at + (ends - at) * k // 5 for k in (i, i + 1))
                call = out.call("cudaLaunchKernel_v7000", thread, begin - 2 * US, begin - US)
                out.kernel(GEMM, begin, end, call, process, device=device)
            if reduce:
                name = "mystery" if device and number < lacks else NCCL
                call = out.call("cudaLaunchKernel_v7000", thread, ends - 2 * US, ends - US)
                end = arrived + int(reduce * US)
                out.kernel(name, ends, end, call, process, device=device, stream=20)
        at = arrived + int(reduce * US)
    return out


@pytest.mark.parametrize("pids", [(PID, PID), (PID, PID + 1)])
def test_waiting_in_collectives_is_imbalance(tmp_path: Path, pids: tuple[int, int]) -> None:
    found = verdict.summary(nsightkit.load(pair(0.4, pids).write(tmp_path / "t.sqlite")))
    assert found["bottleneck"] == "imbalance"
    assert amounts(found)["imbalance"] == 10 * 600 * US
    assert amounts(found)["communication"] == 2 * 10 * 100 * US
    assert found["best_case_speedup"] == pytest.approx(2200 / 1600)
    told = " ".join(found["evidence"])
    assert "device 0 waited for 0 ns in collectives, was the last to arrive in 10 of 10" in told
    assert "device 1 waited for 6.000 ms in collectives, was the last to arrive in 0 of 10" in told


def test_collectives_of_equal_devices_are_communication(tmp_path: Path) -> None:
    found = verdict.summary(nsightkit.load(pair(1.0, reduce=600).write(tmp_path / "t.sqlite")))
    assert found["bottleneck"] == "communication"
    assert "imbalance" not in amounts(found)


def test_collectives_that_one_capture_lacks(tmp_path: Path) -> None:
    rounds = [1000 + 40 * (7 * number % 10) for number in range(10)]
    found = verdict.summary(nsightkit.load(pair(0.4, lacks=2, rounds=rounds).write(tmp_path / "t.sqlite")))
    assert found["bottleneck"] == "imbalance"
    assert amounts(found)["imbalance"] == sum(rounds[2:]) * 600
    assert "in 8 of 8" in " ".join(found["evidence"])


def test_a_device_that_is_done_early(tmp_path: Path) -> None:
    """Without collectives, in one process: no gap of the idle device is within its span."""
    out = Export(2)
    for device, count in ((0, 60), (1, 15)):
        for i in range(count):
            call = out.call("cudaLaunchKernel_v7000", MAIN, i * 100 * US + 1, i * 100 * US + 500)
            out.kernel(GEMM, i * 100 * US + US, (i + 1) * 100 * US + US, call, PROCESS, device=device)
    found = verdict.summary(nsightkit.load(out.write(tmp_path / "t.sqlite")))
    assert found["bottleneck"] == "imbalance"
    assert found["total_ns"] == 45 * 100 * US
    assert found["best_case_speedup"] == pytest.approx(12000 / 7500)
    assert "device 1 25.0 % of the wall time" in " ".join(found["against"])
    assert found["named"][0]["name"] == "no more work"


def test_strangers_on_one_machine_are_not_uneven(tmp_path: Path) -> None:
    out = Export(2)
    for device, count in ((0, 60), (1, 15)):
        process, thread = Export.process(50 + device), Export.thread(50 + device, 50 + device)
        for i in range(count):
            call = out.call("cudaLaunchKernel_v7000", thread, i * 100 * US + 1, i * 100 * US + 500)
            out.kernel(GEMM, i * 100 * US + US, (i + 1) * 100 * US + US, call, process, device=device)
    found = verdict.summary(nsightkit.load(out.write(tmp_path / "t.sqlite")))
    assert found["bottleneck"] == "compute-bound"
    assert found["share_of_span"] == 1.0


def test_the_bound_is_that_of_the_device_that_gains_most(tmp_path: Path) -> None:
    """One of two devices idles for half of its time: it can be twice as quick, though the sum only a third."""
    out = Export(2)
    for device in (0, 1):
        thread = Export.thread(PID, PID + device)
        for i in range(30):
            start = i * 1000 * US + 10 * US
            end = start + (500 if device else 1000) * US
            call = out.call("cudaLaunchKernel_v7000", thread, start - 2 * US, start - US)
            out.kernel(GEMM, start, end, call, PROCESS, device=device)
            if device:
                out.range("augment", thread, end, end + 490 * US)
    found = verdict.summary(nsightkit.load(out.write(tmp_path / "t.sqlite")))
    assert found["bottleneck"] == "cpu-work"
    assert found["share_of_span"] == pytest.approx(0.25, abs=0.01)
    assert found["best_case_speedup"] == pytest.approx(2.0, abs=0.05)


# ---------------------------------------------------------------- not enough data, and filters


@pytest.mark.parametrize("missing", [True, False])
def test_no_gpu_work(missing: bool) -> None:
    absent = ["kernels", "memops", "graphs", "calls"] if missing else []
    ranges = pd.DataFrame({"start_ns": [0], "end_ns": [9], "name": ["step"]})
    for tool, command in (("Nsight Systems", "capture nsys"), ("pytorch-profiler", "capture torch")):
        found = verdict.summary(Trace.from_frames({"ranges": ranges}, TraceMeta(tool=tool, missing=absent)))
        assert (found["bottleneck"], found["share_of_span"], found["confidence"]) == ("not-enough-data", None, "low")
        assert command in found["next_steps"][0]
        assert (found["evidence"] == ["no GPU work was traced"]) == missing
    full = verdict.summary(shaped("mm", 200))
    assert list(found) == list(full)
    assert verdict.candidates(Trace.from_frames({}, TraceMeta())).empty


def test_work_without_duration() -> None:
    kernels = pd.DataFrame({"start_ns": [5], "end_ns": [5], "name": ["k"]})
    found = verdict.summary(Trace.from_frames({"kernels": kernels}, TraceMeta()))
    assert (found["bottleneck"], found["share_of_span"]) == ("not-enough-data", None)
    assert found["evidence"] == ["no GPU work lasts any time"]


def test_without_launches_idle_time_has_no_cause() -> None:
    start = np.arange(60) * 2 * MS
    kernels = pd.DataFrame({"start_ns": start, "end_ns": start + MS, "name": GEMM})
    blind = verdict.summary(Trace.from_frames({"kernels": kernels}, TraceMeta(missing=["calls", "os_calls"])))
    assert (blind["bottleneck"], blind["confidence"]) == ("not-enough-data", "low")
    assert blind["share_of_span"] == pytest.approx(59 / 119)
    assert blind["next_steps"][0].startswith("record the calls that launch and OS calls (nsightkit capture nsys")
    assert "at most 1.98x" in blind["next_steps"][0]
    assert "not recorded: calls, os_calls" in blind["against"]


def test_the_unknown_is_called_so(tmp_path: Path) -> None:
    found = steady(("unknown", 800), steps=False).answer(tmp_path)
    assert (found["bottleneck"], found["confidence"]) == ("unknown", "low")
    assert "NVTX" in found["next_steps"][0]
    assert "(before cutlass::Kernel2<x>)" in found["evidence"][1]


def test_graphs_of_which_the_kernels_are_wanted(tmp_path: Path) -> None:
    training(tmp_path / "t.sqlite", "graphs")
    found = verdict.summary(nsightkit.load(tmp_path / "t.sqlite"))
    assert "--graph-nodes" in found["next_steps"][0]
    assert found["share_of_span"] > 0.99


def test_a_filter_does_not_uncover_a_copy(tmp_path: Path) -> None:
    """The kernel over the copy is not in the range that is asked for, and hides it all the same."""
    laid = Laid()
    for _ in range(30):
        start = laid.now
        laid.kernel(100)
        with_copy = laid.out.call("cudaMemcpyAsync_v3020", MAIN, start + US, start + 2 * US)
        laid.out.range("load", MAIN, start, start + 3 * US)
        laid.out.copy("HtoD", start + 10 * US, start + 90 * US, with_copy, PROCESS, 99, host="pinned", stream=13)
    found = laid.answer(tmp_path, within="^load$")
    assert all(row["bottleneck"] != "memory-transfer" for row in found["candidates"])


def test_collectives_that_could_be_any_are_not_guessed_at(tmp_path: Path) -> None:
    """Of rounds that are all alike two lack a collective, so the n-th of one device is not the n-th of the other."""
    found = verdict.summary(nsightkit.load(pair(0.4, lacks=2).write(tmp_path / "t.sqlite")))
    assert found["bottleneck"] == "communication"
    assert "imbalance" not in amounts(found)


def test_devices_one_by_one(tmp_path: Path) -> None:
    trace = nsightkit.load(pair(0.4).write(tmp_path / "t.sqlite"))
    assert verdict.summary(select(trace, device=0))["bottleneck"] == "compute-bound"
    assert verdict.summary(select(trace, device=1))["bottleneck"] == "communication"


def test_steps_are_taken_where_the_gpu_worked_on_them(tmp_path: Path) -> None:
    """The CPU launches everything in a millisecond; the GPU needs a hundred. Each step has its own copy in it."""
    out, cpu, gpu = Export(), 10 * US, 20 * US
    for _ in range(10):
        start = cpu
        for kind in ("copy", *["kernel"] * 9):
            call = out.call("cudaLaunchKernel_v7000", MAIN, cpu, cpu + US)
            if kind == "copy":
                out.copy("HtoD", gpu, gpu + MS, call, PROCESS, 99, host="pinned")
            else:
                out.kernel(GEMM, gpu, gpu + MS, call, PROCESS)
            cpu, gpu = cpu + 2 * US, gpu + MS
        out.range("train_step", MAIN, start, cpu - US)
    found = verdict.summary(nsightkit.load(out.write(tmp_path / "t.sqlite")))
    assert (found["bottleneck"], found["confidence"]) == ("memory-transfer", "high")
    assert "10 of 10 steps say the same alone" in found["evidence"]


def scattered(rng: np.random.Generator) -> Trace:
    """Events of every table at random, with tables left out at random."""
    horizon, processes = int(rng.choice([50, 5_000, 10**7])), int(rng.choice([1, 2]))

    def events(names: list[str], column: str = "name", **more: Any) -> pd.DataFrame:
        n = int(rng.choice([0, 1, 2, 10, 60]))
        start = rng.integers(0, horizon, n)
        lasting = rng.integers(0, max(horizon // 20, 1), n) * rng.integers(0, 2, n)
        owner = rng.integers(1, processes + 1, n)
        drawn = {key: rng.integers(0, most, n) for key, most in more.items()}
        frame = pd.DataFrame({"start_ns": start, "end_ns": start + lasting, "process": owner, **drawn})
        return frame.assign(thread=owner << 24 | 1, **{column: pd.Categorical(rng.choice(names, n))})

    gpu = {"device": int(rng.choice([1, 1, 3])), "stream": 3, "correlation": 80}
    copies = events(["HtoD", "DtoH", "DtoD", "memset", "PtoP"], "kind", **gpu, bytes=99)
    frames = {
        "kernels": events([GEMM, POINT, NCCL, "mystery", ""], **gpu).drop(columns="thread"),
        "memops": copies.drop(columns="thread").assign(src_kind="pageable", dst_kind="device"),
        "graphs": events(["g"], **gpu).drop(columns=["thread", "name"]),
        "calls": events(["cudaLaunchKernel", "cudaMemcpyAsync", "cudaStreamSynchronize"], correlation=80),
        "ranges": events(["step", "dataload", "x"]),
        "ops": events(["aten::mm", "aten::add"]),
        "os_calls": events(["poll"]),
        "overhead": events(["flush"]),
    }
    frames = {name: frame for name, frame in frames.items() if len(frame) and rng.random() < 0.8}
    missing = [name for name in ("kernels", "calls", "ranges", "ops", "os_calls") if name not in frames]
    return Trace.from_frames(frames, TraceMeta(missing=missing if rng.random() < 0.5 else []))


@pytest.mark.parametrize("seed", range(3))
def test_whatever_a_trace_holds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(10):
        trace = scattered(rng)
        with contextlib.suppress(UsageError):  # no such range or step
            trace = select(trace, **[{}, {"within": "step"}, {"last_steps": 1}][int(rng.integers(3))])
        found = verdict.summary(trace)
        assert found["bottleneck"] in verdict.BOTTLENECKS
        assert found["evidence"]
        assert found["next_steps"]
        assert found["candidates"] == verdict.candidates(trace).to_dict("records")
        if found["share_of_span"] is not None:
            assert 0 <= found["share_of_span"] <= 1
        if trace is trace.whole and found["span_ns"]:
            inside = sum(ns for name, ns in amounts(found).items() if name != "imbalance")
            assert inside <= found["span_ns"]


# ---------------------------------------------------------------- real traces


def real(shared_traces: Path, name: str) -> dict[str, Any]:
    (path,) = shared_traces.glob(name)
    return verdict.summary(nsightkit.load(path, cache=False))


def test_resnet_without_loader_workers(shared_traces: Path) -> None:
    """torch-tb-profiler finds a third of each step in the DataLoader; here it is what of it left the GPU idle."""
    found = real(shared_traces, "kineto/resnet50_num_workers_0__*.gz")
    assert (found["bottleneck"], found["confidence"]) == ("input-pipeline", "high")
    assert 0.25 < found["share_of_span"] < 0.334
    assert "DataLoader" in found["named"][0]["name"]
    after = real(shared_traces, "kineto/resnet50_num_workers_4__*.gz")
    assert after["bottleneck"] != "input-pipeline"
    assert "input-pipeline" not in amounts(after)


def test_graphs_that_keep_a_gpu_busy(shared_traces: Path) -> None:
    found = real(shared_traces, "cs336-zx3xyy/result_2_7B_compile_ro.sqlite")
    assert found["bottleneck"] == "not-enough-data"
    assert found["total_ns"] == pytest.approx(7_811.2 * MS, rel=1e-4)
    assert sum(row["share_of_span"] for row in found["candidates"]) < 0.001
    assert "--graph-nodes" in found["next_steps"][0]


def test_a_model_that_is_being_loaded_is_not_every_steps_trouble(shared_traces: Path) -> None:
    """Its weights take 3.2 s of copies before the first kernel; its loop is products in FP32."""
    found = real(shared_traces, "cs336-zx3xyy/result_2_7B_nvtx.sqlite")
    assert found["bottleneck"] == "memory-transfer"
    assert found["named"][0]["inside"] == "init_model"
    assert "set-up, warm-up" in found["against"][0]
    assert found["confidence"] != "high"
    (path,) = shared_traces.glob("cs336-zx3xyy/result_2_7B_nvtx.sqlite")
    loop = verdict.summary(select(nsightkit.load(path, cache=False), within="^benchmark_loop$"))
    assert loop["bottleneck"] == "compute-bound"
    assert "TF32" in loop["next_steps"][0]


def test_attention_that_writes_its_scores(shared_traces: Path) -> None:
    """TimeSformer on an H100: softmax over written scores, and products that only read and write them."""
    found = real(shared_traces, "tracelens/h100__facebook_timesformer*.gz")
    assert found["bottleneck"] == "memory-bound"
    assert found["named"][0]["inside"] == "aten::_softmax"
    assert found["best_case_speedup"] > 2


def test_two_gpus_with_hardly_a_wait(shared_traces: Path) -> None:
    found = real(shared_traces, "nsys-ai/mfu_2gpu_before.sqlite")
    (path,) = shared_traces.glob("nsys-ai/mfu_2gpu_before.sqlite")
    idle = overview.summary(nsightkit.load(path, cache=False))
    assert found["bottleneck"] == "launch-overhead"  # 52.8 of 57.4 ms idle, 9.6 % of both spans
    assert idle["idle_ns"] / idle["span_ns"] == pytest.approx(0.096, abs=0.001)
    assert sum(row["total_ns"] for row in found["candidates"]) >= idle["idle_ns"]


def test_the_cpu_alone(shared_traces: Path) -> None:
    found = real(shared_traces, "hta/cpu_only__*.gz")
    assert found["bottleneck"] == "not-enough-data"
    assert "capture torch" in found["next_steps"][0]


def test_all_of_them_hold_together(shared_traces: Path) -> None:
    """Whatever the answer, every nanosecond of every trace counts once."""
    for path in [*shared_traces.glob("*/*.sqlite"), *shared_traces.glob("hta/[cn]*.gz")]:
        trace = nsightkit.load(path, cache=False)
        found = verdict.summary(trace)
        assert found["bottleneck"] in verdict.BOTTLENECKS
        assert found["confidence"] in ("high", "medium", "low")
        assert found["next_steps"], path
        spans = intervals.busy(trace)
        if found["span_ns"]:
            inside = sum(ns for name, ns in amounts(found).items() if name != "imbalance")
            assert inside <= found["span_ns"] == int(spans["span_ns"].sum())
            if len(spans) == 1:
                assert inside == found["span_ns"]
