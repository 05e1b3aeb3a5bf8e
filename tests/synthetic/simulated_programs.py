"""Named programs for the simulator, and a decoy beside each fault. They never ran on a GPU.

Each program says which verdict is true of it. :func:`true_gains` plays the changes that decide it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from synthetic.planted import ADAM, POINT, REDUCE
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

__all__ = [
    "CHANGE_OF", "COMM", "COPIES", "FILLS", "GEMM", "PROGRAMS", "after", "item", "kernels", "loop", "meet",
    "true_gains",
]  # fmt: skip

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
#: The kernel of most programs.
GEMM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_tn"
#: Streams beside the one of the kernels.
COPIES, COMM = 13, 20

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


def kernels(
    count: int, us: float, *, kernel: str = GEMM, dispatch: int = 4_000, stream: int = 7, device: int = 0
) -> list[Action]:
    """Give launches of one kernel, one after the other.

    Parameters
    ----------
    count : int
    us : float
        What each takes on the GPU.
    kernel : str
    dispatch : int
        Nanoseconds before each call.
    stream, device : int
    """
    return [Launch(kernel, int(us * _US), dispatch, stream=stream, device=device)] * count


def item(stream: int = 7) -> list[Action]:
    """``.item()``: a tiny copy to the host, then a wait for the stream.

    Parameters
    ----------
    stream : int
    """
    return [Copy("DtoH", 4, 1_200, stream=stream, host="pageable"), Sync(stream=stream)]


def _in(name: str, actions: list[Action]) -> list[Action]:
    return [Push(name), *actions, Pop()]


def meet(stream: int, other: int, device: int = 0, shown: bool = True) -> list[Action]:
    """Let another stream wait for what a stream was given so far.

    Parameters
    ----------
    stream, other, device : int
    shown : bool
        Whether the wait is in the trace.
    """
    event = f"{device} {stream} {other}"
    return [
        Record(event, stream=stream, device=device),
        WaitEvent(event, shown, stream=other, device=device),
    ]


def after(stream: int, other: int, work: list[Action], shown: bool, device: int = 0) -> list[Action]:
    """Work on another stream, between what stood before it and what follows.

    Parameters
    ----------
    stream, other : int
    work : list
        What runs on `other`.
    shown : bool
        Whether the waits are in the trace.
    device : int
    """
    if stream == other:
        return work
    return [*meet(stream, other, device, shown), *work, *meet(other, stream, device, shown)]


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
    return loop(lambda _: [load, Copy("HtoD", 1 << 16, 9 * _US), *kernels(20, 60)])


def _handed_over(forward: list[Action], backward: list[Action], steps: int = 12) -> list[list[Action]]:
    """The main thread launches forward, autograd's own backward; the main thread waits until that is done."""
    main = loop(
        lambda _: [*_in("forward", forward), *_in("backward", [Signal("backward"), Await("done")]), *kernels(2, 80)],
        steps,
    )
    return [main, [action for _ in range(steps) for action in (Await("backward"), *backward, Signal("done"))]]


def _ranks(
    compute: tuple[int, int], reduce_us: int, *, stream: int = COMM, buckets: int = 4, last: int = 0, late_us: int = 0
) -> list[list[Action]]:
    """Two devices, each with a thread of its own, which reduce their gradients in buckets.

    `compute` is the time of a kernel on each, in µs; `last` kernels do not wait for the reductions; the second device
    gets its batch `late_us` late.
    """

    def step(device: int, k: int) -> list[Action]:
        there, back = (meet(*pair, device) if stream != 7 else [] for pair in ((7, stream), (stream, 7)))
        out: list[Action] = [Load(late_us * _US)] if device and late_us else []
        for bucket in range(buckets):
            reduce = Launch(REDUCE, reduce_us * _US, key=k * buckets + bucket, stream=stream, device=device)
            out += [*kernels(5, compute[device], device=device), *there, reduce]
        out += [*kernels(last, compute[device], device=device), *back]
        return [*out, *kernels(1, 60, kernel=ADAM, device=device)]

    main = loop(lambda k: [Signal("go"), *step(0, k), Await("joined")])
    return [main, [action for k in range(12) for action in (Await("go"), *step(1, k), Signal("joined"))]]


def _streamed(copy_us: float, compute_us: float) -> list[Action]:
    """Weights of a layer are copied on a stream of their own; the layer's kernels wait for them."""
    copy = Copy("HtoD", 32 << 20, int(copy_us * _US), stream=COPIES)
    return loop(lambda _: [copy, *meet(COPIES, 7), *kernels(4, compute_us / 4)] * 8)


