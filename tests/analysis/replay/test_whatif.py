"""Predicted gains beside played ones: the simulator plays programs again with a change, and knows nothing of traces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from synthetic import simulated_programs
from synthetic.planted import Export
from synthetic.simulator import play

import nsightkit
from nsightkit.analysis.replay import whatif
from nsightkit.analysis.replay.whatif import CHANGES, WhatIf
from nsightkit.analysis.timeline import steps
from nsightkit.analysis.timeline.selection import select
from nsightkit.errors import UsageError
from nsightkit.trace.model import Trace

US = 1_000
THREAD, PROCESS = Export.thread(1, 1), Export.process(1)
#: Changes whose truth a program is (`no-cpu-work` removes in the simulator what hides behind the GPU as well).
PLAYED = [change for change in CHANGES if change not in ("no-cpu-work", "no-recompilation")]
PROGRAMS = simulated_programs.PROGRAMS


def _trace(tmp_path: Path, run: Any) -> Trace:
    return nsightkit.load(run.write(tmp_path / "played.sqlite"), cache=False)


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_a_named_program_gains_what_is_predicted(tmp_path: Path, name: str):
    run = play(PROGRAMS[name], seed=1)
    replay = WhatIf(_trace(tmp_path, run))
    assert replay.refused is None
    assert replay.wall_ns == run.wall_ns
    for change in PLAYED:
        gain = run.wall_ns / play(PROGRAMS[name], 1, change).wall_ns
        assert replay.row(change)["speedup"] == pytest.approx(gain, rel=0.05), change


@pytest.mark.parametrize(
    ("program", "asked", "change"),
    [
        ("starved-loader", (["no-input-wait", "free-launches"],), ["no-input-wait", "free-launches"]),
        ("busy", ([], None, "gemm=0.5"), "scale:gemm=0.5"),
        ("busy", ([], "gemm"), "without:gemm"),
        # What is waited for gets longer, and so does the whole.
        ("unseen-waits", ([], None, "gemm=2"), "scale:gemm=2"),
        ("sleep-each-layer", (["no-cpu-work"],), "no-cpu-work"),
        # Names that differ in a number are one.
        ("sleep-each-layer", (["no-cpu-work:ensure_layer_*_weights"],), "no-cpu-work"),
        ("sleep-each-layer", (["no-cpu-work:something else"],), []),
    ],
)
def test_several_changes_and_names(tmp_path: Path, program: str, asked: Any, change: Any):
    run = play(PROGRAMS[program], seed=1)
    row = whatif.rows(WhatIf(_trace(tmp_path, run)), whatif.checked_changes(*asked))[-1]
    assert row["speedup"] == pytest.approx(run.wall_ns / play(PROGRAMS[program], 1, change).wall_ns, rel=0.03)
    assert row["predicted_ns"] == pytest.approx(row["wall_ns"] / row["speedup"], abs=1)


def test_without_arguments_the_changes_that_gain(tmp_path: Path):
    rows = whatif.rows(WhatIf(_trace(tmp_path, play(PROGRAMS["starved-loader"], seed=1))))
    gains = [row["speedup"] for row in rows]
    assert {row["change"] for row in rows} <= set(CHANGES)
    assert gains == sorted(gains, reverse=True)
    assert min(gains) > 1


def _loop(path: Path, events: list[tuple[Any, ...]], round_us: int) -> Trace:
    """Ten rounds of events, with times in µs since the round's begin: of the call, and of what it launched."""
    out = Export()
    for number in range(10):
        now = (1_000 + number * round_us) * US
        for kind, name, *times in events:
            begun, *rest = (now + time * US for time in times)
            if kind == "kernel":
                out.kernel(name, *rest[1:], out.call("cudaLaunchKernel", THREAD, begun, rest[0]), PROCESS)
            elif kind == "copy":
                out.copy(name, *rest[1:], out.call("cudaMemcpy", THREAD, begun, rest[0]), PROCESS, 1 << 24)
            elif kind == "sample":
                out.sample(THREAD, begun, (name, "a.out"))
            else:
                getattr(out, kind)(name, THREAD, begun, *rest)
    return nsightkit.load(out.write(path), cache=False)


