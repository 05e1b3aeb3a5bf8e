"""An event-driven simulator of GPU programs: what a change gains is played, not computed.

A :class:`Program` is data: host threads, each a list of actions. :func:`play` runs it, event by event, and keeps what a
profiler would have seen. Played again with a change made to the *program*, it says what that change gains:
``play(p).wall_ns / play(p, change="no-sync").wall_ns``. What an analysis predicts from the written trace is held
against that, so nothing here is taken from the analyses. The programs never ran on a GPU, and the export says so.

Streams run in order; an operation starts a latency after its launch call begins, after the end of the one before it,
and after what its stream waits for. Kernels of several streams run at the same time and may slow each other
down. The launch queue of a stream holds :data:`QUEUE` operations. Jitter belongs to an action and not to the order of
events, so an action draws the same in every play with the same seed.
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, Literal

from synthetic.planted import PID, Export

__all__ = [
    "QUEUE",
    "Action",
    "Await",
    "Capture",
    "Copy",
    "Cpu",
    "Foreign",
    "Graph",
    "Launch",
    "Load",
    "Op",
    "Played",
    "Pop",
    "Profiler",
    "Program",
    "Push",
    "Record",
    "Signal",
    "Sleep",
    "Stall",
    "Sync",
    "WaitEvent",
    "play",
]

#: Operations that the launch queue of a stream holds; a launch call waits for room.
QUEUE = 1024
#: From the beginning of a launch call to the start of its operation on an idle stream, in ns.
START_NS = 4_000
#: From the end of an operation to the start of the next one in its stream, in ns.
BEHIND_NS = 1_000
#: From the end of an operation to the start of one on another stream that waits for it, in ns.
EVENT_NS = 1_500
#: From the end of what a blocking call waits for to its return, and its length when that was over before, in ns.
RETURN_NS, LOOK_NS = 6_500, 2_000
#: What a launch takes: before its call and in it; and what a call takes that records an event or waits for one, in ns.
DISPATCH_NS, CALL_NS, NOTE_NS = 4_000, 4_000, 1_500
#: What an allocation or free ordinarily takes, in ns.
STALL_NS = 10_000
#: From a signal to the first action of the thread that waited for it, in ns.
WAKE_NS = 10_000
#: What is left between two launches under ``free-launches``, in ns.
FREE_NS = 3_000

_NO_STREAM = 0xFFFFFFFF
_STEP = re.compile(r"^((train_)?step |ProfilerStep#)\d+$")


@dataclass(frozen=True, kw_only=True)
class _InStream:
    """What goes to a stream of a device."""

    stream: int = 7
    device: int = 0


@dataclass(frozen=True)
class Cpu:
    """Work of the thread itself, in a range when it has a name; `once` for what happens at the start only."""

    ns: int
    name: str | None = None
    once: bool = False


@dataclass(frozen=True)
class Load:
    """Read a batch for `ns`, or wait until the producer `loader` of the program has one. None as name: no range."""

    ns: int = 0
    name: str | None = "dataload"
    loader: str | None = None


class Sleep(Cpu):
    """Sleep in a range."""


@dataclass(frozen=True)
class Launch(_InStream):
    """Launch a kernel: `dispatch` before the call, and `once` more inside it for loading its module.

    Launches with the same `key` are one collective: none ends before the last has started and `ns` have passed.
    """

    kernel: str
    ns: int
    dispatch: int = DISPATCH_NS
    once: int = 0
    once_call: str | None = None  #: a driver call inside the launch in which that time passes
    overhead: str | None = None  #: what CUPTI calls that time in its table of overhead
    key: int | None = None

    @property
    def nodes(self) -> tuple[tuple[str, int], ...]:
        """Name and time of its kernel, as a graph has those of several."""
        return ((self.kernel, self.ns),)


@dataclass(frozen=True)
class Graph(_InStream):
    """Replay a CUDA graph; `by_node` says whether the capture recorded its kernels or one interval."""

    nodes: tuple[tuple[str, int], ...]
    by_node: bool = True
    key: ClassVar[None] = None  # what it launches is not a collective


@dataclass(frozen=True)
class Copy(_InStream):
    """Copy `size` bytes in `ns`; the CPU stages it for `staging` first, and `blocking` waits for its end."""

    kind: Literal["HtoD", "DtoH", "DtoD"]
    size: int
    ns: int
    host: Literal["pinned", "pageable"] = "pinned"
    staging: int = 0
    blocking: bool = False


@dataclass(frozen=True)
class Sync(_InStream):
    """Wait for a device, a stream, or the event of that name."""

    what: Literal["device", "stream", "event"] = "stream"
    event: str = ""


@dataclass(frozen=True)
class Record(_InStream):
    """Record an event in a stream."""

    event: str


@dataclass(frozen=True)
class WaitEvent(_InStream):
    """Let a stream wait for an event; not `shown`: nothing in the trace says so."""

    event: str
    shown: bool = True


@dataclass(frozen=True)
class Foreign(_InStream):
    """Work that the trace does not contain, and that a stream's operations queue behind."""

    ns: int


