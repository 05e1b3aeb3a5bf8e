r"""How far from the speed of light: what an operation must cost at least, and what share of that rate it reached.

An operation has FLOPs, which some unit executes at a peak rate, and *compulsory bytes*: each operand read once and
each result written once, even if a kernel moves more. Its bound is the longer of the two times (the roofline,
Williams, Waterman and Patterson, 2009)::

    bound = max(FLOPs / rate of the unit, bytes / bandwidth)        SOL = bound / measured time

The rates are always named: those of the *datasheet*, or the *measured* ceilings of that very card. They are never
mixed: a GEMM that fills the card reaches about 80% of the datasheet under the power limit, so a share of one says
nothing about a share of the other.

A tensor that fits the level-2 cache may be there still when it is read, so an operation on it can be quicker than its
bound from the memory's bandwidth. The measurement is not wrong then: it is marked apart from what no card can do.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit import hardware
from nsightkit.analysis.core.intervals import enclosing, launch_of
from nsightkit.analysis.roofline.costs import (
    Operation,
    attention_cost,
    cost,
    elementwise_cost,
    gemm_cost,
    layer_costs,
)
from nsightkit.errors import AnyPath, TraceError, UsageError
from nsightkit.hardware import Gpu
from nsightkit.text import Json, matching
from nsightkit.trace.model import Trace

__all__ = [
    "Group",
    "Operation",
    "Rates",
    "attention_cost",
    "bounds",
    "ceilings",
    "datasheet",
    "elementwise_cost",
    "gemm_cost",
    "gpu_of",
    "judge",
    "kernel_bounds",
    "layer_costs",
    "operator_groups",
    "read_ceilings",
    "summary",
]

#: cuBLAS and CUTLASS: tf32 in the name, its instruction shape, or Hopper's code for single precision in and out.
_TF32_KERNEL = re.compile(r"tf32|s1688|tensorop_s\d|nvjet_s", re.IGNORECASE)
#: Operators that multiply in TF32 where it is allowed.
_TF32_OPERATORS = re.compile(r"aten::(mm|bmm|addmm|baddbmm|cudnn_convolution|miopen_convolution|convolution_backward) ")
_JUDGED_COLUMNS = ["name", "flops", "bytes", "intensity", "bound", "time_ns", "sol_datasheet", "sol_measured"]


@dataclasses.dataclass(frozen=True)
class Rates:
    """How fast a card computes and moves data.

    Parameters
    ----------
    source : str
        ``"datasheet"``, or what was measured where and when.
    tflops : mapping of str to float
        TFLOP/s by unit.
    gb_per_s : float
        Memory bandwidth, 10**9 bytes a second, reads and writes together.
    l2_bytes : int
        Level-2 cache; 0 if unknown.
    """

    source: str
    tflops: Mapping[str, float]
    gb_per_s: float
    l2_bytes: int = 0

    def compute_ns(self, operation: Operation) -> float:
        """Give the time of an operation's arithmetic at the peak rate, in ns; NaN for a unit without a rate."""
        if not operation.flops:
            return 0.0
        # 1 TFLOP/s is 1,000 FLOPs per ns.
        return operation.flops / self.tflops.get(operation.unit, np.nan) / 1e3

    def memory_ns(self, operation: Operation) -> float:
        """Give the time of an operation's compulsory traffic at the full bandwidth, in ns."""
        return operation.bytes / self.gb_per_s  # 1 GB/s is 1 byte per ns

    def bound_ns(self, operation: Operation) -> float:
        """Give the least time of an operation, in ns; NaN for a unit without a rate."""
        return float(np.maximum(self.compute_ns(operation), self.memory_ns(operation)))

    def bound(self, operation: Operation) -> str:
        """Say what takes longer, ``compute`` or ``memory``; ``memory`` also for a unit without a rate."""
        if self.compute_ns(operation) > self.memory_ns(operation):
            return "compute"
        return "memory"


