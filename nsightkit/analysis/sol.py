r"""How far from the speed of light: what an operation must cost at least, and what share of that rate it reached.

An operation has FLOPs, which some unit executes at a peak rate, and *compulsory bytes*: each operand read once and
each result written once, whatever a kernel really moves. Its bound is the longer of the two times (the roofline,
Williams, Waterman and Patterson, 2009)::

    bound = max(FLOPs / rate of the unit, bytes / bandwidth)        SOL = bound / measured time

The rates are always named: those of the *datasheet*, or the *measured* ceilings of that very card. They are never
mixed: a GEMM that fills the card reaches about 80 % of the datasheet under the power limit, so a share of one says
nothing about a share of the other.

A tensor that fits the level-2 cache may be there still when it is read, so an operation on it can be quicker than its
bound from the memory's bandwidth. That is no fault of the measurement, and is marked apart from what no card can do.

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
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nsightkit import hardware
from nsightkit.analysis import operators
from nsightkit.analysis.intervals import launch_of
from nsightkit.errors import TraceError, UsageError
from nsightkit.hardware import Gpu
from nsightkit.trace.model import Trace
from nsightkit.trace.nesting import nesting

__all__ = [
    "BYTES_OF",
    "Operation",
    "Rates",
    "adamw",
    "attention",
    "bounds",
    "ceiling",
    "ceilings",
    "cross_entropy",
    "datasheet",
    "embedding",
    "gelu",
    "gemm",
    "judge",
    "kernel_bounds",
    "layer",
    "layer_norm",
    "read_ceilings",
    "residual",
    "rms_norm",
    "rotary",
    "softmax",
    "summary",
    "swiglu",
]

# cuBLAS and CUTLASS: tf32 in the name, its instruction shape, or Hopper's code for single precision in and out.
_TF32 = re.compile(r"tf32|s1688|tensorop_s\d|nvjet_s", re.IGNORECASE)
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
        try:
            return operation.flops / self.tflops[operation.unit] / 1e3
        except KeyError:
            known = ", ".join(self.tflops)
            raise UsageError(
                f"{self.source} has no rate of {operation.unit} for {operation.name}; it has {known}"
            ) from None

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


def datasheet(gpu: Gpu) -> Rates:
    """Take the rates of a card's datasheet.

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
        Of :class:`nsightkit.workloads.ceilings.CeilingConfig`.
    time_ns : float
        Of one run.

    Returns
    -------
    dict
        ``unit`` (``memory`` for a transfer), ``tflops`` and ``gb_per_s``, of which one is None, and ``what`` ran.
    """
    kind = str(parameters["kind"])
    if kind == "gemm":
        m, n, k = (int(parameters[name]) for name in ("m", "n", "k"))
        what = f"GEMM {m}x{k} {k}x{n}" + (" of zeros" if parameters.get("zeros") else "")
        return {
            "unit": parameters["precision"],
            "tflops": 2 * m * n * k / time_ns / 1e3,
            "gb_per_s": None,
            "what": what,
        }
    tensors = {"copy": 2, "triad": 3, "read": 1}[kind]
    moved = tensors * int(parameters["megabytes"]) * 10**6
    what = f"{kind} of {parameters['megabytes']:,} MB"
    return {"unit": "memory", "tflops": None, "gb_per_s": moved / time_ns, "what": what}


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
    tflops: dict[str, float] = {}
    gb_per_s = float("nan")
    for row in rows:
        if row["unit"] == "memory":
            gb_per_s = float(np.fmax(gb_per_s, row["gb_per_s"]))
        elif "of zeros" not in str(row["what"]):
            tflops[row["unit"]] = max(tflops.get(row["unit"], 0.0), float(row["tflops"]))
    return Rates(source, tflops, gb_per_s)


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
        The file is no such list.
    """
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))
        known = {str(row["gpu"]) for row in rows}
        if len(known) != 1 or not all(str(row["source"]).startswith("measured") for row in rows):
            raise ValueError("not the measurement of one card")
        found = ceilings([{**row, "what": row["source"]} for row in rows], f"measured on {known.pop()}")
        if not found.gb_per_s > 0:
            raise ValueError("no bandwidth in it")
    except OSError as error:
        raise TraceError(path, f"cannot be read ({error.strerror})", "check the path") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(
            path, f"is no list of ceilings ({error})", "write one with 'nsightkit peaks --measure --format json'"
        ) from error
    return found


