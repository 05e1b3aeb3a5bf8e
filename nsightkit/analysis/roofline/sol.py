r"""How far from the speed of light: what an operation must cost at least, and what share of that rate it reached.

An operation has FLOPs, which some unit executes at a peak rate, and *compulsory bytes*: each operand read once and
each result written once, whatever a kernel really moves. Its bound is the longer of the two times (the roofline,
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
from nsightkit.analysis.core import intervals
from nsightkit.analysis.core.intervals import enclosing, launch_of
from nsightkit.analysis.core.names import matching
from nsightkit.analysis.roofline import nvtx_ops
from nsightkit.analysis.roofline.costs import (
    BYTES_OF,
    Operation,
    adamw_cost,
    attention_cost,
    caveat,
    cost,
    element_bytes,
    elementwise_cost,
    gemm_cost,
    layer_costs,
    untyped,
)
from nsightkit.analysis.timeline import operators, steps
from nsightkit.errors import TraceError, UsageError
from nsightkit.hardware import Gpu
from nsightkit.trace.model import Trace

__all__ = [
    "BYTES_OF",
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
    "hfu",
    "judge",
    "kernel_bounds",
    "layer_costs",
    "read_ceilings",
    "summary",
    "watched",
]

# cuBLAS and CUTLASS: tf32 in the name, its instruction shape, or Hopper's code for single precision in and out.
_TF32 = re.compile(r"tf32|s1688|tensorop_s\d|nvjet_s", re.IGNORECASE)


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
        Level-2 cache; 0 when it is not known.
    """

    source: str
    tflops: Mapping[str, float]
    gb_per_s: float
    l2_bytes: int = 0

    def compute_ns(self, operation: Operation) -> float:
        """Give the time of an operation's arithmetic at the peak rate.

        Parameters
        ----------
        operation : Operation

        Returns
        -------
        float
            Nanoseconds.

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
        """Give the time of an operation's compulsory traffic at the full bandwidth.

        Parameters
        ----------
        operation : Operation

        Returns
        -------
        float
            Nanoseconds.
        """
        return operation.bytes / self.gb_per_s

    def bound_ns(self, operation: Operation) -> float:
        """Give the least time of an operation.

        Parameters
        ----------
        operation : Operation

        Returns
        -------
        float
            Nanoseconds.
        """
        return max(self.compute_ns(operation), self.memory_ns(operation))

    def bound(self, operation: Operation) -> str:
        """Say what takes longer, ``compute`` or ``memory``.

        Parameters
        ----------
        operation : Operation
        """
        return "compute" if self.compute_ns(operation) > self.memory_ns(operation) else "memory"


def datasheet(gpu: Gpu, clock_mhz: float | None = None) -> Rates:
    """Take the rates of a card's datasheet, which hold at its boost clock, or what is left of them at another.

    Parameters
    ----------
    gpu : Gpu
        As :func:`nsightkit.hardware.find` gives it.
    clock_mhz : float, optional
        The SM clock that was measured. The memory has a clock of its own: its bandwidth stays.

    Returns
    -------
    Rates
        Dense, with fp32 accumulation. `source` says which clock, where it is not the datasheet's own. A rate that is
        quoted only, with no clock, stays what it is.

    Raises
    ------
    UsageError
        `clock_mhz` is not positive.
    """
    tflops = {peak.unit: peak.tflops for peak in gpu.peaks if peak.accumulate == "fp32"}
    l2_bytes = int(gpu.l2_mb * 1e6)
    if clock_mhz is None:
        return Rates("datasheet", tflops, gpu.gb_per_s, l2_bytes)
    if not clock_mhz > 0:
        raise UsageError(f"a clock of {clock_mhz:g} MHz does not tick")
    at_clock = {unit: gpu.at_clock(unit, clock_mhz) or rate for unit, rate in tflops.items()}
    return Rates(f"datasheet at {clock_mhz:,.0f} MHz", at_clock, gpu.gb_per_s, l2_bytes)


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
    rate: dict[str, Any] = {"unit": "memory", "tflops": None, "gb_per_s": None}
    if kind == "gemm":
        m, n, k = (int(parameters[name]) for name in ("m", "n", "k"))
        zeros = " of zeros" if parameters.get("zeros") else ""
        rate |= {"unit": parameters["precision"], "tflops": 2 * m * n * k / time_ns / 1e3}
        return rate | {"what": f"GEMM {m}x{k} {k}x{n}{zeros}"}
    megabytes = int(parameters["megabytes"])
    rate["gb_per_s"] = _TENSORS_MOVED[kind] * megabytes * 10**6 / time_ns
    return rate | {"what": f"{kind} of {parameters['megabytes']:,} MB"}


#: How often a transfer goes through the memory.
_TENSORS_MOVED = {"copy": 2, "triad": 3, "read": 1}


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
        if "of zeros" in str(row["what"]):
            continue
        unit = row["unit"]
        rate = row["gb_per_s"] if unit == "memory" else row["tflops"]
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
        known = {str(row["gpu"]) for row in rows}
        if len(known) != 1 or not all(str(row["source"]).startswith("measured") for row in rows):
            raise ValueError("not the measurement of one card")
        rates = ceilings([{**row, "what": row["source"]} for row in rows], f"measured on {known.pop()}")
        if not rates.gb_per_s > 0:
            raise ValueError("no bandwidth in it")
    except OSError as error:
        raise TraceError(path, f"cannot be read ({error.strerror})", "check the path") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(
            path, f"is not a list of ceilings ({error})", "write one with 'nsightkit peaks --measure --format json'"
        ) from error
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
        bound, bound_ns = rates.bound(operation), rates.bound_ns(operation)
        cost = (operation.name, operation.flops, operation.bytes, operation.intensity)
        rows.append((*cost, bound, bound_ns, rates.source))
    return pd.DataFrame(rows, columns=["name", "flops", "bytes", "intensity", "bound", "bound_ns", "source"])


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
        ``name, flops, bytes, intensity, bound`` (by the datasheet), ``time_ns, sol_datasheet, sol_measured`` (NaN
        without ceilings), ``impossible``, ``unit``, ``source`` of `sheet`, ``note``. `impossible` is true where the
        time is shorter than the arithmetic takes at the datasheet's rate, or than the traffic takes that cannot have
        stayed in the level-2 cache: then the time, the shape or the clock is wrong. A cache of n bytes can hold n that
        are read, and keep n that are written. The note also says where a time is shorter than measured ceilings allow,
        which is not a mistake: they are what one program reached.
    """
    table = bounds(operations, sheet)
    times = np.asarray(time_ns, dtype=float)
    if len(times) != len(table):
        raise UsageError(f"{len(table)} operations and {len(times)} times do not belong together")
    if (times <= 0).any():
        raise UsageError("a measured time must be positive")
    moved, by_memory = table["bytes"].to_numpy(), (table["bound"] == "memory").to_numpy()
    ceiling_ns = [_ceiling_ns(measured, *pair) for pair in zip(operations, table["bound"], strict=True)]
    table["time_ns"] = times
    table["sol_datasheet"] = table["bound_ns"] / times
    table["sol_measured"] = np.array(ceiling_ns, float) / times
    table["unit"] = np.array([operation.unit for operation in operations], dtype=object)
    fits = moved <= sheet.l2_bytes
    above_peak = np.array([sheet.compute_ns(operation) for operation in operations]) > times
    above_memory = moved / sheet.gb_per_s > times
    above_uncached = np.maximum(moved - 2 * sheet.l2_bytes, 0) / sheet.gb_per_s > times
    above_ceiling = (table["sol_measured"] > 1).to_numpy()
    table["impossible"] = above_peak | above_uncached
    notes = {  # the first that holds
        "above the memory's bandwidth, and too large for the L2 cache: is every byte read?": above_uncached,
        f"part of {_CACHED.format('fits')}": above_memory & ~fits,
        _CACHED.format("fit"): above_memory | (above_ceiling & fits & by_memory),
        "quicker than the ceilings measured on this card": above_ceiling,
    }
    table["note"] = np.select(list(notes.values()), list(notes), "").astype(object)
    for row in np.flatnonzero(above_peak).tolist():
        rate, peak = table["flops"][row] / times[row] / 1e3, sheet.tflops[operations[row].unit]
        table.loc[row, "note"] = f"would be {rate:,.0f} TFLOP/s, {rate / peak:.1f} times the peak"
    return table[_JUDGED]


