"""nsightkit: turn a GPU profile into an answer.

``nsightkit.load(path)`` opens any trace; ``nsightkit.analysis`` holds one module a question. Importing
this package loads neither torch nor matplotlib, nor pandas until a trace is opened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nsightkit.errors import NsightkitError, TraceError, UsageError
from nsightkit.version import __version__

if TYPE_CHECKING:
    from nsightkit.api import Trace, diff, load

__all__ = ["NsightkitError", "Trace", "TraceError", "UsageError", "__version__", "diff", "load"]


def __getattr__(name: str) -> Any:
    """Import what needs pandas when it is asked for, so that ``nsightkit --help`` answers at once."""
    if name in ("Trace", "diff", "load"):
        from nsightkit import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
