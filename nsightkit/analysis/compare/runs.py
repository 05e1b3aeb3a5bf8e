"""What of a run can be compared with other runs: metrics with all their samples, and the conditions they hold for.

A run is a trace, a document of ``nsightkit bench`` or a report of Nsight Compute. Whatever it is, it becomes a
:class:`Run`. :mod:`nsightkit.analysis.compare.check` compares runs with a baseline.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.compare import match as pairing
from nsightkit.analysis.core import intervals
from nsightkit.analysis.core.categories import categorize
from nsightkit.analysis.timeline import gaps, overview, steps
from nsightkit.errors import TraceError, UsageError
from nsightkit.trace import load
from nsightkit.trace import ncu as ncu_reports
from nsightkit.trace.model import GPU_TABLES, Trace

__all__ = [
    "CONDITIONS",
    "DECISIVE",
    "EXACT",
    "KINDS",
    "LARGEST",
    "SMALLEST",
    "UNITS",
    "Metric",
    "Run",
    "of_bench",
    "of_report",
    "of_samples",
    "of_trace",
    "parsed",
    "plain_text",
    "read",
]

#: What a run can be of.
KINDS = ("trace", "bench", "ncu", "samples")
#: What is said of the circumstances. `selection` is what part of a trace was looked at, `command` how it was made.
CONDITIONS = ("gpu", "cpu", "driver", "cuda", "torch", "tool", "tool_version", "selection", "command")
#: Those without which figures cannot be held against each other.
DECISIVE = ("gpu", "cpu", "tool", "selection")
#: Units of metrics, and those of what a program does rather than how long it takes: the same in each run.
UNITS, EXACT = ("ns", "bytes", "count", "%", "per_s"), ("bytes", "count")
#: No time in nanoseconds and no number of bytes is larger; what is, is damage. What is smaller is 0.
LARGEST, SMALLEST = 1e18, 1e-9
#: Kernels of a trace that get a metric in a baseline: those that take longest.
_TOP = 10
#: Of an Nsight Compute report, kernels that take less of the profiled time than this inform and do not gate.
_SMALL = 0.01
#: Longest name of a metric, and longest text of a condition.
_LONGEST = 200
#: No benchmark is larger; what is, is not a benchmark.
_MOST_BYTES = 64 << 20

#: What the name of a metric ends in, and its unit.
_ENDINGS = {"_ns": "ns", "_bytes": "bytes", "_pct": "%", "_per_s": "per_s"}

_AGAIN = "measure again with nsightkit bench --out-json"
#: What is taken from a row of a benchmark, by the end of the metric's name: the field, its unit, and whether it gates.
_OF_CELL = {
    "step_ns": ("samples_ns", "ns", True),
    "first_step_ns": ("first_step_ns", "ns", False),
    "peak_allocated_bytes": ("peak_allocated_bytes", "bytes", True),
    "peak_reserved_bytes": ("peak_reserved_bytes", "bytes", False),
}

_Parsed = TypeVar("_Parsed")
Direction = Literal["lower", "higher", "neither"]
Samples = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, eq=False)
class Metric:
    """One thing that was measured in a run, as often as it was.

    Parameters
    ----------
    samples : ndarray of float
        At least one; each is 0, or from :data:`SMALLEST` to :data:`LARGEST`.
    unit : str
        One of :data:`UNITS`. Those in :data:`EXACT` need one sample only.
    direction : {"lower", "higher", "neither"}
        Which is better.
    gate : bool
        Whether a change for the worse fails; the others inform.
    kept : bool
        Whether a baseline keeps it. All kernels are looked at, and few are worth a place in a file.
    """

    samples: Samples
    unit: str
    direction: Direction = "lower"
    gate: bool = False
    kept: bool = True


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a program.

    Parameters
    ----------
    of : str
        One of :data:`KINDS`.
    conditions : mapping of str to str or None
        Keys of :data:`CONDITIONS`; what is not known is None.
    metrics : mapping of str to Metric
    absent : mapping of str to str
        Why there are no metrics whose names begin so.
    """

    of: str
    conditions: Mapping[str, str | None]
    metrics: Mapping[str, Metric]
    absent: Mapping[str, str] = dataclasses.field(default_factory=dict)


