"""The command line: parse, call the analysis, print. Nothing is computed here."""

# Heavy imports (pandas, rich, the analyses) stand inside the commands: `nsightkit --help` must be instant.

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import os
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, get_args

import typer

from nsightkit.errors import NsightkitError, UsageError, reading
from nsightkit.verbs import QUESTIONS, Question

if TYPE_CHECKING:
    from rich.console import Console

    from nsightkit.api import Trace
    from nsightkit.capture.captured import Captured

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
#: Metrics that a table of a check tells beside those that can fail.
_INFORMING = 10

# typer keeps its own copy of click, or uses the real one, by version: this finds whichever it is.
_ClickException: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


Format = Literal["table", "csv", "json"]
TraceArg = Annotated[
    Path, typer.Argument(metavar="TRACE", help="The trace; put `--` before a name that begins with a dash.")
]
FormatOpt = Annotated[
    Format | None,
    typer.Option(
        "--format",
        "-f",
        help="Default: a table on a terminal, csv where the output goes to a file or a pipe.",
        show_default=False,
    ),
]
DeviceOpt = Annotated[
    int | None,
    typer.Option("--device", metavar="N", help="Only GPU operations of device N.", rich_help_panel="Filters"),
]
WithinOpt = Annotated[
    str | None,
    typer.Option(
        "--within",
        metavar="REGEX",
        help="Only what was launched inside ranges of that name.",
        rich_help_panel="Filters",
    ),
]
TimeOpt = Annotated[
    str | None,
    typer.Option(
        "--time",
        metavar="A:B",
        help="Only events that start in this window of the trace: ns, or with a unit (1.5ms:2s); a side may be empty.",
        rich_help_panel="Filters",
    ),
]
LastStepsOpt = Annotated[
    int | None,
    typer.Option("--last-steps", metavar="N", help="Only the last N steps.", rich_help_panel="Filters"),
]
NoCacheOpt = Annotated[bool, typer.Option("--no-cache", help="Neither read nor write the cache beside a big trace.")]
MatchOpt = Annotated[str | None, typer.Option("--match", metavar="REGEX", help="Only ranges whose name this finds.")]


# ---------------------------------------------------------------- shared


class _Session:
    """One command's look at one trace: opens it with its filters, prints its answer."""

    def __init__(
        self,
        trace: TraceArg,
        *,
        format: FormatOpt = None,  # noqa: A002 - the option's name
        device: DeviceOpt = None,
        within: WithinOpt = None,
        time: TimeOpt = None,
        last_steps: LastStepsOpt = None,
        no_cache: NoCacheOpt = False,
    ) -> None:
        self.path = trace
        self.format = _format(format)
        self._cache = False if no_cache else None
        self._shown = {"device": device, "within": within, "time": time, "last-steps": last_steps}
        window = None if time is None else _window(time)
        self._select: dict[str, Any] = {"device": device, "within": within, "time_ns": window, "last_steps": last_steps}

    def open(self) -> Trace:
        """Read the trace; what goes wrong with the file becomes a `TraceError` that names it."""
        from nsightkit.analysis.timeline.selection import select
        from nsightkit.api import load

        with _progress(f"reading {self.path.name}"), reading(self.path):
            trace = load(self.path, cache=self._cache)
            if all(value is None for value in self._select.values()):
                return trace
            chosen: Trace = select(trace, **self._select)
            return chosen

    def ask(self, verb: Question, given: dict[str, Any]) -> None:
        """Answer a question and print the answer."""
        from nsightkit import _answers, _show
        from nsightkit.verbs import Answer

        trace, several = self.open(), given.pop("changes", ())
        with _progress(f"reading {self.path.name}"):
            found = verb.ask(trace, *(several or ()), **given)
        title = " · ".join([trace.title, *self.selection])
        about = {} if isinstance(found, Answer) else found.attrs
        absent = [table for table in about.get("needs", verb.needs) if not trace.recorded(table)]
        if absent:
            _note(f"{self.path}: the trace holds no record of {' or '.join(absent)}, so what depends on it is left out")
        for remark in about.get("remarks", ()):
            _note(f"{self.path}: {remark}")
        if isinstance(found, Answer):
            _emit(self.format, found, lambda console: getattr(_answers, verb.name)(console, title, found))
            return
        columns, top = [str(c) for c in found.columns], given.get("top")
        with _printing():
            if self.format == "json":
                _show.write_json(_show.rows_of(found), _show.utf8(sys.stdout))
            elif self.format == "csv":
                _show.write_csv(columns, _show.rows_of(found), _show.utf8(sys.stdout))
            else:
                hidden = {*verb.hide, *about.get("hide", ())}
                shown = found.head(_show.TABLE_ROWS if top is None else top)
                _show.print_rows(
                    _console(),
                    [c for c in columns if c not in hidden],
                    list(_show.rows_of(shown)),
                    total=len(found),
                    title=title,
                    note=about.get("note", ""),
                    empty=verb.empty,
                )

    @property
    def selection(self) -> list[str]:
        """The filters as they were given."""
        return [f"--{name} {value}" for name, value in self._shown.items() if value is not None]


def _format(given: Format | None) -> Format:
    if given is not None:
        return given
    return "table" if sys.stdout.isatty() else "csv"


def _window(text: str) -> tuple[int | None, int | None]:
    """Read ``A:B``; each side is a number of nanoseconds, or a number with a unit, or nothing."""
    from decimal import Decimal

    units = {"": 1, "ns": 1, "us": 10**3, "µs": 10**3, "μs": 10**3, "ms": 10**6, "s": 10**9}
    number = r"\s*(?:(\d+(?:\.\d*)?|\.\d+)\s*(ns|us|µs|μs|ms|s|))?\s*"
    found = re.fullmatch(f"{number}:{number}", text)
    if found is None or not (found[1] or found[3]):
        raise UsageError(f"--time: {text!r} is not a window A:B in ns or with a unit, such as 1.5ms:2s")
    begin, end = (
        None if amount is None else int(Decimal(amount) * units[unit])
        for amount, unit in ((found[1], found[2]), (found[3], found[4]))
    )
    return begin, end


