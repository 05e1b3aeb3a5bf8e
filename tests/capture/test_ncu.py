"""Capturing with ncu: what is asked of it, and what its silence means. A stand-in plays the runs that need a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import stand_in_nsight

from nsightkit import cli
from nsightkit.capture import doctor
from nsightkit.capture import ncu as capture
from nsightkit.errors import NsightkitError, UsageError
from nsightkit.trace.programs import NCU

HELP = """usage: ncu [options] [program] [program-arguments]

General Options:
  -h [ --help ]                         Print this help message.
  --target-processes arg (=all)         Select the processes you want to profile:
                                          --not-an-option
  --nvtx                                Enable NVTX support.
  --nvtx-include arg                    Adds include statement to the NVTX filter.
  --replay-mode arg (=kernel)           Mechanism used for replaying a kernel launch.
  --graph-profiling arg (=node)         CUDA graph profiling mode:
  -k [ --kernel-name ] arg              Filter the kernel.
  -o [ --export ] arg                   Set the output file.
  --log-file arg                        Send all tool output to the specified file.
"""
SETS = """---------- --------------------------- ------- -----------------
Identifier Sections                    Enabled Estimated Metrics
---------- --------------------------- ------- -----------------
basic      LaunchStats, Occupancy      yes     144
           WorkloadDistribution
