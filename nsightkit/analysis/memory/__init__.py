"""Where the memory went, and what a run will need."""

from __future__ import annotations

from nsightkit._moved import lazy

_OF_LEDGER = (
    *("ITEMS", "MOMENTS", "OPTIMIZERS", "kv_bytes_per_token", "largest_context", "largest_contexts"),
    *("measured", "moments", "predict", "reconcile", "serving"),
)
__getattr__, _ = lazy(__name__, moved=dict.fromkeys(_OF_LEDGER, "nsightkit.analysis.memory.ledger"))
