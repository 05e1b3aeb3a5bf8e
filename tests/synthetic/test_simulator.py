"""The simulator: what it plays obeys the device's rules, and what its programs declare is what their plays say."""

from __future__ import annotations

import itertools
import sqlite3
from collections import defaultdict
from pathlib import Path

import pytest
from random_programs import random_program
from synthetic import simulated_programs
from synthetic.simulator import (
    QUEUE,
    Await,
    Capture,
    Copy,
    Cpu,
    Foreign,
    Graph,
    Launch,
    Load,
    Op,
    Played,
    Pop,
    Profiler,
    Program,
    Push,
    Record,
    Sleep,
    Stall,
    Sync,
    WaitEvent,
    play,
)

import nsightkit

NAMED = list(simulated_programs.PROGRAMS.values())
US = 1_000


def _exact(*actions: object, **more: object) -> Program:
    """One thread without jitter."""
    return Program("exact", [actions], jitter=0.0, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("program", NAMED, ids=lambda p: p.name)
def test_a_program_is_limited_by_what_it_declares(program: Program) -> None:
    gains = simulated_programs.true_gains(program, seed=1)
    (best, gain), (_, second) = list(gains.items())[:2]
    if program.bottleneck in simulated_programs.FILLS and gain < 1.05:
        pass  # nothing cheap is left
    else:
        assert best == simulated_programs.CHANGE_OF[program.bottleneck]
        assert gain > 1.05
        assert gain > 1.05 * second, "a truth that ties is not one"
    if program.decoy_for:
        assert gains[program.decoy_for] < 1.05


def test_every_cause_is_planted_and_decoys_stand_beside() -> None:
    assert {p.bottleneck for p in NAMED} >= {*simulated_programs.CHANGE_OF, *simulated_programs.FILLS}
    assert {p.decoy_for for p in NAMED} >= {
        c for c in simulated_programs.CHANGE_OF.values() if c not in ("no-foreign", "no-unnamed")
    }
    assert len(NAMED) >= 30


RANDOM = list(map(random_program, range(40)))
PLAYS = [*NAMED, *RANDOM[:30]]
CHANGED = itertools.cycle(["no-sync", "overlap-copies", "equal-ranks", "overlap-communication"])


@pytest.mark.parametrize(
    ("program", "change"),
    [(p, change) for p, changed in zip(PLAYS, CHANGED, strict=False) for change in (None, changed)],
    ids=lambda value: getattr(value, "name", value),
)
def test_plays_obey_the_rules_of_the_device(program: Program, change: str | None) -> None:
    run = play(program, 3, change)
    streams: dict[tuple[int, int], list[Op]] = defaultdict(list)
    for op in run.ops:
        streams[op.device, op.stream].append(op)
        assert op.called <= op.queued <= op.start <= op.end
        assert all(op.start >= other.end for other in op.waits)
    for ops in streams.values():
        for before, op in itertools.pairwise(ops):
            assert op.start >= before.end, "operations of one stream run one after the other, as launched"
        for place in range(len(ops) - QUEUE):
            assert ops[place + QUEUE].queued >= ops[place].end, "the queue was full"
    _calls_return_after_what_they_wait_for(run, change)
    for collective in _collectives(run).values():
        if change != "equal-ranks":
            assert len({op.end for op in collective}) == 1
    walls = run.steps
    assert all(a[1] <= b[1] and a[0] <= b[0] for a, b in itertools.pairwise(walls))


def _calls_return_after_what_they_wait_for(run: Played, change: str | None) -> None:
    for call in run.calls:
        if call.name in ("cudaStreamSynchronize", "cudaDeviceSynchronize"):
            device, stream = call.waits_on or (0, 0)
            everything = call.name == "cudaDeviceSynchronize"
            for op in run.ops:
                # What a change moved aside is not waited for.
                if op.device == device and (op.stream == stream or (everything and op.stream < 1000)):
                    assert op.queued >= call.start or op.end < call.end
        elif call.op and call.name == "cudaMemcpy_v3020" and change not in ("no-sync", "overlap-copies"):
            assert call.end > call.op.end


def _collectives(run: Played) -> dict[int, list[Op]]:
    found: dict[int, list[Op]] = defaultdict(list)
    for op in run.ops:
        if op.kind == "collective" and isinstance(op.action, Launch) and op.action.key is not None:
            found[op.action.key].append(op)
    return found


def test_the_queue_fills() -> None:
    run = play(simulated_programs.PROGRAMS["queue-full"], 1)
    blocked = [c for c in run.calls if c.op and c.op.queued - c.start > 5 * US]
    assert len(blocked) > 200
    depth = max(sum(op.queued <= c.op.queued < op.end for op in run.ops) for c in blocked[::40] if c.op)
    assert depth == QUEUE


def test_a_seed_decides_the_jitter() -> None:
    program = simulated_programs.PROGRAMS["item-each-layer"]
    runs = [[(op.start, op.end) for op in play(program, seed).ops] for seed in (5, 5, 6)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("change", ["no-sync", "free-launches", "no-cpu-work"])
def test_a_change_draws_no_jitter_anew(change: str) -> None:
    before, after = (play(simulated_programs.PROGRAMS["sleep-each-layer"], 2, c) for c in (None, change))
    assert [op.end - op.start for op in before.ops] == [op.end - op.start for op in after.ops]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("busy", [c for c in simulated_programs.CHANGE_OF.values() if c != "free-launches"]),
        ("sleep-each-layer", ["no-cpu-work:absent", "no-input-wait", "without:absent", "scale:absent=3", "scale:.=1"]),
        ("starved-loader", ["no-cpu-work", "no-start-up", "no-sync"]),
        ("reduce-exposed", ["overlap-copies", "no-sync", "no-profiler"]),
    ],
)
def test_a_change_without_an_object_changes_nothing(name: str, changes: list[str]) -> None:
    program = simulated_programs.PROGRAMS[name]
    unchanged = [(op.start, op.end) for op in play(program, 4).ops]
    for change in changes:
        assert [(op.start, op.end) for op in play(program, 4, change).ops] == unchanged, change


