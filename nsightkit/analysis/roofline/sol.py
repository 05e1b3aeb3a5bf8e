r"""How far from the speed of light: what an operation must cost at least, and what share of that rate it reached.

An operation has FLOPs, which some unit executes at a peak rate, and *compulsory bytes*: each operand read once and
each result written once, even if a kernel moves more. Its bound is the longer of the two times (the roofline,
Williams, Waterman and Patterson, 2009)::

    bound = max(FLOPs / rate of the unit, bytes / bandwidth)        SOL = bound / measured time

The rates are always named: those of the *datasheet*, or the *measured* ceilings of that very card. They are never
mixed: a GEMM that fills the card reaches about 80 % of the datasheet under the power limit, so a share of one says
nothing about a share of the other.

A tensor that fits the level-2 cache may be there still when it is read, so an operation on it can be quicker than its
bound from the memory's bandwidth. The measurement is not wrong then: it is marked apart from what no card can do.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nsightkit import hardware
from nsightkit.analysis.core.intervals import enclosing, launch_of
from nsightkit.analysis.core.names import matching
from nsightkit.analysis.roofline.costs import (
    BYTES_OF,
    Operation,
    adamw_cost,
    attention_cost,
    cost,
    elementwise_cost,
    gemm_cost,
    layer_costs,
)
from nsightkit.errors import TraceError, UsageError
from nsightkit.hardware import Gpu
from nsightkit.trace.model import Trace

__all__ = [
    "BYTES_OF",
    "Group",
    "Operation",
    "Rates",
    "adamw_cost",
    "attention_cost",
    "bounds",
    "ceiling",
    "ceilings",
    "coverage",
    "datasheet",
    "elementwise_cost",
    "gemm_cost",
    "groups",
    "judge",
    "kernel_bounds",
    "layer_costs",
    "read_ceilings",
    "summary",
]

# cuBLAS and CUTLASS: tf32 in the name, its instruction shape, or Hopper's code for single precision in and out.
_TF32 = re.compile(r"tf32|s1688|tensorop_s\d|nvjet_s", re.IGNORECASE)
#: Operators that multiply in TF32 where it is allowed.
_PRODUCTS = (
    *("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::cudnn_convolution", "aten::miopen_convolution"),
    "aten::convolution_backward",
)
#: How often a transfer goes through the memory.
_TENSORS_MOVED = {"copy": 2, "triad": 3, "read": 1}
_BOUNDS = ("name", "flops", "bytes", "intensity", "bound", "bound_ns", "source")
_JUDGED = (
    *("name", "flops", "bytes", "intensity", "bound", "time_ns", "sol_datasheet", "sol_measured", "impossible"),
    *("unit", "source", "note"),
)


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
        """Give the time of an operation's arithmetic at the peak rate, in ns.

        Parameters
        ----------
        operation : Operation

        Raises
        ------
        UsageError
            The unit has no rate here.
        """
        if not operation.flops:
            return 0.0
        if operation.unit not in self.tflops:
            known = ", ".join(self.tflops)
            raise UsageError(f"{self.source} has no rate of {operation.unit} for {operation.name}; it has {known}")
        return operation.flops / self.tflops[operation.unit] / 1e3

    def memory_ns(self, operation: Operation) -> float:
        """Give the time of an operation's compulsory traffic at the full bandwidth, in ns."""
        return operation.bytes / self.gb_per_s

    def bound_ns(self, operation: Operation) -> float:
        """Give the least time of an operation, in ns."""
        return max(self.compute_ns(operation), self.memory_ns(operation))

    def bound(self, operation: Operation) -> str:
        """Say what takes longer, ``compute`` or ``memory``."""
        return "compute" if self.compute_ns(operation) > self.memory_ns(operation) else "memory"


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


