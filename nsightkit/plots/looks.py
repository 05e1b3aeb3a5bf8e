"""Colours, units and words that figures share with what is drawn without matplotlib."""

from __future__ import annotations

from collections.abc import Iterable

from nsightkit.analysis.core.causes import CAUSES
from nsightkit.safe import plain

# Mid tones after Okabe and Ito: each stands out by at least 3:1 (WCAG 1.4.11) from a white and from a near-black page,
# and neighbours differ in lightness too, so that a figure survives greyscale and colour-blind readers.
BLUE, VERMILION, GREEN, PURPLE, GREY, OCHRE, RED = (
    "#2f7fc1",
    "#d9690f",
    "#17936b",
    "#b565a7",
    "#7d8590",
    "#a87a10",
    "#cf4446",
)

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

_UNITS = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))


_BYTE_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def time_unit(longest_ns: float) -> tuple[float, str]:
    """Choose the unit in which a time reads well, as nanoseconds a unit and its symbol."""
    return _unit(longest_ns, _UNITS)


def byte_unit(largest: float) -> tuple[float, str]:
    """Choose the unit in which an amount of memory reads well, as bytes a unit and its symbol."""
    return _unit(largest, _BYTE_UNITS)


def _unit(largest: float, units: tuple[tuple[float, str], ...]) -> tuple[float, str]:
    for size, name in units:
        if largest >= size:
            return size, name
    return units[-1]


def tick(ns: float) -> str:
    """Write a time for an axis, without the zeros."""
    scale, unit = time_unit(ns * 1.0000001)  # a decade that floating point puts just below itself
    return f"{ns / scale:g} {unit}"


def duration(ns: float) -> str:
    """Write a time with its unit, three digits."""
    scale, unit = time_unit(abs(ns))
    size = abs(ns) / scale
    digits = 2
    if size >= 100 or scale == 1:
        digits = 0
    elif size >= 10:
        digits = 1
    return f"{ns / scale:.{digits}f} {unit}"


def amount(size: float) -> str:
    """Write a number of bytes with its unit, three digits."""
    scale, unit = byte_unit(size)
    if size / scale >= 999.5:
        return f"{size / scale:.0f} {unit}"
    return f"{size / scale:.3g} {unit}"


def spoken(pairs: Iterable[tuple[object, str]], most: int = 6) -> str:
    """Write out names and values for alternative text."""
    pairs = list(pairs)
    words = ", ".join(f"{plain(name)[:60]} {value}" for name, value in pairs[:most])
    if len(pairs) > most:
        words += f", and {len(pairs) - most} more"
    return words
