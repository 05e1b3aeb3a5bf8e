"""One decoder-only transformer with switches: the model of every workload that trains or runs a whole one.

Attention, then an MLP, with a norm and a residual around each, and no biases in the projections.
:mod:`nsightkit.workloads.lm` runs it as model code is written today, :mod:`nsightkit.workloads.training` with faults,
and :mod:`nsightkit.workloads.autocast` in the form of GPT, with hooks on its modules.

Shapes are written B (batch), T (context), D (width), H (heads), K (head size), V (vocabulary).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsightkit.workloads.phases import phase

__all__ = ["EPSILON", "Block", "Decoder", "DecoderConfig", "Sizes", "part", "rotated", "written_out"]

#: What RMSNorm adds to the mean of squares.
EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches.

    Parameters
    ----------
    vocabulary, width, layers, heads, context, d_ff : int
    form : {"llama", "gpt"}
        ``llama``: RMSNorm before attention, MLP and head, rotary positions, SwiGLU, weights drawn so that sums keep
        their size. ``gpt``: layer norm behind attention and MLP, no positions, GELU, weights as PyTorch draws them.
    attention : {"sdpa", "naive"}
        PyTorch's fused attention, or one that writes its scores out.
    norm : {"written", "fused", "tiny"}
        Elementary operations in the type of their input; one operation; or elementary ones in fp32, a cast for each.
    joined : bool
        One projection for queries, keys and values, and one for gate and up.
    tiny_activation : bool
        SiLU as a chain of elementary operations.
    mark_attention, mark_head : bool
        Mark the parts of attention, and the head, for a profiler, in the forward pass.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    context: int
    d_ff: int
    form: Literal["llama", "gpt"] = "llama"
    attention: Literal["sdpa", "naive"] = "sdpa"
    norm: Literal["written", "fused", "tiny"] = "written"
    joined: bool = False
    tiny_activation: bool = False
    mark_attention: bool = False
    mark_head: bool = False


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a small model, and of a step; the defaults suit a CPU and run in a blink.

    Parameters
    ----------
    vocabulary, hidden, layers, heads, context, batch, seed : int
    """

    vocabulary: int = 512
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    context: int = 64
    batch: int = 4
    seed: int = 0

    def decoder(self, **switches: Any) -> Decoder:
        """Build a decoder of these sizes, with switches of :class:`DecoderConfig`."""
        sizes = {name: getattr(self, name) for name in ("vocabulary", "layers", "heads", "context")}
        return Decoder(DecoderConfig(**sizes, width=self.hidden, d_ff=4 * self.hidden, joined=True, **switches))


def part(name: str, marked: bool) -> contextlib.AbstractContextManager[None]:
    """Mark a phase, or do nothing."""
    return phase(name) if marked else contextlib.nullcontext()


def _rms_written(x: Tensor, weight: Tensor, _: None = None) -> Tensor:
    # `square` calls `pow`, which CUDA's autocast runs in fp32: there the result is fp32, whatever `x` is.
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * weight


def _rms_fused(x: Tensor, weight: Tensor, _: None = None) -> Tensor:
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps=EPSILON)


def _rms_tiny(x: Tensor, weight: Tensor, _: None = None) -> Tensor:
    squares = x.float() * x.float()
    scale = torch.rsqrt(squares.mean(-1, keepdim=True) + EPSILON)
    return (x.float() * scale).to(x.dtype) * weight.to(x.dtype)


def _layer_written(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5) * weight + bias


def _layer_fused(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps=1e-5)


_NORMS: dict[tuple[str, str], Callable[..., Tensor]] = {
    ("llama", "written"): _rms_written,
    ("llama", "fused"): _rms_fused,
    ("llama", "tiny"): _rms_tiny,
    ("gpt", "written"): _layer_written,
    ("gpt", "fused"): _layer_fused,
}


class _Norm(nn.Module):
    """A norm over the last dimension."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.width))
        self.bias = nn.Parameter(torch.zeros(config.width)) if config.form == "gpt" else None
        self._norm = _NORMS[config.form, config.norm]

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x, self.weight, self.bias)


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn pairs of channels of x (B, H, T, K) by their positions, with tables of (T, pairs).

    Of an odd head the last channel has no partner and passes unturned.
    """
    turned = 2 * cosine.shape[-1]
    first, second = x[..., :turned].chunk(2, dim=-1)
    parts = [first * cosine - second * sine, second * cosine + first * sine]
    if turned < x.shape[-1]:
        parts.append(x[..., turned:])
    return torch.cat(parts, dim=-1).to(x.dtype)


def written_out(
    q: Tensor, k: Tensor, v: Tensor, future: Tensor | None, softmax_in: torch.dtype | None = None
) -> Tensor:
    """Attend with scores that are written out; `future` (T, T) is true where a key is later than the query."""
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
    if future is not None:
        scores = scores.masked_fill(future, -math.inf)
    return F.softmax(scores, dim=-1, dtype=softmax_in).to(q.dtype) @ v


