"""Programs drawn at random for the simulator: whatever comes together, within what a trace can show."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

from synthetic.planted import ADAM, POINT, REDUCE
from synthetic.simulated_programs import COMM, COPIES, GEMM, after, item, kernels, loop, meet
from synthetic.simulator import (
    Action,
    Await,
    Capture,
    Copy,
    Cpu,
    Foreign,
    Graph,
    Launch,
    Load,
    Program,
    Signal,
    Sleep,
    Stall,
    Sync,
    play,
)

US, MS = 1_000, 1_000_000


def random_program(seed: int) -> Program:
    """Draw a program: up to four threads, three streams and two devices, whatever comes together.

    Each step does the same, up to jitter: it gets a batch; parts of the main thread follow, perhaps a backward pass of
    autograd's thread, and a second device with a thread of its own that does the same parts and meets the first one in
    collectives. What these threads launch they launch within the step. A thread beside works at its own pace.

    What cannot be seen in a trace is left out: how close to its limit a producer is (here it is far ahead, or each
    batch takes its time), and waits between streams of which nothing was waiting yet (here kernels follow on them).

    """
    draw = random.Random(seed)  # no secret
    streams = [7, 9, 11][: draw.choice([1, 1, 2, 3])]
    ranks = draw.random() < 0.25
    shown = draw.random() < 0.5  # whether waits between streams and for other threads are in the trace
    heavy = draw.choice([draw.uniform(1, 6), draw.uniform(6, 60)])  # what kernels take, in µs, more or less
    parts = [action for _ in range(draw.randint(2, 6)) for action in _part(draw, streams, heavy, shown)]
    autograd = _part(draw, streams, heavy, shown) if draw.random() < 0.3 else []
    tail: list[Action] = draw.choice([[], [], item(), [Sync("device")], [Cpu(200 * US, "log")]])
    uneven = draw.uniform(0.5, 2)
    reduce_ns = int(draw.uniform(20, 400) * US)
    buckets = draw.randint(1, 3) if ranks else 0
    comm = draw.choice([7, COMM])
    first: list[Action] = draw.choice(
        [[], [], [], [Launch(POINT, 9_000, once=5 * MS)], [Stall(3 * MS)], [Capture(6 * MS)], [Foreign(4 * MS)]]
    )
    later: list[Action] = [Stall(10_000)] if first and isinstance(first[0], Stall) else []
    steps = draw.randint(6, 12)
    contention = draw.choice([0, 0, 0.05, 0.15]), draw.choice([0, 0, 0.03, 0.1])
    jitter = draw.choice([0.02, 0.05, 0.1])

    def reduced(device: int, k: int) -> list[Action]:
        out: list[Action] = []
        for bucket in range(buckets):
            out += kernels(6, heavy * (uneven if device else 1), device=device)
            reduce = Launch(REDUCE, reduce_ns, key=k * buckets + bucket, stream=comm, device=device)
            out += after(7, comm, [reduce], shown, device)
            out += kernels(2, heavy, kernel=ADAM, device=device)
        return out

    backward: list[Action] = [Signal("backward"), Await("backward done", shown)] if autograd else []
    met: list[Action] = [Signal("rank"), Await("rank done", shown)] if ranks else []

    def threads(lead: list[Action]) -> list[list[Action]]:
        def step(k: int) -> list[Action]:
            once = first if k == 1 else later
            return [*lead, *once, *met[:1], *parts, *backward, *reduced(0, k), *tail, *met[1:]]

        out = [loop(step, steps)]
        if autograd:
            out.append([Await("backward", shown), *autograd, Signal("backward done")] * steps)
        if ranks:
            same = _on_device_1(parts, uneven)
            out.append(
                [a for k in range(steps) for a in (Await("rank", shown), *same, *reduced(1, k), Signal("rank done"))]
            )
        return out

    wall_ns = play(Program("", threads([]), jitter=0)).wall_ns
    wait = int(draw.uniform(0.02, 1) * wall_ns / steps)
    lead: list[Action] = draw.choice([[], [], [Load(wait)], [Load(wait, name=None)], [Load(loader="workers")]])
    playing = threads(lead)
    if draw.random() < 0.15:
        served = kernels(5, heavy, stream=15)
        pause = int(draw.uniform(10, 30) * heavy * US)
        playing.append([*served, Cpu(pause)] * int(min(wall_ns / pause, 200)))
    loaders = {"workers": (int(draw.uniform(0.02, 0.2) * wall_ns / steps), draw.randint(1, 4))}
    return Program(f"random {seed}", playing, "", None, loaders, *contention, jitter)


def _on_device_1(actions: list[Action], factor: float) -> list[Action]:
    """The same on the second device, with kernels so many times as long."""

    def moved(action: Any) -> Any:
        longer = {"ns": int(action.ns * factor)} if isinstance(action, Launch) else {}
        named = {"event": f"1 {action.event}"} if hasattr(action, "event") else {}
        return dataclasses.replace(action, device=1, **longer, **named) if hasattr(action, "device") else action

    return [moved(action) for action in actions]


def _part(draw: random.Random, streams: list[int], heavy: float, shown: bool) -> list[Action]:
    """One part of a random step: kernels, and something beside them."""
    stream = draw.choice(streams)
    us = heavy * draw.uniform(0.3, 3)
    dispatch = int(draw.uniform(2, 12) * US)
    kernel = GEMM.replace("128x128", f"{draw.choice([64, 128, 256])}x{draw.choice([64, 96, 128, 192])}")
    out = kernels(draw.randint(3, 30), us, kernel=kernel, dispatch=dispatch, stream=stream)
    other = draw.choice(streams)
    if stream != other:
        out += after(stream, other, kernels(draw.randint(2, 10), us, kernel=kernel, stream=other), shown)
        out += kernels(2, us, kernel=kernel, stream=stream)
    size = 1 << 20
    ns = int(draw.uniform(5, 300) * US)
    beside: list[Callable[[], list[Action]]] = [
        lambda: [
            Cpu(int(draw.uniform(20, 1500) * US), draw.choice(["augment", "log", "prefetch_layers_[4, 5]", None]))
        ],
        lambda: item(stream),
        lambda: [draw.choice([Sync(stream=stream), Sync("device")])],
        lambda: [Copy(draw.choice(["HtoD", "DtoH"]), size, ns, stream=stream)],
        lambda: [Copy("HtoD", size, ns, stream=stream, host="pageable", staging=ns, blocking=draw.random() < 0.5)],
        lambda: [
            Copy("HtoD", size, ns, stream=COPIES),
            *meet(COPIES, stream, shown=shown),
            *kernels(2, us, kernel=kernel, stream=stream),
        ],
        lambda: [Sleep(int(draw.uniform(50, 1500) * US), f"ensure_layer_{draw.randint(0, 9)}_weights")],
        lambda: [Copy("DtoH", size, ns, stream=stream, host="pageable", blocking=True)],
        lambda: [Graph(tuple((POINT, int(us * US)) for _ in range(10)), draw.random() < 0.7, stream=stream)],
        list,
    ]
    return out + beside[draw.randrange(10)]()
