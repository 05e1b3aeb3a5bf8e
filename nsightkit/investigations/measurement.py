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
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsightkit.capture import provenance as provenances
from nsightkit.capture.children import child_environment, has_gpu
from nsightkit.errors import NsightkitError, UsageError
from nsightkit.investigations import forked, profiled, recordings
from nsightkit.investigations.parts import Part, find
from nsightkit.trace._process import run, tail

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from nsightkit.trace.model import Trace
    from nsightkit.trace.ncu import Report
    from nsightkit.trace.snapshot import Snapshot

__all__ = ["Measurement", "measure", "run_child"]

_log = logging.getLogger(__name__)
#: The profile of a part, before it is recorded.
_PROFILE = "trace.json.gz"
_MODES = ("live", "replay", "smoke")
#: A recording older than this says so: drivers and libraries have moved on. NSIGHTKIT_MAX_AGE_DAYS sets another.
_MAX_AGE_DAYS = 180


@dataclasses.dataclass(frozen=True, eq=False)
class Measurement:
    """What was measured of one part, and where it comes from.

    Parameters
    ----------
    folder : Path
        Holds the profile (``trace.json.gz``, in a recording the Parquet folder ``trace``), and where the part asks for
        them and there are any: ``nsys``, a trace, and ``ncu.csv``, counters, of another run of the part under Nsight
        Systems or Nsight Compute; ``snapshot.pickle``, a memory snapshot as PyTorch writes it.
    mode : {"live", "replay", "smoke"}
    samples : DataFrame
        ``metric``, ``index``, ``value``: raw samples; the metric's name holds its unit.
    provenance : dict
    notice : str or None
        Why this is not what it could be, such as a recording that is stale.
    recorded_on : tuple of str
        Folder names of all GPUs of which there is a recording that may be shown; the one shown is among them.
    """

    folder: Path
    mode: str
    samples: pd.DataFrame
    provenance: dict[str, Any]
    notice: str | None = None
    recorded_on: tuple[str, ...] = ()

    @property
    def investigation(self) -> str:
        """Which investigation it is of."""
        return str(self.provenance["investigation"])

    @property
    def part(self) -> str:
        """Which part of the investigation it is."""
        return str(self.provenance["part"])

    def _file(self, name: str) -> Path | None:
        place = self.folder / name
        return place if place.exists() else None

    @property
    def snapshot_path(self) -> Path | None:
        """A memory snapshot, as PyTorch writes it; None where the part takes none."""
        return self._file(recordings.SNAPSHOT)

    @property
    def ncu_path(self) -> Path | None:
        """What Nsight Compute counted in another run of the part; None where there is nothing."""
        return self._file(recordings.NCU)

    @property
    def nsys_notice(self) -> str | None:
        """Why Nsight Systems captured nothing, where the part asks for it."""
        return self._notice("nsys", self._file(recordings.NSYS))

    @property
    def ncu_notice(self) -> str | None:
        """Why there are no counters, or not of the whole part, where the part asks for them."""
        return self._notice("ncu", self.ncu_path)

    def _notice(self, tool: str, found: Path | None) -> str | None:
        if find(self.investigation, self.part).profiled != tool:
            return None
        said = (self.provenance.get(tool) or {}).get("notice")
        return said or (None if found else "it was recorded without")

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
        return self.folder if self.mode == "replay" else None

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

        return load(self.folder / (recordings.TRACE if self.mode == "replay" else _PROFILE), cache=False)

    @functools.cached_property
    def nsys_trace(self) -> Trace | None:
        """The same part once more, as Nsight Systems saw a few steady steps of it; None where it did not."""
        from nsightkit.trace import load

        place = self._file(recordings.NSYS)
        return load(place, cache=False) if place else None

    @functools.cached_property
    def ncu_report(self) -> Report | None:
        """The counters of the kernels of a few steady steps, from another run; None where there are none."""
        from nsightkit.trace.ncu import read

        return read(self.ncu_path) if self.ncu_path else None

    @functools.cached_property
    def snapshot(self) -> Snapshot | None:
        """The memory of the first steps, from before the model was built; None where the part takes no snapshot."""
        from nsightkit.trace.snapshot import read

        return read(self.snapshot_path) if self.snapshot_path else None

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
        return Measurement(recording.path, mode, recording.samples(), recording.provenance, notice, recorded_on)
    folder = Path(tempfile.mkdtemp(prefix="nsightkit-"))
    command = f"nsightkit.investigations.measure({investigation!r}, {part!r})"
    try:
        samples, provenance = run_child(which, mode, folder, kind="smoke", command=command, timeout_s=timeout_s)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    measured = Measurement(folder, mode, recordings.frame(samples), provenance, notice)
    # The profile is read when it is asked for, so its folder lives as long as the measurement.
    weakref.finalize(measured, shutil.rmtree, folder, ignore_errors=True)
    return measured


