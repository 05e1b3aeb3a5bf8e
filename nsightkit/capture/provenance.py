"""Provenance of a measurement: machine, versions and code, without anything that identifies a person or a host.

The record is built from named facts, never by copying an environment.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import platform
import re
from pathlib import Path
from typing import Any

import pandas as pd

import nsightkit
from nsightkit.capture import utilization
from nsightkit.capture.doctor import installed
from nsightkit.errors import NsightkitError
from nsightkit.text import Json
from nsightkit.trace.programs import NCU, NSYS, Tool, dotted, output_of

#: Version of the layout of recordings.
FORMAT = 1
#: nvidia-smi's fields, by the facts of a GPU that they give.
_SMI_FIELDS = {
    "driver": "driver_version",
    "power_limit_w": "power.limit",
    "sm_clock_max_mhz": "clocks.max.sm",
    "memory_clock_max_mhz": "clocks.max.mem",
}


def collect(*, device: str, **facts: Any) -> Json:
    """Describe this machine and its software.

    Parameters
    ----------
    device : str
        ``"cpu"`` or a CUDA device: the GPU that is described.
    **facts
        Added unchanged: what only the caller knows, such as ``parameters``, ``command`` or ``duration_s``.

    Returns
    -------
    dict
        JSON values. ``gpu`` is None without a GPU; unknown versions are None.
    """
    commit, dirty = _source_commit()
    return {
        "format": FORMAT,
        **facts,
        "utc": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "dirty": dirty,
        "gpu": _gpu_facts(device) if device.startswith("cuda") else None,
        "cpu": {"model": _cpu_model(), "cores": os.cpu_count()},
        "software": {**_software_versions(), "nsys": _tool_version(NSYS), "ncu": _tool_version(NCU)},
    }


def _tool_version(tool: Tool) -> str | None:
    """Ask an installed nsys or ncu for its version; None if it is not installed."""
    with contextlib.suppress(NsightkitError):
        program = tool.find()
        if program is not None:
            return dotted(tool.version(program))
    return None


def _gpu_facts(device: str) -> Json:
    """Describe a GPU by name, memory, compute capability, driver and limits."""
    import torch

    properties = torch.cuda.get_device_properties(torch.device(device))
    facts = {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30),
        "compute_capability": f"{properties.major}.{properties.minor}",
    }
    values = utilization.ask_smi(device, _SMI_FIELDS.values())  # texts, in the order of the fields
    return facts | dict(zip(_SMI_FIELDS, values, strict=False))  # no values where nvidia-smi does not answer


def _software_versions() -> Json:
    """List the versions of the operating system, Python and the packages that matter."""
    facts: Json = {
        "os": platform.system(),
        "python": platform.python_version(),
        "nsightkit": nsightkit.__version__,
    }
    for package in ("torch", "triton", "numpy"):
        facts[package] = installed(package)
    with contextlib.suppress(OSError):
        facts["os"] = platform.freedesktop_os_release()["PRETTY_NAME"]
    if facts["torch"]:
        import torch

        facts["torch"] = torch.__version__  # names the build, too, as in 2.9.0+cu128; the package's version may not
        facts["cuda"] = torch.version.cuda
        facts["cudnn"] = torch.backends.cudnn.version() if torch.version.cuda else None  # type: ignore[no-untyped-call]
    return facts


def _cpu_model() -> str:
    """Read the CPU's model name."""
    with contextlib.suppress(OSError):
        model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if model:
            return model[1]
    return platform.processor() or platform.machine()


def _source_commit() -> tuple[str | None, bool | None]:
    """Find the commit of this source tree, and whether it has changes; NSIGHTKIT_COMMIT names the commit of a copy."""
    root = Path(nsightkit.__file__).parents[1]
    text = os.environ.get("NSIGHTKIT_COMMIT", "")
    # An installed package may be inside another project's checkout, whose commit is not ours. With --exclude=* git
    # names the commit instead of the nearest tag.
    if not text and (root / "pyproject.toml").is_file():
        text = output_of(
            "git", "-C", str(root), "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"
        ).strip()
    match = re.fullmatch(r"([0-9a-f]{7,40})(-dirty)?", text)
    if match is None:
        return None, None
    return match[1], match[2] is not None


def slug(name: str) -> str:
    """Turn a GPU's name into a folder name.

    Parameters
    ----------
    name : str

    Returns
    -------
    str
        Such as ``nvidia-h200``.
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "gpu"


def provenance_rows(record: Json) -> list[tuple[str, str]]:
    """Flatten a provenance record into pairs of name and value, for display.

    Parameters
    ----------
    record : mapping

    Returns
    -------
    list of (str, str)
        Such as ``("gpu name", "NVIDIA H200")``; unknown values are left out.
    """
    flat = pd.json_normalize(record, sep=" ").iloc[0].dropna()
    return [(str(name).replace("_", " "), str(value)) for name, value in flat.items()]
