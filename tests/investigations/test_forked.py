"""Processes forked for smoke runs: each as good as an interpreter of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nsightkit.capture import children
from nsightkit.investigations import forked
from nsightkit.investigations import measurement as investigation
from nsightkit.investigations.parts import find
from nsightkit.trace import _process

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not forked.supported(), reason="forks on Linux only")


def _job(folder: Path, part: str = "before") -> str:
    return json.dumps(
        {
            "investigation": "tiny-kernels",
            "part": part,
            "mode": "smoke",
            "folder": str(folder),
            "kind": "smoke",
            "command": "",
        }
    )


def test_it_measures_what_a_fresh_interpreter_does(tmp_path):
    environment, told = children.child_environment(), []
    for name, run in (
        ("forked", lambda job: forked.run(job, 120, environment)),
        (
            "fresh",
            lambda job: subprocess.run(
                [sys.executable, "-m", "nsightkit.investigations.child", job], env=environment, check=True
            ),
        ),
    ):
        (tmp_path / name).mkdir()
        assert run(_job(tmp_path / name)).returncode == 0
        told.append(json.loads((tmp_path / name / "result.json").read_text()))
    by_fork, fresh = told
    assert by_fork["samples"].keys() == fresh["samples"].keys()
    assert by_fork["samples"]["loss"] == fresh["samples"]["loss"], "the same seeds, untouched by what ran before"
    changing = {"utc", "duration_s"}
    same = [{k: v for k, v in one["provenance"].items() if k not in changing} for one in told]
    assert same[0] == same[1]


def test_a_job_that_fails_says_so_and_the_next_one_works(tmp_path):
    environment = children.child_environment()
    failed = forked.run(_job(tmp_path, "no-such-part"), 120, environment)
    assert failed.returncode == 1
    assert "no-such-part" in failed.stdout
    assert forked.run(_job(tmp_path), 120, environment).returncode == 0


def test_environment_and_folder_are_those_of_the_moment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environment = children.child_environment()
    relative = json.dumps({**json.loads(_job(tmp_path)), "folder": "."})
    assert forked.run(relative, 120, environment).returncode == 0
    assert (tmp_path / "result.json").is_file()


def test_when_the_time_is_up_nothing_is_left(tmp_path):
    part = find("starved-input", "before")
    job = json.dumps({**json.loads(_job(tmp_path)), "investigation": part.investigation})
    environment = children.child_environment()
    first = forked._first(environment["PYTHONPATH"])
    with pytest.raises(subprocess.TimeoutExpired):
        forked.run(job, 0.3, environment)
    assert not _process.descendants(first._process.pid)
    assert forked.run(_job(tmp_path), 120, environment).returncode == 0


def test_without_a_process_to_fork_from_an_interpreter_is_started(tmp_path, monkeypatch):
    def gone(*_):
        raise BrokenPipeError

    monkeypatch.setattr(forked, "run", gone)
    samples, _ = investigation.run_child(
        find("tiny-kernels", "before"), "smoke", tmp_path, kind="smoke", command="", timeout_s=120
    )
    assert samples["step_ns"]
