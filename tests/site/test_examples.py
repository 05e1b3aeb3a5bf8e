"""Each page runs as a script, small on the CPU and without a recording."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from nsightkit.guide import Measurement

pytest.importorskip("torch")
pytest.importorskip("jinja2")
plt = pytest.importorskip("matplotlib.pyplot")

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("[0-9]*.py"))


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which a page is run, with no setting of ours and no recording."""
    for name in filter(lambda name: name.startswith("NSIGHTKIT_"), os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("NSIGHTKIT_RECORDINGS", str(tmp_path / "none"))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


# Building the site runs every page in replay; one of them shows that a script does it, too.
@pytest.mark.parametrize(("script", "mode"), [(SCRIPTS[1], "replay"), (SCRIPTS[4], "small")], ids=["replay", "small"])
def test_a_page_runs_as_a_script_from_anywhere(script: Path, mode: str, elsewhere: Path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NSIGHTKIT_MODE": mode}
    done = subprocess.run(
        [sys.executable, script], check=False, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert done.stdout.strip()
    assert not list(elsewhere.iterdir()), "it leaves something behind"
    assert not (elsewhere.parent / "none").exists()


# What Python shows of no script: warnings of libraries, and of temporary folders that go with their variables.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_page_runs_small(script: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """In one process, so that PyTorch is imported once."""
    monkeypatch.setenv("NSIGHTKIT_MODE", "small")
    monkeypatch.syspath_prepend(str(script.parent))
    try:
        names = runpy.run_path(str(script), run_name="__main__")
        if script.stem == "22_one_rank_is_late":
            _the_late_rank_is_named(names["late_rank"], names["before"], names["own"])
    finally:
        plt.close("all")
    out, err = capsys.readouterr()
    assert "Warning" not in err
    assert out.strip()
    assert not list(elsewhere.iterdir()), "it leaves something behind"
    assert not (elsewhere.parent / "none").exists()


def _the_late_rank_is_named(late_rank, before: Measurement, own):
    """Two processes under torchrun, the second of which gets its batches late."""
    rows = before.rows
    assert rows["start_ns"].min() == 0
    assert len(late_rank.step_ns(rows)) == before.parameters["steps"]
    assert late_rank.step_ns(rows).median() > before.parameters["late_ms"] * 1e6  # all wait for the late rank
    counts = []
    for rank, trace in enumerate(late_rank.traces(rows)):
        assert trace.meta.distributed == {"rank": rank, "world_size": 2}
        assert not trace.recorded("kernels")
        names = trace.table("ranges", ["name"])["name"].value_counts()
        assert [names[phase] for phase in ("data", "forward", "backward", "optimizer")] == 4 * [16]
        counts.append(names["gloo:all_reduce"])
    assert counts[0] == counts[1] >= 16
    (straggler,) = own.stragglers.to_dict("records")
    assert straggler["rank"] == 1
    assert "data" in straggler["cause"]
