"""The judgement, held against the corpus: no wrong answer is sure, and no answer changes unnoticed.

``python tools/confusion.py`` writes the published table and the golden answers; the diff shows what changed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import corpus
import pytest
from random_programs import random_program
from synthetic import simulated_programs
from synthetic.simulator import Cpu, Program, play

import nsightkit
from nsightkit.analysis import verdict
from nsightkit.analysis.replay import whatif

TABLE = json.loads((corpus.ROOT / "docs" / "judgement.json").read_text(encoding="utf-8"))
GOLDEN = json.loads((corpus.ROOT / "tests" / "corpus" / "golden.json").read_text(encoding="utf-8"))
PLAYED = corpus.played()
ENTRIES = [*corpus.planted(), *PLAYED, *corpus.real()]
#: How far shares of the span, and predicted gains, may move: rounding, not judgement.
SHARE, GAIN = 0.002, 0.005
RANDOM = range(40)
#: Changes whose gain any program can tell.
STANDARD = ("no-input-wait", "no-sync", "free-launches", "overlap-copies", "overlap-communication")


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.source}: {entry.name}")
def test_an_answer(entry: corpus.Entry):
    answer = corpus.answer_of(entry)
    if answer is None:
        pytest.skip(f"{entry.name} is not at hand")
    kind = corpus.judge(entry, answer.bottleneck, answer.confidence)
    expected = ("right",) if entry.source != "real" else ("right", "undecided")
    assert kind in expected, f"{entry.truth}, answered {answer.bottleneck} ({answer.confidence})"
    row = [entry.truth, answer.bottleneck, answer.confidence, answer.is_refused, kind]
    assert row == TABLE[entry.source][entry.name], "run tools/confusion.py if this is right"
    golden = GOLDEN[f"{entry.source}: {entry.name}"]
    assert answer.gaps == pytest.approx(golden["gaps"], abs=SHARE)
    assert answer.gains == pytest.approx(golden["gains"], rel=GAIN)


@pytest.mark.parametrize("entry", PLAYED, ids=lambda entry: entry.name)
def test_a_played_program_gains_what_is_predicted(entry: corpus.Entry):
    program = simulated_programs.PROGRAMS[entry.name]
    answer = corpus.answer_of(entry)
    tempting = [cause for cause, change in simulated_programs.CHANGE_OF.items() if change == program.decoy_for]
    # Copies or collectives may fill the time although running them beside other work gains nothing.
    is_trapped = answer.bottleneck != program.bottleneck and answer.bottleneck in tempting
    assert not is_trapped or answer.confidence == "low"
    # test_whatif.py holds the other changes against what is played.
    predicted = {change: gain for change, gain in answer.gains.items() if change.startswith("no-cpu-work")}
    gains = simulated_programs.true_gains(program, corpus.SEED, tuple(predicted))
    for change, speedup in predicted.items():
        assert speedup <= 1.1 * gains[change], (change, speedup, gains[change])


def test_work_that_only_the_steps_range_names(tmp_path: Path):
    """A range is recorded activity, so this is work; with a doubt, since nothing tells it from a wait."""
    kernels = simulated_programs.PROGRAMS["unnamed-work"].threads[0][:5]
    program = Program("unnamed-in-steps", [simulated_programs.loop(lambda _: [*kernels, Cpu(2_000_000)])], "unknown")
    result = verdict.summary(nsightkit.load(play(program, corpus.SEED).write(tmp_path / "played.sqlite")))
    assert (result["bottleneck"], result["confidence"]) == ("cpu-work", "medium")


@pytest.mark.parametrize("seed", RANDOM)
def test_random_programs(seed: int, tmp_path: Path):
    """Predicted against played gains: the worst of the standard changes."""
    program = random_program(seed)
    replay = whatif.WhatIf(nsightkit.load(play(program, seed).write(tmp_path / "random.sqlite")))
    predicted = {}
    if replay.refused is None:
        predicted = {change: replay.row(change)["speedup"] for change in STANDARD}
    within = "refused"
    if predicted and all(predicted.values()):
        gains = simulated_programs.true_gains(program, seed, STANDARD)
        worst = max(abs(predicted[change] / gain - 1) for change, gain in gains.items())
        assert worst <= 0.1
        within = "within 5%" if worst <= 0.05 else "within 10%"
    assert within == TABLE["random"][f"random program {seed:02d}"], "change docs/judgement.json if this is right"


def test_the_published_table():
    rows: list[Any] = []
    for source in ("planted", "played", "real"):
        rows += TABLE[source].values()
    assert {row[0] for row in rows} == set(verdict.BOTTLENECKS)
    assert set(TABLE["played"]) == set(simulated_programs.PROGRAMS)
    assert not [row for row in rows if row[4] == "wrong, high"]
    kinds = [row[4] for row in rows]
    assert kinds.count("right") + kinds.count("undecided") >= 0.9 * len(kinds)
    assert not [row for row in TABLE["played"].values() if row[3]]
    within = list(TABLE["random"].values())
    assert within.count("refused") <= 0.05 * len(within)
    assert within.count("within 5%") >= 0.95 * (len(within) - within.count("refused"))
