"""The guide's worked example, ResNet-50 training on a V100: a chart of its step time that grows by sections."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from nsightkit.guide import case
from nsightkit.plots.looks import BLUE

#: The rows of the chart, in the order in which the example gets to them.
BEFORE = "no loader workers"
NO_WAIT = "without waits for data"
NO_LAUNCHES = "without launch overhead"
AFTER = "four loader workers"
NEXT = "and without launch overhead"
ROWS = (BEFORE, NO_WAIT, NO_LAUNCHES, AFTER, NEXT)


def step_times() -> dict[str, float]:
    """Work out the mean time of the six recorded steps, recorded and predicted.

    Returns
    -------
    dict of str to float
        By row, ms. A prediction divides the recorded time by the replay's speedup.
    """
    before, after = (case("v100-starved-loader", f"workers-{n}").trace for n in (0, 4))
    before_ms, after_ms = (float(trace.steps()["wall_ns"].mean()) / 1e6 for trace in (before, after))
    changes = before.whatif("no-input-wait", "free-launches").set_index("change")["speedup"]
    launches = after.whatif("free-launches")["speedup"].iloc[0]
    return {
        BEFORE: before_ms,
        NO_WAIT: before_ms / changes["no-input-wait"],
        NO_LAUNCHES: before_ms / changes["free-launches"],
        AFTER: after_ms,
        NEXT: after_ms / launches,
    }


def chart(times: dict[str, float], last: str) -> Figure:
    """Draw the step times up to one row: recorded ones filled, predicted ones as outlines.

    Parameters
    ----------
    times : dict of str to float
        From `step_times`.
    last : str
        The newest row; its time is in bold.
    """
    shown = ROWS[: ROWS.index(last) + 1]
    figure, axes = plt.subplots(figsize=(7.6, 0.9 + 0.34 * len(shown)), layout="constrained")
    for y, row in enumerate(shown):
        recorded = row in (BEFORE, AFTER)
        axes.barh(y, times[row], 0.62, facecolor=BLUE if recorded else "none", edgecolor=BLUE, linewidth=1.6)
        weight = "bold" if row == last else "normal"
        axes.text(times[row] + 2, y, f"{times[row]:.0f} ms", va="center", fontsize=9, weight=weight)
    axes.set_yticks(range(len(shown)), labels=shown)
    axes.set(ylim=(len(shown) - 0.4, -0.6), xlim=(0, times[BEFORE] * 1.12), xlabel="mean time per step (ms)")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    if len(shown) > 1:
        handles = [
            Patch(facecolor=BLUE, edgecolor=BLUE, label="recorded"),
            Patch(facecolor="none", edgecolor=BLUE, label="predicted by the replay"),
        ]
        figure.legend(handles=handles, loc="outside upper right", ncols=2, frameon=False, fontsize=9)
    figure.set_label("Mean time per step: " + "; ".join(f"{row} {times[row]:.0f} ms" for row in shown))
    return figure
