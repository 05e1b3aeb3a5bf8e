"""The questions: the same by method and by command, with examples that run."""

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
from nsightkit import api, cli, verbs
from nsightkit.verbs import QUESTIONS, Answer


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return play(simulated_programs.PROGRAMS["starved-loader"], seed=1).write(
        tmp_path_factory.mktemp("verbs") / "run.sqlite"
    )


@pytest.fixture(scope="module")
def trace(path: Path) -> nsightkit.Trace:
    return nsightkit.load(path)


@pytest.mark.parametrize("module", [verbs, api])
def test_the_examples_run(module: object, trace: nsightkit.Trace) -> None:
    done = doctest.testmod(module, extraglobs={"t": trace})  # type: ignore[arg-type]
    assert done.failed == 0
    assert done.attempted >= 2


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_method_is_a_command(
    name: str, path: Path, trace: nsightkit.Trace, capsys: pytest.CaptureFixture[str]
) -> None:
    question = QUESTIONS[name]
    assert question.help.endswith(".")
    assert ">>>" in (inspect.getdoc(question.ask) or "")
    found = getattr(trace, name)()
    if name == "sol":
        return  # this trace names no card
    assert cli.run([name, str(path), "--format", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    if isinstance(found, Answer):
        assert set(said) == set(found)
    else:
        assert isinstance(found, pd.DataFrame)
        assert len(said) == len(found)
        assert not said or list(said[0]) == list(found.columns)


def test_filters_give_a_trace_that_answers(trace: nsightkit.Trace) -> None:
    part = trace.last_steps(3).within("step 9").device(0)
    assert isinstance(part, nsightkit.Trace)
    assert 0 < part.kernels()["count"].sum() < trace.kernels()["count"].sum()
    begin = int(trace.steps()["start_ns"].iloc[2])
    assert len(trace.time(begin)["kernels"]) < len(trace["kernels"])


def test_an_answer_shows_itself_once_in_a_notebook(trace, monkeypatch, capsys):
    """Rich displays what it prints in a notebook, even what goes to a file; and IPython asks for colours there."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = trace.verdict()._repr_html_()
    assert "input-pipeline" in shown
    assert "\x1b" not in shown
    assert not capsys.readouterr().out


def test_an_answer_prints_as_the_command_does(trace: nsightkit.Trace) -> None:
    found = trace.verdict()
    assert repr(found).splitlines()[1].startswith("input-pipeline, ")
    assert found._repr_html_().startswith("<pre ")
    assert "GPU busy" in repr(trace.summary())
    part = trace.last_steps(3)
    assert repr(nsightkit.diff(part, part)).startswith("run.sqlite → run.sqlite")
