"""Opened traces and snapshots without secrets, for what is written or shown.

It imports no reader: those that write come here. Of memory snapshots the fields stay that PyTorch's own pages read,
with shortened paths.
"""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
import numpy as np
import pandas as pd

from nsightkit.trace.model import TABLES, TIME_COLUMNS, Trace, TraceMeta, categorical
from nsightkit.trace.share.secrets import Ledger, Scrubber

__all__ = ["CleanSource", "clean", "clean_snapshot", "clean_text", "write_snapshot"]


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
    return cast("CleanSource", clean(trace).whole._source)._scrubber.text(text)


class CleanSource:
    """Reads another trace, and scrubs what it reads."""

    def __init__(self, whole: Trace, scrubber: Scrubber) -> None:
        self._whole = whole
        self._scrubber = scrubber
        given = msgspec.to_builtins(whole.meta, str_keys=True)
        scrubber.learn(given)
        self.meta = msgspec.convert(scrubber.value(given), TraceMeta, str_keys=True)

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
    cleaned = [scrubber.text(name) for name in given]
    if cleaned == given:
        return names
    taken = {new for new, old in zip(cleaned, given, strict=True) if new == old}
    for i, (new, old) in enumerate(zip(cleaned, given, strict=True)):
        if new != old:  # two may have differed in nothing but the case of a host's name
            others = (f"{new} ({number})" for number in itertools.count(2))
            cleaned[i] = next(name for name in itertools.chain([new], others) if name not in taken)
            taken.add(cleaned[i])
    return pd.Series(categorical(np.asarray(names.cat.codes), cleaned), index=names.index, name=names.name)


# ---------------------------------------------------------------- memory snapshots

#: Fields by the list they stand in (those of the whole by none); one that is itself such a list has fields of its own.
_FIELDS = {
    "": "segments device_traces external_annotations allocator_settings",
    "segments": "device address total_size allocated_size active_size requested_size stream segment_type "
    "segment_pool_id is_expandable frames blocks",
    "blocks": "address size requested_size state frames history",
    "history": "addr real_size frames",
    "device_traces": "action addr size stream time_us device_free frames user_metadata category compile_context "
    "pool_id",
    "external_annotations": "device time_us name stage",
    "frames": "filename line name",
}
_KNOWN = {name: frozenset(fields.split()) for name, fields in _FIELDS.items()}


def clean_snapshot(taken: Any, ledger: Ledger | None = None) -> Any:
    """Make a copy of a memory snapshot without folders, host and user names, secrets, or source code.

    A file in a library keeps its path from ``site-packages`` (or ``lib/python3.x``) on, any other only its name. Frames
    keep name, file and line. Sizes, addresses, times and the order of events stay as they are. Fields that are not
    known here are left out.

    Parameters
    ----------
    taken : dict or list
        What ``torch.cuda.memory._snapshot()`` returned, or only its segments.
    ledger : Ledger, optional
        Counts what was removed.

    Returns
    -------
    dict or list
        Of the same shape. Frames and lists of frames are shared wherever they are equal, which makes the file small.
    """
    ledger = ledger or Ledger()
    top = taken if isinstance(taken, Mapping) else {"segments": taken}
    ledger.scrubber.learn({name: item for name, item in top.items() if name not in _KNOWN})
    for filename in set(_filenames(top)):
        ledger.scrubber.learn(filename)
    # By identity: a pickle shares equal stacks, and a copy of each would be a hundred times it.
    seen: dict[int, Any] = {}
    equal: dict[Any, Any] = {}

    def cleaned(given: Any, name: str = "", place: str = "") -> Any:
        if id(given) in seen:
            return seen[id(given)]
        match given:
            case Mapping() if name in _KNOWN:
                made: Any = {f: cleaned(given[f], f, f"{name}.{f}".lstrip(".")) for f in given if f in _KNOWN[name]}
                for field in [field for field in given if field not in _KNOWN[name]]:
                    ledger.note("field", *filter(None, [name]), str(field))
            case list() if name in _KNOWN:
                made = [cleaned(each, name) for each in given]
            case str():
                return ledger.apply(Scrubber.path if name == "filename" else Scrubber.text, place, given)
            case tuple():
                return tuple(cleaned(item, name, place) for item in given if isinstance(item, int))
            case Mapping():  # what a program noted itself
                text = json.dumps(given, skipkeys=True, default=str)
                return json.loads(ledger.apply(Scrubber.text, place, text))
            case _:
                return given if isinstance(given, int | float) else None
        if name == "frames":
            content = made.items() if isinstance(made, dict) else map(id, made)
            made = seen[id(given)] = equal.setdefault((type(made), *content), made)
        return made

    out = cleaned(top)
    return out if isinstance(taken, Mapping) else out["segments"]


def _filenames(top: Mapping[Any, Any]) -> Iterator[str]:
    """Files of all frames, each list of frames looked at once."""
    seen: set[int] = set()
    waiting: list[Any] = [top]
    while waiting:
        given = waiting.pop()
        if isinstance(given, Mapping):
            if isinstance(given.get("filename"), str):
                yield given["filename"]
            waiting += given.values()
        elif isinstance(given, list) and id(given) not in seen:
            seen.add(id(given))
            waiting += given


def write_snapshot(taken: Any, file: BinaryIO) -> None:
    """Write a memory snapshot as PyTorch does.

    Parameters
    ----------
    taken : dict or list
    file : binary file
    """
    pickle.dump(taken, file, protocol=4)  # any Python since 3.4 reads it, whichever wrote it
