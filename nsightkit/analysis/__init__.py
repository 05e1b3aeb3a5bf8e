"""What a capture means: one module a question, each a function of a :class:`~nsightkit.trace.Trace`."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import (
        calls,
        envelope,
        gaps,
        kernels,
        ladder,
        memops,
        memory,
        ncu,
        operators,
        overview,
        phases,
        ranges,
        selection,
        sources,
        steps,
        verdict,
    )

__all__ = [
    "calls",
    "envelope",
    "gaps",
    "kernels",
    "ladder",
    "memops",
    "memory",
    "ncu",
    "operators",
    "overview",
    "phases",
    "ranges",
    "selection",
    "sol",
    "sources",
    "steps",
    "verdict",
]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"nsightkit.analysis.{name}")
    raise AttributeError(f"module 'nsightkit.analysis' has no attribute {name!r}")
