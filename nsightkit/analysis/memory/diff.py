"""What changed between two memory snapshots. Bytes of one program are the same in every run, so there is not noise."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import pandas as pd

from nsightkit.analysis.compare.diff import SIDES, percent
from nsightkit.analysis.compare.match import in_rounds
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
    peaks = [snapshot.summary(side, device)["peak_bytes"] is not None for side in (before, after)]
    moment: Literal["peak", "end"] = "peak" if all(peaks) else "end"
    sides = [snapshot.summary(side, device, moment=moment) for side in (before, after)]
    held = [side["fragmentation"] for side in sides]
    figures = [
        _row({"name": name}, held[0][key], held[1][key])
        for name, key in (
            ("allocated_bytes", "allocated_bytes"),
            ("reserved_bytes", "reserved_bytes"),
            ("reserved_and_unused_bytes", "slack_bytes"),
        )
    ]
    categories = [{row["category"]: row["bytes"] for row in side["by_category"]} for side in sides]
    outcome, headline = _headline(figures[0], moment)
    return {
        "headline": headline,
        "outcome": outcome,
        "warnings": list(_warnings(sides, moment)),
        "moment": moment,
        "figures": figures,
        "categories": _ordered(
            _row({"name": name}, *(side.get(name, 0) for side in categories))
            for name in dict.fromkeys([*categories[0], *categories[1]])
        ),
        "sites": _ordered(_sites([snapshot.sites(side, moment, device) for side in (before, after)])),
    }


def _row(named: Mapping[str, Any], before: int, after: int) -> dict[str, Any]:
    delta = after - before
    change = delta / before if before else None
    return {**named, "before_bytes": before, "after_bytes": after, "delta_bytes": delta, "change": change}


def _ordered(rows: Any) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (-abs(row["delta_bytes"]), -row["after_bytes"], row["name"]))


def _headline(allocated: Mapping[str, Any], moment: str) -> tuple[str, str]:
    when = "At its peak" if moment == "peak" else "At the end"
    was, now, delta = (allocated[key] for key in ("before_bytes", "after_bytes", "delta_bytes"))
    if not delta:
        return "no change", f"{when} the program holds as much memory as before, {bytes_text(now)}."
    share = f": {percent(allocated['change'])}" if was else ""
    said = f"{when} the program holds {bytes_text(now)} of memory instead of {bytes_text(was)}{share}."
    return "less" if delta < 0 else "more", said


def _warnings(sides: Sequence[Mapping[str, Any]], moment: str) -> Iterator[str]:
    if moment == "end":
        yield "One of the snapshots holds no events: what there was at the end is compared, not at the peaks."
    if sides[0]["device"] != sides[1]["device"]:
        yield f"Different devices: {sides[0]['device']} before, {sides[1]['device']} after."
    for name, side in zip(SIDES, sides, strict=True):
        if moment == "peak" and side["uncertain_bytes"]:
            yield f"The peak {name} may have been up to {bytes_text(side['uncertain_bytes'])} higher."
        yield from (f"In the snapshot {name}: {note}" for note in side["notes"])


_LINE = re.compile(r":\d+(?= )")


def _sites(sides: Sequence[pd.DataFrame]) -> list[dict[str, Any]]:
    # A line that made blocks of two categories has two rows.
    was, now = (table.groupby("site", sort=False)["bytes"].sum() for table in sides)
    rounds: list[tuple[str, Callable[[str], str]]] = [("name", str), ("normalised", partial(_LINE.sub, ""))]
    return [
        _row(
            {"name": now.index[after[0]] if after else was.index[before[0]], "match": how},
            int(was.iloc[list(before)].sum()),
            int(now.iloc[list(after)].sum()),
        )
        for how, before, after in in_rounds(was.index.tolist(), now.index.tolist(), rounds)
    ]
