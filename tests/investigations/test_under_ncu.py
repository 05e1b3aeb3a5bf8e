"""The second capture of a part under Nsight Compute: played by a stand-in, in recordings, on pages and in keys."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
from pathlib import Path

import pandas as pd
import pytest
import stand_in_nsight

import nsightkit
from nsightkit.analysis.roofline import counters as analysis
from nsightkit.capture import provenance
from nsightkit.errors import TraceError
from nsightkit.investigations import measurement as investigation
from nsightkit.investigations import parts as investigations
from nsightkit.investigations import recordings, under_nsight, what_runs
from nsightkit.trace import ncu as reports
from nsightkit.trace import ncu_metrics
from nsightkit.trace.model import Trace, TraceMeta
from nsightkit.trace.programs import NCU, Tool

PART = investigations.find("limiters", "before")
OPTIONS = ("--nvtx", "--target-processes arg", "-k [ --kernel-name ] arg", "-o [ --export ] arg")
HELP = "".join(f"  {option}  Text.\n" for option in OPTIONS)
DONE = '==PROF== Connected to process 1\n==PROF== Profiling "k" - 0: 0%....50%....100% - 40 passes\n'


def counted(**text: str) -> reports.Report:
    """A report of two launches, one in a phase of its own, on a machine that says a lot about itself."""
    values: dict[str, reports.Value] = {
        "sm__throughput.avg.pct_of_peak_sustained_elapsed": 12.345678,
        "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed": 91.25,
        "gpu__time_duration.sum": 123456,
        "launch__occupancy_limit_registers": 4,
        "device__attribute_display_name": "Planted GPU",
        "device__attribute_compute_capability_major": 9,
        "device__attribute_compute_capability_minor": 0,
        "device__attribute_multiprocessor_count": 132,
        "device__attribute_pci_bus_id": 77,
        "group:memory__chart": "dram__bytes_read.sum",
        "nvlink__count_physical": 18,
        "breakdown:x": "a__b.avg",
        **text,
    }
    around = (under_nsight.STEADY, "step", "add")
    identities = [{"kernel": "add_kernel(float *)", "ranges": around}, {"kernel": "other", "ranges": around[:2]}]
    return reports.from_metrics("planted", identities, [values, values], dict.fromkeys(values, ""))


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Make an ncu that knows the sections, and leaves a report, or does not."""

    def make(
        log: str = DONE, report: reports.Report | None = None, code: int = 0, sections: str = "", hang: bool = False
    ) -> Path:
        folder = tmp_path / "tool"
        folder.mkdir(exist_ok=True)
        made = b"" if report is None else reports.write(report, folder / "report").read_bytes()
        listed = sections or "".join(f"{name}  Name  no  file\n" for name in under_nsight.SECTIONS)
        said = {"--help": HELP, "--list-sections": listed}
        path = stand_in_nsight.ncu(folder, said, log, made, code=code, hang=hang)
        monkeypatch.setenv("NSIGHTKIT_NCU", str(path))
        NCU.ask.cache_clear()
        return folder / "called.json"

    return make


def test_the_counters_of_the_steady_steps_are_kept(stand_in, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "planted-host")
    monkeypatch.setenv("PLANTED_TOKEN", "s3cr3t-value")
    called = stand_in(report=counted(profiler__note="on planted-host with s3cr3t-value"))
    (tmp_path / "made").mkdir()
    found = under_nsight.capture(PART, "live", tmp_path / "made", timeout_s=60, environment=dict(os.environ))
    assert found.keys() == {"version", "command", "steps"}
    assert found["version"] == "2025.3.1.0"
    assert found["steps"] == PART.counts("live")["active"]
    arguments, environment = json.loads(called.read_text())
    assert "--nvtx" in arguments
    assert f"--nvtx-include={under_nsight.STEADY}/" in arguments
    assert "--clock-control=none" in arguments
    assert [a.removeprefix("--section=") for a in arguments if a.startswith("--section=")] == list(
        under_nsight.SECTIONS
    )
    program = ["-m", "nsightkit.investigations.under_nsight", "limiters", "before", "live"]
    assert arguments[-5:] == program
    assert environment["PLANTED_TOKEN"] == "s3cr3t-value"  # the program's own environment, which no file may keep
    assert found["command"].startswith("ncu --target-processes=all --clock-control=none --nvtx")
    assert found["command"].endswith("--export=report python " + " ".join(program))
    assert str(tmp_path) not in found["command"]
    (made,) = (tmp_path / "made").iterdir()  # the report itself, which holds the environment, is gone
    text = made.read_bytes()
    for said in (b"planted-host", b"s3cr3t-value", str(tmp_path).encode(), b"pci_bus", b"group:", b"nvlink"):
        assert said not in text
    report = reports.read(made)
    assert report.metric("sm_pct").tolist() == [12.345678] * 2
    assert report.launches["gpu"].tolist() == ["Planted GPU"] * 2
    assert report.launches["compute_capability"].tolist() == ["9.0"] * 2
    assert re.fullmatch(r"on \[\w+\] with \[\w+\]", str(report.metrics[0]["profiler__note"]))
    assert report.metrics[0]["breakdown:x"] == "a__b.avg"
    assert analysis.summary(report, within="^add$")["classification"].tolist() == ["memory-bound"]


