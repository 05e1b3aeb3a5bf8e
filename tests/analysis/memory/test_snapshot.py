"""Memory's amounts are those of an allocator that counted them; categories and lines are those that were planted."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from make_snapshot import MIB, TORCH, Allocator, frame, leaking_program, random_program

from nsightkit import cli, plots
from nsightkit.analysis.memory import snapshot as analysis
from nsightkit.errors import UsageError
from nsightkit.trace import snapshot as reader

AMOUNTS = ["allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes"]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "expandable": {"expandable": True},
    "divisions": {"divisions": 4},
    "max-split": {"max_split": 6 * MIB},
}
SHARED = (
    "cs336-kkaitlyn111-memsnap/memory_files__memory_ctx128_forward_mixed.pickle",
    "cs336-wedsonlin-memsnap/medium_128_inference_memory_snapshot.pickle",
)
Frames = list[dict[str, Any]]


def taken(allocator: Allocator) -> reader.Snapshot:
    return reader.from_object(allocator.snapshot())


def amounts(snapshot: reader.Snapshot) -> np.ndarray:
    return analysis.timeline(snapshot, 0)[AMOUNTS].to_numpy()


def categories(allocator: Allocator) -> dict[str, int]:
    """Requested bytes at the peak, by category."""
    rows = analysis.summary(taken(allocator))["by_category"]
    return {row["category"]: row["requested_bytes"] for row in rows}


# ---------------------------------------------------------------- the amounts


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("setting", SETTINGS)
def test_amounts_are_those_the_allocator_counted(setting: str, seed: int) -> None:
    allocator = random_program(seed, 260, **SETTINGS[setting])
    snapshot = reader.from_object(allocator.snapshot())
    assert amounts(snapshot).tolist() == [list(row) for row in allocator.truth]
    assert analysis.allocations(snapshot)["uncertain_bytes"].sum() == 0
    peak = max(row[0] for row in allocator.truth)
    answer = analysis.summary(snapshot)
    assert answer["peak_bytes"] == peak
    at_peak = next(row for row in allocator.truth if row[0] == peak)
    assert answer["reserved_at_peak_bytes"] == at_peak[3]
    assert sum(row["bytes"] for row in answer["by_category"]) == peak
    assert sum(row["bytes"] for row in answer["top_sites"]) == peak
    assert answer["notes"] == ["no call stacks were recorded, so nothing can be attributed"]


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_ring_buffer_cut_at_every_event_changes_nothing_after_the_cut(setting: str) -> None:
    allocator = random_program(11, 60, **SETTINGS[setting])
    count = len(allocator.events)
    for keep in range(0, count + 1, 1 if setting == "plain" else 4):
        snapshot = reader.from_object(allocator.snapshot(keep))
        found, truth = amounts(snapshot), np.array(allocator.truth[count - keep :])
        assert (found[:, 2:] == truth[:, 2:]).all()
        # What is not known is the remainder of large blocks from before the cut that are gone at the end.
        missing = truth[:, 1] - found[:, 1]
        blocks = analysis.allocations(snapshot, 0)
        first, last, unsure = (blocks[c].to_numpy() for c in ("first", "free_completed", "uncertain_bytes"))
        events = np.arange(-1, keep)[:, None]
        assert (missing >= 0).all()
        assert (missing <= ((first <= events) & (events < last)) @ unsure).all()
        if setting in ("expandable", "divisions"):
            assert (missing[missing > 0] <= MIB).all()
        assert found[-1].tolist() == truth[-1].tolist()


@pytest.mark.parametrize("setting", SETTINGS)
def test_free_space_is_what_the_allocator_had(setting: str) -> None:
    allocator = random_program(21, 200, **SETTINGS[setting])
    snapshot = reader.from_object(allocator.snapshot())
    for event in range(-1, len(allocator.events), 31):
        answer = analysis.summary(snapshot, moment=event)["fragmentation"]
        parts = ("inactive_split_bytes", "releasable_bytes", "largest_free_block_bytes")
        assert tuple(answer[part] for part in parts) == allocator.free_now[event + 1]
        assert answer["slack_bytes"] == sum(answer[p] for p in ("pending_bytes", *parts[:2]))


@pytest.mark.parametrize("setting", SETTINGS)
def test_blocks_of_a_moment_are_those_of_memory_viz(setting: str) -> None:
    found = random_program(31, 150, **SETTINGS[setting]).snapshot(120)
    compare_with_walk_back(found)


def compare_with_walk_back(found: dict[str, Any], step: int = 7) -> None:
    """Undo events from the end, as MemoryView in PyTorch's MemoryViz.js does to draw a moment."""
    snapshot = reader.from_object(found)
    live = {
        b["address"]: (b["requested_size"], b["state"] == "active_pending_free")
        for s in found["segments"]
        for b in s["blocks"]
        if b["state"] != "inactive"
    }
    reserved = sum(s["total_size"] for s in found["segments"])
    events = found["device_traces"][0]
    for event in range(len(events) - 1, -2, -1):
        if event % step == 0 or event == -1:
            mine = analysis.at(snapshot, event, 0)
            assert live == {
                a: (r, p) for a, r, p in zip(mine["address"], mine["requested_bytes"], mine["pending"], strict=True)
            }
            row = analysis.timeline(snapshot, 0).iloc[event + 1]
            assert row["reserved_bytes"] == reserved == analysis.segments(snapshot, event, 0)["total_bytes"].sum()
            assert row["requested_bytes"] == sum(r for r, _ in live.values())
        if event < 0:
            break
        entry = events[event]
        match entry["action"]:
            case "free_requested":
                live[entry["addr"]] = live[entry["addr"]][0], False
            case "free_completed":
                live[entry["addr"]] = entry["size"], True
            case "alloc":
                del live[entry["addr"]]
            case "segment_free" | "segment_unmap":
                reserved += entry["size"]
            case "segment_alloc" | "segment_map":
                reserved -= entry["size"]


