"""The timeline that zooms: nothing lost in packing, nothing executed, and a browser that can use it."""

from __future__ import annotations

import base64
import json
import zlib
from collections import Counter

import hostile
import many
import numpy as np
import pandas as pd
import pytest
from hostile import NAMES as HOSTILE
from synthetic import planted
from watched_page import WatchedPage, until

import nsightkit
from nsightkit import plots
from nsightkit.plots import packing

bs4 = pytest.importorskip("bs4")


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("planted") / "starved.sqlite"
    planted.training(path, "starved")
    return nsightkit.load(path)


def unpacked(shown):
    data = bs4.BeautifulSoup(shown.html(), "html.parser").select_one('script[type="text/plain"]')
    return json.loads(zlib.decompress(base64.b64decode(data.string)))


def rows_of(shown):
    """Events and their time, by the label of the row: read back by the format's description alone."""
    page = unpacked(shown)
    totals = Counter()
    times = Counter()
    for row in page["traces"][0]["rows"]:
        for number in row["lanes"]:
            lane = page["lanes"][number]
            totals[row["label"]] += sum(lane.get("number", [1] * len(lane["gap"])))
            times[row["label"]] += sum(lane.get("busy", lane["length"]))
    return {label: (totals[label], times[label]) for label in totals}


# ---- Packing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell_ns", [1, 7, 100, 4096, 10**7])
def test_merging_keeps_counts_and_sums(cell_ns):
    rng = np.random.default_rng(1)
    start, length = rng.integers(0, 1_000_000, 20_000), rng.lognormal(5, 2, 20_000).astype(np.int64)
    events = packing.items(start, length, np.arange(20_000))
    merged = packing.merged(events, cell_ns)
    assert merged[["busy", "number"]].sum().tolist() == [length.sum(), 20_000]
    assert merged["start"].is_monotonic_increasing
    several = merged["number"] > 1
    assert (merged["length"][several] < 2 * cell_ns).all()
    long = merged[~several & (merged["length"] >= cell_ns)].reset_index(drop=True)
    pd.testing.assert_frame_equal(long, events[events["length"] >= cell_ns].reset_index(drop=True))


@pytest.mark.parametrize("most_bytes", [10**9, 60_000, 1_000])
def test_packing_keeps_every_rows_events_and_time_in_so_many_bytes(most_bytes):
    kernels = many.kernels(30_000, streams=(7, 13, 20))
    shown = plots.interactive_timeline({"": kernels}, most_bytes=most_bytes)
    lasting = kernels["kernels"]["end_ns"] - kernels["kernels"]["start_ns"]
    truth = {f"GPU stream {stream}": (len(t), t.sum()) for stream, t in lasting.groupby(kernels["kernels"]["stream"])}
    assert rows_of(shown) == truth
    assert len(shown.data) <= most_bytes
    assert (unpacked(shown)["merged"] > 0) == (most_bytes < 10**9)


def test_hostile_names_stay_text(monkeypatch):
    monkeypatch.setattr(hostile, "NAMES", (*HOSTILE, "x" * 2**20))
    label = HOSTILE[0] + HOSTILE[3]
    shown = plots.interactive_timeline({label: hostile.trace(), "b": hostile.trace()}, title=label)
    page = bs4.BeautifulSoup(shown.html(), "html.parser")
    assert [tag.name for tag in page.find_all()] == ["nsightkit-timeline", "p", "script", "script"]
    assert not any(key.startswith("on") for tag in page.find_all() for key in tag.attrs)
    assert label in page.get_text()
    names = [name for name, _ in unpacked(shown)["names"]]
    assert HOSTILE[0] in names
    assert max(map(len, names)) == 400
    assert len(shown.html()) < 300_000


def test_the_program_can_stand_in_a_script_element():
    for never in ("</script", "<!--", "innerHTML", "eval(", "http://", "https://", "fetch("):
        assert never not in packing.program()


