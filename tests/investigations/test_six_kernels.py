"""What six kernels must cost, and what is read of their counters."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from _lib import counters as planted_counters

from nsightkit.investigations.pages import six_kernels
from nsightkit.investigations.parts import find
from nsightkit.workloads.limiters import CASES


def test_their_least_costs():
    sizes = find("limiters", "before").gpu
    product, _, add, strided, softmax, chase = six_kernels.operations(sizes)
    assert product.flops == 2 * 8192**3
    assert (add.flops, add.bytes) == (strided.flops, strided.bytes) == (2**26, 8 * 2**26)
    assert softmax.bytes == 2 * 4 * 2**26
    # 1,024 walks: 128 hops and 128 threads' 192 numbers each, of four bytes.
    assert chase.bytes == 1024 * 4 * (128 + 128 * 192)
    assert [op.name for op in six_kernels.operations(sizes, ["chase", "add"])] == ["chase", "add"]


def test_counters_are_read_by_range():
    report, truth = planted_counters.counters()
    table = six_kernels.counted(report)
    assert dict(zip(table["name"], table["classification"], strict=True)) == dict(CASES)
    assert list(table["name"]) == list(truth)
    assert six_kernels.counted(None).empty


def test_waits_sum_to_the_whole_and_name_the_longest():
    report, _ = planted_counters.counters()
    waits = six_kernels.waits(report, six_kernels.counted(report), most=3)
    assert list(waits) == list(CASES)
    for shares in waits.values():
        assert shares.sum() == pytest.approx(1)
        assert len(shares) == 4
    assert waits["chase"].idxmax() == "long_scoreboard"
