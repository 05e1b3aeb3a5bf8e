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
_MOST_EXACT_PAIRS = 400
#: More samples than this per side are thinned before all pairs are formed: memory grows with their product.
_MOST_SAMPLES_TO_PAIR = 1000
#: The same in :func:`judge`, which is called for many rows: 200 keep it fast. Fewer samples widen the
#: interval, so at most a tiny change of a very long run counts as noise.
_MOST_SAMPLES_TO_JUDGE = 200
#: With fewer samples per side, all of one side lie above the other's by chance too often.
_LEAST_SAMPLES = 4
#: The usual standard deviation of runs of one program, as a share of a run's time,
_PRIOR_SPREAD = 0.007
#: and the degrees of freedom that this prior counts for.
_PRIOR_FREEDOM = 4
#: With this many runs beyond one per side, the spread of runs alone gives the interval where there are too few steps.
_LEAST_FREEDOM = 2
#: A run without its outliers looks steadier than it was: simulated pairs without a change were then called changed up
#: to 12% of the time at 95%. Dividing the chance of error by this gives 2 to 7%.
_LEFT_OUT_DIVISOR = 3


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
        """Check whether `value` lies outside the interval.

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
    (:func:`shift`), widened by the spread of runs (:func:`between_runs`). From four steps per side on, a change also
    counts where the two sides lie further apart than either spreads, and than runs differ.

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
    before_steps = thinned(np.concatenate(before), _MOST_SAMPLES_TO_JUDGE)
    after_steps = thinned(np.concatenate(after), _MOST_SAMPLES_TO_JUDGE)
    chance_of_error = (1 - confidence) / (_LEFT_OUT_DIVISOR if left_out else 1)
    steps = shift(before_steps, after_steps, confidence=1 - chance_of_error)
    before_medians = [np.median(samples) for samples in before]
    after_medians = [np.median(samples) for samples in after]
    between = between_runs(before_medians, after_medians, confidence)
    # Two independent sources of noise: their half widths add up as squares do.
    low = steps.value - math.hypot(steps.value - steps.low, between)
    high = steps.value + math.hypot(steps.high - steps.value, between)
    # With too few steps for an interval, several runs give one alone.
    if math.isinf(high) and len(before) + len(after) - 2 >= _LEAST_FREEDOM:
        low = steps.value - between
        high = steps.value + between
    # The half of the interval towards 0: a change beyond it has an interval that excludes 0.
    noise = steps.value - low if steps.value >= 0 else high - steps.value
    if min(before_steps.size, after_steps.size) >= _LEAST_SAMPLES:
        # By chance, one of two series of four lies above the other in 2 of 70 orders: ranks alone say little. So the
        # distance between the two must exceed the spread within each; only then `needed` is less than the change.
        spread = max(np.ptp(before_steps), np.ptp(after_steps))
        distance = max(after_steps.min() - before_steps.max(), before_steps.min() - after_steps.max())
        needed = abs(steps.value) + float(spread - distance)
        noise = min(noise, max(needed, between))
    return Change(steps.value, low, high, noise)


def shift(before: ArrayLike, after: ArrayLike, confidence: float = 0.95) -> Estimate:
    """Estimate what was added from `before` to `after`, as the median of all pairwise differences.

    The estimate of Hodges and Lehmann with the interval of the rank-sum test (Hollander and Wolfe, Nonparametric
    Statistical Methods, 2nd ed., sections 4.2 and 4.3): an interval without 0 is a change.

    Parameters
    ----------
    before, after : array_like of float
    confidence : float

    Returns
    -------
    Estimate
        Its interval is infinite where there are too few samples (fewer than four per side at 95%).
    """
    # All pairs are formed, in memory: thin long series first.
    before_samples = thinned(np.asarray(before, np.float64))
    after_samples = thinned(np.asarray(after, np.float64))
    differences = np.sort(np.subtract.outer(after_samples, before_samples), axis=None)
    median = float(np.median(differences))
    margin = rank_margin(len(before_samples), len(after_samples), (1 - confidence) / 2)
    if not margin:
        return Estimate(median)
    return Estimate(median, low=float(differences[margin - 1]), high=float(differences[-margin]))


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
    section 3.2, with a prior of four degrees of freedom). The usual spread is our judgement, not a measurement.

    Parameters
    ----------
    before, after : array_like of float
        One figure per run, 0 or more.
    confidence : float

    Returns
    -------
    float
        Half the width of an interval for the difference of the groups' means. 0 with one run per side, where no spread
        of runs is known: the noise of the steps then decides alone, and the answer carries :data:`ONE_RUN`.
    """
    before_runs = np.asarray(before, np.float64)
    after_runs = np.asarray(after, np.float64)
    freedom = len(before_runs) + len(after_runs) - 2
    if not freedom:
        return 0.0
    prior_spread = _PRIOR_SPREAD * max(before_runs.max(), after_runs.max())
    sum_of_squares = len(before_runs) * before_runs.var() + len(after_runs) * after_runs.var()
    spread = math.sqrt((_PRIOR_FREEDOM * prior_spread**2 + sum_of_squares) / (_PRIOR_FREEDOM + freedom))
    standard_error = spread * math.sqrt(1 / len(before_runs) + 1 / len(after_runs))
    return _student_upper_quantile((1 - confidence) / 2, _PRIOR_FREEDOM + freedom) * standard_error


def _student_upper_quantile(tail: float, freedom: int) -> float:
    """Compute the value that Student's t exceeds with probability `tail`, below 0.5.

    To within 2% from five degrees of freedom on (Gaver and Kafadar, 1984).
    """
    z = NormalDist().inv_cdf(1 - tail)
    growth = (freedom - 1.5) / (freedom - 1) ** 2
    return math.sqrt(freedom * math.expm1(growth * z**2))


def thinned(values: Float, most: int = _MOST_SAMPLES_TO_PAIR) -> Float:
    """Keep at most `most` samples, evenly spaced by rank, the smallest and the largest among them.

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
    """Find how far from either end of the sorted pairwise differences a confidence interval ends.

    Parameters
    ----------
    n, m : int
        Samples of each series.
    tail : float
        The probability beyond each end.

    Returns
    -------
    int
        The interval ends with the difference at this place, counted from 1; 0 where there are too few samples.
    """
    if n * m > _MOST_EXACT_PAIRS:
        deviation = math.sqrt(n * m * (n + m + 1) / 12)
        margin = n * m / 2 - NormalDist().inv_cdf(1 - tail) * deviation
        return max(math.floor(margin), 0)
    orders = _count_orders_by_larger_pairs(n, m)
    probability = np.cumsum(orders) / orders.sum()
    return int(np.searchsorted(probability, tail, side="right"))


@functools.cache
def _count_orders_by_larger_pairs(n: int, m: int) -> Float:
    """Count the orders in which n and m samples may come, by how many of the n * m pairs the first series wins.

    A pair has one sample of each series, and the larger one wins. Without a change all orders are as likely, so these
    counts are the distribution of the rank-sum test (Mann and Whitney's U).
    """
    orders = np.zeros(n * m + 1)
    if not n or not m:
        return orders + 1
    # The largest sample of all is of the first series and larger than all m of the second, or it is of the second.
    orders[m:] += _count_orders_by_larger_pairs(n - 1, m)
    orders[: n * (m - 1) + 1] += _count_orders_by_larger_pairs(n, m - 1)
    return orders
