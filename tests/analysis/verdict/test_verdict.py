"""The verdict: a confusion table of planted faults and decoys, exact shares, doubts one by one, and real traces."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator
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
from nsightkit.analysis.core import intervals
from nsightkit.analysis.replay import whatif
from nsightkit.analysis.timeline import gaps, overview
from nsightkit.analysis.timeline import steps as trace_steps
from nsightkit.analysis.timeline.gaps import in_window
from nsightkit.analysis.timeline.selection import select
from nsightkit.analysis.verdict import rules
from nsightkit.errors import UsageError
from nsightkit.trace.model import Gpu, Trace, TraceMeta

US, MS = 1_000, 1_000_000
#: Of the second, forward and backward are launched by different threads.
SEEDS = (0, 2)
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
    if seed == SEEDS[0] and fault in IN_KINETO:  # the same run in the other format
        again = verdict.summary(nsightkit.load(make_kineto.from_trace(tmp_path / "t.json", trace)))
        assert again["bottleneck"] == found["bottleneck"]
        assert amounts(again) == amounts(found)
        assert again["confidence"] == found["confidence"]
    if fault == "untraced":
        assert found["share_of_span"] is None
        return
    lost, busy = Counter(truth["gaps"]), truth["exposed"]
    lost["memory-transfer"] += busy["memory-transfer"]
    got = amounts(found)
    # Shares are of the window: the steps whole, with what the devices lay idle at its ends.
    window = trace_steps.windows(trace)
    wall = int(window["end_ns"].iloc[-1] - window["begin_ns"].iloc[0])
    assert found["span_ns"] == wall * len(overview.summary(trace)["devices"])
    ends = found["span_ns"] - truth["span_ns"]
    for cause in gaps.CAUSES:
        # The planter knows when the device ran dry; what ended the wait may count for the next cause in line.
        at_ends = got.get(cause, 0) - lost[cause]
        assert -0.002 * truth["span_ns"] <= at_ends <= max(ends, 0) + 0.002 * truth["span_ns"], cause
    assert got.get("communication", 0) == busy["communication"]
    assert got.get("imbalance", 0) == busy["imbalance"]
    assert sum(got.values()) == pytest.approx(found["span_ns"], abs=0.01 * truth["span_ns"])
    assert found["share_of_span"] == pytest.approx(found["total_ns"] / found["span_ns"])
    assert found["replay_error"] < 0.01
    if fault != "graphs":
        assert found["confidence"] != "low", found["against"]


def test_a_wait_that_the_source_cannot_record_is_not_passed_off_as_work(tmp_path: Path) -> None:
    """The step's own range is recorded activity, so the gap is CPU work; that nothing else says so is a doubt."""
    training(tmp_path / "t.sqlite", "starved-unnamed")
    trace = nsightkit.load(make_kineto.from_trace(tmp_path / "t.json", nsightkit.load(tmp_path / "t.sqlite")))
    found = verdict.summary(trace)
    one_doubt(found, "cpu-work", "it may have waited (waits were not recorded)")
    assert found["next_steps"][0].startswith("find out what this is: NVTX or record_function ranges")
    assert any("nothing but the step's own range" in text for text in found["evidence"])
    # What has a name of its own is work without a doubt.
    training(tmp_path / "t.sqlite", "augment")
    trace = nsightkit.load(make_kineto.from_trace(tmp_path / "t.json", nsightkit.load(tmp_path / "t.sqlite")))
    found = verdict.summary(trace)
    assert (found["bottleneck"], found["confidence"]) == ("cpu-work", "high")


