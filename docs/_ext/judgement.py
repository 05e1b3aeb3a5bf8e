"""The confusion table: what is true of runs with a known cause, and what the verdict answers (tools/confusion.py)."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from nsightkit import plots

_FILE = Path(__file__).resolve().parent.parent / "judgement.json"
#: What the file calls each kind of run, and what the page does.
_SOURCES = {"planted": "synthetic", "played": "simulated", "real": "real"}
#: Answers that name no cause.
_NOTHING = ["unknown", "queued", "not-enough-data"]
#: What an answer can be.
_KINDS = ["right", "also allowed", "undecided", "wrong"]
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
        frames.append(rows.assign(source=name))
    table = pd.concat(frames, ignore_index=True)
    # A second answer that the label allows is not the same as the answer that it names.
    is_second = (table["kind"] == "right") & (table["answer"] != table["truth"])
    is_sure = (table["confidence"] != "low") & ~table["answer"].isin(_NOTHING)
    table.loc[is_second, "kind"] = "undecided"
    table.loc[is_second & is_sure, "kind"] = "also allowed"
    return table


def _by_truth(table: pd.DataFrame) -> pd.DataFrame:
    """Count answers by what is true."""
    rows = {}
    for truth, group in table.groupby("truth"):
        others = Counter(group["answer"][group["answer"] != truth])
        listed = ", ".join(f"{answer} {count}" for answer, count in others.most_common())
        rows[truth] = {
            "runs": len(group),
            "named correctly": int((group["answer"] == truth).sum()),
            "named instead": listed,
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("true cause")


class Judgement(SphinxDirective):
    """Two tables and a sentence: cause by answer; how often right, by source; random programs."""

    def run(self) -> list[nodes.Node]:
        """See :class:`docutils.parsers.rst.Directive`."""
        self.env.note_dependency(str(_FILE))
        document = json.loads(_FILE.read_text(encoding="utf-8"))
        table = runs(document)
        by_source = pd.crosstab(table["source"], table["kind"]).rename_axis(columns=None)
        by_source = by_source.reindex(columns=_KINDS, fill_value=0)
        tables = []
        for frame in (_by_truth(table), by_source):
            shown = plots.table(frame.reset_index())
            html = f'<div class="pst-scrollable-table-container">{shown._repr_html_()}</div>'
            tables.append(nodes.raw("", html, format="html"))
        return [*tables, nodes.paragraph("", _about_random(document["random"]))]


def _about_random(outcomes: dict[str, str]) -> str:
    """Say how far the worst prediction of each random program is from its simulated gain."""
    count = Counter(outcomes.values())
    text = (
        f"For {count['within 5%']} of {count.total()} random programs the worst prediction of a standard change is "
        "within 5% of the simulated gain"
    )
    if count["within 10%"]:
        text += f", for {count['within 10%']} more within 10%"
    if count["refused"]:
        text += f"; for {count['refused']} nothing was predicted"
    return f"{text}."


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("judgement", Judgement)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
