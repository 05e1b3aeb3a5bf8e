"""The metrics of a run that compare with other runs, with all their samples, and the conditions they hold for.

A run is a trace, a document of ``nsightkit bench`` or a report of Nsight Compute. In every metric less is better.
:mod:`nsightkit.analysis.compare.check` compares runs with a baseline.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from nsightkit.analysis.compare.match import plain_kernel
from nsightkit.analysis.compare.samples import Samples, samples
from nsightkit.analysis.core import intervals
from nsightkit.analysis.timeline import steps
from nsightkit.errors import AnyPath, TraceError, UsageError, plain, reading, require_regular
from nsightkit.trace import kind_of, load
from nsightkit.trace import ncu as ncu_reports
from nsightkit.trace.model import GPU_TABLES, Trace

Float = NDArray[np.float64]
Kind = Literal["trace", "bench", "ncu", "samples"]
#: No time in nanoseconds and no number of bytes is larger.
LARGEST = 1e18
Amount = Annotated[float, msgspec.Meta(ge=0, le=LARGEST)]
#: In an Nsight Compute report, kernels that take a smaller share of the profiled time get no metrics.
_LEAST_SHARE = 0.01
#: Names in metrics are cut to so many characters.
_LONGEST_NAME = 200
#: The metric of each figure of a trace.
_METRIC_OF_FIGURE = {"wall_ns": "time_ns", "busy_ns": "busy_ns"}
_AGAIN = "measure again with nsightkit bench --out-json"


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a program.

    Parameters
    ----------
    of : {"trace", "bench", "ncu", "samples"}
    conditions : dict of str to str or None
        ``gpu``, ``tool`` and ``selection`` (which part of a trace); None is unknown.
    metrics : mapping of str to ndarray of float
        The samples of each, one at least. Names end in their unit (:func:`unit_of`).
    """

    of: Kind
    conditions: dict[str, str | None]
    metrics: Mapping[str, Float]


def unit_of(metric: str) -> str:
    """Tell the unit of a metric by the end of its name: ``ns``, ``bytes`` or ``count``.

    Parameters
    ----------
    metric : str
    """
    unit = metric.rpartition("_")[2]
    if unit in ("ns", "bytes"):
        return unit
    return "count"


def read(
    path: AnyPath,
    *,
    opened: Callable[[Path], Trace] = load,
    match: str | None = None,
    selection: str | None = None,
) -> Run:
    """Read a run from a file of any kind.

    Parameters
    ----------
    path : path-like
        A trace, what ``nsightkit bench --out-json`` wrote, or a report or a CSV of Nsight Compute.
    opened : callable
        Opens a trace and selects from it, given the path.
    match, selection : str, optional
        As :func:`of_trace` takes them; for a trace only. `selection` is the wording of what `opened` selects.

    Returns
    -------
    Run

    Raises
    ------
    TraceError
        The file cannot be read, or holds nothing to compare.
    UsageError
        A selection was asked of a file that is not a trace.
    """
    path = Path(path)
    kind = kind_of(path)
    is_bench = kind == "json" and _is_bench(path)
    # A CSV that its first bytes do not show to be a report goes to that reader too, which looks further or refuses it.
    is_report = kind in ("ncu-rep", "ncu-csv") or (kind == "other" and path.suffix == ".csv")
    if (is_bench or is_report) and (match is not None or selection is not None):
        raise UsageError(f"{path}: is not a trace, so no part of it can be selected")
    if is_report:
        return of_report(ncu_reports.read(path))
    if is_bench:
        return of_bench(decoded(path, "a benchmark", Bench, _AGAIN), path)
    return of_trace(opened(path), match, selection)


def _is_bench(path: Path) -> bool:
    """Whether a JSON file is a benchmark, not a trace, by the keys in its first 64 KiB."""
    with path.open("rb") as stream:
        head = stream.read(65_536)
    return re.search(rb'"nsightkit"\s*:\s*"', head) is not None and b'"traceEvents"' not in head


