"""The child process of the benchmark: measures one cell."""

from __future__ import annotations

import contextlib
import gc
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from nsightkit.capture import memory
from nsightkit.capture.provenance import collect
from nsightkit.capture.timing import time_calls
from nsightkit.workloads import lm
from nsightkit.workloads.out_of_memory import is_out_of_memory, requested_bytes
from nsightkit.workloads.phases import phase

__all__ = ["main"]


def main(
    device: str, parameters: Mapping[str, Any], *, warmup: int, steps: int, nvtx: bool, memory_cap_bytes: int | None,
    provenance: bool,
) -> dict[str, Any]:  # fmt: skip
    """Measure a cell.

    Parameters
    ----------
    device : str
    parameters : mapping
        Fields of :class:`nsightkit.workloads.lm.LMConfig`.
    warmup, steps : int
    nvtx : bool
        Mark the timed steps.
    memory_cap_bytes : int or None
    provenance : bool
        Also say on what it was measured.

    Returns
    -------
    dict
        What was found.
    """
    cuda = device.startswith("cuda")
    if not cuda:
        # As elsewhere on a CPU: idle threads that spin, beside other work, make a step ten times longer.
        torch.set_num_threads(1)
    begun = time.perf_counter()
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(device) if cuda else None}
    if cuda and parameters["precision"] == "tf32" and torch.cuda.get_device_capability(device) < (8, 0):
        found |= {"status": "unsupported", "detail": "this GPU has no TF32"}
    else:
        with _cap(memory_cap_bytes, device):
            found |= _measure(device, parameters, warmup, steps, nvtx)
    if cuda:
        found |= {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
        }
    if provenance:
        duration = round(time.perf_counter() - begun, 3)
        found["provenance"] = collect(device=device, kind="measured" if cuda else "smoke", duration_s=duration)
    return found


def _measure(device: str, parameters: Mapping[str, Any], warmup: int, steps: int, nvtx: bool) -> dict[str, Any]:
    """Time the steps; when memory runs out, say where."""
    running: lm.Run | None = None
    try:
        running = lm.run(device, **parameters)
        return {"status": "ok", **_timed(running, device, warmup, steps, nvtx)}
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        text, where = str(error), "setup" if running is None else running.doing
    # Outside the handler: until it ends the traceback holds every frame's tensors.
    running = None
    gc.collect()
    detail = " ".join(text.split())[:300]
    return {"status": "oom", "where": where, "requested_bytes": requested_bytes(text), "detail": detail}


def _timed(running: lm.Run, device: str, warmup: int, steps: int, nvtx: bool) -> dict[str, Any]:
    first = None
    if warmup:
        start = time.perf_counter_ns()
        running.step()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        first = time.perf_counter_ns() - start
    for _ in range(warmup - 1):
        running.step()
    with phase("measure") if nvtx else contextlib.nullcontext():
        samples = time_calls(running.step, warmup=0, repetitions=steps, device=device).tolist()
    clock = "cuda-event" if device.startswith("cuda") else "perf_counter"
    return {"samples_ns": samples, "first_step_ns": samples[0] if first is None else first, "clock": clock}


@contextlib.contextmanager
def _cap(limit_bytes: int | None, device: str) -> Iterator[None]:
    """Let the model have no more than this: of the GPU's memory, or beyond what this process has with torch loaded."""
    if limit_bytes is None:
        yield
    elif device.startswith("cuda"):
        with memory.limited(limit_bytes, device):
            yield
    else:
        import resource

        # What the first step of any model loads (the optimizer brings half of torch) is not this model's memory.
        with lm.run(device, context=8, batch=1) as tiny:
            tiny.step()
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        have = re.search(r"^VmData:\s+(\d+) kB", status, re.MULTILINE)
        assert have is not None
        before = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (int(have[1]) * 1024 + limit_bytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)
