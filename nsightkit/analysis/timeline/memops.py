"""What copies and memsets moved, between what kinds of memory, and how fast."""

from __future__ import annotations

import pandas as pd

from nsightkit.trace.model import Trace

_DIRECTION = ["kind", "src_kind", "dst_kind"]


def summary(trace: Trace) -> pd.DataFrame:
    """Sum copies and memsets by direction and by the kind of memory on either side.

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    DataFrame
        ``kind, src_kind, dst_kind, count, bytes, total_ns, gb_per_s``, the longest total first.
        ``bytes`` is NA where none were recorded (0 in the trace: nothing copies 0 bytes). ``gb_per_s`` is bytes moved
        over the time it took, of what has both, 1 GB = 10**9 bytes; NaN where nothing has.
        A memset has no source: its ``src_kind`` is empty.
    """
    events = trace.table("memops", [*_DIRECTION, "bytes", "duration_ns"])
    # Time of the operations whose bytes are known, for the throughput.
    events["timed_ns"] = events["duration_ns"].where(events["bytes"] > 0, 0)
    by_direction = events.groupby(_DIRECTION, observed=True, dropna=False)
    table = by_direction[["bytes", "duration_ns", "timed_ns"]].sum()
    table = table.rename(columns={"duration_ns": "total_ns"})
    table.insert(0, "count", by_direction.size())
    table = table.reset_index()
    table[_DIRECTION] = table[_DIRECTION].astype("str").fillna("")
    timed_ns = table.pop("timed_ns")
    table["gb_per_s"] = table["bytes"] / timed_ns.where(timed_ns > 0)  # a byte per ns is a GB per s
    table["bytes"] = table["bytes"].astype("Int64").where(table["bytes"] > 0)
    return table.sort_values(["total_ns", "bytes"], ascending=False, kind="stable", ignore_index=True)
