"""Decode a pickle from standard input, and print what is wrong with it: :mod:`nsightkit.trace.snapshot` tries it here.

A pickle of a few bytes can take hours (keys that all have one hash) or all memory (an index of 2**31). In this process
only this process ends.
"""

from __future__ import annotations

import gc
import io
import pickle
import sys
from typing import Any, NoReturn

__all__ = ["decode"]


class _Plain(pickle.Unpickler):
    """An unpickler that looks nothing up, so that nothing in a file is run."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is more than plain data")


def decode(data: bytes) -> Any:
    """Decode a pickle of plain data.

    Parameters
    ----------
    data : bytes

    Returns
    -------
    object
        Of numbers, texts and containers.

    Raises
    ------
    Exception
        Of any kind: it is damaged, or asks for more than plain data.
    """
    return _Plain(io.BytesIO(data)).load()


if __name__ == "__main__":
    gc.disable()
    try:
        decode(sys.stdin.buffer.read())
    except Exception as error:  # any error of a damaged file
        text = f"{type(error).__name__}: {error}"[:300]
        sys.stdout.buffer.write(text.encode("ascii", "backslashreplace"))
