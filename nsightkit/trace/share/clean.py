"""Opened traces without secrets, for what is written or shown. It imports no reader: those that write come here."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd

from nsightkit.trace.model import TABLES, TIME_COLUMNS, Trace, TraceMeta, categorical
from nsightkit.trace.share.secrets import Scrubber, json_text

__all__ = ["CleanSource", "clean", "clean_text"]


def clean(trace: Trace) -> Trace:
    """Give the trace without secrets in its names and in what is known about it.

    Times, sizes, rows and their order are the same; names are the same unless they held a secret. Nothing is read
    before an analysis asks for it, and only distinct names are looked at.

    Parameters
    ----------
    trace : Trace
        With the selection it carries.

    Returns
    -------
    Trace
        Itself when it came from here.
    """
    whole = trace.whole
    if isinstance(whole._source, CleanSource):
        return trace
    cleaned = whole.memo.get("clean")
    if cleaned is None:
        scrubber = Scrubber()
        if whole.path is not None:
            from nsightkit.trace.share.files import learn  # which imports every reader

            learn(Path(whole.path), scrubber)
        cleaned = whole.memo["clean"] = Trace(CleanSource(whole, scrubber), whole.path)
    return cleaned if trace is whole else cleaned.masked(trace._masks)


def clean_text(trace: Trace, text: str) -> str:
    """Give a text about a trace, such as its file's name, without the secrets that the trace is cleaned of.

    Parameters
    ----------
    trace : Trace
    text : str

    Returns
    -------
    str
    """
    source = clean(trace).whole._source
    assert isinstance(source, CleanSource)
    return source._scrubber.text(text)


class CleanSource:
    """Reads another trace, and scrubs what it reads."""

    def __init__(self, whole: Trace, scrubber: Scrubber) -> None:
        self._whole = whole
        self._scrubber = scrubber
        self.meta = _clean_meta(whole.meta, scrubber)

    def read(self, table: str, columns: Sequence[str]) -> pd.DataFrame:
        """See :class:`~nsightkit.trace.model.Source`."""
        found = dict(self._whole.table(table, columns).items())
        for column, values in found.items():
            if TABLES[table].get(str(column)) == "category":
                found[column] = _clean_names(values, self._scrubber)
            elif column in TIME_COLUMNS:
                found[column] = values + self._whole.t0_ns  # the new trace moves them to its own clock again
        return pd.DataFrame(found, copy=False)

    def first_ns(self) -> int:
        """See :class:`~nsightkit.trace.model.Source`."""
        return self._whole.t0_ns


def _clean_names(names: pd.Series[Any], scrubber: Scrubber) -> pd.Series[Any]:
    """Scrub a categorical column; distinct names stay distinct."""
    given = [str(name) for name in names.cat.categories]
    cleaned = [json_text(scrubber, name) for name in given]
    if cleaned == given:
        return names
    taken = {new for new, old in zip(cleaned, given, strict=True) if new == old}
    for i, (new, old) in enumerate(zip(cleaned, given, strict=True)):
        if new != old:  # two may have differed in nothing but the case of a host's name
            others = (f"{new} ({number})" for number in itertools.count(2))
            cleaned[i] = next(name for name in itertools.chain([new], others) if name not in taken)
            taken.add(cleaned[i])
    return pd.Series(categorical(np.asarray(names.cat.codes), cleaned), index=names.index, name=names.name)


def _clean_meta(meta: TraceMeta, scrubber: Scrubber) -> TraceMeta:
    given = msgspec.to_builtins(meta, str_keys=True)
    scrubber.learn_value(given)
    return msgspec.convert(scrubber.value(given), TraceMeta, str_keys=True)