_Document = TypeVar("_Document")


def decoded(path: Path, kind: str, document: type[_Document], remedy: str) -> _Document:
    """Read a JSON document of a given structure.

    Parameters
    ----------
    path : Path
    kind : str
        What messages call it, such as "a benchmark".
    document : type
        A msgspec structure.
    remedy : str
        What to do about a file of another form.

    Returns
    -------
    object
        Of that type.

    Raises
    ------
    TraceError
        The file cannot be read, or has another form.
    """
    require_regular(path)
    with reading(path, f"is not {kind}", remedy):
        return msgspec.json.decode(path.read_bytes(), type=document)


# ---------------------------------------------------------------- traces


def of_trace(trace: Trace, match: str | None = None, selection: str | None = None) -> Run:
    """Take a trace's metrics, one sample per step.

    ``step/time_ns`` is the time from the end of one step to the end of the next, its work on the GPU included
    (:func:`nsightkit.analysis.timeline.steps.windows`); with it come ``step/busy_ns``, ``step/kernel_count`` and
    ``step/copied_bytes``. A trace without steps has one sample of each, its sums, named ``trace/…``.

    Parameters
    ----------
    trace : Trace
    match : str, optional
        Regular expression of the steps' names.
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
        The trace has neither steps nor GPU work.
    """
    capture = samples(trace, match)
    has_steps = len(capture.windows) > 0
    if not has_steps and match is not None:
        raise UsageError(f"--match: no range matches {match!r}; give a name that `nsightkit ranges` lists")
    if not has_steps and not any(trace.size(table) for table in GPU_TABLES):
        raise TraceError(trace.path or "trace", "has neither steps nor GPU work, so nothing compares", "record more")
    prefix = "trace"
    if has_steps:
        prefix = "step"
    sample_columns = capture.windows.index if has_steps else ["total"]
    metrics = {}
    # Idle time is left out: it follows from the others.
    for name, times in capture.figures[sample_columns].drop(index="idle_ns", errors="ignore").iterrows():
        metrics[f"{prefix}/{_METRIC_OF_FIGURE[str(name)]}"] = times.to_numpy(np.float64)
    if trace.recorded("kernels"):
        ones = pd.Series(1, range(trace.size("kernels")))
        metrics[f"{prefix}/kernel_count"] = _sums_in_steps(capture, "kernels", ones)
    if trace.recorded("memops"):
        copies = trace.table("memops", ["kind", "bytes"])
        copied = copies["bytes"].where(copies["kind"] != "memset", 0)
        metrics[f"{prefix}/copied_bytes"] = _sums_in_steps(capture, "memops", copied)
    used_devices = intervals.gpu_intervals(trace)["device"].unique()
    cards = _card_names(gpu.name for gpu in trace.meta.gpus if gpu.device in used_devices)
    return Run("trace", {"gpu": cards, "tool": trace.meta.tool, "selection": selection}, metrics)


def _sums_in_steps(capture: Samples, table: str, values: pd.Series) -> Float:
    """Add up values, one per row of a GPU table, in each step; without steps, over all."""
    if capture.windows.empty:
        return np.array([float(values.sum())])
    step = steps.launched_in(capture.trace, table, capture.windows)  # -1 for none, which `reindex` drops
    sums = values.groupby(step).sum().reindex(capture.windows.index, fill_value=0)
    return sums.to_numpy(np.float64)


# ---------------------------------------------------------------- benchmarks, reports, and other samples


class _BenchRow(msgspec.Struct):
    """A row of a benchmark: one configuration with its samples."""

    config: str
    batch: int
    context: int
    mode: str
    precision: str
    attention: str
    compiled: bool
    nvtx: bool
    annotate_mha: bool
    samples_ns: list[Amount]
    peak_allocated_bytes: Amount | None

    @property
    def name(self) -> str:
        """The configuration in words: a part of the names of its metrics, so on one short line."""
        name = f"{self.config} batch {self.batch} context {self.context} {self.mode} {self.precision} {self.attention}"
        for flag in ("compiled", "nvtx", "annotate_mha"):
            if getattr(self, flag):
                name += f" {flag}"
        return plain(name)[:_LONGEST_NAME]


