"""The recorder: its order, its budget, what it keeps of failures, and that nothing is lost when it is killed."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from nsightkit.errors import NsightkitError, UsageError
from nsightkit.investigations import child, packing, record, recordings, what_runs
from nsightkit.investigations import parts as investigations
from nsightkit.investigations.parts import Part, find

BENCH = Path(__file__).parents[1] / "bench"
GPU = "Planted GPU"
STEP = {"ph": "X", "cat": "user_annotation", "name": "step", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0}
TRACE = json.dumps({"schemaVersion": 1, "traceEvents": [STEP]})


def facts(part: Part, mode: str = "live", **changes: object) -> dict[str, Any]:
    return {
        "format": what_runs.FORMAT, "kind": "measured" if mode == "live" else "dry-run",
        "investigation": part.investigation, "part": part.name, "key": recordings.part_key(part, mode),
        "parameters": {}, "counts": part.counts(mode),
        "gpu": {"name": GPU} if mode == "live" else None, "utc": "2026-01-02T03:04:05+00:00", "duration_s": 1.5,
        **changes,
    }  # fmt: skip


class Planted:
    """Plays the processes: each part leaves a result, or fails as it is told."""

    def __init__(self) -> None:
        self.measured: list[list[str]] = []
        self.limits: list[float] = []
        self.failing: set[str] = set()
        self.before: Callable[[float], None] = lambda timeout_s: None

    def run_children(self, folders: Mapping[Path, Part], mode: str, *, timeout_s: float, **_: object) -> list[Any]:
        self.measured.append([f"{part.investigation}/{part.name}" for part in folders.values()])
        self.limits.append(timeout_s)
        self.before(timeout_s)
        return [self._one(folder, part, mode) for folder, part in folders.items()]

    def _one(self, folder: Path, part: Part, mode: str) -> NsightkitError | None:
        if {part.investigation, f"{part.investigation}/{part.name}"} & self.failing:
            error = NsightkitError(f"{part.name} was not measured: CUDA error:\nlost")
            error.add_note("line 1\nall that it wrote\nline 3")
            return error
        with gzip.open(folder / "trace.json.gz", "wt") as stream:
            stream.write(TRACE)
        if part.measured == "remembered":
            (folder / "snapshot.pickle").write_bytes(pickle.dumps({"segments": []}))
        result = {"samples": {"step_ns": [5, 7]}, "provenance": facts(part, mode)}
        (folder / child.RESULT).write_text(json.dumps(result))
        return None


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Planted:
    """A GPU on which everything works, and an empty folder of recordings."""
    played = Planted()
    monkeypatch.setattr(record, "gpu_name", lambda: GPU)
    monkeypatch.setattr(record, "tools", dict)
    monkeypatch.setattr(record.checks, "results", lambda *_: [])
    monkeypatch.setattr(record, "run_children", played.run_children)
    monkeypatch.setattr(record, "capture_child", lambda *_: {"notice": "nsys is not installed"})
    monkeypatch.setenv("NSIGHTKIT_RECORDINGS", str(tmp_path / "recordings"))
    return played


def where() -> Path:
    return recordings.folder()


def by_status(rows: list[dict[str, Any]], status: str) -> list[str]:
    return [f"{row['investigation']}/{row['part']}" for row in rows if row["status"] == status]


# -- what is recorded ----------------------------------------------------------------------------------------------


def test_without_a_gpu_nothing_is_recorded(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "gpu_name", lambda: None)
    with pytest.raises(NsightkitError, match="recordings are made on a GPU"):
        record.record()
    with pytest.raises(UsageError, match="another folder"):
        record.record(out=where(), dry_run=True)
    assert not where().exists()


def test_parts_can_be_chosen(planted: Planted) -> None:
    rows = record.record(only=["hidden-sync", "gpu-util/training"])
    assert by_status(rows, "recorded") == ["hidden-sync/before", "hidden-sync/after", "gpu-util/training"]
    assert {row["state"] for row in recordings.status() if row["state"] != "absent"} == {"current"}
    assert not (where() / recordings.RAW).exists()
    with pytest.raises(UsageError, match="starved-input/before"):
        record.record(only=["starved"])


def test_what_is_recorded_on_this_kind_of_gpu_is_kept(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    record.record(only=["hidden-sync"])
    assert by_status(record.record(only=["hidden-sync"]), "kept") == ["hidden-sync/before", "hidden-sync/after"]
    monkeypatch.setattr(record, "gpu_name", lambda: "Another")
    assert len(by_status(record.record(only=["hidden-sync"]), "recorded")) == 2


def test_ceilings_share_a_process_and_other_parts_do_not(planted: Planted) -> None:
    rows = record.record(only=["roofline", "ceilings"])
    three = [f"ceilings/{name}" for name in ("before", "fp32", "copy")]
    assert planted.measured[:3] == [three, ["roofline/before"], ["roofline/after"]]
    assert [len(batch) for batch in planted.measured[3:]] == [11]
    assert len(by_status(rows, "recorded")) == 16


def test_the_plan_names_parts_estimates_and_pages(planted: Planted) -> None:
    record.record(only=["hidden-sync/before"])
    rows = record.plan(only=["hidden-sync", "tiny-kernels"])
    assert [f"{row['investigation']}/{row['part']}" for row in rows] == [
        "hidden-sync/after", "tiny-kernels/before", "tiny-kernels/after"
    ]  # fmt: skip
    assert [row["completes"] for row in rows] == ["hidden-sync", "", "tiny-kernels"]
    assert rows[-1]["total_s"] == sum(row["estimate_s"] for row in rows) + 3 * record.START_S


def test_recordings_replace_estimates_even_when_they_are_stale(
    planted: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    record.record(only=["hidden-sync", "starved-input/before"])
    for name, key, seconds in (("hidden-sync/planted-gpu/after", "0" * 32, 77.5), ("starved-input", None, 0)):
        for path in where().glob(f"{name}/**/provenance.json"):
            path.write_text(json.dumps(json.loads(path.read_text()) | {"duration_s": seconds, "key": key}))
    (row,) = record.plan(only=["hidden-sync"])
    assert (row["part"], row["estimate_s"]) == ("after", 77.5)
    monkeypatch.setattr(record, "gpu_name", lambda: "Another")
    expected = [part.seconds for part in investigations.INVESTIGATIONS["hidden-sync"].values()]
    assert [row["estimate_s"] for row in record.plan(only=["hidden-sync"])] == expected


def test_a_dry_run_says_the_plan_first(planted: Planted, tmp_path: Path) -> None:
    said: list[str] = []
    rows = record.record(only=["hidden-sync", "training-step/before"], out=tmp_path, dry_run=True, echo=said.append)
    assert [" ".join(line.split()) for line in said[:3]] == [
        "8 s hidden-sync/before, 7 s", "16 s hidden-sync/after, 7 s; completes hidden-sync",
        "26 s training-step/before, 9 s",
    ]  # fmt: skip
    assert len(by_status(rows, "recorded")) == 3
    assert by_status(rows, "not captured") == ["training-step/before"]
    assert not {row["state"] for row in recordings.status(tmp_path)} & {"current", "stale"}


def test_parts_that_need_what_does_not_work_are_skipped(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = [
        {"check": "fp8", "ok": False, "detail": "no such unit"}, {"check": "nsys", "ok": False, "detail": "no report"},
        {"check": "bf16", "ok": None, "detail": "no time"},
    ]  # fmt: skip
    monkeypatch.setattr(record.checks, "results", lambda *_: checked)
    rows = record.record(only=["ceilings", "training-step/before"])
    (skipped,) = [row for row in rows if row["status"] == "skipped"]
    assert (skipped["part"], "no such unit" in skipped["detail"]) == ("fp8", True)
    assert len(by_status(rows, "recorded")) == 14
    assert not by_status(rows, "not captured"), "nsys is not tried"
    again = record.record(only=["ceilings/fp8"], preflight=False)
    assert by_status(again, "recorded") == ["ceilings/fp8"]


def test_the_next_child_starts_while_the_last_result_is_written(
    planted: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = threading.Event()
    written: list[str] = []
    planted.before = lambda _: second.set() if len(planted.measured) == 2 else None
    real = recordings.write

    def slowly(*arguments: Any, **named: Any) -> Path:
        assert second.wait(60), "the next child had not started"
        written.append(arguments[2]["part"])
        return real(*arguments, **named)

    monkeypatch.setattr(record.recordings, "write", slowly)
    rows = record.record(only=["gate"])
    assert written == [part.partition("/")[2] for part in by_status(rows, "recorded")], "in order"
    assert len(written) == 6


def test_what_is_there_is_packed_with_every_page_and_at_the_end(
    planted: Planted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    packed: list[list[str]] = []

    def pack(root: Path, folder: Path, part_mb: float, **_: object) -> list[Path]:
        assert (root, folder, part_mb) == (where(), tmp_path / "packed", 9.0)
        packed.append(sorted(str(path.parent.relative_to(root)) for path in root.glob("*/*/*/provenance.json")))
        if len(packed) == 2:
            raise NsightkitError("no space")  # it is tried again
        return []

    monkeypatch.setattr(packing, "pack", pack)
    record.record(only=["hidden-sync", "tiny-kernels", "gate/before"], pack=tmp_path / "packed", part_mb=9.0)
    assert [len(names) for names in packed] == [0, 2, 4, 5], "at the start too, for what cannot be packed is said then"
    planted.before = lambda _: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        record.record(only=["autocast"], pack=tmp_path / "packed", part_mb=9.0)
    assert len(packed) == 6, "an interrupted command packs too"


# -- failures ------------------------------------------------------------------------------------------------------


def test_the_recorder_resumes_and_survives_a_failure(planted: Planted) -> None:
    planted.failing = {"gpu-util/training"}
    said: list[str] = []
    only = ["gpu-util", "starved-input", "memory-snapshot"]
    first = record.record(only=only, echo=said.append)
    assert [row["status"] for row in first] == ["recorded"] * 6 + ["failed"]
    assert planted.measured.count(["gpu-util/training"]) == 2, "once more"
    assert planted.measured[-1] == ["gpu-util/training"], "after all others"
    detail, kept = first[-1]["detail"], where() / recordings.RAW / "gpu-util" / "training"
    assert detail == f"training was not measured: CUDA error: lost; all of it is in {kept}"
    assert "all that it wrote\nline 3" in (kept / child.FAILURE).read_text()
    planted.failing = set()
    planted.measured.clear()
    second = record.record(only=[*only, "matrix/model_a"])
    assert planted.measured == [["matrix/model_a"], ["gpu-util/training"]], "last in the next call too"
    assert {row["status"] for row in second if row["part"] not in ("training", "model_a")} == {"kept"}
    assert not list(where().rglob(".raw/*/*"))


def test_of_parts_in_one_process_those_that_failed_come_again_alone(planted: Planted) -> None:
    planted.failing = {"ceilings/fp8", "ceilings/copy"}
    rows = record.record(only=["ceilings"])
    assert [len(batch) for batch in planted.measured] == [14, 1, 1]
    assert by_status(rows, "failed") == ["ceilings/fp8", "ceilings/copy"]
    assert len(by_status(rows, "recorded")) == 12


def test_a_result_survives_an_error_where_it_is_written(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    real = recordings.write

    def full(*_: object, **__: object) -> Path:
        raise OSError("disk full")

    monkeypatch.setattr(record.recordings, "write", full)
    rows = record.record(only=["memory-snapshot/full"])
    assert by_status(rows, "failed") == ["memory-snapshot/full"]
    kept = where() / recordings.RAW / "memory-snapshot" / "full"
    assert {path.name for path in kept.iterdir()} == {
        child.RESULT, child.FAILURE, "trace.json.gz", "snapshot.pickle"
    }  # fmt: skip
    assert "disk full" in (kept / child.FAILURE).read_text()
    monkeypatch.setattr(record.recordings, "write", real)
    planted.measured.clear()
    rows = record.record(only=["memory-snapshot/full"])
    assert (by_status(rows, "recorded"), planted.measured) == (["memory-snapshot/full"], [])
    assert not kept.exists()


def test_a_result_of_other_code_is_measured_anew(planted: Planted) -> None:
    part = find("hidden-sync", "before")
    raw = where() / recordings.RAW / part.investigation / part.name
    raw.mkdir(parents=True)
    (raw / child.RESULT).write_text(json.dumps({"samples": {}, "provenance": facts(part, key="0" * 32)}))
    rows = record.record(only=["hidden-sync/before"])
    assert (by_status(rows, "recorded"), len(planted.measured)) == (["hidden-sync/before"], 1)


# -- time ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time that passes as the parts that are played take it."""
    now = [1000.0]
    monkeypatch.setattr(record.time, "monotonic", lambda: now[0])
    return now


