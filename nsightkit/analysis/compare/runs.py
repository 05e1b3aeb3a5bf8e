"""What of a run can be compared with other runs: metrics with all their samples, and the conditions they hold for.

A run is a trace, a document of ``nsightkit bench`` or a report of Nsight Compute. Whatever it is, it becomes a
:class:`Run`. :mod:`nsightkit.analysis.compare.check` compares runs with a baseline.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from nsightkit.analysis.compare import match as pairing
from nsightkit.analysis.compare.samples import Figure, Figures, Samples, samples
from nsightkit.analysis.core import intervals
from nsightkit.analysis.timeline import gaps, steps
from nsightkit.errors import TraceError, UsageError
from nsightkit.trace import load
from nsightkit.trace import ncu as ncu_reports
from nsightkit.trace.model import GPU_TABLES, Trace

__all__ = [
    "CONDITIONS",
    "DECISIVE",
    "EXACT",
    "LARGEST",
    "SMALLEST",
    "Amount",
    "Condition",
    "Direction",
    "Kind",
    "Metric",
    "Run",
    "Unit",
    "of_bench",
    "of_report",
    "of_samples",
    "of_trace",
    "parsed",
    "plain_text",
    "read",
]

Float = npt.NDArray[np.float64]
#: What a run can be of.
Kind = Literal["trace", "bench", "ncu", "samples"]
Unit = Literal["ns", "bytes", "count", "%", "per_s"]
#: Which is better.
Direction = Literal["lower", "higher", "neither"]
#: What is said of the circumstances. `selection` is what part of a trace was looked at, `command` how it was made.
Condition = Literal["gpu", "cpu", "driver", "cuda", "torch", "tool", "tool_version", "selection", "command"]
CONDITIONS: tuple[Condition, ...] = get_args(Condition)
#: Those without which figures cannot be held against each other.
DECISIVE: tuple[Condition, ...] = ("gpu", "cpu", "tool", "selection")
#: Units of what a program does rather than how long it takes: the same in each run.
EXACT = ("bytes", "count")
#: No time in nanoseconds and no number of bytes is larger; what is, is damage. What is smaller is 0.
LARGEST, SMALLEST = 1e18, 1e-9
Amount = Annotated[float, msgspec.Meta(ge=0, le=LARGEST)]
#: Kernels of a trace that get a metric in a baseline: those that take longest.
_TOP = 10
#: Of an Nsight Compute report, kernels that take less of the profiled time than this inform and do not gate.
_SMALL = 0.01
#: Longest name of a metric, and longest text of a condition.
_LONGEST = 200
#: No benchmark is larger; what is, is not a benchmark.
_MOST_BYTES = 64 << 20
_FORMAT = 1
_AGAIN = "measure again with nsightkit bench --out-json"

_Parsed = TypeVar("_Parsed")


@dataclasses.dataclass(frozen=True, eq=False)
class Metric:
    """One thing that was measured in a run, as often as it was.

    Parameters
    ----------
    samples : ndarray of float
        At least one; each is 0, or from :data:`SMALLEST` to :data:`LARGEST`.
    unit : {"ns", "bytes", "count", "%", "per_s"}
        Those in :data:`EXACT` need one sample only.
    direction : {"lower", "higher", "neither"}
        Which is better.
    gate : bool
        Whether a change for the worse fails; the others inform.
    kept : bool
        Whether a baseline keeps it. All kernels are looked at, and few are worth a place in a file.
    """

    samples: Float
    unit: Unit
    direction: Direction = "lower"
    gate: bool = False
    kept: bool = True


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a program.

    Parameters
    ----------
    of : {"trace", "bench", "ncu", "samples"}
    conditions : mapping of str to str or None
        Keys of ``CONDITIONS``; what is not known is None, or lacking.
    metrics : mapping of str to Metric
    absent : mapping of str to str
        Why there are no metrics whose names begin so.
    """

    of: Kind
    conditions: Mapping[Condition, str | None]
    metrics: Mapping[str, Metric]
    absent: Mapping[str, str] = dataclasses.field(default_factory=dict)


