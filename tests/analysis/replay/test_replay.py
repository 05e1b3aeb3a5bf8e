"""The schedule and its replay: closed formulas, a self-check that fails where it must, traces that cannot be played."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import simulated_programs
from synthetic.planted import Export
from synthetic.simulator import play

import nsightkit
from nsightkit.analysis.replay import Change, Schedule
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

    def work(self, us: float, name: str) -> None:
        self.out.range(name, MAIN, round(self.now * US), round((self.now + us) * US))
        self.now += us

    def schedule(self, tmp_path: Path) -> Schedule:
        return Schedule(nsightkit.load(self.out.write(tmp_path / "laid.sqlite", shuffle=2)))


def test_a_busy_stream_is_its_kernels_and_what_lies_between_them(tmp_path: Path) -> None:
    laid = Laid()
    for _ in range(100):
        laid.kernel(50)
    schedule = laid.schedule(tmp_path)
    assert schedule.unchanged.wall_ns == schedule.recorded.wall_ns == (100 * 50 + 99) * US
    assert schedule.error == 0
    half = schedule.play(Change(durations_ns=(schedule.end - schedule.start) // 2))
    assert half.wall_ns == (100 * 25 + 99) * US


def test_a_slow_launcher_sets_the_pace(tmp_path: Path) -> None:
    laid = Laid()
    for _ in range(100):
        laid.kernel(3, every=20)
    schedule = laid.schedule(tmp_path)
    assert schedule.unchanged.wall_ns == (99 * 20 + 3) * US
    # Kernels twice as long hide behind the launches; launches every 3 µs leave the kernels, and 1 µs between them.
    twice = schedule.play(Change(durations_ns=2 * (schedule.end - schedule.start)))
    assert twice.wall_ns == (99 * 20 + 6) * US
    none = np.empty(0, np.int64)
    quick = schedule.play(Change(away=schedule.dispatch(lambda _: (none, none), 3 * US)))
    assert quick.wall_ns == (99 * 4 + 3) * US


def test_a_wait_costs_the_launches_behind_it(tmp_path: Path) -> None:
    laid = Laid()
    for _ in range(40):
        laid.kernel(30)
        laid.sync()
    schedule = laid.schedule(tmp_path)
    # Launch to start is 5, the kernel, the return of the wait, and 3 until the next launch.
    assert schedule.unchanged.wall_ns == schedule.recorded.wall_ns == (39 * (30 + 6 + 3 + 5) + 30) * US
    assert schedule.play(Change(waits=False)).wall_ns == pytest.approx((40 * 30 + 39) * US, rel=0.01)


def test_a_stream_that_waits_for_another_goes_on_waiting(tmp_path: Path) -> None:
    laid = Laid()
    for _ in range(30):
        done = laid.kernel(40, stream=13, name="other")
        laid.kernel(10, after=done + 1.5)
    schedule = laid.schedule(tmp_path)
    assert len(schedule.waiting) >= 29
    assert schedule.inferred >= 29
    assert schedule.error < 0.001
    # What is waited for gets longer, and so does the whole.
    lasting = schedule.end - schedule.start
    longer = schedule.play(Change(durations_ns=np.where(lasting == 40 * US, 2 * lasting, lasting)))
    assert longer.wall_ns == pytest.approx(schedule.recorded.wall_ns + 30 * 40 * US, rel=0.01)


def test_latencies_are_constants_so_that_an_unchanged_replay_is_no_identity(tmp_path: Path) -> None:
    laid = Laid()
    for number in range(60):
        laid.kernel(30)
        laid.sync()
        # Every third wait returns late, for nothing that was recorded.
        laid.now += 0 if number % 3 else 0.001
    trace = nsightkit.load(laid.out.write(tmp_path / "a.sqlite"))
    calls = trace.table("calls")
    late = calls["name"].astype(str).str.contains("Synchronize") & (np.arange(len(calls)) % 6 == 1)
    shifted = calls.assign(end_ns=calls["end_ns"] + np.where(late, 2 * US, 0))
    frames = {name: trace.table(name) for name in ("kernels", "syncs", "ranges")}
    schedule = Schedule(Trace.from_frames({**frames, "calls": shifted}))
    assert schedule.error > 0


# ---------------------------------------------------------------- the self-check


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("item-each-layer", Change(waits=False)),
        ("launch-blocking", Change(waits=False)),
        ("tiny-autograd", Change(hand_overs=False)),
    ],
)
def test_a_model_without_one_of_its_parts_is_found_out(tmp_path: Path, name: str, without: Change) -> None:
    schedule = Schedule(nsightkit.load(play(simulated_programs.PROGRAMS[name], seed=3).write(tmp_path / "t.sqlite")))
    assert schedule.error < 0.02
    assert abs(schedule.play(without).wall_ns / schedule.recorded.wall_ns - 1) > MOST_ERROR


def test_streams_that_are_not_what_they_seem_cannot_be_played(tmp_path: Path) -> None:
    """Two streams that worked side by side, their kernels dealt out at random."""
    laid = Laid()
    for _ in range(200):
        laid.kernel(30, every=15, stream=7)
        laid.kernel(30, every=15, stream=9)
    assert laid.schedule(tmp_path).unplayable is None
    trace = nsightkit.load(tmp_path / "laid.sqlite")
    kernels = trace.table("kernels")
    dealt = kernels.assign(stream=np.random.default_rng(1).permutation(kernels["stream"].to_numpy()))
    shuffled = Schedule(Trace.from_frames({"kernels": dealt, "calls": trace.table("calls")}))
    assert shuffled.unplayable is not None or shuffled.error > MOST_ERROR


@pytest.mark.parametrize("name", ["busy", "item-each-layer", "hand-over", "starved-loader", "reduce-exposed"])
def test_shuffled_streams_cannot_be_played(tmp_path: Path, name: str) -> None:
    """Each operation seems to wait for the one before it, on another stream: no more than a guess."""
    path = play(simulated_programs.PROGRAMS[name], seed=3).write(tmp_path / "t.sqlite")
    assert Schedule(nsightkit.load(path, cache=False)).unplayable is None
    with contextlib.closing(sqlite3.connect(path)) as export, export:
        draw = np.random.default_rng(3)
        for table in ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY"):
            if export.execute("select 1 from sqlite_master where name = ?", (table,)).fetchone():
                rows = export.execute(f"select rowid from {table}").fetchall()  # a name of ours
                streams = draw.choice([7, 9, 13], len(rows)).tolist()
                update = f"update {table} set streamId = ? where rowid = ?"
                export.executemany(update, [(stream, row) for stream, (row,) in zip(streams, rows, strict=True)])
    shuffled = Schedule(nsightkit.load(path, cache=False))
    assert shuffled.unplayable is not None or shuffled.error > MOST_ERROR


# ---------------------------------------------------------------- what cannot be played


def _without(trace: Trace, **tables: Any) -> Trace:
    frames = {name: trace.table(name) for name in ("kernels", "memops", "calls", "ranges") if name not in tables}
    return Trace.from_frames({**frames, **{k: v for k, v in tables.items() if v is not None}})


def test_without_launches_there_is_no_schedule(tmp_path: Path) -> None:
    laid = Laid()
    for _ in range(60):
        laid.kernel(30)
    trace = nsightkit.load(laid.out.write(tmp_path / "laid.sqlite"))
    bare = Schedule(_without(trace, calls=None))
    assert bare.unplayable == "the calls that launched the GPU's work were not recorded"
    assert Schedule(_without(trace, kernels=None, calls=None)).unplayable == "there is no GPU work"
    # A few lost launches are no obstacle, a third of them is.
    calls = trace.table("calls")
    assert Schedule(_without(trace, calls=calls[np.arange(len(calls)) != 40].reset_index(drop=True))).unplayable is None
    assert Schedule(_without(trace, calls=calls[np.arange(len(calls)) % 3 != 1].reset_index(drop=True))).unplayable


def test_what_was_launched_before_the_recording_comes_first(tmp_path: Path) -> None:
    laid = Laid()
    for _ in range(60):
        laid.kernel(30)
    trace = nsightkit.load(laid.out.write(tmp_path / "laid.sqlite"))
    calls = trace.table("calls").sort_values("start_ns").iloc[30:].reset_index(drop=True)
    schedule = Schedule(_without(trace, calls=calls))
    assert schedule.unplayable is None
    assert schedule.unchanged.wall_ns == schedule.recorded.wall_ns


def test_one_operation_and_a_selection(tmp_path: Path) -> None:
    laid = Laid()
    laid.kernel(30)
    assert laid.schedule(tmp_path).unchanged.wall_ns == 30 * US
    run = play(simulated_programs.PROGRAMS["starved-loader"], seed=2)
    trace = nsightkit.load(run.write(tmp_path / "t.sqlite"))
    part = Schedule(select(trace, last_steps=4))
    assert len(part.recorded.steps_ns) == 4
    assert part.recorded.wall_ns == run.steps[-1][1] - run.steps[-5][1]
    assert part.error < 0.02
