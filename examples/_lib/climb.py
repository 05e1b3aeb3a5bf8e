"""The ladders of one layer, prefill and decode: the best each rung can reach, and what it did reach (pages 15, 17, 18).

Every rung is compared with the same list: the operations of the unfused layer
(:func:`nsightkit.analysis.roofline.sol.layer_costs`), each at its bound. ``SOL = sum of bounds / measured time``. The
*floor* is the part that no fusion removes, GEMMs and attention, so a SOL above one is possible where the floor is not
reached. fp8 does other arithmetic than the list, so that rung has no SOL.

A prediction is the most that a change can save: what its base took, less the least time of the rung.
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
from nsightkit.errors import UsageError
from nsightkit.hardware import Gpu
from nsightkit.workloads.layer import RUNGS

if TYPE_CHECKING:
    from nsightkit.guide import Measurement

#: Assumed: the CPU time of an eager launch.
LAUNCH_US = 5.0
#: How often a transfer goes through the memory.
_TENSORS_MOVED = {"copy": 2, "triad": 3, "read": 1}
#: Large GEMMs by precision: the name of the measurement, timed steps, and steps before them.
_GEMMS = {"bf16": ("before", 200, 800), "fp32": ("fp32", 60, 60), "fp8": ("fp8", 200, 1200)}
_COLUMNS = ["rung", "time_ns", "speedup", "sol_datasheet", "sol_measured", "gb_per_s", "impossible"]
_METRICS = ["relative_error", "sm_clock_mhz"]


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
    """

    mode: str
    sizes: Mapping[str, Any]
    sheet: Rates | None
    ceilings: Rates | None

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


def ceilings(*parts: str) -> list[Measurement]:
    """Give the ceilings that page 15 measures, for the pages that compare with them: the same sizes and names.

    Parameters
    ----------
    *parts : str
        A precision of GEMMs, or a kind of transfer.
    """
    from nsightkit.guide import measure
    from nsightkit.workloads import ceilings

    runs = []
    for part in parts:
        workload, gpu, small = ceilings.copy, {"megabytes": 4_000, "kind": part}, {"megabytes": 16, "kind": part}
        steps, warmup, name = 200, 300, part
        if part in _GEMMS:
            name, steps, warmup = _GEMMS[part]
            workload = ceilings.gemm
            gpu = {**dict.fromkeys("mnk", 8192), "precision": part}
            small = {**dict.fromkeys("mnk", 256), "precision": part}
        how = {"gpu": gpu, "small": small, "steps": steps, "warmup": warmup}
        runs.append(measure(f"ceilings/{name}", workload, **how, profile=None))
    return runs


def ceiling(run: Measurement) -> dict[str, Any]:
    """Give the rate of one operation that was run to find a card's ceiling.

    Parameters
    ----------
    run : Measurement
        Of :mod:`nsightkit.workloads.ceilings`.

    Returns
    -------
    dict
        ``unit`` (``memory`` for a transfer), ``tflops`` and ``gb_per_s``, of which one is None, and ``what`` ran.
    """
    parameters, time_ns = run.parameters, run.median("step_ns")
    if "megabytes" in parameters:
        kind, megabytes = parameters["kind"], parameters["megabytes"]
        gb_per_s = _TENSORS_MOVED[kind] * megabytes * 10**6 / time_ns
        return {"unit": "memory", "tflops": None, "gb_per_s": gb_per_s, "what": f"{kind} of {megabytes:,} MB"}
    m, n, k = (int(parameters[name]) for name in ("m", "n", "k"))
    zeros = " of zeros" if parameters.get("zeros") else ""
    tflops = 2 * m * n * k / time_ns / 1e3
    return {"unit": parameters["precision"], "tflops": tflops, "gb_per_s": None, "what": f"GEMM {m}x{k} {k}x{n}{zeros}"}


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
    reached = [ceiling(run) for run in ceilings if run and run.gpu is not None]
    measured = sol.ceilings(reached, "measured on this GPU") if reached else None
    return Bounds(mode, first.parameters, sheet, measured)


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
        By rung: ``time_ns`` of one layer (median); ``speedup`` over the first; ``sol_datasheet`` and ``sol_measured``
        (NaN without such rates, and for fp8); ``gb_per_s`` of the list's bytes; ``impossible`` (faster than the floor
        of the datasheet); ``relative_error``, and ``sm_clock_mhz`` where the driver reports it.
    """
    moved = sum(operation.bytes for operation in against.listed)
    rows = []
    for name, run in runs.items():
        if not run:
            continue
        time_ns = run.median("step_ns") / against.sizes["layers"]
        row = {"rung": name, "time_ns": time_ns, "gb_per_s": moved / time_ns}
        row["impossible"] = against.sheet is not None and _floor_of_rung_ns(name, against, against.sheet) > time_ns
        for kind, rates in (("datasheet", against.sheet), ("measured", against.ceilings)):
            known = rates is not None and name != "fp8"
            row[f"sol_{kind}"] = list_ns(against.listed, rates) / time_ns if known else np.nan
        for metric in _METRICS:
            row[metric] = run.median(metric)
        rows.append(row)
    out = pd.DataFrame(rows, columns=[*_COLUMNS, *_METRICS])
    if rows:
        out["speedup"] = out["time_ns"].iloc[0] / out["time_ns"]
    return out.set_index("rung", drop=False)


def _floor_of_rung_ns(name: str, against: Bounds, rates: Rates) -> float:
    """Give the floor of a rung: for fp8 of GEMMs in fp8, where the GPU has fp8."""
    listed = against.listed
    if name != "fp8" or "fp8" not in rates.tflops:
        return floor_ns(listed, rates)
    narrow = operations(against.mode, against.sizes, "fp8")
    pairs = zip(listed, narrow, strict=True)
    return floor_ns([wide if wide.name == "attention" else fp8 for wide, fp8 in pairs], rates)


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
    layers = against.sizes["layers"]
    rows = []
    for name, run in runs.items():
        base = RUNGS[against.mode][name].base
        if not run or not runs.get(base):
            continue
        most_ns = np.nan
        if against.best is not None:
            least_ns = _floor_of_rung_ns(name, against, against.best)
            most_ns = runs[base].median("step_ns") / layers - least_ns
        saved = noise.shift(run.values("step_ns"), runs[base].values("step_ns"))
        outcome = "faster"
        if not saved.excludes(0):
            outcome = "within the noise"
        elif saved.value < 0:
            outcome = "slower"
        elif saved.low / layers > most_ns:
            outcome = "more than predicted"
        row = {"rung": name, "base": base, "most_us": most_ns / 1e3, "saved_us": saved.value / layers / 1e3}
        rows.append({**row, "outcome": outcome})
    return pd.DataFrame(rows, columns=["rung", "base", "most_us", "saved_us", "outcome"])


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