#: The events of a round, how long it takes, and what changes save in ten of them; all in µs.
BY_HAND = {
    "compiled again, and messages": (
        [
            *(("kernel", "k", 10 + 8 * n, 15 + 8 * n, 18 + 16 * n, 34 + 16 * n) for n in range(6)),
            ("range", "triton.compile", 200, 1_200),
            ("os_call", "MPI_Allreduce", 1_300, 3_300),
            ("range", "train_step", 0, 3_400),
        ],
        3_400,
        {"no-start-up": 2 * 1_000, "no-recompilation": 8 * 1_000, "overlap-communication": 10 * 2_000},
    ),
    # As Nsight Systems records calls with a backtrace, or a runtime's call with the driver's in it.
    "a call recorded twice waits once": (
        [
            ("kernel", "k", 0, 5, 8, 1_008),
            ("synchronize", "cudaStreamSynchronize", 6, 1_012),
            ("call", "cuStreamSynchronize", 7, 1_011),
            ("range", "host", 1_020, 2_000),
        ],
        2_000,
        {"no-sync": 9 * 1_006},
    ),
    # Without the call that frees memory there is no wait either: kernel follows kernel.
    "memory that is freed": (
        [("kernel", "k", 0, 5, 8, 1_008), ("call", "cudaFree", 6, 1_308)],
        1_310,
        {"no-sync": 0, "no-cpu-work:cudaFree": 9 * 310},
    ),
    # Each launch is followed by a wait, and by dispatch that is the cause of the gap.
    "dispatch behind a wait": (
        [("kernel", "k", 0, 3, 4, 12), ("synchronize", "cudaDeviceSynchronize", 4, 15)],
        51,
        {"free-launches": 9 * 36},
    ),
    "copies do not run beside each other": (
        [
            ("copy", "HtoD", 0, 4_015, 11, 4_011),
            ("copy", "DtoH", 4_020, 8_035, 4_031, 8_031),
            ("kernel", "k", 8_040, 8_045, 8_048, 8_548),
        ],
        8_550,
        {"overlap-copies": 10 * 500 + 10 * 50},
    ),
    # A gap is named after most of its samples, three quarters; all of them are the work.
    "work that only samples name": (
        [
            *(("kernel", "a", n, n + 1, 10 + 100 * n, 110 + 100 * n) for n in range(6)),
            ("synchronize", "cudaDeviceSynchronize", 7, 612),
            *(("sample", "draw" if n % 4 else "sin_1", 612 + 100 * n) for n in range(40)),
        ],
        4_612,
        {"no-cpu-work": 9 * 4_000, "no-cpu-work:draw": 9 * 3_000},
    ),
}


@pytest.mark.parametrize(("events", "round_us", "saved_us"), BY_HAND.values(), ids=BY_HAND)
def test_gains_by_hand(tmp_path: Path, events: Any, round_us: int, saved_us: dict[str, int]):
    replay = WhatIf(_loop(tmp_path / "t.sqlite", events, round_us))
    assert replay.wall_ns is not None
    for change, saved in saved_us.items():
        assert replay.row(change)["predicted_ns"] == pytest.approx(replay.wall_ns - saved * US, rel=0.02), change


def test_pages_that_move_stand_in_no_stream(tmp_path: Path):
    """Those of managed memory: nobody launched them, and no kernel waits for the one before."""
    events = [("kernel", "k", 0, 5, 8, 108), ("copy", "HtoD", 6, 7, 20, 30), ("call", "cudaDeviceSynchronize", 8, 110)]
    frames = _frames(_loop(tmp_path / "t.sqlite", events, 3_000))
    frames["memops"]["kind"] = frames["memops"]["kind"].cat.rename_categories({"HtoD": "unified HtoD"})
    replay = WhatIf(Trace.from_frames(frames))
    assert not replay.playable.streams.held_ns.any()
    assert len(replay.playable.program.duration_ns) == 10


