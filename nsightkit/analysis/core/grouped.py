"""Count, sum, mean, median, extremes and spread of durations by group: what every summary table is made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.errors import UsageError

__all__ = ["STATISTICS", "check_grouping", "durations_by_group", "durations_by_name", "ranked_groups"]

#: Columns every table of durations has, in this order.
STATISTICS = ("count", "total_ns", "mean_ns", "median_ns", "min_ns", "max_ns", "std_ns")


def durations_by_group(group: npt.NDArray[Any], duration_ns: npt.NDArray[np.int64]) -> pd.DataFrame:
    """Compute statistics of durations by group number.

    Sums are exact (64-bit integers, no floating point); the standard deviation is the sample's
    (n - 1), as in ``nsys stats``, and like there 0 for a single event.

    Parameters
    ----------
    group : ndarray of int, shape (n,)
        Group of each event; negative ones are left out.
    duration_ns : ndarray of int64, shape (n,)

    Returns
    -------
    DataFrame
        One row a non-empty group: ``group`` and :data:`STATISTICS`, ordered by group.
    """
    keep = group >= 0
    if not keep.all():
        group, duration_ns = group[keep], duration_ns[keep]
    if len(group) and int(group.max()) < 1 << 23 and 0 <= int(duration_ns.min()) <= int(duration_ns.max()) < 1 << 40:
        # Group and duration in one integer: sorting plain int64 is several times quicker than an argsort.
        packed = group.astype(np.int64) << 40
        packed |= duration_ns
        packed.sort()
        ordered = packed >> 40
        durations = packed & ((1 << 40) - 1)
    else:
        order = np.lexsort((duration_ns, group))
        ordered, durations = group[order].astype(np.int64), duration_ns[order]
    heads = np.flatnonzero(np.diff(ordered, prepend=-1))
    tails = np.append(heads, len(ordered))[1:] - 1
    count = tails - heads + 1
    total = np.add.reduceat(durations, heads) if len(heads) else durations
    lower, upper = durations[(heads + tails) // 2], durations[(heads + tails + 1) // 2]
    # Two passes, so that nothing cancels; one group at a time, so that no column of floats is made.
    groups = (durations[a : b + 1] for a, b in zip(heads.tolist(), tails.tolist(), strict=True))
    std = np.array([group.std(ddof=1) if len(group) > 1 else 0.0 for group in groups])
    return pd.DataFrame(
        {
            "group": ordered[heads],
            "count": count.astype(np.int64),
            "total_ns": total,
            "mean_ns": total / np.maximum(count, 1),
            "median_ns": lower + (upper - lower) / 2,
            "min_ns": durations[heads],
            "max_ns": durations[tails],
            "std_ns": std.astype(np.float64),
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


def check_grouping(what: str, by: str, sort: str, top: int | None) -> None:
    """Refuse options that a table by name or category does not have.

    Parameters
    ----------
    what : str
        Of what the table is, for the message: ``kernels``.
    by, sort : str
    top : int, optional

    Raises
    ------
    UsageError
    """
    for verb, given, known in (("grouped", by, ("name", "category")), ("sorted", sort, ("time", "count"))):
        if given not in known:
            raise UsageError(f"{what} can be {verb} by {' or '.join(known)}, not by {given!r}")
    if top is not None and top < 0:
        raise UsageError(f"a table cannot have {top} rows")


def ranked_groups(table: pd.DataFrame, sort: str, top: int | None) -> pd.DataFrame:
    """Put a table of durations in order, with the share that each row has of all of them.

    Parameters
    ----------
    table : DataFrame
        ``name``, ``category`` and :data:`STATISTICS`.
    sort : {"time", "count"}
    top : int, optional
        Only the first so many rows; shares stay those of all.
    """
    total = int(table["total_ns"].sum())
    table = table.assign(share=table["total_ns"] / total if total else 0.0)
    keys = ["total_ns", "count"] if sort == "time" else ["count", "total_ns"]
    table = table.sort_values(keys, ascending=False, kind="stable", ignore_index=True)
    return table[["name", "category", *STATISTICS, "share"]].head(len(table) if top is None else top)
