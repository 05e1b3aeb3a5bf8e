"""Read a GPU's utilization, clock and power from nvidia-smi while it works."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Collection, Iterator

from nsightkit.trace.programs import output_of

#: nvidia-smi's fields, by the metrics that they give.
_SMI_FIELDS = {
    "gpu_utilization_percent": "utilization.gpu",
    "sm_clock_mhz": "clocks.sm",
    "power_w": "power.draw",
    "slowdown_mask": "clocks_event_reasons.active",
}


@contextlib.contextmanager
def watching(device: str, period_s: float = 0.1) -> Iterator[dict[str, list[float]]]:
    """Log the GPU's state while the block runs, in a separate process.

    This process does nothing until the block ends, so that a measurement in the block is not disturbed. Until then the
    readings are in a pipe, which holds those of some two minutes: later ones are lost.

    Parameters
    ----------
    device : str
        ``"cpu"``, which has no readings, or a CUDA device.
    period_s : float

    Yields
    ------
    dict of str to list
        Filled when the block ends, in the order of time: of the metrics ``gpu_utilization_percent, sm_clock_mhz,
        power_w, slowdown_mask`` (NVML's ``nvmlClocksEventReason…``) those that the GPU has. Empty if nvidia-smi gives
        no answer.
    """
    readings: dict[str, list[float]] = {}
    if device == "cpu" or not ask_smi(device, _SMI_FIELDS.values()):
        yield readings
        return
    command = _smi_command(device, _SMI_FIELDS.values())
    command.append(f"--loop-ms={round(period_s * 1e3)}")
    if shutil.which("stdbuf"):  # a program may buffer a minute of lines for a pipe
        command = ["stdbuf", "--output=L", *command]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield readings
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            readings |= _parse_readings(process.communicate(timeout=10)[0])


def _parse_readings(text: str) -> dict[str, list[float]]:
    """List each metric's readings in nvidia-smi's output, without those in brackets, which the GPU does not have."""
    readings: dict[str, list[float]] = {}
    whole_lines = text.rpartition("\n")[0]  # the last may be cut off
    for line in whole_lines.splitlines():
        for metric, value in zip(_SMI_FIELDS, line.split(", "), strict=True):
            if not value.startswith("["):  # such as [N/A]
                reading = int(value, 16) if metric == "slowdown_mask" else float(value)
                readings.setdefault(metric, []).append(reading)
    return readings


def ask_smi(device: str, fields: Collection[str]) -> list[str]:
    """Ask nvidia-smi about one GPU.

    Parameters
    ----------
    device : str
        A CUDA device.
    fields : collection of str
        As nvidia-smi calls them; at least two, as no answer is one empty text.

    Returns
    -------
    list of str
        One value for each field, without its unit; empty if nvidia-smi does not answer.
    """
    values = output_of(*_smi_command(device, fields)).partition("\n")[0].split(", ")
    if len(values) == len(fields):
        return values
    return []


def _smi_command(device: str, fields: Collection[str]) -> list[str]:
    """Make the command that asks nvidia-smi for fields of one GPU."""
    import torch

    # nvidia-smi counts all GPUs, torch those it may use: the UUID is the same for both.
    uuid = torch.cuda.get_device_properties(torch.device(device)).uuid
    return ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
