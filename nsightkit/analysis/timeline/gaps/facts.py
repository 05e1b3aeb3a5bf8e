"""What may be the evidence for a gap's cause."""

from __future__ import annotations

__all__ = ["EVIDENCE", "TABLE_OF"]

#: The table that each kind of evidence is from.
TABLE_OF = {
    "call": "calls",
    "range": "ranges",
    "op": "ops",
    "os_call": "os_calls",
    "copy": "memops",
    "overhead": "overhead",
    "kernel": "kernels",
    "sample": "samples",
}
EVIDENCE = ("none", *TABLE_OF)