def test_a_part_begins_only_when_it_fits(planted: Planted, clock: list[float]) -> None:
    def take(_: float) -> None:
        clock[0] += sum(find(*each.split("/")).seconds for each in planted.measured[-1])

    planted.before = take
    seconds = {part.investigation: part.seconds for part in investigations.parts()}
    need = 2 * seconds["hidden-sync"] + seconds["ledger"]
    rows = record.record(only=["hidden-sync", "ledger"], budget_s=need + record.START_S)
    assert by_status(rows, "recorded") == ["hidden-sync/before", "hidden-sync/after", "ledger/before"]
    assert len(by_status(rows, "over budget")) == 3
    assert clock[0] - 1000 <= need + record.START_S
    rows = record.record(only=["ceilings"], budget_s=5 * seconds["ceilings"] + record.START_S)
    assert len(by_status(rows, "recorded")) == 5, "of a process with several, as many as fit"


def test_a_child_that_overruns_is_ended_and_has_not_failed(planted: Planted, clock: list[float]) -> None:
    def hang(timeout_s: float) -> None:
        clock[0] += timeout_s

    planted.before, planted.failing = hang, {"hidden-sync"}
    rows = record.record(only=["hidden-sync"], budget_s=40.0)
    assert planted.limits == [40.0]
    assert [row["status"] for row in rows] == ["over budget"] * 2
    assert not (where() / recordings.RAW).exists()
    # one that hangs does not get all the time there is, and is no failure of the others
    planted.limits.clear()
    rows = record.record(only=["hidden-sync"], budget_s=10_000.0)
    assert max(planted.limits) < 200
    assert [row["status"] for row in rows] == ["failed"] * 2


