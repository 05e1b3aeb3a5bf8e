"""The traces of a report: cleaned, each with a label, a letter, and a line on where it is from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from nsightkit.questions import gpus_of
from nsightkit.safe import plain
from nsightkit.trace.clean import clean, clean_text
from nsightkit.trace.model import Trace

_ENDINGS = re.compile(r"(\.pt)?(\.trace)?(\.json(\.gz)?|\.sqlite|\.nsys-rep|\.parquet|_pqtdir)$")
#: Characters of a label.
_LONGEST = 80


class Side(NamedTuple):
    """One trace of a report."""

    number: int
    label: str
    letter: str  # empty where there is one trace; a file's name is wider than most columns
    source: str
    trace: Trace


def labelled(traces: Iterable[Trace]) -> dict[str, Trace]:
    """Label each trace with its file's name, without the endings of trace formats.

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
    number = 1
    free = name
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
    sides: dict[str, Side] = {}
    for number, (name, trace) in enumerate(traces.items()):
        label = plain(clean_text(trace, name))[:_LONGEST] or f"trace {number + 1}"
        label = _free(label, sides)
        letter = ""
        if len(traces) > 1:
            letter = chr(ord("A") + number) if number < 26 else str(number + 1)
        cleaned = clean(trace)
        sides[label] = Side(number, label, letter, _source(cleaned), cleaned)
    return list(sides.values())


def _source(trace: Trace) -> str:
    meta = trace.meta
    cards = " and ".join(gpus_of(trace)) or "GPU not named"
    missing = ", ".join(meta.missing) or "nothing"
    return f"{cards} · {meta.tool} {meta.tool_version or ''} · not recorded: {missing}"
