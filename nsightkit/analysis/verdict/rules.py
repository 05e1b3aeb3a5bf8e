"""The rule of the verdict: a cause weighs what the replay says its removal gains."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.replay.whatif import WhatIf
from nsightkit.analysis.roofline import sol
from nsightkit.analysis.verdict.account import BOTTLENECKS, BUSY, CODE, FEW_STEPS, IDLE, PARTS, Account, of
from nsightkit.errors import UsageError

__all__ = ["CHANGE_OF", "LOST", "Decision", "decide"]

#: The change that takes away what each cause names.
CHANGE_OF = {
    "profiler": "no-profiler",
    "start-up": "no-start-up",
    "input-pipeline": "no-input-wait",
    "synchronization": "no-sync",
    "memory-transfer": "overlap-copies",
    "launch-overhead": "free-launches",
    "cpu-work": "no-cpu-work",
    "communication": "overlap-communication",
    "imbalance": "equal-ranks",
}
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


@dataclasses.dataclass
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
    ties : list of str
        Answers that weigh as much.
    doubts : list of str
        Sentences.
    level : {"high", "medium", "low"}
    gaining : tuple of int or None
        How many steps gain from the change, and of how many.
    """

    name: str
    change: str | None = None
    gain: float = 0.0
    ties: list[str] = dataclasses.field(default_factory=list)
    doubts: list[str] = dataclasses.field(default_factory=list)
    level: str = "high"
    gaining: tuple[int, int] | None = None


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
    found = _by_shares(account) if played.refused is not None else _by_gains(account, played)
    doubts = list(_doubts(account, played, found))
    found.doubts = [doubt for doubt, _ in doubts]
    low = len(doubts) > 1 or any(grave for _, grave in doubts) or found.name in ("unknown", "not-enough-data")
    found.level = "low" if low else "medium" if doubts or found.name == "queued" else "high"
    return found


def _unexplained(account: Account) -> tuple[str, float]:
    """The larger of what waited in a queue and what has no cause, as a share."""
    amounts = account.lost
    name = max(_UNEXPLAINED, key=lambda cause: amounts[cause])
    return name, amounts[name] / max(account.span_ns, 1)


def _by_gains(account: Account, played: WhatIf) -> Decision:
    amounts = account.lost
    gains = {name: played.saved(change) for name, change in CHANGE_OF.items() if amounts[name] > 0}
    if "communication" in gains:  # beside other kernels collectives would still wait for the last device
        gains["communication"] = min(gains["communication"], amounts["communication"] / max(account.span_ns, 1))
    best = max(gains.values(), default=0.0)
    unexplained, share = _unexplained(account)
    if share >= LOST and share > best and (best >= LOST or not _is_full(account)):
        return Decision(unexplained)
    if best < LOST:
        return Decision(_filling(account))
    ties = [name for name, gain in gains.items() if gain >= _TIE * best]
    name = max(ties, key=lambda tie: amounts[tie])
    gaining = _steps_that_gain(played, CHANGE_OF[name])
    return Decision(name, CHANGE_OF[name], gains[name], [tie for tie in ties if tie != name], gaining=gaining)


def _by_shares(account: Account) -> Decision:
    """Without a replay: the largest loss, if there is any worth the name."""
    amounts = account.lost
    most = max(amounts, key=lambda name: amounts[name])
    lost = sum(amounts.values()) >= LOST * account.span_ns
    return Decision(most if lost and not (most in _UNEXPLAINED and _is_full(account)) else _filling(account))


def _is_full(account: Account) -> bool:
    """Whether the GPUs are at work for nearly all of the time."""
    return sum(int(of(account.total, code)) for code in (*BUSY, CODE["memory-transfer"])) >= _FULL * account.span_ns


def _filling(account: Account) -> str:
    """What fills most of the time."""
    codes = [*BUSY, CODE["memory-transfer"]]
    return BOTTLENECKS[max(codes, key=lambda code: int(of(account.total, code)))]


def _steps_that_gain(played: WhatIf, change: str) -> tuple[int, int] | None:
    before, after = played.schedule.unchanged.each_ns, played.played(change).each_ns
    if len(before) < FEW_STEPS:
        return None
    less = before - after
    return int((less >= _PART * less.mean()).sum()), len(less)


# ---------------------------------------------------------------- confidence


