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


_PROGRAMS: dict[str, Trace] = {}


def program(kernels: Sequence[tuple[str, int]], **settings: Any) -> Trace:
    """A trace as :func:`made` makes it, once for all tests."""
    key = repr((list(kernels), sorted(settings.items())))
    if key not in _PROGRAMS:
        _PROGRAMS[key] = made(kernels, **settings)
    return _PROGRAMS[key]


def made(
    kernels: Sequence[tuple[str, int]],
    *,
    count: int = 8,
    every: int = 100 * US,
    jitter: float = 0.0,
    seed: int = 0,
    copied: int = 4096,
    stalls: Sequence[int] = (),
    named: str | None = "train_step",
    graph: int = 0,
    meta: dict[str, Any] | None = None,
) -> Trace:
    """Steps that each launch the same kernels, and copy a batch; `stalls` are steps that take twice as long."""
    rng = np.random.default_rng(seed)
    rows: dict[str, list[tuple[Any, ...]]] = {"kernels": [], "memops": [], "graphs": [], "calls": [], "ranges": []}
    now, correlation = 1_000_000, itertools.count(1)

    def launch(call: str) -> int:
        nonlocal now
        ticket = next(correlation)
        rows["calls"].append((now, now + 1 * US, PID, MAIN, ticket, call))
        now += 2 * US
        return ticket

    for number in range(count):
        start = now
        free = now
        ticket = launch("cudaMemcpyAsync")
        rows["memops"].append((now, now + 3 * US, 0, 7, PID, ticket, "HtoD", copied, "pinned", "device"))
        free = now + 3 * US
        for name, lasts in kernels:
            ticket = launch("cudaLaunchKernel")
            ns = max(round(lasts * (1 + jitter * rng.standard_normal())), 1)
            begin = max(free, now)
            free = begin + ns
            rows["kernels"].append((begin, free, 0, 7, PID, ticket, name))
        if graph:
            ticket = launch("cudaGraphLaunch")
            begin = max(free, now)
            free = begin + graph
            rows["graphs"].append((begin, free, 0, 7, PID, ticket, 1))
        now = max(now, free) + round(every * (1 + jitter * rng.standard_normal()))
        now += every if number in stalls else 0
        if named:
            rows["ranges"].append((start, now - 100, PID, MAIN, f"{named} {number}"))
    columns = {
        "kernels": ["start_ns", "end_ns", "device", "stream", "process", "correlation", "name"],
        "memops": ["start_ns", "end_ns", "device", "stream", "process", "correlation", "kind", "bytes"],
        "graphs": ["start_ns", "end_ns", "device", "stream", "process", "correlation", "graph_id"],
        "calls": ["start_ns", "end_ns", "process", "thread", "correlation", "name"],
        "ranges": ["start_ns", "end_ns", "process", "thread", "name"],
    }
    columns["memops"] += ["src_kind", "dst_kind"]
    texts = ("name", "kind", "src_kind", "dst_kind")
    frames = {t: pd.DataFrame(rows[t], columns=columns[t]) for t in rows}
    for frame in frames.values():
        for text in texts:
            if text in frame:
                frame[text] = pd.Categorical(frame[text])
    described = {"tool": "planted", "gpus": [Gpu(0, CARD)], **(meta or {})}
    return Trace.from_frames(frames, TraceMeta(**described))


def row(frame: pd.DataFrame, name: str, column: str = "name", **others: str) -> pd.Series:
    found = frame[frame[column] == name]
    for key, value in others.items():
        found = found[found[key] == value]
    assert len(found) == 1, (name, found)
    return found.iloc[0]


GEMM, ADD, NORM = "ampere_sgemm_128x64_nn", "vectorized_elementwise_kernel<4, CUDAFunctor_add>", "layer_norm_kernel"
#: What says that a change is more than noise: of single captures, and of several on a side.
BEYOND = ("exceeds step spread", "significant")
BASE = [(GEMM, 40 * US), (ADD, 20 * US), (NORM, 10 * US), (ADD, 20 * US)]


# ---------------------------------------------------------------- exact deltas


def test_a_slower_kernel_is_found_to_the_nanosecond() -> None:
    found = diff.compare(program(BASE), program([(n, ns + 7 * US if n == ADD else ns) for n, ns in BASE]))
    assert (found.unit, found.steps, found.judged) == ("step", (8, 8), (8, 8))
    slower = row(found.kernels, ADD)
    assert slower[["before_ns", "after_ns", "delta_ns", "low_ns", "high_ns"]].tolist() == [40e3, 54e3, 14e3, 14e3, 14e3]
    assert slower[["before_count", "after_count", "before_total_ns", "after_total_ns"]].tolist() == [
        16,
        16,
        320e3,
        432e3,
    ]
    assert (slower["change"], slower["mean_delta_ns"]) == (pytest.approx(0.35), 14e3)
    assert (slower["match"], slower["category"], slower["significance"]) == (
        "name",
        "elementwise",
        "exceeds step spread",
    )
    for name in (GEMM, NORM):
        same = row(found.kernels, name)
        assert same[["delta_ns", "low_ns", "high_ns"]].tolist() == [0, 0, 0]
        assert same["significance"] == "within noise"
    assert row(found.figures, "kernel_ns")["delta_ns"] == row(found.figures, "wall_ns")["delta_ns"] == 14e3
    assert row(found.categories, "elementwise")["delta_ns"] == 14e3
    assert row(found.ranges, "train_step#", clock="GPU")["delta_ns"] == 14e3
    summary = diff.summary(program(BASE), program([(n, ns + 7 * US if n == ADD else ns) for n, ns in BASE]))
    assert summary["outcome"] == "slower"
    assert {c["table"] for c in summary["changes"]} == {"figures", "kernels", "categories", "ranges"}


