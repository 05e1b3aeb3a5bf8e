"""The steps of a run: how long each took, how much of it the GPU was busy, what it served, and which stand out.

``trace.whole`` is the trace without its filters. What `memoised` functions return must not be changed. The step or row
-1 means none.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.timeline import compiler
from nsightkit.text import compiled, count_text, matching, time_text
from nsightkit.trace.model import GPU_TABLES, Trace, memoised

_PROFILER_STEP = re.compile(r"^ProfilerStep#(\d+)$")
_NAMED_STEP = re.compile(r"(^|[^a-z])step([^a-z]|$)", re.IGNORECASE)
#: Parts of a step that have "step" in their names: `Optimizer.step#AdamW.step`, `lr_scheduler.step`. Warm-up steps
#: are not counted either.
_PART_OF_STEP = re.compile(r"optim|sched|zero_grad|warm[-_ ]?up", re.IGNORECASE)
#: What vLLM calls an iteration: requests in prefill with their tokens, then requests in decode with theirs. Its
#: detailed form counts all tokens first, and more than tokens in the brackets.
_VLLM = re.compile(r"^execute_(?:\d+_)?context_(\d+)\((?:sq)?(\d+)[^()]*\)_generation_(\d+)\((?:sq)?(\d+)[^()]*\)$")
#: What SGLang calls a forward pass: its mode, sequences, and in a prefill its tokens.
_SGLANG = re.compile(r"^step\[([A-Z_]+) bs=(\d+)(?: toks=(\d+))?(?: [^]]*)?\]$")
_PHASE_OF_MODE = {"EXTEND": "prefill", "DECODE": "decode", "TARGET_VERIFY": "decode", "MIXED": "mixed"}

#: A range that launches nothing and is shorter than this share of the median launching step is a stub of the profiler.
_STUB_SHARE = 0.1
#: A step is an outlier if it is this many robust standard deviations off the median (Iglewicz and Hoaglin, 1993) ...
_ROBUST_Z = 3.5
#: ... and this share of the median off it: steps that vary by nanoseconds have no outliers worth a look.
_LEAST_OUTLYING_SHARE = 0.05
#: Fewer steps than this have no median to be far from.
_LEAST_STEPS = 4
#: A program is settled once it has run this many steps.
_STEPS_TO_SETTLE = 2
#: With more steps than this, we need not find out whether the GPU lagged behind when they began: their times show it.
_MOST_FEW_STEPS = 2
#: The longest time that a device takes to start a queued operation.
QUEUED_NS = 20_000
#: How many compiled frames a sentence names.
_MOST_FRAMES = 3
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
    kinds = _step_kind_by_name(ranges["name"].cat.categories.astype(str).tolist(), match)
    steps = ranges[ranges["name"].isin(kinds)].sort_values("start_ns", kind="stable")
    steps["step"] = steps["name"].astype(object)
    steps["kind"] = steps["step"].map(kinds)
    # Keep the kind of step with the most time, then the thread with the most time.
    for column in ("kind", "thread"):
        total_ns = (steps["end_ns"] - steps["start_ns"]).groupby(steps[column], sort=False).sum()
        steps = steps[steps[column].isin(total_ns.nlargest(1).index)]
    # Keep outermost ranges: what ends later than all before it.
    earlier_end = steps["end_ns"].cummax().shift(fill_value=np.iinfo(np.int64).min)
    steps = steps[steps["end_ns"] > earlier_end].reset_index(drop=True)
    steps = steps[~_are_profiler_stubs(trace, steps)].reset_index(drop=True)
    last_end = 0
    if len(steps):
        last_end = steps["end_ns"].max()
    # A window lasts until the next one starts.
    steps["end_ns"] = steps["start_ns"].shift(-1, fill_value=last_end)
    return steps[["step", "start_ns", "end_ns", "process", "thread"]]


def _step_kind_by_name(names: list[str], match: str | None) -> dict[str, str]:
    """Map each range name that is a step's to its kind: ``step 3`` to ``step #``.

    The first expression that finds any name decides: a profiler's steps are certain, names with "step" are likely.
    All iterations of an inference server are of one kind, in prefill as in decode.
    """
    if match is not None:
        pattern = compiled(match, "--match")
        return {name: "" for name in names if pattern.search(name)}  # all of one kind
    kinds: dict[str, str] = {}
    for expression in (_PROFILER_STEP, _NAMED_STEP, _VLLM):
        for name in names:
            if expression.search(name) and not _PART_OF_STEP.search(name):
                is_iteration = _VLLM.match(name) or _SGLANG.match(name)
                kinds[name] = "iteration" if is_iteration else re.sub(r"\d+", "#", name)
        if kinds:
            break
    return kinds


def _are_profiler_stubs(trace: Trace, ranges: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Flag the step ranges, in order of time, that are stubs of the profiler.

    A stub is the rest of a step that the profiler left at the edge of its recording: short, and without launches. It
    must not count as a step, for it would draw the median down.
    """
    length = (ranges["end_ns"] - ranges["start_ns"]).to_numpy()
    # Compare with the longest first, which is at least the median used below: this flags no fewer.
    is_short: npt.NDArray[np.bool_] = length < _STUB_SHARE * length.max(initial=0)
    if not is_short.any():  # nearly always: no need to read who launched what
        return is_short
    # In the whole trace: a step that launched nothing on the selected device is still a step.
    has_launches = np.zeros(len(ranges), bool)
    for table in GPU_TABLES:
        step = launched_in(trace.whole, table, ranges)
        has_launches[step[step >= 0]] = True
    if not has_launches.any():
        return has_launches  # all False: no median to be shorter than
    is_short = length < _STUB_SHARE * np.median(length[has_launches])
    return is_short & ~has_launches


