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
from typing import Any, Self

import torch
from torch import Tensor

from nsightkit.workloads.phases import phase

__all__ = ["CASES", "HELD", "LimiterConfig", "Limiters", "start"]

#: The operations, in the order in which they run, and what bounds each by the rule of
#: :func:`nsightkit.analysis.ncu.classify`. The softmax is one over few rows: that over many is bound by memory.
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


class Limiters:
    """The six operations, one after the other.

    Parameters
    ----------
    config : LimiterConfig
    device : str

    Attributes
    ----------
    parameters : dict
        The configuration as plain values, and ``instead``: what runs in place of what this device cannot run.

    Notes
    -----
    The precision of fp32 products is a setting of the whole process, taken back by :meth:`close`.
    """

    def __init__(self, config: LimiterConfig, device: str = "cpu") -> None:
        self.data_wait_ns: list[int] = []
        self._before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        torch.manual_seed(config.seed)
        place = torch.device(device)
        walk, instead = _walk(config, place)
        self._cases: dict[str, Callable[[], Tensor]] = {
            "product": _product(config.side, torch.bfloat16, place),
            "product_fp32": _product(config.side_fp32, torch.float32, place),
            **_additions(config, place),
            "softmax": _softmax(config, place),
        }
        if walk is not None:
            self._cases["chase"] = walk
        self.parameters = dataclasses.asdict(config) | {"instead": instead}

    def step(self) -> None:
        """Run each once."""
        with phase("step"):
            for name, run in self._cases.items():
                with phase(name):
                    run()

    def results(self) -> dict[str, Tensor]:
        """Run each once more.

        Returns
        -------
        dict of str to Tensor
            What each gives.
        """
        return {name: run() for name, run in self._cases.items()}

    def losses(self) -> list[float]:
        """Give nothing: there is nothing to learn here."""
        return []

    def close(self) -> None:
        """Take back what was set for the process."""
        torch.set_float32_matmul_precision(self._before)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _product(side: int, kind: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    # Random: what the bits do decides the power, and the power the clock.
    a, b = (torch.randn(side, side, device=device).to(kind) for _ in range(2))
    out = torch.empty(side, side, device=device, dtype=kind)
    return lambda: torch.mm(a, b, out=out)


def _additions(config: LimiterConfig, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """One addition of as many numbers, from neighbouring addresses and from addresses that lie apart."""
    source = torch.randn(config.elements * config.stride, device=device)
    out = torch.empty(config.elements, device=device)
    together, apart = source[: config.elements], source[:: config.stride]
    return {
        "add": lambda: torch.add(together, 1.0, out=out),
        "strided": lambda: torch.add(apart, 1.0, out=out),
    }


def _softmax(config: LimiterConfig, device: torch.device) -> Callable[[], Tensor]:
    x = torch.randn(config.rows, config.elements // config.rows, device=device)
    return lambda: torch.softmax(x, -1)


def _walk(config: LimiterConfig, device: torch.device) -> tuple[Callable[[], Tensor] | None, str]:
    """Give the walk as one kernel on a GPU and as PyTorch's operations elsewhere; and what is not as it should be."""
    following = torch.randperm(config.table, device=device).to(torch.int32)
    held = torch.randn(config.programs, 128 * HELD, device=device)
    if device.type != "cuda":
        return lambda: _walked(following, held, config.hops), "the walk by PyTorch's operations: its kernel needs a GPU"
    kernels = _triton_kernels()
    if kernels is None:
        return None, "no walk: Triton is not installed"
    return lambda: kernels.walk(following, held, config.hops), ""


def _triton_kernels() -> ModuleType | None:
    try:
        from nsightkit.workloads import limiters_triton
    except ImportError:
        return None
    return limiters_triton


def _walked(following: Tensor, held: Tensor, hops: int) -> Tensor:
    at = torch.arange(len(held), dtype=torch.int64, device=held.device)
    for _ in range(hops):
        at = following[at].to(torch.int64)
    return held.sum(1) * at


def start(device: str, **parameters: Any) -> Limiters:
    """Begin to run the operations.

    Parameters
    ----------
    device : str
    **parameters
        Fields of :class:`LimiterConfig`.

    Returns
    -------
    Limiters
    """
    return Limiters(LimiterConfig(**parameters), device)
