"""The measuring function: what is done to a workload, in the child process, to measure one part.

A recording is valid for exactly this code (:mod:`nsightkit.investigations.keys`): what does not decide the
figures, such as provenance, is elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nsightkit.capture import timing, torch_profiler, utilization

__all__ = ["measure"]


def measure(
    workload: Any,
    device: str,
    parameters: Mapping[str, Any],
    counts: Mapping[str, int],
    *,
    watch_utilization: bool,
    trace: Path,
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Run one part: time it unwatched, then profile a few steady steps.

    A profiler makes the CPU slower by some 10 to 30 %, so times of steps never come from the profiled run.

    Parameters
    ----------
    workload : callable
        ``start`` of a module in :mod:`nsightkit.workloads`.
    device : str
    parameters : mapping
        Of the workload.
    counts : mapping
        ``warmup``, ``repetitions``, ``active``.
    watch_utilization : bool
        Also run for four seconds while reading utilisation, clock and power from NVML; not on a CPU.
    trace : Path
        Where the profile is written.

    Returns
    -------
    samples : dict of str to list
        Raw samples by metric; the metric's name holds its unit.
    resolved : dict
        All sizes and switches of the workload, its defaults included.
    """
    samples: dict[str, list[float]] = {}
    with workload(device, **parameters) as work:
        steps = timing.time_calls(work.step, warmup=counts["warmup"], repetitions=counts["repetitions"], device=device)
        samples["step_ns"] = [int(sample) for sample in steps.samples_ns]
        if work.data_wait_ns:
            samples["data_wait_ns"] = list(work.data_wait_ns[-counts["repetitions"] :])
        if watch_utilization and device.startswith("cuda"):
            samples |= utilization.sample(work.step, 4.0)
        torch_profiler.profile_steps(work.step, trace, wait=1, warmup=2, active=counts["active"])
        samples["loss"] = work.losses()
        resolved = dict(work.parameters)
    return samples, resolved
