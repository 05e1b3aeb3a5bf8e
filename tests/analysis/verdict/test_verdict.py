"""The verdict: planted faults and decoys, the rule by hand, doubts and advice laid out by hand, and real traces."""

from __future__ import annotations

import contextlib
import json
import random
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import make_kineto
import numpy as np
import pandas as pd
import pytest
from synthetic.planted import BOTTLENECK_OF, Export, Fault, training

import nsightkit
from nsightkit import cli
from nsightkit.analysis import verdict
from nsightkit.analysis.roofline import sol
from nsightkit.analysis.timeline import gaps, overview
from nsightkit.analysis.timeline.selection import select
from nsightkit.analysis.verdict import finding
from nsightkit.errors import UsageError
from nsightkit.trace.model import Gpu, Trace, TraceMeta

US, MS = 1_000, 1_000_000
#: What Kineto has no events for cannot be found in what it wrote.
IN_KINETO = [fault for fault in BOTTLENECK_OF if fault not in ("starved-unnamed", "graphs")]


def amounts(found: dict[str, Any]) -> dict[str, int]:
    return {row["bottleneck"]: row["total_ns"] for row in found["candidates"] + found["busy"]}


# ---------------------------------------------------------------- the confusion table


@pytest.mark.parametrize("fault", list(BOTTLENECK_OF))
def test_every_fault_and_every_decoy(tmp_path: Path, fault: Fault | None):
    """The amounts are those that were planted, and the same run in the other format has the same."""
    truth = training(tmp_path / "t.sqlite", fault, steps=6, layers=4, seed=2, scale=0.8, one_thread=fault == "sync")
    trace = nsightkit.load(tmp_path / "t.sqlite")
    found = verdict.summary(trace)
    assert found["bottleneck"] == truth["bottleneck"] == BOTTLENECK_OF[fault]
    got = amounts(found)
    if fault in IN_KINETO:
        again = verdict.summary(nsightkit.load(make_kineto.from_trace(tmp_path / "t.json", trace)))
        assert again["bottleneck"] == found["bottleneck"]
        assert amounts(again) == got
    if fault == "untraced":
        assert found["share_of_span"] is None
        return
    lost, busy = Counter(truth["gaps"]), truth["exposed"]
    lost["memory-transfer"] += busy["memory-transfer"]
    # Shares are of the window: the steps whole, with what the devices lay idle at its ends.
    ends = found["span_ns"] - truth["span_ns"]
    little = 0.002 * truth["span_ns"]
    for cause in set(gaps.CAUSES) - {"communication"}:
        # The planter knows when the device ran dry; what ended the wait may count for the next cause in line.
        assert -little <= got.get(cause, 0) - lost[cause] <= max(ends, 0) + little, cause
    for cause in ("communication", "imbalance"):
        assert got.get(cause, 0) == busy[cause]
    assert sum(got.values()) == pytest.approx(found["span_ns"], abs=0.01 * truth["span_ns"])
    assert found["share_of_span"] == pytest.approx(found["total_ns"] / found["span_ns"])
    assert found["replay_error"] < 0.01
    if fault != "graphs":
        assert found["confidence"] != "low", found["against"]