def ceiling(parameters: Mapping[str, Any], time_ns: float) -> dict[str, Any]:
    """Give the rate of one operation that was run to find a card's ceiling.

    Parameters
    ----------
    parameters : mapping
        Of ``nsightkit.workloads.ceilings``: ``m, n, k, precision`` of a GEMM, ``megabytes, kind`` of a transfer.
    time_ns : float
        Of one run.

    Returns
    -------
    dict
        ``unit`` (``memory`` for a transfer), ``tflops`` and ``gb_per_s``, of which one is None, and ``what`` ran.
    """
    kind = str(parameters.get("kind", "gemm"))
    if kind != "gemm":
        gb_per_s = _TENSORS_MOVED[kind] * int(parameters["megabytes"]) * 10**6 / time_ns
        what = f"{kind} of {parameters['megabytes']:,} MB"
        return {"unit": "memory", "tflops": None, "gb_per_s": gb_per_s, "what": what}
    m, n, k = (int(parameters[name]) for name in ("m", "n", "k"))
    zeros = " of zeros" if parameters.get("zeros") else ""
    tflops = 2 * m * n * k / time_ns / 1e3
    what = f"GEMM {m}x{k} {k}x{n}{zeros}"
    return {"unit": parameters["precision"], "tflops": tflops, "gb_per_s": None, "what": what}


def ceilings(rows: Iterable[Mapping[str, Any]], source: str) -> Rates:
    """Take the best rate of each unit.

    Parameters
    ----------
    rows : iterable of mapping
        From :func:`ceiling`; products of zeros are left out, as no work is like them.
    source : str
        What was measured where and when.

    Returns
    -------
    Rates
        Without transfers the bandwidth is NaN.
    """
    best: dict[str, float] = {}
    for row in rows:
        unit = row["unit"]
        rate = row["gb_per_s"] if unit == "memory" else row["tflops"]
        if "of zeros" not in str(row["what"]):
            best[unit] = float(np.fmax(best.get(unit, 0.0), rate))
    gb_per_s = best.pop("memory", float("nan"))
    return Rates(source, best, gb_per_s)


def read_ceilings(path: str | os.PathLike[str]) -> Rates:
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
        cards = {str(row["gpu"]) for row in rows}
        if len(cards) != 1 or not all(str(row["source"]).startswith("measured") for row in rows):
            raise ValueError("not the measurement of one card")
        rates = ceilings([{**row, "what": row["source"]} for row in rows], f"measured on {cards.pop()}")
        if not rates.gb_per_s > 0:
            raise ValueError("no bandwidth in it")
    except OSError as error:
        raise TraceError(path, f"cannot be read ({error.strerror})", "check the path") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        remedy = "write one with 'nsightkit peaks --measure --format json'"
        raise TraceError(path, f"is not a list of ceilings ({error})", remedy) from error
    return rates


def bounds(operations: Iterable[Operation], rates: Rates) -> pd.DataFrame:
    """Give the least time of each operation.

    Parameters
    ----------
    operations : iterable of Operation
    rates : Rates

    Returns
    -------
    DataFrame
        ``name, flops, bytes, intensity, bound`` (``compute`` or ``memory``), ``bound_ns``, ``source`` of the rates.

    Raises
    ------
    UsageError
        `rates` lacks a unit.
    """
    rows = []
    for operation in operations:
        needs = (operation.name, operation.flops, operation.bytes, operation.intensity)
        rows.append((*needs, rates.bound(operation), rates.bound_ns(operation), rates.source))
    return pd.DataFrame(rows, columns=pd.Index(_BOUNDS))


