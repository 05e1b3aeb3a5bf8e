"""The form of a page, checked: what its sections are, where its numbers come from, what it says to a reader.

``python docs/_ext/house_form.py [SCRIPT...]`` checks scripts (all of `examples/` by default) without running them, says
what to do about each problem, and exits with 1 if there is one. The build runs it before anything else.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

#: What the titles of a page's sections begin with, in this order, and why; a page may have others between them.
_WHY = {
    "Predict": "ask the reader first, with the answer folded; a result that could not be wrong explains nothing",
    "Evidence": "one figure and one table that answer, from the same functions a reader would call",
    "Change one thing": "one change, and only one, so that its effect is its own; show the lines that change",
    "Verdict": "does it agree with the prediction? A null result is a result",
    "Limits": "what this page does not show, and what would change the answer",
    "Run it yourself": "the commands, with a GPU and without one",
    "Exercises": "two or three, with folded answers, on a trace that a reader can open",
    "Measured here": "the script's own run: `.. own-run::` folds it where nothing is recorded yet",
}
HEADINGS = tuple(_WHY)
#: A number with a unit in prose was typed by hand, and stays when the measurement changes.
_TYPED = re.compile(
    r"\d[\d.,]*\s*(%|\u00d7|x\b|[nµum]?s\b|min|sec|hours?\b|[kKMGT]i?B\b|bytes?\b|[MGT]?Hz\b|[GT]?FLOP|times\b|percent)"
)
_COLUMNS = 79


def prose(script: Path) -> list[str]:
    """Give the text blocks of a script, without literal blocks, literals and roles.

    Parameters
    ----------
    script : Path

    Returns
    -------
    list of str
        The docstring first.
    """
    source = script.read_text(encoding="utf-8")
    blocks = [ast.get_docstring(ast.parse(source)) or ""]
    for part in re.split(r"^# %%\n", source, flags=re.MULTILINE)[1:]:
        lines = []
        for line in part.splitlines():
            if not line.startswith("#"):
                break
            lines.append(line[2:])
        blocks.append("\n".join(lines))
    cleaned = []
    for block in blocks:
        literal = re.sub(r"^\.\. code-block::.*\n(?:\n|[ ]+.*(?:\n|$))*", "", block, flags=re.MULTILINE)
        cleaned.append(re.sub(r":\w+:`[^`]*`|``[^`]*``", "", literal))
    return cleaned


def measured(script: Path) -> list[ast.Call]:
    """Give the calls of ``measure`` in a script.

    Parameters
    ----------
    script : Path
    """
    nodes = ast.walk(ast.parse(script.read_text(encoding="utf-8")))
    return [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "measure"]


def problems(script: Path) -> list[str]:
    """Say what is missing in a script and what to do about it, one sentence each.

    Parameters
    ----------
    script : Path

    Returns
    -------
    list of str
        Empty if the form is right.
    """
    if not re.fullmatch(r"\d\d_[a-z0-9_]+\.py", script.name):
        return [f"the name is {script.name!r}; it must be two digits and what the page shows: 07_where_a_step_goes.py"]
    text = script.read_text(encoding="utf-8")
    try:
        blocks = prose(script)
    except SyntaxError as error:
        return [f"line {error.lineno}: it is not Python ({error.msg})"]
    if not blocks[0]:
        return ["it has no docstring; the first block is the title, the question and what came out"]
    return [*_told(script, text, blocks), *_sections(blocks), *_numbers(blocks), *_synthetic(text), *_layout(text)]


def _told(script: Path, text: str, blocks: list[str]) -> list[str]:
    checks = (
        (
            blocks[0].splitlines()[0].endswith("?"),
            "the title is not a question; the first line asks what the page answers, and ends with '?'",
        ),
        (
            measured(script),
            (
                'nothing is measured; call `measure("page/part", workload, gpu=..., small=...)` under "Measured here", '
                "and end a block with what it gives, which shows its provenance"
            ),
        ),
        (
            all({"gpu", "small"} <= {word.arg for word in call.keywords} for call in measured(script)),
            "a measurement hides its sizes; write them on the page: `measure(..., gpu=dict(...), small=dict(...))`",
        ),
        (
            "findings = headline(" in text,
            (
                "it exports no findings; end with `findings = headline(...)`, which gives the answer and the kind of "
                "evidence that it rests on"
            ),
        ),
        (
            ".. in-short::" in blocks[0].splitlines(),
            "the first block does not say what came out; end it with `.. in-short::`, which each build fills in",
        ),
        (
            f"python examples/{script.name}" in text,
            f"a reader cannot repeat it; give the command `python examples/{script.name}` under 'Run it yourself'",
        ),
        ("://" not in text, "it names an address; a page asks for nothing elsewhere, so name the thing instead"),
    )
    return [problem for fine, problem in checks if not fine]


def _sections(blocks: list[str]) -> list[str]:
    titles = [title for block in blocks for title in re.findall(r"^(\S.*)\n-{3,}$", block, flags=re.MULTILINE)]
    headings = [heading for title in titles for heading in HEADINGS if re.match(rf"{heading}\b", title)]
    found = [f"the section {name!r} is missing: {_WHY[name]}" for name in HEADINGS if name not in headings]
    if not found and list(dict.fromkeys(headings)) != list(HEADINGS):
        found.append(f"the sections come in another order; it is: {', '.join(HEADINGS)}")
    return found


def _numbers(blocks: list[str]) -> list[str]:
    typed = [match[0] for block in blocks for match in _TYPED.finditer(block)]
    return [
        f"the text holds a typed number, {number!r}; export it in `findings` and write :measured:`page.name:.1f`, or "
        "work it out in a code block"
        for number in typed
    ]


def _synthetic(text: str) -> list[str]:
    found = []
    for section in re.split(r"^# %%\n(?=# .+\n# -{3,}\n)", text, flags=re.MULTILINE)[1:]:
        if not re.search(r"\bsynthetic\.", re.sub(r"``[^`]*``", "", section)):
            continue
        heading = section.splitlines()[0].lstrip("# ")
        said = " ".join(line.lstrip("# ") for line in section.splitlines() if line.startswith("#"))
        if "synthetic" not in said or "never ran on a GPU" not in said:
            found.append(
                f"the section {heading!r} uses synthetic data without saying so; it says that the trace is synthetic, "
                "and that it never ran on a GPU"
            )
    return found


def _layout(text: str) -> list[str]:
    wide = [number for number, line in enumerate(text.splitlines(), 1) if len(line) > _COLUMNS]
    return (
        [f"lines {wide} are wider than {_COLUMNS} columns, which is what a page shows without scrolling"]
        if wide
        else []
    )


def main(arguments: list[str]) -> int:
    """Check scripts; see the module's text.

    Parameters
    ----------
    arguments : list of str
        Paths of scripts; none for all.

    Returns
    -------
    int
        The exit status.
    """
    examples = Path(__file__).parents[2] / "examples"
    scripts = [Path(a) for a in arguments] or sorted(examples.glob("*.py"))
    wrong = [f"{script.name}: {problem}" for script in scripts for problem in problems(script)]
    numbers = [script.name[:2] for script in sorted(examples.glob("*.py"))]
    if not arguments and numbers != [f"{n:02}" for n in range(1, len(numbers) + 1)]:
        wrong.append(f"examples are numbered {', '.join(numbers)}; they go from 01 without a gap")
    for problem in wrong:
        print(f"error: {problem}", file=sys.stderr)
    print(f"{len(scripts)} pages: {len(wrong)} problems with their form")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
