"""Published rates with their sources, and GEMMs of case files, to compare with datasheets (pages 15 to 19)."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from nsightkit import hardware
from nsightkit.analysis.roofline import counters, sol
from nsightkit.analysis.roofline.sol import Rates


class Reported(NamedTuple):
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
        What ran, in words and beside a bar, and who published it.
    """

    gpu: str
    unit: str
    rate: float
    what: str
    short: str
    source: str

    @property
    def label(self) -> str:
        """What fits beside a bar: the GPU, the unit and what ran."""
        return f"{hardware.find(self.gpu).name.split()[0]} {self.unit}, {self.short}"

    @property
    def share(self) -> float:
        """Share of the datasheet."""
        gpu = hardware.find(self.gpu)
        peak = gpu.peak(self.unit)
        return self.rate / (gpu.gb_per_s if peak is None else peak.tflops)


_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
REPORTED = tuple(Reported(**row) for row in _DATA["reported"])
#: Launches in reports of Nsight Compute that their authors published, as ``nsightkit ncu`` reads them.
ADDITIONS, PRODUCTS = pd.DataFrame(_DATA["additions"]), pd.DataFrame(_DATA["products"])
#: M, N and K of the case ``h200-matmul``, as derived in its notes.
_SHAPE = (2048, 2048, 8192)
_STAGES = {"1-before": "first version", "2-moved-lines": "lines moved", "3-setmaxnreg": "registers by role"}


def best_products() -> list[Reported]:
    """List what was reported of the best shape of a GEMM, by GPU and unit."""
    return [reported for reported in REPORTED if reported.what == "best of many shapes"]


def rates(gpu: str) -> Rates:
    """Give a GPU's rates: the best GEMM reported for each unit, or else the datasheet's rate.

    Parameters
    ----------
    gpu : str

    Returns
    -------
    Rates
    """
    card = hardware.find(gpu)
    sheet = sol.datasheet(card)
    tflops = dict(sheet.tflops)
    for reported in best_products():
        if hardware.find(reported.gpu) == card:
            tflops[reported.unit] = reported.rate
    return Rates("reported", tflops, sheet.gb_per_s, sheet.l2_bytes)


def rates_table() -> pd.DataFrame:
    """List the reported rates.

    Returns
    -------
    DataFrame
        ``figure, rate, source``.
    """
    rows = []
    for reported in REPORTED:
        unit = "GB/s" if reported.unit == "memory" else "TFLOP/s"
        rows.append((reported.label, f"{reported.rate:,.1f} {unit}", reported.source))
    return pd.DataFrame(rows, columns=["figure", "rate", "source"])


def counted(launches: pd.DataFrame) -> pd.DataFrame:
    """Classify launches that were counted by others, by NVIDIA's rule.

    Parameters
    ----------
    launches : DataFrame

    Returns
    -------
    DataFrame
        With a column ``classification``.
    """
    classes = map(counters.classify, launches["sm_pct"], launches["memory_pct"])
    return launches.assign(classification=list(classes))


def on_h200() -> pd.DataFrame:
    """Judge the GEMM of the case ``h200-matmul``: three stages of a generated kernel, cuBLAS beside each.

    Returns
    -------
    DataFrame
        One row per launch: ``kernel`` (the stage, or ``cuBLAS, beside`` one), and the columns of
        :func:`nsightkit.analysis.roofline.sol.judge`, the stages first.
    """
    from nsightkit.guide import case

    rows = []
    for kind, label in (("nvfuser", "{}"), ("nvjet", "cuBLAS, beside {}")):
        for which, stage in _STAGES.items():
            launches = case("h200-matmul", which).trace.kernels()
            own = launches[launches["name"].astype(str).str.contains(kind)]
            rows.append({"kernel": label.format(stage), "time_ns": float(own["total_ns"].iloc[0])})
    table = pd.DataFrame(rows)
    operations = [sol.gemm_cost(*_SHAPE, "fp16", "product")] * len(table)
    sheet = sol.datasheet(hardware.find("H200"))
    return sol.judge(operations, table["time_ns"], sheet).assign(kernel=table["kernel"])


def one_by_one(table: pd.DataFrame, names: dict[str, str]) -> pd.DataFrame:
    """Pick operators of a trace by the beginning of their name, and give them names that fit a figure.

    Parameters
    ----------
    table : DataFrame
        Of ``trace.sol()``.
    names : dict of str to str
        New names, by how an operator's name begins; each begins one name only.

    Returns
    -------
    DataFrame
        In the order of `names`, with ``name`` as here.
    """
    rows = []
    for beginning, name in names.items():
        matching = table[table["name"].str.startswith(beginning)]
        if len(matching) != 1:
            raise ValueError(f"{len(matching)} operators start with {beginning!r}; give a prefix of exactly one")
        rows.append({**matching.iloc[0], "name": name})
    return pd.DataFrame(rows)
