"""How often the verdict is right about runs with a known cause (tools/confusion.py)."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

_FILE = Path(__file__).resolve().parent.parent / "judgement.json"
#: What the file calls each kind of run, and what the page does.
_SOURCES = {"real": "real", "played": "simulated", "planted": "synthetic"}
#: Answers that name no cause.
_NOTHING = ["unknown", "queued", "not-enough-data"]
#: What an answer can be; the first that fits counts.
_KINDS = [
    "right",
    "no cause named",
    "another cause, low confidence",
    "accepted second cause",
    "another cause, higher confidence",
]
_COLUMNS = ["truth", "answer", "confidence", "is_refused", "kind"]


def runs(document: dict[str, Any]) -> pd.DataFrame:
    """Read the runs: a row each, with its source.

    Parameters
    ----------
    document : dict
        What the file holds.
    """
    frames = []
    for source, name in _SOURCES.items():
        rows = pd.DataFrame(list(document[source].values()), columns=_COLUMNS)
        frames.append(rows.assign(traces=name))
    table = pd.concat(frames)
    fits = [
        table["answer"] == table["truth"],
        table["answer"].isin(_NOTHING),
        table["confidence"] == "low",
        table["kind"] == "right",  # the label accepts a second cause, too
    ]
    table["kind"] = np.select(fits, _KINDS[:4], _KINDS[4])
    return table


def _by_truth(table: pd.DataFrame) -> pd.DataFrame:
    """Count answers by what is true."""
    rows = {}
    for truth, group in table.groupby("truth"):
        others = Counter(group["answer"][group["answer"] != truth])
        listed = ", ".join(f"{answer} {count}" for answer, count in others.most_common())
        rows[truth] = {
            "real traces": len(group),
            "right": (group["answer"] == truth).sum(),
            "named instead": listed,
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("true cause")


class Judgement(SphinxDirective):
    """How often right: a sentence, a table by source, one of real traces by cause, and random programs."""

    def run(self) -> list[nodes.Node]:
        """See :class:`docutils.parsers.rst.Directive`."""
        self.env.note_dependency(str(_FILE))
        document = json.loads(_FILE.read_text(encoding="utf-8"))
        table = runs(document)
        by_source = pd.crosstab(table["traces"], table["kind"]).rename_axis(columns=None)
        by_source = by_source.reindex(columns=_KINDS, fill_value=0)
        real = table[table["traces"] == "real"]
        right = (real["kind"] == "right").sum()
        headline = (
            f"The verdict is right about {right} of {len(real)} real traces ({right / len(real):.0%}). We wrote its "
            "rules with these traces at hand, so expect less on yours."
        )
        parts = [nodes.paragraph("", "", nodes.strong("", headline))]
        for frame in (by_source, _by_truth(real)):
            html = frame.reset_index().to_html(index=False, classes="table", border=0, justify="left")
            parts.append(nodes.raw("", f'<div class="pst-scrollable-table-container">{html}</div>', format="html"))
        random = list(document["random"].values())
        text = (
            f"For {random.count('within 5%')} of {len(random)} random programs the worst prediction of a standard "
            "change is within 5% of the simulated gain."
        )
        return [*parts, nodes.paragraph("", text)]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("judgement", Judgement)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