def _decide(part: Part) -> tuple[str, recordings.Recording | None, str | None, tuple[str, ...]]:
    forced = os.environ.get("NSIGHTKIT_MODE", "")
    if forced and forced not in _MODES:
        raise UsageError(f"NSIGHTKIT_MODE is {forced!r}; it can be {', '.join(_MODES)}, or unset")
    live = forced == "live" or (not forced and has_gpu())
    if live and not has_gpu():
        raise NsightkitError(
            "NSIGHTKIT_MODE=live, but torch sees no CUDA GPU here; run 'nsightkit doctor', or unset NSIGHTKIT_MODE"
        )
    if live or forced == "smoke":
        return "live" if live else "smoke", None, None, ()
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


def run_child(
    part: Part, mode: str, folder: Path, *, kind: str, command: str, timeout_s: float
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Measure a part in a process of its own: a fresh interpreter, or one forked from such for a smoke run.

    A part that asks for it is then captured a second time, in another process under Nsight Systems or Nsight Compute.

    Parameters
    ----------
    part : Part
    mode : {"live", "smoke"}
    folder : Path
        Gets ``trace.json.gz``, ``snapshot.pickle`` of a part that takes one, and ``nsys`` or ``ncu.csv`` of the second
        capture, if it works.
    kind : str
        What the provenance of a CPU run calls it; a GPU's is always ``measured``.
    command : str
        What the provenance says was run.
    timeout_s : float
        For both. The second capture takes at most five minutes of it; in a smoke run, which must stay quick, one.

    Returns
    -------
    samples : dict of str to list
    provenance : dict

    Raises
    ------
    NsightkitError
        The child failed or took too long; the message holds the end of what it wrote.
    """
    asked = {"investigation": part.investigation, "part": part.name, "mode": mode, "folder": str(folder)}
    job = json.dumps(asked | {"kind": kind, "command": command})
    name = f"{part.investigation}/{part.name} ({mode})"
    begin = time.monotonic()
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
        torchless = "No module named 'torch'" in done.stdout
        hint = "; install torch first (pip install 'nsightkit[torch]')" if torchless else ""
        raise NsightkitError(f"{name} failed with exit code {done.returncode}{hint}: {tail(done.stdout, 4)}")
    samples, provenance = result["samples"], result["provenance"]
    if part.profiled:
        left = max(timeout_s - (time.monotonic() - begin), 1.0)
        limit_s = min(left, 60.0 if mode == "smoke" else 300.0)
        found = profiled.capture(part, mode, folder, timeout_s=limit_s, environment=child_environment())
        provenance[part.profiled] = provenances.scrub(found)
    return samples, provenance


def _run_job(job: str, mode: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    environment = child_environment()
    if mode == "smoke" and forked.supported():
        with contextlib.suppress(OSError):
            return forked.run(job, timeout_s, environment)
    return run([sys.executable, "-m", "nsightkit.investigations.child", job], timeout_s, env=environment)
