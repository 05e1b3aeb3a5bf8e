"""Bounds of operations against closed formulas and worked tables; times no card can reach are called so."""

from __future__ import annotations

import pytest

from nsightkit import hardware
from nsightkit.analysis.roofline import sol

H200 = sol.datasheet(hardware.find("H200"))
MEASURED = sol.Rates("a big GEMM and a big copy", {"bf16": 788.0, "fp32": 60.0}, 4300.0)
#: Batch 1, context 2048, hidden 4096, 32 heads, MLP 11008: GFLOP, MB, FLOP/B, µs by datasheet and by ceilings.
PREFILL = {
    "RMSNorm 1": (0.03, 33.6, 1.0, 7.0, 7.8, "memory"),
    "QKV": (206.16, 167.8, 1229, 208.4, 261.6, "compute"),
    "rotary q, k": (0.05, 67.1, 0.8, 14.0, 15.6, "memory"),
    "attention": (34.36, 67.1, 512, 34.7, 43.6, "compute"),
    "output projection": (68.72, 67.1, 1024, 69.5, 87.2, "compute"),
    "residual 1": (0.01, 50.3, 0.17, 10.5, 11.7, "memory"),
    "gate and up": (369.37, 287.3, 1286, 373.3, 468.7, "compute"),
    "SwiGLU": (0.11, 135.3, 0.8, 28.2, 31.5, "memory"),
    "down": (184.68, 152.0, 1215, 186.7, 234.4, "compute"),
}


def _digits(value: float) -> int:
    text = f"{value}"
    return len(text.partition(".")[2])


def test_a_layer_to_the_printed_digits():
    layer = sol.layer_costs(1, 2048, 4096, 32, 11008)
    sheet = sol.bounds(layer, H200).set_index("name")
    measured = sol.bounds(layer, MEASURED).set_index("name")
    for name, (gflop, mb, intensity, sheet_us, measured_us, bound) in PREFILL.items():
        row = sheet.loc[name]
        assert row["flops"] / 1e9 == pytest.approx(gflop, abs=0.0051)
        assert row["bytes"] / 1e6 == pytest.approx(mb, abs=0.051)
        assert round(row["intensity"], _digits(intensity)) == pytest.approx(intensity, rel=1e-9)
        assert row["bound_ns"] / 1e3 == pytest.approx(sheet_us, abs=0.051)
        assert measured.loc[name, "bound_ns"] / 1e3 == pytest.approx(measured_us, abs=0.051)
        assert row["bound"] == bound
    assert sheet["bound_ns"].sum() / 1e3 == pytest.approx(949.7, abs=0.06)
    assert measured["bound_ns"].sum() / 1e3 == pytest.approx(1181.6, abs=0.2)
    tensor = sheet[sheet["bound"] == "compute"]
    assert tensor["flops"].sum() / 1e9 == pytest.approx(863.3, abs=0.05)
    assert tensor["bound_ns"].sum() / 1e3 == pytest.approx(872.5, abs=0.06)  # all else fused away


def test_decoding_is_the_weights():
    layer = sol.layer_costs(1, 1, 4096, 32, 11008, keys=1)
    weights = sum(op.bytes for op in layer if op.unit == "bf16" and op.name != "attention")
    assert weights / 1e6 == pytest.approx(404.75, abs=0.2)
    alone = 2 * (4 * 4096**2 + 3 * 4096 * 11008)  # without the vectors that go in and out
    assert alone < weights < 1.001 * alone
    assert alone / H200.gb_per_s / 1e3 == pytest.approx(84.3, abs=0.051)
    assert alone / MEASURED.gb_per_s / 1e3 == pytest.approx(94.1, abs=0.051)
    assert (sol.bounds(layer, H200)["bound"] == "memory").all()
    # One query sees every key.
    assert sol.attention_cost(2, 8, 1, 64, keys=100).flops == 4 * 2 * 8 * 64 * 100
    # Chunked prefill: each query sees all that came before, and half of its own chunk.
    assert sol.attention_cost(1, 1, 4, 1, keys=10).flops == 4 * (4 * 6 + 8)


def test_the_published_layer_is_impossible():
    """Times that have been printed for an H100, which would need more than twice its peak."""
    h100 = sol.datasheet(hardware.find("H100 SXM"))
    printed = {"QKV": 85e3, "gate and up": 135e3, "down": 68e3, "output projection": 32e3}
    operations = [op for op in sol.layer_costs(1, 2048, 4096, 32, 11008) if op.name in printed]
    table = sol.judge(operations, [printed[op.name] for op in operations], h100).set_index("name")
    assert table["impossible"].all()
    assert (table["sol_datasheet"] > 2).all()
    assert table.loc["QKV", "note"] == "would be 2,425 TFLOP/s, above the peak"


def test_a_cached_tensor_may_beat_the_memory_and_a_large_one_not():
    small, large = sol.elementwise_cost("rms_norm", 2048, 4096), sol.elementwise_cost("rms_norm", 1 << 16, 4096)
    quick = [H200.memory_ns(small) / 2, H200.memory_ns(large) / 2]
    table = sol.judge([small, large], quick, H200)
    assert list(table["impossible"]) == [False, True]
    assert "L2" in table["note"][0]
    assert "too large for the L2 cache" in table["note"][1]


def test_above_the_peak_a_time_is_impossible_and_a_share_of_ceilings_is_exact():
    layer = sol.layer_costs(1, 2048, 4096, 32, 11008)
    for hurry in (0.3, 0.78, 1.0, 3.0):
        table = sol.judge(layer, [hurry * MEASURED.bound_ns(operation) for operation in layer], H200, MEASURED)
        assert table["sol_measured"].tolist() == pytest.approx([1 / hurry] * len(layer))
        compute = table["bound"] == "compute"
        assert (table.loc[compute, "impossible"] == (table.loc[compute, "sol_datasheet"] > 1)).all()
        assert (table["note"] != "").tolist() == (table["sol_datasheet"] > 1).tolist()
    assert sol.bounds([sol.gemm_cost(8, 8, 8, "fp8")], MEASURED)["bound_ns"].isna().all()
