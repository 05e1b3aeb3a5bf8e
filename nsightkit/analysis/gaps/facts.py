"""Facts about threads that the rules for gaps and the replay of a trace share."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nsightkit.analysis.gaps.threads import Threads
from nsightkit.trace.model import Trace

__all__ = ["dispatch_free", "one_offs", "own_work", "profiler_time", "waits_for_input"]

Int = npt.NDArray[np.integer[Any]]


def waits_for_input(trace: Trace, thread: int) -> tuple[Int, Int]:
    """When a thread waited for data: what `input-pipeline` names.

    Parameters
    ----------
    trace : Trace
    thread : int

    Returns
    -------
    start, end : ndarray of int64
        Disjoint intervals in ns, in order. CUDA calls are not part of them, nor are waits for another thread that
        feeds the same device.
    """
    return Threads(trace).input_waits(thread)


def own_work(trace: Trace, thread: int) -> tuple[Int, Int]:
    """When a thread did named work of its own, without launches: what `cpu-work` names. Sleeps are its own, too.

    Parameters
    ----------
    trace : Trace
    thread : int

    Returns
    -------
    start, end : ndarray of int64
        Disjoint intervals in ns, in order, without CUDA calls and without waits for data.
    """
    return Threads(trace).own_work(thread)


def one_offs(trace: Trace, thread: int) -> tuple[Int, Int]:
    """When a thread did what happens once (loads code, compiles, captures a graph): what `start-up` names.

    Parameters
    ----------
    trace : Trace
    thread : int

    Returns
    -------
    start, end : ndarray of int64
        Disjoint intervals in ns, in order. A long call is not among them if the devices of its process were busy most
        of the time: it may have waited for them.
    """
    return Threads(trace).one_offs(thread)


def profiler_time(trace: Trace, thread: int) -> tuple[Int, Int]:
    """When the profiler held a thread up: what `profiler` names.

    Parameters
    ----------
    trace : Trace
    thread : int

    Returns
    -------
    start, end : ndarray of int64
        Disjoint intervals in ns, in order: its work on this thread, and that on other threads of the process while its
        devices were idle.
    """
    return Threads(trace).profiler_time(thread)


def dispatch_free(trace: Trace, thread: int) -> tuple[Int, Int]:
    """All that a thread did beside dispatching: what would stay if launches were free.

    Parameters
    ----------
    trace : Trace
    thread : int

    Returns
    -------
    start, end : ndarray of int64
        Disjoint intervals in ns, in order: OS waits and sleeps, data loading, work of its own, what
        happens once, calls that do not launch, and times between calls that are too long for dispatch.
    """
    return Threads(trace).dispatch_free(thread)
