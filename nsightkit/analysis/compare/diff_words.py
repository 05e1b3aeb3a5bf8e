"""The words of a comparison: its sentences, and rows of its tables as people read them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pandas as pd

from nsightkit.analysis.compare.samples import Samples
from nsightkit.analysis.core import noise
from nsightkit.analysis.core.causes import CAUSES
from nsightkit.analysis.timeline import steps
from nsightkit.errors import plain
from nsightkit.text import Json, count_text, share_text, short_name, time_text
from nsightkit.trace.model import table_words

Row = Json

#: How tables name the times of the whole.
_NAME_OF_FIGURE = {"wall_ns": "wall", "busy_ns": "GPU busy", "idle_ns": "GPU idle"}
#: How tables mark kernels that the captures do not share by name.
_WORDS_OF_MATCH = {"normalised": "similar name", "appeared": "new", "disappeared": "gone"}
#: From this ratio on, a change is written as a multiple.
_LEAST_MULTIPLE = 10
#: One of two captures did more work if kernels were launched more often in it by more than this factor, and if those
#: kernels take at least this share of the time of the kernels of both.
_MORE_OFTEN_FACTOR = 1.05
_MOST_TIME_SHARE = 0.75
#: Graphs recorded without their kernels are worth a warning if they take more than this share of the busy time.
_LEAST_GRAPH_SHARE = 0.05


def percent(share: float) -> str:
    """Write a relative change: in percent or, from ten times on, as a multiple.

    Parameters
    ----------
    share : float
        The difference relative to before: -0.5 is half of it gone.

    Examples
    --------
    >>> percent(-0.5), percent(8.99), percent(1180.9)
    ('-50.0%', '+899.0%', '1,181.9x')
    """
    if share < _LEAST_MULTIPLE - 1:
        return f"{100 * share:+z.1f}%"
    return f"{1 + share:,.1f}x"


# ---------------------------------------------------------------- sentences


def facts_of_side(captures: Sequence[Samples]) -> Json:
    """Collect the facts about one side of a comparison: the captures before or those after the change.

    Parameters
    ----------
    captures : sequence of Samples
        The first is described; the steps of all are counted.

    Returns
    -------
    dict
        ``gpus`` (names), ``captures``, ``steps`` and ``outliers`` among them (how many), and the first's overview
        (:func:`nsightkit.analysis.timeline.overview.summary`).
    """
    first = captures[0]
    return {
        "gpus": sorted({gpu.name for gpu in first.trace.meta.gpus if gpu.name}),
        "captures": len(captures),
        "steps": sum(len(capture.windows) for capture in captures),
        "outliers": sum(map(_outlier_count, captures)),
        **first.overview,
    }


def _outlier_count(capture: Samples) -> int:
    """Count the steps that are left out of the median step time."""
    # `reindex`, as a capture with neither steps nor GPU work lacks the row.
    wall_ns = capture.figures.reindex(["wall_ns"])[capture.windows.index].to_numpy()[0]
    return int(steps.outliers(wall_ns).sum())


def sentences(facts: Row, kernels: pd.DataFrame, verdicts: Sequence[Row]) -> Json:
    """Write the sentences on what changed.

    Parameters
    ----------
    facts : mapping
        ``before`` and ``after`` (:func:`facts_of_side`), ``figures``, ``changes``, ``unit``.
    kernels : DataFrame
        The table of kernels.
    verdicts : sequence of mapping
        What :func:`nsightkit.analysis.verdict.summary` gives for both captures.

    Returns
    -------
    dict
        ``headline, outcome, moved, bottleneck, warnings``.
    """
    outcome, headline = _outcome(facts)
    warnings = list(_differences_of_sides(facts["before"], facts["after"]))
    if facts["unit"] == "trace":
        warnings.append(
            "Whole captures are compared, because one or both lack steps. That does not tell a change from noise; "
            "name the steps with --match REGEX."
        )
        different_work = _different_work(kernels)
        if different_work:
            headline = f"{headline.removesuffix('.')}; the captures hold different amounts of work."
            warnings.append(different_work)
    warnings += _exchanged_kernels(kernels)
    was, now = (answer["bottleneck"] for answer in verdicts)
    moved, text = _bottleneck_moved(facts, was, now)
    if "not-enough-data" not in (was, now):
        before, after = (share_text(answer["share_of_span"]) for answer in verdicts)
        text += f": {CAUSES[was].noun} ({before} of the time) before, {CAUSES[now].noun} ({after} of the time) after"
    return {
        "headline": headline,
        "outcome": outcome,
        "moved": moved,
        "bottleneck": {"before": was, "after": now, "text": f"{text}."},
        "warnings": warnings,
    }


def _outcome(facts: Row) -> tuple[str, str]:
    """Say in one word (faster, slower, no change or inconclusive) and in one sentence whether the time changed."""
    # The first figure is the time of a step, or of the whole capture; 0 where a capture has neither.
    if not any(row["before_ns"] and row["after_ns"] for row in facts["figures"][:1]):
        return "inconclusive", "Nothing to compare: one of the captures holds neither steps nor GPU work."
    row = facts["figures"][0]
    subject = "the step time"
    basis = f"{facts['before']['steps']} and {facts['after']['steps']} steps"
    left_out = facts["before"]["outliers"] + facts["after"]["outliers"]
    if left_out:
        basis += f", {count_text(left_out, 'outlier')} left out"
    if facts["unit"] == "trace":
        subject = "the time from the first GPU operation to the last"
        basis = "whole captures"
    if _interval_text(row):
        basis = f"95% interval {_interval_text(row)}, {basis}"
    outcome = "inconclusive"
    if row["significance"] == noise.WITHIN_NOISE:
        outcome = "no change"
    elif row["significance"] == noise.CHANGED:
        outcome = "slower"
        if row["delta_ns"] < 0:
            outcome = "faster"
        if facts["before"]["captures"] == facts["after"]["captures"] == 1:
            basis += f". {noise.ONE_RUN.removesuffix('.')}"
    change = f"{subject} went from {time_text(row['before_ns'])} to {time_text(row['after_ns'])}"
    return outcome, f"{outcome.capitalize()}: {change} ({percent(row['change'])}); {basis}."


def _bottleneck_moved(facts: Row, was: str, now: str) -> tuple[bool | None, str]:
    """Say whether the bottleneck moved from `was` to `now` (None: unknown), and begin a sentence about that."""
    if "not-enough-data" in (was, now):
        return None, "Too little was recorded to name the bottleneck of both captures"
    if was == now:
        return False, "The bottleneck did not move"
    significances = set()
    for row in facts["changes"]:
        # The verdicts rest on the figures and on idle time by cause: unless these changed, they differ by noise.
        if row["table"] == "figures" or row.get("cause") in (was, now):
            significances.add(row["significance"])
    if noise.CHANGED in significances:
        return True, "The bottleneck moved"
    if significances:  # only inconclusive ones: `changes` holds none within noise
        return None, "Whether the bottleneck moved is inconclusive"
    return False, "The verdicts differ by no more than noise"


# ---------------------------------------------------------------- warnings


def _differences_of_sides(before: Row, after: Row) -> Iterator[str]:
    """Warn of what differs besides the program: GPUs, profilers, what was recorded, graphs without their kernels."""
    gpus = ", ".join(before["gpus"]), ", ".join(after["gpus"])
    tools = before["tool"], after["tool"]
    for noun, (was, now) in (("GPUs", gpus), ("profilers", tools)):
        if was and now and was != now:
            yield f"Different {noun}: {was} before, {now} after."
    for name, side, other_side in (("before", before, after), ("after", after, before)):
        lacking = ", ".join(table_words(table for table in side["missing"] if table not in other_side["missing"]))
        if lacking:
            yield f"The capture {name} did not record {lacking}; these are not compared."
        graphs_ns = side["graph_ns"] or 0
        if graphs_ns > _LEAST_GRAPH_SHARE * (side["busy_ns"] or 0) and not other_side["graph_ns"]:
            yield (
                f"The capture {name} holds {time_text(graphs_ns)} of CUDA graphs without their kernels: what seems "
                "to be missing there may run in them. Compare the busy time, or record with --cuda-graph-trace=node."
            )


def _different_work(kernels: pd.DataFrame) -> str:
    """Warn that one of two captures did more work, empty if not; a library that chose other kernels does not count."""
    shared = kernels[(kernels["before_count"] > 0) & (kernels["after_count"] > 0)]
    count_ratio = shared["after_count"] / shared["before_count"]
    more_often_ns = shared["before_total_ns"][count_ratio > _MORE_OFTEN_FACTOR].sum()
    less_often_ns = shared["before_total_ns"][count_ratio < 1 / _MORE_OFTEN_FACTOR].sum()
    # The 1 is for captures that share no kernel, all sums 0: they hold different work.
    if max(more_often_ns, less_often_ns, 1) < _MOST_TIME_SHARE * shared["before_total_ns"].sum():
        return ""
    return (
        "The captures hold different amounts of work, so their times do not compare: the kernels of both were "
        f"launched {shared['before_count'].sum():,} times before and {shared['after_count'].sum():,} times after."
    )


def _exchanged_kernels(kernels: pd.DataFrame) -> Iterator[str]:
    """Warn of kernels of one category that took each other's place, so that their sum changed little."""
    # A kernel that was launched as often as before took no other's place: it became faster or slower.
    is_exchanged = (kernels["significance"] == noise.CHANGED) & (kernels["before_count"] != kernels["after_count"])
    for category, delta_ns in kernels[is_exchanged].groupby("category", sort=False)["delta_ns"]:
        of_category = kernels[kernels["category"] == category]
        was = int(of_category["before_ns"].sum())
        now = int(of_category["after_ns"].sum())
        # Some fell and some rose, and all of the category changed by less than half of the largest of these changes.
        if delta_ns.min() < 0 < delta_ns.max() and abs(now - was) < delta_ns.abs().max() / 2:
            yield f"A library chose other {category} kernels: {time_text(was)} before, {time_text(now)} after in all."


