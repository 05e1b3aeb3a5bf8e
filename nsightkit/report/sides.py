"""The traces of a report: cleaned, each with a label, a letter, and a line on where it is from."""

from __future__ import annotations

import dataclasses
import re
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
    names = list(dict.fromkeys(gpu.name for gpu in trace.meta.gpus if gpu.name))
    devices = len({gpu.device for gpu in trace.meta.gpus})
    cards = " and ".join(names) or "GPU not named"
    if devices > 1 and len(names) == 1:
        cards = f"{devices} x {cards}"
    absent = missing(trace)
    if trace.meta.missing:
        absent = f"not recorded: {absent}"
    return f"{cards} · {tool(trace)} · {absent}"


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