def datasheet(gpu: Gpu) -> Rates:
    """Take the rates of a card's datasheet, which hold at its boost clock.

    Parameters
    ----------
    gpu : Gpu
        As :func:`nsightkit.hardware.find` gives it.

    Returns
    -------
    Rates
        Dense, with fp32 accumulation.
    """
    tflops = {peak.unit: peak.tflops for peak in gpu.peaks if peak.accumulate == "fp32"}
    return Rates("datasheet", tflops, gpu.gb_per_s, int(gpu.l2_mb * 1e6))


def ceilings(rows: Iterable[Json], source: str) -> Rates:
    """Take the best rate that was measured of each unit.

    Parameters
    ----------
    rows : iterable of mapping
        ``unit`` (``memory`` for a transfer), ``tflops`` and ``gb_per_s``, of which one is None.
    source : str
        What was measured where and when.

    Returns
    -------
    Rates
        Without transfers the bandwidth is NaN.
    """
    best: dict[str, float] = {"memory": float("nan")}
    for row in rows:
        unit = row["unit"]
        rate = row["gb_per_s"] if unit == "memory" else row["tflops"]
        # Unlike max, fmax takes the number where the other is NaN.
        best[unit] = float(np.fmax(best.get(unit, 0.0), rate))
    gb_per_s = best.pop("memory")
    return Rates(source, best, gb_per_s)


