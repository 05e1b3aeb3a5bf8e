"""The gate: what it must catch, what it must let pass, and what it must refuse to say."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import planted

import nsightkit
from nsightkit import cli
from nsightkit.analysis.compare import baseline as baselines
from nsightkit.analysis.compare import check
from nsightkit.analysis.compare import runs as run_metrics
from nsightkit.analysis.compare.baseline import make
from nsightkit.analysis.compare.runs import Metric, Run, of_samples
from nsightkit.errors import TraceError, UsageError
from nsightkit.trace import ncu as ncu_reports

SLOWER = 1.08
#: Less than 1 % of 200 is one at the most; what is caught each time shows it in fewer.
RUNS, CAUGHT = 200, 60


# ---------------------------------------------------------------- noise as real steps have it


def steps_of(rng: np.random.Generator, count: int, between: float, slower: float = 1.0) -> np.ndarray:
    """Step times of one run, in ns: a spread with a tail, a stall now and then, a drift, the run's own pace."""
    logs = rng.normal(0, 0.02, count) + rng.exponential(0.012, count)
    logs += (rng.random(count) < 0.02) * rng.exponential(0.3, count)
    logs += np.linspace(-0.5, 0.5, count) * rng.normal(0, 0.01)
    return 10_000_000 * slower * np.exp(logs + rng.normal(0, between))


def trace_run(rng: np.random.Generator, count: int, between: float, slower: float = 1.0, *, informing: int = 0) -> Run:
    """A run with the metrics of a trace: times that gate, exact ones, and some that inform."""
    time = steps_of(rng, count, between, slower)
    busy = time * (0.8 + rng.normal(0, 0.005, count))
    metrics = {
        "step/time_ns": Metric(time, "ns", gate=True),
        "step/busy_ns": Metric(busy, "ns", gate=True),
        "step/idle_ns": Metric(time - busy, "ns"),
        "step/kernel_count": Metric(np.full(count, 700.0), "count", gate=True),
        "step/copied_bytes": Metric(np.full(count, 65536.0), "bytes", gate=True),
    }
    metrics |= {f"kernel/{i}/gpu_ns": Metric(busy * 0.1, "ns") for i in range(informing)}
    return Run("trace", dict.fromkeys(run_metrics.CONDITIONS) | {"gpu": "Synthetic GPU", "tool": "planted"}, metrics)


def bench_run(rng: np.random.Generator, count: int, between: float, slower: float = 1.0, cells: int = 12) -> Run:
    """A benchmark of many cells, each in a process of its own; the first is the slower one."""
    return of_samples(
        {f"cell {i} step_ns": steps_of(rng, count, between, slower if i == 0 else 1.0) for i in range(cells)}
    )


@dataclasses.dataclass
class Counted:
    """What became of many checks."""

    failed: int = 0
    undecided: int = 0
    passed: int = 0
    limits: list[float] = dataclasses.field(default_factory=list)


def simulate(
    seed: int,
    run: Callable[..., Run],
    slower: float = 1.0,
    *,
    baseline: int,
    runs: int,
    steps: int,
    between: float,
    times: int = RUNS,
) -> Counted:
    """Check some times, each against a fresh baseline of some runs."""
    rng = np.random.default_rng(seed)
    counted = Counted()
    for _ in range(times):
        held = make([run(rng, steps, between) for _ in range(baseline)])
        found = check.compare(held, [run(rng, steps, between, slower) for _ in range(runs)])
        if found["regressions"] or found["missing"]:
            counted.failed += 1
        elif found["undecided"]:
            counted.undecided += 1
        else:
            counted.passed += 1
        counted.limits.append(found["gates"][0]["limit"])
    return counted


#: What `docs/gate.md` promises: runs in the baseline, runs checked, steps, and how far runs differ.
PROMISED = {
    "one run each on a quiet machine": {"baseline": 1, "runs": 1, "steps": 50, "between": 0.005},
    "five and one, steady": {"baseline": 5, "runs": 1, "steps": 50, "between": 0.005},
    "five and three": {"baseline": 5, "runs": 3, "steps": 30, "between": 0.01},
}


@pytest.mark.parametrize("case", PROMISED)
def test_noise_passes_and_eight_percent_does_not(case: str) -> None:
    quiet = simulate(1, trace_run, **PROMISED[case])
    slowed = simulate(2, trace_run, SLOWER, times=CAUGHT, **PROMISED[case])
    # Of what is quiet, "cannot tell" is a false alarm as well.
    assert RUNS - quiet.passed <= 1, quiet
    assert slowed.failed == CAUGHT, slowed


def test_many_cells_give_no_more_false_alarms_than_one() -> None:
    counts = {"baseline": 5, "runs": 3, "steps": 30, "between": 0.007}
    quiet = simulate(3, bench_run, **counts)
    slowed = simulate(4, bench_run, SLOWER, times=CAUGHT, **counts)
    assert RUNS - quiet.passed <= 1, quiet
    assert slowed.failed == CAUGHT, slowed


def test_only_the_slow_cell_is_named() -> None:
    rng = np.random.default_rng(5)
    held = make([bench_run(rng, 30, 0.005) for _ in range(5)])
    found = check.compare(held, [bench_run(rng, 30, 0.005, SLOWER) for _ in range(3)])
    assert [row["metric"] for row in found["regressions"]] == ["cell 0 step_ns"]


def test_a_machine_that_varies_more_is_told_so_and_gives_no_false_alarms() -> None:
    """Where runs differ by 3 %, nobody can see 8 % in one of them; the gate must know that from its baseline."""
    counted = simulate(6, trace_run, baseline=8, runs=3, steps=30, between=0.03)
    assert counted.failed <= 1, counted
    assert np.median(counted.limits) > 1.055, "what it can see is said"
    large = simulate(7, trace_run, 1.25, baseline=8, runs=3, steps=30, between=0.03, times=CAUGHT)
    assert large.failed == CAUGHT, large


def test_without_the_other_runs_the_same_machine_would_give_false_alarms() -> None:
    """Why the baseline should have several runs: one says nothing of the next."""
    one = simulate(8, trace_run, baseline=1, runs=1, steps=50, between=0.03)
    assert one.failed > 0.03 * RUNS, one


def test_an_improvement_is_no_failure() -> None:
    rng = np.random.default_rng(9)
    held = make([trace_run(rng, 30, 0.003) for _ in range(3)])
    found = check.compare(held, [trace_run(rng, 30, 0.003, 0.85)])
    assert found["passed"]
    assert {row["metric"] for row in found["improvements"]} == {"step/time_ns", "step/busy_ns"}
    assert found["regressions"] == found["missing"] == found["undecided"] == []


# ---------------------------------------------------------------- the rule, case by case


def run_of(**samples: Any) -> Run:
    return of_samples({name: np.atleast_1d(np.asarray(values, float)) for name, values in samples.items()})


def spread(middle: float, count: int = 20, width: float = 0.01) -> np.ndarray:
    return middle * (1 + width * np.linspace(-1, 1, count))


def only(found: dict[str, Any]) -> dict[str, Any]:
    [row] = [*found["gates"], *found["missing"]]
    return row


