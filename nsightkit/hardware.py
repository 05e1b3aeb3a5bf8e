"""What a GPU could do at best: peak rates, each with where it is from.

All rates are dense: figures with structured sparsity are exactly twice as high and mean nothing for dense work.
``fp16`` and ``bf16`` are tensor cores that accumulate in fp32, which is what PyTorch uses; on GeForce cards the
often quoted rate with fp16 accumulation is twice that. Peaks assume the boost clock; what a GPU could have done at
the clock it ran at is :meth:`Gpu.at_clock`.

Peak tables of libraries are not used: torch's lists sparse and other cards' figures, Triton's halves Hopper's.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from nsightkit.errors import UsageError

__all__ = ["GPUS", "SLOWDOWNS", "Gpu", "Peak", "find", "rows", "slowed_by"]

_VENDOR = "vendor's datasheet, dense"
#: The product of SMs, FLOPs a clock and SM, and clock is within 1 % of it.
_CONFIRMED = f"{_VENDOR}; SMs x rate x clock agree"


@dataclasses.dataclass(frozen=True)
class Peak:
    """The highest rate of one kind of arithmetic.

    Parameters
    ----------
    unit : {"fp32", "tf32", "fp16", "bf16", "fp8", "fp4"}
        ``fp32`` is the ordinary cores, the others tensor cores.
    tflops : float
        TFLOP/s, a multiply-add being 2 FLOPs.
    accumulate : {"fp32", "fp16"}
    source : str
    flops_per_clock : int or None
        FLOPs a clock and SM; None where the rate is quoted only.
    clock_mhz : int or None
        Clock the rate is quoted at.
    """

    unit: str
    tflops: float
    accumulate: str
    source: str
    flops_per_clock: int | None
    clock_mhz: int | None


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU and its peaks.

    Parameters
    ----------
    name : str
    names : tuple of str
        Regular expressions of what drivers and traces call it, without the words NVIDIA, Tesla, GeForce, AMD, Instinct.
    compute_capability : str
    memory_gb : tuple of int
        The sizes it is sold with, 10**9 bytes.
    l2_mb : float
        The last cache before the memory, 10**6 bytes: level 2, on AMD's cards the Infinity Cache behind it. The weakest
        entry: prefer what the device itself reports.
    multiprocessors : int
        AMD calls them compute units.
    gb_per_s : float
        Memory bandwidth, 10**9 bytes a second.
    bandwidth_source : str
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
    peaks: tuple[Peak, ...]

    def peak(self, unit: str, accumulate: str = "fp32") -> Peak | None:
        """Give the peak of a unit.

        Parameters
        ----------
        unit : {"fp32", "tf32", "fp16", "bf16", "fp8", "fp4"}
        accumulate : {"fp32", "fp16"}

        Returns
        -------
        Peak or None
            None where the GPU has no such unit.
        """
        return next((p for p in self.peaks if (p.unit, p.accumulate) == (unit, accumulate)), None)

    def supports(self, precision: str) -> bool:
        """Say whether the card has tensor cores for a precision, so that advice names only what it can do.

        Parameters
        ----------
        precision : {"tf32", "fp16", "bf16", "fp8", "fp4"}

        Returns
        -------
        bool
            False for ``fp32``, which runs on the ordinary cores of every card.
        """
        return precision != "fp32" and self.peak(precision) is not None

    def at_clock(self, unit: str, clock_mhz: float, accumulate: str = "fp32") -> float | None:
        """Give the rate of a unit at another clock.

        Parameters
        ----------
        unit, accumulate : str
            As for :meth:`peak`.
        clock_mhz : float
            The SM clock that was measured.

        Returns
        -------
        float or None
            TFLOP/s: multiprocessors times FLOPs per clock times clock. None where the rate per clock is not
            known.
        """
        peak = self.peak(unit, accumulate)
        if peak is None or peak.flops_per_clock is None:
            return None
        return self.multiprocessors * peak.flops_per_clock * clock_mhz / 1e6

    def ridge(self, unit: str) -> float | None:
        """Give the intensity above which the unit, and no longer the memory, is the limit.

        Parameters
        ----------
        unit : str

        Returns
        -------
        float or None
            FLOP/B.
        """
        peak = self.peak(unit)
        return None if peak is None else 1e3 * peak.tflops / self.gb_per_s


def _peaks(
    clock: int,
    fp32: tuple[float, int],
    tensor: tuple[tuple[str, float, int | None], ...],
    *,
    fp32_clock: int | None = None,
    source: str = _CONFIRMED,
    extra: tuple[Peak, ...] = (),
) -> tuple[Peak, ...]:
    """All peaks of a GPU: (TFLOP/s, FLOPs per clock and SM) for fp32, with the unit's name for tensor cores."""
    first = Peak("fp32", fp32[0], "fp32", source, fp32[1], fp32_clock or clock)
    return (
        first,
        *(Peak(unit, tflops, "fp32", source, rate, clock if rate else None) for unit, tflops, rate in tensor),
        *extra,
    )


