"""The gate: what it must catch, what it must let pass, and what it must refuse to decide."""

from __future__ import annotations

import json
import re
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
from nsightkit.analysis.compare.runs import Run, of_samples
from nsightkit.analysis.timeline.selection import select
from nsightkit.errors import TraceError, UsageError
from nsightkit.trace import Trace
from nsightkit.trace import ncu as ncu_reports

# ---------------------------------------------------------------- noise as real steps have it


def steps_of(rng: np.random.Generator, count: int, between: float, slower: float = 1.0) -> np.ndarray:
    """Step times of one run, in ns: a spread with a tail, a stall now and then, a drift, the run's own pace."""
    logs = rng.normal(0, 0.02, count) + rng.exponential(0.012, count)
    logs += (rng.random(count) < 0.02) * rng.exponential(0.3, count)
    logs += np.linspace(-0.5, 0.5, count) * rng.normal(0, 0.01)
    return 10_000_000 * slower * np.exp(logs + rng.normal(0, between))


def trace_run(rng: np.random.Generator, count: int, between: float, slower: float = 1.0) -> Run:
    """A run with the metrics of a trace: times, and exact ones."""
    time = steps_of(rng, count, between, slower)
    busy = time * (0.8 + rng.normal(0, 0.005, count))
    metrics = {
        "step/time_ns": time,
        "step/busy_ns": busy,
        "step/kernel_count": np.full(count, 700.0),
        "step/copied_bytes": np.full(count, 65536.0),
    }
    return Run("trace", {"gpu": "Synthetic GPU", "tool": "planted"}, metrics)


def simulate(seed: int, checks: int, slower: float = 1.0) -> tuple[list[str], list[float]]:
    """Check three runs, each time against a fresh baseline of eight: what came out, and the limits."""
    rng = np.random.default_rng(seed)
    outcomes, limits = [], []
    for _ in range(checks):
        held = make([trace_run(rng, 30, 0.03) for _ in range(8)])
        checked = check.compare(held, [trace_run(rng, 30, 0.03, slower) for _ in range(3)])
        outcome = "passed" if checked["passed"] else "inconclusive"
        outcomes.append("failed" if checked["regressions"] else outcome)
        limits.append(checked["gates"][0]["limit"])
    return outcomes, limits


def test_a_machine_that_varies_more_gives_no_false_alarms():
    """Where runs differ by 3%, 8% in one run does not show; the gate must learn that from its baseline."""
    outcomes, limits = simulate(6, 200)
    assert outcomes.count("failed") <= 1  # less than 1%
    assert np.median(limits) > 1.055, "what it can see is said"
    assert set(simulate(7, 60, 1.25)[0]) == {"failed"}


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
APART = [spread(middle) for middle in (1000, 1060, 950, 1010)]


@pytest.mark.parametrize(
    ("name", "before", "after", "status"),
    [
        # Direction and tolerance.
        ("a_ns", [spread(1000)], [spread(1060)], "regression"),
        ("a_ns", [spread(1000)], [spread(940)], "improvement"),
        ("a_bytes", [[1000]], [[1060]], "regression"),
        ("a_count", [[1000]], [[940]], "improvement"),
        # Beyond the tolerance, in steps that differ by a third of themselves; only what may be worse is undecided.
        ("a_ns", [spread(1000, 10, 0.4)], [spread(1080, 10, 0.4)], "inconclusive"),
        # Few steps; the same is the same.
        ("a_ns", [[1000]], [[3000]], "inconclusive"),
        # Single samples of several runs are samples; one difference is not a spread.
        ("a_ns", [[1000], [1010], [995], [1003]], [[1200]], "regression"),
        ("a_ns", [[1000], [1010]], [[1200]], "inconclusive"),
        # Steps that stand out do not hide what is beyond doubt, unless runs are known to differ by as much.
        ("a_ns", [STALLS], [SLOW], "regression"),
        ("a_ns", [STALLS[:4], [154.0, 157.0, 156.0, 155.0]], [SLOW], "inconclusive"),
        # Runs that differ widen what counts.
        ("a_ns", APART, [spread(1080)], "inconclusive"),
        # What is exact needs one sample, and has no noise: the baseline saw as many, or it did not.
        ("a_count", [[100], [100], [120]], [[119]], "ok"),
        ("a_count", [[100], [100], [120]], [[121]], "regression"),
        # Times of nothing, and samples of 0 among others.
        ("a_ns", [np.zeros(20)], [spread(50)], "regression"),
        ("a_ns", [np.append(spread(1000, 19), 0.0)], [np.append(spread(1200, 19), 0.0)], "regression"),
    ],
)
def test_what_becomes_of_a_metric(name: str, before: Sequence[Any], after: Sequence[Any], status: str):
    held = make([run_of(**{name: samples}) for samples in before])
    checked = check.compare(held, [run_of(**{name: samples}) for samples in after])
    [row] = checked["gates"]
    assert row["status"] == status
    assert (checked["passed"], checked["decided"]) == (status in ("ok", "improvement"), status != "inconclusive")
    if status == "regression" and row["low"] is not None:
        assert row["limit"] < row["ratio"] <= row["high"]
    json.dumps(row, allow_nan=False)