def is_settled(steps: pd.Series) -> npt.NDArray[np.bool_]:
    """Flag the steps that at least two others came before: a compiler that runs in them compiles again.

    PyTorch's profiler numbers its steps from the program's first, so that steps before the recording count too.

    Parameters
    ----------
    steps : Series of str
        Names of all steps, in order of time.
    """
    steps_before = np.arange(len(steps))
    if len(steps) and (profiler_step := _PROFILER_STEP.match(steps.iloc[0])):
        steps_before += int(profiler_step[1])
    return steps_before >= _STEPS_TO_SETTLE


@memoised
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
        ``step, start_ns, cpu_end_ns, begin_ns, end_ns, process, thread``, in order of time. ``end_ns`` is E(k), and
        ``begin_ns``, where the step's time begins, is E(k - 1). The first step's is the start of its range, or, where
        the GPU was still busy with work launched before the recording, the moment when it got to the step's work. The
        first step of a selection begins where it does in the whole trace.

    Raises
    ------
    UsageError
        `match` is not a regular expression.
    """
    table = find(trace, match)
    table["cpu_end_ns"] = table["end_ns"]
    table["begin_ns"] = table["start_ns"]
    if len(table):
        begin = _first_begin_ns(trace, table, match)
        end = np.maximum(_step_ends(trace, table), begin)
        table["end_ns"] = end
        table["begin_ns"] = np.append(begin, end[:-1])
    return table[["step", "start_ns", "cpu_end_ns", "begin_ns", "end_ns", "process", "thread"]]


def _first_begin_ns(trace: Trace, table: pd.DataFrame, match: str | None) -> int:
    """Where the first step's time begins; a selection's first step begins where it does in the whole trace.

    A selection may lack the step before, at whose end that is. Where the whole trace has no such step, the time begins
    with its range.
    """
    start = int(table["start_ns"].iloc[0])
    if trace is trace.whole:
        return max(start, _gpu_reached_ns(trace, table))
    begins = windows(trace.whole, match).set_index("start_ns")["begin_ns"]
    return int(begins.get(start, start))


def _gpu_reached_ns(trace: Trace, windows: pd.DataFrame) -> int:
    """When the GPU got to the first step's work, if that was queued behind work launched before the recording; else 0.

    That moment is the end of the step before, which was not recorded: the end of the last operation ahead of those
    with a recorded launch. Without such operations, but with only one step or two, it is the start of the first
    operation, if every device begins long after its first launch, made in the first step, had returned. With more
    steps, their times show whether the GPU lagged behind. `windows` are as :func:`find` gives them.
    """
    ops = intervals.gpu_intervals(trace)
    ops["launch"] = intervals.launches_of(trace, ops["table"], ops["row"])
    first_launched = ops[ops["launch"] >= 0].groupby("device")["start_ns"].min()
    unrecorded_ends = ops.loc[ops["start_ns"] < ops["device"].map(first_launched), "end_ns"]
    if len(unrecorded_ends):
        reached = int(unrecorded_ends.max())
        # What ends after all steps is not the work of a step before them.
        if reached < windows["end_ns"].iloc[-1]:
            return reached
        return 0
    if first_launched.empty or len(windows) > _MOST_FEW_STEPS:
        return 0
    first_ops = ops.drop_duplicates("device")
    # A device without any recorded launch (-1) gets the last call, which ends too late for work to be queued behind it.
    calls = trace.table("calls", ["start_ns", "end_ns"]).iloc[first_ops["launch"]]
    launch_start = calls["start_ns"].to_numpy()
    was_queued = first_ops["start_ns"].to_numpy() - calls["end_ns"].to_numpy() > QUEUED_NS
    was_queued &= (launch_start >= windows["start_ns"].iloc[0]) & (launch_start < windows["end_ns"].iloc[0])
    if was_queued.all():
        return int(first_ops["start_ns"].min())
    return 0


def _step_ends(trace: Trace, windows: pd.DataFrame) -> npt.NDArray[np.int64]:
    """When steps end: with the last GPU operation that they launched, if it is later; never before an earlier step.

    `windows` are as :func:`find` gives them.
    """
    end = windows["end_ns"].to_numpy(copy=True)
    for table in GPU_TABLES:
        step = launched_in(trace, table, windows)
        op_end = trace.table(table, ["end_ns"])["end_ns"].to_numpy()
        np.maximum.at(end, step[step >= 0], op_end[step >= 0])
    return np.maximum.accumulate(end)


def step_at(windows: pd.DataFrame, time_ns: npt.ArrayLike) -> npt.NDArray[np.intp]:
    """Find the step in which each moment lies.

    Parameters
    ----------
    windows : DataFrame
        ``start_ns`` and ``end_ns`` of steps in order of time: as :func:`find` gives them.
    time_ns : array_like of int

    Returns
    -------
    ndarray of intp
        Row of `windows`; -1 for a moment in none of them.
    """
    time = np.asarray(time_ns, np.int64)
    last_begun = np.searchsorted(windows["start_ns"].to_numpy(), time, side="right") - 1
    # Before all steps this is -1, which picks the last end: add one that no moment comes before.
    end = np.append(windows["end_ns"].to_numpy(), np.iinfo(np.int64).min)
    return np.where(time < end[last_begun], last_begun, -1)


def launched_in(trace: Trace, table: str, windows: pd.DataFrame) -> npt.NDArray[np.intp]:
    """Find the step in which each operation of a GPU table was launched.

    Parameters
    ----------
    trace : Trace
    table : {"kernels", "memops", "graphs"}
    windows : DataFrame
        As :func:`find` or :func:`windows` gives them. Their part on the CPU counts.

    Returns
    -------
    ndarray of intp
        Row of `windows`; -1 for what was launched in none, or by another process.
    """
    cpu_end = windows.get("cpu_end_ns", windows["end_ns"])
    step = step_at(windows.assign(end_ns=cpu_end), intervals.launch_times(trace, table))
    process = trace.table(table, ["process"])["process"].to_numpy()
    # All steps are of one process: see `find`.
    is_own = np.isin(process, windows["process"].to_numpy()[:1])
    if is_own.any():  # if none is, the source records no processes
        step[~is_own] = -1
    return step


def busy_and_idle(trace: Trace, windows: pd.DataFrame, process: int) -> pd.DataFrame:
    """Divide the time of steps into the time in which the GPU worked, and the rest.

    Parameters
    ----------
    trace : Trace
    windows : DataFrame
        As :func:`windows` gives them.
    process : int
        Whose devices count.

    Returns
    -------
    DataFrame
        ``wall_ns, busy_ns, idle_ns``: with several devices sums over them. The last two are NA where no GPU table was
        recorded.
    """
    start = windows["begin_ns"]
    end = windows["end_ns"]
    parts = pd.DataFrame({"wall_ns": end - start, "busy_ns": pd.NA, "idle_ns": pd.NA})
    if len(windows) and any(trace.recorded(table) for table in GPU_TABLES):
        used_devices = devices(trace, process)
        ops = intervals.gpu_intervals(trace)
        busy_ns = np.zeros(len(windows), np.int64)
        for device in used_devices:
            of_device = ops[ops["device"] == device]
            busy_ns += intervals.Coverage(of_device["start_ns"], of_device["end_ns"]).of(start, end)
        parts["busy_ns"] = busy_ns
        # Without any operation, one device was idle all the time.
        parts["idle_ns"] = max(len(used_devices), 1) * parts["wall_ns"] - busy_ns
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
        ``step, start_ns, wall_ns, busy_ns, idle_ns, outlier, phase, tokens, sequences, compile_ns, regions``, in order
        of time.

        ``busy_ns`` is the time in which the GPU worked, for any process; with several devices (those the
        steps' process used) it is the sum over them, and ``idle_ns`` is devices times ``wall_ns`` less it. Both are NA
        where no GPU table was recorded.

        ``outlier``: the wall time is more than 3.5 robust standard deviations (of the median absolute deviation) and
        more than 5% off the median of all steps. The first step is judged like any other. Fewer than four steps have
        no outliers.

        ``phase`` is "prefill", "decode" or "mixed", ``tokens`` and ``sequences`` are counts, as vLLM and SGLang
        annotate their iterations; None and NA without annotations. Of a step that holds several iterations, the
        tokens are summed and the most sequences of any are given.

        ``compile_ns`` is the CPU time of compilers that began in the step, ``regions`` how often it entered code that
        torch.compile made. Both are NA where no step has any.

    Raises
    ------
    UsageError
        `match` is not a regular expression.
    """
    table = windows(trace, match)
    process = 0
    if len(table):
        process = int(table["process"].iloc[0])
    steps = pd.DataFrame({"step": table["step"], "start_ns": table["begin_ns"]})
    steps = steps.join(busy_and_idle(trace, table, process))
    steps["outlier"] = outliers(steps["wall_ns"].to_numpy())
    return steps.join(_served_by_step(trace, table)).join(_compilers_by_step(trace, table))


