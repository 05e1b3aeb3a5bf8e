"""Ceilings: the operations are what they are named for, and their rates follow from sizes and time."""

from __future__ import annotations

import pytest

from nsightkit.analysis.roofline import sol

torch = pytest.importorskip("torch")

from nsightkit.workloads import ceilings  # noqa: E402


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", "float32"), ("tf32", "float32"), ("bf16", "bfloat16")])
def test_a_gemm_is_the_product_of_random_matrices(precision: str, dtype: str) -> None:
    before = torch.get_float32_matmul_precision()
    with ceilings.gemm("cpu", m=32, n=48, k=64, precision=precision) as work:
        work.step()
        product = work.operation()
        assert product.shape == (32, 48)
        assert product.dtype == getattr(torch, dtype)
        assert float(product.float().std()) == pytest.approx(8, rel=0.1)  # sums of 64 products of standard normals
    assert torch.get_float32_matmul_precision() == before


def test_a_gemm_in_fp8_is_near_that_in_fp32() -> None:
    with ceilings.gemm("cpu", m=32, n=48, k=64, precision="fp8") as narrow:
        got = narrow.operation().float()
    with ceilings.gemm("cpu", m=32, n=48, k=64, precision="fp32") as wide:
        expected = wide.operation()
    assert float((got - expected).norm() / expected.norm()) < 0.12


def test_zeros_stay_zeros() -> None:
    with ceilings.gemm("cpu", m=8, n=8, k=8, precision="fp32", zeros=True) as work:
        assert not work.operation().any()


@pytest.mark.parametrize("kind", ["copy", "triad", "read"])
def test_transfers(kind: str) -> None:
    with ceilings.copy("cpu", megabytes=1, kind=kind) as work:
        work.step()
        result = work.operation()
    assert result.numel() == (1 if kind == "read" else 250_000)
    assert bool(result.isfinite().all())


def test_an_unknown_transfer_is_an_error() -> None:
    with pytest.raises(ValueError, match="copy, triad or read"):
        ceilings.copy("cpu", megabytes=1, kind="move")


def test_rates_follow_from_the_parameters_of_a_page() -> None:
    gemm = sol.ceiling({"m": 1000, "n": 1000, "k": 1000, "precision": "bf16"}, 1e6)
    assert (gemm["unit"], gemm["tflops"]) == ("bf16", pytest.approx(2.0))
    copy = sol.ceiling({"megabytes": 1000, "kind": "copy"}, 1e6)
    assert (copy["unit"], copy["gb_per_s"]) == ("memory", pytest.approx(2000.0))
    zeros = sol.ceiling({"m": 1000, "n": 1000, "k": 1000, "precision": "bf16", "zeros": True}, 0.5e6)
    rates = sol.ceilings([gemm, copy, zeros], "measured")
    assert rates.tflops == {"bf16": pytest.approx(2.0)}
