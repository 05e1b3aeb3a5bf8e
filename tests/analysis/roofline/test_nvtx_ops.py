"""Operators in the names of NVTX ranges: PyTorch's own strings, planted exports, exact sums, kernels' real names."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from synthetic.planted import Export

import nsightkit
from nsightkit import cli
from nsightkit.analysis.core.intervals import enclosing, launch_of
from nsightkit.analysis.roofline import costs as op_costs
from nsightkit.analysis.roofline import nvtx_ops, sol
from nsightkit.errors import UsageError
from nsightkit.trace.model import Trace, TraceMeta

#: As PyTorch 2.13 emits them, but for the second, third and last but two: 1.8 had no ids, and builds for ROCm differ.
STRINGS = {
    "aten::addmm, seq = 1, op_id = 6, sizes = [[128], [128, 64], [64, 128], [], []], "
    "input_op_ids = [(0,-1), (2,0), (3,0), (0,-1), (0,-1)]": ("aten::addmm", [[128], [128, 64], [64, 128], [], []]),
    "aten::mm, seq = 3, sizes = [[2, 3], [3, 4]]": ("aten::mm", [[2, 3], [3, 4]]),
    "aten::mm, sizes = [[2, 3], [3, 4]]": ("aten::mm", [[2, 3], [3, 4]]),
    "aten::sum, op_id = 31, sizes = [[4, 32, 8], [], [], []], input_op_ids = [(26,0), (0,-1), (0,-1), (0,-1)]": (
        "aten::sum",
        [[4, 32, 8], [], [], []],
    ),
    "SumBackward0, seq = 9, op_id = 39, sizes = [[]], input_op_ids = [(34,0)]": ("SumBackward0", [[]]),
    "aten::transpose, seq = 12, op_id = 253": None,
    "autograd::engine::evaluate_function: SumBackward0, op_id = 38": None,
    "my block, op_id = 208": None,
    "step": None,
    "": None,
    "aten::mm, sizes = [[2, x]]": None,
    "aten::mm, sizes = [[2, 3], [3, 4]": None,
    "aten::mm, op_id = 2, sizes = [[2, 3], [3, 4]], more": None,
    "aten::cat, seq = 12, op_id = 207, sizes = [[4, 32, 64], [4, 32, 64], []], input_op_ids = [(0,-1)]": (
        "aten::cat",
        [[4, 32, 64], [4, 32, 64], []],
    ),
}


def named(*names: str) -> Trace:
    frame = pd.DataFrame({"name": pd.Categorical(names), "start_ns": range(len(names)), "thread": 7})
    return Trace.from_frames({"ranges": frame.assign(end_ns=frame["start_ns"] + 1)}, TraceMeta(tool="planted"))


def test_names_that_pytorch_gives() -> None:
    found = nvtx_ops.operators(named(*STRINGS))
    wanted = {number: shapes for number, shapes in enumerate(STRINGS.values()) if shapes is not None}
    assert list(found["start_ns"]) == list(wanted)
    assert list(found["name"]) == [name for name, _ in wanted.values()]
    assert [json.loads(text) for text in found["inputs"]] == [[shapes, [], []] for _, shapes in wanted.values()]
    assert set(found["thread"]) == {7}
    assert nvtx_ops.operators(named("step")).empty
    assert nvtx_ops.operators(Trace.from_frames({}, TraceMeta(tool="planted", missing=["ranges"]))).empty


# PyTorch's own strings.

PROGRAM = """
import torch
torch.manual_seed(0)
embedding = torch.nn.Embedding(11, 16)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 11))
optimizer = torch.optim.AdamW([*embedding.parameters(), *model.parameters()], fused=True)
tokens = torch.randint(0, 11, (2, 5))
q = torch.randn(2, 4, 16, 8, requires_grad=True)
def step():
    logits = model(torch.cat([embedding(tokens), embedding(tokens)]))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.cat([tokens, tokens]).flatten())
    attended = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    (loss + attended.square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
step()
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    pytest.importorskip("torch")
    import emit_nvtx

    built = emit_nvtx.build(tmp_path_factory.mktemp("stubs"))
    if built is None:
        pytest.skip("no C++ compiler that takes PyTorch's headers")
    return built


@pytest.fixture(scope="module")
def emitted(library: Path, tmp_path_factory) -> tuple[list[str], Path]:
    """The ranges of a step, and the same step's Kineto trace with types: a process of their own, for the hooks stay."""
    folder = tmp_path_factory.mktemp("emitted")
    script = (
        PROGRAM
        + f"""
import json, emit_nvtx
from pathlib import Path
names = []
with emit_nvtx.emitting(Path({str(library)!r}), names.append, lambda: None):
    step()
Path({str(folder / "names.json")!r}).write_text(json.dumps(names))
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiling:
    step()
profiling.export_chrome_trace({str(folder / "kineto.json")!r})
"""
    )
    _python(script)
    return json.loads((folder / "names.json").read_text()), folder


def _python(script: str, *before: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    command = [*before, sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def _flat(dims: list, types: list) -> list:
    """Shapes as ``emit_nvtx`` has them: lists strung together, an empty list as a number."""
    flat: list = []
    for shape, kind in zip(dims, types, strict=True):
        flat += shape if kind == "TensorList" and shape else [shape]
    return flat


def test_ranges_say_what_kineto_says_but_types(emitted: tuple[list[str], Path]) -> None:
    names, folder = emitted
    assert sum(", sizes = " in name for name in names) > 100
    ranges = nvtx_ops.operators(named(*names))
    assert len(ranges) == sum(", sizes = " in name for name in names)
    kineto = nsightkit.load(folder / "kineto.json", cache=False).table("ops", ["start_ns", "name", "inputs"])
    kineto = kineto.sort_values("start_ns", kind="stable")
    said = [(str(n), json.loads(str(i))[0]) for n, i in zip(ranges["name"], ranges["inputs"], strict=True)]
    wanted = []
    for name, text in zip(kineto["name"], kineto["inputs"], strict=True):
        if text:
            dims, types, _ = json.loads(str(text))
            wanted.append((str(name), _flat(dims, types)))
    # Kineto has spans of its own; every operator that a bound is known of is in both, in the same order.
    ours, theirs = ([one for one in rows if one[0].startswith("aten::")] for rows in (said, wanted))
    assert ours == theirs


def test_through_nsight_systems(library: Path, nsys: Path, tmp_path: Path) -> None:
    """The strings in a report that the tool wrote, read from its export."""
    pytest.importorskip("nvtx")
    script = (
        PROGRAM
        + f"""
import emit_nvtx, nvtx
from pathlib import Path
with emit_nvtx.emitting(Path({str(library)!r}), nvtx.push_range, nvtx.pop_range):
    step()
"""
    )
    flags = ["profile", "--trace=nvtx", "--sample=none", "--cpuctxsw=none", "--export=sqlite", "--force-overwrite=true"]
    _python(script, str(nsys), *flags, "-o", str(tmp_path / "report"))
    trace = nsightkit.load(tmp_path / "report.sqlite", cache=False)
    found = nvtx_ops.operators(trace)
    shapes = dict(zip(found["name"].astype(str), found["inputs"].astype(str), strict=True))
    assert json.loads(shapes["aten::addmm"])[0] == [[11], [20, 32], [32, 11], [], []]
    assert len(json.loads(shapes["aten::_fused_adamw_"])[0]) > 28  # 7 parameters, 4 lists
    # Operators nest in each other as they ran: a linear layer holds its product.
    rows = enclosing(found[found["name"] == "aten::addmm"], found, (found["name"] == "aten::linear").to_numpy())
    assert len(rows) == 2
    assert (rows >= 0).all()
    assert sol.summary(trace, "H200").empty  # no GPU ran anything


# Planted exports.

BF16_ADD = (
    "void at::native::vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctor_add<c10::BFloat16>, "
    "std::array<char *, (unsigned long)3>>(int, T2, T3)"
)


def planted(path: Path) -> Path:
    """Products whose kernels say what they work on, products whose kernels do not, and what has no one precision."""
    export = Export()
    pid, thread, other = Export.process(4242), Export.thread(4242, 1), Export.thread(4242, 2)
    sizes = "[[2048, 4096], [4096, 4096]]"
    clock = gpu = 1_000_000
    number = 0

    def op(name: str, sizes: str, *kernels: tuple[str, int], on: int = thread, around: str = "") -> None:
        nonlocal clock, gpu, number
        start, number = clock, number + 1
        clock += 1_000
        for kernel, lasting in kernels:
            correlation = export.call("cudaLaunchKernel", on, clock, clock + 2_000)
            export.kernel(kernel, gpu, gpu + lasting, correlation, pid)
            clock, gpu = clock + 3_000, gpu + lasting
        ids = ", ".join(["(0,-1)"] * sizes.count("["))
        export.range(f"{name}, op_id = {number}, sizes = {sizes}, input_op_ids = [{ids}]", on, start, clock)
        if around:
            export.range(f"{around}, seq = {number}, op_id = 9{number}, sizes = {sizes}", on, start - 200, clock + 200)
        clock += 1_000

    linear = "aten::linear"  # calls others: its kernels count for the innermost
    op("aten::mm", sizes, ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN", 100_000), around=linear)
    op("aten::mm", sizes, ("nvjet_tst_96x64_64x10_1x2_h_bz_TNN", 70_000), ("splitKreduce_kernel", 50_000), on=other)
    op("aten::mm", sizes, ("ampere_sgemm_128x64_tn", 900_000))
    op("aten::mm", sizes, ("a_kernel_of_somebody", 200_000))
    op("aten::add", "[[64, 1048576], [64, 1048576], []]", (BF16_ADD, 90_000))
    op("aten::add_", "[[64, 1048576], [], []]", (BF16_ADD.replace("c10::BFloat16", "long"), 400_000))
    op("aten::copy_", "[[64, 1048576], [64, 1048576], []]", ("direct_copy_kernel_cuda<float>", 80_000))
    attention = "[[1, 32, 2048, 128], [1, 32, 2048, 128], [1, 32, 2048, 128], [], [], [], []]"
    flash = "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<(int)128, cutlass::bfloat16_t>, (bool)0, (bool)1>(T1)"
    op("aten::_scaled_dot_product_flash_attention", attention, (flash, 60_000))
    export.range("step", thread, 900_000, clock)
    return export.write(path, shuffle=3)


FLOPS = 2 * 2048 * 4096 * 4096


def test_a_planted_export_is_judged_exactly(tmp_path: Path) -> None:
    trace = nsightkit.load(planted(tmp_path / "t.sqlite"), cache=False)
    table = sol.summary(trace, "H200").set_index("name")
    bf16, fp32 = (table.loc[f"aten::mm 2048x4096 4096x4096 {name}"] for name in ("bf16", "fp32"))
    # Two calls, the second of two kernels of which one says nothing, on a thread of its own.
    assert (bf16["count"], bf16["time_ns"], bf16["flops"]) == (2, 220_000, 2 * FLOPS)
    assert (bf16["unit"], bf16["precision_from"], bf16["note"]) == ("bf16", "kernel", "")
    assert bf16["sol_datasheet"] == pytest.approx(2 * FLOPS / 989.4e12 / 220e-6, rel=1e-3)
    assert (fp32["count"], fp32["unit"], fp32["precision_from"]) == (1, "fp32", "kernel")
    assert fp32["sol_datasheet"] == pytest.approx(FLOPS / 66.9e12 / 900e-6)
    moved = table.loc["aten::add 64x1048576 64x1048576 bf16"]
    assert moved["bytes"] == 3 * 2 * (64 << 20)
    assert moved["sol_datasheet"] == pytest.approx(3 * 2 * (64 << 20) / 90e-6 / 4.8e12)
    attention = table[table.index.str.startswith("aten::_scaled")].iloc[0]
    assert attention["flops"] == 4 * 32 * 128 * 2048 * 2048 // 2
    assert "its mask was not recorded" in attention["note"]
    # Numbers that no such unit computes with are not there; what nothing tells is, without a share.
    assert not table.index.str.startswith("aten::add_").any()
    for name, flops in (("aten::mm 2048x4096 4096x4096", FLOPS), ("aten::copy_ 64x1048576 64x1048576", 0)):
        row = table.loc[name]
        assert (row["flops"], row["precision_from"], row["impossible"]) == (flops, "unknown", False)
        assert row[["bytes", "bound", "intensity", "sol_datasheet", "sol_measured", "unit"]].isna().all()
        assert "was not recorded" in row["note"]
    assert len(table) == 6


def test_a_precision_that_is_given_is_said_to_be(tmp_path: Path) -> None:
    trace = nsightkit.load(planted(tmp_path / "t.sqlite"), cache=False)
    table = sol.summary(trace, "H200", precision="fp16").set_index("name")
    told = table.loc["aten::mm 2048x4096 4096x4096 fp16"]
    assert (told["count"], told["time_ns"], told["precision_from"]) == (1, 200_000, "given")
    assert table.loc["aten::mm 2048x4096 4096x4096 bf16", "count"] == 2  # a kernel's name counts before it
    assert table.loc["aten::copy_ 64x1048576 64x1048576", "precision_from"] == "unknown"
    with pytest.raises(UsageError, match="no precision is called 'int3'"):
        sol.summary(trace, "H200", precision="int3")


def test_bounds_of_kernels_follow_from_ranges_too(tmp_path: Path) -> None:
    trace = nsightkit.load(planted(tmp_path / "t.sqlite"), cache=False)
    bound = sol.kernel_bounds(trace, "H200")
    names = trace.table("kernels", ["name"])["name"].astype(str)
    said = {name.split("(")[0][:20]: str(each) for name, each in zip(names, bound, strict=True)}
    assert said["nvjet_tst_192x192_64"] == said["splitKreduce_kernel"] == said["ampere_sgemm_128x64_"] == "compute"
    assert said["a_kernel_of_somebody"] == ""
    assert list(bound).count("memory") == 1


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = planted(tmp_path / "t.sqlite")
    assert cli.run(["sol", str(path), "--gpu", "H200", "--format", "json"]) == 0
    out, err = capsys.readouterr()
    rows = {row["name"]: row for row in json.loads(out)}
    unknown = rows["aten::mm 2048x4096 4096x4096"]
    assert (unknown["bytes"], unknown["sol_datasheet"], unknown["bound"]) == (None, None, None)
    assert "2 operators (280.0 µs)" in err
    assert "--precision" in err
    assert "no record" not in err
    assert cli.run(["sol", str(path), "--gpu", "H200", "--precision", "bf16", "--format", "json"]) == 0
    out, err = capsys.readouterr()
    rows = [row for row in json.loads(out) if row["name"] == "aten::mm 2048x4096 4096x4096 bf16"]
    assert {row["precision_from"]: row["count"] for row in rows} == {"kernel": 2, "given": 1}
    assert cli.run(["sol", str(path), "--gpu", "H200", "--precision", "int3"]) == 2
    assert "no precision is called" in capsys.readouterr().err


# Real names.


def test_kernels_names_agree_with_recorded_types(shared_traces: Path) -> None:
    """Kineto traces of five cards have both: where a name says what tensors hold, it is what was recorded."""
    agree = said = 0
    types = {"float": "fp32", "c10::Half": "fp16", "c10::BFloat16": "bf16"}
    has_cost = functools.cache(lambda name, given: op_costs.cost(name, given) is not None)
    for path in sorted([*shared_traces.glob("*/*.json.gz")]):
        trace = nsightkit.load(path)
        if not (trace.size("ops") and trace.size("kernels")):
            continue
        ops = trace.table("ops", ["start_ns", "end_ns", "thread", "name", "inputs"])
        kernels = trace.table("kernels", ["process", "correlation", "name"])
        launch = launch_of(trace, kernels["process"], kernels["correlation"])
        calls = trace.table("calls", ["start_ns", "end_ns", "thread"])
        both = zip(ops["name"], ops["inputs"], strict=True)
        known = np.array([has_cost(str(name), str(given)) for name, given in both])
        at = np.where(launch >= 0, enclosing(calls, ops, known)[launch], -1)
        launched, inputs = kernels["name"][at >= 0].astype(str), ops["inputs"].iloc[at[at >= 0]].astype(str)
        for kernel, text in set(zip(launched, inputs, strict=True)):
            kinds = {kind for kind in json.loads(text)[1] if kind not in ("", "Scalar")}
            precision = nvtx_ops.precision_of(kernel)
            if precision is not None and len(kinds) == 1 and kinds <= set(types):
                recorded = {types[kind] for kind in kinds}
                said += 1
                agree += {precision} == recorded
                assert {precision} == recorded, (kernel, text)
    assert agree == said > 100


@pytest.mark.parametrize(
    ("kernel", "precision"),
    [
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTT", "fp16"),
        ("nvjet_sm90_tst_mma_192x192x64", "bf16"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1", "bf16"),
        ("sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x32_stage4", "fp16"),
        ("ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x4_tn", "fp16"),
        ("ampere_h16816gemm_128x128_ldg8_stages_32x5_tn", "fp16"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x256_32x3_tn_align8>(T1)", "bf16"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x4_tn_align4>(T1::Params)", "fp32"),
        ("volta_sgemm_128x64_nn", "fp32"),
        ("volta_dgemm_128x64_nn", "other"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel::Params)", "bf16"),
        ("fmha_cutlassF_f16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel::Params)", "fp16"),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel::Params)", "fp32"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3i_128x128x128_4x1x1_kernel0_0", None),
        ("triton_poi_fused_add_cos_sin_0", None),
        (BF16_ADD, "bf16"),
        (BF16_ADD.replace("vectorized", "unrolled"), None),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", None),
        ("", None),
    ],
)  # fmt: skip
def test_what_a_kernels_name_says(kernel: str, precision: str | None) -> None:
    assert nvtx_ops.precision_of(kernel) == precision


def test_real_exports_without_shapes_are_not_guessed_at(shared_traces: Path) -> None:
    """One has the operators of PyTorch without their sizes, the other ranges that a program named."""
    for name in ("nsys-ai/mfu_2gpu_before.sqlite", "cs336-zx3xyy/result_2_7B_nvtx.sqlite"):
        trace = nsightkit.load(shared_traces / name, cache=False)
        assert nvtx_ops.operators(trace).empty
        assert sol.summary(trace, "H100").empty
