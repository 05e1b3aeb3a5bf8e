"""Colours, units and words that all figures share. Needs no matplotlib."""

from __future__ import annotations

from collections.abc import Iterable

from nsightkit.analysis.core.causes import CAUSES
from nsightkit.safe import plain

# Mid tones after Okabe and Ito: each stands out by at least 3:1 (WCAG 1.4.11) from a white and from a near-black page,
# and neighbours differ in lightness too, so that a figure survives greyscale and colour-blind readers.
BLUE = "#2f7fc1"
VERMILION = "#d9690f"
GREEN = "#17936b"
PURPLE = "#b565a7"
OCHRE = "#a87a10"
RED = "#cf4446"
GREY = "#7d8590"
DARK_GREY = "#646c77"

#: Of kinds of work (:mod:`nsightkit.analysis.core.categories`), the same in every figure that names them.
CATEGORY_COLOURS = {
    "GEMM": BLUE,
    "convolution": "#5f8596",
    "attention": VERMILION,
    "elementwise": GREEN,
    "memory-like": PURPLE,
    "optimizer": OCHRE,
    "softmax": RED,
    "normalization": "#748522",
    "reduction": "#0f8fa8",
    "communication": "#d0527f",
    "Triton-fused": "#7a6fd0",
    "other": GREY,
}

CAUSE_COLOURS = {slug: cause.colour for slug, cause in CAUSES.items()}

_Units = tuple[tuple[float, str], ...]
_TIMES: _Units = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))
_SIZES: _Units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def time_unit(largest: float) -> tuple[float, str]:
    """Choose the unit in which a time reads well, as nanoseconds per unit and its symbol."""
    return _unit(largest, _TIMES)


def byte_unit(largest: float) -> tuple[float, str]:
    """Choose the unit in which an amount of memory reads well, as bytes per unit and its symbol."""
    return _unit(largest, _SIZES)


def _unit(largest: float, units: _Units) -> tuple[float, str]:
    for size, name in units:
        if largest >= 0.9995 * size:  # written with three digits, it rounds up to this unit
            return size, name
    return units[-1]


def duration(value: float) -> str:
    """Write a time in nanoseconds with its unit, three digits."""
    return _three_digits(value, time_unit(abs(value)))


def amount(value: float) -> str:
    """Write a number of bytes with its unit, three digits."""
    return _three_digits(value, byte_unit(value))


def _three_digits(value: float, unit: tuple[float, str]) -> str:
    size, name = unit
    rounded = float(f"{value / size:.3g}")
    return f"{rounded:,g} {name}"


def spoken(pairs: Iterable[tuple[object, str]], most: int = 6) -> str:
    """Write out names and values for alternative text."""
    words = [f"{plain(name)[:60]} {value}" for name, value in pairs]
    if len(words) > most:
        words[most:] = [f"and {len(words) - most} more"]
    return ", ".join(words)
