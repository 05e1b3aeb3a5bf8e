"""Fixtures every test may use: the folder of real traces, a real ``nsys``, a browser."""

from __future__ import annotations

import gc
import os
import re
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest

# What the tests compute is small: threads would wait for each other longer than they work, here and in every child.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# As the command does: looking through the objects of imported libraries again and again takes a seventh of the time.
gc.set_threshold(200_000, 20, 20)
# Names of columns are few and short, and Arrow's strings are slow for them: a seventh of the time of many small tables.
# Pages, and commands in processes of their own, run with what pandas takes by itself.
pd.options.mode.string_storage = "python"
# Text is as wide as it is in a pipe, whatever the terminal that the tests were started from.
os.environ.pop("COLUMNS", None)

REPOSITORY = Path(__file__).resolve().parent.parent
#: The first nsys whose `stats` knows the report names used here; 2022.4 hangs on newer reports.
MINIMUM_NSYS = (2023, 4)
#: Nothing of the browser's own goes over the network or needs a screen.
_QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-quic",
)


def pytest_collection_finish():
    """What was imported stays: each look for garbage, such as before a measurement, passes it over."""
    gc.freeze()


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


@pytest.fixture(scope="session")
def real_ncu() -> Path:
    """A real ``ncu``: ``NSIGHTKIT_NCU`` or the first on the ``PATH``; to read and list it needs no GPU."""
    found = os.environ.get("NSIGHTKIT_NCU") or shutil.which("ncu")
    if not found:
        pytest.skip("no ncu on the PATH (NSIGHTKIT_NCU names another)")
    try:
        subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"{found} --version does not answer: {type(error).__name__}")
    return Path(found)


@pytest.fixture(scope="session")
def browser():
    """Debian's Chromium, driven by Playwright."""
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no chromium on the PATH (Debian: apt install chromium)")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=list(_QUIET))
        yield browser
        browser.close()
