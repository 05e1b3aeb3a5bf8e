"""The six operations with six limiters: what they must cost, and what was counted and measured of each (page 19)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from _lib.limiters import CASES, HELD
from nsightkit.analysis.roofline import counters, sol
from nsightkit.analysis.roofline.sol import Operation
from nsightkit.analysis.timeline import ranges
from nsightkit.trace.model import Trace
from nsightkit.trace.ncu import Report


def operations(sizes: Mapping[str, Any]) -> dict[str, Operation]:
    """List the least that each must compute and move.

    Parameters
    ----------
    sizes : mapping
        Of :class:`_lib.limiters.Sizes`.

    Returns
    -------
    dict of str to Operation
    """
    numbers, rows, walks = sizes["elements"], sizes["rows"], sizes["programs"]
    side, side_fp32 = sizes["side"], sizes["side_fp32"]
    held = 128 * HELD  # numbers that each walk keeps in its registers
    costs = {
        "product": sol.gemm_cost(side, side, side, "bf16"),
        "product_fp32": sol.gemm_cost(side_fp32, side_fp32, side_fp32, "fp32"),
        "add": Operation("", numbers, 8 * numbers, "fp32"),
        "strided": Operation("", numbers, 8 * numbers, "fp32"),
        "softmax": sol.elementwise_cost("softmax", rows, numbers // rows, "fp32"),
        "chase": Operation("", 2 * walks * held, 4 * walks * (sizes["hops"] + held), "fp32"),
    }
    return {name: cost.renamed(name) for name, cost in costs.items()}


def times(trace: Trace) -> pd.Series:
    """Give the time of each operation in a step: what the GPU did in its range, or what the CPU did without one.

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    Series of float
        Nanoseconds by name, in the order of :data:`_lib.limiters.CASES`.
    """
    table = ranges.summary(trace, match=f"^({'|'.join(CASES)})$").set_index("name")
    on_gpu = trace.recorded("kernels")
    time_ns = table["gpu_ns"] / table["count"] if on_gpu else table["median_ns"]
    return time_ns.reindex([name for name in CASES if name in table.index]).astype(float)


def counted(report: Report | None) -> pd.DataFrame:
    """Classify the longest launch of each operation.

    Parameters
    ----------
    report : Report or None

    Returns
    -------
    DataFrame
        ``name``, and the columns of :func:`nsightkit.analysis.roofline.counters.summary`; empty without a report.
    """
    rows = []
    if report is not None:
        around = set(report.launches["ranges"].explode())
        for name in CASES:
            if name in around:
                longest = counters.summary(report, within=f"^{name}$").iloc[0]
                rows.append({"name": name, **longest})
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
    shares = {}
    for row in table.itertuples():
        stalls = counters.stalls(report, within=f"^{row.name}$")
        own = stalls[stalls["kernel"] == row.kernel]
        shares[row.name] = own.groupby("reason")["share"].mean()
    whole = pd.DataFrame(shares).fillna(0.0)
    order = whole.sum(axis=1).sort_values(ascending=False).index
    top = whole.loc[order[:most]]
    top.loc["(other)"] = whole.loc[order[most:]].sum()
    return {name: top[name] for name in shares}
