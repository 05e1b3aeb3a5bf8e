"""A layer's implementations against float64, the counts of what they launch, and the ladder's arithmetic."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from nsightkit import hardware
from nsightkit.analysis.roofline import sol
from nsightkit.investigations import parts as investigations
from nsightkit.investigations.pages import climb

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from nsightkit.workloads import layer  # noqa: E402

SMALL = {"context": 24, "hidden": 64, "heads": 4, "d_ff": 112, "layers": 3, "compiler": "aot_eager"}
FULL = {"context": 2048, "hidden": 4096, "heads": 32, "d_ff": 11_008}
ALL = [(mode, rung) for mode, rungs in layer.RUNGS.items() for rung in rungs]
EAGER = [(m, r) for m, r in ALL if layer.RUNGS[m][r].compiled is None and not layer.RUNGS[m][r].triton]
#: Relative error of a chain of layers in a format: some tens of roundings, each of half a unit in the last place.
ALLOWED = {"bf16": 0.02, "fp16": 0.0025}

TRITON_KERNELS = layer.triton_kernels


@pytest.fixture(autouse=True, scope="module")
def _no_interpreter():
    """Triton's interpreter patches Triton for a whole process; its test has one of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer, "triton_kernels", lambda device: None)
        yield


def _run(**changes):
    return layer.start("cpu", **{**SMALL, **changes})


@pytest.fixture(scope="module", params=ALL, ids="-".join)
def ran(request, _no_interpreter):
    """Each rung, made and compiled once."""
    mode, rung = request.param
    with _run(mode=mode, rung=rung) as run:
        yield layer.RUNGS[mode][rung], run


def _computes_the_same(made, run):
    for _ in range(3):  # the same each time: a token overwrites its own place in the cache
        first = run.step().clone()
    seen = {name: value for name, (value,) in run.observed().items()}
    assert torch.equal(run.step(), first)
    allowed = 0.12 if made.fp8 else ALLOWED[run.config.precision]
    assert seen["rounding_error"] < seen["relative_error"] < allowed
    assert 0 < seen["max_abs_error"] < 20 * allowed


def test_every_rung_computes_the_same(ran):
    _computes_the_same(*ran)


# On a CPU all other rungs are one of these programs.
@pytest.mark.parametrize(
    ("mode", "rung"),
    [*EAGER, ("prefill", "compiled"), ("prefill", "fp8"), ("decode", "compiled")],
    ids=lambda name: name,
)
def test_every_program_computes_the_same_in_fp16(mode, rung):
    with _run(mode=mode, rung=rung, precision="fp16") as run:
        _computes_the_same(layer.RUNGS[mode][rung], run)


@pytest.mark.parametrize("part", ["rotated", "norm", "fused_attention"])
def test_a_wrong_layer_is_seen(monkeypatch, part):
    wrong = {
        "rotated": lambda x, cosine, sine: x,
        "norm": lambda x, weight: x * weight,
        "fused_attention": lambda q, k, v, given: torch.nn.functional.scaled_dot_product_attention(q, k, v),
    }
    monkeypatch.setattr(layer, part, wrong[part])
    with _run(rung="sdpa") as run:
        assert run.observed()["relative_error"][0] > 5 * ALLOWED["bf16"]


@pytest.mark.parametrize("rung", layer.RUNGS["decode"])
@torch.inference_mode()
def test_a_decoded_token_is_the_last_of_a_prefill(rung):
    with _run(mode="decode", rung=rung) as decode, _run(rung="naive") as prefill:
        whole, kept = layer.reference(prefill.x, decode.weights, SMALL["heads"])
        decode.x.copy_(prefill.x[:, -1:])
        for (keys, values), (k, v) in zip(decode.caches, kept, strict=True):
            keys.copy_(k), values.copy_(v)
            keys[:, :, -1], values[:, :, -1] = math.nan, math.nan  # its own place: it must write there first
        token = decode.step().double()
        assert float((token - whole[:, -1:]).norm() / whole[:, -1:].norm()) < ALLOWED["bf16"]
        for (keys, values), (k, v) in zip(decode.caches, kept, strict=True):
            torch.testing.assert_close(keys.double(), k, rtol=0.05, atol=0.05)
            torch.testing.assert_close(values.double(), v, rtol=0.05, atol=0.05)


