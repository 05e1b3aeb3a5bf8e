"""The command line's reference: what each command's ``--help`` says, asked at build time."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import typer
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

_WIDTH = "84"  # columns that fit beside both side bars


def _paths(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """All commands below `command`, groups replaced by what they hold."""
    for name, sub in getattr(command, "commands", {}).items():
        if hasattr(sub, "commands"):
            yield from _paths(sub, (*path, name))
        else:
            yield (*path, name)


def _help(module: str, path: tuple[str, ...]) -> str:
    environment = {**os.environ, "TYPER_USE_RICH": "0", "TERMINAL_WIDTH": _WIDTH, "COLUMNS": _WIDTH, "NO_COLOR": "1"}
    command = [sys.executable, "-m", module, *path, "--help"]
    asked = subprocess.run(
        command, env=environment, capture_output=True, text=True, encoding="utf-8", check=True, timeout=60
    )
    return asked.stdout.strip()


class CliReference(SphinxDirective):
    """A section for each command of the package in its argument, whose ``cli`` module has the Typer ``app``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """See :class:`docutils.parsers.rst.Directive`."""
        package = self.arguments[0]
        group = typer.main.get_command(importlib.import_module(f"{package}.cli").app)
        paths = list(_paths(group))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            texts = list(pool.map(lambda path: _help(package, path), paths))
        return [self._section(package, path, text) for path, text in zip(paths, texts, strict=True)]

    def _section(self, package: str, path: tuple[str, ...], text: str) -> nodes.section:
        title = nodes.title("", "", nodes.literal("", " ".join(path)))
        section = nodes.section("", title, ids=["-".join((package, *path))])
        self.state.document.note_explicit_target(section)
        section += nodes.literal_block(text, text, language="text")
        return section


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("cli-reference", CliReference)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
