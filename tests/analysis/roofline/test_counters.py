"""What is said of planted counters, each rule beside a launch that only looks like its own."""

from __future__ import annotations

import pytest

from nsightkit.analysis.roofline import counters
from nsightkit.trace import ncu, ncu_metrics


def summed_up(kernel: str = "k", also: dict[str, ncu.Value] | None = None, cc: str | None = None, **ours: float):
    """The row of one launch, its metrics by our names."""
    by_name = {m.name: m for m in ncu_metrics.METRICS}
    metrics: dict[str, ncu.Value] = {by_name[name].nvidia[0]: value for name, value in ours.items()} | (also or {})
    report = ncu.from_metrics("planted", [{"kernel": kernel, "compute_capability": cc}], [metrics], {})
    return counters.summary(report).iloc[0]


def told(*of, **ours):
    row = summed_up(*of, **ours)
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


IDLE = {"sm_pct": 15, "memory_pct": 53, "waves": 100}


@pytest.mark.parametrize(
    ("threads", "share"), [(1, 3), (24, 75), (25, 78), (40, 62), (32, 0), (30, 0), (1000, 0), (256, 0)]
)
def test_threads_that_a_warp_lacks_come_first(threads: int, share: int) -> None:
    for class_of in (IDLE, IDLE | {"memory_pct": 90}, IDLE | {"sm_pct": 90}):
        _, evidence, steps = told(**class_of, block_threads=threads)
        assert ("make blocks a multiple of 32" in steps) == bool(share)
        if share:
            first = f"the warps of a block are {share} % full, and the rest of them does nothing: {threads} (launch__"
            assert evidence.startswith(first)
            assert steps.splitlines()[0].startswith("make blocks")


def test_threads_that_branch_apart_are_told_from_threads_that_are_not_there() -> None:
    for class_of in (IDLE, IDLE | {"memory_pct": 90}, IDLE | {"sm_pct": 90}):
        _, evidence, steps = told(**class_of, block_threads=1024, threads_per_instruction=14.6)
        assert "14.6 (smsp__thread_inst_executed_per_inst_executed.ratio) of its 32 take part" in evidence
        assert "same branches" in steps
        for threads, together in ((1024, 24.5), (1, 1.0), (16, 15.5)):
            _, evidence, _ = told(**class_of, block_threads=threads, threads_per_instruction=together)
            assert "branch apart" not in evidence


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


STALLS = {f"stall_{stall.reason}": 0.0 for stall in ncu_metrics.STALLS} | {"stall_selected": 1.0}
DOT_PRODUCT = IDLE | STALLS | {
    "occupancy_pct": 70, "theoretical_occupancy_pct": 100, "global_load_requests": 64, "l2_requests": 1088,
    "l2_reductions": 1024, "l2_atomics": 0, "l2_swaps": 0, "stall_drain": 9.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("but", "said"),
    [
        ({}, True),
        ({"stall_drain": 0, "stall_long_scoreboard": 9}, True),
        ({"stall_drain": 0, "stall_lg_throttle": 9}, True),
        ({"l2_atomics": 1000, "l2_reductions": 0}, True),
        ({"l2_swaps": 1000, "l2_reductions": 0}, True),
        ({"memory_pct": 90}, True),
        ({"stall_barrier": 10}, False),  # something else is waited for
        ({"l2_reductions": 500}, False),  # most are loads
        ({"stall_drain": 0.5}, False),
    ],
)
def test_atomics_are_named_before_uneven_work(but: dict[str, float], said: bool) -> None:
    _, evidence, steps = told(**(DOT_PRODUCT | but))
    assert ("most requests to L2 are atomic operations" in evidence) == said
    assert ("reduce first" in steps) == said
    if said:
        assert "(lts__t_requests_srcunit_tex_op_" in evidence
        assert "1,088 requests (lts__t_requests_srcunit_tex.sum)" in evidence
        assert steps.startswith("do fewer atomic operations")


BANDWIDTH = {"sm_pct": 25, "memory_pct": 67, "dram_pct": 67}


@pytest.mark.parametrize(("occupancy", "more"), [(93.7, False), (50, True), (None, True)])
def test_more_warps_are_for_multiprocessors_that_have_room(occupancy: float | None, more: bool) -> None:
    _, _, steps = told(**BANDWIDTH, **({} if occupancy is None else {"occupancy_pct": occupancy}))
    assert ("wider loads, more warps)" in steps) == more
    assert ("wider loads)" in steps) != more


@pytest.mark.parametrize("level", ["l2", "l1"])
def test_a_caches_own_figure_is_told_from_the_memory_throughput(level: str) -> None:
    base = {"sm_pct": 30, "memory_pct": 63.3, "dram_pct": 55, f"{level}_hit_pct": 58}
    _, evidence, _ = told(**base, **{f"{level}_pct": 84.7})
    assert "is the busiest level: 84.7 % by its own measure, not the memory throughput's (" in evidence
    _, evidence, _ = told(**base, **{f"{level}_pct": 63.3})
    assert "is the busiest level: 63.3 % (" in evidence


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


ACCESS = {"global_load_requests": 1000, "global_load_sectors": 16_000, "global_store_sectors": 16_000}
ON_DRAM = {"sm_pct": 20, "memory_pct": 89, "dram_pct": 89} | ACCESS
HALF, QUARTER = {"global_load_bytes_per_sector": 16}, {"global_store_bytes_per_sector": 8}


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        # DRAM is the limit: its own bytes say whether sectors moved twice. 16,000 sectors are 512,000 bytes.
        (ON_DRAM | HALF | {"dram_read_bytes": 256_000}, False),
        (ON_DRAM | HALF | {"dram_read_bytes": 450_000}, True),
        (ON_DRAM | HALF, True),  # nothing tells
        (ON_DRAM | QUARTER | {"dram_write_bytes": 128_000}, False),
        (ON_DRAM | QUARTER | {"dram_write_bytes": 300_000}, True),
        # Warps wait: what loads find in L1 is not fetched again, and stores go through it.
        (IDLE | ACCESS | HALF | {"global_load_hit_pct": 67}, False),
        (IDLE | ACCESS | HALF | {"global_load_hit_pct": 20}, True),
        (IDLE | ACCESS | QUARTER | {"global_load_hit_pct": 90}, True),
        # L1 is the limit, and has to look at each sector.
        (
            {"sm_pct": 20, "memory_pct": 90, "l1_pct": 90, "dram_pct": 5, "global_load_hit_pct": 95} | ACCESS | HALF,
            True,
        ),
        # One result a block, beside millions of loads.
        (IDLE | ACCESS | QUARTER | {"global_store_sectors": 10}, False),
        (IDLE | ACCESS | {"global_load_sectors": 31_000}, True),
        (IDLE | ACCESS | {"global_load_sectors": 31_000, "global_load_hit_pct": 60}, False),
    ],
)
def test_sectors_that_a_cache_keeps_until_they_are_used_up_are_not_wasted(metrics, said) -> None:
    _, _, steps = told(**metrics)
    assert ("coalesce: " in steps) == said
