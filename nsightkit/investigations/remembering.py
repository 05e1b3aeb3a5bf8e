"""The measuring function of parts whose memory is recorded: the allocator's history from before the model is built.

A recording of such a part is valid for exactly this code, as one of any other part is for
``nsightkit.investigations.measuring``.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from nsightkit.capture import memory, torch_profiler
from nsightkit.workloads.tensor_memory import TensorMemory

__all__ = ["remember"]

#: An event takes some 60 bytes in the file; a recording should not be larger than a megabyte or two.
_EVENTS = 20_000
#: Steps after which a part that is to run out of memory has failed to.
_MOST_STEPS = 200

_Samples = dict[str, list[float]]


def remember(
    workload: Any,
    device: str,
    parameters: Mapping[str, Any],
    counts: Mapping[str, int],
    *,
    trace: Path,
    snapshot: Path,
) -> tuple[_Samples, dict[str, Any]]:
    """Run one part twice: once while its memory is recorded, and once, for a step or two, under the profiler.

    Parameters
    ----------
    workload : callable
        ``start`` of a module in :mod:`nsightkit.workloads`.
    device : str
    parameters : mapping
        Of the workload. With ``limit_bytes`` it gets no more memory than that, and runs until it has run out.
    counts : mapping
        ``active``: steps that are recorded, without a limit.
    trace : Path
        Where the profile is written.
    snapshot : Path
        Where the snapshot is written: of PyTorch's allocator on a GPU, of tensors on a CPU.

    Returns
    -------
    samples : dict of str to list
        One value each. ``steps``, those that were finished, and ``out_of_memory``, 0 or 1. What was counted beside the
        snapshot, at the end: ``allocated_bytes``, ``peak_bytes``, ``reserved_bytes``; on a GPU also ``context_bytes``,
        what the device holds beyond what is reserved.
    resolved : dict
        All sizes and switches of the workload, its defaults included.
    """
    own = dict(parameters)
    limit_bytes = own.pop("limit_bytes", None)
    samples, resolved = _recorded(workload, device, own, counts["active"], limit_bytes, snapshot)
    if limit_bytes is not None:
        resolved["limit_bytes"] = limit_bytes
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    with workload(device, **own) as work:
        torch_profiler.profile_steps(work.step, trace, wait=0, warmup=1, active=1)
    return samples, resolved


def _recorded(
    workload: Any,
    device: str,
    parameters: Mapping[str, Any],
    steps: int,
    limit_bytes: int | None,
    snapshot: Path,
) -> tuple[_Samples, dict[str, Any]]:
    # A function of its own: what an exception's frames hold is let go when it returns.
    done = 0
    full = False
    with contextlib.ExitStack() as watch:
        watched = _on_gpu if device.startswith("cuda") else _on_cpu
        count = watch.enter_context(watched(snapshot, limit_bytes))
        with workload(device, **parameters) as work:
            try:
                while done < (steps if limit_bytes is None else _MOST_STEPS):
                    work.step()
                    done += 1
            except torch.OutOfMemoryError:
                if limit_bytes is None:
                    raise
                full = True
            found = {"steps": done, "out_of_memory": int(full), **count()}
            watch.close()  # the snapshot is taken while the model is still there
            return {name: [value] for name, value in found.items()}, dict(work.parameters)


@contextlib.contextmanager
def _on_gpu(snapshot: Path, limit_bytes: int | None) -> Iterator[Callable[[], Mapping[str, float]]]:
    """Record the caching allocator's history, and let it have no more than the limit."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    _, total = torch.cuda.mem_get_info()

    def count() -> Mapping[str, float]:
        # The device's own account is only right when all that was asked of it is done.
        torch.cuda.synchronize()
        free, whole = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        return {
            "allocated_bytes": torch.cuda.memory_allocated(),
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": reserved,
            "context_bytes": whole - free - reserved,
        }

    if limit_bytes is not None:
        torch.cuda.set_per_process_memory_fraction(min(limit_bytes / total, 1.0))
    try:
        # Stacks of what ends an allocation would double the file and say nothing here.
        with memory.recording(snapshot, max_entries=_EVENTS, context="alloc"):
            yield count
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@contextlib.contextmanager
def _on_cpu(snapshot: Path, limit_bytes: int | None) -> Iterator[Callable[[], Mapping[str, float]]]:
    """Keep the history of tensors, which is all that a CPU has, and let them have no more than the limit."""
    with TensorMemory(limit_bytes=limit_bytes, history=True) as tensors:

        def count() -> Mapping[str, float]:
            # A CPU caches nothing: what is reserved is what is allocated.
            now = tensors.allocated_bytes
            return {"allocated_bytes": now, "peak_bytes": tensors.peak_bytes, "reserved_bytes": now}

        yield count
    memory.write(tensors.snapshot(), snapshot)
    tensors.close()