@pytest.mark.parametrize(
    ("name", "factor", "status"),
    [
        ("a_ns", 1.049, "ok"),
        ("a_ns", 1.06, "regression"),
        ("a_ns", 0.94, "improvement"),
        ("a_ns", 0.96, "ok"),
        ("a_per_s", 1.06, "improvement"),
        ("a_per_s", 0.94, "regression"),
        ("a_per_s", 0.96, "ok"),
        ("a_bytes", 1.06, "regression"),
        ("a_bytes", 1.04, "ok"),
        ("a_count", 0.94, "improvement"),
    ],
)
def test_direction_and_tolerance(name: str, factor: float, status: str) -> None:
    exact = name.endswith(("bytes", "count"))
    before, after = ([1000.0], [1000.0 * factor]) if exact else (spread(1000), spread(1000 * factor))
    row = only(check.compare(make([run_of(**{name: before})]), [run_of(**{name: after})]))
    assert row["status"] == status
    assert row["ratio"] == pytest.approx(factor)
    assert row["limit"] == pytest.approx(1 / 1.05 if name == "a_per_s" else 1.05)


def test_where_no_drop_is_beyond_noise_the_limit_is_nothing() -> None:
    """Runs that differ by all they have: no ratio lies below their noise, and 0 is not divided by."""
    before = make([run_of(a_per_s=spread(1000)), run_of(a_per_s=[0.0] * 9)])
    row = only(check.compare(before, [run_of(a_per_s=spread(900))]))
    assert (row["limit"], row["status"]) == (0.0, "undecided")


def test_the_tolerance_is_the_commands_or_the_metrics_own() -> None:
    held = make([run_of(a_ns=spread(1000), b_ns=spread(1000))])
    own = dataclasses.replace(held.metrics["b_ns"], tolerance=0.3)
    held = dataclasses.replace(held, metrics={**held.metrics, "b_ns": own})
    slow = run_of(a_ns=spread(1200), b_ns=spread(1200))
    assert [row["metric"] for row in check.compare(held, [slow])["regressions"]] == ["a_ns"]
    assert check.compare(held, [slow], 0.25)["passed"]
    for wrong in (-0.1, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="tolerance"):
            check.compare(held, [slow], wrong)


def test_neither_direction_is_better() -> None:
    held = make([run_of(a_ns=spread(1000))])
    either = dataclasses.replace(held.metrics["a_ns"], direction="neither")
    held = dataclasses.replace(held, metrics={"a_ns": either})
    for factor in (0.9, 1.1):
        found = check.compare(held, [run_of(a_ns=spread(1000 * factor))])
        assert not found["passed"]
        assert only(found)["status"] == "changed"


def test_more_than_the_tolerance_and_within_noise_is_undecided() -> None:
    """Beyond 5 %, in steps that differ by a third of themselves: no failure, and no pass."""
    held = make([run_of(a_ns=spread(1000, 10, 0.4))])
    found = check.compare(held, [run_of(a_ns=spread(1080, 10, 0.4))])
    row = only(found)
    assert (row["status"], found["passed"], found["decided"]) == ("undecided", False, False)
    assert found["regressions"] == []
    assert row["low"] < 1 < row["high"]
    assert row["limit"] > 1.1
    better = check.compare(held, [run_of(a_ns=spread(920, 10, 0.4))])
    assert better["passed"], "that it may be faster holds nobody up"


@pytest.mark.parametrize("count", [1, 3, 5])
def test_few_steps_cannot_tell(count: int) -> None:
    held = make([run_of(a_ns=spread(1000, count))])
    found = check.compare(held, [run_of(a_ns=spread(3000, count))])
    row = only(found)
    assert (row["status"], row["low"], row["limit"]) == ("undecided", None, None) if count < 5 else True
    assert ("too few samples" in row["reason"]) == (count < 5) if row["reason"] else count == 5
    same = check.compare(held, [run_of(a_ns=spread(1000, count))])
    assert same["passed"], "the same is the same"


def test_single_samples_of_several_runs_are_samples() -> None:
    held = make([run_of(a_ns=value) for value in (1000, 1010, 995, 1003)])
    assert only(check.compare(held, [run_of(a_ns=1200)]))["status"] == "regression"
    assert only(check.compare(held, [run_of(a_ns=1015)]))["status"] == "ok"
    two = make([run_of(a_ns=value) for value in (1000, 1010)])
    assert only(check.compare(two, [run_of(a_ns=1200)]))["status"] == "undecided", "one difference is not a spread"


def test_steps_that_stand_out_do_not_hide_what_is_beyond_doubt() -> None:
    """Four of six steps lie apart from all of the baseline's: ranks of six cannot say it, and nobody doubts it."""
    held = make([run_of(a_ns=[124.0, 127.0, 126.0, 125.0, 164.0, 182.0])])
    slow = [176.0, 174.0, 177.0, 181.0, 176.5, 180.5]
    row = only(check.compare(held, [run_of(a_ns=slow)]))
    assert (row["status"], row["limit"] < row["ratio"]) == ("regression", True)
    # Where runs are known to differ by as much, they are not beyond doubt.
    apart = make([run_of(a_ns=[124.0, 127.0, 126.0, 125.0]), run_of(a_ns=[224.0, 227.0, 226.0, 225.0])])
    assert only(check.compare(apart, [run_of(a_ns=slow)]))["status"] == "undecided"
    none = make([run_of(a_ns=np.zeros(4))])
    assert only(check.compare(none, [run_of(a_ns=slow[:4])]))["status"] == "regression", "there was nothing of it"


def test_whole_traces_of_different_amounts_of_work_are_told() -> None:
    before, after = ({"trace/kernel_count": [n], "trace/span_ns": [1e9]} for n in (100, 89))
    held = make([dataclasses.replace(of_samples(before), of="trace")])
    notes = check.compare(held, [dataclasses.replace(of_samples(after), of="trace")])["notes"]
    assert any("hold different amounts of work, 100 and 89 kernels" in note for note in notes)


def test_runs_that_differ_widen_what_counts() -> None:
    close = make([run_of(a_ns=spread(middle)) for middle in (1000, 1002, 998, 1001)])
    apart = make([run_of(a_ns=spread(middle)) for middle in (1000, 1060, 950, 1010)])
    slow = [run_of(a_ns=spread(1080))]
    assert only(check.compare(close, slow))["status"] == "regression"
    row = only(check.compare(apart, slow))
    assert row["status"] == "undecided"
    assert row["limit"] > 1.08
    assert "step" not in " ".join(check.compare(close, slow)["notes"])


def test_what_is_exact_needs_one_sample_and_has_no_noise() -> None:
    held = make([run_of(a_count=value) for value in (100, 100, 120)])
    assert only(check.compare(held, [run_of(a_count=119)]))["status"] == "ok", "the baseline saw as many"
    assert only(check.compare(held, [run_of(a_count=121)]))["status"] == "regression"
    none = make([run_of(a_count=0)])
    assert only(check.compare(none, [run_of(a_count=0)]))["status"] == "ok"
    row = only(check.compare(none, [run_of(a_count=1)]))
    assert (row["status"], row["ratio"]) == ("regression", None)


def test_times_of_nothing() -> None:
    held = make([run_of(a_ns=np.zeros(20))])
    assert only(check.compare(held, [run_of(a_ns=np.zeros(20))]))["status"] == "ok"
    assert only(check.compare(held, [run_of(a_ns=spread(50))]))["status"] == "regression"
    now_and_then = np.where(np.arange(20) % 10 == 0, 50.0, 0.0)
    assert only(check.compare(held, [run_of(a_ns=now_and_then)]))["status"] == "ok"


