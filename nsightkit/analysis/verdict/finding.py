"""What is behind a decision: the names and the moments that its time lies in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.replay.whatif import WhatIf, plain
from nsightkit.analysis.timeline import gaps
from nsightkit.analysis.verdict.account import CODE, IDLE, Account, of
from nsightkit.analysis.verdict.rules import LOST, Decision, bounded
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
    played : WhatIf
    decision : Decision
    changes : sequence of mapping
        As :func:`nsightkit.analysis.replay.whatif.summary` gives them.
    operators : DataFrame
        Operators that arithmetic or the memory bounds, where the answer is one of these.
    named : DataFrame
        ``kind, name, count, total_ns, inside``, the largest first; ``inside`` is the operator or range around most of
        it.
    longest : DataFrame
        ``device, start_ns, end_ns, kind, name, ended_by``.
    """

    account: Account
    played: WhatIf
    decision: Decision
    changes: Sequence[Mapping[str, Any]]
    operators: pd.DataFrame
    events: pd.DataFrame
    named: pd.DataFrame
    longest: pd.DataFrame

    @property
    def name(self) -> str:
        """The answer."""
        return self.decision.name

    @property
    def time_ns(self) -> int:
        """What it takes."""
        return int(of(self.account.total, CODE[self.name]))

    @property
    def share(self) -> float:
        """What it takes of the time that is judged."""
        return min(self.time_ns / max(self.account.span_ns, 1), 1.0)

    @property
    def is_idle(self) -> bool:
        """Whether the answer is a cause of idle time."""
        return CODE[self.name] in IDLE

    @property
    def whole(self) -> str:
        """What shares are of, in words."""
        return "the steps" if len(self.account.steps) else "the time"

    def is_step(self, name: object) -> bool:
        """Whether a name is that of whole steps, which names no work."""
        return name in set(self.account.steps["step"])

    def other_changes(self) -> list[Mapping[str, Any]]:
        """Changes that gain enough to speak of, but for the one that decided and parts of changes."""
        others = []
        for row in self.changes:
            apart = row["change"] != self.decision.change and ":" not in row["change"]
            if apart and self.played.saved(row["change"]) >= LOST:
                others.append(row)
        return others


def find(account: Account, played: WhatIf, decision: Decision, changes: Sequence[Mapping[str, Any]]) -> Finding:
    """Find the names and the moments behind a decision.

    Parameters
    ----------
    account : Account
    played : WhatIf
    decision : Decision
    changes : sequence of mapping
    """
    events = account.moments(decision.name)
    events["name"] = _without_numbers(events)
    named = _named(events)
    named["inside"] = pd.Series(_inside(account, events, named), dtype=object)
    return Finding(
        account=account,
        played=played,
        decision=decision,
        changes=changes,
        operators=bounded(account, decision.name),
        events=events,
        named=named,
        longest=_longest(account, events, is_idle=CODE[decision.name] in IDLE),
    )


def _without_numbers(events: pd.DataFrame) -> pd.Series[Any]:
    """Names of moments: ranges and operators that differ in a number only have one."""
    of_work = events["kind"].isin(["range", "op"])
    shared = events["name"].where(~of_work, events["name"].map(plain))
    several = events.groupby(shared)["name"].transform("nunique") > 1
    return events["name"].where(~(of_work & several), shared)


def _named(events: pd.DataFrame) -> pd.DataFrame:
    lasting = events.groupby(["kind", "name"], sort=False)["duration_ns"]
    named = lasting.agg(count="size", total_ns="sum").reset_index()
    named = named.sort_values("total_ns", ascending=False, kind="stable", ignore_index=True)
    return named.head(_NAMES)


def _inside(account: Account, events: pd.DataFrame, named: pd.DataFrame) -> list[str | None]:
    """The operator, or else the range, around the calls behind most of each name's time; never a whole step."""
    inside: list[str | None] = [None] * len(named)
    keys = pd.MultiIndex.from_frame(named[["kind", "name"]])
    number = keys.get_indexer(pd.MultiIndex.from_frame(events[["kind", "name"]]))
    events = events.assign(number=number)
    events = events[(number >= 0) & (events["row"] >= 0).to_numpy()]
    launch = intervals.launches_of(account.trace, events["kind"].map(_LAUNCHED).fillna(-1), events["row"])
    call = events["row"].where(events["kind"] == "call", launch).to_numpy(np.int64)
    events, call = events[call >= 0], call[call >= 0]
    if events.empty:
        return inside
    total_ns = events.groupby("number")["duration_ns"].sum()
    calls = account.trace.whole.table("calls", ["start_ns", "end_ns", "thread"]).iloc[call]
    whole_steps = set(account.steps["step"])
    for table in ("ranges", "ops"):  # an operator says more than a range
        outer = account.trace.whole.table(table, ["start_ns", "end_ns", "thread", "name"])
        if outer.empty:
            continue
        place = intervals.enclosing(calls, outer)
        around = events.assign(around=outer["name"].to_numpy()[place])[place >= 0]
        times = around.groupby(["number", "around"])["duration_ns"].sum()
        for index, name, time_ns in times.reset_index().itertuples(index=False):
            if 2 * time_ns > total_ns[index] and name not in whole_steps:
                inside[index] = str(name)
    return inside


def _longest(account: Account, events: pd.DataFrame, *, is_idle: bool) -> pd.DataFrame:
    """The longest moments, and what ended those that are gaps."""
    order = np.argsort(-events["duration_ns"].to_numpy(), kind="stable")[:_MOMENTS]
    longest = events.iloc[order].drop(columns="row").reset_index(drop=True)
    ended: dict[tuple[int, int], str | None] = {}
    if is_idle and len(longest):
        idle = gaps.find(account.trace, min_ns=int(longest["duration_ns"].min()))
        for device, start_ns, evidence in zip(idle["device"], idle["start_ns"], idle["evidence"], strict=True):
            ended[device, start_ns] = evidence.get("ended_by")
    ended_by = [ended.get(place) for place in zip(longest["device"], longest["start_ns"], strict=True)]
    return longest.drop(columns="duration_ns").assign(ended_by=pd.Series(ended_by, dtype=object))
