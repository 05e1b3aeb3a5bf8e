"""Figures for the site: drawn once, saved for a light and for a dark page, never without alternative text."""

from __future__ import annotations

import base64
import html
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.collections import LineCollection
from matplotlib.colors import same_color
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from sphinx.errors import ExtensionError

_INK = {"light": "#1f2328", "dark": "#ced6dd"}
_DPI = 160
_CSS_PIXELS_PER_INCH = 100


def alternative_text(figure: Figure) -> str:
    """Describe the figure for a reader who cannot see it: its label, else its titles."""
    titles = [axes.get_title(place) for axes in figure.axes for place in ("left", "center")]
    text = str(figure.get_label()) or " ".join([figure.get_suptitle(), *titles])
    if not text.strip():
        raise ExtensionError("a figure has neither a label nor a title: give it one with figure.set_label(...)")
    return " ".join(text.split())


@contextmanager
def _inked(figure: Figure, ink: str) -> Iterator[None]:
    """Whatever has matplotlib's default ink (texts, ticks, spines, lines) takes another colour for a while."""
    default = mpl.rcParams["text.color"]
    changed: list[tuple[Any, str, Any]] = []

    def repaint(artist: Any, what: str) -> None:
        old = getattr(artist, f"get_{what}")()
        if same_color(old, default):
            changed.append((artist, what, old))
            getattr(artist, f"set_{what}")(ink)

    for text in figure.findobj(Text):
        repaint(text, "color")
    for axes in figure.axes:
        for spine in axes.spines.values():
            repaint(spine, "edgecolor")
    for line in figure.findobj(Line2D):
        repaint(line, "color")
        repaint(line, "markeredgecolor")  # ticks, caps of error bars
    for lines in figure.findobj(LineCollection):  # such as error bars
        if len(lines.get_edgecolor()) == 1:
            repaint(lines, "edgecolor")
    try:
        yield
    finally:
        for artist, what, old in changed:
            getattr(artist, f"set_{what}")(old)


def save_both(figure: Figure, stem: Path) -> dict[str, Path]:
    """Save ``stem.png`` (light) and ``stem_dark.png`` with transparent backgrounds."""
    paths = {"light": stem.with_name(f"{stem.name}.png"), "dark": stem.with_name(f"{stem.name}_dark.png")}
    figure.draw_without_rendering()  # ticks exist from here on
    for mode, path in paths.items():
        with _inked(figure, _INK[mode]):
            figure.savefig(path, dpi=_DPI, transparent=True)
    return paths


def scrape(block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
    """Sphinx-gallery image scraper: every open figure as a light and a dark image.

    Plain ``image`` directives, because the stock ``image-sg`` honours only the first class and does not escape the
    alternative text.
    """
    rst = []
    for number, path in zip(plt.get_fignums(), block_vars["image_path_iterator"], strict=False):
        figure = plt.figure(number)
        said = alternative_text(figure)
        width = round(figure.get_figwidth() * _CSS_PIXELS_PER_INCH)
        for mode, saved in save_both(figure, Path(path).with_suffix("")).items():
            uri = Path(os.path.relpath(saved, gallery_conf["src_dir"])).as_posix()
            # The hidden one of the two is not fetched.
            image_class = f"sphx-glr-single-img only-{mode}"
            options = {"alt": said, "class": image_class, "width": f"{width}px", "loading": "lazy"}
            rst += [f".. image:: /{uri}", *(f"   :{key}: {value}" for key, value in options.items()), ""]
    plt.close("all")
    return "\n".join(["", *rst, ""]) if rst else ""


def show(figure: Figure) -> Any:
    """Display a figure from a notebook page, in both modes.

    The images are embedded in the page: a notebook cell cannot save files beside it.
    """
    import tempfile

    from IPython.display import HTML
    from PIL import Image

    said = html.escape(alternative_text(figure), quote=True)
    width = round(figure.get_figwidth() * _CSS_PIXELS_PER_INCH)
    with tempfile.TemporaryDirectory() as folder:
        saved = save_both(figure, Path(folder, "figure"))
        for path in saved.values():  # inline, an image weighs a third more than as a file; few colours do for a chart
            with Image.open(path) as image:
                image.quantize(256, Image.Quantize.FASTOCTREE).save(path, optimize=True)
        tags = [
            f'<img class="only-{mode}" alt="{said}" width="{width}" '
            f'src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}">'
            for mode, path in saved.items()
        ]
    plt.close(figure)
    return HTML(f'<div class="nsightkit-figure">{"".join(tags)}</div>')
