r"""What an operation must do: its FLOPs, and the bytes that it must move at least; and that of a framework's operators.

With M rows (tokens), widths H and N, element size s, batch B, h query and g key heads of width d, contexts S (of the
queries) and T (of the keys):

=============== ============================ ==============================
operation       FLOPs                        bytes
=============== ============================ ==============================
GEMM            2MNK                         s(MK + KN + MN)
attention       4BhdST, half of it causal    s·Bd(2hS + 2gT)
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

What a framework operator must do is read from its name and the shapes and types of its inputs. PyTorch's profiler
writes both when it is asked to (``record_shapes=True``). Operators that only call others (``aten::linear``) are not
counted, or their work would count twice; nor are those whose inputs do not show their traffic.

Two things may be missing. Types: ranges that PyTorch emits for Nsight Systems hold shapes alone, and the types inside
a list of tensors are recorded nowhere. Then the caller must say what the tensors hold; nothing is assumed. Values:
without them it is not known whether attention was causal. Then the least that it can be is counted, so that no share of
the speed of light comes out too high, and :func:`caveat` says so.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from nsightkit.errors import UsageError

__all__ = [
    "BYTES_OF",
    "Operation",
    "adamw_cost",
    "attention_cost",
    "caveat",
    "cost",
    "element_bytes",
    "elementwise_cost",
    "gemm_cost",
    "layer_costs",
    "untyped",
]

#: Bytes of an element by precision; ``tf32`` is a mode of the arithmetic and lies in memory as fp32.
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
        Context of keys and values; that of the queries when omitted.
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
    # Such kernels compute in fp32 on the ordinary cores, whatever their tensors hold.
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

#: Precision of a tensor by the name that PyTorch gives its type; the second spelling is that of older versions.
_PRECISIONS = {
    "float": "fp32",
    "c10::Half": "fp16",
    "c10::BFloat16": "bf16",
    "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
}
#: Bytes of other types, which say nothing of the precision: masks, indices.
_OTHER_BYTES = {"bool": 1, "unsigned char": 1, "int": 4, "long int": 8, "long": 8}
_LIST = "TensorList"


def _is_shape(dims: object) -> bool:
    return isinstance(dims, list) and all(type(n) is int and n >= 0 for n in dims)


class _Inputs(NamedTuple):
    """The inputs of one operator, and the precision that the caller says they have."""

    given: str | None
    dims: Sequence[Any]
    types: Sequence[str]
    values: Sequence[Any]

    def shape(self, i: int) -> list[int]:
        """Shape of an input, which must be a tensor."""
        if not _is_shape(self.dims[i]):
            raise ValueError("not a tensor")
        return list(self.dims[i])

    def elements(self, i: int) -> int:
        return math.prod(self.shape(i))

    def lists(self, count: int = 1) -> list[list[int]]:
        """Elements of each tensor of each list of tensors; without types `count` lists are strung together."""
        if not self.types:
            strung = [self.elements(i) for i in self.tensors(len(self.dims))]
            length = max(len(strung) // count, 1)
            return [strung[i : i + length] for i in range(0, len(strung), length)]
        lists = []
        for shapes, kind in zip(self.dims, self.types, strict=False):
            if kind != _LIST or not shapes:
                continue
            if not all(_is_shape(shape) for shape in shapes):
                raise ValueError("not a list of tensors")
            lists.append([math.prod(shape) for shape in shapes])
        return lists

    def precision(self, i: int = 0) -> str:
        """Precision of an input: as recorded, or as the caller has it where no type was."""
        if self.types and self.types[i] != _LIST:
            return _PRECISIONS[self.types[i]]
        if self.given is None:
            raise ValueError("no type was recorded")
        return self.given

    def size(self, i: int) -> int:
        """Bytes of an element of an input."""
        if self.types and self.types[i] in _OTHER_BYTES:
            return _OTHER_BYTES[self.types[i]]
        return BYTES_OF[self.precision(i)]

    def tensors(self, most: int) -> list[int]:
        """Which of the first inputs are tensors of more than one element."""
        return [i for i, dims in enumerate(self.dims[:most]) if dims and self._is_tensor(i)]

    def _is_tensor(self, i: int) -> bool:
        return not self.types or self.types[i] in _PRECISIONS or self.types[i] in _OTHER_BYTES

    def label(self) -> str:
        """Shapes of the first tensors, and their precision."""
        shapes = [dims for dims in self.dims if dims and _is_shape(dims)]
        if not shapes:
            shapes = [[sum(sizes)] for sizes in self.lists()[:1]]
        words = ["x".join(map(str, dims)) for dims in shapes[:3]]
        recorded = [_PRECISIONS[kind] for kind in self.types if kind in _PRECISIONS]
        precision = recorded[0] if recorded else self.given
        return " ".join([*words, precision or self.types[0]])

    def flag(self, i: int) -> bool | None:
        """Value of a flag; None where values were not recorded."""
        if i >= len(self.values) or self.values[i] in ("", None):
            return None
        return str(self.values[i]) in ("True", "1", "true")


def _matrices(given: _Inputs, left: int = 0, right: int = 1) -> Operation:
    """Product of two matrices, or of two batches of them."""
    *batch, m, k = given.shape(left)
    *same, inner, n = given.shape(right)
    if k != inner or batch != same:
        raise ValueError("shapes do not match")
    product, count = gemm_cost(m, n, k, given.precision(left)), math.prod(batch)
    return Operation("", product.flops * count, product.bytes * count, product.unit)


def _attention(given: _Inputs, q: int, causal: int, *, backward: bool = False) -> Operation:
    """Fused attention: queries, keys and values are inputs `q` and the two after it, each (B, heads, T, d)."""
    batch, heads, context, width = given.shape(q)
    _, kv_heads, keys, _ = given.shape(q + 1)
    masked = given.flag(causal) is not False and keys >= context
    precision = given.precision(q)
    forward = attention_cost(batch, heads, context, width, precision, causal=masked, keys=keys, kv_heads=kv_heads)
    if not backward:
        return forward
    # Five products for the forward's two: scores again, and the gradients of scores, values, queries and keys.
    # Reads queries, keys, values, the result and its gradient; writes three gradients.
    moved = BYTES_OF[precision] * batch * width * (4 * heads * context + 4 * kv_heads * keys)
    return dataclasses.replace(forward, flops=forward.flops * 5 // 2, bytes=moved)


def _elementwise(given: _Inputs, inputs: int, flops: int, widens: int | None = None) -> Operation:
    """One result of the largest shape, every tensor read once; a scalar costs nothing.

    The input `widens`, where there is one, says whether tensors of 16 bits give a result in fp32.
    """
    tensors = given.tensors(inputs)
    largest = max(given.elements(i) for i in tensors)
    precisions = [given.precision(i) for i in tensors if not given.types or given.types[i] in _PRECISIONS]
    result_bytes = max(BYTES_OF[precision] for precision in precisions)
    if widens is not None and given.flag(widens):
        result_bytes = BYTES_OF["fp32"]
    read = sum(given.elements(i) * given.size(i) for i in tensors)
    return Operation("", flops * largest, read + result_bytes * largest, "fp32")


def _reduction(given: _Inputs) -> Operation:
    """Read all; what is left of it depends on values that may not be recorded, and is left out."""
    elements = given.elements(0)
    return Operation("", elements, elements * BYTES_OF[given.precision()], "fp32")


def _moves(given: _Inputs, *, inputs: Sequence[int]) -> Operation:
    """Read or write some inputs, and compute nothing."""
    return Operation("", 0, sum(given.elements(i) * given.size(i) for i in inputs), "fp32")


def _cat(given: _Inputs) -> Operation:
    return Operation("", 0, 2 * sum(map(sum, given.lists())) * BYTES_OF[given.precision()], "fp32")


def _embedding(given: _Inputs) -> Operation:
    return elementwise_cost("embedding", given.elements(1), given.shape(0)[-1], given.precision())


def _embedding_backward(given: _Inputs) -> Operation:
    """Read the gradient of what was looked up, write that of the whole table."""
    elements, table = given.elements(0), int(given.values[2]) * given.shape(0)[-1]
    return Operation("", elements, (elements + table) * BYTES_OF[given.precision()], "fp32")


def _adamw(given: _Inputs) -> Operation:
    """One kernel for lists of weights, gradients and two moments, which emitted ranges string together."""
    lists = given.lists(4)
    if given.types:
        lists = lists[:4]
    if lists != lists[:1] * 4:
        raise ValueError("not four lists of the same tensors")
    return adamw_cost(sum(lists[0]), given.precision())


def _foreach(given: _Inputs, flops: int) -> Operation:
    """An elementwise operation on lists of tensors: each read once, one list written."""
    elements, *others = map(sum, given.lists())
    moved = 2 * elements + sum(others)
    return Operation("", flops * elements, moved * BYTES_OF[given.precision()], "fp32")


# Which input is which: the schemas in PyTorch's native_functions.yaml, 2.4 to 2.13. FLOPs of norms' gradients are
# twice those of the norms.
_MASK_AT = {
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_flash_attention_backward": 11,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_efficient_attention_backward": 11,
    "_scaled_dot_product_cudnn_attention": 6,
    "_scaled_dot_product_cudnn_attention_backward": 14,
    "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 7,
}
_COSTS: dict[str, Callable[[_Inputs], Operation]] = {
    "mm": _matrices,
    "bmm": _matrices,
    "addmm": partial(_matrices, left=1, right=2),
    "baddbmm": partial(_matrices, left=1, right=2),
    "_scaled_mm": _matrices,
    "_softmax": partial(_elementwise, inputs=1, flops=5, widens=2),
    "_log_softmax": partial(_elementwise, inputs=1, flops=5, widens=2),
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "copy_": partial(_moves, inputs=(0, 1)),
    "cat": _cat,
    "fill": partial(_moves, inputs=(0,)),
    "sum": _reduction,
    "mean": _reduction,
    "_fused_adamw": _adamw,
    "_fused_adam": _adamw,
}
for _name, _mask in _MASK_AT.items():
    _is_backward = _name.endswith("backward")
    _COSTS[_name] = partial(_attention, q=int(_is_backward), causal=_mask, backward=_is_backward)
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
#: Operators on lists of tensors, by FLOPs an element.
_LIST_OPERATORS = {1: "add sub mul div sqrt neg reciprocal", 3: "lerp addcmul addcdiv"}
for _flops, _names in _LIST_OPERATORS.items():
    for _name in _names.split():
        _COSTS[f"_foreach_{_name}"] = partial(_foreach, flops=_flops)
#: Their inputs are of several types by nature: a precision for all of them says too little.
_MIXED = ("copy_", "masked_fill", "where")
#: FLOPs or bytes of one operator, beyond which a file is not to be believed.
_MOST = 1 << 52
_IN_PLACE = re.compile(r"(?<!^copy)_$")


def _plain(name: str) -> str:
    if not name.startswith("aten::"):
        return ""
    return _IN_PLACE.sub("", name.removeprefix("aten::"))


def _reckoned(name: str, inputs: str, precision: str | None) -> tuple[Operation, _Inputs] | None:
    plain = _plain(name)
    if plain not in _COSTS or not inputs:
        return None
    try:
        # A product of scaled matrices exists in 8 bits only.
        given = _Inputs("fp8" if plain == "_scaled_mm" else precision, *json.loads(inputs))
        operation = _COSTS[plain](given)
        if not 0 < max(operation.flops, operation.bytes) <= _MOST:
            raise ValueError("sizes that were not recorded, or that no card holds")
        return operation.renamed(f"{name} {given.label()}"), given
    # Whatever a file says of its operators, what is not a shape has no cost.
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def cost(name: str, inputs: str, precision: str | None = None) -> Operation | None:
    """Reckon what an operator must cost.

    Parameters
    ----------
    name : str
        Such as ``aten::mm``.
    inputs : str
        The ``inputs`` of the trace's operators: JSON of shapes, types and values.
    precision : str, optional
        A key of :data:`BYTES_OF`: what tensors hold whose type was not recorded.
        A recorded type always counts.

    Returns
    -------
    Operation or None
        Named after the operator, its shapes and their precision. None where it is not an operator whose cost follows
        from its inputs, or they were not recorded or do not fit it, or their types were not and `precision` is missing
        or too little. Attention whose mask was not recorded counts as causal (:func:`caveat`).
    """
    reckoned = _reckoned(name, inputs, precision)
    if reckoned is None:
        return None
    operation, given = reckoned
    if not given.types and _plain(name) in _MIXED:
        return None
    return operation


def untyped(name: str, inputs: str) -> Operation | None:
    """Give what is known of an operator whose tensors' types are not.

    Parameters
    ----------
    name : str
    inputs : str

    Returns
    -------
    Operation or None
        Named after the operator and its shapes, with its FLOPs, no bytes and no unit. None where types would not help.
    """
    reckoned = _reckoned(name, inputs, "fp32")
    if reckoned is None:
        return None
    operation, _ = reckoned
    without_precision = operation.name.rpartition(" ")[0]
    return Operation(without_precision, operation.flops, 0, "")


def caveat(name: str, inputs: str) -> str:
    """Say what had to be taken for granted of an operator whose cost is reckoned.

    Parameters
    ----------
    name : str
    inputs : str

    Returns
    -------
    str
        Empty where everything that matters was recorded.
    """
    mask = _MASK_AT.get(_plain(name))
    reckoned = None if mask is None else _reckoned(name, inputs, "fp32")
    if mask is None or reckoned is None or reckoned[1].flag(mask) is not None:
        return ""
    return "its mask was not recorded: counted as causal, the least it can be"
