"""The command line's reference: what each command's ``--help`` says."""

from __future__ import annotations

import importlib
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class CliReference(SphinxDirective):
    """A section for each command of the package in its argument (``cli.COMMANDS`` and ``cli.help_of``)."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """See :class:`docutils.parsers.rst.Directive`."""
        package = self.arguments[0]
        cli = importlib.import_module(f"{package}.cli")
        return [self._section(package, name, cli.help_of(name)) for name in cli.COMMANDS]

    def _section(self, package: str, name: str, text: str) -> nodes.section:
        title = nodes.title("", "", nodes.literal("", name))
        section = nodes.section("", title, ids=["-".join((package, *name.split()))])
        self.state.document.note_explicit_target(section)
        section += nodes.literal_block(text, text, language="text")
        return section


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("cli-reference", CliReference)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
