"""Measure this GPU's ceilings: the rates of a large GEMM in each precision and of a large copy.

The operands are random: the data decides how much power a GEMM draws, and the power limit decides the clock. Each
operation runs for seconds: a burst after a pause runs at a clock that no program sustains.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable

import numpy as np
import torch

from nsightkit import hardware
from nsightkit.capture.children import has_gpu
from nsightkit.capture.timing import time_calls
from nsightkit.errors import NsightkitError
from nsightkit.text import Json
from nsightkit.workloads import ceilings

#: What is measured: the units that multiply matrices, by precision, and the memory.
_UNITS = ("fp32", "tf32", "bf16", "fp16", "fp8", "memory")
#: Rows and columns of the GEMM's square matrices: large enough to fill any card.
_SIZE = 8192
#: Size of each tensor of the copy: far more than any cache.
_COPY_BYTES = 4_000_000_000
#: How long an operation runs to warm up, and is timed: until the clock has settled, and for a steady median.
_WARMUP_NS = 2e9
_TIMED_NS = 3e9


def measure_ceilings(echo: Callable[[str], object]) -> list[Json]:
    """Measure GEMMs in every precision and a copy, one after the other.

    Parameters
    ----------
    echo : callable
        Takes lines of progress.

    Returns
    -------
    list of dict
        The columns of :func:`nsightkit.hardware.peak_rows`; ``source`` is "measured", the date and the operation.

    Raises
    ------
    NsightkitError
        There is no GPU, or nothing could be measured on it.
    """
    if not has_gpu():
        raise NsightkitError("--measure needs a CUDA GPU, and torch sees none here; run 'nsightkit doctor'")
    rows = []
    for unit in _UNITS:
        echo(f"measuring {unit} ...")
        try:
            rows.append(_measure_copy() if unit == "memory" else _measure_gemm(unit))
        except RuntimeError as error:  # this card has no such unit
            echo(f"{unit}: {str(error).splitlines()[0]}")
    if not rows:
        raise NsightkitError("nothing could be measured on this GPU; the lines above say why")
    return rows


def _measure_gemm(precision: str) -> Json:
    """Measure a matmul of two random matrices; gives its row of the hardware table."""
    if precision == "tf32" and torch.cuda.get_device_capability() < (8, 0):
        raise RuntimeError("this GPU has no TF32")
    with ceilings.gemm("cuda", _SIZE, _SIZE, _SIZE, precision) as work:
        row, time_ns = _time_for_seconds(work.operation, f"GEMM {_SIZE}x{_SIZE} {_SIZE}x{_SIZE}")
    tflops = 2 * _SIZE**3 / time_ns / 1e3  # FLOPs per ns are GFLOP/s
    return row | {"unit": precision, "accumulate": "fp32", "tflops": tflops}


def _measure_copy() -> Json:
    """Measure a copy of a tensor within the GPU's memory; gives its row of the hardware table."""
    free_bytes, _ = torch.cuda.mem_get_info()
    # Source and target take half of what is free at most.
    megabytes = min(_COPY_BYTES, free_bytes // 4) // 1_000_000
    with ceilings.copy("cuda", megabytes, "copy") as work:
        row, time_ns = _time_for_seconds(work.operation, f"copy of {megabytes:,} MB")
    # Each byte is read once and written once; bytes per ns are GB/s.
    return row | {"unit": "memory", "gb_per_s": 2 * megabytes * 1_000_000 / time_ns}


def _time_for_seconds(operation: Callable[[], object], description: str) -> tuple[Json, float]:
    """Time an operation over and over for a few seconds.

    Gives its row of the hardware table, in which the caller fills in unit and rate, and the median ns of a call.
    """
    call_ns = time_calls(operation, warmup=2, repetitions=1, device="cuda")[0]
    warmup = round(_WARMUP_NS / call_ns)
    repetitions = round(_TIMED_NS / call_ns) + 1
    samples = time_calls(operation, warmup=warmup, repetitions=repetitions, device="cuda")
    source = f"measured {dt.datetime.now(dt.UTC).date()}: {description}, median of {repetitions}"
    row = hardware.EMPTY_ROW | {"gpu": torch.cuda.get_device_name(), "source": source}
    return row, float(np.median(samples))
