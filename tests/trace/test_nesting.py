import numpy as np
import pytest

from nsightkit.trace.nesting import nesting


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


def nested_intervals(rng, n):
    """Properly nested intervals on three threads: a random sequence of pushes and pops, rows shuffled."""
    rows = []
    for thread in (7, -1, 1 << 40):
        now, stack, left = 0, [], n // 3
        while left or stack:
            now += int(rng.integers(0, 3))
            if left and (not stack or rng.random() < 0.55):
                stack.append(now)
                left -= 1
            else:
                now += 1
                rows.append((thread, stack.pop(), now))
    rng.shuffle(rows)
    return np.array(rows, dtype=np.int64).T


@pytest.mark.parametrize("seed", range(20))
def test_nested_intervals_agree_with_a_stack(seed):
    thread, start, end = nested_intervals(np.random.default_rng(seed), 300)
    level, parent = nesting(thread, start, end)
    expected_level, expected_parent = stack_nesting(thread, start, end)
    assert level.tolist() == expected_level
    assert parent.tolist() == expected_parent
    has = parent >= 0
    assert (thread[parent[has]] == thread[has]).all()
    assert (start[parent[has]] <= start[has]).all()
    assert (end[parent[has]] >= end[has]).all()
    assert (level[parent[has]] == level[has] - 1).all()
    assert (level[~has] == 0).all()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("tolerance", [0, 5])
def test_arbitrary_intervals_agree_with_a_stack(seed, tolerance):
    rng = np.random.default_rng(seed)
    thread = rng.integers(0, 3, 200)
    start = rng.integers(-50, 200, 200)
    end = start + rng.integers(0, 60, 200)
    level, parent = nesting(thread, start, end, tolerance)
    assert (level.tolist(), parent.tolist()) == stack_nesting(thread, start, end, tolerance)


def test_deep_nesting_and_leaked_pushes():
    n = 2000
    level, parent = nesting(np.zeros(n), np.arange(n), np.full(n, n))
    assert level.tolist() == list(range(n))
    assert parent.tolist() == list(range(-1, n - 1))
    level, parent = nesting(np.zeros(n + 1), [*range(n), 2 * n], [*range(2 * n, n, -1), 2 * n + 1])
    assert level[-1] == 0
    assert parent[-1] == -1
    assert level[:-1].tolist() == list(range(n))
