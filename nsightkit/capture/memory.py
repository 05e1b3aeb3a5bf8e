"""Record the history of PyTorch's caching allocator, and write a snapshot that is safe to share.

``torch.cuda.memory._record_memory_history`` is private and changes between versions, so it is called by keywords.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from nsightkit.errors import AnyPath, UsageError
from nsightkit.text import Json
from nsightkit.trace.clean import clean_snapshot
from nsightkit.trace.files import replacing

#: An event with a stack of twenty frames takes about 0.2 kB in the file.
MAX_ENTRIES = 200_000


@contextlib.contextmanager
def recording(
    output: AnyPath,
    *,
    max_entries: int = MAX_ENTRIES,
    context: Literal["alloc", "all"] = "all",
) -> Iterator[None]:
    """Record the allocator's events inside the block, and write a snapshot when it ends, also by an error.

    An out-of-memory error inside the block is in the snapshot, and goes on to the caller. Memory that was allocated
    before the block has no call stack: begin before the model is made to know whose it is.

    Parameters
    ----------
    output : path-like
        The snapshot; written atomically.
    max_entries : int
        Number of events to keep, the latest.
    context : {"alloc", "all"}
        Which events get a stack: allocations only, or also frees.

    Raises
    ------
    UsageError
        There is no CUDA device, or the output cannot be written.
    """
    import torch

    if not torch.cuda.is_available():
        raise UsageError("the allocator's history can only be recorded on a CUDA GPU, and PyTorch finds none here")
    path = Path(output)
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path}: its folder does not exist; make it first")
    # PyTorch would start an addr2line that reads a gigabyte of libraries, and can stall for minutes. PyTorch reads this
    # variable when it first looks up a name, so setting it here is early enough; exported names, such as autograd's,
    # are found either way.
    os.environ.setdefault("TORCH_DISABLE_ADDR2LINE", "1")
    # C++ frames cost some microseconds an event; only they tell autograd's kernels and library workspaces apart.
    record_history: Any = torch.cuda.memory._record_memory_history
    arguments: dict[str, Any] = {"context": context, "stacks": "all", "max_entries": max_entries, "clear_history": True}
    try:
        record_history(enabled="all", **arguments, global_record_annotations=True)
    except TypeError:  # an older version, without annotations
        record_history(enabled="all", **arguments)
    try:
        yield
    finally:
        try:
            write(torch.cuda.memory._snapshot(), path)
        finally:
            record_history(enabled=None)


def write(snapshot: Json, output: AnyPath) -> Path:
    """Write a snapshot without folders, host and user names.

    Parameters
    ----------
    snapshot : mapping
        From ``torch.cuda.memory._snapshot()``.
    output : path-like
        Written atomically.

    Returns
    -------
    Path
        `output`.

    Raises
    ------
    UsageError
        The file cannot be written.
    """
    path = Path(output)
    with replacing(path) as file:
        pickle.dump(clean_snapshot(snapshot), file, protocol=4)  # any Python since 3.4 reads it
    return path
