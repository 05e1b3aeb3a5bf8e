"""Where figures come from: the machine, the versions and the code, and nothing that identifies a person or a host.

The record is built from named facts, never by copying an environment; what remains as free text (a GPU's
name, a kernel release) is searched for the host's and the user's names before it is kept.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import os
import platform
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import nsightkit
from nsightkit.capture import utilization
from nsightkit.capture.doctor import installed
from nsightkit.errors import NsightkitError
from nsightkit.trace.programs import NCU, NSYS, dotted, said
from nsightkit.trace.share.secrets import Scrubber

__all__ = ["FORMAT", "collect", "in_short", "label", "rows", "scrub", "slug", "tools"]

#: Version of the layout of recordings; part of every key.
FORMAT = 1
#: What nvidia-smi says of a GPU, and what it calls that.
_OF_GPU = {
    "driver": "driver_version",
    "power_limit": "power.limit",
    "clock_memory": "clocks.mem",
    "clock_sm_max": "clocks.max.sm",
    "clock_memory_max": "clocks.max.mem",
}


def tools() -> dict[str, Any]:
    """Ask nsys, ncu and git for their versions, which takes longer than all else that :func:`collect` describes.

    Returns
    -------
    dict
        ``nsys``, ``ncu``, ``commit``, ``dirty``; what cannot be had is None. Each is asked once in a process.
    """
    found: dict[str, Any] = dict.fromkeys(("nsys", "ncu"))
    for tool in (NSYS, NCU):
        with contextlib.suppress(NsightkitError):
            program = tool.find()
            found[tool.name] = program and dotted(tool.version(program))
    commit, dirty = _commit(os.environ.get("NSIGHTKIT_COMMIT", ""))
    return {**found, "commit": commit, "dirty": dirty}


def collect(*, device: str, known: Mapping[str, Any] | None = None, **facts: Any) -> dict[str, Any]:
    """Describe this machine and its software.

    Parameters
    ----------
    device : str
        ``"cpu"`` or a CUDA device: the GPU that is described.
    known : mapping, optional
        What :func:`tools` has found in another process; asked here when omitted.
    **facts
        What the caller knows: ``kind``, ``investigation``, ``part``, ``key``, ``parameters``, ``counts``,
        ``command``, ``duration_s``.

    Returns
    -------
    dict
        JSON values. ``gpu`` is None without one; a version that cannot be had is None.
    """
    known = tools() if known is None else known
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    record = {
        "format": FORMAT,
        **facts,
        "utc": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "commit": known["commit"],
        "dirty": known["dirty"],
        "gpu": _gpu(device) if device.startswith("cuda") else None,
        "cpu": {"model": _cpu_model(), "cores": cores},
        "software": _software() | {tool: known[tool] for tool in ("nsys", "ncu")},
    }
    return dict(scrub(record))


def _gpu(device: str) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(torch.device(device))
    answers = utilization.ask_smi(device, _OF_GPU.values(), "csv,noheader")
    return {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "compute_capability": f"{properties.major}.{properties.minor}",
        **dict.fromkeys(_OF_GPU),
        **dict(zip(_OF_GPU, answers, strict=False)),
    }


def _software() -> dict[str, Any]:
    found: dict[str, Any] = {
        "os": platform.system(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "nsightkit": nsightkit.__version__,
        **{package: installed(package) for package in ("torch", "triton", "numpy")},
        **dict.fromkeys(("cuda", "cudnn")),
    }
    with contextlib.suppress(OSError):
        found["os"] = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    with contextlib.suppress(ImportError):
        import torch

        cudnn = torch.backends.cudnn.version() if torch.version.cuda else None  # type: ignore[no-untyped-call]
        found |= {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": str(cudnn) if cudnn else None}
    return found


def _cpu_model() -> str | None:
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(errors="replace"), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine() or None


@functools.cache
def _commit(named: str) -> tuple[str | None, bool | None]:
    """Say which commit this source tree is at; a tree that travels without its .git is `named` in NSIGHTKIT_COMMIT."""
    given = re.fullmatch(r"([0-9a-f]{7,40})(-dirty)?", named)
    if given:
        return given[1], given[2] is not None
    root = Path(nsightkit.__file__).parents[1]
    # Installed packages may lie below some other project's checkout, whose commit is not ours.
    ours = (root / "pyproject.toml").is_file()
    commit = said("git", "-C", str(root), "rev-parse", "HEAD").strip() if ours else ""
    if not commit:
        return None, None
    return commit, bool(said("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no").strip())


def scrub(value: Any) -> Any:
    """Replace names of machines and users, home folders and secrets in a value, this machine's and others'.

    Parameters
    ----------
    value : JSON value

    Returns
    -------
    JSON value
        With placeholders in their place: :mod:`nsightkit.trace.share.secrets`.
    """
    scrubber = Scrubber()
    scrubber.learn(value)
    return scrubber.value(value)


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


def label(mode: str, record: Mapping[str, Any]) -> str:
    """Say in words where figures come from.

    Parameters
    ----------
    mode : {"live", "replay", "smoke"}
    record : mapping
        From :func:`collect`.

    Returns
    -------
    str
    """
    name = (record.get("gpu") or {}).get("name", "a GPU")
    day = str(record.get("utc", ""))[:10]
    return {
        "live": f"Measured live on {name}, {day}",
        "replay": f"Recorded on {name}, {day}; not measured in this build",
        "smoke": "Smoke run on this machine's CPU (no GPU): shapes only, not GPU results",
    }[mode]


def in_short(record: Mapping[str, Any]) -> str:
    """Say in a line on what, with what and when.

    Parameters
    ----------
    record : mapping

    Returns
    -------
    str
        GPU (or CPU), driver, PyTorch, commit, date; what is unknown is left out.
    """
    known = dict(rows(record))
    versions = [f"{name} {known[row]}" for row, name in _SHORT.items() if row in known]
    return ", ".join(filter(None, [known.get("GPU") or known.get("CPU"), *versions, str(record.get("utc") or "")[:10]]))


def _spread(values: Mapping[str, float] | None, unit: str) -> str | None:
    return f"{values['median']:,.0f} {unit} ({values['min']:,.0f} to {values['max']:,.0f})" if values else None


#: Rows that the short form has, and what it calls them.
_SHORT = {"Driver": "driver", "PyTorch": "PyTorch", "Commit": "commit"}


def rows(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Give a provenance record as pairs of words, for a reader.

    Parameters
    ----------
    record : mapping

    Returns
    -------
    list of (str, str)
        What is unknown is left out.
    """
    gpu, software = record.get("gpu") or {}, record.get("software") or {}
    cpu, counts = record.get("cpu") or {}, record.get("counts") or {}
    load = record.get("load") or {}
    held = load.get("slowed_by") or {}
    commit, by_nsys, by_ncu = record.get("commit"), record.get("nsys") or {}, record.get("ncu") or {}
    pairs: Iterable[tuple[str, Any]] = (
        ("GPU", gpu.get("name")),
        ("GPU memory", f"{gpu['memory_bytes'] / 2**30:.0f} GiB" if gpu.get("memory_bytes") else None),
        ("Power limit", gpu.get("power_limit")),
        ("SM clock under load", _spread(load.get("sm_clock_mhz"), "MHz")),
        ("Power under load", _spread(load.get("power_w"), "W")),
        ("Clock held down by", ", ".join(f"{why} ({share:.0%} of the time)" for why, share in held.items())),
        ("Highest SM clock", gpu.get("clock_sm_max")),
        ("Driver", gpu.get("driver")),
        ("CPU", f"{cpu['model']}, {cpu.get('cores')} cores" if cpu.get("model") else None),
        ("CUDA", software.get("cuda")),
        ("cuDNN", software.get("cudnn")),
        ("Fused attention by", record.get("sdpa_backend")),
        ("PyTorch", software.get("torch")),
        ("Triton", software.get("triton")),
        ("Nsight Systems", software.get("nsys")),
        ("Nsight Compute", software.get("ncu")),
        ("Python", software.get("python")),
        ("Operating system", software.get("os")),
        ("Sizes and switches", ", ".join(f"{k}={v}" for k, v in (record.get("parameters") or {}).items())),
        (
            "Steps",
            f"{counts['warmup']} warm-up, {counts['repetitions']} timed, {counts['active']} traced" if counts else None,
        ),
        ("Clock", record.get("clock")),
        ("Duration", f"{record['duration_s']:.1f} s" if record.get("duration_s") else None),
        ("Time (UTC)", record.get("utc")),
        ("Commit", f"{commit[:12]}{' with local changes' if record.get('dirty') else ''}" if commit else None),
        ("Command", record.get("command")),
        ("Memory snapshot of", record.get("snapshot")),
        ("Under Nsight Systems, in another run", by_nsys.get("command")),
        ("Not captured with Nsight Systems", by_nsys.get("notice")),
        ("Under Nsight Compute, in another run", by_ncu.get("command")),
        ("Not counted with Nsight Compute", by_ncu.get("notice")),
    )
    return [(name, str(value)) for name, value in pairs if value]
