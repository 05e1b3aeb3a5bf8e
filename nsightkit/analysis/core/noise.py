"""Tell a change from noise: intervals of medians and of changes, and the one rule that ``diff`` and ``check`` share.

Noise has two sources. *Steps of a run* differ, and the interval of a change comes from their order (:func:`shift`).
*Runs* differ too, each as a whole, and no number of steps shows by how much: where a side has several runs, their
spread widens the interval (:func:`between_runs`). :func:`judge` puts both together.

Nothing here assumes a normal distribution: step times have long tails. Samples count as independent of each other;
where consecutive steps are alike (a clock that drifts), true intervals are wider.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from nsightkit.errors import UsageError

__all__ = [
    "CHANGED",
    "INCONCLUSIVE",
    "ONE_RUN",
    "WITHIN_NOISE",
    "Change",
    "Estimate",
    "apart",
    "between_runs",
    "judge",
    "median",
    "rank_margin",
    "ratio",
    "shift",
    "student_quantile",
    "thinned",
]

Float = npt.NDArray[np.float64]

#: The three words for a change.
CHANGED, WITHIN_NOISE, INCONCLUSIVE = "changed", "within noise", "inconclusive"
#: What to say where each side was measured in one run.
ONE_RUN = "One run on each side: differences between runs of the same program are not known."

#: Up to so many pairs the distribution of the rank sum is counted out; beyond, it is a normal one to many digits.
_EXACT_PAIRS = 2500
#: Samples beyond this are thinned evenly before all pairs of them are formed; a judge has many rows to look at.
_MOST_SAMPLES, _MOST_JUDGED = 1000, 200
#: So many samples a side have an interval of 95 %; fewer lie apart by chance too often.
_ENOUGH = 4
#: What runs of one program differ by, relative to a run, and how many runs that counts for.
_USUAL, _WORTH = 0.007, 4
#: Runs beyond one a side from which their spread stands for that of steps, where there are too few steps.
_ENOUGH_RUNS = 2
#: Without the steps that stand out a run looks steadier than it was. At 95 %, up to 12 % of simulated pairs without a
#: change were then called changed; with the chance of error divided by this, 2 to 7 %.
_LEFT_OUT = 3
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


@dataclasses.dataclass(frozen=True)
class Change:
    """A change, and what noise explains of it.

    Parameters
    ----------
    value : float
    low, high : float, optional
        Ends of its interval; None where there are too few samples for one.
    between : float, optional
        The difference to expect between groups of so many runs; None where each side was run once.
    noise : float, optional
        The smallest change that would count, up or down; None where none would.
    """

    value: float
    low: float | None = None
    high: float | None = None
    between: float | None = None
    noise: float | None = None

    @property
    def word(self) -> str:
        """:data:`CHANGED`, :data:`WITHIN_NOISE` or :data:`INCONCLUSIVE`."""
        if self.noise is None:
            return INCONCLUSIVE
        return CHANGED if abs(self.value) > self.noise else WITHIN_NOISE


def judge(
    before: Sequence[Float], after: Sequence[Float], confidence: float = 0.95, *, left_out: bool = False
) -> Change:
    """Tell a change from noise: the rule that ``diff`` and ``check`` share.

    A change counts where its interval excludes 0. The interval is that of the shift between the steps of all runs
    (:func:`shift`), widened by what runs differ by (:func:`between_runs`). A change also counts, in whatever few
    steps, where the two sides lie further apart than either spreads (:func:`apart`), and than runs differ.

    Parameters
    ----------
    before, after : sequence of ndarray of float
        The samples of each run, such as a step each.
    confidence : float
    left_out : bool
        Whether steps that stand out were left out; the rest looks steadier than the run was.

    Returns
    -------
    Change

    Raises
    ------
    UsageError
        As for :func:`median`.
    """
    first = thinned(np.concatenate(before), _MOST_JUDGED)
    second = thinned(np.concatenate(after), _MOST_JUDGED)
    error = (1 - confidence) / (_LEFT_OUT if left_out else 1)
    steps = shift(first, second, 1 - error)
    between = _between(before, after, confidence)
    low, high = steps.low, steps.high
    if low is not None and high is not None and between is not None:
        low = steps.value - math.hypot(steps.value - low, between)
        high = steps.value + math.hypot(high - steps.value, between)
    elif between is not None and len(before) + len(after) - 2 >= _ENOUGH_RUNS:
        low, high = steps.value - between, steps.value + between
    noise = max(abs(steps.value) + _missing_distance(first, second), between or 0.0)
    if low is not None and high is not None:
        noise = min(noise, steps.value - low if steps.value >= 0 else high - steps.value)
    return Change(steps.value, low, high, between, None if math.isinf(noise) else noise)


def _between(before: Sequence[Float], after: Sequence[Float], confidence: float) -> float | None:
    """What groups of so many runs differ by, in the unit of their samples."""
    first = np.array([np.median(samples) for samples in before])
    second = np.array([np.median(samples) for samples in after])
    level = float(max(first.max(), second.max()))
    if not level:
        return None
    relative = between_runs(first / level, second / level, confidence)
    return None if relative is None else relative * level


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
    chance = 0.0
    k = 0
    while k < n // 2:
        # In logarithms: the binomial coefficients of a thousand samples exceed a float.
        ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        chance += math.exp(ways - n * math.log(2))
        if chance > (1 - confidence) / 2:
            break
        k += 1
    middle = float(np.median(values))
    if not k:
        return Estimate(middle, None, None, (n,))
    return Estimate(middle, float(values[k - 1]), float(values[n - k]), (n,))


def shift(before: npt.ArrayLike, after: npt.ArrayLike, confidence: float = 0.95) -> Estimate:
    """Take what was added from one series to the other, as the median of all pairs' differences.

    The estimate of Hodges and Lehmann with the interval that goes with the rank-sum test (Hollander and Wolfe,
    Nonparametric Statistical Methods, 2nd ed., sections 4.2 and 4.3): an interval without 0 is a change.

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
    counts = (np.size(before), np.size(after))
    differences = np.sort((second[:, None] - first[None, :]).ravel())
    middle = float(np.median(differences))
    margin = rank_margin(len(first), len(second), (1 - confidence) / 2)
    if not margin:
        return Estimate(middle, None, None, counts)
    return Estimate(middle, float(differences[margin - 1]), float(differences[-margin]), counts)


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
    logarithms = shift(np.log(first), np.log(second), confidence)
    low = None if logarithms.low is None else math.exp(logarithms.low)
    high = None if logarithms.high is None else math.exp(logarithms.high)
    return Estimate(math.exp(logarithms.value), low, high, logarithms.counts)


