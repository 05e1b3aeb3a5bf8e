"""Parts whose memory is recorded: what grows is what the workload keeps, and the file is safe to keep and to share."""

from __future__ import annotations

import dataclasses
import getpass
import importlib.util
import json
import os
import pickle
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from make_snapshot import T0_US, Allocator, leaking_program

import nsightkit
from nsightkit.analysis.memory import snapshot as analysis
from nsightkit.capture import memory, provenance
from nsightkit.errors import NsightkitError, TraceError
from nsightkit.investigations import measurement as investigation
from nsightkit.investigations import parts as investigations
from nsightkit.investigations import record, recordings, ways_to_measure, what_runs
from nsightkit.trace import snapshot as reader
from nsightkit.trace.model import Trace, TraceMeta

torch = pytest.importorskip("torch")

PART = investigations.find("memory-snapshot", "before")
PLAIN = investigations.find("starved-input", "before")


# -- small, on a CPU -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smoke() -> Iterator[dict[str, investigation.Measurement]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NSIGHTKIT_MODE", "smoke")
        yield {
            part: nsightkit.investigations.measure("memory-snapshot", part)
            for part in investigations.INVESTIGATIONS["memory-snapshot"]
        }


def ends(run: investigation.Measurement) -> list[int]:
    steps = analysis.ranges(run.snapshot, "^step$")["to_event"].tolist()
    return steps[: int(run.values("steps")[0])]


def test_memory_grows_by_what_the_graph_keeps_and_by_nothing_else(smoke: dict[str, Any]) -> None:
    before, after = smoke["before"], smoke["after"]
    sizes = before.parameters
    number = 4
    kept = 2 * 4 * sizes["batch"] * sizes["context"] * sizes["vocabulary"]
    grown = analysis.growth(before.snapshot, ends(before))
    assert len(ends(before)) == before.provenance["counts"]["active"] == 3
    # the two tensors and their number in the hook; the loss, which lm.Run keeps without its graph
    assert grown["least_bytes"].sum() == kept + 2 * number
    assert (grown["grown_bytes"] == 2 * grown["least_bytes"]).all()
    hook = grown[grown["site"].str.contains(r"^leak\.py:\d+ _watch$")]
    assert hook["least_bytes"].sum() == kept + number
    assert set(hook["category"]) == {"activations"}
    rest = analysis.growth(after.snapshot, ends(after))
    assert rest["least_bytes"].tolist() == [number, number]


def test_the_snapshot_says_what_was_counted_beside_it(smoke: dict[str, Any]) -> None:
    for run in smoke.values():
        told = analysis.summary(run.snapshot)
        assert told["peak_bytes"] == run.median("peak_bytes")
        assert told["end"]["allocated_bytes"] == run.median("allocated_bytes")
        assert told["start"]["allocated_bytes"] == 0
        assert told["notes"] == []
        # the model is still there when it is taken, and its weights are known for what they are
        at_end = {row["category"]: row["bytes"] for row in analysis.summary(run.snapshot, moment="end")["by_category"]}
        assert at_end["weights"] > 3_000_000
        # but for two counts of steps and the scalars, AdamW's moments are twice the weights
        assert at_end["optimizer states"] == pytest.approx(2 * at_end["weights"], rel=0.01)
        assert run.snapshot_path.stat().st_size < 1_000_000


def test_a_full_device_is_in_the_snapshot_and_names_another_line(smoke: dict[str, Any]) -> None:
    full = smoke["full"]
    oom = analysis.summary(full.snapshot)["oom"]
    limit = full.parameters["limit_bytes"]
    assert full.values("out_of_memory").tolist() == [1]
    assert oom["count"] == 1
    assert oom["allocated_bytes"] + oom["device_free_bytes"] == limit
    assert oom["device_free_bytes"] < oom["requested_bytes"]
    holders = analysis.sites(full.snapshot, "oom")
    hook = holders["site"].str.contains("_watch")
    assert holders.loc[hook, "bytes"].sum() > 0.4 * limit
    assert "_watch" not in oom["site"]
    assert [smoke[part].values("out_of_memory").tolist() for part in ("before", "after")] == [[0], [0]]


def test_torch_s_own_viewer_takes_the_file(smoke: dict[str, Any]) -> None:
    from torch.cuda import _memory_viz as viz

    for run in smoke.values():
        found = pickle.loads(run.snapshot_path.read_bytes())
        assert str(len(found["segments"])) in viz.segsum(found)
        assert "alloc" in viz.trace(found)
        assert "MemoryViz" in viz.trace_plot(found)


def test_provenance_says_what_was_recorded(smoke: dict[str, Any]) -> None:
    assert dict(provenance.rows(smoke["before"].provenance))["Memory snapshot of"] == "tensors, counted on a CPU"
    assert smoke["before"].trace["ranges"]["name"].tolist().count("step") == 1
    assert smoke["before"].provenance["key"] == recordings.part_key(PART, "smoke")


