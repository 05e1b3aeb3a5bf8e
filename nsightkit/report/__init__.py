"""One file to send a colleague: a page with the verdict, the tables and the timeline of one or more traces.

The page needs nothing but itself: no network, no library, no fonts. What it shows of a trace is cleaned
(:func:`nsightkit.trace.clean.clean`) and escaped.
"""

from nsightkit.report.page import html, write
from nsightkit.report.sides import labelled

__all__ = ["html", "labelled", "write"]
