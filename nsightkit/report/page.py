"""The page of a report: what it opens with, what lies around its tables, and how it becomes a file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup

from nsightkit import card, questions
from nsightkit.analysis.timeline import gaps
from nsightkit.errors import AnyPath, UsageError, plain
from nsightkit.plots.lanes import RowLimits, all_rows
from nsightkit.plots.packing import pack, program, short
from nsightkit.report.sides import Side, sides_of
from nsightkit.report.tables import SECTIONS, Listing, Section, listings
from nsightkit.table import column_of
from nsightkit.trace.files import is_same, replacing, require_free
from nsightkit.trace.model import Trace
from nsightkit.version import __version__

#: Of the timeline's events: with the tables, what a mail server lets through unasked, and a browser opens at once.
_TIMELINE_BYTES = 3_000_000
#: Of the timeline of each trace; it is large, but a page scrolls.
_ROW_LIMITS = RowLimits(levels=12, streams=32, threads=24)


def write(traces: Mapping[str, Trace], path: AnyPath, *, selection: str = "", overwrite: bool = False) -> int:
    """Write a report on one or more traces as an HTML file.

    Parameters
    ----------
    traces : mapping of str to Trace
        What to show, by label.
    path : path-like
        The file appears only when it is whole.
    selection : str, optional
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
    for trace in traces.values():
        if trace.path is not None and is_same(path, Path(trace.path)):
            raise UsageError(f"{path} is a trace itself; give another name for the report")
    require_free(path, overwrite=overwrite)
    # "replace": a name in a trace may hold half of a surrogate pair, which UTF-8 cannot encode.
    page = html(traces, selection=selection).encode("utf-8", "replace")
    with replacing(path) as file:
        file.write(page)
    return len(page)


def html(traces: Mapping[str, Trace], *, selection: str = "") -> str:
    """Make a report on one or more traces.

    Parameters
    ----------
    traces : mapping of str to Trace
        What to show, by label; several lie side by side.
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
    if not traces:
        raise UsageError("a report needs a trace")
    sides = sides_of(traces)
    title = f"GPU profile: {sides[0].label}"
    if len(sides) > 1:
        title = f"GPU profiles: {len(sides)} traces side by side"
    rows = {side.label: all_rows(side.trace, _ROW_LIMITS, gaps.causes(side.trace)) for side in sides}
    timeline = pack(rows, title="Timeline", most_bytes=_TIMELINE_BYTES)
    # All text is escaped but our own style and scripts, and the timeline, which is HTML already.
    environment = card.jinja_environment("nsightkit.report", _shown_text)
    environment.filters |= {"column": column_of, "line": plain, "digest": _hash_for_policy}
    return environment.get_template("page.html").render(
        title=title,
        selection=selection,
        sides=sides,
        answers=[_verdict_and_card(side) for side in sides],
        facts=[questions.summary(side.trace).facts() for side in sides],
        sections=_sections(sides),
        timeline=timeline.html(script=False),  # the script is `viewer`, which the page's policy allows by its hash
        style=card.css() + _asset("report.css"),
        script=_asset("report.js"),
        viewer=program(),
        version=__version__,
    )


def _verdict_and_card(side: Side) -> tuple[Mapping[str, Any], Markup]:
    """The verdict on a trace, and its card as HTML."""
    verdict = questions.verdict(side.trace)
    return verdict, Markup(card.html(verdict, unfolded=True))  # noqa: S704 - the card escapes what it shows


def _sections(sides: Sequence[Side]) -> list[tuple[Section, list[Listing]]]:
    """The sections that have a table, each with its tables; a trace that did not record what one needs has none."""
    sections = []
    for section in SECTIONS:
        tables = listings(section, [side for side in sides if side.trace.recorded(section.needs)])
        if tables:
            sections.append((section, tables))
    return sections


def _asset(name: str) -> str:
    """The text of a file of this package: style or script of the page."""
    return (files("nsightkit.report") / name).read_text(encoding="utf-8")


def _shown_text(value: object) -> object:
    """Make a value that a template writes fit to be shown: text from a trace on one line; HTML stays as it is."""
    if isinstance(value, Markup):
        return value
    return short(str(value))


def _hash_for_policy(text: str) -> str:
    """The SHA-256 of a style or a script, by which the page's content security policy allows it."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
