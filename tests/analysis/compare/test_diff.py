"""Two captures: exact deltas, sums that add up, noise that is not a change, and the real changes of real pairs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import make_snapshot
import numpy as np
import pandas as pd
import pytest
from synthetic import planted

import nsightkit
from nsightkit import cli
from nsightkit.analysis.compare import diff
from nsightkit.analysis.core import noise
from nsightkit.analysis.memory import diff as diff_memory
from nsightkit.analysis.timeline import overview, selection
from nsightkit.trace import Trace, TraceMeta
from nsightkit.trace import snapshot as snapshots
from nsightkit.trace.model import Gpu

US = 1_000
PID = 9
MAIN = PID << 24 | 1
CARD = "Synthetic GPU"
GEMM, ADD, NORM = "ampere_sgemm_128x64_nn", "vectorized_elementwise_kernel<4, CUDAFunctor_add>", "layer_norm_kernel"
BASE = ((GEMM, 40), (ADD, 20), (NORM, 10), (ADD, 20))
COLUMNS = {
    "kernels": ["start_ns", "end_ns", "device", "stream", "process", "correlation", "name"],
    "graphs": ["start_ns", "end_ns", "device", "stream", "process", "correlation", "graph_id"],
    "calls": ["start_ns", "end_ns", "process", "thread", "correlation", "name"],
    "ranges": ["start_ns", "end_ns", "process", "thread", "name"],
}

Kernels = Sequence[tuple[str, float]]


def program(kernels: Kernels = BASE, count: int = 8, **options: Any) -> Trace:
    """A trace of steps that launch the same kernels (names, µs); other options are of its meta data.

    `jitter` is relative, of kernels and of the CPU's time; `stalls` are steps that take longer; `graph` is a replay.
    """
    rng = np.random.default_rng(options.pop("seed", 0))
    jitter, stalls = options.pop("jitter", 0.0), options.pop("stalls", ())
    named, graph = options.pop("named", "train_step"), options.pop("graph", 0)
    rows: dict[str, list[tuple[Any, ...]]] = {table: [] for table in COLUMNS}
    now, correlation = 1_000_000, itertools.count(1)

    def launch(table: str, call: str, microseconds: float, label: object, free: int) -> int:
        """Launch an operation, and give when the GPU is done with it."""
        ticket = next(correlation)
        rows["calls"].append((now, now + US, PID, MAIN, ticket, call))
        begin = max(free, now + 2 * US)
        end = begin + round(microseconds * US * (1 + jitter * rng.standard_normal()))
        rows[table].append((begin, end, 0, 7, PID, ticket, label))
        return end

    for number in range(count):
        start = free = now
        for name, microseconds in kernels:
            free = launch("kernels", "cudaLaunchKernel", microseconds, name, free)
            now += 2 * US
        if graph:
            free = launch("graphs", "cudaGraphLaunch", graph, 1, free)
        now = max(now, free) + round(100 * US * (1 + jitter * rng.standard_normal()))
        if number in stalls:
            now += 100 * US
        if named:
            rows["ranges"].append((start, now - 100, PID, MAIN, f"{named} {number}"))
    frames = {}
    for table, columns in COLUMNS.items():
        frame = pd.DataFrame(rows[table], columns=columns)
        frames[table] = frame.astype({"name": "category"}) if "name" in columns else frame
    meta: dict[str, Any] = {"tool": "planted", "gpus": [Gpu(0, CARD)], "missing": ["memops"]}
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


def words(found: diff.Comparison, table: str) -> set[str]:
    return set(found.tables[table]["significance"])


# ---------------------------------------------------------------- exact deltas


def test_a_slower_kernel_is_found_to_the_nanosecond() -> None:
    found = diff.compare(program(), program(scaled(1.35, ADD)))
    slower = row(found, "kernels", ADD)
    assert slower[["before_ns", "after_ns", "delta_ns", "low_ns", "high_ns"]].tolist() == [40e3, 54e3, 14e3, 14e3, 14e3]
    counts = ["before_count", "after_count", "before_total_ns", "after_total_ns"]
    assert slower[counts].tolist() == [16, 16, 320e3, 432e3]
    assert slower[["match", "category", "significance"]].tolist() == ["name", "elementwise", "changed"]
    for name in (GEMM, NORM):
        assert row(found, "kernels", name)[["delta_ns", "low_ns", "significance"]].tolist() == [0, 0, "within noise"]
    for name in ("kernel_ns", "wall_ns"):
        assert row(found, "figures", name)["delta_ns"] == 14e3
    assert row(found, "ranges", "train_step#", clock="GPU")["delta_ns"] == 14e3
    summary = found.summary()
    assert (summary["outcome"], summary["unit"]) == ("slower", "step")
    assert {change["table"] for change in summary["changes"]} == {"figures", "kernels", "ranges"}
    assert summary["where"] == f"Largest change: {ADD}, +14.00 µs."
    assert summary["headline"].endswith(noise.ONE_RUN)


def test_renamed_and_new_kernels_keep_the_sums() -> None:
    after = program([("volta_sgemm_32x128_nn", 60), (ADD, 30), ("exp_kernel", 5)])
    found = diff.compare(program(), after)
    renamed = row(found, "kernels", "volta_sgemm_32x128_nn")
    assert renamed[["match", "before_names", "delta_ns"]].tolist() == ["normalised", [GEMM], 20 * US]
    fresh = row(found, "kernels", "exp_kernel")
    assert fresh[["match", "before_names", "before_ns", "significance"]].tolist() == ["appeared", [], 0, "changed"]
    totals = found.tables["kernels"][["before_total_ns", "after_total_ns"]].sum()
    assert totals.tolist() == [8 * 90 * US, 8 * 95 * US]


@pytest.mark.parametrize("fault", ["starved", "sync", "tiny", "pageable", "augment"])
def test_planted_faults(fault: Any, tmp_path: Path) -> None:
    truths, traces = [], []
    for seed, name in enumerate((fault, None)):
        truths.append(planted.training(tmp_path / f"{seed}.sqlite", name, seed=seed))
        traces.append(nsightkit.load(tmp_path / f"{seed}.sqlite"))
    found = diff.compare(*traces)
    for side, truth in zip(diff.SIDES, truths, strict=True):
        kernels = found.tables["kernels"].set_index("name")[f"{side}_total_ns"]
        assert kernels[list(truth["kernels"])].tolist() == [total for _, total in truth["kernels"].values()]
        assert found.tables["gaps"][f"{side}_total_ns"].sum() == truth["idle_ns"]
        for cause, total in truth["gaps"].items():
            assert row(found, "gaps", cause)[f"{side}_total_ns"] == pytest.approx(total, rel=0.02)
    summary = found.summary()
    was, now = planted.BOTTLENECK_OF[fault], planted.BOTTLENECK_OF[None]
    assert (summary["moved"], summary["outcome"]) == (True, "faster")
    assert [summary["bottleneck"][side] for side in diff.SIDES] == [was, now]
    # The loop without a fault launches ahead of its device: on the CPU's clock its steps would take almost no time.
    assert row(found, "figures", "wall_ns")["after_ns"] == pytest.approx(truths[1]["span_ns"] / 12, rel=0.02)
    cause = row(found, "gaps", was)
    assert (cause["significance"], cause["delta_ns"] < 0) == ("changed", True)


@pytest.mark.parametrize(
    "names",
    [
        (
            "hta/trace_diff__control__control.json.gz",
            "kineto/resnet50_num_workers_0__worker0.1623143089861.pt.trace.json.gz",
        ),
        ("cs336-zx3xyy/result_2_7B_compile_ro.sqlite", "cs336-zx3xyy/result_2_7B_nvtx.sqlite"),
    ],
)
def test_rows_add_up_to_each_trace(names: Sequence[str], shared_traces: Path) -> None:
    traces = [nsightkit.load(shared_traces / name) for name in names]
    tables = diff.compare(*traces).tables
    for side, trace in zip(diff.SIDES, traces, strict=True):
        whole = overview.summary(trace)
        assert tables["kernels"][f"{side}_total_ns"].sum() == whole["kernel_ns"]
        assert tables["kernels"][f"{side}_count"].sum() == whole["kernel_count"]
        assert tables["gaps"][f"{side}_total_ns"].sum() == whole["idle_ns"]


def test_captures_of_different_length_compare() -> None:
    found = diff.compare(program(count=5), program(count=11))
    for table in found.tables.values():
        assert (table["delta_ns"] == 0).all()
    assert row(found, "kernels", GEMM)[["before_total_ns", "after_total_ns"]].tolist() == [5 * 40 * US, 11 * 40 * US]
    summary = found.summary()
    assert (summary["outcome"], summary["warnings"], summary["moved"]) == ("no change", [], None)


# ---------------------------------------------------------------- noise


def test_noise_is_not_called_a_change() -> None:
    """A step's time at most once in twenty pairs without a change, and of all rows about as many."""
    traces = [program(count=10, jitter=0.08, seed=seed) for seed in range(21)]
    alarms, significances = 0, []
    for before, after in itertools.pairwise(traces):
        found = diff.compare(before, after)
        alarms += row(found, "figures", "wall_ns")["significance"] == "changed"
        for table in found.tables.values():
            significances += table["significance"].tolist()
    assert alarms <= 1
    assert significances.count("changed") / len(significances) < 0.07


