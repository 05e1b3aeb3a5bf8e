"""What a framework operator must cost, read from its name and the shapes and types of its inputs.

PyTorch's profiler writes both when it is asked to (``record_shapes=True``). Operators that only call others
(``aten::linear``) are not counted, or their work would count twice; nor are those whose traffic cannot be told from
their inputs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from nsightkit.analysis import sol
from nsightkit.analysis.sol import Operation

__all__ = ["cost"]

#: Precision of a tensor by the name that PyTorch gives its type; the second spelling is that of older versions.
_PRECISIONS = {
    "float": "fp32",
    "c10::Half": "fp16",
    "c10::BFloat16": "bf16",
    "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
}
_Dims = Sequence[Any]


class _Inputs:
    """The inputs of one operator."""

    def __init__(self, text: str) -> None:
        dims, types, values = json.loads(text)
        self.dims: _Dims = dims
        self.types: Sequence[str] = types
        self.values: Sequence[Any] = values

    def shape(self, i: int) -> list[int]:
        """Shape of an input, which must be a tensor."""
        dims = self.dims[i]
        if not isinstance(dims, list) or not all(isinstance(n, int) and n >= 0 for n in dims):
            raise ValueError("no tensor")
        return dims

    def precision(self, i: int = 0) -> str:
        """Precision of an input."""
        return _PRECISIONS[self.types[i]]

    def says(self, i: int) -> bool | None:
        """Value of a flag; None where values were not recorded."""
        if i >= len(self.values) or self.values[i] in ("", None):
            return None
        return str(self.values[i]) in ("True", "1", "true")


def _matrices(left: int, right: int) -> Callable[[_Inputs], Operation]:
    """Product of two matrices, or of two batches of them."""

    def reckon(given: _Inputs) -> Operation:
        *batch, m, k = given.shape(left)
        *same, inner, n = given.shape(right)
        if k != inner or batch != same:
            raise ValueError("shapes do not match")
        one = sol.gemm(m, n, k, given.precision(left))
        times = math.prod(batch)
        return Operation("GEMM", one.flops * times, one.bytes * times, one.unit)

    return reckon


def _attention(q: int, causal: int, *, backward: bool = False) -> Callable[[_Inputs], Operation]:
    """Fused attention: queries, keys and values are inputs `q` and the two after it, each (B, heads, T, d)."""

    def reckon(given: _Inputs) -> Operation:
        batch, heads, context, width = given.shape(q)
        _, kv_heads, keys, _ = given.shape(q + 1)
        masked = bool(given.says(causal)) and keys >= context
        forward = sol.attention(
            batch, heads, context, width, given.precision(q), causal=masked, keys=keys, kv_heads=kv_heads
        )
        if not backward:
            return forward
        # Five products for the forward's two: scores again, and the gradients of scores, values, queries and keys.
        # Reads queries, keys, values, the result and its gradient; writes three gradients.
        size = sol.BYTES_OF[given.precision(q)]
        moved = size * batch * width * (4 * heads * context + 4 * kv_heads * keys)
        return Operation("attention backward", forward.flops * 5 // 2, moved, forward.unit)

    return reckon


def _elementwise(inputs: int, flops: int) -> Callable[[_Inputs], Operation]:
    """One result of the largest shape, every tensor read once; a scalar costs nothing."""

    def reckon(given: _Inputs) -> Operation:
        tensors = [i for i in range(min(inputs, len(given.dims))) if given.dims[i] and given.types[i] in _PRECISIONS]
        sizes = [math.prod(given.shape(i)) for i in tensors]
        elements = max(sizes)
        result = max(sol.BYTES_OF[given.precision(i)] for i in tensors)
        moved = sum(n * sol.BYTES_OF[given.precision(i)] for n, i in zip(sizes, tensors, strict=True))
        return Operation("elementwise", flops * elements, moved + result * elements, "fp32")

    return reckon


def _rows(make: Callable[[int, int, str], Operation]) -> Callable[[_Inputs], Operation]:
    def reckon(given: _Inputs) -> Operation:
        shape = given.shape(0)
        return make(math.prod(shape[:-1]), shape[-1], given.precision())

    return reckon


def _copy(given: _Inputs) -> Operation:
    elements = math.prod(given.shape(0))
    source = math.prod(given.shape(1))
    moved = elements * sol.BYTES_OF[given.precision(0)] + source * sol.BYTES_OF[given.precision(1)]
    return Operation("copy", 0, moved, "fp32")


# Which input is which: the schemas in PyTorch's native_functions.yaml, 2.4 to 2.13.
_COSTS: dict[str, Callable[[_Inputs], Operation]] = {
    "mm": _matrices(0, 1),
    "bmm": _matrices(0, 1),
    "addmm": _matrices(1, 2),
    "baddbmm": _matrices(1, 2),
    "_scaled_mm": _matrices(0, 1),
    "_scaled_dot_product_flash_attention": _attention(0, 4),
    "_scaled_dot_product_flash_attention_backward": _attention(1, 11, backward=True),
    "_scaled_dot_product_efficient_attention": _attention(0, 6),
    "_scaled_dot_product_efficient_attention_backward": _attention(1, 11, backward=True),
    "_scaled_dot_product_cudnn_attention": _attention(0, 6),
    "_scaled_dot_product_cudnn_attention_backward": _attention(1, 14, backward=True),
    "_scaled_dot_product_flash_attention_for_cpu": _attention(0, 4),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention(1, 7, backward=True),
    "_softmax": _rows(sol.softmax),
    "_log_softmax": _rows(sol.softmax),
    "native_layer_norm": _rows(sol.layer_norm),
    "_fused_rms_norm": _rows(sol.rms_norm),
    "copy_": _copy,
    **{name: _elementwise(2, 1) for name in ("add", "sub", "mul", "div", "maximum", "minimum")},
    **{name: _elementwise(1, 1) for name in ("neg", "sqrt", "rsqrt", "abs", "reciprocal", "relu", "square")},
    **{name: _elementwise(1, 4) for name in ("silu", "sigmoid", "tanh", "exp", "log", "sin", "cos")},
    "gelu": _elementwise(1, 8),
    "silu_backward": _elementwise(2, 8),
    "gelu_backward": _elementwise(2, 16),
    "threshold_backward": _elementwise(2, 1),
}
_IN_PLACE = re.compile(r"(?<!^copy)_$")


def cost(name: str, inputs: str) -> Operation | None:
    """Reckon what an operator must cost.

    Parameters
    ----------
    name : str
        Such as ``aten::mm``.
    inputs : str
        The ``inputs`` of the trace's operators: JSON of shapes, types and values.

    Returns
    -------
    Operation or None
        Named after the operator and its shapes. None where it is no operator whose cost follows from its inputs, or
        they were not recorded or do not fit it. A flag that was not recorded counts as not set: attention without a
        known mask is the full square.
    """
    plain = _IN_PLACE.sub("", name.removeprefix("aten::"))
    reckon = _COSTS.get(plain)
    if reckon is None or not inputs or not name.startswith("aten::"):
        return None
    try:
        given = _Inputs(inputs)
        found = reckon(given)
        tensors = [dims for dims in given.dims if isinstance(dims, list) and dims and isinstance(dims[0], int)]
        precision = given.precision(next(i for i, kind in enumerate(given.types) if kind in _PRECISIONS))
    # Whatever a file says of its operators, shapes that are none have no cost.
    except (ValueError, IndexError, KeyError, TypeError, StopIteration):
        return None
    shapes = " ".join("x".join(map(str, dims)) for dims in tensors[:3])
    return found.renamed(f"{name} {shapes} {precision}")