def _size(precision: str) -> int:
    try:
        return BYTES_OF[precision]
    except KeyError:
        raise UsageError(f"no precision is called {precision!r}; there are {', '.join(BYTES_OF)}") from None


def gemm(m: int, n: int, k: int, precision: str = "bf16", name: str = "GEMM") -> Operation:
    """Product of an m x k and a k x n matrix.

    Parameters
    ----------
    m, n, k : int
    precision : str
    name : str

    Returns
    -------
    Operation
    """
    return Operation(name, 2 * m * n * k, _size(precision) * (m * k + k * n + m * n), precision)


def attention(
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
    """Scaled dot-product attention that never writes its scores.

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
    moved = _size(precision) * batch * d_head * (2 * heads * context + 2 * groups * keys)
    return Operation(name, 4 * batch * heads * d_head * scores, moved, precision)


def _elementwise(name: str, elements: int, flops: int, tensors: int, precision: str) -> Operation:
    # Such kernels compute in fp32 on the ordinary cores, whatever their tensors hold.
    return Operation(name, flops * elements, tensors * _size(precision) * elements, "fp32")


def rms_norm(rows: int, width: int, precision: str = "bf16", name: str = "RMSNorm") -> Operation:
    """RMSNorm: square, sum, and two products an element.

    Parameters
    ----------
    rows, width : int
    precision : str
    name : str

    Returns
    -------
    Operation
    """
    return _elementwise(name, rows * width, 4, 2, precision)


def layer_norm(rows: int, width: int, precision: str = "bf16", name: str = "layer norm") -> Operation:
    """Layer norm: mean, variance, scale and shift.

    Parameters
    ----------
    rows, width : int
    precision : str
    name : str

    Returns
    -------
    Operation
    """
    return _elementwise(name, rows * width, 8, 2, precision)


def rotary(rows: int, width: int, precision: str = "bf16", name: str = "rotary") -> Operation:
    """Rotary embedding: two products and a sum an element.

    Parameters
    ----------
    rows : int
    width : int
        Of everything that is turned: queries and keys together.
    precision : str
    name : str

    Returns
    -------
    Operation
    """
    return _elementwise(name, rows * width, 3, 2, precision)


def softmax(rows: int, width: int, precision: str = "bf16", name: str = "softmax") -> Operation:
    """Softmax over rows: maximum, difference, exponential, sum, quotient.

    Parameters
    ----------
    rows, width : int
    precision : str
    name : str

    Returns
    -------
    Operation
    """
    return _elementwise(name, rows * width, 5, 2, precision)


def swiglu(rows: int, width: int, precision: str = "bf16", name: str = "SwiGLU") -> Operation:
    """``silu(gate) * up``: two tensors read, one written.

    Parameters
    ----------
    rows, width : int
    precision : str
    name : str

    Returns
    -------
    Operation
    """
    return _elementwise(name, rows * width, 5, 3, precision)


def gelu(rows: int, width: int, precision: str = "bf16", name: str = "GELU") -> Operation:
    """Bias and GELU in its tanh form.

    Parameters
    ----------
    rows, width : int
    precision : str
    name : str

    Returns
    -------
    Operation
    """
    return _elementwise(name, rows * width, 8, 2, precision)


def residual(rows: int, width: int, precision: str = "bf16", name: str = "residual") -> Operation:
    """Sum of two tensors.

    Parameters
    ----------
    rows, width : int
    precision : str
    name : str

    Returns
    -------
    Operation
    """
    return _elementwise(name, rows * width, 1, 3, precision)


def embedding(rows: int, width: int, precision: str = "bf16", name: str = "embedding") -> Operation:
    """Look up a row of the table for each token: no FLOPs.

    Parameters
    ----------
    rows, width : int
    precision : str
    name : str

    Returns
    -------
    Operation
    """
    return _elementwise(name, rows * width, 0, 2, precision)


def cross_entropy(rows: int, vocabulary: int, precision: str = "fp32", name: str = "cross-entropy") -> Operation:
    """Loss of logits that are read once and never written again.

    Parameters
    ----------
    rows, vocabulary : int
    precision : str
    name : str

    Returns
    -------
    Operation
    """
    return _elementwise(name, rows * vocabulary, 5, 1, precision)


def adamw(parameters: int, name: str = "AdamW") -> Operation:
    """Reads weight, gradient and both moments, writes all but the gradient: 7 x 4 bytes a parameter.

    Parameters
    ----------
    parameters : int
    name : str

    Returns
    -------
    Operation
    """
    return _elementwise(name, parameters, 12, 7, "fp32")


def layer(
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
    """List the operations of a transformer layer's forward pass, unfused but for QKV and gate and up.

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
        rms_norm(rows, hidden, precision, "RMSNorm 1"),
        gemm(rows, hidden + 2 * kv_width, hidden, precision, "QKV"),
        rotary(rows, hidden + kv_width, precision, "rotary q, k"),
        attention(batch, heads, context, d_head, precision, causal=causal, keys=keys, kv_heads=kv_heads),
        gemm(rows, hidden, hidden, precision, "output projection"),
        residual(rows, hidden, precision, "residual 1"),
        rms_norm(rows, hidden, precision, "RMSNorm 2"),
        gemm(rows, 2 * d_ff, hidden, precision, "gate and up"),
        swiglu(rows, d_ff, precision),
        gemm(rows, hidden, d_ff, precision, "down"),
        residual(rows, hidden, precision, "residual 2"),
    ]


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
    rows = [
        {
            "name": operation.name,
            "flops": operation.flops,
            "bytes": operation.bytes,
            "intensity": operation.intensity,
            "bound": "compute" if rates.compute_ns(operation) > rates.memory_ns(operation) else "memory",
            "bound_ns": rates.bound_ns(operation),
            "source": rates.source,
        }
        for operation in operations
    ]
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
        without ceilings), ``impossible``, ``note``. `impossible` is true where the time is shorter than the arithmetic
        takes at the datasheet's rate, or than the traffic takes and it does not fit the level-2 cache: then the time,
        the shape or the clock is wrong.
    """
    table = bounds(operations, sheet)
    times = np.asarray(time_ns, dtype=float)
    if len(times) != len(table):
        raise UsageError(f"{len(table)} operations and {len(times)} times do not belong together")
    if (times <= 0).any():
        raise UsageError("a measured time must be positive")
    compute = np.array([sheet.compute_ns(operation) for operation in operations])
    memory = np.array([sheet.memory_ns(operation) for operation in operations])
    cached = table["bytes"].to_numpy() <= sheet.l2_bytes
    table["time_ns"] = times
    table["sol_datasheet"] = table.pop("bound_ns") / times
    limits = zip(operations, table["bound"], strict=True)
    table["sol_measured"] = np.array([_ceiling_ns(operation, bound, measured) for operation, bound in limits]) / times
    too_quick = compute > times
    beats_memory = (memory > times) & ~too_quick
    table["impossible"] = too_quick | (beats_memory & ~cached)
    notes = np.full(len(table), "", dtype=object)
    notes[beats_memory & cached] = "its tensors fit the L2 cache: quicker than the memory, as they may be"
    notes[beats_memory & ~cached] = "above the memory's bandwidth, and too large for the L2 cache: is every byte read?"
    notes[too_quick] = [
        f"would be {rate:,.0f} TFLOP/s, {rate / sheet.tflops[operation.unit]:.1f} times the peak"
        for operation, rate, wrong in zip(operations, table["flops"] / times / 1e3, too_quick, strict=True)
        if wrong
    ]
    table["note"] = notes
    order = ["name", "flops", "bytes", "intensity", "bound", "time_ns", "sol_datasheet", "sol_measured"]
    return table[[*order, "impossible", "note"]]


def _ceiling_ns(operation: Operation, bound: str, measured: Rates | None) -> float:
    """Give the least time by measured ceilings; NaN where the one that counts was not measured."""
    if measured is None:
        return float("nan")
    if operation.unit in measured.tflops or not operation.flops:
        return measured.bound_ns(operation)
    return measured.memory_ns(operation) if bound == "memory" else float("nan")


def summary(
    trace: Trace, gpu: str | None = None, measured: Rates | None = None, *, machine: Rates | None = None
) -> pd.DataFrame:
    """Judge the operators of a trace whose shapes were recorded, by the kernels they launched.

    Each kernel counts for the innermost operator with a known cost that its launch lies in. GEMMs in fp32 are held
    against the tensor cores' TF32 rate where their kernel's name says that they used it.

    Parameters
    ----------
    trace : Trace
        With operators, their inputs (``record_shapes=True``) and kernels.
    gpu : str, optional
        Name of the card; what the trace says when omitted.
    measured : Rates, optional
        Ceilings measured on that very card.
    machine : Rates, optional
        What to hold times against in place of a card's datasheet. With it a trace without kernels is judged by the own
        times of its operators on the CPU, which these rates must be of then.

    Returns
    -------
    DataFrame
        One row an operator with its shapes: ``name, flops, bytes, intensity, bound, time_ns, sol_datasheet,
        sol_measured, impossible`` as from :func:`judge`, summed over its calls, and ``count`` and ``note``. The longest
        first. Empty where no shapes or no kernels were recorded.

    Raises
    ------
    UsageError
        No such card is listed, or the trace names none and `gpu` does neither; or the card has no such unit.
    """
    on_cpu = machine is not None and not trace.recorded("kernels")
    if not trace.size("ops") or not (on_cpu or trace.size("kernels")):
        # Times on a CPU say nothing of a GPU's speed of light.
        return judge([], [], Rates("datasheet", {}, 1.0)).assign(count=np.zeros(0, np.int64))
    sheet = machine or datasheet(hardware.find(gpu or _gpu_of(trace)))
    known = _Known(trace.whole)
    op, lasting, single = _own_times(trace, known.mask) if on_cpu else _kernel_times(trace, known)
    mine = op >= 0
    rows = []
    for number in np.unique(known.kind[op[mine]]).tolist():
        of_kind = mine & (known.kind[np.maximum(op, 0)] == number)
        found = known.cost(number, sheet, tf32=bool(single[of_kind].any()))
        count = len(np.unique(op[of_kind]))
        total = dataclasses.replace(found, flops=found.flops * count, bytes=found.bytes * count)
        rows.append((total, found, count, int(lasting[of_kind].sum())))
    rows = [row for row in rows if row[3] > 0]
    table = judge([total for total, *_ in rows], [time for *_, time in rows], sheet, measured)
    # What fits the cache is a matter of one call.
    alone = judge([one for _, one, *_ in rows], [time / count for _, _, count, time in rows], sheet, measured)
    table["impossible"] = alone["impossible"]
    table["count"], table["note"] = np.array([count for _, _, count, _ in rows], np.int64), alone["note"]
    table = table[[column for column in table.columns if column != "note"] + ["note"]]
    return table.sort_values("time_ns", ascending=False, kind="stable", ignore_index=True).astype({"time_ns": np.int64})


def _own_times(trace: Trace, known: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Give each known operator, its own time, and that it is not in TF32."""
    lasting = operators.own(trace.whole)["duration_ns"].to_numpy()
    chosen = trace.mask("ops")
    mine = known if chosen is None else known & chosen
    return np.where(mine, np.arange(len(known)), -1), lasting, np.zeros(len(known), bool)


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
    code = np.zeros(trace.size("kernels"), np.int8)
    if trace.size("ops") and len(code):
        try:
            sheets = [datasheet(hardware.find(gpu or _gpu_of(trace)))]
        except UsageError:
            if gpu is not None:
                raise
            sheets = [datasheet(each) for each in hardware.GPUS]
        known = _Known(trace.whole)
        op, _, single = _kernel_times(trace, known)
        mine = op >= 0
        for number in np.unique(known.kind[op[mine]]).tolist():
            of_kind = mine & (known.kind[np.maximum(op, 0)] == number)
            tf32 = bool(single[of_kind].any())
            found = {str(bounds([known.cost(number, sheet, tf32=tf32)], sheet)["bound"].iloc[0]) for sheet in sheets}
            if len(found) == 1:
                code[of_kind] = _BOUNDS.index(found.pop())
    return pd.Categorical.from_codes(code, pd.Index(_BOUNDS))


