"""``measure``: one call on a page that runs a workload, or shows what a GPU recorded of it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import html
import json
import os
import shutil
import sys
import tempfile
import textwrap
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

import nsightkit
from nsightkit.capture import provenance as provenances
from nsightkit.errors import TraceError, UsageError, reading
from nsightkit.guide.cases import folded_facts
from nsightkit.guide.running import (
    NCU,
    NSYS,
    PROVENANCE,
    ROWS,
    SAMPLES,
    SNAPSHOT,
    TRACE,
    Run,
    run_and_write,
    samples_frame,
)
from nsightkit.text import Json
from nsightkit.trace import TABLES, TraceMeta, ncu
from nsightkit.trace import snapshot as snapshots
from nsightkit.trace.files import drafted

if TYPE_CHECKING:
    from nsightkit.api import Trace

#: Values of NSIGHTKIT_MODE; empty is unset.
_MODES = ("", "record", "replay", "small")
#: The most warm-up and timed steps of a small run.
_SMALL_WARMUP = 2
_SMALL_STEPS = 5


@dataclasses.dataclass(frozen=True, eq=False)
class Measurement:
    """The result of one measurement; false if nothing was measured yet.

    Parameters
    ----------
    name : str
        ``page/part``.
    mode : {"measured", "recorded", "small", "missing"}
        Measured on this machine's GPU just now, recorded on a GPU earlier, run small on this CPU, or not measured yet.
    parameters : dict
        Sizes and switches of the workload.
    provenance : dict
        Hardware, software, commit and time; empty if nothing was measured yet.
    samples : DataFrame
        ``metric``, ``index``, ``value``: raw samples; the metric's name holds its unit.
    rows : DataFrame
        The rows of a sweep; empty for a workload of steps.
    folder : Path or None
        Holds the files.
    script : str
        The page.
    notice : str or None
        A warning about the figures, such as that the recording is stale.
    """

    name: str
    mode: str
    parameters: Json
    provenance: Json
    samples: pd.DataFrame
    rows: pd.DataFrame
    folder: Path | None
    script: str
    notice: str | None = None

    def __bool__(self) -> bool:
        """Whether there is something to show; not where the page was not measured yet."""
        return self.mode != "missing"

    def _file(self, name: str) -> Path | None:
        """Find a file or folder of the measurement; None if it was not written."""
        if self.folder is None or not (self.folder / name).exists():
            return None
        return self.folder / name

    @functools.cached_property
    def trace(self) -> Trace:
        """The profile of a few steady steps; if none was taken, an empty trace that recorded no table."""
        file = self._file(TRACE)
        if file is None:
            return nsightkit.Trace.from_frames({}, TraceMeta(missing=list(TABLES)))
        return nsightkit.load(file, cache=False)

    @functools.cached_property
    def nsys_trace(self) -> Trace | None:
        """The steady steps of a second run, under Nsight Systems; None if there was none."""
        file = self._file(NSYS)
        if file is None:
            return None
        return nsightkit.load(file, cache=False)

    @functools.cached_property
    def ncu_report(self) -> ncu.Report | None:
        """The counters of a second run, under Nsight Compute; None if there was none."""
        file = self._file(NCU)
        if file is None:
            return None
        return ncu.read(file)

    @functools.cached_property
    def snapshot(self) -> snapshots.Snapshot | None:
        """The memory of the first steps, recorded from before the model was built; None if it was not recorded."""
        file = self._file(SNAPSHOT)
        if file is None:
            return None
        return snapshots.read(file)

    def values(self, metric: str) -> np.ndarray:
        """Give the samples of one metric.

        Parameters
        ----------
        metric : str
            Such as ``step_ns``.

        Returns
        -------
        ndarray of float64
            Empty if it was not measured.
        """
        return self.samples.loc[self.samples["metric"] == metric, "value"].to_numpy()

    def median(self, metric: str) -> float | None:
        """Give the median of one metric.

        Parameters
        ----------
        metric : str

        Returns
        -------
        float or None
            None if it was not measured.
        """
        values = self.values(metric)
        if len(values):
            return float(np.median(values))
        return None

    @property
    def gpu(self) -> str | None:
        """Name of the GPU that was measured; None for a run on a CPU, and where nothing was measured yet."""
        return (self.provenance.get("gpu") or {}).get("name")

    @property
    def label(self) -> str:
        """Where the figures come from, in words."""
        day = str(self.provenance.get("utc", ""))[:10]
        if self.mode in ("measured", "recorded"):
            return f"{self.mode} on {self.gpu}, {day}"
        if self.mode == "small":
            return "small run on this CPU: no GPU results"
        return f"not measured yet: run this page on your GPU (python {self.script})"

    def __repr__(self) -> str:
        lines = [f"{self.name}: {self.label}"]
        if self.notice:
            lines.append(self.notice)
        for name, value in provenances.provenance_rows(self.provenance):
            lines.append(f"  {name}: {value}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        name = html.escape(self.name)
        label = html.escape(self.label)
        notice = facts = ""
        if self.notice:
            notice = f'<p class="nsightkit-banner" role="note">{html.escape(self.notice)}</p>'
        if self.provenance:
            facts = folded_facts("How this was measured", provenances.provenance_rows(self.provenance))
        return (
            f'<aside class="nsightkit-provenance" data-mode="{self.mode}" aria-label="Provenance: {name}">'
            f"{notice}<p><strong>{name}:</strong> {label}</p>{facts}</aside>"
        )


def measure(
    name: str,
    workload: Callable[..., Any],
    *,
    gpu: Json,
    small: Json,
    revision: int = 1,
    steps: int = 50,
    warmup: int = 10,
    profile: Literal["torch", "shapes", "memory", "nsys", "ncu"] | None = "torch",
) -> Measurement:
    """Measure a workload on the GPU, show its recording, or run it small on the CPU.

    ``NSIGHTKIT_MODE`` decides. Unset: measure on the GPU; without a GPU show the recording, else run small. ``record``:
    show a current recording, else measure and write one. ``replay``: show the recording and run nothing. ``small``:
    always run small.

    Parameters
    ----------
    name : str
        ``page/part``; the recording is ``docs/recordings/<page>/<part>/<gpu>/``.
    workload : callable
        A function of a module, ``workload(device, **parameters)``. It returns a context manager with ``step()``, which
        runs a step without waiting for the GPU, or ``rows()``, which iterates over the rows of a sweep. It may have
        ``samples()``: raw samples by metric.
    gpu, small : mapping
        The workload's parameters on a GPU, and small on a CPU.
    revision : int
        Raise it when the workload's meaning changes: older recordings are then stale.
    steps, warmup : int
        Timed steps, and steps before them.
    profile : {"torch", "shapes", "memory", "nsys", "ncu"} or None
        PyTorch's profile of three steps; with operator shapes; with a memory snapshot of the first steps; with a
        second run under Nsight Systems or Nsight Compute; or none.

    Returns
    -------
    Measurement

    Raises
    ------
    UsageError
        An argument or an environment variable cannot be honoured.
    NsightkitError
        A result is wrong, or ``NSIGHTKIT_PUBLISH=1`` and the recording is stale.
    """
    mode = os.environ.get("NSIGHTKIT_MODE", "")
    if mode not in _MODES:
        raise UsageError(f"NSIGHTKIT_MODE is {mode!r}; set it to record, replay or small, or unset it")
    if name.count("/") != 1:
        raise UsageError(f"{name!r} does not name a measurement; write it as page/part")
    gpu_run = Run(
        name=name,
        workload=workload,
        parameters=_as_json_keeps(gpu),
        device="cuda",
        revision=revision,
        warmup=warmup,
        steps=steps,
        profile=profile,
        script=_calling_page(),
    )
    small_run = gpu_run._replace(
        parameters=_as_json_keeps(small),
        device="cpu",
        warmup=min(warmup, _SMALL_WARMUP),
        steps=min(steps, _SMALL_STEPS),
    )
    if mode == "small":
        return _measure_now(small_run)
    if mode == "replay":
        return _recording_to_show(gpu_run) or _not_measured(gpu_run)
    task = small_run
    if _has_gpu():
        task = gpu_run
    if mode == "record":
        return _current_or_new(task)
    if task is gpu_run:
        return _measure_now(gpu_run)
    return _recording_to_show(gpu_run) or _measure_now(small_run)


def _as_json_keeps(parameters: Json) -> Json:
    """Convert parameters as JSON does (tuples become lists).

    A recording keeps its parameters as JSON, and is shown only where they equal those of the page.
    """
    return dict(json.loads(json.dumps(parameters)))


def _calling_page() -> str:
    """Name the page that called :func:`measure`: its file, and its folder where that is ``examples``."""
    page = sys._getframe(2)  # 0 is this function, 1 is measure
    file = Path(page.f_globals.get("__file__") or page.f_code.co_filename)  # sphinx-gallery sets no __file__
    # Other folders may be named after a person.
    if file.parent.name == "examples":
        return f"examples/{file.name}"
    if "__file__" in page.f_globals:
        return file.name
    return "its script"  # of a notebook or an interactive session


def _has_gpu() -> bool:
    """Whether torch can use a GPU in this process."""
    import torch

    return bool(torch.cuda.is_available())


def _not_measured(task: Run) -> Measurement:
    """Make the empty result of a run that has no recording yet."""
    return Measurement(
        name=task.name,
        mode="missing",
        parameters=task.parameters,
        provenance={},
        samples=samples_frame({}),
        rows=pd.DataFrame(),
        folder=None,
        script=task.script,
    )


def _measure_now(task: Run) -> Measurement:
    """Measure now, into a temporary folder that lives as long as the measurement."""
    with contextlib.ExitStack() as files:
        folder = Path(files.enter_context(tempfile.TemporaryDirectory(prefix="nsightkit-", ignore_cleanup_errors=True)))
        run_and_write(task, folder)
        measurement = _read_measurement(task, folder, "measured" if task.on_gpu else "small")
        # From here on the folder is removed with the measurement instead of at the end of this block.
        weakref.finalize(measurement, files.pop_all().close)
    return measurement


# -- recordings -------------------------------------------------------------------------------------------------


def recordings_folder() -> Path:
    """Give the folder of the recordings: ``NSIGHTKIT_RECORDINGS``, else ``docs/recordings`` of this checkout."""
    chosen = os.environ.get("NSIGHTKIT_RECORDINGS")
    if chosen:
        return Path(chosen)
    return Path(nsightkit.__file__).parents[1] / "docs" / "recordings"


def _current_or_new(task: Run) -> Measurement:
    """Give this machine's current recording, or measure and write one."""
    if task.on_gpu:
        import torch

        machine = provenances.slug(torch.cuda.get_device_name())
    elif os.environ.get("NSIGHTKIT_RECORDINGS"):
        machine = "cpu"
    else:
        raise UsageError(
            "NSIGHTKIT_MODE=record, but torch sees no CUDA GPU; for a dry run on the CPU, set NSIGHTKIT_RECORDINGS to "
            "another folder, or run nsightkit doctor"
        )
    folder = recordings_folder() / task.name / machine
    if (folder / PROVENANCE).is_file():
        # A dry run on a CPU, in a separate folder, is "small": its figures are never shown as measured.
        measurement = _read_measurement(task, folder, "recorded" if task.on_gpu else "small")
        if _why_stale(task, measurement) is None:
            return measurement
    measurement = _measure_now(task)
    assert measurement.folder is not None
    folder.parent.mkdir(parents=True, exist_ok=True)
    with drafted(folder) as draft:  # takes the place of `folder` when all is copied
        shutil.copytree(measurement.folder, draft)
    return measurement


