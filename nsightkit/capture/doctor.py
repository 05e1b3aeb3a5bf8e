"""What on this machine can capture what, and what to do about the rest."""

from __future__ import annotations

import contextlib
import importlib.metadata
import multiprocessing
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from nsightkit.errors import NsightkitError
from nsightkit.trace import nsys_tool
from nsightkit.trace._process import run

__all__ = ["report"]

_Row = dict[str, str]


def report() -> list[_Row]:
    """Check this machine.

    Returns
    -------
    list of dict
        ``check``, ``status`` (``ok``; ``warn``: works with a limit; ``missing``: what needs it does not
        work), ``found``, ``remedy`` (empty when there is nothing to do).
    """
    checks: tuple[Callable[[], _Row], ...] = (
        _readers,
        _nsys,
        _importer,
        _nvtx,
        _sampling,
        _ncu,
        _ncu_report,
        _counters,
        _torch,
        _gpu,
        _workers,
        _cache,
        _temporary,
    )
    return [check() for check in checks]


def _row(check: str, status: str, found: str, remedy: str = "") -> _Row:
    return {"check": check, "status": status, "found": found, "remedy": remedy}


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text)[:3])


def _readers() -> _Row:
    needed = ("pandas", "pyarrow", "msgspec", "adbc-driver-sqlite")
    absent = [package for package in needed if _installed(package) is None]
    found = ", ".join(f"{package} {_installed(package)}" for package in needed if package not in absent)
    if absent:
        return _row("read traces", "missing", found, f"pip install {' '.join(absent)}")
    return _row("read traces", "ok", found)


def _nsys() -> _Row:
    name = "nsys (timeline capture, .nsys-rep)"
    try:
        nsys = nsys_tool.find()
        if nsys is None:
            remedy = "install Nsight Systems (Debian: nsight-systems), or set NSIGHTKIT_NSYS to its nsys program"
            return _row(name, "missing", "not on the PATH, nor where NVIDIA's installers put it", remedy)
        version = nsys_tool.version(nsys)
    except NsightkitError as error:
        problem, _, remedy = str(error).partition("; ")
        return _row(name, "missing", problem, remedy)
    words = f"{'.'.join(map(str, version))} at {nsys}"
    if version[:2] < nsys_tool.MINIMUM:
        minimum = ".".join(map(str, nsys_tool.MINIMUM))
        return _row(name, "missing", f"{words}: too old, it may hang", f"install {minimum} or later")
    return _row(name, "ok", words)


def _usable_nsys() -> Path | None:
    with contextlib.suppress(NsightkitError):
        return nsys_tool.require()
    return None


def _importer() -> _Row:
    from nsightkit.capture.nsys import importer

    name = "nsys importer (turns a capture into a report)"
    nsys = _usable_nsys()
    if nsys is None:
        return _row(name, "missing", "no usable nsys", "see nsys")
    found = importer(nsys)
    if found is None:
        remedy = "if captures leave only a .qdstrm: install the host part of Nsight Systems (Debian: nsight-systems)"
        return _row(name, "warn", f"no QdstrmImporter beside {nsys}", remedy)
    lacking: list[str] = []
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        environment = nsys_tool.environment(None, found.parent)
        lacking = re.findall(r"(\S+) => not found", run(["ldd", str(found)], 20.0, env=environment).stdout)
    if lacking:
        # The copy inside Nsight Compute needs libdw, which slim containers lack; nsys then exits with 0 and no report.
        remedy = f"install these libraries (Debian: libdw1), or name their folder in {nsys_tool.LIBRARIES}"
        return _row(name, "missing", f"{found} lacks {', '.join(sorted(set(lacking)))}", remedy)
    return _row(name, "ok", str(found))


def _nvtx() -> _Row:
    name = "NVTX ranges from Python"
    installed = _installed("nvtx")
    if installed is None:
        return _row(name, "missing", "the nvtx package is not installed", "pip install 'nsightkit[capture]'")
    nsys = _usable_nsys()
    if nsys is not None and nsys_tool.version(nsys) < (2024, 1) and _numbers(installed) >= (0, 2, 12):
        words = f"nvtx {installed} emits no ranges under nsys {'.'.join(map(str, nsys_tool.version(nsys)))}"
        return _row(name, "missing", words, "pip install nvtx==0.2.11, or a newer nsys")
    return _row(name, "ok", f"nvtx {installed}")


