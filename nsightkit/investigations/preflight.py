"""What works on a machine, found out within a minute and a half, before its time goes into recordings that cannot work.

Each check is what a part of an investigation needs, in the way in which the part needs it, but small, and in a process
of its own: one that crashes or hangs costs its own answer only. Parts whose :func:`needs` fail are not tried.
"""

# Imports that need more than pandas stand inside the checks: a package that is missing on a machine must cost the
# checks that need it, no others.

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from nsightkit.capture import ncu, nsys, torch_profiler, utilization
from nsightkit.capture.children import ask_child, child_environment, fork_child, start_child, starter
from nsightkit.capture.doctor import installed
from nsightkit.errors import NsightkitError
from nsightkit.investigations.parts import Part, find, resolve
from nsightkit.trace import load, snapshot
from nsightkit.trace import ncu as reports

__all__ = ["CHECKS", "SAVED", "Check", "main", "needs", "no_gpu", "results", "run", "save"]

#: Seconds for all checks together.
LIMIT_S = 90.0
#: What the results are called in the folder of recordings.
SAVED = ".preflight.json"
#: Without so much space on the disk, captures fail.
_FREE_GIB = 5
#: What nsightkit cannot do without, on a machine that records; Triton has a check of its own.
_PACKAGES = {
    "torch": "torch", "numpy": "numpy", "pandas": "pandas", "pyarrow": "pyarrow", "msgspec": "msgspec", "nvtx": "nvtx",
    "adbc_driver_manager": "adbc-driver-manager", "adbc_driver_sqlite.dbapi": "adbc-driver-sqlite",
}  # fmt: skip
#: What is profiled: a device's name is its argument.
_PROGRAM = """
import sys, torch
from nsightkit.workloads.phases import phase
x = torch.ones(256, 256, device=sys.argv[1])
y = x @ x
with phase("preflight"):
    for _ in range(3):
        y = x @ x
    if y.is_cuda:
        torch.cuda.synchronize()
"""


def _imports(_device: str, _folder: Path) -> str:
    absent = []
    for module, package in _PACKAGES.items():
        try:
            importlib.import_module(module)
        except ImportError as error:
            absent.append(f"{package} ({error})")
    if absent:
        raise NsightkitError(f"these cannot be imported: {', '.join(absent)}; bring them along (CONTRIBUTING.md)")
    return ", ".join(f"{package} {installed(package)}" for package in _PACKAGES.values())


def _gpu(device: str, _: Path) -> str:
    import torch

    if not torch.cuda.is_available():
        raise NsightkitError(f"torch {torch.__version__} sees no CUDA GPU")
    has = torch.cuda.get_device_properties(device)
    size = f"{has.total_memory / 2**30:.0f} GiB, {has.multi_processor_count} multiprocessors"
    return f"{has.name}, {size}, compute capability {has.major}.{has.minor}, CUDA {torch.version.cuda}"


def _host(device: str, _: Path) -> str:
    import torch

    from nsightkit.capture.provenance import scrub

    name = torch.cuda.get_device_properties(device).name
    if scrub(name) != name:
        raise NsightkitError(
            f"{name} would be recorded as {scrub(name)}, as this machine's or its user's name is in it; "
            "give the machine another name (hostname)"
        )
    return f"the name {name} holds no name of this machine"


def _small_product(device: str, precision: str) -> Any:
    return resolve(find("ceilings", "before").workload)(device, kind="gemm", precision=precision, m=256, n=256, k=256)


def _product(precision: str, device: str, _: Path) -> str:
    with _small_product(device, precision) as work:
        size = float(work.run().float().abs().mean())
    # The mean of the absolute value of a sum of 256 products of numbers that are normally distributed.
    right = math.sqrt(256 * 2 / math.pi)
    if not 0.9 < size / right < 1.1:
        raise NsightkitError(f"its result is wrong: numbers of {size:g}, not about {right:.3g}")
    return f"256 x 256 x 256 in {precision}"


def _rung(investigation: str, rung: str, device: str, _: Path) -> str:
    part = find(investigation, rung)
    # At the size of the part: what is compiled for it here need not be compiled again.
    parameters = part.parameters("live" if device.startswith("cuda") else "smoke") | {"layers": 1}
    with resolve(part.workload)(device, **parameters) as work:
        work.step()
        error, instead = work.observed()["relative_error"][0], work.parameters["instead"]
    if not error < 0.1:
        raise NsightkitError(f"its result is wrong: its relative error is {error:g}")
    return f"{investigation}/{rung} in one layer, relative error {error:.1g}{instead and f'; {instead}'}"


