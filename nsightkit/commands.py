"""The commands: a question to one trace, or a function here. Each returns a result to print.

Its options come from the function's signature, its help from its docstring. A parameter that is a dataclass is a set of
options.
"""

# As in nsightkit.questions, options are annotated with types and everything else with text, and nothing heavy is
# imported at the top.

import dataclasses
import functools
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nsightkit import questions
from nsightkit.errors import UsageError, note, progress, require_amount
from nsightkit.options import command_of, open_once, opened
from nsightkit.questions import Selection

if TYPE_CHECKING:
    from typing import Any

    from nsightkit.capture.profiling import Captured
    from nsightkit.records import Bench, Check, Ranks, Written
    from nsightkit.table import Table
    from nsightkit.trace.model import Trace


def _require_free(out: Path, overwrite: bool, traces: "list[Path]", is_folder: bool = False) -> None:
    """Refuse an output, before anything is read, that is one of the traces, or that exists and may not be replaced."""
    from nsightkit.trace import files, store

    if any(files.is_same(out, trace) for trace in traces):
        raise UsageError(f"{out}: this is the trace itself; give another name")
    require_free = store.require_free if is_folder else files.require_free
    require_free(out, overwrite=overwrite)


# ---------------------------------------------------------------- reading


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaselineOptions:
    """The baseline of a check.

    Parameters
    ----------
    baseline : FILE
        File with the results of earlier runs; keep it in the repository.
    update : bool
        Write the baseline, replacing earlier runs.
    add : bool
        Write the baseline, adding to earlier runs.
    """

    baseline: Path
    update: bool = False
    add: bool = False


def check(
    selection: Selection,
    options_of_baseline: BaselineOptions,
    files: list[Path],
    *,
    tolerance: float = 0.05,
    match: str | None = None,
) -> "Check":
    """Check runs against a baseline. Exit 0: no regression; 1: regression or missing metric; 2: inconclusive.

    Parameters
    ----------
    files : FILE
        Runs of a program: traces, what bench --out-json wrote, or reports or CSVs of ncu. Several are taken together.
    tolerance : float
        Largest change that passes: 0.05 is 5%. The baseline may allow more.
    match : REGEX, optional
        Ranges to treat as steps. Default: ranges that are named like steps.
    """
    from nsightkit.analysis.compare import baseline as baselines
    from nsightkit.analysis.compare.check import compare
    from nsightkit.analysis.compare.runs import read as read_run
    from nsightkit.records import Check

    baseline_file = options_of_baseline.baseline
    writes = options_of_baseline.update or options_of_baseline.add
    baseline = None
    if baseline_file.exists() or not writes:  # to read one that is absent is an error
        baseline = baselines.read(baseline_file)
    words = selection.words  # a new list
    if match is not None:
        words.append(f"--match {match}")
    selection_text = " ".join(words) or None
    open_part = functools.partial(opened, selection=selection)
    runs = []
    for file in files:
        runs.append(read_run(file, opened=open_part, match=match, selection=selection_text))
        open_once.cache_clear()  # only a run's figures are needed from here on
    if writes:
        baseline = baselines.make(runs, baseline, add=options_of_baseline.add)
    assert baseline is not None  # for the type checker: it was read, or made
    comparison = compare(baseline, runs, tolerance)
    answer = Check.of(comparison | {"baseline": str(baseline_file), "written": writes})
    if writes:  # these runs are in the new baseline, so it does not judge them
        baselines.write(baseline, baseline_file)
        answer.about.remarks = []
        answer.about.exit_code = 0
    return answer


