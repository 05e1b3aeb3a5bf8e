"""What reading and analysing big traces costs, beside the named alternative, in the same run.

``nox -s bench`` makes the traces in ``.bench/`` (1 GB) and measures whole processes: CPU seconds (user and system)
and the largest resident set, as the operating system accounts for them. Every case runs several times in turn with its
alternative; the table shows medians. Options: ``--kernels N`` for a smaller export, ``--repeat N``, ``--only NAME``.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import make_kineto  # noqa: E402 # beside the tests, which use it too
import make_ranks  # noqa: E402
import make_sqlite  # noqa: E402

NSIGHTKIT = [sys.executable, "-m", "nsightkit"]

_SQL = """
import sqlite3, sys
c = sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True)
if "kernels" in sys.argv[2:]:
    c.execute('''SELECT s.value, count(*), sum(end - start), avg(end - start), min(end - start), max(end - start)
        FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s ON s.id = k.demangledName
        GROUP BY k.demangledName''').fetchall()
if "idle" in sys.argv[2:]:
    c.execute('''SELECT sum(gap), count(*) FROM (
        SELECT start - max(end) OVER (PARTITION BY deviceId ORDER BY start, end
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) gap FROM CUPTI_ACTIVITY_KIND_KERNEL)
        WHERE gap > 0''').fetchall()
"""
_JSON = """
import collections, json, sys
total = collections.Counter()
for e in json.load(open(sys.argv[1]))["traceEvents"]:
    if e.get("cat") == "kernel":
        total[e["name"]] += e["dur"]
"""
_HTA = """
import sys, warnings
warnings.simplefilter("ignore")
from hta.trace_analysis import TraceAnalysis
t = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="/")
t.get_gpu_kernel_breakdown(visualize=False)
"""
_VACUUM = """
import os, sqlite3, sys
if os.path.exists(sys.argv[2]):
    os.unlink(sys.argv[2])
sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True).execute("VACUUM INTO ?", (sys.argv[2],))
"""
_RANGES_SQL = """
import sqlite3, sys
c = sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True)
c.execute("ATTACH ':memory:' AS m")
# Each launch's last-begun range by a look-up in an index: neither inclusive nor exclusive yet, only the join.
c.execute('''CREATE TABLE m.n AS SELECT start, end, globalTid FROM NVTX_EVENTS WHERE eventType = 59
    ORDER BY globalTid, start''')
c.execute("CREATE INDEX m.i ON n (globalTid, start)")
c.execute('''SELECT n.rowid, sum(k.end - k.start) FROM CUPTI_ACTIVITY_KIND_RUNTIME r
    JOIN CUPTI_ACTIVITY_KIND_KERNEL k ON k.correlationId = r.correlationId JOIN m.n n ON n.rowid = (SELECT rowid
    FROM m.n x WHERE x.globalTid = r.globalTid AND x.start <= r.start ORDER BY x.start DESC LIMIT 1)
    GROUP BY 1''').fetchall()
