"""Intervals of medians and changes, against counting everything out and against how often they hold."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from _lib.rows_of_bench import interval

from nsightkit.analysis.core import noise


@pytest.mark.parametrize(("n", "m"), [(3, 4), (4, 4), (1, 9), (7, 5)])
def test_the_rank_sum_is_counted_out(n, m):
    sums = [sum(ranks) - n * (n + 1) // 2 for ranks in itertools.combinations(range(1, n + m + 1), n)]
    share = np.cumsum(np.bincount(sums, minlength=n * m + 1)) / len(sums)
    assert noise.rank_margin(n, m, 0.025) == int((share <= 0.025).sum())


@pytest.mark.parametrize("count", [6, 15, 60])
def test_intervals_hold_as_often_as_they_say(count):
    rng = np.random.default_rng(count)
    misses = np.zeros(2)
    for _ in range(1000):
        before, after = rng.exponential(size=(2, count)) + 5
        low, high = interval(before)
        misses += not low <= 5 + np.log(2) <= high, noise.ratio(before, 1.08 * after).excludes(1.08)
    assert (misses <= 70).all(), "5% at the most, and luck"
    assert misses[1] >= 20, "no wider than need be"


def test_many_and_few_samples():
    rng = np.random.default_rng(2)
    assert noise.shift(rng.normal(0, 1, 5000), rng.normal(1, 1, 3000)).value == pytest.approx(1, abs=0.1)
    low, high = interval(np.arange(20_001))
    assert high - low == pytest.approx(1.96 * np.sqrt(20_001), rel=0.02)
    assert (interval([1, 2, 3, 4, 5])[0], interval([1, 2, 3, 4, 5, 6])[0]) == (-np.inf, 1)
    single = noise.shift([1.0], [2.0])
    assert single == noise.Estimate(1.0)
    assert not single.excludes(0)


@pytest.mark.parametrize(
    ("degrees", "tail", "quantile"),
    [(5, 0.025, 2.571), (5, 0.0005, 6.869), (10, 0.005, 3.169), (30, 0.01, 2.457)],
)
def test_quantiles_are_those_of_the_tables(degrees, tail, quantile):
    assert noise._student_upper_quantile(tail, degrees) == pytest.approx(quantile, rel=0.02)


@pytest.mark.parametrize(("spread", "most"), [(0.003, 10), (0.007, 15), (0.02, 50)])
def test_runs_without_a_change_lie_within_what_runs_differ_by(spread, most):
    rng = np.random.default_rng(7)
    beyond = 0
    for runs in rng.normal(1, spread, (2000, 8)):
        beyond += abs(runs[:5].mean() - runs[5:].mean()) > noise.between_runs(runs[:5], runs[5:], 0.99)
    assert beyond <= most, "1%, more where runs differ by more than is usual"


def test_one_run_each_says_nothing_of_others():
    assert noise.between_runs([1.0], [2.0]) == 0
    few, many = (noise.between_runs([1.0] * n, [1.0] * n) for n in (2, 10))
    assert few > many > 0, "runs that agree by chance are not taken for runs that must"


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [
        ([[10, 11, 12, 13, 14]], [[10, 11, 12, 13, 15]], noise.WITHIN_NOISE),
        ([[10, 11, 12]], [[30, 31, 32]], noise.INCONCLUSIVE),  # too few samples
        ([[10], [10.1], [9.9], [10]], [[20]], noise.CHANGED),  # runs of one step each are samples
        ([[10], [10.1]], [[20]], noise.INCONCLUSIVE),  # one difference is not a spread
        ([[10] * 9, [20] * 9], [[21] * 9], noise.WITHIN_NOISE),  # runs differ by as much
        ([[0] * 5], [[0] * 5], noise.WITHIN_NOISE),
        ([[57, 61, 56, 62, 48]], [[0, 0, 0, 0]], noise.CHANGED),  # each step waited before, and none after
        ([[0, 57, 61, 56, 62, 48]], [[0, 0, 0, 0]], noise.WITHIN_NOISE),  # not in each
        ([[10, 11, 12, 13]], [[14, 15, 16, 17]], noise.WITHIN_NOISE),  # above it, and as near as its own steps are
    ],
)
def test_three_words(before, after, word):
    before, after = ([np.array(run, float) for run in side] for side in (before, after))
    assert noise.judge(before, after, 0.995).word == noise.judge(after, before, 0.995).word == word


@pytest.mark.parametrize("left_out", [False, True])
def test_no_change_is_rarely_called_one(left_out):
    """With long tails, and with the longest steps left out."""
    rng = np.random.default_rng(5)
    changed = 0
    for _ in range(500):
        sides = np.sort(rng.exponential(size=(2, 10)) + 5)
        kept = sides[:, :-1] if left_out else sides
        changed += noise.judge(kept[:1], kept[1:], left_out=left_out).word == noise.CHANGED
    assert changed <= 35, "5% at the most, and luck"


def test_series_without_a_change_do_not_lie_apart():
    """Less often than one in a hundred rows, however few the steps: four a side are the worst."""
    rng = np.random.default_rng(3)
    for draw in (rng.normal, rng.exponential, rng.uniform):
        alarms = 0
        for before, after in draw(size=(2000, 2, 4)):
            alarms += noise.judge([before], [after], 0.995).word == noise.CHANGED
        assert alarms <= 20, draw
