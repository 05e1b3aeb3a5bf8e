"""The walk of :mod:`nsightkit.workloads.limiters` in one kernel that few blocks of fit on a multiprocessor.

On a CPU it runs in Triton's interpreter, when ``TRITON_INTERPRET`` was set before this was imported.
"""

# Triton compiles these functions: their arguments are pointers and numbers, without Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["walk"]

_THREADS = 128


@triton.jit
def _walk_kernel(following, held, out, hops, MORE: tl.constexpr, LESS: tl.constexpr):
    """Read numbers, walk, and only then use the numbers: they stay in registers all the while.

    Triton knows no arrays but those of a power of two, so there are two of them. The number of hops must not be known
    to the compiler: it would unroll the walk, and read the numbers after it.
    """
    program = tl.program_id(0)
    place = held + program * (MORE + LESS)
    more = tl.load(place + tl.arange(0, MORE))
    less = tl.load(place + MORE + tl.arange(0, LESS))
    at = program
    hop = 0
    while hop < hops:
        at = tl.load(following + at)
        hop += 1
    # The factor comes before the sum: the sum alone could be had before the walk.
    tl.store(out + program, tl.sum(more * at, 0) + tl.sum(less * at, 0))


def walk(following: Tensor, held: Tensor, hops: int) -> Tensor:
    """Walk from as many addresses as there are rows, each of which a block holds in its registers meanwhile.

    Parameters
    ----------
    following : Tensor of int32
        The address after each.
    held : Tensor
        (programs, numbers that a block holds), three times a power of two.
    hops : int
        Steps of each walk.

    Returns
    -------
    Tensor
        (programs,): the sum of a row, times the address where its walk ended.
    """
    out = torch.empty(len(held), device=held.device)
    more = held.shape[1] * 2 // 3
    _walk_kernel[(len(held),)](following, held, out, hops, MORE=more, LESS=more // 2, num_warps=_THREADS // 32)
    return out
