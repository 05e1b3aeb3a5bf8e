"""What a page of the guide imports: ``measure`` runs a workload or shows its recording, ``case`` opens a case file."""

from nsightkit.guide.cases import Case, case
from nsightkit.guide.measurement import Measurement, headline, measure

__all__ = ["Case", "Measurement", "case", "headline", "measure"]
