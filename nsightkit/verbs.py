"""The questions that a trace or another file answers, each once: what it needs, what it takes, what it says.

A question is a method of :class:`Questions`, which :class:`nsightkit.api.Trace` has. The decorator :func:`question`
notes what else there is to know of it, and the command line makes a command of each: same names, same options, same
columns, same help. To add a question, write the function that answers it, and a method here. The MCP server makes a
tool of each.
"""

# Annotations are objects here, not text: the command line reads the options from them. Nothing heavy is imported at
# the top, for `nsightkit --help` must be instant.

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Literal, ParamSpec, TypeVar

from nsightkit.analysis.core.text import count_text, time_text
from nsightkit.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

    from nsightkit.analysis.replay.whatif import WhatIf
    from nsightkit.api import Trace

__all__ = ["FILTERS", "OTHERS", "QUESTIONS", "Answer", "Help", "Question", "Questions", "filters", "question"]

P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class Help:
    """What the command line says of an option.

    Parameters
    ----------
    text : str
    metavar : str, optional
        What stands for the value.
    minimum : float, optional
    flag : str, optional
        Its names, where they are not the parameter's, with blanks between.
    panel : str, optional
        The heading that it stands under.
    """

    text: str
    metavar: str | None = None
    minimum: float | None = None
    flag: str | None = None
    panel: str | None = None


class Answer(dict[str, Any]):
    """An answer that is one object: data underneath, prints as the command line would.

    Parameters
    ----------
    values : mapping
    printed_as : str
        The question, which says how to print it.
    title : str
        What was looked at.
    notes : sequence of str
        What belongs below it.
    """

    def __init__(self, values: Mapping[str, Any], printed_as: str, title: str = "", notes: Sequence[str] = ()) -> None:
        super().__init__(values)
        self.printed_as, self.title, self.notes = printed_as, title, list(notes)

    def __repr__(self) -> str:
        from nsightkit.answers import text

        return text(self)

    def _repr_html_(self) -> str:
        from html import escape

        return f'<pre style="font-size: 0.8em">{escape(repr(self))}</pre>'  # as wide as a page of text


@dataclasses.dataclass(frozen=True)
class Question:
    """A question to a trace, or to another file.

    Attributes
    ----------
    name : str
    ask : callable
        The method, or a function of the file's path.
    needs : tuple of str
        Tables without which a part of the answer is missing.
    empty : str
        What to say where a table has no rows.
    hide : tuple of str
        Columns that a table on a terminal leaves out.
    """

    name: str
    ask: Callable[..., Any]
    needs: tuple[str, ...]
    empty: str
    hide: tuple[str, ...]

    @property
    def help(self) -> str:
        """One line that says what it answers."""
        return (inspect.getdoc(self.ask) or "").partition("\n")[0]

    @property
    def parameters(self) -> list[inspect.Parameter]:
        """What it takes, with a :class:`Help` in each annotation."""
        return [p for p in inspect.signature(self.ask).parameters.values() if p.name != "self"]

    def remarks(self, trace: "Trace", found: Any) -> list[str]:
        """What to say beside an answer: what the trace does not hold for it, and what the answer itself remarks.

        Parameters
        ----------
        trace : Trace
        found : Answer or DataFrame
        """
        about = {} if isinstance(found, Answer) else found.attrs
        absent = " or ".join(table for table in about.get("needs") or self.needs if not trace.recorded(table))
        missing = f"the trace holds no record of {absent}, so what depends on it is left out"
        held = [table for table in self.needs if trace.whole is not trace and trace.whole.size(table)]
        emptied = f"the filters leave none of its {' or '.join(held)}"
        said = {missing: bool(absent), emptied: bool(held) and not any(map(trace.size, held))}
        return [*(words for words, holds in said.items() if holds), *about.get("remarks", ())]


#: Every question, in the order in which the command line lists them.
QUESTIONS: dict[str, Question] = {}


