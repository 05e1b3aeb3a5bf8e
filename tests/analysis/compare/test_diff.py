"""Two captures: exact deltas, sums that add up, noise that is not a change, and what truly changed in real pairs."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import make_snapshot
import numpy as np
import pandas as pd
import pytest
from synthetic import planted
from synthetic.simulated_programs import loop
from synthetic.simulator import Launch, Load, Program, play

import nsightkit
from nsightkit import cli
from nsightkit.analysis.compare import check, diff, diff_words
from nsightkit.analysis.compare import runs as run_metrics
from nsightkit.analysis.compare.baseline import make
from nsightkit.analysis.core import noise
from nsightkit.analysis.core.text import time_text
from nsightkit.analysis.memory import diff as diff_memory
from nsightkit.analysis.timeline import overview, selection
from nsightkit.errors import UsageError
from nsightkit.trace import Trace, TraceMeta
from nsightkit.trace import snapshot as snapshots
from nsightkit.trace.model import Gpu

US = 1_000
PID = 9
MAIN = PID << 24 | 1
CARD = "Synthetic GPU"
GEMM, ADD, NORM = "ampere_sgemm_128x64_nn", "vectorized_elementwise_kernel<4, CUDAFunctor_add>", "layer_norm_kernel"
BASE = ((GEMM, 40 * US), (ADD, 20 * US), (NORM, 10 * US), (ADD, 20 * US))
MEMORY = ["src_kind", "dst_kind"]
COLUMNS = {
    "kernels": ["start_ns", "end_ns", "device", "stream", "process", "correlation", "name"],
    "memops": ["start_ns", "end_ns", "device", "stream", "process", "correlation", "kind", "bytes", *MEMORY],
    "graphs": ["start_ns", "end_ns", "device", "stream", "process", "correlation", "graph_id"],
    "calls": ["start_ns", "end_ns", "process", "thread", "correlation", "name"],
    "ranges": ["start_ns", "end_ns", "process", "thread", "name"],
}

Kernels = Sequence[tuple[str, int]]


@functools.cache
def steps_of(
    kernels: Kernels, count: int, jitter: float, seed: int, copied: int, stalls: tuple[int, ...], named: str, graph: int
) -> dict[str, pd.DataFrame]:
    """Tables of steps that each copy a batch and launch the same kernels; `stalls` are steps that take longer."""
    rng = np.random.default_rng(seed)
    rows: dict[str, list[tuple[Any, ...]]] = {table: [] for table in COLUMNS}
    now, correlation = 1_000_000, itertools.count(1)
    for number in range(count):
        start = free = now
        work = [("memops", "cudaMemcpyAsync", 3 * US, ("HtoD", copied, "pinned", "device"))]
        work += [("kernels", "cudaLaunchKernel", lasts, (name,)) for name, lasts in kernels]
        work += [("graphs", "cudaGraphLaunch", graph, (1,))] * (graph > 0)
        for table, call, lasts, more in work:
            ticket = next(correlation)
            rows["calls"].append((now, now + 1 * US, PID, MAIN, ticket, call))
            now += 2 * US
            spread = jitter * rng.standard_normal() if table == "kernels" else 0.0
            begin = max(free, now)
            free = begin + max(round(lasts * (1 + spread)), 1)
            rows[table].append((begin, free, 0, 7, PID, ticket, *more))
        now = max(now, free) + round(100 * US * (1 + jitter * rng.standard_normal()))
        now += 100 * US if number in stalls else 0
        if named:
            rows["ranges"].append((start, now - 100, PID, MAIN, f"{named} {number}"))
    frames = {table: pd.DataFrame(rows[table], columns=columns) for table, columns in COLUMNS.items()}
    for frame in frames.values():
        for text in frame.columns.intersection(["name", "kind", "src_kind", "dst_kind"]):
            frame[text] = pd.Categorical(frame[text])
    return frames


def program(kernels: Kernels = BASE, **options: Any) -> Trace:
    """A trace of such steps; other options are of its meta data."""
    given = {"count": 8, "jitter": 0.0, "seed": 0, "copied": 4096, "stalls": (), "named": "train_step", "graph": 0}
    given |= {name: options.pop(name) for name in list(options) if name in given}
    meta = {"tool": "planted", "gpus": [Gpu(0, CARD)], **options}
    return Trace.from_frames(steps_of(tuple(kernels), **given), TraceMeta(**meta))  # type: ignore[arg-type]


def scaled(factor: float, only: str | None = None) -> Kernels:
    """The kernels of BASE, all or one of them, so many times as long."""
    return tuple((name, round(ns * factor) if only in (None, name) else ns) for name, ns in BASE)


def row(found: diff.Comparison | dict[str, Any], table: str, name: str, **others: str) -> pd.Series:
    frame = found.tables[table] if isinstance(found, diff.Comparison) else pd.DataFrame(found[table])
    first = {"gaps": "cause", "memops": "kind"}.get(table, "name")
    for column, value in {first: name, **others}.items():
        frame = frame[frame[column] == value]
    assert len(frame) == 1, (name, frame)
    return frame.iloc[0]


def words(found: diff.Comparison, table: str) -> set[str]:
    return set(found.tables[table]["significance"])


@functools.cache
def real(path: Path) -> Trace:
    """A capture that several tests read."""
    return nsightkit.load(path)


@pytest.fixture(scope="module")
def faultless(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Trace]:
    path = tmp_path_factory.mktemp("planted") / "none.sqlite"
    return planted.training(path, None, seed=1), nsightkit.load(path)


# ---------------------------------------------------------------- exact deltas


def test_a_slower_kernel_is_found_to_the_nanosecond() -> None:
    found = diff.compare(program(), program(scaled(1.35, ADD)))
    assert found.unit == "step"
    slower = row(found, "kernels", ADD)
    assert slower[["before_ns", "after_ns", "delta_ns", "low_ns", "high_ns"]].tolist() == [40e3, 54e3, 14e3, 14e3, 14e3]
    counts = ["before_count", "after_count", "before_total_ns", "after_total_ns"]
    assert slower[counts].tolist() == [16, 16, 320e3, 432e3]
    assert (slower["change"], slower["mean_delta_ns"]) == (pytest.approx(0.35), 14e3)
    assert slower[["match", "category", "significance"]].tolist() == ["name", "elementwise", "changed"]
    for name in (GEMM, NORM):
        assert row(found, "kernels", name)[["delta_ns", "low_ns", "high_ns"]].tolist() == [0, 0, 0]
        assert row(found, "kernels", name)["significance"] == "within noise"
    for table, name in (("figures", "kernel_ns"), ("figures", "wall_ns"), ("categories", "elementwise")):
        assert row(found, table, name)["delta_ns"] == 14e3
    assert row(found, "ranges", "train_step#", clock="GPU")["delta_ns"] == 14e3
    summary = found.summary()
    assert (summary["outcome"], summary["judged_steps"]) == ("slower", [8, 8])
    assert {change["table"] for change in summary["changes"]} == {"figures", "kernels", "categories", "ranges"}


def test_renamed_and_new_kernels_keep_the_sums() -> None:
    found = diff.compare(
        program(), program([("volta_sgemm_32x128_nn", 60 * US), (ADD, 30 * US), ("exp_kernel", 5 * US)])
    )
    renamed = row(found, "kernels", "volta_sgemm_32x128_nn")  # another card's name of the product
    assert renamed[["match", "before_names", "delta_ns"]].tolist() == ["normalised", [GEMM], 20 * US]
    fresh = row(found, "kernels", "exp_kernel")
    assert fresh[["match", "before_names", "before_ns", "significance"]].tolist() == ["appeared", [], 0, "changed"]
    assert math.isnan(fresh["change"])
    totals = found.tables["kernels"][["before_total_ns", "after_total_ns"]].sum()
    assert totals.tolist() == [8 * 90 * US, 8 * 95 * US]


@pytest.mark.parametrize("fault", ["starved", "sync", "tiny", "pageable", "augment"])
def test_planted_faults(fault: Any, faultless: tuple[dict[str, Any], Trace], tmp_path: Path) -> None:
    truths = [planted.training(tmp_path / "fault.sqlite", fault, seed=0), faultless[0]]
    found = diff.compare(nsightkit.load(tmp_path / "fault.sqlite"), faultless[1])
    for side, truth in zip(diff.SIDES, truths, strict=True):
        kernels = found.tables["kernels"].set_index("name")[f"{side}_total_ns"]
        assert kernels[list(truth["kernels"])].tolist() == [total for _, total in truth["kernels"].values()]
        assert found.tables["gaps"][f"{side}_total_ns"].sum() == truth["idle_ns"]
        for cause, total in truth["gaps"].items():
            assert row(found, "gaps", cause)[f"{side}_total_ns"] == pytest.approx(total, rel=0.02)
    summary = found.summary()
    was, now = planted.BOTTLENECK_OF[fault], planted.BOTTLENECK_OF[None]
    assert (summary["moved"], summary["outcome"]) == (True, "faster")
    assert f"moved from {was} (" in summary["bottleneck"]["text"]
    assert f" to {now} (" in summary["bottleneck"]["text"]
    # The loop without a fault launches ahead of its device: on the CPU's clock its steps would take next to nothing.
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
    traces = [real(shared_traces / name) for name in names]
    tables = diff.compare(*traces).tables
    for side, trace in zip(diff.SIDES, traces, strict=True):
        whole = overview.summary(trace)
        sums = {name: int(table[f"{side}_total_ns"].sum()) for name, table in tables.items()}
        assert sums["kernels"] == whole["kernel_ns"]
        assert sums["categories"] == whole["kernel_ns"] + whole["graph_ns"]
        assert sums["memops"] == whole["memop_ns"]
        assert sums["gaps"] == whole["idle_ns"]
        assert tables["kernels"][f"{side}_count"].sum() == whole["kernel_count"]
        launched = tables["operators"].query("clock == 'GPU'")
        assert int(launched[f"{side}_total_ns"].sum()) in (whole["kernel_ns"], 0)


def test_steps_of_another_number_compare() -> None:
    found = diff.compare(program(count=5), program(count=11))
    assert all((table["delta_ns"] == 0).all() for table in found.tables.values())
    assert row(found, "kernels", GEMM)[["before_total_ns", "after_total_ns"]].tolist() == [5 * 40 * US, 11 * 40 * US]
    summary = found.summary()
    assert summary["outcome"] == "no change"
    assert summary["warnings"] == ["5 steps before and 11 after: times are those of a step."]


# ---------------------------------------------------------------- noise


def test_noise_is_not_called_a_change() -> None:
    """A step's time at most once in twenty pairs without a change, and of all rows about as many."""
    traces = [program(count=10, jitter=0.08, seed=seed) for seed in range(21)]
    pairs = [diff.compare(before, after) for before, after in itertools.pairwise(traces)]
    assert sum(row(found, "figures", "wall_ns")["significance"] == "changed" for found in pairs) <= 1
    said = pd.concat([table["significance"] for found in pairs for table in found.tables.values()])
    assert (said == "changed").mean() < 0.07


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
    assert "Inconclusive: 3 and 3 steps are too few" in summary["headline"]
    assert found.tables["kernels"]["low_ns"].isna().all()
    assert words(found, "kernels") == {"inconclusive"}
    # What changed is listed all the same, as what may be noise.
    assert {change["significance"] for change in summary["changes"]} == {"inconclusive"}


