"""The ladders of one layer, prefill and decode: what each rung can be at best, and what it turned out to be.

A ladder is one program in many implementations, each a change to another, all held against the same bounds. The
denominator is the same for every rung: the list of operations of the unfused program
(:func:`nsightkit.analysis.roofline.sol.layer_costs`), each at its bound::

    SOL = sum of bounds / measured time

Beside it stands the *floor*: the operations that no fusion removes (matrix products and attention) alone. Fusion brings
a program from the sum of bounds towards the floor, so a SOL above one is possible where the floor is not reached. A
rung that does other arithmetic than the list, such as one in 8 bits, has no SOL: its times are compared with those of
the others and nothing else.

A prediction is the most that a change can save of the rung that it changes. It follows from what the change removes,
before anything is measured; :class:`Climb` puts it beside the measurement. Whether two rungs differ is decided by
:func:`nsightkit.analysis.core.noise.shift`, as everywhere.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from nsightkit import hardware
from nsightkit.analysis.core import noise
from nsightkit.analysis.replay import whatif
from nsightkit.analysis.roofline import sol
from nsightkit.analysis.roofline.sol import Operation, Rates
from nsightkit.analysis.timeline import kernels, operators, steps
from nsightkit.errors import UsageError
from nsightkit.hardware import Gpu
from nsightkit.investigations import measurement
from nsightkit.investigations.measurement import Measurement, same_machine
from nsightkit.trace.model import Trace
from nsightkit.workloads import layer

__all__ = [
    "LAUNCH_US", "RUNGS", "Climb", "as_written", "card_of", "floor_ns", "kinds", "launched_ns", "list_ns", "operations",
    "predicted", "summary", "wave_efficiency", "waves",
]  # fmt: skip

#: Assumed: what launching one operation costs an eager program's CPU.
LAUNCH_US = 5.0
#: The rungs of each ladder.
RUNGS = layer.RUNGS
#: Kinds of work that no fusion removes.
KEPT = ("GEMM", "attention")
#: What of a workload's parameters gives the layer its size.
_SHAPE = ("batch", "context", "hidden", "heads", "d_ff")
_COLUMNS_US = ("at most (µs)", "by replay (µs)", "saved (µs)")


def operations(mode: str, sizes: Mapping[str, Any], precision: str = "bf16") -> list[Operation]:
    """List what one layer must do, unfused.

    Parameters
    ----------
    mode : {"prefill", "decode"}
        A whole context at once, or one token that sees a full cache.
    sizes : mapping
        ``batch, context, hidden, heads, d_ff``, as in :class:`nsightkit.workloads.layer.LayerConfig`.
    precision : str

    Returns
    -------
    list of Operation
    """
    batch, context, hidden, heads, d_ff = (int(sizes[name]) for name in _SHAPE)
    tokens, keys = (1, context) if mode == "decode" else (context, None)
    return sol.layer_costs(batch, tokens, hidden, heads, d_ff, precision, keys=keys)


def as_written(mode: str, rung: str, sizes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Count what one layer of an eager rung launches, without running it.

    Parameters
    ----------
    mode, rung : str
        As in :data:`nsightkit.workloads.layer.RUNGS`.
    sizes : mapping
        As for :func:`operations`.

    Returns
    -------
    list of dict
        As from :func:`nsightkit.workloads.layer.written`.
    """
    return layer.written(mode=mode, rung=rung, **{name: sizes[name] for name in _SHAPE})


def waves(sizes: Mapping[str, Any], multiprocessors: int) -> dict[str, float]:
    """Give the share of full waves of a prefill's products, each alone and joined with its neighbours.

    Parameters
    ----------
    sizes : mapping
    multiprocessors : int

    Returns
    -------
    dict of str to float
    """
    d, f = sizes["hidden"], sizes["d_ff"]
    columns = {"q, k or v": d, "q, k, v": 3 * d, "gate or up": f, "gate and up": 2 * f}
    return {name: wave_efficiency(sizes["context"], n, multiprocessors) for name, n in columns.items()}


