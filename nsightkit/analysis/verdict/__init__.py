"""The verdict: the bottleneck of a run, the confidence in it, and the first change to make.

The recorded run is replayed with each change that takes away what one cause names
(:mod:`nsightkit.analysis.replay.whatif`), and the cause whose removal gains most is the bottleneck. Where no change
gains 5%, what fills the time is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nsightkit import hardware
from nsightkit.analysis.core.causes import CAUSES
from nsightkit.analysis.replay import whatif
from nsightkit.analysis.replay.whatif import WhatIf
from nsightkit.analysis.timeline import overview
from nsightkit.analysis.verdict import account, advice, finding
from nsightkit.analysis.verdict.account import BOTTLENECKS, LOSSES, WORK, Account
from nsightkit.analysis.verdict.rules import decide
from nsightkit.text import count_text, time_text
from nsightkit.trace.model import GPU_TABLES, Trace

__all__ = ["BOTTLENECKS", "summary"]

#: With fewer GPU operations there is too little to judge.
_FEW_OPERATIONS = 50


def summary(trace: Trace, gpu: str | None = None) -> dict[str, Any]:
    """Name the bottleneck of a run, with the evidence, the doubts, and what to change.

    Parameters
    ----------
    trace : Trace
    gpu : str, optional
        Name of the card, where shapes are known and the trace does not name it.

    Returns
    -------
    dict
        ``bottleneck``
            One of ``BOTTLENECKS``.
        ``share_of_span``
            What it takes of the devices' time in the steps or, without steps, of the sum of their spans; None where the
            trace holds no GPU work, or too little to judge by.
        ``confidence``
            ``high``, ``medium`` or ``low``. Doubts stand first in ``against``.
        ``evidence``, ``against``, ``next_steps``
            Sentences. Times in them are on the trace's clock.
        ``changes``
            What :func:`nsightkit.analysis.replay.whatif.rows` predicts of the changes that gain anything, the
            largest gain first; empty where nothing can be predicted.
        ``ties``
            Causes whose change is predicted to gain about as much.
        ``headline``
            The answer in one sentence, with its share or, where its removal gains more, with that gain.
        ``replay_error``
            How far the unchanged replay is off, as a share; None without a replay.
        ``total_ns``, ``span_ns``, ``t0_ns``
            The bottleneck's time, what the share is of, and what to add to a time to find it in the source.
        ``candidates``, ``busy``
            Lists of ``bottleneck, total_ns, share_of_span``: what time was lost to (exposed collectives count), and
            what filled the rest.
        ``named``
            Calls, ranges, operators or kernels behind it: ``kind, name, count, total_ns``, and the operator or range
            that most of that time was launched ``inside``.
        ``longest``
            Its longest moments: ``device, start_ns, end_ns, kind, name``.

    Raises
    ------
    UsageError
        No card of the name in `gpu` is listed.
    """
    if gpu is not None:
        hardware.find(gpu)  # refuses an unknown card
    answer: dict[str, Any] = {
        "bottleneck": "not-enough-data",
        "share_of_span": None,
        "confidence": "low",
        "ties": [],
        "evidence": [],
        "against": list(trace.meta.notes),
        "next_steps": [],
        "changes": [],
        "headline": CAUSES["not-enough-data"].sentence,
        "replay_error": None,
        "total_ns": None,
        "span_ns": None,
        "t0_ns": trace.t0_ns,
        "candidates": [],
        "busy": [],
        "named": [],
        "longest": [],
    }
    count = sum(trace.size(table) for table in GPU_TABLES)
    # Without GPU work, or with none that takes time, there is nothing to judge.
    if not sum(trace.table(table, ["duration_ns"])["duration_ns"].sum() for table in GPU_TABLES):
        left_out = overview.warning_without_gpu_work(trace)
        answer["evidence"] = [left_out or "no work of a GPU was recorded", *_operators_without_cuda(trace)]
        answer["next_steps"] = [f"capture while the GPU works on a step: {advice.again(trace)}"]
        if left_out:
            answer["next_steps"] = ["leave out the filters, or widen them"]
        return answer
    judged = _judged(trace, account.make_account(trace, gpu))
    if count < _FEW_OPERATIONS and judged["bottleneck"] != "not-enough-data":
        # Take the answer back, but keep what was found as evidence and as a doubt.
        holds = f"the trace holds {count_text(count, 'GPU operation')}"
        doubt = f"{holds}, too few to judge a program by; by these alone, the answer would be {judged['bottleneck']}"
        for key in ("bottleneck", "headline", "share_of_span", "total_ns", "confidence", "ties"):
            judged[key] = answer[key]
        judged["against"].insert(0, doubt)
        judged["next_steps"] = [f"capture several steps after the warm-up: {advice.again(trace)}"]
    return answer | judged


def _operators_without_cuda(trace: Trace) -> Iterator[str]:
    """Explain in a sentence why a capture has PyTorch operators but no CUDA call; nothing for other captures."""
    operators = trace.table("ops", ["name", "duration_ns"])
    if trace.whole.size("calls") or operators.empty:
        return
    times = operators.groupby("name", observed=True)["duration_ns"].sum()
    longest = f"{times.idxmax()}, {time_text(int(times.max()))} in all"
    yield (
        f"PyTorch's operators called no CUDA (longest: {longest}): check that model and data are on the GPU, and that "
        "the profiler records CUDA"
    )


def _judged(trace: Trace, amounts: Account) -> dict[str, Any]:
    """Decide on the bottleneck, and write the answer: the keys of :func:`summary` except ``t0_ns``."""
    replay = WhatIf(trace)
    decision = decide(amounts, replay)
    changes = [] if replay.refused else [replay.row(change) for change in whatif.gaining(replay)]
    judged = finding.find(amounts, replay, decision, changes)
    return {
        "bottleneck": decision.name,
        "share_of_span": judged.share,
        "confidence": decision.level,
        "ties": list(decision.ties),
        "evidence": list(finding.evidence(judged)),
        "against": list(finding.against(judged)),
        "next_steps": list(advice.next_steps(judged)),
        "changes": changes,
        "headline": finding.headline(judged),
        "replay_error": replay.error,
        "total_ns": judged.time_ns,
        "span_ns": amounts.span_ns,
        "candidates": amounts.ranked(LOSSES),
        "busy": amounts.ranked(WORK),
        "named": judged.named.to_dict("records"),
        "longest": judged.longest.to_dict("records"),
    }
