"""Amounts are those of an allocator that counted them; categories and lines are those of a known program."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import numpy as np
import pytest
from _lib import figures
from make_snapshot import MIB, TORCH, Allocator, frame, random_program, tables

from nsightkit import cli
from nsightkit.analysis.memory import snapshot as analysis
from nsightkit.errors import UsageError
from nsightkit.trace import snapshot as reader

AMOUNTS = ["allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes"]
SHARED = (
    "cs336-kkaitlyn111-memsnap/memory_files__memory_ctx128_forward_mixed.pickle",
    "cs336-wedsonlin-memsnap/medium_128_inference_memory_snapshot.pickle",
)
Frames = list[dict[str, Any]]


def taken(allocator: Allocator, keep: int | None = None) -> reader.Snapshot:
    return tables(allocator.snapshot(keep))


def amounts(snapshot: reader.Snapshot) -> np.ndarray:
    return analysis.timeline(snapshot, 0)[AMOUNTS].to_numpy()


def categories(snapshot: reader.Snapshot) -> dict[str, int]:
    """Requested MiB at the peak, by category."""
    live = analysis.at(snapshot)
    return (live.groupby("category")["requested_bytes"].sum() / MIB).to_dict()


# ---------------------------------------------------------------- the amounts


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("expandable", [False, True])
def test_amounts_and_free_space_are_those_of_the_allocator(expandable: bool, seed: int):
    allocator = random_program(seed, 260, expandable=expandable)
    snapshot = taken(allocator)
    assert amounts(snapshot).tolist() == [list(row) for row in allocator.truth]
    answer = analysis.summary(snapshot)
    at_peak = max(allocator.truth, key=lambda row: row[0])
    assert (answer["peak_bytes"], answer["reserved_at_peak_bytes"]) == (at_peak[0], at_peak[3])
    for rows in ("by_category", "top_sites"):
        assert sum(row["bytes"] for row in answer[rows]) == at_peak[0]
    for event in range(-1, len(allocator.events), 31):
        space = analysis.summary(snapshot, moment=event)["fragmentation"]
        parts = [space[f"{part}_bytes"] for part in ("inactive_split", "releasable", "largest_free_block")]
        truth = allocator.free_now[event + 1]
        assert tuple(parts) == ((truth[0] + truth[1], 0, None) if expandable else truth)
        assert space["slack_bytes"] == space["pending_bytes"] + parts[0] + parts[1]


@pytest.mark.parametrize("expandable", [False, True])
def test_a_ring_buffer_that_lost_its_beginning_changes_nothing_after_it(expandable: bool):
    allocator = random_program(11, 60, expandable=expandable)
    count = len(allocator.events)
    for keep in range(0, count + 1, 7):
        snapshot = taken(allocator, keep)
        found, truth = amounts(snapshot), np.array(allocator.truth[count - keep :])
        assert (found[:, 2:] == truth[:, 2:]).all()
        assert found[-1].tolist() == truth[-1].tolist()
        # The remainder of large blocks from before the cut that are gone at the end may be unknown.
        old = (analysis.allocations(snapshot, 0)["first"] < 0).sum()
        missing = truth[:, 1] - found[:, 1]
        assert missing.min() >= 0
        assert missing.max() <= 20 * MIB * old


def test_the_fullest_device_answers():
    small, large = random_program(41, 40), random_program(42, 80)
    found, second = small.snapshot(), large.snapshot()
    found["device_traces"] += second["device_traces"]
    found["segments"] += [segment | {"device": 1} for segment in second["segments"]]
    snapshot = tables(found)
    assert analysis.timeline(snapshot, 0)[AMOUNTS].to_numpy().tolist() == [list(row) for row in small.truth]
    assert analysis.timeline(snapshot)[AMOUNTS].to_numpy().tolist() == [list(row) for row in large.truth]
    with pytest.raises(UsageError, match="devices 0 to 1"):
        analysis.summary(snapshot, device=2)


@pytest.mark.parametrize("name", SHARED)
def test_the_end_is_what_torch_counted(shared_traces: Path, name: str):
    snapshot = reader.read(shared_traces / name)
    counted = snapshot.segments[["allocated_bytes", "active_bytes", "requested_bytes", "total_bytes"]]
    assert amounts(snapshot)[-1].tolist() == counted.sum().tolist()


@pytest.mark.parametrize("name", SHARED)
def test_the_rule_for_block_sizes_gives_the_sizes_torch_recorded(shared_traces: Path, name: str):
    """Free every block of a real snapshot at its end: sizes that were in the file now follow from the rule alone."""
    with (shared_traces / name).open("rb") as file:
        found = pickle.load(file)  # a public file, looked at before; only this test loads it so
    counted = sum(segment["allocated_size"] for segment in found["segments"])
    events = found["device_traces"][0]
    born = {event["addr"] for event in events if event["action"] == "alloc"}
    known = 0
    for segment in found["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated" and block["address"] in born:
                known += 1
                freed = {"addr": block["address"], "size": block["requested_size"], "stream": 0, "time_us": 1 << 51}
                events += [freed | {"action": action} for action in ("free_requested", "free_completed")]
                block["state"] = "inactive"
    assert amounts(tables(found))[-1 - 2 * known, 0] == counted


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
STEP = [frame("_multi_tensor_adamw", f"{TORCH}/optim/adamw.py"), frame("step", f"{TORCH}/optim/adamw.py"), MAIN]
AUTOCAST = [frame("at::autocast::cached_cast(c10::ScalarType)", ""), *FORWARD]
WORKSPACE = [frame("at::cuda::getCUDABlasLtWorkspace()", ""), *FORWARD]
REDUCE = [frame("c10d::Reducer::initialize_buckets()", ""), *BACKWARD]


def training(*, native: bool = True) -> tuple[Allocator, dict[str, int]]:
    """Two training steps with known amounts, and the MiB that are live at the end of the second backward pass."""
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
        allocator.free(made(1, STEP))
    truth = {"activations": 20, "gradients": 12, "temporary": 9, "logits": 7, "weights": 12, "optimizer states": 16}
    if native:
        truth |= {"autocast copies": 2, "workspaces": 8, "communication": 6}
    return allocator, truth


@pytest.mark.parametrize("native", [True, False])
def test_categories_and_lines_of_a_training_step(native: bool):
    allocator, truth = training(native=native)
    snapshot = taken(allocator)
    assert categories(snapshot) == truth
    sites = set(analysis.sites(snapshot)[["site", "category"]].itertuples(index=False, name=None))
    assert ("train.py:30 forward", "activations") in sites
    assert ("train.py:50 loss_of", "logits") in sites
    assert (("at::_ops::mm::call" if native else "no stack"), "gradients") in sites


def test_casts_half_as_large_as_a_weight_are_copies():
    allocator = Allocator()
    allocator.malloc(4 * MIB, frames=SETUP)
    held = [allocator.malloc(size * MIB, frames=AUTOCAST) for size in (2, 5)]
    allocator.malloc(3 * MIB, frames=BACKWARD)
    for address in held:
        allocator.free(address)
    found = categories(taken(allocator))
    assert (found["autocast copies"], found["activations"]) == (2, 5)


@pytest.mark.parametrize(
    ("frames", "freed_by", "category"),
    [
        (BACKWARD, "zero_grad", "gradients"),
        (BACKWARD, "other", "temporary"),
        (FORWARD, "zero_grad", "temporary"),
    ],
)
def test_what_zero_grad_frees_was_a_gradient(frames: Frames, freed_by: str, category: str):
    allocator = Allocator()
    block = allocator.malloc(5 * MIB, frames=frames)
    allocator.free(block, frames=[frame(freed_by, f"{TORCH}/optim/optimizer.py")])
    assert list(categories(taken(allocator))) == [category]


def test_what_an_error_for_want_of_memory_frees_was_not_temporary():
    allocator = Allocator()
    held = [allocator.malloc(15 * MIB, frames=FORWARD) for _ in range(4)]
    held += [allocator.malloc(5 * MIB, frames=FORWARD) for _ in range(4)]
    allocator.free(held.pop(6))
    allocator.free(held.pop(1))
    allocated, _, _, reserved = allocator.truth[-1]
    allocator.oom(64 * MIB, 10 * MIB, frames=LOSS)
    for address in held:
        allocator.free(address)
    snapshot = taken(allocator)
    assert categories(snapshot) == {"activations": 60, "temporary": 20}
    oom = analysis.summary(snapshot)["oom"]
    split, whole, largest = allocator.free_now[analysis._event_number(snapshot, "oom", 0) + 1]
    expected = {
        "site": "train.py:50 loss_of",
        "requested_bytes": 64 * MIB,
        "device_free_bytes": 10 * MIB,
        "allocated_bytes": allocated,
        "reserved_bytes": reserved,
        "cached_free_bytes": split + whole,
        "largest_free_block_bytes": largest,
    }
    assert oom.items() >= expected.items()
    without = taken(random_program(1, 10))
    assert analysis.summary(without)["oom"] is None
    for moment in ("oom", -2, 10**6, "noon"):
        with pytest.raises(UsageError):
            analysis.at(without, moment)  # type: ignore[arg-type]


def test_categories_survive_a_cut_and_say_what_is_not_known():
    cut = training()[0].snapshot(30)
    assert categories(tables(cut))["weights"] == 12  # blocks of the end keep their stacks
    for segment in cut["segments"]:
        for block in segment["blocks"]:
            block["frames"] = []
    snapshot = tables(cut)
    assert categories(snapshot)["before recording"] >= 12
    assert any("before recording began" in note for note in analysis.summary(snapshot)["notes"])


OUTSIDE = [frame("__init__", "/home/a/optim-course/trainer.py"), frame("train_with_cross_entropy_kv_cache")]
OUTER_STEP = [frame("step", "/home/a/optim-course/loop.py"), *OUTSIDE]


@pytest.mark.parametrize(
    ("frames", "category"),
    [
        ([frame("something"), *OUTER_STEP], "unknown"),
        ([frame("forward"), frame("apply", f"{TORCH}/autograd/function.py"), *FORWARD[1:], *OUTER_STEP], "activations"),
        ([frame("__init__", "/home/a/layers.py"), *OUTSIDE], "weights"),
        ([frame("__init__", "/home/a/cs336/optimizer.py"), *OUTSIDE], "optimizer states"),
        ([frame("__init__", "/home/a/optimized_layers.py"), *OUTSIDE], "weights"),
        ([frame("my_cross_entropy", "/home/a/layers.py"), *OUTSIDE], "logits"),
        ([frame("update_kv_cache", "/home/a/layers.py"), *FORWARD[1:]], "KV cache"),
        ([frame("lookup", "/home/a/lru_cache_utils.py"), *FORWARD[1:]], "activations"),
        ([frame("forward"), *BACKWARD, *OUTSIDE], "gradients"),
        ([*FORWARD[1:], *STEP], "activations"),
    ],
)
def test_names_further_out_do_not_decide(frames: Frames, category: str):
    """What a run is called, where a project lies, and a custom function's forward are not evidence."""
    allocator = Allocator()
    allocator.malloc(5000, frames=frames)
    assert list(categories(taken(allocator))) == [category]


