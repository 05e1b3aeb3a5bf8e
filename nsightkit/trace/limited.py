"""Run one of our scripts in a process with limits: what reads a hostile file may crash, hang or take all memory.

The same file is the parent's half, :func:`run_limited`, and, run as a program, the child's: it sets the limits and runs
the script. Nothing else of nsightkit is imported there, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

__all__ = ["run_limited"]


def run_limited(
    script: str,
    arguments: Sequence[str],
    *,
    memory_bytes: int,
    seconds: int,
    output_bytes: int,
) -> bytes:
    """Run a script in a separate process.

    Parameters
    ----------
    script : str
        Its file.
    arguments : sequence of str
    memory_bytes, seconds, output_bytes : int
        Limits of address space, CPU time (and twice that in wall time) and output. Where
        the system has no such limits, as on Windows, only the clock counts.

    Returns
    -------
    bytes
        What it printed.

    Raises
    ------
    ChildProcessError
        It crashed, was ended at a limit, or took too long.
    """
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
            raise ChildProcessError(_name_of_end(error.returncode)) from error
        output.seek(0)
        return output.read(output_bytes)


def _name_of_end(code: int) -> str:
    """Name the signal that ended a process, or its exit code."""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"exit code {code}"


def _limit(memory_bytes: int, seconds: int, output_bytes: int) -> None:
    """Have the system end this process when it takes too much; leave no core file when it ends."""
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
            _, most = resource.getrlimit(kind)
            resource.setrlimit(kind, (limit, most))


if __name__ == "__main__":
    _, memory, processor, printed, program, *rest = sys.argv
    _limit(int(memory), int(processor), int(printed))
    sys.argv = [program, *rest]
    runpy.run_path(program, run_name="__main__")
