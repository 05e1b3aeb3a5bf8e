"""The child process of the benchmark: measures one cell."""

from __future__ import annotations

import torch

from nsightkit.capture.children import run_as_child
from nsightkit.capture.provenance import collect
from nsightkit.capture.timing import time_calls
from nsightkit.text import Json
from nsightkit.workloads import lm
from nsightkit.workloads.models import marked
from nsightkit.workloads.out_of_memory import is_out_of_memory


def main(
    device: str,
    parameters: Json,
    warmup: int,
    steps: int,
    describe: bool,
) -> Json:
    """Measure a cell.

    Parameters
    ----------
    device : str
    parameters : dict
        Fields of :class:`nsightkit.workloads.lm.LMConfig`.
    warmup, steps : int
    describe : bool
        Add the machine's provenance.

    Returns
    -------
    dict
        Fields of the cell's row, and on a GPU its name as ``gpu``.
    """
    result: Json = {}
    on_gpu = device.startswith("cuda")
    if describe:
        result["provenance"] = collect(device=device, kind="measured" if on_gpu else "smoke")
    if not on_gpu:
        # On a busy machine, idle threads that spin make a step ten times longer.
        torch.set_num_threads(1)
    elif parameters["precision"] == "tf32" and torch.cuda.get_device_capability(device) < (8, 0):
        return {**result, "status": "unsupported", "detail": "this GPU has no TF32"}
    result |= _measure_steps(device, parameters, warmup, steps)
    if on_gpu:
        result["gpu"] = torch.cuda.get_device_name(device)
        result["peak_allocated_bytes"] = torch.cuda.max_memory_allocated(device)
        result["peak_reserved_bytes"] = torch.cuda.max_memory_reserved(device)
    return result


def _measure_steps(device: str, parameters: Json, warmup: int, steps: int) -> Json:
    """Time the steps, each in ns; gives the samples, or the phase in which memory ran out.

    With ``annotate`` the timed steps are in an NVTX range. The first warm-up step is timed, too.
    """
    running: lm.Run | None = None
    try:
        running = lm.run(device, **parameters)
        # Reported apart: the first step loads kernels, allocates and, if asked to, compiles.
        first_sample_ns = time_calls(running.step, warmup=0, repetitions=1, device=device).tolist() if warmup else []
        for _ in range(warmup - 1):
            running.step()
        with marked("measure", parameters["annotate"]):
            samples_ns = time_calls(running.step, warmup=0, repetitions=steps, device=device).tolist()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        where = "setup" if running is None else running.doing
        return {"status": "oom", "where": where, "detail": " ".join(str(error).split())[:300]}
    return {
        "status": "ok",
        "samples_ns": samples_ns,
        "first_step_ns": (first_sample_ns + samples_ns)[0],  # without warm-up, the first sample
        "clock": "cuda-event" if device.startswith("cuda") else "perf_counter",
    }


if __name__ == "__main__":
    run_as_child(main)
