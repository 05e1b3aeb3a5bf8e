"""What changed, in words: sentences, and rows of tables as people read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from nsightkit.analysis.compare.samples import Samples
from nsightkit.analysis.core import noise
from nsightkit.analysis.core.text import share_text, short_name, time_text
from nsightkit.safe import plain

__all__ = ["described", "percent", "sections", "sentences"]

Row = Mapping[str, Any]

#: Figures of captures and of memory snapshots.
_FIGURES = {
    "wall_ns": "wall",
    "busy_ns": "GPU busy",
    "idle_ns": "GPU idle",
    "kernel_ns": "kernels",
    "memop_ns": "copies and memsets",
    "graph_ns": "graph replays",
    "allocated_bytes": "allocated",
    "reserved_bytes": "reserved",
    "reserved_and_unused_bytes": "reserved and unused",
}
#: From this ratio on, a change is written as a multiple.
_MULTIPLE = 10
#: Longest name in a sentence.
_LONGEST = 80
#: One of two captures did more work if kernels with most of the shared time ran more often in it, by more than this.
_MORE_OFTEN, _MOST = 1.05, 0.75


def percent(share: float) -> str:
    """Write a change.

    Parameters
    ----------
    share : float
        Of what was before; -0.5 is half of it gone. From ten times on it is written as a multiple.

    Examples
    --------
    >>> percent(-0.5), percent(8.99), percent(1180.9)
    ('-50.0 %', '+899.0 %', '1,181.9x')
    """
    if share < _MULTIPLE - 1:
        return f"{100 * share:+.1f} %"
    return f"{1 + share:,.1f}x"


# ---------------------------------------------------------------- sentences


def described(captures: Sequence[Samples]) -> dict[str, Any]:
    """Facts about one side.

    Parameters
    ----------
    captures : sequence of Samples
        The first is described; the steps of all are counted.
    """
    trace = captures[0].trace
    gpus = dict.fromkeys(gpu.name for gpu in trace.meta.gpus if gpu.name)
    facts = {
        "gpus": list(gpus),
        "captures": len(captures),
        "steps": sum(len(capture.windows) for capture in captures),
        "graph_replays": trace.size("graphs"),
    }
    return facts | captures[0].overview


def sentences(facts: Row, kernels: pd.DataFrame, verdicts: Sequence[Row]) -> dict[str, Any]:
    """Write what changed.

    Parameters
    ----------
    facts : mapping
        ``before`` and ``after`` (:func:`described`), ``figures``, ``changes``, ``unit``, ``least_ns``.
    kernels : DataFrame
        The table of kernels.
    verdicts : sequence of mapping
        What :func:`nsightkit.analysis.verdict.summary` gives for both captures.

    Returns
    -------
    dict
        ``headline, outcome, where, moved, bottleneck, warnings``.
    """
    outcome, headline = _outcome(facts)
    where = _where(facts)
    warnings = _about_sides(facts["before"], facts["after"])
    if facts["unit"] == "trace":
        warnings.append(
            "Whole captures are compared, because one has no steps or most GPU work outside them. Kernels launched "
            "equally often are judged by their launches, nothing else is; --match names the ranges that are steps."
        )
    shared = kernels[(kernels["before_count"] > 0) & (kernels["after_count"] > 0)]
    if len(kernels) and shared.empty:
        warnings.append("The captures share no kernels, so they may be of different programs.")
    warnings += _other_kernels(kernels, facts["least_ns"])
    if facts["unit"] == "trace" and _is_other_work(shared):
        headline, where = f"With different amounts of work: {headline}", ""
        before, after = shared["before_count"].sum(), shared["after_count"].sum()
        warnings.append(
            "The captures hold different amounts of work, so their times do not compare: the kernels of both were "
            f"launched {before:,} times before and {after:,} times after."
        )
    if _differ(facts["before"], facts["after"], "gpus"):
        headline = f"On different GPUs: {headline}"
    moved, text = _bottleneck(facts, verdicts)
    was, now = (answer["bottleneck"] for answer in verdicts)
    return {
        "headline": headline,
        "outcome": outcome,
        "where": where,
        "moved": moved,
        "bottleneck": {"before": was, "after": now, "text": text},
        "warnings": warnings,
    }


def _outcome(facts: Row) -> tuple[str, str]:
    """Answer in one word and in one sentence whether the time changed."""
    if not facts["figures"] or not facts["figures"][0]["before_ns"]:
        return "inconclusive", "Nothing to compare: one of the captures holds neither steps nor GPU work."
    row = facts["figures"][0]
    steps = f"{facts['before']['steps']} and {facts['after']['steps']} steps"
    subject = "the step time"
    too_few = f"{steps} are too few to tell a change from noise"
    if facts["unit"] == "trace":
        subject = "the time from the first GPU operation to the last"
        too_few = "captures without steps do not show how much of that is noise"
    change = f"{subject} went from {time_text(row['before_ns'])} to {time_text(row['after_ns'])}"
    change += f" ({percent(row['change'])})"
    if row["significance"] == noise.INCONCLUSIVE:
        return "inconclusive", f"Inconclusive: {change}; {too_few}."
    interval = _interval(row)
    evidence = f"95 % interval {interval}, {steps}" if interval else steps
    if row["significance"] == noise.WITHIN_NOISE:
        return "no change", f"No change beyond noise: {change}; {evidence}."
    if abs(row["delta_ns"]) < facts["least_ns"]:
        return "no change", f"No change that matters: {change}; {evidence}."
    outcome = "faster" if row["delta_ns"] < 0 else "slower"
    sentence = f"{outcome.capitalize()}: {change}, beyond noise; {evidence}."
    if facts["before"]["captures"] == facts["after"]["captures"] == 1:
        sentence += f" {noise.ONE_RUN}"
    return outcome, sentence


def _where(facts: Row) -> str:
    """Name the cause of idle time or the kernel that surely changed most."""
    for row in facts["changes"]:
        if row["table"] in ("gaps", "kernels") and row["significance"] == noise.CHANGED:
            name, delta = _name(row), row["delta_ns"]
            if len(name) > _LONGEST:
                name = f"{name[:_LONGEST]}…"
            return f"Largest change: {name}, {'+' if delta > 0 else ''}{time_text(delta)}."
    return ""


def _bottleneck(facts: Row, verdicts: Sequence[Row]) -> tuple[bool | None, str]:
    """Answer whether the bottleneck moved, and write which it was and is."""
    causes = []
    texts = []
    for answer in verdicts:
        causes.append(answer["bottleneck"])
        texts.append(f"{answer['bottleneck']} ({share_text(answer['share_of_span'] or 0)} of the time)")
    if "not-enough-data" in causes:
        return None, f"Whether the bottleneck moved is unknown: {causes[0]} before, {causes[1]} after."
    if causes[0] == causes[1]:
        return False, f"The bottleneck did not move: {texts[0]} before, {texts[1]} after."
    for row in facts["changes"]:
        # The verdicts rest on these: without a change here, they differ by noise.
        if row["table"] == "figures" or row.get("cause") in causes:
            return True, f"The bottleneck moved from {texts[0]} to {texts[1]}."
    return False, f"The verdicts differ by no more than noise: {texts[0]} before, {texts[1]} after."


# ---------------------------------------------------------------- warnings


def _differ(before: Row, after: Row, key: str) -> bool:
    """Whether both sides state something, and disagree."""
    return bool(before[key] and after[key] and before[key] != after[key])


def _about_sides(before: Row, after: Row) -> list[str]:
    """Name what differs besides the program."""
    warnings = []
    if _differ(before, after, "gpus"):
        warnings.append(f"Different GPUs: {', '.join(before['gpus'])} before, {', '.join(after['gpus'])} after.")
    if _differ(before, after, "tool"):
        tools = f"{before['tool']} before, {after['tool']} after"
        warnings.append(f"Different profilers: {tools}; each slows the CPU in its own way.")
    for name, side, other in (("before", before, after), ("after", after, before)):
        lacking = [table for table in side["missing"] if table not in other["missing"]]
        if lacking:
            warnings.append(f"The capture {name} did not record {', '.join(lacking)}; these are not compared.")
        if side["graph_replays"]:
            warnings.append(
                f"The capture {name} holds {side['graph_replays']:,} CUDA-graph replays without their kernels, so "
                "compare the GPU's busy time; nsys profile --cuda-graph-trace=node records the kernels."
            )
    return warnings


def _is_other_work(shared: pd.DataFrame) -> bool:
    """Whether one of two captures did more work; a library that chose other kernels does not count."""
    times = shared["after_count"] / shared["before_count"]
    weight = shared["before_total_ns"] / shared["before_total_ns"].sum()
    return bool(max(weight[times > _MORE_OFTEN].sum(), weight[times < 1 / _MORE_OFTEN].sum()) >= _MOST)


def _other_kernels(kernels: pd.DataFrame, least_ns: float) -> Iterator[str]:
    """Warn of kernels of one kind that took each other's place."""
    is_large = (kernels["significance"] == noise.CHANGED) & (kernels["delta_ns"].abs() >= least_ns)
    changed = kernels[is_large & (kernels["before_count"] != kernels["after_count"])]
    totals = kernels.groupby("category")[["before_ns", "after_ns"]].sum()
    for category, delta in changed.groupby("category", sort=False)["delta_ns"]:
        was, now = totals.loc[[category]].to_numpy()[0].tolist()
        if delta.min() < 0 < delta.max() and abs(now - was) < delta.abs().max() / 2:
            yield f"A library chose other {category} kernels: {time_text(was)} before, {time_text(now)} after in all."


