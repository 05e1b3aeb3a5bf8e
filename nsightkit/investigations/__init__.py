"""What only the guide needs: its parts, how they are measured, recorded and replayed.

No other part of nsightkit imports this one, except the command line for ``record`` and ``peaks --measure``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsightkit._moved import lazy

if TYPE_CHECKING:
    from nsightkit.investigations import cases, measure_ceilings, packing, parts, preflight, record, recordings
    from nsightkit.investigations.cases import Case, case
    from nsightkit.investigations.measurement import Measurement, headline, measure, same_machine

__all__ = [
    "Case", "Measurement", "case", "cases", "headline", "measure", "measure_ceilings", "packing", "parts", "preflight",
    "record", "recordings", "same_machine",
]  # fmt: skip

__getattr__, __dir__ = lazy(
    __name__,
    __all__,
    {
        **dict.fromkeys(("Case", "case"), "nsightkit.investigations.cases"),
        **dict.fromkeys(("Measurement", "headline", "measure", "same_machine"), "nsightkit.investigations.measurement"),
    },
)
