"""A transformer layer with hand-written Triton kernels; importing it needs Triton.

Prefill leaves GEMMs and attention to the libraries and fuses what lies between them; one GEMM can be its own, with the
activation in its epilogue. Decode is kernels of its own throughout: each streams its weights once, with the norm before
and the activation or the residual after it in the same kernel, so that a layer is six launches.

To come nearer to the memory's rate, weights can be streamed by few programs that stay (as many as run at once, each
with an even share of the rows, so that none waits for a last wave). Such a kernel can begin before the one before it
has ended (programmatic dependent launch): it asks for its first weights, which no kernel writes, and only then waits.
And the whole MLP can be one kernel, each of whose programs takes some rows of gate and up and the same columns of down.

On a CPU the kernels run in Triton's interpreter, when ``TRITON_INTERPRET`` was set before this was imported.
"""

# Triton compiles these functions: their arguments are pointers and numbers, without Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import itertools
import math
import os
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # before Triton 3.4
    TensorDescriptor = None

from nsightkit.workloads.models import EPSILON

__all__ = ["DESCRIPTORS", "Decode", "dependent_launch", "prefill"]

#: Whether this Triton can describe a whole matrix and load tiles of it.
DESCRIPTORS = TensorDescriptor is not None

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Rows of weights a program takes and columns it takes at a time: bytes in flight against the number of programs.
_ROWS = [
    triton.Config({"ROWS": rows, "COLUMNS": columns}, num_warps=warps)
    for rows, columns, warps in ([(8, 128, 2)] if _INTERPRETED else itertools.product((2, 4, 8), (512, 1024), (4, 8)))
]
# Bytes that are under way at once, by Little's law: 4.8 TB/s times some 0.8 us is 29 kB a multiprocessor, so tens of
# programs' tiles and loads a few stages ahead. Few enough threads for the next kernel's programs to fit beside them.
_STREAMS = [
    triton.Config({"ROWS": rows, "COLUMNS": columns, "STAGES": stages, "PER_SM": programs}, num_warps=warps)
    for rows, columns, stages, programs, warps in (
        [(4, 128, 1, 2, 2)]
        if _INTERPRETED
        else [
            (rows, columns, stages, programs, 4)
            for (rows, columns), stages, programs in itertools.product(((1, 4096), (2, 2048)), (1, 3), (4, 8))
        ]
    )
]
_MLPS = [
    triton.Config({"ROWS": rows, "PER_SM": programs}, num_warps=warps)
    for rows, programs, warps in ([(4, 2, 2)] if _INTERPRETED else [(1, 4, 8), (2, 2, 8), (2, 1, 16), (4, 1, 16)])
]


def _shape_tiles(given: dict[str, Any]) -> None:
    """Tell the descriptors of a product's matrices how large the tiles are that are loaded through them."""
    given["x"].block_shape = [given["BLOCK_M"], given["BLOCK_K"]]
    given["weight"].block_shape = [given["BLOCK_N"], given["BLOCK_K"]]


# Tiles of the product with an activation in its epilogue, whose accumulators are two: of gate and of up.
_GATED = [
    triton.Config(
        {"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": depth, "GROUP": 8},
        num_warps=warps,
        num_stages=stages,
        pre_hook=_shape_tiles,
    )
    for rows, columns, depth, warps, stages in (
        [(16, 16, 16, 4, 2)]
        if _INTERPRETED
        else [(128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 64, 64, 4, 4), (128, 64, 64, 8, 5), (64, 128, 64, 4, 4)]
    )
]
# Bytes of weights that the programs of a multiprocessor ask for before they wait: some microseconds of the memory's
# time, and of all multiprocessors together well below the L2 cache.
AHEAD_BYTES = 131_072


