"""The steps of a run: how long each took, how much of it the GPU was busy, what it served, and which stand out."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.core.kept import kept
from nsightkit.analysis.core.names import compiled, matching
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
#: What vLLM calls an iteration: requests in prefill with their tokens, then requests in decode with theirs. Its
#: detailed form counts all tokens first, and more than tokens in the brackets.
_VLLM = re.compile(r"^execute_(?:\d+_)?context_(\d+)\((?:sq)?(\d+)[^()]*\)_generation_(\d+)\((?:sq)?(\d+)[^()]*\)$")
#: What SGLang calls a forward pass: its mode, sequences, and in a prefill its tokens.
_SGLANG = re.compile(r"^step\[([A-Z_]+) bs=(\d+)(?: toks=(\d+))?(?: [^]]*)?\]$")
_MODES = {"EXTEND": "prefill", "DECODE": "decode", "TARGET_VERIFY": "decode", "MIXED": "mixed"}

#: A range that launches nothing and is shorter than this share of the median launching step is a stub of the profiler.
_STUB = 0.1
#: A step is an outlier beyond so many robust standard deviations from the median (Iglewicz and Hoaglin, 1993) ...
_ROBUST_Z = 3.5
#: ... and so far from it in relation to it: steps that vary by nanoseconds have no outliers worth a look.
_RELATIVE = 0.05
#: Fewer steps than this have no median to be far from.
_ENOUGH = 4
#: What a device takes to start a queued operation, at most.
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
    one starts, so that steps add up to the whole; the last window ends with its range. A range in which
    nothing was launched, and that is shorter than a tenth of the median launching range, is a stub
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
    kinds = _kinds(ranges["name"].cat.categories, match)
    ranges["kind"] = kinds.reindex(ranges["name"].astype(object)).to_numpy()
    steps = ranges.dropna(subset="kind").sort_values("start_ns", kind="stable")
    # The kind of step, and the thread, that most of the time was spent in.
    for column in ("kind", "thread"):
        time = (steps["end_ns"] - steps["start_ns"]).groupby(steps[column], sort=False).sum()
        steps = steps[steps[column].isin(time.nlargest(1).index)]
    steps["step"] = steps["name"].astype(object)
    is_inner = steps["end_ns"] <= steps["end_ns"].cummax().shift(fill_value=np.iinfo(np.int64).min)
    steps = steps[~is_inner].reset_index(drop=True)
    steps = steps[~_stubs(trace, steps)].reset_index(drop=True)
    steps["end_ns"] = steps["start_ns"].shift(-1, fill_value=steps["end_ns"].max() if len(steps) else 0)
    return steps[["step", "start_ns", "end_ns", "process", "thread"]]


def _kinds(names: pd.Index, match: str | None) -> pd.Series:
    """The kind of step of each range name, None for no step."""
    if match is not None:
        pattern = compiled(match, "--match")
        kinds = ["" if pattern.search(str(name)) else None for name in names]
        return pd.Series(kinds, names, dtype=object)
    for kind_of in (_profiler_step, _named_step, _vllm_step):
        kinds = [kind_of(str(name)) for name in names]
        if any(kinds):
            break
    return pd.Series(kinds, names, dtype=object)


def _profiler_step(name: str) -> str | None:
    return "ProfilerStep" if _PROFILER_STEP.match(name) else None


def _named_step(name: str) -> str | None:
    if _SGLANG.match(name):
        return "SGLang"
    if _STEP.search(name) and not _PART.search(name):
        return re.sub(r"\d+", "#", name)
    return None


def _vllm_step(name: str) -> str | None:
    return "vLLM" if _VLLM.match(name) else None


def _stubs(trace: Trace, ranges: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Flag the step ranges, in order of time, that are stubs of the profiler."""
    length = (ranges["end_ns"] - ranges["start_ns"]).to_numpy()
    stubs = np.zeros(len(ranges), bool)
    if not (length < _STUB * length.max(initial=0)).any():  # nearly always: no need to read who launched what
        return stubs
    # Of the whole trace: a step that launched nothing on the device that is looked at is a step.
    launched = np.zeros(len(ranges), bool)
    for table in GPU_TABLES:
        step = launched_in(trace.whole, table, ranges)
        launched[step[step >= 0]] = True
    if launched.any():
        stubs = ~launched & (length < _STUB * np.median(length[launched]))
    return stubs