def between_runs(before: npt.ArrayLike, after: npt.ArrayLike, confidence: float = 0.95) -> float | None:
    """Say how far two groups of runs may lie apart though nothing changed.

    Steps of one run share what that run was given: a clock, a placement in memory, neighbours. However many there
    are, they do not show how another run would have come out; only other runs do. Their spread is estimated from
    both groups and, because there are few, drawn towards what is usual: a moderated t statistic (Smyth, Statistical
    Applications in Genetics and Molecular Biology 3, 2004, section 3.2, with a prior of four degrees of freedom).
    The usual spread is a judgement.

    Parameters
    ----------
    before, after : array_like of float
        A figure of each run, relative to their size.
    confidence : float

    Returns
    -------
    float or None
        Half the width of an interval for the difference of the groups' means; None for one run each.

    Raises
    ------
    UsageError
        As for :func:`median`.
    """
    first, second = _checked(before, confidence), _checked(after, confidence)
    known = len(first) + len(second) - 2
    if not known:
        return None
    squares = float(((first - first.mean()) ** 2).sum() + ((second - second.mean()) ** 2).sum())
    spread = math.sqrt((_WORTH * _USUAL**2 + squares) / (_WORTH + known))
    of_means = spread * math.sqrt(1 / len(first) + 1 / len(second))
    return student_quantile((1 - confidence) / 2, _WORTH + known) * of_means


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
    return _missing_distance(np.asarray(before, np.float64), np.asarray(after, np.float64)) < 0


def _missing_distance(first: Float, second: Float) -> float:
    """How much further apart two series would have to lie to be :func:`apart`; infinite for too few samples."""
    if min(first.size, second.size) < _ENOUGH:
        return math.inf
    spread = max(np.ptp(first), np.ptp(second))
    room = max(second.min() - first.max(), first.min() - second.max())
    return float(spread - room)


def thinned(values: Float, most: int = _MOST_SAMPLES) -> Float:
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


def _checked(samples: npt.ArrayLike, confidence: float) -> Float:
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
        if step <= n * m:
            up[step:] -= ways[:-step]
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
    whole = _integral(math.pi / 2, degrees)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        if 1 - _integral(angle, degrees) / whole > 2 * tail:
            low = angle
        else:
            high = angle
    return math.sqrt(degrees) * math.tan(low)


def _integral(angle: float, degrees: int) -> float:
    """Integrate cos(x) ** (degrees - 1) from 0 to `angle`, to within a constant factor."""
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    return float(angle * (weights @ np.cos(angle * (nodes + 1) / 2) ** (degrees - 1)))