def test_the_tolerance_is_the_commands_or_the_metrics_own():
    held = edited(make([run_of(a_ns=spread(1000), b_ns=spread(1000))]), "b_ns", tolerance=0.3)
    slow = run_of(a_ns=spread(1200), b_ns=spread(1200))
    assert metrics_of(check.compare(held, [slow])["regressions"]) == ["a_ns"]
    assert check.compare(held, [slow], 0.25)["passed"]
    for wrong in (-0.1, float("nan")):
        with pytest.raises(UsageError, match="tolerance"):
            check.compare(held, [slow], wrong)


def test_missing_metrics_fail_and_new_and_unchecked_ones_do_not():
    both, other = run_of(a_ns=spread(10), b_ns=spread(10)), run_of(a_ns=spread(10), c_ns=spread(10))
    checked = check.compare(make([both]), [other, both])
    assert (checked["passed"], metrics_of(checked["missing"]), checked["new"]) == (False, ["b_ns"], ["c_ns"])
    assert check.compare(edited(make([both]), "b_ns", gate=False), [other])["passed"]


HELD = make([run_of(a_ns=1, b_ns=1)])
TRACE = trace_run(np.random.default_rng(0), 5, 0)
PART = Run("trace", {**TRACE.conditions, "selection": "--last-steps 3"}, TRACE.metrics)
A, B = (of_samples({"a_ns": [1]}, gpu=name) for name in "AB")


@pytest.mark.parametrize(
    ("refused", "says"),
    [
        (lambda: check.compare(HELD, [TRACE]), "the baseline is of samples, this run of trace"),
        (lambda: check.compare(make([A]), [B]), "gpu: A, now B"),
        # A run that does not name its GPU leaves the baseline's.
        (lambda: check.compare(make([run_of(a_ns=1)], make([A]), add=True), [B]), "A, now B"),
        (lambda: check.compare(make([TRACE]), [PART]), "selection: none, now --last-steps 3"),
        (lambda: check.compare(edited(make([A]), "a_ns", gate=False), [A]), "no metric of the baseline can fail"),
        (lambda: run_of(a_ns=[1e19]), "numbers from 0 to 1e"),
        (lambda: make([run_of(a_ns=1), TRACE]), "a_ns was measured in 1 of 2 runs"),
        (lambda: make([TRACE], HELD, add=True), "share no metrics"),
    ],
)
def test_what_does_not_compare(refused: Callable[[], Any], says: str):
    with pytest.raises(UsageError, match=says):
        refused()
    # A GPU that one side does not name may be the same.
    assert check.compare(make([A]), [run_of(a_ns=1)])["passed"]


# ---------------------------------------------------------------- what a run is


