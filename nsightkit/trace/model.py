"""The Trace: one model for all tools.

A :class:`Trace` holds columnar tables. Nothing is read until an analysis asks for it, and then only the
columns it asks for: a 650 MB export of which two columns are needed costs two columns.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gc
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, Protocol, Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pandas as pd
from pandas.api.types import is_integer_dtype, is_string_dtype

from nsightkit.errors import TraceError, reading
from nsightkit.text import Json, read_toml

#: Pandas dtype of every column of every table. ``tables.toml`` says what each holds.
TABLES: dict[str, dict[str, str]] = {}
_MODEL = read_toml(__file__, "tables")
# A table has the columns of its kind of rows (`gpu` or `cpu`), then its own.
for _table, _columns in _MODEL["tables"].items():
    TABLES[_table] = _MODEL["rows"][_columns.pop("rows")] | _columns
#: What people call a table, by its name, where that is another word.
_WORDS: dict[str, str] = _MODEL["words"]

#: Tables of events. Samples and stacks are not events: no trace starts at one, and none lacks them.
EVENT_TABLES = tuple(table for table in TABLES if table not in ("samples", "frames"))

#: Tables whose rows ran on a GPU and make it busy.
GPU_TABLES = ("kernels", "memops", "graphs")

#: Names of CUDA and HIP calls that give a GPU work: launches, copies and memsets.
LAUNCHES = re.compile(r"Launch(?!HostFunc)|^(cuda|hip|cu)(Memcpy|Memset)")

#: Below this, reading a trace again is quicker than looking for a cache.
CACHE_FROM_BYTES = 32_000_000

#: Columns of times, which are on the trace's clock.
TIME_COLUMNS = ("start_ns", "end_ns")

_Ints = npt.NDArray[np.int64]
_Threads = TypeVar("_Threads", int, _Ints)
_Options = ParamSpec("_Options")
_Answer = TypeVar("_Answer")


def table_words(tables: Iterable[str]) -> list[str]:
    """Return the words that people use for tables, such as "CUDA calls" for ``calls``."""
    return [_WORDS.get(table, table) for table in tables]


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU as the source describes it; a field that the source lacks is None."""

    device: int
    name: str | None = None
    compute_capability: str | None = None


def lost_work(names: pd.Series[Any] | pd.Categorical[Any]) -> list[str]:
    """Note that a capture that holds no work of a GPU lost it, if its calls launched some.

    Parameters
    ----------
    names : Series or Categorical
        Names of all calls of the capture, as categories.

    Returns
    -------
    list of str
        One note, none if no call launched anything.
    """
    launches = sum(int(calls) for name, calls in names.value_counts().items() if LAUNCHES.search(str(name)))
    if not launches:
        return []
    loss = f"{launches:,} calls launched work on a GPU, but the trace holds none of it"
    return [f"{loss}: the profiler was stopped before the GPU was done, or was not permitted to record it."]


@dataclasses.dataclass
class TraceMeta:
    """What is known about the capture itself.

    ``missing`` names the tables that were *not recorded* (as opposed to recorded and empty), and ``MPI`` where a
    launcher of MPI started the program and its calls were not traced;
    ``notes`` are remarks on data quality, one sentence each. ``private`` maps names and secrets that the file holds
    to what each is (``user``, ``host``, ``secret``), for :mod:`nsightkit.trace.clean` to find them in other texts. It
    is never shown or written.
    """

    tool: str = "unknown"
    tool_version: str | None = None
    schema: str | None = None
    gpus: list[Gpu] = dataclasses.field(default_factory=list)
    missing: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    #: start and end of the captured window on the source's clock, where the source says
    window_ns: tuple[int, int] | None = None
    #: {thread: name}
    thread_names: dict[int, str] = dataclasses.field(default_factory=dict)
    #: rank and world size of a distributed job, backend …: as the source has them
    distributed: Json = dataclasses.field(default_factory=dict)
    private: dict[str, str] = dataclasses.field(default_factory=dict, repr=False)


