"""Many GPUs: collectives, clocks, who is late, and where a job loses its time."""

from __future__ import annotations

from nsightkit._moved import moved_to

__getattr__ = moved_to(__name__, "nsightkit.analysis.ranks.job")
