"""The rule of the verdict: a cause weighs what the replay says its removal gains."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pandas as pd

from nsightkit.analysis.core.causes import CAUSES
from nsightkit.analysis.core.text import count_text, share_text
from nsightkit.analysis.replay.whatif import WhatIf
from nsightkit.analysis.roofline import sol
from nsightkit.analysis.verdict.account import FEW_STEPS, IDLE, LAYERS, LOSSES, WORK, Account
from nsightkit.errors import UsageError

#: The change that takes away what each cause names.
CHANGE_OF = {slug: cause.change for slug, cause in CAUSES.items() if cause.change is not None}
#: Causes without a change.
_UNEXPLAINED = ("queued", "unknown")
#: What can fill the time.
_FILLS = (*WORK, "communication", "imbalance", "memory-transfer")
#: What holds or gains less than this does not hold a run back.
LEAST = 0.05
#: Where the GPUs work for this part of the time and no change gains, that work is the answer.
_FULL = 0.8
#: Gains within this part of the largest tie with it.
_TIE = 0.9
#: Time without explanation beside the gain, from which the answer is in doubt.
_DOUBT = 0.5
#: Within this factor of the limit, the rule itself is in doubt.
_NEAR = 1.25
#: What one of these bounds reaches a good part of its rate; below this, something else holds it.
_BOUNDS = ("compute-bound", "memory-bound")
_SLOW = 0.25
#: A replay that is off by more than this is worth a doubt, though it predicts.
_ROUGH = 0.02
#: A step gains from a change if it saves this part of the average; a part of the run loses likewise.
_PART = 0.5
#: What fewer parts of the run than this have is in doubt, and what fewer than half of them have more so.
_MOST = 0.75

#: Why an answer may be wrong, and its weight: doubts of weight 2 together make its confidence low, any makes it medium.
_Doubt = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class Decision:
    """What the rule says, and why it may be wrong.

    Attributes
    ----------
    name : str
        One of :data:`nsightkit.analysis.verdict.account.BOTTLENECKS`.
    change : str or None
        The change whose gain decided.
    gain : float
        Share of the wall time that it saves; 0 where nothing was predicted.
    ties : tuple of str
        Answers that weigh as much.
    doubts : tuple of str
        Sentences.
    level : {"high", "medium", "low"}
    """

    name: str
    change: str | None = None
    gain: float = 0.0
    ties: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    level: str = "high"


def decide(account: Account, replay: WhatIf) -> Decision:
    """Name the bottleneck.

    Parameters
    ----------
    account : Account
    replay : WhatIf

    Returns
    -------
    Decision
    """
    decision = _by_shares(account) if replay.refused is not None else _by_gains(account, replay)
    doubts = [*_of_replay(replay, decision), *_of_moments(account, replay, decision), *_of_kind(account, decision)]
    level = "high"
    if doubts or decision.name == "queued":
        level = "medium"
    if sum(weight for _, weight in doubts) > 1 or decision.name in ("unknown", "not-enough-data"):
        level = "low"
    return dataclasses.replace(decision, doubts=tuple(text for text, _ in doubts), level=level)


def _by_gains(account: Account, replay: WhatIf) -> Decision:
    gains = {name: replay.saved(change) for name, change in CHANGE_OF.items() if account.total_ns[name] > 0}
    if "communication" in gains:  # beside other kernels collectives would still wait for the last device
        gains["communication"] = min(gains["communication"], account.share("communication"))
    best = max(gains.values(), default=0.0)
    unexplained = _largest(account, _UNEXPLAINED)
    share = account.share(unexplained)
    if share >= LEAST and share > best and (best >= LEAST or not _is_full(account)):
        return Decision(unexplained)
    if best < LEAST:
        return Decision(_largest(account, _FILLS))
    tied = [name for name, gain in gains.items() if gain >= _TIE * best]
    name = _largest(account, tied)
    tied.remove(name)
    return Decision(name, CHANGE_OF[name], gains[name], tuple(tied))


def _by_shares(account: Account) -> Decision:
    """Without a replay: the largest loss, if it is worth the name."""
    largest = _largest(account, LOSSES)
    if account.share(largest) < LEAST or (largest in _UNEXPLAINED and _is_full(account)):
        return Decision(_largest(account, _FILLS))
    return Decision(largest)


def _largest(account: Account, names: tuple[str, ...] | list[str]) -> str:
    return max(names, key=lambda name: account.total_ns[name])


def _is_full(account: Account) -> bool:
    """Whether the GPUs are at work for nearly all of the time."""
    return sum(account.total_ns[name] for name in _FILLS) >= _FULL * account.span_ns


# ---------------------------------------------------------------- confidence


def _of_replay(replay: WhatIf, decision: Decision) -> Iterator[_Doubt]:
    """Doubts about the predictions."""
    if replay.refused is not None:
        yield f"nothing is predicted: {replay.refused}", 2
    elif replay.error is not None and replay.error > _ROUGH:
        yield f"replaying the unchanged trace is {share_text(replay.error)} off the recording", 1
    if decision.ties:
        others = " or ".join(CAUSES[name].noun for name in decision.ties)
        yield f"removing {others} would help about as much", 1


def _of_moments(account: Account, replay: WhatIf, decision: Decision) -> Iterator[_Doubt]:
    """Doubts about when time was lost, and time that was lost to something else."""
    if decision.name in LOSSES:
        yield from _seldom(account, replay, decision)
    if decision.change is not None:
        others = [name for name in CHANGE_OF if name not in decision.ties]
        largest = _largest(account, others)
        if account.total_ns[largest] > max(account.total_ns[decision.name], LEAST * account.span_ns):
            yield f"{CAUSES[largest].noun} takes {share_text(account.share(largest))}, though removing it gains less", 1
    elif replay.refused is None and decision.name not in _UNEXPLAINED:
        lost_ns = sum(account.total_ns[name] for name in IDLE if name not in (decision.name, *_UNEXPLAINED))
        if lost_ns >= 2 * LEAST * account.span_ns:
            weight = 1
            if lost_ns > account.total_ns[decision.name]:
                weight = 2
            share = lost_ns / account.span_ns
            yield f"{share_text(share)} of the time was lost, though no single change recovers it", weight
    unexplained = _largest(account, _UNEXPLAINED)
    share = account.share(unexplained)
    if decision.name not in _UNEXPLAINED and share >= LEAST and share > _DOUBT * max(decision.gain, LEAST):
        yield f"{share_text(share)} of the time is idle for no recorded reason ({unexplained})", 1


def _of_kind(account: Account, decision: Decision) -> Iterator[_Doubt]:
    """Doubts that one kind of answer has."""
    name = decision.name
    if name == "cpu-work" and _only_steps_name_it(account):
        yield "only the step's own range covers this time: the thread may have waited", 1
    if decision.change is not None and decision.gain < _NEAR * LEAST:
        yield f"the change saves {share_text(decision.gain)}, close to the 5% threshold", 1
    profiled = account.share("profiler")
    if name != "profiler" and profiled >= LEAST:
        yield f"the profiler itself took {share_text(profiled)} of the time and may distort the rest", 1
    if name in _BOUNDS and by_shape(account, name) < 0.5 and not account.decodes:
        yield "judged by kernel names, without shapes", 1
    reached = rate(bounded(account, name))
    if reached is not None and reached < _SLOW:
        yield f"operators reach {share_text(reached)} of the datasheet's rate: something else may limit them", 1
    if name == "launch-overhead":
        # The profiler spent time on each operator, Python function or OS call between launches.
        whole = account.trace.whole
        if any(whole.size(table) for table in ("ops", "frames", "os_calls", "samples")):
            yield "the profiler recorded the CPU too, which inflates launch overhead: time steps without it", 0


def _seldom(account: Account, replay: WhatIf, decision: Decision) -> Iterator[_Doubt]:
    """Doubts where few moments or few parts of the run lose time to the answer."""
    lost_ns = account.total_ns[decision.name]
    if 2 * account.moments(decision.name)["duration_ns"].max() > lost_ns > 0:
        yield "seen once: one interval accounts for over half of it", 2
        return
    count = len(account.steps)
    if count and not account.are_steps:
        yield f"the trace holds {count_text(count, 'step')}, so this may not repeat", 1
    if decision.change is not None and len(replay.playable.unchanged.step_durations_ns) >= FEW_STEPS:
        saved = replay.playable.unchanged.step_durations_ns - replay.played(decision.change).step_durations_ns
        concerned = saved >= _PART * saved.mean()
        text = f"only {int(concerned.sum()):,} of {len(concerned):,} steps would gain from the change"
    else:
        share = account.by_part[decision.name] / account.by_part.sum(axis=1).clip(lower=1)
        concerned = (share >= _PART * lost_ns / max(account.span_ns, 1)).to_numpy()
        text = _where(account, concerned)
    if concerned.mean() < _MOST:
        yield text, 2 if concerned.mean() < 0.5 else 1


def _only_steps_name_it(account: Account) -> bool:
    """Whether only the range around a whole step covers half of the CPU work."""
    work = account.moments("cpu-work")
    of_steps = work["name"].isin(set(account.steps["step"]))
    return bool(2 * work.loc[of_steps, "duration_ns"].sum() >= work["duration_ns"].sum() > 0)


def _where(account: Account, losing: np.ndarray) -> str:
    """Which parts of the run are meant."""
    some = int(losing.sum())
    if account.are_steps:
        return f"only {some:,} of {len(losing):,} steps lose much time to it"
    text = f"the loss is concentrated in {some} tenths of the time"
    if losing[:some].all():
        text += f", the first ones, which may be set-up (exclude them with --time {int(account.edges[some])}:)"
    return text


# ---------------------------------------------------------------- how far from the bound


def bounded(account: Account, name: str) -> pd.DataFrame:
    """Operators that arithmetic or the memory bounds, as :func:`nsightkit.analysis.roofline.sol.summary` has them.

    Empty for other answers, and without shapes or a card.
    """
    if name not in _BOUNDS:
        return pd.DataFrame()
    try:
        table = sol.summary(account.trace, account.gpu)
    except UsageError:
        return pd.DataFrame()
    return table[table["bound"] == name.removesuffix("-bound")]


def rate(table: pd.DataFrame) -> float | None:
    """The share of the datasheet's rate that operators reach, weighted by time."""
    if table.empty or table["impossible"].all():
        return None
    possible = table[~table["impossible"]]
    return float(np.average(possible["sol_datasheet"], weights=possible["time_ns"]))


def by_shape(account: Account, name: str) -> float:
    """The share of the time of an answer's kernels that shapes decided."""
    kernels = account.kernels[account.kernels["layer"] == LAYERS.index(name)]
    lasting_ns = kernels["duration_ns"]
    return float(lasting_ns[kernels["by_shape"]].sum() / max(lasting_ns.sum(), 1))