def test_a_change_is_seen_through_noise() -> None:
    for seed in range(6):
        before = program(count=10, jitter=0.04, seed=2 * seed)
        found = diff.compare(before, program(scaled(1.25, GEMM), count=10, jitter=0.04, seed=2 * seed + 1))
        changed = row(found, "kernels", GEMM)
        assert changed["significance"] == "changed"
        assert changed["low_ns"] <= changed["delta_ns"] <= changed["high_ns"]


def test_too_few_steps_are_inconclusive() -> None:
    found = diff.compare(program(count=3), program(scaled(2), count=3))
    summary = found.summary()
    assert summary["outcome"] == "inconclusive"
    assert "3 and 3 steps are too few" in summary["headline"]
    assert found.tables["kernels"]["low_ns"].isna().all()
    # What may be noise is listed as such.
    assert {change["significance"] for change in summary["changes"]} == {"inconclusive"}


def test_a_change_that_is_sure_and_too_small_does_not_matter() -> None:
    found = diff.compare(program(), program(scaled(1.0225, GEMM)))  # half a percent of a step
    assert row(found, "kernels", GEMM)[["delta_ns", "low_ns", "significance"]].tolist() == [900, 900, "changed"]
    summary = found.summary()
    assert (summary["outcome"], summary["changes"], summary["where"]) == ("no change", [], "")


