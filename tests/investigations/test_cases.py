"""Case files: each says where it comes from, is small and whole, and can be opened; one travels with the package."""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from pathlib import Path

import pytest

from nsightkit import cli
from nsightkit.analysis.memory import snapshot as memory
from nsightkit.analysis.roofline import counters
from nsightkit.errors import UsageError
from nsightkit.investigations import case, cases
from nsightkit.trace.snapshot import plain

ROOT = Path(__file__).parents[2]
EVERY = [(name, which) for name, traces in cases.names().items() for which in traces]


TRACES = [one for one in EVERY if case(*one).path.suffix == ".parquet"]

#: What `ncu --import profile.ncu-rep --csv --page raw` prints as gpu__time_duration.sum, in microseconds.
LADDER_US = [
    *(10776.992, 1397.568, 1008.992, 432.992, 294.464, 261.824, 342.880, 195.296, 220.064, 233.088),
    *(149.440, 150.400),
]


def test_ten_stories_and_more_in_few_bytes() -> None:
    assert len(cases.names()) >= 10
    files = [p for p in (ROOT / "docs" / "cases").rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) < 6e6


@pytest.mark.parametrize(("name", "which"), EVERY, ids=map("/".join, EVERY))
def test_each_opens_and_says_where_it_comes_from(name: str, which: str) -> None:
    found = case(name, which)
    assert (cases.folder() / "LICENSES" / found.source["licence_file"]).read_text(encoding="utf-8").strip()
    assert found.url.startswith(f"https://github.com/{found.source['repository']}/tree/{found.source['commit']}/")
    shown = found._repr_html_()
    for said in ("licence", "gpu", "program"):
        assert found.source[said] in repr(found)
    assert found.url in shown
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    assert f"- {name}: {found.source['repository']}, commit {found.source['commit']} (" in notice


@pytest.mark.parametrize(("name", "which"), TRACES, ids=map("/".join, TRACES))
def test_each_trace_opens(name: str, which: str) -> None:
    assert case(name, which).trace.size("calls") > 10


def test_the_snapshot_is_added_up_by_hand() -> None:
    """The requested bytes, walked through event by event, and the model of the program at the same commit."""
    found = case("memory-snapshot", "step")
    raw = plain(found.path)
    blocks = [b for segment in raw["segments"] for b in segment["blocks"] if b["state"] == "active_allocated"]
    (events,) = [trace for trace in raw["device_traces"] if trace]
    signs = {"alloc": 1, "free_requested": -1, "free_completed": 0}
    changes = [signs[event["action"]] * event["size"] for event in events]
    start = sum(block["requested_size"] for block in blocks) - sum(changes)
    answer = memory.summary(found.snapshot)
    assert answer["peak_requested_bytes"] == max(itertools.accumulate(changes, initial=start))
    assert answer["start"]["requested_bytes"] == start
    assert f"{answer['peak_bytes'] / 1e9:.2f}" == "13.93"
    shares = {row["category"]: row["share"] for row in answer["by_category"]}
    assert shares["activations"] == pytest.approx(0.85, abs=0.005)
    # 12 layers of width 768, MLPs of 3072, 10,000 tokens in the vocabulary, all in FP32: weights and gradients, the
    # logits and the loss of the step before, two workspaces of cuBLAS, tokens and targets, tables of 12 rotary heads.
    parameters = 2 * 10_000 * 768 + 12 * (4 * 768**2 + 3 * 768 * 3072 + 2 * 768) + 768
    tokens = 32 * 256
    last_step = tokens * 10_000 * 4 + 4
    assert start == 8 * parameters + last_step + 2 * 8.125 * 2**20 + 2 * tokens * 8 + 2 * 256 * (768 // 12 // 2) * 4


def test_the_ladder_is_what_ncu_prints() -> None:
    report = case("ncu-esmm", "sgemm").report
    assert (report.launches["time_ns"] / 1e3).tolist() == pytest.approx(LADDER_US, abs=0.0005)
    assert set(report.launches["gpu"]) == {"NVIDIA A10G"}
    # Without the speed-of-light counters nothing is claimed.
    assert set(counters.summary(report)["classification"]) == {"not-enough-data"}


def test_commands_read_the_files_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["memory", str(case("memory-snapshot", "step").path), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_bytes"] > 13e9
    assert cli.run(["ncu", str(case("ncu-esmm", "sgemm").path), "--format", "json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 12


def test_nothing_of_a_machine_is_left(tmp_path: Path) -> None:
    snapshot = case("memory-snapshot", "step").path
    assert cli.run(["scrub", str(snapshot), str(tmp_path / "again.pickle")]) == 0
    assert (tmp_path / "again.pickle").read_bytes() == snapshot.read_bytes()
    folders = re.compile(rb"/home|/root|/Users|[A-Za-z]:\\\\|ec2-user|a\.out|Host Name|Process Name")
    for path in (snapshot, case("ncu-esmm", "sgemm").path):
        assert not folders.search(path.read_bytes())


def test_the_v100_loader_is_found_out() -> None:
    """The ground truth: with four workers the input pipeline was no longer in the way."""
    alone, four = (case(cases.DEMO, which).trace for which in ("workers-0", "workers-4"))
    assert alone.verdict()["bottleneck"] == "input-pipeline"
    assert four.verdict()["bottleneck"] != "input-pipeline"
    predicted = alone.whatif("no-input-wait")["speedup"].iloc[0]
    measured = alone.steps()["wall_ns"].median() / four.steps()["wall_ns"].median()
    assert predicted == pytest.approx(measured, rel=0.1)


def test_text_of_a_source_is_escaped(tmp_path: Path) -> None:
    source = {
        "repository": "a/b", "commit": "0" * 9, "paths": {"x": '"><script>'}, "licence": "MIT", "gpu": "<b>",
        "program": "<script>", "limits": "<i>",
    }  # fmt: skip
    shown = cases.Case("<u>", "x", tmp_path, source)._repr_html_()
    assert "<script>" not in shown
    assert "<b>" not in shown
    assert "<u>" not in shown


def test_what_is_not_here_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no case file v100-starved-loader/workers-9 here; there are .*workers-4"):
        case("v100-starved-loader", "workers-9")
    with pytest.raises(UsageError, match=r"no case file \.\./recordings/x here"):
        case("../recordings", "x")


def test_one_to_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["demo"]) == 0
    written = capsys.readouterr().out
    assert "nsightkit-demo/workers-0.parquet" in written
    assert cli.run(["verdict", "nsightkit-demo/workers-0.parquet", "--no-cache"]) == 0
    assert "input-pipeline" in capsys.readouterr().out
    assert cli.run(["demo"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert cli.run(["demo", "elsewhere"]) == 0
    assert (tmp_path / "elsewhere" / "source.json").is_file()


def test_the_wheel_holds_the_one_to_try() -> None:
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    held = targets["wheel"]["force-include"]
    assert held == {
        f"docs/cases/{path}": f"nsightkit/cases/{path}" for path in (cases.DEMO, "LICENSES/pytorch_kineto.txt")
    }
    assert all((ROOT / path).exists() for path in held)
    assert sum(p.stat().st_size for p in (ROOT / "docs" / "cases" / cases.DEMO).rglob("*") if p.is_file()) < 5e5