class Source(Protocol):
    """What a reader provides. Times are on the source's own clock; the Trace moves them to its own."""

    meta: TraceMeta

    def read(self, table: str, columns: Sequence[str]) -> pd.DataFrame:
        """Read columns of one table, named as in :data:`TABLES`; always the same rows in the same order.

        A table that was not recorded has no rows, and a column that is unknown has its neutral value.
        """

    def first_ns(self) -> int:
        """Return the start of the earliest event of any table in :data:`EVENT_TABLES`, on the source's clock.

        0 without events.
        """


class Trace:
    """A captured run as columnar tables.

    Use :func:`nsightkit.load` to make one. ``trace["kernels"]`` is a whole table; :meth:`table` reads selected columns.
    All times are integer nanoseconds since the trace's first event; ``t0_ns`` is that event's time on the source's
    clock, so ``start_ns + t0_ns`` is what the nsys GUI shows. Rows keep the source's order, which is not time
    order. A trace may be a selection (:meth:`masked`): of another trace, its ``whole``, it keeps some rows.

    Parameters
    ----------
    source : Source
        A reader.
    path : str, optional
        Where it came from, for messages.
    """

    def __init__(self, source: Source, path: str | None = None) -> None:
        _check_meta(path, source.meta)
        self._source = source
        self.path = path
        #: columns read so far by table and name; of a selection, copies of its rows
        self._loaded_columns: dict[str, dict[str, pd.Series]] = collections.defaultdict(dict)
        #: tables whose times have been moved to the trace's clock; the others' are on the source's until asked for
        self._tables_on_clock: set[str] = set()
        #: of a selection, by table, which rows of the whole trace it keeps (:meth:`masked`)
        self._masks: dict[str, np.ndarray] = {}
        # None rather than `self`: a reference to itself would keep all tables in memory until garbage collection.
        self._selected_from: Trace | None = None
        #: what analyses derived from the whole trace and will need again
        self.memo: dict[Any, Any] = {}

    @classmethod
    def from_frames(
        cls, frames: dict[str, pd.DataFrame], meta: TraceMeta | None = None, path: str | None = None
    ) -> Self:
        """Make a trace of tables in memory; absent columns are filled with their neutral value.

        Parameters
        ----------
        frames : dict of str to DataFrame
            Keys and columns as in :data:`TABLES`.
        meta : TraceMeta, optional
        path : str, optional
        """
        return cls(FrameSource(frames, meta), path)

    @classmethod
    def of(cls, other: Trace) -> Self:
        """Make a trace of this class that reads the same source as another trace.

        Parameters
        ----------
        other : Trace
            Without a selection.
        """
        return cls(other._source, other.path)

    @property
    def meta(self) -> TraceMeta:
        """What is known about the capture."""
        return self._source.meta

    @property
    def whole(self) -> Trace:
        """The trace this one was selected from; itself when nothing was filtered."""
        if self._selected_from is None:
            return self
        return self._selected_from

    @functools.cached_property
    def t0_ns(self) -> int:
        """The trace's time zero on the source's clock."""
        with reading(self.path):
            return _checked_first_ns(self.path, self._source.first_ns())

    def size(self, table: str) -> int:
        """Count the rows of a table.

        Parameters
        ----------
        table : str
            A key of :data:`TABLES`.
        """
        mask = self._masks.get(table)
        if mask is not None:
            return int(mask.sum())
        self.prefetch({table: TIME_COLUMNS})  # every table has them, and most analyses read them next
        return len(self.whole._loaded_columns[table]["start_ns"])

    def recorded(self, table: str) -> bool:
        """Whether the source recorded this table (an empty recorded table says "none happened").

        Parameters
        ----------
        table : str
        """
        return table not in self.meta.missing

    def thread_names(self) -> dict[int, str]:
        """Return the names of the threads that have a row in some table.

        Nsight Systems lists the threads of every process on the machine; a trace that is passed on should not.

        Returns
        -------
        dict of int to str
        """
        active_threads: set[int] = set()
        for table, columns in TABLES.items():
            if "thread" in columns:
                active_threads.update(self.table(table, ["thread"])["thread"].unique().tolist())
        return {thread: name for thread, name in self.meta.thread_names.items() if thread in active_threads}

    def table(self, name: str, columns: Iterable[str] | None = None) -> pd.DataFrame:
        """Read selected columns of one table.

        Parameters
        ----------
        name : str
            A key of :data:`TABLES`.
        columns : iterable of str, optional
            Keys of ``TABLES[name]``, or ``duration_ns``; all columns but the latter when omitted.

        Returns
        -------
        DataFrame
            One row per event, default integer index, in the source's order. The caller may change it: pandas copies
            on write.
        """
        wanted = list(TABLES[name]) if columns is None else list(columns)
        stored = _with_both_times(wanted)
        self.prefetch({name: stored})
        # Times move to the trace's clock when somebody asks for them; durations are the same on both clocks. Columns of
        # a selection are copies, so the whole trace's times move before they are copied.
        if name in self._masks or not set(TIME_COLUMNS).isdisjoint(wanted):
            self.whole._put_on_clock(name)
        columns_of_whole = self.whole._loaded_columns[name]
        held = columns_of_whole
        if name in self._masks:
            held = self._loaded_columns[name]
            for column in stored:
                if column not in held:
                    held[column] = columns_of_whole[column][self._masks[name]].reset_index(drop=True)
        frame = {}
        for column in wanted:
            frame[column] = held["end_ns"] - held["start_ns"] if column == "duration_ns" else held[column]
        return pd.DataFrame(frame, copy=False)

    def prefetch(self, wanted: Mapping[str, Iterable[str]]) -> None:
        """Read columns of several tables at once, each table in one pass.

        It only saves time: :meth:`table` reads what it needs, but each call is another pass over a big export's table.

        Parameters
        ----------
        wanted : mapping of str to iterable of str
            Columns of each table.
        """
        whole = self.whole  # a selected trace takes its rows from the columns that the whole one holds
        for name, columns in wanted.items():
            loaded = whole._loaded_columns[name]
            dtypes = {column: TABLES[name][column] for column in _with_both_times(columns) if column not in loaded}
            if dtypes:
                with reading(self.path):
                    frame = whole._source.read(name, list(dtypes))
                loaded.update(_checked_source_columns(self.path, name, frame, dtypes, loaded))

    def _put_on_clock(self, name: str) -> None:
        """Move a table's times, once they have been read, from the source's clock to the trace's.

        Not before they are asked for: to find its first event, a source looks through all its tables.
        """
        columns = self._loaded_columns[name]
        if name in self._tables_on_clock or "start_ns" not in columns:
            return
        if len(columns["start_ns"]):
            columns |= _on_trace_clock(self.path, name, columns, self.t0_ns)
        self._tables_on_clock.add(name)

    def mask(self, table: str) -> np.ndarray | None:
        """Return which rows of the whole table this selection keeps; None when it keeps all.

        Parameters
        ----------
        table : str
        """
        return self._masks.get(table)

    def masked(self, masks: dict[str, np.ndarray]) -> Self:
        """Select some rows of some tables of the whole trace, whatever this one selects of it.

        Parameters
        ----------
        masks : dict of str to ndarray of bool
            By table, one flag per row of the whole table; tables not named stay whole.
        """
        selection = type(self)(self._source, self.path)
        selection._selected_from = self.whole
        selection._masks = dict(masks)
        return selection

    def __getitem__(self, name: str) -> pd.DataFrame:
        return self.table(name)

    def __repr__(self) -> str:
        return f"<Trace {self.path or ''} by {self.meta.tool} {self.meta.tool_version or ''}>"