_JUDGED = [
    *("name", "flops", "bytes", "intensity", "bound", "time_ns", "sol_datasheet", "sol_measured", "impossible"),
    *("unit", "source", "note"),
]
_CACHED = "its tensors {} the L2 cache: quicker than the memory, as they may be"


def _ceiling_ns(measured: Rates | None, operation: Operation, bound: str) -> float:
    """Give the least time by measured ceilings; NaN where the one that counts was not measured."""
    if measured is None:
        return float("nan")
    if operation.unit in measured.tflops or not operation.flops:
        return measured.bound_ns(operation)
    return measured.memory_ns(operation) if bound == "memory" else float("nan")


def summary(
    trace: Trace,
    gpu: str | None = None,
    measured: Rates | None = None,
    *,
    machine: Rates | None = None,
    precision: str | None = None,
    clock_mhz: float | None = None,
) -> pd.DataFrame:
    """Judge the operators of a trace whose shapes were recorded, by the kernels they launched.

    Operators are those of a Kineto trace with ``record_shapes=True``, or what the names of NVTX ranges say
    (:mod:`nsightkit.analysis.roofline.nvtx_ops`). Each kernel counts for the innermost operator with a known cost that
    its launch lies in. GEMMs in fp32 are held against the tensor cores' TF32 rate where their kernel's name says that
    they used it.

    Ranges do not say what tensors hold. That is taken from the name of the operator's longest kernel whose name says
    it, else it is `precision`, else it stays unknown, and so does the operator's share.

    Parameters
    ----------
    trace : Trace
        With operators, their inputs and kernels.
    gpu : str, optional
        Name of the card; what the trace says when omitted.
    measured : Rates, optional
        Ceilings measured on that very card.
    machine : Rates, optional
        What to hold times against in place of a card's datasheet. With it a trace without kernels is judged by the own
        times of its operators on the CPU, which these rates must be of then.
    precision : {"fp32", "tf32", "fp16", "bf16", "fp8"}, optional
        Of tensors whose type neither the trace nor a kernel's name states.
    clock_mhz : float, optional
        The SM clock that was measured, for a datasheet's rates at that clock (:func:`datasheet`).

    Returns
    -------
    DataFrame
        One row an operator with its shapes: ``name, flops, bytes, intensity, bound, time_ns, sol_datasheet,
        sol_measured, impossible, unit, source`` as from :func:`judge`, summed over its calls; ``count``;
        ``precision_from`` (``recorded``, ``kernel`` for the name of one, ``given``, or ``unknown``) and ``note``. The
        longest first. What depends on an unknown precision is missing: `bytes` is NA, `bound` None, shares are NaN.
        Empty where no shapes or no kernels were recorded.

    Raises
    ------
    UsageError
        No such card or precision is listed, or the trace names no card and `gpu` does neither; or the card has no such
        unit.
    """
    if precision is not None:
        element_bytes(precision)
    on_cpu = machine is not None and not trace.recorded("kernels")
    ops = _operators(trace, "ops" if on_cpu else "kernels")
    if not len(ops):
        # Times on a CPU say nothing of a GPU's speed of light.
        return _listed([], Rates("datasheet", {}, 1.0), None)
    sheet = machine or datasheet(hardware.find(gpu or _gpu_of(trace)), clock_mhz)
    return _listed([group for group in _groups(trace, ops, on_cpu, precision) if group.time_ns > 0], sheet, measured)


