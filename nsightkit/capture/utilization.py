"""Read a GPU's utilization, clock and power from nvidia-smi while it works."""

from __future__ import annotations

import contextlib
import datetime as dt
import shutil
import statistics
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nsightkit.hardware import slowed_by
from nsightkit.trace.programs import said

__all__ = ["METRICS", "ask_smi", "by_metric", "summary", "watching"]

METRICS = ("gpu_utilization_percent", "sm_clock_mhz", "power_w", "slowdown_mask")
_FIELDS = ["timestamp", "utilization.gpu", "clocks.sm", "power.draw"]
#: Names of the mask of reasons for a low clock (:data:`nsightkit.hardware.SLOWDOWNS`); drivers before R535 know only
#: the second.
_MASKS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
_STAMP = "%Y/%m/%d %H:%M:%S.%f"


@contextlib.contextmanager
def watching(device: str, period_s: float = 0.1) -> Iterator[list[dict[str, float]]]:
    """Log the GPU's state while the block runs, in a separate process.

    This process does nothing until the block ends, so that a measurement in the block is not disturbed.

    Parameters
    ----------
    device : str
        ``"cpu"``, which has no readings, or a CUDA device.
    period_s : float

    Yields
    ------
    list of dict
        Filled when the block ends: one dict per reading, with ``time_s``, the time since the block began, and the
        :data:`METRICS` that the GPU has. Empty if nvidia-smi gives no answer.
    """
    readings: list[dict[str, float]] = []
    command: list[str] = []
    for mask in _MASKS:
        if device != "cpu" and not command and ask_smi(device, [*_FIELDS, mask]):
            command = _query(device, [*_FIELDS, mask])
    if not command:
        yield readings
        return
    if shutil.which("stdbuf"):  # a program may buffer a minute of lines for a pipe
        command = ["stdbuf", "--output=L", *command]
    process = subprocess.Popen(
        [*command, f"--loop-ms={round(period_s * 1e3)}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    begin = dt.datetime.now()  # local time, as nvidia-smi writes it
    try:
        yield readings
    finally:
        duration_s = (dt.datetime.now() - begin).total_seconds()
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            for line in process.communicate(timeout=10)[0].split("\n")[:-1]:  # the last may be cut off
                reading = _read(line, begin)
                if 0 <= reading.get("time_s", -1) <= duration_s:
                    readings.append(reading)


def _read(line: str, begin: dt.datetime) -> dict[str, float]:
    """Read a line of nvidia-smi's output; unsupported values are in brackets, other lines give no time."""
    stamp, *answers = line.split(", ")
    reading = {}
    with contextlib.suppress(ValueError):
        reading["time_s"] = (dt.datetime.strptime(stamp, _STAMP) - begin).total_seconds()
    for metric, text in zip(METRICS, answers, strict=False):
        with contextlib.suppress(ValueError):
            reading[metric] = float(int(text, 16)) if metric == "slowdown_mask" else float(text)
    return reading


def ask_smi(device: str, fields: Sequence[str]) -> list[str]:
    """Ask nvidia-smi about one GPU.

    Parameters
    ----------
    device : str
        A CUDA device.
    fields : sequence of str
        As nvidia-smi calls them.

    Returns
    -------
    list of str
        One value for each field, without its unit; empty if nvidia-smi does not answer.
    """
    values = said(*_query(device, fields)).partition("\n")[0].split(", ")
    return values if len(values) == len(fields) else []


def _query(device: str, fields: Sequence[str]) -> list[str]:
    import torch

    # nvidia-smi counts all GPUs, torch those it may use: the UUID is the same for both.
    uuid = torch.cuda.get_device_properties(torch.device(device)).uuid
    return ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]


def by_metric(readings: Iterable[Mapping[str, float]], settle_s: float = 0.0) -> dict[str, list[float]]:
    """Turn readings into one list per metric.

    Parameters
    ----------
    readings : iterable of mapping
        From :func:`watching`.
    settle_s : float
        Seconds to leave out at the start: NVML averages utilization over up to a second.

    Returns
    -------
    dict of str to list
        ``time_s``, and the metrics that the GPU has. Empty without readings.
    """
    lists: dict[str, list[float]] = {}
    for reading in readings:
        if reading["time_s"] >= settle_s:
            for metric, value in reading.items():
                lists.setdefault(metric, []).append(value)
    return lists


def summary(lists: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Sum up a GPU's state.

    Parameters
    ----------
    lists : mapping
        From :func:`by_metric`.

    Returns
    -------
    dict
        Medians of ``gpu_utilization_percent``, ``sm_clock_mhz`` and ``power_w``, and ``slowed_by``, what held the clock
        down in at least half of the readings. Values that were not read are None.
    """
    answer: dict[str, Any] = {"slowed_by": slowed_by(lists.get("slowdown_mask", ()))}
    for metric in ("gpu_utilization_percent", "sm_clock_mhz", "power_w"):
        answer[metric] = round(statistics.median(lists[metric])) if metric in lists else None
    return answer
