"""CUDA API calls and calls of the operating system."""

from __future__ import annotations

import pandas as pd

from nsightkit.analysis.core.grouped import STATISTICS
from nsightkit.analysis.timeline import calls
from nsightkit.trace.model import Trace


def _calls(names: list[str], ends: list[int]) -> pd.DataFrame:
    return pd.DataFrame({"start_ns": 0, "end_ns": ends, "name": pd.Categorical(names)})


def test_api_and_os_calls_are_kept_apart() -> None:
    trace = Trace.from_frames(
        {
            "calls": _calls(["cudaLaunchKernel", "cudaLaunchKernel", "cudaStreamSynchronize"], [5, 7, 100]),
            "os_calls": _calls(["poll"], [9]),
        }
    )
    table = calls.summary(trace)
    assert list(table.columns) == ["name", *STATISTICS]
    assert table["name"].tolist() == ["cudaStreamSynchronize", "cudaLaunchKernel"]
    assert table["total_ns"].tolist() == [100, 12]
    os_calls = calls.summary(trace, os=True)
    assert os_calls["name"].tolist() == ["poll"]
    assert os_calls["total_ns"].tolist() == [9]
