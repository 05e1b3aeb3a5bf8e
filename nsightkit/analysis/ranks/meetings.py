"""Who waits for whom in the collectives of several devices of one trace, and so of one clock."""

from __future__ import annotations

import pandas as pd

from nsightkit.analysis.ranks import alignment
from nsightkit.analysis.ranks import collectives as communication
from nsightkit.trace.model import Trace

__all__ = ["Meetings"]


class Meetings:
    """Collectives that several devices of a trace take part in.

    A collective can do its work only when the last device has arrived; until then the others wait in it.

    Parameters
    ----------
    trace : Trace

    Attributes
    ----------
    devices : list of int
        Those with collectives.
    met : DataFrame
        A row for each device in each collective: ``device, start_ns, end_ns, kind``, ``collective`` (its number),
        ``until_ns`` (when the last device arrived).
    matched : int
        Collectives that were found on several devices.
    """

    def __init__(self, trace: Trace) -> None:
        found = communication.collectives(trace)
        found = found[found["where"] == "GPU"]
        self.devices: list[int] = found["device"].unique().tolist()
        met = alignment.match(found.assign(rank=found["device"])).arrivals
        by = met.groupby("collective")
        arrived, done = by["start_ns"].transform("max"), by["end_ns"].transform("min")
        # One that ends somewhere before all had arrived is not one collective.
        possible = (arrived < done).groupby(met["collective"]).transform("all")
        self.met: pd.DataFrame = met.assign(until_ns=arrived)[possible]
        self.matched = int(self.met["collective"].nunique())

    def waiting(self, device: int) -> pd.DataFrame:
        """The time from a device's arrival to that of the last.

        Parameters
        ----------
        device : int

        Returns
        -------
        DataFrame
            ``device, start_ns, kind, end_ns``.
        """
        mine = self.met[self.met["device"] == device]
        return mine[["device", "start_ns", "kind"]].assign(end_ns=mine["until_ns"])

    def last(self, device: int) -> int:
        """How often a device was the last to arrive.

        Parameters
        ----------
        device : int
        """
        mine = self.met[self.met["device"] == device]
        return int((mine["start_ns"] == mine["until_ns"]).sum())
