"""What the site's own script does in a browser: tables of results sort by what their cells mean."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.site

SCRIPT = Path(__file__).parents[2] / "docs" / "_static" / "nsightkit.js"
ROWS = [
    ("beta", "900 µs", "12.5%", "1.5 KiB"),
    ("alpha", "1.2 s", "\u22123%", "2 B"),
    ("gamma", "45 ms", "n/a", "3 MiB"),
    ("delta", "2,000 ns", "100%", ""),
]


@pytest.fixture(scope="module")
def page(browser):
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in ROWS)
    head = "".join(f"<th>{name}</th>" for name in ("name", "time", "share", "bytes"))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    small = "<table><thead><tr><th>a</th></tr></thead><tbody><tr><td>1</td></tr></tbody></table>"
    page = browser.new_page()
    page.set_content(
        f"<script>{SCRIPT.read_text(encoding='utf-8')}</script><div class='output_subarea'>{table}{small}</div>"
    )
    yield page
    page.close()


def _column(page, heading: str, index: int) -> list[str]:
    page.get_by_role("button", name=heading).click()
    return page.eval_on_selector_all("tbody:first-of-type tr", f"rows => rows.map(r => r.cells[{index}]?.textContent)")[
        :4
    ]


@pytest.mark.parametrize(
    ("heading", "index", "down"),
    [
        ("time", 1, ["1.2 s", "45 ms", "900 µs", "2,000 ns"]),
        ("name", 0, ["gamma", "delta", "beta", "alpha"]),
        ("share", 2, ["100%", "12.5%", "\u22123%", "n/a"]),
        ("bytes", 3, ["3 MiB", "1.5 KiB", "2 B", ""]),
    ],
)
def test_down_then_up_then_down(page, heading, index, down):
    assert _column(page, heading, index) == down
    assert page.get_by_role("columnheader", name=heading).get_attribute("aria-sort") == "descending"
    known = [cell for cell in down if cell not in {"n/a", ""}]
    unknown = [cell for cell in down if cell in {"n/a", ""}]
    assert _column(page, heading, index) == known[::-1] + unknown, "what has no number stays below"
    assert page.get_by_role("columnheader", name=heading).get_attribute("aria-sort") == "ascending"
    assert _column(page, heading, index) == down
