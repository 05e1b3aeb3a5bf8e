"""The second capture of a part: with a real nsys, with one that fails, in recordings, on pages and in keys."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import socket
import time
from pathlib import Path
from typing import Self

import pandas as pd
import pyarrow.parquet as pq
import pytest
import stand_in_nsight
from synthetic import planted

import nsightkit
from nsightkit.analysis.compare import two_tools
from nsightkit.analysis.timeline import steps
from nsightkit.capture import provenance
from nsightkit.errors import NsightkitError
from nsightkit.investigations import child, record, recordings, under_nsight, what_runs
from nsightkit.investigations import measurement as investigation
from nsightkit.investigations import parts as investigations
from nsightkit.trace import chrome
from nsightkit.trace.model import Trace, TraceMeta
from nsightkit.trace.programs import NSYS, Tool

PART = investigations.find("training-step", "before")
PLAIN = investigations.find("starved-input", "before")


# -- with a real nsys ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(nsys: Path) -> investigation.Measurement:
    """A part, measured small on the CPU and captured with nsys."""
    pytest.importorskip("torch")
    pytest.importorskip("nvtx")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NSIGHTKIT_NSYS", str(nsys))
        patch.setenv("NSIGHTKIT_MODE", "smoke")
        patch.setenv("PLANTED_TOKEN", "s3cr3t-value")
        return nsightkit.investigations.measure("training-step", "before")


@pytest.mark.nsys
def test_a_part_is_captured_by_both(measured: investigation.Measurement) -> None:
    assert measured.nsys_notice is None
    by_nsys = measured.nsys_trace
    assert by_nsys is not None
    assert by_nsys.meta.tool == "Nsight Systems"
    names = by_nsys["ranges"]["name"].value_counts().to_dict()
    active = measured.provenance["counts"]["active"]
    assert names["step"] == names["forward"] == names["backward"] == names["optimizer"] == active
    assert not {under_nsight.CAPTURED, under_nsight.STEADY} & set(names)
    # the same program: every range that PyTorch's profile has, as often, but those that PyTorch itself marks
    theirs = measured.trace["ranges"]["name"].value_counts().to_dict()
    assert {name: count for name, count in theirs.items() if "#" not in name} == names
    levels = by_nsys["ranges"].set_index("name")["level"]
    assert (levels["step"] == 0).all()
    assert (levels["forward"] == 1).all()
    parents = by_nsys["ranges"].loc[by_nsys["ranges"]["name"] == "qkv_projections", "parent"]
    assert set(by_nsys["ranges"]["name"].iloc[parents]) == {"forward"}
    assert len(steps.find(by_nsys)) == active
    table = two_tools.compare({"torch.profiler": measured.trace, "nsys": by_nsys})
    assert set(table["clock"]) == {"CPU"}
    assert table["difference"].notna().all()
    # nsys puts the environment of the program and the names of all threads of the machine into its report
    written = b"".join(p.read_bytes() for p in (measured.folder / "nsys").rglob("*") if p.is_file())
    assert b"s3cr3t-value" not in written
    assert len(by_nsys.meta.thread_names) <= by_nsys["ranges"]["thread"].nunique()
    assert sorted(p.name for p in measured.folder.iterdir()) == ["nsys", "trace.json.gz"]
    told = dict(provenance.rows(measured.provenance))["Under Nsight Systems, in another run"]
    assert told.startswith("nsys profile --trace=cuda,nvtx")
    assert told.endswith("python -m nsightkit.investigations.under_nsight training-step before smoke")
    assert str(Path.cwd()) not in told
    assert "Under Nsight Systems" in measured._repr_html_()


@pytest.mark.nsys
def test_a_dry_run_of_the_recorder_keeps_it(
    measured: investigation.Measurement, nsys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def again(folders: dict[Path, object], *_: object, kind: str, **__: object) -> list[None]:
        (folder,) = folders
        shutil.copy(measured.folder / "trace.json.gz", folder)
        alone = {name: fact for name, fact in measured.provenance.items() if name != "nsys"} | {"kind": kind}
        samples = {"step_ns": measured.values("step_ns").tolist()}
        (folder / child.RESULT).write_text(json.dumps({"samples": samples, "provenance": alone}))
        return [None]

    def captured_again(_part: object, _mode: str, folder: Path, _timeout_s: float) -> dict:
        shutil.copytree(measured.folder / "nsys", folder / "nsys")
        return dict(measured.provenance["nsys"])

    monkeypatch.setattr(record, "run_children", again)
    monkeypatch.setattr(record, "capture_child", captured_again)
    monkeypatch.setenv("PLANTED_TOKEN", "s3cr3t-value")
    rows = record.record(["training-step/before"], out=tmp_path, dry_run=True)
    assert [row["status"] for row in rows] == ["recorded", "captured"], rows
    place = tmp_path / "training-step" / "no-gpu" / "before"
    assert sorted(p.name for p in place.iterdir()) == ["nsys", "provenance.json", "samples.parquet", "trace"]
    told = json.loads((place / "provenance.json").read_text())
    assert told["nsys"].keys() == {"version", "command", "steps"}
    assert told["nsys"]["version"] == ".".join(map(str, NSYS.version(nsys)))
    by_nsys = nsightkit.load(place / "nsys")
    assert by_nsys["ranges"]["name"].tolist().count("qkv_projections") > 0
    size = sum(p.stat().st_size for p in (place / "nsys").iterdir())
    assert size < 100_000
    for path in place.rglob("*"):
        if path.is_file():
            assert b"s3cr3t-value" not in path.read_bytes()
            assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", _texts(path))


def _texts(path: Path) -> str:
    """All texts in a file of a recording; the bytes of numbers can spell anything."""
    if path.suffix != ".parquet":
        return path.read_text()
    table = pq.read_table(path)
    return "\n".join(
        str(v) for name in table.column_names for v in table[name].unique().to_pylist() if isinstance(v, str)
    )


# -- without one, or with one that fails ---------------------------------------------------------------------------


def noticed(part: investigations.Part, folder: Path) -> str:
    found = under_nsight.capture(part, "smoke", folder, timeout_s=60)
    assert found.keys() == {"notice"}
    assert not list(folder.glob("profiled*"))
    assert not (folder / "nsys").exists()
    assert "\n" not in found["notice"]
    return found["notice"]


def test_without_nsys_a_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tool, "find", lambda _: None)
    assert noticed(PART, tmp_path).startswith("nsys is not installed")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exit 0", "nsys wrote no report (exit code 0)"),
        ("echo boom at /some/where/else/libdw.so.1: missing; exit 7", "boom at libdw.so.1: missing"),
        ('for a; do case "$a" in --output=*) echo x > "${a#--output=}.nsys-rep";; esac; done', "cannot export it"),
    ],
)
def test_a_failing_nsys_is_a_line_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "made").mkdir()
    monkeypatch.setenv("NSIGHTKIT_NSYS", str(stand_in_nsight.nsys(tmp_path / "bin", script)))
    notice = noticed(PART, tmp_path / "made")
    assert words in notice
    assert str(tmp_path) not in notice


def test_a_hanging_nsys_is_ended_with_all_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder's bound is one on everything: the program, nsys's answer to an interruption, importer and export."""
    pytest.importorskip("torch")
    for name in ("bin", "made", "cwd"):
        (tmp_path / name).mkdir()
    script = "trap '' INT; setsid sleep 300 & sleep 300"
    monkeypatch.setenv("NSIGHTKIT_NSYS", str(stand_in_nsight.nsys(tmp_path / "bin", script)))
    monkeypatch.chdir(tmp_path / "cwd")
    found = child.capture_child(PART, "smoke", tmp_path / "made", 3.0)
    assert found == {"notice": "not done within 3 s; it last said: nothing"}
    until = time.monotonic() + 10
    while len(here := _in(tmp_path / "cwd")) > 1 and time.monotonic() < until:
        time.sleep(0.1)
    assert here == [os.getpid()]