_BOUNDS = ("", "compute", "memory")


class _Known:
    """The operators of a trace whose costs their shapes tell."""

    def __init__(self, whole: Trace) -> None:
        from nsightkit.analysis.op_costs import cost

        self.ops = whole.table("ops", ["start_ns", "end_ns", "thread", "name", "inputs"])
        names, inputs = self.ops["name"].cat, self.ops["inputs"].cat
        pairs = np.stack([names.codes.to_numpy(np.int64), inputs.codes.to_numpy(np.int64)])
        kinds, kind = np.unique(pairs, axis=1, return_inverse=True)
        #: of each operator; operators of one name and shape are one kind
        self.kind = kind.reshape(-1)
        self._costs = [cost(str(names.categories[name]), str(inputs.categories[given])) for name, given in kinds.T]
        self.mask = np.array([found is not None for found in self._costs], bool)[self.kind]

    def cost(self, number: int, sheet: Rates, *, tf32: bool) -> Operation:
        """What one call of a kind must do, on the unit of that card which does it."""
        found = self._costs[number]
        assert found is not None
        if found.unit == "fp32" and found.name.startswith(_GEMMS) and tf32:
            found = dataclasses.replace(found, unit="tf32")
        if found.unit not in sheet.tflops:  # a card without such tensor cores computes on its ordinary ones
            found = dataclasses.replace(found, unit="fp32")
        return found


