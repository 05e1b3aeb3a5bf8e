"""Live, replay or smoke: one call that gives a measurement wherever the page is built.

With a GPU a part is measured now. Without one, a recording is shown that was made by exactly this code.
Without that, a small version runs on the CPU, under a banner: its shapes are right, its figures are not a GPU's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import functools
import html
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsightkit.capture import provenance as provenances
from nsightkit.capture.children import child_environment, has_gpu
from nsightkit.errors import NsightkitError, UsageError
from nsightkit.investigations import recordings, second, warm
from nsightkit.investigations.parts import Part, find
from nsightkit.trace._process import run, tail

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from nsightkit.trace.model import Trace
    from nsightkit.trace.ncu import Report
    from nsightkit.trace.snapshot import Snapshot

__all__ = ["Measurement", "measure", "run_child", "run_second"]

_log = logging.getLogger(__name__)
_MODES = ("live", "replay", "smoke")
#: A recording older than this says so: drivers and libraries have moved on. NSIGHTKIT_MAX_AGE_DAYS sets another.
_MAX_AGE_DAYS = 180


@dataclasses.dataclass(frozen=True, eq=False)
class Measurement:
    """What was measured of one part, and where it comes from.

    Parameters
    ----------
    investigation, part : str
    mode : {"live", "replay", "smoke"}
    trace_path : Path
        The profile: a ``.json.gz`` (live, smoke) or a Parquet folder (replay).
    samples : DataFrame
        ``metric``, ``index``, ``value``: raw samples; the metric's name holds its unit.
    provenance : dict
    notice : str or None
        Why this is not what it could be, such as a recording that is stale.
    nsys_trace_path : Path or None
        What Nsight Systems captured of another run of the part.
    nsys_notice : str or None
        Why there is no such capture, where the part asks for one.
    snapshot_path : Path or None
        A memory snapshot, as PyTorch writes it, of a part that takes one.
    ncu_path : Path or None
        What Nsight Compute counted in another run of the part.
    ncu_notice : str or None
        Why there are no counters, or not of the whole part, where the part asks for them.
    recorded_on : tuple of str
        Folder names of all GPUs of which there is a recording that may be shown; the one shown is among them.
    """

    investigation: str
    part: str
    mode: str
    trace_path: Path
    samples: pd.DataFrame
    provenance: dict[str, Any]
    notice: str | None = None
    nsys_trace_path: Path | None = None
    nsys_notice: str | None = None
    snapshot_path: Path | None = None
    ncu_path: Path | None = None
    ncu_notice: str | None = None
    recorded_on: tuple[str, ...] = ()

    @property
    def age_days(self) -> int | None:
        """Days since it was recorded; None for what was measured in this build."""
        if self.mode != "replay":
            return None
        try:
            then = dt.datetime.fromisoformat(str(self.provenance.get("utc")))
        except ValueError:
            return None
        then = then if then.tzinfo else then.replace(tzinfo=dt.UTC)
        return max((dt.datetime.now(dt.UTC) - then).days, 0)

    @property
    def recording_path(self) -> Path | None:
        """Folder of the recording that is shown; None for what was measured in this build."""
        return self.trace_path.parent if self.mode == "replay" else None

    @property
    def label(self) -> str:
        """Where the figures come from, in words."""
        return provenances.label(self.mode, self.provenance)

    @property
    def parameters(self) -> dict[str, Any]:
        """Sizes and switches of the workload."""
        return dict(self.provenance["parameters"])

    @functools.cached_property
    def trace(self) -> Trace:
        """The profile of a few steady steps."""
        from nsightkit.trace import load

        return load(self.trace_path, cache=False)

    @functools.cached_property
    def nsys_trace(self) -> Trace | None:
        """The same part once more, as Nsight Systems saw a few steady steps of it; None where it did not."""
        from nsightkit.trace import load

        return None if self.nsys_trace_path is None else load(self.nsys_trace_path, cache=False)

    @functools.cached_property
    def ncu_report(self) -> Report | None:
        """The counters of the kernels of a few steady steps, from another run; None where there are none."""
        from nsightkit.trace.ncu import read

        return None if self.ncu_path is None else read(self.ncu_path)

    @functools.cached_property
    def snapshot(self) -> Snapshot | None:
        """The memory of the first steps, from before the model was built; None where the part takes no snapshot."""
        from nsightkit.trace.snapshot import read

        return None if self.snapshot_path is None else read(self.snapshot_path)

    def values(self, metric: str) -> np.ndarray:
        """Give the samples of one metric.

        Parameters
        ----------
        metric : str
            Such as ``step_ns``.

        Returns
        -------
        ndarray of float64
            Empty when it was not measured.
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
            None when it was not measured.
        """
        import numpy as np

        values = self.values(metric)
        return float(np.median(values)) if len(values) else None

    def __repr__(self) -> str:
        lines = [f"{self.investigation}, {self.part}: {self.label}"]
        if self.notice:
            lines.append(self.notice)
        return "\n".join(lines + [f"  {name}: {value}" for name, value in provenances.rows(self.provenance)])

    def _repr_html_(self) -> str:
        escape = functools.partial(html.escape, quote=True)
        banner, age = "", self.age_days
        old = f"This recording is {age} days old" if age is not None and age > _max_age_days() else None
        if self.mode == "smoke" or self.notice or old:
            words = ". ".join(escape(text) for text in (self.label, old, self.notice) if text)
            banner = f'<p class="nsightkit-banner" role="note">{words}</p>'
        facts = "".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
            for name, value in provenances.rows(self.provenance)
        )
        title = f"{escape(self.investigation)}, {escape(self.part)}"
        # The banner, where there is one, has said how; then say on what.
        dated = [] if age is None else [f"{age} days before this page was built"]
        said = "; ".join([*([] if banner else [self.label]), *dated, provenances.in_short(self.provenance)])
        return (
            f'<aside class="nsightkit-provenance" data-mode="{escape(self.mode)}" aria-label="Provenance: {title}">'
            f"{banner}<p><strong>{title}:</strong> {escape(said)}</p>{self._other_gpus()}"
            f"<details><summary>How this was measured</summary><dl>{facts}</dl></details></aside>"
        )

    def _other_gpus(self) -> str:
        """Name the GPUs there are recordings of; the site's script makes links of them where each has its pages."""
        if len(self.recorded_on) < 2:
            return ""
        shown = provenances.slug(str((self.provenance.get("gpu") or {}).get("name", "")))
        names = "".join(
            f'<li data-gpu="{html.escape(name, quote=True)}"{" aria-current=true" if name == shown else ""}>'
            f"{html.escape(name)}</li>"
            for name in self.recorded_on
        )
        return f'<ul class="nsightkit-gpus" aria-label="Recorded on">{names}</ul>'