# ---- In a browser ---------------------------------------------------------------------------------------------------

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>A timeline</title>
<meta name="viewport" content="width=device-width"><style>
@media (prefers-color-scheme: dark) {{ html {{ background: #14181e; color: #ced6dd }} }}
body {{ font-family: sans-serif; max-width: 60rem; margin: 1rem auto; padding: 0 12px }}
</style></head><body><main><h1>A timeline</h1>{body}</main></body></html>"""


class Opened(WatchedPage):
    """A page with one timeline."""

    def __init__(self, browser, path, shown, *, width=1000, **context):
        path.write_text(PAGE.format(body=shown if isinstance(shown, str) else shown.html()), "utf-8")
        super().__init__(browser, path, width=width, **context)
        self.board = self.page.locator("nsightkit-timeline .rows")
        self.detail = self.page.locator("nsightkit-timeline .detail")

    def view(self):
        return self.get("[e.view.start, e.view.end]")

    def press(self, *keys):
        for key in keys:
            self.page.keyboard.press(key)

    def point(self, time):
        """Where on the page a moment of the stream is."""
        left, width, middle = self.get(
            "(() => { const row = e.rows.find((row) => row.label === 'GPU stream 7');"
            "const b = row.canvas.getBoundingClientRect(); return [b.left, b.width, b.top + b.height / 2]; })()"
        )
        start, end = self.view()
        return left + (time - start) / (end - start) * width, middle


@pytest.fixture
def opened(browser, tmp_path):
    """Open pages, and close them even when a test fails."""
    return lambda shown, **options: Opened(browser, tmp_path / "page.html", shown, **options)


@pytest.mark.site
def test_zooming_and_panning_change_the_window(opened, trace):
    with opened(plots.interactive_timeline({"": trace})) as shown:
        page, span = shown.page, shown.get("e.span")
        assert shown.view() == [0, span]
        page.get_by_role("button", name="Zoom in").click()
        assert shown.view() == [span / 4, span * 3 / 4]
        shown.board.focus()
        shown.press("ArrowRight")
        assert shown.view() == pytest.approx([span * 0.35, span * 0.85])
        shown.press("Home")
        assert shown.view() == [0, span]
        # The wheel zooms about the pointer, whose place is in whole pixels.
        x, y = shown.point(span / 4)
        page.mouse.move(x, y)
        page.mouse.wheel(0, -300)
        until(page, "(e => e.view.end - e.view.start < e.span * 0.5)(document.querySelector('nsightkit-timeline'))")
        assert shown.point(span / 4)[0] == pytest.approx(x, abs=2)
        page.get_by_role("button", name="All").click()
        assert shown.view() == [0, span]


@pytest.mark.site
def test_pointing_at_a_kernel_names_it_and_keys_go_on_from_it(opened, trace):
    kernel, after = trace["kernels"].sort_values("start_ns").iloc[40:42].to_dict("records")
    length = kernel["end_ns"] - kernel["start_ns"]
    with opened(plots.interactive_timeline({"": trace})) as shown:
        first = shown.get("e.traces[0].first")
        middle = kernel["start_ns"] + length / 2 - first
        shown.get(f"e.show({middle} - 3e5, {middle} + 3e5)")
        where = shown.point(middle)
        shown.page.mouse.move(*where)
        assert kernel["name"] in shown.detail.inner_text()
        assert f"{length / 1000:.4g} µs" in shown.detail.inner_text()
        shown.page.mouse.dblclick(*where)
        start, end = shown.view()
        assert start < kernel["start_ns"] - first < kernel["end_ns"] - first < end < start + 3 * length
        shown.press("n")
        assert after["name"] in shown.detail.inner_text()
        assert shown.get("e.picked.start") == after["start_ns"] - first
        shown.press("p")
        assert shown.get("e.picked.start") == kernel["start_ns"] - first
        shown.press("Enter", "Escape")
        assert shown.get("e.picked") is None
