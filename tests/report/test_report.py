"""The report: the figures of the analyses, no foreign markup, no request, and a browser in which it works."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import itertools
import re
import subprocess
import sys
from collections import Counter

import hostile
import many
import numpy as np
import pandas as pd
import pytest
from synthetic import planted
from watched_page import WatchedPage, until

import nsightkit
from nsightkit import report
from nsightkit.analysis import verdict
from nsightkit.analysis.core.text import time_text
from nsightkit.analysis.timeline import gaps, kernels, overview
from nsightkit.errors import UsageError
from nsightkit.plots import lanes
from nsightkit.safe import plain
from nsightkit.trace.model import Trace, TraceMeta

THREAD = 7 << 24 | 7


@pytest.fixture(scope="module")
def starved(tmp_path_factory):
    path = tmp_path_factory.mktemp("planted") / "starved.sqlite"
    planted.training(path, "starved")
    return nsightkit.load(path)


@pytest.fixture(scope="module")
def sync(tmp_path_factory):
    path = tmp_path_factory.mktemp("planted") / "sync.sqlite"
    planted.training(path, "sync")
    return nsightkit.load(path)


@pytest.fixture(scope="module")
def alone(starved):
    """The page of one trace."""
    return report.html(starved)


@pytest.fixture(scope="module")
def both(starved, sync):
    """The page of two traces."""
    return report.html({"before": starved, "after": sync})


def of_kernels(names):
    """Kernels one after the other, each a little shorter than the one before."""
    at = np.arange(len(names))
    frame = pd.DataFrame({"start_ns": at * 1000, "end_ns": at * 1000 + 900 - at, "name": names, "stream": 7})
    return Trace.from_frames({"kernels": frame})


class Read(html.parser.HTMLParser):
    """The elements that a browser would make, and the text in them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes = Counter(), []
        self.tables, self.sections = {}, []
        self.words, self._open, self._section = "", [], None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags[tag] += 1
        self.attributes += attrs.items()
        if tag not in {"meta", "link"}:
            self._open.append(tag)
        if tag == "section":
            self._section = attrs["id"]
            self.sections.append(self._section)
        if tag == "table":
            self.tables.setdefault(self._section, []).append([])
        elif tag == "tr":
            self.tables[self._section][-1].append([])
        elif tag in {"td", "th"}:
            self.tables[self._section][-1][-1].append("")

    def handle_startendtag(self, tag, attrs):
        assert tag == "path"

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] in {"script", "style"}:
            return
        self.words += data
        if {"td", "th"} & set(self._open) and "small" not in self._open:
            self.tables[self._section][-1][-1][-1] += data


# ---- What it says ---------------------------------------------------------------------------------------------------


def test_it_says_what_the_analyses_say(alone, starved):
    read = Read(alone)
    answer = verdict.summary(starved)
    for text in (*answer["evidence"], *answer["next_steps"], "The GPU waits for data, 39.9 % of the time"):
        assert text in read.words
    rows = dict(read.tables["summary"][0])
    figures = overview.summary(starved)
    busy = figures["busy_ns"]
    assert rows["GPU busy"] == f"{time_text(busy)} ({100 * busy / figures['span_ns']:.1f} %)"
    assert rows["GPU idle in the steps"] == time_text(figures["window_idle_ns"])
    by_cause = {row[0]: row[1:] for row in read.tables["idle"][0][1:]}
    for row in gaps.summary(starved).itertuples():
        assert by_cause[row.cause] == [time_text(row.total_ns), f"{100 * row.share_of_span:.1f} %", f"{row.count:,}"]
    assert len(read.tables["gaps"][0]) == 1 + int(gaps.summary(starved)["count"].sum())
    assert len(read.tables["steps"][0]) == 1 + 12
    wanted = ["answer", "summary", "timeline", "idle", "gaps", "categories", "kernels", "ranges", "steps", "memops"]
    assert read.sections == [*wanted, "calls", "os"]