def test_a_change_that_is_sure_and_too_small_does_not_matter() -> None:
    """Half a percent of a step, in each of them."""
    found = diff.compare(program(), program(scaled(1.0225, GEMM)))
    assert row(found, "kernels", GEMM)[["delta_ns", "low_ns", "significance"]].tolist() == [900, 900, "changed"]
    summary = found.summary()
    assert (summary["outcome"], summary["changes"], summary["where"]) == ("no change", [], "")
    assert "too little to matter" in summary["headline"]
    assert diff.summary(program(), program(scaled(1.0225, GEMM)), min_share=0.001)["outcome"] == "slower"


def test_steps_that_stand_out_are_told_of_and_do_not_hide_a_change() -> None:
    found = diff.compare(program(jitter=0.005), program(scaled(0.5), jitter=0.005, seed=1, stalls=(0, 4)))
    wall = row(found, "figures", "wall_ns")
    assert wall["significance"] == "changed"
    # Medians are of the ordinary steps, means of all.
    assert wall["delta_ns"] == pytest.approx(-45 * US, rel=0.1)
    assert wall["mean_delta_ns"] == pytest.approx(-45 * US + 100 * US * 2 / 8, rel=0.1)
    summary = found.summary()
    assert summary["judged_steps"] == [8, 6]
    assert any(text.startswith("2 of 8 steps after stand out") for text in summary["warnings"])


