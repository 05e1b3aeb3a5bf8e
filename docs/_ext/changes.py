"""The changes that ``whatif`` can make, quoted from the code that makes them."""

from __future__ import annotations

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from nsightkit.analysis.replay.whatif import CHANGES


class Changes(SphinxDirective):
    """A list: each change, and what it does."""

    def run(self) -> list[nodes.Node]:
        """See :class:`docutils.parsers.rst.Directive`."""
        items = nodes.bullet_list()
        for change, does in CHANGES.items():
            items += nodes.list_item("", nodes.paragraph("", "", nodes.literal("", change), nodes.Text(f": {does}")))
        return [items]


def setup(app: Sphinx) -> dict[str, bool]:
    """See the extension API of Sphinx."""
    app.add_directive("changes", Changes)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
