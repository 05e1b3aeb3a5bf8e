"""A training step of a small language model, with faults that can be switched on one at a time.

Each fault is one that profiles of real training runs show, and each has its repair in the same code: a
page switches one of them and nothing else. The arithmetic is the same with and without a fault, so the
losses agree; only the time differs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
import zlib
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from nsightkit.workloads.models import Sizes
from nsightkit.workloads.phases import phase
from nsightkit.workloads.workload import Workload, autocast

__all__ = ["Documents", "Training", "TrainingConfig", "start"]


@dataclasses.dataclass(frozen=True)
class TrainingConfig(Sizes):
    """Sizes, and the faults that are planted.

    Parameters
    ----------
    vocabulary, hidden, layers, heads, context, batch, seed : int
        As for :class:`nsightkit.workloads.models.Sizes`.
    precision : {"fp32", "bf16"}
        ``bf16`` runs the forward under autocast.
    decode_bytes : int
        Bytes of compressed storage that are unpacked for each sample: CPU time of the input pipeline.
    read_ms : float
        Time each sample waits for its storage: time of the input pipeline in which the CPU does nothing.
    workers : int
        Processes that prepare batches ahead of the step.
    starved : bool
        Fault: no workers; every batch is read and decoded between two steps, by the training process itself.
    pageable : bool
        Fault: batches lie in pageable memory, so that their copy to the GPU holds up the thread that starts it.
    sync : bool
        Fault: statistics of each layer and the loss are read by the CPU as soon as they are computed
        (``.item()``), each time waiting for all the GPU has been given.
    tiny : bool
        Fault: the optimizer, the norms and the activation are written as chains of elementary operations,
        a kernel each.
    """

    precision: Literal["fp32", "bf16"] = "fp32"
    decode_bytes: int = 20_000
    read_ms: float = 0.0
    workers: int = 2
    starved: bool = False
    pageable: bool = False
    sync: bool = False
    tiny: bool = False


class Documents(IterableDataset[Tensor]):
    """An endless stream of token sequences that cost time to read and decode.

    Every sample waits for its storage and is then unpacked with ``zlib``, as records in compressed shards
    are. Sample n is the same whoever prepares it, so that workers change the time and not the data.

    Parameters
    ----------
    config : TrainingConfig
    """

    def __init__(self, config: TrainingConfig) -> None:
        super().__init__()
        self._config = config
        random = np.random.default_rng(config.seed)
        # Two bytes a token, and never token 0: nothing in a step may be cheap because it is zero.
        count = max(config.decode_bytes // 2, config.context + 1)
        tokens = random.integers(1, config.vocabulary, size=count, dtype=np.uint16)
        self._stored = zlib.compress(tokens.tobytes(), level=1)

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        # A worker prepares whole batches in turn, so its samples are those of every n-th batch.
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        for number in itertools.count(first, stride):
            yield from map(self.sample, range(number * self._config.batch, (number + 1) * self._config.batch))

    def sample(self, index: int) -> Tensor:
        """Read and decode one sample.

        Parameters
        ----------
        index : int

        Returns
        -------
        Tensor
            Tokens of shape (context + 1,), int64, each in 1 … V - 1.
        """
        if self._config.read_ms:
            time.sleep(self._config.read_ms / 1e3)
        tokens = np.frombuffer(zlib.decompress(self._stored), np.uint16)
        length = self._config.context + 1
        start = int(np.random.default_rng((self._config.seed, index)).integers(0, len(tokens) - length + 1))
        return torch.from_numpy(tokens[start : start + length].astype(np.int64))


class _ElementaryAdamW:
    """AdamW written out: about a dozen kernels for each parameter tensor and step (fault ``tiny``)."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        self._parameters, self._lr, self._decay = parameters, lr, weight_decay
        self._first = [torch.zeros_like(p) for p in parameters]
        self._second = [torch.zeros_like(p) for p in parameters]
        self._step = 0

    @torch.no_grad()
    def step(self) -> None:
        self._step += 1
        beta1, beta2, eps = 0.9, 0.999, 1e-8
        for parameter, first, second in zip(self._parameters, self._first, self._second, strict=True):
            gradient = parameter.grad
            assert gradient is not None
            parameter.mul_(1 - self._lr * self._decay)
            first.mul_(beta1).add_(gradient * (1 - beta1))
            second.mul_(beta2).add_(gradient * gradient * (1 - beta2))
            corrected_first = first / (1 - beta1**self._step)
            corrected_second = second / (1 - beta2**self._step)
            parameter.sub_(corrected_first / (corrected_second.sqrt() + eps) * self._lr)


class Training(Workload):
    """A training run, a step at a time.

    Attributes
    ----------
    data_wait_ns : list of int
        How long each step waited for its batch, measured around ``next`` on the loader.
    """

    def __init__(self, config: TrainingConfig, device: str = "cpu") -> None:
        super().__init__(config, device)
        torch.manual_seed(config.seed)
        norm = "tiny" if config.tiny else "fused"
        self.model = config.decoder(norm=norm, tiny_activation=config.tiny).to(self.device)
        self._largest: list[Tensor | float] = []
        for block in self.model.blocks:
            block.register_forward_hook(self._watch)
        written = _ElementaryAdamW if config.tiny else functools.partial(torch.optim.AdamW, fused=True)
        self._optimizer: Any = written(list(self.model.parameters()), lr=1e-3, weight_decay=0.01)
        workers = 0 if config.starved else config.workers
        pin = self.device.type == "cuda" and not config.pageable
        self._loader = DataLoader(
            Documents(config),
            batch_size=config.batch,
            num_workers=workers,
            pin_memory=pin,
            persistent_workers=False,
            prefetch_factor=4 if workers else None,
        )
        self._non_blocking = pin  # from pageable memory the copy blocks whatever is asked for
        self._batches: Iterator[Tensor] | None = None
        self.callback(setattr, self, "_batches", None)  # which ends the loader's workers

    def step(self) -> None:
        """Fetch a batch and learn from it."""
        with phase("step"):
            with phase("data"):
                # Around `next`: by the time a `for` statement has bound its variable the waiting is over.
                start = time.perf_counter_ns()
                if self._batches is None:
                    self._batches = iter(self._loader)
                tokens = next(self._batches)
                self.data_wait_ns.append(time.perf_counter_ns() - start)
            with phase("copy"):
                tokens = tokens.to(self.device, non_blocking=self._non_blocking)
            with phase("forward"):
                with autocast(self.device, self.config.precision):
                    logits = self.model(tokens[:, :-1])
                loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            with phase("backward"):
                torch.autograd.backward(loss)
            with phase("optimizer"):
                self._optimizer.step()
                self.model.zero_grad()
            self._losses.append(loss.item() if self.config.sync else loss.detach())

    def _watch(self, _: nn.Module, __: Any, value: Tensor) -> None:
        """Keep the largest activation of a block for the log: read at once (fault ``sync``), or left on the device."""
        largest = value.detach().abs().amax()
        # .item() waits until the GPU has done everything it was given, then the CPU starts from zero again.
        self._largest.append(largest.item() if self.config.sync else largest)

    def largest_activations(self) -> list[float]:
        """Read the largest activation of every block in every step so far."""
        return [float(value) for value in self._largest]


def start(device: str, **parameters: Any) -> Training:
    """Begin a training run, with fields of :class:`TrainingConfig`."""
    return Training(TrainingConfig(**parameters), device)