def _compilers_by_step(trace: Trace, windows: pd.DataFrame) -> pd.DataFrame:
    """Measure how long compilers ran in each step, and count the compiled regions that it entered."""
    compiles = compiler.compiles(trace)
    regions = compiler.regions(trace)
    compile_ns = _sum_by_step(windows, compiles, compiles["end_ns"] - compiles["start_ns"])
    entered = _sum_by_step(windows, regions, pd.Series(1, regions.index))
    return pd.DataFrame({"compile_ns": compile_ns, "regions": entered})


def recompiled(trace: Trace, windows: pd.DataFrame) -> str | None:
    """Write how long compilers ran in settled steps, and which frames they compiled how often; None if they did not.

    Parameters
    ----------
    trace : Trace
    windows : DataFrame
        As :func:`find` or :func:`windows` gives them.
    """
    events = compiler.compiles(trace)
    step = step_at(windows, events["start_ns"])
    is_in_settled = np.append(is_settled(windows["step"]), False)[step]  # the last is for no step, -1
    if not is_in_settled.any():
        return None
    events = events[is_in_settled]
    duration_ns = events["end_ns"] - events["start_ns"]
    step_rows = np.unique(step[is_in_settled])
    first, last = windows["step"].iloc[step_rows[[0, -1]]]
    from_to = ""
    if first != last:
        from_to = f" ({first} to {last})"
    text = f"Compilers ran for {time_text(int(duration_ns.sum()))} in {count_text(len(step_rows), 'step')}{from_to}"
    frames = duration_ns.groupby(events["frame"]).agg(["size", "sum"]).nlargest(_MOST_FRAMES, "sum")
    parts = []
    for frame, count, total_ns in frames.itertuples():
        parts.append(f"frame {frame} {count_text(count, 'time')}, {time_text(total_ns)}")
    if parts:
        return f"{text}: {'; '.join(parts)}"
    return text


