"""What is said of planted counters, each rule beside a launch that only looks like its own."""

from __future__ import annotations

import pytest

from nsightkit.analysis.roofline import counters
from nsightkit.trace import ncu, ncu_metrics


def told(kernel: str = "k", also: dict[str, ncu.Value] | None = None, cc: str | None = None, **ours: float):
    """Class, evidence and next steps of one launch, its metrics by our names."""
    by_name = {m.name: m for m in ncu_metrics.METRICS}
    metrics: dict[str, ncu.Value] = {by_name[name].nvidia[0]: value for name, value in ours.items()} | (also or {})
    report = ncu.from_metrics("planted", [{"kernel": kernel, "compute_capability": cc}], [metrics], {})
    row = counters.summary(report).iloc[0]
    return row["classification"], "\n".join(row["evidence"]), "\n".join(row["next_steps"])


FP32 = {"sm_pct": 90, "memory_pct": 30, "tensor_pct": 0, "fma_pct": 90, "alu_pct": 20}
RANDOM = "void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<float, 4, f, g>(long)"


@pytest.mark.parametrize(
    ("kernel", "cc", "chip", "types"),
    [
        ("naive_gemm", "8.0", 0x170, "TF32, BF16 or FP16"),
        ("naive_gemm", "12.0", None, "TF32, BF16 or FP16"),
        ("naive_gemm", None, None, "TF32, BF16 or FP16"),
        ("somebodys_kernel", "9.0", 0x180, "TF32, BF16 or FP16"),
        ("naive_gemm", "7.5", 0x166, "FP16"),
        ("naive_gemm", "7.0", None, "FP16"),
        ("naive_gemm", "7.5", 0x168, ""),  # a GTX 1660: Turing without tensor cores
        ("naive_gemm", "6.1", None, ""),
        (RANDOM, "9.0", None, ""),
        ("void cunn_SoftMaxForward<4, float>(float *)", "9.0", None, ""),
        ("void at::native::reduce_kernel<512, 1, f>(f)", "9.0", None, ""),
    ],
)
def test_tensor_cores_are_advised_for_products_on_cards_that_have_them(kernel, cc, chip, types) -> None:
    _, evidence, steps = told(kernel, {} if chip is None else {"device__attribute_chip": chip}, cc, **FP32)
    named = steps.partition("tensor cores: ")[2].partition(" inputs")[0]
    assert named == types
    assert "FMA: 90.0 %" in evidence
    if types == "" and kernel == "naive_gemm":
        assert "tensor" not in evidence  # not even that they are idle


def test_a_kernel_in_double_precision_is_not_told_to_use_tf32() -> None:
    fp64 = {"sm_pct": 90, "memory_pct": 30, "tensor_pct": 0, "fp64_pct": 85, "fma_pct": 3}
    _, evidence, steps = told("naive_gemm", cc="8.9", **fp64)
    assert "FP64: 85.0 %" in evidence
    assert "doubles" in steps
    assert "TF32" not in steps
    _, _, steps = told("naive_gemm", cc="8.9", **(fp64 | {"fp64_pct": 2}))
    assert "TF32" in steps


def test_the_busiest_pipe_is_named_in_a_basic_report_too() -> None:
    basic = {"sm_pct": 77, "memory_pct": 33, "tensor_elapsed_pct": 1, "fma_elapsed_pct": 42, "alu_elapsed_pct": 57}
    _, evidence, steps = told(RANDOM, cc="9.0", **basic)
    assert "pipe is ALU: 57.0 % (sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_elapsed)" in evidence
    assert "FP32" not in steps
    _, evidence, _ = told(RANDOM, cc="9.0", **(basic | {"alu_elapsed_pct": 12}))
    assert "pipe is FMA" in evidence
