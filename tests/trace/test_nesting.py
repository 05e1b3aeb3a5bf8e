import numpy as np
import pytest

from nsightkit.trace.model import nesting


def stack_nesting(thread, start, end, tolerance=0):
    """The definition, one interval at a time."""
    n = len(start)
    level, parent = [0] * n, [-1] * n
    stacks = {}
    for i in sorted(range(n), key=lambda i: (thread[i], start[i], -end[i], i)):
        stack = stacks.setdefault(thread[i], [])
        need = max(end[i] - tolerance, start[i] + (1 if end[i] > start[i] else 0))
        while stack and end[stack[-1]] < need:
            stack.pop()
        level[i] = len(stack)
        parent[i] = stack[-1] if stack else -1
        stack.append(i)
    return level, parent


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("tolerance", [0, 5])
def test_arbitrary_intervals_agree_with_a_stack(seed, tolerance):
    rng = np.random.default_rng(seed)
    thread = rng.integers(0, 3, 200)
    start = rng.integers(-50, 200, 200)
    end = start + rng.integers(0, 60, 200)
    level, parent = nesting(thread, start, end, tolerance)
    assert (level.tolist(), parent.tolist()) == stack_nesting(thread, start, end, tolerance)


def test_deep_nesting():
    n = 2000
    level, parent = nesting(np.zeros(n), np.arange(n), np.full(n, n))
    assert level.tolist() == list(range(n))
    assert parent.tolist() == list(range(-1, n - 1))
