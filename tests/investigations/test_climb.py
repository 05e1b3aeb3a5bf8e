"""What ladders are predicted to be, figures that others reported, and products of the case files."""

from __future__ import annotations

import matplotlib as mpl
import pytest

mpl.use("Agg")
pytest.importorskip("torch")

from pathlib import Path

import pandas as pd

from nsightkit import hardware, plots
from nsightkit.analysis.roofline import counters, sol
from nsightkit.investigations import cases, recordings
from nsightkit.investigations.measurement import Measurement
from nsightkit.investigations.pages import climb, published
from nsightkit.investigations.parts import find
from nsightkit.trace import ncu
from nsightkit.trace.model import Trace, TraceMeta

H200 = sol.datasheet(hardware.find("H200"))


def test_the_predicted_ladder_is_the_one_worked_out_by_hand():
    table = climb.predicted("prefill", find("ladder", "naive").gpu, H200).set_index("rung")
    assert list(table.index) == ["naive", "sdpa", "fused", "compiled"]
    assert table["share"].round(3).tolist() == [0.456, 0.791, 0.791, 1]
    assert table.loc["compiled", ["lower_ns", "least_ns"]].tolist() == pytest.approx([872.5e3, 949.7e3], abs=100)


def test_a_decoded_token_waits_for_its_launches_and_then_for_its_bytes():
    table = climb.predicted("decode", find("decode", "eager").gpu, H200).set_index("rung")
    eager, compiled = table.loc["eager"], table.loc["compiled"]
    assert eager["least_ns"] == 1e3 * climb.LAUNCH_US * eager["launches"]
    # 404.75 MB of weights and 33.55 MB of keys and values.
    assert compiled["least_ns"] == pytest.approx((404.75e6 + 33.55e6) / 4800, rel=2e-3)


def test_reported_rates_have_the_shares_that_their_sources_say():
    said = {("H100", 794.5): 0.803, ("A100", 271.2): 0.869, ("B200", 1745.0): 0.776, ("B200", 1414.3): 0.629}
    said |= {("H200", 1453.4): 0.734, ("H100", 1402.6): 0.709, ("B200", 3432.5): 0.763, ("H100", 3240.0): 0.97}
    said |= {("B200", 1358.7): 0.604, ("H100", 855.0): 0.86, ("H800", 1550.0): 0.783, ("H800", 3000.0): 0.896}
    found = {(one.gpu, one.rate): one.share for one in published.REPORTED}
    for key, share in said.items():
        assert found[key] == pytest.approx(share, abs=5e-3), key
    assert len(published.rates_table()) == len(published.REPORTED)
    assert published.rates("H200").tflops["bf16"] == 794.5
    assert published.rates("H200").gb_per_s == 4800  # nobody reported one


@pytest.mark.parametrize(
    ("file", "launches"),
    [
        ("ESMM/profile_b.ncu-rep", published.PRODUCTS),
        ("armleth/report_v4_8_per_thread.ncu-rep", published.ADDITIONS[-1:]),
    ],
)
def test_reported_counters_are_those_of_the_published_reports(file, launches, shared_traces):
    pytest.importorskip("ncu_report")
    report = ncu.read(shared_traces / file)
    found = report.launches.assign(**counters.summary(report)[["classification"]])
    table = published.counted(launches)
    assert list(found["classification"]) == list(table["classification"])
    assert list(found["time_ns"] / 1e3) == pytest.approx(list(table["time_us"]))
    for name in ("sm_pct", "memory_pct"):
        assert list(found[name]) == pytest.approx(list(table[name]), abs=0.006), name
    assert all(part in name for part, name in zip(table["name"], found["kernel"], strict=True) if "blocktiling" in part)
    if launches is published.PRODUCTS:
        assert list(found["waves"]) == pytest.approx(list(table["waves"]))
    else:
        (moved,) = (found["dram_read_bytes"] + found["dram_write_bytes"]) / 1e6
        assert (moved, found["global_load_bytes_per_sector"].iloc[0]) == pytest.approx((20.598, 4), abs=1e-3)