def test_it_says_what_changes_would_gain(alone, starved):
    answer = verdict.summary(starved)
    read = Read(alone)
    truth = [[r["change"], time_text(r["predicted_ns"]), f"{r['speedup']:.2f}x"] for r in answer["changes"]]
    assert read.tables["answer"][0][1:] == truth
    gains = {change: gain for change, _, gain in truth}
    assert f"{gains[verdict.CHANGE_OF[answer['bottleneck']]]} faster without it, as the replay predicts" in read.words
    assert f"Replaying the unchanged trace is {100 * answer['replay_error']:.1f} % off" in read.words
    assert "answer" not in Read(report.html(of_kernels(["a"] * 60))).tables


def test_the_bar_is_the_whole_span(both):
    bars = re.findall(r'<svg class="span".*?</svg>', both, re.DOTALL)
    assert len(bars) == 2
    for bar in bars:
        at = 0.0
        for x, width in re.findall(r'<rect x="([\d.]+)%" width="([\d.]+)%"', bar):
            assert float(x) == pytest.approx(at, abs=0.01)
            at += float(width)
        assert at == pytest.approx(100, abs=0.02)


def test_several_traces_lie_side_by_side(both, starved, sync):
    read = Read(both)
    assert [dict(table)["all steps"] for table in read.tables["summary"]] == [
        time_text(overview.summary(t)["window_ns"]) for t in (starved, sync)
    ]
    head, letters, *rows = read.tables["idle"][0]
    assert head == ["cause", "total", "of span", "count"]
    assert letters == ["A", "B"] * 3
    before, after = (gaps.summary(t).set_index("cause")["total_ns"] for t in (starved, sync))
    for cause, first, second, *_ in rows:
        assert first == time_text(before.get(cause))
        assert second == time_text(after.get(cause))
    totals = [max(before.get(row[0], 0), after.get(row[0], 0)) for row in rows]
    assert totals == sorted(totals, reverse=True)
    assert [len(read.tables[name]) for name in ("gaps", "steps", "kernels")] == [2, 2, 1]
    assert "GPU profiles: 2 traces side by side" in read.words


def test_a_trace_without_gpu_work_says_what_it_lacks():
    ops = pd.DataFrame({"start_ns": [0, 10], "end_ns": [90, 40], "name": ["a", "b"], "process": 1, "thread": 1 << 24})
    meta = TraceMeta(tool="torch", missing=["kernels", "memops", "graphs", "calls", "os_calls", "ranges"])
    trace = Trace.from_frames({"ops": ops}, meta)
    read = Read(report.html(trace))
    assert "The trace does not say what holds the run back" in read.words
    assert read.sections == ["answer", "summary", "timeline"]
    assert dict(read.tables["summary"][0])["GPU busy"] == "not recorded"


def test_every_thread_stream_and_level_has_a_row_or_is_said_to_lack_one():
    depth, at = np.arange(5), np.arange(4)
    nested = pd.DataFrame({"start_ns": depth, "end_ns": 100 - depth, "level": depth, "parent": depth - 1, "name": "r"})
    rows = {
        "ranges": nested.assign(kind="pushpop", thread=1),
        "ops": pd.DataFrame({"start_ns": [1, 2], "end_ns": [50, 40], "name": ["a", "b"], "thread": 1}),
        "calls": pd.DataFrame({"start_ns": at, "end_ns": at + 1, "name": "c", "thread": [1, 2, 2, 2]}),
        "kernels": pd.DataFrame({"start_ns": at, "end_ns": at + 9, "name": "k", "stream": at + 7, "device": at % 2}),
    }
    trace = Trace.from_frames(rows, TraceMeta(thread_names={1: "main"}))
    idle = pd.DataFrame({"device": [1], "start_ns": [3], "end_ns": [5], "cause": ["unknown"]})
    whole = lanes.all_lanes(trace, lanes.Most(12, 32, 24), idle)
    calls = ["CPU main CUDA calls", "CPU thread 2 CUDA calls"]
    gpu = ["GPU 0 stream 7", "GPU 0 stream 9", "GPU 1 stream 8", "GPU 1 stream 10", "GPU 1 idle, by cause"]
    assert [lane.label for lane in whole.lanes] == ["CPU main", *[""] * 4, "CPU main ops", "", *calls, *gpu]
    assert [lane.row for lane in whole.lanes] == list(range(14))
    assert whole.left_out == ""
    few = lanes.all_lanes(trace, lanes.Most(3, 2, 1), idle)
    assert few.left_out == "threads beyond 1 and streams beyond 2, which had less to do"
    assert len(few.lanes) == 3 + 2 + 1 + 2 + 1


