"""Why the GPU was idle: every gap of a device, with exactly one cause and the evidence for it.

A gap is judged from the thread that launched the operation which ends it: what was that thread doing
between the moment the device ran dry and the moment the launch had returned? Its time is painted once
(``paint``); the label that holds most of the wait names the cause (``rules``).
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import union_categoricals

from nsightkit.analysis.core.intervals import busy, chunks, gpu_intervals, idle_intervals, launches_of, selected
from nsightkit.analysis.core.kept import kept
from nsightkit.analysis.core.names import matching
from nsightkit.analysis.timeline import steps
from nsightkit.analysis.timeline.gaps.facts import EVIDENCE, TABLE_OF
from nsightkit.analysis.timeline.gaps.rules import CAUSES, decide
from nsightkit.analysis.timeline.gaps.threads import DATA_LOADING, UNIFIED, Bool, Int, Threads
from nsightkit.trace.model import GPU_TABLES, Trace

__all__ = ["CAUSES", "DATA_LOADING", "causes", "find", "in_window", "memop_name", "names_of", "summary"]


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
    found = _found(trace, min_ns, data_loading)
    span = busy(trace)["span_ns"].sum()
    # Exact in floats up to 2**53 ns, 104 days.
    total = np.bincount(found["cause"], weights=found["end_ns"] - found["start_ns"], minlength=len(CAUSES))
    out = pd.DataFrame(
        {
            "cause": pd.Categorical(CAUSES, categories=CAUSES),
            "count": np.bincount(found["cause"], minlength=len(CAUSES)),
            "total_ns": total.astype(np.int64),
            "share_of_span": total / max(span, 1),
        }
    )
    return out[out["count"] > 0].sort_values("total_ns", ascending=False, ignore_index=True)


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
        ``kind`` (call, range, op, os_call, copy, overhead, kernel, sample or none), ``name, start_ns, end_ns, thread``
        of what decided, ``launch`` (the call that ended the gap: ``name, start_ns, end_ns, thread``) and ``ended_by``
        (the operation that ended it).
    """
    found = _found(trace, min_ns, data_loading)
    return found[["device", "start_ns", "end_ns"]].assign(
        duration_ns=found["end_ns"] - found["start_ns"],
        cause=[CAUSES[c] for c in found["cause"]],
        evidence=np.array(_evidence(trace.whole, found), dtype=object),
    )


def causes(trace: Trace, min_ns: int = 0, data_loading: str = DATA_LOADING) -> pd.DataFrame:
    """Each gap with its cause and the name of what decided, for further arithmetic: :func:`find` without its dicts.

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
        ``row`` is that of the event in its table of ``trace.whole``, -1, with an empty name, where no event decided.
    """
    return _with_names(trace.whole, _found(trace, min_ns, data_loading))


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
    found, windows = causes(trace), steps.windows(trace)
    if not len(windows):
        return found
    begin, end = int(windows["begin_ns"].iloc[0]), int(windows["end_ns"].iloc[-1])
    found = found[(found["end_ns"] > begin) & (found["start_ns"] < end)]
    found = found.assign(start_ns=found["start_ns"].clip(lower=begin), end_ns=found["end_ns"].clip(upper=end))
    ends = _at_ends(trace, begin, end, int(windows["thread"].iloc[0]))
    texts = dict.fromkeys(("cause", "kind", "name"), object)
    found = pd.concat([found.astype(texts), ends.astype(texts)], ignore_index=True) if len(ends) else found
    return found.assign(**{name: found[name].astype("category") for name in texts})


def memop_name(kind: str) -> str:
    """Call a copy or memset what Nsight Systems calls it.

    Parameters
    ----------
    kind : str
        Of the model's ``memops``.
    """
    return kind if kind == "memset" else f"memcpy {kind}"


def _with_names(whole: Trace, found: pd.DataFrame) -> pd.DataFrame:
    """Name what decided, as :func:`causes` gives it, by the index of its kind and its row."""
    source, row = found["source"].to_numpy(), found["source_row"].to_numpy()
    nameless = (source == EVIDENCE.index("none")) | (row < 0)
    places = [np.flatnonzero(nameless)]
    names = [pd.Categorical.from_codes(np.zeros(len(places[0]), np.int8), pd.Index([""], dtype="str"))]
    for kind, table in TABLE_OF.items():
        if len(mine := np.flatnonzero(~nameless & (source == EVIDENCE.index(kind)))):  # names of samples are dear
            places.append(mine)
            names.append(names_of(whole, table, row[mine]))
    # The same name in two tables is one name.
    name = union_categoricals(names).take(np.argsort(np.concatenate(places)))
    return found[["device", "start_ns", "end_ns"]].assign(
        cause=pd.Categorical.from_codes(found["cause"], pd.Index(CAUSES)),
        kind=pd.Categorical.from_codes(source, pd.Index(EVIDENCE)),
        name=name.remove_unused_categories(),
        row=row,
    )


#: What the rules look at; one pass a table.
_COLUMNS = {
    "kernels": ["start_ns", "end_ns", "device", "process", "correlation"],
    "memops": ["start_ns", "end_ns", "device", "process", "correlation", "kind", "src_kind", "dst_kind"],
    "graphs": ["start_ns", "end_ns", "device", "process", "correlation"],
    "calls": ["start_ns", "end_ns", "thread", "correlation", "name"],
    "ranges": ["start_ns", "end_ns", "thread", "name"],
    "ops": ["start_ns", "end_ns", "thread", "name"],
    "os_calls": ["start_ns", "end_ns", "thread", "name"],
    "overhead": ["start_ns", "end_ns", "thread", "name"],
}


