"""The report: the figures of the analyses, no foreign markup, no request, and a browser in which it works."""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys

import hostile
import many
import numpy as np
import pandas as pd
import pytest
from msgspec import structs
from synthetic import planted
from watched_page import WatchedPage, until

import nsightkit
from nsightkit import report
from nsightkit.analysis import verdict
from nsightkit.analysis.timeline import gaps, kernels, overview
from nsightkit.errors import UsageError, plain
from nsightkit.plots import lanes
from nsightkit.report.sides import Side
from nsightkit.report.tables import SECTIONS, listings
from nsightkit.text import time_text
from nsightkit.trace.model import Trace, TraceMeta

bs4 = pytest.importorskip("bs4")


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted")
    planted.training(folder / "starved.sqlite", "starved")
    planted.training(folder / "sync.sqlite", "sync")
    return {"before": nsightkit.load(folder / "starved.sqlite"), "after": nsightkit.load(folder / "sync.sqlite")}


@pytest.fixture(scope="module")
def starved(traces):
    return traces["before"]


@pytest.fixture(scope="module")
def alone(starved):
    """The page of one trace."""
    return report.html({"starved": starved})


def of_kernels(names):
    """Kernels one after the other, each a little shorter than the one before."""
    at = np.arange(len(names))
    frame = pd.DataFrame({"start_ns": at * 1000, "end_ns": at * 1000 + 900 - at, "name": names, "stream": 7})
    return Trace.from_frames({"kernels": frame})


def read(page):
    return bs4.BeautifulSoup(page, "html.parser")


def tables(page, section):
    """The tables of a section: the texts of cells, row by row, without a name's long form."""
    found = []
    for table in page.select(f"section#{section} table"):
        for long in table.select("small"):
            long.extract()
        found.append([[cell.get_text().strip() for cell in row.select("th, td")] for row in table.select("tr")])
    return found


# ---- What it says ---------------------------------------------------------------------------------------------------


def test_it_says_what_the_analyses_say(alone, starved):
    page, answer, figures, by_cause = (
        read(alone),
        verdict.summary(starved),
        overview.summary(starved),
        gaps.summary(starved),
    )
    words = page.get_text()
    assert all(text in words for text in (*answer["evidence"], *answer["next_steps"], answer["headline"]))
    rows = dict(tables(page, "summary")[0])
    assert rows["GPU busy"].startswith(time_text(figures["busy_ns"]))
    assert rows["GPU idle in the steps"] == time_text(figures["window_idle_ns"])
    truth = []
    for row in by_cause.itertuples():
        truth.append([row.cause, time_text(row.total_ns), f"{100 * row.share_of_span:.1f}%", f"{row.count:,}"])
    assert tables(page, "idle")[0][1:] == truth
    assert [len(tables(page, name)[0]) for name in ("gaps", "steps")] == [1 + by_cause["count"].sum(), 1 + 12]
    wanted = ["answer", "summary", "timeline", "idle", "gaps", "categories", "kernels", "ranges", "steps", "memops"]
    assert [section["id"] for section in page.select("section")] == [*wanted, "calls", "os"]
    gains = [[r["change"], time_text(r["predicted_ns"]), f"{r['speedup']:.2f}x"] for r in answer["changes"]]
    assert tables(page, "answer")[0][1:] == gains
    assert f"Replayed without a change, the run is {100 * answer['replay_error']:.1f}% off" in words


def test_several_traces_lie_side_by_side(traces):
    page = read(report.html(traces))
    windows = [time_text(overview.summary(trace)["window_ns"]) for trace in traces.values()]
    assert [dict(table)["all steps"] for table in tables(page, "summary")] == windows
    head, letters, *rows = tables(page, "idle")[0]
    assert head == ["cause", "total", "of span", "count"]
    assert letters == ["A", "B"] * 3
    before, after = (gaps.summary(trace).set_index("cause")["total_ns"] for trace in traces.values())
    for cause, first, second, *_ in rows:
        assert [first, second] == [time_text(before.get(cause)), time_text(after.get(cause))]
    assert [len(tables(page, name)) for name in ("gaps", "steps", "kernels")] == [2, 2, 1]
    assert "GPU profiles: 2 traces side by side" in page.get_text()


