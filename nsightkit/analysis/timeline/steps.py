"""The steps of a run: how long each took, how much of it the GPU was busy, what it served, and which stand out."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.core.kept import kept
from nsightkit.analysis.core.names import compiled
from nsightkit.trace.model import GPU_TABLES, Trace

__all__ = [
    "QUEUED_NS",
    "devices",
    "divided",
    "find",
    "launched_in",
    "number",
    "outliers",
    "phases",
    "summary",
    "timed",
    "windows",
]

_PROFILER_STEP = re.compile(r"^ProfilerStep#\d+$")
_STEP = re.compile(r"(^|[^a-z])step([^a-z]|$)", re.IGNORECASE)
# Parts of a step that have "step" in their names: `Optimizer.step#AdamW.step`, `lr_scheduler.step`. Warm-up steps
# are not counted either.
_PART = re.compile(r"optim|sched|zero_grad|warm[-_ ]?up", re.IGNORECASE)
#: What vLLM calls an iteration: requests in prefill with their tokens, those that generate with theirs. Its detailed
#: form counts all tokens first, and more than tokens in the brackets.
_VLLM = re.compile(r"^execute_(?:\d+_)?context_(\d+)\((?:sq)?(\d+)[^()]*\)_generation_(\d+)\((?:sq)?(\d+)[^()]*\)$")
#: What SGLang calls a forward pass: its mode, sequences, and in a prefill its tokens.
_SGLANG = re.compile(r"^step\[([A-Z_]+) bs=(\d+)(?: toks=(\d+))?(?: [^]]*)?\]$")
_MODES = {"EXTEND": "prefill", "DECODE": "decode", "TARGET_VERIFY": "decode", "MIXED": "mixed"}

#: What gives the kind of step that a range's name says, None for no step: the first that finds any.
_KINDS: tuple[Callable[[str], str | None], ...] = (
    lambda name: "ProfilerStep" if _PROFILER_STEP.match(name) else None,
    lambda name: _numberless(name) if _STEP.search(name) and not _PART.search(name) else None,
    lambda name: "vLLM" if _VLLM.match(name) else None,
)

#: What launches nothing is a stub that the profiler left, not a step, below this share of the median of those that do.
_STUB = 0.1
#: A step is an outlier beyond so many robust standard deviations from the median (Iglewicz and Hoaglin, 1993) ...
_ROBUST_Z = 3.5
#: ... and so far from it in relation to it: steps that vary by nanoseconds have no outliers worth a look.
_RELATIVE = 0.05
#: Fewer steps than this have no median to be far from.
_ENOUGH = 4
#: What a device takes to start an operation that lies in its queue, at most.
QUEUED_NS = 20_000
#: Scales the median absolute deviation to the standard deviation of a normal distribution.
_MAD_TO_SIGMA = 1.4826


def find(trace: Trace, match: str | None = None) -> pd.DataFrame:
    """Find the step ranges of a run.

    A step is an outermost range named ``ProfilerStep#N``. Where a trace has no such range, it is one with the word
    *step* in its name (``train_step``, ``step 3``, SGLang's ``step[DECODE bs=32]``; not an optimizer's or a
    scheduler's, nor one to warm up), and without those an iteration as vLLM annotates it
    (``execute_context_…_generation_…``). With `match` it is a range that the expression finds. Without `match`,
    names that differ only in their numbers count as one kind of step, and the kind with the largest total time is
    meant. All steps are taken from one thread, the one with the largest total. A step's window lasts until the next
    one starts, so that steps add up to the whole; that of the last one ends with its range. A range in which
    nothing was launched, and that is shorter than a tenth of the median of those that launched something, is a stub
    that the profiler left at the edge of the capture.

    Parameters
    ----------
    trace : Trace
    match : str, optional
        Regular expression, searched in range names.

    Returns
    -------
    DataFrame
        ``step`` (the range's name), ``start_ns``, ``end_ns`` (of the window, on the CPU), ``process``, ``thread``; in
        order of time.

    Raises
    ------
    UsageError
        `match` is not a regular expression.
    """
    ranges = trace.table("ranges", ["name", "start_ns", "end_ns", "process", "thread"])
    names = [str(name) for name in ranges["name"].cat.categories]
    if match is not None:
        pattern = compiled(match, "--match")
        kinds = ["" if pattern.search(name) else None for name in names]
    else:
        tried = ([kind(name) for name in names] for kind in _KINDS)
        kinds = next((kinds for kinds in tried if any(kinds)), [None] * len(names))
    kind_of_name, _ = pd.factorize(np.array([*kinds, None], dtype=object))
    kind = kind_of_name[ranges["name"].cat.codes.to_numpy()]
    steps = ranges[kind >= 0].assign(kind=kind[kind >= 0]).sort_values("start_ns", kind="stable")
    # The kind of step, and the thread, that most of the time was spent in.
    for column in ("kind", "thread"):
        time = (steps["end_ns"] - steps["start_ns"]).groupby(steps[column], sort=False).sum()
        steps = steps[steps[column].isin(time.nlargest(1).index)]
    steps = steps.assign(step=steps["name"].astype(object))[["step", "start_ns", "end_ns", "process", "thread"]]
    inner = steps["end_ns"] <= steps["end_ns"].cummax().shift(fill_value=np.iinfo(np.int64).min)
    steps = steps[~inner].reset_index(drop=True)
    steps = steps[~_stubs(trace, steps)].reset_index(drop=True)
    return steps.assign(end_ns=np.append(steps["start_ns"].to_numpy()[1:], steps["end_ns"].to_numpy()[-1:]))


def _numberless(name: str) -> str:
    return "SGLang" if _SGLANG.match(name) else re.sub(r"\d+", "#", name)


def _stubs(trace: Trace, ranges: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Say which step ranges, in order of time, are no more than what the profiler left of one."""
    length = (ranges["end_ns"] - ranges["start_ns"]).to_numpy()
    if not (length < _STUB * length.max(initial=0)).any():  # nearly always: no need to read who launched what
        return np.zeros(len(ranges), bool)
    # Of the whole trace: a step that launched nothing on the device that is looked at is a step.
    mine = [launched_in(trace.whole, table, ranges) for table in GPU_TABLES if trace.whole.size(table)]
    launched = np.bincount(np.concatenate([np.empty(0, np.intp), *mine]) + 1, minlength=len(ranges) + 1)[1:] > 0
    return ~launched & (length < _STUB * np.median(length[launched])) if launched.any() else launched


@kept
def windows(trace: Trace, match: str | None = None) -> pd.DataFrame:
    """Find the steps of a run, on the CPU and up to the end of their work on the GPU.

    Step k begins with its range, and its part on the CPU lasts until the next one's range begins (:func:`find`). It
    ends at E(k), the latest of E(k - 1), the end of its part on the CPU, and the end of the GPU work launched in that
    part by the step's process, on whatever thread. What passes from E(k - 1) to E(k) is what the step takes,
    whichever of CPU and GPU is behind; the first one's time begins with its range.

    Parameters
    ----------
    trace : Trace
        Whole, or a selection: then its own ranges and its own GPU work count.
    match : str, optional
        Regular expression, searched in range names; what it finds are the steps.

    Returns
    -------
    DataFrame
        ``step, start_ns, cpu_end_ns, begin_ns, end_ns, process, thread``, in order of time; ``end_ns`` is E(k), and
        ``begin_ns`` is where the step's time begins: at E(k - 1), or where the first one's range begins. With one step
        or two, and a GPU that was still at work launched before the recording, it is where the GPU got to the first
        one's. The first step of a selection begins where it does in the whole trace.

    Raises
    ------
    UsageError
        `match` is not a regular expression.
    """
    found = find(trace, match)
    begin = found["start_ns"].to_numpy()[:1]
    if trace is not trace.whole and len(found):
        every = windows(trace.whole, match)
        begin = np.append(begin, every.loc[every["start_ns"] == begin[0], "begin_ns"])[-1:]
    elif len(found):
        begin = np.maximum(begin, _reached(trace, found))
    end = np.maximum(_ends(trace, found), begin)
    found = found.assign(cpu_end_ns=found["end_ns"], begin_ns=np.append(begin, end[:-1]), end_ns=end)
    return found[["step", "start_ns", "cpu_end_ns", "begin_ns", "end_ns", "process", "thread"]]


def _reached(trace: Trace, found: pd.DataFrame) -> int:
    """When the GPU got to the first step's work, if that lay behind work which was launched before the recording.

    The step before, whose end would say so, was not recorded. It ended with the last operation of no recorded launch
    ahead of all that have one. With one step or two it also shows in all devices beginning later than they need to,
    long after the first launch of the first step had returned.
    """
    ops = intervals.gpu_intervals(trace)
    launch = intervals.launches_of(trace, ops["table"], ops["row"])
    if not (launch >= 0).any():
        return 0
    first = ops[launch >= 0].groupby("device")["start_ns"].min()
    before = ops["start_ns"] < ops["device"].map(first)
    if before.any():
        ended = int(ops.loc[before, "end_ns"].max())
        return ended if ended < found["end_ns"].iloc[-1] else 0
    if len(found) > _ENOUGH - 2:
        return 0
    calls = trace.table("calls", ["start_ns", "end_ns"])
    start, launch = ops.drop_duplicates("device"), launch[~ops.duplicated("device")]
    begun, done = (calls[column].to_numpy()[launch] for column in calls)
    begins = start["start_ns"].to_numpy()
    behind = (begun >= found["start_ns"].iloc[0]) & (begun < found["end_ns"].iloc[0]) & (begins - done > QUEUED_NS)
    return int(begins.min()) if behind.all() else 0


def _ends(trace: Trace, found: pd.DataFrame) -> npt.NDArray[np.int64]:
    """Where steps end, each with what it launched, and none before an earlier one."""
    end = found["end_ns"].to_numpy().copy()
    for table in GPU_TABLES if len(found) else ():
        mine = launched_in(trace, table, found)
        np.maximum.at(end, mine[mine >= 0], trace.table(table, ["end_ns"])["end_ns"].to_numpy()[mine >= 0])
    return np.maximum.accumulate(end)


def number(windows: pd.DataFrame, time_ns: npt.ArrayLike) -> npt.NDArray[np.intp]:
    """Say which step moments lie in.

    Parameters
    ----------
    windows : DataFrame
        ``start_ns`` and ``end_ns`` of steps in order of time: those of :func:`find`, or of :func:`timed`.
    time_ns : array_like of int

    Returns
    -------
    ndarray of intp
        Row of `windows`; -1 for a moment in none of them.
    """
    time, end = np.asarray(time_ns, np.int64), windows["end_ns"].to_numpy()
    at = np.searchsorted(windows["start_ns"].to_numpy(), time, side="right") - 1
    return np.where(time < np.append(end, np.iinfo(np.int64).min)[at], at, -1)


def timed(windows: pd.DataFrame) -> pd.DataFrame:
    """Give the stretch of time that each step takes: they follow one another without a gap.

    Parameters
    ----------
    windows : DataFrame
        As :func:`windows` gives them.

    Returns
    -------
    DataFrame
        ``start_ns`` and ``end_ns``.
    """
    return pd.DataFrame({"start_ns": windows["begin_ns"], "end_ns": windows["end_ns"]})


def launched_in(trace: Trace, table: str, windows: pd.DataFrame) -> npt.NDArray[np.intp]:
    """Say which step each operation of a GPU table was launched in.

    Parameters
    ----------
    trace : Trace
    table : {"kernels", "memops", "graphs"}
    windows : DataFrame
        As :func:`find` or :func:`windows` gives them; it is their part on the CPU that counts.

    Returns
    -------
    ndarray of intp
        Row of `windows`; -1 for what was launched in none, or by another process.
    """
    end = windows["cpu_end_ns" if "cpu_end_ns" in windows else "end_ns"]
    step = number(windows.assign(end_ns=end), intervals.launched(trace, table))
    process = trace.table(table, ["process"])["process"].to_numpy()
    ours = np.isin(process, windows["process"].to_numpy()[:1])
    # No process at all: nothing says whose it was.
    return np.where(ours | ~ours.any(), step, -1)


def divided(trace: Trace, windows: pd.DataFrame, process: int) -> pd.DataFrame:
    """Divide windows into the time in which the GPU worked, and the rest.

    Parameters
    ----------
    trace : Trace
    windows : DataFrame
        ``start_ns`` and ``end_ns``, as :func:`timed` gives them.
    process : int
        Whose devices count.

    Returns
    -------
    DataFrame
        ``wall_ns, busy_ns, idle_ns``: with several devices sums over them. The last two are NA where no GPU table was
        recorded.
    """
    start, end = (windows[c].to_numpy() for c in ("start_ns", "end_ns"))
    parts = pd.DataFrame({"wall_ns": end - start, "busy_ns": pd.NA, "idle_ns": pd.NA})
    if len(windows) and any(trace.recorded(t) for t in GPU_TABLES):
        used, ops = devices(trace, process), intervals.gpu_intervals(trace)
        of_device = (ops[ops["device"] == device] for device in used)
        parts["busy_ns"] = sum(
            intervals.Coverage(mine["start_ns"], mine["end_ns"]).of(start, end) for mine in of_device
        )
        parts["idle_ns"] = max(len(used), 1) * parts["wall_ns"] - parts["busy_ns"]
    return parts.astype({"busy_ns": "Int64", "idle_ns": "Int64"})


def summary(trace: Trace, match: str | None = None) -> pd.DataFrame:
    """Measure wall, busy and idle time of each step, and say what it served.

    A step lasts from the end of the one before it to its own (:func:`windows`), so that steps add up to the whole
    whether the CPU waits for the GPU or runs ahead of it.

    Parameters
    ----------
    trace : Trace
    match : str, optional
        Regular expression, searched in range names; what it finds are the steps.

    Returns
    -------
    DataFrame
        ``step, start_ns, wall_ns, busy_ns, idle_ns, outlier, phase, tokens, sequences``, in order of time.

        ``busy_ns`` is the time in which the GPU worked, whoever launched the work; with several devices (those the
        steps' process used) it is the sum over them, and ``idle_ns`` is devices times ``wall_ns`` less it. Both are NA
        where no GPU table was recorded.

        ``outlier``: the wall time is more than 3.5 robust standard deviations (of the median absolute deviation) and
        more than 5 % off the median of all steps. The first step is judged like any other. Fewer than four steps have
        no outliers.

        ``phase`` is "prefill", "decode" or "mixed", ``tokens`` and ``sequences`` say how many, as vLLM and SGLang
        annotate their iterations; None and NA where nothing says. Of a step that holds several iterations, the
        tokens are summed and the most sequences of any are given.

    Raises
    ------
    UsageError
        `match` is not a regular expression.
    """
    found = windows(trace, match)
    parts = divided(trace, timed(found), int(found["process"].iloc[0]) if len(found) else 0)
    return pd.DataFrame(
        {
            "step": found["step"],
            "start_ns": found["begin_ns"],
            **parts,
            "outlier": outliers(parts["wall_ns"].to_numpy()),
            **_served(trace, found),
        }
    )


def phases(trace: Trace, match: str | None = None) -> pd.DataFrame:
    """Sum the time of an inference server's steps by what they served.

    Parameters
    ----------
    trace : Trace
    match : str, optional
        Regular expression, searched in range names; what it finds are the steps.

    Returns
    -------
    DataFrame
        ``phase, steps, wall_ns, share, median_ns, idle_ns, tokens, sequences, tokens_per_s``, the most time first: how
        many steps the phase has, the sum of their times, its share of the time of all steps, the medians of a step's
        time, idle time, tokens and sequences, and the tokens of all its steps by their time. Steps without a known
        phase have no row, so shares may sum to less than 1.

    Raises
    ------
    UsageError
        `match` is not a regular expression.
    """
    rows = summary(trace, match)
    grouped = rows.groupby("phase")
    table = pd.DataFrame(
        {
            "steps": grouped["wall_ns"].size(),
            "wall_ns": grouped["wall_ns"].sum(),
            "share": grouped["wall_ns"].sum() / max(rows["wall_ns"].sum(), 1),
            "median_ns": grouped["wall_ns"].median(),
            "idle_ns": grouped["idle_ns"].median(),
            "tokens": grouped["tokens"].median(),
            "sequences": grouped["sequences"].median(),
            "tokens_per_s": 1e9 * grouped["tokens"].sum(min_count=1) / grouped["wall_ns"].sum(),
        }
    )
    return table.sort_values("wall_ns", ascending=False).reset_index()


def _served(trace: Trace, found: pd.DataFrame) -> pd.DataFrame:
    """Phase, tokens and sequences of each step: as its own name says, else as the annotations in it do."""
    count = len(found)
    said = [_iteration(name) for name in found["step"]]
    step = np.flatnonzero([of is not None for of in said])
    if not len(step) and count:
        ranges = trace.table("ranges", ["name", "start_ns", "end_ns", "thread"])
        known = [_iteration(str(name)) for name in ranges["name"].cat.categories]
        mine = np.array([*(of is not None for of in known), False])[ranges["name"].cat.codes.to_numpy()]
        notes = ranges[mine & (ranges["thread"] == found["thread"].iloc[0])]
        notes = notes.sort_values(["start_ns", "end_ns"], ascending=[True, False], kind="stable")
        # A server may annotate the same iteration twice, one range in the other.
        notes = notes[notes["end_ns"] > notes["end_ns"].cummax().shift(fill_value=-1)]
        step = number(found.assign(end_ns=found["cpu_end_ns"]), notes["start_ns"])
        said = [known[code] for code in notes["name"].cat.codes[step >= 0]]
        step = step[step >= 0]
    each = pd.DataFrame([of for of in said if of is not None], columns=["phase", "tokens", "sequences"]).groupby(step)
    phase = each["phase"].first().where(each["phase"].nunique() <= 1, "mixed").reindex(range(count)).astype(object)
    # A sum in which one is not known is not known.
    tokens = each["tokens"].sum().where(each["tokens"].count() == each.size()).reindex(range(count))
    sequences = each["sequences"].max().reindex(range(count))
    phase = phase.where(phase.notna(), None)
    return pd.DataFrame({"phase": phase, "tokens": tokens.astype("Int64"), "sequences": sequences.astype("Int64")})


def _iteration(name: str) -> tuple[str | None, int | None, int | None] | None:
    """Phase, tokens and sequences that an inference server's annotation states; None for any other range."""
    if match := _VLLM.match(name):
        prefills, prefilled, decodes, decoded = (int(group) for group in match.groups())
        phase = "mixed" if prefills and decodes else "prefill" if prefills else "decode" if decodes else None
        return phase, prefilled + decoded, prefills + decodes
    if match := _SGLANG.match(name):
        mode, sequences, tokens = match.groups()
        # In plain decoding every sequence gets one token; SGLang does not say it again.
        return _MODES.get(mode), int(tokens or sequences) if tokens or mode == "DECODE" else None, int(sequences)
    return None


def devices(trace: Trace, process: int) -> list[int]:
    """Find the devices that a process used; all of them where no GPU operation says whose it was.

    Parameters
    ----------
    trace : Trace
    process : int

    Returns
    -------
    list of int
    """
    found = pd.concat([trace.table(t, ["device", "process"]).drop_duplicates() for t in GPU_TABLES])
    mine = found[found["process"] == process]
    return sorted({int(d) for d in (mine if len(mine) else found)["device"]})


def outliers(wall: np.ndarray) -> np.ndarray:
    """Say which of some times stand out, as :func:`summary` does.

    Parameters
    ----------
    wall : ndarray of int or float, shape (n,)

    Returns
    -------
    ndarray of bool, shape (n,)
    """
    if len(wall) < _ENOUGH:
        return np.zeros(len(wall), bool)
    median = np.median(wall)
    off = np.abs(wall - median)
    sigma = _MAD_TO_SIGMA * np.median(off)
    return np.asarray((off > _ROBUST_Z * sigma) & (off > _RELATIVE * median))
