"""Two Triton kernels for a transformer layer: SwiGLU in one pass, and a GEMV that streams its weights.

Both are operators of PyTorch, so that ``torch.compile`` calls them as they are. Importing this module needs Triton. On
a CPU the kernels run in Triton's interpreter, if ``TRITON_INTERPRET=1`` was set before Python imported Triton.
"""

# Triton compiles these functions: their arguments are pointers and numbers, without Python types.
# PyTorch reads the operators' signatures, so annotations must not be strings here.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Columns of a row that one program of SwiGLU takes.
_SWIGLU_BLOCK = 2048
#: The interpreter needs no tuning, and tries each configuration slowly.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _swiglu_kernel(gate_up, out, inner, BLOCK: tl.constexpr):
    """Read gate and up once, write the result once: 3 passes over memory, where silu and mul make 5."""
    # One program computes BLOCK columns of one row; a row of gate_up holds `inner` columns of gate, then those of up.
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < inner
    gate = tl.load(gate_up + row * 2 * inner + column, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + row * inner + column, gate * tl.sigmoid(gate) * up, mask=is_column)


@torch.library.custom_op("nsightkit::swiglu", mutates_args=())
def swiglu(gate_up: Tensor) -> Tensor:
    """Compute SwiGLU of gate and up side by side.

    Parameters
    ----------
    gate_up : Tensor
        (B, T, 2F), contiguous.

    Returns
    -------
    Tensor
        (B, T, F).
    """
    batch, tokens, columns = gate_up.shape
    inner = columns // 2  # gate and up have this many each
    out = gate_up.new_empty(batch, tokens, inner)
    grid = (batch * tokens, triton.cdiv(inner, _SWIGLU_BLOCK))
    _swiglu_kernel[grid](gate_up, out, inner, BLOCK=_SWIGLU_BLOCK, num_warps=8)
    return out


@swiglu.register_fake  # the shape of the result, for torch.compile
def _(gate_up: Tensor) -> Tensor:
    batch, tokens, columns = gate_up.shape
    return gate_up.new_empty(batch, tokens, columns // 2)


def _tiles_to_try() -> list[triton.Config]:
    """List the tiles to try: large ones keep more bytes in flight, small ones make more programs."""
    if _INTERPRETED:
        return [triton.Config({"ROWS": 8, "COLUMNS": 128}, num_warps=2)]
    tiles = [(2, 512), (2, 1024), (4, 512), (4, 1024), (8, 512)]
    return [triton.Config({"ROWS": rows, "COLUMNS": columns}, num_warps=4) for rows, columns in tiles]


@triton.autotune(configs=_tiles_to_try(), key=["count", "width"])
@triton.jit
def _gemv_kernel(x, weight, out, count, width: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Multiply ROWS rows of the weights (count, width) with x; each weight is read once, in long contiguous pieces."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < count
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        is_column = column < width
        vector = tl.load(x + column, mask=is_column, other=0.0).to(tl.float32)
        offset = row[:, None].to(tl.int64) * width + column[None, :]
        is_weight = is_row[:, None] & is_column[None, :]
        # No weight is used twice, so none should push anything else out of the cache.
        tile = tl.load(weight + offset, mask=is_weight, other=0.0, eviction_policy="evict_first")
        sums += tile.to(tl.float32) * vector[None, :]
    tl.store(out + row, tl.sum(sums, 1), mask=is_row)


@torch.library.custom_op("nsightkit::gemv", mutates_args=())
def gemv(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply one token with a weight matrix.

    Parameters
    ----------
    x : Tensor
        (1, 1, columns), contiguous.
    weight : Tensor
        (rows, columns), contiguous.

    Returns
    -------
    Tensor
        (1, 1, rows).
    """
    count, width = weight.shape
    out = x.new_empty(1, 1, count)

    def grid(tile: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(count, tile["ROWS"]),)

    _gemv_kernel[grid](x, weight, out, count, width)  # the autotuner adds ROWS and COLUMNS
    return out


@gemv.register_fake  # the shape of the result, for torch.compile
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(1, 1, weight.shape[0])
