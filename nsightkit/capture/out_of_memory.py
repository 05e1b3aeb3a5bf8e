"""Recognise that memory ran out, and how much was asked for then."""

from __future__ import annotations

import re

__all__ = ["is_out_of_memory", "requested_bytes"]

_UNITS = {"": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


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

    # The CPU's allocator, and libraries beside torch's own allocator, raise a plain RuntimeError.
    said = re.search(r"can't allocate memory|not enough memory|out of memory|STATUS_ALLOC_FAILED", str(error))
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or said is not None


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