def test_further_captures_say_what_captures_differ_by() -> None:
    def clocked(speed: float, seed: int) -> Trace:
        return program(scaled(speed), jitter=0.003, seed=seed)

    # Steps of one capture agree to a third of a percent; captures differ by three.
    pair = clocked(1.0, 0), clocked(1.03, 1)
    single = diff.compare(*pair)
    assert row(single, "kernels", GEMM)["significance"] == "changed"
    assert all(table["between_ns"].isna().all() for table in single.tables.values())
    with_more = diff.compare(*pair, also_before=[clocked(1.03, 2)], also_after=[clocked(1.0, 3)])
    repeated = row(with_more, "kernels", GEMM)
    assert (repeated["significance"], with_more.summary()["judged_steps"]) == ("within noise", [16, 16])
    assert repeated["between_ns"] > abs(repeated["delta_ns"])
    # The sums stay those of the two that were named.
    assert repeated["before_total_ns"] == row(single, "kernels", GEMM)["before_total_ns"]
    more = {"also_before": [clocked(1.01, 2)], "also_after": [clocked(1.59, 3)]}
    changed = diff.compare(clocked(1.0, 0), clocked(1.6, 1), **more)
    assert row(changed, "kernels", GEMM)["significance"] == "changed"
    assert noise.ONE_RUN not in changed.summary()["headline"]
    # The gate says the same of the same captures.
    slower = diff.summary(clocked(1.0, 0), clocked(1.6, 1))
    gate = check.compare(make([run_metrics.of_trace(clocked(1.0, 0))]), [run_metrics.of_trace(clocked(1.6, 1))])
    assert slower["headline"].endswith(noise.ONE_RUN)
    assert any(note.startswith(noise.ONE_RUN) for note in gate["notes"])


def test_where_the_time_went() -> None:
    slower = diff.summary(program(), program(scaled(2, GEMM)))
    assert slower["where"] == "Where: GPU busy time +40.00 µs (GEMM +40.00 µs)."
    assert slower["where"] in diff_words.markdown(slower).replace("\\", "")


# ---------------------------------------------------------------- captures without steps


