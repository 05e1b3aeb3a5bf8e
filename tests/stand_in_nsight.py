"""Programs that stand in for nsys and ncu: they answer questions about themselves, and act out a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["ncu", "nsys"]

_NSYS_OPTIONS = ("trace", "output", "capture-range", "capture-range-end", "nvtx-capture", "env-var", "force-overwrite")
_NCU = """#!/usr/bin/env python3
import json, os, pathlib, sys
answers = {answers!r}
if sys.argv[1] in answers:
    print(answers[sys.argv[1]])
    sys.exit()
pathlib.Path({called!r}).write_text(json.dumps([sys.argv[1:], dict(os.environ)]))
given = dict(word.split("=", 1) for word in sys.argv[1:] if word.startswith("--") and "=" in word)
print("the program's own")
pathlib.Path(given["--log-file"].replace("%%", "%")).write_text({log!r})
if {report!r}:
    pathlib.Path(given["--export"].replace("%%", "%")).write_bytes({report!r})
sys.exit({code})
"""


def nsys(folder: Path, script: str) -> Path:
    """Make an nsys 2023.4 that does what the script says instead of profiling."""
    (folder / "help").write_text("\n".join(f"\t--{option}=\n" for option in _NSYS_OPTIONS))
    cases = f'case "$1 $2" in --version*) echo version 2023.4.4.54; exit;; *--help) cat "{folder}/help"; exit;; esac'
    return _program(folder / "nsys", f"#!/bin/sh\n{cases}\n{script}\n")


def ncu(folder: Path, said: Mapping[str, str], log: str, report: bytes, code: int) -> Path:
    """Make an ncu 2025.3 that gives the answers in `said`, and leaves a log and, unless it is empty, a report.

    How it was called, and in which environment, is in ``called.json`` beside it.
    """
    text = _NCU.format(
        answers={"--version": "Version 2025.3.1.0 (build 1)", **said},
        called=str(folder / "called.json"),
        log=log,
        report=report,
        code=code,
    )
    return _program(folder / "ncu", text)


def _program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path
