"""The card of a trace: the answer in a sentence, and where the time went, for the template to lay out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from nsightkit.analysis import verdict
from nsightkit.analysis.timeline import steps
from nsightkit.plots.looks import CATEGORY_COLOURS, CAUSE_COLOURS, DARK_GREY
from nsightkit.trace.model import Trace

_NOT_ENOUGH = "not-enough-data"

#: What an answer says, before its evidence.
SAID = {
    "profiler": "The profiler itself took the time",
    "start-up": "Work that happens once held the GPU up: loading code, compiling, capturing graphs",
    "queued": "The GPU had work in its queue and did not start it, and the trace does not say why",
    "input-pipeline": "The GPU waited for data",
    "synchronization": "The CPU waited for the GPU instead of giving it more work",
    "memory-transfer": "Kernels waited for copies",
    "launch-overhead": "The GPU waited for the next launch",
    "cpu-work": "Other work on the CPU kept the GPU waiting",
    "unknown": "The GPU was idle, and the trace does not say why",
    "compute-bound": "The GPU was busy with arithmetic",
    "memory-bound": "The GPU was busy moving data in its memory",
    _NOT_ENOUGH: "The trace does not say what held the run back",
    "communication": "The GPUs were busy exchanging data",
    "imbalance": "GPUs waited for slower ones",
}
#: What a part of the bar is called where it is not idle time.
PARTS = {
    "compute-bound": "busy: arithmetic",
    "memory-bound": "busy: memory",
    _NOT_ENOUGH: "busy: other kernels",
    "communication": "busy: communication",
    "imbalance": "waiting for slower GPUs",
    "memory-transfer": "copies that nothing overlaps",
}
COLOURS = {
    **CAUSE_COLOURS,
    "compute-bound": "#1d5c93",
    "memory-bound": "#5f8596",
    _NOT_ENOUGH: DARK_GREY,
    "communication": CATEGORY_COLOURS["communication"],
    "imbalance": "#7a6fd0",
}


class Segment(NamedTuple):
    """A part of the bar, in percent of it."""

    name: str
    colour: str
    left: float
    width: float
    share: str


class Card(NamedTuple):
    """A trace's answer."""

    headline: str
    whole: str  # what the shares are of
    gain: float | None  # of the change that removes the bottleneck
    bar: list[Segment]
    answer: Mapping[str, Any]


def card_of(trace: Trace) -> Card:
    """Ask for the verdict on a trace.

    Parameters
    ----------
    trace : Trace
    """
    answer = verdict.summary(trace)
    bottleneck = answer["bottleneck"]
    headline = SAID.get(bottleneck, bottleneck)
    if answer["share_of_span"] is not None:
        headline += f", {percent(answer['share_of_span'])} of the time"
    gains = {row["change"]: row["speedup"] for row in answer["changes"]}
    whole = "of the steps" if len(steps.windows(trace)) else "between the first and the last GPU operation"
    return Card(headline, whole, gains.get(verdict.CHANGE_OF.get(bottleneck)), _bar(answer), answer)


def percent(share: float) -> str:
    """Write a share.

    Parameters
    ----------
    share : float
    """
    return f"{100 * share:.1f} %" if share >= 0.001 else "< 0.1 %"


def _bar(answer: Mapping[str, Any]) -> list[Segment]:
    """Where the time went, as one bar; each moment of each device counts once."""
    segments = []
    left = 0.0
    for part in [*answer["busy"], *answer["candidates"]]:
        name, share = part["bottleneck"], part["share_of_span"]
        label = PARTS.get(name, f"idle: {name}")
        segments.append(Segment(label, COLOURS.get(name, DARK_GREY), left, 100 * share, percent(share)))
        left += 100 * share
    return segments
