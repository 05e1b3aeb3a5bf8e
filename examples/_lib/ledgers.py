"""Ledgers of memory beside a recorded step, and beside what a GPU's allocator counted (page 11)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from _lib import ledger
from nsightkit.analysis.memory import snapshot as snapshots
from nsightkit.configurations import Configuration, find
from nsightkit.trace.snapshot import Snapshot

if TYPE_CHECKING:
    from nsightkit.guide import Measurement

_SIZES = ("batch", "context", "d_model", "layers", "d_ff", "heads", "vocabulary")
_HOW = ("precision", "attention", "mode")
_STATES, _ACTIVATIONS, _LOGITS = "weights and gradients", "activations", "logits and loss"
_RECORDED = {"before recording": _STATES, "activations": _ACTIVATIONS, "logits": _LOGITS}


def against_snapshot(model: Configuration, snapshot: Snapshot) -> pd.DataFrame:
    """Put the ledger of a step in fp32 with naive attention beside a recorded one that began with old gradients.

    Parameters
    ----------
    model : Configuration
    snapshot : Snapshot

    Returns
    -------
    DataFrame
        Bytes at the peak by item: ``predicted, recorded``.
    """
    table = ledger.predict(model, precision="fp32", attention="naive", mode="fwd_bwd").set_index("item")
    predicted = {
        _STATES: table.loc["weights", "predicted_bytes"] + table.loc["gradients", "largest_bytes"],
        _ACTIVATIONS: table.loc["activations", "predicted_bytes"],
        _LOGITS: table.loc["logits", "predicted_bytes"],
    }
    recorded = dict.fromkeys(predicted, 0.0)
    for row in snapshots.summary(snapshot)["by_category"]:
        recorded[_RECORDED[row["category"]]] += row["bytes"]
    return pd.DataFrame({"predicted": predicted, "recorded": recorded}).astype(float)


def kept_by_hand(model: Configuration) -> float:
    """Give the bytes of an fp32 tensor as wide as the MLP in all layers: what SiLU keeps if it is written by hand."""
    return 4.0 * model.tokens * model.d_ff * model.layers


def peaks(model: Configuration, contexts: Iterable[int], **how: Any) -> list[float]:
    """Predict the peak of a step at each context, in bytes."""
    longer = [dataclasses.replace(model, context=int(context)) for context in contexts]
    return [ledger.moments(one, **how)["total_bytes"].max() for one in longer]


def peak_gb(model: Configuration, **how: Any) -> float:
    """Predict the peak of a step in gigabytes."""
    return ledger.moments(model, **how)["total_bytes"].max() / 1e9


def by_stage(model: Configuration, ranks: int) -> pd.DataFrame:
    """Predict what one rank holds at its peak, for each stage of ZeRO.

    Parameters
    ----------
    model : Configuration
    ranks : int

    Returns
    -------
    DataFrame
        Gigabytes.
    """
    rows = []
    for stage in range(4):
        table = ledger.predict(model, stage=stage, ranks=ranks)
        held = table.set_index("item")["predicted_bytes"].dropna() / 1e9
        parts = {"weights (GB)": held["weights"], "moments (GB)": held["optimizer states"]}
        parts["buckets (GB)"] = held["communication buckets"]
        peak = held.sum()
        rest = peak - sum(parts.values())
        rows.append({"stage": stage, **parts, "all else (GB)": rest, "peak of a rank (GB)": peak})
    return pd.DataFrame(rows)


def _ran(run: Measurement) -> tuple[Configuration, dict[str, Any]]:
    """Give the model and the way that ran, as the prediction has them."""
    sizes = {name: run.parameters[name] for name in _SIZES if name in run.parameters}
    if isinstance(sizes["context"], list):
        del sizes["context"]  # a row has its own
    how = {name: run.parameters[name] for name in _HOW}
    if run.gpu:
        how["capability"] = run.provenance["gpu"]["compute_capability"]
    else:
        how["device"] = "cpu"
    return dataclasses.replace(find("medium"), **sizes), how


def compared(run: Measurement, *, megabytes: bool = False) -> pd.DataFrame:
    """Compare a step with its ledger, moment by moment.

    Parameters
    ----------
    run : Measurement
    megabytes : bool
        As they are shown; else bytes.

    Returns
    -------
    DataFrame
        ``moment, predicted, measured, difference``.
    """
    model, how = _ran(run)
    table = ledger.moments(model, **how)[["moment", "total_bytes"]].rename(columns={"total_bytes": "predicted"})
    metrics = table["moment"].str.replace(" ", "_") + "_bytes"
    table["measured"] = [run.median(metric) for metric in metrics]
    table["difference"] = table["measured"] - table["predicted"]
    if not megabytes:
        return table
    shown = table.set_index("moment") / 1e6
    return shown.add_suffix(" (MB)").reset_index()


def fullest(steps: Mapping[str, Measurement]) -> pd.DataFrame:
    """Give the peak of each step, and what is outside of it: the allocator's extra memory, and the CUDA context."""
    rows = []
    for name, run in steps.items():
        table = compared(run)
        peak = table.loc[table["measured"].idxmax()]
        held = run.median("reserved_bytes") - peak["measured"]
        row = {"run": name, "fullest": peak["moment"], "predicted (MB)": peak["predicted"] / 1e6}
        row |= {"measured (MB)": peak["measured"] / 1e6, "held beyond (MB)": held / 1e6}
        rows.append({**row, "CUDA context (MB)": run.median("context_bytes") / 1e6})
    return pd.DataFrame(rows)


