"""Ten models: what a faster card can gain, what a run of each amounts to, and what was expected of it (page 10)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from nsightkit.analysis.core import noise
from nsightkit.analysis.core.noise import Estimate
from nsightkit.analysis.roofline import envelope
from nsightkit.analysis.timeline import kernels, overview, ranges, steps
from nsightkit.configurations import MATRIX, VARIANTS, Configuration
from nsightkit.trace.model import Trace

if TYPE_CHECKING:
    from nsightkit.api import Trace as LoadedTrace
    from nsightkit.guide import Measurement

#: Assumed: launches of a layer in a training step, and the CPU time of each.
LAUNCHES, LAUNCH_US = 100, 5.0

#: What was expected of each, before any of them ran.
EXPECTED = {
    "model_a": "GEMMs are most of the work",
    "model_b": "a FLOP takes longer than in model_a, which is less deep",
    "latency_bound": "a FLOP takes longer than in any other",
    "misaligned_dims": "a FLOP takes longer than in aligned_dims",
    "bad_head_size": "no difference to head_size_96",
    "vocab_bottleneck": "output head and loss are most of the forward pass",
    "wide_ffn": "a larger share in GEMMs than model_a",
    "bandwidth_bound": "most of the work is not in GEMMs",
    "compute_bound": "a FLOP takes less time than in any other",
    "deep_sequential": "idle for a larger share than compute_bound",
}
_KINDS = ("GEMM", "attention", "elementwise", "memory-like", "optimizer")
_SIZES = ("batch", "context", "d_model", "layers", "d_ff", "heads", "vocabulary")


def on_a_faster_card(trace: LoadedTrace, faster: float) -> dict[str, Any]:
    """Replay a trace with faster kernels.

    Parameters
    ----------
    trace : Trace
    faster : float
        How many times faster.

    Returns
    -------
    dict
        A column of the page's table each.
    """
    seen = trace.summary()
    verdict = trace.verdict()
    calls = trace["calls"]
    launches = calls.loc[calls["name"].astype(str).str.contains("Launch"), "start_ns"].sort_values()
    return {
        "share busy": seen["busy_ns"] / seen["span_ns"],
        "speedup": trace.whatif(scale=f".={1 / faster:.4f}")["speedup"].iloc[0],
        "verdict": verdict["bottleneck"],
        "confidence": verdict["confidence"],
        "from launch to launch (µs)": launches.diff().median() / 1e3,
    }


def plan(models: Iterable[Configuration], slow_tflops: float, fast_tflops: float) -> pd.DataFrame:
    """Predict a training step of each model on two cards: its FLOPs at their rates, and its launches.

    Parameters
    ----------
    models : iterable of Configuration
    slow_tflops, fast_tflops : float
        The datasheets' rates, of an A100 and an H200.

    Returns
    -------
    DataFrame
        The columns of the page's table, and the launch cost at which a model ``breaks even`` on the faster card.
    """
    models = list(models)
    costs = envelope.summary(models)
    table = pd.DataFrame({"model": costs["config"], "parameters (M)": costs["params"] / 1e6})
    launches = pd.Series([model.layers * LAUNCHES for model in models])
    launch_ms = launches * LAUNCH_US / 1e3
    slow_ms, fast_ms = (costs["train_flops"] / rate / 1e9 for rate in (slow_tflops, fast_tflops))
    table["A100 (ms)"], table["H200 (ms)"], table["launches (ms)"] = slow_ms, fast_ms, launch_ms
    table["batch"] = [model.batch for model in models]
    table["speedup"] = slow_ms.clip(lower=launch_ms) / fast_ms.clip(lower=launch_ms)
    table["batch to fill an H200"] = (table["batch"] * launch_ms / fast_ms).apply(math.ceil)
    table["breaks even (µs)"] = fast_ms * 1e3 / launches
    return table


def sizes(model: Configuration, divisor: int = 1) -> dict[str, Any]:
    """Give a model's sizes as parameters of :func:`nsightkit.workloads.lm.run`.

    Parameters
    ----------
    model : Configuration
    divisor : int
        Makes it small in every direction but depth and heads, which are its shape.

    Returns
    -------
    dict
        Also how it runs: a training step in bf16, with each batch copied from the host.
    """
    small = {name: math.ceil(getattr(model, name) / divisor) for name in _SIZES}
    small["layers"], small["heads"] = model.layers, model.heads
    # The width is a multiple of the heads.
    small["d_model"] = math.ceil(small["d_model"] / model.heads) * model.heads
    return {**small, "mode": "train", "precision": "bf16", "attention": "sdpa", "feed": "host"}


def cost(run: Measurement) -> envelope.Envelope:
    """Give the envelope of the sizes that ran."""
    chosen = {name: run.parameters[name] for name in _SIZES}
    return envelope.envelope(Configuration(run.name, intent="", **chosen))


def row(run: Measurement) -> dict[str, float | None]:
    """Sum up one run.

    Parameters
    ----------
    run : Measurement

    Returns
    -------
    dict
        A column of the page's table each; None for what a CPU lacks.
    """
    seen = overview.summary(run.trace)
    planned = cost(run)
    events = run.trace.table("kernels" if run.trace.recorded("kernels") else "ops", ["start_ns"])
    median_ns = run.median("step_ns")
    peak = run.median("peak_bytes")
    # Flash attention does not take heads above 256: their scores are written to memory.
    predicted_peak = planned.peak_bytes(scores=planned.configuration.d_head > 256)
    return {
        "step_ns": median_ns,
        "TFLOP/s": planned.train_flops / median_ns / 1e3,
        "share with kernels": seen["density"],
        "share idle": seen["idle_ns"] / seen["span_ns"] if seen["span_ns"] else None,
        "share in copies": seen["memory_overhead"],
        "operations per step": len(events) / max(len(steps.find(run.trace)), 1),
        "peak (GB)": None if peak is None else peak / 1e9,
        "peak, predicted (GB)": predicted_peak / 1e9,
    }


def summary(runs: Mapping[str, Measurement]) -> pd.DataFrame:
    """Give one row for each of the ten models, of :func:`row`."""
    table = pd.DataFrame({model.name: row(runs[model.name]) for model in MATRIX}).T.astype(float)
    table.insert(0, "step (ms)", table.pop("step_ns") / 1e6)
    return table.rename_axis("model")


def _rate(runs: Mapping[str, Measurement], model: str, other: str) -> Estimate:
    """Give the ratio of two models' FLOP/s, with its interval."""
    per_flop = []
    for name in (model, other):
        per_flop.append(runs[name].values("step_ns") / cost(runs[name]).train_flops)
    return noise.ratio(*per_flop)