def _listed(groups: list[_Group], sheet: Rates, measured: Rates | None) -> pd.DataFrame:
    """Judge groups of calls; what has no precision comes last, without a judgement."""
    groups = sorted(groups, key=lambda group: group.precision_from == "unknown")
    times = np.array([group.time_ns for group in groups], np.int64)
    calls = np.array([group.calls for group in groups], np.int64)
    source = np.array([group.precision_from for group in groups], dtype=object)
    unknown = source == "unknown"
    # What fits the cache is a matter of one call.
    table = judge([_on(sheet, group.operation) for group in groups], (times / calls).tolist(), sheet, measured)
    notes = []
    for group, note in zip(groups, table.pop("note").mask(unknown, _UNKNOWN), strict=True):
        notes.append("; ".join(filter(None, [note, group.caveat])))
    table = table.astype({"bytes": "Int64", "bound": object, "unit": object})
    table[["flops", "bytes"]] = table[["flops", "bytes"]].mul(calls, axis=0)
    table["time_ns"] = times
    table["impossible"] &= ~unknown
    for column, nothing in _NOT_KNOWN.items():
        table.loc[unknown, column] = nothing
    table = table.assign(count=calls, precision_from=source, note=np.array(notes, dtype=object))
    return table.sort_values("time_ns", ascending=False, kind="stable", ignore_index=True)