def test_without_steps_whole_captures_are_compared() -> None:
    found = diff.summary(program(named=""), program(named="", count=16))
    assert (found["unit"], found["outcome"], found["where"]) == ("trace", "inconclusive", "")
    assert row(found, "kernels", GEMM)["delta_ns"] == 8 * 40 * US
    assert found["headline"].startswith("With different amounts of work: From the first operation to the last")
    assert found["headline"].endswith("Inconclusive: captures without steps do not show what noise is.")
    assert found["warnings"][0].startswith("No steps were found before and after")
    assert "ran 2.00 times as often after (64 launches, 32 before)" in found["warnings"][1]
    one_sided = diff.summary(program(), program(scaled(2), named=""))
    assert one_sided["ranges"] == []  # steps of one side only are not ranges that went
    assert [text.partition(":")[0] for text in one_sided["warnings"]] == ["No steps were found after"]


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [
        ([(GEMM, 40)], [(GEMM, 23)], "changed"),
        ([(GEMM, 40)], [(GEMM, 40)], "within noise"),
        # Launches of two sizes in turn, of which the large ones became quicker.
        ([(GEMM, 10), (GEMM, 100)], [(GEMM, 10), (GEMM, 50)], "changed"),
        ([(GEMM, 40)], [(GEMM, 20), (GEMM, 20)], "inconclusive"),  # launched more often
    ],
)
def test_kernels_launched_as_often_are_judged_by_their_launches(before: Kernels, after: Kernels, word: str) -> None:
    sides = [
        program([(name, us * US) for name, us in kernels], named="", count=250, jitter=0.05, seed=seed)
        for seed, kernels in enumerate((before, after))
    ]
    found = diff.compare(*sides)
    kernel = row(found, "kernels", GEMM)
    assert kernel["significance"] == word
    if word != "inconclusive":
        assert kernel["low_ns"] <= kernel["delta_ns"] <= kernel["high_ns"]
    assert words(found, "figures") == {"inconclusive"}


def test_a_long_launch_that_leads_the_sum_another_way_is_no_change() -> None:
    slower = [(GEMM, 40 * US)] * 9
    before = program([(GEMM, 900 * US), *slower], named="", count=1)
    after = program([(name, 41 * US) for name, _ in [*slower, (GEMM, 1)]], named="", count=1)
    assert row(diff.compare(before, after), "kernels", GEMM)["significance"] == "within noise"


def test_steps_that_hold_little_of_the_work_do_not_stand_for_it() -> None:
    trace = program()
    rows = {table: trace.table(table) for table in ("kernels", "memops", "calls", "ranges")}
    fewer = {**rows, "ranges": rows["ranges"].iloc[2:].reset_index(drop=True)}
    some = diff.summary(trace, Trace.from_frames(fewer, trace.meta))
    assert (some["unit"], some["after"]["steps"]) == ("step", 6)
    assert row(some, "kernels", GEMM)[["before_ns", "after_ns", "after_count"]].tolist() == [40e3, 40e3, 8]
    assert "25 % of the GPU's time after was launched in no step and is not compared." in some["warnings"]
    fewest = {**rows, "ranges": rows["ranges"].iloc[5:].reset_index(drop=True)}
    most = diff.summary(trace, Trace.from_frames(fewest, trace.meta))
    assert most["unit"] == "trace"
    assert any("launched in no step (0 % before and 62 % after)" in text for text in most["warnings"])


def test_steps_can_be_named_or_counted() -> None:
    before, after = program(named="turn"), program(named="lap", count=16)
    assert diff.compare(before, after).unit == "trace"
    named = diff.compare(before, after, match=("turn", "lap"))
    assert (named.unit, row(named, "kernels", GEMM)["delta_ns"]) == ("step", 0)
    counted = diff.compare(before, after, steps=(8, 16))
    assert row(counted, "kernels", GEMM)[["before_ns", "after_ns"]].tolist() == [40 * US, 40 * US]
    assert words(counted, "kernels") == {"inconclusive"}


def test_a_selection_is_compared_step_by_step(tmp_path: Path) -> None:
    traces = []
    for fault in (None, "starved"):
        planted.training(tmp_path / f"{fault}.sqlite", fault)
        traces.append(nsightkit.load(tmp_path / f"{fault}.sqlite"))
    inside = diff.compare(*(selection.select(trace, within="^forward$") for trace in traces))
    assert (inside.unit, inside.before[0].count, inside.after[0].count) == ("step", 12, 12)
    assert set(inside.tables["figures"]["name"]) == {"wall_ns", "busy_ns", "kernel_ns", "memop_ns"}
    point = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int, T2, T3)"
    # Half of these kernels are launched by the forward pass.
    whole = diff.compare(*traces)
    assert row(inside, "kernels", point)["before_count"] == row(whole, "kernels", point)["before_count"] / 2
    last = diff.compare(*(selection.select(trace, last_steps=5) for trace in traces))
    assert last.after[0].count == 5


# ---------------------------------------------------------------- what to know besides


def warnings(before: Trace, after: Trace) -> list[str]:
    return list(diff.summary(before, after)["warnings"])


def test_another_card_is_said_first() -> None:
    summary = diff.summary(program(driver="560.2"), program(gpus=[Gpu(0, "Another GPU")], driver="570.1"))
    assert summary["headline"].startswith("On different GPUs: ")
    assert summary["warnings"] == [
        f"Different GPUs: {CARD} before, Another GPU after; times differ by the card, whatever changed in the program.",
        "Different drivers: 560.2 before, 570.1 after.",
    ]


