"""What was removed from a file, and where: every copy of a file counts here."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

from nsightkit.trace.share.secrets import Scrubber, json_text

__all__ = ["Ledger"]


class Ledger:
    """A scrubber that counts what it removes by place.

    Attributes
    ----------
    scrubber : Scrubber
        One that knows this machine.
    removed : Counter of (str, str)
        How often, by kind and place.
    """

    def __init__(self) -> None:
        self.scrubber = Scrubber()
        self.removed: Counter[tuple[str, str]] = Counter()
        self._once = functools.lru_cache(maxsize=100_000)(self._cleaned)  # each distinct text is cleaned once

    def note(self, kind: str, *names: str, count: int = 1) -> None:
        """Count something that was left out, by its name in the file, which may itself hold a secret."""
        self.removed[kind, ".".join(self._once(Scrubber.text, name)[0][:100] for name in names)] += count

    def text(self, value: str, place: str) -> str:
        """Scrub a text, as JSON where it is JSON."""
        return self.apply(json_text, place, value)  # type: ignore[no-any-return]

    def value(self, given: Any, place: str) -> Any:
        """Scrub a JSON value."""
        new, kinds = self._cleaned(Scrubber.value, given)
        self.removed.update((kind, place) for kind in kinds)
        return new

    def apply(self, clean: Callable[..., Any], place: str, *given: Any) -> Any:
        """Give ``clean(scrubber, *given)``, and count what went from a place."""
        new, kinds = self._once(clean, *given)
        for kind in kinds:  # mostly none
            self.removed[kind, place] += 1
        return new

    def _cleaned(self, clean: Callable[..., Any], *given: Any) -> tuple[Any, list[str]]:
        self.scrubber.removed.clear()
        new = clean(self.scrubber, *given)
        return new, self.scrubber.removed.copy()