class FrameSource:
    """A source of tables in memory (decoded JSON, tests, recordings)."""

    def __init__(self, frames: dict[str, pd.DataFrame], meta: TraceMeta | None = None) -> None:
        self.meta = meta or TraceMeta()
        self._frames = frames

    def read(self, table: str, columns: Sequence[str]) -> pd.DataFrame:
        """See :class:`Source`."""
        return complete(table, self._frames.get(table), columns)

    def first_ns(self) -> int:
        """See :class:`Source`."""
        frames = [self._frames.get(table) for table in EVENT_TABLES]
        starts = [int(frame["start_ns"].min()) for frame in frames if frame is not None and len(frame)]
        return min(starts, default=0)


def _with_both_times(columns: Iterable[str]) -> list[str]:
    """List the columns that a source is asked for: starts and ends together, as they are checked against each other."""
    stored: list[str] = []
    for column in columns:
        stored += TIME_COLUMNS if column in ("duration_ns", *TIME_COLUMNS) else (column,)
    return list(dict.fromkeys(stored))  # each once


def capability(major: int | None, minor: int | None) -> str | None:
    """Write a compute capability, such as ``8.0``; None if it is unknown, as where the major version is 0.

    Parameters
    ----------
    major, minor : int, optional
    """
    if major and minor is not None:
        return f"{major}.{minor}"
    return None


