"""What changed, in words: sentences, rows for a terminal, and Markdown for a pull request.

Names come from captures and are somebody else's: in Markdown they stand in code spans, all else is escaped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nsightkit.analysis.compare.samples import NO_OPERATOR, Samples
from nsightkit.analysis.core import noise
from nsightkit.analysis.core.text import bytes_text, short_name, time_text
from nsightkit.safe import plain

__all__ = ["SIDES", "described", "markdown", "name_of", "percent", "rows", "sections", "sentences", "signed"]

SIDES = ("before", "after")
Row = Mapping[str, Any]

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
#: What the sentences look at of kernels.
_OF_KERNELS = [
    *("operator", "match", "significance", "before_count", "after_count"),
    *("before_total_ns", "after_total_ns", "before_ns", "after_ns", "delta_ns"),
]
#: So many names of what changed most, and of what got worse, are given.
_NAMED_FIRST, _WORSE = 2, 5
_LONGEST = 90
#: So many times as much and more is written as a multiple.
_MULTIPLE = 10
#: A change of all kernels alike, by more than this, is not of the program; fewer kernels than that are not all.
_CLOCK, _ALL = 0.02, 5
#: Of the GPU's time, launched in no step.
_OUTSIDE = 0.05
#: Launches of the kernels that both captures hold, in relation to each other: beyond this they did not do the same.
_AMOUNT = 0.05
_OTHER_AMOUNT = "the captures hold different amounts of work, and their times do not compare."
#: Bytes that a step uploads, in relation to those of the other side.
_UPLOAD = 0.01


def percent(share: float) -> str:
    """Write a change.

    Parameters
    ----------
    share : float
        Of what was before; -0.5 is half of it gone. From ten times on it is written as a multiple.

    Examples
    --------
    >>> percent(-0.5), percent(8.99), percent(1180.9)
    ('-50.0 %', '+899.0 %', '1,182x')
    """
    if share < _MULTIPLE - 1:
        return f"{100 * share:+.1f} %"
    return f"{1 + share:,.0f}x" if share >= 99 else f"{1 + share:,.1f}x"


def signed(ns: float) -> str:
    """Write a change of a time.

    Parameters
    ----------
    ns : float
    """
    return f"{'+' if ns > 0 else ''}{time_text(ns)}"


# ---------------------------------------------------------------- sentences


def described(capture: Samples) -> dict[str, Any]:
    """Give what is known of a capture.

    Parameters
    ----------
    capture : Samples
    """
    meta, wall = capture.trace.meta, capture.windows["wall_ns"]
    path = capture.trace.path
    facts = {
        "name": Path(path).name if path else None,
        "gpus": list(dict.fromkeys(gpu.name for gpu in meta.gpus if gpu.name)),
        "device_count": len(capture.overview["devices"]),
        "driver": meta.driver,
        "distributed": dict(meta.distributed),
        "steps": capture.count,
        "ordinary_steps": None,
        "outside_steps": capture.outside,
        "graph_replays": capture.trace.size("graphs"),
        "notes": list(meta.notes),
    }
    if len(wall):
        facts |= {"ordinary_steps": int(capture.ordinary.sum()), "mean_step_ns": float(wall.mean())}
        facts["median_step_ns"] = float(wall[capture.ordinary].median())
    return facts | {key: value for key, value in capture.overview.items() if key != "devices"}


def sentences(facts: Row, verdicts: Sequence[Row]) -> dict[str, Any]:
    """Say what changed.

    Parameters
    ----------
    facts : mapping
        ``before`` and ``after`` (:func:`described`), the tables as lists of rows, ``changes``, ``unit``,
        ``confidence``, ``min_share``, ``judged_steps``.
    verdicts : sequence of mapping
        What :func:`nsightkit.analysis.verdict.summary` says of both captures.

    Returns
    -------
    dict
        ``headline, outcome, where, moved, bottleneck, warnings``.
    """
    other_work = _other_amount(facts)
    outcome, headline = _outcome(facts)
    cards = facts["before"]["gpus"], facts["after"]["gpus"]
    if other_work:
        headline = f"With different amounts of work: {headline}"
    if all(cards) and cards[0] != cards[1]:
        headline = f"On different GPUs: {headline}"
    warnings = [*_circumstances(facts), *_about_graphs(facts), *_about_steps(facts), *other_work]
    devices = dict.fromkeys(side["device_count"] for _, side in _sides(facts))
    if max(devices) > 1:
        held = " and ".join(map(str, devices))
        warnings.append(f"Busy and idle time, kernels and copies are sums over {held} GPUs; the wall time is not.")
    if not other_work:
        warnings += _other_batch(facts)
    if cards[0] == cards[1]:
        warnings += _all_alike(facts)
    warnings += [*_other_kernels(facts), *_notes(facts)]
    moved, bottleneck = _bottleneck(facts, verdicts)
    return {
        "headline": headline,
        "outcome": outcome,
        "where": "" if other_work else _where(facts),
        "moved": moved,
        "bottleneck": bottleneck,
        "warnings": warnings,
    }


def _sides(facts: Row) -> list[tuple[str, Row]]:
    return [("before", facts["before"]), ("after", facts["after"])]


def _least_ns(facts: Row) -> float:
    """What changed by less does not matter."""
    figures = facts["figures"][:1]
    return float(facts["min_share"] * max((max(row["before_ns"], row["after_ns"]) for row in figures), default=0))


def _outcome(facts: Row) -> tuple[str, str]:
    """Say in one word and in one sentence what became of the time."""
    if not facts["figures"] or not facts["figures"][0]["before_ns"]:
        return "inconclusive", "There is no time to compare: one of the captures holds neither steps nor GPU work."
    row = facts["figures"][0]
    was, delta = row["before_ns"], row["delta_ns"]
    subject = "A step takes" if facts["unit"] == "step" else "From the first operation to the last it takes"
    said = f"{subject} {time_text(row['after_ns'])} instead of {time_text(was)}: {percent(row['change'])}"
    steps = "{} and {} steps".format(*facts["judged_steps"])
    if row["significance"] == noise.INCONCLUSIVE:
        few = f"{steps} are too few to tell a change from noise"
        if facts["unit"] == "trace" or not min(facts["judged_steps"]):
            few = "captures without steps do not show what noise is"
        return "inconclusive", f"{said}. Inconclusive: {few}."
    sure = steps
    if _known(row["low_ns"]):
        low, high = percent(row["low_ns"] / was), percent(row["high_ns"] / was)
        sure = f"{100 * facts['confidence']:g} % interval {low} to {high}, {steps}"
    remark = f" {noise.ONE_RUN}"
    if _known(row["between_ns"]):
        sure, remark = f"{sure}; runs differ by up to {100 * row['between_ns'] / was:.0f} %", ""
    if row["significance"] == noise.WITHIN_NOISE:
        return "no change", f"{said}, within noise ({sure})."
    if abs(delta) < _least_ns(facts):
        return "no change", f"{said}, too little to matter ({sure})."
    return "faster" if delta < 0 else "slower", f"{said}, more than noise ({sure}).{remark}"


def _where(facts: Row) -> str:
    """Say where the time went: to idle or busy time, and of these to which cause or kernel."""
    parts = []
    for row in facts["figures"]:
        if row["name"] not in ("idle_ns", "busy_ns"):
            continue
        table = "gaps" if row["name"] == "idle_ns" else "categories"
        most = [change for change in facts["changes"] if change["table"] == table][:_NAMED_FIRST]
        named = ", ".join(f"{name_of(table, change)} {signed(change['delta_ns'])}" for change in most)
        if named or abs(row["delta_ns"]) >= max(_least_ns(facts), 1):
            part = f"{_FIGURES[row['name']]} time {signed(row['delta_ns'])}"
            parts.append(f"{part} ({named})" if named else part)
    return f"Where: {'; '.join(reversed(parts))}." if parts else ""


def _bottleneck(facts: Row, verdicts: Sequence[Row]) -> tuple[bool | None, dict[str, Any]]:
    """Say whether the bottleneck moved, and what it was and is."""
    kept = []
    for answer in verdicts:
        kept.append({key: answer[key] for key in ("bottleneck", "share_of_span", "confidence")})
    was, now = kept[0]["bottleneck"], kept[1]["bottleneck"]
    shares = [f"{100 * (answer['share_of_span'] or 0):.1f} % of the time" for answer in kept]
    sure = min((answer["confidence"] for answer in kept), key=["low", "medium", "high"].index)
    # Verdicts rest on these: the bottleneck may have moved if any of them changed, or may have.
    decisive = [row for row in facts["changes"] if row["table"] == "figures" or row.get("cause") in (was, now)]
    moved: bool | None = was != now and len(decisive) > 0
    if "not-enough-data" in (was, now):
        moved, text = None, f"Whether the bottleneck moved is not known: {was} before, {now} after."
    elif was == now:
        text = f"The bottleneck did not move: {was}, {shares[0]} before and {shares[1]} after."
        causes = [row for row in facts["changes"] if row["table"] == "gaps"]
        if causes and causes[0]["cause"] != now:
            before, after = time_text(causes[0]["before_ns"]), time_text(causes[0]["after_ns"])
            text += f" What changed most of idle time is {causes[0]['cause']}: {before} before and {after} after."
    elif moved:
        doubt = " One of the verdicts is doubtful." if sure == "low" else ""
        text = f"The bottleneck moved from {was} ({shares[0]}) to {now} ({shares[1]}).{doubt}"
    else:
        text = f"The verdicts differ, {was} ({shares[0]}) and {now} ({shares[1]}), by no more than noise."
    return moved, {"before": kept[0], "after": kept[1], "confidence": sure, "text": text}


# ---------------------------------------------------------------- what to know besides


_CIRCUMSTANCES = {
    "gpus": "GPUs",
    "device_count": "numbers of GPUs",
    "tool": "tools",
    "tool_version": "versions of the tool",
    "driver": "drivers",
    "world_size": "world sizes",
    "rank": "ranks",
}
_REMARKS = {
    "gpus": "; times differ by the card, whatever changed in the program",
    "tool": "; each slows the CPU down in its own way",
}


def _circumstances(facts: Row) -> Iterator[str]:
    """What differs besides the program."""
    before, after = ({**side["distributed"], **side} for _, side in _sides(facts))
    for key, what in _CIRCUMSTANCES.items():
        was, now = before.get(key), after.get(key)
        known = all(value or (key == "rank" and value == 0) for value in (was, now))
        versions_of_two = key == "tool_version" and before["tool"] != after["tool"]
        if known and was != now and not versions_of_two:
            texts = [", ".join(value) if isinstance(value, list) else value for value in (was, now)]
            yield f"Different {what}: {texts[0]} before, {texts[1]} after{_REMARKS.get(key, '')}."
    for name, side, other in (("before", before, after), ("after", after, before)):
        lacking = [table for table in side["missing"] if table not in other["missing"]]
        if lacking:
            yield f"The capture {name} did not record {', '.join(lacking)}: what depends on that is not compared."


def _about_graphs(facts: Row) -> Iterator[str]:
    for (name, side), seems in zip(_sides(facts), ("appeared", "disappeared"), strict=True):
        if side["graph_replays"]:
            yield (
                f"The capture {name} holds {side['graph_replays']:,} CUDA-graph replays, "
                f"{time_text(side['graph_ns'])}, without their kernels: what seems to have {seems} may run within "
                "them. Compare the GPU's busy time; nsys profile --cuda-graph-trace=node records the kernels."
            )


def _about_steps(facts: Row) -> Iterator[str]:
    if facts["unit"] == "trace":
        lacking = [name for name, side in _sides(facts) if not side["steps"]]
        why = f"No steps were found {' and '.join(lacking)}"
        if not lacking:
            shares = " and ".join(f"{100 * side['outside_steps']:.0f} % {name}" for name, side in _sides(facts))
            why = f"Most of the GPU's time was launched in no step ({shares})"
        yield (
            f"{why}: whole captures are compared, as if both did the same amount of work. Kernels launched as often "
            "are judged by their launches, which share a run's clock and data. --match names the ranges that are "
            "steps, --steps says how many there were."
        )
        return
    counts = [side["steps"] for _, side in _sides(facts)]
    if counts[0] != counts[1]:
        yield f"{counts[0]} steps before and {counts[1]} after: times are those of a step."
    for name, side in _sides(facts):
        odd = side["steps"] - (side["ordinary_steps"] or side["steps"])
        if odd:
            stand = "stands out and does" if odd == 1 else "stand out and do"
            mean, median = time_text(side["mean_step_ns"]), time_text(side["median_step_ns"])
            yield (
                f"{odd} of {side['steps']} steps {name} {stand} not count as noise: the mean of all is {mean}, the "
                f"median of the others {median}."
            )
        if side["outside_steps"] > _OUTSIDE:
            outside = f"{100 * side['outside_steps']:.0f} % of the GPU's time {name}"
            yield f"{outside} was launched in no step and is not compared."


def _kernels(facts: Row) -> pd.DataFrame:
    """Kernels of both captures."""
    table = pd.DataFrame(facts["kernels"], columns=_OF_KERNELS)
    return table[(table["before_count"] > 0) & (table["after_count"] > 0)]


def _other_amount(facts: Row) -> list[str]:
    """Kernels of both captures that all run more often in one: of whole captures, one did more work."""
    table = _kernels(facts)
    if facts["unit"] == "step" or table.empty:
        return []
    table["times"] = (table["after_count"] / table["before_count"]).astype("float64")
    table = table.sort_values("times", kind="stable")
    # Half of the time lies between these; a library that chose other kernels did not do more work.
    share = table["before_total_ns"].cumsum() / table["before_total_ns"].sum()
    low, high = (float(table.loc[share >= part, "times"].iloc[0]) for part in (0.25, 0.75))
    before, after = table["before_count"].sum(), table["after_count"].sum()
    more = min(low, after / before) > 1 + _AMOUNT
    less = max(high, after / before) < 1 / (1 + _AMOUNT)
    if not more and not less:
        return []
    often = f"ran {after / before:.2f} times as often after ({after:,} launches, {before:,} before)"
    return [f"The kernels that both captures hold {often}: {_OTHER_AMOUNT}"]


def _other_batch(facts: Row) -> Iterator[str]:
    """Copies of another size: the one trace that a batch of another size leaves everywhere."""
    steps = [1, 1]
    if facts["unit"] == "step":
        steps = [facts["before"]["steps"], facts["after"]["steps"]]
    for kind, to in (("HtoD", "to the GPU"), ("DtoD", "within the GPU")):
        copies = pd.DataFrame([row for row in facts["memops"] if row["kind"] == kind])
        if copies.empty or copies[["before_bytes", "after_bytes"]].isna().any(axis=None):
            continue
        was, now = copies["before_bytes"].sum() / steps[0], copies["after_bytes"].sum() / steps[1]
        as_often = copies["before_count"].sum() / steps[0] == copies["after_count"].sum() / steps[1]
        # What is copied within the GPU differs with the program; only the same copies show something by their size.
        if abs(now - was) > _UPLOAD * max(was, now) and (kind == "HtoD" or as_often):
            who = "A step" if facts["unit"] == "step" else "The program"
            yield (
                f"{who} copies {bytes_text(was)} {to} before and {bytes_text(now)} after: its batch, its inputs or "
                "their precision may differ."
            )
            return


def _all_alike(facts: Row) -> Iterator[str]:
    """All kernels that run as often are slower, or faster, alike: a program does not do that."""
    table = _kernels(facts)
    as_often = table["before_count"] * (facts["after"]["steps"] or 1) == table["after_count"] * (
        facts["before"]["steps"] or 1
    )
    table = table[as_often & (table["match"] == "name") & (table["before_ns"] > 0.1 * _least_ns(facts))]
    if len(table) < _ALL:
        return
    mean = (table["after_total_ns"] / table["after_count"]) / (table["before_total_ns"] / table["before_count"])
    low, middle, high = np.quantile(mean.to_numpy(np.float64) - 1, [0.25, 0.5, 0.75])
    if (low > _CLOCK or high < -_CLOCK) and high - low <= max(abs(middle) / 2, _CLOCK):
        yield (
            f"{len(table)} kernels that run as often as before take another time, all alike: {percent(middle)} (the "
            f"middle half {percent(low)} to {percent(high)}). A clock, a power limit, another load or a batch of "
            "another size does that."
        )


def _other_kernels(facts: Row) -> Iterator[str]:
    """Operators that run other kernels for about the same time: a library chose anew."""
    for operator, launched in pd.DataFrame(facts["kernels"], columns=_OF_KERNELS).groupby("operator", sort=False):
        delta = launched["delta_ns"]
        changed = delta[(launched["significance"] == noise.CHANGED) & (delta.abs() >= _least_ns(facts))]
        if changed.min() < 0 < changed.max() and abs(delta.sum()) < changed.abs().max() / 2:
            was, now = time_text(launched["before_ns"].sum()), time_text(launched["after_ns"].sum())
            yield f"{operator} runs other kernels, {was} before and {now} after in all: the library chose other ones."


def _notes(facts: Row) -> Iterator[str]:
    before, after = facts["before"]["notes"], facts["after"]["notes"]
    for note in dict.fromkeys([*before, *after]):
        where = "In both captures" if note in before and note in after else "In the capture before"
        yield f"{where if note in before else 'In the capture after'}: {note}"


# ---------------------------------------------------------------- rows


def sections(comparison: Row, top: int) -> dict[str, tuple[str, list[Row], int]]:
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
        shown = {"figures": ("memory", list(comparison["figures"]), 0)}
        for table, title in _BYTES.items():
            changed = [row for row in comparison[table] if row["delta_bytes"]]
            shown[table] = (title, changed[:top], len(changed))
        return shown
    # What was on neither side is not missed.
    figures = [row for row in comparison["figures"] if row["before_ns"] or row["after_ns"]]
    least_ns = _least_ns(comparison)
    # Causes are few, and add up to what is idle: all that can be seen in a step.
    idle = [row for row in comparison["gaps"] if max(row["before_ns"], row["after_ns"]) >= least_ns]
    unit = "a step" if comparison["unit"] == "step" else "the whole capture"
    shown = {"figures": (unit, figures, 0), "gaps": ("GPU idle, by cause", idle, 0)}
    for table, title in _CHANGED.items():
        changed = [row for row in comparison["changes"] if row["table"] == table and _telling(row)]
        shown[table] = (title, changed[:top], len(changed))
    return shown


def _telling(row: Row) -> bool:
    # An operator's time on the CPU is what its range says; as the launcher of kernels it says what ran in their place.
    return bool(row["table"] != "operators" or (row["clock"] == "GPU" and row["name"] != NO_OPERATOR))


def rows(table: str, chosen: Sequence[Row]) -> list[dict[str, str]]:
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


def _time(table: str, row: Row) -> dict[str, str]:
    was = row["before_ns"]
    interval = ""
    if _known(row["low_ns"]):
        low, high = _change(row["low_ns"], was), _change(row["high_ns"], was)
        if high.endswith(" %"):
            low = low.removesuffix(" %")
        interval = f"{low} to {high}"
    return {
        "name": name_of(table, row),
        "before": time_text(was),
        "after": time_text(row["after_ns"]),
        "change": _change(row["delta_ns"], was),
        "interval": interval,
        "significance": row["significance"],
    }


def _change(delta_ns: float, was_ns: float) -> str:
    """In relation to what was; where nothing was, as a time."""
    return percent(delta_ns / was_ns) if was_ns else signed(delta_ns)


def _known(value: Any) -> bool:
    return value is not None and bool(math.isfinite(value))


def _bytes(table: str, row: Row) -> dict[str, str]:
    delta = row["delta_bytes"]
    change = bytes_text(abs(delta))
    if delta:
        change = f"{'-' if delta < 0 else '+'}{change}"
    if delta and _known(row["change"]):
        change += f" ({percent(row['change'])})"
    before, after = bytes_text(row["before_bytes"]), bytes_text(row["after_bytes"])
    return {"name": name_of(table, row), "before": before, "after": after, "change": change}


def name_of(table: str, row: Row) -> str:
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
        kinds = [plain(kind) for kind in (row["src_kind"], row["dst_kind"]) if kind]
        return f"{plain(row['kind'])} ({' to '.join(kinds)})"
    if table == "figures":
        return _FIGURES.get(row["name"]) or row["name"].removesuffix("_bytes").replace("_", " ")
    match = row.get("match", "name")
    name = plain(row["name"])
    if table == "kernels":
        name = short_name(row["name"])
        if row["before_names"] and row["after_names"] and match != "name":
            name = f"{_several(row['before_names'])} → {_several(row['after_names'])}"
    remarks = [row["clock"]] if table == "ranges" else []
    if match in ("appeared", "disappeared"):
        remarks.append(match)
    return f"{name} ({', '.join(remarks)})" if remarks else name


def _several(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return short_name(names[0]) + more


# ---------------------------------------------------------------- Markdown


def markdown(comparison: Row, top: int = 5) -> str:
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
    ]
    if "bottleneck" in comparison:
        parts.append(_escaped(comparison["bottleneck"]["text"]))
    for table, (title, chosen, changed) in sections(comparison, top).items():
        more = f" ({len(chosen)} of {changed} that changed)" if changed > len(chosen) else ""
        if chosen:
            parts.append(_table(title + more, comparison, table, chosen))
    if "changes" in comparison:
        parts.append(_worse(comparison))
    return "\n\n".join(part for part in parts if part) + "\n"


def _worse(comparison: Row) -> str:
    """Name what a faster program does more slowly."""
    if not comparison["changes"]:
        return "Nothing changed by more than noise and enough to show in a step."
    if comparison["outcome"] == "slower":
        return ""
    grown = {row["name"] for row in comparison["operators"] if row["clock"] == "GPU" and row["delta_ns"] > 0}
    worse = []
    for row in comparison["changes"]:
        table = row["table"]
        # A kernel that took another one's place in its operator is not a loss.
        replaced = table == "kernels" and row["operator"] is not None and row["operator"] not in grown
        if row["delta_ns"] > 0 and table in ("gaps", "kernels", "ranges", "memops") and not replaced:
            worse.append(f"{_code(name_of(table, row))} {signed(row['delta_ns'])}")
    return f"Got worse: {', '.join(worse[:_WORSE])}." if worse else ""


def _table(title: str, comparison: Row, table: str, chosen: Sequence[Row]) -> str:
    titles, keys, aligned = [title, "before", "after", "change"], ["before", "after", "change"], "|---|--:|--:|--:|"
    if "confidence" in comparison:
        titles += [f"{100 * comparison['confidence']:g} % interval", ""]
        keys += ["interval", "significance"]
        aligned += "--:|---|"
    lines = [f"| {' | '.join(titles)} |", aligned]
    for cells in rows(table, chosen):
        name = cells["name"] if table in ("figures", "gaps", "categories") else _code(cells["name"])
        lines.append(f"| {' | '.join([name, *(cells[key] for key in keys)])} |")
    return "\n".join(lines)


def _code(name: str) -> str:
    """Text from a capture, as code that neither ends early nor splits a table."""
    if len(name) > _LONGEST:
        tail = _LONGEST // 3
        name = f"{name[: _LONGEST - tail - 1]}…{name[-tail:]}"
    return "`" + (name.replace("`", "'").replace("|", "\\|") or " ") + "`"


_MARKUP = re.compile(r"([\\`*_{}\[\]<>#|~])|(?<=@)(?=\w)")


def _escaped(text: str) -> str:
    return _MARKUP.sub(lambda sign: f"\\{sign[0]}" if sign[0] else "\u200b", plain(text))