def test_samples_of_0_among_others() -> None:
    """A ratio of logarithms does not exist; the change is one in shares of the median."""
    before = np.append(spread(1000, 19), 0.0)
    held = make([run_of(a_ns=before)])
    row = only(check.compare(held, [run_of(a_ns=before * 1.2)]))
    assert row["status"] == "regression"
    assert row["ratio"] == pytest.approx(1.2, abs=0.01)
    assert only(check.compare(held, [run_of(a_ns=before * 1.02)]))["status"] == "ok"
    assert only(check.compare(held, [run_of(a_ns=before * 0.5)]))["status"] == "improvement"


def test_extremes_of_what_a_file_may_hold() -> None:
    for smallest in (1e-300, 1e-8):
        held = make([run_of(a_ns=spread(smallest)), run_of(a_ns=spread(1e17))])
        assert only(check.compare(held, [run_of(a_ns=spread(9e17))]))["ratio"] > 1
        held = make([run_of(a_ns=spread(smallest))])
        assert only(check.compare(held, [run_of(a_ns=spread(9e17))]))["status"] == "regression"
    with pytest.raises(UsageError, match="numbers from 0"):
        run_of(a_ns=[1.0, float("nan")])
    with pytest.raises(UsageError, match="numbers from 0"):
        run_of(a_ns=[1e19])


def test_a_missing_metric_fails_and_a_new_one_does_not() -> None:
    held = make([run_of(a_ns=spread(10), b_ns=spread(10))])
    found = check.compare(held, [run_of(a_ns=spread(10), c_ns=spread(10))])
    assert not found["passed"]
    [row] = found["missing"]
    assert (row["metric"], row["after"], row["reason"]) == ("b_ns", None, "not measured")
    assert [row["metric"] for row in found["new"]] == ["c_ns"]
    one_of_two = check.compare(held, [run_of(a_ns=spread(10), b_ns=spread(10)), run_of(a_ns=spread(10))])
    assert one_of_two["missing"][0]["reason"] == "not measured, in 1 of 2 runs"


def test_another_unit_is_missing_too() -> None:
    held = make([run_of(a_ns=spread(10))])
    found = check.compare(held, [Run("samples", held.conditions, {"a_ns": Metric(np.array([1.0]), "bytes")})])
    assert found["missing"][0]["reason"] == "the baseline has it in ns"


def test_a_gate_that_cannot_fail_is_none() -> None:
    held = make([run_of(a_ns=spread(10))])
    shut = dataclasses.replace(held, metrics={"a_ns": dataclasses.replace(held.metrics["a_ns"], gate=False)})
    with pytest.raises(UsageError, match="no metric of the baseline can fail"):
        check.compare(shut, [run_of(a_ns=spread(10))])


def test_what_informs_does_not_fail() -> None:
    rng = np.random.default_rng(10)
    first, second = (trace_run(rng, 30, 0, informing=5) for _ in range(2))
    metrics = dict(second.metrics)
    metrics["kernel/0/gpu_ns"] = dataclasses.replace(metrics["kernel/0/gpu_ns"], samples=np.full(30, 5e6))
    del metrics["kernel/1/gpu_ns"]
    found = check.compare(make([first]), [dataclasses.replace(second, metrics=metrics)])
    assert found["passed"]
    assert [(row["metric"], row["status"]) for row in found["informing"]] == [
        ("kernel/0/gpu_ns", "regression"),
        ("kernel/1/gpu_ns", "missing"),
    ]


# ---------------------------------------------------------------- conditions


def test_another_gpu_neither_passes_nor_fails() -> None:
    card, other = (of_samples({"a_ns": spread(10)}, gpu=f"GPU {name}", tool="timer") for name in "AB")
    held = make([card])
    with pytest.raises(UsageError, match="gpu: GPU A, now GPU B"):
        check.compare(held, [other])
    found = check.compare(held, [other], other_conditions=True)
    assert found["passed"]
    assert found["conditions"] == [{"name": "gpu", "baseline": "GPU A", "now": "GPU B", "decisive": True}]


@pytest.mark.parametrize(
    ("condition", "decisive"),
    [("cpu", True), ("tool", True), ("selection", True), ("driver", False), ("torch", False), ("tool_version", False)],
)
def test_which_conditions_decide(condition: str, decisive: bool) -> None:
    held = make([of_samples({"a_ns": spread(10)}, **{condition: "one"})])
    runs = [of_samples({"a_ns": spread(10)}, **{condition: "two"})]
    if decisive:
        with pytest.raises(UsageError, match=f"{condition}: one, now two"):
            check.compare(held, runs)
    else:
        assert check.compare(held, runs)["conditions"][0]["name"] == condition


def test_what_one_side_does_not_say_is_said() -> None:
    found = check.compare(make([of_samples({"a_ns": spread(10)}, gpu="GPU")]), [of_samples({"a_ns": spread(10)})])
    assert found["passed"]
    assert found["conditions"] == [{"name": "gpu", "baseline": "GPU", "now": None, "decisive": False}]


def test_runs_of_another_kind_share_nothing() -> None:
    held = make([of_samples({"a_ns": spread(10)})])
    with pytest.raises(UsageError, match="of samples, and this is a run of trace"):
        check.compare(held, [trace_run(np.random.default_rng(0), 5, 0)])
    with pytest.raises(UsageError, match="no runs"):
        check.compare(held, [])
    with pytest.raises(UsageError, match="no such condition: host"):
        of_samples({"a_ns": [1]}, host="somewhere")
    with pytest.raises(UsageError, match="samples of something"):
        of_samples({})


# ---------------------------------------------------------------- what a run is: traces


def loop(path: Path, times_ns: Sequence[float], *, kernels: int = 6) -> Path:
    """A training loop on a GPU that is never idle; each step takes what it is told to. It never ran on a GPU."""
    out, process, main = planted.Export(), planted.Export.process(7), planted.Export.thread(7, 7)
    cpu, gpu = 1_000_000, 1_100_000
    for time in times_ns:
        begun, left = cpu, round(time)
        for i in range(kernels):
            call = out.call("cudaLaunchKernel_v7000", main, cpu, cpu + 4_000)
            part = left // (kernels - i)
            left -= part
            out.kernel(f"void gemm_{i % 2}<float>(int)", gpu, gpu + part, call, process)
            cpu, gpu = cpu + 6_000, gpu + part
        out.range("step", main, begun, cpu)
    return out.write(path)


@pytest.mark.parametrize("fault", [None, "starved", "sync", "tiny", "pageable"])
def test_metrics_of_a_planted_trace_are_what_was_planted(fault: Any, tmp_path: Path) -> None:
    path = tmp_path / "planted.sqlite"
    truth = planted.training(path, fault, steps=9, seed=3)
    trace = nsightkit.load(path)
    run = run_metrics.of_trace(trace)
    sums = {name: float(metric.samples.sum()) for name, metric in run.metrics.items()}
    assert all(len(metric.samples) == 9 for name, metric in run.metrics.items() if not name.endswith("per_s"))
    # Steps last from the first one's range to the end of the last one's work, and busy and idle time are all of that.
    ranges = trace.table("ranges")
    ranges = ranges[ranges["name"] == "step"]
    end = max(int(trace.table(table)["end_ns"].max()) for table in ("kernels", "memops"))
    wall = max(end, int(ranges["end_ns"].max())) - int(ranges["start_ns"].min())
    assert sums["step/time_ns"] == wall
    assert sums["step/busy_ns"] == truth["busy_ns"]
    assert sums["step/idle_ns"] == wall - truth["busy_ns"]
    gaps = {name.split("/")[1]: total for name, total in sums.items() if name.startswith("gap/") and total}
    assert gaps == {cause: total for cause, total in truth["gaps"].items() if total}
    assert sums["step/kernel_count"] == sum(count for count, _ in truth["kernels"].values())
    total = sum(total for _, total in truth["kernels"].values())
    for kind in ("category", "kernel"):
        assert sum(value for name, value in sums.items() if name.startswith(f"{kind}/")) == total
    moved = {"pageable": 64 << 20}.get(fault, 1 << 16)
    assert set(run.metrics["copies/HtoD/bytes"].samples) == {moved}
    readings = 8 * 4 if fault == "sync" else 0
    assert set(run.metrics["step/copied_bytes"].samples) == {moved + readings}
    assert {name for name, metric in run.metrics.items() if metric.gate} == {
        *("step/time_ns", "step/busy_ns", "step/kernel_count", "step/copied_bytes")
    }
    assert run.conditions["gpu"] == "Synthetic GPU (planted trace)"


