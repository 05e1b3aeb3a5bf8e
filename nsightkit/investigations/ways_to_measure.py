"""What is done to a workload, in the child process, to measure one part: a function for each way to measure.

All take ``(workload, device, parameters, counts, folder)``: ``start`` of a module in :mod:`nsightkit.workloads`, the
device, the workload's parameters, the numbers of steps (:meth:`nsightkit.investigations.parts.Part.counts`) and the
folder that gets the profile, ``trace.json.gz``. All give raw samples by metric, whose name holds its unit, and the
sizes and switches of the workload, its defaults included. One more is
:func:`nsightkit.investigations.sweep_column.swept`.

A recording is valid for exactly this code (:mod:`nsightkit.investigations.what_runs`): what does not decide the
figures, such as provenance, is elsewhere.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from nsightkit.capture import memory, timing, torch_profiler, utilization
from nsightkit.workloads.out_of_memory import is_out_of_memory
from nsightkit.workloads.tensor_memory import TensorMemory

__all__ = ["observed", "remembered", "timed"]

_Samples = dict[str, list[float]]

#: An event takes some 60 bytes in the file; a recording should not be larger than a megabyte or two.
_EVENTS = 20_000
#: Steps after which a part that is to run out of memory has failed to.
_MOST_STEPS = 200


def timed(
    workload: Any, device: str, parameters: Mapping[str, Any], counts: Mapping[str, int], folder: Path
) -> tuple[_Samples, dict[str, Any]]:
    """Time steps unwatched, then profile a few steady ones.

    A profiler makes the CPU slower by some 10 to 30 %, so times of steps never come from the profiled run. With
    ``counts["utilization"]`` the workload also runs on a GPU for four seconds in which NVML is read.
    """
    with workload(device, **parameters) as work:
        samples = _step_ns(work, device, counts)
        if work.data_wait_ns:
            samples["data_wait_ns"] = list(work.data_wait_ns[-counts["repetitions"] :])
        samples |= _utilization(work, device, counts, 4.0)
        torch_profiler.profile_steps(work.step, folder / "trace.json.gz", wait=1, warmup=2, active=counts["active"])
        return samples | {"loss": work.losses()}, dict(work.parameters)


def observed(
    workload: Any, device: str, parameters: Mapping[str, Any], counts: Mapping[str, int], folder: Path
) -> tuple[_Samples, dict[str, Any]]:
    """Time and profile a few steps, then ask the workload what it observed, with ``observed()``.

    With ``counts["shapes"]`` the profile keeps what operators are given; ``counts["utilization"]`` as for
    :func:`timed`, for 2.5 s.
    """
    with workload(device, **parameters) as work:
        samples = _step_ns(work, device, counts) | _utilization(work, device, counts, 2.5)
        place, shapes = folder / "trace.json.gz", bool(counts["shapes"])
        torch_profiler.profile_steps(work.step, place, wait=1, warmup=1, active=counts["active"], shapes=shapes)
        # Last: hooks would be in the way of the profile, and of the clock.
        return samples | work.observed(), dict(work.parameters)


def _step_ns(work: Any, device: str, counts: Mapping[str, int]) -> _Samples:
    steps = timing.time_calls(work.step, warmup=counts["warmup"], repetitions=counts["repetitions"], device=device)
    return {"step_ns": steps.tolist()}


def _utilization(work: Any, device: str, counts: Mapping[str, int], duration_s: float) -> _Samples:
    asked = counts["utilization"] and device.startswith("cuda")
    return utilization.sample(work.step, duration_s) if asked else {}


def remembered(
    workload: Any, device: str, parameters: Mapping[str, Any], counts: Mapping[str, int], folder: Path
) -> tuple[_Samples, dict[str, Any]]:
    """Run a workload twice: once while its memory is recorded, and once, for a step or two, under the profiler.

    With ``parameters["limit_bytes"]`` it gets no more memory than that, and runs until it has run out; else
    ``counts["active"]`` steps are recorded. `folder` also gets ``snapshot.pickle``: of PyTorch's allocator on a GPU, of
    tensors on a CPU.

    The samples have one value each: ``steps``, those that were finished, and ``out_of_memory``, 0 or 1. What was
    counted beside the snapshot, at the end: ``allocated_bytes``, ``peak_bytes``, ``reserved_bytes``; on a GPU also
    ``context_bytes``, what the device holds beyond what is reserved.
    """
    own = {name: value for name, value in parameters.items() if name != "limit_bytes"}
    limit_bytes, snapshot = parameters.get("limit_bytes"), folder / "snapshot.pickle"
    samples, resolved = _recorded(workload, device, own, counts["active"], limit_bytes, snapshot)
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    with workload(device, **own) as work:
        torch_profiler.profile_steps(work.step, folder / "trace.json.gz", wait=0, warmup=1, active=1)
    return samples, resolved | ({} if limit_bytes is None else {"limit_bytes": limit_bytes})


def _recorded(
    workload: Any,
    device: str,
    parameters: Mapping[str, Any],
    steps: int,
    limit_bytes: int | None,
    snapshot: Path,
) -> tuple[_Samples, dict[str, Any]]:
    # A function of its own: what an exception's frames hold is let go when it returns.
    done, full = 0, False
    with contextlib.ExitStack() as watch:
        watched = _on_gpu if device.startswith("cuda") else _on_cpu
        count = watch.enter_context(watched(snapshot, limit_bytes))
        with workload(device, **parameters) as work:
            try:
                while done < (steps if limit_bytes is None else _MOST_STEPS):
                    work.step()
                    done += 1
            except (RuntimeError, MemoryError) as error:
                if limit_bytes is None or not is_out_of_memory(error):
                    raise
                full = True
            found = {"steps": done, "out_of_memory": int(full), **count()}
            watch.close()  # the snapshot is taken while the model is still there
            return {name: [value] for name, value in found.items()}, dict(work.parameters)


@contextlib.contextmanager
def _on_gpu(snapshot: Path, limit_bytes: int | None) -> Iterator[Callable[[], Mapping[str, float]]]:
    """Record the caching allocator's history, and let it have no more than the limit."""
    torch.cuda.init()  # type: ignore[no-untyped-call]

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

    # Stacks of what ends an allocation would double the file and say nothing here.
    with memory.limited(limit_bytes), memory.recording(snapshot, max_entries=_EVENTS, context="alloc"):
        yield count


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
