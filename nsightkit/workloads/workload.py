"""What all workloads have: a configuration, a device, and settings of the process that are taken back at the end."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from torch import Tensor

__all__ = ["DTYPES", "Workload", "autocast", "product_fp8"]

#: Types of tensors by precision.
DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[Any]:
    """Compute in 16 bits what PyTorch's autocast computes in them; in fp32 and TF32 nothing is cast.

    Parameters
    ----------
    device : torch.device
    precision : {"fp32", "tf32", "bf16", "fp16"}
    """
    return torch.autocast(device.type, DTYPES[precision]) if precision.endswith("16") else contextlib.nullcontext()


def product_fp8(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply matrices of 8-bit numbers.

    On a GPU always with ``use_fast_accum``: sums stay in the tensor cores' own registers, as inference runs them and
    datasheets count. A layer and the ceiling it is held against must not differ in this. A CPU knows one way only.

    Parameters
    ----------
    a, b : Tensor
        (m, k) by rows and (k, n) by columns.
    scale_a, scale_b : Tensor
        What they are to be multiplied by, a number each.
    dtype : torch.dtype
        Of the product.

    Returns
    -------
    Tensor
        (m, n).
    """
    product: Tensor = torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=dtype, use_fast_accum=a.is_cuda)
    return product


class Workload(contextlib.ExitStack[None]):
    """A program that is run a step at a time, and closed when it is done: what it set for the process is taken back.

    Attributes
    ----------
    config : dataclass
        Sizes and switches.
    parameters : dict
        The same as plain values.
    data_wait_ns : list of int
        How long each step waited for its data; empty for a program that waits for no data.
    """

    def __init__(self, config: Any, device: str) -> None:
        super().__init__()
        self.config, self.device = config, torch.device(device)
        self.parameters: dict[str, Any] = dataclasses.asdict(config)
        self.data_wait_ns: list[int] = []
        self._losses: list[Any] = []

    def _set_fp32_products(self, precision: str) -> None:
        """Compute fp32 matrix products in TF32 if `precision` says so, in the whole process until it is closed."""
        # torch has a second interface to this (torch.backends...fp32_precision), and raises when both are used.
        self.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")

    def losses(self) -> list[float]:
        """Read the loss of every step so far; empty where nothing is learnt."""
        return [float(loss) for loss in self._losses]