class _Attention(nn.Module):
    """Causal self-attention; ``scores``, ``softmax`` and ``weighted`` are modules for a hook to look at."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self._config, width = config, config.width
        self._part = functools.partial(part, marked=config.mark_attention)
        if config.joined:
            self.qkv = nn.Linear(width, 3 * width, bias=False)
        else:
            self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.scores, self.softmax, self.weighted = nn.Identity(), nn.Softmax(-1), nn.Identity()

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, future: Tensor) -> Tensor:
        batch, context, width = x.shape
        heads = self._config.heads
        with self._part("qkv_projections"):
            if self._config.joined:
                q, k, v = self.qkv(x).view(batch, context, 3, heads, -1).permute(2, 0, 3, 1, 4)
            else:
                q, k, v = (of(x).view(batch, context, heads, -1).transpose(1, 2) for of in (self.q, self.k, self.v))
        if self._config.form == "llama":
            with self._part("rope"):
                q, k = rotated(q, cosine, sine), rotated(k, cosine, sine)
        attended = self._naive(q, k, v, future) if self._config.attention == "naive" else self._fused(q, k, v)
        with self._part("output_projection"):
            projected: Tensor = self.out(attended.transpose(1, 2).reshape(batch, context, width))
        return projected

    def _fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with self._part("sdpa"):
            # is_causal, not a mask: a mask tensor would rule out flash attention.
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def _naive(self, q: Tensor, k: Tensor, v: Tensor, future: Tensor) -> Tensor:
        """As :func:`written_out`, with a module or a mark for each part."""
        with self._part("qk_mask"):
            scores = self.scores(q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
            scores = scores.masked_fill(future, -math.inf)
        with self._part("softmax"):
            weights = self.softmax(scores)
        with self._part("attention_v"):
            attended: Tensor = self.weighted(weights @ v)
        return attended


class _SiLUWrittenOut(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / (1 + torch.exp(-x))


class _MLP(nn.Module):
    """A gated MLP (SwiGLU), or one with GELU and without a gate."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width, inner = config.width, config.d_ff
        self._gated = config.form == "llama"
        self._joined = self._gated and config.joined
        if self._joined:
            self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        else:
            if self._gated:
                self.gate = nn.Linear(width, inner, bias=False)
            self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        silu = _SiLUWrittenOut() if config.tiny_activation else nn.SiLU()
        self.activation = silu if self._gated else nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        if self._joined:
            gate, up = self.gate_up(x).chunk(2, dim=-1)
            inner = self.activation(gate) * up
        elif self._gated:
            inner = self.activation(self.gate(x)) * self.up(x)
        else:
            inner = self.activation(self.up(x))
        fed: Tensor = self.down(inner)
        return fed


class Block(nn.Module):
    """Attention, then an MLP; a norm and a residual around each."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self._norm_first = config.form == "llama"
        self.norm_attention, self.attention = _Norm(config), _Attention(config)
        self.norm_mlp, self.mlp = _Norm(config), _MLP(config)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, future: Tensor) -> Tensor:
        """Pass x (B, T, D) through, with rotary tables and the mask of the future (T, T)."""
        if not self._norm_first:
            x = x + self.norm_attention(self.attention(x, cosine, sine, future))
            mixed: Tensor = x + self.norm_mlp(self.mlp(x))
            return mixed
        x = x + self.attention(self.norm_attention(x), cosine, sine, future)
        normed = self.norm_mlp(x)
        fed: Tensor = self.mlp(normed)
        return x + fed


class Decoder(nn.Module):
    """A decoder-only language model.

    Examples
    --------
    >>> config = DecoderConfig(vocabulary=512, width=64, layers=2, heads=4, context=64, d_ff=192)
    >>> tuple(Decoder(config)(torch.ones(4, 64, dtype=torch.int64)).shape)
    (4, 64, 512)
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        rotary = config.form == "llama"
        self._mark_head = config.mark_head
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = _Norm(config) if rotary else nn.Identity()
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        pairs = config.width // config.heads // 2 if rotary else 0
        frequency = 10_000.0 ** (-torch.arange(pairs) / max(pairs, 1))
        angle = torch.outer(torch.arange(config.context), frequency)
        self.register_buffer("cosine", angle.cos(), persistent=False)
        self.register_buffer("sine", angle.sin(), persistent=False)
        # Only attention that is written out needs it; a fused kernel skips the future by itself.
        side = config.context if config.attention == "naive" else 0
        self.register_buffer("future", torch.ones(side, side, dtype=torch.bool).triu(1), persistent=False)
        for parameter in self.parameters() if config.form == "llama" else ():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[-1]))

    def forward(self, tokens: Tensor) -> Tensor:
        """Give the logits (B, T, V) of tokens (B, T), int64."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cosine, self.sine, self.future)
        x = self.norm(x)
        with part("head", self._mark_head):
            logits: Tensor = self.head(x)
        return logits
