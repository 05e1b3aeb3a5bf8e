"""Which module, line, operator or range of the program the kernels' time belongs to.

A kernel belongs to the call that launched it, and the call to what was open on its thread. The backward pass runs on
autograd's thread, where nothing of the program is open: it belongs to the operator of the forward pass whose node it
runs, which autograd's sequence numbers name. Kernels of a CUDA graph belong to what launched them while the graph was
captured; the trace of a replay does not hold that, another trace of the same program may.
"""

from __future__ import annotations

import re
import sys
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core.intervals import enclosing, innermost, launch_of
from nsightkit.analysis.core.kept import kept
from nsightkit.analysis.core.names import OPERATOR_RANGE, matching
from nsightkit.analysis.timeline import steps
from nsightkit.analysis.timeline.ranges import holders
from nsightkit.errors import UsageError
from nsightkit.trace.model import Trace
from nsightkit.trace.nesting import nesting

__all__ = ["COLUMNS", "KINDS", "UNATTRIBUTED", "By", "Where", "note", "remedy", "summary"]

Int = npt.NDArray[np.int64]
By = Literal["module", "line", "op", "range"]

COLUMNS = ["where", "phase", "count", "gpu_ns", "share", "top_kernels"]
#: Kinds of place, the finest first.
KINDS: tuple[By, ...] = ("module", "line", "op", "range")
#: What is not there without places of a kind, or of any, and what records it.
_REMEDIES = {
    None: (
        "module, line, operator or range was recorded; torch.profiler.profile(with_stack=True) records the first "
        "three, and NVTX ranges name places for Nsight Systems"
    ),
    "module": "modules were recorded; torch.profiler.profile(with_stack=True) records them",
    "line": "Python functions were recorded; torch.profiler.profile(with_stack=True) records them",
    "op": "operators were recorded; torch.profiler records them, and nsys those of torch.autograd.profiler.emit_nvtx()",
    "range": "ranges inside steps were recorded; NVTX or torch.profiler.record_function names parts of a step",
}
#: The row of the kernels that belong to nothing that is known.
UNATTRIBUTED = "unattributed"

_MODULE = "nn.Module: "
#: Functions that are not the program's: modules' own rows, Python's, PyTorch's, Triton's, and what these generate.
_LIBRARY = re.compile(
    rf"^<|^{_MODULE}|(^|[/\\])(torch|triton|torchinductor_[^/\\]*)[/\\]"
    rf"|(^|[/\\]python3[^/\\]*[/\\])({'|'.join(map(re.escape, sorted(sys.stdlib_module_names)))})(\.py\(|[/\\])"
)
#: Operators that run nodes of the backward pass.
_NODE = re.compile(r"^(torch::)?autograd::|Backward\d*$")
_PHASE = re.compile(r"(?i)^(?:(forward|loss|backward)|optimizer(?:_step)?|zero_grad|Optimizer\.(?:step|zero_grad)#.*)$")
_LAUNCH, _REPLAY = re.compile(r"(?<!Graph)Launch(?!HostFunc)"), re.compile("GraphLaunch")
_BEGIN, _END = re.compile("StreamBeginCapture"), re.compile("StreamEndCapture")
_TIMES = ["start_ns", "end_ns", "thread"]
_TOP = 3


class Where(NamedTuple):
    """What :func:`summary` found.

    Attributes
    ----------
    rows : DataFrame
        ``where, phase, count, gpu_ns, share, top_kernels``, the largest `gpu_ns` first; one row is
        :data:`UNATTRIBUTED`. `phase` is ``forward``, ``loss``, ``backward``, ``optimizer``, or None where that is not
        known. Without rows the trace has no kernels, or records no such places.
    by : str or None
        The kind of place; None where the trace records none.
    early_ns : int
        Time of kernels whose launch is not in the trace; they are unattributed.
    replayed_ns : int
        Time of kernels of graph replays.
    replayed, joined : int
        Their number, and how many of them were joined to a capture; None where none was given.
    """

    rows: pd.DataFrame
    by: By | None
    early_ns: int
    replayed_ns: int
    replayed: int
    joined: int | None


