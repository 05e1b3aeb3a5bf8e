"""The report: the analyses' own figures, nobody's markup, no request, and a browser in which it works."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import itertools
import re
import subprocess
import sys
from collections import Counter

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
from nsightkit.report import elements, page
from nsightkit.trace.model import Gpu, Trace, TraceMeta, categorical

HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "<!--<script>",
    "]]>'\"><svg onload=alert(3)>",
    "line\u2028separator\u2029 &amp; ${title} $x",
    "\u202egnirts desrever\u202c",
    "javascript:alert(4)",
]


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


def hostile():
    at = np.arange(len(HOSTILE)) * 1000
    frame = pd.DataFrame({"start_ns": at, "end_ns": at + 600, "name": HOSTILE, "process": 7, "thread": 7 << 24 | 7})
    frames = {
        "kernels": frame.assign(stream=7, correlation=range(1, len(at) + 1), short_name=HOSTILE).drop(columns="thread"),
        "calls": frame.assign(start_ns=at - 0, end_ns=at + 1, correlation=range(1, len(at) + 1)),
        "ranges": frame.assign(kind="pushpop", domain=HOSTILE[0]),
        "ops": frame,
        "os_calls": frame,
        "memops": pd.DataFrame({"start_ns": [8000], "end_ns": [8500], "kind": HOSTILE[:1], "src_kind": HOSTILE[1:2],
                                "dst_kind": HOSTILE[2:3], "bytes": 5, "stream": 7}),
    }  # fmt: skip
    meta = TraceMeta(
        tool=HOSTILE[0],
        tool_version=HOSTILE[1],
        gpus=[Gpu(0, HOSTILE[2])],
        notes=[HOSTILE[3]],
        thread_names={7 << 24 | 7: HOSTILE[1]},
    )
    return Trace.from_frames(frames, meta)


def many(n, *, streams=(7,), seed=0, calls=True):
    """Kernels back to back on each of some streams, each launched by a call, in steps of a thousand."""
    rng = np.random.default_rng(seed)
    names = [f"void at::native::elementwise_kernel<{i}, 4>(int)" if i % 2 else f"gemm_{i}" for i in range(60)]
    parts = []
    for stream in streams:
        duration = rng.lognormal(9, 1.2, n // len(streams)).astype(np.int64) + 800
        start = np.cumsum(duration + rng.exponential(1500, len(duration)).astype(np.int64)) - duration + 20_000
        parts.append(pd.DataFrame({"start_ns": start, "end_ns": start + duration, "stream": stream}))
    frame = pd.concat(parts, ignore_index=True)
    frame["name"] = categorical(rng.integers(0, len(names), len(frame)), names)
    frame = frame.assign(process=7, correlation=np.arange(len(frame)) + 1)
    frames = {"kernels": frame}
    if calls:
        begin = frame["start_ns"] - rng.integers(4_000, 9_000, len(frame))
        lasting = rng.integers(1500, 3500, len(frame))
        order = begin.argsort()
        begin = np.maximum.accumulate(begin.to_numpy()[order] + np.arange(len(frame)) * 0)
        frames["calls"] = pd.DataFrame(
            {"start_ns": begin, "end_ns": begin + lasting, "correlation": frame["correlation"].to_numpy()[order]}
        ).assign(process=7, thread=7 << 24 | 7, name="cudaLaunchKernel")
        edges = frame["start_ns"].sort_values().to_numpy()[::1000]
        frames["ranges"] = pd.DataFrame(
            {"start_ns": edges[:-1], "end_ns": edges[1:], "name": [f"step {i}" for i in range(len(edges) - 1)]}
        ).assign(process=7, thread=7 << 24 | 7, kind="pushpop")
    return Trace.from_frames(frames, TraceMeta(tool="planted", gpus=[Gpu(0, "Synthetic GPU (planted trace)")]))


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
        if tag not in {"meta", "link", "rect"}:
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

    def handle_endtag(self, tag):
        if tag not in {"meta", "link", "rect"}:
            assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] in {"script", "style"}:
            return
        self.words += data
        if {"td", "th"} & set(self._open) and "small" not in self._open:
            self.tables[self._section][-1][-1][-1] += data


def test_it_says_what_the_analyses_say(alone, starved):
    read = Read(alone)
    answer = verdict.summary(starved)
    assert answer["bottleneck"] == "input-pipeline"
    for text in (*answer["evidence"], *answer["next_steps"], "The GPU waited for data, 39.9 % of the time"):
        assert text in read.words
    rows = {row[0]: row[1:] for row in read.tables["summary"][0]}
    figures = overview.summary(starved)
    assert rows["GPU busy"] == [
        f"{time_text(figures['busy_ns'])} ({100 * figures['busy_ns'] / figures['span_ns']:.1f} %)"
    ]
    idle = figures["window_idle_ns"]
    share = f"{100 * idle / figures['window_ns']:.1f} %"
    assert rows["GPU idle in the steps"] == [f"{time_text(idle)} ({share})"]
    assert rows["GPU"] == ["Synthetic GPU (planted trace), 17.18 GB, 100 SMs"]
    by_cause = {row[0]: row[1:] for row in read.tables["idle"][0][1:]}
    for row in gaps.summary(starved).itertuples():
        assert by_cause[row.cause][:2] == [f"{row.count:,}", time_text(row.total_ns)]
    by_kind = {row[0]: row for row in read.tables["categories"][0][1:]}
    for row in kernels.summary(starved, by="category").itertuples():
        assert time_text(row.total_ns) in by_kind[row.name]
    assert len(read.tables["gaps"][0]) == 1 + int(gaps.summary(starved)["count"].sum())
    assert len(read.tables["steps"][0]) == 1 + 12
    wanted = ["answer", "summary", "timeline", "idle", "gaps", "categories", "kernels", "ranges", "steps", "memops"]
    assert read.sections == [*wanted, "calls", "os"]


def test_it_says_what_changes_would_gain(alone, both, starved):
    found = verdict.summary(starved)
    changes = found["changes"]
    (own,) = (row for row in changes if row["change"] == verdict.CHANGE_OF[found["bottleneck"]])
    read = Read(alone)
    head, *rows = read.tables["answer"][0]
    assert head == ["Change", "Predicted time", "Gain"]
    assert rows == [[r["change"], time_text(r["predicted_ns"]), f"{r['speedup']:.2f}x"] for r in changes]
    assert f"{own['speedup']:.2f}x as fast without it, predicted by replay" in read.words
    assert f"Played again without a change it is {100 * own['replay_error']:.1f} % off" in read.words
    assert len(Read(both).tables["answer"]) == 2
    nothing = Read(
        report.html(Trace.from_frames({"kernels": starved.table("kernels", ["start_ns", "end_ns", "name"])}))
    )
    assert "answer" not in nothing.tables
    assert "nothing is predicted" in nothing.words


def test_each_figure_says_where_it_is_from(alone):
    text = alone
    source = "Synthetic GPU (planted trace) · Nsight Systems planted · not recorded: ops, overhead"
    figures = text.count("<table ") + text.count("<figure>")
    assert text.count(source) >= figures > 10


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
    assert read.tables["summary"][0][0] == ["", "Abefore", "Bafter"]
    head, letters, *rows = read.tables["idle"][0]
    assert head == ["cause", "total", "of span", "count"]
    assert letters == ["A", "B"] * 3
    before, after = (gaps.summary(t).set_index("cause") for t in (starved, sync))
    for cause, a, b, *_ in rows:
        for frame, shown in ((before, a), (after, b)):
            assert shown == (time_text(int(frame.loc[cause, "total_ns"])) if cause in frame.index else "-")
    totals = [max(f["total_ns"].get(row[0], 0) for f in (before, after)) for row in rows]
    assert totals == sorted(totals, reverse=True)
    assert [len(read.tables[name]) for name in ("gaps", "steps", "kernels")] == [2, 2, 1]
    assert "GPU profiles: 2 traces side by side" in read.words


def test_a_trace_without_gpu_work_says_what_it_lacks():
    ops = pd.DataFrame({"start_ns": [0, 10], "end_ns": [90, 40], "name": ["a", "b"], "process": 1, "thread": 1 << 24})
    meta = TraceMeta(tool="torch", missing=["kernels", "memops", "graphs", "calls", "os_calls", "ranges"])
    read = Read(report.html(Trace.from_frames({"ops": ops}, meta)))
    assert "The trace does not say what held the run back" in read.words
    assert read.sections == ["answer", "summary", "timeline"]
    assert {row[0]: row[1] for row in read.tables["summary"][0]}["GPU busy"] == "not recorded"
    empty = Read(report.html(Trace.from_frames({})))
    assert "The trace has no kernels." in empty.words
    both = Read(report.html({"a": Trace.from_frames({"ops": ops}, meta), "b": many(50)}))
    assert "Not recorded in a." in both.words


def test_it_is_one_file_that_asks_for_nothing(alone):
    text = alone
    for never in ("http://", "https://", "url(", "@import", "<iframe", "innerHTML", "eval(", "fetch("):
        assert never not in text
    targets = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert all(t.startswith("#") or t == "data:," for t in targets)
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert {t[1:] for t in targets if t.startswith("#")} <= set(ids)
    assert set(re.findall(r'labelledby="([^"]*)"', text)) <= set(ids)


def test_only_its_own_scripts_and_styles_may_run(alone):
    text = alone
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for kind, pattern in (("script", r"<script>(.*?)</script>"), ("style", r"<style>(.*?)</style>")):
        bodies = re.findall(pattern, text, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(b.encode()).digest()).decode() for b in bodies]
        allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
        assert f"{kind}-src {allowed};" in f"{policy};"
    assert " style=" not in text


def test_hostile_names_stay_text():
    labels = {HOSTILE[0]: hostile(), HOSTILE[3]: hostile()}
    read = Read(report.html(labels, title=HOSTILE[1], selection=HOSTILE[4]))
    tables = {name: hostile().table(name) for name in ("kernels", "calls", "ranges", "ops", "os_calls", "memops")}
    harmless = Trace.from_frames(
        {
            name: pd.DataFrame(table).assign(
                **{
                    column: categorical(np.arange(len(table)) % 7, list("abcdefg"))
                    for column, kind in table.dtypes.items()
                    if str(kind) == "category"
                }
            )
            for name, table in tables.items()
        },
        TraceMeta(tool="t", tool_version="1", gpus=[Gpu(0, "g")], notes=["n"], thread_names={7 << 24 | 7: "x"}),
    )
    plain = Read(report.html({"a": harmless, "b": harmless}, title="t", selection="s"))
    # The same elements, whatever the names are (a name and its short form may differ).
    assert set(read.tags) - {"small"} == set(plain.tags) - {"small"}
    assert read.tags["script"] == plain.tags["script"] == 3
    assert not {"img", "iframe", "object"} & set(read.tags)
    assert not [name for name, _ in read.attributes if name.startswith("on")]
    assert not [value for name, value in read.attributes if name in {"href", "src"} and value[:1] not in "#d"]
    names = {row[0] for row in read.tables["kernels"][0][2:]}
    assert HOSTILE[0] in names
    assert HOSTILE[6] in read.words
    assert r"line\u2028separator\u2029 &amp; ${title} $x" in names
    assert r"\u202egnirts desrever\u202c" in names
    assert HOSTILE[1] in read.words


def test_names_are_cleaned(tmp_path):
    secret = "hf_" + "aBcD1234" * 4 + "xY"
    ranges = pd.DataFrame({"start_ns": [0], "end_ns": [9], "name": [f"load --token={secret}"], "kind": "pushpop"})
    trace = Trace.from_frames(
        {"ranges": ranges, "kernels": pd.DataFrame({"start_ns": [1], "end_ns": [2], "name": "/home/alice/kernel"})},
        TraceMeta(notes=[f"API_KEY={secret}"]),
    )
    report.write({f"{secret}": trace}, tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert secret not in text
    assert "alice" not in text


def test_very_long_names_and_very_many():
    names = ["x" * 2**19, *(f"kernel_{i}" for i in range(549))]
    at = np.arange(550) * 1000
    frame = pd.DataFrame({"start_ns": at, "end_ns": at + 900 - np.arange(550), "name": names, "stream": 7})
    text = report.html(Trace.from_frames({"kernels": frame}))
    read = Read(text)
    assert len(read.tables["kernels"][0]) == 1 + 500
    left = int((frame["end_ns"] - frame["start_ns"]).nsmallest(50).sum())
    assert f"50 further rows are not on this page (total together {time_text(left)})" in read.words
    assert len(text) < 2**19
    short = Trace.from_frames({"kernels": frame.assign(name=["x", *names[1:]])})
    read = Read(report.html({"a": short, "b": short}))
    assert f"100 further rows are not on this page (total together {time_text(2 * left)})" in read.words


def test_a_hundred_thousand_kernels_stay_below_five_megabytes(tmp_path):
    size = report.write(many(100_000), tmp_path / "r.html")
    assert size == (tmp_path / "r.html").stat().st_size < 5_000_000


def test_a_card_without_datasheet_has_no_speed_of_light(alone):
    assert "sol" not in Read(alone).sections


def test_shapes_bring_the_speed_of_light():
    ops = pd.DataFrame({"start_ns": [0], "end_ns": [50], "name": "aten::mm", "process": 7, "thread": 7 << 24 | 7})
    ops["inputs"] = '[[[1024,1024],[1024,1024]],["c10::BFloat16","c10::BFloat16"],["",""]]'
    call = ops.drop(columns="inputs").assign(start_ns=10, end_ns=20, name="cudaLaunchKernel", correlation=1)
    kernel = pd.DataFrame(
        {"start_ns": [30], "end_ns": [10_030], "name": "gemm_bf16", "process": 7, "correlation": 1, "stream": 7}
    )
    meta = TraceMeta(tool="pytorch-profiler", gpus=[Gpu(0, "NVIDIA H100 80GB HBM3")])
    read = Read(report.html(Trace.from_frames({"ops": ops, "calls": call, "kernels": kernel}, meta)))
    assert read.tables["sol"][0][1][0].startswith("aten::mm")


def test_every_thread_stream_and_level_has_a_row_or_is_said_to_lack_one():
    depth = np.arange(5)
    nested = pd.DataFrame({"start_ns": depth, "end_ns": 100 - depth, "level": depth, "parent": depth - 1, "name": "r"})
    at = np.arange(4)
    rows = {
        "ranges": nested.assign(kind="pushpop", thread=1 << 24 | 1),
        "ops": pd.DataFrame({"start_ns": [1, 2], "end_ns": [50, 40], "name": ["a", "b"], "thread": 1 << 24 | 1}),
        "calls": pd.DataFrame({"start_ns": at, "end_ns": at + 1, "name": "c", "thread": (1 << 24) + at}),
        "kernels": pd.DataFrame({"start_ns": at, "end_ns": at + 9, "name": "k", "stream": at + 7, "device": at % 2}),
    }
    trace = Trace.from_frames(rows, TraceMeta(thread_names={1 << 24 | 1: "main"}))
    idle = pd.DataFrame({"device": [1], "start_ns": [3], "end_ns": [5], "cause": ["unknown"]})
    found = lanes.all_lanes(trace, lanes.Most(12, 32, 24), idle)
    assert found.left_out == ""
    calls = [f"CPU thread {i} CUDA calls" for i in (0, 2, 3)]
    gpu = ["GPU 0 stream 7", "GPU 0 stream 9", "GPU 1 stream 8", "GPU 1 stream 10", "GPU 1 idle, by cause"]
    labels = [lane.label for lane in sorted(found.lanes, key=lambda lane: lane.row)]
    assert labels == ["CPU main", *[""] * 4, "CPU main ops", "", "CPU main CUDA calls", *calls, *gpu]
    assert sum(len(lane.start) for lane in found.lanes) == 5 + 2 + 4 + 4 + 1
    few = lanes.all_lanes(trace, lanes.Most(3, 2, 1), idle)
    assert few.left_out == (
        "3 more threads and 2 more streams, which had less to do; what is nested deeper than 3 levels"
    )
    assert len({lane.row for lane in few.lanes}) == 3 + 2 + 1 + 2 + 1


def test_writing_is_all_or_nothing(alone, starved, tmp_path, monkeypatch):
    path = tmp_path / "r.html"
    path.write_text("old")

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.replace", fail)
        with pytest.raises(UsageError, match="No space left"):
            report.write(many(5), path, overwrite=True)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]
    report.write(starved, path, overwrite=True)
    assert alone.startswith("<!doctype html>")
    assert path.read_text() == alone  # the same bytes each time


def test_a_trace_is_never_overwritten(tmp_path):
    path = tmp_path / "t.sqlite"
    planted.training(path, "starved")
    (tmp_path / "link.html").symlink_to(path)
    before = path.read_bytes()
    for target in (path, tmp_path / "link.html"):
        with pytest.raises(UsageError, match="a trace itself"):
            report.write({"a": many(5), "b": nsightkit.load(path)}, target)
    with pytest.raises(UsageError, match="a folder"):
        report.write(many(5), tmp_path)
    with pytest.raises(UsageError, match="make it first"):
        report.write(many(5), tmp_path / "no" / "r.html")
    with pytest.raises(UsageError, match="needs a trace"):
        report.html({})
    assert path.read_bytes() == before


def test_labels_are_the_files_names_without_their_kind():
    def at(path):
        return Trace.from_frames({}, path=path)

    paths = ["/a/run.sqlite", "/b/run.sqlite", "x.pt.trace.json.gz", "y.json", "z.nsys-rep", "w", None]
    assert list(report.labelled(map(at, paths))) == ["run", "run (2)", "x", "y", "z", "w", "trace"]


def test_it_needs_no_matplotlib(tmp_path):
    planted.training(tmp_path / "t.sqlite", "starved", steps=3)
    code = f"""