@pytest.mark.parametrize("fault", ["starved", "sync", "pinned", "uneven", "prefetched"])
def test_the_order_of_rows_does_not_matter(tmp_path: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    training(tmp_path / "t.sqlite", fault, steps=5, layers=5)
    plain = Export.write
    monkeypatch.setattr(Export, "write", lambda self, path: plain(self, path, shuffle=5))
    training(tmp_path / "s.sqlite", fault, steps=5, layers=5)
    one, other = (verdict.summary(nsightkit.load(tmp_path / name)) for name in ("t.sqlite", "s.sqlite"))
    assert one == other


# ---------------------------------------------------------------- the answer's parts


def test_what_an_answer_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    truth = training(tmp_path / "t.sqlite", "starved")
    trace = nsightkit.load(tmp_path / "t.sqlite")
    found = verdict.summary(trace)
    contract = ["bottleneck", "share_of_span", "confidence", "evidence", "against", "next_steps", "changes"]
    assert list(found)[: len(contract)] == contract
    assert cli.run(["verdict", str(tmp_path / "t.sqlite"), "--format", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == list(found)
    assert all(printed[part] == found[part] for part in ("evidence", "candidates", "named", "longest"))
    table = pd.DataFrame(found["candidates"])
    assert list(table.columns) == ["bottleneck", "total_ns", "share_of_span"]
    assert table["total_ns"].is_monotonic_decreasing
    # The window begins with the first step, so the wait for the first batch is in it.
    lead = overview.summary(trace)["window_idle_ns"] - truth["idle_ns"]
    total = truth["gaps"]["input-pipeline"] + lead
    assert found["total_ns"] == pytest.approx(total, abs=10 * US)
    first, *_ = found["changes"]
    assert list(first) == list(whatif.COLUMNS)
    assert (first["change"], first["replay_error"]) == ("no-input-wait", found["replay_error"])
    assert first["wall_ns"] == found["span_ns"]
    assert first["speedup"] == pytest.approx(found["span_ns"] / (found["span_ns"] - total), rel=0.03)
    assert found["next_steps"][0].endswith(f"predicted {first['speedup']:.2f}x")
    assert found["confidence"] == "high"
    assert found["against"] == []
    assert found["t0_ns"] == trace.t0_ns
    (named,) = found["named"]
    assert (named["kind"], named["name"], named["count"], named["total_ns"]) == (
        "range",
        "dataload",
        12,
        found["total_ns"],
    )
    assert any("dataload" in text for text in found["evidence"])
    assert "12 of 12 steps gain from that" in found["evidence"]
    starts = {start for start, _ in zip(*intervals_of(found), strict=True)}
    assert starts <= {*gaps.find(trace)["start_ns"].tolist(), 0}
    (text,) = [text for text in found["evidence"] if text.startswith("Longest: ")]
    moments = re.findall(r"at ([\d,.]+) ms", text)
    assert [float(moment.replace(",", "")) for moment in moments] == pytest.approx(
        [row["start_ns"] / MS for row in found["longest"]], abs=0.001
    )


def intervals_of(found: dict[str, Any]) -> tuple[list[int], list[int]]:
    return [row["start_ns"] for row in found["longest"]], [row["end_ns"] for row in found["longest"]]


def test_a_copy_counts_once_whether_waited_for_or_run(tmp_path: Path) -> None:
    truth = training(tmp_path / "t.sqlite", "pageable")
    trace = nsightkit.load(tmp_path / "t.sqlite")
    found = verdict.summary(trace)
    idle = overview.summary(trace)["window_idle_ns"]
    mine = in_window(trace)
    mine = mine[mine["cause"] == "memory-transfer"]
    waited = int((mine["end_ns"] - mine["start_ns"]).sum())
    assert found["total_ns"] == waited + truth["exposed"]["memory-transfer"]
    assert sum(row["total_ns"] for row in found["candidates"]) == idle + truth["exposed"]["memory-transfer"]
    assert "mostly inside to_device" in " ".join(found["evidence"])
    assert "pinned memory" in found["next_steps"][0]


def test_the_launching_operator_or_range_is_named(tmp_path: Path) -> None:
    training(tmp_path / "t.sqlite", "sync")
    found = verdict.summary(nsightkit.load(tmp_path / "t.sqlite"))
    assert found["named"][0]["name"] == "cudaStreamSynchronize"
    assert found["named"][0]["inside"] == "forward"


class Rows:
    """Predictions laid down beside amounts, for the rule alone."""

    def __init__(self, refused: str | None, gains: dict[str, float], most: int = 5) -> None:
        self.refused, self.gains, self.error = refused, gains, 0.0
        self.each_ns = np.full(most, 1000)

    @property
    def schedule(self) -> Rows:
        return self

    @property
    def unchanged(self) -> Rows:
        return self

    def played(self, change: str) -> Any:
        return SimpleNamespace(each_ns=self.each_ns * (1 - self.gains[change]))

    def row(self, change: str) -> dict[str, Any]:
        return {"change": change, "wall_ns": 10**9, "predicted_ns": round(10**9 * (1 - self.gains[change]))}

    def saved(self, change: str) -> float:
        return self.gains[change]


def by_hand(amounts: dict[str, int], span: int, gains: dict[str, float] | None) -> tuple[str, list[str]]:
    """The contract, spelled out: what is lost weighs what its removal gains."""
    lost = {name: amounts[name] for name in [*gaps.CAUSES, "communication", "imbalance"]}
    fills = {name: amounts[name] for name in [*verdict.BOTTLENECKS[len(gaps.CAUSES) :], "memory-transfer"]}
    if gains is None:  # shares alone
        return max(lost if sum(lost.values()) >= 0.05 * span else fills, key=lambda n: amounts[n]), []
    weight = {name: gains[change] for name, change in rules.CHANGE_OF.items() if lost[name]}
    if "communication" in weight:
        weight["communication"] = min(weight["communication"], lost["communication"] / span)
    best = max(weight.values(), default=0)
    dark = max(("queued", "unknown"), key=lambda name: lost[name])
    if lost[dark] / span >= 0.05 and lost[dark] / span > best:
        return dark, []
    if best < 0.05:
        return max(fills, key=lambda name: fills[name]), []
    ties = [name for name in weight if weight[name] >= 0.9 * best]
    name = max(ties, key=lambda tie: lost[tie])
    return name, [tie for tie in ties if tie != name]


def test_the_rule_is_the_contract() -> None:
    """By hand, over random amounts and gains: the largest gain; ties by lost time; what nobody explains; what fills."""
    rng = np.random.default_rng(3)
    seen = Counter()
    for _ in range(400):
        count = len(verdict.BOTTLENECKS)
        amounts = (rng.integers(0, 100, count) * rng.choice([0, 1, 5], count) * 1000).astype(np.int64)
        span = max(int(amounts.sum()), 1)
        gains = dict.fromkeys(rules.CHANGE_OF.values(), 0.0)
        gains |= {change: float(rng.choice([0, 0.01, 0.06, 0.2, 0.21, 0.5])) for change in gains}
        refused = bool(rng.random() < 0.2)
        account = laid_account(amounts, span)
        found = rules.decide(account, Rows("why" if refused else None, gains))
        want, ties = by_hand(
            dict(zip(verdict.BOTTLENECKS, amounts.tolist(), strict=True)), span, None if refused else gains
        )
        assert (found.name, list(found.ties)) == (want, ties)
        assert found.level == "low" or not refused
        assert found.level != "high" or not found.ties
        seen[want] += 1
    assert len(seen) >= 11


def laid_account(amounts: np.ndarray, span: int) -> Any:
    """Amounts in five equal steps, without moments."""
    total = np.append(amounts, 0)
    named = dict(zip(verdict.BOTTLENECKS, amounts.tolist(), strict=True))
    return SimpleNamespace(
        total=total,
        lost={name: named[name] for name in [*gaps.CAUSES, "communication", "imbalance"]},
        span_ns=span,
        by_part=np.tile(total, (5, 1)),
        steps=pd.DataFrame({"step": ["step"] * 5}),
        are_steps=True,
        devices=[0],
        decodes=True,
        gaps=pd.DataFrame({"start_ns": [], "end_ns": [], "name": []}),
        cause=np.empty(0, np.int64),
        kernels=pd.DataFrame({"start_ns": [], "end_ns": [], "by_shape": []}),
        fills=np.empty(0, np.int64),
        moments=lambda name: pd.DataFrame({"duration_ns": []}),
    )


# ---------------------------------------------------------------- doubts, laid out by hand

PID = 31
PROCESS, MAIN = Export.process(PID), Export.thread(PID, PID)
GEMM, POINT = "void cutlass::Kernel2<x>(P)", "void at::native::vectorized_elementwise_kernel<4, F>(int)"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(A)"


class Laid:
    """One stream and one thread, event after event. The thread launches ahead, and after a gap as late as it ends."""

    def __init__(self, gpus: int = 1) -> None:
        self.out, self.now = Export(gpus), 5 * MS
        self.cpu = self.now - 4 * US

    def _launch(self, call: str) -> tuple[int, int, int]:
        """Correlation, and the start of an operation."""
        correlation = self.out.call(call, MAIN, self.cpu, self.cpu + 1 * US)
        start = max(self.now, self.cpu + 3 * US)
        self.cpu += 2 * US
        return correlation, start

    def kernel(self, us: float, name: str = GEMM, **where: Any) -> None:
        correlation, start = self._launch("cudaLaunchKernel_v7000")
        self.now = start + int(us * US)
        self.out.kernel(name, start, self.now, correlation, PROCESS, **where)

    def copy(self, us: float, kind: str = "HtoD", host: str = "pinned") -> None:
        correlation, start = self._launch("cudaMemcpyAsync_v3020")
        self.now = start + int(us * US)
        self.out.copy(kind, start, self.now, correlation, PROCESS, 1 << 20, host=host)

    def gap(self, cause: str, us: float) -> None:
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
    def step(self, name: str = "step") -> Iterator[None]:
        start = self.cpu
        yield
        self.out.range(name, MAIN, start, self.cpu)

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


def in_turn(one: tuple[str, float], other: tuple[str, float], *more: tuple[str, float]) -> Laid:
    """As :func:`steady`, but which gap comes first changes: the first one alone lets the thread get ahead again."""
    laid = Laid()
    for number in range(10):
        with laid.step():
            for _ in range(5):
                laid.kernel(200)
            for cause, us in (*((one, other) if number % 2 else (other, one)), *more):
                laid.gap(cause, us)
                laid.kernel(10)
    laid.kernel(10)
    return laid


def one_doubt(found: dict[str, Any], bottleneck: str, words: str) -> None:
    assert (found["bottleneck"], found["confidence"]) == (bottleneck, "medium"), found
    assert words in found["against"][0]


def test_nothing_to_doubt(tmp_path: Path) -> None:
    found = steady(("cpu-work", 200)).answer(tmp_path)
    assert (found["bottleneck"], found["confidence"], found["against"]) == ("cpu-work", "high", [])


def test_a_tie_goes_to_what_lost_more(tmp_path: Path) -> None:
    """Gains within 10 % of each other tie."""
    found = in_turn(("cpu-work", 200), ("input-pipeline", 190)).answer(tmp_path)
    one_doubt(found, "cpu-work", "to remove input-pipeline would gain about as much")
    assert found["next_steps"][1].startswith("then input-pipeline: ")
    found = in_turn(("cpu-work", 190), ("input-pipeline", 200)).answer(tmp_path)
    one_doubt(found, "input-pipeline", "to remove cpu-work would gain about as much")


def test_a_distant_second_is_said_all_the_same(tmp_path: Path) -> None:
    found = steady(("cpu-work", 300), ("input-pipeline", 120)).answer(tmp_path)
    assert (found["bottleneck"], found["confidence"]) == ("cpu-work", "high")
    assert found["against"] == []
    assert re.search(r"^then input-pipeline: .*: predicted 1\.(09|10)x$", found["next_steps"][1])


def test_what_nothing_explains(tmp_path: Path) -> None:
    """It is the answer where it holds more than any change saves, and a doubt where it holds half of that."""
    found = steady(("unknown", 1200), ("cpu-work", 800), steps=False).answer(tmp_path)
    assert (found["bottleneck"], found["confidence"]) == ("unknown", "low")
    found = steady(("unknown", 600), ("cpu-work", 1000), steps=False).answer(tmp_path)
    one_doubt(found, "cpu-work", "% of the time is idle, and nothing recorded says why (unknown)")
    found = steady(("unknown", 600), ("cpu-work", 2000), steps=False).answer(tmp_path)
    assert (found["bottleneck"], found["confidence"], found["against"]) == ("cpu-work", "high", [])


def test_close_to_the_five_percent(tmp_path: Path) -> None:
    one_doubt(steady(("cpu-work", 60)).answer(tmp_path), "cpu-work", "%, hardly more than the 5 % that count")
    found = steady(("cpu-work", 47)).answer(tmp_path)
    assert found["bottleneck"] == "compute-bound"
    assert found["changes"][0]["change"] == "no-cpu-work"
    assert found["changes"][0]["speedup"] < 1 / 0.95
    assert any("at most 1.05x as fast (no-cpu-work)" in text for text in found["evidence"])


def test_what_hides_behind_a_wait_is_not_lost(tmp_path: Path) -> None:
    """A sync before the CPU's own work, which lasts longer than the GPU's, is not what that work costs."""
    found = steady(("synchronization", 30), ("cpu-work", 2000)).answer(tmp_path)
    assert found["bottleneck"] == "cpu-work"
    assert found["candidates"][0]["bottleneck"] == "cpu-work"
    gains = {row["change"]: row["speedup"] for row in found["changes"]}
    assert gains["no-cpu-work"] > gains.get("no-sync", 1)


def test_the_profiler_in_the_way(tmp_path: Path) -> None:
    found = steady(("cpu-work", 300), ("profiler", 150)).answer(tmp_path)
    one_doubt(found, "cpu-work", "the profiler itself took")


def test_set_up_before_the_steps(tmp_path: Path) -> None:
    """It is outside the window."""
    laid = Laid()
    for _ in range(20):
        laid.copy(500, host="pageable")
    laid.cpu = laid.now  # such copies return when they are done
    for _ in range(12):
        with laid.step():
            for _ in range(5):
                laid.kernel(200)
    found = laid.answer(tmp_path)
    assert found["bottleneck"] == "compute-bound"
    assert found["busy"][0]["total_ns"] == 60 * 200 * US


def test_set_up_without_steps(tmp_path: Path) -> None:
    laid = Laid()
    for _ in range(20):
        laid.copy(100)
    for _ in range(60):
        laid.kernel(200)
    found = laid.answer(tmp_path)
    assert (found["bottleneck"], found["confidence"]) == ("memory-transfer", "low")
    assert "most of it lies in the first 2 tenths of the time, which may be set-up" in found["against"][0]
    (cut,) = re.findall(r"--time (\d+):", found["against"][0])
    assert laid.answer(tmp_path, time_ns=(int(cut), None))["bottleneck"] == "compute-bound"


def test_steps_that_gain(tmp_path: Path) -> None:
    laid = Laid()
    for number in range(12):
        with laid.step():
            for _ in range(5):
                laid.kernel(200)
            if number in (4, 9):
                laid.gap("cpu-work", 500)
    laid.kernel(200)
    found = laid.answer(tmp_path)
    assert (found["bottleneck"], found["confidence"]) == ("cpu-work", "low")
    assert "only 2 of 12 steps would gain from it" in found["against"]


def test_one_moment_alone(tmp_path: Path) -> None:
    laid = Laid()
    for number in range(60):
        laid.kernel(200)
        if number == 30:
            laid.gap("cpu-work", 9000)  # several tenths of the time
    found = laid.answer(tmp_path)
    assert (found["bottleneck"], found["confidence"]) == ("cpu-work", "low")
    assert found["against"] == ["seen once: a single moment holds more than half of it"]


def test_one_step_alone(tmp_path: Path) -> None:
    laid = Laid()
    for number in range(12):
        with laid.step(f"step {number}"):
            for _ in range(5):
                laid.kernel(200)
                if number == 7:
                    laid.gap("cpu-work", 300)
    laid.kernel(200)
    found = laid.answer(tmp_path)
    assert (found["bottleneck"], found["confidence"]) == ("cpu-work", "low")
    assert "only 1 of 12 steps would gain from it" in found["against"]


@pytest.mark.parametrize(("often", "level"), [(3, "low"), (8, "medium"), (11, "high")])
def test_now_and_then(tmp_path: Path, often: int, level: str) -> None:
    """Of twelve steps: fewer than half, fewer than three quarters, and nearly all."""
    laid = Laid()
    for number in range(12):
        with laid.step():
            for _ in range(5):
                laid.kernel(200 + 40 * (number % 4))
            laid.gap("cpu-work", 500 if number < often else 0)
            laid.kernel(5)
    laid.kernel(5)
    found = laid.answer(tmp_path)
    assert (found["bottleneck"], found["confidence"]) == ("cpu-work", level)
    assert (f"only {often} of 12 steps would gain from it" in found["against"]) == (level != "high")


@pytest.mark.parametrize("steps", [1, 2])
def test_few_steps(tmp_path: Path, steps: int) -> None:
    laid = Laid()
    for _ in range(steps):
        with laid.step():
            for _ in range(60):
                laid.kernel(50)
                laid.gap("cpu-work", 20)
    laid.kernel(50)
    one_doubt(laid.answer(tmp_path), "cpu-work", f"the trace holds {steps} step")


def test_few_operations(tmp_path: Path) -> None:
    laid = Laid()
    for _ in range(9):
        laid.kernel(50)
        laid.gap("cpu-work", 20)
    laid.kernel(50)
    found = laid.answer(tmp_path)
    assert (found["bottleneck"], found["confidence"]) == ("not-enough-data", "low")
    assert (found["share_of_span"], found["total_ns"]) == (None, None)
    assert (
        "GPU operations: 10, too few to judge a program by; of these alone it would be cpu-work" in found["against"][0]
    )
    assert found["next_steps"] == ["capture several steps after the warm-up: nsightkit capture nsys -o more -- COMMAND"]


def test_two_doubts_are_low_confidence(tmp_path: Path) -> None:
    found = in_turn(("cpu-work", 200), ("input-pipeline", 190), ("profiler", 150)).answer(tmp_path)
    assert (found["bottleneck"], found["confidence"]) == ("cpu-work", "low")
    assert "would gain about as much" in found["against"][0]
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


@pytest.mark.parametrize(("silent_us", "bottleneck"), [(600, "compute-bound"), (2_000, "unknown")])
def test_silences_are_not_the_answer_where_the_device_is_busy(tmp_path: Path, silent_us: int, bottleneck: str) -> None:
    """60 rounds of 4 ms of work and a silence in which nothing was recorded: 13 % of the time, or a third of it."""
    out, now = Export(), 1_000 * US
    for _ in range(60):
        call = out.call("cudaLaunchKernel_v7000", MAIN, now, now + 5 * US)
        out.kernel(GEMM, now + 8 * US, now + 4_008 * US, call, PROCESS)
        now += (4_008 + silent_us) * US
    found = verdict.summary(nsightkit.load(out.write(tmp_path / "t.sqlite")))
    assert found["bottleneck"] == bottleneck
    assert any("nothing recorded says why" in text for text in found["against"]) == (bottleneck == "compute-bound")
    assert found["confidence"] == "low"


@pytest.mark.parametrize(
    ("capability", "kernel", "advice"),
    [
        ((6, 1), "sgemm", "do less or cheaper arithmetic"),
        ((7, 5), "sgemm", "these products run in FP32 without tensor cores: multiply in FP16"),
        ((9, 0), "sgemm", "these products run in FP32 without tensor cores: multiply in TF32"),
        ((9, 0), "void at::native::sgemm", "these products run in FP32 without tensor cores: allow TF32"),
    ],
)
def test_the_generation_of_a_card_that_is_not_listed_tells_what_it_has(
    tmp_path: Path, capability: tuple[int, int], kernel: str, advice: str
) -> None:
    path = steady(name=kernel).out.write(tmp_path / "t.sqlite")
    with contextlib.closing(sqlite3.connect(path)) as file, file:
        file.execute(
            "UPDATE TARGET_INFO_GPU SET name = 'GeForce of Tomorrow', computeMajor = ?, computeMinor = ?", capability
        )
    found = verdict.summary(nsightkit.load(path, cache=False))
    assert found["next_steps"][0] == advice


@pytest.mark.parametrize(("kernel", "advice"), [("k", "cudaMallocAsync"), ("at::native::k", "caching allocator")])
def test_who_allocates_in_every_round_is_advised_by_its_framework(tmp_path: Path, kernel: str, advice: str) -> None:
    out, now = Export(), 1_000 * US
    for _ in range(60):
        call = out.call("cudaLaunchKernel_v7000", MAIN, now, now + 5 * US)
        out.kernel(kernel, now + 8 * US, now + 108 * US, call, PROCESS)
        out.call("cudaFree_v3020", MAIN, now + 6 * US, now + 250 * US)
        out.call("cudaMalloc_v3020", MAIN, now + 251 * US, now + 400 * US)
        now += 405 * US
    found = verdict.summary(nsightkit.load(out.write(tmp_path / "t.sqlite")))
    assert found["bottleneck"] == "cpu-work"
    assert advice in found["next_steps"][0]


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
    assert all(row["speedup"] < 1.05 for row in found["changes"])
    if bottleneck == "not-enough-data":
        assert "capture ncu" in found["next_steps"][0]
        assert found["confidence"] == "low"
    if "sgemm" in name:
        assert "TF32" in found["next_steps"][0]


def test_collectives_weigh_what_overlapping_them_gains(tmp_path: Path) -> None:
    def laid(us: float) -> dict[str, Any]:
        made = Laid()
        for _ in range(10):
            with made.step():
                for _ in range(8):
                    made.kernel(100)
                made.kernel(us, NCCL, stream=20)
        return made.answer(tmp_path)

    found = laid(400)
    assert (found["bottleneck"], found["confidence"]) == ("communication", "high")
    assert found["changes"][0]["change"] == "overlap-communication"
    assert found["changes"][0]["speedup"] == pytest.approx(1.5, rel=0.06)  # but for the last one, nothing runs beside
    assert re.fullmatch(r"other kernels run for 66\.[67] % of the steps", found["against"][0])
    found = laid(120)
    assert found["bottleneck"] == "communication"
    one_doubt(laid(50), "communication", "%, hardly more than the 5 % that count")
    assert laid(35)["bottleneck"] == "compute-bound"


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
    assert f"at {100 * reached:.1f} % of the datasheet's rate" in " ".join(found["evidence"])
    assert found["named"][0]["inside"] == "aten::mm"
    # 64 Mi elements, three times two bytes, at 4.8 TB/s: 84 µs of 100.
    found = verdict.summary(shaped("add", 100))
    assert (found["bottleneck"], found["confidence"]) == ("memory-bound", "high")
    reached = 6 * 8192**2 / 4.8e12 / 100e-6
    assert f"at {100 * reached:.1f} % of the datasheet's rate" in " ".join(found["evidence"])
    assert "nothing cheap is left" in found["next_steps"][0]


def test_operators_far_from_their_bound_are_doubted() -> None:
    one_doubt(verdict.summary(shaped("mm", 2000)), "compute-bound", "something else may hold them")


def test_operators_beyond_physics_do_not_count() -> None:
    found = verdict.summary(shaped("mm", 20))
    assert found["bottleneck"] == "compute-bound"
    assert any("quicker than physics allows" in text for text in found["against"])


@pytest.mark.parametrize("gpu", [None, "Voodoo 2"])
def test_an_unknown_card_is_no_obstacle(gpu: str | None) -> None:
    """A large product is bound by arithmetic, and a sum by the memory, on every card there is."""
    for kind, bottleneck in (("mm", "compute-bound"), ("add", "memory-bound")):
        trace = shaped(kind, 200, gpu)
        found = verdict.summary(trace)
        assert found["bottleneck"] == bottleneck
        assert not any("by names" in text for text in found["against"])
        assert not any("datasheet" in text for text in found["evidence"])
        assert any("datasheet" in text for text in verdict.summary(trace, gpu="H200")["evidence"])


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
    ahead = [2 * US, 2 * US]  # both threads launch as fast as they can

    def launch(device: int, pid: int) -> int:
        ahead[device] += 2 * US
        thread = Export.thread(pid, pid + device)
        return out.call("cudaLaunchKernel_v7000", thread, ahead[device], ahead[device] + US)

    at += 500 * US
    for number, us in enumerate(rounds):
        arrived = at + us * US
        for device, pid in enumerate(pids):
            process = Export.process(pid)
            ends = at + int(us * US * (uneven if device else 1))
            for i in range(5):
                begin, end = (at + (ends - at) * k // 5 for k in (i, i + 1))
                out.kernel(GEMM, begin, end, launch(device, pid), process, device=device)
            if reduce:
                name = "mystery" if device and number < lacks else NCCL
                end = arrived + int(reduce * US)
                out.kernel(name, ends, end, launch(device, pid), process, device=device, stream=20)
        at = arrived + int(reduce * US)
    return out


@pytest.mark.parametrize("pids", [(PID, PID), (PID, PID + 1)])
def test_waiting_in_collectives_is_imbalance(tmp_path: Path, pids: tuple[int, int]) -> None:
    found = verdict.summary(nsightkit.load(pair(0.4, pids).write(tmp_path / "t.sqlite")))
    assert found["bottleneck"] == "imbalance"
    assert amounts(found)["imbalance"] == 10 * 600 * US
    assert amounts(found)["communication"] == 2 * 10 * 100 * US
    # Each round lasts 700 instead of 1,000 µs, and the reduction 100 as before.
    assert found["changes"][0]["change"] == "equal-ranks"
    assert found["changes"][0]["speedup"] == pytest.approx(1100 / 800, rel=0.02)
    told = " ".join(found["evidence"])
    assert "Device 0 did not wait in collectives and arrived last in 10 of 10" in told
    assert "Device 1 waited 6.000 ms in collectives and arrived last in 0 of 10" in told


def test_collectives_of_equal_devices_are_communication(tmp_path: Path) -> None:
    found = verdict.summary(nsightkit.load(pair(1.0, reduce=600).write(tmp_path / "t.sqlite")))
    assert found["bottleneck"] == "communication"
    assert "imbalance" not in amounts(found)


def test_collectives_that_one_capture_lacks(tmp_path: Path) -> None:
    rounds = [1000 + 40 * (7 * number % 10) for number in range(10)]
    found = verdict.summary(nsightkit.load(pair(0.4, lacks=2, rounds=rounds).write(tmp_path / "t.sqlite")))
    assert found["bottleneck"] == "imbalance"
    assert amounts(found)["imbalance"] == sum(rounds[2:]) * 600
    assert "arrived last in 8 of 8" in " ".join(found["evidence"])


def test_a_device_that_is_done_early(tmp_path: Path) -> None:
    """Without collectives, in one process: no gap of the idle device is within its span."""
    out = Export(2)
    for device, count in ((1, 15), (0, 60)):
        for i in range(count):
            begun = (i + 15 * (1 - device)) * 2 * US
            call = out.call("cudaLaunchKernel_v7000", MAIN, begun, begun + US)
            start = (50 + i * 100) * US
            out.kernel(GEMM, start, start + 100 * US, call, PROCESS, device=device)
    found = verdict.summary(nsightkit.load(out.write(tmp_path / "t.sqlite")))
    assert found["bottleneck"] == "imbalance"
    assert found["total_ns"] == 45 * 100 * US
    assert found["changes"][0]["speedup"] == pytest.approx(6000 / 3750, rel=0.01)
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


def test_a_device_that_idles_while_another_is_full_loses_nothing(tmp_path: Path) -> None:
    """One of two devices idles for half of its time, and the other works all of it: nothing is gained by more work."""
    out = Export(2)
    for device in (0, 1):
        thread = Export.thread(PID, PID + device)
        for i in range(30):
            begun = i * (1000 if device else 2) * US + 5 * US
            start = i * 1000 * US + 10 * US
            call = out.call("cudaLaunchKernel_v7000", thread, begun, begun + US)
            out.kernel(GEMM, start, start + (500 if device else 1000) * US, call, PROCESS, device=device)
            if device:
                out.range("augment", thread, begun + 2 * US, begun + 999 * US)
    found = verdict.summary(nsightkit.load(out.write(tmp_path / "t.sqlite")))
    assert found["bottleneck"] == "compute-bound"
    lost = {row["bottleneck"]: row["share_of_span"] for row in found["candidates"]}
    assert lost["cpu-work"] == pytest.approx(0.25, abs=0.01)
    assert all(row["speedup"] < 1.05 for row in found["changes"] if row["change"] != "equal-ranks")


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
    assert found["candidates"] == []


def test_work_without_duration() -> None:
    kernels = pd.DataFrame({"start_ns": [5], "end_ns": [5], "name": ["k"]})
    found = verdict.summary(Trace.from_frames({"kernels": kernels}, TraceMeta()))
    assert (found["bottleneck"], found["share_of_span"]) == ("not-enough-data", None)
    assert found["evidence"] == ["no GPU work lasts any time"]


def test_without_launches_idle_time_has_no_cause() -> None:
    start = np.arange(60) * 2 * MS
    kernels = pd.DataFrame({"start_ns": start, "end_ns": start + MS, "name": GEMM})
    blind = verdict.summary(Trace.from_frames({"kernels": kernels}, TraceMeta(missing=["calls", "os_calls"])))
    assert (blind["bottleneck"], blind["confidence"]) == ("unknown", "low")
    assert blind["share_of_span"] == pytest.approx(59 / 119)
    assert (blind["changes"], blind["replay_error"]) == ([], None)  # shares are not a prediction
    assert blind["next_steps"][0].startswith("record the calls that launch the GPU's work (nsightkit capture nsys")
    assert "predicted" not in " ".join(blind["next_steps"])
    assert blind["against"][0].startswith("nothing is predicted: ")


def test_the_unknown_is_called_so(tmp_path: Path) -> None:
    found = steady(("unknown", 800), steps=False).answer(tmp_path)
    assert (found["bottleneck"], found["confidence"]) == ("unknown", "low")
    assert "NVTX" in found["next_steps"][0]
    assert "time for which nothing recorded says why (unknown) takes" in found["evidence"][0]
    assert "before cutlass::Kernel2<x>" in found["evidence"][-1]


def test_graphs_of_which_the_kernels_are_wanted(tmp_path: Path) -> None:
    training(tmp_path / "t.sqlite", "graphs")
    found = verdict.summary(nsightkit.load(tmp_path / "t.sqlite"))
    assert "--cuda-graph-trace=node" in found["next_steps"][0]
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
    for device, lasting in ((0, 100), (1, 700)):  # alone, nothing says what a collective waits for
        found = verdict.summary(select(trace, device=device))
        assert found["bottleneck"] == "communication"
        assert found["total_ns"] == 10 * lasting * US


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
    assert "10 of 10 steps gain from that" in found["evidence"]


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
        if found["share_of_span"] is not None:
            assert 0 <= found["share_of_span"] <= 1
        if trace is trace.whole and found["span_ns"]:
            inside = sum(ns for name, ns in amounts(found).items() if name != "imbalance")
            assert inside <= found["span_ns"]


# ---------------------------------------------------------------- real traces


@functools.cache
def loaded(shared_traces: Path, name: str) -> Trace:
    (path,) = shared_traces.glob(name)
    return nsightkit.load(path, cache=False)


def real(shared_traces: Path, name: str) -> dict[str, Any]:
    return verdict.summary(loaded(shared_traces, name))


def test_resnet_without_loader_workers(shared_traces: Path) -> None:
    """torch-tb-profiler finds a third of each step in the DataLoader; here it is what of it left the GPU idle."""
    found = real(shared_traces, "kineto/resnet50_num_workers_0__*.gz")
    assert (found["bottleneck"], found["confidence"]) == ("input-pipeline", "medium")  # launches gain as much
    assert 0.25 < found["share_of_span"] < 0.334
    assert "DataLoader" in found["named"][0]["name"]
    after = real(shared_traces, "kineto/resnet50_num_workers_4__*.gz")
    assert after["bottleneck"] != "input-pipeline"
    assert "input-pipeline" not in set(
        gaps.summary(loaded(shared_traces, "kineto/resnet50_num_workers_4__*.gz"))["cause"]
    )
    # Before the first step's first operation a copy from pageable memory runs for 40 of 45 ms on the CPU.
    assert "input-pipeline" not in amounts(after)
    assert amounts(after)["memory-transfer"] > 45 * MS


def test_graphs_that_keep_a_gpu_busy(shared_traces: Path) -> None:
    found = real(shared_traces, "cs336-zx3xyy/result_2_7B_compile_ro.sqlite")
    assert found["bottleneck"] == "not-enough-data"
    assert found["total_ns"] == pytest.approx(7_811.2 * MS, rel=1e-4)
    assert sum(row["share_of_span"] for row in found["candidates"]) < 0.001
    assert "--cuda-graph-trace=node" in found["next_steps"][0]


def test_a_model_that_is_being_loaded_is_not_every_steps_trouble(shared_traces: Path) -> None:
    """Its weights take 3.2 s of copies before the first kernel; its loop is products in FP32."""
    found = real(shared_traces, "cs336-zx3xyy/result_2_7B_nvtx.sqlite")
    assert found["bottleneck"] == "memory-transfer"
    assert found["named"][0]["inside"] == "init_model"
    assert "in the first half of the time, which may be set-up" in found["against"][0]
    assert found["confidence"] != "high"
    trace = loaded(shared_traces, "cs336-zx3xyy/result_2_7B_nvtx.sqlite")
    loop = verdict.summary(select(trace, within="^benchmark_loop$"))
    assert loop["bottleneck"] == "compute-bound"
    assert "TF32" in loop["next_steps"][0]


def test_a_step_that_begins_with_the_cpu(shared_traces: Path) -> None:
    """TimeSformer on an H100: the GPU is full for the rest of a step of which the CPU takes the first 218 ms."""
    found = real(shared_traces, "tracelens/h100__facebook_timesformer*.gz")
    assert (found["bottleneck"], found["confidence"]) == ("cpu-work", "low")
    assert found["share_of_span"] == pytest.approx(218.1 / 382.5, abs=0.001)
    assert "nothing but the step's own range, ProfilerStep#6, says what the thread did" in " ".join(found["evidence"])
    assert found["busy"][0]["bottleneck"] == "memory-bound"  # attention that writes its scores


def test_two_gpus_with_hardly_a_wait(shared_traces: Path) -> None:
    found = real(shared_traces, "nsys-ai/mfu_2gpu_before.sqlite")
    idle = overview.summary(loaded(shared_traces, "nsys-ai/mfu_2gpu_before.sqlite"))
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
            if not len(trace_steps.windows(trace)):
                assert found["span_ns"] == int(spans["span_ns"].sum())
            inside = sum(ns for name, ns in amounts(found).items() if name != "imbalance")
            assert inside <= found["span_ns"]
            if len(spans) == 1:
                assert inside == found["span_ns"]
