"""Why the GPU was idle: every gap of a device, with exactly one cause and the evidence for it.

A gap is judged from the thread that launched the operation which ends it: what was that thread doing between the moment
the device ran dry and the moment the launch had returned? Its time is painted once (``paint``); the label that holds
most of the wait names the cause (``rules``).
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from pandas.api.types import union_categoricals

from nsightkit.analysis.core.intervals import chunks, gpu_intervals, idle_intervals, launches_of, selected, span_ns
from nsightkit.analysis.core.kept import kept
from nsightkit.analysis.core.names import matching
from nsightkit.analysis.timeline import steps
from nsightkit.analysis.timeline.gaps.names import DATA_LOADING, UNIFIED
from nsightkit.analysis.timeline.gaps.paint import EVIDENCE, TABLE_OF
from nsightkit.analysis.timeline.gaps.rules import CAUSES, decide
from nsightkit.analysis.timeline.gaps.threads import Threads
from nsightkit.trace.model import GPU_TABLES, Trace

__all__ = ["CAUSES", "DATA_LOADING", "causes", "find", "in_window", "memop_name", "names_of", "summary"]

Int = npt.NDArray[np.integer[Any]]
Bool = npt.NDArray[np.bool_]

#: What the rules look at; one pass a table.
_GPU_COLUMNS = ["start_ns", "end_ns", "device", "process", "correlation"]
_CPU_COLUMNS = ["start_ns", "end_ns", "thread", "name"]
_COLUMNS = {
    "kernels": _GPU_COLUMNS,
    "memops": [*_GPU_COLUMNS, "kind", "src_kind", "dst_kind"],
    "graphs": _GPU_COLUMNS,
    "calls": [*_CPU_COLUMNS, "correlation"],
    "ranges": _CPU_COLUMNS,
    "ops": _CPU_COLUMNS,
    "os_calls": _CPU_COLUMNS,
    "overhead": _CPU_COLUMNS,
}


def summary(trace: Trace, min_ns: int = 0, data_loading: str = DATA_LOADING) -> pd.DataFrame:
    """Idle time by cause.

    Parameters
    ----------
    trace : Trace
    min_ns : int
        Leave out gaps shorter than this.
    data_loading : str
        Regular expression of the names of ranges and operators in which the program loads data.

    Returns
    -------
    DataFrame
        ``cause, count, total_ns, share_of_span``, by falling ``total_ns``; the share is of the sum of the devices'
        spans. Without `min_ns` and without a filter on the trace the totals sum to the idle time.
    """
    # Small, and all that a second look needs.
    name = f"gap-causes-{min_ns}-{_rules(data_loading)}"
    return trace.derived(name, lambda: _by_cause(trace, min_ns, data_loading)).astype({"cause": object})


def _by_cause(trace: Trace, min_ns: int, data_loading: str) -> pd.DataFrame:
    gaps = _gaps(trace, min_ns, data_loading)
    cause = gaps["cause"].to_numpy()
    count = np.bincount(cause, minlength=len(CAUSES))
    # Exact in floats up to 2**53 ns, 104 days.
    total_ns = np.bincount(cause, weights=gaps["end_ns"] - gaps["start_ns"], minlength=len(CAUSES))
    table = pd.DataFrame({"cause": pd.Categorical(CAUSES, categories=CAUSES), "count": count})
    table["total_ns"] = total_ns.astype(np.int64)
    table["share_of_span"] = total_ns / max(span_ns(trace), 1)
    return table[count > 0].sort_values("total_ns", ascending=False, ignore_index=True)


def find(trace: Trace, min_ns: int = 0, data_loading: str = DATA_LOADING) -> pd.DataFrame:
    """Each gap with its cause and evidence.

    Parameters
    ----------
    trace : Trace
    min_ns : int
    data_loading : str
        As in :func:`summary`.

    Returns
    -------
    DataFrame
        ``device, start_ns, end_ns, duration_ns, cause, evidence``, by device and time. ``evidence`` is a dict:
        ``kind`` (call, range, op, os_call, copy, overhead, sample or none), ``name, start_ns, end_ns, thread``
        of the deciding event, ``launch`` (the call that ended the gap: ``name, start_ns, end_ns, thread``) and
        ``ended_by`` (the operation that ended it).
    """
    gaps = _gaps(trace, min_ns, data_loading)
    return gaps[["device", "start_ns", "end_ns"]].assign(
        duration_ns=gaps["end_ns"] - gaps["start_ns"],
        cause=np.array(CAUSES, object)[gaps["cause"]],
        evidence=np.array(_evidence(trace.whole, gaps), dtype=object),
    )


def causes(trace: Trace, min_ns: int = 0, data_loading: str = DATA_LOADING) -> pd.DataFrame:
    """Each gap with its cause and the name of the deciding event, for further arithmetic: :func:`find` without dicts.

    Parameters
    ----------
    trace : Trace
    min_ns : int
    data_loading : str
        As in :func:`summary`.

    Returns
    -------
    DataFrame
        ``device, start_ns, end_ns, cause, kind, name, row``, by device and time; ``cause, kind, name`` are categories.
        ``row`` counts in the event's table of ``trace.whole``; -1, with an empty name, where no event decided.
    """
    return _with_names(trace.whole, _gaps(trace, min_ns, data_loading))


@kept
def in_window(trace: Trace) -> pd.DataFrame:
    """Give the idle time of the window that the steps cover, with its causes: gaps, and what lies at the window's ends.

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    DataFrame
        As :func:`nsightkit.analysis.timeline.gaps.causes` gives gaps, which are cut at the window's ends. Without steps
        just those.
    """
    gaps, windows = causes(trace), steps.windows(trace)
    if not len(windows):
        return gaps
    begin, end = int(windows["begin_ns"].iloc[0]), int(windows["end_ns"].iloc[-1])
    gaps = gaps[(gaps["end_ns"] > begin) & (gaps["start_ns"] < end)]
    gaps = gaps.assign(start_ns=gaps["start_ns"].clip(lower=begin), end_ns=gaps["end_ns"].clip(upper=end))
    ends = _at_ends(trace, begin, end, int(windows["thread"].iloc[0]))
    texts = ["cause", "kind", "name"]
    if len(ends):
        gaps = pd.concat([gaps.astype(dict.fromkeys(texts, object)), ends.astype(dict.fromkeys(texts, object))])
    return gaps.reset_index(drop=True).astype(dict.fromkeys(texts, "category"))


def memop_name(kind: str) -> str:
    """Call a copy or memset what Nsight Systems calls it.

    Parameters
    ----------
    kind : str
        Of the model's ``memops``.
    """
    return kind if kind == "memset" else f"memcpy {kind}"


def _with_names(whole: Trace, gaps: pd.DataFrame) -> pd.DataFrame:
    """Name the deciding events, as :func:`causes` gives them, by the index of their kind and their row."""
    source, row = gaps["source"].to_numpy(), gaps["source_row"].to_numpy()
    places = [np.flatnonzero((source == 0) | (row < 0))]
    names = [pd.Categorical.from_codes(np.zeros(len(places[0]), np.int8), pd.Index([""], dtype="str"))]
    for number, table in enumerate(TABLE_OF.values(), 1):
        place = np.flatnonzero((source == number) & (row >= 0))
        if len(place):  # reading the names of samples is expensive
            places.append(place)
            names.append(names_of(whole, table, row[place]))
    # The same name in two tables is one name.
    name = union_categoricals(names).take(np.argsort(np.concatenate(places)))
    return gaps[["device", "start_ns", "end_ns"]].assign(
        cause=pd.Categorical.from_codes(gaps["cause"], pd.Index(CAUSES)),
        kind=pd.Categorical.from_codes(source, pd.Index(EVIDENCE)),
        name=name.remove_unused_categories(),
        row=row,
    )


def _rules(data_loading: str) -> str:
    """Names the rules in force in a cache."""
    return hashlib.blake2b(data_loading.encode(), digest_size=8).hexdigest()


def _gaps(trace: Trace, min_ns: int, data_loading: str) -> pd.DataFrame:
    """The gaps of a trace, selected or whole, with their causes, as :func:`_decide` gives them."""
    whole = trace.whole
    gaps = whole.derived(f"gaps-{_rules(data_loading)}", lambda: _decide(whole, data_loading))
    keep = gaps["end_ns"].to_numpy() - gaps["start_ns"].to_numpy() >= min_ns
    if trace is not whole:
        keep &= _selected(trace, gaps)
    return gaps if keep.all() else gaps[keep].reset_index(drop=True)


def _decide(whole: Trace, data_loading: str) -> pd.DataFrame:
    """All gaps: where, what ended each and launched that (-1 unknown), and cause and evidence by their numbers."""
    whole.prefetch(_COLUMNS)
    ops = gpu_intervals(whole)
    gaps = idle_intervals(whole, ops)
    after = gaps.pop("after").to_numpy()
    table, row = ops["table"].to_numpy(), ops["row"].to_numpy()
    asked = _launched_next(whole, ops, after)
    columns = {str(column): gaps[column].to_numpy() for column in gaps}
    columns |= {"table": table[after], "row": row[after]}
    del ops, gaps
    threads = Threads(whole, data_loading)
    parts = []
    for chunk in chunks(max(len(after), 1)):
        part = {column: values[chunk] for column, values in columns.items()}
        part["launch"] = launches_of(whole, table[asked[chunk]], row[asked[chunk]]).astype(np.int32)
        before = None
        if threads.several:
            # In start order the operation before `after` is the last that the device was fed.
            before = launches_of(whole, table[after[chunk] - 1], row[after[chunk] - 1])
        parts.append({"launch": part["launch"], **decide(threads, part, before=before)})
    settled = {column: np.concatenate([part[column] for part in parts]) for column in parts[0]}
    return pd.DataFrame(columns | settled, copy=False)


def _launched_next(whole: Trace, ops: pd.DataFrame, after: Int) -> Int:
    """Positions of the operations that end gaps; for a page of managed memory, of the next operation launched.

    A page moves when it is touched, without a launch.
    """
    moves = matching(whole.table("memops", ["kind"])["kind"], UNIFIED)
    if not moves.any():
        return after
    table, device = ops["table"].to_numpy(), ops["device"].to_numpy()
    pages = table == GPU_TABLES.index("memops")
    pages[pages] = moves[ops["row"].to_numpy()[pages]]
    launched = np.flatnonzero(~pages)
    following = np.append(launched, -1)[np.searchsorted(launched, after)]
    return np.where((following >= 0) & (device[following] == device[after]), following, after)


def _selected(trace: Trace, gaps: pd.DataFrame) -> Bool:
    """Of a filtered trace: gaps that end with a selected operation, but not with the first one of its device."""
    keep = selected(trace, gaps["table"], gaps["row"])
    first = gpu_intervals(trace).groupby("device")["start_ns"].min()
    return np.asarray(keep & (gaps["end_ns"] > gaps["device"].map(first)))


def _at_ends(trace: Trace, begin: int, end: int, steps_ran_on: int) -> pd.DataFrame:
    """Give causes to the idle time at the ends of a window, by the rules for gaps.

    A device that has nothing to do at the end is judged as if a launch of the thread on which the steps ran ended its
    idle time when the window ends.
    """
    ops = gpu_intervals(trace)
    inside = (ops["end_ns"] > begin) & (ops["start_ns"] < end)
    ops = ops[ops["device"].isin(ops.loc[inside, "device"])]  # with what lies outside: up to there it is a gap
    first, last = ops.drop_duplicates("device"), ops.groupby("device")["end_ns"].max().to_numpy()
    launch = launches_of(trace, first["table"], first["row"])
    before = first.assign(launch=launch, start_ns=begin, end_ns=first["start_ns"])
    ends = pd.concat([before, first.assign(launch=-1, start_ns=last, end_ns=end)])
    ends = ends[ends["start_ns"] < ends["end_ns"]].sort_values("device", kind="stable", ignore_index=True)
    threads = Threads(trace)
    gaps = ends.assign(cause=CAUSES.index("unknown"), source=0, source_row=-1)
    judged = (ends["launch"] >= 0).to_numpy() | bool(len(threads.calls(steps_ran_on)))
    columns = {str(column): values.to_numpy() for column, values in ends[judged].items()}
    decided = pd.DataFrame(decide(threads, columns, launched_by=steps_ran_on))
    gaps.loc[judged, list(decided)] = decided.to_numpy()
    return _with_names(trace.whole, gaps)


def _evidence(whole: Trace, gaps: pd.DataFrame) -> list[dict[str, Any]]:
    """Turn numbers of kinds and rows of tables into what a person reads, as :func:`find` has it."""
    table, row, launch, source, source_row = (
        gaps[column].to_numpy() for column in ("table", "row", "launch", "source", "source_row")
    )
    evidence: list[dict[str, Any]] = [{"kind": "none"} for _ in range(len(gaps))]
    for number, (kind, name) in enumerate(TABLE_OF.items(), 1):
        at = np.flatnonzero((source == number) & (source_row >= 0))
        for i, event in zip(at.tolist(), _events(whole, name, source_row[at]), strict=True):
            evidence[i] = {"kind": kind, **event}
    launched = np.flatnonzero(launch >= 0)
    for i, event in zip(launched.tolist(), _events(whole, "calls", launch[launched]), strict=True):
        evidence[i]["launch"] = event
    for number, name in enumerate(GPU_TABLES):
        at = np.flatnonzero(table == number)
        for i, text in zip(at.tolist(), names_of(whole, name, row[at]).tolist(), strict=True):
            evidence[i]["ended_by"] = text
    return evidence


def _events(whole: Trace, table: str, rows: Int) -> list[dict[str, Any]]:
    if not len(rows):
        return []
    where = "device" if table in GPU_TABLES else "thread"
    part = whole.table(table, ["start_ns", "end_ns", where]).iloc[rows]
    part.insert(0, "name", names_of(whole, table, rows).tolist())
    return [{str(key): value for key, value in record.items()} for record in part.to_dict("records")]


def names_of(whole: Trace, table: str, rows: Int) -> pd.Categorical[str]:
    """Give the names of some events.

    Parameters
    ----------
    whole : Trace
    table : str
    rows : ndarray of int

    Returns
    -------
    Categorical of str
        Copies and memsets as :func:`memop_name` calls them.
    """
    if table == "graphs":
        return pd.Categorical.from_codes(np.zeros(len(rows), np.int8), pd.Index(["graph replay"], dtype="str"))
    if table == "memops":
        called = whole.table(table, ["kind"]).iloc[rows, 0].cat
        names = called.categories.map(memop_name)
    else:
        called = whole.table(table, ["name"]).iloc[rows, 0].cat
        names = called.categories
    return pd.Categorical.from_codes(called.codes, names.astype("str"))
