"""Traces without secrets: what identifies a person or a machine, or opens a door, is replaced by placeholders."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from nsightkit.trace.model import TABLES, TIME_COLUMNS, Trace, TraceMeta, categorical
from nsightkit.trace.secrets import Scrubber, json_text

__all__ = ["clean"]


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
    if isinstance(whole._source, _CleanSource):
        return trace
    cleaned = whole.memo.get("clean")
    if cleaned is None:
        cleaned = whole.memo["clean"] = Trace(_CleanSource(whole, Scrubber()), whole.path)
    return cleaned if trace is whole else cleaned.masked(trace._masks)


class _CleanSource:
    """Reads another trace, and scrubs what it reads."""

    def __init__(self, whole: Trace, scrubber: Scrubber) -> None:
        self._whole = whole
        self._scrubber = scrubber
        self.meta = clean_meta(whole.meta, scrubber)

    def read(self, table: str, columns: Sequence[str]) -> pd.DataFrame:
        """See :class:`~nsightkit.trace.model.Source`."""
        found = self._whole._read(table, list(columns))
        out: dict[str, pd.Series[Any]] = {}
        for column, series in found.items():
            if TABLES[table].get(column) == "category":
                out[column] = clean_names(series, self._scrubber)
            elif column in TIME_COLUMNS and self._whole.t0_ns:
                out[column] = series + self._whole.t0_ns  # the new trace moves them to its own clock again
            else:
                out[column] = series
        return pd.DataFrame(out, copy=False)

    def first_ns(self) -> int:
        """See :class:`~nsightkit.trace.model.Source`."""
        return self._whole.t0_ns

    def size(self, table: str) -> int:
        """See :class:`~nsightkit.trace.model.Source`."""
        return self._whole.size(table)


def clean_names(names: pd.Series[Any], scrubber: Scrubber) -> pd.Series[Any]:
    """Scrub a column of names; distinct ones stay distinct.

    Parameters
    ----------
    names : Series
        Categorical.
    scrubber : Scrubber

    Returns
    -------
    Series
        The same object when no name held a secret.
    """
    given = [str(name) for name in names.cat.categories]
    cleaned = [json_text(scrubber, name) for name in given]
    if cleaned == given:
        return names
    taken: set[str] = {new for new, old in zip(cleaned, given, strict=True) if new == old}
    for i, (new, old) in enumerate(zip(cleaned, given, strict=True)):
        if new == old:
            continue
        unique, number = new, 1
        while unique in taken:  # a name that looks like a placeholder already
            number += 1
            unique = f"{new} ({number})"
        taken.add(unique)
        cleaned[i] = unique
    return pd.Series(categorical(np.asarray(names.cat.codes), cleaned), index=names.index, name=names.name)


def clean_meta(meta: TraceMeta, scrubber: Scrubber) -> TraceMeta:
    """Scrub what is known about a capture.

    Parameters
    ----------
    meta : TraceMeta
    scrubber : Scrubber

    Returns
    -------
    TraceMeta
        A copy.
    """

    def text(value: str | None) -> str | None:
        return None if value is None else scrubber.text(value)

    return dataclasses.replace(
        meta,
        tool=scrubber.text(meta.tool),
        tool_version=text(meta.tool_version),
        schema=text(meta.schema),
        driver=text(meta.driver),
        gpus=[dataclasses.replace(gpu, name=text(gpu.name)) for gpu in meta.gpus],
        missing=list(meta.missing),
        notes=[scrubber.text(note) for note in meta.notes],
        thread_names={thread: scrubber.text(name) for thread, name in meta.thread_names.items()},
        distributed=scrubber.value(dict(meta.distributed)),
    )
