"""Published rates with their sources, and GEMMs of case files, to compare with datasheets (pages 15 to 19)."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pandas as pd

from nsightkit import hardware
from nsightkit.analysis.roofline import counters, sol
from nsightkit.trace.ncu import Report

_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
#: Published rates: TFLOP/s, or GB/s of the memory; what ran, in words and in short, and who published it.
REPORTED = pd.DataFrame(_DATA["reported"])
#: Launches in reports of Nsight Compute that their authors published, as ``nsightkit ncu`` reads them.
ADDITIONS, PRODUCTS = pd.DataFrame(_DATA["additions"]), pd.DataFrame(_DATA["products"])
#: M, N and K of the case ``h200-matmul``, as derived in its notes.
_SHAPE = (2048, 2048, 8192)
_STAGES = {"1-before": "first version", "2-moved-lines": "lines moved", "3-setmaxnreg": "registers by role"}


def shares() -> pd.DataFrame:
    """Give the reported rates as shares of the datasheet: the range for each unit.

    Returns
    -------
    DataFrame
        ``unit, lowest, highest, rates``.
    """
    found = []
    for reported in REPORTED.itertuples():
        gpu = hardware.find(reported.gpu)
        peak = gpu.gb_per_s if reported.unit == "memory" else gpu.peak(reported.unit).tflops
        found.append({"unit": reported.unit, "share": reported.rate / peak})
    by_unit = pd.DataFrame(found).groupby("unit")["share"]
    table = by_unit.agg(lowest="min", highest="max", rates="size").sort_values("highest", ascending=False)
    for column in ("lowest", "highest"):
        table[column] = table[column].map("{:.0%}".format)
    return table.reset_index()


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


def matmuls(report: Report) -> pd.DataFrame:
    """Give the kernels of the case ``ncu-esmm``, the slowest first, with what a report shows without counters.

    Parameters
    ----------
    report : Report

    Returns
    -------
    DataFrame
        By kernel: the columns of the launches, ``share of cuBLAS's speed``, ``share of warp slots``, ``blocks per SM``.
    """
    launches = report.launches.copy()
    launches["name"] = launches["kernel"].str.extract(r"(\w+)[<(]|(\w+_nn)").bfill(axis=1)[0]
    launches = launches.sort_values("time_ns", ascending=False, kind="stable")
    launches = launches.drop_duplicates("name", keep="last").set_index("name")
    launches = launches.rename(index={"ampere_sgemm_128x64_nn": "cuBLAS"})
    launches["share of cuBLAS's speed"] = launches.loc["cuBLAS", "time_ns"] / launches["time_ns"]
    launches["share of warp slots"] = launches["theoretical_occupancy_pct"] / 100
    launches["blocks per SM"] = launches["grid_blocks"] / launches["sm_count"]
    return launches


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