# ---------------------------------------------------------------- tables


def sections(comparison: Row, top: int) -> Iterator[tuple[str, list[dict[str, Any]], int]]:
    """Choose the rows to show.

    Parameters
    ----------
    comparison : mapping
        What :func:`nsightkit.analysis.compare.diff.summary` or :func:`nsightkit.analysis.memory.diff.summary` returned.
    top : int
        Rows of each table.

    Yields
    ------
    tuple
        A title, rows, and how many there are in all.
    """
    if "sites" in comparison:
        unit, least = "bytes", 1
        tables = {"memory": comparison["figures"]}
        for table, title in (("categories", "By category"), ("sites", "By line")):
            tables[title] = [row for row in comparison[table] if row["delta_bytes"]]
    else:
        unit, least = "ns", comparison["least_ns"]
        tables = {
            f"per {comparison['unit']}": comparison["figures"],
            "GPU idle, by cause": comparison["gaps"],
        }
        for table in ("kernels", "ranges"):
            tables[table.capitalize()] = [row for row in comparison["changes"] if row["table"] == table]
    for title, rows in tables.items():
        large = [row for row in rows if max(row[f"before_{unit}"], row[f"after_{unit}"]) >= least]
        yield title, [_shown(row, unit) for row in large[:top]], len(large)