def ranks(
    traces: list[Path],
    *,
    workers: int | None = None,
    scheduler: str | None = None,
    top: int | None = None,
) -> "Ranks":
    """Find late ranks in a distributed job, their cost, and its cause.

    Parameters
    ----------
    traces : DIR
        A folder that holds one trace per rank; or the traces.
    workers : int, optional
        Processes that read traces, 0 for none. Default: one per core, none for a handful of ranks.
    scheduler : ADDRESS, optional
        A Dask scheduler whose workers see the files under the same paths.
    top : int, optional
        Only the first N rows of each table in text. Default: 20.
    """
    from nsightkit.analysis.ranks import job as analysis
    from nsightkit.records import Ranks

    if scheduler is not None and workers is not None:
        raise UsageError("--scheduler and --workers exclude each other: a Dask scheduler has its own workers")
    files = traces
    if len(traces) == 1 and not traces[0].is_file():
        files = analysis.traces_in(traces[0])
    progress("reading")
    job = analysis.survey(
        files,
        scheduler,
        workers,
        progress=lambda done, total: progress(f"{done} of {total} ranks"),
    )
    source = traces[0].name if len(traces) == 1 else f"{len(traces)} traces"
    return Ranks.of(job, source, top)


def mcp(*folders: Path) -> None:
    """Serve these questions to an agent over stdin and stdout (Model Context Protocol).

    Parameters
    ----------
    *folders : FOLDER
        Answer only about files below these folders, symbolic links followed. Default: any file.
    """
    from nsightkit.mcp import serve

    functions = [*questions.QUESTIONS.values(), questions.diff, *questions.FILES.values()]
    serve([command_of(function) for function in functions], folders)


# ---------------------------------------------------------------- writing


def convert(selection: Selection, trace: Path, out: Path, *, overwrite: bool = False) -> "Written":
    """Write a trace or a part of it, without private data, for Perfetto or as Parquet tables.

    Parameters
    ----------
    trace : TRACE
        Trace to read.
    out : OUT
        NAME.json.gz or NAME.json for Perfetto or Chrome, else a Parquet folder.
    overwrite : bool
        Replace what an earlier run wrote there.
    """
    from nsightkit.trace import chrome, store

    is_chrome = out.name.endswith((".json", ".json.gz"))
    if not is_chrome and out.suffix not in ("", ".parquet"):
        raise UsageError(f"{out}: the output's name must end in .json.gz, .json or .parquet")
    _require_free(out, overwrite, [trace], is_folder=not is_chrome)
    part = opened(trace, selection)
    progress(f"writing {out.name}")
    # Both writers clean what they write of private data (nsightkit.trace.clean).
    if is_chrome:
        chrome.write(part, out, overwrite=overwrite)
        files = [out]
    else:
        store.write(part, out, overwrite=overwrite)
        files = list(out.iterdir())
    size = sum(file.stat().st_size for file in files)
    return _written_answer({"trace": str(trace), "out": str(out), "bytes": size}, [part])


def report(selection: Selection, traces: list[Path], *, output: Path, overwrite: bool = False) -> "Written":
    """Write an HTML file to share: verdict, tables and timeline of one or more traces, without private data.

    Parameters
    ----------
    traces : TRACE
        Traces to show, side by side.
    output : FILE.HTML
        The page to write.
    overwrite : bool
        Replace what an earlier run wrote there.
    """
    from nsightkit import report as page

    if output.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"{output}: the page's name must end in .html")
    _require_free(output, overwrite, traces)
    parts = [opened(path, selection) for path in traces]
    progress(f"writing {output.name}")
    size = page.write(page.labelled(parts), output, selection=" ".join(selection.words), overwrite=overwrite)
    return _written_answer({"traces": [str(path) for path in traces], "out": str(output), "bytes": size}, parts)


def _written_answer(document: "dict[str, Any]", traces: "list[Trace]") -> "Written":
    """Answer with the file that was written, ``document["out"]``, and what was left out of these traces as private."""
    from nsightkit.records import Written
    from nsightkit.table import About
    from nsightkit.trace.clean import removed_by_cleaning

    return Written(document, About(document["out"], remarks=list(removed_by_cleaning(traces))))


def demo(out: Path = Path("nsightkit-demo")) -> "Table":
    """Write two real traces to try: ResNet-50 training on a V100, without loader workers and with four.

    Parameters
    ----------
    out : DIR
        A folder that does not exist yet. Default: nsightkit-demo.
    """
    from nsightkit.guide import cases
    from nsightkit.table import Table

    rows = []
    for case in cases.demo(out):
        row = {"trace": str(case.path), "gpu": case.source["gpu"], "from": case.source["repository"], "url": case.url}
        rows.append(row)
    before, after = (row["trace"] for row in rows)
    notes = [f"Try: nsightkit verdict {before}", f"     nsightkit diff {before} {after}"]
    return Table.of(rows, hidden=("url",), notes=notes)


