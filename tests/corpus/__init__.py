"""The corpus: traces with a known cause, and what nsightkit answers about them.

Three sources: ``planted`` (synthetic training loops with one fault), ``played`` (simulated programs, whose truth is
what they gain when they are simulated again), and ``real`` (``labels.toml``, judged by reading the raw rows).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from synthetic import simulated_programs
from synthetic.planted import BOTTLENECK_OF, training
from synthetic.simulator import play

import nsightkit
from nsightkit.analysis import verdict
from nsightkit.analysis.timeline import gaps

ROOT = Path(__file__).resolve().parents[2]
#: Seed of the played programs.
SEED = 1
#: Answers that name no cause.
UNDECIDED = ("unknown", "queued", "not-enough-data")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A trace with a known cause.

    Parameters
    ----------
    source, name : str
    truth : str
        The bottleneck.
    honest : tuple of str
        Other answers that are right.
    write : callable
        Takes a scratch folder; returns the path of the trace, or None where the trace is not at hand.
    """

    source: str
    name: str
    truth: str
    honest: tuple[str, ...]
    write: Callable[[Path], Path | None]


def planted() -> list[Entry]:
    """List the synthetic loops, each with two seeds and sizes."""
    entries = []
    for fault, truth in BOTTLENECK_OF.items():
        for seed in (0, 1):
            size = {"steps": 6 + 3 * seed, "layers": 3 + 2 * seed, "scale": 1.0 - 0.3 * seed}

            def write(folder: Path, fault: Any = fault, seed: int = seed, size: Any = size) -> Path:
                training(folder / "t.sqlite", fault, seed=seed, **size)
                return folder / "t.sqlite"

            entries.append(Entry("planted", f"{fault or 'without a fault'}, seed {seed}", truth, (), write))
    return entries


def played() -> list[Entry]:
    """List the simulated programs."""
    entries = []
    for program in simulated_programs.PROGRAMS.values():

        def write(folder: Path, program: Any = program) -> Path:
            return play(program, SEED).write(folder / "played.sqlite")

        entries.append(Entry("played", program.name, program.bottleneck, (), write))
    return entries


def real() -> list[Entry]:
    """List the real traces, those that are not at hand included."""
    labels = tomllib.loads((ROOT / "tests" / "corpus" / "labels.toml").read_text(encoding="utf-8"))["trace"]
    entries = []
    for label in labels:
        name = label["file"].strip("*")
        write = functools.partial(_found, label["file"])
        entries.append(Entry("real", name, label["truth"], tuple(label.get("honest", ())), write))
    return entries


def _found(pattern: str, scratch: Path) -> Path | None:
    """Look a real trace up: committed, shared, or public in a folder that NSIGHTKIT_PUBLIC names."""
    shared = Path(os.environ.get("NSIGHTKIT_SHARED") or ROOT.parent / "shared")
    folders = [ROOT / "docs" / "cases", shared / "cases", shared / "traces"]
    if os.environ.get("NSIGHTKIT_PUBLIC"):
        folders.append(Path(os.environ["NSIGHTKIT_PUBLIC"]))
    for folder in folders:
        paths = sorted(folder.glob(f"{pattern}.*"))
        if paths:
            return paths[0]
    return None


@dataclasses.dataclass(frozen=True)
class Answer:
    """What nsightkit answers about a trace.

    Parameters
    ----------
    bottleneck, confidence : str
    is_refused : bool
        The replay predicts nothing.
    gaps : dict of str to float
        Share of the span, by cause.
    gains : dict of str to float
        Predicted speedup, by change.
    """

    bottleneck: str
    confidence: str
    is_refused: bool
    gaps: dict[str, float]
    gains: dict[str, float]


def answer(path: Path) -> Answer:
    """Ask about a trace.

    Parameters
    ----------
    path : Path
    """
    trace = nsightkit.load(path, cache=False)
    result = verdict.summary(trace)
    causes = gaps.summary(trace)
    shares = dict(zip(causes["cause"], causes["share_of_span"].astype(float).round(4), strict=True))
    gains = {}
    for change in result["changes"]:
        if change["speedup"] is not None:
            gains[change["change"]] = round(change["speedup"], 4)
    is_refused = any(doubt.startswith("nothing is predicted") for doubt in result["against"])
    return Answer(result["bottleneck"], result["confidence"], is_refused, shares, gains)


@functools.cache
def answer_of(entry: Entry) -> Answer | None:
    """Ask about a trace of the corpus, once; None where it is not at hand.

    Parameters
    ----------
    entry : Entry
    """
    with tempfile.TemporaryDirectory() as folder:
        path = entry.write(Path(folder))
        if path is None:
            return None
        return answer(path)


def judge(entry: Entry, bottleneck: str, confidence: str) -> str:
    """Judge an answer.

    Parameters
    ----------
    entry : Entry
    bottleneck, confidence : str

    Returns
    -------
    {"right", "undecided", "wrong, medium", "wrong, high"}
        An answer that names no cause, or a wrong one with low confidence, is undecided.
    """
    if bottleneck == entry.truth or bottleneck in entry.honest:
        return "right"
    if bottleneck in UNDECIDED or confidence == "low":
        return "undecided"
    return f"wrong, {confidence}"