def process_of(thread: _Threads) -> _Threads:
    """Return the process id of each thread: the thread's number without its lower 24 bits.

    Parameters
    ----------
    thread : int, ndarray or Series of int
    """
    return thread >> 24


def categorical(codes: np.ndarray, texts: Sequence[str]) -> pd.Categorical:
    """Make a categorical column of codes and texts. Equal texts become one category; unused texts are dropped.

    Parameters
    ----------
    codes : ndarray of int
        For each row, the position of its text. No code may be negative: a missing text is the text "".
    texts : sequence of str
    """
    is_used = np.zeros(len(texts), bool)
    is_used[codes] = True
    category_of_text = np.zeros(len(texts), np.int32)
    category_of_text[is_used], categories = pd.factorize(np.array(texts, object)[is_used])
    # Named dtype: an empty list would give another one, and categories of two dtypes do not join.
    return pd.Categorical.from_codes(category_of_text[codes], pd.Index(categories, dtype="str"))


#: What fills a column of numbers that a source lacks, where it is not 0: -1 stands for "none".
NEUTRAL = {"parent": -1, "sequence": -1, "forward_thread": -1}


def complete(table: str, frame: pd.DataFrame | None = None, columns: Iterable[str] | None = None) -> pd.DataFrame:
    """Return a table with the trace model's columns; absent ones get their neutral value.

    Times have no neutral value and stay absent, unless there are no rows.

    Parameters
    ----------
    table : str
        A key of :data:`TABLES`.
    frame : DataFrame, optional
        What the source has; no rows when omitted.
    columns : iterable of str, optional
        Only these, instead of all of the table's.
    """
    present = pd.DataFrame() if frame is None else frame.reset_index(drop=True)
    row_count = len(present)
    completed: Json = {}
    for column in TABLES[table] if columns is None else columns:
        dtype = TABLES[table][column]
        if column in present:
            completed[column] = _converted(present[column], dtype)
        elif column == "end_thread" and "thread" in present:  # most ranges end on the thread on which they start
            completed[column] = present["thread"]
        elif dtype == "category":
            completed[column] = categorical(np.zeros(row_count, np.int8), [""])
        elif column not in TIME_COLUMNS or not row_count:
            completed[column] = np.full(row_count, NEUTRAL.get(column, 0), dtype)
    return pd.DataFrame(completed, pd.RangeIndex(row_count), copy=False)


# ---------------------------------------------------------------- for readers and analyses


def memoised(function: Callable[_Options, _Answer]) -> Callable[_Options, _Answer]:
    """Memoise a function's results, in the object that is its first argument; treat the results as read-only.

    Parameters
    ----------
    function : callable
        Its first argument, such as a trace, has a dict ``memo``; the others can be hashed.
    """

    @functools.wraps(function)
    def remembered(*options: _Options.args, **named: _Options.kwargs) -> _Answer:
        owner: Any = options[0]  # its `memo` holds the results, so they are freed with it
        key = (function.__module__, function.__qualname__, options[1:], tuple(named.items()))
        if key not in owner.memo:
            owner.memo[key] = function(*options, **named)
        result: _Answer = owner.memo[key]
        return result

    return remembered


