"""The gallery's first page: six groups of cards, each with the page's answer, what that rests on, and its minutes."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from PIL import Image
from sphinx.application import Sphinx

#: What a reader wonders, and the numbers of the pages that answer; a page in none of them stands at the end.
_GROUPS = {
    "Is the GPU kept busy?": "01 02 03 04",
    "Where does a step's time go?": "07 08 10",
    "What do 16 bits change?": "05 06 09",
    "Where does the memory go?": "11 12 13 14",
    "How fast can a kernel be?": "15 16 17 18 19",
    "Did the change help, and which rank is late?": "20 21 22",
}
_CARD = """
   .. grid-item-card:: {title}
      :link: {stem}
      :link-type: doc
      :class-card: nsightkit-card
{figures}
      :badge:`{stem}.badge` :measured:`{stem}.form.minutes` min

      :measured:`{stem}.verdict`
"""
_FIGURE = """
      .. image:: images/thumb/{name}
         :alt: A figure of the page
         :class: only-{mode}
         :loading: lazy
"""


def _write(app: Sphinx) -> None:
    gallery = Path(app.srcdir, "gallery")
    scripts = {path.stem[:2]: path for path in sorted(Path(app.confdir, "examples").glob("[0-9]*.py"))}
    built = {number: path for number, path in scripts.items() if (gallery / f"{path.stem}.rst").is_file()}
    header = Path(app.confdir, "examples", "GALLERY_HEADER.rst").read_text(encoding="utf-8")
    parts = [header]
    listed = " ".join(_GROUPS.values()).split()
    groups = _GROUPS | {"More": " ".join(number for number in built if number not in listed)}
    for group, numbers in groups.items():
        cards = [_card(built[number], gallery / "images") for number in numbers.split() if number in built]
        if cards:
            parts.append("\n".join([group, "-" * len(group), "", ".. grid:: 1 2 2 3", "   :gutter: 3", *cards]))
    pages = [f"   {path.stem}" for path in built.values()]
    parts.append("\n".join([".. toctree::", "   :hidden:", "", *pages, ""]))
    index = gallery / "index.rst"
    # sphinx-gallery's own page ends with the downloads of all scripts and notebooks.
    _, begin, downloads = index.read_text(encoding="utf-8").partition(".. container:: sphx-glr-footer")
    index.write_text("\n\n".join([*parts, begin + downloads, ""]), encoding="utf-8")


def _card(script: Path, images: Path) -> str:
    """Give the card of a page; its figure, where it has one, is kept small, for a light and for a dark page."""
    source = script.read_text(encoding="utf-8")
    chosen = re.search(r"^# sphinx_gallery_thumbnail_number = (\d+)$", source, re.MULTILINE)
    number = int(chosen[1]) if chosen else 1
    figures = ""
    for mode, ending in (("light", ""), ("dark", "_dark")):
        drawn = images / f"sphx_glr_{script.stem}_{number:03d}{ending}.png"
        if drawn.is_file():
            name = f"{script.stem}{ending}.png"
            with Image.open(drawn) as image:
                image.thumbnail((480, 480))
                image.quantize(64, Image.Quantize.FASTOCTREE).save(images / "thumb" / name)
            figures += _FIGURE.format(name=name, mode=mode)
    docstring = ast.get_docstring(ast.parse(source)) or ""
    return _CARD.format(title=docstring.splitlines()[0], stem=script.stem, figures=figures)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("builder-inited", _write, priority=900)  # after the gallery has run
    return {"parallel_read_safe": True, "parallel_write_safe": True}
