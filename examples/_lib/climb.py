"""The ladders of one layer, prefill and decode: the best each rung can reach, and what it did reach (pages 15, 17, 18).

Every rung is compared with the same list: the operations of the unfused layer
(:func:`nsightkit.analysis.roofline.sol.layer_costs`), each at its bound. ``SOL = sum of bounds / measured time``. The
*floor* is the part that no fusion removes, GEMMs and attention, so a SOL above one is possible where the floor is not
reached. fp8 does other arithmetic than the list, so that rung has no SOL.

A prediction is the most that a change can save of the rung it changes. It follows from what the change removes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from _lib import launches
from nsightkit import hardware
from nsightkit.analysis.core import noise
from nsightkit.analysis.roofline import sol
from nsightkit.analysis.roofline.sol import Operation, Rates
from nsightkit.analysis.timeline import kernels, operators, steps
from nsightkit.errors import UsageError
from nsightkit.hardware import Gpu
from nsightkit.trace.model import Trace
from nsightkit.workloads.layer import RUNGS

if TYPE_CHECKING:
    from nsightkit.guide import Measurement

#: Assumed: the CPU time of an eager launch.
LAUNCH_US = 5.0
#: Rows and columns of a large GEMM's tile on Hopper.
TILE = (128, 256)
_KEPT = ("GEMM", "attention")
_METRICS = ("relative_error", "rounding_error")
_COLUMNS = (
    "rung",
    "time_ns",
    "low_ns",
    "high_ns",
    "speedup",
    "sol_datasheet",
    "sol_measured",
    "gb_per_s",
    "impossible",
)


class Bounds(NamedTuple):
    """What the rungs of one ladder are compared with.

    Parameters
    ----------
    mode : {"prefill", "decode"}
    sizes : mapping
        Parameters of the runs.
    sheet : Rates or None
        Of the GPU's datasheet; None where the GPU is not listed.
    ceilings : Rates or None
        Measured on that very GPU.
    gpu : Gpu or None
    """

    mode: str
    sizes: Mapping[str, Any]
    sheet: Rates | None
    ceilings: Rates | None
    gpu: Gpu | None

    @property
    def best(self) -> Rates | None:
        """The best rates that are known."""
        return self.ceilings or self.sheet

    @property
    def listed(self) -> list[Operation]:
        """Operations of one layer."""
        return operations(self.mode, self.sizes)


def operations(mode: str, sizes: Mapping[str, Any], precision: str = "bf16") -> list[Operation]:
    """List what one layer must do, unfused.

    Parameters
    ----------
    mode : {"prefill", "decode"}
        A whole context at once, or one token that sees a full cache.
    sizes : mapping
        ``batch, context, hidden, heads, d_ff``.
    precision : str

    Returns
    -------
    list of Operation
    """
    tokens = 1 if mode == "decode" else sizes["context"]
    keys = sizes["context"] if mode == "decode" else None
    shape = (sizes["batch"], tokens, sizes["hidden"], sizes["heads"], sizes["d_ff"])
    return sol.layer_costs(*shape, precision, keys=keys)


def list_ns(listed: Iterable[Operation], rates: Rates) -> float:
    """Give the least time of operations one after the other, in nanoseconds."""
    return sum(rates.bound_ns(operation) for operation in listed)


def floor_ns(listed: Iterable[Operation], rates: Rates) -> float:
    """Give the least time of what no fusion removes: the operations of tensor cores."""
    return list_ns([operation for operation in listed if operation.unit != "fp32"], rates)


def wave_efficiency(m: int, n: int, multiprocessors: int) -> float:
    """Give the share of multiprocessors that have a tile of an m x n GEMM, on average over its waves.

    Parameters
    ----------
    m, n : int
    multiprocessors : int

    Returns
    -------
    float
        1 when the last wave is full as well.
    """
    tiles = np.ceil(m / TILE[0]) * np.ceil(n / TILE[1])
    waves = tiles / multiprocessors
    return float(waves / np.ceil(waves))


def waves(sizes: Mapping[str, Any], multiprocessors: int) -> dict[str, float]:
    """Give the share of full waves of a prefill's GEMMs, each alone and joined with its neighbours."""
    hidden, d_ff = sizes["hidden"], sizes["d_ff"]
    columns = {"q, k or v": hidden, "q, k, v": 3 * hidden, "gate or up": d_ff, "gate and up": 2 * d_ff}
    return {name: wave_efficiency(sizes["context"], n, multiprocessors) for name, n in columns.items()}


