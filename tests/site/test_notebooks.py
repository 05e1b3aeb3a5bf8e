"""Notebooks of the gallery: plain Markdown and code, with a first cell that installs; one is run as a reader would."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sphinx_gallery")
nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "_ext"))
import notebooks  # noqa: E402

REPOSITORY = "https://github.com/someone/nsightkit"
SCRIPTS = sorted((ROOT / "examples").glob("[0-9]*.py"))


def _made(script: Path, repository: str = REPOSITORY):
    made = nbformat.from_dict(notebooks.notebook(script, repository, "<{}>".format, "[{}]".format))
    nbformat.validate(made)
    return made


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_nothing_of_sphinx_is_left_in_a_notebook(script):
    first, *cells = _made(script).cells
    assert f"git clone --quiet --depth 1 {REPOSITORY} " in first.source
    for cell in cells:
        if cell.cell_type == "markdown":
            assert not re.search(r"^\s*\.\. [\w-]+::", cell.source, re.MULTILINE)
            assert not re.search(r":[\w-]+:`", cell.source)
            assert cell.source.count("<details>") == cell.source.count("</details>")
        else:
            ast.parse(cell.source)
            assert "sphinx_gallery_" not in cell.source


def test_without_a_repository_nothing_is_cloned():
    assert not any("git clone" in cell.source for cell in _made(SCRIPTS[0], "").cells)
    assert notebooks.colab("", "01_x") == notebooks.colab("https://example.org/a/b", "01_x") == ""
    assert notebooks.colab(REPOSITORY, "01_x").endswith("/github/someone/nsightkit/blob/notebooks/01_x.ipynb")


def test_answers_are_folded_and_references_filled_in(tmp_path):
    script = tmp_path / "01_page.py"
    script.write_text(
        '"""\nTitle\n=====\n\nCame out: :measured:`01_page.share:.0%`, see :doc:`02_other`.\n\n.. in-short::\n"""\n\n'
        "# %%\n# 1. Why?\n#\n#    .. dropdown:: Answer\n#\n#       So, and\n#\n#       so.\n#\n# 2. And?\n#\n"
        "# .. list-table::\n#    :header-rows: 1\n#\n#    * - a\n#      - b\n#    * - long\n#        er\n#      - 2\n\n"
        "# sphinx_gallery_thumbnail_number = 2\nx = 1\n\n# %%\n# More\n\n# fold: How\ny = 2\n"
    )
    cells = _made(script, "").cells
    assert cells[0].source == "# Title\n\nCame out: <01_page.share:.0%>, see [02_other]."
    folded = "   <details><summary>Answer</summary>\n\n   So, and\n\n   so.\n\n   </details>"
    assert cells[1].source == f"1. Why?\n\n{folded}\n\n2. And?\n\n| a | b |\n| --- | --- |\n| long er | 2 |"
    assert cells[2].source == "x = 1"
    assert cells[4].source == "# @title How\ny = 2"
    assert cells[4].metadata == {"cellView": "form"}


def test_a_notebook_runs_without_a_gpu(tmp_path, monkeypatch):
    """Page 02, as somebody without a GPU runs it who has nsightkit; its first cell then installs nothing."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("MPLBACKEND", raising=False)
    (script,) = (path for path in SCRIPTS if path.stem.startswith("02_"))
    made = _made(script)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(made, timeout=240, kernel_name="python3", resources=resources).execute()
    code = [cell for cell in made.cells if cell.cell_type == "code"]
    assert all(sum("image/png" in output.get("data", {}) for output in cell.outputs) <= 1 for cell in code)
    outputs = [output for cell in code for output in cell.outputs]
    said = "".join(output.text for output in outputs if output.output_type == "stream")
    assert said.startswith("No GPU")
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert {"image/png", "text/html"} <= kinds
    shown = "".join(output.data.get("text/html", "") for output in outputs if "data" in output)
    assert "case file" in shown
    assert "input-pipeline" in shown
    assert not (tmp_path / "nsightkit-source").exists()


def test_the_first_cell_fetches_the_source(tmp_path):
    """Run as a script, with a repository on this disk: what is cloned has the case files."""
    repository = tmp_path / "origin"
    (repository / "docs" / "cases").mkdir(parents=True)
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=x", "-c", "user.email=x@y", "commit", "-qm", "x"]):
        (repository / "docs" / "cases" / "kept").write_text("kept")
        subprocess.run(["git", *command], cwd=repository, check=True)
    first = notebooks.notebook(SCRIPTS[0], repository.as_uri(), str, str)["cells"][0]["source"]
    (clone,) = re.findall(r"!(git clone .*)", first)
    subprocess.run(clone.split(), cwd=tmp_path, check=True)
    assert (tmp_path / "nsightkit-source" / "docs" / "cases" / "kept").is_file()
    (install,) = re.findall(r'%pip install .*"\./nsightkit-source\[(.*)\]"', first)
    assert set(install.split(",")) <= set(
        re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    )
