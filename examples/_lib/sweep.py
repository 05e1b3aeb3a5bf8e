r"""How memory and time of attention grow with the context, and where memory has to run out (page 14).

With B (batch), H (heads), S (context), d (width of all heads) and an element of e bytes, one matrix of scores has
E = BHS²e bytes, one of q, k, v, the output or a gradient L = BSde, and one fp32 number per row R = 4BHS. ``sweep.toml``
says how many of them live at the same time, besides the inputs (4L, and S² for the mask of naive attention). ``math``
adds its own mask, 4S²; in bf16 it computes in fp32, hence twice the bytes. The rows for ``naive`` and ``math`` follow
from PyTorch's operators one by one (``_scaled_dot_product_attention_math`` of PyTorch 2.13); that of ``naive-compiled``
was read from the code that inductor generates for fp32; those of fused kernels leave workspaces out.
"""

from __future__ import annotations

import itertools
import json
import tomllib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from torch.profiler import profile

from nsightkit.api import Trace
from nsightkit.workloads import attention

_LINE = ["implementation", "precision", "d", "direction"]
_DIRECTIONS = ("forward", "backward")
#: What the page's table compares, and the contexts of its figure.
_COMPARED = {
    "fp32": ("naive", "naive-compiled", "math", "efficient"),
    "bf16": ("naive", "naive-compiled", "math", "flash"),
}
_TRIED = [2**power for power in range(10, 18)]
#: One change each: from, to.
_CHANGES = [
    ("naive-fp32", "naive-compiled-fp32"),
    ("naive-compiled-fp32", "efficient-fp32"),
    ("naive-fp32", "naive-tf32"),
    ("naive-fp32", "naive-bf16"),
    ("naive-bf16", "naive-compiled-bf16"),
    ("naive-bf16", "efficient-bf16"),
    ("naive-bf16", "flash-bf16"),
    ("naive-bf16", "cudnn-bf16"),
]
_CONTEXTS = range(1, 2**40)
#: By implementation and direction, how many of E, L, R and S² live at the same time.
_PEAKS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


class Footprint(NamedTuple):
    """Bytes at the peak of one cell, predicted, with its inputs."""

    forward_peak: int
    backward_peak: int

    def peak(self, direction: str) -> int:
        """Give the peak of a direction.

        Parameters
        ----------
        direction : {"forward", "backward"}
        """
        return self.forward_peak if direction == "forward" else self.backward_peak


def footprint(
    implementation: str, precision: str, *, d: int, context: int, batch: int = 8, heads: int = 1
) -> Footprint:
    """Predict the memory of causal attention from its sizes.

    Parameters
    ----------
    implementation : {"naive", "naive-compiled", "math", "efficient", "flash", "cudnn"}
    precision : {"fp32", "tf32", "bf16"}
    d, context, batch, heads : int

    Returns
    -------
    Footprint

    Examples
    --------
    >>> footprint("naive", "fp32", d=64, context=16384).forward_peak / 2**30
    16.53125
    """
    bits = "16" if precision == "bf16" else "32"
    element = int(bits) // 8
    scores = batch * heads * context**2 * element
    line = batch * context * d * element
    row = 4 * batch * heads * context
    sizes = np.array([scores, line, row, context**2], dtype=object)
    alive = _PEAKS[implementation][bits]
    inputs = 4 * line
    if implementation.startswith("naive"):
        inputs += context**2
    forward = max(np.array(alive["forward"]) @ sizes)
    backward = max(np.array(alive["backward"]) @ sizes)
    return Footprint(inputs + forward, inputs + backward)


def forecast(
    limit_bytes: float,
    implementation: str,
    precision: str,
    *,
    d: Sequence[int],
    contexts: Sequence[int],
    batch: int = 8,
    heads: int = 1,
) -> pd.DataFrame:
    """Predict where memory will run out.

    Parameters
    ----------
    limit_bytes : float
        Memory that tensors can have.
    implementation, precision : str
    d : sequence of int
        Widths.
    contexts : sequence of int
        The contexts that are tried.
    batch, heads : int

    Returns
    -------
    DataFrame
        ``implementation, precision, d, direction, largest_context`` (the longest that fits, to the token), ``context``
        (the first of `contexts` that does not fit; NA when all do).
    """
    rows = []
    for width in d:
        for direction in _DIRECTIONS:

            def exceeds(context: int, width: int = width, direction: str = direction) -> bool:
                sizes = {"d": width, "context": context, "batch": batch, "heads": heads}
                return footprint(implementation, precision, **sizes).peak(direction) > limit_bytes

            # All that fit come first: as many as there are before the first that does not.
            largest = bisect_left(_CONTEXTS, True, key=exceeds)
            longer = min((context for context in contexts if context > largest), default=pd.NA)
            rows.append((implementation, precision, width, direction, largest, longer))
    table = pd.DataFrame(rows, columns=[*_LINE, "largest_context", "context"])
    return table.astype({"context": "Int64"})


