"""The command line: parse, call the analysis, print. Nothing is computed here."""

# Heavy imports (pandas, rich, the analyses) stand inside the commands: `nsightkit --help` must be instant.

from __future__ import annotations

import dataclasses
import functools
import gc
import inspect
import math
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, get_args

import typer

from nsightkit import __version__, answers, configurations, hardware, show, verbs
from nsightkit.errors import UsageError, in_words
from nsightkit.show import Format, bar, discard_stdout, note, plain, printing, progress, write
from nsightkit.verbs import FILTERS, OTHERS, QUESTIONS, Answer, Help, Question

if TYPE_CHECKING:
    from rich.console import Console

    from nsightkit.api import Trace
    from nsightkit.capture.profiling import Captured

__all__ = ["app", "main", "run"]

app = typer.Typer(
    name="nsightkit",
    help=(
        "Turn a GPU profile into an answer. TRACE is an Nsight Systems .sqlite or parquetdir export, a .nsys-rep, "
        "a PyTorch profiler .json or .json.gz, or a folder that `nsightkit convert` wrote."
    ),
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
capture_app = typer.Typer(help="Run a program under a profiler, with the right flags for the installed version.")
app.add_typer(capture_app, name="capture", rich_help_panel="Capturing")

_READING = "Reading a trace"
_CAPTURING = "Capturing"
_TWICE = "Filters: once for both captures, or twice, for BEFORE and for AFTER"
_WITHOUT = "By arithmetic and by measurement"

# typer keeps its own copy of click, or uses the real one, by version: this finds whichever it is.
_ClickException: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


TraceArg = Annotated[Path, Help("The trace; put `--` before a name that begins with a dash.", "TRACE")]
FormatOpt = Annotated[
    Format | None,
    Help("Default: a table on a terminal, csv where the output goes to a file or a pipe.", flag="--format -f"),
]
OverwriteOpt = Annotated[bool, Help("Replace what an earlier run wrote there.")]
NoCacheOpt = Annotated[bool, Help("Neither read nor write the cache beside a big trace.")]


# ---------------------------------------------------------------- shared


class _Session:
    """One command's look at one trace: opens it with its filters, prints its answer."""

    def __init__(
        self,
        trace: TraceArg,
        *,
        format: FormatOpt = None,  # noqa: A002 - the option's name
        no_cache: NoCacheOpt = False,
        **filters: Any,
    ) -> None:
        self.path, self.format = trace, format
        self._cache = False if no_cache else None
        #: the filters as they were given
        self.selection = [f"{_flag(name)} {value}" for name, value in filters.items() if value is not None]
        self._filters = verbs.filters(**filters)

    def open(self) -> Trace:
        """Read the trace, and select."""
        from nsightkit.analysis.timeline.selection import select
        from nsightkit.api import load

        with progress(f"reading {self.path.name}"):
            trace = load(self.path, cache=self._cache)
            return select(trace, **self._filters) if self.selection else trace

    def ask(self, verb: Question, given: dict[str, Any]) -> None:
        """Answer a question and print the answer."""
        trace, several = self.open(), given.pop("changes", ())
        with progress(f"reading {self.path.name}"):
            found = verb.ask(trace, *(several or ()), **given)
        title = " · ".join([trace.title, *self.selection])
        for remark in verb.remarks(trace, found):
            note(f"{self.path}: {remark}")
        if isinstance(found, Answer):
            write(self.format, found, lambda console: answers.print_answer(console, title, found))
            return
        about = found.attrs
        columns, top = [str(c) for c in found.columns], given.get("top")
        shown = [c for c in columns if c not in {*verb.hide, *about.get("hide", ())}]
        few = found.head(show.TABLE_ROWS if top is None else top)
        around = {"total": len(found), "title": title, "note": about.get("note", ""), "empty": verb.empty}
        table = functools.partial(show.print_rows, columns=shown, rows=list(show.rows_of(few)), **around)
        write(self.format, show.rows_of(found), table, columns)


_, _TRACE, _FORMAT, _NO_CACHE, _ = inspect.signature(_Session.__init__, eval_str=True).parameters.values()


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _option(parameter: inspect.Parameter) -> inspect.Parameter:
    """What the command line makes of a parameter: an option if it can only be given by name, else an argument."""
    kind, said = get_args(parameter.annotation)
    default = parameter.default
    if parameter.kind is parameter.VAR_POSITIONAL:
        kind, default = list[kind] | None, None  # type: ignore[valid-type]
    if parameter.kind is parameter.KEYWORD_ONLY:
        flags = (said.flag or _flag(parameter.name)).split()
        shown = typer.Option(*flags, metavar=said.metavar, help=said.text, min=said.minimum, rich_help_panel=said.panel)
    else:
        shown = typer.Argument(metavar=said.metavar, help=said.text, show_default=False)
    return parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=Annotated[kind, shown], default=default)


