"""Drawings and cards that are part of a page's own HTML, so that they follow its light or dark mode."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from nsightkit.report.card import card_of
from nsightkit.trace.model import Trace


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


def verdict_card(trace: Trace, title: str) -> str:
    """Lay out the report's card for a page of the site.

    Parameters
    ----------
    trace : Trace
    title : str
        The run, for a reader. The page has to name the whole that the shares are of (`Card.whole`).
    """
    card = card_of(trace)
    answer = card.answer
    rects = []
    items = []
    small = 0.0
    for part in card.bar:
        rects.append(f'<rect x="{part.left:.3f}%" width="{part.width:.3f}%" height="100%" fill="{part.colour}"/>')
        if part.width < 1:
            small += part.width
            continue
        patch = f'<svg class="patch" aria-hidden="true"><rect width="100%" height="100%" fill="{part.colour}"/></svg>'
        items.append(f"<li>{patch}{html.escape(part.name)} <b>{part.share}</b></li>")
    items.append(f"<li>other <b>{small:.1f} %</b></li>")
    tries = []
    for row in answer["changes"]:
        if (row["speedup"] or 0) >= 1.05:
            tries.append(f"<li><code>{html.escape(row['change'])}</code> <b>{row['speedup']:.2f}x</b></li>")
    return (
        f'<section class="nsightkit-verdict" aria-label="Verdict on {html.escape(title)}">'
        f'<p class="title">{html.escape(title)}</p><p class="headline">{html.escape(card.headline)}</p>'
        f'<p class="facts"><code>{answer["bottleneck"]}</code> confidence: {answer["confidence"]}</p>'
        f'<svg class="bar" role="img" aria-label="Shares of the time, listed below">{"".join(rects)}</svg>'
        f"<ul>{''.join(items)}</ul>"
        f'<ul class="gains"><li>predicted speedup:</li>{"".join(tries)}</ul></section>'
    )


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("schematic", Schematic)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
