"""Ceilings: the operations are what they are named for."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from nsightkit.workloads import ceilings  # noqa: E402
from nsightkit.workloads.out_of_memory import is_out_of_memory  # noqa: E402


@pytest.mark.parametrize(
    ("precision", "dtype"), [("tf32", torch.float32), ("bf16", torch.bfloat16), ("fp8", torch.bfloat16)]
)
def test_a_gemm_is_the_product_of_random_matrices(precision: str, dtype: torch.dtype):
    before = torch.get_float32_matmul_precision()
    with ceilings.gemm("cpu", m=32, n=48, k=64, precision="fp32") as work:
        expected = work.operation()
    with ceilings.gemm("cpu", m=32, n=48, k=64, precision=precision) as work:
        work.step()
        product = work.operation()
    assert product.dtype == dtype
    assert float((product - expected).norm() / expected.norm()) < 0.12
    assert float(product.float().std()) == pytest.approx(8, rel=0.1)  # sums of 64 products of standard normals
    assert torch.get_float32_matmul_precision() == before


def test_zeros_stay_zeros():
    with ceilings.gemm("cpu", m=8, n=8, k=8, precision="fp32", zeros=True) as work:
        assert not work.operation().any()


@pytest.mark.parametrize(("kind", "numbers"), [("copy", 250_000), ("triad", 250_000), ("read", 1)])
def test_transfers(kind: str, numbers: int):
    with ceilings.copy("cpu", megabytes=1, kind=kind) as work:
        assert work.operation().numel() == numbers


@pytest.mark.parametrize(
    ("message", "ran_out"),
    [
        ("can't allocate memory: you tried to allocate 16777216 bytes", True),
        ("CUBLAS_STATUS_ALLOC_FAILED", True),
        ("CUDA error: out of memory", True),
        ("mat1 and mat2 shapes cannot be multiplied", False),
        ("out of resource: shared memory, Required: 262144", False),
    ],
)
def test_messages_of_allocators(message: str, ran_out: bool):
    assert is_out_of_memory(RuntimeError(message)) == ran_out
    assert is_out_of_memory(torch.OutOfMemoryError(message))