def _rules(data_loading: str) -> str:
    """Names the rules in force in a cache."""
    return hashlib.blake2b(data_loading.encode(), digest_size=8).hexdigest()


def _found(trace: Trace, min_ns: int, data_loading: str) -> pd.DataFrame:
    """The gaps of a trace, selected or whole, with their causes, as :func:`_decide` gives them."""
    whole = trace.whole
    found = whole.derived(f"gaps-{_rules(data_loading)}", lambda: _decide(whole, data_loading))
    keep = found["end_ns"].to_numpy() - found["start_ns"].to_numpy() >= min_ns
    if trace is not whole:
        keep &= _selected(trace, found)
    return found if keep.all() else found[keep].reset_index(drop=True)


def _decide(whole: Trace, data_loading: str) -> pd.DataFrame:
    """All gaps: where, what ended each and launched that (-1 unknown), and cause and evidence by their numbers."""
    whole.prefetch(_COLUMNS)
    ops = gpu_intervals(whole)
    gaps = idle_intervals(whole, ops)
    after = gaps.pop("after").to_numpy()
    table, row = ops["table"].to_numpy(), ops["row"].to_numpy()
    found = {**{str(column): gaps[column].to_numpy() for column in gaps}, "table": table[after], "row": row[after]}
    # In start order the operation before `after` is the one that the device was fed just before.
    before_table, before_row = table[after - 1], row[after - 1]
    asked = _in_streams(whole, table, row, found["device"], ops["device"].to_numpy(), after)
    asked_table, asked_row = table[asked], row[asked]
    del ops, gaps, after, asked, table, row
    threads = Threads(whole, data_loading)
    parts = []
    for mine in chunks(max(len(before_row), 1)):
        chunk = {column: values[mine] for column, values in found.items()}
        chunk["launch"] = launches_of(whole, asked_table[mine], asked_row[mine]).astype(np.int32)
        before = launches_of(whole, before_table[mine], before_row[mine]) if threads.several else None
        parts.append({"launch": chunk["launch"], **decide(threads, chunk, before=before)})
    settled = {column: np.concatenate([part[column] for part in parts]) for column in parts[0]}
    return pd.DataFrame(found | settled, copy=False)


def _in_streams(whole: Trace, table: Int, row: Int, of: Int, device: Int, after: Int) -> Int:
    """Positions of the operations that end gaps or, where that is a page of managed memory, of the next one launched.

    Nobody launches a page: it moves when somebody touches it.
    """
    moves = matching(whole.table("memops", ["kind"])["kind"], UNIFIED)
    if not moves.any():
        return after
    pages = table == GPU_TABLES.index("memops")
    pages[pages] = moves[row[pages]]
    launched = np.flatnonzero(~pages)
    then = np.append(launched, -1)[np.searchsorted(launched, after)]
    return np.where(pages[after] & (then >= 0) & (device[then] == of), then, after)


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
    found = ends.assign(cause=CAUSES.index("unknown"), source=0, source_row=-1)
    judged = (ends["launch"] >= 0).to_numpy() | bool(len(threads.calls(steps_ran_on)))
    gaps = {str(column): values.to_numpy() for column, values in ends[judged].items()}
    decided = pd.DataFrame(decide(threads, gaps, launched_by=steps_ran_on))
    found.loc[judged, list(decided)] = decided.to_numpy()
    return _with_names(trace.whole, found)


def _evidence(whole: Trace, gaps: pd.DataFrame) -> list[dict[str, Any]]:
    """Turn numbers of kinds and rows of tables into what a person reads, as :func:`find` has it."""
    table, row, launch, source, source_row = (
        gaps[column].to_numpy() for column in ("table", "row", "launch", "source", "source_row")
    )
    out: list[dict[str, Any]] = [{"kind": "none"} for _ in range(len(gaps))]
    for kind, name in TABLE_OF.items():
        mine = np.flatnonzero((source == EVIDENCE.index(kind)) & (source_row >= 0))
        for i, event in zip(mine.tolist(), _events(whole, name, source_row[mine]) if len(mine) else (), strict=True):
            out[i] = {"kind": kind, **event}
    launched = np.flatnonzero(launch >= 0)
    for i, event in zip(launched.tolist(), _events(whole, "calls", launch[launched]), strict=True):
        out[i]["launch"] = event
    for number, name in enumerate(GPU_TABLES):
        mine = np.flatnonzero(table == number)
        for i, text in zip(mine.tolist(), names_of(whole, name, row[mine]).tolist(), strict=True):
            out[i]["ended_by"] = text
    return out


def _events(whole: Trace, table: str, rows: Int) -> list[dict[str, Any]]:
    where = "device" if table in GPU_TABLES else "thread"
    part = whole.table(table, ["start_ns", "end_ns", where]).iloc[rows]
    columns = (part[column].tolist() for column in part)
    return [
        {"name": name, "start_ns": start, "end_ns": end, where: on}
        for name, start, end, on in zip(names_of(whole, table, rows).tolist(), *columns, strict=True)
    ]


def names_of(whole: Trace, table: str, rows: Int) -> pd.Categorical[str]:
    """Say what some events are called.

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
    called = whole.table(table, ["kind" if table == "memops" else "name"]).iloc[rows, 0].cat
    names = called.categories.map(memop_name) if table == "memops" else called.categories
    return pd.Categorical.from_codes(called.codes, names.astype("str"))
