"""Decode a pickled memory snapshot and give its tables; :mod:`nsightkit.trace.snapshot` runs this file as a process.

A pickle of a few bytes can take hours (keys that all have one hash) or all memory (an index of 2**31). If one does,
only this process ends. Nothing else of nsightkit is imported, so that it starts fast.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

_Row = Mapping[str, Any]
_Columns = dict[str, Any]
#: No address, size or time in microseconds reaches it.
_NUMBER_LIMIT = 4_000_000_000_000_000


#: Columns of whole numbers: PyTorch's name of each, and what stands for a missing value (None: it is an error).
_NUMBERS: _Columns = {
    "events": {
        "address": ("addr", 0),
        "size_bytes": ("size", 0),
        "time_us": ("time_us", 0),
        "device_free_bytes": ("device_free", -1),
    },
    "segments": {
        "device": ("device", 0),
        "address": ("address", None),
        "size_bytes": ("total_size", None),
        "allocated_bytes": ("allocated_size", -1),
        "active_bytes": ("active_size", -1),
        "requested_bytes": ("requested_size", -1),
        "expandable": ("is_expandable", 0),
    },
    "blocks": {
        "device": ("device", 0),
        "address": ("address", None),
        "size_bytes": ("size", None),
        "requested_bytes": ("requested_size", None),
    },
    "annotations": {"device": ("device", 0), "time_us": ("time_us", None)},
}
_TEXTS = {"events": ("action",), "blocks": ("state",), "annotations": ("name", "stage")}


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that looks nothing up, so that nothing in a file is run."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is more than plain data")


def read_for_parent(path: str) -> _Columns:
    """Decode a pickle of plain data, and turn it into :func:`tables`; ``limited.ask_limited`` calls this."""
    with open(path, "rb") as pickled:  # noqa: PTH123 - without pathlib it starts faster
        return tables(_PlainUnpickler(pickled).load())


def tables(snapshot: _Row) -> _Columns:
    """Turn a snapshot into columns of numbers and texts.

    Parameters
    ----------
    snapshot : mapping
        What ``torch.cuda.memory._snapshot()`` returned.

    Returns
    -------
    dict
        Columns of ``events``, ``segments``, ``blocks`` and ``annotations``; the distinct ``frames``; the distinct
        ``stacks``, each a list of positions in ``frames``; ``settings``, and the number of ``devices``.

    Raises
    ------
    Exception
        Of any kind: it is not a snapshot.
    """
    rows: dict[str, list[_Row]] = {
        "events": [],
        "segments": snapshot["segments"],
        "blocks": [],
        "annotations": snapshot.get("external_annotations") or [],
    }
    for segment in rows["segments"]:
        rows["blocks"] += [{"device": segment.get("device", 0), **block} for block in segment["blocks"]]
    devices: list[int] = []
    traces = snapshot.get("device_traces") or []
    for device, trace in enumerate(traces):
        rows["events"] += trace
        devices += [device] * len(trace)
    columns: _Columns = {table: _table_columns(table, rows[table]) for table in rows}
    stacks = _Stacks()
    for table in ("events", "blocks"):
        columns[table]["stack"] = stacks.numbers(rows[table])
    columns["events"]["device"] = devices
    return {
        **columns,
        "settings": _allocator_settings(snapshot.get("allocator_settings") or {}),
        "frames": list(stacks.frames),
        "stacks": list(stacks.stacks),
        "devices": len(traces),
    }


def _table_columns(table: str, rows: Sequence[_Row]) -> _Columns:
    """Turn the rows of a table into its columns of :data:`_NUMBERS` and :data:`_TEXTS`."""
    columns: _Columns = {}
    for name, (key, missing) in _NUMBERS[table].items():
        columns[name] = _integers(rows, key, missing)
    for name in _TEXTS.get(table, ()):
        columns[name] = [_plain_text(row.get(name)) for row in rows]
    return columns


def _allocator_settings(settings: _Row) -> _Columns:
    """Take the settings of the allocator that say how sizes are rounded and blocks are split."""
    divisions = settings.get("roundup_power2_divisions") or {}
    sizes = map(_plain_text, divisions)
    return {
        "max_split_size": _integers([settings], "max_split_size", -1)[0],
        "roundup_power2_divisions": dict(zip(sizes, array("q", divisions.values()), strict=True)),
    }


class _Stacks:
    """Frames and stacks as numbers; an equal stack has one number, however often the file writes it out."""

    def __init__(self) -> None:
        # Numbers by content: of a frame by its texts and line, of a stack by the numbers of its frames.
        self.frames: dict[tuple[str, str, int], int] = {}
        self.stacks: dict[tuple[int, ...], int] = {}
        # Numbers of stacks by the identities of their frames, all of which stay in memory with the snapshot.
        self._number_by_ids: dict[tuple[int, ...], int] = {}

    def numbers(self, rows: Iterable[_Row]) -> list[int]:
        """Return the number of each row's stack, -1 for none."""
        return [self._stack_number(row.get("frames")) for row in rows]

    def _stack_number(self, stack: Sequence[_Row] | None) -> int:
        """Return the number of a stack, a new one if no equal stack has come yet; -1 for none.

        Where the pickle refers to a frame that it has written before, that is one object here: the identities of the
        frames find most stacks quicker than their texts do.
        """
        if not stack:
            return -1
        ids = tuple(map(id, stack))
        if ids not in self._number_by_ids:
            frame_numbers = tuple(map(self._frame_number, stack))
            self._number_by_ids[ids] = self.stacks.setdefault(frame_numbers, len(self.stacks))
        return self._number_by_ids[ids]

    def _frame_number(self, frame: _Row) -> int:
        """Return the number of a frame, a new one if no equal frame has come yet."""
        (line,) = _integers([frame], "line", 0)  # checked like a column
        content = (_plain_text(frame.get("name")), _plain_text(frame.get("filename")), line)
        return self.frames.setdefault(content, len(self.frames))


def _integers(rows: Iterable[_Row], key: str, missing: int | None) -> list[int]:
    """Take a column of whole numbers, `missing` where a row has none; None raises an error then.

    The array refuses everything else, and numbers of more than 64 bits.
    """
    column = array("q", [row.get(key, missing) for row in rows])  # "q": integers of 64 bits
    if column and (min(column) <= -_NUMBER_LIMIT or max(column) >= _NUMBER_LIMIT):
        raise ValueError(f"it holds an impossible {key}")
    return column.tolist()


def _plain_text(value: Any) -> str:
    """Take a text, and "" for anything else: a small pickle can hold a list that takes forever to write as text."""
    if isinstance(value, str):
        return value
    return ""
