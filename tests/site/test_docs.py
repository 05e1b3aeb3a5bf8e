"""The site's own machinery, on a tiny site built with the real configuration."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

bs4 = pytest.importorskip("bs4")
for _needed in ("sphinx", "sphinx_gallery", "myst_nb", "numpydoc", "pydata_sphinx_theme"):
    pytest.importorskip(_needed)

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "_ext"))
import page_checks  # noqa: E402

CONF = f"""
import runpy
globals().update(runpy.run_path({str(ROOT / "conf.py")!r}))
sphinx_gallery_conf |= {{"examples_dirs": ["../examples"], "junit": ""}}
intersphinx_mapping = {{}}
autosummary_generate = False
"""

HEADER = '''
"""
A question
==========

How much is it?

It is :measured:`01_probe.share:.0%` in :measured:`01_probe.where`.

.. in-short::
"""

# %%
# Predict: how much?
# ------------------
# .. dropdown:: Answer
#
#    That much.
#
# Exercises
# ---------
# .. dropdown:: Answer
#
#    One.
#
# .. dropdown:: Answer
#
#    Two.

# fold: How it is added up
total = 1 + 1
'''

MEASURE = """
# %%
# Measured here
# -------------
# .. own-run::
#
# What the script measures.

class Measurement:
    label = "Measured on a made-up machine"
    provenance = {}

    def _repr_html_(self):
        banner = '<p class="nsightkit-banner">Made up.</p>'
        return f'<aside class="nsightkit-provenance" data-mode="missing">{banner}</aside>'

measurement = Measurement()
findings = {"share": 0.25, "where": "<b>here</b>", "verdict": "it is <little>.", "badge": "exact"}
measurement
"""

FIGURE = """
# %%
# See
# ---

import matplotlib.pyplot as plt
figure, axes = plt.subplots()
axes.plot([1, 2])
"""

LABEL = """
figure.set_label('A line: "up" & away')
downloads = {"The trace (Chrome JSON)": trace, "This text": text, "That text": other}
"""

TRACE = """
# %%
# Keep
# ----

import pathlib
import tempfile

import pandas as pd
from nsightkit.trace.model import Trace

warp = 32
text = pathlib.Path(tempfile.mkdtemp(), "notes.txt")
_ = text.write_text("kept")
other = pathlib.Path(tempfile.mkdtemp(), "notes.txt")
_ = other.write_text("kept, too")
trace = Trace.from_frames({"kernels": pd.DataFrame({"start_ns": [0], "end_ns": [5], "name": ["k"]})})
"""


GLOSSARY = """
A warp waits; Warps wait for `warp`s, as [warps](gallery/index) do. A long wave, not the waveform.