def test_a_stall_does_not_hide_a_change() -> None:
    found = diff.compare(program(jitter=0.005), program(scaled(0.5), jitter=0.005, seed=1, stalls=(0, 4)))
    wall = row(found, "figures", "wall_ns")
    assert (wall["significance"], wall["delta_ns"]) == ("changed", pytest.approx(-45 * US, rel=0.1))


def test_more_captures_show_how_much_captures_differ() -> None:
    # Steps of one capture agree to a third of a percent; captures differ by three.
    slow = program(scaled(1.03), jitter=0.003, seed=1)
    fast = program(jitter=0.003)
    single = diff.compare(fast, slow)
    assert row(single, "kernels", GEMM)["significance"] == "changed"
    more = {"also_before": [program(scaled(1.03), jitter=0.003, seed=2)], "also_after": [program(jitter=0.003, seed=3)]}
    several = diff.compare(fast, slow, **more)
    assert row(several, "kernels", GEMM)["significance"] == "within noise"
    # The sums stay those of the two that were named.
    assert row(several, "kernels", GEMM)["before_total_ns"] == row(single, "kernels", GEMM)["before_total_ns"]
    slowest = [program(scaled(1.6), jitter=0.003, seed=seed) for seed in (4, 5)]
    changed = diff.compare(fast, slowest[0], also_before=more["also_after"], also_after=slowest[1:]).summary()
    assert changed["outcome"] == "slower"
    assert "16 and 16 steps" in changed["headline"]
    assert noise.ONE_RUN not in changed["headline"]


