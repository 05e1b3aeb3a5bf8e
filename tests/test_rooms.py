"""The flow: workloads, capture, trace, analysis, plots and report; no arrow runs back, no circle."""

from __future__ import annotations

import ast
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import make_kineto
import pytest
from synthetic.planted import training

import nsightkit
from nsightkit import cli

ROOT = Path(nsightkit.__file__).parent
#: What each room may import; the files at the top that name their own are shared by all.
MAY = {
    "trace": set(),
    "workloads": {"trace"},
    "analysis.core": {"trace"},
    "analysis.timeline": {"trace", "analysis.core"},
    "analysis.ranks": {"trace", "analysis.core", "analysis.timeline"},
    "analysis.roofline": {"trace", "analysis.core", "analysis.timeline"},
    "analysis.memory": {"trace", "analysis.core", "analysis.roofline"},
    "analysis.replay": {"trace", "analysis.core", "analysis.timeline", "analysis.ranks"},
    "analysis.verdict": {
        *("trace", "analysis.core", "analysis.timeline", "analysis.ranks", "analysis.roofline", "analysis.replay"),
    },
    "analysis.compare": {"trace", "analysis.core", "analysis.timeline", "analysis.verdict"},
    "capture": {"trace", "workloads", "analysis.roofline"},
    "plots": {"trace", "analysis", "table"},
    "report": {"trace", "analysis", "plots", "questions", "table", "card"},
    "guide": {"trace", "workloads", "capture", "api"},
}
EVERYWHERE = {"", "errors", "text", "hardware", "configurations", "version"}


@cache
def _modules() -> dict[str, frozenset[str]]:
    """What each module of ours imports of ours: at its top, in functions, and for types."""
    trees = {}
    for file in ROOT.rglob("*.py"):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        trees[name.removesuffix("__init__").rstrip(".")] = ast.parse(file.read_text(encoding="utf-8"))
    return {name: frozenset(_imports(tree, set(trees)) - {name}) for name, tree in trees.items()}


def _imports(tree: ast.AST, known: set[str]) -> set[str]:
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nsightkit"):
            package = node.module.removeprefix("nsightkit").lstrip(".")
            names = [f"{package}.{alias.name}".lstrip(".") for alias in node.names]
            imported |= {name if name in known else package for name in names}
        elif isinstance(node, ast.Import):
            own = [alias.name for alias in node.names if alias.name.startswith("nsightkit")]
            imported |= {name.removeprefix("nsightkit").lstrip(".") for name in own}
    return imported


def _room(module: str) -> str:
    first, _, rest = module.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "analysis" and rest else first


def test_no_arrow_runs_against_the_flow():
    modules = _modules()
    wrong = []
    for name, imported in modules.items():
        room = _room(name)
        if room not in MAY:
            continue  # the command line, the table of questions: at the end of the flow
        for other in imported:
            there = _room(other)
            if there not in {room, *EVERYWHERE, *MAY[room]} and there.partition(".")[0] not in MAY[room]:
                wrong.append(f"{name} imports {other}")
    assert not wrong, "\n".join(wrong)


def test_no_circle():
    TopologicalSorter(_modules()).prepare()  # raises CycleError, with the circle


@pytest.mark.parametrize("kind", ["kineto", "nsys"])
def test_a_question_passes_through_few_modules(kind: str, tmp_path: Path):
    """From the words of the command line to the text of the answer."""
    for number in (1, 2):
        if kind == "kineto":
            make_kineto.write(tmp_path / str(number), 1000 + number)
        else:
            training(tmp_path / str(number), seed=number)
    files = set()
    assert cli.run(["gaps", str(tmp_path / "1")]) == 0  # imports what it needs
    sys.setprofile(lambda frame, event, _: files.add(frame.f_code.co_filename) if event == "call" else None)
    cli.run(["gaps", str(tmp_path / "2")])
    sys.setprofile(None)
    modules = {file for file in files if Path(file).is_relative_to(ROOT) and Path(file).name != "__init__.py"}
    assert len(modules) <= 12, sorted(modules)
