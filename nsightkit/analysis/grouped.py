"""Count, sum, mean, median, extremes and spread of durations by group: what every summary table is made of."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

__all__ = ["STATISTICS", "durations_by_group", "durations_by_name"]

#: Columns every table of durations has, in this order.
STATISTICS = ("count", "total_ns", "mean_ns", "median_ns", "min_ns", "max_ns", "std_ns")


def durations_by_group(group: npt.NDArray[Any], duration_ns: npt.NDArray[np.int64]) -> pd.DataFrame:
    """Compute statistics of durations by group number.

    Sums are exact (64-bit integers, no floating point); the standard deviation is the sample's
    (n - 1), as in ``nsys stats``, and like there 0 for a single event.

    Parameters
    ----------
    group : ndarray of int, shape (n,)
        Group of each event; negative ones are left out. The narrower the type, the faster.
    duration_ns : ndarray of int64, shape (n,)

    Returns
    -------
    DataFrame
        One row a non-empty group: ``group`` and :data:`STATISTICS`, ordered by group.
    """
    # A stable argsort of 8- or 16-bit integers is a radix sort: linear in the events.
    order = np.argsort(group, kind="stable")
    ordered = group[order]
    skipped = int(np.searchsorted(ordered, 0))
    ordered, durations = ordered[skipped:], duration_ns[order[skipped:]]
    heads = np.flatnonzero(np.diff(ordered, prepend=-1))
    bounds = np.append(heads, len(ordered)).tolist()
    count = np.diff(bounds)
    total = np.add.reduceat(durations, heads) if len(heads) else durations
    low, high, median, std = (np.empty(len(heads), t) for t in (np.int64, np.int64, np.float64, np.float64))
    for i, (a, b) in enumerate(itertools.pairwise(bounds)):
        part = durations[a:b]
        middle = (b - a) // 2
        if (b - a) % 2:
            part.partition(middle)  # in place: `durations` is a copy of ours
            median[i] = part[middle]
        else:
            part.partition([middle - 1, middle])
            median[i] = (int(part[middle - 1]) + int(part[middle])) / 2
        low[i], high[i] = part[: middle + 1].min(), part[middle:].max()
        std[i] = part.std(ddof=1) if b - a > 1 else 0.0
    return pd.DataFrame(
        {
            "group": ordered[heads],
            "count": count.astype(np.int64),
            "total_ns": total,
            "mean_ns": total / np.maximum(count, 1),
            "median_ns": median,
            "min_ns": low,
            "max_ns": high,
            "std_ns": std,
        }
    )


def durations_by_name(events: pd.DataFrame) -> pd.DataFrame:
    """Compute statistics of durations by name.

    Parameters
    ----------
    events : DataFrame
        Columns ``name`` (category) and ``duration_ns``.

    Returns
    -------
    DataFrame
        One row a name that occurs: ``name`` and :data:`STATISTICS`; the longest total first, then by name.
    """
    names = events["name"].cat
    found = durations_by_group(names.codes.to_numpy(), events["duration_ns"].to_numpy())
    found.insert(0, "name", names.categories[found.pop("group").to_numpy()].astype(object))
    return found.sort_values(["total_ns", "name"], ascending=[False, True], kind="stable", ignore_index=True)
