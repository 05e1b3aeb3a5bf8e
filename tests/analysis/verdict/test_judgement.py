"""Judgement: what is true of planted, played and real runs, against what the verdict says, and how sure it is.

``docs/judgement.json`` holds every answer; the definitions page makes its confusion table from it. Whoever changes an
answer runs ``NSIGHTKIT_WRITE_JUDGEMENT=1 pytest tests/analysis/verdict/test_judgement.py``, and the diff shows which
answers changed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from random_programs import random_program
from synthetic import simulated_programs
from synthetic.planted import BOTTLENECK_OF, Fault, training
from synthetic.simulator import Cpu, Program, play

import nsightkit
from nsightkit.analysis import verdict
from nsightkit.analysis.replay import whatif
from nsightkit.trace.model import Trace

RECORDED = Path(__file__).resolve().parents[3] / "docs" / "judgement.json"
sys.path.append(str(RECORDED.parent / "_ext"))
import judgement  # noqa: E402 # the directive that publishes it

WRITING = bool(os.environ.get("NSIGHTKIT_WRITE_JUDGEMENT"))
SEED = 1
RANDOM = range(40)
Judged = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def judged() -> Iterator[Judged]:
    """Every answer of this session, by source and name; written when that was asked for."""
    found: Judged = {}
    yield found
    if WRITING and found:
        before = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
        # Real traces are not everywhere at hand: those that are not keep their answers.
        found["real"] = {**before.get("real", {}), **found.get("real", {})}
        whole = {
            source: dict(sorted(found.get(source, {}).items())) for source in ("planted", "played", "real", "random")
        }
        RECORDED.write_text(_lines(whole))


def _lines(whole: Judged) -> str:
    """JSON with a line for each answer."""
    parts = []
    for source, rows in whole.items():
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
        parts.append(f" {json.dumps(source)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _answer(judged: Judged, source: str, name: str, truth: str, found: dict[str, Any]) -> judgement.Row:
    """Note an answer, hold it against the published one, and refuse a wrong one that claims to be sure."""
    row = judgement.Row(truth, found["bottleneck"], found["confidence"], _refused(found))
    _note(judged, source, name, row.as_list())
    assert row.kind != "wrong, high", f"{name}: {truth}, and the verdict is sure of {row.answer}"
    return row


def _refused(found: dict[str, Any]) -> bool:
    return any(text.startswith("nothing is predicted: ") for text in found["against"])


def _note(judged: Judged, source: str, name: str, row: Any) -> None:
    judged.setdefault(source, {})[name] = row
    if not WRITING:
        published = json.loads(RECORDED.read_text())[source]
        assert published.get(name) == row, f"{RECORDED.name} has {published.get(name)}: write it anew if this is right"


# ---------------------------------------------------------------- planted


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("fault", list(BOTTLENECK_OF))
def test_planted(judged: Judged, fault: Fault | None, seed: int, tmp_path: Path) -> None:
    training(tmp_path / "t.sqlite", fault, steps=6 + 3 * seed, layers=3 + 2 * seed, seed=seed, scale=1.0 - 0.3 * seed)
    found = verdict.summary(nsightkit.load(tmp_path / "t.sqlite"))
    row = _answer(judged, "planted", f"{fault or 'without a fault'}, seed {seed}", BOTTLENECK_OF[fault], found)
    assert row.kind == "right"


# ---------------------------------------------------------------- played


@pytest.mark.parametrize("program", simulated_programs.PROGRAMS.values(), ids=lambda program: program.name)
def test_played(judged: Judged, program: Program, tmp_path: Path) -> None:
    """What is true of a program is what it gains when it is played again; the simulator's tests hold it to that."""
    found = verdict.summary(_load(program, tmp_path))
    row = _answer(judged, "played", program.name, program.bottleneck, found)
    assert row.kind == "right"
    assert not row.refused
    tempting = [name for name, change in simulated_programs.CHANGE_OF.items() if change == program.decoy_for]
    # Copies or collectives may fill the time although running them beside other work gains nothing.
    assert row.answer == program.bottleneck or row.answer not in tempting or row.confidence == "low"
    printed = {change["change"]: change["speedup"] for change in found["changes"]}
    # Of the other changes test_whatif.py holds what is predicted against what is played.
    work = tuple(change for change in printed if change.startswith("no-cpu-work"))
    gains = simulated_programs.true_gains(program, SEED, work)
    assert all(printed[change] <= 1.1 * gains[change] for change in work), (printed, gains)


