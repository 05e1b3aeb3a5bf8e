"""The rules that give a gap its cause, quoted from the code that applies them."""

from __future__ import annotations

import inspect

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from nsightkit.analysis.timeline.gaps.rules import CAUSES, RULES


class GapRules(SphinxDirective):
    """A numbered list: each cause, and the docstring of its rule."""

    def run(self) -> list[nodes.Node]:
        """See :class:`docutils.parsers.rst.Directive`."""
        rules = nodes.enumerated_list(enumtype="arabic", suffix=".")
        for cause, rule in zip(CAUSES, RULES, strict=True):
            item = nodes.list_item("", *self.parse_text_to_nodes(inspect.getdoc(rule) or ""))
            item[0].insert(0, [nodes.literal("", cause), nodes.Text(": ")])
            rules += item
        return [rules]


def setup(app: Sphinx) -> dict[str, bool]:
    """See the extension API of Sphinx."""
    app.add_directive("gap-rules", GapRules)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
