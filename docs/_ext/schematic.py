"""Drawings that are part of a page's own HTML, so that they follow its light or dark mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class Schematic(SphinxDirective):
    """A drawing of ``_static/schematics`` (see tools/schematics.py) with the content as its caption."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """See :class:`docutils.parsers.rst.Directive`."""
        drawing = Path(self.env.srcdir, "_static", "schematics", f"{self.arguments[0]}.svg")
        self.env.note_dependency(str(drawing))
        start = '<figure class="nsightkit-schematic"><div role="group" tabindex="0" aria-label="Drawing">'
        figure = nodes.raw("", start + drawing.read_text(encoding="utf-8") + "</div><figcaption>", format="html")
        return [figure, *self.parse_content_to_nodes(), nodes.raw("", "</figcaption></figure>", format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("schematic", Schematic)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
