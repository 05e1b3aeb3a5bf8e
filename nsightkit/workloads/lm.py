"""A decoder language model to be measured: forward, backward and optimizer, in any precision, with or without ranges.

Hand-written RMSNorm, rotary positions, causal attention (written out, or PyTorch's fused one), a gated MLP, an
untied head, no biases: the model whose cost :mod:`nsightkit.analysis.roofline.envelope` works out.

Shapes are written B (batch), T (context), D (``d_model``), H (heads), K (head size), V (vocabulary).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsightkit.workloads.phases import phase

__all__ = ["LMConfig", "LanguageModel", "Run", "start"]

#: Batches that take turns: a step must not find its tokens' embedding rows in the cache because it just used them.
_BATCHES = 4


@dataclasses.dataclass(frozen=True)
class LMConfig:
    """Sizes, and how the model is run.

    Parameters
    ----------
    batch, context, d_model, layers, d_ff, heads, vocabulary : int
        Sizes; `batch` is that of one forward pass. The defaults suit a CPU.
    mode : {"fwd", "fwd_bwd", "train"}
        Forward without a graph; forward and backward; or these and a step of AdamW.
    precision : {"fp32", "tf32", "bf16", "fp16"}
        ``bf16`` and ``fp16`` are autocast over fp32 weights, ``fp16`` with a gradient scaler; ``fp32`` has TF32 off.
    attention : {"sdpa", "naive"}
        PyTorch's fused attention, or one that writes its scores out.
    compiled : bool
        Run the model through ``torch.compile``.
    accumulate : int
        Forward and backward passes a step; each has its own batch.
    feed : {"device", "host"}
        Where a batch comes from: tokens that lie on the device beforehand, or a copy from pinned host memory within the
        step, in a range ``copy``.
    annotate : bool
        Mark ``step`` and its phases for a profiler; within forward the ``loss`` and, unless compiled, the ``head``.
    annotate_mha : bool
        Mark the parts of attention in the forward pass. What autograd does for them in the backward is not marked.
    seed : int
    """

    batch: int = 4
    context: int = 64
    d_model: int = 64
    layers: int = 2
    d_ff: int = 192
    heads: int = 4
    vocabulary: int = 512
    mode: Literal["fwd", "fwd_bwd", "train"] = "train"
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    attention: Literal["sdpa", "naive"] = "sdpa"
    compiled: bool = False
    accumulate: int = 1
    feed: Literal["device", "host"] = "device"
    annotate: bool = True
    annotate_mha: bool = False
    seed: int = 0


def _part(name: str, marked: bool) -> contextlib.AbstractContextManager[None]:
    return phase(name) if marked else contextlib.nullcontext()


class _Norm(nn.Module):
    """RMSNorm of its elementary operations: autocast has no rule for them, so they run in their input's type."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight
        return normed


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary position embedding of x (B, H, T, K).

    It turns pairs of channels. Of an odd head the last channel has no partner and passes unturned.
    """
    turned = 2 * cosine.shape[-1]
    first, second = x[..., :turned].chunk(2, dim=-1)
    parts = [first * cosine - second * sine, second * cosine + first * sine]
    if turned < x.shape[-1]:
        parts.append(x[..., turned:])
    return torch.cat(parts, dim=-1).to(x.dtype)


class _Attention(nn.Module):
    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        width = config.d_model
        self._heads, self._naive, self._annotate = config.heads, config.attention == "naive", config.annotate_mha
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def _part(self, name: str) -> contextlib.AbstractContextManager[None]:
        return _part(name, self._annotate)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, future: Tensor) -> Tensor:
        batch, context, width = x.shape
        with self._part("qkv_projections"):
            q, k, v = (
                linear(x).view(batch, context, self._heads, -1).transpose(1, 2) for linear in (self.q, self.k, self.v)
            )
        with self._part("rope"):
            q, k = _rotate(q, cosine, sine), _rotate(k, cosine, sine)
        attended = self._written_out(q, k, v, future) if self._naive else self._fused(q, k, v)
        with self._part("output_projection"):
            projected: Tensor = self.out(attended.transpose(1, 2).reshape(batch, context, width))
        return projected

    def _fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with self._part("sdpa"):
            # is_causal, not a mask: a mask tensor would rule out flash attention.
            attended: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attended

    def _written_out(self, q: Tensor, k: Tensor, v: Tensor, future: Tensor) -> Tensor:
        with self._part("qk_mask"):
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
            scores = scores.masked_fill(future, -math.inf)
        with self._part("softmax"):
            weights = F.softmax(scores, dim=-1)
        with self._part("attention_v"):
            attended: Tensor = weights @ v
        return attended


class _Block(nn.Module):
    """Attention, then a gated MLP (SwiGLU); a norm before and a residual around each."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        width = config.d_model
        self.norm_attention = _Norm(width)
        self.attention = _Attention(config)
        self.norm_mlp = _Norm(width)
        self.gate = nn.Linear(width, config.d_ff, bias=False)
        self.up = nn.Linear(width, config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, future: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x), cosine, sine, future)
        normed = self.norm_mlp(x)
        fed: Tensor = self.down(F.silu(self.gate(normed)) * self.up(normed))
        return x + fed


