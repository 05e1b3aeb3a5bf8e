"""Which framework operators took the CPU's time; in a run without a GPU they take the place of kernels.

An operator's *own* time leaves out the operators that it called on its thread. In a run on the CPU that time is
arithmetic; in a run on a GPU it is the cost of launching.
"""

from __future__ import annotations

import re
from typing import Literal

import numpy as np
import pandas as pd

from nsightkit.analysis.core import categories
from nsightkit.analysis.core.grouped import check_grouping, durations_by_name, ranked_groups
from nsightkit.trace.model import Trace
from nsightkit.trace.nesting import nesting

__all__ = ["CATEGORIES", "RULES", "category_of", "own", "summary"]

#: Kinds of work, named as those of kernels (:mod:`nsightkit.analysis.core.categories`). *dispatch* neither moves data
#: nor computes: views, wrappers, autograd's bookkeeping. *other* is what no rule knows.
CATEGORIES = (
    *(category for category in categories.CATEGORIES if category not in ("Triton-fused", "other")),
    "dispatch",
    "other",
)

#: ``(category, pattern)`` in order of precedence; searched in the operator's name without its namespace.
RULES: tuple[tuple[str, str], ...] = (
    ("communication", r"^c10d::|nccl|gloo|record_param_comms|all_?reduce|all_?gather|reduce_?scatter|all_?2?_?to_?all"),
    # A wrapper that only chooses another operator takes almost no time itself.
    ("dispatch", r"^(scaled_dot_product_attention|linear|matmul|cross_entropy_loss|log_softmax|softmax|dropout)$"),
    ("dispatch", r"^autograd::|Backward\d*$|AccumulateGrad|CompiledFunction"),
    ("attention", r"scaled_dot_product|flash_attention|efficient_attention|multi_head_attention"),
    ("GEMM", r"^_?(scaled_|int_|grouped_)?(mm|bmm|addmm|addmv|mv|baddbmm|addbmm|addr|dot|vdot)(?![a-z])|einsum"),
    ("GEMM", r"mkldnn_linear|mkl_linear|onednn"),
    ("convolution", r"convolution|conv[123]d|mkldnn_conv"),
    ("softmax", r"softmax|cross_entropy|logsumexp"),
    ("normalization", r"(layer|batch|group|instance|rms)_norm"),
    ("optimizer", r"^_foreach|^_fused_(adam|sgd)|^_amp_|addcdiv|addcmul|^lerp"),
    (
        "memory-like",
        (
            r"^_?(copy|to_copy|clone|cat|stack|index|gather|scatter|embedding|fill|zero_|zeros|ones|full|arange"
            r"|constant_pad|pad|roll|flip|tril|triu|repeat|sort|unique|nonzero|masked_select|pin_memory)(?![a-z])"
        ),
    ),
    (
        "reduction",
        (
            r"^(sum|mean|prod|var|std|norm|linalg_vector_norm|amax|amin|max|min|argmax|argmin|cumsum|topk)(?![a-z])"
            r"|(nll|mse|l1)_loss|pool[123]d"
        ),
    ),
    (
        "elementwise",
        (
            r"^_?(add|sub|rsub|mul|div|true_divide|neg|pow|sqrt|rsqrt|reciprocal|square|exp|log|sin|cos|tanh|sigmoid|silu"
            r"|gelu|relu|threshold|clamp|where|masked_fill|eq|ne|lt|le|gt|ge|abs|sign|sgn|bitwise|logical|normal|uniform"
            r"|random|bernoulli|native_dropout|maximum|minimum|erf|hardswish|leaky_relu|nan_to_num)(?![a-z])"
        ),
    ),
    (
        "dispatch",
        (
            r"^_?(empty|view|unsafe_view|reshape|t|transpose|permute|as_strided|expand|slice|select|narrow|split|chunk"
            r"|unbind|unsqueeze|squeeze|flatten|unflatten|to|type_as|contiguous|detach|alias|item|local_scalar_dense"
            r"|result_type|resolve|lift|set|resize|conj|record_stream|diagonal|broadcast|scalar_tensor|new)(?![a-z])"
        ),
    ),
)


def category_of(name: str) -> str:
    """Decide the category of one operator.

    Parameters
    ----------
    name : str
        As the framework records it, such as ``aten::mm``.

    Returns
    -------
    str
        One of :data:`CATEGORIES`.

    Examples
    --------
    >>> category_of("aten::addmm")
    'GEMM'
    >>> category_of("autograd::engine::evaluate_function: MmBackward0")
    'dispatch'
    """
    inner = name.removeprefix("aten::").removeprefix("_c10d_functional::")
    for category, pattern in RULES:
        if re.search(pattern, inner):
            return category
    return "other"


def own(trace: Trace) -> pd.DataFrame:
    """Give every operator with its own time.

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    DataFrame
        ``name, thread, start_ns, end_ns, duration_ns``, in the order of the trace's ``ops``; `duration_ns` is the time
        that is the operator's and of none that it called. Empty where the source records no operators.
    """
    events = trace.table("ops", ["name", "thread", "start_ns", "end_ns"])
    _, above = nesting(events["thread"], events["start_ns"], events["end_ns"])
    length = (events["end_ns"] - events["start_ns"]).to_numpy()
    inside = np.zeros(len(events), np.int64)
    np.add.at(inside, above[above >= 0], length[above >= 0])
    # Times rounded to microseconds can make children longer than their parent.
    return events.assign(duration_ns=np.maximum(length - inside, 0))


def summary(
    trace: Trace,
    by: Literal["name", "category"] = "name",
    sort: Literal["time", "count"] = "time",
    top: int | None = None,
) -> pd.DataFrame:
    """Sum the own time of operators by name or by category of work.

    Parameters
    ----------
    trace : Trace
    by : {"name", "category"}
    sort : {"time", "count"}
    top : int, optional
        Only the first so many rows; shares stay those of all operator time.

    Returns
    -------
    DataFrame
        The columns of :func:`nsightkit.analysis.timeline.kernels.summary`, of operators' own times on the CPU.

    Raises
    ------
    UsageError
        `by` or `sort` is something else, or `top` is negative.
    """
    check_grouping("operators", by, sort, top)
    events = own(trace)
    if by == "category":
        events = events.assign(name=events["name"].map(category_of).astype("category"))
    table = durations_by_name(events)
    table["category"] = table["name"] if by == "category" else table["name"].map(category_of)
    return ranked_groups(table, sort, top)
