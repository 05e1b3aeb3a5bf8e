"""What was removed from a file, and where: every scrubber of a file format counts here."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

from nsightkit.trace.share.secrets import Kind, Scrubber, json_text

__all__ = ["Ledger"]

#: Distinct texts whose replacement is remembered.
_REMEMBERED = 100_000
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_RUNS = re.compile(rb"[\x20-\x7e\t\r\n]{4,}")
_WIDE_RUNS = (
    (re.compile(rb"(?:[\x20-\x7e]\x00){4,}"), "utf-16-le"),
    (re.compile(rb"(?:\x00[\x20-\x7e]){4,}"), "utf-16-be"),
)
_ENTRY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


class Ledger:
    """A scrubber that counts what it removes by place.

    Parameters
    ----------
    scrubber : Scrubber, optional
        One that knows this machine when omitted.

    Attributes
    ----------
    removed : Counter of (str, str)
        How often, by kind and place.
    """

    def __init__(self, scrubber: Scrubber | None = None) -> None:
        self.scrubber = scrubber or Scrubber()
        self.removed: Counter[tuple[str, str]] = Counter()
        self._remembered: dict[tuple[object, str], tuple[str, Counter[str]]] = {}

    def note(self, kind: str, place: str, count: int = 1) -> None:
        """Count something that was left out.

        Parameters
        ----------
        kind, place : str
        count : int
        """
        self.removed[kind, place] += count

    def text(self, value: str, place: str) -> str:
        """Scrub a text, as JSON where it is JSON.

        Parameters
        ----------
        value, place : str

        Returns
        -------
        str
            The same object when nothing had to go.
        """
        return self.apply(value, place, "text", lambda v: json_text(self.scrubber, v))

    def keyed(self, key: str, value: str) -> str:
        """Scrub a text that stands under a key.

        Parameters
        ----------
        key, value : str
        """
        return self.apply(value, key, key, lambda v: self.scrubber.keyed(key, v))

    def argument(self, flag: str, value: str, place: str) -> str:
        """Scrub a word of a command line.

        Parameters
        ----------
        flag : str
            The word before it.
        value, place : str
        """
        if not flag.startswith("-"):
            return self.text(value, place)
        return self.apply(value, place, flag, lambda v: self.scrubber.argument(flag, v) or self.scrubber.text(v))

    def path(self, value: str, place: str) -> str:
        """Scrub a text that is a path.

        Parameters
        ----------
        value, place : str
        """
        return self.apply(value, place, "path", self.scrubber.path)

    def whole(self, kind: Kind, value: str, place: str) -> str:
        """Replace all of a text, unless it is empty or a placeholder already.

        Parameters
        ----------
        kind, value, place : str
        """

        def replaced(text: str) -> str:
            return text if self.scrubber.is_placeholder(text) else self.scrubber.placeholder(kind, text)

        return self.apply(value, place, kind, replaced) if value else value

    def apply(self, value: str, place: str, how: object, clean: Callable[[str], str]) -> str:
        """Scrub a text in some way, and count what went.

        Parameters
        ----------
        value, place : str
        how : hashable
            Names the way: what was done to a text once is done to it again.
        clean : callable
        """
        known = self._remembered.get((how, value))
        if known is None:
            removed = self.scrubber.removed
            before = len(removed)
            new = clean(value)
            if new == value:
                return value
            known = new, Counter(removed[before:])
            del removed[before:]
            if len(self._remembered) >= _REMEMBERED:
                self._remembered.clear()
            self._remembered[how, value] = known
        new, kinds = known
        for kind, count in kinds.items():
            self.removed[kind, place] += count
        return new

    def data(self, raw: bytes, place: str) -> bytes:
        """Scrub bytes: text as text, and what is text in anything else with as many asterisks.

        Parameters
        ----------
        raw : bytes
        place : str

        Returns
        -------
        bytes
            As long as `raw` if that was no text: it may be a structure.
        """
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            text = "\x00"
        if not _CONTROL.search(text):
            new = self.text(text, place)
            return raw if new is text else new.encode()
        for pattern, encoding in _WIDE_RUNS:
            raw = self._runs(raw, pattern, encoding, place)
        return self._runs(raw, _RUNS, "ascii", place)

    def _runs(self, raw: bytes, pattern: re.Pattern[bytes], encoding: str, place: str) -> bytes:
        runs = [(match.span(), match[0].decode(encoding)) for match in pattern.finditer(raw)]
        block = sum(_ENTRY.match(text) is not None for _, text in runs) >= 2
        out = bytearray(raw)
        for (start, end), text in runs:
            if block and _ENTRY.match(text):
                self.note("environment", place)
            elif self.text(text, place) == text:
                continue
            out[start:end] = ("*" * len(text)).encode(encoding)
        return bytes(out)