def read(path: str | Path, *, opened: Callable[[Path], Trace] = load, **selected: Any) -> Run:
    """Read what a file holds of a run. The bytes decide what kind of file it is.

    Parameters
    ----------
    path : path-like
        A trace, what ``nsightkit bench --out-json`` wrote, or a report or a CSV of Nsight Compute.
    opened : callable
        Opens a trace and chooses the part of it to look at.
    **selected
        Of :func:`of_trace`: what part that is. A file that is not a trace has none.

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
    if (kind := _kind(path)) == "trace":
        return of_trace(opened(path), **selected)
    if any(value is not None for value in selected.values()):
        raise UsageError(f"{path}: is not a trace, so no part of it can be selected")
    return of_bench(_document(path), path) if kind == "bench" else of_report(ncu_reports.read(path))


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
    windows = _windows(trace, match)
    found = _of_steps(trace, windows) if len(windows) else _of_whole(trace, match)
    absent = {"": "not recorded"} if len(windows) else {"step/": "the trace has no steps"}
    used = intervals.gpu_intervals(trace)["device"].unique().tolist()
    conditions = {name: plain_text(getattr(trace.meta, name)) for name in ("driver", "tool", "tool_version")}
    conditions |= {"gpu": _cards(gpu.name for gpu in trace.meta.gpus if gpu.device in used)}
    return _run("trace", conditions | {"selection": plain_text(selection)}, found, absent)


def of_bench(document: Mapping[str, Any], path: str | Path = "benchmark") -> Run:
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
    if document.get("format") != 1:
        raise TraceError(path, f"is a benchmark of format {plain_text(document.get('format'))}, not 1", _AGAIN)
    found: dict[str, Metric] = {}
    absent: dict[str, str] = {}
    try:
        for row in document["rows"]:
            cell = f"bench/{_cell(row)}/"
            if row["status"] != "ok":
                absent[cell] = plain_text(f"{row['status']} in {row['where']}" if row["where"] else row["status"]) or ""
                continue
            if f"{cell}step_ns" in found:
                raise TraceError(path, f"measures {_cell(row)} twice", "keep one of the two")
            found |= {
                f"{cell}{name}": Metric(_samples(row[field]), unit, gate=gate)
                for name, (field, unit, gate) in _OF_CELL.items()
                if row[field] is not None or unit == "ns"  # on a CPU the memory is not known, the times are
            }
        conditions = _bench_conditions(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TraceError(path, "is damaged: no benchmark has such rows", _AGAIN) from error
    if not found:
        raise TraceError(path, "is a benchmark of which no cell ran", "its rows say why; measure again")
    return _run("bench", conditions, found, absent)


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
    launches, grid = report.launches, report.launches["grid"].astype(str)
    kernel = launches["kernel"].astype(str).map(cache(lambda name: pairing.spellings(name)[1]))
    kernel = kernel.where(~(grid.groupby(kernel).transform("nunique") > 1), kernel + " grid " + grid)
    found: dict[str, Metric] = {}
    for name, rows in launches.groupby(kernel, sort=True):
        for column in ("time_ns", "sm_pct", "memory_pct", "dram_pct", "occupancy_pct"):
            values = rows.loc[rows[column].between(0, LARGEST), column].to_numpy(np.float64)
            gate = float(values.sum()) >= _SMALL * float(launches["time_ns"].sum())
            of = Metric(values, "ns", gate=gate) if column == "time_ns" else Metric(values, "%", "neither")
            found |= {f"kernel/{_label(str(name))}/{column}": of} if len(values) else {}
    if not found:
        raise TraceError(
            report.path, "holds neither times nor throughputs", "profile again with ncu --section SpeedOfLight"
        )
    return _run("ncu", {"gpu": _cards(launches["gpu"].dropna().unique()), "tool": "Nsight Compute"}, found)


def of_samples(samples: Mapping[str, npt.ArrayLike], **conditions: str | None) -> Run:
    """Take metrics that were measured some other way.

    Parameters
    ----------
    samples : mapping of str to array_like of float
        By a name that ends in its unit: ``_ns``, ``_bytes``, ``_pct``, ``_per_s``, else it is a count. Lower is
        better, but for ``_per_s``; all of them gate.
    **conditions : str or None
        Keys of :data:`CONDITIONS`.

    Returns
    -------
    Run

    Raises
    ------
    UsageError
        No samples, one that is not a number from 0 on, or an unknown condition.
    """
    if unknown := set(conditions) - set(CONDITIONS):
        raise UsageError(f"no such condition: {', '.join(sorted(unknown))}")
    if not samples:
        raise UsageError("a run needs samples of something")
    found = {}
    for name, values in samples.items():
        unit = next((unit for end, unit in _ENDINGS.items() if name.endswith(end)), "count")
        try:
            found[_label(name)] = Metric(_samples(values), unit, "higher" if unit == "per_s" else "lower", gate=True)
        except ValueError as error:
            raise UsageError(f"{name}: {error}") from error
    return _run("samples", {name: plain_text(value) for name, value in conditions.items()}, found)


# ---------------------------------------------------------------- traces


def _windows(trace: Trace, match: str | None) -> pd.DataFrame:
    """Find the steps; those of the whole trace that launched something, where a filter left their ranges out."""
    found = steps.windows(trace, match)
    if len(found) or trace is trace.whole:
        return found
    found = steps.windows(trace.whole, match)
    touched = np.unique(np.concatenate([steps.launched_in(trace, table, found) for table in GPU_TABLES]))
    return found.iloc[touched[touched >= 0]].reset_index(drop=True)


def _of_steps(trace: Trace, windows: pd.DataFrame) -> dict[str, Metric]:
    parts = steps.divided(trace, steps.timed(windows), int(windows["process"].iloc[0]))
    parts = parts.rename(columns={"wall_ns": "time_ns"}).dropna(axis=1)
    found = {f"step/{name}": Metric(parts[name].to_numpy(float), "ns", gate=name != "idle_ns") for name in parts}
    return found | dict(_launched(trace, "step", windows))


def _of_whole(trace: Trace, match: str | None) -> dict[str, Metric]:
    if match is not None:
        raise UsageError(f"--match: no range matches {match!r}, so there are no steps")
    whole = overview.summary(trace)
    if not any(trace.size(table) for table in GPU_TABLES):
        raise TraceError(
            trace.path or "trace", "has neither steps nor operations of a GPU: nothing to compare", "record more of it"
        )
    found = {
        f"trace/{name}": Metric(np.array([float(whole[name])]), "ns", gate=name != "idle_ns")
        for name in ("span_ns", "busy_ns", "idle_ns")
        if whole[name] is not None
    }
    return found | dict(_launched(trace, "trace", None))


def _launched(trace: Trace, prefix: str, windows: pd.DataFrame | None) -> Iterator[tuple[str, Metric]]:
    """Give what was launched in each step, and why the GPU was idle; one sample of all without steps."""
    count = 1 if windows is None else len(windows)

    def summed(events: pd.DataFrame, column: str, by: str) -> pd.DataFrame:
        """Sum a column by another, a row each, and by step, a column each."""
        sums = events[events["step"] >= 0].groupby([by, "step"], observed=True)[column].sum()
        return sums.unstack(fill_value=0).reindex(columns=range(count), fill_value=0).astype("float64")

    def launched(table: str, columns: list[str]) -> pd.DataFrame:
        """The events of a table, and the step that each was launched in, -1 for none."""
        step = 0 if windows is None else steps.launched_in(trace, table, windows)
        return trace.table(table, columns).assign(step=step)

    if trace.recorded("kernels"):
        kernels = launched("kernels", ["name", "duration_ns"])
        launches = np.bincount(kernels["step"][kernels["step"] >= 0], minlength=count)
        yield f"{prefix}/kernel_count", Metric(launches.astype(np.float64), "count", gate=True)
        each = summed(kernels, "duration_ns", "name")
        spelt = [_label(pairing.spellings(str(name))[1]) for name in each.index]
        for kind, groups in (("category", categorize(each.index).astype(str)), ("kernel", spelt)):
            table = each.groupby(np.asarray(groups, dtype=object), sort=False).sum()
            order = table.sum(axis=1).sort_values(ascending=False, kind="stable").index
            for rank, (name, samples) in enumerate(table.loc[order].iterrows()):
                yield (
                    f"{kind}/{name}/gpu_ns",
                    Metric(samples.to_numpy(), "ns", kept=(kind == "category" or rank < _TOP)),
                )
    if trace.recorded("memops"):
        copies = launched("memops", ["kind", "bytes", "duration_ns"]).astype({"kind": str})
        copies = copies[copies["kind"] != "memset"]
        moved, took = (summed(copies, column, "kind") for column in ("bytes", "duration_ns"))
        yield f"{prefix}/copied_bytes", Metric(moved.sum().to_numpy(), "bytes", gate=True)
        for (copied, samples), (_, lasted) in zip(moved.iterrows(), took.iterrows(), strict=True):
            yield f"copies/{copied}/bytes", Metric(samples.to_numpy(), "bytes", "neither")
            rate = (samples / lasted * 1e9)[lasted > 0].to_numpy()
            if len(rate):
                yield f"copies/{copied}/per_s", Metric(rate, "per_s", "higher")
    if trace.recorded("kernels") and trace.recorded("calls"):
        idle = gaps.causes(trace)
        step = 0 if windows is None else steps.number(steps.timed(windows), idle["start_ns"])
        idle = idle.assign(step=step, idle_ns=idle["end_ns"] - idle["start_ns"])
        for cause, samples in summed(idle, "idle_ns", "cause").reindex(gaps.CAUSES, fill_value=0.0).iterrows():
            yield f"gap/{cause}/idle_ns", Metric(samples.to_numpy(), "ns")


# ---------------------------------------------------------------- benchmarks


def _kind(path: Path) -> str:
    """Say what a file is, by its bytes; what is neither a benchmark nor a report may be a trace."""
    if not path.is_file():
        return "trace"  # a folder, or nothing, which the reader of traces says
    head = b""
    with contextlib.suppress(OSError), path.open("rb") as stream:
        head = stream.read(1 << 16)
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        ours = re.search(rb'"nsightkit"\s*:\s*"', head) and not re.search(rb'"traceEvents"\s*:', head)
        return "bench" if ours else "trace"
    report = head.startswith(b"NVR\0") or re.search(rb'"(Kernel Name|Metric Name)"', head) or path.suffix == ".csv"
    return "ncu" if report else "trace"


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
    except (ValueError, RecursionError) as error:
        why = {UnicodeDecodeError: "not UTF-8", RecursionError: "it nests too deeply"}.get(type(error), str(error))
        raise TraceError(path, f"is not a {kind}: {why}", remedy) from error


def _document(path: Path) -> Mapping[str, Any]:
    document = parsed(path, "benchmark", _MOST_BYTES, _AGAIN, json.loads)
    if not isinstance(document, dict) or "rows" not in document:
        remedy = "a baseline is given with --baseline" if "metrics" in document else _AGAIN
        raise TraceError(path, "holds no rows, so it is not a benchmark", remedy)
    return document


def _cell(row: Mapping[str, Any]) -> str:
    marks = {
        f"{row['config']} batch {row['batch']} context {row['context']} {row['mode']} {row['precision']}": True,
        str(row["attention"]): row["attention"] != "sdpa",
        f"accumulate {row['accumulate']}": row["accumulate"] != 1,
        "compiled": row["compiled"],
        "nvtx": row["nvtx"],
        "mha": row["annotate_mha"],
    }
    return _label(" ".join(word for word, said in marks.items() if said))


def _bench_conditions(document: Mapping[str, Any]) -> dict[str, str | None]:
    software, card, cpu = ((document["provenance"] or {}).get(what) or {} for what in ("software", "gpu", "cpu"))
    on_cpu = document["device"] == "cpu"
    said = {
        "gpu": "none" if on_cpu else document["gpu"],
        "cpu": cpu.get("model") if on_cpu else None,
        "driver": card.get("driver"),
        "cuda": software.get("cuda"),
        "torch": software.get("torch"),
        "tool": "nsightkit bench",
        "tool_version": document["nsightkit"],
    }
    return {name: plain_text(value) for name, value in said.items()}


# ---------------------------------------------------------------- shared


def _run(
    of: str,
    conditions: Mapping[str, str | None],
    metrics: Mapping[str, Metric],
    absent: Mapping[str, str] = MappingProxyType({}),
) -> Run:
    return Run(of, {name: conditions.get(name) for name in CONDITIONS}, metrics, absent)


def _samples(values: npt.ArrayLike | Sequence[float]) -> Samples:
    """Make samples of what a file holds."""
    samples = np.array(values, dtype=np.float64).ravel()
    if not len(samples) or not ((samples >= 0) & (samples <= LARGEST)).all():
        raise ValueError(f"samples are numbers from 0 to {LARGEST:g}, and at least one")
    return np.where(samples < SMALLEST, 0.0, samples)


def _cards(names: Iterable[object]) -> str | None:
    """Name the GPUs that were used; and how many of each kind."""
    counted = collections.Counter(filter(None, map(plain_text, names)))
    return ", ".join(text if n == 1 else f"{text} x{n}" for text, n in sorted(counted.items())) or None


def _label(name: str) -> str:
    """Make a name of a metric: one printable line of bounded length, the same each time."""
    text = plain_text(name, math.inf) or "unnamed"
    digest = blake2b(text.encode(errors="replace"), digest_size=4).hexdigest()
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 10]}…{digest}"


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
    text = "" if value is None else " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())
    return (text if len(text) <= longest else text[: int(longest)].rstrip()) or None