@pytest.mark.parametrize(("fault", "copied"), [("sync", (1 << 16) + 32), ("pageable", 64 << 20)])
def test_metrics_of_a_planted_trace_are_what_was_planted(fault: Any, copied: int, tmp_path: Path):
    truth = planted.training(tmp_path / "planted.sqlite", fault, steps=9, seed=3)
    run = run_metrics.of_trace(nsightkit.load(tmp_path / "planted.sqlite"))
    sums = {name: samples.sum() for name, samples in run.metrics.items()}
    assert {len(samples) for samples in run.metrics.values()} == {9}
    assert sums.pop("step/time_ns") > truth["busy_ns"]
    count = sum(number for number, _ in truth["kernels"].values())
    assert sums == {"step/busy_ns": truth["busy_ns"], "step/kernel_count": count, "step/copied_bytes": 9 * copied}


def test_traces_in_part_or_without_steps(tmp_path: Path):
    planted.training(tmp_path / "planted.sqlite", None, steps=5)
    source = nsightkit.load(tmp_path / "planted.sqlite")
    run = run_metrics.of_trace(source)
    part = run_metrics.of_trace(select(source, last_steps=3))
    assert part.metrics["step/kernel_count"].tolist() == run.metrics["step/kernel_count"][2:].tolist()
    tables = {name: source.table(name) for name in ("kernels", "calls")}
    bare = run_metrics.of_trace(Trace.from_frames(tables, source.meta))
    assert bare.metrics["trace/kernel_count"].tolist() == [source.size("kernels")]
    assert "step/time_ns" in metrics_of(check.compare(make([run]), [bare])["missing"])
    with pytest.raises(UsageError, match="--match"):
        run_metrics.of_trace(source, match="nothing")
    with pytest.raises(TraceError, match="neither steps nor GPU work"):
        run_metrics.of_trace(Trace.from_frames({"calls": tables["calls"]}, source.meta))


def bench_document(seed: int = 0, slower: float = 1.0, gpu: str = "NVIDIA H200", **row: Any) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    cell = {
        "config": "small", "batch": 4, "context": 512, "precision": "bf16", "attention": "sdpa", "compiled": False,
        "nvtx": False, "annotate_mha": False, "status": "ok", "peak_allocated_bytes": 10_000_000_000,
    }  # fmt: skip
    rows = []
    for mode in ("fwd", "train"):
        samples = [int(time) for time in steps_of(rng, 30, 0.003, slower)]
        rows.append({**cell, "mode": mode, "samples_ns": samples, **row})
    return {"format": 1, "nsightkit": "0.1.0", "device": "cuda", "gpu": gpu, "rows": rows}


def of_bench(document: dict[str, Any]) -> Run:
    return run_metrics.of_bench(msgspec.convert(document, run_metrics.Bench))


def test_a_benchmark():
    document = bench_document(compiled=True)
    run = of_bench(document)
    cell = "bench/small batch 4 context 512 fwd bf16 sdpa compiled"
    metrics = [f"{cell}/step_ns", f"{cell}/peak_allocated_bytes"]
    assert [name for name in run.metrics if " fwd " in name] == metrics
    assert run.conditions["gpu"] == "NVIDIA H200"
    document["rows"][0] |= {"status": "oom", "samples_ns": []}
    assert set(metrics_of(check.compare(make([run]), [of_bench(document)])["missing"])) == set(metrics)
    with pytest.raises(TraceError, match="no cell ran"):
        of_bench(bench_document(samples_ns=[]))


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
        (spread(10_000), spread(10_700), "regression"),
    ],
)
def test_reports(before: Sequence[float], after: Sequence[float], status: str):
    was, now = (run_metrics.of_report(ncu_report(times, ["(64, 1, 1)"] * len(times))) for times in (before, after))
    [row] = check.compare(make([was]), [now])["gates"]
    assert (row["metric"], row["status"]) == ("kernel/kernel/time_ns", status)
    assert row["limit"] == pytest.approx(1.1 if len(before) == 1 else 1.05)


