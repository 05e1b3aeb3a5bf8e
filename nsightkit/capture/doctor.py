"""What on this machine can capture what, and what to do about the rest."""

from __future__ import annotations

import contextlib
import importlib.metadata
import multiprocessing
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from nsightkit.capture.children import has_gpu
from nsightkit.capture.nsys import importer
from nsightkit.errors import NsightkitError
from nsightkit.trace.files import user_cache
from nsightkit.trace.programs import LIBRARIES, NCU, NSYS, Tool, dotted, environment, said

__all__ = ["installed", "report"]

#: Status, what was found, and what to do about it.
_Found = tuple[str, str, str]


def report() -> list[dict[str, str]]:
    """Check this machine.

    Returns
    -------
    list of dict
        ``check``, ``status`` (``ok``; ``warn``: works with a limit; ``missing``: what needs it does not
        work), ``found``, ``remedy`` (empty when there is nothing to do).
    """
    rows = []
    for check, look in _CHECKS.items():
        try:
            status, found, remedy = look()
        except NsightkitError as error:
            status, (found, _, remedy) = "missing", str(error).partition("; ")
        rows.append({"check": check, "status": status, "found": found, "remedy": remedy})
    return rows


def installed(package: str) -> str | None:
    """Give the version of a package; None where it is not installed.

    Parameters
    ----------
    package : str
    """
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _readers() -> _Found:
    versions = {package: installed(package) for package in ("pandas", "pyarrow", "msgspec", "adbc-driver-sqlite")}
    absent = [package for package, version in versions.items() if version is None]
    found = ", ".join(f"{package} {version}" for package, version in versions.items() if version is not None)
    return ("missing", found, f"pip install {' '.join(absent)}") if absent else ("ok", found, "")


def _tool(tool: Tool) -> _Found:
    program = tool.require()
    return "ok", f"{dotted(tool.version(program))} at {program}", ""


def _package(name: str, otherwise: _Found) -> _Found:
    """Look for a package; `otherwise` is what there is to say where it is not installed."""
    version = installed(name)
    return otherwise if version is None else ("ok", version, "")


def _importer() -> _Found:
    nsys = NSYS.require()
    found = importer(nsys)
    if found is None:
        remedy = "if captures leave only a .qdstrm: install the host part of Nsight Systems (Debian: nsight-systems)"
        return "warn", f"no QdstrmImporter beside {nsys}", remedy
    linked = said("ldd", str(found), env=environment(None, found.parent))
    if lacking := re.findall(r"(\S+) => not found", linked):
        # The copy inside Nsight Compute needs libdw, which slim containers lack; nsys then exits with 0 and no report.
        remedy = f"install these libraries (Debian: libdw1), or name their folder in {LIBRARIES}"
        return "missing", f"{found} lacks {', '.join(sorted(set(lacking)))}", remedy
    return "ok", str(found), ""


def _nvtx() -> _Found:
    version = installed("nvtx")
    if version is None:
        return "missing", "the nvtx package is not installed", "pip install 'nsightkit[capture]'"
    with contextlib.suppress(NsightkitError):
        under = NSYS.version(NSYS.require())
        if under < (2024, 1) and [int(n) for n in re.findall(r"\d+", version)[:3]] >= [0, 2, 12]:
            words = f"nvtx {version} emits no ranges under nsys {dotted(under)}"
            return "missing", words, "pip install nvtx==0.2.11, or a newer nsys"
    return "ok", f"nvtx {version}", ""


def _sampling() -> _Found:
    unneeded = "no need: nsightkit captures without CPU samples"
    try:
        level = int(Path("/proc/sys/kernel/perf_event_paranoid").read_text())
    except (OSError, ValueError):
        return "warn", "unknown", unneeded
    if level <= 2 or os.geteuid() == 0:
        return "ok", str(level), ""
    remedy = f"{unneeded}; for them, as root: sysctl kernel.perf_event_paranoid=2"
    return "warn", f"{level}: no CPU samples, no context switches", remedy


def _counters() -> _Found:
    try:
        parameters = Path("/proc/driver/nvidia/params").read_text(errors="replace")
    except OSError:
        return "missing", "no NVIDIA kernel driver here", "none needed to read traces"
    restricted = re.search(r"^RmProfilingAdminOnly:\s*(\d+)", parameters, re.MULTILINE)
    if restricted and restricted[1] == "1" and os.geteuid() != 0:
        remedy = (
            "run as root or with CAP_SYS_ADMIN, or set NVreg_RestrictProfilingToAdminUsers=0 "
            "for the host's nvidia module; timelines need no counters"
        )
        return "warn", "for administrators only (ERR_NVGPUCTRPERM for others)", remedy
    return "ok", "allowed" if restricted else "no restriction found", ""


def _gpu() -> _Found:
    absent = "missing", "torch sees none", "without one, recordings are shown and workloads run small on the CPU"
    return ("ok", "torch sees one", "") if has_gpu() else absent


def _workers() -> _Found:
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    # Forked ones never exec, and nsys follows only processes that do.
    unseen = ": nsys does not trace them, starvation shows in the main process" if method == "fork" else ""
    return "ok", f"DataLoader workers start by {method}{unseen}", ""


def _cache() -> _Found:
    if os.environ.get("NSIGHTKIT_NO_CACHE", "") in ("1", "true", "yes"):
        return "warn", "turned off", "unset NSIGHTKIT_NO_CACHE"
    return _disk(user_cache(), "beside the trace, else in the user's cache folder, ")


def _disk(folder: Path, words: str = "") -> _Found:
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not os.access(existing, os.W_OK):
        return "warn", f"{folder} is not writable", "make it writable, or point TMPDIR or XDG_CACHE_HOME elsewhere"
    free = shutil.disk_usage(existing).free / 2**30
    found = f"{words}{free:.0f} GiB free in {existing}"
    full = "warn", found, "free some space: a report and its export take gigabytes"
    return full if free < 2 else ("ok", found, "")


_CHECKS: dict[str, Callable[[], _Found]] = {
    "read traces": _readers,
    "nsys (timeline capture, .nsys-rep)": lambda: _tool(NSYS),
    "nsys importer (turns a capture into a report)": _importer,
    "NVTX ranges from Python": _nvtx,
    "CPU sampling (perf_event_paranoid)": _sampling,
    "ncu (kernel analysis)": lambda: _tool(NCU),
    "ncu-report (reads .ncu-rep)": lambda: _package(
        "ncu-report", ("warn", "not installed", "pip install 'nsightkit[ncu]', unless ncu is here, or give its CSV")
    ),
    "GPU performance counters (ncu, GPU metrics)": _counters,
    "torch (workloads, torch.profiler)": lambda: _package(
        "torch", ("missing", "not installed", "pip install 'nsightkit[torch]', or the wheel of your choice first")
    ),
    "CUDA GPU (live measurements, recordings)": _gpu,
    "data-loading workers": _workers,
    "cache of big traces": _cache,
    "temporary files (nsys, measurements)": lambda: _disk(Path(tempfile.gettempdir())),
}
