"""Recordings: what a GPU produced, kept beside the source, valid for exactly the code that produced it.

``docs/recordings/<investigation>/<gpu>/<part>/`` holds ``provenance.json``, ``samples.parquet`` (raw
samples) and ``trace/`` (Parquet tables of the Trace); for some parts also ``nsys/``, the Trace of a second run, under
Nsight Systems, ``ncu.csv``, the counters of a second run, under Nsight Compute, or ``snapshot.pickle``, a memory
snapshot as PyTorch writes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsightkit.capture.provenance import FORMAT, scrub, slug
from nsightkit.errors import NsightkitError, UsageError
from nsightkit.investigations.keys import COLLECTING, MEASURED_BY, REPEATING, key
from nsightkit.investigations.parts import Part, parts

if TYPE_CHECKING:
    import pandas as pd

    from nsightkit.trace.model import Trace

__all__ = ["Recording", "find", "folder", "frame", "part_key", "status", "write"]

_PROVENANCE, _SAMPLES, _TRACE, _NSYS = "provenance.json", "samples.parquet", "trace", "nsys"
_NCU, _SNAPSHOT = "ncu.csv", "snapshot.pickle"


@dataclasses.dataclass(frozen=True)
class Recording:
    """One recorded part.

    Parameters
    ----------
    path : Path
        Its folder.
    provenance : dict
    state : {"current", "stale", "refused"}
        ``stale``: made by other code or parameters than today's. ``refused``: no recording of a GPU at all.
    reason : str
        Why it is not current; empty when it is.
    """

    path: Path
    provenance: dict[str, Any]
    state: str
    reason: str

    @property
    def trace_path(self) -> Path:
        """The folder that :func:`nsightkit.load` opens."""
        return self.path / _TRACE

    @property
    def nsys_path(self) -> Path | None:
        """The folder with what Nsight Systems captured of the part; None where it did not."""
        place = self.path / _NSYS
        return place if place.is_dir() else None

    @property
    def ncu_path(self) -> Path | None:
        """The counters that Nsight Compute read; None where it did not."""
        place = self.path / _NCU
        return place if place.is_file() else None

    @property
    def snapshot_path(self) -> Path | None:
        """The memory snapshot; None where the part takes none."""
        place = self.path / _SNAPSHOT
        return place if place.is_file() else None

    def samples(self) -> pd.DataFrame:
        """Read the raw samples.

        Returns
        -------
        DataFrame
            ``metric``, ``index``, ``value``.
        """
        import pandas as pd

        return pd.read_parquet(self.path / _SAMPLES)


def folder() -> Path:
    """Say where recordings lie.

    Returns
    -------
    Path
        ``NSIGHTKIT_RECORDINGS``, else ``docs/recordings`` of this checkout, else of the nearest folder
        above the current one that has it.
    """
    named = os.environ.get("NSIGHTKIT_RECORDINGS")
    if named:
        return Path(named)
    import nsightkit

    checkout = Path(nsightkit.__file__).parents[1]
    for above in (checkout, Path.cwd(), *Path.cwd().parents):
        if (above / "docs" / "recordings").is_dir():
            return above / "docs" / "recordings"
    return checkout / "docs" / "recordings"


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
    counts = part.counts(mode) | {"shapes": int(part.shapes), "utilization": int(part.utilization)}
    also = {None: [], "nsys": [REPEATING], "ncu": [REPEATING, COLLECTING]}[part.second]
    return key(part.workload, part.parameters(mode), counts, MEASURED_BY[part.watch], *also)


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


def _judge(place: Path, part: Part, wanted: str) -> Recording:
    try:
        record = json.loads((place / _PROVENANCE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return Recording(place, {}, "refused", f"its {_PROVENANCE} cannot be read ({error})")
    if not isinstance(record, dict):
        return Recording(place, {}, "refused", f"its {_PROVENANCE} is no object")
    if record.get("kind") != "measured" or not isinstance(record.get("gpu"), dict):
        return Recording(place, record, "refused", "it was not measured on a GPU")
    if record.get("format") != FORMAT:
        return Recording(place, record, "stale", f"it has format {record.get('format')}, not {FORMAT}")
    if (record.get("investigation"), record.get("part")) != (part.investigation, part.name):
        return Recording(place, record, "refused", "it is of another part")
    if record.get("key") != wanted:
        return Recording(place, record, "stale", "the code or the parameters have changed since")
    if not (place / _SAMPLES).is_file() or not (place / _TRACE).is_dir():
        return Recording(place, record, "refused", "it is incomplete")
    if part.watch == "remembered" and not (place / _SNAPSHOT).is_file():
        return Recording(place, record, "refused", "it has no memory snapshot")
    return Recording(place, record, "current", "")


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
    found = []
    for part in parts():
        recordings = find(part, where)
        found += [
            {
                "investigation": part.investigation,
                "part": part.name,
                "gpu": str((r.provenance.get("gpu") or {}).get("name", "")),
                "state": r.state,
                "reason": r.reason,
                "path": str(r.path),
            }
            for r in recordings
        ] or [
            {
                "investigation": part.investigation,
                "part": part.name,
                "gpu": "",
                "state": "absent",
                "reason": "never recorded",
                "path": "",
            }
        ]
    return found


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
    import pandas as pd

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
    from nsightkit.trace import ncu as reports
    from nsightkit.trace import share as scrubbing
    from nsightkit.trace import snapshot as snapshots
    from nsightkit.trace import store

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
    draft = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
    try:
        draft.chmod(0o755)
        store.write(trace, draft / _TRACE)
        if nsys is not None:
            store.write(nsys, draft / _NSYS)
        if ncu is not None:
            reports.read(ncu)
            scrubbing.copy(ncu, draft / _NCU)
        if snapshot is not None:
            snapshots.read(snapshot)
            scrubbing.copy(snapshot, draft / _SNAPSHOT)
        samples.to_parquet(draft / _SAMPLES, compression="zstd", index=False)
        text = json.dumps(scrub(dict(provenance)), indent=2, sort_keys=True, ensure_ascii=False)
        (draft / _PROVENANCE).write_text(text + "\n", encoding="utf-8")
        with contextlib.ExitStack() as clean:
            if place.exists():
                old = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
                clean.callback(shutil.rmtree, old, ignore_errors=True)
                place.replace(old / "old")
            draft.replace(place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return place
