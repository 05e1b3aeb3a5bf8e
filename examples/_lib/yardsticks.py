"""What measured ceilings and layers come to: tables and sentences of page 15."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from _lib import climb, clocks
from _lib.climb import Bounds
from nsightkit.analysis.core.noise import Estimate
from nsightkit.analysis.roofline import sol
from nsightkit.analysis.roofline.sol import Rates

if TYPE_CHECKING:
    from nsightkit.guide import Measurement


def ceilings(runs: Iterable[Measurement]) -> pd.DataFrame:
    """List the rates of GEMMs and transfers, as shares of the datasheet and of the card's own clock.

    Parameters
    ----------
    runs : iterable of Measurement
    """
    table = pd.DataFrame(_ceiling(run) for run in runs)
    numbers = table.columns[2:-1]
    table[numbers] = table[numbers].astype(float)
    return table


def _ceiling(run: Measurement) -> dict[str, Any]:
    ceiling = climb.ceiling(run)
    unit, gpu = ceiling["unit"], climb.gpu_of(run)
    clock = run.median("sm_clock_mhz")
    row = {"what": ceiling["what"], "unit": unit, "TFLOP/s": ceiling["tflops"], "GB/s": ceiling["gb_per_s"]}
    row |= {"share of datasheet": None, "share at its clock": None}
    row |= {"clock (MHz)": clock, "power (W)": run.median("power_w")}
    row["clock limited by"] = clocks.slowed_by(run.values("slowdown_mask")) or "-"
    if gpu and unit == "memory":
        row["share of datasheet"] = ceiling["gb_per_s"] / gpu.gb_per_s
    elif gpu and gpu.peak(unit):
        row["share of datasheet"] = ceiling["tflops"] / gpu.peak(unit).tflops
        if clock:
            row["share at its clock"] = ceiling["tflops"] / clocks.at_clock(gpu, unit, clock)
    return row


def layers(runs: Mapping[str, Measurement], against: Bounds) -> pd.DataFrame:
    """Compare whole layers with the sums of their bounds.

    Parameters
    ----------
    runs : mapping of str to Measurement
        By rung.
    against : Bounds

    Returns
    -------
    DataFrame
        A row for each roof and rung; ``share, all fused`` counts what no fusion removes.
    """
    rows = []
    for roof in (against.sheet, against.ceilings):
        if roof is None:
            continue
        for rung, run in runs.items():
            took_ns, count = run.median("step_ns"), run.parameters["layers"]
            row = {"roof": roof.source, "layer": rung, "step (ms)": took_ns / 1e6}
            row["share reached"] = climb.list_ns(against.listed, roof) * count / took_ns
            row["share, all fused"] = climb.floor_ns(against.listed, roof) * count / took_ns
            rows.append(row)
    return pd.DataFrame(rows)


def reached(runs: Iterable[Measurement], first: Measurement) -> str:
    """Say which rates the best GEMM and the best transfer reached."""
    # No work is like products of zeros.
    measured = [climb.ceiling(run) for run in runs if not run.parameters.get("zeros")]
    rates: Rates = sol.ceilings(measured, first.label)
    said = f"bf16 matmuls reach {rates.tflops['bf16']:.3g} TFLOP/s and transfers {rates.gb_per_s:,.0f} GB/s"
    gpu = climb.gpu_of(first)
    if gpu:
        shares = rates.tflops["bf16"] / gpu.peak("bf16").tflops, rates.gb_per_s / gpu.gb_per_s
        said += ", {:.0%} and {:.0%} of the datasheet".format(*shares)
    return said + "."


def of_zeros(ratio: Estimate) -> str:
    """Say how much less time a matmul of zeros takes."""
    effect = "the same time, within the noise, as"
    if ratio.excludes(1):
        effect = f"{abs(ratio.value - 1):.0%} {'less' if ratio.value < 1 else 'more'} time than"
    return f" A matmul of zeros takes {effect} one of random numbers."


def of_layers(whole: pd.DataFrame, last: Measurement, against: Bounds) -> str:
    """Say how far both layers are from measured ceilings, and which operator of the last has most to gain."""
    table = sol.summary(last.trace, measured=against.ceilings)
    gain = (1 - table["sol_measured"].clip(upper=1)) * table["time_ns"]
    unfused, fused = whole["share reached"].iloc[-2:]
    said = f" Against measured ceilings the layer reaches {unfused:.0%} of its bound unfused and {fused:.0%} fused"
    if not gain.sum() > 0:
        return f"{said}."
    return f"{said}; {table.loc[gain.idxmax(), 'name']} has {gain.max() / gain.sum():.0%} of the time still to gain."
