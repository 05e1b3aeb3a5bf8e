"""Synthetic Nsight Systems exports with known answers. They never ran on a GPU, and pages that show one say so.

:class:`Export` writes any events as an SQLite export. :func:`training` lays out a training loop with one
planted fault and returns what is true of it by construction: what the analyses must find.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

__all__ = ["BOTTLENECK_OF", "Export", "Fault", "length", "training", "union"]

Fault = Literal[
    "starved",
    "starved-unnamed",
    "sync",
    "device-sync",
    "tiny",
    "pageable",
    "pinned",
    "augment",
    "overhead",
    "recompiled",
    "elementwise",
    "reduce",
    "uneven",
    "graphs",
    "untraced",
    "prefetched",
    "reduce-hidden",
    "sync-queued",
    "tiny-hidden",
    "loading-ahead",
]

#: What a verdict must find in each planted loop: None is the one without a fault, the last five are decoys.
BOTTLENECK_OF: dict[Fault | None, str] = {
    None: "compute-bound",
    "starved": "input-pipeline",
    "starved-unnamed": "input-pipeline",
    "sync": "synchronization",
    "device-sync": "synchronization",
    "tiny": "launch-overhead",
    "pageable": "memory-transfer",
    "pinned": "memory-transfer",
    "augment": "cpu-work",
    "overhead": "profiler",
    "recompiled": "recompilation",
    "elementwise": "memory-bound",
    "reduce": "communication",
    "uneven": "imbalance",
    "graphs": "not-enough-data",
    "untraced": "not-enough-data",
    "prefetched": "compute-bound",
    "reduce-hidden": "compute-bound",
    "sync-queued": "compute-bound",
    "tiny-hidden": "compute-bound",
    "loading-ahead": "compute-bound",
}

_ON_DEVICE = (
    "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, "
    "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER"
)
#: Columns as nsys 2024.6 exports them; those that no analysis reads are left out.
_SCHEMA = {
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    "META_DATA_EXPORT": "name TEXT NOT NULL, value TEXT",
    "META_DATA_CAPTURE": "name TEXT NOT NULL, value TEXT",
    "TARGET_INFO_GPU": (
        "id INTEGER, name TEXT, totalMemory INTEGER, smCount INTEGER, computeMajor INTEGER, computeMinor INTEGER"
    ),
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        f"{_ON_DEVICE}, demangledName INTEGER NOT NULL, "
        "shortName INTEGER NOT NULL, registersPerThread INTEGER NOT NULL, gridX INTEGER NOT NULL, "
        "gridY INTEGER NOT NULL, gridZ INTEGER NOT NULL, blockX INTEGER NOT NULL, "
        "blockY INTEGER NOT NULL, blockZ INTEGER NOT NULL, "
        "staticSharedMemory INTEGER NOT NULL, dynamicSharedMemory INTEGER NOT NULL, graphNodeId INTEGER"
    ),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (
        f"{_ON_DEVICE}, bytes INTEGER NOT NULL, "
        "copyKind INTEGER NOT NULL, srcKind INTEGER, dstKind INTEGER, graphNodeId INTEGER"
    ),
    "CUPTI_ACTIVITY_KIND_MEMSET": (
        f"{_ON_DEVICE}, value INTEGER NOT NULL, bytes INTEGER NOT NULL, graphNodeId INTEGER, memKind INTEGER"
    ),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": (f"{_ON_DEVICE}, graphId INTEGER, graphExecId INTEGER"),
    "CUPTI_ACTIVITY_KIND_RUNTIME": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER, "
        "correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL"
    ),
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": (f"{_ON_DEVICE}, syncType INTEGER NOT NULL"),
    "NVTX_EVENTS": (
        "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, text TEXT, "
        "globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER"
    ),
    "OSRT_API": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, globalTid INTEGER, nameId INTEGER NOT NULL, "
        "returnValue INTEGER NOT NULL"
    ),
    "COMPOSITE_EVENTS": (
        "id INTEGER NOT NULL PRIMARY KEY, start INTEGER NOT NULL, cpu INTEGER, threadState INTEGER, "
        "globalTid INTEGER, cpuCycles INTEGER NOT NULL"
    ),
    "SAMPLING_CALLCHAINS": (
        "id INTEGER NOT NULL, symbol INTEGER NOT NULL, module INTEGER NOT NULL, kernelMode INTEGER, "
        "unresolved INTEGER, stackDepth INTEGER NOT NULL"
    ),
    "PROFILER_OVERHEAD": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, globalTid INTEGER, nameId INTEGER, returnValue INTEGER"
    ),
}
#: Tables that exist in every export; the others only when something of theirs happened.
_ALWAYS = ("StringIds", "META_DATA_EXPORT", "META_DATA_CAPTURE", "TARGET_INFO_GPU")

_COPY_KIND = {"HtoD": 1, "DtoH": 2, "DtoD": 8, "HtoH": 9, "PtoP": 10}
_MEMORY = {"pageable": 0, "pinned": 1, "device": 2}
_SYNC = {
    "cudaEventSynchronize": 1,
    "cudaStreamWaitEvent": 2,
    "cudaStreamSynchronize": 3,
    "cudaDeviceSynchronize": 4,
}


class Export:
    """Events on their way into an SQLite export. Times are nanoseconds on the export's clock.

    Parameters
    ----------
    gpus : int
        How many GPUs the export lists. Their name says that they are synthetic.
    """

    def __init__(self, gpus: int = 1) -> None:
        self._rows: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
        self._strings: dict[str, int] = {}
        self.correlations = itertools.count(101)
        self._domains: dict[str, int] = {"": 0}
        for device in range(gpus):
            self._rows["TARGET_INFO_GPU"].append((device, "Synthetic GPU (planted trace)", 1 << 34, 100, 0, 0))
        self._rows["META_DATA_EXPORT"] += [("EXPORT_PRODUCT_VERSION", "planted"), ("EXPORT_SCHEMA_VERSION", "3.16.1")]
        self._rows["META_DATA_CAPTURE"] += [("CAPTURE_EVENT_TYPE", t) for t in ("Cuda", "NvtxEvents", "OSRuntime")]

    def string(self, text: str) -> int:
        """Id of a text."""
        return self._strings.setdefault(text, len(self._strings) + 1)

    @staticmethod
    def process(pid: int) -> int:
        """Nsys's global process id."""
        return (1 << 56) | (pid << 24)

    @classmethod
    def thread(cls, pid: int, tid: int) -> int:
        """Nsys's global thread id; the model's thread is its lower 48 bits."""
        return cls.process(pid) | tid

    def call(
        self, name: str, thread: int, start: int, end: int, correlation: int | None = None, *, driver: bool = False
    ) -> int:
        """A CUDA API call; returns its correlation id."""
        correlation = next(self.correlations) if correlation is None else correlation
        self._rows["CUPTI_ACTIVITY_KIND_RUNTIME"].append(
            (start, end, int(driver), thread, correlation, self.string(name), 0)
        )
        return correlation

    def _on_device(
        self, kind: str, start: int, end: int, device: int, stream: int, correlation: int, process: int, *rest: object
    ) -> None:
        self._rows[f"CUPTI_ACTIVITY_KIND_{kind}"].append((start, end, device, 1, stream, correlation, process, *rest))

    def kernel(
        self,
        name: str,
        start: int,
        end: int,
        correlation: int,
        process: int,
        *,
        device: int = 0,
        stream: int = 7,
        node: int = 0,
    ) -> None:
        """A kernel."""
        short = re.split(r"[<(]", name, maxsplit=1)[0].rpartition("::")[2].removeprefix("void ")
        shape = 32, 64, 1, 1, 256, 1, 1, 0, 0
        ids = self.string(name), self.string(short)
        self._on_device("KERNEL", start, end, device, stream, correlation, process, *ids, *shape, node or None)

    def copy(
        self,
        kind: str,
        start: int,
        end: int,
        correlation: int,
        process: int,
        size: int,
        *,
        host: str = "pageable",
        device: int = 0,
        stream: int = 7,
    ) -> None:
        """A copy; `host` is the kind of its host memory."""
        memory = {"HtoD": (host, "device"), "DtoH": ("device", host)}.get(kind, ("device", "device"))
        kinds = _COPY_KIND[kind], *(_MEMORY[m] for m in memory)
        self._on_device("MEMCPY", start, end, device, stream, correlation, process, size, *kinds, None)

    def memset(self, start: int, end: int, correlation: int, process: int, size: int, *, stream: int = 7) -> None:
        """A memset of device memory."""
        self._on_device("MEMSET", start, end, 0, stream, correlation, process, 0, size, None, 2)

    def graph(self, start: int, end: int, correlation: int, process: int, *, device: int = 0, stream: int = 7) -> None:
        """A CUDA-graph replay, recorded as one interval."""
        self._on_device("GRAPH_TRACE", start, end, device, stream, correlation, process, 1, 1)

    def synchronize(self, name: str, thread: int, start: int, end: int, *, device: int = 0, stream: int = 7) -> None:
        """A synchronising call and the activity that goes with it."""
        ids = self.call(name, thread, start, end), thread & ~0xFFFFFF
        self._on_device("SYNCHRONIZATION", start, end, device, stream, *ids, _SYNC[name])

    def range(
        self, name: str, thread: int, start: int, end: int | None, *, domain: str = "", registered: bool = True
    ) -> None:
        """An NVTX push/pop range; `end` None leaves it open, `registered` False writes the text into the row."""
        text, text_id = (None, self.string(name)) if registered else (name, None)
        rows = self._rows["NVTX_EVENTS"]
        if domain not in self._domains:
            self._domains[domain] = len(self._domains)
            rows.append((0, None, 75, None, domain, thread, None, None, self._domains[domain]))
        rows.append((start, end, 59, None, text, thread, thread, text_id, self._domains[domain]))

    def start_end(self, name: str, thread: int, start: int, end: int, *, end_thread: int | None = None) -> None:
        """An NVTX start/end range, which may end on another thread."""
        rows = self._rows["NVTX_EVENTS"]
        rows.append((start, end, 60, len(rows) + 1, None, thread, end_thread or thread, self.string(name), 0))

    def os_call(self, name: str, thread: int, start: int, end: int) -> None:
        """An operating-system call."""
        self._rows["OSRT_API"].append((start, end, thread, self.string(name), 0))

    def overhead(self, name: str, thread: int, start: int, end: int) -> None:
        """Time the profiler took for itself."""
        self._rows["PROFILER_OVERHEAD"].append((start, end, thread, self.string(name), 0))

    def sample(self, thread: int, start: int, *frames: tuple[str, str], state: int = 1) -> None:
        """A sample of a thread, running in `state` 1; `frames` are functions with their modules, innermost first."""
        rows = self._rows["COMPOSITE_EVENTS"]
        rows.append((len(rows) + 1, start, 0, state, thread, 1_000_000))
        for depth, (function, module) in enumerate(frames):
            flags = module.startswith("["), function.startswith("0x")
            ids = len(rows), self.string(function), self.string(module)
            self._rows["SAMPLING_CALLCHAINS"].append((*ids, *(int(flag) or None for flag in flags), depth))

    def forget(self, tables: str) -> None:
        """Leave out what was planted in tables whose name begins so, as if it had not been traced."""
        for table in [t for t in self._rows if t.startswith(tables) and t not in _ALWAYS]:
            del self._rows[table]

    def write(self, path: str | os.PathLike[str], *, shuffle: int | None = None) -> Path:
        """Write the export.

        Parameters
        ----------
        path : path-like
            Replaced when it exists.
        shuffle : int, optional
            Seed to write the rows of each table in random order: real exports promise none.
        """
        path = Path(path)
        path.unlink(missing_ok=True)
        self._rows["StringIds"] = [(i, t) for t, i in self._strings.items()]
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            for table, columns in _SCHEMA.items():
                rows = self._rows.get(table, [])
                if shuffle is not None:
                    random.Random(shuffle).shuffle(rows)  # no secret
                if rows or table in _ALWAYS:
                    connection.execute(f"CREATE TABLE {table} ({columns})")
                    marks = ", ".join("?" * (columns.count(",") + 1))
                    connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
        return path