# By hand, without jitter: 4 us of dispatch, a start 4 us after the call began, 1 us between operations of a stream.


def test_operations_start_after_their_call_and_behind_each_other() -> None:
    run = play(_exact(Launch("a", 100 * US), Launch("b", 10 * US)))
    zero = 1_000_000_000
    assert [(op.start - zero, op.end - zero) for op in run.ops] == [(8_000, 108_000), (109_000, 119_000)]
    assert run.wall_ns == 111_000


def test_a_sync_returns_a_latency_after_its_stream() -> None:
    program = _exact(Push("step 0"), Launch("a", 100 * US), Sync(), Launch("b", 10 * US), Pop())
    # 108 us to the end of a, 6.5 until the call returns, 8 to the start of b, 10 to its end.
    run = play(program)
    sync = next(c for c in run.calls if c.name == "cudaStreamSynchronize")
    assert run.wall_ns == 132_500
    assert sync.end - sync.start == 106_500
    assert play(program, change="no-sync").wall_ns == 119_000
    assert play(program, change="without:^a$").wall_ns == 32_500


def test_free_launches_follow_each_other_by_three_microseconds() -> None:
    run = play(_exact(*[Launch("a", US, dispatch=10 * US)] * 20, Cpu(50 * US), Launch("a", US)), change="free-launches")
    calls = [c.start for c in run.calls]
    assert [b - a for a, b in itertools.pairwise(calls[:20])] == [3_000] * 19
    assert calls[20] - calls[19] == 3_000 + 50_000 + 4_000  # what follows other work is dispatched as before


