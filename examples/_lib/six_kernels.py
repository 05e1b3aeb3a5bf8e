"""The six operations with six limiters: what they must cost, and what was counted and measured of each (page 19)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from _lib import climb
from _lib.limiters import CASES, HELD
from nsightkit.analysis.roofline import counters, sol
from nsightkit.analysis.roofline.sol import Operation, Rates
from nsightkit.analysis.timeline import ranges
from nsightkit.trace.model import Trace
from nsightkit.trace.ncu import Report

if TYPE_CHECKING:
    from nsightkit.guide import Measurement


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
    return {name: dataclasses.replace(cost, name=name) for name, cost in costs.items()}


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


def under(run: Measurement) -> tuple[pd.DataFrame, list[Rates]]:
    """Compare the times of the six with the roofs of the GPU that ran them: the datasheet's, and the measured ones.

    Parameters
    ----------
    run : Measurement

    Returns
    -------
    (DataFrame, list of Rates)
        Both empty where the GPU is not listed, or was a CPU.
    """
    roofs = climb.ceilings("bf16", "fp32", "copy")
    card = climb.gpu_of(run)
    if card is None:
        return pd.DataFrame(), []
    rates = [sol.datasheet(card)]
    if all(roofs) and all(roof.gpu == run.gpu for roof in roofs):
        reached = [climb.ceiling(roof) for roof in roofs]
        rates.append(sol.ceilings(reached, "measured here"))
    time_ns = times(run.trace)
    costs = operations(run.parameters)
    return sol.judge([costs[name] for name in time_ns.index], time_ns, rates[0], rates[-1]), rates


def compared(few: Measurement, many: Measurement) -> pd.DataFrame:
    """Give the times of both runs in microseconds, and their ratio; empty if one was not measured."""
    if not (few and many):
        return pd.DataFrame()
    table = pd.DataFrame({"few rows (µs)": times(few.trace) / 1e3, "many rows (µs)": times(many.trace) / 1e3})
    table["ratio"] = table["many rows (µs)"] / table["few rows (µs)"]
    return table.rename_axis("name").reset_index()


def answer(took: pd.DataFrame, was: pd.DataFrame, now: pd.DataFrame) -> str:
    """Say whether the additions differ as their bytes do, and whether the rule finds what each kernel was built for.

    Parameters
    ----------
    took : DataFrame
        Of :func:`compared`.
    was, now : DataFrame
        Of :func:`counted`, for few rows and for many.
    """
    sector, number = 32, 4  # bytes
    wasted = (sector + number) / (number + number)
    few_us = took.set_index("name")["few rows (µs)"]
    softmax = 1 / took.set_index("name").loc["softmax", "ratio"]
    said = (
        f"adding one number from each sector takes {few_us['strided'] / few_us['add']:.1f}x as long (bytes predict "
        f"{wasted:.1f}x), and the softmax over few rows {softmax:.1f}x as long as over many."
    )
    if not (len(was) and len(now)):
        return said + " Counters were not available, so the rule gives no limiter."
    seen, then = (table.set_index("name")["classification"] for table in (was, now))
    as_built = sum(seen[name] == CASES[name] for name in seen.index)
    return said + (
        f" The rule gives {as_built} of {len(seen)} kernels the limiter they were built for. With few rows the softmax "
        f"is {seen.get('softmax', 'unknown')}, with many rows {then.get('softmax', 'unknown')}."
    )
