"""Data-parallel training in several processes, one of which gets its batches late: the investigation of a straggler.

This process is rank 0; the others are its children. They talk through Gloo, or through NCCL where each rank can have a
GPU of its own. A batch is a pause, as a loader's is to the process that waits for it, so that a rank is not late merely
because processors are few.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import profiler
from torch.autograd.graph import register_multi_grad_hook

from nsightkit.workloads.phases import phase
from nsightkit.workloads.workload import Workload

__all__ = ["Crew", "Gradients", "LateConfig", "start"]

#: Ranges that are kept of each rank, and what they are called.
_SHOWN = {**{name: name for name in ("data", "forward", "backward", "optimizer")}, "gloo:all_reduce": "gloo"}
#: A child that takes longer to end does not.
_PATIENCE_S = 20.0


@dataclasses.dataclass(frozen=True)
class LateConfig:
    """Sizes, and the rank that is late.

    Parameters
    ----------
    ranks : int
    late : bool
        Fault: rank `late_rank` waits `late_ms` longer for every batch.
    late_rank : int
    late_ms, data_ms : float
        How long the late rank waits more, and every rank anyway.
    hidden, layers, batch : int
        Width and depth of the model, and rows of a batch.
    bucket_mb : float
        Gradients are added up in buckets of about this size, the first while backward still goes on.
    profiled : int
        Steps whose profile is kept of each rank.
    """

    ranks: int = 2
    late: bool = True
    late_rank: int = 1
    late_ms: float = 40.0
    data_ms: float = 2.0
    hidden: int = 192
    layers: int = 6
    batch: int = 64
    bucket_mb: float = 0.5
    profiled: int = 16


class Gradients:
    """Adds up gradients over ranks, bucket by bucket, each as soon as its last gradient is there.

    What ``DistributedDataParallel`` does, in few lines: that one imports a compiler, as PyTorch's optimizers do, and
    each process would take longer for it than for all of its steps.

    Parameters
    ----------
    model : Module
    bucket_bytes : float
        About what a bucket holds.
    """

    def __init__(self, model: nn.Module, bucket_bytes: float) -> None:
        self._going: list[tuple[list[nn.Parameter], Tensor, Any]] = []
        buckets: list[list[nn.Parameter]] = [[]]
        # Backward ends with the first layer, so the buckets begin with the last one.
        for parameter in reversed(list(model.parameters())):
            if sum(one.nbytes for one in buckets[-1]) >= bucket_bytes:
                buckets.append([])
            buckets[-1].append(parameter)
        for bucket in buckets:
            register_multi_grad_hook(bucket, partial(self._send, bucket))

    def _send(self, bucket: list[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
        flat = torch.cat([one.view(-1) for one in gradients if one is not None])
        self._going.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

    def wait(self) -> None:
        """Wait for the sums, and put their means where the gradients were."""
        for bucket, flat, work in self._going:
            work.wait()
            means = (flat / dist.get_world_size()).split([p.numel() for p in bucket])  # type: ignore[no-untyped-call]
            for one, mean in zip(bucket, means, strict=True):
                assert one.grad is not None
                one.grad.copy_(mean.view_as(one))
        self._going.clear()


class _Rank:
    """One rank's model, and its steps."""

    def __init__(self, config: LateConfig, rank: int, device: str, store: str) -> None:
        self.config, self.rank = config, rank
        own = device.startswith("cuda") and torch.cuda.device_count() >= config.ranks
        self.backend = "nccl" if own else "gloo"
        self.device = torch.device("cuda", rank if own else 0) if device.startswith("cuda") else torch.device("cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
        dist.init_process_group(self.backend, init_method=f"file://{store}", rank=rank, world_size=config.ranks)
        torch.manual_seed(0)
        width = config.hidden
        layers = (layer for _ in range(config.layers) for layer in (nn.Linear(width, width), nn.GELU()))
        self.model = nn.Sequential(*layers).to(self.device)
        self.gradients = Gradients(self.model, config.bucket_mb * 1e6)
        torch.manual_seed(1 + rank)  # one model, but batches of their own

    def step(self) -> None:
        config = self.config
        with phase("data"):
            late_ms = config.late_ms if config.late and self.rank == config.late_rank else 0.0
            time.sleep((config.data_ms + late_ms) / 1e3)
            x = torch.randn(config.batch, config.hidden).to(self.device)
        with phase("forward"):
            loss: Tensor = self.model(x).square().mean()
        with phase("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
            self.gradients.wait()
        with phase("optimizer"), torch.no_grad():
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter.add_(parameter.grad, alpha=-0.01)
                parameter.grad = None
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def profiled(self) -> dict[str, list[int]]:
        """Profile some steps, and give begins and ends of what matters, in nanoseconds since 1970."""
        dist.barrier()
        # What torch.profiler is made of, without the compiler that it imports.
        watch = profiler.profile(use_kineto=True, use_device="cuda" if self.device.type == "cuda" else None)
        with watch:
            for number in range(self.config.profiled):
                with profiler.record_function(f"step {number}"):
                    self.step()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            watch.export_chrome_trace(str(path))  # type: ignore[no-untyped-call]
            return _intervals(json.loads(path.read_text(encoding="utf-8")))


def _intervals(document: Mapping[str, Any]) -> dict[str, list[int]]:
    """Begins and ends of steps, phases, collectives, and of what was computed, of a profile."""
    base = int(document.get("baseTimeNanoseconds") or 0)
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    events = [event for event in document["traceEvents"] if event.get("ph") == "X"]
    talking = {event["tid"] for event in events if str(event["name"]).startswith("gloo:")}
    for event in events:
        name, start = str(event["name"]), base + round(float(event["ts"]) * 1e3)
        of_category = {
            "kernel": "nccl" if "nccl" in name.lower() else "kernels",
            "user_annotation": _SHOWN.get(name, "step" if name.startswith("step ") else ""),
            "cpu_op": "" if event["tid"] in talking else "operators",
        }
        found[of_category.get(event.get("cat"), "")].append((start, start + round(float(event["dur"]) * 1e3)))
    return {
        f"{what}_{edge}_ns": [pair[i] for pair in (union if what in ("operators", "kernels") else sorted)(pairs)]
        for what, pairs in found.items()
        if what
        for i, edge in enumerate(("start", "end"))
    }


def union(parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge intervals."""
    out: list[tuple[int, int]] = []
    for start, end in sorted(parts):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((start, end))
    return out


class Crew(Workload):
    """All ranks: this process and its children.

    Attributes
    ----------
    children : list of Popen
        The other ranks, the first of them rank 1.
    """

    def __init__(self, config: LateConfig, device: str) -> None:
        super().__init__(config, device)
        folder = self.enter_context(tempfile.TemporaryDirectory())
        self.callback(self._end)
        self.children: list[subprocess.Popen[str]] = []
        store = str(Path(folder, "store"))
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            # All ranks are on this machine: no name needs to be looked up.
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            self.callback(os.environ.pop, "GLOO_SOCKET_IFNAME", None)
        try:
            for rank in range(1, config.ranks):
                task = json.dumps({"config": self.parameters, "rank": rank, "device": device, "store": store})
                command = [sys.executable, "-m", "nsightkit.workloads.late_rank", task]
                self.children.append(
                    subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                )
            self._rank = _Rank(config, 0, device, store)
        except BaseException:
            for child in self.children:
                child.kill()  # it waits for this one to join
            self.close()
            raise
        self.parameters |= {"backend": self._rank.backend}

    def step(self) -> None:
        """Take a step on every rank."""
        self._all("step", self._rank.step)

    def observed(self) -> dict[str, list[float]]:
        """Profile some steps on every rank.

        Returns
        -------
        dict of str to list
            Of each rank ``rank0_step_start_ns``, ``rank0_step_end_ns`` and so on: begins and ends of its steps, of
            their phases (``data, forward, backward, optimizer``), of its all-reduces (``gloo`` or ``nccl``) and of what
            it computed meanwhile (``operators``, and ``kernels`` on a GPU), in nanoseconds since the first of them.
        """
        every = self._all("profile", self._rank.profiled)
        zero = min(times[0] for one in every for times in one.values() if times)
        return {
            f"rank{rank}_{name}": [float(time - zero) for time in times]
            for rank, one in enumerate(every)
            for name, times in one.items()
        }

    def _all(self, word: str, own: Callable[[], Any]) -> list[Any]:
        """Have all ranks do something, this one included; gives what each answers."""
        try:
            for child in self.children:
                print(word, file=child.stdin, flush=True)
            answers = [own()]
            for child in self.children:
                assert child.stdout is not None
                answers.append(json.loads(child.stdout.readline()))
        except (BrokenPipeError, json.JSONDecodeError) as error:  # nobody reads, or nobody answers
            rank, code = 1 + self.children.index(child), child.wait(_PATIENCE_S)
            raise RuntimeError(f"rank {rank} ended with code {code}") from error
        return answers

    def _end(self) -> None:
        """End the other ranks, then this one."""
        for child in self.children:
            with suppress(BrokenPipeError):
                assert child.stdin is not None
                child.stdin.close()  # the end of its input is the end of it
        if dist.is_initialized():
            dist.destroy_process_group()
        for child in self.children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(_PATIENCE_S)
            child.kill()  # nothing happens to one that has ended
            with child:  # waits for its end, and closes its pipes
                pass


def start(device: str, **parameters: Any) -> Crew:
    """Begin to run a job, with fields of :class:`LateConfig`."""
    return Crew(LateConfig(**parameters), device)


def _main(task: Mapping[str, Any]) -> None:
    """Be one of the other ranks, until there is no more to read."""
    # The pipe is for answers: what libraries print goes where errors go.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        rank = _Rank(LateConfig(**task["config"]), task["rank"], task["device"], task["store"])
        asked: dict[str, Callable[[], Any]] = {"profile": rank.profiled, "step": rank.step}
        for line in sys.stdin:
            answers.write(json.dumps(asked[line.strip()]()) + "\n")
            answers.flush()
        dist.destroy_process_group()


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
