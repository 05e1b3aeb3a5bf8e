"""Synthetic traces of a job of several ranks, with known answers. They never ran on a GPU, and pages say so.

:func:`job` lays out data-parallel training: every rank computes its own gradients, and two all-reduces a step add them
up, the first while the backward pass still goes on. One trace a rank is written, as Nsight Systems or as PyTorch's
profiler would, each on a clock of its own.
"""

from __future__ import annotations

import gzip
import json
import os
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from nsightkit.workloads.planted import Export

__all__ = ["Late", "job"]

#: Why a rank is late: it waits for its data, its GPU is slower, or it has more to compute.
Late = Literal["data", "slow", "work"]

_US = 1_000
_MAIN, _AUTOGRAD = 0, 7  # threads, added to the process id
_COMPUTE, _GRADIENTS, _LAYERS = 7, 20, 24  # streams
_GEMM = "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x256_32x3_tn_align8>(T1::Params)"
_ADAM = "void at::native::multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>(T1)"
_KINDS = {
    "all_reduce": ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "allreduce"),
    "all_gather": ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "_allgather_base"),
}
#: The true clock's time of the first event.
_EPOCH_NS = 5_000_000_000


class _AsNsys(Export):
    """One rank's events on their way into an SQLite export."""

    suffix = "sqlite"

    def __init__(self, rank: int, **_: Any) -> None:
        super().__init__()
        self.pid = 4000 + rank
        self._own = Export.process(self.pid)

    def called(
        self, name: str, thread: int, start: int, end: int, kind: str = "", said: Mapping[str, Any] | None = None
    ) -> int:
        own = Export.thread(self.pid, self.pid + thread)
        if said is not None:
            self.range("nccl" + kind.title().replace("_", ""), own, start - 500, end + 500, domain="NCCL")
        return self.call(f"{name}_v7000", own, start, end)

    def ran(self, name: str, start: int, end: int, correlation: int, stream: int) -> None:
        self.kernel(name, start, end, correlation, self._own, stream=stream)

    def marked(self, name: str, thread: int, start: int, end: int) -> None:
        self.range(name, Export.thread(self.pid, self.pid + thread), start, end)

    def waited(self, start: int, end: int) -> None:
        self.os_call("poll", Export.thread(self.pid, self.pid), start, end)

    def read_back(self, begun: int, copied: tuple[int, int], over: int) -> None:
        thread = Export.thread(self.pid, self.pid)
        correlation = self.call("cudaMemcpyAsync_v3020", thread, begun, begun + 2 * _US)
        self.copy("DtoH", *copied, correlation, self._own, 4, stream=_COMPUTE)
        self.synchronize("cudaStreamSynchronize", thread, begun + 3 * _US, over)


