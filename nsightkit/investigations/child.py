"""The child process of a measurement: a fresh interpreter that measures one part and writes what it found.

Run as ``python -m nsightkit.investigations.child JOB``; `JOB` is JSON, and so is the result.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from nsightkit.capture.provenance import collect
from nsightkit.investigations.measuring import measure
from nsightkit.investigations.observing import observe
from nsightkit.investigations.parts import find
from nsightkit.investigations.recordings import part_key
from nsightkit.investigations.remembering import remember
from nsightkit.investigations.sweeping import sweep

__all__ = ["main"]


def main(job: dict[str, Any]) -> None:
    """Measure a part and write ``result.json``.

    Parameters
    ----------
    job : dict
        ``investigation, part, mode, folder, kind, command``.
    """
    import torch

    part, mode, folder = find(job["investigation"], job["part"]), job["mode"], Path(job["folder"])
    # What is measured says itself whether it ran on a GPU; nobody tells it.
    gpu = torch.cuda.is_available() and mode == "live"
    if mode == "live" and not gpu:
        raise RuntimeError("this torch sees no CUDA GPU")
    device = "cuda" if gpu else "cpu"
    if not gpu:
        # A machine that builds pages has few cores and other work; idle threads that spin make a step ten times longer.
        torch.set_num_threads(1)
    module, _, function = part.workload.partition(":")
    start = time.perf_counter()
    workload, trace = getattr(importlib.import_module(module), function), folder / "trace.json.gz"
    parameters, counts = part.parameters(mode), part.counts(mode)
    if part.watch == "observed":
        counts["shapes"] = int(part.shapes)
        watch = part.utilization
        samples, resolved = observe(workload, device, parameters, counts, watch_utilization=watch, trace=trace)
    elif part.watch == "swept":
        samples, resolved = sweep(workload, device, parameters, counts, trace=trace)
    elif part.watch == "remembered":
        snapshot = folder / "snapshot.pickle"
        samples, resolved = remember(workload, device, parameters, counts, trace=trace, snapshot=snapshot)
    else:
        watch = part.utilization
        samples, resolved = measure(workload, device, parameters, counts, watch_utilization=watch, trace=trace)
    provenance = collect(
        device=device,
        kind="measured" if gpu else job["kind"],
        investigation=part.investigation,
        part=part.name,
        key=part_key(part, mode),
        parameters=resolved,
        counts=counts,
        clock="CUDA events" if gpu else "perf_counter",
        command=job["command"],
        duration_s=round(time.perf_counter() - start, 3),
        **({"snapshot": _remembered_by(gpu)} if part.watch == "remembered" else {}),
    )
    result = json.dumps({"samples": samples, "provenance": provenance})
    (folder / "result.json").write_text(result, encoding="utf-8")


def _remembered_by(gpu: bool) -> str:
    return "PyTorch's allocator" if gpu else "tensors, counted on a CPU"


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