def _kernel_times(trace: Trace, known: _Known) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Give of each kernel the operator it counts for (-1 for none), its time, and whether it computes in TF32."""
    kernels = trace.table("kernels", ["process", "correlation", "duration_ns", "name"])
    call = launch_of(trace, kernels["process"], kernels["correlation"])
    op = np.full(len(call), -1, np.int64)
    launched = call >= 0
    if launched.any() and known.mask.any():
        op[launched] = _operator_of_call(trace.whole, known.ops, known.mask)[call[launched]]
    return op, kernels["duration_ns"].to_numpy(), _single_precision(kernels["name"])


_GEMMS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm")


def _single_precision(names: pd.Series) -> np.ndarray:
    """Whether kernels multiply fp32 matrices on tensor cores, in TF32."""
    by_name = np.array([bool(_TF32.search(str(name))) for name in names.cat.categories] or [False])
    return np.asarray(by_name[names.cat.codes.to_numpy()])


def _gpu_of(trace: Trace) -> str:
    named = next((gpu.name for gpu in trace.meta.gpus if gpu.name), None)
    if named is None:
        raise UsageError(f"{trace.path or 'the trace'} does not name its GPU; name it with --gpu")
    return named


def _operator_of_call(whole: Trace, ops: pd.DataFrame, known: np.ndarray) -> np.ndarray:
    """Row of the innermost known operator around each call, -1 without one."""
    calls = whole.table("calls", ["start_ns", "end_ns", "thread"])
    both = pd.concat([ops[["start_ns", "end_ns", "thread"]], calls], ignore_index=True)
    # Old versions round to microseconds: a call may seem to outlive its operator.
    rounded = not (both["start_ns"].to_numpy() % 1000).any()
    _, above = nesting(both["thread"], both["start_ns"], both["end_ns"], tolerance=1000 if rounded else 0)
    counts = np.concatenate([known, np.zeros(len(calls), bool)])
    at = above[len(ops) :]
    while True:  # as often as operators nest
        climb = (at >= 0) & ~counts[np.maximum(at, 0)]
        if not climb.any():
            return np.asarray(at)
        at = np.where(climb, above[np.maximum(at, 0)], at)
