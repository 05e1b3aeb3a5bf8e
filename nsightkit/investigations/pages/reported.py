"""Rates that others published, to stand beside a card's datasheet. Each is somebody else's figure, with its source."""

from __future__ import annotations

import dataclasses

import pandas as pd

from nsightkit import hardware
from nsightkit.analysis.roofline import sol
from nsightkit.analysis.roofline.sol import Rates

__all__ = ["REPORTED", "Reported", "rates", "table"]

_BEST_SHAPE = "best of many shapes (MAMF)"
_MAMF = "stas00/ml-engineering, compute/accelerator/README.md"


@dataclasses.dataclass(frozen=True)
class Reported:
    """One published rate.

    Parameters
    ----------
    gpu : str
        As :func:`nsightkit.hardware.find` knows it.
    unit : str
        ``memory``, or a unit of :class:`nsightkit.hardware.Peak`.
    rate : float
        TFLOP/s, or GB/s of the memory.
    what, source : str
    """

    gpu: str
    unit: str
    rate: float
    what: str
    source: str

    @property
    def share(self) -> float:
        """Of the datasheet."""
        card = hardware.find(self.gpu)
        peak = card.peak(self.unit)
        return self.rate / (peak.tflops if peak else card.gb_per_s)


#: As published by November 2026.
REPORTED = (
    Reported("A100", "bf16", 271.2, _BEST_SHAPE, _MAMF),
    Reported("H100", "bf16", 794.5, _BEST_SHAPE, _MAMF),
    Reported("H100", "bf16", 795.0, "cuBLAS, 8192 x 8192 x 8192", "pranjalssh/fast.cu, README"),
    Reported("H200", "bf16", 794.5, _BEST_SHAPE, _MAMF),
    Reported("B200", "bf16", 1745.0, _BEST_SHAPE, _MAMF),
    Reported("B200", "bf16", 1414.3, "cuBLAS, 8192 x 8192 x 8192", "gau-nernst/learn-cuda, 02e"),
    Reported("H100", "fp8", 1402.6, _BEST_SHAPE, _MAMF),
    Reported("H200", "fp8", 1453.4, _BEST_SHAPE, _MAMF),
    Reported("B200", "fp8", 3432.5, _BEST_SHAPE, _MAMF),
    Reported("H100", "memory", 3240.0, "sum of a large vector", "pranjalssh/fast.cu, README"),
)


def rates(gpu: str) -> Rates:
    """Give a card's rates with the best product reported for it; what nobody reported is the datasheet's.

    Parameters
    ----------
    gpu : str

    Returns
    -------
    Rates
    """
    sheet = sol.datasheet(hardware.find(gpu))
    own = [one for one in REPORTED if hardware.find(one.gpu) == hardware.find(gpu)]
    best = {one.unit: max(o.rate for o in own if o.unit == one.unit) for one in own}
    gb_per_s = best.pop("memory", sheet.gb_per_s)
    return Rates("reported", {**sheet.tflops, **best}, gb_per_s, sheet.l2_bytes)


def table() -> pd.DataFrame:
    """List the reported rates.

    Returns
    -------
    DataFrame
        ``GPU, unit, what, rate, share of datasheet, source``.
    """
    rows = [
        {
            "GPU": hardware.find(one.gpu).name,
            "unit": one.unit,
            "what": one.what,
            "rate": f"{one.rate:,.0f} {'GB/s' if one.unit == 'memory' else 'TFLOP/s'}",
            "share of datasheet": one.share,
            "source": one.source,
        }
        for one in REPORTED
    ]
    return pd.DataFrame(rows)
