"""The names and moments behind a decision, and the sentences about it: the amount, the evidence and the doubts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.core.causes import CAUSES
from nsightkit.analysis.replay.whatif import WhatIf, plain
from nsightkit.analysis.timeline import steps
from nsightkit.analysis.verdict.account import IDLE, Account
from nsightkit.analysis.verdict.rules import LEAST_SHARE, Decision, bounded_operators, share_of_rate
from nsightkit.text import count_text, share_text, short_name, time_text
from nsightkit.trace.model import GPU_TABLES

#: How many names the answer holds, how many moments, and how many names the evidence has sentences about.
_MOST_NAMES = 10
_MOST_MOMENTS = 3
_MOST_NAME_SENTENCES = 3
#: Kinds of events that a call launched, and their tables as positions in ``GPU_TABLES``.
_LAUNCHED = {"kernel": GPU_TABLES.index("kernels"), "copy": GPU_TABLES.index("memops")}
#: The evidence leaves out names that take a smaller share of the answer's time.
_LEAST_SHARE_OF_NAME = 0.01
#: Sentences cut names that are longer.
_LONGEST_NAME = 100
#: How a sentence introduces a name, by the kind of the named event.
_BEFORE_NAME = {
    "op": "operator ",
    "os_call": "OS call ",
    "call": "call ",
    "range": "range ",
    "overhead": "recorded as overhead: ",
    "sample": "CPU samples, mostly of ",
}
#: Nouns for an answer's moments other than gaps, by kind.
_NOUN_OF_MOMENT = {"copy": "transfer", "kernel": "kernel", "graph": "replay", "none": "wait"}


@dataclasses.dataclass(frozen=True)
class Finding:
    """A decision, with all that the sentences about it need.

    Attributes
    ----------
    account : Account
    replay : WhatIf
    decision : Decision
    changes : sequence of mapping
        As :func:`nsightkit.analysis.replay.whatif.rows` gives them.
    operators : DataFrame
        Of :func:`nsightkit.analysis.verdict.rules.bounded_operators`.
    named : DataFrame
        The names behind the answer: ``kind, name, count, total_ns, inside``, the largest first; ``inside`` is the
        operator or range in which most of that time was launched.
    longest : DataFrame
        Its longest moments: ``device, start_ns, end_ns, kind, name``.
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
        """The time that the answer takes, over all devices."""
        return self.account.total_ns[self.name]

    @property
    def share(self) -> float:
        """The share of the judged time that the answer takes."""
        return self.account.share(self.name)

    @property
    def is_idle(self) -> bool:
        """Whether the answer is a cause of idle time."""
        return self.name in IDLE

    def is_step(self, name: object) -> bool:
        """Whether a name belongs to whole steps, and so does not describe the work in them."""
        return name in set(self.account.steps["step"])


def find(account: Account, replay: WhatIf, decision: Decision, changes: Sequence[Mapping[str, Any]]) -> Finding:
    """Find the names and the moments behind a decision.

    Parameters
    ----------
    account : Account
    replay : WhatIf
    decision : Decision
    changes : sequence of mapping
        Rows of :func:`nsightkit.analysis.replay.whatif.rows`, the largest gain first.
    """
    events = account.moments(decision.name).sort_values("duration_ns", ascending=False, kind="stable")
    longest = events[["device", "start_ns", "end_ns", "kind", "name"]].head(_MOST_MOMENTS)
    events["name"] = _names_without_numbers(events)
    events["inside"] = _names_around(account, events)
    keys = ["kind", "name"]
    named = pd.DataFrame(events.groupby(keys, sort=False)["duration_ns"].agg(count="size", total_ns="sum"))
    # The time of each name in each operator or range.
    places = events.groupby([*keys, "inside"])["duration_ns"].sum().reset_index("inside")
    # Only one place can hold more than half of a name's time: names in `most` are unique, as `reindex` needs them.
    most = places[2 * places["duration_ns"] > named["total_ns"].reindex(places.index)]
    inside = most["inside"].astype(object).reindex(named.index)
    named["inside"] = inside.where(inside.notna(), None)
    named = named.reset_index().sort_values("total_ns", ascending=False, kind="stable", ignore_index=True)
    operators = bounded_operators(account, decision.name)
    return Finding(account, replay, decision, changes, operators, named.head(_MOST_NAMES), longest)


def _names_without_numbers(events: pd.DataFrame) -> pd.Series[Any]:
    """Name the moments, with one name for ranges and operators that differ in a number only: stars replace it."""
    is_range_or_op = events["kind"].isin(["range", "op"])
    starred = events["name"].where(~is_range_or_op, events["name"].map(plain))
    # A name that no other shares keeps its numbers.
    is_shared = events.groupby(starred)["name"].transform("nunique") > 1
    return events["name"].where(~(is_range_or_op & is_shared), starred)


def _names_around(account: Account, events: pd.DataFrame) -> np.ndarray:
    """Name the operator, or else the range, around the call that each event is or was launched by; never a whole step.

    None where no call is known, or nothing is around it.
    """
    inside = np.full(len(events), None, dtype=object)
    # Position in GPU_TABLES, or -1. Gaps for which a copy is to blame are of kind "copy" too, but have no row.
    table = events["kind"].map(_LAUNCHED).where(events["row"] >= 0).fillna(-1)
    launch = intervals.launches_of(account.trace, table, events["row"])
    # Rows in the whole trace's calls, or -1.
    call = np.where(events["kind"] == "call", events["row"], launch).astype(np.int64)
    with_call = np.flatnonzero(call >= 0)
    whole = account.trace.whole
    calls = whole.table("calls", ["start_ns", "end_ns", "thread"]).iloc[call[with_call]]
    for source in ("ranges", "ops"):  # operators last: they say more, and overwrite ranges
        outer = whole.table(source, ["start_ns", "end_ns", "thread", "name"])
        if len(outer) and len(calls):
            is_step = outer["name"].isin(account.steps["step"]).to_numpy(bool)
            around = intervals.enclosing(calls, outer, ~is_step)  # rows of `outer`, the innermost; -1 for none
            inside[with_call[around >= 0]] = outer["name"].astype(object).to_numpy()[around[around >= 0]]
    return inside