def test_what_is_about_the_launch_is_kept_as_it_is(shared_traces: Path) -> None:
    pytest.importorskip("ncu_report")
    for path in sorted(shared_traces.rglob("*.ncu-rep")):
        report = reports.read(path)
        kept = under_nsight.kept(report)
        assert kept.launches["kernel"].tolist() == report.launches["kernel"].tolist()
        assert kept.launches["ranges"].tolist() == report.launches["ranges"].tolist()
        for ours, theirs in zip(kept.metrics, report.metrics, strict=True):
            assert ours.items() <= theirs.items()
            assert {name.partition("__")[0] for name in theirs.keys() - ours.keys()} <= {
                "device", "group:memory", "group:smsp", "nvlink", "numa",
            }  # fmt: skip
        pd.testing.assert_frame_equal(analysis.summary(kept), analysis.summary(report))


def notice(folder: Path, mode: str = "live", part: investigations.Part = PART) -> str:
    folder.mkdir(exist_ok=True)
    found = under_nsight.capture(part, mode, folder, timeout_s=60)
    assert found.keys() == {"notice"}
    assert not list(folder.iterdir())
    assert "\n" not in found["notice"]
    return found["notice"]


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n", "does not let this user read the GPU's"),
        ("==ERROR== LibraryNotLoaded\n", "cannot be reached from here at all"),
        ("==WARNING== No kernels were profiled.\n", "no launch lies in the ranges"),
        ("==ERROR== The application returned an error code (1).\n", "wrote no report"),
        ("", "it said nothing"),
    ],
)
def test_what_ncu_refuses_is_a_line_and_no_failure(stand_in, tmp_path: Path, log: str, words: str) -> None:
    stand_in(log)
    found = notice(tmp_path / "made")
    assert words in found
    assert str(tmp_path) not in found


def test_a_program_that_fails_under_it_leaves_what_was_counted(stand_in, tmp_path: Path) -> None:
    stand_in(DONE + "==ERROR== The application returned an error code (3).\n", counted(), code=3)
    found = under_nsight.capture(PART, "live", tmp_path, timeout_s=60)
    assert found["notice"] == "only 2 launches were counted: the program ended with exit code 3 under it"
    assert len(reports.read(tmp_path / "ncu.csv")) == 2


def test_when_the_time_is_up_what_was_counted_is_kept(stand_in, tmp_path: Path) -> None:
    stand_in(report=counted(), hang=True)
    found = under_nsight.capture(PART, "live", tmp_path, timeout_s=2)
    assert found["notice"].startswith("only 2 launches were counted: the program was interrupted after 2 s")
    assert len(reports.read(tmp_path / "ncu.csv")) == 2


def test_an_ncu_without_a_section_or_that_writes_nonsense_is_a_line(stand_in, tmp_path: Path) -> None:
    stand_in(sections="SpeedOfLight  Name  no  file\n")
    assert "has no section 'ComputeWorkloadAnalysis'" in notice(tmp_path / "a")
    stand_in(report=dataclasses.replace(counted(), launches=counted().launches[:0], metrics=[]))
    assert "holds no profiled kernel" in notice(tmp_path / "b")


def test_without_ncu_or_gpu_a_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tool, "find", lambda _: None)
    assert notice(tmp_path / "made").startswith("ncu is not installed")
    assert notice(tmp_path / "made", mode="smoke") == "a CPU has no counters that Nsight Compute could read"