@pytest.mark.parametrize("skipped", ["free_requested", "free_completed"])
def test_a_kind_of_event_that_was_not_recorded(skipped: str) -> None:
    """`skip_actions` leaves one of the two frees out; without waiting streams they say the same."""
    allocator = Allocator()
    for i in range(30):
        address = allocator.malloc(3000 * (i + 1))
        if i % 3:
            allocator.free(address)
    found = allocator.snapshot()
    kept = [i for i, e in enumerate(found["device_traces"][0]) if e["action"] != skipped]
    found["device_traces"] = [[found["device_traces"][0][i] for i in kept]]
    snapshot = reader.from_object(found)
    peak = max(row[0] for row in allocator.truth)
    assert analysis.summary(snapshot)["peak_bytes"] == peak
    assert amounts(snapshot)[-1].tolist() == list(allocator.truth[-1])


def test_several_devices() -> None:
    one, other = random_program(41, 40), random_program(42, 80)
    found = one.snapshot()
    second = other.snapshot()
    found["device_traces"].append(second["device_traces"][0])
    found["segments"] += [s | {"device": 1} for s in second["segments"]]
    snapshot = reader.from_object(found)
    peaks = [max(row[0] for row in a.truth) for a in (one, other)]
    answer = analysis.summary(snapshot)
    assert [d["peak_bytes"] for d in answer["devices"]] == peaks
    assert answer["device"] == int(np.argmax(peaks))
    assert [analysis.summary(snapshot, device=d)["peak_bytes"] for d in (0, 1)] == peaks
    with pytest.raises(UsageError, match="devices 0 to 1"):
        analysis.summary(snapshot, device=2)


# ---------------------------------------------------------------- torch's own counters, torch's own tools


@pytest.mark.parametrize("name", SHARED)
def test_the_end_is_what_torch_counted(shared_traces: Path, name: str) -> None:
    snapshot = reader.read(shared_traces / name)
    ours = analysis.summary(snapshot)["end"]
    counted = snapshot.segments
    assert ours == {
        "allocated_bytes": counted["allocated_bytes"].sum(),
        "active_bytes": counted["active_bytes"].sum(),
        "requested_bytes": counted["requested_bytes"].sum(),
        "reserved_bytes": counted["total_bytes"].sum(),
    }
    by_segment = analysis.segments(snapshot, "end").set_index("address").sort_index()
    theirs = counted.set_index("address").sort_index()
    assert by_segment["allocated_bytes"].tolist() == theirs["allocated_bytes"].tolist()
    assert (by_segment["total_bytes"] - by_segment["free_bytes"]).tolist() == theirs["active_bytes"].tolist()


