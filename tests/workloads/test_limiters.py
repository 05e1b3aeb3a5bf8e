"""Operations whose limiter is known: what they compute, where they touch memory, and that they say what is missing."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from nsightkit.investigations import parts as investigations

torch = pytest.importorskip("torch")

from nsightkit.workloads import limiters  # noqa: E402

SMALL = {"side": 32, "side_fp32": 48, "elements": 4096, "stride": 8, "rows": 4, "programs": 8, "hops": 5, "table": 512}


def test_each_computes_what_it_says() -> None:
    with limiters.start("cpu", **SMALL) as run:
        assert list(run.inputs) == list(limiters.CASES)
        for name, kind, allowed in (("product", torch.bfloat16, 2**-6), ("product_fp32", torch.float32, 1e-5)):
            a, b, _ = run.inputs[name]
            found, truth = run.run(name), a.double() @ b.double()
            assert a.dtype == b.dtype == found.dtype == kind
            assert (found.double() - truth).abs().max() <= allowed * truth.abs().max()
        following, held = run.inputs["chase"]
        found = run.run("chase")
        for row in range(SMALL["programs"]):
            at = row
            for _ in range(SMALL["hops"]):
                at = int(following[at])
            assert float(found[row]) == pytest.approx(float(held[row].double().sum()) * at, rel=1e-3, abs=1.0)
        found = run.run("softmax")
        assert found.shape == (4, 1024)
        powers = torch.exp(run.inputs["softmax"][0].double())
        assert torch.allclose(found.double(), powers / powers.sum(-1, keepdim=True))


def test_the_additions_read_as_many_numbers_from_near_and_from_afar() -> None:
    with limiters.start("cpu", **SMALL) as run:
        together, apart = run.inputs["add"][0], run.inputs["strided"][0]
        assert together.shape == apart.shape == (4096,)
        assert (together.stride(), apart.stride()) == ((1,), (8,))
        # A sector has 32 bytes: of each that is read, one number is used.
        assert apart.stride(0) * apart.element_size() == 32
        assert torch.equal(run.run("add"), together + 1)
        assert torch.equal(run.run("strided"), apart + 1)


def test_each_step_has_a_phase_for_each() -> None:
    with limiters.start("cpu", **SMALL) as run:
        run.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as running:
            run.step()
    marked = [event for event in running.events() if event.name in {"step", *limiters.CASES}]
    marked.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
    assert [event.name for event in marked] == ["step", *limiters.CASES]


def test_the_precision_is_taken_back_and_what_is_missing_said() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        with limiters.start("cpu", **SMALL) as run:
            assert torch.get_float32_matmul_precision() == "highest"
            assert "needs a GPU" in run.parameters["instead"]
            assert run.losses() == []
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_what_a_device_cannot_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nsightkit.workloads.limiters_triton", None)
    assert limiters.kernels_of(torch.device("cuda")) == (None, "no walk: Triton is not installed")
    monkeypatch.setattr(limiters, "kernels_of", lambda _: (None, "no walk"))
    # "meta" has no data to compute with, and is not a CPU either.
    with limiters.start("meta", **SMALL) as run:
        assert list(run.inputs) == list(limiters.CASES)[:-1]
        assert run.parameters["instead"] == "no walk"


def test_what_is_registered_touches_memory_as_the_page_says() -> None:
    for name in ("before", "after"):
        part = investigations.find("limiters", name)
        for mode in ("live", "smoke"):
            config = limiters.LimiterConfig(**part.parameters(mode))
            assert config.elements % config.rows == 0
            assert config.stride * 4 == 32
            assert config.programs <= config.table
        live = limiters.LimiterConfig(**part.parameters("live"))
        assert live.elements * 4 > 128 * 2**20  # no card's level-2 cache holds it
        assert live.table * 4 > 128 * 2**20
        assert part.profiled == "ncu"
    # Fewer rows than any data-centre card since 2017 has multiprocessors, and many times as many as any has.
    rows = [investigations.find("limiters", name).gpu["rows"] for name in ("before", "after")]
    assert rows[0] < 40
    assert rows[1] > 4 * 170


_INTERPRETED = """
import json, torch
from nsightkit.workloads import limiters, limiters_triton
torch.manual_seed(1)
following = torch.randperm(512).to(torch.int32)
held = torch.randn(8, 128 * limiters.HELD)
found = limiters_triton.walk(following, held, 5)
truth = limiters.walked(following, held.double(), 5)
print(json.dumps([float((found - truth).abs().max()), float(truth.abs().max())]))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_walks_as_the_operations_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    done = subprocess.run(
        [sys.executable, "-c", _INTERPRETED], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    error, largest = json.loads(done.stdout.splitlines()[-1])
    assert error < 1e-5 * largest


@pytest.mark.gpu
def test_on_a_gpu_the_walk_is_one_kernel_and_equal() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    with limiters.start("cuda", **SMALL) as run:
        assert run.parameters["instead"] == ""
        truth = limiters.walked(*run.inputs["chase"], SMALL["hops"])
        assert torch.allclose(run.run("chase"), truth, rtol=1e-4, atol=1.0)
        with torch.profiler.profile() as running:
            run.step()
    kernels = [event.name for event in running.events() if event.device_type.name == "CUDA"]
    assert sum("walk" in name for name in kernels) == 1