def test_circumstances() -> None:
    before = program(tool_version="1", distributed={"world_size": 8, "rank": 0}, notes=["Odd."])
    after = {"distributed": {"world_size": 2, "rank": 1}, "notes": ["Odd.", "Odder."], "missing": ["os_calls"]}
    assert warnings(before, program(tool_version="2", **after)) == [
        "Different versions of the tool: 1 before, 2 after.",
        "Different world sizes: 8 before, 2 after.",
        "Different ranks: 0 before, 1 after.",
        "The capture after did not record os_calls: what depends on that is not compared.",
        "In both captures: Odd.",
        "In the capture after: Odder.",
    ]
    tools = warnings(program(), program(tool="another", tool_version="1"))
    assert tools == ["Different tools: planted before, another after; each slows the CPU down in its own way."]
    assert not warnings(program(), program(seed=3))


def test_another_batch_shows_in_what_is_copied() -> None:
    (text,) = warnings(program(copied=1 << 20), program(copied=1 << 21))
    assert text.startswith("A step copies 1.049 MB to the GPU before and 2.097 MB after")
    assert not warnings(program(copied=0), program(copied=4096))  # a size that was not recorded


def test_all_kernels_alike_is_a_clock() -> None:
    kernels = [(f"kernel_{chr(97 + i)}", (5 + i) * US) for i in range(8)]
    slower = [(name, round(ns * 1.06)) for name, ns in kernels]
    (text,) = warnings(program(kernels), program(slower))
    assert text.startswith("8 kernels that run as often as before take another time, all alike: +6.0 %")
    # One kernel that is slower, another number of launches, or a batch that each kernel feels in its own way.
    uneven = [(name, round(ns * (1.05 + 0.2 * i))) for i, (name, ns) in enumerate(kernels)]
    for other in ([*kernels[:-1], (kernels[-1][0], 40 * US)], slower * 2, uneven):
        assert not warnings(program(kernels), program(other))


def test_graph_replays_are_work_whose_kernels_are_hidden() -> None:
    replay = sum(ns for _, ns in BASE)
    found = diff.summary(program(), program([], graph=replay))
    assert row(found, "figures", "graph_ns")["after_ns"] == replay
    assert row(found, "categories", "CUDA graphs")["after_ns"] == replay
    assert any(
        text.startswith("The capture after holds 8 CUDA-graph replays, 720.0 µs, without") and "disappeared" in text
        for text in found["warnings"]
    )


def test_a_library_that_chose_other_kernels() -> None:
    def convolution(kernels: Kernels) -> Trace:
        trace = program(kernels)
        frames = {table: trace.table(table) for table in ("kernels", "memops", "calls", "ranges")}
        calls = frames["calls"][frames["calls"]["name"] == "cudaLaunchKernel"]
        ops = calls[["start_ns", "end_ns", "process", "thread"]].reset_index(drop=True)
        ops["start_ns"] -= 200
        ops["end_ns"] += 200
        ops["name"] = pd.Categorical(["aten::conv"] * len(ops))
        return Trace.from_frames({**frames, "ops": ops}, trace.meta)

    before = convolution([("winograd", 40 * US), ("implicit", 5 * US)])
    found = diff.summary(before, convolution([("winograd", 10 * US), ("implicit", 36 * US)]))
    took = "45.00 µs before and 46.00 µs after in all"
    assert f"aten::conv runs other kernels, {took}: the library chose other ones." in found["warnings"]
    assert row(found, "kernels", "implicit")["operator"] == "aten::conv"
    assert row(found, "operators", "aten::conv", clock="GPU")["delta_ns"] == 1 * US


def test_the_same_bottleneck_does_not_hide_which_cause_went(tmp_path: Path) -> None:
    """Each step dispatches 100 tiny kernels for 2 ms, and one program loads for 1 ms besides."""
    step = [Launch("tiny", 3 * US, 20 * US)] * 100
    for name, first in (("before", [Load(1000 * US)]), ("after", [])):
        made = Program(name, [loop(lambda _, first=first: [*first, *step])], jitter=0.0)  # type: ignore[misc]
        play(made).write(tmp_path / f"{name}.sqlite")
    found = diff.summary(*(nsightkit.load(tmp_path / f"{name}.sqlite") for name in diff.SIDES))
    gone = row(found, "gaps", "input-pipeline")
    assert (gone["before_ns"], gone["after_ns"]) == (pytest.approx(1000 * US, rel=0.03), 0)
    text = found["bottleneck"]["text"]
    assert text.startswith("The bottleneck did not move: launch-overhead, ")
    took = time_text(gone["before_ns"])
    assert text.endswith(f" What changed most of idle time is input-pipeline: {took} before and 0 ns after.")
    assert found["moved"] is False