def summary(trace: Trace, by: By | None = None, capture: Trace | None = None) -> Where:
    """Divide the kernels' time among the places of the program that launched them.

    Durations are summed: kernels that overlap count each in full, and every kernel counts once.

    Parameters
    ----------
    trace : Trace
    by : {"module", "line", "op", "range"}, optional
        The kind of place. By default the finest that holds at least half of the time, and at most 95 % in one place;
        where none does, the one with most time beside its largest place.
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
    whole = trace.whole
    kernels = whole.table("kernels", ["name", "start_ns", "duration_ns", "process", "correlation"])
    launch = launch_of(whole, kernels["process"], kernels["correlation"])
    replayed = np.append(matching(whole.table("calls", ["name"])["name"], _REPLAY), False)[launch]
    mask = trace.mask("kernels")
    chosen = np.ones(len(kernels), bool) if mask is None else mask
    captured = None if capture is None else _captured(capture.whole)
    length, mine = kernels["duration_ns"].to_numpy(), replayed & chosen
    early_ns, replayed_ns = int(length[chosen & (launch < 0)].sum()), int(length[mine].sum())
    best = Where(pd.DataFrame(columns=COLUMNS), None, early_ns, replayed_ns, int(mine.sum()), None)
    most = (-1, -1)
    for kind in KINDS if by is None else (by,):
        known = len(_places(whole, kind)) or (capture is not None and len(_places(capture.whole, kind)))
        if not known or not chosen.any():
            continue
        calls, of = np.unique(launch, return_inverse=True)
        placed = _located(whole, calls, kind).iloc[of].reset_index(drop=True)
        joined = np.full(len(kernels), -1)
        if capture is not None and captured is not None:
            places = _located(capture.whole, captured["row"].to_numpy(), kind)
            joined[replayed] = _joined(kernels.assign(graph=launch)[replayed], captured.assign(where=places["where"]))
            placed.loc[replayed] = places.reindex(joined[replayed]).to_numpy()
        rows = _rows(kernels[chosen], placed[chosen])
        times = rows.loc[rows["where"] != UNATTRIBUTED, "gpu_ns"]
        attributed, apart, total = int(times.sum()), int(times[1:].sum()), int(rows["gpu_ns"].sum())
        if (apart, attributed) > most:
            best = best._replace(
                rows=rows, by=kind, joined=None if capture is None else int((joined[chosen] >= 0).sum())
            )
            most = apart, attributed
        if attributed >= total / 2 and apart >= total / 20:
            break
    return best


def note(found: Where) -> str:
    """Say what belongs below the rows: how they were made, and what they leave out.

    Parameters
    ----------
    found : Where
    """
    total = int(found.rows["gpu_ns"].sum()) or 1
    left = int(found.rows.loc[found.rows["where"] == UNATTRIBUTED, "gpu_ns"].sum())
    early = f" (of {100 * found.early_ns / total:.1f} % the launch was not recorded)" if found.early_ns else ""
    said = [f"by {found.by}", f"{100 * left / total:.1f} % {UNATTRIBUTED}{early}"]
    if found.joined is not None:
        said.append(f"{found.joined:,} of {found.replayed:,} kernels of graph replays joined to their capture")
    elif found.replayed:
        share = f"{100 * found.replayed_ns / total:.0f} %"
        said.append(f"{share} are of CUDA graphs and stand where these were launched (--graph-from says more)")
    return " · ".join(said)


def remedy(by: By | None) -> str:
    """Say what a trace without places of a kind, or of any kind, lacks, and how to record it.

    Parameters
    ----------
    by : str, optional
    """
    return f"no {_REMEDIES[by]}"


def _rows(kernels: pd.DataFrame, placed: pd.DataFrame) -> pd.DataFrame:
    """Sum kernels by place and phase."""
    lost = placed["where"].isna().to_numpy()
    each = pd.DataFrame(
        {
            "where": placed["where"].mask(lost, UNATTRIBUTED).to_numpy(),
            "phase": placed["phase"].mask(lost).to_numpy(),
            "name": kernels["name"].cat.codes.to_numpy(),
            "gpu_ns": kernels["duration_ns"].to_numpy(),
            "count": 1,
        }
    )
    nothing = pd.DataFrame({"where": [UNATTRIBUTED], "phase": [None], "name": [-1], "gpu_ns": [0], "count": [0]})
    each = pd.concat([each, nothing], ignore_index=True)  # so that there is such a row
    key = ["where", "phase"]
    sums = each.groupby([*key, "name"], dropna=False)[["count", "gpu_ns"]].sum().reset_index()
    sums = sums.sort_values("gpu_ns", ascending=False, kind="stable")
    names = [*kernels["name"].cat.categories, None]
    out = sums.groupby(key, dropna=False, as_index=False).agg(
        count=("count", "sum"), gpu_ns=("gpu_ns", "sum"),
        top_kernels=("name", lambda codes: [names[code] for code in codes[codes >= 0][:_TOP]]),
    )  # fmt: skip
    total = int(out["gpu_ns"].sum())
    out["share"] = out["gpu_ns"] / total if total else 0.0
    out["phase"] = out["phase"].astype(object).where(out["phase"].notna(), None)
    return out.sort_values(["gpu_ns", "where"], ascending=[False, True], kind="stable", ignore_index=True)[COLUMNS]


# --- from a call to its place --------------------------------------------------------------------------------------


def _located(whole: Trace, rows: Int, kind: By) -> pd.DataFrame:
    """Give ``where`` and ``phase`` of some calls; None where they are not known, as for row -1."""
    calls = whole.table("calls", _TIMES).iloc[rows[rows >= 0]]
    ops, places, modules = _operators(whole), _places(whole, kind), _places(whole, "module")
    nodes, made = ops[ops["node"]], ops[~ops["node"] & (ops["sequence"] >= 0)]
    node, inner, at = enclosing(calls, nodes), enclosing(calls, made), _around(whole, calls, places, kind)
    forward = np.append(_forward(nodes, made), -1)[node]
    since = _begun(nodes, node)
    if kind != "range":
        # What was open before the node is what called for the backward pass. What a node computes again of the forward
        # pass is in no operator that the sequence numbers know.
        own, again = _begun(places, at) >= since, _begun(made, inner) > since
        linked = (forward >= 0) & ~again & (~own | (kind == "op"))
        origin, of = np.unique(forward[linked], return_inverse=True)
        at[~own] = -1
        at[linked] = _around(whole, made.iloc[origin], places, kind)[of]
    ranges = whole.table("ranges", [*_TIMES, "name"])
    named = ranges[matching(ranges["name"], _PHASE)]
    goes = (enclosing(calls, modules) >= 0) | (enclosing(calls, made.iloc[np.unique(forward[forward >= 0])]) >= 0)
    known = _around(whole, calls, named, "range")
    out = np.full((2, len(rows)), None, object)
    out[0, rows >= 0] = _of(places["name"], at)
    said = named["name"].astype(str).str.lower().str.extract("(forward|loss|backward)")[0].fillna("optimizer")
    out[1, rows >= 0] = np.where(node >= 0, "backward", np.where((known < 0) & goes, "forward", _of(said, known)))
    return pd.DataFrame({"where": out[0], "phase": out[1]})


def _around(whole: Trace, calls: pd.DataFrame, places: pd.DataFrame, kind: By) -> Int:
    """Position of the innermost place around each call, -1 for none; of ranges by the rule ``window``."""
    if kind != "range":
        return enclosing(calls, places)
    found = np.full(len(calls), -1, np.int64)
    for may, mine in holders(whole, places.index.to_numpy(), calls["thread"].to_numpy()):
        at = np.append(may, -1)[innermost(calls.iloc[mine], places.iloc[may])]
        later = _begun(places, at) > _begun(places, found[mine])
        found[mine] = np.where(later, at, found[mine])
    return found


def _of(values: pd.Series, at: Int) -> npt.NDArray[np.object_]:
    """Values at positions; None at position -1."""
    return np.append(values.to_numpy(object), np.array([None]))[at]


def _begun(places: pd.DataFrame, at: Int) -> Int:
    """When the place at each position began; before all times for position -1."""
    return np.append(places["start_ns"].to_numpy(), np.iinfo(np.int64).min)[at]


def _forward(nodes: pd.DataFrame, made: pd.DataFrame) -> Int:
    """Position in `made` of the operator that made each node of the backward pass, -1 where that is not known.

    Sequence numbers count nodes: an operator carries that of the next node, whether it makes it or not, so the last
    operator with the number made it (as PyTorch has it for its arrows). Every thread counts for itself; a number that
    operators of several threads carry is nobody's.
    """
    key = ["process", "sequence"]
    of_one_thread = made.groupby(key)["thread"].transform("nunique") == 1
    last = made.assign(at=np.arange(len(made)))[of_one_thread].sort_values("start_ns", kind="stable")
    found = nodes[key].merge(last.drop_duplicates(key, keep="last")[[*key, "at"]], how="left", on=key)
    return found["at"].fillna(-1).to_numpy(np.int64)


# --- places --------------------------------------------------------------------------------------------------------


@kept
def _places(whole: Trace, kind: By) -> pd.DataFrame:
    """All places of a kind: ``start_ns, end_ns, thread, name``."""
    if kind == "op":
        return _operators(whole)
    if kind == "range":
        ranges = whole.table("ranges", [*_TIMES, "name"])
        # A step is a time and not a place.
        other = matching(ranges["name"], OPERATOR_RANGE) | ranges["name"].isin({*steps.find(whole)["step"]}).to_numpy()
        return ranges[~other]
    frames = whole.table("frames", [*_TIMES, "name"])
    if kind == "line":
        return frames[~matching(frames["name"], _LIBRARY)]
    return _with_paths(frames[matching(frames["name"], re.compile(f"^{_MODULE}"))].reset_index(drop=True))


@kept
def _operators(whole: Trace) -> pd.DataFrame:
    """Operators, those of ``emit_nvtx`` too: ``start_ns, end_ns, thread, process, name, sequence, node``.

    `node` says which run nodes of the backward pass.
    """
    ops = whole.table("ops", [*_TIMES, "process", "name", "sequence", "forward_thread"])
    if not len(ops):
        ranges = whole.table("ranges", [*_TIMES, "process", "name"])
        ops = ranges[matching(ranges["name"], OPERATOR_RANGE)].reset_index(drop=True)
        said = ops["name"].astype(str).str.extract(r"^(?P<name>[^,]*)(?:, seq = (?P<sequence>\d{1,18})(?!\d))?")
        ops = ops.assign(name=said["name"].astype("category"), sequence=said["sequence"].fillna("-1").astype("int64"))
        ops["forward_thread"] = -1
    return ops.assign(node=(ops["forward_thread"] > 0) | matching(ops["name"], _NODE))


def _with_paths(modules: pd.DataFrame) -> pd.DataFrame:
    """Modules by their path from the outermost, as in ``Net/Block/Linear_1``.

    The profiler numbers the modules of a class. Those that hold others lose their number, so that the layers of a stack
    are one place; the others are numbered among their siblings of the same class, if there are any.
    """
    _, above = nesting(modules["thread"], modules["start_ns"], modules["end_ns"])
    given = modules["name"].astype(str).str.removeprefix(_MODULE)
    calls = pd.DataFrame({"name": given, "outer": np.append(given, "")[above], "start_ns": modules["start_ns"]})
    first = calls.sort_values("start_ns", kind="stable").drop_duplicates("name")
    first["kind"] = first["name"].str.replace(r"_\d+$", "", regex=True)
    siblings = first.groupby(["outer", "kind"])["name"]
    plain = first["name"].isin(calls["outer"]) | (siblings.transform("size") == 1)
    label = first["kind"].where(plain, first["kind"] + "_" + siblings.cumcount().astype(str))
    paths = {"": ""}
    for name, outer, own in zip(first["name"], first["outer"], label, strict=True):  # the outer ones began before
        paths[name] = f"{paths.get(outer, '')}/{own}".lstrip("/")
    return modules.assign(name=given.map(paths).astype("category"))


# --- replays of CUDA graphs ----------------------------------------------------------------------------------------


def _captured(whole: Trace) -> pd.DataFrame:
    """Launches while a graph was captured: ``row`` in the calls, ``graph`` (which capture), ``kernel``; in order."""
    calls = whole.table("calls", [*_TIMES, "name", "kernel"]).sort_values(["thread", "start_ns"], kind="stable")
    begun, ended = (
        pd.Series(matching(calls["name"], pattern), calls.index).groupby(calls["thread"]).cumsum()
        for pattern in (_BEGIN, _END)
    )
    kernels = whole.table("kernels", ["process", "correlation"])
    ran = launch_of(whole, kernels["process"], kernels["correlation"])  # what runs at once is not captured
    captured = (begun > ended) & matching(calls["name"], _LAUNCH) & ~calls.index.isin(ran)
    launches = calls.assign(graph=begun, row=calls.index, kernel=calls["kernel"].astype(str))[captured]
    if not len(launches):
        raise UsageError(
            f"{whole.path}: holds no capture of a CUDA graph (kernel launches between cudaStreamBeginCapture and "
            "cudaStreamEndCapture); give a trace of the program's start"
        )
    outermost = nesting(launches["thread"], launches["start_ns"], launches["end_ns"])[0] == 0  # the driver's lie within
    launches["graph"] = launches.groupby(["thread", "graph"]).ngroup()
    found: pd.DataFrame = launches.loc[outermost, ["row", "graph", "kernel"]]
    return found.reset_index(drop=True)


def _joined(replayed: pd.DataFrame, captured: pd.DataFrame) -> Int:
    """Position in `captured` of the launch behind each kernel of a replay; -1 where no capture fits.

    A capture fits a replay with as many kernels, and if the capture names them, with as many of each name. Where
    several fit, they must agree on the places.
    """
    named = (captured["kernel"] != "").all()
    sides = []
    for side, name in ((captured, captured["kernel"]), (replayed.sort_values("start_ns"), replayed["name"])):
        key = pd.util.hash_array(name.reindex(side.index).to_numpy(object)) if named else np.zeros(len(side), np.uint64)
        side = side.assign(key=key)  # noqa: PLW2901
        sides.append(side.assign(nth=side.groupby(["graph", "key"]).cumcount()))
    launches, kernels = sides
    agree = launches.groupby("graph").agg(key=("key", "sum"), size=("key", "size"), where=("where", tuple))
    graphs = kernels.groupby("graph").agg(key=("key", "sum"), size=("key", "size")).reset_index()
    fits = agree.reset_index().groupby(["key", "size"]).agg(captured=("graph", "first"), places=("where", "nunique"))
    chosen = graphs.merge(fits[fits["places"] == 1].reset_index(), on=["key", "size"])[["graph", "captured"]]
    launches = launches.rename(columns={"graph": "captured"}).assign(at=np.arange(len(launches)))
    both = kernels.reset_index().merge(chosen, on="graph").merge(launches[["captured", "key", "nth", "at"]])
    return both.set_index("index")["at"].reindex(replayed.index, fill_value=-1).to_numpy()
