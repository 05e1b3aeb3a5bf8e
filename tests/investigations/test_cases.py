"""Case files: each says where it comes from, is small and whole, and can be opened; one travels with the package."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from nsightkit import cli
from nsightkit.errors import UsageError
from nsightkit.investigations import case, cases

ROOT = Path(__file__).parents[2]
EVERY = [(name, which) for name, traces in cases.names().items() for which in traces]


def test_ten_stories_and_more_in_few_bytes() -> None:
    assert len(cases.names()) >= 10
    files = [p for p in (ROOT / "docs" / "cases").rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) < 6e6


@pytest.mark.parametrize(("name", "which"), EVERY, ids=map("/".join, EVERY))
def test_each_opens_and_says_where_it_comes_from(name: str, which: str) -> None:
    found = case(name, which)
    assert found.trace.size("kernels") > 10
    assert (cases.folder() / "LICENSES" / found.source["licence_file"]).read_text(encoding="utf-8").strip()
    assert found.url.startswith(f"https://github.com/{found.source['repository']}/tree/{found.source['commit']}/")
    shown = found._repr_html_()
    for said in ("licence", "gpu", "program"):
        assert found.source[said] in repr(found)
    assert found.url in shown
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    assert f"- {name}: {found.source['repository']}, commit {found.source['commit']} (" in notice


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
