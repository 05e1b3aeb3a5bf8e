"""Traces without secrets: what identifies a person or a machine, or opens a door, is replaced by placeholders.

``clean`` does it to an opened trace, for what is written or shown; ``copy`` to a file, whose copy is of the same kind
and gives the same answers. What counts as a secret is in :mod:`nsightkit.trace.share.secrets`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nsightkit.trace.share.clean import clean, clean_snapshot, clean_text, write_snapshot

if TYPE_CHECKING:
    from nsightkit.trace.share.files import Copied, copy

__all__ = ["Copied", "clean", "clean_snapshot", "clean_text", "copy", "write_snapshot"]


def __getattr__(name: str) -> Any:
    """Import what copies files when it is asked for: it needs the readers, and the readers come here for `clean`."""
    if name in ("Copied", "copy"):
        from nsightkit.trace.share import files

        return getattr(files, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
