"""What a person reads of a gap: the events that decided, with names and times."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from nsightkit.analysis.timeline.gaps.facts import EVIDENCE, TABLE_OF, Int
from nsightkit.trace.model import GPU_TABLES, Trace

__all__ = ["evidence", "memop_name"]


def memop_name(kind: str) -> str:
    """Call a copy or memset what Nsight Systems calls it.

    Parameters
    ----------
    kind : str
        Of the model's ``memops``.
    """
    return kind if kind == "memset" else f"memcpy {kind}"


def evidence(whole: Trace, gaps: pd.DataFrame) -> list[dict[str, Any]]:
    """Turn numbers of kinds and rows of tables into what a person reads.

    Parameters
    ----------
    whole : Trace
    gaps : DataFrame
        ``table, row, launch, source, source_row``.

    Returns
    -------
    list of dict
        One a gap, as :func:`nsightkit.analysis.timeline.gaps.find` has them.
    """
    table, row, launch, source, source_row = (
        gaps[column].to_numpy() for column in ("table", "row", "launch", "source", "source_row")
    )
    out: list[dict[str, Any]] = [{"kind": "none"} for _ in range(len(gaps))]
    for kind, name in TABLE_OF.items():
        mine = np.flatnonzero((source == EVIDENCE.index(kind)) & (source_row >= 0))
        for i, event in zip(mine.tolist(), _events(whole, name, source_row[mine]), strict=True):
            out[i] = {"kind": kind, **event}
    launched = np.flatnonzero(launch >= 0)
    for i, event in zip(launched.tolist(), _events(whole, "calls", launch[launched]), strict=True):
        out[i]["launch"] = event
    for number, name in enumerate(GPU_TABLES):
        mine = np.flatnonzero(table == number)
        for i, text in zip(mine.tolist(), _names(whole, name, row[mine]), strict=True):
            out[i]["ended_by"] = text
    return out


def _events(whole: Trace, table: str, rows: Int) -> list[dict[str, Any]]:
    where = "device" if table in GPU_TABLES else "thread"
    part = whole.table(table, ["start_ns", "end_ns", where]).iloc[rows]
    columns = (part[column].tolist() for column in part)
    return [
        {"name": name, "start_ns": start, "end_ns": end, where: on}
        for name, start, end, on in zip(_names(whole, table, rows), *columns, strict=True)
    ]


def _names(whole: Trace, table: str, rows: Int) -> list[str]:
    if table == "graphs":
        return ["graph replay"] * len(rows)
    column = "kind" if table == "memops" else "name"
    names = whole.table(table, [column])[column].iloc[rows].astype("str").tolist()
    return [memop_name(name) for name in names] if table == "memops" else names
