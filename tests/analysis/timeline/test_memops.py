"""Copies and memsets by direction and kind of memory."""

from __future__ import annotations

import pandas as pd

from nsightkit.analysis.timeline import memops
from nsightkit.trace.model import Trace

COLUMNS = ["kind", "src_kind", "dst_kind", "count", "bytes", "total_ns", "gb_per_s"]


def test_each_direction_and_kind_is_a_row():
    frame = pd.DataFrame(
        {
            "start_ns": [0, 100, 200, 300, 400],
            "end_ns": [10, 130, 250, 300, 401],
            "kind": pd.Categorical(["HtoD", "HtoD", "HtoD", "DtoH", "memset"]),
            "bytes": [100, 300, 1000, 7, 2**60],
            "src_kind": pd.Categorical(["pageable", "pageable", "pinned", "device", ""]),
            "dst_kind": pd.Categorical(["device", "device", "device", "pinned", "device"]),
        }
    )
    table = memops.summary(Trace.from_frames({"memops": frame}))
    assert list(table.columns) == COLUMNS
    rows = [tuple(row) for row in table.drop(columns="gb_per_s").itertuples(index=False)]
    assert rows == [
        ("HtoD", "pinned", "device", 1, 1000, 50),
        ("HtoD", "pageable", "device", 2, 400, 40),
        ("memset", "", "device", 1, 2**60, 1),
        ("DtoH", "device", "pinned", 1, 7, 0),
    ]
    # bytes per nanosecond are GB (10**9 bytes) per second; no time, no rate
    assert table["gb_per_s"][:2].tolist() == [20.0, 10.0]
    assert pd.isna(table["gb_per_s"][3])


def test_bytes_that_were_not_recorded_are_not_zero():
    """ROCm's copies and some memsets come without a size; of the other copies only one has one."""
    frame = pd.DataFrame(
        {
            "start_ns": [0, 100, 200],
            "end_ns": [10, 130, 250],
            "kind": pd.Categorical(["memset", "HtoD", "HtoD"]),
            "bytes": [0, 300, 0],
        }
    )
    table = memops.summary(Trace.from_frames({"memops": frame})).set_index("kind")
    assert table.loc["memset", ["bytes", "gb_per_s"]].isna().all()
    assert table.loc["HtoD", ["bytes", "total_ns", "gb_per_s"]].tolist() == [300, 80, 10.0]
