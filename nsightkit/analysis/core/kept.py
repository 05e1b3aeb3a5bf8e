"""Memoised answers, stored with the trace that they are about."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def kept(answer: Callable[P, T]) -> Callable[P, T]:
    """Memoise a function's results, in the object that is its first argument; treat the results as read-only.

    Parameters
    ----------
    answer : callable
        Its first argument, such as a trace, has a dict ``memo``; the others can be hashed.
    """

    @functools.wraps(answer)
    def remembered(*options: P.args, **named: P.kwargs) -> T:
        owner: Any = options[0]
        key = (answer.__module__, answer.__qualname__, options[1:], tuple(named.items()))
        if key not in owner.memo:
            owner.memo[key] = answer(*options, **named)
        result: T = owner.memo[key]
        return result

    return remembered