def _max_age_days() -> float:
    given = os.environ.get("NSIGHTKIT_MAX_AGE_DAYS", "")
    try:
        return float(given) if given else _MAX_AGE_DAYS
    except ValueError:
        raise UsageError(f"NSIGHTKIT_MAX_AGE_DAYS is {given!r}; give a number of days, or unset it") from None


def measure(investigation: str, part: str, *, timeout_s: float = 600.0) -> Measurement:
    """Measure one part of an investigation, or show its recording, or run it small on the CPU.

    Parameters
    ----------
    investigation, part : str
        Keys of :data:`nsightkit.investigations.parts.INVESTIGATIONS`.
    timeout_s : float

    Returns
    -------
    Measurement

    Raises
    ------
    NsightkitError
        The measurement failed; or ``NSIGHTKIT_MODE`` demands what is not possible here; or
        ``NSIGHTKIT_PUBLISH`` is 1 and the recording is stale.
    """
    which = find(investigation, part)
    mode, recording, notice, recorded_on = _decide(which)
    if recording is not None:
        return Measurement(
            investigation,
            part,
            mode,
            recording.trace_path,
            recording.samples(),
            recording.provenance,
            notice,
            recording.nsys_path,
            _notice(which, "nsys", recording.provenance, recording.nsys_path),
            recording.snapshot_path if which.watch == "remembered" else None,
            recording.ncu_path,
            _notice(which, "ncu", recording.provenance, recording.ncu_path),
            recorded_on,
        )
    folder = Path(tempfile.mkdtemp(prefix="nsightkit-"))
    command = f"nsightkit.investigations.measure({investigation!r}, {part!r})"
    try:
        samples, provenance = run_child(which, mode, folder, kind="smoke", command=command, timeout_s=timeout_s)
        provenance |= run_second(which, mode, folder, timeout_s=timeout_s)
        by_nsys = folder / "nsys" if (folder / "nsys").is_dir() else None
        by_ncu = folder / "ncu.csv" if (folder / "ncu.csv").is_file() else None
        measured = Measurement(
            investigation,
            part,
            mode,
            folder / "trace.json.gz",
            recordings.frame(samples),
            provenance,
            notice,
            by_nsys,
            _notice(which, "nsys", provenance, by_nsys),
            folder / "snapshot.pickle" if which.watch == "remembered" else None,
            by_ncu,
            _notice(which, "ncu", provenance, by_ncu),
        )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    # The profile is read when it is asked for, so its folder lives as long as the measurement.
    weakref.finalize(measured, shutil.rmtree, folder, ignore_errors=True)
    return measured


