"""Read a report with NVIDIA's package; :mod:`nsightkit.trace.ncu` runs this file as a process.

NVIDIA's reader aborts on some damaged reports. If it does, only this process ends. Nothing else of nsightkit is
imported, so that it starts fast.
"""

from __future__ import annotations

import math
import sys
from typing import Any


def _launch_metrics(action: Any) -> list[tuple[str, Any, str]]:
    """Return name, value and unit of each metric of a launch (ncu's "action") that has a value."""
    metrics: list[tuple[str, Any, str]] = []
    for name in action.metric_names():
        metric = action.metric_by_name(name)
        value = None
        if metric and metric.has_value():
            value = metric.value()
        if isinstance(value, str):
            metrics.append((metric.name(), value, ""))
        elif isinstance(value, (int, float)) and math.isfinite(value):
            metrics.append((metric.name(), value, metric.unit()))
    return metrics


def _ranges_around_launch(action: Any) -> list[tuple[str, str]]:
    """Return domain and name of the push/pop ranges around a launch, the outermost first."""
    state = action.nvtx_state()
    if state is None:
        return []
    domains = [state.domain_by_id(number) for number in state.domains()]
    return [(domain.name(), name) for domain in domains for name in domain.push_pop_ranges()]


def read_for_parent(folder: str, report: str) -> dict[str, Any]:
    """Return kernel, ranges and metrics of each launch in a report; `folder` holds NVIDIA's package.

    :func:`nsightkit.trace.limited.ask_limited` calls this in a child process, which starts without site-packages.
    """
    sys.path.append(folder)
    import ncu_report

    launches = []
    for profiled_range in ncu_report.load_report(report):  # not a range of NVTX
        for action in profiled_range:
            # By default it gives the bare name, without template arguments: many kernels of PyTorch share theirs.
            kernel = action.name(action.NameBase_DEMANGLED) or action.name()
            launches.append(
                {"kernel": kernel, "ranges": _ranges_around_launch(action), "metrics": _launch_metrics(action)}
            )
    return {"launches": launches}
