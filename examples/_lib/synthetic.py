"""Small traces with known answers, for exercises. They never ran on a GPU, and the pages must tell the reader that.

:class:`Events` makes a trace of any events. :func:`training` lays out a training loop with one fault, and returns
its exact idle time by cause; :func:`ranks` lays out a data-parallel job with late ranks.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Literal

import pandas as pd

import nsightkit
from nsightkit.trace import TraceMeta
from nsightkit.trace.model import Gpu, nesting

#: Threads: the main one, and autograd's.
MAIN, AUTOGRAD = 1, 2
_US = 1_000
_PROCESS = 4242

GEMM = "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x256_32x3_tn_align8>(T1::Params)"
NORM = "void at::native::vectorized_layer_norm_kernel<float, float>(int, float, const float *, float *)"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int, T2, T3)"
ADAM = "void at::native::multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>(T1)"
REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"

Fault = Literal["starved", "sync", "logging", "logging-ahead", "tiny", "pageable", "start-up"]


class Events:
    """Events on their way into a trace; times are nanoseconds on one clock.

    Parameters
    ----------
    rank, world_size : int
        Of a distributed job.
    """

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size
        self._rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._correlation = 100
        self._process = _PROCESS + rank

    def _cpu(self, table: str, name: str, start: int, end: int, thread: int, **more: Any) -> None:
        row = {"name": name, "start_ns": start, "end_ns": end, "process": self._process}
        self._rows[table].append({**row, "thread": (self._process << 24) | thread, **more})

    def _gpu(self, table: str, start: int, end: int, correlation: int, stream: int, **more: Any) -> None:
        row = {"start_ns": start, "end_ns": end, "device": 0, "stream": stream, "process": self._process}
        self._rows[table].append({**row, "correlation": correlation, **more})

    def call(self, name: str, start: int, end: int, thread: int = MAIN) -> int:
        """A CUDA API call; returns its correlation id."""
        self._correlation += 1
        self._cpu("calls", name, start, end, thread, correlation=self._correlation)
        return self._correlation

    def kernel(self, name: str, start: int, end: int, correlation: int, stream: int = 7) -> None:
        """A kernel, launched by the call of that correlation id."""
        short = name.partition("<")[0].partition("(")[0].rpartition("::")[2].removeprefix("void ")
        self._gpu("kernels", start, end, correlation, stream, name=name, short_name=short)

    def copy(self, kind: str, start: int, end: int, correlation: int, size: int, host: str = "pinned") -> None:
        """A copy of `size` bytes, HtoD or DtoH; `host` is pinned or pageable."""
        source, target = (host, "device") if kind == "HtoD" else ("device", host)
        self._gpu("memops", start, end, correlation, 7, kind=kind, bytes=size, src_kind=source, dst_kind=target)

    def graph(self, start: int, end: int, correlation: int) -> None:
        """A CUDA-graph replay, recorded as one interval."""
        self._gpu("graphs", start, end, correlation, 7, graph_id=1)

    def wait(self, name: str, start: int, end: int) -> None:
        """A synchronising call of the main thread, such as cudaStreamSynchronize."""
        correlation = self.call(name, start, end)
        kind = {"cudaStreamSynchronize": "stream", "cudaDeviceSynchronize": "context"}.get(name, "event")
        self._gpu("syncs", start, end, correlation, 7, kind=kind)

    def range(self, name: str, start: int, end: int, thread: int = MAIN) -> None:
        """An NVTX range."""
        self._cpu("ranges", name, start, end, thread)

    def os_call(self, name: str, start: int, end: int) -> None:
        """An operating-system call of the main thread."""
        self._cpu("os_calls", name, start, end, MAIN)

    def trace(self) -> nsightkit.Trace:
        """Make the trace.

        Returns
        -------
        Trace
        """
        frames = {table: pd.DataFrame(rows) for table, rows in self._rows.items()}
        if "ranges" in frames:
            marks = frames["ranges"]
            marks["end_thread"] = marks["thread"]
            marks["level"], marks["parent"] = nesting(marks["thread"], marks["start_ns"], marks["end_ns"])
        meta = TraceMeta(tool="synthetic", gpus=[Gpu(0, "Synthetic GPU")], missing=["ops", "overhead"])
        if self.world_size > 1:
            meta.distributed = {"rank": self.rank, "world_size": self.world_size}
        return nsightkit.Trace.from_frames(frames, meta)


class _Loop:
    """A training loop: a CPU clock, a GPU clock, and an account of the idle time by cause."""

    def __init__(self, events: Events, seed: int) -> None:
        self.events = events
        self.random = random.Random(seed)  # noqa: S311 # no secret
        self.now = 1_000_000  # the CPU's clock
        self.free = 0  # when the GPU will have done all it was given
        self.busy_ns = 0
        self.gaps: dict[str, int] = defaultdict(int)
        self.cause = "launch-overhead"  # of the next gap

    def jitter(self, us: float) -> int:
        return int(us * _US * self.random.uniform(0.9, 1.1))

    def on_gpu(self, ready: int, duration: int) -> int:
        """Run something when the GPU is free; give its start."""
        start = max(ready, self.free)
        if 0 < self.free < start:
            self.gaps[self.cause] += start - self.free
        self.cause = "launch-overhead"
        self.free = start + duration
        self.busy_ns += duration
        return start

    def launch(self, name: str, us: float, thread: int = MAIN, every_us: float = 6, load_us: float = 0) -> None:
        """Launch a kernel: half of `every_us` before the call, half in it, and `load_us` more to load its code."""
        every = self.jitter(every_us)
        begin = self.now + every // 2
        self.now += every + int(load_us * _US)
        correlation = self.events.call("cudaLaunchKernel", begin, self.now, thread)
        duration = self.jitter(us)
        start = self.on_gpu(self.now + 1_500, duration)
        self.events.kernel(name, start, start + duration, correlation)

    def upload(self, us: float, size: int, host: str = "pinned", staging_us: float = 0) -> None:
        """Copy a batch; the CPU stages pageable memory before the GPU can start."""
        begin = self.now + 1_000
        ready = begin + 4_000 + self.jitter(staging_us)
        self.now = ready + 1_000
        correlation = self.events.call("cudaMemcpyAsync", begin, self.now)
        duration = self.jitter(us)
        start = self.on_gpu(ready, duration)
        self.events.copy("HtoD", start, start + duration, correlation, size, host)

    def read_back(self) -> None:
        """``.item()``: a tiny copy to the host, then a wait until the queue is empty."""
        begin = self.now + 2_000
        self.now = begin + 5_000
        correlation = self.events.call("cudaMemcpyAsync", begin, self.now)
        start = self.on_gpu(self.now, 1_200)
        self.events.copy("DtoH", start, start + 1_200, correlation, 4, "pageable")
        self.drain("cudaStreamSynchronize")

    def drain(self, call: str) -> None:
        """Wait until the GPU has done all it was given."""
        begin = self.now + 1_000
        self.now = max(begin, self.free) + 6_000
        self.events.wait(call, begin, self.now)
        self.cause = "synchronization"

    def work(self, name: str, us: float) -> None:
        """Spend CPU time in a range."""
        begin = self.now
        self.now += self.jitter(us)
        self.events.range(name, begin, self.now)
        self.now += 200

    def close(self, name: str, begin: int) -> None:
        """End a range."""
        self.now += 300
        self.events.range(name, begin, self.now)
        self.now += 200


def training(
    fault: Fault | None = None, *, steps: int = 12, layers: int = 8, seed: int = 0
) -> tuple[nsightkit.Trace, dict[str, Any]]:
    """Make the trace of a training loop.

    Each step loads a batch, copies it to the GPU, runs forward (launched by the main thread), backward (launched by
    autograd's thread) and the optimizer.

    Parameters
    ----------
    fault : str, optional
        ``starved``: the main thread waits in ``dataload`` for longer than a step. ``sync``: a value is read back after
        each layer of the forward pass. ``logging``: each step waits for the GPU, and then works for 20 ms on the CPU;
        ``logging-ahead``: it works without waiting first.
        ``tiny``: hundreds of kernels that run for 2 µs each. ``pageable``: batches are copied from pageable memory.
        ``start-up``: the first launch of each kernel loads its code. None keeps the GPU busy.
    steps, layers : int
    seed : int
        Of the jitter on all durations, 10 % either way.

    Returns
    -------
    trace : Trace
    truth : dict
        ``busy_ns``, ``idle_ns`` and ``gaps`` (nanoseconds by cause).
    """
    events = Events()
    loop = _Loop(events, seed)
    for number in range(steps):
        begin = loop.now
        _load(loop, fault)
        load_us = 4_000 if fault == "start-up" and number == 0 else 0
        for phase, thread in (("forward", MAIN), ("backward", AUTOGRAD)):
            start = loop.now
            for layer in range(layers):
                _layer(loop, fault, phase, thread, load_us if layer == 0 else 0)
            loop.close(phase, start)
        start = loop.now
        loop.launch(ADAM, 260, load_us=load_us)
        loop.close("optimizer", start)
        if fault == "logging":
            loop.drain("cudaDeviceSynchronize")
        if fault in ("logging", "logging-ahead"):
            loop.work("log", 20_000)
            loop.cause = "cpu-work"
        loop.close("step", begin)
    trace = events.trace()
    return trace, {"busy_ns": loop.busy_ns, "idle_ns": sum(loop.gaps.values()), "gaps": dict(loop.gaps)}


def _load(loop: _Loop, fault: Fault | None) -> None:
    """Get a batch and send it to the GPU."""
    if fault == "starved":
        begin = loop.now
        wait = loop.jitter(9_000)
        loop.events.os_call("poll", begin + wait // 200, begin + wait - wait // 200)
        loop.now += wait
        loop.close("dataload", begin)
        loop.cause = "input-pipeline"
    else:
        loop.work("dataload", 8)
    begin = loop.now
    if fault == "pageable":
        # The copy waits its turn in the queue, so let the GPU finish first: staging is what remains.
        loop.now = max(loop.now, loop.free - 20 * _US)
        loop.cause = "memory-transfer"
        loop.upload(2_400, 64 << 20, "pageable", staging_us=4_800)
    else:
        loop.upload(9, 1 << 16)
    loop.close("to_device", begin)


def _layer(loop: _Loop, fault: Fault | None, phase: str, thread: int, load_us: float) -> None:
    """Pass through a layer in one direction."""
    if fault == "tiny":
        for _ in range(100 if phase == "forward" else 150):
            loop.launch(ADD, 2, thread, every_us=9)
        return
    kernels = [(NORM, 25), (GEMM, 210), (ADD, 40)] if phase == "forward" else [(GEMM, 210), (GEMM, 210), (ADD, 40)]
    for name, us in kernels:
        if load_us and phase == "forward":
            loop.cause = "start-up"
            loop.launch(name, us, thread, load_us=load_us)
        else:
            loop.launch(name, us, thread)
    if fault == "sync" and phase == "forward":
        loop.read_back()
        loop.now += loop.jitter(120)


def ranks(
    late: Mapping[int, Literal["data", "slow"]], *, count: int = 4, steps: int = 12, layers: int = 4, seed: int = 0
) -> list[nsightkit.Trace]:
    """Make the traces of a data-parallel job, one per rank.

    Each rank computes a step and then adds up its gradients with the others, which ends for all of them when the last
    one has arrived.

    Parameters
    ----------
    late : mapping of int to {"data", "slow"}
        Ranks that are 2 ms late in every step: they get their data late, or their kernels take longer.
    count, steps, layers : int
    seed : int

    Returns
    -------
    list of Trace
    """
    loops = [_Loop(Events(rank, count), seed + rank) for rank in range(count)]
    for number in range(steps):
        begins = []
        for rank, loop in enumerate(loops):
            begins.append(loop.now)
            loop.work("dataload", 2_000 if late.get(rank) == "data" else 10)
            slower_us = 2_000 / (2 * layers) if late.get(rank) == "slow" else 0
            for phase, thread in (("forward", MAIN), ("backward", AUTOGRAD)):
                start = loop.now
                for _ in range(layers):
                    loop.launch(GEMM, 400 + slower_us, thread)
                loop.close(phase, start)
        _all_reduce(loops, us=300)
        for loop, begin in zip(loops, begins, strict=True):
            start = loop.now
            loop.launch(ADAM, 200)
            loop.close("optimizer", start)
            loop.drain("cudaDeviceSynchronize")
            loop.close(f"step {number}", begin)
    return [loop.events.trace() for loop in loops]


def _all_reduce(loops: list[_Loop], us: float) -> None:
    """Add up gradients: the kernel of each rank starts when it arrives, and all end together."""
    arrivals = []
    for loop in loops:
        begin = loop.now
        loop.now += 6 * _US
        correlation = loop.events.call("cudaLaunchKernelExC", begin, loop.now)
        arrivals.append((max(loop.now + 1_500, loop.free), correlation))
    end = max(arrived for arrived, _ in arrivals) + int(us * _US)
    for loop, (arrived, correlation) in zip(loops, arrivals, strict=True):
        start = loop.on_gpu(arrived, end - arrived)
        loop.events.kernel(REDUCE, start, end, correlation, stream=20)