def test_a_part_without_one_has_none() -> None:
    run = investigation.Measurement(Path("absent"), "smoke", recordings.frame({}), {})
    assert run.snapshot is None


# -- on a GPU that is a miniature allocator ------------------------------------------------------------------------


class Work:
    """A model of one weight that keeps something every step; `room` allocations, then memory is full."""

    def __init__(self, allocator: Allocator, room: int) -> None:
        self.allocator, self.room, self.parameters = allocator, room, {"a": 1}
        self.weight = allocator.malloc(1 << 20)

    def step(self) -> None:
        if not self.room:
            self.allocator.oom(5 << 20, 7)
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        self.room -= 1
        self.allocator.malloc(5 << 20)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.allocator.free(self.weight)


@pytest.mark.parametrize(("limit", "steps"), [(None, 3), (1 << 30, 4)])
def test_a_gpu_s_allocator_is_recorded_and_set_free(
    limit: int | None, steps: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    allocator = Allocator()
    fractions: list[float] = []
    calls: list[dict[str, Any]] = []

    def recorded(**how: Any) -> None:
        calls.append(how)

    cuda = torch.cuda
    for name, value in {
        "init": lambda: None,
        "is_available": lambda: True,
        "synchronize": lambda: None,
        "empty_cache": allocator.empty_cache,
        "mem_get_info": lambda *_: (3 << 30, 4 << 30),
        "memory_allocated": lambda: allocator.counted()[0],
        "max_memory_allocated": lambda: max(row[0] for row in allocator.truth),
        "memory_reserved": lambda: allocator.counted()[3],
        "set_per_process_memory_fraction": lambda fraction, _: fractions.append(fraction),
    }.items():
        monkeypatch.setattr(cuda, name, value)
    monkeypatch.setattr(cuda.memory, "_record_memory_history", recorded)
    monkeypatch.setattr(cuda.memory, "_snapshot", allocator.snapshot)
    monkeypatch.setattr(
        ways_to_measure.torch_profiler, "profile_steps", lambda step, trace, **_: trace.write_text("{}")
    )
    path = tmp_path / "snapshot.pickle"
    parameters = {} if limit is None else {"limit_bytes": limit}
    samples, resolved = ways_to_measure.remembered(
        lambda *_, **__: Work(allocator, 3 if limit is None else 4),
        "cuda", parameters, {"active": 3}, tmp_path,
    )  # fmt: skip
    assert samples["steps"] == [steps]
    assert samples["out_of_memory"] == [int(limit is not None)]
    assert fractions == ([1.0] if limit is None else [0.25, 1.0])
    assert calls[0]["context"] == "alloc"
    assert calls[-1]["enabled"] is None
    told = analysis.summary(reader.read(path))
    assert told["end"]["allocated_bytes"] == samples["allocated_bytes"][0] == (1 << 20) + steps * (5 << 20)
    assert told["peak_bytes"] == samples["peak_bytes"][0]
    assert told["end"]["reserved_bytes"] == samples["reserved_bytes"][0]
    assert samples["context_bytes"][0] == (1 << 30) - samples["reserved_bytes"][0]
    assert (told["oom"] is None) == (limit is None)
    assert resolved == {"a": 1, **parameters}


def test_an_error_without_a_limit_goes_on(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ALLOC_FAILED"):
        ways_to_measure.remembered(lambda *_, **__: Work(Allocator(), 1), "cpu", {}, {"active": 3}, tmp_path)


# -- nobody's names ------------------------------------------------------------------------------------------------

PROGRAM = """
import torch
from torch.profiler import record_function

class Work:
    parameters = {}
    kept = []
    def step(self):
        with record_function("load s3cr3t-value for planted-host"):
            self.kept.append(torch.ones(1000))
    def __enter__(self):
        return self
    def __exit__(self, *_):
        pass

def start(device):
    return Work()
"""


def test_no_name_of_anybody_reaches_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "planted-host")
    monkeypatch.setattr(getpass, "getuser", lambda: "planted-user")
    monkeypatch.setenv("PLANTED_SECRET", "s3cr3t-value")
    home = tmp_path / "home" / "planted-user" / "client-x"
    home.mkdir(parents=True)
    (home / "program.py").write_text(PROGRAM)
    spec = importlib.util.spec_from_file_location("program", home / "program.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    path = tmp_path / "snapshot.pickle"
    ways_to_measure.remembered(program.start, "cpu", {}, {"active": 2}, tmp_path)
    written = path.read_bytes()
    for name in ("planted-user", "planted-host", "s3cr3t-value", "client-x", str(tmp_path)):
        assert name.encode() not in written
    found = reader.read(path)
    assert analysis.sites(found, "end")["site"].tolist() == ["program.py:10 step"]
    assert analysis.ranges(found)["name"].tolist() == ["load [secret] for [host]"] * 2


def test_equal_stacks_are_written_once(tmp_path: Path) -> None:
    def stack() -> list[dict[str, Any]]:
        return [{"name": f"f{i}", "filename": f"/home/someone/{i}.py", "line": i} for i in range(30)]

    allocator = Allocator()
    for _ in range(500):
        allocator.malloc(512, frames=stack())
    path = memory.write(allocator.snapshot(), tmp_path / "s.pickle")
    assert path.stat().st_size < 130 * len(allocator.events)
    assert len(reader.read(path).stack_bounds) == 2


# -- recordings ----------------------------------------------------------------------------------------------------


def facts(part: investigations.Part, **changes: object) -> dict[str, object]:
    return {
        "format": what_runs.FORMAT, "kind": "measured", "investigation": part.investigation, "part": part.name,
        "key": recordings.part_key(part), "parameters": {"batch": 2}, "counts": part.counts("live"),
        "gpu": {"name": "Planted GPU"}, "utc": "2026-01-02T03:04:05+00:00", **changes,
    }  # fmt: skip


def plant(where: Path, part: investigations.Part = PART, snapshot: Path | None = None, **changes: object) -> Path:
    trace = Trace.from_frames({}, TraceMeta(tool="planted"))
    samples = recordings.frame({"steps": [3]})
    return recordings.write(trace, samples, facts(part, **changes), where, snapshot=snapshot)


@pytest.fixture
def taken(tmp_path: Path) -> Path:
    program = leaking_program(tokens=64, vocabulary=512, parameters=10**6, keep_graph=True)
    return memory.write(program, tmp_path / "taken.pickle")


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(investigation, "has_gpu", lambda: False)
    monkeypatch.setenv("NSIGHTKIT_RECORDINGS", str(tmp_path / "recordings"))
    monkeypatch.setenv("NSIGHTKIT_MODE", "replay")
    return tmp_path / "recordings"


def test_a_recording_brings_its_snapshot(where: Path, taken: Path) -> None:
    place = plant(where, snapshot=taken)
    assert sorted(p.name for p in place.iterdir()) == ["provenance.json", "samples.parquet", "snapshot.pickle", "trace"]
    run = nsightkit.investigations.measure("memory-snapshot", "before")
    assert run.mode == "replay"
    assert run.snapshot_path == place / "snapshot.pickle"
    assert reader.plain(run.snapshot_path) == reader.plain(taken)
    grown = analysis.growth(run.snapshot, analysis.ranges(run.snapshot, "step")["to_event"].tolist())
    assert grown["least_bytes"].tolist() == [2 * 4 * 64 * 512 + 512]
    assert b"someone" not in taken.read_bytes()


def test_it_is_valid_only_with_its_key_and_its_snapshot(where: Path, taken: Path) -> None:
    plant(where, snapshot=taken, key="0" * 32)
    assert [r.state for r in recordings.find(PART)] == ["stale"]
    plant(where)
    assert [(r.state, r.reason) for r in recordings.find(PART)] == [("refused", "it has no memory snapshot")]
    with pytest.raises(NsightkitError, match="no valid recording"):
        nsightkit.investigations.measure("memory-snapshot", "before")
    # a part that takes none needs none
    plant(where, PLAIN)
    run = nsightkit.investigations.measure("starved-input", "before")
    assert (run.mode, run.snapshot) == ("replay", None)


class Hostile:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_a_hostile_snapshot_is_refused_and_runs_nothing(where: Path, taken: Path, tmp_path: Path) -> None:
    place = plant(where, snapshot=taken)
    proof = tmp_path / "ran"
    hostile = pickle.dumps({"segments": [], "device_traces": [[Hostile(proof)]]})
    (place / "snapshot.pickle").write_bytes(hostile)
    run = nsightkit.investigations.measure("memory-snapshot", "before")
    with pytest.raises(TraceError, match="mkdir"):
        _ = run.snapshot
    taken.write_bytes(hostile)
    with pytest.raises(TraceError, match="mkdir"):
        plant(where, snapshot=taken)
    assert not proof.exists()
    assert (place / "snapshot.pickle").is_file()  # and the recording that was there stays


def test_the_key_covers_what_records() -> None:
    covered = what_runs.closure(PART.code)
    for name in (
        "nsightkit.investigations.ways_to_measure:remembered",
        "nsightkit.capture.memory:recording",
        "nsightkit.workloads.tensor_memory:TensorMemory",
        "nsightkit.workloads.leak:WatchedRun",
        "nsightkit.workloads.lm:Run",
    ):
        assert name in covered
    assert recordings.part_key(PART) != recordings.part_key(dataclasses.replace(PART, measured="timed"))


def test_a_dry_run_of_the_recorder_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_TOKEN", "s3cr3t-value")
    (row,) = record.record(["memory-snapshot/after"], out=tmp_path, dry_run=True)
    assert row["status"] == "recorded", row
    place = tmp_path / "memory-snapshot" / "no-gpu" / "after"
    told = json.loads((place / "provenance.json").read_text())
    assert told["snapshot"] == "tensors, counted on a CPU"
    found = reader.read(place / "snapshot.pickle")
    assert found.t0_us > T0_US
    assert str(Path(nsightkit.__file__).parents[1]).encode() not in (place / "snapshot.pickle").read_bytes()