def is_large(path: Path) -> bool:
    """Whether a trace is so large that reading it again takes longer than looking for a cache.

    Parameters
    ----------
    path : Path
    """
    return path.stat().st_size >= CACHE_FROM_BYTES


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Switch the garbage collector off while millions of containers are made: it would look for cycles in vain."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def nesting(
    thread: npt.ArrayLike,
    start: npt.ArrayLike,
    end: npt.ArrayLike,
    tolerance: int = 0,
    alone: npt.NDArray[np.bool_] | bool = False,
) -> tuple[npt.NDArray[np.int32], _Ints]:
    """Find the depth and the enclosing interval of each interval, among those of its thread.

    The parent of an interval is the innermost one on its thread that began no later and is still open
    until its end. Equal intervals nest in row order. Intervals that cross (which push/pop ranges cannot)
    are siblings, and what begins after the crossing belongs to the later one.

    Parameters
    ----------
    thread : array-like of int, shape (n,)
        Intervals nest only within one value of it.
    start, end : array-like of int, shape (n,)
        In any order; ``end >= start``.
    tolerance : int, default 0
        By how much, in the unit of `start`, a child may outlive its parent and still count as nested: traces
        with times rounded to microseconds need 1000 ns.
    alone : ndarray of bool, shape (n,), default False
        Intervals without parent and children, such as NVTX's start/end ranges.

    Returns
    -------
    level : ndarray of int32, shape (n,)
        0 for an outermost interval.
    parent : ndarray of int64, shape (n,)
        Row of the enclosing interval, -1 for none.
    """
    # An interval that stands alone gets a thread of its own, with a number from the lowest int64 on: no thread has it.
    own_thread = np.iinfo(np.int64).min + np.arange(np.size(thread))
    thread = np.where(alone, own_thread, np.asarray(thread, dtype=np.int64))
    start = np.asarray(start, dtype=np.int64)
    end = np.asarray(end, dtype=np.int64)
    # By thread, then start; of equal starts the longest first, as it holds the others.
    order = np.lexsort((-end, start, thread))
    enclosing = _previous_reaching(thread[order], start[order], end[order], tolerance)

    # Position 0 is the root of everything, position k + 1 the k-th interval in sorted order. Count the hops from each
    # to the root by pointer doubling: `hops` is how many lead to `ancestor`, and each round adds those from there on.
    # The number of rounds is logarithmic in the deepest level.
    hops = np.ones(len(enclosing), np.int32)
    hops[0] = 0
    ancestor = enclosing
    while (hops_from_ancestor := hops[ancestor]).any():
        hops += hops_from_ancestor
        ancestor = ancestor[ancestor]

    # From positions back to rows: position 0 is no parent (-1), position k + 1 is row order[k].
    row_at = np.concatenate(([-1], order))
    parent = np.empty(len(start), np.int64)
    level = np.empty(len(start), np.int32)
    parent[order] = row_at[enclosing[1:]]
    level[order] = hops[1:] - 1
    return level, parent


def _previous_reaching(thread: _Ints, start: _Ints, end: _Ints, tolerance: int) -> _Ints:
    """Find for each sorted interval the nearest earlier one on its thread that is open until its end.

    Returns positions, 1 for the first interval and 0 for none; position 0 itself holds 0.

    Everything between an interval and its candidate ends before the interval's own end, so when a candidate does
    not reach, its own candidate is the next to try, settled or not: runs of siblings are skipped in doubling steps.
    """
    end_at = np.concatenate(([np.iinfo(np.int64).max], end))  # by position: "none" encloses everything
    # The enclosing interval lasts until this one's end, less the tolerance, and in any case beyond its start: without
    # that, what begins when a range ends and is shorter than the tolerance would count as inside that range.
    least_end = np.maximum(end - tolerance, start + (end > start))
    candidate = np.arange(-1, len(start)).clip(0)  # at first the position before
    candidate[2:][thread[1:] != thread[:-1]] = 0  # none for the first interval of a thread
    unsettled = np.flatnonzero(end_at[candidate[1:]] < least_end) + 1
    while len(unsettled):
        next_candidate = candidate[candidate[unsettled]]
        candidate[unsettled] = next_candidate
        unsettled = unsettled[end_at[next_candidate] < least_end[unsettled - 1]]
    return candidate


# ---------------------------------------------------------------- the boundary

# Every column, the clock and the capture's description are checked once, on their way in. Behind it analyses add times,
# follow parents and join threads without looking. A source that gives anything else than the trace model says, such as
# a damaged file or a wrong frame, ends in an error that names file, table and column.

_Columns = dict[str, pd.Series]
_REMEDY = "export or convert the original trace again"

#: Bound of the times of a source, ns: half of what 64 bits hold, so that one can be subtracted from another.
_TIME_LIMIT_NS = 1 << 62
#: Bound of the times of a trace, counted from its first event, ns: 104 days. A thousand of them add up in 64 bits.
_SPAN_NS = 1 << 53
#: Bound of the sum of a column: a quarter of what 64 bits hold, so that several can be added.
_SUM_LIMIT = 1 << 61