def _snapshot(device: str, folder: Path) -> str:
    from nsightkit.investigations.recordings import SNAPSHOT
    from nsightkit.investigations.ways_to_measure import remembered

    part = find("memory-snapshot", "after")
    remembered(resolve(part.workload), device, part.parameters("smoke"), part.counts("smoke"), folder)
    snapshot.read(folder / SNAPSHOT)
    return f"{(folder / SNAPSHOT).stat().st_size / 1e3:.0f} kB of {part.counts('smoke')['active']} steps"


def _attention(device: str, _: Path) -> str:
    import torch
    from torch.nn.attention import SDPBackend

    shapes = {  # batch, heads, queries, keys, head size
        "ladder": (1, 32, 2048, 2048, 128),
        "decode": (1, 32, 1, 2048, 128),
        "bench": (16, 16, 512, 512, 64),
        "attention-sweep": (8, 1, 1024, 1024, 64),
    }
    found = {}
    for name, (batch, heads, queries, keys, size) in shapes.items():
        q, k, v = (
            torch.empty(batch, heads, n, size, dtype=torch.bfloat16, device=device) for n in (queries, keys, keys)
        )
        found[name] = SDPBackend(torch._fused_sdp_choice(q, k, v, None, 0.0, queries > 1)).name.lower()
    return ", ".join(f"{name}: {backend}" for name, backend in found.items())


def _profiled(device: str, folder: Path) -> Any:
    """A profile that torch.profiler wrote, as a trace."""
    with _small_product(device, "bf16") as work:
        torch_profiler.profile_steps(work.step, folder / "trace.json.gz", wait=1, warmup=1, active=3)
    return load(folder / "trace.json.gz", cache=False)


def _trace(device: str, folder: Path) -> str:
    trace = _profiled(device, folder)
    counts = {table: trace.size(table) for table in ("ops", "kernels", "syncs")}
    wanted = "kernels" if device.startswith("cuda") else "ops"
    if not counts[wanted]:
        raise NsightkitError(f"the profile of PyTorch holds no {wanted}")
    return ", ".join(f"{count} {table}" for table, count in counts.items())


def _write(device: str, folder: Path) -> str:
    from nsightkit.capture.provenance import collect
    from nsightkit.investigations import recordings

    part, on_gpu = find("accumulation", "before"), device.startswith("cuda")
    facts = collect(
        device=device,
        kind="measured" if on_gpu else "dry-run",
        investigation=part.investigation,
        part=part.name,
        key=recordings.part_key(part),
        parameters=part.parameters("live"),
        counts=part.counts("live"),
    )
    where = folder / "recordings"
    samples = recordings.frame({"step_ns": [1.0]})
    recordings.write(_profiled(device, folder), samples, facts, where, dry_run=not on_gpu)
    (found,) = recordings.find(part, where)
    if on_gpu and found.state != "current":
        raise NsightkitError(f"what was written is {found.state}: {found.reason}")
    return f"written and found as {found.path.parent.name}"


def _gloo(device: str, _: Path) -> str:
    part = find("late-rank", "before")
    with resolve(part.workload)(device, **part.parameters("smoke")) as crew:
        crew.step()
        return f"{crew.parameters['ranks']} processes through {crew.parameters['backend']}"


def _nsys(device: str, folder: Path) -> str:
    kernels = ("kernels",) if device.startswith("cuda") else ()
    done = nsys.profile(
        [sys.executable, "-c", _PROGRAM, device],
        folder / "report",
        trace=("cuda", "nvtx"),
        capture_range="preflight",
        expect=("ranges", *kernels),
        timeout_s=40.0,
        env=child_environment(),
        show=False,
    )
    trace = load(done.trace, cache=False)
    return ", ".join(f"{trace.size(table)} {table}" for table in ("ranges", *kernels))


def _ncu(device: str, folder: Path) -> str:
    done = ncu.profile(
        [sys.executable, "-c", _PROGRAM, device],
        folder / "report",
        nvtx=["preflight"],
        sections=["SpeedOfLight"],
        count=1,
        timeout_s=40.0,
        env=child_environment(),
        show=False,
    )
    report = reports.read(done.report)
    return f"{len(report)} launch, {len(report.units)} metrics"


