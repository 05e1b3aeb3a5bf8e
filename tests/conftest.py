"""Fixtures every test may use: the folder of real traces and a real ``nsys``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
#: The first nsys whose `stats` knows the report names used here; 2022.4 hangs on newer reports.
MINIMUM_NSYS = (2023, 4)


@pytest.fixture(scope="session")
def shared_traces() -> Path:
    """Folder of real traces: ``NSIGHTKIT_SHARED`` or ``../shared``, each with a ``traces`` folder in it."""
    given = os.environ.get("NSIGHTKIT_SHARED")
    root = Path(given) if given else REPOSITORY.parent / "shared"
    traces = root if root.name == "traces" else root / "traces"
    if not traces.is_dir():
        pytest.skip(f"no folder of real traces ({traces} is absent; NSIGHTKIT_SHARED names another)")
    return traces


@pytest.fixture(scope="session")
def nsys() -> Path:
    """A real ``nsys`` of 2023.4 or later: ``NSIGHTKIT_NSYS`` or the first on the ``PATH``."""
    found = os.environ.get("NSIGHTKIT_NSYS") or shutil.which("nsys")
    if not found:
        pytest.skip("no nsys on the PATH (NSIGHTKIT_NSYS names another)")
    try:
        answer = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"{found} --version does not answer: {type(error).__name__}")
    version = re.search(r"(\d{4})\.(\d+)\.(\d+)", answer)
    if version is None or (int(version[1]), int(version[2])) < MINIMUM_NSYS:
        pytest.skip(f"{found} is {version[0] if version else 'of unknown version'}, older than 2023.4")
    return Path(found)
