"""The card of a verdict, as reports, notebooks and the guide show it: card.html lays it out, card.css has its looks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from nsightkit.analysis.core.causes import CAUSES
from nsightkit.analysis.core.text import share_text, time_text
from nsightkit.safe import Json, plain

#: Parts of the time below this share round to nothing.
SMALL = 0.001


class Segment(NamedTuple):
    """A part of the bar, in percent of it."""

    name: str
    colour: str
    left: float
    width: float
    share: str


def html(answer: Json, title: str = "", *, unfolded: bool = False) -> str:
    """Lay out a verdict; :func:`css` has its looks.

    Parameters
    ----------
    answer : mapping
        Of :func:`nsightkit.analysis.verdict.summary`.
    title : str
        What was judged.
    unfolded : bool
        Show evidence and doubts at once.
    """
    return _template().render(answer=answer, title=title, unfolded=unfolded, bar=list(_bar(answer)))


@functools.cache
def css() -> str:
    """Read the card's style sheet."""
    return (files("nsightkit") / "card.css").read_text(encoding="utf-8")


@functools.cache
def _template() -> Template:
    """Read the layout. All text is made printable."""
    return environment("nsightkit", plain).get_template("card.html")


def environment(package: str, finalize: Callable[[Any], object]) -> Environment:
    """Make what reads the layouts of a package; all text is escaped.

    Parameters
    ----------
    package : str
    finalize : callable
        What each value goes through before.
    """
    made = Environment(
        loader=PackageLoader(package, "."),
        autoescape=True,
        finalize=finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"time": time_text, "share": share_text}
    return made


def _bar(answer: Json) -> Iterator[Segment]:
    """Where the time went, as one bar; each moment of each device counts once."""
    left = 0.0
    for part in [*answer["busy"], *answer["candidates"]]:
        cause = CAUSES[part["bottleneck"]]
        share = part["share_of_span"]
        if share >= SMALL:
            yield Segment(cause.name, cause.colour, left, 100 * share, share_text(share))
        left += 100 * share