def test_renamed_fused_and_new_kernels_keep_the_sums() -> None:
    after = [
        ("volta_sgemm_32x128_nn", 60 * US),  # another card's name of the product
        ("triton_per_fused_add_layer_norm_0", 30 * US),  # what add and norm became
        ("exp_kernel", 5 * US),
    ]
    found = diff.compare(program(BASE), program(after)).kernels
    assert row(found, "volta_sgemm_32x128_nn")["match"] == "normalised"
    assert row(found, "volta_sgemm_32x128_nn")["delta_ns"] == 20 * US
    fused = row(found, "triton_per_fused_add_layer_norm_0")
    assert (fused["match"], fused["before_names"]) == ("fused", [ADD, NORM])
    assert fused[["before_ns", "after_ns", "delta_ns"]].tolist() == [50 * US, 30 * US, -20 * US]
    fresh = row(found, "exp_kernel")
    assert (fresh["match"], fresh["before_names"], fresh["before_ns"]) == ("appeared", [], 0)
    assert math.isnan(fresh["change"])
    assert fresh["significance"] == "exceeds step spread"
    assert found["before_total_ns"].sum() == 8 * 90 * US
    assert found["after_total_ns"].sum() == 8 * 95 * US


@functools.cache
def real(path: Path) -> Trace:
    """A capture that several tests read."""
    return nsightkit.load(path)


@pytest.fixture(scope="module")
def faultless(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Trace]:
    path = tmp_path_factory.mktemp("planted") / "none.sqlite"
    return planted.training(path, None, seed=1), nsightkit.load(path)


@pytest.mark.parametrize("fault", ["starved", "sync", "tiny", "pageable", "augment"])
def test_planted_faults(fault: Any, faultless: tuple[dict[str, Any], Trace], tmp_path: Path) -> None:
    truths = [planted.training(tmp_path / f"{fault}.sqlite", fault, seed=0), faultless[0]]
    before, after = nsightkit.load(tmp_path / f"{fault}.sqlite"), faultless[1]
    found = diff.compare(before, after)
    for side, truth in zip(diff.SIDES, truths, strict=True):
        kernels = found.kernels.set_index("name")[f"{side}_total_ns"]
        assert {name: int(kernels[name]) for name in truth["kernels"]} == {
            name: total for name, (_, total) in truth["kernels"].items()
        }
        assert found.gaps[f"{side}_total_ns"].sum() == truth["idle_ns"]
        for cause, total in truth["gaps"].items():
            assert row(found.gaps, cause, "cause")[f"{side}_total_ns"] == pytest.approx(total, rel=0.02)
    summary = found.summary()
    was, now = planted.BOTTLENECK_OF[fault], planted.BOTTLENECK_OF[None]
    assert summary["moved"] is True
    assert f"moved from {was} (" in summary["bottleneck"]["text"]
    assert f" to {now} (" in summary["bottleneck"]["text"]
    assert summary["outcome"] == "faster"
    # The loop without a fault launches ahead of its device: on the CPU's clock its steps would take next to nothing.
    wall = row(found.figures, "wall_ns")
    assert wall["after_ns"] == pytest.approx(truths[1]["span_ns"] / 12, rel=0.02)
    ranges = after.table("ranges")
    begun = int(ranges.loc[ranges["name"] == "step", "start_ns"].min())
    assert wall["after_total_ns"] == int(after.table("kernels")["end_ns"].max()) - begun
    cause = row(found.gaps, was, "cause")
    assert (cause["significance"], cause["delta_ns"] < 0) == ("exceeds step spread", True)


def test_rows_add_up_to_each_trace(shared_traces: Path, tmp_path: Path) -> None:
    planted.training(tmp_path / "one.sqlite", "uneven", steps=4)
    files = [
        tmp_path / "one.sqlite",
        shared_traces / "hta" / "trace_diff__control__control.json.gz",
        shared_traces / "kineto" / "resnet50_num_workers_0__worker0.1623143089861.pt.trace.json.gz",
        shared_traces / "cs336-zx3xyy" / "result_2_7B_nvtx.sqlite",
        shared_traces / "cs336-zx3xyy" / "result_2_7B_compile_ro.sqlite",
    ]
    traces = [real(file) for file in files]
    for before, after in ((traces[0], traces[3]), (traces[1], traces[2]), (traces[4], traces[3])):
        found = diff.compare(before, after)
        for side, trace in zip(diff.SIDES, (before, after), strict=True):
            whole = overview.summary(trace)
            sums = {name: int(table[f"{side}_total_ns"].sum()) for name, table in found.tables.items()}
            counts = {name: table[f"{side}_count"].sum() for name, table in found.tables.items() if name != "figures"}
            assert sums["kernels"] == whole["kernel_ns"]
            assert (
                counts["kernels"]
                == whole["kernel_count"]
                == sum(
                    len(trace["kernels"][trace["kernels"]["name"] == n])
                    for n in {n for g in found.kernels[f"{side}_names"] for n in g}
                )
            )
            assert sums["categories"] == whole["kernel_ns"] + whole["graph_ns"]
            assert sums["memops"] == whole["memop_ns"]
            assert sums["gaps"] == whole["idle_ns"]
            gpu = found.operators[found.operators["clock"] == "GPU"]
            assert int(gpu[f"{side}_total_ns"].sum()) in (whole["kernel_ns"], 0)


def test_steps_of_another_number_compare() -> None:
    found = diff.compare(program(BASE, count=5), program(BASE, count=11))
    assert found.steps == (5, 11)
    changed = {n: t[t["delta_ns"] != 0] for n, t in found.tables.items()}
    assert not any(len(rows) for rows in changed.values()), changed
    assert row(found.kernels, GEMM)[["before_total_ns", "after_total_ns"]].tolist() == [5 * 40 * US, 11 * 40 * US]
    summary = found.summary()
    assert summary["outcome"] == "no change"
    assert "5 steps before and 11 after: times are those of a step." in summary["warnings"]


