r"""How memory and time of attention grow with the context, and where memory has to run out (page 14).

With B (batch), H (heads), S (context), d (width of all heads) and an element of e bytes, one matrix of scores has
E = BHS²e bytes and one of q, k, v, the output or a gradient L = BSde. What lives at the same time, besides the inputs
(4L, and S² for the mask of naive attention)::

                       before backward    peak of forward         peak of backward
    naive              E + L              2E + L                  max(3E + 2L, E + 4L)
    naive-compiled     E + L              max(E + 2R, E + L)      max(2E + 2L + R, E + 4L)
    math, fp32         E + 3L             2E + 3L or so           max(3E + 4L, E + 6L)
    math, bf16         2E + 7L            4E + 10L or so          max(6E + 7L, 4E + 11L)
    flash and others   L + R              L + R                   4L + R, and 2L more in bf16, to add up in fp32

R = 4BHS is one fp32 number per row. ``math`` adds its own mask, 4S²; in bf16 it computes in fp32, hence twice the
bytes. The rows for ``naive`` and ``math`` follow from PyTorch's operators one by one
(``_scaled_dot_product_attention_math`` of PyTorch 2.13); that of ``naive-compiled`` was read from the code that
inductor generates for fp32; those of fused kernels leave workspaces out.

Causal attention needs 2BS²d FLOPs forward and twice that backward. An implementation that computes the
whole square or recomputes scores does more, and is not credited with it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

DIRECTIONS = ("forward", "backward")
_LINE = ["implementation", "precision", "d", "direction"]
_CONTEXTS = range(1, 2**40)


class Footprint(NamedTuple):
    """Bytes that one cell needs, predicted, with its inputs.

    Parameters
    ----------
    inputs : int
        q, k, v, the output's gradient, and the mask of naive attention.
    before_backward, forward_peak, backward_peak : int
    """

    inputs: int
    before_backward: int
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
    """Predict the memory of causal attention from its sizes (the table above).

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
    element = 2 if precision == "bf16" else 4
    scores = batch * heads * context**2 * element
    line = batch * context * d * element
    row = 4 * batch * heads * context
    square = context**2
    inputs = 4 * line
    if implementation == "naive":
        inputs += square
        before, forward = scores + line, 2 * scores + line
        backward = max(3 * scores + 2 * line, scores + 4 * line)
    elif implementation == "naive-compiled":
        inputs += square
        before, forward = scores + line, scores + max(2 * row, line)
        backward = max(2 * scores + 2 * line + row, scores + 4 * line)
    elif implementation == "math" and element == 4:
        before, forward = scores + 3 * line, max(2 * scores + 2 * line, scores + 3 * line) + 4 * square
        backward = max(3 * scores + 4 * line, scores + 6 * line)
    elif implementation == "math":
        before = 2 * scores + 7 * line
        forward = max(4 * scores + 10 * line, 3 * scores + 13 * line) + 4 * square
        backward = max(6 * scores + 7 * line, 4 * scores + 11 * line)
    elif implementation in ("efficient", "flash", "cudnn"):
        before = forward = line + row
        # Each row needs the sum of its gradient times its output, and bf16 gradients are added up in fp32.
        backward = 4 * line + 2 * row + (2 * line if element == 2 else 0)
    else:
        raise ValueError(f"no prediction for attention called {implementation!r}")
    return Footprint(inputs, inputs + before, inputs + forward, inputs + backward)


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
        for direction in DIRECTIONS:

            def exceeds(context: int, width: int = width, direction: str = direction) -> bool:
                sizes = {"d": width, "context": context, "batch": batch, "heads": heads}
                return footprint(implementation, precision, **sizes).peak(direction) > limit_bytes

            # All that fit come first: as many as there are before the first that does not.
            largest = bisect_left(_CONTEXTS, True, key=exceeds)
            longer = [context for context in sorted(contexts) if context > largest]
            rows.append((implementation, precision, width, direction, largest, longer[0] if longer else pd.NA))
    table = pd.DataFrame(rows, columns=[*_LINE, "largest_context", "context"])
    return table.astype({"context": "Int64"})


def cells(rows: pd.DataFrame) -> pd.DataFrame:
    """Work out what the figures show from the rows of :func:`nsightkit.workloads.attention.run`.

    Parameters
    ----------
    rows : DataFrame
        Of one measurement, or of several put together.

    Returns
    -------
    DataFrame
        The rows with ``d``, ``median_ns``, ``spread`` (of the middle half of the passes, as a share of the median),
        ``tflops`` (by the closed formula), ``predicted_bytes`` and ``error`` (of the predicted peak).
    """
    table = rows.rename(columns={"d_model": "d"})
    if table.empty:
        return table.reindex(columns=[*_LINE, "context", "status", "median_ns", "spread", "peak_bytes", "tflops"])
    table["median_ns"] = table["time_ms"] * 1e6
    table["spread"] = (table["high_ms"] - table["low_ms"]) / table["time_ms"]
    flops = 2.0 * table["batch"] * table["d"] * table["context"].astype(float) ** 2
    flops *= np.where(table["direction"] == "forward", 1.0, 2.0)
    table["tflops"] = flops / table["median_ns"] / 1e3
    predicted = []
    for cell in table.itertuples():
        sizes = {name: int(getattr(cell, name)) for name in ("d", "context", "batch", "heads")}
        predicted.append(footprint(cell.implementation, cell.precision, **sizes).peak(cell.direction))
    table["predicted_bytes"] = predicted
    table["error"] = table["predicted_bytes"] / table["peak_bytes"] - 1
    return table


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
    found = []
    possible = table[table["status"] != "unsupported"]
    for (implementation, precision, width, direction), cell in possible.groupby(_LINE, sort=False):
        sizes = {"batch": int(cell["batch"].iloc[0]), "heads": int(cell["heads"].iloc[0])}
        column = forecast(limit_bytes, implementation, precision, d=[width], contexts=cell["context"], **sizes)
        row = column[column["direction"] == direction].iloc[0].to_dict()
        failed = cell.loc[cell["status"] == "oom", "context"]
        row["measured_context"] = failed.min() if len(failed) else pd.NA
        row["outcome"] = _outcome(row["context"], row["measured_context"])
        found.append(row)
    columns = [*_LINE, "largest_context", "context", "measured_context", "outcome"]
    return pd.DataFrame(found, columns=columns).astype({"context": "Int64", "measured_context": "Int64"})


def _outcome(expected: int | None, measured: int | None) -> str:
    if pd.isna(expected) and pd.isna(measured):
        return "not reached"
    if pd.isna(measured):
        return "later"
    if pd.isna(expected) or measured < expected:
        return "earlier"
    return "as predicted" if measured == expected else "later"


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
    rows = []
    fits = table[table["status"] == "ok"].sort_values("context")
    for line, cell in fits.groupby(_LINE, sort=False):
        if len(cell) < 2:
            continue
        rise = np.log(cell[["context", "median_ns", "peak_bytes"]].tail(2)).diff().iloc[-1]
        slopes = (rise["median_ns"] / rise["context"], rise["peak_bytes"] / rise["context"])
        rows.append((*line, cell["context"].iloc[-1], *slopes))
    return pd.DataFrame(rows, columns=[*_LINE, "context", "time", "memory"])