def test_steps_last_until_their_work_is_done(tmp_path: Path) -> None:
    """The CPU launches all of a short loop in no time; its windows would say nothing of the GPU's pace."""
    times = [3_000_000, 5_000_000, 4_000_000]
    run = run_metrics.of_trace(nsightkit.load(loop(tmp_path / "loop.sqlite", times)))
    # The GPU begins 0.1 ms after the first step does.
    assert run.metrics["step/time_ns"].samples.tolist() == [3_100_000, 5_000_000, 4_000_000]
    assert run.metrics["step/busy_ns"].samples.tolist() == times
    assert run.metrics["kernel/gemm_0/gpu_ns"].samples.tolist() == [t / 2 for t in times]


def test_a_trace_of_a_cpu_has_the_cpus_steps(tmp_path: Path) -> None:
    source = nsightkit.load(loop(tmp_path / "loop.sqlite", [1e6] * 4))
    ranges = source.table("ranges")
    meta = nsightkit.trace.TraceMeta(tool="planted", missing=["kernels", "memops", "graphs", "calls"])
    run = run_metrics.of_trace(nsightkit.trace.Trace.from_frames({"ranges": ranges}, meta))
    assert list(run.metrics) == ["step/time_ns"]
    assert run.metrics["step/time_ns"].samples.tolist() == [36_000.0] * 4
    held = make([run_metrics.of_trace(source)])
    with pytest.raises(UsageError, match="tool"):
        check.compare(held, [run])
    missing = check.compare(held, [run], other_conditions=True)["missing"]
    assert {(row["metric"], row["reason"]) for row in missing} == {
        ("step/busy_ns", "not recorded"),
        ("step/kernel_count", "not recorded"),
        ("step/copied_bytes", "not recorded"),
    }


def test_a_trace_without_steps_has_one_sample_of_each(tmp_path: Path) -> None:
    source = nsightkit.load(loop(tmp_path / "loop.sqlite", [1e6] * 4))
    tables = {name: source.table(name) for name in ("kernels", "calls")}
    bare = nsightkit.trace.Trace.from_frames(tables, source.meta)
    run = run_metrics.of_trace(bare)
    assert run.metrics["trace/span_ns"].samples.tolist() == [4e6]
    assert run.metrics["trace/kernel_count"].samples.tolist() == [24]
    assert run.metrics["kernel/gemm_1/gpu_ns"].samples.tolist() == [2e6]
    lost = check.compare(make([run_metrics.of_trace(source)]), [run])["missing"]
    assert {row["reason"] for row in lost} == {"the trace has no steps"}
    with pytest.raises(UsageError, match="--match"):
        run_metrics.of_trace(bare, match="nothing")
    with pytest.raises(TraceError, match="neither steps nor operations"):
        run_metrics.of_trace(nsightkit.trace.Trace.from_frames({"calls": tables["calls"]}, source.meta))


def test_a_part_of_a_trace(tmp_path: Path) -> None:
    """A filter leaves the steps' ranges out, and they are steps all the same."""
    from nsightkit.analysis.timeline.selection import select

    planted.training(tmp_path / "t.sqlite", steps=6)
    trace = nsightkit.load(tmp_path / "t.sqlite")
    forward = run_metrics.of_trace(select(trace, within="^forward$"))
    assert forward.metrics["step/kernel_count"].samples.tolist() == [24] * 6
    assert len(run_metrics.of_trace(select(trace, last_steps=4)).metrics["step/time_ns"].samples) == 4


def test_kernels_beyond_the_first_ten_are_looked_at_and_not_kept(tmp_path: Path) -> None:
    out, process, main = planted.Export(), planted.Export.process(7), planted.Export.thread(7, 7)
    words = ["add", "mul", "sub", "div", "exp", "log", "tanh", "relu", "gelu", "silu", "sort", "scan"]
    for step in range(3):
        begun = 1_000_000 + step * 1_000_000
        for i, word in enumerate(words):
            call = out.call("cudaLaunchKernel", main, begun + i * 9_000, begun + i * 9_000 + 4_000)
            out.kernel(f"{word}_kernel(int)", begun + i * 10_000 + 5_000, begun + i * 10_000 + 6_000 + i, call, process)
        out.range("step", main, begun, begun + 900_000)
    run = run_metrics.of_trace(nsightkit.load(out.write(tmp_path / "many.sqlite")))
    held = make([run])
    assert sum(name.startswith("kernel/") for name in run.metrics) == 12
    assert sorted(name.split("/")[1] for name in held.metrics if name.startswith("kernel/")) == sorted(
        f"{word}_kernel" for word in words[2:]
    )
    found = check.compare(held, [run])
    assert found["new"] == found["informing"] == []


def test_hostile_names_become_names_of_metrics(tmp_path: Path) -> None:
    out, process, main = planted.Export(), planted.Export.process(7), planted.Export.thread(7, 7)
    names = ["\x1b[31m\r\nx" * 3, "<script>alert(1)</script>", "long_" * 400 + "a", "long_" * 400 + "b", "", "π \u202e"]
    for step in range(2):
        begun = 1_000_000 + step * 1_000_000
        for i, name in enumerate(names):
            call = out.call("cudaLaunchKernel", main, begun + i * 9_000, begun + i * 9_000 + 4_000)
            out.kernel(name, begun + i * 10_000 + 5_000, begun + i * 10_000 + 9_000, call, process)
        out.range("step", main, begun, begun + 900_000)
    run = run_metrics.of_trace(nsightkit.load(out.write(tmp_path / "hostile.sqlite")))
    kernels = [name for name in run.metrics if name.startswith("kernel/")]
    assert len(kernels) == len(set(kernels)) == len(names)
    assert all(name.isprintable() and len(name) <= 240 for name in kernels)
    baselines.write(make([run]), tmp_path / "b.json")
    assert set(baselines.read(tmp_path / "b.json").metrics) >= set(kernels)


# ---------------------------------------------------------------- what a run is: benchmarks and reports


def bench_document(seed: int = 0, slower: float = 1.0, gpu: str | None = "NVIDIA H200", **row: Any) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    cell = {
        "config": "small", "params": 1, "batch": 4, "context": 512, "mode": "train", "precision": "bf16",
        "attention": "sdpa", "compiled": False, "accumulate": 1, "nvtx": False, "annotate_mha": False, "status": "ok",
        "where": None, "detail": None, "requested_bytes": None, "first_step_ns": 900_000_000,
        "peak_allocated_bytes": 10_000_000_000, "peak_reserved_bytes": 11_000_000_000, "clock": "cuda-event",
    }  # fmt: skip
    rows = [
        cell | {"mode": mode, "samples_ns": [int(t) for t in steps_of(rng, 30, 0.003, slower)]} | row
        for mode in ("fwd", "train")
    ]
    software = {"torch": "2.9.0", "cuda": "13.0"}
    provenance = {"gpu": gpu and {"name": gpu, "driver": "580.1"}, "cpu": {"model": "A CPU"}, "software": software}
    device = "cpu" if gpu is None else "cuda"
    return {
        "format": 1, "nsightkit": "0.1.0", "device": device, "gpu": gpu, "warmup": 5, "steps": 30,
        "memory_cap_bytes": None, "measured_tflops": None, "provenance": provenance, "rows": rows,
    }  # fmt: skip


