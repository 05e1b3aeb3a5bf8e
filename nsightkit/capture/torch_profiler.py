"""Watch a program with ``torch.profiler``: the right switches, warmed up, exported compressed."""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from nsightkit.capture import _under_profiler
from nsightkit.capture._under_profiler import export, profiler
from nsightkit.capture.profiling import Captured, ended, target, watch
from nsightkit.errors import NsightkitError, UsageError

__all__ = ["attention_back_ends", "profile_command", "profile_steps", "profiler"]

_SUFFIX = ".json.gz"
_WHY = "what it wrote above says why (it must be a Python program whose interpreter has torch)"
#: Names of the operator that each back end of PyTorch's fused attention is, and of its kernels: a graph that is
#: replayed shows only these. cuDNN's hold "flash" as well.
_BACK_ENDS = {
    "cudnn": rb"_scaled_dot_product_cudnn_attention|cudnn\w*(?:sdpa|flash|fmha)",
    "flash": rb"_scaled_dot_product_flash_attention|pytorch_flash::|[\":< ]flash_(?:fwd|bwd)_",
    "efficient": rb"_scaled_dot_product_efficient_attention|fmha_cutlass",
    "math": rb"_scaled_dot_product_attention_math",
}


def profile_steps(
    step: Callable[[], object],
    output: str | os.PathLike[str],
    *,
    wait: int = 1,
    warmup: int = 2,
    active: int = 5,
    shapes: bool = False,
    gpu: bool = True,
) -> Path:
    """Profile some steady steps of a program.

    Parameters
    ----------
    step : callable
        Runs one step.
    output : path-like
        Written compressed when it ends in ``.gz``; appears whole or not at all.
    wait, warmup, active : int
        Steps left alone, steps in which the profiler runs but keeps nothing (its own start takes
        seconds), and steps kept.
    shapes : bool
        Record what operators are given. It costs time on the CPU.
    gpu : bool
        Watch the GPU, where there is one. After an error that ended its work for this process it cannot be.

    Returns
    -------
    Path
        `output`.
    """
    from torch.profiler import schedule

    output = Path(output)
    with tempfile.TemporaryDirectory(prefix=".nsightkit-", dir=output.absolute().parent) as folder:
        whole = Path(folder) / f"trace{''.join(output.suffixes[-2:])}"
        with profiler(
            schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=1),
            on_trace_ready=lambda done: export(done, str(whole)),
            record_shapes=shapes,
            gpu=gpu,
        ) as running:
            for _ in range(wait + warmup + active):
                step()
                running.step()
        whole.replace(output)
    return output


def attention_back_ends(trace: str | os.PathLike[str]) -> list[str]:
    """Read from a profile which back ends PyTorch's fused attention chose: it depends on card, version and sizes.

    Parameters
    ----------
    trace : path-like
        Of :func:`profile_steps`, compressed.

    Returns
    -------
    list of str
        Of ``cudnn``, ``flash``, ``efficient`` and ``math``; empty if the profile shows no fused attention.
    """
    with gzip.open(trace) as file:
        text = file.read()
    return [name for name, pattern in _BACK_ENDS.items() if re.search(pattern, text)]


def profile_command(
    command: Sequence[str],
    output: str | os.PathLike[str],
    *,
    record_shapes: bool = False,
    with_stack: bool = False,
    timeout_s: float = 1800.0,
    overwrite: bool = False,
) -> Captured:
    """Profile a whole Python program, unchanged, in a process of its own.

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
        Also record Python functions and modules, for :func:`nsightkit.analysis.timeline.where.summary`.
    timeout_s : float
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
    interpreter, arguments = _python(command)
    destination = target(output, _SUFFIX, overwrite=overwrite)
    with tempfile.TemporaryDirectory(prefix=".nsightkit-", dir=destination.parent) as folder:
        whole = Path(folder) / f"trace{_SUFFIX}"
        options = {"record_shapes": record_shapes, "with_stack": with_stack}
        job = json.dumps({"output": str(whole), "options": options, "arguments": arguments})
        # As a file: the program's interpreter needs torch, not nsightkit, nor what that depends on.
        ran = [interpreter, _under_profiler.__file__, job]
        advice = "run fewer steps, or allow more time"
        notes, done = watch(
            ran, timeout_s, tool="the program", result="trace", advice=advice, env=None, show=True, interrupt_s=60.0
        )
        if not whole.is_file():
            raise NsightkitError(
                f"the program ended with exit code {done.returncode} and left no trace; "
                f"{f'it was not done within {timeout_s:g} s: {advice}' if notes else _WHY}"
            )
        whole.replace(destination)
    shown = [interpreter, *arguments]
    return Captured(destination, destination, [destination], shown, done.returncode, notes + ended(done.returncode))


def _python(command: Sequence[str]) -> tuple[str, list[str]]:
    """Split a command into the interpreter and what it shall run (a script, or -m and a module)."""
    if not command:
        raise UsageError("no command given; say which Python program to profile, such as: python train.py")
    named = Path(command[0]).name.startswith("python")
    interpreter, rest = command[0] if named else sys.executable, list(command[named:])
    if rest and ((rest[0] == "-m" and len(rest) > 1) or rest[0].endswith(".py")):
        return interpreter, rest
    raise UsageError(
        f"{command[0]}: torch.profiler can only watch a Python program; "
        "give 'python script.py ...' or 'python -m module ...', or use nsys for other programs"
    )
