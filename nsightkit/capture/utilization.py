"""Sample what NVML says of a GPU at work: the utilisation that ``nvidia-smi`` shows, its clock and its power."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from nsightkit.hardware import SLOWDOWNS
from nsightkit.trace.programs import said

__all__ = ["ask_smi", "logged", "now", "sample"]

#: Metrics, and what nvidia-smi calls them. The last is a mask of why the clock is lower than it could be
#: (:data:`nsightkit.hardware.SLOWDOWNS`); drivers before R535 have its other name alone, and refuse the new one.
_FIELDS = {
    "gpu_utilization_percent": "utilization.gpu",
    "sm_clock_mhz": "clocks.sm",
    "power_w": "power.draw",
    "slowdown_mask": "clocks_event_reasons.active",
}
_OLDER = {**_FIELDS, "slowdown_mask": "clocks_throttle_reasons.active"}
_PLAIN = "csv,noheader,nounits"
#: The bit of the mask that says that there was nothing to do.
_IDLE = next(bit for bit, why in SLOWDOWNS.items() if why == "idle")


def sample(function: Callable[[], object], duration_s: float, period_s: float = 0.1) -> dict[str, list[float]]:
    """Call a function again and again, and read the current GPU's state meanwhile.

    Parameters
    ----------
    function : callable
    duration_s : float
        NVML averages utilisation over up to a second, so less than three seconds show little.
    period_s : float

    Returns
    -------
    dict of str to list
        By metric, without the first second: ``gpu_utilization_percent``, ``sm_clock_mhz``, ``power_w``,
        ``slowdown_mask``. What nothing here can read is not there.
    """
    import torch

    with _readings("cuda", period_s) as rows:
        end = time.perf_counter() + duration_s
        while time.perf_counter() < end:
            for _ in range(10):
                function()
            torch.cuda.synchronize()  # or the CPU would queue minutes of work in these seconds
    later = rows[round(1 / period_s) :]
    values = {metric: [row[metric] for row in later if metric in row] for metric in _FIELDS}
    return {metric: found for metric, found in values.items() if found}


@contextlib.contextmanager
def logged(device: str, period_s: float = 0.5) -> Iterator[dict[str, Any]]:
    """Have the current GPU's state written down while the block runs, and sum it up.

    Parameters
    ----------
    device : str
        ``"cpu"``, of which there is nothing to say, or a CUDA device.
    period_s : float

    Yields
    ------
    dict
        When the block has ended: ``readings``, all there were; ``under_load``, those at which the GPU had something to
        do; and of these ``sm_clock_mhz`` and ``power_w``, each with ``median``, ``min`` and ``max``, and
        ``slowed_by``, the share of them by each reason for a lower clock. Empty where nvidia-smi gives nothing.
    """
    found: dict[str, Any] = {}
    with _readings(device, period_s) as rows:
        yield found
    loaded = [row for row in rows if row and not int(row.get("slowdown_mask", 0)) & _IDLE]
    if loaded:
        found |= {"readings": len(rows), "under_load": len(loaded)}
    for metric in ("sm_clock_mhz", "power_w"):
        values = [row[metric] for row in loaded if metric in row]
        if values:
            found[metric] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    masks = [int(row["slowdown_mask"]) for row in loaded if "slowdown_mask" in row]
    if masks:
        shares = {why: sum(bool(mask & bit) for mask in masks) / len(masks) for bit, why in SLOWDOWNS.items()}
        found["slowed_by"] = {why: round(share, 3) for why, share in shares.items() if share}


@contextlib.contextmanager
def _readings(device: str, period_s: float) -> Iterator[list[dict[str, float]]]:
    """Have the current GPU's state written down while the block runs, by a process beside this one.

    Nothing of it happens in this process until the block ends, so that what is timed there is not disturbed. The other
    process ends with the block, or with the pipe that it writes to. The list is filled when the block has ended.
    """
    rows: list[dict[str, float]] = []
    fields = _fields(device) if device != "cpu" else None
    if fields is None:
        yield rows
        return
    command = [*_query(device, fields.values(), _PLAIN), f"--loop-ms={round(period_s * 1e3)}"]
    if shutil.which("stdbuf"):  # a program that writes into a pipe may keep a minute of such lines to itself
        command = ["stdbuf", "--output=L", *command]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield rows
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired, UnicodeDecodeError):
            lines = process.communicate(timeout=10)[0].splitlines()
            rows += [_values(line.split(", ")) for line in lines if line.count(",") == len(_FIELDS) - 1]


def now(device: str) -> dict[str, float]:
    """Read a GPU's state.

    Parameters
    ----------
    device : str
        A CUDA device.

    Returns
    -------
    dict of str to float
        By metric; what nvidia-smi does not give is not there.
    """
    fields = _fields(device)
    return _values(ask_smi(device, fields.values(), _PLAIN)) if fields else {}


def _fields(device: str) -> Mapping[str, str] | None:
    """Find the names by which nvidia-smi knows the metrics; None where it gives no answer."""
    return next((fields for fields in (_FIELDS, _OLDER) if _values(ask_smi(device, fields.values(), _PLAIN))), None)


def ask_smi(device: str, fields: Iterable[str], form: str) -> list[str]:
    """Ask nvidia-smi about one GPU.

    Parameters
    ----------
    device : str
        A CUDA device.
    fields : iterable of str
        As nvidia-smi calls them.
    form : str
        ``csv,noheader``, or with ``,nounits``.

    Returns
    -------
    list of str
        One value for each field; empty if nvidia-smi does not answer.
    """
    values = [value.strip() for value in said(*_query(device, fields, form)).partition("\n")[0].split(",")]
    return values if len(values) == len(list(fields)) else []


def _query(device: str, fields: Iterable[str], form: str) -> list[str]:
    import torch

    # nvidia-smi counts all GPUs, torch those it may use: the UUID is the same for both.
    properties = torch.cuda.get_device_properties(torch.device(device))
    uuid = str(getattr(properties, "uuid", "")).removeprefix("GPU-")
    which = [f"--id=GPU-{uuid}"] if uuid else []
    return ["nvidia-smi", *which, f"--query-gpu={','.join(fields)}", f"--format={form}"]


def _values(answers: Sequence[str]) -> dict[str, float]:
    found = {}
    for metric, text in zip(_FIELDS, answers, strict=False):
        with contextlib.suppress(ValueError):  # what a GPU does not support stands in brackets
            found[metric] = float(int(text, 16) if "0x" in text else float(text))
    return found
