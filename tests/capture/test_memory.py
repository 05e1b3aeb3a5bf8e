"""Recording memory: through every version's signature, also over an error, and without anybody's name."""

import getpass
import os

import pytest
from make_snapshot import Allocator, random_program

from nsightkit.analysis.memory import snapshot as analysis
from nsightkit.capture import memory
from nsightkit.errors import UsageError
from nsightkit.trace import snapshot as reader

torch = pytest.importorskip("torch")


@pytest.fixture
def allocator(monkeypatch):
    """A device whose allocator is the miniature one."""
    allocator = random_program(1, 40)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda *_: allocator.snapshot())
    return allocator


@pytest.mark.parametrize("newer", [set(), {"global_record_annotations"}])
def test_an_error_leaves_its_snapshot(newer, allocator, monkeypatch, tmp_path):
    calls = []

    def record(**given):
        if given.keys() - {"enabled", "context", "stacks", "max_entries", "clear_history"} - newer:
            raise TypeError("unexpected keyword")
        calls.append(given)

    def run_out():
        with memory.recording(tmp_path / "s.pickle", max_entries=123):
            assert os.environ["TORCH_DISABLE_ADDR2LINE"] == "1"
            allocator.oom(1 << 40, 5)
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.delenv("TORCH_DISABLE_ADDR2LINE", raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    with pytest.raises(torch.OutOfMemoryError):
        run_out()
    assert newer <= calls[0].keys()
    assert calls[0]["max_entries"] == 123
    assert calls[1] == {"enabled": None}
    assert analysis.summary(reader.read(tmp_path / "s.pickle"))["oom"]["requested_bytes"] == 1 << 40
    assert list(tmp_path.iterdir()) == [tmp_path / "s.pickle"]


def test_what_cannot_be_recorded(allocator, monkeypatch, tmp_path):
    with pytest.raises(UsageError, match="folder"), memory.recording(tmp_path / "none" / "s.pickle"):
        pass
    with pytest.raises(UsageError, match="cannot be written"):
        memory.write(allocator.snapshot(), tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="CUDA GPU"), memory.recording(tmp_path / "s.pickle"):
        pass
    assert not list(tmp_path.iterdir())


def test_no_name_of_a_person_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr(getpass, "getuser", lambda: "mallory")
    allocator = Allocator()
    frames = [{"name": "forward", "filename": "/home/mallory/secret-project/train.py", "line": 3}]
    allocator.malloc(5000, frames=frames, user_metadata="run of mallory")
    memory.write(allocator.snapshot(), tmp_path / "s.pickle")
    written = (tmp_path / "s.pickle").read_bytes()
    assert b"mallory" not in written
    assert b"secret-project" not in written
    assert b"train.py" in written
