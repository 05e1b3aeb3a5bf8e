"""nsys and ncu: found, asked for their version, and asked to export reports of any name."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest

import nsightkit
from nsightkit.errors import NsightkitError, TraceError, UsageError
from nsightkit.trace import programs
from nsightkit.trace.programs import NCU, NSYS

NASTY = "-a b'c\"d $(touch pwned) %h %q{HOME};e"


def fake(path, script=""):
    """A program that does what the script says."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("tool", [NSYS, NCU])
def test_the_environment_comes_before_the_path(tool, tmp_path, monkeypatch):
    named = fake(tmp_path / "one" / tool.name)
    on_path = fake(tmp_path / "two" / tool.name)
    monkeypatch.setenv("PATH", str(on_path.parent))
    monkeypatch.delenv(tool.variable, raising=False)
    assert tool.find() == on_path
    monkeypatch.setenv(tool.variable, str(named))
    assert tool.find() == named
    monkeypatch.setenv(tool.variable, str(tmp_path / "absent"))
    with pytest.raises(UsageError, match=tool.variable):
        tool.find()
    monkeypatch.delenv(tool.variable)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(vars(tool), "folders", ())  # not where this machine's installers have put it
    with pytest.raises(NsightkitError, match="not installed"):
        tool.require()


def test_versions(tmp_path, monkeypatch):
    good = fake(tmp_path / "good", "echo 'NVIDIA Nsight Systems version 2024.7.1.84-247134862303v0'")
    assert NSYS.version(good) == (2024, 7, 1, 84)
    with pytest.raises(NsightkitError, match="said no version"):
        NSYS.version(fake(tmp_path / "bad", "echo hello; exit 3"))
    monkeypatch.setenv("NSIGHTKIT_NSYS", str(fake(tmp_path / "old", "echo version 2022.4.2.1")))
    with pytest.raises(NsightkitError, match="too old"):
        NSYS.require()


def _is_running(process):
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_an_nsys_that_hangs_is_ended_with_its_children(tmp_path):
    hanging = fake(tmp_path / "nsys", f"sleep 30 & echo $! > '{tmp_path}/pid'; wait")
    start = time.monotonic()
    with pytest.raises(NsightkitError, match="no answer within 1 s"):
        NSYS.version(hanging, timeout_s=1.0)
    child = (tmp_path / "pid").read_text().strip()
    while _is_running(child):
        assert time.monotonic() - start < 20, "the child of the hanging nsys lives on"
        time.sleep(0.1)


def test_libraries_that_are_named_come_first(tmp_path, monkeypatch):
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.delenv(programs.LIBRARIES, raising=False)
    assert programs.environment() == dict(os.environ)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/present")
    assert programs.environment(None, tmp_path)["LD_LIBRARY_PATH"] == f"{tmp_path}{os.pathsep}/present"
    monkeypatch.setenv(programs.LIBRARIES, "/named")
    assert programs.environment({"A": "b"}, tmp_path) == {"A": "b", "LD_LIBRARY_PATH": f"/named{os.pathsep}{tmp_path}"}


def test_without_nsys_the_remedy_is_the_command(tmp_path, monkeypatch):
    monkeypatch.delenv("NSIGHTKIT_NSYS", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(vars(NSYS), "folders", ())
    monkeypatch.chdir(tmp_path)
    report = Path(NASTY + ".nsys-rep")
    report.write_bytes(b"x")
    with pytest.raises(TraceError) as caught:
        nsightkit.load(report)
    # what a shell makes of the remedy is the command, word by word
    command = shlex.split(caught.value.remedy.partition(": ")[2])
    assert command[:6] == ["nsys", "export", "--type", "sqlite", "--force-overwrite", "true"]
    assert command[6:] == ["-o", *(f"{tmp_path}/{NASTY}{suffix}" for suffix in (".sqlite", ".nsys-rep"))]
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def report(nsys, tmp_path_factory):
    """A real report of a program that sleeps."""
    out = tmp_path_factory.mktemp("report") / "made.nsys-rep"
    command = [str(nsys), "profile", "--trace=osrt", "--sample=none", "--cpuctxsw=none", "-o", str(out)]
    subprocess.run([*command, "sleep", "0.1"], capture_output=True, check=True, timeout=120)
    return out


@pytest.mark.nsys
def test_a_report_of_any_name_is_exported(nsys, report, tmp_path, monkeypatch):
    monkeypatch.setenv("NSIGHTKIT_NSYS", str(nsys))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "$(touch pwned) 'x' %h"
    folder.mkdir()
    monkeypatch.chdir(folder)
    copy = folder / f"{NASTY}.nsys-rep"
    shutil.copy(report, copy)
    first = programs.exported(Path(copy.name), cache=True).path  # a relative name with a dash first
    assert first.is_relative_to(tmp_path / "cache")
    first.write_bytes(b"half an export")
    assert nsightkit.load(copy).size("os_calls")
    assert [path.name for path in folder.iterdir()] == [copy.name]
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.nsys
@pytest.mark.parametrize("length", [0, 5000])
def test_a_damaged_report_is_one_clear_line(nsys, report, tmp_path, length, monkeypatch):
    monkeypatch.setenv("NSIGHTKIT_NSYS", str(nsys))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    damaged = tmp_path / "damaged.nsys-rep"
    damaged.write_bytes(report.read_bytes()[:length])
    with pytest.raises(TraceError) as caught:
        programs.exported(damaged, cache=True)
    assert "\n" not in str(caught.value)
    assert "nsys export" in caught.value.remedy
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == [damaged.name]