def plan(limit_bytes: float) -> pd.DataFrame:
    """Predict where each implementation of the page's table runs out; see :func:`forecast`."""
    lines = [(name, precision) for precision, names in _COMPARED.items() for name in names]
    return pd.concat(forecast(limit_bytes, *line, d=[64], contexts=_TRIED) for line in lines)


def curves() -> pd.DataFrame:
    """Predict the peaks of the page's figure, as rows of a sweep."""
    lines = [("naive", "fp32"), ("naive-compiled", "fp32"), ("efficient", "fp32"), ("flash", "bf16")]
    rows = []
    for (name, precision), context, direction in itertools.product(lines, _TRIED, _DIRECTIONS):
        peak = footprint(name, precision, d=64, context=context).peak(direction)
        row = {"implementation": name, "precision": precision, "d": 64, "context": context}
        rows.append({**row, "direction": direction, "peak_bytes": peak, "status": "ok"})
    return pd.DataFrame(rows)


def longest(planned: pd.DataFrame) -> pd.DataFrame:
    """Give the longest contexts of :func:`plan` for what writes the scores to memory, and the ratio to the first."""
    table = planned.set_index(["implementation", "precision", "direction"])["largest_context"].unstack()
    table = table[list(_DIRECTIONS)]
    table["vs naive fp32"] = table["backward"] / table.loc[("naive", "fp32"), "backward"]
    order = [(name, precision) for precision, names in _COMPARED.items() for name in names]
    return table.loc[[line for line in order if line[0] not in ("efficient", "flash")]]


def counted(context: int) -> pd.DataFrame:
    """Count what naive attention in fp32 allocates on a CPU, with a head of width 64 and a batch of eight.

    Parameters
    ----------
    context : int

    Returns
    -------
    DataFrame
        ``pass, predicted (MB), counted (MB), in matrices`` of scores, at the peak of each pass.
    """
    predicted = footprint("naive", "fp32", d=64, context=context)
    matrix_bytes = 4 * 8 * context**2
    rows = []
    for direction in _DIRECTIONS:
        peak = _counted_peak(direction, context)
        row = {"pass": direction, "predicted (MB)": predicted.peak(direction) / 1e6, "counted (MB)": peak / 1e6}
        rows.append({**row, "in matrices": peak / matrix_bytes})
    return pd.DataFrame(rows)


def _counted_peak(direction: str, context: int) -> int:
    """Give the highest sum of what PyTorch's profiler saw allocated and freed."""
    sizes = {"implementation": "naive", "precision": "fp32", "d_model": [64], "context": [context], "batch": 8}
    with attention.run("cpu", **sizes) as work, profile(profile_memory=True) as recorded:
        inputs = work.inputs(64, context)
        attended = work.forward(inputs)
        if direction == "backward":
            work.backward(inputs, attended)
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))


def naive_programs(traces: Mapping[str, Trace], limit_bytes: float) -> pd.DataFrame:
    """Read the largest scores of programs in bf16, and predict where the forward pass of such attention breaks.

    Parameters
    ----------
    traces : mapping of str to Trace
    limit_bytes : float

    Returns
    -------
    DataFrame
        ``program, matrices, tokens, all matrices (GB), longest (tokens)``.
    """
    rows = []
    for name, trace in traces.items():
        operators = trace["ops"]
        inputs = operators.loc[operators["name"] == "aten::_softmax", "inputs"].astype(str).unique()
        shapes = [json.loads(text)[0][0] for text in inputs]
        shape = max(shapes, key=np.prod)
        tokens, matrices = shape[-1], int(np.prod(shape[:-2]))
        row = {"program": name, "matrices": matrices, "tokens": tokens}
        row["all matrices (GB)"] = 2 * np.prod(shape) / 1e9
        table = forecast(limit_bytes, "naive", "bf16", d=[64 * matrices], contexts=[], batch=1, heads=matrices)
        row["longest (tokens)"] = table.set_index("direction").loc["forward", "largest_context"]
        rows.append(row)
    return pd.DataFrame(rows)


def cells(rows: pd.DataFrame) -> pd.DataFrame:
    """Put the predicted peak beside each row of :func:`nsightkit.workloads.attention.run`.

    Parameters
    ----------
    rows : DataFrame
        Of one measurement.

    Returns
    -------
    DataFrame
        The rows with ``predicted_bytes`` and ``error`` (of the predicted peak).
    """
    if rows.empty:
        return pd.DataFrame(columns=[*_LINE, "context", "status", "median_ns", "peak_bytes"])
    predicted = []
    for cell in rows.itertuples():
        sizes = {"d": cell.d, "context": cell.context, "batch": cell.batch, "heads": cell.heads}
        predicted.append(footprint(cell.implementation, cell.precision, **sizes).peak(cell.direction))
    return rows.assign(predicted_bytes=predicted, error=predicted / rows["peak_bytes"] - 1)


