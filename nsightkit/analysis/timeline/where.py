"""Which module, line, operator or range of the program the kernels' time belongs to.

A kernel belongs to the call that launched it, and the call to what was open on its thread. The backward pass runs on
autograd's thread, where nothing of the program is open: it belongs to the operator of the forward pass whose node it
runs, which autograd's sequence numbers name. Kernels of a CUDA graph belong to what launched them while the graph was
captured; the trace of a replay does not hold that, another trace of the same program may.

``trace.whole`` is the trace without its filters. A position or row of -1 means none.
What `memoised` functions return must not be changed.
"""

from __future__ import annotations

import re
import sys
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core.intervals import enclosing, launch_of
from nsightkit.analysis.timeline import steps
from nsightkit.analysis.timeline.gaps.threads import BEGIN_CAPTURE, END_CAPTURE
from nsightkit.analysis.timeline.ranges import innermost_ranges_around
from nsightkit.errors import UsageError
from nsightkit.text import OPERATOR_RANGE, matching
from nsightkit.trace.model import Trace, memoised, nesting

Int = npt.NDArray[np.int64]
Object = npt.NDArray[np.object_]
By = Literal["module", "line", "op", "range"]

COLUMNS = ["where", "phase", "count", "gpu_ns", "share", "top_kernels"]
#: Kinds of place, the finest first.
KINDS: tuple[By, ...] = ("module", "line", "op", "range")
#: How to record places.
REMEDY = (
    "no such places were recorded: use nsightkit capture torch --with-stack, or put NVTX ranges around parts of a step "
    "for nsightkit capture nsys"
)
#: The row of the kernels that belong to nothing that is known.
UNATTRIBUTED = "unattributed"

_MODULE = "nn.Module: "
_IS_MODULE = re.compile(f"^{_MODULE}")
_STDLIB_MODULES = "|".join(re.escape(name) for name in sorted(sys.stdlib_module_names))
#: Functions that are not the program's: modules' own rows, Python's, PyTorch's, Triton's, and what these generate.
_LIBRARY_FUNCTION = re.compile(
    rf"^<|^{_MODULE}|(^|[/\\])(torch|triton|torchinductor_[^/\\]*)[/\\]"
    rf"|(^|[/\\]python3[^/\\]*[/\\])({_STDLIB_MODULES})(\.py\(|[/\\])"
)
#: Operators that run nodes of the backward pass.
_NODE_RUNNER = re.compile(r"^(torch::)?autograd::|Backward\d*$")
#: An operator's name as `emit_nvtx` writes it, and its sequence number, of as many digits as fit 64 bits.
_EMITTED = r"^([^,]*)(?:, seq = (\d{1,18})(?!\d))?"
#: Ranges that name the phase of a training step, by the program or by PyTorch.
_PHASE = re.compile(r"(?i)^(?:(forward|loss|backward)|optimizer(?:_step)?|zero_grad|Optimizer\.(?:step|zero_grad)#.*)$")
_LAUNCH = re.compile(r"(?<!Graph)Launch(?!HostFunc)")
_REPLAY = re.compile("GraphLaunch")
_TIMES = ["start_ns", "end_ns", "thread"]
_PLACE = ["where", "phase"]
_TOP_KERNELS = 3
#: A kind of place divides the time well if its places have this share of it, and those beside the largest this share.
_LEAST_ATTRIBUTED = 0.5
_LEAST_BESIDE_LARGEST = 0.05


class Where(NamedTuple):
    """The answer of :func:`summary`.

    Attributes
    ----------
    rows : DataFrame
        ``where, phase, count, gpu_ns, share, top_kernels``, the largest `gpu_ns` first; one row is
        :data:`UNATTRIBUTED`. `phase` is ``forward``, ``loss``, ``backward``, ``optimizer``, or None where that is not
        known. Without rows the trace has no kernels, or records no such places.
    by : str or None
        The kind of place; None where the trace records none.
    note : str
        How the rows were made, and what they leave out.
    """

    rows: pd.DataFrame
    by: By | None
    note: str


