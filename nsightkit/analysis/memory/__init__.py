"""Where the memory went, and what a run will need."""

from __future__ import annotations

from nsightkit._moved import moved_to

__getattr__ = moved_to(__name__, "nsightkit.analysis.memory.ledger")
