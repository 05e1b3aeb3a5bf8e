r"""How time and memory of attention grow with the context, where memory ran out, and where it had to.

With B (batch), H (heads), S (context), d (width of all heads) and an element of e bytes, one matrix of scores has
E = BHS²e bytes and one of q, k, v, the output or a gradient L = BSde. What lives at the same time, besides the inputs
(4L, and S² for the mask of attention that is written out)::

                       before backward    peak of forward         peak of backward
    naive              E + L              2E + L                  max(3E + 2L, E + 4L)
    naive-compiled     E + L              max(E + 2R, E + L)      max(2E + 2L + R, E + 4L)
    math, fp32         E + 3L             2E + 3L or so           max(3E + 4L, E + 6L)
    math, bf16         2E + 7L            4E + 10L or so          max(6E + 7L, 4E + 11L)
    flash and others   L + R              L + R                   4L + R, on a GPU + 2L to add up in fp32

R = 4BHS is one fp32 number a row. ``math`` has a mask of its own, 4S²; in bf16 it computes in fp32, hence twice the
bytes. The rows for ``naive`` and ``math`` follow from PyTorch's operators one by one
(``_scaled_dot_product_attention_math`` of PyTorch 2.13) and hold to the byte; that of ``naive-compiled`` was read from
the code that inductor generates for fp32; those of fused kernels leave workspaces out. What allocators round is left
out everywhere.

FLOPs are those that attention needs, 4BS²d forward and twice that backward, and half of both where it is causal. An
implementation that computes the whole square or recomputes scores does more, and is not credited with it.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from nsightkit.analysis.timeline import kernels, operators
from nsightkit.analysis.timeline.selection import select
from nsightkit.errors import NsightkitError
from nsightkit.trace.model import Trace
from nsightkit.workloads.attention_samples import DIRECTIONS, METRIC, REASONS, STATUSES

__all__ = [
    "Footprint",
    "backends",
    "cells",
    "compare",
    "ends",
    "exponents",
    "footprint",
    "forecast",
    "launch_bound",
    "limits",
]

_KEY = ["implementation", "precision", "d", "context"]
_LINE = ["implementation", "precision", "d", "direction"]
_OF_COLUMN = ["batch", "heads", "causal"]
#: By direction, and for the cell.
_OF_DIRECTION = ["status", "reason", "stopped_context", "peak_bytes", "reserved_bytes", "requested_bytes"]
_OF_CELL = ["inputs_bytes", "idle_bytes", "before_backward_bytes"]
_KNOWN = {
    *_OF_COLUMN, "limit_bytes", *_OF_CELL, *(f"{way}_{name}" for way in DIRECTIONS for name in ["ns", *_OF_DIRECTION]),
}  # fmt: skip
_COLUMNS = [
    *_KEY, "direction", *_OF_COLUMN, "status", "reason", "repetitions", "median_ns", "spread", "tflops", "inputs_bytes",
    "workspace_bytes", "memory_before_bytes", "peak_bytes", "reserved_bytes", "requested_bytes",
]  # fmt: skip
_CONTEXTS = range(1, 2**40)
_REMEDY = "measure or record the part again"


def cells(samples: pd.DataFrame) -> pd.DataFrame:
    """Read the cells of one column, or of several whose samples were put together.

    Parameters
    ----------
    samples : DataFrame
        ``metric``, ``index``, ``value``, as :class:`nsightkit.investigations.measurement.Measurement` has them.

    Returns
    -------
    DataFrame
        One row a cell and direction: ``implementation, precision, d, context, direction, batch, heads, causal, status``
        (one of :data:`nsightkit.workloads.attention_samples.STATUSES`), ``reason``, ``repetitions, median_ns, spread``
        (of the middle half of the samples, as a share of the median), ``tflops`` (TFLOP/s by the closed formula),
        ``inputs_bytes, workspace_bytes`` (what libraries keep between passes), ``memory_before_bytes`` (before this
        direction began),
        ``peak_bytes, reserved_bytes, requested_bytes`` (what could not be allocated). NaN where nothing was measured.

    Raises
    ------
    NsightkitError
        These are not samples of a sweep, or they are damaged.
    """
    parsed, values = _parsed(samples)
    of_cell = parsed[parsed["d"].notna()]
    if of_cell.empty:
        return pd.DataFrame(columns=_COLUMNS)
    way = parsed["quantity"].str.extract(r"^(?P<direction>forward|backward)_(?P<name>.+)")
    of_way = of_cell.join(way[way["name"].notna()], how="inner")
    timed = of_way[of_way["name"] == "ns"]
    times = values[values["metric"].isin(timed.index)].groupby("metric", sort=False)["value"]
    spreads = pd.DataFrame({"repetitions": times.size(), "median_ns": times.median()})
    spreads["spread"] = (times.quantile(0.75) - times.quantile(0.25)) / spreads["median_ns"]
    row = [*_KEY, "direction"]
    whole = parsed[parsed["d"].isna()].pivot(index=_KEY[:2], columns="quantity", values="value")
    table = (
        of_cell[_KEY]
        .drop_duplicates()
        .sort_values(_KEY)
        .merge(pd.DataFrame({"direction": DIRECTIONS}), how="cross")
        .join(of_way.pivot(index=row, columns="name", values="value").reindex(columns=_OF_DIRECTION), row)
        .join(of_cell.pivot(index=_KEY, columns="quantity", values="value").reindex(columns=_OF_CELL), _KEY)
        .join(timed[row].join(spreads).set_index(row), row)
        .join(whole.reindex(columns=_OF_COLUMN), _KEY[:2])
    )
    table["status"] = _decoded(table["status"], STATUSES)
    table["reason"] = [
        text if pd.isna(context) else text.replace("{context}", f"{context:.0f}")
        for text, context in zip(_decoded(table["reason"], REASONS), table["stopped_context"], strict=True)
    ]
    forward = table["direction"] == "forward"
    table["memory_before_bytes"] = table["idle_bytes"].where(forward, table["before_backward_bytes"])
    table["workspace_bytes"] = table["idle_bytes"] - table["inputs_bytes"]
    if table[_OF_COLUMN].isna().any(axis=None):
        raise NsightkitError(f"the samples do not say the batch and the heads of their column; {_REMEDY}")
    integers = dict.fromkeys(["d", "context", "batch", "heads"], "int64")
    table = table.astype(integers | {"causal": "bool", "repetitions": "Int64"})
    flops = 4.0 * table["batch"] * table["d"] * table["context"].astype(float) ** 2
    flops *= np.where(table["causal"], 0.5, 1.0) * np.where(forward, 1.0, 2.0)
    table["tflops"] = flops / table["median_ns"] / 1e3
    return table[_COLUMNS]


def limits(samples: pd.DataFrame) -> pd.Series:
    """Give the memory that each column could have.

    Parameters
    ----------
    samples : DataFrame

    Returns
    -------
    Series of float
        Bytes by column, such as ``naive-fp32``; columns without a limit are not in it.

    Raises
    ------
    NsightkitError
        As for :func:`cells`.
    """
    parsed, _ = _parsed(samples)
    mine = parsed[parsed["quantity"] == "limit_bytes"]
    return mine.set_index(mine["implementation"] + "-" + mine["precision"])["value"].rename("limit_bytes")


def _parsed(samples: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Give the names taken apart, each with its first value, and all values, checked and in order."""
    if not {"metric", "index", "value"} <= set(samples.columns):
        raise NsightkitError(f"samples have the columns metric, index and value; {_REMEDY}")
    metric, value = samples["metric"].astype(str), pd.to_numeric(samples["value"], errors="coerce")
    parsed = pd.Index(metric.unique(), name="metric").to_series().str.extract(rf"^{METRIC.pattern}\Z")
    out_of_place = parsed["quantity"].isin([*_OF_COLUMN, "limit_bytes"]) == parsed["d"].notna()
    impossible = ~value.between(0, np.inf, inclusive="left").set_axis(metric)
    for wrong, words in (
        (~parsed["quantity"].isin(_KNOWN), f"no sample of a sweep is called {{!r}}; {_REMEDY}"),
        (out_of_place, f"{{!r}} is out of place among the samples; {_REMEDY}"),
        (impossible, f"{{!r}} holds values that are not numbers or below zero; {_REMEDY}"),
        (
            samples.duplicated(["metric", "index"]).set_axis(metric),
            "there are two columns with {!r}; give each column once",
        ),
    ):
        if wrong.any():
            raise NsightkitError(words.format(str(wrong.idxmax())[:60]))
    parsed[["d", "context"]] = parsed[["d", "context"]].astype("Int64")
    values = samples.assign(value=value).sort_values(["metric", "index"], kind="stable")
    return parsed.assign(value=values.groupby("metric", sort=False)["value"].first()), values