# -- second captures -----------------------------------------------------------------------------------------------


def test_second_captures_come_last_and_can_be_had_later(
    planted: Planted, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, float]] = []
    works = False

    def capture(part: Part, mode: str, folder: Path, timeout_s: float) -> dict[str, Any]:
        assert mode == "live"
        asked.append((f"{part.profiled} {part.name}", timeout_s))
        clock[0] += timeout_s if not works else 5
        if not works:
            return {"notice": "not done in time"}
        made = folder / recordings.NCU
        made.write_text('"ID","Kernel Name"\n') if part.profiled == "ncu" else (folder / recordings.NSYS).mkdir()
        return {"command": f"{part.profiled} ...", "steps": 3}

    monkeypatch.setattr(record, "capture_child", capture)
    only = ["training-step", "limiters", "gpu-util"]
    rows = record.record(only=only)
    assert len(planted.measured) == 6
    assert asked == [("nsys before", 45.0), ("ncu before", 45.0)], "one cap for all, and each tool in its turn"
    assert [row["status"] for row in rows] == ["recorded"] * 6 + ["not captured"] * 4
    planted.measured.clear()
    asked.clear()
    works = True
    real_write, real_load = recordings.write, record.load
    monkeypatch.setattr(record, "load", lambda path, **_: path if path.name == recordings.NSYS else real_load(path))
    added: list[dict[str, Any]] = []

    def write(trace: Any, samples: pd.DataFrame, provenance: Mapping[str, Any], root: Path, **more: Any) -> Path:
        added.append({"step_ns": samples["value"].tolist(), "events": trace.size("ranges"), **provenance, **more})
        return real_write(trace, samples, provenance, root)

    monkeypatch.setattr(record.recordings, "write", write)
    rows = record.record(only=only)
    assert planted.measured == [], "nothing is measured again"
    assert [name for name, _ in asked] == ["nsys after", "ncu after", "nsys before", "ncu before"], "untried ones first"
    assert by_status(rows, "captured") == [
        "training-step/after", "limiters/after", "training-step/before", "limiters/before"
    ]  # fmt: skip
    assert {bool(one["nsys"]) for one in added if "training" in one["investigation"]} == {True}
    assert {one["ncu"].name for one in added if "limiters" in one["investigation"]} == {recordings.NCU}
    assert {(tuple(one["step_ns"]), one["events"]) for one in added} == {((5.0, 7.0), 1)}
    assert {row["state"] for row in recordings.status() if row["investigation"] in only} == {"current"}