#: The lowest value that these columns may hold; -1 stands for "none".
_LOWEST = {"device": -1, "level": 0, "parent": -1, "bytes": 0}
#: Distinct devices of a trace. The largest machines that one process sees have 72.
_MOST_DEVICES = 1_024
#: Columns whose values are lower than the table's number of rows: rows of the table, or depths of nesting in it.
_BELOW_ROW_COUNT = ("parent", "level")


def _checked_source_columns(
    path: str | None, table: str, frame: pd.DataFrame, dtypes: Mapping[str, str], loaded: Mapping[str, pd.Series]
) -> _Columns:
    """Check columns that a source gave, and return them with the trace model's dtypes.

    Parameters
    ----------
    path : str or None
        Of the trace, for error messages.
    table : str
    frame : DataFrame
        What the source gave. Its columns are taken out one by one, so that memory holds each once.
    dtypes : mapping of str to str
        The columns that were asked for, with the trace model's dtype of each; of the times, both or none.
    loaded : mapping of str to Series
        The table's columns that the trace holds already.

    Returns
    -------
    dict of str to Series

    Raises
    ------
    TraceError
        A column is absent, or holds what the trace model does not allow.
    """
    # All columns of a table have the same length: that of one in the trace already, or else that of the frame.
    size = len(next(iter(loaded.values()), frame))
    columns: _Columns = {}
    for column, dtype in dtypes.items():
        if column not in frame:
            raise TraceError(path or "trace", f"lacks the column {table}.{column}", _REMEDY)
        values = _converted(frame.pop(column), dtype)
        _refuse_if(path, table, column, _problem_of_column(column, values, dtype, size))
        columns[column] = values
    if size and "end_ns" in columns:
        _refuse_if(path, table, "end_ns", _problem_of_durations(columns["start_ns"], columns["end_ns"]))
    return columns


def _on_trace_clock(path: str | None, table: str, columns: Mapping[str, pd.Series], t0_ns: int) -> _Columns:
    """Return a table's times, moved from the source's clock to the trace's.

    Parameters
    ----------
    path : str or None
    table : str
    columns : mapping of str to Series
        Checked, with at least one row.
    t0_ns : int
        The trace's time zero on the source's clock.

    Raises
    ------
    TraceError
        A time is too far from the trace's first event.
    """
    for column in TIME_COLUMNS:
        times = columns[column]
        if int(times.min()) - t0_ns < -_SPAN_NS or int(times.max()) - t0_ns > _SPAN_NS:
            _refuse_if(path, table, column, "is over 100 days from the trace's first event")
    return {column: columns[column] - t0_ns for column in TIME_COLUMNS}


def _converted(values: pd.Series, dtype: str) -> pd.Series:
    """Convert values to the trace model's dtype where that loses nothing; return any others as they are.

    Without rows any dtype is converted.

    Parameters
    ----------
    values : Series
    dtype : str
        ``int32``, ``int64``, ``bool`` or ``category``.
    """
    if dtype == "category":
        return _as_categorical(values)
    if values.dtype == dtype or (len(values) and not is_integer_dtype(values)):
        return values
    with contextlib.suppress(TypeError, ValueError):  # missing values
        numbers = values.astype(np.dtype(dtype))
        if (numbers == values).all():
            return numbers
    return values


def _checked_first_ns(path: str | None, moment_ns: int) -> int:
    """Return the start of a source's first event, checked.

    Parameters
    ----------
    path : str or None
    moment_ns : int
    """
    number: object = moment_ns  # what a damaged file says may be anything
    if not isinstance(number, int) or abs(moment_ns) >= _TIME_LIMIT_NS:
        raise TraceError(path or "trace", f"begins at an impossible time ({moment_ns} ns)", _REMEDY)
    return moment_ns