@kept
def windows(trace: Trace, match: str | None = None) -> pd.DataFrame:
    """Find the steps of a run, on the CPU and up to the end of their work on the GPU.

    Step k starts with its range, and its part on the CPU lasts until the next one's range begins (:func:`find`). It
    ends at E(k), the latest of E(k - 1), the end of its part on the CPU, and the end of the GPU work launched in that
    part by the step's process, on any thread. What passes from E(k - 1) to E(k) is what the step takes,
    whichever of CPU and GPU is behind; the first step's time starts with its range.

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
    table = find(trace, match)
    begin = table["start_ns"].to_numpy()[:1]
    if trace is not trace.whole and len(table):
        every = windows(trace.whole, match)
        begin = np.append(begin, every.loc[every["start_ns"] == begin[0], "begin_ns"])[-1:]
    elif len(table):
        begin = np.maximum(begin, _reached(trace, table))
    end = np.maximum(_ends(trace, table), begin)
    table["cpu_end_ns"] = table["end_ns"]
    table["begin_ns"] = np.append(begin, end[:-1])
    table["end_ns"] = end
    return table[["step", "start_ns", "cpu_end_ns", "begin_ns", "end_ns", "process", "thread"]]


def _reached(trace: Trace, windows: pd.DataFrame) -> int:
    """When the GPU got to the first step's work, if that lay behind work which was launched before the recording.

    That time is the end of the step before, which was not recorded. It ended with the last operation without a
    recorded launch ahead of all others. With one step or two, it also shows where all devices begin later than they
    need to, long after the first launch of the first step returned.
    """
    ops = intervals.gpu_intervals(trace)
    ops["launch"] = intervals.launches_of(trace, ops["table"], ops["row"])
    first = ops[ops["launch"] >= 0].groupby("device")["start_ns"].min()
    before = ops.loc[ops["start_ns"] < ops["device"].map(first), "end_ns"]
    if len(before):
        return int(before.max()) if before.max() < windows["end_ns"].iloc[-1] else 0
    if first.empty or len(windows) > _ENOUGH - 2:
        return 0
    ops = ops.drop_duplicates("device")
    calls = trace.table("calls", ["start_ns", "end_ns"]).iloc[ops["launch"]]
    begins = ops["start_ns"].to_numpy()
    in_first_step = calls["start_ns"].between(windows["start_ns"].iloc[0], windows["end_ns"].iloc[0], inclusive="left")
    waited = begins - calls["end_ns"] > QUEUED_NS
    return int(begins.min()) if (in_first_step & waited).all() else 0


def _ends(trace: Trace, windows: pd.DataFrame) -> npt.NDArray[np.int64]:
    """Where steps end, each with what it launched, and none before an earlier one."""
    end = windows["end_ns"].to_numpy(copy=True)
    if windows.empty:
        return end
    for table in GPU_TABLES:
        step = launched_in(trace, table, windows)
        op_end = trace.table(table, ["end_ns"])["end_ns"].to_numpy()
        np.maximum.at(end, step[step >= 0], op_end[step >= 0])
    return np.maximum.accumulate(end)


def number(windows: pd.DataFrame, time_ns: npt.ArrayLike) -> npt.NDArray[np.intp]:
    """Find the step in which each moment lies.

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
    time = np.asarray(time_ns, np.int64)
    end = np.append(windows["end_ns"].to_numpy(), np.iinfo(np.int64).min)
    at = np.searchsorted(windows["start_ns"].to_numpy(), time, side="right") - 1
    return np.where(time < end[at], at, -1)


def timed(windows: pd.DataFrame) -> pd.DataFrame:
    """Give the time that each step takes; steps follow one another without a gap.

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
    """Find the step in which each operation of a GPU table was launched.

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
    cpu_end = windows["cpu_end_ns" if "cpu_end_ns" in windows else "end_ns"]
    step = number(windows.assign(end_ns=cpu_end), intervals.launched(trace, table))
    process = trace.table(table, ["process"])["process"].to_numpy()
    is_own = np.isin(process, windows["process"].to_numpy()[:1])
    if is_own.any():  # else the source names no process
        step[~is_own] = -1
    return step


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
    start, end = windows["start_ns"].to_numpy(), windows["end_ns"].to_numpy()
    parts = pd.DataFrame({"wall_ns": end - start, "busy_ns": pd.NA, "idle_ns": pd.NA})
    if len(windows) and any(trace.recorded(table) for table in GPU_TABLES):
        used = devices(trace, process)
        ops = intervals.gpu_intervals(trace)
        busy = np.zeros(len(windows), np.int64)
        for device in used:
            of_device = ops[ops["device"] == device]
            busy += intervals.Coverage(of_device["start_ns"], of_device["end_ns"]).of(start, end)
        parts["busy_ns"] = busy
        parts["idle_ns"] = max(len(used), 1) * parts["wall_ns"] - busy
    return parts.astype({"busy_ns": "Int64", "idle_ns": "Int64"})


def summary(trace: Trace, match: str | None = None) -> pd.DataFrame:
    """Measure wall, busy and idle time of each step, with what it served.

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

        ``busy_ns`` is the time in which the GPU worked, for any process; with several devices (those the
        steps' process used) it is the sum over them, and ``idle_ns`` is devices times ``wall_ns`` less it. Both are NA
        where no GPU table was recorded.

        ``outlier``: the wall time is more than 3.5 robust standard deviations (of the median absolute deviation) and
        more than 5 % off the median of all steps. The first step is judged like any other. Fewer than four steps have
        no outliers.

        ``phase`` is "prefill", "decode" or "mixed", ``tokens`` and ``sequences`` are counts, as vLLM and SGLang
        annotate their iterations; None and NA without annotations. Of a step that holds several iterations, the
        tokens are summed and the most sequences of any are given.

    Raises
    ------
    UsageError
        `match` is not a regular expression.
    """
    table = windows(trace, match)
    process = int(table["process"].iloc[0]) if len(table) else 0
    parts = divided(trace, timed(table), process)
    steps = pd.DataFrame({"step": table["step"], "start_ns": table["begin_ns"]})
    steps = steps.join(parts)
    steps["outlier"] = outliers(parts["wall_ns"].to_numpy())
    return steps.join(_served(trace, table))


