"""The recorder: measure every part on a GPU and keep what it produced, for machines without one."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nsightkit.capture.children import has_gpu
from nsightkit.errors import NsightkitError, UsageError
from nsightkit.investigations import packing, recordings
from nsightkit.investigations import preflight as checks
from nsightkit.investigations.child import run_child
from nsightkit.investigations.parts import Part, parts
from nsightkit.trace import load

__all__ = ["record"]


def record(
    only: Sequence[str] | None = None,
    budget_s: float | None = None,
    out: Path | None = None,
    *,
    pack: Path | None = None,
    part_mb: float = 15.0,
    preflight: bool = False,
    dry_run: bool = False,
    echo: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """Record the investigations' parts, the most valuable first.

    A part that is recorded already, by this very code, is kept: call it again to go on after an
    interruption. A part that fails does not stop the others.

    Parameters
    ----------
    only : sequence of str, optional
        Investigations (``starved-input``) or parts (``starved-input/before``).
    budget_s : float, optional
        No part begins when it would probably end later than this.
    out : Path, optional
        Where to; the checkout's ``docs/recordings`` when omitted (a dry run must name another folder).
    pack : Path, optional
        Also pack them into files in this folder.
    part_mb : float
        The most that a packed file may have.
    preflight : bool
        First find out what works here, and skip the parts that need what does not.
    dry_run : bool
        Go through everything with the small versions on the CPU. What it writes is not a recording.
    echo : callable, optional
        Takes lines of progress.

    Returns
    -------
    list of dict
        ``investigation``, ``part``, ``status`` (``recorded``, ``kept``, ``failed``, ``skipped``, ``over budget``),
        ``seconds``, ``detail``.

    Raises
    ------
    NsightkitError
        There is no GPU.
    UsageError
        `only` names what there is not.
    """
    say = echo or (lambda _: None)
    chosen = list(parts())
    if only:
        names = {name for p in chosen for name in (p.investigation, f"{p.investigation}/{p.name}")}
        unknown = [name for name in only if name not in names]
        if unknown:
            raise UsageError(f"nothing to record is called {unknown[0]!r}; there are {', '.join(sorted(names))}")
        chosen = [p for p in chosen if {p.investigation, f"{p.investigation}/{p.name}"} & set(only)]
    where = Path(out) if out is not None else recordings.folder()
    if dry_run:
        if where.resolve() == recordings.folder().resolve():
            raise UsageError("a dry run writes no recordings; give it another folder with --out")
    elif not has_gpu():
        raise NsightkitError(
            "recordings are made on a GPU, and torch sees none here; run 'nsightkit doctor', or try --dry-run"
        )
    broken: dict[str, str] = {}
    if preflight and not dry_run:
        found = checks.results(where / checks.SAVED, say)
        broken = {row["check"]: row["detail"] for row in found if row["ok"] is False}
    begin, longest, report = time.monotonic(), 0.0, []
    for number, part in enumerate(chosen, 1):
        name = f"[{number}/{len(chosen)}] {part.investigation}/{part.name}"
        start = time.monotonic()
        left = None if budget_s is None else budget_s - (start - begin)
        current = [] if dry_run else [r for r in recordings.find(part, where) if r.state == "current"]
        seconds = 0.0
        if current:
            status, detail = "kept", str(current[0].path)
        elif lacking := sorted(broken.keys() & checks.needs(part)) if broken else []:
            status, detail = "skipped", f"it needs {lacking[0]}, which does not work here: {broken[lacking[0]]}"
        elif left is not None and longest > left:
            # The longest part so far is the best guess at the next.
            status, detail = "over budget", f"{left:.0f} s of {budget_s:.0f} s were left"
        else:
            say(f"{name} ...")
            limit_s = 600.0 if left is None else min(max(left, 1.0), 600.0)
            try:
                status, detail = "recorded", str(_record(part, where, dry_run=dry_run, timeout_s=limit_s))
            # Whatever goes wrong with one part, the machine's time belongs to the others.
            except Exception as error:
                status, detail = "failed", " ".join(f"{error}".split())
            seconds = round(time.monotonic() - start, 1)
            longest = max(longest, seconds)
        say(f"{name}: {status}{f', {seconds} s' if seconds else ''} {detail}")
        row = {"investigation": part.investigation, "part": part.name, "seconds": seconds, "detail": detail}
        report.append(row | {"status": status})
    if pack is not None:
        packing.pack(where, pack, part_mb, echo=say)
    return report


def _record(part: Part, where: Path, *, dry_run: bool, timeout_s: float) -> Path:
    where.mkdir(parents=True, exist_ok=True)
    command = f"python -m nsightkit record --only {part.investigation}/{part.name}{' --dry-run' if dry_run else ''}"
    with tempfile.TemporaryDirectory(prefix="nsightkit-", ignore_cleanup_errors=True) as folder:
        made = Path(folder)
        mode = "smoke" if dry_run else "live"
        samples, provenance = run_child(part, mode, made, kind="dry-run", command=command, timeout_s=timeout_s)
        ncu, snapshot, nsys = (made / name for name in (recordings.NCU, recordings.SNAPSHOT, recordings.NSYS))
        return recordings.write(
            load(made / "trace.json.gz", cache=False),
            recordings.frame(samples),
            provenance,
            where,
            nsys=load(nsys, cache=False) if nsys.is_dir() else None,
            ncu=ncu if ncu.is_file() else None,
            snapshot=snapshot if snapshot.is_file() else None,
            dry_run=dry_run,
        )
