"""nsightkit: turn a GPU profile into an answer.

``nsightkit.load(path)`` opens any trace; ``nsightkit.analysis`` holds one module a question. Importing
this package loads neither torch nor matplotlib, nor pandas until a trace is opened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsightkit._moved import install, lazy

if TYPE_CHECKING:
    from nsightkit import analysis, capture, workloads
    from nsightkit.api import Trace, diff, load
    from nsightkit.errors import NsightkitError, TraceError, UsageError

__all__ = [
    "NsightkitError",
    "Trace",
    "TraceError",
    "UsageError",
    "__version__",
    "analysis",
    "capture",
    "diff",
    "investigations",
    "load",
    "workloads",
]
__version__ = "0.1.0"

install()

__getattr__, __dir__ = lazy(
    __name__,
    __all__,
    {
        **dict.fromkeys(("Trace", "diff", "load"), "nsightkit.api"),
        **dict.fromkeys(("NsightkitError", "TraceError", "UsageError"), "nsightkit.errors"),
    },
)