def _decoded(codes: pd.Series, words: tuple[str, ...]) -> pd.Series:
    if codes.isna().any() or not codes.isin(range(len(words))).all():
        raise NsightkitError(f"the samples hold a status or reason that does not exist; {_REMEDY}")
    return pd.Series(np.array(words, dtype=object)[codes.to_numpy(dtype=np.int64)], index=codes.index)


class Footprint(NamedTuple):
    """Bytes that one cell needs, predicted.

    Parameters
    ----------
    inputs : int
        q, k, v, the output's gradient, and the mask of attention that is written out.
    before_backward, forward_peak, backward_peak : int
        With the inputs.
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

        Returns
        -------
        int
        """
        return self.forward_peak if direction == "forward" else self.backward_peak


def footprint(
    implementation: str, precision: str, *, d: int, context: int, batch: int = 8, heads: int = 1, causal: bool = True,
    on_gpu: bool = True,
) -> Footprint:  # fmt: skip
    """Predict the memory of one cell from its sizes alone (the table above).

    Parameters
    ----------
    implementation : {"naive", "naive-compiled", "math", "efficient", "flash", "cudnn"}
    precision : {"fp32", "tf32", "bf16"}
    d, context, batch, heads : int
    causal : bool
    on_gpu : bool
        Also count what a GPU's fused kernels allocate within themselves; a count of tensors on a CPU does not see it.

    Returns
    -------
    Footprint

    Raises
    ------
    NsightkitError
        The implementation is not known.

    Examples
    --------
    >>> footprint("naive", "fp32", d=64, context=16384).forward_peak / 2**30
    16.53125
    """
    element = 2 if precision == "bf16" else 4
    scores, line, row = batch * heads * context**2 * element, batch * context * d * element, 4 * batch * heads * context
    square = context**2 if causal else 0
    # 16-bit gradients are added up in fp32; and each row needs the sum of its gradient times its output.
    added = (row + (2 * line if element == 2 else 0)) if on_gpu else 0
    fused = line + row, line + row, 4 * line + row + added
    math_32 = (
        3 * line + scores,
        max(2 * scores + 2 * line, scores + 3 * line) + 4 * square,
        max(3 * scores + 4 * line, scores + 6 * line),
    )
    math_16 = (
        2 * scores + 7 * line,
        max(4 * scores + 10 * line, 3 * scores + 13 * line) + 4 * square,
        max(6 * scores + 7 * line, 4 * scores + 11 * line, 2 * scores + 11 * line),
    )
    #: Before the backward pass, at the peak of the forward pass, at that of the backward pass.
    sizes = {
        "naive": (scores + line, 2 * scores + line, max(3 * scores + 2 * line, scores + 4 * line)),
        "naive-compiled": (
            scores + line,
            scores + max(2 * row, line),
            max(2 * scores + 2 * line + row, scores + 4 * line),
        ),
        "math": math_32 if element == 4 else math_16,
        **dict.fromkeys(("efficient", "flash", "cudnn"), fused),
    }
    if implementation not in sizes:
        raise NsightkitError(f"nothing is known of the memory of attention called {implementation[:40]!r}")
    inputs = 4 * line + (square if implementation.startswith("naive") else 0)
    return Footprint(inputs, *(inputs + size for size in sizes[implementation]))