def _uploading(size: int, us: int, *, staging: int = 0) -> list[Action]:
    """A batch is copied on the stream of the kernels; the CPU stages it, and waits for it, when that takes time."""
    host: Literal["pageable", "pinned"] = "pageable" if staging else "pinned"
    copy = Copy("HtoD", size, us * _US, host=host, staging=staging * _US, blocking=staging > 100)
    return loop(lambda _: [copy, *kernels(20, 60)])


def _cold(*first: Action, steps: int = 12) -> list[Action]:
    """What happens in the first step only."""
    return loop(lambda k: [*(first if k == 0 else ()), *kernels(20, 60)], steps)


def _named() -> list[Program]:
    busy = kernels(20, 60)
    flat = loop(lambda _: busy)
    read = Copy("DtoH", 1 << 12, 2 * _US, host="pageable", blocking=True)
    offload = Copy("DtoH", 16 << 20, 200 * _US)
    tiny = kernels(100, 3)
    across = [a for _ in range(2) for a in (*busy[:5], *after(7, 9, kernels(5, 60, stream=9), shown=False))]
    nodes = tuple([(GEMM, 3_000)] * 100)
    # The batch of the next step, under the kernels of this one.
    ahead = Copy("HtoD", 16 << 20, 700 * _US, stream=COPIES)
    prefetched = loop(lambda k: [WaitEvent(f"batch {k}"), ahead, Record(f"batch {k + 1}", stream=COPIES), *busy])
    pausing = [*kernels(4, 20, stream=9), Cpu(900 * _US, "bookkeeping")] * 20  # beside a thread that never pauses
    return [
        # What fills the time.
        Program("busy", [flat], "compute-bound"),
        Program("elementwise", [loop(lambda _: kernels(20, 60, kernel=POINT))], "memory-bound"),
        Program("dense-kernels", [loop(lambda _: kernels(80, 12))], "compute-bound", "free-launches"),
        Program(
            "queue-full",
            [loop(lambda _: kernels(420, 20, dispatch=2_000), 4)],
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
            [loop(lambda _: [Load(loader="workers"), *[*kernels(1, 30), *item()] * 20])],
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
        Program("item-each-layer", [loop(lambda _: [*kernels(1, 30), *item()] * 20)], "synchronization"),
        Program("blocking-reads", [loop(lambda _: [*kernels(2, 15), read] * 20)], "synchronization"),
        Program("launch-blocking", [loop(lambda _: [*kernels(1, 40), Sync("device")] * 20)], "synchronization"),
        Program(
            "sync-each-step",
            [loop(lambda _: [*kernels(10, 2), *kernels(30, 20), Sync("device"), Cpu(60 * _US, "log")])],
            "synchronization",
        ),
        Program(
            "sync-before-cpu",
            [loop(lambda _: [*kernels(5, 20), *item(), Cpu(6 * _MS, "augment")])],
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
        Program("tiny-kernels", [loop(lambda _: kernels(60, 3, dispatch=7_000))], "launch-overhead"),
        Program(
            "tiny-autograd", [*_handed_over(tiny[:40], [Launch(POINT, 3_000, dispatch=8_000)] * 60)], "launch-overhead"
        ),
        Program("graph-replays", [loop(lambda _: [Graph(nodes)])], "compute-bound", "free-launches"),
        Program("graph-rows", [loop(lambda _: [Graph(nodes, by_node=False)], 60)], "not-enough-data", "free-launches"),
        # CPU work.
        Program("preprocess-tail", [loop(lambda _: [*busy, *item(), Cpu(3 * _MS, "preprocess")])], "cpu-work"),
        Program(
            "prefetch-layers",
            [loop(lambda _: [Cpu(900 * _US, "prefetch_layers_[4, 5]"), *kernels(5, 40)] * 3)],
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
                        for action in (Sleep(_MS, f"ensure_layer_{number}_weights"), *kernels(5, 10), *item())
                    ]
                )
            ],
            "cpu-work",
            "no-sync",
        ),
        Program(
            "hidden-cpu-work", [loop(lambda _: [Cpu(600 * _US, "augment"), *busy])], "compute-bound", "no-cpu-work"
        ),
        Program("two-threads", [pausing, kernels(400, 60)], "compute-bound", "no-cpu-work"),
        Program("hand-over", _handed_over(busy[:8], busy), "compute-bound", "no-input-wait"),
        # Copies.
        Program("pageable-batches", [_uploading(16 << 20, 500, staging=1_500)], "memory-transfer"),
        Program("pinned-on-compute", [_uploading(64 << 20, 900)], "memory-transfer"),
        Program("offloaded", [loop(lambda _: [*kernels(4, 60), offload] * 5)], "memory-transfer"),
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
        Program("unnamed-work", [[*kernels(5, 60), Cpu(2 * _MS)] * 12], "unknown", "no-cpu-work"),
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
