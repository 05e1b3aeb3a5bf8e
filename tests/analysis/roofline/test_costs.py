"""Costs of operators from their shapes: planted traces with exact sums, PyTorch's own operators, a real trace."""

from __future__ import annotations

import json
from pathlib import Path

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


FLASH = "aten::_scaled_dot_product_flash_attention"
#: Queries, keys and values of eight heads of 64 positions, 16 wide, and the FLOPs of all their scores.
QKV = [[2, 8, 64, 16]] * 3
SQUARE = 4 * 2 * 8 * 16 * 64 * 64
FLASH_TYPES = [BF16] * 3 + ["Scalar"] * 3 + [""]
SCORES = [[4, 8], [], []], [BF16, "Scalar", "Scalar"]
TABLE = ["float", "long int", "Scalar", "Scalar", "Scalar"]
#: 8 images of 3 channels, 64 filters of 7 x 7 with stride 2 and padding 3: 112 x 112 results.
IMAGE, FILTERS, RESULT = [8, 3, 224, 224], [64, 3, 7, 7], [8, 64, 112, 112]
CONVOLVED = [IMAGE, FILTERS, *[[]] * 7], [BF16, BF16, *[""] * 7], ["", "", "[3, 3]", "[2, 2]", "[1, 1]", "1", *[""] * 3]
CONVOLUTION_FLOPS = 2 * 8 * 64 * 3 * 7 * 7 * 112 * 112
CONVOLUTION_BYTES = 2 * (8 * 3 * 224 * 224 + 64 * 3 * 7 * 7 + 8 * 64 * 112 * 112)
GRADIENTS = [RESULT, IMAGE, FILTERS, *[[]] * 8], [BF16] * 3 + [""] * 8