@dataclass(frozen=True)
class Signal:
    """Hand over to whoever awaits that name."""

    name: str


@dataclass(frozen=True)
class Await:
    """Wait for a signal; each signal is taken once. Not `shown`: OS calls were not traced."""

    name: str
    shown: bool = True


@dataclass(frozen=True)
class Capture:
    """Capture a CUDA graph, in `ns` in all; nothing of it runs."""

    ns: int


@dataclass(frozen=True)
class Stall:
    """An allocation or free that takes `ns`."""

    ns: int
    call: str = "cudaMalloc_v3020"


@dataclass(frozen=True)
class Profiler:
    """The profiler takes the thread's time for itself."""

    ns: int


@dataclass(frozen=True)
class Push:
    """Open a range; ``step 3`` and ``ProfilerStep#3`` on the first thread are steps."""

    name: str


@dataclass(frozen=True)
class Pop:
    """Close the innermost range."""


Action = (
    Cpu | Load | Launch | Graph | Copy | Sync | Record | WaitEvent | Foreign | Signal | Await | Capture | Stall
    | Profiler | Push | Pop
)  # fmt: skip


@dataclass(frozen=True)
class Program:
    """A program and what is true of it.

    Parameters
    ----------
    name : str
    threads : sequence of sequence of Action
        The first one is the main thread.
    bottleneck : str
        What a verdict must find; "" where that is not known.
    decoy_for : str, optional
        A change that looks tempting and gains next to nothing.
    loaders : dict of str to (int, int)
        Producers by name: ns a batch, and how many batches they keep ready.
    contention : float
        How much longer a kernel takes for each other kernel that runs on its device.
    copy_contention : float
        The same for each copy.
    jitter : float
        Of all durations, either way; twice that of the start of an operation, four times of the return of a sync.
    """

    name: str
    threads: Sequence[Sequence[Action]]
    bottleneck: str = ""
    decoy_for: str | None = None
    loaders: dict[str, tuple[int, int]] = field(default_factory=dict)
    contention: float = 0.0
    copy_contention: float = 0.0
    jitter: float = 0.05


@dataclass(eq=False)
class Op:
    """An operation of a device, as it was played; times in ns."""

    kind: Literal["kernel", "graph", "copy", "collective", "foreign"]
    action: Launch | Graph | Copy | Foreign
    stream: int
    left: float  #: work still to do
    behind: int  #: latency after the one before it in its stream
    nodes: tuple[tuple[str, int], ...] = ()
    called: int = 0  #: start of its launch call
    queued: int = 0  #: when it entered the launch queue
    ready: int = 0  #: not before this
    start: int = -1
    end: int = -1
    waits: list[Op] = field(default_factory=list, repr=False)
    rate: float = 0.0
    since: int = 0
    planned: bool = False

    @property
    def device(self) -> int:
        """Where it ran."""
        return self.action.device


