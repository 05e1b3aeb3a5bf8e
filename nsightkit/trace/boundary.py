"""The boundary of a Trace: columns, the clock and the capture's description are checked once, on their way in.

Behind it analyses add times, follow parents and join threads without looking. A source that gives anything else than
the model says, such as a damaged file or a wrong frame, ends in an error that names file, table and column.

Readers pick out here what names a person or is secret, for :mod:`nsightkit.trace.clean` to find it in other texts.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pandas as pd
from pandas.api.types import is_integer_dtype, is_string_dtype

from nsightkit.errors import TraceError

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
_TIMES = {"start_ns", "end_ns"}
#: Columns whose values are lower than the table's number of rows: rows of the table, or depths of nesting in it.
_BELOW_ROW_COUNT = ("parent", "level")


def admitted(
    path: str | None, table: str, frame: pd.DataFrame, dtypes: Mapping[str, str], loaded: Mapping[str, pd.Series]
) -> _Columns:
    """Check columns that a source gave, and return them with the model's dtypes.

    Parameters
    ----------
    path : str or None
        Of the trace, for error messages.
    table : str
    frame : DataFrame
        What the source gave. Its columns are taken out one by one, so that memory holds each once.
    dtypes : mapping of str to str
        The columns that were asked for, with the model's dtype of each; of the times, both or none.
    loaded : mapping of str to Series
        The table's columns that the trace holds already.

    Returns
    -------
    dict of str to Series

    Raises
    ------
    TraceError
        A column is absent, or holds what the model does not allow.
    """
    # All columns of a table have the same length: that of one in the trace already, or else that of the frame.
    size = len(next(iter(loaded.values()), frame))
    columns: _Columns = {}
    for column, dtype in dtypes.items():
        if column not in frame:
            raise TraceError(path or "trace", f"lacks the column {table}.{column}", _REMEDY)
        values = converted(frame.pop(column), dtype)
        _refuse_if(path, table, column, _problem_of_column(column, values, dtype, size))
        columns[column] = values
    if size and "end_ns" in columns:
        _refuse_if(path, table, "end_ns", _problem_of_durations(columns["start_ns"], columns["end_ns"]))
    return columns


def on_trace_clock(path: str | None, table: str, columns: Mapping[str, pd.Series], t0_ns: int) -> _Columns:
    """Return a table's times, moved from the source's clock to the trace's.

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
            _refuse_if(path, table, column, "is over 100 days from the trace's first event")
    return {column: columns[column] - t0_ns for column in _TIMES}


def converted(values: pd.Series, dtype: str) -> pd.Series:
    """Convert values to the model's dtype where that loses nothing; return any others as they are.

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


def on_clock(path: str | None, moment_ns: int) -> int:
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
        A field has another type than the model's, is not valid text, or is impossible: a capture that ends before it
        begins, a missing table that the model does not have.
    """
    try:
        # Conversion back from plain values checks every type, and encoding that each text is valid Unicode.
        plain = msgspec.to_builtins(meta, str_keys=True, builtin_types=(bytes,))
        msgspec.convert(plain, type(meta), str_keys=True)
        msgspec.json.encode(plain)
        begin, end = meta.window_ns or (0, 0)
        if not -_TIME_LIMIT_NS < begin <= end < _TIME_LIMIT_NS:
            raise ValueError(f"the capture runs from {begin} to {end} ns")
        for table in set(meta.missing).difference(tables, ["MPI"]):
            raise ValueError(f"there is no table {table!r}")
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TraceError(path or "trace", f"describes its capture wrongly ({error})", _REMEDY) from error


def _as_categorical(values: pd.Series) -> pd.Series:
    """Convert texts to a categorical whose categories have the model's dtype; return any other values as they are."""
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
    if column in _TIMES:
        is_time = values.min() > -_TIME_LIMIT_NS and values.max() < _TIME_LIMIT_NS
        if is_time:
            return None
        return "is outside the range of times"
    if column in _LOWEST:
        return _problem_of_numbers(column, values.to_numpy())
    return None


def _problem_of_numbers(column: str, numbers: npt.NDArray[Any]) -> str | None:
    """Describe what is wrong with a column of :data:`_LOWEST`; None if nothing is."""
    low = int(numbers.min())
    high = int(numbers.max())
    if low < _LOWEST[column]:
        return f"holds {low}, less than {_LOWEST[column]}"
    # Device numbers may have gaps. Only where the highest makes it possible that there are too many, count them.
    if column == "device" and high >= _MOST_DEVICES and len(np.unique(numbers)) > _MOST_DEVICES:
        return f"names more than {_MOST_DEVICES:,} devices"
    if column in _BELOW_ROW_COUNT and high >= len(numbers):
        return f"holds {high}, in a table of {len(numbers):,} rows"
    if column == "parent" and _has_circle(numbers):
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


def _has_circle(parent: npt.NDArray[np.int64]) -> bool:
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
