"""Planted counters: consistent in themselves, and read for what they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from _lib import counters as planted_counters

from nsightkit.analysis.roofline import counters as analysis
from nsightkit.trace import ncu, ncu_metrics

each = pytest.mark.parametrize("many_rows", [False, True])


@each
def test_every_planted_limiter_is_found(many_rows: bool) -> None:
    report, truth = planted_counters.counters(many_rows=many_rows)
    for name, expected in truth.items():
        (found,) = analysis.summary(report, within=f"^{name}$").to_dict("records")
        assert found["classification"] == expected["bound"], name
        assert found["occupancy_limiter"] == expected["limiter"], name
        stalls = analysis.stalls(report, within=f"^{name}$")
        assert stalls["share"].sum() == pytest.approx(1.0)


def test_the_reasons_are_those_that_were_planted() -> None:
    report, _ = planted_counters.counters()
    told = {row["kernel"]: " ".join(row["evidence"]) for row in analysis.summary(report).to_dict("records")}
    by_case = dict(zip(planted_counters.counters()[1], report.launches["kernel"], strict=True))
    for case, words in {
        "product": "the tensor cores are busy: 91.0 %",
        "product_fp32": "the busiest other pipe is FMA: 93.0 %",
        "add": "DRAM bandwidth itself is the limit: 92.0 %",
        "strided": "global loads use 4 bytes",
        "softmax": "the grid is too small to fill the GPU once: 0.08 waves",
        "chase": "99 % of a warp's time between two instructions is long_scoreboard",
    }.items():
        assert words in told[by_case[case]], case
    assert "registers 2, shared_mem 32, warps 16, blocks 32" in told["_walk_kernel"]


def test_the_cases_are_those_of_the_workload() -> None:
    pytest.importorskip("torch")
    from _lib import limiters

    assert {n: t["bound"] for n, t in planted_counters.counters()[1].items()} == dict(limiters.CASES)


@each
def test_the_counters_hang_together(many_rows: bool) -> None:
    report, _ = planted_counters.counters(many_rows=many_rows)
    launches = report.launches
    assert launches["gpu"].tolist() == [planted_counters.GPU] * 6
    assert "Synthetic" in planted_counters.GPU
    moved = launches["dram_read_bytes"] + launches["dram_write_bytes"]
    assert (moved / launches["time_ns"] * 1e9).tolist() == pytest.approx(launches["dram_bytes_per_s"].tolist())
    assert (launches["occupancy_pct"] <= launches["theoretical_occupancy_pct"]).all()
    for part in ("sm__throughput", "gpu__compute_memory_throughput"):
        name = f"{part}.avg.pct_of_peak_sustained_elapsed"
        for row in report.metrics:
            assert row[name] == max(row[each] for each in row[f"breakdown:{name}"].split(","))


@each
def test_warps_obey_littles_law(many_rows: bool) -> None:
    """What every user of Nsight Compute can check: cycles between two instructions are warps over issues."""
    launches = planted_counters.counters(many_rows=many_rows)[0].launches
    between = launches["active_warps"] / (launches["issue_pct"] / 100)
    assert launches["latency_cycles"].tolist() == pytest.approx(between.tolist())
    stalls = launches[[column for column in launches if column.startswith("stall_")]]
    assert stalls.sum(axis=1).tolist() == pytest.approx(between.tolist())
    # A warp is selected once for each instruction that it issues.
    assert launches["stall_selected"].tolist() == [1.0] * 6
    assert (launches["occupancy_pct"] / 100 * 64 / 4).tolist() == pytest.approx(launches["active_warps"].tolist())
    assert (launches["eligible_warps"] >= launches["issue_pct"] / 100).all()
    # The walk: eight warps of each multiprocessor, two a scheduler, of which two in a hundred cycles issue.
    chase = launches.set_index(launches["ranges"].str[-1]).loc["chase"]
    assert chase["latency_cycles"] == pytest.approx(100, rel=0.03)


def test_they_can_be_kept_as_a_file(tmp_path: Path) -> None:
    report, _ = planted_counters.counters()
    again = ncu.read(ncu.write(report, tmp_path / "planted.csv"))
    assert analysis.summary(again).to_dict("records") == analysis.summary(report).to_dict("records")
    assert set(report.units) >= {m.nvidia[0] for m in ncu_metrics.METRICS if m.name in ("sm_pct", "waves", "time_ns")}