def _check_meta(path: str | None, meta: Any) -> None:
    """Check what a source says about the capture.

    Parameters
    ----------
    path : str or None
    meta : TraceMeta

    Raises
    ------
    TraceError
        A field has another type than the trace model's, is not valid text, or is impossible: a capture that ends
        before it begins, a missing table that the trace model does not have.
    """
    try:
        # Conversion back from plain values checks every type, and encoding that each text is valid Unicode. Bytes stay
        # bytes, which no field may hold: msgspec would make text of them.
        plain = msgspec.to_builtins(meta, str_keys=True, builtin_types=(bytes,))
        msgspec.convert(plain, type(meta), str_keys=True)
        msgspec.json.encode(plain)
        begin, end = meta.window_ns or (0, 0)
        if not -_TIME_LIMIT_NS < begin <= end < _TIME_LIMIT_NS:
            raise ValueError(f"the capture runs from {begin} to {end} ns")
        # "MPI" is no table, but a reader may say so that the calls of MPI, which are rows of `ops`, were not traced.
        for table in set(meta.missing).difference(TABLES, ["MPI"]):
            raise ValueError(f"there is no table {table!r}")
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TraceError(path or "trace", f"describes its capture wrongly ({error})", _REMEDY) from error


def _as_categorical(values: pd.Series) -> pd.Series:
    """Convert texts to a categorical with categories of pandas's dtype `str`; return any other values as they are.

    Without rows any dtype will do: pandas cannot tell an empty column of texts from one of objects. Texts that are not
    valid Unicode stay, for :func:`_problem_of_texts` to refuse with the file's name.
    """
    if not len(values):
        return pd.Series(pd.Categorical([], pd.Index([], dtype="str")))
    if not isinstance(values.dtype, pd.CategoricalDtype):
        if not is_string_dtype(values):
            return values
        values = values.astype("category")
    texts = values.cat.categories
    if texts.dtype != "str" and is_string_dtype(texts):
        with contextlib.suppress(UnicodeError):
            return values.cat.rename_categories(list(texts.astype("str")))
    return values


def _refuse_if(path: str | None, table: str, column: str, problem: str | None) -> None:
    """Raise a TraceError that names the column, if it has a problem."""
    if problem:
        raise TraceError(path or "trace", f"has a column {table}.{column} that {problem}", _REMEDY)


def _problem_of_column(column: str, values: pd.Series, dtype: str, size: int) -> str | None:
    """Describe what is wrong with a column of `size` rows; None if nothing is."""
    if values.dtype != dtype:
        return f"holds {values.dtype} where {dtype} is expected"
    if len(values) != size:
        return f"has {len(values):,} rows where the others have {size:,}"
    if not size or dtype == "bool":
        return None
    if dtype == "category":
        return _problem_of_texts(values.array)
    if column in TIME_COLUMNS:
        is_time = values.min() > -_TIME_LIMIT_NS and values.max() < _TIME_LIMIT_NS
        return None if is_time else "is outside the range of times"
    if column in _LOWEST:
        return _problem_of_numbers(column, values.to_numpy())
    return None


def _problem_of_numbers(column: str, numbers: npt.NDArray[Any]) -> str | None:
    """Describe what is wrong with a column of device numbers, nesting levels, parent rows or bytes; None if nothing is.

    A damaged or forged file may hold any integer, and analyses use these as indices and add them up.
    """
    low = int(numbers.min())
    high = int(numbers.max())
    if low < _LOWEST[column]:
        return f"holds {low}, less than {_LOWEST[column]}"
    # Device numbers may have gaps. Only where the highest makes it possible that there are too many, count them.
    if column == "device" and high >= _MOST_DEVICES and len(np.unique(numbers)) > _MOST_DEVICES:
        return f"names more than {_MOST_DEVICES:,} devices"
    if column in _BELOW_ROW_COUNT and high >= len(numbers):
        return f"holds {high}, in a table of {len(numbers):,} rows"
    if column == "parent" and _has_parent_cycle(numbers):
        return "goes in a circle"
    if column == "bytes" and numbers.sum(dtype=np.float64) >= _SUM_LIMIT:
        return "adds up to more than 64 bits hold"
    return None


def _problem_of_texts(values: Any) -> str | None:
    """Describe what is wrong with a categorical column; None if nothing is."""
    codes = values.codes
    texts = values.categories
    if codes.min() < 0:
        return "has missing values"
    if codes.max() >= len(texts):
        return f"refers to text {codes.max()} of {len(texts):,}"
    if not is_string_dtype(texts):
        return "holds something else than text"
    try:
        "".join(texts).encode()
    except UnicodeError:
        return "holds text that is not valid Unicode"
    return None