def test_a_real_ncu_without_a_gpu_is_a_line(real_ncu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setenv("NSIGHTKIT_NCU", str(real_ncu))
    NCU.ask.cache_clear()
    assert "ncu" in notice(tmp_path / "made")


def test_the_sections_hold_what_the_analysis_asks_for(real_ncu: Path) -> None:
    """By the sections' own list of metrics; those of the memory tables are groups, which only a run resolves."""
    said = NCU.ask(real_ncu, "--list-metrics", *(f"--section={name}" for name in under_nsight.SECTIONS))
    asked = {m.name for m in ncu_metrics.METRICS if any(n in said for n in m.nvidia)}
    assert {"sm_pct", "memory_pct", "dram_pct", "tensor_pct", "fma_pct", "issue_pct", "occupancy_pct"} <= asked
    assert {f"stall_{stall.reason}" for stall in ncu_metrics.STALLS} <= asked
    assert {f"limit_{name}_blocks" for name in analysis.LIMITS} <= asked
    assert {"global_load_bytes_per_sector", "waves", "grid_blocks", "theoretical_occupancy_pct"} <= asked


# -- recordings ----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(investigation, "has_gpu", lambda: False)
    for name in ("NSIGHTKIT_MODE", "NSIGHTKIT_PUBLISH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NSIGHTKIT_RECORDINGS", str(tmp_path / "recordings"))
    return tmp_path / "recordings"


def recorded(where: Path, counters: Path | None, **changes: object) -> Path:
    told = {
        "format": what_runs.FORMAT, "kind": "measured", "investigation": PART.investigation, "part": PART.name,
        "key": recordings.part_key(PART), "parameters": {}, "counts": PART.counts("live"),
        "gpu": {"name": "Planted GPU"}, "utc": "2026-01-02T03:04:05+00:00", **changes,
    }  # fmt: skip
    ranges = pd.DataFrame({"start_ns": [0], "end_ns": [60], "name": pd.Categorical(["step"])})
    trace = Trace.from_frames({"ranges": ranges}, TraceMeta(tool="planted"))
    return recordings.write(trace, recordings.frame({"step_ns": [1]}), told, where, ncu=counters)


def test_a_recording_brings_its_counters_through_the_same_analysis(no_gpu: Path, tmp_path: Path) -> None:
    truth = under_nsight.kept(counted())
    made = reports.write(truth, tmp_path / "ncu.csv")
    place = recorded(no_gpu, made, ncu={"version": "2025.3.1.0", "command": "ncu --nvtx python", "steps": 2})
    assert {p.name for p in place.iterdir()} == {"provenance.json", "samples.parquet", "trace", "ncu.csv"}
    measured = nsightkit.investigations.measure("limiters", "before")
    assert (measured.mode, measured.ncu_notice, measured.nsys_notice) == ("replay", None, None)
    assert measured.ncu_report is not None
    pd.testing.assert_frame_equal(analysis.summary(measured.ncu_report), analysis.summary(truth))
    assert dict(provenance.rows(measured.provenance))["Under Nsight Compute, in another run"] == "ncu --nvtx python"


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"ncu": {"notice": "the driver does not let this user"}}, "does not let this user"), ({}, "recorded without")],
)
def test_a_recording_without_counters_is_valid_and_says_why(no_gpu: Path, changes: dict, words: str) -> None:
    recorded(no_gpu, None, **changes)
    measured = nsightkit.investigations.measure("limiters", "before")
    assert (measured.mode, measured.ncu_report) == ("replay", None)
    assert words in measured.ncu_notice
    told = dict(provenance.rows(measured.provenance))
    assert ("Not counted with Nsight Compute" in told) == bool(changes)


def test_counters_that_cannot_be_read_are_not_recorded(no_gpu: Path, tmp_path: Path) -> None:
    (tmp_path / "ncu.csv").write_text("nonsense\n")
    with pytest.raises(TraceError, match="not a report of Nsight Compute"):
        recorded(no_gpu, tmp_path / "ncu.csv")
    assert not list(no_gpu.rglob("*.csv"))


def test_a_smoke_run_says_that_a_cpu_has_no_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("NSIGHTKIT_MODE", "smoke")
    measured = nsightkit.investigations.measure("limiters", "before")
    assert measured.ncu_report is None
    assert measured.ncu_notice == "a CPU has no counters that Nsight Compute could read"
    assert {"product", "product_fp32", "add", "strided", "softmax", "chase"} <= set(measured.trace["ranges"]["name"])


def test_the_key_covers_what_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({recordings.part_key(dataclasses.replace(PART, profiled=how)) for how in (None, "nsys", "ncu")}) == 3
    covered = what_runs.closure(PART.code)
    assert {
        "nsightkit.investigations.under_nsight:steady_steps",
        "nsightkit.investigations.under_nsight:SECTIONS",
    } <= set(covered)
    assert "nsightkit.investigations.under_nsight:capture" not in covered
