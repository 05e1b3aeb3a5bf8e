"""The process in which one part is measured: how it is started, and what it does.

A part is measured in an interpreter of its own, ``python -m nsightkit.investigations.child JOB``; `JOB` is JSON, and so
is the result. A smoke run's process is forked instead, for importing torch takes longer than most smoke runs measure.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from nsightkit.capture import torch_profiler, utilization
from nsightkit.capture.children import ask_child, child_environment, fork_child, start_child
from nsightkit.capture.provenance import collect, scrub
from nsightkit.errors import NsightkitError
from nsightkit.investigations import under_nsight
from nsightkit.investigations.parts import MEASURES, Part, find, prepared, resolve
from nsightkit.investigations.recordings import SNAPSHOT, part_key

__all__ = ["main", "run_child"]


def run_child(
    part: Part, mode: str, folder: Path, *, kind: str, command: str, timeout_s: float
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Measure a part in a process of its own.

    A part that asks for it then runs once more, in another process under Nsight Systems or Nsight Compute.

    Parameters
    ----------
    part : Part
    mode : {"live", "smoke"}
    folder : Path
        Gets ``trace.json.gz``, ``snapshot.pickle`` of a part that takes one, and ``nsys`` or ``ncu.csv`` of the second
        run, if it works.
    kind : str
        What the provenance of a CPU run calls it; a GPU's is always ``measured``.
    command : str
        What the provenance says was run.
    timeout_s : float
        For both. The second run takes at most five minutes of it; in a smoke run, which must stay quick, one.

    Returns
    -------
    samples : dict of str to list
    provenance : dict

    Raises
    ------
    NsightkitError
        The child failed or took too long; the message holds the end of what it wrote.
    """
    job = {"investigation": part.investigation, "part": part.name, "mode": mode, "folder": str(folder.absolute())}
    job |= {"kind": kind, "command": command}
    begin = time.monotonic()
    start = fork_child if mode == "smoke" and sys.platform == "linux" else start_child
    try:
        result = ask_child("nsightkit.investigations.child", job, timeout_s, start)
    except NsightkitError as error:
        raise NsightkitError(f"{part.investigation}/{part.name} ({mode}) was not measured: {error}") from error
    samples, provenance = result["samples"], result["provenance"]
    if part.profiled:
        left = max(timeout_s - (time.monotonic() - begin), 1.0)
        limit_s = min(left, 60.0 if mode == "smoke" else 300.0)
        found = under_nsight.capture(part, mode, folder, timeout_s=limit_s, environment=child_environment())
        provenance[part.profiled] = scrub(found)
    return samples, provenance


def main(investigation: str, part: str, mode: str, folder: str, kind: str, command: str, result: str) -> None:
    """Measure a part, and write its samples and its provenance to the file `result`.

    Parameters
    ----------
    investigation, part : str
    mode : {"live", "smoke"}
    folder : str
        Gets what the measuring function writes.
    kind : str
        What the provenance of a CPU run calls it; a GPU's is always ``measured``.
    command : str
        What the provenance says was run.
    result : str
    """
    chosen, place = find(investigation, part), Path(folder)
    device = prepared(mode)
    on_gpu = device == "cuda"
    start = time.perf_counter()
    counts = chosen.counts(mode)
    measure, workload = resolve(MEASURES[chosen.measured]), resolve(chosen.workload)
    with utilization.logged(device) as load:
        samples, parameters = measure(workload, device, chosen.parameters(mode), counts, place)
    attention = torch_profiler.attention_back_ends(place / "trace.json.gz")
    allocator = "PyTorch's allocator" if on_gpu else "tensors, counted on a CPU"
    provenance = collect(
        device=device,
        kind="measured" if on_gpu else kind,
        investigation=investigation,
        part=part,
        key=part_key(chosen, mode),
        parameters=parameters,
        counts=counts,
        clock="CUDA events" if on_gpu else "perf_counter",
        command=command,
        duration_s=round(time.perf_counter() - start, 3),
        **({"load": load} if load else {}),
        **({"sdpa_backend": ", ".join(attention)} if attention else {}),
        **({"snapshot": allocator} if (place / SNAPSHOT).is_file() else {}),
    )
    Path(result).write_text(json.dumps({"samples": samples, "provenance": provenance}), encoding="utf-8")


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