def phases(rows: pd.DataFrame) -> pd.DataFrame:
    """Sum the time of an inference server's steps by what they served.

    Parameters
    ----------
    rows : DataFrame
        Steps, as :func:`summary` returns them.

    Returns
    -------
    DataFrame
        ``phase, steps, wall_ns, share, median_ns, idle_ns, tokens, sequences, tokens_per_s``, the most time first: how
        many steps the phase has, the sum of their times, its share of the time of all steps, the medians of a step's
        time, idle time, tokens and sequences, and the tokens of all its steps by their time. Steps without a known
        phase have no row, so shares may sum to less than 1.
    """
    by = rows.groupby("phase")
    table = pd.DataFrame({"steps": by.size(), "wall_ns": by["wall_ns"].sum()})
    table["share"] = table["wall_ns"] / max(rows["wall_ns"].sum(), 1)
    table["median_ns"] = by["wall_ns"].median()
    table[["idle_ns", "tokens", "sequences"]] = by[["idle_ns", "tokens", "sequences"]].median()
    table["tokens_per_s"] = 1e9 * by["tokens"].sum(min_count=1) / table["wall_ns"]
    return table.sort_values("wall_ns", ascending=False).reset_index()


def _served(trace: Trace, windows: pd.DataFrame) -> pd.DataFrame:
    """Phase, tokens and sequences of each step: as its own name says, else as the annotations in it do."""
    served = [_iteration(name) for name in windows["step"]]
    step = np.arange(len(windows))
    if len(windows) and not any(served):
        notes = _annotations(trace, int(windows["thread"].iloc[0]))
        served = [_iteration(name) for name in notes["name"]]
        step = number(windows.assign(end_ns=windows["cpu_end_ns"]), notes["start_ns"])
    rows = []
    for number_of_step, iteration in zip(step, served, strict=True):
        if iteration is not None and number_of_step >= 0:
            rows.append((number_of_step, *iteration))
    table = pd.DataFrame(rows, columns=["at", "phase", "tokens", "sequences"])
    by = table.astype({"phase": object, "tokens": "Int64", "sequences": "Int64"}).groupby("at")
    phase = by["phase"].first()
    # A sum with an unknown part is unknown.
    is_known = by["tokens"].count() == by.size()
    answer = pd.DataFrame(
        {
            "phase": phase.where(by["phase"].nunique() <= 1, "mixed"),
            "tokens": by["tokens"].sum().where(is_known),
            "sequences": by["sequences"].max(),
        }
    ).reindex(range(len(windows)))
    answer["phase"] = answer["phase"].astype(object).where(answer["phase"].notna(), None)
    return answer.astype({"tokens": "Int64", "sequences": "Int64"})


def _annotations(trace: Trace, thread: int) -> pd.DataFrame:
    """An inference server's annotations of its iterations on a thread."""
    ranges = trace.table("ranges", ["name", "start_ns", "end_ns", "thread"])
    ranges = ranges[(ranges["thread"] == thread) & matching(ranges["name"], _VLLM, _SGLANG)]
    ranges = ranges.sort_values(["start_ns", "end_ns"], ascending=[True, False], kind="stable")
    # A server may annotate the same iteration twice, one range in the other.
    outer = ranges[ranges["end_ns"] > ranges["end_ns"].cummax().shift(fill_value=-1)]
    return outer.astype({"name": str})


def _iteration(name: str) -> tuple[str | None, int | None, int] | None:
    """Phase, tokens and sequences that an inference server's annotation states; None for any other range."""
    vllm, sglang = _VLLM.match(name), _SGLANG.match(name)
    if vllm:
        prefills, prefilled, decodes, decoded = (int(group) for group in vllm.groups())
        phase = None
        if prefills and decodes:
            phase = "mixed"
        elif prefills or decodes:
            phase = "prefill" if prefills else "decode"
        return phase, prefilled + decoded, prefills + decodes
    if sglang:
        mode, sequences, tokens = sglang.groups()
        if mode == "DECODE" and tokens is None:
            tokens = sequences  # in plain decoding every sequence gets one token
        return _MODES.get(mode), None if tokens is None else int(tokens), int(sequences)
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
    used = pd.concat([trace.table(table, ["device", "process"]).drop_duplicates() for table in GPU_TABLES])
    own = used[used["process"] == process]
    if len(own):
        used = own
    return sorted(set(used["device"].astype(int).tolist()))


def outliers(wall: np.ndarray) -> np.ndarray:
    """Flag the times that stand out, as :func:`summary` does.

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
