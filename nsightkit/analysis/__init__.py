"""What a capture means: one module a question, each a function of a :class:`~nsightkit.trace.Trace`."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import (
        accounts,
        baseline,
        calls,
        check,
        clocks,
        communication,
        diff,
        diff_memory,
        diff_text,
        envelope,
        gaps,
        kernels,
        ladder,
        memops,
        memory,
        ncu,
        noise,
        operators,
        overview,
        pairing,
        phases,
        ranges,
        ranks,
        run_metrics,
        selection,
        sources,
        steps,
        stragglers,
        verdict,
    )

__all__ = [
    "accounts",
    "baseline",
    "calls",
    "check",
    "clocks",
    "communication",
    "diff",
    "diff_memory",
    "diff_text",
    "envelope",
    "gaps",
    "kernels",
    "ladder",
    "memops",
    "memory",
    "ncu",
    "noise",
    "operators",
    "overview",
    "pairing",
    "phases",
    "ranges",
    "ranks",
    "run_metrics",
    "selection",
    "sol",
    "sources",
    "steps",
    "stragglers",
    "verdict",
]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"nsightkit.analysis.{name}")
    raise AttributeError(f"module 'nsightkit.analysis' has no attribute {name!r}")
