"""What copies and memsets moved, between what kinds of memory, and how fast."""

from __future__ import annotations

import pandas as pd

from nsightkit.trace.model import Trace

__all__ = ["summary"]

_KEYS = ["kind", "src_kind", "dst_kind"]


def summary(trace: Trace) -> pd.DataFrame:
    """Sum copies and memsets by direction and by the kind of memory on either side.

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    DataFrame
        ``kind, src_kind, dst_kind, count, bytes, total_ns, gb_per_s``, the longest total first.
        ``gb_per_s`` is bytes moved over the time it took, 1 GB = 10**9 bytes; NaN where no time was taken.
        A memset has no source: its ``src_kind`` is empty.
    """
    events = trace.table("memops", [*_KEYS, "bytes", "duration_ns"])
    by = events.groupby(_KEYS, observed=True, dropna=False)
    table = by.agg(count=("bytes", "size"), bytes=("bytes", "sum"), total_ns=("duration_ns", "sum")).reset_index()
    table[_KEYS] = table[_KEYS].astype("str").fillna("")
    table["gb_per_s"] = table["bytes"] / table["total_ns"].where(table["total_ns"] > 0)
    return table.sort_values(["total_ns", "bytes"], ascending=False, kind="stable", ignore_index=True)