def _doubts(account: Account, played: WhatIf, found: Decision) -> Iterator[tuple[str, bool]]:
    """Why the answer may be wrong, and whether each doubt alone makes its confidence low."""
    amounts, span = account.lost, max(account.span_ns, 1)
    if played.refused is not None:
        yield f"nothing is predicted: {played.refused}", True
    elif played.error is not None and played.error > _ROUGH:
        yield f"played again without a change, the trace comes out {100 * played.error:.1f} % off", False
    if found.ties:
        yield f"to remove {' or '.join(found.ties)} would gain about as much", False
    if found.name in amounts:
        yield from _seldom(account, found)
    if played.refused is None:
        yield from _disagreeing(account, found)
    unexplained, share = _unexplained(account)
    if found.name not in _UNEXPLAINED and share >= LOST and share > _DOUBT * max(found.gain, LOST):
        yield f"{100 * share:.1f} % of the time is idle, and nothing recorded says why ({unexplained})", False
    if found.name == "cpu-work" and _by_steps_alone(account):
        waits = "" if account.trace.recorded("os_calls") else " (waits were not recorded)"
        yield f"only the step's own range says that the thread was at work: it may have waited{waits}", False
    if found.change is not None and found.gain < _NEAR * LOST:
        yield f"it saves {100 * found.gain:.1f} %, hardly more than the {100 * LOST:.0f} % that count", False
    profiled = amounts["profiler"] / span
    if found.name != "profiler" and profiled >= LOST:
        yield f"the profiler itself took {100 * profiled:.1f} %, and may have moved other times", False
    if found.name in _BOUNDS and by_shape(account, found.name) < 0.5 and not account.decodes:
        yield "judged by names of kernels, without shapes", False
    reached = rate(bounded(account, found.name))
    if reached is not None and reached < _SLOW:
        part = f"{100 * reached:.0f} % of the datasheet's rate"
        yield f"operators with known shapes reach {part}: something else may hold them", False


def _seldom(account: Account, found: Decision) -> Iterator[tuple[str, bool]]:
    """Doubts where few moments or few parts of the run lose time to the answer."""
    amount, count = account.lost[found.name], len(account.steps)
    if 2 * account.moments(found.name)["duration_ns"].max() > amount > 0:
        yield "seen once: a single moment holds more than half of it", True
        return
    if count and not account.are_steps:
        yield f"the trace holds {count} step{'s' if count > 1 else ''}: whether this repeats is not known", False
    losing = _parts_that_lose(account, CODE[found.name])
    some, every = found.gaining or (int(losing.sum()), len(losing))
    if some < _MOST * every:
        yield _where(account, losing, found.gaining), 2 * some < every


def _disagreeing(account: Account, found: Decision) -> Iterator[tuple[str, bool]]:
    """Where time was lost that no change gives back."""
    amounts, span = account.lost, max(account.span_ns, 1)
    mine = int(of(account.total, CODE[found.name]))
    if found.change is not None:
        most = max((name for name in CHANGE_OF if name not in found.ties), key=lambda name: amounts[name])
        if amounts[most] > max(mine, LOST * span):
            share = f"{100 * amounts[most] / span:.1f} %"
            yield f"{most} takes more time ({share}), though the replay gains less without it", False
        return
    idle = sum(amounts[BOTTLENECKS[code]] for code in IDLE if BOTTLENECKS[code] not in (found.name, *_UNEXPLAINED))
    if found.name not in _UNEXPLAINED and idle >= 2 * LOST * span:
        yield f"{100 * idle / span:.1f} % of the time was lost, though no change alone gives it back", idle > mine


def _by_steps_alone(account: Account) -> bool:
    """Whether half of the CPU work has no name of its own: the range around a whole step stands for it."""
    mine = account.gaps[account.cause == CODE["cpu-work"]]
    lasting = mine["end_ns"] - mine["start_ns"]
    of_steps = mine["name"].astype(object).isin(set(account.steps["step"]))
    return bool(2 * lasting[of_steps].sum() >= lasting.sum() > 0)


def _parts_that_lose(account: Account, code: int) -> npt.NDArray[np.bool_]:
    """Which steps, or tenths of the time, lose at least half as much to a cause as all do on average."""
    share = of(account.by_part, code) / np.maximum(account.by_part.sum(axis=1), 1)
    return np.asarray(share >= _PART * of(account.total, code) / max(account.span_ns, 1))


def _where(account: Account, losing: npt.NDArray[np.bool_], gaining: tuple[int, int] | None) -> str:
    """Which parts of the run are meant."""
    if gaining is not None:
        return f"only {gaining[0]:,} of {gaining[1]:,} steps would gain from it"
    some = int(losing.sum())
    if account.are_steps:
        return f"only {some:,} of {len(losing):,} steps lose much time to it"
    if losing[:some].all():
        rest = f"--time {int(account.edges[some])}: has the rest alone"
        first = "half" if 2 * some == PARTS else f"{some} tenths"
        return f"most of it lies in the first {first} of the time, which may be set-up ({rest})"
    return f"most of it lies in {some} tenths of the time"


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
    possible = table[~table["impossible"].to_numpy(bool)] if len(table) else table
    if not len(possible):
        return None
    return float(np.average(possible["sol_datasheet"], weights=possible["time_ns"]))


def by_shape(account: Account, name: str) -> float:
    """The share of the time of an answer's kernels that shapes decided."""
    mine: pd.DataFrame = account.kernels[account.fills == CODE[name]]
    lasting = (mine["end_ns"] - mine["start_ns"]).to_numpy()
    return float(lasting[mine["by_shape"].to_numpy()].sum() / max(lasting.sum(), 1))
