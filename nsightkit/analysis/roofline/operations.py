r"""What an operation must do: its FLOPs, and the bytes that it must move at least.

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
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial

from nsightkit._moved import renamed
from nsightkit.errors import UsageError

__all__ = [
    "BYTES_OF",
    "Operation",
    "adamw_cost",
    "attention_cost",
    "element_bytes",
    "elementwise_cost",
    "gemm_cost",
    "layer_costs",
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
    keys, groups = context if keys is None else keys, heads if kv_heads is None else kv_heads
    scores = context * keys
    if causal:
        if keys < context:
            raise UsageError(f"causal attention of {context} queries needs as many keys, not {keys}")
        # Everything before the last positions, and half of their square; a single query sees every key.
        scores = context * (keys - context) + max(context * context // 2, 1)
    moved = element_bytes(precision) * batch * d_head * (2 * heads * context + 2 * groups * keys)
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


__getattr__ = renamed(
    __name__,
    {
        **{kind: (f'elementwise_cost("{kind}", ...)', partial(elementwise_cost, kind)) for kind in _ELEMENTWISE},
        **{old.__name__.rpartition("_")[0]: (old.__name__, old) for old in (gemm_cost, attention_cost, adamw_cost)},
        "layer": ("layer_costs", layer_costs),
    },
)