```{glossary}
warp
  32 threads.

long wave
  As many blocks as fit.

wave
  Some blocks, each a {term}`warp`.
```
"""


def _site(folder: Path, script: str, index: str = "") -> Path:
    """A site of one landing page and one gallery script."""
    (folder / "docs").mkdir(parents=True)
    (folder / "examples").mkdir()
    (folder / "conf.py").write_text(CONF, encoding="utf-8")
    (folder / "docs" / "index.md").write_text(
        f"# Tiny\n\n{index}\n\n```{{toctree}}\ngallery/index\n```\n", encoding="utf-8"
    )
    (folder / "examples" / "GALLERY_HEADER.rst").write_text("Gallery\n=======\n", encoding="utf-8")
    (folder / "examples" / "01_probe.py").write_text(script.lstrip(), encoding="utf-8")
    return folder


def _build(folder: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    arguments = ["-c", ".", "docs", "html", "-W", "-n", "--keep-going", "-q", *options]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NSIGHTKIT_")} | env
    environment |= {"MPLBACKEND": "Agg", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, "-m", "sphinx", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    index = f"From another page: {{measured}}`01_probe.share:.1%`.\n\n{GLOSSARY}"
    site = _site(tmp_path_factory.mktemp("site"), HEADER + MEASURE + TRACE + FIGURE + LABEL, index)
    done = _build(site, "-E")
    assert done.returncode == 0, done.stderr
    return site / "html"


@pytest.fixture
def page(built) -> bs4.BeautifulSoup:
    return bs4.BeautifulSoup((built / "gallery" / "01_probe.html").read_text(encoding="utf-8"), "html.parser")


def test_a_good_page_has_no_problem(built):
    assert page_checks.problems(built, built.parent / "examples") == []


def test_a_figure_comes_light_and_dark_with_its_alternative_text(page, built):
    images = {mode: page.select(f"article img.only-{mode}") for mode in ("light", "dark")}
    assert [len(v) for v in images.values()] == [1, 1]
    for (image,) in images.values():
        assert image["alt"] == 'A line: "up" & away'
        assert (built / "gallery" / image["src"]).is_file()
    assert images["light"][0]["src"] != images["dark"][0]["src"]


def test_numbers_in_prose_are_measurements(page, built):
    share, where = page.select("section > p > abbr.measured")
    assert share.text == "25%"
    assert share["title"] == "exact"
    assert where.text == "<b>here</b>"  # escaped: an export is data
    assert "25.0%" in (built / "index.html").read_text(encoding="utf-8")


def test_the_answer_stands_first_with_its_evidence(page, built):
    (box,) = page.select(".nsightkit-in-short")
    assert [" ".join(line.get_text().split()) for line in box.select("p")] == [
        "In short exact",
        "it is <little>.",
    ]
    index = bs4.BeautifulSoup((built / "gallery" / "index.html").read_text(encoding="utf-8"), "html.parser")
    (card,) = index.select(".nsightkit-card")
    assert " ".join(card.get_text().split()).startswith("A question exact it is <little>.")
    assert card.select_one("a")["href"] == "01_probe.html"


def test_what_need_not_be_read_at_once_is_folded(page):
    folds = {fold.summary.get_text(): fold for fold in page.select("details.nsightkit-fold")}
    missing, code = sorted(folds, reverse=True)
    assert missing == "Not measured yet: run this page on your GPU (python examples/01_probe.py)"
    assert folds[missing].select_one('[data-mode="missing"]')
    assert "What the script measures." in folds[missing].get_text()
    assert not page.select_one("#measured-here"), "a title would promise what is not there"
    assert code == "How it is added up"
    assert folds[code].select_one("pre").get_text().strip() == "total = 1 + 1"


def test_script_and_trace_can_be_downloaded(page, built):
    links = {link.get_text(" ", strip=True): built / "gallery" / link["href"] for link in page.select("a.download")}
    assert any("01_probe.py" in text for text in links)
    assert links["This text"].read_text(encoding="utf-8") == "kept"
    assert links["That text"].read_text(encoding="utf-8") == "kept, too"  # two files of one name
    events = json.loads(gzip.decompress(links["The trace (Chrome JSON)"].read_bytes()))["traceEvents"]
    assert [event["name"] for event in events if event.get("cat") == "kernels"] == ["k"]


def test_no_page_asks_for_anything_elsewhere(built):
    for path in built.rglob("*.html"):
        soup = bs4.BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")
        asked = [e.get("src") or e.get("href") for e in soup.select("script[src], link[href], img[src], iframe[src]")]
        assert not [url for url in asked if url.startswith(("http:", "https:", "//"))]


@pytest.mark.parametrize(
    ("script", "index", "said"),
    [
        (HEADER + MEASURE + FIGURE, "", "neither a label nor a title"),
        (HEADER + MEASURE, "{measured}`01_probe.absent`", "no page exported '01_probe.absent'"),
        (HEADER + MEASURE + '\nfindings["share"] = None\n', "", "a finding is a number or a text"),
    ],
    ids=[
        "figure without alt text",
        "unknown number",
        "finding is not a number",
    ],
)
def test_a_faulty_page_fails_the_build(tmp_path, script, index, said):
    done = _build(_site(tmp_path, script, index), "-E")
    assert done.returncode != 0
    assert said in done.stderr + done.stdout


RECORDED = """
# %%
# Measured here
# -------------
# .. own-run::

from nsightkit.guide import headline, measure