#: What depends on the precision.
_NOT_KNOWN: dict[str, Any] = {
    "bytes": pd.NA,
    "bound": None,
    "unit": None,
    "intensity": np.nan,
    "sol_datasheet": np.nan,
    "sol_measured": np.nan,
}


def _on(sheet: Rates, operation: Operation) -> Operation:
    """An operation on the unit of a card that does it: without such tensor cores, on its ordinary ones."""
    return operation if operation.unit in sheet.tflops else dataclasses.replace(operation, unit="fp32")


_UNKNOWN = "what its tensors hold was not recorded, and no kernel's name says it"


def coverage(table: pd.DataFrame, trace: Trace) -> float:
    """Give the share of the kernel time whose operators have a known cost: what :func:`hfu` and shares are said of.

    Parameters
    ----------
    table : DataFrame
        From :func:`summary` of that trace.
    trace : Trace

    Returns
    -------
    float
        Operators of unknown precision are not in it. NaN without kernel time.
    """
    kernel_ns = float(trace.table("kernels", ["duration_ns"])["duration_ns"].sum())
    if not kernel_ns:
        return float("nan")
    return float(table.loc[table["precision_from"] != "unknown", "time_ns"].sum()) / kernel_ns


def hfu(table: pd.DataFrame, time_ns: float, rates: Rates) -> float:
    """Give the hardware FLOPs utilisation: the time that matrix arithmetic takes at the peak rate, of the whole time.

    All arithmetic counts that ran, also what was computed a second time to save memory; MFU counts what the model
    needs. Both were defined by Chowdhery and others (PaLM, 2022, appendix B).

    Parameters
    ----------
    table : DataFrame
        From :func:`summary`.
    time_ns : float
        Of the program, idle time included, times the number of GPUs (:func:`watched`).
    rates : Rates

    Returns
    -------
    float
        Share of `time_ns`. Operators of unknown cost or precision are not in it, convolutions among them: it is the
        least that it can be, and :func:`coverage` says how much of the kernel time it speaks of.
    """
    matrices = table[table["name"].str.startswith(_ON_TENSOR_CORES) & table["unit"].isin(list(rates.tflops))]
    peak = matrices["unit"].map(dict(rates.tflops)).astype(float)
    return float((matrices["flops"] / peak).sum() / 1e3 / time_ns)


