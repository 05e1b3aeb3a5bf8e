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
def test_a_fault_is_found_and_its_idle_time_is_exact(fault: str | None) -> None:
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
def test_the_gain_is_that_of_the_loop_without_the_fault(fault: str, change: str, without: str | None) -> None:
    trace, _ = synthetic.training(fault)
    repaired, _ = synthetic.training(without)
    true = trace.summary()["window_ns"] / repaired.summary()["window_ns"]
    assert trace.whatif(change)["speedup"].iloc[0] == pytest.approx(true, rel=0.01)


@pytest.mark.parametrize("late", [{}, {1: "slow", 3: "data"}])
def test_late_ranks_are_named(late: dict[int, str]) -> None:
    stragglers = job.survey(synthetic.ranks(late)).stragglers
    assert set(stragglers["rank"]) == set(late)
    for row in stragglers.itertuples():
        assert row.median_late_ns == pytest.approx(2e6, rel=0.1)
        assert ("input" in row.cause) == (late[row.rank] == "data")


def test_events_keep_what_they_were_given() -> None:
    events = synthetic.Events()
    call = events.call("cudaLaunchKernel", 0, 10)
    events.kernel(synthetic.GEMM, 20, 50, call)
    events.range("inner", 2, 5)
    events.range("outer", 1, 60)
    events.graph(60, 90, events.call("cudaGraphLaunch", 50, 55))
    trace = events.trace()
    kernel = trace.table("kernels").iloc[0]
    assert (kernel["end_ns"] - kernel["start_ns"], kernel["short_name"]) == (30, "Kernel2")
    levels = trace.table("ranges", ["name", "level"]).set_index("name")["level"]
    assert (levels["outer"], levels["inner"]) == (0, 1)
    assert trace.summary()["graph_ns"] == 30