def compare(table: pd.DataFrame, *, on_gpu: bool = True) -> pd.DataFrame:
    """Put the memory that was predicted beside the memory that was measured.

    Parameters
    ----------
    table : DataFrame
        Of :func:`cells`.
    on_gpu : bool
        As for :func:`footprint`.

    Returns
    -------
    DataFrame
        ``implementation, precision, d, context, direction, status, predicted_before_bytes, memory_before_bytes,
        predicted_peak_bytes, peak_bytes, error`` for the rows that ran. Measured figures are without the libraries'
        workspaces; `error` is that of the peak, prediction over measurement less 1.
    """
    ran = table[table["peak_bytes"].notna()]
    sizes = ran[[*_KEY, *_OF_COLUMN]].to_dict("records")
    found = [footprint(**{str(name): value for name, value in row.items()}, on_gpu=on_gpu) for row in sizes]
    needed = pd.DataFrame(found, columns=Footprint._fields, index=ran.index, dtype="int64")
    forward = ran["direction"] == "forward"
    out = ran[[*_KEY, "direction", "status"]].assign(
        predicted_before_bytes=needed["inputs"].where(forward, needed["before_backward"]),
        memory_before_bytes=ran["memory_before_bytes"] - ran["workspace_bytes"],
        predicted_peak_bytes=needed["forward_peak"].where(forward, needed["backward_peak"]),
        peak_bytes=ran["peak_bytes"] - ran["workspace_bytes"],
    )
    return out.assign(error=out["predicted_peak_bytes"] / out["peak_bytes"] - 1).reset_index(drop=True)