def predicted(mode: str, sizes: Mapping[str, Any], rates: Rates) -> pd.DataFrame:
    """Predict the best time of each rung up to the compiled one; later rungs have the same bound.

    Parameters
    ----------
    mode : {"prefill", "decode"}
    sizes : mapping
    rates : Rates

    Returns
    -------
    DataFrame
        ``rung, change, launches`` (NA where a compiler decides), ``least_ns`` of one layer, ``lower_ns`` (what is left
        if everything that can be fused is), ``share`` (of the list's time in `least_ns`).
    """
    listed = operations(mode, sizes)
    whole = list_ns(listed, rates)
    rows = []
    for name, rung in RUNGS[mode].items():
        row: dict[str, Any] = {"rung": name, "change": rung.change, "launches": None}
        if rung.compiled is None:
            launched = launches.count(mode, name, sizes)
            row["launches"] = len(launched)
            row["least_ns"] = list_ns(launched, rates)
            if mode == "decode":  # short enough that the CPU's launches count
                row["least_ns"] = max(row["least_ns"], 1e3 * LAUNCH_US * len(launched))
            row["lower_ns"] = row["least_ns"]
        else:
            row["least_ns"] = whole
            row["lower_ns"] = floor_ns(listed, rates) if mode == "prefill" else whole
        rows.append(row)
        if rung.compiled is not None:
            break
    table = pd.DataFrame(rows).astype({"launches": "Int64"})
    return table.assign(share=whole / table["least_ns"])


def gpu_of(run: Measurement) -> Gpu | None:
    """Give the datasheet entry of the GPU that was measured; None where it is not listed, or was a CPU."""
    if run.gpu is None:
        return None
    try:
        return hardware.find(run.gpu)
    except UsageError:
        return None


def bounds(mode: str, first: Measurement, ceilings: Iterable[Measurement] = ()) -> Bounds:
    """Collect what the rungs of a ladder are compared with.

    Parameters
    ----------
    mode : {"prefill", "decode"}
    first : Measurement
        The first rung.
    ceilings : iterable of Measurement
        GEMMs and transfers on the same GPU.

    Returns
    -------
    Bounds
    """
    gpu = gpu_of(first)
    sheet = None if gpu is None else sol.datasheet(gpu)
    reached = [sol.ceiling(run.parameters, run.median("step_ns")) for run in ceilings if run and run.gpu is not None]
    measured = sol.ceilings(reached, "measured on this GPU") if reached else None
    return Bounds(mode, first.parameters, sheet, measured, gpu)


def kinds(trace: Trace, layers: int = 1) -> pd.Series:
    """Give the profiled time of one layer by kind of work.

    Parameters
    ----------
    trace : Trace
    layers : int
        That a step passes through.

    Returns
    -------
    Series
        Nanoseconds by category, of kernels, or of operators where no GPU was recorded.
    """
    of = kernels if trace.recorded("kernels") else operators
    table = of.summary(trace, by="category")
    count = max(len(steps.find(trace)), 1) * layers
    return pd.Series(table["total_ns"].to_numpy(float) / count, index=table["category"].astype(str), name="time_ns")


