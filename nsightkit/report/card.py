"""The card of a trace: the answer in a sentence, and where the time went, for the template to lay out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from nsightkit.analysis import verdict
from nsightkit.analysis.core.causes import CAUSES
from nsightkit.analysis.core.text import share_text
from nsightkit.analysis.timeline import steps
from nsightkit.trace.model import Trace


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
    gains = {row["change"]: row["speedup"] for row in answer["changes"]}
    whole = "of the steps" if len(steps.windows(trace)) else "between the first and the last GPU operation"
    return Card(answer["headline"], whole, gains.get(verdict.CHANGE_OF.get(bottleneck)), _bar(answer), answer)


def _bar(answer: Mapping[str, Any]) -> list[Segment]:
    """Where the time went, as one bar; each moment of each device counts once."""
    segments = []
    left = 0.0
    for part in [*answer["busy"], *answer["candidates"]]:
        cause, share = CAUSES[part["bottleneck"]], part["share_of_span"]
        segments.append(Segment(cause.name, cause.colour, left, 100 * share, share_text(share)))
        left += 100 * share
    return segments