def test_a_benchmark() -> None:
    run = run_metrics.of_bench(bench_document(attention="naive", compiled=True, accumulate=2))
    cell = "bench/small batch 4 context 512 fwd bf16 naive accumulate 2 compiled"
    assert {
        f"{cell}/{name}" for name in ("step_ns", "first_step_ns", "peak_allocated_bytes", "peak_reserved_bytes")
    } == {name for name in run.metrics if " fwd " in name}
    assert {name.rpartition("/")[2] for name, metric in run.metrics.items() if metric.gate} == {
        "step_ns",
        "peak_allocated_bytes",
    }
    assert {k: v for k, v in run.conditions.items() if v} == {
        "gpu": "NVIDIA H200", "driver": "580.1", "cuda": "13.0", "torch": "2.9.0", "tool": "nsightkit bench",
        "tool_version": "0.1.0",
    }  # fmt: skip
    on_cpu = run_metrics.of_bench(bench_document(gpu=None)).conditions
    assert (on_cpu["gpu"], on_cpu["cpu"]) == ("none", "A CPU")


def test_a_cell_that_ran_out_of_memory_is_missing() -> None:
    held = make([run_metrics.of_bench(bench_document())])
    document = bench_document()
    document["rows"][1] |= {"status": "oom", "where": "backward", "samples_ns": []}
    missing = check.compare(held, [run_metrics.of_bench(document)])["missing"]
    assert {row["reason"] for row in missing} == {"oom in backward"}
    assert {row["metric"].rpartition("/")[2] for row in missing} == {"step_ns", "peak_allocated_bytes"}


