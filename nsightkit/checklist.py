"""The one-change discipline as a list to work through; :doc:`/guide/one_change` gives the reasons."""

from __future__ import annotations

import dataclasses

__all__ = ["CHECKLIST", "Item"]


@dataclasses.dataclass(frozen=True)
class Item:
    """One point of the checklist.

    Parameters
    ----------
    phase : {"before", "change", "after"}
    do : str
        What to do, as a sentence.
    why : str
        What goes wrong without it.
    command : str, optional
        A command that does it or helps.
    """

    phase: str
    do: str
    why: str
    command: str | None = None


CHECKLIST: tuple[Item, ...] = (
    Item(
        "before",
        "Write the question down, with a number and its unit.",
        "Without one every result is a success.",
    ),
    Item(
        "before",
        "Make the run repeatable: the same data, shapes, seed, card, software, and nobody else on the machine.",
        "Two things that changed cannot be told apart afterwards.",
        "nsightkit doctor",
    ),
    Item(
        "before",
        "Leave the warm-up out, and time enough steps without a profiler to know their spread.",
        "The first steps choose algorithms and fill caches; a profiler slows what it watches.",
        "nsightkit bench --warmup 10 --steps 50 --out-json before.json",
    ),
    Item(
        "before",
        "Capture a few steady steps, and look at what was not recorded.",
        "An empty table can mean that nothing happened, or that nobody looked.",
        "nsightkit capture nsys -o before -- python train.py",
    ),
    Item(
        "before",
        "Name the bottleneck, with what speaks for it and against it.",
        "Making anything else faster changes nothing.",
        "nsightkit verdict before.sqlite",
    ),
    Item(
        "before",
        "Write the prediction down: what will change, by how much at the most, and what will not.",
        "A result that could not have been wrong explains nothing.",
        "nsightkit whatif before.sqlite",
    ),
    Item(
        "change",
        "Change one thing, and commit it by itself.",
        "Of two changes one may help and the other hurt.",
        "git commit",
    ),
    Item(
        "change",
        "Check that the results are still right.",
        "The fastest way to do a thing is not to do it.",
    ),
    Item(
        "after",
        "Measure again in the same way, and take turns: before, after, before, after.",
        "Clocks drift with temperature, and neighbours come and go.",
        "nsightkit bench --warmup 10 --steps 50 --out-json after.json",
    ),
    Item(
        "after",
        "Capture again, and compare the two traces.",
        "The time may have moved instead of gone, and the bottleneck with it.",
        "nsightkit diff before.sqlite after.sqlite",
    ),
    Item(
        "after",
        "Hold the result against the prediction and against the noise.",
        "A gain smaller than the spread between two equal runs is not a gain yet.",
    ),
    Item(
        "after",
        "Keep it or take it back, and write down which and why, also where nothing came out.",
        "Somebody will have the same idea next month.",
    ),
    Item(
        "after",
        "Put a gate where it could come undone.",
        "A speed that nobody checks is lost by the next release.",
        "nsightkit check after.json --baseline baseline.json --update",
    ),
)
