"""Links the first use of each term of the glossary on every page of the guide; its definition shows on hover."""

from __future__ import annotations

import functools
import re
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.nodes import make_refnode

#: Pages that are looked up and not read, and the glossary itself.
_NOT_IN = (
    "reference/",
    "cli",
    "changelog",
    "contributing",
    "guide/glossary",
    "guide/cheat_sheet",
    "gallery/index",
)
_NOT_INSIDE = (
    nodes.reference,
    nodes.literal,
    nodes.literal_block,
    nodes.title,
    nodes.raw,
    nodes.caption,
    nodes.math,
    nodes.abbreviation,
    addnodes.pending_xref,
    addnodes.desc_signature,
    addnodes.download_reference,
)
#: What sphinx-gallery makes of a literal block to link the names in it.
_GALLERY_CODE = "code_links_block"


def pattern_of(terms: list[str]) -> re.Pattern[str]:
    """Make an expression that finds any of `terms` as a word, alone or in the plural.

    Parameters
    ----------
    terms : list of str
    """
    longest_first = sorted(terms, key=len, reverse=True)
    return re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, longest_first))})s?(?![\w-])", re.IGNORECASE)


def _link(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    if any(docname == n or (n.endswith("/") and docname.startswith(n)) for n in _NOT_IN):
        return
    standard = app.env.domains.standard_domain
    places = {name.lower(): place for (kind, name), place in standard.objects.items() if kind == "term"}
    if not places:
        return
    pattern = pattern_of(list(places))
    seen = {node.get("reftitle", "").lower() for node in doctree.findall(nodes.reference)}
    for text in list(doctree.findall(nodes.Text)):
        parent = text.parent
        above = parent
        while above is not None and not isinstance(above, _NOT_INSIDE) and above.tagname != _GALLERY_CODE:
            above = above.parent
        if above is not None:
            continue
        pieces: list[nodes.Node] = []
        done = 0
        for found in pattern.finditer(text.astext()):
            term = found[1].lower()
            if term in seen:
                continue
            seen.add(term)
            page, label = places[term]
            pieces.append(nodes.Text(text[done : found.start()]))
            shown = nodes.inline("", found[0], classes=["xref", "std", "std-term"])
            said = _definitions(app, page).get(label, term)
            link = make_refnode(app.builder, docname, page, label, shown, said)
            link["classes"].append("nsightkit-term")
            pieces.append(link)
            done = found.end()
        if pieces:
            parent.replace(text, [*pieces, nodes.Text(text[done:])])


@functools.cache
def _definitions(app: Sphinx, page: str) -> dict[str, str]:
    """What a page of terms says of each, by the term's label."""
    found = {}
    for item in app.env.get_doctree(page).findall(nodes.definition_list_item):
        said = " ".join(item.children[-1].astext().split())
        found |= {label: said for term in item.findall(nodes.term) for label in term["ids"]}
    return found


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("doctree-resolved", _link)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
