"""The rule of the verdict: the bottleneck is the cause whose removal gains most in the replay."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import pandas as pd

from nsightkit.analysis.core.causes import CAUSES
from nsightkit.analysis.replay.whatif import WhatIf
from nsightkit.analysis.roofline import sol
from nsightkit.analysis.verdict.account import FEW_STEPS, IDLE, LAYERS, LOSSES, WORK, Account
from nsightkit.errors import UsageError
from nsightkit.text import count_text, share_text

#: The change of the replay that removes what each cause names.
CHANGE_OF = {slug: cause.change for slug, cause in CAUSES.items() if cause.change is not None}
#: Causes of idle time that no change removes.
_UNEXPLAINED = ("queued", "unknown")
#: Answers for time in which the GPUs work.
_FILLS = (*WORK, "communication", "imbalance", "memory-transfer")
#: A cause that takes a smaller share of the time, or whose removal gains less, cannot be the bottleneck.
LEAST_SHARE = 0.05
#: Where the GPUs work for at least this share of the time and no change gains enough, that work is the answer.
_FULL_SHARE = 0.8
#: Gains of at least this part of the largest gain tie with it.
_TIED_PART = 0.9
#: The answer is in doubt if unexplained idle time takes more than this part of what the answer gains.
_DOUBTFUL_PART = 0.5
#: A gain below `LEAST_SHARE` times this is so close to the limit that the answer is in doubt.
_NEAR_FACTOR = 1.25
#: Work that one of these bounds reaches a good part of its rate; below this part, something else may limit it.
_BOUNDS = ("compute-bound", "memory-bound")
_SLOW_RATE = 0.25
#: A replay that is off by more than this is worth a doubt, though it predicts.
_DOUBTFUL_ERROR = 0.02
#: A step is concerned if it saves this part of the average step's saving; a part of the run, if it loses likewise.
_CONCERNED_PART = 0.5
#: If fewer parts of the run than this are concerned, the answer is in doubt; if fewer than half, more so.
_MOST_PARTS = 0.75

#: A sentence on why the answer may be wrong, and its weight. Any doubt makes the confidence medium, even of weight 0;
#: weights of 2 or more in sum make it low.
_Doubt = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class Decision:
    """The bottleneck by the rule, and why it may be wrong.

    Attributes
    ----------
    name : str
        One of :data:`nsightkit.analysis.verdict.account.BOTTLENECKS`.
    change : str or None
        The change whose gain decided.
    gain : float
        Share of the wall time that it saves; 0 where nothing was predicted.
    ties : tuple of str
        Other causes whose removal gains about as much.
    doubts : tuple of str
        Sentences on why the answer may be wrong.
    level : {"high", "medium", "low"}
        The confidence.
    """

    name: str
    change: str | None = None
    gain: float = 0.0
    ties: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    level: str = "high"


def decide(account: Account, replay: WhatIf) -> Decision:
    """Name the bottleneck, and how sure that is.

    Parameters
    ----------
    account : Account
        Where the time went.
    replay : WhatIf
        What changes would gain; it may refuse to predict.

    Returns
    -------
    Decision
    """
    decision = _by_shares(account) if replay.refused is not None else _by_gains(account, replay)
    doubts = [
        *_doubts_about_replay(replay),
        *_doubts_about_lost_time(account, replay, decision),
        *_doubts_about_answer(account, decision),
    ]
    weight = sum(weight for _, weight in doubts)
    if decision.ties:
        weight += 1  # a doubt, too; it is said beside the confidence instead
    level = "high"
    # Three answers are never certain: they say that a reason, or what bounds the kernels, was not recorded.
    if doubts or decision.ties or decision.name == "queued":
        level = "medium"
    if weight > 1 or decision.name in ("unknown", "not-enough-data"):
        level = "low"
    return dataclasses.replace(decision, doubts=tuple(text for text, _ in doubts), level=level)


def _by_gains(account: Account, replay: WhatIf) -> Decision:
    """With a replay: the cause whose removal gains most; else unexplained idle time, or what fills the time."""
    gains = {name: replay.saved(change) for name, change in CHANGE_OF.items() if account.total_ns[name] > 0}
    if "communication" in gains:
        # The replay also hides the waits for the last device (imbalance), which overlapping does not end: cap the gain.
        gains["communication"] = min(gains["communication"], account.share("communication"))
    best = max(gains.values(), default=0.0)
    unexplained = _largest(account, _UNEXPLAINED)
    share = account.share(unexplained)
    # Unexplained idle time wins where no change saves as much. But if no change saves enough, and the GPUs work nearly
    # all the time, that work is the answer.
    if share >= LEAST_SHARE and share > best and (best >= LEAST_SHARE or not _are_gpus_busy(account)):
        return Decision(unexplained)
    if best < LEAST_SHARE:
        return Decision(_largest(account, _FILLS))
    tied = [name for name, gain in gains.items() if gain >= _TIED_PART * best]
    name = _largest(account, tied)
    tied.remove(name)
    return Decision(name, change=CHANGE_OF[name], gain=gains[name], ties=tuple(tied))


def _by_shares(account: Account) -> Decision:
    """Without a replay: the answer that most time was lost to, if it is enough; else what fills the time."""
    largest = _largest(account, LOSSES)
    if account.share(largest) < LEAST_SHARE or (largest in _UNEXPLAINED and _are_gpus_busy(account)):
        return Decision(_largest(account, _FILLS))
    return Decision(largest)


def _largest(account: Account, names: tuple[str, ...] | list[str]) -> str:
    """Choose the answer that takes most time; of equal ones the first."""
    return max(names, key=lambda name: account.total_ns[name])


def _are_gpus_busy(account: Account) -> bool:
    """Whether the GPUs work for nearly all of the time (:data:`_FULL_SHARE`)."""
    return sum(account.total_ns[name] for name in _FILLS) >= _FULL_SHARE * account.span_ns


# ---------------------------------------------------------------- confidence


def _doubts_about_replay(replay: WhatIf) -> Iterator[_Doubt]:
    """Doubt predictions that are missing or rough."""
    if replay.refused is not None:
        yield f"nothing is predicted: {replay.refused}", 2
    elif replay.error is not None and replay.error > _DOUBTFUL_ERROR:
        yield f"the replay is {share_text(replay.error)} off the recording without any change", 1


def _doubts_about_lost_time(account: Account, replay: WhatIf, decision: Decision) -> Iterator[_Doubt]:
    """Doubt answers that concern few moments, and those beside which much time was lost to something else.

    Each doubt is a sentence and its weight: weights of 2 or more in sum make the confidence low.
    """
    if decision.name in LOSSES:
        yield from _doubts_about_repetition(account, replay, decision)
    if replay.refused is None and (decision.change is not None or decision.name in _UNEXPLAINED):
        # A cause decided. Another one may take more time.
        others = [name for name in CHANGE_OF if name not in decision.ties]
        largest = _largest(account, others)
        if account.total_ns[largest] > max(account.total_ns[decision.name], LEAST_SHARE * account.span_ns):
            yield f"{CAUSES[largest].noun} takes {share_text(account.share(largest))}, though removing it gains less", 1
    elif replay.refused is None:
        # What fills the time decided, as no single change gains enough. All causes together may have taken much. The
        # answer may be among them: the copies of memory-transfer fill time.
        lost_ns = sum(account.total_ns[name] for name in IDLE if name not in (decision.name, *_UNEXPLAINED))
        if lost_ns >= 2 * LEAST_SHARE * account.span_ns:
            weight = 1
            if lost_ns > account.total_ns[decision.name]:
                weight = 2
            share = lost_ns / account.span_ns
            yield f"{share_text(share)} of the time was lost, though no single change recovers it", weight
    unexplained = _largest(account, _UNEXPLAINED)
    share = account.share(unexplained)
    if (
        decision.name not in _UNEXPLAINED
        and share >= LEAST_SHARE
        and share > _DOUBTFUL_PART * max(decision.gain, LEAST_SHARE)
    ):
        yield f"{share_text(share)} of the time is idle for no recorded reason ({unexplained})", 1


def _doubts_about_answer(account: Account, decision: Decision) -> Iterator[_Doubt]:
    """Doubt the answer for reasons that depend on which one it is."""
    name = decision.name
    if name == "cpu-work" and _do_only_steps_name_work(account):
        yield "only the step's own range covers this time: the thread may have waited", 1
    if decision.change is not None and decision.gain < _NEAR_FACTOR * LEAST_SHARE:
        yield f"the change saves {share_text(decision.gain)}, close to the 5% threshold", 1
    profiler_share = account.share("profiler")
    if name != "profiler" and profiler_share >= LEAST_SHARE:
        yield f"the profiler itself took {share_text(profiler_share)} of the time and may distort the rest", 1
    # A server that decodes few sequences is memory-bound, even without shapes.
    if name in _BOUNDS and share_by_shape(account, name) < 0.5 and not account.decodes:
        yield "judged by kernel names, without shapes", 1
    reached = share_of_rate(bounded_operators(account, name))
    if reached is not None and reached < _SLOW_RATE:
        yield f"operators reach {share_text(reached)} of the datasheet's rate: something else may limit them", 1
    # The profiler spends time on each operator, Python function or OS call between launches.
    cpu_events = ("ops", "frames", "os_calls", "samples")
    if "launch-overhead" in (name, *decision.ties) and any(map(account.trace.whole.size, cpu_events)):
        yield "the profiler recorded the CPU too, which inflates launch overhead: time steps without it", 0


def _doubts_about_repetition(account: Account, replay: WhatIf, decision: Decision) -> Iterator[_Doubt]:
    """Doubt answers that few moments or few parts of the run lose time to."""
    lost_ns = account.total_ns[decision.name]
    if 2 * account.moments(decision.name)["duration_ns"].max() > lost_ns > 0:
        yield "seen once: one interval accounts for over half of it", 2
        return
    count = len(account.steps)
    if count and not account.parts_are_steps:
        yield f"the trace holds {count_text(count, 'step')}, so this may not repeat", 1
    if decision.change is not None and len(replay.playable.unchanged.step_durations_ns) >= FEW_STEPS:
        saved_ns = replay.playable.unchanged.step_durations_ns - replay.played(decision.change).step_durations_ns
        is_concerned = saved_ns >= _CONCERNED_PART * saved_ns.mean()
        text = f"only {int(is_concerned.sum()):,} of {len(is_concerned):,} steps would gain from the change"
    else:
        # Of the time of each part.
        share = account.by_part[decision.name] / account.by_part.sum(axis=1).clip(lower=1)
        is_concerned = (share >= _CONCERNED_PART * account.share(decision.name)).to_numpy()
        text = _losing_parts(account, is_concerned)
    if is_concerned.mean() < _MOST_PARTS:
        yield text, 2 if is_concerned.mean() < 0.5 else 1


def _do_only_steps_name_work(account: Account) -> bool:
    """Whether nothing but the range around a whole step names at least half of the CPU work."""
    work = account.moments("cpu-work")
    of_steps = work["name"].isin(account.steps["step"])
    return bool(2 * work.loc[of_steps, "duration_ns"].sum() >= work["duration_ns"].sum() > 0)


def _losing_parts(account: Account, is_losing: np.ndarray) -> str:
    """Say which parts of the run lose much time; `is_losing` flags them."""
    count = int(is_losing.sum())
    if account.parts_are_steps:
        return f"only {count:,} of {len(is_losing):,} steps lose much time to it"
    if is_losing[:count].all():  # the first parts, which are tenths of the time
        begin_ms = math.ceil(account.edges[count] / 1e6)
        return (
            f"only the first {10 * count}% of the time loses much to it, "
            f"perhaps set-up (--time {begin_ms}ms: leaves it out)"
        )
    return f"in {len(is_losing) - count} of ten equal parts of the time, little is lost to it"


# ---------------------------------------------------------------- how far from the bound


def bounded_operators(account: Account, name: str) -> pd.DataFrame:
    """List the operators that arithmetic or the memory bounds, whichever the answer `name` says.

    Rows are of :func:`nsightkit.analysis.roofline.sol.summary`: none for other answers, nor without shapes or a card.
    """
    if name not in _BOUNDS:
        return pd.DataFrame()
    try:
        table = sol.summary(account.trace, account.gpu)
    except UsageError:
        return pd.DataFrame()
    return table[table["bound"] == name.removesuffix("-bound")]


def share_of_rate(operators: pd.DataFrame) -> float | None:
    """The share of the datasheet's rate that :func:`bounded_operators` reach, weighted by time; None without any.

    Operators that seem faster than any card can be are left out (:func:`nsightkit.analysis.roofline.sol.judge`).
    """
    if operators.empty or operators["impossible"].all():
        return None
    possible = operators[~operators["impossible"]]
    return float(np.average(possible["sol_datasheet"], weights=possible["time_ns"]))


def share_by_shape(account: Account, name: str) -> float:
    """The share of the time of an answer's kernels whose layer was decided by the shapes of operators, not by names."""
    kernels = account.kernels[account.kernels["layer"] == LAYERS.index(name)]
    duration_ns = kernels["duration_ns"]
    return float(duration_ns[kernels["by_shape"]].sum() / max(duration_ns.sum(), 1))