def test_rows_that_share_a_key_all_stay():
    by_name = next(section for section in SECTIONS if section.name == "kernels")
    side = Side(0, "a", "A", "", of_kernels(["k1", "k2"]))
    (table,) = listings(structs.replace(by_name, keys=["category"]), [side, side])
    assert [[row["name"] for row in rows] for rows in table.rows] == [["k1", "k1"], ["k2", "k2"]]


def test_a_trace_without_gpu_work_says_what_it_lacks():
    ops = pd.DataFrame({"start_ns": [0, 10], "end_ns": [90, 40], "name": ["a", "b"], "process": 1, "thread": 1 << 24})
    meta = TraceMeta(tool="torch", missing=["kernels", "memops", "graphs", "calls", "os_calls", "ranges"])
    page = read(report.html({"a": Trace.from_frames({"ops": ops}, meta)}))
    assert "The trace holds too little to name a bottleneck" in page.get_text()
    assert [section["id"] for section in page.select("section")] == ["answer", "summary", "timeline"]
    assert dict(tables(page, "summary")[0]) == {"GPU work": "none recorded"}


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
    whole = lanes.all_rows(trace, lanes.RowLimits(12, 32, 24), idle)
    calls = ["CPU main CUDA calls", "CPU thread 2 CUDA calls"]
    gpu = ["GPU 0 stream 7", "GPU 0 stream 9", "GPU 1 stream 8", "GPU 1 stream 10", "GPU 1 idle, by cause"]
    assert [row.label for row in whole.rows] == ["CPU main", *[""] * 4, "CPU main ops", "", *calls, *gpu]
    assert whole.left_out == ""
    assert lanes.all_rows(trace, lanes.RowLimits(3, 2, 1)).left_out.startswith("threads beyond 1 and streams beyond 2")


# ---- What it must not say -------------------------------------------------------------------------------------------


