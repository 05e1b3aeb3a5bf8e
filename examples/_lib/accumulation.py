"""One number added many times, in accumulators of several precisions.

Every running sum is kept as the accumulator held it: an addition writes to an element of the accumulator's
own type, so that each is rounded once, on every device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from nsightkit.workloads.phases import phase
from nsightkit.workloads.workload import Workload

__all__ = ["VARIANTS", "Accumulation", "AccumulationConfig", "Variant", "start"]


@dataclasses.dataclass(frozen=True)
class Variant:
    """Types of a sum.

    Parameters
    ----------
    accumulator, addend : torch.dtype
    widen : bool
        Convert the addend to the accumulator's type before it is added, instead of leaving that to the addition.
    """

    accumulator: torch.dtype
    addend: torch.dtype
    widen: bool = False


#: Sums by name.
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "fp32": Variant(torch.float32, torch.float32),
        "fp16": Variant(torch.float16, torch.float16),
        "fp32 of fp16": Variant(torch.float32, torch.float16),
        "fp32 of widened fp16": Variant(torch.float32, torch.float16, widen=True),
        "bf16": Variant(torch.bfloat16, torch.bfloat16),
        "fp32 of bf16": Variant(torch.float32, torch.bfloat16),
    }
)


@dataclasses.dataclass(frozen=True)
class AccumulationConfig:
    """What is added, and in which order.

    Parameters
    ----------
    addend : float
        Rounded to each variant's type of addend.
    count : int
        Number of addends.
    block : int
        Addends whose sum is formed before it is added to the total. 1 is the plain loop.
    """

    addend: float = 0.01
    count: int = 1000
    block: int = 1


class Accumulation(Workload):
    """All variants of the sum, once a step.

    Raises
    ------
    ValueError
        `block` does not divide `count`.
    """

    def __init__(self, config: AccumulationConfig, device: str = "cpu") -> None:
        if config.block < 1 or config.count % config.block:
            raise ValueError(f"blocks of {config.block} do not divide {config.count} addends")
        super().__init__(config, device)
        self._addends = {}
        for name, variant in VARIANTS.items():
            value = torch.tensor(config.addend, dtype=variant.addend, device=self.device)
            self._addends[name] = value.to(variant.accumulator) if variant.widen else value
        self._totals: dict[str, Tensor] = {}
        for name in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"):
            setting = getattr(torch.backends.cuda.matmul, name)
            # Newer versions of torch give a pair: the switch, and whether split-K may use it.
            self.parameters[name] = bool(setting[0] if isinstance(setting, tuple) else setting)

    def step(self) -> None:
        """Form every sum from the beginning."""
        with phase("step"):
            for name, variant in VARIANTS.items():
                with phase(name):
                    self._totals[name] = self._sum(self._addends[name], variant.accumulator)

    def _sum(self, addend: Tensor, dtype: torch.dtype) -> Tensor:
        """Running totals after 0, 1, … blocks, shape (blocks + 1,)."""
        block = self.config.block
        blocks = self.config.count // block
        totals = torch.zeros(blocks + 1, dtype=dtype, device=self.device)
        total = totals.unbind()
        partial = torch.zeros(block + 1, dtype=dtype, device=self.device).unbind()
        for i in range(blocks):
            for j in range(block if block > 1 else 0):
                torch.add(partial[j], addend, out=partial[j + 1])
            torch.add(total[i], partial[block] if block > 1 else addend, out=total[i + 1])
        return totals

    def observed(self) -> dict[str, list[float]]:
        """Read the sums of the last step, and what a matrix product makes of the same addends.

        Returns
        -------
        dict of str to list of float
            ``sum/VARIANT``: the total after each block; ``addend/VARIANT``: the addend as its type holds it;
            ``matmul/TYPE``: one element of a product over `count` addends and ones, of 16-bit operands.
        """
        found: dict[str, list[float]] = {}
        for name, totals in self._totals.items():
            found[f"sum/{name}"] = totals[1:].tolist()
            found[f"addend/{name}"] = [float(self._addends[name])]
        for name in ("fp16", "bf16"):
            dtype = VARIANTS[name].addend
            # 16 rows and columns: a matrix product, not a product of vectors, so that a GPU uses its tensor cores.
            addends = torch.full((16, self.config.count), self.config.addend, dtype=dtype, device=self.device)
            product = addends @ torch.ones(self.config.count, 16, dtype=dtype, device=self.device)
            found[f"matmul/{name}"] = [float(product[0, 0])]
        return found


def start(device: str, **parameters: Any) -> Accumulation:
    """Begin, with fields of :class:`AccumulationConfig`."""
    return Accumulation(AccumulationConfig(**parameters), device)
