"""Check which profilers work on this machine, and how to fix the rest."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable
from pathlib import Path

from nsightkit.capture.children import gpu_name
from nsightkit.capture.nsys import importer
from nsightkit.errors import NsightkitError
from nsightkit.trace.programs import LIBRARIES, NCU, NSYS, Tool, dotted, environment, output_of

#: Status, what was found, and remedy: as the columns of :func:`check_machine`.
_Finding = tuple[str, str, str]

#: The bits of CAP_SYS_ADMIN and CAP_PERFMON: the driver asks for either, which root of a container mostly lacks.
_MAY_READ_COUNTERS = 0x40_0020_0000


def check_machine() -> list[dict[str, str]]:
    """Check this machine.

    Returns
    -------
    list of dict
        ``check``, ``status`` (``ok``; ``warn``: works with a limit; ``missing``: does not work), ``found``, ``remedy``
        (empty when there is nothing to do).
    """
    rows = []
    for check, run_check in _CHECKS.items():
        try:
            status, found, remedy = run_check()
        except NsightkitError as error:
            found, _, remedy = str(error).partition("; ")  # our errors are "problem; remedy"
            status = "missing"
        rows.append({"check": check, "status": status, "found": found, "remedy": remedy})
    return rows


def installed(package: str) -> str | None:
    """Return the version of a package; None where it is not installed.

    Parameters
    ----------
    package : str
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_tool(tool: Tool) -> _Finding:
    """Look for nsys or ncu, and ask for its version."""
    program = tool.require()
    return "ok", f"{dotted(tool.version(program))} at {program}", ""


def _check_importer() -> _Finding:
    """Look for the program by which nsys turns a raw capture into a report, and for the libraries it is linked with."""
    nsys = NSYS.require()
    program = importer(nsys)
    if program is None:
        remedy = "if captures leave only a .qdstrm: install the host part of Nsight Systems (Debian: nsight-systems)"
        return "warn", f"no QdstrmImporter beside {nsys}", remedy
    ldd_output = output_of("ldd", str(program), env=environment(None, program.parent))
    missing_libraries = sorted(set(re.findall(r"(\S+) => not found", ldd_output)))
    if missing_libraries:
        # The copy inside Nsight Compute needs libdw, which slim containers lack; nsys then exits with 0 and no report.
        remedy = f"install these libraries (Debian: libdw1), or name their folder in {LIBRARIES}"
        return "missing", f"{program} lacks {', '.join(missing_libraries)}", remedy
    return "ok", str(program), ""


def _check_counters() -> _Finding:
    """Look up whether the driver lets this user read the GPU's counters."""
    try:
        parameters = Path("/proc/driver/nvidia/params").read_text(errors="replace")
    except OSError:
        return "missing", "no NVIDIA kernel driver here", "none needed to read traces"
    restricted = re.search(r"^RmProfilingAdminOnly:\s*(\d+)", parameters, re.MULTILINE)
    if restricted is None:
        return "ok", "no restriction found", ""
    capabilities = Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0]
    if restricted[1] == "1" and not int(capabilities, 16) & _MAY_READ_COUNTERS:
        remedy = (
            "run as root, in a container with --cap-add=SYS_ADMIN, or set NVreg_RestrictProfilingToAdminUsers=0 "
            "for the host's nvidia module; timelines need no counters"
        )
        return "warn", "for administrators only (ERR_NVGPUCTRPERM for others)", remedy
    return "ok", "allowed", ""


def _check_package(name: str, status: str, remedy: str) -> _Finding:
    """Look for a package; `status` and `remedy` are given where it is not installed."""
    version = installed(name)
    if version is None:
        return status, "not installed", remedy
    return "ok", version, ""


def _check_gpu() -> _Finding:
    """Look for a GPU that torch can use."""
    name = gpu_name()
    if name is None:
        return "missing", "torch sees none", "only capturing and measuring need one; reading traces does not"
    return "ok", name, ""


_CHECKS: dict[str, Callable[[], _Finding]] = {
    "nsys (timeline capture, .nsys-rep)": lambda: _check_tool(NSYS),
    "nsys importer (turns a capture into a report)": _check_importer,
    "NVTX ranges from Python": lambda: _check_package("nvtx", "missing", "pip install 'nsightkit[capture]'"),
    "ncu (kernel analysis)": lambda: _check_tool(NCU),
    "ncu-report (reads .ncu-rep)": lambda: _check_package(
        "ncu-report", "warn", "pip install 'nsightkit[ncu]', unless ncu is here, or give its CSV"
    ),
    "GPU performance counters (ncu, GPU metrics)": _check_counters,
    "torch (workloads, torch.profiler)": lambda: _check_package(
        "torch", "missing", "pip install 'nsightkit[torch]', or the wheel of your choice first"
    ),
    "CUDA GPU (live measurements, recordings)": _check_gpu,
}
