"""Time the CPU spent in CUDA API calls, or in calls of the operating system."""

from __future__ import annotations

import pandas as pd

from nsightkit.analysis.core.grouped import durations_by_name
from nsightkit.trace.model import Trace


def summary(trace: Trace, os: bool = False) -> pd.DataFrame:
    """Sum calls by name.

    A long call is not by itself a problem: a synchronisation lasts as long as the GPU has work, and
    an idle thread waits in ``poll`` forever. :mod:`nsightkit.analysis.timeline.gaps` explains why the GPU waited.

    Parameters
    ----------
    trace : Trace
    os : bool
        The operating system's calls instead of the CUDA API's.

    Returns
    -------
    DataFrame
        ``name, count, total_ns, mean_ns, median_ns, min_ns, max_ns, std_ns``, the longest total first. Runtime
        calls and the driver calls they make are both listed, so totals can overlap.
    """
    return durations_by_name(trace.table("os_calls" if os else "calls", ["name", "duration_ns"]))
