"""Running sums worked out on paper, addition by addition, and beside what a device made of them (page 05)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pandas as pd
from matplotlib.figure import Figure

from nsightkit.plots import style
from nsightkit.plots.looks import BLUE, GREY, VERMILION, spoken

if TYPE_CHECKING:
    from nsightkit.guide import Measurement

COUNT, ADDEND = 1000, 0.01
#: Significant bits.
BITS = {"fp32": 24, "fp16": 11, "bf16": 8}
#: By the name of a sum: the type of its total, and of its addends.
TYPES = {
    "fp32": ("fp32", "fp32"),
    "fp16": ("fp16", "fp16"),
    "fp32 of fp16": ("fp32", "fp16"),
    "fp32 of widened fp16": ("fp32", "fp16"),
    "bf16": ("bf16", "bf16"),
    "fp32 of bf16": ("fp32", "bf16"),
}


def rounded(value: float, kind: str) -> float:
    """Give the nearest number of a type; a tie goes to the even one.

    Examples
    --------
    >>> rounded(4.01, "bf16")
    4.0
    """
    spacing = 2.0 ** (math.frexp(value)[1] - BITS[kind])
    return round(value / spacing) * spacing


def _running(total: str, added: str, block: int) -> list[float]:
    """Work out the total after each block of additions."""
    addend, now, seen = rounded(ADDEND, added), 0.0, []
    for _ in range(COUNT // block):
        part = 0.0
        for _ in range(block):
            part = rounded(part + addend, total)
        now = rounded(now + part, total)
        seen.append(now)
    return seen


def predicted(block: int = 1) -> dict[str, list[float]]:
    """Work out every sum.

    Parameters
    ----------
    block : int
        Addends whose sum is formed before it is added to the total.

    Returns
    -------
    dict of str to list of float
        The total after each block, by the name in :data:`TYPES`.
    """
    return {name: _running(*types, block) for name, types in TYPES.items()}


def errors(sums: Mapping[str, Sequence[float]]) -> pd.DataFrame:
    """Divide the error of each sum among its addends and its additions.

    Parameters
    ----------
    sums : mapping of str to sequence of float
        Of :func:`predicted`.
    """
    rows = []
    for name, (total, added) in TYPES.items():
        if "widened" in name:
            continue
        of_addends = COUNT * rounded(ADDEND, added)
        row = {"total": total, "addends": added, "sum": sums[name][-1]}
        row["error of the addends"] = of_addends - COUNT * ADDEND
        rows.append({**row, "error of adding": row["sum"] - of_addends})
    return pd.DataFrame(rows)


def draw(series: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Draw totals against the number of additions, named at their ends.

    Parameters
    ----------
    series : mapping of str to sequence of float
        For fp32, fp16 and bf16.
    title : str
    """
    figure, axes = style.new_figure(3.6, title)
    looks = {"fp32": (GREY, "-", 7), "fp16": (BLUE, "--", -7), "bf16": (VERMILION, "-", 0)}
    words = []
    for kind, seen in series.items():
        colour, dashes, shift = looks[kind]
        axes.plot(seen, dashes, color=colour, linewidth=2)
        text = f"{kind}: {seen[-1]:.4f}"
        place = {"xytext": (6, shift), "textcoords": "offset points", "va": "center", "fontsize": 9}
        axes.annotate(text, (len(seen), seen[-1]), **place)
        words.append((kind, f"ends at {seen[-1]:.4f}"))
    axes.set(xlabel="additions", ylabel="total", xlim=(0, 1.2 * COUNT))
    axes.set_xticks(range(0, COUNT + 1, 200))
    return style.described(figure, f"{title}: {spoken(words)}.")


def of(run: Measurement, name: str) -> list[float]:
    """Give the running totals of one sum of a run."""
    return run.rows.loc[run.rows["sum"] == name, "total"].tolist()


def matmuls(run: Measurement) -> pd.DataFrame:
    """Put the results of matmuls beside sums with totals of two types."""
    rows = []
    for kind in ("fp16", "bf16"):
        row = {"operands": kind, "with an fp32 total": rounded(of(run, f"fp32 of {kind}")[-1], kind)}
        row["with a total of its type"] = of(run, kind)[-1]
        rows.append({**row, "matmul": of(run, f"matmul {kind}")[0]})
    return pd.DataFrame(rows)


def right(run: Measurement, expected: Mapping[str, float]) -> int:
    """Count the sums of a run that end exactly as expected."""
    return sum(of(run, name)[-1] == total for name, total in expected.items())