def _command(
    panel: str | None = None, parameters: Sequence[inspect.Parameter] | None = None, to: typer.Typer = app, **given: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function, with a :class:`Help` in the annotation of each parameter.

    A function whose first parameter is `session_of` gets the filters, as a function that makes a `_Session` of a path.
    """

    def made(function: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(function, eval_str=True).parameters.values())
        filters = [_FORMAT, *FILTERS, _NO_CACHE] if own and own[0].name == "session_of" else []

        @functools.wraps(function)
        def command(**values: Any) -> None:
            shared = {parameter.name: values.pop(parameter.name) for parameter in filters}
            function(*([functools.partial(_Session, **shared)] if filters else []), **values)

        asked = (own[1:] if filters else own) if parameters is None else parameters
        options = [_option(parameter) for parameter in (*asked, *filters)]
        command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        command.__annotations__ = {option.name: option.annotation for option in options}
        to.command(rich_help_panel=panel, **given)(command)
        return function

    return made


def _require_free(out: Path, *, overwrite: bool, traces: Sequence[Path] = (), folder: bool = False) -> None:
    """Refuse a place for a result before anything is read: one that is taken, or where a trace lies."""
    from nsightkit.trace import output, store

    if out.exists() and any(trace.exists() and out.samefile(trace) for trace in traces):
        raise UsageError(f"{out}: is the trace itself; give another name")
    (store if folder else output).require_free(out, overwrite=overwrite)


def _size(out: Path) -> int:
    """Give the bytes of a file, or of the files in a folder."""
    return sum(file.stat().st_size for file in ([out] if out.is_file() else out.iterdir()))


# ---------------------------------------------------------------- questions to a trace


def _ask(verb: Question) -> Callable[..., None]:
    return lambda session_of, trace, **given: session_of(trace).ask(verb, given)


for _verb in QUESTIONS.values():
    _command(_READING, [_TRACE, *_verb.parameters], name=_verb.name, help=_verb.help)(_ask(_verb))


# ---------------------------------------------------------------- other readings


@_command(_READING, [*OTHERS["memory"].parameters, _FORMAT], help=OTHERS["memory"].help)
def memory(snapshot: Path, *, top: int | None, format: Format | None, **given: Any) -> None:  # noqa: A002
    with progress(f"reading {snapshot.name}"):
        result = OTHERS["memory"].ask(snapshot, top=top, **given)
    write(format, result, lambda console: answers.memory(console, snapshot.name, result, top))


@_command(_READING, [*OTHERS["ncu"].parameters, _FORMAT], help=OTHERS["ncu"].help)
def ncu(report: Path, *, top: int | None, format: Format | None, **given: Any) -> None:  # noqa: A002
    with progress(f"reading {report.name}"):
        frame = OTHERS["ncu"].ask(report, **given)
    filters = [f"{_flag(option)} {value}" for option, value in given.items() if value]
    title = " · ".join([frame.attrs["title"], *filters])
    columns, rows = list(frame.columns), list(show.rows_of(frame if top is None else frame.head(top)))
    write(format, rows, lambda console: answers.counters(console, title, columns, rows, len(frame), top), columns)


@_command(_READING)
def diff(
    before: Annotated[Path, Help("A trace, or a memory snapshot.", "BEFORE")],
    after: Annotated[Path, Help("One of the same kind.", "AFTER")],
    *,
    also_before: Annotated[
        list[Path] | None, Help("Another capture of what BEFORE is of; repeatable.", "TRACE")
    ] = None,
    also_after: Annotated[list[Path] | None, Help("Another capture of what AFTER is of; repeatable.", "TRACE")] = None,
    match: Annotated[list[str] | None, Help("The ranges that are steps; once or twice.", "REGEX")] = None,
    steps: Annotated[
        list[int] | None, Help("How many steps there were, where no ranges say so; once or twice.", "N", 1)
    ] = None,
    top: Annotated[int, Help("Rows of a table or of Markdown; CSV and JSON hold all.", "N", 0)] = 8,
    markdown: Annotated[bool, Help("Markdown, for a pull request, in place of a --format.")] = False,
    device: Annotated[list[int] | None, Help("Only GPU operations of device N.", "N", panel=_TWICE)] = None,
    within: Annotated[
        list[str] | None, Help("Only what was launched inside such ranges.", "REGEX", panel=_TWICE)
    ] = None,
    time: Annotated[list[str] | None, Help("Only events that start in this window.", "A:B", panel=_TWICE)] = None,
    last_steps: Annotated[list[int] | None, Help("Only the last N steps.", "N", panel=_TWICE)] = None,
    no_cache: NoCacheOpt = False,
    format: FormatOpt = None,  # noqa: A002
) -> None:
    """What changed between two captures, by how much, and whether that is more than noise."""
    from nsightkit.analysis.compare import diff_words
    from nsightkit.trace.open import kind_of

    if markdown and format is not None:
        raise UsageError("--markdown is a format of its own: leave --format away")
    given: dict[str, Any] = {"match": match, "steps": steps, "within": within, "time": time, "last_steps": last_steps}
    both = {name: _twice(name, values) for name, values in {**given, "device": device}.items()}
    snapshots = [kind_of(path) == "snapshot" for path in (before, after)]
    if all(snapshots):
        given |= {"also_before": also_before, "also_after": also_after}
        if unfit := [name for name, values in given.items() if values]:
            raise UsageError(f"{_flag(unfit[0])}: memory snapshots have no such part; --device is all they take")
        if both["device"][0] != both["device"][1]:
            raise UsageError("--device: one device can be compared, give it once")
        with progress(f"reading {before.name} and {after.name}"):
            from nsightkit.analysis.memory.diff import summary as memory_diff
            from nsightkit.trace import snapshot as reader

            result = memory_diff(reader.read(before), reader.read(after), both["device"][0])
    elif any(snapshots):
        raise UsageError("one of the two is a memory snapshot: two of a kind can be compared")
    else:
        ranges = {"match": both.pop("match"), "steps": both.pop("steps")}
        sides = [
            [_Session(path, no_cache=no_cache, **{name: both[name][side] for name in both}).open() for path in paths]
            for side, paths in enumerate(([before, *(also_before or ())], [after, *(also_after or ())]))
        ]
        with progress("comparing"):
            from nsightkit.analysis.compare.diff import summary as answer

            result = answer(sides[0][0], sides[1][0], also_before=sides[0][1:], also_after=sides[1][1:], **ranges)
    if markdown:
        with printing() as out:
            out.write(diff_words.markdown(result, top))
        return
    title = f"{before.name} → {after.name}"
    columns, rows = answers.diff_rows(result)
    write(format, result, lambda console: answers.diff(console, title, result, top), columns, rows)


def _twice(name: str, values: list[Any] | None) -> tuple[Any, Any]:
    """Take an option that is given once for both sides or once for each; an empty text counts as not given."""
    values = [value if value != "" else None for value in values or [None]]
    if len(values) > 2:
        raise UsageError(f"{_flag(name)}: {len(values)} times is too often; once is for both captures, twice for each")
    return values[0], values[-1]


@_command(_READING)
def check(
    session_of: Callable[..., _Session],
    files: Annotated[
        list[Path],
        Help(
            "Runs of a program: traces, what bench --out-json wrote, or reports or CSVs of ncu. Several are taken "
            "together.",
            "FILE...",
        ),
    ],
    *,
    baseline: Annotated[Path, Help("What earlier runs measured; kept with the program.", "FILE")],
    tolerance: Annotated[float, Help("What may change: 0.05 is 5 %. The baseline may say more.", "X")] = 0.05,
    update: Annotated[bool, Help("Write the baseline: these runs in place of its own.")] = False,
    add: Annotated[bool, Help("Write the baseline: these runs beside its own.")] = False,
    command: Annotated[str | None, Help("With --update: how the runs were made, for a reader.", "TEXT")] = None,
    other: Annotated[
        bool, Help("Compare although GPU, tool or the part looked at differ.", flag="--allow-other-conditions")
    ] = False,
    match: Annotated[str | None, Help("The ranges that are steps; default: those named so.", "REGEX")] = None,
) -> None:
    """Whether a program became slower than a baseline: 0 no, 1 yes or not measured, 2 cannot be said."""
    from nsightkit.analysis.compare import baseline as baselines
    from nsightkit.analysis.compare import runs as run_metrics
    from nsightkit.analysis.compare.check import compare

    writes = update or add
    if command is not None and not writes:
        raise UsageError("--command is kept in the baseline, which is written with --update or --add")
    before = baselines.read(baseline) if baseline.exists() or not writes else None
    session = session_of(files[0])
    said = [*session.selection, *([f"--match {match}"] if match is not None else [])]
    runs = [
        run_metrics.read(
            file, opened=lambda path: session_of(path).open(), match=match, selection=" ".join(said) or None
        )
        for file in files
    ]
    made = baselines.make(runs, before, add=add, command=command) if writes else None
    # A baseline that is written is shown beside the one it replaces, or beside itself.
    held = before if before is not None and (made is None or before.of == made.of) else made
    assert held is not None
    result = compare(held, runs, tolerance, other_conditions=other or made is not None)
    if made is not None:
        baselines.write(made, baseline)
    result |= {"baseline": str(baseline), "written": made is not None}
    rows = [*result["gates"], *result["missing"], *result["informing"]]
    write(session.format, result, lambda console: answers.check(console, result), rows=rows)
    for row in result["conditions"]:
        unsaid = "none" if row["name"] == "selection" else "not said"
        was, now = (row[side] or unsaid for side in ("baseline", "now"))
        note(f"{row['name'].replace('_', ' ')} is not the baseline's: {now}, there {was}")
    if made is not None:
        note(f"{baseline}: written, {made.runs} run{'' if made.runs == 1 else 's'}")
    elif failure := answers.failure(result):
        note(f"the check against {baseline} failed: {failure}")
        raise typer.Exit(1)
    elif result["undecided"]:
        raise UsageError(answers.undecided(result["undecided"][0]))


@_command(_READING)
def ranks(
    traces: Annotated[list[Path], Help("A folder that holds one trace a rank; or the traces.", "DIR")],
    *,
    workers: Annotated[
        int | None,
        Help("Worker processes, 0 for none; default: one per core, none for a handful of ranks.", "N", 0),
    ] = None,
    scheduler: Annotated[
        str | None, Help("A Dask scheduler whose workers see the files under the same paths.", "ADDRESS")
    ] = None,
    each: Annotated[bool, Help("List every collective, not kinds of them.")] = False,
    no_cache: NoCacheOpt = False,
    format: FormatOpt = None,  # noqa: A002
) -> None:
    """Who is late among the ranks of a job, what that costs the others, and why."""
    from nsightkit.analysis.ranks import job as many

    if scheduler is not None and workers is not None:
        raise UsageError("--workers is for this machine: a scheduler has workers of its own")
    files = many.traces_in(traces[0]) if len(traces) == 1 and not traces[0].is_file() else traces
    with bar(len(files)) as shown:
        progress = None if shown is None else (lambda done, _: shown(done, "ranks"))
        job = many.survey(files, scheduler, workers, cache=False if no_cache else None, progress=progress)
    for one in job.lost:
        if one["file"] is not None:
            note(f"{one['file']}: {one['reason']}; the other traces are answered for")
    table = job.collectives if each else job.ranks
    write(
        format,
        job.summary(each),
        lambda console: answers.ranks(console, traces, job, each),
        list(table.columns),
        show.rows_of(table),
    )


@_command(_READING)
def mcp(*, no_cache: NoCacheOpt = False) -> None:
    """Answer the questions above to an agent, over stdin and stdout (Model Context Protocol)."""
    from nsightkit.mcp import serve

    serve(cache=False if no_cache else None)


@_command(_READING)
def convert(
    session_of: Callable[..., _Session],
    trace: TraceArg,
    out: Annotated[Path, Help("NAME.json.gz or NAME.json for Perfetto or Chrome, else a Parquet folder.", "OUT")],
    *,
    overwrite: OverwriteOpt = False,
) -> None:
    """Write a trace, or a part of one, for a timeline viewer or as Parquet tables, without private data."""
    session = session_of(trace)
    chrome = out.name.endswith((".json", ".json.gz"))
    if not chrome and out.suffix not in ("", ".parquet"):
        raise UsageError(f"{out}: the output's name must end in .json.gz, .json or .parquet")
    _require_free(out, overwrite=overwrite, traces=[trace], folder=not chrome)
    opened = session.open()
    with progress(f"writing {out.name}"):
        from nsightkit.trace import chrome as viewer
        from nsightkit.trace import store

        (viewer if chrome else store).write(opened, out, overwrite=overwrite)
    _note_left_out([opened])
    document = {"trace": str(trace), "out": str(out), "bytes": _size(out)}
    write(session.format, document, lambda console: console.print(plain(out)))


def _note_left_out(traces: Sequence[Trace]) -> None:
    """Say what a clean copy or report of some traces does not hold."""
    from nsightkit.trace.clean import left_out

    for sentence in left_out(traces):
        note(sentence)


@_command(_READING)
def report(
    session_of: Callable[..., _Session],
    traces: Annotated[list[Path], Help("Traces of any kind; several lie side by side.", "TRACE...")],
    *,
    output: Annotated[Path, Help("The page to write.", "FILE.html", flag="--output -o")],
    title: Annotated[str | None, Help("What the page is called.", "TEXT")] = None,
    overwrite: OverwriteOpt = False,
) -> None:
    """Write one HTML file to send: the answer, tables and a timeline of one or more traces, without private data."""
    if output.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"{output}: the page's name must end in .html")
    sessions = [session_of(path) for path in traces]
    _require_free(output, overwrite=overwrite, traces=traces)
    opened = [session.open() for session in sessions]
    with progress(f"writing {output.name}"):
        from nsightkit import report as page

        selection = " ".join(sessions[0].selection)
        size = page.write(page.labelled(opened), output, title=title, selection=selection, overwrite=overwrite)
    _note_left_out(opened)
    document = {"traces": [str(path) for path in traces], "out": str(output), "bytes": size}
    write(sessions[0].format, document, lambda console: console.print(plain(output)))


# ---------------------------------------------------------------- commands on this machine


@_command(_CAPTURING)
def doctor(*, format: FormatOpt = None) -> None:  # noqa: A002
    """Check which profilers work on this machine, and how to fix the rest."""
    with progress("looking around"):
        from nsightkit.capture.doctor import report

        rows = report()
    _list(format, rows)


@_command(_READING)
def demo(
    out: Annotated[Path, Help("A folder that does not exist yet.", "[DIR]")] = Path("nsightkit-demo"),
    *,
    format: FormatOpt = None,  # noqa: A002
) -> None:
    """Write two real traces to try: ResNet-50 in training on a V100, before its loader had workers and after."""
    from nsightkit.guide import cases

    copied = cases.demo(out)
    _list(format, [{"trace": str(case.path), "gpu": case.source["gpu"], "from": case.url} for case in copied])


@_command(_WITHOUT)
def peaks(
    gpu: Annotated[str | None, Help("As a driver or a trace names it; default: all that are known.", "[GPU]")] = None,
    *,
    measure: Annotated[
        bool, Help("Measure this machine's GPU instead: a GEMM of each precision and a copy, half a minute.")
    ] = False,
    clock: Annotated[float | None, Help("Rates at this SM clock, not at boost.", "MHZ", 1)] = None,
    format: FormatOpt = None,  # noqa: A002
) -> None:
    """What a GPU can do at best: dense peak rates and memory bandwidth, each with its source."""
    if measure:
        if gpu is not None or clock is not None:
            raise UsageError("--measure takes the GPU that is here, at the clock it has; leave the others away")
        from nsightkit.capture import ceilings

        return _list(format, ceilings.measure(echo=note))
    gpus = hardware.GPUS if gpu is None else (hardware.find(gpu),)
    return _list(format, [row for each in gpus for row in hardware.rows(each, clock)])


@_command(_WITHOUT)
def envelope(
    *,
    config: Annotated[list[str] | None, Help("A configuration, a control or a size; repeatable.", "NAME")] = None,
    format: FormatOpt = None,  # noqa: A002
) -> None:
    """What a model must cost, by arithmetic: parameters, memory, FLOPs, alignment; default: the matrix of ten."""
    from nsightkit.analysis.roofline.envelope import summary as answer

    frame = answer([configurations.find(name) for name in config] if config else configurations.MATRIX)
    rows = list(show.rows_of(frame))

    def table(console: Console) -> None:
        show.print_rows(console, [c for c in frame.columns if c != "notes"], rows)
        show.print_lines(console, [f"{row['config']}: {text}" for row in rows for text in row["notes"] or ()])

    write(format, rows, table, list(frame.columns))


def _list(format: Format | None, rows: list[dict[str, Any]], columns: Sequence[str] = ()) -> None:  # noqa: A002
    """Write a list."""
    names = list(columns or rows[0])
    write(format, rows, lambda console: show.print_rows(console, names, show.ready(rows), empty="none"), names)


@_command(_WITHOUT)
def checklist(*, format: FormatOpt = None) -> None:  # noqa: A002
    """What to do before, at and after a change, so that its result can be believed."""
    from nsightkit.checklist import CHECKLIST

    rows = [{"step": number, **dataclasses.asdict(item)} for number, item in enumerate(CHECKLIST, 1)]
    from rich.padding import Padding

    def table(console: Console) -> None:
        for row in rows:
            console.print(f"{row['step']:>2}. [ ] {row['do']}", style="bold")
            console.print(Padding(row["why"], (0, 0, 0, 8), expand=False))
            if row["command"]:
                console.print(Padding(f"$ {row['command']}", (0, 0, 0, 8), expand=False), style="dim")

    write(format, rows, table)


_BENCH_TABLE = (
    *("config", "batch", "context", "mode", "precision", "status", "median_ns", "std_ns", "first_step_ns"),
    *("tokens_per_s", "peak_allocated_bytes", "peak_reserved_bytes", "mfu_datasheet", "mfu_measured"),
)


@_command(_WITHOUT)
def bench(
    *,
    size: Annotated[
        list[str] | None, Help("A model's size; default: small on a GPU, smoke without one.", "NAME")
    ] = None,
    config: Annotated[list[str] | None, Help("A configuration of the matrix, or a control of one.", "NAME")] = None,
    ctx: Annotated[list[int] | None, Help("Context length; default: the model's own.", "N", 1)] = None,
    batch: Annotated[int | None, Help("Sequences of a forward pass; default: its own.", "N", 1)] = None,
    mode: Annotated[
        list[str] | None, Help("Forward; forward and backward; or these and AdamW, the default.", "fwd|fwd_bwd|train")
    ] = None,
    precision: Annotated[
        list[str] | None,
        Help("bf16 and fp16 are autocast, fp16 with a gradient scaler; default: fp32.", "fp32|tf32|bf16|fp16"),
    ] = None,
    compiled: Annotated[bool, Help("Run the model through torch.compile.", flag="--compile")] = False,
    attention: Annotated[
        Literal["sdpa", "naive"] | None, Help("Fused or unfused; default: sdpa, with --annotate-mha naive.")
    ] = None,
    accumulate: Annotated[int, Help("Forward and backward passes a step.", "N", 1)] = 1,
    warmup: Annotated[int, Help("Steps before the first sample.", "N", 0)] = 5,
    steps: Annotated[int, Help("Steps timed.", "N", 1)] = 10,
    nvtx: Annotated[bool, Help("Mark the timed steps (measure), each step and its phases.")] = False,
    annotate_mha: Annotated[bool, Help("Mark the parts of attention in the forward pass.")] = False,
    device: Annotated[str | None, Help("cpu, cuda or cuda:N; default: a GPU if there is one.", "NAME")] = None,
    memory_cap_gb: Annotated[float | None, Help("Let a model allocate no more than this.", "X")] = None,
    measured_tflops: Annotated[float | None, Help("A ceiling measured on this card, for a second MFU.", "X")] = None,
    timeout_s: Annotated[float, Help("Give a measurement up after N seconds.", "N", 1)] = 600.0,
    out_json: Annotated[Path | None, Help("Write everything, with each step's time.", "FILE")] = None,
    overwrite: OverwriteOpt = False,
    format: FormatOpt = None,  # noqa: A002
) -> None:
    """Time a language model's steps, each combination of the repeatable options in a process of its own."""
    for name, value in (("--memory-cap-gb", memory_cap_gb), ("--measured-tflops", measured_tflops)):
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{name} must be above 0 and finite, not {value:g}")
    if out_json is not None:
        _require_free(out_json, overwrite=overwrite)
    from nsightkit.capture import bench as benchmark
    from nsightkit.capture.children import has_gpu

    names = [configurations.find(name, configurations.SIZES).name for name in size or ()]
    names += [configurations.find(name).name for name in config or ()]
    if not names:
        on_gpu = device != "cpu" and (device is not None or has_gpu())
        names = ["small" if on_gpu else "smoke"]
    cells = benchmark.cells(
        names,
        contexts=ctx or (),
        batch=batch,
        modes=mode or ("train",),
        precisions=precision or ("fp32",),
        attention=attention or ("naive" if annotate_mha else "sdpa"),
        compiled=compiled,
        accumulate=accumulate,
        nvtx=nvtx or annotate_mha,
        annotate_mha=annotate_mha,
    )
    settings = benchmark.Settings(
        device=device,
        warmup=warmup,
        steps=steps,
        memory_cap_bytes=None if memory_cap_gb is None else round(memory_cap_gb * 1e9),
        measured_tflops=measured_tflops,
        timeout_s=timeout_s,
    )
    with bar(len(cells)) as shown:
        document = benchmark.bench(cells, settings, shown)
    if out_json is not None:
        benchmark.write(document, out_json)
    rows = document["rows"]
    write(format, document, functools.partial(_print_bench, document=document), rows=rows)
    failures = [f"{_cell_name(row)} ({row['detail']})" for row in rows if row["status"] == "failed"]
    if failures:
        raise UsageError(f"not measured: {'; '.join(failures)}")


def _print_bench(console: Console, document: dict[str, Any]) -> None:
    shown = []
    details = []
    for row in document["rows"]:
        status = f"{row['status']} in {row['where']}" if row["where"] else row["status"]
        shown.append({**row, "status": status})
        if row["detail"]:
            details.append(f"{_cell_name(row)}: {row['detail']}")
    where = document["gpu"] or "CPU (these times say nothing about a GPU)"
    title = f"{where} · {document['warmup']} warm-up and {document['steps']} timed steps"
    columns = [column for column in _BENCH_TABLE if any(row[column] is not None for row in shown)]
    show.print_rows(console, columns, shown, title=title)
    show.print_lines(console, details)


def _cell_name(row: dict[str, Any]) -> str:
    return f"{row['config']} {row['mode']} {row['precision']}"


_PROGRAM = {"allow_interspersed_args": False}
CommandArg = Annotated[list[str], Help("The program and its arguments.", "-- COMMAND...")]
OutputOpt = Annotated[Path, Help("Name of the report to write.", "NAME", flag="--output -o")]
TimeoutOpt = Annotated[float | None, Help("Interrupt the program after N seconds; default: never.", "N", 0)]
CapturedOpt = Annotated[Format | None, Help("Default: the trace's path.", flag="--format")]


class _ToolCommand(typer.core.TyperCommand):
    """A command whose unknown options are another tool's: nsightkit's own come first, the rest stays as written."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from nsightkit.capture.profiling import separate

        own, rest = separate(args)
        return super().parse_args(ctx, [*own, "--", *rest])


@_command(to=capture_app, name="nsys", cls=_ToolCommand)
def capture_nsys(
    words: Annotated[list[str], Help("Options of `nsys profile`, then the program.", "[NSYS OPTIONS] -- COMMAND...")],
    *,
    output: OutputOpt = Path("nsightkit-capture"),
    timeout_s: TimeoutOpt = None,
    overwrite: OverwriteOpt = False,
    format: CapturedOpt = None,  # noqa: A002
) -> None:
    """Run a program under Nsight Systems; every other option before -- is nsys's own."""
    from nsightkit.capture import nsys, profiling

    nsys_args, program = profiling.split(words)
    _captured(format, nsys.profile(program, output, nsys_args=nsys_args, timeout_s=timeout_s, overwrite=overwrite))


@_command(to=capture_app, name="ncu", cls=_ToolCommand)
def capture_ncu(
    words: Annotated[list[str], Help("Options of ncu, then the program.", "[NCU OPTIONS] -- COMMAND...")],
    *,
    output: OutputOpt = Path("nsightkit-capture"),
    timeout_s: TimeoutOpt = None,
    overwrite: OverwriteOpt = False,
    format: CapturedOpt = None,  # noqa: A002
) -> None:
    """Run a program under Nsight Compute, which replays its kernels; every other option before -- is ncu's own."""
    from nsightkit.capture import ncu, profiling

    ncu_args, program = profiling.split(words)
    _captured(format, ncu.profile(program, output, ncu_args=ncu_args, timeout_s=timeout_s, overwrite=overwrite))


@_command(to=capture_app, name="torch", context_settings=_PROGRAM)
def capture_torch(
    command: CommandArg,
    *,
    output: OutputOpt = Path("nsightkit-capture"),
    record_shapes: Annotated[bool, Help("Record the shapes of operators' inputs.")] = False,
    with_stack: Annotated[
        bool, Help("Record modules and Python functions, for `where`; it slows Python down.")
    ] = False,
    timeout_s: TimeoutOpt = None,
    overwrite: OverwriteOpt = False,
    format: FormatOpt = None,  # noqa: A002
) -> None:
    """Run a Python program under torch.profiler, the whole of it."""
    from nsightkit.capture import torch_profiler

    captured = torch_profiler.profile_command(
        command,
        output,
        record_shapes=record_shapes,
        with_stack=with_stack,
        timeout_s=timeout_s,
        overwrite=overwrite,
    )
    _captured(format, captured)


def _captured(format: Format | None, captured: Captured) -> None:  # noqa: A002
    note(f"ran {shlex.join(captured.ran)}")
    for remark in captured.notes:
        note(remark)
    write(format, dataclasses.asdict(captured), lambda console: console.print(plain(captured.trace), soft_wrap=True))


# ---------------------------------------------------------------- entry


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"nsightkit {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Parameters
    ----------
    arguments : sequence of str, optional
        Without the program's name; default: the process's own.

    Returns
    -------
    int
        0 when all is well, 1 when a check failed, 2 on bad input or usage, 3 on a mistake of nsightkit's own, 130
        when interrupted. What went wrong is one line on stderr; ``NSIGHTKIT_DEBUG=1`` adds the traceback.
    """
    try:
        code = typer.main.get_command(app).main(
            None if arguments is None else list(arguments), prog_name="nsightkit", standalone_mode=False
        )
        return code if isinstance(code, int) else 0
    except _ClickException as error:
        return _failed(error, " ".join(error.format_message().split()) + " (nsightkit --help)")  # type: ignore[attr-defined]
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:
        return _failed(error, *in_words(error))


def _failed(error: Exception, text: str, code: int = 2) -> int:
    if os.environ.get("NSIGHTKIT_DEBUG", "") not in ("", "0"):
        for line in "".join(traceback.format_exception(error)).splitlines():
            print(plain(line), file=sys.stderr)
    note(text)
    return code


def main() -> NoReturn:
    """Run the command line and exit."""
    # Importing pandas makes a hundred thousand objects that stay; looking through them again and again took a tenth
    # of the time of a short command.
    gc.set_threshold(200_000, 20, 20)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us: what is printed goes nowhere
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - until the process ends
    code = run()
    try:
        sys.stdout.flush()
    except OSError:  # which has been said, or is of a reader that left
        discard_stdout()
    sys.exit(code)
