"""Hostile Nsight Compute reports: an error that names the file, and soon."""

from __future__ import annotations

import contextlib
import importlib
import random
import re
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from child import command

import nsightkit
from nsightkit import cli
from nsightkit.analysis.roofline import counters
from nsightkit.errors import NsightkitError, TraceError
from nsightkit.trace import ncu

ROOT = Path(nsightkit.__file__).parents[1]


def cpu_s(function: Callable[[], Any]) -> float:
    begin = time.process_time()
    function()
    return time.process_time() - begin


REPORT = "nsight-training/manual_nvtx.ncu-rep"
#: One bit of this report, with which NVIDIA's reader aborts: it makes the size of a message negative.
FLIPPED = (75_760, 3)


def flipped(shared_traces: Path, path: Path) -> Path:
    data = bytearray((shared_traces / REPORT).read_bytes())
    data[FLIPPED[0]] ^= 1 << FLIPPED[1]
    path.write_bytes(data)
    return path


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Take the place of NVIDIA's package, and give a report for it to read."""

    def make(body: str) -> Path:
        folder = tmp_path / "packages"
        folder.mkdir(exist_ok=True)
        (folder / "ncu_report.py").write_text(f"import os, sys, time\ndef load_report(path):\n    {body}\n")
        monkeypatch.delitem(sys.modules, "ncu_report", raising=False)
        monkeypatch.syspath_prepend(folder)
        importlib.invalidate_caches()
        report = tmp_path / "x.ncu-rep"
        report.write_bytes(b"NVR\0\0\0\0\0")
        return report

    return make


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("os.abort()", r"makes NVIDIA's reader crash \(SIGABRT\)"),
        ("os.kill(os.getpid(), 11)", r"makes NVIDIA's reader crash \(SIGSEGV\)"),
        ("os._exit(7)", r"crash \(exit code 7\)"),
        ("raise RuntimeError('no\\nreport')", r"is not a report that ncu-report can read \(RuntimeError: no report\)"),
        ("sys.stdout.write('[')", "is not a report that ncu-report can read"),
        ("time.sleep(60)", "was not read by NVIDIA's package within 2 s"),
        ("return []", "holds no profiled kernel, or is damaged"),
        ("x = []\n    while True: x.append(bytearray(1 << 26))", r"crash \(|can read \(MemoryError"),
        ("print('x' * 200_000_000)", "crash|can read"),
        ("raise ImportError('no library')", r"can read \(ImportError: no library\)"),
    ],
)
def test_whatever_nvidias_package_does_is_one_line(
    stand_in: Callable[[str], Path],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    body: str,
    words: str,
) -> None:
    report = stand_in(body)
    if "sleep" in body:
        monkeypatch.setattr(ncu, "SECONDS", 1)
    assert cli.run(["ncu", str(report)]) == 2
    out, said = capfd.readouterr()
    assert re.fullmatch(rf"nsightkit: {re.escape(str(report))}: .*({words}).*\n", said), said
    assert out == ""


def test_a_report_that_makes_nvidias_reader_abort_is_one_line(shared_traces: Path, tmp_path: Path) -> None:
    pytest.importorskip("ncu_report")
    path = flipped(shared_traces, tmp_path / "flipped.ncu-rep")
    ended = command("ncu", path)
    assert ended.code == 2, ended.error
    assert re.fullmatch(rf"nsightkit: {re.escape(str(path))}: .*crash \(SIGABRT\).*; .*\n", ended.error), ended.error


@pytest.mark.parametrize(
    "content",
    [
        b"NVR\0\0\0\0\0" + bytes(1_000_000),  # blocks of no length
        b"NVR\0\0\0\0\0" + struct.pack("<I", 1_000_000) + b"\x80" * 1_000_000,  # one number
        b"NVR\0\0\0\0\0" + struct.pack("<I", 1_000_000) + b"\x28\x01" * 500_000,  # many
        b"NVR\0\xff\xff\xff\xff",
    ],
)
def test_frames_of_a_hostile_report_take_no_time(stand_in: Callable[[str], Path], content: bytes) -> None:
    report = stand_in("return []")
    report.write_bytes(content)
    with pytest.raises(TraceError, match=re.escape(str(report))):
        assert cpu_s(lambda: ncu.read(report)) < 5


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Change a few places of a file, as damage or an attacker would."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 5])):
        begin = rng.randrange(len(data))
        end = begin + rng.choice([1, 2, 4, 16])
        match rng.randrange(3):
            case 0:
                data[begin:end] = rng.randbytes(end - begin)
            case 1:
                del data[begin:end]
            case 2:
                data[begin:begin] = data[begin:end]
    return bytes(data)


def test_mutated_reports_are_read_or_refused(shared_traces: Path, tmp_path: Path) -> None:
    """Most of a report is text: where its blocks begin and end, and what is around them, says more than the rest."""
    pytest.importorskip("ncu_report")
    whole = (shared_traces / REPORT).read_bytes()
    rng, path = random.Random(5), tmp_path / "x.ncu-rep"
    for i in range(20):
        data = whole[: rng.randrange(8, 400)] if i % 2 else whole[:4] + mutated(whole[4:400], rng) + whole[400:]
        path.write_bytes(data)
        with contextlib.suppress(NsightkitError):
            counters.summary(ncu.read(path))
