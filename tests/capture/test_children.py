"""Processes that measure: they answer, fail in one line, and end with the one that asked; whether there is a GPU."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nsightkit.capture import children
from nsightkit.errors import NsightkitError

CHILD = """
print("still at it", flush=True)
import os, pathlib, sys, time
from nsightkit.capture.children import run_as_child

def main(what):
    pathlib.Path("ready").touch()
    if what == "sleep":
        time.sleep(300)
    if what == "die":
        os.kill(os.getpid(), 9)
    if what == "torch":
        sys.exit("No module named 'torch'")
    return {"what": what}

if __name__ == "__main__":
    run_as_child(main)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_a_child_answers_or_says_why_not():
    assert children.ask_child("child", {"what": 7}, 60.0) == {"what": 7}
    failures = {
        "sleep": "not done within 3 s; its last lines: still at it",
        "die": "killed; the machine probably ran out of memory",
        "torch": r"install torch first .*exit code 1: .*No module named 'torch'",
    }
    for what, message in failures.items():
        with pytest.raises(NsightkitError, match=message):
            children.ask_child("child", {"what": what}, 3.0 if what == "sleep" else 60.0)


def _processes_in(folder):
    running = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == folder:
                running.append(process.name)
        except OSError:  # it has ended
            continue
    return running


@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell nobody that a parent has died")
def test_children_die_with_their_parent(folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
    ask = "from nsightkit.capture import children; children.ask_child('child', {'what': 'sleep'}, 300.0)"
    parent = subprocess.Popen([sys.executable, "-c", ask], stderr=subprocess.DEVNULL)
    monkeypatch.chdir("/")  # this process is none of those in the folder
    until = time.monotonic() + 60
    while not (folder / "ready").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    parent.send_signal(signal.SIGKILL)
    parent.wait(60)
    while _processes_in(folder):
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.fixture
def driver(monkeypatch):
    """A machine with a driver; the list is what torch prints when it is asked."""
    answers = []
    monkeypatch.setattr(children, "output_of", lambda *_, **__: answers.pop())
    monkeypatch.setattr(children.ctypes, "CDLL", lambda _: None)
    children.gpu_name.cache_clear()
    yield answers
    children.gpu_name.cache_clear()


def test_whether_there_is_a_gpu_is_asked_once(driver):
    driver.append("a warning\nGPU Planted GPU 80GB\n")
    assert children.has_gpu()
    assert children.gpu_name() == "Planted GPU 80GB"


@pytest.mark.parametrize("printed", ["UserWarning: no driver\nGPU \n", "Traceback\nImportError: no torch\n", ""])
def test_without_a_gpu_there_is_no_name(driver, printed):
    driver.append(printed)
    assert not children.has_gpu()