# ---- What it must not say -------------------------------------------------------------------------------------------


def test_it_is_one_file_that_asks_for_nothing(alone):
    for never in ("http://", "https://", "url(", "@import", "<iframe", "innerHTML", "eval(", "fetch("):
        assert never not in alone
    targets = re.findall(r'(?:src|href)="([^"]*)"', alone)
    assert all(t.startswith("#") or t == "data:," for t in targets)
    ids = re.findall(r'\bid="([^"]*)"', alone)
    assert len(ids) == len(set(ids))
    assert {t[1:] for t in targets if t.startswith("#")} <= set(ids)


def test_only_its_own_scripts_and_styles_may_run(alone):
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', alone)[1]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for kind, pattern in (("script", r"<script>(.*?)</script>"), ("style", r"<style>(.*?)</style>")):
        bodies = re.findall(pattern, alone, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in bodies]
        allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
        assert f"{kind}-src {allowed};" in policy
    assert " style=" not in alone


def test_hostile_names_stay_text(monkeypatch):
    names = hostile.NAMES
    labels = {names[0]: hostile.trace(), names[3]: hostile.trace()}
    read = Read(report.html(labels, title=names[1], selection=names[4]))
    monkeypatch.setattr(hostile, "NAMES", tuple(f"kernel_{i}" for i in range(len(names))))
    harmless = Read(report.html({"a": hostile.trace(), "b": hostile.trace()}, title="t", selection="s"))
    # The same elements for any names (a name and its short form may differ).
    assert set(read.tags) - {"small"} == set(harmless.tags) - {"small"}
    assert read.tags["script"] == 3
    assert not [name for name, _ in read.attributes if name.startswith("on")]
    assert not [value for name, value in read.attributes if name in {"href", "src"} and value[:1] not in "#d"]
    shown = {row[0] for row in read.tables["kernels"][0][2:]}
    assert names[0] in shown
    assert plain(names[10]) in read.words
    assert not set(read.words) & set("\x1b\x07\x9b\u202e\u2066\u200b")


def test_names_are_cleaned(tmp_path):
    secret = "hf_" + "aBcD1234" * 4 + "xY"
    ranges = pd.DataFrame({"start_ns": [0], "end_ns": [9], "name": [f"load --token={secret}"], "kind": "pushpop"})
    kernel = pd.DataFrame({"start_ns": [1], "end_ns": [2], "name": "/home/alice/kernel"})
    trace = Trace.from_frames({"ranges": ranges, "kernels": kernel}, TraceMeta(notes=[f"API_KEY={secret}"]))
    report.write({secret: trace}, tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert secret not in text
    assert "alice" not in text


def test_very_long_names_and_very_many():
    names = ["x" * 2**19, *(f"kernel_{i}" for i in range(549))]
    text = report.html(of_kernels(names))
    read = Read(text)
    assert len(read.tables["kernels"][0]) == 1 + 500
    assert "50 further rows are not on this page" in read.words
    assert len(text) < 2**19


def test_a_hundred_thousand_kernels_stay_below_five_megabytes(tmp_path):
    size = report.write(many.kernels(100_000), tmp_path / "r.html")
    assert size == (tmp_path / "r.html").stat().st_size < 5_000_000


# ---- The file -------------------------------------------------------------------------------------------------------


def test_writing_is_all_or_nothing(alone, starved, tmp_path, monkeypatch):
    path = tmp_path / "r.html"
    path.write_text("old")

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.replace", fail)
        with pytest.raises(UsageError, match="No space left"):
            report.write(of_kernels(["k"]), path, overwrite=True)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]
    report.write(starved, path, overwrite=True)
    assert alone.startswith("<!doctype html>")
    assert path.read_text() == alone  # the same bytes each time