@contextlib.contextmanager
def _progress(text: str) -> Iterator[None]:
    """Show on a terminal's stderr that something goes on, once it has for a second."""
    if not sys.stderr.isatty():
        yield
        return
    lock = threading.Lock()
    status: Any = None
    over = False

    def show() -> None:
        nonlocal status
        from rich.console import Console
        from rich.markup import escape

        with lock:
            if not over:
                status = Console(stderr=True).status(escape(_one_line(text)) + " …")
                status.start()

    timer = threading.Timer(1.0, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with lock:
            over = True
            if status is not None:
                status.stop()


@contextlib.contextmanager
def _printing() -> Iterator[None]:
    """Print to a reader that may leave early (``| head``) without complaint."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more when it exits; that must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _console() -> Console:
    from rich.console import Console

    from nsightkit._show import utf8

    return Console(file=utf8(sys.stdout), highlight=False, markup=False, emoji=False)


def _one_line(text: object) -> str:
    """Make a message one line of printable text, whatever a file's name holds."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def _note(text: str) -> None:
    print(f"nsightkit: {_one_line(text)}", file=sys.stderr)


def _emit(format: Format | None, result: Mapping[str, Any], table: Callable[[Console], None]) -> None:  # noqa: A002
    """Print one object."""
    from nsightkit import _show

    result = _show.ready(result)
    with _printing():
        chosen = _format(format)
        if chosen == "json":
            _show.write_json(result, _show.utf8(sys.stdout))
        elif chosen == "csv":
            _show.write_csv(list(result), [result], _show.utf8(sys.stdout))
        else:
            table(_console())


def _emit_list(
    format: Format | None,  # noqa: A002
    rows: list[dict[str, Any]],
    columns: list[str],
    empty: str = "none",
    below: Mapping[str, str] | None = None,
) -> None:
    """Print a list of plain dicts; `below` are columns (with a row's name) that a table says in lines of their own."""
    from nsightkit import _show

    rows = [_show.ready(row) for row in rows]
    with _printing():
        chosen = _format(format)
        if chosen == "json":
            _show.write_json(rows, _show.utf8(sys.stdout))
        elif chosen == "csv":
            _show.write_csv(columns, rows, _show.utf8(sys.stdout))
        else:
            console, apart = _console(), below or {}
            _show.print_rows(console, [c for c in columns if c not in apart], rows, empty=empty)
            for column, name in apart.items():
                for row in rows:
                    for text in row[column] or ():
                        console.print(_show.plain(f"{row[name]}: {text}"), style="dim")


_SHARED = list(inspect.signature(_Session.__init__, eval_str=True).parameters.values())[1:]


def _on_trace(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command of a function of a `_Session`: adds TRACE, the filters and what every command takes."""

    @functools.wraps(function)
    def command(**given: Any) -> None:
        function(_Session(**{shared.name: given.pop(shared.name) for shared in _SHARED}), **given)

    _sign(command, list(inspect.signature(function, eval_str=True).parameters.values())[1:])
    return command


def _sign(command: Callable[..., None], own: Sequence[inspect.Parameter]) -> None:
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (_SHARED[0], *own, *_SHARED[1:])]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}


# ---------------------------------------------------------------- questions to a trace


def _option(parameter: inspect.Parameter) -> inspect.Parameter:
    """What the command line makes of a parameter of a question."""
    kind, told = get_args(parameter.annotation)
    if parameter.kind is parameter.VAR_POSITIONAL:
        argument = typer.Argument(metavar=told.metavar, help=told.text, show_default=False)
        return parameter.replace(
            kind=parameter.KEYWORD_ONLY, annotation=Annotated[list[str] | None, argument], default=None
        )
    flag = f"--{parameter.name.replace('_', '-')}"
    option = typer.Option(flag, metavar=told.metavar, help=told.text, min=told.minimum)
    return parameter.replace(annotation=Annotated[kind, option])


def _command(verb: Question) -> Callable[..., None]:
    def command(**given: Any) -> None:
        _Session(**{shared.name: given.pop(shared.name) for shared in _SHARED}).ask(verb, given)

    _sign(command, [_option(parameter) for parameter in verb.parameters])
    return command


for _verb in QUESTIONS.values():
    app.command(_verb.name, help=_verb.help, rich_help_panel=_READING)(_command(_verb))


# ---------------------------------------------------------------- other readings


@app.command(rich_help_panel=_READING)
def memory(
    snapshot: Annotated[
        Path,
        typer.Argument(metavar="SNAPSHOT", help="What torch.cuda.memory._dump_snapshot wrote; nothing in it is run."),
    ],
    device: Annotated[
        int | None,
        typer.Option("--device", metavar="N", help="Device N; default: the one with the highest peak."),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option("--top", metavar="N", min=0, help="Only the first N sites; default: all, 20 in a table."),
    ] = None,
    moment: Annotated[
        str | None,
        typer.Option(
            "--at",
            metavar="MOMENT",
            help="What to look at: peak (the default), oom (the last out-of-memory error), start, end, or an event's "
            "number.",
        ),
    ] = None,
    format: FormatOpt = None,  # noqa: A002
) -> None:
    """What the GPU's memory was made of at its peak, who allocated it, and what was lost between blocks."""
    from nsightkit import _answers

    looked_at = int(moment) if moment is not None and re.fullmatch(r"-?\d{1,18}", moment) else moment
    with _progress(f"reading {snapshot.name}"):
        from nsightkit.analysis.memory.snapshot import summary as answer
        from nsightkit.trace import snapshot as reader

        with reading(snapshot):
            taken = reader.read(snapshot)
        result = answer(taken, device=device, top=top, moment=looked_at)  # type: ignore[arg-type]
    _emit(format, result, lambda console: _answers.memory(console, snapshot.name, result, top))


@app.command(rich_help_panel=_READING)
def ncu(
    report: Annotated[
        Path, typer.Argument(metavar="REPORT", help="An .ncu-rep, or what ncu --csv printed (--page raw or details).")
    ],
    kernel: Annotated[
        str | None, typer.Option("--kernel", metavar="REGEX", help="Only kernels whose name this finds.")
    ] = None,
    within: Annotated[
        str | None,
        typer.Option("--within", metavar="REGEX", help="Only launches inside NVTX ranges of that name (ncu --nvtx)."),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option("--top", metavar="N", min=0, help="Only the N longest; default: all, 20 in a table."),
    ] = None,
    format: FormatOpt = None,  # noqa: A002
) -> None:
    """What bounds each kernel that Nsight Compute profiled, on what evidence, and what to try next."""
    from nsightkit import _show

    with _progress(f"reading {report.name}"):
        from nsightkit.analysis.roofline.counters import summary as answer
        from nsightkit.trace import ncu as reader

        with reading(report):
            opened = reader.read(report)
        frame = answer(opened, kernel=kernel, within=within)
    columns = [str(c) for c in frame.columns]
    rows = list(_show.rows_of(frame if top is None else frame.head(top)))
    if _format(format) != "table":
        _emit_list(format, rows, columns)
        return
    with _printing():
        console, shown = _console(), rows if top is not None else rows[: _show.TABLE_ROWS]
        gpus = list(dict.fromkeys(str(name) for name in opened.launches["gpu"].dropna()))
        chosen = [f"--{option} {given}" for option, given in (("kernel", kernel), ("within", within)) if given]
        title = " · ".join([*gpus[:2], "Nsight Compute", report.name, *chosen])
        figures = [c for c in columns if c not in ("evidence", "next_steps")]
        _show.print_rows(console, figures, shown, total=len(frame), title=title, empty="no kernels")
        for row in shown:
            console.print()
            console.print(_show.plain(f"{row['kernel']}: {row['classification']}"), style="bold")
            for sign, key in (("-", "evidence"), ("→", "next_steps")):
                for text in row[key]:
                    console.print(_show.plain(f"{sign} {text}"), style="dim" if key == "evidence" else "")


@app.command(rich_help_panel=_READING)
def diff(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help="A trace, or a memory snapshot.")],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help="One of the same kind.")],
    *,
    also_before: Annotated[
        list[Path] | None,
        typer.Option("--also-before", metavar="TRACE", help="Another capture of what BEFORE is of; repeatable."),
    ] = None,
    also_after: Annotated[
        list[Path] | None,
        typer.Option("--also-after", metavar="TRACE", help="Another capture of what AFTER is of; repeatable."),
    ] = None,
    match: Annotated[
        list[str] | None, typer.Option("--match", metavar="REGEX", help="The ranges that are steps; once or twice.")
    ] = None,
    steps: Annotated[
        list[int] | None,
        typer.Option(
            "--steps", metavar="N", min=1, help="How many steps there were, where no ranges say so; once or twice."
        ),
    ] = None,
    top: Annotated[
        int, typer.Option("--top", metavar="N", min=0, help="Rows of a table or of Markdown; CSV and JSON hold all.")
    ] = 8,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Markdown, for a pull request, in place of a --format.")
    ] = False,
    device: Annotated[
        list[int] | None,
        typer.Option("--device", metavar="N", help="Only GPU operations of device N.", rich_help_panel=_TWICE),
    ] = None,
    within: Annotated[
        list[str] | None,
        typer.Option(
            "--within", metavar="REGEX", help="Only what was launched inside such ranges.", rich_help_panel=_TWICE
        ),
    ] = None,
    time: Annotated[
        list[str] | None,
        typer.Option("--time", metavar="A:B", help="Only events that start in this window.", rich_help_panel=_TWICE),
    ] = None,
    last_steps: Annotated[
        list[int] | None,
        typer.Option("--last-steps", metavar="N", help="Only the last N steps.", rich_help_panel=_TWICE),
    ] = None,
    no_cache: NoCacheOpt = False,
    format: FormatOpt = None,  # noqa: A002
) -> None:
    """What changed between two captures, by how much, and whether that is more than noise."""
    from nsightkit import _answers, _show
    from nsightkit.analysis.compare import words as diff_text

    if markdown and format is not None:
        raise UsageError("--markdown is a format of its own: leave --format away")
    given = {"--match": match, "--steps": steps, "--within": within, "--time": time, "--last-steps": last_steps}
    both = {name: _twice(name, values) for name, values in {**given, "--device": device}.items()}
    snapshots = [_is_pickle(path) for path in (before, after)]
    if all(snapshots):
        needless = [name for name, values in given.items() if values]
        needless += ["--also-before"] if also_before else ["--also-after"] if also_after else []
        if needless:
            raise UsageError(f"{needless[0]}: memory snapshots have no such part; --device is all they take")
        result = _diff_of_memory((before, after), both["--device"])
    elif any(snapshots):
        raise UsageError("one of the two is a memory snapshot: two of a kind can be compared")
    else:
        sides = [
            [_diff_side(path, both, no_cache, side) for path in paths]
            for side, paths in enumerate(([before, *(also_before or ())], [after, *(also_after or ())]))
        ]
        with _progress("comparing"):
            from nsightkit.analysis.compare.diff import summary as answer

            also = {"also_before": sides[0][1:], "also_after": sides[1][1:]}
            result = answer(sides[0][0], sides[1][0], **also, match=both["--match"], steps=both["--steps"])
    if markdown:
        with _printing():
            _show.utf8(sys.stdout).write(diff_text.markdown(result, top))
        return
    if _format(format) == "csv":
        with _printing():
            _answers.diff_as_csv(result, _show.utf8(sys.stdout))
        return
    title = f"{before.name} → {after.name}"
    _emit(format, result, lambda console: _answers.diff(console, title, result, top))