def test_a_stream_waits_for_an_event() -> None:
    for shown in (True, False):
        program = _exact(Launch("a", 100 * US), Record("a"), WaitEvent("a", shown, stream=9), Launch("b", US, stream=9))
        run = play(program)
        assert run.ops[1].start - run.ops[0].end == 1_500
        assert ("cudaStreamWaitEvent" in {c.name for c in run.calls}) is shown


def test_kernels_that_run_at_once_slow_each_other_down() -> None:
    one, two = play(_exact(Launch("a", 100 * US), Launch("b", 100 * US, stream=9), contention=0.5)).ops
    # Alone for the 8 us until the other one starts; both end 1.5 times as late for what they share.
    assert (one.end - one.start, two.end - two.start) == (8_000 + 92_000 * 1.5, 92_000 * 1.5 + 8_000)
    alone, _ = play(_exact(Launch("a", 100 * US), Copy("HtoD", 1, 50 * US, stream=9), copy_contention=0.25)).ops
    assert alone.end - alone.start == 8_000 + 50_000 + (92_000 - 50_000 / 1.25)


def test_a_collective_ends_when_the_last_has_arrived() -> None:
    program = _exact(
        Launch("a", 100 * US), Launch("b", 20 * US, device=1),
        Launch("reduce", 50 * US, key=0), Launch("reduce", 50 * US, device=1, key=0),
    )  # fmt: skip
    late, _, one, other = play(program).ops
    assert one.end == other.end == one.start + 50_000 == late.end + 1_000 + 50_000
    assert play(program, change="equal-ranks").wall_ns == 8_000 + 60_000 + 1_000 + 50_000


def test_a_producer_keeps_as_many_batches_as_it_may() -> None:
    step = [Load(loader="one"), Launch("a", US)]
    program = _exact(*step * 8, Cpu(900 * US), *step * 4, loaders={"one": (100 * US, 2)})
    waits = [end - start for name, _, start, end in play(program).ranges if name == "dataload"]
    assert waits[:2] == [0, 0]
    assert waits[2:8] == [84_000, *[92_000] * 5]  # one batch each 100 us, of which launching takes 8
    assert waits[8:10] == [0, 0]
    assert waits[10] > 0
    assert sum(end - start for _, _, start, end in play(program, change="no-input-wait").ranges) == 0


def test_changes_can_be_made_together() -> None:
    program = simulated_programs.PROGRAMS["starved-loader"]
    faster = play(program, 1, ["no-input-wait", "scale:gemm=0.5"]).wall_ns
    assert faster < 0.6 * play(program, 1, "no-input-wait").wall_ns
    assert faster < 0.4 * play(program, 1, ("scale:gemm=0.5",)).wall_ns
    assert play(program, 1, []).wall_ns == play(program, 1).wall_ns


def test_what_happens_once_at_its_ordinary_cost() -> None:
    parts = [
        Launch("a", US, once=240_000 * US),
        Capture(5_000 * US),
        Stall(3_000 * US),
        Cpu(7_000 * US, "compile", once=True),
    ]
    program = _exact(Push("step 0"), *parts, Pop())
    assert play(program).wall_ns == pytest.approx(255_000 * US, rel=0.001)
    assert play(program, change="no-start-up").wall_ns < 30 * US


def test_named_work_goes_and_unnamed_stays() -> None:
    program = _exact(
        Push("step 0"), Cpu(10 * US, "log"), Cpu(20 * US), Sleep(40 * US, "ensure_layer_12_weights"), Pop()
    )
    walls = {c: play(program, change=c).wall_ns for c in (None, "no-cpu-work", "no-cpu-work:log", "no-unnamed")}
    assert walls == {None: 70_000, "no-cpu-work": 20_000, "no-cpu-work:log": 60_000, "no-unnamed": 50_000}
    assert play(program, change="no-cpu-work:ensure_layer_*_weights").wall_ns == 30_000


