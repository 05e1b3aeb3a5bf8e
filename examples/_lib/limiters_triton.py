"""The walk of :mod:`_lib.limiters` in one kernel of which few blocks fit on a multiprocessor; it needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_THREADS = 128


@triton.jit
def _walk_kernel(following, held, out, hops, MORE: tl.constexpr, LESS: tl.constexpr):
    """Read numbers, walk, and only then use the numbers: they stay in registers all the while.

    Triton has arrays of powers of two only, so there are two of them. The compiler must not know the number of hops: it
    would unroll the walk, and read the numbers after it.
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
    """Walk once per row of `held`, while the block keeps that row in its registers.

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