def test_work_that_only_the_steps_range_names(tmp_path: Path) -> None:
    """Work by definition, since a range is recorded activity; with a doubt, since nothing tells it from a wait."""
    kernels = simulated_programs.PROGRAMS["unnamed-work"].threads[0][:5]
    program = Program("unnamed-in-steps", [simulated_programs.loop(lambda _: [*kernels, Cpu(2_000_000)])], "unknown")
    found = verdict.summary(_load(program, tmp_path))
    assert (found["bottleneck"], found["confidence"]) == ("cpu-work", "medium")
    assert any("it may have waited" in text for text in found["against"])


def _load(program: Program, folder: Path) -> Trace:
    return nsightkit.load(play(program, SEED).write(folder / "played.sqlite"))


@pytest.mark.parametrize("seed", RANDOM)
def test_random_programs(judged: Judged, seed: int, tmp_path: Path) -> None:
    """Predicted against played: the worst of the standard changes."""
    program = random_program(seed)
    asked = whatif.WhatIf(nsightkit.load(play(program, seed).write(tmp_path / "random.sqlite")))
    predicted = {change: asked.refused is None and asked.row(change)["speedup"] for change in whatif.STANDARD}
    if all(predicted.values()):
        gains = simulated_programs.true_gains(program, seed, whatif.STANDARD)
        worst = max(abs(predicted[change] / gain - 1) for change, gain in gains.items())
        within = next((name for most, name in judgement.WITHIN.items() if worst <= most), "further off")
    else:
        within = "refused"
    _note(judged, "random", f"random program {seed:02d}", within)
    assert within != "further off"


# ---------------------------------------------------------------- real

#: File, what is true of it, what else may honestly be said, and who says so.
REAL: list[tuple[str, str, tuple[str, ...]]] = [
    # The CPU prepares the input for the first 218 of 383 ms of the step; a range of the step is all that names it.
    ("odd-tokens/timesformer-h100.json.gz", "cpu-work", ()),
    ("tracelens/h100__facebook_timesformer*.json.gz", "cpu-work", ()),
    # Each iteration waits 120 to 140 ms in the DataLoader's own range.
    ("odd-tokens/owlv2-h100.json.gz", "input-pipeline", ()),
    ("odd-tokens/owlv2-mi300.json.gz", "input-pipeline", ()),
    # Busy for about nine tenths of the step.
    ("two-cards/qwen-h100.json.gz", "memory-bound", ()),
    ("two-cards/qwen-mi300.json.gz", "memory-bound", ()),
    # Decoding of 32 sequences does 16 FLOPs a byte; a prefill of 8,192 tokens is arithmetic.
    ("vllm-graphs/decode.json.gz", "memory-bound", ()),
    ("vllm-graphs/prefill-decode.json.gz", "compute-bound", ()),
    # Graphs being captured: a few operations.
    ("vllm-graphs/decode-capture.json.gz", "start-up", ("not-enough-data",)),
    # A launch returned at 0.1 ms, its kernel ran at 463 ms, behind work that is not in the trace.
    ("sglang-queue/decode.json.gz", "queued", ()),
    # Weights streamed to two devices: copies fill 97 %.
    ("h100-all-copies/two-gpus-1s.sqlite", "memory-transfer", ()),
    # Without loader workers, and with four: the median step goes from 176.8 to 125.3 ms.
    ("v100-starved-loader/workers-0.json.gz", "input-pipeline", ()),
    ("v100-starved-loader/workers-4.json.gz", "launch-overhead", ()),
    # The same 32 to 39 ms for every batch up to 64: the launch floor. Dense at 128.
    ("a100-batch-size/batch-2.json.gz", "launch-overhead", ()),
    ("a100-batch-size/batch-16.json.gz", "launch-overhead", ()),
    ("a100-batch-size/batch-64.json.gz", "launch-overhead", ()),
    ("a100-batch-size/batch-128.json.gz", "compute-bound", ()),
    # Busy for 99.8 %: products in FP32. With graphs, whose kernels were not recorded, nothing says of what.
    ("a100-cuda-graphs/eager.sqlite", "compute-bound", ()),
    ("a100-cuda-graphs/graphs.sqlite", "not-enough-data", ()),
    # Its weights take 3.2 of 7.9 s before the first kernel: of the capture true, of the loop not.
    ("a100-cuda-graphs/eager-nvtx.sqlite", "memory-transfer", ("compute-bound",)),
    # vLLM without graphs: busy for 10.9 of 84.5 ms.
    ("b200-eager/gpt-oss-eager.json.gz", "launch-overhead", ()),
    # A few operations each.
    ("h200-matmul/1-before.sqlite", "not-enough-data", ("start-up",)),
    ("hta/cpu_only__*.json.gz", "not-enough-data", ()),
    ("hta/triton_example__*.json.gz", "not-enough-data", ()),
    ("hta/critical_path__cuda_event_sync*.json.gz", "not-enough-data", ()),
    ("cuda-perf-sandbox/report1.sqlite", "not-enough-data", ()),
    # Of these the repositories are public; a folder with copies may be named in NSIGHTKIT_PUBLIC.
    # Exposed RCCL: 55.6 of 86.6 ms.
    ("*resnet_act_checkpoint.json.gz", "communication", ()),
    # time.sleep(0.001) in ensure_layer_*_weights; a range named prefetch_layers_[4, 5] around host work.
    ("*llama_real.sqlite", "cpu-work", ()),
    ("*llama_demo.sqlite", "cpu-work", ()),
    ("*mi300*timesformer*.json.gz", "cpu-work", ()),
    # First calls; graphs being captured.
    ("*normalization_layer_test.json.gz", "start-up", ()),
    ("*alexnet.json.gz", "start-up", ()),
    ("*vllm_piecewise_capture.json.gz", "start-up", ()),
    ("*xdit_flux_capture.json.gz", "start-up", ()),
    # Modules are loaded lazily, three operations run.
    ("*nsysai_mock.sqlite", "start-up", ("not-enough-data",)),
    # Two fills, 11 µs of 33.7 ms.
    ("*sglang_capture.json.gz", "start-up", ("not-enough-data",)),
    # Busy for about nine tenths; of its kernels' time, 64 % is normalization, elementwise work and moving bytes.
    ("*mi210_gpu_only_trace*.json.gz", "memory-bound", ()),
    # Right already, apart from the advice.
    ("*ns_resolution.json.gz", "compute-bound", ()),
    ("*xdit_sd*.json.gz", "launch-overhead", ()),
    # An accelerator that is not read.
    ("*mtia.json.gz", "not-enough-data", ()),
]


