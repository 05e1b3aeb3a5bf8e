"""The boundary of a Trace: every column, the clock and the capture's description are checked once, on their way in.

Behind it analyses add times, follow parents and join threads without looking. A source that gives anything else than
the model says, such as a damaged file or a wrong frame, ends in an error that names file, table and column.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pandas as pd
from pandas.api.types import is_integer_dtype, is_string_dtype

from nsightkit.errors import TraceError

__all__ = ["admitted", "check_meta", "converted", "on_clock", "on_trace_clock"]

_Columns = dict[str, pd.Series]
_REMEDY = "export or convert the original trace again"

#: Times of a source, ns: half of what fits in 64 bits, so that they can be subtracted.
_LIMIT_NS = 1 << 62
#: Times of a trace, counted from its first event, ns: 104 days, so that sums of thousands of them are exact.
_SPAN_NS = 1 << 53
#: Sums of a column, so that several can be added.
_LIMIT_SUM = 1 << 61

#: The least value of columns that are not any number.
_LEAST = {"device": -1, "level": 0, "parent": -1, "bytes": 0}
#: Devices of a trace. The largest machines that one process sees have 72.
_MOST_DEVICES = 1_024
_TIMES = {"start_ns", "end_ns"}
#: Columns of row numbers in the same table, or of depths in it.
_ROWS = ("parent", "level")


def admitted(
    path: str | None, table: str, frame: pd.DataFrame, dtypes: Mapping[str, str], known: Mapping[str, pd.Series]
) -> _Columns:
    """Check columns that a source gave.

    Parameters
    ----------
    path : str or None
        Of the trace, for the message.
    table : str
    frame : DataFrame
        What the source gave. Its columns are taken out one by one, so that memory holds each once.
    dtypes : mapping of str to str
        The columns that were asked for, with the model's dtype of each; of the times, both or none.
    known : mapping of str to Series
        The table's columns that the trace holds already.

    Returns
    -------
    dict of str to Series

    Raises
    ------
    TraceError
        A column is absent, or holds what the model does not allow.
    """
    size = len(next(iter(known.values()), frame))
    columns: _Columns = {}
    for column, dtype in dtypes.items():
        if column not in frame:
            raise TraceError(path or "trace", f"lacks the column {table}.{column}", _REMEDY)
        values = converted(frame.pop(column), dtype)
        _refuse(path, table, column, _problem(column, values, dtype, size))
        columns[column] = values
    if size and "end_ns" in columns:
        _refuse(path, table, "end_ns", _problem_of_durations(columns["start_ns"], columns["end_ns"]))
    return columns


def on_trace_clock(path: str | None, table: str, columns: Mapping[str, pd.Series], t0_ns: int) -> _Columns:
    """Move a table's times from the source's clock to the trace's.

    Parameters
    ----------
    path : str or None
    table : str
    columns : mapping of str to Series
        Admitted, with at least one row.
    t0_ns : int
        The trace's time zero on the source's clock.

    Raises
    ------
    TraceError
        A time is too far from the trace's first event.
    """
    for column in sorted(_TIMES):
        times = columns[column]
        if int(times.min()) - t0_ns < -_SPAN_NS or int(times.max()) - t0_ns > _SPAN_NS:
            _refuse(path, table, column, "is over 100 days from the trace's first event")
    return {column: columns[column] - t0_ns for column in _TIMES}


def converted(values: pd.Series, dtype: str) -> pd.Series:
    """Give values the model's dtype where that loses nothing; any others come back as they are.

    Parameters
    ----------
    values : Series
    dtype : str
        ``int32``, ``int64``, ``bool`` or ``category``.
    """
    if dtype == "category":
        return _texts(values)
    if values.dtype == dtype or (len(values) and not is_integer_dtype(values)):
        return values
    with contextlib.suppress(TypeError, ValueError):  # missing values
        numbers = values.astype(np.dtype(dtype))
        if (numbers == values).all():
            return numbers
    return values


def on_clock(path: str | None, moment_ns: int) -> int:
    """Check the start of a source's first event.

    Parameters
    ----------
    path : str or None
    moment_ns : int
    """
    number: object = moment_ns  # what a damaged file says may be anything
    if not isinstance(number, int) or abs(moment_ns) >= _LIMIT_NS:
        raise TraceError(path or "trace", f"begins at an impossible time ({moment_ns} ns)", _REMEDY)
    return moment_ns


def check_meta(path: str | None, meta: Any, tables: Collection[str]) -> None:
    """Check what a source says about the capture.

    Parameters
    ----------
    path : str or None
    meta : TraceMeta
    tables : collection of str
        The model's tables.

    Raises
    ------
    TraceError
        Something is of another type than the model has it, cannot be written as text, or cannot be.
    """
    try:
        plain = msgspec.to_builtins(meta, str_keys=True, builtin_types=(bytes,))
        msgspec.convert(plain, type(meta), str_keys=True)
        msgspec.json.encode(plain)
        begin, end = meta.window_ns or (0, 0)
        if not -_LIMIT_NS < begin <= end < _LIMIT_NS:
            raise ValueError(f"the capture runs from {begin} to {end} ns")
        for table in set(meta.missing).difference(tables, ["MPI"]):
            raise ValueError(f"there is no table {table!r}")
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TraceError(path or "trace", f"describes its capture wrongly ({error})", _REMEDY) from error


def _texts(values: pd.Series) -> pd.Series:
    """Texts as a categorical whose categories have the model's dtype; any other values as they are."""
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