def summary(trace: Trace, by: By | None = None, capture: Trace | None = None) -> Where:
    """Divide the kernels' time among the places of the program that launched them.

    Durations are summed: kernels that overlap count each in full, and every kernel counts once.

    Parameters
    ----------
    trace : Trace
    by : {"module", "line", "op", "range"}, optional
        The kind of place. By default the finest whose places hold at least half of the time, and those beside the
        largest at least 5%; where none does, the one with most time beside its largest place.
    capture : Trace, optional
        A trace of the same program in which its CUDA graphs were captured.

    Returns
    -------
    Where

    Raises
    ------
    UsageError
        `by` is unknown, or `capture` holds no capture of a graph.
    """
    if by is not None and by not in KINDS:
        raise UsageError(f"kernel time can be divided by {', '.join(KINDS)}, not by {by!r}")
    sources = [trace.whole]
    if capture is not None:
        sources.append(capture.whole)
        _captured_launches(capture.whole)  # fails without a capture of a graph
    best = Where(pd.DataFrame(columns=COLUMNS), None, "")
    best_shares = (-1.0, -1.0)
    if not trace.size("kernels"):
        return best
    kernels = _kernels_with_launch(trace.whole)
    kinds = KINDS if by is None else (by,)
    for kind in kinds:
        if all(_places_of_kind(source, kind).empty for source in sources):
            continue
        placed = kernels.join(_places_of_calls(trace.whole, kernels["launch"], kind), on="launch")
        if capture is not None:
            _take_places_from_capture(placed, capture.whole, kind)
        is_selected = trace.mask("kernels")
        if is_selected is not None:
            placed = placed[is_selected]
        rows = _sum_by_place(placed)
        shares = rows.loc[rows["where"] != UNATTRIBUTED, "share"]  # the largest first
        attributed = float(shares.sum())
        beside_largest = float(shares[1:].sum())
        if (beside_largest, attributed) > best_shares:
            best = Where(rows, kind, _note_on_rows(placed, kind, capture is not None))
            best_shares = (beside_largest, attributed)
        if attributed >= _LEAST_ATTRIBUTED and beside_largest >= _LEAST_BESIDE_LARGEST:
            break
    return best


def _note_on_rows(placed: pd.DataFrame, kind: By, has_capture: bool) -> str:
    """Describe how the rows were made, and what they leave out."""
    total_ns = max(int(placed["duration_ns"].sum()), 1)
    lost_ns = int(placed.loc[placed["where"].isna(), "duration_ns"].sum())
    note = f"by innermost {kind}"
    if lost_ns:
        note += f" · {100 * lost_ns / total_ns:.1f}% {UNATTRIBUTED}"
    replayed_ns = int(placed.loc[placed["replayed"], "duration_ns"].sum())
    if replayed_ns and not has_capture:
        note += (
            f" · {100 * replayed_ns / total_ns:.0f}% runs in CUDA graphs and counts where they were launched "
            "(see --graph-from)"
        )
    return note


def _kernels_with_launch(whole: Trace) -> pd.DataFrame:
    """All kernels: ``name, start_ns, duration_ns``, ``launch`` (row of the call), ``replayed`` (in a CUDA graph)."""
    kernels = whole.table("kernels", ["name", "start_ns", "duration_ns", "process", "correlation"])
    kernels["launch"] = launch_of(whole, kernels.pop("process"), kernels.pop("correlation"))
    is_replay = matching(whole.table("calls", ["name"])["name"], _REPLAY)
    kernels["replayed"] = np.append(is_replay, False)[kernels["launch"]]  # the last is for launch -1
    return kernels


def _sum_by_place(placed: pd.DataFrame) -> pd.DataFrame:
    """Sum kernels by place and phase: `COLUMNS`, one of whose rows is `UNATTRIBUTED`."""
    kernels = placed[["name", "where", "phase"]].astype(object)
    kernels["gpu_ns"] = placed["duration_ns"]
    kernels["count"] = 1
    kernels.loc[kernels["where"].isna(), _PLACE] = UNATTRIBUTED, None
    # Make sure that there is such a row: name, where, phase, gpu_ns, count.
    kernels.loc[-1] = None, UNATTRIBUTED, None, 0, 0
    sums = kernels.groupby([*_PLACE, "name"], dropna=False)[["gpu_ns", "count"]].sum().reset_index()
    sums = sums.sort_values("gpu_ns", ascending=False, kind="stable")  # for the top kernels of each place
    by_place = sums.groupby(_PLACE, dropna=False)
    rows = by_place[["count", "gpu_ns"]].sum().astype("int64")
    rows["share"] = rows["gpu_ns"] / max(int(rows["gpu_ns"].sum()), 1)
    rows["top_kernels"] = by_place["name"].agg(_top_names)
    rows = rows.reset_index()
    # pandas marks a missing phase with NaN: answers have None.
    rows["phase"] = rows["phase"].astype(object).where(rows["phase"].notna(), None)
    return rows.sort_values(["gpu_ns", "where"], ascending=[False, True], kind="stable", ignore_index=True)[COLUMNS]


