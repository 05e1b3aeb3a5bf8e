"""The questions that a trace or another file answers, one plain function each.

The methods of :class:`nsightkit.api.Trace`, the commands and the tools of the MCP server are these functions: options
come from their signatures, help from their docstrings. To add a question, write the analysis and a function here, and
list it in :data:`QUESTIONS` and in :class:`nsightkit.api.Trace`.
"""

# Options are annotated with types and everything else with text: that is how the command line tells them apart.
# Nothing heavy is imported at the top, so that `nsightkit --help` answers at once.

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from nsightkit.errors import UsageError, require_amount
from nsightkit.text import count_text, share_text, time_text

if TYPE_CHECKING:
    from typing import Any

    import pandas as pd

    from nsightkit.analysis.replay.whatif import WhatIf
    from nsightkit.records import Counters, Diff, Memory, Summary, Verdict
    from nsightkit.table import Table
    from nsightkit.text import Json
    from nsightkit.trace.model import Trace

T = TypeVar("T", bound="Trace")

#: The largest 64-bit integer: no trace has a later time.
_LATEST_NS = (1 << 63) - 1
#: Length limit in characters of a window as text: its sides are numbers of a few digits, and float makes more than 308
#: digits infinite.
_MOST_CHARACTERS_OF_WINDOW = 100
#: Nanoseconds of each unit; µ is written as the micro sign or as the Greek letter.
_UNIT_NS = {"ns": 1, "us": 1_000, "µs": 1_000, "μs": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
#: A number and its unit, each optional: two groups.
_MOMENT = r"\s*(?:(\d+(?:\.\d*)?|\.\d+)\s*(ns|us|µs|μs|ms|s)?\s*)?"
_WINDOW = re.compile(f"{_MOMENT}:{_MOMENT}")


# ---------------------------------------------------------------- parts of a trace


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """The part of a trace that a question is about.

    Parameters
    ----------
    device : int, optional
        Only GPU operations of device N.
    within : REGEX, optional
        Only operations launched inside matching ranges.
    time : A:B, optional
        Only events that start in this window of the trace: ns, or with a unit (1.5ms:2s); a side may be empty.
    last_steps : int, optional
        Only the last N steps.
    """

    device: int | None = None
    within: str | None = None
    time: str | None = None
    last_steps: int | None = None

    def __post_init__(self) -> None:
        if self.time is not None:
            _parse_window(self.time)  # refuses a malformed one before a trace is read

    @property
    def words(self) -> list[str]:
        """The filters as they are given on the command line."""
        filters = dataclasses.asdict(self).items()
        return [f"--{name.replace('_', '-')} {value}" for name, value in filters if value is not None]

    def of(self, trace: T) -> T:
        """Give the selected part of a trace."""
        from nsightkit.analysis.timeline.selection import select

        window_ns = None if self.time is None else _parse_window(self.time)
        return select(trace, device=self.device, within=self.within, time_ns=window_ns, last_steps=self.last_steps)


def _parse_window(text: str) -> tuple[int | None, int | None]:
    """Parse ``A:B`` into nanoseconds; a side without a unit is in nanoseconds, and an empty side is None."""
    match = _WINDOW.fullmatch(text) if len(text) <= _MOST_CHARACTERS_OF_WINDOW else None
    if match is None or not (match[1] or match[3]):
        shown = text[:_MOST_CHARACTERS_OF_WINDOW]
        raise UsageError(f"--time: {shown!r} is not a window A:B in ns or with a unit, such as 1.5ms:2s")
    return _moment_ns(match[1], match[2]), _moment_ns(match[3], match[4])


def _moment_ns(number: str | None, unit: str | None) -> int | None:
    """Convert one side of a window to nanoseconds, at most those of 64 bits; None where it is empty."""
    if number is None:
        return None
    return min(round(float(number) * _UNIT_NS[unit or "ns"]), _LATEST_NS)


def title_of(trace: "Trace") -> str:
    """Name the GPUs, the tool and the file of a trace.

    Parameters
    ----------
    trace : Trace
    """
    parts = gpus_of(trace)
    parts.append(f"{trace.meta.tool} {trace.meta.tool_version or ''}".strip())
    if trace.path:
        parts.append(Path(trace.path).name)
    return " · ".join(parts)


def gpus_of(trace: "Trace") -> list[str]:
    """List the names of the GPUs of a trace, each once."""
    return list(dict.fromkeys(gpu.name for gpu in trace.meta.gpus if gpu.name))


def _remarks_on_missing(trace: "Trace", *needs: str) -> list[str]:
    """Write remarks on tables that an answer needs: those the trace lacks, and those that the filters emptied."""
    from nsightkit.trace.model import table_words

    remarks = []
    absent = [table for table in needs if not trace.recorded(table)]
    if absent:
        remarks.append(f"the trace does not record {' or '.join(table_words(absent))}")
    filled = [table for table in needs if trace.whole.size(table)]  # with rows in `whole`, the trace before the filters
    if filled and not any(map(trace.size, filled)):
        remarks.append(f"the filters leave none of its {' or '.join(table_words(filled))}")
    return remarks


def _answer_table(trace: "Trace", rows: "pd.DataFrame", top: int | None, **about: "Any") -> "Table":
    """Make a question's answer from its rows: a table with the trace's title; `about` as :class:`About` takes it."""
    from nsightkit.table import Table

    return Table.of(rows, top, title=title_of(trace), not_recorded=trace.meta.missing, **about)


# ---------------------------------------------------------------- questions to a trace


def summary(trace: "Trace") -> "Summary":
    """Show the GPU's busy and idle time, and list what was not recorded.

    Parameters
    ----------
    trace : Trace

    Examples
    --------
    >>> round(t.summary()["density"], 2)
    0.57
    """
    from nsightkit.analysis.timeline import overview
    from nsightkit.records import Summary
    from nsightkit.table import About

    figures = overview.summary(trace)
    notes = list(trace.meta.notes)
    note = overview.note_on_idle_shares(trace, figures)
    if note is not None:
        notes.insert(0, note)
    remarks = _remarks_on_missing(trace, "kernels", "memops", "graphs")
    return Summary(figures, About(title_of(trace), notes, remarks, not_recorded=trace.meta.missing))


def kernels(
    trace: "Trace",
    *,
    by: Literal["name", "category"] = "name",
    sort: Literal["time", "count"] = "time",
    top: int | None = None,
) -> "Table":
    """Show the kernels, or kinds of kernels, with the most GPU time.

    Parameters
    ----------
    trace : Trace
    by : {"name", "category"}
        A row for each kernel, or for each kind of work.
    sort : {"time", "count"}
        Largest total time, or most launches, first.
    top : int, optional
        Only the first N rows. Default: all; text shows 20.

    Examples
    --------
    >>> t.kernels(by="category")["name"].tolist()
    ['GEMM']
    """
    from nsightkit.analysis.timeline import kernels as analysis
    from nsightkit.table import SHOWN_ROWS

    rows = analysis.summary(trace, by=by, sort=sort)
    shown = rows.head(SHOWN_ROWS if top is None else top)
    share = f"{100 * shown['share'].sum():.0f}% of all kernel time"
    notes = [f"{len(shown):,} of {count_text(len(rows), 'row')}: {share}. Overlapping kernels each count in full"]
    graphs_ns = trace.table("graphs", ["duration_ns"])["duration_ns"].sum()
    if graphs_ns:  # replays of whole graphs, whose kernels the trace does not hold
        notes.append(
            f"CUDA graphs took another {time_text(graphs_ns)}; nsys records their kernels with --cuda-graph-trace=node"
        )
    hidden = ["median_ns", "min_ns", "max_ns", "std_ns"]
    if by == "category":
        hidden.append("category")
    return _answer_table(
        trace,
        rows,
        top,
        notes=notes,
        remarks=_remarks_on_missing(trace, "kernels"),
        empty="no kernels",
        hidden=hidden,
    )


def where(
    trace: "Trace",
    *,
    by: Literal["module", "line", "op", "range"] | None = None,
    graph_from: Path | None = None,
    top: int | None = None,
) -> "Table":
    """Show the modules, lines, operators or ranges that launched the kernels.

    Parameters
    ----------
    trace : Trace
    by : {"module", "line", "op", "range"}, optional
        The kind of place. Default: the finest that divides most of the time.
    graph_from : CAPTURE, optional
        A trace of the same program that holds the capture of its CUDA graphs.
    top : int, optional
        Only the first N rows. Default: all; text shows 20.

    Examples
    --------
    >>> t.where(by="range").columns.tolist()
    ['where', 'phase', 'count', 'gpu_ns', 'share', 'top_kernels']
    """
    from nsightkit.analysis.timeline import where as analysis
    from nsightkit.trace import load

    # No line of code launches the kernels of a replayed CUDA graph: they get the places of the graph's capture, which
    # may be in another trace.
    trace_with_graph_capture = None if graph_from is None else load(graph_from)
    places = analysis.summary(trace, by, trace_with_graph_capture)
    remarks = _remarks_on_missing(trace, "kernels", "calls")
    if places.by is None and trace.size("kernels"):  # the trace records no kind of place
        remarks.append(analysis.REMEDY)
    return _answer_table(
        trace,
        places.rows,
        top,
        notes=[places.note],
        remarks=remarks,
        empty="no kernels with a recorded place",
        hidden=("top_kernels",) if places.by == "line" else (),  # whose room the names of files need
    )


def ranges(
    trace: "Trace",
    *,
    match: str | None = None,
    rule: Literal["window", "thread"] = "window",
    top: int | None = None,
) -> "Table":
    """Show the time of each NVTX or record_function range, on the CPU and on the GPU.

    Parameters
    ----------
    trace : Trace
    match : REGEX, optional
        Only ranges with a matching name.
    rule : {"window", "thread"}
        Which GPU work counts: launched inside the range on its own thread (thread, as nsys does), or also by threads
        without ranges, such as autograd's, while it is open (window).
    top : int, optional
        Only the first N rows. Default: all; text shows 20.

    Examples
    --------
    >>> t.ranges(match="dataload")["count"].tolist()
    [12]
    """
    from nsightkit.analysis.timeline import ranges as analysis

    return _answer_table(
        trace,
        analysis.summary(trace, match=match, rule=rule),
        top,
        notes=[
            "total and exclusive: time on the CPU; for asynchronous work, the time to launch it",
            "GPU: union of the work launched inside; GPU span: its first start to its last end",
        ],
        remarks=_remarks_on_missing(trace, "ranges"),
        empty="no ranges",
        hidden=("domain", "median_ns", "rule"),
    )


def gaps(trace: "Trace", *, min_us: float = 0.0, each: bool = False, top: int | None = None) -> "Table":
    """Explain the GPU's idle time: one cause per gap, with evidence.

    Parameters
    ----------
    trace : Trace
    min_us : float
        Leave out gaps shorter than this.
    each : bool
        List every gap with its cause and evidence, the longest first.
    top : int, optional
        Only the first N rows. Default: all; text shows 20.

    Examples
    --------
    >>> t.gaps()["cause"].iloc[0]
    'input-pipeline'
    """
    from nsightkit.analysis.timeline import gaps as analysis

    if not 0 <= min_us <= _LATEST_NS / 1000:
        raise UsageError(f"--min-us: {min_us} is not a length of time; give microseconds, such as 50")
    min_ns = round(min_us * 1000)
    rows = analysis.summary(trace, min_ns=min_ns)
    count = int(rows["count"].sum())
    idle_ns = rows["total_ns"].sum()
    notes = [f"{count_text(count, 'gap')}, {time_text(idle_ns)} idle, between the first and the last GPU operation"]
    if each:
        notes.append("evidence: what overlaps the gap most → what ended it")
        longest_first = analysis.find(trace, min_ns=min_ns).sort_values("duration_ns", ascending=False, kind="stable")
        rows = longest_first[["device", "start_ns", "duration_ns", "end_ns", "cause", "evidence"]]
    return _answer_table(
        trace,
        rows,
        top,
        notes=notes,
        remarks=_remarks_on_missing(trace, "kernels"),
        empty=f"no gap above {min_us:g} µs between GPU operations",
        formats={} if each else {"cause": _cause_words},  # a gap's evidence needs the room
        hidden=("end_ns",),
    )


def _cause_words(slug: str) -> str:
    """Call a cause of idle time what people call it, with the slug that JSON and options have: words (slug)."""
    from nsightkit.analysis.core.causes import CAUSES

    words = CAUSES[slug].plain_name
    if words == slug:
        return slug
    return f"{words} ({slug})"


def verdict(trace: "Trace", *, gpu: str | None = None, all: bool = False) -> "Verdict":  # noqa: A002 - the option
    """Name the bottleneck, with evidence, and estimate what fixing it would gain.

    Parameters
    ----------
    trace : Trace
    gpu : NAME, optional
        The card. Default: the card named in the trace.
    all : bool
        Print all evidence, doubts and predicted changes. Default: text has the first three of each; JSON has all.

    Examples
    --------
    >>> t.verdict()["confidence"]
    'high'
    """
    from nsightkit.analysis import verdict as analysis
    from nsightkit.records import Verdict
    from nsightkit.table import About

    about = About(title_of(trace), top=None if all else 3, not_recorded=trace.meta.missing)
    return Verdict(analysis.summary(trace, gpu), about)


def whatif(
    trace: "Trace", *changes: str, without: str | None = None, scale: str | None = None, top: int | None = None
) -> "Table":
    """Predict the gain of a change by replaying the recorded run with it.

    Parameters
    ----------
    trace : Trace
    *changes : CHANGE
        no-input-wait, no-sync, free-launches, overlap-copies, overlap-communication, no-cpu-work, no-cpu-work:NAME,
        no-start-up, no-recompilation, no-profiler, equal-ranks (for several GPUs in one trace); several: each alone,
        then all together. Default: all that gain anything, and the largest names of CPU work.
    without : REGEX, optional
        Set the duration of matching GPU operations, ranges and operators to zero.
    scale : REGEX=F, optional
        Multiply the duration of matching GPU operations by F, such as 0.5.
    top : int, optional
        Only the first N rows. Default: all; text shows 20.

    Examples
    --------
    >>> t.whatif("no-input-wait")["change"].tolist()
    ['no-input-wait']
    """
    import pandas as pd

    from nsightkit.analysis.replay import whatif as analysis

    changes_to_predict = analysis.checked_changes(changes, without, scale)
    if "equal-ranks" in changes and trace.table("kernels", ["device"])["device"].nunique() < 2:
        raise UsageError(
            "equal-ranks: the trace has no kernels of a second GPU; for a trace of each rank: nsightkit ranks"
        )
    replay = analysis.WhatIf(trace)
    rows = analysis.rows(replay, changes_to_predict)
    error = replay.error or 0
    remarks = _remarks_on_missing(trace, "kernels", "calls")
    if replay.refused is not None:
        remarks.append(f"nothing is predicted: {replay.refused}")
    return _answer_table(
        trace,
        pd.DataFrame(rows, columns=analysis.COLUMNS, dtype=object),
        top,
        notes=_prediction_basis(replay),
        remarks=remarks,
        empty="No change is predicted to gain anything (nsightkit whatif --help lists them)",
        hidden=("replay_error",),
        formats={
            # `error` is a share of the time, and so is what a change saves, 1 - 1 / speedup. A gain below 0.5 % is
            # written as it is, about 1.00x: that claims nothing.
            "speedup": lambda speedup: "within error" if 0.005 < abs(1 - 1 / speedup) < error else f"{speedup:,.2f}x"
        },
    )


def _prediction_basis(replay: "WhatIf") -> list[str]:
    """Describe in one line what a prediction rests on; no line where the trace could not be replayed."""
    if replay.error is None:
        return []
    basis = f"Replayed without a change, the run is {share_text(replay.error)} off: ignore smaller gains"
    if replay.inferred:
        basis += f" · {count_text(replay.inferred, 'wait')} inferred, as the trace does not record them"
    return [basis]


def memops(trace: "Trace", *, top: int | None = None) -> "Table":
    """Show bytes and bandwidth of copies and memsets.

    Parameters
    ----------
    trace : Trace
    top : int, optional
        Only the first N rows. Default: all; text shows 20.

    Examples
    --------
    >>> t.memops().columns.tolist()
    ['kind', 'src_kind', 'dst_kind', 'count', 'bytes', 'total_ns', 'gb_per_s']
    """
    from nsightkit.analysis.timeline import memops as analysis

    rows = analysis.summary(trace)
    return _answer_table(trace, rows, top, remarks=_remarks_on_missing(trace, "memops"), empty="no copies or memsets")


def sol(trace: "Trace", *, gpu: str | None = None, ceilings: Path | None = None, top: int | None = None) -> "Table":
    """Compare operators with the card's speed of light; needs recorded shapes.

    Parameters
    ----------
    trace : Trace
    gpu : NAME, optional
        The card. Default: the card named in the trace.
    ceilings : FILE, optional
        Measured ceilings of that card, from peaks --measure --format json.
    top : int, optional
        Only the first N rows. Default: all; text shows 20.

    Examples
    --------
    >>> len(t.sol(gpu="H100 SXM"))
    0
    """
    from nsightkit.analysis.roofline import sol as analysis

    measured_ceilings = None if ceilings is None else analysis.read_ceilings(ceilings)
    rows = analysis.summary(trace, gpu, measured_ceilings)
    hidden = ["bytes", "intensity", "note"]
    if ceilings is None:
        hidden.append("sol_measured")
    return _answer_table(
        trace,
        rows,
        top,
        notes=_sol_notes(rows, trace, gpu) if len(rows) else [],
        remarks=_remarks_on_missing(trace, "kernels"),
        empty="no operator with shapes and kernels: record with nsightkit capture torch --record-shapes",
        hidden=hidden,
    )


def _sol_notes(rows: "pd.DataFrame", trace: "Trace", gpu: str | None) -> list[str]:
    """Write notes on the answer's rows: the card that was asked for, the kernel time they cover, and their remarks."""
    from nsightkit import hardware

    kernels_ns = trace.table("kernels", ["duration_ns"])["duration_ns"].sum()
    notes = [f"operators of known cost take {share_text(rows['time_ns'].sum() / kernels_ns)} of the kernel time"]
    # Not as a column, which would take the room of all others. None: value_counts leaves empty remarks out.
    for text, count in rows["note"].replace("", None).value_counts().items():
        notes.append(f"{count_text(int(count), 'operator')}: {text}")
    if gpu is not None:
        notes.insert(0, f"compared with the peaks of {hardware.find(gpu).name}")
    return notes


def calls(trace: "Trace", *, os: bool = False, top: int | None = None) -> "Table":
    """Show the time spent in CUDA API calls or in operating system calls.

    Parameters
    ----------
    trace : Trace
    os : bool
        Calls of the operating system, which only Nsight Systems records, instead of the CUDA API.
    top : int, optional
        Only the first N rows. Default: all; text shows 20.

    Examples
    --------
    >>> "cudaLaunchKernel" in set(t.calls()["name"])
    True
    """
    from nsightkit.analysis.timeline import calls as analysis

    rows = analysis.summary(trace, os=os)
    remarks = _remarks_on_missing(trace, "os_calls" if os else "calls")
    return _answer_table(
        trace,
        rows,
        top,
        notes=["summed over all threads, waits included"],
        remarks=remarks,
        empty="no calls recorded",
    )


def steps(
    trace: "Trace", *, match: str | None = None, weights_gb: float | None = None, top: int | None = None
) -> "Table":
    """Show the time, GPU busy time and tokens of each step, and mark outliers.

    Parameters
    ----------
    trace : Trace
    match : REGEX, optional
        Ranges to treat as steps. Default: ranges that are named like steps.
    weights_gb : GB, optional
        Weights that a decode step reads (active experts only), for the least time it can take on this card.
    top : int, optional
        Only the first N rows. Default: all; text shows 20.

    Examples
    --------
    >>> len(t.steps())
    12
    """
    from nsightkit.analysis.timeline import steps as analysis
    from nsightkit.table import rows_of

    rows = analysis.summary(trace, match=match)
    floor_ns = None if weights_gb is None else _decode_floor_ns(trace, weights_gb)  # the least time of a decode step
    notes = []
    if len(rows) > 1:
        median = time_text(rows["wall_ns"][~rows["outlier"]].median())
        notes.append(f"{count_text(len(rows), 'step')}, median {median} without outliers")
    if len(rows):
        notes.append("a step lasts until the GPU work launched in it ends")
        first = analysis.windows(trace, match).iloc[0]
        if first["begin_ns"] > first["start_ns"]:
            notes.append(
                f"the first step's range begins at {first['start_ns'] / 1e6:,.3f} ms, "
                "the step itself once the GPU has finished earlier work"
            )
    recompilations = analysis.recompiled(trace, analysis.find(trace, match))
    if recompilations is not None:
        notes.append(recompilations)
    for phase in rows_of(analysis.phases(rows)):
        notes.append(_phase_text(phase))
        if floor_ns is not None and phase["phase"] == "decode":
            ratio = phase["median_ns"] / floor_ns
            at_best = f"Reading {weights_gb:g} GB of weights takes {time_text(floor_ns)}"
            notes.append(f"{at_best}; the median decode step takes {ratio:.1f}x as long")
    return _answer_table(
        trace,
        rows,
        top,
        notes=notes,
        remarks=_remarks_on_missing(trace, "ranges", "kernels"),
        empty="no ranges are named like steps; choose others with --match REGEX",
    )


def _decode_floor_ns(trace: "Trace", weights_gb: float) -> float:
    """Compute the least time of a decode step: reading its weights (10**9 bytes) at the card's memory bandwidth."""
    from nsightkit import hardware

    require_amount("--weights-gb", weights_gb)
    names = gpus_of(trace)
    if not names:
        raise UsageError("--weights-gb: the trace does not name its GPU, so its memory bandwidth is unknown")
    return 1e9 * weights_gb / hardware.find(names[0]).gb_per_s  # GB / (GB/s) in ns


def _phase_text(phase: "Json") -> str:
    """Describe the steps of one phase of an inference server, such as decode; what is None was not recorded."""
    text = f"{phase['phase']}: {count_text(phase['steps'], 'step')}, median {time_text(phase['median_ns'])}"
    if phase["idle_ns"] is not None:
        text += f", idle {time_text(phase['idle_ns'])}"
    if phase["tokens_per_s"] is not None:
        text += f", {phase['tokens_per_s']:,.0f} tokens/s"
    return text


# ---------------------------------------------------------------- questions to two traces, and to other files


def diff(
    before: "Trace",
    after: "Trace",
    *,
    also_before: "Sequence[Trace]" = (),
    also_after: "Sequence[Trace]" = (),
    match: str | None = None,
    top: int | None = None,
) -> "Diff":
    """Compare two captures, and separate changes from noise.

    Parameters
    ----------
    before : BEFORE
        A trace.
    after : AFTER
        A trace of the same program, after the change.
    also_before : TRACE, optional
        Another capture of the program before the change; repeatable.
    also_after : TRACE, optional
        Another capture of the program after the change; repeatable.
    match : REGEX, optional
        Ranges to treat as steps. Default: ranges that are named like steps.
    top : int, optional
        Rows of each table in text. Default: 8.
    """
    from nsightkit.analysis.compare import diff as analysis
    from nsightkit.records import Diff
    from nsightkit.table import About

    compared = analysis.compare(before, after, also_before=also_before, also_after=also_after, match=match)
    title = " → ".join(Path(trace.path or "trace").name for trace in (before, after))
    missing = {"before": before.meta.missing, "after": after.meta.missing}
    return Diff(compared.summary(), About(title, top=top, not_recorded=missing))


def memory(snapshot: Path, *, device: int | None = None, at: str | None = None, top: int | None = None) -> "Memory":
    """Show the contents of GPU memory at its peak, the lines that allocated them, and fragmentation.

    Parameters
    ----------
    snapshot : SNAPSHOT
        What torch.cuda.memory._dump_snapshot wrote; nothing in it is run.
    device : int, optional
        Device N. Default: the one with the highest peak.
    at : MOMENT, optional
        What to look at: peak (the default), oom (the last out-of-memory error), start, end, or an event's number.
    top : int, optional
        Only the first N sites. Default: all; text shows 20.
    """
    from nsightkit.analysis.memory.snapshot import summary as analysis
    from nsightkit.records import Memory
    from nsightkit.table import About
    from nsightkit.trace import snapshot as reader

    # The number of an event, which has at most 18 digits so that it fits 64 bits; or a word.
    moment = int(at) if at is not None and re.fullmatch(r"-?\d{1,18}", at) else at
    amounts = analysis(reader.read(snapshot), device=device, top=top, moment=moment)  # type: ignore[arg-type]
    return Memory(amounts, About(snapshot.name, top=top))


def ncu(report: Path, *, kernel: str | None = None, within: str | None = None, top: int | None = None) -> "Counters":
    """Show the limiter of each profiled kernel, the counters behind it, and next steps.

    Parameters
    ----------
    report : REPORT
        An .ncu-rep, or what ncu --csv --page=raw printed.
    kernel : REGEX, optional
        Only kernels with a matching name.
    within : REGEX, optional
        Only launches inside NVTX ranges of that name (ncu --nvtx).
    top : int, optional
        Only the N longest. Default: all; text shows 20.
    """
    from nsightkit.analysis.roofline.counters import summary as analysis
    from nsightkit.records import Counters
    from nsightkit.trace import ncu as reader

    opened = reader.read(report)
    gpus = opened.launches["gpu"].dropna().unique()
    title = " · ".join([*gpus[:2], "Nsight Compute", report.name])  # more than two names would make it too long
    rows = analysis(opened, kernel=kernel, within=within)
    return Counters.of(rows, top, title=title, empty="no kernels", hidden=("evidence", "next_steps"))


def _by_name(functions: Sequence["Any"]) -> dict[str, "Any"]:
    """Key functions by their names."""
    return {function.__name__: function for function in functions}


#: Questions to a trace, in the order in which the command line lists them.
QUESTIONS = _by_name([summary, kernels, where, ranges, gaps, verdict, whatif, memops, sol, calls, steps])
#: Questions to files that are not traces.
FILES = _by_name([memory, ncu])
