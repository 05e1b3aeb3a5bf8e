"""Compare two memory snapshots. A program allocates the same bytes in every run, so every difference is real."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pandas as pd

from nsightkit.analysis.compare.diff import SIDES
from nsightkit.analysis.compare.diff_words import percent
from nsightkit.analysis.compare.match import pair
from nsightkit.analysis.core.text import bytes_text
from nsightkit.analysis.memory import snapshot
from nsightkit.errors import UsageError
from nsightkit.trace.snapshot import Snapshot

__all__ = ["summary"]

#: Amounts of the whole, and what a snapshot's summary calls them.
_FIGURES = {
    "allocated_bytes": "allocated_bytes",
    "reserved_bytes": "reserved_bytes",
    "reserved_and_unused_bytes": "slack_bytes",
}
_LINE = re.compile(r":\d+(?= )")


def summary(before: Snapshot, after: Snapshot, device: int | None = None) -> dict[str, Any]:
    """Compare two memory snapshots at their peaks.

    Parameters
    ----------
    before, after : Snapshot
    device : int, optional
        Default: on each side the device with the highest peak.

    Returns
    -------
    dict
        ``headline``, ``outcome`` (``less``, ``more`` or ``no change``), ``warnings``, and lists of rows with
        ``before_bytes, after_bytes, delta_bytes, change``: ``figures`` of the whole, ``categories`` and ``sites``, the
        largest change first. Sites are the same by file, line and function, or else by file and function, since every
        edit moves lines; ``match`` has the rule. The rows of ``categories`` and of ``sites`` each sum to the allocated
        bytes of the peak.

    Raises
    ------
    UsageError
        The device does not exist, or a snapshot holds no events.
    """
    was = snapshot.summary(before, device)
    now = snapshot.summary(after, device)
    warnings = []
    for name, side in zip(SIDES, (was, now), strict=True):
        if side["peak_bytes"] is None:
            raise UsageError(f"the snapshot {name} holds no events, so its peak is unknown: record it again")
        for note in side["notes"]:
            warnings.append(f"In the snapshot {name}: {note}")
    figures = []
    for name, key in _FIGURES.items():
        figures.append(_row(name, was["fragmentation"][key], now["fragmentation"][key]))
    outcome, headline = _headline(figures[0])
    sites = snapshot.sites(before, device=device), snapshot.sites(after, device=device)
    return {
        "headline": headline,
        "outcome": outcome,
        "warnings": warnings,
        "figures": figures,
        "categories": _changes(*sites, "category"),
        "sites": _changes(*sites, "site"),
    }


def _row(name: str, before: int, after: int) -> dict[str, Any]:
    delta = after - before
    change = delta / before if before else None
    return {"name": name, "before_bytes": before, "after_bytes": after, "delta_bytes": delta, "change": change}


def _headline(allocated: Mapping[str, Any]) -> tuple[str, str]:
    was, now = allocated["before_bytes"], allocated["after_bytes"]
    if was == now:
        return "no change", f"At its peak the program holds as much memory as before, {bytes_text(now)}."
    share = f": {percent(allocated['change'])}" if was else ""
    sentence = f"At its peak the program holds {bytes_text(now)} of memory instead of {bytes_text(was)}{share}."
    return "less" if now < was else "more", sentence


def _without_line(site: str) -> str:
    return _LINE.sub("", site)


def _changes(before: pd.DataFrame, after: pd.DataFrame, key: str) -> list[dict[str, Any]]:
    """Compare the bytes of each category or site, the largest change first."""
    # A line that made blocks of two categories has two rows.
    was = before.groupby(key, sort=False)["bytes"].sum()
    now = after.groupby(key, sort=False)["bytes"].sum()
    rows = []
    for match, old, new in pair(was.index.tolist(), now.index.tolist(), _without_line):
        row = _row((new or old)[0], int(was[old].sum()), int(now[new].sum()))
        rows.append(row | {"match": match})
    return sorted(rows, key=lambda row: (-abs(row["delta_bytes"]), -row["after_bytes"], row["name"]))
