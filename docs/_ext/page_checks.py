"""Checks of the built pages that Sphinx itself does not make.

``python page_checks.py HTML [--only PAGE]`` lists what is wrong and exits with 1. A gallery can be wrong
and still build: a traceback kept from an earlier run, a page whose figures were dropped, a number without a provenance.
"""

from __future__ import annotations

import re
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree as ET

from bs4 import BeautifulSoup, Tag

#: Seconds a script may take on a machine of its own, and how much longer on one that has other work: CI runs the tests
#: beside a build.
_MOST_S, _BUSY = 30, 4
#: What a page of the gallery shows at once, at most: words of running text, and lines of code.
_WORDS, _LINES = 1200, 80
#: What a page's answer may rest on.
_EVIDENCE = ("measured", "case file", "exact", "predicted")
_WARNING = re.compile(r"^\S+:\d+: \w*Warning: ", re.MULTILINE)
#: What else lies in the folder of the scripts.
_NO_SCRIPTS = ("GALLERY_HEADER.rst", "ruff.toml", "_lib", "__pycache__", ".ruff_cache")
_OUTPUTS = ".sphx-glr-script-out, .cell_output, .output"


def problems(html: Path, examples: Path | None = None) -> list[str]:
    """Everything that is wrong with the pages under `html`, one sentence each.

    Parameters
    ----------
    html : Path
        A built site.
    examples : Path, optional
        The gallery's scripts: each must have become a page, and left nothing beside itself.
    """
    pages = [
        page
        for page in sorted(html.rglob("*.html"))
        if not page.relative_to(html).as_posix().startswith(("_static/", "_sources/"))
    ]
    with ProcessPoolExecutor() as pool:
        found = [wrong for each in pool.map(_page, [html] * len(pages), pages) for wrong in each]
    for beside in sorted(examples.iterdir()) if examples else []:
        if beside.suffix == ".py" and not (html / "gallery" / f"{beside.stem}.html").is_file():
            found.append(f"gallery/{beside.stem}.html: missing, though {beside.name} is in the gallery")
        elif beside.suffix != ".py" and beside.name not in _NO_SCRIPTS:
            found.append(f"{examples.name}/{beside.name}: a script left it there, or it belongs elsewhere")
    return found


def _page(html: Path, page: Path) -> list[str]:
    name = page.relative_to(html).as_posix()
    soup = BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")
    outputs = [out.get_text() for out in soup.select(_OUTPUTS)]
    wrong = []
    if any("Traceback (most recent call last)" in output for output in outputs):
        wrong.append("the output holds a traceback")
    if any(_WARNING.search(output) for output in outputs):
        wrong.append("the output holds a warning")
    wrong += [said for image in soup.find_all("img") for said in _image(image, page)]
    if name.startswith("gallery/") and name != "gallery/index.html":
        wrong += _example(soup)
    return [f"{name}: {said}" for said in wrong]


def notices(html: Path) -> list[str]:
    """Banners on the pages: recordings that are stale."""
    said = []
    for page in sorted((html / "gallery").glob("*.html")):
        soup = BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")
        said += [f"gallery/{page.name}: {' '.join(b.get_text().split())}" for b in soup.select(".nsightkit-banner")]
    return list(dict.fromkeys(said))


def slow(junit: Path, most_s: float = _MOST_S) -> list[str]:
    """Scripts that took too long; a build runs no workload.

    Parameters
    ----------
    junit : Path
        What the gallery wrote about its scripts.
    most_s : float
    """
    if not junit.is_file():
        return []
    cases = ET.parse(junit).iter("testcase")  # noqa: S314 # our own build wrote it
    return [
        f"{Path(case.get('file', '')).name} took {float(case.get('time', 0)):.0f} s, and {_MOST_S} s is the most"
        for case in cases
        if float(case.get("time", 0)) > most_s
    ]


def _image(image: Tag, page: Path) -> list[str]:
    source = unquote(str(image.get("src", "")))
    wrong = [] if str(image.get("alt", "")).strip() else [f"image {source[:60]} has no alternative text"]
    if not source.startswith("data:"):
        file = page.parent / source
        if not (file.is_file() and file.stat().st_size):
            wrong.append(f"image {source} is missing")
    return wrong


def _example(soup: BeautifulSoup) -> list[str]:
    wrong = []
    if not soup.select_one(".nsightkit-provenance"):
        wrong.append("no provenance block: end a code block with the measurement")
    light, dark = (len(soup.select(f"article img.only-{mode}")) for mode in ("light", "dark"))
    if not light:
        wrong.append("no figure")
    if light != dark:
        wrong.append(f"{light} figures for light pages but {dark} for dark ones")
    badge = soup.select_one(".nsightkit-in-short .nsightkit-badge")
    if badge is None or not badge.get_text().startswith(_EVIDENCE):
        wrong.append(f"the box at the top rests on {badge and badge.get_text()!r}, which is not {', '.join(_EVIDENCE)}")
    for title, least in (("Predict", 1), ("Exercises", 2)):
        answers = soup.select(f"section[id^={title.lower()}] details.sd-dropdown")
        if len(answers) < least:
            wrong.append(f"section {title!r} folds {len(answers)} answers; it has at least {least}")
    return wrong + _at_once(soup)


def _at_once(soup: BeautifulSoup) -> list[str]:
    """What is wrong with that of a page which shows without unfolding anything."""
    article = BeautifulSoup(str(soup.select_one("article") or ""), "html.parser")
    for folded in article.select("details"):
        folded.decompose()
    wrong = []
    if article.select('[data-mode="small"]'):
        wrong.append("shows a small run on a CPU; the site shows recordings only: build it with NSIGHTKIT_MODE=replay")
    lines = sum(len(code.get_text().strip().splitlines()) for code in article.select("div.highlight-Python pre"))
    if lines > _LINES:
        wrong.append(f"shows {lines} lines of code; at most {_LINES}: fold the rest with `# fold: TITLE`, or move it")
    for beside in article.select(f"pre, table, .nsightkit-provenance, .sphx-glr-footer, {_OUTPUTS}"):
        beside.decompose()
    words = sum(len(text.get_text().split()) for text in article.select("p"))
    if words > _WORDS:
        wrong.append(f"shows {words} words; at most {_WORDS}")
    return wrong


def main(arguments: list[str]) -> int:
    """Check a site; see the module's text."""
    html = Path(arguments[0])
    root = Path(__file__).parents[2]
    one = "--only" in arguments
    wrong = problems(html, None if one else root / "examples")
    said = notices(html)
    if not one:
        junit = html.parent / "gallery-junit.xml"
        said += slow(junit)
        wrong += slow(junit, _BUSY * _MOST_S)
    for notice in said:
        print(f"notice: {notice}")
    for problem in wrong:
        print(f"error: {problem}", file=sys.stderr)
    print(f"{html}: {len(wrong)} problems")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
