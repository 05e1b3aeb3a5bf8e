"""Memoised answers, stored with the trace that they are about."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def kept(answer: Callable[P, T]) -> Callable[P, T]:
    """Memoise an answer with what it is about, for each of its options; treat the result as read-only.

    Parameters
    ----------
    answer : callable
        Its first argument, such as a trace, has the memo; the others can be hashed.
    """

    @functools.wraps(answer)
    def remembered(*options: P.args, **named: P.kwargs) -> T:
        about: Any = options[0]
        key = (answer.__module__, answer.__qualname__, options[1:], tuple(named.items()))
        if key not in about.memo:
            about.memo[key] = answer(*options, **named)
        result: T = about.memo[key]
        return result

    return remembered