# ---------------------------------------------------------------- noise


def test_noise_is_not_called_a_change() -> None:
    """Of pairs without a change at least 95 % must say so, with a jitter that moves a step by a percent or two."""
    calm = quiet = 0
    traces = [program(BASE, count=10, jitter=0.08, seed=seed) for seed in range(21)]
    for before, after in itertools.pairwise(traces):
        found = diff.compare(before, after)
        rows = pd.concat([t["significance"] for t in found.tables.values()])
        calm += found.figures.iloc[0]["significance"] not in BEYOND
        quiet += not rows.isin(BEYOND).drop(index=0, errors="ignore").any()
    assert calm >= 0.95 * 20
    assert quiet >= 0.95 * 20


def test_a_change_is_seen_through_noise() -> None:
    seen = 0
    for seed in range(6):
        slower = [(n, round(1.25 * ns) if n == GEMM else ns) for n, ns in BASE]
        found = diff.compare(
            program(BASE, count=10, jitter=0.04, seed=2 * seed),
            program(slower, count=10, jitter=0.04, seed=2 * seed + 1),
        )
        changed = row(found.kernels, GEMM)
        seen += changed["significance"] == "exceeds step spread"
        assert changed["low_ns"] <= changed["delta_ns"] <= changed["high_ns"]
    assert seen == 6


def test_too_few_steps_cannot_tell() -> None:
    found = diff.summary(program(BASE, count=3), program([(n, 2 * ns) for n, ns in BASE], count=3))
    assert found["outcome"] == "cannot tell"
    assert "3 and 3 steps cannot tell whether that is noise" in found["headline"]
    assert all(row["low_ns"] is None or math.isnan(row["low_ns"]) for row in found["kernels"])
    assert {row["significance"] for row in found["kernels"]} == {"cannot tell"}
    # What changed is told all the same, as what may be noise.
    assert {c["significance"] for c in found["changes"]} == {"cannot tell"}


def test_what_takes_little_is_negligible() -> None:
    tiny = "memset_like_kernel"
    found = diff.compare(program([*BASE, (tiny, 300)]), program([*BASE, (tiny, 900)]))
    assert row(found.kernels, tiny)["delta_ns"] == 600
    assert row(found.kernels, tiny)["significance"] == "negligible"
    everything = diff.compare(program([*BASE, (tiny, 300)]), program([*BASE, (tiny, 900)]), min_share=0.0)
    assert row(everything.kernels, tiny)["significance"] == "exceeds step spread"


