"""A training step of a small language model, with faults that can be switched on one at a time.

Each fault is one that profiles of real training runs show, and each has its fix in the same code. The arithmetic is the
same with and without a fault, so the losses agree and only the time differs.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from nsightkit.workloads.models import Decoder, DecoderConfig, Samples, Workload, autocast
from nsightkit.workloads.phases import phase


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Sizes and faults; the defaults suit a CPU.

    Parameters
    ----------
    vocabulary, hidden, layers, heads : int
        The MLP is four times as wide as `hidden`, so a layer has ``16 * hidden**2`` weights.
    context : int
        Tokens in a sequence.
    batch : int
        Sequences in a step.
    precision : {"fp32", "bf16"}
        ``bf16`` runs the forward pass under autocast.
    decode_bytes : int
        Bytes that are decompressed for each sample: CPU time of the input pipeline.
    read_ms : float
        Milliseconds that each sample waits for its storage, without using the CPU.
    workers : int
        Processes that prepare batches ahead of the step. Fault: none, so that the training process reads and decodes
        each batch itself, between two steps.
    sync : bool
        Fault: the CPU reads one statistic per layer, and the loss, as soon as they are computed (``.item()``). Each
        read waits for everything the GPU was given.
    tiny : bool
        Fault: optimizer, norms and activation are chains of elementary operations, one kernel each.

    Notes
    -----
    A fault shows on a GPU only at a size where it costs more than it hides behind. With about 5 µs of CPU time per
    launch, and at least 2 µs of GPU time per kernel:

    - ``sync`` costs something when the CPU could otherwise run ahead, so a layer must take the GPU about as long as
      the CPU needs to launch its 55 forward kernels (0.35 ms): 1,024 tokens of width 1024, not 4,096 of width 2048.
    - ``tiny`` needs kernels shorter than their launch. 12 layers of width 256 with a batch of one launch about 3,100
      kernels, 15 ms on the CPU and 8 ms on the GPU; at width 512 and a batch of four the GPU is the slower one.
    - Without workers the loader must be slower than the step: 16 samples of 1 MB take one process 80 ms.
    """

    vocabulary: int = 512
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    context: int = 64
    batch: int = 4
    precision: str = "fp32"
    decode_bytes: int = 20_000
    read_ms: float = 0.0
    workers: int = 2
    sync: bool = False
    tiny: bool = False


