"""Capturing with ncu: what is asked of it, and what its silence means. A stand-in plays the runs that need a GPU."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import stand_in_nsight

from nsightkit.capture import ncu as capture
from nsightkit.errors import NsightkitError, UsageError
from nsightkit.trace.programs import NCU

HELP = "  --target-processes arg (=all)  ...\n  --clock-control arg (=base)  ...\n  -o [ --export ] arg  ...\n"
DONE = """==PROF== Connected to process 1 (/usr/bin/python3)
==PROF== Profiling "k" - 0 (1/2): 0%....50%....100% - 8 passes
==PROF== Profiling "k" - 1 (2/2): 0%....50%....100% - 9 passes
==WARNING== Something is odd.
"""
NONE = "==WARNING== No kernels were profiled.\n"

StandIn = Callable[..., Path]


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Make an ncu that records how it was called, and plays a run with a given log."""

    def make(log=DONE, report=b"NVR\0report", code=0):
        folder = tmp_path / "tool"
        folder.mkdir(exist_ok=True)
        program = stand_in_nsight.ncu(folder, {"--help": HELP}, log, report, code)
        monkeypatch.setenv("NSIGHTKIT_NCU", str(program))
        NCU.ask.cache_clear()
        return folder / "called.json"

    return make


def test_a_run_leaves_a_report_and_notes(stand_in, tmp_path):
    called = stand_in()
    output = tmp_path / "-o $(x) 'q' %h"
    options = ["-k", "regex:gemm", "--set", "full", "--nvtx", "--nvtx-include", "step/", "--clock-control=base"]
    program = ["python3", "a b.py", "--kernel-name=mine"]
    done = capture.profile(program, output, ncu_args=options)
    assert done.trace == done.report == output.with_name(output.name + ".ncu-rep")
    assert done.report.read_bytes().startswith(b"NVR\0")
    arguments = json.loads(called.read_text())[0]
    assert arguments[:9] == ["--target-processes=all", *options]
    assert arguments[-3:] == program
    assert done.ran[1:-4] == arguments[:9]
    assert done.notes[0] == "Something is odd."
    assert "environment" in done.notes[1]
    assert not list(tmp_path.glob(".nsightkit-*"))
    stand_in(code=3)
    done = capture.profile(program, output, overwrite=True)
    assert "--clock-control=none" in done.ran
    assert "exit code 3" in done.notes[0]
    stand_in("==ERROR== ERR_NVGPUCTRPERM\n")  # a report without counters
    with pytest.raises(NsightkitError, match="does not let this user read"):
        capture.profile(program, tmp_path / "r")
    assert not (tmp_path / "r.ncu-rep").exists()


@pytest.mark.parametrize(
    ("log", "options", "reasons"),
    [
        (NONE, [], ["profiled no kernel", "without ncu"]),
        (NONE, ["-k", "gemm"], ["base name matches", "nvjet"]),
        (NONE, ["--nvtx-include=step"], ["--nvtx --nvtx-include 'DOMAIN@step/'"]),
        ("==ERROR== ERR_NVGPUCTRPERM\n", [], ["SYS_ADMIN", "NVreg_RestrictProfilingToAdminUsers=0", "host"]),
        ("==ERROR== LibraryNotLoaded\n", [], ["LibraryNotLoaded", "another runtime"]),
        ("==ERROR== Nsight Compute failed to connect to the CUDA driver\n", [], ["no CUDA driver"]),
        ("==ERROR== something else\n", [], ["no report", "something else", "exit code: 0"]),
        ("", [], ["no report", "above"]),
    ],
)
def test_a_run_without_a_report_is_explained(stand_in, tmp_path, log, options, reasons):
    stand_in(log, report=b"")  # exit code 0 all the same
    with pytest.raises(NsightkitError) as caught:
        capture.profile(["program"], tmp_path / "r", ncu_args=options)
    for reason in reasons:
        assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["tool"]


def test_the_set_full_needs_a_filter(stand_in, tmp_path):
    called = stand_in()
    for options in (["--set=full"], ["--set", "full", "-s", "100"]):  # the rest of the program is still all of it
        with pytest.raises(UsageError, match="hours"):
            capture.profile(["program"], tmp_path / "r", ncu_args=options)
    assert not called.exists()
    assert capture.profile(["program"], tmp_path / "r", ncu_args=["--set=full", "-c2"]).report.exists()


def test_a_real_ncu_is_understood(real_ncu, tmp_path, monkeypatch):
    monkeypatch.setenv("NSIGHTKIT_NCU", str(real_ncu))
    NCU.ask.cache_clear()
    # With every default and filter: no word of ncu's about an option, and our own explanation.
    options = ["-k", "regex:gemm", "-s", "1", "-c2", "--nvtx", "--nvtx-include", "step/", "--section=SpeedOfLight"]
    with pytest.raises(NsightkitError, match=r"profiled no kernel|no CUDA driver"):
        capture.profile(["true"], tmp_path / "r %h", ncu_args=options)
