"""Synthetic Nsight Systems exports with known answers. They never ran on a GPU, and pages that show one say so.

:class:`Export` writes any events as an SQLite export. :func:`training` lays out a training loop with one
planted fault and returns what is true of it by construction: what the analyses must find.
"""

from __future__ import annotations

import os
import random
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

__all__ = ["Export", "Fault", "training"]

Fault = Literal["starved", "sync", "tiny", "pageable"]

#: Columns as nsys 2024.6 exports them; those that no analysis reads are left out.
_SCHEMA = {
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    "META_DATA_EXPORT": "name TEXT NOT NULL, value TEXT",
    "META_DATA_CAPTURE": "name TEXT NOT NULL, value TEXT",
    "TARGET_INFO_GPU": (
        "id INTEGER, name TEXT, totalMemory INTEGER, smCount INTEGER, computeMajor INTEGER, computeMinor INTEGER"
    ),
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, "
        "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL, "
        "shortName INTEGER NOT NULL, registersPerThread INTEGER NOT NULL, gridX INTEGER NOT NULL, "
        "gridY INTEGER NOT NULL, gridZ INTEGER NOT NULL, blockX INTEGER NOT NULL, "
        "blockY INTEGER NOT NULL, blockZ INTEGER NOT NULL, "
        "staticSharedMemory INTEGER NOT NULL, dynamicSharedMemory INTEGER NOT NULL, graphNodeId INTEGER"
    ),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, "
        "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL, "
        "copyKind INTEGER NOT NULL, srcKind INTEGER, dstKind INTEGER, graphNodeId INTEGER"
    ),
    "CUPTI_ACTIVITY_KIND_MEMSET": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, "
        "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, value INTEGER NOT NULL, "
        "bytes INTEGER NOT NULL, graphNodeId INTEGER, memKind INTEGER"
    ),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, "
        "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, graphId INTEGER, graphExecId INTEGER"
    ),
    "CUPTI_ACTIVITY_KIND_RUNTIME": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER, "
        "correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL"
    ),
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, "
        "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, syncType INTEGER NOT NULL"
    ),
    "NVTX_EVENTS": (
        "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, text TEXT, "
        "globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER"
    ),
    "OSRT_API": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, globalTid INTEGER, nameId INTEGER NOT NULL, "
        "returnValue INTEGER NOT NULL"
    ),
    "PROFILER_OVERHEAD": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, globalTid INTEGER, nameId INTEGER, returnValue INTEGER"
    ),
}
#: Tables that exist in every export; the others only when something of theirs happened.
_ALWAYS = ("StringIds", "META_DATA_EXPORT", "META_DATA_CAPTURE", "TARGET_INFO_GPU")

