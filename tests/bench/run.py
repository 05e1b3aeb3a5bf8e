"""What reading and analysing big traces costs, beside the named alternative, in the same run.

``nox -s bench`` makes the traces in ``.bench/`` (700 MB) and measures whole processes: CPU seconds (user and system)
and the largest resident set, as the operating system accounts for them. Every case runs several times in turn with its
alternative; the table shows medians, and the ratio of medians and of minima, which a busy machine disturbs less.
Options: ``--kernels N`` for a smaller export, ``--repeat N``, ``--only NAME``. With ``--against FOLDER``, a checkout of
another commit, that commit answers the same questions in place of the alternatives.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import make_kineto  # noqa: E402 # beside the tests, which use it too
import make_sqlite  # noqa: E402

_KERNELS_SQL = """
import sqlite3, sys
sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True).execute('''
    SELECT s.value, count(*), sum(end - start), avg(end - start), min(end - start), max(end - start)
    FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s ON s.id = k.demangledName GROUP BY k.demangledName''').fetchall()
"""
_IDLE_SQL = """
import sqlite3, sys
sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True).execute('''
    SELECT sum(gap), count(*) FROM (SELECT start - max(end) OVER (PARTITION BY deviceId ORDER BY start, end
    ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) gap FROM CUPTI_ACTIVITY_KIND_KERNEL) WHERE gap > 0''').fetchall()
"""
_JSON = """
import collections, json, sys
total = collections.Counter()
for e in json.load(open(sys.argv[1]))["traceEvents"]:
    if e.get("cat") == "kernel":
        total[e["name"]] += e["dur"]
"""


_QUESTIONS = """
import sys, nsightkit
trace = nsightkit.load(sys.argv[1], cache=False)
trace.kernels()
trace.gaps()
"""


class Case(NamedTuple):
    """A question, our command for it, and what else answers it."""

    name: str
    command: list[str]
    alternative: list[str]
    is_warm: bool = False


def cases(folder: Path, kernels: int) -> list[Case]:
    """What is compared; makes the traces it needs."""
    export = folder / f"export-{kernels}.sqlite"
    kineto = folder / f"kineto-{kernels // 25}.json"
    if not kineto.exists():
        make_sqlite.make(export, kernels)
        make_kineto.write(kineto, kernels=kernels // 25)
    python = [sys.executable, "-c"]
    ours = [sys.executable, "-m", "nsightkit"]
    of_kernels = [*python, _KERNELS_SQL, str(export)]
    idle = [*python, _IDLE_SQL, str(export)]
    loop = [*python, _JSON, str(kineto)]
    events = f"{kernels // 5:,} Kineto events"
    return [
        Case(f"kernels of {kernels:,}, against SQL", [*ours, "kernels", str(export)], of_kernels),
        Case("gaps, against SQL for idle time without causes", [*ours, "gaps", str(export)], idle),
        Case("ranges, against kernels in SQL", [*ours, "ranges", str(export)], of_kernels),
        Case("kernels and gaps of one trace, against kernels in SQL", [*python, _QUESTIONS, str(export)], of_kernels),
        Case("kernels again, from the cache, against SQL", [*ours, "kernels", str(export)], of_kernels, is_warm=True),
        Case("gaps again, from the cache, against SQL", [*ours, "gaps", str(export)], idle, is_warm=True),
        Case(f"kernels of {events}, against a loop", [*ours, "kernels", str(kineto)], loop),
        Case(f"kernels and gaps of {events}, against a loop", [*python, _QUESTIONS, str(kineto)], loop),
        Case("start-up, against import pandas", [*ours, "--help"], [*python, "import pandas"]),
    ]


def measured(command: list[str], checkout: Path) -> tuple[float, float]:
    """Run a command once, with the package of a checkout: CPU seconds, and the peak in MiB."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=checkout, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)[:200]} failed")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def forget(folder: Path) -> None:
    """Remove what was kept of the traces."""
    for cache in folder.glob("*.nsightkit-cache"):
        shutil.rmtree(cache)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, default=5_000_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--folder", type=Path, default=Path(".bench"))
    parser.add_argument("--against", type=Path, help="a checkout of another commit")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(exist_ok=True)
    checkout = HERE.parent.parent
    other_checkout = options.against.resolve() if options.against else checkout
    print(f"{'case':60} {'CPU s':>8} {'peak MiB':>9} {'other s':>8} {'ratio':>6} {'of minima':>9}")
    for case in cases(folder, options.kernels):
        if options.only not in case.name:
            continue
        ours: list[tuple[float, float]] = []
        others: list[tuple[float, float]] = []
        other = case.command if options.against else case.alternative
        for _ in range(options.repeat):  # in turn, so that a machine that slows down slows both
            for command, place, figures in ((case.command, checkout, ours), (other, other_checkout, others)):
                if not case.is_warm:
                    forget(folder)
                figures.append(measured(command, place))
        cpu_s = [seconds for seconds, _ in ours]
        other_s = [seconds for seconds, _ in others]
        median_s = statistics.median(cpu_s)
        other_median_s = statistics.median(other_s)
        peak = max(mebibytes for _, mebibytes in ours)
        ratios = f"{median_s / other_median_s:6.2f} {min(cpu_s) / min(other_s):9.2f}"
        print(f"{case.name:60} {median_s:8.2f} {peak:9.0f} {other_median_s:8.2f} {ratios}", flush=True)


if __name__ == "__main__":
    main()