def test_the_reference_sees_no_later_token():
    with _run() as run:
        whole, _ = layer.reference(run.x, run.weights, SMALL["heads"])
        part, _ = layer.reference(run.x[:, :7], run.weights, SMALL["heads"])
        torch.testing.assert_close(whole[:, :7], part, rtol=1e-12, atol=1e-12)


def test_the_reference_is_pytorchs_own_layer():
    """Norm and attention by PyTorch's modules, positions by the formula of the rotary paper, token by token."""
    with _run(layers=1) as run:
        (w,), x = run.weights, run.x.double()
        heads, d = SMALL["heads"], SMALL["hidden"] // SMALL["heads"]
        normed = torch.nn.functional.rms_norm(x, (x.shape[-1],), w.norm_1.double(), layer.EPSILON)
        q, k, v = (torch.nn.functional.linear(normed, p.double()).unflatten(-1, (heads, d)) for p in (w.q, w.k, w.v))
        for token in range(x.shape[1]):
            for pair in range(d // 2):
                angle = token * 10_000 ** (-2 * pair / d)
                turn = torch.tensor(
                    [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=torch.float64
                )
                for t in (q, k):
                    both = [pair, pair + d // 2]
                    t[:, token, :, both] = t[:, token, :, both] @ turn.T
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + torch.nn.functional.linear(mixed.transpose(1, 2).flatten(2), w.out.double())
        normed = torch.nn.functional.rms_norm(x, (x.shape[-1],), w.norm_2.double(), layer.EPSILON)
        fed = torch.nn.functional.silu(normed @ w.gate.double().T) * (normed @ w.up.double().T)
        exact, _ = layer.reference(run.x, run.weights, heads)
        torch.testing.assert_close(x + fed @ w.down.double().T, exact, rtol=1e-10, atol=1e-10)


@torch.inference_mode()
def test_each_layer_has_weights_of_its_own(ran):
    made, run = ran
    places = [w.qkv.untyped_storage().data_ptr() for w in run.weights]
    assert len(set(places)) == SMALL["layers"]
    assert not torch.equal(run.weights[0].down, run.weights[1].down)
    before = run.step().clone()
    run.weights[-1].down.mul_(2)  # the last layer's weights are used as well
    if not made.fp8:  # whose copies are 8 bits
        assert not torch.equal(run.step(), before)
    run.weights[-1].down.div_(2)
    joined = run.weights[0]
    for whole, parts in ((joined.qkv, (joined.q, joined.k, joined.v)), (joined.gate_up, (joined.gate, joined.up))):
        assert torch.equal(whole, torch.cat(parts))
        assert {part.untyped_storage().data_ptr() for part in parts} == {whole.untyped_storage().data_ptr()}


@pytest.mark.parametrize(("mode", "rung"), EAGER, ids=lambda name: name)
def test_flops_are_those_that_pytorch_counts(mode, rung):
    sizes = {**SMALL, "layers": 1}
    with _run(mode=mode, rung=rung, layers=1) as run, FlopCounterMode(display=False) as counter:
        run.step()
    counted = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counted.items() if str(op) in ("aten.mm", "aten.addmm"))
    tokens, keys = (1, sizes["context"]) if mode == "decode" else (sizes["context"], None)
    listed = sol.layer_costs(1, tokens, sizes["hidden"], sizes["heads"], sizes["d_ff"], keys=keys)
    assert products == sum(o.flops for o in listed if o.unit == "bf16" and o.name != "attention")
    # PyTorch counts attention as the full square, whatever is masked.
    scores = sum(n for op, n in counted.items() if str(op) not in ("aten.mm", "aten.addmm"))
    full = sol.attention_cost(1, sizes["heads"], tokens, sizes["hidden"] // sizes["heads"], causal=False, keys=keys)
    if layer.RUNGS[mode][rung].attention == "written" or scores:
        assert scores == full.flops


@pytest.mark.parametrize(("mode", "rung"), EAGER, ids=lambda name: name)
def test_what_is_written_is_what_runs(mode, rung):
    """Counted on no device, at any size: the same operations as of a real run, with as many FLOPs as the bounds."""
    sizes = {name: SMALL[name] for name in FULL}
    with _run(mode=mode, rung=rung, layers=1) as run:
        real = run.launches()
    assert layer.written(mode=mode, rung=rung, **sizes) == real
    rows = layer.written(mode=mode, rung=rung, **FULL)
    tokens, keys = (1, FULL["context"]) if mode == "decode" else (FULL["context"], None)
    listed = sol.layer_costs(1, tokens, FULL["hidden"], FULL["heads"], FULL["d_ff"], keys=keys)
    flops = sum(row["flops"] for row in rows if row["unit"] == "bf16")
    half = next(o for o in listed if o.name == "attention").flops if rung == "naive" else 0
    assert flops == sum(o.flops for o in listed if o.unit == "bf16") + half
    assert sum(row["bytes"] for row in rows) > sum(o.bytes for o in listed if o.unit == "bf16")


def test_written_norm_moves_nine_times_what_it_must():
    """A norm of eight operations: 2 bytes in, 4 through six passes, 2 out."""
    rows = layer.written(mode="prefill", rung="naive", **FULL)
    first = [row["name"] for row in rows].index("mm")
    elements = FULL["context"] * FULL["hidden"]
    moved = sum(row["bytes"] for row in rows[:first])
    assert moved == pytest.approx((6 + 8 + 4 + 8 + 6 + 4) * elements, rel=1e-3)
    assert 8 < moved / sol.elementwise_cost("rms_norm", FULL["context"], FULL["hidden"]).bytes < 10


def test_what_a_compiler_makes_cannot_be_counted_as_written():
    for rung in ("compiled", "triton", "epilogue", "fp8"):
        with pytest.raises(ValueError, match="is not what is written"):
            layer.written(mode="prefill", rung=rung)


def test_layers_share_one_compiled_program():
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    with _run(rung="compiled") as run:
        run.step(), run.step(), run.observed()
        assert counters["stats"]["unique_graphs"] == 1
        assert not counters["graph_break"]


def test_what_did_not_run_as_named_is_said(ran):
    made, run = ran
    instead = run.parameters["instead"]
    assert ("CUDA graphs" in instead) == made.graphed
    assert ("aot_eager" in instead) == (made.compiled is not None)
    assert ("no streams" in instead) == made.streams
    assert ("Triton" in instead) == made.triton
    assert ("of a CPU" in instead) == (made.attention == "cudnn")


def test_ladders_are_what_is_registered():
    for name, mode in (("ladder", "prefill"), ("decode", "decode")):
        assert list(investigations.INVESTIGATIONS[name]) == list(layer.RUNGS[mode])
        for rung, part in investigations.INVESTIGATIONS[name].items():
            for size in ("live", "smoke"):
                config = layer.LayerConfig(**part.parameters(size))
                assert (config.mode, config.rung) == (mode, rung)
                assert config.layers >= 3
            assert part.counts("live")["repetitions"] >= 50
            base = layer.RUNGS[mode][rung].base
            assert base is None or list(layer.RUNGS[mode]).index(base) < list(layer.RUNGS[mode]).index(rung)


_INTERPRETED = """
import json, sys
from nsightkit.workloads import layer
found = {}
for mode, rungs in layer.RUNGS.items():
    for rung in (name for name, made in rungs.items() if made.triton):
        for context in {"triton": (1, 150), "one-mlp": (1,)}.get(rung, (70,)) if mode == "decode" else (9,):
            # Sizes that are not multiples of any tile, and more rows than programs.
            sizes = dict(hidden=64 if mode == "decode" else 48, heads=2, d_ff=88, layers=1 + (rung == "triton"))
            sizes |= dict(context=context, precision="fp16")
            with layer.start("cpu", mode=mode, rung=rung, **sizes) as run:
                run.step()
                found[f"{mode} {rung} {context}"] = [run.observed()["relative_error"][0], run.parameters["instead"]]
print(json.dumps(found))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_kernels_in_the_interpreter():
    # In fp16: the interpreter cuts bf16 off where a GPU rounds it.
    done = subprocess.run(
        [sys.executable, "-c", _INTERPRETED],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 1 + sum(layer.RUNGS[mode][rung].triton for mode, rung in ALL)
    for what, (error, instead) in found.items():
        assert "interpreter" in instead, what
        assert ("programmatic dependent launch" in instead) == ("overlapped" in what or "one-mlp" in what), what
        assert error < ALLOWED["fp16"], what


_COMPILED = """
import json, re, warnings
warnings.simplefilter("ignore")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nsightkit.workloads import layer_triton as made
found = {}
def compile(name, types, constants, **options):
    kernel = getattr(made, name)
    kernel = kernel.fn if hasattr(kernel, "configs") else kernel
    at = kernel.arg_names.index
    aligned = {(at(n),): [["tt.divisibility", 16]] for n, kind in types.items() if kind.startswith("*")}
    signature = types | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature, {(at(n),): value for n, value in constants.items()}, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    found[name] = compiled.asm["ptx"]
bf16, early = "*bf16", dict(DEPENDENT=True, AHEAD=made.AHEAD_BYTES, SMS=132)
compile("_stream_kernel", dict(x=bf16, gain=bf16, weight=bf16, residual=bf16, out=bf16, epsilon="fp32"),
    dict(count=11008, width=4096, NORM=True, GATED=True, RESIDUAL=False, ROWS=1, COLUMNS=4096, STAGES=1, PER_SM=4)
    | early, num_warps=4, launch_pdl=True)
compile("_mlp_kernel", dict(x=bf16, gain=bf16, gate_up=bf16, down=bf16, partial="*fp32", epsilon="fp32"),
    dict(inner=11008, width=4096, BLOCK=4096, ROWS=2, PER_SM=2) | early, num_warps=8, launch_pdl=True)
compile("_gather_kernel", dict(partial="*fp32", residual=bf16, out=bf16, width="i32"),
    dict(programs=264, MANY=64, BLOCK=32, DEPENDENT=True), num_warps=4, launch_pdl=True)
compile("_join_kernel", dict(partial="*fp32", largest="*fp32", weights="*fp32", out=bf16),
    dict(width=128, SPLITS=16, DEPENDENT=True), num_warps=4, launch_pdl=True)
compile("_gated_kernel", dict(x="tensordesc<bf16[128,64]>", weight="tensordesc<bf16[128,64]>", out=bf16, rows="i32",
    inner="i32"), dict(width=4096, BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, GROUP=8), num_warps=8, num_stages=3)
print(json.dumps(found))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_kernels_compile_for_hopper_to_what_they_promise():
    """Without a GPU: Triton's compiler is given the card, and its assembly is read."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILED], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for name in ("_stream_kernel", "_mlp_kernel", "_gather_kernel", "_join_kernel"):
        body = found[name]
        wait = body.index("griddepcontrol.wait")
        assert wait < body.index("griddepcontrol.launch_dependents"), name
        # Nothing that another kernel wrote is read before it ended, and nothing is written.
        assert "ld.global" not in body[:wait], name
        assert "st.global" not in body[:wait], name
    for name in ("_stream_kernel", "_mlp_kernel"):
        body = found[name]
        assert "prefetch.global.L2" in body[: body.index("griddepcontrol.wait")]
        assert re.search(r"ld\.global[.\w:]*evict_first[.\w:]*v4", body)  # 16 bytes a thread, and gone
    assert "wgmma.mma_async" in found["_gated_kernel"]
    assert "cp.async.bulk.tensor" in found["_gated_kernel"]


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "rung"), ALL, ids=lambda name: name)
def test_rungs_on_a_gpu(mode, rung, monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    monkeypatch.setattr(layer, "triton_kernels", TRITON_KERNELS)
    if "overlapped" in layer.RUNGS[mode][rung].switches and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("this GPU has no programmatic dependent launch")
    sizes = {"context": 256, "hidden": 512, "heads": 4, "d_ff": 1376, "layers": 3, "compiler": "inductor"}
    with layer.start("cuda", mode=mode, rung=rung, **sizes) as run:
        run.step()
        seen = run.observed()
        assert run.parameters["instead"] == ""
    assert seen["relative_error"][0] < (0.12 if layer.RUNGS[mode][rung].fp8 else ALLOWED["bf16"])


# The ladder's arithmetic.

H200 = sol.datasheet(hardware.find("H200"))
CEILINGS = sol.Rates("measured", {"bf16": 788.0, "fp32": 60.0}, 4300.0)
LISTED = sol.layer_costs(1, 2048, 4096, 32, 11_008)


def test_floors_are_those_worked_out_by_hand():
    assert climb.floor_ns(LISTED, H200) / 1e3 == pytest.approx(872.5, abs=0.1)
    assert climb.floor_ns(LISTED, CEILINGS) / 1e3 == pytest.approx(1095.5, abs=0.1)
    assert sum(map(H200.bound_ns, LISTED)) / 1e3 == pytest.approx(949.7, abs=0.1)
    assert sum(map(CEILINGS.bound_ns, LISTED)) / 1e3 == pytest.approx(1181.6, abs=0.1)


def test_waves():
    sizes = {11_008: 0.869, 22_016: 0.948, 12_288: 0.970, 4096: 0.970}
    for columns, share in sizes.items():
        assert climb.wave_efficiency(2048, columns, 132) == pytest.approx(share, abs=5e-4)
    assert climb.wave_efficiency(128, 256, 1) == 1


def test_the_same_bounds_for_every_rung():
    samples = {"first": np.full(50, 3 * 2_755_000.0), "second": 3 * np.linspace(1_310_000.0, 1_320_000.0, 51)}
    table = climb.summary(LISTED, samples, 3, H200, CEILINGS).set_index("rung")
    assert table.loc["first", "sol_datasheet"] == pytest.approx(949.7 / 2755, rel=1e-4)
    assert table.loc["first", "sol_measured"] == pytest.approx(1181.6 / 2755, rel=1e-4)
    assert table.loc["second", "floor_measured"] == pytest.approx(1095.5 / 1315, rel=1e-4)
    assert table.loc["second", "times"] == pytest.approx(2755 / 1315)
    assert table.loc["second", ["low_ns", "time_ns", "high_ns"]].tolist() == [1_312_500, 1_315_000, 1_317_500]
    assert not table["impossible"].any()


def test_times_that_no_card_can_have_are_flagged():
    """The published layer: its four products alone take longer than it was said to."""
    h100 = sol.datasheet(hardware.find("H100 SXM5"))
    table = climb.summary(LISTED, {"claimed": [383e3], "possible": [1400e3]}, 1, h100).set_index("rung")
    assert table["impossible"].tolist() == [True, False]
    assert np.isnan(table["sol_measured"]).all()


def test_other_arithmetic_has_no_share_but_its_own_limit():
    eight = [dataclasses.replace(o, unit="fp8") if o.unit == "bf16" and o.name != "attention" else o for o in LISTED]
    quick = 700e3  # below the floor in 16 bits, above that in 8
    samples = {"16 bits": [1400e3], "8 bits": [quick], "too quick": [quick]}
    table = climb.summary(LISTED, samples, 1, H200, CEILINGS, {"8 bits": eight}).set_index("rung")
    assert table.loc["8 bits", ["sol_datasheet", "sol_measured", "floor_datasheet"]].isna().all()
    assert table.loc["8 bits", "times"] == 2
    assert table["impossible"].tolist() == [False, False, True]


def test_without_a_known_card_there_are_times_only():
    table = climb.summary(LISTED, {"only": [1e6]}, 1, None)
    assert table[["sol_datasheet", "sol_measured", "floor_datasheet", "floor_measured"]].isna().all(axis=None)
    assert not table["impossible"].any()


def test_kinds_are_of_one_layer(tmp_path):
    from nsightkit.investigations.ways_to_measure import observed
    from nsightkit.trace.open import load

    counts = {"warmup": 1, "repetitions": 2, "active": 2, "shapes": 0, "utilization": 0}
    path = tmp_path / "trace.json.gz"
    samples, sizes = observed(layer.start, "cpu", {**SMALL, "rung": "fused"}, counts, tmp_path)
    one, three = climb.kinds(load(path)), climb.kinds(load(path), sizes["layers"])
    assert {"GEMM", "attention", "elementwise"} <= set(one.index)
    np.testing.assert_allclose(one / 3, three)
    assert len(samples["step_ns"]) == 2
    assert samples["relative_error"][0] < ALLOWED["bf16"]


def test_bars_say_times_and_floors():
    plots = pytest.importorskip("nsightkit.plots")
    import matplotlib.pyplot as plt
    import pandas as pd

    table = climb.summary(LISTED, {"naive": [2755e3], "fused": [1625e3]}, 1, H200)
    parts = {"naive": pd.Series({"GEMM": 1e6, "softmax": 1e6}), "fused": pd.Series({"GEMM": 2e6})}  # more than it took
    figure = plots.ladder_bars(table, parts, {"the floor": 872e3}, title="Rungs (predicted)")
    assert "naive 2.75 ms" in figure.get_label()
    assert "lines at the floor 872 µs" in figure.get_label()
    ends = [p.get_x() + p.get_width() for p in figure.axes[0].patches]
    assert max(ends) == pytest.approx(2.755)
    assert "no rung" in plots.ladder_bars(table.iloc[:0], {}, {}).get_label()
    plt.close("all")
