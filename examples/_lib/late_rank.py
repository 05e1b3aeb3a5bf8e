"""Data-parallel training in several processes, one of which gets its batches late (page 22).

``torchrun`` starts one process per rank. The ranks communicate through Gloo, or through NCCL if each has its own GPU.
Loading a batch is a sleep, so a rank is not late just because the machine has few processors.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import nsightkit
from nsightkit.trace import Trace, TraceMeta
from nsightkit.trace.model import nesting
from nsightkit.workloads.models import Workload
from nsightkit.workloads.phases import phase

_WARMUP = 3
_PATIENCE_S = 300.0
#: What is kept of each rank's trace: its tables, and their columns.
_TABLES = {
    "kernels": ["start_ns", "end_ns", "name", "process", "device", "stream", "correlation"],
    "memops": ["start_ns", "end_ns", "kind", "process", "device", "stream", "correlation", "bytes"],
    "calls": ["start_ns", "end_ns", "name", "process", "thread", "correlation"],
    "ranges": ["start_ns", "end_ns", "name", "process", "thread"],
    "ops": ["start_ns", "end_ns", "name", "process", "thread"],
}
_TEXTS = ("name", "kind")


@dataclasses.dataclass(frozen=True)
class Job:
    """Sizes, and the rank that is late; the defaults suit a CPU.

    Parameters
    ----------
    ranks : int
        The last one is late.
    late : bool
        Fault: the last rank waits `late_ms` longer for every batch.
    late_ms, data_ms : float
        How much longer the late rank waits, and how long every rank waits for a batch.
    hidden, layers, batch : int
        Width and depth of the model, and rows of a batch. Gradients are ``4 * layers * hidden**2`` bytes.
    bucket_mb : float
        Gradients are added up in buckets of about this size, the first while backward still goes on.
    steps, profiled : int
        Timed steps, and steps under the profiler.
    """

    ranks: int = 2
    late: bool = True
    late_ms: float = 40.0
    data_ms: float = 2.0
    hidden: int = 128
    layers: int = 4
    batch: int = 32
    bucket_mb: float = 0.1
    steps: int = 5
    profiled: int = 4


class LateRank(Workload):
    """The job, started once."""

    def __init__(self, job: Job, device: str) -> None:
        super().__init__(device)
        self.job = job

    def rows(self) -> Iterator[dict[str, Any]]:
        """Run the job.

        Yields
        ------
        dict
            ``rank``, ``table`` and the columns of one event: of the profiled steps, as a trace has them, and with the
            table ``steps`` the timed steps (``start_ns, end_ns``). Times are nanoseconds since the first event.
        """
        with tempfile.TemporaryDirectory(prefix="nsightkit-") as folder:
            self._run(folder)
            tables = []
            for rank in range(self.job.ranks):
                tables += _events(Path(folder), rank)
        whole = pd.concat(tables, ignore_index=True)
        first = whole["start_ns"].min()
        whole["start_ns"] -= first
        whole["end_ns"] -= first
        yield from whole.to_dict("records")

    def _run(self, folder: str) -> None:
        task = json.dumps({**dataclasses.asdict(self.job), "device": self.device.type, "folder": folder})
        ranks = ["--standalone", f"--nproc-per-node={self.job.ranks}", "--no-python"]
        command = [sys.executable, "-m", "torch.distributed.run", *ranks, sys.executable, "-m", "_lib.late_rank", task]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        # All ranks are on this machine: no host name needs to be looked up.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
        if ended.returncode:
            raise RuntimeError(f"the ranks ended with code {ended.returncode}: {ended.stderr[-2000:]}")


def _events(folder: Path, rank: int) -> list[pd.DataFrame]:
    """Read what one rank wrote; times are on the clock that all ranks share."""
    trace = nsightkit.load(folder / f"rank{rank}.json", cache=False)
    timed = json.loads((folder / f"rank{rank}.steps").read_text(encoding="utf-8"))
    frames = [pd.DataFrame(timed, columns=["start_ns", "end_ns"]).assign(rank=rank, table="steps")]
    for table, columns in _TABLES.items():
        rows = trace.table(table, columns)
        if len(rows):
            rows = rows.assign(rank=rank, table=table)
            rows["start_ns"] += trace.t0_ns
            rows["end_ns"] += trace.t0_ns
            frames.append(rows.astype({name: "str" for name in _TEXTS if name in rows}))
    return frames


def traces(rows: pd.DataFrame) -> list[Trace]:
    """Make one trace per rank of the events that the job recorded.

    Parameters
    ----------
    rows : DataFrame
        Of :meth:`LateRank.rows`.

    Returns
    -------
    list of Trace
    """
    made = []
    for rank, own in rows.groupby("rank"):
        frames = {}
        for table, columns in _TABLES.items():
            events = own[own["table"] == table].reindex(columns=columns).reset_index(drop=True)
            if len(events):
                numbers = [name for name in columns if name not in _TEXTS]
                frames[table] = events.astype(dict.fromkeys(numbers, "int64"))
        marks = frames["ranges"]
        marks["level"], marks["parent"] = nesting(marks["thread"], marks["start_ns"], marks["end_ns"])
        missing = [] if "kernels" in frames else ["kernels", "memops", "calls", "graphs", "syncs"]
        meta = TraceMeta(tool="PyTorch profiler", missing=missing)
        meta.distributed = {"rank": int(rank), "world_size": int(rows["rank"].nunique())}
        made.append(Trace.from_frames(frames, meta))
    return made


def step_ns(rows: pd.DataFrame) -> pd.Series:
    """Give the times of the steps of rank 0 that no profiler watched.

    Parameters
    ----------
    rows : DataFrame
        Of :meth:`LateRank.rows`.

    Returns
    -------
    Series of float
        Nanoseconds.
    """
    timed = rows[(rows["table"] == "steps") & (rows["rank"] == 0)]
    return (timed["end_ns"] - timed["start_ns"]).astype(float).reset_index(drop=True)


def run(device: str, **parameters: Any) -> LateRank:
    """Train in several processes, one of which may be late.

    Parameters
    ----------
    device : str
    **parameters
        Fields of :class:`Job`.

    Returns
    -------
    LateRank
    """
    return LateRank(Job(**parameters), device)


# -- a rank ----------------------------------------------------------------------------------------------------------


class Rank:
    """One rank's model, and its steps."""

    def __init__(self, job: Job, device: str) -> None:
        self.rank = int(os.environ["RANK"])
        self.device = torch.device(device)
        has_own_gpu = device == "cuda" and torch.cuda.device_count() >= job.ranks
        if device == "cuda":
            self.device = torch.device("cuda", self.rank if has_own_gpu else 0)
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
        dist.init_process_group("nccl" if has_own_gpu else "gloo")
        is_late = job.late and self.rank == job.ranks - 1
        self.wait_s = (job.data_ms + (job.late_ms if is_late else 0.0)) / 1e3
        self.shape = (job.batch, job.hidden)
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(job.layers):
            layers += [nn.Linear(job.hidden, job.hidden), nn.GELU()]
        self.model = DistributedDataParallel(nn.Sequential(*layers).to(self.device), bucket_cap_mb=job.bucket_mb)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        torch.manual_seed(1 + self.rank)  # the same model, but different batches

    def step(self) -> None:
        """Wait for a batch, and learn from it together with the other ranks."""
        with phase("data"):
            time.sleep(self.wait_s)
            x = torch.randn(self.shape).to(self.device)
        with phase("forward"):
            loss = self.model(x).square().mean()
        with phase("backward"):
            loss.backward()
        with phase("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(self, steps: int) -> list[tuple[int, int]]:
        """Give start and end of steps, in nanoseconds since 1970."""
        times = []
        for _ in range(steps):
            start = time.time_ns()
            self.step()
            times.append((start, time.time_ns()))
        return times

    def profile(self, steps: int, path: Path) -> None:
        """Write a trace of some steps."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as watch:
            for number in range(steps):
                with torch.profiler.record_function(f"step {number}"):
                    self.step()
        watch.export_chrome_trace(str(path))


def _main(task: dict[str, Any]) -> None:
    folder, device = Path(task.pop("folder")), task.pop("device")
    job = Job(**task)
    rank = Rank(job, device)
    rank.timed(_WARMUP)
    times = rank.timed(job.steps)
    (folder / f"rank{rank.rank}.steps").write_text(json.dumps(times), encoding="utf-8")
    dist.barrier()
    rank.profile(job.profiled, folder / f"rank{rank.rank}.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
