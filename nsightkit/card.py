"""The card of a verdict, as reports, notebooks and the guide show it: card.html lays it out, card.css has its looks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from nsightkit.analysis.core.causes import CAUSES, confidence_text
from nsightkit.errors import plain
from nsightkit.text import Json, share_text, time_text

#: Smaller shares of the time are not drawn: a segment of the bar would be thinner than a pixel.
SMALLEST_SHARE = 0.001


class Segment(NamedTuple):
    """A coloured part of the bar; `left` and `width` are percent of the bar, `share` is text."""

    name: str
    colour: str
    left: float
    width: float
    share: str


def html(answer: Json, title: str = "", *, unfolded: bool = False) -> str:
    """Write a verdict as HTML; :func:`css` is its style sheet.

    Parameters
    ----------
    answer : mapping
        From :func:`nsightkit.analysis.verdict.summary`.
    title : str
        What was judged.
    unfolded : bool
        Show evidence and doubts at once.
    """
    confidence = confidence_text(answer["confidence"], answer["ties"])
    return _card_template().render(
        answer=answer, confidence=confidence, title=title, unfolded=unfolded, bar=list(_bar_segments(answer))
    )


@functools.cache
def css() -> str:
    """Read the card's style sheet."""
    return (files("nsightkit") / "card.css").read_text(encoding="utf-8")


@functools.cache
def _card_template() -> Template:
    """Load card.html as a template that makes all text printable."""
    return jinja_environment("nsightkit", plain).get_template("card.html")


def jinja_environment(package: str, finalize: Callable[[Any], object]) -> Environment:
    """Make the Jinja environment of a package's templates; all text is escaped.

    Parameters
    ----------
    package : str
        Its folder holds the templates.
    finalize : callable
        Applied to each value before it is escaped.
    """
    jinja = Environment(
        loader=PackageLoader(package, "."),
        autoescape=True,
        finalize=finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters |= {"time": time_text, "share": share_text}
    return jinja


def _bar_segments(answer: Json) -> Iterator[Segment]:
    """Divide the time into segments of one bar: what kept the GPU busy, then what time was lost to.

    Each moment of each device counts once, so the shares sum to 1 at most.
    """
    left_pct = 0.0
    for part in [*answer["busy"], *answer["candidates"]]:
        cause = CAUSES[part["bottleneck"]]
        share = part["share_of_span"]
        if share >= SMALLEST_SHARE:
            yield Segment(cause.name, cause.colour, left_pct, 100 * share, share_text(share))
        left_pct += 100 * share  # also of a part too small to draw: the next begins where it ends
