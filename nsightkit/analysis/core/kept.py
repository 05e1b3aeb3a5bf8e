"""Answers that are worked out once, and kept with what they are about."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

__all__ = ["kept"]


class Remembers(Protocol):
    """Whatever answers can be kept with, such as a trace."""

    memo: dict[Any, Any]


S = TypeVar("S", bound=Remembers)
P = ParamSpec("P")
T = TypeVar("T")


def kept(answer: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Work out an answer once for each of its options; who gets it must not change it.

    Parameters
    ----------
    answer : callable
        Its first argument is what the answer is about; the others can be hashed.
    """
    signature = inspect.signature(answer)
    whole = len(signature.parameters) - 1

    @functools.wraps(answer)
    def asked(about: S, /, *given: P.args, **named: P.kwargs) -> T:
        options: tuple[Any, ...] = given
        if len(given) < whole:  # else it is clear which is which
            bound = signature.bind(about, *given, **named)
            bound.apply_defaults()
            options = bound.args[1:]
        key = (answer.__module__, answer.__qualname__, *options)
        if key not in about.memo:
            about.memo[key] = answer(about, *given, **named)
        found: T = about.memo[key]
        return found

    return asked
