"""The process in which a part is measured: forked ones are as good as interpreters of their own."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

import nsightkit
from nsightkit.capture import children
from nsightkit.errors import NsightkitError
from nsightkit.investigations import child, record, recordings
from nsightkit.investigations.child import run_child
from nsightkit.investigations.parts import find, prepared

pytest.importorskip("torch")

TINY = find("tiny-kernels", "before")
HOW = {"kind": "smoke", "command": "", "timeout_s": 300}


def test_a_forked_process_measures_what_a_fresh_interpreter_does(tmp_path, monkeypatch):
    forked = run_child(TINY, "smoke", tmp_path, **HOW)
    monkeypatch.setattr(child, "fork_child", children.start_child)
    fresh = run_child(TINY, "smoke", tmp_path, **HOW)
    (by_fork, its_provenance), (afresh, provenance) = forked, fresh
    assert by_fork.keys() == afresh.keys()
    assert by_fork["loss"] == afresh["loss"], "the same seeds, untouched by what ran before"
    assert provenance["sdpa_backend"] == "flash", "which back end ran is read from the profile"
    changing = {"utc": None, "duration_s": None}
    assert its_provenance | changing == provenance | changing


def test_a_child_that_fails_says_so_and_the_next_one_works(tmp_path, monkeypatch):
    absent = dataclasses.replace(TINY, name="no-such-part")
    for mode in ("live", "smoke"):  # a fresh interpreter, a forked process
        with pytest.raises(
            NsightkitError, match=rf"no-such-part \({mode}\) was not measured: exit code 1.*no-such-part"
        ):
            run_child(absent, mode, tmp_path, **HOW)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NSIGHTKIT_COMMIT", "0123abc")
    _, provenance = run_child(TINY, "smoke", Path(), **HOW)
    assert provenance["commit"] == "0123abc", "the environment is that of the moment"
    assert (tmp_path / "trace.json.gz").is_file(), "and so is the folder"


def test_without_a_gpu_nothing_is_measured_on_one(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RuntimeError, match="sees no CUDA GPU"):
        prepared("live")


def _in(folder: Path) -> list[str]:
    """Processes that run in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found += [process.name] if (process / "cwd").readlink() == folder else []
        except OSError:  # it has ended
            continue
    return found


def test_when_the_time_is_up_nothing_is_left(tmp_path, monkeypatch):
    run_child(TINY, "smoke", tmp_path, **HOW)  # what is forked from is there
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NsightkitError, match=r"was not measured: not done within 0\.5 s; it last said: nothing"):
        run_child(find("starved-input", "before"), "smoke", tmp_path, **HOW | {"timeout_s": 0.5})
    until = time.monotonic() + 10
    while len(_in(tmp_path)) > 1 and time.monotonic() < until:
        time.sleep(0.1)
    assert _in(tmp_path) == [str(os.getpid())]


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")
@pytest.mark.parametrize(("works", "start"), [(True, children.fork_child), (False, children.start_child)])
def test_live_parts_are_forked_where_a_fork_can_use_the_gpu(tmp_path, monkeypatch, works, start):
    asked = []

    def ask(_module, job, _timeout_s, how):
        asked.append((len(job.get("parts", ())), how))
        if not job and not works:
            raise NsightkitError("cannot initialize CUDA in a forked process")
        return {}

    for module in (child, children):
        monkeypatch.setattr(module, "ask_child", ask)
    children.starter.cache_clear()
    try:
        for _ in range(2):
            assert child.run_children({tmp_path: TINY}, "live", **HOW, known={}) == [None]
    finally:
        children.starter.cache_clear()
    assert asked == [(0, children.fork_child), (1, start), (1, start)], "it is tried once"


def test_whether_a_fork_can_use_the_gpu_is_tried_on_it(monkeypatch):
    """With a stand-in for CUDA: the order of calls, no more."""
    done = []
    monkeypatch.setattr("torch.cuda.synchronize", lambda: done.append("synchronize"))
    assert children.main() == {}
    assert done == ["synchronize"]


def test_only_a_part_that_asks_for_it_runs_under_nsight(tmp_path, monkeypatch):
    def nothing(folders, *_, **__):
        for folder in folders:
            (folder / child.RESULT).write_text('{"samples": {}, "provenance": {}}')
        return [None]

    monkeypatch.setattr(child, "run_children", nothing)
    monkeypatch.setattr(child, "capture_child", lambda *_, **__: {"notice": "captured"})
    assert run_child(TINY, "smoke", tmp_path, **HOW) == ({}, {})
    assert run_child(find("training-step", "before"), "smoke", tmp_path, **HOW) == (
        {},
        {"nsys": {"notice": "captured"}},
    )


