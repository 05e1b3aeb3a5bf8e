"""The schedule and its replay: closed formulas, a self-check that fails where it must, traces that cannot be played."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import simulated_programs
from synthetic.planted import Export
from synthetic.simulator import play

import nsightkit
from nsightkit.analysis.replay import Change, Schedule, Unplayable, read
from nsightkit.analysis.replay.whatif import MOST_ERROR
from nsightkit.analysis.timeline.selection import select
from nsightkit.trace.model import Trace

US, PID = 1_000, 91
PROCESS, MAIN = Export.process(PID), Export.thread(PID, PID)


class Laid:
    """A program laid out event by event; times in µs. A launch takes 2, and reaches an idle device 3 after that."""

    def __init__(self) -> None:
        self.out, self.now = Export(), 10.0
        self.free: dict[int, float] = {}

    def kernel(self, us: float, *, every: float = 5, stream: int = 7, after: float = 0, name: str = "k") -> float:
        """Launch; gives when the kernel ends. It starts 1 after the one before it in its stream."""
        begun = self.now + every - 2
        self.now = begun + 2
        start = max(self.now + 3, self.free.get(stream, -1e9) + 1, after)
        correlation = self.out.call("cudaLaunchKernel_v7000", MAIN, round(begun * US), round(self.now * US))
        self.free[stream] = start + us
        self.out.kernel(name, round(start * US), round((start + us) * US), correlation, PROCESS, stream=stream)
        return start + us

    def sync(self, stream: int = 7) -> None:
        begun = self.now
        self.now = max(begun, self.free[stream]) + 6
        self.out.synchronize("cudaStreamSynchronize", MAIN, round(begun * US), round(self.now * US), stream=stream)

    def trace(self, tmp_path: Path) -> Trace:
        return nsightkit.load(self.out.write(tmp_path / "laid.sqlite", shuffle=2), cache=False)


def _busy(count: int = 60) -> Laid:
    laid = Laid()
    for _ in range(count):
        laid.kernel(30)
    return laid


def _frames(trace: Trace, **tables: Any) -> Trace:
    """The trace with some tables changed; None leaves one out."""
    frames = {name: trace.table(name) for name in ("kernels", "memops", "calls", "ranges")}
    return Trace.from_frames({name: frame for name, frame in {**frames, **tables}.items() if frame is not None})


def test_a_busy_stream_is_its_kernels_and_what_lies_between_them(tmp_path: Path) -> None:
    schedule = read(_busy(100).trace(tmp_path))
    assert schedule.unchanged.wall_ns == schedule.recorded.wall_ns == (100 * 30 + 99) * US
    assert schedule.error == 0
    assert schedule.play(Change(less_ns=schedule.program.lasting // 2)).wall_ns == (100 * 15 + 99) * US


def test_a_slow_launcher_sets_the_pace(tmp_path: Path) -> None:
    laid = Laid()
    for _ in range(100):
        laid.kernel(3, every=20)
    schedule = read(laid.trace(tmp_path))
    assert schedule.unchanged.wall_ns == (99 * 20 + 3) * US
    # Kernels twice as long hide behind the launches; launches every 3 µs leave the kernels, and 1 µs between them.
    assert schedule.play(Change(less_ns=-schedule.program.lasting)).wall_ns == (99 * 20 + 6) * US
    quick, (thread,) = Change(), schedule.program.threads.tolist()
    quick.take(thread, *schedule.dispatch(thread, 3 * US, np.empty(0, np.int64)))
    assert schedule.play(quick).wall_ns == (99 * 4 + 3) * US


def test_a_wait_costs_the_launches_behind_it(tmp_path: Path) -> None:
    laid = Laid()
    for _ in range(40):
        laid.kernel(30)
        laid.sync()
    schedule = read(laid.trace(tmp_path))
    # Launch to start is 5, the kernel, the return of the wait, and 3 until the next launch.
    assert schedule.unchanged.wall_ns == schedule.recorded.wall_ns == (39 * (30 + 6 + 3 + 5) + 30) * US
    assert schedule.play(Change(waits=False)).wall_ns == pytest.approx((40 * 30 + 39) * US, rel=0.01)


def test_a_stream_that_waits_for_another_goes_on_waiting(tmp_path: Path) -> None:
    laid = Laid()
    for _ in range(30):
        done = laid.kernel(40, stream=13, name="other")
        laid.kernel(10, after=done + 1.5)
        laid.kernel(5)
        laid.kernel(5)
    schedule = read(laid.trace(tmp_path))
    assert schedule.inferred >= 29
    assert schedule.error < 0.001
    # What is waited for gets longer, and so does the whole.
    lasting = schedule.program.lasting
    longer = schedule.play(Change(less_ns=np.where(lasting == 40 * US, -lasting, 0)))
    assert longer.wall_ns == pytest.approx(schedule.recorded.wall_ns + 30 * 40 * US, rel=0.01)


def test_latencies_are_constants_so_that_an_unchanged_replay_is_no_identity(tmp_path: Path) -> None:
    laid = Laid()
    for _ in range(60):
        laid.kernel(30)
        laid.sync()
    trace = laid.trace(tmp_path)
    calls = trace.table("calls")
    # Every third wait returns late, for nothing that was recorded.
    late = calls["name"].astype(str).str.contains("Synchronize") & (np.arange(len(calls)) % 6 == 1)
    shifted = calls.assign(end_ns=calls["end_ns"] + np.where(late, 2 * US, 0))
    assert read(_frames(trace, calls=shifted)).error > 0


@pytest.mark.parametrize("name", ["item-each-layer", "launch-blocking"])
def test_a_model_without_waits_is_found_out(tmp_path: Path, name: str) -> None:
    path = play(simulated_programs.PROGRAMS[name], seed=3).write(tmp_path / "t.sqlite")
    schedule = read(nsightkit.load(path, cache=False))
    assert schedule.error < 0.02
    assert abs(schedule.play(Change(waits=False)).wall_ns / schedule.recorded.wall_ns - 1) > MOST_ERROR


@pytest.mark.parametrize("name", ["item-each-layer", "hand-over"])
def test_streams_that_are_not_what_they_seem_cannot_be_played(tmp_path: Path, name: str) -> None:
    """Kernels and copies dealt out to streams at random: each seems to wait for the one before it."""
    path = play(simulated_programs.PROGRAMS[name], seed=3).write(tmp_path / "t.sqlite")
    trace, draw = nsightkit.load(path, cache=False), np.random.default_rng(3)
    dealt = {table: trace.table(table) for table in ("kernels", "memops")}
    dealt = {table: frame.assign(stream=draw.choice([7, 9, 13], len(frame))) for table, frame in dealt.items()}
    assert _reason(_frames(trace, **dealt)) is not None


def _reason(trace: Trace) -> str | None:
    """Why a trace cannot be played, None where it can."""
    try:
        schedule = read(trace)
    except Unplayable as reason:
        return str(reason)
    return "error" if schedule.error > MOST_ERROR else None


def test_without_launches_there_is_no_schedule(tmp_path: Path) -> None:
    trace = _busy().trace(tmp_path)
    calls = trace.table("calls")
    number = np.arange(len(calls))
    assert _reason(_frames(trace, calls=None)) == "the calls that launched the GPU's work were not recorded"
    assert _reason(_frames(trace, kernels=None, calls=None)) == "there is no GPU work"
    # A few lost launches are no obstacle, a third of them is.
    assert _reason(_frames(trace, calls=calls[number != 40].reset_index(drop=True))) is None
    assert _reason(_frames(trace, calls=calls[number % 3 != 1].reset_index(drop=True))) is not None


def test_operations_launched_before_the_recording_come_first(tmp_path: Path) -> None:
    trace = _busy().trace(tmp_path)
    calls = trace.table("calls").sort_values("start_ns").iloc[30:].reset_index(drop=True)
    schedule = read(_frames(trace, calls=calls))
    assert schedule.unchanged.wall_ns == schedule.recorded.wall_ns


def test_one_operation_and_a_selection(tmp_path: Path) -> None:
    assert read(_busy(1).trace(tmp_path)).unchanged.wall_ns == 30 * US
    run = play(simulated_programs.PROGRAMS["starved-loader"], seed=2)
    part: Schedule = read(select(nsightkit.load(run.write(tmp_path / "t.sqlite")), last_steps=4))
    assert len(part.recorded.steps_ns) == 4
    assert part.recorded.wall_ns == run.steps[-1][1] - run.steps[-5][1]
    assert part.error < 0.02


def test_a_selection_with_fewer_streams_than_its_trace() -> None:
    whole = nsightkit.load(Path(__file__).parents[3] / "docs" / "cases" / "h100-all-copies" / "two-gpus-1s.parquet")
    for device in (0, 1):
        assert read(select(whole, device=device)).error < 0.02
