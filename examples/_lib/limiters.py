"""Six operations, each limited by something else by construction (page 19).

A matmul on tensor cores and one without them; an addition of long vectors, and the same with each number in a separate
32-byte sector; a softmax over a few long rows, which leaves most multiprocessors without work; and a pointer chase in
blocks that hold so many registers that few of them fit. Each operation runs in a phase with its name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nsightkit.workloads.models import Workload
from nsightkit.workloads.phases import phase

#: The operations in the order in which they run, and what limits each by the rule of
#: :func:`nsightkit.analysis.roofline.counters.classify`. The softmax is one over few rows; many make it memory-bound.
CASES = {
    "product": "compute-bound",
    "product_fp32": "compute-bound",
    "add": "memory-bound",
    "strided": "memory-bound",
    "softmax": "latency-bound",
    "chase": "latency-bound",
}
#: Numbers that each of the walk's 128 threads keeps in registers.
HELD = 192


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes; the defaults suit a CPU.

    Parameters
    ----------
    side, side_fp32 : int
        Of the square matrices of the bf16 matmul, and of the fp32 matmul, which does without tensor cores.
    elements : int
        fp32 results of each addition, and numbers in all rows of the softmax together.
    stride : int
        From one number that the strided addition reads to the next, in numbers: 8 is one number per 32-byte sector.
    rows : int
        Of the softmax. A block takes a row, so fewer rows than multiprocessors leave some without work.
    programs, hops : int
        Walks through memory, one block each, and steps of each.
    table : int
        Addresses that the walks lead through.
    """

    side: int = 256
    side_fp32: int = 128
    elements: int = 2**18
    stride: int = 8
    rows: int = 4
    programs: int = 64
    hops: int = 16
    table: int = 2**16


class Limiters(Workload):
    """The six operations, one after the other.

    Attributes
    ----------
    operations : dict of str to callable
        By name, in the order of :data:`CASES`; each gives its result, and may write to the same place each time.
    """

    def __init__(self, sizes: Sizes, device: str) -> None:
        super().__init__(device)
        self.set_fp32_matmul("fp32")
        torch.manual_seed(0)
        self.sizes = sizes
        source = self._random(sizes.elements * sizes.stride)
        rows = self._random(sizes.rows, sizes.elements // sizes.rows)
        self.operations: dict[str, Callable[[], Tensor]] = {
            "product": self._matmul(sizes.side, torch.bfloat16),
            "product_fp32": self._matmul(sizes.side_fp32, torch.float32),
            "add": self._addition(source[: sizes.elements]),
            "strided": self._addition(source[:: sizes.stride]),
            "softmax": lambda: torch.softmax(rows, -1),
            "chase": self._chase(),
        }

    def _random(self, *shape: int) -> Tensor:
        # Random, because the values decide the power, and the power the clock.
        return torch.randn(shape, device=self.device)

    def _matmul(self, side: int, dtype: torch.dtype) -> Callable[[], Tensor]:
        a, b, out = (self._random(side, side).to(dtype) for _ in range(3))
        return lambda: torch.mm(a, b, out=out)

    def _addition(self, numbers: Tensor) -> Callable[[], Tensor]:
        out = torch.empty(numbers.shape, device=self.device)
        return lambda: torch.add(numbers, 1.0, out=out)

    def _chase(self) -> Callable[[], Tensor]:
        sizes = self.sizes
        following = torch.randperm(sizes.table, device=self.device).to(torch.int32)
        held = self._random(sizes.programs, 128 * HELD)
        if self.device.type == "cuda":
            from _lib import limiters_triton

            return lambda: limiters_triton.walk(following, held, sizes.hops)
        return lambda: walk(following, held, sizes.hops)

    def step(self) -> None:
        """Run each operation once."""
        with phase("step"):
            for name, operation in self.operations.items():
                with phase(name):
                    operation()


def walk(following: Tensor, held: Tensor, hops: int) -> Tensor:
    """Walk by PyTorch's operations, as :func:`_lib.limiters_triton.walk` does in one kernel."""
    at = torch.arange(len(held), dtype=torch.int64, device=held.device)
    for _ in range(hops):
        at = following[at].to(torch.int64)
    return held.sum(1) * at


def run(device: str, **parameters: Any) -> Limiters:
    """Run six operations with six limiters.

    Parameters
    ----------
    device : str
        On a GPU the walk needs Triton, which comes with PyTorch there.
    **parameters
        Fields of :class:`Sizes`.

    Returns
    -------
    Limiters
    """
    return Limiters(Sizes(**parameters), device)