def _is_unknown(value: Any) -> bool:
    return value is None or bool(pd.isna(value))


def _shown(row: Row, unit: str) -> dict[str, Any]:
    """Choose and name the columns of a row."""
    shown = {"name": _name(row)}
    for key in (f"before_{unit}", f"after_{unit}", f"delta_{unit}"):
        shown[key] = row[key]
    shown["change"] = "-" if _is_unknown(row["change"]) else percent(row["change"])
    if unit == "ns":
        shown["interval"] = _interval(row)
        shown["significance"] = row["significance"]
    return shown


def _interval(row: Row) -> str:
    """The interval of a change, relative to before; empty if unknown."""
    was = row["before_ns"]
    if _is_unknown(row["low_ns"]) or not was:
        return ""
    return f"{percent(row['low_ns'] / was)} to {percent(row['high_ns'] / was)}"


def _name(row: Row) -> str:
    """Name a row for people, on one line and safe for a terminal."""
    if "cause" in row:
        return str(row["cause"])
    name = _FIGURES.get(row["name"]) or plain(row["name"])
    remarks = []
    if isinstance(row.get("before_names"), list):  # of kernels
        name = _first(row["after_names"] or row["before_names"])
        if row["match"] == "normalised":
            name = f"{_first(row['before_names'])} → {name}"
    elif isinstance(row.get("clock"), str):
        remarks.append(row["clock"])
    if row.get("match") in ("appeared", "disappeared"):
        remarks.append(row["match"])
    return f"{name} ({', '.join(remarks)})" if remarks else name


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return short_name(names[0]) + more