def _twice(option: str, values: list[Any] | None) -> tuple[Any, Any]:
    """Take an option that is given once for both sides or once for each; an empty text counts as not given."""
    values = [value if value != "" else None for value in values or [None]]
    if len(values) > 2:
        raise UsageError(f"{option}: {len(values)} times is too often; once is for both captures, twice for each")
    return values[0], values[-1]


def _is_pickle(path: Path) -> bool:
    """Whether a file begins as a pickle does, as a memory snapshot does; a file that cannot be read does not."""
    try:
        with path.open("rb") as stream:
            head = stream.read(2)
    except OSError:
        return False
    return len(head) == 2 and head[0] == 0x80 and 2 <= head[1] <= 5


def _diff_side(path: Path, both: Mapping[str, tuple[Any, Any]], no_cache: bool, side: int) -> Trace:
    """Open one capture with the filters of its side."""
    session = _Session(
        path,
        device=both["--device"][side],
        within=both["--within"][side],
        time=both["--time"][side],
        last_steps=both["--last-steps"][side],
        no_cache=no_cache,
    )
    return session.open()


def _diff_of_memory(paths: tuple[Path, Path], devices: tuple[Any, Any]) -> dict[str, Any]:
    from nsightkit.analysis.memory import diff as diff_memory
    from nsightkit.trace import snapshot as reader

    opened = []
    for path in paths:
        with _progress(f"reading {path.name}"), reading(path):
            opened.append(reader.read(path))
    if devices[0] != devices[1]:
        raise UsageError("--device: one device can be compared, give it once")
    return diff_memory.summary(opened[0], opened[1], devices[0])


