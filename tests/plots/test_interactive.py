"""The timeline that zooms: nothing lost in packing, nothing executed, and a browser that can use it."""

from __future__ import annotations

import base64
import html.parser
import json
import zlib
from collections import Counter

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from synthetic import planted
from watched_page import WatchedPage

import nsightkit
from nsightkit import plots, safe
from nsightkit.analysis.core import intervals
from nsightkit.analysis.timeline import kernels, overview
from nsightkit.errors import UsageError
from nsightkit.plots import lanes, packing
from nsightkit.trace.model import Trace, TraceMeta, categorical

HOSTILE = [
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "$x$ $\\frac{1}$",
    "\u202egnirts desrever\u202c שלום",
    "'\"><svg onload=alert(1)>",
    "\x00\x1b[31m",
]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("planted") / "starved.sqlite"
    planted.training(path, "starved")
    return nsightkit.load(path)


def _many(n, *, seed=0, streams=(7,), names=None):
    """Kernels one after the other on each of some streams, which overlap each other."""
    rng = np.random.default_rng(seed)
    names = names or [f"void at::native::elementwise_kernel<{i}>(int)" if i % 2 else f"gemm_{i}" for i in range(40)]
    parts = []
    for stream in streams:
        duration = rng.lognormal(9, 1.2, n // len(streams)).astype(np.int64) + 800
        start = np.cumsum(duration + rng.exponential(1500, len(duration)).astype(np.int64)) - duration
        parts.append(pd.DataFrame({"start_ns": start, "end_ns": start + duration, "stream": stream}))
    frame = pd.concat(parts, ignore_index=True)
    frame["name"] = categorical(rng.integers(0, len(names), len(frame)), names)
    return Trace.from_frames({"kernels": frame})


class _Read:
    """The packed data, read back by the format's description alone."""

    def __init__(self, shown):
        soup = _Tags(shown.html())
        body = zlib.decompress(base64.b64decode(soup.data))
        size = int.from_bytes(body[:4], "little")
        self.head = json.loads(body[4 : 4 + size])
        self.traces = []
        at = 4 + size
        for described in self.head["traces"]:
            n = sum(items for levels in described["lanes"] for _, items in levels)
            columns = []
            for width in described["widths"]:
                planes = np.frombuffer(body, np.uint8, width * n, at).reshape(width, n).astype(np.int64)
                columns.append(sum((plane << (8 * i) for i, plane in enumerate(planes)), np.zeros(n, np.int64)))
                at += width * n
            gap, length, extra, more, name = columns
            gap, extra = ((v >> 1) ^ -(v & 1) for v in (gap, extra))
            lanes, here = [], 0
            for levels in described["lanes"]:
                lanes.append([])
                for cell, items in levels:
                    part = slice(here, here + items)
                    start = np.cumsum(gap[part] + length[part]) - length[part]
                    frame = pd.DataFrame(
                        {"start": start, "length": length[part], "busy": (length + extra)[part]}
                        | {"number": more[part] + 1, "name": [self.head["names"][i][0] for i in name[part]]}
                        | {"group": [self.head["groups"][self.head["names"][i][1]][0] for i in name[part]]}
                    )
                    lanes[-1].append((cell, frame))
                    here += items
            self.traces.append((described, lanes))
        assert at == len(body)

    def rows(self, view, number=0):
        """Total of each row: its events and their time, less what overlaps."""
        described, lanes = self.traces[number]
        groups = [label for label, _ in self.head["groups"]]
        totals = {}
        for row in described["views"][view]:
            for level in range(max(len(lanes[lane]) for lane, _, _ in row["of"])):
                events = time = 0
                for lane, group, sign in row["of"]:
                    frame = lanes[lane][min(level, len(lanes[lane]) - 1)][1]
                    frame = frame[frame["group"] == groups[group]] if group >= 0 else frame
                    events += frame["number"].sum() if sign > 0 else 0
                    time += sign * frame["busy"].sum()
                totals.setdefault(row["label"], set()).add((int(events), int(time)))
        return totals


class _Tags(html.parser.HTMLParser):
    """Which elements a browser would make."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.data, self._in = Counter(), "", None
        self.words = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        assert not any(key.startswith("on") for key, _ in attrs)
        self._in = dict(attrs).get("type") if tag == "script" else None

    def handle_endtag(self, tag):
        self._in = None

    def handle_data(self, data):
        self.words += data
        if self._in == "text/plain":
            self.data += data


def _items(n, seed=1):
    rng = np.random.default_rng(seed)
    start = np.sort(rng.integers(-1000, 1_000_000, n))
    length = rng.lognormal(5, 2, n).astype(np.int64)
    return packing.items(start, length, name=(name := rng.integers(0, 9, n)), group=name % 3)


@pytest.mark.parametrize("cell", [0, 1, 7, 100, 4096, 10**7])
def test_merging_keeps_counts_and_sums_of_each_group(cell):
    events = _items(20_000)
    merged = packing.merged(events, cell)
    truth = events.groupby(events["name"] % 3)[["busy", "number"]].sum()
    pd.testing.assert_frame_equal(merged.groupby(merged["name"] % 3)[["busy", "number"]].sum(), truth)
    assert (np.diff(merged["start"]) >= 0).all()
    several = merged["number"] > 1
    assert (merged["length"][several] < 2 * cell).all()
    # One at a time: what is as long as a cell stays as it is.
    assert (merged["length"][~several] >= 0).all()
    assert (events["length"] >= max(cell, 2)).sum() == (~several & (merged["length"] >= max(cell, 2))).sum()


def test_a_run_is_called_by_its_longest_event():
    start, length = np.array([0, 10, 30, 200]), np.array([5, 9, 2, 3])
    merged = packing.merged(packing.items(start, length, name=np.arange(4)), 100)
    assert merged["name"].tolist() == [1, 3]
    assert merged["number"].tolist() == [3, 1]
    assert merged["length"].tolist() == [32, 3]


def test_excess_is_what_the_sum_has_over_the_union():
    events = _items(3000)
    start, length = events["start"].to_numpy(), events["length"].to_numpy()
    excess = packing.excess(start, length)
    assert length.sum() - excess["busy"].sum() == intervals.union_length(start, start + length)
    assert packing.excess(np.array([0, 10]), np.array([10, 5])).empty


@pytest.mark.parametrize("most_bytes", [10**9, 30_000, 8_000])
def test_packing_keeps_every_rows_events_and_time(most_bytes):
    trace = _many(30_000, streams=(7, 13, 20))
    shown = plots.interactive_timeline(trace, most_bytes=most_bytes)
    read = _Read(shown)
    raw, rolled = read.rows("raw"), read.rows("rolled")
    lasting = trace["kernels"]["end_ns"] - trace["kernels"]["start_ns"]
    for stream, time in lasting.groupby(trace["kernels"]["stream"]):
        assert raw[f"GPU stream {stream}"] == {(len(time), time.sum())}
    # Every level says the same, and overlapping streams count once.
    assert rolled["GPU busy"] == {(30_000, intervals.busy(trace)["busy_ns"].sum())}
    assert shown.events == 30_000
    assert shown.items < 31_000 if most_bytes == 10**9 else shown.items < 15_000


def test_rolled_up_rows_are_the_categories_of_the_analysis(trace):
    rolled = _Read(plots.interactive_timeline(trace)).rows("rolled")
    for row in kernels.summary(trace, by="category").itertuples():
        assert rolled[row.name] == {(row.count, row.total_ns)}
    assert rolled["GPU busy"] == {(len(trace["kernels"]) + len(trace["memops"]), overview.summary(trace)["busy_ns"])}


def test_the_most_bytes_are_kept_and_the_page_says_what_was_merged():
    small = plots.interactive_timeline(_many(50_000), most_bytes=60_000)
    assert small.data_bytes <= 60_000
    assert _Read(small).traces[0][0]["merged"] > 0
    assert _Read(plots.interactive_timeline(_many(500))).traces[0][0]["merged"] == 0


def test_only_the_largest_traces_are_merged():
    shown = plots.interactive_timeline({"big": _many(50_000), "small": _many(1000)}, most_bytes=60_000)
    big, small = (described["merged"] for described, _ in _Read(shown).traces)
    assert big > 0 == small


def test_ten_traces_of_five_thousand_kernels_fit_a_page():
    shown = plots.interactive_timeline({f"trace {i}": _many(5000, seed=i) for i in range(10)})
    assert shown.data_bytes < 250_000
    assert len(shown.html()) < 500_000


def test_a_hundred_thousand_kernels_fit_a_report():
    shown = plots.interactive_timeline(_many(100_000), most_bytes=4_500_000)
    assert shown.items == 100_000
    assert len(shown.html()) < 5_000_000


def _hostile(extra=()):
    names = [*HOSTILE, *extra]
    at = np.arange(len(names)) * 1000
    frame = pd.DataFrame({"start_ns": at, "end_ns": at + 900, "name": names, "thread": 5, "kind": "pushpop"})
    work = frame.assign(stream=7)[["start_ns", "end_ns", "stream", "name"]]
    meta = TraceMeta(thread_names={5: HOSTILE[0]})
    return Trace.from_frames({"kernels": work, "ranges": frame}, meta)


def test_hostile_names_stay_text():
    plain = _Tags(plots.interactive_timeline({"a": _hostile(), "b": _hostile()}, title="t").html())
    label = HOSTILE[0] + HOSTILE[4]
    shown = plots.interactive_timeline({label: _hostile(["x" * 2**20]), "b": _hostile()}, title=label)
    tags = _Tags(shown.html())
    assert set(tags.tags) == set(plain.tags)
    assert tags.tags["script"] == 2
    assert not {"img"} & set(tags.tags)
    assert label in tags.words  # as a summary of the static figure
    read = _Read(shown)
    names = [name for name, _ in read.head["names"]]
    assert HOSTILE[0] in names
    assert max(map(len, names)) <= 400
    assert len(shown.html()) < 300_000


def test_the_program_can_stand_in_a_script_element():
    program = packing.program()
    for never in ("</script", "<!--", "innerHTML", "eval(", "http://", "https://", "fetch("):
        assert never not in program


def test_without_gpu_work_ranges_are_rolled_up_by_name():
    ops = pd.DataFrame(
        {"start_ns": [0, 10, 50, 200], "end_ns": [100, 40, 90, 260], "thread": 5, "name": ["mm", "copy_", "mm", "mm"]}
    )
    read = _Read(plots.interactive_timeline(Trace.from_frames({"ops": ops})))
    assert [len(lanes[0][1]) for lanes in read.traces[0][1][:2]] == [2, 2]  # outer and inner ones
    rolled = read.rows("rolled")
    assert rolled == {"mm": {(3, 160)}, "copy_": {(1, 30)}}  # an op within its like counts once


def test_without_gpu_work_ops_lie_under_the_ranges():
    ranges = pd.DataFrame({"start_ns": [0], "end_ns": [100], "thread": 5, "name": "step", "kind": "pushpop"})
    ops = pd.DataFrame({"start_ns": [10, 12], "end_ns": [40, 20], "thread": 5, "name": ["linear", "mm"]})
    frames = {"ranges": ranges, "ops": ops}
    read = _Read(plots.interactive_timeline(Trace.from_frames(frames)))
    assert [row["label"] for row in read.traces[0][0]["views"]["raw"]] == ["CPU thread 5", "CPU thread 5 ops", ""]
    assert read.rows("rolled") == {"CPU thread 5": {(1, 100)}, "linear": {(1, 30)}, "mm": {(1, 8)}}
    kernels = pd.DataFrame({"start_ns": [50], "end_ns": [60], "name": "gemm"})
    read = _Read(plots.interactive_timeline(Trace.from_frames({**frames, "kernels": kernels})))
    assert read.rows("raw") == {"CPU thread 5": {(1, 100)}, "GPU stream 0": {(1, 10)}}


def test_start_end_ranges_have_a_row():
    ranges = pd.DataFrame(
        {"start_ns": [0, 5], "end_ns": [10, 15], "thread": 5, "name": ["a", "b"], "kind": ["pushpop", "startend"]}
    )
    raw = _Read(plots.interactive_timeline(Trace.from_frames({"ranges": ranges}))).rows("raw")
    assert raw == {"CPU thread 5": {(1, 10)}, "CPU thread 5 start/end": {(1, 10)}}


def test_each_device_has_its_rows():
    frame = pd.DataFrame(
        {"start_ns": [0, 0], "end_ns": [5, 7], "device": [0, 1], "stream": 7, "name": ["gemm", "gemm"]}
    )
    read = _Read(plots.interactive_timeline(Trace.from_frames({"kernels": frame})))
    assert read.rows("rolled") == {
        "GPU 0 busy": {(1, 5)},
        "GPU 0 GEMM": {(1, 5)},
        "GPU 1 busy": {(1, 7)},
        "GPU 1 GEMM": {(1, 7)},
    }


def test_nothing_to_draw_is_shown_as_that():
    shown = plots.interactive_timeline(Trace.from_frames({}))
    assert "no events" in shown.html()
    assert _Read(shown).traces[0][1] == []


def test_a_wrong_call_is_refused():
    with pytest.raises(UsageError):
        plots.interactive_timeline({})


def test_the_static_figure_is_in_the_pages_ink(trace):
    before = plt.get_fignums()
    shown = plots.interactive_timeline(trace, title="Loading")
    assert plt.get_fignums() == before
    text = shown.html(script=False)
    assert f'aria-label="{shown.label}"' in text
    assert shown.label.startswith("Loading, lanes over ")
    assert "currentColor" in text
    assert "#010203" not in text  # what stands for the ink while matplotlib draws
    assert text == plots.interactive_timeline(trace, title="Loading").html(script=False)  # the same bytes each time
    assert (
        repr(shown) == f"<InteractiveTimeline of 1 trace: {shown.events:,} events, {shown.data_bytes / 1000:,.0f} kB>"
    )
    assert shown._repr_html_() == text + f"<script>\n{packing.program()}</script>"


@pytest.mark.parametrize("page", ["#ffffff", "#14181e"])
@pytest.mark.parametrize("colour", sorted({*packing.COLOURS.values(), *packing.CPU_COLOURS}))
def test_colours_stand_out_from_light_and_dark_pages(colour, page):
    def luminance(c):
        c = np.array(to_rgb(c))
        return float(np.dot([0.2126, 0.7152, 0.0722], np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)))

    light, dark = sorted([luminance(colour), luminance(page)], reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 3  # WCAG 1.4.11, graphical objects


# ---- In a browser ---------------------------------------------------------------------------------------------------

PAGE = """<!doctype html><html lang="en" data-theme="{theme}"><head><meta charset="utf-8"><title>A timeline</title>
<meta name="viewport" content="width=device-width"><style>
html[data-theme=dark] {{ color-scheme: dark; background: #14181e; color: #ced6dd }}
html[data-theme=light] {{ color-scheme: light; background: #fff; color: #1f2328 }}
body {{ font-family: sans-serif; max-width: 60rem; margin: 1rem auto; padding: 0 12px }}
</style></head><body><main><h1>A timeline</h1>{body}</main></body></html>"""


class _Open(WatchedPage):
    """A page with one timeline."""

    def __init__(self, browser, path, shown, *, width=1000, theme="light", ready=True, **context):
        path.write_text(PAGE.format(theme=theme, body=shown if isinstance(shown, str) else shown.html()), "utf-8")
        super().__init__(browser, path, width=width, theme=theme, ready=ready, **context)
        self.canvas = self.page.locator("nsightkit-timeline canvas")

    def view(self):
        return self.get("[e.view.start, e.view.end]")

    def settle(self, expression):
        """Wait for the end of a movement."""
        self.page.wait_for_function(
            f"(() => {{ const e = document.querySelector('nsightkit-timeline'); return {expression}; }})()"
        )

    def point(self, row, time):
        """Where on the page a row's moment is."""
        frame = self.canvas.bounding_box()
        x, y = self.get(
            f"(() => {{ const b = e.box, v = e.view, r = e.rows.find((row) => row.label === {json.dumps(row)});"
            f"return [b.left + ({time} - v.start) / (v.end - v.start) * b.width, r.top + r.height / 2]; }})()"
        )
        return frame["x"] + x, frame["y"] + y


@pytest.fixture
def opened(browser, tmp_path):
    """Open pages, and close them even when a test fails."""
    return lambda shown, **options: _Open(browser, tmp_path / "page.html", shown, **options)


@pytest.mark.site
def test_zooming_and_panning_change_the_window(opened, trace):
    with opened(plots.interactive_timeline(trace), reduced_motion="reduce") as shown:
        page, span = shown.page, shown.get("e.span")
        assert shown.view() == [0, span]
        page.get_by_role("button", name="Zoom in").click()
        assert shown.view() == [span / 4, span * 3 / 4]
        shown.canvas.focus()
        page.keyboard.press("ArrowRight")
        assert shown.view() == pytest.approx([span * 0.35, span * 0.85])
        page.keyboard.press("-")
        page.keyboard.press("-")
        assert shown.view() == [0, span]
        page.keyboard.press("+")
        page.keyboard.press("Home")
        assert shown.view() == [0, span]
        # The wheel zooms about the pointer, which stands on whole pixels.
        x, y = shown.point("GPU stream 7", span / 4)
        page.mouse.move(x, y)
        page.mouse.wheel(0, -300)
        shown.settle("e.view.end - e.view.start < e.span * 0.5")
        start, end = shown.view()
        assert shown.point("GPU stream 7", span / 4)[0] == pytest.approx(x, abs=2)
        page.mouse.down()
        page.mouse.move(x - 100, y, steps=3)
        page.mouse.up()
        assert shown.view()[0] == pytest.approx(start + 100 / shown.get("e.box.width") * (end - start))
        # The strip on top moves the window too.
        frame, left, width = shown.canvas.bounding_box(), shown.get("e.box.left"), shown.get("e.box.width")
        page.mouse.click(frame["x"] + left + width * 0.7, frame["y"] + 10)
        assert sum(shown.view()) / 2 == pytest.approx(span * 0.7, rel=0.01)
        page.get_by_role("button", name="All").click()
        assert shown.view() == [0, span]


@pytest.mark.site
def test_a_movement_is_shown_unless_less_motion_is_asked_for(opened, trace):
    with opened(plots.interactive_timeline(trace)) as shown:
        shown.page.get_by_role("button", name="Zoom in").click()
        shown.settle("e.view.end - e.view.start === e.span / 2")


@pytest.mark.site
def test_the_page_scrolls_over_a_timeline_nobody_chose(opened, trace):
    with opened(plots.interactive_timeline(trace).html() + "<div style='height: 3000px'></div>") as shown:
        before = shown.view()
        shown.page.mouse.move(*shown.point("GPU stream 7", 0))
        shown.page.mouse.wheel(0, 200)
        shown.page.wait_for_function("scrollY > 0")
        assert shown.view() == before


@pytest.mark.site
def test_pointing_at_a_kernel_names_it(opened, trace):
    kernel = trace["kernels"].sort_values("start_ns").iloc[40]
    shown = plots.interactive_timeline(trace)
    first = _Read(shown).head["traces"][0]["first"]
    middle = (kernel["start_ns"] + kernel["end_ns"]) / 2 - first
    with opened(shown, reduced_motion="reduce") as shown:
        shown.get(f"e.show({middle} - 3e5, {middle} + 3e5, false)")
        where = shown.point("GPU stream 7", middle)
        shown.page.mouse.move(*where)
        tip = shown.page.locator("nsightkit-timeline .tip")
        assert kernel["name"] in tip.inner_text()
        assert f"{(kernel['end_ns'] - kernel['start_ns']) / 1000:.1f} µs" in tip.inner_text()
        # A click keeps it, a double click zooms to it, and keys go on from it.
        shown.page.mouse.click(*where)
        said = shown.page.locator("nsightkit-timeline .said")
        assert kernel["name"] in said.inner_text()
        shown.page.mouse.dblclick(*where)
        start, end = shown.view()
        assert start < kernel["start_ns"] - first < kernel["end_ns"] - first < end
        assert end - start < 3 * (kernel["end_ns"] - kernel["start_ns"])
        shown.page.keyboard.press("n")
        after = trace["kernels"].sort_values("start_ns").iloc[41]
        assert after["name"] in said.inner_text()
        assert shown.get("e.picked.start") == after["start_ns"] - first
        shown.page.keyboard.press("p")
        assert shown.get("e.picked.start") == kernel["start_ns"] - first
        shown.page.keyboard.press("Enter")
        shown.page.keyboard.press("Escape")
        assert shown.get("e.picked") is None


@pytest.mark.site
def test_a_finger_can_do_it(opened, trace):
    with opened(plots.interactive_timeline(trace), has_touch=True, width=360) as shown:
        kernel = trace["kernels"].loc[trace["kernels"]["end_ns"].sub(trace["kernels"]["start_ns"]).idxmax()]
        first = shown.get("e.traces[0].first")
        middle = (kernel["start_ns"] + kernel["end_ns"]) / 2 - first
        shown.get(f"e.show({middle} - 1e6, {middle} + 1e6, false)")
        shown.page.touchscreen.tap(*shown.point("GPU stream 7", middle))
        assert kernel["name"] in shown.page.locator("nsightkit-timeline .said").inner_text()
        span = shown.get("e.view.end - e.view.start")
        shown.page.evaluate(
            """() => {
              const e = document.querySelector('nsightkit-timeline');
              const canvas = e.shadowRoot.querySelector('canvas');
              canvas.setPointerCapture = () => {};  // these fingers are not real
              const box = canvas.getBoundingClientRect();
              const send = (type, pointerId, x) => canvas.dispatchEvent(new PointerEvent(type, {
                pointerId, pointerType: 'touch', clientX: box.left + x, clientY: box.top + 60 }));
              send('pointerdown', 1, 120); send('pointerdown', 2, 180);
              send('pointermove', 1, 90); send('pointermove', 2, 210);
              send('pointerup', 1, 90); send('pointerup', 2, 210);
            }"""
        )
        assert shown.get("e.view.end - e.view.start") == pytest.approx(span / 2)


@pytest.mark.site
def test_the_views_and_the_traces_are_chosen_by_name(opened, trace):
    both = {"planted": trace, "other": _many(500)}
    with opened(plots.interactive_timeline(both)) as shown:
        rolled, raw = (shown.page.get_by_role("button", name=name) for name in ("Rolled up", "Raw"))
        rolled.click()
        assert rolled.get_attribute("aria-pressed") == "true"
        assert raw.get_attribute("aria-pressed") == "false"
        labels = shown.get("e.rows.map((row) => row.label)")
        assert {"GPU busy", "GEMM", "optimizer"} <= set(labels)
        shown.settle("e.rows[1].share > 0")
        summary = overview.summary(trace)
        share = summary["busy_ns"] / shown.get("e.span")
        assert shown.get("e.rows.find((row) => row.label === 'GPU busy').share") == pytest.approx(share, rel=1e-6)
        assert shown.canvas.get_attribute("aria-label").startswith("Timeline: planted, lanes over")
        shown.page.get_by_label("Trace").select_option("other")
        assert shown.get("e.index") == 1
        assert shown.canvas.get_attribute("aria-label").startswith("Timeline: other, lanes over")
        raw.click()
        assert shown.get("e.rows.map((row) => row.label)") == ["GPU stream 7"]


@pytest.mark.site
def test_stacked_traces_share_one_axis(opened):
    traces = {"short": _many(500), "long": _many(2000)}
    found = {label: lanes.Lanes(lanes.find_lanes(trace, lanes.Most())) for label, trace in traces.items()}
    stacked = packing.pack(found, said=["", ""], fallback="", title="t", layout="stacked", most_bytes=250_000)
    with opened(stacked) as shown:
        shown.page.get_by_role("button", name="Rolled up").click()
        assert shown.get("e.rows.filter((row) => row.kind === 'heading').map((row) => row.label)") == ["short", "long"]
        shown.settle("e.rows[1].share > 0")
        # The share of its own time, not of the longer one's.
        busy = intervals.busy(traces["short"])
        share = busy["busy_ns"].sum() / busy["span_ns"].sum()
        assert shown.get("e.rows[1].share") == pytest.approx(share, abs=0.002)


@pytest.mark.site
def test_hostile_names_are_shown_as_text(opened):
    label = HOSTILE[0]
    shown = plots.interactive_timeline({label: _hostile(["y" * 2**20]), "b": _hostile()}, title=HOSTILE[4])
    with opened(shown) as shown:
        shown.canvas.focus()
        shown.page.keyboard.press("ArrowDown")
        said = set()
        for _ in range(len(HOSTILE) + 1):
            shown.page.keyboard.press("n")
            said.add(shown.page.locator("nsightkit-timeline .said .name").inner_text())
        assert {safe.plain(name) for name in HOSTILE} <= said
        assert "y" * 399 + "…" in said
        assert shown.page.locator("img").count() == 0
        assert shown.page.locator("nsightkit-timeline option").first.inner_text() == label


@pytest.mark.site
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1000, 360])
def test_it_is_accessible_and_fits(opened, trace, theme, width):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    both = {"planted": trace, "a label that is much too long for the screen of a phone, and goes on": _many(500)}
    with opened(plots.interactive_timeline(both), theme=theme, width=width) as shown:
        for name in ("Raw", "Rolled up"):
            shown.page.get_by_role("button", name=name).click()
            shown.page.get_by_text("Keys and gestures").click()
            assert shown.page.evaluate("document.documentElement.scrollWidth") <= width
            found = axe.run(shown.page).response["violations"]
            assert not [f"{v['id']}: {n['target']}" for v in found for n in v["nodes"]]
        small = shown.get(
            "[...e.shadowRoot.querySelectorAll('button, select, summary')].map((b) => b.getBoundingClientRect())"
            ".filter((b) => b.width < 24 || b.height < 24).length"
        )
        assert small == 0
        dark = shown.get("e.colours.dark")
        assert dark == (theme == "dark")
        other = "light" if dark else "dark"
        shown.page.evaluate(f"document.documentElement.dataset.theme = '{other}'")
        shown.settle(f"e.colours.dark === {str(not dark).lower()}")


@pytest.mark.site
def test_the_static_figure_shows_without_scripts(opened, trace):
    with opened(plots.interactive_timeline(trace), ready=False, java_script_enabled=False) as shown:
        assert shown.page.get_by_role("img", name="Timeline, lanes over").is_visible()


@pytest.mark.site
def test_the_static_figure_shows_when_the_data_is_broken(opened, trace):
    shown = plots.interactive_timeline(trace)
    broken = shown.html().replace('<script type="text/plain">', '<script type="text/plain">AAAA')
    with opened(broken, ready=False) as page:
        page.page.wait_for_timeout(300)
        assert page.page.get_by_role("img", name="Timeline, lanes over").is_visible()
        assert [text.partition(":")[0] for text in page.complaints] == ["nsightkit-timeline shows its static figure"]
        page.complaints.clear()


@pytest.mark.site
def test_nothing_to_draw_is_no_error(opened):
    with opened(plots.interactive_timeline(Trace.from_frames({}))) as shown:
        shown.page.get_by_role("button", name="Rolled up").click()
        shown.canvas.focus()
        for key in ("n", "ArrowDown", "Enter", "+"):
            shown.page.keyboard.press(key)


@pytest.mark.site
def test_a_million_events_are_drawn_as_a_few_marks_a_pixel(opened, record_property):
    shown = plots.interactive_timeline(_many(1_000_000, streams=(7, 20)), most_bytes=4_500_000)
    assert shown.data_bytes < 4_500_000
    with opened(shown) as shown:
        drawn = shown.page.evaluate(
            """() => {
              const e = document.querySelector('nsightkit-timeline');
              const real = CanvasRenderingContext2D.prototype.fillRect;
              let marks = 0;
              CanvasRenderingContext2D.prototype.fillRect = function (...a) { marks++; return real.apply(this, a); };
              const out = [];
              for (const mode of ['raw', 'rolled']) {
                e.setMode(mode);
                for (const share of [1, 0.3, 0.1, 0.01, 0.001, 0.00001]) {
                  e.show(e.span * 0.4, e.span * (0.4 + share), false);
                  e.draw();  // the strip on top, once
                  marks = 0;
                  const began = performance.now();
                  e.draw();
                  const ms = performance.now() - began;
                  out.push({ mode, share, marks, ms, rows: e.rows.length, wide: e.box.width });
                }
              }
              return out;
            }"""
        )
    record_property("redraws", drawn)
    slowest = max(drawn, key=lambda d: d["ms"])
    print(f"slowest redraw: {slowest}")
    for one in drawn:
        assert one["marks"] < 4 * one["rows"] * one["wide"] + 100