class Bench(msgspec.Struct):
    """The parts of a benchmark that are compared."""

    format: Literal[1]
    device: str
    gpu: str | None
    rows: list[_BenchRow]


def of_bench(bench: Bench, path: AnyPath = "benchmark") -> Run:
    """Take a benchmark's metrics: the step times of each cell (a configuration that it measured) and its peak memory.

    Parameters
    ----------
    bench : Bench
    path : path-like
        Its file, for messages.

    Returns
    -------
    Run
        A cell that did not run has no metrics.

    Raises
    ------
    TraceError
        No cell ran.
    """
    metrics = {}
    for cell in bench.rows:
        if cell.samples_ns:
            metrics[f"bench/{cell.name}/step_ns"] = np.array(cell.samples_ns)
            if cell.peak_allocated_bytes is not None:  # unknown on a CPU
                metrics[f"bench/{cell.name}/peak_allocated_bytes"] = np.array([cell.peak_allocated_bytes])
    if not metrics:
        raise TraceError(path, "is a benchmark of which no cell ran", "its rows say why; measure again")
    return Run("bench", {"gpu": "none" if bench.device == "cpu" else bench.gpu, "tool": "nsightkit bench"}, metrics)


def of_report(report: ncu_reports.Report) -> Run:
    """Take the metrics of an Nsight Compute report: each kernel's time, one sample per launch.

    Parameters
    ----------
    report : Report

    Returns
    -------
    Run
        Kernels that take a hundredth of the time or more, by
        :func:`nsightkit.analysis.compare.match.plain_kernel`; one that was launched with several grids, also by the
        grid.

    Raises
    ------
    TraceError
        No launch has a time.
    """
    launches = report.launches[report.launches["time_ns"].between(0, LARGEST)]  # drops NaN, an unknown time
    if launches.empty:
        raise TraceError(report.path, "holds no kernel times", "profile again with ncu --section SpeedOfLight")
    grid = launches["grid"].astype(str)
    kernel = launches["kernel"].astype(str).map(lambda name: f"kernel/{plain(plain_kernel(name))[:_LONGEST_NAME]}")
    has_several_grids = grid.groupby(kernel).transform("nunique") > 1
    kernel = kernel.where(~has_several_grids, kernel + " grid " + grid)
    metrics = {}
    for name, times in launches["time_ns"].groupby(kernel):
        if times.sum() >= _LEAST_SHARE * launches["time_ns"].sum():
            metrics[f"{name}/time_ns"] = times.to_numpy(np.float64)
    return Run("ncu", {"gpu": _card_names(launches["gpu"].dropna().unique()), "tool": "Nsight Compute"}, metrics)


def of_samples(measured: Mapping[str, ArrayLike], gpu: str | None = None) -> Run:
    """Take metrics that were measured in another way.

    Parameters
    ----------
    measured : mapping of str to array_like of float
        By a name that ends in its unit, ``_ns`` or ``_bytes``; others are counts.
    gpu : str, optional

    Returns
    -------
    Run

    Raises
    ------
    UsageError
        No samples, or one that is not a number from 0 on.
    """
    metrics = {}
    for name, values in measured.items():
        numbers = np.array(values, dtype=np.float64).ravel()
        is_amount = (numbers >= 0) & (numbers <= LARGEST)
        if not len(numbers) or not is_amount.all():
            raise UsageError(f"{name}: samples are numbers from 0 to {LARGEST:g}, and at least one")
        metrics[name] = numbers
    return Run("samples", {"gpu": gpu}, metrics)


def _card_names(names: Iterable[object]) -> str | None:
    """Join the names of GPUs in one text, sorted, equal ones repeated, unknown ones left out; None without any."""
    return ", ".join(sorted(plain(name) for name in names if name)) or None
