"""A training step of a small language model, with faults that can be switched on one at a time.

Each fault is one that profiles of real training runs show, and each has its repair in the same code: a
page switches one of them and nothing else. The arithmetic is the same with and without a fault, so the
losses agree; only the time differs.

Shapes are written B (batch), T (context), D (hidden), H (heads), V (vocabulary).
"""

from __future__ import annotations

import dataclasses
import math
import time
import zlib
from collections.abc import Iterator
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from nsightkit.workloads.phases import phase

__all__ = ["Decoder", "Documents", "Training", "TrainingConfig", "start"]


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Sizes, and the faults that are planted.

    Parameters
    ----------
    vocabulary, hidden, layers, heads, context, batch : int
        Sizes of the model and of a step; the defaults suit a CPU and run in a blink.
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
    seed : int
    """

    vocabulary: int = 512
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    context: int = 64
    batch: int = 4
    precision: Literal["fp32", "bf16"] = "fp32"
    decode_bytes: int = 20_000
    read_ms: float = 0.0
    workers: int = 2
    starved: bool = False
    pageable: bool = False
    sync: bool = False
    tiny: bool = False
    seed: int = 0


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
        number = first
        while True:
            for row in range(self._config.batch):
                yield self.sample(number * self._config.batch + row)
            number += stride

    def sample(self, index: int) -> Tensor:
        """Read and decode one sample.

        Parameters
        ----------
        index : int

        Returns
        -------
        Tensor
            Tokens of shape (T + 1,), int64, each in 1 … V - 1.
        """
        if self._config.read_ms:
            time.sleep(self._config.read_ms / 1e3)
        tokens = np.frombuffer(zlib.decompress(self._stored), np.uint16)
        length = self._config.context + 1
        start = int(np.random.default_rng((self._config.seed, index)).integers(0, len(tokens) - length + 1))
        return torch.from_numpy(tokens[start : start + length].astype(np.int64))


class _Norm(nn.Module):
    """RMSNorm: one fused operation, or (fault ``tiny``) the chain of elementary ones it consists of."""

    def __init__(self, width: int, tiny: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._tiny = tiny

    def forward(self, x: Tensor) -> Tensor:
        if not self._tiny:
            fused: Tensor = F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), eps=1e-6)
            return fused
        squares = x.float() * x.float()
        scale = torch.rsqrt(squares.mean(-1, keepdim=True) + 1e-6)
        written_out: Tensor = (x.float() * scale).to(x.dtype) * self.weight.to(x.dtype)
        return written_out


class _Block(nn.Module):
    """Causal attention with rotary positions, then a gated MLP; a norm before and a residual around each."""

    def __init__(self, config: TrainingConfig) -> None:
        super().__init__()
        width = config.hidden
        self._heads, self._tiny = config.heads, config.tiny
        self.norm_attention = _Norm(width, config.tiny)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_mlp = _Norm(width, config.tiny)
        self.gate_up = nn.Linear(width, 8 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, context, width = x.shape
        q, k, v = self.qkv(self.norm_attention(x)).view(batch, context, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
        q, k = _rotate(q, cosine, sine), _rotate(k, cosine, sine)
        # is_causal, not a mask: a mask tensor would rule out flash attention.
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, context, width))
        gate, up = self.gate_up(self.norm_mlp(x)).chunk(2, dim=-1)
        activated = gate / (1 + torch.exp(-gate)) if self._tiny else F.silu(gate)
        fed: Tensor = self.down(activated * up)
        return x + fed


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary position embedding of x (B, H, T, D/H)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x.dtype)


class Decoder(nn.Module):
    """A decoder-only language model.

    Parameters
    ----------
    config : TrainingConfig
    """

    def __init__(self, config: TrainingConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.norm = _Norm(config.hidden, config.tiny)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        half = config.hidden // config.heads // 2
        frequency = 10_000.0 ** (-torch.arange(half) / half)
        angle = torch.outer(torch.arange(config.context), frequency)
        self.register_buffer("cosine", angle.cos(), persistent=False)
        self.register_buffer("sine", angle.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[-1]))

    def forward(self, tokens: Tensor, watch: _Statistics) -> Tensor:
        """Give the logits.

        Parameters
        ----------
        tokens : Tensor
            (B, T), int64.
        watch : callable
            Called with the output of each block.

        Returns
        -------
        Tensor
            (B, T, V).
        """
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cosine, self.sine)
            watch(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class _Statistics:
    """Largest activation of each block, for the log: read at once (fault ``sync``) or kept on the device."""

    def __init__(self, sync: bool) -> None:
        self._sync = sync
        self._kept: list[Tensor | float] = []

    def __call__(self, value: Tensor) -> None:
        largest = value.detach().abs().amax()
        # .item() waits until the GPU has done everything it was given, then the CPU starts from zero again.
        self._kept.append(largest.item() if self._sync else largest)

    def read(self) -> list[float]:
        return [float(value) for value in self._kept]


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
            if gradient is None:
                continue
            parameter.mul_(1 - self._lr * self._decay)
            first.mul_(beta1)
            first.add_(gradient * (1 - beta1))
            second.mul_(beta2)
            second.add_(gradient * gradient * (1 - beta2))
            corrected_first = first / (1 - beta1**self._step)
            corrected_second = second / (1 - beta2**self._step)
            parameter.sub_(corrected_first / (corrected_second.sqrt() + eps) * self._lr)

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


class Training:
    """A training run, a step at a time.

    Parameters
    ----------
    config : TrainingConfig
    device : str
        ``"cpu"`` or a CUDA device.

    Attributes
    ----------
    data_wait_ns : list of int
        How long each step waited for its batch, measured around ``next`` on the loader.
    parameters : dict
        The configuration as plain values.
    """

    def __init__(self, config: TrainingConfig, device: str = "cpu") -> None:
        self.config, self.device = config, torch.device(device)
        torch.manual_seed(config.seed)
        self.model = Decoder(config).to(self.device)
        parameters = list(self.model.parameters())
        self._optimizer: Any = (
            _ElementaryAdamW(parameters, lr=1e-3, weight_decay=0.01)
            if config.tiny
            else torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01, fused=True)
        )
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
        self._losses: list[Tensor | float] = []
        self._statistics = _Statistics(config.sync)
        self.data_wait_ns: list[int] = []
        self.parameters = dataclasses.asdict(config)

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
                enabled = self.config.precision == "bf16"
                with torch.autocast(self.device.type, torch.bfloat16, enabled=enabled):
                    logits = self.model(tokens[:, :-1], self._statistics)
                loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            with phase("backward"):
                torch.autograd.backward(loss)
            with phase("optimizer"):
                self._optimizer.step()
                self._optimizer.zero_grad()
            self._losses.append(loss.item() if self.config.sync else loss.detach())

    def losses(self) -> list[float]:
        """Read the loss of every step so far.

        Returns
        -------
        list of float
        """
        return [float(loss) for loss in self._losses]

    def largest_activations(self) -> list[float]:
        """Read the largest activation of every block in every step so far.

        Returns
        -------
        list of float
        """
        return self._statistics.read()

    def close(self) -> None:
        """End the loader's workers."""
        self._batches = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start(device: str, **parameters: Any) -> Training:
    """Begin a training run.

    Parameters
    ----------
    device : str
    **parameters
        Fields of :class:`TrainingConfig`.

    Returns
    -------
    Training
    """
    return Training(TrainingConfig(**parameters), device)
