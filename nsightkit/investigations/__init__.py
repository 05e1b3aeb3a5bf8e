"""What only the guide needs: its parts, how they are measured, recorded and replayed.

No other part of nsightkit imports this one, except the command line for ``record`` and ``peaks --measure``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsightkit.investigations.cases import Case, case
    from nsightkit.investigations.measurement import Measurement, headline, measure, same_machine

__all__ = ["Case", "Measurement", "case", "headline", "measure", "same_machine"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from nsightkit.investigations import cases, measurement

        return getattr(cases if name in cases.__all__ else measurement, name)
    raise AttributeError(f"module 'nsightkit.investigations' has no attribute {name!r}")
