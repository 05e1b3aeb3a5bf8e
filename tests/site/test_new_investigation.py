"""What `nox -s new` writes: it has the form, its test passes, and its page builds, as it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import new_investigation  # noqa: E402

SLUG, TITLE = "pinned-copies", "Does pinned memory pay?"


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A source tree like this one, with a new page."""
    root = tmp_path_factory.mktemp("tree")
    skipped = shutil.ignore_patterns("__pycache__", "_build", "gallery", "generated", "jupyter_execute", "recordings")
    for name in ("docs", "examples", "nsightkit"):
        shutil.copytree(ROOT / name, root / name, ignore=skipped)
    shutil.copy(ROOT / "conf.py", root)
    new_investigation.scaffold(root, SLUG, TITLE)
    return root


def _run(tree: Path, *command: str, **environment: str) -> str:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("NSIGHTKIT_")}
    done = subprocess.run(
        [sys.executable, *command],
        check=False,
        cwd=tree,
        env=inherited | {"PYTHONPATH": str(tree), "MPLBACKEND": "Agg"} | environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def _page(tree: Path) -> Path:
    return max((tree / "examples").glob("[0-9]*.py"))


def test_it_has_the_form_and_the_next_number(tree):
    assert "0 problems" in _run(tree, "docs/_ext/page_lint.py", str(_page(tree)))
    number = int(max((ROOT / "examples").glob("[0-9]*.py")).name[:2]) + 1
    assert _page(tree).name == f"{number:02}_pinned_copies.py"


def test_its_test_passes(tree):
    output = _run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/examples/test_pinned_copies.py")
    assert "1 passed" in output


@pytest.mark.parametrize(
    ("slug", "title", "said"),
    [
        (SLUG, TITLE, "is taken"),
        ("Pinned", TITLE, "is not a slug"),
        ("new-one", "No question.", "is not a title"),
    ],
)
def test_what_will_not_do_writes_nothing(tree, slug, title, said):
    before = {p: p.read_bytes() for p in tree.rglob("*.py") if "html" not in p.parts}
    with pytest.raises(ValueError, match=said):
        new_investigation.scaffold(tree, slug, title)
    assert {p: p.read_bytes() for p in tree.rglob("*.py") if "html" not in p.parts} == before
