"""Peak rates of GPUs, each with its source (``hardware.toml``).

All rates are dense: structured sparsity doubles them and helps no dense work. ``fp16`` and ``bf16`` are tensor cores
that accumulate in fp32, as PyTorch does; on GeForce cards the often quoted rate with fp16 accumulation is twice that.
Peaks assume the boost clock; at another clock a unit does multiprocessors x FLOPs per clock x clock.

The peak tables of libraries are not used: torch lists sparse rates and those of other cards, Triton half of Hopper's.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from nsightkit.errors import UsageError


class Peak(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The highest rate of one kind of arithmetic.

    Parameters
    ----------
    unit : {"fp32", "tf32", "fp16", "bf16", "fp8", "fp4"}
        ``fp32`` runs on the ordinary cores, the others on tensor cores.
    tflops : float
        TFLOP/s, counting a multiply-add as 2 FLOPs.
    flops_per_clock : int or None
        FLOPs per clock and SM; None where the rate is only quoted.
    clock_mhz : int or None
        Clock the rate is quoted at.
    accumulate : {"fp32", "fp16"}
        Precision of the sums.
    source : str
        Empty where the `source` of the GPU holds.
    """

    unit: str
    tflops: float
    flops_per_clock: int | None = None
    clock_mhz: int | None = None
    accumulate: str = "fp32"
    source: str = ""


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A GPU and its peaks.

    Parameters
    ----------
    name : str
    names : tuple of str
        Regular expressions of what drivers and traces report, in lower case and without the words nvidia, tesla,
        geforce, amd and instinct.
    compute_capability : str
    memory_gb : tuple of int
        The sizes it is sold with, 10**9 bytes.
    l2_mb : float
        The last cache before the memory, 10**6 bytes.
    multiprocessors : int
        AMD calls them compute units.
    gb_per_s : float
        Memory bandwidth, 10**9 bytes/s.
    bandwidth_source : str
    source : str
        Of the rates.
    peaks : tuple of Peak
    """

    name: str
    names: tuple[str, ...]
    compute_capability: str
    memory_gb: tuple[int, ...]
    l2_mb: float
    multiprocessors: int
    gb_per_s: float
    bandwidth_source: str
    source: str
    peaks: tuple[Peak, ...]

    def peak(self, unit: str) -> Peak | None:
        """Look up the peak of a unit that accumulates in fp32.

        Parameters
        ----------
        unit : {"fp32", "tf32", "fp16", "bf16", "fp8", "fp4"}

        Returns
        -------
        Peak or None
            None where the GPU has no such unit.
        """
        for peak in self.peaks:
            if peak.unit == unit and peak.accumulate == "fp32":
                return peak
        return None

    def supports(self, precision: str) -> bool:
        """Check that the GPU has tensor cores for a precision; ``fp32`` runs on the ordinary cores of every GPU."""
        return precision != "fp32" and self.peak(precision) is not None

    def ridge(self, unit: str) -> float | None:
        """Compute the arithmetic intensity above which the unit, rather than the memory, limits an operation.

        Parameters
        ----------
        unit : str

        Returns
        -------
        float or None
            FLOP/B; None where the GPU has no such unit.
        """
        peak = self.peak(unit)
        if peak is None:
            return None
        return 1e3 * peak.tflops / self.gb_per_s  # TFLOP/s / (GB/s) in FLOP/B


class _HardwareFile(msgspec.Struct):
    """The tables of ``hardware.toml``."""

    gpu: tuple[Gpu, ...]


#: The known GPUs, oldest first.
GPUS = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=_HardwareFile).gpu


#: A row of :func:`peak_rows` with None in every column; a row is made by filling in what applies.
EMPTY_ROW = dict.fromkeys(("gpu", "unit", "accumulate", "tflops", "gb_per_s", "clock_mhz", "source"))


def find(name: str) -> Gpu:
    """Look up a GPU by name.

    Parameters
    ----------
    name : str
        As torch, a driver or a trace reports it (``NVIDIA A100-SXM4-80GB``), or as the table does (``H100 SXM5``).
        Boards with different peaks (PCIe, NVL, laptop) do not match each other.

    Returns
    -------
    Gpu

    Raises
    ------
    UsageError
        It is not in the table.
    """
    # "NVIDIA GeForce RTX 4090" -> "rtx 4090"
    short_name = " ".join(re.sub(r"\b(nvidia|tesla|geforce|amd|instinct)\b", "", name.lower()).split())
    for gpu in GPUS:
        if short_name == gpu.name.lower() or any(re.fullmatch(pattern, short_name) for pattern in gpu.names):
            return gpu
    known_names = ", ".join(gpu.name for gpu in GPUS)
    raise UsageError(f"the peaks of {name!r} are not known; give the nearest of {known_names}")


def peak_rows(gpu: Gpu) -> list[dict[str, object]]:
    """List the peaks of a GPU, its memory bandwidth last.

    Parameters
    ----------
    gpu : Gpu

    Returns
    -------
    list of dict
        ``gpu, unit, accumulate, tflops, gb_per_s, clock_mhz, source``; what does not apply is None.
    """
    table: list[dict[str, object]] = []
    for peak in gpu.peaks:
        row = EMPTY_ROW | {"gpu": gpu.name, "unit": peak.unit, "accumulate": peak.accumulate, "tflops": peak.tflops}
        table.append(row | {"clock_mhz": peak.clock_mhz, "source": peak.source or gpu.source})
    memory = {"gpu": gpu.name, "unit": "memory", "gb_per_s": gpu.gb_per_s, "source": gpu.bandwidth_source}
    return [*table, EMPTY_ROW | memory]