def _sampling() -> _Row:
    name = "CPU sampling (perf_event_paranoid)"
    try:
        level = int(Path("/proc/sys/kernel/perf_event_paranoid").read_text())
    except (OSError, ValueError):
        return _row(name, "warn", "unknown", "no need: nsightkit captures without CPU samples")
    if level > 2 and not _is_root():
        remedy = (
            "no need: nsightkit captures without CPU samples; for them, as root: sysctl kernel.perf_event_paranoid=2"
        )
        return _row(name, "warn", f"{level}: no CPU samples, no context switches", remedy)
    return _row(name, "ok", str(level))


def _is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


def _ncu() -> _Row:
    from nsightkit.capture import ncu

    name = "ncu (kernel analysis)"
    try:
        found = ncu.find()
        if found is None:
            return _row(name, "missing", "not on the PATH", "install Nsight Compute; only its captures need it")
        return _row(name, "ok", f"{ncu.version(found)} at {found}")
    except NsightkitError as error:
        problem, _, remedy = str(error).partition("; ")
        return _row(name, "missing", problem, remedy)


def _ncu_report() -> _Row:
    name = "ncu-report (reads .ncu-rep)"
    installed = _installed("ncu-report")
    if installed is None:
        return _row(name, "warn", "not installed", "pip install 'nsightkit[ncu]', unless ncu is here, or give its CSV")
    return _row(name, "ok", installed)


def _counters() -> _Row:
    name = "GPU performance counters (ncu, GPU metrics)"
    try:
        parameters = Path("/proc/driver/nvidia/params").read_text(errors="replace")
    except OSError:
        return _row(name, "missing", "no NVIDIA kernel driver here", "none needed to read traces")
    restricted = re.search(r"^RmProfilingAdminOnly:\s*(\d+)", parameters, re.MULTILINE)
    if restricted and restricted[1] == "1" and not _is_root():
        remedy = (
            "run as root or with CAP_SYS_ADMIN, or set NVreg_RestrictProfilingToAdminUsers=0 "
            "for the host's nvidia module; timelines need no counters"
        )
        return _row(name, "warn", "for administrators only (ERR_NVGPUCTRPERM for others)", remedy)
    return _row(name, "ok", "allowed" if restricted else "no restriction found")


def _torch() -> _Row:
    name = "torch (workloads, torch.profiler)"
    version = _installed("torch")
    if version is None:
        return _row(
            name, "missing", "not installed", "pip install 'nsightkit[torch]', or the wheel of your choice first"
        )
    return _row(name, "ok", version)


def _gpu() -> _Row:
    from nsightkit.capture.children import has_gpu

    name = "CUDA GPU (live measurements, recordings)"
    if has_gpu():
        return _row(name, "ok", "torch sees one")
    return _row(
        name, "missing", "torch sees none", "without one, recordings are shown and workloads run small on the CPU"
    )


def _workers() -> _Row:
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    words = f"DataLoader workers start by {method}"
    if method == "fork":
        # They never exec, and nsys follows only processes that do.
        words += ": nsys does not trace them, starvation shows in the main process"
    return _row("data-loading workers", "ok", words)


def _cache() -> _Row:
    name = "cache of big traces"
    if os.environ.get("NSIGHTKIT_NO_CACHE", "") in ("1", "true", "yes"):
        return _row(name, "warn", "turned off", "unset NSIGHTKIT_NO_CACHE")
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return _disk(name, folder, "beside the trace, else in the user's cache folder")


def _temporary() -> _Row:
    return _disk("temporary files (nsys, measurements)", Path(tempfile.gettempdir()), "")


def _disk(name: str, folder: Path, words: str) -> _Row:
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not os.access(existing, os.W_OK):
        return _row(
            name, "warn", f"{folder} is not writable", "make it writable, or point TMPDIR or XDG_CACHE_HOME elsewhere"
        )
    free = shutil.disk_usage(existing).free / 2**30
    found = f"{words + ', ' if words else ''}{free:.0f} GiB free in {existing}"
    if free < 2:
        return _row(name, "warn", found, "free some space: a report and its export take gigabytes")
    return _row(name, "ok", found)
