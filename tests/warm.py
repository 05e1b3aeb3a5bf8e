"""Python programs run in processes of their own, as a person runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["run"]


def run(
    command: list[str], *, cwd: Path, env: Mapping[str, str], timeout_s: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m COMMAND`` in a folder: a module with its arguments. Code comes from where this process has it."""
    environment = {**env, "MPLBACKEND": "Agg", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