def forecast(
    limit_bytes: float, implementation: str, precision: str, *, d: Sequence[int], contexts: Sequence[int],
    batch: int = 8, heads: int = 1, causal: bool = True, on_gpu: bool = True,
) -> pd.DataFrame:  # fmt: skip
    """Say where memory will run out, before anything is run.

    Parameters
    ----------
    limit_bytes : float
        What tensors can have.
    implementation, precision : str
    d : sequence of int
        Widths.
    contexts : sequence of int
        The context lengths that will be tried.
    batch, heads : int
    causal : bool
    on_gpu : bool
        As for :func:`footprint`.

    Returns
    -------
    DataFrame
        ``implementation, precision, d, direction, largest_context`` (the longest that fits, to the token),
        ``context`` (the first of `contexts` that does not fit; NA when all do), ``needed_bytes`` (there).
    """

    def needed(width: int, context: int, way: str) -> int:
        sizes = {"d": width, "context": context, "batch": batch, "heads": heads, "causal": causal, "on_gpu": on_gpu}
        return footprint(implementation, precision, **sizes).peak(way)  # type: ignore[arg-type]

    rows = []
    for width, way in itertools.product(d, DIRECTIONS):
        # All that fit come first: as many as there are before the first that does not.
        fits = bisect_left(_CONTEXTS, True, key=lambda context: needed(width, context, way) > limit_bytes)
        first = next((c for c in sorted(contexts) if c > fits), pd.NA)
        bytes_then = needed(width, first, way) if isinstance(first, int) else pd.NA
        rows.append((implementation, precision, width, way, fits, first, bytes_then))
    out = pd.DataFrame(rows, columns=[*_LINE, "largest_context", "context", "needed_bytes"])
    return out.astype({"context": "Int64", "needed_bytes": "Int64"})


def ends(table: pd.DataFrame, limit_bytes: pd.Series, *, on_gpu: bool = True) -> pd.DataFrame:
    """Put where memory was forecast to run out beside where it did.

    Parameters
    ----------
    table : DataFrame
        Of :func:`cells`.
    limit_bytes : Series
        Of :func:`limits`; columns that are not in it are left out.
    on_gpu : bool
        As for :func:`footprint`.

    Returns
    -------
    DataFrame
        The columns of :func:`forecast`, for the lines of which something could run; ``measured_context``, the first
        that did not fit (for backward also one whose forward did not; NA when none failed), and ``outcome``: ``as
        forecast``, ``earlier``, ``later``, or ``not reached`` where the sweep ended before it could tell.
    """
    possible = table[table["status"] != "unsupported"]
    found = []
    for (implementation, precision), rows in possible.groupby(["implementation", "precision"], sort=False):
        limit = limit_bytes.get(f"{implementation}-{precision}")
        if limit is not None:
            contexts, widths = (sorted(int(n) for n in rows[name].unique()) for name in ("context", "d"))
            sizes = {name: rows[name].iloc[0].item() for name in _OF_COLUMN}
            column: Any = (float(limit), implementation, precision)
            found.append(forecast(*column, d=widths, contexts=contexts, **sizes, on_gpu=on_gpu))
    if not found:
        return pd.DataFrame(
            columns=[*_LINE, "largest_context", "context", "needed_bytes", "measured_context", "outcome"]
        )
    ran_out = possible[possible["status"] == "oom"]
    # What fails forward cannot go backward.
    ran_out = pd.concat([ran_out, ran_out[ran_out["direction"] == "forward"].assign(direction="backward")])
    first = ran_out.groupby(_LINE)["context"].min().astype("Int64").rename("measured_context").reset_index()
    whole = (possible["status"] == "ok").groupby([possible[name] for name in _LINE]).all().rename("whole").reset_index()
    out = pd.concat(found, ignore_index=True).merge(first, "left", _LINE).merge(whole, "left", _LINE)
    expected, came = (
        out[name].astype("Float64").to_numpy(float, na_value=np.inf) for name in ("context", "measured_context")
    )
    known = out["measured_context"].notna() | out.pop("whole")
    out["outcome"] = np.select(
        [~known, came == expected, came < expected], ["not reached", "as forecast", "earlier"], "later"
    )
    return out