# ---------------------------------------------------------------- captures without steps


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [
        ([(GEMM, 40)], [(GEMM, 23)], "changed"),
        ([(GEMM, 40)], [(GEMM, 40)], "within noise"),
        # Launches of two sizes in turn, of which the large ones became quicker.
        ([(GEMM, 10), (GEMM, 100)], [(GEMM, 10), (GEMM, 50)], "changed"),
        ([(GEMM, 40)], [(GEMM, 20), (GEMM, 20)], "inconclusive"),  # launched more often
        # One long launch leads the sum another way than most launches went.
        ([(GEMM, 900), *[(GEMM, 40)] * 9], [(GEMM, 41)] * 10, "within noise"),
    ],
)
def test_kernels_launched_equally_often_are_judged_by_their_launches(
    before: Kernels, after: Kernels, word: str
) -> None:
    count = 1 if len(before) > 2 else 250
    jitter = 0.0 if len(before) > 2 else 0.05
    sides = []
    for seed, kernels in enumerate((before, after)):
        sides.append(program(kernels, count, named="", jitter=jitter, seed=seed))
    found = diff.compare(*sides)
    kernel = row(found, "kernels", GEMM)
    assert (found.unit, kernel["significance"]) == ("trace", word)
    if word != "inconclusive":
        assert kernel["low_ns"] <= kernel["delta_ns"] <= kernel["high_ns"]
    assert words(found, "figures") == {"inconclusive"}


def test_steps_that_hold_little_of_the_work_do_not_stand_for_it() -> None:
    trace = program()
    tables = {table: trace.table(table) for table in ("kernels", "calls", "ranges")}
    for dropped, unit in ((2, "step"), (5, "trace")):
        ranges = tables["ranges"].iloc[dropped:].reset_index(drop=True)
        found = diff.compare(trace, Trace.from_frames({**tables, "ranges": ranges}, trace.meta))
        assert found.unit == unit
    assert set(diff.compare(trace, program(named="")).tables["ranges"]["name"]) == set()


def test_a_selection_is_compared_step_by_step(tmp_path: Path) -> None:
    traces = []
    for fault in (None, "starved"):
        planted.training(tmp_path / f"{fault}.sqlite", fault)
        traces.append(nsightkit.load(tmp_path / f"{fault}.sqlite"))
    inside = diff.compare(*(selection.select(trace, within="^forward$") for trace in traces))
    assert (inside.unit, len(inside.before[0].windows), len(inside.after[0].windows)) == ("step", 12, 12)
    assert set(inside.tables["figures"]["name"]) == {"wall_ns", "busy_ns", "kernel_ns", "memop_ns", "graph_ns"}
    whole = diff.compare(*traces)
    point = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int, T2, T3)"
    # Half of these kernels are launched by the forward pass.
    assert row(inside, "kernels", point)["before_count"] == row(whole, "kernels", point)["before_count"] / 2
    last = diff.compare(*(selection.select(trace, last_steps=5) for trace in traces))
    assert len(last.after[0].windows) == 5


# ---------------------------------------------------------------- warnings


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({}, {"seed": 3}, []),
        ({}, {"gpus": [Gpu(0, "Another GPU")]}, [f"Different GPUs: {CARD} before, Another GPU after"]),
        ({}, {"tool": "another"}, ["Different profilers: planted before, another after"]),
        ({}, {"missing": ["memops", "os_calls"]}, ["The capture after did not record os_calls"]),
        ({}, {"graph": 80}, ["The capture after holds 8 CUDA-graph replays without their kernels"]),
        ({}, {"kernels": [("softmax_kernel", 70)]}, ["The captures share no kernels"]),
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
def test_what_else_differs(before: dict[str, Any], after: dict[str, Any], expected: Sequence[str]) -> None:
    summary = diff.summary(program(**before), program(**after))
    assert len(summary["warnings"]) == len(expected), summary["warnings"]
    for warning, start in zip(summary["warnings"], expected, strict=True):
        assert warning.startswith(start)
    assert summary["headline"].startswith("On different GPUs: ") == ("gpus" in after)
    assert summary["headline"].startswith("With different amounts of work: ") == ("count" in after)