def test_what_was_not_recorded_is_not_compared() -> None:
    frames = {table: program().table(table) for table in ("calls", "ranges")}
    on_cpu = Trace.from_frames(frames, TraceMeta(tool="planted", missing=["kernels", "memops", "graphs", "ops"]))
    found = diff.summary(on_cpu, on_cpu)
    assert [figure["name"] for figure in found["figures"]] == ["wall_ns"]
    assert {table for table in diff.TABLES if found[table]} == {"figures", "ranges"}
    assert {of["clock"] for of in found["ranges"]} == {"CPU"}
    assert (found["moved"], found["outcome"]) == (None, "no change")
    mixed = diff.summary(program(), on_cpu)
    assert not mixed["kernels"]
    assert any("after did not record kernels, memops, graphs, ops" in text for text in mixed["warnings"])
    empty = Trace.from_frames({}, TraceMeta(tool="planted"))
    nothing = diff.summary(empty, empty)
    assert (nothing["outcome"], nothing["changes"]) == ("inconclusive", [])
    assert diff_words.markdown(nothing)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"confidence": 1.0}, "a confidence lies between 0 and 1, not 1"),
        ({"min_share": -0.1}, "a smallest share"),
        ({"steps": (0, 3)}, "0 is not a number of steps"),
        ({"match": "("}, "is not a regular expression"),
    ],
)
def test_arguments_out_of_range(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        diff.compare(program(), program(), **options)


# ---------------------------------------------------------------- in words


def test_json_holds_integers_and_what_a_row_is(
    faultless: tuple[dict[str, Any], Trace], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted.training(tmp_path / "before.sqlite", "sync", steps=8)
    assert cli.run(["diff", str(tmp_path / "before.sqlite"), str(faultless[1].path), "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    for table in ("figures", "kernels", "categories", "ranges", "gaps", "memops"):
        assert document[table], table
        for of in document[table]:
            assert set(diff.COLUMNS) <= of.keys()
            assert of["delta_ns"] == of["after_ns"] - of["before_ns"]
            assert of["significance"] in (noise.CHANGED, noise.WITHIN_NOISE, noise.INCONCLUSIVE)
            assert all(v is None or isinstance(v, int) for k, v in of.items() if k.endswith(("_ns", "_count")))
    assert {"moved", "outcome", "headline", "warnings", "unit"} <= document.keys()
    assert (document["before"]["steps"], document["after"]["steps"]) == (8, 12)
    sizes = [abs(change["delta_ns"]) for change in document["changes"]]
    assert sizes == sorted(sizes, reverse=True)


def test_markdown_for_a_pull_request() -> None:
    after = program([(GEMM, 20 * US), (ADD, 24 * US), (NORM, 10 * US), (ADD, 24 * US)])
    text = diff_words.markdown(diff.summary(program(), after))
    assert text.startswith("**A step takes ")
    assert "| a step | before | after | change | 95 % interval |  |" in text
    assert f"| `{GEMM}` | 40.00 µs | 20.00 µs | -50.0 % | -50.0 to -50.0 % | changed |" in text
    assert f"Got worse: `{ADD}` +8.000 µs." in text
    same = diff_words.markdown(diff.summary(program(), program()))
    assert ", within noise (" in same.splitlines()[0]
    assert "Nothing changed by more than noise" in same


HOSTILE = "evil|`</code><img src=x onerror=alert(1)>`| @all [x](javascript:1) \x1b[31m\r\n# *bold*"


def test_names_are_no_markup() -> None:
    hostile = program([(HOSTILE, 50 * US)], named="", gpus=[Gpu(0, HOSTILE)], notes=[HOSTILE])
    other = program([(GEMM, 40 * US)], named="")
    for before, after in ((hostile, other), (other, hostile)):
        text = diff_words.markdown(diff.summary(before, after))
        assert "\x1b" not in text
        for line in text.splitlines():
            code = line.split("`")
            assert len(code) % 2 == 1, line
            outside = "".join(code[::2]).replace("\\\\", "")
            for sign in ("<", "[", "*b"):
                assert f"{sign}" not in outside.replace(f"\\{sign[0]}", ""), line
            if line.startswith("|"):
                assert line.replace("\\|", "").count("|") in (7, 5), line


# ---------------------------------------------------------------- real pairs, read by hand


def test_resnet_with_and_without_loader_workers(shared_traces: Path) -> None:
    """PyTorch's own example: ResNet-50 on one V100, with ``num_workers`` 0 and then 4, six profiled steps each.

    By hand, from the two files:

    - The TensorBoard plug-in says that a mean step took 177.592 ms, 59.262 ms (33.4 %) of them in the DataLoader, and
      then 141.068 ms with 1.186 ms (0.8 %). Its means include two slow steps of the second run, the first that the
      profiler saw (181.6 ms) and the fifth (163.5 ms); the other four take 124 to 127 ms.
    - The kernels are the same model: 98.6 ms a step, and 99.1 ms. But cuDNN chose other ones for the gradients of
      weights: ``wgrad_alg0_engine`` 156 and then 90 launches, ``stridedB_splitK_medium`` 6 and then 72, for the
      same 25 ms of ``aten::cudnn_convolution_backward_weight``.
    - The batch is the same, 12 copies of 115,607,040 bytes in all, but it is copied at 6.1 GB/s instead of 10.1:
      from memory that a worker process shares. That got worse, by a millisecond a step.
    - ``aten::div``, ``aten::to`` and ``aten::_cat`` (decoding and collating) leave the training process.
    """
    names = ("num_workers_0__worker0.1623143089861", "num_workers_4__worker0.1623212756351")
    summary = diff.summary(*(real(shared_traces / "kineto" / f"resnet50_{n}.pt.trace.json.gz") for n in names))
    assert summary["outcome"] == "faster"
    wall = row(summary, "figures", "wall_ns")
    assert wall["before_total_ns"] / 6 == pytest.approx(177_592_000, rel=2e-4)
    assert wall["after_total_ns"] / 6 == pytest.approx(141_068_000, rel=2e-4)
    assert (summary["judged_steps"], -0.30 < wall["change"] < -0.28) == ([6, 4], True)
    assert any(text.startswith("2 of 6 steps after stand out") and "141.1 ms" in text for text in summary["warnings"])
    assert summary["moved"] is True
    # Of the steps, the first one's wait included: a share of the window now, and no longer of the span.
    assert "from input-pipeline (33.2 % of the time) to launch-overhead" in summary["bottleneck"]["text"]
    loading = row(summary, "ranges", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", clock="CPU")
    assert (loading["match"], loading["significance"]) == ("normalised", "changed")
    assert (loading["before_ns"] > 65e6, loading["after_ns"] < 1e6) == (True, True)
    waiting = row(summary, "gaps", "input-pipeline")
    totals = ["before_total_ns", "after_total_ns", "significance"]
    assert waiting[totals].tolist() == [285_214_000, 0, "changed"]
    assert "input-pipeline -57.35 ms" in summary["where"]
    for name, launches in (("wgrad_alg0_engine<float, 128, 6, 7", [156, 90]), ("splitK_medium", [6, 72])):
        (swapped,) = [kernel for kernel in summary["kernels"] if name in kernel["name"]]
        assert [swapped["before_count"], swapped["after_count"]] == launches
        assert swapped["operator"] == "aten::cudnn_convolution_backward_weight"
    assert any(f"{swapped['operator']} runs other kernels" in text for text in summary["warnings"])
    upload = row(summary, "memops", "HtoD")
    assert upload["before_bytes"] == upload["after_bytes"] == 115_607_040
    # A millisecond of 177: true of each step, and of no matter to it.
    assert (upload["significance"], 0.9e6 < upload["delta_ns"] < 1.1e6) == ("changed", True)
    assert "memops" not in {change["table"] for change in summary["changes"]}
    for name in ("aten::div", "aten::to", "aten::_cat"):
        gone = row(summary, "operators", name, clock="CPU")
        assert (gone["significance"], gone["change"] < -0.9) == ("changed", True)


def test_two_jobs_on_two_cards(shared_traces: Path) -> None:
    """HTA's example of a comparison: a recommendation model, and not the change of one thing.

    By hand, from the two files:

    - The first ran on rank 3 of 8 with A100s, the second on rank 1 of 2 with V100s.
    - Part of the second was compiled: ``CompiledFunction`` and its backward launch 4,464 kernels that ``aten``
      operators launched before. It copies from device to device 4,645 times, which the first did 18 times: 92.9 ms, and
      before 2.7 ms.
    - fp32 products ran on the A100's tensor cores, in TF32, by cutlass; the V100 has none for fp32 and runs ``sgemm``:
      13.8 and then 34.8 ms a step.
    - It began in mid-air: 546 kernels of the second trace were launched by a step before, of which it has no calls.
    - Each step copies the same batch, 423,923,264 bytes in six steps, and does not wait for data.
    """
    files = ("control__control", "test__test")
    summary = diff.summary(*(real(shared_traces / "hta" / f"trace_diff__{name}.json.gz") for name in files))
    text = summary["warnings"]
    assert text[0].startswith("Different GPUs: NVIDIA A100-PG509-200 before, Tesla V100-SXM2-16GB after")
    assert text[1:3] == ["Different world sizes: 8 before, 2 after.", "Different ranks: 3 before, 1 after."]
    assert any("6 % of the GPU's time after was launched in no step" in warning for warning in text)
    assert not any("copies" in warning and "batch" in warning for warning in text)
    assert summary["outcome"] == "slower"
    products = row(summary, "categories", "GEMM")
    assert (products["significance"], products["change"]) == ("changed", pytest.approx(1.52, abs=0.01))
    between = row(summary, "memops", "DtoD")
    assert between[["before_count", "after_count"]].tolist() == [18, 4645]
    assert between[["before_total_ns", "after_total_ns"]].tolist() == [2_735_000, 92_932_000]
    compiled = [of for of in summary["operators"] if of["name"].startswith("CompiledFunction") and of["clock"] == "GPU"]
    assert sum(of["before_count"] for of in compiled) == 0
    assert sum(of["after_count"] for of in compiled) == 2574 + 1890
    named = [change["name"] for change in summary["changes"] if change["table"] == "kernels"]
    assert sum("sgemm" in name for name in named) == 3
    assert summary["moved"] is True
    # Copies take more of the time, but collectives would gain more: a cause weighs what its removal gains.
    assert summary["bottleneck"]["after"]["bottleneck"] == "communication"


def test_eager_against_graph_replays(shared_traces: Path) -> None:
    """A 2.7 B model's forward pass on an A100: one file eager, one under ``torch.compile(mode="reduce-overhead")``.

    By hand: the eager file holds the upload of the weights (3.16 s), one pass to warm up (891 ms of kernels) and three
    in ``benchmark_loop`` (2,517 ms); the compiled one ten replays of a CUDA graph, 7,811 ms, and 30 other kernels of
    78 µs in all. So a pass takes 839 ms and then 781 ms of the GPU, 6.9 % less. A tool that reads the kernel table
    alone has nothing to compare, and one that compares the whole files finds the second busier.
    """
    folder = shared_traces / "cs336-zx3xyy"
    eager, replayed = (real(folder / f"result_2_7B_{name}.sqlite") for name in ("nvtx", "compile_ro"))
    whole = diff.summary(eager, replayed)
    assert row(whole, "figures", "busy_ns")[["before_ns", "after_ns"]].tolist() == [6_564_856_884, 7_811_219_965]
    assert (whole["unit"], whole["outcome"], whole["moved"]) == ("trace", "inconclusive", None)
    assert any("10 CUDA-graph replays" in text and "without their kernels" in text for text in whole["warnings"])
    passes = diff.compare(selection.select(eager, within="^benchmark_loop$"), replayed, steps=(3, 10))
    busy = row(passes, "figures", "busy_ns")
    assert (busy["change"], busy["after_ns"]) == (pytest.approx(-0.069, abs=0.001), pytest.approx(781.1e6, rel=1e-3))
    assert row(passes, "figures", "wall_ns")["change"] == pytest.approx(-0.071, abs=0.001)
    assert row(passes, "categories", "CUDA graphs")["after_ns"] == pytest.approx(781.1e6, rel=1e-3)
    # Ten replays and a number that somebody typed say nothing of noise.
    assert words(passes, "figures") == {"inconclusive"}


@pytest.mark.parametrize(
    "name",
    [
        "trace_diff__control__control",
        "cpu_only__rank-34.Jul_15_10_52_41.1074.pt.trace",
        "triton_example__triton_example",
    ],
)
def test_a_file_against_itself(name: str, shared_traces: Path) -> None:
    trace = real(shared_traces / "hta" / f"{name}.json.gz")
    found = diff.compare(trace, trace)
    for table, rows in found.tables.items():
        assert set(rows["delta_ns"]) <= {0}, table
        assert "changed" not in words(found, table)
    assert set(found.tables["kernels"]["match"]) <= {"name"}


# ---------------------------------------------------------------- memory


def test_memory_that_a_kept_graph_held(tmp_path: Path) -> None:
    sides = []
    for keep in (True, False):
        made = make_snapshot.leaking_program(
            tokens=512, vocabulary=2048, parameters=1_000_000, keep_graph=keep, steps=3
        )
        sides.append(snapshots.from_object(made, str(tmp_path / str(keep))))
    found = diff_memory.summary(*sides)
    assert (found["outcome"], found["moment"]) == ("less", "peak")
    peaks = [nsightkit.analysis.memory.snapshot.summary(side)["peak_bytes"] for side in sides]
    assert [found["figures"][0][f"{side}_bytes"] for side in diff.SIDES] == peaks
    for table in ("categories", "sites"):
        for side, peak in zip(diff.SIDES, peaks, strict=True):
            assert sum(of[f"{side}_bytes"] for of in found[table]) == peak
        deltas = [abs(of["delta_bytes"]) for of in found[table]]
        assert deltas == sorted(deltas, reverse=True)
    text = diff_words.markdown(found)
    assert text.startswith("**At its peak the program holds ")
    assert "| by line | before | after | change |" in text.lower()
    same = diff_memory.summary(sides[0], sides[0])
    assert same["outcome"] == "no change"
    assert {of["delta_bytes"] for table in ("figures", "categories", "sites") for of in same[table]} == {0}


def test_lines_that_moved_are_the_same_lines() -> None:
    def program_of(moved: int, file: str) -> snapshots.Snapshot:
        memory = make_snapshot.Allocator()
        for name, line, size in (("forward", 10 + moved, 4), ("forward", 10 + moved, 2), (file, 1, 3)):
            memory.malloc(size << 20, frames=[{"name": name, "filename": f"{name}.py", "line": line}])
        return snapshots.from_object(memory.snapshot(), file)

    found = diff_memory.summary(program_of(0, "old"), program_of(4, "new"))
    assert {site["name"]: (site["match"], site["delta_bytes"]) for site in found["sites"]} == {
        "forward.py:14 forward": ("normalised", 0),
        "old.py:1 old": ("disappeared", -(3 << 20)),
        "new.py:1 new": ("appeared", 3 << 20),
    }


def test_real_snapshots(shared_traces: Path) -> None:
    files = sorted(shared_traces.glob("cs336-*-memsnap/*.pickle"))
    assert len(files) == 2
    found = diff_memory.summary(*(snapshots.read(file) for file in files))
    for table in ("sites", "categories"):
        assert found["figures"][0]["delta_bytes"] == sum(of["delta_bytes"] for of in found[table])
