"""What changed, in words: sentences, and rows of tables as people read them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pandas as pd

from nsightkit.analysis.compare.samples import Samples
from nsightkit.analysis.core import noise
from nsightkit.analysis.core.text import share_text, short_name, time_text
from nsightkit.safe import Json, plain

__all__ = ["described", "percent", "sections", "sentences"]

Row = Json

_FIGURES = {"wall_ns": "wall", "busy_ns": "GPU busy", "idle_ns": "GPU idle"}
#: From this ratio on, a change is written as a multiple.
_MULTIPLE = 10
#: One of two captures did more work if kernels with most of the shared time ran more often in it, by more than this.
_MORE_OFTEN = 1.05
_MOST = 0.75
#: Graphs of unknown content that take this part of the busy time are worth a warning.
_IN_GRAPHS = 0.05


def percent(share: float) -> str:
    """Write a change.

    Parameters
    ----------
    share : float
        Of what was before; -0.5 is half of it gone. From ten times on it is written as a multiple.

    Examples
    --------
    >>> percent(-0.5), percent(8.99), percent(1180.9)
    ('-50.0%', '+899.0%', '1,181.9x')
    """
    if share < _MULTIPLE - 1:
        return f"{100 * share:+.1f}%"
    return f"{1 + share:,.1f}x"


# ---------------------------------------------------------------- sentences


def described(captures: Sequence[Samples]) -> Json:
    """Facts about one side.

    Parameters
    ----------
    captures : sequence of Samples
        The first is described; the steps of all are counted.
    """
    first = captures[0]
    facts: Json = {"gpus": sorted({gpu.name for gpu in first.trace.meta.gpus if gpu.name})}
    facts["captures"] = len(captures)
    facts["steps"] = sum(len(capture.windows) for capture in captures)
    return facts | first.overview


def sentences(facts: Row, kernels: pd.DataFrame, verdicts: Sequence[Row]) -> Json:
    """Write what changed.

    Parameters
    ----------
    facts : mapping
        ``before`` and ``after`` (:func:`described`), ``figures``, ``changes``, ``unit``.
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
    warnings = list(_about_sides(facts["before"], facts["after"]))
    if facts["unit"] == "trace":
        warnings.append(
            "Whole captures are compared, because one has no steps. That does not tell a change from noise; --match "
            "names the ranges that are steps."
        )
        more = _other_work(kernels)
        if more:
            headline = f"{headline.removesuffix('.')}; the captures hold different amounts of work."
            warnings.append(more)
    warnings += _other_kernels(kernels)
    was, now = (answer["bottleneck"] for answer in verdicts)
    moved, text = _moved(facts, was, now)
    shares = [share_text(answer["share_of_span"] or 0) for answer in verdicts]
    text += f": {was} ({shares[0]} of the time) before, {now} ({shares[1]} of the time) after."
    return {
        "headline": headline,
        "outcome": outcome,
        "moved": moved,
        "bottleneck": {"before": was, "after": now, "text": text},
        "warnings": warnings,
    }


def _outcome(facts: Row) -> tuple[str, str]:
    """Answer in one word and in one sentence whether the time changed."""
    if not facts["figures"] or not facts["figures"][0]["before_ns"]:
        return "inconclusive", "Nothing to compare: one of the captures holds neither steps nor GPU work."
    row = facts["figures"][0]
    subject = "the step time"
    basis = f"{facts['before']['steps']} and {facts['after']['steps']} steps"
    if facts["unit"] == "trace":
        subject = "the time from the first GPU operation to the last"
        basis = "whole captures"
    if _interval(row):
        basis = f"95% interval {_interval(row)}, {basis}"
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


def _moved(facts: Row, was: str, now: str) -> tuple[bool | None, str]:
    """Answer whether the bottleneck moved, with the beginning of a sentence."""
    if "not-enough-data" in (was, now):
        return None, "Whether the bottleneck moved is unknown"
    if was == now:
        return False, "The bottleneck did not move"
    words = set()
    for row in facts["changes"]:
        # The verdicts rest on these: without a change here, they differ by noise.
        if row["table"] == "figures" or row.get("cause") in (was, now):
            words.add(row["significance"])
    if noise.CHANGED in words:
        return True, "The bottleneck moved"
    if words:
        return None, "Whether the bottleneck moved is inconclusive"
    return False, "The verdicts differ by no more than noise"


# ---------------------------------------------------------------- warnings