def table(runs: Mapping[str, Measurement], against: Bounds) -> pd.DataFrame:
    """Compare every rung with the same bounds.

    Parameters
    ----------
    runs : mapping of str to Measurement
        By rung, the first rung first. Those that were not measured yet are left out.
    against : Bounds

    Returns
    -------
    DataFrame
        By rung: of one layer ``time_ns`` (median), ``low_ns`` and ``high_ns`` (quartiles); ``speedup`` over the first;
        ``sol_datasheet`` and ``sol_measured`` (NaN without such rates, and for fp8); ``gb_per_s`` of the list's bytes;
        ``impossible`` (faster than the floor of the datasheet); ``relative_error``, ``rounding_error``, and
        ``sm_clock_mhz`` where the driver reports it.
    """
    listed = against.listed
    moved = sum(operation.bytes for operation in listed)
    rows = []
    for name, run in runs.items():
        if not run:
            continue
        times = run.values("step_ns") / against.sizes["layers"]
        low, median, high = np.percentile(times, [25, 50, 75])
        row = {"rung": name, "time_ns": median, "low_ns": low, "high_ns": high, "gb_per_s": moved / median}
        own = _fp8_operations(against) if name == "fp8" else listed
        row["impossible"] = against.sheet is not None and floor_ns(own, against.sheet) > median
        for kind, rates in (("datasheet", against.sheet), ("measured", against.ceilings)):
            known = rates is not None and name != "fp8"
            row[f"sol_{kind}"] = list_ns(listed, rates) / median if known else np.nan
        for metric in _METRICS:
            row[metric] = run.median(metric)
        row["sm_clock_mhz"] = run.median("sm_clock_mhz")
        rows.append(row)
    out = pd.DataFrame(rows, columns=[*_COLUMNS, *_METRICS, "sm_clock_mhz"])
    if rows:
        out["speedup"] = out["time_ns"].iloc[0] / out["time_ns"]
    return out.set_index("rung", drop=False)


def _fp8_operations(against: Bounds) -> list[Operation]:
    """The list with its GEMMs in fp8, where the GPU has fp8."""
    listed = against.listed
    if against.sheet is None or "fp8" not in against.sheet.tflops:
        return listed
    narrow = operations(against.mode, against.sizes, "fp8")
    pairs = zip(listed, narrow, strict=True)
    return [wide if wide.unit == "fp32" or wide.name == "attention" else fp8 for wide, fp8 in pairs]


def changes(runs: Mapping[str, Measurement], against: Bounds) -> pd.DataFrame:
    """Put what each change saved beside the most that it could save.

    Parameters
    ----------
    runs : mapping of str to Measurement
    against : Bounds

    Returns
    -------
    DataFrame
        ``rung``, ``base``, ``most_us`` (predicted; NaN without a GPU's rates), ``saved_us``, and ``outcome``: within
        the noise, slower, faster, or more than predicted.
    """
    rows = []
    for name, run in runs.items():
        base = RUNGS[against.mode][name].base
        if not run or not runs.get(base):
            continue
        saved = noise.shift(run.values("step_ns"), runs[base].values("step_ns"))
        most_ns = _most_ns(name, runs[base], against)
        layers = against.sizes["layers"]
        outcome = "faster"
        if not saved.excludes(0):
            outcome = "within the noise"
        elif saved.value < 0:
            outcome = "slower"
        elif (saved.low or 0) / layers > most_ns:
            outcome = "more than predicted"
        row = {"rung": name, "base": base, "most_us": most_ns / 1e3, "saved_us": saved.value / layers / 1e3}
        rows.append({**row, "outcome": outcome})
    return pd.DataFrame(rows, columns=["rung", "base", "most_us", "saved_us", "outcome"])