def _opener(session: _Session) -> Callable[[Path], Trace]:
    return lambda _: session.open()


@app.command(rich_help_panel=_READING)
def check(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Runs of a program: traces, what bench --out-json wrote, or reports or CSVs of ncu. Several are taken "
            "together.",
        ),
    ],
    baseline: Annotated[
        Path, typer.Option("--baseline", metavar="FILE", help="What earlier runs measured; kept with the program.")
    ],
    *,
    tolerance: Annotated[
        float, typer.Option("--tolerance", metavar="X", help="What may change: 0.05 is 5 %. The baseline may say more.")
    ] = 0.05,
    update: Annotated[
        bool, typer.Option("--update", help="Write the baseline: these runs in place of its own.")
    ] = False,
    add: Annotated[bool, typer.Option("--add", help="Write the baseline: these runs beside its own.")] = False,
    command: Annotated[
        str | None,
        typer.Option("--command", metavar="TEXT", help="With --update: how the runs were made, for a reader."),
    ] = None,
    other: Annotated[
        bool,
        typer.Option("--allow-other-conditions", help="Compare although GPU, tool or the part looked at differ."),
    ] = False,
    match: Annotated[
        str | None, typer.Option("--match", metavar="REGEX", help="The ranges that are steps; default: those named so.")
    ] = None,
    device: DeviceOpt = None,
    within: WithinOpt = None,
    time: TimeOpt = None,
    last_steps: LastStepsOpt = None,
    no_cache: NoCacheOpt = False,
    format: FormatOpt = None,  # noqa: A002
) -> None:
    """Whether a program became slower than a baseline: 0 no, 1 yes or not measured, 2 cannot be said."""
    from nsightkit import _answers
    from nsightkit.analysis.compare import baseline as baselines
    from nsightkit.analysis.compare import runs as run_metrics
    from nsightkit.analysis.compare.check import compare

    if command is not None and not (update or add):
        raise UsageError("--command is kept in the baseline, which is written with --update or --add")
    before = None
    if baseline.exists() or not (update or add):
        before = baselines.read(baseline)
    runs = []
    for file in files:
        session = _Session(
            file,
            format=format,
            device=device,
            within=within,
            time=time,
            last_steps=last_steps,
            no_cache=no_cache,
        )
        said = [*session.selection, *([f"--match {match}"] if match is not None else [])]
        with reading(file):
            runs.append(
                run_metrics.read(
                    file,
                    opened=_opener(session),
                    match=match,
                    selection=" ".join(said) or None,
                )
            )
    made = baselines.make(runs, before, add=add, command=command) if update or add else None
    # A baseline that is written is shown beside the one it replaces, or beside itself.
    held = before if before is not None and (made is None or before.of == made.of) else made
    assert held is not None
    result = compare(held, runs, tolerance, other_conditions=other or made is not None)
    if made is not None:
        baselines.write(made, baseline)
    result |= {"baseline": str(baseline), "written": made is not None}
    if _format(format) == "csv":
        rows = [*result["gates"], *result["missing"], *result["informing"]]
        _emit_list("csv", rows, list(rows[0]) if rows else [])
    else:
        _emit(format, result, lambda console: _answers.check(console, result))
    for row in result["conditions"]:
        unsaid = "none" if row["name"] == "selection" else "not said"
        was, now = (row[side] or unsaid for side in ("baseline", "now"))
        _note(f"{row['name'].replace('_', ' ')} is not the baseline's: {now}, there {was}")
    if made is not None:
        _note(f"{baseline}: written, {made.runs} run{'' if made.runs == 1 else 's'}")
        return
    failed = [*result["regressions"], *result["missing"]]
    if failed:
        listed = ", ".join(f"{row['metric']} ({_answers.changed(row) or row['status']})" for row in failed[:3])
        more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
        alone = result["runs"] == result["baseline_runs"] == 1 and any(
            row["unit"] == "ns" for row in result["regressions"]
        )
        # A clock or a neighbour makes one run slower, too.
        unsaid = "; one run on each side, so differences between runs are not known" if alone else ""
        _note(f"the check against {baseline} failed: {listed}{more}{unsaid}")
        raise typer.Exit(1)
    if result["undecided"]:
        raise UsageError(_answers.undecided(result["undecided"][0]))


