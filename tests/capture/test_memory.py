"""Recording memory: through every version's signature, also over an error, and without anybody's name."""

from __future__ import annotations

import getpass
import multiprocessing
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from make_snapshot import Allocator, random_program

from nsightkit.analysis.memory import snapshot as analysis
from nsightkit.capture import memory
from nsightkit.errors import UsageError
from nsightkit.trace import snapshot as reader
from nsightkit.trace.share import clean_snapshot, write_snapshot

torch = pytest.importorskip("torch")


def _of_2_11(calls: list[dict[str, Any]]) -> Callable[..., None]:
    def record(
        enabled: str | None = "all",
        context: str | None = "all",
        stacks: str = "all",
        max_entries: int = 1 << 60,
        device: Any = None,
        clear_history: bool = False,
        compile_context: bool = False,
        global_record_annotations: bool = False,
        skip_actions: list[str] | None = None,
    ) -> None:
        calls.append({k: v for k, v in locals().items() if k != "calls"})

    return record


def _of_2_3(calls: list[dict[str, Any]]) -> Callable[..., None]:
    def record(
        enabled: str | None = "all",
        context: str | None = "all",
        stacks: str = "all",
        max_entries: int = 1 << 60,
        device: Any = None,
    ) -> None:
        calls.append({k: v for k, v in locals().items() if k != "calls"})

    return record


def _of_2_0(calls: list[dict[str, Any]]) -> Callable[..., None]:
    def record(
        enabled: bool,
        record_context: bool = True,
        trace_alloc_max_entries: int = 1,
        trace_alloc_record_context: bool = False,
        device: Any = None,
        record_context_cpp: bool = False,
    ) -> None:
        if not isinstance(enabled, bool):
            raise TypeError("enabled must be bool")
        calls.append({k: v for k, v in locals().items() if k != "calls"})

    return record


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    """A device whose allocator is the miniature one."""
    allocator = random_program(1, 40)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda *_: allocator.snapshot())
    return allocator


