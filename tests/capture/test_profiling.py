"""Options of other tools on our command line, and the files of a capture."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from nsightkit import cli
from nsightkit.capture import nsys, profiling
from nsightkit.capture.profiling import Captured
from nsightkit.errors import NsightkitError, UsageError


@pytest.mark.parametrize(
    ("line", "own", "rest"),
    [
        ("-o run -t cuda -- python x -o y", "-o run", "-t cuda -- python x -o y"),
        ("--trace=cuda --output=run -- p", "--output=run", "--trace=cuda -- p"),
        ("-kregex:foo -orun --overwrite -- p", "-orun --overwrite", "-kregex:foo -- p"),
        ("--timeout-s 3 -c nvtx --format json -- p --format x", "--timeout-s 3 --format json", "-c nvtx -- p --format x"),
        ("--help", "--help", ""),
        ("-o", "-o", ""),
        ("-f -- p", "", "-f -- p"),
    ],
)
def test_own_options_are_separated_from_the_tools(line: str, own: str, rest: str) -> None:
    assert profiling.separate(line.split()) == (own.split(), rest.split())


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("--trace=cuda,nvtx -s none", {"--trace": "cuda,nvtx", "--sample": "none"}),
        ("-snone --trace cuda --nvtx", {"--trace": "cuda", "--sample": "none", "--nvtx": ""}),
        ("-x -sprocess-tree stray", {"-x": "", "--sample": "stray"}),
        ("stray", {}),
    ],
)
def test_options_are_read_by_name(line: str, values: dict[str, str]) -> None:
    assert profiling.parse(line.split(), {"-s": "--sample"}) == values


def test_defaults_yield_to_the_users_options_and_to_the_version() -> None:
    defaults = {"--trace": "cuda", "--sample": "none", "--new": "1"}
    given = ["-t", "osrt", "--what"]
    parsed = profiling.parse(given, {"-t": "--trace"})
    assert profiling.choose(given, parsed, defaults, "--trace= --sample=") == ["--sample=none", *given]
    with pytest.raises(UsageError, match="--output is set by nsightkit"):
        profiling.choose(["-o", "x"], {"--output": "x"}, defaults, "")


def test_names_of_captures(tmp_path: Path) -> None:
    assert profiling.target(tmp_path / "new" / "x", ".nsys-rep", overwrite=False) == tmp_path / "new" / "x.nsys-rep"
    (tmp_path / "x.nsys-rep").touch()
    (tmp_path / "folder.nsys-rep").mkdir()
    with pytest.raises(UsageError, match="exists"):
        profiling.target(tmp_path / "x", ".nsys-rep", overwrite=False)
    assert profiling.target(tmp_path / "x", ".nsys-rep", overwrite=True).is_file()
    with pytest.raises(UsageError, match="exists"):
        profiling.target(tmp_path / "folder", ".nsys-rep", overwrite=True)
    with pytest.raises(UsageError, match="cannot be made"):
        profiling.target(tmp_path / "x.nsys-rep" / "y", ".nsys-rep", overwrite=True)
    assert profiling.unexpanded(Path("a%h")) == "a%%h"


def test_runs_are_interrupted_and_judged() -> None:
    assert profiling.watch(["true"], None) == (0, [])
    assert profiling.watch(["sh", "-c", "exit 3"], None)[1] == ["the program ended with exit code 3; its trace is kept"]
    program = "import signal, sys, time; signal.signal(signal.SIGINT, lambda *_: sys.exit(0)); time.sleep(60)"
    assert profiling.watch([sys.executable, "-c", program], 2.0) == (
        0,
        ["the program was interrupted after 2 s; the trace ends there"],
    )
    with pytest.raises(NsightkitError, match="no-such-program: cannot be started"):
        profiling.watch(["no-such-program"], None)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What the command line asks of nsys."""
    asked: dict[str, Any] = {}

    def profile(command: list[str], output: Path, **options: Any) -> Captured:
        asked.update(command=command, output=output, **options)
        trace = tmp_path / "t.sqlite"
        return Captured(trace, tmp_path / "t.nsys-rep", [trace], ["nsys", "a b"], 3, ["n."])

    monkeypatch.setattr(nsys, "profile", profile)
    return asked


def test_the_command_line_hands_options_on_as_written(
    asked: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "capture nsys -o run -t cuda --capture-range=nvtx -p 'a' --overwrite --timeout-s 5 --format json -- python x -o y"
    assert cli.run(line.split()) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["trace"] == str(tmp_path / "t.sqlite")
    assert err.splitlines() == ["nsightkit: ran nsys 'a b'", "nsightkit: n."]
    assert asked == {
        "command": ["python", "x", "-o", "y"],
        "output": Path("run"),
        "nsys_args": ["-t", "cuda", "--capture-range=nvtx", "-p", "'a'"],
        "timeout_s": 5,
        "overwrite": True,
    }


@pytest.mark.parametrize("line", ["capture nsys", "capture nsys -t cuda python x.py", "capture ncu --", "capture torch"])
def test_a_command_is_needed(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1


def test_help_is_our_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["capture", "ncu", "--help"]) == 0
    assert "--timeout-s" in capsys.readouterr().out