@app.command(rich_help_panel=_READING)
def ranks(
    traces: Annotated[
        list[Path], typer.Argument(metavar="DIR", help="A folder that holds one trace a rank; or the traces.")
    ],
    *,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            metavar="N",
            min=0,
            help="Processes of a local Dask cluster, 0 for none; default: one a core, none for a handful of ranks.",
            show_default=False,
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            "--scheduler", metavar="ADDRESS", help="A Dask scheduler whose workers see the files under the same paths."
        ),
    ] = None,
    each: Annotated[bool, typer.Option("--each", help="List every collective, not kinds of them.")] = False,
    no_cache: NoCacheOpt = False,
    format: FormatOpt = None,  # noqa: A002
) -> None:
    """Who is late among the ranks of a job, what that costs the others, and why."""
    from nsightkit import _answers, _show
    from nsightkit.analysis.ranks import job as many

    if scheduler is not None and workers is not None:
        raise UsageError("--workers is for a local cluster: a scheduler has workers of its own")
    files = many.traces_in(traces[0]) if len(traces) == 1 and not traces[0].is_file() else traces
    with _bar(len(files)) as shown:
        progress = None if shown is None else (lambda done, _: shown(done, "ranks"))
        job = many.survey(files, scheduler, workers, cache=False if no_cache else None, progress=progress)
    for one in job.lost:
        if one["file"] is not None:
            _note(f"{one['file']}: {one['reason']}; the other ranks are answered for")
    if _format(format) == "csv":
        table = job.collectives if each else job.ranks
        with _printing():
            _show.write_csv([str(c) for c in table.columns], _show.rows_of(table), _show.utf8(sys.stdout))
        return
    _emit(format, job.summary(each), lambda console: _answers.ranks(console, traces, job, each))


@app.command(rich_help_panel=_READING)
@_on_trace
def convert(
    session: _Session,
    *,
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="NAME.json.gz or NAME.json for Perfetto or Chrome, else a Parquet folder."),
    ],
) -> None:
    """Write a trace, or a part of one, for a timeline viewer or as Parquet tables; it holds no secrets (see scrub)."""
    chrome = out.name.endswith((".json", ".json.gz"))
    if not chrome and out.suffix not in ("", ".parquet"):
        raise UsageError(f"{out}: the output's name must end in .json.gz, .json or .parquet")
    if out.exists() and session.path.exists() and out.samefile(session.path):
        raise UsageError(f"{out}: the output would replace the trace; give another name")
    if chrome and out.is_dir():
        raise UsageError(f"{out}: is a folder; give a file name")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"{out}: its folder does not exist; make it first")

    def write(opened: Trace) -> int:
        try:
            if chrome:
                from nsightkit.trace import chrome as writer

                writer.write(opened, out)
                return out.stat().st_size
            from nsightkit.trace import store

            store.write(opened, out)
            return sum(file.stat().st_size for file in out.iterdir())
        except OSError as error:
            raise UsageError(f"{out}: cannot be written ({error.strerror or error})") from error

    opened = session.open()
    with _progress(f"writing {out.name}"):
        size = write(opened)
    _emit(
        session.format,
        {"trace": str(session.path), "out": str(out), "bytes": size},
        lambda console: console.print(_one_line(out)),
    )


@app.command(rich_help_panel=_READING)
def scrub(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE", help="An export, a JSON trace, a folder of convert's, a memory snapshot, or a CSV of ncu."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The copy, of the same kind.")],
    *,
    overwrite: Annotated[bool, typer.Option("--overwrite", "--force", help="Replace what is there.")] = False,
    format: FormatOpt = None,  # noqa: A002
) -> None:
    """Write a copy that is safe to share: no environment, host, user, paths or tokens; the same answers."""
    with _progress(f"scrubbing {trace.name}"), reading(trace):
        from nsightkit.trace import share as scrubbing

        copied = scrubbing.copy(trace, out, overwrite=overwrite)
        files = [out] if out.is_file() else list(out.iterdir())
        size = sum(file.stat().st_size for file in files)

    def table(console: Console) -> None:
        from nsightkit import _show

        columns = ["kind", "place", "count"]
        _show.print_rows(
            console,
            columns,
            copied.removed,
            title=_one_line(f"removed from {trace.name}"),
            empty="there was nothing to remove",
        )
        console.print(_one_line(out))

    _emit(format, {"trace": str(trace), "out": str(out), "bytes": size, "removed": copied.removed}, table)


@app.command(rich_help_panel=_READING)
def report(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE...", help="Traces of any kind; several lie side by side.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.html", help="The page to write.")],
    *,
    title: Annotated[str | None, typer.Option("--title", metavar="TEXT", help="What the page is called.")] = None,
    device: DeviceOpt = None,
    within: WithinOpt = None,
    time: TimeOpt = None,
    last_steps: LastStepsOpt = None,
    no_cache: NoCacheOpt = False,
    format: FormatOpt = None,  # noqa: A002
) -> None:
    """Write one HTML file to send: the answer, the tables and a timeline of one or more traces, without secrets."""
    if output.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"{output}: the page's name must end in .html")
    if not output.absolute().parent.is_dir():
        raise UsageError(f"{output}: its folder does not exist; make it first")
    select = {"device": device, "within": within, "time": time, "last_steps": last_steps, "no_cache": no_cache}
    sessions = [_Session(path, format=format, **select) for path in traces]  # type: ignore[arg-type]
    for session in sessions:
        if output.exists() and session.path.exists() and output.samefile(session.path):
            raise UsageError(f"{output}: the page would replace a trace; give another name")
    opened = [session.open() for session in sessions]
    with _progress(f"writing {output.name}"):
        from nsightkit import report as page

        size = page.write(page.labelled(opened), output, title=title, selection=" ".join(sessions[0].selection))
    _emit(
        format,
        {"traces": [str(path) for path in traces], "out": str(output), "bytes": size},
        lambda console: console.print(_one_line(output)),
    )


