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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from nsightkit.text import read_toml

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
        # The queries are the last positions: each sees all keys before these, and on average half of the keys at these
        # positions. A single query sees every key. Queries before the first key see none.
        seeing = min(context, keys)
        scores = seeing * (keys - seeing) + max(seeing * seeing // 2, 1)
    flops = 4 * batch * heads * d_head * scores
    # Queries, the result, keys and values.
    rows = 2 * heads * context + 2 * kv_heads * keys
    return Operation("attention", flops, BYTES_OF[precision] * batch * d_head * rows, precision)


#: By kind: name, FLOPs an element, tensors read or written.
_ELEMENTWISE = read_toml(__file__, "elementwise")


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
    usual_name, flops_per_element, tensors = _ELEMENTWISE[kind]
    elements = rows * width
    # Such kernels compute in fp32 on the ordinary cores, for all types of tensors.
    return Operation(name or usual_name, flops_per_element * elements, tensors * BYTES_OF[precision] * elements, "fp32")


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
#: Bytes of an element by PyTorch's name of its type, also of masks and indices, which do no arithmetic.
_ELEMENT_BYTES = {"bool": 1, "unsigned char": 1, "int": 4, "long int": 8, "long": 8}
_ELEMENT_BYTES |= {kind: BYTES_OF[precision] for kind, precision in _PRECISIONS.items()}


class _Arguments(NamedTuple):
    """The recorded arguments of one operator, in its schema's order: shape, type and value of each."""

    dims: Sequence[Any]
    types: Sequence[str]
    values: Sequence[Any]

    def shape(self, i: int) -> list[int]:
        """Give the shape of a tensor, [] for a scalar; ValueError for a list of tensors."""
        shape = self.dims[i]
        if not all(type(extent) is int and extent >= 0 for extent in shape):
            raise ValueError("not a tensor")
        return list(shape)

    def elements(self, i: int) -> int:
        """Give the number of elements of a tensor; 1 for a scalar."""
        return math.prod(self.shape(i))

    def precision(self, i: int = 0) -> str:
        """Give the precision of a tensor of numbers; KeyError for masks and indices."""
        return _PRECISIONS[self.types[i]]

    def tensor_bytes(self, i: int) -> int:
        """Give the bytes of a whole tensor."""
        return self.elements(i) * _ELEMENT_BYTES[self.types[i]]

    def numbers(self, i: int) -> list[int]:
        """Give a list of numbers, such as strides, which is recorded as text: "[1, 1]"."""
        return [int(number) for number in json.loads(self.values[i])]

    def is_flag(self, i: int, *texts: str) -> bool:
        """Whether a flag was recorded as one of these texts; False for one that was not recorded."""
        return i < len(self.values) and str(self.values[i]) in texts

    def label(self) -> str:
        """Write the shapes of the first tensors, and their precision."""
        shapes = ["x".join(map(str, dims)) for dims in self.dims if dims]
        precisions = [_PRECISIONS[kind] for kind in self.types if kind in _PRECISIONS]
        # Such as "64x128 128x32 bf16"; without a tensor of numbers, PyTorch's name of the first type.
        return " ".join(shapes[:3] + (precisions or list(self.types))[:1])


def _matmul_cost(arguments: _Arguments, left: int = 0, right: int = 1) -> Operation:
    """Cost of the product of two matrices, or of two batches of them: the arguments `left` and `right`."""
    *batch, m, k = arguments.shape(left)
    *right_batch, right_k, n = arguments.shape(right)
    if k != right_k or batch != right_batch:
        raise ValueError("shapes do not match")
    return gemm_cost(m, n, k, arguments.precision(left), batch=math.prod(batch))


def _fused_attention_cost(arguments: _Arguments, q: int, causal: int) -> Operation:
    """Cost of attention: queries, keys and values are argument `q` and the two after it, each (B, heads, T, d).

    The argument `causal` is the flag ``is_causal``.
    """
    batch, heads, context, width = arguments.shape(q)
    _, kv_heads, keys, _ = arguments.shape(q + 1)
    precision = arguments.precision(q)
    # A flag that was not recorded counts as causal, the least work that it can mean.
    is_causal = not arguments.is_flag(causal, "False", "0", "false")
    return attention_cost(batch, heads, context, width, precision, causal=is_causal, keys=keys, kv_heads=kv_heads)


def _attention_backward_cost(arguments: _Arguments, causal: int) -> Operation:
    """Cost of attention's gradients: the result's gradient is argument 0, then come queries, keys and values."""
    forward = _fused_attention_cost(arguments, q=1, causal=causal)
    # Five products for the forward's two: scores again, and the gradients of scores, values, queries and keys.
    # Reads queries, keys, values, the result and its gradient; writes three gradients.
    return Operation("", forward.flops * 5 // 2, forward.bytes * 2, forward.unit)


def _convolution_cost(arguments: _Arguments, padding: int) -> Operation:
    """Cost of a convolution of an image (argument 0) with filters (1).

    The argument `padding` and the two after it are the paddings, strides and dilations.
    """
    batch, _, *extents = arguments.shape(0)
    filters, _, *filter_extents = arguments.shape(1)
    result_elements = batch * filters
    settings = [arguments.numbers(padding + i) for i in range(3)]
    for extent, filter_extent, pad, stride, dilation in zip(extents, filter_extents, *settings, strict=True):
        # The extent of the result, as in the documentation of torch.nn.Conv2d.
        result_elements *= (extent + 2 * pad - dilation * (filter_extent - 1) - 1) // stride + 1
    return _passes_cost(arguments, image=0, result_elements=result_elements, passes=1)


def _convolution_backward_cost(arguments: _Arguments) -> Operation:
    """Cost of a convolution's gradients: of its image, its filters, or both; of one where that was not recorded.

    Arguments 0 to 2 are the gradient of the result, the image and the filters.
    """
    # Argument 10, the output mask: gradients of image, filters and bias.
    has_both = arguments.is_flag(10, "[True, True, False]", "[True, True, True]")
    return _passes_cost(arguments, image=1, result_elements=arguments.elements(0), passes=2 if has_both else 1)


def _passes_cost(arguments: _Arguments, image: int, result_elements: int, passes: int) -> Operation:
    """Cost of passes of a convolution: its image is argument `image`, its filters are the argument after that.

    The forward convolution is one pass, as is each gradient of image or filters in the backward one. A pass has
    2·N·K·C·R·S·P·Q FLOPs (a filter for each element of the result) and reads or writes image, filters and result once.
    """
    precision = arguments.precision(image)
    filter_elements = math.prod(arguments.shape(image + 1)[1:])  # channels of a group, and the filter's extents
    elements = arguments.elements(image) + arguments.elements(image + 1) + result_elements
    flops = 2 * passes * result_elements * filter_elements
    return Operation("", flops, passes * BYTES_OF[precision] * elements, precision)


def _pointwise_cost(arguments: _Arguments, inputs: int, flops: int, writes: int = 1, widens: int = -1) -> Operation:
    """Cost of an operator that reads its first `inputs` arguments, does `flops` per element, and writes a result.

    The result has the largest shape of these arguments. Scalars among them cost nothing. With ``writes=0`` the result
    is left out: it is one of the inputs, or a reduction's result, whose size depends on values that may not be
    recorded. The argument `widens`, where there is one (not -1), is a flag: bf16 and fp16 tensors give a result in
    fp32.
    """
    tensors = list(range(inputs))
    if writes:  # with writes=0 no input is a scalar (costs.toml): one of shape [] is a tensor
        tensors = [i for i in tensors if arguments.dims[i]]
    largest_elements = max(arguments.elements(i) for i in tensors)
    moved_bytes = sum(arguments.tensor_bytes(i) for i in tensors)
    if writes:
        # The widest type is the result's; without a floating-point tensor `max` raises: the cost is unknown.
        number_types = [arguments.types[i] for i in tensors if arguments.types[i] in _PRECISIONS]
        element_bytes = max(_ELEMENT_BYTES[kind] for kind in number_types)
        if widens >= 0 and arguments.is_flag(widens, "True", "1", "true"):
            element_bytes = BYTES_OF["fp32"]
        moved_bytes += element_bytes * largest_elements
    return Operation("", flops * largest_elements, moved_bytes, "fp32")


def _embedding_cost(arguments: _Arguments) -> Operation:
    """Cost of looking up a row of the table (argument 0) for each index (argument 1)."""
    return elementwise_cost("embedding", arguments.elements(1), arguments.shape(0)[-1], arguments.precision())


#: By the rule's name in ``costs.toml``: the function that reckons the cost of an operator, still without its name.
_RULES: Mapping[str, Callable[..., Operation]] = {
    "matrices": _matmul_cost,
    "attention": _fused_attention_cost,
    "attention-backward": _attention_backward_cost,
    "convolution": _convolution_cost,
    "convolution-backward": _convolution_backward_cost,
    "elementwise": _pointwise_cost,
    "embedding": _embedding_cost,
}
#: By operator: its ``rule``, and the keyword arguments of the rule's function.
_OPERATORS = read_toml(__file__, "costs")
#: FLOPs or bytes of one operator, beyond which a file is not to be believed.
_LARGEST_COST = 4_000_000_000_000_000
#: The end of ``add_``, which costs what ``add`` does; ``copy_`` has a separate entry.
_IN_PLACE_SUFFIX = re.compile(r"(?<!^copy)_$")


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
    entry = _OPERATORS.get(_IN_PLACE_SUFFIX.sub("", name.removeprefix("aten::")))
    if entry is None or not name.startswith("aten::") or not inputs:
        return None
    try:
        arguments = _Arguments(*json.loads(inputs))
        options = {option: value for option, value in entry.items() if option != "rule"}
        operation = _RULES[entry["rule"]](arguments, **options)
        label = arguments.label()
    # Files are untrusted: anything but shapes has no cost.
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return None
    if not 0 < max(operation.flops, operation.bytes) <= _LARGEST_COST:
        return None
    return dataclasses.replace(operation, name=f"{name} {label}")
