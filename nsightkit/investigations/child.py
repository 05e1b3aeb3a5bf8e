"""The process in which parts are measured: how it is started, and what it does.

It is forked from one that has imported torch and has not touched a GPU, which takes a fraction of the time of a fresh
interpreter. On systems without such a fork, or where a forked process cannot use the GPU, it is a fresh interpreter.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nsightkit.capture import torch_profiler, utilization
from nsightkit.capture.children import ask_child, child_environment, fork_child, starter
from nsightkit.capture.provenance import collect, scrub, tools
from nsightkit.errors import NsightkitError
from nsightkit.investigations import under_nsight
from nsightkit.investigations.parts import MEASURES, Part, find, prepared, resolve
from nsightkit.investigations.recordings import FAILURE, SNAPSHOT, part_key
from nsightkit.trace.programs import tail

__all__ = ["FAILURE", "RESULT", "capture_child", "main", "read_result", "run_child", "run_children"]

#: The file that a part leaves in its folder: its samples and provenance. Of one that failed there is ``FAILURE``.
RESULT = "result.json"
_Result = tuple[dict[str, list[float]], dict[str, Any]]


def run_child(part: Part, mode: str, folder: Path, *, kind: str, command: str, timeout_s: float) -> _Result:
    """Measure a part in a process of its own.

    A part that asks for it then runs once more, in another process under Nsight Systems or Nsight Compute.

    Parameters
    ----------
    part : Part
    mode : {"live", "smoke"}
    folder : Path
        Gets ``trace.json.gz``, ``snapshot.pickle`` of a part that takes one, and ``nsys`` or ``ncu.csv`` of the second
        run, if it works.
    kind : str
        What the provenance of a CPU run calls it; a GPU's is always ``measured``.
    command : str
        What the provenance says was run.
    timeout_s : float
        For both. The second run takes at most 300 s of it; a smoke run, which must stay quick, 90 s.

    Returns
    -------
    samples : dict of str to list
    provenance : dict

    Raises
    ------
    NsightkitError
        The child failed or took too long; the message holds the end of what it wrote.
    """
    begin = time.monotonic()
    (failure,) = run_children({folder: part}, mode, kind=kind, command=command, timeout_s=timeout_s)
    if failure is not None:
        raise failure
    samples, provenance = read_result(folder)
    (folder / RESULT).unlink()
    if part.profiled:
        left = max(timeout_s - (time.monotonic() - begin), 1.0)
        provenance[part.profiled] = capture_child(part, mode, folder, min(left, 90.0 if mode == "smoke" else 300.0))
    return samples, provenance


def run_children(
    folders: Mapping[Path, Part],
    mode: str,
    *,
    kind: str,
    command: str,
    timeout_s: float,
    known: Mapping[str, Any] | None = None,
) -> list[NsightkitError | None]:
    """Measure parts one after the other in one process, which leaves each one's result as soon as it is there.

    Parameters
    ----------
    folders : mapping
        By folder, the part that it is for. The folder also gets :data:`RESULT`, or :data:`FAILURE` of a part that
        failed by itself.
    mode, kind, timeout_s
        As for :func:`run_child`; the time is that of all.
    command : str
        What the provenance says was run; ``{part}`` stands for the part's name.
    known : mapping, optional
        From :func:`nsightkit.capture.provenance.tools`, where it has been asked for.

    Returns
    -------
    list of NsightkitError or None
        Why each part was not measured. Notes on the exception hold all that the process wrote.
    """
    for left in (folder / name for folder in folders for name in (RESULT, FAILURE)):
        left.unlink(missing_ok=True)
    known = tools() if known is None else dict(known)
    try:
        _ask(folders, mode, timeout_s, kind=kind, command=command, known=known)
    except NsightkitError as error:
        return [None if (f / RESULT).is_file() else _failure(part, mode, f, error) for f, part in folders.items()]
    return [None] * len(folders)


def _failure(part: Part, mode: str, folder: Path, error: NsightkitError) -> NsightkitError:
    """Say why a part was not measured: by its own words, or by those of the process that it was in."""
    said = f"{error}"
    with contextlib.suppress(OSError):
        said = tail((folder / FAILURE).read_text(encoding="utf-8"), 4)
    found = NsightkitError(f"{part} ({mode}) was not measured: {said}")
    for note in error.__notes__:
        found.add_note(note)
    found.__cause__ = error
    return found


def capture_child(part: Part, mode: str, folder: Path, timeout_s: float) -> dict[str, Any]:
    """Run :func:`nsightkit.investigations.under_nsight.capture` in a process that is ended when the time is up.

    The profiler, its importer and its exporter have time limits of their own, which add up to far more.

    Parameters
    ----------
    part : Part
    mode : {"live", "smoke"}
    folder : Path
    timeout_s : float
        Of all. The program under the profiler is interrupted after two thirds of it.

    Returns
    -------
    dict
        What the capture says, or a ``notice`` that it was not done.
    """
    try:
        return dict(scrub(_ask({folder: part}, mode, timeout_s, profiled_s=timeout_s * 2 / 3)))
    except NsightkitError as error:
        return {"notice": f"{error}"}


def read_result(folder: Path) -> _Result:
    """Read what a process left of a part.

    Parameters
    ----------
    folder : Path

    Returns
    -------
    samples : dict of str to list
    provenance : dict
    """
    result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    return result["samples"], result["provenance"]


def _ask(folders: Mapping[Path, Part], mode: str, timeout_s: float, **how: Any) -> dict[str, Any]:
    """Let a process do what :func:`main` does."""
    parts = {str(folder.absolute()): str(part) for folder, part in folders.items()}
    start = fork_child if mode == "smoke" else starter()
    return ask_child("nsightkit.investigations.child", {"parts": parts, "mode": mode, **how}, timeout_s, start)


def main(
    parts: Mapping[str, str],
    mode: str,
    kind: str = "",
    command: str = "",
    known: Mapping[str, Any] | None = None,
    profiled_s: float = 0.0,
) -> dict[str, Any]:
    """Measure parts one after the other, and write each one's samples and provenance into its folder.

    Parameters
    ----------
    parts : mapping of str to str
        By folder, ``investigation/part``.
    mode : {"live", "smoke"}
    kind : str
        What the provenance of a CPU run calls it; a GPU's is always ``measured``.
    command : str
        What the provenance says was run; ``{part}`` stands for the part's name.
    known : mapping, optional
        Versions of tools, which are the same for all parts.
    profiled_s : float
        If positive, the part is not measured but run under its profiler, for so long.

    Returns
    -------
    dict
        What a second capture found.

    Raises
    ------
    SystemExit
        A part failed; the others were measured.
    """
    chosen = {Path(folder): find(*name.split("/")) for folder, name in parts.items()}
    if profiled_s:
        ((folder, part),) = chosen.items()
        return under_nsight.capture(part, mode, folder, timeout_s=profiled_s, environment=child_environment())
    import torch

    device, failed = prepared(mode), False
    for folder, part in chosen.items():
        try:
            _measure(part, mode, device, folder, kind, command, known)
        except Exception:
            failed = True
            (folder / FAILURE).write_text(traceback.format_exc(), encoding="utf-8")
            traceback.print_exc()
        if len(chosen) > 1:  # give memory back before the next part
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    if failed:
        sys.exit(1)
    return {}


def _measure(
    part: Part, mode: str, device: str, folder: Path, kind: str, command: str, known: Mapping[str, Any] | None
) -> None:
    on_gpu = device == "cuda"
    start = time.perf_counter()
    counts = part.counts(mode)
    measure, workload = resolve(MEASURES[part.measured]), resolve(part.workload)
    with utilization.logged(device) as load:
        samples, parameters = measure(workload, device, part.parameters(mode), counts, folder)
    attention = torch_profiler.attention_back_ends(folder / "trace.json.gz")
    allocator = "PyTorch's allocator" if on_gpu else "tensors, counted on a CPU"
    provenance = collect(
        device=device,
        known=known,
        kind="measured" if on_gpu else kind,
        investigation=part.investigation,
        part=part.name,
        key=part_key(part, mode),
        parameters=parameters,
        counts=counts,
        clock="CUDA events" if on_gpu else "perf_counter",
        command=command.format(part=part),
        duration_s=round(time.perf_counter() - start, 3),
        **({"load": load} if load else {}),
        **({"sdpa_backend": ", ".join(attention)} if attention else {}),
        **({"snapshot": allocator} if (folder / SNAPSHOT).is_file() else {}),
    )
    draft = folder / f"{RESULT}.new"
    draft.write_text(json.dumps({"samples": samples, "provenance": provenance}), encoding="utf-8")
    draft.replace(folder / RESULT)
