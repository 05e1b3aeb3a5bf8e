"""The Python interface: a trace that answers questions, and the comparison of two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nsightkit import questions
from nsightkit import trace as traces
from nsightkit.analysis.timeline.selection import select
from nsightkit.errors import AnyPath
from nsightkit.records import Diff
from nsightkit.trace import model


class Trace(model.Trace):
    """A trace that answers questions.

    Tables come by name (``trace["kernels"]``), questions are methods, and filters give another trace:
    ``trace.last_steps(20).within("step 9").kernels(by="category")``.

    Examples
    --------
    >>> t.verdict()["bottleneck"]
    'input-pipeline'
    >>> t.last_steps(3).within("step 9").kernels(by="category")["name"].tolist()
    ['GEMM']
    """

    # -- questions

    summary = questions.summary
    kernels = questions.kernels
    where = questions.where
    ranges = questions.ranges
    gaps = questions.gaps
    verdict = questions.verdict
    whatif = questions.whatif
    memops = questions.memops
    sol = questions.sol
    calls = questions.calls
    steps = questions.steps

    # -- filters

    def device(self, number: int) -> Trace:
        """Select the GPU operations of one device; what the CPU did stays."""
        return select(self, device=number)

    def within(self, name: str) -> Trace:
        """Select the operations launched inside ranges in whose name this regular expression is found."""
        return select(self, within=name)

    def time(self, begin_ns: int | None = None, end_ns: int | None = None) -> Trace:
        """Select the events that start at `begin_ns` or later and before `end_ns`; None leaves that side open.

        Times are on the trace's clock, which begins with its first event.
        """
        return select(self, time_ns=(begin_ns, end_ns))

    def last_steps(self, count: int) -> Trace:
        """Select what was launched, and what the CPU did, in the last `count` steps."""
        return select(self, last_steps=count)

    # -- a file to share

    def report(self, out: AnyPath, *, overwrite: bool = False) -> Path:
        """Write one HTML file to send: the answer, the tables and a timeline, without secrets.

        Parameters
        ----------
        out : path-like
            The page.
        overwrite : bool
            Replace an existing file.

        Returns
        -------
        Path
            The page, as in `out`.
        """
        from nsightkit import report as page

        page.write(page.labelled([self]), out, overwrite=overwrite)
        return Path(out)


def load(path: AnyPath, *, cache: bool | None = None) -> Trace:
    """Open a trace: an Nsight Systems export or report, a PyTorch profiler's JSON, a folder of ``convert``'s.

    Parameters
    ----------
    path : path-like
    cache : bool, optional
        Whether to keep what is read beside the trace; default: for big ones.

    Returns
    -------
    Trace

    Raises
    ------
    TraceError
        The file is not such a trace, or is damaged.
    """
    return Trace.of(traces.load(path, cache=cache))


def diff(before: Trace | AnyPath, after: Trace | AnyPath, **options: Any) -> Diff:
    """Compare two captures, and separate changes from noise.

    As :func:`nsightkit.questions.diff`, which takes only traces; here a path is opened.

    Parameters
    ----------
    before, after : Trace or path-like
    **options
        Of :func:`nsightkit.questions.diff`.

    Examples
    --------
    >>> import nsightkit as nk
    >>> nk.diff(t, t)["moved"]
    False
    """
    if not isinstance(before, model.Trace):
        before = load(before)
    if not isinstance(after, model.Trace):
        after = load(after)
    return questions.diff(before, after, **options)
