"""Sample what NVML says of a GPU at work: the utilisation that ``nvidia-smi`` shows, its clock and its power."""

from __future__ import annotations

import contextlib
import functools
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from nsightkit.hardware import SLOWDOWNS

__all__ = ["ask_smi", "logged", "reader", "sample"]

#: Metrics, and what nvidia-smi calls them. The last is a mask of why the clock is lower than it could be
#: (:data:`nsightkit.hardware.SLOWDOWNS`); drivers before R535 have its other name alone, and refuse the new one.
_FIELDS = {
    "gpu_utilization_percent": "utilization.gpu",
    "sm_clock_mhz": "clocks.sm",
    "power_w": "power.draw",
    "slowdown_mask": "clocks_event_reasons.active",
}
_OLDER = {"clocks_event_reasons.active": "clocks_throttle_reasons.active"}
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

    read = reader(torch.cuda)
    found: dict[str, list[float]] = {}
    done = threading.Event()

    def watch() -> None:
        while not done.wait(period_s):
            values = read()
            if time.perf_counter() > start + 1:
                for metric, value in values.items():
                    found.setdefault(metric, []).append(value)

    start = time.perf_counter()
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        while time.perf_counter() < start + duration_s:
            for _ in range(10):
                function()
            torch.cuda.synchronize()  # or the CPU would queue minutes of work in these seconds
    finally:
        done.set()
        watcher.join(timeout=10)
    return found


def ask_smi(properties: Any, fields: Sequence[str], form: str) -> list[str]:
    """Ask nvidia-smi about one GPU.

    Parameters
    ----------
    properties : object
        Of the GPU, as torch gives them.
    fields : sequence of str
        As nvidia-smi calls them.
    form : str
        ``csv,noheader``, or with ``,nounits``.

    Returns
    -------
    list of str
        One value a field; empty where there is no answer.
    """
    command = _query(properties, fields, form)
    with contextlib.suppress(OSError, subprocess.SubprocessError, UnicodeDecodeError, IndexError):
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        values = [value.strip() for value in said.splitlines()[0].split(",")]
        return values if len(values) == len(fields) else []
    return []


def _query(properties: Any, fields: Iterable[str], form: str) -> list[str]:
    # nvidia-smi counts all GPUs, torch those it may use: the UUID is the same for both.
    uuid = str(getattr(properties, "uuid", "")).removeprefix("GPU-")
    which = [f"--id=GPU-{uuid}"] if uuid else []
    return ["nvidia-smi", *which, f"--query-gpu={','.join(fields)}", f"--format={form}"]


def _values(said: Sequence[str]) -> dict[str, float]:
    found = {}
    for metric, text in zip(_FIELDS, said, strict=False):
        with contextlib.suppress(ValueError):  # what a GPU does not support stands in brackets
            found[metric] = float(int(text, 16) if "0x" in text else float(text))
    return found


@contextlib.contextmanager
def logged(device: str, period_s: float = 0.5) -> Iterator[dict[str, Any]]:
    """Have the current GPU's state written down while the block runs, by a process beside this one.

    Nothing of it happens in this process until the block ends, so that what is timed there is not disturbed. The other
    process ends with the block, or with the pipe that it writes to.

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
    with contextlib.ExitStack() as running:
        if device.startswith("cuda"):
            import torch

            properties = torch.cuda.get_device_properties(torch.device(device))
            command = [*_query(properties, _FIELDS.values(), _PLAIN), f"--loop-ms={round(period_s * 1e3)}"]
            if shutil.which("stdbuf"):  # a program that writes into a pipe may keep a minute of such lines to itself
                command = ["stdbuf", "--output=L", *command]
            with contextlib.suppress(OSError):  # nvidia-smi is not installed
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
                running.callback(_end, process, found)
        yield found


def _end(process: subprocess.Popen[str], found: dict[str, Any]) -> None:
    """End the log, and sum it up."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired, UnicodeDecodeError):
        said, _ = process.communicate(timeout=10)
        rows = [_values(line.split(", ")) for line in said.splitlines() if line.count(",") == len(_FIELDS) - 1]
        loaded = [row for row in rows if row and not int(row.get("slowdown_mask", 0)) & _IDLE]
        if loaded:
            found |= {"readings": len(rows), "under_load": len(loaded)}
        for metric in ("sm_clock_mhz", "power_w"):
            values = [row[metric] for row in loaded if metric in row]
            if values:
                found[metric] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
        masks = [int(row["slowdown_mask"]) for row in loaded if "slowdown_mask" in row]
        shares = {why: sum(bool(mask & bit) for mask in masks) / len(masks) for bit, why in SLOWDOWNS.items() if masks}
        if masks:
            found["slowed_by"] = {why: round(share, 3) for why, share in shares.items() if share}


def reader(cuda: Any) -> Callable[[], dict[str, float]]:
    """Find out how the current GPU's state can be read here.

    Parameters
    ----------
    cuda : module
        ``torch.cuda``.

    Returns
    -------
    callable
        Gives the values by metric; what cannot be read is not there.
    """
    properties = cuda.get_device_properties(cuda.current_device())

    def from_smi(names: Sequence[str]) -> dict[str, float]:
        return _values(ask_smi(properties, names, _PLAIN))

    newer = list(_FIELDS.values())
    # nvidia-smi knows more; where it is not to be had, what torch can read through pynvml must do.
    for names in (newer, [_OLDER.get(name, name) for name in newer]):
        if from_smi(names):
            return functools.partial(from_smi, names)
    return functools.partial(_from_nvml, cuda)


def _from_nvml(cuda: Any) -> dict[str, float]:
    asked = {
        "gpu_utilization_percent": cuda.utilization,
        "sm_clock_mhz": cuda.clock_rate,
        "power_w": lambda: cuda.power_draw() / 1e3,
    }
    found = {}
    for metric, ask in asked.items():
        with contextlib.suppress(Exception):  # needs pynvml, and a driver that answers this
            found[metric] = float(ask())
    return found