# ---------------------------------------------------------------- tables


def sections(comparison: Row, top: int) -> Iterator[tuple[str, list[Json], int]]:
    """Choose the rows to show, table by table: all figures and causes of idle time, of other tables what changed.

    Parameters
    ----------
    comparison : mapping
        Of :func:`nsightkit.analysis.compare.diff.Comparison.summary`.
    top : int
        Most rows of each table.

    Yields
    ------
    tuple
        The table's title, the rows to show, and how many there are in all.
    """
    tables = {f"per {comparison['unit']}": comparison["figures"], "GPU idle, by cause": comparison["gaps"]}
    for table, title in {
        "kernels": "Kernels",
        "memops": "Copies and memsets",
        "ranges": "Ranges (# is any number)",
    }.items():
        tables[title] = [row for row in comparison["changes"] if row["table"] == table]
    for title, rows in tables.items():
        # Leave out what takes less on both sides than the smallest change that matters.
        large = [row for row in rows if max(row["before_ns"], row["after_ns"]) >= comparison["least_ns"]]
        yield title, [_shown_row(row) for row in large[:top]], len(large)


def _shown_row(row: Row) -> Json:
    """Choose the columns of a row that people see, and write its name, change and interval.

    Under ``match`` stands how kernels were paired, unless by name, or the clock of a range that both sides have.
    """
    return {
        "name": _shown_name(row),
        "before_ns": row["before_ns"],
        "after_ns": row["after_ns"],
        "delta_ns": row["delta_ns"],
        "change": "-" if math.isnan(row["change"]) else percent(row["change"]),
        "interval": _interval_text(row),
        "significance": row["significance"].replace(noise.WITHIN_NOISE, "noise or too small"),
        "match": _WORDS_OF_MATCH.get(row.get("match", ""), row.get("clock", "")),
    }


def _interval_text(row: Row) -> str:
    """Write the interval of a change, relative to before; empty if unknown."""
    before_ns = row["before_ns"]
    if math.isnan(row["low_ns"]) or not before_ns:
        return ""
    return f"{percent(row['low_ns'] / before_ns)} to {percent(row['high_ns'] / before_ns)}"


def _shown_name(row: Row) -> str:
    """Name a row (a cause of idle time, a time of the whole, a kernel, a range) on one line, safe for a terminal."""
    if "cause" in row:
        return CAUSES[row["cause"]].plain_name
    name = _NAME_OF_FIGURE.get(row["name"], plain(row["name"]))
    if "category" in row:
        name = short_name(name)
    return name
