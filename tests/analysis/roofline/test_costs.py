"""Costs of operators from their shapes: planted traces with exact sums, PyTorch's own operators, a real trace."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import nsightkit
from nsightkit.analysis.roofline import sol
from nsightkit.analysis.roofline.costs import cost
from nsightkit.errors import UsageError
from nsightkit.trace.model import Gpu, Trace, TraceMeta

BF16 = "c10::BFloat16"


def inputs(dims: list, types: list, values: list | None = None) -> str:
    return json.dumps([dims, types, values or []])


ROWS = tomllib.loads(Path(__file__).with_name("costs.toml").read_text(encoding="utf-8"))["row"]


@pytest.mark.parametrize("row", ROWS)
def test_costs_by_hand(row: dict[str, Any]):
    found = cost(row["name"], inputs(row["dims"], row["types"], row.get("values")))
    assert found is not None
    assert (found.flops, found.bytes) == (row["flops"], row["bytes"])


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("aten::linear", '[[[3, 5], [7, 5]], ["float", "float"], []]'),  # calls others
        ("aten::mm", ""),
        ("aten::mm", "[[[3, 5], [5, 7]], [], []]"),  # types are never assumed
        ("aten::mm", '[[[3, -5], [-5, 7]], ["float", "float"], []]'),
        ("aten::mm", '[[[3, 5], [5, 7]], ["c10::complex<float>", "float"], []]'),
        ("aten::mm", '[[[1099511627776, 1099511627776], [1099511627776, 7]], ["float", "float"], []]'),
        ("aten::cudnn_convolution", '[[[8, 3, 4, 4], [6, 3, 1, 1]], ["float", "float"], []]'),  # of unknown stride
        ("aten::add", '[[[], []], ["Scalar", "Scalar"], []]'),
        ("mine::mm", '[[[3, 5], [5, 7]], ["float", "float"], []]'),
        ("aten::mm", "not json"),
        ("aten::mm", "[" * 100_000),
    ],
)
def test_what_has_no_known_cost(name: str, given: str):
    assert cost(name, given) is None


def planted(gpu: str | None = "NVIDIA H200") -> Trace:
    """Two products of the same shape, one of two kernels, one inside an operator that only calls; a sum; a stranger."""
    product = inputs([[2048, 4096], [4096, 4096]], [BF16, BF16])
    ops = [
        ("aten::linear", 0, 100_000, "[[[1,2048,4096],[4096,4096]],[],[]]"), ("aten::mm", 10_000, 90_000, product),
        ("aten::mm", 110_000, 190_000, product),
        ("aten::add", 200_000, 290_000, inputs([[64, 1 << 20]] * 2, [BF16] * 2)),
        ("mine::thing", 300_000, 390_000, ""),
    ]  # fmt: skip
    launches = [20_000, 120_000, 150_000, 210_000, 310_000]
    lasting = [100_000, 70_000, 50_000, 90_000, 1_000_000]
    thread = 1 << 24 | 1
    calls = pd.DataFrame({"start_ns": launches, "correlation": range(1, 6), "name": "cudaLaunchKernel"})
    calls = calls.assign(end_ns=calls["start_ns"] + 3_000, thread=thread, process=1)
    start = 400_000 + np.cumsum([0, *lasting[:-1]])
    kernels = pd.DataFrame(
        {"start_ns": start, "end_ns": start + lasting, "correlation": range(1, 6), "name": "nvjet_tst"}
    )
    frame = pd.DataFrame(ops, columns=["name", "start_ns", "end_ns", "inputs"]).assign(thread=thread, process=1)
    frames = {"ops": frame, "calls": calls, "kernels": kernels.assign(process=1, stream=7)}
    return Trace.from_frames(frames, TraceMeta(tool="planted", gpus=[Gpu(device=0, name=gpu)]))


def test_a_planted_trace_is_judged_exactly():
    table = sol.summary(planted()).set_index("name")
    product = table.loc["aten::mm 2048x4096 4096x4096 bf16"]
    flops = 2 * 2048 * 4096 * 4096
    assert (product["count"], product["time_ns"], product["flops"]) == (2, 220_000, 2 * flops)
    assert product["sol_datasheet"] == pytest.approx(2 * flops / 989.4e12 / 220e-6, rel=1e-3)
    assert (product["bound"], bool(product["impossible"])) == ("compute", False)
    # 64 Mi elements, three times two bytes, in 90 µs: 4.5 TB/s.
    moved = table.loc["aten::add 64x1048576 64x1048576 bf16"]
    assert moved["sol_datasheet"] == pytest.approx(3 * 2 * (64 << 20) / 90e-6 / 4.8e12)
    assert len(table) == 2  # what is unknown is not there
    measured = sol.Rates("ceilings", {"bf16": 788.0}, 4300.0)  # that of fp32 does not matter where memory is the bound
    assert sol.summary(planted(), measured=measured)["sol_measured"].notna().all()
    unknown = sol.summary(planted(), measured=sol.Rates("ceilings", {}, 4300.0))
    assert unknown["sol_measured"].isna().sum() == 1


def test_the_card_must_be_known():
    with pytest.raises(UsageError, match="--gpu"):
        sol.summary(planted(gpu=None))
    with pytest.raises(UsageError, match="not known"):
        sol.summary(planted(gpu="Voodoo 2"))


@pytest.mark.parametrize("absent", ["kernels", "ops"])
def test_nothing_recorded_gives_nothing(absent: str):
    trace = planted()
    frames = {table: trace.table(table) for table in ("ops", "calls", "kernels") if table != absent}
    table = sol.summary(Trace.from_frames(frames, TraceMeta(tool="planted", missing=[absent])))
    assert table.empty
    assert list(table.columns) == list(sol.summary(trace).columns)


def test_operators_of_pytorch_are_counted_as_it_counts_them(tmp_path: Path):
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 8))
    batch = torch.randn(4, 32, 64)

    def step():
        model(batch).square().sum().backward()

    with FlopCounterMode(display=False) as counter:
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiling:
        step()
    profiling.export_chrome_trace(str(tmp_path / "t.json"))
    ops = nsightkit.load(tmp_path / "t.json", cache=False).table("ops", ["name", "inputs"])
    flops = 0
    for name, given in ops.itertuples(index=False):
        operation = cost(str(name), str(given))
        if operation is not None and "mm" in operation.name:
            flops += operation.flops
    assert flops == counter.get_total_flops()


def test_a_real_trace_stays_below_the_speed_of_light(shared_traces: Path):
    """A video transformer on an H100: nothing impossible, and GEMMs where GEMMs of such sizes are."""
    path = next((shared_traces / "tracelens").glob("h100*timesformer*.json.gz"))
    trace = nsightkit.load(path, cache=False)
    table = sol.summary(trace)
    assert not table["impossible"].any()
    assert table["time_ns"].sum() > 0.9 * trace.table("kernels", ["duration_ns"])["duration_ns"].sum()
    large = table[table["name"].str.startswith("aten::addmm") & (table["flops"] / table["count"] > 5e10)]
    assert large["sol_datasheet"].between(0.6, 0.85).all()