import sys
for name in ("matplotlib", "PIL", "jinja2", "torch"):
    sys.modules[name] = None
import nsightkit
from nsightkit import report
report.write(nsightkit.load({str(tmp_path / "t.sqlite")!r}), {str(tmp_path / "r.html")!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert (tmp_path / "r.html").stat().st_size > 50_000


def test_elements_escape_their_text():
    made = elements.tag("p", "<b>", elements.tag("i", "&"), None, ["a", 1], class_="x\"'<", data_v=None, hidden=True)
    assert made == '<p class="x&quot;&#x27;&lt;" hidden>&lt;b&gt;<i>&amp;</i>a1</p>'
    assert elements.shown("a\x1b[31mb\n c\u202e") == "a\\x1b[31mb\\n c\\u202e"
    assert len(elements.shown("x" * 10_000)) == 400


def test_every_answer_has_words_and_a_colour():
    for name in verdict.BOTTLENECKS:
        assert name in page.SAID
        assert name in page.COLOURS
    colours = Counter(page.COLOURS[name] for name in verdict.BOTTLENECKS)
    assert colours.most_common(1)[0][1] == 1


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
    read = Read(text)
    assert read.sections[:3] == ["answer", "summary", "timeline"]
    assert "/home/" not in text
    assert len(text) < 5_000_000


# ---- In a browser ---------------------------------------------------------------------------------------------------


class Opened(WatchedPage):
    """A report in a browser."""

    def __init__(self, browser, path, *, width=1280, theme="light", ready=True, **context):
        super().__init__(browser, path, width=width, theme=theme, ready=ready, **context)

    def names(self, section):
        return self.page.locator(f"#{section} tbody tr:visible > :first-child").all_inner_texts()


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
            found = axe.run(shown.page).response["violations"]
            assert not [f"{v['id']}: {n['target']}" for v in found for n in v["nodes"]]
            small = shown.page.evaluate(
                "[...document.querySelectorAll('button:not([hidden]), input')].map((b) => b.getBoundingClientRect())"
                ".filter((b) => b.width && (b.width < 24 || b.height < 24)).length"
            )
            assert small == 0


@pytest.mark.site
def test_tables_sort_by_what_they_mean(opened):
    trace = many(3000)
    with opened(trace) as shown:
        button = shown.page.locator("#kernels th").filter(has_text="total").get_by_role("button")
        head = shown.page.locator("#kernels th").filter(has_text="total")
        truth = kernels.summary(trace)
        button.click()
        assert head.get_attribute("aria-sort") == "descending"
        button.click()
        assert head.get_attribute("aria-sort") == "ascending"
        smallest = truth.sort_values("total_ns")["name"].head(12).tolist()
        shown_names = [text.splitlines()[-1] for text in shown.names("kernels")]
        assert shown_names == smallest
        shown.page.locator("#kernels th").filter(has_text="name").get_by_role("button").focus()
        shown.page.keyboard.press("Enter")
        assert head.get_attribute("aria-sort") is None
        assert shown.names("kernels")[0].splitlines()[0].startswith("elementwise_kernel<1,")
        shown.page.get_by_role("button", name=f"Show all {len(truth)} rows").click()
        assert len(shown.names("kernels")) == len(truth)


@pytest.mark.site
def test_tables_filter(opened):
    trace = many(3000)
    with opened(trace) as shown:
        box = shown.page.get_by_label("Filter: Kernels by name")
        box.fill("GEMM_4")
        truth = [n for n in kernels.summary(trace)["name"] if "gemm_4" in n]
        assert [text.splitlines()[0] for text in shown.names("kernels")] == truth
        assert f"{len(truth)} rows of 60 found" in shown.page.locator("#kernels [role=status]").inner_text()
        box.fill("no such kernel")
        assert shown.names("kernels") == []
        box.fill("")
        assert len(shown.names("kernels")) == 12


@pytest.mark.site
def test_side_by_side_each_trace_sorts_by_its_own_column(opened, starved, sync):
    with opened({"before": starved, "after": sync}) as shown:
        for label, trace in (("before", starved), ("after", sync)):
            shown.page.get_by_role("button", name=f"total, {label}").nth(1).click()
            truth = kernels.summary(trace, by="category").sort_values("total_ns", ascending=False)["name"].tolist()
            assert shown.names("categories")[: len(truth)] == truth
        assert shown.get("e.rows.filter((row) => row.kind === 'heading').map((row) => row.label)") == [
            "before",
            "after",
        ]


@pytest.mark.site
def test_a_gap_is_shown_where_it_is(opened, starved, sync):
    gap = gaps.find(sync).nlargest(1, "duration_ns").iloc[0]
    with opened({"before": starved, "after": sync}, reduced_motion="reduce") as shown:
        shown.page.locator("#gaps .listing").nth(1).get_by_role("button", name="Show in the timeline").first.click()
        start, end = shown.get("[e.view.start, e.view.end]")
        first = shown.get("e.data.traces[1].first")
        assert start <= gap["start_ns"] - first < gap["end_ns"] - first <= end
        assert end - start < 4 * gap["duration_ns"]
        assert shown.get("e.shadowRoot.activeElement === e.canvas")
        until(shown.page, "scrollY > 0")


@pytest.mark.site
def test_all_threads_and_streams_have_rows(opened, starved):
    with opened(starved) as shown:
        labels = shown.get("e.rows.map((row) => row.label)")
        for label in ("CPU thread 4242", "CPU thread 4242 CUDA calls", "GPU stream 7", "GPU idle, by cause"):
            assert label in labels
        idle = shown.get(
            "e.rows.find((row) => row.label === 'GPU idle, by cause').of[0].levels[0].busy.reduce((a, b) => a + b)"
        )
        assert idle == overview.summary(starved)["idle_ns"]


@pytest.mark.site
def test_hostile_names_do_nothing(opened):
    with opened({HOSTILE[0]: hostile(), HOSTILE[3]: hostile()}) as shown:
        assert shown.page.locator("img").count() == 0
        assert HOSTILE[0] in shown.page.locator("#kernels").inner_text()
        shown.page.locator("nsightkit-timeline canvas").focus()
        for key in ("ArrowDown", "n", "n", "ArrowDown", "n"):
            shown.page.keyboard.press(key)
        shown.page.wait_for_timeout(200)


@pytest.mark.site
def test_it_is_whole_without_scripts(opened, starved):
    with opened(starved, ready=False, java_script_enabled=False) as shown:
        assert len(shown.names("gaps")) == 17
        assert shown.page.get_by_text("The timeline needs scripts").is_visible()
        assert shown.page.locator("button:visible").count() == 0


@pytest.mark.site
def test_it_prints_on_white_with_all_of_the_timeline(opened, starved):
    with opened(starved, theme="dark") as shown:
        shown.page.set_viewport_size({"width": 1280, "height": 200})
        pdf = shown.page.pdf(print_background=True)
        assert pdf.startswith(b"%PDF")
        shown.page.emulate_media(media="print", color_scheme="dark")
        assert shown.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        shown.page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert shown.get("e.colours.dark") is False
        assert shown.get("e.inSight()") == [0, shown.get("e.box.height")]
        assert shown.page.locator("nav").is_hidden()


@pytest.mark.site
def test_the_strip_follows_a_reader_through_many_rows(opened):
    frame = pd.concat([many(50, seed=i, calls=False)["kernels"].assign(stream=i) for i in range(32)], ignore_index=True)
    trace = Trace.from_frames({"kernels": frame})
    with opened(trace) as shown:
        shown.page.set_viewport_size({"width": 1000, "height": 400})
        assert shown.get("e.box.height > innerHeight")
        shown.page.evaluate(
            "document.querySelector('nsightkit-timeline').scrollIntoView({block: 'end', behavior: 'instant'})"
        )
        until(shown.page, "document.querySelector('nsightkit-timeline').top > 100")
        # The last row, which was out of sight, is drawn now, and the strip on top of it takes clicks.
        x, y = shown.get(
            "(() => { const r = e.canvas.getBoundingClientRect(); return [r.left + e.box.left + e.box.width * 0.75,"
            " r.top + e.top + 10]; })()"
        )
        shown.get("e.zoom(0.25, undefined, false)")
        shown.page.mouse.click(x, y)
        start, end = shown.get("[e.view.start, e.view.end]")
        assert (start + end) / 2 == pytest.approx(0.75 * shown.get("e.span"), rel=0.01)
        shown.get("e.show(0, e.span, false)")
        rows = shown.get("e.rows.length")
        assert rows == 33
        marks = shown.get(
            "(() => { e.draw(); const r = e.rows.at(-1), b = e.box, d = e.canvas.width / b.all;"
            " const p = e.canvas.getContext('2d').getImageData(b.left * d, r.top * d, b.width * d, r.height * d).data;"
            " let n = 0; for (let i = 3; i < p.length; i += 4) n += p[i] > 40; return n; })()"
        )
        assert marks > 100
