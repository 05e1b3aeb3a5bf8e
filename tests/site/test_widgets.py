"""Sliders over grids: a reader sees what the package says, also with a keyboard, on a phone and without a script."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HTML = Path(os.environ.get("NSIGHTKIT_HTML", ROOT / "docs" / "_build" / "html"))
MOST_BYTES = 100_000


needs_page = pytest.mark.skipif(not (HTML / "widgets.html").is_file(), reason="the site is not built: run nox -s docs")


@needs_page
@pytest.mark.site
@pytest.mark.parametrize("name", ["ledger", "roofline"])
def test_a_grid_is_whole_and_light(name):
    html = (HTML / "widgets.html").read_text(encoding="utf-8")
    text = (
        html.partition(f'id="widget-{name}"')[2]
        .partition('<script type="application/json">')[2]
        .partition("</script>")[0]
    )
    assert len(text.encode()) <= MOST_BYTES
    assert "</" not in text
    found = json.loads(text)
    settings = 1
    for axis in found["axes"]:
        assert 0 <= axis["start"] < len(axis["choices"])
        settings *= len(axis["choices"])
    assert len(found["rows"]) == settings
    for row in found["rows"]:
        words = row[: -2 * len(found["names"])]
        assert all(found["texts"][word] for word in words)
        assert max(row[len(words) + 1 :: 2]) in (0, 100)


@pytest.fixture
def page(browser):
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.goto((HTML / "widgets.html").absolute().as_uri())
    yield page
    context.close()


@pytest.mark.site
@needs_page
def test_with_a_script_there_are_only_the_settings(page):
    assert page.locator(".nsightkit-widget form").count() == 2
    assert not page.locator(".nsightkit-widget > div").first.is_visible()
    page.set_viewport_size({"width": 390, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth <= 390")
