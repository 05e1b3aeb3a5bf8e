"""Published rates with their sources, and GEMMs of case files, to compare with datasheets (pages 15 to 19)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from nsightkit import hardware
from nsightkit.analysis.roofline import counters, sol
from nsightkit.analysis.roofline.sol import Rates

_BEST = "best of many shapes"
_LEARN_CUDA = "gau-nernst/learn-cuda, 02e"
_MAMF = "stas00/ml-engineering, compute/accelerator/README.md"


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


#: As published by November 2026.
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


class Counted(NamedTuple):
    """One launch in a report of Nsight Compute that its author published, as ``nsightkit ncu`` reads it.

    Parameters
    ----------
    name : str
    time_us, sm_pct, memory_pct : float
    file, source : str
        The report, and its repository and commit.
    dram_mb : float, optional
        Read from and written to the memory.
    used : int, optional
        Bytes of each sector of 32 that loads use.
    waves : float, optional
    """

    name: str
    time_us: float
    sm_pct: float
    memory_pct: float
    file: str
    source: str
    dram_mb: float | None = None
    used: int | None = None
    waves: float | None = None


_T4 = "armleth/cuda-mlp-inference, commit 3af4485"
_A10G = "AveryClapp/ESMM-Research, commit b644635"
#: A million fp32 numbers added to a million others on a Tesla T4, by four kernels. The repository names no licence, so
#: the reports themselves are not here.
ADDITIONS = (
    Counted("1 a thread", 47.104, 24.63, 89.51, "report_v6_1d_1_per_thread.ncu-rep", _T4, 12.495, 32),
    Counted("4, strided", 47.808, 20.05, 90.75, "report_v8_1d_4_per_thread_stripped.ncu-rep", _T4, 12.586, 32),
    Counted("4, adjacent", 66.432, 13.65, 85.09, "report_v7_1d_4_per_thread_blocked.ncu-rep", _T4, 17.418, 8),
    Counted("8, adjacent", 151.328, 6.21, 49.98, "report_v4_8_per_thread.ncu-rep", _T4, 20.598, 4),
)
#: Four kernels of the ladder in the case ``ncu-esmm``, half a year before it, with counters.
PRODUCTS = (
    Counted("one_blocktiling", 431.840, 64.86, 64.86, "profile.ncu-rep", _A10G, waves=1.6),
    Counted("two_blocktiling", 295.744, 33.32, 44.40, "profile.ncu-rep", _A10G, waves=0.8),
    Counted("vectorized_blocktiling", 262.304, 34.63, 46.10, "profile.ncu-rep", _A10G, waves=0.4),
    Counted("warptiling", 226.880, 39.49, 31.91, "profile.ncu-rep", _A10G, waves=0.4),
)
#: M, N and K of the case ``h200-matmul``, as derived in its notes.
_SHAPE = (2048, 2048, 8192)
_STAGES = {"1-before": "first version", "2-moved-lines": "lines moved", "3-setmaxnreg": "registers by role"}


def best_products() -> list[Reported]:
    """List what was reported of the best shape of a GEMM, by GPU and unit."""
    return [reported for reported in REPORTED if reported.what == _BEST]


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


def counted(launches: Sequence[Counted]) -> pd.DataFrame:
    """Classify launches that were counted by others, by NVIDIA's rule.

    Parameters
    ----------
    launches : sequence of Counted

    Returns
    -------
    DataFrame
        The fields of :class:`Counted` and ``classification``.
    """
    table = pd.DataFrame(launches, columns=Counted._fields)
    table["classification"] = [counters.classify(launch.sm_pct, launch.memory_pct) for launch in launches]
    return table


def on_h200() -> pd.DataFrame:
    """Judge the GEMM of the case ``h200-matmul``: three stages of a generated kernel, cuBLAS beside each.

    Returns
    -------
    DataFrame
        One row per launch: ``kernel`` (the stage, or ``cuBLAS, beside`` one), and the columns of
        :func:`nsightkit.analysis.roofline.sol.judge`, the stages first.
    """
    from nsightkit.guide import case

    names, times = [], []
    for kind, label in (("nvfuser", "{}"), ("nvjet", "cuBLAS, beside {}")):
        for which, stage in _STAGES.items():
            launches = case("h200-matmul", which).trace.kernels()
            own = launches[launches["name"].astype(str).str.contains(kind)]
            names.append(label.format(stage))
            times.append(float(own["total_ns"].iloc[0]))
    operations = [sol.gemm_cost(*_SHAPE, "fp16", "product")] * len(times)
    return sol.judge(operations, times, sol.datasheet(hardware.find("H200"))).assign(kernel=names)


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
