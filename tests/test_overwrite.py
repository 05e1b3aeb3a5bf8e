"""What is there stays: nothing is replaced unasked, and never what nsightkit did not write."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import hostile
import pytest

from nsightkit import cli
from nsightkit.trace import store

#: Commands that write a file, and one that writes a folder; OUT stands for its place.
COMMANDS = {
    "convert for a viewer": (["convert", "TRACE", "OUT.json"], ".json"),
    "convert to tables": (["convert", "TRACE", "OUT"], ""),
    "report": (["report", "TRACE", "-o", "OUT.html"], ".html"),
    "bench": (["bench", "--size", "smoke", "--device", "cpu", "--out-json", "OUT.json"], ".json"),
}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "t"
    store.write(hostile.trace(), path)
    return path


def put(place: str, out: Path, trace: Path):
    if place == "file":
        out.write_text("precious")
    elif place == "link":
        (out.parent / "target").write_text("precious")
        out.symlink_to("target")
    elif place == "pipe":
        os.mkfifo(out)
    else:
        out.mkdir()
        for file in trace.iterdir():
            (out / file.name).write_bytes(file.read_bytes())
        if place == "store of links":
            (out / "kernels.parquet").unlink()
            (out / "kernels.parquet").symlink_to(trace / "kernels.parquet")
        if place == "store and more":
            (out / "thesis.tex").write_text("precious")


def state(folder: Path) -> dict[str, Any]:
    """Everything that lies there."""
    found = {}
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = (path.lstat().st_ino, path.lstat().st_mode, content)
    return found


@pytest.mark.parametrize("place", ["file", "store", "store and more", "store of links", "link", "pipe"])
@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_there(command: str, place: str, trace: Path, tmp_path: Path, capsys: Any):
    if command == "bench":
        pytest.importorskip("torch")
    arguments, suffix = COMMANDS[command]
    put(place, tmp_path / f"OUT{suffix}", trace)
    before = state(tmp_path)
    asked = [a.replace("TRACE", str(trace)).replace("OUT", str(tmp_path / "OUT")) for a in arguments]
    assert cli.run(asked) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert f"OUT{suffix}: " in err
    assert state(tmp_path) == before
    writes_folder = command == "convert to tables"
    replaced = place == ("store" if writes_folder else "file")
    if command == "bench" and replaced:
        return  # it would measure
    assert cli.run([*asked, "--overwrite"]) == (0 if replaced else 2), capsys.readouterr().err
    assert (state(tmp_path) == before) is (not replaced)
    if replaced:
        assert {path.name for path in tmp_path.iterdir()} == {f"OUT{suffix}"}
        assert "exists; give another name or --overwrite" in err


def test_a_baseline_replaces_a_baseline_only(trace: Path, tmp_path: Path, capsys: Any):
    held = tmp_path / "baseline.json"
    held.write_text('{"traceEvents": []}')
    assert cli.run(["check", str(trace), "--baseline", str(held), "--update"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert held.read_text() == '{"traceEvents": []}'