def _recording_to_show(task: Run) -> Measurement | None:
    """Find the recording to show: the newest that is current, else the newest, with a notice that it is stale."""
    recordings = []
    for file in sorted((recordings_folder() / task.name).glob(f"*/{PROVENANCE}")):
        measurement = _read_measurement(task, file.parent, "recorded")
        if measurement.gpu is not None:  # a dry run on a CPU has none, and nothing to show
            recordings.append(measurement)
    if not recordings:
        return None
    recordings.sort(key=lambda recording: str(recording.provenance.get("utc")))
    current_ones = [recording for recording in recordings if _why_stale(task, recording) is None]
    shown = (current_ones or recordings)[-1]
    notice = _why_stale(task, shown)
    if notice is None:
        return shown
    if os.environ.get("NSIGHTKIT_PUBLISH") == "1":  # the published site must not show a stale recording
        raise TraceError(shown.folder or task.name, notice, f"record it again on a GPU: nox -s record -- {task.script}")
    return dataclasses.replace(shown, notice=f"This recording is stale: {notice}.")


def _why_stale(task: Run, recording: Measurement) -> str | None:
    """Say why a recording no longer belongs to the page; None where it does, or a reviewer accepted it."""
    if recording.provenance.get("accepted"):
        return None
    if recording.parameters != task.parameters:
        return "the page's parameters have changed since"
    if recording.provenance.get("revision") != task.revision:
        return "the page's revision has changed since"
    return None