def test_what_an_answer_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    training(tmp_path / "t.sqlite", "starved")
    found = verdict.summary(nsightkit.load(tmp_path / "t.sqlite"))
    assert cli.run(["verdict", str(tmp_path / "t.sqlite"), "--format", "json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == list(found)
    first = found["changes"][0]
    assert first["change"] == "no-input-wait"
    assert first["speedup"] == pytest.approx(found["span_ns"] / (found["span_ns"] - found["total_ns"]), rel=0.03)
    assert found["next_steps"][0].endswith(f"(no-input-wait, predicted {first['speedup']:.2f}x faster)")
    assert found["headline"] == f"The GPU waits for data, {100 * found['share_of_span']:.1f}% of the time"
    (named,) = found["named"]
    assert (named["kind"], named["name"], named["count"]) == ("range", "dataload", 12)


# ---------------------------------------------------------------- laid out by hand

PID = 31
PROCESS, MAIN = Export.process(PID), Export.thread(PID, PID)
GEMM, POINT = "void cutlass::Kernel2<x>(P)", "void at::native::vectorized_elementwise_kernel<4, F>(int)"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(A)"


class Laid:
    """One stream and one thread, event after event. The thread launches ahead, and after a gap as late as it ends."""

    def __init__(self):
        self.out, self.now = Export(1), 5 * MS
        self.cpu = self.now - 4 * US

    def _launch(self, call: str) -> tuple[int, int, int]:
        """Correlation, and the start of an operation."""
        correlation = self.out.call(call, MAIN, self.cpu, self.cpu + 1 * US)
        start = max(self.now, self.cpu + 3 * US)
        self.cpu += 2 * US
        return correlation, start

    def kernel(self, us: float, name: str = GEMM, **where: Any):
        correlation, start = self._launch("cudaLaunchKernel_v7000")
        self.now = start + int(us * US)
        self.out.kernel(name, start, self.now, correlation, PROCESS, **where)

    def copy(self, us: float, kind: str = "HtoD", host: str = "pinned", size: int = 1 << 20):
        correlation, start = self._launch("cudaMemcpyAsync_v3020")
        self.now = start + int(us * US)
        self.out.copy(kind, start, self.now, correlation, PROCESS, size, host=host)

    def gap(self, cause: str, us: float):
        """The thread is held up from its last launch on until the device has lain idle for so long."""
        begun, dry = self.cpu, self.now
        self.now += int(us * US)
        self.cpu = self.now - 3 * US
        if cause in ("input-pipeline", "cpu-work"):
            self.out.range({"cpu-work": "augment"}.get(cause, "dataload"), MAIN, begun, self.cpu)
        elif cause == "synchronization":
            self.out.synchronize("cudaStreamSynchronize", MAIN, begun, dry + 5 * US)
        elif cause == "profiler":
            self.out.overhead("flush", MAIN, begun, self.cpu)
        else:
            assert cause == "unknown"

    @contextlib.contextmanager
    def step(self, name: str = "step") -> Any:
        start = self.cpu
        yield
        self.out.range(name, MAIN, start, self.cpu)

    def trace(self, tmp_path: Path, **selection: Any) -> Trace:
        return select(nsightkit.load(self.out.write(tmp_path / "laid.sqlite", shuffle=1)), **selection)

    def answer(self, tmp_path: Path, **selection: Any) -> dict[str, Any]:
        return verdict.summary(self.trace(tmp_path, **selection))


def steady(*lost: tuple[str, float], steps: bool = True, in_turn: bool = False) -> Laid:
    """Ten rounds of equal kernels, and in each of them the same gaps.

    With `in_turn` the first two change places: the first one alone lets the thread get ahead again.
    """
    laid = Laid()
    for number in range(10):
        with laid.step() if steps else contextlib.nullcontext():
            for _ in range(5):
                laid.kernel(200)
            for cause, us in (*lost[1::-1], *lost[2:]) if in_turn and number % 2 else lost:
                laid.gap(cause, us)
                laid.kernel(10)
    laid.kernel(10)
    return laid


def some_steps(gapped: Callable[[int], float]) -> Laid:
    """Steps of equal work, and a gap of CPU work in some of them."""
    laid = Laid()
    for number in range(12):
        with laid.step():
            for _ in range(5):
                laid.kernel(200 + 40 * (number % 4))
            if gapped(number):
                laid.gap("cpu-work", gapped(number))
                laid.kernel(5)
    laid.kernel(5)
    return laid


def one_moment() -> Laid:
    laid = Laid()
    for number in range(60):
        laid.kernel(200)
        if number == 30:
            laid.gap("cpu-work", 9000)  # several tenths of the time
    return laid


def two_steps() -> Laid:
    laid = Laid()
    for _ in range(2):
        with laid.step():
            for _ in range(60):
                laid.kernel(50)
                laid.gap("cpu-work", 20)
    laid.kernel(50)
    return laid


def devices_in_turn() -> Laid:
    """Each of four works while the others have no work: they wait for three times as long as they work."""
    laid = Laid()
    for number in range(80):
        laid.kernel(200, device=number // 20)
        laid.gap("unknown", 0)  # launch each as the one before it ends
    return laid


def copies_first() -> Laid:
    laid = Laid()
    for _ in range(20):
        laid.copy(100)
    for _ in range(60):
        laid.kernel(200)
    return laid


#: What is laid out, and the bottleneck, the confidence and the first doubt that it must give.
DOUBTS: dict[str, tuple[Laid, str, str, str]] = {
    "nothing to doubt": (steady(("cpu-work", 200)), "cpu-work", "high", ""),
    "a tie": (
        steady(("cpu-work", 200), ("input-pipeline", 190), in_turn=True),
        "cpu-work",
        "medium",
        "",
    ),
    "unknown": (steady(("unknown", 1200), ("cpu-work", 800), steps=False), "unknown", "low", ""),
    "half unknown": (steady(("unknown", 600), ("cpu-work", 1000), steps=False), "cpu-work", "medium", "no recorded"),
    "near the threshold": (steady(("cpu-work", 60)), "cpu-work", "medium", "5% threshold"),
    "below the threshold": (steady(("cpu-work", 47)), "compute-bound", "medium", "kernel names"),
    "the profiler in the way": (steady(("cpu-work", 300), ("profiler", 150)), "cpu-work", "medium", "the profiler"),
    "set-up": (
        copies_first(),
        "memory-transfer",
        "low",
        "only the first 20% of the time loses much to it, perhaps set-up",
    ),
    "one moment": (one_moment(), "cpu-work", "low", "seen once"),
    "two of twelve": (some_steps(lambda i: 500 * (i in (4, 9))), "cpu-work", "low", "only 2 of 12 steps would gain"),
    "eight of twelve": (some_steps(lambda i: 500 * (i < 8)), "cpu-work", "medium", "only 8 of 12 steps would gain"),
    "waiting longer than working": (devices_in_turn(), "imbalance", "high", ""),
    "few steps": (two_steps(), "cpu-work", "medium", "the trace holds 2 steps"),
    "two doubts": (
        steady(("cpu-work", 200), ("input-pipeline", 190), ("profiler", 150), in_turn=True),
        *("cpu-work", "low", "the profiler"),
    ),
}


@pytest.mark.parametrize("case", DOUBTS)
def test_doubts_and_confidence(tmp_path: Path, case: str):
    laid, bottleneck, confidence, doubt = DOUBTS[case]
    found = laid.answer(tmp_path)
    assert (found["bottleneck"], found["confidence"]) == (bottleneck, confidence), found["against"]
    assert doubt in "".join(found["against"][:1])


def test_few_operations(tmp_path: Path):
    laid = Laid()
    for _ in range(10):
        laid.gap("cpu-work", 20)
        laid.kernel(50)
    found = laid.answer(tmp_path)
    assert (found["bottleneck"], found["confidence"]) == ("not-enough-data", "low")
    assert (found["share_of_span"], found["total_ns"]) == (None, None)
    assert "10 GPU operations, too few" in found["against"][0]
    assert "nsightkit capture" in found["next_steps"][0]


@pytest.mark.parametrize(("record", "confidence"), [(False, "high"), (True, "medium")])
def test_a_launch_bound_verdict_doubts_the_profiler_that_watched_the_cpu(tmp_path: Path, record: bool, confidence: str):
    """Kernels of 5 µs launched one by one, each 30 µs: the same capture with and without the CPU's side."""
    out = Export()
    for at in range(US, 7_200 * US, 30 * US):
        call = out.call("cudaLaunchKernel_v7000", MAIN, at, at + 6 * US)
        out.kernel(POINT, at + 8 * US, at + 13 * US, call, PROCESS)
    trace = nsightkit.load(out.write(tmp_path / "t.sqlite"))
    rows = {table: trace[table] for table in ("kernels", "calls")}
    if record:
        rows["ops"] = pd.DataFrame({"start_ns": [0], "end_ns": [1], "name": ["read"], "thread": 2 << 24})
    found = verdict.summary(Trace.from_frames(rows, trace.meta))
    assert (found["bottleneck"], found["confidence"]) == ("launch-overhead", confidence), found["against"]


# ---------------------------------------------------------------- busy time


def test_many_streams_count_each_moment_once(tmp_path: Path):
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
    idle = overview.summary(nsightkit.load(tmp_path / "t.sqlite"))["idle_ns"]
    assert got["compute-bound"] == counts[0] * US
    assert got["memory-bound"] == (counts[1] + counts[5]) * US
    assert got["not-enough-data"] == counts[2] * US
    assert got["communication"] == counts[3] * US
    assert sum(row["total_ns"] for row in found["candidates"]) == (counts[3] + counts[4]) * US + idle


@pytest.mark.parametrize(("silent_us", "bottleneck"), [(600, "compute-bound"), (2_000, "unknown")])
def test_silences_are_not_the_answer_where_the_device_is_busy(tmp_path: Path, silent_us: int, bottleneck: str):
    """60 rounds of 4 ms of work and a silence in which nothing was recorded: 13% of the time, or a third of it."""
    out, now = Export(), 1_000 * US
    for _ in range(60):
        call = out.call("cudaLaunchKernel_v7000", MAIN, now, now + 5 * US)
        out.kernel(GEMM, now + 8 * US, now + 4_008 * US, call, PROCESS)
        now += (4_008 + silent_us) * US
    found = verdict.summary(nsightkit.load(out.write(tmp_path / "t.sqlite")))
    assert (found["bottleneck"], found["confidence"]) == (bottleneck, "low")


@pytest.mark.parametrize(
    ("name", "bottleneck"),
    [
        ("ampere_sgemm_128x64_tn", "compute-bound"),
        ("sm80_xmma_fprop_implicit_gemm_f16f16_f16f16_f16_nhwckrsc_nhwc", "compute-bound"),
        ("void gemv2T_kernel_val<int, float>(P)", "memory-bound"),
        ("flash_fwd_splitkv_kernel<128>", "memory-bound"),
        ("triton_poi_fused_add_0", "memory-bound"),
        (NCCL, "communication"),
        ("void deep_ep::intranode::dispatch<8>(int4*)", "communication"),
        ("void vllm::cross_device_reduce_1stage<float, 2>(P)", "communication"),
        ("mystery", "not-enough-data"),
        ("my_reduce_kernel", "not-enough-data"),
    ],
)
def test_bound_by_name(name: str, bottleneck: str):
    found = verdict.summary(filled({name: 100}))
    assert found["bottleneck"] == bottleneck
    if bottleneck == "not-enough-data":
        assert "capture ncu" in found["next_steps"][0]


def test_collectives_are_a_loss_whatever_stream_they_run_on(tmp_path: Path):
    laid = Laid()
    for _ in range(10):
        with laid.step():
            for _ in range(8):
                laid.kernel(100)
            laid.kernel(400, NCCL, stream=20)
    found = laid.answer(tmp_path)
    assert (found["bottleneck"], found["confidence"]) == ("communication", "high")
    assert found["changes"][0]["speedup"] == pytest.approx(1.5, rel=0.06)  # but for the last one, nothing runs beside


# ---------------------------------------------------------------- advice


def filled(kernels: dict[str, float], gpu: Gpu | None = None, inputs: Any = None, **launch: int) -> Trace:
    """Sixty launches of each kernel, so many µs long, back to back; operators with shapes where inputs are given.

    `launch` are extents of grids and blocks.
    """
    names = [name for name in kernels for _ in range(60)]
    lasting = np.array([int(kernels[name] * US) for name in names])
    at = np.arange(len(names)) * 10 * US
    end = MS + np.cumsum(lasting)
    operator, dims, kind = inputs or ("thing", [], "")
    ops = pd.DataFrame({"start_ns": at, "end_ns": at + 9 * US, "name": f"aten::{operator}"})
    calls = pd.DataFrame({"start_ns": at + US, "end_ns": at + 2 * US, "name": "cudaLaunchKernel"})
    run = pd.DataFrame({"start_ns": end - lasting, "end_ns": end, "name": names, "stream": 7, "process": 1})
    numbers = np.arange(1, len(names) + 1)
    frames = {
        "ops": ops.assign(thread=1 << 24 | 1, process=1, inputs=json.dumps([dims, [kind] * len(dims), []])),
        "calls": calls.assign(thread=1 << 24 | 1, process=1, correlation=numbers),
        "kernels": run.assign(correlation=numbers, **launch),
    }
    meta = TraceMeta(tool="pytorch-profiler", gpus=[gpu] if gpu else [], missing=["os_calls"])
    return Trace.from_frames(frames, meta)


BF16 = "c10::BFloat16"
ADVICE = tomllib.loads(Path(__file__).with_name("advice.toml").read_text(encoding="utf-8"))["row"]


@pytest.mark.parametrize("row", ADVICE)
def test_advice_rests_on_shapes_and_the_majority_of_time(row: dict[str, Any]):
    operator = (*row["operator"], BF16) if "operator" in row else None
    gpu = Gpu(0, row["gpu"], compute_capability=row.get("capability"))
    text = "\n".join(verdict.summary(filled(row["kernels"], gpu, operator, **row.get("launch", {})))["next_steps"])
    assert [advice for advice in row.get("present", ()) if advice not in text] == [], text
    assert [advice for advice in row.get("absent", ()) if advice in text] == [], text


@pytest.mark.parametrize(
    ("host", "size", "advice"),
    [
        ("pageable", 1 << 20, "pinned memory without waiting"),
        ("pinned", 1 << 20, "stream of its own"),
        ("", 3_040_000, "pinned memory without waiting"),  # 3.8 GB/s
        ("", 12 << 20, "stream of its own"),
    ],
)
@pytest.mark.parametrize("kind", ["HtoD", "DtoH"])
def test_copies_at_pageable_speed_ask_for_pinned_memory(tmp_path: Path, kind: str, host: str, size: int, advice: str):
    laid = Laid()
    for _ in range(12):
        with laid.step():
            for _ in range(5):
                laid.kernel(200)
            laid.copy(800, kind, host or "pinned", size)
    trace = laid.trace(tmp_path)
    rows = {table: trace[table] for table in ("kernels", "memops", "calls", "ranges")}
    if not host:
        rows["memops"] = rows["memops"].assign(src_kind="", dst_kind="")
    found = verdict.summary(Trace.from_frames(rows, trace.meta))
    assert found["bottleneck"] == "memory-transfer"
    assert advice in found["next_steps"][0]


def test_memory_that_is_allocated_again_and_again(tmp_path: Path):
    laid = Laid()
    for _ in range(10):
        with laid.step():
            for _ in range(4):
                laid.kernel(200)
            laid.gap("input-pipeline", 900)
            laid.kernel(200)
            begun = laid.cpu
            laid.gap("unknown", 400)
            laid.out.call("cudaMalloc_v3020", MAIN, begun, laid.cpu)
    found = laid.answer(tmp_path)
    assert found["bottleneck"] == "input-pipeline"
    assert found["next_steps"][1].startswith("allocate once and use the memory again")


def test_a_change_with_a_long_name_leaves_room_for_its_gain(tmp_path: Path):
    name = "std::mersenne_twister_engine<" + "unsigned long, " * 12 + ">::_M_gen_rand()"
    text = str(steady(("input-pipeline", 900)).trace(tmp_path).whatif(f"no-cpu-work:{name}"))
    assert "_gen_rand()" in text
    assert "1.00x" in text


def test_abstaining_says_what_to_record(tmp_path: Path):
    """Idle time between kernels: without calls, with calls alone, and with OS calls too."""
    start = np.arange(60) * 2 * MS
    kernels = pd.DataFrame({"start_ns": start, "end_ns": start + MS, "name": GEMM})
    blind = verdict.summary(Trace.from_frames({"kernels": kernels}, TraceMeta(missing=["calls", "os_calls"])))
    assert (blind["bottleneck"], blind["confidence"]) == ("unknown", "low")
    assert blind["share_of_span"] == pytest.approx(59 / 119)
    assert (blind["changes"], blind["replay_error"]) == ([], None)  # shares are not a prediction
    assert "predicted" not in " ".join(blind["next_steps"])
    silent = steady(("unknown", 800), steps=False).answer(tmp_path)
    for found, what in ((blind, "the CPU side"), (silent, "OS calls")):
        assert what in found["next_steps"][0]


def shaped(kind: str, us: float, gpu: str | None = "NVIDIA H200") -> Trace:
    dims = {"mm": [[4096, 4096], [4096, 4096]], "add": [[8192, 8192], [8192, 8192], []]}[kind]
    return filled({"thing": us}, Gpu(0, gpu), (kind, dims, BF16))


#: 137 GFLOP in 200 µs on a card that does 989 TFLOP/s; 64 Mi elements, three times two bytes, at 4.8 TB/s in 100 µs.
@pytest.mark.parametrize(
    ("kind", "us", "bottleneck", "confidence", "reached"),
    [
        ("mm", 200, "compute-bound", "high", 2 * 4096**3 / 989.4e12 / 200e-6),
        ("add", 100, "memory-bound", "high", 6 * 8192**2 / 4.8e12 / 100e-6),
        ("mm", 2000, "compute-bound", "medium", 2 * 4096**3 / 989.4e12 / 2000e-6),
        ("mm", 20, "compute-bound", "high", None),  # beyond physics: does not count
    ],
)
def test_shapes_decide_before_names(kind: str, us: float, bottleneck: str, confidence: str, reached: float | None):
    found = verdict.summary(shaped(kind, us))
    assert (found["bottleneck"], found["confidence"]) == (bottleneck, confidence), found["against"]
    told = " ".join(found["evidence"])
    assert (f"at {100 * (reached or 0):.1f}% of the datasheet's rate" in told) == (reached is not None)
    assert ("nothing cheap is left" in found["next_steps"][0]) == (kind == "add")


def test_an_unknown_card_is_no_obstacle():
    """A large product is bound by arithmetic, and a sum by the memory, on every card there is."""
    for kind, bottleneck in (("mm", "compute-bound"), ("add", "memory-bound")):
        found = verdict.summary(shaped(kind, 200, None))
        assert found["bottleneck"] == bottleneck
        assert "--gpu NAME" in " ".join(found["next_steps"])
    with pytest.raises(UsageError, match="give the nearest of"):
        sol.summary(shaped("mm", 200, "RTX 9000"))
    named = verdict.summary(shaped("mm", 200, None), gpu="H200")
    assert any("datasheet" in text for text in named["evidence"])
    with pytest.raises(UsageError, match="Voodoo"):
        verdict.summary(shaped("mm", 200), gpu="Voodoo 2")


# ---------------------------------------------------------------- several devices


def pair(uneven: float, reduce: float = 100, lacks: int = 0) -> Export:
    """Two devices with ten rounds of work, the second with a share of it, that meet in a reduction."""
    out, at = Export(2), 510 * US
    ahead = [2 * US, 2 * US]  # both threads launch as fast as they can

    def launch(device: int) -> int:
        ahead[device] += 2 * US
        return out.call("cudaLaunchKernel_v7000", Export.thread(PID, PID + device), ahead[device], ahead[device] + US)

    for number in range(10):
        arrived = at + MS
        for device in (0, 1):
            ends = at + int(MS * (uneven if device else 1))
            for i in range(5):
                begin, end = (at + (ends - at) * k // 5 for k in (i, i + 1))
                out.kernel(GEMM, begin, end, launch(device), PROCESS, device=device)
            name = "mystery" if device and number < lacks else NCCL
            end = arrived + int(reduce * US)
            out.kernel(name, ends, end, launch(device), PROCESS, device=device, stream=20)
        at = arrived + int(reduce * US)
    return out


#: Of rounds that are all alike two lack a collective: the n-th of one device may not be the n-th of the other.
@pytest.mark.parametrize(
    ("laid", "bottleneck", "imbalance"),
    [
        (pair(0.4), "imbalance", 10 * 600 * US),
        (pair(1.0, reduce=600), "communication", 0),
        (pair(0.4, lacks=2), "communication", 0),
    ],
)
def test_waiting_in_collectives_is_imbalance(tmp_path: Path, laid: Export, bottleneck: str, imbalance: int):
    trace = nsightkit.load(laid.write(tmp_path / "t.sqlite"))
    found = verdict.summary(trace)
    assert found["bottleneck"] == bottleneck
    assert amounts(found).get("imbalance", 0) == imbalance
    if imbalance:  # each round lasts 700 instead of 1,000 µs, and the reduction 100 as before
        assert found["changes"][0]["change"] == "equal-ranks"
        assert found["changes"][0]["speedup"] == pytest.approx(1100 / 800, rel=0.02)
        # Alone, nothing says what a collective waits for.
        assert verdict.summary(select(trace, device=1))["total_ns"] == 10 * 700 * US


@pytest.mark.parametrize(("strangers", "bottleneck"), [(False, "imbalance"), (True, "compute-bound")])
def test_a_device_that_is_done_early(tmp_path: Path, strangers: bool, bottleneck: str):
    """Without collectives: one process's devices work together, and those of two processes do not."""
    out = Export(2)
    for device, count in ((1, 15), (0, 60)):
        pid = PID + 5 * device * strangers
        for i in range(count):
            begun = (i + 15 * (1 - device)) * 2 * US
            call = out.call("cudaLaunchKernel_v7000", Export.thread(pid, pid), begun, begun + US)
            start = (50 + i * 100) * US
            out.kernel(GEMM, start, start + 100 * US, call, Export.process(pid), device=device)
    found = verdict.summary(nsightkit.load(out.write(tmp_path / "t.sqlite")))
    assert found["bottleneck"] == bottleneck
    if not strangers:
        assert found["total_ns"] == 45 * 100 * US
        assert found["changes"][0]["speedup"] == pytest.approx(6000 / 3750, rel=0.01)


# ---------------------------------------------------------------- not enough data, and filters


@pytest.mark.parametrize(
    ("tool", "command"), [("Nsight Systems", "capture nsys"), ("pytorch-profiler", "capture torch")]
)
def test_no_gpu_work(tool: str, command: str):
    ranges = pd.DataFrame({"start_ns": [0], "end_ns": [9], "name": ["step"]})
    found = verdict.summary(Trace.from_frames({"ranges": ranges}, TraceMeta(tool=tool, missing=["kernels"])))
    assert (found["bottleneck"], found["share_of_span"], found["confidence"]) == ("not-enough-data", None, "low")
    assert command in found["next_steps"][0]
    kernels = pd.DataFrame({"start_ns": [5], "end_ns": [5], "name": ["k"]})
    assert verdict.summary(Trace.from_frames({"kernels": kernels}, TraceMeta()))["bottleneck"] == "not-enough-data"


def test_a_gap_that_pages_explain_is_inside_no_call(tmp_path: Path):
    """Those of managed memory: such a gap has no row, whatever launched the last copy."""
    laid = Laid()
    with laid.step("upload"):
        laid.copy(1)
    account = SimpleNamespace(trace=laid.trace(tmp_path), steps={"step": []})
    assert finding._names_around(account, pd.DataFrame({"kind": "copy", "row": [0, -1]})).tolist() == ["upload", None]


def test_a_filter_does_not_uncover_a_copy(tmp_path: Path):
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


# ---------------------------------------------------------------- real traces


def test_an_odd_number_of_tokens_asks_for_padding():
    """3,137 tokens in TimeSformer, after the CPU has prepared the input."""
    case = Path(__file__).parents[3] / "docs" / "cases" / "odd-tokens" / "timesformer-h100.parquet"
    found = verdict.summary(select(nsightkit.load(case, cache=False), time_ns=(222 * MS, None)))
    assert found["bottleneck"] == "memory-bound"
    assert "multiples of 8" in found["next_steps"][0]


def test_a_model_that_is_being_loaded_is_not_every_steps_trouble(shared_traces: Path):
    """Its weights take 3.2 s of copies before the first kernel; its loop is products in FP32."""
    trace = nsightkit.load(shared_traces / "cs336-zx3xyy" / "result_2_7B_nvtx.sqlite", cache=False)
    found = verdict.summary(trace)
    assert found["bottleneck"] == "memory-transfer"
    assert found["named"][0]["inside"] == "init_model"
    assert "only the first 50% of the time loses much to it, perhaps set-up" in found["against"][0]
    loop = verdict.summary(select(trace, within="^benchmark_loop$"))
    assert loop["bottleneck"] == "compute-bound"
    assert "TF32" in loop["next_steps"][0]


def test_a_program_that_runs_on_the_cpu_is_told_so():
    """Operators, and no CUDA call: the model was never moved to the GPU."""
    rows = [("aten::mm", 0, 700), ("aten::add", 700, 900)]
    ops = pd.DataFrame(rows, columns=["name", "start_ns", "end_ns"]).astype({"name": "category"})
    answer = verdict.summary(Trace.from_frames({"ops": ops.assign(thread=1 << 24, process=1)}))
    assert answer["bottleneck"] == "not-enough-data"
    assert "aten::mm, 700 ns in all" in answer["evidence"][1]


def test_collectives_that_launch_overhead_outweighs_are_in_the_verdict(shared_traces: Path):
    """Nothing overlaps 357 ms of collectives in five steps without buckets."""
    trace = nsightkit.load(shared_traces.parent / "cases" / "v100-no-buckets" / "rank.json.gz", cache=False)
    found = verdict.summary(trace)
    assert found["bottleneck"] == "launch-overhead"
    assert amounts(found)["communication"] == pytest.approx(357 * MS, rel=0.01)
    assert "collectives that no other kernel overlaps" in found["evidence"][1]
