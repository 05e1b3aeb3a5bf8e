"""Recordings: what a GPU produced, kept beside the source, valid for exactly the code that produced it.

``docs/recordings/<investigation>/<gpu>/<part>/`` holds ``provenance.json``, ``samples.parquet`` (raw
samples) and ``trace/`` (Parquet tables of the Trace); for some parts also ``nsys/``, the Trace of a second run, under
Nsight Systems, ``ncu.csv``, the counters of a second run, under Nsight Compute, or ``snapshot.pickle``, a memory
snapshot as PyTorch writes it. ``runs.json.gz`` says what the part runs (:mod:`nsightkit.investigations.what_runs`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

import nsightkit
from nsightkit.capture.children import has_driver
from nsightkit.capture.provenance import FORMAT, collect, scrub, slug
from nsightkit.errors import NsightkitError, UsageError
from nsightkit.investigations import what_runs
from nsightkit.investigations.parts import Part, parts
from nsightkit.investigations.parts import find as find_part
from nsightkit.trace import ncu as reports
from nsightkit.trace import share as scrubbing
from nsightkit.trace import snapshot as snapshots
from nsightkit.trace import store
from nsightkit.trace.files import replacing
from nsightkit.trace.model import Trace

__all__ = [
    "FAILURE", "NCU", "NSYS", "PROVENANCE", "RAW", "SNAPSHOT", "TRACE", "Recording", "accept", "acceptance", "find",
    "folder", "frame", "part_key", "status", "write",
]  # fmt: skip

#: Names in the folder of a part that was measured, and of a recording of it. A profile is ``trace.json.gz`` before it
#: is recorded.
TRACE, NSYS, NCU, SNAPSHOT = "trace", "nsys", "ncu.csv", "snapshot.pickle"
#: Beside the recordings: what there is of parts that are not written as recordings, or failed, and their logs.
RAW, FAILURE = ".raw", "failure.txt"
PROVENANCE, _SAMPLES = "provenance.json", "samples.parquet"


@dataclasses.dataclass(frozen=True)
class Recording:
    """One recorded part.

    Parameters
    ----------
    path : Path
        Its folder.
    provenance : dict
    state : {"current", "stale", "refused"}
        ``current``: made by today's code, or accepted for it. ``stale``: by other code or parameters. ``refused``: it
        is not a recording of a GPU.
    reason : str
        Why it is not current; empty when it is.
    """

    path: Path
    provenance: dict[str, Any]
    state: str
    reason: str

    def samples(self) -> pd.DataFrame:
        """Read the raw samples.

        Returns
        -------
        DataFrame
            ``metric``, ``index``, ``value``.
        """
        return pd.read_parquet(self.path / _SAMPLES)


def folder() -> Path:
    """Say where recordings lie.

    Returns
    -------
    Path
        ``NSIGHTKIT_RECORDINGS``, else ``docs/recordings`` of this checkout, else of the nearest folder
        above the current one that has it.
    """
    if named := os.environ.get("NSIGHTKIT_RECORDINGS"):
        return Path(named)
    roots = (Path(nsightkit.__file__).parents[1], Path.cwd(), *Path.cwd().parents)
    places = [root / "docs" / "recordings" for root in roots]
    return next((place for place in places if place.is_dir()), places[0])


def part_key(part: Part, mode: str = "live") -> str:
    """Compute the key that a valid recording of a part has.

    Parameters
    ----------
    part : Part
    mode : {"live", "smoke"}

    Returns
    -------
    str
    """
    return what_runs.key(part.code, part.parameters(mode), part.counts(mode))


def find(part: Part, where: Path | None = None) -> list[Recording]:
    """Find the recordings of a part, the newest first.

    Parameters
    ----------
    part : Part
    where : Path, optional
        :func:`folder` when omitted.

    Returns
    -------
    list of Recording
        In every state: only ``current`` ones may be shown.
    """
    wanted = part_key(part)
    places = sorted((where or folder()).glob(f"{part.investigation}/*/{part.name}"))
    found = [_judge(place, part, wanted) for place in places if place.is_dir()]
    return sorted(found, key=lambda r: str(r.provenance.get("utc", "")), reverse=True)


def acceptance(record: Mapping[str, Any], wanted: str) -> dict[str, Any] | None:
    """Find what lets a recording count although the code has changed since: :func:`accept`.

    Parameters
    ----------
    record : mapping
        Its provenance.
    wanted : str
        The key of the code as it is.

    Returns
    -------
    dict or None
        ``because``: why what was measured has not changed; ``since``, ``commit``: those of the recording and of the
        acceptance; ``dirty``, ``utc``. None also where the recording was made by this very code.
    """
    given = record.get("accepted")
    if record.get("key") == wanted or not isinstance(given, list):
        return None
    entries = [each for each in given if isinstance(each, dict) and each.get("because")]
    return next((dict(each) for each in entries if each.get("key") == wanted), None)


def _as_text(record: Mapping[str, Any]) -> str:
    """Give a provenance as it is kept."""
    return json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _judge(place: Path, part: Part, wanted: str) -> Recording:
    try:
        record = json.loads((place / PROVENANCE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return Recording(place, {}, "refused", f"its {PROVENANCE} cannot be read ({error})")
    if not isinstance(record, dict):
        return Recording(place, {}, "refused", f"its {PROVENANCE} is not an object")
    on_gpu = record.get("kind") == "measured" and isinstance(record.get("gpu"), dict)
    whole = (place / _SAMPLES).is_file() and (place / TRACE).is_dir()
    snapshot = part.measured != "remembered" or (place / SNAPSHOT).is_file()
    same_code = record.get("key") == wanted or acceptance(record, wanted)
    of = (record.get("investigation"), record.get("part"))
    checks = (
        (on_gpu, "refused", "it was not measured on a GPU"),
        (record.get("format") == FORMAT, "stale", f"it has format {record.get('format')}, not {FORMAT}"),
        (of == (part.investigation, part.name), "refused", "it is of another part"),
        (same_code, "stale", "the code or the parameters have changed since"),
        (whole, "refused", "it is incomplete"),
        (snapshot, "refused", "it has no memory snapshot"),
    )
    state, reason = next(((state, reason) for good, state, reason in checks if not good), ("current", ""))
    return Recording(place, record, state, reason)


def status(where: Path | None = None) -> list[dict[str, str]]:
    """List every part with the state of its recordings.

    Parameters
    ----------
    where : Path, optional

    Returns
    -------
    list of dict
        ``investigation``, ``part``, ``gpu``, ``state`` (``current``, ``stale``, ``refused``, ``absent``),
        ``reason``, ``path``.
    """
    absent = Recording(Path(), {}, "absent", "never recorded")
    return [
        {
            "investigation": part.investigation,
            "part": part.name,
            "gpu": str((recording.provenance.get("gpu") or {}).get("name", "")),
            "state": recording.state,
            "reason": recording.reason,
            "path": "" if recording is absent else str(recording.path),
        }
        for part in parts()
        for recording in find(part, where) or [absent]
    ]


def frame(samples: Mapping[str, list[float]]) -> pd.DataFrame:
    """Put raw samples into one table.

    Parameters
    ----------
    samples : mapping
        Values by metric.

    Returns
    -------
    DataFrame
        ``metric``, ``index`` (0, 1, … within a metric), ``value``: float64, which holds every nanosecond
        of a sample shorter than 104 days.
    """
    rows = [(metric, i, float(value)) for metric, values in samples.items() for i, value in enumerate(values)]
    table = pd.DataFrame(rows, columns=["metric", "index", "value"])
    return table.astype({"metric": "str", "index": "int64", "value": "float64"})


def write(
    trace: Trace,
    samples: pd.DataFrame,
    provenance: Mapping[str, Any],
    where: Path,
    *,
    nsys: Trace | None = None,
    ncu: Path | None = None,
    snapshot: Path | None = None,
    dry_run: bool = False,
) -> Path:
    """Keep one measured part; it appears whole or not at all, and holds no secrets (:mod:`nsightkit.trace.share`).

    Parameters
    ----------
    trace : Trace
    samples : DataFrame
    provenance : mapping
        With the key already in it.
    where : Path
        Root of the recordings.
    nsys : Trace, optional
        What Nsight Systems captured of another run.
    ncu : Path, optional
        What Nsight Compute counted in another run.
    snapshot : Path, optional
        A memory snapshot.
    dry_run : bool
        Allow what was not measured on a GPU; such a folder is never taken for a recording.

    Returns
    -------
    Path
        The part's folder.

    Raises
    ------
    NsightkitError
        The measurement is not one of a GPU, or the reader cannot open the counters or the snapshot.
    """
    gpu = provenance.get("gpu")
    real = provenance.get("kind") == "measured" and isinstance(gpu, dict)
    if not real and not dry_run:
        raise NsightkitError("only what was measured on a GPU can be recorded; use a dry run to try the recorder")
    if dry_run and provenance.get("kind") != "dry-run":
        raise NsightkitError("a dry run is marked as one")
    if dry_run and where.resolve() == folder().resolve():
        raise UsageError(f"{where} holds the recordings; give a dry run another folder")
    name = slug(gpu["name"]) if isinstance(gpu, dict) else "no-gpu"
    place = where / str(provenance["investigation"]) / name / str(provenance["part"])
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{place.name}.", dir=place.parent, ignore_cleanup_errors=True) as scratch:
        draft, old = Path(scratch, "new"), Path(scratch, "old")
        draft.mkdir()
        for captured, named in ((trace, TRACE), (nsys, NSYS)):
            if captured is not None:
                store.write(captured, draft / named)
        for file, reader, named in ((ncu, reports.read, NCU), (snapshot, snapshots.read, SNAPSHOT)):
            if file is not None:
                reader(file)
                scrubbing.copy(file, draft / named)
        samples.to_parquet(draft / _SAMPLES, compression="zstd", index=False)
        if what_runs.read(place).get("key", "") == provenance.get("key"):  # more is added to what was recorded
            shutil.copy(place / what_runs.NAME, draft / what_runs.NAME)
        elif real and has_driver():  # without one nothing was measured, and a test has planted what is written
            part = find_part(str(provenance["investigation"]), str(provenance["part"]))
            what_runs.write(what_runs.ask(part, timeout_s=120.0), draft)
        (draft / PROVENANCE).write_text(_as_text(scrub(dict(provenance))), encoding="utf-8")
        if place.exists():
            place.replace(old)
        draft.replace(place)
    return place


def accept(name: str, because: str, where: Path | None = None) -> list[dict[str, Any]]:
    """Let the recordings of a part count as current, although the code has changed since they were made.

    GPU time is rare, and a refactoring must not throw recordings away. What the part runs must still be the same. An
    acceptance is written into the recording's provenance, and holds for exactly the code that there is now. Nothing is
    measured, and no GPU is needed.

    Parameters
    ----------
    name : str
        ``investigation/part``.
    because : str
        Why what was measured has not changed; the page shows it.
    where : Path, optional
        Root of the recordings; the checkout's ``docs/recordings`` when omitted.

    Returns
    -------
    list of dict
        A row for each GPU: ``investigation``, ``part``, ``gpu``, ``status`` (``accepted``; ``current``: there was
        nothing to accept), ``detail``.

    Raises
    ------
    UsageError
        The part is unknown or was never recorded; the reason is empty; or what the part runs has changed, or cannot be
        compared. One line says which, and nothing is accepted.
    """
    because = " ".join(because.split())
    if not because:
        raise UsageError("--because is empty; say why what was measured has not changed")
    investigation, slash, part_name = name.partition("/")
    if not slash:
        raise UsageError(f"{name!r} is not a part; name one as INVESTIGATION/PART, such as starved-input/before")
    part = find_part(investigation, part_name)
    found = find(part, where)
    again = f"record it on a GPU: python -m nsightkit record --only {name}"
    if not found:
        raise UsageError(f"{name} has no recording in {where or folder()}; {again}")
    stale = [recording for recording in found if recording.state != "current"]
    now = what_runs.ask(part) if stale else {}
    for recording in stale:
        why_not = _refusal(recording, part, now)
        if why_not:
            gpu = recording.path.parent.name
            raise UsageError(f"the recording of {name} on {gpu} is not accepted: {why_not}; {again}")
    here = collect(device="cpu") if stale else {}
    for recording in stale:
        record, earlier = recording.provenance, recording.provenance.get("accepted")
        entry = {"key": now["key"], "since": record.get("commit"), "because": scrub(because)}
        entry |= {fact: here[fact] for fact in ("commit", "dirty", "utc")}
        record["accepted"] = [*(earlier if isinstance(earlier, list) else ()), entry]
        with replacing(recording.path / PROVENANCE) as file:
            file.write(_as_text(record).encode())
    current = {"status": "current", "detail": "it is current already; nothing was accepted"}
    return [
        {"investigation": investigation, "part": part_name, "gpu": recording.path.parent.name}
        | ({"status": "accepted", "detail": because} if recording in stale else current)
        for recording in found
    ]


def _refusal(recording: Recording, part: Part, now: Mapping[str, Any]) -> str:
    """Say why a recording cannot be accepted; empty when it can."""
    if recording.state == "refused" or recording.provenance.get("format") != FORMAT:
        return recording.reason
    if "why_not" in now:
        return f"what it runs now cannot be listed ({now['why_not']})"
    then = what_runs.read(recording.path)
    unknown = then.get("why_not")
    why_not = f"what it ran is not known ({unknown})" if unknown else what_runs.differs(then, now)
    if not unknown and (not why_not or then["torch"] == now["torch"]):
        return why_not
    # It may be the other version of PyTorch that makes other operators of the same code: then this one lists both.
    record = recording.provenance
    past = what_runs.past(str(record.get("commit") or ""), part)
    if "key" in past and past["key"] == record.get("key"):
        return what_runs.differs(past, now)
    if not unknown:
        why_not += f" (it was listed by PyTorch {then['torch']}, and this is {now['torch']})"
    return f"{why_not}, and {past.get('why_not', 'its commit holds other code than made it')}"
