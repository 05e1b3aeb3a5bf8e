"""The recorder: measure every part on a GPU and keep what it produced, for machines without one.

The folder ``.raw`` beside the recordings holds, in ``<investigation>/<part>``, what a process leaves of its part until
it is written as a recording, and of a part that failed also its whole log, ``failure.txt``. A result that is there is
written the next time, and not measured again.

Time on a GPU is short. A page of which a part is missing shows a smoke run, so what counts is how many pages are
complete when the time is up: the page that is complete soonest comes first, then the next.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd

from nsightkit.capture.children import gpu_name
from nsightkit.capture.provenance import slug, tools
from nsightkit.errors import NsightkitError, UsageError
from nsightkit.investigations import packing, recordings
from nsightkit.investigations import preflight as checks
from nsightkit.investigations.child import FAILURE, capture_child, read_result, run_children
from nsightkit.investigations.parts import INVESTIGATIONS, Part, parts
from nsightkit.trace import load
from nsightkit.trace.model import Trace

__all__ = ["START_S", "Step", "completed", "needs", "order", "plan", "record"]

#: Investigations whose parts are measured one after the other in one process.
_TOGETHER = ("ceilings",)
#: What a process costs besides what its part takes.
START_S = 1.0
#: Every investigation has a page, which reads all its parts. These pages read some of the ceilings as well.
_CEILINGS = {
    "roofline": ("before", "fp32", "copy"),
    "ladder": ("before", "layer", "fp8", "fp32", "copy", "triad", "read"),
    "decode": ("before", "fp32", "copy", "triad", "read"),
    "limiters": ("before", "fp32", "copy"),
}
#: Second captures, under nsys and ncu, take no more than this in all, and each no more than that.
_CAPTURES_S, _CAPTURE_S = 90.0, 45.0
#: A part that takes longer than so many times its estimate, and this, hangs.
_HANGS, _HANGS_S = 4.0, 60.0
#: What each profiler leaves in a recording.
_CAPTURED = {"nsys": recordings.NSYS, "ncu": recordings.NCU}
_Say = Callable[[str], object]


def plan(only: Sequence[str] | None = None, out: Path | None = None) -> list[dict[str, Any]]:
    """Say what :func:`record` would measure, in which order, and how long it would take.

    Recordings of this machine's GPU count, or those of all GPUs if it has no GPU.

    Parameters
    ----------
    only, out
        As for :func:`record`.

    Returns
    -------
    list of dict
        ``investigation``, ``part``, ``estimate_s``, ``total_s`` (all until its end), ``completes``: the investigations
        whose pages are complete then.

    Raises
    ------
    UsageError
        `only` names what there is not.
    """
    gpu = gpu_name()
    return [
        {
            "investigation": step.part.investigation,
            "part": step.part.name,
            "estimate_s": round(step.seconds, 1),
            "total_s": round(step.total_s, 1),
            "completes": ", ".join(step.pages),
        }
        for step in _Recorder(out or recordings.folder(), slug(gpu) if gpu else None).steps(_chosen(only))
    ]


def record(
    only: Sequence[str] | None = None,
    budget_s: float | None = None,
    out: Path | None = None,
    *,
    pack: Path | None = None,
    part_mb: float = 15.0,
    preflight: bool = True,
    dry_run: bool = False,
    echo: _Say = lambda _: None,
) -> list[dict[str, Any]]:
    """Record the investigations' parts: next is always the page that is complete soonest.

    A part that is recorded already, on this kind of GPU and by this very code, is kept: call it again to go on after an
    interruption. A part that fails does not stop the others; it is tried once more after them, and comes last the next
    time. Captures under nsys and ncu come after all parts; what they miss, the next call can still get.

    Parameters
    ----------
    only : sequence of str, optional
        Investigations (``starved-input``) or parts (``starved-input/before``).
    budget_s : float, optional
        No part begins that would end later than this, and one that takes longer than expected is ended then.
    out : Path, optional
        Where to; the checkout's ``docs/recordings`` when omitted (a dry run must name another folder).
    pack : Path, optional
        Also pack the recordings into this folder, whenever a page is complete and at the end.
    part_mb : float
        The most that a packed file may have.
    preflight : bool
        First find out what works on this machine, unless that is known, and skip the parts that need what does not.
    dry_run : bool
        Print the plan, then go through everything with the small versions on the CPU. What it writes is not a
        recording.
    echo : callable
        Takes lines of progress.

    Returns
    -------
    list of dict
        ``investigation``, ``part``, ``status``, ``seconds``, ``detail``. The status is ``recorded``, ``kept``,
        ``failed``, ``skipped``, ``over budget``; of second captures ``captured`` or ``not captured``.

    Raises
    ------
    NsightkitError
        There is no GPU, or the recordings cannot be packed.
    UsageError
        `only` names what there is not.
    """
    begin = time.monotonic()
    chosen, where = _chosen(only), out or recordings.folder()
    gpu = None if dry_run else gpu_name()
    if dry_run and where.resolve() == recordings.folder().resolve():
        raise UsageError("a dry run writes no recordings; give it another folder with --out")
    if not dry_run and gpu is None:
        raise NsightkitError(
            "recordings are made on a GPU, and torch sees none here; run 'nsightkit doctor', or try --dry-run"
        )
    where.mkdir(parents=True, exist_ok=True)
    recorder = _Recorder(where, slug(gpu) if gpu else "no-gpu", pack, part_mb, echo)
    recorder.deadline = begin + (math.inf if budget_s is None else budget_s)
    recorder.pack_all()  # if that cannot be, it is said now and not at the end
    if dry_run:
        recorder.mode = "smoke"
        for step in recorder.steps(chosen):
            done = f"; completes {', '.join(step.pages)}" if step.pages else ""
            echo(f"{step.total_s:7.0f} s  {step.part}, {step.seconds:.0f} s{done}")
    elif preflight:
        found = checks.results(where / checks.SAVED, echo)
        recorder.broken = {row["check"]: row["detail"] for row in found if row["ok"] is False}
    try:
        with ThreadPoolExecutor(1) as writer:
            recorder.run(chosen, writer)
    finally:
        # Whatever ended it: what is there is what there will be.
        recorder.pack_all()
    return recorder.rows


def _chosen(only: Sequence[str] | None) -> list[Part]:
    """Find the parts that are named, or all."""
    named = {str(part): part for part in parts()}
    known = {*named, *(part.investigation for part in named.values())}
    unknown = [each for each in only or () if each not in known]
    if unknown:
        raise UsageError(f"nothing to record is called {unknown[0]!r}; there are {', '.join(sorted(known))}")
    return [part for whole, part in named.items() if not only or {part.investigation, whole} & set(only)]


class _Recorder:
    """What is recorded, what is to be, and what has become of it."""

    def __init__(
        self,
        where: Path,
        gpu: str | None,
        pack: Path | None = None,
        part_mb: float = 15.0,
        say: _Say = lambda _: None,
    ) -> None:
        self.where, self.gpu, self.pack, self.part_mb, self.say = where, gpu, pack, part_mb, say
        self.mode, self.deadline = "live", math.inf
        self.broken: Mapping[str, str] = {}
        self.have: dict[Part, recordings.Recording] = {}
        self.failures: dict[Part, str] = {}
        self.rows: list[dict[str, Any]] = []

    def steps(self, chosen: Sequence[Part]) -> list[Step]:
        """Find what is recorded, and plan the rest."""
        took: dict[Part, float] = {}
        for part in parts():
            for found in reversed(recordings.find(part, self.where)):  # the newest comes last, and wins
                if found.state != "refused" and self.gpu in (None, found.path.parent.name):
                    took[part] = float(found.provenance.get("duration_s") or part.seconds)
                    if found.state == "current":
                        self.have[part] = found
        todo = [part for part in chosen if part not in self.have]
        failed = [part for part in todo if self._failed(part)]
        return order(todo, self.have, lambda part: took.get(part, part.seconds), failed)

    def run(self, chosen: Sequence[Part], writer: ThreadPoolExecutor) -> None:
        """Write what an earlier call has measured, measure what is missing, then capture."""
        known = tools()
        for step in self.steps(chosen):
            self._salvage(step.part)
        waiting = deque(self.steps(chosen))
        salvaged = {f"{row['investigation']}/{row['part']}" for row in self.rows}
        for part in chosen:
            if part in self.have and str(part) not in salvaged:
                self._report(part, "kept", str(self.have[part].path))
        writing: list[tuple[Part, float, Future[tuple[str, str]]]] = []
        while waiting or writing:
            batch = self._next(waiting) if waiting else []
            again = [step for step in batch if self._failed(step.part)]
            start = time.monotonic()
            failures = self._measure(batch, known) if batch else []
            seconds = (time.monotonic() - start) / max(len(batch), 1)
            for part, took, written in writing:  # what was measured before has been written meanwhile
                self._report(part, *written.result(), took)
            writing = []
            for step, failure in zip(batch, failures, strict=True):
                if failure is None:
                    writing.append((step.part, seconds, writer.submit(self._keep, step.part)))
                elif time.monotonic() >= self.deadline:
                    self._report(step.part, "over budget", "it was ended when the time was up", seconds)
                elif step in again:
                    self._report(step.part, "failed", self._fail(step.part, failure), seconds)
                else:
                    self._fail(step.part, failure)
                    self.say(f"{step.part} failed, and comes once more after the others: {failure}")
                    waiting.append(step)
        self._capture(chosen)
        for part in chosen:
            if not self._failed(part):
                shutil.rmtree(self._raw(part), ignore_errors=True)
        for folder in (*self.where.glob(f"{recordings.RAW}/*"), self.where / recordings.RAW):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def pack_all(self) -> None:
        """Pack what is there, if that is wanted."""
        if self.pack is not None:
            packing.pack(self.where, self.pack, self.part_mb, echo=self.say)

    # -- a part ----------------------------------------------------------------------------------------------------

    def _raw(self, part: Part) -> Path:
        return self.where / recordings.RAW / part.investigation / part.name

    def _failed(self, part: Part) -> bool:
        return (self._raw(part) / FAILURE).is_file()

    def _next(self, waiting: deque[Step]) -> list[Step]:
        """Take the next step, with those that follow in the same process; none if it cannot be measured now."""
        batch = [waiting.popleft()]
        part = batch[0].part
        obstacle = self._obstacle(batch[0], 0.0)
        if obstacle:
            again = self.failures.get(part)
            self._report(part, *(("failed", again) if again else obstacle))
            return []
        while (
            waiting
            and part.investigation in _TOGETHER
            and part.investigation == waiting[0].part.investigation
            and not any(self._failed(step.part) for step in (batch[-1], waiting[0]))  # what has failed comes alone
            and not self._obstacle(waiting[0], sum(step.seconds for step in batch))
        ):
            batch.append(waiting.popleft())
        return batch

    def _obstacle(self, step: Step, before_s: float) -> tuple[str, str] | None:
        """Say why a part cannot be measured after some time."""
        lacking = sorted(self.broken.keys() & checks.needs(step.part)) if self.broken else []
        if lacking:
            return "skipped", f"it needs {lacking[0]}, which does not work here: {self.broken[lacking[0]]}"
        untried = [tried for tried, _ in self._uncaptured(parts()) if not tried]
        left = self.deadline - time.monotonic() - before_s - min(_CAPTURES_S, len(untried) * _CAPTURE_S)
        # Estimates are of a GPU.
        short = left < (0.0 if self.mode == "smoke" else step.seconds + START_S)
        return ("over budget", f"{max(left, 0.0):.0f} s were left") if short else None

    def _measure(self, batch: Sequence[Step], known: Mapping[str, Any]) -> list[NsightkitError | None]:
        """Measure parts in one process, in empty folders."""
        folders = {self._raw(step.part): step.part for step in batch}
        for raw in folders:
            shutil.rmtree(raw, ignore_errors=True)
            raw.mkdir(parents=True)
        self.say(f"{', '.join(str(step.part) for step in batch)} ...")
        most_s = _HANGS_S + _HANGS * sum(step.seconds for step in batch)
        return run_children(
            folders,
            self.mode,
            kind="dry-run",
            command=f"python -m nsightkit record --only {{part}}{' --dry-run' * (self.mode == 'smoke')}",
            timeout_s=min(self.deadline - time.monotonic(), most_s),
            known=known,
        )

    def _salvage(self, part: Part) -> None:
        """Try to write a result that an earlier call has not written, if there is one."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            if read_result(self._raw(part))[1]["key"] == recordings.part_key(part, self.mode):
                status, detail = self._keep(part)
                if status == "recorded":
                    self._report(part, status, f"{detail}, as it was measured before")
                else:  # then it is measured again
                    self.say(f"{part} was measured before and could not be written: {detail}")

    def _keep(self, part: Part) -> tuple[str, str]:
        """Write what was measured of a part as its recording, and say what became of it: a status and a detail."""
        raw = self._raw(part)
        try:
            samples, provenance = read_result(raw)
            self._write(part, load(raw / "trace.json.gz", cache=False), recordings.frame(samples), provenance, raw)
        # Whatever goes wrong with one part, the machine's time belongs to the others.
        except Exception as error:
            return "failed", self._fail(part, error)
        shutil.rmtree(raw, ignore_errors=True)
        pages = completed(self.have, part)
        if pages:
            self.say(f"complete: {', '.join(pages)}")
            try:
                self.pack_all()
            except NsightkitError as error:  # it is tried again, with the next page
                self.say(f"{error}")
        return "recorded", str(self.have[part].path)

    def _write(
        self, part: Part, trace: Trace, samples: pd.DataFrame, provenance: dict[str, Any], raw: Path, **captured: Any
    ) -> None:
        snapshot, smoke = raw / recordings.SNAPSHOT, self.mode == "smoke"
        place = recordings.write(
            trace,
            samples,
            provenance,
            self.where,
            snapshot=snapshot if snapshot.is_file() else None,
            dry_run=smoke,
            **captured,
        )
        self.have[part] = recordings.Recording(place, provenance, "current", "")

    def _fail(self, part: Part, error: Exception) -> str:
        """Keep the whole log of a part that failed, and say why it failed and where that is."""
        raw = self._raw(part)
        raw.mkdir(parents=True, exist_ok=True)
        (raw / FAILURE).write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        self.failures[part] = " ".join(f"{error}; all of it is in {raw}".split())
        return self.failures[part]

    def _report(self, part: Part, status: str, detail: str, seconds: float = 0.0) -> None:
        row = {"investigation": part.investigation, "part": part.name, "status": status}
        self.rows.append({**row, "seconds": round(seconds, 1), "detail": detail})
        self.say(f"{part}: {status}{f', {seconds:.1f} s' if seconds else ''} {detail}")

    # -- second captures -------------------------------------------------------------------------------------------

    def _uncaptured(self, chosen: Iterable[Part]) -> list[tuple[bool, Part]]:
        """Find recorded parts that lack what their profiler saw, and say whether that has been tried before."""
        recorded = [(self.have[part], part) for part in chosen if part.profiled and part in self.have]
        return [
            (part.profiled in recording.provenance, part)
            for recording, part in recorded
            if part.profiled not in self.broken and not (recording.path / _CAPTURED[str(part.profiled)]).exists()
        ]

    def _capture(self, chosen: Sequence[Part]) -> None:
        """Run parts once more under their profilers, each tool in turn: one that hangs costs the other no time."""
        until = min(self.deadline, time.monotonic() + _CAPTURES_S)
        for _, part in sorted(self._uncaptured(chosen), key=lambda one: (one[0], one[1].name != "before")):
            start = time.monotonic()
            if until - start < _CAPTURE_S / 2:
                self._report(part, "not captured", "no time was left for it; the next call tries it again")
                continue
            with tempfile.TemporaryDirectory(prefix="nsightkit-", ignore_cleanup_errors=True) as scratch:
                folder = Path(scratch)
                found = capture_child(part, self.mode, folder, min(until - start, _CAPTURE_S))
                try:
                    self._add(part, folder, found)
                except Exception as error:  # the recording is as it was
                    found = {"notice": " ".join(f"{error}".split())}
            status = "not captured" if "command" not in found else "captured"
            self._report(part, status, str(found.get("notice", "")), time.monotonic() - start)

    def _add(self, part: Part, folder: Path, found: dict[str, Any]) -> None:
        """Write a recording anew, with what a profiler saw."""
        old, nsys, ncu = self.have[part], folder / recordings.NSYS, folder / recordings.NCU
        captured = {
            "nsys": load(nsys, cache=False) if nsys.is_dir() else None,
            "ncu": ncu if ncu.is_file() else None,
        }
        trace, provenance = load(old.path / recordings.TRACE, cache=False), old.provenance | {str(part.profiled): found}
        self._write(part, trace, old.samples(), provenance, old.path, **captured)


