"""Synthetic counters: consistent in themselves, and read for what they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from _lib import counters as synthetic

from nsightkit.analysis.roofline import counters as analysis
from nsightkit.trace import ncu

each = pytest.mark.parametrize("many_rows", [False, True])


@each
def test_every_limiter_is_found_also_in_a_file(many_rows: bool, tmp_path: Path):
    report, truth = synthetic.counters(many_rows=many_rows)
    again = ncu.read(ncu.write(report, tmp_path / "synthetic.csv"))
    assert analysis.summary(again).to_dict("records") == analysis.summary(report).to_dict("records")
    for name, expected in truth.items():
        (found,) = analysis.summary(report, within=f"^{name}$").to_dict("records")
        assert found["classification"] == expected["bound"], name
        assert found["occupancy_limiter"] == expected["limiter"], name
        assert analysis.stalls(report, within=f"^{name}$")["share"].sum() == pytest.approx(1.0)


def test_the_cases_are_those_of_the_workload():
    pytest.importorskip("torch")
    from _lib import limiters

    assert {n: t["bound"] for n, t in synthetic.counters()[1].items()} == dict(limiters.CASES)


@each
def test_the_counters_hang_together(many_rows: bool):
    report, _ = synthetic.counters(many_rows=many_rows)
    launches = report.launches
    assert launches["gpu"].tolist() == ["Synthetic GPU"] * 6
    moved = launches["dram_read_bytes"] + launches["dram_write_bytes"]
    assert (moved / launches["time_ns"] * 1e9).tolist() == pytest.approx(launches["dram_bytes_per_s"].tolist())
    assert (launches["occupancy_pct"] <= launches["theoretical_occupancy_pct"]).all()
    # What every user of Nsight Compute can check: cycles between two instructions are warps over issues.
    between = launches["active_warps"] / (launches["issue_pct"] / 100)
    assert launches["latency_cycles"].tolist() == pytest.approx(between.tolist())
    stalls = launches[[column for column in launches if column.startswith("stall_")]]
    assert stalls.sum(axis=1).tolist() == pytest.approx(between.tolist())
    assert (launches["occupancy_pct"] / 100 * 64 / 4).tolist() == pytest.approx(launches["active_warps"].tolist())
    assert (launches["eligible_warps"] >= launches["issue_pct"] / 100).all()
