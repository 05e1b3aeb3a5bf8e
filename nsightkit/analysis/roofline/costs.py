r"""The FLOPs and compulsory bytes of operations, and of a framework's operators.

With M rows (tokens), widths H and N, element size s, batch B, h query and g key heads of width d, contexts S (of the
queries) and T (of the keys):

=============== ============================ ==============================
operation       FLOPs                        bytes
=============== ============================ ==============================
GEMM            2MNK                         s(MK + KN + MN)
attention       4BhdST, half of it causal    s·Bd(2hS + 2gT)
convolution     2NKCRSPQ                     s(NCHW + KCRS + NKPQ)
RMSNorm         4MH                          2sMH
layer norm      8MH                          2sMH
rotary          3MH                          2sMH
softmax         5MN                          2sMN
SwiGLU          5MF                          3sMF
GELU and bias   8MF                          2sMF
residual        MH                           3sMH
embedding       0                            2sMH
cross-entropy   5MV                          sMV
AdamW           12 a parameter               28 a parameter, fp32 throughout
=============== ============================ ==============================

Weights of norms, biases and statistics are left out: they are thousandths of the rest. Causal attention of equal
contexts is counted as exactly half of the square, which is what a kernel that skips masked tiles approaches.

What a framework operator must do is read from its name and the shapes, types and values of its inputs, which PyTorch's
profiler records with ``record_shapes=True``. Operators that only call others (``aten::linear``) are not counted, or
their work would count twice. Operators on lists of tensors (``_foreach``, fused optimizers) have no cost here, since
the lists' types are not recorded. Attention whose mask was not recorded counts as causal, the least that it can be, so
that no share of the speed of light comes out too high.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from nsightkit.errors import UsageError

__all__ = [
    "BYTES_OF",
    "Operation",
    "adamw_cost",
    "attention_cost",
    "cost",
    "element_bytes",
    "elementwise_cost",
    "gemm_cost",
    "layer_costs",
]

#: Bytes of an element by precision; ``tf32`` is a mode of the arithmetic, stored as fp32.
BYTES_OF: Mapping[str, int] = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


@dataclasses.dataclass(frozen=True)
class Operation:
    """What an operation must do.

    Parameters
    ----------
    name : str
    flops : int
    bytes : int
        Compulsory traffic.
    unit : str
        What executes its FLOPs: ordinary cores (``fp32``) or tensor cores (``tf32``, ``fp16``, ``bf16``, ``fp8``).
    """

    name: str
    flops: int
    bytes: int
    unit: str

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes if self.bytes else float("inf")

    def renamed(self, name: str) -> Operation:
        """Give the same operation another name.

        Parameters
        ----------
        name : str

        Returns
        -------
        Operation
        """
        return dataclasses.replace(self, name=name)


def element_bytes(precision: str) -> int:
    """Bytes of an element of a precision; an unknown one is refused."""
    try:
        return BYTES_OF[precision]
    except KeyError:
        raise UsageError(f"no precision is called {precision!r}; there are {', '.join(BYTES_OF)}") from None


def gemm_cost(m: int, n: int, k: int, precision: str = "bf16", name: str = "GEMM") -> Operation:
    """Cost of the product of an m x k and a k x n matrix.

    Parameters
    ----------
    m, n, k : int
    precision : str
    name : str

    Returns
    -------
    Operation
    """
    return Operation(name, 2 * m * n * k, element_bytes(precision) * (m * k + k * n + m * n), precision)


def attention_cost(
    batch: int,
    heads: int,
    context: int,
    d_head: int,
    precision: str = "bf16",
    *,
    causal: bool = True,
    keys: int | None = None,
    kv_heads: int | None = None,
    name: str = "attention",
) -> Operation:
    """Cost of scaled dot-product attention that never writes its scores.

    Parameters
    ----------
    batch, heads, context, d_head : int
    precision : str
    causal : bool
        Count only what lies below the diagonal: half of the square for equal contexts. With fewer queries than keys
        (decoding with a cache) the queries are the last positions, as in PyTorch's ``causal_lower_right``.
    keys : int, optional
        Context of keys and values; by default, the context of the queries.
    kv_heads : int, optional
        Heads of keys and values, for grouped queries; those of the queries when omitted.
    name : str

    Returns
    -------
    Operation

    Raises
    ------
    UsageError
        Causal attention with fewer keys than queries.
    """
    keys = context if keys is None else keys
    kv_heads = heads if kv_heads is None else kv_heads
    scores = context * keys
    if causal:
        if keys < context:
            raise UsageError(f"causal attention of {context} queries needs as many keys, not {keys}")
        # Everything before the last positions, and half of their square; a single query sees every key.
        scores = context * (keys - context) + max(context * context // 2, 1)
    moved = element_bytes(precision) * batch * d_head * (2 * heads * context + 2 * kv_heads * keys)
    return Operation(name, 4 * batch * heads * d_head * scores, moved, precision)


#: Operations that go through whole tensors: name, FLOPs an element, tensors read or written, usual precision.
_ELEMENTWISE = {
    "rms_norm": ("RMSNorm", 4, 2, "bf16"),  # square, sum, and two products
    "layer_norm": ("layer norm", 8, 2, "bf16"),  # mean, variance, scale and shift
    "rotary": ("rotary", 3, 2, "bf16"),  # two products and a sum; the width is that of queries and keys together
    "softmax": ("softmax", 5, 2, "bf16"),  # maximum, difference, exponential, sum, quotient
    "swiglu": ("SwiGLU", 5, 3, "bf16"),  # ``silu(gate) * up``: two tensors are read, one is written
    "gelu": ("GELU", 8, 2, "bf16"),  # bias and GELU in its tanh form
    "residual": ("residual", 1, 3, "bf16"),  # sum of two tensors
    "embedding": ("embedding", 0, 2, "bf16"),  # a row of the table for each token
    "cross_entropy": ("cross-entropy", 5, 1, "fp32"),  # the logits are read once and never written again
}


def elementwise_cost(
    kind: str, rows: int, width: int, precision: str | None = None, name: str | None = None
) -> Operation:
    """Cost of an operation that goes through whole tensors, each element once.

    Parameters
    ----------
    kind : str
        ``rms_norm``, ``layer_norm``, ``rotary`` (its width is that of queries and keys together), ``softmax`` (over
        rows), ``swiglu``, ``gelu`` (with its bias), ``residual``, ``embedding`` (a row of the table for each token) or
        ``cross_entropy`` (its width is the size of the vocabulary).
    rows, width : int
    precision : str, optional
        ``bf16`` when omitted, ``fp32`` for ``cross_entropy``.
    name : str, optional

    Returns
    -------
    Operation
    """
    called, flops, tensors, usual = _ELEMENTWISE[kind]
    moved = tensors * element_bytes(precision or usual) * rows * width
    # Such kernels compute in fp32 on the ordinary cores, for all types of tensors.
    return Operation(name or called, flops * rows * width, moved, "fp32")


def adamw_cost(parameters: int, precision: str = "fp32", name: str = "AdamW") -> Operation:
    """Cost of AdamW: it reads weight, gradient and both moments, writes all but the gradient, 7 numbers a parameter.

    Parameters
    ----------
    parameters : int
    precision : str
        Of all four.
    name : str

    Returns
    -------
    Operation
    """
    return Operation(name, 12 * parameters, 7 * element_bytes(precision) * parameters, "fp32")


def layer_costs(
    batch: int,
    context: int,
    hidden: int,
    heads: int,
    d_ff: int,
    precision: str = "bf16",
    *,
    causal: bool = True,
    keys: int | None = None,
    kv_heads: int | None = None,
) -> list[Operation]:
    """List what the operations of a transformer layer's forward pass cost, unfused but for QKV and gate and up.

    Parameters
    ----------
    batch, context, hidden, heads, d_ff : int
    precision : str
    causal : bool
    keys : int, optional
        Positions attended to, for decoding with a cache of `keys` positions.
    kv_heads : int, optional

    Returns
    -------
    list of Operation
        In the order they run.
    """
    if hidden % heads:
        raise UsageError(f"hidden {hidden} is not a multiple of {heads} heads")
    rows, d_head = batch * context, hidden // heads
    kv_width = d_head * (heads if kv_heads is None else kv_heads)
    return [
        elementwise_cost("rms_norm", rows, hidden, precision, "RMSNorm 1"),
        gemm_cost(rows, hidden + 2 * kv_width, hidden, precision, "QKV"),
        elementwise_cost("rotary", rows, hidden + kv_width, precision, "rotary q, k"),
        attention_cost(batch, heads, context, d_head, precision, causal=causal, keys=keys, kv_heads=kv_heads),
        gemm_cost(rows, hidden, hidden, precision, "output projection"),
        elementwise_cost("residual", rows, hidden, precision, "residual 1"),
        elementwise_cost("rms_norm", rows, hidden, precision, "RMSNorm 2"),
        gemm_cost(rows, 2 * d_ff, hidden, precision, "gate and up"),
        elementwise_cost("swiglu", rows, d_ff, precision),
        gemm_cost(rows, hidden, d_ff, precision, "down"),
        elementwise_cost("residual", rows, hidden, precision, "residual 2"),
    ]


# ---------------------------------------------------------------- operators of a framework

#: Precision of a tensor by PyTorch's name of its type.
_PRECISIONS = {
    "float": "fp32",
    "c10::Half": "fp16",
    "c10::BFloat16": "bf16",
    "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
}
#: Bytes of masks and indices, which do no arithmetic.
_OTHER_BYTES = {"bool": 1, "unsigned char": 1, "int": 4, "long int": 8, "long": 8}


def _is_shape(dims: object) -> bool:
    return isinstance(dims, list) and all(type(n) is int and n >= 0 for n in dims)


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """The recorded inputs of one operator."""

    dims: Sequence[Any]
    types: Sequence[str]
    values: Sequence[Any]

    def shape(self, i: int) -> list[int]:
        """Give the shape of an input, which must be a tensor."""
        dims = self.dims[i]
        if not _is_shape(dims):
            raise ValueError("not a tensor")
        return list(dims)

    def elements(self, i: int) -> int:
        return math.prod(self.shape(i))

    def precision(self, i: int = 0) -> str:
        return _PRECISIONS[self.types[i]]

    def size(self, i: int) -> int:
        """Give the bytes of one element of an input."""
        kind = self.types[i]
        return _OTHER_BYTES[kind] if kind in _OTHER_BYTES else BYTES_OF[self.precision(i)]

    def moved(self, i: int) -> int:
        """Give the bytes of a whole input."""
        return self.elements(i) * self.size(i)

    def numbers(self, i: int) -> list[int]:
        """Give a recorded list of numbers, such as strides."""
        return [int(number) for number in json.loads(str(self.values[i]))]

    def flag(self, i: int) -> bool | None:
        """Give a recorded flag; None where values were not recorded."""
        if i >= len(self.values) or self.values[i] in ("", None):
            return None
        return str(self.values[i]) in ("True", "1", "true")

    def label(self) -> str:
        """Write the shapes of the first tensors, and their precision."""
        shapes = [dims for dims in self.dims if dims]
        words = ["x".join(map(str, dims)) for dims in shapes[:3]]
        precisions = [_PRECISIONS[kind] for kind in self.types if kind in _PRECISIONS]
        return " ".join([*words, *(precisions or self.types)[:1]])


def _matrices(given: _Inputs, left: int = 0, right: int = 1) -> Operation:
    """Product of two matrices, or of two batches of them."""
    *batch, m, k = given.shape(left)
    *same, inner, n = given.shape(right)
    if k != inner or batch != same:
        raise ValueError("shapes do not match")
    product = gemm_cost(m, n, k, given.precision(left))
    count = math.prod(batch)
    return Operation("", product.flops * count, product.bytes * count, product.unit)


def _attention(given: _Inputs, q: int, causal: int, *, backward: bool = False) -> Operation:
    """Fused attention: queries, keys and values are inputs `q` and the two after it, each (B, heads, T, d)."""
    batch, heads, context, width = given.shape(q)
    _, kv_heads, keys, _ = given.shape(q + 1)
    precision = given.precision(q)
    # A mask that was not recorded counts as causal: the least that it can be.
    is_causal = given.flag(causal) is not False and keys >= context
    forward = attention_cost(batch, heads, context, width, precision, causal=is_causal, keys=keys, kv_heads=kv_heads)
    if not backward:
        return forward
    # Five products for the forward's two: scores again, and the gradients of scores, values, queries and keys.
    # Reads queries, keys, values, the result and its gradient; writes three gradients.
    moved = BYTES_OF[precision] * batch * width * (4 * heads * context + 4 * kv_heads * keys)
    return Operation("", forward.flops * 5 // 2, moved, precision)


def _convolution(given: _Inputs, padding: int) -> Operation:
    """Convolution; strides and dilations are the two inputs after `padding`."""
    batch, _, *extents = given.shape(0)
    filters, _, *kernel = given.shape(1)
    places = batch
    pads, strides, dilations = (given.numbers(padding + i) for i in range(3))
    for extent, width, pad, stride, dilation in zip(extents, kernel, pads, strides, dilations, strict=True):
        places *= (extent + 2 * pad - dilation * (width - 1) - 1) // stride + 1
    return _convolved(given, 0, 1, filters * places, 1)


def _convolution_backward(given: _Inputs) -> Operation:
    """Gradients of a convolution: of its input, its weights, or both."""
    passes = 1  # the least, where it was not recorded
    if len(given.values) > 10:
        wanted = str(given.values[10])
        passes = wanted.partition(",")[0].count("True") + wanted.split(",")[1].count("True")
    return _convolved(given, 1, 2, given.elements(0), passes)


def _convolved(given: _Inputs, image: int, weight: int, results: int, passes: int) -> Operation:
    """Passes over an image that multiply each result with the filter behind it: 2·N·K·C·R·S·P·Q FLOPs each."""
    precision = given.precision(image)
    depth = math.prod(given.shape(weight)[1:])  # channels of a group, and the filter's extents
    moved = BYTES_OF[precision] * (given.elements(image) + given.elements(weight) + results)
    return Operation("", 2 * passes * results * depth, passes * moved, precision)


def _elementwise(given: _Inputs, inputs: int, flops: int, widens: int | None = None) -> Operation:
    """One result of the largest shape, every tensor read once; a scalar costs nothing.

    The input `widens`, where there is one, tells whether bf16 and fp16 tensors give a result in fp32.
    """
    largest = read = result_bytes = 0
    for i, dims in enumerate(given.dims[:inputs]):
        kind = given.types[i]
        if dims and (kind in _PRECISIONS or kind in _OTHER_BYTES):
            largest = max(largest, given.elements(i))
            read += given.moved(i)
            if kind in _PRECISIONS:
                result_bytes = max(result_bytes, given.size(i))
    if widens is not None and given.flag(widens):
        result_bytes = BYTES_OF["fp32"]
    if not result_bytes:
        raise ValueError("no tensor of numbers")
    return Operation("", flops * largest, read + result_bytes * largest, "fp32")


def _reduction(given: _Inputs) -> Operation:
    """Read all; what is left of it depends on values that may not be recorded, and is left out."""
    return Operation("", given.elements(0), given.elements(0) * BYTES_OF[given.precision()], "fp32")


def _moves(given: _Inputs, inputs: int) -> Operation:
    """Read or write some inputs, and compute nothing."""
    return Operation("", 0, sum(map(given.moved, range(inputs))), "fp32")


def _embedding(given: _Inputs) -> Operation:
    return elementwise_cost("embedding", given.elements(1), given.shape(0)[-1], given.precision())


# Which input is which: the schemas in PyTorch's native_functions.yaml, 2.4 to 2.13. FLOPs of norms' gradients are
# twice those of the norms.
_MASK_AT = {
    "flash_attention": (4, 11),
    "efficient_attention": (6, 11),
    "cudnn_attention": (6, 14),
    "flash_attention_for_cpu": (4, 7),
}
_COSTS: dict[str, Callable[[_Inputs], Operation]] = {
    "mm": _matrices,
    "bmm": _matrices,
    "addmm": partial(_matrices, left=1, right=2),
    "baddbmm": partial(_matrices, left=1, right=2),
    "_scaled_mm": _matrices,
    "cudnn_convolution": partial(_convolution, padding=2),
    "miopen_convolution": partial(_convolution, padding=3),
    "convolution_backward": _convolution_backward,
    "_softmax": partial(_elementwise, inputs=1, flops=5, widens=2),
    "_log_softmax": partial(_elementwise, inputs=1, flops=5, widens=2),
    "embedding": _embedding,
    "copy_": partial(_moves, inputs=2),
    "fill": partial(_moves, inputs=1),
    "sum": _reduction,
    "mean": _reduction,
}
for _kind, (_forward, _backward) in _MASK_AT.items():
    _name = f"_scaled_dot_product_{_kind}"
    _COSTS[_name] = partial(_attention, q=0, causal=_forward)
    _COSTS[f"{_name}_backward"] = partial(_attention, q=1, causal=_backward, backward=True)
#: Elementwise operators by the tensors that they read, and FLOPs an element.
_ELEMENTWISE_OPERATORS = {
    (1, 1): "neg sqrt rsqrt abs reciprocal relu square pow",
    (1, 4): "silu sigmoid tanh exp log sin cos _fused_rms_norm",
    (1, 8): "gelu native_layer_norm",
    (2, 0): "masked_fill",
    (2, 1): "add sub rsub mul div maximum minimum threshold_backward",
    (2, 4): "_softmax_backward_data _log_softmax_backward_data",
    (2, 8): "silu_backward _fused_rms_norm_backward",
    (2, 16): "gelu_backward native_layer_norm_backward",
    (3, 0): "where",
}
for (_inputs, _flops), _names in _ELEMENTWISE_OPERATORS.items():
    for _name in _names.split():
        _COSTS[_name] = partial(_elementwise, inputs=_inputs, flops=_flops)
#: FLOPs or bytes of one operator, beyond which a file is not to be believed.
_MOST = 1 << 52
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
        Named after the operator, its shapes and their precision. None where the inputs were not recorded or do not
        determine the cost.
    """
    reckon = _COSTS.get(_IN_PLACE.sub("", name.removeprefix("aten::")))
    if reckon is None or not name.startswith("aten::") or not inputs:
        return None
    try:
        given = _Inputs(*json.loads(inputs))
        operation = reckon(given)
        label = given.label()
    # Files are untrusted: anything but shapes has no cost.
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return None
    if not 0 < max(operation.flops, operation.bytes) <= _MOST:
        return None
    return operation.renamed(f"{name} {label}")
