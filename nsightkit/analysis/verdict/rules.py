"""The rule of the verdict: a cause weighs what the replay says its removal gains."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.replay.whatif import WhatIf
from nsightkit.analysis.roofline import sol
from nsightkit.analysis.verdict.account import BOTTLENECKS, BUSY, CODE, FEW_STEPS, IDLE, Account, of
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


def lost(account: Account) -> dict[str, int]:
    """Time that was lost, in ns by answer: idle, or in copies and collectives that nothing else ran beside."""
    codes = [*IDLE, CODE["communication"], CODE["imbalance"]]
    return {BOTTLENECKS[code]: int(of(account.total, code)) for code in codes}


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
    return _weigh(account, played, found)


def _unexplained(account: Account) -> tuple[str, float]:
    """The larger of what waited in a queue and what has no cause, as a share."""
    amounts = lost(account)
    name = max(_UNEXPLAINED, key=lambda cause: amounts[cause])
    return name, amounts[name] / max(account.span_ns, 1)


def _by_gains(account: Account, played: WhatIf) -> Decision:
    amounts = lost(account)
    gains = {name: played.saved(change) for name, change in CHANGE_OF.items() if amounts[name] > 0}
    if "communication" in gains:  # beside other kernels collectives would still wait for the last device
        gains["communication"] = min(gains["communication"], amounts["communication"] / max(account.span_ns, 1))
    best = max(gains.values(), default=0.0)
    unexplained, share = _unexplained(account)
    if share >= LOST and share > best:
        return Decision(unexplained)
    if best < LOST:
        return Decision(_filling(account))
    ties = [name for name, gain in gains.items() if gain >= _TIE * best]
    name = max(ties, key=lambda tie: amounts[tie])
    found = Decision(name, CHANGE_OF[name], gains[name], [tie for tie in ties if tie != name])
    found.gaining = _steps_that_gain(played, CHANGE_OF[name])
    return found


def _by_shares(account: Account) -> Decision:
    """Without a replay: the largest loss, if there is any worth the name."""
    amounts = lost(account)
    if sum(amounts.values()) < LOST * account.span_ns:
        return Decision(_filling(account))
    return Decision(max(amounts, key=lambda name: amounts[name]))


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


def _weigh(account: Account, played: WhatIf, found: Decision) -> Decision:
    """Say how sure that is."""
    low = False
    amounts = lost(account)
    if played.refused is not None:
        found.doubts.append(f"nothing is predicted: {played.refused}")
        low = True
    elif played.error is not None and played.error > _ROUGH:
        found.doubts.append(f"played again without a change, the trace comes out {100 * played.error:.1f} % off")
    if found.ties:
        found.doubts.append(f"to remove {' or '.join(found.ties)} would gain about as much")
    if found.name in amounts:
        single = _largest_moment(account, found.name)
        if 2 * single > amounts[found.name] and amounts[found.name]:
            found.doubts.append("seen once: a single moment holds more than half of it")
            low = True
        else:
            found.doubts += _few_steps(account)
            losing = _parts_that_lose(account, CODE[found.name])
            some, every = found.gaining or (int(losing.sum()), len(losing))
            if some < _MOST * every:
                found.doubts.append(_where(account, losing, found.gaining))
            low |= 2 * some < every
    if played.refused is None:
        disagreeing, grave = _disagreeing(account, found)
        found.doubts += disagreeing
        low |= grave
    unexplained, share = _unexplained(account)
    if found.name not in _UNEXPLAINED and share >= LOST and share > _DOUBT * max(found.gain, LOST):
        found.doubts.append(f"{100 * share:.1f} % of the time is idle, and nothing recorded says why ({unexplained})")
    if found.name == "cpu-work" and _by_steps_alone(account):
        waits = "" if account.trace.recorded("os_calls") else " (waits were not recorded)"
        found.doubts.append(f"only the step's own range says that the thread was at work: it may have waited{waits}")
    if found.change is not None and found.gain < _NEAR * LOST:
        found.doubts.append(f"it saves {100 * found.gain:.1f} %, hardly more than the {100 * LOST:.0f} % that count")
    profiled = amounts["profiler"] / max(account.span_ns, 1)
    if found.name != "profiler" and profiled >= LOST:
        found.doubts.append(f"the profiler itself took {100 * profiled:.1f} %, and may have moved other times")
    if found.name in _BOUNDS and by_shape(account, found.name) < 0.5 and not account.decodes:
        found.doubts.append("judged by names of kernels, without shapes")
    reached = rate(bounded(account, found.name))
    if reached is not None and reached < _SLOW:
        part = f"{100 * reached:.0f} % of the datasheet's rate"
        found.doubts.append(f"operators with known shapes reach {part}: something else may hold them")
    found.level = "low" if low or len(found.doubts) > 1 else "medium" if found.doubts else "high"
    if found.name in (*_UNEXPLAINED, "not-enough-data"):
        found.level = (
            "low" if found.name != "queued" else min(found.level, "medium", key=("low", "medium", "high").index)
        )
    return found


def _disagreeing(account: Account, found: Decision) -> tuple[list[str], bool]:
    """Where time was lost that no change gives back: the doubt, and whether it is a grave one."""
    amounts, span = lost(account), max(account.span_ns, 1)
    mine = int(of(account.total, CODE[found.name]))
    if found.change is not None:
        most = max((name for name in CHANGE_OF if name not in found.ties), key=lambda name: amounts[name])
        if amounts[most] <= max(mine, LOST * span):
            return [], False
        return [
            f"{most} takes more time ({100 * amounts[most] / span:.1f} %), though the replay gains less without it"
        ], False
    idle = sum(amounts[BOTTLENECKS[code]] for code in IDLE if BOTTLENECKS[code] not in (found.name, *_UNEXPLAINED))
    if found.name in _UNEXPLAINED or idle < 2 * LOST * span:
        return [], False
    return [f"{100 * idle / span:.1f} % of the time was lost, though no change alone gives it back"], idle > mine


def _largest_moment(account: Account, name: str) -> int:
    mine = account.gaps[account.cause == CODE[name]]
    longest = [int((mine["end_ns"] - mine["start_ns"]).max())] if len(mine) else [0]
    if name == "imbalance":
        parts = [account.ends(), *(account.collectives.waiting(device) for device in account.devices)]
        longest += [int((part["end_ns"] - part["start_ns"]).max()) for part in parts if len(part)]
    if name == "communication":
        talks = account.kernels[account.fills == CODE["communication"]]
        longest.append(int((talks["end_ns"] - talks["start_ns"]).max()) if len(talks) else 0)
    if name == "memory-transfer" and len(account.exposed_copies):
        copies = account.exposed_copies
        longest.append(int((copies["end_ns"] - copies["start_ns"]).max()))
    return max(longest)


def _by_steps_alone(account: Account) -> bool:
    """Whether half of the CPU work has no name of its own: the range around a whole step stands for it."""
    mine = account.gaps[account.cause == CODE["cpu-work"]]
    lasting = mine["end_ns"] - mine["start_ns"]
    of_steps = mine["name"].astype(object).isin(set(account.steps["step"]))
    return bool(2 * lasting[of_steps].sum() >= lasting.sum() > 0)


def _few_steps(account: Account) -> list[str]:
    count = len(account.steps)
    if not count or account.are_steps:
        return []
    return [f"the trace holds {count} step{'s' if count > 1 else ''}: whether this repeats is not known"]


def _parts_that_lose(account: Account, code: int) -> npt.NDArray[np.bool_]:
    """Which steps, or tenths of the time, lose at least half as much to a cause as all do on average."""
    share = of(account.by_part, code) / np.maximum(account.by_part.sum(axis=1), 1)
    losing: npt.NDArray[np.bool_] = share >= _PART * of(account.total, code) / max(account.span_ns, 1)
    return losing


def _where(account: Account, losing: npt.NDArray[np.bool_], gaining: tuple[int, int] | None) -> str:
    """Which parts of the run are meant."""
    if gaining is not None:
        return f"only {gaining[0]:,} of {gaining[1]:,} steps would gain from it"
    some = int(losing.sum())
    if account.are_steps:
        return f"only {some:,} of {len(losing):,} steps lose much time to it"
    if losing[:some].all():
        rest = f"--time {int(account.edges[some])}: has the rest alone"
        return f"most of it lies in the first {some} tenths of the time, which may be set-up ({rest})"
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
