"""The order in which parts are recorded: the page that is complete soonest comes first, then the next.

Time on a GPU is short. A page of which a part is missing shows a smoke run, so what counts is how many pages are
complete when the time is up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

from nsightkit.investigations.parts import INVESTIGATIONS, Part

__all__ = ["START_S", "TOGETHER", "Step", "completed", "needs", "order"]

#: Investigations whose parts are measured one after the other in one process.
TOGETHER = ("ceilings",)
#: What a process costs besides what its part takes.
START_S = 1.0
#: Every investigation has a page, which reads all its parts. These pages read some of the ceilings as well.
_CEILINGS = {
    "roofline": ("before", "fp32", "copy"),
    "ladder": ("before", "layer", "fp8", "fp32", "copy", "triad", "read"),
    "decode": ("before", "fp32", "copy", "triad", "read"),
    "limiters": ("before", "fp32", "copy"),
}


@dataclasses.dataclass(frozen=True)
class Step:
    """A part in the order in which parts are recorded.

    Parameters
    ----------
    part : Part
    seconds, total_s : float
        What it is expected to take, and all until its end.
    pages : tuple of str
        The investigations whose pages are complete with it.
    """

    part: Part
    seconds: float
    total_s: float
    pages: tuple[str, ...]


def needs(page: str) -> list[Part]:
    """List the parts that a page reads, in the order in which to measure them.

    Parameters
    ----------
    page : str
        The investigation that the page is about.
    """
    own = sorted(INVESTIGATIONS[page].values(), key=lambda part: part.seconds)
    return [*(INVESTIGATIONS["ceilings"][ceiling] for ceiling in _CEILINGS.get(page, ())), *own]


def completed(have: Collection[Part], last: Part) -> tuple[str, ...]:
    """Say which pages are complete since the last part was recorded.

    Parameters
    ----------
    have : collection of Part
        All parts that are recorded.
    last : Part
    """
    return tuple(page for page in INVESTIGATIONS if last in needs(page) and all(part in have for part in needs(page)))


def order(
    todo: Collection[Part], have: Collection[Part], seconds: Callable[[Part], float], failed: Collection[Part] = ()
) -> list[Step]:
    """Plan what is still to be recorded.

    The next page is always the one that takes the least time for what it still lacks; a part that several pages read is
    recorded with the first of them. What completes no page comes after what does, and what has failed before, last.

    Parameters
    ----------
    todo : collection of Part
    have : collection of Part
        Parts that are recorded.
    seconds : callable
        What a part is expected to take.
    failed : collection of Part

    Returns
    -------
    list of Step
    """
    waiting = set(todo) - set(failed)
    there, planned = set(have), []

    def cost(page: str) -> tuple[bool, float]:
        lacking = [part for part in needs(page) if part not in there]
        alone = [START_S * (part.investigation not in TOGETHER) for part in lacking]
        expected = [seconds(part) for part in lacking if part in waiting]
        return len(expected) < len(lacking), sum(expected) + sum(alone)

    pages = list(INVESTIGATIONS)
    while pages:
        pages.remove(page := min(pages, key=cost))
        new = [part for part in needs(page) if part in waiting - there]
        planned += new
        there.update(new)
    steps, total, there = [], 0.0, set(have)
    for part in [*planned, *(part for part in todo if part in failed)]:
        total += seconds(part) + START_S * (part.investigation not in TOGETHER)
        there.add(part)
        steps.append(Step(part, seconds(part), total, completed(there, part)))
    return steps