_COPY_KIND = {"HtoD": 1, "DtoH": 2, "DtoD": 8, "HtoH": 9, "PtoP": 10}
_MEMORY = {"pageable": 0, "pinned": 1, "device": 2}
_SYNC = {"cudaEventSynchronize": 1, "cudaStreamSynchronize": 3, "cudaDeviceSynchronize": 4}


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
        self._correlation = 100
        self._domains: dict[str, int] = {"": 0}
        for device in range(gpus):
            self._rows["TARGET_INFO_GPU"].append((device, "Synthetic GPU (planted trace)", 1 << 34, 100, 0, 0))
        self._rows["META_DATA_EXPORT"] += [("EXPORT_PRODUCT_VERSION", "planted"), ("EXPORT_SCHEMA_VERSION", "3.16.1")]
        self._rows["META_DATA_CAPTURE"] += [("CAPTURE_EVENT_TYPE", t) for t in ("Cuda", "NvtxEvents", "OSRuntime")]

    def string(self, text: str) -> int:
        """Id of a text.

        Parameters
        ----------
        text : str
        """
        return self._strings.setdefault(text, len(self._strings) + 1)

    @staticmethod
    def process(pid: int) -> int:
        """Nsys's global process id."""
        return (1 << 56) | (pid << 24)

    @classmethod
    def thread(cls, pid: int, tid: int) -> int:
        """Nsys's global thread id; the model's thread is its lower 48 bits."""
        return cls.process(pid) | tid

    def next_correlation(self) -> int:
        """A fresh correlation id."""
        self._correlation += 1
        return self._correlation

    def call(
        self, name: str, thread: int, start: int, end: int, correlation: int | None = None, *, driver: bool = False
    ) -> int:
        """A CUDA API call; returns its correlation id."""
        correlation = self.next_correlation() if correlation is None else correlation
        self._rows["CUPTI_ACTIVITY_KIND_RUNTIME"].append(
            (start, end, int(driver), thread, correlation, self.string(name), 0)
        )
        return correlation

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
        ids = self.string(name), self.string(short)
        self._rows["CUPTI_ACTIVITY_KIND_KERNEL"].append(
            (start, end, device, 1, stream, correlation, process, *ids, 32, 64, 1, 1, 256, 1, 1, 0, 0, node or None)
        )

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
        kinds = tuple(_MEMORY[m] for m in memory)
        self._rows["CUPTI_ACTIVITY_KIND_MEMCPY"].append(
            (start, end, device, 1, stream, correlation, process, size, _COPY_KIND[kind], *kinds, None)
        )

    def memset(
        self, start: int, end: int, correlation: int, process: int, size: int, *, device: int = 0, stream: int = 7
    ) -> None:
        """A memset of device memory."""
        self._rows["CUPTI_ACTIVITY_KIND_MEMSET"].append(
            (start, end, device, 1, stream, correlation, process, 0, size, None, 2)
        )

    def graph(self, start: int, end: int, correlation: int, process: int, *, device: int = 0, stream: int = 7) -> None:
        """A CUDA-graph replay, recorded as one interval."""
        self._rows["CUPTI_ACTIVITY_KIND_GRAPH_TRACE"].append(
            (start, end, device, 1, stream, correlation, process, 1, 1)
        )

    def synchronize(self, name: str, thread: int, start: int, end: int, *, device: int = 0, stream: int = 7) -> None:
        """A synchronising call and the activity that goes with it."""
        correlation = self.call(name, thread, start, end)
        process = thread & ~0xFFFFFF
        self._rows["CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"].append(
            (start, end, device, 1, stream, correlation, process, _SYNC[name])
        )

    def range(
        self, name: str, thread: int, start: int, end: int | None, *, domain: str = "", registered: bool = True
    ) -> None:
        """An NVTX push/pop range; `end` None leaves it open, `registered` False writes the text into the row."""
        ids = (None, self.string(name)) if registered else (name, None)
        self._rows["NVTX_EVENTS"].append(
            (start, end, 59, None, ids[0], thread, thread, ids[1], self._domain(domain, thread))
        )

    def start_end(self, name: str, thread: int, start: int, end: int, *, end_thread: int | None = None) -> None:
        """An NVTX start/end range, which may end on another thread."""
        number = len(self._rows["NVTX_EVENTS"]) + 1
        self._rows["NVTX_EVENTS"].append(
            (start, end, 60, number, None, thread, end_thread or thread, self.string(name), 0)
        )

    def _domain(self, name: str, thread: int) -> int:
        if name not in self._domains:
            self._domains[name] = len(self._domains)
            self._rows["NVTX_EVENTS"].append((0, None, 75, None, name, thread, None, None, self._domains[name]))
        return self._domains[name]

    def os_call(self, name: str, thread: int, start: int, end: int) -> None:
        """An operating-system call."""
        self._rows["OSRT_API"].append((start, end, thread, self.string(name), 0))

    def overhead(self, name: str, thread: int, start: int, end: int) -> None:
        """Time the profiler took for itself."""
        self._rows["PROFILER_OVERHEAD"].append((start, end, thread, self.string(name), 0))

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
        connection = sqlite3.connect(path)
        for table, columns in _SCHEMA.items():
            rows = self._rows.get(table, [])
            if not rows and table not in _ALWAYS:
                continue
            if shuffle is not None:
                random.Random(shuffle).shuffle(rows)  # noqa: S311 # no secret
            connection.execute(f"CREATE TABLE {table} ({columns})")
            if rows:
                connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)  # noqa: S608
        connection.commit()
        connection.close()
        return path


