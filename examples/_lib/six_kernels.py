"""The six kernels that six things hold back: what they must cost, and what was counted and measured of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from nsightkit.analysis.roofline import counters, sol
from nsightkit.analysis.roofline.sol import Operation
from nsightkit.analysis.timeline import ranges
from nsightkit.trace.model import Trace
from nsightkit.trace.ncu import Report
from nsightkit.workloads.limiters import CASES, HELD

__all__ = ["counted", "operations", "times", "waits"]


def operations(sizes: Mapping[str, Any], names: Iterable[str] = CASES) -> list[Operation]:
    """List the least that each must compute and move.

    Parameters
    ----------
    sizes : mapping
        Of :class:`nsightkit.workloads.limiters.LimiterConfig`.
    names : iterable of str
        Which of them.

    Returns
    -------
    list of Operation
    """
    numbers, walks = int(sizes["elements"]), int(sizes["programs"])
    held = 128 * HELD  # numbers that each walk keeps in its registers
    rows, side, side_fp32 = (int(sizes[name]) for name in ("rows", "side", "side_fp32"))
    known = {
        "product": sol.gemm_cost(side, side, side, "bf16"),
        "product_fp32": sol.gemm_cost(side_fp32, side_fp32, side_fp32, "fp32"),
        "add": Operation("", numbers, 8 * numbers, "fp32"),
        "strided": Operation("", numbers, 8 * numbers, "fp32"),
        "softmax": sol.elementwise_cost("softmax", rows, numbers // rows, "fp32"),
        "chase": Operation("", 2 * walks * held, 4 * walks * (int(sizes["hops"]) + held), "fp32"),
    }
    return [known[name].renamed(name) for name in names]


def times(trace: Trace) -> pd.Series:
    """Give the time of each operation in a step: what the GPU did in its range, without one what the CPU did.

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    Series of float
        Nanoseconds by name.
    """
    table = ranges.summary(trace, match=f"^({'|'.join(CASES)})$").set_index("name")
    each = table["gpu_ns"] / table["count"] if trace.recorded("kernels") else table["median_ns"]
    return each[[name for name in CASES if name in each.index]].astype(float)


def counted(report: Report | None) -> pd.DataFrame:
    """Judge the longest launch of each operation.

    Parameters
    ----------
    report : Report or None

    Returns
    -------
    DataFrame
        ``name``, and the columns of :func:`nsightkit.analysis.roofline.counters.summary`; empty without a report.
    """
    around = set(report.launches["ranges"].explode()) if report else set()
    rows = [
        {"name": name, **counters.summary(report, within=f"^{name}$").iloc[0]}
        for name in CASES
        if report and name in around
    ]
    return pd.DataFrame(rows, columns=["name", *counters.COLUMNS])


def waits(report: Report, table: pd.DataFrame, most: int = 5) -> dict[str, pd.Series]:
    """Give the shares of the longest waits of each operation, of the cycles between two instructions.

    Parameters
    ----------
    report : Report
    table : DataFrame
        From :func:`counted`.
    most : int
        How many waits have a name; the others are one.

    Returns
    -------
    dict of str to Series
    """
    found = {}
    for name, kernel in zip(table["name"], table["kernel"], strict=True):
        stalls = counters.stalls(report, within=f"^{name}$")
        found[str(name)] = stalls[stalls["kernel"] == kernel].groupby("reason")["share"].mean()
    whole = pd.DataFrame(found).fillna(0.0)
    order = whole.sum(axis=1).sort_values(ascending=False).index
    top = whole.loc[order[:most]]
    top.loc["(other)"] = whole.loc[order[most:]].sum()
    return {name: top[name] for name in found}