def controls(runs: Mapping[str, Measurement]) -> pd.DataFrame:
    """Compare models with their controls by FLOP/s, because their FLOPs differ a little.

    Parameters
    ----------
    runs : mapping of str to Measurement

    Returns
    -------
    DataFrame
        ``model, control, ratio of FLOP/s, from, to, differs``.
    """
    rows = []
    for control in VARIANTS:
        ratio = _rate(runs, control.control_of, control.name)
        row = {"model": control.control_of, "control": control.name, "ratio of FLOP/s": ratio.value}
        rows.append({**row, "from": ratio.low, "to": ratio.high, "differs": ratio.excludes(1)})
    return pd.DataFrame(rows)


def outcomes(runs: Mapping[str, Measurement], summary: pd.DataFrame, kinds: pd.DataFrame) -> pd.DataFrame:
    """Compare each expectation with the runs; see :func:`judged`."""
    pairs = {"model_b": "model_a", "misaligned_dims": "aligned_dims", "bad_head_size": "head_size_96"}
    ratios = {model: _rate(runs, model, other) for model, other in pairs.items()}
    return judged(summary, kinds, tail_share(runs["vocab_bottleneck"].trace), ratios)


def answer(outcome: pd.DataFrame, summary: pd.DataFrame) -> str:
    """Say in a sentence how many expectations held, and how far apart the models' rates are."""
    counted = outcome["outcome"].value_counts()
    order = summary["TFLOP/s"].sort_values()
    return (
        f"of {len(outcome)} expectations {counted.get('holds', 0)} held and {counted.get('does not hold', 0)} failed; "
        f"not shown either way: {counted.get('not shown', 0)}. Between the slowest for its FLOPs, {order.index[0]}, "
        f"and the quickest, {order.index[-1]}, lies a factor of {order.iloc[-1] / order.iloc[0]:.0f}."
    )


