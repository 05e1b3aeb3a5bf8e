"""What changed between two memory snapshots. Bytes of one program are the same in every run, so there is not noise."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pandas as pd

from nsightkit.analysis.compare.diff import SIDES
from nsightkit.analysis.compare.diff_words import percent
from nsightkit.analysis.compare.match import pair
from nsightkit.analysis.core.text import bytes_text
from nsightkit.analysis.memory import snapshot
from nsightkit.trace.snapshot import Snapshot

__all__ = ["summary"]


def summary(before: Snapshot, after: Snapshot, device: int | None = None) -> dict[str, Any]:
    """Say what changed between two memory snapshots.

    Parameters
    ----------
    before, after : Snapshot
    device : int, optional
        Default: on each side the device with the highest peak.

    Returns
    -------
    dict
        ``headline``, ``outcome`` (``less``, ``more`` or ``no change``), ``warnings``, ``moment`` (``peak``, or ``end``
        where one of the snapshots holds no events), and lists of rows with ``before_bytes, after_bytes, delta_bytes,
        change``: ``figures`` of the whole, ``categories`` and ``sites``, the largest change first. Sites are the same
        by file, line and function, or else by file and function, since every edit moves lines; ``match`` says which.
        The rows of ``categories``, and those of ``sites``, sum to the allocated bytes of that moment.

    Raises
    ------
    UsageError
        There is no such device.
    """
    peaks = [snapshot.summary(side, device)["peak_bytes"] for side in (before, after)]
    moment: Literal["peak", "end"] = "end" if None in peaks else "peak"
    was = snapshot.summary(before, device, moment=moment)
    now = snapshot.summary(after, device, moment=moment)
    figures = _figures(was["fragmentation"], now["fragmentation"])
    outcome, headline = _headline(figures[0], moment)
    lines_before = snapshot.sites(before, moment, device)
    lines_after = snapshot.sites(after, moment, device)
    return {
        "headline": headline,
        "outcome": outcome,
        "warnings": _warnings(was, now, moment),
        "moment": moment,
        "figures": figures,
        "categories": _categories(was["by_category"], now["by_category"]),
        "sites": _sites(lines_before, lines_after),
    }


def _row(name: str, before: int, after: int) -> dict[str, Any]:
    delta = after - before
    change = delta / before if before else None
    return {"name": name, "before_bytes": before, "after_bytes": after, "delta_bytes": delta, "change": change}


def _ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the largest change first."""
    return sorted(rows, key=lambda row: (-abs(row["delta_bytes"]), -row["after_bytes"], row["name"]))


def _figures(was: Mapping[str, int], now: Mapping[str, int]) -> list[dict[str, Any]]:
    return [
        _row("allocated_bytes", was["allocated_bytes"], now["allocated_bytes"]),
        _row("reserved_bytes", was["reserved_bytes"], now["reserved_bytes"]),
        _row("reserved_and_unused_bytes", was["slack_bytes"], now["slack_bytes"]),
    ]


def _headline(allocated: Mapping[str, Any], moment: str) -> tuple[str, str]:
    when = "At its peak" if moment == "peak" else "At the end"
    was, now = allocated["before_bytes"], allocated["after_bytes"]
    if was == now:
        return "no change", f"{when} the program holds as much memory as before, {bytes_text(now)}."
    share = f": {percent(allocated['change'])}" if was else ""
    sentence = f"{when} the program holds {bytes_text(now)} of memory instead of {bytes_text(was)}{share}."
    return "less" if now < was else "more", sentence


def _warnings(was: Mapping[str, Any], now: Mapping[str, Any], moment: str) -> list[str]:
    warnings = []
    if moment == "end":
        warnings.append(
            "One of the snapshots holds no events: what there was at the end is compared, not at the peaks."
        )
    if was["device"] != now["device"]:
        warnings.append(f"Different devices: {was['device']} before, {now['device']} after.")
    for name, side in zip(SIDES, (was, now), strict=True):
        if moment == "peak" and side["uncertain_bytes"]:
            warnings.append(f"The peak {name} may have been up to {bytes_text(side['uncertain_bytes'])} higher.")
        for note in side["notes"]:
            warnings.append(f"In the snapshot {name}: {note}")
    return warnings


def _categories(was: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    before = {row["category"]: row["bytes"] for row in was}
    after = {row["category"]: row["bytes"] for row in now}
    return _ordered([_row(name, before.get(name, 0), after.get(name, 0)) for name in before | after])


_LINE = re.compile(r":\d+(?= )")


def _without_line(site: str) -> str:
    return _LINE.sub("", site)


def _sites(before: pd.DataFrame, after: pd.DataFrame) -> list[dict[str, Any]]:
    # A line that made blocks of two categories has two rows.
    was = before.groupby("site", sort=False)["bytes"].sum()
    now = after.groupby("site", sort=False)["bytes"].sum()
    rows = []
    for match, old, new in pair(was.index.tolist(), now.index.tolist(), _without_line):
        row = _row((new or old)[0], int(was[old].sum()), int(now[new].sum()))
        rows.append(row | {"match": match})
    return _ordered(rows)
