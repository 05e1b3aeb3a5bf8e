"""The built site, read as a visitor's browser reads it: run by `nox -s site` after `nox -s docs`."""

from __future__ import annotations

import functools
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import pytest

pytestmark = pytest.mark.site

HTML = Path(os.environ.get("NSIGHTKIT_HTML", Path(__file__).parents[2] / "docs" / "_build" / "html"))

#: Accessibility rules that may fail, and why.
TOLERATED = {
    "label-content-name-mismatch": "the theme's search button: its visible text names the shortcut too",
}

if not (HTML / "index.html").is_file():
    pytest.skip("the site is not built: run nox -s docs first", allow_module_level=True)
bs4 = pytest.importorskip("bs4")

ALL = sorted(p.relative_to(HTML).as_posix() for p in HTML.rglob("*.html") if "_static" not in p.parts)
#: One generated reference page stands for all: they come from one template.
_GENERATED = [p for p in ALL if p.startswith("reference/generated/")]
#: The demonstration report is not a page of the theme; tests of reports look at one in a browser.
PAGES = [p for p in ALL if p not in [*_GENERATED, "demo-report.html"]] + _GENERATED[:1]


#: How each page is looked at, one after the other in one visit.
STATES = {"light": (1280, "light"), "dark": (1280, "dark"), "narrow": (360, "dark")}

#: Visible elements that stick out of the screen, unless something around them scrolls.
_TOO_WIDE = """() => {
  const scrolls = e => e && e !== document.body && (scrolls(e.parentElement)
    || (["auto", "scroll"].includes(getComputedStyle(e).overflowX) && e.clientWidth <= innerWidth));
  const out = [...document.querySelectorAll("body *")].filter(e => e.checkVisibility({visibilityProperty: true})
    && e.getBoundingClientRect().right > document.documentElement.clientWidth + 1 && !scrolls(e.parentElement));
  if (document.documentElement.scrollWidth > document.documentElement.clientWidth) out.push(document.documentElement);
  return out.slice(0, 5).map(e => e.outerHTML.slice(0, 120));
}"""


#: Marks one text of each look: thousands on a page share a few dozen colours (theirs, and of the text they stand in),
#: sizes and grounds, and so their contrast.
_MARK_ONE_OF_EACH_LOOK = """() => {
  document.querySelectorAll("[data-look]").forEach(e => e.removeAttribute("data-look"))
  const seen = new Set(), texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
  const mark = e => {
    const { color, fontSize, fontWeight, textShadow } = getComputedStyle(e)
    const look = [color, fontSize, fontWeight, textShadow, getComputedStyle(e.parentElement).color]
    for (let ground = e; ground; ground = ground.parentElement) {
      const { backgroundColor, backgroundImage, opacity } = getComputedStyle(ground)
      const seenThrough = backgroundColor === "rgba(0, 0, 0, 0)" && backgroundImage === "none" && opacity === "1"
      if (!seenThrough) look.push(backgroundColor, backgroundImage, opacity)
    }
    if (!seen.has(look.join())) e.dataset.look = seen.add(look.join()).size
  }
  while (texts.nextNode()) {
    const e = texts.currentNode.parentElement
    if (texts.currentNode.data.trim() && e.checkVisibility({visibilityProperty: true})) mark(e)
  }
  document.querySelectorAll("input, select, textarea").forEach(mark)
}"""
_JUDGE = "async ([part, options]) => (await axe.run(part ?? document, options)).violations"
#: Describing what is well takes time.
_BRIEFLY = {"resultTypes": ["violations"]}
#: The rules that judge colours.
_OF_COLOURS = ["color-contrast", "link-in-text-block"]


@pytest.fixture(scope="module")
def site():
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(HTML))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def window(browser):
    """One window for all visits: to open one takes longer than to open a page in it."""
    context = browser.new_context()
    yield context.new_page()
    context.close()


