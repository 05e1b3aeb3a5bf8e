"""What reading and analysing big traces costs, beside the named alternative, in the same run.

``nox -s bench`` makes the traces in ``.bench/`` (700 MB) and measures whole processes: CPU seconds (user and system)
and the largest resident set, as the operating system accounts for them. Every case runs several times in turn with its
alternative; the table shows medians. Options: ``--kernels N`` for a smaller export, ``--repeat N``, ``--only NAME``.
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
    of_kernels = [sys.executable, "-c", _KERNELS_SQL, str(export)]
    idle = [sys.executable, "-c", _IDLE_SQL, str(export)]
    loop = [sys.executable, "-c", _JSON, str(kineto)]
    return [
        Case(f"kernels of {kernels:,}, against SQL", ["kernels", str(export)], of_kernels),
        Case("gaps, against SQL for idle time without causes", ["gaps", str(export)], idle),
        Case("ranges, against kernels in SQL", ["ranges", str(export)], of_kernels),
        Case("kernels again, from the cache, against SQL", ["kernels", str(export)], of_kernels, is_warm=True),
        Case("gaps again, from the cache, against SQL", ["gaps", str(export)], idle, is_warm=True),
        Case(f"kernels of {kernels // 5:,} Kineto events, against a loop", ["kernels", str(kineto)], loop),
        Case("start-up, against import pandas", ["--help"], [sys.executable, "-c", "import pandas"]),
    ]


def measured(command: list[str]) -> tuple[float, float]:
    """Run a command once: CPU seconds, and the peak in MiB."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=HERE.parent.parent)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)[:200]} failed")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, default=5_000_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--folder", type=Path, default=Path(".bench"))
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(exist_ok=True)
    print(f"{'case':60} {'CPU s':>8} {'peak MiB':>9} {'other s':>8} {'ratio':>6}")
    for case in cases(folder, options.kernels):
        if options.only not in case.name:
            continue
        ours = []
        peaks = []
        others = []
        for _ in range(options.repeat):  # in turn, so that a machine that slows down slows both
            if not case.is_warm:
                for cache in folder.glob("*.nsightkit-cache"):
                    shutil.rmtree(cache)
            cpu_s, peak = measured([sys.executable, "-m", "nsightkit", *case.command])
            ours.append(cpu_s)
            peaks.append(peak)
            others.append(measured(case.alternative)[0])
        cpu_s = statistics.median(ours)
        other_s = statistics.median(others)
        print(f"{case.name:60} {cpu_s:8.2f} {max(peaks):9.0f} {other_s:8.2f} {cpu_s / other_s:6.2f}", flush=True)


if __name__ == "__main__":
    main()
