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
import logging
import os
import tempfile
import textwrap
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nsightkit.capture import provenance as provenances
from nsightkit.capture.children import has_gpu
from nsightkit.errors import NsightkitError, UsageError
from nsightkit.investigations import recordings
from nsightkit.investigations.child import run_child
from nsightkit.investigations.parts import Part, find
from nsightkit.trace import load, ncu
from nsightkit.trace import snapshot as snapshots
from nsightkit.trace.model import Trace

__all__ = ["Measurement", "headline", "measure", "run_child", "same_machine"]

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
    def nsys_notice(self) -> str | None:
        """Why Nsight Systems captured nothing, where the part asks for it."""
        return self._notice("nsys", recordings.NSYS)

    @property
    def ncu_notice(self) -> str | None:
        """Why there are no counters, or not of the whole part, where the part asks for them."""
        return self._notice("ncu", recordings.NCU)

    def _notice(self, tool: str, file: str) -> str | None:
        asked = find(self.investigation, self.part).profiled == tool
        said = (self.provenance.get(tool) or {}).get("notice")
        return (said or (None if self._file(file) else "it was recorded without")) if asked else None

    @property
    def age_days(self) -> int | None:
        """Days since it was recorded; None for what was measured in this build."""
        if self.mode == "replay":
            with contextlib.suppress(ValueError):
                then = dt.datetime.fromisoformat(str(self.provenance.get("utc")))
                return max((dt.datetime.now(dt.UTC) - then.replace(tzinfo=then.tzinfo or dt.UTC)).days, 0)
        return None

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
        return load(self.folder / (recordings.TRACE if self.mode == "replay" else _PROFILE), cache=False)

    @functools.cached_property
    def nsys_trace(self) -> Trace | None:
        """The same part once more, as Nsight Systems saw a few steady steps of it; None where it did not."""
        return load(place, cache=False) if (place := self._file(recordings.NSYS)) else None

    @functools.cached_property
    def ncu_report(self) -> ncu.Report | None:
        """The counters of the kernels of a few steady steps, from another run; None where nothing was counted."""
        return ncu.read(place) if (place := self._file(recordings.NCU)) else None

    @functools.cached_property
    def snapshot(self) -> snapshots.Snapshot | None:
        """The memory of the first steps, from before the model was built; None where the part takes no snapshot."""
        return snapshots.read(self.snapshot_path) if self.snapshot_path else None

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
        values = self.values(metric)
        return float(np.median(values)) if len(values) else None

    @functools.cached_property
    def accepted(self) -> str | None:
        """Why a recording counts whose code has changed since it was made; None where it has not changed."""
        if self.mode == "replay":
            wanted = recordings.part_key(find(self.investigation, self.part))
            if found := recordings.acceptance(self.provenance, wanted):
                since = str(found.get("since") or "it was recorded")[:12]
                return f"the code has changed since {since}; {found['because']}"
        return None

    def _rows(self) -> list[tuple[str, str]]:
        return [*provenances.rows(self.provenance), *([("Accepted", self.accepted)] if self.accepted else [])]

    def __repr__(self) -> str:
        lines = [f"{self.investigation}, {self.part}: {self.label}", *([self.notice] if self.notice else [])]
        return "\n".join([*lines, *(f"  {name}: {value}" for name, value in self._rows())])

    def _repr_html_(self) -> str:
        escape = functools.partial(html.escape, quote=True)
        banner, age = "", self.age_days
        old = f"This recording is {age} days old" if age is not None and age > _max_age_days() else None
        if self.mode == "smoke" or self.notice or old:
            words = ". ".join(escape(text) for text in (self.label, old, self.notice) if text)
            banner = f'<p class="nsightkit-banner" role="note">{words}</p>'
        facts = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in self._rows())
        title = f"{escape(self.investigation)}, {escape(self.part)}"
        # The banner, where there is one, has said how; then say on what.
        dated = "" if age is None else f"{age} days before this page was built"
        said = "; ".join(filter(None, ["" if banner else self.label, dated, provenances.in_short(self.provenance)]))
        said += f". Accepted: {self.accepted}" if self.accepted else ""
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


