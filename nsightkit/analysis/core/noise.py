"""How sure a figure is when it was measured several times: intervals of medians, and of what changed.

``diff`` and ``check`` share one rule. Noise has two sources. *Steps of a run* differ, and the interval of a change
comes from their order (:func:`shift`). *Runs* differ too, each as a whole, and no number of steps tells by how much:
where a side has several, what they differ by widens the interval (:func:`between_runs`, :func:`widened`). With one run
on each side that is not known, and whoever judges says so (:data:`ONE_RUN`): no more can be said then than that a
change exceeds what steps differ by inside the runs.

Nothing here assumes a normal distribution: times of steps have long tails. Samples are taken as independent of
each other; where consecutive steps are alike (a clock that drifts), true intervals are wider.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from nsightkit.errors import UsageError

__all__ = [
    "ONE_RUN",
    "Estimate",
    "apart",
    "between_runs",
    "median",
    "missing_distance",
    "rank_margin",
    "ratio",
    "shift",
    "student_quantile",
    "thinned",
    "widened",
]

#: What to say where each side was measured in one run.
ONE_RUN = "One run on each side: differences between runs of the same program are not known."

#: Up to so many pairs the distribution of the rank sum is counted out; beyond, it is a normal one to many digits.
_EXACT_PAIRS = 2500
#: Samples beyond this are thinned evenly before all pairs of them are formed.
_MOST_SAMPLES = 1000
#: So many samples a side have an interval of 95 %; fewer lie apart by chance too often.
_ENOUGH = 4
#: What runs of one program differ by, as a standard deviation of logarithms, and how many runs that counts for.
_USUAL, _WORTH = 0.007, 4
#: Points of a sum for an integral; so many give all digits for some thousand degrees of freedom.
_NODES = 100


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A figure and the interval it lies in.

    Parameters
    ----------
    value : float
    low, high : float, optional
        Ends of the confidence interval; None where there are too few samples for one.
    counts : tuple of int
        How many samples it was taken from, of each series.
    """

    value: float
    low: float | None
    high: float | None
    counts: tuple[int, ...]

    def excludes(self, value: float) -> bool:
        """Whether there is an interval, and `value` lies outside it.

        Parameters
        ----------
        value : float
        """
        return self.low is not None and self.high is not None and not self.low <= value <= self.high


def median(samples: npt.ArrayLike, confidence: float = 0.95) -> Estimate:
    """Take the median and its interval from the order of the samples.

    The interval runs from the k-th smallest to the k-th largest sample, with k from the binomial distribution
    (Conover, Practical Nonparametric Statistics, 3rd ed., section 3.2).

    Parameters
    ----------
    samples : array_like of float
        At least one.
    confidence : float

    Returns
    -------
    Estimate
        With fewer than six samples there is no interval of 95 %.

    Raises
    ------
    UsageError
        No sample, one that is not finite, or a confidence that is not between 0 and 1.
    """
    values = np.sort(_checked(samples, confidence))
    n = len(values)
    # In logarithms: the binomial coefficients of a thousand samples exceed a float.
    chances = [
        math.exp(math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) - n * math.log(2))
        for i in range(n // 2)
    ]
    k = int(np.searchsorted(np.cumsum(chances), (1 - confidence) / 2, side="right"))
    low, high = (float(values[k - 1]), float(values[n - k])) if k else (None, None)
    return Estimate(float(np.median(values)), low, high, (n,))


