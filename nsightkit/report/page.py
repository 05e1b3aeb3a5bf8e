"""The page of a report: what it opens with, what lies around its tables, and how it becomes a file."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from nsightkit.analysis.core.text import time_text
from nsightkit.analysis.timeline import gaps, overview, steps
from nsightkit.errors import UsageError
from nsightkit.plots.lanes import Most, all_lanes
from nsightkit.plots.packing import pack, program
from nsightkit.report.card import card_of
from nsightkit.report.sides import Side, cards, labelled, missing, sides_of, tool
from nsightkit.report.tables import SECTIONS, Listing, Section, listings
from nsightkit.safe import plain
from nsightkit.table import column_of
from nsightkit.trace.files import replacing
from nsightkit.trace.model import Trace
from nsightkit.trace.output import require_free
from nsightkit.version import __version__

#: What a mail server lets through unasked, and a browser opens at once.
_MOST_BYTES = 4_900_000
#: The timeline's static figures.
_FIGURES_BYTES = 150_000
#: However much the tables take, a timeline has this.
_LEAST_TIMELINE = 1_000_000
#: Rows of the timeline, of all traces together, and of each at least.
_MOST_ROWS, _LEAST_ROWS = Most(levels=12, streams=32, threads=24), Most(levels=3, streams=4, threads=3)
#: Gaps that the timeline draws, the longest ones; each launch of a kernel leaves a short one.
_MOST_GAPS = 20_000
#: Longest text of a trace in one place; kernels fused by a compiler have been seen with 3,000 characters.
_LONGEST = 400


def write(
    traces: Trace | Mapping[str, Trace],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    selection: str = "",
    overwrite: bool = False,
) -> int:
    """Write a report.

    Parameters
    ----------
    traces : Trace or mapping of str to Trace
        What to show, by label.
    path : path-like
        The file appears only when it is whole.
    title, selection : str, optional
        As in :func:`html`.
    overwrite : bool
        Replace an existing file, unless it is one of the traces.

    Returns
    -------
    int
        Size of the file in bytes.

    Raises
    ------
    UsageError
        No trace, or `path` is one of the traces, or is there already, or cannot be written.
    """
    path = Path(path)
    for trace in _by_label(traces).values():
        if trace.path is not None and path.exists() and Path(trace.path).exists() and path.samefile(trace.path):
            raise UsageError(f"{path} is a trace itself; give another name for the report")
    require_free(path, overwrite=overwrite)
    page = html(traces, title=title, selection=selection).encode("utf-8", "replace")
    with replacing(path) as file:
        file.write(page)
    return len(page)


def html(traces: Trace | Mapping[str, Trace], *, title: str | None = None, selection: str = "") -> str:
    """Make a report of one or more traces.

    Parameters
    ----------
    traces : Trace or mapping of str to Trace
        What to show, by label; several lie side by side.
    title : str, optional
        Default: the label.
    selection : str, optional
        What was chosen of the traces, for a reader.

    Returns
    -------
    str
        A whole HTML document. It holds no secret that the traces hold (:func:`nsightkit.trace.clean.clean`).

    Raises
    ------
    UsageError
        No trace.
    """
    sides = sides_of(_by_label(traces))
    if not title:
        title = f"GPU profile: {sides[0].label}"
        if len(sides) > 1:
            title = f"GPU profiles: {len(sides)} traces side by side"
    context = {
        "title": title,
        "selection": selection,
        "sides": sides,
        "cards": [card_of(side.trace) for side in sides],
        "facts": [_facts(side.trace) for side in sides],
        "sections": _sections(sides),
        "version": __version__,
    }
    rest = len(_rendered(context).encode("utf-8", "replace"))
    return _rendered(context, _timeline(sides, max(_MOST_BYTES - _FIGURES_BYTES - rest, _LEAST_TIMELINE)))


def _by_label(traces: Trace | Mapping[str, Trace]) -> Mapping[str, Trace]:
    by_label = labelled([traces]) if isinstance(traces, Trace) else traces
    if not by_label:
        raise UsageError("a report needs a trace")
    return by_label


def _sections(sides: Sequence[Side]) -> list[tuple[Section, list[Listing], list[Side]]]:
    """The sections that the traces hold something of, with their tables and the traces that lack them."""
    sections = []
    for section in SECTIONS:
        recorded = [side for side in sides if side.trace.recorded(section.needs)]
        absent = [side for side in sides if side not in recorded]
        tables = listings(section, recorded, len(sides) > 1)
        if recorded and (tables or section.empty):
            sections.append((section, tables, absent))
    return sections


# ---------------------------------------------------------------- the summary


def _facts(trace: Trace) -> dict[str, str]:
    """What the summary lists, in words."""
    summary = overview.summary(trace)
    facts = {"GPU": cards(trace), "recorded by": tool(trace)}
    facts["span of GPU work"] = _amount(summary["span_ns"])
    facts["GPU busy"] = _amount(summary["busy_ns"], summary["span_ns"])
    facts["GPU idle"] = _amount(summary["idle_ns"], summary["span_ns"])
    facts["GPU idle in the steps"] = "no steps are named"
    if summary["window_ns"] is not None:
        process = int(steps.find(trace)["process"].iloc[0])
        whole_ns = summary["window_ns"] * len(steps.devices(trace, process))
        facts["GPU idle in the steps"] = _amount(summary["window_idle_ns"], whole_ns)
    facts["kernels"] = "not recorded"
    if summary["kernel_count"] is not None:
        facts["kernels"] = f"{summary['kernel_count']:,}, together {time_text(summary['kernel_ns'])}"
    facts["copies and memsets, summed"] = _amount(summary["memop_ns"])
    facts["CUDA graphs, summed"] = _amount(summary["graph_ns"])
    facts["captured before / after"] = f"{time_text(summary['lead_ns'])} / {time_text(summary['tail_ns'])}"
    facts["not recorded"] = missing(trace)
    facts["remarks"] = " ".join(trace.meta.notes) or "none"
    return facts


def _amount(time_ns: int | None, whole_ns: int | None = None) -> str:
    if time_ns is None:
        return "not recorded"
    share = f" ({100 * time_ns / whole_ns:.1f} %)" if whole_ns else ""
    return time_text(time_ns) + share


# ---------------------------------------------------------------- the timeline


def _timeline(sides: Sequence[Side], most_bytes: int) -> str:
    rows = [max(most // len(sides), least) for most, least in zip(_MOST_ROWS, _LEAST_ROWS, strict=True)]
    lanes = {side.label: all_lanes(side.trace, Most(*rows), _drawn_gaps(side.trace)) for side in sides}
    return pack(lanes, title="Timeline", most_bytes=most_bytes).html(script=False)


def _drawn_gaps(trace: Trace) -> pd.DataFrame:
    idle = gaps.causes(trace)
    longest = (idle["end_ns"] - idle["start_ns"]).nlargest(_MOST_GAPS)
    return idle.loc[longest.index.sort_values()]


# ---------------------------------------------------------------- HTML


def _rendered(context: Mapping[str, Any], timeline: str = "") -> str:
    """Lay a page out. All text is escaped but our own style and scripts, and the timeline, which is HTML already."""
    environment = Environment(
        loader=PackageLoader("nsightkit.report", "."),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"heading": _heading, "is_text": _is_text, "time": time_text, "digest": _digest}
    folder = files("nsightkit.report")
    style = (folder / "report.css").read_text(encoding="utf-8")
    script = (folder / "report.js").read_text(encoding="utf-8")
    template = environment.get_template("page.html")
    return template.render(**context, style=style, script=script, viewer=program(), timeline=timeline)


def _shown(value: object) -> object:
    """Make text from a trace fit to be shown: on one line, without what cannot be seen, not endless."""
    if isinstance(value, Markup):
        return value
    text = str(value)
    line = plain(text[: 4 * _LONGEST])
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"


def _heading(column: str) -> str:
    return column_of(column).heading


def _is_text(column: str) -> bool:
    return column_of(column).is_text


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
