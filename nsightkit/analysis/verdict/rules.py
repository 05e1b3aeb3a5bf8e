"""The rule of the verdict: a cause weighs what the replay says its removal gains."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core.causes import CAUSES
from nsightkit.analysis.core.text import share_text
from nsightkit.analysis.replay.whatif import WhatIf
from nsightkit.analysis.roofline import sol
from nsightkit.analysis.verdict.account import BOTTLENECKS, BUSY, CODE, FEW_STEPS, IDLE, PARTS, Account, of
from nsightkit.errors import UsageError

__all__ = ["CHANGE_OF", "LOST", "Decision", "bounded", "by_shape", "decide", "rate"]

#: The change that takes away what each cause names.
CHANGE_OF = {slug: cause.change for slug, cause in CAUSES.items() if cause.change is not None}
#: What nobody can take away, because nothing says what it is.
_UNEXPLAINED = ("queued", "unknown")
#: What no change gains is not what holds a run back.
LOST = 0.05
#: Where the GPUs work for this part of the time and no change gains, that work is the answer, and not a few silences.
_FULL = 0.8
#: Gains within this part of the largest tie with it.
_TIE = 0.9
#: Time without explanation beside the gain, from which the answer is in doubt.
_DOUBT = 0.5
#: Within this factor of the limit, the rule itself is in doubt.
_NEAR = 1.25
#: What one of these bounds reaches a good part of its rate; below this, something else holds it.
_BOUNDS, _SLOW = ("compute-bound", "memory-bound"), 0.25
#: A replay that is off by more than this is worth a doubt, though it predicts.
_ROUGH = 0.02
#: A step gains from a change if it saves this part of what all of them save on average.
_PART = 0.5
#: What fewer parts of the run than this have is in doubt, and what fewer than half of them have more so.
_MOST = 0.75


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
    gaining : tuple of int or None
        How many steps gain from the change, and of how many.
    doubts : tuple of str
        Sentences.
    level : {"high", "medium", "low"}
    """

    name: str
    change: str | None = None
    gain: float = 0.0
    ties: tuple[str, ...] = ()
    gaining: tuple[int, int] | None = None
    doubts: tuple[str, ...] = ()
    level: str = "high"


@dataclasses.dataclass(frozen=True)
class _Doubt:
    """Why an answer may be wrong, and whether this alone makes its confidence low."""

    text: str
    grave: bool = False


def decide(account: Account, played: WhatIf) -> Decision:
    """Name the bottleneck.

    Parameters
    ----------
    account : Account
    played : WhatIf

    Returns
    -------
    Decision
    """
    if played.refused is None:
        decision = _by_gains(account, played)
    else:
        decision = _by_shares(account)
    doubts = list(_doubts(account, played, decision))
    level = "high"
    if doubts or decision.name == "queued":
        level = "medium"
    grave = any(doubt.grave for doubt in doubts)
    if len(doubts) > 1 or grave or decision.name in ("unknown", "not-enough-data"):
        level = "low"
    return dataclasses.replace(decision, doubts=tuple(doubt.text for doubt in doubts), level=level)


def _by_gains(account: Account, played: WhatIf) -> Decision:
    gains = {name: played.saved(change) for name, change in CHANGE_OF.items() if account.lost[name] > 0}
    if "communication" in gains:
        # Beside other kernels collectives would still wait for the last device.
        share = account.lost["communication"] / max(account.span_ns, 1)
        gains["communication"] = min(gains["communication"], share)
    best = max(gains.values(), default=0.0)
    unexplained, share = _unexplained(account)
    if share >= LOST and share > best and (best >= LOST or not _is_full(account)):
        return Decision(unexplained)
    if best < LOST:
        return Decision(_filling(account))
    tied = [name for name, gain in gains.items() if gain >= _TIE * best]
    name = max(tied, key=lambda tie: account.lost[tie])
    tied.remove(name)
    change = CHANGE_OF[name]
    return Decision(name, change, gains[name], tuple(tied), _steps_that_gain(played, change))


