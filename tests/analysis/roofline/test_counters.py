"""What is said of planted counters, each rule beside a launch that only looks like its own."""

from __future__ import annotations

import pytest

from nsightkit.analysis.roofline import counters
from nsightkit.trace import ncu, ncu_metrics


def summed_up(kernel: str = "k", **ours: float):
    """The row of one launch, its metrics by our names."""
    by_name = {m.name: m for m in ncu_metrics.METRICS}
    metrics: dict[str, ncu.Value] = {by_name[name].nvidia[0]: value for name, value in ours.items()}
    report = ncu.from_metrics("planted", [{"kernel": kernel}], [metrics], {})
    return counters.summary(report).iloc[0]


def told(*of, **ours):
    row = summed_up(*of, **ours)
    return row["classification"], "\n".join(row["evidence"]), "\n".join(row["next_steps"])


FP32 = {"sm_pct": 90, "memory_pct": 30, "tensor_pct": 0, "fma_pct": 90, "alu_pct": 20}
RANDOM = "void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<float, 4, f, g>(long)"


@pytest.mark.parametrize(
    ("kernel", "is_advised"),
    [
        ("naive_gemm", True),
        ("somebodys_kernel", True),
        (RANDOM, False),
        ("void at::native::reduce_kernel<512, 1, f>(f)", False),
    ],
)
def test_tensor_cores_are_advised_for_products(kernel: str, is_advised: bool) -> None:
    _, evidence, steps = told(kernel, **FP32)
    assert ("put it on the tensor cores" in steps) == is_advised
    assert "FMA: 90.0 %" in evidence


def test_a_kernel_in_double_precision_is_not_told_to_use_tf32() -> None:
    fp64 = {"sm_pct": 90, "memory_pct": 30, "tensor_pct": 0, "fp64_pct": 85, "fma_pct": 3}
    _, evidence, steps = told("naive_gemm", **fp64)
    assert "FP64: 85.0 %" in evidence
    assert "doubles" in steps
    assert "TF32" not in steps
    _, _, steps = told("naive_gemm", **(fp64 | {"fp64_pct": 2}))
    assert "TF32" in steps


def test_the_busiest_pipe_is_named_in_a_basic_report_too() -> None:
    basic = {"sm_pct": 77, "memory_pct": 33, "tensor_elapsed_pct": 1, "fma_elapsed_pct": 42, "alu_elapsed_pct": 57}
    _, evidence, steps = told(RANDOM, **basic)
    assert "other pipe is ALU: 57.0 % (sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_elapsed)" in evidence
    assert "FP32" not in steps
    _, evidence, _ = told(RANDOM, **(basic | {"alu_elapsed_pct": 12}))
    assert "other pipe is FMA" in evidence


IDLE = {"sm_pct": 15, "memory_pct": 53, "waves": 100}


@pytest.mark.parametrize(
    ("static", "dynamic", "limits", "expected"),
    [
        (0, 0, (48, 16, 32, 16), "blocks"),
        (0, 512, (48, 16, 32, 16), "shared_mem+blocks"),
        (64, 0, (48, 16, 32, 16), "shared_mem+blocks"),
        (0, 0, (48, 8, 32, 16), "shared_mem"),  # what the driver takes of it for each block
    ],
)
def test_a_block_without_shared_memory_is_not_limited_by_it(static: int, dynamic: int, limits, expected: str) -> None:
    metrics = dict(zip((f"limit_{name}_blocks" for name in counters.LIMITS), limits, strict=True))
    bytes_of = {"static_shared_bytes": static, "dynamic_shared_bytes": dynamic}
    row = summed_up(**IDLE, **metrics, **bytes_of, theoretical_occupancy_pct=50)
    assert row["occupancy_limiter"] == expected
    assert f"shared_mem {limits[1]}" in "".join(row["evidence"])
    assert ("smaller tiles" in "".join(row["next_steps"])) == ("shared_mem" in expected)


@pytest.mark.parametrize(
    ("used", "waves", "empty"),
    [
        ({"sm_pct": 77, "memory_pct": 33}, 1.6, 20),
        ({"sm_pct": 30, "memory_pct": 70}, 1.5, 25),
        ({"sm_pct": 65, "memory_pct": 62}, 1.1, 35),  # no more than what is left
        ({"sm_pct": 20, "memory_pct": 30}, 1.1, 45),
        ({"sm_pct": 30, "memory_pct": 92}, 1.5, 0),
        ({"sm_pct": 77, "memory_pct": 33}, 9.6, 0),
        ({"sm_pct": 77, "memory_pct": 33}, 0.5, 0),  # one wave is the last one, too
        ({"sm_pct": 77, "memory_pct": 33}, 2.0, 0),
    ],
)
def test_the_last_wave_is_asked_for_in_every_class(used: dict[str, float], waves: float, empty: int) -> None:
    _, evidence, steps = told(**used, waves=waves)
    assert (f"the last wave leaves up to {empty} % of the SMs' time empty" in evidence) == bool(empty)
    assert evidence.count("last wave") == bool(empty)
    assert ("fill whole waves" in steps) == bool(empty)
