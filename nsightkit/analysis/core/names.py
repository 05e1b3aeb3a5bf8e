"""Choosing events by name, with the regular expressions people type."""

from __future__ import annotations

import functools
import re

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.errors import UsageError

#: Ranges that a framework emits for its operators (`emit_nvtx`, `nsys --pytorch=autograd-nvtx`), no annotations.
OPERATOR_RANGE = re.compile(r"^(aten|autograd|torch|c10d?|prims|quantized|_C)::|, (seq|op_id) = \d")

#: Ranges of libraries that load data on separate threads.
LOADER_RANGE = re.compile(r"(?i)^\[?dali\b")

#: Longer expressions are refused.
_LONGEST_PATTERN = 1000
#: Instructions of a compiled expression. A search takes at most some 25 ns for each of them and each character.
_MOST_INSTRUCTIONS = 2000
#: Memory that RE2 may use for a compiled expression.
_MOST_BYTES = 1 << 20


class Pattern:
    """A regular expression that a person typed: RE2's, so that a search is linear in the length of the name.

    Python's own engine can take forever (``(a+)+$``) and blocks all other threads.

    Parameters
    ----------
    expression : str

    Raises
    ------
    ValueError
        RE2 cannot compile it.
    """

    def __init__(self, expression: str) -> None:
        import re2

        options = re2.Options()
        options.log_errors = False
        options.max_mem = _MOST_BYTES
        try:
            self._compiled = re2.compile(expression, options)
        except re2.error as error:
            raise ValueError(error.args[0].decode("utf-8", "replace")) from error
        if self._compiled.programsize > _MOST_INSTRUCTIONS:
            raise ValueError("its repeats make it too large")

    def search(self, name: str, /) -> object:
        """Find it in a name; None where it is not."""
        return self._compiled.search(name.encode("utf-8", "replace"))


#: A compiled expression: one of our own, or one that a person typed.
Expression = re.Pattern[str] | Pattern


@functools.lru_cache(256)
def compiled(pattern: str, option: str) -> Pattern:
    r"""Compile a regular expression that a person typed.

    Parameters
    ----------
    pattern : str
        In RE2's syntax: Python's, without lookaround and back references; ``\w``, ``\d`` and ``\b`` are of ASCII.
    option : str
        Where it came from, for the message.

    Returns
    -------
    Pattern

    Raises
    ------
    UsageError
        It is malformed, or too large.
    """
    if len(pattern) > _LONGEST_PATTERN:
        raise UsageError(
            f"{option}: a regular expression has at most {_LONGEST_PATTERN:,} characters, not {len(pattern):,}"
        )
    try:
        return Pattern(pattern)
    except ValueError as error:
        raise UsageError(f"{option}: {pattern!r} is not a regular expression ({error})") from error


def matching(names: pd.Series, *patterns: Expression) -> npt.NDArray[np.bool_]:
    """Flag the rows whose name matches one of the patterns.

    Parameters
    ----------
    names : Series of category
        A name column of the model; each distinct name is looked at once.
    *patterns : Expression

    Returns
    -------
    ndarray of bool
    """
    is_match = []
    for name in names.cat.categories.astype(str).tolist():
        is_match.append(any(_finds(pattern, name) for pattern in patterns))
    is_match.append(False)  # for a missing name, whose code is -1
    return np.array(is_match)[names.cat.codes.to_numpy()]


@functools.lru_cache(1 << 16)
def _finds(pattern: Expression, name: str) -> bool:
    """Check whether a pattern matches a name; memoised, because the same names are looked at again and again."""
    return pattern.search(name) is not None