def test_an_observed_part_brings_what_its_workload_saw(tmp_path):
    part = find("accumulation", "after")
    samples, told = run_child(part, "smoke", tmp_path, **HOW)
    assert len(samples["step_ns"]) == part.counts("smoke")["repetitions"] == told["counts"]["repetitions"]
    assert len(samples["sum/bf16"]) == told["parameters"]["count"] / told["parameters"]["block"]
    assert "loss" not in samples
    ranges = nsightkit.load(tmp_path / "trace.json.gz")["ranges"]["name"].tolist()
    assert ranges.count("step") == ranges.count("bf16") == part.counts("smoke")["active"]


def test_parts_in_one_process_give_what_they_give_alone(tmp_path):
    """The form of the samples, the sizes and what is computed; times are their own."""
    parts = {name: find("ceilings", name) for name in ("fp32", "before", "copy")}
    folders = {tmp_path / name: part for name, part in parts.items()}
    for folder in (*folders, alone := tmp_path / "alone"):
        folder.mkdir()
    how = HOW | {"command": "record --only {part}"}
    assert child.run_children(folders, "smoke", **how) == [None] * 3
    for folder, part in folders.items():
        assert {path.name for path in folder.iterdir()} == {child.RESULT, "trace.json.gz"}
        samples, provenance = child.read_result(folder)
        by_itself, its_provenance = run_child(part, "smoke", alone, **how)
        assert {metric: len(values) for metric, values in samples.items()} == {
            metric: len(values) for metric, values in by_itself.items()
        }
        assert samples["loss"] == by_itself["loss"], "the same seeds, untouched by the parts before"
        changing = {"utc": None, "duration_s": None}
        assert provenance | changing == its_provenance | changing
        assert provenance["command"] == f"record --only ceilings/{part.name}"
        names = [nsightkit.load(place / "trace.json.gz")["ops"]["name"].astype(str) for place in (folder, alone)]
        assert names[0].tolist() == names[1].tolist(), "no events of the parts before"


def test_a_part_that_fails_leaves_the_others_of_its_process(tmp_path):
    parts = [find("ceilings", "fp32"), TINY, find("ceilings", "copy")]
    folders = {tmp_path / str(number): part for number, part in enumerate(parts)}
    for folder in folders:
        folder.mkdir()
    (tmp_path / "0" / "trace.json.gz").mkdir()  # its profile cannot be written
    (tmp_path / "0" / child.RESULT).touch()
    first, *others = child.run_children(folders, "smoke", **HOW)
    assert others == [None, None]
    assert "ceilings/fp32 (smoke) was not measured" in f"{first}"
    assert "trace.json.gz" in f"{first}"
    assert any("Traceback" in note for note in first.__notes__), "all that the process wrote"
    assert (tmp_path / "0" / child.FAILURE).is_file()
    assert not (tmp_path / "0" / child.RESULT).exists(), "nothing is left of an earlier run"


def test_a_dry_run_of_the_recorder_goes_the_whole_way(tmp_path, monkeypatch):
    monkeypatch.setenv("PLANTED_API_KEY", "s3cr3t-value")
    rows = record.record(["gpu-util/one-thread", "starved-input"], out=tmp_path, dry_run=True)
    assert [row["status"] for row in rows] == ["recorded"] * 3, rows
    for part in ("before", "after"):
        place = tmp_path / "starved-input" / "no-gpu" / part
        told = json.loads((place / "provenance.json").read_text())
        assert told["kind"] == "dry-run"
        assert told["gpu"] is None
        assert told["parameters"]["starved"] == (part == "before")
        samples = pd.read_parquet(place / "samples.parquet")
        counted = samples["metric"].value_counts().to_dict()
        assert counted["step_ns"] == counted["data_wait_ns"] == 12
        trace = nsightkit.load(place / "trace")
        names = trace["ranges"]["name"].value_counts()
        # the active steps, and nothing around them
        assert all(names[phase] == 3 for phase in ("step", "data", "copy", "forward", "backward", "optimizer"))
        assert trace.size("ops") > 100
        # one process decodes between the steps, or two others ahead of them
        assert any("aten::" in name for name in trace["ops"]["name"].unique())
        for path in place.rglob("*"):
            if path.is_file():
                assert b"s3cr3t-value" not in path.read_bytes()
                assert str(Path.home()).encode() + b"/" not in path.read_bytes()
    assert {r.state for r in recordings.find(find("starved-input", "before"), tmp_path)} == {"refused"}
    assert not list(tmp_path.rglob(".*"))


def test_it_forks_where_joblib_has_set_how_processes_start(tmp_path):
    """Sphinx-Gallery builds pages side by side in joblib's processes."""
    pytest.importorskip("joblib.externals.loky.backend.context")  # it makes the method known
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("loky", force=True)
    try:
        samples, _ = run_child(TINY, "smoke", tmp_path, **HOW)
        assert multiprocessing.get_start_method() == "loky"
    finally:
        multiprocessing.set_start_method(before, force=True)
    assert samples["loss"]
