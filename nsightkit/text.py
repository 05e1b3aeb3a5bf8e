"""Text: TOML files beside modules, JSON that is safe to print, amounts with their units, and names.

Names are shortened, or chosen by a pattern.
"""

# Nothing heavy is imported at the top: help and errors are made of text, too.

from __future__ import annotations

import functools
import json
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsightkit.errors import UsageError, is_visible, plain

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pandas as pd

# A JSON object.
Json = dict[str, Any]


def read_toml(module_file: str, name: str) -> Json:
    """Read a TOML file that lies beside a module.

    Parameters
    ----------
    module_file : str
        The module's ``__file__``.
    name : str
        The TOML file's name, without its suffix.
    """
    return tomllib.loads(Path(module_file).with_name(f"{name}.toml").read_text(encoding="utf-8"))


def json_text(value: Any, *, indent: int | None = None, compact: bool = False) -> str:
    r"""Write JSON that is as safe to print as :func:`nsightkit.errors.plain` text, and is read back as it was.

    Parameters
    ----------
    value : object
        Of what JSON knows; NaN and infinity are refused.
    indent : int, optional
        As :func:`json.dumps` takes it.
    compact : bool
        Without blanks between the members.

    Examples
    --------
    >>> json_text({"name": "\x9b2J π"})
    '{"name": "\\u009b2J π"}'
    """
    separators = (",", ":") if compact else None
    text = json.dumps(value, indent=indent, separators=separators, ensure_ascii=False, allow_nan=False)
    if text.isprintable():
        return text
    # Other characters than the line breaks of `indent` stand within strings, where JSON takes escapes.
    return "".join(c if is_visible(c) or c == "\n" else json.dumps(c)[1:-1] for c in text)


# ---------------------------------------------------------------- amounts


def time_text(ns: float | None) -> str:
    """Write a duration in the unit a person would choose, to three or four digits.

    Parameters
    ----------
    ns : float or None
        Nanoseconds; None is a dash.
    """
    if ns is None:
        return "-"
    for unit, unit_ns in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if abs(ns) >= 0.9995 * unit_ns:  # 999.6 ns is written as 1.000 µs
            return f"{digits(ns / unit_ns)} {unit}"
    if float(ns).is_integer():
        return f"{ns:.0f} ns"
    return f"{ns:.1f} ns"


def count_text(count: int, noun: str) -> str:
    """Write how many there are of something: ``1 rank``, ``2 ranks``.

    Parameters
    ----------
    count : int
    noun : str
        In the singular.
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def digits(value: float) -> str:
    """Write a number with three or four digits, more from 1,000 on: ``1.234``, ``12.34``, ``123.4``, ``1,234.5``."""
    magnitude = abs(value)  # the limits below are what rounds to 100.0 and to 10.00
    if magnitude >= 99.95:
        return f"{value:,.1f}"
    return f"{value:.2f}" if magnitude >= 9.995 else f"{value:.3f}"


def share_text(share: float | None) -> str:
    """Write a share in percent.

    Parameters
    ----------
    share : float or None
        None is a dash.
    """
    if share is None:
        return "-"
    return f"{100 * share:.1f}%"


def bytes_text(value: float | None) -> str:
    """Write an amount of memory in the unit a person would choose, 1 GB = 10**9 bytes.

    Parameters
    ----------
    value : float or None
        Bytes; None is a dash.
    """
    if value is None:
        return "-"
    for unit, unit_bytes in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= unit_bytes:
            return f"{digits(value / unit_bytes)} {unit}"
    return f"{value:.0f} B"


# ---------------------------------------------------------------- names


#: Parts of names that do not tell kernels apart: namespaces, casts to integers, lambdas, iterator arguments.
_NOISE = re.compile(
    r"\(anonymous namespace\)::|<unnamed>::|\bat::native::|\bvoid\s+"
    r"|\((?:unsigned )?(?:int|long|bool|char|short)\)(?=\w)"
    # A lambda ends before the next one begins: looking for its end in all of a name takes long if it has none.
    r"|::\[lambda(?:(?!::\[lambda).)*?\](?=::|>|,|$)|::\{lambda(?:(?!::\{lambda).)*?\}(?:#\d+\})?"
    r"|::operator ?\(\)\(\) const"
    r"|\((?:const )?at::TensorIterator[^()]*\)"
)


def short_name(name: str) -> str:
    """Shorten a kernel's name: drop namespaces, lambdas and the argument list, which tell kernels apart least.

    Parameters
    ----------
    name : str
        From anywhere; the result is :func:`nsightkit.errors.plain`.
    """
    text = plain(name)
    if text.endswith(")"):
        # Backwards to the bracket that opens the argument list.
        depth = 0  # closed brackets that are not opened yet
        for i in range(len(text) - 1, 0, -1):
            depth += (text[i] == ")") - (text[i] == "(")
            if depth == 0:
                # Brackets after a space hold no arguments.
                text = text if text[i - 1] == " " else text[:i]
                break
    return _NOISE.sub("", text) or text


#: Ranges that a framework emits for its operators (`emit_nvtx`, `nsys --pytorch=autograd-nvtx`), no annotations.
OPERATOR_RANGE = re.compile(r"^(aten|autograd|torch|c10d?|prims|quantized|_C)::|, (seq|op_id) = \d")

#: Ranges of libraries that load data on separate threads.
LOADER_RANGE = re.compile(r"(?i)^\[?dali\b")

#: Longer expressions are refused.
_LONGEST_PATTERN = 1000
#: Instructions of a compiled expression. A search takes at most some 25 ns for each of them and each character.
_MOST_INSTRUCTIONS = 2000
#: Memory that RE2 may use for a compiled expression.
_MOST_BYTES = 1_000_000


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
    """Flag the rows in whose name one of the patterns is found.

    Parameters
    ----------
    names : Series of category
        A name column of the model; each distinct name is looked at once.
    *patterns : Expression

    Returns
    -------
    ndarray of bool
    """
    import numpy as np

    is_match = []
    for name in names.cat.categories.astype(str).tolist():
        is_found = False
        for pattern in patterns:
            if pattern.search(name):
                is_found = True
                break
        is_match.append(is_found)
    is_match.append(False)  # for a missing name, whose code is -1
    return np.array(is_match)[names.cat.codes.to_numpy()]