def watched(trace: Trace) -> tuple[Trace, float, str]:
    """Give what :func:`hfu` is said of: the steps and what was launched in them, or without steps all and the span.

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    trace : Trace
        With the kernels that count.
    time_ns : float
        A sum over the devices.
    what : str
        ``steps`` or ``span``.
    """
    table = steps.summary(trace)
    if not len(table):
        return trace, float(intervals.busy(trace)["span_ns"].sum()), "span"
    mask = trace.mask("kernels")
    inside = np.ones(trace.size("kernels"), bool) if mask is None else mask.copy()
    inside[inside] = steps.launched_in(trace, "kernels", steps.windows(trace)) >= 0
    return trace.masked({"kernels": inside}), float((table["busy_ns"] + table["idle_ns"]).sum()), "steps"


def kernel_bounds(trace: Trace, gpu: str | None = None) -> pd.Categorical[str]:
    """Say of each kernel whether its operator is bound by arithmetic or by the memory, where the shapes say so.

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

    Raises
    ------
    UsageError
        No card of the name in `gpu` is listed.
    """
    bound = np.full(trace.size("kernels"), "", dtype=object)
    ops = _operators(trace, "kernels")
    for group in _groups(trace, ops):
        if group.precision_from == "unknown":
            continue
        bounds_of_cards = {sheet.bound(_on(sheet, group.operation)) for sheet in _sheets(trace, gpu)}
        if len(bounds_of_cards) == 1:
            bound[group.members] = bounds_of_cards.pop()
    return pd.Categorical(bound, pd.Index(["", "compute", "memory"]))


def _sheets(trace: Trace, gpu: str | None) -> list[Rates]:
    """The datasheet of the card; where it is not known which that is, those of all."""
    try:
        return [datasheet(hardware.find(gpu or _gpu_of(trace)))]
    except UsageError:
        if gpu is not None:
            raise
        return [datasheet(card) for card in hardware.GPUS]


@dataclasses.dataclass(frozen=True)
class _Group:
    """What ran for operators of one name, one set of shapes and one precision: kernels, or operators on a CPU."""

    operation: Operation  # what one call must do; of no unit where the precision is unknown
    precision_from: str
    caveat: str
    members: np.ndarray  # rows of the kernels or operators
    calls: int
    time_ns: int


def _operators(trace: Trace, ran: str) -> pd.DataFrame:
    """The operators of a trace, with their inputs; an empty table where nothing `ran`, of kernels or of operators."""
    whole, columns = trace.whole, ["start_ns", "end_ns", "thread", "name", "inputs"]
    ops = whole.table("ops", columns) if whole.size("ops") else nvtx_ops.operators(whole)
    return ops if trace.size(ran) else ops.head(0)


