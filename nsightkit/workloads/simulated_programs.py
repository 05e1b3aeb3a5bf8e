"""Named programs for the simulator, a decoy beside each fault, and random ones. They never ran on a GPU.

Each program says which verdict is true of it. :func:`true_gains` plays the changes that decide it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any, Literal

from nsightkit.workloads.planted import ADAM, POINT, REDUCE
from nsightkit.workloads.simulator import (
    Action,
    Await,
    Capture,
    Copy,
    Cpu,
    Foreign,
    Graph,
    Launch,
    Load,
    Pop,
    Profiler,
    Program,
    Push,
    Record,
    Signal,
    Sleep,
    Stall,
    Sync,
    WaitEvent,
    play,
)

__all__ = ["CHANGE_OF", "FILLS", "PROGRAMS", "loop", "random_program", "true_gains"]

#: The change whose gain a cause weighs. The last two can be played and not made.
CHANGE_OF = {
    "input-pipeline": "no-input-wait",
    "synchronization": "no-sync",
    "launch-overhead": "free-launches",
    "cpu-work": "no-cpu-work",
    "memory-transfer": "overlap-copies",
    "communication": "overlap-communication",
    "imbalance": "equal-ranks",
    "start-up": "no-start-up",
    "profiler": "no-profiler",
    "queued": "no-foreign",
    "unknown": "no-unnamed",
}
#: What a verdict may say where no change gains 5 %: what fills the time.
FILLS = ("compute-bound", "memory-bound", "memory-transfer", "communication", "not-enough-data")

_US, _MS = 1_000, 1_000_000
_GEMM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_tn"
_COPIES, _COMM = 13, 20  # streams beside the one of the kernels

Step = Callable[[int], list[Action]]


def loop(step: Step, steps: int = 12, name: str = "step ") -> list[Action]:
    """Give a thread's actions: steps in ranges of their own.

    Parameters
    ----------
    step : callable
        Takes a step's number and gives its actions.
    steps : int
    name : str
        Of the ranges, before the number.
    """
    return [action for k in range(steps) for action in (Push(f"{name}{k}"), *step(k), Pop())]


def _kernels(
    count: int, us: float, *, kernel: str = _GEMM, dispatch: int = 4_000, stream: int = 7, device: int = 0
) -> list[Action]:
    return [Launch(kernel, int(us * _US), dispatch, stream=stream, device=device)] * count


def _item(stream: int = 7) -> list[Action]:
    """``.item()``: a tiny copy to the host, then a wait for the stream."""
    return [Copy("DtoH", 4, 1_200, stream=stream, host="pageable"), Sync(stream=stream)]


def _in(name: str, actions: list[Action]) -> list[Action]:
    return [Push(name), *actions, Pop()]


def _meet(stream: int, other: int, device: int = 0, shown: bool = True) -> list[Action]:
    """Let another stream wait for what a stream was given so far."""
    event = f"{device} {stream} {other}"
    return [
        Record(event, stream=stream, device=device),
        WaitEvent(event, shown, stream=other, device=device),
    ]


def _after(stream: int, other: int, work: list[Action], shown: bool, device: int = 0) -> list[Action]:
    """Work on another stream, between what stood before it and what follows."""
    if stream == other:
        return work
    return [*_meet(stream, other, device, shown), *work, *_meet(other, stream, device, shown)]


def true_gains(
    program: Program, seed: int = 0, changes: tuple[str, ...] = tuple(CHANGE_OF.values())
) -> dict[str, float]:
    """How many times as fast a program is with each change.

    Parameters
    ----------
    program : Program
    seed : int
    changes : tuple of str

    Returns
    -------
    dict
        Change to gain, the largest first.
    """
    wall = play(program, seed).wall_ns
    found = {change: wall / play(program, seed, change).wall_ns for change in changes}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


# Loops with one fault, and the decoys beside them.


def _starved(load: Load) -> list[Action]:
    return loop(lambda _: [load, Copy("HtoD", 1 << 16, 9 * _US), *_kernels(20, 60)])


def _handed_over(forward: list[Action], backward: list[Action], steps: int = 12) -> list[list[Action]]:
    """The main thread launches forward, autograd's own backward; the main thread waits until that is done."""
    main = loop(
        lambda _: [*_in("forward", forward), *_in("backward", [Signal("backward"), Await("done")]), *_kernels(2, 80)],
        steps,
    )
    return [main, [action for _ in range(steps) for action in (Await("backward"), *backward, Signal("done"))]]


