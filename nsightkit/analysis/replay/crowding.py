"""Kernels that run beside each other on one device slow each other down; how much, the recording may show."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from nsightkit.analysis.replay.model import Float, Int, kinds_of
from nsightkit.trace.model import GPU_TABLES

if TYPE_CHECKING:
    from nsightkit.analysis.replay.schedule import Schedule

__all__ = ["Crowding"]

#: Standard error of the factor, below which it is known well enough to predict with.
_KNOWN = 0.05
#: Launches of these are of the same kernel; but the same kernel may have more or less to do.
_SAME = ["name", "grid_x", "grid_y", "grid_z"]
#: With less company than this a kernel runs alone; if its launches then differ by more than this, they do other work.
_ALONE, _ALIKE = 0.01, 0.15


class Crowding:
    """How much longer kernels take for each other kernel beside them.

    What one kernel loses to another is read off launches of the same kernel (same name, same grid) that had more or
    less company: by least squares, how far their duration is from their mean, on how much company they had.

    Parameters
    ----------
    of : Schedule

    Attributes
    ----------
    factor : float or None
        Added duration, as a share, for each kernel beside; None where the recording does not show it.
    """

    def __init__(self, of: Schedule) -> None:
        self.of = of
        self.kernels = (of.table != GPU_TABLES.index("memops")) & ~of.collective
        heads = np.flatnonzero(of.first)
        devices = of.device[heads][np.logical_or.reduceat(self.kernels, heads)]
        #: whether any device runs kernels on several streams; if none does, none can be crowded
        self.possible = len(np.unique(devices)) < len(devices)
        if self.possible:
            self.company = self._company(of.start, of.end)
            self.factor = self._factor()

    def _company(self, start: Int, end: Int) -> Float:
        """How many other kernels run on the device beside each, on average over its time."""
        out = np.zeros(len(start))
        for device in kinds_of(self.of.device).tolist():
            mine = np.flatnonzero(self.kernels & (self.of.device == device) & (end > start))
            if not len(mine):
                continue
            begins, ends = np.sort(start[mine]), np.sort(end[mine])
            both = _elapsed(begins, end[mine]) - _elapsed(ends, end[mine])
            both -= _elapsed(begins, start[mine]) - _elapsed(ends, start[mine])
            out[mine] = both / (end[mine] - start[mine]) - 1
        return out

    def _factor(self) -> float | None:
        """By the same launch of each step; where that does not show it, by all launches of a kernel that are alike."""
        of = self.of
        plain = np.flatnonzero(self.kernels & (of.table == GPU_TABLES.index("kernels")) & (of.end > of.start))
        of_kernel = of.trace.whole.table("kernels", _SAME).iloc[of.row[plain]]
        kernel = of_kernel.groupby(_SAME, observed=True, sort=False).ngroup().to_numpy()
        each = pd.DataFrame({"lasting": (of.end - of.start)[plain], "company": self.company[plain]})
        if len(of.steps):
            stream, step = of.stream[plain], of.in_step[plain]
            place = each.groupby([stream, step]).cumcount()
            factor = _slope(each, each.groupby([kernel, stream, place], sort=False).ngroup().to_numpy())
            if factor is not None:
                return factor
        alone = each["lasting"].where(each["company"] < _ALONE).groupby(kernel)
        alike = (alone.transform("std") <= _ALIKE * alone.transform("mean")).to_numpy()
        return _slope(each[alike], kernel[alike])

    def durations_ns(self, given: Int, start: Int, end: Int) -> Int:
        """Durations of the operations in other company than they had.

        Parameters
        ----------
        given : ndarray of int64
            Durations in the company that was recorded.
        start, end : ndarray of int64
            When the operations run now.

        Returns
        -------
        ndarray of int64
        """
        factor = self.factor or 0.0
        now = self._company(start, end)
        return np.asarray(given * (1 + factor * now) / (1 + factor * self.company)).astype(np.int64)

    def added_ns(self, start: Int, end: Int) -> int:
        """How much more kernel time there is beside other kernels, at times other than recorded."""
        now = self._company(start, end) * (end - start)
        was = self.company * (self.of.end - self.of.start)
        return int((now - was).sum() / 2)


def _slope(each: pd.DataFrame, group: Int) -> float | None:
    """How much longer kernels of a group last with more company, as a share a kernel; None if that is not known."""
    mean = each.groupby(group).transform("mean")
    longer, more = each["lasting"] / mean["lasting"] - 1, each["company"] - mean["company"]
    spread = float((more**2).sum())
    free = len(each) - len(np.unique(group)) - 1
    if free < 1 or not spread:
        return None
    slope = float((longer * more).sum()) / spread
    error = (float(((longer - slope * more) ** 2).sum()) / free / spread) ** 0.5
    if error > _KNOWN:
        return None
    # The mean has company too.
    usual = float(each["company"].mean())
    return max(slope / max(1 - slope * usual, 0.5), 0.0)


def _elapsed(since: Int, at: Int) -> Float:
    """Time since each of some moments, summed over those past."""
    total = np.append(0, np.cumsum(since - since[:1]))
    past = np.searchsorted(since, at)
    return np.asarray(past * (at - since[0]) - total[past], float)
