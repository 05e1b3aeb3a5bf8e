"""The lint of gallery scripts: all pages pass, and each fault is found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "_ext"))
import page_lint  # noqa: E402

PAGE = '''"""
Is the GPU waiting?
===================
"""
# %%
# It waits {text} in ``12 ms``.

run = measure("a/b", work, {sizes})
{last}
'''
GOOD = {
    "text": ":measured:`01_a.share:.1f` %",
    "sizes": "gpu=dict(n=9), small=dict(n=1)",
    "last": "findings = headline(run)",
}


def test_all_pages():
    assert page_lint.main([]) == 0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({}, ""),
        ({"text": "12.5 ms"}, "typed number '12.5 ms'"),
        ({"sizes": "gpu=dict(n=9)"}, "line 8: measure() needs"),
        ({"last": ""}, "no findings"),
    ],
)
def test_faults(fault: dict[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    script = tmp_path / "01_a.py"
    script.write_text(PAGE.format(**GOOD | fault), encoding="utf-8")
    assert page_lint.main([str(script)]) == bool(message)
    assert message in capsys.readouterr().err