@dataclass(eq=False)
class _Stream:
    queue: deque[Op] = field(default_factory=deque)
    last: Op | None = None
    ended: int = -(1 << 60)
    waits: list[Op] = field(default_factory=list)  # for what is launched next
    aside: int = 0  # how much of what a change moved aside it has waited for

    @property
    def tail(self) -> list[Op]:
        """What is over when all that the stream was given is over."""
        return [*([self.last] if self.last else []), *self.waits]


@dataclass(eq=False)
class _Thread:
    number: int
    at: int = 0
    open: list[tuple[str, int]] = field(default_factory=list)
    launched: bool = False  # and has done nothing but launch since
    behind: list[Op] = field(default_factory=list)  # what blocking calls did not wait for: the GPU does instead


@dataclass(frozen=True)
class Call:
    """A CUDA call as the profiler sees it; `waits_on` is the device and stream of a synchronisation.

    CUPTI gives the wait of a stream the stream that waits, and that of an event or a device no stream.
    """

    name: str
    thread: int
    start: int
    end: int
    op: Op | None = None
    waits_on: tuple[int, int] | None = None
    driver: bool = False


@dataclass
class Played:
    """What a profiler would have seen of one play; times in ns.

    Attributes
    ----------
    ops : list of Op
        In order of launch, with those that the trace does not contain.
    calls, ranges, os_calls, overheads
        ``(name, thread, start, end)`` of ranges, OS calls and overheads.
    """

    ops: list[Op] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    ranges: list[tuple[str, int, int, int]] = field(default_factory=list)
    os_calls: list[tuple[str, int, int, int]] = field(default_factory=list)
    overheads: list[tuple[str, int, int, int]] = field(default_factory=list)

    @property
    def recorded(self) -> list[Op]:
        """Operations that the trace contains."""
        return [op for op in self.ops if op.kind != "foreign"]

    @property
    def steps(self) -> list[tuple[int, int]]:
        """Start and E of each step: the latest of the E before it, its CPU end, and the end of what it launched."""
        ranges = sorted((start, end) for name, thread, start, end in self.ranges if thread == 0 and _STEP.match(name))
        out: list[tuple[int, int]] = []
        for (start, end), following in zip(ranges, [*ranges[1:], ranges[-1][1:]] if ranges else [], strict=True):
            gpu = [op.end for op in self.recorded if start <= op.called < following[0]]
            out.append((start, max([end, *gpu, *(e for _, e in out[-1:])])))
        return out

    @property
    def wall_ns(self) -> int:
        """Length of the window: of the steps where there are any, else of the GPU's work."""
        if steps := self.steps:
            return steps[-1][1] - steps[0][0]
        return max(op.end for op in self.recorded) - min(op.start for op in self.recorded)

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write what the profiler saw as an SQLite export of Nsight Systems.

        Parameters
        ----------
        path : path-like
            Replaced when it exists.
        """
        out = Export(gpus=max(op.device for op in self.ops) + 1)
        process = Export.process(PID)
        main = Export.thread(PID, PID)
        for call in self.calls:
            if call.waits_on:
                device, stream = call.waits_on
                out.synchronize(call.name, main + call.thread, call.start, call.end, device=device, stream=stream)
                continue
            correlation = out.call(call.name, main + call.thread, call.start, call.end, driver=call.driver)
            if call.op:
                _write_op(out, call.op, correlation, process)
        for rows, write in ((self.ranges, out.range), (self.os_calls, out.os_call), (self.overheads, out.overhead)):
            for name, number, start, end in rows:
                write(name, main + number, start, end)
        return out.write(path)


def _write_op(out: Export, op: Op, correlation: int, process: int) -> None:
    place: dict[str, Any] = {"device": op.device, "stream": op.stream}
    if isinstance(op.action, Copy):
        copy = op.action
        out.copy(copy.kind, op.start, op.end, correlation, process, copy.size, host=copy.host, **place)
    elif isinstance(op.action, Graph) and not op.action.by_node:
        out.graph(op.start, op.end, correlation, process, **place)
    else:
        # Kernels in order, with what is left of a microsecond between a graph's, stretched as the whole was.
        stretch = (op.end - op.start) / sum(ns + BEHIND_NS for _, ns in op.nodes)
        begun = float(op.start)
        for number, (name, ns) in enumerate(op.nodes, 1):
            end = op.end if number == len(op.nodes) else int(begun + ns * stretch)
            node = number if op.kind == "graph" else 0
            out.kernel(name, int(begun), end, correlation, process, node=node, **place)
            begun += (ns + BEHIND_NS) * stretch


#: What puts an operation into its stream, and how long it takes, in ns.
_CALLS: dict[type, tuple[str, int]] = {
    Launch: ("cudaLaunchKernel_v7000", CALL_NS),
    Graph: ("cudaGraphLaunch_v10000", 2 * CALL_NS),
    Copy: ("cudaMemcpyAsync_v3020", CALL_NS),
}
#: What captures a CUDA graph of twenty launches: the calls, and their shares of its time.
_CAPTURE = [
    ("cudaStreamBeginCapture_v10000", 1), *[("cudaLaunchKernel_v7000", 1)] * 20,
    ("cudaStreamEndCapture_v10000", 3), ("cudaGraphInstantiate_v12000", 8),
]  # fmt: skip
#: What a thread yields: the time to go on at, or the condition that must hold.
_Steps = Generator[int | Callable[[], bool], None, None]


class _Simulation:
    """One play: a heap of events, the threads and streams, and the program's changes where an action is carried out."""

    def __init__(self, program: Program, seed: int, changes: Sequence[str]) -> None:
        self.program = program
        self.seed = seed
        self.changes = {name: of for name, _, of in (change.partition(":") for change in changes)}
        self.now = 1_000_000_000  # an export's clock rarely starts at an event
        self.events: list[tuple[int, int, Callable[[], None]]] = []
        self.counter = itertools.count()
        self.blocked: list[tuple[Callable[[], bool], _Steps]] = []  # threads, and what they wait for
        self.out = Played()
        self.streams: dict[tuple[int, int], _Stream] = defaultdict(_Stream)
        self.running: dict[int, list[Op]] = defaultdict(list)
        self.recorded: dict[str, list[Op]] = {}
        self.arrived: dict[int, list[Op]] = defaultdict(list)
        self.signalled = Counter[str]()
        self.awaited = Counter[str]()  # the first await takes the first signal
        self.batches: dict[str, list[tuple[int, int]]] = defaultdict(list)  # of a loader: ready, taken
        self.aside: dict[int, list[Op]] = defaultdict(list)  # what a change moved aside, the last of each step
        launches = [a for a in itertools.chain.from_iterable(program.threads) if isinstance(a, Launch | Graph)]
        self.members = Counter(a.key for a in launches if a.key is not None)
        compute: Counter[int] = Counter()
        for a in (a for a in launches if a.key is None):
            compute[a.device] += sum(ns for _, ns in a.nodes)
        mean = sum(compute.values()) / max(1, len(compute))
        self.even = {d: mean / ns if "equal-ranks" in self.changes and self.members else 1 for d, ns in compute.items()}

    def run(self) -> Played:
        for number, actions in enumerate(self.program.threads):
            self._go_on(self._thread(_Thread(number), actions))
        while self.events:
            self.now, _, do = heapq.heappop(self.events)
            do()
        if self.blocked or any(op.end < 0 for op in self.out.ops):
            raise ValueError(f"{self.program.name} waits for something that never happens")
        return self.out

    def at(self, time: int, do: Callable[[], None]) -> None:
        heapq.heappush(self.events, (time, next(self.counter), do))

    def _go_on(self, steps: _Steps) -> None:
        """Carry a thread out up to a time that it names, a condition that does not hold yet, or its end."""
        until = next((until for until in steps if isinstance(until, int) or not until()), None)
        if isinstance(until, int):
            self.at(max(until, self.now), partial(self._go_on, steps))
        elif until is not None:
            self.blocked.append((until, steps))

    def _settle(self) -> None:
        """Something has happened: let go on what waited for it."""
        blocked = self.blocked
        self.blocked = []
        for condition, steps in blocked:
            if condition():
                self._go_on(steps)
            else:
                self.blocked.append((condition, steps))
        for stream in self.streams.values():
            self._plan(stream)

    def _draw(self, ns: float, *identity: object, spread: int = 1) -> int:
        """`ns` with the jitter of that identity, so many times the program's."""
        digest = blake2b(repr((self.seed, identity)).encode(), digest_size=8).digest()
        unit = int.from_bytes(digest, "big") / (1 << 63) - 1
        return round(ns * (1 + spread * self.program.jitter * unit))

    # The host: one generator an action.

    def _thread(self, thread: _Thread, actions: Sequence[Action]) -> _Steps:
        carry_out: dict[type, Callable[[_Thread, Any], _Steps | None]] = {
            Cpu: self._work, Load: self._load, Sleep: self._work, Launch: self._launch, Graph: self._launch,
            Copy: self._launch, Sync: self._sync, Record: self._record, WaitEvent: self._wait_event,
            Foreign: self._foreign, Await: self._await, Capture: self._capture, Stall: self._stall,
            Profiler: self._profiler, Pop: self._pop,
            Signal: self._signal,
            Push: lambda thread, a: thread.open.append((a.name, self.now)),
        }  # fmt: skip
        for thread.at, action in enumerate(actions):
            yield from carry_out[type(action)](thread, action) or ()
            if isinstance(action, Cpu | Load | Sync | Await | Capture | Stall | Profiler):
                thread.launched = False

    def _lasting(self, thread: _Thread, ns: float, what: str = "cpu") -> int:
        return self._draw(ns, thread.number, thread.at, what)

    def _call(self, name: str, thread: _Thread, start: int, op: Op | None = None, **more: Any) -> None:
        self.out.calls.append(Call(name, thread.number, start, self.now, op, **more))

    def _calling(self, thread: _Thread, name: str, ns: int, **more: Any) -> _Steps:
        """Spend that time in a call."""
        begun = self.now
        if ns:
            yield self.now + ns
        self._call(name, thread, begun, **more)

    def _spent(self, thread: _Thread, begun: int, name: str | None, call: str = "") -> None:
        """Show the time since then as a range, where it has a name, and in an OS call, where there was one."""
        edge = (self.now - begun) // 200
        if call and edge:
            self.out.os_calls.append((call, thread.number, begun + edge, self.now - edge))
        if name:
            self.out.ranges.append((name, thread.number, begun, self.now))

    def _is_removed(self, name: str | None) -> bool:
        """Whether a change takes this work's time; for ``no-cpu-work`` names that differ in a number only are one."""
        removed = self.changes.get("no-cpu-work")
        return removed in ("", name, re.sub(r"\d+", "*", name)) if name else "no-unnamed" in self.changes

    def _work(self, thread: _Thread, a: Cpu) -> _Steps:
        begun = self.now
        if not ("no-start-up" in self.changes if a.once else self._is_removed(a.name)):
            yield self.now + self._lasting(thread, a.ns)
        self._spent(thread, begun, a.name, "clock_nanosleep" if isinstance(a, Sleep) else "")

    def _load(self, thread: _Thread, a: Load) -> _Steps:
        begun = self.now
        until = self.now + self._lasting(thread, a.ns)
        if a.loader:
            every, depth = self.program.loaders[a.loader]
            batches = self.batches[a.loader]
            number = len(batches)
            room = batches[number - depth][1] if number >= depth else 0
            before = batches[-1][0] if batches else begun - every * depth
            ready = max(before, room) + self._draw(every, a.loader, number)
            until = max(until, ready)
            batches.append((ready, until))
        if "no-input-wait" not in self.changes:
            yield until
        self._spent(thread, begun, a.name, "poll" if a.loader else "read")

    def _launch(self, thread: _Thread, a: Launch | Graph | Copy) -> _Steps:
        op = self._operation(thread, a)
        (name, call) = _CALLS[type(a)]
        dispatch = self._lasting(thread, a.dispatch if isinstance(a, Launch) else DISPATCH_NS, "dispatch")
        call = self._lasting(thread, call, "call")
        if "free-launches" in self.changes:  # from the beginning of a call to that of the next
            call = min(call, FREE_NS)
            dispatch = min(dispatch, FREE_NS - call) if thread.launched else dispatch
        thread.launched = True
        yield self.now + dispatch
        begun = op.called = self.now
        copy = a if isinstance(a, Copy) else None
        if copy and copy.staging and "overlap-copies" not in self.changes:
            yield self.now + self._lasting(thread, copy.staging)
        if isinstance(a, Launch) and a.once and "no-start-up" not in self.changes:
            yield self.now + self._lasting(thread, a.once, "once")
            if a.once_call:
                self._call(a.once_call, thread, begun + 1_000, driver=True)
            if a.overhead:
                self.out.overheads.append((a.overhead, thread.number, begun + 1_000, self.now))
        yield from self._enqueue(thread, op)
        yield self.now + call
        if copy and copy.blocking and "no-sync" in self.changes:
            thread.behind.append(op)
        elif copy and copy.blocking:
            if "overlap-copies" not in self.changes:
                yield from self._until(thread, [op])
            elif copy.kind == "DtoH":
                # The values still have to be there: only the copy itself moves aside.
                yield from self._until(thread, self.streams[a.device, a.stream].tail)
            thread.launched = False
        self._call("cudaMemcpy_v3020" if copy and copy.blocking else name, thread, begun, op)

    def _operation(self, thread: _Thread, a: Launch | Graph | Copy) -> Op:
        """What a call puts into its stream."""
        behind = self._lasting(thread, BEHIND_NS, "behind")
        if isinstance(a, Copy):
            stream = 1010 if "overlap-copies" in self.changes else a.stream
            return Op("copy", a, stream, self._lasting(thread, a.ns, "gpu"), behind)
        nodes = tuple((name, round(ns * self._scale(name))) for name, ns in a.nodes)
        if a.key is not None:
            stream = 1020 if "overlap-communication" in self.changes else a.stream
            return Op("collective", a, stream, self._draw(nodes[0][1], "collective", a.key), behind, nodes)
        graph = isinstance(a, Graph)
        work = sum(ns * self.even[a.device] + BEHIND_NS * graph for _, ns in nodes)
        return Op("graph" if graph else "kernel", a, a.stream, self._lasting(thread, work, "gpu"), behind, nodes)

    def _scale(self, name: str) -> float:
        """How many times as long a kernel of that name takes."""
        if "without" in self.changes and re.search(self.changes["without"], name):
            return 0
        pattern, _, factor = self.changes.get("scale", "").rpartition("=")
        return float(factor) if factor and re.search(pattern, name) else 1

    def _until(self, thread: _Thread, ops: Sequence[Op]) -> _Steps:
        """A blocking call returns: a latency after the last of what it waits for."""
        look = self.now + LOOK_NS
        latency = self._draw(RETURN_NS, thread.number, thread.at, "return", spread=4)
        yield lambda: all(op.end >= 0 for op in ops)
        yield max([look, *(op.end + latency for op in ops)])

    def _sync(self, thread: _Thread, a: Sync) -> _Steps:
        begun = self.now
        streams = self.streams
        every = [s for (device, number), s in streams.items() if device == a.device and number < 1000]
        ops = {
            "stream": streams[a.device, a.stream].tail,
            "event": self.recorded.get(a.event, []),
            "device": [op for stream in every for op in stream.tail],
        }
        if "no-sync" in self.changes:
            thread.behind += ops[a.what]
            return
        yield from self._until(thread, ops[a.what])
        place = a.device, a.stream if a.what == "stream" else _NO_STREAM
        self._call(f"cuda{a.what.capitalize()}Synchronize", thread, begun, waits_on=place)

    def _record(self, thread: _Thread, a: Record) -> _Steps:
        self.recorded[a.event] = self.streams[a.device, a.stream].tail
        return self._calling(thread, "cudaEventRecord_v3020", self._noting(thread))

    def _wait_event(self, thread: _Thread, a: WaitEvent) -> _Steps | None:
        self.streams[a.device, a.stream].waits += self.recorded.get(a.event, [])
        if not a.shown:
            return None
        return self._calling(thread, "cudaStreamWaitEvent", self._noting(thread), waits_on=(a.device, a.stream))

    def _noting(self, thread: _Thread) -> int:
        """Time of a call that records an event, or waits for one."""
        return 0 if "free-launches" in self.changes else self._lasting(thread, NOTE_NS)

    def _foreign(self, thread: _Thread, a: Foreign) -> _Steps:
        if "no-foreign" not in self.changes:
            op = Op("foreign", a, a.stream, self._lasting(thread, a.ns, "gpu"), 0, called=self.now)
            yield from self._enqueue(thread, op)

    def _signal(self, _: _Thread, a: Signal) -> None:
        self.signalled[a.name] += 1
        self._settle()

    def _await(self, thread: _Thread, a: Await) -> _Steps:
        begun = self.now
        number = self.awaited[a.name]
        self.awaited[a.name] += 1
        if self.signalled[a.name] > number:
            return
        yield lambda: self.signalled[a.name] > number
        yield self.now + self._lasting(thread, WAKE_NS)
        if a.shown:
            self.out.os_calls.append(("pthread_cond_wait", thread.number, begun, self.now))

    def _capture(self, thread: _Thread, a: Capture) -> _Steps:
        part = self._lasting(thread, a.ns) // sum(share for _, share in _CAPTURE)
        for name, share in _CAPTURE if "no-start-up" not in self.changes else ():
            yield from self._calling(thread, name, part * share)

    def _stall(self, thread: _Thread, a: Stall) -> _Steps:
        ns = STALL_NS if "no-start-up" in self.changes else a.ns
        return self._calling(thread, a.call, self._lasting(thread, ns))

    def _profiler(self, thread: _Thread, a: Profiler) -> _Steps:
        begun = self.now
        if "no-profiler" not in self.changes:
            yield self.now + self._lasting(thread, a.ns)
            self.out.overheads.append(("CUPTI buffer flush", thread.number, begun, self.now))

    def _pop(self, thread: _Thread, _: Pop) -> None:
        name, begun = thread.open.pop()
        self.out.ranges.append((name, thread.number, begun, self.now))
        if _STEP.match(name) and thread.number == 0:
            for (device, number), stream in self.streams.items():
                if number >= 1000 and stream.last is not None:
                    self.aside[device].append(stream.last)

    # The devices.

    def _enqueue(self, thread: _Thread, op: Op) -> _Steps:
        stream = self.streams[op.device, op.stream]
        yield lambda: len(stream.queue) < QUEUE
        op.queued = self.now
        op.ready = self.now + self._draw(START_NS, thread.number, thread.at, "start", spread=2)
        op.waits = stream.waits
        stream.waits = []
        op.waits += [other for other in thread.behind if (other.device, other.stream) != (op.device, op.stream)]
        if op.stream < 1000:
            op.waits += self.aside[op.device][stream.aside :]
            stream.aside = len(self.aside[op.device])
        stream.last = op
        stream.queue.append(op)
        self.out.ops.append(op)
        self._plan(stream)

    def _plan(self, stream: _Stream) -> None:
        """Start the first in the queue as soon as all it waits for is over."""
        op = stream.queue[0] if stream.queue else None
        if op is not None and not op.planned and all(other.end >= 0 for other in op.waits):
            op.planned = True
            start = max([op.ready, stream.ended + op.behind, *(other.end + EVENT_NS for other in op.waits)])
            self.at(start, partial(self._begin, op))

    def _begin(self, op: Op) -> None:
        op.start = op.since = self.now
        ending = [op]
        a = op.action
        if isinstance(a, Launch) and a.key is not None and "equal-ranks" not in self.changes:
            arrived = self.arrived[a.key]
            arrived.append(op)
            ending = arrived if len(arrived) == self.members[a.key] else []
        if op.kind in ("foreign", "collective"):
            for one in ending:
                self.at(self.now + round(one.left), partial(self._end, one))
        else:
            self.running[op.device].append(op)
            self._share(op.device)

    def _share(self, device: int) -> None:
        """Kernels slow each other down, and copies slow kernels down."""
        running = self.running[device]
        copies = sum(op.kind == "copy" for op in running)
        slow = 1 + self.program.contention * (len(running) - copies - 1) + self.program.copy_contention * copies
        for op in running:
            rate = 1.0 if op.kind == "copy" else 1 / slow
            if rate != op.rate:
                op.left -= (self.now - op.since) * op.rate
                op.rate = rate
                op.since = self.now
                self.at(self.now + math.ceil(op.left / rate - 1e-6), partial(self._end, op, rate, self.now))

    def _end(self, op: Op, rate: float | None = None, since: int | None = None) -> None:
        if op.end >= 0 or (rate is not None and (op.rate, op.since) != (rate, since)):
            return  # the operation has been slowed down or sped up since
        op.end = self.now
        stream = self.streams[op.device, op.stream]
        stream.queue.popleft()
        stream.ended = self.now
        if op in self.running[op.device]:
            self.running[op.device].remove(op)
            self._share(op.device)
        self._settle()