def shift(before: npt.ArrayLike, after: npt.ArrayLike, confidence: float = 0.95) -> Estimate:
    """Take what was added from one series to the other, as the median of all pairs' differences.

    The estimate of Hodges and Lehmann with the interval that goes with the rank-sum test (Hollander and Wolfe,
    Nonparametric Statistical Methods, 2nd ed., sections 4.2 and 4.3): an interval without 0 is a significant change.

    Parameters
    ----------
    before, after : array_like of float
    confidence : float

    Returns
    -------
    Estimate
        Without an interval where there are too few samples (less than four on each side, at 95 %).

    Raises
    ------
    UsageError
        As for :func:`median`.
    """
    first, second = thinned(_checked(before, confidence)), thinned(_checked(after, confidence))
    differences = np.sort((second[:, None] - first[None, :]).ravel())
    c = rank_margin(len(first), len(second), (1 - confidence) / 2)
    low, high = (float(differences[c - 1]), float(differences[-c])) if c else (None, None)
    return Estimate(float(np.median(differences)), low, high, (np.size(before), np.size(after)))


def ratio(before: npt.ArrayLike, after: npt.ArrayLike, confidence: float = 0.95) -> Estimate:
    """Take how many times one series is of the other: :func:`shift` of the logarithms.

    Parameters
    ----------
    before, after : array_like of float
        Above 0.
    confidence : float

    Returns
    -------
    Estimate
        After divided by before; 1 is not a change.

    Raises
    ------
    UsageError
        As for :func:`median`, or a sample that is not above 0.
    """
    first, second = _checked(before, confidence), _checked(after, confidence)
    if first.min() <= 0 or second.min() <= 0:
        raise UsageError("a ratio needs samples above 0; use the difference")
    found = shift(np.log(first), np.log(second), confidence)
    low, high = (None if end is None else math.exp(end) for end in (found.low, found.high))
    return Estimate(math.exp(found.value), low, high, found.counts)


def between_runs(
    before: npt.ArrayLike, after: npt.ArrayLike, confidence: float = 0.95, *, usual: float = _USUAL
) -> float | None:
    """Say how far two groups of runs may lie apart though nothing changed.

    Steps of one run share what that run was given: a clock, a placement in memory, neighbours. However many there
    are, they do not tell how another run would have come out; only other runs do. Their spread is estimated from
    both groups and, because there are few, drawn towards what is usual: a moderated t statistic (Smyth, Statistical
    Applications in Genetics and Molecular Biology 3, 2004, section 3.2, with a prior of four degrees of freedom).
    The usual spread is a judgement.

    Parameters
    ----------
    before, after : array_like of float
        A figure of each run, such as the logarithm of its median.
    confidence : float
    usual : float
        Standard deviation of such figures, where there is nothing to estimate it from.

    Returns
    -------
    float or None
        Half the width of an interval for the difference of the groups' means; None for one run each, which say
        nothing about other runs.

    Raises
    ------
    UsageError
        As for :func:`median`.
    """
    first, second = _checked(before, confidence), _checked(after, confidence)
    known = len(first) + len(second) - 2
    if not known:
        return None
    squares = sum(float(((group - group.mean()) ** 2).sum()) for group in (first, second))
    spread = math.sqrt((_WORTH * usual**2 + squares) / (_WORTH + known))
    return student_quantile((1 - confidence) / 2, _WORTH + known) * spread * math.sqrt(1 / len(first) + 1 / len(second))


def widened(steps: Estimate, between: float | None) -> Estimate:
    """Widen the interval of a change by what runs differ by.

    Parameters
    ----------
    steps : Estimate
        From :func:`shift`: what the steps inside the runs say.
    between : float, optional
        From :func:`between_runs`.

    Returns
    -------
    Estimate
        Each arm of the interval is the root of the sum of squares of both. The same where nothing is known of other
        runs, or there is no interval.
    """
    if between is None or steps.low is None or steps.high is None:
        return steps
    down, up = (math.hypot(arm, between) for arm in (steps.value - steps.low, steps.high - steps.value))
    return dataclasses.replace(steps, low=steps.value - down, high=steps.value + up)