def test_steps_that_stand_out_are_told_of_and_do_not_hide_a_change() -> None:
    faster = [(n, ns // 2) for n, ns in BASE]
    before, after = program(BASE, count=8, jitter=0.005), program(faster, count=8, jitter=0.005, seed=1, stalls=(0, 4))
    found = diff.compare(before, after)
    assert found.judged == (8, 6)
    wall = row(found.figures, "wall_ns")
    assert wall["significance"] == "exceeds step spread"
    # Medians are of the ordinary steps, means of all.
    assert wall["delta_ns"] == pytest.approx(-45 * US, rel=0.1)
    assert wall["mean_delta_ns"] == pytest.approx(-45 * US + 100 * US * 2 / 8, rel=0.1)
    (said,) = [w for w in found.summary()["warnings"] if "stand out" in w]
    assert said.startswith("2 of 8 steps after stand out")


def test_further_captures_say_what_captures_differ_by() -> None:
    def clocked(speed: float, seed: int) -> Trace:
        return program([(n, round(ns * speed)) for n, ns in BASE], jitter=0.003, seed=seed)

    # Steps of one capture agree to a third of a percent; captures differ by three.
    pair = clocked(1.0, 0), clocked(1.03, 1)
    assert row(diff.compare(*pair, min_share=0.001).kernels, GEMM)["significance"] == "exceeds step spread"
    with_more = diff.compare(*pair, min_share=0.001, also_before=[clocked(1.03, 2)], also_after=[clocked(1.0, 3)])
    assert with_more.judged == (16, 16)
    repeated = row(with_more.kernels, GEMM)
    assert repeated["between_ns"] > abs(repeated["delta_ns"])
    assert repeated["significance"] != "significant"
    # The sums stay those of the two that were named.
    assert repeated["before_total_ns"] == row(diff.compare(*pair).kernels, GEMM)["before_total_ns"]
    changed = diff.compare(
        clocked(1.0, 0), clocked(1.2, 1), also_before=[clocked(1.01, 2)], also_after=[clocked(1.19, 3)]
    )
    assert row(changed.kernels, GEMM)["significance"] == "significant"


def test_one_capture_on_each_side_says_nothing_of_runs() -> None:
    """However steady the steps, the strongest word is theirs; more captures of the same earn the stronger one."""
    faster = [(n, ns // 2) for n, ns in BASE]
    pair = program(BASE, jitter=0.003), program(faster, jitter=0.003, seed=1)
    single = diff.compare(*pair)
    said = {word for table in single.tables.values() for word in table["significance"]}
    assert "exceeds step spread" in said
    assert "significant" not in said
    assert all(table["between_ns"].isna().all() for table in single.tables.values())
    headline = single.summary()["headline"]
    assert "more than the steps of each run spread (95 % interval" in headline
    assert headline.endswith(noise.ONE_RUN)
    more = {"also_before": [program(BASE, jitter=0.003, seed=2)], "also_after": [program(faster, jitter=0.003, seed=3)]}
    several = diff.compare(*pair, **more)
    assert several.figures.iloc[0]["significance"] == "significant"
    assert not any((table["significance"] == "exceeds step spread").any() for table in several.tables.values())
    assert noise.ONE_RUN not in several.summary()["headline"]
    # The gate says the same of the same captures.
    gate = check.compare(make([run_metrics.of_trace(pair[0])]), [run_metrics.of_trace(pair[1])])
    assert any(note.startswith(noise.ONE_RUN) for note in gate["notes"])


def test_a_change_that_is_sure_and_of_no_matter_is_small() -> None:
    """Half a percent of a step, in each of them: more than noise, and nothing to look at."""
    found = diff.compare(program(BASE), program([(n, ns + 900 if n == GEMM else ns) for n, ns in BASE]))
    slower = row(found.kernels, GEMM)
    assert slower[["delta_ns", "low_ns", "high_ns"]].tolist() == [900, 900, 900]
    assert slower["significance"] == row(found.figures, "wall_ns")["significance"] == "small"
    summary = found.summary()
    assert (summary["outcome"], summary["changes"], summary["where"]) == ("no change", [], "")
    assert summary["headline"].startswith("Too little to matter: a step takes")


def test_what_is_gone_altogether_is_sure_among_many_rows() -> None:
    """Four steps and five cannot be ranked for sure among many rows; what each had and none has needs no ranks."""
    others = [(f"kernel_{chr(97 + i)}", 10 * US) for i in range(20)]
    before = program([*others, (GEMM, 40 * US)], count=5, jitter=0.05)
    after = program(others, count=4, jitter=0.05, seed=1)
    gone = row(diff.compare(before, after).kernels, GEMM)
    assert (gone["after_ns"], gone["significance"]) == (0, "exceeds step spread")


def test_where_the_time_went() -> None:
    slower = diff.summary(program(BASE), program([(n, 2 * ns if n == GEMM else ns) for n, ns in BASE]))
    assert slower["where"] == "Where: GPU busy time +40.00 µs (GEMM +40.00 µs)."
    assert diff.summary(program(BASE), program(BASE))["where"] == ""
    assert slower["where"] in diff_words.markdown(slower).replace("\\", "")


# ---------------------------------------------------------------- captures without steps


@pytest.fixture(scope="module")
def longer() -> dict[str, Any]:
    """Two captures without steps, the second with twice as much work."""
    return diff.summary(program(BASE, named=None), program(BASE, named=None, count=16))


def test_without_steps_whole_captures_are_compared(longer: dict[str, Any]) -> None:
    found = longer
    assert found["unit"] == "trace"
    assert row(pd.DataFrame(found["kernels"]), GEMM)["delta_ns"] == 8 * 40 * US
    assert any(w.startswith("No steps were found before and after") for w in found["warnings"])
    assert "captures without steps cannot tell" in found["headline"]
    one_sided = diff.summary(program(BASE), program(BASE, named=None))
    assert one_sided["unit"] == "trace"
    assert any(w.startswith("No steps were found after") for w in one_sided["warnings"])
    assert row(pd.DataFrame(one_sided["kernels"]), GEMM)["delta_ns"] == 0


def test_without_steps_kernels_launched_as_often_are_judged_by_their_launches() -> None:
    """Planted: one kernel 42 % quicker, one as before, one launched more often."""
    quicker = [(GEMM, round(0.58 * 40 * US)), (ADD, 20 * US), (NORM, 10 * US), (NORM, 10 * US)]
    before, after = (
        program(kernels, named=None, count=250, jitter=0.05, seed=seed)
        for seed, kernels in enumerate(([(GEMM, 40 * US), (ADD, 20 * US), (NORM, 10 * US)], quicker))
    )
    found = diff.compare(before, after)
    gemm = row(found.kernels, GEMM)
    assert gemm["significance"] == "exceeds launch spread"
    assert gemm["change"] == pytest.approx(-0.42, abs=0.01)
    # All 250 launches together are 4.2 ms quicker; the interval is of them all, too.
    assert gemm["low_ns"] < -250 * 16.8 * US < gemm["high_ns"] < 0
    assert row(found.kernels, ADD)["significance"] == "within noise"
    assert row(found.kernels, NORM)["significance"] == "cannot tell"
    assert set(found.figures["significance"]) == {"cannot tell"}
    said = found.summary()
    assert "captures without steps cannot tell" in said["headline"]
    assert any("judged by their launches, which share a run's clock and data" in w for w in said["warnings"])
    # Of launches of two sizes in turn the large ones became quicker: no change of most of them, and one of all.
    mixed, half = ([(GEMM, 10 * US), (GEMM, large * US)] for large in (100, 50))
    pair = (program(kernels, named=None, count=250, jitter=0.05, seed=i) for i, kernels in enumerate((mixed, half)))
    quicker = row(diff.compare(*pair).kernels, GEMM)
    assert (quicker["significance"], quicker["before_count"]) == ("exceeds launch spread", 500)
    assert quicker["low_ns"] < -250 * 50 * US < quicker["high_ns"] < 0
    # One long launch before leads the sum another way than the rest: nothing is said.
    slower = [(GEMM, 40 * US)] * 9
    long = diff.compare(
        program([(GEMM, 900 * US), *slower], named=None, count=1),
        program([(n, 41 * US) for n, _ in [*slower, (GEMM, 1)]], named=None, count=1),
    )
    assert row(long.kernels, GEMM)["significance"] == "within noise"
    # Further captures say nothing here that the word could be stronger for.
    further = diff.compare(before, after, also_before=[before])
    assert row(further.kernels, GEMM)["significance"] == "exceeds launch spread"


def test_steps_of_one_side_only_are_not_ranges_that_went() -> None:
    assert not len(diff.compare(program(BASE), program(BASE, named=None)).ranges)
    assert set(diff.compare(program(BASE), program(BASE, count=6)).ranges["name"]) == {"train_step#"}


def test_the_same_bottleneck_does_not_hide_which_cause_went(tmp_path: Path) -> None:
    """Each step dispatches 100 tiny kernels for 2 ms, and one program loads for 1 ms besides."""
    step = [Launch("tiny", 3 * US, 20 * US)] * 100
    for name, first in (("before", [Load(1000 * US)]), ("after", [])):
        program = Program(name, [loop(lambda _, first=first: [*first, *step])], jitter=0.0)  # type: ignore[misc]
        play(program).write(tmp_path / f"{name}.sqlite")
    found = diff.summary(*(nsightkit.load(tmp_path / f"{name}.sqlite") for name in diff.SIDES))
    said = found["bottleneck"]
    assert (said["before"]["bottleneck"], said["after"]["bottleneck"]) == ("launch-overhead", "launch-overhead")
    gone = row(pd.DataFrame(found["gaps"]), "input-pipeline", "cause")
    assert gone["before_ns"] == pytest.approx(1000 * US, rel=0.03)
    assert gone["after_ns"] == 0
    assert said["text"].startswith("The bottleneck did not move: launch-overhead, ")
    took = time_text(gone["before_ns"])
    assert said["text"].endswith(f" What changed most of idle time is input-pipeline: {took} before and 0 ns after.")
    assert found["moved"] is False


def test_captures_of_different_amounts_of_work_do_not_compare(longer: dict[str, Any]) -> None:
    found = longer
    assert found["headline"].startswith("With different amounts of work: From the first operation to the last")
    (said,) = [w for w in found["warnings"] if "times as often" in w]
    assert said.startswith("The kernels that both captures hold ran 2.00 times as often after (64 launches, 32 before)")
    assert found["where"] == ""
    alike = diff.summary(program(BASE, named=None), program([(n, 2 * ns) for n, ns in BASE], named=None))
    assert not any("as often after (" in w for w in alike["warnings"])


def test_steps_that_hold_little_of_the_work_do_not_stand_for_it() -> None:
    """What was named a step is the smaller part: whole captures compare, and a warning says why."""
    trace = program(BASE)
    rows = {t: trace.table(t) for t in ("kernels", "memops", "calls", "ranges")}
    rows["ranges"] = rows["ranges"].iloc[5:].reset_index(drop=True)
    found = diff.summary(trace, Trace.from_frames(rows, trace.meta))
    assert found["unit"] == "trace"
    assert row(pd.DataFrame(found["kernels"]), GEMM)["delta_ns"] == 0
    (said,) = [w for w in found["warnings"] if "in no step" in w]
    assert said.startswith("Most of the GPU's time was launched in no step (0 % before and 62 % after)")
    assert "captures without steps cannot tell" in found["headline"]


def test_steps_can_be_named_or_counted() -> None:
    before, after = program(BASE, named="turn"), program(BASE, named="lap", count=16)
    assert diff.compare(before, after).unit == "trace"
    named = diff.compare(before, after, match=("turn", "lap"))
    assert (named.unit, named.steps) == ("step", (8, 16))
    assert row(named.kernels, GEMM)["delta_ns"] == 0
    counted = diff.compare(before, after, steps=(8, 16))
    assert counted.unit == "step"
    assert row(counted.kernels, GEMM)[["before_ns", "after_ns"]].tolist() == [40 * US, 40 * US]
    assert set(counted.kernels["significance"]) == {"cannot tell"}


def test_a_selection_is_compared_step_by_step(tmp_path: Path) -> None:
    for fault in (None, "starved"):
        planted.training(tmp_path / f"{fault}.sqlite", fault)
    before, after = (nsightkit.load(tmp_path / f"{fault}.sqlite") for fault in (None, "starved"))
    inside = diff.compare(*(selection.select(trace, within="^forward$") for trace in (before, after)))
    assert (inside.unit, inside.steps) == ("step", (12, 12))
    assert set(inside.figures["name"]) == {"wall_ns", "kernel_ns", "memop_ns"}
    whole = diff.compare(before, after)
    point = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int, T2, T3)"
    # Half of these kernels are launched by the forward pass.
    assert row(inside.kernels, point)["before_count"] == row(whole.kernels, point)["before_count"] / 2
    assert len(inside.kernels) < len(whole.kernels)
    last = diff.compare(*(selection.select(trace, last_steps=5) for trace in (before, after)))
    assert last.steps == (5, 5)


# ---------------------------------------------------------------- what to know besides


def warnings(before: Trace, after: Trace) -> list[str]:
    return list(diff.summary(before, after)["warnings"])


def test_another_card_is_said_first() -> None:
    other = program(BASE, meta={"gpus": [Gpu(0, "Another GPU")], "driver": "570.1"})
    said = warnings(program(BASE, meta={"driver": "560.2"}), other)
    assert said[0].startswith(f"Different GPUs: {CARD} before, Another GPU after; times differ by the card")
    assert said[1] == "Different drivers: 560.2 before, 570.1 after."
    text = diff_words.markdown(diff.summary(program(BASE), other)).splitlines()
    assert text[0].startswith("**On different GPUs: ")
    assert text[2].startswith("> - Different GPUs")


def test_circumstances() -> None:
    before = {"tool_version": "1", "distributed": {"world_size": 8, "rank": 0}, "notes": ["Odd."]}
    after = {"tool_version": "2", "distributed": {"world_size": 2, "rank": 1}, "notes": ["Odd.", "Odder."]}
    said = warnings(program(BASE, meta=before), program(BASE, meta=after | {"missing": ["os_calls"]}))
    assert said == [
        "Different versions of the tool: 1 before, 2 after.",
        "Different world sizes: 8 before, 2 after.",
        "Different ranks: 0 before, 1 after.",
        "The capture after did not record os_calls: what depends on that is not compared.",
        "In both captures: Odd.",
        "In the capture after: Odder.",
    ]
    tools = warnings(program(BASE), program(BASE, meta={"tool": "another", "tool_version": "1"}))
    assert tools == ["Different tools: planted before, another after; each slows the CPU down in its own way."]


def test_nothing_to_know_besides() -> None:
    assert not warnings(program(BASE), program(BASE, seed=3))


def test_another_batch_shows_in_what_is_copied() -> None:
    (said,) = warnings(program(BASE, copied=1 << 20), program(BASE, copied=1 << 21))
    assert said.startswith("A step copies 1.049 MB to the GPU before and 2.097 MB after")


def test_copies_without_a_size_are_not_another_batch() -> None:
    found = diff.summary(program(BASE, copied=0), program(BASE, copied=4096))
    assert [r["after_bytes"] for r in found["memops"]] == [8 * 4096]
    assert not pd.notna(found["memops"][0]["before_bytes"])
    assert not any("copies" in w for w in found["warnings"])


def test_all_kernels_alike_is_a_clock() -> None:
    kernels = [(f"kernel_{chr(97 + i)}", (5 + i) * US) for i in range(8)]
    slower = [(name, round(ns * 1.06)) for name, ns in kernels]
    (said,) = warnings(program(kernels), program(slower))
    assert said.startswith("8 kernels that run as often as before take another time, all alike: +6.0 %")
    # One kernel that is slower, or another number of launches, is the program's doing.
    assert not warnings(program(kernels), program([*kernels[:-1], (kernels[-1][0], 40 * US)]))
    assert not warnings(program(kernels), program(slower * 2))
    # Nor is a batch of another size, which each kernel feels in its own way.
    uneven = [(name, round(ns * (1.05 + 0.2 * i))) for i, (name, ns) in enumerate(kernels)]
    assert not warnings(program(kernels), program(uneven))


def test_graph_replays_are_work_whose_kernels_are_hidden() -> None:
    replay = sum(ns for _, ns in BASE)
    found = diff.summary(program(BASE), program([], graph=replay))
    assert row(pd.DataFrame(found["figures"]), "graph_ns")["after_ns"] == replay
    assert row(pd.DataFrame(found["categories"]), "CUDA graphs")["after_ns"] == replay
    (said,) = [w for w in found["warnings"] if "CUDA-graph" in w]
    assert said.startswith("The capture after holds 8 CUDA-graph replays, 720.0 µs, without their kernels")
    assert "disappeared" in said
    assert {r["match"] for r in found["kernels"]} == {"disappeared"}


def test_a_library_that_chose_other_kernels() -> None:
    def convolution(kernels: list[tuple[str, int]]) -> Trace:
        trace = program(kernels)
        calls = trace["calls"][trace["calls"]["name"] == "cudaLaunchKernel"]
        ops = calls[["start_ns", "end_ns", "process", "thread"]].assign(
            start_ns=calls["start_ns"] - 200,
            end_ns=calls["end_ns"] + 200,
            name=pd.Categorical(["aten::conv"] * len(calls)),
        )
        frames = {t: trace.table(t) for t in ("kernels", "memops", "calls", "ranges")}
        return Trace.from_frames({**frames, "ops": ops}, trace.meta)

    before = convolution([("winograd", 40 * US), ("implicit", 5 * US)])
    after = convolution([("winograd", 10 * US), ("implicit", 36 * US)])
    found = diff.summary(before, after)
    assert (
        "aten::conv runs other kernels, 45.00 µs before and 46.00 µs after in all: the library chose other ones."
        in found["warnings"]
    )
    # It took the other one's place: that is not a loss to name.
    grown = row(pd.DataFrame(found["kernels"]), "implicit")
    assert (grown["operator"], grown["significance"]) == ("aten::conv", "exceeds step spread")
    assert row(pd.DataFrame(found["operators"]), "aten::conv", clock="GPU")["delta_ns"] == 1 * US


def test_work_launched_before_the_first_step_is_no_steps() -> None:
    trace = program(BASE, named="train_step")
    late = {t: trace.table(t) for t in ("kernels", "memops", "calls", "ranges")}
    late["ranges"] = late["ranges"].iloc[2:].reset_index(drop=True)
    found = diff.summary(program(BASE), Trace.from_frames(late, trace.meta))
    assert found["after"]["steps"] == 6
    assert row(pd.DataFrame(found["kernels"]), GEMM)[["before_ns", "after_ns", "after_count"]].tolist() == [
        40e3,
        40e3,
        8,
    ]
    assert "25 % of the GPU's time after was launched in no step and is not compared." in found["warnings"]


def test_what_was_not_recorded_is_not_compared() -> None:
    trace = program(BASE)
    frames = {t: trace.table(t) for t in ("calls", "ranges")}
    missing = ["kernels", "memops", "graphs", "ops"]
    on_cpu = Trace.from_frames(frames, TraceMeta(tool="planted", missing=missing))
    found = diff.summary(on_cpu, on_cpu)
    assert [r["name"] for r in found["figures"]] == ["wall_ns"]
    assert not any(found[table] for table in ("kernels", "categories", "operators", "gaps", "memops"))
    assert {r["clock"] for r in found["ranges"]} == {"CPU"}
    assert (found["moved"], found["outcome"]) == (None, "no change")
    mixed = diff.summary(trace, on_cpu)
    assert not mixed["kernels"]
    assert any("after did not record kernels, memops, graphs, ops" in w for w in mixed["warnings"])


def test_nothing_at_all_is_no_error() -> None:
    empty = Trace.from_frames({}, TraceMeta(tool="planted"))
    found = diff.summary(empty, empty)
    assert found["outcome"] == "cannot tell"
    assert diff_words.markdown(found)
    assert found["changes"] == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"confidence": 1.0}, "a confidence lies between 0 and 1, not 1"),
        ({"min_share": -0.1}, "a smallest share"),
        ({"min_share": 1.0}, "a smallest share"),
        ({"steps": (0, 3)}, "0 is not a number of steps"),
        ({"match": "("}, "is not a regular expression"),
    ],
)
def test_arguments_out_of_range(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        diff.compare(program(BASE), program(BASE), **options)


# ---------------------------------------------------------------- in words


def test_json_holds_integers_and_what_a_row_is(
    faultless: tuple[dict[str, Any], Trace], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted.training(tmp_path / "before.sqlite", "sync", steps=8)
    assert cli.run(["diff", str(tmp_path / "before.sqlite"), str(faultless[1].path), "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    for table in ("figures", "kernels", "categories", "ranges", "gaps", "memops"):
        assert document[table], table
        for each in document[table]:
            assert set(diff.COLUMNS) <= each.keys()
            assert each["delta_ns"] == each["after_ns"] - each["before_ns"]
            assert all(v is None or isinstance(v, int) for k, v in each.items() if k.endswith(("_ns", "_count")))
    assert {"moved", "outcome", "headline", "warnings", "changes", "unit", "before", "after"} <= document.keys()
    assert (document["before"]["steps"], document["after"]["steps"]) == (8, 12)
    assert [abs(c["delta_ns"]) for c in document["changes"]] == sorted(
        (abs(c["delta_ns"]) for c in document["changes"]), reverse=True
    )


def test_markdown_for_a_pull_request() -> None:
    found = diff.summary(program(BASE), program([(GEMM, 20 * US), (ADD, 24 * US), (NORM, 10 * US), (ADD, 24 * US)]))
    text = diff_words.markdown(found)
    assert text.startswith("**A step takes ")
    assert "| a step | before | after | change | 95 % interval |  |" in text
    assert f"| `{GEMM}` | 40.00 µs | 20.00 µs | -50.0 % | -50.0 to -50.0 % | exceeds step spread |" in text
    assert f"Got worse: `{ADD}` +8.000 µs." in text
    same = diff_words.markdown(diff.summary(program(BASE), program(BASE)))
    assert same.startswith("**Not beyond noise: a step takes ")
    assert "Nothing changed by more than noise" in same


HOSTILE = "evil|`</code><img src=x onerror=alert(1)>`| @all [x](javascript:1) \x1b[31m\r\n# *bold*"


def test_names_are_no_markup() -> None:
    trace = program([(HOSTILE, 50 * US)], named=None, meta={"gpus": [Gpu(0, HOSTILE)], "notes": [HOSTILE]})
    other = program([(GEMM, 40 * US)], named=None)
    for before, after in ((trace, other), (other, trace)):
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
    before, after = (real(shared_traces / "kineto" / f"resnet50_{n}.pt.trace.json.gz") for n in names)
    summary = diff.summary(before, after)
    tables = {
        name: pd.DataFrame(summary[name]) for name in ("figures", "kernels", "operators", "ranges", "gaps", "memops")
    }

    assert summary["outcome"] == "faster"
    wall = row(tables["figures"], "wall_ns")
    assert wall["before_total_ns"] / 6 == pytest.approx(177_592_000, rel=2e-4)
    assert wall["after_total_ns"] / 6 == pytest.approx(141_068_000, rel=2e-4)
    assert (summary["before"]["ordinary_steps"], summary["after"]["ordinary_steps"]) == (6, 4)
    assert any(w.startswith("2 of 6 steps after stand out") and "141.1 ms" in w for w in summary["warnings"])
    assert -0.30 < wall["change"] < -0.28

    assert summary["moved"] is True
    # Of the steps, the first one's wait included: a share of the window now, and no longer of the span.
    assert "from input-pipeline (33.2 % of the time) to launch-overhead" in summary["bottleneck"]["text"]
    loading = row(tables["ranges"], "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", clock="CPU")
    assert (loading["match"], loading["significance"]) == ("normalised", "exceeds step spread")
    assert (loading["before_ns"] > 65e6, loading["after_ns"] < 1e6) == (True, True)
    waiting = row(tables["gaps"], "input-pipeline", "cause")
    assert (waiting["before_total_ns"], waiting["after_total_ns"]) == (285_214_000, 0)
    # What decides is sure, and what does not matter is called small: each step waited 48 to 62 ms, and then none did.
    assert waiting["significance"] == "exceeds step spread"
    assert summary["where"].startswith("Where: GPU idle time -5")
    assert "input-pipeline -57.35 ms" in summary["where"]
    kernels = row(tables["figures"], "kernel_ns")
    assert (kernels["significance"], 0 < kernels["change"] < 0.01) == ("small", True)
    assert summary["headline"].endswith(noise.ONE_RUN)
    swapped = tables["kernels"][
        tables["kernels"]["name"].str.contains("wgrad_alg0_engine<float, 128, 6, 7|splitK_medium")
    ]
    assert swapped[["before_count", "after_count"]].to_numpy().tolist() == [[156, 90], [6, 72]]
    assert set(swapped["operator"]) == {"aten::cudnn_convolution_backward_weight"}
    assert any(w.startswith("aten::cudnn_convolution_backward_weight runs other kernels") for w in summary["warnings"])
    upload = row(tables["memops"], "HtoD", "kind")
    assert upload["before_bytes"] == upload["after_bytes"] == 115_607_040
    # A millisecond of 177: true of each step, and of no matter to it.
    assert (upload["significance"], 0.9e6 < upload["delta_ns"] < 1.1e6) == ("small", True)
    for name in ("aten::div", "aten::to", "aten::_cat"):
        gone = row(tables["operators"], name, clock="CPU")
        assert (gone["significance"], gone["change"] < -0.9) == ("exceeds step spread", True)


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
    before, after = (real(shared_traces / "hta" / f"trace_diff__{name}.json.gz") for name in files)
    summary = diff.summary(before, after)
    tables = {name: pd.DataFrame(summary[name]) for name in ("figures", "categories", "operators", "memops", "kernels")}
    said = summary["warnings"]
    assert said[0].startswith("Different GPUs: NVIDIA A100-PG509-200 before, Tesla V100-SXM2-16GB after")
    assert said[1:3] == ["Different world sizes: 8 before, 2 after.", "Different ranks: 3 before, 1 after."]
    assert any("6 % of the GPU's time after was launched in no step" in w for w in said)
    assert not any("copies" in w and "batch" in w for w in said)
    assert summary["outcome"] == "slower"
    products = row(tables["categories"], "GEMM")
    assert (products["significance"], products["change"]) == ("exceeds step spread", pytest.approx(1.52, abs=0.01))
    between = row(tables["memops"], "DtoD", "kind")
    assert between[["before_count", "after_count"]].tolist() == [18, 4645]
    assert between[["before_total_ns", "after_total_ns"]].tolist() == [2_735_000, 92_932_000]
    assert between["significance"] == "exceeds step spread"
    compiled = tables["operators"][tables["operators"]["name"].str.startswith("CompiledFunction")]
    compiled = compiled[compiled["clock"] == "GPU"]
    assert compiled["before_count"].sum() == 0
    assert compiled["after_count"].sum() == 2574 + 1890
    assert (compiled["significance"] == "exceeds step spread").all()
    named = [c["name"] for c in summary["changes"] if c["table"] == "kernels"]
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
    busy = row(pd.DataFrame(whole["figures"]), "busy_ns")
    assert (busy["before_ns"], busy["after_ns"]) == (6_564_856_884, 7_811_219_965)
    assert (whole["unit"], whole["outcome"], whole["moved"]) == ("trace", "cannot tell", None)
    assert any("10 CUDA-graph replays" in w and "without their kernels" in w for w in whole["warnings"])

    passes = diff.compare(selection.select(eager, within="^benchmark_loop$"), replayed, steps=(3, 10))
    figures = passes.figures.set_index("name")
    assert figures.loc["busy_ns", "change"] == pytest.approx(-0.069, abs=0.001)
    assert figures.loc["wall_ns", "change"] == pytest.approx(-0.071, abs=0.001)
    assert figures.loc["busy_ns", "after_ns"] == pytest.approx(781.1e6, rel=1e-3)
    assert row(passes.categories, "CUDA graphs")["after_ns"] == pytest.approx(781.1e6, rel=1e-3)
    # Ten replays and a number that somebody typed say nothing of noise.
    assert set(passes.figures["significance"]) == {"cannot tell"}


def test_a_file_against_itself(shared_traces: Path) -> None:
    for name in (
        "trace_diff__control__control",
        "cpu_only__rank-34.Jul_15_10_52_41.1074.pt.trace",
        "triton_example__triton_example",
    ):
        trace = real(shared_traces / "hta" / f"{name}.json.gz")
        found = diff.compare(trace, trace)
        for table, rows in found.tables.items():
            assert set(rows["delta_ns"]) <= {0}, table
            assert not set(rows["significance"]) & {"exceeds step spread", "unsure"}, table
        assert set(found.kernels["match"]) <= {"name"}


# ---------------------------------------------------------------- memory


def leaking(tmp_path: Path, name: str, **settings: Any) -> snapshots.Snapshot:
    made = make_snapshot.leaking_program(tokens=512, vocabulary=2048, parameters=1_000_000, **settings)
    return snapshots.from_object(made, str(tmp_path / name))


def test_memory_that_a_kept_graph_held(tmp_path: Path) -> None:
    before, after = (leaking(tmp_path, str(keep), keep_graph=keep, steps=3) for keep in (True, False))
    found = diff_memory.summary(before, after)
    assert (found["outcome"], found["moment"]) == ("less", "peak")
    allocated = found["figures"][0]
    peaks = [nsightkit.analysis.memory.snapshot.summary(s)["peak_bytes"] for s in (before, after)]
    assert [allocated[f"{side}_bytes"] for side in diff.SIDES] == peaks
    for table in ("categories", "sites"):
        for side, peak in zip(diff.SIDES, peaks, strict=True):
            assert sum(r[f"{side}_bytes"] for r in found[table]) == peak
        deltas = [abs(r["delta_bytes"]) for r in found[table]]
        assert deltas == sorted(deltas, reverse=True)
    text = diff_words.markdown(found)
    assert text.startswith("**At its peak the program holds ")
    assert "| by line | before | after | change |" in text.lower()
    json.dumps(found, allow_nan=False)
    same = diff_memory.summary(before, before)
    assert (same["outcome"], {r["delta_bytes"] for t in ("figures", "categories", "sites") for r in same[t]}) == (
        "no change",
        {0},
    )


def test_lines_that_moved_are_the_same_lines() -> None:
    def program_of(moved: int, file: str) -> snapshots.Snapshot:
        memory = make_snapshot.Allocator()
        for name, line, size in (
            ("forward", 10 + moved, 4 << 20),
            ("forward", 10 + moved, 2 << 20),
            (file, 1, 3 << 20),
        ):
            memory.malloc(size, frames=[{"name": name, "filename": f"{name}.py", "line": line}])
        return snapshots.from_object(memory.snapshot(), file)

    found = diff_memory.summary(program_of(0, "old"), program_of(4, "new"))
    rows = {row["name"]: (row["match"], row["delta_bytes"]) for row in found["sites"]}
    assert rows == {
        "forward.py:14 forward": ("normalised", 0),
        "old.py:1 old": ("disappeared", -(3 << 20)),
        "new.py:1 new": ("appeared", 3 << 20),
    }


def test_real_snapshots(shared_traces: Path) -> None:
    files = sorted(shared_traces.glob("cs336-*-memsnap/*.pickle"))
    assert len(files) == 2
    found = diff_memory.summary(*(snapshots.read(file) for file in files))
    assert found["figures"][0]["delta_bytes"] == sum(r["delta_bytes"] for r in found["sites"])
    assert found["figures"][0]["delta_bytes"] == sum(r["delta_bytes"] for r in found["categories"])
