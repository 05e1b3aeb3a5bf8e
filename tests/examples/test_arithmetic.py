"""What pages work out before and after a measurement: ladders, sweeps, the matrix, and published figures."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from nsightkit import hardware
from nsightkit.analysis.core.noise import Estimate
from nsightkit.analysis.roofline import sol
from nsightkit.configurations import MATRIX, VARIANTS

torch = pytest.importorskip("torch")

from _lib import climb, counters, launches, matrix, published, six_kernels, sweep  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from nsightkit.workloads import attention, layer, lm  # noqa: E402

LAYER = {"batch": 1, "context": 2048, "hidden": 4096, "heads": 32, "d_ff": 11_008, "layers": 3}
SMALL = {"batch": 1, "context": 24, "hidden": 64, "heads": 4, "d_ff": 112}
EAGER = [("prefill", "unfused"), ("prefill", "sdpa"), ("prefill", "fused"), ("decode", "unfused"), ("decode", "fused")]
H200 = sol.datasheet(hardware.find("H200"))


# -- launches of a layer


@pytest.mark.parametrize(("mode", "rung"), EAGER)
def test_flops_that_are_counted_are_those_that_run(mode: str, rung: str):
    work = layer.run("cpu", mode=mode, rung=rung, layers=1, **SMALL)
    with work, FlopCounterMode(display=False) as counter:
        work.step()
    by_operator = counter.get_flop_counts()["Global"]
    gemms = sum(flops for operator, flops in by_operator.items() if str(operator) in ("aten.mm", "aten.addmm"))
    counted = launches.count(mode, rung, SMALL)
    assert sum(operation.flops for operation in counted if operation.name == "mm") == gemms
    listed = climb.operations(mode, SMALL)
    assert gemms == sum(o.flops for o in listed if o.unit == "bf16" and o.name != "attention")
    assert sum(operation.bytes for operation in counted) > sum(o.bytes for o in listed)


def test_a_written_norm_moves_nine_times_what_it_must():
    """A norm of eight operations: 2 bytes in, 4 through six passes, 2 out."""
    counted = launches.count("prefill", "unfused", LAYER)
    first = [operation.name for operation in counted].index("mm")
    moved = sum(operation.bytes for operation in counted[:first])
    assert moved == pytest.approx((6 + 8 + 4 + 8 + 6 + 4) * 2048 * 4096, rel=1e-3)


# -- ladders


def test_bounds_are_those_worked_out_by_hand():
    listed = climb.operations("prefill", LAYER)
    assert climb.list_ns(listed, H200) / 1e3 == pytest.approx(949.7, abs=0.1)
    assert climb.floor_ns(listed, H200) / 1e3 == pytest.approx(872.5, abs=0.1)
    table = climb.predicted("prefill", LAYER, H200)
    assert table["rung"].tolist() == ["unfused", "sdpa", "fused", "compiled"]
    assert table["least_ns"].is_monotonic_decreasing
    assert table["share"].iloc[-1] == 1
    assert table["launches"].dropna().is_monotonic_decreasing
    decode = climb.predicted("decode", LAYER, H200).iloc[0]
    assert decode["least_ns"] == 1e3 * climb.LAUNCH_US * decode["launches"]


def measured(step_us: float, name: str | None = "NVIDIA H200") -> Any:
    """A measurement of some steps."""
    rng = np.random.default_rng(round(step_us))
    times = 1e3 * step_us * rng.uniform(0.99, 1.01, 60)
    median = {"step_ns": float(np.median(times)), "sm_clock_mhz": 1600.0}.get
    return SimpleNamespace(gpu=name, parameters=LAYER, values=lambda metric: times, median=median)


def test_every_rung_is_compared_with_the_same_list():
    runs = {
        "unfused": measured(3 * 2755),
        "sdpa": measured(3 * 1700),
        "fused": measured(3 * 1699),
        "fp8": measured(3 * 800),
    }
    against = climb.bounds("prefill", runs["unfused"])
    table = climb.table(runs, against)
    assert table.loc["unfused", "sol_datasheet"] == pytest.approx(949.7 / 2755, rel=0.01)
    assert table.loc["fused", "speedup"] == pytest.approx(2755 / 1699, rel=0.01)
    assert np.isnan(table.loc["fp8", "sol_datasheet"])  # it does other arithmetic
    assert np.isnan(table["sol_measured"]).all()
    assert not table["impossible"].any()
    assert table["sm_clock_mhz"].tolist() == 4 * [1600.0]
    judged = climb.changes(runs, against)
    assert judged["saved_us"].iloc[0] == pytest.approx(2755 - 1700, rel=0.05)
    assert judged["most_us"].iloc[0] == pytest.approx(2755 - 872.5, rel=0.01)
    assert judged["outcome"].tolist() == ["faster", "within the noise"]
    assert "(fused), 1.6x faster" in climb.answer("a layer", table, judged)


def test_times_that_no_gpu_can_have_are_flagged():
    runs = {"unfused": measured(3 * 2755), "sdpa": measured(3 * 383)}
    against = climb.bounds("prefill", runs["unfused"])
    assert climb.table(runs, against)["impossible"].tolist() == [False, True]
    assert climb.changes(runs, against)["outcome"].tolist() == ["more than predicted"]


# -- the sweep of attention


@pytest.mark.parametrize("implementation", ["naive", "math"])
def test_footprints_hold_to_the_byte(implementation: str):
    """Against the tensors of one cell, on a CPU."""
    from synthetic.tensor_memory import TensorMemory

    sizes = {"implementation": implementation, "precision": "fp32", "d_model": [32], "context": [64]}
    with attention.run("cpu", **sizes, batch=2, heads=2) as work:
        inputs = work.inputs(32, 64)
        with TensorMemory() as memory:
            for tensor in inputs:
                memory.see(tensor)
            attended = work.forward(inputs)
            forward = memory.peak_bytes
            memory.reset_peak()
            work.backward(inputs, attended)
            found = (forward, memory.peak_bytes)
        memory.close()
    assert found == sweep.footprint(implementation, "fp32", d=32, context=64, batch=2, heads=2)


def test_a_forecast_is_the_longest_context_that_fits():
    table = sweep.forecast(141e9, "naive", "fp32", d=[64], contexts=[16_384, 65_536]).set_index("direction")
    longest = int(table.loc["backward", "largest_context"])
    assert sweep.footprint("naive", "fp32", d=64, context=longest).backward_peak <= 141e9
    assert sweep.footprint("naive", "fp32", d=64, context=longest + 1).backward_peak > 141e9
    assert table["context"].tolist() == [65_536, 65_536]


def test_what_a_sweep_says():
    """Of a sweep whose forward pass runs out of memory at 4096."""
    rows = []
    line = {"implementation": "naive", "precision": "fp32", "d": 64, "batch": 8, "heads": 1, "direction": "forward"}
    for context in (1024, 2048):
        peak = sweep.footprint("naive", "fp32", d=64, context=context).forward_peak
        rows.append({**line, "context": context, "status": "ok", "median_ns": context**2, "peak_bytes": peak})
    rows.append({**line, "context": 4096, "status": "oom", "median_ns": math.nan, "peak_bytes": math.nan})
    table = sweep.cells(pd.DataFrame(rows))
    assert table["error"].dropna().tolist() == [0, 0]
    slopes = sweep.exponents(table).iloc[0]
    assert slopes["time"] == pytest.approx(2)
    assert slopes["memory"] == pytest.approx(2, abs=0.1)
    limit = sweep.footprint("naive", "fp32", d=64, context=3000).forward_peak
    for room, outcome in ((limit, "as predicted"), (8 * limit, "earlier"), (limit / 8, "later")):
        assert sweep.ends(table, room)["outcome"].tolist() == [outcome]
    assert sweep.ends(table[table["status"] == "ok"], limit)["outcome"].tolist() == ["not reached"]
    assert sweep.cells(pd.DataFrame()).empty


# -- the matrix of models


def test_small_models_keep_their_shape():
    for model in (*MATRIX, *VARIANTS):
        sizes = matrix.sizes(model, divisor=16)
        assert (sizes["layers"], sizes["heads"]) == (model.layers, model.heads)
        assert sizes["d_model"] % model.heads == 0
        lm.LMConfig(**sizes)  # no unknown field


def test_expectations_are_judged_by_their_data():
    models = list(matrix.EXPECTED)
    summary = pd.DataFrame({"TFLOP/s": 100.0, "share idle": 0.1}, index=models)
    summary.loc["latency_bound", "TFLOP/s"], summary.loc["compute_bound", "TFLOP/s"] = 5.0, 400.0
    kinds = pd.DataFrame({name: {"GEMM": 6.0, "attention": 1.0, "(others)": 3.0} for name in models})
    ratios = {"model_b": Estimate(0.8, 0.7, 0.9), "misaligned_dims": Estimate(0.9, 0.7, 1.2)}
    ratios["bad_head_size"] = Estimate(1.0, 0.98, 1.02)
    outcome = matrix.judged(summary, kinds, 0.7, ratios).set_index("model")["outcome"]
    assert outcome["model_b"] == outcome["bad_head_size"] == outcome["latency_bound"] == "holds"
    assert outcome["misaligned_dims"] == "not shown"
    assert outcome["bandwidth_bound"] == outcome["wide_ffn"] == outcome["deep_sequential"] == "does not hold"


# -- what others published, and the six kernels


def test_published_rates_are_below_the_datasheet():
    for reported in published.REPORTED.itertuples():
        gpu = hardware.find(reported.gpu)
        peak = gpu.gb_per_s if reported.unit == "memory" else gpu.peak(reported.unit).tflops
        assert 0 < reported.rate < peak
    shares = published.shares().set_index("unit")
    assert shares["rates"].sum() == len(published.REPORTED)
    assert shares.loc["bf16", "highest"] == "87%"
    assert published.counted(published.ADDITIONS)["classification"].iloc[0] == "memory-bound"


def test_products_of_the_case_file():
    table = published.on_h200()
    assert len(table) == 6
    assert table["sol_datasheet"].between(0.4, 0.9).all()
    with pytest.raises(ValueError, match="0 operators"):
        published.one_by_one(table, {"nothing": "x"})


def test_the_six_kernels_have_costs_counters_and_waits():
    sizes = {"side": 8192, "side_fp32": 4096, "elements": 2**26, "rows": 16, "programs": 1024, "hops": 128}
    costs = six_kernels.operations(sizes)
    assert list(costs) == list(six_kernels.CASES)
    assert costs["product"].flops == 2 * 8192**3
    report, truth = counters.counters()
    table = six_kernels.counted(report)
    assert table["classification"].tolist() == [truth[name]["bound"] for name in table["name"]]
    for shares in six_kernels.waits(report, table).values():
        assert shares.sum() == pytest.approx(1)
    assert six_kernels.counted(None).empty
