"""Traces without secrets: what identifies a person or a machine, or opens a door, is replaced by placeholders.

``clean`` does it to an opened trace, for what is written or shown; ``copy`` to a file, whose copy is of the same kind
and gives the same answers. What counts as a secret is in :mod:`nsightkit.trace.share.secrets`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsightkit._moved import lazy
from nsightkit.trace.share.clean import clean, clean_snapshot, clean_text, write_snapshot

if TYPE_CHECKING:
    from nsightkit.trace.share.files import Copied, copy

__all__ = ["Copied", "clean", "clean_snapshot", "clean_text", "copy", "write_snapshot"]

# To copy a file takes its reader, and the readers that write come here for `clean`.
__getattr__, __dir__ = lazy(__name__, __all__, dict.fromkeys(("Copied", "copy"), "nsightkit.trace.share.files"))
