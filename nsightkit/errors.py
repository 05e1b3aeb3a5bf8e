"""The errors nsightkit raises on purpose.

Each carries what a person needs to go on: which file (or argument), what is wrong with it, and the
remedy. The command line prints it as one line and exits with 2.
"""

from __future__ import annotations

import os

__all__ = ["NsightkitError", "TraceError", "UsageError"]


class NsightkitError(Exception):
    """Base of every error that is the input's or the environment's fault, not ours."""


class UsageError(NsightkitError):
    """An argument that cannot be honoured (an unknown GPU, a malformed time window, a bad regular expression)."""


class TraceError(NsightkitError):
    """A file that cannot be read as a trace.

    Parameters
    ----------
    path : path-like
        The file or folder at fault.
    problem : str
        What is wrong with it, in one clause.
    remedy : str
        What the reader can do about it, in one clause.
    """

    def __init__(self, path: str | os.PathLike[str], problem: str, remedy: str) -> None:
        self.path = os.fspath(path)
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{self.path}: {problem}; {remedy}")

    def __reduce__(self) -> tuple[type[TraceError], tuple[str, str, str]]:
        return type(self), (self.path, self.problem, self.remedy)