def predicted(mode: str, sizes: Mapping[str, Any], rates: Rates) -> pd.DataFrame:
    """Say how fast each rung of a ladder can be at best, before any of them is run.

    Eager rungs launch a kernel for each operation that is written. The compiled one can come down to the list of
    operations, and in a prefill as far as the floor.

    Parameters
    ----------
    mode, sizes, rates
        As for the others here.

    Returns
    -------
    DataFrame
        ``rung, change, launches`` (NA where a compiler decides), ``least_ns`` of one layer, ``lower_ns`` (what is left
        if everything that can be fused away is), ``share``: of the list's time in `least_ns`. In ``decode`` the least
        time of an eager rung is at least that of its launches (:data:`LAUNCH_US`).
    """
    listed = operations(mode, sizes)
    whole = list_ns(listed, rates)
    floor = floor_ns(listed, rates) if mode == "prefill" else whole
    rows = []
    for name, rung in RUNGS[mode].items():
        row = {"rung": name, "change": rung.change, "launches": None, "least_ns": whole, "lower_ns": floor}
        rows.append(row)
        if rung.compiled is not None:  # what comes after it can only come nearer to the same bound
            break
        written = as_written(mode, name, sizes)
        least = max(launched_ns(written, rates), 1e3 * LAUNCH_US * len(written) * (mode == "decode"))
        row |= {"launches": len(written), "least_ns": least, "lower_ns": least}
    table = pd.DataFrame(rows).astype({"launches": "Int64"})
    return table.assign(share=whole / table["least_ns"])


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


def card_of(run: Measurement) -> Gpu | None:
    """Give the card that a run was measured on; None where it is not listed, or was a CPU.

    Parameters
    ----------
    run : Measurement
    """
    with contextlib.suppress(KeyError, UsageError):
        return hardware.find((run.provenance["gpu"] or {})["name"])
    return None


