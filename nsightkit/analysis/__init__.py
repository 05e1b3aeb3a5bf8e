"""What a capture means: one module a question, each a function of a :class:`~nsightkit.trace.Trace`.

The folders are the kinds of question: :mod:`~nsightkit.analysis.timeline` (where the time went, why the GPU was idle),
:mod:`~nsightkit.analysis.replay` (what a change would gain), :mod:`~nsightkit.analysis.verdict` (the one answer),
:mod:`~nsightkit.analysis.roofline` (how far from the speed of light), :mod:`~nsightkit.analysis.compare` (what
changed), :mod:`~nsightkit.analysis.ranks` (many GPUs) and :mod:`~nsightkit.analysis.memory`. They share
:mod:`~nsightkit.analysis.core`.
"""
