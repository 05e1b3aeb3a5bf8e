"""What the workloads share: the base class, precisions, and a decoder-only transformer.

Shapes are written B (batch), T (context), D (width), H (heads), K (head size), V (vocabulary).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsightkit.workloads.phases import phase

#: Types of tensors by precision.
DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
# Raw samples by metric.
Samples = dict[str, list[float]]
#: What RMSNorm adds to the mean of squares.
EPSILON = 1e-6


class Workload(contextlib.ExitStack[None]):
    """A program that runs one step at a time; closing it restores what it set for the whole process.

    As an ``ExitStack`` it restores through `callback` and `enter_context`.

    Parameters
    ----------
    device : str
        ``"cuda"`` or ``"cpu"``.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = torch.device(device)

    def samples(self) -> Samples:
        """Give raw samples by metric, with the unit in the name.

        Returns
        -------
        dict of str to list of float
            A metric with one value per step has every step so far, warm-up included.
        """
        return {}

    def rule_out_cudnn_attention(self) -> None:
        """Let PyTorch choose flash attention rather than cuDNN, until the workload is closed.

        On a Hopper GPU newer versions of PyTorch choose cuDNN, with other kernels and another workspace than the ones
        that predictions are made for.
        """
        backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        self.enter_context(sdpa_kernel(backends))  # type: ignore[arg-type] # it hides no error

    def set_fp32_matmul(self, precision: str) -> None:
        """Choose how fp32 matmuls run in this process until the workload is closed.

        Parameters
        ----------
        precision : str
            ``"tf32"`` allows TF32; anything else rules it out.
        """
        # torch has a second interface to this (torch.backends...fp32_precision), and raises when both are used.
        self.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[Any]:
    """Run under autocast in bf16 and fp16; in fp32 and TF32 do nothing.

    Parameters
    ----------
    device : torch.device
    precision : {"fp32", "tf32", "bf16", "fp16"}
    """
    if precision in ("bf16", "fp16"):
        return torch.autocast(device.type, DTYPES[precision])
    return contextlib.nullcontext()


