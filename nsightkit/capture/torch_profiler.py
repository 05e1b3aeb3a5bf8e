"""Profile a program with ``torch.profiler``: the right switches, warmed up, exported compressed."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from nsightkit.capture import _under_profiler
from nsightkit.capture._under_profiler import profiler
from nsightkit.capture.profiling import Captured, checked_output, run_profiler
from nsightkit.errors import AnyPath, NsightkitError, UsageError
from nsightkit.trace.files import drafted

_SUFFIX = ".json.gz"
#: What names of operators and kernels contain, by the back end of PyTorch's fused attention; a replayed graph shows
#: only the kernels, and none for `math`. Names of cuDNN's kernels contain "flash" as well. Kernels of the flash-attn
#: package, which begin with "flash_fwd_" or "flash_bwd_" behind a namespace, count as flash.
_BACK_ENDS = {
    "cudnn": rb"_scaled_dot_product_cudnn_attention|cudnn\w*(?:sdpa|flash|fmha)",
    "flash": rb"_scaled_dot_product_flash_attention|pytorch_flash::|[\":< ]flash_(?:fwd|bwd)_",
    "efficient": rb"_scaled_dot_product_efficient_attention|fmha_cutlass",
    "math": rb"_scaled_dot_product_attention_math",
}


def profile_steps(
    step: Callable[[], object],
    output: AnyPath,
    *,
    warmup: int = 2,
    active: int = 5,
    shapes: bool = False,
) -> Path:
    """Profile some steady steps of a program.

    Parameters
    ----------
    step : callable
        Runs one step.
    output : path-like
        JSON, not compressed; written atomically.
    warmup, active : int
        Steps in which the profiler runs but keeps nothing (its start takes seconds), and steps kept. One step without
        the profiler comes first.
    shapes : bool
        Record the shapes of operators' inputs. It costs time on the CPU.

    Returns
    -------
    Path
        `output`.
    """
    from torch.profiler import schedule

    steps = schedule(wait=1, warmup=warmup, active=active, repeat=1)
    with drafted(Path(output)) as draft:
        with profiler(schedule=steps, record_shapes=shapes) as running:
            for _ in range(1 + warmup + active):
                step()
                running.step()
        running.export_chrome_trace(str(draft))
    return Path(output)


def attention_back_ends(trace: AnyPath) -> list[str]:
    """Find which back ends PyTorch's fused attention chose; the choice depends on card, version and sizes.

    Parameters
    ----------
    trace : path-like
        Of :func:`profile_steps`.

    Returns
    -------
    list of str
        Of ``cudnn``, ``flash``, ``efficient`` and ``math``; empty if the profile shows no fused attention.
    """
    text = Path(trace).read_bytes()
    return [name for name, pattern in _BACK_ENDS.items() if re.search(pattern, text)]


def profile_command(
    command: Sequence[str],
    output: AnyPath,
    *,
    record_shapes: bool = False,
    with_stack: bool = False,
    timeout_s: float | None = None,
    overwrite: bool = False,
) -> Captured:
    """Profile a whole Python program, unchanged, in a child process.

    Never under nsys or ncu at the same time: one process can have one CUPTI client.

    Parameters
    ----------
    command : sequence of str
        ``python script.py arguments``, ``python -m module arguments``, or the same without ``python``.
    output : path-like
        Where the trace goes; ``.json.gz`` is added when it is missing.
    record_shapes : bool
        Also record the shapes of the operators' inputs.
    with_stack : bool
        Also record Python functions and modules, for `where`.
    timeout_s : float, optional
        The program is interrupted then.
    overwrite : bool
        Replace an existing trace.

    Returns
    -------
    Captured

    Raises
    ------
    UsageError
        The command is not a Python program, or `output` exists.
    NsightkitError
        The program left no trace.
    """
    python_command = _complete_command(command)
    interpreter, *arguments = python_command
    destination = checked_output(output, _SUFFIX, overwrite=overwrite)
    with drafted(destination) as draft:
        options = {"record_shapes": record_shapes, "with_stack": with_stack}
        job = json.dumps({"output": str(draft), "options": options, "arguments": arguments})
        # As a file: the program's interpreter needs torch, not nsightkit, nor what that depends on.
        returncode, notes = run_profiler([interpreter, _under_profiler.__file__, job], timeout_s)
        if not draft.is_file():
            raise NsightkitError(
                f"the program left no trace (exit code {returncode}); its message is above: it must be a Python "
                "program whose interpreter has torch, and finish within --timeout-s"
            )
    return Captured(trace=destination, report=destination, ran=python_command, returncode=returncode, notes=notes)


def _complete_command(command: Sequence[str]) -> list[str]:
    """Complete a command: an interpreter, then a script, or -m and a module."""
    words = list(command)
    if not words or not Path(words[0]).name.startswith("python"):
        words.insert(0, sys.executable)
    program = "".join(words[1:2])  # words[1], or "" where there is only an interpreter
    if program == "-m" or program.endswith(".py"):
        return words
    raise UsageError(
        "torch.profiler can only watch a Python program: give 'python script.py ...' or 'python -m module ...', or use "
        "nsys for other programs"
    )
