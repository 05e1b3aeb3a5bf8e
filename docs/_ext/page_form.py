"""What a page of the gallery shows at once, and what it folds away.

``.. in-short::`` is the box at the top: the answer, and the kind of evidence that it rests on. ``.. own-run::``, first
in a section, puts one line in the section's place, heading included, and folds it there, where nothing is recorded
yet. A code block whose first line is ``# fold: TITLE`` is folded under TITLE.
"""

from __future__ import annotations

import html
from typing import Any

from docutils import nodes
from measured import pending
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective, SphinxRole

_FOLD = "# fold:"
#: The time that recording a page takes, which `nox -s record` reads and a reader need not.
_BUDGET = "# record:"
_MISSING = "Not measured yet: run this page on your GPU (python examples/{}.py)"


class _OwnRun(nodes.Element):
    """Marks the section that the script's own run is in."""


def badge(reference: str) -> nodes.Node:
    """Give the badge of a page: what its answer rests on."""
    return nodes.inline("", "", pending(reference), classes=["nsightkit-badge"])


class Badge(SphinxRole):
    """``:badge:`page.badge```."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """See :class:`sphinx.util.docutils.SphinxRole`."""
        return [badge(self.text)], []


class InShort(SphinxDirective):
    """``.. in-short::``."""

    def run(self) -> list[nodes.Node]:
        """See :class:`docutils.parsers.rst.Directive`."""
        page = self.env.docname.rpartition("/")[2]
        first = nodes.paragraph("", "", nodes.strong("", "In short"), nodes.Text(" "), badge(f"{page}.badge"))
        answer = nodes.paragraph("", "", pending(f"{page}.verdict"))
        return [nodes.container("", first, answer, classes=["nsightkit-in-short"])]


class OwnRun(SphinxDirective):
    """``.. own-run::``."""

    def run(self) -> list[nodes.Node]:
        """See :class:`docutils.parsers.rst.Directive`."""
        return [_OwnRun()]


def _folded(title: str, children: list[nodes.Node]) -> list[nodes.Node]:
    begin = f'<details class="nsightkit-fold"><summary>{html.escape(title)}</summary>'
    return [nodes.raw("", begin, format="html"), *children, nodes.raw("", "</details>", format="html")]


def _fold(app: Sphinx, doctree: nodes.document) -> None:
    for block in list(doctree.findall(nodes.literal_block)):
        title, text = "", block.astext()
        if text.startswith(_BUDGET):
            text = text.partition("\n")[2].lstrip("\n")
        if text.startswith("downloads = "):  # what the site picks up; a reader need not type it
            title = "How the downloads are chosen"
        elif text.startswith(_FOLD):
            title, _, text = text.removeprefix(_FOLD).partition("\n")
        if title or text != block.astext():
            block.rawsource = text
            block[:] = [nodes.Text(text)]
        if title:
            block.replace_self(_folded(title.strip(), [block.deepcopy()]))
    for mark in list(doctree.findall(_OwnRun)):
        section = mark.parent
        section.remove(mark)
        outputs = " ".join(raw.astext() for raw in section.findall(nodes.raw))
        if 'data-mode="missing"' in outputs:
            script = app.env.docname.rpartition("/")[2]
            section.replace_self(_folded(_MISSING.format(script), section.children[1:]))


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.add_node(_OwnRun)
    app.add_role("badge", Badge())
    app.add_directive("in-short", InShort)
    app.add_directive("own-run", OwnRun)
    app.connect("doctree-read", _fold, priority=400)  # before the page's headings are collected
    return {"parallel_read_safe": True, "parallel_write_safe": True}
