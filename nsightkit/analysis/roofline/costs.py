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
rotary          3MH                          2sMH
softmax         5MN                          2sMN
SwiGLU          5MF                          3sMF
residual        MH                           3sMH
embedding       0                            2sMH
=============== ============================ ==============================

Weights of norms, biases and statistics are left out: they are thousandths of the rest. Causal attention of equal
contexts is counted as exactly half of the square, which is what a kernel that skips masked tiles approaches.

What a framework operator must do is read from its name (``costs.toml``) and the shapes, types and values of its inputs,
which PyTorch's profiler records with ``record_shapes=True``. Operators that only call others (``aten::linear``) are not
counted, or their work would count twice. Operators on lists of tensors (``_foreach``, fused optimizers) have no cost
here, since the lists' types are not recorded. Attention whose mask was not recorded counts as causal, the least that it
can be, so that no share of the speed of light comes out too high.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Operation", "attention_cost", "cost", "elementwise_cost", "gemm_cost", "layer_costs"]

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
        if self.bytes:
            return self.flops / self.bytes
        return float("inf")


def gemm_cost(m: int, n: int, k: int, precision: str = "bf16", name: str = "GEMM", batch: int = 1) -> Operation:
    """Cost of the product of an m x k and a k x n matrix.

    Parameters
    ----------
    m, n, k : int
    precision : str
    name : str
    batch : int
        How many such products.

    Returns
    -------
    Operation
    """
    elements = batch * (m * k + k * n + m * n)
    return Operation(name, 2 * batch * m * n * k, BYTES_OF[precision] * elements, precision)


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

    Returns
    -------
    Operation
    """
    keys = context if keys is None else keys
    kv_heads = heads if kv_heads is None else kv_heads
    scores = context * keys
    if causal:
        # Everything before the last positions, and half of their square; a single query sees every key.
        scores = context * (keys - context) + max(context * context // 2, 1)
    flops = 4 * batch * heads * d_head * scores
    # Queries, the result, keys and values.
    rows = 2 * heads * context + 2 * kv_heads * keys
    return Operation("attention", flops, BYTES_OF[precision] * batch * d_head * rows, precision)


#: Operations that go through whole tensors: name, FLOPs an element, tensors read or written.
_ELEMENTWISE = {
    "rms_norm": ("RMSNorm", 4, 2),  # square, sum, and two products
    "rotary": ("rotary", 3, 2),  # two products and a sum; the width is that of queries and keys together
    "softmax": ("softmax", 5, 2),  # maximum, difference, exponential, sum, quotient
    "swiglu": ("SwiGLU", 5, 3),  # ``silu(gate) * up``: two tensors are read, one is written
    "residual": ("residual", 1, 3),  # sum of two tensors
    "embedding": ("embedding", 0, 2),  # a row of the table for each token
}


def elementwise_cost(kind: str, rows: int, width: int, precision: str = "bf16", name: str | None = None) -> Operation:
    """Cost of an operation that goes through whole tensors, each element once.

    Parameters
    ----------
    kind : {"rms_norm", "rotary", "softmax", "swiglu", "residual", "embedding"}
    rows, width : int
        The width of ``rotary`` is that of queries and keys together.
    precision : str
    name : str, optional

    Returns
    -------
    Operation
    """
    usual, flops, tensors = _ELEMENTWISE[kind]
    elements = rows * width
    # Such kernels compute in fp32 on the ordinary cores, for all types of tensors.
    return Operation(name or usual, flops * elements, tensors * BYTES_OF[precision] * elements, "fp32")


def layer_costs(
    batch: int,
    context: int,
    hidden: int,
    heads: int,
    d_ff: int,
    precision: str = "bf16",
    *,
    keys: int | None = None,
) -> list[Operation]:
    """List what the operations of a transformer layer's forward pass cost, unfused but for QKV and gate and up.

    Parameters
    ----------
    batch, context, hidden, heads, d_ff : int
    precision : str
    keys : int, optional
        Positions attended to, for decoding with a cache of `keys` positions.

    Returns
    -------
    list of Operation
        In the order they run.
    """
    rows = batch * context
    d_head = hidden // heads
    return [
        elementwise_cost("rms_norm", rows, hidden, precision, "RMSNorm 1"),
        gemm_cost(rows, 3 * hidden, hidden, precision, "QKV"),
        elementwise_cost("rotary", rows, 2 * hidden, precision, "rotary q, k"),
        attention_cost(batch, heads, context, d_head, precision, keys=keys),
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
#: Bytes of an element; masks and indices do no arithmetic.
_SIZES = {"bool": 1, "unsigned char": 1, "int": 4, "long int": 8, "long": 8}
_SIZES |= {kind: BYTES_OF[precision] for kind, precision in _PRECISIONS.items()}


class _Inputs(NamedTuple):
    """The recorded inputs of one operator."""

    dims: Sequence[Any]
    types: Sequence[str]
    values: Sequence[Any]

    def shape(self, i: int) -> list[int]:
        """Give the shape of an input, which must be a tensor."""
        shape = self.dims[i]
        if not all(type(extent) is int and extent >= 0 for extent in shape):
            raise ValueError("not a tensor")
        return list(shape)

    def elements(self, i: int) -> int:
        return math.prod(self.shape(i))

    def precision(self, i: int = 0) -> str:
        return _PRECISIONS[self.types[i]]

    def moved(self, i: int) -> int:
        """Give the bytes of a whole input."""
        return self.elements(i) * _SIZES[self.types[i]]

    def numbers(self, i: int) -> list[int]:
        """Give a recorded list of numbers, such as strides."""
        return [int(number) for number in json.loads(self.values[i])]

    def is_flag(self, i: int, *texts: str) -> bool:
        """Whether a flag was recorded, as one of these texts."""
        return i < len(self.values) and str(self.values[i]) in texts

    def label(self) -> str:
        """Write the shapes of the first tensors, and their precision."""
        words = ["x".join(map(str, dims)) for dims in self.dims if dims]
        precisions = [_PRECISIONS[kind] for kind in self.types if kind in _PRECISIONS]
        return " ".join(words[:3] + (precisions or list(self.types))[:1])


def _matrices(given: _Inputs, left: int = 0, right: int = 1) -> Operation:
    """Product of two matrices, or of two batches of them."""
    *batch, m, k = given.shape(left)
    *same, inner, n = given.shape(right)
    if k != inner or batch != same:
        raise ValueError("shapes do not match")
    return gemm_cost(m, n, k, given.precision(left), batch=math.prod(batch))


def _attention(given: _Inputs, q: int, causal: int) -> Operation:
    """Fused attention: queries, keys and values are inputs `q` and the two after it, each (B, heads, T, d)."""
    batch, heads, context, width = given.shape(q)
    _, kv_heads, keys, _ = given.shape(q + 1)
    precision = given.precision(q)
    # A mask that was not recorded counts as causal: the least that it can be.
    is_causal = keys >= context and not given.is_flag(causal, "False", "0", "false")
    return attention_cost(batch, heads, context, width, precision, causal=is_causal, keys=keys, kv_heads=kv_heads)


def _attention_backward(given: _Inputs, causal: int) -> Operation:
    """Gradients of attention: queries, keys and values are the inputs from the second."""
    forward = _attention(given, 1, causal)
    # Five products for the forward's two: scores again, and the gradients of scores, values, queries and keys.
    # Reads queries, keys, values, the result and its gradient; writes three gradients.
    return Operation("", forward.flops * 5 // 2, forward.bytes * 2, forward.unit)


def _convolution(given: _Inputs, padding: int) -> Operation:
    """Convolution; strides and dilations are the two inputs after `padding`."""
    batch, _, *extents = given.shape(0)
    filters, _, *kernel = given.shape(1)
    results = batch * filters
    choices = [given.numbers(padding + i) for i in range(3)]
    for extent, width, pad, stride, dilation in zip(extents, kernel, *choices, strict=True):
        results *= (extent + 2 * pad - dilation * (width - 1) - 1) // stride + 1
    return _convolved(given, 0, results, 1)


def _convolution_backward(given: _Inputs) -> Operation:
    """Gradients of a convolution: of its input, its weights, or both; one where that was not recorded."""
    both = given.is_flag(10, "[True, True, False]", "[True, True, True]")
    return _convolved(given, 1, given.elements(0), 2 if both else 1)


def _convolved(given: _Inputs, image: int, results: int, passes: int) -> Operation:
    """Passes over an image that multiply each result with the filter behind it: 2·N·K·C·R·S·P·Q FLOPs each."""
    precision = given.precision(image)
    depth = math.prod(given.shape(image + 1)[1:])  # channels of a group, and the filter's extents
    moved = BYTES_OF[precision] * (given.elements(image) + given.elements(image + 1) + results)
    return Operation("", 2 * passes * results * depth, passes * moved, precision)


def _elementwise(given: _Inputs, inputs: int, flops: int, writes: int = 1, widens: int = -1) -> Operation:
    """Every tensor read once, and one result of the largest shape if `writes`, beside which scalars cost nothing.

    The input `widens`, where there is one, tells whether bf16 and fp16 tensors give a result in fp32. What a reduction
    writes depends on values that may not be recorded, and is left out.
    """
    tensors = list(range(inputs))
    if writes:
        tensors = [i for i in tensors if given.dims[i]]
    largest = max(given.elements(i) for i in tensors)
    moved = sum(given.moved(i) for i in tensors)
    if writes:
        result_bytes = max(_SIZES[given.types[i]] for i in tensors if given.types[i] in _PRECISIONS)
        if widens >= 0 and given.is_flag(widens, "True", "1", "true"):
            result_bytes = BYTES_OF["fp32"]
        moved += result_bytes * largest
    return Operation("", flops * largest, moved, "fp32")


def _embedding(given: _Inputs) -> Operation:
    return elementwise_cost("embedding", given.elements(1), given.shape(0)[-1], given.precision())


_RULES: Mapping[str, Callable[..., Operation]] = {
    "matrices": _matrices,
    "attention": _attention,
    "attention-backward": _attention_backward,
    "convolution": _convolution,
    "convolution-backward": _convolution_backward,
    "elementwise": _elementwise,
    "embedding": _embedding,
}
_OPERATORS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
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
    rule = _OPERATORS.get(_IN_PLACE.sub("", name.removeprefix("aten::")))
    if rule is None or not name.startswith("aten::") or not inputs:
        return None
    try:
        given = _Inputs(*json.loads(inputs))
        places = {place: number for place, number in rule.items() if place != "rule"}
        operation = _RULES[rule["rule"]](given, **places)
        label = given.label()
    # Files are untrusted: anything but shapes has no cost.
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return None
    if not 0 < max(operation.flops, operation.bytes) <= _MOST:
        return None
    return dataclasses.replace(operation, name=f"{name} {label}")
