"""The command line's reference, read from the program itself at build time."""

from __future__ import annotations

import inspect
from typing import Any

import typer
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


def _paragraph(text: str) -> list[nodes.Node]:
    return [
        nodes.paragraph("", " ".join(part.split())) for part in inspect.cleandoc(text).split("\n\n") if part.strip()
    ]


def _table(rows: list[tuple[nodes.Node, nodes.Node]], heads: tuple[str, str]) -> nodes.table:
    def row(cells: tuple[nodes.Node, ...]) -> nodes.row:
        return nodes.row("", *(nodes.entry("", nodes.paragraph("", "", cell)) for cell in cells))

    group = nodes.tgroup("", *(nodes.colspec(colwidth=w) for w in (35, 65)), cols=2)
    group += nodes.thead("", row(tuple(nodes.Text(h) for h in heads)))
    group += nodes.tbody("", *(row(r) for r in rows))
    return nodes.table("", group, classes=["cli-options"])


def _option(parameter: Any) -> tuple[nodes.Node, nodes.Node]:
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    if parameter.param_type_name == "argument":
        names = parameter.metavar or parameter.name.upper()
    elif not getattr(parameter, "is_flag", False):
        choices = getattr(parameter.type, "choices", None)
        value = "|".join(str(getattr(c, "value", c)) for c in choices) if choices else parameter.metavar
        names += f" {value or parameter.type.name.upper()}"
    said = " ".join((getattr(parameter, "help", None) or "").split())
    default = parameter.default
    if default not in {None, False, ()} and not callable(default):
        said += f" (default: {getattr(default, 'value', default)})"
    return nodes.literal("", names), nodes.Text(said)


class CliReference(SphinxDirective):
    """Sections for all commands of the Typer application ``module:attribute``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """See :class:`docutils.parsers.rst.Directive`."""
        module, _, attribute = self.arguments[0].partition(":")
        application = getattr(__import__(module, fromlist=[attribute]), attribute)
        group = typer.main.get_command(application)
        return [self._section(f"{group.name or 'nsightkit'} {name}", c) for name, c in group.commands.items()]

    def _section(self, path: str, command: Any) -> nodes.section:
        section = nodes.section("", nodes.title("", "", nodes.literal("", path)), ids=[path.replace(" ", "-")])
        self.state.document.note_explicit_target(section)
        section += _paragraph((command.help or "").partition("\f")[0])
        shown = [p for p in command.params if not getattr(p, "hidden", False) and p.name != "help"]
        words = [path]
        words += [p.metavar or p.name.upper() for p in shown if p.param_type_name == "argument"]
        words += ["[OPTIONS]"] if any(p.param_type_name == "option" for p in shown) else []
        section += nodes.literal_block("", " ".join(words), language="text")
        if shown:
            section += _table([_option(p) for p in shown], ("argument or option", "meaning"))
        for name, sub in getattr(command, "commands", {}).items():
            section += self._section(f"{path} {name}", sub)
        return section


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("cli-reference", CliReference)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