def _most_ns(name: str, base: Measurement, against: Bounds) -> float:
    """Predict the most that a rung can save of its base, for one layer; NaN without a GPU's kernels and rates."""
    if against.best is None or not base.trace.recorded("kernels"):
        return float("nan")
    took = base.median("step_ns") / against.sizes["layers"]
    spent = kinds(base.trace, against.sizes["layers"])
    idle = max(took - float(spent.sum()), 0.0)
    if name == "graphed":
        return idle
    if against.mode == "decode":
        if name == "fused":
            before, after = (len(launches.count("decode", rung, against.sizes)) for rung in ("unfused", "fused"))
            return (before - after) / before * took
        return max(took - list_ns(against.listed, against.best), 0.0)
    return _most_of_prefill_ns(name, took, spent, against)


def _most_of_prefill_ns(name: str, took: float, spent: pd.Series, against: Bounds) -> float:
    rates, listed = against.best, against.listed
    ideal = {operation.name: rates.bound_ns(operation) for operation in listed}
    gemms = float(spent.get("GEMM", 0.0))
    least_gemms = floor_ns(listed, rates) - ideal["attention"]
    other = float(spent.drop([kind for kind in _KEPT if kind in spent.index]).sum())
    least_other = list_ns(listed, rates) - floor_ns(listed, rates)
    if name == "sdpa":
        before, after = (list_ns(launches.count("prefill", rung, against.sizes), rates) for rung in ("unfused", "sdpa"))
        return (before - after) / before * took
    if name == "fused":
        return _fuller_waves_ns(against) * max(gemms / least_gemms, 1)
    if name == "autotuned":
        return max(gemms - least_gemms, 0.0)
    if name == "triton":  # it writes gate once less, and reads it once less
        return ideal["SwiGLU"] * max(other / least_other, 1)
    if name == "fp8":
        return gemms * (1 - rates.tflops["bf16"] / rates.tflops.get("fp8", rates.tflops["bf16"]))
    return other + max(took - float(spent.sum()), 0.0)  # compiled


def _fuller_waves_ns(against: Bounds) -> float:
    """Give what joined GEMMs gain because their last wave is fuller."""
    if against.gpu is None:
        return 0.0
    filled = waves(against.sizes, against.gpu.multiprocessors)
    context, hidden, d_ff = (against.sizes[name] for name in ("context", "hidden", "d_ff"))
    gained = 0.0
    for columns, alone, joined in ((3 * hidden, "q, k or v", "q, k, v"), (2 * d_ff, "gate or up", "gate and up")):
        bound = against.best.bound_ns(sol.gemm_cost(context, columns, hidden))
        gained += bound * (1 / filled[alone] - 1 / filled[joined])
    return gained


def answer(unit: str, rungs: pd.DataFrame, judged: pd.DataFrame) -> str:
    """Say what the rungs came to.

    Parameters
    ----------
    unit : str
        What a time is of, such as ``a layer``.
    rungs : DataFrame
        From :func:`table`.
    judged : DataFrame
        From :func:`changes`.

    Returns
    -------
    str
    """
    if rungs.empty:
        return "no rung was measured yet."
    comparable = rungs.drop(index="fp8", errors="ignore")
    first, best = comparable.iloc[0], comparable.loc[comparable["time_ns"].idxmin()]
    before_us, after_us = first["time_ns"] / 1e3, best["time_ns"] / 1e3
    sentences = [
        f"{unit} goes from {before_us:,.1f} to {after_us:,.1f} µs ({best['rung']}), {best['speedup']:.1f}x faster."
    ]
    if np.isfinite(best["sol_measured"]):
        shares = f"{first['sol_measured']:.0%} and {best['sol_measured']:.0%}"
        sentences.append(f"That is {shares} of the measured ceilings.")
    for outcome in ("more than predicted", "within the noise", "slower"):
        names = ", ".join(judged.loc[judged["outcome"] == outcome, "rung"])
        if names:
            sentences.append(f"{outcome.capitalize()}: {names}.")
    wrong = ", ".join(rungs.index[rungs["impossible"]])
    if wrong:
        sentences.append(f"Faster than the GPU can be: {wrong}.")
    return " ".join(sentences)
