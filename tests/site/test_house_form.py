"""The checker of a page's form: a good page passes, and a page with one fault is told what to do about it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "_ext"))
import house_form  # noqa: E402

GOOD = ROOT / "examples" / "02_starved_input_pipeline.py"


def _problems(tmp_path: Path, old: str, new: str, name: str = GOOD.name) -> list[str]:
    text = GOOD.read_text(encoding="utf-8")
    assert old in text
    script = tmp_path / name
    script.write_text(text.replace(old, new), encoding="utf-8")
    return house_form.problems(script)


def test_a_good_page_passes(tmp_path):
    assert _problems(tmp_path, "# %%", "# %%") == []


@pytest.mark.parametrize("heading", house_form.HEADINGS)
def test_a_missing_section_is_named_with_its_reason(tmp_path, heading):
    text = GOOD.read_text(encoding="utf-8")
    (title,) = [line for line in text.splitlines() if line.startswith(f"# {heading}")]
    (found,) = _problems(tmp_path, f"{title}\n# ---", f"# Something\n# {'-' * 9}\n{title}\n# ***")
    assert repr(heading) in found
    assert house_form._WHY[heading] in found


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("GPU waiting for data?", "GPU waiting for data.", "the title is not a question"),
        ("= measure(\n", "= look(\n", "nothing is measured"),
        ("findings = headline(", "results = headline(", "exports no findings"),
        ("\n.. in-short::\n", "\n", "does not say what came out"),
        ("$ python examples/02_starved_input_pipeline.py", "$ python it.py", "a reader cannot repeat it"),
        ("# The wait for data is gone.", "# See https://example.org.", "names an address"),
        ("# The wait for data is gone.", "# On an H200 it took 12.5 ms.", "typed number, '12.5 ms'"),
        ("four = case(", "synthetic.training()\nfour = case(", "synthetic data without saying so"),
        ("# Limits\n# ------\n", f"# Limits\n# ------\n# {'wide ' * 20}\n", "wider than 79 columns"),
        ("import pandas as pd", "import pandas as", "not Python"),
    ],
)
def test_a_fault_is_found_and_its_remedy_told(tmp_path, old, new, said):
    found = _problems(tmp_path, old, new)
    assert any(said in f for f in found), found


def test_sections_out_of_order(tmp_path):
    found = _problems(tmp_path, "# Verdict\n# -------\n", "# Limits\n# ------\n# Verdict\n# -------\n")
    assert any("another order" in f for f in found), found


def test_a_name_that_says_nothing(tmp_path):
    assert "must be two digits" in _problems(tmp_path, "# %%", "# %%", "page.py")[0]


def test_no_docstring(tmp_path):
    script = tmp_path / "01_bare.py"
    script.write_text("print(1)\n", encoding="utf-8")
    assert house_form.problems(script) == [
        "it has no docstring; the first block is the title, the question and what came out"
    ]


def test_the_command_says_which_script_and_fails(tmp_path, capsys):
    script = tmp_path / "01_bare.py"
    script.write_text("print(1)\n", encoding="utf-8")
    assert house_form.main([str(script)]) == 1
    shown = capsys.readouterr()
    assert "error: 01_bare.py: it has no docstring" in shown.err
    assert "1 problems" in shown.out