class Documents(IterableDataset[Tensor]):
    """An endless stream of token sequences that take time to read and decode.

    Each sample waits for its storage and is then decompressed with ``zlib``, like a record of a compressed shard.
    Sample n is the same in every process, so workers change only the time.

    Parameters
    ----------
    config : TrainingConfig
    """

    def __init__(self, config: TrainingConfig) -> None:
        super().__init__()
        self.config = config
        generator = np.random.default_rng(0)
        # Two bytes per token, and never token 0: nothing may be cheap because it is zero.
        length = max(config.decode_bytes // 2, config.context + 1)
        tokens = generator.integers(1, config.vocabulary, size=length, dtype=np.uint16)
        self._stored = zlib.compress(tokens.tobytes(), level=1)

    def __iter__(self) -> Iterator[Tensor]:
        # A worker prepares whole batches in turn, so its samples are those of every n-th batch.
        batch_numbers = itertools.count()
        worker = get_worker_info()
        if worker is not None:
            batch_numbers = itertools.count(worker.id, worker.num_workers)
        batch = self.config.batch
        for batch_number in batch_numbers:
            for index in range(batch_number * batch, (batch_number + 1) * batch):
                yield self.sample(index)

    def sample(self, index: int) -> Tensor:
        """Read and decode one sample: decompress the whole store each time, which stands for a decoder's work.

        Parameters
        ----------
        index : int

        Returns
        -------
        Tensor
            Tokens of shape (context + 1,), int64, each in 1 … ``vocabulary - 1``.
        """
        if self.config.read_ms:
            time.sleep(self.config.read_ms / 1e3)
        tokens = np.frombuffer(zlib.decompress(self._stored), np.uint16)
        length = self.config.context + 1
        generator = np.random.default_rng((0, index))
        start = int(generator.integers(0, len(tokens) - length + 1))
        return torch.from_numpy(tokens[start : start + length].astype(np.int64))


class Training(Workload):
    """A training run, one step at a time.

    Parameters
    ----------
    config : TrainingConfig
    device : str

    Attributes
    ----------
    data_wait_ns : list of int
        How long each step waited for its batch, timed around ``next`` on the loader.
    """

    def __init__(self, config: TrainingConfig, device: str = "cpu") -> None:
        super().__init__(device)
        self.config = config
        self.data_wait_ns: list[int] = []
        self._losses: list[Tensor | float] = []
        self._largest_activations: list[Tensor | float] = []
        torch.manual_seed(0)
        sizes = DecoderConfig(
            vocabulary=config.vocabulary,
            d_model=config.hidden,
            layers=config.layers,
            heads=config.heads,
            context=config.context,
            d_ff=4 * config.hidden,
            style="elementary" if config.tiny else "fused",
        )
        self.model = Decoder(sizes).to(self.device)
        for block in self.model.blocks:
            block.register_forward_hook(self._log_largest_activation)
        # Without foreach: each parameter has its own chain of elementary operations.
        implementation: dict[str, Any] = {"foreach": False} if config.tiny else {"fused": True}
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, **implementation)
        self._loader = DataLoader(
            Documents(config),
            batch_size=config.batch,
            num_workers=config.workers,
            pin_memory=self.device.type == "cuda",  # a copy from pageable memory blocks even with non_blocking=True
            prefetch_factor=4 if config.workers else None,
        )
        self._batches: Iterator[Tensor] | None = None
        self.callback(setattr, self, "_batches", None)  # dropping the iterator ends the workers

    def step(self) -> None:
        """Fetch a batch, and train on it: forward, backward and optimizer."""
        with phase("step"):
            with phase("data"):
                tokens = self._next_batch()
            with phase("copy"):
                tokens = tokens.to(self.device, non_blocking=True)
            with phase("forward"):
                with autocast(self.device, self.config.precision):
                    logits = self.model(tokens[:, :-1])
                loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            with phase("backward"):
                torch.autograd.backward(loss)
            with phase("optimizer"):
                self._optimizer.step()
                self.model.zero_grad()
            self._losses.append(self._logged(loss))

    def _next_batch(self) -> Tensor:
        """Fetch a batch from the loader, and note how long that took."""
        # Timed around `next`: when a `for` statement has bound its variable, the wait is over.
        start = time.perf_counter_ns()
        if self._batches is None:
            self._batches = iter(self._loader)
        tokens = next(self._batches)
        self.data_wait_ns.append(time.perf_counter_ns() - start)
        return tokens

    def _log_largest_activation(self, _: nn.Module, __: Any, activations: Tensor) -> None:
        """Keep the largest activation of a block, as a log would."""
        self._largest_activations.append(self._logged(activations.detach().abs().amax()))

    def _logged(self, value: Tensor) -> Tensor | float:
        """Read a value at once (fault ``sync``: it waits until the queue is empty), or leave it on the device."""
        if self.config.sync:
            return value.item()
        return value.detach()

    def samples(self) -> Samples:
        """Give the loss of each step, and how long it waited for its batch.

        Returns
        -------
        dict of str to list of float
            ``loss`` and ``data_wait_ns``, one per step.
        """
        losses = [float(loss) for loss in self._losses]
        return {"loss": losses, "data_wait_ns": [float(wait) for wait in self.data_wait_ns]}


def run(device: str, **parameters: Any) -> Training:
    """Train a small language model, with faults.

    Parameters
    ----------
    device : str
        ``"cuda"`` or ``"cpu"``.
    **parameters
        Fields of :class:`TrainingConfig`.

    Returns
    -------
    Training
        A context manager with ``step()`` and ``samples()``.
    """
    return Training(TrainingConfig(**parameters), device)