def _fp16_accumulate(clock: int, *rates: tuple[str, float, int]) -> tuple[Peak, ...]:
    source = f"{_CONFIRMED}; accumulates in fp16, which PyTorch does not do"
    return tuple(Peak(unit, tflops, "fp16", source, rate, clock) for unit, tflops, rate in rates)


# Quoted at two clocks: tensor cores at 1830 MHz, fp32 at 1980 MHz.
_HOPPER = _peaks(
    1830,
    (66.9, 256),
    (("tf32", 494.7, 2048), ("fp16", 989.4, 4096), ("bf16", 989.4, 4096), ("fp8", 1978.9, 8192)),
    fp32_clock=1980,
    source=_CONFIRMED,
)

# The same chip on each board; what differs is the memory, and how long the power limit lets it keep its clock.
_A100 = _peaks(1410, (19.5, 128), (("tf32", 156, 1024), ("fp16", 312, 2048), ("bf16", 312, 2048)))

#: The GPUs that are known, oldest first.
GPUS: tuple[Gpu, ...] = (
    Gpu(
        name="V100 SXM2",
        names=(r"v100", r"v100[- ]sxm2(-(16|32)gb)?"),
        compute_capability="7.0",
        memory_gb=(16, 32),
        l2_mb=6,
        multiprocessors=80,
        gb_per_s=900,
        bandwidth_source=_VENDOR,
        peaks=_peaks(1530, (15.7, 128), (("fp16", 125, 1024),)),
    ),
    Gpu(
        name="V100 DGX Station",
        names=(r"v100[- ]dgxs(-(16|32)gb)?",),
        compute_capability="7.0",
        memory_gb=(16, 32),
        l2_mb=6,
        multiprocessors=80,
        gb_per_s=898,
        bandwidth_source="4096 bits at the 877 MHz that nvidia-smi reports",
        # Its power limit is 250 W, that of the SXM2 board 300 W: it has the same peaks and keeps them less long.
        peaks=_peaks(
            1530,
            (15.7, 128),
            (("fp16", 125, 1024),),
            source="white paper of the DGX Station: 500 TFLOP/s of four; SMs x rate x clock agree",
        ),
    ),
    Gpu(
        name="T4",
        names=(r"t4",),
        compute_capability="7.5",
        memory_gb=(16,),
        l2_mb=4,
        multiprocessors=40,
        gb_per_s=320,
        bandwidth_source=_VENDOR,
        peaks=_peaks(1590, (8.1, 128), (("fp16", 65, 1024),)),
    ),
    Gpu(
        name="RTX 2080 Ti",
        names=(r"(rtx )?2080 ti",),
        compute_capability="7.5",
        memory_gb=(11,),
        l2_mb=5.5,
        multiprocessors=68,
        gb_per_s=616,
        bandwidth_source="white paper of the Turing architecture",
        # Boards of other makers are quoted at 1545 MHz and clock higher: of the two, this one is not too low a limit.
        peaks=_peaks(
            1635,
            (14.2, 128),
            (("fp16", 56.9, 512),),
            source="white paper of the Turing architecture, Founders Edition; SMs x rate x clock agree",
            extra=_fp16_accumulate(1635, ("fp16", 113.8, 1024)),
        ),
    ),
    *(
        Gpu(
            name=f"A100 {memory_gb} GB {board}",
            names=names,
            compute_capability="8.0",
            memory_gb=(memory_gb,),
            l2_mb=40,
            multiprocessors=108,
            gb_per_s=gb_per_s,
            bandwidth_source=_VENDOR,
            peaks=_A100,
        )
        for memory_gb, board, gb_per_s, names in (
            (40, "SXM", 1555, (r"a100[- ]sxm4-40gb",)),
            (40, "PCIe", 1555, (r"a100[- ]pcie-40gb",)),
            (80, "SXM", 2039, (r"a100", r"a100[- ]sxm(4-80gb)?", r"a100 80 gb sxm")),
            (80, "PCIe", 1935, (r"a100[- ]80gb[- ]pcie", r"a100[- ]pcie[- ]80gb")),
        )
    ),
    Gpu(
        name="RTX A6000",
        names=(r"(rtx )?a6000",),
        compute_capability="8.6",
        memory_gb=(48,),
        l2_mb=6,
        multiprocessors=84,
        gb_per_s=768,
        bandwidth_source=_VENDOR,
        peaks=_peaks(1800, (38.7, 256), (("tf32", 77.4, 512), ("fp16", 154.8, 1024), ("bf16", 154.8, 1024))),
    ),
    Gpu(
        name="RTX 4090",
        names=(r"(rtx )?4090",),
        compute_capability="8.9",
        memory_gb=(24,),
        l2_mb=72,
        multiprocessors=128,
        gb_per_s=1008,
        bandwidth_source=_VENDOR,
        peaks=_peaks(
            2520,
            (82.6, 256),
            (("tf32", 82.6, 256), ("fp16", 165.2, 512), ("bf16", 165.2, 512), ("fp8", 330.3, 1024)),
            extra=_fp16_accumulate(2520, ("fp16", 330.3, 1024), ("fp8", 660.6, 2048)),
        ),
    ),
    Gpu(
        name="L4",
        names=(r"l4",),
        compute_capability="8.9",
        memory_gb=(24,),
        l2_mb=48,
        multiprocessors=58,
        gb_per_s=300,
        bandwidth_source="databases of specifications",
        peaks=_peaks(
            2040,
            (30.3, 256),
            (("tf32", 60, 512), ("fp16", 121, 1024), ("bf16", 121, 1024), ("fp8", 242, 2048)),
            source=f"{_CONFIRMED} (its 58 SMs: databases of specifications)",
        ),
    ),
    Gpu(
        name="L40S",
        names=(r"l40s",),
        compute_capability="8.9",
        memory_gb=(48,),
        l2_mb=96,
        multiprocessors=142,
        gb_per_s=864,
        bandwidth_source="datasheet, in a reseller's copy",
        peaks=_peaks(
            2490,
            (91.6, 256),
            (("tf32", 183, 512), ("fp16", 362, 1024), ("bf16", 362, 1024), ("fp8", 733, 2048)),
            fp32_clock=2520,
            source="datasheet, dense, in a reseller's copy; SMs x rate x clock agree within 1.5 %",
        ),
    ),
    Gpu(
        name="H100 SXM5",
        names=(r"h100", r"h100 80gb hbm3", r"h100[- ]sxm5?([- ]80gb)?"),
        compute_capability="9.0",
        memory_gb=(80,),
        l2_mb=50,
        multiprocessors=132,
        gb_per_s=3350,
        bandwidth_source=_VENDOR,
        peaks=_HOPPER,
    ),
    Gpu(
        name="H800 SXM5",
        names=(r"h800", r"h800[- ]sxm5?([- ]80gb)?"),
        compute_capability="9.0",
        memory_gb=(80,),
        l2_mb=50,
        multiprocessors=132,
        gb_per_s=3350,
        bandwidth_source="DeepSeek's notes on FlashMLA: as an H100 SXM5",
        # Less than an H100 in what is not listed here: double precision, and 400 GB/s over NVLink for 900.
        peaks=_peaks(
            1830,
            (66.9, 256),
            (("tf32", 494.7, 2048), ("fp16", 989.4, 4096), ("bf16", 989.4, 4096), ("fp8", 1978.9, 8192)),
            fp32_clock=1980,
            source="as an H100 SXM5, whose chip it has; DeepSeek's notes on FlashMLA say 990 TFLOP/s of 16 bits",
        ),
    ),
    Gpu(
        name="H200 SXM",
        names=(r"h200", r"h200[- ]sxm5?([- ]141gb)?"),
        compute_capability="9.0",
        memory_gb=(141,),
        l2_mb=50,
        multiprocessors=132,
        gb_per_s=4800,
        bandwidth_source=_VENDOR,
        peaks=_HOPPER,
    ),
    Gpu(
        name="MI300X",
        names=(r"mi300x( vf)?",),  # VF: as a virtual machine sees it, whole
        compute_capability="9.4",
        memory_gb=(192,),
        l2_mb=256,
        multiprocessors=304,
        gb_per_s=5300,
        bandwidth_source=_VENDOR,
        # The datasheet also has TF32, 653.7. PyTorch leaves it off unless HIPBLASLT_ALLOW_TF32=1 is set, and it keeps
        # about the precision of bf16 there: what multiplies in fp32 on this card does so at the rate of fp32.
        peaks=_peaks(
            2100,
            (163.4, 256),
            (("fp16", 1307.4, 2048), ("bf16", 1307.4, 2048), ("fp8", 2614.9, 4096)),
            source=f"{_VENDOR}; compute units x rate x clock agree",
        ),
    ),
    Gpu(
        name="B200",
        names=(r"b200",),
        compute_capability="10.0",
        memory_gb=(180,),
        l2_mb=126,
        multiprocessors=148,
        gb_per_s=8000,
        bandwidth_source="a public page of notes on the 1000 W HGX board; 7700 to 8000 are quoted",
        peaks=(
            Peak("fp32", 80, "fp32", "a public page of notes; 75 to 80 are quoted, none confirmed", None, None),
            Peak("tf32", 1125, "fp32", "a public page of notes; 1100 to 1125 are quoted", 4096, 1860),
            *(
                Peak(unit, tflops, "fp32", "a public page of notes on the 1000 W HGX board", rate, 1860)
                for unit, tflops, rate in (("fp16", 2250, 8192), ("bf16", 2250, 8192), ("fp8", 4500, 16_384))
            ),
            Peak("fp4", 9000, "fp32", "a public page of notes on the 1000 W HGX board", 32_768, 1860),
        ),
    ),
    Gpu(
        name="RTX 5090",
        names=(r"(rtx )?5090",),
        compute_capability="12.0",
        memory_gb=(32,),
        l2_mb=96,
        multiprocessors=170,
        gb_per_s=1792,
        bandwidth_source="review pages",
        peaks=_peaks(
            2407,
            (104.8, 256),
            (("tf32", 104.8, 256), ("fp16", 209.5, 512), ("bf16", 209.5, 512), ("fp8", 419, 1024)),
            source=f"{_CONFIRMED} (its 170 SMs and 2407 MHz: review pages)",
            extra=_fp16_accumulate(2407, ("fp16", 419, 1024), ("fp8", 838, 2048)),
        ),
    ),
)


