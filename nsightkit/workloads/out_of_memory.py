"""Recognise an error that says memory ran out, and how much was asked for."""

from __future__ import annotations

import re

__all__ = ["is_out_of_memory", "requested_bytes"]

_UNITS = {"": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
#: The CPU's allocator, CUDA itself and libraries beside torch's own allocator (cuBLAS, cuDNN and their kin) raise a
#: plain RuntimeError. Triton's "out of resource" is about one kernel's shared memory and registers.
_RAN_OUT = re.compile(r"can't allocate memory|not enough memory|out of memory|ALLOC(?:ATION)?_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error means that memory ran out.

    Parameters
    ----------
    error : BaseException
    """
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return _RAN_OUT.search(str(error)) is not None


def requested_bytes(message: str) -> int | None:
    """Read how much could not be allocated from an error's message.

    Parameters
    ----------
    message : str

    Returns
    -------
    int or None
        As exact as the message, which rounds to a hundredth of its unit; None where it does not say.
    """
    match = re.search(r"tried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)?", message, re.IGNORECASE)
    if match is None:
        return None
    number, unit = match.groups()
    return round(float(number.rstrip(".")) * _UNITS[unit or ""])
