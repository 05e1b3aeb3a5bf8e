"""Choosing events by name, with the regular expressions people type."""

from __future__ import annotations

import functools
import re

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.errors import UsageError

__all__ = ["OPERATOR_RANGE", "compiled", "matching"]

#: Ranges that a framework emits for its operators (`emit_nvtx`, `nsys --pytorch=autograd-nvtx`), no annotations.
OPERATOR_RANGE = re.compile(r"^(aten|autograd|torch|c10d?|prims|quantized|_C)::|, (seq|op_id) = \d")


def compiled(pattern: str, option: str) -> re.Pattern[str]:
    """Compile a regular expression that a person typed.

    Parameters
    ----------
    pattern : str
    option : str
        Where it came from, for the message.

    Returns
    -------
    re.Pattern

    Raises
    ------
    UsageError
        It is malformed.
    """
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"{option}: {pattern!r} is not a regular expression ({error})") from error


def matching(names: pd.Series, *patterns: re.Pattern[str]) -> npt.NDArray[np.bool_]:
    """Which rows have a name that one of the patterns finds.

    Parameters
    ----------
    names : Series of category
        A name column of the model; each distinct name is looked at once.
    *patterns : re.Pattern

    Returns
    -------
    ndarray of bool
    """
    # One entry more: an empty list of categories must still be indexable.
    flags = [any(_finds(pattern, name) for pattern in patterns) for name in names.cat.categories.astype(str).tolist()]
    return np.array([*flags, False])[names.cat.codes.to_numpy()]


@functools.lru_cache(1 << 16)
def _finds(pattern: re.Pattern[str], name: str) -> bool:
    """Whether a pattern finds a name; the steps of a trace have the same names, and each is asked about many times."""
    return pattern.search(name) is not None
