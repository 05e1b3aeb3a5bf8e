"""What a GPU can do at the clock it had, and why the clock was no higher (page 15)."""

from __future__ import annotations

from collections.abc import Iterable

from nsightkit.hardware import Gpu

#: Why a GPU's clock is below what it could be: bits of the mask that NVML (``nvmlClocksEventReason…``) and nvidia-smi
#: report. The first means nothing to do, the second that a person set the clock.
SLOWDOWNS = {
    0x1: "idle",
    0x2: "clock set by an application",
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x10: "in step with other GPUs",
    0x20: "heat",
    0x40: "heat, by hardware",
    0x80: "external power brake",
    0x100: "clock set for a display",
}


def slowed_by(masks: Iterable[float]) -> str | None:
    """Summarize why a GPU's clock was held down.

    Parameters
    ----------
    masks : iterable of float
        Readings of the mask.

    Returns
    -------
    str or None
        Reasons present in at least half of the readings, ``nothing`` if no reason is, None without readings.
    """
    read = [int(mask) for mask in masks]
    if not read:
        return None
    often = [why for bit, why in SLOWDOWNS.items() if 2 * sum(bool(mask & bit) for mask in read) >= len(read)]
    return ", ".join(often) or "nothing"


def at_clock(gpu: Gpu, unit: str, clock_mhz: float) -> float | None:
    """Compute the rate of a unit at a clock: multiprocessors x FLOPs per clock x clock.

    Parameters
    ----------
    gpu : Gpu
    unit : str
        As :meth:`nsightkit.hardware.Gpu.peak` takes it.
    clock_mhz : float
        The SM clock that was measured.

    Returns
    -------
    float or None
        TFLOP/s. None where the rate per clock is unknown.
    """
    peak = gpu.peak(unit)
    if peak is None or peak.flops_per_clock is None:
        return None
    return gpu.multiprocessors * peak.flops_per_clock * clock_mhz / 1e6
