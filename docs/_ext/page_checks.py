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

from bs4 import BeautifulSoup, Tag

#: What a page of the gallery shows at once, at most: words of running text, and lines of code.
_WORDS, _LINES = 1200, 80
#: What a page's answer may rest on.
_EVIDENCE = ("measured", "case file", "exact", "predicted")
#: What is wrong with an output that holds this.
_COMPLAINTS = {
    "a traceback": re.compile(r"Traceback \(most recent call last\)"),
    "a warning": re.compile(r"^\S+:\d+: \w*Warning: ", re.MULTILINE),
}
_OUTPUTS = ".sphx-glr-script-out, .cell_output, .output"


def problems(html: Path, examples: Path | None = None) -> list[str]:
    """Everything that is wrong with the pages under `html`, one sentence each.

    Parameters
    ----------
    html : Path
        A built site.
    examples : Path, optional
        The gallery's scripts: each must have become a page.
    """
    pages = []
    for path in sorted(html.rglob("*.html")):
        if path.relative_to(html).parts[0] not in ("_static", "_sources"):
            pages.append(path)
    problems = []
    with ProcessPoolExecutor() as pool:
        for page, wrong in zip(pages, pool.map(_page, pages), strict=True):
            problems += [f"{page.relative_to(html).as_posix()}: {problem}" for problem in wrong]
    for script in sorted(examples.glob("[0-9]*.py")) if examples else []:
        if not (html / "gallery" / f"{script.stem}.html").is_file():
            problems.append(f"gallery/{script.stem}.html: missing, though {script.name} is in the gallery")
    return problems


def _page(page: Path) -> list[str]:
    soup = BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")
    wrong = []
    for output in soup.select(_OUTPUTS):
        wrong += [f"the output holds {what}" for what, words in _COMPLAINTS.items() if words.search(output.get_text())]
    for image in soup.find_all("img"):
        wrong += _image(image, page.parent)
    if page.parent.name == "gallery" and page.name != "index.html":
        wrong += _example(soup)
    return wrong


def _image(image: Tag, folder: Path) -> list[str]:
    source = unquote(str(image.get("src", "")))
    wrong = []
    if not str(image.get("alt", "")).strip():
        wrong.append(f"image {source[:60]} has no alternative text")
    if not source.startswith("data:") and not (folder / source).is_file():
        wrong.append(f"image {source} is missing")
    return wrong


def _example(soup: BeautifulSoup) -> list[str]:
    wrong = []
    if not soup.select_one(".nsightkit-provenance"):
        wrong.append("no provenance block: end a code block with the measurement")
    light, dark = (len(soup.select(f"article img.only-{mode}")) for mode in ("light", "dark"))
    if not light or light != dark:
        wrong.append(f"{light} figures for light pages and {dark} for dark ones")
    badge = soup.select_one(".nsightkit-in-short .nsightkit-badge")
    if badge is None or not badge.get_text().startswith(_EVIDENCE):
        wrong.append(f"the box at the top does not rest on any of {', '.join(_EVIDENCE)}")
    for title, least in (("predict", 1), ("exercises", 2)):
        answers = soup.select(f"section[id^={title}] details.sd-dropdown")
        if len(answers) < least:
            wrong.append(f"section {title!r} folds {len(answers)} answers; it has at least {least}")
    for folded in soup.select("details"):
        folded.decompose()
    if soup.select('[data-mode="small"]'):
        wrong.append("shows a small run on a CPU; the site shows recordings only: build it with NSIGHTKIT_MODE=replay")
    lines = sum(len(code.get_text().strip().splitlines()) for code in soup.select("div.highlight-Python pre"))
    if lines > _LINES:
        wrong.append(f"shows {lines} lines of code; at most {_LINES}: fold the rest with `# fold: TITLE`, or move it")
    words = sum(len(text.get_text().split()) for text in soup.select("article p:not(pre p, table p, aside p)"))
    if words > _WORDS:
        wrong.append(f"shows {words} words; at most {_WORDS}")
    return wrong


def main(arguments: list[str]) -> int:
    """Check a site; see the module's text."""
    html = Path(arguments[0])
    examples = None if "--only" in arguments else Path(__file__).parents[2] / "examples"
    wrong = problems(html, examples)
    for problem in wrong:
        print(f"error: {problem}", file=sys.stderr)
    print(f"{html}: {len(wrong)} problems")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