def same_machine(*runs: Measurement) -> bool:
    """Say whether runs are of one kind of machine, so that they can be compared.

    Parameters
    ----------
    *runs : Measurement
    """
    return len({(run.mode, (run.provenance["gpu"] or {}).get("name")) for run in runs}) == 1


def headline(said: str, *runs: Measurement, otherwise: str, badge: str, **findings: float | str) -> dict[str, Any]:
    """Give what a page answers: what its own runs say, unless they were small runs on a CPU.

    Parameters
    ----------
    said : str
        What the runs say, if they are of the same machine.
    *runs : Measurement
        Those that are compared.
    otherwise : str
        What the page answers without a GPU's runs.
    badge : str
        What that rests on: ``"exact"``, ``"predicted for an H200"``, or the label of a case file.
    **findings
        More that prose refers to.

    Returns
    -------
    dict
        ``verdict``, ``badge`` and the other findings. What the runs say is printed.
    """
    if not same_machine(*runs):
        said = "the runs are not of the same machine; nothing to compare."
    print(textwrap.fill(said))
    if all(run.mode == "smoke" for run in runs):
        return {"verdict": otherwise, "badge": badge, **findings}
    gpu = (runs[0].provenance["gpu"] or {}).get("name", "")
    return {"verdict": said, "badge": f"measured, {gpu}", **findings}


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
    forced = os.environ.get("NSIGHTKIT_MODE", "")
    if forced and forced not in _MODES:
        raise UsageError(f"NSIGHTKIT_MODE is {forced!r}; it can be {', '.join(_MODES)}, or unset")
    live = forced in ("", "live") and has_gpu()
    if forced == "live" and not live:
        raise NsightkitError(
            "NSIGHTKIT_MODE=live, but torch sees no CUDA GPU here; run 'nsightkit doctor', or unset NSIGHTKIT_MODE"
        )
    if live or forced == "smoke":
        return _measured(which, "live" if live else "smoke", None, timeout_s)
    recorded, notice = _recorded(which)
    if recorded is not None:
        return recorded
    if forced == "replay":
        raise NsightkitError(
            f"NSIGHTKIT_MODE=replay, but {recordings.folder()} holds no valid recording of {investigation}/{part}; "
            "make one on a GPU with 'python -m nsightkit record', or unset NSIGHTKIT_MODE"
        )
    return _measured(which, "smoke", notice, timeout_s)


def _measured(part: Part, mode: str, notice: str | None, timeout_s: float) -> Measurement:
    """Measure now, on the GPU or small on the CPU."""
    command = f"nsightkit.investigations.measure({part.investigation!r}, {part.name!r})"
    with contextlib.ExitStack() as stack:
        scratch = tempfile.TemporaryDirectory(prefix="nsightkit-", ignore_cleanup_errors=True)
        folder = Path(stack.enter_context(scratch))
        samples, provenance = run_child(part, mode, folder, kind="smoke", command=command, timeout_s=timeout_s)
        measured = Measurement(folder, mode, recordings.frame(samples), provenance, notice)
        # The profile is read when it is asked for, so its folder lives as long as the measurement.
        weakref.finalize(measured, stack.pop_all().close)
        return measured


def _recorded(part: Part) -> tuple[Measurement | None, str | None]:
    """Find the recording to show, else say why the newest one is not shown."""
    found = recordings.find(part)
    current = {recording.path.parent.name: recording for recording in found if recording.state == "current"}
    if current:
        # The newest, unless pages of one GPU are wanted, and there is one of it.
        shown = current.get(os.environ.get("NSIGHTKIT_GPU", "")) or next(iter(current.values()))
        on = tuple(sorted(current))
        return Measurement(shown.path, "replay", shown.samples(), shown.provenance, recorded_on=on), None
    if not found:
        return None, None
    name = f"{part.investigation}/{found[0].path.parent.name}/{part.name}"
    notice = f"The recording {name} is not shown: {found[0].reason}."
    _log.warning("%s", notice)
    if os.environ.get("NSIGHTKIT_PUBLISH") == "1":
        raise NsightkitError(
            f"{name}: the recording cannot be published ({found[0].reason}); "
            f"record it again on a GPU: python -m nsightkit record --only {part}"
        )
    return None, notice