_US = 1_000
_PID = 4242


class _Loop:
    """A training loop on one device: a CPU clock, a GPU clock, and the account of what was planted."""

    def __init__(self, seed: int) -> None:
        self.out = Export()
        self.random = random.Random(seed)  # noqa: S311 # no secret
        self.process = Export.process(_PID)
        self.main, self.autograd = Export.thread(_PID, _PID), Export.thread(_PID, _PID + 7)
        self.now = 1_000_000_000  # the CPU's clock; an export's clock rarely starts at an event
        self.first: int | None = None
        self.free = 0  # when the GPU will have done all it was given
        self.busy = 0
        self.gaps: dict[str, int] = defaultdict(int)
        self.kernels: dict[str, list[int]] = defaultdict(list)
        self.ranges: dict[str, list[int]] = defaultdict(list)
        self.copies: dict[str, list[int]] = defaultdict(list)
        self.cause = "launch-overhead"  # of the next gap, should there be one

    def jitter(self, ns: int) -> int:
        return int(ns * self.random.uniform(0.9, 1.1))

    def _on_gpu(self, ready: int, duration: int) -> int:
        if self.first is None:
            self.first = self.free = ready
        start = max(ready, self.free)
        if start > self.free:
            self.gaps[self.cause] += start - self.free
        self.cause = "launch-overhead"
        self.busy += duration
        self.free = start + duration
        return start

    def launch(self, name: str, duration: int, *, every: int = 6 * _US, thread: int | None = None) -> None:
        """One kernel; the CPU spends `every` on it, the first part dispatching, then in the call."""
        every = self.jitter(every)
        call = every // 2
        begun = self.now + every - call
        self.now = begun + call
        correlation = self.out.call("cudaLaunchKernel_v7000", thread or self.main, begun, self.now)
        duration = self.jitter(duration)
        start = self._on_gpu(self.now + 1_500, duration)
        self.out.kernel(name, start, start + duration, correlation, self.process)
        self.kernels[name].append(duration)

    def upload(self, size: int, duration: int, *, host: str, staging: int = 0) -> None:
        """A host-to-device copy; pageable memory is staged by the CPU before the GPU can start."""
        begun = self.now + 1 * _US
        ready = begun + 4 * _US + staging
        self.now = ready + 1 * _US
        correlation = self.out.call("cudaMemcpyAsync_v3020", self.main, begun, self.now)
        start = self._on_gpu(ready, duration)
        self.out.copy("HtoD", start, start + duration, correlation, self.process, size, host=host)
        self.copies["HtoD"].append(duration)

    def read_back(self) -> None:
        """``.item()``: a tiny device-to-host copy, then a stream synchronisation that drains the GPU."""
        begun = self.now + 2 * _US
        self.now = begun + 5 * _US
        correlation = self.out.call("cudaMemcpyAsync_v3020", self.main, begun, self.now)
        start = self._on_gpu(self.now, 1_200)
        self.out.copy("DtoH", start, start + 1_200, correlation, self.process, 4, host="pageable")
        self.copies["DtoH"].append(1_200)
        waiting = self.now + 1 * _US
        self.now = max(waiting, self.free) + 6 * _US
        self.out.synchronize("cudaStreamSynchronize", self.main, waiting, self.now)
        self.cause = "synchronization"

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        start = self.now
        yield
        self.now += 300
        self.out.range(name, self.main, start, self.now)
        self.ranges[name].append(self.now - start)
        self.now += 200


