#!/usr/bin/env python3
"""Record the pages of the guide on a machine with a GPU: ``python tools/record.py [PAGE…] [--budget-s N]``.

Each page runs in a separate process, the cheapest first; the comment ``# record: 40 s`` in a page gives its time.
``measure`` writes each result before the next begins, so ending a page loses only the measurement under way. Pages that
were recorded and have not changed since are skipped, unless you name them. Without a GPU, set NSIGHTKIT_RECORDINGS to
another folder: everything then runs small, as a dry run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from nsightkit.capture.children import gpu_name  # noqa: E402
from nsightkit.guide.measurement import recordings_folder  # noqa: E402
from nsightkit.trace.programs import run, tail  # noqa: E402

#: Seconds of a page that does not say.
USUAL_S = 120.0
#: In the folder of the recordings: by page, what was recorded with which script on which GPU.
FINISHED = ".finished.json"


def estimate_s(page: Path) -> float:
    """Read from a page how many seconds it takes to record.

    Parameters
    ----------
    page : Path
    """
    found = re.search(r"^# record: (\d+) s$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return float(found[1]) if found else USUAL_S


def chosen(names: list[str], examples: Path) -> list[Path]:
    """Find pages, the cheapest first.

    Parameters
    ----------
    names : list of str
        Such as ``02``, ``02_starved_input_pipeline`` or the script's path; none for all pages.
    examples : Path

    Raises
    ------
    SystemExit
        A name matches no page.
    """
    pages = sorted(examples.glob("[0-9]*.py"))
    if names:
        by_name = {}
        for page in pages:
            by_name[page.stem] = by_name[page.stem[:2]] = page
        stems = [Path(name).name.removesuffix(".py") for name in names]
        for name in stems:
            if name not in by_name:
                sys.exit(f"no page {name!r}; there are {', '.join(page.stem for page in pages)}")
        pages = [by_name[name] for name in dict.fromkeys(stems)]
    return sorted(pages, key=estimate_s)


def record(page: Path, timeout_s: float | None) -> str:
    """Run one page.

    Parameters
    ----------
    page : Path
    timeout_s : float or None

    Returns
    -------
    str
        What became of it.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "NSIGHTKIT_MODE": "record", "MPLBACKEND": "Agg", "PYTHONPATH": path}
    try:
        done = run([sys.executable, str(page)], timeout_s or 1e6, cwd=ROOT, env=environment)
    except subprocess.TimeoutExpired:
        return "ended at the deadline; what it had recorded is kept"
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        return f"failed: {tail(done.stdout, 1)}"
    return "recorded"


def main(arguments: list[str], examples: Path = ROOT / "examples") -> int:
    """Record pages; see the module's text.

    Parameters
    ----------
    arguments : list of str
    examples : Path

    Returns
    -------
    int
        1 if a page failed.
    """
    parser = argparse.ArgumentParser(description="Record the pages of the guide.")
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="such as 02; default: all that are not recorded yet")
    parser.add_argument("--budget-s", type=float, metavar="N", help="end after N seconds")
    options = parser.parse_args(arguments)
    deadline = None if options.budget_s is None else time.monotonic() + options.budget_s
    gpu = gpu_name()
    if gpu is None and not os.environ.get("NSIGHTKIT_RECORDINGS"):
        sys.exit("torch sees no CUDA GPU; for a dry run on the CPU, set NSIGHTKIT_RECORDINGS to another folder")
    recordings_folder().mkdir(parents=True, exist_ok=True)
    marks = recordings_folder() / FINISHED
    finished = json.loads(marks.read_text(encoding="utf-8")) if marks.is_file() else {}
    failed = False
    for page in chosen(options.pages, examples):
        mark = f"{gpu} {hashlib.sha256(page.read_bytes()).hexdigest()}"
        left_s = None if deadline is None else deadline - time.monotonic()
        begin = time.monotonic()
        if finished.get(page.stem) == mark and not options.pages:
            status = "recorded before"
        elif left_s is not None and estimate_s(page) > left_s:
            status = f"not begun: it takes about {estimate_s(page):.0f} s, and {max(left_s, 0):.0f} s are left"
        else:
            status = record(page, left_s)
        print(f"{page.stem:<34} {time.monotonic() - begin:5.0f} s  {status}", flush=True)
        failed = failed or status.startswith("failed")
        if status == "recorded":
            finished[page.stem] = mark
            draft = marks.with_suffix(".new")
            draft.write_text(json.dumps(finished, indent=1, sort_keys=True), encoding="utf-8")
            draft.replace(marks)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