def _ranks(
    compute: tuple[int, int], reduce_us: int, *, stream: int = _COMM, buckets: int = 4, last: int = 0, late_us: int = 0
) -> list[list[Action]]:
    """Two devices, each with a thread of its own, which reduce their gradients in buckets.

    `compute` is the time of a kernel on each, in µs; `last` kernels do not wait for the reductions; the second device
    gets its batch `late_us` late.
    """

    def step(device: int, k: int) -> list[Action]:
        there, back = (_meet(*pair, device) if stream != 7 else [] for pair in ((7, stream), (stream, 7)))
        out: list[Action] = [Load(late_us * _US)] if device and late_us else []
        for bucket in range(buckets):
            reduce = Launch(REDUCE, reduce_us * _US, key=k * buckets + bucket, stream=stream, device=device)
            out += [*_kernels(5, compute[device], device=device), *there, reduce]
        out += [*_kernels(last, compute[device], device=device), *back]
        return [*out, *_kernels(1, 60, kernel=ADAM, device=device)]

    main = loop(lambda k: [Signal("go"), *step(0, k), Await("joined")])
    return [main, [action for k in range(12) for action in (Await("go"), *step(1, k), Signal("joined"))]]


def _streamed(copy_us: float, compute_us: float) -> list[Action]:
    """Weights of a layer are copied on a stream of their own; the layer's kernels wait for them."""
    copy = Copy("HtoD", 32 << 20, int(copy_us * _US), stream=_COPIES)
    return loop(lambda _: [copy, *_meet(_COPIES, 7), *_kernels(4, compute_us / 4)] * 8)


def _uploading(size: int, us: int, *, staging: int = 0) -> list[Action]:
    """A batch is copied on the stream of the kernels; the CPU stages it, and waits for it, when that takes time."""
    host: Literal["pageable", "pinned"] = "pageable" if staging else "pinned"
    copy = Copy("HtoD", size, us * _US, host=host, staging=staging * _US, blocking=staging > 100)
    return loop(lambda _: [copy, *_kernels(20, 60)])


def _cold(*first: Action, steps: int = 12) -> list[Action]:
    """What happens in the first step only."""
    return loop(lambda k: [*(first if k == 0 else ()), *_kernels(20, 60)], steps)


