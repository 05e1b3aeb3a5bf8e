"""Record what PyTorch's caching allocator does, and write a snapshot that is safe to share.

``torch.cuda.memory._record_memory_history`` is private and changes between versions: it is called by keywords, and
with fewer of them where a version does not know one.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nsightkit.capture import provenance
from nsightkit.errors import UsageError

__all__ = ["Recording", "dump", "recording", "scrubbed", "supported", "write"]

#: An event with a stack of twenty frames takes about 0.2 kB in the file.
MAX_ENTRIES = 200_000

# Calls in order of preference; the last is the one of PyTorch 2.0, whose `enabled` was a flag.
_CALLS: tuple[tuple[str, ...], ...] = (
    ("enabled", "context", "stacks", "max_entries", "clear_history", "global_record_annotations"),
    ("enabled", "context", "stacks", "max_entries", "clear_history"),
    ("enabled", "context", "stacks", "max_entries"),
)


@dataclass
class Recording:
    """A recording under way; `path` is set once the snapshot is written.

    Attributes
    ----------
    path : Path or None
        The snapshot, when there is one.
    recorded : bool
        Whether this machine and this PyTorch could record at all.
    """

    path: Path | None = None
    recorded: bool = False


def supported() -> bool:
    """Say whether this PyTorch can record memory here: it needs a CUDA (or ROCm) device and the private function.

    Returns
    -------
    bool
    """
    import torch

    if not torch.cuda.is_available():
        return False
    memory = torch.cuda.memory
    return hasattr(memory, "_record_memory_history") and hasattr(memory, "_snapshot")


@contextlib.contextmanager
def recording(
    output: str | os.PathLike[str],
    *,
    max_entries: int = MAX_ENTRIES,
    stacks: Literal["python", "all"] = "all",
    context: Literal["alloc", "all"] = "all",
    scrub: bool = True,
    required: bool = True,
) -> Iterator[Recording]:
    """Record the allocator's events inside the block, and write a snapshot when it ends, also by an error.

    An out-of-memory error inside the block is in the snapshot, and goes on to the caller. What was allocated before the
    block has no call stack: begin before the model is made to know whose it is.

    Parameters
    ----------
    output : path-like
        The snapshot; appears whole or not at all.
    max_entries : int
        The last so many events are kept.
    stacks : {"python", "all"}
        With or without C++ frames. Only these tell autograd's kernels, autocast's copies and library workspaces apart;
        they cost some microseconds an event.
    context : {"alloc", "all"}
        Which events have a stack: what begins an allocation, or also what ends it.
    scrub : bool, default True
        Leave out folders, host and user names, as :func:`scrubbed` does.
    required : bool, default True
        Raise where nothing can be recorded. Otherwise the block runs unobserved.

    Yields
    ------
    Recording

    Raises
    ------
    UsageError
        There is no CUDA device, PyTorch cannot record, or the output cannot be written.
    """
    if max_entries < 1:
        raise UsageError(f"a recording cannot keep {max_entries} events")
    state = Recording()
    if not supported():
        if required:
            raise UsageError(
                "the allocator's history can only be recorded on a CUDA GPU with PyTorch 2.0 or later; this machine "
                "has none that PyTorch can use"
            )
        yield state
        return
    target = Path(output)
    if not target.absolute().parent.is_dir():
        raise UsageError(f"{target}: its folder does not exist; make it first")
    _start(max_entries, stacks, context)
    state.recorded = True
    try:
        yield state
    finally:
        try:
            state.path = dump(target, scrub=scrub)
        finally:
            _stop()


def _record() -> Callable[..., None]:
    import torch

    function: Callable[..., None] = torch.cuda.memory._record_memory_history
    return function


def _start(max_entries: int, stacks: str, context: str) -> None:
    """Begin, with as many keywords as this version knows."""
    wanted: dict[str, Any] = {
        "enabled": "all",
        "context": context,
        "stacks": stacks,
        "max_entries": max_entries,
        "clear_history": True,
        "global_record_annotations": True,
    }
    record = _record()
    for names in _CALLS:
        try:
            record(**{name: wanted[name] for name in names})
        except TypeError:
            continue
        return
    try:
        record(True, trace_alloc_max_entries=max_entries, trace_alloc_record_context=True)
    except TypeError as error:
        raise UsageError(
            f"this PyTorch's _record_memory_history takes other arguments than those known ({error}); "
            "record without a snapshot, or with another version"
        ) from error


def _stop() -> None:
    try:
        _record()(enabled=None)
    except TypeError:
        _record()(False)


def dump(output: str | os.PathLike[str], *, scrub: bool = True) -> Path:
    """Write the allocator's state, and its events if they are being recorded.

    Parameters
    ----------
    output : path-like
        Appears whole or not at all.
    scrub : bool, default True
        Leave out folders, host and user names, as :func:`scrubbed` does.

    Returns
    -------
    Path
        `output`.

    Raises
    ------
    UsageError
        The file cannot be written.
    """
    import torch

    return write(torch.cuda.memory._snapshot(), output, scrub=scrub)


def write(taken: Mapping[str, Any], output: str | os.PathLike[str], *, scrub: bool = True) -> Path:
    """Write a snapshot that was taken.

    Parameters
    ----------
    taken : mapping
        What ``torch.cuda.memory._snapshot()`` returned, or ``TensorMemory.snapshot()``.
    output : path-like
        Appears whole or not at all.
    scrub : bool, default True
        Leave out folders, host and user names, as :func:`scrubbed` does.

    Returns
    -------
    Path
        `output`.

    Raises
    ------
    UsageError
        The file cannot be written.
    """
    if scrub:
        taken = scrubbed(taken)
    target = Path(output)
    try:
        with tempfile.NamedTemporaryFile(dir=target.absolute().parent, prefix=".nsightkit-", delete=False) as file:
            try:
                # Protocol 4 is what any Python since 3.4 reads, whichever wrote it.
                pickle.dump(taken, file, protocol=4)
                file.close()
                whole = Path(file.name)
                whole.chmod(0o644)
                whole.replace(target)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise UsageError(f"{target}: cannot be written ({error.strerror or error})") from error
    return target


# Folders before these name a machine and a person; from there on they name a library.
_KEPT = re.compile(
    r".*?[/\\]((?:site|dist)-packages[/\\].*|lib[/\\]python\d[^/\\]*[/\\](?!(?:site|dist)-packages).*"
    r"|torch[/\\](?:autograd|cuda|distributed|_dynamo|_functorch|nn|optim|utils)[/\\].*)",
    re.DOTALL,
)
_FOLDERS = re.compile(r".*[/\\]", re.DOTALL)


def scrubbed(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """Make a copy of a snapshot without folders, host and user names, secrets, or source code.

    A file in a library keeps its path from ``site-packages`` (or ``lib/python3.x``) on; any other only its name. Frames
    keep name, file and line. Sizes, addresses, times and the order of events stay as they are.

    Parameters
    ----------
    snapshot : mapping
        What ``torch.cuda.memory._snapshot()`` returned.

    Returns
    -------
    dict
        Of the same shape. Frames and lists of frames are shared wherever they are equal, which makes the file small.
    """
    frames: dict[int, dict[str, Any]] = {}
    same: dict[tuple[str, Any, str], dict[str, Any]] = {}
    stacks: dict[int, list[dict[str, Any]]] = {}
    alike: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    texts: dict[str, str] = {}

    def text(value: str) -> str:
        if value not in texts:
            texts[value] = provenance.scrub(value)
        return texts[value]

    def frame(given: Mapping[str, Any]) -> dict[str, Any]:
        if id(given) not in frames:
            filename = str(given.get("filename", ""))
            library = _KEPT.fullmatch(filename)
            filename = library[1] if library else _FOLDERS.sub("", filename)
            made = {
                "filename": text(filename),
                "line": given.get("line", 0),
                "name": text(str(given.get("name", ""))),
            }
            frames[id(given)] = same.setdefault((made["filename"], made["line"], made["name"]), made)
        return frames[id(given)]

    def stack(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        if id(given) not in stacks:
            made = [frame(each) for each in given]
            stacks[id(given)] = alike.setdefault(tuple(map(id, made)), made)
        return stacks[id(given)]

    def copy(value: Any, key: str = "") -> Any:
        if key == "frames" and isinstance(value, list):
            return stack(value)
        if isinstance(value, str):
            return value if value in _PLAIN else text(value)
        if isinstance(value, Mapping):
            return {name: copy(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [copy(item) for item in value]
        return value

    return {name: copy(item, name) for name, item in snapshot.items()}


#: Values that events repeat by the hundred thousand and that say nothing.
_PLAIN = frozenset(
    [
        "alloc",
        "free_requested",
        "free_completed",
        "segment_alloc",
        "segment_free",
        "segment_map",
        "segment_unmap",
        "oom",
        "snapshot",
        "active_allocated",
        "active_pending_free",
        "inactive",
        "small",
        "large",
        "N/A",
    ]
)