# ---------------------------------------------------------------- commands on this machine


@app.command(rich_help_panel=_CAPTURING)
def doctor(format: FormatOpt = None) -> None:  # noqa: A002
    """Say what on this machine can capture what, and what to fix."""
    with _progress("looking around"):
        from nsightkit.capture import doctor as capture_doctor

        rows = capture_doctor.report()
    _emit_list(format, rows, ["check", "status", "found", "remedy"])


@app.command(rich_help_panel=_CAPTURING)
def record(
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="NAME", help="An investigation or one of its parts; repeatable."),
    ] = None,
    budget_s: Annotated[
        float | None, typer.Option("--budget-s", metavar="N", min=0.0, help="Stop starting parts after N seconds.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where recordings go; default: docs/recordings.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Go through all parts, small, on the CPU; keeps no recording.")
    ] = False,
    format: FormatOpt = None,  # noqa: A002
) -> None:
    """Make the guide's recordings on this machine's GPU; what is current is kept."""
    from nsightkit.investigations import record as capture_record

    rows = capture_record.record(only or None, budget_s, out, dry_run=dry_run, echo=_note)
    _emit_list(format, rows, ["investigation", "part", "status", "seconds", "detail"])
    failed = [f"{row['investigation']}/{row['part']}" for row in rows if row["status"] == "failed"]
    if failed:
        raise UsageError(f"not recorded: {', '.join(failed)}; the table says why")


