"""What a person reads of a gap: the events that decided, with names and times."""

from __future__ import annotations

from typing import Any

import numpy as np

from nsightkit.analysis.timeline.gaps.facts import EVIDENCE, TABLE_OF, Gaps, Int
from nsightkit.trace.model import GPU_TABLES, Trace

__all__ = ["Evidence", "memop_name"]

#: Of these the evidence says on which device they ran, of others on which thread.
_ON_DEVICE = ("memops", "kernels")


def memop_name(kind: str) -> str:
    """Call a copy or memset what Nsight Systems calls it.

    Parameters
    ----------
    kind : str
        Of the model's ``memops``.
    """
    return kind if kind == "memset" else f"memcpy {kind}"


class Evidence:
    """Turns (table, row) into what a person reads.

    Parameters
    ----------
    trace : Trace
        The whole one.
    gaps : Gaps
    """

    def __init__(self, trace: Trace, gaps: Gaps) -> None:
        self._trace, self._gaps = trace, gaps

    def _events(self, table: str, rows: Int) -> list[dict[str, Any]]:
        columns = [
            "start_ns",
            "end_ns",
            "kind" if table == "memops" else "name",
            "device" if table in _ON_DEVICE else "thread",
        ]
        part = self._trace.table(table, columns).iloc[rows]
        names = part[columns[2]].astype("str").tolist()
        if table == "memops":
            names = [memop_name(n) for n in names]
        return [
            {"name": n, "start_ns": int(s), "end_ns": int(e), columns[3]: int(t)}
            for n, s, e, t in zip(names, part["start_ns"], part["end_ns"], part[columns[3]], strict=True)
        ]

    def of_all(self) -> list[dict[str, Any]]:
        """A dict a gap, as :func:`nsightkit.analysis.timeline.gaps.find` has them."""
        g = self._gaps
        out: list[dict[str, Any]] = [{"kind": "none"} for _ in range(len(g.cause))]
        for kind, table in TABLE_OF.items():
            mine = np.flatnonzero((g.source == EVIDENCE.index(kind)) & (g.source_row >= 0))
            for i, event in zip(
                mine.tolist(), self._events(table, g.source_row[mine]) if len(mine) else [], strict=True
            ):
                out[i] = {"kind": kind, **event}
        launched = np.flatnonzero(g.launch >= 0)
        for i, event in zip(
            launched.tolist(), self._events("calls", g.launch[launched]) if len(launched) else [], strict=True
        ):
            out[i]["launch"] = event
        for number, table in enumerate(GPU_TABLES):
            mine = np.flatnonzero(g.table == number)
            if not len(mine):
                continue
            if table == "graphs":
                names = ["graph replay"] * len(mine)
            else:
                column = "name" if table == "kernels" else "kind"
                names = self._trace.table(table, [column])[column].iloc[g.row[mine]].astype("str").tolist()
            for i, name in zip(mine.tolist(), names, strict=True):
                out[i]["ended_by"] = memop_name(name) if table == "memops" else name
        return out