def _sum_by_step(windows: pd.DataFrame, events: pd.DataFrame, amount: pd.Series) -> pd.Series:
    """Sum an amount of events over the steps that they begin in; NA where no step has any."""
    step = step_at(windows.assign(end_ns=windows["cpu_end_ns"]), events["start_ns"])
    sums = amount[step >= 0].groupby(step[step >= 0]).sum()
    # 0 in a step without events, but NA in all steps of a trace without any: then perhaps they were not recorded.
    return sums.reindex(windows.index, fill_value=0 if len(sums) else None).astype("Int64")


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
    by_phase = rows.groupby("phase")
    table = pd.DataFrame({"steps": by_phase.size(), "wall_ns": by_phase["wall_ns"].sum()})
    table["share"] = table["wall_ns"] / max(rows["wall_ns"].sum(), 1)
    table["median_ns"] = by_phase["wall_ns"].median()
    table[["idle_ns", "tokens", "sequences"]] = by_phase[["idle_ns", "tokens", "sequences"]].median()
    table["tokens_per_s"] = 1e9 * by_phase["tokens"].sum(min_count=1) / table["wall_ns"]
    return table.sort_values("wall_ns", ascending=False).reset_index()


def _served_by_step(trace: Trace, windows: pd.DataFrame) -> pd.DataFrame:
    """Find phase, tokens and sequences of each step, as an inference server annotates the iterations in it."""
    annotations = _server_annotations(trace, windows["thread"])
    # By its middle: an annotation may begin before the range that counts as the step.
    middle_ns = (annotations["start_ns"] + annotations["end_ns"]) // 2
    step_of_each = step_at(windows.assign(end_ns=windows["cpu_end_ns"]), middle_ns)
    rows = []
    for step, name in zip(step_of_each, annotations["name"], strict=True):
        if step >= 0:
            rows.append((step, *_parse_server_annotation(name)))
    table = pd.DataFrame(rows, columns=["step", "phase", "tokens", "sequences"])
    by_step = table.astype({"phase": object, "tokens": "Int64", "sequences": "Int64"}).groupby("step")
    served = by_step[["phase"]].first()
    served.loc[by_step["phase"].nunique() > 1, "phase"] = "mixed"
    served["tokens"] = by_step["tokens"].sum(min_count=1)
    served["sequences"] = by_step["sequences"].max()
    served = served.reindex(range(len(windows)))
    # pandas marks a missing phase with NaN: answers have None.
    served["phase"] = served["phase"].astype(object).where(served["phase"].notna(), None)
    return served.astype({"tokens": "Int64", "sequences": "Int64"})


