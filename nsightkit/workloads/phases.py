"""One name for a phase of a program in both worlds: an NVTX range and a ``record_function`` block.

``torch.profiler`` records no NVTX and ``record_function`` emits none, so a program that wants to be
read in Nsight Systems and in a PyTorch profile has to say everything twice. This says it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import nvtx


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Mark a phase of a step for every profiler that may be watching.

    Emits an NVTX range, through the ``nvtx`` package, and, in a program that has imported torch, a
    ``torch.profiler.record_function`` block.

    Parameters
    ----------
    name : str
        The same name each time: analyses add up the instances of a name.

    Examples
    --------
    >>> from nsightkit.workloads.phases import phase
    >>> with phase("forward"):
    ...     pass
    """
    torch = sys.modules.get("torch")
    block = torch.profiler.record_function(name) if torch is not None else contextlib.nullcontext()
    with nvtx.annotate(name), block:
        yield