def test_it_is_one_file_that_asks_for_nothing_and_runs_only_its_own_scripts(alone):
    for never in ("http://", "https://", "url(", "@import", "<iframe", "innerHTML", "eval(", "fetch(", " style="):
        assert never not in alone
    page = read(alone)
    ids = [element["id"] for element in page.select("[id]")]
    assert len(ids) == len(set(ids))
    targets = {element.get("href") or element["src"] for element in page.select("[href], [src]")}
    assert targets - {"data:,"} <= {f"#{name}" for name in ids}
    policy = page.select_one('[http-equiv="Content-Security-Policy"]')["content"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for kind in ("script", "style"):
        bodies = re.findall(f"<{kind}>(.*?)</{kind}>", alone, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in bodies]
        allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
        assert f"{kind}-src {allowed};" in policy


def test_hostile_names_stay_text(monkeypatch):
    names = hostile.NAMES
    page = read(report.html({names[0]: hostile.trace(), names[3]: hostile.trace()}, selection=names[4]))
    monkeypatch.setattr(hostile, "NAMES", tuple(f"kernel_{i}" for i in range(len(names))))
    harmless = read(report.html({"a": hostile.trace(), "b": hostile.trace()}, selection="s"))
    # The same elements for any names (a name and its short form may differ).
    tags, expected = ({tag.name for tag in soup.find_all()} - {"small"} for soup in (page, harmless))
    assert tags == expected
    assert len(page.select("script")) == 3
    for element in page.find_all():
        assert not [name for name in element.attrs if name.startswith("on")]
        assert element.get("href", element.get("src", "#"))[:1] in "#d"
    words = page.get_text()
    assert names[0] in words
    assert plain(names[10]) in words
    assert not set(words) & set("\x1b\x07\x9b\u202e\u2066\u200b")


def test_names_are_cleaned(tmp_path):
    secret = "hf_" + "aBcD1234" * 4 + "xY"
    ranges = pd.DataFrame({"start_ns": [0], "end_ns": [9], "name": [f"load --token={secret}"], "kind": "pushpop"})
    kernel = pd.DataFrame({"start_ns": [1], "end_ns": [2], "name": "/home/alice/kernel"})
    trace = Trace.from_frames({"ranges": ranges, "kernels": kernel}, TraceMeta(notes=[f"API_KEY={secret}"]))
    report.write({secret: trace}, tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert secret not in text
    assert "alice" not in text


def test_very_long_names_and_very_many(tmp_path):
    text = report.html({"a": of_kernels(["x" * 2**19, *(f"kernel_{i}" for i in range(549))])})
    assert len(tables(read(text), "kernels")[0]) == 1 + 500
    assert "50 further rows are not on this page" in text
    assert len(text) < 2**19
    size = report.write({"a": many.kernels(100_000)}, tmp_path / "r.html")
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
            report.write({"a": of_kernels(["k"])}, path, overwrite=True)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]
    report.write({"starved": starved}, path, overwrite=True)
    assert path.read_text() == alone  # the same bytes each time


def test_a_trace_is_never_overwritten(starved, tmp_path):
    path = tmp_path / "link.html"
    path.symlink_to(starved.path)
    traces = {"a": of_kernels(["k"]), "b": starved}
    for target, message in ((starved.path, "a trace itself"), (path, "a trace itself"), (tmp_path, "a folder")):
        with pytest.raises(UsageError, match=message):
            report.write(traces, target, overwrite=True)
    assert nsightkit.load(starved.path, cache=False).size("kernels") == starved.size("kernels")


def test_it_needs_no_matplotlib(starved, tmp_path):
    code = f"""
import sys
for name in ("matplotlib", "PIL", "torch"):
    sys.modules[name] = None
import nsightkit
nsightkit.load({str(starved.path)!r}).report({str(tmp_path / "r.html")!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert (tmp_path / "r.html").stat().st_size > 50_000


def test_a_real_trace(shared_traces):
    path = shared_traces / "tracelens/h100__facebook_timesformer-base-finetuned-k400__1016002.json.gz"
    text = report.html({"a": nsightkit.load(path, cache=False)})
    assert "/home/" not in text
    assert len(text) < 5_000_000


# ---- In a browser ---------------------------------------------------------------------------------------------------


class Opened(WatchedPage):
    """A report in a browser."""

    def names(self, section):
        cells = self.page.locator(f"#{section} tbody tr:visible > :first-child").all_inner_texts()
        return [text.splitlines()[-1] for text in cells]  # the whole name, below the short one


@pytest.fixture
def opened(browser, tmp_path):
    """Open the report of some traces."""

    def open_page(traces, **options):
        path = tmp_path / "report.html"
        report.write(traces, path)
        return Opened(browser, path, **options)

    return open_page


@pytest.mark.site
@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 360)])
def test_it_is_accessible_and_fits(opened, traces, theme, width):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    long = {"before": traces["before"], "a label that is much too long for a phone, and goes on": traces["after"]}
    with opened(long, theme=theme, width=width) as shown:
        assert shown.page.evaluate("document.documentElement.scrollWidth") <= width
        violations = axe.run(shown.page).response["violations"]
        assert not [f"{v['id']}: {n['target']}" for v in violations for n in v["nodes"]]


@pytest.mark.site
def test_tables_sort_and_filter(opened):
    trace = many.kernels(3000)
    truth = kernels.summary(trace)
    with opened({"a": trace}) as shown:
        head = shown.page.locator("#kernels th").filter(has_text="total")
        for order in ("descending", "ascending"):
            head.get_by_role("button").click()
            assert head.get_attribute("aria-sort") == order
        assert shown.names("kernels") == truth.sort_values("total_ns")["name"].head(12).tolist()
        shown.page.get_by_role("button", name=f"Show all {len(truth)} rows").click()
        assert len(shown.names("kernels")) == len(truth)
        shown.page.get_by_label("Filter: Kernels by name").fill("GEMM_4")
        matching = [name for name in truth["name"] if "gemm_4" in name]
        assert sorted(shown.names("kernels")) == sorted(matching)


@pytest.mark.site
def test_a_gap_is_shown_where_it_is(opened, traces):
    gap = gaps.find(traces["after"]).nlargest(1, "duration_ns").iloc[0]
    with opened(traces, reduced_motion="reduce") as shown:
        shown.page.locator("#gaps .listing").nth(1).get_by_role("button", name="Show in the timeline").first.click()
        start, end = shown.get("[e.view.start, e.view.end]")
        first = shown.get("e.traces[1].first")
        assert start <= gap["start_ns"] - first < gap["end_ns"] - first <= end
        assert end - start < 4 * gap["duration_ns"]
        assert shown.get("e.shadowRoot.activeElement === e.board")
        until(shown.page, "scrollY > 0")


@pytest.mark.site
def test_it_is_whole_without_scripts(opened, starved):
    with opened({"starved": starved}, ready=False, java_script_enabled=False) as shown:
        assert len(shown.names("gaps")) == 17
        assert shown.page.get_by_text("Timeline: starved, lanes over").is_visible()
        assert shown.page.locator("button:visible").count() == 0