@pytest.mark.parametrize("version", [_of_2_11, _of_2_3])
def test_every_signature_is_called_with_what_it_knows(
    version: Any, allocator: Allocator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", version(calls))
    with memory.recording(tmp_path / "s.pickle", max_entries=123, stacks="python"):
        assert len(calls) == 1
    started, stopped = calls
    assert (started["enabled"], started["stacks"], started["max_entries"]) == ("all", "python", 123)
    assert stopped["enabled"] is None
    found = reader.read(tmp_path / "s.pickle")
    assert len(found.events) == len(allocator.events)
    assert analysis.summary(found)["peak_bytes"] == max(row[0] for row in allocator.truth)
    assert list(tmp_path.iterdir()) == [tmp_path / "s.pickle"]


def test_names_are_found_in_this_process_unless_somebody_says_otherwise(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[str | None] = []

    def record(**_: Any) -> None:
        said.append(os.environ.get("TORCH_DISABLE_ADDR2LINE"))

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    for given in (None, "0"):
        monkeypatch.setenv("TORCH_DISABLE_ADDR2LINE", given or "")
        if given is None:
            monkeypatch.delenv("TORCH_DISABLE_ADDR2LINE")
        with memory.recording(tmp_path / "s.pickle"):
            pass
    assert said == ["1", "1", "0", "0"]


def _names(variable: str, value: str) -> None:
    """Ask for a stack's names, in a process that imported torch before it knew how to find them."""
    os.environ[variable] = value
    from torch._C._profiler import gather_traceback, symbolize_tracebacks

    x = torch.ones(2, requires_grad=True) * 2
    taken: list[Any] = []
    x.register_hook(lambda _: taken.append(gather_traceback(True, True, True)))
    x.sum().backward()
    ((*frames,),) = symbolize_tracebacks(taken)
    os._exit(0 if any("torch::autograd::Engine::" in frame["name"] for frame in frames) else 3)


@pytest.mark.parametrize(
    ("variable", "value", "started"),
    [("TORCH_DISABLE_ADDR2LINE", "1", False), ("TORCH_SYMBOLIZE_MODE", "addr2line", True)],
)
def test_torch_asks_how_to_find_names_when_it_needs_one(
    variable: str, value: str, started: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "addr2line"
    program.write_text(f"#!/bin/sh\ntouch {program}.started\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    child = multiprocessing.get_context("fork").Process(target=_names, args=(variable, value))
    child.start()
    child.join(60)
    assert Path(f"{program}.started").exists() == started
    assert started or child.exitcode == 0


def test_an_error_goes_on_and_leaves_its_snapshot(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", _of_2_11(calls))

    def step() -> None:
        allocator.oom(1 << 40, 5)
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError), memory.recording(tmp_path / "s.pickle"):
        step()
    oom = analysis.summary(reader.read(tmp_path / "s.pickle"))["oom"]
    assert oom["requested_bytes"] == 1 << 40
    assert calls[-1]["enabled"] is None


def test_a_signature_that_is_too_old(allocator: Allocator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert allocator.events
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", _of_2_0([]))
    with pytest.raises(UsageError, match="other arguments"), memory.recording(tmp_path / "s.pickle"):
        pass


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="CUDA GPU"), memory.recording(tmp_path / "s.pickle"):
        pass
    assert not list(tmp_path.iterdir())


def test_outputs_that_cannot_be(allocator: Allocator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", _of_2_11([]))
    assert allocator.events
    with pytest.raises(UsageError, match="folder"), memory.recording(tmp_path / "none" / "s.pickle"):
        pass
    with pytest.raises(UsageError, match="0 events"), memory.recording(tmp_path / "s.pickle", max_entries=0):
        pass
    (tmp_path / "taken").mkdir()
    with pytest.raises(UsageError, match="cannot be written"):
        memory.write(allocator.snapshot(), tmp_path / "taken")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


PATHS = {
    "/home/mallory/secret-project/train.py": "[path]/train.py",
    "C:\\Users\\mallory\\work\\model.py": "[path 2]\\model.py",
    "/home/mallory/.venv/lib/python3.11/site-packages/torch/nn/modules/module.py": (
        "[path 3]/site-packages/torch/nn/modules/module.py"
    ),
    "/opt/mallory/lib/python3.12/runpy.py": "[path 4]/lib/python3.12/runpy.py",
    "/opt/mallory/src/torch/optim/adamw.py": "[path 5]/torch/optim/adamw.py",
    "/home/mallory/torch/fit.py": "[path 6]/fit.py",
    "<string>": "<string>",
    "??": "??",
    "": "",
}


def test_no_name_of_a_person_or_machine_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k3y-very-secret")
    monkeypatch.setattr(getpass, "getuser", lambda: "mallory")
    allocator = Allocator()
    for path in PATHS:
        frames = [{"name": "forward", "filename": path, "line": 3, "fx_original_trace": "/home/mallory/x.py"}]
        allocator.malloc(5000, frames=frames, user_metadata="run of mallory k3y-very-secret")
    found = allocator.snapshot()
    found["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    target = tmp_path / "s.pickle"
    memory.write(found, target)
    written = target.read_bytes()
    for word in (b"mallory", b"k3y-very", b"secret-project", b"/home", b"Users"):
        assert word not in written
    snapshot = reader.read(target)
    assert snapshot.frames["filename"].tolist() == list(PATHS.values())
    assert snapshot.settings["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    with (tmp_path / "plain.pickle").open("wb") as file:
        write_snapshot(found, file)
    plain = reader.read(tmp_path / "plain.pickle")
    assert plain.frames["filename"].tolist() == list(PATHS)
    numbers = ["address", "size_bytes", "time_ns", "action", "stack"]
    assert snapshot.events[numbers].equals(plain.events[numbers])
    assert analysis.summary(snapshot)["by_category"] == analysis.summary(plain)["by_category"]


def test_shared_lists_stay_shared() -> None:
    frames = [{"name": "f", "filename": "/a/b.py", "line": 1}]
    event = {"action": "alloc", "addr": 1, "size": 1, "stream": 0, "frames": frames}
    made = clean_snapshot({"segments": [], "device_traces": [[event, dict(event)]]})["device_traces"][0]
    assert made[0]["frames"] is made[1]["frames"]
    assert frames[0]["filename"] == "/a/b.py"


def test_the_recorder_s_claim_about_size(tmp_path: Path) -> None:
    """What the default of max_entries costs on disk, from a real pickle of stacks of twenty frames."""
    frames = [{"name": f"function_{i}", "filename": f"/srv/file_{i % 50}.py", "line": i} for i in range(500)]
    allocator = Allocator()
    for i in range(300):
        allocator.free(allocator.malloc(1000, frames=frames[i : i + 20]), frames=list(frames[i : i + 20]))
    size = len(pickle.dumps(allocator.snapshot(), 4)) / len(allocator.events)
    assert 100 < size < 300