def _refuse(path: str | None, table: str, column: str, problem: str | None) -> None:
    """Raise the error that a column with a problem is."""
    if problem:
        raise TraceError(path or "trace", f"has a column {table}.{column} that {problem}", _REMEDY)


def _problem(column: str, values: pd.Series, dtype: str, size: int) -> str | None:
    """Describe a value that the model allows in no table's column of that name."""
    if values.dtype != dtype:
        return f"holds {values.dtype} where {dtype} is expected"
    if len(values) != size:
        return f"has {len(values):,} rows where the others have {size:,}"
    if not size or dtype == "bool":
        return None
    if dtype == "category":
        return _problem_of_texts(values.array)
    if column in _TIMES:
        is_time = values.min() > -_LIMIT_NS and values.max() < _LIMIT_NS
        if is_time:
            return None
        return "is outside the range of times"
    if column in _LEAST:
        return _problem_of_numbers(column, values.to_numpy())
    return None


def _problem_of_numbers(column: str, numbers: npt.NDArray[Any]) -> str | None:
    """What is wrong with a column that does not hold just any numbers."""
    low = int(numbers.min())
    high = int(numbers.max())
    if low < _LEAST[column]:
        return f"holds {low}, less than {_LEAST[column]}"
    if column == "device" and high >= _MOST_DEVICES and len(np.unique(numbers)) > _MOST_DEVICES:
        return f"names more than {_MOST_DEVICES:,} devices"
    if column in _ROWS and high >= len(numbers):
        return f"holds {high}, in a table of {len(numbers):,} rows"
    if column == "parent" and _has_circle(numbers):
        return "goes in a circle"
    if column == "bytes" and numbers.sum(dtype=np.float64) >= _LIMIT_SUM:
        return "adds up to more than 64 bits hold"
    return None


def _problem_of_texts(values: Any) -> str | None:
    """What is wrong with a categorical column."""
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
    """What is wrong with starts and ends of the same events."""
    start = starts.to_numpy()
    end = ends.to_numpy()
    early = end < start
    if early.any():
        return f"is before start_ns in {int(early.sum()):,} rows, first in row {int(early.argmax())}"
    if end.sum(dtype=np.float64) - start.sum(dtype=np.float64) >= _LIMIT_SUM:
        return "makes durations that add up to more than 64 bits hold"
    return None


def _has_circle(parent: npt.NDArray[np.int64]) -> bool:
    """Whether following parents never ends for some row."""
    above = np.append(parent, -1)  # the last is the parent of -1
    # After k rounds `above` leads 2**k parents up. No chain is longer than the table.
    for _ in range(len(parent).bit_length()):
        if (above < 0).all():
            return False
        above = above[above]
    return bool((above >= 0).any())