def _decide(part: Part) -> tuple[str, recordings.Recording | None, str | None, tuple[str, ...]]:
    forced = os.environ.get("NSIGHTKIT_MODE", "")
    if forced and forced not in _MODES:
        raise UsageError(f"NSIGHTKIT_MODE is {forced!r}; it can be {', '.join(_MODES)}, or unset")
    if forced == "live" or (not forced and has_gpu()):
        if not has_gpu():
            raise NsightkitError(
                "NSIGHTKIT_MODE=live, but torch sees no CUDA GPU here; run 'nsightkit doctor', or unset NSIGHTKIT_MODE"
            )
        return "live", None, None, ()
    if forced == "smoke":
        return "smoke", None, None, ()
    found = recordings.find(part)
    current = [recording for recording in found if recording.state == "current"]
    if current:
        on = [recording.path.parent.name for recording in current]
        # The newest, unless pages of one GPU are wanted, and there is one of it.
        wanted = os.environ.get("NSIGHTKIT_GPU", "")
        return "replay", current[on.index(wanted) if wanted in on else 0], None, tuple(sorted(set(on)))
    notice = None
    if found:
        newest = found[0]
        name = f"{part.investigation}/{newest.path.parent.name}/{part.name}"
        notice = f"The recording {name} is not shown: {newest.reason}."
        _log.warning("%s", notice)
        if os.environ.get("NSIGHTKIT_PUBLISH") == "1":
            raise NsightkitError(
                f"{name}: the recording cannot be published ({newest.reason}); "
                f"record it again on a GPU: python -m nsightkit record --only {part.investigation}/{part.name}"
            )
    if forced == "replay":
        raise NsightkitError(
            f"NSIGHTKIT_MODE=replay, but there is no valid recording of {part.investigation}/{part.name} "
            f"in {recordings.folder()}; make one on a GPU with 'python -m nsightkit record', or unset NSIGHTKIT_MODE"
        )
    return "smoke", None, notice, ()


@functools.cache
def run_child(
    part: Part, mode: str, folder: Path, *, kind: str, command: str, timeout_s: float
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Measure a part in a process of its own: a fresh interpreter, or one forked from such for a smoke run.

    Parameters
    ----------
    part : Part
    mode : {"live", "smoke"}
    folder : Path
        Gets ``trace.json.gz``, and ``snapshot.pickle`` of a part that takes one.
    kind : str
        What the provenance of a CPU run calls it; a GPU's is always ``measured``.
    command : str
        What the provenance says was run.
    timeout_s : float

    Returns
    -------
    samples : dict of str to list
    provenance : dict

    Raises
    ------
    NsightkitError
        The child failed or took too long; the message holds the end of what it wrote.
    """
    job = json.dumps(
        {
            "investigation": part.investigation,
            "part": part.name,
            "mode": mode,
            "folder": str(folder),
            "kind": kind,
            "command": command,
        }
    )
    name = f"{part.investigation}/{part.name} ({mode})"
    try:
        done = _run_job(job, mode, timeout_s)
    except subprocess.TimeoutExpired as error:
        raise NsightkitError(
            f"{name} was not measured within {timeout_s:g} s and was ended; "
            f"it last said: {tail(error.output, 3) or 'nothing'}"
        ) from error
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        result = None
    if done.returncode or result is None:
        hint = ""
        if "No module named 'torch'" in done.stdout:
            hint = "; install torch first (pip install 'nsightkit[torch]')"
        raise NsightkitError(f"{name} failed with exit code {done.returncode}{hint}: {tail(done.stdout, 4)}")
    return result["samples"], result["provenance"]


def _run_job(job: str, mode: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    environment = child_environment()
    if mode == "smoke" and warm.supported():
        with contextlib.suppress(OSError):
            return warm.run(job, timeout_s, environment)
    return run([sys.executable, "-m", "nsightkit.investigations.child", job], timeout_s, env=environment)


def run_second(part: Part, mode: str, folder: Path, *, timeout_s: float) -> dict[str, Any]:
    """Capture a part that asks for it a second time, after it was measured, in a process of its own.

    Parameters
    ----------
    part : Part
    mode : {"live", "smoke"}
    folder : Path
        Gets the store ``nsys`` or ``ncu.csv``, if it works.
    timeout_s : float
        At most so long; in a smoke run, which must stay quick, at most a minute.

    Returns
    -------
    dict
        What it adds to the provenance: ``nsys`` or ``ncu``, or nothing where the part asks for none.
    """
    if part.second is None:
        return {}
    limit = min(timeout_s, 60.0 if mode == "smoke" else 300.0)
    found = second.capture(part, mode, folder, timeout_s=limit, environment=child_environment())
    return {part.second: provenances.scrub(found)}


def _notice(part: Part, tool: str, record: Mapping[str, Any], place: Path | None) -> str | None:
    if part.second != tool:
        return None
    said = (record.get(tool) or {}).get("notice")
    return str(said) if said else None if place is not None else "it was recorded without"