def apart(before: npt.ArrayLike, after: npt.ArrayLike) -> bool:
    """Whether two series cannot be taken for one: further apart than either spreads.

    A cause that was there in each step and is gone needs no ranks to say so. The ranks of four samples and five say
    less: by chance, one series lies above the other in 2 of 126 orders, and among many rows some do.

    Parameters
    ----------
    before, after : array_like of float

    Returns
    -------
    bool
        Each sample of one series lies above each of the other, and between the two there is more room than either
        takes. False for fewer than four samples on a side.
    """
    return any(lacking < 0 for lacking in missing_distance(before, after))


def missing_distance(before: npt.ArrayLike, after: npt.ArrayLike) -> tuple[float, float]:
    """Say how much further up, or down, the second series would have to lie to be :func:`apart` from the first.

    Parameters
    ----------
    before, after : array_like of float

    Returns
    -------
    up, down : float
        Below 0 where it is; infinite for fewer than four samples on a side.
    """
    first, second = (np.asarray(side, dtype=np.float64) for side in (before, after))
    if min(first.size, second.size) < _ENOUGH:
        return math.inf, math.inf
    spread = max(np.ptp(first), np.ptp(second))
    return float(spread - (second.min() - first.max())), float(spread - (first.min() - second.max()))


def thinned(values: npt.NDArray[np.float64], most: int = _MOST_SAMPLES) -> npt.NDArray[np.float64]:
    """Take some of many samples, evenly over their order, the smallest and the largest among them.

    Parameters
    ----------
    values : ndarray of float
    most : int
        At least 2.

    Returns
    -------
    ndarray of float
        In order where some were left out; else as given.
    """
    if len(values) <= most:
        return values
    ordered = np.sort(values)
    return ordered[np.linspace(0, len(ordered) - 1, most).round().astype(np.intp)]


def _checked(samples: npt.ArrayLike, confidence: float) -> npt.NDArray[np.float64]:
    values = np.asarray(samples, dtype=np.float64).ravel()
    if not 0 < confidence < 1:
        raise UsageError(f"a confidence lies between 0 and 1, not {confidence:g}")
    if not len(values) or not np.isfinite(values).all():
        raise UsageError("an interval needs samples, and finite ones")
    return values


@functools.lru_cache(maxsize=256)
def rank_margin(n: int, m: int, tail: float) -> int:
    """Count the differences of pairs to leave out at each end of an interval; 0 where not even one may be.

    Parameters
    ----------
    n, m : int
        Samples of each series.
    tail : float
        The probability beyond each end.
    """
    if n * m > _EXACT_PAIRS:
        deviation = math.sqrt(n * m * (n + m + 1) / 12)
        return max(math.floor(n * m / 2 - NormalDist().inv_cdf(1 - tail) * deviation), 0)
    # Ways to get a rank sum: coefficients of the Gaussian binomial, factor by factor.
    ways = np.zeros(n * m + 1)
    ways[0] = 1.0
    for i in range(1, n + 1):
        step = m + i
        up = ways.copy()
        up[step:] -= ways[:-step] if step <= n * m else 0
        for start in range(i):
            up[start::i] = np.cumsum(up[start::i])
        ways = up
    share = np.cumsum(ways) / ways.sum()
    return int(np.searchsorted(share, tail, side="right"))


@functools.lru_cache(maxsize=256)
def student_quantile(tail: float, degrees: int) -> float:
    """Give the quantile of Student's t that a share of the distribution lies beyond.

    Parameters
    ----------
    tail : float
    degrees : int
        Of freedom.
    """
    # |t| < sqrt(degrees) tan(angle) is as probable as the integral of cos(x) ** (degrees - 1) up to the angle, as a
    # share of that up to a right angle: t substituted in its density (Abramowitz and Stegun, 26.7.1).
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)

    def up_to(angle: float) -> float:
        return float(angle * (weights @ np.cos(angle * (nodes + 1) / 2) ** (degrees - 1)))

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if 1 - up_to(angle) / up_to(math.pi / 2) > 2 * tail else (low, angle)
    return math.sqrt(degrees) * math.tan(low)
