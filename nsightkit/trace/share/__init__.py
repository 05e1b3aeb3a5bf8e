"""Traces without secrets: what identifies a person or a machine, or opens a door, is replaced by placeholders.

``clean`` does it to an opened trace, for what is written or shown; ``copy`` to a file, whose copy is of the same kind
and gives the same answers. What counts as a secret is in :mod:`nsightkit.trace.share.secrets`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nsightkit.trace.share.clean import clean, clean_snapshot, clean_text, write_snapshot

if TYPE_CHECKING:
    from nsightkit.trace.share.files import Copied, copy

__all__ = ["Copied", "clean", "clean_snapshot", "clean_text", "copy", "write_snapshot"]


def __getattr__(name: str) -> Any:
    # To copy a file takes its reader, and the readers that write come here for `clean`.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.files"), name)