def read_ceilings(path: AnyPath) -> Rates:
    """Read the ceilings that ``nsightkit peaks --measure --format json`` wrote.

    Parameters
    ----------
    path : path-like

    Returns
    -------
    Rates
        The best of each unit, and of the memory.

    Raises
    ------
    TraceError
        The file is not such a list.
    """
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))
        if not all(row["source"].startswith("measured") for row in rows):
            raise ValueError("not measured")
        return ceilings(rows, f"measured on {rows[0]['gpu']}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        remedy = "write one with 'nsightkit peaks --measure --format json'"
        raise TraceError(path, f"is not a list of ceilings ({error})", remedy) from error


def bounds(operations: Iterable[Operation], rates: Rates) -> pd.DataFrame:
    """Give the least time of each operation.

    Parameters
    ----------
    operations : iterable of Operation
    rates : Rates

    Returns
    -------
    DataFrame
        ``name, flops, bytes, intensity, bound`` (``compute`` or ``memory``), ``bound_ns, compute_ns, memory_ns``; the
        first two times are NaN for a unit without a rate.
    """
    rows = [
        (
            operation.name,
            operation.flops,
            operation.bytes,
            operation.intensity,
            rates.bound(operation),
            rates.bound_ns(operation),
            rates.compute_ns(operation),
            rates.memory_ns(operation),
        )
        for operation in operations
    ]
    columns = ["name", "flops", "bytes", "intensity", "bound", "bound_ns", "compute_ns", "memory_ns"]
    return pd.DataFrame(rows, columns=columns)


def judge(
    operations: Sequence[Operation], time_ns: npt.ArrayLike, sheet: Rates, measured: Rates | None = None
) -> pd.DataFrame:
    """Compare measured times with what the card could do.

    Parameters
    ----------
    operations : sequence of Operation, length n
    time_ns : array_like of float, length n
        What each took.
    sheet : Rates
        Of the card's datasheet.
    measured : Rates, optional
        Ceilings measured on that very card.

    Returns
    -------
    DataFrame
        ``name, flops, bytes, intensity, bound`` (at datasheet rates), ``time_ns, sol_datasheet, sol_measured`` (NaN
        without ceilings), ``impossible``, ``note``. `impossible` is true where the time is shorter than the arithmetic
        takes at the datasheet's rate, or than the traffic takes that cannot have stayed in the level-2 cache: then the
        time, the shape or the clock is wrong. A cache of n bytes can hold n that are read, and keep n that are written.
    """
    table = bounds(operations, sheet)
    times = np.asarray(time_ns, dtype=float)
    table["time_ns"] = times
    table["sol_datasheet"] = table["bound_ns"] / times
    table["sol_measured"] = np.nan
    if measured is not None:
        measured_bounds = bounds(operations, measured)
        # A unit without a ceiling gives NaN, which does not matter where memory is the bound by the datasheet.
        memory_bound_ns = measured_bounds["memory_ns"][table["bound"] == "memory"]
        table["sol_measured"] = measured_bounds["bound_ns"].fillna(memory_bound_ns) / times
    is_beyond_peak = table["compute_ns"] > times
    # The cache saves at most its size of reads, and as much of writes.
    is_beyond_memory = table["bytes"] - 2 * sheet.l2_bytes > times * sheet.gb_per_s
    peak_notes = (table["flops"] / times / 1e3).map("would be {:,.0f} TFLOP/s, above the peak".format)
    # The first condition that holds decides.
    table["note"] = np.select(
        [is_beyond_peak, is_beyond_memory, table["memory_ns"] > times],
        [
            peak_notes,
            "faster than DRAM allows, and too large for the L2 cache: another GPU, or not every byte is read",
            "faster than DRAM allows: part of its data was in the L2 cache",
        ],
        "",
    )
    table["impossible"] = is_beyond_peak | is_beyond_memory
    return table[[*_JUDGED_COLUMNS, "impossible", "note"]]


def summary(trace: Trace, gpu: str | None = None, measured: Rates | None = None) -> pd.DataFrame:
    """Judge the operators of a trace whose shapes were recorded, by the kernels they launched.

    Operators are those of a Kineto trace with ``record_shapes=True``. Each kernel counts for the innermost operator
    with a known cost around its launch. Matmuls in fp32 are compared with the tensor cores' TF32 rate
    where their kernel's name says that they used it.

    Parameters
    ----------
    trace : Trace
        With operators, their inputs and kernels.
    gpu : str, optional
        Name of the card; what the trace says when omitted.
    measured : Rates, optional
        Ceilings measured on that very card.

    Returns
    -------
    DataFrame
        One row an operator with its shapes: the columns of :func:`judge`, summed over its calls, and ``count``. The
        longest first. Empty where no shapes or no kernels were recorded.

    Raises
    ------
    UsageError
        No such card is listed, or the trace names no card and `gpu` does neither.
    """
    by_shape = pd.DataFrame(operator_groups(trace), columns=list(Group._fields))
    by_shape = by_shape[by_shape["time_ns"] > 0].reset_index(drop=True)
    # Without operators nothing is judged, and the trace need not name its card.
    sheet = Rates("datasheet", {}, 1.0)
    if len(by_shape):
        sheet = datasheet(hardware.find(gpu or gpu_of(trace)))
    calls = by_shape["calls"].to_numpy(np.int64)
    times = by_shape["time_ns"].to_numpy(np.int64)
    operations = [_on_cores_of_card(sheet, operation) for operation in by_shape["operation"]]
    # By the mean time of one call: what fits the cache is a matter of a call. Then sums over calls.
    table = judge(operations, times / calls, sheet, measured)
    table[["flops", "bytes"]] = table[["flops", "bytes"]].mul(calls, axis=0)
    table = table.assign(time_ns=times, count=calls)
    return table.sort_values("time_ns", ascending=False, kind="stable", ignore_index=True)


def _on_cores_of_card(sheet: Rates, operation: Operation) -> Operation:
    """Move an operation to the card's ordinary cores where the card has no tensor cores for its precision."""
    if operation.unit in sheet.tflops:
        return operation
    return dataclasses.replace(operation, unit="fp32")


def kernel_bounds(trace: Trace, gpu: str | None = None) -> pd.Categorical[str]:
    """Find whether each kernel's operator is compute-bound or memory-bound, from its shapes.

    Parameters
    ----------
    trace : Trace
    gpu : str, optional
        Name of the card; what the trace says when omitted. Where that names none, or one that is not listed, a kernel
        has a bound if it is the same on every card that is.

    Returns
    -------
    Categorical, shape (n,)
        ``compute``, ``memory`` or, where no operator with a known cost launched the kernel, ``""``; a row for each of
        the trace's kernels.
    """
    bound_of_kernel = np.full(trace.size("kernels"), "", dtype=object)
    try:
        sheets = [datasheet(hardware.find(gpu or gpu_of(trace)))]
    except UsageError:
        sheets = [datasheet(card) for card in hardware.GPUS]  # it may be any of them
    for group in operator_groups(trace):
        bounds_of_cards = {sheet.bound(_on_cores_of_card(sheet, group.operation)) for sheet in sheets}
        if len(bounds_of_cards) == 1:
            bound_of_kernel[group.kernels] = bounds_of_cards.pop()
    return pd.Categorical(bound_of_kernel, pd.Index(["", "compute", "memory"]))


class Group(NamedTuple):
    """The kernels of operators of one name and one set of inputs.

    Attributes
    ----------
    operation : Operation
        Of one call.
    kernels : ndarray of int
        Rows in the trace's kernels.
    calls : int
        Calls of the operator that launched them.
    time_ns : int
        Sum of their durations.
    """

    operation: Operation
    kernels: np.ndarray
    calls: int
    time_ns: int


def operator_groups(trace: Trace) -> Iterator[Group]:
    """Find the operators of a trace whose inputs tell their cost, one group per name and inputs, with their kernels.

    Parameters
    ----------
    trace : Trace

    Yields
    ------
    Group
    """
    ops = trace.whole.table("ops", ["start_ns", "end_ns", "thread", "name", "inputs"])
    group_of_op = ops.groupby(["name", "inputs"], observed=True).ngroup()
    operations = {}
    first_of_group = ops[["name", "inputs"]][~group_of_op.duplicated()]
    for row, name, inputs in first_of_group.itertuples():
        operation = cost(str(name), str(inputs))
        if operation is not None:
            operations[int(group_of_op[row])] = operation
    kernels = trace.table("kernels", ["process", "correlation", "duration_ns", "name"])
    if kernels.empty or not operations:
        return
    is_tf32 = matching(kernels["name"], _TF32_KERNEL)
    # From each kernel to the call that launched it, and to the innermost operator with a known cost around that. Both
    # are rows of the whole trace, as a selection of kernels may lack their calls and operators.
    call = launch_of(trace, kernels["process"], kernels["correlation"])
    launched = np.flatnonzero(call >= 0)
    calls = trace.whole.table("calls", ["start_ns", "end_ns", "thread"])
    op_of_call = enclosing(calls, ops, group_of_op.isin(operations).to_numpy())
    op = op_of_call[call[launched]]
    launches = pd.DataFrame({"kernel": launched, "op": op})[op >= 0]
    launches["group"] = group_of_op.to_numpy()[launches["op"]]
    for group, members in launches.groupby("group"):
        operation = operations[int(str(group))]
        kernel_rows = members["kernel"].to_numpy()
        if operation.unit == "fp32" and _TF32_OPERATORS.match(operation.name) and is_tf32[kernel_rows].any():
            operation = dataclasses.replace(operation, unit="tf32")
        time_ns = int(kernels["duration_ns"].iloc[kernel_rows].sum())
        yield Group(operation, kernel_rows, members["op"].nunique(), time_ns)


def gpu_of(trace: Trace) -> str:
    """Name the card of a trace.

    Parameters
    ----------
    trace : Trace

    Raises
    ------
    UsageError
        The trace does not name it.
    """
    for gpu in trace.meta.gpus:
        if gpu.name:
            return gpu.name
    raise UsageError(f"{trace.path or 'the trace'} does not name its GPU; name it with --gpu")