def _server_annotations(trace: Trace, threads: pd.Series) -> pd.DataFrame:
    """Find an inference server's annotations of its iterations on some threads, in order of time."""
    ranges = trace.table("ranges", ["name", "start_ns", "end_ns", "thread"])
    ranges = ranges[ranges["thread"].isin(threads) & matching(ranges["name"], _VLLM, _SGLANG)]
    ranges = ranges.sort_values(["start_ns", "end_ns"], ascending=[True, False], kind="stable")
    # A server may annotate the same iteration twice, one range in the other: keep the outer one.
    earlier_end = ranges["end_ns"].cummax().shift(fill_value=-1)
    return ranges[ranges["end_ns"] > earlier_end].astype({"name": str})


def _parse_server_annotation(name: str) -> tuple[str | None, int | None, int]:
    """Read phase, tokens and sequences from the name that vLLM or SGLang gives the range of an iteration.

    The phase is None for an empty iteration or another mode, the tokens are None where the name has none.
    """
    sglang = _SGLANG.match(name)
    if sglang:
        mode, sequences, tokens = sglang.groups()
        if mode == "DECODE" and tokens is None:
            tokens = sequences  # in plain decoding every sequence gets one token
        return _PHASE_OF_MODE.get(mode), None if tokens is None else int(tokens), int(sequences)
    prefills, prefill_tokens, decodes, decode_tokens = map(int, _VLLM.findall(name)[0])
    phase = None
    if prefills and decodes:
        phase = "mixed"
    elif prefills:
        phase = "prefill"
    elif decodes:
        phase = "decode"
    return phase, prefill_tokens + decode_tokens, prefills + decodes


def devices(trace: Trace, process: int) -> list[int]:
    """Find the devices that a process used; all devices if none of their operations is recorded as its own.

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


def outliers(times: np.ndarray) -> np.ndarray:
    """Flag the times that stand out, as :func:`summary` does.

    Parameters
    ----------
    times : ndarray of int or float, shape (n,)

    Returns
    -------
    ndarray of bool, shape (n,)
    """
    if len(times) < _LEAST_STEPS:
        return np.zeros(len(times), bool)
    median = np.median(times)
    deviation = np.abs(times - median)
    sigma = _MAD_TO_SIGMA * np.median(deviation)
    return np.asarray((deviation > _ROBUST_Z * sigma) & (deviation > _LEAST_OUTLYING_SHARE * median))
