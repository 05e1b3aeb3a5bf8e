"""Memory snapshots without secrets: the fields that PyTorch's own pages read, with shortened paths."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from nsightkit.trace.share.secrets import Ledger, Scrubber, json_text

__all__ = ["clean_snapshot", "write_snapshot"]

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
    ledger.scrubber.learn_value({name: item for name, item in top.items() if name not in _KNOWN})
    for filename in set(_filenames(top)):
        ledger.scrubber.learn_from(filename)
    # By identity: a pickle shares equal stacks, and a copy of each would be a hundred times it.
    seen: dict[int, Any] = {}
    equal: dict[Any, Any] = {}

    def record(given: Any, name: str = "") -> Any:
        if not isinstance(given, Mapping):
            return {}
        kept = {}
        for field, item in given.items():
            if field in _KNOWN[name]:
                kept[field] = value(item, f"{name}.{field}".lstrip("."))
            else:
                ledger.note("field", *filter(None, [name]), str(field))
        return kept

    def shared(given: Any, made: Any) -> Any:
        content = made.items() if isinstance(made, dict) else map(id, made)
        seen[id(given)] = equal.setdefault((type(made), *content), made)
        return seen[id(given)]

    def value(given: Any, place: str) -> Any:
        name = place.rpartition(".")[2]
        if isinstance(given, list) and name == "frames":
            if id(given) in seen:
                return seen[id(given)]
            frames = [seen[id(f)] if id(f) in seen else shared(f, record(f, name)) for f in given]
            return shared(given, frames)
        if isinstance(given, list) and name == "device_traces":
            return [[record(each, name) for each in events] for events in given]
        if isinstance(given, list) and name in _KNOWN:
            return [record(each, name) for each in given]
        if isinstance(given, str):
            return ledger.apply(Scrubber.path if name == "filename" else json_text, place, given)
        if isinstance(given, tuple):
            return tuple(value(item, place) for item in given if isinstance(item, int))
        if isinstance(given, Mapping):  # what a program noted itself
            return ledger.value(dict(given), place)
        return given if isinstance(given, int | float) else None

    out = record(top)
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