def _top_names(names: pd.Series) -> list[str]:
    """Pick the first names of a column."""
    return names.dropna().head(_TOP_KERNELS).tolist()


# --- from a call to its place --------------------------------------------------------------------------------------


def _places_of_calls(whole: Trace, rows: pd.Series, kind: By) -> pd.DataFrame:
    """Find ``where`` and ``phase`` of the calls in some rows, which may be -1; None where unknown. Indexed by row."""
    known_rows = np.unique(rows[rows >= 0])
    calls = whole.table("calls", _TIMES).loc[known_rows]
    node = enclosing(calls, _backward_nodes(whole))
    maker = np.append(_maker_of_node(whole), -1)[node]  # the last is for no node, -1
    where = _names_of_places(whole, calls, kind, node, maker)
    phase = _phases_of_calls(whole, calls, node, maker)
    return pd.DataFrame({"where": where, "phase": phase}, calls.index)


def _names_of_places(whole: Trace, calls: pd.DataFrame, kind: By, node: Int, maker: Int) -> Object:
    """Name the place of each call, given its node of the backward pass and the node's maker (-1 for none)."""
    places = _places_of_kind(whole, kind)
    if kind == "range":  # holds autograd's launches while it is open, too: a node's maker is not needed
        return _values_at(places["name"], innermost_ranges_around(whole, places, calls))
    makers = _node_makers(whole)
    place = enclosing(calls, places)
    # A place that was open before the node began only called for the backward pass: it is not the call's.
    node_start = _starts_at(_backward_nodes(whole), node)
    has_own_place = _starts_at(places, place) >= node_start
    # What a node computes again of the forward pass (checkpointing) is not its maker's: it has separate operators.
    is_recomputed = _starts_at(makers, enclosing(calls, makers)) > node_start
    is_of_maker = (maker >= 0) & ~is_recomputed
    # Every call of a node is inside an operator: as places, operators of the node would always hide its maker.
    if kind != "op":
        is_of_maker &= ~has_own_place
    place[~has_own_place] = -1
    place[is_of_maker] = enclosing(makers, places)[maker[is_of_maker]]
    return _values_at(places["name"], place)


def _phases_of_calls(whole: Trace, calls: pd.DataFrame, node: Int, maker: Int) -> Object:
    """Find the phase of each call: backward in a node, else as its range is named, else forward if anything shows that.

    A module around the call shows it, or an operator that made a node of the backward pass.
    """
    ranges = whole.table("ranges", [*_TIMES, "name"])
    ranges = ranges[matching(ranges["name"], _PHASE)]
    # What else `_PHASE` matches is the optimizer's.
    names = ranges["name"].astype(str).str.lower().str.extract("(forward|loss|backward)")[0].fillna("optimizer")
    named_range = innermost_ranges_around(whole, ranges, calls)
    makers = _node_makers(whole).iloc[np.unique(maker[maker >= 0])]
    is_forward = enclosing(calls, _places_of_kind(whole, "module")) >= 0
    is_forward |= enclosing(calls, makers) >= 0
    phases = _values_at(names, named_range)
    phases[is_forward & (named_range < 0)] = "forward"
    phases[node >= 0] = "backward"
    return phases


def _values_at(values: pd.Series, at: Int) -> Object:
    """Pick the values at some positions; None at position -1."""
    return np.append(values.to_numpy(object), np.array([None]))[at]


def _starts_at(places: pd.DataFrame, at: Int) -> Int:
    """Pick the starts of the places at some positions; before all times at position -1."""
    return np.append(places["start_ns"].to_numpy(), np.iinfo(np.int64).min)[at]


# --- places --------------------------------------------------------------------------------------------------------