@pytest.mark.parametrize("name", SHARED)
def test_memory_viz_agrees(shared_traces: Path, name: str) -> None:
    viz = pytest.importorskip("torch.cuda._memory_viz")
    with (shared_traces / name).open("rb") as file:
        found = pickle.load(file)  # a public file, looked at before; only this test loads it so
    snapshot = reader.from_object(found)
    answer = analysis.summary(snapshot, moment="end")
    assert sum(map(viz.calc_active, found["segments"])) == answer["end"]["allocated_bytes"]
    said = viz.segsum(found)
    assert f"total_reserved: {viz.Bytes(answer['end']['reserved_bytes'])}" in said
    assert f"total_allocated: {viz.Bytes(answer['end']['requested_bytes'])}" in said
    lost = answer["fragmentation"]
    free = viz._report_free(lost["slack_bytes"], lost["rounding_bytes"])
    assert f"total_free: {free}" in said
    compare_with_walk_back(found, step=501)


@pytest.mark.parametrize("name", SHARED)
def test_the_rule_for_block_sizes_gives_the_sizes_torch_recorded(shared_traces: Path, name: str) -> None:
    """Free every block of a real snapshot at its end: sizes that were in the file now follow from the rule alone."""
    with (shared_traces / name).open("rb") as file:
        found = pickle.load(file)
    counted = sum(s["allocated_size"] for s in found["segments"])
    events = found["device_traces"][0]
    born = {e["addr"] for e in events if e["action"] == "alloc"}
    known = 0
    for segment in found["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated" and block["address"] in born:
                known += 1
                freed = {"addr": block["address"], "size": block["requested_size"], "stream": 0, "time_us": 1 << 51}
                events += [freed | {"action": action} for action in ("free_requested", "free_completed")]
                block["state"] = "inactive"
    level = analysis.timeline(reader.from_object(found), 0)["allocated_bytes"].to_numpy()
    assert level[len(level) - 1 - 2 * known] == counted


# ---------------------------------------------------------------- who, and for what

MODULE = f"{TORCH}/nn/modules/module.py"
FUNCTIONAL = f"{TORCH}/nn/functional.py"
MAIN = frame("<module>", line=9)
SETUP = [frame("convert", MODULE), frame("_apply", MODULE), MAIN]
CALL = frame("_call_impl", MODULE)
FORWARD = [frame("linear", FUNCTIONAL), frame("forward", line=30), CALL, MAIN]
LOSS = [frame("cross_entropy", FUNCTIONAL), frame("loss_of", line=50), MAIN]
MATMUL = frame("at::_ops::mm::call(at::Tensor const&)", "")
ENGINE = frame("torch::autograd::Engine::evaluate_function(std::shared_ptr)", "")
BACKWARD = [MATMUL, frame("torch::autograd::generated::AddmmBackward0::apply(std::vector)", ""), ENGINE]
ACCUMULATE = [MATMUL, frame("torch::autograd::AccumulateGrad::apply(std::vector)", ""), ENGINE]
STEP = [frame("_multi_tensor_adamw", f"{TORCH}/optim/adamw.py"), frame("step", f"{TORCH}/optim/adamw.py"), MAIN]
AUTOCAST = [frame("at::autocast::cached_cast(c10::ScalarType)", ""), *FORWARD]
WORKSPACE = [frame("at::cuda::getCUDABlasLtWorkspace()", ""), *FORWARD]
REDUCE = [frame("c10d::Reducer::initialize_buckets()", ""), *BACKWARD]


def training(*, native: bool = True) -> tuple[Allocator, dict[str, int]]:
    """Two training steps with known amounts, and what is live at the end of the second backward pass."""
    allocator = Allocator()
    backward = BACKWARD if native else []

    def made(mebibytes: int, frames: Frames) -> int:
        return allocator.malloc(mebibytes * MIB, frames=frames)

    for _ in range(3):
        made(4, SETUP)
    gradients: list[int] = []
    for step in range(2):
        for address in gradients:
            allocator.free(address)
        kept = [made(5, FORWARD) for _ in range(4)]
        allocator.free(made(3, FORWARD))
        if native:
            kept += [made(2, AUTOCAST), made(8, WORKSPACE), made(6, REDUCE)]
        kept.append(made(7, LOSS))
        gradients = [made(4, backward) for _ in range(3)]
        allocator.free(made(9, backward))
        for address in kept:
            allocator.free(address, frames=backward)
        if step == 0:
            for _ in range(4):
                made(4, STEP)
        allocator.free(allocator.malloc(MIB + 512, frames=STEP))
    truth = {"activations": 20, "gradients": 12, "temporary": 9, "logits": 7, "weights": 12, "optimizer states": 16}
    if native:
        truth |= {"autocast copies": 2, "workspaces": 8, "communication": 6}
    return allocator, {category: mebibytes * MIB for category, mebibytes in truth.items()}


@pytest.mark.parametrize("native", [True, False])
def test_categories_of_a_training_step(native: bool) -> None:
    allocator, truth = training(native=native)
    assert categories(allocator) == truth
    sites = {(row["site"], row["category"]) for row in analysis.summary(taken(allocator))["top_sites"]}
    assert ("train.py:30 forward", "activations") in sites
    assert ("train.py:50 loss_of", "logits") in sites
    assert ("train.py:9 <module>", "optimizer states") in sites
    assert (("at::_ops::mm::call" if native else "no stack"), "gradients") in sites


@pytest.mark.parametrize("copies", [3, 4])
def test_copies_of_weights_are_told_by_size_and_number_without_native_frames(copies: int) -> None:
    allocator = Allocator()
    for _ in range(3):
        allocator.malloc(4 * MIB, frames=SETUP)
    for _ in range(2):
        held = [allocator.malloc(size * MIB, frames=FORWARD) for size in (*(2,) * copies, 5)]
        allocator.malloc(3 * MIB, frames=[])
        for address in held:
            allocator.free(address)
    found = categories(allocator)
    assert found.get("autocast copies", 0) == (6 * MIB if copies == 3 else 0)
    assert found["activations"] == (5 * MIB if copies == 3 else 13 * MIB)


@pytest.mark.parametrize("casts", [2, 3, 4])
def test_only_casts_of_a_weights_size_are_copies_of_weights(casts: int) -> None:
    allocator = Allocator()
    for _ in range(3):
        allocator.malloc(4 * MIB, frames=SETUP)
    held = [allocator.malloc(size * MIB, frames=AUTOCAST) for size in (*(2,) * casts, 5)]
    allocator.malloc(3 * MIB, frames=BACKWARD)
    for address in held:
        allocator.free(address)
    found = categories(allocator)
    # More of them at once than there are weights: activations that happen to have the size.
    copies = 2 * casts * MIB if casts <= 3 else 0
    assert found.get("autocast copies", 0) == copies
    assert found["activations"] == (2 * casts + 5) * MIB - copies


@pytest.mark.parametrize(
    ("frames", "freed_by", "category"),
    [
        (ACCUMULATE, "", "gradients"),
        (ACCUMULATE, "zero_grad", "gradients"),
        (BACKWARD, "zero_grad", "gradients"),
        ([MATMUL, frame("shrink"), *ACCUMULATE[1:]], "", "temporary"),  # a hook
        (BACKWARD, "", "temporary"),
        (FORWARD, "zero_grad", "temporary"),
    ],
)
def test_gradients_that_come_and_go_while_only_backward_allocates(frames: Frames, freed_by: str, category: str) -> None:
    allocator = Allocator()
    block = allocator.malloc(5 * MIB, frames=frames)
    allocator.free(block, frames=[frame(freed_by, f"{TORCH}/optim/optimizer.py")] if freed_by else [])
    allocator.malloc(MIB, frames=FORWARD)
    assert list(categories(allocator)) == [category]


@pytest.mark.parametrize(
    ("sizes", "frames", "stays", "category"),
    [
        ([8_519_680], FORWARD, True, "workspaces"),
        ([8_519_680], FORWARD[1:], True, "workspaces"),  # `@` has no frame of its own
        ([8_519_680], FORWARD, False, "activations"),
        ([8_519_680] * 2, FORWARD, True, "activations"),
        ([8_519_168], FORWARD, True, "activations"),
        ([32 * MIB], FORWARD, True, "workspaces"),
        ([32 * MIB], FORWARD[1:], True, "activations"),
    ],
)
def test_the_workspace_of_cublas_is_told_by_its_size_without_native_frames(
    sizes: list[int], frames: Frames, stays: bool, category: str
) -> None:
    allocator = Allocator()
    held = [allocator.malloc(size, frames=frames) for size in sizes]
    allocator.malloc(512, frames=SETUP)
    if not stays:
        allocator.free(held[0])
    assert set(categories(allocator)) == {"weights", category}


def test_what_an_error_for_want_of_memory_frees_was_not_temporary() -> None:
    allocator = Allocator()
    allocator.malloc(4 * MIB, frames=SETUP)
    held = [allocator.malloc(5 * MIB, frames=FORWARD) for _ in range(4)]
    allocator.free(allocator.malloc(3 * MIB, frames=FORWARD))
    allocator.oom(99 * MIB, 10 * MIB)
    for address in held:
        allocator.free(address)
    assert categories(allocator) == {"weights": 4 * MIB, "activations": 20 * MIB, "temporary": 3 * MIB}


@pytest.mark.parametrize("grad", [True, False])
def test_a_forward_pass_that_no_backward_follows_keeps_activations_where_autograd_is_on(grad: bool) -> None:
    """Eight layers, twice: with autograd each keeps its output, without it one stays until the next is there."""
    allocator = Allocator()
    allocator.malloc(4 * MIB, frames=SETUP)
    for _ in range(2):
        held = []
        for _ in range(8):
            allocator.free(allocator.malloc(9 * MIB, frames=[frame("scratch"), *FORWARD]))
            held.append(allocator.malloc(5 * MIB, frames=FORWARD))
            if not grad and len(held) > 1:
                allocator.free(held.pop(0))
        for address in held:
            allocator.free(address)
    kept = {"activations": 30 * MIB, "temporary": 14 * MIB} if grad else {"temporary": 14 * MIB}
    assert categories(allocator) == {"weights": 4 * MIB} | kept


@pytest.mark.parametrize(("freed_by", "category"), [(BACKWARD, "activations"), ([frame("main")], "unknown")])
def test_what_backward_frees_of_a_plain_function_it_was_kept_for(freed_by: Frames, category: str) -> None:
    allocator = Allocator()
    kept = allocator.malloc(5 * MIB, frames=[frame("softmax"), frame("main")])
    allocator.malloc(MIB, frames=BACKWARD)
    allocator.free(kept, frames=freed_by)
    assert categories(allocator)[category] == 5 * MIB


def test_categories_survive_a_cut_and_say_what_is_not_known() -> None:
    cut = training()[0].snapshot(30)
    rows = analysis.summary(reader.from_object(cut))["by_category"]
    sizes = {row["category"]: row["requested_bytes"] for row in rows}
    assert sizes["weights"] == 12 * MIB  # still there at the end, and blocks keep their stacks
    for segment in cut["segments"]:
        for block in segment["blocks"]:
            block["frames"] = []
    answer = analysis.summary(reader.from_object(cut))
    before = [row for row in answer["by_category"] if row["category"] == "before recording"]
    assert before[0]["requested_bytes"] >= 12 * MIB
    assert any("before the first event" in note for note in answer["notes"])


def test_an_unknown_stack_is_unknown() -> None:
    allocator = Allocator()
    allocator.malloc(5000, frames=[frame("something")])
    allocator.malloc(6000)
    # A block without any frame, where others have Python's, is from a thread without Python: autograd's.
    assert categories(allocator) == {"unknown": 5000, "gradients": 6000}
    without = Allocator()
    without.malloc(6000)
    assert categories(without) == {"unknown": 6000}


OUTSIDE = [frame("__init__", "/home/a/optim-course/trainer.py"), frame("train_with_cross_entropy_kv_cache")]
OUTER_STEP = [frame("step", "/home/a/optim-course/loop.py"), *OUTSIDE]


@pytest.mark.parametrize(
    ("frames", "category"),
    [
        ([frame("something"), *OUTER_STEP], "unknown"),
        ([frame("forward"), frame("apply", f"{TORCH}/autograd/function.py"), *FORWARD[1:], *OUTER_STEP], "activations"),
        ([frame("__init__", "/home/a/layers.py"), *OUTSIDE], "weights"),
        ([frame("my_cross_entropy", "/home/a/layers.py"), *OUTSIDE], "logits"),
        ([frame("update_kv_cache", "/home/a/layers.py"), *FORWARD[1:]], "KV cache"),
        ([frame("pack", "/home/a/pack.py"), frame("update", "/home/a/cache_utils_v2.py"), *FORWARD[1:]], "KV cache"),
        ([frame("lookup", "/home/a/lru_cache_utils.py"), *FORWARD[1:]], "activations"),
        ([frame("get_batch", "/home/a/data.py"), *OUTSIDE], "inputs"),
        ([frame("forward"), *BACKWARD, *OUTSIDE], "gradients"),
        ([*FORWARD[1:], *STEP], "activations"),
    ],
)
def test_names_further_out_do_not_decide(frames: Frames, category: str) -> None:
    """What a run is called, where a project lies, and a custom function's forward are not evidence."""
    allocator = Allocator()
    allocator.malloc(5000, frames=frames)
    assert list(categories(allocator)) == [category]


def test_recorded_ranges_tell_the_phase_where_there_are_no_stacks() -> None:
    allocator = Allocator()
    for size, name in ((5, "## forward ##"), (6, "## backward ##"), (7, "Optimizer.step#AdamW.step")):
        allocator.mark(name, "START")
        allocator.malloc(size * MIB)
        allocator.mark(name, "END")
    assert categories(allocator) == {"activations": 5 * MIB, "gradients": 6 * MIB, "optimizer states": 7 * MIB}


@pytest.mark.parametrize(
    ("stacks", "names"),
    [
        ([["allocate", "init", "mlp"], ["allocate", "init", "head"]], ["mlp by allocate", "head by allocate"]),
        ([["silu", "main"], ["linear", "main"]], ["silu in main", "linear in main"]),
        ([["main"], ["silu", "main"]], ["main", "silu in main"]),
        ([["allocate", "init"], ["allocate", "init"]], ["allocate"]),
    ],
)
def test_a_site_that_holds_most_is_told_apart(stacks: list[list[str]], names: list[str]) -> None:
    allocator = Allocator()
    for number, functions in enumerate(stacks):
        frames = [frame(name, FUNCTIONAL) if name in ("silu", "linear") else frame(name) for name in functions]
        allocator.malloc((9 - number) * MIB, frames=[*frames, MAIN])
    allocator.malloc(MIB, frames=[frame("other"), MAIN])
    snapshot = taken(allocator)
    sites = [row["site"] for row in analysis.summary(snapshot)["top_sites"]]
    assert [site.replace("train.py:1 ", "").replace("functional.py:1 ", "") for site in sites] == [*names, "other"]
    # What compares moments or snapshots needs one name for a line.
    line = "main" if "main" in stacks[0] else stacks[0][0]
    assert set(analysis.sites(snapshot)["site"]) == {f"train.py:1 {line}", "train.py:1 other"}


def test_out_of_memory() -> None:
    allocator = Allocator()
    kept = [allocator.malloc(15 * MIB, frames=FORWARD) for _ in range(4)]
    kept += [allocator.malloc(5 * MIB, frames=FORWARD) for _ in range(4)]
    allocator.free(kept.pop(6))
    allocator.free(kept.pop(1))
    before = allocator.truth[-1]
    allocator.oom(64 * MIB, 10 * MIB, frames=LOSS)
    for address in kept:
        allocator.free(address)
    snapshot = taken(allocator)
    oom = analysis.summary(snapshot)["oom"]
    assert (oom["requested_bytes"], oom["device_free_bytes"], oom["count"]) == (64 * MIB, 10 * MIB, 1)
    assert (oom["allocated_bytes"], oom["reserved_bytes"]) == (before[0], before[3])
    split, whole, largest = allocator.free_now[oom["event"] + 1]
    assert (oom["cached_free_bytes"], oom["largest_free_block_bytes"]) == (split + whole, largest)
    assert oom["site"] == "train.py:50 loss_of"
    assert oom["by_category"][0]["bytes"] == before[0]
    assert len(analysis.at(snapshot, "oom")) == 6
    without = taken(random_program(1, 10))
    assert analysis.summary(without)["oom"] is None
    for moment in ("oom", -2, 10**6, "noon"):
        with pytest.raises(UsageError):
            analysis.at(without, moment)  # type: ignore[arg-type]


def test_bands_stack_up_to_the_allocated_bytes() -> None:
    snapshot = reader.from_object(random_program(51, 200).snapshot())
    level = analysis.timeline(snapshot, 0)["allocated_bytes"].to_numpy()
    for top in (0, 5, 1000):
        bands = analysis.bands(snapshot, top=top, points=10**5)
        for event in range(-1, len(level) - 1, 5):
            now = bands[(bands["from_event"] <= event) & (event < bands["to_event"])]
            now = now[now["top_bytes"] > now["bottom_bytes"]].sort_values("bottom_bytes")
            edges = [0, *now["top_bytes"]]
            assert now["bottom_bytes"].tolist() == edges[:-1]
            assert edges[-1] == level[event + 1]
    with pytest.raises(UsageError):
        analysis.bands(snapshot, top=-1)


# ---------------------------------------------------------------- from step to step


@pytest.mark.parametrize("keep_graph", [True, False])
def test_growth_is_what_is_left_behind(keep_graph: bool) -> None:
    made = leaking_program(tokens=256, vocabulary=4096, parameters=10**6, keep_graph=keep_graph, steps=5)
    snapshot = reader.from_object(made)
    steps = analysis.ranges(snapshot, "^step$")
    assert len(steps) == 5
    level = analysis.timeline(snapshot)["allocated_bytes"].to_numpy()
    kept = 2 * 4 * 256 * 4096 * keep_graph + 512
    ends = steps["to_event"].tolist()
    risen = np.diff(level[np.array(ends) + 1])
    # In the second step a block that is reused may be up to 1 MiB larger than what it is for, which is growth, too.
    assert risen[1:].tolist() == [kept] * 3
    grown = analysis.growth(snapshot, ends)
    assert grown["site"].tolist() == ["leak.py:47 _watch"]
    assert grown["least_bytes"].tolist() == [kept]
    assert grown["grown_bytes"].tolist() == [risen.sum()]
    assert grown["count"].tolist() == [4 * (1 + 2 * keep_graph)]
    # with the first step the optimizer's states are there, and do not grow again
    whole = analysis.growth(snapshot, [-1, *ends]).set_index("category")
    assert whole.loc["optimizer states", "grown_bytes"] == 8 * 10**6
    assert whole.loc["optimizer states", "least_bytes"] == 0
    assert whole["grown_bytes"].sum() == level[-1]


def test_growth_needs_two_moments_and_a_fall_is_one_too() -> None:
    allocator = Allocator()
    first = allocator.malloc(512, frames=[frame("a")])
    allocator.free(first)
    snapshot = reader.from_object(allocator.snapshot())
    fallen = analysis.growth(snapshot, [1, "end"])
    assert fallen[["start_bytes", "end_bytes", "grown_bytes", "least_bytes"]].to_numpy().tolist() == [
        [512, 0, -512, -512]
    ]
    assert analysis.growth(snapshot, ["end", "end"]).empty
    with pytest.raises(UsageError, match="two or more"):
        analysis.growth(snapshot, ["end"])


def test_ranges_that_nest_repeat_and_are_cut_off() -> None:
    allocator = Allocator()
    allocator.mark("begun before", "END")
    for name, stage in [("a", "START"), ("a", "START"), ("b", "START"), ("a", "END"), ("b", "END"), ("a", "END")]:
        allocator.malloc(512)  # makes a segment the first time
        allocator.mark(name, stage)
    allocator.mark("a", "START", device=1)
    allocator.mark("never ends", "START")
    snapshot = taken(allocator)
    assert analysis.ranges(snapshot).to_numpy().tolist() == [["a", 1, 6], ["a", 2, 4], ["b", 3, 5]]
    assert analysis.ranges(snapshot, "b").to_numpy().tolist() == [["b", 3, 5]]
    assert analysis.ranges(taken(random_program(1, 10))).empty
    with pytest.raises(UsageError, match="regular expression"):
        analysis.ranges(snapshot, "(")


# ---------------------------------------------------------------- the command line


def written(path: Path, snapshot: Any) -> str:
    path.write_bytes(pickle.dumps(snapshot, 4))
    return str(path)


def test_the_command_answers_as_the_contract_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    allocator, truth = training()
    path = written(tmp_path / "s.pickle", allocator.snapshot())
    assert cli.run(["memory", path, "-f", "json", "--top", "2"]) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert err == ""
    assert list(answer)[1:3] == ["peak_bytes", "reserved_at_peak_bytes"]
    assert {"by_category", "top_sites", "fragmentation", "oom"} <= set(answer)
    assert answer["peak_bytes"] == max(row[0] for row in allocator.truth)
    assert len(answer["top_sites"]) == 2
    assert "someone" not in out  # folders are left out
    assert set(truth) == {row["category"] for row in answer["by_category"]}
    for wrong in (["--device", "5"], ["--at", "noon"], ["--at", "oom"], ["--at", "99999"]):
        assert cli.run(["memory", path, *wrong]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1


def test_the_table_counts_one_of_each_and_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    allocator = Allocator()
    allocator.free(allocator.malloc(5000))
    assert cli.run(["memory", written(tmp_path / "one.pickle", allocator.snapshot(1)), "-f", "text"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("one.pickle · 1 event\n")
    assert "1 block from before the first event" in out


def test_the_table_says_out_of_memory_and_shows_no_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    allocator = random_program(3, 30)
    allocator.oom(1 << 30, 5 << 20)
    cut = allocator.snapshot(5)
    cut["segments"][0]["blocks"][0]["frames"] = [frame("\x1b[31mred\n[bold]", "<a>")]
    assert cli.run(["memory", written(tmp_path / "s.pickle", cut), "-f", "text", "--at", "oom"]) == 0
    out = capsys.readouterr().out
    assert "out of memory" in out
    assert "\x1b" not in out


def test_the_command_needs_no_torch(tmp_path: Path) -> None:
    path = written(tmp_path / "s.pickle", training()[0].snapshot())
    program = "import sys; sys.modules['torch'] = None; from nsightkit import cli; sys.exit(cli.run(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "memory", path, "-f", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["peak_bytes"]


# ---------------------------------------------------------------- figures


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    plt.close("all")


def test_figures_say_what_they_show() -> None:
    allocator, truth = training()
    snapshot = reader.from_object(allocator.snapshot())
    over_time = plots.memory_timeline(analysis.bands(snapshot), analysis.timeline(snapshot))
    bars = plots.memory_bars(analysis.sites(snapshot), top=3)
    for figure in (over_time, bars):
        figure.canvas.draw()
        assert len(figure.get_label()) > 40
    legend = {text.get_text() for text in over_time.axes[0].get_legend().get_texts()}
    assert {*truth, "reserved"} <= legend
    assert f"{len(allocator.events):,} allocator events" in over_time.get_label()
    assert "others" in [t.get_text() for t in bars.axes[0].get_yticklabels()][-1]


@pytest.mark.parametrize(("count", "said"), [(1, "1 block"), (1200, "1,200 blocks")])
def test_bars_count_their_blocks(count: int, said: str) -> None:
    sites = pd.DataFrame(
        {"site": ["a.py:1 f"], "category": ["weights"], "bytes": [512], "count": [count], "share": [1.0]}
    )
    texts = [text.get_text() for text in plots.memory_bars(sites).axes[0].texts]
    assert texts == [f"100.0% · {said}"]


def test_the_timeline_draws_every_band_at_its_height() -> None:
    snapshot = reader.from_object(training()[0].snapshot())
    bands = analysis.bands(snapshot, top=10**6)
    axes = plots.memory_timeline(bands).axes[0]
    outlines = [path.vertices for drawn in axes.collections for path in drawn.get_paths()]
    # Several bands may share an outline, so by Gauss's formula.
    areas = [abs(x @ np.roll(y, -1) - np.roll(x, -1) @ y) / 2 for x, y in (outline.T for outline in outlines)]
    wanted = ((bands["to_event"] - bands["from_event"]) * (bands["top_bytes"] - bands["bottom_bytes"])).sum()
    assert sum(areas) == pytest.approx(wanted / 1e6, rel=1e-9)  # drawn in MB


def test_figures_of_nothing_and_of_hostile_names() -> None:
    empty = reader.from_object({"segments": [], "device_traces": [[]]})
    for figure in (
        plots.memory_timeline(analysis.bands(empty), analysis.timeline(empty)),
        plots.memory_bars(analysis.sites(empty)),
    ):
        figure.canvas.draw()
        assert figure.get_label().endswith(".")
    allocator = Allocator()
    allocator.malloc(5000, frames=[frame("void f<$\\frac{1}$>(\x1b[31m 加载 $x^{$")])
    snapshot = reader.from_object(allocator.snapshot())
    plots.memory_bars(analysis.sites(snapshot)).canvas.draw()
