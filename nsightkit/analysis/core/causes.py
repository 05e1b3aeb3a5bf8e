"""What can hold a run back: one record for each answer of the verdict, used by rules, words, figures and reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nsightkit.text import read_toml


class Cause(NamedTuple):
    """A cause of idle time, or what fills busy time.

    Attributes
    ----------
    slug : str
        What JSON and the command line call it.
    name : str
        What its part of the time is called in a bar.
    plain_name : str
        What the idle time itself is called, where "idle" is already said.
    noun : str
        What it is called in a sentence.
    takes : str
        How the sentence about its time begins: what takes so much time.
    sentence : str
        What it means, for a person: the first words of the verdict.
    colour : str
        Its colour in every figure.
    advice : str
        What to change first, in one sentence.
    change : str or None
        The change of the replay that takes it away (:mod:`nsightkit.analysis.replay.whatif`).
    """

    slug: str
    name: str
    plain_name: str
    noun: str
    takes: str
    sentence: str
    colour: str
    advice: str
    change: str | None = None


_FILE = read_toml(__file__, "causes")


def _causes(kind: str) -> list[Cause]:
    """List the causes of one kind (idle or busy) that the file beside this one holds."""
    return [Cause(**row) for row in _FILE[kind]]


#: Causes of idle time, in the order in which gaps are judged.
IDLE = _causes("idle")
#: All answers: causes of idle time, then what fills busy time.
CAUSES = {cause.slug: cause for cause in (*IDLE, *_causes("busy"))}


def confidence_text(level: str, ties: Sequence[str]) -> str:
    """Write how sure an answer is, and which other causes would gain about as much.

    Parameters
    ----------
    level : str
        The verdict's: "high", "medium" or "low".
    ties : sequence of str
        Slugs of causes.
    """
    text = f"confidence {level}"
    if ties:
        text += f": removing {' or '.join(CAUSES[slug].noun for slug in ties)} would help about as much"
    return text
