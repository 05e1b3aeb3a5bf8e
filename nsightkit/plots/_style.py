"""Colours, units and text that every figure shares."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font

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

#: Of kinds of work (:mod:`nsightkit.analysis.categories`), the same in every figure that names them.
CATEGORY_COLOURS = {
    "GEMM": BLUE,
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

CAUSE_COLOURS = {
    "profiler": GREY,
    "input-pipeline": VERMILION,
    "synchronization": BLUE,
    "memory-transfer": GREEN,
    "launch-overhead": PURPLE,
    "cpu-work": OCHRE,
    "unknown": GREY,
}

_UNITS = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))


def new_figure(height: float, width: float = 7.6) -> tuple[Figure, Any]:
    """Make a figure with one pair of axes, known to pyplot, no frame but the left and the bottom line."""
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def time_unit(longest_ns: float) -> tuple[float, str]:
    """Choose the unit in which a time reads well, as nanoseconds a unit and its symbol."""
    return next(((ns, unit) for ns, unit in _UNITS if longest_ns >= ns), _UNITS[-1])


def duration(ns: float) -> str:
    """Write a time with its unit, three digits."""
    scale, unit = time_unit(abs(ns))
    value = ns / scale
    digits = 0 if abs(value) >= 100 or scale == 1 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f} {unit}"


@lru_cache
def _font() -> Any:
    return get_font(findfont(FontProperties()))


def plain(text: object, longest: int = 60) -> str:
    """Text from a trace as matplotlib may draw it.

    Names come from the profiled program: `$` would start a formula, and a character the font lacks warns.
    """
    words = " ".join(str(text).split())
    if len(words) > longest:
        words = words[: longest - 1] + "…"
    drawable = "".join(c if _font().get_char_index(ord(c)) else "□" for c in words)
    return drawable.replace("$", r"\$")


def spoken(pairs: Iterable[tuple[object, str]], most: int = 6) -> str:
    """Write out names and values for alternative text."""
    pairs = list(pairs)
    said = ", ".join(f"{' '.join(str(name).split())[:60]} {value}" for name, value in pairs[:most])
    return f"{said}, and {len(pairs) - most} more" if len(pairs) > most else said


def label_bars(axes: Any, bars: Any, labels: Iterable[str]) -> None:
    """Values at the end of horizontal bars, with room for them."""
    axes.bar_label(bars, list(labels), padding=4, fontsize=9)
    axes.margins(x=0.22)
    axes.set_xlim(left=0)


def name_rows(axes: Any, names: Iterable[object], longest: int = 44) -> None:
    """Row names on the y axis, first row on top."""
    labels = [plain(n, longest) for n in names]
    axes.set_yticks(np.arange(len(labels)), labels=labels, fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()


def nothing(axes: Any, what: str) -> None:
    """Say in the axes that there is nothing to draw."""
    axes.text(0.5, 0.5, what, ha="center", va="center", transform=axes.transAxes)
    axes.set_xticks([])
    axes.set_yticks([])
