"""The Nsight Compute metrics we use: our name, NVIDIA's, its unit, what it means and on which chips it exists.

``ncu_metrics.toml`` alone lists the metrics that analyses look at. Profiling guides pass on names that
exist on no chip, and ``ncu`` ends a run on the first one; these were checked with ``ncu --query-metrics --chips``
(2024.1) for Volta, Turing, Ampere, Ada and Hopper, and the tests check them again if ``ncu`` is installed.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import msgspec

from nsightkit.text import read_toml

#: Chips the names were checked for, oldest first: V100, T4, A100, RTX 30, RTX 40, H100 and H200.
CHIPS = ("gv100", "tu102", "ga100", "ga102", "ad102", "gh100")


@dataclasses.dataclass(frozen=True)
class Metric:
    """One metric.

    Parameters
    ----------
    name : str
        Ours, a column of ``launches`` in :class:`nsightkit.trace.ncu.Report`; ends in its unit.
    nvidia : tuple of str
        NVIDIA's names. The first that a report holds counts.
    unit : str
        Base unit, as :func:`base_unit` spells it.
    meaning : str
        What the number says.
    labels : tuple of str
        What the details page of ``ncu`` calls it, by version. Empty where the page calls several metrics the same (FMA,
        ALU: by cycles and by instructions).
    chips : tuple of str
        Where the first of NVIDIA's names exists.
    listed : bool
        Whether ``ncu --query-metrics`` lists it. Launch and device attributes are collected without being listed.
    """

    name: str
    nvidia: tuple[str, ...]
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()
    chips: tuple[str, ...] = CHIPS
    listed: bool = True


@dataclasses.dataclass(frozen=True)
class Stall:
    """One reason why a warp did not issue in a cycle, as NVIDIA's Kernel Profiling Guide defines it.

    Parameters
    ----------
    reason : str
        As NVIDIA's metric names spell it; the metric ``stall_…`` counts warps in this state per issued instruction, and
        all of these sum to the latency between two instructions.
    meaning : str
        What the warp waited for.
    sampled : str
        NVIDIA's name of the samples of the program counter that found a warp in this state, where reports hold them
        instead.
    next_step : str
        What to try when it dominates; empty where it is not a stall or there is nothing general to say.
    """

    reason: str
    meaning: str
    sampled: str
    next_step: str = ""


_TABLE = read_toml(__file__, "ncu_metrics")
#: All metrics that have a name of ours; and the reasons why a warp does not issue.
METRICS = msgspec.convert(_TABLE["metric"], tuple[Metric, ...])
STALLS = msgspec.convert(_TABLE["stall"], tuple[Stall, ...])


_FACTOR_BY_PREFIX = {"K": 1e3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
#: Nanoseconds of a second with each prefix. The two letters for micro are the micro sign and the Greek mu.
_NS_BY_PREFIX = {"n": 1.0, "u": 1e3, "µ": 1e3, "μ": 1e3, "m": 1e6, "": 1e9}
_TIME = re.compile(r"([nuµμm]?)(?:seconds?|sec|s)")
_PREFIX_AND_UNIT = re.compile(
    r"([KkMGTP]?)((?i:bytes?|b|hz|cycles?|sectors?|inst|insts|instructions?|warps?|threads?|requests?|blocks?"
    r"|samples?|passes|pass|wavefronts?|registers?|branches|ops?|flops?))"
)
_SINGULAR = {"b": "byte", "bytes": "byte", "cycles": "cycle", "sectors": "sector", "warps": "warp", "threads": "thread"}


@functools.cache
def base_unit(unit: str) -> tuple[str, float]:
    """Return the base unit of a unit, as any version of ``ncu`` writes it, and the factor to multiply values by.

    ``ncu --csv`` scales each column to its own magnitude unless told ``--print-units base``, despite its help:
    one report's DRAM clock is in cycle/nsecond, another's in cycle/usecond.

    Parameters
    ----------
    unit : str
        Such as ``usecond``, ``us``, ``Gbyte/second``, ``cycle/nsecond``, ``Kbyte/block``; prefixes are decimal.

    Returns
    -------
    str
        ``ns``, ``byte``, ``byte/s``, ``hz``, ``%``, …; an unknown unit as it is.
    float
        Such as 1000 for ``us``; 1 for a base unit.
    """
    numerator, slash, denominator = unit.strip().partition("/")
    time = _TIME.fullmatch(numerator)
    if time and not slash:
        return "ns", _NS_BY_PREFIX[time[1]]
    factor = 1.0
    if counted := _PREFIX_AND_UNIT.fullmatch(numerator):
        numerator = _SINGULAR.get(counted[2].lower(), counted[2].lower())
        factor = _FACTOR_BY_PREFIX.get(counted[1], 1.0)
    if per_time := _TIME.fullmatch(denominator):
        denominator = "s"
        factor *= 1e9 / _NS_BY_PREFIX[per_time[1]]
    base = f"{numerator}{slash}{denominator}"
    if base == "cycle/s":
        base = "hz"
    return base, factor
