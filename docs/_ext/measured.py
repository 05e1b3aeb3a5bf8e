"""Numbers in prose are references to measurements.

A page that measures exports what it found under names: a gallery script by binding ``findings``, a notebook page with
:func:`export`. Prose on any page then writes ``{measured}`01_gpu_util.idle_share:.0%``` and gets the number of this
build, with where it was measured as its tooltip. A name that no page exported is a warning, so it fails a strict build.
"""

from __future__ import annotations

import json
import numbers
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxRole

_FOLDER = "NSIGHTKIT_VALUES"
logger = logging.getLogger(__name__)


def export(page: str, findings: Mapping[str, Any], labels: Iterable[str]) -> None:
    """Make values of a page available to the ``measured`` role.

    Parameters
    ----------
    page : str
        The name prose uses before the dot.
    findings : mapping of str to number or str
    labels : iterable of str
        Where and when they were measured: the ``label`` of the measurements behind them.
    """
    values = {}
    for name, value in findings.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real | str):
            raise TypeError(f"findings[{name!r}] of {page} is {value!r}; a finding is a number or a text")
        values[name] = value.item() if hasattr(value, "item") else value
    folder = Path(os.environ[_FOLDER])
    folder.mkdir(parents=True, exist_ok=True)
    label = "; ".join(dict.fromkeys(labels))
    (folder / f"{page}.json").write_text(json.dumps({"values": values, "label": label}, indent=1), encoding="utf-8")


def look_up(reference: str, spec: str = "") -> tuple[str, str]:
    """Give the value of ``page.name`` as text, and where it was measured.

    Parameters
    ----------
    reference, spec : str
        The page and the name, and how the value is formatted.

    Raises
    ------
    OSError, KeyError, ValueError
        The page exported nothing, not this name, or what cannot be formatted so.
    """
    page, _, name = reference.rpartition(".")
    exported = json.loads(Path(os.environ[_FOLDER], f"{page}.json").read_text(encoding="utf-8"))
    return format(exported["values"][name], spec), exported["label"]


class _Pending(nodes.Inline, nodes.TextElement):
    """A number still to be looked up: pages are read in any order, so all are filled in at the end."""


def pending(reference: str, spec: str = "") -> nodes.Node:
    """Give what becomes the value of ``page.name`` when all pages have been read.

    Parameters
    ----------
    reference, spec : str
        The page and the name, and how the value is formatted.
    """
    return _Pending("", "", reference=reference, spec=spec)


class Measured(SphinxRole):
    """``:measured:`page.name:format```."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """See :class:`sphinx.util.docutils.SphinxRole`."""
        reference, _, spec = self.text.partition(":")
        node = pending(reference.strip(), spec.strip())
        self.set_source_info(node)
        return [node], []


def _fill_in(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    for node in list(doctree.findall(_Pending)):
        try:
            text, label = look_up(node["reference"], node["spec"])
        except (OSError, KeyError, ValueError) as error:
            logger.warning(
                "measured: no page exported %r (%r)", node["reference"], error, location=node, type="measured"
            )
            node.replace_self(nodes.problematic("", node["reference"]))
            continue
        node.replace_self(nodes.abbreviation("", text, explanation=label, classes=["measured"]))


def _start(app: Sphinx) -> None:
    folder = Path(app.doctreedir, "measured-values")
    if app.fresh_env_used:  # else pages that did not change are not run again, and what they exported still holds
        shutil.rmtree(folder, ignore_errors=True)
    os.environ[_FOLDER] = str(folder)  # notebook kernels inherit it


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the role."""
    app.add_node(_Pending)
    app.add_role("measured", Measured())
    app.connect("builder-inited", _start, priority=100)  # before the gallery runs
    app.connect("doctree-resolved", _fill_in)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