def _groups(trace: Trace, ops: pd.DataFrame, on_cpu: bool = False, precision: str | None = None) -> Iterator[_Group]:
    """What ran for the operators whose shapes tell their costs, alone or once the types of their tensors are known."""
    if not len(ops):
        return
    kinds, kind_of = _kinds(ops)
    known = np.array([kind.operation is not None for kind in kinds], bool)[kind_of]
    ran = _own_times(trace, known) if on_cpu else _kernel_times(trace, ops, known)
    ran = ran[ran["operator"] >= 0]
    ran = ran.assign(kind=kind_of[ran["operator"]], holds=-1)
    # Of all that an operator launched, the longest says what it works on.
    telling = ran[ran["told"] >= 0].sort_values("lasting", kind="stable").drop_duplicates("operator", keep="last")
    without_types = np.array([not kind.typed for kind in kinds], bool)[ran["kind"]]
    of_operator = ran["operator"].map(telling.set_index("operator")["told"])
    ran["holds"] = of_operator.where(without_types).fillna(-1).astype(int)
    key: Any
    for key, rows in ran.groupby(["kind", "holds"]):
        kind = kinds[key[0]]
        holds = _PRECISIONS[key[1]] if key[1] >= 0 else None
        operation, source = kind.operation, "recorded"
        if operation is None or holds == nvtx_ops.OTHER:
            continue
        if not kind.typed:
            # Unknown is what nothing says the precision of, or tensors of several types by nature.
            source = "unknown"
            reckoned = cost(kind.name, kind.inputs, holds or precision)
            if reckoned is not None:
                operation, source = reckoned, "kernel" if holds else "given"
        if operation.unit == "fp32" and kind.name.startswith(_GEMMS) and rows["tf32"].any():
            operation = dataclasses.replace(operation, unit="tf32")
        remark = caveat(kind.name, kind.inputs)
        calls, time_ns = rows["operator"].nunique(), int(rows["lasting"].sum())
        yield _Group(operation, source, remark, rows.index.to_numpy(), calls, time_ns)


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Operators of one name and one set of shapes: their cost, or what is known of it without the types."""

    name: str
    inputs: str
    typed: bool
    operation: Operation | None


def _kinds(ops: pd.DataFrame) -> tuple[list[_Kind], np.ndarray]:
    """The kinds of operators, and the kind of each."""
    names, inputs = ops["name"].cat, ops["inputs"].cat
    # One number for both: unique pairs take ten times as long.
    pairs = names.codes.to_numpy(np.int64) * len(inputs.categories) + inputs.codes.to_numpy(np.int64)
    kind_of, pairs = pd.factorize(pairs, sort=True)
    kinds = []
    for name_code, inputs_code in zip(*np.divmod(pairs, len(inputs.categories)), strict=True):
        name, text = str(names.categories[name_code]), str(inputs.categories[inputs_code])
        operation = cost(name, text)
        kinds.append(_Kind(name, text, operation is not None, operation or untyped(name, text)))
    return kinds, kind_of


def _own_times(trace: Trace, known: np.ndarray) -> pd.DataFrame:
    """Each known operator by its own time on the CPU, in the form of :func:`_kernel_times`."""
    mask = trace.mask("ops")
    chosen = known if mask is None else known & mask
    operator = np.where(chosen, np.arange(len(known)), -1)
    lasting = operators.own(trace.whole)["duration_ns"]
    return pd.DataFrame({"operator": operator, "lasting": lasting, "tf32": False, "told": -1})


def _kernel_times(trace: Trace, ops: pd.DataFrame, known: np.ndarray) -> pd.DataFrame:
    """The kernels, each with the innermost known operator around its launch, and what its name says.

    ``operator`` is the row of that one, -1 for none; ``lasting`` in ns; ``tf32``: whether it multiplies fp32 on tensor
    cores; ``told`` is the position in `_PRECISIONS` of what its tensors hold, -1 where its name does not say.
    """
    kernels = trace.table("kernels", ["process", "correlation", "duration_ns", "name"])
    call = launch_of(trace, kernels["process"], kernels["correlation"])
    operator = np.full(len(call), -1, np.int64)
    launched = call >= 0
    if launched.any() and known.any():
        calls = trace.whole.table("calls", ["start_ns", "end_ns", "thread"])
        operator[launched] = enclosing(calls, ops, known)[call[launched]]
    names = kernels["name"].cat
    precisions = [nvtx_ops.precision_of(str(name)) for name in names.categories]
    codes = pd.Categorical(precisions, _PRECISIONS).codes
    ran = pd.DataFrame({"operator": operator, "lasting": kernels["duration_ns"]})
    return ran.assign(tf32=matching(kernels["name"], _TF32), told=np.append(codes, -1)[names.codes])


_GEMMS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm")
_ON_TENSOR_CORES = (*_GEMMS, "aten::_scaled_mm", "aten::_scaled_dot_product")
_PRECISIONS = ("fp32", "fp16", "bf16", "fp8", nvtx_ops.OTHER)  # what nvtx_ops.precision_of gives


def _gpu_of(trace: Trace) -> str:
    for gpu in trace.meta.gpus:
        if gpu.name:
            return gpu.name
    raise UsageError(f"{trace.path or 'the trace'} does not name its GPU; name it with --gpu")
