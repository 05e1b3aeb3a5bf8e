"""What a card reaches at best: large matrix products and large transfers, over and over, on random data.

Random, because the data decides the power a GEMM draws, and the power limit the clock it runs at: the same product of
zeros runs faster and says nothing about real work. Over and over, because a burst after a pause runs at a clock that
no program sustains.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from nsightkit.workloads.phases import phase
from nsightkit.workloads.workload import DTYPES, Workload, product_fp8

__all__ = ["Ceiling", "CeilingConfig", "start"]


@dataclasses.dataclass(frozen=True)
class CeilingConfig:
    """What runs.

    Parameters
    ----------
    kind : {"gemm", "copy", "triad", "read"}
        A product of an m x k and a k x n matrix; ``a = b``; ``a = b + s * c``; or the sum of a tensor.
    precision : {"fp32", "tf32", "bf16", "fp16", "fp8"}
        Of the matrices; transfers are of fp32.
    m, n, k : int
        Of the product.
    megabytes : int
        Of each tensor of a transfer, 10**6 bytes: far more than any cache.
    zeros : bool
        Matrices of zeros, whose product draws less power.
    seed : int
    """

    kind: Literal["gemm", "copy", "triad", "read"] = "gemm"
    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp8"] = "bf16"
    m: int = 256
    n: int = 256
    k: int = 256
    megabytes: int = 4
    zeros: bool = False
    seed: int = 0


class Ceiling(Workload):
    """One operation that is run again and again.

    Attributes
    ----------
    run : callable
        Runs it once and gives what it computed.

    Notes
    -----
    The precision of fp32 GEMMs is a setting of the whole process, taken back by ``close``.
    """

    def __init__(self, config: CeilingConfig, device: str = "cpu") -> None:
        super().__init__(config, device)
        self._set_fp32_products(config.precision)
        if config.precision == "fp8":
            self.parameters["use_fast_accum"] = self.device.type == "cuda"
        torch.manual_seed(config.seed)
        self.run = (_product if config.kind == "gemm" else _transfer)(config, self.device)

    def step(self) -> None:
        """Run it once."""
        with phase("step"):
            self.run()


def _product(config: CeilingConfig, device: torch.device) -> Callable[[], Any]:
    kind = DTYPES[config.precision]
    fill = torch.zeros if config.zeros else torch.randn
    left = fill(config.m, config.k, device=device)
    right = fill(config.n, config.k, device=device)  # transposed below: the layout of a linear layer's weight
    a, b = left.to(kind), right.to(kind).t()
    if config.precision == "fp8":
        one = torch.ones((), device=device)
        return lambda: product_fp8(a, b, one, one, torch.bfloat16)
    out = torch.empty(config.m, config.n, device=device, dtype=kind)
    return lambda: torch.mm(a, b, out=out)


def _transfer(config: CeilingConfig, device: torch.device) -> Callable[[], Any]:
    def tensor() -> Tensor:
        return torch.randn(config.megabytes * 10**6 // 4, device=device)

    b = tensor()
    if config.kind == "read":
        return b.sum
    a = torch.empty_like(b)
    if config.kind == "copy":
        return lambda: a.copy_(b)
    c = tensor()
    return lambda: torch.add(b, c, alpha=3.0, out=a)


def start(device: str, **parameters: Any) -> Ceiling:
    """Begin to run an operation, with fields of :class:`CeilingConfig`."""
    return Ceiling(CeilingConfig(**parameters), device)
