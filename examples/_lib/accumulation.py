"""Add one number many times, in accumulators of several precisions (page 05).

Every running sum is kept as the accumulator held it. An addition writes to an element of the accumulator's own type, so
each is rounded once, on every device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsightkit.workloads.models import Workload


class Sum(NamedTuple):
    """Types of a sum; ``widen`` converts the addend before it is added, instead of leaving that to the addition."""

    accumulator: torch.dtype
    addend: torch.dtype
    widen: bool = False


SUMS = {
    "fp32": Sum(torch.float32, torch.float32),
    "fp16": Sum(torch.float16, torch.float16),
    "fp32 of fp16": Sum(torch.float32, torch.float16),
    "fp32 of widened fp16": Sum(torch.float32, torch.float16, widen=True),
    "bf16": Sum(torch.bfloat16, torch.bfloat16),
    "fp32 of bf16": Sum(torch.float32, torch.bfloat16),
}


class Accumulation(Workload):
    """All sums, and matmuls over the same addends."""

    def __init__(self, addend: float, count: int, block: int, device: str) -> None:
        if block < 1 or count % block:
            raise ValueError(f"blocks of {block} do not divide {count} addends")
        super().__init__(device)
        self.addend, self.count, self.block = addend, count, block

    def rows(self) -> Iterator[dict[str, Any]]:
        """Form every sum.

        Yields
        ------
        dict
            ``sum`` (a name in :data:`SUMS`, or the matmul), ``added`` (addends so far) and ``total``, one row per
            block; for a matmul its last row only.
        """
        for name, types in SUMS.items():
            addend = torch.tensor(self.addend, dtype=types.addend, device=self.device)
            if types.widen:
                addend = addend.to(types.accumulator)
            totals = self._totals(addend, types.accumulator).tolist()
            for number, total in enumerate(totals, 1):
                yield {"sum": name, "added": number * self.block, "total": total}
        for name in ("fp16", "bf16"):
            yield {"sum": f"matmul {name}", "added": self.count, "total": self._matmul(SUMS[name].addend)}

    def _totals(self, addend: Tensor, dtype: torch.dtype) -> Tensor:
        """Give the running totals after 1, 2, … blocks."""
        totals = torch.zeros(self.count // self.block + 1, dtype=dtype, device=self.device)
        total = totals.unbind()
        for number in range(len(total) - 1):
            share = addend
            if self.block > 1:
                partial = torch.zeros(self.block + 1, dtype=dtype, device=self.device).unbind()
                for place in range(self.block):
                    torch.add(partial[place], addend, out=partial[place + 1])
                share = partial[self.block]
            torch.add(total[number], share, out=total[number + 1])
        return totals[1:]

    def _matmul(self, dtype: torch.dtype) -> float:
        # 16 rows and columns: a matmul, not a product of vectors, so that a GPU uses its tensor cores.
        addends = torch.full((16, self.count), self.addend, dtype=dtype, device=self.device)
        product = addends @ torch.ones(self.count, 16, dtype=dtype, device=self.device)
        return float(product[0, 0])


def run(device: str, addend: float = 0.01, count: int = 1000, block: int = 1) -> Accumulation:
    """Add one number many times.

    Parameters
    ----------
    device : str
    addend : float
        Rounded to each sum's type of addend.
    count : int
        Number of addends.
    block : int
        Addends whose sum is formed before it is added to the total; 1 is the plain loop.

    Returns
    -------
    Accumulation
    """
    return Accumulation(addend, count, block, device)