class LanguageModel(nn.Module):
    """A decoder-only language model.

    Parameters
    ----------
    config : LMConfig
    """

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.d_model)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.norm = _Norm(config.d_model)
        self.head = nn.Linear(config.d_model, config.vocabulary, bias=False)
        self._annotate = config.annotate and not config.compiled  # a mark would break the graph in two
        pairs = config.d_model // config.heads // 2
        frequency = 10_000.0 ** (-torch.arange(pairs) / max(pairs, 1))
        angle = torch.outer(torch.arange(config.context), frequency)
        self.register_buffer("cosine", angle.cos(), persistent=False)
        self.register_buffer("sine", angle.sin(), persistent=False)
        # Only attention that is written out needs it; a fused kernel skips the future by itself.
        side = config.context if config.attention == "naive" else 0
        self.register_buffer("future", torch.ones(side, side, dtype=torch.bool).triu(1), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[-1]))

    def forward(self, tokens: Tensor) -> Tensor:
        """Give the logits.

        Parameters
        ----------
        tokens : Tensor
            (B, T), int64.

        Returns
        -------
        Tensor
            (B, T, V).
        """
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cosine, self.sine, self.future)
        x = self.norm(x)
        with _part("head", self._annotate):
            logits: Tensor = self.head(x)
        return logits


class Run:
    """A model that is run a step at a time.

    Parameters
    ----------
    config : LMConfig
    device : str
        ``"cpu"`` or a CUDA device.

    Attributes
    ----------
    doing : str
        What the step is at: ``setup``, ``copy``, ``forward``, ``backward``, ``optimizer`` or ``zero_grad``. When memory
        runs out it says where.
    parameters : dict
        The configuration as plain values.
    data_wait_ns : list
        Empty: batches are made beforehand, and none is waited for.

    Notes
    -----
    The precision of fp32 GEMMs is a setting of the whole process, taken back by :meth:`close`.
    """

    def __init__(self, config: LMConfig, device: str = "cpu") -> None:
        self.doing = "setup"
        self.config, self.device = config, torch.device(device)
        self.parameters = dataclasses.asdict(config)
        self.data_wait_ns: list[int] = []
        # torch has a second interface to this (torch.backends...fp32_precision), and raises when both are used.
        self._before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if config.precision == "tf32" else "highest")
        torch.manual_seed(config.seed)
        with self.device:
            self.model = LanguageModel(config)
            # Never token 0, and never the same batch twice in a row: nothing may be cheap because it is zero or cached.
            shape = (_BATCHES, config.batch, config.context + 1)
            self._tokens = torch.randint(1, config.vocabulary, shape)
        if config.feed == "host":
            self._tokens = self._tokens.cpu()
            if self.device.type == "cuda":
                self._tokens = self._tokens.pin_memory()
        self._run = torch.compile(self.model) if config.compiled else self.model
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3) if config.mode == "train" else None
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16")
        self._given = 0
        self._losses: list[Tensor] = []

    def step(self) -> None:
        """Run the model once, and learn from it if the mode says so."""
        with self._phase("step"):
            losses = [self._pass() for _ in range(self.config.accumulate)]
            if self._optimizer is not None:
                self.doing = "optimizer"
                with self._phase("optimizer"):
                    self._scaler.step(self._optimizer)
                    self._scaler.update()
            if self.config.mode != "fwd":
                self.doing = "zero_grad"
                with self._phase("zero_grad"):
                    self.model.zero_grad(set_to_none=True)
        self._losses.append(losses[0] if len(losses) == 1 else torch.stack(losses).mean())

    def _pass(self) -> Tensor:
        tokens = self._tokens[self._given % _BATCHES]
        self._given += 1
        learning = self.config.mode != "fwd"
        if self.config.feed == "host":
            self.doing = "copy"
            with self._phase("copy"):
                tokens = tokens.to(self.device, non_blocking=True)
        self.doing = "forward"
        with self._phase("forward"), torch.set_grad_enabled(learning):
            with self._autocast():
                logits = self._run(tokens[:, :-1])
            with self._phase("loss"):
                loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        if learning:
            self.doing = "backward"
            with self._phase("backward"):
                part = loss if self.config.accumulate == 1 else loss / self.config.accumulate
                torch.autograd.backward(self._scaler.scale(part))
        return loss.detach()

    def _phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        return _part(name, self.config.annotate)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.config.precision)
        return contextlib.nullcontext() if kind is None else torch.autocast(self.device.type, kind)

    def losses(self) -> list[float]:
        """Read the loss of every step so far, the mean of its passes.

        Returns
        -------
        list of float
        """
        return [float(loss) for loss in self._losses]

    def close(self) -> None:
        """Take back what was set for the process."""
        torch.set_float32_matmul_precision(self._before)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start(device: str, **parameters: Any) -> Run:
    """Begin to run a model.

    Parameters
    ----------
    device : str
    **parameters
        Fields of :class:`LMConfig`.

    Returns
    -------
    Run
    """
    return Run(LMConfig(**parameters), device)
