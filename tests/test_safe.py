"""What is printed and written: no name of a trace or of a file is obeyed by a terminal, a program or a spreadsheet."""

from __future__ import annotations

import csv
import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import hostile
import pytest

from nsightkit import cli, errors
from nsightkit.table import Table
from nsightkit.text import json_text
from nsightkit.trace import chrome, store

#: A few of each kind: controls, C1, bidi, zero-width, separators, halves of characters, tags, private, spaces, plain.
CHARACTERS = [
    *map(chr, (*range(0x20), *range(0x7F, 0xA1), 0xAD, 0x61C, *range(0x200B, 0x2010), *range(0x2028, 0x202F))),
    *map(chr, (*range(0x2060, 0x2070), 0xFEFF, 0xD800, 0xDFFF, 0xE000, 0x3000, 0xE0001, 0xFFFB, 0x10FFFF)),
    *"aZ09 π加😀\\\"'<>&=+-@$[]{},;\t\n",
]


def is_safe(text: str) -> bool:
    return all(c.isprintable() or c in "\n\u3000\xa0" for c in text)


def test_text_json_and_csv_of_anything():
    """Text shows on one line what a terminal would obey; JSON decodes to the original; CSV has no formula."""
    for seed in range(500):
        choose = random.Random(seed)
        _check("".join(choose.choices(CHARACTERS, k=choose.randint(0, 40))))


def _check(text: str):
    shown = errors.plain(text)
    assert is_safe(shown)
    assert "\n" not in shown
    assert errors.plain(shown) == shown
    document = {text: [text, {"a": text}, 1.5, None], "n_ns": 3}
    for written in (json_text(document), json_text(document, indent=2), json_text(text, compact=True)):
        assert is_safe(written)
    assert json.loads(json_text(document, indent=2)) == document
    table = Table.of([{"name": text, "total_ns": -3, "nested": [text]}])
    assert is_safe(table.csv())
    assert is_safe(repr(table))
    assert is_safe(table._repr_html_())
    [_, (name, total, nested)] = csv.reader(io.StringIO(table.csv(), newline=""))
    assert name.removeprefix("'") == shown.removeprefix("'")
    assert not name.startswith(("=", "+", "@", "\uff1d", "\uff0b", "\uff20", "\t", "\r"))
    assert total == "-3"
    assert json.loads(nested) == [text]


@pytest.mark.parametrize("text", ["-1", "-1.5", "5", "a=1"])
def test_a_number_is_no_formula(text: str):
    assert Table.of([{"name": text, "a": -5, "b": -0.5}]).csv() == f"name,a,b\n{text},-5,-0.5\n"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace whose own name a terminal would obey."""
    folder = tmp_path_factory.mktemp("hostile") / "\x1b]52;c;eA==\x07\u202e.parquet"
    store.write(hostile.trace(), folder)
    return folder


COMMANDS = [
    ["kernels"],
    ["gaps", "--each"],
    ["where", "--by", "op"],
    ["memops"],
    ["summary"],
    ["verdict"],
    ["whatif", "no-cpu-work"],
    ["diff"],
]


@pytest.mark.parametrize("format", ["text", "csv", "json"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_what_a_command_prints(command: list[str], format: str, path: Path, capsys: Any) -> None:  # noqa: A002
    files = [str(path)] * (2 if command[0] == "diff" else 1)
    is_table = command[0] not in ("summary", "verdict", "diff")
    code = cli.run([command[0], *files, *command[1:], "--format", format])
    assert code == (0 if is_table or format != "csv" else 2)
    out, err = capsys.readouterr()
    assert is_safe(out)
    assert is_safe(err)
    if command == ["kernels"] and format == "json":
        assert {row["name"] for row in json.loads(out)} == set(hostile.NAMES)
    if command == ["kernels"] and format == "csv":
        names = [row["name"] for row in csv.DictReader(io.StringIO(out, newline=""))]
        assert {n.removeprefix("'") for n in names} == {errors.plain(n).removeprefix("'") for n in hostile.NAMES}


@pytest.mark.parametrize("debug", ["0", "1"])
def test_what_an_error_says(debug: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch):
    """A file's name and a piece of it, on stderr and in a traceback of Python's own."""
    monkeypatch.setenv("NSIGHTKIT_DEBUG", debug)
    bad = tmp_path / "\x1b[31m\u202e\n.json"
    bad.write_text('{"traceEvents": [{"ph": "\x9b\u202e", "ts": "\x1b]0;x"')
    for arguments in (["kernels", str(bad)], ["diff", str(bad), str(bad)], ["report", str(bad), "-o", "\x1b[1m.txt"]):
        assert cli.run(arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert is_safe(err)
    assert is_safe(str(errors.TraceError(str(bad), "holds \x1b[2J", "\x9b")))


def test_what_a_viewers_file_holds(tmp_path: Path):
    chrome.write(hostile.trace(), tmp_path / "t.json")
    text = (tmp_path / "t.json").read_text("utf-8")
    assert is_safe(text)
    names = {event["name"] for event in json.loads(text)["traceEvents"] if event.get("cat") == "kernels"}
    assert names == set(hostile.NAMES)


def test_progress_names_a_file_safely(monkeypatch: pytest.MonkeyPatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    errors.progress("reading \x1b]52;c;eA==\x07\u202e [bold]x")
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "\\x1b]52" in shown
    assert "[bold]x" in shown
    assert not {"\x07", "\u202e"} & set(shown)
