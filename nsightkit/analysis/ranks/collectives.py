"""What a rank's communication costs it: each collective, and how much of it nothing else hides.

One trace, one rank. What only several ranks together can tell (who came last, how long the others waited for it) is
:mod:`nsightkit.analysis.ranks.job`.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.core.categories import categorize
from nsightkit.analysis.core.kept import kept
from nsightkit.analysis.core.names import matching
from nsightkit.analysis.timeline.ranges import COLLECTIVE_RANGE
from nsightkit.trace.model import Trace

__all__ = ["KINDS", "collectives", "compute_intervals", "kind_of", "spent", "totals", "wire_factor"]

#: Kinds of collectives.
KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "send/recv",
    "other",
)
#: Kind by a part of a name without underscores and capitals; the first part that occurs decides.
_KIND_BY_PART = {
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "sendrecv": "send/recv",
    "send": "send/recv",
    "recv": "send/recv",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
}
#: Beyond all times.
_EVER = 1 << 62
#: Libraries whose collectives run on the CPU, in the annotation that PyTorch makes of each.
_ON_CPU = re.compile(r"^(gloo|mpi|ucc):")
#: Operators that only wait for a collective, or for a stream's work.
_WAITING = re.compile(r"^(c10d?::|_?c10d_functional::)?(barrier|wait(_tensor)?)$|^record_param_comms$|[Ss]ynchronize$")

_DTYPE_BYTES = {
    "byte": 1, "char": 1, "bool": 1, "uint8": 1, "int8": 1, "half": 2, "bfloat16": 2, "short": 2, "float16": 2,
    "float": 4, "int": 4, "float32": 4, "int32": 4, "double": 8, "long": 8, "float64": 8, "int64": 8,
    "complexhalf": 4, "complexfloat": 8, "complexdouble": 16,
}  # fmt: skip
_TYPE_OF_COLUMN = {
    "where": "object",
    "device": "int64",
    "stream": "int64",
    "start_ns": "int64",
    "end_ns": "int64",
    "launch_ns": "int64",
    "kind": "object",
    "group": "object",
    "ranks": "object",
    "group_size": "int64",
    "sequence": "int64",
    "bytes": "int64",
}
_DESCRIBED = ("kind", "group", "ranks", "group_size", "bytes")
_SPENT = ("compute_ns", "communication_ns", "overlapped_ns", "exposed_ns")


def kind_of(name: str) -> str:
    """Tell the kind of a collective from what someone calls it.

    Parameters
    ----------
    name : str
        Of a kernel, an annotation, or as PyTorch's description has it.

    Returns
    -------
    str
        One of :data:`KINDS`.

    Examples
    --------
    >>> kind_of("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    'all_reduce'
    >>> kind_of("nccl:_all_gather_base"), kind_of("_reduce_scatter_base"), kind_of("ncclGroupEnd")
    ('all_gather', 'reduce_scatter', 'other')
    """
    without_arguments = re.split(r"[<(]", name, maxsplit=1)[0]
    letters = re.sub(r"[^a-z]", "", without_arguments.lower())
    for part, kind in _KIND_BY_PART.items():
        if part in letters:
            return kind
    return "other"


def wire_factor(kind: str, ranks: int) -> float | None:
    """Give what the bandwidth of the message is multiplied by to make bus bandwidth.

    Bus bandwidth is what the slowest link carried, comparable between kinds and sizes of groups (nccl-tests,
    doc/PERFORMANCE.md).

    Parameters
    ----------
    kind : str
        One of :data:`KINDS`.
    ranks : int
        In the group.

    Returns
    -------
    float or None
        None where none is defined.
    """
    if ranks < 1:
        return None
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    if kind in ("broadcast", "reduce"):
        return 1.0
    return None


@kept
def collectives(trace: Trace) -> pd.DataFrame:
    """List the collectives that a rank took part in.

    On a GPU a collective is its kernel, from the moment it started, and so began to wait for the kernels of the other
    ranks. Its kind and size are what PyTorch says of it (``record_param_comms``). Where it says nothing, the annotation
    around the launch (``nccl:all_reduce``, NCCL's own ranges) gives the kind, or else the kernel's name. A collective
    that runs on the CPU (Gloo, MPI) is the annotation that PyTorch puts around it.

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    DataFrame
        One row per collective, by start: ``where`` (GPU or CPU), ``device``, ``stream`` (of the CPU: -1),
        ``start_ns, end_ns``, ``launch_ns`` (when its launch began; its start where that is not known), ``kind`` (of
        :data:`KINDS`), ``group`` (process group, "" where the trace names none), ``ranks`` (of the group, as text, ""
        unknown), ``group_size, sequence`` (number in its group; both -1 unknown), ``bytes`` (of the whole message, as
        nccl-tests counts them; -1 unknown), ``exposed_ns`` (the part of it in which nothing was computed:
        :func:`compute_intervals`; NA where the trace does not tell).
    """
    table = pd.concat([_on_gpu(trace), _on_cpu(trace)])
    table = table[list(_TYPE_OF_COLUMN)].astype(_TYPE_OF_COLUMN)
    table = table.sort_values(["start_ns", "end_ns"], kind="stable", ignore_index=True)
    length = table["end_ns"] - table["start_ns"]
    exposed = pd.Series(pd.NA, table.index, "Int64")
    for device, computing in compute_intervals(trace).items():
        hidden = computing.of(table["start_ns"], table["end_ns"])
        exposed = exposed.mask(table["device"] == device, length - hidden)
    return table.assign(exposed_ns=exposed)


def totals(trace: Trace) -> dict[str, int | None]:
    """Measure a rank's communication as a whole, each moment once.

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    dict
        ``compute_ns`` (:func:`compute_intervals`), ``communication_ns`` (the union of the collectives),
        ``overlapped_ns`` (in which both went on; HolisticTraceAnalysis divides this by the former) and ``exposed_ns``
        (the rest), sums over devices. None where the trace does not tell.
    """
    whole = spent(trace, [-_EVER], [_EVER], collectives(trace)).iloc[0]
    result: dict[str, int | None] = {}
    for column, value_ns in whole.items():
        result[str(column)] = None if pd.isna(value_ns) else int(value_ns)
    return result


def spent(trace: Trace, start: npt.ArrayLike, end: npt.ArrayLike, table: pd.DataFrame) -> pd.DataFrame:
    """Measure a rank's communication in some windows, each moment once.

    Parameters
    ----------
    trace : Trace
    start, end : array_like of int
        The windows.
    table : DataFrame
        Its :func:`collectives`, or some of them.

    Returns
    -------
    DataFrame
        A row per window, with the columns of :func:`totals`.
    """
    devices = compute_intervals(trace)
    result = pd.DataFrame(index=range(np.size(start)), columns=list(_SPENT), dtype="Int64")
    if not devices:
        return result
    result[:] = 0
    for device, computing in devices.items():
        own = table[table["device"] == device]
        talking = intervals.Coverage(own["start_ns"], own["end_ns"])
        both = (talking.start, talking.end), (computing.start, computing.end)
        alone = intervals.Coverage(*intervals.common(*both, outside=True))
        result["compute_ns"] += computing.of(start, end)
        result["communication_ns"] += talking.of(start, end)
        result["exposed_ns"] += alone.of(start, end)
    result["overlapped_ns"] = result["communication_ns"] - result["exposed_ns"]
    return result


@kept
def compute_intervals(trace: Trace) -> dict[int, intervals.Coverage]:
    """Find when a rank computes.

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    dict of int to Coverage
        By device: the union of its kernels that do not communicate, and graph replays. Copies do not count as
        computation. For a trace without GPU work device -1, the CPU: the union of the framework's operators on threads
        that run no collective, without those that wait. Empty where neither was recorded.
    """
    kernels = trace.table("kernels", ["device", "start_ns", "end_ns", "name"])
    kernels = kernels.assign(computes=categorize(kernels["name"]) != "communication")
    graphs = trace.table("graphs", ["device", "start_ns", "end_ns"]).assign(computes=True)
    by_device = {}
    for device, work in pd.concat([kernels, graphs]).groupby("device"):
        computing = work[work["computes"].astype(bool)]
        by_device[int(str(device))] = intervals.Coverage(computing["start_ns"], computing["end_ns"])
    if by_device or not trace.size("ops"):
        return by_device
    ranges = trace.table("ranges", ["thread", "name"])
    talking = ranges["thread"][matching(ranges["name"], _ON_CPU)]
    ops = trace.table("ops", ["start_ns", "end_ns", "thread", "name"])
    ops = ops[~ops["thread"].isin(talking).to_numpy() & ~matching(ops["name"], _WAITING)]
    return {-1: intervals.Coverage(ops["start_ns"], ops["end_ns"])}


# ---------------------------------------------------------------- where they run


def _on_gpu(trace: Trace) -> pd.DataFrame:
    columns = ["start_ns", "end_ns", "device", "stream", "process", "correlation", "name", "collective", "sequence"]
    kernels = trace.table("kernels", columns)
    kernels = kernels[categorize(kernels["name"]) == "communication"].reset_index(drop=True)
    call = intervals.launch_of(trace, kernels["process"], kernels["correlation"])
    known = call >= 0
    calls = trace.whole.table("calls", ["start_ns", "end_ns", "thread"])
    calls = calls.iloc[call[known]].reset_index(drop=True)
    launched = kernels["start_ns"].to_numpy(copy=True)
    launched[known] = calls["start_ns"]
    kind = kernels["name"].astype(object).map(kind_of).to_numpy(object)
    annotated = np.full(len(kernels), "other", object)
    annotated[known] = _annotated_kinds(trace, calls)
    kind = np.where(annotated != "other", annotated, kind)
    described = _descriptions(kernels["collective"])
    described["kind"] = described["kind"].where(described["kind"] != "other", kind)
    timed = kernels[["device", "stream", "start_ns", "end_ns", "sequence"]]
    return timed.join(described).assign(where="GPU", launch_ns=launched)


def _annotated_kinds(trace: Trace, calls: pd.DataFrame) -> npt.NDArray[np.object_]:
    """Kind of collective by the annotation around each call."""
    ranges = trace.whole.table("ranges", ["start_ns", "end_ns", "thread", "name"])
    ranges = ranges[matching(ranges["name"], COLLECTIVE_RANGE)].reset_index(drop=True)
    kinds = ranges["name"].astype(object).map(kind_of).to_numpy(object)
    around = intervals.enclosing(calls, ranges, kinds != "other")
    return np.append(kinds, "other")[around]


def _descriptions(texts: pd.Series) -> pd.DataFrame:
    """PyTorch's description of each collective, in our words."""
    rows = [_described(str(text)) for text in texts.cat.categories]
    table = pd.DataFrame(rows, columns=list(_DESCRIBED))
    return table.iloc[texts.cat.codes].reset_index(drop=True)


def _described(text: str) -> dict[str, Any]:
    description = json.loads(text) if text else {}
    ranks = description.get("Process Group Ranks", "")
    if not isinstance(ranks, str):
        ranks = json.dumps(ranks)
    group_size = description.get("Group size", -1)
    if not isinstance(group_size, int):
        group_size = -1
    return {
        "kind": kind_of(str(description.get("Collective name", ""))),
        "group": str(description.get("Process Group Name", "")),
        "ranks": ranks,
        "group_size": group_size,
        "bytes": _message_bytes(description),
    }


def _message_bytes(description: dict[str, Any]) -> int:
    """Bytes of the whole message: the larger side, as one gathers n parts into it, and scatters it into n."""
    elements = -1
    for side in ("In msg nelems", "Out msg nelems"):
        count = description.get(side)
        if isinstance(count, int):
            elements = max(elements, count)
    dtype = str(description.get("dtype", "")).lower().removeprefix("torch.").removeprefix("c10::")
    width = 1 if dtype.startswith("float8") else _DTYPE_BYTES.get(dtype)
    if elements < 0 or width is None:
        return -1
    return elements * width


def _on_cpu(trace: Trace) -> pd.DataFrame:
    ranges = trace.table("ranges", ["start_ns", "end_ns", "name"])
    ranges = ranges[matching(ranges["name"], _ON_CPU)]
    kind = ranges["name"].astype(object).map(kind_of)
    table = ranges[["start_ns", "end_ns"]].assign(where="CPU", kind=kind, group="", ranks="")
    unknown = dict.fromkeys(("device", "stream", "group_size", "sequence", "bytes"), -1)
    return table.assign(launch_ns=table["start_ns"], **unknown)
