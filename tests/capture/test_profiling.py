"""Options of other tools on our command line, and the files of a capture."""

import json
import sys
from pathlib import Path

import pytest

from nsightkit import cli
from nsightkit.capture import nsys, profiling
from nsightkit.capture.profiling import Captured
from nsightkit.errors import NsightkitError, UsageError


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("--trace=cuda,nvtx -s none", {"--trace": "cuda,nvtx", "--sample": "none"}),
        ("-snone --trace cuda --nvtx", {"--trace": "cuda", "--sample": "none", "--nvtx": ""}),
        ("-x -sprocess-tree stray", {"-x": "", "--sample": "stray"}),
        ("stray", {}),
    ],
)
def test_options_are_read_by_name(line, values):
    assert profiling.parse_options(line.split(), {"-s": "--sample"}) == values


def test_defaults_yield_to_the_users_options_and_to_the_version():
    defaults = {"--trace": "cuda", "--sample": "none", "--new": "1"}
    given = ["-t", "osrt", "--what"]
    parsed = profiling.parse_options(given, {"-t": "--trace"})
    assert profiling.options_with_defaults(given, parsed, defaults, "--trace= --sample=") == ["--sample=none", *given]
    with pytest.raises(UsageError, match="--output is set by nsightkit"):
        profiling.options_with_defaults(["-o", "x"], {"--output": "x"}, defaults, "")


def test_names_of_captures(tmp_path):
    path = tmp_path / "x.rep"
    assert profiling.checked_output(tmp_path / "x", ".rep", overwrite=False) == path
    path.touch()
    assert profiling.checked_output(path, ".rep", overwrite=True) == path
    with pytest.raises(UsageError, match="exists"):
        profiling.checked_output(path, ".rep", overwrite=False)
    with pytest.raises(UsageError, match="folder does not exist"):
        profiling.checked_output(tmp_path / "new" / "x", ".rep", overwrite=False)


def test_runs_are_interrupted_and_judged():
    assert profiling.run_profiler(["true"], None) == (0, [])
    assert profiling.run_profiler(["sh", "-c", "exit 3"], None)[1] == [
        "the program ended with exit code 3; its trace is kept"
    ]
    program = "import signal, sys, time; signal.signal(signal.SIGINT, lambda *_: sys.exit(0)); time.sleep(60)"
    assert profiling.run_profiler([sys.executable, "-c", program], 2.0) == (
        0,
        ["the program was interrupted after 2 s; the trace ends there"],
    )
    with pytest.raises(NsightkitError, match="no-such-program: cannot be started"):
        profiling.run_profiler(["no-such-program"], None)


def test_the_command_line_hands_options_on_as_written(monkeypatch, capsys):
    asked = {}
    captured = Captured(Path("t"), Path("r"), ["nsys", "a b"], 3, ["n."])

    def profile(command, output, **options):
        asked.update(command=command, output=str(output), **options)
        return captured

    monkeypatch.setattr(nsys, "profile", profile)
    line = "capture nsys -o run -t cuda --overwrite -p 'a' -kregex:a --timeout-s 5 --format json -- python x -o y"
    assert cli.run(line.split()) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["trace"] == "t"
    assert err.splitlines() == ["nsightkit: ran nsys 'a b'", "nsightkit: n."]
    nsys_args = ["-t", "cuda", "-p", "'a'", "-kregex:a"]
    rest = {"command": ["python", "x", "-o", "y"], "output": "run", "timeout_s": 5, "overwrite": True}
    assert asked == {"nsys_args": nsys_args, **rest}


@pytest.mark.parametrize("line", ["nsys", "nsys -t cuda python x.py", "ncu --", "torch"])
def test_a_command_is_needed(line, capsys):
    assert cli.run(["capture", *line.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