def test_copies_aside_hold_up_the_next_step_only() -> None:
    step = [Launch("a", 100 * US), Copy("HtoD", 1, 80 * US), Launch("b", 100 * US)]
    program = _exact(*[a for k in range(3) for a in (Push(f"step {k}"), *step, Pop())])
    run = play(program, change="overlap-copies")
    for k in (1, 2):
        copy = run.ops[3 * k - 2]
        assert copy.start < run.ops[3 * k - 3].end
        assert run.ops[3 * k].start >= copy.end


def test_a_program_that_waits_for_ever_is_refused() -> None:
    for actions in ([Await("nobody")], [Launch("reduce", US, key=0), Launch("reduce", US, key=0)]):
        with pytest.raises(ValueError, match="never happens"):
            play(_exact(*actions))


@pytest.mark.parametrize("name", ["busy", "reduce-exposed", "tiny-autograd", "pageable-batches", "held-once"])
def test_the_window_can_be_found_again_in_the_export(name: str, tmp_path: Path) -> None:
    run = play(simulated_programs.PROGRAMS[name], 1)
    connection = sqlite3.connect(run.write(tmp_path / "run.sqlite"))
    steps = connection.execute(
        "SELECT start, end FROM NVTX_EVENTS JOIN StringIds ON id = textId WHERE value LIKE 'step %' ORDER BY start"
    ).fetchall()
    rows = [
        row
        for table in ("KERNEL", "MEMCPY")
        if connection.execute(
            "SELECT 1 FROM sqlite_master WHERE name = ?", (f"CUPTI_ACTIVITY_KIND_{table}",)
        ).fetchone()
        for row in connection.execute(
            f"SELECT r.start, o.end FROM CUPTI_ACTIVITY_KIND_{table} o "
            "JOIN CUPTI_ACTIVITY_KIND_RUNTIME r USING (correlationId)"
        )
    ]
    connection.close()
    assert len(rows) == len(run.recorded)
    assert steps[0][0] == run.steps[0][0]
    assert run.wall_ns == max(steps[-1][1], *(end for called, end in rows if called < steps[-1][1])) - steps[0][0]


def test_an_export_holds_what_was_seen(tmp_path: Path) -> None:
    program = _exact(
        Push("step 0"), Load(50 * US), Copy("HtoD", 1 << 20, 30 * US), Graph((("a", 3_000), ("b", 4_000))),
        Graph((("a", 3_000),), by_node=False), Foreign(90 * US),
        Launch("c", US, once=60 * US, once_call="cuModuleLoadData"), Profiler(20 * US), Sync("device"), Pop(),
    )  # fmt: skip
    trace = nsightkit.load(play(program).write(tmp_path / "run.sqlite"))
    assert trace.table("kernels", ["name"])["name"].tolist() == ["a", "b", "c"]
    nodes = trace.table("kernels", ["graph_node", "start_ns", "end_ns"])
    assert nodes["graph_node"].tolist() == [1, 2, 0]
    assert (nodes["end_ns"] - nodes["start_ns"]).tolist() == [3_000, 5_000, 1_000]
    assert trace.table("memops", ["bytes"])["bytes"].tolist() == [1 << 20]
    assert trace.size("graphs") == trace.size("overhead") == trace.size("syncs") == 1
    assert set(trace.table("calls", ["name"])["name"]) == {
        "cudaMemcpyAsync", "cudaGraphLaunch", "cudaLaunchKernel", "cuModuleLoadData", "cudaDeviceSynchronize"
    }  # fmt: skip
    assert trace.table("os_calls", ["name"])["name"].tolist() == ["read"]
    assert trace.table("ranges", ["name"])["name"].tolist() == ["dataload", "step 0"]


def test_random_programs_play_and_differ() -> None:
    walls = {play(program, seed).wall_ns for seed, program in enumerate(RANDOM)}
    assert len(walls) == len(RANDOM)
    kinds = {type(a) for program in RANDOM for thread in program.threads for a in thread}
    assert kinds >= {Load, Cpu, Sleep, Copy, Sync, Launch, Graph, WaitEvent, Stall, Capture, Foreign}
