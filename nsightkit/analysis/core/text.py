"""Amounts and names as a sentence has them: times and bytes with a unit, kernels without their namespaces."""

from __future__ import annotations

import re

from nsightkit.safe import plain


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
        Of one.
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def digits(value: float) -> str:
    """Write a number with three or four digits, more from 1,000 on: ``1.234``, ``12.34``, ``123.4``, ``1,234.5``."""
    magnitude = abs(value)
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
        From anywhere; the result is :func:`plain`.
    """
    text = plain(name)
    if text.endswith(")"):
        # Backwards to the bracket that opens the argument list.
        depth = 0
        for i in range(len(text) - 1, 0, -1):
            depth += (text[i] == ")") - (text[i] == "(")
            if depth == 0:
                # Brackets after a space hold no arguments.
                text = text if text[i - 1] == " " else text[:i]
                break
    return _NOISE.sub("", text) or text
