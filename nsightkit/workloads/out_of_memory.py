"""Recognise an error that says memory ran out."""

from __future__ import annotations

import re

#: The CPU's allocator, CUDA itself and libraries beside torch's own allocator (cuBLAS, cuDNN and their kin) raise a
#: plain RuntimeError. Triton's "out of resource" is about one kernel's shared memory and registers.
_OUT_OF_MEMORY = re.compile(r"can't allocate memory|not enough memory|out of memory|ALLOC(?:ATION)?_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error means that memory ran out.

    Parameters
    ----------
    error : BaseException
    """
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return _OUT_OF_MEMORY.search(str(error)) is not None
