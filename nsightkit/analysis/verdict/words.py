"""The sentences of a verdict: what, how much and where, and what speaks against it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from nsightkit.analysis.core.text import bytes_text, share_text, short_name, time_text
from nsightkit.analysis.replay.whatif import CHANGES, UNKNOWN, plain
from nsightkit.analysis.timeline import memops
from nsightkit.analysis.verdict.account import CODE, ENDS, IDLE
from nsightkit.analysis.verdict.finding import Finding
from nsightkit.analysis.verdict.rules import LOST, rate

__all__ = ["against", "evidence"]

#: How many names, devices and kinds of copies sentences speak of.
_NAMED, _DEVICES, _COPIES = 3, 10, 2
#: Names and moments that hold less than this of an answer's time say nothing.
_LITTLE = 0.01
_KIND = {
    "op": "operator ",
    "os_call": "OS call ",
    "call": "call ",
    "range": "range ",
    "overhead": "recorded as overhead: ",
    "sample": "CPU samples, mostly of ",
}
#: What one of an answer's moments is called, and several.
_MOMENTS = {
    "kernel": ("kernel", "kernels"),
    "copy": ("copy", "copies"),
    "graph": ("replay", "replays"),
    "none": ("time", "times"),
}
#: What a cause that names nothing means.
_NAMELESS = {
    "unknown": "time for which nothing recorded says why (unknown)",
    "queued": "work that was launched and waited for something that is not in the trace (queued)",
}
_FILLED = {
    "compute-bound": "Kernels bound by arithmetic fill",
    "memory-bound": "Kernels bound by the memory fill",
    "not-enough-data": "Kernels and graph replays of which nothing says what bounds them fill",
    "communication": "Collectives that no other kernel runs beside take",
    "imbalance": "Waiting for the last device takes",
    "memory-transfer": "Copies that no kernel runs beside fill",
}


def _count(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"


def _called(name: str, most: int = 100) -> str:
    """A name as a sentence can hold it; the machine formats have it whole, under ``named`` and ``longest``."""
    text = short_name(name)
    return text if len(text) <= most else f"{text[: most - 1]}…"


# ---------------------------------------------------------------- what speaks for it


def evidence(finding: Finding) -> Iterator[str]:
    """What speaks for the answer.

    Parameters
    ----------
    finding : Finding
    """
    yield from _amounts(finding)
    yield from _prediction(finding)
    yield from _names(finding)
    moments = _longest(finding)
    if moments:
        yield f"Longest: {'; '.join(moments)}"
    if finding.name == "memory-transfer":
        yield from _copied(finding)
    if finding.name == "imbalance":
        yield from _late_devices(finding)
    if finding.name == "memory-bound" and finding.account.decodes:
        yield "The server decodes few sequences at once: each product reads its weights for a few rows"
    reached = rate(finding.operators)
    if reached is not None:
        yield f"Operators with known shapes run at {share_text(reached)} of the datasheet's rate"


def _amounts(finding: Finding) -> Iterator[str]:
    account = finding.account
    idle_ns = int(account.total[list(IDLE)].sum() - account.exposed_copies_ns)
    idle = f"The GPU was idle for {share_text(idle_ns / max(account.span_ns, 1))} of {finding.whole}"
    times = f"{time_text(finding.time_ns)} of {time_text(account.span_ns)}"
    share = f"{share_text(finding.share)} of {finding.whole} ({times})"
    if finding.is_idle and finding.name != "memory-transfer":
        count = int((account.cause == CODE[finding.name]).sum())
        name = _NAMELESS.get(finding.name, finding.name)
        yield f"{idle}; {name} takes {share} in {_count(count, 'gap', 'gaps')}"
        return
    text = f"{_FILLED[finding.name]} {share}"
    waited_ns = finding.time_ns - account.exposed_copies_ns
    if finding.name == "memory-transfer" and waited_ns:
        text += f", {time_text(waited_ns)} of it waiting for copies"
    yield text
    if finding.decision.change is None:
        yield idle


def _prediction(finding: Finding) -> Iterator[str]:
    """What the replay says of the change that decided or, where none gains enough, of the best one."""
    decision, played = finding.decision, finding.played
    if played.refused is not None:
        return
    if decision.change is None:
        best = "no faster"
        for row in reversed(finding.changes):
            if row["speedup"] and played.saved(row["change"]) >= _LITTLE:
                best = f"at most {row['speedup']:.2f}x as fast ({row['change']})"
        yield f"Replay with each change: the run gets {best}"
        return
    row = played.row(decision.change)
    change = f"{decision.change} ({CHANGES[decision.change].partition(';')[0]})"
    if row["speedup"] is None:
        yield f"Replay with {change}: {UNKNOWN}"
        return
    times = f"{time_text(row['predicted_ns'])} instead of {time_text(row['wall_ns'])}"
    yield f"Replay with {change}: {times}, {row['speedup']:.2f}x as fast"
    if decision.gaining is not None:
        some, every = decision.gaining
        doubted = any("steps would gain" in doubt for doubt in decision.doubts)
        if 2 * some > every and not doubted:
            yield f"{some:,} of {every:,} steps gain from that"


def _names(finding: Finding) -> Iterator[str]:
    """The names behind it."""
    gains = {row["change"]: row["speedup"] for row in finding.changes}
    for row in finding.named.head(_NAMED).to_dict("records"):
        if not row["name"] or row["total_ns"] <= _LITTLE * finding.time_ns:
            continue
        moment = ("gap", "gaps")
        if not finding.is_idle or row["kind"] == "copy":
            moment = _MOMENTS[row["kind"]]
        text = f"{time_text(row['total_ns'])} in {_count(row['count'], *moment)}: "
        if row["kind"] == "range" and finding.is_step(row["name"]):
            text += f"nothing but the step's own range, {_called(row['name'])}, says what the thread did there"
        else:
            text += _KIND.get(row["kind"], "") + _called(row["name"])
            if row["inside"]:
                text += f", mostly inside {_called(row['inside'])}"
        gain = gains.get(f"no-cpu-work:{plain(row['name'])}")
        if gain:
            text += f"; without it {gain:.2f}x"
        yield text


def _longest(finding: Finding) -> list[str]:
    texts = []
    for row in finding.longest.to_dict("records"):
        lasting = row["end_ns"] - row["start_ns"]
        if lasting <= _LITTLE * finding.time_ns:
            continue
        text = f"{time_text(lasting)} at {row['start_ns'] / 1e6:,.3f} ms"
        if len(finding.account.devices) > 1:
            text += f" on device {row['device']}"
        if row["ended_by"]:
            text += f", before {_called(row['ended_by'], 40)}"
        texts.append(text)
    return texts


def _copied(finding: Finding) -> Iterator[str]:
    """What was copied in all, overlapped or not."""
    rows = memops.summary(finding.account.trace)
    lasting = rows["total_ns"] > _LITTLE * rows["total_ns"].sum()
    for row in rows[(rows["kind"] != "memset") & lasting].head(_COPIES).to_dict("records"):
        text = (
            f"In all {_count(row['count'], 'copy', 'copies')} {row['kind']}, {row['src_kind']} to {row['dst_kind']}: "
        )
        if not pd.isna(row["bytes"]):
            text += f"{bytes_text(row['bytes'])} in "
        text += time_text(row["total_ns"])
        if np.isfinite(row["gb_per_s"]):
            text += f" at {row['gb_per_s']:.1f} GB/s"
        yield text


def _late_devices(finding: Finding) -> Iterator[str]:
    """What each device waited for, and had nothing to do."""
    account = finding.account
    totals = account.amounts.sum(axis=0)
    for number, device in enumerate(account.devices[:_DEVICES]):
        waited_ns, ends_ns = int(totals[number, CODE["imbalance"]]), int(totals[number, ENDS])
        parts = []
        if account.collectives.matched:
            waited = f"waited {time_text(waited_ns)} in collectives" if waited_ns else "did not wait in collectives"
            last = account.collectives.last(device)
            parts += [waited, f"arrived last in {last:,} of {account.collectives.matched:,}"]
        if ends_ns:
            parts.append(f"had nothing to do for {time_text(ends_ns)} at the ends")
        if parts:
            yield f"Device {device} {' and '.join(parts)}"


# ---------------------------------------------------------------- what speaks against it


def against(finding: Finding) -> Iterator[str]:
    """Doubts first, then remarks.

    Parameters
    ----------
    finding : Finding
    """
    account = finding.account
    yield from finding.decision.doubts
    if finding.name in ("communication", "imbalance"):
        others = sum(int(account.total[CODE[name]]) for name in ("compute-bound", "memory-bound", "not-enough-data"))
        yield f"other kernels run for {share_text(others / max(account.span_ns, 1))} of {finding.whole}"
    if len(account.devices) > 1:
        busy = account.spans.loc[account.devices, "busy_ns"] / max(account.wall_ns, 1)
        if busy.max() - busy.min() > LOST:
            shares = [f"device {device} {share_text(share)}" for device, share in busy.head(_DEVICES).items()]
            yield f"the devices were not equally busy: {', '.join(shares)} of the wall time"
    if len(finding.operators) and finding.operators["impossible"].any():
        operators = _count(int(finding.operators["impossible"].sum()), "operator seems", "operators seem")
        yield f"{operators} quicker than physics allows and count for nothing here (nsightkit sol)"
    inferred = finding.played.schedule.inferred
    if finding.changes and inferred:
        yield f"the prediction rests on {_count(inferred, 'wait', 'waits')} that the trace does not name"
    if finding.is_idle and not account.trace.recorded("calls"):
        yield "the trace does not say which calls launched the GPU's work"
    yield from account.trace.meta.notes