@pytest.mark.parametrize(
    ("name", "given", "flops", "moved"),
    [
        ("aten::mm", ([[3, 5], [5, 7]], [BF16, BF16]), 210, 2 * (15 + 35 + 21)),
        ("aten::addmm", ([[7], [3, 5], [5, 7], [], []], ["float"] * 3 + ["Scalar"] * 2), 210, 4 * 71),
        (
            "aten::_scaled_mm",
            ([[16, 32], [32, 48]], ["c10::Float8_e4m3fn"] * 2),
            2 * 16 * 32 * 48,
            16 * 32 + 32 * 48 + 16 * 48,
        ),
        # A mask that was not recorded: the least it can be.
        (FLASH, ([*QKV, [], [], [], []], FLASH_TYPES), SQUARE // 2, 2 * 2 * 16 * 8 * 64 * 4),
        (FLASH, ([*QKV, [], [], [], []], FLASH_TYPES, ["", "", "", "0.", "False"]), SQUARE, 131_072),
        (f"{FLASH}_backward", ([QKV[0]] * 5 + [[]] * 8, [BF16] * 5 + [""] * 8), SQUARE // 2 * 5 // 2, 262_144),
        ("aten::add_", ([[4, 100], [100], []], [BF16, BF16, "Scalar"]), 400, 2 * (400 + 100 + 400)),
        ("aten::copy_", ([[8, 8], [8, 8], []], ["float", BF16, "Scalar"]), 0, 64 * 6),
        # A mask has a byte an element; what is filled is only written.
        ("aten::masked_fill", ([[8, 8], [8, 8], []], [BF16, "bool", "Scalar"]), 0, 64 * 5),
        ("aten::fill_", ([[8, 8], []], ["long int", "Scalar"]), 0, 64 * 8),
        ("aten::mean", ([[8, 8], [], [], []], ["float", "ScalarList", "Scalar", ""]), 64, 64 * 4),
        # 16-bit scores whose softmax is taken in fp32, by the third input.
        ("aten::_softmax", (*SCORES, ["", "-1", "False"]), 160, 32 * 4),
        ("aten::_softmax", (*SCORES, ["", "-1", "True"]), 160, 32 * 6),
        ("aten::embedding", ([[100, 16], [2, 5], [], [], []], TABLE), 0, 2 * 4 * 10 * 16),
        ("aten::cudnn_convolution", CONVOLVED, CONVOLUTION_FLOPS, CONVOLUTION_BYTES),
        # One dimension, dilated: (100 + 2 - 2 * 2 - 1) + 1 results.
        (
            "aten::cudnn_convolution",
            ([[1, 4, 100], [6, 4, 3]], ["float"] * 2, ["", "", "[1]", "[1]", "[2]", "1"]),
            *(2 * 6 * 4 * 3 * 98, 4 * (400 + 72 + 6 * 98)),
        ),
        # Both gradients, and the least where that was not recorded.
        (
            "aten::convolution_backward",
            (*GRADIENTS, [*[""] * 10, "[True, True, False]"]),
            *(2 * CONVOLUTION_FLOPS, 2 * CONVOLUTION_BYTES),
        ),
        ("aten::convolution_backward", (*GRADIENTS, []), CONVOLUTION_FLOPS, CONVOLUTION_BYTES),
    ],
)
def test_costs_by_hand(name: str, given: tuple, flops: int, moved: int) -> None:
    found = cost(name, inputs(*given))
    assert found is not None
    assert (found.flops, found.bytes) == (flops, moved)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("aten::linear", inputs([[3, 5], [7, 5]], ["float"] * 2)),  # calls others
        ("aten::mm", ""),
        ("aten::mm", inputs([[3, 5], [5, 7]], [])),  # types are never assumed
        ("aten::_foreach_add_", inputs([[[8, 8], [3]]] * 2, ["TensorList"] * 2)),  # of unknown type
        ("aten::cudnn_convolution", inputs(CONVOLVED[0], CONVOLVED[1])),  # of unknown stride
        ("aten::mm", inputs([[3, 5], [5, 7]], ["c10::complex<float>"] * 2)),
        ("aten::add", inputs([[], []], ["Scalar", "Scalar"])),
        ("mine::mm", inputs([[3, 5], [5, 7]], ["float"] * 2)),
        ("aten::mm", "not json"),
        ("aten::mm", inputs([[1 << 40, 1 << 40], [1 << 40, 7]], ["float"] * 2)),
        ("aten::mm", "[" * 100_000),
    ],
)
def test_what_has_no_known_cost(name: str, given: str) -> None:
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


def test_a_planted_trace_is_judged_exactly() -> None:
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


def test_the_card_must_be_known() -> None:
    with pytest.raises(UsageError, match="--gpu"):
        sol.summary(planted(gpu=None))
    with pytest.raises(UsageError, match="not known"):
        sol.summary(planted(gpu="Voodoo 2"))


@pytest.mark.parametrize("absent", ["kernels", "ops"])
def test_nothing_recorded_gives_nothing(absent: str) -> None:
    trace = planted()
    frames = {table: trace.table(table) for table in ("ops", "calls", "kernels") if table != absent}
    table = sol.summary(Trace.from_frames(frames, TraceMeta(tool="planted", missing=[absent])))
    assert table.empty
    assert list(table.columns) == list(sol.summary(trace).columns)


def test_operators_of_pytorch_are_counted_as_it_counts_them(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 8))
    batch = torch.randn(4, 32, 64)

    def step() -> None:
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


def test_a_real_trace_stays_below_the_speed_of_light(shared_traces: Path) -> None:
    """A video transformer on an H100: nothing impossible, and GEMMs where GEMMs of such sizes are."""
    path = next((shared_traces / "tracelens").glob("h100*timesformer*.json.gz"))
    trace = nsightkit.load(path, cache=False)
    table = sol.summary(trace)
    assert not table["impossible"].any()
    assert table["time_ns"].sum() > 0.9 * trace.table("kernels", ["duration_ns"])["duration_ns"].sum()
    large = table[table["name"].str.startswith("aten::addmm") & (table["flops"] / table["count"] > 5e10)]
    assert large["sol_datasheet"].between(0.6, 0.85).all()
