"""Synthetic counters with known answers, as Nsight Compute would give them. They never ran on a GPU.

The launches are those of :mod:`_lib.limiters`, on a GPU that does not exist. What they use of it is chosen, in
``counters.toml``; what follows from that is worked out as Nsight Compute does: a throughput is the greatest of its
parts, and the blocks that fit on a multiprocessor are the fewest that registers, shared memory, warps and blocks allow.
The cycles between two instructions of a warp are its scheduler's active warps over the share of cycles that issue one,
and in one of them the warp is selected.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from nsightkit.trace.ncu import Report, Value, from_metrics
from nsightkit.trace.ncu_metrics import METRICS

__all__ = ["GPU", "counters"]

GPU = "Synthetic GPU"
_SMS, _REGISTERS, _SHARED_BYTES, _WARPS, _BLOCKS = 100, 65_536, 228 * 1024, 64, 32
_SCHEDULERS = 4
_DRAM_BYTES_PER_S = 4e12
_CLOCK_HZ = 1.5e9
_LAUNCHES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

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
    launches = dict(_LAUNCHES)
    filled = launches.pop("many_rows")
    if many_rows:
        launches["softmax"] = filled
    ours = {metric.name: metric for metric in METRICS}
    units = dict.fromkeys([*_COMPUTE.values(), *_MEMORY.values()], "%")
    metrics: list[dict[str, Value]] = []
    identities: list[dict[str, Any]] = []
    truth = {}
    for name, launch in launches.items():
        row: dict[str, Value] = {
            "device__attribute_display_name": GPU,
            f"breakdown:sm__throughput{_ELAPSED}": ",".join(_COMPUTE.values()),
            f"breakdown:gpu__compute_memory_throughput{_ELAPSED}": ",".join(_MEMORY.values()),
        }
        for part, nvidia in _COMPUTE.items():
            row[nvidia] = launch["compute"][part]
        for part, nvidia in _MEMORY.items():
            row[nvidia] = launch["memory"][part]
        for metric, value in _values(launch).items():
            row[ours[metric].nvidia[0]] = value
            units[ours[metric].nvidia[0]] = ours[metric].unit
        metrics.append(row)
        identity = {"kernel": launch["kernel"], "ranges": ("step", name)}
        identities.append(identity | {"grid": f"({launch['blocks']}, 1, 1)", "block": f"({launch['threads']}, 1, 1)"})
        truth[name] = {"bound": launch["bound"], "limiter": launch["limiter"]}
    for name in metrics[0]:
        units.setdefault(name, "")
    return from_metrics("synthetic counters", identities, metrics, units), truth


def _values(launch: dict[str, Any]) -> dict[str, float]:
    """Work out what a launch's counters are, by our names."""
    compute, memory = launch["compute"], launch["memory"]
    time_ns, blocks, threads, registers = (launch[name] for name in ("time_ns", "blocks", "threads", "registers"))
    shared_bytes = launch.get("shared_bytes", 0)
    warps = -(-threads // 32)
    limits = {"registers": _REGISTERS // (registers * threads), "warps": _WARPS // warps, "blocks": _BLOCKS}
    limits["shared_mem"] = _SHARED_BYTES // shared_bytes if shared_bytes else _BLOCKS
    fit = min(limits.values())
    achieved = 0.98 * min(fit, blocks / _SMS) * warps / _WARPS
    active, issuing = achieved * _WARPS / _SCHEDULERS, compute["issue"] / 100
    between = active / issuing
    requests = float(blocks * warps * 4)
    dram_bytes = memory["dram"] / 100 * _DRAM_BYTES_PER_S * time_ns / 1e9
    values = {
        "time_ns": time_ns,
        "sm_pct": max(compute.values()),
        "memory_pct": max(memory.values()),
        "sm_clock_hz": _CLOCK_HZ,
        "sm_count": _SMS,
        "grid_blocks": blocks,
        "block_threads": threads,
        "registers_per_thread": registers,
        "dynamic_shared_bytes": shared_bytes,
        "theoretical_occupancy_pct": 100 * fit * warps / _WARPS,
        "occupancy_pct": 100 * achieved,
        "waves": blocks / (_SMS * fit),
        "issue_pct": compute["issue"],
        "active_warps": active,
        "eligible_warps": issuing * 1.2,
        "latency_cycles": between,
        "global_load_requests": requests,
        "global_load_sectors": requests * launch.get("sectors_a_request", 16.0),
        "global_load_bytes_per_sector": launch.get("used_bytes", 32.0),
        "dram_read_bytes": dram_bytes * 0.75,
        "dram_write_bytes": dram_bytes * 0.25,
        "dram_bytes_per_s": dram_bytes / time_ns * 1e9,
        "stall_selected": 1.0,
    }
    for part in (*_MEMORY, "tensor", "fma", "lsu"):
        values[f"{part}_pct"] = (compute | memory)[part]
    for name, count in limits.items():
        values[f"limit_{name}_blocks"] = count
    for reason, share in launch["waits"].items():
        values[f"stall_{reason}"] = share * (between - 1)
    return values
