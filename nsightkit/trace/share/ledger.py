"""What was removed from a file, and where: every copy of a file counts here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from nsightkit.trace.share.secrets import Scrubber, json_text

__all__ = ["Ledger"]

_T = TypeVar("_T", str, bytes)

#: Distinct texts whose replacement is remembered.
_REMEMBERED = 100_000


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
        self._remembered: dict[tuple[str, str | bytes], tuple[str | bytes, Counter[str]]] = {}

    def note(self, kind: str, *names: str, count: int = 1) -> None:
        """Count something that was left out, by its name in the file, which may itself hold a secret."""
        self.removed[kind, ".".join(self.scrubber.text(name)[:100] for name in names)] += count

    def text(self, value: str, place: str) -> str:
        """Scrub a text, as JSON where it is JSON."""
        return self.apply(value, place, lambda v: json_text(self.scrubber, v))

    def path(self, value: str, place: str) -> str:
        """Scrub a text that is a path."""
        return self.apply(value, place, self.scrubber.path)

    def value(self, given: Any, place: str) -> Any:
        """Scrub a JSON value."""
        removed = self.scrubber.removed
        removed.clear()
        new = self.scrubber.value(given)
        self.removed.update((kind, place) for kind in removed)
        return new

    def apply(self, value: _T, place: str, clean: Callable[[_T], _T]) -> _T:
        """Scrub a text or its bytes, and count what went.

        Parameters
        ----------
        value : str or bytes
        place : str
            What stands in one place is always cleaned in the same way, and each distinct text once.
        clean : callable
            Uses the scrubber.

        Returns
        -------
        str or bytes
        """
        known = self._remembered.get((place, value))
        if known is None:
            removed = self.scrubber.removed
            removed.clear()
            new = clean(value)
            known = new, Counter(removed)
            if len(self._remembered) >= _REMEMBERED:
                self._remembered.clear()
            self._remembered[place, value] = known
        for kind, count in known[1].items():
            self.removed[kind, place] += count
        return known[0]  # type: ignore[return-value] # of the value's own type
