"""Figures of ranks: who waits is drawn as long as it waits, and who is late as late as it is."""

from __future__ import annotations

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from nsightkit import plots


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


def arrivals(ranks=3, steps=4, late=1):
    """One collective a step; the late rank comes 2 ms after the others, and the transfer takes 1 ms."""
    rows = []
    for step in range(steps):
        for rank in range(ranks):
            start = 10_000_000 * step + (2_000_000 if rank == late else 0)
            wait = 0 if rank == late else 2_000_000
            rows.append((step, 0, rank, step, start, start + wait + 1_000_000, wait))
    columns = ["collective", "group", "rank", "step", "start_ns", "end_ns", "wait_ns"]
    return pd.DataFrame(rows, columns=columns).astype({"wait_ns": "Int64"})


def test_waiting_and_transfer_are_as_long_as_they_last():
    figure = plots.rank_arrivals(arrivals(), title="Who waits $here$")
    (axes,) = figure.axes
    waiting, transfer = (bars.patches for bars in axes.containers)
    assert [round(p.get_width(), 6) for p in waiting] == [2, 0, 2] * 2
    assert [round(p.get_width(), 6) for p in transfer] == [1] * 6
    # Steps from the middle, drawn from their first arrival on.
    assert {round(p.get_x(), 6) for p in waiting} == {0, 2, 10, 12}
    assert [t.get_text() for t in axes.get_yticklabels()] == ["rank 0", "rank 1", "rank 2"]
    assert "rank 0 8.00 ms, rank 1 0 ns, rank 2 8.00 ms" in figure.get_label()
    assert axes.get_xlabel() == "time (ms)"
    figure.canvas.draw()


def test_lateness_is_a_dot_a_step():
    frame = arrivals()
    late = pd.Series(np.where(frame["rank"] == 1, 2e6, 0.0))
    figure = plots.rank_lateness(frame, late)
    (axes,) = figure.axes
    dots = [collection.get_offsets()[:, 0].tolist() for collection in axes.collections]
    assert dots == [[0.0] * 4, [2.0] * 4, [0.0] * 4]
    assert [line.get_xdata()[0] for line in axes.lines] == [0, 2, 0]
    assert "rank 1 2.00 ms" in figure.get_label()
    figure.canvas.draw()
    frame["step"] = -1
    assert "one a collective" in plots.rank_lateness(frame, late).get_label()


def test_of_many_ranks_some_are_drawn():
    frame = arrivals(ranks=200, late=77)
    figure = plots.rank_arrivals(frame)
    labels = [t.get_text() for t in figure.axes[0].get_yticklabels()]
    assert len(labels) <= 24
    assert "rank 77" in labels
    assert labels == sorted(labels, key=lambda text: int(text.split()[1]))
    assert "rank 77" in [
        t.get_text() for t in plots.rank_lateness(frame, pd.Series(np.zeros(len(frame)))).axes[0].get_yticklabels()
    ]


@pytest.mark.parametrize("draw", [plots.rank_arrivals, lambda f: plots.rank_lateness(f, pd.Series(dtype=float))])
def test_nothing_to_draw_is_said(draw):
    figure = draw(arrivals()[:0])
    assert "no collectives" in figure.get_label()
    figure.canvas.draw()
