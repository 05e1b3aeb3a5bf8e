"""Sliders over grids: a reader sees what the package says, also with a keyboard, on a phone and without a script."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from nsightkit import hardware
from nsightkit.analysis.core.text import time_text
from nsightkit.analysis.roofline import sol
from nsightkit.analysis.roofline.costs import gemm_cost

ROOT = Path(__file__).parents[2]
HTML = Path(os.environ.get("NSIGHTKIT_HTML", ROOT / "docs" / "_build" / "html"))
MOST_BYTES = 100_000


# ---------------------------------------------------------------- the grids


@pytest.fixture(scope="module")
def widgets():
    pytest.importorskip("sphinx")
    sys.path.insert(0, str(ROOT / "docs" / "_ext"))
    import widgets

    return widgets


@pytest.mark.parametrize("name", ["ledger", "roofline"])
def test_a_grid_is_whole_and_light(widgets, name):
    grid = widgets.GRIDS[name]()
    found = json.loads(grid.as_json())
    assert len(grid.as_json().encode()) <= MOST_BYTES
    settings = 1
    for axis in found["axes"]:
        assert 0 <= axis["start"] < len(axis["choices"])
        settings *= len(axis["choices"])
    assert len(found["rows"]) == settings
    for row in found["rows"]:
        words = row[: -2 * len(found["names"])]
        assert all(found["texts"][word] for word in words)
        assert max(row[len(words) + 1 :: 2]) in (0, 100)
    assert grid.as_html(name).count("</script>") == 1


# ---------------------------------------------------------------- the page


needs_page = pytest.mark.skipif(not (HTML / "widgets.html").is_file(), reason="the site is not built: run nox -s docs")


@pytest.fixture
def page(browser):
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.goto((HTML / "widgets.html").absolute().as_uri())
    yield page
    context.close()


def _set(page, name: str, settings: dict[str, str]):
    """Choose as a reader does; gives the widget."""
    widget = page.locator(f"#widget-{name}")
    for label, wanted in settings.items():
        control = widget.get_by_label(label, exact=True)
        if control.evaluate("e => e.tagName") == "SELECT":
            options = control.locator("option").all_inner_texts()
            control.select_option(label=next(text for text in options if text.startswith(wanted)))
            continue
        control.focus()
        page.keyboard.press("Home")
        for _ in range(50):
            if control.get_attribute("aria-valuetext") == wanted:
                break
            page.keyboard.press("ArrowRight")
        assert control.get_attribute("aria-valuetext") == wanted
    return widget


def _items(widget) -> dict[str, str]:
    return dict(
        widget.locator("tr:has(th[scope=row])").evaluate_all(
            "rows => rows.map(r => [r.cells[0].textContent, r.cells[1].textContent])"
        )
    )


@pytest.mark.site
@needs_page
@pytest.mark.parametrize(
    ("card", "operation", "tokens", "precision", "cost"),
    [
        ("H200 SXM", "down projection", 4096, "16 bits", gemm_cost(4096, 4096, 14_336, "bf16")),
        ("V100 SXM2", "output head", 16, "16 bits", gemm_cost(16, 128_256, 4096, "fp16")),
    ],
)
def test_the_roofline_shows_what_the_package_says(page, card, operation, tokens, precision, cost):
    settings = {"Card": card, "Operation": operation, "Tokens at once": f"{tokens:,}", "Precision": precision}
    widget = _set(page, "roofline", settings)
    rates = sol.datasheet(hardware.find(card))
    (expected,) = sol.bounds([cost], rates).to_dict("records")
    said = widget.locator("output").inner_text()
    assert said.startswith(f"{expected['bound'].capitalize()}-bound: at least {time_text(expected['bound_ns'])}.")
    assert _items(widget) == {
        "computing": time_text(rates.compute_ns(cost)),
        "moving bytes": time_text(rates.memory_ns(cost)),
    }


@pytest.mark.site
@needs_page
def test_with_a_script_there_are_only_the_settings(page):
    assert page.locator(".nsightkit-widget form").count() == 2
    assert not page.locator(".nsightkit-widget > div").first.is_visible()
    page.set_viewport_size({"width": 390, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth <= 390")
