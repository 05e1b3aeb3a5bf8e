"""Memoised answers, stored with the trace that they are about."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

__all__ = ["kept"]


class Remembers(Protocol):
    """Whatever answers can be kept with, such as a trace."""

    @property
    def memo(self) -> dict[Any, Any]:
        """Answers by what was asked."""


S = TypeVar("S", bound=Remembers)
P = ParamSpec("P")
T = TypeVar("T")


def kept(answer: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Memoise an answer with what it is about, for each of its options; treat the result as read-only.

    Parameters
    ----------
    answer : callable
        Its first argument has the memo; the others can be hashed.
    """

    @functools.wraps(answer)
    def remembered(about: S, /, *options: P.args, **named: P.kwargs) -> T:
        key = (answer.__module__, answer.__qualname__, options, tuple(named.items()))
        if key not in about.memo:
            about.memo[key] = answer(about, *options, **named)
        result: T = about.memo[key]
        return result

    return remembered
