"""The schedule and its replay: a self-check that fails where it must, traces that cannot be played, selections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import simulated_programs
from synthetic.simulator import Launch, Program, Sync, play

import nsightkit
from nsightkit.analysis.replay import Change, Unplayable, read
from nsightkit.analysis.replay.whatif import MOST_ERROR
from nsightkit.analysis.timeline.selection import select
from nsightkit.trace.model import Trace

US = 1_000
SYNCED = [Launch("k", 30 * US), Sync()] * 60


def _trace(tmp_path: Path, program: Program) -> Trace:
    return nsightkit.load(play(program, 3).write(tmp_path / "t.sqlite"), cache=False)


def _exact(tmp_path: Path, *actions: Any) -> Trace:
    """The trace of one thread without jitter."""
    return _trace(tmp_path, Program("exact", [actions], jitter=0.0))


def _frames(trace: Trace, **tables: Any) -> Trace:
    """The trace with some tables changed; None leaves one out."""
    frames = {name: trace.table(name) for name in ("kernels", "memops", "calls", "ranges")}
    return Trace.from_frames({name: frame for name, frame in {**frames, **tables}.items() if frame is not None})


def _reason(trace: Trace) -> str | None:
    """Why a trace cannot be played, None where it can."""
    try:
        schedule = read(trace)
    except Unplayable as reason:
        return str(reason)
    return "error" if schedule.error > MOST_ERROR else None


def test_latencies_are_constants_so_that_an_unchanged_replay_is_no_identity(tmp_path: Path):
    trace = _exact(tmp_path, *SYNCED)
    assert read(trace).error == 0
    calls = trace.table("calls")
    # Every third wait returns late, for nothing that was recorded.
    late = calls["name"].astype(str).str.contains("Synchronize") & (np.arange(len(calls)) % 6 == 1)
    shifted = calls.assign(end_ns=calls["end_ns"] + np.where(late, 2 * US, 0))
    assert read(_frames(trace, calls=shifted)).error > 0


@pytest.mark.parametrize("name", ["item-each-layer", "launch-blocking"])
def test_a_model_without_waits_is_found_out(tmp_path: Path, name: str):
    schedule = read(_trace(tmp_path, simulated_programs.PROGRAMS[name]))
    assert schedule.error < 0.02
    assert abs(schedule.play(Change(waits=False)).wall_ns / schedule.recorded.wall_ns - 1) > MOST_ERROR


@pytest.mark.parametrize("name", ["item-each-layer", "hand-over"])
def test_streams_that_are_not_what_they_seem_cannot_be_played(tmp_path: Path, name: str):
    """Kernels and copies dealt out to streams at random: each seems to wait for the one before it."""
    trace = _trace(tmp_path, simulated_programs.PROGRAMS[name])
    draw = np.random.default_rng(3)
    dealt = {}
    for table in ("kernels", "memops"):
        frame = trace.table(table)
        dealt[table] = frame.assign(stream=draw.choice([7, 9, 13], len(frame)))
    assert _reason(_frames(trace, **dealt)) is not None


def test_without_launches_there_is_no_schedule(tmp_path: Path):
    trace = _exact(tmp_path, *[Launch("k", 30 * US)] * 60)
    calls = trace.table("calls")
    number = np.arange(len(calls))
    assert _reason(_frames(trace, calls=None)) == "the calls that launched the GPU's work were not recorded"
    assert _reason(_frames(trace, kernels=None, calls=None)) == "there is no GPU work"
    # A few lost launches are no obstacle, a third of them is.
    assert _reason(_frames(trace, calls=calls[number != 40].reset_index(drop=True))) is None
    assert _reason(_frames(trace, calls=calls[number % 3 != 1].reset_index(drop=True))) is not None
    # What was launched before the recording comes first.
    assert read(_frames(trace, calls=calls.iloc[30:].reset_index(drop=True))).error == 0


def test_one_operation(tmp_path: Path):
    assert read(_exact(tmp_path, Launch("k", 30 * US))).unchanged.wall_ns == 30 * US


@pytest.mark.parametrize("name", ["starved-loader", "busy"])
def test_a_selection(tmp_path: Path, name: str):
    """Also where the queue is full of what was not selected."""
    run = play(simulated_programs.PROGRAMS[name], seed=2)
    part = read(select(nsightkit.load(run.write(tmp_path / "t.sqlite")), last_steps=4))
    assert len(part.recorded.steps_ns) == 4
    assert part.recorded.wall_ns == run.steps[-1][1] - run.steps[-5][1]
    assert part.error < 0.02


def test_a_selection_with_fewer_streams_than_its_trace():
    whole = nsightkit.load(Path(__file__).parents[3] / "docs" / "cases" / "h100-all-copies" / "two-gpus-1s.parquet")
    for device in (0, 1):
        assert read(select(whole, device=device)).error < 0.02
