"""Which kernels the GPU's time went to, by name or by kind of work."""

from __future__ import annotations

from typing import Literal

import pandas as pd

from nsightkit.analysis.core.categories import categorize
from nsightkit.analysis.core.grouped import STATISTICS, durations_by_name
from nsightkit.errors import UsageError
from nsightkit.trace.model import Trace

#: Columns to sort by, for each value of the option `sort`.
_SORT_COLUMNS = {"time": ["total_ns", "count"], "count": ["count", "total_ns"]}


def summary(
    trace: Trace, by: Literal["name", "category"] = "name", sort: Literal["time", "count"] = "time"
) -> pd.DataFrame:
    """Sum kernel time by kernel name or by category of work.

    Durations are summed, so kernels that overlap on several streams count each in full, as in
    ``nsys stats -r cuda_gpu_kern_sum``; copies, memsets and whole-graph replays are not kernels.

    Parameters
    ----------
    trace : Trace
    by : {"name", "category"}
        A row for each demangled name, or for each kind of work (:mod:`nsightkit.analysis.core.categories`).
    sort : {"time", "count"}
        Largest total time, or most launches, first.

    Returns
    -------
    DataFrame
        ``name, category, count, total_ns, mean_ns, median_ns, min_ns, max_ns, std_ns, share``; `share` is
        the part of all kernel time, 0 to 1. By category, ``name`` is the category.

    Raises
    ------
    UsageError
        `by` or `sort` is something else.
    """
    if by not in ("name", "category"):
        raise UsageError(f"kernels can be grouped by name or category, not by {by!r}")
    if sort not in _SORT_COLUMNS:
        raise UsageError(f"kernels can be sorted by time or count, not by {sort!r}")
    events = trace.table("kernels", ["name", "duration_ns"])
    if by == "category":
        events["name"] = categorize(events["name"])
    table = durations_by_name(events)
    table["category"] = table["name"]
    if by == "name":
        table["category"] = categorize(table["name"]).astype(object)
    table["share"] = table["total_ns"] / max(table["total_ns"].sum(), 1)
    table = table.sort_values(_SORT_COLUMNS[sort], ascending=False, kind="stable", ignore_index=True)
    return table[["name", "category", *STATISTICS, "share"]]