def fp8_matmul(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply two fp8 matrices.

    On a GPU with ``use_fast_accum``, as inference runs fp8 and as datasheets count it. The layer and the ceiling that
    it is compared with must not differ in this.

    Parameters
    ----------
    a, b : Tensor
        (m, k) row-major and (k, n) column-major.
    scale_a, scale_b : Tensor
        Scalars that the matrices are multiplied by.
    dtype : torch.dtype
        Of the result.

    Returns
    -------
    Tensor
        (m, n).
    """
    product: Tensor = torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=dtype, use_fast_accum=a.is_cuda)
    return product


def marked(name: str, is_wanted: bool) -> contextlib.AbstractContextManager[None]:
    """Open a phase, or do nothing.

    Parameters
    ----------
    name : str
    is_wanted : bool
    """
    if is_wanted:
        return phase(name)
    return contextlib.nullcontext()


def future_mask(context: int, device: torch.device | None = None) -> Tensor:
    """Make a mask (T queries, T keys) that is true where the key comes after the query."""
    return torch.ones(context, context, dtype=torch.bool, device=device).triu_(1)


def rotary_tables(positions: Tensor, d_head: int) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines (T, K // 2), in fp32, of rotary positions (T,)."""
    pairs = d_head // 2
    exponents = torch.arange(pairs, dtype=torch.float64, device=positions.device) / pairs
    angle = torch.outer(positions.double(), 10_000.0**-exponents)
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Apply rotary positions.

    Parameters
    ----------
    x : Tensor
        (B, H, T, K). If K is odd, the last channel stays as it is.
    cosine, sine : Tensor
        (T, K // 2).

    Returns
    -------
    Tensor
        (B, H, T, K).
    """
    pairs = cosine.shape[-1]
    first, second, *rest = torch.split(x, pairs, dim=-1)
    parts = [first * cosine - second * sine, second * cosine + first * sine, *rest]
    return torch.cat(parts, dim=-1).to(x.dtype)


def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, future: Tensor, softmax_dtype: torch.dtype | None = None, mark: bool = False
) -> Tensor:
    """Attend with the scores written to memory.

    Parameters
    ----------
    q : Tensor
        (B, H, T, K).
    k, v : Tensor
        (B, H, S, K); S is T, or the positions of a cache.
    future : Tensor
        (T, S), or what broadcasts to it; true where the key comes after the query.
    softmax_dtype : torch.dtype, optional
        Default: that of `q`.
    mark : bool
        Open a phase for each part.

    Returns
    -------
    Tensor
        (B, H, T, K).
    """
    with marked("qk_mask", mark):
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(future, -math.inf)
    with marked("softmax", mark):
        weights = F.softmax(scores, dim=-1, dtype=softmax_dtype).to(q.dtype)
    with marked("attention_v", mark):
        return weights @ v


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches of a decoder; the default sizes suit a CPU.

    Parameters
    ----------
    context : int
        Tokens in a sequence.
    d_model, layers, d_ff, heads, vocabulary : int
    attention : {"sdpa", "naive"}
        PyTorch's fused attention, or one that writes its scores to memory.
    style : {"written", "fused", "elementary"}
        How RMSNorm and SiLU are written. ``written``: the norm as a chain of operations. ``fused``: one operation
        each. ``elementary``: both as chains.
    annotate_mha : bool
        Open a phase for each part of attention in the forward pass; autograd marks nothing in the backward pass.
    """

    context: int = 64
    d_model: int = 64
    layers: int = 2
    d_ff: int = 192
    heads: int = 4
    vocabulary: int = 512
    attention: Literal["sdpa", "naive"] = "sdpa"
    style: Literal["written", "fused", "elementary"] = "written"
    annotate_mha: bool = False


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.d_model))
        self.style = config.style

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (…, D)."""
        weight = self.weight
        if self.style == "fused":
            return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps=EPSILON)
        # `square` calls `pow`, which CUDA's autocast runs in fp32, so the result is fp32 there.
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * weight


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.naive = config.attention == "naive"
        self.mark = config.annotate_mha
        projection = functools.partial(nn.Linear, config.d_model, config.d_model, bias=False)
        self.q = projection()
        self.k = projection()
        self.v = projection()
        self.out = projection()

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, future: Tensor) -> Tensor:
        """Attend within x (B, T, D), with rotary tables (T, K // 2) and the mask of the future (T, T)."""
        by_head = (self.heads, -1)
        with marked("qkv_projections", self.mark):
            q = self.q(x).unflatten(-1, by_head).transpose(1, 2)
            k = self.k(x).unflatten(-1, by_head).transpose(1, 2)
            v = self.v(x).unflatten(-1, by_head).transpose(1, 2)
        with marked("rope", self.mark):
            q = rotate(q, cosine, sine)
            k = rotate(k, cosine, sine)
        if self.naive:
            attended = naive_attention(q, k, v, future, mark=self.mark)
        else:
            with marked("sdpa", self.mark):
                # is_causal, not a mask: a mask tensor would rule out flash attention.
                attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        with marked("output_projection", self.mark):
            projected: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return projected


class SwiGLU(nn.Module):
    """A gated MLP."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.up = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=False)
        # SiLU as a chain of elementary operations, a kernel each, instead of PyTorch's one.
        self.elementary = config.style == "elementary"

    def forward(self, x: Tensor) -> Tensor:
        """Pass x (B, T, D) through."""
        gate = self.gate(x)
        gate = gate / (1 + torch.exp(-gate)) if self.elementary else F.silu(gate)
        projected: Tensor = self.down(gate * self.up(x))
        return projected


class Block(nn.Module):
    """Attention, then an MLP, with a norm before and a residual around each."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.norm_attention = RMSNorm(config)
        self.attention = Attention(config)
        self.norm_mlp = RMSNorm(config)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, future: Tensor) -> Tensor:
        """Pass x (B, T, D) through, with rotary tables (T, K // 2) and the mask of the future (T, T)."""
        x = x + self.attention(self.norm_attention(x), cosine, sine, future)
        mlp_output: Tensor = self.mlp(self.norm_mlp(x))
        return x + mlp_output


class Decoder(nn.Module):
    """A decoder-only language model with an untied head and no biases.

    Parameters
    ----------
    config : DecoderConfig
    mark_head : bool
        Open a phase for the output head.

    Examples
    --------
    >>> tuple(Decoder(DecoderConfig())(torch.ones(4, 64, dtype=torch.int64)).shape)
    (4, 64, 512)
    """

    def __init__(self, config: DecoderConfig, mark_head: bool = False) -> None:
        super().__init__()
        self.mark = mark_head
        self.embedding = nn.Embedding(config.vocabulary, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config)
        self.head = nn.Linear(config.d_model, config.vocabulary, bias=False)
        cosine, sine = rotary_tables(torch.arange(config.context), config.d_model // config.heads)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)
        # Only naive attention needs the mask; a fused kernel skips the future by itself.
        mask_size = 0
        if config.attention == "naive":
            mask_size = config.context
        self.register_buffer("future", future_mask(mask_size), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[-1]))

    def forward(self, tokens: Tensor) -> Tensor:
        """Give the logits (B, T, V) of tokens (B, T), int64."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cosine, self.sine, self.future)
        x = self.norm(x)
        with marked("head", self.mark):
            logits: Tensor = self.head(x)
        return logits
