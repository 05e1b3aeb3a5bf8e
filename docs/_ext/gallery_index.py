"""The gallery's first page: three groups of cards, each with the page's answer, its evidence and a figure."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

from measured import look_up
from sphinx.application import Sphinx
from sphinx.util import rst

#: Groups by what a page's answer rests on; the badge decides, so a page that gets a recording moves by itself.
_SOLVED, _EXACT, _PREDICTED = "Solved on real traces", "Exact", "Predictions"
_GROUPS = {
    _SOLVED: "Traces that other people recorded and published, analysed by the code on the page.",
    _EXACT: "Arithmetic that comes out the same on every machine.",
    _PREDICTED: "We have not run these on a GPU yet. Each page has the arithmetic, the nearest case file, and one "
    "command to measure it on your card.",
}
_CARD = """
   .. grid-item-card:: {title}
      :link: {stem}
      :link-type: doc
      :class-card: nsightkit-card

      :badge:`{stem}.badge`

      {answer}

      .. image:: images/sphx_glr_{stem}_00{figure}.png
         :alt: figure of the page
         :class: only-light

      .. image:: images/sphx_glr_{stem}_00{figure}_dark.png
         :alt: figure of the page
         :class: only-dark
"""
#: What a reader's eye looks for; no part of a name such as H100 or ResNet-50.
_NUMBER = re.compile(r"(?<![\w.,\\-])\d+(?:\\?[.,]\d+)*(?:\\?%|x\b| (?:[nmµ]?s|GB)\b)?(?!\w)")


def _write(app: Sphinx) -> None:
    gallery = Path(app.srcdir, "gallery")
    scripts = sorted(Path(app.confdir, "examples").glob("[0-9]*.py"))
    built = [path for path in scripts if (gallery / f"{path.stem}.rst").is_file()]
    parts = [Path(app.confdir, "examples", "GALLERY_HEADER.rst").read_text(encoding="utf-8")]
    trees = []
    for group, about in _GROUPS.items():
        pages = [path for path in built if _group(path) == group]
        label = group.lower().replace(" ", "-")
        parts.append("\n".join([f".. _{label}:", "", group, "-" * len(group), "", about]))
        if not pages:
            continue
        cards = [_card(path) for path in pages]
        parts.append("\n".join([".. grid:: 1 1 2 2", "   :gutter: 3", *cards]))
        trees += [
            ".. toctree::",
            "   :hidden:",
            f"   :caption: {group}",
            "",
            *(f"   {path.stem}" for path in pages),
            "",
        ]
    parts.append("\n".join(trees))
    index = gallery / "index.rst"
    # sphinx-gallery's own page ends with the downloads of all scripts and notebooks.
    _, begin, downloads = index.read_text(encoding="utf-8").partition(".. container:: sphx-glr-footer")
    index.write_text("\n\n".join([*parts, begin + downloads, ""]), encoding="utf-8")


def _group(script: Path) -> str:
    """Name the group of a page."""
    try:
        badge = look_up(f"{script.stem}.badge")[0]
    except (OSError, KeyError):
        return _PREDICTED  # it exported no finding
    if badge.startswith("predicted"):
        return _PREDICTED
    return _EXACT if badge.startswith("exact") else _SOLVED


def _card(script: Path) -> str:
    """Give the card of a page: its question, its evidence, its answer up to the first number, and a figure."""
    text = script.read_text(encoding="utf-8")
    figure = text.partition("thumbnail_number = ")[2][:1] or "1"
    answer = ""
    with contextlib.suppress(OSError, KeyError):
        answer = look_up(f"{script.stem}.verdict")[0]
    first, *others = re.split(r"(?<=[.?]) (?=[A-Z])", answer)
    if others and not _NUMBER.search(first):
        first = f"{first} {others[0]}"
    marked = _NUMBER.sub(r"\\ **\g<0>**\\ ", rst.escape(first))
    return _CARD.format(title=text.splitlines()[1], stem=script.stem, answer=marked, figure=figure)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("builder-inited", _write, priority=900)  # after the gallery has run
    return {"parallel_read_safe": True, "parallel_write_safe": True}