def test_many_streams_and_syncs_cost_what_they_hold(tmp_path: Path):
    """A wait for the device holds for streams that have had no work since the last one: pairs are not listed again."""
    out = Export()
    now = 1_000 * US
    for number in range(300):
        launch = out.call("cudaLaunchKernel", THREAD, now, now + 5 * US)
        out.kernel("k", now + 8 * US, now + 18 * US, launch, PROCESS, stream=number % 100)
        out.synchronize("cudaDeviceSynchronize", THREAD, now + 6 * US, now + 20 * US)
        now += 30 * US
    schedule = WhatIf(nsightkit.load(out.write(tmp_path / "t.sqlite"), cache=False)).playable
    assert len(schedule.cuts.target) < 2 * 300
    assert schedule.error < 0.001


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"changes": ["no-such-thing"]}, "unknown change"),
        ({"changes": ["no-sync:x"]}, "unknown change"),
        ({"without": "("}, "not a regular expression"),
        ({"scale": "gemm"}, "not of the form"),
        ({"scale": "gemm=fast"}, "not of the form"),
        ({"scale": "gemm=" + "9" * 400}, "not of the form"),
    ],
)
def test_what_cannot_be_asked(arguments: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        whatif.checked_changes(**arguments)


def _frames(trace: Trace) -> dict[str, pd.DataFrame]:
    tables = ("kernels", "memops", "graphs", "calls", "ranges", "os_calls")
    return {name: trace.table(name).copy() for name in tables if trace.size(name)}


def _in_microseconds(frame: pd.DataFrame) -> pd.DataFrame:
    """As PyTorch wrote times before 2.3: begin and length, each cut off."""
    start_ns = frame["start_ns"] // 1_000 * 1_000
    return frame.assign(start_ns=start_ns, end_ns=start_ns + (frame["end_ns"] - frame["start_ns"]) // 1_000 * 1_000)


def _beside_another(frame: pd.DataFrame) -> pd.DataFrame:
    """A second process with the same correlation ids."""
    other = frame.copy()
    for column, by in (("thread", 1 << 24), ("process", 1), ("device", 1)):
        if column in other:
            other[column] += by
    return pd.concat([frame, other], ignore_index=True)


def _with_a_clock_ahead(frame: pd.DataFrame) -> pd.DataFrame:
    """The devices' clock runs ahead of the CPU's."""
    ahead_ns = 20 * US if "device" in frame else 0
    return frame.assign(start_ns=frame["start_ns"] - ahead_ns, end_ns=frame["end_ns"] - ahead_ns)


@pytest.mark.parametrize("name", ["starved-loader", "item-each-layer", "hand-over"])
@pytest.mark.parametrize("distort", [_in_microseconds, _beside_another, _with_a_clock_ahead])
def test_what_should_not_matter(tmp_path: Path, name: str, distort: Callable[[pd.DataFrame], pd.DataFrame]):
    frames = _frames(_trace(tmp_path, play(PROGRAMS[name], seed=1)))
    exact = WhatIf(Trace.from_frames(frames))
    distorted = WhatIf(Trace.from_frames({table: distort(frame) for table, frame in frames.items()}))
    for change in CHANGES:
        assert distorted.row(change)["speedup"] == pytest.approx(exact.row(change)["speedup"], rel=0.03), change


def test_where_nothing_can_be_played_nothing_is_predicted(tmp_path: Path):
    trace = _trace(tmp_path, play(PROGRAMS["busy"], seed=1))
    bare = WhatIf(Trace.from_frames({"kernels": trace.table("kernels")}))
    assert whatif.rows(bare) == []
    (row,) = whatif.rows(bare, ["no-sync"])
    assert (row["predicted_ns"], row["speedup"]) == (None, None)


@pytest.mark.parametrize(
    ("case", "gain"),
    [
        ("v100-eight-ranks/worker0", 1.55),  # one step: a single hand-over counts
        ("v100-no-buckets/rank", 1.67),  # autograd's thread launches more slowly than the optimizer's
    ],
)
def test_autograd_s_thread_is_handed_the_backward_pass(case: str, gain: float):
    """Without the hand-over, backward would stay where it was recorded and free launches would gain 1.24x and 1.27x."""
    rank = nsightkit.load(Path(__file__).parents[3] / f"docs/cases/{case}.parquet")
    assert rank.whatif("free-launches")["speedup"].iloc[0] == pytest.approx(gain, abs=0.02)
    assert rank.whatif("no-cpu-work")["speedup"].iloc[0] < 1.05


def test_the_starved_resnet_beside_what_four_loader_workers_gave(shared_traces: Path):
    folder = shared_traces / "kineto"
    before, after = (nsightkit.load(next(folder.glob(f"*workers_{n}__*")), cache=False) for n in (0, 4))
    row = WhatIf(before).row("no-input-wait")
    assert row["replay_error"] < 0.01
    walls = [steps.summary(trace)["wall_ns"] for trace in (before, after)]
    # Workers are not loading that takes no time: the first step waits for them to start, and each batch is still handed
    # over by the main thread. The replay gives the bound that the whole and the median step stay below.
    whole = walls[0].sum() / walls[1].sum()
    median = walls[0].median() / walls[1].median()
    assert whole < median < row["speedup"] < 1.2 * median
    # What is left in the second capture is not loading.
    assert WhatIf(after).row("no-input-wait")["speedup"] < 1.05
    part = WhatIf(select(before, last_steps=3)).row("no-input-wait")
    assert part["speedup"] == pytest.approx(row["speedup"], rel=0.1)


def test_the_profilers_time_is_not_dispatch(tmp_path):
    """Launches are 200 µs apart, and the profiler works for 140 µs of each interval."""
    out = Export()
    for start in range(0, 4_000, 200):
        launch = out.call("cudaLaunchKernel_v7000", THREAD, start * US, (start + 3) * US)
        out.kernel("k", (start + 6) * US, (start + 16) * US, launch, PROCESS)
        out.overhead("CUPTI Buffer flush", THREAD, (start + 10) * US, (start + 150) * US)
    replay = WhatIf(_trace(tmp_path, out))
    changes = (["no-profiler"], ["free-launches"], ["no-profiler", "free-launches"])
    # Of 200 µs, 60 are dispatch, of which 3 stay. With neither, a kernel starts 1 µs after the one before it.
    truth = [19 * 60 + 10, 19 * 143 + 10, 19 * 11 + 10]
    assert [replay.row(*change)["predicted_ns"] for change in changes] == [us * US for us in truth]