DAMAGED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "newer": (lambda d: d.update(format=2), "format 2"),
    "no rows": (lambda d: d.update(rows=None), "damaged"),
    "short rows": (lambda d: d.update(rows=[{"config": "x"}]), "damaged"),
    "a sample that is none": (lambda d: d["rows"][0].update(samples_ns=[1, None]), "damaged"),
    "text": (lambda d: d["rows"][0].update(samples_ns=["x"]), "damaged"),
    "no samples": (lambda d: d["rows"][0].update(samples_ns=[]), "damaged"),
    "negative": (lambda d: d["rows"][0].update(samples_ns=[-1]), "damaged"),
    "no first step": (lambda d: d["rows"][0].update(first_step_ns=None), "damaged"),
    "provenance": (lambda d: d.update(provenance=[1]), "damaged"),
    "twice": (lambda d: d["rows"][1].update(mode="fwd"), "twice"),
    "nothing ran": (lambda d: [row.update(status="failed") for row in d["rows"]], "no cell ran"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_benchmarks(case: str) -> None:
    change, says = DAMAGED[case]
    document = bench_document()
    change(document)
    with pytest.raises(TraceError, match=says):
        run_metrics.of_bench(document, "bench.json")


def ncu_report(times: Sequence[float], name: str = "void kernel<float>(int)", **columns: Any) -> ncu_reports.Report:
    identities = [{"kernel": name, "gpu": "NVIDIA H100", "grid": "(64, 1, 1)"} | columns for _ in times]
    metrics: list[dict[str, Any]] = [
        {"gpu__time_duration.sum": time, "sm__throughput.avg.pct_of_peak_sustained_elapsed": 55.0} for time in times
    ]
    return ncu_reports.from_metrics("report", identities, metrics, {"gpu__time_duration.sum": "ns"})


def test_a_report_with_a_launch_of_each_kernel() -> None:
    held = make([run_metrics.of_report(ncu_report([10_000]))])
    assert set(held.metrics) == {"kernel/kernel/time_ns", "kernel/kernel/sm_pct"}
    for time, status in ((10_900, "ok"), (11_200, "regression"), (8_000, "improvement")):
        row = only(check.compare(held, [run_metrics.of_report(ncu_report([time]))]))
        assert row["status"] == status
        assert row["limit"] == pytest.approx(1.1)
        assert "few launches" in row["reason"]
    wider = check.compare(held, [run_metrics.of_report(ncu_report([11_200]))], 0.2)
    assert wider["passed"]


def test_a_report_with_many_launches_has_intervals() -> None:
    held = make([run_metrics.of_report(ncu_report(spread(10_000)))])
    assert only(check.compare(held, [run_metrics.of_report(ncu_report(spread(10_700)))]))["status"] == "regression"
    assert only(check.compare(held, [run_metrics.of_report(ncu_report(spread(10_300)))]))["status"] == "ok"


def test_launches_with_several_grids_are_several_kernels() -> None:
    identities = [{"kernel": "gemm", "gpu": "NVIDIA H100", "grid": grid} for grid in ("(1, 1, 1)", "(64, 1, 1)")]
    metrics: list[dict[str, Any]] = [{"gpu__time_duration.sum": time} for time in (10.0, 9000.0)]
    run = run_metrics.of_report(ncu_reports.from_metrics("r", identities, metrics, {"gpu__time_duration.sum": "ns"}))
    assert {name: metric.gate for name, metric in run.metrics.items()} == {
        "kernel/gemm grid (1, 1, 1)/time_ns": False,  # next to nothing of the time: it informs
        "kernel/gemm grid (64, 1, 1)/time_ns": True,
    }
    with pytest.raises(TraceError, match="neither times nor throughputs"):
        run_metrics.of_report(ncu_reports.from_metrics("r", identities, [{}, {}], {}))


# ---------------------------------------------------------------- the baseline


SCHEMA = json.loads(Path(baselines.__file__).with_name("baseline.schema.json").read_text(encoding="utf-8"))


def valid(path: Path) -> Any:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    document = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.validate(document, SCHEMA, cls=jsonschema.Draft202012Validator)
    return document


def test_there_and_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(11)
    made = make([trace_run(rng, 100, 0.01) for _ in range(3)], command="python train.py --steps 100")
    path = tmp_path / "baseline.json"
    baselines.write(made, path)
    valid(path)
    back = baselines.read(path)
    assert (back.of, back.conditions, list(back.metrics)) == (made.of, made.conditions, list(made.metrics))
    assert back.conditions["command"] == "python train.py --steps 100"
    assert back.runs == 3
    for name, kept in made.metrics.items():
        read = back.metrics[name]
        assert (read.unit, read.direction, read.gate, read.tolerance) == (kept.unit, kept.direction, kept.gate, None)
        assert all(np.allclose(a, b, rtol=1e-6) for a, b in zip(read.runs, kept.runs, strict=True))
    again = tmp_path / "again.json"
    baselines.write(back, again)
    assert again.read_bytes() == path.read_bytes()


def test_many_steps_are_thinned_evenly_and_informing_ones_more() -> None:
    run = trace_run(np.random.default_rng(12), 10_000, 0)
    held = make([run])
    kept = held.metrics["step/time_ns"].runs[0]
    whole = run.metrics["step/time_ns"].samples
    assert len(kept) == 40
    assert (kept[0], kept[-1]) == (whole.min(), whole.max())
    assert np.median(kept) == pytest.approx(np.median(whole), rel=0.002)
    assert len(held.metrics["step/idle_ns"].runs[0]) == 9


def test_a_run_that_is_added_adds_lines_and_changes_few(tmp_path: Path) -> None:
    rng = np.random.default_rng(13)
    runs = [trace_run(rng, 30, 0.01) for _ in range(3)]
    path = tmp_path / "baseline.json"
    first = make(runs[:2])
    baselines.write(first, path)
    old = path.read_text().splitlines()
    baselines.write(make(runs[2:], first, add=True), path)
    new = path.read_text().splitlines()
    assert len(new) - len(old) == len(first.metrics)
    gone = [line for line in old if line not in new]
    # The values, and the last of the old lines, which gets a comma.
    assert len(gone) <= 2 * len(first.metrics)
    assert baselines.read(path).runs == 3


def test_the_oldest_runs_go(tmp_path: Path) -> None:
    held = make([run_of(a_ns=spread(1000 + i)) for i in range(15)])
    held = make([run_of(a_ns=spread(2000 + i)) for i in range(10)], held, add=True)
    assert held.runs == baselines.MOST_RUNS == 20
    assert held.metrics["a_ns"].runs[0].min() == pytest.approx(1005 * 0.99)


def test_what_people_set_stays(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    baselines.write(make([trace_run(np.random.default_rng(14), 30, 0)], command="make bench"), path)
    document = json.loads(path.read_text())
    document["metrics"]["step/idle_ns"] |= {"gate": True, "tolerance": 0.5}
    document["metrics"]["step/busy_ns"]["gate"] = False
    document["metrics"]["step/kernel_count"]["direction"] = "neither"
    path.write_text(json.dumps(document))
    edited = baselines.read(path)
    for add in (False, True):
        again = make([trace_run(np.random.default_rng(15), 30, 0)], edited, add=add).metrics
        assert (again["step/idle_ns"].gate, again["step/idle_ns"].tolerance) == (True, 0.5)
        assert not again["step/busy_ns"].gate
        assert again["step/kernel_count"].direction == "neither"
        assert len(again["step/idle_ns"].runs) == 1 + add
    assert make([trace_run(np.random.default_rng(15), 30, 0)], edited).conditions["command"] == "make bench"


def test_runs_that_are_not_alike_make_no_baseline() -> None:
    with pytest.raises(UsageError, match="two kinds"):
        make([run_of(a_ns=1), trace_run(np.random.default_rng(0), 5, 0)])
    with pytest.raises(UsageError, match="gpu: A and B"):
        make([of_samples({"a_ns": [1]}, gpu=name) for name in "AB"])
    with pytest.raises(UsageError, match="b_ns was measured in 1 of 2 runs"):
        make([run_of(a_ns=1), run_of(a_ns=1, b_ns=1)])
    held = make([run_of(a_ns=1, b_ns=1)])
    with pytest.raises(UsageError, match="b_ns is in the baseline and not in these runs"):
        make([run_of(a_ns=1)], held, add=True)
    with pytest.raises(UsageError, match="two kinds"):
        make([trace_run(np.random.default_rng(0), 5, 0)], held, add=True)
    informing = Run("samples", held.conditions, {"a_ns": Metric(np.array([1.0]), "ns")})
    with pytest.raises(UsageError, match="nothing in these runs can gate"):
        make([informing])


def _edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[str], str]:
    def edited(text: str) -> str:
        document = json.loads(text)
        change(document)
        return json.dumps(document)

    return edited


BROKEN: dict[str, tuple[Callable[[str], str | bytes], str]] = {
    "empty": (lambda _: "", "not JSON"),
    "not JSON": (lambda _: "hello", "not JSON"),
    "cut": (lambda text: text[:200], "not JSON"),
    "a list": (lambda _: "[1]", "no format and metrics"),
    "not UTF-8": (lambda text: text.encode() + b"\xff", "not UTF-8"),
    "deep": (lambda _: "[" * 100_000, "nests too deeply|not JSON"),
    "huge": (lambda text: text + " " * (17 << 20), "larger than any baseline"),
    "newer": (_edit(lambda d: d.update(format=2)), "format is '2', and this nsightkit knows 1"),
    "no version": (_edit(lambda d: d.pop("format")), "no format and metrics"),
    "true is not a version": (_edit(lambda d: d.update(format=True)), "format is 'True'"),
    "NaN": (lambda text: re.sub(r'"value": [\d.]+', '"value": NaN', text), "NaN is not a number"),
    "infinite": (lambda text: re.sub(r'"value": [\d.]+', '"value": 1e999', text), "is not a number from 0"),
    "long": (lambda text: re.sub(r'"value": [\d.]+', '"value": ' + "9" * 5000, text), "not a baseline"),
    "twice": (lambda text: text.replace('"b_ns"', '"a_ns"'), "'a_ns' stands in it twice"),
    "typing error": (
        _edit(lambda d: d["metrics"]["a_ns"].update(tolerances=1)),
        "has 'tolerances', which means nothing",
    ),
    "lacking": (_edit(lambda d: d["metrics"]["a_ns"].pop("unit")), "lacks unit"),
    "unit": (_edit(lambda d: d["metrics"]["a_ns"].update(unit="s")), "the unit 's'"),
    "direction": (_edit(lambda d: d["metrics"]["a_ns"].update(direction=["up"])), "the direction 'list'"),
    "gate": (_edit(lambda d: d["metrics"]["a_ns"].update(gate=1)), "gate is neither"),
    "tolerance": (_edit(lambda d: d["metrics"]["a_ns"].update(tolerance=500)), "a tolerance of 500"),
    "tolerance of text": (_edit(lambda d: d["metrics"]["a_ns"].update(tolerance="5%")), "'5%' is not a number"),
    "text for samples": (_edit(lambda d: d["metrics"]["a_ns"].update(runs=["12"])), "a run has no samples"),
    "negative": (_edit(lambda d: d["metrics"]["a_ns"]["runs"][0].__setitem__(0, -1)), "is not a number from 0"),
    "true is not a sample": (_edit(lambda d: d["metrics"]["a_ns"]["runs"][0].__setitem__(0, True)), "is not a number"),
    "no runs": (_edit(lambda d: d["metrics"]["a_ns"].update(runs=[])), "has no runs"),
    "an empty run": (_edit(lambda d: d["metrics"]["a_ns"].update(runs=[[]])), "a run has no samples"),
    "many runs": (_edit(lambda d: d["metrics"]["a_ns"].update(runs=[[1]] * 21)), "more than 20"),
    "many samples": (_edit(lambda d: d["metrics"]["a_ns"].update(runs=[[1] * 1001])), "more than 1000"),
    "an edited value": (_edit(lambda d: d["metrics"]["a_ns"].update(value=1)), "is not the median"),
    "no metrics": (_edit(lambda d: d.update(metrics={})), "has no metrics"),
    "a name": (_edit(lambda d: d["metrics"].update({"a\nb": d["metrics"]["a_ns"]})), "is not a name"),
    "a long name": (_edit(lambda d: d["metrics"].update({"x" * 241: d["metrics"]["a_ns"]})), "is not a name"),
    "kind": (_edit(lambda d: d.update(of="dream")), "it is of 'dream'"),
    "conditions": (_edit(lambda d: d["conditions"].update(host="secret")), "conditions has 'host'"),
    "a condition": (_edit(lambda d: d["conditions"].update(gpu={"name": 1})), "neither short text nor null"),
    "a long condition": (_edit(lambda d: d["conditions"].update(gpu="x" * 201)), "neither short text nor null"),
    "a trace": (lambda _: '{"traceEvents": []}', "no format and metrics"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_baselines_are_one_line_and_stay_as_they_are(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, bench = tmp_path / "baseline.json", tmp_path / "bench.json"
    bench.write_text(json.dumps(bench_document()))
    baselines.write(make([run_of(a_ns=spread(1000), b_ns=spread(1000))]), path)
    damage, says = BROKEN[case]
    damaged = damage(path.read_text())
    path.write_bytes(damaged if isinstance(damaged, bytes) else damaged.encode())
    before = path.read_bytes()
    with pytest.raises(TraceError, match=says):
        baselines.read(path)
    for arguments in ([], ["--update"], ["--add"]):
        assert cli.run(["check", str(bench), "--baseline", str(path), *arguments]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert str(path) in err
        assert "Traceback" not in err
        assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["baseline.json", "bench.json"]


@pytest.mark.parametrize("case", [case for case in BROKEN if case not in ("huge", "deep", "long")])
def test_the_schema_refuses_most_of_what_is_refused(case: str, tmp_path: Path) -> None:
    """What only a reader can see: duplicate names, values beside their samples, bytes, names with line breaks."""
    jsonschema = pytest.importorskip("jsonschema")
    path = tmp_path / "baseline.json"
    baselines.write(make([run_of(a_ns=spread(1000), b_ns=spread(1000))]), path)
    damaged = BROKEN[case][0](path.read_text())
    if case in ("twice", "an edited value", "a name", "NaN"):
        return
    try:
        document = json.loads(damaged)
    except ValueError:
        return
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, SCHEMA, cls=jsonschema.Draft202012Validator)


def test_a_baseline_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "baseline.json"
    held = make([run_of(a_ns=spread(1000))])
    baselines.write(held, path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", full)
        with pytest.raises(UsageError, match="No space left"):
            baselines.write(make([run_of(a_ns=spread(2000))]), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["baseline.json"]
    baselines.write(make([run_of(a_ns=spread(2000))]), path)
    assert path.read_bytes() != before
    with pytest.raises(UsageError, match="cannot be written"):
        baselines.write(held, tmp_path / "no" / "such" / "folder.json")


@pytest.mark.skipif(sys.platform == "win32", reason="needs links")
def test_a_link_to_a_baseline_stays_one(tmp_path: Path) -> None:
    target = tmp_path / "kept" / "baseline.json"
    target.parent.mkdir()
    held = make([run_of(a_ns=spread(1000))])
    baselines.write(held, target)
    link = tmp_path / "link.json"
    link.symlink_to(target)
    baselines.write(make([run_of(a_ns=spread(2000))]), link)
    assert link.is_symlink()
    assert baselines.read(target).metrics["a_ns"].runs[0].mean() == pytest.approx(2000)


def test_a_folder_and_an_absent_file_are_no_baseline(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="not a regular file"):
        baselines.read(tmp_path)
    with pytest.raises(TraceError, match="--update"):
        baselines.read(tmp_path / "absent.json")


# ---------------------------------------------------------------- from files to exit codes


@pytest.fixture
def gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any, str]]:
    """Run the command; gives exit code, document and what was said."""

    def call(*arguments: object, baseline: Path = tmp_path / "baseline.json") -> tuple[int, Any, str]:
        code = cli.run(["check", *map(str, arguments), "--baseline", str(baseline), "--format", "json"])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else None, err

    return call


def test_traces_from_end_to_end(tmp_path: Path, gate: Any) -> None:
    """Real files of planted runs: noise passes, 8 % does not, each time."""
    rng = np.random.default_rng(16)

    def captured(name: str, slower: float = 1.0) -> Path:
        return loop(tmp_path / f"{name}.sqlite", steps_of(rng, 30, 0.005, slower))

    code, document, err = gate(*(captured(f"run-{i}") for i in range(5)), "--update", "--command", "python train.py")
    assert (code, document["written"]) == (0, True)
    assert err == f"nsightkit: {tmp_path / 'baseline.json'}: written, 5 runs\n"
    valid(tmp_path / "baseline.json")
    held = (tmp_path / "baseline.json").read_bytes()
    for i in range(2):
        code, document, err = gate(captured(f"again-{i}"))
        assert (code, err, document["passed"], document["baseline_runs"]) == (0, "", True, 5)
        code, document, err = gate(captured(f"slower-{i}", SLOWER))
        assert code == 1
        assert {row["metric"] for row in document["regressions"]} == {"step/time_ns", "step/busy_ns"}
        assert err.startswith(f"nsightkit: the check against {tmp_path / 'baseline.json'} failed: step/busy_ns (+")
        assert err.count("\n") == 1
    code, document, _ = gate(*(captured(f"more-{i}", SLOWER) for i in range(3)))
    assert (code, document["runs"]) == (1, 3)
    assert (tmp_path / "baseline.json").read_bytes() == held, "only --update and --add write"


def test_the_cause_stands_beside_the_regression(tmp_path: Path, gate: Any) -> None:
    planted.training(tmp_path / "before.sqlite", steps=12, seed=1)
    planted.training(tmp_path / "after.sqlite", "sync", steps=12, seed=2)
    assert gate(tmp_path / "before.sqlite", "--update")[0] == 0
    code, document, _ = gate(tmp_path / "after.sqlite")
    assert code == 1
    assert [row["metric"] for row in document["regressions"]] == ["step/time_ns"]
    assert "gap/synchronization/idle_ns" in [row["metric"] for row in document["informing"]][:2]


def test_benchmarks_from_end_to_end(tmp_path: Path, gate: Any) -> None:
    path = tmp_path / "bench.json"

    def measured(seed: int, slower: float = 1.0, gpu: str = "NVIDIA H200") -> Path:
        path.write_text(json.dumps(bench_document(seed, slower, gpu), indent=2))
        return path

    for seed in range(4):
        assert gate(measured(seed), "--add")[0] == 0
    assert baselines.read(tmp_path / "baseline.json").runs == 4
    assert gate(measured(10))[0] == 0
    code, document, _ = gate(measured(11, SLOWER))
    assert (code, len(document["regressions"])) == (1, 2)
    code, document, err = gate(measured(12, gpu="NVIDIA H100"))
    assert (code, document) == (2, None)
    assert "gpu: NVIDIA H200, now NVIDIA H100" in err
    assert "--allow-other-conditions" in err
    code, document, err = gate(measured(13, gpu="NVIDIA H100"), "--allow-other-conditions")
    assert code == 0
    assert err == "nsightkit: gpu is not the baseline's: NVIDIA H100, there NVIDIA H200\n"
    code, _, err = gate(measured(14, gpu="NVIDIA H100"), "--add")
    assert code == 2
    assert baselines.read(tmp_path / "baseline.json").runs == 4
    assert gate(measured(15, gpu="NVIDIA H100"), "--update")[0] == 0
    assert baselines.read(tmp_path / "baseline.json").conditions["gpu"] == "NVIDIA H100"


def test_an_update_shows_what_it_accepts(tmp_path: Path, gate: Any) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(bench_document(0)))
    gate(path, "--update")
    path.write_text(json.dumps(bench_document(1, 1.3)))
    code, document, _ = gate(path, "--update")
    assert (code, document["passed"], document["written"]) == (0, False, True)
    assert len(document["regressions"]) == 2
    assert gate(path)[0] == 0


def test_one_step_cannot_tell(tmp_path: Path, gate: Any) -> None:
    assert gate(loop(tmp_path / "a.sqlite", [1e6]), "--update")[0] == 0
    code, document, err = gate(loop(tmp_path / "b.sqlite", [3e6]))
    assert (code, document["decided"], document["regressions"]) == (2, False, [])
    assert "cannot tell whether step/busy_ns became worse: +200.0 % in 1 and 1 samples" in err
    assert "record more steps" in err
    assert err.count("\n") == 1
    assert gate(loop(tmp_path / "c.sqlite", [1.01e6]))[0] == 0


def test_the_part_that_is_looked_at_must_be_the_same(tmp_path: Path, gate: Any) -> None:
    trace = loop(tmp_path / "a.sqlite", [1e6] * 12)
    assert gate(trace, "--update", "--last-steps", 9, "--match", "^step$")[0] == 0
    assert baselines.read(tmp_path / "baseline.json").conditions["selection"] == "--last-steps 9 --match ^step$"
    assert gate(trace, "--last-steps", 9, "--match", "^step$")[0] == 0
    code, _, err = gate(trace)
    assert code == 2
    assert "selection: --last-steps 9 --match ^step$, now none" in err


def test_several_kinds_of_files_and_bad_ones(tmp_path: Path, gate: Any) -> None:
    trace, bench = loop(tmp_path / "a.sqlite", [1e6] * 12), tmp_path / "bench.json"
    bench.write_text(json.dumps(bench_document()))
    cases = {
        "two kinds": [trace, bench, "--update"],
        "make it with": [trace],
        "is not a trace, so no part of it": [bench, "--update", "--last-steps", 3],
        "no such file": [tmp_path / "absent.sqlite", "--update"],
        "--command": [trace, "--command", "make"],
        "nothing": [],
    }
    for says, arguments in cases.items():
        code, document, err = gate(*arguments)
        assert (code, document, err.count("\n")) == (2, None, 1), err
        assert says in err or says == "nothing"
    gate(bench, "--update")
    for name, data, says in (
        ("cut.json", json.dumps(bench_document())[:300], "is not JSON"),
        ("none.json", '{"nsightkit": "1"}', "no rows"),
        ("empty.csv", "Kernel Name\n", "empty.csv"),
        ("baseline.json", None, "a baseline is given with --baseline"),
    ):
        path = tmp_path / name
        if data is not None:
            path.write_text(data)
        code, document, err = gate(path)
        assert (code, document, err.count("\n")) == (2, None, 1), err
        assert says in err


def test_a_real_pair_of_captures(shared_traces: Path, gate: Any) -> None:
    """ResNet-50 with and without workers that load data; known: 0.14 and 0.18 s a step, all of it waiting for data."""
    few, many = (next(shared_traces.glob(f"kineto/resnet50_num_workers_{n}__*")) for n in (0, 4))
    assert gate(many, "--update")[0] == 0
    assert gate(many)[0] == 0
    code, document, err = gate(few)
    # Two of the six steps with workers stand out; each other one is 47 ms shorter than any without, and none of them
    # differ by so much. So says diff of the same files.
    assert code == 1
    assert [row["metric"] for row in document["regressions"]] == ["step/time_ns"]
    assert document["regressions"][0]["ratio"] == pytest.approx(177.4 / 126.7, abs=0.1)  # medians
    assert document["regressions"][0]["limit"] < document["regressions"][0]["ratio"]
    assert "one run on each side, so differences between runs are not known" in err
    assert "gap/input-pipeline/idle_ns" in [row["metric"] for row in document["informing"]]


def test_another_card_in_real_captures(shared_traces: Path, gate: Any) -> None:
    control, other = (next(shared_traces.glob(f"hta/trace_diff__{name}__*")) for name in ("control", "test"))
    assert gate(control, "--update")[0] == 0
    code, _, err = gate(other)
    assert code == 2
    assert "A100" in err
    assert "V100" in err


def test_real_reports(shared_traces: Path, gate: Any) -> None:
    slow, fast = (shared_traces / f"armleth/report{name}.ncu-rep" for name in ("_v4_8_per_thread", ""))
    pytest.importorskip("ncu_report")
    assert gate(fast, "--update")[0] == 0
    assert gate(fast)[0] == 0
    code, document, _ = gate(slow)
    assert code == 1
    assert [row["metric"] for row in document["regressions"]] == ["kernel/matrix_addition2d/time_ns"]


def test_nothing_of_the_machine_or_the_user_gets_in(tmp_path: Path, gate: Any, shared_traces: Path) -> None:
    copy = tmp_path / "secret-folder"
    copy.mkdir()
    trace = copy / "secret-name.sqlite"
    shutil.copy(shared_traces / "cs336-zx3xyy/result_2_7B_nvtx.sqlite", trace)
    assert gate(trace, "--update")[0] == 0
    text = (tmp_path / "baseline.json").read_text()
    assert "secret" not in text
    assert "/" not in re.sub(r'"(trace|category|kernel|gap|copies)/[^"]*"', "", text)
    for word in (os.environ.get("HOME", ""), os.uname().nodename):
        assert len(word) < 3 or word not in text


# ---------------------------------------------------------------- the job in the documentation


JOB = Path(__file__).parents[3] / "docs" / "ci" / "performance-gate.yml"
#: Stands for the command: `bench` gives the next of some documents, all else is the real thing.
COMMAND = """#!/bin/sh
if [ "$1" = bench ]; then
  for last; do case "$last" in *.json) cp "documents/$last" "$last" ;; esac; done
else
  exec "{python}" -m nsightkit "$@"
fi
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("slower", "width", "code", "measured"),
    [(1.0, 0.01, 0, 3), (1.1, 0.01, 1, 3), (1.15, 0.6, 2, 6)],
    ids=["as ever", "slower", "who can say"],
)
def test_the_job_of_the_documentation(slower: float, width: float, code: int, measured: int, tmp_path: Path) -> None:
    job = pytest.importorskip("yaml").safe_load(JOB.read_text(encoding="utf-8"))
    steps = {step["name"]: step for step in job["jobs"]["gate"]["steps"] if "name" in step}
    environment = {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(Path(nsightkit.__file__).parents[1]),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        **{name: str(value) for name, value in job["env"].items()},
    }
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nsightkit").write_text(COMMAND.format(python=sys.executable))
    (tmp_path / "bin" / "nsightkit").chmod(0o755)
    (tmp_path / "performance").mkdir()

    def measured_as(slower: float) -> None:
        (tmp_path / "documents").mkdir(exist_ok=True)
        for run in range(1, 7):
            document = bench_document()
            for row in document["rows"]:
                row["samples_ns"] = [int(time) for time in spread(1e7 * slower * (1 + run / 1000), 30, width)]
            (tmp_path / "documents" / f"run-{run}.json").write_text(json.dumps(document))

    def step(name: str) -> subprocess.CompletedProcess[str]:
        # As a runner does it: `shell: bash` is bash -eo pipefail.
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", steps[name]["run"]]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    measured_as(1.0)
    assert step("Measure").returncode == 0
    update = step("Update")
    assert update.returncode == 0, update.stderr
    assert "--precision bf16" in baselines.read(tmp_path / job["env"]["BASELINE"]).conditions["command"]
    measured_as(slower)
    assert step("Measure").returncode == 0
    done = step("Check")
    assert done.returncode == code, done.stderr
    assert len(list(tmp_path.glob("run-*.json"))) == measured
    summary = (tmp_path / "summary.md").read_text()
    assert {0: "ok ", 1: "FAILS", 2: "cannot tell"}[code] in summary
    assert "step_ns" in done.stdout
