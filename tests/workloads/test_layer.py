"""A layer's implementations against float64, and its Triton kernels in the interpreter."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import plain_layer  # noqa: E402

from nsightkit.workloads import layer  # noqa: E402

SMALL = {"context": 24, "hidden": 64, "heads": 4, "d_ff": 112, "layers": 3}
ALL = [(mode, rung) for mode, rungs in layer.RUNGS.items() for rung in rungs]
#: Relative error of three layers: some tens of roundings, each of half a unit in the last place.
ALLOWED = {"bf16": 0.02, "fp16": 0.0025, "fp32": 1e-6}


def run_of(**changes: object) -> layer.LayerRun:
    return layer.run("cpu", **{"mode": "prefill", "rung": "unfused", **SMALL, **changes})


def error_of(work: layer.LayerRun) -> float:
    return work.samples()["relative_error"][0]


@pytest.mark.parametrize(("mode", "rung"), ALL)
@torch.inference_mode()
def test_every_rung_computes_the_same(mode: str, rung: str):
    with run_of(mode=mode, rung=rung) as work:
        first = work.step().clone()
        assert torch.equal(work.step(), first)  # a decoded token overwrites its own place in the cache
        assert 0 < error_of(work) < (0.12 if rung == "fp8" else ALLOWED["bf16"])
        # Every layer has its own weights, and all of them count.
        assert not torch.equal(work.weights[0].down, work.weights[1].down)
        if rung != "fp8":  # whose copies are in fp8
            work.weights[-1].down.mul_(2)
            assert not torch.equal(work.step(), first)


@pytest.mark.parametrize(("mode", "rung"), [("prefill", "fused"), ("decode", "fused")])
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_other_precisions(mode: str, rung: str, precision: str):
    with run_of(mode=mode, rung=rung, precision=precision) as work:
        assert error_of(work) < ALLOWED[precision]


@torch.inference_mode()
def test_a_decoded_token_is_the_last_of_a_prefill(monkeypatch: pytest.MonkeyPatch):
    attend, seen = layer.naive_attention, []

    def noted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *how: object, **more: object) -> torch.Tensor:
        seen.append((k, v))
        return attend(q, k, v, *how, **more)

    monkeypatch.setattr(layer, "naive_attention", noted)
    with run_of(mode="decode", rung="fused", precision="fp32") as decode, run_of(precision="fp32") as prefill:
        whole = layer.reference(prefill.x, decode.weights, prefill.shared, prefill.caches)
        decode.x.copy_(prefill.x[:, -1:])
        for cache, exact in zip(decode.caches, seen, strict=True):
            for kept, value in zip(cache, exact, strict=True):
                kept.copy_(value)
                kept[:, :, -1] = math.nan  # its own place: it must write there first
        torch.testing.assert_close(decode.step().double(), whole[:, -1:], rtol=1e-4, atol=1e-4)
        for cache, exact in zip(decode.caches, seen, strict=True):
            torch.testing.assert_close(cache[0].double(), exact[0], rtol=1e-4, atol=1e-4)


def test_the_reference_is_pytorchs_own_layer():
    with run_of() as work:
        x = work.x.double()
        for weights in work.weights:
            w = layer.Weights(*(part.double() for part in weights))
            x = plain_layer.layer(x, [w.norm_1, w.norm_2], w.qkv, w.out, w.gate_up, w.down, SMALL["heads"])
        exact = layer.reference(work.x, work.weights, work.shared, work.caches)
        torch.testing.assert_close(x, exact, rtol=1e-5, atol=1e-5)  # its rotary tables are in fp32


def test_layers_share_one_compiled_program():
    counters = torch._dynamo.utils.counters
    counters.clear()
    with run_of(rung="compiled") as work:
        work.step()
        work.samples()
        assert counters["stats"]["unique_graphs"] == 1
        assert not counters["graph_break"]


# Sizes that are not multiples of any tile.
_INTERPRETED = """
import json
import sys
from nsightkit.workloads import layer
errors = {}
for mode in ("prefill", "decode"):
    for precision in ("fp16", "fp32"):
        sizes = dict(context=9, hidden=48, heads=2, d_ff=88, layers=1, precision=precision)
        with layer.run("cpu", mode=mode, rung="triton", **sizes) as work:
            assert "nsightkit.workloads.layer_triton" in sys.modules
            errors[f"{mode} {precision}"] = work.samples()["relative_error"][0]
print(json.dumps(errors))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_kernels_in_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", _INTERPRETED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    for name, error in json.loads(done.stdout.splitlines()[-1]).items():
        assert error < ALLOWED[name.split()[1]], name


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "rung"), ALL)
def test_rungs_on_a_gpu(mode: str, rung: str):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    sizes = {"context": 256, "hidden": 512, "heads": 4, "d_ff": 1376, "layers": 3}
    with layer.run("cuda", mode=mode, rung=rung, **sizes) as work:
        work.step()
        assert error_of(work) < (0.12 if rung == "fp8" else ALLOWED["bf16"])