"""


@dataclasses.dataclass
class Cost:
    """Of one run, or the medians of several."""

    cpu_s: float
    peak_mb: float
    wall_s: float


@dataclasses.dataclass
class Contender:
    """A way to get an answer: commands that run one after the other (their CPU time adds up), and what to do before."""

    name: str
    commands: list[list[str]]
    before: Callable[[], None] = lambda: None


@dataclasses.dataclass
class Case:
    """A question, and who answers it; the first contender is ours."""

    name: str
    contenders: list[Contender]


def measured(contender: Contender) -> Cost:
    """Run a contender once."""
    contender.before()
    cpu, peak, begun = 0.0, 0.0, time.perf_counter()
    for command in contender.commands:
        with Path(os.devnull).open("w") as sink:
            process = subprocess.Popen(command, stdout=sink, stderr=subprocess.PIPE, cwd=HERE.parent.parent)
            assert process.stderr is not None
            said = process.stderr.read()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(
                f"{contender.name}: {' '.join(command)[:200]} failed\n{said.decode(errors='replace')[-2000:]}"
            )
        cpu += usage.ru_utime + usage.ru_stime
        peak = max(peak, usage.ru_maxrss / 1024)
    return Cost(cpu, peak, time.perf_counter() - begun)


def cases(folder: Path, kernels: int) -> list[Case]:
    """What is compared; makes the traces it needs."""
    export, kineto = folder / f"export-{kernels}.sqlite", folder / f"kineto-{kernels // 25}.json"
    if not export.exists():
        print(f"making {export} …", file=sys.stderr)
        make_sqlite.make(export, kernels)
    if not kineto.exists():
        print(f"making {kineto} …", file=sys.stderr)
        make_kineto.write(kineto, kernels=kernels // 25)

    waiting = folder / f"waiting-{kernels}.sqlite"
    if not waiting.exists():
        print(f"making {waiting} …", file=sys.stderr)
        make_sqlite.make(waiting, kernels, waits=True)

    def cold() -> None:
        for cache in folder.glob("*.nsightkit-cache"):
            shutil.rmtree(cache)

    def ours(name: str, *commands: list[str], warm: bool = False) -> Contender:
        return Contender(
            name, [[*NSIGHTKIT, *c, "--format", "json"] for c in commands], (lambda: None) if warm else cold
        )

    def python(name: str, code: str, *arguments: str) -> Contender:
        return Contender(name, [[sys.executable, "-c", code, *arguments]])

    hta = [python("HolisticTraceAnalysis", _HTA, str(kineto.resolve()))] if importlib.util.find_spec("hta") else []
    nsys = os.environ.get("NSIGHTKIT_NSYS") or shutil.which("nsys")
    copy = folder / "for-nsys.sqlite"
    stats = []
    if nsys:
        if not copy.exists():
            os.link(export, copy)
        report = [
            nsys,
            "stats",
            "-q",
            "--report",
            "cuda_gpu_kern_sum",
            "--format",
            "csv",
            "--force-export=false",
            str(copy),
        ]
        stats = [Contender("nsys stats (kernels only)", [report])]
    e, k = str(export), str(kineto)
    return [
        Case(
            f"kernels and gaps, {kernels:,} kernels, two cold commands",
            [
                ours("nsightkit", ["kernels", e], ["gaps", e]),
                python("plain SQL (idle without causes)", _SQL, e, "kernels", "idle"),
                *stats,
            ],
        ),
        Case("kernels alone", [ours("nsightkit", ["kernels", e]), python("plain SQL", _SQL, e, "kernels")]),
        Case(
            "gaps alone", [ours("nsightkit", ["gaps", e]), python("plain SQL (idle without causes)", _SQL, e, "idle")]
        ),
        Case(
            f"what-if, standard changes, {kernels // 50:,} waits",
            [ours("nsightkit whatif", ["whatif", str(waiting)]), ours("nsightkit gaps", ["gaps", str(waiting)])],
        ),
        Case(
            "ranges, inclusive and exclusive",
            [ours("nsightkit", ["ranges", e]), python("plain SQL (the join alone)", _RANGES_SQL, e)],
        ),
        Case(
            "second look, from the cache: kernels",
            [
                Contender("nsightkit", [[*NSIGHTKIT, "kernels", e, "--format", "json"]], _warm(e, "kernels")),
                python("plain SQL", _SQL, e, "kernels"),
            ],
        ),
        Case(
            "second look: gaps",
            [Contender("nsightkit", [[*NSIGHTKIT, "gaps", e, "--format", "json"]], _warm(e, "gaps"))],
        ),
        Case(
            "second look: ranges",
            [Contender("nsightkit", [[*NSIGHTKIT, "ranges", e, "--format", "json"]], _warm(e, "ranges"))],
        ),
        Case(
            f"Kineto, {kernels // 5:,} events: kernels",
            [ours("nsightkit", ["kernels", k]), python("json.load and a loop", _JSON, k), *hta],
        ),
        Case(
            "start-up",
            [Contender("nsightkit --help", [[*NSIGHTKIT, "--help"]]), python("import pandas", "import pandas")],
        ),
    ]


def ranks_cases(folder: Path, counts: list[int]) -> list[Case]:
    """Jobs of so many ranks, of a hundred thousand events each, by a local cluster and in one process."""
    made = []
    for count in counts:
        job = make_ranks.make(folder, count)
        command = [*NSIGHTKIT, "ranks", str(job), "--no-cache", "--format", "json", "--workers"]
        made.append(
            Case(
                f"ranks: {count} of {make_ranks.events(job):,} events",
                # The peak is that of the largest process: of this one, or of a worker.
                [
                    Contender("nsightkit, two workers", [[*command, "2"]]),
                    Contender("one process, one after the other", [[*command, "0"]]),
                ],
            )
        )
    return made


def _warm(export: str, command: str) -> Callable[[], None]:
    def look_once() -> None:
        subprocess.run(
            [*NSIGHTKIT, command, export, "--format", "json"], check=True, capture_output=True, cwd=HERE.parent.parent
        )

    return look_once


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, default=5_000_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="*", default=[16, 64, 256], help="ranks of the planted jobs")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--folder", type=Path, default=Path(".bench"))
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    results = []
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; medians of {options.repeat}"
    )
    print(f"{'case':58} {'contender':34} {'CPU s':>8} {'wall s':>8} {'peak MB':>8} {'ours / it':>9}")
    chosen = [] if options.only.startswith("ranks") else cases(options.folder, options.kernels)
    for case in [*chosen, *ranks_cases(options.folder, options.ranks)]:
        if options.only not in case.name:
            continue
        runs: dict[str, list[Cost]] = {c.name: [] for c in case.contenders}
        for _ in range(options.repeat):  # in turn, so that a machine that slows down slows all
            for contender in case.contenders:
                runs[contender.name].append(measured(contender))
        ours: Cost | None = None
        for name, costs in runs.items():
            cpu, wall = (statistics.median(getattr(c, what) for c in costs) for what in ("cpu_s", "wall_s"))
            cost = Cost(cpu, max(c.peak_mb for c in costs), wall)
            ours = ours or cost
            ratio = f"{ours.cpu_s / cost.cpu_s:9.2f}" if cost is not ours else ""
            figures = f"{cost.cpu_s:8.2f} {cost.wall_s:8.2f} {cost.peak_mb:8.0f} {ratio:>9}"
            print(f"{case.name[:58]:58} {name:34} {figures}", flush=True)
            results.append({"case": case.name, "contender": name, "runs": [dataclasses.asdict(c) for c in costs]})
    (options.folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