class Climb:
    """Rungs that were measured, held against what was predicted of them and against the same bounds.

    Parameters
    ----------
    mode : {"prefill", "decode"}
    runs : mapping of str to Measurement
        By rung, the first rung first.
    ceilings_runs : iterable of Measurement
        Products and transfers on the same card; none where nothing follows from them.

    Attributes
    ----------
    smoke : bool
        Whether it was a small run on a CPU.
    sheet : Rates or None
        Of the card's datasheet, where it is listed.
    ceilings : Rates or None
        Measured on this card.
    rates : Rates or None
        The best that is known of the card.
    listed : list of Operation
        What one layer must do.
    list_ns : float
        Least time of one layer by the best rates known; NaN where none are.
    comparable : bool
        Whether all runs are of one machine, and measured in the same way.
    """

    def __init__(self, mode: str, runs: Mapping[str, Measurement], ceilings_runs: Iterable[Measurement] = ()) -> None:
        self.mode, self.runs, self.ceilings_runs = mode, dict(runs), list(ceilings_runs)
        self.first = next(iter(self.runs.values()))
        self.smoke = self.first.mode == "smoke"
        self.layers = int(self.first.parameters["layers"])  # that a step passes through
        self.card = card_of(self.first)
        self.sheet = sol.datasheet(self.card) if self.card else None
        reached = [sol.ceiling(run.parameters, float(run.median("step_ns") or 0)) for run in self.ceilings_runs]
        self.ceilings = sol.ceilings(reached, "measured on this card") if reached else None
        self.rates = self.ceilings or self.sheet
        self.listed = operations(mode, self.first.parameters)
        self.list_ns = list_ns(self.listed, self.rates) if self.rates else float("nan")
        self.comparable = same_machine(*self.runs.values(), *self.ceilings_runs)

    @classmethod
    def up(cls, mode: str, first: Measurement, few: Iterable[str], ceilings: Iterable[str]) -> Climb:
        """Measure the other rungs of a ladder, and the ceilings of the card; of a small run on a CPU only a few rungs.

        Parameters
        ----------
        mode : {"prefill", "decode"}
        first : Measurement
            Of the first rung.
        few : iterable of str
            The rungs of a small run.
        ceilings : iterable of str
            Parts of the investigation ``ceilings``.

        Returns
        -------
        Climb
        """
        if first.mode == "smoke":
            others, ceilings = few, ()
        else:
            others = [rung for rung in RUNGS[mode] if rung != first.part]
        runs = {first.part: first} | {rung: measurement.measure(first.investigation, rung) for rung in others}
        return cls(mode, runs, [measurement.measure("ceilings", part) for part in ceilings])

    @functools.cached_property
    def spent(self) -> dict[str, pd.Series]:
        """Profiled time of a layer by kind of work, of each rung."""
        return {name: kinds(run.trace, self.layers) for name, run in self.runs.items()}

    def _of(self, rung: str, column: str) -> float:
        return float(self.table[column].astype(float)[rung])

    @functools.cached_property
    def table(self) -> pd.DataFrame:
        """Every rung against the same bounds, by rung; see :func:`summary`."""
        samples = {name: run.values("step_ns") for name, run in self.runs.items()}
        other = self.listed
        if self.sheet and "fp8" in self.sheet.tflops:
            eight = operations(self.mode, self.first.parameters, "fp8")
            pairs = zip(self.listed, eight, strict=True)
            other = [a if a.unit == "fp32" or a.name == "attention" else b for a, b in pairs]
        found = summary(self.listed, samples, self.layers, self.sheet, self.ceilings, {"fp8": other})
        moved = sum(operation.bytes for operation in self.listed)
        return found.assign(**{"GB/s": moved / found["time_ns"]}).set_index("rung", drop=False)

    @functools.cached_property
    def steps(self) -> pd.DataFrame:
        """One row a change: what it could save at most, what it saved, and what came out."""
        rungs = RUNGS[self.mode]
        rows = [self._judged(name, str(rungs[name].base)) for name in self.runs if rungs[name].base in self.runs]
        return pd.DataFrame(rows).astype(dict.fromkeys(_COLUMNS_US, float))

    def _took_ns(self, run: Measurement) -> float:
        """What a layer took in a run."""
        return float(run.median("step_ns") or 0) / self.layers

    def _most_ns(self, name: str, base: str) -> float | None:
        """What a rung can save of its base at most, for one layer.

        None where no kernels were recorded, or nothing is known of the card.
        """
        if self.rates is None or not self.runs[base].trace.recorded("kernels"):
            return None
        most = _most_of_prefill if self.mode == "prefill" else _most_of_decode
        return most(name, self, self.rates, self._took_ns(self.runs[base]), self.spent[base])

    def _by_replay_ns(self, name: str, base: str) -> float | None:
        """What a rung that only launches otherwise saves of its base, played again.

        None for other rungs, which run other kernels: no replay predicts those.
        """
        if not name.startswith("graphed"):
            return None
        (row,) = whatif.summary(self.runs[base].trace, ["free-launches"])
        return (1 - 1 / float(row["speedup"])) * self._took_ns(self.runs[base]) if row["speedup"] else None

    def _judged(self, name: str, base: str) -> dict[str, Any]:
        # What was saved is what lies between the two series, from the later one to the earlier one.
        saved = noise.shift(self.runs[name].values("step_ns"), self.runs[base].values("step_ns"))
        most = self._most_ns(name, base)
        outcomes = {
            "no effect beyond the spread": not saved.excludes(0),
            "slower": saved.value < 0,
            "faster": most is None,
            "within": most is not None and (saved.low or 0) / self.layers <= most,
            "more than predicted": True,
        }
        figures = (most, self._by_replay_ns(name, base), saved.value / self.layers)
        said = {c: np.nan if v is None else v / 1e3 for c, v in zip(_COLUMNS_US, figures, strict=True)}
        outcome = next(words for words, holds in outcomes.items() if holds)
        return {"rung": name, "changes": base, **said, "outcome": outcome}

    @property
    def floors(self) -> dict[str, float]:
        """Least times of a layer in nanoseconds, by what they are the least of."""
        least = {"the list": list_ns} | ({"the floor": floor_ns} if self.mode == "prefill" else {})
        return {
            f"{of}, {label}": least[of](self.listed, roof)
            for label, roof in (("ceilings", self.ceilings), ("datasheet", self.sheet))
            if roof
            for of in least
        }

    @property
    def checked(self) -> pd.DataFrame:
        """Each rung against the same weights in float64, and the clock that it ran at where the driver says it."""
        rows = []
        for name, run in self.runs.items():
            row: dict[str, Any] = {"rung": name, "error": run.median("relative_error")}
            row |= {"largest": run.median("max_abs_error"), "rounding": run.median("rounding_error")}
            clock = run.median("sm_clock_mhz")
            if clock is not None:
                row |= {"clock (MHz)": clock, "power (W)": run.median("power_w")}
            if clock and self.card and name != "fp8":
                least = list_ns(self.listed, sol.datasheet(self.card, clock))
                row["share at its clock"] = least / self._of(name, "time_ns")
            rows.append(row | {"ran instead": run.parameters["instead"] or "-"})
        return pd.DataFrame(rows)

    @property
    def best(self) -> str:
        """The fastest rung that does the same arithmetic."""
        return str(self.table.drop(index="fp8", errors="ignore")["time_ns"].idxmin())

    @property
    def faster(self) -> bool:
        """Whether the fastest rung is faster than the first by more than noise."""
        first, last = self.first.values("step_ns"), self.runs[self.best].values("step_ns")
        return self.best != self.first.part and noise.shift(first, last).excludes(0)

    def said(self, unit: str) -> str:
        """Say what the rungs came to, in sentences.

        Parameters
        ----------
        unit : str
            What a time is of, such as ``a layer``.

        Returns
        -------
        str
        """
        if not self.comparable:
            return "the runs are not of the same machine; nothing to compare."
        first, faster = self.first.part, self.faster
        took, best = (self._of(rung, "time_ns") / 1e3 for rung in (first, self.best))
        outcomes = self.steps["outcome"].astype("str")

        def rungs(begin: str) -> str:
            return ", ".join(self.steps.loc[outcomes.str.startswith(begin), "rung"]) or "no rung"

        def share(rung: str) -> str:
            of_sheet = self._of(rung, "sol_datasheet")
            sheet = f" and {of_sheet:.0%} of the datasheet" if np.isfinite(of_sheet) else ""
            return f"{self._of(rung, 'sol_measured'):.0%} of the measured ceilings{sheet}"

        wrong = ", ".join(self.table.index[self.table["impossible"]])
        over = ", ".join(self.table.index[self.table["floor_measured"] > 1])
        times = f"{unit} goes from {took:,.1f} to {best:,.1f} µs ({self.best}), {took / best:.1f} times as fast."
        shares = f"from {share(first)} to {share(self.best)}" if faster else share(first)
        sentences = {
            times if faster else f"no rung beats the first ({took:,.1f} µs for {unit}) by more than the noise.": True,
            f"That is {shares}. Faster than predicted: {rungs('more')}.": not self.smoke,
            f"Changes without an effect of their own: {rungs('no effect')}.": True,
            f"Faster than the card can be: {wrong}.": wrong,
            f"These rungs beat the measured ceilings, so the ceilings were too low: {over}.": over,
        }
        return " ".join(sentence for sentence, holds in sentences.items() if holds)