def _nvml(device: str, _: Path) -> str:
    read = utilization.now(device)
    lacking = [name for name in ("sm_clock_mhz", "power_w", "slowdown_mask") if name not in read]
    if lacking:
        raise NsightkitError(f"nvidia-smi does not give {', '.join(lacking)}; recordings go without")
    return ", ".join(f"{name} {value:g}" for name, value in read.items())


def _disk(_: str, folder: Path) -> str:
    free = shutil.disk_usage(folder).free / 2**30
    if free < _FREE_GIB:
        raise NsightkitError(
            f"{free:.1f} GiB are free in {folder.parent}; captures need {_FREE_GIB}: point TMPDIR elsewhere"
        )
    return f"{free:.0f} GiB free"


@dataclasses.dataclass(frozen=True)
class Check:
    """One question to a machine.

    Parameters
    ----------
    ask : callable
        Takes a device and an empty folder; gives what it found in a few words, and raises what went wrong.
    where : {"gpu", "either", "anywhere"}
        ``gpu``: only a GPU can answer. ``either``: it is about a GPU, and runs on a CPU to be tried. ``anywhere``: the
        answer counts on a machine without a GPU as well.
    limit_s : float
    apart : bool
        It starts programs, or takes long: beside the others, in a fresh interpreter.
    """

    ask: Callable[[str, Path], str]
    where: Literal["gpu", "either", "anywhere"] = "either"
    limit_s: float = 30.0
    apart: bool = False


#: By name, in the order in which they are shown.
CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        # First and in a fresh interpreter, for nothing is in the machine's cache yet.
        "imports": Check(_imports, "anywhere", 60.0),
        "gpu": Check(_gpu, "gpu"),
        "host": Check(_host, "gpu"),
        "bf16": Check(functools.partial(_product, "bf16")),
        "fp8": Check(functools.partial(_product, "fp8")),
        "cuda-graph": Check(functools.partial(_rung, "decode", "graphed-eager")),
        "snapshot": Check(_snapshot),
        "compile": Check(functools.partial(_rung, "ladder", "compiled"), limit_s=60.0, apart=True),
        "triton": Check(functools.partial(_rung, "ladder", "triton"), limit_s=45.0),
        "attention": Check(_attention),
        "trace": Check(_trace, "anywhere"),
        "write": Check(_write, "anywhere"),
        "gloo": Check(_gloo, "anywhere", 45.0, apart=True),
        "nsys": Check(_nsys, "anywhere", 60.0, apart=True),
        "ncu": Check(_ncu, "gpu", 60.0, apart=True),
        "nvml": Check(_nvml, "gpu"),
        "disk": Check(_disk, "anywhere"),
    }
)


def needs(part: Part) -> set[str]:
    """Say which checks a part depends on; to be profiled once more, by nsys or ncu, it also needs ``part.profiled``.

    What all parts need is not among them: where that fails, there is nothing to lose by trying.

    Parameters
    ----------
    part : Part

    Returns
    -------
    set of str
        Names in :data:`CHECKS`.
    """
    given = part.parameters("live")
    module = part.workload.partition(":")[0].rpartition(".")[2]
    asked = {
        "bf16": given.get("precision") == "bf16",
        "fp8": given.get("precision") == "fp8",
        "compile": given.get("compiled") or given.get("implementation") == "naive-compiled",
        "snapshot": part.measured == "remembered",
        "triton": module == "limiters",
        "gloo": module == "late_rank",
    }
    if module == "layer":
        rung = resolve("nsightkit.workloads.layer:RUNGS")[given["mode"]][given["rung"]]
        asked |= {"compile": rung.compiled is not None, "cuda-graph": rung.graphed}
        asked |= {"triton": rung.triton, "fp8": rung.fp8}
    return {check for check, is_asked in asked.items() if is_asked}