def _by_shares(account: Account) -> Decision:
    """Without a replay: the largest loss, if there is any worth the name."""
    largest = max(account.lost, key=lambda name: account.lost[name])
    if sum(account.lost.values()) < LOST * account.span_ns:
        return Decision(_filling(account))
    if largest in _UNEXPLAINED and _is_full(account):
        return Decision(_filling(account))
    return Decision(largest)


def _unexplained(account: Account) -> tuple[str, float]:
    """The larger of what waited in a queue and what has no cause, as a share."""
    name = max(_UNEXPLAINED, key=lambda cause: account.lost[cause])
    return name, account.lost[name] / max(account.span_ns, 1)


def _working_ns(account: Account) -> dict[str, int]:
    """What the GPUs were at work on, in nanoseconds by answer."""
    return {BOTTLENECKS[code]: int(of(account.total, code)) for code in (*BUSY, CODE["memory-transfer"])}


def _is_full(account: Account) -> bool:
    """Whether the GPUs are at work for nearly all of the time."""
    return sum(_working_ns(account).values()) >= _FULL * account.span_ns


def _filling(account: Account) -> str:
    """What fills most of the time."""
    working_ns = _working_ns(account)
    return max(working_ns, key=lambda name: working_ns[name])


def _steps_that_gain(played: WhatIf, change: str) -> tuple[int, int] | None:
    before = played.schedule.unchanged.each_ns
    after = played.played(change).each_ns
    if len(before) < FEW_STEPS:
        return None
    saved = before - after
    gaining = saved >= _PART * saved.mean()
    return int(gaining.sum()), len(saved)


# ---------------------------------------------------------------- confidence


def _doubts(account: Account, played: WhatIf, decision: Decision) -> Iterator[_Doubt]:
    """Why the answer may be wrong."""
    span_ns = max(account.span_ns, 1)
    if played.refused is not None:
        yield _Doubt(f"nothing is predicted: {played.refused}", grave=True)
    elif played.error is not None and played.error > _ROUGH:
        yield _Doubt(f"played again without a change, the trace comes out {share_text(played.error)} off")
    if decision.ties:
        yield _Doubt(f"to remove {' or '.join(decision.ties)} would gain about as much")
    if decision.name in account.lost:
        yield from _seldom(account, decision)
    if played.refused is None:
        yield from _disagreeing(account, decision)
    unexplained, share = _unexplained(account)
    if decision.name not in _UNEXPLAINED and share >= LOST and share > _DOUBT * max(decision.gain, LOST):
        yield _Doubt(f"{share_text(share)} of the time is idle, and nothing recorded says why ({unexplained})")
    if decision.name == "cpu-work" and _only_steps_name_it(account):
        waits = "" if account.trace.recorded("os_calls") else " (waits were not recorded)"
        yield _Doubt(f"only the step's own range says that the thread was at work: it may have waited{waits}")
    if decision.change is not None and decision.gain < _NEAR * LOST:
        yield _Doubt(f"it saves {share_text(decision.gain)}, hardly more than the {100 * LOST:.0f} % that count")
    profiled = account.lost["profiler"] / span_ns
    if decision.name != "profiler" and profiled >= LOST:
        yield _Doubt(f"the profiler itself took {share_text(profiled)}, and may have moved other times")
    if decision.name in _BOUNDS and by_shape(account, decision.name) < 0.5 and not account.decodes:
        yield _Doubt("judged by names of kernels, without shapes")
    reached = rate(bounded(account, decision.name))
    if reached is not None and reached < _SLOW:
        part = f"{100 * reached:.0f} % of the datasheet's rate"
        yield _Doubt(f"operators with known shapes reach {part}: something else may hold them")


