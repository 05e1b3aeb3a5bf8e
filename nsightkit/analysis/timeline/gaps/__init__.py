"""Why the GPU was idle: every gap of a device, with exactly one cause and the evidence for it.

A gap is judged from the thread that launched the operation which ends it: what was that thread doing
between the moment the device ran dry and the moment the launch began? The first rule of
``nsightkit.analysis.timeline.gaps.rules.RULES`` that holds decides.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pandas as pd

from nsightkit.analysis.core.intervals import gpu_intervals, idle_gaps, launches_of
from nsightkit.analysis.timeline.gaps.facts import EVIDENCE, TABLE_OF, Bool, Elsewhere, groups
from nsightkit.analysis.timeline.gaps.rules import CAUSES, decide
from nsightkit.analysis.timeline.gaps.threads import DATA_LOADING, Threads
from nsightkit.analysis.timeline.gaps.words import evidence, memop_name
from nsightkit.trace.model import GPU_TABLES, Trace

__all__ = ["CAUSES", "DATA_LOADING", "causes", "find", "memop_name", "summary"]


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
    if trace is not trace.whole or min_ns > 0:
        table = _by_cause(trace, min_ns, data_loading)
    else:  # small, and all that a second look needs
        table = trace.derived(f"gap-causes-{_rules(data_loading)}", lambda: _by_cause(trace, 0, data_loading))
    return table.astype({"cause": object})


def _by_cause(trace: Trace, min_ns: int, data_loading: str) -> pd.DataFrame:
    found = _found(trace, min_ns, data_loading)
    span = sum(last - first for first, last in _bounds(trace).values())
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
        ``kind`` (call, range, op, os_call, copy, overhead, kernel or none), ``name, start_ns, end_ns, thread`` of what
        decided, ``launch`` (the call that ended the gap: ``name, start_ns, end_ns, thread``) and ``ended_by``
        (the operation that ended it).
    """
    found = _found(trace, min_ns, data_loading)
    return found[["device", "start_ns", "end_ns"]].assign(
        duration_ns=found["end_ns"] - found["start_ns"],
        cause=[CAUSES[c] for c in found["cause"]],
        evidence=np.array(evidence(trace.whole, found), dtype=object),
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
    return named(trace.whole, _found(trace, min_ns, data_loading))


def named(whole: Trace, found: pd.DataFrame) -> pd.DataFrame:
    """Name what decided, as :func:`causes` gives it.

    Parameters
    ----------
    whole : Trace
    found : DataFrame
        ``device, start_ns, end_ns``, and the index of the cause, of the kind of its evidence, and that one's row:
        ``cause, source, source_row``.
    """
    source, row = found["source"].to_numpy(), found["source_row"].to_numpy()
    texts, code = [""], np.zeros(len(found), np.int64)
    for kind, table in TABLE_OF.items():
        mine = np.flatnonzero((source == EVIDENCE.index(kind)) & (row >= 0))
        if len(mine):
            column = "kind" if table == "memops" else "name"
            names = whole.table(table, [column])[column].cat
            code[mine] = names.codes.to_numpy()[row[mine]].astype(np.int64) + len(texts)
            texts += [memop_name(str(n)) if table == "memops" else str(n) for n in names.categories]
    used, code = np.unique(code, return_inverse=True)
    # The same name in two tables is one name: categories are distinct.
    number, distinct = pd.factorize(np.array(texts, dtype=object)[used])
    return pd.DataFrame(
        {
            **{column: found[column].to_numpy() for column in ("device", "start_ns", "end_ns")},
            "cause": pd.Categorical.from_codes(found["cause"], pd.Index(CAUSES)),
            "kind": pd.Categorical.from_codes(source, pd.Index(EVIDENCE)),
            "name": pd.Categorical.from_codes(number[code], pd.Index(distinct, dtype="str")),
            "row": row,
        },
        copy=False,
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
#: What :func:`decide` settles.
_DECIDED = {"cause": np.int8, "source": np.int8, "source_row": np.int32}
#: Gaps judged together; bounds memory.
_CHUNK = 200_000


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
    gaps = idle_gaps(whole, ops)
    after = gaps["after"].to_numpy()
    table, row = ops["table"].to_numpy(), ops["row"].to_numpy()
    # In start order the operation before `after` is the one that the device was fed just before.
    before_table, before_row = table[after - 1], row[after - 1]
    n = len(gaps)
    found = {
        **{column: gaps[column].to_numpy() for column in ("device", "start_ns", "end_ns")},
        "table": table[after],
        "row": row[after],
        "launch": np.full(n, -1, np.int32),
        **{column: np.empty(n, dtype) for column, dtype in _DECIDED.items()},
    }
    del ops, gaps, after, table, row
    threads, elsewhere = Threads(whole, data_loading), Elsewhere(whole)
    of_call = whole.table("calls", ["thread"])["thread"].to_numpy()
    for low in range(0, n, _CHUNK):
        chunk = {column: values[low : low + _CHUNK] for column, values in found.items()}  # views
        chunk["launch"][:] = launches_of(whole, chunk["table"], chunk["row"])
        fed_by = np.full(len(chunk["launch"]), -1, np.int64)
        if threads.several:
            before = launches_of(whole, before_table[low : low + _CHUNK], before_row[low : low + _CHUNK])
            fed_by[before >= 0] = of_call[before[before >= 0]]
        for at, group in groups(whole, chunk, fed_by, threads, elsewhere):
            decide(group)
            for column in _DECIDED:
                chunk[column][at] = getattr(group, column)
    return pd.DataFrame(found, copy=False)


def _bounds(trace: Trace) -> dict[int, tuple[int, int]]:
    """First start and last end of each device's operations."""
    bounds: dict[int, tuple[int, int]] = {}
    for name in GPU_TABLES:
        frame = trace.table(name, ["device", "start_ns", "end_ns"])
        device, start, end = (frame[c].to_numpy() for c in frame.columns)
        for one in pd.unique(device).tolist():
            mine = slice(None) if (device == one).all() else device == one
            first, last = int(start[mine].min()), int(end[mine].max())
            known = bounds.get(one, (first, last))
            bounds[one] = (min(first, known[0]), max(last, known[1]))
    return bounds


def _selected(trace: Trace, gaps: pd.DataFrame) -> Bool:
    """Of a filtered trace: gaps that end with a selected operation, but not with the first one of its device."""
    table, row = gaps["table"].to_numpy(), gaps["row"].to_numpy()
    keep = np.ones(len(gaps), bool)
    for number, name in enumerate(GPU_TABLES):
        if (mask := trace.mask(name)) is not None:
            of_table = table == number
            keep[of_table] = mask[row[of_table]]
    for device, (first, _) in _bounds(trace).items():
        keep &= (gaps["device"].to_numpy() != device) | (gaps["end_ns"].to_numpy() > first)
    return keep