def run(
    device: str = "cuda",
    only: Collection[str] = (),
    *,
    limit_s: float = LIMIT_S,
    echo: Callable[[str], object] = lambda _: None,
) -> list[dict[str, Any]]:
    """Check what works here.

    Parameters
    ----------
    device : {"cuda", "cpu"}
        ``cpu`` tries the checks themselves, small. Without a GPU, only what counts without one is checked.
    only : collection of str
        Names of checks; all if empty.
    limit_s : float
        For all of them.
    echo : callable
        Takes lines of progress.

    Returns
    -------
    list of dict
        ``check``; ``ok``, None where time ran out before there was an answer; ``detail``; ``seconds``.
    """
    end = time.monotonic() + limit_s
    rows: dict[str, dict[str, Any]] = {}

    def ask(name: str, start: Callable[..., Any]) -> None:
        begin = time.monotonic()
        limit_s = min(CHECKS[name].limit_s, end - begin)
        answer: dict[str, Any] = {"ok": None, "detail": "no time was left for it"}
        if limit_s > 1:
            try:
                answer = ask_child(
                    "nsightkit.investigations.preflight", {"check": name, "device": device}, limit_s, start
                )
            except (NsightkitError, OSError) as error:
                # Parts are not left out because a machine is slow.
                late = isinstance(error.__cause__, subprocess.TimeoutExpired)
                answer = {"ok": None if late else False, "detail": str(error)}
        rows[name] = {"check": name, **answer, "seconds": round(time.monotonic() - begin, 1)}
        echo(f"{name}: {_WORDS[answer['ok']]}, {answer['detail']}")

    asked = [name for name in CHECKS if name in (only or CHECKS) and (device != "cpu" or CHECKS[name].where != "gpu")]
    if "imports" in asked:
        ask("imports", start_child)
    start = starter() if device != "cpu" else fork_child  # as the recorder starts its children
    if "gpu" in asked:
        ask("gpu", start)
        if rows["gpu"]["ok"] is False:
            device, start = "cpu", fork_child
            asked = [name for name in asked if CHECKS[name].where == "anywhere"]
    rest = [name for name in asked if name not in rows]
    with ThreadPoolExecutor(2) as pool:  # two at a time, for they take more than a processor each
        for name in sorted(rest, key=lambda name: not CHECKS[name].apart):  # these first: they run beside the others
            if CHECKS[name].apart:
                pool.submit(ask, name, start_child)
            else:
                ask(name, start)
    return [rows[name] for name in CHECKS if name in rows]


_WORDS = {True: "works", False: "does not work", None: "no answer"}


def save(rows: Sequence[Mapping[str, Any]], place: Path) -> None:
    """Keep results for :func:`results`.

    Parameters
    ----------
    rows : sequence of mapping
        What :func:`run` gave.
    place : Path
        A file; its folder is made.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps({"boot": _boot(), "rows": rows}, indent=1) + "\n", encoding="utf-8")


def results(place: Path, echo: Callable[[str], object] = lambda _: None) -> list[dict[str, Any]]:
    """Give the results of the checks since this machine was started; without any, run the checks and save them.

    Parameters
    ----------
    place : Path
        The file that :func:`save` writes.
    echo : callable
        Takes lines of progress.

    Returns
    -------
    list of dict
        As from :func:`run`.
    """
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        earlier = json.loads(place.read_text(encoding="utf-8"))
        if earlier["boot"] == _boot():
            return list(earlier["rows"])
    rows = run(echo=echo)
    save(rows, place)
    return rows


def _boot() -> str:
    """Tell this start of this machine from others; without an answer, no two are the same."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return str(time.time())


def no_gpu(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say in one line that the machine has no GPU, and what was checked all the same; empty where it has one.

    Parameters
    ----------
    rows : sequence of mapping
        What :func:`run` gave.
    """
    others = ", ".join(f"{row['check']} {_WORDS[row['ok']]}" for row in rows if row["check"] != "gpu")
    lacking = [row["detail"] for row in rows if row["check"] == "gpu" and row["ok"] is False]
    return "".join(f"there is no GPU here ({why}); of what can be checked without one: {others}" for why in lacking)


def main(check: str, device: str) -> dict[str, Any]:
    """Ask one question.

    Parameters
    ----------
    check, device : str

    Returns
    -------
    dict
        ``ok`` and ``detail``.
    """
    with tempfile.TemporaryDirectory(prefix="nsightkit-", ignore_cleanup_errors=True) as folder:
        try:
            return {"ok": True, "detail": CHECKS[check].ask(device, Path(folder))}
        # Whatever fails is the answer.
        except Exception as error:
            named = "" if isinstance(error, NsightkitError) else f"{type(error).__name__}: "
            return {"ok": False, "detail": " ".join(f"{named}{error}".split())[:500]}
