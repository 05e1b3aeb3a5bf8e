"""Lint of the gallery's scripts: numbers in prose come from measurements, and sizes stand on the page.

``python docs/_ext/page_lint.py [SCRIPT...]`` checks scripts (by default all of `examples/`) without running them, and
exits with 1 if something is wrong.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

#: A number with a unit that was typed stays when the measurement changes.
_TYPED = re.compile(
    r"\d[\d.,]*\s*(%|\u00d7|x\b|[nµum]?s\b|min|sec|hours?\b|[kKMGT]i?B\b|bytes?\b|[MGT]?Hz\b|[GT]?FLOP|times\b|percent)"
)
_CODE = re.compile(r"^\.\. code-block::.*\n(?:\n|[ ]+.*(?:\n|$))*", re.MULTILINE)
_LITERAL = re.compile(r":\w+:`[^`]*`|``[^`]*``")


def problems(script: Path) -> list[str]:
    """List what is wrong with a script.

    Parameters
    ----------
    script : Path
    """
    source = script.read_text(encoding="utf-8")
    tree = ast.parse(source, script.name)
    problems = []
    for number in _TYPED.finditer(_prose(source, tree)):
        problems.append(f"typed number {number[0]!r}: export it in `findings` and write :measured:`page.name:.1f`")
    if "findings = headline(" not in source:
        problems.append("no findings: end with `findings = headline(...)`")
    for call in ast.walk(tree):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "measure"):
            continue
        if not {"gpu", "small"} <= {keyword.arg for keyword in call.keywords}:
            problems.append(f"line {call.lineno}: measure() needs gpu=dict(...) and small=dict(...) on the page")
    return problems


def _prose(source: str, tree: ast.Module) -> str:
    """The docstring and the text blocks of a script, without code and roles."""
    lines = [ast.get_docstring(tree) or "", ""]
    for block in re.split(r"^# %%\n", source, flags=re.MULTILINE)[1:]:
        for line in block.splitlines():
            if not line.startswith("#"):
                break
            lines.append(line[2:])
        lines.append("")
    return _LITERAL.sub("", _CODE.sub("", "\n".join(lines)))


def main(arguments: list[str]) -> int:
    """Check scripts; see the module's text."""
    examples = Path(__file__).parents[2] / "examples"
    scripts = [Path(argument) for argument in arguments] or sorted(examples.glob("[0-9]*.py"))
    count = 0
    for script in scripts:
        for problem in problems(script):
            print(f"error: {script.name}: {problem}", file=sys.stderr)
            count += 1
    print(f"{len(scripts)} pages: {count} problems")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
