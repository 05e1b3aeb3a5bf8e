"""Named programs for the simulator, and a decoy beside each fault. They never ran on a GPU.

Each program says which verdict is true of it. :func:`true_gains` plays the changes that decide it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from synthetic import simulator
from synthetic.planted import ADAM, POINT, REDUCE
from synthetic.simulator import (
    Action,
    Await,
    Copy,
    Graph,
    Launch,
    Load,
    Pop,
    Program,
    Push,
    Record,
    Signal,
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
#: What a verdict may say where no change gains 5%: what fills the time.
FILLS = ("compute-bound", "memory-bound", "memory-transfer", "communication", "not-enough-data")

_US = 1_000
#: The kernel of most programs.
GEMM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_tn"
#: Streams beside the one of the kernels.
COPIES, COMM = 13, 20

Step = Callable[[int], list[Action]]


def loop(step: Step, steps: int = 12) -> list[Action]:
    """Give a thread's actions: steps in ranges of their own.

    Parameters
    ----------
    step : callable
        Takes a step's number and gives its actions.
    steps : int
    """
    return [action for k in range(steps) for action in (Push(f"step {k}"), *step(k), Pop())]


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


def _ranks(
    compute: list[int], reduce_us: int, *, stream: int = COMM, buckets: int = 4, last: int = 0, late_us: int = 0
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


#: Groups of actions that programs name, beside the actions of the simulator; `of` is a group inside.
_GROUPS: dict[str, Callable[..., list[Action]]] = {
    "kernels": kernels,
    "item": item,
    "meet": meet,
    "graph": lambda count, ns, **more: [Graph(((GEMM, ns),) * count, **more)],
    "unnamed load": lambda ns: [Load(ns, name=None)],
    "repeat": lambda times, of: of * times,
    "in": lambda name, of: [Push(name), *of, Pop()],
    "aside": lambda of: after(7, 9, of, shown=False),
}


def _actions(rows: list[dict[str, Any]], k: int) -> list[Action]:
    """Read the actions of a step."""
    texts = {"POINT": POINT, "k": k, "previous": k - 1, "next": k + 1}
    out: list[Action] = []
    for row in rows:
        if k not in row.get("only", [k]) or k in row.get("never", []):
            continue
        fields = {key: value for key, value in row.items() if key not in ("do", "only", "never")}
        if "of" in fields:
            fields["of"] = _actions(fields["of"], k)
        for key in ("kernel", "event"):
            if key in fields:
                fields[key] = fields[key].format(**texts)
        if row["do"] in _GROUPS:
            out += _GROUPS[row["do"]](**fields)
        else:
            out.append(getattr(simulator, row["do"])(**fields))
    return out


def _thread(row: dict[str, Any]) -> list[Action]:
    """Read the actions of a thread."""
    name = row.get("range", "step ")
    out = []
    for k in range(row.get("steps", 12)):
        out += _actions(row.get("before", []), k)
        step = _actions(row["step"], k)
        out += [Push(f"{name}{k}"), *step, Pop()] if name else step
    return out + _actions(row.get("last", []), 0)


def _named() -> Iterator[Program]:
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    for row in rows["program"]:
        threads = [_thread(thread) for thread in row.get("thread", [row])]
        loaders = {name: (every, depth) for name, (every, depth) in row.get("loaders", {}).items()}
        more = {key: row[key] for key in ("decoy_for", "copy_contention") if key in row}
        yield Program(row["name"], threads, row["bottleneck"], loaders=loaders, **more)
    for row in rows["ranks"]:
        name = row.pop("name")
        bottleneck = row.pop("bottleneck")
        decoy_for = row.pop("decoy_for", None)
        yield Program(name, _ranks(**row), bottleneck, decoy_for)


#: The named programs.
#:
#: :meta hide-value:
PROGRAMS: dict[str, Program] = {program.name: program for program in _named()}
