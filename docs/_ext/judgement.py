"""A table of what the verdict said of runs whose truth is known.

``tests/analysis/verdict/test_judgement.py`` found it.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from nsightkit.analysis.verdict import BOTTLENECKS

#: Where the truth comes from.
SOURCES = ("planted", "played", "real")
#: How far the worst prediction for a random program may lie from what was played.
WITHIN = {0.05: "within 5 %", 0.1: "within 10 %"}
#: Answers that name nothing.
_UNDECIDED = ("unknown", "queued", "not-enough-data")
_KINDS = ("right", "undecided", "wrong, medium", "wrong, high")
_FILE = Path(__file__).resolve().parent.parent / "judgement.json"


@dataclasses.dataclass(frozen=True)
class Row:
    """One run: what is true, what the verdict said, how sure it was, and whether its replay was refused."""

    truth: str
    answer: str
    confidence: str
    refused: bool
    source: str = ""

    def as_list(self) -> list[Any]:
        """The row as the file has it."""
        return [self.truth, self.answer, self.confidence, self.refused]

    @property
    def kind(self) -> str:
        """Right; or not, and undecided: an answer that names nothing, or one with low confidence; or wrong."""
        if self.answer == self.truth:
            return "right"
        if self.answer in _UNDECIDED or self.confidence == "low":
            return "undecided"
        return f"wrong, {self.confidence}"


def rows(whole: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Read the answers from what the file holds."""
    return [Row(*row, source) for source in SOURCES for row in whole[source].values()]


def confusion(found: Iterable[Row]) -> Counter[tuple[str, str]]:
    """Count answers by what is true."""
    return Counter((row.truth, row.answer) for row in found)


def _table(head: list[str], body: list[list[str]]) -> nodes.table:
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    group = nodes.tgroup("", *(nodes.colspec(colwidth=width) for width in widths), cols=len(head))
    for kind, lines in ((nodes.thead, [head]), (nodes.tbody, body)):
        group += kind("", *(nodes.row("", *map(_cell, line)) for line in lines))
    return nodes.table("", group)


def _cell(text: str) -> nodes.entry:
    return nodes.entry("", nodes.paragraph("", text))


class Judgement(SphinxDirective):
    """Two tables and a sentence: cause by answer; how often right, by source; random programs."""

    def run(self) -> list[nodes.Node]:
        """See :class:`docutils.parsers.rst.Directive`."""
        self.env.note_dependency(str(_FILE))
        whole = json.loads(_FILE.read_text(encoding="utf-8"))
        found = rows(whole)
        counts = confusion(found)
        body = []
        for truth in BOTTLENECKS:
            said = {name: counts[truth, name] for name in BOTTLENECKS if counts[truth, name]}
            if said:
                others = ", ".join(f"{name} {count}" for name, count in said.items() if name != truth)
                body.append([truth, str(sum(said.values())), str(said.get(truth, 0)), others])
        by_source = []
        for source in SOURCES:
            mine = [row for row in found if row.source == source]
            kinds = Counter(row.kind for row in mine)
            refused = f"{sum(row.refused for row in mine) / len(mine):.0%}"
            by_source.append([source, str(len(mine)), *(str(kinds[kind]) for kind in _KINDS), refused])
        within = Counter(whole["random"].values())
        text = (
            f"Of {within.total()} random programs, the worst prediction of a standard change lies within 5 % of what "
            f"was played for {within['within 5 %']}, and within 10 % for {within['within 10 %']} more; "
            f"{within['refused']} were not predicted, in whole or in part."
        )
        return [
            _table(["true", "runs", "answered so", "answered otherwise"], body),
            _table(["source", "runs", *_KINDS, "replays refused"], by_source),
            nodes.paragraph("", text),
        ]


def setup(app: Sphinx) -> dict[str, bool]:
    """See the extension API of Sphinx."""
    app.add_directive("judgement", Judgement)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
