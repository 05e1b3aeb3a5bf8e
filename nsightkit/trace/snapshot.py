"""Memory snapshots of PyTorch's caching allocator, read without trusting them.

``torch.cuda.memory._dump_snapshot`` writes a pickle, and a pickle is a program. A process with limits, whose unpickler
can look nothing up, decodes it and gives back tables: call stacks become integers, so a million events take some
hundred megabytes.

What the events say is what PyTorch writes: the size of an allocation is the number of bytes *asked for*; what the
allocator set aside for it is only known of the blocks that are there at the end
(:mod:`nsightkit.analysis.memory.snapshot` works out the rest).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.errors import AnyPath, TraceError, reading, require_regular
from nsightkit.text import Json
from nsightkit.trace import snapshot_child
from nsightkit.trace.limited import ask_limited
from nsightkit.trace.model import uncollected

#: The events that change what is allocated. ``free`` is an old spelling of a free that needs no waiting.
ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "free",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
)
#: What a block can be.
STATES = ("active_allocated", "active_pending_free", "inactive")

_CATEGORICAL_DTYPES = {"action": pd.CategoricalDtype(list(ACTIONS)), "state": pd.CategoricalDtype(list(STATES))}
_TEXT_COLUMNS = ("name", "stage")

_REMEDY = "give a file that torch.cuda.memory._dump_snapshot wrote"
#: No snapshot has more devices.
_MOST_DEVICES = 1024
#: No sum of sizes reaches it, so that two such sums can be added in 64 bits.
_SUM_LIMIT_BYTES = 1 << 62

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Snapshot:
    """A memory snapshot as tables.

    Attributes
    ----------
    path : str
        Where it was read.
    events : DataFrame
        One row an event, in order within each device: ``device, action`` (categorical of :data:`ACTIONS`, missing for
        others), ``address, size_bytes, time_ns`` (since the first event), ``stack`` (index into `stack_bounds`, -1
        without one), ``device_free_bytes`` (of an ``oom``, else -1).
    segments : DataFrame
        What the allocator holds at the end: ``device, address, total_bytes, allocated_bytes, active_bytes,
        requested_bytes`` (torch's own counters; -1 where the version wrote none), ``expandable``.
    blocks : DataFrame
        The parts of the segments: ``device, address, size_bytes, requested_bytes, state`` (categorical of
        :data:`STATES`), ``stack``.
    frames : DataFrame
        Distinct frames: ``name, filename, line``.
    stack_bounds : ndarray of int64, shape (stacks + 1,)
        Stack `s` is ``stack_frames[stack_bounds[s]:stack_bounds[s + 1]]``, innermost first.
    stack_frames : ndarray of int64
        Rows of `frames`.
    annotations : DataFrame
        Ranges that PyTorch recorded beside: ``device, time_ns, name, stage`` (``START`` or ``END``).
    settings : dict
        The allocator's ``max_split_size``, and ``roundup_power2_divisions`` by size.
    devices : int
        Number of devices in the file.
    memo : dict
        What analyses derived from the snapshot and will need again.
    """

    path: str
    events: pd.DataFrame
    segments: pd.DataFrame
    blocks: pd.DataFrame
    frames: pd.DataFrame
    stack_bounds: _Ints
    stack_frames: _Ints
    annotations: pd.DataFrame
    settings: Json
    devices: int
    memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)


@uncollected()
def read(path: AnyPath) -> Snapshot:
    """Read a memory snapshot of PyTorch 2.1 or later.

    Parameters
    ----------
    path : path-like
        What ``torch.cuda.memory._dump_snapshot`` wrote.

    Returns
    -------
    Snapshot

    Raises
    ------
    TraceError
        The file is not a snapshot, is cut off, or asks for anything but plain data. Nothing in it is run.
    """
    path = Path(path)
    require_regular(path)
    size = path.stat().st_size
    with reading(path, "needs far more memory or time than a snapshot of its size", _REMEDY):
        tables = ask_limited(
            snapshot_child.__file__,
            [str(path.absolute())],
            memory_bytes=256_000_000 + 48 * size,  # what an honest file could need, several times over
            seconds=4 + size // 4_000_000,
            output_bytes=1_000_000 + 2 * size,
        )
    if "problem" in tables:
        raise TraceError(path, f"is not a memory snapshot ({tables['problem']}); nothing in it was run", _REMEDY)
    with reading(path, "is not a memory snapshot", _REMEDY):
        return _checked_snapshot(path, tables)


def _checked_snapshot(path: Path, tables: Json) -> Snapshot:
    """Make a Snapshot of PyTorch's memory allocator out of tables that the child process read from the pickle.

    They are those of :func:`nsightkit.trace.snapshot_child.tables`. ValueError if one holds impossible numbers.
    """
    events = _to_frame(tables["events"])
    segments = _to_frame(tables["segments"])
    blocks = _to_frame(tables["blocks"])
    annotations = _to_frame(tables["annotations"])
    devices = tables["devices"]
    for table in (events, segments, blocks):
        sizes = table["size_bytes"].astype(float)
        if sizes.lt(0).any() or sizes.sum() >= _SUM_LIMIT_BYTES:
            raise ValueError("it holds a size that cannot be")
        # The child counted the devices with a trace of events; a segment's or a block's device may have none.
        devices = max(devices, table["device"].max() + 1 if len(table) else 0)
        if devices > _MOST_DEVICES or table["device"].lt(0).any():
            raise ValueError(f"it has {devices} devices")
    start_us = events["time_us"].min() if len(events) else 0
    for table in (events, annotations):
        table["time_ns"] = (table.pop("time_us") - start_us) * 1000
    stacks = tables["stacks"]
    frames = pd.DataFrame(tables["frames"], columns=["name", "filename", "line"], dtype=object)
    return Snapshot(
        path=str(path),
        events=events,
        segments=segments.rename(columns={"size_bytes": "total_bytes"}).astype({"expandable": bool}),
        blocks=blocks,
        frames=frames,
        stack_bounds=np.cumsum([0, *map(len, stacks)], dtype=np.int64),  # lengths 2, 3: bounds 0, 2, 5
        stack_frames=np.array(list(itertools.chain.from_iterable(stacks)), np.int64),
        annotations=annotations,
        settings=tables["settings"],
        devices=int(devices),
    )


def _to_frame(columns: Json) -> pd.DataFrame:
    """Make a table of columns: texts, categories (missing where a text is none of them), and integers for the rest."""
    types: Json = dict.fromkeys(columns, "int64")
    types |= dict.fromkeys(_TEXT_COLUMNS, object) | _CATEGORICAL_DTYPES
    return pd.DataFrame({name: pd.Series(values, dtype=types[name]) for name, values in columns.items()})