class _AsKineto:
    """One rank's events on their way into a trace of PyTorch's profiler."""

    suffix = "json"

    def __init__(self, rank: int, world: int, groups: Iterable[Mapping[str, Any]]) -> None:
        self.pid = 4000 + rank
        self._events: list[dict[str, Any]] = []
        self._correlation = 0
        self._said: dict[int, dict[str, Any]] = {}
        self._head = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "Synthetic GPU (planted trace)", "numSms": 100}],
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world, "pg_config": list(groups)},
            "baseTimeNanoseconds": 0,
        }

    def _add(self, category: str, name: str, pid: int, tid: int, start: int, end: int, **args: Any) -> None:
        times = {
            "ts": f"{start // 1000}.{start % 1000:03d}",
            "dur": f"{(end - start) // 1000}.{(end - start) % 1000:03d}",
        }
        self._events.append({"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, **times, "args": args})

    def called(
        self, name: str, thread: int, start: int, end: int, kind: str = "", said: Mapping[str, Any] | None = None
    ) -> int:
        self._correlation += 1
        tid = self.pid + thread
        # The operator that made the call, around it; its number is no correlation.
        operator, external = "aten::mm" if said is None else "record_param_comms", 1_000_000 + self._correlation
        args = {"External id": external, **(said or {})}
        self._add("cpu_op", operator, self.pid, tid, start - 1_000, end + 1_000, **args)
        if said is not None:
            self._add("user_annotation", f"nccl:{kind}", self.pid, tid, start - 500, end + 500)
            self._said[self._correlation] = {key: value for key, value in said.items() if key != "Seq"}
        self._add("cuda_runtime", name, self.pid, tid, start, end, correlation=self._correlation)
        return self._correlation

    def ran(self, name: str, start: int, end: int, correlation: int, stream: int) -> None:
        args = {"External id": 1_000_000 + correlation, "device": 0, "stream": stream, "correlation": correlation}
        self._add("kernel", name, 0, stream, start, end, **args, **self._said.get(correlation, {}))

    def marked(self, name: str, thread: int, start: int, end: int) -> None:
        if name.startswith("step"):
            name = f"ProfilerStep#{name.rpartition(' ')[2]}"
        self._add("user_annotation", name, self.pid, self.pid + thread, start, end)

    def waited(self, start: int, end: int) -> None:
        """PyTorch's profiler records no calls of the operating system."""

    def read_back(self, begun: int, copied: tuple[int, int], over: int) -> None:
        self._correlation += 1
        for name, start, end in (
            ("cudaMemcpyAsync", begun, begun + 2 * _US),
            ("cudaStreamSynchronize", begun + 3 * _US, over),
        ):
            self._add("cuda_runtime", name, self.pid, self.pid, start, end, correlation=self._correlation)
            self._correlation += name == "cudaMemcpyAsync"
        args = {"device": 0, "stream": _COMPUTE, "correlation": self._correlation - 1, "bytes": 4}
        self._add("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 0, _COMPUTE, *copied, **args)

    def write(self, path: Path) -> Path:
        # Times are text with three decimals, as Kineto prints them: as floats they would lose their last digits.
        text = json.dumps({**self._head, "traceEvents": self._events})
        for key in ("ts", "dur"):
            text = _unquoted(text, key)
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "wt", encoding="utf-8") as out:
            out.write(text)
        return path


def _unquoted(text: str, key: str) -> str:
    """Make numbers of the texts under a key."""
    first, *rest = text.split(f'"{key}": "')
    return first + "".join(f'"{key}": ' + part.replace('"', "", 1) for part in rest)


class _Rank:
    """One rank: its CPU's clock, its streams, and what was planted."""

    def __init__(self, rank: int, out: _AsNsys | _AsKineto, offset_ns: int, drift_ppm: float, seed: int) -> None:
        self.rank, self.out = rank, out
        self._offset, self._drift = offset_ns, drift_ppm
        self.random = random.Random(f"{seed} {rank}")  # noqa: S311 # no secret
        self.now = _EPOCH_NS
        self.free = {_COMPUTE: 0, _GRADIENTS: 0, _LAYERS: 0}
        self.computed: list[tuple[int, int]] = []
        self.talked: list[tuple[int, int]] = []
        self.written = True  # whether the capture is on

    def clock(self, time: int) -> int:
        """What this rank's clock shows."""
        return time + self._offset + round(self._drift * 1e-6 * (time - _EPOCH_NS))

    def jitter(self, ns: int, share: float) -> int:
        return int(ns * self.random.uniform(1 - share, 1 + share)) if share else ns

    def marked(self, name: str, start: int, end: int) -> None:
        if self.written:
            self.out.marked(name, _MAIN, self.clock(start), self.clock(end))

    def launch(self, name: str, duration: int, thread: int) -> None:
        """One kernel of the compute stream."""
        begun, self.now = self.now + 3 * _US, self.now + 5 * _US
        start = max(self.now + _US, self.free[_COMPUTE])
        self.free[_COMPUTE] = end = start + duration
        if self.written:
            self.computed.append((start, end))
            correlation = self.out.called("cudaLaunchKernel", thread, self.clock(begun), self.clock(self.now))
            self.out.ran(name, self.clock(start), self.clock(end), correlation, _COMPUTE)

    def arrive(self, kind: str, thread: int, stream: int, said: Mapping[str, Any]) -> tuple[int, int]:
        """Launch a collective, and say when its kernel starts here, and by which call."""
        begun, self.now = self.now + 5 * _US, self.now + 8 * _US
        start = max(self.now + _US, self.free[_COMPUTE], self.free[stream])
        correlation = 0
        if self.written:
            begun, done = self.clock(begun), self.clock(self.now)
            correlation = self.out.called("cudaLaunchKernelExC", thread, begun, done, kind, said)
        return start, correlation

    def leave(self, kind: str, start: int, end: int, correlation: int, stream: int) -> None:
        """End it."""
        self.free[stream] = end
        if self.written:
            self.talked.append((start, end))
            self.out.ran(_KINDS[kind][0], self.clock(start), self.clock(end), correlation, stream)


def job(
    folder: str | os.PathLike[str],
    late: Mapping[int, Late] | None = None,
    *,
    ranks: int = 4,
    steps: int = 12,
    layers: int = 6,
    kind: Literal["nsys", "kineto"] = "nsys",
    late_us: int = 2_000,
    offsets_ns: Mapping[int, int] | None = None,
    drift_ppm: Mapping[int, float] | None = None,
    jitter: float = 0.02,
    end_jitter_ns: int = 3_000,
    tensor_parallel: int = 1,
    missing_steps: Mapping[int, int] | None = None,
    name: str = "rank{rank}.{suffix}",
    seed: int = 0,
) -> dict[str, Any]:
    """Write the traces of a planted data-parallel job, one a rank.

    Each step a rank loads a batch, runs forward, and backward from autograd's thread. When half of the backward pass
    is done, an all-reduce of its gradients starts and goes on beside the other half; a second one follows. The
    optimizer waits for it, and the loss is read back. The kernel of a collective starts on each rank when that rank is
    ready; it ends on all when the last has come and the transfer is over.

    Parameters
    ----------
    folder : path-like
        Gets the traces.
    late : mapping of int to {"data", "slow", "work"}, optional
        Ranks that are late in every step, and why: their data comes `late_us` later, all their kernels take longer, or
        they have more kernels, that much together.
    ranks, steps, layers : int
    kind : {"nsys", "kineto"}
        An SQLite export, or the JSON of PyTorch's profiler (gzipped if `name` ends so).
    late_us : int
    offsets_ns : mapping of int to int, optional
        What each rank's clock shows more than the true one.
    drift_ppm : mapping of int to float, optional
        By how much each rank's clock is too fast.
    jitter : float
        Share by which every kernel's duration differs at random.
    end_jitter_ns : int
        A collective ends on each rank up to this much later than on the first.
    tensor_parallel : int
        Ranks that share a layer: they gather its output in a process group of their own, and gradients are added up
        among ranks with the same share. 1: all ranks are in one group.
    missing_steps : mapping of int to int, optional
        Steps at the start that a rank's capture lacks.
    name : str
        Of the files, with ``{rank}`` and ``{suffix}``.
    seed : int

    Returns
    -------
    dict
        What is true by construction, times on the true clock: ``paths``; ``collectives``, each a dict of ``kind``,
        ``group`` (its ranks), ``step, sequence, bytes, starts`` and ``ends`` (by rank), ``last`` (the rank that came
        last), ``late_ns`` (how much later than the one before); ``compute_ns, communication_ns, exposed_ns`` by rank.
    """
    folder, late = Path(folder), late or {}
    tp = tensor_parallel
    shares = [list(range(first, first + tp)) for first in range(0, ranks, tp)] if tp > 1 else []
    worlds = [list(range(first, ranks, tp)) for first in range(tp)]
    groups = {tuple(of): str(number) for number, of in enumerate([*worlds, *shares])}
    described = [
        {"pg_name": number, "pg_desc": "default_pg" if tp == 1 else "mesh", "pg_size": len(of), "ranks": list(of)}
        for of, number in groups.items()
    ]
    make = {"nsys": _AsNsys, "kineto": _AsKineto}[kind]
    offsets, drifts = offsets_ns or {}, drift_ppm or {}
    crew = [
        _Rank(r, make(r, world=ranks, groups=described), offsets.get(r, 0), drifts.get(r, 0.0), seed)
        for r in range(ranks)
    ]
    chance = random.Random(f"{seed} ends")  # noqa: S311 # no secret
    sequence: dict[tuple[int, ...], int] = defaultdict(int)
    truth: list[dict[str, Any]] = []
    gemm, forward_kernels = 150 * _US, layers

    def collective(what: str, members: list[int], elements: int, transfer: int, step: int) -> None:
        key = tuple(members)
        # Gradients are added up from autograd's thread; each process group has a stream of its own.
        thread, stream = (_AUTOGRAD, _GRADIENTS) if what == "all_reduce" else (_MAIN, _LAYERS)
        sequence[key] += 1
        said = {
            "Collective name": _KINDS[what][1],
            "In msg nelems": elements // (len(members) if what == "all_gather" else 1),
            "Out msg nelems": elements,
            "dtype": "Float",
            "Process Group Name": groups[key],
            "Process Group Description": "default_pg" if tp == 1 else "mesh",
            "Group size": len(members),
            "Process Group Ranks": json.dumps(members),
            "Seq": sequence[key],
        }
        starts = {r: crew[r].arrive(what, thread, stream, said) for r in members}
        over = max(start for start, _ in starts.values()) + transfer
        ends = {r: over + (chance.randint(0, end_jitter_ns) if end_jitter_ns else 0) for r in members}
        for r, (start, correlation) in starts.items():
            crew[r].leave(what, start, ends[r], correlation, stream)
        order = sorted(members, key=lambda r: starts[r][0])
        truth.append(
            {
                "kind": what,
                "group": members,
                "step": step,
                "sequence": sequence[key],
                "bytes": 4 * elements,
                "starts": {r: start for r, (start, _) in starts.items()},
                "ends": ends,
                "last": order[-1],
                "late_ns": starts[order[-1]][0] - starts[order[-2]][0] if len(order) > 1 else 0,
            }
        )

    def kernels(one: _Rank, count: int, duration: int, thread: int, share: float) -> None:
        cause = late.get(one.rank)
        more = int(late_us * _US * share) if cause in ("slow", "work") else 0
        for i in range(count):
            extra = (more * (i + 1) // count - more * i // count) if cause == "slow" else 0
            one.launch(_GEMM, one.jitter(duration, jitter) + extra, thread)
        if cause == "work":
            for i in range(4):
                one.launch(_GEMM, more * (i + 1) // 4 - more * i // 4, thread)

    for step in range(steps):
        begun, forward, backward = {}, {}, {}
        batch = chance.randint(0, 300 * _US)  # batches differ, for all ranks alike: no two steps last the same
        for one in crew:
            one.written = step >= (missing_steps or {}).get(one.rank, 0)
            begun[one.rank] = start = one.now
            wait = 200 * _US + batch + (late_us * _US if late.get(one.rank) == "data" else 0)
            one.now += wait
            if one.written:
                one.out.waited(one.clock(start + 20 * _US), one.clock(one.now - 20 * _US))
            one.marked("dataload", start + 500, one.now)
            one.now += 1 * _US
            forward[one.rank] = one.now
        for _ in range(forward_kernels):
            for one in crew:
                kernels(one, 1, gemm, _MAIN, 0.5 / forward_kernels)
            for members in shares:
                collective("all_gather", members, 1 << 20, 40 * _US, step)
                for r in members:  # the next layer needs all of it
                    crew[r].free[_COMPUTE] = max(crew[r].free[_COMPUTE], crew[r].free[_LAYERS])
        for one in crew:
            one.marked("forward", forward[one.rank], one.now + 500)
            one.now += 1 * _US
            backward[one.rank] = one.now
        for part in range(2):
            for one in crew:
                kernels(one, layers, gemm, _AUTOGRAD, 0.25)
            for members in worlds:
                collective("all_reduce", members, (1 << 22) + part, 600 * _US, step)
        for one in crew:
            one.marked("backward", backward[one.rank], one.now + 500)
            one.now += 1 * _US
            optimizer = one.now
            one.free[_COMPUTE] = max(one.free[_COMPUTE], one.free[_GRADIENTS])
            one.launch(_ADAM, one.jitter(100 * _US, jitter), _MAIN)
            one.marked("optimizer", optimizer, one.now + 500)
            asked = one.now + 2 * _US
            copied = (one.free[_COMPUTE], one.free[_COMPUTE] + 1_200)
            one.now = copied[1] + 5 * _US
            one.free[_COMPUTE] = copied[1]
            if one.written:
                one.out.read_back(one.clock(asked), (one.clock(copied[0]), one.clock(copied[1])), one.clock(one.now))
            one.marked(f"step {step}", begun[one.rank], one.now + 200)
            one.now += 1 * _US
    paths = [one.out.write(folder / name.format(rank=one.rank, suffix=one.out.suffix)) for one in crew]
    return {
        "paths": paths,
        "collectives": truth,
        "compute_ns": {one.rank: sum(end - start for start, end in one.computed) for one in crew},
        "communication_ns": {one.rank: sum(end - start for start, end in one.talked) for one in crew},
        "exposed_ns": {one.rank: _alone(one.talked, one.computed) for one in crew},
    }


def _alone(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> int:
    """Length of intervals that others do not cover; neither overlap among themselves."""
    covered = sum(max(0, min(e, f) - max(s, b)) for s, e in some for b, f in others)
    return sum(e - s for s, e in some) - covered
