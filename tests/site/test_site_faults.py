"""The checks of the site find what they look for: a small site with one fault of each kind, and one without."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

pytestmark = pytest.mark.site
for _needed in ("bs4", "playwright", "axe_playwright_python"):
    pytest.importorskip(_needed)

HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>A page</title>
<meta name="viewport" content="width=device-width">
<script>
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const follow = () => document.documentElement.dataset.theme = dark.matches ? "dark" : "light";
  dark.addEventListener("change", follow);
  follow();
</script>
<style>body { margin: 1rem; font: 16px sans-serif } [data-theme=dark] body { background: #111; color: #eee }
[data-theme=dark] a { color: #8cf }</style></head><body><main><h1 id="top">A page</h1>
<p>Some words, and <a href="#top">a link</a>.</p>
"""
TAIL = "</main></body></html>"

#: Page: what is planted in it, and who must see it: a kind of problem of the page's own test, or a test by its name.
FAULTS = {
    "index": ("", ()),
    "contrast": ('<p style="color: #777; background: #888">unreadable</p>', ("light", "dark")),
    "contrast-in-the-dark": (
        '<style>[data-theme=dark] .x { color: #333; background: #222 }</style><p class="x">unreadable</p>',
        ("dark",),
    ),
    "contrast-on-another-ground": (
        '<p style="color: #333">words</p><div style="background: #444"><p style="color: #333">unreadable</p></div>',
        ("light", "dark"),
    ),
    "light-in-the-dark": (
        '<article><div style="background: #fff; color: #333; height: 4em">a card</div></article>',
        ("dark", "narrow"),
    ),
    "console-error": ("<script>console.error('no')</script>", ("console",)),
    "exception": ("<script>undefined_function()</script>", ("console",)),
    "outside-request": ('<script src="https://example.org/x.js"></script>', ("requests", "console")),
    "overflow-on-a-phone": ('<div style="width: 700px">wide</div>', ("narrow",)),
    "weight": ("<!-- " + "x" * 1_300_000 + " -->", ("weight",)),
    "no-alternative-text": ('<img src="small.png">', ("light", "narrow", "images_say_what_they_show")),
    "broken-link": ('<p><a href="absent.html">there</a></p>', ("links",)),
    "broken-anchor": ('<p><a href="#absent">there</a></p>', ("links",)),
}
_PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c63000100000500010d0a2db4"
    "0000000049454e44ae426082"
)  # fmt: skip


def _failing(site: Path) -> dict[str, str]:
    """The tests that fail on a site with a page for each fault, and what they say."""
    for name, (planted, _) in FAULTS.items():
        (site / f"{name}.html").write_text(HEAD + planted + TAIL, encoding="utf-8")
    (site / "small.png").write_bytes(_PNG)
    (site / "_images").mkdir()
    (site / "_images" / "figure.png").write_bytes(_PNG + bytes(400_000))
    tests, report = Path(__file__).with_name("test_site.py"), site / "report.xml"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "site", "-p", "no:cacheprovider", f"--junitxml={report}", str(tests)],
        check=False,
        cwd=tests.parents[2],
        env={**os.environ, "NSIGHTKIT_HTML": str(site)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert " passed" in done.stdout, done.stdout + done.stderr
    cases = ET.parse(report).iter("testcase")
    return {case.get("name"): case.find("failure").get("message") for case in cases if case.find("failure") is not None}


def test_each_planted_fault_is_found_and_nothing_else(browser, tmp_path):
    del browser  # without one there is nothing to see with
    failed = _failing(tmp_path)
    for page, (_, found_by) in FAULTS.items():
        seen = set(re.findall(r"^ +(\w+): ", failed.get(f"test_page[{page}.html]", ""), flags=re.MULTILINE))
        seen |= {name[5:].partition("[")[0] for name in failed if name.endswith(f"[{page}.html]")} - {"page"}
        assert seen == set(found_by), page
    assert "test_images_are_light" in failed, "a heavy image"