def test_launches_with_several_grids_are_several_kernels():
    run = run_metrics.of_report(ncu_report([10, 9000, 8000], ["(1, 1, 1)", "(64, 1, 1)", "(32, 1, 1)"]))
    # The first takes a thousandth of the time.
    assert set(run.metrics) == {"kernel/kernel grid (64, 1, 1)/time_ns", "kernel/kernel grid (32, 1, 1)/time_ns"}


# ---------------------------------------------------------------- the baseline


def test_there_and_back(tmp_path: Path):
    rng = np.random.default_rng(11)
    made = make([trace_run(rng, 10_000, 0.01) for _ in range(3)])
    path = tmp_path / "baseline.json"
    baselines.write(made, path)
    back = baselines.read(path)
    assert (back, back.run_count) == (made, 3)
    assert len(back.metrics["step/time_ns"].runs[0]) == 40


@pytest.mark.parametrize("add", [False, True])
def test_what_people_set_stays_and_old_runs_go(add: bool):
    before = edited(make([run_of(a_ns=spread(1000 + i)) for i in range(15)]), "a_ns", gate=False, tolerance=0.5)
    kept = make([run_of(a_ns=spread(2000)) for _ in range(10)], before, add=add).metrics["a_ns"]
    assert (kept.gate, kept.tolerance, len(kept.runs)) == (False, 0.5, baselines.MOST_RUNS if add else 10)
    assert min(kept.runs[0]) == pytest.approx(1005 * 0.99 if add else 2000 * 0.99)


BROKEN: dict[str, tuple[Callable[[str], str], str]] = {
    "a trace": (lambda _: '{"traceEvents": []}', "unknown field"),
    "deep": (lambda _: '{"format": ' + "[" * 100_000, "not a baseline"),
    "another format": (lambda text: text.replace('"format": 2', '"format": 1'), "not a baseline of this version"),
    "typing error": (lambda text: text.replace('"tolerance"', '"tolerances"'), "unknown field `tolerances`"),
    "gate": (lambda text: text.replace('"gate": true', '"gate": 1'), "Expected `bool`"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_baselines_are_one_line_and_stay_as_they_are(case: str, tmp_path: Path, gate: Any):
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


def test_files_from_end_to_end(tmp_path: Path, gate: Any):
    """Noise passes, 8% does not, and one step decides nothing."""
    path = tmp_path / "baseline.json"

    def measured(seed: int, **options: Any) -> Path:
        file = tmp_path / f"{seed}.json"
        file.write_text(json.dumps(bench_document(seed, **options)))
        return file

    code, document, err = gate(*map(measured, range(5)), "--update")
    assert (code, document["written"], err) == (0, True, "")
    held = path.read_bytes()
    code, document, err = gate(measured(5))
    assert (code, err, document["passed"], document["baseline_runs"]) == (0, "", True, 5)
    code, document, err = gate(measured(6, slower=1.08))
    assert (code, len(document["regressions"])) == (1, 2)
    assert err.startswith(f"nsightkit: the check against {path} failed: bench/")
    assert path.read_bytes() == held, "only --update and --add write"
    assert gate(measured(7, samples_ns=[1e6]), "--update")[0] == 0
    code, document, err = gate(measured(8, samples_ns=[3e6]))
    assert (code, document["decided"], document["regressions"], err.count("\n")) == (2, False, [], 1)
    assert "record more steps" in err


def test_bad_files_are_one_line(tmp_path: Path, gate: Any):
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps(bench_document()))
    (tmp_path / "none.json").write_text('{"nsightkit": "1"}')
    (tmp_path / "empty.csv").write_text("Kernel Name\n")
    for says, arguments in (
        ("make it with", [bench]),
        ("is not a trace, so no part of it", [bench, "--update", "--last-steps", 3]),
        ("is not a benchmark", [tmp_path / "none.json", "--update"]),
        ("empty.csv", [tmp_path / "empty.csv", "--update"]),
    ):
        code, document, err = gate(*arguments)
        assert (code, document, err.count("\n")) == (2, None, 1), err
        assert says in err
