"""Attention by itself, in six implementations: written out, compiled, and each backend of PyTorch's fused one.

Shapes are written B (batch), H (heads), T (context), K (head size: ``d / heads``). Queries, keys and values are given:
there are no projections, so that what is measured is attention alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsightkit.workloads.attention_samples import ABSENT, NO_TF32, REFUSED, SIXTEEN_BITS, TOO_WIDE
from nsightkit.workloads.models import written_out
from nsightkit.workloads.workload import Workload

__all__ = ["Attention", "AttentionConfig", "Cell", "start"]

_BACKENDS = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
#: What PyTorch is asked whether a backend takes some inputs on this GPU. Not every version can be asked for each.
_QUESTIONS = {
    "efficient": "can_use_efficient_attention",
    "flash": "can_use_flash_attention",
    "cudnn": "can_use_cudnn_attention",
}
#: Flash attention has no kernel for wider heads (PyTorch's sdp_utils.cpp).
_WIDEST_FLASH = 256


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """What all cells of a column have in common.

    Parameters
    ----------
    implementation : {"naive", "naive-compiled", "math", "efficient", "flash", "cudnn"}
        The written-out one, the same through ``torch.compile``, or a backend of ``scaled_dot_product_attention``.
    precision : {"fp32", "tf32", "bf16"}
        ``bf16`` inputs are bf16; in ``fp32`` TF32 is off.
    batch, heads : int
    causal : bool
        No query sees a later key.
    compiler : str
        Backend of ``torch.compile``.
    seed : int
    """

    implementation: Literal["naive", "naive-compiled", "math", "efficient", "flash", "cudnn"] = "naive"
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    batch: int = 8
    heads: int = 1
    causal: bool = True
    compiler: str = "inductor"
    seed: int = 0


class Cell:
    """Attention of one size.

    Parameters
    ----------
    inputs : tuple of Tensor
        q, k, v, each (B, H, T, K), which require gradients, and the gradient of the output.
    future : Tensor or None
        (T, T), true where a key is later than the query; for implementations that need it.
    attend : callable
        Takes q, k, v and `future`.
    """

    def __init__(self, inputs: tuple[Tensor, ...], future: Tensor | None, attend: Callable[..., Tensor]) -> None:
        *self._qkv, self._gradient = inputs
        self._future, self._attend = future, attend

    @property
    def tensors(self) -> list[Tensor]:
        """All that lies in memory before the first pass."""
        return [*self._qkv, self._gradient, *([] if self._future is None else [self._future])]

    def forward(self) -> Tensor:
        """Attend, and keep what the backward pass needs.

        Returns
        -------
        Tensor
            (B, H, T, K).
        """
        return self._attend(*self._qkv, self._future)

    def backward(self, attended: Tensor) -> tuple[Tensor, ...]:
        """Go back through one forward pass, which can be done once.

        Parameters
        ----------
        attended : Tensor
            What :meth:`forward` gave.

        Returns
        -------
        tuple of Tensor
            The gradients of q, k and v; they are not kept.
        """
        return torch.autograd.grad(attended, self._qkv, self._gradient)


class Attention(Workload):
    """Makes the cells of a column.

    Notes
    -----
    The precision of fp32 GEMMs and the backend are settings of the whole process, taken back by ``close``. They are
    made once: to choose a backend anew for each pass takes the CPU as long as to launch it.
    """

    def __init__(self, config: AttentionConfig, device: str = "cpu") -> None:
        super().__init__(config, device)
        self._set_fp32_products(config.precision)
        if config.implementation in _BACKENDS:
            self.enter_context(sdpa_kernel(_BACKENDS[config.implementation]))  # type: ignore[arg-type] # it lets errors pass

    @functools.cached_property
    def _compiled(self) -> Callable[..., Tensor]:
        return torch.compile(written_out, dynamic=False, backend=self.config.compiler)

    @property
    def column(self) -> str:
        """Implementation and precision in one word."""
        return f"{self.config.implementation}-{self.config.precision}"

    def cell(self, d: int, context: int) -> Cell:
        """Make attention of one size, with random inputs that are the same whenever it is made.

        Parameters
        ----------
        d : int
            Width of all heads together, a multiple of their number.
        context : int
            Sequence length.

        Returns
        -------
        Cell
        """
        config = self.config
        kind = torch.bfloat16 if config.precision == "bf16" else torch.float32
        shape = (config.batch, config.heads, context, d // config.heads)
        generator = torch.Generator(self.device).manual_seed(config.seed + 1_000_003 * d + context)
        inputs = tuple(torch.randn(shape, dtype=kind, device=self.device, generator=generator) for _ in range(4))
        for tensor in inputs[:3]:
            tensor.requires_grad_()
        if not config.implementation.startswith("naive"):
            return Cell(inputs, None, self._fused)
        attend = self._compiled if config.implementation == "naive-compiled" else written_out
        future = torch.ones(context, context, dtype=torch.bool, device=self.device).triu_(1) if config.causal else None
        return Cell(inputs, future, attend)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, _: None) -> Tensor:
        # is_causal, not a mask: a mask tensor would rule out flash attention.
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.config.causal)

    def forget_compiled(self) -> None:
        """Drop compiled code: after eight sizes of one function, PyTorch would give up and run it uncompiled."""
        if self.config.implementation == "naive-compiled":
            torch._dynamo.reset()

    def refusal(self, d: int) -> str | None:
        """Say why attention of this width is not possible, without running any.

        Parameters
        ----------
        d : int

        Returns
        -------
        str or None
            One of :data:`nsightkit.workloads.attention_samples.REASONS`; None when nothing speaks against it.
        """
        implementation, precision, head = self.config.implementation, self.config.precision, d // self.config.heads
        if implementation == "flash" and head > _WIDEST_FLASH:
            return TOO_WIDE
        if self.device.type != "cuda":
            return ABSENT if implementation in ("efficient", "cudnn") else None
        if implementation in ("flash", "cudnn") and precision != "bf16":
            return SIXTEEN_BITS
        if precision == "tf32" and torch.cuda.get_device_capability(self.device) < (8, 0):
            return NO_TF32
        return REFUSED if self._refused(d) else None

    def _refused(self, d: int) -> bool:
        """Ask PyTorch whether the backend takes heads of this size on this GPU."""
        ask = getattr(torch.backends.cuda, _QUESTIONS.get(self.config.implementation, ""), None)
        if ask is None:
            return False
        q, k, v, *_ = self.cell(d, 64).tensors
        try:
            inputs = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, self.config.causal, False)
        except TypeError:  # a version with other arguments; the pass itself will tell
            return False
        return not ask(inputs)


def start(device: str, **parameters: Any) -> Attention:
    """Begin, with fields of :class:`AttentionConfig`."""
    return Attention(AttentionConfig(**parameters), device)
