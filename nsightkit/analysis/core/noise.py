"""Tell a change from noise: intervals of changes, and the rule that ``diff`` and ``check`` share.

Noise has two sources. Steps of a run differ, and the interval of a change comes from their ranks (:func:`shift`).
Runs differ as well, each as a whole, and no number of steps shows by how much: where a side has several runs, their
spread widens the interval (:func:`between_runs`). :func:`judge` combines both.

Nothing here assumes normal step times, which have long tails. Samples count as independent: where consecutive steps
are alike (a drifting clock), true intervals are wider.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "CHANGED",
    "INCONCLUSIVE",
    "ONE_RUN",
    "WITHIN_NOISE",
    "Change",
    "Estimate",
    "between_runs",
    "judge",
    "rank_margin",
    "ratio",
    "shift",
    "thinned",
]

Float = NDArray[np.float64]

#: A change that is more than noise,
CHANGED = "changed"
#: one that is not,
WITHIN_NOISE = "within noise"
#: and one of which there are too few samples to tell.
INCONCLUSIVE = "inconclusive"
#: What to say where each side was measured once.
ONE_RUN = "One run per side: variation between runs is unknown."

#: Up to this many pairs the rank-sum distribution is counted; beyond, the normal approximation is as good.
_EXACT_PAIRS = 400
#: More samples than this are thinned before all pairs are formed; :func:`judge` is called for many rows.
_MOST_SAMPLES = 1000
_MOST_JUDGED = 200
#: Fewer samples per side lie apart by chance too often.
_ENOUGH = 4
#: The usual spread of runs of one program, relative to a run, and how many runs that prior counts for.
_USUAL = 0.007
_WORTH = 4
#: From this many runs beyond one per side, their spread replaces that of too few steps.
_ENOUGH_RUNS = 2
#: A run without its outliers looks steadier than it was: simulated pairs without a change were then called changed up
#: to 12% of the time at 95%. Dividing the chance of error by this gives 2 to 7%.
_LEFT_OUT = 3


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A figure and its confidence interval.

    Parameters
    ----------
    value : float
    low, high : float
        Ends of the interval; infinite with too few samples.
    """

    value: float
    low: float = -math.inf
    high: float = math.inf

    def excludes(self, value: float) -> bool:
        """Whether `value` lies outside the interval.

        Parameters
        ----------
        value : float
        """
        return not self.low <= value <= self.high


@dataclasses.dataclass(frozen=True)
class Change(Estimate):
    """A change, and how much of it noise explains.

    Parameters
    ----------
    value, low, high : float
        As for :class:`Estimate`.
    noise : float
        The smallest change that would count, up or down; infinite where none would.
    """

    noise: float = math.inf

    @property
    def word(self) -> str:
        """:data:`CHANGED`, :data:`WITHIN_NOISE` or :data:`INCONCLUSIVE`."""
        if math.isinf(self.noise):
            return INCONCLUSIVE
        if abs(self.value) > self.noise:
            return CHANGED
        return WITHIN_NOISE


def judge(
    before: Sequence[Float], after: Sequence[Float], confidence: float = 0.95, *, left_out: bool = False
) -> Change:
    """Tell a change from noise: the rule that ``diff`` and ``check`` share.

    A change counts where its interval excludes 0. That is the interval of the shift between the steps of all runs
    (:func:`shift`), widened by the spread of runs (:func:`between_runs`). However few the steps, a change also counts
    where the two sides lie further apart than either spreads, and than runs differ.

    Parameters
    ----------
    before, after : sequence of ndarray of float
        The samples of each run, such as one per step.
    confidence : float
    left_out : bool
        Whether outliers were left out; the rest looks steadier than the run was.

    Returns
    -------
    Change
    """
    first = thinned(np.concatenate(before), _MOST_JUDGED)
    second = thinned(np.concatenate(after), _MOST_JUDGED)
    error = (1 - confidence) / (_LEFT_OUT if left_out else 1)
    steps = shift(first, second, 1 - error)
    was = [np.median(samples) for samples in before]
    now = [np.median(samples) for samples in after]
    between = between_runs(was, now, confidence)
    low = steps.value - math.hypot(steps.value - steps.low, between)
    high = steps.value + math.hypot(steps.high - steps.value, between)
    if math.isinf(high) and len(was) + len(now) - 2 >= _ENOUGH_RUNS:
        low = steps.value - between
        high = steps.value + between
    noise = steps.value - low if steps.value >= 0 else high - steps.value
    if min(first.size, second.size) >= _ENOUGH:
        # By chance, one of two series of four lies above the other in 2 of 70 orders: ranks alone say little.
        spread = max(np.ptp(first), np.ptp(second))
        room = max(second.min() - first.max(), first.min() - second.max())
        apart = abs(steps.value) + float(spread - room)
        noise = min(noise, max(apart, between))
    return Change(steps.value, low, high, noise)