def launch_bound(table: pd.DataFrame, *, factor: float = 1.5) -> pd.DataFrame:
    """Find the contexts up to which time does not grow: what is measured there is the cost of launching.

    Parameters
    ----------
    table : DataFrame
        Of :func:`cells`.
    factor : float
        Times up to so many times that of the shortest context count as the same.

    Returns
    -------
    DataFrame
        ``implementation, precision, d, direction, floor_ns`` (time at the shortest context) and ``context``, the last
        of those at the same time; 0 where already the second context takes longer.
    """
    timed = table[table["median_ns"].notna()].sort_values([*_LINE, "context"], kind="stable")
    floor = timed.groupby(_LINE, sort=False)["median_ns"].transform("first")
    grown = (timed["median_ns"] > factor * floor).groupby([timed[name] for name in _LINE], sort=False).cummax()
    same = timed[~grown].assign(floor_ns=floor[~grown])
    flat = same.groupby(_LINE, sort=False, as_index=False).agg(
        floor_ns=("floor_ns", "first"), context=("context", "last"), cells=("context", "size")
    )
    flat["context"] = flat["context"].where(flat["cells"] > 1, 0)
    return flat.drop(columns="cells")


def exponents(table: pd.DataFrame) -> pd.DataFrame:
    """Say how time and memory grow at the long end: 1 is linear in the context, 2 quadratic.

    Parameters
    ----------
    table : DataFrame
        Of :func:`cells`.

    Returns
    -------
    DataFrame
        ``implementation, precision, d, direction, context`` (the longest that fits), ``time``, ``memory`` (the slopes
        on logarithmic axes between the two longest contexts that fit, of the median and of the peak).
    """
    fits = table[table["status"] == "ok"].sort_values([*_LINE, "context"], kind="stable").set_index(_LINE)
    sizes = fits[["context", "median_ns"]].assign(peak=fits["peak_bytes"] - fits["workspace_bytes"])
    rise = sizes.apply(np.log).groupby(_LINE).diff().assign(longest=fits["context"])
    last = rise.groupby(_LINE).tail(1).dropna(subset="context")
    slopes = {"time": last["median_ns"] / last["context"], "memory": last["peak"] / last["context"]}
    return pd.DataFrame({"context": last["longest"], **slopes}).reset_index()


#: Backend by name of a kernel or an operator, in order of precedence: names of cuDNN's kernels hold "flash" as well.
_BACKENDS = (
    ("cudnn", r"cudnn"),
    ("efficient", r"fmha|efficient_attention|mem_eff"),
    ("flash", r"flash"),
    ("compiled", r"^triton_|compiled"),
    ("written out", r"softmax|bmm|gemm|matmul"),
)


def backends(trace: Trace) -> pd.DataFrame:
    """Read from a profile which implementation really ran in each cell.

    On a GPU it is read from the names of kernels, else from those of the CPU's operators. What was asked for plays no
    part in it.

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    DataFrame
        ``implementation, precision, d, context, direction, backend`` (``cudnn``, ``efficient``, ``flash``,
        ``compiled``, ``written out``, or ``unknown``), ``evidence`` (the longest kernel or operator that says so),
        ``count`` (kernels or operators). Empty where the trace has no ranges of cells.
    """
    of = kernels if trace.recorded("kernels") and trace.recorded("calls") else operators
    rows = []
    for name in trace.table("ranges", ["name"])["name"].astype("str").unique():
        match = METRIC.fullmatch(name)
        if match and match["d"] and match["quantity"] in DIRECTIONS:
            ran = of.summary(select(trace, within=f"^{re.escape(name)}$"))
            place = [match["implementation"], match["precision"], int(match["d"]), int(match["context"])]
            rows.append([*place, match["quantity"], *_backend(ran["name"]), int(ran["count"].sum())])
    out = pd.DataFrame(rows, columns=[*_KEY, "direction", "backend", "evidence", "count"])
    return out.sort_values([*_KEY, "direction"], ascending=[True] * 4 + [False], ignore_index=True)


def _backend(names: pd.Series) -> tuple[str, str]:
    """Decide by the first rule that a name matches; names come in order of their time."""
    for backend, pattern in _BACKENDS:
        hits = names[names.str.contains(pattern, case=False, regex=True)]
        if len(hits):
            return backend, str(hits.iloc[0])
    return "unknown", ""
