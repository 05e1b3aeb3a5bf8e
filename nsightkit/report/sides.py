"""The traces of a report: cleaned, each with a label, a letter, and a line on where it is from."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from nsightkit.safe import plain
from nsightkit.trace.clean import clean, clean_text
from nsightkit.trace.model import Trace

_ENDINGS = re.compile(r"(\.pt)?(\.trace)?(\.json(\.gz)?|\.sqlite|\.nsys-rep|\.parquet|_pqtdir)$")
#: Characters of a label.
_LONGEST = 80


@dataclasses.dataclass(frozen=True, eq=False)
class Side:
    """One trace of a report."""

    number: int
    label: str
    letter: str  # empty where there is one trace; a file's name is wider than most columns
    source: str
    trace: Trace


def labelled(traces: Iterable[Trace]) -> dict[str, Trace]:
    """Call each trace by its file, without the endings that say what kind of file it is.

    Parameters
    ----------
    traces : iterable of Trace

    Returns
    -------
    dict of str to Trace
    """
    by_label: dict[str, Trace] = {}
    for trace in traces:
        name = _ENDINGS.sub("", Path(trace.path or "trace").name)
        by_label[_free(name, by_label)] = trace
    return by_label


def _free(name: str, taken: Iterable[str]) -> str:
    """Number a name where it is taken."""
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name} ({number})"
    return free


def sides_of(traces: Mapping[str, Trace]) -> list[Side]:
    """Clean traces and their labels, and give each a letter where there are several.

    Parameters
    ----------
    traces : mapping of str to Trace
    """
    sides: list[Side] = []
    for number, (name, trace) in enumerate(traces.items()):
        label = plain(clean_text(trace, name))[:_LONGEST] or f"trace {number + 1}"
        letter = ""
        if len(traces) > 1:
            letter = chr(ord("A") + number) if number < 26 else str(number + 1)
        cleaned = clean(trace)
        sides.append(Side(number, _free(label, [side.label for side in sides]), letter, _source(cleaned), cleaned))
    return sides


def _source(trace: Trace) -> str:
    absent = missing(trace)
    if trace.meta.missing:
        absent = f"not recorded: {absent}"
    return f"{cards(trace)} · {tool(trace)} · {absent}"


def cards(trace: Trace) -> str:
    """Name the GPUs of a trace, and how many there are.

    Parameters
    ----------
    trace : Trace
    """
    counts = Counter(gpu.name or "not named" for gpu in trace.meta.gpus)
    names = [name if count == 1 else f"{count} x {name}" for name, count in counts.items()]
    return " and ".join(names) or "GPU not named"


def tool(trace: Trace) -> str:
    """Name the tool that recorded a trace, with its version.

    Parameters
    ----------
    trace : Trace
    """
    return f"{trace.meta.tool} {trace.meta.tool_version or ''}".strip()


def missing(trace: Trace) -> str:
    """Name the tables that were not recorded.

    Parameters
    ----------
    trace : Trace
    """
    return ", ".join(trace.meta.missing) or "all kinds of events were recorded"
