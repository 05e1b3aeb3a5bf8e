"""What a leak adds to each step, predicted and in snapshots (page 12)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd
from matplotlib.figure import Figure

from _lib import figures, ledger
from nsightkit.analysis.memory import snapshot as snapshots
from nsightkit.configurations import find

if TYPE_CHECKING:
    from nsightkit.guide import Measurement

#: What the graph of the entropy holds: two tensors in fp32, as the page counts them.
BYTES_PER_LOGIT = 8


def _held(sizes: Mapping[str, Any]) -> int:
    """Give the bytes that the graph of one step's entropy holds."""
    return BYTES_PER_LOGIT * sizes["batch"] * sizes["context"] * sizes["vocabulary"]


def until_full(sizes: Mapping[str, Any], limit_bytes: float) -> dict[str, pd.Series]:
    """Predict the peaks of steps that leak, up to the first that no longer fits.

    Parameters
    ----------
    sizes : mapping
        Of the model and its batch.
    limit_bytes : float

    Returns
    -------
    dict of str to Series
        Bytes by item, by step.
    """
    model = dataclasses.replace(find("medium"), **sizes)
    items = ledger.predict(model, precision="bf16").set_index("item")["predicted_bytes"].dropna().astype(float)
    fits = int((limit_bytes - items.sum()) // _held(sizes))
    stacks = {}
    for number in range(1, fits + 2):
        name = f"step {number}" + (", over the limit" if number > fits else "")
        stacks[name] = pd.concat([items, pd.Series({"kept by mistake": float(number * _held(sizes))})])
    return stacks


def timeline(run: Measurement, what: str) -> Figure:
    """Draw all allocations of a run over time."""
    bands, over_time = figures.bands(run.snapshot), snapshots.timeline(run.snapshot)
    return figures.memory_timeline(bands, over_time, title=f"Memory, {what} ({run.mode})")


def _grown(run: Measurement) -> pd.DataFrame:
    """Give what grew in every step, by line."""
    table = snapshots.growth(run.snapshot, "^step$")
    return table[table["least_bytes"] > 0]


def _blamed(run: Measurement) -> list[str]:
    """Give the lines that grew by more than a hundredth of the predicted leak."""
    table = _grown(run)
    return list(dict.fromkeys(table.loc[table["least_bytes"] > 0.01 * _held(run.parameters), "site"]))


def growth(before: Measurement, after: Measurement) -> pd.DataFrame:
    """List the lines that grew in every step, with the fault and without it."""
    tables = {"with the graph": _grown(before), "without": _grown(after)}
    table = pd.concat(tables, names=["kept"]).reset_index(level=0)
    table["grown each step (MB)"] = table["least_bytes"] / 1e6
    return table[["kept", "site", "category", "grown each step (MB)"]]


def at_the_error(before: Measurement, full: Measurement) -> pd.DataFrame:
    """Tell what failed, and who held the memory then.

    Parameters
    ----------
    before : Measurement
        Steps that leak, which name the lines at fault.
    full : Measurement
        The same, until memory ran out.
    """
    oom = snapshots.summary(full.snapshot)["oom"]
    holders = snapshots.sites(full.snapshot, "oom").set_index("site")["bytes"]
    at_fault = holders[holders.index.isin(_blamed(before))].sum()
    facts = {
        "steps that were finished": str(int(full.median("steps"))),
        "the line that failed": oom["site"],
        "it asked for (MB)": f"{oom['requested_bytes'] / 1e6:,.1f}",
        "allocated then (MB)": f"{oom['allocated_bytes'] / 1e6:,.1f}",
        "by the lines that grew (MB)": f"{at_fault / 1e6:,.1f}",
        "limit (MB)": f"{full.parameters['limit_bytes'] / 1e6:,.1f}",
    }
    return pd.DataFrame(facts.items(), columns=["at the error", "value"])


def answer(before: Measurement, after: Measurement, full: Measurement) -> str:
    """Say by how much memory grew, which lines are named, and where the error came from."""
    grown, rest = (int(_grown(run)["least_bytes"].sum()) for run in (before, after))
    expected, blamed = _held(before.parameters), _blamed(before)
    agrees = abs(grown / expected - 1) < 0.01
    failed = snapshots.summary(full.snapshot)["oom"]["site"]
    return (
        f"memory grew by {grown / 1e6:,.1f} MB every step, {'as' if agrees else 'not as'} predicted "
        f"({expected / 1e6:,.1f} MB). The snapshot names {' and '.join(blamed)}. Without the graph it grew by "
        f"{rest:,} bytes. The error came from {failed}, which is {'' if failed in blamed else 'not '}one of the lines "
        f"at fault."
    )
