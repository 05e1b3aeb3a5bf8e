"""Matrix products of the case files, against the datasheets of their cards."""

from __future__ import annotations

import pandas as pd

from nsightkit import hardware
from nsightkit.analysis.roofline import sol
from nsightkit.investigations import cases

__all__ = ["on_h200", "one_by_one"]

#: M, N and K of the case; its notes say what they follow from.
_SHAPE = (2048, 2048, 8192)
_STAGES = {"1-before": "first version", "2-moved-lines": "lines moved", "3-setmaxnreg": "registers by role"}


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
    table = sol.judge(operations, times, sol.datasheet(hardware.find("H200")))
    return table.assign(kernel=names)


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