@app.command(rich_help_panel=_WITHOUT)
def peaks(
    gpu: Annotated[
        str | None,
        typer.Argument(metavar="[GPU]", help="As a driver or a trace names it; default: all that are known."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine's GPU instead: GEMMs and transfers, some minutes.")
    ] = False,
    clock: Annotated[
        float | None, typer.Option("--clock", metavar="MHZ", min=1, help="Rates at this SM clock, not at boost.")
    ] = None,
    format: FormatOpt = None,  # noqa: A002
) -> None:
    """What a GPU can do at best: dense peak rates and memory bandwidth, each with its source."""
    from nsightkit import hardware

    if measure:
        if gpu is not None or clock is not None:
            raise UsageError("--measure takes the GPU that is here, at the clock it has; leave the others away")
        from nsightkit.investigations.measured_peaks import measure as measure_peaks

        listed = measure_peaks(echo=_note)
        _emit_list(format, listed, list(listed[0]))
        return
    gpus = hardware.GPUS if gpu is None else (hardware.find(gpu),)
    listed = [row for each in gpus for row in hardware.rows(each, clock)]
    _emit_list(format, listed, list(listed[0]))


@app.command(rich_help_panel=_WITHOUT)
def envelope(
    config: Annotated[
        list[str] | None,
        typer.Option("--config", metavar="NAME", help="A configuration, a control or a size; repeatable."),
    ] = None,
    format: FormatOpt = None,  # noqa: A002
) -> None:
    """What a model must cost, by arithmetic: parameters, memory, FLOPs, alignment; default: the matrix of ten."""
    from nsightkit import _show, configurations
    from nsightkit.analysis.roofline.envelope import summary as answer

    frame = answer([configurations.find(name) for name in config] if config else configurations.MATRIX)
    columns = [str(column) for column in frame.columns]
    _emit_list(format, list(_show.rows_of(frame)), columns, below={"notes": "config"})


@app.command(rich_help_panel=_WITHOUT)
def checklist(format: FormatOpt = None) -> None:  # noqa: A002
    """What to do before, at and after a change, so that its result can be believed."""
    import dataclasses

    from nsightkit.checklist import CHECKLIST

    rows = [{"step": number, **dataclasses.asdict(item)} for number, item in enumerate(CHECKLIST, 1)]
    if _format(format) != "table":
        _emit_list(format, rows, list(rows[0]))
        return
    from rich.padding import Padding

    with _printing():
        console = _console()
        for row in rows:
            console.print(f"{row['step']:>2}. [ ] {row['do']}", style="bold")
            console.print(Padding(row["why"], (0, 0, 0, 8), expand=False))
            if row["command"]:
                console.print(Padding(f"$ {row['command']}", (0, 0, 0, 8), expand=False), style="dim")


_BENCH_TABLE = (
    *("config", "batch", "context", "mode", "precision", "status", "median_ns", "std_ns", "first_step_ns"),
    *("tokens_per_s", "peak_allocated_bytes", "peak_reserved_bytes", "mfu_datasheet", "mfu_measured"),
)


@app.command(rich_help_panel=_WITHOUT)
def bench(
    size: Annotated[
        list[str] | None,
        typer.Option("--size", metavar="NAME", help="A model's size; default: small on a GPU, smoke without one."),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option("--config", metavar="NAME", help="A configuration of the matrix, or a control of one."),
    ] = None,
    ctx: Annotated[
        list[int] | None, typer.Option("--ctx", metavar="N", min=1, help="Context length; default: the model's own.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", metavar="N", min=1, help="Sequences of a forward pass; default: its own.")
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            "--mode",
            metavar="fwd|fwd_bwd|train",
            help="Forward; forward and backward; or these and AdamW, the default.",
        ),
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            "--precision",
            metavar="fp32|tf32|bf16|fp16",
            help="bf16 and fp16 are autocast, fp16 with a gradient scaler; default: fp32.",
        ),
    ] = None,
    *,
    compiled: Annotated[bool, typer.Option("--compile", help="Run the model through torch.compile.")] = False,
    attention: Annotated[
        Literal["sdpa", "naive"] | None,
        typer.Option(
            "--attention", help="Fused or written out; default: sdpa, with --annotate-mha naive.", show_default=False
        ),
    ] = None,
    accumulate: Annotated[
        int, typer.Option("--accumulate", metavar="N", min=1, help="Forward and backward passes a step.")
    ] = 1,
    warmup: Annotated[int, typer.Option("--warmup", metavar="N", min=0, help="Steps before the first sample.")] = 5,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Steps timed.")] = 10,
    nvtx: Annotated[
        bool, typer.Option("--nvtx", help="Mark the timed steps (measure), each step and its phases.")
    ] = False,
    annotate_mha: Annotated[
        bool, typer.Option("--annotate-mha", help="Mark the parts of attention in the forward pass.")
    ] = False,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="NAME", help="cpu, cuda or cuda:N; default: a GPU if there is one."),
    ] = None,
    memory_cap_gb: Annotated[
        float | None, typer.Option("--memory-cap-gb", metavar="X", help="Let a model allocate no more than this.")
    ] = None,
    measured_tflops: Annotated[
        float | None,
        typer.Option("--measured-tflops", metavar="X", help="A ceiling measured on this card, for a second MFU."),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", metavar="N", min=1.0, help="Give a measurement up after N seconds.")
    ] = 600.0,
    out_json: Annotated[
        Path | None, typer.Option("--out-json", metavar="FILE", help="Write everything, with each step's time.")
    ] = None,
    format: FormatOpt = None,  # noqa: A002
) -> None:
    """Time a language model's steps, each combination of the repeatable options in a process of its own."""
    from nsightkit import _show, configurations
    from nsightkit.capture import bench as benchmark
    from nsightkit.capture.children import has_gpu

    for name, value in (("--memory-cap-gb", memory_cap_gb), ("--measured-tflops", measured_tflops)):
        if value is not None and not value > 0:
            raise UsageError(f"{name} must be above 0, not {value:g}")
    if out_json is not None and not out_json.absolute().parent.is_dir():
        raise UsageError(f"{out_json}: its folder does not exist; make it first")
    models = [configurations.find(name, configurations.SIZES).name for name in size or ()]
    models += [configurations.find(name).name for name in config or ()]
    if not models:
        models = ["small" if device != "cpu" and (device or has_gpu()) else "smoke"]
    chosen = benchmark.cells(
        models,
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
    with _bar(len(chosen)) as progress:
        document = benchmark.bench(
            chosen,
            device=device,
            warmup=warmup,
            steps=steps,
            memory_cap_bytes=None if memory_cap_gb is None else round(memory_cap_gb * 1e9),
            measured_tflops=measured_tflops,
            timeout_s=timeout_s,
            progress=progress,
        )
    if out_json is not None:
        benchmark.write(document, out_json)
    rows = document["rows"]
    if _format(format) == "json":
        _emit("json", document, lambda _: None)
    elif _format(format) == "csv":
        _emit_list("csv", rows, list(rows[0]))
    else:
        shown = [
            row | {"status": f"{row['status']} in {row['where']}" if row["where"] else row["status"]} for row in rows
        ]
        columns = [c for c in _BENCH_TABLE if any(row[c] is not None for row in shown)]
        with _printing():
            where = document["gpu"] or "CPU (these times say nothing about a GPU)"
            console = _console()
            _show.print_rows(console, columns, shown, title=f"{where} · {warmup} warm-up and {steps} timed steps")
            for row in rows:
                if row["detail"]:
                    text = f"{row['config']} {row['mode']} {row['precision']}: {row['detail']}"
                    console.print(_show.plain(text), style="dim")
    failed = [
        f"{row['config']} {row['mode']} {row['precision']} ({row['detail']})"
        for row in rows
        if row["status"] == "failed"
    ]
    if failed:
        raise UsageError(f"not measured: {'; '.join(failed)}")


@contextlib.contextmanager
def _bar(total: int) -> Iterator[Callable[[int, str], None] | None]:
    """Show on a terminal's stderr how many of some measurements are done, and which is next."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=total)
        yield lambda done, text: shown.update(task, completed=done, description=escape(text))


_PROGRAM = {"allow_interspersed_args": False}
CommandArg = Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="The program and its arguments.")]
OutputOpt = Annotated[Path, typer.Option("--output", "-o", metavar="NAME", help="Name of the report to write.")]
OverwriteOpt = Annotated[bool, typer.Option("--overwrite", help="Replace an existing report.")]
TimeoutOpt = Annotated[float, typer.Option("--timeout-s", metavar="N", min=0.0, help="Give up after N seconds.")]


@capture_app.command("nsys", context_settings=_PROGRAM)
def capture_nsys(
    command: CommandArg,
    *,
    output: OutputOpt = Path("nsightkit-capture"),
    trace: Annotated[str, typer.Option("--trace", metavar="LIST", help="What nsys traces.")] = "cuda,nvtx,osrt",
    capture_range: Annotated[
        str | None,
        typer.Option("--capture-range", metavar="NAME", help="Record only inside this NVTX range, or cudaProfilerApi."),
    ] = None,
    repeat: Annotated[
        int | None,
        typer.Option("--repeat", metavar="N", min=1, help="Record N occurrences of the range, a report each."),
    ] = None,
    graph_nodes: Annotated[bool, typer.Option("--graph-nodes", help="Record each node of a CUDA graph.")] = False,
    extra: Annotated[
        list[str] | None, typer.Option("--nsys-option", metavar="OPT", help="One more option for nsys; repeatable.")
    ] = None,
    expect: Annotated[
        list[str] | None,
        typer.Option("--expect", metavar="TABLE", help="A table that must hold events afterwards; repeatable."),
    ] = None,
    timeout_s: TimeoutOpt = 1800.0,
    export: Annotated[bool, typer.Option("--export/--no-export", help="Export the report to .sqlite.")] = True,
    overwrite: OverwriteOpt = False,
    format: FormatOpt = None,  # noqa: A002
) -> None:
    """Run a program under Nsight Systems."""
    from nsightkit.capture import nsys

    captured = nsys.profile(
        command,
        output,
        trace=tuple(part.strip() for part in trace.split(",") if part.strip()),
        capture_range=capture_range,
        repeat=repeat,
        graph_nodes=graph_nodes,
        extra=tuple(extra or ()),
        expect=expect or None,
        timeout_s=timeout_s,
        export=export,
        overwrite=overwrite,
    )
    _emit_captured(format, captured)


@capture_app.command("ncu", context_settings=_PROGRAM)
def capture_ncu(
    command: CommandArg,
    *,
    output: OutputOpt = Path("nsightkit-capture"),
    kernel: Annotated[
        str | None, typer.Option("--kernel", "-k", metavar="REGEX", help="Only kernels whose name this finds.")
    ] = None,
    skip: Annotated[
        int, typer.Option("--skip", "-s", metavar="N", min=0, help="Leave out the first N launches that match.")
    ] = 0,
    count: Annotated[
        int | None, typer.Option("--count", "-c", metavar="N", min=1, help="Profile only N launches that match.")
    ] = None,
    nvtx: Annotated[
        list[str] | None,
        typer.Option(
            "--nvtx",
            metavar="RANGE",
            help="Only inside this range: NAME or DOMAIN@NAME for push/pop ranges, or an expression of ncu's; "
            "repeatable.",
        ),
    ] = None,
    nvtx_exclude: Annotated[
        list[str] | None, typer.Option("--nvtx-exclude", metavar="RANGE", help="Not inside this range; repeatable.")
    ] = None,
    section_set: Annotated[
        str | None, typer.Option("--set", metavar="NAME", help="A set of sections; default: ncu's own, basic.")
    ] = None,
    section: Annotated[
        list[str] | None, typer.Option("--section", metavar="NAME", help="A section; repeatable.")
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option("--metric", metavar="NAME", help="A metric, by our name or NVIDIA's; repeatable."),
    ] = None,
    clocks: Annotated[
        Literal["none", "base"],
        typer.Option("--clocks", help="Leave the clocks as they are, or lock them to base: repeatable, not real."),
    ] = "none",
    keep_caches: Annotated[
        bool, typer.Option("--keep-caches", help="Do not flush the caches before each pass.")
    ] = False,
    extra: Annotated[
        list[str] | None,
        typer.Option("--ncu-option", metavar="OPT", help="One more option for ncu, NAME=VALUE; repeatable."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--everything", help="Allow the set full on every launch of the program.")
    ] = False,
    timeout_s: TimeoutOpt = 1800.0,
    overwrite: OverwriteOpt = False,
    format: FormatOpt = None,  # noqa: A002
) -> None:
    """Run a program under Nsight Compute, which replays its kernels to read the GPU's counters."""
    from nsightkit.capture import ncu as profiler

    captured = profiler.profile(
        command,
        output,
        kernel=kernel,
        skip=skip,
        count=count,
        nvtx=tuple(nvtx or ()),
        nvtx_exclude=tuple(nvtx_exclude or ()),
        section_set=section_set,
        sections=tuple(section or ()),
        metrics=tuple(metric or ()),
        clocks=clocks,
        keep_caches=keep_caches,
        extra=tuple(extra or ()),
        everything=everything,
        timeout_s=timeout_s,
        overwrite=overwrite,
    )
    _emit_captured(format, captured)


@capture_app.command("torch", context_settings=_PROGRAM)
def capture_torch(
    command: CommandArg,
    *,
    output: OutputOpt = Path("nsightkit-capture"),
    record_shapes: Annotated[
        bool, typer.Option("--record-shapes", help="Record the shapes of operators' inputs.")
    ] = False,
    timeout_s: TimeoutOpt = 1800.0,
    overwrite: OverwriteOpt = False,
    format: FormatOpt = None,  # noqa: A002
) -> None:
    """Run a Python program under torch.profiler, the whole of it."""
    from nsightkit.capture import torch_profiler

    captured = torch_profiler.profile_command(
        command,
        output,
        record_shapes=record_shapes,
        timeout_s=timeout_s,
        overwrite=overwrite,
    )
    _emit_captured(format, captured)


def _emit_captured(format: Format | None, captured: Captured) -> None:  # noqa: A002
    _note(f"ran {shlex.join(captured.ran)}")
    for note in captured.notes:
        _note(note)
    if captured.returncode:
        _note(f"the program itself ended with code {captured.returncode}; the trace is there all the same")
    result = {
        "trace": str(captured.trace),
        "report": str(captured.report),
        "traces": [str(path) for path in captured.traces],
        "ran": captured.ran,
        "returncode": captured.returncode,
        "notes": captured.notes,
    }
    _emit(format, result, lambda console: console.print(_one_line(captured.trace), soft_wrap=True))


# ---------------------------------------------------------------- entry


def _version(wanted: bool) -> None:
    if wanted:
        from nsightkit import __version__

        typer.echo(f"nsightkit {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 - acts in its callback
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
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
    except NsightkitError as error:
        return _failed(error, str(error))
    except _ClickException as error:
        return _failed(error, " ".join(error.format_message().split()) + " (nsightkit --help)")  # type: ignore[attr-defined]
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except MemoryError as error:
        return _failed(error, "this does not fit in memory; look at a part of it, or at a machine with more memory")
    except Exception as error:
        import traceback

        at = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(at.filename).name}:{at.lineno}"
        ours = f"a mistake of nsightkit's own, not of the file ({type(error).__name__}: {error}, at {where})"
        return _failed(
            error, f"{ours}; please report this line where you got nsightkit; NSIGHTKIT_DEBUG=1 says more", 3
        )


def _failed(error: Exception, text: str, code: int = 2) -> int:
    if os.environ.get("NSIGHTKIT_DEBUG", "") not in ("", "0"):
        import traceback

        traceback.print_exception(error)
    _note(text)
    return code


def main() -> NoReturn:
    """Run the command line and exit."""
    # Importing pandas makes a hundred thousand objects that stay; looking through them again and again took a tenth
    # of the time of a short command.
    gc.set_threshold(200_000, 20, 20)
    sys.exit(run())
