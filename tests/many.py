"""Traces of many kernels, as a long run has them."""

from __future__ import annotations

import numpy as np
import pandas as pd

from nsightkit.trace.model import Gpu, Trace, TraceMeta, categorical


def kernels(count: int, *, streams: tuple[int, ...] = (7,)) -> Trace:
    """Kernels one after the other on each of some streams, which overlap each other, and a call that launches each."""
    rng = np.random.default_rng(0)
    names = [f"void at::native::elementwise_kernel<{i}, 4>(int)" if i % 2 else f"gemm_{i}" for i in range(60)]
    parts = []
    for stream in streams:
        duration = rng.lognormal(9, 1.2, count // len(streams)).astype(np.int64) + 800
        start = np.cumsum(duration + rng.exponential(1500, len(duration)).astype(np.int64)) - duration + 20_000
        parts.append(pd.DataFrame({"start_ns": start, "end_ns": start + duration, "stream": stream}))
    work = pd.concat(parts, ignore_index=True).assign(process=7)
    work["name"] = categorical(rng.integers(0, len(names), len(work)), names)
    work["correlation"] = np.arange(len(work)) + 1
    calls = work[["start_ns", "correlation", "process"]].sort_values("start_ns", ignore_index=True)
    calls["start_ns"] = np.maximum.accumulate(calls["start_ns"] - 9_000)
    calls = calls.assign(end_ns=calls["start_ns"] + 2_000, thread=7 << 24 | 7, name="cudaLaunchKernel")
    return Trace.from_frames({"kernels": work, "calls": calls}, TraceMeta(gpus=[Gpu(0, "Synthetic GPU")]))
