r"""A ladder: one program in many implementations, each a change to another, all held against the same bounds.

The denominator is the same for every rung: the list of operations of the unfused program
(:func:`nsightkit.analysis.roofline.sol.layer_costs`), each at its bound::

    SOL = sum of bounds / measured time

Beside it stands the *floor*: the operations that no fusion removes (matrix products and attention) alone. Fusion brings
a program from the sum of bounds towards the floor, so a SOL above one is possible where the floor is not reached.

A rung that does other arithmetic than the list, such as one in 8 bits, has no SOL: its times are compared with those of
the others and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from nsightkit.analysis.roofline.sol import Operation, Rates
from nsightkit.analysis.timeline import kernels, operators, steps
from nsightkit.trace.model import Trace

__all__ = ["floor_ns", "kinds", "launched_ns", "list_ns", "summary", "wave_efficiency"]

#: Kinds of work that no fusion removes.
KEPT = ("GEMM", "attention")


def list_ns(operations: Iterable[Operation], rates: Rates) -> float:
    """Give the least time of operations one after the other.

    Parameters
    ----------
    operations : iterable of Operation
    rates : Rates

    Returns
    -------
    float
        Nanoseconds.
    """
    return sum(map(rates.bound_ns, operations))


def floor_ns(operations: Iterable[Operation], rates: Rates) -> float:
    """Give the least time of what no fusion removes: the operations of tensor cores.

    Parameters
    ----------
    operations : iterable of Operation
    rates : Rates

    Returns
    -------
    float
        Nanoseconds.
    """
    return list_ns((operation for operation in operations if operation.unit != "fp32"), rates)


def launched_ns(launches: Iterable[Mapping[str, Any]], rates: Rates) -> float:
    """Give the least time of a program as it is written: every operation a kernel of its own.

    Parameters
    ----------
    launches : iterable of mapping
        ``name``, ``flops``, ``bytes`` and ``unit`` of each.
    rates : Rates

    Returns
    -------
    float
        Nanoseconds.
    """
    return list_ns((Operation(**launch) for launch in launches), rates)


def wave_efficiency(m: int, n: int, multiprocessors: int, tile: tuple[int, int] = (128, 256)) -> float:
    """Give the share of multiprocessors that have a tile of an m x n product, on average over its waves.

    Parameters
    ----------
    m, n : int
    multiprocessors : int
    tile : tuple of int
        Rows and columns that one multiprocessor makes at a time; those of Hopper's large products by default.

    Returns
    -------
    float
        1 when the last wave is full as well.
    """
    waves = -(-m // tile[0]) * -(-n // tile[1]) / multiprocessors
    return waves / float(np.ceil(waves))


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
        Nanoseconds by category, of kernels, or of operators without what they called where no GPU was recorded. Empty
        without steps.
    """
    of = kernels if trace.recorded("kernels") else operators
    table = of.summary(trace, by="category")
    count = max(len(steps.find(trace)), 1) * layers
    return pd.Series(table["total_ns"].to_numpy(float) / count, index=table["category"].astype(str), name="time_ns")


def summary(
    operations: Sequence[Operation],
    samples: Mapping[str, ArrayLike],
    layers: int,
    sheet: Rates | None,
    measured: Rates | None = None,
    other: Mapping[str, Sequence[Operation]] | None = None,
) -> pd.DataFrame:
    """Hold every rung against the same bounds.

    Parameters
    ----------
    operations : sequence of Operation
        Of one layer, unfused.
    samples : mapping of str to array of shape (repetitions,)
        Times of a step in nanoseconds, by rung; the first is what the others are compared with.
    layers : int
        That a step passes through.
    sheet : Rates or None
        Of the card's datasheet; None where the card is not known.
    measured : Rates, optional
        Ceilings measured on that very card.
    other : mapping of str to sequence of Operation, optional
        What rungs do that do not do `operations`. They are given no SOL.

    Returns
    -------
    DataFrame
        ``rung``; of one layer ``time_ns`` (median), ``low_ns`` and ``high_ns`` (quartiles); ``times``, how many times
        as fast as the first; ``sol_datasheet, sol_measured``; ``floor_datasheet, floor_measured``, the share of the
        time that the floor takes; ``impossible``, quicker than the floor by the datasheet, in its own arithmetic. What
        has no rates, and SOL of rungs in `other`, is NaN.
    """
    quartiles = {
        rung: np.percentile(np.asarray(of, dtype=float), [50, 25, 75]) / layers for rung, of in samples.items()
    }
    table = pd.DataFrame.from_dict(quartiles, orient="index", columns=["time_ns", "low_ns", "high_ns"])
    table["times"] = table["time_ns"].iloc[0] / table["time_ns"]
    others = other or {}
    rates = {"datasheet": sheet, "measured": measured}
    for share, least_ns in (("sol", list_ns), ("floor", floor_ns)):
        for name, known in rates.items():
            least = least_ns(operations, known) if known else np.nan
            table[f"{share}_{name}"] = np.where(table.index.isin(list(others)), np.nan, least / table["time_ns"])
    floors = [floor_ns(others.get(rung, operations), sheet) if sheet else 0.0 for rung in table.index]
    return table.assign(impossible=floors > table["time_ns"]).rename_axis("rung").reset_index()
