"""The guide's drawings are what tools/schematics.py draws: their figures come from the table of GPUs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import schematics  # noqa: E402

DRAWN = (
    schematics.queue,
    schematics.memory,
    schematics.coalescing,
    schematics.tiling,
    schematics.overlap,
    schematics.symptoms,
)


@pytest.mark.parametrize("draw", DRAWN, ids=lambda draw: draw.__name__)
def test_a_drawing_is_up_to_date(draw, tmp_path, monkeypatch):
    kept = schematics.FOLDER
    monkeypatch.setattr(schematics, "FOLDER", tmp_path)
    drawing = draw()
    drawing.save()
    name = f"{drawing.name}.svg"
    assert (kept / name).read_text("utf-8") == (tmp_path / name).read_text("utf-8"), "run tools/schematics.py"
