"""What only the guide needs: its parts, how they are measured, recorded and replayed.

No other part of nsightkit imports this one, except the command line for ``record`` and ``peaks --measure``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsightkit._moved import lazy

if TYPE_CHECKING:
    from nsightkit.investigations.cases import Case, case
    from nsightkit.investigations.measurement import Measurement, headline, measure, same_machine

__all__ = ["Case", "Measurement", "case", "headline", "measure", "same_machine"]

__getattr__, __dir__ = lazy(
    __name__,
    __all__,
    {
        **dict.fromkeys(__all__, "nsightkit.investigations.measurement"),
        **dict.fromkeys(("Case", "case"), "nsightkit.investigations.cases"),
    },
)