# ---------------------------------------------------------------- this machine, and arithmetic


def doctor() -> "Table":
    """Check which profilers work here and how to fix the rest."""
    from nsightkit.capture.doctor import check_machine
    from nsightkit.table import Table

    progress("checking")
    return Table.of(check_machine())


def peaks(gpu: str | None = None, *, measure: bool = False, top: int | None = None) -> "Table":
    """List dense peak rates and memory bandwidth of a GPU, each with its source.

    Parameters
    ----------
    gpu : GPU, optional
        Name of the GPU, as in the driver or a trace. Default: all known GPUs.
    measure : bool
        Measure this machine's GPU instead: a GEMM of each precision and a copy, half a minute.
    top : int, optional
        Only the first N rows. Default: all; text shows 20.
    """
    from nsightkit import hardware
    from nsightkit.records import Peaks
    from nsightkit.table import Table

    if measure:
        if gpu is not None:
            raise UsageError("--measure uses this machine's GPU: drop GPU")
        from nsightkit.capture import ceilings

        return Table.of(ceilings.measure_ceilings(echo=note), top)
    if gpu is not None:
        return Table.of(hardware.peak_rows(hardware.find(gpu)), top)
    rows = []
    for card in hardware.GPUS:
        rows += hardware.peak_rows(card)
    return Peaks.of(rows, top)


def envelope(*, config: list[str] | None = None, top: int | None = None) -> "Table":
    """Estimate parameters, memory and FLOPs of a model. Default: the guide's ten configurations.

    Parameters
    ----------
    config : NAME, optional
        A configuration, a control or a size; repeatable.
    top : int, optional
        Only the first N rows.
    """
    from nsightkit import configurations
    from nsightkit.analysis.roofline.envelope import summary
    from nsightkit.records import Envelope

    models = configurations.MATRIX
    if config:
        models = tuple(configurations.find(name) for name in config)
    title = "one training step: bf16 autocast, AdamW in fp32, flash attention"
    return Envelope.of(summary(models), top, title=title, hidden=("notes",))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """What a benchmark runs.

    Parameters
    ----------
    size : NAME, optional
        A model's size; repeatable. Default: small on a GPU, smoke without one.
    config : NAME, optional
        One of the guide's configurations or controls; repeatable.
    ctx : N, optional
        Context length; repeatable. Default: the model's own.
    batch : int, optional
        Sequences of a forward pass. Default: the model's own.
    mode : {"fwd", "fwd_bwd", "train"}, optional
        Forward; forward and backward; or these and AdamW, the default; repeatable.
    precision : {"fp32", "tf32", "bf16", "fp16"}, optional
        bf16 and fp16 are autocast, fp16 with a gradient scaler; repeatable. Default: fp32.
    compile : bool
        Run the model through torch.compile.
    attention : {"sdpa", "naive"}, optional
        Fused or unfused. Default: sdpa, with --annotate-mha naive.
    nvtx : bool
        Mark the timed steps (measure), each step and its phases.
    annotate_mha : bool
        Mark the parts of attention in the forward pass.
    """

    size: list[str] | None = None
    config: list[str] | None = None
    ctx: list[int] | None = None
    batch: int | None = None
    mode: list[Literal["fwd", "fwd_bwd", "train"]] | None = None
    precision: list[Literal["fp32", "tf32", "bf16", "fp16"]] | None = None
    compile: bool = False
    attention: Literal["sdpa", "naive"] | None = None
    nvtx: bool = False
    annotate_mha: bool = False