# -- the order ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Step:
    """A part in the order in which parts are recorded.

    Parameters
    ----------
    part : Part
    seconds, total_s : float
        What it is expected to take, and all until its end.
    pages : tuple of str
        The investigations whose pages are complete with it.
    """

    part: Part
    seconds: float
    total_s: float
    pages: tuple[str, ...]


def needs(page: str) -> list[Part]:
    """List the parts that a page reads, in the order in which to measure them.

    Parameters
    ----------
    page : str
        The investigation that the page is about.
    """
    own = sorted(INVESTIGATIONS[page].values(), key=lambda part: part.seconds)
    return [*(INVESTIGATIONS["ceilings"][ceiling] for ceiling in _CEILINGS.get(page, ())), *own]


def completed(have: Collection[Part], last: Part) -> tuple[str, ...]:
    """Say which pages are complete since the last part was recorded.

    Parameters
    ----------
    have : collection of Part
        All parts that are recorded.
    last : Part
    """
    return tuple(page for page in INVESTIGATIONS if last in needs(page) and all(part in have for part in needs(page)))


def order(
    todo: Collection[Part], have: Collection[Part], seconds: Callable[[Part], float], failed: Collection[Part] = ()
) -> list[Step]:
    """Plan what is still to be recorded.

    The next page is always the one that takes the least time for what it still lacks; a part that several pages read is
    recorded with the first of them. What completes no page comes after what does, and what has failed before, last.

    Parameters
    ----------
    todo : collection of Part
    have : collection of Part
        Parts that are recorded.
    seconds : callable
        What a part is expected to take.
    failed : collection of Part

    Returns
    -------
    list of Step
    """
    waiting = set(todo) - set(failed)
    there, planned = set(have), []

    def cost(page: str) -> tuple[bool, float]:
        lacking = [part for part in needs(page) if part not in there]
        alone = [START_S * (part.investigation not in _TOGETHER) for part in lacking]
        expected = [seconds(part) for part in lacking if part in waiting]
        return len(expected) < len(lacking), sum(expected) + sum(alone)

    pages = list(INVESTIGATIONS)
    while pages:
        pages.remove(page := min(pages, key=cost))
        new = [part for part in needs(page) if part in waiting - there]
        planned += new
        there.update(new)
    steps, total, there = [], 0.0, set(have)
    for part in [*planned, *(part for part in todo if part in failed)]:
        total += seconds(part) + START_S * (part.investigation not in _TOGETHER)
        there.add(part)
        steps.append(Step(part, seconds(part), total, completed(there, part)))
    return steps