def test_what_was_not_recorded_is_not_compared() -> None:
    frames = {table: program().table(table) for table in ("calls", "ranges")}
    on_cpu = Trace.from_frames(frames, TraceMeta(tool="planted", missing=["kernels", "memops", "graphs", "ops"]))
    found = diff.summary(on_cpu, on_cpu)
    assert [figure["name"] for figure in found["figures"]] == ["wall_ns"]
    assert {table for table in diff.TABLES if found[table]} == {"figures", "ranges"}
    assert (found["moved"], found["outcome"]) == (None, "no change")
    assert not diff.summary(program(), on_cpu)["kernels"]
    empty = Trace.from_frames({}, TraceMeta(tool="planted"))
    nothing = diff.summary(empty, empty)
    assert (nothing["outcome"], nothing["changes"]) == ("inconclusive", [])


def test_what_the_command_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for side, fault in (("before", "sync"), ("after", None)):
        planted.training(tmp_path / f"{side}.sqlite", fault, steps=8)
    files = [str(tmp_path / f"{side}.sqlite") for side in diff.SIDES]
    assert cli.run(["diff", *files, "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    for table in diff.TABLES:
        assert set(diff.COLUMNS) <= document[table][0].keys()
        for shown in document[table]:
            assert isinstance(shown["delta_ns"], int)
    assert cli.run(["diff", *files]) == 0
    assert capsys.readouterr().out.startswith("Faster: the step time went from ")


# ---------------------------------------------------------------- real pairs, read by hand


def test_resnet_with_and_without_loader_workers(shared_traces: Path) -> None:
    """PyTorch's own example: ResNet-50 on one V100, with ``num_workers`` 0 and then 4, six profiled steps each.

    By hand, from the two files:

    - The TensorBoard plug-in says that a mean step took 177.592 ms, 59.262 ms (33.4 %) of them in the DataLoader, and
      then 141.068 ms with 1.186 ms (0.8 %). Its means include two slow steps of the second run; the other four take
      124 to 127 ms.
    - The kernels are the same model: 98.6 ms per step, and 99.1 ms. But cuDNN chose other ones for the gradients of
      weights: ``wgrad_alg0_engine`` 156 and then 90 launches, ``stridedB_splitK_medium`` 6 and then 72.
    """
    names = ("num_workers_0__worker0.1623143089861", "num_workers_4__worker0.1623212756351")
    traces = [nsightkit.load(shared_traces / "kineto" / f"resnet50_{name}.pt.trace.json.gz") for name in names]
    found = diff.compare(*traces)
    summary = found.summary()
    assert (summary["outcome"], summary["moved"]) == ("faster", True)
    assert -0.30 < row(found, "figures", "wall_ns")["change"] < -0.28
    assert "from input-pipeline (33.2 % of the time) to launch-overhead" in summary["bottleneck"]["text"]
    loading = row(found, "ranges", "enumerate(DataLoader).__next__", clock="CPU")
    assert (loading["significance"], loading["before_ns"] > 65e6, loading["after_ns"] < 2e6) == ("changed", True, True)
    waiting = row(found, "gaps", "input-pipeline")
    totals = ["before_total_ns", "after_total_ns", "significance"]
    assert waiting[totals].tolist() == [285_214_000, 0, "changed"]
    for name, launches in (("wgrad_alg0_engine<float, 128, 6, 7", [156, 90]), ("splitK_medium", [6, 72])):
        (swapped,) = [kernel for kernel in summary["kernels"] if name in kernel["name"]]
        assert [swapped["before_count"], swapped["after_count"]] == launches
    assert len(summary["warnings"]) == 1
    assert "A library chose other" in summary["warnings"][0]


def test_two_jobs_on_two_cards(shared_traces: Path) -> None:
    """HTA's example of a comparison: a recommendation model on A100s, and then, partly compiled, on V100s.

    By hand: fp32 products ran on the A100's tensor cores, in TF32, by cutlass; the V100 runs ``sgemm``: 13.8 and then
    34.8 ms per step.
    """
    files = ("control__control", "test__test")
    traces = [nsightkit.load(shared_traces / "hta" / f"trace_diff__{name}.json.gz") for name in files]
    found = diff.compare(*traces)
    summary = found.summary()
    assert summary["warnings"][0].startswith("Different GPUs: NVIDIA A100-PG509-200 before, Tesla V100-SXM2-16GB after")
    assert (summary["outcome"], summary["moved"]) == ("slower", True)
    # Copies take more of the time, but collectives would gain more: a cause weighs what its removal gains.
    assert summary["bottleneck"]["after"] == "communication"
    kernels = found.tables["kernels"]
    products = kernels[kernels["category"] == "GEMM"]
    assert products["before_ns"].sum() == pytest.approx(13.8e6, rel=0.01)
    assert products["after_ns"].sum() == pytest.approx(34.8e6, rel=0.01)


def test_eager_against_graph_replays(shared_traces: Path) -> None:
    """A 2.7 B model's forward pass on an A100: one file eager, one under ``torch.compile(mode="reduce-overhead")``.

    By hand: the eager file holds an upload of 3.16 s and four passes of 3,408 ms of kernels; the compiled one ten
    replays of a CUDA graph, 7,811 ms, and few other kernels. A tool that reads the kernel table alone has nothing to
    compare.
    """
    folder = shared_traces / "cs336-zx3xyy"
    traces = [nsightkit.load(folder / f"result_2_7B_{name}.sqlite") for name in ("nvtx", "compile_ro")]
    found = diff.compare(*traces)
    assert row(found, "figures", "busy_ns")[["before_ns", "after_ns"]].tolist() == [6_564_856_884, 7_811_219_965]
    assert row(found, "figures", "graph_ns")["before_ns"] == 0
    assert row(found, "figures", "graph_ns")["after_ns"] == pytest.approx(7.811e9, rel=1e-4)
    summary = found.summary()
    assert (summary["unit"], summary["outcome"], summary["moved"]) == ("trace", "inconclusive", None)
    assert any("10 CUDA-graph replays without their kernels" in warning for warning in summary["warnings"])


@pytest.mark.parametrize("name", ["trace_diff__control__control", "triton_example__triton_example"])
def test_a_file_against_itself(name: str, shared_traces: Path) -> None:
    trace = nsightkit.load(shared_traces / "hta" / f"{name}.json.gz")
    found = diff.compare(trace, trace)
    for table, rows in found.tables.items():
        assert set(rows["delta_ns"]) <= {0}, table
        assert "changed" not in words(found, table)


# ---------------------------------------------------------------- memory


def test_lines_that_moved_are_the_same_lines() -> None:
    def program_of(moved: int, file: str) -> snapshots.Snapshot:
        memory = make_snapshot.Allocator()
        for name, line, size in (("forward", 10 + moved, 4), ("forward", 10 + moved, 2), (file, 1, 3)):
            memory.malloc(size << 20, frames=[{"name": name, "filename": f"{name}.py", "line": line}])
        return snapshots.from_object(memory.snapshot(), file)

    found = diff_memory.summary(program_of(0, "old"), program_of(4, "new"))
    sites = {site["name"]: (site["match"], site["delta_bytes"]) for site in found["sites"]}
    assert sites == {
        "forward.py:14 forward": ("normalised", 0),
        "old.py:1 old": ("disappeared", -(3 << 20)),
        "new.py:1 new": ("appeared", 3 << 20),
    }
    assert found["outcome"] == "no change"


def test_real_snapshots(shared_traces: Path) -> None:
    files = sorted(shared_traces.glob("cs336-*-memsnap/*.pickle"))
    found = diff_memory.summary(*(snapshots.read(file) for file in files))
    for table in ("sites", "categories"):
        assert found["figures"][0]["delta_bytes"] == sum(shown["delta_bytes"] for shown in found[table])
