"""The traces of a report: cleaned, each with a label, a letter, and a line on where it is from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from nsightkit.errors import plain
from nsightkit.questions import gpus_of
from nsightkit.trace.clean import clean, clean_text
from nsightkit.trace.model import Trace, table_words

_ENDINGS = re.compile(r"(\.pt)?(\.trace)?(\.json(\.gz)?|\.sqlite|\.nsys-rep|\.parquet|_pqtdir)$")
#: Characters of a label.
_LONGEST_LABEL = 80


class Side(NamedTuple):
    """One trace of a report."""

    number: int  # from 0
    label: str
    letter: str  # heads its columns, since a file's name is wider than most; empty where there is one trace
    source: str  # card, tool and what was not recorded, in a line
    trace: Trace  # cleaned


def labelled(traces: Iterable[Trace]) -> dict[str, Trace]:
    """Label each trace of a report with its file's name, without the endings of trace formats.

    Files of the same name, in different folders, are numbered: "run", "run (2)".

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
        by_label[_unused_label(name, by_label)] = trace
    return by_label


def _unused_label(name: str, used: Iterable[str]) -> str:
    """Give a name, with a number where it is used already: "run", "run (2)"."""
    number = 1
    label = name
    while label in used:
        number += 1
        label = f"{name} ({number})"
    return label


def sides_of(traces: Mapping[str, Trace]) -> list[Side]:
    """Clean traces and their labels, and give each a letter where there are several.

    Parameters
    ----------
    traces : mapping of str to Trace
        By label, in the order in which they are shown.

    Returns
    -------
    list of Side
    """
    sides: dict[str, Side] = {}
    for number, (name, trace) in enumerate(traces.items()):
        label = plain(clean_text(trace, name))[:_LONGEST_LABEL] or f"trace {number + 1}"
        label = _unused_label(label, sides)
        letter = ""
        if len(traces) > 1:
            letter = chr(ord("A") + number) if number < 26 else str(number + 1)
        cleaned = clean(trace)
        sides[label] = Side(number, label, letter, _source_line(cleaned), cleaned)
    return list(sides.values())


def _source_line(trace: Trace) -> str:
    """Write on which GPU and with which tool a trace was captured, and what it lacks."""
    meta = trace.meta
    cards = " and ".join(gpus_of(trace)) or "GPU not named"
    missing = ", ".join(table_words(meta.missing)) or "nothing"
    return f"{cards} · {meta.tool} {meta.tool_version or ''} · not recorded: {missing}"
