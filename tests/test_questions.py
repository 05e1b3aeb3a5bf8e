"""The questions: the same by method and by command, with examples that run, and answers that print themselves."""

from __future__ import annotations

import doctest
import inspect
import json
from pathlib import Path

import pandas as pd
import pytest
from synthetic import simulated_programs
from synthetic.simulator import play

import nsightkit
from nsightkit import api, cli, questions, table
from nsightkit.guide import case
from nsightkit.questions import QUESTIONS


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("questions")
    return play(simulated_programs.PROGRAMS["starved-loader"], seed=1).write(folder / "run.sqlite")


@pytest.fixture(scope="module")
def trace(path: Path) -> nsightkit.Trace:
    return nsightkit.load(path)


@pytest.mark.parametrize("module", [questions, api, table])
def test_the_examples_run(module: object, trace: nsightkit.Trace):
    done = doctest.testmod(module, extraglobs={"t": trace})  # type: ignore[arg-type]
    assert done.failed == 0
    assert done.attempted >= 1


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_method_is_a_command(name: str, path: Path, trace: nsightkit.Trace, capsys: pytest.CaptureFixture[str]):
    assert getattr(nsightkit.Trace, name) is QUESTIONS[name]
    assert ">>>" in (inspect.getdoc(QUESTIONS[name]) or "")
    options = {"gpu": "H100 SXM"} if name == "sol" else {}  # this trace names no card
    answer = getattr(trace, name)(**options)
    given = [name, str(path), *(f"--{key}={value}" for key, value in options.items())]
    assert cli.run(given) == 0
    assert capsys.readouterr().out == f"{answer!r}\n"
    assert cli.run([*given, "-f", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(answer.json())


def test_help_is_whole():
    for command in cli.COMMANDS.values():
        assert command.help.endswith(".")
        for option in command.options:
            assert option.help.endswith("."), option


def test_answers_show_themselves_once_in_a_notebook(
    trace: nsightkit.Trace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Rich displays what it prints in a notebook, even what goes to a file; and IPython asks for colours there."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    part = trace.last_steps(3)
    for answer, words in (
        (trace.verdict(), "The GPU waits for data"),
        (trace.summary(), "GPU busy"),
        (nsightkit.diff(part, part), "run.sqlite → run.sqlite"),
        (trace.kernels(), ">total</th>"),
    ):
        shown = answer._repr_html_()
        assert words in shown
        assert "\x1b" not in shown
        assert "\x1b" not in repr(answer)
    assert not capsys.readouterr().out


def test_a_table_is_a_frame(trace: nsightkit.Trace):
    kernels = trace.kernels(top=1)
    assert (len(kernels), kernels.about.total) == (1, len(trace.kernels()))
    assert type(kernels.head(1)) is pd.DataFrame
    assert type(kernels[kernels["count"] > 0]) is pd.DataFrame
    assert table.column_of("gpu_span_ns").text(1500) == "1.500 µs"
    assert table.column_of("some_bytes") == table.Column("some_bytes", "some", "bytes")


def test_text_says_where_a_figure_would_mislead():
    """A gain that the replay's own error could make, and a step that begins long after its range."""
    assert "within error" in case("vllm-graphs", "decode").trace.whatif().text()
    assert "the first step's range begins at 0.274 ms" in case("two-cards", "qwen-h100").trace.steps().text()
