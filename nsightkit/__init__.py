"""nsightkit: turn a GPU profile into an answer.

``nsightkit.load(path)`` opens any trace; ``nsightkit.analysis`` holds one module a question. Importing
this package loads neither torch nor matplotlib, nor pandas until a trace is opened.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nsightkit._moved import install

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

_LAZY = {
    "NsightkitError": "nsightkit.errors",
    "TraceError": "nsightkit.errors",
    "UsageError": "nsightkit.errors",
    "Trace": "nsightkit.api",
    "diff": "nsightkit.api",
    "load": "nsightkit.api",
}
_MODULES = ("analysis", "capture", "investigations", "workloads")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"nsightkit.{name}")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'nsightkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