@pytest.fixture(scope="module")
def at_hand() -> list[Path]:
    root = Path(os.environ.get("NSIGHTKIT_SHARED") or RECORDED.parent.parent.parent / "shared")
    shared = [root / "traces", root / "cases", root]
    public = os.environ.get("NSIGHTKIT_PUBLIC")
    return [folder for folder in [*shared, *([Path(public)] if public else [])] if folder.is_dir()]


@pytest.mark.parametrize(("file", "truth", "honest"), REAL, ids=[file for file, _, _ in REAL])
def test_real(judged: Judged, at_hand: list[Path], file: str, truth: str, honest: tuple[str, ...]) -> None:
    path = next((path for folder in at_hand for path in sorted(folder.glob(file))), None)
    if path is None:
        pytest.skip(f"{file} is not at hand")
    row = _answer(judged, "real", file.strip("*"), truth, verdict.summary(nsightkit.load(path, cache=False)))
    assert row.kind in ("right", "undecided") or row.answer in honest


# ---------------------------------------------------------------- the table


def test_the_published_table() -> None:
    """Every row is in it once; nothing is wrong with high confidence; no replay of a named program is refused."""
    whole = json.loads(RECORDED.read_text())
    rows = judgement.rows(whole)
    confusion = judgement.confusion(rows)
    assert sum(confusion.values()) == len(rows) == sum(len(whole[source]) for source in judgement.SOURCES)
    assert set(whole["played"]) == set(simulated_programs.PROGRAMS)
    assert len(whole["planted"]) == 2 * len(BOTTLENECK_OF)
    assert {truth for truth, _ in confusion} == set(verdict.BOTTLENECKS)
    assert not [row for row in rows if row.kind == "wrong, high"]
    assert not [row for row in rows if row.refused and row.source == "played"]
    within = list(whole["random"].values())
    assert len(within) == len(RANDOM)
    assert within.count("refused") <= 0.05 * len(within)
    answered = [name for name in within if name != "refused"]
    assert set(answered) <= set(judgement.WITHIN.values())
    assert answered.count("within 5 %") >= 0.95 * len(answered)