def _most_of_prefill(name: str, climb: Climb, rates: Rates, took: float, spent: pd.Series) -> float:
    sizes, listed, whole = climb.first.parameters, climb.listed, float(spent.sum())
    by_kind = dict.fromkeys(KEPT, 0.0) | spent.to_dict()
    products, attention = by_kind["GEMM"], by_kind["attention"]
    other, idle = whole - products - attention, max(took - whole, 0.0)
    ideal = {operation.name: rates.bound_ns(operation) for operation in listed}
    floor = floor_ns(listed, rates)
    least_products, least_other = floor - ideal["attention"], list_ns(listed, rates) - floor
    filled = waves(sizes, climb.card.multiprocessors) if climb.card else {}

    def joined(n: int, k: int, alone: str, together: str) -> float:
        """What a product gains that fills its last wave better: it keeps its share of its bound."""
        lost = 1 / filled[alone] - 1 / filled[together] if filled else 0.0
        return rates.bound_ns(sol.gemm_cost(sizes["context"], n, k)) * lost * max(products / least_products, 1)

    d, f = sizes["hidden"], sizes["d_ff"]
    pairs = joined(2 * f, d, "gate or up", "gate and up")
    if name == "sdpa":  # what is launched is counted by going through the layer, which takes a while
        was, is_now = (launched_ns(as_written("prefill", rung, sizes), rates) for rung in ("naive", "sdpa"))
        return (was - is_now) * took / was
    most = {
        "fused": pairs + joined(3 * d, d, "q, k or v", "q, k, v"),
        "two-streams": pairs,
        **dict.fromkeys(("compiled", "triton"), other + idle),
        "epilogue": ideal["SwiGLU"] * max(other / least_other, 1),
        "autotuned": max(products - least_products, 0),
        **dict.fromkeys(("flash", "cudnn"), max(attention - ideal["attention"], 0)),
        "fp8": products * (1 - rates.tflops["bf16"] / rates.tflops.get("fp8", rates.tflops["bf16"])),
    }
    return most.get(name, idle)


def _most_of_decode(name: str, climb: Climb, rates: Rates, took: float, spent: pd.Series) -> float:
    was, is_now = (len(as_written("decode", rung, climb.first.parameters)) for rung in ("eager", "fused"))
    above = max(took - list_ns(climb.listed, rates), 0)
    most = {
        "fused": (was - is_now) * took / was,
        "one-mlp": above / 6,  # six kernels remain six, and one of them has less to do
        **dict.fromkeys(("graphed", "graphed-eager"), max(took - float(spent.sum()), 0)),
    }
    return most.get(name, above)  # a compiler also fuses small kernels, which take time for hardly a byte