class _Visit:
    """One page, opened as if the browser had never been here; what it asked for and complained of."""

    def __init__(self, window, site: str, name: str):
        self.page = window
        self.site = site
        self.outside: list[str] = []
        self.complaints: list[str] = []
        self.judged = False
        self.listeners = {"request": self._note_request, "console": self._note_message, "pageerror": self._complain}
        for event, listener in self.listeners.items():
            self.page.on(event, listener)
        self.page.set_viewport_size({"width": 1280, "height": 900})
        self.page.emulate_media(color_scheme="light")
        self.page.goto(site + name, wait_until="load")
        self.page.wait_for_timeout(150)

    def _note_request(self, request):
        if not request.url.startswith((self.site, "data:", "blob:")):
            self.outside.append(request.url)

    def _note_message(self, message):
        if message.type == "error":
            self._complain(message.text)

    def _complain(self, what: object):
        if not self.judged:  # what asks for style sheets to judge them is not the page
            self.complaints.append(str(what))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object):
        for event, listener in self.listeners.items():
            self.page.remove_listener(event, listener)
        self.page.evaluate("localStorage.clear(); sessionStorage.clear()")
        self.page.goto("about:blank")

    def in_state(self, width: int, scheme: str) -> Iterator[str]:
        """Show the page so; gives what is wrong with it."""
        page = self.page
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(500)  # the theme waits until a window has its size
        for _ in range(20):  # a busy machine takes its time
            if page.evaluate("document.documentElement.dataset.theme") == scheme:
                break
            page.wait_for_timeout(500)
        else:
            yield "the theme is another"
        if wide := page.evaluate(_TOO_WIDE):
            yield f"wider than the screen: {wide}"
        shown = page.evaluate(
            """() => [...document.querySelectorAll('img.only-light, img.only-dark')]
                 .filter(e => e.offsetParent !== null).map(e => e.className)"""
        )
        if any(f"only-{scheme}" not in classes for classes in shown):
            yield "a figure for the other mode is shown"
        # A mode changes colours, a width changes all else.
        violations = []
        self.judged = True
        if (width, scheme) != STATES["narrow"]:
            page.evaluate(_MARK_ONE_OF_EACH_LOOK)
            violations += page.evaluate(_JUDGE, ["[data-look]", {**_BRIEFLY, "runOnly": _OF_COLOURS}])
        if (width, scheme) != STATES["dark"]:
            rest = {**_BRIEFLY, "rules": {rule: {"enabled": False} for rule in _OF_COLOURS}}
            violations += page.evaluate(_JUDGE, [None, rest])
        self.judged = False
        for violation in violations:
            if violation["impact"] in {"serious", "critical"} and violation["id"] not in TOLERATED:
                for node in violation["nodes"]:
                    yield f"accessibility: {violation['id']} ({violation['impact']}): {node['target']}"


@pytest.mark.parametrize("name", PAGES)
def test_page(window, site, name):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    with _Visit(window, site, name) as visit:
        visit.page.evaluate(axe.axe_script)
        found = []
        # What is folded is read as well.
        visit.page.evaluate("document.querySelectorAll('article details').forEach(fold => { fold.open = true })")
        for state, (width, scheme) in STATES.items():
            found += [f"{state}: {wrong}" for wrong in visit.in_state(width, scheme)]
        found += [f"requests: {url} is not on localhost" for url in visit.outside]
        found += [f"console: {complaint}" for complaint in visit.complaints]
    assert not found, "\n" + "\n".join(found)


@functools.cache
def _soup(path: Path):
    return bs4.BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


@functools.cache
def _anchors(path: Path) -> frozenset[str]:
    soup = _soup(path)
    return frozenset(e["id"] for e in soup.find_all(id=True)) | {
        e["name"] for e in soup.find_all("a", attrs={"name": True})
    }


def _broken_links(name: str) -> Iterator[str]:
    for tag, attribute in (("a", "href"), ("img", "src"), ("link", "href"), ("script", "src")):
        for element in _soup(HTML / name).find_all(tag):
            target = element.get(attribute, "")
            url, fragment = urldefrag(urljoin(f"/{name}", target))
            if urlsplit(url).scheme or (tag != "a" and target.startswith("data:")):
                continue
            file = HTML / unquote(urlsplit(url).path).lstrip("/")
            file = file / "index.html" if file.is_dir() else file
            if not file.is_file():
                yield f"{name}: {target}: no such file"
            elif fragment and file.suffix == ".html" and unquote(fragment) not in _anchors(file):
                yield f"{name}: {target}: no such anchor"


def test_links():
    """In one process: each page leads to most others, and is parsed once."""
    wrong = [problem for name in ALL for problem in _broken_links(name)]
    assert not wrong, "\n" + "\n".join(wrong)