def by_kind(traces: Mapping[str, Trace]) -> pd.DataFrame:
    """Add up time by kind of work.

    Parameters
    ----------
    traces : mapping of str to Trace

    Returns
    -------
    DataFrame
        Nanoseconds: a column for each trace, a row for each of the main kinds, and one for the others.
    """
    columns = {}
    for name, trace in traces.items():
        totals = kernels.summary(trace, by="category").set_index("name")["total_ns"]
        main = totals.reindex(list(_KINDS)).fillna(0)
        main["(others)"] = totals.sum() - main.sum()
        columns[name] = main
    return pd.DataFrame(columns)


def tail_share(trace: Trace) -> float:
    """Give the share of the forward pass in the output head and the loss, on the GPU or else on the CPU."""
    table = ranges.summary(trace, match="^(forward|head|loss)$").set_index("name")
    clock = "gpu_ns" if trace.recorded("kernels") else "total_ns"
    time_ns = table[clock].reindex(["forward", "head", "loss"]).astype(float).fillna(0)
    return (time_ns["head"] + time_ns["loss"]) / time_ns["forward"] if time_ns["forward"] else 0.0


def judged(summary: pd.DataFrame, kinds: pd.DataFrame, tail: float, ratios: Mapping[str, Estimate]) -> pd.DataFrame:
    """Compare each expectation with its data. A difference within the noise shows nothing, either way.

    Parameters
    ----------
    summary : DataFrame
        Of :func:`row`, by model.
    kinds : DataFrame
        Of :func:`by_kind`.
    tail : float
        Of :func:`tail_share`, of ``vocab_bottleneck``.
    ratios : mapping of str to Estimate
        How many times the FLOP/s of another model ``model_b``, ``misaligned_dims`` and ``bad_head_size`` reach.

    Returns
    -------
    DataFrame
        ``model, expected, outcome, evidence``.
    """
    rate, idle = summary["TFLOP/s"], summary["share idle"]
    share = kinds / kinds.sum()
    gemms = share.loc["GEMM"]
    neither = 1 - share.loc["GEMM", "bandwidth_bound"] - share.loc["attention", "bandwidth_bound"]
    slowest, fastest = rate.idxmin(), rate.idxmax()
    deep, shallow = idle["deep_sequential"], idle["compute_bound"]
    outcomes = {
        "model_a": (gemms["model_a"] > 0.5, f"{gemms['model_a']:.0%}"),
        "latency_bound": (slowest == "latency_bound", f"the slowest is {slowest}"),
        "vocab_bottleneck": (tail > 0.5, f"{tail:.0%}"),
        "wide_ffn": (gemms["wide_ffn"] > gemms["model_a"], f"{gemms['wide_ffn']:.0%} against {gemms['model_a']:.0%}"),
        "bandwidth_bound": (neither > 0.5, f"{neither:.0%}"),
        "compute_bound": (fastest == "compute_bound", f"the fastest is {fastest}"),
        "deep_sequential": (deep > shallow, f"{deep:.0%} against {shallow:.0%}"),
    }
    for model, judge in (("model_b", _slower), ("misaligned_dims", _slower), ("bad_head_size", _equal)):
        outcomes[model] = (judge(ratios[model]), f"{ratios[model].value:.2f}x the FLOP/s")
    rows = []
    for model, expected in EXPECTED.items():
        holds, evidence = outcomes[model]
        outcome = "not shown"
        if holds is not None:
            outcome = "holds" if holds else "does not hold"
        rows.append((model, expected, outcome, evidence))
    return pd.DataFrame(rows, columns=["model", "expected", "outcome", "evidence"])


def _slower(ratio: Estimate) -> bool | None:
    """Say whether a model is slower for its FLOPs than the other; None if noise could hide it."""
    return ratio.value < 1 if ratio.excludes(1) else None


def _equal(ratio: Estimate) -> bool | None:
    """Say whether two models are equally fast; only a narrow interval shows that."""
    if ratio.excludes(1):
        return False
    return True if ratio.high - ratio.low < 0.1 else None