full       Everything                  no      613
"""
SECTIONS = SETS.replace("basic ", "SpeedOfLight ").replace("full ", "Occupancy ")
METRICS = "Chip gh100\nlts__t_bytes      Counter    byte   # of bytes\n"
DONE = """==PROF== Connected to process 1 (/usr/bin/python3)
==PROF== Profiling "k" - 0 (1/2): 0%....50%....100% - 8 passes
==PROF== Profiling "k" - 1 (2/2): 0%....50%....100% - 9 passes
==PROF== Disconnected from process 1
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Make an ncu that answers questions, records how it was called, and plays a run with a given log."""

    def make(log: str = DONE, report: bool = True, code: int = 0) -> Path:
        folder = tmp_path / "tool"
        folder.mkdir(exist_ok=True)
        said = {"--help": HELP, "--list-sets": SETS, "--list-sections": SECTIONS, "--list-chips": "gh100, gv11b"}
        said["--query-metrics"] = METRICS
        path = stand_in_nsight.ncu(
            folder, said, log, b"NVR\0report" if report else b"", words="the program's own words", code=code
        )
        monkeypatch.setenv("NSIGHTKIT_NCU", str(path))
        NCU.ask.cache_clear()
        return folder / "called.json"

    return make


def test_a_run_leaves_a_report_and_says_what_it_holds(stand_in, tmp_path: Path) -> None:
    called = stand_in()
    output = tmp_path / "-o $(x) 'q' %h"
    done = capture.profile(
        ["python3", "a b.py", "--kernel-name=mine"],
        output,
        kernel="gemm|nvjet",
        skip=2,
        count=3,
        nvtx=["forward", "lib@step"],
        section_set="full",
        sections=["SpeedOfLight"],
        metrics=["sm_pct", "lts__t_bytes.sum", "launch__grid_size"],
        keep_caches=True,
        extra=["--graph-profiling=node"],
        show=False,
    )
    assert done.trace == done.report == output.with_name(output.name + ".ncu-rep")
    assert done.report.read_bytes().startswith(b"NVR\0")
    assert done.returncode == 0
    arguments = json.loads(called.read_text())[0]
    assert arguments[-3:] == ["python3", "a b.py", "--kernel-name=mine"]
    for wanted in (
        "--target-processes=all",
        "--clock-control=none",
        "--cache-control=none",
        "--kernel-name=regex:gemm|nvjet",  # a plain name would be an exact match, and match nothing
        "--launch-skip=2",
        "--launch-count=3",
        "--nvtx",
        "--nvtx-include=forward/",  # without the slash it would be a start/end range
        "--nvtx-include=lib@step/",
        "--set=full",
        "--section=SpeedOfLight",
        "--metrics=sm__throughput.avg.pct_of_peak_sustained_elapsed,lts__t_bytes.sum,launch__grid_size",
        "--graph-profiling=node",
    ):
        assert arguments.count(wanted) == 1, wanted
    notes = " ".join(done.notes)
    assert "2 launches were profiled, replayed up to 9 times" in notes
    assert "environment" in notes
    assert "clocks were left alone" in notes
    assert done.ran[-3:] == arguments[-3:]
    assert not list(tmp_path.glob(".nsightkit-*"))
    with pytest.raises(UsageError, match="exists"):
        capture.profile(["x"], output, count=1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("forward", "forward/"),
        ("lib@forward", "lib@forward/"),
        ("forward/", "forward/"),
        ("outer/inner/", "outer/inner/"),
        ("top]", "top]"),
        ("start/end:region", "region"),
        ("regex:step_[0-9]+/", "regex:step_[0-9]+/"),
    ],
)
def test_push_pop_ranges_get_their_slash(given: str, expected: str) -> None:
    assert capture.range_filter(given) == expected


@pytest.mark.parametrize(
    ("log", "options", "words"),
    [
        ("==WARNING== No kernels were profiled.\n", {"kernel": "gemm"}, ["profiled no kernel", "'gemm'", "nvjet"]),
        ("==WARNING== No kernels were profiled.\n", {"nvtx": ["step"]}, ["ranges", "DOMAIN@NAME"]),
        ("==WARNING== No kernels were profiled.\n", {"skip": 5}, ["fewer than 6 launches"]),
        ("==WARNING== No kernels were profiled.\n", {}, ["profiled no kernel"]),
        (
            "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access GPU Performance Counters\n",
            {},
            ["ERR_NVGPUCTRPERM", "SYS_ADMIN", "NVreg_RestrictProfilingToAdminUsers=0", "host"],
        ),
        ("==ERROR== LibraryNotLoaded\n", {}, ["LibraryNotLoaded", "another runtime"]),
        ("==ERROR== Nsight Compute failed to connect to the CUDA driver\n", {}, ["no CUDA driver"]),
        ("==ERROR== Failed to find metric foo__bar.sum\n", {}, ["foo__bar.sum"]),
        ("==ERROR== something else\n", {}, ["no report", "something else"]),
        ("", {}, ["no report"]),
    ],
)
def test_a_run_without_a_report_is_explained(stand_in, tmp_path: Path, log: str, options: dict, words: list) -> None:
    stand_in(log, report=False)  # exit code 0 all the same
    with pytest.raises(NsightkitError) as caught:
        capture.profile(["program"], tmp_path / "r", show=False, **options)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("*.ncu-rep"))


def test_a_program_that_fails_still_leaves_its_report(stand_in, tmp_path: Path) -> None:
    stand_in(DONE + "==ERROR== The application returned an error code (3).\n", code=3)
    done = capture.profile(["program"], tmp_path / "r", clocks="base", show=False)
    assert done.returncode == 3
    assert any("exit code 3" in note for note in done.notes)
    assert any("locked to base" in note for note in done.notes)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"section_set": "full"}, "hours"),
        ({"section_set": "full", "skip": 100}, "hours"),  # the rest of the program is still all of it
        ({"section_set": "ful", "count": 1}, "did you mean full"),
        ({"sections": ["SpeedOfLigth"]}, "did you mean SpeedOfLight"),
        ({"metrics": ["dram_pctt"]}, "did you mean dram_pct"),
        ({"metrics": ["lts__t_bites.sum"]}, "did you mean lts__t_bytes"),
        (
            {"metrics": ["smsp__warps_issue_stalled_wait_per_warp_active.ratio"]},
            "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio",
        ),
        ({"kernel": "("}, "regular expression"),
        ({"clocks": "high"}, "none or base"),
        ({"count": 0}, "1 or more"),
        ({"extra": ["--replay-mod=kernel"]}, "did you mean --replay-mode"),
        ({"extra": ["--not-an-option"]}, "no option"),
        ({"extra": ["-k=x"]}, "argument kernel"),
        ({"extra": ["--export=x"]}, "argument output"),
    ],
)
def test_what_would_cost_the_run_is_refused_before_it(stand_in, tmp_path: Path, options: dict, words: str) -> None:
    called = stand_in()
    with pytest.raises(UsageError, match=words):
        capture.profile(["program"], tmp_path / "r", **options)
    assert not called.exists()


def test_full_is_allowed_with_a_filter_or_when_asked_for(stand_in, tmp_path: Path) -> None:
    stand_in()
    for n, options in enumerate(({"kernel": "k"}, {"count": 2}, {"nvtx": ["step"]}, {"everything": True})):
        assert capture.profile(
            ["program"], tmp_path / str(n), section_set="full", show=False, **options
        ).report.exists()


def test_find_prefers_the_environment_then_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ncu").write_text("#!/bin/sh\n")
        (tmp_path / name / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "two"))
    monkeypatch.delenv("NSIGHTKIT_NCU", raising=False)
    assert NCU.find() == tmp_path / "two" / "ncu"
    monkeypatch.setenv("NSIGHTKIT_NCU", str(tmp_path / "one" / "ncu"))
    assert NCU.find() == tmp_path / "one" / "ncu"
    monkeypatch.setenv("NSIGHTKIT_NCU", str(tmp_path / "absent"))
    with pytest.raises(UsageError, match="NSIGHTKIT_NCU"):
        NCU.find()
    monkeypatch.delenv("NSIGHTKIT_NCU")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(vars(NCU), "folders", ())  # not where this machine's installers have put it
    with pytest.raises(NsightkitError, match="not installed"):
        capture.profile(["program"], tmp_path / "r")


def test_the_command_line_passes_it_all_on(stand_in, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    called = stand_in()
    arguments = ["capture", "ncu", "-o", str(tmp_path / "r"), "--kernel", "gemm", "--count", "1", "--nvtx", "step",
                 "--metric", "dram_pct", "--ncu-option", "--graph-profiling=graph", "--format", "json", "--",
                 "python3", "t.py", "--count", "9"]  # fmt: skip
    assert cli.run(arguments) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["trace"] == str(tmp_path / "r.ncu-rep")
    assert "the program's own words" in err
    assert "environment" in err
    assert json.loads(called.read_text())[0][-4:] == ["python3", "t.py", "--count", "9"]
    stand_in("==ERROR== ERR_NVGPUCTRPERM\n", report=False)
    assert cli.run(["capture", "ncu", "-o", str(tmp_path / "s"), "--", "program"]) == 2
    assert "NVreg_RestrictProfilingToAdminUsers=0" in capfd.readouterr().err.splitlines()[-1]


def test_the_doctor_sees_it(stand_in, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in()
    rows = {row["check"].split()[0]: row for row in doctor.report()}
    assert rows["ncu"]["status"] == "ok"
    assert "2025.3.1.0" in rows["ncu"]["found"]
    monkeypatch.setattr(doctor, "installed", lambda package: None)
    rows = {row["check"].split()[0]: row for row in doctor.report()}
    assert "nsightkit[ncu]" in rows["ncu-report"]["remedy"]


def test_a_real_ncu_is_understood(real_ncu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSIGHTKIT_NCU", str(real_ncu))
    NCU.ask.cache_clear()
    options = capture.options_of(NCU.ask(real_ncu, "--help"))
    assert {name for name in capture.OURS if name.startswith("--")} <= options
    assert {"--target-processes", "--graph-profiling", "--replay-mode", "-k", "-c", "-s"} <= options
    with pytest.raises(UsageError, match="did you mean full"):
        capture.profile(["true"], tmp_path / "r", section_set="ful", count=1)
    with pytest.raises(UsageError, match="did you mean"):
        capture.profile(["true"], tmp_path / "r", metrics=["sm__throughputs.avg"])
    # With every filter at once, and no kernel to find: no word of ncu's about an option, and our own explanation.
    with pytest.raises(NsightkitError, match=r"profiled no kernel|no CUDA driver"):
        capture.profile(
            ["true"],
            tmp_path / "r %h",
            kernel="gemm",
            skip=1,
            count=2,
            nvtx=["step"],
            nvtx_exclude=["warmup"],
            section_set="basic",
            sections=["SpeedOfLight"],
            metrics=["dram_pct", "lts__t_bytes.sum", "launch__grid_size"],
            keep_caches=True,
            show=False,
        )
