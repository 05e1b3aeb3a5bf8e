"""Synthetic counters with known answers, as Nsight Compute would give them. They never ran on a GPU.

The launches are those of :mod:`_lib.limiters`, on a GPU that does not exist. What they use of it is
chosen; what follows from that is worked out as Nsight Compute does: a throughput is the greatest of its parts, and the
blocks that fit on a multiprocessor are the fewest that registers, shared memory, warps and blocks allow. The cycles
between two instructions of a warp are its scheduler's active warps over the share of cycles that issue one, and in one
of them the warp is selected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nsightkit.trace.ncu import Report, Value, from_metrics
from nsightkit.trace.ncu_metrics import METRICS

__all__ = ["GPU", "counters"]

GPU = "Synthetic GPU"
_SMS, _REGISTERS, _SHARED_BYTES, _WARPS, _BLOCKS = 100, 65_536, 228 * 1024, 64, 32
_SCHEDULERS = 4
_DRAM_BYTES_PER_S = 4e12
_CLOCK_HZ = 1.5e9

_ELAPSED = ".avg.pct_of_peak_sustained_elapsed"
#: Parts of the two throughputs, as ncu calls them.
_COMPUTE = {
    "tensor": f"sm__pipe_tensor_cycles_active{_ELAPSED}",
    "fma": f"sm__pipe_fma_cycles_active{_ELAPSED}",
    "lsu": f"sm__inst_executed_pipe_lsu{_ELAPSED}",
    "issue": f"sm__inst_issued{_ELAPSED}",
}
_MEMORY = {
    "l1": f"l1tex__data_pipe_lsu_wavefronts{_ELAPSED}",
    "l2": f"lts__t_sectors{_ELAPSED}",
    "dram": f"dram__cycles_active{_ELAPSED}",
}


@dataclasses.dataclass(frozen=True)
class _Launch:
    """What a launch is, what it uses of the card, and what must be found."""

    kernel: str
    bound: str
    limiter: str
    time_ns: int
    blocks: int
    threads: int
    registers: int
    compute: Mapping[str, float]  # percent of the peak of each part
    memory: Mapping[str, float]
    waits: Mapping[str, float]  # shares of the cycles between two instructions in which a warp is not selected
    shared_bytes: int = 0
    sectors_a_request: float = 16.0
    used_bytes: float = 32.0  # of a sector


_LAUNCHES = {
    "product": _Launch(
        "nvjet_synthetic_bf16_128x256_64x4", "compute-bound", "shared_mem", 1_400_000, 2048, 384, 80,
        {"tensor": 91, "fma": 3, "lsu": 12, "issue": 25}, {"l1": 55, "l2": 38, "dram": 21},
        {"gmma": 0.7, "long_scoreboard": 0.18, "wait": 0.12}, shared_bytes=200 * 1024,
    ),
    "product_fp32": _Launch(
        "synthetic_sgemm_128x128_8x4_nn", "compute-bound", "registers", 2_700_000, 1024, 256, 122,
        {"tensor": 0, "fma": 93, "lsu": 30, "issue": 88}, {"l1": 45, "l2": 20, "dram": 8},
        {"math_pipe_throttle": 0.4, "not_selected": 0.4, "wait": 0.2}, shared_bytes=33 * 1024,
    ),
    "add": _Launch(
        "void synthetic::vectorized_elementwise_kernel<4, synthetic::CUDAFunctor_add<float>>(int)",
        "memory-bound", "warps", 146_000, 131_072, 128, 16,
        {"tensor": 0, "fma": 3, "lsu": 6, "issue": 10}, {"l1": 30, "l2": 52, "dram": 92},
        {"long_scoreboard": 0.9, "drain": 0.1},
    ),
    "strided": _Launch(
        "void synthetic::elementwise_kernel<128, 4, synthetic::CUDAFunctor_add<float>>(int)",
        "memory-bound", "warps", 671_000, 131_072, 128, 16,
        {"tensor": 0, "fma": 2, "lsu": 5, "issue": 6}, {"l1": 48, "l2": 70, "dram": 90},
        {"long_scoreboard": 0.82, "lg_throttle": 0.18},
        sectors_a_request=32.0, used_bytes=4.0,
    ),
    "softmax": _Launch(
        "void synthetic::cunn_SoftMaxForward<4, float>(float *, const float *, int)",
        "latency-bound", "registers+warps", 2_065_000, 16, 1024, 32,
        {"tensor": 0, "fma": 2, "lsu": 4, "issue": 3}, {"l1": 9, "l2": 10, "dram": 13},
        {"long_scoreboard": 0.8, "barrier": 0.2},
    ),
    "chase": _Launch(
        "_walk_kernel", "latency-bound", "registers", 500_000, 1024, 128, 208,
        {"tensor": 0, "fma": 1, "lsu": 2, "issue": 2}, {"l1": 4, "l2": 6, "dram": 5},
        {"long_scoreboard": 1.0}, sectors_a_request=1.5,
    ),
}  # fmt: skip
_MANY_ROWS = dataclasses.replace(
    _LAUNCHES["softmax"],
    bound="memory-bound",
    time_ns=151_000,
    blocks=16_384,
    compute={"tensor": 0, "fma": 22, "lsu": 18, "issue": 35},
    memory={"l1": 45, "l2": 58, "dram": 89},
)


def counters(*, many_rows: bool = False) -> tuple[Report, dict[str, dict[str, str]]]:
    """Make a report of six launches, each in an NVTX range of its name.

    Parameters
    ----------
    many_rows : bool
        The softmax has a row for every multiprocessor many times over, where it has few otherwise.

    Returns
    -------
    report : Report
    truth : dict of str to dict
        By name, ``bound`` and ``limiter``: what an analysis must find.
    """
    launches = _LAUNCHES | ({"softmax": _MANY_ROWS} if many_rows else {})
    ours = {metric.name: metric for metric in METRICS}
    units = dict.fromkeys([*_COMPUTE.values(), *_MEMORY.values()], "%")
    metrics: list[dict[str, Value]] = []
    for launch in launches.values():
        values = _values(launch)
        units |= {ours[name].nvidia[0]: ours[name].unit for name in values}
        metrics.append(
            {
                "device__attribute_display_name": GPU,
                f"breakdown:sm__throughput{_ELAPSED}": ",".join(_COMPUTE.values()),
                f"breakdown:gpu__compute_memory_throughput{_ELAPSED}": ",".join(_MEMORY.values()),
                **{nvidia: launch.compute[part] for part, nvidia in _COMPUTE.items()},
                **{nvidia: launch.memory[part] for part, nvidia in _MEMORY.items()},
                **{ours[name].nvidia[0]: value for name, value in values.items()},
            }
        )
    units |= dict.fromkeys((name for row in metrics for name in row if name not in units), "")
    identities: list[dict[str, Any]] = [
        {
            "kernel": launch.kernel,
            "grid": f"({launch.blocks}, 1, 1)",
            "block": f"({launch.threads}, 1, 1)",
            "ranges": ("step", name),
        }
        for name, launch in launches.items()
    ]
    truth = {name: {"bound": launch.bound, "limiter": launch.limiter} for name, launch in launches.items()}
    return from_metrics("synthetic counters", identities, metrics, units), truth


def _values(launch: _Launch) -> dict[str, float]:
    """Work out what a launch's counters are, by our names."""
    warps = -(-launch.threads // 32)
    limits = {
        "registers": _REGISTERS // (launch.registers * launch.threads),
        "shared_mem": _SHARED_BYTES // launch.shared_bytes if launch.shared_bytes else _BLOCKS,
        "warps": _WARPS // warps,
        "blocks": _BLOCKS,
    }
    fit = min(limits.values())
    theoretical = 100 * fit * warps / _WARPS
    achieved = 0.98 * min(fit, launch.blocks / _SMS) * warps / _WARPS
    active, issuing = achieved * _WARPS / _SCHEDULERS, launch.compute["issue"] / 100
    between = active / issuing
    requests = float(launch.blocks * warps * 4)
    dram_bytes = launch.memory["dram"] / 100 * _DRAM_BYTES_PER_S * launch.time_ns / 1e9
    return {
        "time_ns": launch.time_ns,
        "sm_pct": max(launch.compute.values()),
        "memory_pct": max(launch.memory.values()),
        **{f"{level}_pct": launch.memory[level] for level in _MEMORY},
        **{f"{pipe}_pct": launch.compute[pipe] for pipe in ("tensor", "fma", "lsu")},
        "sm_clock_hz": _CLOCK_HZ,
        "sm_count": _SMS,
        "grid_blocks": launch.blocks,
        "block_threads": launch.threads,
        "registers_per_thread": launch.registers,
        "dynamic_shared_bytes": launch.shared_bytes,
        **{f"limit_{name}_blocks": count for name, count in limits.items()},
        "theoretical_occupancy_pct": theoretical,
        "occupancy_pct": 100 * achieved,
        "waves": launch.blocks / (_SMS * fit),
        "issue_pct": launch.compute["issue"],
        "active_warps": active,
        "eligible_warps": issuing * 1.2,
        "latency_cycles": between,
        "global_load_requests": requests,
        "global_load_sectors": requests * launch.sectors_a_request,
        "global_load_bytes_per_sector": launch.used_bytes,
        "dram_read_bytes": dram_bytes * 0.75,
        "dram_write_bytes": dram_bytes * 0.25,
        "dram_bytes_per_s": dram_bytes / launch.time_ns * 1e9,
        "stall_selected": 1.0,
        **{f"stall_{reason}": share * (between - 1) for reason, share in launch.waits.items()},
    }
