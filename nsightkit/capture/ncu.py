"""Profile a program's kernels with Nsight Compute.

ncu exits with 0 when its filter matched no kernel, and else with the program's exit code: a capture is judged by its
report and by ncu's log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from nsightkit.capture.profiling import (
    Captured,
    checked_output,
    options_with_defaults,
    parse_options,
    run_profiler,
    unexpanded,
)
from nsightkit.errors import AnyPath, NsightkitError, UsageError
from nsightkit.trace.files import drafted
from nsightkit.trace.programs import NCU, tail

#: What to do about ERR_NVGPUCTRPERM.
PERMISSION = (
    "run as root; in a container give it --cap-add=SYS_ADMIN (CAP_PERFMON is enough from Linux 5.8 on); or let the "
    "host's administrator set NVreg_RestrictProfilingToAdminUsers=0 for the nvidia module and reboot. Timelines "
    "(nsightkit capture nsys, torch) need no counters"
)
#: Long names of ncu's short options.
_SHORT_NAMES = {
    "-c": "--launch-count",
    "-f": "--force-overwrite",
    "-k": "--kernel-name",
    "-o": "--export",
    "-s": "--launch-skip",
}
#: Options that ncu gets unless the user gives them.
_DEFAULTS = {"--target-processes": "all", "--clock-control": "none"}
#: Options that choose launches. --launch-skip does not: all later launches remain.
_LAUNCH_FILTERS = ("--kernel-name", "--kernel-id", "--launch-count", "--nvtx-include")
_PRIVACY_NOTE = (
    "the report holds the program's environment and command line, and this machine's host name and addresses: do "
    "not publish it as it is"
)


def profile(
    command: Sequence[str],
    output: AnyPath,
    *,
    ncu_args: Sequence[str] = (),
    timeout_s: float | None = None,
    overwrite: bool = False,
    env: dict[str, str] | None = None,
) -> Captured:
    """Run a program under ``ncu``. Never under nsys or torch.profiler at the same time.

    The program writes to stderr. Unless `ncu_args` has an option of the same name, ncu gets ``--target-processes=all``
    and ``--clock-control=none``, so that kernels run at the clock they have in production.

    Parameters
    ----------
    command : sequence of str
        The program and its arguments; no shell sees them.
    output : path-like
        Name of the report; ``.ncu-rep`` is added when it is missing.
    ncu_args : sequence of str
        Options of ncu, as its help spells them: ``-k regex:gemm``, ``-c 3``, ``--nvtx --nvtx-include "step/"``, …
    timeout_s : float, optional
        The program is interrupted then.
    overwrite : bool
        Replace an existing report.
    env : dict, optional
        The program's whole environment; the present one when omitted. It ends up in the report.

    Returns
    -------
    Captured

    Raises
    ------
    UsageError
        Conflicting arguments, or an existing report.
    NsightkitError
        No usable ncu, or no report: the counters may not be read, no kernel matched, there is no GPU.
    """
    if not command:
        raise UsageError("no command given; on the command line, put -- before the program")
    user_options = parse_options(ncu_args, _SHORT_NAMES)
    if user_options.get("--set") == "full" and not any(name in user_options for name in _LAUNCH_FILTERS):
        raise UsageError(
            "--set full replays every launch of the program dozens of times: hours, and gigabytes of report; choose "
            "launches (-c 3, -k regex:gemm, or --nvtx --nvtx-include), or all of them with -k regex:."
        )
    report = checked_output(output, ".ncu-rep", overwrite=overwrite)
    ncu = NCU.require()
    options = options_with_defaults(ncu_args, user_options, _DEFAULTS, NCU.ask(ncu, "--help"))
    with drafted(report) as draft:
        log_file = draft.with_name("log.txt")  # the draft has a folder of its own, which is removed with the log
        files = [f"--export={unexpanded(draft)}", f"--log-file={unexpanded(log_file)}"]
        returncode, notes = run_profiler([str(ncu), *options, *files, *command], timeout_s, env)
        log = ""
        if log_file.is_file():
            log = log_file.read_text(errors="replace")
        # A report that was written without counters is worth nothing.
        if re.search("ERR_NVGPUCTRPERM|does not have permission to access NVIDIA GPU Performance Counters", log):
            raise NsightkitError(
                f"the driver does not let this user read the GPU's counters (ERR_NVGPUCTRPERM); {PERMISSION}"
            )
        if "LibraryNotLoaded" in log:
            raise NsightkitError(
                "the GPU's counters cannot be reached from here (LibraryNotLoaded), as in sandboxed containers; "
                "profile on another runtime or machine; timelines (nsightkit capture nsys, torch) need no counters"
            )
        if not draft.is_file():
            raise NsightkitError(f"{_why_no_report(log, user_options)} (ncu's exit code: {returncode})")
    notes += re.findall(r"^==(?:WARNING|ERROR)== (.*)", log, re.MULTILINE)[:3]
    notes.append(_PRIVACY_NOTE)
    # As a person would run it: with the report's final name, not the draft's.
    ran = [str(ncu), *options, f"--export={unexpanded(report)}", *command]
    return Captured(trace=report, report=report, ran=ran, returncode=returncode, notes=notes)


# -- failures ----------------------------------------------------------------------------------------------------


def _why_no_report(log: str, user_options: Mapping[str, str]) -> str:
    """Explain a missing report by ncu's log and by the options that choose launches."""
    if "failed to connect to the CUDA driver" in log:
        return "ncu found no CUDA driver, so it did not run the program; run it where a GPU is"
    if "No kernels were profiled" not in log:
        return f"ncu wrote no report: {tail(log, 3) or 'its message is above'}"
    reasons = ["ncu profiled no kernel; check that the program runs without ncu, and uses a GPU that it sees"]
    if "--kernel-name" in user_options:
        reasons.append(
            "that a kernel's base name matches (cuBLAS on Hopper calls its kernels nvjet_…: try "
            "-k 'regex:nvjet|gemm|cutlass|xmma|triton')"
        )
    if "--nvtx-include" in user_options:
        reasons.append(
            "that the ranges contain launches; push/pop ranges (torch.cuda.nvtx, phase) need a slash, and ranges of a "
            "domain its name: --nvtx --nvtx-include 'DOMAIN@step/'"
        )
    return "; ".join(reasons)
