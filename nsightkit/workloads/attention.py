"""Attention alone, forward and backward, at growing context until memory runs out.

Queries, keys and values are given, without projections, so the times are those of attention alone.
Shapes are written B (batch), H (heads), T (context), K (head size, ``d_model / heads``).
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsightkit.workloads.models import DTYPES, Workload, future_mask, naive_attention

_BACKENDS = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
#: How PyTorch says that a backend does not take these inputs.
_REFUSALS = ("No available kernel", "No viable backend", "Invalid backend")
#: No further pass of a cell begins in one direction after this time.
_CELL_S = 2.0
#: Timed passes per cell and direction, after one that loads code, compiles, and allocates what libraries keep.
_PASSES = 10


@dataclasses.dataclass(frozen=True)
class SweepConfig:
    """What is measured, and at which sizes.

    Parameters
    ----------
    implementation : {"naive", "naive-compiled", "math", "efficient", "flash", "cudnn"}
        Scores written to memory, the same through ``torch.compile``, or one backend of
        ``scaled_dot_product_attention`` and no other: which backend PyTorch would choose depends on its version, the
        GPU and cuDNN.
    precision : {"fp32", "tf32", "bf16"}
    d_model : sequence of int
        Widths of all heads together.
    context : sequence of int
        Tokens. One matrix of scores has ``batch * heads * context**2`` elements: 34 GB in fp32 at 32,768 with a batch
        of eight and one head.
    batch, heads : int
    """

    implementation: str
    precision: str
    d_model: Sequence[int]
    context: Sequence[int]
    batch: int = 8
    heads: int = 1


class Sweep(Workload):
    """Attention at every width and context of a configuration.

    Parameters
    ----------
    config : SweepConfig
    device : str
    """

    def __init__(self, config: SweepConfig, device: str = "cpu") -> None:
        super().__init__(device)
        self.config = config
        self.set_fp32_matmul(config.precision)
        self.attend: Callable[..., Tensor] = naive_attention
        if config.implementation in _BACKENDS:
            self.attend = _fused_attention
            self.enter_context(sdpa_kernel(_BACKENDS[config.implementation]))  # type: ignore[arg-type] # hides no error
        elif config.implementation == "naive-compiled":
            # A CPU would need a C++ compiler for inductor; aot_eager traces the same program and fuses nothing.
            backend = "inductor" if self.device.type == "cuda" else "aot_eager"
            # fullgraph: what cannot be compiled whole fails, instead of running in part uncompiled.
            self.attend = torch.compile(naive_attention, fullgraph=True, dynamic=False, backend=backend)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Measure all sizes, the narrowest first, each at growing context.

        Yields
        ------
        dict
            One row per size and direction: the parameters, ``direction`` (forward or backward), ``status`` (ok, oom or
            unsupported), ``median_ns``, and ``peak_bytes`` (allocated at the peak of the direction; NaN on a CPU).
        """
        config = self.config
        row: dict[str, Any] = {
            "implementation": config.implementation,
            "precision": config.precision,
            "batch": config.batch,
            "heads": config.heads,
            "median_ns": math.nan,
            "peak_bytes": math.nan,
        }
        for d_model in config.d_model:
            for context in config.context:
                for direction in ("forward", "backward"):
                    row |= {"d": d_model, "context": context, "direction": direction}
                    # Backward needs what forward keeps, so it fails where forward fails. A size that does not fit is
                    # a result: the sweep goes on.
                    try:
                        cell = {"status": "ok", **self._measure(self.inputs(d_model, context), direction)}
                    except torch.OutOfMemoryError:
                        cell = {"status": "oom"}
                    except RuntimeError as error:
                        if not str(error).startswith(_REFUSALS):
                            raise
                        cell = {"status": "unsupported"}
                    yield row | cell
                    self._free_memory()
                if config.implementation == "naive-compiled":
                    torch._dynamo.reset()  # PyTorch keeps 8 compiled versions of a function, and each size is one

    def inputs(self, d_model: int, context: int) -> list[Tensor]:
        """Draw q, k and v, which require gradients, and the gradient of the output.

        Parameters
        ----------
        d_model, context : int

        Returns
        -------
        list of Tensor
            Four of (B, H, T, K), and for naive attention the mask of the future (T, T).
        """
        config = self.config
        dtype = DTYPES[config.precision]
        shape = (config.batch, config.heads, context, d_model // config.heads)
        torch.manual_seed(0)
        tensors = [torch.randn(shape, dtype=dtype, device=self.device) for _ in range(4)]
        for tensor in tensors[:3]:
            tensor.requires_grad_()
        if config.implementation.startswith("naive"):
            tensors.append(future_mask(context, self.device))
        return tensors

    def forward(self, inputs: list[Tensor]) -> Tensor:
        """Attend, and keep what backward needs."""
        q, k, v, _, *mask = inputs  # _: the gradient of the output
        return self.attend(q, k, v, *mask)

    def backward(self, inputs: list[Tensor], attended: Tensor) -> tuple[Tensor, ...]:
        """Compute the gradients of q, k and v, given the output of :meth:`forward`."""
        return torch.autograd.grad(attended, inputs[:3], inputs[3])  # the last is the gradient of the output

    def _measure(self, inputs: list[Tensor], direction: str) -> dict[str, float]:
        """Time passes in one direction; on a GPU also find the peak of memory of the last one.

        The forward pass that a backward pass needs is not timed.
        """
        on_gpu = self.device.type == "cuda"
        times_ns: list[float] = []
        begun = time.perf_counter()
        # The first pass warms up and does not count; at least one more is timed.
        while len(times_ns) < 2 or (len(times_ns) <= _PASSES and time.perf_counter() - begun < _CELL_S):
            pass_once: Callable[[], object] = functools.partial(self.forward, inputs)
            if direction == "backward":
                pass_once = functools.partial(self.backward, inputs, self.forward(inputs))
            if on_gpu:
                torch.cuda.reset_peak_memory_stats(self.device)
            times_ns.append(self._time_ns(pass_once))
        figures = {"median_ns": statistics.median(times_ns[1:])}
        if on_gpu:
            figures["peak_bytes"] = torch.cuda.max_memory_allocated(self.device)
        return figures

    def _time_ns(self, pass_once: Callable[[], object]) -> float:
        """Time one pass, on the GPU's clock where there is one."""
        if self.device.type != "cuda":
            start = time.perf_counter_ns()
            pass_once()
            return float(time.perf_counter_ns() - start)
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        pass_once()
        end.record()
        torch.cuda.synchronize(self.device)
        return float(begin.elapsed_time(end) * 1e6)  # from ms

    def _free_memory(self) -> None:
        """Return the memory of the last cell to the GPU, so that the next one begins with all of it."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def _fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend through the backend of scaled_dot_product_attention that is enabled."""
    # is_causal, not a mask: a mask tensor would rule out flash attention.
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def run(device: str, **parameters: Any) -> Sweep:
    """Measure attention at every width and context.

    Parameters
    ----------
    device : str
        ``"cuda"`` or ``"cpu"``.
    **parameters
        Fields of :class:`SweepConfig`.

    Returns
    -------
    Sweep
        A context manager with ``rows()``.
    """
    return Sweep(SweepConfig(**parameters), device)
