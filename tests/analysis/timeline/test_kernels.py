"""Kernel sums are exact, whatever the grouping."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from nsightkit.analysis.core.grouped import STATISTICS
from nsightkit.analysis.timeline import kernels
from nsightkit.errors import UsageError
from nsightkit.trace.model import Trace

COLUMNS = ["name", "category", *STATISTICS, "share"]


def planted(durations: dict[str, list[int]], **more: Any) -> Trace:
    rows = [(name, ns) for name, all_of_it in durations.items() for ns in all_of_it]
    order = np.random.default_rng(1).permutation(len(rows))
    start = np.arange(len(rows)) * 10_000
    frame = pd.DataFrame(
        {
            "start_ns": start,
            "end_ns": start + np.array([rows[i][1] for i in order]),
            "name": pd.Categorical([rows[i][0] for i in order]),
            **more,
        }
    )
    return Trace.from_frames({"kernels": frame})


def test_statistics_of_each_name():
    table = kernels.summary(
        planted({"volta_sgemm_32x32_nn": [10, 20, 60], "ncclDevKernel_SendRecv": [5, 7], "odd": [1]})
    )
    assert list(table.columns) == COLUMNS
    assert table["name"].tolist() == ["volta_sgemm_32x32_nn", "ncclDevKernel_SendRecv", "odd"]
    assert table["category"].tolist() == ["GEMM", "communication", "other"]
    assert table["count"].tolist() == [3, 2, 1]
    assert table["total_ns"].tolist() == [90, 12, 1]
    assert table["mean_ns"].tolist() == [30, 6, 1]
    assert table["median_ns"].tolist() == [20, 6, 1]
    assert table["min_ns"].tolist() == [10, 5, 1]
    assert table["max_ns"].tolist() == [60, 7, 1]
    # Sample standard deviation; one event has none, and nsys prints 0 there.
    assert table["std_ns"].tolist() == pytest.approx([np.std([10, 20, 60], ddof=1), np.sqrt(2), 0])
    assert table["share"].tolist() == pytest.approx([90 / 103, 12 / 103, 1 / 103])


def test_by_category_merges_names():
    table = kernels.summary(planted({"volta_sgemm_32x32_nn": [10, 20], "nvjet_hsh_1": [3], "odd": [1]}), by="category")
    assert list(table.columns) == COLUMNS
    assert table["name"].tolist() == table["category"].tolist() == ["GEMM", "other"]
    assert table["total_ns"].tolist() == [33, 1]


def test_sorting():
    trace = planted({"long": [1000], "often": [1] * 10})
    assert kernels.summary(trace)["name"].tolist() == ["long", "often"]
    assert kernels.summary(trace, sort="count")["name"].tolist() == ["often", "long"]


def test_sums_are_exact_beyond_the_precision_of_doubles():
    big = 2**52 + 1
    table = kernels.summary(planted({"a": [big, big, 1], "b": [big]}))
    assert table["total_ns"].tolist() == [2**53 + 3, big]


def test_nothing_and_bad_arguments():
    empty = kernels.summary(Trace.from_frames({}))
    assert list(empty.columns) == COLUMNS
    assert not len(empty)
    assert not len(kernels.summary(Trace.from_frames({}), by="category"))
    for wrong in ({"by": "stream"}, {"sort": "name"}):
        with pytest.raises(UsageError):
            kernels.summary(planted({"a": [1]}), **wrong)  # type: ignore[arg-type]