def bench(
    model: Model,
    *,
    warmup: int = 5,
    steps: int = 10,
    device: str | None = None,
    out_json: Path | None = None,
    overwrite: bool = False,
) -> "Bench":
    """Time the steps of a language model; each combination of options runs in its own process.

    Parameters
    ----------
    warmup : int
        Warm-up steps.
    steps : int
        Timed steps.
    device : NAME, optional
        cpu, cuda or cuda:N. Default: a GPU if there is one.
    out_json : FILE, optional
        Write everything, with each step's time.
    overwrite : bool
        Replace what an earlier run wrote there.
    """
    require_amount("--batch", model.batch)
    require_amount("--steps", steps)
    for context in model.ctx or ():
        require_amount("--ctx", context)
    if out_json is not None:
        _require_free(out_json, overwrite, [])
    from nsightkit.capture import bench as benchmark
    from nsightkit.records import Bench

    cells = benchmark.cells(
        _configuration_names(model, device),
        contexts=model.ctx or (),
        batch=model.batch,
        modes=model.mode or ("train",),
        precisions=model.precision or ("fp32",),
        attention=model.attention or ("naive" if model.annotate_mha else "sdpa"),
        compiled=model.compile,
        nvtx=model.nvtx or model.annotate_mha,
        annotate_mha=model.annotate_mha,
    )
    progress("measuring")
    document = benchmark.bench(
        cells,
        device=device,
        warmup=warmup,
        steps=steps,
        progress=lambda done, label: progress(f"{done} of {len(cells)} done: {label}"),
    )
    if out_json is not None:
        benchmark.write(document, out_json)
        note(f"{out_json}: written")
    return Bench.of(document)


def _configuration_names(model: Model, device: str | None) -> list[str]:
    """List the names of the configurations to measure: those of the options, else one that suits the device.

    On a CPU that is "smoke", which ends in seconds; steps of "small" take long there. `device` is cpu, cuda or cuda:N;
    None is a GPU if there is one.
    """
    from nsightkit import configurations
    from nsightkit.capture.children import has_gpu

    names = [configurations.find(name, configurations.SIZES).name for name in model.size or ()]
    names += [configurations.find(name).name for name in model.config or ()]
    if not names:
        names.append("small")
        if device == "cpu" or (device is None and not has_gpu()):
            names = ["smoke"]
    return names


# ---------------------------------------------------------------- capturing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording:
    """Where a capture goes, and how long it may take.

    Parameters
    ----------
    output : NAME
        Name of the report or trace to write.
    timeout_s : float, optional
        Interrupt the program after X seconds. Default: never.
    overwrite : bool
        Replace what an earlier run wrote there.
    """

    output: Path = Path("nsightkit-capture")
    timeout_s: float | None = None
    overwrite: bool = False


def capture_nsys(recording: Recording, tool_args: "Sequence[str]", program: "Sequence[str]") -> "Written":
    """Run a program under Nsight Systems; other options before the -- go to nsys."""
    from nsightkit.capture import nsys

    # `vars`: output, timeout_s and overwrite.
    return _capture_answer(nsys.profile(program, nsys_args=tool_args, **vars(recording)))


def capture_ncu(recording: Recording, tool_args: "Sequence[str]", program: "Sequence[str]") -> "Written":
    """Run a program under Nsight Compute; other options before the -- go to ncu."""
    from nsightkit.capture import ncu

    # `vars`: output, timeout_s and overwrite.
    return _capture_answer(ncu.profile(program, ncu_args=tool_args, **vars(recording)))


def capture_torch(
    recording: Recording, program: "Sequence[str]", *, record_shapes: bool = False, with_stack: bool = False
) -> "Written":
    """Run a Python program under torch.profiler.

    Parameters
    ----------
    record_shapes : bool
        Record the shapes of operators' inputs.
    with_stack : bool
        Record modules and Python functions, for `where`; it slows Python down.
    """
    from nsightkit.capture import torch_profiler

    # `vars`: output, timeout_s and overwrite.
    options = {"record_shapes": record_shapes, "with_stack": with_stack, **vars(recording)}
    return _capture_answer(torch_profiler.profile_command(program, **options))


def _capture_answer(captured: "Captured") -> "Written":
    """Answer with the trace of a capture, and with remarks: the command that ran, and the tool's warnings."""
    from nsightkit.records import Written
    from nsightkit.table import About

    remarks = [f"ran {shlex.join(captured.ran)}", *captured.notes]
    return Written(captured._asdict(), About(str(captured.trace), remarks=remarks))
