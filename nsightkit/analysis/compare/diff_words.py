"""What changed, in words: rows for a terminal, and Markdown for a pull request.

Names come from captures and are somebody else's: in Markdown they stand in code spans, all else is escaped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nsightkit.analysis.compare.diff import percent, signed
from nsightkit.analysis.compare.per_step import NO_OPERATOR
from nsightkit.analysis.core.text import bytes_text, short_name, time_text
from nsightkit.safe import plain

__all__ = ["markdown", "name_of", "rows", "sections"]

#: Tables of which people are shown what changed, of captures and of memory snapshots, and their titles.
_CHANGED = {"kernels": "Kernels", "operators": "Operators", "ranges": "Ranges", "memops": "Copies"}
_BYTES = {"categories": "By category", "sites": "By line"}
_FIGURES = {
    "wall_ns": "wall",
    "busy_ns": "GPU busy",
    "idle_ns": "GPU idle",
    "kernel_ns": "kernels",
    "memop_ns": "copies and memsets",
    "graph_ns": "graph replays",
}
_WORSE = 5
_LONGEST = 90


def sections(comparison: Mapping[str, Any], top: int) -> dict[str, tuple[str, list[Mapping[str, Any]], int]]:
    """Choose what to show of a comparison.

    Parameters
    ----------
    comparison : mapping
        What :func:`nsightkit.analysis.compare.diff.summary` or :func:`nsightkit.analysis.memory.diff.summary` returned.
    top : int
        Rows of each table.

    Returns
    -------
    dict of str to tuple
        By table: its title, the rows to show, and how many changed. Figures come first and are whole.
    """
    if "sites" in comparison:
        found = {"figures": ("memory", list(comparison["figures"]), 0)}
        changed = {table: [row for row in comparison[table] if row["delta_bytes"]] for table in _BYTES}
    else:
        # What was on neither side is not missed.
        figures = [row for row in comparison["figures"] if row["before_ns"] or row["after_ns"]]
        # Causes are few, and add up to what is idle: all that can be seen in a step.
        idle = [row for row in comparison["gaps"] if row["significance"] != "negligible"]
        what = "a step" if comparison["unit"] == "step" else "the whole capture"
        found = {"figures": (what, figures, 0), "gaps": ("GPU idle, by cause", idle, 0)}
        every = [row for row in comparison["changes"] if _telling(row)]
        changed = {table: [row for row in every if row["table"] == table] for table in _CHANGED}
    return found | {table: ((_CHANGED | _BYTES)[table], rows[:top], len(rows)) for table, rows in changed.items()}


def _telling(row: Mapping[str, Any]) -> bool:
    # An operator's time on the CPU is what its range says; as the launcher of kernels it says what ran in their place.
    return bool(row["table"] != "operators" or (row["clock"] == "GPU" and row["name"] != NO_OPERATOR))


def rows(table: str, chosen: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Write rows of a table for people.

    Parameters
    ----------
    table : str
        Such as ``kernels``.
    chosen : sequence of mapping
        Rows of that table.

    Returns
    -------
    list of dict
        ``name, before, after, change``, and of times ``interval`` and ``significance``, as text.
    """
    return [_bytes(table, row) if "delta_bytes" in row else _time(table, row) for row in chosen]


def _time(table: str, row: Mapping[str, Any]) -> dict[str, str]:
    was = row["before_ns"]
    # In relation to what was; where nothing was, as a time.
    change, low, high = (
        (percent(row[column] / was) if was else signed(row[column])) if _known(row[column]) else ""
        for column in ("delta_ns", "low_ns", "high_ns")
    )
    return {
        "name": name_of(table, row),
        "before": time_text(was),
        "after": time_text(row["after_ns"]),
        "change": change,
        "interval": f"{low.removesuffix(' %') if high.endswith(' %') else low} to {high}" if low else "",
        "significance": row["significance"],
    }


def _known(value: Any) -> bool:
    return value is not None and bool(math.isfinite(value))


def _bytes(table: str, row: Mapping[str, Any]) -> dict[str, str]:
    delta = row["delta_bytes"]
    share = f" ({percent(row['change'])})" if delta and _known(row["change"]) else ""
    return {
        "name": name_of(table, row),
        "before": bytes_text(row["before_bytes"]),
        "after": bytes_text(row["after_bytes"]),
        "change": f"{'-' if delta < 0 else '+' if delta else ''}{bytes_text(abs(delta))}{share}",
    }


