"""The gate: what it must catch, what it must let pass, and what it must refuse to decide."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from synthetic import planted

import nsightkit
from nsightkit import cli
from nsightkit.analysis.compare import baseline as baselines
from nsightkit.analysis.compare import check
from nsightkit.analysis.compare import runs as run_metrics
from nsightkit.analysis.compare.baseline import Baseline, make
from nsightkit.analysis.compare.runs import Metric, Run, of_samples
from nsightkit.analysis.timeline.selection import select
from nsightkit.errors import TraceError, UsageError
from nsightkit.trace import Trace
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


def trace_run(rng: np.random.Generator, count: int, between: float, slower: float = 1.0) -> Run:
    """A run with the metrics of a trace: times that can fail, exact ones, and one that informs."""
    time = steps_of(rng, count, between, slower)
    busy = time * (0.8 + rng.normal(0, 0.005, count))
    metrics = {
        "step/time_ns": Metric(time, "ns"),
        "step/busy_ns": Metric(busy, "ns"),
        "step/idle_ns": Metric(time - busy, "ns", gate=False),
        "step/kernel_count": Metric(np.full(count, 700.0), "count"),
        "step/copied_bytes": Metric(np.full(count, 65536.0), "bytes"),
    }
    return Run("trace", {"gpu": "Synthetic GPU", "tool": "planted"}, metrics)


def bench_run(rng: np.random.Generator, count: int, between: float, slower: float = 1.0) -> Run:
    """A benchmark of twelve cells, each run separately; the first is the slower one."""
    samples = {}
    for cell in range(12):
        samples[f"cell {cell} step_ns"] = steps_of(rng, count, between, 1.0 if cell else slower)
    return of_samples(samples)


def simulate(
    seed: int, run: Callable[..., Run], slower: float = 1.0, *, baseline: int, runs: int, steps: int, between: float
) -> tuple[list[str], list[float]]:
    """Check some times, each against a fresh baseline of some runs: what came out, and the limits."""
    rng = np.random.default_rng(seed)
    outcomes, limits = [], []
    for _ in range(CAUGHT if slower > 1 else RUNS):
        held = make([run(rng, steps, between) for _ in range(baseline)])
        checked = check.compare(held, [run(rng, steps, between, slower) for _ in range(runs)])
        outcome = "passed" if checked["passed"] else "inconclusive"
        outcomes.append("failed" if checked["regressions"] else outcome)
        limits.append(checked["gates"][0]["limit"])
    return outcomes, limits


#: What `docs/gate.md` promises: runs in the baseline, runs checked, steps, and how far runs differ.
PROMISED = {
    "one run each on a quiet machine": (trace_run, {"baseline": 1, "runs": 1, "steps": 50, "between": 0.005}),
    "five and one, steady": (trace_run, {"baseline": 5, "runs": 1, "steps": 50, "between": 0.005}),
    "five and three": (trace_run, {"baseline": 5, "runs": 3, "steps": 30, "between": 0.01}),
    "many cells": (bench_run, {"baseline": 5, "runs": 3, "steps": 30, "between": 0.007}),
}


@pytest.mark.parametrize("case", PROMISED)
def test_noise_passes_and_eight_percent_does_not(case: str) -> None:
    run, counts = PROMISED[case]
    # Of what is quiet, "inconclusive" is a false alarm as well.
    assert simulate(1, run, **counts)[0].count("passed") >= RUNS - 1
    assert set(simulate(2, run, SLOWER, **counts)[0]) == {"failed"}


def test_a_machine_that_varies_more_is_told_so_and_gives_no_false_alarms() -> None:
    """Where runs differ by 3 %, 8 % in one run does not show; the gate must learn that from its baseline."""
    counts = {"baseline": 8, "runs": 3, "steps": 30, "between": 0.03}
    outcomes, limits = simulate(6, trace_run, **counts)
    assert outcomes.count("failed") <= 1
    assert np.median(limits) > 1.055, "what it can see is said"
    assert set(simulate(7, trace_run, 1.25, **counts)[0]) == {"failed"}
    # Why the baseline should have several runs: one does not predict the next.
    alone, _ = simulate(8, trace_run, baseline=1, runs=1, steps=50, between=0.03)
    assert alone.count("failed") > 0.03 * RUNS


def test_only_the_slow_cell_is_named() -> None:
    rng = np.random.default_rng(5)
    held = make([bench_run(rng, 30, 0.005) for _ in range(5)])
    checked = check.compare(held, [bench_run(rng, 30, 0.005, SLOWER) for _ in range(3)])
    assert metrics_of(checked["regressions"]) == ["cell 0 step_ns"]


def metrics_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [row["metric"] for row in rows]


# ---------------------------------------------------------------- the rule, case by case


def run_of(**samples: Any) -> Run:
    return of_samples({name: np.atleast_1d(np.asarray(values, float)) for name, values in samples.items()})


def spread(middle: float, count: int = 20, width: float = 0.01) -> np.ndarray:
    return middle * (1 + width * np.linspace(-1, 1, count))


def edited(held: Baseline, name: str, **fields: Any) -> Baseline:
    """A baseline in which people set something of a metric."""
    changed = msgspec.structs.replace(held.metrics[name], **fields)
    return msgspec.structs.replace(held, metrics={**held.metrics, name: changed})


STALLS = [124.0, 127.0, 126.0, 125.0, 164.0, 182.0]
SLOW = [176.0, 174.0, 177.0, 181.0, 176.5, 180.5]
CLOSE = [spread(middle) for middle in (1000, 1002, 998, 1001)]
APART = [spread(middle) for middle in (1000, 1060, 950, 1010)]


@pytest.mark.parametrize(
    ("name", "before", "after", "status"),
    [
        # Direction and tolerance.
        ("a_ns", [spread(1000)], [spread(1049)], "ok"),
        ("a_ns", [spread(1000)], [spread(1060)], "regression"),
        ("a_ns", [spread(1000)], [spread(940)], "improvement"),
        ("a_bytes", [[1000]], [[1060]], "regression"),
        ("a_count", [[1000]], [[940]], "improvement"),
        # Beyond the tolerance, in steps that differ by a third of themselves; only what may be worse is undecided.
        ("a_ns", [spread(1000, 10, 0.4)], [spread(1080, 10, 0.4)], "inconclusive"),
        ("a_ns", [spread(1000, 10, 0.4)], [spread(920, 10, 0.4)], "ok"),
        # Few steps; the same is the same.
        ("a_ns", [[1000]], [[3000]], "inconclusive"),
        ("a_ns", [spread(1000, 3)], [spread(1000, 3)], "ok"),
        ("a_ns", [spread(1000, 5)], [spread(3000, 5)], "regression"),
        # Single samples of several runs are samples; one difference is not a spread.
        ("a_ns", [[1000], [1010], [995], [1003]], [[1200]], "regression"),
        ("a_ns", [[1000], [1010], [995], [1003]], [[1015]], "ok"),
        ("a_ns", [[1000], [1010]], [[1200]], "inconclusive"),
        # Steps that stand out do not hide what is beyond doubt, unless runs are known to differ by as much.
        ("a_ns", [STALLS], [SLOW], "regression"),
        ("a_ns", [STALLS[:4], [154.0, 157.0, 156.0, 155.0]], [SLOW], "inconclusive"),
        # Runs that differ widen what counts.
        ("a_ns", CLOSE, [spread(1080)], "regression"),
        ("a_ns", APART, [spread(1080)], "inconclusive"),
        # What is exact needs one sample, and has no noise: the baseline saw as many, or it did not.
        ("a_count", [[100], [100], [120]], [[119]], "ok"),
        ("a_count", [[100], [100], [120]], [[121]], "regression"),
        ("a_count", [[0]], [[1]], "regression"),
        # Times of nothing, and samples of 0 among others.
        ("a_ns", [np.zeros(20)], [spread(50)], "regression"),
        ("a_ns", [np.zeros(20)], [np.where(np.arange(20) % 10 == 0, 50.0, 0.0)], "ok"),
        ("a_ns", [np.append(spread(1000, 19), 0.0)], [np.append(spread(1200, 19), 0.0)], "regression"),
        ("a_ns", [spread(1e-300)], [spread(9e17)], "regression"),
    ],
)
def test_what_becomes_of_a_metric(name: str, before: Sequence[Any], after: Sequence[Any], status: str) -> None:
    held = make([run_of(**{name: samples}) for samples in before])
    checked = check.compare(held, [run_of(**{name: samples}) for samples in after])
    [row] = checked["gates"]
    assert row["status"] == status
    assert (checked["passed"], checked["decided"]) == (status in ("ok", "improvement"), status != "inconclusive")
    if status == "regression" and row["ratio"] is not None:
        assert row["ratio"] > row["limit"]
    if row["low"] is not None:
        assert row["low"] <= row["ratio"] <= row["high"]
    json.dumps(row, allow_nan=False)


def test_the_tolerance_is_the_commands_or_the_metrics_own() -> None:
    held = edited(make([run_of(a_ns=spread(1000), b_ns=spread(1000))]), "b_ns", tolerance=0.3)
    slow = run_of(a_ns=spread(1200), b_ns=spread(1200))
    assert metrics_of(check.compare(held, [slow])["regressions"]) == ["a_ns"]
    assert check.compare(held, [slow], 0.25)["passed"]
    for wrong in (-0.1, float("nan")):
        with pytest.raises(UsageError, match="tolerance"):
            check.compare(held, [slow], wrong)


def test_missing_metrics_fail_and_new_ones_and_those_that_inform_do_not() -> None:
    both, other = run_of(a_ns=spread(10), b_ns=spread(10)), run_of(a_ns=spread(10), c_ns=spread(10))
    checked = check.compare(make([both]), [both, other])
    assert (checked["passed"], metrics_of(checked["missing"]), metrics_of(checked["new"])) == (False, ["b_ns"], [])
    assert metrics_of(check.compare(make([both]), [other])["new"]) == ["c_ns"]
    informing = edited(make([both]), "b_ns", gate=False)
    checked = check.compare(informing, [run_of(a_ns=spread(10), b_ns=spread(20))])
    assert (checked["passed"], metrics_of(checked["informing"])) == (True, ["b_ns"])
    assert check.compare(informing, [other])["passed"]


HELD = make([run_of(a_ns=1, b_ns=1)])
INFORMING = Run("samples", {}, {"a_ns": Metric(np.array([1.0]), "ns", gate=False)})
TRACE = trace_run(np.random.default_rng(0), 5, 0)
PART = Run("trace", {**TRACE.conditions, "selection": "--last-steps 3"}, TRACE.metrics)
A, B = (of_samples({"a_ns": [1]}, gpu=name) for name in "AB")


@pytest.mark.parametrize(
    ("refused", "says"),
    [
        (lambda: check.compare(HELD, [TRACE]), "a baseline of samples and a run of trace"),
        (lambda: check.compare(make([A]), [B]), "gpu: A, now B"),
        (lambda: check.compare(make([TRACE]), [PART]), "selection: none, now --last-steps 3"),
        (lambda: check.compare(make([INFORMING]), [INFORMING]), "no metric of the baseline can fail"),
        (lambda: run_of(a_ns=[1.0, float("nan")]), "numbers from 0"),
        (lambda: run_of(a_ns=[1e19]), "numbers from 0 to 1e"),
        (lambda: make([run_of(a_ns=1), TRACE]), "a_ns was measured in 1 of 2 runs"),
        (lambda: make([A, B]), r"do not compare \(gpu: A, now B"),
        (lambda: make([TRACE], HELD, add=True), "share no metrics"),
    ],
)
def test_what_does_not_compare(refused: Callable[[], Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        refused()
    # A GPU that one side does not name may be the same.
    assert check.compare(make([A]), [run_of(a_ns=1)])["passed"]


# ---------------------------------------------------------------- what a run is


def loop(path: Path, times_ns: Sequence[float]) -> Path:
    """A training loop on a GPU that is never idle; each step takes the given time. It never ran on a GPU."""
    out, process, main = planted.Export(), planted.Export.process(7), planted.Export.thread(7, 7)
    cpu, gpu = 1_000_000, 1_100_000
    for time in times_ns:
        begun, left = cpu, round(time)
        for name in ("gemm", "add", "gemm", "add"):
            call = out.call("cudaLaunchKernel_v7000", main, cpu, cpu + 4_000)
            part = min(left, round(time) // 4 + 1)
            left -= part
            out.kernel(f"void {name}<float>(int)", gpu, gpu + part, call, process)
            cpu, gpu = cpu + 6_000, gpu + part
        out.range("step", main, begun, cpu)
    return out.write(path)


@pytest.mark.parametrize(("fault", "copied"), [(None, 1 << 16), ("sync", (1 << 16) + 32), ("pageable", 64 << 20)])
def test_metrics_of_a_planted_trace_are_what_was_planted(fault: Any, copied: int, tmp_path: Path) -> None:
    truth = planted.training(tmp_path / "planted.sqlite", fault, steps=9, seed=3)
    run = run_metrics.of_trace(nsightkit.load(tmp_path / "planted.sqlite"))
    sums: dict[str, float] = {}
    for name, metric in run.metrics.items():
        assert len(metric.samples) == 9
        for key in (name, name.split("/")[0]):
            sums[key] = sums.get(key, 0.0) + float(metric.samples.sum())
    assert sums["step/busy_ns"] == truth["busy_ns"]
    # Idle time of a step includes what lies before the first operation of all.
    assert sums["step/idle_ns"] == sums["step/time_ns"] - truth["busy_ns"] == pytest.approx(sums["gap"])
    for cause, total in truth["gaps"].items():
        assert sums[f"gap/{cause}/idle_ns"] >= total
    kernels = np.array(list(truth["kernels"].values()))
    assert [sums["step/kernel_count"], sums["kernel"]] == kernels.sum(axis=0).tolist()
    assert sums["step/copied_bytes"] == 9 * copied
    gates = {name for name, metric in run.metrics.items() if metric.gate}
    assert gates == {"step/time_ns", "step/busy_ns", "step/kernel_count", "step/copied_bytes"}


def test_traces_in_part_or_without_steps(tmp_path: Path) -> None:
    times = [3_000_000, 5_000_000, 4_000_000]
    source = nsightkit.load(loop(tmp_path / "loop.sqlite", times))
    run = run_metrics.of_trace(source)
    # Steps last until their work is done, long after they were launched; the GPU begins 0.1 ms after the first step.
    assert run.metrics["step/time_ns"].samples.tolist() == [3_100_000, 5_000_000, 4_000_000]
    assert run.metrics["step/busy_ns"].samples.tolist() == times
    assert (
        run_metrics.of_trace(select(source, within="^step$")).metrics["step/kernel_count"].samples.tolist() == [4] * 3
    )
    tables = {name: source.table(name) for name in ("kernels", "calls")}
    bare = run_metrics.of_trace(Trace.from_frames(tables, source.meta))
    assert bare.metrics["trace/busy_ns"].samples.tolist() == [12e6]
    assert "step/time_ns" in metrics_of(check.compare(make([run]), [bare])["missing"])
    with pytest.raises(UsageError, match="--match"):
        run_metrics.of_trace(source, match="nothing")
    with pytest.raises(TraceError, match="neither steps nor GPU work"):
        run_metrics.of_trace(Trace.from_frames({"calls": tables["calls"]}, source.meta))


def bench_document(seed: int = 0, slower: float = 1.0, gpu: str = "NVIDIA H200", **row: Any) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    cell = {
        "config": "small", "batch": 4, "context": 512, "precision": "bf16", "attention": "sdpa", "compiled": False,
        "nvtx": False, "annotate_mha": False, "status": "ok", "where": None,
        "peak_allocated_bytes": 10_000_000_000,
    }  # fmt: skip
    rows = []
    for mode in ("fwd", "train"):
        samples = [int(time) for time in steps_of(rng, 30, 0.003, slower)]
        rows.append({**cell, "mode": mode, "samples_ns": samples, **row})
    return {"format": 1, "nsightkit": "0.1.0", "device": "cuda", "gpu": gpu, "rows": rows}


def test_a_benchmark() -> None:
    document = bench_document(compiled=True)
    run = run_metrics.of_bench(document)
    cell = "bench/small batch 4 context 512 fwd bf16 sdpa compiled"
    assert {name for name in run.metrics if " fwd " in name} == {f"{cell}/step_ns", f"{cell}/peak_allocated_bytes"}
    assert run.conditions["gpu"] == "NVIDIA H200"
    document["rows"][0] |= {"status": "oom", "samples_ns": []}
    missing = check.compare(make([run]), [run_metrics.of_bench(document)])["missing"]
    assert set(metrics_of(missing)) == {f"{cell}/step_ns", f"{cell}/peak_allocated_bytes"}
    with pytest.raises(TraceError, match="twice"):
        run_metrics.of_bench(bench_document(mode="fwd"))
    with pytest.raises(TraceError, match="no cell ran"):
        run_metrics.of_bench(bench_document(status="failed"))


def ncu_report(times: Sequence[float], grids: Sequence[str]) -> ncu_reports.Report:
    identities, metrics = [], []
    for time, grid in zip(times, grids, strict=True):
        identities.append({"kernel": "void kernel<float>(int)", "gpu": "NVIDIA H100", "grid": grid})
        metrics.append({"gpu__time_duration.sum": float(time)})
    return ncu_reports.from_metrics("report", identities, metrics, {"gpu__time_duration.sum": "ns"})


@pytest.mark.parametrize(
    ("before", "after", "status"),
    [
        # A launch of each: what differs by less than a tenth counts as the same.
        ([10_000], [10_900], "ok"),
        ([10_000], [11_200], "regression"),
        ([10_000], [8_000], "improvement"),
        (spread(10_000), spread(10_700), "regression"),
        (spread(10_000), spread(10_300), "ok"),
    ],
)
def test_reports(before: Sequence[float], after: Sequence[float], status: str) -> None:
    was, now = (run_metrics.of_report(ncu_report(times, ["(64, 1, 1)"] * len(times))) for times in (before, after))
    [row] = check.compare(make([was]), [now])["gates"]
    assert (row["metric"], row["status"]) == ("kernel/kernel/time_ns", status)
    assert row["limit"] == pytest.approx(1.1 if len(before) == 1 else 1.05)


def test_launches_with_several_grids_are_several_kernels() -> None:
    run = run_metrics.of_report(ncu_report([10, 9000], ["(1, 1, 1)", "(64, 1, 1)"]))
    assert {name: metric.gate for name, metric in run.metrics.items()} == {
        "kernel/kernel grid (1, 1, 1)/time_ns": False,  # 0.1 % of the time
        "kernel/kernel grid (64, 1, 1)/time_ns": True,
    }
    with pytest.raises(TraceError, match="no kernel times"):
        run_metrics.of_report(ncu_report([float("nan")], ["(1, 1, 1)"]))


# ---------------------------------------------------------------- the baseline


def test_there_and_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(11)
    made = make([trace_run(rng, 10_000, 0.01) for _ in range(3)])
    path = tmp_path / "baseline.json"
    baselines.write(made, path)
    back = baselines.read(path)
    assert (back, back.runs) == (made, 3)
    assert [len(back.metrics[f"step/{name}_ns"].runs[0]) for name in ("time", "idle")] == [40, 9]
    # A run that is added adds lines and changes few: the values, and the last of the old lines, which gets a comma.
    old = path.read_text().splitlines()
    baselines.write(make([trace_run(rng, 100, 0.01)], back, add=True), path)
    new = path.read_text().splitlines()
    assert len(new) - len(old) == len(made.metrics)
    assert sum(line not in new for line in old) <= 2 * len(made.metrics)


@pytest.mark.parametrize("add", [False, True])
def test_what_people_set_stays_and_old_runs_go(add: bool) -> None:
    before = edited(make([run_of(a_ns=spread(1000 + i)) for i in range(15)]), "a_ns", gate=False, tolerance=0.5)
    kept = make([run_of(a_ns=spread(2000)) for _ in range(10)], before, add=add).metrics["a_ns"]
    assert (kept.gate, kept.tolerance, len(kept.runs)) == (False, 0.5, baselines.MOST_RUNS if add else 10)
    assert min(kept.runs[0]) == pytest.approx(1005 * 0.99 if add else 2000 * 0.99)


def _metric(**fields: Any) -> Callable[[str], str]:
    def edit(text: str) -> str:
        document = json.loads(text)
        document["metrics"]["a_ns"].update(fields)
        return json.dumps(document)

    return edit


BROKEN: dict[str, tuple[Callable[[str], str], str]] = {
    "empty": (lambda _: "", "not a baseline"),
    "a trace": (lambda _: '{"traceEvents": []}', "unknown field"),
    "deep": (lambda _: '{"format": ' + "[" * 100_000, "not a baseline"),
    "another format": (lambda text: text.replace('"format": 2', '"format": 1'), "not a baseline of this version"),
    "typing error": (_metric(tolerances=1), "unknown field `tolerances`"),
    "gate": (_metric(gate=1), "Expected `bool`"),
    "an empty run": (_metric(runs=[[]]), "length >= 1"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_baselines_are_one_line_and_stay_as_they_are(case: str, tmp_path: Path, gate: Any) -> None:
    path, bench = tmp_path / "baseline.json", tmp_path / "bench.json"
    bench.write_text(json.dumps(bench_document()))
    baselines.write(make([run_of(a_ns=spread(1000))]), path)
    damage, says = BROKEN[case]
    damaged = damage(path.read_text())
    path.write_text(damaged)
    for arguments in ([], ["--update"]):
        code, document, err = gate(bench, *arguments)
        assert (code, document, err.count("\n")) == (2, None, 1)
        assert str(path) in err
        assert re.search(says, err), err
        assert path.read_text() == damaged


# ---------------------------------------------------------------- from files to exit codes


@pytest.fixture
def gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any, str]]:
    """Run the command; gives exit code, document and stderr."""

    def call(*arguments: object) -> tuple[int, Any, str]:
        options = ["--baseline", str(tmp_path / "baseline.json"), "--format", "json"]
        code = cli.run(["check", *map(str, arguments), *options])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else None, err

    return call


def test_traces_from_end_to_end(tmp_path: Path, gate: Any) -> None:
    """Files of synthetic runs: noise passes, 8 % does not, and one step decides nothing."""
    rng = np.random.default_rng(16)
    path = tmp_path / "baseline.json"

    def captured(name: str, slower: float = 1.0, steps: int = 30) -> Path:
        return loop(tmp_path / f"{name}.sqlite", steps_of(rng, steps, 0.005, slower))

    code, document, err = gate(*(captured(f"run-{i}") for i in range(5)), "--update")
    assert (code, document["written"], err) == (0, True, f"nsightkit: {path}: written, 5 runs\n")
    held = path.read_bytes()
    code, document, err = gate(captured("again"))
    assert (code, err, document["passed"], document["baseline_runs"]) == (0, "", True, 5)
    code, document, err = gate(captured("slower", SLOWER))
    assert (code, set(metrics_of(document["regressions"]))) == (1, {"step/time_ns", "step/busy_ns"})
    assert err.startswith(f"nsightkit: the check against {path} failed: step/")
    assert path.read_bytes() == held, "only --update and --add write"
    code, _, err = gate(captured("again"), "--last-steps", 9)
    assert (code, "selection: none, now --last-steps 9" in err) == (2, True)
    assert gate(loop(tmp_path / "one.sqlite", [1e6]), "--update")[0] == 0
    code, document, err = gate(loop(tmp_path / "other.sqlite", [3e6]))
    assert (code, document["decided"], document["regressions"], err.count("\n")) == (2, False, [], 1)
    assert "record more steps" in err


def test_bad_files_are_one_line(tmp_path: Path, gate: Any) -> None:
    trace, bench = loop(tmp_path / "a.sqlite", [1e6] * 12), tmp_path / "bench.json"
    bench.write_text(json.dumps(bench_document()))
    (tmp_path / "none.json").write_text('{"nsightkit": "1"}')
    (tmp_path / "empty.csv").write_text("Kernel Name\n")
    for says, arguments in (
        ("make it with", [trace]),
        ("is not a trace, so no part of it", [bench, "--update", "--last-steps", 3]),
        ("no such file", [tmp_path / "absent.sqlite", "--update"]),
        ("is not a benchmark", [tmp_path / "none.json", "--update"]),
        ("empty.csv", [tmp_path / "empty.csv", "--update"]),
    ):
        code, document, err = gate(*arguments)
        assert (code, document, err.count("\n")) == (2, None, 1), err
        assert says in err


def test_real_captures(shared_traces: Path, gate: Any) -> None:
    """ResNet-50 with and without workers that load data; known: 0.14 and 0.18 s per step, the rest waits for data."""
    few, many = (next(shared_traces.glob(f"kineto/resnet50_num_workers_{n}__*")) for n in (0, 4))
    assert gate(many, "--update")[0] == 0
    assert gate(many)[0] == 0
    code, document, err = gate(few)
    # Two of the six steps with workers stand out; each other one is 47 ms shorter than any without.
    assert (code, metrics_of(document["regressions"])) == (1, ["step/time_ns"])
    assert document["regressions"][0]["ratio"] == pytest.approx(177.4 / 125.2, abs=0.01)  # medians of ordinary steps
    assert "one run per side" in err
    # The cause is listed after the regression.
    assert "gap/input-pipeline/idle_ns" in metrics_of(document["informing"])[:2]


def test_real_reports(shared_traces: Path, gate: Any) -> None:
    pytest.importorskip("ncu_report")
    slow, fast = (shared_traces / f"armleth/report{name}.ncu-rep" for name in ("_v4_8_per_thread", ""))
    assert gate(fast, "--update")[0] == 0
    assert gate(fast)[0] == 0
    code, document, _ = gate(slow)
    assert (code, metrics_of(document["regressions"])) == (1, ["kernel/matrix_addition2d/time_ns"])


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
    ids=["unchanged", "slower", "undecided"],
)
def test_the_job_of_the_documentation(slower: float, width: float, code: int, measured: int, tmp_path: Path) -> None:
    job = pytest.importorskip("yaml").safe_load(JOB.read_text(encoding="utf-8"))
    steps = {step["name"]: step for step in job["jobs"]["gate"]["steps"] if "name" in step}
    environment = {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(Path(nsightkit.__file__).parents[1]),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        **job["env"],
    }
    for folder in ("bin", "performance", "documents"):
        (tmp_path / folder).mkdir()
    (tmp_path / "bin" / "nsightkit").write_text(COMMAND.format(python=sys.executable))
    (tmp_path / "bin" / "nsightkit").chmod(0o755)

    def measured_as(slower: float) -> None:
        for run in range(1, 7):
            samples = [int(time) for time in spread(1e7 * slower * (1 + run / 1000), 30, width)]
            document = bench_document()
            for row in document["rows"]:
                row["samples_ns"] = samples
            (tmp_path / "documents" / f"run-{run}.json").write_text(json.dumps(document))

    def step(name: str) -> subprocess.CompletedProcess[str]:
        # As a runner does it: `shell: bash` is bash -eo pipefail.
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", steps[name]["run"]]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    measured_as(1.0)
    for name in ("Measure", "Update"):
        done = step(name)
        assert done.returncode == 0, done.stderr
    measured_as(slower)
    assert step("Measure").returncode == 0
    done = step("Check")
    assert done.returncode == code, done.stderr
    assert len(list(tmp_path.glob("run-*.json"))) == measured
    assert {0: "ok ", 1: "FAILS", 2: "inconclusive"}[code] in (tmp_path / "summary.md").read_text()