def _at_contexts(run: Measurement) -> pd.DataFrame:
    """Give the rows of a run, with the predicted peak of each context."""
    model, how = _ran(run)
    return run.rows.assign(predicted_bytes=peaks(model, run.rows["context"], **how))


def curves(runs: Mapping[str, Measurement]) -> tuple[dict[str, Any], dict[str, Any], float, dict[str, float]]:
    """Give the arguments of :func:`_lib.figures.memory_curves`: lines, points, the limit, and failures.

    Parameters
    ----------
    runs : mapping of str to Measurement
    """
    lines, points, failed, limits = {}, {}, {}, []
    for name, run in runs.items():
        table = _at_contexts(run)
        lines[name] = (table["context"], table["predicted_bytes"])
        fitted = table[table["status"] == "ok"]
        points[name] = (fitted["context"], fitted["peak_bytes"])
        if len(fitted) < len(table):
            failed[name] = table["context"].iloc[-1]
        limits.append(table["limit_bytes"].min())
    return lines, points, min(limits), failed


def forecasts(runs: Mapping[str, Measurement]) -> pd.DataFrame:
    """Compare forecasts with the last context that fitted and the first that did not.

    Parameters
    ----------
    runs : mapping of str to Measurement

    Returns
    -------
    DataFrame
        ``run, forecast, fitted, did not fit, holds``.
    """
    rows = []
    for name, run in runs.items():
        model, how = _ran(run)
        longest = ledger.largest_context(model, run.rows["limit_bytes"].min(), **how)
        fitted = run.rows.loc[run.rows["status"] == "ok", "context"].max()
        failed = run.rows.loc[run.rows["status"] == "oom", "context"].min()
        row = {"run": name, "forecast": longest, "fitted": int(fitted)}
        row["did not fit"] = "none" if pd.isna(failed) else int(failed)
        row["holds"] = longest >= fitted and not longest >= failed
        rows.append(row)
    return pd.DataFrame(rows)


def answer(steps: Mapping[str, Measurement], runs: Mapping[str, Measurement]) -> str:
    """Say how well the ledgers predicted the steps, and the contexts that fit.

    Parameters
    ----------
    steps : mapping of str to Measurement
        ``fp32`` and ``bf16``.
    runs : mapping of str to Measurement
        ``naive`` and ``SDPA`` at growing contexts; empty without a GPU.
    """
    if not all(run.gpu for run in steps.values()):
        right = sum(_as_predicted(run) for run in steps.values())
        return f"weights, gradients and AdamW's moments are as large as predicted in {right} of {len(steps)} runs."
    table = pd.concat(compared(run) for run in steps.values())
    error = (table["predicted"] / table["measured"] - 1).abs().max()
    peak = fullest(steps).set_index("run")["measured (MB)"]
    said = (
        f"{len(table)} moments were predicted within {max(error, 1e-3):.1%}. bf16 autocast saves "
        f"{1 - peak['bf16'] / peak['fp32']:.0%} of fp32's peak."
    )
    if runs:
        outcome = forecasts(runs)
        said += (
            f" {outcome['fitted'][0]:,} tokens fitted with naive attention and {outcome['fitted'][1]:,} with fused "
            f"attention; {outcome['holds'].sum()} of {len(outcome)} forecasts hold."
        )
    return said


def _as_predicted(run: Measurement) -> bool:
    """Say whether weights, gradients and moments have the predicted sizes."""
    model, how = _ran(run)
    table = ledger.predict(model, **how).set_index("item")["largest_bytes"]
    for item in ("weights", "gradients", "optimizer states"):
        counted = run.median(f"{item.replace(' ', '_')}_bytes")
        # A GPU's blocks are multiples of 512 bytes.
        if abs(table[item] - counted) > 1e-3 * counted:
            return False
    return True
