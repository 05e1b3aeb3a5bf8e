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

__all__ = ["KINDS", "collectives", "compute_intervals", "kind_of", "spent", "summary", "totals", "wire_factor"]

Int = npt.NDArray[np.int64]

#: Kinds of collectives, and the traffic that each needs for a byte of its message, by the number of ranks n. Bus
#: bandwidth is message over time times this: what the slowest link carried, comparable between kinds and sizes of
#: groups (nccl-tests, doc/PERFORMANCE.md). None: no such figure.
KINDS: dict[str, tuple[float, float] | None] = {
    # a, b of (a * n + b) / n
    "all_reduce": (2, -2),
    "all_gather": (1, -1),
    "reduce_scatter": (1, -1),
    "all_to_all": (1, -1),
    "broadcast": (1, 0),
    "reduce": (1, 0),
    "gather": None,
    "scatter": None,
    "barrier": None,
    "send/recv": None,
    "other": None,
}

#: First that is found in a name without its underscores and capitals.
_KIND = (
    ("reducescatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("barrier", "barrier"),
    ("sendrecv", "send/recv"),
    ("send", "send/recv"),
    ("recv", "send/recv"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("reduce", "reduce"),
)
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


def kind_of(name: str) -> str:
    """Tell the kind of a collective from what someone calls it.

    Parameters
    ----------
    name : str
        Of a kernel, an annotation, or as PyTorch's description has it.

    Returns
    -------
    str
        A key of :data:`KINDS`.

    Examples
    --------
    >>> kind_of("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    'all_reduce'
    >>> kind_of("nccl:_all_gather_base"), kind_of("_reduce_scatter_base"), kind_of("ncclGroupEnd")
    ('all_gather', 'reduce_scatter', 'other')
    """
    bare = re.sub(r"[^a-z]", "", re.split(r"[<(]", name, maxsplit=1)[0].lower())
    return next((kind for part, kind in _KIND if part in bare), "other")


def wire_factor(kind: str, ranks: int) -> float | None:
    """Give what the bandwidth of the message is multiplied by to make bus bandwidth.

    Parameters
    ----------
    kind : str
        A key of :data:`KINDS`.
    ranks : int
        In the group.

    Returns
    -------
    float or None
        None where none is defined.
    """
    factors = KINDS[kind]
    return None if factors is None or ranks < 1 else (factors[0] * ranks + factors[1]) / ranks


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
        One row each, by start: ``where`` (GPU or CPU), ``device``, ``stream`` (of the CPU: -1), ``start_ns, end_ns``,
        ``launch_ns`` (when its launch began; its start where that is not known), ``kind`` (of :data:`KINDS`),
        ``group`` (process group, "" where the trace names none), ``ranks`` (of the group, as text, "" unknown),
        ``group_size, sequence`` (number in its group; both -1 unknown), ``bytes`` (of the whole message, as nccl-tests
        counts them; -1 unknown), ``exposed_ns`` (the part of it in which nothing was computed:
        :func:`compute_intervals`; NA where the trace does not tell).
    """
    dtypes = {column: "object" if column in _TEXTS else "int64" for column in _COLUMNS}
    parts = [part for part in (_on_gpu(trace), _on_cpu(trace)) if part is not None and len(part)]
    found = pd.concat(parts) if parts else pd.DataFrame(columns=list(_COLUMNS))
    found = found[list(_COLUMNS)].astype(dtypes).sort_values(["start_ns", "end_ns"], kind="stable", ignore_index=True)
    start, end = (found[c].to_numpy() for c in ("start_ns", "end_ns"))
    exposed = pd.Series(pd.NA, found.index, "Int64")
    for device, busy in compute_intervals(trace).items():
        exposed = exposed.mask(found["device"] == device, end - start - busy.of(start, end))
    return found.assign(exposed_ns=exposed)


def summary(trace: Trace) -> pd.DataFrame:
    """Sum up a rank's collectives by process group and kind.

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    DataFrame
        ``group, kind, where, count, total_ns, exposed_ns, overlapped_ns, bytes``, by falling ``total_ns``. Sums over
        collectives: where several of them run at once, moments count several times (not so in :func:`totals`).
        ``bytes`` is NA where the size of one of them is not known.
    """
    found = collectives(trace)
    known = found["bytes"].astype("Int64").where(found["bytes"] >= 0)
    by = found.assign(total_ns=found["end_ns"] - found["start_ns"], bytes=known).groupby(
        ["group", "kind", "where"], sort=False, observed=True
    )
    out = by.agg(
        count=("total_ns", "size"),
        total_ns=("total_ns", "sum"),
        exposed_ns=("exposed_ns", lambda s: s.sum(min_count=len(s))),
        bytes=("bytes", lambda s: s.sum(min_count=len(s))),
    ).astype({"exposed_ns": "Int64", "bytes": "Int64"})
    out.insert(3, "overlapped_ns", out["total_ns"] - out["exposed_ns"])
    return out.reset_index().sort_values("total_ns", ascending=False, ignore_index=True)


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
    moments = spent(trace, [-_EVER], [_EVER]).iloc[0].items()
    return {str(column): None if pd.isna(ns) else int(ns) for column, ns in moments}


def spent(trace: Trace, start: npt.ArrayLike, end: npt.ArrayLike, found: pd.DataFrame | None = None) -> pd.DataFrame:
    """Measure a rank's communication in some windows, each moment once.

    Parameters
    ----------
    trace : Trace
    start, end : array_like of int
        The windows.
    found : DataFrame, optional
        Only these of its :func:`collectives`.

    Returns
    -------
    DataFrame
        A row a window, with the columns of :func:`totals`.
    """
    found = collectives(trace) if found is None else found
    columns, busy = ["compute_ns", "communication_ns", "overlapped_ns", "exposed_ns"], compute_intervals(trace)
    nothing: Any = 0 if busy else pd.NA
    out = pd.DataFrame(nothing, index=range(len(np.asarray(start))), columns=columns, dtype="Int64")
    for device, computed in busy.items():
        mine = found[found["device"] == device]
        talked = intervals.Coverage(mine["start_ns"], mine["end_ns"])
        alone = intervals.common((talked.start, talked.end), (computed.start, computed.end), outside=True)
        covers = {"compute_ns": computed, "communication_ns": talked, "exposed_ns": intervals.Coverage(*alone)}
        out = out.assign(**{column: out[column] + cover.of(start, end) for column, cover in covers.items()})
    return out.assign(overlapped_ns=out["communication_ns"] - out["exposed_ns"])


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
    found = {}
    for device, mine in pd.concat([kernels, graphs]).groupby("device"):
        computing = mine[mine["computes"].astype(bool)]
        found[int(str(device))] = intervals.Coverage(computing["start_ns"], computing["end_ns"])
    if not found and trace.size("ops"):
        ops = trace.table("ops", ["start_ns", "end_ns", "thread", "name"])
        ranges = trace.table("ranges", ["thread", "name"])
        talking = ranges["thread"][matching(ranges["name"], _ON_CPU)]
        ops = ops[~ops["thread"].isin(talking).to_numpy() & ~matching(ops["name"], _WAITING)]
        found[-1] = intervals.Coverage(ops["start_ns"], ops["end_ns"])
    return found


# ---------------------------------------------------------------- one after the other

_TEXTS = ("where", "kind", "group", "ranks")
_COLUMNS = (
    *("where", "device", "stream", "start_ns", "end_ns", "launch_ns", "kind", "group", "ranks", "group_size"),
    *("sequence", "bytes"),
)


def _on_gpu(trace: Trace) -> pd.DataFrame | None:
    rows = np.flatnonzero(categorize(trace.table("kernels", ["name"])["name"]) == "communication")
    if not len(rows):
        return None
    columns = ["start_ns", "end_ns", "device", "stream", "process", "correlation", "name", "collective", "sequence"]
    mine = trace.table("kernels", columns).iloc[rows].reset_index(drop=True)
    launch = intervals.launch_of(trace, mine["process"], mine["correlation"])
    known = launch >= 0
    calls = trace.whole.table("calls", ["start_ns", "end_ns", "thread"]).iloc[launch[known]]
    launched = mine["start_ns"].to_numpy(copy=True)
    launched[known] = calls["start_ns"].to_numpy()
    annotated = np.full(len(mine), "other", dtype=object)
    annotated[known] = _annotated(trace, calls.reset_index(drop=True))
    named = np.array([kind_of(str(n)) for n in mine["name"].cat.categories], dtype=object)[mine["name"].cat.codes]
    said = pd.DataFrame([_described(str(text)) for text in mine["collective"].cat.categories])
    said = said.iloc[mine["collective"].cat.codes].reset_index(drop=True)
    kind = said["kind"].where(said["kind"] != "other", np.where(annotated != "other", annotated, named))
    plain = mine[["device", "stream", "start_ns", "end_ns", "sequence"]].astype(np.int64)
    return said.assign(where="GPU", launch_ns=launched, kind=kind, **plain)


def _annotated(trace: Trace, calls: pd.DataFrame) -> npt.NDArray[np.object_]:
    """Kind of collective by the annotation around each call."""
    ranges = trace.whole.table("ranges", ["start_ns", "end_ns", "thread", "name"])
    ranges = ranges[matching(ranges["name"], COLLECTIVE_RANGE)].reset_index(drop=True)
    kinds = np.array([*(kind_of(str(n)) for n in ranges["name"].cat.categories), "other"], dtype=object)
    of_range = kinds[ranges["name"].cat.codes]
    return np.append(of_range, "other")[intervals.enclosing(calls, ranges, of_range != "other")]


def _described(text: str) -> dict[str, Any]:
    """What a description says, in our words."""
    said = json.loads(text) if text else {}
    sizes = [said.get(name) for name in ("In msg nelems", "Out msg nelems")]
    elements = [size for size in sizes if isinstance(size, int) and size >= 0]
    bare = str(said.get("dtype", "")).lower().removeprefix("torch.").removeprefix("c10::")
    width = 1 if bare.startswith("float8") else _DTYPE_BYTES.get(bare)
    ranks, size = said.get("Process Group Ranks", ""), said.get("Group size", -1)
    return {
        "kind": kind_of(str(said.get("Collective name", ""))),
        "group": str(said.get("Process Group Name", "")),
        "ranks": ranks if isinstance(ranks, str) else json.dumps(ranks),
        "group_size": size if isinstance(size, int) else -1,
        # The larger side is the whole message: one gathers n parts into it, and scatters it into n.
        "bytes": max(elements) * width if elements and width else -1,
    }


def _on_cpu(trace: Trace) -> pd.DataFrame:
    ranges = trace.table("ranges", ["start_ns", "end_ns", "name"])
    mine = ranges[matching(ranges["name"], _ON_CPU)]
    kind = mine["name"].astype(str).map(kind_of)
    unknown = dict.fromkeys(("device", "stream", "group_size", "sequence", "bytes"), -1)
    return mine[["start_ns", "end_ns"]].assign(
        where="CPU", kind=kind, group="", ranks="", launch_ns=mine["start_ns"], **unknown
    )
