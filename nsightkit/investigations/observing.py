"""The measuring function of parts that are looked at rather than timed: their samples are what the workload saw.

A recording of such a part is valid for exactly this code, as one of any other part is for
``nsightkit.investigations.measuring``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nsightkit.capture import timing, torch_profiler, utilization

__all__ = ["observe"]


def observe(
    workload: Any,
    device: str,
    parameters: Mapping[str, Any],
    counts: Mapping[str, int],
    *,
    watch_utilization: bool = False,
    trace: Path,
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Run one part: time and profile a few steps, then ask the workload what it observed.

    Parameters
    ----------
    workload : callable
        ``start`` of a module in :mod:`nsightkit.workloads`; what it gives has ``observed()``, too.
    device : str
    parameters : mapping
        Of the workload.
    counts : mapping
        ``warmup``, ``repetitions``, ``active``, and ``shapes``: whether the profile keeps what operators are given.
    watch_utilization : bool
        Also run for some seconds while reading utilisation, clock and power from NVML; not on a CPU.
    trace : Path
        Where the profile is written.

    Returns
    -------
    samples : dict of str to list
        Raw samples by metric.
    resolved : dict
        All sizes and switches of the workload, its defaults included.
    """
    with workload(device, **parameters) as work:
        steps = timing.time_calls(work.step, warmup=counts["warmup"], repetitions=counts["repetitions"], device=device)
        state = utilization.sample(work.step, 2.5) if watch_utilization and device.startswith("cuda") else {}
        shapes = bool(counts["shapes"])
        torch_profiler.profile_steps(work.step, trace, wait=1, warmup=1, active=counts["active"], shapes=shapes)
        # Last: hooks would be in the way of the profile, and of the clock.
        samples = {"step_ns": [int(sample) for sample in steps.samples_ns], **state, **work.observed()}
        resolved = dict(work.parameters)
    return samples, resolved