def _problem_of_durations(starts: pd.Series, ends: pd.Series) -> str | None:
    """Describe what is wrong with the starts and ends of a table's events; None if nothing is."""
    start = starts.to_numpy()
    end = ends.to_numpy()
    ends_before_start = end < start
    if ends_before_start.any():
        count = int(ends_before_start.sum())
        return f"is before start_ns in {count:,} rows, first in row {int(ends_before_start.argmax())}"
    if end.sum(dtype=np.float64) - start.sum(dtype=np.float64) >= _SUM_LIMIT:
        return "makes durations that add up to more than 64 bits hold"
    return None


def _has_parent_cycle(parent: npt.NDArray[np.int64]) -> bool:
    """Whether following the parents of some row never ends."""
    ancestor = np.append(parent, -1)  # index -1 reads this last entry, so that -1 (no parent) stays -1
    # After k rounds `ancestor` leads 2**k parents up. No chain of parents is longer than the table.
    for _ in range(len(parent).bit_length()):
        if (ancestor < 0).all():
            return False
        ancestor = ancestor[ancestor]
    return bool((ancestor >= 0).any())


# ---------------------------------------------------------------- personal names

#: Environment variables and properties whose values name a user or a host.
_NAMING_VARIABLES = {
    **dict.fromkeys(["EXPORT_USER", "USER", "LOGNAME", "USERNAME", "SUDO_USER", "SLURM_JOB_USER"], "user"),
    **dict.fromkeys(["HOSTNAME", "COMPUTERNAME", "SLURMD_NODENAME", "SLURM_SUBMIT_HOST"], "host"),
}

#: Names that mean a secret, whatever the value.
SENSITIVE_NAMES = (
    r"(?:pass(?:word|wd|phrase)|passwd|secret|api[_-]?key|(?:access|private|account|secret|signing)[_-]?key|credentials?"
    r"|(?:auth|access|refresh|api)[_-]?token|authorization)(?:[_-]?(?:id|value))?"
)

SECRET_VARIABLE = re.compile(rf"[\w.-]*(?:{SENSITIVE_NAMES}|token)", re.IGNORECASE)

#: Users, hosts and secrets that are not replaced: names of ranges and functions hold the same words, numbers and paths.
_ORDINARY = re.compile(
    r"(?:root|users?|admin|administrator|ubuntu|debian|guest|runner|jovyan|docker|default|local|localhost|localdomain"
    r"|train|training|tests?|models?|data|home|work|workspace|node|head|master|worker|server|host|login|compute|cluster"
    r"|batch|volta|ampere|hopper|tesla|grace|python|cuda|torch|\d+|.*[/\\ ].*)",
    re.IGNORECASE | re.DOTALL,
)

#: Letters that a text to replace has at least: shorter names occur inside words, and shorter secrets are words.
_LEAST_LETTERS = {"user": 4, "host": 4, "secret": 6}

#: The user who owns a home folder.
_HOME_OWNER = re.compile(r"(?:/home|/Users|\\Users|:/Users)[/\\]+([\w.-]+)")


def private_names(pairs: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Pick personal names and secrets from environment variables and properties.

    Parameters
    ----------
    pairs : iterable of (str, object)
        Names and values. A path below a home folder names its owner.

    Returns
    -------
    dict of str to str
        As :class:`nsightkit.trace.clean.TextCleaner` takes it, without short and ordinary words.
    """
    private: dict[str, str] = {}
    for name, value in pairs:
        text = str(value).strip().strip("\"'")
        for owner in _HOME_OWNER.findall(text):
            _add_private(private, owner, "user")
        if SECRET_VARIABLE.fullmatch(name):
            _add_private(private, text, "secret")
        elif name.upper() in _NAMING_VARIABLES:
            kind = _NAMING_VARIABLES[name.upper()]
            _add_private(private, text, kind)
            if kind == "host":
                _add_private(private, text.partition(".")[0], kind)  # the host without its domain
    return private


def _add_private(private: dict[str, str], text: str, kind: str) -> None:
    """Add a name or a secret, unless it is too short or an ordinary word."""
    if len(text) >= _LEAST_LETTERS[kind] and not _ORDINARY.fullmatch(text):
        private[text] = kind
