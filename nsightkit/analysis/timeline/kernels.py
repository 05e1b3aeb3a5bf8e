"""Which kernels the GPU's time went to, by name or by kind of work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import pandas as pd

from nsightkit.analysis.core.categories import CATEGORIES, categorize
from nsightkit.analysis.core.grouped import check_grouping, durations_by_group, durations_by_name, ranked_groups
from nsightkit.trace.model import Trace

__all__ = ["summary"]


def summary(
    trace: Trace,
    by: Literal["name", "category"] = "name",
    sort: Literal["time", "count"] = "time",
    top: int | None = None,
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
    top : int, optional
        Only the first so many rows; shares stay those of all kernel time.

    Returns
    -------
    DataFrame
        ``name, category, count, total_ns, mean_ns, median_ns, min_ns, max_ns, std_ns, share``; `share` is
        the part of all kernel time, 0 to 1. By category, ``name`` is the category.

    Raises
    ------
    UsageError
        `by` or `sort` is something else, or `top` is negative.
    """
    check_grouping("kernels", by, sort, top)
    if by == "name":
        table = _kept(trace, "kernel-names", _by_name)
        table.insert(1, "category", np.asarray(categorize(table["name"]), dtype=object))
    else:
        table = _kept(trace, "kernel-categories", _by_category)
        table.insert(1, "category", table["name"])
    return ranked_groups(table, sort, top)


def _kept(trace: Trace, what: str, compute: Callable[[Trace], pd.DataFrame]) -> pd.DataFrame:
    """Statistics by name; those of a whole trace are kept with it."""
    if trace is not trace.whole:
        return compute(trace)

    def with_categories() -> pd.DataFrame:
        return compute(trace).astype({"name": "category"})

    kept = trace.derived(what, with_categories)
    return kept.assign(name=kept["name"].astype(object))


def _by_name(trace: Trace) -> pd.DataFrame:
    return durations_by_name(trace.table("kernels", ["name", "duration_ns"]))


def _by_category(trace: Trace) -> pd.DataFrame:
    events = trace.table("kernels", ["name", "duration_ns"])
    kinds = categorize(events["name"])
    table = durations_by_group(kinds.codes, events["duration_ns"].to_numpy())
    table.insert(0, "name", np.array(CATEGORIES, dtype=object)[table.pop("group").to_numpy()])
    return table
