"""What copies and memsets moved, between what kinds of memory, and how fast."""

from __future__ import annotations

import numpy as np
import pandas as pd

from nsightkit.trace.model import Trace

__all__ = ["summary"]

_KEYS = ("kind", "src_kind", "dst_kind")


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
    group = np.zeros(len(events), np.int32)
    values = []
    for key in _KEYS:
        names = events[key].cat
        codes = names.codes.to_numpy().astype(np.int32) + 1  # 0: no value
        group = group * (len(names.categories) + 1) + codes
        values.append(np.array(["", *names.categories], dtype=object)[codes])
    _, first, which = np.unique(group, return_index=True, return_inverse=True)
    table = pd.DataFrame({key: value[first] for key, value in zip(_KEYS, values, strict=True)})
    table["count"] = np.bincount(which, minlength=len(first)).astype(np.int64)
    for column, source in (("bytes", "bytes"), ("total_ns", "duration_ns")):
        total = np.zeros(len(first), np.int64)
        np.add.at(total, which, events[source].to_numpy())  # exact in 64 bits, unlike a weighted bincount
        table[column] = total
    time = table["total_ns"].to_numpy()
    table["gb_per_s"] = np.divide(table["bytes"].to_numpy(), time, out=np.full(len(time), np.nan), where=time > 0)
    return table.sort_values(["total_ns", "bytes"], ascending=False, kind="stable", ignore_index=True)