def run(device, size):
    raise AssertionError("a build of the site runs no workload")

measurement = measure("probe/part", run, gpu={"size": 2}, small={"size": 1})
findings = headline("it is.", measurement, otherwise="it was.", badge="exact", share=0.25, where=measurement.mode)
downloads = {}
measurement
"""


def _recorded(place: Path):
    """Write a recording, as if it had been measured on a GPU."""
    pd = pytest.importorskip("pandas")
    from nsightkit.trace import store
    from nsightkit.trace.model import Trace

    trace = Trace.from_frames({"kernels": pd.DataFrame({"start_ns": [0], "end_ns": [5], "name": ["k"]})})
    store.write(trace, place / "trace")
    samples = pd.DataFrame({"metric": "step_ns", "index": [0, 1], "value": [3.0, 1.0]})
    samples.to_parquet(place / "samples.parquet")
    facts = {"format": 1, "gpu": {"name": "Planted GPU"}, "parameters": {"size": 2}, "revision": 1}
    (place / "provenance.json").write_text(json.dumps(facts))


def test_a_page_shows_its_recording(tmp_path):
    recordings = tmp_path / "recordings"
    _recorded(recordings / "probe" / "part" / "planted-gpu")
    site = _site(tmp_path, HEADER + RECORDED + FIGURE + LABEL.partition("downloads")[0])
    done = _build(site, "-E", NSIGHTKIT_RECORDINGS=str(recordings))
    assert done.returncode == 0, done.stderr
    soup = bs4.BeautifulSoup((site / "html" / "gallery" / "01_probe.html").read_text(encoding="utf-8"), "html.parser")
    (block,) = soup.select(".nsightkit-provenance")
    assert block["data-mode"] == "recorded"
    assert "Planted GPU" in block.get_text()
    assert not block.find_parent("details", class_="nsightkit-fold")
    answer = " ".join(soup.select_one(".nsightkit-in-short").get_text().split())
    assert answer == "In short measured, Planted GPU it is."
    assert list((site / "html").rglob("recordings.zip"))


def _altered(built: Path, tmp_path: Path, old: str, new: str) -> list[str]:
    html = tmp_path / "html"
    (html / "gallery").mkdir(parents=True)
    (html / "_images").symlink_to(built / "_images")
    text = (built / "gallery" / "01_probe.html").read_text(encoding="utf-8")
    assert old in text
    (html / "gallery" / "01_probe.html").write_text(text.replace(old, new), encoding="utf-8")
    return page_checks.problems(html)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("Made up.", "<div class='sphx-glr-script-out'>Traceback (most recent call last)</div>", "holds a traceback"),
        ("nsightkit-provenance", "nothing", "no provenance block"),
        ("_001_dark.png", "_009_dark.png", "is missing"),
        ('alt="A line: &#34;up&#34; &amp; away"', "", "no alternative text"),
        ("Made up.", "<pre class='sphx-glr-script-out'>x.py:1: UserWarning: odd</pre>", "holds a warning"),
        (">exact<", ">smoke, a CPU<", "does not rest on any of"),
        ('id="exercises"', "", "'exercises' folds 0 answers; it has at least 2"),
        (
            "nsightkit-provenance",
            'x"></aside></details><aside data-mode="small" class="nsightkit-provenance',
            "a small run on a CPU",
        ),
        ("How much is it?", "word " * 1201, "words; at most 1200"),
        ("warp", "a\n" * 81, "lines of code; at most 80"),
    ],
)
def test_page_checks_find(built, tmp_path, old, new, problem):
    text = (built / "gallery" / "01_probe.html").read_text(encoding="utf-8")
    if old.startswith("alt=") and old not in text:
        old = old.replace("&#34;", "&quot;")
    found = _altered(built, tmp_path, old, new)
    assert any(problem in f for f in found), found


def test_page_checks_miss_no_script(built, tmp_path):
    (tmp_path / "02_forgotten.py").write_text("", encoding="utf-8")
    missing = "gallery/02_forgotten.html: missing, though 02_forgotten.py is in the gallery"
    assert page_checks.problems(built, tmp_path) == [missing]
