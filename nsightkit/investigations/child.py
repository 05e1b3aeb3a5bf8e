"""The child process of a measurement: a fresh interpreter that measures one part and writes what it found.

Run as ``python -m nsightkit.investigations.child JOB``; `JOB` is JSON, and so is the result.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from nsightkit.capture.provenance import collect
from nsightkit.investigations.parts import MEASURES, find, prepared, resolve
from nsightkit.investigations.recordings import part_key

__all__ = ["main"]


def main(investigation: str, part: str, mode: str, folder: str, kind: str, command: str) -> None:
    """Measure a part and write ``result.json``.

    Parameters
    ----------
    investigation, part : str
    mode : {"live", "smoke"}
    folder : str
        Gets the result, and what the measuring function writes.
    kind : str
        What the provenance of a CPU run calls it; a GPU's is always ``measured``.
    command : str
        What the provenance says was run.
    """
    # What is measured says itself whether it ran on a GPU.
    device = prepared(mode)
    gpu = device == "cuda"
    start = time.perf_counter()
    chosen, place = find(investigation, part), Path(folder)
    counts = chosen.counts(mode)
    measure, workload = resolve(MEASURES[chosen.measured]), resolve(chosen.workload)
    samples, parameters = measure(workload, device, chosen.parameters(mode), counts, place)
    allocator = "PyTorch's allocator" if gpu else "tensors, counted on a CPU"
    provenance = collect(
        device=device,
        kind="measured" if gpu else kind,
        investigation=investigation,
        part=part,
        key=part_key(chosen, mode),
        parameters=parameters,
        counts=counts,
        clock="CUDA events" if gpu else "perf_counter",
        command=command,
        duration_s=round(time.perf_counter() - start, 3),
        **({"snapshot": allocator} if (place / "snapshot.pickle").is_file() else {}),
    )
    result = json.dumps({"samples": samples, "provenance": provenance})
    (place / "result.json").write_text(result, encoding="utf-8")


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
