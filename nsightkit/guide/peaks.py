"""The ceilings of this machine's GPU: what a large GEMM of each precision and a large copy reach on it."""

from __future__ import annotations

import datetime as dt
import statistics
from collections.abc import Callable
from typing import Any

from nsightkit.capture import timing, utilization
from nsightkit.errors import NsightkitError

__all__ = ["measure"]

_PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8")
#: Seconds of each timed run: the clock settles under load only after a while.
_LONG_S = 2.0


def measure(
    *, device: str = "cuda", size: int = 8192, megabytes: int = 4096, echo: Callable[[str], None] | None = None
) -> list[dict[str, Any]]:
    """Measure one big GEMM for each precision, and one big copy.

    Parameters
    ----------
    device : {"cuda", "cpu"}
    size : int
        Rows and columns of the matrices.
    megabytes : int
        Of the tensor that is copied.
    echo : callable, optional
        Takes lines of progress.

    Returns
    -------
    list of dict
        The columns of :func:`nsightkit.hardware.rows`; ``source`` begins with "measured", ``clock_mhz`` is the median
        SM clock meanwhile. Precisions that the GPU does not have are left out.

    Raises
    ------
    NsightkitError
        There is no GPU.
    """
    import torch

    from nsightkit.workloads import ceilings

    if device == "cuda" and not torch.cuda.is_available():
        raise NsightkitError("--measure needs a CUDA GPU, and torch sees none here; run 'nsightkit doctor'")
    rows = []
    for precision in _PRECISIONS:
        if echo is not None:
            echo(f"measuring a GEMM in {precision} ...")
        try:
            with ceilings.gemm(device, m=size, n=size, k=size, precision=precision) as work:
                time_ns, clock_mhz = _time(work.step, device)
        except RuntimeError as error:  # the card has no such unit
            if echo is not None:
                echo(f"{precision}: {str(error).splitlines()[0]}")
            continue
        rows.append(_row(device, precision, f"GEMM of {size} cubed", clock_mhz))
        rows[-1] |= {"accumulate": "fp32", "tflops": 2 * size**3 / time_ns / 1e3}
    if echo is not None:
        echo("measuring a copy ...")
    with ceilings.copy(device, megabytes=megabytes, kind="copy") as work:
        time_ns, clock_mhz = _time(work.step, device)
    rows.append(_row(device, "memory", f"copy of {megabytes:,} MB", clock_mhz))
    rows[-1]["gb_per_s"] = 2 * megabytes * 1e6 / time_ns  # read and written
    return rows


def _time(step: Callable[[], object], device: str) -> tuple[float, float | None]:
    """Median time of a call after a while under load, and the clock meanwhile."""
    first = timing.time_calls(step, warmup=3, repetitions=5, device=device)
    calls = max(10, round(_LONG_S * 1e9 / float(statistics.median(first.tolist()))))
    if device == "cpu":
        calls = 10
    with utilization.logged(device) as load:
        times = timing.time_calls(step, warmup=calls, repetitions=calls, device=device)
    clock = load.get("sm_clock_mhz")
    return float(statistics.median(times.tolist())), clock["median"] if clock else None


def _row(device: str, unit: str, what: str, clock_mhz: float | None) -> dict[str, Any]:
    import torch

    return {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "unit": unit,
        "accumulate": None,
        "tflops": None,
        "gb_per_s": None,
        "clock_mhz": clock_mhz,
        "source": f"measured {dt.datetime.now(dt.UTC):%Y-%m-%d}: {what}",
    }