_US = 1_000
#: The process that nsys watched.
PID = 4242
#: Kernels of the planted programs.
GEMM = "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x256_32x3_tn_align8>(T1::Params)"
_NORM = "void at::native::vectorized_layer_norm_kernel<float, float>(int, float, const float *, float *)"
POINT = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int, T2, T3)"
ADAM = "void at::native::multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>(T1)"
REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


class _Loop:
    """A training loop on one device: a CPU clock, a GPU clock, and the account of what was planted."""

    def __init__(self, seed: int, out: Export, *, device: int = 0, pid: int = PID, scale: float = 1.0) -> None:
        self.out = out
        self.device = device
        self.scale = scale
        self.random = random.Random(seed)  # no secret
        self.process = Export.process(pid)
        self.main = Export.thread(pid, pid + device)
        self.autograd = Export.thread(pid, pid + device + 7)
        self.now = 1_000_000_000  # the CPU's clock; an export's clock rarely starts at an event
        self.free = 0  # when the GPU will have done all it was given
        self.work: dict[str, list[tuple[int, int]]] = defaultdict(list)  # by kind, a key of _EXPOSED
        self.aside: list[tuple[int, int]] = []  # of it, what ran on other streams
        self.gaps: dict[str, list[tuple[int, int]]] = defaultdict(list)  # by cause
        self.lasted: dict[str, dict[str, list[int]]] = {
            what: defaultdict(list) for what in ("kernels", "copies", "ranges")
        }
        self.cause = "launch-overhead"  # of the next gap, should there be one

    def jitter(self, ns: float) -> int:
        return int(ns * self.random.uniform(0.9, 1.1))

    def lasting(self, us: float) -> int:
        """Time of GPU work, which sizes scale and launches do not."""
        return self.jitter(us * _US * self.scale)

    def on_gpu(self, kind: str, ready: int, duration: int) -> int:
        start = max(ready, self.free)
        if 0 < self.free < start:
            self.gaps[self.cause].append((self.free, start))
        self.cause = "launch-overhead"
        self.free = start + duration
        self.work[kind].append((start, self.free))
        return start

    def call(self, name: str, every: int, thread: int | None = None) -> int:
        """A call of the CPU, which spends about `every` on it: one half dispatching, the other in the call."""
        every = self.jitter(every)
        self.now += every
        return self.out.call(name, thread or self.main, self.now - every // 2, self.now)

    def launch(self, name: str, duration: int, *, every: int = 6 * _US, thread: int | None = None) -> None:
        """One kernel."""
        correlation = self.call("cudaLaunchKernel_v7000", every, thread)
        self.kernel(name, self.on_gpu("kernels", self.now + 1_500, duration), duration, correlation)

    def launch_aside(self, name: str, start: int, duration: int, *, stream: int) -> None:
        """One kernel on another stream, to start when the caller says, but not before its launch."""
        correlation = self.call("cudaLaunchKernel_v7000", 6 * _US)
        start = max(start, self.now + 1_500)
        self.kernel(name, start, duration, correlation, stream)
        self._aside("collectives" if name == REDUCE else "kernels", start, duration)

    def _aside(self, kind: str, start: int, duration: int) -> None:
        self.work[kind].append((start, start + duration))
        self.aside.append((start, start + duration))

    def kernel(self, name: str, start: int, duration: int, correlation: int, stream: int = 7) -> None:
        self.out.kernel(name, start, start + duration, correlation, self.process, device=self.device, stream=stream)
        self.lasted["kernels"][name].append(duration)

    def replay(self, duration: int) -> None:
        """A CUDA graph, recorded as one interval."""
        correlation = self.call("cudaGraphLaunch_v10000", 12 * _US)
        start = self.on_gpu("kernels", self.now + 1_500, duration)
        self.out.graph(start, start + duration, correlation, self.process, device=self.device)

    def upload(self, size: int, duration: int, *, host: str, staging: int = 0) -> None:
        """A host-to-device copy; pageable memory is staged by the CPU before the GPU can start."""
        begun = self.now + 1 * _US
        ready = begun + 4 * _US + staging
        self.now = ready + 1 * _US
        correlation = self.out.call("cudaMemcpyAsync_v3020", self.main, begun, self.now)
        self._copy("HtoD", self.on_gpu("copies", ready, duration), duration, correlation, size, host)

    def prefetch(self, size: int) -> None:
        """A host-to-device copy from pinned memory on a stream of its own, under half of what is queued by then."""
        correlation = self.call("cudaMemcpyAsync_v3020", 6 * _US)
        start = max([self.now, *(end for _, end in self.aside[-1:])])
        duration = (self.free - start) // 2
        self._copy("HtoD", start, duration, correlation, size, "pinned", stream=13)
        self._aside("copies", start, duration)

    def _copy(
        self, kind: str, start: int, duration: int, correlation: int, size: int, host: str, stream: int = 7
    ) -> None:
        end = start + duration
        self.out.copy(kind, start, end, correlation, self.process, size, host=host, device=self.device, stream=stream)
        self.lasted["copies"][kind].append(duration)

    def read_back(self) -> None:
        """``.item()``: a tiny device-to-host copy, then a stream synchronisation that drains the GPU."""
        begun = self.now + 2 * _US
        self.now = begun + 5 * _US
        correlation = self.out.call("cudaMemcpyAsync_v3020", self.main, begun, self.now)
        self._copy("DtoH", self.on_gpu("copies", self.now, 1_200), 1_200, correlation, 4, "pageable")
        self.drain("cudaStreamSynchronize")

    def drain(self, call: str, early: int = 0) -> None:
        """Wait until the device has done all it was given, but for the last so many nanoseconds of it."""
        waiting = self.now + 1 * _US
        self.now = max(waiting, self.free - early) + 6 * _US
        self.out.synchronize(call, self.main, waiting, self.now, device=self.device)
        self.cause = "synchronization"

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        start = self.now
        yield
        self.now += 300
        self.out.range(name, self.main, start, self.now)
        self.lasted["ranges"][name].append(self.now - start)
        self.now += 200

    def truth(self) -> dict[str, Any]:
        """What is true by construction, of this device."""
        ran: list[tuple[int, int]] = []
        exposed = {}
        for kind, bottleneck in _EXPOSED.items():
            before = ran
            ran = union([*ran, *self.work[kind]])
            exposed[bottleneck] = length(ran) - length(before)
        span = ran[-1][1] - ran[0][0]
        busy = length(ran)
        hidden = length(union(self.aside))
        return {
            "span_ns": span,
            "busy_ns": busy,
            "idle_ns": span - busy,
            "gaps": {cause: ns for cause, dry in self.gaps.items() if (ns := length(union(self.aside + dry)) - hidden)},
            "exposed": exposed,
            **{what: {name: (len(ns), sum(ns)) for name, ns in lasted.items()} for what, lasted in self.lasted.items()},
        }


#: Kinds of work, by what bounds a program that waits for them; one that runs under an earlier one costs no time.
_EXPOSED = {
    "kernels": "kernels",
    "waiting": "imbalance",
    "collectives": "communication",
    "copies": "memory-transfer",
}


def union(parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge intervals the plain way, event by event: what the package's own arithmetic is held against."""
    out: list[tuple[int, int]] = []
    for start, end in sorted(parts):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((start, end))
    return out


def length(parts: list[tuple[int, int]]) -> int:
    """Add up the lengths of intervals that do not overlap."""
    return sum(end - start for start, end in parts)


def training(
    path: str | os.PathLike[str],
    fault: Fault | None = None,
    *,
    steps: int = 12,
    layers: int = 8,
    seed: int = 0,
    scale: float = 1.0,
    one_thread: bool = False,
) -> dict[str, Any]:
    """Write the trace of a planted training loop.

    Each step loads a batch, copies it to the device, runs forward (from the main thread), backward (from autograd's
    own thread, without ranges there) and the optimizer. The faults, one at a time:

    ``starved``
        The loader takes longer than the step: the main thread waits in ``next(it)`` (a range ``dataload``, with
        ``poll`` under it) while the device runs dry.
    ``starved-unnamed``
        The same, without a range that says so.
    ``sync``
        The loop reads a value back after each layer of the forward pass, as ``.item()`` does.
    ``device-sync``
        Each step ends with ``cudaDeviceSynchronize`` and some Python that nothing recorded.
    ``tiny``
        Each layer is hundreds of kernels of two microseconds, faster to run than to launch.
    ``pageable``
        Batches are copied from pageable memory, which the CPU must stage first.
    ``pinned``
        Batches are large and copied from pinned memory on the stream of the kernels, which wait.
    ``augment``
        The main thread prepares each batch itself, in a range ``augment``.
    ``overhead``
        The profiler writes its buffers out while the device has nothing to do.
    ``recompiled``
        Shapes change in each step from the fourth on, and torch.compile compiles for them.
    ``elementwise``
        Layers are norms and sums of tensors: the memory bounds them.
    ``reduce``
        Gradients are reduced after the backward pass, and the optimizer waits for it.
    ``uneven``
        Two devices, of which one has half of the other's work and waits for it in each reduction.
    ``graphs``
        Each step is the replay of one CUDA graph, whose kernels were not recorded.
    ``untraced``
        CUDA was not traced at all.

    And decoys, which look like a fault and cost next to nothing:

    ``prefetched``
        Large copies on a stream of their own, under kernels.
    ``reduce-hidden``
        Reductions on a stream of their own, under the backward pass.
    ``sync-queued``
        A synchronisation in each step, with an event that is behind in a full queue.
    ``tiny-hidden``
        Hundreds of tiny kernels with time between them, under large kernels of another stream.
    ``loading-ahead``
        Long ``dataload`` ranges, while the device works through a full queue.

    Parameters
    ----------
    path : path-like
        The SQLite export to write; replaced when it exists.
    fault : str, optional
        None for a loop that keeps the device busy.
    steps, layers : int
    seed : int
        Of the jitter on all durations, 10% either way.
    scale : float
        Of the durations of GPU work, and of what is planted beside it.
    one_thread : bool
        Launch the backward pass from the main thread as well.

    Returns
    -------
    dict
        What is true by construction: ``bottleneck`` (:data:`BOTTLENECK_OF`); ``span_ns, busy_ns, idle_ns``; ``gaps``
        (ns by cause); ``exposed`` (ns by bottleneck: copies that no kernel overlaps, collectives that none does, and
        waiting in them for the last device to arrive; ``kernels`` are all others); ``kernels`` (name to count and
        total_ns), ``copies`` (kind to count and total_ns), ``ranges`` (name to count and total_ns). Of several devices
        times are sums, and names are those of the first.
    """
    out = Export(gpus=2 if fault == "uneven" else 1)
    loops = [_Loop(seed, out, scale=scale)]
    if fault == "uneven":
        loops.append(_Loop(seed + 1, out, device=1, pid=PID + seed % 2, scale=scale / 2))
    for number in range(steps):
        with contextlib.ExitStack() as opened:
            for loop in loops:
                opened.enter_context(loop.range("step"))
                if fault == "graphs":
                    loop.upload(1 << 16, loop.lasting(9), host="pinned")
                    loop.replay(loop.lasting(_LAYER_US * layers))
                    continue
                _load(loop, fault, _LAYER_US * layers + _OPTIMIZER_US)
                if fault == "recompiled" and number > 2:
                    _compile(loop, number)
                with loop.range("forward"):
                    _layers(loop, fault, layers, _FORWARD, 100, loop.main)
                    if fault == "prefetched":
                        loop.prefetch(64 << 20)
                with loop.range("backward"):
                    _layers(loop, fault, layers, _BACKWARD, 150, loop.main if one_thread else loop.autograd)
                    if fault == "sync-queued":
                        loop.drain("cudaEventSynchronize", early=loop.lasting(0.4 * _LAYER_US * layers))
            if fault in ("reduce", "uneven"):
                _all_reduce(loops, _LAYER_US * layers * (0.7 if fault == "reduce" else 0.08))
            for loop in loops if fault != "graphs" else ():
                with loop.range("optimizer"):
                    loop.launch(ADAM, loop.lasting(_OPTIMIZER_US))
                if fault == "device-sync":
                    loop.drain("cudaDeviceSynchronize")
                    loop.now += loop.lasting(_LAYER_US * layers / 4)
    if fault == "untraced":
        out.forget("CUPTI")
    out.write(path)
    truths = [loop.truth() for loop in loops]
    sums = {key: sum(truth[key] for truth in truths) for key in ("span_ns", "busy_ns", "idle_ns")}
    for key in ("gaps", "exposed"):
        names = dict.fromkeys(name for truth in truths for name in truth[key])
        sums[key] = {name: sum(truth[key].get(name, 0) for truth in truths) for name in names}
    return {"bottleneck": BOTTLENECK_OF[fault], **truths[0], **sums}


#: Kernels of a layer and their time on the GPU; with that of the optimizer, what a step takes.
_FORWARD: list[tuple[str, float]] = [(_NORM, 25), (GEMM, 210), (POINT, 40)]
_BACKWARD: list[tuple[str, float]] = [(GEMM, 210), (GEMM, 210), (POINT, 40)]
_LAYER_US, _OPTIMIZER_US = sum(us for _, us in _FORWARD + _BACKWARD), 260


def _load(loop: _Loop, fault: Fault | None, step_us: float) -> None:
    """Get a batch and send it to the device."""
    with contextlib.nullcontext() if fault == "starved-unnamed" else loop.range("dataload"):
        if fault in ("starved", "starved-unnamed"):
            _wait(loop, loop.lasting(1.5 * step_us))
        elif fault == "loading-ahead" and loop.free > loop.now:
            _wait(loop, (loop.free - loop.now) // 2)
        else:
            loop.now += loop.jitter(8 * _US)
    if fault == "augment":
        with loop.range("augment"):
            loop.now += loop.lasting(1.5 * step_us)
    if fault == "overhead":
        start = loop.now
        loop.now += loop.lasting(1.5 * step_us)
        loop.out.overhead("CUPTI buffer flush", loop.main, start, loop.now)
    if fault in ("starved", "starved-unnamed", "augment", "overhead", "pageable"):
        loop.cause = BOTTLENECK_OF[fault]
    with loop.range("to_device"):
        if fault == "pageable":
            # The copy waits its turn in the queue, so let the device finish first: staging is what remains.
            loop.now = max(loop.now, loop.free - 20 * _US)
            duration = loop.lasting(0.4 * step_us)
            loop.upload(64 << 20, duration, host="pageable", staging=loop.lasting(0.8 * step_us))
        elif fault == "pinned":
            loop.upload(64 << 20, loop.lasting(0.35 * step_us), host="pinned")
        else:
            loop.upload(1 << 16, 9 * _US, host="pinned")


def _compile(loop: _Loop, number: int) -> None:
    """Compile the model again, with the ranges of torch.compile."""
    with loop.range("_compile.compile_inner (dynamo_timed)"):
        with loop.range(f"entire_frame_compile_data: fn_name=_compile.compile_inner, compile_id=0/{number - 2}"):
            loop.now += 1 * _US
        loop.now += loop.lasting(20_000)
    loop.cause = "recompilation"


def _wait(loop: _Loop, ns: int) -> None:
    """Wait for the loader, as a thread of its own or another process would have one wait."""
    loop.out.os_call("poll", loop.main, loop.now + ns // 200, loop.now + ns - ns // 200)
    loop.now += ns


def _layers(
    loop: _Loop, fault: Fault | None, layers: int, kernels: list[tuple[str, float]], tiny: int, thread: int
) -> None:
    """Pass through the layers in one direction: kernels of each or, where that is the fault, so many tiny ones.

    Tiny kernels are quicker to run than to launch; hidden ones run beside a large one.
    """
    for _ in range(layers):
        ready = loop.free  # the gradients of the layer before
        if fault == "tiny-hidden":
            start = loop.aside[-1][1] if loop.aside else loop.now
            loop.launch_aside(GEMM, start, loop.jitter(tiny * 12 * _US), stream=9)
        for _ in range(tiny if fault in ("tiny", "tiny-hidden") else 0):
            loop.launch(POINT, loop.jitter(2 * _US), every=9 * _US, thread=thread)
        for name, us in kernels if fault not in ("tiny", "tiny-hidden") else ():
            loop.launch(POINT if fault == "elementwise" and name == GEMM else name, loop.lasting(us), thread=thread)
        if fault == "sync" and kernels is _FORWARD:
            loop.read_back()
            loop.now += loop.lasting(120)
        if fault == "reduce-hidden" and kernels is _BACKWARD:
            loop.launch_aside(REDUCE, ready, (loop.free - ready) // 2, stream=20)


def _all_reduce(loops: list[_Loop], us: float) -> None:
    """A reduction over all devices, which can only begin when the last of them has arrived."""
    reached = [(loop.call("cudaLaunchKernelExC_v11060", 6 * _US), max(loop.now + 1_500, loop.free)) for loop in loops]
    arrived = max(ready for _, ready in reached)
    end = arrived + loops[0].lasting(us)
    for loop, (correlation, ready) in zip(loops, reached, strict=True):
        # On a stream of its own, for which the loop's stream waits, as it does for other devices.
        start = loop.on_gpu("collectives", ready, end - ready)
        loop.kernel(REDUCE, start, end - start, correlation, stream=20)
        loop.work["waiting"].append((start, arrived))