def _read_measurement(task: Run, folder: Path, mode: str) -> Measurement:
    """Read a measurement's files; traces are read when they are asked for."""
    with reading(folder, "cannot be read", "remove the folder and record again"):
        provenance: Json = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
        samples = pd.read_parquet(folder / SAMPLES)
        rows = pd.read_parquet(folder / ROWS) if (folder / ROWS).exists() else pd.DataFrame()
    return Measurement(task.name, mode, provenance["parameters"], provenance, samples, rows, folder, task.script)


# -- the answer of a page ---------------------------------------------------------------------------------------


def headline(measured_answer: str, *runs: Measurement, otherwise: str, badge: str, **findings: float | str) -> Json:
    """Give a page's answer: what its runs on a GPU say, else what the page can answer without them.

    Parameters
    ----------
    measured_answer : str
        The answer that the runs on a GPU give.
    *runs : Measurement
        Those that are compared, at least one.
    otherwise : str
        The answer without a GPU's runs.
    badge : str
        What that answer rests on: ``"exact"``, ``"predicted for an H200"``, or the label of a case file.
    **findings
        More values that prose refers to.

    Returns
    -------
    dict
        ``verdict``, ``badge`` and the other findings. The runs' answer is printed; without them, `otherwise`.
    """
    machines = {measurement.gpu or "CPU" for measurement in runs}
    if len(machines) > 1:
        measured_answer = f"The runs are of different machines ({', '.join(sorted(machines))}) and cannot be compared."
    # A run that is missing is false, and counts as one on a CPU. Small runs on a CPU print their answer, too; the page
    # claims only what a GPU measured.
    print(textwrap.fill(measured_answer if all(runs) else otherwise))
    if len(machines) > 1 or "CPU" in machines:
        return {"verdict": otherwise, "badge": badge, **findings}
    return {"verdict": measured_answer, "badge": f"measured, {runs[0].gpu}", **findings}
