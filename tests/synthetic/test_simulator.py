"""The simulator: what it plays obeys the device's rules, and what its programs declare is what their plays say."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import pytest
from random_programs import random_program
from synthetic import simulated_programs
from synthetic.simulator import (
    QUEUE,
    Cpu,
    Launch,
    Op,
    Played,
    Pop,
    Program,
    Push,
    Record,
    Sleep,
    Stall,
    Sync,
    WaitEvent,
    play,
)

NAMED = simulated_programs.PROGRAMS
US = 1_000


def _exact(*actions: object, **more: Any) -> Program:
    """One thread without jitter."""
    return Program("exact", [actions], jitter=0.0, **more)  # type: ignore[list-item]


CHANGED = itertools.cycle(["no-sync", "overlap-copies", "equal-ranks", "overlap-communication"])


@pytest.mark.parametrize(
    ("program", "change"),
    list(zip([*NAMED.values(), *map(random_program, range(20))], CHANGED, strict=False)),
    ids=lambda value: getattr(value, "name", value),
)
def test_plays_obey_the_rules_of_the_device(program: Program, change: str):
    for run in (play(program, 3), play(program, 3, change)):
        streams: dict[tuple[int, int], list[Op]] = defaultdict(list)
        for op in run.ops:
            streams[op.device, op.stream].append(op)
            assert op.called <= op.queued <= op.start <= op.end
            assert all(op.start >= other.end for other in op.waits)
        for ops in streams.values():
            for before, op in itertools.pairwise(ops):
                assert op.start >= before.end, "operations of one stream run one after the other, as launched"
            for op, room in zip(ops[QUEUE:], ops, strict=False):
                assert op.queued >= room.end, "the queue was full"
        _calls_return_after_what_they_wait_for(run)


def _calls_return_after_what_they_wait_for(run: Played):
    for call in run.calls:
        if call.name in ("cudaStreamSynchronize", "cudaDeviceSynchronize"):
            device, stream = call.waits_on or (0, 0)
            everything = call.name == "cudaDeviceSynchronize"
            for op in run.ops:
                # What a change moved aside is not waited for.
                if op.device == device and (op.stream == stream or (everything and op.stream < 1000)):
                    assert op.queued >= call.start or op.end < call.end


#: By hand, without jitter: 4 µs of dispatch, a start 4 µs after the call began, 1 µs between operations of a stream.
#: The parts of a step, and with each change the time in µs from its begin to its end.
BY_HAND = [
    ([Launch("a", 100 * US), Launch("b", 10 * US)], {None: 119}),
    (
        # 108 µs to the end of a, 6.5 until the call returns, 8 to the start of b, 10 to its end.
        [Launch("a", 100 * US), Sync(), Launch("b", 10 * US)],
        {None: 132.5, "no-sync": 119, "without:^a$": 32.5},
    ),
    (
        [Launch("a", 100 * US), Record("a"), WaitEvent("a", stream=9), Launch("b", US, stream=9)],
        {None: 110.5},
    ),
    (
        [Cpu(10 * US, "log"), Cpu(20 * US), Sleep(40 * US, "ensure_layer_12_weights")],
        {
            None: 70,
            "no-cpu-work": 20,
            "no-cpu-work:log": 60,
            "no-cpu-work:ensure_layer_*_weights": 30,
            "no-unnamed": 50,
        },
    ),
    (
        # What happens once, at its ordinary cost; parts of a capture are cut to whole shares.
        [Launch("a", US, once=240_000 * US), Stall(3_000 * US), Cpu(7_000 * US, "compile", once=True)],
        {None: 250_008, "no-start-up": 18},
    ),
    (
        # The device that comes last, 1 µs between operations, the transfer.
        [
            Launch("a", 100 * US), Launch("b", 20 * US, device=1),
            Launch("reduce", 50 * US, key=0), Launch("reduce", 50 * US, device=1, key=0),
        ],
        {None: 159, "equal-ranks": 127},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("step", "walls_us"), BY_HAND)
def test_times_by_hand(step: list[Any], walls_us: dict[str | None, float]):
    program = _exact(Push("step 0"), *step, Pop())
    assert {change: play(program, change=change).wall_ns / US for change in walls_us} == walls_us
