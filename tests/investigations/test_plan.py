"""The order in which parts are recorded: which page needs what, and which is complete soonest."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from nsightkit.investigations import record
from nsightkit.investigations.parts import INVESTIGATIONS, Part, find, parts

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("[0-9]*.py"))


def own(investigation: str) -> list[Part]:
    return list(INVESTIGATIONS[investigation].values())


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.stem)
def test_a_page_needs_what_it_reads(page: Path) -> None:
    """By the pages themselves: investigations they measure, and ceilings that they name."""
    text = page.read_text(encoding="utf-8")
    measured = set(re.findall(r'\bmeasure\(\s*"([\w-]+)"', text)) - {"ceilings"}
    lines = [node for node in ast.parse(text).body if "ceilings" in (ast.get_source_segment(text, node) or "")]
    named = {
        item.value
        for line in lines
        for group in ast.walk(line)
        if isinstance(group, ast.Tuple | ast.List)
        for item in group.elts
        if isinstance(item, ast.Constant) and item.value in INVESTIGATIONS["ceilings"]
    }
    (about,) = measured or {"ceilings"}
    others = {each for each in record.needs(about) if each.investigation != about}
    assert set(record.needs(about)) - others == set(own(about))
    assert others == (set() if about == "ceilings" else {find("ceilings", ceiling) for ceiling in named})


def test_every_investigation_has_its_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in EXAMPLES)
    assert set(re.findall(r'\bmeasure\(\s*"([\w-]+)"', text)) == set(INVESTIGATIONS)
    assert len(EXAMPLES) == len(INVESTIGATIONS)


def test_the_page_that_is_complete_soonest_comes_next() -> None:
    takes = {"hidden-sync": 30.0, "tiny-kernels": 12.0, "roofline": 5.0, "ceilings": 2.0}
    todo = [part for name in takes for part in INVESTIGATIONS[name].values()]
    steps = record.order(todo, (), lambda part: takes[part.investigation])
    # 2 x 5 s and three of the ceilings; then the other eleven; the rest by its length
    assert [page for step in steps for page in step.pages] == ["roofline", "ceilings", "tiny-kernels", "hidden-sync"]
    planned = [step.part for step in steps]
    assert sorted(map(str, planned)) == sorted(map(str, todo)), "each once"
    assert planned[:5] == [find("ceilings", n) for n in ("before", "fp32", "copy")] + own("roofline")
    # a process for each part but one for all ceilings
    assert steps[4].total_s == pytest.approx(3 * 2.0 + 2 * (5.0 + record.START_S))
    assert steps[-1].total_s == pytest.approx(14 * 2 + 2 * (5 + 12 + 30 + 3 * record.START_S))


def test_what_is_recorded_counts_and_what_completes_nothing_waits() -> None:
    have = [find("ceilings", "before"), find("ceilings", "fp32"), find("starved-input", "before")]
    todo = [find("roofline", "before"), find("starved-input", "after"), find("bench", "before")]
    steps = record.order(todo, have, lambda part: 100.0 if part.investigation == "starved-input" else 1.0)
    assert [(step.part.investigation, step.pages) for step in steps] == [
        ("starved-input", ("starved-input",)), ("roofline", ()), ("bench", ())
    ]  # fmt: skip


def test_what_has_failed_comes_last_and_its_page_waits() -> None:
    todo = [*INVESTIGATIONS["gpu-util"].values(), *INVESTIGATIONS["matrix"].values()]
    steps = record.order(todo, (), lambda _: 1.0, [find("gpu-util", "training")])
    assert steps[-1].part.name == "training"
    assert [page for step in steps for page in step.pages] == ["matrix", "gpu-util"]
    assert str(steps[-2].part) == "gpu-util/one-thread"


def test_long_pages_come_last_by_themselves() -> None:
    steps = record.order(list(parts()), (), lambda part: part.seconds)
    assert len(steps) == len(list(parts()))
    pages = [page for step in steps for page in step.pages]
    assert sorted(pages) == sorted(INVESTIGATIONS)
    assert pages[-3:] == ["ladder", "decode", "attention-sweep"]
    # and what takes longest comes last in its page
    planned = [step.part for step in steps]
    assert planned.index(find("ladder", "autotuned")) == max(map(planned.index, own("ladder")))
    assert planned.index(find("decode", "sums")) == max(map(planned.index, own("decode")))
    changes = [part.name for part in planned if part.investigation == "one-change"]
    assert changes == ["before", "after", "again", "after-again"], "in turns"
