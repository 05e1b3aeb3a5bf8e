"""Count, sum, mean, median, extremes and spread of durations by group: what every summary table is made of."""

from __future__ import annotations

import pandas as pd

from nsightkit.errors import UsageError

__all__ = ["STATISTICS", "check_grouping", "durations_by_name", "ranked_groups"]

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
    each = events.groupby("name", observed=True)["duration_ns"]
    found = each.agg(["size", "sum", "mean", "median", "min", "max", "std"]).set_axis(STATISTICS, axis="columns")
    found = found.fillna({"std_ns": 0.0}).reset_index().astype({"name": object})
    return found.sort_values(["total_ns", "name"], ascending=[False, True], kind="stable", ignore_index=True)


def check_grouping(what: str, by: str, sort: str) -> None:
    """Refuse options that a table by name or category does not have.

    Parameters
    ----------
    what : str
        Of what the table is, for the message: ``kernels``.
    by, sort : str

    Raises
    ------
    UsageError
    """
    for verb, given, known in (("grouped", by, ("name", "category")), ("sorted", sort, ("time", "count"))):
        if given not in known:
            raise UsageError(f"{what} can be {verb} by {' or '.join(known)}, not by {given!r}")


def ranked_groups(table: pd.DataFrame, sort: str) -> pd.DataFrame:
    """Put a table of durations in order, with the share that each row has of all of them.

    Parameters
    ----------
    table : DataFrame
        ``name``, ``category`` and :data:`STATISTICS`.
    sort : {"time", "count"}
    """
    total = int(table["total_ns"].sum())
    table = table.assign(share=table["total_ns"] / total if total else 0.0)
    keys = ["total_ns", "count"] if sort == "time" else ["count", "total_ns"]
    table = table.sort_values(keys, ascending=False, kind="stable", ignore_index=True)
    return table[["name", "category", *STATISTICS, "share"]]
