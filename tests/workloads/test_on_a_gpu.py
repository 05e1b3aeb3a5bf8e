"""Workloads as on a GPU, against a stand-in for CUDA that judges names and order of calls, and no figures.

Left out are kernels written in Triton, and what inductor compiles.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from _lib import accumulation, autocast, leak, memory_steps, one_thread  # noqa: E402
from stand_in_cuda import stand_in  # noqa: E402

from nsightkit.workloads import attention, ceilings, layer, lm, training  # noqa: E402

MODEL = {"batch": 2, "context": 16, "d_model": 32, "layers": 1, "d_ff": 64, "heads": 2, "vocabulary": 96}
LAYER = {"context": 16, "hidden": 32, "heads": 2, "d_ff": 48, "layers": 2}
SWEEP = {"d_model": [16], "context": [16, 32], "batch": 2}
STEPS = [
    (training.run, {"workers": 0, "precision": "bf16"}),
    (training.run, {"workers": 1, "sync": True}),
    (training.run, {"workers": 0, "tiny": True}),
    (lm.run, {**MODEL, "precision": "fp16", "feed": "host"}),
    (lm.run, {**MODEL, "precision": "tf32", "attention": "naive"}),
    (ceilings.gemm, {"m": 16, "n": 16, "k": 16, "precision": "bf16"}),
    (ceilings.gemm, {"m": 16, "n": 16, "k": 16, "precision": "fp8"}),
    (ceilings.copy, {"megabytes": 1, "kind": "triad"}),
    (memory_steps.run, {**MODEL, "precision": "bf16"}),
    (leak.run, {**MODEL, "keep_graph": True}),
    (one_thread.run, {"step_ms": 5.0}),
    (layer.run, {**LAYER, "mode": "prefill", "rung": "autotuned"}),
    (layer.run, {**LAYER, "mode": "prefill", "rung": "fp8"}),
    (layer.run, {**LAYER, "mode": "decode", "rung": "graphed"}),
]
ROWS = [
    (attention.run, {**SWEEP, "implementation": "naive", "precision": "fp32"}),
    (attention.run, {**SWEEP, "implementation": "naive-compiled", "precision": "tf32"}),
    (attention.run, {**SWEEP, "implementation": "cudnn", "precision": "bf16"}),
    (memory_steps.contexts, {**MODEL, "context": [16, 32]}),
    (accumulation.run, {"count": 10}),
    (autocast.run, {"layers": 1, "context": 8, "batch": 1}),
]


@pytest.mark.parametrize(("workload", "parameters"), STEPS)
def test_steps_ask_cuda_for_what_there_is(workload: Any, parameters: dict[str, Any]):
    with stand_in() as cuda, workload("cuda", **parameters) as work:
        begun = len(cuda.log)
        work.step()
        work.step()
        assert "synchronize" not in cuda.log[begun:]  # a step does not wait for the GPU
        samples = work.samples()
    assert all(len(values) in (1, 2) for values in samples.values())


@pytest.mark.parametrize(("workload", "parameters"), ROWS)
def test_rows_ask_cuda_for_what_there_is(workload: Any, parameters: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "_PASSES", 1)
    with stand_in(), workload("cuda", **parameters) as work:
        rows = list(work.rows())
    assert rows
    for row in rows:
        assert row.get("status", "ok") == "ok"
        if "peak_bytes" in row:
            assert row["peak_bytes"] == 2 * 2**30  # what the stand-in's allocator says


def test_a_graph_is_captured_after_a_warm_up_and_replayed():
    with stand_in() as cuda, layer.run("cuda", **LAYER, mode="decode", rung="graphed") as work:
        end = cuda.index("capture ends")
        assert cuda.log[:end].count("wait_stream") == 2
        work.step()
        work.step()
        assert cuda.log[end + 1 :] == ["replay", "replay"]


def test_pinned_batches_are_copied_without_waiting():
    with stand_in() as cuda, lm.run("cuda", **MODEL, feed="host") as work:
        work.step()
        assert cuda.index("pin_memory") < cuda.index("to cuda, not waiting")


def test_a_ceiling_and_the_layer_beside_it_add_up_alike():
    gemm = {"m": 16, "n": 16, "k": 16, "precision": "fp8"}
    for workload, parameters in ((ceilings.gemm, gemm), (layer.run, {**LAYER, "mode": "prefill", "rung": "fp8"})):
        with stand_in() as cuda, workload("cuda", **parameters) as work:
            work.step()
        assert {call for call in cuda.log if call.startswith("scaled_mm")} == {"scaled_mm fast"}


def test_the_leak_trains_until_its_memory_is_out_and_gives_the_limit_back():
    with stand_in() as cuda:
        with leak.run("cuda", **MODEL, keep_graph=True, limit_bytes=70 * 2**30) as work:
            work.step()
            samples = work.samples()
        assert work.out_of_memory
        assert samples["steps"][0] > 0
        fractions = [call for call in cuda.log if call.startswith("memory fraction")]
        assert fractions == ["memory fraction 0.5", "memory fraction 1"]


def test_a_step_that_runs_out_ends_the_contexts():
    with stand_in() as cuda, memory_steps.contexts("cuda", **{**MODEL, "layers": 8, "context": [16, 32]}) as work:
        rows = work.rows()
        first = next(rows)
        torch.cuda.set_per_process_memory_fraction(0.5)  # from here on the stand-in has room for few operators
        later = list(rows)
    assert (first["status"], first["limit_bytes"]) == ("ok", 133 * 2**30)
    assert later[-1]["status"] == "oom"
    assert "empty_cache" in cuda.log


def test_one_thread_spins_for_as_many_ticks():
    with stand_in() as cuda, one_thread.run("cuda", step_ms=5.0) as work:
        work.step()
    assert "sleep 7500000" in cuda.log