def _named() -> list[Program]:
    busy = _kernels(20, 60)
    flat = loop(lambda _: busy)
    read = Copy("DtoH", 1 << 12, 2 * _US, host="pageable", blocking=True)
    offload = Copy("DtoH", 16 << 20, 200 * _US)
    tiny = _kernels(100, 3)
    across = [a for _ in range(2) for a in (*busy[:5], *_after(7, 9, _kernels(5, 60, stream=9), shown=False))]
    nodes = tuple([(_GEMM, 3_000)] * 100)
    # The batch of the next step, under the kernels of this one.
    ahead = Copy("HtoD", 16 << 20, 700 * _US, stream=_COPIES)
    prefetched = loop(lambda k: [WaitEvent(f"batch {k}"), ahead, Record(f"batch {k + 1}", stream=_COPIES), *busy])
    pausing = [*_kernels(4, 20, stream=9), Cpu(900 * _US, "bookkeeping")] * 20  # beside a thread that never pauses
    return [
        # What fills the time.
        Program("busy", [flat], "compute-bound"),
        Program("elementwise", [loop(lambda _: _kernels(20, 60, kernel=POINT))], "memory-bound"),
        Program("dense-kernels", [loop(lambda _: _kernels(80, 12))], "compute-bound", "free-launches"),
        Program(
            "queue-full",
            [loop(lambda _: _kernels(420, 20, dispatch=2_000), 4)],
            "compute-bound",
            "free-launches",
        ),
        Program("final-sync", [[*flat, Sync("device")]], "compute-bound", "no-sync"),
        Program("unseen-waits", [loop(lambda _: across)], "compute-bound", "free-launches"),
        # Loading.
        Program("starved-loader", [_starved(Load(2 * _MS))], "input-pipeline"),
        Program("starved-unnamed", [_starved(Load(2 * _MS, name=None))], "input-pipeline"),
        Program(
            "starved-between-steps",
            [[a for k in range(12) for a in (Load(2 * _MS), Push(f"train_step {k}"), *busy, Pop())]],
            "input-pipeline",
        ),
        Program(
            "starved-producer",
            [_starved(Load(loader="workers"))],
            "input-pipeline",
            loaders={"workers": (1_700 * _US, 2)},
        ),
        Program(
            "starved-synced",
            [loop(lambda _: [Load(loader="workers"), *[*_kernels(1, 30), *_item()] * 20])],
            "input-pipeline",
            "no-sync",
            loaders={"workers": (1_300 * _US, 2)},
        ),
        Program(
            "slow-batches",
            [loop(lambda k: [Load(8 * _MS if k % 4 == 3 else 20 * _US), *busy], 16, "ProfilerStep#")],
            "input-pipeline",
        ),
        Program("starved-unseen-waits", [loop(lambda _: [Load(2 * _MS), *across])], "input-pipeline", "no-sync"),
        Program("hidden-loader", [_starved(Load(600 * _US))], "compute-bound", "no-input-wait"),
        Program(
            "hidden-producer",
            [_starved(Load(loader="workers"))],
            "compute-bound",
            "no-input-wait",
            loaders={"workers": (1_000 * _US, 2)},
        ),
        # Synchronisation.
        Program("item-each-layer", [loop(lambda _: [*_kernels(1, 30), *_item()] * 20)], "synchronization"),
        Program("blocking-reads", [loop(lambda _: [*_kernels(2, 15), read] * 20)], "synchronization"),
        Program("launch-blocking", [loop(lambda _: [*_kernels(1, 40), Sync("device")] * 20)], "synchronization"),
        Program(
            "sync-each-step",
            [loop(lambda _: [*_kernels(10, 2), *_kernels(30, 20), Sync("device"), Cpu(60 * _US, "log")])],
            "synchronization",
        ),
        Program(
            "sync-before-cpu",
            [loop(lambda _: [*_kernels(5, 20), *_item(), Cpu(6 * _MS, "augment")])],
            "cpu-work",
            "no-sync",
        ),
        Program(
            "sync-full-queue",
            [loop(lambda k: [*busy, Record(f"step {k}"), Sync("event", event=f"step {k - 1}")])],
            "compute-bound",
            "no-sync",
        ),
        # Launches.
        Program("tiny-kernels", [loop(lambda _: _kernels(60, 3, dispatch=7_000))], "launch-overhead"),
        Program(
            "tiny-autograd", [*_handed_over(tiny[:40], [Launch(POINT, 3_000, dispatch=8_000)] * 60)], "launch-overhead"
        ),
        Program("graph-replays", [loop(lambda _: [Graph(nodes)])], "compute-bound", "free-launches"),
        Program("graph-rows", [loop(lambda _: [Graph(nodes, by_node=False)], 60)], "not-enough-data", "free-launches"),
        # CPU work.
        Program("preprocess-tail", [loop(lambda _: [*busy, *_item(), Cpu(3 * _MS, "preprocess")])], "cpu-work"),
        Program(
            "prefetch-layers",
            [loop(lambda _: [Cpu(900 * _US, "prefetch_layers_[4, 5]"), *_kernels(5, 40)] * 3)],
            "cpu-work",
            "no-input-wait",
        ),
        Program(
            "sleep-each-layer",
            [
                loop(
                    lambda _: [
                        action
                        for number in range(4)
                        for action in (Sleep(_MS, f"ensure_layer_{number}_weights"), *_kernels(5, 10), *_item())
                    ]
                )
            ],
            "cpu-work",
            "no-sync",
        ),
        Program(
            "hidden-cpu-work", [loop(lambda _: [Cpu(600 * _US, "augment"), *busy])], "compute-bound", "no-cpu-work"
        ),
        Program("two-threads", [pausing, _kernels(400, 60)], "compute-bound", "no-cpu-work"),
        Program("hand-over", _handed_over(busy[:8], busy), "compute-bound", "no-input-wait"),
        # Copies.
        Program("pageable-batches", [_uploading(16 << 20, 500, staging=1_500)], "memory-transfer"),
        Program("pinned-on-compute", [_uploading(64 << 20, 900)], "memory-transfer"),
        Program("offloaded", [loop(lambda _: [*_kernels(4, 60), offload] * 5)], "memory-transfer"),
        Program("prefetched-batches", [prefetched], "compute-bound", "overlap-copies", copy_contention=0.05),
        Program("small-batches", [_uploading(1 << 20, 40, staging=30)], "compute-bound", "overlap-copies"),
        Program("weight-streaming", [_streamed(400, 60)], "memory-transfer", "overlap-copies"),
        Program("weights-ahead", [_streamed(60, 400)], "compute-bound", "overlap-copies"),
        # Several devices.
        Program("reduce-exposed", _ranks((60, 60), 900, buckets=1), "communication"),
        Program("reduce-on-compute", _ranks((60, 60), 250, stream=7), "communication"),
        Program("reduce-fills", _ranks((20, 20), 900), "communication", "overlap-communication"),
        Program("reduce-hidden", _ranks((60, 60), 150, last=5), "compute-bound", "overlap-communication"),
        Program("uneven-ranks", _ranks((30, 90), 40), "imbalance", "overlap-communication"),
        Program("late-rank", _ranks((60, 60), 40, late_us=2_000), "input-pipeline", "equal-ranks"),
        Program("even-ranks", _ranks((60, 60), 30), "compute-bound", "equal-ranks"),
        # What happens once.
        Program("lazy-loading", [_cold(Launch(POINT, 20 * _US, once=240 * _MS))], "start-up", "free-launches"),
        Program(
            "lazy-modules",
            [_cold(*(Launch(f"{POINT}{n}", 20 * _US, once=4 * _MS, once_call="cuLibraryLoadData") for n in range(6)))],
            "start-up",
            "free-launches",
        ),
        Program(
            "lazy-overhead",
            [
                _cold(
                    Launch(
                        POINT, 20 * _US, once=30 * _MS, once_call="cuModuleLoadData", overhead="Lazy Function Loading"
                    )
                )
            ],
            "start-up",
            "no-profiler",
        ),
        Program("graph-capture", [_cold(Capture(40 * _MS), steps=12)], "start-up", "free-launches"),
        Program("compiled-once", [_cold(Cpu(60 * _MS, "inductor_compile", once=True))], "start-up", "no-cpu-work"),
        Program(
            "stalling-malloc",
            [
                loop(
                    lambda k: [
                        Stall(10_000 if k else 12 * _MS),
                        *busy,
                        *([] if k else [Sync()]),
                        Stall(10_000 if k else 6 * _MS, "cudaFree_v3020"),
                    ]
                )
            ],
            "start-up",
            "no-sync",
        ),
        Program(
            "hidden-first-call",
            [loop(lambda k: [*busy, Launch(POINT, 20 * _US, once=700 * _US * (k == 4)), *busy])],
            "compute-bound",
            "no-start-up",
        ),
        # What the trace does not contain.
        Program(
            "held-once", [loop(lambda k: [*([Foreign(40 * _MS)] if k == 3 else []), *busy])], "queued", "free-launches"
        ),
        Program("held-each-step", [loop(lambda _: [Foreign(900 * _US), *busy])], "queued", "no-sync"),
        Program("unnamed-work", [[*_kernels(5, 60), Cpu(2 * _MS)] * 12], "unknown", "no-cpu-work"),
        # The profiler.
        Program("flushing", [loop(lambda _: [Profiler(1_500 * _US), *busy])], "profiler"),
        Program(
            "hidden-flush", [loop(lambda k: [Profiler(600 * _US if k else 0), *busy])], "compute-bound", "no-profiler"
        ),
    ]


