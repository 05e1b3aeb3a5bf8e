"""Rows of a benchmark, beside what they must take at least (page 08)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from _lib import climb
from nsightkit.analysis.core import noise
from nsightkit.analysis.roofline.envelope import envelope
from nsightkit.configurations import Configuration

if TYPE_CHECKING:
    from nsightkit.guide import Measurement

_SIZES = ("batch", "context", "d_model", "layers", "d_ff", "heads", "vocabulary")
#: AdamW reads a weight, its gradient and two moments, and writes all but the gradient, in fp32.
_OPTIMIZER_BYTES = 7 * 4


def _cost(cell: Mapping[str, Any]) -> tuple[float, float]:
    """Give the FLOPs of a step, and the bytes that its optimizer moves."""
    model = envelope(Configuration(name="cell", intent="", **{name: cell[name] for name in _SIZES}))
    flops = model.fwd_flops if cell["mode"] == "fwd" else model.train_flops
    return flops, _OPTIMIZER_BYTES * model.params if cell["mode"] == "train" else 0.0


def interval(samples: ArrayLike) -> tuple[float, float]:
    """Estimate between which values a median lies at 95%, by order statistics; infinite with too few samples.

    From the k-th smallest to the k-th largest sample, with k from the binomial distribution (Conover, Practical
    Nonparametric Statistics, 3rd ed., section 3.2), by the normal approximation with the continuity correction.
    """
    values = np.sort(np.asarray(samples, np.float64))
    k = math.floor((len(values) + 1 - 1.96 * math.sqrt(len(values))) / 2)
    if k < 1:
        return -math.inf, math.inf
    return float(values[k - 1]), float(values[-k])


def table(runs: Mapping[str, Measurement]) -> pd.DataFrame:
    """Make one row per run.

    Parameters
    ----------
    runs : mapping of str to Measurement
        One of them is ``forward only``.

    Returns
    -------
    DataFrame
        The columns of the page's table.
    """
    forward = runs["forward only"]
    forward_flops, _ = _cost(forward.parameters)
    rows = []
    for name, run in runs.items():
        cell, median_ns = run.parameters, run.median("step_ns")
        flops, moved = _cost(cell)
        gpu = climb.gpu_of(run)
        peak = None if gpu is None else gpu.peak(cell["precision"])
        low, high = interval(run.values("step_ns"))
        peak_bytes = run.median("peak_bytes")
        row = {"row": name, "median (ms)": median_ns / 1e6}
        row["from (ms)"] = low / 1e6
        row["to (ms)"] = high / 1e6
        row["floor (ms)"] = None if peak is None else flops / peak.tflops / 1e9 + moved / gpu.gb_per_s / 1e6
        row["tokens/s"] = cell["batch"] * cell["context"] / median_ns * 1e9
        row["peak (GB)"] = None if peak_bytes is None else peak_bytes / 1e9
        row["MFU"] = None if peak is None else flops / median_ns / peak.tflops / 1e3
        row["time (forward passes)"] = median_ns / forward.median("step_ns")
        row["FLOPs (forward passes)"] = flops / forward_flops
        rows.append(row)
    return pd.DataFrame(rows)


def answer(before: Measurement, runs: Mapping[str, Measurement]) -> str:
    """Say how much the first step distorts, and how many forward passes a backward pass adds.

    Parameters
    ----------
    before : Measurement
        Steps from the very first one on.
    runs : mapping of str to Measurement
    """
    steps = before.values("step_ns")
    others = np.median(steps[1:])
    forward, backward = (runs[name].values("step_ns") for name in ("forward only", "forward and backward"))
    ratio = noise.ratio(forward, backward)
    interval = "too few steps for an interval"
    if np.isfinite(ratio.high):
        interval = f"{ratio.low:.2f} to {ratio.high:.2f}"
    return (
        f"The first step took {steps[0] / others:.1f}x the median of the others, and the mean of all steps is "
        f"{steps.mean() / others:.2f}x that median. Forward and backward took {ratio.value:.2f} forward passes "
        f"({interval}); expected were 2.6 to 2.9."
    )