def find(name: str) -> Gpu:
    """Give the GPU of a name.

    Parameters
    ----------
    name : str
        As torch, a driver or a trace says it (``NVIDIA A100-SXM4-80GB``), or as this table does (``H100 SXM5``).
        Boards that differ in their peaks (PCIe, NVL, laptop) are not taken for one another.

    Returns
    -------
    Gpu

    Raises
    ------
    UsageError
        It is not in the table.
    """
    plain = " ".join(re.sub(r"\b(nvidia|tesla|geforce|amd|instinct)\b", "", name.lower()).split())
    for gpu in GPUS:
        if plain == gpu.name.lower() or any(re.fullmatch(pattern, plain) for pattern in gpu.names):
            return gpu
    raise UsageError(
        f"the peaks of {name!r} are not known; there are {', '.join(gpu.name for gpu in GPUS)}. "
        "Name the nearest of them with --gpu; to add a GPU, put its datasheet's dense rates into GPUS in "
        "nsightkit/hardware.py, with their source"
    )


def rows(gpu: Gpu, clock_mhz: float | None = None) -> list[dict[str, object]]:
    """List the peaks of a GPU, its memory bandwidth last.

    Parameters
    ----------
    gpu : Gpu
    clock_mhz : float, optional
        An SM clock to give the rates at, in place of those they are quoted at. A rate that is quoted only, and the
        memory's bandwidth, which has a clock of its own, stay what they are.

    Returns
    -------
    list of dict
        ``gpu, unit, accumulate, tflops, gb_per_s, clock_mhz, source``; what does not apply is None.
    """
    rates: list[dict[str, object]] = []
    for peak in gpu.peaks:
        there = None if clock_mhz is None else gpu.at_clock(peak.unit, clock_mhz, peak.accumulate)
        rates.append(
            {
                "gpu": gpu.name,
                "unit": peak.unit,
                "accumulate": peak.accumulate,
                "tflops": float(peak.tflops) if there is None else there,
                "gb_per_s": None,
                "clock_mhz": peak.clock_mhz if there is None else clock_mhz,
                "source": peak.source if there is None else f"SMs x rate x clock; {peak.source}",
            }
        )
    memory = {"unit": "memory", "accumulate": None, "tflops": None, "gb_per_s": float(gpu.gb_per_s), "clock_mhz": None}
    return [*rates, {"gpu": gpu.name, **memory, "source": gpu.bandwidth_source}]


#: Why a GPU's clock is lower than it could be: bits of the mask that NVML (``nvmlClocksEventReason…``) and nvidia-smi
#: give. The first says that there is nothing to do, the second that somebody chose the clock.
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
    """Sum up why a GPU's clock was held down.

    Parameters
    ----------
    masks : iterable of float
        Readings of the mask of reasons.

    Returns
    -------
    str or None
        The reasons that were there in at least half of the readings, ``nothing`` without one, None without readings.
    """
    read = [int(mask) for mask in masks]
    if not read:
        return None
    often = [why for bit, why in SLOWDOWNS.items() if 2 * sum(bool(mask & bit) for mask in read) >= len(read)]
    return ", ".join(often) or "nothing"