#: The named programs.
#:
#: :meta hide-value:
PROGRAMS: dict[str, Program] = {program.name: program for program in _named()}


def random_program(seed: int) -> Program:
    """Draw a program: up to four threads, three streams and two devices, whatever comes together.

    Each step does the same, up to jitter: it gets a batch; parts of the main thread follow, perhaps a backward pass of
    autograd's thread, and a second device with a thread of its own that does the same parts and meets the first one in
    collectives. What these threads launch they launch within the step. A thread beside works at its own pace.

    What cannot be seen in a trace is left out: how close to its limit a producer is (here it is far ahead, or each
    batch takes its time), and waits between streams of which nothing was waiting yet (here kernels follow on them).

    Parameters
    ----------
    seed : int
    """
    draw = random.Random(seed)  # noqa: S311 # no secret
    streams = [7, 9, 11][: draw.choice([1, 1, 2, 3])]
    ranks = draw.random() < 0.25
    shown = draw.random() < 0.5  # whether waits between streams and for other threads are in the trace
    heavy = draw.choice([draw.uniform(1, 6), draw.uniform(6, 60)])  # what kernels take, in µs, more or less
    parts = [action for _ in range(draw.randint(2, 6)) for action in _part(draw, streams, heavy, shown)]
    autograd = _part(draw, streams, heavy, shown) if draw.random() < 0.3 else []
    tail: list[Action] = draw.choice([[], [], _item(), [Sync("device")], [Cpu(200 * _US, "log")]])
    uneven, reduce_ns = draw.uniform(0.5, 2), int(draw.uniform(20, 400) * _US)
    buckets, comm = draw.randint(1, 3) if ranks else 0, draw.choice([7, _COMM])
    first: list[Action] = draw.choice(
        [[], [], [], [Launch(POINT, 9_000, once=5 * _MS)], [Stall(3 * _MS)], [Capture(6 * _MS)], [Foreign(4 * _MS)]]
    )
    later: list[Action] = [Stall(10_000)] if first and isinstance(first[0], Stall) else []
    steps = draw.randint(6, 12)
    contention = draw.choice([0, 0, 0.05, 0.15]), draw.choice([0, 0, 0.03, 0.1])
    jitter = draw.choice([0.02, 0.05, 0.1])

    def reduced(device: int, k: int) -> list[Action]:
        out: list[Action] = []
        for bucket in range(buckets):
            out += _kernels(6, heavy * (uneven if device else 1), device=device)
            reduce = Launch(REDUCE, reduce_ns, key=k * buckets + bucket, stream=comm, device=device)
            out += _after(7, comm, [reduce], shown, device)
            out += _kernels(2, heavy, kernel=ADAM, device=device)
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
        served, pause = _kernels(5, heavy, stream=15), int(draw.uniform(10, 30) * heavy * _US)
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
    us, dispatch = heavy * draw.uniform(0.3, 3), int(draw.uniform(2, 12) * _US)
    kernel = _GEMM.replace("128x128", f"{draw.choice([64, 128, 256])}x{draw.choice([64, 96, 128, 192])}")
    out = _kernels(draw.randint(3, 30), us, kernel=kernel, dispatch=dispatch, stream=stream)
    other = draw.choice(streams)
    if stream != other:
        out += _after(stream, other, _kernels(draw.randint(2, 10), us, kernel=kernel, stream=other), shown)
        out += _kernels(2, us, kernel=kernel, stream=stream)
    size, ns = 1 << 20, int(draw.uniform(5, 300) * _US)
    beside: list[Callable[[], list[Action]]] = [
        lambda: [
            Cpu(int(draw.uniform(20, 1500) * _US), draw.choice(["augment", "log", "prefetch_layers_[4, 5]", None]))
        ],
        lambda: _item(stream),
        lambda: [draw.choice([Sync(stream=stream), Sync("device")])],
        lambda: [Copy(draw.choice(["HtoD", "DtoH"]), size, ns, stream=stream)],
        lambda: [Copy("HtoD", size, ns, stream=stream, host="pageable", staging=ns, blocking=draw.random() < 0.5)],
        lambda: [
            Copy("HtoD", size, ns, stream=_COPIES),
            *_meet(_COPIES, stream, shown=shown),
            *_kernels(2, us, kernel=kernel, stream=stream),
        ],
        lambda: [Sleep(int(draw.uniform(50, 1500) * _US), f"ensure_layer_{draw.randint(0, 9)}_weights")],
        lambda: [Copy("DtoH", size, ns, stream=stream, host="pageable", blocking=True)],
        lambda: [Graph(tuple((POINT, int(us * _US)) for _ in range(10)), draw.random() < 0.7, stream=stream)],
        list,
    ]
    return out + beside[draw.randrange(10)]()
