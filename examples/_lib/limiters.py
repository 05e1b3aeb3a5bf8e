"""Six operations that six different things hold back, each by construction.

A product on tensor cores and one without them; an addition of long vectors, and the same with every number in a sector
of its own; a softmax over few long rows, for which few multiprocessors get any work; and a walk through memory where
each address is what was read at the one before, in blocks that hold so many registers that few of them fit. Each runs
in a phase of its own name, so that any profiler can tell them apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor

from nsightkit.workloads.phases import phase
from nsightkit.workloads.workload import Workload

__all__ = ["CASES", "HELD", "LimiterConfig", "Limiters", "start"]

#: The operations, in the order in which they run, and what bounds each by the rule of
#: :func:`nsightkit.analysis.roofline.counters.classify`. The softmax is one over few rows: that over many is bound by
#: memory.
CASES: Mapping[str, str] = MappingProxyType(
    {
        "product": "compute-bound",
        "product_fp32": "compute-bound",
        "add": "memory-bound",
        "strided": "memory-bound",
        "softmax": "latency-bound",
        "chase": "latency-bound",
    }
)
#: Numbers that each of the walk's 128 threads keeps in registers.
HELD = 192


@dataclasses.dataclass(frozen=True)
class LimiterConfig:
    """Sizes.

    Parameters
    ----------
    side, side_fp32 : int
        Of the square matrices of the product in bf16 and of that in fp32, which does without tensor cores.
    elements : int
        Results of the additions, and numbers in all rows of the softmax together; fp32.
    stride : int
        From one number that the strided addition reads to the next, in numbers.
    rows : int
        Of the softmax: a block takes a row.
    programs, hops : int
        Walks through memory, a block each, and steps of each.
    table : int
        Addresses that the walks lead through.
    seed : int
    """

    side: int = 256
    side_fp32: int = 128
    elements: int = 2**18
    stride: int = 8
    rows: int = 4
    programs: int = 64
    hops: int = 16
    table: int = 2**16
    seed: int = 0


class Limiters(Workload):
    """The six operations, one after the other.

    Attributes
    ----------
    inputs : dict of str to tuple of Tensor
        What each operation that runs here is given.
    parameters : dict
        The configuration as plain values, and ``instead``: what runs in place of what this device cannot run.

    Notes
    -----
    The precision of fp32 products is a setting of the whole process, taken back by ``close``.
    """

    def __init__(self, config: LimiterConfig, device: str = "cpu") -> None:
        super().__init__(config, device)
        self._set_fp32_products("fp32")
        torch.manual_seed(config.seed)
        self.inputs = _inputs(config, self.device)
        kernels, self.parameters["instead"] = kernels_of(self.device)
        if kernels is None and self.device.type != "cpu":
            del self.inputs["chase"]
        walk = walked if kernels is None else kernels.walk
        self._operations: Mapping[str, Callable[..., Tensor]] = {
            **dict.fromkeys(("product", "product_fp32"), lambda a, b, out: torch.mm(a, b, out=out)),
            **dict.fromkeys(("add", "strided"), lambda numbers, out: torch.add(numbers, 1.0, out=out)),
            "softmax": lambda rows: torch.softmax(rows, -1),
            "chase": lambda following, held: walk(following, held, config.hops),
        }

    def step(self) -> None:
        """Run each once."""
        with phase("step"):
            for name in self.inputs:
                with phase(name):
                    self.run(name)

    def run(self, name: str) -> Tensor:
        """Run one of them.

        Parameters
        ----------
        name : str
            One of :data:`CASES`.

        Returns
        -------
        Tensor
            What it gives; the next run of it may write to the same place.
        """
        return self._operations[name](*self.inputs[name])


def _inputs(config: LimiterConfig, device: torch.device) -> dict[str, tuple[Tensor, ...]]:
    """The inputs of each operation, and the output of those that write to a given place."""

    def random(*sizes: int, kind: torch.dtype = torch.float32) -> Tensor:
        # What the bits do decides the power, and the power the clock.
        return torch.randn(*sizes, device=device).to(kind)

    source, sums = random(config.elements * config.stride), random(config.elements)
    return {
        "product": tuple(random(config.side, config.side, kind=torch.bfloat16) for _ in range(3)),
        "product_fp32": tuple(random(config.side_fp32, config.side_fp32) for _ in range(3)),
        "add": (source[: config.elements], sums),
        "strided": (source[:: config.stride], sums),
        "softmax": (random(config.rows, config.elements // config.rows),),
        "chase": (
            torch.randperm(config.table, device=device).to(torch.int32),
            random(config.programs, 128 * HELD),
        ),
    }


def kernels_of(device: torch.device) -> tuple[ModuleType | None, str]:
    """Give the kernel of the walk, where there can be one, and what is not as it should be."""
    if device.type != "cuda":
        return None, "the walk by PyTorch's operations: its kernel needs a GPU"
    try:
        from nsightkit.workloads import limiters_triton
    except ImportError:
        return None, "no walk: Triton is not installed"
    return limiters_triton, ""


def walked(following: Tensor, held: Tensor, hops: int) -> Tensor:
    """Walk by PyTorch's operations, as :func:`nsightkit.workloads.limiters_triton.walk` does in one kernel."""
    at = torch.arange(len(held), dtype=torch.int64, device=held.device)
    for _ in range(hops):
        at = following[at].to(torch.int64)
    return held.sum(1) * at


def start(device: str, **parameters: Any) -> Limiters:
    """Begin to run the operations, with fields of :class:`LimiterConfig`."""
    return Limiters(LimiterConfig(**parameters), device)