def read(
    path: str | Path,
    *,
    opened: Callable[[Path], Trace] = load,
    match: str | None = None,
    selection: str | None = None,
) -> Run:
    """Read what a file holds of a run. The bytes decide what kind of file it is.

    Parameters
    ----------
    path : path-like
        A trace, what ``nsightkit bench --out-json`` wrote, or a report or a CSV of Nsight Compute.
    opened : callable
        Opens a trace and chooses the part of it to look at.
    match, selection : str, optional
        As :func:`of_trace` takes them. A file that is not a trace has none.

    Returns
    -------
    Run

    Raises
    ------
    TraceError
        The file cannot be read, or holds nothing to compare.
    UsageError
        A part was asked for of what has no parts.
    """
    path = Path(path)
    kind = _kind(path)
    if kind == "trace":
        return of_trace(opened(path), match, selection)
    if match is not None or selection is not None:
        raise UsageError(f"{path}: is not a trace, so no part of it can be selected")
    if kind == "ncu":
        return of_report(ncu_reports.read(path))
    return of_bench(parsed(path, "benchmark", _MOST_BYTES, _AGAIN, json.loads), path)


def _kind(path: Path) -> Kind:
    """Say what a file is, by its bytes; what is neither a benchmark nor a report may be a trace."""
    if not path.is_file():
        return "trace"  # a folder, or nothing, which the reader of traces says
    try:
        with path.open("rb") as stream:
            head = stream.read(1 << 16)
    except OSError:
        return "trace"
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        ours = re.search(rb'"nsightkit"\s*:\s*"', head)
        events = re.search(rb'"traceEvents"\s*:', head)
        return "bench" if ours and not events else "trace"
    report = head.startswith(b"NVR\0") or re.search(rb'"(Kernel Name|Metric Name)"', head)
    return "ncu" if report or path.suffix == ".csv" else "trace"


