"""``tools/record.py``: the cheapest page first, until the budget is used; what is recorded is left out."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import record


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for pages; each page that runs adds its name to ``ran``."""
    monkeypatch.setenv("NSIGHTKIT_RECORDINGS", str(tmp_path / "recordings"))
    monkeypatch.setattr(record, "gpu_name", lambda: None)
    (tmp_path / "examples").mkdir()
    return tmp_path / "examples"


def write(pages: Path, stem: str, code: str = "", seconds: int | None = None) -> Path:
    lines = [] if seconds is None else [f"# record: {seconds} s"]
    lines += ["import os, sys, time", "assert os.environ['NSIGHTKIT_MODE'] == 'record'"]
    lines += [f"open({str(pages.parent / 'ran')!r}, 'a').write('{stem} ')", code]
    (pages / f"{stem}.py").write_text("\n".join(lines))
    return pages / f"{stem}.py"


def ran(pages: Path) -> list[str]:
    file = pages.parent / "ran"
    names = file.read_text().split() if file.exists() else []
    file.unlink(missing_ok=True)
    return names


def test_the_cheapest_page_comes_first_and_none_runs_twice(pages: Path, capsys: pytest.CaptureFixture[str]):
    write(pages, "01_long", seconds=300)
    write(pages, "02_wrong", "sys.exit('the result is wrong')", seconds=2)
    short = write(pages, "03_short", seconds=1)
    write(pages, "04_usual")
    assert record.main([], pages) == 1
    assert ran(pages) == ["03_short", "02_wrong", "04_usual", "01_long"]
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()] == ["03_short", "02_wrong", "04_usual", "01_long"]
    assert "failed: the result is wrong" in out
    short.write_text(short.read_text() + "# changed\n")
    assert record.main([], pages) == 1
    assert ran(pages) == ["03_short", "02_wrong"]
    assert capsys.readouterr().out.count("recorded before") == 2


def test_the_budget_ends_the_page_under_way(pages: Path, capsys: pytest.CaptureFixture[str]):
    write(pages, "01_endless", "time.sleep(60)", seconds=1)
    write(pages, "02_long", seconds=100)
    begin = time.monotonic()
    assert record.main(["--budget-s", "4"], pages) == 0
    assert time.monotonic() - begin < 20
    assert ran(pages) == ["01_endless"]
    first, second = capsys.readouterr().out.splitlines()
    assert "ended at the deadline" in first
    assert "not begun: it takes about 100 s" in second
