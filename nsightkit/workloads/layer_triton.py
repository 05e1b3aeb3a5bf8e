"""A transformer layer with hand-written Triton kernels; importing it needs Triton.

Prefill leaves GEMMs and attention to the libraries and fuses what lies between them. Decode is kernels of its own
throughout: each streams its weights once, with the norm before and the activation or the residual after it in the same
kernel, so that a layer is six launches.

On a CPU the kernels run in Triton's interpreter, when ``TRITON_INTERPRET`` was set before this was imported.
"""

# Triton compiles these functions: their arguments are pointers and numbers, without Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import math
import os
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Decode", "Prefill"]

_EPSILON = 1e-6
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Rows of weights a program takes and columns it takes at a time: bytes in flight against the number of programs.
_TILES = (
    [(8, 128, 2)]
    if _INTERPRETED
    else [(rows, columns, w) for rows in (2, 4, 8) for columns in (512, 1024) for w in (4, 8)]
)
_CONFIGS = [triton.Config({"ROWS": rows, "COLUMNS": columns}, num_warps=warps) for rows, columns, warps in _TILES]


@triton.jit
def _norm_kernel(x, delta, weight, total, normed, width, epsilon, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """RMSNorm of a row, after adding another tensor's row to it."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(delta + row * width + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + row * width + column, value, mask=inside)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + epsilon)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row * width + column, value * scale * gain, mask=inside)


@triton.jit
def _rotary_kernel(qkv, cosine, sine, context, heads, half, BLOCK: tl.constexpr):
    """Rotate, in place, the queries and keys of one token; heads of queries come first, then those of keys."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    pair = tl.arange(0, BLOCK)
    inside = pair < half
    table = (row % context) * half + pair
    c = tl.load(cosine + table, mask=inside, other=0.0)
    s = tl.load(sine + table, mask=inside, other=0.0)
    first = qkv + row * 6 * heads * half + head * 2 * half + pair
    a = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(first + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(first, a * c - b * s, mask=inside)
    tl.store(first + half, b * c + a * s, mask=inside)


@triton.jit
def _swiglu_kernel(gate_up, out, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    gate = tl.load(gate_up + row * 2 * inner + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * inner + column, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.autotune(configs=_CONFIGS, key=["count", "width", "NORM", "GATED"])
@triton.jit
def _row_kernel(
    x,
    gain,
    weight,
    residual,
    out,
    count,
    width: tl.constexpr,
    epsilon,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Product of weights (count, width) and one vector, with what comes before and after it.

    The norm's factor is the same for all columns, so it is found while the weights pass, and applied to the sums.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    within = row < count
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    others = tl.zeros([ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < width
        given = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += given * given
            given *= tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
        both = within[:, None] & inside[None, :]
        place = row[:, None] * width + column[None, :]
        # Used once and never again: it need not push anything else out of the cache.
        tile = tl.load(weight + place, mask=both, other=0.0, eviction_policy="evict_first")
        sums += tile.to(tl.float32) * given[None, :]
        if GATED:
            tile = tl.load(weight + count * width + place, mask=both, other=0.0, eviction_policy="evict_first")
            others += tile.to(tl.float32) * given[None, :]
    result = tl.sum(sums, 1)
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / width + epsilon)
        result *= factor
    if GATED:
        up = tl.sum(others, 1)
        if NORM:
            up *= factor
        result = result * tl.sigmoid(result) * up
    if RESIDUAL:
        result += tl.load(residual + row, mask=within, other=0.0).to(tl.float32)
    tl.store(out + row, result, mask=within)


@triton.jit
def _attend_kernel(
    qkv,
    cosine,
    sine,
    keys,
    values,
    partial,
    largest,
    weights,
    positions,
    heads,
    scale,
    half: tl.constexpr,
    SPLITS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head's attention to one part of the cache; the last part also writes the new token into it."""
    head = tl.program_id(0)
    part = tl.program_id(1)
    pair = tl.arange(0, half)
    wide = tl.arange(0, 2 * half)
    c, s = tl.load(cosine + pair), tl.load(sine + pair)
    query = qkv + head * 2 * half
    a, b = tl.load(query + pair).to(tl.float32), tl.load(query + half + pair).to(tl.float32)
    q_first, q_second = a * c - b * s, b * c + a * s
    key = query + heads * 2 * half
    a, b = tl.load(key + pair).to(tl.float32), tl.load(key + half + pair).to(tl.float32)
    k_first, k_second = a * c - b * s, b * c + a * s
    new_value = tl.load(key + heads * 2 * half + wide).to(tl.float32)
    base = head.to(tl.int64) * positions * 2 * half
    last = positions - 1
    if part == SPLITS - 1:
        tl.store(keys + base + last * 2 * half + pair, k_first)
        tl.store(keys + base + last * 2 * half + half + pair, k_second)
        tl.store(values + base + last * 2 * half + wide, new_value)
    top = tl.full([], float("-inf"), tl.float32)
    sum_of_weights = tl.zeros([], tl.float32)
    mixed = tl.zeros([2 * half], tl.float32)
    for start in range(0, PART, BLOCK):
        at = part * PART + start + tl.arange(0, BLOCK)
        old = (at < last)[:, None]
        place = base + at[:, None] * 2 * half
        first = tl.load(keys + place + pair[None, :], mask=old, other=0.0).to(tl.float32)
        second = tl.load(keys + place + half + pair[None, :], mask=old, other=0.0).to(tl.float32)
        newest = (at == last)[:, None]
        first = tl.where(newest, k_first[None, :], first)
        second = tl.where(newest, k_second[None, :], second)
        score = tl.sum(first * q_first[None, :] + second * q_second[None, :], 1) * scale
        score = tl.where(at <= last, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 0))
        # A part of nothing but places after the last has no highest score, and no weight.
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp(score - safe)
        shrink = tl.exp(top - safe)
        value = tl.load(values + place + wide[None, :], mask=old, other=0.0).to(tl.float32)
        value = tl.where(newest, new_value[None, :], value)
        mixed = mixed * shrink + tl.sum(weight[:, None] * value, 0)
        sum_of_weights = sum_of_weights * shrink + tl.sum(weight, 0)
        top = higher
    place = head * SPLITS + part
    tl.store(partial + place * 2 * half + wide, mixed)
    tl.store(largest + place, top)
    tl.store(weights + place, sum_of_weights)


@triton.jit
def _join_kernel(partial, largest, weights, out, width: tl.constexpr, SPLITS: tl.constexpr):
    """Put the parts of one head's attention together."""
    head = tl.program_id(0)
    part = tl.arange(0, SPLITS)
    column = tl.arange(0, width)
    top = tl.load(largest + head * SPLITS + part)
    factor = tl.exp(top - tl.max(top, 0))
    whole = tl.sum(tl.load(weights + head * SPLITS + part) * factor, 0)
    mixed = tl.load(partial + (head * SPLITS + part)[:, None] * width + column[None, :])
    tl.store(out + head * width + column, tl.sum(mixed * factor[:, None], 0) / whole)


class Prefill:
    """A layer whose GEMMs and attention are the libraries', and the rest Triton.

    Parameters
    ----------
    heads : int
    """

    def __init__(self, heads: int) -> None:
        self._heads = heads

    def __call__(self, x: Tensor, w: Any, given: Any, _: None) -> Tensor:
        """Pass x through the layer.

        Parameters
        ----------
        x : Tensor
            (B, T, D).
        w : Weights
        given : _Given

        Returns
        -------
        Tensor
            (B, T, D).
        """
        batch, tokens, width = x.shape
        rows, inner, half = batch * tokens, w.down.shape[1], width // self._heads // 2
        block = triton.next_power_of_2(width)
        normed = torch.empty_like(x)
        _norm_kernel[(rows,)](x, x, w.norm_1, x, normed, width, _EPSILON, ADD=False, BLOCK=block, num_warps=8)
        qkv = F.linear(normed, w.qkv)
        pairs = triton.next_power_of_2(half)
        _rotary_kernel[(rows, 2 * self._heads)](
            qkv, given.cosine, given.sine, tokens, self._heads, half, BLOCK=pairs, num_warps=1
        )
        q, k, v = qkv.view(batch, tokens, 3, self._heads, 2 * half).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, tokens, width)
        delta, total = F.linear(mixed, w.out), torch.empty_like(x)
        _norm_kernel[(rows,)](x, delta, w.norm_2, total, normed, width, _EPSILON, ADD=True, BLOCK=block, num_warps=8)
        gate_up = F.linear(normed, w.gate_up)
        fed = torch.empty(rows, inner, dtype=x.dtype, device=x.device)
        _swiglu_kernel[(rows, triton.cdiv(inner, 2048))](gate_up, fed, inner, BLOCK=2048, num_warps=8)
        # The second residual is added by the GEMM itself.
        return total.view(rows, width).addmm_(fed, w.down.t()).view_as(x)


class Decode:
    """A layer for one token, of Triton kernels throughout.

    Parameters
    ----------
    heads : int
        Their size must be a power of two.
    """

    def __init__(self, heads: int) -> None:
        self._heads = heads

    def __call__(self, x: Tensor, w: Any, given: Any, cache: tuple[Tensor, Tensor]) -> Tensor:
        """Pass the one token x through the layer.

        Parameters
        ----------
        x : Tensor
            (1, 1, D).
        w : Weights
        given : _Given
        cache : tuple of Tensor
            Keys and values, (1, H, S, K); the token is written to the last place.

        Returns
        -------
        Tensor
            (1, 1, D).
        """
        keys, values = cache
        heads, positions, half = self._heads, keys.shape[2], keys.shape[3] // 2
        # Enough programs for every multiprocessor, in parts long enough to be worth a start.
        splits = max(1, min(16, triton.next_power_of_2(positions) // 64))
        block = 64
        part = -(-positions // splits // block) * block
        qkv = self._product(x, w.qkv, gain=w.norm_1)
        partial = torch.empty(heads * splits * 2 * half, dtype=torch.float32, device=x.device)
        largest, weights = (torch.empty(heads * splits, dtype=torch.float32, device=x.device) for _ in range(2))
        _attend_kernel[(heads, splits)](
            qkv,
            given.cosine,
            given.sine,
            keys,
            values,
            partial,
            largest,
            weights,
            positions,
            heads,
            1 / math.sqrt(2 * half),
            half=half,
            SPLITS=splits,
            PART=part,
            BLOCK=block,
            num_warps=4,
        )
        mixed = torch.empty_like(x)
        _join_kernel[(heads,)](partial, largest, weights, mixed, width=2 * half, SPLITS=splits, num_warps=4)
        x = self._product(mixed, w.out, residual=x)
        fed = self._product(x, w.gate_up, gain=w.norm_2, gated=True)
        return self._product(fed, w.down, residual=x)

    @staticmethod
    def _product(
        x: Tensor, weight: Tensor, gain: Tensor | None = None, residual: Tensor | None = None, gated: bool = False
    ) -> Tensor:
        count, width = weight.shape
        count = count // 2 if gated else count
        out = torch.empty(1, 1, count, dtype=x.dtype, device=x.device)
        _row_kernel[lambda chosen: (triton.cdiv(count, chosen["ROWS"]),)](
            x,
            x if gain is None else gain,
            weight,
            x if residual is None else residual,
            out,
            count,
            width,
            _EPSILON,
            NORM=gain is not None,
            GATED=gated,
            RESIDUAL=residual is not None,
        )
        return out
