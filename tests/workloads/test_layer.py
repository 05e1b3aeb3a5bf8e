"""A layer's implementations against float64, and its Triton kernels in the interpreter."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from nsightkit.workloads import layer  # noqa: E402

SMALL = {"context": 24, "hidden": 64, "heads": 4, "d_ff": 112, "layers": 3}
ALL = [(mode, rung) for mode, rungs in layer.RUNGS.items() for rung in rungs]
#: Relative error of three layers: some tens of roundings, each of half a unit in the last place.
ALLOWED = {"bf16": 0.02, "fp16": 0.0025, "fp32": 1e-6}


def run_of(**changes: object) -> layer.LayerRun:
    return layer.run("cpu", **{"mode": "prefill", "rung": "unfused", **SMALL, **changes})


def allowed(rung: str, precision: str) -> float:
    return 0.12 if rung == "fp8" else ALLOWED[precision]


@pytest.mark.parametrize(("mode", "rung"), ALL)
@torch.inference_mode()
def test_every_rung_computes_the_same(mode: str, rung: str) -> None:
    with run_of(mode=mode, rung=rung) as work:
        first = work.step().clone()
        samples = {name: value for name, (value,) in work.samples().items()}
        # The same each time: a decoded token overwrites its own place in the cache.
        assert torch.equal(work.step(), first)
        assert samples["rounding_error"] < samples["relative_error"] < allowed(rung, "bf16")
        # Every layer has its own weights, and all of them count.
        assert not torch.equal(work.weights[0].down, work.weights[1].down)
        if rung != "fp8":  # whose copies are in fp8
            work.weights[-1].down.mul_(2)
            assert not torch.equal(work.step(), first)


@pytest.mark.parametrize(("mode", "rung"), [("prefill", "unfused"), ("prefill", "fused"), ("decode", "fused")])
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_other_precisions(mode: str, rung: str, precision: str) -> None:
    with run_of(mode=mode, rung=rung, precision=precision) as work:
        assert work.samples()["relative_error"][0] < ALLOWED[precision]


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("rotate", lambda x, cosine, sine: x),
        ("norm", lambda x, weight: x * weight),
        ("naive_attention", lambda q, k, v, future, softmax_dtype: torch.softmax(q @ k.mT, -1) @ v),
    ],
)
def test_a_wrong_layer_is_seen(monkeypatch: pytest.MonkeyPatch, part: str, wrong: Any) -> None:
    monkeypatch.setattr(layer, part, wrong)
    with run_of() as work:
        assert work.samples()["relative_error"][0] > 5 * ALLOWED["bf16"]


@pytest.mark.parametrize("rung", layer.RUNGS["decode"])
@torch.inference_mode()
def test_a_decoded_token_is_the_last_of_a_prefill(rung: str) -> None:
    with run_of(mode="decode", rung=rung) as decode, run_of() as prefill:
        whole, seen = layer.reference(prefill.x, decode.weights, SMALL["heads"])
        decode.x.copy_(prefill.x[:, -1:])
        for cache, exact in zip(decode.caches, seen, strict=True):
            for kept, value in zip(cache, exact, strict=True):
                kept.copy_(value)
                kept[:, :, -1] = math.nan  # its own place: it must write there first
        token = decode.step().double()
        assert float((token - whole[:, -1:]).norm() / whole[:, -1:].norm()) < ALLOWED["bf16"]
        for cache, exact in zip(decode.caches, seen, strict=True):
            for kept, value in zip(cache, exact, strict=True):
                torch.testing.assert_close(kept.double(), value, rtol=0.05, atol=0.05)


def test_the_reference_is_pytorchs_own_layer() -> None:
    """Norm and attention by PyTorch's functions, positions by the formula of the rotary paper, token by token."""
    with run_of(layers=1) as work:
        (w,) = work.weights
        x = work.x.double()
        heads, size = SMALL["heads"], SMALL["hidden"] // SMALL["heads"]
        normed = torch.nn.functional.rms_norm(x, (x.shape[-1],), w.norm_1.double(), layer.EPSILON)
        q, k, v = (part.unflatten(-1, (heads, size)) for part in (normed @ w.qkv.double().T).chunk(3, -1))
        for token in range(x.shape[1]):
            for pair in range(size // 2):
                angle = token * 10_000 ** (-2 * pair / size)
                rows = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
                turn = torch.tensor(rows, dtype=torch.float64)
                both = [pair, pair + size // 2]
                for tensor in (q, k):
                    tensor[:, token, :, both] = tensor[:, token, :, both] @ turn.T
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(2) @ w.out.double().T
        normed = torch.nn.functional.rms_norm(x, (x.shape[-1],), w.norm_2.double(), layer.EPSILON)
        gate, up = (normed @ w.gate_up.double().T).chunk(2, -1)
        x = x + (torch.nn.functional.silu(gate) * up) @ w.down.double().T
        exact, _ = layer.reference(work.x, work.weights, heads)
        torch.testing.assert_close(x, exact, rtol=1e-10, atol=1e-10)


def test_layers_share_one_compiled_program() -> None:
    counters = torch._dynamo.utils.counters
    counters.clear()
    with run_of(rung="compiled") as work:
        work.step()
        work.step()
        work.samples()
        assert counters["stats"]["unique_graphs"] == 1
        assert not counters["graph_break"]


def test_a_rung_changes_one_that_comes_before_it() -> None:
    for rungs in layer.RUNGS.values():
        names = list(rungs)
        for place, rung in enumerate(rungs.values()):
            assert (rung.base is None) == (place == 0)
            assert rung.base is None or names.index(rung.base) < place


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
def test_triton_kernels_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _INTERPRETED],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name, error in json.loads(done.stdout.splitlines()[-1]).items():
        assert error < ALLOWED[name.split()[1]], name


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "rung"), ALL)
def test_rungs_on_a_gpu(mode: str, rung: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    sizes = {"context": 256, "hidden": 512, "heads": 4, "d_ff": 1376, "layers": 3}
    with layer.run("cuda", mode=mode, rung=rung, **sizes) as work:
        work.step()
        assert work.samples()["relative_error"][0] < allowed(rung, "bf16")
