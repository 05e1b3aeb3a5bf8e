"""Run one of our scripts in a process with limits: what reads a hostile file may crash, hang or take all memory.

The same file is the parent's half, :func:`ask_limited`, and, run as a program, the child's: it sets the limits, calls
the function ``read_for_parent`` of the script, and prints what this returns as JSON. Nothing else of nsightkit is
imported there, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any


def ask_limited(
    script: str,
    arguments: Sequence[str],
    *,
    memory_bytes: int,
    seconds: int,
    output_bytes: int,
) -> dict[str, Any]:
    """Call the function ``read_for_parent`` of a script in a separate process, and return what it returned.

    Parameters
    ----------
    script : str
        Path of the script.
    arguments : sequence of str
        Arguments of its function.
    memory_bytes, seconds, output_bytes : int
        Limits of address space, CPU time (and twice that in wall time) and output. Where
        the system has no such limits, as on Windows, only the clock counts.

    Returns
    -------
    dict
        What the function returned. If it raised an exception, only ``problem``: the exception as text.

    Raises
    ------
    ChildProcessError
        The process crashed, was ended at a limit, or took too long.
    """
    import msgspec  # not at the top: the child, which cannot import it, runs this file, too

    limits = [str(memory_bytes), str(seconds), str(output_bytes)]
    # Isolated: neither this folder nor the environment can replace what it imports.
    command = [sys.executable, "-I", "-S", __file__, *limits, script, *arguments]
    with tempfile.TemporaryFile() as output:
        try:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.DEVNULL,
                timeout=2 * seconds,
                check=True,
            )
        except subprocess.TimeoutExpired as error:
            raise ChildProcessError(f"not done within {error.timeout:.0f} s") from error
        except subprocess.CalledProcessError as error:
            raise ChildProcessError(_reason_of_end(error.returncode)) from error
        output.seek(0)
        answer: dict[str, Any] = msgspec.json.decode(output.read(output_bytes))
        return answer


def _reason_of_end(code: int) -> str:
    """Name the signal that ended a process, or else its exit code."""
    try:
        return signal.Signals(-code).name  # of a process that a signal ended, the code is the signal's number, negated
    except ValueError:
        return f"exit code {code}"


def _limit_this_process(memory_bytes: int, seconds: int, output_bytes: int) -> None:
    """Have the system end this process when it takes too much memory, time or output, without a core file."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    limits = {
        "RLIMIT_AS": memory_bytes,
        "RLIMIT_CPU": seconds,
        "RLIMIT_FSIZE": output_bytes,
        "RLIMIT_CORE": 0,
    }
    for name, limit in limits.items():
        with contextlib.suppress(AttributeError, OSError, ValueError):  # the system has no such limit, or a lower one
            kind = getattr(resource, name)
            _, hard_limit = resource.getrlimit(kind)
            resource.setrlimit(kind, (limit, hard_limit))


if __name__ == "__main__":
    _, memory, cpu_time, printed, child_script, *child_arguments = sys.argv
    _limit_this_process(int(memory), int(cpu_time), int(printed))
    gc.disable()
    try:
        result = runpy.run_path(child_script)["read_for_parent"](*child_arguments)
    except Exception as error:  # any error of a damaged file
        result = {"problem": " ".join(f"{type(error).__name__}: {error}".split())[:160]}
    # "replace": texts of a damaged file may hold surrogates, which cannot be encoded.
    sys.stdout.buffer.write(json.dumps(result, ensure_ascii=False).encode("utf-8", "replace"))
    sys.stdout.flush()
    os._exit(0)  # at once: an ordinary exit would first take millions of objects apart
