"""Why the GPU was idle: every gap of a device, with exactly one cause and the evidence for it.

A gap is judged from the thread that launched the operation which ends it: what was that thread doing
between the moment the device ran dry and the moment the launch began? The first rule of
``nsightkit.analysis.timeline.gaps.rules.RULES`` that holds decides.
"""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pandas as pd

from nsightkit.analysis.core.intervals import gpu_intervals, idle_gaps, launches_of
from nsightkit.analysis.timeline.gaps.facts import EVIDENCE, TABLE_OF, UNDECIDED, Bool, Elsewhere, Gaps, groups
from nsightkit.analysis.timeline.gaps.rules import CAUSES, decide
from nsightkit.analysis.timeline.gaps.threads import DATA_LOADING, Threads
from nsightkit.analysis.timeline.gaps.words import Evidence, memop_name
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
    if trace is trace.whole and min_ns <= 0:
        # Small, and all that a second look needs.
        name = f"gap-causes-{_rules(data_loading)}"
        return trace.derived(name, lambda: _by_cause(trace, 0, data_loading)).astype({"cause": object})
    return _by_cause(trace, min_ns, data_loading).astype({"cause": object})


def _by_cause(trace: Trace, min_ns: int, data_loading: str) -> pd.DataFrame:
    found, span = _found(trace, min_ns, data_loading), _span(trace)
    count = np.bincount(found.cause, minlength=len(CAUSES))
    # Exact in floats up to 2**53 ns, 104 days.
    total = np.bincount(found.cause, weights=found.end - found.start, minlength=len(CAUSES)).astype(np.int64)
    share = total / span if span else np.zeros(len(CAUSES))
    cause = pd.Categorical(CAUSES, categories=CAUSES)
    out = pd.DataFrame({"cause": cause, "count": count, "total_ns": total, "share_of_span": share})
    return out[count > 0].sort_values("total_ns", ascending=False, ignore_index=True)


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
    return pd.DataFrame(
        {
            "device": found.device,
            "start_ns": found.start,
            "end_ns": found.end,
            "duration_ns": found.end - found.start,
            "cause": [CAUSES[c] for c in found.cause],
            "evidence": Evidence(trace.whole, found).of_all(),
        }
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
    found = _found(trace, min_ns, data_loading)
    texts, code = [""], np.zeros(len(found.cause), np.int64)
    for kind, table in TABLE_OF.items():
        mine = np.flatnonzero((found.source == EVIDENCE.index(kind)) & (found.source_row >= 0))
        if len(mine):
            column = "kind" if table == "memops" else "name"
            names = trace.whole.table(table, [column])[column].cat
            code[mine] = names.codes.to_numpy()[found.source_row[mine]].astype(np.int64) + len(texts)
            texts += [memop_name(str(n)) if table == "memops" else str(n) for n in names.categories]
    used, code = np.unique(code, return_inverse=True)
    # The same name in two tables is one name: categories are distinct.
    number, distinct = pd.factorize(np.array(texts, dtype=object)[used])
    return pd.DataFrame(
        {
            "device": found.device,
            "start_ns": found.start,
            "end_ns": found.end,
            "cause": pd.Categorical.from_codes(found.cause, pd.Index(CAUSES)),
            "kind": pd.Categorical.from_codes(found.source, pd.Index(EVIDENCE)),
            "name": pd.Categorical.from_codes(number[code], pd.Index(distinct, dtype="str")),
            "row": found.source_row,
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
#: Gaps judged together; bounds memory.
_CHUNK = 200_000


def _rules(data_loading: str) -> str:
    """Names the rules in force in a cache."""
    return hashlib.blake2b(data_loading.encode(), digest_size=8).hexdigest()


def _found(trace: Trace, min_ns: int, data_loading: str) -> Gaps:
    """The gaps of a trace, selected or whole, with their causes."""
    columns = [f.name for f in dataclasses.fields(Gaps)]
    whole = trace.whole
    frame = whole.derived(f"gaps-{_rules(data_loading)}", lambda: _decide(whole, data_loading))
    keep = frame["end"].to_numpy() - frame["start"].to_numpy() >= min_ns
    if trace is not trace.whole:
        keep &= _selected(trace, frame)
    return Gaps(*(frame[n].to_numpy() if keep.all() else frame[n].to_numpy()[keep] for n in columns))


def _decide(whole: Trace, data_loading: str) -> pd.DataFrame:
    whole.prefetch(_COLUMNS)
    ops = gpu_intervals(whole)
    gaps = idle_gaps(whole, ops)
    after = gaps["after"].to_numpy()
    table, row = ops["table"].to_numpy(), ops["row"].to_numpy()
    # In start order the operation before `after` is the one that the device was fed just before.
    before_table, before_row = table[after - 1], row[after - 1]
    n = len(gaps)
    found = Gaps(
        device=gaps["device"].to_numpy(),
        start=gaps["start_ns"].to_numpy(),
        end=gaps["end_ns"].to_numpy(),
        table=table[after],
        row=row[after],
        launch=np.full(n, -1, np.int32),
        cause=np.full(n, UNDECIDED, np.int8),
        source=np.zeros(n, np.int8),
        source_row=np.full(n, -1, np.int32),
    )
    del ops, gaps, after, table, row
    of_threads, elsewhere = Threads(whole, data_loading), Elsewhere(whole)
    for low in range(0, n, _CHUNK):
        part = slice(low, low + _CHUNK)
        chunk = found.some(part)
        chunk.launch[:] = launches_of(whole, chunk.table, chunk.row)
        fed_by = np.full(len(chunk.launch), -1, np.int64)
        if of_threads.several:
            before = launches_of(whole, before_table[part], before_row[part])
            known = before >= 0
            fed_by[known] = whole.table("calls", ["thread"])["thread"].to_numpy()[before[known]]
        for at, group in groups(whole, chunk, fed_by, of_threads, elsewhere):
            decide(group)
            chunk.cause[at], chunk.source[at] = group.gaps.cause, group.gaps.source
            chunk.source_row[at] = group.gaps.source_row
    return pd.DataFrame({f.name: getattr(found, f.name) for f in dataclasses.fields(Gaps)}, copy=False)


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


def _span(trace: Trace) -> int:
    return sum(last - first for first, last in _bounds(trace).values())


def _selected(trace: Trace, gaps: pd.DataFrame) -> Bool:
    """Of a filtered trace: gaps that end with a selected operation, but not with the first one of its device."""
    table, row = gaps["table"].to_numpy(), gaps["row"].to_numpy()
    keep = np.ones(len(gaps), bool)
    for number, name in enumerate(GPU_TABLES):
        mask = trace.mask(name)
        if mask is not None:
            of_table = np.flatnonzero(table == number)
            keep[of_table] = mask[row[of_table]]
    for device, (first, _) in _bounds(trace).items():
        keep &= (gaps["device"].to_numpy() != device) | (gaps["end"].to_numpy() > first)
    return keep