def _seldom(account: Account, decision: Decision) -> Iterator[_Doubt]:
    """Doubts where few moments or few parts of the run lose time to the answer."""
    lost_ns = account.lost[decision.name]
    if 2 * account.moments(decision.name)["duration_ns"].max() > lost_ns > 0:
        yield _Doubt("seen once: a single moment holds more than half of it", grave=True)
        return
    count = len(account.steps)
    if count and not account.are_steps:
        yield _Doubt(f"the trace holds {count} step{'s' if count > 1 else ''}: whether this repeats is not known")
    losing = _parts_that_lose(account, CODE[decision.name])
    if decision.gaining is not None:
        some, every = decision.gaining
        text = f"only {some:,} of {every:,} steps would gain from it"
    else:
        some, every = int(losing.sum()), len(losing)
        text = _where(account, losing)
    if some < _MOST * every:
        yield _Doubt(text, grave=2 * some < every)


def _disagreeing(account: Account, decision: Decision) -> Iterator[_Doubt]:
    """Where time was lost that no change gives back."""
    span_ns = max(account.span_ns, 1)
    of_answer = int(of(account.total, CODE[decision.name]))
    if decision.change is not None:
        others = [name for name in CHANGE_OF if name not in decision.ties]
        largest = max(others, key=lambda name: account.lost[name])
        if account.lost[largest] > max(of_answer, LOST * span_ns):
            share = share_text(account.lost[largest] / span_ns)
            yield _Doubt(f"{largest} takes more time ({share}), though the replay gains less without it")
        return
    if decision.name in _UNEXPLAINED:
        return
    idle_ns = 0
    for code in IDLE:
        name = BOTTLENECKS[code]
        if name != decision.name and name not in _UNEXPLAINED:
            idle_ns += account.lost[name]
    if idle_ns >= 2 * LOST * span_ns:
        text = f"{share_text(idle_ns / span_ns)} of the time was lost, though no change alone gives it back"
        yield _Doubt(text, grave=idle_ns > of_answer)


def _only_steps_name_it(account: Account) -> bool:
    """Whether half of the CPU work has no name of its own: the range around a whole step stands for it."""
    work = account.gaps[account.cause == CODE["cpu-work"]]
    lasting = work["end_ns"] - work["start_ns"]
    of_steps = work["name"].astype(object).isin(set(account.steps["step"]))
    return bool(2 * lasting[of_steps].sum() >= lasting.sum() > 0)


def _parts_that_lose(account: Account, code: int) -> npt.NDArray[np.bool_]:
    """Which steps, or tenths of the time, lose at least half as much to a cause as all do on average."""
    share = of(account.by_part, code) / np.maximum(account.by_part.sum(axis=1), 1)
    average = of(account.total, code) / max(account.span_ns, 1)
    return np.asarray(share >= _PART * average)


def _where(account: Account, losing: npt.NDArray[np.bool_]) -> str:
    """Which parts of the run are meant."""
    some = int(losing.sum())
    if account.are_steps:
        return f"only {some:,} of {len(losing):,} steps lose much time to it"
    if not losing[:some].all():
        return f"most of it lies in {some} tenths of the time"
    first = "half" if 2 * some == PARTS else f"{some} tenths"
    rest = f"--time {int(account.edges[some])}: has the rest alone"
    return f"most of it lies in the first {first} of the time, which may be set-up ({rest})"


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
    return table[table["bound"] == name.removesuffix("-bound")].reset_index(drop=True)


def rate(table: pd.DataFrame) -> float | None:
    """The share of the datasheet's rate that operators reach, weighted by time."""
    if table.empty:
        return None
    possible = table[~table["impossible"].to_numpy(bool)]
    if possible.empty:
        return None
    return float(np.average(possible["sol_datasheet"], weights=possible["time_ns"]))


def by_shape(account: Account, name: str) -> float:
    """The share of the time of an answer's kernels that shapes decided."""
    kernels: pd.DataFrame = account.kernels[account.fills == CODE[name]]
    lasting = (kernels["end_ns"] - kernels["start_ns"]).to_numpy()
    shaped = kernels["by_shape"].to_numpy(bool)
    return float(lasting[shaped].sum() / max(lasting.sum(), 1))