def _about_sides(before: Row, after: Row) -> Iterator[str]:
    """Name what differs besides the program."""
    gpus = ", ".join(before["gpus"]), ", ".join(after["gpus"])
    tools = before["tool"], after["tool"]
    for what, (was, now) in (("GPUs", gpus), ("profilers", tools)):
        if was and now and was != now:
            yield f"Different {what}: {was} before, {now} after."
    for name, side, other in (("before", before, after), ("after", after, before)):
        lacking = ", ".join(table for table in side["missing"] if table not in other["missing"])
        if lacking:
            yield f"The capture {name} did not record {lacking}; these are not compared."
        graphs_ns = side["graph_ns"] or 0
        if graphs_ns > _IN_GRAPHS * (side["busy_ns"] or 0) and not other["graph_ns"]:
            yield (
                f"The capture {name} holds {time_text(graphs_ns)} of CUDA graphs without their kernels: what seems "
                "to be missing there may run in them. Compare the busy time, or record with --cuda-graph-trace=node."
            )


def _other_work(kernels: pd.DataFrame) -> str:
    """Warn that one of two captures did more work; a library that chose other kernels does not count."""
    shared = kernels[(kernels["before_count"] > 0) & (kernels["after_count"] > 0)]
    times = shared["after_count"] / shared["before_count"]
    more_ns = shared["before_total_ns"][times > _MORE_OFTEN].sum()
    less_ns = shared["before_total_ns"][times < 1 / _MORE_OFTEN].sum()
    if max(more_ns, less_ns, 1) < _MOST * shared["before_total_ns"].sum():
        return ""
    return (
        "The captures hold different amounts of work, so their times do not compare: the kernels of both were "
        f"launched {shared['before_count'].sum():,} times before and {shared['after_count'].sum():,} times after."
    )


def _other_kernels(kernels: pd.DataFrame) -> Iterator[str]:
    """Warn of kernels of one kind that took each other's place."""
    is_exchanged = (kernels["significance"] == noise.CHANGED) & (kernels["before_count"] != kernels["after_count"])
    for category, delta in kernels[is_exchanged].groupby("category", sort=False)["delta_ns"]:
        alike = kernels[kernels["category"] == category]
        was = int(alike["before_ns"].sum())
        now = int(alike["after_ns"].sum())
        if delta.min() < 0 < delta.max() and abs(now - was) < delta.abs().max() / 2:
            yield f"A library chose other {category} kernels: {time_text(was)} before, {time_text(now)} after in all."


# ---------------------------------------------------------------- tables


def sections(comparison: Row, top: int) -> Iterator[tuple[str, list[Json], int]]:
    """Choose the rows to show.

    Parameters
    ----------
    comparison : mapping
        What :func:`nsightkit.analysis.compare.diff.Comparison.summary` gives.
    top : int
        Rows of each table.

    Yields
    ------
    tuple
        A title, rows, and how many there are in all.
    """
    tables = {f"per {comparison['unit']}": comparison["figures"], "GPU idle, by cause": comparison["gaps"]}
    for table in ("kernels", "ranges"):
        tables[table.capitalize()] = [row for row in comparison["changes"] if row["table"] == table]
    for title, rows in tables.items():
        large = [row for row in rows if max(row["before_ns"], row["after_ns"]) >= comparison["least_ns"]]
        yield title, [_shown(row) for row in large[:top]], len(large)


def _shown(row: Row) -> Json:
    """Choose and name the columns of a row."""
    return {
        "name": _name(row),
        "before_ns": row["before_ns"],
        "after_ns": row["after_ns"],
        "delta_ns": row["delta_ns"],
        "change": "-" if math.isnan(row["change"]) else percent(row["change"]),
        "interval": _interval(row),
        "significance": row["significance"],
    }


def _interval(row: Row) -> str:
    """The interval of a change, relative to before; empty if unknown."""
    was = row["before_ns"]
    if math.isnan(row["low_ns"]) or not was:
        return ""
    return f"{percent(row['low_ns'] / was)} to {percent(row['high_ns'] / was)}"


def _name(row: Row) -> str:
    """Name a row for people, on one line and safe for a terminal."""
    name = row.get("cause") or row["name"]
    name = _FIGURES.get(name, plain(name))
    if "category" in row:
        name = short_name(name)
    if "clock" in row:
        name += f" ({row['clock']})"
    if row.get("match", "name") != "name":
        name += f" ({row['match']})"
    return name