# ---------------------------------------------------------------- sentences


def _name_in_sentence(name: str) -> str:
    """Shorten a name so that a sentence can hold it; JSON has it whole, under ``named`` and ``longest``."""
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
    # The gain, where it is clearly more than the share.
    if change is not None and finding.decision.gain > max(1.25 * finding.share, finding.share + 0.02):
        speedup = finding.replay.row(change)["speedup"]
        return f"{sentence}; without that, the run is predicted to be {speedup:.2f}x faster"
    return f"{sentence}, {share_text(finding.share)} of the time"


def evidence(finding: Finding) -> Iterator[str]:
    """Give the sentences that speak for the answer, the most telling first.

    Parameters
    ----------
    finding : Finding

    Yields
    ------
    str
        Times are ms on the trace's clock, shares are of the judged time.
    """
    account = finding.account
    whole = "the time"
    if len(account.steps):
        whole = "the steps"
    idle_share = account.idle_ns / max(account.span_ns, 1)
    busy_share = 1 - idle_share
    # Figures show far more busy time than the answer takes: say why that is not the answer.
    if finding.is_idle and busy_share > 3 * finding.share:
        busy = f"{share_text(busy_share)} of {whole}"
        yield f"The GPU is busy {busy}, copies included, but lost time is named first if it is 5% or more"
    takes = CAUSES[finding.name].takes  # such as "The wait for data takes"
    times = f"{time_text(finding.time_ns)} of {time_text(account.span_ns)}"
    if len(account.devices) > 1:
        times += f", summed over {len(account.devices)} GPUs"
    yield f"{takes} {share_text(finding.share)} of {whole} ({times})"
    exposed_share = account.share("communication")
    if finding.name != "communication" and exposed_share >= LEAST_SHARE:
        amount = f"{share_text(exposed_share)} of {whole} ({time_text(account.total_ns['communication'])})"
        yield f"Also lost: collectives that no other kernel overlaps take {amount}"
    yield from _largest_names(finding)
    recompilations = steps.recompiled(account.trace, account.steps)  # a sentence, None without any
    if recompilations is not None and account.share("recompilation") >= LEAST_SHARE:
        yield recompilations
    yield from _longest_moments(finding)
    if not finding.is_idle:
        yield f"The GPU is idle {share_text(idle_share)} of {whole}"
    if finding.replay.refused is None:
        yield _prediction(finding)
    reached = share_of_rate(finding.operators)
    if reached is not None:
        yield f"Operators with known shapes run at {share_text(reached)} of the datasheet's rate"


def _longest_moments(finding: Finding) -> Iterator[str]:
    """List the longest moments of the answer in one sentence."""
    moments = []
    for device, start_ns, end_ns in finding.longest[["device", "start_ns", "end_ns"]].itertuples(index=False):
        where = ""
        if len(finding.account.devices) > 1:
            where = f" on device {device}"
        moments.append(f"{time_text(end_ns - start_ns)} at {start_ns / 1e6:,.3f} ms{where}")
    if moments:
        # Those of memory-transfer are gaps and copies.
        noun = "gaps" if finding.is_idle and finding.name != "memory-transfer" else "intervals"
        yield f"Longest {noun}: {'; '.join(moments)}"


def _prediction(finding: Finding) -> str:
    """Say what the change that decided is predicted to gain or, if none decided, what the best change is."""
    decision = finding.decision
    if decision.change is None:
        if not finding.changes:
            return "No common change is predicted to help"
        best = finding.changes[0]  # the largest gain
        return f"Predicted: at most {best['speedup']:.2f}x faster ({best['change']})"
    row = finding.replay.row(decision.change)
    times = f"{time_text(row['predicted_ns'])} instead of {time_text(row['wall_ns'])}"
    return f"Predicted with {decision.change}: {times}, {row['speedup']:.2f}x faster"


def _largest_names(finding: Finding) -> Iterator[str]:
    """Give a sentence for each of the largest names (of a call, range, operator, kernel) behind the answer."""
    for row in finding.named.head(_MOST_NAME_SENTENCES).to_dict("records"):
        kind = row["kind"]
        name = row["name"]
        # Gaps that no event explains have no name.
        if not name or row["total_ns"] <= _LEAST_SHARE_OF_NAME * finding.time_ns:
            continue
        # The cause of a gap may be a copy: then the copies are counted.
        noun = "gap" if finding.is_idle and kind != "copy" else _NOUN_OF_MOMENT.get(kind, "gap")
        count = count_text(row["count"], noun)
        text = f"{time_text(row['total_ns'])} in {count}: {_BEFORE_NAME.get(kind, '')}{_name_in_sentence(name)}"
        if row["inside"]:
            text += f", mostly inside {_name_in_sentence(row['inside'])}"
        yield text


def against(finding: Finding) -> Iterator[str]:
    """Give the sentences that speak against the answer: doubts first, then remarks about the trace.

    Parameters
    ----------
    finding : Finding
    """
    yield from finding.decision.doubts
    inferred = finding.replay.inferred
    if finding.changes and inferred:
        waits = count_text(inferred, "inferred wait")
        yield f"predictions rest on {waits}: the trace does not record what streams and calls wait for"
    yield from finding.account.trace.meta.notes