@memoised
def _places_of_kind(whole: Trace, kind: By) -> pd.DataFrame:
    """All places of a kind: ``start_ns, end_ns, thread, name``."""
    if kind == "op":
        return _operators(whole)
    if kind == "range":
        ranges = whole.table("ranges", [*_TIMES, "name"])
        is_step = ranges["name"].isin(steps.find(whole)["step"].tolist())  # a step is a time, not a place
        return ranges[~is_step & ~matching(ranges["name"], OPERATOR_RANGE)]
    frames = whole.table("frames", [*_TIMES, "name"])
    if kind == "line":
        return frames[~matching(frames["name"], _LIBRARY_FUNCTION)]
    modules = frames[matching(frames["name"], _IS_MODULE)]
    return _with_paths(modules.reset_index(drop=True))


@memoised
def _operators(whole: Trace) -> pd.DataFrame:
    """Operators, or the ranges that ``emit_nvtx`` makes of them where the trace has none.

    ``start_ns, end_ns, thread, process, name``; ``sequence`` is autograd's number, -1 for none; ``node`` marks the
    operators that run nodes of the backward pass. PyTorch's profiler gives those a ``forward_thread``.
    """
    ops = whole.table("ops", [*_TIMES, "process", "name", "sequence", "forward_thread"])
    if ops.empty:
        ranges = whole.table("ranges", [*_TIMES, "process", "name"])
        ops = ranges[matching(ranges["name"], OPERATOR_RANGE)].reset_index(drop=True)
        name_and_sequence = ops["name"].astype(str).str.extract(_EMITTED)
        ops["name"] = name_and_sequence[0].astype("category")
        ops["sequence"] = name_and_sequence[1].fillna("-1").astype("int64")
        ops["forward_thread"] = -1
    ops["node"] = (ops["forward_thread"] > 0) | matching(ops["name"], _NODE_RUNNER)
    return ops


@memoised
def _backward_nodes(whole: Trace) -> pd.DataFrame:
    """Operators that run nodes of the backward pass."""
    ops = _operators(whole)
    return ops[ops["node"]]


@memoised
def _node_makers(whole: Trace) -> pd.DataFrame:
    """Operators of the forward pass that may have made a node."""
    ops = _operators(whole)
    return ops[~ops["node"] & (ops["sequence"] >= 0)]


@memoised
def _maker_of_node(whole: Trace) -> Int:
    """Find the operator that made each node of the backward pass: its position in :func:`_node_makers`, -1 for unknown.

    Sequence numbers count nodes: an operator carries the next node's number, whether it makes that node or
    not, so the last operator with the number made it (PyTorch draws its arrows by the same rule). Every
    thread counts for itself; a number that operators of several threads carry is ambiguous.
    """
    key = ["process", "sequence"]
    candidates = _node_makers(whole)[[*key, "thread", "start_ns"]]
    candidates = candidates.assign(at=np.arange(len(candidates)))
    candidates = candidates[candidates.groupby(key)["thread"].transform("nunique") == 1]
    makers = candidates.sort_values("start_ns", kind="stable").drop_duplicates(key, keep="last")
    nodes = _backward_nodes(whole)[key].merge(makers, how="left", on=key)
    return nodes["at"].fillna(-1).to_numpy(np.int64)


def _with_paths(modules: pd.DataFrame) -> pd.DataFrame:
    """Name modules by their path from the outermost, as in ``Net/Block/Linear_1``.

    The profiler numbers the modules of a class. Those that hold others lose their number, so that the layers of a stack
    are one place; the others are numbered among their siblings of the same class, if there are any.
    """
    _, parent = nesting(modules["thread"], modules["start_ns"], modules["end_ns"])
    name = modules["name"].astype(str).str.removeprefix(_MODULE)  # such as Linear_3
    outer_name = np.append(name, "")[parent]
    calls = pd.DataFrame({"name": name, "outer": outer_name, "start_ns": modules["start_ns"]})
    first_calls = calls.sort_values("start_ns", kind="stable").drop_duplicates("name")
    first_calls["class"] = first_calls["name"].str.replace(r"_\d+$", "", regex=True)
    siblings = first_calls.groupby(["outer", "class"])["name"]
    has_no_number = first_calls["name"].isin(calls["outer"]) | (siblings.transform("size") == 1)
    numbered = first_calls["class"] + "_" + siblings.cumcount().astype(str)
    labels = first_calls["class"].where(has_no_number, numbered)
    paths = {"": ""}
    # In order of time, so that the path of the outer module is known.
    for module, outer, label in zip(first_calls["name"], first_calls["outer"], labels, strict=True):
        paths[module] = f"{paths.get(outer, '')}/{label}".lstrip("/")
    return modules.assign(name=name.map(paths).astype("category"))


