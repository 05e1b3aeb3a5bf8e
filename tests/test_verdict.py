"""The verdict: a confusion table of planted faults and decoys, exact shares, and what real traces truly show."""

import random

import pytest

import nsightkit
from nsightkit.analysis import verdict
from nsightkit.workloads.planted import BOTTLENECK_OF, training

SEEDS = range(5)


def plant(path, fault, seed):
    """A loop whose size, pace and threads vary with the seed."""
    vary = random.Random(1000 * seed + 7)
    return training(
        path,
        fault,
        steps=vary.randint(6, 12),
        layers=vary.randint(4, 10),
        seed=seed,
        scale=vary.uniform(0.6, 1.8),
        one_thread=vary.random() < 0.4,
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", list(BOTTLENECK_OF))
def test_planted(tmp_path, fault, seed):
    truth = plant(tmp_path / "t.sqlite", fault, seed)
    found = verdict.summary(nsightkit.load(tmp_path / "t.sqlite"))
    assert found["bottleneck"] == truth["bottleneck"]
