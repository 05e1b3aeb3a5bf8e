"""The best rates a GPU reaches: large matmuls and large transfers, over and over, on random data.

Random, because the values decide the power that a GEMM draws, and the power limit decides the clock: the same GEMM on
zeros runs faster than any real work. Over and over, because after a pause a GPU runs for a moment at a
clock that no program sustains.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from nsightkit.workloads.models import DTYPES, Workload, fp8_matmul
from nsightkit.workloads.phases import phase


class Ceiling(Workload):
    """One operation that runs again and again.

    Attributes
    ----------
    operation : callable
        Runs the operation once and returns its result.
    """

    operation: Callable[[], torch.Tensor]

    def step(self) -> None:
        """Run the operation once."""
        with phase("step"):
            self.operation()


def gemm(
    device: str,
    m: int,
    n: int,
    k: int,
    precision: str,
    zeros: bool = False,
) -> Ceiling:
    """Multiply an m x k and a k x n matrix.

    Parameters
    ----------
    device : str
        ``"cuda"`` or ``"cpu"``.
    m, n, k : int
        One step is ``2 * m * n * k`` FLOPs. 8192 each fills any GPU: 1.1 TFLOP, about 1.5 ms in bf16 and 22 ms in fp32
        on an H100.
    precision : {"fp32", "tf32", "bf16", "fp16", "fp8"}
    zeros : bool
        Multiply matrices of zeros, which draws less power.

    Returns
    -------
    Ceiling
        A context manager with ``step()``.
    """
    work = Ceiling(device)
    work.set_fp32_matmul(precision)
    torch.manual_seed(0)
    fill = torch.zeros if zeros else torch.randn
    dtype = DTYPES[precision]
    a = fill(m, k, device=work.device).to(dtype)
    # Transposed: the layout of a linear layer's weight.
    b = fill(n, k, device=work.device).to(dtype).t()
    if precision == "fp8":
        scale = torch.ones((), device=work.device)
        work.operation = lambda: fp8_matmul(a, b, scale, scale, torch.bfloat16)
    else:
        out = torch.empty(m, n, device=work.device, dtype=dtype)
        work.operation = lambda: torch.mm(a, b, out=out)
    return work


def copy(device: str, megabytes: int, kind: str) -> Ceiling:
    """Move tensors through the device's memory.

    Parameters
    ----------
    device : str
        ``"cuda"`` or ``"cpu"``.
    megabytes : int
        Size of each fp32 tensor in 10**6 bytes: far more than any cache.
    kind : {"copy", "triad", "read"}
        ``a = b`` moves two tensors, ``a = b + s * c`` three, and the sum of a tensor one.

    Returns
    -------
    Ceiling
        A context manager with ``step()``.
    """
    work = Ceiling(device)
    torch.manual_seed(0)
    elements = megabytes * 1_000_000 // 4
    b = torch.randn(elements, device=work.device)
    if kind == "read":
        work.operation = b.sum
    elif kind == "copy":
        a = torch.empty_like(b)
        work.operation = lambda: a.copy_(b)
    else:
        a = torch.empty_like(b)
        c = torch.randn(elements, device=work.device)
        work.operation = lambda: torch.add(b, c, alpha=3.0, out=a)
    return work