def name_of(table: str, row: Mapping[str, Any]) -> str:
    """Name a row for people, on one line and safe for a terminal.

    Parameters
    ----------
    table : str
        The one it is from.
    row : mapping

    Returns
    -------
    str
    """
    if table == "gaps":
        return str(row["cause"])
    if table == "memops":
        kinds = " to ".join(filter(None, (plain(row["src_kind"]), plain(row["dst_kind"]))))
        return f"{plain(row['kind'])} ({kinds})"
    if table == "figures":
        return _FIGURES.get(row["name"]) or row["name"].removesuffix("_bytes").replace("_", " ")
    name = short_name(row["name"]) if table == "kernels" else plain(row["name"])
    match = row.get("match", "name")
    if table == "kernels" and row["before_names"] and row["after_names"] and match != "name":
        name = " → ".join(
            short_name(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            for names in (row["before_names"], row["after_names"])
        )
    said = [row["clock"]] if table == "ranges" else []
    said += [match] if match in ("appeared", "disappeared") else []
    return f"{name} ({', '.join(said)})" if said else name


# ---------------------------------------------------------------- Markdown


def markdown(comparison: Mapping[str, Any], top: int = 5) -> str:
    """Write a comparison for a pull request.

    Parameters
    ----------
    comparison : mapping
        What :func:`nsightkit.analysis.compare.diff.summary` or :func:`nsightkit.analysis.memory.diff.summary` returned.
    top : int
        Rows of each table.

    Returns
    -------
    str
        Markdown.
    """
    parts = [
        f"**{_escaped(comparison['headline'])}**",
        "\n".join(f"> - {_escaped(warning)}" for warning in comparison["warnings"]),
        _escaped(comparison.get("where", "")),
        _escaped(comparison["bottleneck"]["text"]) if "bottleneck" in comparison else "",
    ]
    for table, (title, chosen, changed) in sections(comparison, top).items():
        more = f" ({len(chosen)} of {changed} that changed)" if changed > len(chosen) else ""
        parts.append(_table(title + more, comparison, table, chosen) if chosen else "")
    parts.append(_worse(comparison) if "changes" in comparison else "")
    return "\n\n".join(filter(None, parts)) + "\n"


def _worse(comparison: Mapping[str, Any]) -> str:
    if not comparison["changes"]:
        return "Nothing changed by more than noise and enough to show in a step."
    # What a faster program does more slowly; a kernel that took another one's place in its operator is not a loss.
    grown = {row["name"] for row in comparison["operators"] if row["clock"] == "GPU" and row["delta_ns"] > 0}
    found = [
        f"{_code(name_of(row['table'], row))} {signed(row['delta_ns'])}"
        for row in comparison["changes"]
        if row["delta_ns"] > 0
        and row["table"] in ("gaps", "kernels", "ranges", "memops")
        and (row["table"] != "kernels" or row["operator"] is None or row["operator"] in grown)
    ]
    return f"Got worse: {', '.join(found[:_WORSE])}." if found and comparison["outcome"] != "slower" else ""


def _table(title: str, comparison: Mapping[str, Any], table: str, chosen: Sequence[Mapping[str, Any]]) -> str:
    columns = {"before": "before", "after": "after", "change": "change"}
    if "confidence" in comparison:
        columns |= {"interval": f"{100 * comparison['confidence']:g} % interval", "significance": ""}
    aligned = "".join("---|" if column == "significance" else "--:|" for column in columns)
    named: Callable[[str], str] = str if table in ("figures", "gaps", "categories") else _code
    lines = [[named(cells["name"]), *(cells[column] for column in columns)] for cells in rows(table, chosen)]
    head, *body = (f"| {' | '.join(cells)} |" for cells in [[title, *columns.values()], *lines])
    return "\n".join([head, f"|---|{aligned}", *body])


def _code(name: str) -> str:
    """Text from a capture, as code that neither ends early nor splits a table."""
    tail = _LONGEST // 3
    kept = name if len(name) <= _LONGEST else f"{name[: _LONGEST - tail - 1]}…{name[-tail:]}"
    return "`" + (kept.replace("`", "'").replace("|", "\\|") or " ") + "`"


_MARKUP = re.compile(r"([\\`*_{}\[\]<>#|~])|(?<=@)(?=\w)")


def _escaped(words: str) -> str:
    return _MARKUP.sub(lambda found: f"\\{found[0]}" if found[0] else "\u200b", plain(words))
