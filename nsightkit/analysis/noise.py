"""How sure a figure is when it was measured several times: intervals of medians, and of what changed.

Nothing here assumes a normal distribution: times of steps have long tails. Samples are taken as independent of
each other; where consecutive steps are alike (a clock that drifts), true intervals are wider.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import numpy.typing as npt

from nsightkit.errors import UsageError

__all__ = ["Estimate", "median", "ratio", "shift"]

#: Up to so many pairs the distribution of the rank sum is counted out; beyond, it is a normal one to many digits.
_EXACT_PAIRS = 2500
#: Samples beyond this are thinned evenly before all pairs of them are formed.
_MOST_SAMPLES = 1000


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
    n, tail, k = len(values), (1 - confidence) / 2, 0
    # In logarithms: the binomial coefficients of a thousand samples exceed a float.
    below = 0.0
    for i in range(n // 2):
        below += math.exp(math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) - n * math.log(2))
        if below > tail:
            break
        k = i + 1
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
    first, second = _thinned(_checked(before, confidence)), _thinned(_checked(after, confidence))
    differences = np.sort((second[:, None] - first[None, :]).ravel())
    c = _critical(len(first), len(second), (1 - confidence) / 2)
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
        After divided by before; 1 is no change.

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


def _checked(samples: npt.ArrayLike, confidence: float) -> npt.NDArray[np.float64]:
    values = np.asarray(samples, dtype=np.float64).ravel()
    if not 0 < confidence < 1:
        raise UsageError(f"a confidence lies between 0 and 1, not {confidence:g}")
    if not len(values) or not np.isfinite(values).all():
        raise UsageError("an interval needs samples, and finite ones")
    return values


def _thinned(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    if len(values) <= _MOST_SAMPLES:
        return values
    ordered = np.sort(values)
    return ordered[np.linspace(0, len(ordered) - 1, _MOST_SAMPLES).round().astype(np.intp)]


@functools.lru_cache(maxsize=256)
def _critical(n: int, m: int, tail: float) -> int:
    """How many of the pairs' differences to leave out at each end; 0 where not even one may be."""
    if n * m > _EXACT_PAIRS:
        deviation = math.sqrt(n * m * (n + m + 1) / 12)
        return max(math.floor(n * m / 2 - _quantile(1 - tail) * deviation), 0)
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


def _quantile(probability: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(probability)
