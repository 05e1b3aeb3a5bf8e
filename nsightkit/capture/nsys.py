"""Profile a program with Nsight Systems, and check the report.

nsys exits with 0 when it captured nothing, when its range never opened and when its importer failed. A capture is
therefore judged by the report alone.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

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
from nsightkit.trace.programs import NSYS, environment, to_sqlite

#: Long names of nsys's short options.
_SHORT_NAMES = {
    "-c": "--capture-range",
    "-e": "--env-var",
    "-f": "--force-overwrite",
    "-o": "--output",
    "-p": "--nvtx-capture",
    "-s": "--sample",
    "-t": "--trace",
}
#: Options that nsys gets unless the user gives them. CPU sampling needs rights that containers rarely give, and time.
_DEFAULTS = {"--trace": "cuda,nvtx,osrt", "--sample": "none", "--cpuctxsw": "none"}
_NVTX_REMEDY = "the nvtx package from 0.2.12 on emits nothing under nsys 2023.4 and older: install nvtx==0.2.11"
_PRIVACY_NOTE = "the report holds this machine's environment variables and host name: do not publish it as it is"


def profile(
    command: Sequence[str],
    output: AnyPath,
    *,
    nsys_args: Sequence[str] = (),
    timeout_s: float | None = None,
    overwrite: bool = False,
    env: dict[str, str] | None = None,
) -> Captured:
    """Run a program under ``nsys profile``.

    The program and nsys write to stderr. Unless `nsys_args` has an option of the same name, nsys gets
    ``--trace=cuda,nvtx,osrt --sample=none --cpuctxsw=none``, and with ``--capture-range`` also
    ``--capture-range-end=stop``, and with ``--capture-range=nvtx`` the variable that lets any NVTX range open it, not
    only one whose name is a registered string.

    Parameters
    ----------
    command : sequence of str
        The program and its arguments; no shell sees them.
    output : path-like
        Name of the report; ``.nsys-rep`` is added when it is missing. The export gets the same name with
        ``.sqlite``.
    nsys_args : sequence of str
        Options of ``nsys profile``, as its help spells them.
    timeout_s : float, optional
        The program is interrupted then, and the trace keeps what it had.
    overwrite : bool
        Replace existing files.
    env : dict, optional
        The program's whole environment; the present one when omitted.

    Returns
    -------
    Captured

    Raises
    ------
    UsageError
        No command, a reserved option, or an existing report.
    NsightkitError
        No usable nsys, or the run left no report.
    """
    if not command:
        raise UsageError("no command given; on the command line, put -- before the program")
    user_options = parse_options(nsys_args, _SHORT_NAMES)
    if user_options.get("--capture-range-end", "").startswith("repeat"):
        raise UsageError("--capture-range-end=repeat writes several reports; use stop, and capture once for each")
    report = checked_output(output, ".nsys-rep", overwrite=overwrite)
    export = checked_output(report.with_suffix(".sqlite"), ".sqlite", overwrite=overwrite)
    nsys = NSYS.require()
    options = options_with_defaults(
        nsys_args, user_options, _nsys_defaults(user_options), NSYS.ask(nsys, "profile", "--help")
    )
    with drafted(report) as draft:
        draft_command = [str(nsys), "profile", *options, f"--output={unexpanded(draft.with_suffix(''))}", *command]
        returncode, notes = run_profiler(draft_command, timeout_s, environment(env))
        raw_capture = draft.with_suffix(".qdstrm")
        if raw_capture.exists() and not draft.exists():
            kept_capture = raw_capture.replace(report.with_suffix(".qdstrm"))  # the run may have been costly
            problem = f"nsys could not import its raw capture, kept as {kept_capture}"
            raise NsightkitError(f"{problem}; 'nsightkit doctor' says why")
        if not draft.exists():
            raise NsightkitError(f"nsys wrote no report (exit code {returncode}); {_no_report_remedy(user_options)}")
    notes.append(_PRIVACY_NOTE)
    # As a person would run it: with the report's final name, not the draft's.
    ran = [str(nsys), "profile", *options, f"--output={unexpanded(report.with_suffix(''))}", *command]
    return Captured(trace=to_sqlite(report, export), report=report, ran=ran, returncode=returncode, notes=notes)


def _nsys_defaults(user_options: Mapping[str, str]) -> dict[str, str]:
    """List the options that nsys gets unless the user gives them; some depend on the user's options."""
    defaults = dict(_DEFAULTS)
    if "--capture-range" in user_options:
        # nsys's own default, stop-shutdown, ends the program with SIGTERM when the range closes.
        defaults["--capture-range-end"] = "stop"
    if user_options.get("--capture-range") == "nvtx":
        # By default only registered strings open the range, and torch.cuda.nvtx pushes plain ones.
        defaults["--env-var"] = "NSYS_NVTX_PROFILER_REGISTER_ONLY=0"
    return defaults


# -- failures ----------------------------------------------------------------------------------------------------


def _no_report_remedy(user_options: Mapping[str, str]) -> str:
    """Say what to do when nsys wrote no report, by how its range was to open."""
    if user_options.get("--capture-range") == "cudaProfilerApi":
        return "the program must call torch.cuda.profiler.start(), or cudaProfilerStart, after it has used the GPU"
    if user_options.get("--capture-range") == "nvtx":
        name = user_options.get("--nvtx-capture", "NAME")
        name_without_domain = name.partition("@")[0]
        return (
            f"without a message of nsys above, no range {name!r} was opened: check its spelling, and add its domain if "
            f"it has one ({name_without_domain}@DOMAIN, or {name_without_domain}@* for any); {_NVTX_REMEDY}"
        )
    return "without a message of nsys above, run the program alone, and check the free space for temporary files"


def importer(nsys: Path) -> Path | None:
    """Find the program that turns nsys's raw captures into reports.

    Without it nsys leaves a ``.qdstrm``, and ``nsightkit doctor`` reports that.

    Parameters
    ----------
    nsys : Path

    Returns
    -------
    Path or None
    """
    nsys_binary = nsys.resolve()
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if nsys_binary.stat().st_size < 10_000:  # a wrapper script, which names the program
            path_in_script = re.search(r"""(/[^"'\n]*/nsys)\b""", nsys_binary.read_text())
            if path_in_script:
                nsys_binary = Path(path_in_script[1]).resolve()
    # The importer is in a folder host-… or host/…, beside nsys or up to two levels above it.
    for folder in list(nsys_binary.parents)[:3]:
        programs = sorted(folder.glob("host*/**/QdstrmImporter"))
        if programs:
            return programs[0]
    return None