# ---------------------------------------------------------------- over time


def test_bands_stack_up_to_the_allocated_bytes():
    snapshot = taken(random_program(51, 200))
    level = analysis.timeline(snapshot, 0)["allocated_bytes"].to_numpy()
    for top in (5, 1000):
        bands = figures.bands(snapshot, top)
        for event in range(-1, len(level) - 1, 5):
            now = bands[(bands["from_event"] <= event) & (event < bands["to_event"])].sort_values("band")
            edges = [0, *now["top_bytes"]]
            assert now["bottom_bytes"].tolist() == edges[:-1]
            assert edges[-1] >= level[event + 1]
            assert edges[-1] == level[event + 1] or top == 5


def test_growth_is_what_is_left_behind():
    """Each step keeps a block of its hook's, and frees what its forward pass took."""
    allocator = Allocator()
    for _ in range(5):
        allocator.mark("step", "START")
        passing = allocator.malloc(6 * MIB, frames=FORWARD)
        allocator.malloc(4 * MIB, frames=[frame("_watch", "/home/a/leak.py", 47), *FORWARD])
        allocator.free(passing)
        allocator.mark("step", "END")
    grown = analysis.growth(taken(allocator), "^step$")
    columns = grown.drop(columns="category").to_numpy().tolist()
    assert columns == [["leak.py:47 _watch", 4 * 4 * MIB, 4 * MIB]]


# ---------------------------------------------------------------- the command line


def test_the_command_answers_as_the_contract_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    allocator, truth = training()
    allocator.oom(1 << 30, 5 << 20, frames=[frame("\x1b[31mred\n[bold]", "<a>")])
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(allocator.snapshot(), 4))
    assert cli.run(["memory", str(path), "-f", "json", "--top", "2"]) == 0
    out = capsys.readouterr().out
    answer = json.loads(out)
    assert {"peak_bytes", "reserved_at_peak_bytes", "by_category", "top_sites", "fragmentation", "oom"} <= set(answer)
    assert answer["peak_bytes"] == max(row[0] for row in allocator.truth)
    assert set(truth) == {row["category"] for row in answer["by_category"]}
    assert len(answer["top_sites"]) == 2
    assert "someone" not in out  # folders are left out
    assert cli.run(["memory", str(path), "-f", "text", "--at", "oom"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("The program held 41.94 MB at the out-of-memory error, 40.0% of it optimizer states.")
    assert "out of memory: " in out
    assert "\x1b" not in out
    assert cli.run(["memory", str(path), "--at", "noon"]) == 2