def dependent_launch(device: torch.device) -> str:
    """Say why a kernel cannot begin before the one before it has ended.

    Parameters
    ----------
    device : torch.device

    Returns
    -------
    str
        Empty where it can: on GPUs of compute capability 9.0 and later, with a Triton that has its instructions.
    """
    if device.type != "cuda":
        return "a CPU has no programmatic dependent launch"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "this GPU has no programmatic dependent launch; it needs compute capability 9.0"
    from triton.backends.nvidia.compiler import CUDAOptions

    if not hasattr(tl.extra.cuda, "gdc_wait") or not hasattr(CUDAOptions, "launch_pdl"):
        return f"Triton {triton.__version__} has no programmatic dependent launch"
    return ""


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


@triton.autotune(configs=_GATED, key=["rows", "inner", "width"])
@triton.jit
def _gated_kernel(
    x,
    weight,
    out,
    rows,
    inner,
    width: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Product of x (rows, width) with gate and up (both inner, width), and SwiGLU of the two before they are stored."""
    program = tl.program_id(0)
    down, across = tl.cdiv(rows, BLOCK_M), tl.cdiv(inner, BLOCK_N)
    # Tiles in groups of rows: those that run at once share what they read.
    band = program // (GROUP * across)
    height = tl.minimum(down - band * GROUP, GROUP)
    within = program % (GROUP * across)
    row = (band * GROUP + within % height) * BLOCK_M
    column = within // height * BLOCK_N
    opened = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    raised = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, width, BLOCK_K):
        given = x.load([row, start])
        # Beyond the last column of gate these are rows of up, and nothing of them is stored.
        opened = tl.dot(given, weight.load([column, start]).T, opened)
        raised = tl.dot(given, weight.load([inner + column, start]).T, raised)
    result = opened * tl.sigmoid(opened) * raised
    r, c = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    place = r[:, None].to(tl.int64) * inner + c[None, :]
    tl.store(out + place, result, mask=(r < rows)[:, None] & (c < inner)[None, :])


@triton.autotune(configs=_ROWS, key=["count", "width", "NORM", "GATED"])
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
    factor = 1.0
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / width + epsilon)
    result = tl.sum(sums, 1) * factor
    if GATED:
        result = result * tl.sigmoid(result) * (tl.sum(others, 1) * factor)
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
    DEPENDENT: tl.constexpr = False,
):
    """One head's attention to one part of the cache; the last part also writes the new token into it."""
    head = tl.program_id(0)
    part = tl.program_id(1)
    _after_the_one_before(DEPENDENT)
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
def _join_kernel(
    partial, largest, weights, out, width: tl.constexpr, SPLITS: tl.constexpr, DEPENDENT: tl.constexpr = False
):
    """Put the parts of one head's attention together."""
    head = tl.program_id(0)
    _after_the_one_before(DEPENDENT)
    part = tl.arange(0, SPLITS)
    column = tl.arange(0, width)
    top = tl.load(largest + head * SPLITS + part)
    factor = tl.exp(top - tl.max(top, 0))
    whole = tl.sum(tl.load(weights + head * SPLITS + part) * factor, 0)
    mixed = tl.load(partial + (head * SPLITS + part)[:, None] * width + column[None, :])
    tl.store(out + head * width + column, tl.sum(mixed * factor[:, None], 0) / whole)


@triton.jit
def _ask_ahead(weight, first, last, BYTES: tl.constexpr):
    """Have the cache fetch the next bytes of weights after the first element, a line of 128 bytes a thread."""
    line: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
    place = tl.minimum(first + tl.arange(0, BYTES // 128) * line, last)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [weight + place], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _after_the_one_before(DEPENDENT: tl.constexpr):
    """Wait for the kernel before to end, then let the one after begin; nothing is written before this."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _norm_factor(x, width: tl.constexpr, epsilon, COLUMNS: tl.constexpr):
    """What RMSNorm multiplies a vector by, apart from its gain."""
    squares = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        given = tl.load(x + column, mask=column < width, other=0.0).to(tl.float32)
        squares += given * given
    return tl.rsqrt(tl.sum(squares, 0) / width + epsilon)


@triton.autotune(configs=_STREAMS, key=["count", "width", "NORM", "GATED", "DEPENDENT"])
@triton.jit
def _stream_kernel(
    x,
    gain,
    weight,
    residual,
    out,
    count: tl.constexpr,
    width: tl.constexpr,
    epsilon,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    DEPENDENT: tl.constexpr,
    AHEAD: tl.constexpr,
    SMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PER_SM: tl.constexpr,
):
    """Product of weights (count, width) and one vector, by programs that stay, each with rows in one piece."""
    tiles: tl.constexpr = (count + ROWS - 1) // ROWS
    share: tl.constexpr = (tiles + SMS * PER_SM - 1) // (SMS * PER_SM)
    begin = tl.program_id(0) * share
    if AHEAD:
        first, last = begin.to(tl.int64) * ROWS * width, count * width - 1
        if GATED:
            _ask_ahead(weight, first, last, AHEAD // PER_SM // 2)
            _ask_ahead(weight + count * width, first, last, AHEAD // PER_SM // 2)
        else:
            _ask_ahead(weight, first, last, AHEAD // PER_SM)
    _after_the_one_before(DEPENDENT)
    factor = 1.0
    if NORM:
        factor = _norm_factor(x, width, epsilon, COLUMNS)
    for step in range(share):
        row = (begin + step) * ROWS + tl.arange(0, ROWS)
        within = row < count
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        others = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in tl.range(0, width, COLUMNS, num_stages=STAGES):
            column = start + tl.arange(0, COLUMNS)
            inside = column < width
            given = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
            if NORM:
                given *= tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
            both = within[:, None] & inside[None, :]
            place = row[:, None].to(tl.int64) * width + column[None, :]
            part = tl.load(weight + place, mask=both, other=0.0, eviction_policy="evict_first")
            sums += part.to(tl.float32) * given[None, :]
            if GATED:
                part = tl.load(weight + count * width + place, mask=both, other=0.0, eviction_policy="evict_first")
                others += part.to(tl.float32) * given[None, :]
        result = tl.sum(sums, 1) * factor
        if GATED:
            result = result * tl.sigmoid(result) * (tl.sum(others, 1) * factor)
        if RESIDUAL:
            result += tl.load(residual + row, mask=within, other=0.0).to(tl.float32)
        tl.store(out + row, result, mask=within)


@triton.autotune(configs=_MLPS, key=["inner", "width", "DEPENDENT"])
@triton.jit
def _mlp_kernel(
    x,
    gain,
    gate_up,
    down,
    partial,
    inner: tl.constexpr,
    width: tl.constexpr,
    epsilon,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
    AHEAD: tl.constexpr,
    SMS: tl.constexpr,
    ROWS: tl.constexpr,
    PER_SM: tl.constexpr,
):
    """A whole MLP but for the last sum: rows of gate and up, and the rows of the transposed down that they weigh."""
    program = tl.program_id(0)
    tiles: tl.constexpr = (inner + ROWS - 1) // ROWS
    share: tl.constexpr = (tiles + SMS * PER_SM - 1) // (SMS * PER_SM)
    begin = program * share
    column = tl.arange(0, BLOCK)
    inside = column < width
    if AHEAD:
        first, last = begin.to(tl.int64) * ROWS * width, inner * width - 1
        _ask_ahead(gate_up, first, last, AHEAD // PER_SM // 4)
        _ask_ahead(gate_up + inner * width, first, last, AHEAD // PER_SM // 4)
        _ask_ahead(down, first, last, AHEAD // PER_SM // 4)
    _after_the_one_before(DEPENDENT)
    given = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(given * given, 0) / width + epsilon)
    given *= tl.load(gain + column, mask=inside, other=0.0).to(tl.float32) * factor
    sums = tl.zeros([BLOCK], tl.float32)
    for step in range(share):
        row = (begin + step) * ROWS + tl.arange(0, ROWS)
        both = (row < inner)[:, None] & inside[None, :]
        place = row[:, None].to(tl.int64) * width + column[None, :]
        # All three asked for before the first is used.
        gate = tl.load(gate_up + place, mask=both, other=0.0, eviction_policy="evict_first")
        up = tl.load(gate_up + inner * width + place, mask=both, other=0.0, eviction_policy="evict_first")
        out = tl.load(down + place, mask=both, other=0.0, eviction_policy="evict_first")
        opened = tl.sum(gate.to(tl.float32) * given[None, :], 1)
        fed = opened * tl.sigmoid(opened) * tl.sum(up.to(tl.float32) * given[None, :], 1)
        # Rounded as it would be on its way through memory.
        fed = fed.to(down.dtype.element_ty).to(tl.float32)
        sums += tl.sum(fed[:, None] * out.to(tl.float32), 0)
    tl.store(partial + program * width + column, sums, mask=inside)


@triton.jit
def _gather_kernel(
    partial,
    residual,
    out,
    programs: tl.constexpr,
    width,
    DEPENDENT: tl.constexpr,
    MANY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up what the programs of an MLP found, and the residual."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    _after_the_one_before(DEPENDENT)
    sums = tl.zeros([MANY, BLOCK], tl.float32)
    for start in range(0, programs, MANY):
        which = start + tl.arange(0, MANY)
        both = (which < programs)[:, None] & inside[None, :]
        sums += tl.load(partial + which[:, None] * width + column[None, :], mask=both, other=0.0)
    result = tl.sum(sums, 0) + tl.load(residual + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + column, result, mask=inside)


def prefill(x: Tensor, w: Any, given: Any, _: None, *, heads: int, epilogue: bool = False) -> Tensor:
    """Pass x through a layer whose GEMMs and attention are the libraries', and the rest Triton.

    Parameters
    ----------
    x : Tensor
        (B, T, D).
    w : Weights
    given : _Given
    heads : int
    epilogue : bool
        The GEMM of gate and up is Triton's as well, with SwiGLU in it.

    Returns
    -------
    Tensor
        (B, T, D).
    """
    batch, tokens, width = x.shape
    rows, inner, half = batch * tokens, w.down.shape[1], width // heads // 2
    block = triton.next_power_of_2(width)
    normed = torch.empty_like(x)
    _norm_kernel[(rows,)](x, x, w.norm_1, x, normed, width, EPSILON, ADD=False, BLOCK=block, num_warps=8)
    qkv = F.linear(normed, w.qkv)
    pairs = triton.next_power_of_2(half)
    _rotary_kernel[(rows, 2 * heads)](qkv, given.cosine, given.sine, tokens, heads, half, BLOCK=pairs, num_warps=1)
    q, k, v = qkv.view(batch, tokens, 3, heads, 2 * half).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, tokens, width)
    delta, total = F.linear(mixed, w.out), torch.empty_like(x)
    _norm_kernel[(rows,)](x, delta, w.norm_2, total, normed, width, EPSILON, ADD=True, BLOCK=block, num_warps=8)
    fed = torch.empty(rows, inner, dtype=x.dtype, device=x.device)
    if epilogue:
        given_x, weights = (
            TensorDescriptor.from_tensor(matrix, [1, 1]) for matrix in (normed.view(rows, width), w.gate_up)
        )
        _gated_kernel[lambda tile: (triton.cdiv(rows, tile["BLOCK_M"]) * triton.cdiv(inner, tile["BLOCK_N"]),)](
            given_x, weights, fed, rows, inner, width
        )
    else:
        gate_up = F.linear(normed, w.gate_up)
        _swiglu_kernel[(rows, triton.cdiv(inner, 2048))](gate_up, fed, inner, BLOCK=2048, num_warps=8)
    # The second residual is added by the GEMM itself.
    return total.view(rows, width).addmm_(fed, w.down.t()).view_as(x)


class Decode:
    """A layer for one token, of Triton kernels throughout.

    Parameters
    ----------
    heads : int
        Their size must be a power of two.
    sms : int
        Multiprocessors; for an interpreter, which has none, any number.
    streamed : bool
        Weights are streamed by programs that stay.
    overlapped : bool
        Kernels begin before the ones before them have ended, where :func:`dependent_launch` has nothing against it.
    whole_mlp : bool
        The MLP is one kernel and a small sum.
    """

    def __init__(
        self, heads: int, sms: int, *, streamed: bool = False, overlapped: bool = False, whole_mlp: bool = False
    ) -> None:
        self._heads, self._sms, self._streamed, self._whole_mlp = heads, sms, streamed, whole_mlp
        # What makes a kernel begin before the one before it has ended, and what kernels get whose programs stay.
        self._early = {"DEPENDENT": True, "launch_pdl": True} if overlapped else {"DEPENDENT": False}
        self._standing = {**self._early, "AHEAD": AHEAD_BYTES if overlapped else 0, "SMS": sms}

    def prepared(self, w: Any) -> Any:
        """Lay weights out as the kernels read them.

        Parameters
        ----------
        w : Weights

        Returns
        -------
        Weights
            The same, or ``down`` transposed, (F, D): its rows are what one value inside the MLP weighs.
        """
        return w._replace(down=w.down.t().contiguous()) if self._whole_mlp else w

    def __call__(self, x: Tensor, w: Any, given: Any, cache: tuple[Tensor, Tensor]) -> Tensor:
        """Pass the one token x through the layer.

        Parameters
        ----------
        x : Tensor
            (1, 1, D).
        w : Weights
            As :meth:`prepared` gives them.
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
            **self._early,
        )
        mixed = torch.empty_like(x)
        _join_kernel[(heads,)](
            partial, largest, weights, mixed, width=2 * half, SPLITS=splits, num_warps=4, **self._early
        )
        x = self._product(mixed, w.out, residual=x)
        if self._whole_mlp:
            return self._mlp(x, w.norm_2, w.gate_up, w.down)
        fed = self._product(x, w.gate_up, gain=w.norm_2, gated=True)
        return self._product(fed, w.down, residual=x)

    def _programs(self, count: int, chosen: dict[str, Any]) -> int:
        """As many as can have a row, and no more than run at once."""
        tiles = -(-count // int(chosen["ROWS"]))
        share = -(-tiles // (self._sms * int(chosen["PER_SM"])))
        return -(-tiles // share)

    def _product(
        self, x: Tensor, weight: Tensor, gain: Tensor | None = None, residual: Tensor | None = None, gated: bool = False
    ) -> Tensor:
        count, width = weight.shape
        count = count // 2 if gated else count
        out = torch.empty(1, 1, count, dtype=x.dtype, device=x.device)
        given = (x, x if gain is None else gain, weight, x if residual is None else residual, out, count, width)
        switches = {"NORM": gain is not None, "GATED": gated, "RESIDUAL": residual is not None}
        if self._streamed:
            _stream_kernel[lambda chosen: (self._programs(count, chosen),)](
                *given, EPSILON, **switches, **self._standing
            )
        else:
            _row_kernel[lambda chosen: (triton.cdiv(count, chosen["ROWS"]),)](*given, EPSILON, **switches)
        return out

    def _mlp(self, x: Tensor, gain: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        inner, width = down.shape
        most = self._sms * max(config.kwargs["PER_SM"] for config in _MLPS)
        partial = torch.empty(most, width, dtype=torch.float32, device=x.device)
        programs = 0

        def grid(chosen: dict[str, Any]) -> tuple[int]:
            nonlocal programs
            programs = self._programs(inner, chosen)
            return (programs,)

        block = triton.next_power_of_2(width)
        _mlp_kernel[grid](x, gain, gate_up, down, partial, inner, width, EPSILON, block, **self._standing)
        out = torch.empty_like(x)
        columns = 32
        _gather_kernel[(triton.cdiv(width, columns),)](
            partial, x, out, programs, width, MANY=64, BLOCK=columns, num_warps=4, **self._early
        )
        return out