def shift(before: ArrayLike, after: ArrayLike, confidence: float = 0.95) -> Estimate:
    """Estimate what was added from one series to the other, as the median of all pairwise differences.

    The estimate of Hodges and Lehmann with the interval of the rank-sum test (Hollander and Wolfe, Nonparametric
    Statistical Methods, 2nd ed., sections 4.2 and 4.3): an interval without 0 is a change.

    Parameters
    ----------
    before, after : array_like of float
    confidence : float

    Returns
    -------
    Estimate
        Without an interval where there are too few samples (fewer than four per side at 95%).
    """
    first = thinned(np.asarray(before, np.float64))
    second = thinned(np.asarray(after, np.float64))
    differences = np.sort(np.subtract.outer(second, first), axis=None)
    middle = float(np.median(differences))
    left_out = rank_margin(len(first), len(second), (1 - confidence) / 2)
    if not left_out:
        return Estimate(middle)
    return Estimate(middle, float(differences[left_out - 1]), float(differences[-left_out]))


def ratio(before: ArrayLike, after: ArrayLike, confidence: float = 0.95) -> Estimate:
    """Estimate the ratio of one series to the other: :func:`shift` of the logarithms.

    Parameters
    ----------
    before, after : array_like of float
        Above 0.
    confidence : float

    Returns
    -------
    Estimate
        After divided by before; an unchanged ratio is 1.
    """
    logs = shift(np.log(before), np.log(after), confidence)
    return Estimate(math.exp(logs.value), math.exp(logs.low), math.exp(logs.high))


def between_runs(before: ArrayLike, after: ArrayLike, confidence: float = 0.95) -> float:
    """Estimate how far two groups of runs may lie apart without any change.

    Steps of one run share its clock, its placement in memory and its neighbours, so they do not show how another run
    would have come out. The spread of runs is estimated from both groups and, because there are few, drawn towards
    the usual one: a moderated t statistic (Smyth, Statistical Applications in Genetics and Molecular Biology 3, 2004,
    section 3.2, with a prior of four degrees of freedom). The usual spread is a judgement.

    Parameters
    ----------
    before, after : array_like of float
        One figure per run, from 0 on.
    confidence : float

    Returns
    -------
    float
        Half the width of an interval for the difference of the groups' means; 0 with one run per side, which show
        nothing of others.
    """
    first = np.asarray(before, np.float64)
    second = np.asarray(after, np.float64)
    known = len(first) + len(second) - 2
    if not known:
        return 0.0
    usual = _USUAL * max(first.max(), second.max())
    squares = len(first) * first.var() + len(second) * second.var()
    spread = math.sqrt((_WORTH * usual**2 + squares) / (_WORTH + known))
    of_means = spread * math.sqrt(1 / len(first) + 1 / len(second))
    quantile = _student_quantile((1 - confidence) / 2, _WORTH + known)
    return quantile * of_means


def _student_quantile(tail: float, degrees: int) -> float:
    """Quantile of Student's t, to within 2% from five degrees of freedom on (Gaver and Kafadar, 1984)."""
    z = NormalDist().inv_cdf(1 - tail)
    growth = (degrees - 1.5) / (degrees - 1) ** 2
    return math.sqrt(degrees * math.expm1(growth * z**2))


def thinned(values: Float, most: int = _MOST_SAMPLES) -> Float:
    """Choose some of many samples, evenly by rank, the smallest and the largest among them.

    Parameters
    ----------
    values : ndarray of float
    most : int
        At least 2.

    Returns
    -------
    ndarray of float
        Sorted where some were left out; otherwise as given.
    """
    if len(values) <= most:
        return values
    ordered = np.sort(values)
    return ordered[np.linspace(0, len(ordered) - 1, most).round().astype(np.intp)]


@functools.lru_cache(maxsize=256)
def rank_margin(n: int, m: int, tail: float) -> int:
    """Count the pairwise differences to leave out at each end of an interval; 0 where not even one may be.

    Parameters
    ----------
    n, m : int
        Samples of each series.
    tail : float
        The probability beyond each end.
    """
    if n * m > _EXACT_PAIRS:
        deviation = math.sqrt(n * m * (n + m + 1) / 12)
        margin = n * m / 2 - NormalDist().inv_cdf(1 - tail) * deviation
        return max(math.floor(margin), 0)
    ways = _rank_sums(n, m)
    share = np.cumsum(ways) / ways.sum()
    return int(np.searchsorted(share, tail, side="right"))


@functools.cache
def _rank_sums(n: int, m: int) -> Float:
    """Count the orders of two series that give each rank sum: the largest sample is of one series or of the other."""
    ways = np.zeros(n * m + 1)
    if not n or not m:
        return ways + 1
    ways[m:] += _rank_sums(n - 1, m)
    ways[: n * (m - 1) + 1] += _rank_sums(n, m - 1)
    return ways
