"""Synthetic traces of a job of several ranks, with known answers. They never ran on a GPU, and pages say so.

:func:`job` lays out data-parallel training: every rank computes its own gradients, and two all-reduces a step add them
up, the first while the backward pass still goes on. One trace a rank is written, as Nsight Systems or as PyTorch's
profiler would, each on a clock of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from synthetic.planted import ADAM, GEMM, Export, length, union

__all__ = ["JobConfig", "Late", "job"]

#: Why a rank is late: it waits for its data, its GPU is slower, or it has more to compute.
Late = Literal["data", "slow", "work"]

_US = 1_000
_MAIN, _AUTOGRAD = 0, 7  # threads, added to the process id
_COMPUTE, _GRADIENTS, _LAYERS = 7, 20, 24  # streams
#: Kernel of a collective, what PyTorch calls it, and the thread and stream that run it. Gradients are added up from
#: autograd's thread; each process group has a stream of its own.
_KINDS = {
    "all_reduce": (
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "allreduce",
        _AUTOGRAD,
        _GRADIENTS,
    ),
    "all_gather": (
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "_allgather_base",
        _MAIN,
        _LAYERS,
    ),
}
#: The true clock's time of the first event.
_EPOCH_NS = 5_000_000_000
#: A collective ends on each rank up to this much later than on the first.
_END_NS = 3_000
#: By how much a late rank is late in each step.
_LATE_NS = 2_000_000


@dataclasses.dataclass(frozen=True)
class JobConfig:
    """Sizes of a job, and what is wrong with it.

    Parameters
    ----------
    late : mapping of int to {"data", "slow", "work"}
        Ranks that are late in every step, by 2 ms, and why: their data comes that much later, all their kernels take
        longer, or they have more kernels, that much together.
    ranks, steps, layers : int
    kind : {"nsys", "kineto"}
        An SQLite export, or the JSON of PyTorch's profiler.
    offsets_ns : mapping of int to int
        What each rank's clock shows more than the true one.
    jitter : float
        Share by which every kernel's duration differs at random.
    tensor_parallel : int
        Ranks that share a layer: they gather its output in a process group of their own, and gradients are added up
        among ranks with the same share. 1: all ranks are in one group.
    missing_steps : mapping of int to int
        Steps at the start that a rank's capture lacks.
    """

    late: Mapping[int, Late] = dataclasses.field(default_factory=dict)
    ranks: int = 4
    steps: int = 12
    layers: int = 6
    kind: Literal["nsys", "kineto"] = "nsys"
    offsets_ns: Mapping[int, int] = dataclasses.field(default_factory=dict)
    jitter: float = 0.02
    tensor_parallel: int = 1
    missing_steps: Mapping[int, int] = dataclasses.field(default_factory=dict)


class _AsNsys(Export):
    """One rank's events on their way into an SQLite export. Times are those of the rank's clock."""

    suffix = "sqlite"

    def __init__(self, rank: int, **_: Any) -> None:
        super().__init__()
        self._process = Export.process(4000 + rank)
        self._main = Export.thread(4000 + rank, 4000 + rank)

    def called(
        self, start: int, end: int, name: str, thread: int, kind: str = "", said: Mapping[str, Any] | None = None
    ) -> int:
        if said is not None:
            collective = "nccl" + kind.title().replace("_", "")
            self.range(collective, self._main + thread, start - 500, end + 500, domain="NCCL")
        return self.call(f"{name}_v7000", self._main + thread, start, end)

    def ran(self, start: int, end: int, name: str, correlation: int, stream: int, *_: Mapping[str, Any]) -> None:
        self.kernel(name, start, end, correlation, self._process, stream=stream)

    def marked(self, start: int, end: int, name: str) -> None:
        self.range(name, self._main, start, end)

    def read_back(self, asked: int, over: int, start: int, end: int) -> None:
        correlation = self.call("cudaMemcpyAsync_v3020", self._main, asked, asked + 2 * _US)
        self.copy("DtoH", start, end, correlation, self._process, 4, stream=_COMPUTE)
        self.synchronize("cudaStreamSynchronize", self._main, asked + 3 * _US, over)


class _AsKineto:
    """One rank's events on their way into a trace of PyTorch's profiler. Times are those of the rank's clock."""

    suffix = "json"

    def __init__(self, rank: int, world: int, groups: Iterable[Mapping[str, Any]]) -> None:
        self.pid = 4000 + rank
        self._events: list[dict[str, Any]] = []
        self._correlations = itertools.count(1)
        self._head = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "Synthetic GPU (planted trace)", "numSms": 100}],
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world, "pg_config": list(groups)},
            "baseTimeNanoseconds": 0,
        }

    def _add(self, category: str, name: str, pid: int, tid: int, start: int, end: int, **args: Any) -> None:
        # Times are text with three decimals, as Kineto prints them: as floats they would lose their last digits.
        ts, dur = (f"{ns // 1000}.{ns % 1000:03d}" for ns in (start, end - start))
        self._events.append(
            {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )

    def called(
        self, start: int, end: int, name: str, thread: int, kind: str = "", said: Mapping[str, Any] | None = None
    ) -> int:
        tid = self.pid + thread
        correlation = next(self._correlations)
        # The operator that made the call, around it; its number is not a correlation.
        args = {"External id": 1_000_000 + correlation, **(said or {})}
        operator = "record_param_comms" if said else "aten::mm"
        self._add("cpu_op", operator, self.pid, tid, start - 1_000, end + 1_000, **args)
        if said:
            self._add("user_annotation", f"nccl:{kind}", self.pid, tid, start - 500, end + 500)
        self._add("cuda_runtime", name, self.pid, tid, start, end, correlation=correlation)
        return correlation

    def ran(
        self, start: int, end: int, name: str, correlation: int, stream: int, said: Mapping[str, Any] | None = None
    ) -> None:
        args = {"External id": 1_000_000 + correlation, "device": 0, "stream": stream, "correlation": correlation}
        args |= {key: value for key, value in (said or {}).items() if key != "Seq"}
        self._add("kernel", name, 0, stream, start, end, **args)

    def marked(self, start: int, end: int, name: str) -> None:
        self._add("user_annotation", re.sub(r"^step ", "ProfilerStep#", name), self.pid, self.pid, start, end)

    def read_back(self, asked: int, over: int, start: int, end: int) -> None:
        place = (self.pid, self.pid + _MAIN)
        copied = next(self._correlations)
        waited = next(self._correlations)
        self._add("cuda_runtime", "cudaMemcpyAsync", *place, asked, asked + 2 * _US, correlation=copied)
        self._add("cuda_runtime", "cudaStreamSynchronize", *place, asked + 3 * _US, over, correlation=waited)
        args = {"device": 0, "stream": _COMPUTE, "correlation": copied, "bytes": 4}
        self._add("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 0, _COMPUTE, start, end, **args)

    def write(self, path: Path) -> Path:
        text = json.dumps({**self._head, "traceEvents": self._events})
        path.write_text(re.sub(r'"(ts|dur)": "([\d.]+)"', r'"\1": \2', text), encoding="utf-8")
        return path


class _Rank:
    """One rank: its CPU's clock, its streams, and what was planted."""

    def __init__(self, rank: int, out: _AsNsys | _AsKineto, config: JobConfig) -> None:
        self.rank = rank
        self.out = out
        self.config = config
        self.cause = config.late.get(rank)
        self.random = random.Random(f"0 {rank}")  # no secret
        self.now = _EPOCH_NS
        self.free = dict.fromkeys((_COMPUTE, _GRADIENTS, _LAYERS), 0)
        self.ran: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by stream
        self.written = True  # whether the capture is on

    def clock(self, time: int) -> int:
        """What this rank's clock shows."""
        return time + self.config.offsets_ns.get(self.rank, 0)

    def note(self, happened: Callable[..., int | None], start: int, end: int, *details: Any) -> int:
        """Have the capture note something, if it is on; gives the correlation id of a call."""
        return (self.written and happened(self.clock(start), self.clock(end), *details)) or 0

    def mark(self, name: str, start: int, end: int) -> None:
        """Mark a phase, which takes a moment itself."""
        self.note(self.out.marked, start, end, name)
        self.now += 1 * _US

    def run(self, name: str, start: int, end: int, correlation: int, stream: int, *said: Mapping[str, Any]) -> None:
        """Run a kernel, to the end of which its stream is busy."""
        self.free[stream] = end
        self.note(self.out.ran, start, end, name, correlation, stream, *said)
        if self.written:
            self.ran[stream].append((start, end))

    def launch(self, name: str, duration: int, thread: int) -> None:
        """One kernel of the compute stream."""
        begun = self.now + 3 * _US
        self.now = self.now + 5 * _US
        correlation = self.note(self.out.called, begun, self.now, "cudaLaunchKernel", thread)
        start = max(self.now + _US, self.free[_COMPUTE])
        self.run(name, start, start + duration, correlation, _COMPUTE)

    def compute(self, name: str, us: int, thread: int, late_ns: int = 0) -> None:
        """One kernel of about that time, and later by as much as a slow GPU needs for it."""
        factor = self.random.uniform(1 - self.config.jitter, 1 + self.config.jitter)
        self.launch(name, int(us * _US * factor) + late_ns, thread)

    def arrive(self, kind: str, said: Mapping[str, Any]) -> tuple[int, int]:
        """Launch a collective, and say when its kernel starts here, and by which call."""
        _, _, thread, stream = _KINDS[kind]
        begun = self.now + 5 * _US
        self.now = self.now + 8 * _US
        start = max(self.now + _US, self.free[_COMPUTE], self.free[stream])
        return start, self.note(self.out.called, begun, self.now, "cudaLaunchKernelExC", thread, kind, said)

    def read_back(self) -> None:
        """Wait for the loss."""
        asked = self.now + 2 * _US
        start = self.free[_COMPUTE]
        self.free[_COMPUTE] = end = start + 1_200
        self.now = end + 5 * _US
        self.note(self.out.read_back, asked, self.now, self.clock(start), self.clock(end))

    def wait_for(self, stream: int) -> None:
        """Let the compute stream wait for another one."""
        self.free[_COMPUTE] = max(self.free[_COMPUTE], self.free[stream])


class _Job:
    """All ranks, and the account of their collectives."""

    def __init__(self, config: JobConfig) -> None:
        self.config = config
        tp = config.tensor_parallel
        ranks = list(range(config.ranks))
        self.shares = [ranks[first : first + tp] for first in ranks[::tp]] if tp > 1 else []
        self.worlds = [ranks[first::tp] for first in range(tp)]
        self.groups = {tuple(of): str(number) for number, of in enumerate([*self.worlds, *self.shares])}
        self.description = "default_pg" if tp == 1 else "mesh"
        described = [
            {"pg_name": number, "pg_desc": self.description, "pg_size": len(of), "ranks": list(of)}
            for of, number in self.groups.items()
        ]
        make = {"nsys": _AsNsys, "kineto": _AsKineto}[config.kind]
        self.ranks = [_Rank(rank, make(rank, world=config.ranks, groups=described), config) for rank in ranks]
        self.chance = random.Random("0 ends")  # no secret
        self.sequence: dict[tuple[int, ...], int] = defaultdict(int)
        self.truth: list[dict[str, Any]] = []

    def collective(self, kind: str, members: list[int], elements: int, transfer_ns: int, step: int) -> None:
        """Meet: a kernel starts on each rank when that is ready, and ends when the last has come and all is over."""
        key = tuple(members)
        self.sequence[key] += 1
        said = {
            "Collective name": _KINDS[kind][1],
            "In msg nelems": elements // (len(members) if kind == "all_gather" else 1),
            "Out msg nelems": elements,
            "dtype": "Float",
            "Process Group Name": self.groups[key],
            "Process Group Description": self.description,
            "Group size": len(members),
            "Process Group Ranks": json.dumps(members),
            "Seq": self.sequence[key],
        }
        arrived = {r: self.ranks[r].arrive(kind, said) for r in members}
        starts = {r: start for r, (start, _) in arrived.items()}
        *_, before, last = [members[0], *sorted(members, key=starts.__getitem__)]
        over = starts[last] + transfer_ns
        ends = {r: over + self.chance.randint(0, _END_NS) for r in members}
        kernel, _, _, stream = _KINDS[kind]
        for r, (start, correlation) in arrived.items():
            self.ranks[r].run(kernel, start, ends[r], correlation, stream, said)
        self.truth.append(
            {
                "step": step,
                "sequence": self.sequence[key],
                "bytes": 4 * elements,
                "starts": starts,
                "ends": ends,
                "last": last,
                "late_ns": starts[last] - starts[before],
            }
        )

    def kernels(self, one: _Rank, count: int, thread: int, share: float) -> None:
        """Products of a rank, with its share of a step's lateness where it is slow or has more work."""
        whole = int(_LATE_NS * share)
        parts = count if one.cause == "slow" else 4
        late = [whole * (i + 1) // parts - whole * i // parts for i in range(parts)]
        for number in range(count):
            one.compute(GEMM, 150, thread, late[number] if one.cause == "slow" else 0)
        for more in late if one.cause == "work" else ():
            one.launch(GEMM, more, thread)

    def step(self, number: int) -> None:
        """Take a step on all ranks."""
        config = self.config
        begun = {one: one.now for one in self.ranks}
        batch = self.chance.randint(0, 300 * _US)  # batches differ, for all ranks alike: no two steps last the same
        for one in self.ranks:
            one.written = number >= config.missing_steps.get(one.rank, 0)
            start = one.now
            one.now += 200 * _US + batch + (_LATE_NS if one.cause == "data" else 0)
            one.mark("dataload", start + 500, one.now)
        forward = {one: one.now for one in self.ranks}
        for _ in range(config.layers):
            for one in self.ranks:
                self.kernels(one, 1, _MAIN, 0.5 / config.layers)
            for members in self.shares:
                self.collective("all_gather", members, 1 << 20, 40 * _US, number)
                for r in members:  # the next layer needs all of it
                    self.ranks[r].wait_for(_LAYERS)
        for one in self.ranks:
            one.mark("forward", forward[one], one.now + 500)
        backward = {one: one.now for one in self.ranks}
        for half in range(2):
            for one in self.ranks:
                self.kernels(one, config.layers, _AUTOGRAD, 0.25)
            for members in self.worlds:
                self.collective("all_reduce", members, (1 << 22) + half, 600 * _US, number)
        for one in self.ranks:
            one.mark("backward", backward[one], one.now + 500)
            optimizer = one.now
            one.wait_for(_GRADIENTS)
            one.compute(ADAM, 100, _MAIN)
            one.note(one.out.marked, optimizer, one.now + 500, "optimizer")
            one.read_back()
            one.mark(f"step {number}", begun[one], one.now + 200)


def job(folder: str | os.PathLike[str], late: Mapping[int, Late] | None = None, **options: Any) -> dict[str, Any]:
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
        Ranks that are late in every step, and why.
    **options
        The other fields of :class:`JobConfig`.

    Returns
    -------
    dict
        What is true by construction, times on the true clock: ``paths``; ``collectives``, each a dict of
        ``step, sequence, bytes, starts`` and ``ends`` (by rank), ``last`` (the rank that came last), ``late_ns`` (how
        much later than the one before); ``compute_ns, communication_ns, exposed_ns`` by rank.
    """
    config = JobConfig(late or {}, **options)
    planted = _Job(config)
    for number in range(config.steps):
        planted.step(number)
    computed = {one.rank: one.ran[_COMPUTE] for one in planted.ranks}
    talked = {one.rank: one.ran[_GRADIENTS] + one.ran[_LAYERS] for one in planted.ranks}
    return {
        "paths": [one.out.write(Path(folder, f"rank{one.rank}.{one.out.suffix}")) for one in planted.ranks],
        "collectives": planted.truth,
        "compute_ns": {rank: length(ran) for rank, ran in computed.items()},
        "communication_ns": {rank: length(ran) for rank, ran in talked.items()},
        "exposed_ns": {rank: length(union(talked[rank] + ran)) - length(ran) for rank, ran in computed.items()},
    }
