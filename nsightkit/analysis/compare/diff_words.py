"""What changed, in words: sentences, rows for a terminal, and Markdown for a pull request.

Names come from captures and are somebody else's: in Markdown they stand in code spans, all else is escaped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from nsightkit.analysis.compare.samples import NO_OPERATOR
from nsightkit.analysis.core import noise
from nsightkit.analysis.core.text import bytes_text, short_name, time_text
from nsightkit.safe import plain

__all__ = ["SIDES", "Facts", "bottleneck", "headline", "markdown", "name_of", "percent", "rows", "sections", "signed"]

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
#: Bytes that a step uploads, in relation to those of the other side.
_UPLOAD = 0.01


class Facts(NamedTuple):
    """What the sentences are about.

    Parameters
    ----------
    tables : mapping of str to DataFrame
    changes : sequence of mapping
        Rows that changed enough to matter, the largest first, each with its ``table``.
    unit : {"step", "trace"}
    judged : tuple of int
        Steps of each side that do not stand out.
    confidence, least_ns : float
    before, after : mapping
        What is known of each capture.
    """

    tables: Mapping[str, pd.DataFrame]
    changes: Sequence[Row]
    unit: str
    judged: tuple[int, int]
    confidence: float
    least_ns: float
    before: Row
    after: Row

    @property
    def sides(self) -> list[tuple[str, Row]]:
        """Both captures with their names."""
        return [("before", self.before), ("after", self.after)]


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


# ---------------------------------------------------------------- the first sentences


def headline(facts: Facts) -> tuple[str, str]:
    """Say in one word and in one sentence what became of the time.

    Parameters
    ----------
    facts : Facts

    Returns
    -------
    outcome, sentence : str
    """
    outcome, sentence = _outcome(facts)
    cards = facts.before["gpus"], facts.after["gpus"]
    if _other_amount(facts):
        sentence = f"With different amounts of work: {sentence}"
    if all(cards) and cards[0] != cards[1]:
        sentence = f"On different GPUs: {sentence}"
    return outcome, sentence


def _outcome(facts: Facts) -> tuple[str, str]:
    figures = facts.tables["figures"].to_dict("records")
    if not figures or not figures[0]["before_ns"]:
        return "inconclusive", "There is no time to compare: one of the captures holds neither steps nor GPU work."
    row = figures[0]
    subject = "A step takes" if facts.unit == "step" else "From the first operation to the last it takes"
    said = f"{subject} {time_text(row['after_ns'])} instead of {time_text(row['before_ns'])}: {percent(row['change'])}"
    counts = f"{facts.judged[0]} and {facts.judged[1]} steps"
    if row["significance"] == noise.INCONCLUSIVE:
        few = f"{counts} are too few to tell a change from noise"
        if facts.unit == "trace" or not min(facts.judged):
            few = "captures without steps do not show what noise is"
        return "inconclusive", f"{said}. Inconclusive: {few}."
    sure = counts
    if _known(row["low_ns"]):
        low, high = percent(row["low_ns"] / row["before_ns"]), percent(row["high_ns"] / row["before_ns"])
        sure = f"{100 * facts.confidence:g} % interval {low} to {high}, {counts}"
    if _known(row["between_ns"]):
        sure += f"; runs differ by up to {100 * row['between_ns'] / row['before_ns']:.0f} %"
    if row["significance"] == noise.WITHIN_NOISE:
        return "no change", f"{said}, within noise ({sure})."
    if abs(row["delta_ns"]) < facts.least_ns:
        return "no change", f"{said}, too little to matter ({sure})."
    outcome = "faster" if row["delta_ns"] < 0 else "slower"
    remark = "" if _known(row["between_ns"]) else f" {noise.ONE_RUN}"
    return outcome, f"{said}, more than noise ({sure}).{remark}"


def where(facts: Facts) -> str:
    """Say where the time went: to idle or busy time, and of these to which cause or kernel.

    Parameters
    ----------
    facts : Facts
    """
    if _other_amount(facts):
        return ""
    changed = facts.tables["figures"].set_index("name")["delta_ns"]
    parts = []
    for kind, table, name in (("idle", "gaps", "cause"), ("busy", "categories", "name")):
        most = [row for row in facts.changes if row["table"] == table][:_NAMED_FIRST]
        named = ", ".join(f"{row[name]} {signed(row['delta_ns'])}" for row in most)
        delta = changed.get(f"{kind}_ns")
        if delta is not None and (named or abs(delta) >= max(facts.least_ns, 1)):
            parts.append(f"GPU {kind} time {signed(delta)} ({named})" if named else f"GPU {kind} time {signed(delta)}")
    return f"Where: {'; '.join(parts)}." if parts else ""


def bottleneck(facts: Facts, verdicts: Sequence[Row]) -> tuple[bool | None, dict[str, Any]]:
    """Say whether the bottleneck moved, and what it was and is.

    Parameters
    ----------
    facts : Facts
    verdicts : sequence of mapping
        What :func:`nsightkit.analysis.verdict.summary` says of both captures.

    Returns
    -------
    moved : bool or None
    described : dict
    """
    kept = []
    for answer in verdicts:
        kept.append({key: answer[key] for key in ("bottleneck", "share_of_span", "confidence")})
    was, now = kept[0]["bottleneck"], kept[1]["bottleneck"]
    shares = [f"{100 * (answer['share_of_span'] or 0):.1f} % of the time" for answer in kept]
    sure = min((answer["confidence"] for answer in kept), key=["low", "medium", "high"].index)
    moved: bool | None = was != now and _decisive(facts, was, now)
    if "not-enough-data" in (was, now):
        moved, text = None, f"Whether the bottleneck moved is not known: {was} before, {now} after."
    elif was == now:
        text = f"The bottleneck did not move: {was}, {shares[0]} before and {shares[1]} after."
        text += _other_cause(facts, now)
    elif moved:
        doubt = " One of the verdicts is doubtful." if sure == "low" else ""
        text = f"The bottleneck moved from {was} ({shares[0]}) to {now} ({shares[1]}).{doubt}"
    else:
        text = f"The verdicts differ, {was} ({shares[0]}) and {now} ({shares[1]}), by no more than noise."
    return moved, {"before": kept[0], "after": kept[1], "confidence": sure, "text": text}


def _decisive(facts: Facts, was: str, now: str) -> bool:
    """Whether a figure that verdicts rest on changed, or may have."""
    for row in facts.changes:
        if row["table"] == "figures" or (row["table"] == "gaps" and row["cause"] in (was, now)):
            return True
    return False


def _other_cause(facts: Facts, cause: str) -> str:
    for row in facts.changes:
        if row["table"] == "gaps":
            if row["cause"] == cause:
                return ""
            before, after = time_text(row["before_ns"]), time_text(row["after_ns"])
            return f" What changed most of idle time is {row['cause']}: {before} before and {after} after."
    return ""


# ---------------------------------------------------------------- what to know besides


def warnings(facts: Facts) -> list[str]:
    """Say what differs between the captures besides the change, and what they do not show.

    Parameters
    ----------
    facts : Facts
    """
    other_amount = _other_amount(facts)
    sentences = [*_circumstances(facts), *_about_graphs(facts), *_about_steps(facts)]
    if other_amount:
        sentences.append(other_amount)
    devices = dict.fromkeys(side["device_count"] for _, side in facts.sides)
    if max(devices) > 1:
        held = " and ".join(map(str, devices))
        sentences.append(f"Busy and idle time, kernels and copies are sums over {held} GPUs; the wall time is not.")
    if not other_amount:
        sentences += _other_batch(facts)
    if facts.before["gpus"] == facts.after["gpus"]:
        sentences += _all_alike(facts)
    sentences += _other_kernels(facts)
    for note in facts.before["notes"]:
        both = note in facts.after["notes"]
        sentences.append(f"In both captures: {note}" if both else f"In the capture before: {note}")
    for note in facts.after["notes"]:
        if note not in facts.before["notes"]:
            sentences.append(f"In the capture after: {note}")
    return sentences


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


def _circumstances(facts: Facts) -> Iterator[str]:
    """What differs besides the program."""
    for key, what in _CIRCUMSTANCES.items():
        # A rank of 0 is one; no name of a card, or no device, is not known.
        source = "distributed" if key in ("world_size", "rank") else None
        was, now = (side[source].get(key) if source else side[key] or None for _, side in facts.sides)
        versions_of_two = key == "tool_version" and facts.before["tool"] != facts.after["tool"]
        if was is None or now is None or was == now or versions_of_two:
            continue
        if isinstance(was, list):
            was, now = ", ".join(was), ", ".join(now)
        yield f"Different {what}: {was} before, {now} after{_REMARKS.get(key, '')}."
    for name, side, other in (("before", facts.before, facts.after), ("after", facts.after, facts.before)):
        lacking = [table for table in side["missing"] if table not in other["missing"]]
        if lacking:
            yield f"The capture {name} did not record {', '.join(lacking)}: what depends on that is not compared."


def _about_graphs(facts: Facts) -> Iterator[str]:
    for (name, side), seems in zip(facts.sides, ("appeared", "disappeared"), strict=True):
        if side["graph_replays"]:
            yield (
                f"The capture {name} holds {side['graph_replays']:,} CUDA-graph replays, "
                f"{time_text(side['graph_ns'])}, without their kernels: what seems to have {seems} may run within "
                "them. Compare the GPU's busy time; nsys profile --cuda-graph-trace=node records the kernels."
            )


def _about_steps(facts: Facts) -> Iterator[str]:
    if facts.unit == "trace":
        lacking = [name for name, side in facts.sides if not side["steps"]]
        why = f"No steps were found {' and '.join(lacking)}"
        if not lacking:
            shares = " and ".join(f"{100 * side['outside_steps']:.0f} % {name}" for name, side in facts.sides)
            why = f"Most of the GPU's time was launched in no step ({shares})"
        yield (
            f"{why}: whole captures are compared, as if both did the same amount of work. Kernels launched as often "
            "are judged by their launches, which share a run's clock and data. --match names the ranges that are "
            "steps, --steps says how many there were."
        )
        return
    if facts.before["steps"] != facts.after["steps"]:
        yield f"{facts.before['steps']} steps before and {facts.after['steps']} after: times are those of a step."
    for name, side in facts.sides:
        odd = side["steps"] - side["ordinary_steps"] if side["ordinary_steps"] else 0
        if odd:
            yield (
                f"{odd} of {side['steps']} steps {name} {'stands' if odd == 1 else 'stand'} out and "
                f"{'does' if odd == 1 else 'do'} not count as noise: the mean of all is "
                f"{time_text(side['mean_step_ns'])}, the median of the others {time_text(side['ordinary_step_ns'])}."
            )
        if side["outside_steps"] > _OUTSIDE:
            outside = f"{100 * side['outside_steps']:.0f} % of the GPU's time {name}"
            yield f"{outside} was launched in no step and is not compared."


def _other_amount(facts: Facts) -> str:
    """Kernels of both captures that all run more often in one: of whole captures, one did more work."""
    table = facts.tables["kernels"]
    both = table[(table["before_count"] > 0) & (table["after_count"] > 0)]
    if facts.unit == "step" or both.empty:
        return ""
    before, after = both["before_count"].astype("float64"), both["after_count"].astype("float64")
    times = (after / before).sort_values(kind="stable")
    # Half of the time is between a quarter and three quarters; a library that chose other kernels did not do more work.
    share = both["before_total_ns"].loc[times.index].cumsum() / both["before_total_ns"].sum()
    low, high = (float(times[share >= part].iloc[0]) for part in (0.25, 0.75))
    all_in_all = after.sum() / before.sum()
    more = min(low, all_in_all) > 1 + _AMOUNT
    less = max(high, all_in_all) < 1 / (1 + _AMOUNT)
    if not more and not less:
        return ""
    return (
        f"The kernels that both captures hold ran {all_in_all:.2f} times as often after "
        f"({after.sum():,.0f} launches, {before.sum():,.0f} before): the captures hold different amounts of work, "
        "and their times do not compare."
    )


def _other_batch(facts: Facts) -> Iterator[str]:
    """Copies of another size: the one trace that a batch of another size leaves everywhere."""
    table = facts.tables["memops"]
    counts = [1.0, 1.0]
    if facts.unit == "step":
        counts = [float(facts.before["steps"]), float(facts.after["steps"])]
    for kind, to in (("HtoD", "to the GPU"), ("DtoD", "within the GPU")):
        copies = table[table["kind"] == kind]
        if copies[["before_bytes", "after_bytes"]].isna().any(axis=None):
            continue
        was, now = (float(copies[f"{side}_bytes"].sum()) / n for side, n in zip(SIDES, counts, strict=True))
        often = [copies[f"{side}_count"].sum() / n for side, n in zip(SIDES, counts, strict=True)]
        # What is copied within the GPU differs with the program; only the same copies show something by their size.
        if abs(now - was) > _UPLOAD * max(was, now) and (kind == "HtoD" or often[0] == often[1]):
            who = "A step" if facts.unit == "step" else "The program"
            yield (
                f"{who} copies {bytes_text(was)} {to} before and {bytes_text(now)} after: its batch, its inputs or "
                "their precision may differ."
            )
            return


def _all_alike(facts: Facts) -> Iterator[str]:
    """All kernels that run as often are slower, or faster, alike: a program does not do that."""
    table = facts.tables["kernels"]
    reference_ns = facts.tables["figures"]["before_ns"].head(1).sum()
    table = table[(table["match"] == "name") & (table["before_ns"] > 0.001 * reference_ns)]
    per_step = table["before_count"] * (facts.after["steps"] or 1) - table["after_count"] * (facts.before["steps"] or 1)
    table = table[per_step == 0]
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


def _other_kernels(facts: Facts) -> Iterator[str]:
    """Operators that run other kernels for about the same time: a library chose anew."""
    table = facts.tables["kernels"]
    for operator, launched in table.groupby("operator", sort=False):
        delta = launched["delta_ns"]
        changed = delta[(launched["significance"] == noise.CHANGED) & (delta.abs() >= facts.least_ns)]
        if changed.min() < 0 < changed.max() and abs(delta.sum()) < changed.abs().max() / 2:
            was, now = time_text(launched["before_ns"].sum()), time_text(launched["after_ns"].sum())
            yield f"{operator} runs other kernels, {was} before and {now} after in all: the library chose other ones."


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
    least_ns = 0.0
    if figures:
        least_ns = comparison["min_share"] * max(figures[0]["before_ns"], figures[0]["after_ns"])
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
