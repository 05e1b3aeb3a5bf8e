"""Ten models: what a run of each amounts to, and what was expected of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd

from nsightkit.analysis.core.noise import Estimate
from nsightkit.analysis.roofline import envelope
from nsightkit.analysis.timeline import kernels, operators, overview, ranges, steps
from nsightkit.configurations import Configuration
from nsightkit.investigations.measurement import Measurement
from nsightkit.trace.model import Trace

__all__ = ["EXPECTED", "by_kind", "cost", "judged", "row", "tail_share", "work"]

#: What was expected of each, before any of them ran.
EXPECTED: Mapping[str, str] = {
    "model_a": "matrix products are most of the work",
    "model_b": "a FLOP takes longer than in model_a, which is less deep",
    "latency_bound": "a FLOP takes longer than in any other",
    "misaligned_dims": "a FLOP takes longer than in aligned_dims",
    "bad_head_size": "no difference to head_size_96",
    "vocab_bottleneck": "output head and loss are most of the forward pass",
    "wide_ffn": "a larger share in matrix products than model_a",
    "bandwidth_bound": "most of the work is not in matrix products",
    "compute_bound": "a FLOP takes less time than in any other",
    "deep_sequential": "idle for a larger share than compute_bound",
}
_ORDER = ("GEMM", "attention", "elementwise", "memory-like", "optimizer")
_SIZES = ("batch", "context", "d_model", "layers", "d_ff", "heads", "vocabulary")
_SAID = {True: "holds", False: "does not hold", None: "not shown"}


def cost(run: Measurement) -> envelope.Envelope:
    """Give the envelope of the sizes that ran, which are small on a CPU.

    Parameters
    ----------
    run : Measurement
    """
    sizes = {name: run.parameters[name] for name in _SIZES}
    return envelope.envelope(Configuration(run.part, intent="", **sizes))


def work(trace: Trace, *, by: str = "name") -> pd.DataFrame:
    """Rank the kernels of a trace or, without a GPU, the CPU's operators.

    Parameters
    ----------
    trace : Trace
    by : {"name", "category"}
    """
    summary: Callable[..., pd.DataFrame] = (kernels if trace.recorded("kernels") else operators).summary
    return summary(trace, by=by)


def row(run: Measurement) -> dict[str, float | None]:
    """Say what one run amounts to.

    Parameters
    ----------
    run : Measurement

    Returns
    -------
    dict
        A column of the page's table each; None for what a CPU lacks.
    """
    seen, planned = overview.summary(run.trace), cost(run)
    table = "kernels" if run.trace.recorded("kernels") else "ops"
    median, memory = float(np.median(run.values("step_ns"))), run.median("peak_allocated_bytes")
    return {
        "step_ns": median,
        "TFLOP/s": planned.train_flops / median / 1e3,
        "share with kernels": seen["density"],
        "share idle": seen["span_ns"] and seen["idle_ns"] / seen["span_ns"],
        "share in copies": seen["memory_overhead"],
        "operations a step": len(run.trace.table(table, ["start_ns"])) / len(steps.find(run.trace)),
        "peak (GB)": memory and memory / 1e9,
        # Heads that flash attention does not take have their scores written out.
        "peak, predicted (GB)": planned.peak_bytes(scores=planned.configuration.d_head > 256) / 1e9,
    }


def by_kind(traces: Mapping[str, Trace]) -> pd.DataFrame:
    """Sum up time by kind of work.

    Parameters
    ----------
    traces : mapping of str to Trace

    Returns
    -------
    DataFrame
        Nanoseconds: a column for each trace, a row for each of the main kinds, and one for the others.
    """
    totals = {name: work(trace, by="category").set_index("name")["total_ns"] for name, trace in traces.items()}
    kinds = pd.DataFrame(totals).reindex(list(totals), axis=1).fillna(0)
    known = [kind for kind in _ORDER if kind in kinds.index]
    return pd.concat([kinds.loc[known], kinds.drop(index=known).sum().to_frame("(others)").T])


def tail_share(trace: Trace) -> float:
    """Give the share of the forward pass in the output head and the loss, on the GPU or else on the CPU.

    Parameters
    ----------
    trace : Trace
    """
    found = ranges.summary(trace, match="^(forward|head|loss)$").set_index("name")
    clock = "gpu_ns" if trace.recorded("kernels") else "total_ns"
    forward, *parts = found[clock].reindex(["forward", "head", "loss"]).astype(float).fillna(0)
    return sum(parts) / forward if forward else 0.0


def judged(
    rate: pd.Series,
    idle: pd.Series,
    kinds: pd.DataFrame,
    tail: float,
    against: Mapping[str, tuple[str, Estimate]],
) -> pd.DataFrame:
    """Hold each expectation against its data. What lies within the noise shows nothing, for or against.

    Parameters
    ----------
    rate, idle : Series
        FLOP/s, and the share of the span in which the GPU was idle, by model.
    kinds : DataFrame
        Of :func:`by_kind`.
    tail : float
        Of :func:`tail_share`, of ``vocab_bottleneck``.
    against : mapping of str to (str, Estimate)
        By model: another one, and how many times its FLOP/s the model reaches.

    Returns
    -------
    DataFrame
        ``model, expected, outcome, by``.
    """
    share = kinds / kinds.sum()
    products, matrix = share.loc["GEMM"], share.reindex(["GEMM", "attention"]).sum()

    def slower(model: str) -> bool | None:
        """Whether a model is slower for its FLOPs than the other one; None if noise could hide it."""
        found = against[model][1]
        return found.value < 1 if found.excludes(1) else None

    def compared(model: str) -> str:
        other, found = against[model]
        noise = "" if found.low is None else f" ({found.low:.2f} to {found.high:.2f})"
        return f"{found.value:.2f} times the FLOP/s of {other}{noise}"

    alike = against["bad_head_size"][1]
    # Equality is shown only where the interval is narrow.
    narrow = alike.low is not None and alike.high is not None and alike.high - alike.low < 0.1
    deep, flat = idle["deep_sequential"], idle["compute_bound"]
    holds: dict[str, tuple[bool | None, str]] = {
        "model_a": (bool(products["model_a"] > 0.5), f"{products['model_a']:.0%}"),
        "model_b": (slower("model_b"), compared("model_b")),
        "latency_bound": (rate.idxmin() == "latency_bound", f"the slowest is {rate.idxmin()}"),
        "misaligned_dims": (slower("misaligned_dims"), compared("misaligned_dims")),
        "bad_head_size": (False if alike.excludes(1) else True if narrow else None, compared("bad_head_size")),
        "vocab_bottleneck": (tail > 0.5, f"{tail:.0%}"),
        "wide_ffn": (
            bool(products["wide_ffn"] > products["model_a"]),
            f"{products['wide_ffn']:.0%} against {products['model_a']:.0%}",
        ),
        "bandwidth_bound": (bool(matrix["bandwidth_bound"] < 0.5), f"{1 - matrix['bandwidth_bound']:.0%}"),
        "compute_bound": (rate.idxmax() == "compute_bound", f"the quickest is {rate.idxmax()}"),
        "deep_sequential": (bool(deep > flat), f"{deep:.0%} against {flat:.0%}"),
    }
    rows = [(name, EXPECTED[name], _SAID[outcome], evidence) for name, (outcome, evidence) in holds.items()]
    return pd.DataFrame(rows, columns=["model", "expected", "outcome", "by"])
