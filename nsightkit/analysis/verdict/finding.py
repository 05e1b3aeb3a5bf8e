"""The names and moments behind a decision, and the sentences about it: how much, where, and what speaks against it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.core.causes import CAUSES
from nsightkit.analysis.core.text import count_text, share_text, short_name, time_text
from nsightkit.analysis.replay.whatif import WhatIf, plain
from nsightkit.analysis.timeline import steps
from nsightkit.analysis.verdict.account import IDLE, Account
from nsightkit.analysis.verdict.rules import LEAST, Decision, bounded, rate
from nsightkit.trace.model import GPU_TABLES

__all__ = ["Finding", "against", "evidence", "find", "headline"]

#: How many names and moments are kept, and of how many names sentences speak.
_NAMES = 10
_LONGEST = 3
_NAMED = 3
#: Kinds of events that a call launched, and the numbers of their tables.
_LAUNCHED = {"kernel": GPU_TABLES.index("kernels"), "copy": GPU_TABLES.index("memops")}
#: Names and moments below this share of an answer's time are left out.
_LITTLE = 0.01
_LONGEST_NAME = 100
_KIND = {
    "op": "operator ",
    "os_call": "OS call ",
    "call": "call ",
    "range": "range ",
    "overhead": "recorded as overhead: ",
    "sample": "CPU samples, mostly of ",
}
#: Nouns for an answer's moments other than gaps.
_MOMENTS = {"copy": "transfer", "kernel": "kernel", "graph": "replay", "none": "wait"}
#: How the sentence about an answer's time begins, where it is not the answer's own name.
_TAKES = {
    "unknown": "Idle time without a recorded reason (unknown) takes",
    "queued": "Work that was launched and waited for something that is not in the trace (queued) takes",
    "compute-bound": "Compute-bound kernels take",
    "memory-bound": "Memory-bound kernels take",
    "not-enough-data": "Unclassified kernels and graph replays take",
    "communication": "Collectives and messages that no other kernel overlaps take",
    "imbalance": "Waiting for the slowest device takes",
    "memory-transfer": "Copies that no kernel overlaps take",
}


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
    longest = events[["device", "start_ns", "end_ns", "kind", "name"]].head(_LONGEST)
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


# ---------------------------------------------------------------- sentences


def _called(name: str) -> str:
    """A name as a sentence can hold it; the machine formats have it whole, under ``named`` and ``longest``."""
    text = short_name(name)
    if len(text) <= _LONGEST_NAME:
        return text
    return f"{text[: _LONGEST_NAME - 1]}…"


def headline(finding: Finding) -> str:
    """Say the answer in one sentence: with its share of the time or, where its removal gains more, with that gain.

    Parameters
    ----------
    finding : Finding
    """
    if finding.name == "not-enough-data":
        return f"Kernels whose limit the trace does not show fill {share_text(finding.share)} of the time"
    sentence = CAUSES[finding.name].sentence
    change = finding.decision.change
    if change is not None and finding.decision.gain > max(1.25 * finding.share, finding.share + 0.02):
        speedup = finding.replay.row(change)["speedup"]
        return f"{sentence}; without that, the run is predicted to be {speedup:.2f}x faster"
    return f"{sentence}, {share_text(finding.share)} of the time"


def evidence(finding: Finding) -> Iterator[str]:
    """What speaks for the answer, the most telling first.

    Parameters
    ----------
    finding : Finding
    """
    account = finding.account
    whole = "the time"
    if len(account.steps):
        whole = "the steps"
    noun = CAUSES[finding.name].noun
    takes = _TAKES.get(finding.name, f"{noun[0].upper()}{noun[1:]} takes")
    times = f"{time_text(finding.time_ns)} of {time_text(account.span_ns)}"
    yield f"{takes} {share_text(finding.share)} of {whole} ({times})"
    exposed = account.share("communication")
    if finding.name != "communication" and exposed >= LEAST:
        amount = time_text(account.total_ns["communication"])
        yield f"Also lost: collectives that no other kernel overlaps take {share_text(exposed)} of {whole} ({amount})"
    yield from _names(finding)
    compilers = steps.recompiled(account.trace, account.steps)
    if compilers is not None and account.share("recompilation") >= LEAST:
        yield compilers
    moments = []
    for device, start_ns, end_ns in finding.longest[["device", "start_ns", "end_ns"]].itertuples(index=False):
        where = ""
        if len(account.devices) > 1:
            where = f" on device {device}"
        moments.append(f"{time_text(end_ns - start_ns)} at {start_ns / 1e6:,.3f} ms{where}")
    if moments:
        yield f"Longest: {'; '.join(moments)}"
    yield f"The GPU is idle {share_text(account.idle_ns / max(account.span_ns, 1))} of {whole}"
    if finding.replay.refused is None:
        yield _prediction(finding)
    reached = rate(finding.operators)
    if reached is not None:
        yield f"Operators with known shapes run at {share_text(reached)} of the datasheet's rate"


def _prediction(finding: Finding) -> str:
    """The predicted gain of the change that decided, else of the best change."""
    decision = finding.decision
    if decision.change is None:
        if not finding.changes or not finding.changes[0]["speedup"]:
            return "No common change is predicted to help"
        best = finding.changes[0]
        return f"Predicted: at most {best['speedup']:.2f}x faster ({best['change']})"
    row = finding.replay.row(decision.change)
    times = f"{time_text(row['predicted_ns'])} instead of {time_text(row['wall_ns'])}"
    return f"Predicted with {decision.change}: {times}, {row['speedup']:.2f}x faster"


def _names(finding: Finding) -> Iterator[str]:
    """The names behind it."""
    for row in finding.named.head(_NAMED).to_dict("records"):
        kind = row["kind"]
        name = row["name"]
        if not name or row["total_ns"] <= _LITTLE * finding.time_ns:
            continue
        moment = "gap" if finding.is_idle and kind != "copy" else _MOMENTS.get(kind, "gap")
        count = count_text(row["count"], moment)
        text = f"{time_text(row['total_ns'])} in {count}: {_KIND.get(kind, '')}{_called(name)}"
        if row["inside"]:
            text += f", mostly inside {_called(row['inside'])}"
        yield text


def against(finding: Finding) -> Iterator[str]:
    """Doubts first, then remarks.

    Parameters
    ----------
    finding : Finding
    """
    yield from finding.decision.doubts
    inferred = finding.replay.inferred
    if finding.changes and inferred:
        dependencies = "dependencies were"
        if inferred == 1:
            dependencies = "dependency was"
        yield f"{inferred:,} {dependencies} inferred, not recorded"
    yield from finding.account.trace.meta.notes
