"""The names and moments behind a decision."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.replay.whatif import WhatIf, plain
from nsightkit.analysis.verdict.account import IDLE, Account
from nsightkit.analysis.verdict.rules import Decision, bounded
from nsightkit.trace.model import GPU_TABLES

__all__ = ["Finding", "find"]

#: How many names and moments are kept.
_NAMES, _MOMENTS = 10, 3
#: Kinds of events that a call launched, and the numbers of their tables.
_LAUNCHED = {"kernel": GPU_TABLES.index("kernels"), "copy": GPU_TABLES.index("memops")}


@dataclasses.dataclass(frozen=True)
class Finding:
    """A decision with everything that sentences about it need.

    Attributes
    ----------
    account : Account
    replay : WhatIf
    decision : Decision
    changes : sequence of mapping
        As :func:`nsightkit.analysis.replay.whatif.rows` gives them.
    operators : DataFrame
        Operators that arithmetic or the memory bounds, where the answer is one of these.
    named : DataFrame
        ``kind, name, count, total_ns, inside``, the largest first; ``inside`` is the operator or range around most of
        that time.
    longest : DataFrame
        ``device, start_ns, end_ns, kind, name``.
    """

    account: Account
    replay: WhatIf
    decision: Decision
    changes: Sequence[Mapping[str, Any]]
    operators: pd.DataFrame
    named: pd.DataFrame
    longest: pd.DataFrame

    @property
    def name(self) -> str:
        """The answer."""
        return self.decision.name

    @property
    def time_ns(self) -> int:
        """What it takes."""
        return self.account.total_ns[self.name]

    @property
    def share(self) -> float:
        """What it takes of the time that is judged."""
        return self.account.share(self.name)

    @property
    def is_idle(self) -> bool:
        """Whether the answer is a cause of idle time."""
        return self.name in IDLE

    def is_step(self, name: object) -> bool:
        """Whether a name is that of whole steps, which names no work."""
        return name in set(self.account.steps["step"])


def find(account: Account, replay: WhatIf, decision: Decision, changes: Sequence[Mapping[str, Any]]) -> Finding:
    """Find the names and the moments behind a decision.

    Parameters
    ----------
    account : Account
    replay : WhatIf
    decision : Decision
    changes : sequence of mapping
    """
    events = account.moments(decision.name).sort_values("duration_ns", ascending=False, kind="stable")
    longest = events[["device", "start_ns", "end_ns", "kind", "name"]].head(_MOMENTS)
    events["name"] = _without_numbers(events)
    events["inside"] = _inside(account, events)
    keys = ["kind", "name"]
    named = pd.DataFrame(events.groupby(keys, sort=False)["duration_ns"].agg(count="size", total_ns="sum"))
    places = events.groupby([*keys, "inside"])["duration_ns"].sum().reset_index("inside")
    # Only one place can hold more than half of a name's time: names in `most` are unique, as `reindex` needs them.
    most = places[2 * places["duration_ns"] > named["total_ns"].reindex(places.index)]
    inside = most["inside"].astype(object).reindex(named.index)
    named["inside"] = inside.where(inside.notna(), None)
    named = named.reset_index().sort_values("total_ns", ascending=False, kind="stable", ignore_index=True)
    operators = bounded(account, decision.name)
    return Finding(account, replay, decision, changes, operators, named.head(_NAMES), longest)


def _without_numbers(events: pd.DataFrame) -> pd.Series[Any]:
    """Names of moments: ranges and operators that differ in a number only have one."""
    of_work = events["kind"].isin(["range", "op"])
    shared = events["name"].where(~of_work, events["name"].map(plain))
    several = events.groupby(shared)["name"].transform("nunique") > 1
    return events["name"].where(~(of_work & several), shared)


def _inside(account: Account, events: pd.DataFrame) -> np.ndarray:
    """The operator, or else the range, around the call behind each event; never a whole step."""
    inside = np.full(len(events), None, dtype=object)
    launch = intervals.launches_of(account.trace, events["kind"].map(_LAUNCHED).fillna(-1), events["row"])
    call = np.where(events["kind"] == "call", events["row"], launch).astype(np.int64)
    places = np.flatnonzero(call >= 0)
    whole = account.trace.whole
    calls = whole.table("calls", ["start_ns", "end_ns", "thread"]).iloc[call[places]]
    for table in ("ranges", "ops"):  # an operator says more than a range
        outer = whole.table(table, ["start_ns", "end_ns", "thread", "name"])
        if len(outer) and len(calls):
            meant = ~outer["name"].isin(set(account.steps["step"])).to_numpy(bool)
            around = intervals.enclosing(calls, outer, meant)
            inside[places[around >= 0]] = outer["name"].astype(object).to_numpy()[around[around >= 0]]
    return inside
