"""Accept a recording that older code made, if what the part runs is still the same.

GPU time is rare, and a refactoring must not throw recordings away. An acceptance is written into the recording's
provenance, and holds for exactly the code that there is now.
"""

from __future__ import annotations

import functools
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nsightkit
from nsightkit.capture.provenance import FORMAT, collect, scrub
from nsightkit.errors import UsageError
from nsightkit.investigations import recordings, what_runs
from nsightkit.investigations.parts import Part, find
from nsightkit.trace._process import run
from nsightkit.trace.files import replacing

__all__ = ["accept"]


def accept(name: str, because: str, where: Path | None = None) -> list[dict[str, Any]]:
    """Let the recordings of a part count as current, although the code has changed since they were made.

    Nothing is measured, and no GPU is needed.

    Parameters
    ----------
    name : str
        ``investigation/part``.
    because : str
        Why what was measured has not changed; the page shows it.
    where : Path, optional
        Root of the recordings; :func:`nsightkit.investigations.recordings.folder` when omitted.

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
    part = find(investigation, part_name)
    found = recordings.find(part, where)
    again = f"record it on a GPU: python -m nsightkit record --only {name}"
    if not found:
        raise UsageError(f"there is no recording of {name} in {where or recordings.folder()}; {again}")
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
        with replacing(recording.path / recordings.PROVENANCE) as file:
            file.write(recordings.as_text(record).encode())
    current = {"status": "current", "detail": "it is current already; nothing was accepted"}
    return [
        {"investigation": investigation, "part": part_name, "gpu": recording.path.parent.name}
        | ({"status": "accepted", "detail": because} if recording in stale else current)
        for recording in found
    ]


def _refusal(recording: recordings.Recording, part: Part, now: Mapping[str, Any]) -> str:
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
    past = _past(str(record.get("commit") or ""), part)
    if "key" in past and past["key"] == record.get("key"):
        return what_runs.differs(past, now)
    if not unknown:
        why_not += f" (it was listed by PyTorch {then['torch']}, and this is {now['torch']})"
    return f"{why_not}, and {past.get('why_not', 'its commit holds other code than made it')}"


def _past(commit: str, part: Part) -> dict[str, Any]:
    """List what a part ran with the code of a commit."""
    checkout = Path(nsightkit.__file__).parents[1]
    command = ["git", "-C", str(checkout), "archive", "--format=tar", commit, "nsightkit"]
    absent = {"why_not": f"this checkout does not have its commit {commit[:12]}".rstrip()}
    if not re.fullmatch("[0-9a-f]{7,40}", commit):  # it comes from a file: git must not take it for an option
        return absent
    with tempfile.TemporaryDirectory(prefix="nsightkit-") as folder:
        try:
            packed = subprocess.run(command, capture_output=True, timeout=60, check=True).stdout
            with tarfile.open(fileobj=io.BytesIO(packed)) as tree:
                tree.extractall(folder, filter="data")
        except (OSError, subprocess.SubprocessError, tarfile.TarError):
            return absent
        return what_runs.ask(part, functools.partial(_start_in, folder))


def _start_in(folder: str, module: str, job: Mapping[str, Any], timeout_s: float) -> Any:
    # Without -P the folder one stands in, a checkout for instance, would come first.
    return run(
        [sys.executable, "-P", "-m", "nsightkit.capture.children", module, json.dumps(job)],
        timeout_s,
        env={**os.environ, "PYTHONPATH": folder},
    )
