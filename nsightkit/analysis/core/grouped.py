"""Count, sum, mean, median, extremes and spread of durations by group: what every summary table is made of."""

from __future__ import annotations

import pandas as pd

#: Columns every table of durations has, in this order.
STATISTICS = ("count", "total_ns", "mean_ns", "median_ns", "min_ns", "max_ns", "std_ns")


def durations_by_name(events: pd.DataFrame) -> pd.DataFrame:
    """Compute statistics of durations by name.

    Sums are exact (64-bit integers, no floating point); the standard deviation is the sample's
    (n - 1), as in ``nsys stats``, and like there 0 for a single event.

    Parameters
    ----------
    events : DataFrame
        Columns ``name`` (category) and ``duration_ns``.

    Returns
    -------
    DataFrame
        One row a name that occurs: ``name`` and :data:`STATISTICS`; the longest total first, then by name.
    """
    durations = events.groupby("name", observed=True)["duration_ns"]
    table = durations.agg(["size", "sum", "mean", "median", "min", "max", "std"])
    table = table.set_axis(STATISTICS, axis="columns").fillna({"std_ns": 0.0})
    table = table.reset_index().astype({"name": object})
    return table.sort_values(["total_ns", "name"], ascending=[False, True], kind="stable", ignore_index=True)