def question(
    *needs: str, empty: str = "nothing to list", hide: Sequence[str] = ()
) -> Callable[[Callable[Concatenate[Any, P], R]], Callable[Concatenate[Any, P], R]]:
    """Note a method of :class:`Questions` as a question.

    Parameters
    ----------
    *needs : str
        Tables without which a part of the answer is missing.
    empty : str
        What to say where a table has no rows.
    hide : sequence of str
        Columns that a table on a terminal leaves out.
    """

    def noted(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
        name = method.__name__
        QUESTIONS[name] = Question(name, method, needs, empty, tuple(hide))
        return method

    return noted


def filters(
    *,
    device: Annotated[int | None, Help("Only GPU operations of device N.", "N", panel="Filters")] = None,
    within: Annotated[
        str | None, Help("Only what was launched inside ranges of that name.", "REGEX", panel="Filters")
    ] = None,
    time: Annotated[
        str | None,
        Help(
            "Only events that start in this window of the trace: ns, or with a unit (1.5ms:2s); a side may be empty.",
            "A:B",
            panel="Filters",
        ),
    ] = None,
    last_steps: Annotated[int | None, Help("Only the last N steps.", "N", panel="Filters")] = None,
) -> dict[str, Any]:
    """Read the filters that every question takes, as :func:`~nsightkit.analysis.timeline.selection.select` takes them.

    Parameters
    ----------
    device : int, optional
    within, time : str, optional
    last_steps : int, optional
    """
    window = None if time is None else _window(time)
    return {"device": device, "within": within, "time_ns": window, "last_steps": last_steps}


#: The filters that every question takes.
FILTERS = tuple(inspect.signature(filters).parameters.values())


#: No trace has a later time: times are 64-bit nanoseconds.
_LATEST_NS = (1 << 63) - 1
#: Characters of ``A:B``.
_LONGEST_WINDOW = 100


def _window(text: str) -> tuple[int | None, int | None]:
    """Read ``A:B``; each side is a number of nanoseconds, or a number with a unit, or nothing."""
    from decimal import Decimal

    units = {"": 1, "ns": 1, "us": 10**3, "µs": 10**3, "μs": 10**3, "ms": 10**6, "s": 10**9}
    number = r"\s*(?:(\d+(?:\.\d*)?|\.\d+)\s*(ns|us|µs|μs|ms|s|))?\s*"
    found = None if len(text) > _LONGEST_WINDOW else re.fullmatch(f"{number}:{number}", text)
    if found is None or not (found[1] or found[3]):
        raise UsageError(
            f"--time: {text[:_LONGEST_WINDOW]!r} is not a window A:B in ns or with a unit, such as 1.5ms:2s"
        )
    sides = []
    for amount, unit in ((found[1], found[2]), (found[3], found[4])):
        side = None if amount is None else Decimal(amount) * units[unit]
        if side is not None and side > _LATEST_NS:
            raise UsageError("--time: no trace is so long; give a window A:B such as 1.5ms:2s")
        sides.append(None if side is None else int(side))
    return sides[0], sides[1]


_TOP = Help("Only the first N; default: all, 20 in a table.", "N", 0)
_CARD = Help("The card; default: the one that the trace names.", "NAME")


class Questions:
    """One method a question."""

    @question("kernels", "memops", "graphs")
    def summary(self: "Trace") -> Answer:
        """How long, how busy, how dense, on which GPU, and what was not recorded.

        Examples
        --------
        >>> round(t.summary()["density"], 2)
        0.57
        """
        from nsightkit.analysis.timeline import overview

        found = overview.summary(self)
        apart = overview.note(self, found)
        return Answer(found, "summary", self.title, [*([apart] if apart else []), *self.meta.notes])

    @question("kernels", empty="no kernels")
    def kernels(
        self: "Trace",
        *,
        by: Annotated[Literal["name", "category"], Help("A row for each kernel, or for each kind of work.")] = "name",
        sort: Annotated[Literal["time", "count"], Help("Largest total time, or most launches, first.")] = "time",
        top: Annotated[int | None, _TOP] = None,
    ) -> "pd.DataFrame":
        """Which kernels the GPU's time went to.

        Examples
        --------
        >>> t.kernels(by="category")["name"].tolist()
        ['GEMM']
        """
        from nsightkit.analysis.timeline import kernels

        found = kernels.summary(self, by=by, sort=sort, top=top)
        share = 100 * float(found["share"].sum())
        rows = count_text(len(found), "row")
        note = f"{rows} with {share:.0f} % of all kernel time; kernels that overlap count each in full"
        return _said(found, note, hide=("category",) if by == "category" else ())

    @question("kernels", "calls", empty="no kernels, or no such places recorded")
    def where(
        self: "Trace",
        *,
        by: Annotated[
            Literal["module", "line", "op", "range"] | None,
            Help("The kind of place; default: the finest that divides most of the time."),
        ] = None,
        graph_from: Annotated[
            Path | None, Help("A trace of the same program that holds the capture of its CUDA graphs.", "CAPTURE")
        ] = None,
    ) -> "pd.DataFrame":
        """Which module, line, operator or range of the program the kernels' time belongs to.

        Examples
        --------
        >>> t.where(by="range").columns.tolist()
        ['where', 'phase', 'count', 'gpu_ns', 'share', 'top_kernels']
        """
        from nsightkit.analysis.timeline import where
        from nsightkit.trace.open import load

        found = where.summary(self, by, None if graph_from is None else load(graph_from))
        remarks = [where.remedy(by)] if found.by is None and self.size("kernels") else []
        return _said(found.rows, where.note(found), remarks=remarks, hide=_unsaid(found.rows, "phase"))

    @question("ranges", empty="no ranges", hide=("rule",))
    def ranges(
        self: "Trace",
        *,
        match: Annotated[str | None, Help("Only ranges whose name this finds.", "REGEX")] = None,
        rule: Annotated[
            Literal["window", "thread"],
            Help(
                "Whose GPU work counts: launched inside on the range's own thread (thread, as nsys has it), or also "
                "by threads without ranges, such as autograd's, while it is open (window)."
            ),
        ] = "window",
    ) -> "pd.DataFrame":
        """What each NVTX or record_function range cost, on the CPU and on the GPU.

        Examples
        --------
        >>> t.ranges(match="dataload")["count"].tolist()
        [12]
        """
        from nsightkit.analysis.timeline import ranges

        return _said(
            ranges.summary(self, match=match, rule=rule),
            f"rule: {rule}. total and exclusive are CPU time, which for asynchronous work is the time to launch; "
            "GPU is the union of the work launched inside, GPU span its first start to last end",
        )

    @question("kernels", empty="no gap between the first and the last operation of a GPU")
    def gaps(
        self: "Trace",
        *,
        min_us: Annotated[float, Help("Leave out gaps shorter than this.", "X", 0)] = 0.0,
        each: Annotated[bool, Help("Every gap with its cause and evidence, not sums by cause.")] = False,
    ) -> "pd.DataFrame":
        """Why the GPU was idle: each gap has one cause, with evidence.

        Examples
        --------
        >>> t.gaps()["cause"].iloc[0]
        'input-pipeline'
        """
        from nsightkit.analysis.timeline import gaps

        if not math.isfinite(min_us):
            raise UsageError(f"--min-us: {min_us} is not a length of time; give microseconds, such as 50")
        min_ns = round(min(min_us * 1000, _LATEST_NS))
        if each:
            found = gaps.find(self, min_ns=min_ns)[["device", "start_ns", "end_ns", "cause", "evidence"]]
            count, idle_ns = len(found), int((found["end_ns"] - found["start_ns"]).sum())
        else:
            found = gaps.summary(self, min_ns=min_ns)
            count, idle_ns = int(found["count"].sum()), int(found["total_ns"].sum())
        return _said(found, f"{count:,} gaps, {time_text(idle_ns)} idle")

    @question()
    def verdict(self: "Trace", *, gpu: Annotated[str | None, _CARD] = None) -> Answer:
        """What holds the run back, how sure that is, what speaks against it, and what to change first.

        Examples
        --------
        >>> t.verdict()["confidence"]
        'high'
        """
        from nsightkit.analysis import verdict

        return Answer(verdict.summary(self, gpu), "verdict", self.title)

    @question(
        "kernels",
        "calls",
        empty="none of five common changes is predicted to gain anything; others can be named, such as no-cpu-work",
        hide=("replay_error",),
    )
    def whatif(
        self: "Trace",
        *changes: Annotated[
            str,
            Help(
                "no-input-wait, no-sync, free-launches, overlap-copies, overlap-communication, no-cpu-work, "
                "no-cpu-work:NAME, no-start-up, no-profiler, equal-ranks; several: each alone, then all together. "
                "Default: those of the first five that gain anything.",
                "CHANGE",
            ),
        ],
        without: Annotated[
            str | None, Help("GPU operations, ranges and operators whose name this finds take no time.", "REGEX")
        ] = None,
        scale: Annotated[
            str | None,
            Help("GPU operations whose name this finds take F times as long, such as 0.5.", "REGEX=F"),
        ] = None,
    ) -> "pd.DataFrame":
        """What a change would gain: the recorded run, played again with it.

        Examples
        --------
        >>> t.whatif("no-input-wait")["change"].tolist()
        ['no-input-wait']
        """
        import pandas as pd

        from nsightkit.analysis.replay import whatif

        wanted = whatif.asked(changes, without, scale)
        played = whatif.WhatIf(self)
        rows = whatif.rows(played, wanted)
        unknown = [row["change"] for row in rows if row["speedup"] is None]
        remarks = [f"nothing is predicted: {played.refused}"] if played.refused is not None else []
        if unknown and not remarks:
            remarks = [f"{', '.join(unknown)}: {whatif.UNKNOWN}"]
        found = pd.DataFrame(rows, columns=whatif.COLUMNS, dtype=object)
        return _said(found, " · ".join(_basis(played)), remarks=remarks)

    @question("memops", empty="no copies or memsets")
    def memops(self: "Trace") -> "pd.DataFrame":
        """What copies and memsets moved, and how fast.

        Examples
        --------
        >>> t.memops().columns.tolist()
        ['kind', 'src_kind', 'dst_kind', 'count', 'bytes', 'total_ns', 'gb_per_s']
        """
        from nsightkit.analysis.timeline import memops

        return memops.summary(self)

    @question(
        "kernels",
        empty="no operator with shapes and kernels",
        hide=("bytes", "intensity", "unit", "source", "precision_from", "note"),
    )
    def sol(
        self: "Trace",
        *,
        gpu: Annotated[str | None, _CARD] = None,
        ceilings: Annotated[
            Path | None, Help("That card's own ceilings, as peaks --measure wrote them.", "FILE")
        ] = None,
        precision: Annotated[
            str | None, Help("Of tensors whose type neither the trace nor a kernel tells.", "NAME")
        ] = None,
        clock: Annotated[
            float | None, Help("The SM clock that was measured, for the datasheet's rates at it.", "MHZ")
        ] = None,
        top: Annotated[int | None, _TOP] = None,
    ) -> "pd.DataFrame":
        """How close operators with recorded shapes came to the speed of light.

        Examples
        --------
        >>> len(t.sol(gpu="H100 SXM"))
        0
        """
        from nsightkit.analysis.roofline import sol

        own = None if ceilings is None else sol.read_ceilings(ceilings)
        found = sol.summary(self, gpu, own, precision=precision, clock_mhz=clock)
        notes, remarks = _about_sol(found, self, gpu, clock, precision)
        shown = found if top is None else found.head(top)
        return _said(shown, " · ".join(notes), remarks=remarks, hide=() if ceilings else ("sol_measured",))

    @question("calls", empty="no calls")
    def calls(
        self: "Trace",
        *,
        os: Annotated[bool, Help("Calls of the operating system instead of the CUDA API.")] = False,
    ) -> "pd.DataFrame":
        """Time spent in CUDA API calls, or in calls of the operating system.

        Examples
        --------
        >>> "cudaLaunchKernel" in set(t.calls()["name"])
        True
        """
        from nsightkit.analysis.timeline import calls

        return _said(calls.summary(self, os=os), needs=("os_calls",) if os else ("calls",))

    @question("ranges", "kernels", empty="no step ranges (--match names others)")
    def steps(
        self: "Trace",
        *,
        match: Annotated[str | None, Help("The ranges that are steps; default: those named so.", "REGEX")] = None,
    ) -> "pd.DataFrame":
        """How long each step took, how much of it the GPU was busy, what it served, and which steps stand out.

        Examples
        --------
        >>> len(t.steps())
        12
        """
        from nsightkit.analysis.timeline import steps

        found = steps.summary(self, match=match)
        count, outliers = len(found), int(found["outlier"].sum())
        median = time_text(float(found["wall_ns"].median())) if count else "-"
        counted = f"{count:,} step{'' if count == 1 else 's'}"
        note = f"{counted}, median {median}, {outliers:,} outlier{'' if outliers == 1 else 's'}"
        return _said(found, note, hide=_unsaid(found, "phase", "tokens", "sequences"))


def memory(
    snapshot: Annotated[Path, Help("What torch.cuda.memory._dump_snapshot wrote; nothing in it is run.", "SNAPSHOT")],
    *,
    device: Annotated[int | None, Help("Device N; default: the one with the highest peak.", "N")] = None,
    top: Annotated[int | None, Help("Only the first N sites; default: all, 20 in a table.", "N", 0)] = None,
    moment: Annotated[
        str | None,
        Help(
            "What to look at: peak (the default), oom (the last out-of-memory error), start, end, or an event's "
            "number.",
            "MOMENT",
            flag="--at",
        ),
    ] = None,
) -> Answer:
    """What the GPU's memory was made of at its peak, who allocated it, and what was lost between blocks."""
    from nsightkit.analysis.memory.snapshot import summary
    from nsightkit.trace import snapshot as reader

    looked_at = int(moment) if moment is not None and re.fullmatch(r"-?\d{1,18}", moment) else moment
    found = summary(reader.read(snapshot), device=device, top=top, moment=looked_at)  # type: ignore[arg-type]
    return Answer(found, "memory", snapshot.name)


def ncu(
    report: Annotated[Path, Help("An .ncu-rep, or what ncu --csv printed (--page raw or details).", "REPORT")],
    *,
    kernel: Annotated[str | None, Help("Only kernels whose name this finds.", "REGEX")] = None,
    within: Annotated[str | None, Help("Only launches inside NVTX ranges of that name (ncu --nvtx).", "REGEX")] = None,
    top: Annotated[int | None, Help("Only the N longest; default: all, 20 in a table.", "N", 0)] = None,
) -> "pd.DataFrame":
    """What bounds each kernel that Nsight Compute profiled, on what evidence, and what to try next."""
    from nsightkit.analysis.roofline.counters import summary
    from nsightkit.trace import ncu as reader

    opened = reader.read(report)
    found = summary(opened, kernel=kernel, within=within)
    gpus = list(dict.fromkeys(str(name) for name in opened.launches["gpu"].dropna()))
    found = _said(found if top is None else found.head(top))
    found.attrs["title"] = " · ".join([*gpus[:2], "Nsight Compute", report.name])
    return found


#: Questions to files that are not traces.
OTHERS = {ask.__name__: Question(ask.__name__, ask, (), "no kernels", ()) for ask in (memory, ncu)}


def _said(
    found: "pd.DataFrame",
    note: str = "",
    *,
    remarks: Sequence[str] = (),
    hide: Sequence[str] = (),
    needs: Sequence[str] = (),
) -> "pd.DataFrame":
    """A table with what belongs below it, what to say beside it, and columns that say nothing here."""
    found.attrs = {"note": note if len(found) else "", "remarks": list(remarks), "hide": list(hide), "needs": needs}
    return found


def _unsaid(found: "pd.DataFrame", *columns: str) -> list[str]:
    """Those of the columns that say nothing in any row."""
    return [column for column in columns if found[column].isna().all()]


def _basis(played: "WhatIf") -> Iterator[str]:
    """What a prediction rests on."""
    if played.error is None:
        return
    yield f"played again without a change, the trace comes out {100 * played.error:.1f} % off"
    if inferred := played.schedule.inferred:
        yield f"{inferred:,} wait{'' if inferred == 1 else 's'} inferred"
    if held := int(played.schedule.held_ns.sum()):
        yield f"{time_text(held)} behind work that the trace does not hold"


def _about_sol(
    found: "pd.DataFrame", trace: "Trace", gpu: str | None, clock: float | None, precision: str | None
) -> tuple[list[str], list[str]]:
    """What belongs below a table of operators, and what to say beside it."""
    from nsightkit import hardware
    from nsightkit.analysis.roofline import sol

    if not len(found):
        how = "emit_nvtx(record_shapes=True) or --pytorch=autograd-shapes-nvtx"
        return [], [
            f"no operator has shapes and kernels; record with record_shapes=True, under Nsight Systems with {how}"
        ]
    unknown = found[found["precision_from"] == "unknown"]
    took = time_text(int(unknown["time_ns"].sum())).strip()
    remark = (
        f"{len(unknown):,} operators ({took}) have no share, for what their tensors hold was not recorded; where "
        "it is one type, --precision names it"
    )
    card = gpu or next(each.name for each in trace.meta.gpus if each.name)
    rates = sol.datasheet(hardware.find(card), clock)
    covered = sol.coverage(found, trace)
    least = "" if covered > 0.99 else "at least "
    inside, time_ns, what = sol.watched(trace)
    same = inside.size("kernels") == trace.size("kernels")
    busy = sol.hfu(found if same else sol.summary(inside, gpu, precision=precision), time_ns, rates)
    hfu = (
        f"HFU {least}{100 * busy:.2g} %: their matrix products at the rate of the {rates.source}, of the {what}"
        if busy
        else "none of them is a matrix product, so there is no HFU"
    )
    # In a column they would take the room of all others.
    said = found["note"].replace("", None).value_counts().items()
    notes = [
        f"operators of known cost hold {100 * covered:.1f} % of the kernel time",
        hfu,
        *(f"{count:,} {'row' if count == 1 else 'rows'}: {text}" for text, count in said),
    ]
    return notes, [remark] if len(unknown) else []