def judge(
    operations: Sequence[Operation], time_ns: Sequence[float], sheet: Rates, measured: Rates | None = None
) -> pd.DataFrame:
    """Compare measured times with what the card could do.

    Parameters
    ----------
    operations : sequence of Operation, length n
    time_ns : sequence of float, length n
        What each took.
    sheet : Rates
        Of the card's datasheet.
    measured : Rates, optional
        Ceilings measured on that very card.

    Returns
    -------
    DataFrame
        ``name, flops, bytes, intensity, bound`` (at datasheet rates), ``time_ns, sol_datasheet, sol_measured`` (NaN
        without ceilings), ``impossible``, ``unit``, ``source`` of `sheet`, ``note``. `impossible` is true where the
        time is shorter than the arithmetic takes at the datasheet's rate, or than the traffic takes that cannot have
        stayed in the level-2 cache: then the time, the shape or the clock is wrong. A cache of n bytes can hold n that
        are read, and keep n that are written. The note also says where a time is shorter than measured ceilings allow,
        which is not a mistake: they are what one program reached.
    """
    times = np.asarray(time_ns, dtype=float)
    if len(times) != len(operations):
        raise UsageError(f"{len(operations)} operations and {len(times)} times do not belong together")
    if (times <= 0).any():
        raise UsageError("a measured time must be positive")
    table = bounds(operations, sheet).assign(time_ns=times, unit=[operation.unit for operation in operations])
    ceiling_ns = []
    notes = []
    for operation, lasting in zip(operations, times, strict=True):
        least_ns = _ceiling_ns(operation, sheet, measured)
        ceiling_ns.append(least_ns)
        notes.append(_note(operation, lasting, sheet, least_ns))
    table["sol_datasheet"] = table["bound_ns"] / times
    table["sol_measured"] = np.array(ceiling_ns, float) / times
    table["impossible"] = np.array([impossible for impossible, _ in notes], bool)
    table["note"] = np.array([note for _, note in notes], object)
    return table[list(_JUDGED)]


def _ceiling_ns(operation: Operation, sheet: Rates, measured: Rates | None) -> float:
    """Give the least time by measured ceilings; NaN without the ceiling of its unit."""
    if measured is None:
        return float("nan")
    if operation.unit in measured.tflops or not operation.flops:
        return measured.bound_ns(operation)
    return measured.memory_ns(operation) if sheet.bound(operation) == "memory" else float("nan")


def _note(operation: Operation, time_ns: float, sheet: Rates, ceiling_ns: float) -> tuple[bool, str]:
    """Say whether a time is impossible, and what is remarkable about it."""
    peak_ns = sheet.compute_ns(operation)
    if peak_ns > time_ns:
        rate = operation.flops / time_ns / 1e3
        return True, f"would be {rate:,.0f} TFLOP/s, {peak_ns / time_ns:.1f} times the peak"
    if operation.bytes - 2 * sheet.l2_bytes > time_ns * sheet.gb_per_s:
        return True, "above the memory's bandwidth, and too large for the L2 cache: is every byte read?"
    fits = operation.bytes <= sheet.l2_bytes
    above_ceiling = ceiling_ns > time_ns
    if sheet.memory_ns(operation) > time_ns or (above_ceiling and fits and sheet.bound(operation) == "memory"):
        tensors = "its tensors fit" if fits else "part of its tensors fits"
        return False, f"{tensors} the L2 cache: quicker than the memory, as they may be"
    return False, "quicker than the ceilings measured on this card" if above_ceiling else ""


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
    kinds = [group for group in groups(trace) if group.time_ns > 0]
    sheet = Rates("datasheet", {}, 1.0)
    if kinds:
        sheet = datasheet(hardware.find(gpu or _gpu_of(trace)))
    calls = np.array([group.calls for group in kinds], np.int64)
    times = np.array([group.time_ns for group in kinds], np.int64)
    operations = [_on(sheet, group.operation) for group in kinds]
    table = judge(operations, (times / calls).tolist(), sheet, measured)  # what fits the cache is a matter of one call
    table[["flops", "bytes"]] = table[["flops", "bytes"]].mul(calls, axis=0)
    table = table.assign(time_ns=times, count=calls)
    return table.sort_values("time_ns", ascending=False, kind="stable", ignore_index=True)


def _on(sheet: Rates, operation: Operation) -> Operation:
    """Give an operation on the unit of a card that does it: without such tensor cores, on its ordinary ones."""
    return operation if operation.unit in sheet.tflops else dataclasses.replace(operation, unit="fp32")