# --- replays of CUDA graphs ----------------------------------------------------------------------------------------


@memoised
def _captured_launches(whole: Trace) -> pd.DataFrame:
    """Launches while a graph was captured: ``row`` in the calls, ``graph`` (which capture), ``name``; in order.

    ``name`` is the kernel's, "" where the capture does not have it. A launch whose kernel ran at once went to a stream
    that was not captured.
    """
    calls = whole.table("calls", [*_TIMES, "name", "kernel"])
    calls["row"] = calls.index
    calls = calls.sort_values(["thread", "start_ns"], kind="stable")
    calls["begun"] = matching(calls["name"], BEGIN_CAPTURE)
    calls["ended"] = matching(calls["name"], END_CAPTURE)
    # How many captures had begun and ended by then: between the two counts lies a capture, numbered by the first.
    count = calls.groupby("thread")[["begun", "ended"]].cumsum()
    calls["graph"] = count["begun"]
    launches = calls[(count["begun"] > count["ended"]) & matching(calls["name"], _LAUNCH)]
    level, parent = nesting(launches["thread"], launches["start_ns"], launches["end_ns"])
    has_run = np.isin(launches["row"], _kernels_with_launch(whole)["launch"])
    has_run[parent[has_run & (level > 0)]] = True  # a driver's call lies within the runtime's
    launches = launches[(level == 0) & ~has_run]
    if launches.empty:
        raise UsageError(
            f"{whole.path}: holds no capture of a CUDA graph (kernel launches between cudaStreamBeginCapture and "
            "cudaStreamEndCapture); give a trace of the program's start"
        )
    graph = launches.groupby(["thread", "graph"]).ngroup()
    name = launches["kernel"].astype(str).to_numpy()
    return pd.DataFrame({"row": launches["row"].to_numpy(), "graph": graph.to_numpy(), "name": name})


def _take_places_from_capture(placed: pd.DataFrame, capture: Trace, kind: By) -> None:
    """Give kernels of replays the places of their launches in a capture, in `placed` itself.

    The kernels of a replayed CUDA graph have no calls. The calls that captured the graph are in
    `capture`, a trace of the program's start. A captured graph fits a replay with as many kernels, and if the capture
    names them, with as many of each name. Where several fit, they must agree on the places.
    """
    captured = _captured_launches(capture)
    captured = captured.join(_places_of_calls(capture, captured["row"], kind), on="row")
    is_named = bool((captured["name"] != "").all())
    captures_by_key: dict[object, list[pd.DataFrame]] = {}
    for _, launches in captured.groupby("graph"):
        ordered, key = _in_matching_order(launches, is_named)
        captures_by_key.setdefault(key, []).append(ordered)
    placed.loc[placed["replayed"], _PLACE] = None
    kernels = placed[placed["replayed"]].sort_values("start_ns", kind="stable")
    for _, replay in kernels.groupby("launch"):
        ordered, key = _in_matching_order(replay, is_named)
        fitting = captures_by_key.get(key, [])
        distinct_places = {tuple(launches["where"]) for launches in fitting}
        if len(distinct_places) == 1:
            placed.loc[ordered.index, _PLACE] = fitting[0][_PLACE].to_numpy()


def _in_matching_order(rows: pd.DataFrame, is_named: bool) -> tuple[pd.DataFrame, object]:
    """Order the kernels of a CUDA graph so that a replay's lie beside those of the graph's capture.

    A replay may run branches of the graph in another order than they were captured in, so kernels are ordered by name.
    A trace of the capture may hold launches without names; then only their number is compared. Also returns a key that
    is equal for a capture and its replays.
    """
    if not is_named:
        return rows, len(rows)
    rows = rows.astype({"name": str}).sort_values("name", kind="stable")
    return rows, tuple(rows["name"])
