"""Processes in which a program is watched: they end with the one that asked for them, however it ends."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nsightkit.capture import children

linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems tell nobody that a parent has died")

PARENT = """
import signal, sys
from nsightkit.capture import children
signal.signal(signal.SIGINT, signal.default_int_handler)  # a program in the background of a shell ignores it
children.IMPORTED[:] = ["nsightkit.capture.children"]  # it is not about what takes long
children.ask_child("sleeper", {"grandchildren": sys.argv[1] == "fork_child"}, 300.0, getattr(children, sys.argv[1]))
"""
# One in a session of its own, and one whose parent has ended.
SLEEPER = """
import pathlib, subprocess, time

def main(grandchildren):
    if grandchildren:
        subprocess.Popen(["sleep", "300"], start_new_session=True)
        subprocess.run(["sh", "-c", "setsid sleep 300 & exit 0"])
    pathlib.Path("ready").touch()
    time.sleep(300)
"""


def _in(folder: Path) -> dict[str, str]:
    """Processes that run in a folder, by number, and what each is."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == folder:
                found[process.name] = (process / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it has ended
            continue
    return found


@linux
@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "SIGINT"])
@pytest.mark.parametrize("start", ["fork_child", "start_child"])
def test_children_die_with_their_parent(tmp_path: Path, start: str, how: str) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    with (tmp_path / "log").open("wb") as log:
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, start], cwd=tmp_path, env=environment, stdout=log, stderr=log
        )
    until = time.monotonic() + 60
    while not (tmp_path / "ready").exists():
        assert parent.poll() is None, (tmp_path / "log").read_text()
        assert time.monotonic() < until
        time.sleep(0.05)
    alive = _in(tmp_path)
    assert sum("sleep 300" in command for command in alive.values()) == 2 * (start == "fork_child"), alive
    assert len(alive) >= 2
    parent.send_signal(signal.Signals[how])
    parent.wait(60)
    while _in(tmp_path) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _in(tmp_path)


@linux
def test_a_forked_process_ends_as_what_it_does_and_starts_others_as_a_fresh_one(tmp_path: Path) -> None:
    (tmp_path / "ender.py").write_text(
        "import multiprocessing, os, sys\ndef main(how):\n    print(multiprocessing.get_start_method(), flush=True)\n"
        "    os.kill(os.getpid(), int(how)) if how > 0 else sys.exit(-how)\n"
    )
    code = "import sys; from nsightkit.capture import children; children.IMPORTED[:] = ['nsightkit.capture.children']\n"
    code += "for how in (0, -7, 9, 15):\n    done = children.fork_child('ender', {'how': how}, 60.0)\n"
    code += "    print(done.returncode, done.stdout.strip())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    usual = multiprocessing.get_all_start_methods()[0]
    assert done.stdout.splitlines() == [f"{code} {usual}" for code in (0, 7, -9, -15)], done.stderr


WATCHED = """
import json, sys
import torch
asked = []
cuda = torch.cuda
for name in ("is_available", "device_count", "init", "_lazy_init", "current_device", "get_device_properties",
             "get_device_capability", "get_device_name", "synchronize"):
    def watched(*a, name=name, real=getattr(cuda, name), **k):
        import traceback
        asked.append(name + ": " + " < ".join(f.filename for f in traceback.extract_stack()[-5:-1]))
        return real(*a, **k)
    setattr(cuda, name, watched)
from nsightkit.capture.children import IMPORTED
for name in IMPORTED:
    try:
        __import__(name)
    except ImportError:
        pass
print(json.dumps({"asked": asked, "pool": "torch._inductor.async_compile" in sys.modules}))
"""


def test_nothing_that_is_imported_before_the_fork_asks_for_a_gpu() -> None:
    """A process that has asked for one makes it unusable in all that are forked from it."""
    pytest.importorskip("torch")
    command = [sys.executable, "-c", WATCHED]
    done = subprocess.run(
        command, env=children.child_environment(), capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"asked": [], "pool": False}


def test_whether_there_is_a_gpu_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def answer(*command: str, **_: object) -> str:
        asked.append(command)
        return "a warning\nGPU Planted GPU 80GB\n"

    monkeypatch.setattr(children, "said", answer)
    monkeypatch.setattr(children.ctypes, "CDLL", lambda _: None)
    children.gpu_name.cache_clear()
    try:
        assert children.gpu_name() == "Planted GPU 80GB"
        assert children.has_gpu()
        assert len(asked) == 1
    finally:
        children.gpu_name.cache_clear()


@pytest.mark.parametrize("said", ["GPU \n", "UserWarning: no driver\nGPU \n", "Traceback\nImportError: no torch\n", ""])
def test_without_one_there_is_no_name(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setattr(children, "said", lambda *_, **__: said)
    monkeypatch.setattr(children.ctypes, "CDLL", lambda _: None)
    children.gpu_name.cache_clear()
    try:
        assert not children.has_gpu()
    finally:
        children.gpu_name.cache_clear()
