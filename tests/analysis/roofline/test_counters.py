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
def test_tensor_cores_are_advised_for_products(kernel: str, is_advised: bool):
    _, evidence, steps = told(kernel, **FP32)
    assert ("put it on the tensor cores" in steps) == is_advised
    assert "FMA: 90.0%" in evidence


def test_a_kernel_in_double_precision_is_not_told_to_use_tf32():
    fp64 = {"sm_pct": 90, "memory_pct": 30, "tensor_pct": 0, "fp64_pct": 85, "fma_pct": 3}
    _, evidence, steps = told("naive_gemm", **fp64)
    assert "FP64: 85.0%" in evidence
    assert "doubles" in steps
    assert "TF32" not in steps
    _, _, steps = told("naive_gemm", **(fp64 | {"fp64_pct": 2}))
    assert "TF32" in steps


def test_the_busiest_pipe_is_named_in_a_basic_report_too():
    basic = {"sm_pct": 77, "memory_pct": 33, "tensor_elapsed_pct": 1, "fma_elapsed_pct": 42, "alu_elapsed_pct": 57}
    _, evidence, steps = told(RANDOM, **basic)
    assert "other pipe is ALU: 57.0% (sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_elapsed)" in evidence
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
        (0, 512, (1, 1, 8, 16), "registers+shared_mem"),
    ],
)
def test_a_block_without_shared_memory_is_not_limited_by_it(static: int, dynamic: int, limits, expected: str):
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
def test_the_last_wave_is_asked_for_in_every_class(used: dict[str, float], waves: float, empty: int):
    _, evidence, steps = told(**used, waves=waves)
    assert (f"the last wave leaves up to {empty}% of the SMs' time empty" in evidence) == bool(empty)
    assert evidence.count("last wave") == bool(empty)
    assert ("fill whole waves" in steps) == bool(empty)


SOL = ".avg.pct_of_peak_sustained_elapsed"
MEMORY = {"sm_pct": 30, "memory_pct": 90}
LOW_DRAM = MEMORY | {"dram_pct": 20}
BUSY_L1 = LOW_DRAM | {"l1_pct": 90}
COMPUTE = {"sm_pct": 90, "memory_pct": 30}
QUIET = {"sm_pct": 20, "memory_pct": 30}
LIMITS = dict(zip((f"limit_{name}_blocks" for name in counters.LIMITS), (1, 9, 9, 16), strict=True))
STALLS = {f"stall_{stall.reason}": 0.0 for stall in ncu_metrics.STALLS} | {"stall_selected": 1.0}
STALLED = "90% of a warp's time between two instructions is"


@pytest.mark.parametrize(
    ("metrics", "present", "absent"),
    [
        ({"sm_pct": 30.25, "memory_pct": 91.5}, [f"30.2% (sm__throughput{SOL})", "91.5% (gpu__compute_memory"], []),
        ({"sm_pct": 30}, [f"gpu__compute_memory_throughput{SOL}", "SpeedOfLight"], ["sm__throughput"]),
        (QUIET | {"waves": 0.5, "grid_blocks": 64}, ["too small", "64 blocks (launch__grid_size)", "more blocks"], []),
        (MEMORY | {"waves": 0.5}, [], ["too small"]),  # NVIDIA's rule asks only where neither side is used
        (
            LOW_DRAM | {"l2_pct": 90, "l1_pct": 40, "l2_hit_pct": 97},
            ["DRAM is not", "L2 is the busiest level", "97.0% hits (lts__t_sector_hit_rate.pct)", "larger tiles"],
            [],
        ),
        (
            BUSY_L1 | {"l2_pct": 30, "bank_conflicts": 50, "shared_wavefronts": 100},
            ["50% of the passes through shared memory are bank conflicts", "pad or swizzle"],
            [],
        ),
        (
            BUSY_L1 | {"global_load_sectors": 3200, "global_load_requests": 100},
            ["32.0 sectors a request", "coalesce"],
            [],
        ),
        (MEMORY | {"dram_pct": 90}, ["DRAM bandwidth itself is the limit", "move fewer bytes"], []),
        (COMPUTE | {"tensor_pct": 30, "alu_pct": 85}, ["ALU", "multiples of 8"], ["occupancy"]),
        (  # a report without the sum of all types
            COMPUTE | {"tensor_16bit_pct": 85, "fma_pct": 3},
            ["the tensor cores are busy: 85.0% (sm__pipe_tensor_op_hmma_cycles_active"],
            [],
        ),
        (
            QUIET | LIMITS | {"theoretical_occupancy_pct": 12.5, "occupancy_pct": 12},
            ["registers 1, shared_mem 9, warps 9, blocks 16", "__launch_bounds__"],
            [],
        ),
        (QUIET | {"theoretical_occupancy_pct": 100, "occupancy_pct": 40}, ["end at different times"], []),
        (
            QUIET | STALLS | {"issue_pct": 10, "stall_long_scoreboard": 9.0},
            [f"{STALLED} long_scoreboard, 9 warps an issue (smsp__average", "in flight"],
            [],
        ),
        # stalls matter only where the scheduler fails to issue
        (QUIET | STALLS | {"issue_pct": 95, "stall_barrier": 9.0}, [], ["barrier"]),
    ],
)
def test_what_is_said_of_planted_counters(metrics: dict[str, float], present: list[str], absent: list[str]):
    text = "\n".join(told(**metrics)[1:])
    assert [words for words in present if words not in text] == [], text
    assert [words for words in absent if words in text] == [], text
