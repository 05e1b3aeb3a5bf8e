"""nsightkit in a process of its own: how it ended, what it said, and what it cost."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import nsightkit

ROOT = Path(nsightkit.__file__).parents[1]

# The peak is asked of the process itself: what the parent counts of a child begins with the parent's own size.
PROGRAM = """
import json, re, resource, runpy, sys
result = sys.argv.pop(1)
try:
    runpy.run_module("nsightkit", run_name="__main__", alter_sys=True)
finally:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    with open("/proc/self/status") as status:
        peak_kib = int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read())[1])
    with open(result, "w") as file:
        json.dump({"cpu_s": usage.ru_utime + usage.ru_stime, "peak_bytes": peak_kib * 1024}, file)
"""


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes
    ----------
    code : int
        Exit code; negative for a signal.
    error : str
        Standard error.
    cpu_s : float
        Processor time.
    peak_bytes : int
        The most memory it held.
    """

    code: int
    error: str
    cpu_s: float
    peak_bytes: int


def command(*arguments: object, imports: Path | None = None, address_space_bytes: int | None = None) -> Ended:
    """Run a command of nsightkit without a cache, for at most 20 seconds of the processor.

    Parameters
    ----------
    *arguments : object
    imports : Path, optional
        A folder that is searched for modules first.
    address_space_bytes : int, optional
        A limit for the process, so that a failure does not fill the machine.
    """
    folders = [str(ROOT)]
    if imports is not None:
        folders.insert(0, str(imports))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "NSIGHTKIT_NO_CACHE": "1"}

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
        if address_space_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (address_space_bytes, address_space_bytes))

    with tempfile.NamedTemporaryFile("r+", suffix=".json") as result:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, result.name, *map(str, arguments)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            preexec_fn=limit,
            timeout=60,
            check=False,
            text=True,
        )
        cost = json.loads(result.read() or '{"cpu_s": Infinity, "peak_bytes": Infinity}')
    return Ended(done.returncode, done.stderr, **cost)
