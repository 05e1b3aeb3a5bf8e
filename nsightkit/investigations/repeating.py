"""What runs under Nsight Systems: some steady steps of a part, in a process of its own, timed by nobody.

Run as ``python -m nsightkit.investigations.repeating INVESTIGATION PART MODE``. A recording of a part that asks for
nsys is valid for exactly the code of :func:`repeat`, too.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

from nsightkit.investigations.parts import find
from nsightkit.workloads.phases import phase

__all__ = ["CAPTURED", "STEADY", "repeat"]

#: NVTX range that opens the capture ...
CAPTURED = "nsightkit-captured"
#: ... and, in it, the one around the steps that are kept.
STEADY = "nsightkit-steady"
#: Steps between the two: nsys sets its tracing up when the capture opens, and the first step waits for it.
_SETTLING = 2


def repeat(workload: Any, device: str, parameters: Mapping[str, Any], *, warmup: int, active: int) -> None:
    """Run a workload as for a part's profile by PyTorch: warmed up, then a few steps that count.

    Parameters
    ----------
    workload : callable
        ``start`` of a module in :mod:`nsightkit.workloads`.
    device : str
    parameters : mapping
        Of the workload.
    warmup : int
        Steps before the capture.
    active : int
        Steps that count. The GPU has nothing left of others when they begin, nor of them when they end.
    """
    with workload(device, **parameters) as work:
        for _ in range(warmup):
            work.step()
        _drain(device)
        with phase(CAPTURED):
            for _ in range(_SETTLING):
                work.step()
            _drain(device)
            with phase(STEADY):
                for _ in range(active):
                    work.step()
                _drain(device)


def _drain(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _main(investigation: str, name: str, mode: str) -> None:
    import torch

    part = find(investigation, name)
    if mode == "live" and not torch.cuda.is_available():
        raise RuntimeError("this torch sees no CUDA GPU")
    if mode != "live":
        # As the part itself is measured on a CPU.
        torch.set_num_threads(1)
    module, _, function = part.workload.partition(":")
    counts = part.counts(mode)
    repeat(
        getattr(importlib.import_module(module), function),
        "cuda" if mode == "live" else "cpu",
        part.parameters(mode),
        warmup=counts["warmup"],
        active=counts["active"],
    )


if __name__ == "__main__":
    _main(*sys.argv[1:])