def ends(table: pd.DataFrame, limit_bytes: float) -> pd.DataFrame:
    """Put where memory was predicted to run out beside where it did.

    Parameters
    ----------
    table : DataFrame
        From :func:`cells`.
    limit_bytes : float
        Memory of the GPU.

    Returns
    -------
    DataFrame
        The columns of :func:`forecast` for each line that could run; ``measured_context``, the first that did not fit
        (NA when all did), and ``outcome``: as predicted, earlier, later, or not reached.
    """
    possible = table[table["status"] != "unsupported"]
    first_failed = possible["context"].where(possible["status"] == "oom")
    lines = possible.assign(failed=first_failed).groupby([*_LINE, "batch", "heads"], sort=False)
    found = []
    for (implementation, precision, width, direction, batch, heads), cell in lines:
        sizes = {"d": [width], "contexts": cell["context"], "batch": batch, "heads": heads}
        row = forecast(limit_bytes, implementation, precision, **sizes).set_index("direction").loc[direction]
        failed = cell["failed"].min()
        outcome = _outcome(float("inf") if pd.isna(row["context"]) else row["context"], failed)
        found.append({**row, "direction": direction, "measured_context": failed, "outcome": outcome})
    return pd.DataFrame(found, columns=[*_LINE, "largest_context", "context", "measured_context", "outcome"])


def _outcome(expected: float, failed: float) -> str:
    measured = float("inf") if np.isnan(failed) else failed
    if measured == expected:
        return "not reached" if np.isinf(expected) else "as predicted"
    return "earlier" if measured < expected else "later"


def exponents(table: pd.DataFrame) -> pd.DataFrame:
    """Say how time and memory grow at the long end: 1 is linear in the context, 2 quadratic.

    Parameters
    ----------
    table : DataFrame
        From :func:`cells`.

    Returns
    -------
    DataFrame
        ``implementation, precision, d, direction, context`` (the longest that fits), ``time``, ``memory`` (slopes on
        logarithmic axes between the two longest contexts that fit).
    """
    fits = table[table["status"] == "ok"].sort_values("context")
    rows = []
    for line, cell in fits.groupby(_LINE, sort=False):
        if len(cell) > 1:
            rise = np.log(cell[["context", "median_ns", "peak_bytes"]].tail(2)).diff().iloc[-1]
            slopes = (rise["median_ns"] / rise["context"], rise["peak_bytes"] / rise["context"])
            rows.append((*line, cell["context"].iloc[-1], *slopes))
    return pd.DataFrame(rows, columns=[*_LINE, "context", "time", "memory"])


def _times(table: pd.DataFrame, direction: str) -> pd.Series:
    """Give the median times of what ran, by context."""
    fine = (table["direction"] == direction) & (table["status"] == "ok")
    return table[fine].set_index("context")["median_ns"]


def speedups(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Give the speedup of each change, at the longest context that both sides have.

    Parameters
    ----------
    tables : mapping of str to DataFrame
        Of :func:`cells`, by implementation and precision.
    """
    rows = []
    for (old, new), direction in itertools.product(_CHANGES, _DIRECTIONS):
        ratio = (_times(tables[old], direction) / _times(tables[new], direction)).dropna()
        if len(ratio):
            row = {"from": old, "to": new, "direction": direction}
            rows.append({**row, "at context": ratio.index[-1], "speedup": ratio.iloc[-1]})
    return pd.DataFrame(rows)


def answer(tables: Mapping[str, pd.DataFrame], ended: pd.DataFrame) -> str:
    """Say how far each attention got, and how many forecasts were right.

    Parameters
    ----------
    tables : mapping of str to DataFrame
        Of :func:`cells`.
    ended : DataFrame
        Of :func:`ends`.
    """
    near = tables["naive-fp32"]
    near = near[near["status"] == "ok"].groupby("direction").tail(2)
    error = near["error"].abs().max()
    known = ended[ended["outcome"] != "not reached"]
    right = (known["outcome"] == "as predicted").sum()
    far = {}
    for name, direction in itertools.product(("naive-fp32", "flash-bf16"), _DIRECTIONS):
        contexts = _times(tables[name], direction).index
        far[name, direction] = int(contexts.max()) if len(contexts) else 0
    return (
        f"naive attention in fp32 went forward up to a context of {far['naive-fp32', 'forward']:,} and backward up to "
        f"{far['naive-fp32', 'backward']:,}, of those tried; flash attention in bf16 up to "
        f"{far['flash-bf16', 'backward']:,}. {right} of {len(known)} lines ended, or did not, as forecast, and peaks "
        f"near the end were predicted within {max(error, 1e-3):.1%}."
    )
