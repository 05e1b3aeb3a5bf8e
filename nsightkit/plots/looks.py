"""Colours, units and words that all figures share. Needs no matplotlib."""

from __future__ import annotations

from collections.abc import Iterable

from nsightkit.analysis.core.causes import CAUSES
from nsightkit.errors import plain
from nsightkit.text import read_toml

BLUE = "#2f7fc1"
VERMILION = "#d9690f"
GREEN = "#17936b"
PURPLE = "#b565a7"
OCHRE = "#a87a10"
RED = "#cf4446"
GREY = "#7d8590"
DARK_GREY = "#646c77"

_LOOKS_FILE = read_toml(__file__, "looks")
#: Of kinds of work, the same in every figure that names them.
CATEGORY_COLOURS: dict[str, str] = _LOOKS_FILE["categories"]
CAUSE_COLOURS = {slug: cause.colour for slug, cause in CAUSES.items()}
#: Colour and hatch of kinds of memory.
MEMORY: dict[str, list[str]] = _LOOKS_FILE["memory"]

_Units = tuple[tuple[float, str], ...]
_TIMES: _Units = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))
_SIZES: _Units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def part_name(name: str) -> str:
    """Name a part of a whole in a figure: a cause by its plain name instead of its slug, anything else as it is."""
    if name in CAUSES:
        return CAUSES[name].plain_name
    return name


def time_unit(largest: float) -> tuple[float, str]:
    """Choose the unit in which a time reads well, as nanoseconds per unit and its symbol."""
    return _fitting_unit(largest, _TIMES)


def byte_unit(largest: float) -> tuple[float, str]:
    """Choose the unit in which an amount of memory reads well, as bytes per unit and its symbol."""
    return _fitting_unit(largest, _SIZES)


def _fitting_unit(largest: float, units: _Units) -> tuple[float, str]:
    """The largest unit that is not larger than a value, else the smallest; as its size and its symbol."""
    for size, symbol in units:
        if largest >= 0.9995 * size:  # written with three digits, it rounds up to this unit
            return size, symbol
    return units[-1]


def duration(value: float) -> str:
    """Write a time in nanoseconds with its unit, three digits."""
    return _three_digits(value, *time_unit(abs(value)))


def amount(value: float) -> str:
    """Write a number of bytes, not negative, with its unit, three digits."""
    return _three_digits(value, *byte_unit(value))


def _three_digits(value: float, size: float, symbol: str) -> str:
    """Write a value, given in base units, in a unit of that size and symbol: "1.52 ms"."""
    rounded = float(f"{value / size:.3g}")
    return f"{rounded:,g} {symbol}"


#: By quantity: what chooses the unit for a largest value, and what writes a value with its unit.
QUANTITIES = {"time": (time_unit, duration), "memory": (byte_unit, amount)}


def spoken(pairs: Iterable[tuple[object, str]], most: int = 6) -> str:
    """Write names and values as alternative text, `most` of them: "rank 0 3 ms, rank 1 5 ms, and 4 more"."""
    words = [f"{plain(name)[:60]} {value}" for name, value in pairs]
    if len(words) > most:
        words[most:] = [f"and {len(words) - most} more"]
    return ", ".join(words)