def play(program: Program, seed: int = 0, change: str | Sequence[str] | None = None) -> Played:
    """Play a program, perhaps with a change made to it.

    Parameters
    ----------
    program : Program
    seed : int
        Of the jitter.
    change : str or sequence of str, optional
        A change, or several at once, by the names that ``whatif`` has for them:

        - ``no-input-wait``: batches are there;
        - ``no-sync``: blocking calls return at once, copies run all the same and are staged as before; what the thread
          launches later waits on the GPU for what the calls would have waited for;
        - ``free-launches``: 3 µs from the start of one launch call to the next where only dispatch lies between them;
        - ``no-cpu-work``, ``no-cpu-work:NAME``: ranges of CPU work without their time;
        - ``no-start-up``, ``no-profiler``: what happens once at its ordinary cost, nothing for the profiler;
        - ``overlap-copies``, ``overlap-communication``: on a stream of their own, without staging, for which only the
          next step's GPU work waits; a blocking read still waits for what it reads;
        - ``equal-ranks``: each device does the average of all kernels' time, and a collective takes its transfer only;
        - ``without:REGEX``, ``scale:REGEX=F``: kernels' time on the GPU; their launches stay.

        Two more are not changes that one can make, but say what the rest costs: ``no-foreign`` (nothing outside the
        trace) and ``no-unnamed`` (CPU work that no range names).

    Returns
    -------
    Played
    """
    return _Simulation(program, seed, [change] if isinstance(change, str) else change or ()).run()