def training(
    path: str | os.PathLike[str], fault: Fault | None = None, *, steps: int = 12, layers: int = 8, seed: int = 0
) -> dict[str, Any]:
    """Write the trace of a planted training loop.

    Each step loads a batch, copies it to the device, runs forward (from the main thread), backward (from autograd's
    own thread, without ranges there) and the optimizer. The faults, one at a time:

    ``starved``
        The loader takes longer than the step: the main thread waits in ``next(it)`` (a range ``dataload``, with
        ``poll`` under it) while the device runs dry.
    ``sync``
        The loop reads a value back after each layer of the forward pass, as ``.item()`` does.
    ``tiny``
        Each layer is hundreds of kernels of two microseconds, faster to run than to launch.
    ``pageable``
        Batches are copied from pageable memory, which the CPU must stage first.

    Parameters
    ----------
    path : path-like
        The SQLite export to write; replaced when it exists.
    fault : {"starved", "sync", "tiny", "pageable"}, optional
        None for a loop that keeps the device busy.
    steps, layers : int
    seed : int
        Of the jitter on all durations, 10 % either way.

    Returns
    -------
    dict
        What is true by construction: ``span_ns, busy_ns, idle_ns``; ``gaps`` (ns by cause); ``kernels`` (name to
        count and total_ns), ``copies`` (kind to count and total_ns), ``ranges`` (name to count and total_ns).
    """
    loop = _Loop(seed)
    gemm = "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x256_32x3_tn_align8>(T1::Params)"
    norm = "void at::native::vectorized_layer_norm_kernel<float, float>(int, float, const float *, float *)"
    point = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int, T2, T3)"
    adam = "void at::native::multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>(T1)"
    tiny = fault == "tiny"
    for _ in range(steps):
        with loop.range("step"):
            with loop.range("dataload"):
                if fault == "starved":
                    wait = loop.jitter(9_000 * _US)
                    loop.out.os_call("poll", loop.main, loop.now + 50 * _US, loop.now + wait - 40 * _US)
                    loop.now += wait
                else:
                    loop.now += loop.jitter(8 * _US)
            if fault == "starved":
                loop.cause = "input-pipeline"
            with loop.range("to_device"):
                if fault == "pageable":
                    # The copy waits its turn in the queue, so let the device finish first: staging is what remains.
                    loop.now = max(loop.now, loop.free - 20 * _US)
                    loop.cause = "memory-transfer"
                    loop.upload(64 << 20, 2_600 * _US, host="pageable", staging=loop.jitter(5_000 * _US))
                else:
                    loop.upload(1 << 16, 9 * _US, host="pinned")
            with loop.range("forward"):
                for _ in range(layers):
                    if tiny:
                        for _ in range(100):
                            loop.launch(point, 2 * _US, every=9 * _US)
                    else:
                        loop.launch(norm, 25 * _US)
                        loop.launch(gemm, 210 * _US)
                        loop.launch(point, 40 * _US)
                    if fault == "sync":
                        loop.read_back()
                        loop.now += loop.jitter(120 * _US)
            with loop.range("backward"):
                for _ in range(layers):
                    if tiny:
                        for _ in range(150):
                            loop.launch(point, 2 * _US, every=9 * _US, thread=loop.autograd)
                    else:
                        loop.launch(gemm, 210 * _US, thread=loop.autograd)
                        loop.launch(gemm, 210 * _US, thread=loop.autograd)
                        loop.launch(point, 40 * _US, thread=loop.autograd)
            with loop.range("optimizer"):
                loop.launch(adam, 260 * _US)
    loop.out.write(path)
    first = loop.first or 0
    return {
        "span_ns": loop.free - first,
        "busy_ns": loop.busy,
        "idle_ns": loop.free - first - loop.busy,
        "gaps": dict(loop.gaps),
        "kernels": {n: (len(d), sum(d)) for n, d in loop.kernels.items()},
        "copies": {n: (len(d), sum(d)) for n, d in loop.copies.items()},
        "ranges": {n: (len(d), sum(d)) for n, d in loop.ranges.items()},
    }