def test_time_is_left_for_second_captures(planted: Planted, clock: list[float]) -> None:
    def take(_: float) -> None:
        clock[0] += 10

    planted.before = take
    rows = record.record(only=["training-step", "matrix"], budget_s=160.0)
    assert by_status(rows, "not captured") == ["training-step/before", "training-step/after"]
    # two at 10 s, and then what leaves 90 s
    assert len(by_status(rows, "recorded")) == 2 + 5


# -- a window, and a recorder that is killed -----------------------------------------------------------------------


def test_a_window_completes_nineteen_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty-six minutes in three commands, with the times that were estimated, a third of the overhead that was."""
    monkeypatch.syspath_prepend(BENCH)
    import recorder

    pages, rows, late = recorder.window(tmp_path, overhead_s=4.0)
    assert len(pages) >= 19, pages
    assert [page for _, page in pages][-1] in ("ladder", "decode")
    assert max(late) <= 10
    recorded = by_status(rows, "recorded")
    assert len(recorded) == len(set(recorded)), "nothing twice"
    assert len(by_status(rows, "captured")) == 4


TRIVIAL = """
import json, pathlib, shutil, time, uuid

def main(parts, mode, **_):
    here = pathlib.Path(__file__).parent
    facts = json.loads((here / "facts.json").read_text())
    for folder, name in parts.items():
        with (here / "ran.txt").open("a") as log:
            log.write(f"begin {name} -\\n")
        time.sleep(0.03)
        folder, own = pathlib.Path(folder), str(uuid.uuid4())
        shutil.copy(here / "trace.json.gz", folder)
        made = {"samples": {"step_ns": [1, 2]}, "provenance": {**facts[name], "command": own}}
        (folder / "result.new").write_text(json.dumps(made))
        (folder / "result.new").replace(folder / "result.json")
        with (here / "ran.txt").open("a") as log:
            log.write(f"end {name} {own}\\n")
    return {}