def coverage(table: pd.DataFrame, trace: Trace) -> float:
    """Give the share of the kernel time whose operators have a known cost.

    Parameters
    ----------
    table : DataFrame
        From :func:`summary` of that trace.
    trace : Trace

    Returns
    -------
    float
        NaN without kernel time.
    """
    kernel_ns = float(trace.table("kernels", ["duration_ns"])["duration_ns"].sum())
    return float(table["time_ns"].sum()) / kernel_ns if kernel_ns else float("nan")


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
    bound = np.full(trace.size("kernels"), "", dtype=object)
    try:
        sheets = [datasheet(hardware.find(gpu or _gpu_of(trace)))]
    except UsageError:
        sheets = [datasheet(card) for card in hardware.GPUS]
    for group in groups(trace):
        bounds_of_cards = {sheet.bound(_on(sheet, group.operation)) for sheet in sheets}
        if len(bounds_of_cards) == 1:
            bound[group.kernels] = bounds_of_cards.pop()
    return pd.Categorical(bound, pd.Index(["", "compute", "memory"]))


@dataclasses.dataclass(frozen=True)
class Group:
    """The kernels of operators of one name and one set of shapes.

    Attributes
    ----------
    operation : Operation
        Of one call.
    kernels : ndarray of int
        Rows.
    calls, time_ns : int
    """

    operation: Operation
    kernels: np.ndarray
    calls: int
    time_ns: int


def groups(trace: Trace) -> Iterator[Group]:
    """Find the kernels of each kind of operator whose cost its inputs tell.

    Parameters
    ----------
    trace : Trace

    Yields
    ------
    Group
    """
    if not trace.size("kernels") or not trace.whole.size("ops"):
        return
    ops = trace.whole.table("ops", ["start_ns", "end_ns", "thread", "name", "inputs"])
    operations, operation_of = _operations(ops)
    known = operation_of >= 0
    if not known.any():
        return
    kernels = trace.table("kernels", ["process", "correlation", "duration_ns", "name"])
    call = launch_of(trace, kernels["process"], kernels["correlation"])
    launched = np.flatnonzero(call >= 0)
    calls = trace.whole.table("calls", ["start_ns", "end_ns", "thread"])
    operator = enclosing(calls, ops, known)[call[launched]]
    launched, operator = launched[operator >= 0], operator[operator >= 0]
    rows = pd.DataFrame({"row": launched, "operator": operator, "number": operation_of[operator]})
    rows["time_ns"] = kernels["duration_ns"].to_numpy()[launched]
    rows["tf32"] = matching(kernels["name"], _TF32)[launched]
    for number, members in rows.groupby("number"):
        operation = operations[int(str(number))]
        if operation.unit == "fp32" and operation.name.startswith(_PRODUCTS) and members["tf32"].any():
            operation = dataclasses.replace(operation, unit="tf32")
        calls_made = members["operator"].nunique()
        yield Group(operation, members["row"].to_numpy(), calls_made, int(members["time_ns"].sum()))


def _operations(ops: pd.DataFrame) -> tuple[list[Operation], np.ndarray]:
    """Give the operations of known cost, and the number of each operator's among them, -1 for none."""
    names, inputs = ops["name"].cat, ops["inputs"].cat
    # One number for both: unique pairs are 10x slower.
    width = len(inputs.categories)
    pairs = names.codes.to_numpy(np.int64) * width + inputs.codes.to_numpy(np.int64)
    kind_of, pairs = pd.factorize(pairs, sort=True)
    operations: list[Operation] = []
    number_of_kind = np.full(len(pairs), -1, np.int64)
    for kind, pair in enumerate(pairs.tolist()):
        operation = cost(str(names.categories[pair // width]), str(inputs.categories[pair % width]))
        if operation is not None:
            number_of_kind[kind] = len(operations)
            operations.append(operation)
    return operations, number_of_kind[kind_of]


def _gpu_of(trace: Trace) -> str:
    for gpu in trace.meta.gpus:
        if gpu.name:
            return gpu.name
    raise UsageError(f"{trace.path or 'the trace'} does not name its GPU; name it with --gpu")
