"""The collectives of one rank, and how much of their time nothing else hides.

Waiting for late ranks needs the traces of several ranks: :mod:`nsightkit.analysis.ranks.job`.
"""

from __future__ import annotations

import re

import msgspec
import numpy as np
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.core.categories import CPU_COLLECTIVE, categorize
from nsightkit.analysis.timeline.ranges import COLLECTIVE_RANGE
from nsightkit.text import Json, matching, read_toml
from nsightkit.trace.model import Trace, memoised

#: Kinds of collectives by parts of their names, and bytes of an element by its type.
_NAMES = read_toml(__file__, "collectives")
#: Operators that only wait for a collective or for a stream, or only describe a collective.
_WAITS = re.compile(r"^(c10d?::|_?c10d_functional::)?(barrier|wait(_tensor)?)$|^record_param_comms$|[Ss]ynchronize$")

#: A larger count in a description is taken for damage; up to here, bytes and their sums fit 64 bits.
_LARGEST_COUNT = 70_000_000_000_000_000
_TEXT_COLUMNS = ("where", "kind", "group", "ranks")
_NUMBER_COLUMNS = ("device", "start_ns", "end_ns", "group_size", "sequence", "bytes")
_WORK_COLUMNS = ["device", "start_ns", "end_ns", "name"]
_EVENT_COLUMNS = ["start_ns", "end_ns", "thread", "name"]


def kind_of(name: str) -> str:
    """Tell the kind of a collective from the name of its kernel, its annotation or its operator.

    Parameters
    ----------
    name : str

    Returns
    -------
    str
        ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast``, ``reduce``, ``gather``,
        ``scatter``, ``barrier``, ``send/recv`` or ``other``.

    Examples
    --------
    >>> kind_of("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    'all_reduce'
    >>> kind_of("nccl:_all_gather_base"), kind_of("_C::shm_allreduce"), kind_of("ncclGroupEnd")
    ('all_gather', 'all_reduce', 'other')
    """
    without_arguments = re.split(r"[<(]", name, maxsplit=1)[0]
    letters = re.sub(r"[^a-z]", "", without_arguments.lower())
    for part, kind in _NAMES["kind_by_part"].items():
        if part in letters:
            return str(kind)
    return "other"


@memoised
def collectives(trace: Trace) -> pd.DataFrame:
    """List the collectives of a rank.

    A GPU collective is its kernel: NCCL's, RCCL's, NVSHMEM's, DeepEP's, or a custom all-reduce on any stream. From its
    start it waits for the kernels of the other ranks. PyTorch's description of it (``record_param_comms``) gives kind
    and size. Otherwise the annotation around the launch (``nccl:all_reduce``, NCCL's own ranges) gives the kind, then
    the kernel's name. A CPU collective is PyTorch's annotation of it (``gloo:all_reduce``), or the operator
    (``_C::shm_allreduce`` of vLLM).

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    DataFrame
        One row per collective, by start: ``where`` (GPU or CPU), ``device`` (-1: CPU), ``start_ns, end_ns, kind``,
        ``group`` (process group, "" unknown), ``ranks`` (of the group, as text), ``group_size, sequence`` (its number
        in the group; -1 unknown), ``bytes`` (whole message, as in nccl-tests; -1 unknown), ``exposed_ns`` (its part
        without computation beside it; NA unknown).
    """
    table = pd.concat([_gpu_collectives(trace), _cpu_collectives(trace)])
    types = dict.fromkeys(_TEXT_COLUMNS, "object") | dict.fromkeys(_NUMBER_COLUMNS, "int64")
    table = table[list(types)].astype(types).sort_values(["start_ns", "end_ns"], kind="stable", ignore_index=True)
    length_ns = table["end_ns"] - table["start_ns"]
    exposed_ns = pd.Series(pd.NA, table.index, "Int64")
    for device, computing in compute_intervals(trace).items():
        hidden_ns = computing.of(table["start_ns"], table["end_ns"])
        exposed_ns = exposed_ns.mask(table["device"] == device, length_ns - hidden_ns)
    return table.assign(exposed_ns=exposed_ns)


def totals(trace: Trace) -> dict[str, int | None]:
    """Measure a rank's communication over the whole trace, each moment once.

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    dict
        ``compute_ns`` (:func:`compute_intervals`), ``communication_ns`` (union of the collectives), ``overlapped_ns``
        (both at once) and ``exposed_ns`` (communication without computation beside it); sums over devices, None if
        unknown. HolisticTraceAnalysis calls ``overlapped_ns / communication_ns`` the overlap.
    """
    devices = compute_intervals(trace)
    if not devices:
        return dict.fromkeys(("compute_ns", "communication_ns", "overlapped_ns", "exposed_ns"))
    table = collectives(trace)
    by_device = []
    for device, computing in devices.items():
        rows = table[table["device"] == device]
        communicating = intervals.Coverage(rows["start_ns"], rows["end_ns"])
        overlapped_ns = computing.of(communicating.start, communicating.end).sum()
        by_device.append((computing.length, communicating.length, overlapped_ns))
    compute_ns, communication_ns, overlapped_ns = np.sum(by_device, axis=0).tolist()
    return {
        "compute_ns": compute_ns,
        "communication_ns": communication_ns,
        "overlapped_ns": overlapped_ns,
        "exposed_ns": communication_ns - overlapped_ns,
    }