"""
RECORDER = """
import os, pathlib, random, signal, sys, time
from nsightkit.capture import children
from nsightkit.investigations import child, packing, record
children.IMPORTED[:] = ["nsightkit.capture.children"]  # it is not about what takes long
child.ask_child = lambda _module, job, timeout_s, start: children.ask_child("trivial", job, timeout_s, start)
record.gpu_name, record.tools = lambda: "Planted GPU", dict
here, seed, *only = sys.argv[1:]
here, moments = pathlib.Path(here), random.Random(int(seed))
lines = lambda: len((here / "ran.txt").read_text().splitlines())
for killed in (True, True, True, False):
    recorder = os.fork()
    if not recorder:
        record.record(only, out=here / "out", pack=here / "packed", preflight=False)
        os._exit(0)
    if killed:
        enough = lines() + moments.randint(1, 6)
        while lines() < enough:
            time.sleep(0.003)
        time.sleep(moments.random() / 20)
        os.kill(recorder, signal.SIGKILL)
    status = os.waitpid(recorder, 0)[1]
    for packed in (here / "packed").glob("[!.]*.zip"):
        packing.unpack([packed], here / "whole")
sys.exit(status != 0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")
def test_a_recorder_that_is_killed_loses_nothing_and_records_nothing_twice(tmp_path: Path) -> None:
    """Three times, at random moments; then it is let to its end."""
    only = ["hidden-sync", "gate", *(f"ceilings/{name}" for name in ("fp32", "copy", "triad", "read"))]
    chosen = [part for part in investigations.parts() if {part.investigation, str(part)} & {*only}]
    (tmp_path / "trivial.py").write_text(TRIVIAL)
    (tmp_path / "facts.json").write_text(json.dumps({str(part): facts(part) for part in chosen}))
    with gzip.open(tmp_path / "trace.json.gz", "wt") as stream:
        stream.write(TRACE)
    (ran := tmp_path / "ran.txt").touch()
    seed = random.randrange(10**6)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    subprocess.run(
        [sys.executable, "-c", RECORDER, str(tmp_path), str(seed), *only], env=environment, check=True, timeout=300
    )
    log = [line.split() for line in ran.read_text().splitlines()]
    ends = {name: own for what, name, own in log if what == "end"}
    assert len(ends) == sum(what == "end" for what, *_ in log) == len(chosen), f"seed {seed}: {log}"
    assert sum(what == "begin" for what, *_ in log) <= len(chosen) + 3, f"seed {seed}: at most one is lost with each"
    for part in chosen:
        (found,) = recordings.find(part, tmp_path / "out")
        assert found.state == "current"
        assert found.provenance["command"] == ends[str(part)], f"seed {seed}: a result was lost"
    assert not list((tmp_path / "out").rglob(".raw/*/*")), f"seed {seed}"
    rows = packing.unpack(sorted((tmp_path / "packed").iterdir()), tmp_path / "back")
    assert len(by_status(rows, "placed")) == len(chosen)