def test_a_trace_is_never_overwritten(starved, tmp_path):
    path = tmp_path / "link.html"
    path.symlink_to(starved.path)
    traces = {"a": of_kernels(["k"]), "b": starved}
    for target, message in ((starved.path, "a trace itself"), (path, "a trace itself"), (tmp_path, "a folder")):
        with pytest.raises(UsageError, match=message):
            report.write(traces, target, overwrite=True)
    with pytest.raises(UsageError, match="make it first"):
        report.write(traces, tmp_path / "no" / "r.html")
    with pytest.raises(UsageError, match="needs a trace"):
        report.html({})
    assert nsightkit.load(starved.path, cache=False).size("kernels") == starved.size("kernels")


def test_labels_are_the_files_names_without_their_kind():
    paths = ["/a/run.sqlite", "/b/run.sqlite", "x.pt.trace.json.gz", "y.json", "z.nsys-rep", "w", None]
    traces = [Trace.from_frames({}, path=path) for path in paths]
    assert list(report.labelled(traces)) == ["run", "run (2)", "x", "y", "z", "w", "trace"]


def test_it_needs_no_matplotlib(starved, tmp_path):
    code = f"""
import sys
for name in ("matplotlib", "PIL", "torch"):
    sys.modules[name] = None
import nsightkit
from nsightkit import report
report.write(nsightkit.load({str(starved.path)!r}), {str(tmp_path / "r.html")!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert (tmp_path / "r.html").stat().st_size > 50_000


@pytest.mark.parametrize(
    ("name", "until_ns"),
    [
        ("cs336-zx3xyy/result_2_7B_compile_ro.sqlite", None),
        ("nsys-ai/mfu_2gpu_before.sqlite", 100_000_000),
        ("hta/cpu_only__rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz", None),
        ("tutorial_vqe/report1.sqlite", None),
        ("tracelens/h100__facebook_timesformer-base-finetuned-k400__1016002.json.gz", None),
    ],
)
def test_real_traces(shared_traces, name, until_ns):
    text = report.html(nsightkit.load(shared_traces / name, cache=False).time(0, until_ns))
    assert Read(text).sections[:3] == ["answer", "summary", "timeline"]
    assert "/home/" not in text
    assert len(text) < 5_000_000


# ---- In a browser ---------------------------------------------------------------------------------------------------


class Opened(WatchedPage):
    """A report in a browser."""

    def __init__(self, browser, path, *, width=1280, theme="light", ready=True, **context):
        super().__init__(browser, path, width=width, theme=theme, ready=ready, **context)

    def names(self, section):
        cells = self.page.locator(f"#{section} tbody tr:visible > :first-child").all_inner_texts()
        return [text.splitlines()[-1] for text in cells]  # the whole name, below the short one


@pytest.fixture
def opened(browser, tmp_path):
    """Open the report of some traces."""
    numbers = itertools.count()

    def open_page(traces, **options):
        path = tmp_path / f"report{next(numbers)}.html"
        report.write(traces, path)
        return Opened(browser, path, **options)

    return open_page


@pytest.mark.site
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_it_is_accessible_and_fits(opened, starved, sync, theme, width):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    for traces in (starved, {"before": starved, "a label that is much too long for a phone, and goes on": sync}):
        with opened(traces, theme=theme, width=width) as shown:
            assert shown.page.evaluate("document.documentElement.scrollWidth") <= width
            violations = axe.run(shown.page).response["violations"]
            assert not [f"{v['id']}: {n['target']}" for v in violations for n in v["nodes"]]
            small = shown.page.evaluate(
                "[...document.querySelectorAll('button:not([hidden]), input')].map((b) => b.getBoundingClientRect())"
                ".filter((b) => b.width && (b.width < 24 || b.height < 24)).length"
            )
            assert small == 0


@pytest.mark.site
def test_tables_sort_and_filter(opened):
    trace = many.kernels(3000)
    truth = kernels.summary(trace)
    with opened(trace) as shown:
        head = shown.page.locator("#kernels th").filter(has_text="total")
        for order in ("descending", "ascending"):
            head.get_by_role("button").click()
            assert head.get_attribute("aria-sort") == order
        assert shown.names("kernels") == truth.sort_values("total_ns")["name"].head(12).tolist()
        shown.page.locator("#kernels th").filter(has_text="name").get_by_role("button").focus()
        shown.page.keyboard.press("Enter")
        assert head.get_attribute("aria-sort") is None
        assert "elementwise_kernel<1," in shown.names("kernels")[0]
        shown.page.get_by_role("button", name=f"Show all {len(truth)} rows").click()
        assert len(shown.names("kernels")) == len(truth)
        box = shown.page.get_by_label("Filter: Kernels by name")
        box.fill("GEMM_4")
        matching = [name for name in truth["name"] if "gemm_4" in name]
        assert sorted(shown.names("kernels")) == sorted(matching)
        status = shown.page.locator("#kernels [role=status]").inner_text()
        assert f"{len(matching)} rows of 60 found" in status


@pytest.mark.site
def test_a_gap_is_shown_where_it_is(opened, starved, sync):
    gap = gaps.find(sync).nlargest(1, "duration_ns").iloc[0]
    with opened({"before": starved, "after": sync}, reduced_motion="reduce") as shown:
        shown.page.locator("#gaps .listing").nth(1).get_by_role("button", name="Show in the timeline").first.click()
        start, end = shown.get("[e.view.start, e.view.end]")
        first = shown.get("e.traces[1].first")
        assert start <= gap["start_ns"] - first < gap["end_ns"] - first <= end
        assert end - start < 4 * gap["duration_ns"]
        assert shown.get("e.shadowRoot.activeElement === e.board")
        until(shown.page, "scrollY > 0")


@pytest.mark.site
def test_the_timeline_has_idle_time_by_cause(opened, starved):
    with opened(starved) as shown:
        labels = shown.get("e.rows.map((row) => row.label)")
        idle = "GPU idle, by cause"
        assert {"CPU thread 4242", "CPU thread 4242 CUDA calls", "GPU stream 7", idle} <= set(labels)
        row = f"e.rows[{labels.index(idle)}].lanes[0]"
        assert shown.get(f"{row}.busy.reduce((a, b) => a + b)") == overview.summary(starved)["idle_ns"]


@pytest.mark.site
def test_it_is_whole_without_scripts(opened, starved):
    with opened(starved, ready=False, java_script_enabled=False) as shown:
        assert len(shown.names("gaps")) == 17
        assert shown.page.get_by_role("img", name="Timeline: starved, lanes over").is_visible()
        assert shown.page.locator("button:visible").count() == 0


@pytest.mark.site
def test_rows_out_of_sight_are_drawn_when_they_are_seen_or_printed(opened):
    at = np.arange(50) * 1000
    work = [pd.DataFrame({"start_ns": at, "end_ns": at + 500, "name": "k", "stream": number}) for number in range(32)]
    drawn = "e.rows.at(-2).canvas.height !== 150"  # what a canvas has before it is measured
    for event in ("e.scrollIntoView({block: 'end', behavior: 'instant'})", "dispatchEvent(new Event('beforeprint'))"):
        with opened(Trace.from_frames({"kernels": pd.concat(work)}), theme="dark") as shown:
            shown.page.set_viewport_size({"width": 1000, "height": 400})
            assert not shown.get(drawn)
            shown.get(event)
            until(shown.page, f"(e => {drawn})(document.querySelector('nsightkit-timeline'))")