def _in(folder: Path) -> list[int]:
    """Processes that run in a folder, but for those of the fork server, which starts wherever it is first asked."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            here = (process / "cwd").readlink() == folder
            if here and b"multiprocessing" not in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found


# -- cut to the steady steps ---------------------------------------------------------------------------------------


def captured(folder: Path) -> tuple[Trace, dict]:
    """A planted capture: two steps nsys settles in, then three that count."""
    out, process, main = planted.Export(), planted.Export.process(1), planted.Export.thread(1, 1)
    now = 1_000_000
    begins = {under_nsight.CAPTURED: now, under_nsight.STEADY: 0}
    kernels = 0
    for number in range(5):
        if number == 2:
            begins[under_nsight.STEADY] = now + 10
        start = now + 100
        call = out.call("cudaLaunchKernel", main, start + 200, start + 300)
        out.kernel("gemm", start + 400, start + 900 + number, call, process)
        kernels += (500 + number) * (number >= 2)
        out.range("forward", main, start + 100, start + 350)
        out.range("step", main, start, start + 1_000)
        now = start + 1_000
    for name, begin in begins.items():
        out.range(name, main, begin, now + 50)
    trace = nsightkit.load(out.write(folder / "planted.sqlite"))
    return trace, {"kernel_ns": kernels, "begin": begins[under_nsight.STEADY], "end": now + 50}


def test_only_steady_steps_are_kept(tmp_path: Path) -> None:
    trace, truth = captured(tmp_path)
    trace.meta.thread_names = {(1 << 24) | 1: "python", (9 << 24) | 9: "somebody else's"}
    cut = under_nsight.steady(trace)
    assert cut["ranges"]["name"].astype(str).value_counts().to_dict() == {"step": 3, "forward": 3}
    assert cut.size("kernels") == cut.size("calls") == 3
    assert int(cut.table("kernels", ["duration_ns"])["duration_ns"].sum()) == truth["kernel_ns"]
    assert cut.meta.window_ns == (truth["begin"], truth["end"])
    assert cut.t0_ns == truth["begin"] + 90  # the trace begins with its first event
    assert (cut["kernels"]["start_ns"] + cut.t0_ns).tolist() == (trace["kernels"]["start_ns"] + trace.t0_ns).tolist()[
        2:
    ]
    ranges = cut["ranges"]
    inner = ranges[ranges["name"] == "forward"]
    assert (inner["level"] == 1).all()
    assert (ranges.loc[ranges["name"] == "step", ["level", "parent"]] == [0, -1]).all(axis=None)
    around = ranges.iloc[inner["parent"]]
    assert (around["start_ns"].to_numpy() <= inner["start_ns"].to_numpy()).all()
    assert (around["end_ns"].to_numpy() >= inner["end_ns"].to_numpy()).all()
    assert cut.meta.thread_names == {(1 << 24) | 1: "python"}


def test_a_capture_without_its_range_is_none(tmp_path: Path) -> None:
    planted.training(tmp_path / "other.sqlite", steps=2)
    with pytest.raises(NsightkitError, match="recorded 0 ranges"):
        under_nsight.steady(nsightkit.load(tmp_path / "other.sqlite"))


def test_the_repeated_steps_lie_in_their_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Work:
        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            done.append("closed")

        def step(self) -> None:
            done.append("step")

    class Phase:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            done.append(f"+{self.name}")

        def __exit__(self, *_: object) -> None:
            done.append(f"-{self.name}")

    monkeypatch.setattr(under_nsight, "phase", Phase)
    under_nsight.steady_steps(lambda device, **_: Work(), "cpu", {}, warmup=1, active=2)
    around, kept = under_nsight.CAPTURED, under_nsight.STEADY
    assert done == [
        "step", f"+{around}", "step", "step", f"+{kept}", "step", "step", f"-{kept}", f"-{around}", "closed"
    ]  # fmt: skip


# -- recordings ----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(investigation, "has_gpu", lambda: False)
    for name in ("NSIGHTKIT_MODE", "NSIGHTKIT_PUBLISH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NSIGHTKIT_RECORDINGS", str(tmp_path / "recordings"))
    return tmp_path / "recordings"


def facts(part: investigations.Part = PART, **changes: object) -> dict[str, object]:
    return {
        "format": what_runs.FORMAT, "kind": "measured", "investigation": part.investigation, "part": part.name,
        "key": recordings.part_key(part), "parameters": {}, "counts": part.counts("live"),
        "gpu": {"name": "Planted GPU"}, "utc": "2026-01-02T03:04:05+00:00", **changes,
    }  # fmt: skip


def test_a_recording_holds_both_captures(no_gpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "planted-host")
    planted.training(tmp_path / "loop.sqlite", steps=3)
    by_nsys = nsightkit.load(tmp_path / "loop.sqlite")
    chrome.write(by_nsys, tmp_path / "loop.json.gz")
    by_nsys.meta.thread_names = {1: "on planted-host"}
    samples = recordings.frame({"step_ns": [1, 2]})
    told = facts(nsys={"version": "2023.4", "command": "nsys profile python", "steps": 3})
    place = recordings.write(nsightkit.load(tmp_path / "loop.json.gz"), samples, told, no_gpu, nsys=by_nsys)
    assert {p.name for p in place.iterdir()} == {"provenance.json", "samples.parquet", "trace", "nsys"}
    assert b"planted-host" not in b"".join(p.read_bytes() for p in place.rglob("*") if p.is_file())
    measured = nsightkit.investigations.measure("training-step", "before")
    assert (measured.mode, measured.nsys_notice) == ("replay", None)
    table = two_tools.compare({"torch.profiler": measured.trace, "nsys": measured.nsys_trace})
    assert {"step", "phase", "category"} == set(table["group"])
    assert (table["difference"] == 0).all()  # one planted program, two forms


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"nsys": {"notice": "it wrote no report"}}, "it wrote no report"), ({}, "recorded without")],
)
def test_a_recording_without_the_second_capture_is_valid(no_gpu: Path, changes: dict, words: str) -> None:
    ranges = pd.DataFrame({"start_ns": [0], "end_ns": [60], "name": pd.Categorical(["step"])})
    trace = Trace.from_frames({"ranges": ranges}, TraceMeta(tool="planted"))
    recordings.write(trace, recordings.frame({"step_ns": [1]}), facts(**changes), no_gpu)
    measured = nsightkit.investigations.measure("training-step", "before")
    assert measured.mode == "replay"
    assert measured.nsys_trace is None
    assert words in measured.nsys_notice
    recordings.write(trace, recordings.frame({"step_ns": [1]}), facts(PLAIN), no_gpu)
    assert nsightkit.investigations.measure("starved-input", "before").nsys_notice is None  # it does not ask for one


def test_the_key_covers_what_runs_under_nsys() -> None:
    assert recordings.part_key(PART) != recordings.part_key(dataclasses.replace(PART, profiled=None))
    covered = what_runs.closure(PART.code)
    assert {
        f"nsightkit.investigations.under_nsight:{name}" for name in ("steady_steps", "_drain", "CAPTURED", "_SETTLING")
    } <= set(covered)
    assert "nsightkit.investigations.under_nsight:capture" not in covered