@memoised
def compute_intervals(trace: Trace) -> dict[int, intervals.Coverage]:
    """Find when a rank computes.

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    dict of int to Coverage
        By device, the union of graph replays and of kernels that do not communicate; copies do not count.
        Without GPU work, device -1: the operators that neither communicate nor wait. Empty if neither was recorded.
    """
    kernels = trace.table("kernels", _WORK_COLUMNS)
    kernels["computes"] = categorize(kernels["name"]) != "communication"
    work = pd.concat([kernels, trace.table("graphs", _WORK_COLUMNS[:3]).assign(computes=True)])
    by_device = {}
    for device, rows in work.groupby("device"):
        computing = rows[rows["computes"]]
        # A device's number is an int, but typed as any hashable key.
        by_device[int(str(device))] = intervals.Coverage(computing["start_ns"], computing["end_ns"])
    if not by_device and trace.size("ops"):
        by_device[-1] = _computing_on_cpu(trace)
    return by_device


def _computing_on_cpu(trace: Trace) -> intervals.Coverage:
    """When operators ran that neither communicate nor wait, each moment once."""
    ops = trace.table("ops", _EVENT_COLUMNS)
    # Gloo's own threads run operators too, as part of the collective.
    is_communicating_thread = ops["thread"].isin(_collective_events(trace, "ranges")["thread"]).to_numpy()
    ops = ops[~is_communicating_thread & ~matching(ops["name"], _WAITS)]
    computing = intervals.merge(ops["start_ns"], ops["end_ns"])
    # vLLM's collective is an operator inside others, on the thread that computes.
    collective_ops = _collective_events(trace, "ops")
    communicating = (collective_ops["start_ns"], collective_ops["end_ns"])
    return intervals.Coverage(*intervals.common(computing, communicating, outside=True))


# ---------------------------------------------------------------- where they run


def _gpu_collectives(trace: Trace) -> pd.DataFrame:
    """One row per kernel that communicates, with what its description, annotation and name tell."""
    columns = ["start_ns", "end_ns", "device", "process", "correlation", "name", "collective", "sequence"]
    kernels = trace.table("kernels", columns)
    kernels = kernels[categorize(kernels["name"]) == "communication"].reset_index(drop=True)
    described = _described_columns(kernels["collective"])
    # Where the description names no kind, the annotation around the launch does, else the kernel's name.
    for kind in (_annotated_kinds(trace, kernels), kernels["name"].astype(object).map(kind_of)):
        described["kind"] = described["kind"].where(described["kind"] != "other", kind)
    return kernels[["device", "start_ns", "end_ns", "sequence"]].join(described).assign(where="GPU")


def _annotated_kinds(trace: Trace, kernels: pd.DataFrame) -> pd.Series:
    """Kind of collective by the annotation around the call that launched each kernel; "other" without any."""
    call = intervals.launch_of(trace, kernels["process"], kernels["correlation"])
    is_launch_recorded = call >= 0
    calls = trace.whole.table("calls", ["start_ns", "end_ns", "thread"]).iloc[call[is_launch_recorded]]
    ranges = trace.whole.table("ranges", _EVENT_COLUMNS)
    ranges = ranges[matching(ranges["name"], COLLECTIVE_RANGE)].reset_index(drop=True)
    kind_of_range = ranges["name"].astype(object).map(kind_of).to_numpy(object)
    enclosing_range = intervals.enclosing(calls, ranges, kind_of_range != "other")
    annotated = pd.Series("other", kernels.index, dtype="object")
    # A call without a range around it has -1, which takes the appended "other".
    annotated[is_launch_recorded] = np.append(kind_of_range, "other")[enclosing_range]
    return annotated


def _described_columns(texts: pd.Series) -> pd.DataFrame:
    """Columns from PyTorch's description of each collective, a categorical with "" for a missing one."""
    rows = []
    # Many collectives share one description, so each is parsed once.
    for text in texts.cat.categories:
        description = _parsed_description(text)
        rows.append(
            {
                "kind": kind_of(str(description.get("Collective name", ""))),
                "group": str(description.get("Process Group Name", "")),
                "ranks": str(description.get("Process Group Ranks", "")),
                "group_size": _described_count(description, "Group size"),
                "bytes": _message_bytes(description),
            }
        )
    # Named for a trace without kernels, which has no rows.
    distinct = pd.DataFrame(rows, columns=["kind", "group", "ranks", "group_size", "bytes"])
    return distinct.iloc[texts.cat.codes].reset_index(drop=True)


def _parsed_description(text: str) -> Json:
    """Decode a description, a JSON object; files are untrusted, so any other text describes nothing."""
    try:
        return msgspec.json.decode(text, type=Json)
    except (msgspec.MsgspecError, RecursionError):
        return {}


def _message_bytes(description: Json) -> int:
    """Bytes of the whole message, -1 if unknown: the output of a gather, the input of a scatter, so the larger one."""
    elements = max(_described_count(description, "In msg nelems"), _described_count(description, "Out msg nelems"))
    element_bytes = int(_NAMES["bytes_of_type"].get(str(description.get("dtype", "")).lower(), -1))
    if min(elements, element_bytes) >= 0:
        return elements * element_bytes
    return -1


def _described_count(description: Json, name: str) -> int:
    """A count from a collective's description; -1 if it is missing, no number, negative or too large."""
    value = description.get(name)
    if isinstance(value, int) and 0 <= value <= _LARGEST_COUNT:
        return value
    return -1


def _cpu_collectives(trace: Trace) -> pd.DataFrame:
    """One row per collective that ran on the CPU, of which only kind and times are known."""
    events = pd.concat([_collective_events(trace, "ranges"), _collective_events(trace, "ops")])
    unknown = dict.fromkeys(("device", "group_size", "sequence", "bytes"), -1)
    return events.assign(where="CPU", group="", ranks="", kind=events["name"].astype(object).map(kind_of), **unknown)


def _collective_events(trace: Trace, table: str) -> pd.DataFrame:
    """CPU collectives among the events of a table, ``ranges`` or ``ops``."""
    events = trace.table(table, _EVENT_COLUMNS)
    return events[matching(events["name"], CPU_COLLECTIVE)]
