"""Figures of bytes: every part drawn to its length, every point where it was measured, what failed on the limit."""

from __future__ import annotations

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from nsightkit import plots

HOSTILE = "item<$\\frac{1}$>"


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


def test_stacks_are_as_long_as_their_parts() -> None:
    columns = {
        "predicted": pd.Series({"weights": 2e9, HOSTILE: 3e9, "unexplained": -1.0}),
        "measured": pd.Series({"weights": 2e9, "unexplained": 5e8, "activations": pd.NA}),
    }
    figure = plots.memory_stacks(columns, title="Two ledgers")
    (axes,) = figure.axes
    ends = {patch.get_y(): max(p.get_x() + p.get_width() for p in axes.patches if p.get_y() == patch.get_y())
            for patch in axes.patches}  # fmt: skip
    assert sorted(ends.values()) == pytest.approx([2.5, 5.0])
    assert "measured 2.5 GB" in figure.get_label()
    assert "predicted 5 GB" in figure.get_label()
    assert HOSTILE.replace("$", r"\$") in [text.get_text() for text in figure.legends[0].get_texts()]
    figure.canvas.draw()
    thin = plots.memory_stacks({"a": pd.Series({"weights": 1e9, "logits": 1e3, "KV cache": 1e8})})
    assert [text.get_text() for text in thin.legends[0].get_texts()] == ["weights", "KV cache"]
    assert "nothing is known" in plots.memory_stacks({"a": pd.Series(dtype=float)}).get_label()