def test_the_product_of_the_case_file():
    if "h200-matmul" not in cases.names():
        pytest.skip("the case files come with the source")
    table = published.on_h200()
    assert (table["time_ns"] / 1e3).round(1).tolist() == [135.1, 132.5, 124.7, 87.5, 87.6, 87.7]
    assert table["sol_datasheet"].round(2).tolist() == [0.51, 0.52, 0.56, 0.79, 0.79, 0.79]


def test_operators_are_picked_by_one_beginning_only():
    table = pd.DataFrame({"name": ["aten::mm 2x3", "aten::mm 4x5", "aten::add 2"], "time_ns": [3, 2, 1]})
    found = published.one_by_one(table, {"aten::add": "sum", "aten::mm 4": "product"})
    assert found.to_dict("list") == {"name": ["sum", "product"], "time_ns": [1, 2]}
    with pytest.raises(ValueError, match="too many values"):
        published.one_by_one(table, {"aten::mm": "which one?"})


def test_rungs_without_a_time_are_awaited():
    table = climb.predicted("prefill", find("ladder", "naive").gpu, H200)
    figure = plots.ladder_slots(table, {"goal": 1.4e6}, {"naive": 2.7e6}, title="Slots (predicted)")
    assert "naive 2.08 ms at best, 2.70 ms" in figure.get_label()
    assert "sdpa 1.20 ms at best, awaiting a GPU" in figure.get_label()
    assert "lines at goal 1.40 ms" in figure.get_label()


def _runs(step_us: dict[str, list[float]], gpu: str | None = "NVIDIA H200") -> dict[str, Measurement]:
    """Runs of one layer, with no kernels recorded."""
    empty = Trace.from_frames({}, TraceMeta(tool="planted", missing=["kernels"]))
    runs = {}
    for rung, times in step_us.items():
        sizes = {**find("ladder", rung).gpu, "layers": 1, "instead": ""}
        facts = {"investigation": "ladder", "part": rung, "parameters": sizes, "gpu": gpu and {"name": gpu}}
        samples = recordings.frame({"step_ns": [1e3 * time for time in times], "sm_clock_mhz": [1500.0]})
        runs[rung] = Measurement(Path(), "replay", samples, facts)
        runs[rung].__dict__["trace"] = empty
    return runs


def _about(us: float) -> list[float]:
    return [us + noise for noise in (-2, -1, 0, 1, 2, 0)]


def test_rungs_are_told_apart_by_the_rule_of_all_pages():
    runs = _runs({"naive": _about(2755), "sdpa": _about(1690), "fused": _about(1690.5), "compiled": _about(1800)})
    climbed = climb.Climb("prefill", runs)
    outcomes = climbed.steps.set_index("rung")
    assert outcomes["outcome"].to_dict() == {
        "sdpa": "faster", "fused": "no effect beyond the spread", "compiled": "slower"
    }  # fmt: skip
    assert outcomes["saved (µs)"].tolist() == pytest.approx([1065, -0.5, -109.5])
    assert (climbed.best, climbed.faster, climbed.comparable) == ("sdpa", True, True)
    said = climbed.said("a layer")
    assert "a layer goes from 2,755.0 to 1,690.0 µs (sdpa), 1.6 times as fast." in said
    assert "34% of the datasheet" in said
    assert "Changes without an effect of their own: fused." in said
    # At 1,500 MHz the units could do 1500 / 1830 of the datasheet, the memory all of it.
    slow = sol.datasheet(hardware.find("H200"), 1500)
    least = sum(map(slow.bound_ns, climb.operations("prefill", runs["naive"].parameters)))
    assert climbed.checked["share at its clock"].tolist()[0] == pytest.approx(least / 2755e3)


def test_runs_of_two_machines_are_not_compared():
    runs = _runs({"naive": _about(2755)}) | _runs({"sdpa": _about(1690)}, gpu=None)
    assert "nothing to compare" in climb.Climb("prefill", runs).said("a layer")


def test_a_rung_that_changed_nothing_is_not_faster():
    climbed = climb.Climb("prefill", _runs({"naive": _about(2755), "sdpa": _about(2754.9)}, gpu=None))
    assert not climbed.faster
    assert climbed.said("a layer").startswith("no rung beats the first (2,755.0 µs for a layer)")
