"""Framework operators that a program announced in the names of its NVTX ranges.

``torch.autograd.profiler.emit_nvtx(record_shapes=True)``, and ``nsys profile --pytorch=autograd-shapes-nvtx`` through
it, give each operator a range of this name::

    aten::addmm, seq = 1, op_id = 6, sizes = [[128], [128, 64], [64, 128], [], []], input_op_ids = [(0,-1), (2,0), ...]

``seq`` is there where autograd numbered the operator, ``op_id`` from PyTorch 1.9 on, ``input_op_ids`` from 1.10 on. The
sizes are those of Kineto's shapes, except that lists of tensors are strung together and numbers have the size ``[]``.
Types and values are not there. What the tensors held is often said by the name of the kernel (:func:`precision_of`).

``nsys profile --pytorch=functions-trace-shapes`` (2026.4 and later) keeps shapes in binary payloads and not in names;
those are not read.
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from nsightkit.trace.model import Trace, categorical

__all__ = ["OTHER", "operators", "precision_of"]

_SIZES = r"\[(?:\[[\d, ]*\](?:, )?)*\]"
_RANGE = rf"^([^,]+)(?:, seq = \d+)?(?:, op_id = \d+)?, sizes = ({_SIZES})(?:, input_op_ids = .*)?$"


def operators(trace: Trace) -> pd.DataFrame:
    """Read operators and their shapes from the names of a trace's ranges.

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    DataFrame
        ``start_ns, end_ns, thread, name, inputs`` as in the trace model's table of operators, with shapes but neither
        types nor values in `inputs`. Empty where no range is named so.
    """
    ranges = trace.table("ranges", ["start_ns", "end_ns", "thread", "name"])
    names = pd.Series(ranges["name"].cat.categories, dtype="str")
    # Nearly every range has a name of its own, for it holds the number of the operator: a quick pass before the other.
    likely = names.str.contains(", sizes = [", regex=False)
    parts = names[likely].str.extract(_RANGE).reindex(names.index)
    codes = ranges["name"].cat.codes.to_numpy()
    rows = np.flatnonzero(np.append(parts[1].notna(), False)[codes])
    table = ranges.iloc[rows][["start_ns", "end_ns", "thread"]].reset_index(drop=True)
    name_codes, operator_names = pd.factorize(parts[0])
    shape_codes, shapes = pd.factorize(parts[1])
    table["name"] = categorical(name_codes[codes[rows]], [str(name) for name in operator_names])
    table["inputs"] = categorical(shape_codes[codes[rows]], [f"[{text},[],[]]" for text in shapes])
    return table


#: What :func:`precision_of` gives for tensors of numbers that no unit of :mod:`nsightkit.hardware` computes with.
OTHER = "other"
#: ``(precision, pattern)``, the first that is found in a kernel's name. Tensors' types, not those of sums: these are
#: named beside them in many names, so that a 16-bit type in a name counts before fp32 does.
_PRECISIONS = tuple(
    (precision, re.compile(pattern))
    for precision, pattern in (
        (
            OTHER,
            r"(Functor\w*|ReduceOp|BatchedCopy\w*)<(double|long|int|short|bool|(un)?signed char)\b|_?dgemm|f64f64_",
        ),
        # cuBLAS on Hopper and later: a letter each for A and B, sums and the result.
        ("fp8", r"^nvjet(_sm\d+)?_q|e4m3|e5m2"),
        ("fp16", r"^nvjet(_sm\d+)?_h"),
        ("bf16", r"^nvjet(_sm\d+)?_t"),
        ("fp32", r"^nvjet(_sm\d+)?_s"),
        # cuBLAS and CUTLASS before it, attention of CUTLASS, and C++ types.
        ("bf16", r"(?i)bfloat16|(?<![a-z])bf16"),
        (
            "fp16",
            r"c10::Half|__half|half_t|(?<![a-z])fp16_s\d|(?<![a-z0-9])f16f16_|_h(884|1688|16816)(gemm|cudnn)|F_f16_",
        ),
        ("fp32", r"(?<![a-z])[sc]?sgemm|(?<![a-z0-9])f32f32_|tf32f32|_s1688(gemm|cudnn|tf32)|_f32_aligned"),
        ("fp32", r"(?<![\w:])float(?![\w])"),
    )
)
#: Kernels whose name has the type they compute in, while each tensor is cast as it is read or written.
_CASTING = re.compile(r"unrolled_elementwise_kernel|gpu_kernel_impl<|WithCast|direct_copy|_copy_kernel")


def precision_of(kernel: str) -> str | None:
    """Tell what a kernel's tensors hold, where its name says so.

    Parameters
    ----------
    kernel : str
        Demangled, with template arguments.

    Returns
    -------
    {"fp32", "fp16", "bf16", "fp8"} or OTHER or None
        None where the name does not say. Products in TF32 are of tensors in fp32.
    """
    if _CASTING.search(kernel):
        return None
    return next((precision for precision, pattern in _PRECISIONS if pattern.search(kernel)), None)
