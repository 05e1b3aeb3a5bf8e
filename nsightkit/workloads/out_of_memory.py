"""Recognise that memory ran out, how much was asked for then, and errors after which a GPU answers nothing more.

It lies with the workloads because those that go on without memory use it themselves, and captures may use workloads.
"""

from __future__ import annotations

import re

__all__ = ["is_out_of_memory", "is_sticky", "requested_bytes"]

_UNITS = {"": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
#: The CPU's allocator, CUDA itself and libraries beside torch's own allocator (cuBLAS, cuDNN and their kin) raise a
#: plain RuntimeError. Triton's "out of resource" is about one kernel's shared memory and registers.
_RAN_OUT = re.compile(r"can't allocate memory|not enough memory|out of memory|ALLOC(?:ATION)?_FAILED")
#: What CUDA says of errors that end a process's context: every later call fails with the same words.
_STICKY = re.compile(
    r"illegal memory access|device-side assert|unspecified launch failure|misaligned address|illegal instruction"
    r"|invalid program counter|hardware stack error|invalid address space|not supported on global/shared address space"
    r"|launch timed out|uncorrectable .*ECC"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out.

    Parameters
    ----------
    error : BaseException

    Returns
    -------
    bool
    """
    import torch

    return isinstance(error, torch.OutOfMemoryError | MemoryError) or _RAN_OUT.search(str(error)) is not None


def is_sticky(error: BaseException) -> bool:
    """Whether an error ended this process's use of the GPU: all that is asked of it from then on fails.

    Parameters
    ----------
    error : BaseException

    Returns
    -------
    bool
    """
    return _STICKY.search(str(error)) is not None


def requested_bytes(text: str) -> int | None:
    """Read from an error's message what could not be allocated.

    Parameters
    ----------
    text : str

    Returns
    -------
    int or None
        As exact as the message, which rounds to a hundredth of its unit; None where it does not say.
    """
    found = re.search(r"tried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)?", text, re.IGNORECASE)
    return round(float(found[1].rstrip(".")) * _UNITS[found[2] or ""]) if found else None