def parsed(path: Path, kind: str, most_bytes: int, remedy: str, parse: Callable[[str], _Parsed]) -> _Parsed:
    """Read a JSON document that anyone may have written; one line says what is wrong with it.

    Parameters
    ----------
    path : Path
    kind : str
        What it should be.
    most_bytes : int
        No such document is larger.
    remedy : str
        What to do about one that is not.
    parse : callable
        Makes of the text what it should be; a ValueError says why not.

    Returns
    -------
    object
        What `parse` gave.

    Raises
    ------
    TraceError
        It cannot be read, or is not what it should be.
    """
    try:
        if path.stat().st_size > most_bytes:
            raise TraceError(path, f"is larger than any {kind} ({most_bytes >> 20} MiB)", remedy)
        return parse(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise TraceError(path, f"cannot be read ({error.strerror or error})", "check its permissions") from error
    except json.JSONDecodeError as error:
        raise TraceError(path, f"is not JSON (line {error.lineno}: {error.msg})", remedy) from error
    except UnicodeDecodeError as error:
        raise TraceError(path, f"is not a {kind}: not UTF-8", remedy) from error
    except RecursionError as error:
        raise TraceError(path, f"is not a {kind}: it nests too deeply", remedy) from error
    except (ValueError, msgspec.ValidationError) as error:
        raise TraceError(path, f"is not a {kind}: {plain_text(error)}", remedy) from error


# ---------------------------------------------------------------- traces


def of_trace(trace: Trace, match: str | None = None, selection: str | None = None) -> Run:
    """Take a trace's metrics, a sample a step where it has steps.

    ``step/time_ns`` is the time from the end of one step to the end of the next, its work on the GPU included
    (:func:`nsightkit.analysis.timeline.steps.windows`). ``step/busy_ns`` and ``step/idle_ns`` divide it, and
    ``gap/CAUSE/idle_ns`` divides the idle time. What was launched in a step is the step's: ``step/kernel_count``,
    ``step/copied_bytes``, ``copies/KIND/bytes`` and ``/per_s`` (bytes a second), ``category/NAME/gpu_ns``,
    ``kernel/NAME/gpu_ns`` (by a name without types and numbers, see
    :func:`nsightkit.analysis.compare.match.spellings`). A trace without steps has one sample of each, its sums, and
    ``trace/span_ns``, ``trace/busy_ns`` … in place of the step's.

    Parameters
    ----------
    trace : Trace
    match : str, optional
        Regular expression; ranges whose name it finds are the steps.
    selection : str, optional
        What part of a trace this is, in words: runs of different parts do not compare.

    Returns
    -------
    Run

    Raises
    ------
    UsageError
        `match` is malformed or finds nothing.
    TraceError
        The trace has neither steps nor operations of a GPU.
    """
    capture = samples(trace, match)
    in_steps = len(capture.windows) > 0
    if not in_steps and match is not None:
        raise UsageError(f"--match: no range matches {match!r}, so there are no steps")
    if not in_steps and not any(trace.size(table) for table in GPU_TABLES):
        file = trace.path or "trace"
        raise TraceError(file, "has neither steps nor operations of a GPU: nothing to compare", "record more of it")
    metrics = _times(capture)
    prefix = "step" if in_steps else "trace"
    if "kernels" in capture.figures:
        metrics |= _kernels(capture, prefix)
    if "memops" in capture.figures:
        metrics |= _copies(capture, prefix)
    if trace.recorded("kernels") and trace.recorded("calls"):
        for cause in gaps.CAUSES:
            idle = [figure for label, figure in capture.figures["gaps"].items() if label == cause]
            metrics[f"gap/{cause}/idle_ns"] = Metric(_each(capture, idle), "ns")
    used = intervals.gpu_intervals(trace)["device"].unique().tolist()
    conditions: dict[Condition, str | None] = {
        "gpu": _cards(gpu.name for gpu in trace.meta.gpus if gpu.device in used),
        "driver": plain_text(trace.meta.driver),
        "tool": plain_text(trace.meta.tool),
        "tool_version": plain_text(trace.meta.tool_version),
        "selection": plain_text(selection),
    }
    return Run("trace", conditions, metrics, {"": "not recorded"} if in_steps else {"step/": "the trace has no steps"})


def _times(capture: Samples) -> dict[str, Metric]:
    """How long steps took, busy and idle; the whole trace where it has no steps."""
    metrics = {}
    if len(capture.windows):
        for name, figure in capture.figures["steps"].items():
            metric = Metric(figure.steps, "ns", gate=name != "idle_ns")
            metrics["step/time_ns" if name == "wall_ns" else f"step/{name}"] = metric
        return metrics
    for name in ("span_ns", "busy_ns", "idle_ns"):
        if capture.overview[name] is not None:
            values = np.array([float(capture.overview[name])])
            metrics[f"trace/{name}"] = Metric(values, "ns", gate=name != "idle_ns")
    return metrics


def _each(capture: Samples, figures: Sequence[Figure]) -> Float:
    """Add up figures in each step; in the whole trace where it has no steps."""
    if not len(capture.windows):
        return np.array([float(sum(figure.total for figure in figures))])
    return sum((figure.steps for figure in figures), np.zeros(len(capture.windows)))


def _grouped(figures: Figures, name: Callable[[Any], str]) -> dict[str, list[Figure]]:
    groups: dict[str, list[Figure]] = {}
    for label, figure in figures.items():
        if figure.count:
            groups.setdefault(name(label), []).append(figure)
    return groups


def _kernels(capture: Samples, prefix: str) -> dict[str, Metric]:
    """Kernels launched, and their time by category and by name."""
    launches = np.array([float(capture.trace.size("kernels"))])
    if len(capture.windows):
        step = steps.launched_in(capture.trace, "kernels", capture.windows)
        launches = np.bincount(step[step >= 0], minlength=len(capture.windows)).astype(np.float64)
    metrics = {f"{prefix}/kernel_count": Metric(launches, "count", gate=True)}
    for category, figure in capture.figures["categories"].items():
        if figure.count:
            metrics[f"category/{category}/gpu_ns"] = Metric(_each(capture, [figure]), "ns")
    groups = _grouped(capture.figures["kernels"], lambda name: _label(pairing.spellings(name)[1]))
    times = {name: _each(capture, figures) for name, figures in groups.items()}
    longest = sorted(times, key=lambda name: -times[name].sum())
    for rank, name in enumerate(longest):
        metrics[f"kernel/{name}/gpu_ns"] = Metric(times[name], "ns", kept=rank < _TOP)
    return metrics


def _copies(capture: Samples, prefix: str) -> dict[str, Metric]:
    """Bytes copied, and by kind also how fast."""
    metrics = {}
    copied = np.zeros(max(len(capture.windows), 1))
    durations = _grouped(capture.figures["memops"], lambda label: str(label[0]))
    for kind, figures in _grouped(capture.figures["bytes"], lambda label: str(label[0])).items():
        if kind == "memset":
            continue
        moved, took = _each(capture, figures), _each(capture, durations[kind])
        copied = copied + moved
        metrics[f"copies/{_label(kind)}/bytes"] = Metric(moved, "bytes", "neither")
        if (took > 0).any():
            metrics[f"copies/{_label(kind)}/per_s"] = Metric(moved[took > 0] / took[took > 0] * 1e9, "per_s", "higher")
    return {f"{prefix}/copied_bytes": Metric(copied, "bytes", gate=True)} | metrics


# ---------------------------------------------------------------- benchmarks


class _Cell(msgspec.Struct):
    """A row of a benchmark."""

    config: str
    batch: int
    context: int
    mode: str
    precision: str
    attention: str
    compiled: bool
    accumulate: int
    nvtx: bool
    annotate_mha: bool
    status: str
    where: str | None
    samples_ns: list[Amount]
    first_step_ns: Amount | None
    peak_allocated_bytes: Amount | None
    peak_reserved_bytes: Amount | None

    @property
    def name(self) -> str:
        words = [f"{self.config} batch {self.batch} context {self.context} {self.mode} {self.precision}"]
        if self.attention != "sdpa":
            words.append(self.attention)
        if self.accumulate != 1:
            words.append(f"accumulate {self.accumulate}")
        if self.compiled:
            words.append("compiled")
        if self.nvtx:
            words.append("nvtx")
        if self.annotate_mha:
            words.append("mha")
        return _label(" ".join(words))


class _Part(msgspec.Struct):
    """What a benchmark says of the card, the CPU and the software."""

    model: str | None = None
    driver: str | None = None
    cuda: str | None = None
    torch: str | None = None


class _Provenance(msgspec.Struct):
    gpu: _Part | None = None
    cpu: _Part | None = None
    software: _Part | None = None


class _Bench(msgspec.Struct):
    """What of a benchmark is compared."""

    nsightkit: str
    device: str
    gpu: str | None
    provenance: _Provenance | None
    rows: list[_Cell]


def of_bench(document: Any, path: str | Path = "benchmark") -> Run:
    """Take a benchmark's metrics: of each cell the times of its steps, and the most memory it took.

    Parameters
    ----------
    document : mapping
        What :func:`nsightkit.capture.bench.bench` gives.
    path : path-like
        Where it is from, for messages.

    Returns
    -------
    Run
        A cell that did not run has no metrics.

    Raises
    ------
    TraceError
        It is not such a document, or no cell ran.
    """
    if not isinstance(document, Mapping) or "rows" not in document:
        baseline = isinstance(document, Mapping) and "metrics" in document
        remedy = "a baseline is given with --baseline" if baseline else _AGAIN
        raise TraceError(path, "holds no rows, so it is not a benchmark", remedy)
    if document.get("format") != _FORMAT:
        raise TraceError(path, f"is a benchmark of format {plain_text(document.get('format'))}, not {_FORMAT}", _AGAIN)
    try:
        bench = msgspec.convert(document, _Bench)
    except msgspec.ValidationError as error:
        raise TraceError(path, f"is a damaged benchmark: {plain_text(error)}", _AGAIN) from error
    metrics: dict[str, Metric] = {}
    absent: dict[str, str] = {}
    for cell in bench.rows:
        name = f"bench/{cell.name}/"
        if cell.status != "ok":
            absent[name] = plain_text(f"{cell.status} in {cell.where}" if cell.where else cell.status) or ""
            continue
        if f"{name}step_ns" in metrics:
            raise TraceError(path, f"measures {cell.name} twice", "keep one of the two")
        if not cell.samples_ns or cell.first_step_ns is None:
            raise TraceError(path, f"is a damaged benchmark: {cell.name} has no samples", _AGAIN)
        metrics[f"{name}step_ns"] = Metric(_checked(cell.samples_ns), "ns", gate=True)
        metrics[f"{name}first_step_ns"] = Metric(_checked([cell.first_step_ns]), "ns")
        if cell.peak_allocated_bytes is not None:  # on a CPU it is not known
            metrics[f"{name}peak_allocated_bytes"] = Metric(_checked([cell.peak_allocated_bytes]), "bytes", gate=True)
        if cell.peak_reserved_bytes is not None:
            metrics[f"{name}peak_reserved_bytes"] = Metric(_checked([cell.peak_reserved_bytes]), "bytes")
    if not metrics:
        raise TraceError(path, "is a benchmark of which no cell ran", "its rows say why; measure again")
    return Run("bench", _bench_conditions(bench), metrics, absent)


def _bench_conditions(bench: _Bench) -> dict[Condition, str | None]:
    provenance = bench.provenance or _Provenance()
    software = provenance.software or _Part()
    card, cpu = provenance.gpu or _Part(), provenance.cpu or _Part()
    on_cpu = bench.device == "cpu"
    return {
        "gpu": "none" if on_cpu else plain_text(bench.gpu),
        "cpu": plain_text(cpu.model) if on_cpu else None,
        "driver": plain_text(card.driver),
        "cuda": plain_text(software.cuda),
        "torch": plain_text(software.torch),
        "tool": "nsightkit bench",
        "tool_version": plain_text(bench.nsightkit),
    }


# ---------------------------------------------------------------- reports of Nsight Compute, and other samples


def of_report(report: ncu_reports.Report) -> Run:
    """Take the metrics of an Nsight Compute report: of each kernel its time, throughputs and occupancy.

    Parameters
    ----------
    report : Report

    Returns
    -------
    Run
        A sample a launch. Kernels have the names that :func:`of_trace` gives them, and where one was launched with
        several grids, the grid.

    Raises
    ------
    TraceError
        No launch has any of the metrics.
    """
    launches = report.launches
    grid = launches["grid"].astype(str)
    kernel = launches["kernel"].astype(str).map(cache(lambda name: pairing.spellings(name)[1]))
    several = grid.groupby(kernel).transform("nunique") > 1
    kernel = kernel.where(~several, kernel + " grid " + grid)
    least_ns = _SMALL * float(launches["time_ns"].sum())
    metrics: dict[str, Metric] = {}
    for name, rows in launches.groupby(kernel, sort=True):
        label = f"kernel/{_label(str(name))}"
        for column in ("time_ns", "sm_pct", "memory_pct", "dram_pct", "occupancy_pct"):
            values = rows.loc[rows[column].between(0, LARGEST), column].to_numpy(np.float64)
            if not len(values):
                continue
            if column == "time_ns":
                metrics[f"{label}/{column}"] = Metric(values, "ns", gate=float(values.sum()) >= least_ns)
            else:
                metrics[f"{label}/{column}"] = Metric(values, "%", "neither")
    if not metrics:
        remedy = "profile again with ncu --section SpeedOfLight"
        raise TraceError(report.path, "holds neither times nor throughputs", remedy)
    conditions: dict[Condition, str | None] = {"gpu": _cards(launches["gpu"].dropna().unique())}
    return Run("ncu", conditions | {"tool": "Nsight Compute"}, metrics)


#: What the name of a metric ends in, and its unit.
_ENDINGS: dict[str, Unit] = {"_ns": "ns", "_bytes": "bytes", "_pct": "%", "_per_s": "per_s"}


def of_samples(samples: Mapping[str, npt.ArrayLike], **conditions: str | None) -> Run:
    """Take metrics that were measured some other way.

    Parameters
    ----------
    samples : mapping of str to array_like of float
        By a name that ends in its unit: ``_ns``, ``_bytes``, ``_pct``, ``_per_s``, else it is a count. Lower is
        better, but for ``_per_s``; all of them gate.
    **conditions : str or None
        Keys of ``CONDITIONS``.

    Returns
    -------
    Run

    Raises
    ------
    UsageError
        No samples, one that is not a number from 0 on, or an unknown condition.
    """
    known: dict[Condition, str | None] = {}
    for condition in CONDITIONS:
        if condition in conditions:
            known[condition] = plain_text(conditions.pop(condition))
    if conditions:
        raise UsageError(f"no such condition: {', '.join(sorted(conditions))}")
    if not samples:
        raise UsageError("a run needs samples of something")
    metrics = {}
    for name, values in samples.items():
        unit: Unit = "count"
        for ending, of_ending in _ENDINGS.items():
            if name.endswith(ending):
                unit = of_ending
        try:
            metrics[_label(name)] = Metric(_checked(values), unit, "higher" if unit == "per_s" else "lower", gate=True)
        except ValueError as error:
            raise UsageError(f"{name}: {error}") from error
    return Run("samples", known, metrics)


def _checked(values: npt.ArrayLike) -> Float:
    checked = np.array(values, dtype=np.float64).ravel()
    if not len(checked) or not ((checked >= 0) & (checked <= LARGEST)).all():
        raise ValueError(f"samples are numbers from 0 to {LARGEST:g}, and at least one")
    return np.where(checked < SMALLEST, 0.0, checked)


# ---------------------------------------------------------------- names


def _cards(names: Iterable[object]) -> str | None:
    """Name the GPUs that were used; and how many of each kind."""
    counted = collections.Counter(text for text in map(plain_text, names) if text)
    cards = [text if count == 1 else f"{text} x{count}" for text, count in sorted(counted.items())]
    return ", ".join(cards) or None


def _label(name: str) -> str:
    """Make a name of a metric: one printable line of bounded length, the same each time."""
    text = plain_text(name, math.inf) or "unnamed"
    if len(text) <= _LONGEST:
        return text
    digest = blake2b(text.encode(errors="replace"), digest_size=4).hexdigest()
    return f"{text[: _LONGEST - 10]}…{digest}"


def plain_text(value: object, longest: float = _LONGEST) -> str | None:
    """Take text from a file: printable, on one line, not long.

    Parameters
    ----------
    value : object
    longest : float
        Characters.

    Returns
    -------
    str or None
        None for nothing.
    """
    if value is None:
        return None
    printable = [character if character.isprintable() else " " for character in str(value)]
    text = " ".join("".join(printable).split())
    if len(text) > longest:
        text = text[: int(longest)].rstrip()
    return text or None
