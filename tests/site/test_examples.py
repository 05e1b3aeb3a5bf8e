"""Each page runs as a plain script, small on the CPU and without a recording."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("[0-9]*.py"))


# Building the site runs every page in replay; one of them shows that a script does it, too.
@pytest.mark.parametrize(
    ("script", "mode"),
    [(SCRIPTS[1], "replay"), *((script, "small") for script in SCRIPTS)],
    ids=lambda value: Path(value).stem,
)
def test_a_page_runs_as_a_script_from_anywhere(script: Path, mode: str, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NSIGHTKIT_")}
    environment |= {"PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg", "NSIGHTKIT_MODE": mode}
    environment["NSIGHTKIT_RECORDINGS"] = str(tmp_path / "none")
    done = subprocess.run(
        [sys.executable, str(script)],
        check=False,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert done.stdout.strip()
    assert not list(folder.iterdir()), "it leaves something behind"
    assert not (tmp_path / "none").exists()
