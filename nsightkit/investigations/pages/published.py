"""What others published, to stand beside a card's datasheet: rates with their sources, and products of case files."""

from __future__ import annotations

import dataclasses

import pandas as pd

from nsightkit import hardware
from nsightkit.analysis.roofline import sol
from nsightkit.analysis.roofline.sol import Rates
from nsightkit.investigations import cases

__all__ = ["REPORTED", "Reported", "best_products", "on_h200", "one_by_one", "rates", "rates_table"]

_BEST = "best of many shapes"
_LEARN_CUDA = "gau-nernst/learn-cuda, 02e"
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
    what, short, source : str
    """

    gpu: str
    unit: str
    rate: float
    what: str
    short: str
    source: str

    @property
    def label(self) -> str:
        """What fits beside a bar: the card, the unit and what ran."""
        return f"{hardware.find(self.gpu).name.split()[0]} {self.unit}, {self.short}"

    @property
    def share(self) -> float:
        """Of the datasheet."""
        card = hardware.find(self.gpu)
        peak = card.peak(self.unit)
        return self.rate / (peak.tflops if peak else card.gb_per_s)


#: As published by November 2026. `short` is what fits beside a bar.
REPORTED = (
    Reported("A100", "bf16", 271.2, _BEST, "best shape", _MAMF),
    Reported("H100", "bf16", 794.5, _BEST, "best shape", _MAMF),
    Reported("H100", "bf16", 795.0, "cuBLAS, 8192 cubed", "cuBLAS 8192", "pranjalssh/fast.cu, README"),
    Reported("H100", "bf16", 855.0, "in a short burst", "burst", "HazyResearch/ThunderKittens, README"),
    Reported("H200", "bf16", 794.5, _BEST, "best shape", _MAMF),
    Reported("B200", "bf16", 1745.0, _BEST, "best shape", _MAMF),
    Reported("B200", "bf16", 1414.3, "cuBLAS, 8192 cubed", "cuBLAS 8192", _LEARN_CUDA),
    Reported("B200", "bf16", 1358.7, "cuBLAS, 4096 cubed", "cuBLAS 4096", _LEARN_CUDA),
    Reported("H100", "fp8", 1402.6, _BEST, "best shape", _MAMF),
    Reported("H200", "fp8", 1453.4, _BEST, "best shape", _MAMF),
    Reported("H800", "fp8", 1550.0, "at most", "own kernel", "deepseek-ai/DeepGEMM, README"),
    Reported("B200", "fp8", 3432.5, _BEST, "best shape", _MAMF),
    Reported("H100", "memory", 3240.0, "sum of a large vector", "sum", "pranjalssh/fast.cu, README"),
    Reported("H800", "memory", 3000.0, "attention of a decode", "decode", "deepseek-ai/FlashMLA, README"),
)
#: M, N and K of the case ``h200-matmul``; its notes say what they follow from.
_SHAPE = (2048, 2048, 8192)
_STAGES = {"1-before": "first version", "2-moved-lines": "lines moved", "3-setmaxnreg": "registers by role"}


def best_products() -> list[Reported]:
    """List what was reported of the best shape of a product, by card and unit."""
    return [one for one in REPORTED if one.what == _BEST]


def rates(gpu: str) -> Rates:
    """Give a card's rates with the best shape of a product reported for it; what nobody reported is the datasheet's.

    Parameters
    ----------
    gpu : str

    Returns
    -------
    Rates
    """
    sheet = sol.datasheet(hardware.find(gpu))
    own = {one.unit: one.rate for one in best_products() if hardware.find(one.gpu) == hardware.find(gpu)}
    return Rates("reported", {**sheet.tflops, **own}, sheet.gb_per_s, sheet.l2_bytes)


def rates_table() -> pd.DataFrame:
    """List the reported rates.

    Returns
    -------
    DataFrame
        ``figure, rate, source``.
    """
    rows = [
        {
            "figure": one.label,
            "rate": f"{one.rate:,.1f} {'GB/s' if one.unit == 'memory' else 'TFLOP/s'}",
            "source": one.source,
        }
        for one in REPORTED
    ]
    return pd.DataFrame(rows)


def on_h200() -> pd.DataFrame:
    """Judge the product of the case ``h200-matmul``: three stages of a generated kernel, cuBLAS beside each.

    Returns
    -------
    DataFrame
        One row a launch: ``kernel`` (the stage, or ``cuBLAS, beside`` one), and the columns of
        :func:`nsightkit.analysis.roofline.sol.judge`, the stages first.
    """
    rows = []
    for kind, label in (("nvfuser", "{}"), ("nvjet", "cuBLAS, beside {}")):
        for which, stage in _STAGES.items():
            launches = cases.case("h200-matmul", which).trace.kernels()
            (time_ns,) = launches.loc[launches["name"].astype(str).str.contains(kind), "total_ns"]
            rows.append((label.format(stage), float(time_ns)))
    names, times = zip(*rows, strict=True)
    operations = [sol.gemm_cost(*_SHAPE, "fp16", "product")] * len(rows)
    return sol.judge(operations, times, sol.datasheet(hardware.find("H200"))).assign(kernel=names)


def one_by_one(table: pd.DataFrame, names: dict[str, str]) -> pd.DataFrame:
    """Pick operators of a trace by the beginning of their name, and give them names that fit a figure.

    Parameters
    ----------
    table : DataFrame
        Of :func:`nsightkit.analysis.roofline.sol.summary`.
    names : dict of str to str
        What an operator is called here, by how its name begins.

    Returns
    -------
    DataFrame
        In the order of `names`, with ``name`` as here.

    Raises
    ------
    ValueError
        A beginning is that of no operator, or of several.
    """
    rows = []
    for begins, name in names.items():
        (found,) = table.index[table["name"].str.startswith(begins)]
        rows.append(table.loc[found].to_dict() | {"name": name})
    return pd.DataFrame(rows)
