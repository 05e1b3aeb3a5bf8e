"""Synthetic traces: the analyses find what was laid out, and nothing else."""

from __future__ import annotations

import pytest
from _lib import synthetic

from nsightkit.analysis.ranks import job

BOTTLENECKS = {
    None: "compute-bound",
    "starved": "input-pipeline",
    "sync": "synchronization",
    "logging": "cpu-work",
    "tiny": "launch-overhead",
    "pageable": "memory-transfer",
    "start-up": "start-up",
}


@pytest.mark.parametrize("fault", BOTTLENECKS)
def test_a_fault_is_found_and_its_idle_time_is_exact(fault: str | None):
    trace, truth = synthetic.training(fault)
    summary = trace.summary()
    assert summary["busy_ns"] == truth["busy_ns"]
    assert summary["idle_ns"] == truth["idle_ns"]
    gaps = trace.gaps().set_index("cause")["total_ns"].to_dict()
    assert gaps == {cause: ns for cause, ns in truth["gaps"].items() if ns}
    assert trace.verdict()["bottleneck"] == BOTTLENECKS[fault]


@pytest.mark.parametrize(
    ("fault", "change", "without"),
    [
        ("starved", "no-input-wait", None),
        ("sync", "no-sync", None),
        ("logging", "no-sync", "logging-ahead"),
        ("start-up", "no-start-up", None),
    ],
)
def test_the_gain_is_that_of_the_loop_without_the_fault(fault: str, change: str, without: str | None):
    trace, _ = synthetic.training(fault)
    repaired, _ = synthetic.training(without)
    true = trace.summary()["window_ns"] / repaired.summary()["window_ns"]
    assert trace.whatif(change)["speedup"].iloc[0] == pytest.approx(true, rel=0.01)


@pytest.mark.parametrize("late", [{}, {1: "slow", 3: "data"}])
def test_late_ranks_are_named(late: dict[int, str]):
    stragglers = job.survey(synthetic.ranks(late)).stragglers
    assert set(stragglers["rank"]) == set(late)
    for row in stragglers.itertuples():
        assert row.median_late_ns == pytest.approx(2e6, rel=0.1)
        assert ("input" in row.cause) == (late[row.rank] == "data")
