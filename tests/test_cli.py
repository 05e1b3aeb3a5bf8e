"""The command line: formats, filters, exit codes, bad input, odd names, light imports."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from nsightkit import cli, table
from nsightkit.text import time_text
from nsightkit.trace import Trace, TraceMeta, store
from nsightkit.trace.model import Gpu

P = 7
MAIN = P << 24 | 1
OBJECTS = ("summary", "verdict")
COLUMNS = {
    "kernels": "name category count total_ns mean_ns median_ns min_ns max_ns std_ns share",
    "ranges": "name domain count total_ns exclusive_ns median_ns gpu_ns gpu_span_ns kernel_count rule",
    "gaps": "cause count total_ns share_of_span",
    "memops": "kind src_kind dst_kind count bytes total_ns gb_per_s",
    "calls": "name count total_ns mean_ns median_ns min_ns max_ns std_ns",
    "steps": "step start_ns wall_ns busy_ns idle_ns outlier phase tokens sequences compile_ns regions",
}
Run = Callable[..., tuple[int, str, str]]
Save = Callable[..., str]


def planted(names: list[str], missing: list[str]) -> Trace:
    """A step for each name, each launching a kernel of 40 ns with 60 ns of nothing after it, and a copy at the end."""
    n = len(names)
    at = pd.Series(range(n)) * 100
    kernels = {"start_ns": at + 20, "end_ns": at + 60, "name": pd.Categorical(names), "correlation": range(1, n + 1)}
    calls = {"start_ns": at + 5, "end_ns": at + 10, "name": "cudaLaunchKernel", "correlation": range(1, n + 1)}
    ranges = {"start_ns": at, "end_ns": at + 90, "name": [f"step {i}" for i in range(n)]}
    copy = {"start_ns": [n * 100], "end_ns": [n * 100 + 10], "kind": "HtoD", "bytes": 1000, "src_kind": "pinned"}
    frames = {
        "kernels": pd.DataFrame(kernels).assign(process=P),
        "calls": pd.DataFrame(calls).assign(process=P, thread=MAIN),
        "ranges": pd.DataFrame(ranges).assign(process=P, thread=MAIN),
        "os_calls": pd.DataFrame({"start_ns": [0], "end_ns": [n * 100], "name": "poll"}).assign(process=P, thread=MAIN),
        "memops": pd.DataFrame(copy).assign(process=P),
    }
    for name in missing:
        frames.pop(name, None)
    meta = TraceMeta("Nsight Systems", "2025.1.1", gpus=[Gpu(0, "NVIDIA H200")], missing=missing)
    return Trace.from_frames(frames, meta)


@pytest.fixture
def saved(tmp_path: Path) -> Save:
    def save(
        name: str = "planted.parquet",
        names: tuple[str, ...] = ("volta_sgemm_32x32_nn", "triton_poi_fused_add_0", "odd"),
        missing: tuple[str, ...] = (),
    ) -> str:
        store.write(planted(list(names), list(missing)), tmp_path / name, overwrite=True)
        return str(tmp_path / name)

    return save


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = cli.run(list(arguments))
        return code, *capsys.readouterr()

    return call


def document(run: Run, *arguments: str) -> Any:
    """The JSON of a command that has nothing else to say."""
    code, out, err = run(*arguments, "--format", "json")
    assert (code, err) == (0, "")
    return json.loads(out)


def one_line(text: str) -> str:
    assert text.endswith("\n")
    assert text.count("\n") == 1, text
    assert "Traceback" not in text
    assert text.startswith("nsightkit: ")
    return text


# ---------------------------------------------------------------- formats


@pytest.mark.parametrize("command", [*OBJECTS, *COLUMNS])
def test_every_command_in_every_format(command: str, saved: Save, run: Run):
    path = saved()
    answer = document(run, command, path)
    code, out, err = run(command, path, "-f", "csv")
    if command in OBJECTS:
        assert (code, out) == (2, "")
        assert "CSV is for tables" in one_line(err)
    else:
        columns = COLUMNS[command].split()
        assert all(list(row) == columns for row in answer)
        assert (code, err) == (0, "")
        assert out.splitlines()[0].split(",") == columns
        assert len(list(csv.DictReader(io.StringIO(out)))) == len(answer)
    code, out, err = run(command, path)
    assert (code, err) == (0, "")
    title = out.splitlines()[2 if command == "verdict" else 0]  # below the headline and the confidence
    assert {"NVIDIA H200", "planted.parquet"} <= set(title.split(" · "))
    assert max(map(len, out.splitlines())) <= 100


def test_text_shows_twenty_rows_and_top_chooses(saved: Save, run: Run):
    path = saved(names=tuple(f"kernel_{i:02d}" for i in range(25)))
    assert document(run, "kernels", path, "--top", "2") == document(run, "kernels", path)[:2]
    text = run("kernels", path)[1]
    assert text.count("kernel_") == 20
    assert "… 5 more" in text
    assert run("kernels", path, "--top", "22")[1].count("kernel_") == 22


def test_long_names_are_cut_and_stay_different(saved: Save, run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    names = [f"elementwise_kernel<{'x' * 300}, {kind}, {'y' * 300}>" for kind in ("float", "half", "double")]
    lines = run("kernels", saved(names=tuple(names)))[1].splitlines()
    assert all(len(line) <= 80 for line in lines)
    cut = {line.split("  ")[0] for line in lines if "40 ns" in line}  # figures are never cut for a name
    assert len(cut) == 3
    assert all("…" in name for name in cut)
    assert table.shortened(["a.layers.0.mlp/x", "a.layers.1.mlp/x"], 10) == ["a.la…0.ml…", "a.la…1.ml…"]


def test_not_recorded_is_null_with_one_line_on_stderr(saved: Save, run: Run):
    path = saved(missing=("memops", "graphs"))
    code, out, err = run("summary", path, "-f", "json")
    summary = json.loads(out)
    assert (code, summary["memop_ns"], summary["memory_overhead"]) == (0, None, None)
    assert summary["missing"] == ["memops", "graphs"]
    assert "does not record copies and memsets or CUDA graphs" in one_line(err)
    assert "not recorded" in run("summary", path)[1]
    code, out, err = run("memops", path, "-f", "json")
    assert (code, json.loads(out)) == (0, [])
    assert "does not record copies and memsets" in one_line(err)
    code, out, err = run("kernels", saved(), "--time", "1ms:2ms", "-f", "json")
    assert (code, json.loads(out)) == (0, [])
    assert one_line(err).endswith("the filters leave none of its kernels\n")


def test_bytes_that_are_no_utf8_come_out_as_utf8(monkeypatch: pytest.MonkeyPatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    cli.write(table.Table.of([{"name": "caf\udce9 π"}]), "json")
    assert json.loads(raw.getvalue().decode("utf-8")) == [{"name": "caf\udce9 π"}]


# ---------------------------------------------------------------- filters and usage


@pytest.mark.parametrize(
    ("filters", "count"),
    [
        ("--device 0", 3),
        ("--within step.[01]", 2),
        ("--time 0:100", 1),
        ("--time 0.1us:", 2),
        ("--time :100", 1),
        ("--time 100ns:0.2µs", 1),
        ("--time 0:1s", 3),
        ("--last-steps 2", 2),
        ("--last-steps 2 --within step.1", 1),
    ],
)
def test_filters(filters: str, count: int, saved: Save, run: Run):
    path = saved()
    assert document(run, "summary", path, *filters.split())["kernel_count"] == count
    assert sum(row["count"] for row in document(run, "kernels", path, *filters.split())) == count


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("kernels TRACE --device 9", "no device 9"),
        ("kernels TRACE --within (", "not a regular expression"),
        ("kernels TRACE --within nope", "no range matches"),
        ("kernels TRACE --time 5:1", "not after its start"),
        ("kernels TRACE --time 5", "not a window"),
        ("kernels TRACE --time 1h:2h", "not a window"),
        ("kernels TRACE --last-steps 0", "must be at least 1"),
        ("kernels TRACE --format xml", "--format"),
        ("kernels TRACE --top -1", "--top"),
        ("kernels TRACE --no-such-option", "--no-such-option"),
        ("kernels", "usage: nsightkit kernels TRACE; "),
        ("convert TRACE -o t.json", "usage: nsightkit convert TRACE OUT; "),
        ("whatif TRACE equal-ranks", "no kernels of a second GPU"),
        ("frobnicate", "frobnicate"),
        ("capture torch -o x python", "unrecognized arguments: python"),
        ("capture nsys python", "put -- before the program"),
        ("gaps TRACE --min-us inf", "--min-us"),
        (f"kernels TRACE --time {'9' * 5000}:1", "not a window"),
        (f"whatif TRACE --scale gemm={'9' * 5000}", "--scale"),
        ("verdict TRACE --gpu Voodoo", "Voodoo"),
        ("bench --steps 0", "--steps"),
        ("diff TRACE absent", "absent"),
        ("check TRACE --baseline absent", "absent"),
        ("check TRACE --baseline absent --update --tolerance -1", "--tolerance: -1"),
        ("report TRACE -o r.txt", "must end in .html"),
        ("convert TRACE t.txt", "must end in"),
        ("convert TRACE no/such/folder/t.json", "folder"),
        ("peaks H100 --measure", "--measure"),
        ("ranks TRACE --workers 1 --scheduler tcp://x", "--workers"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(
    arguments: str, says: str, saved: Save, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    saved("TRACE")
    code, out, err = run(*arguments.split())
    assert (code, out) == (2, "")
    assert says in one_line(err)
    assert [path.name for path in tmp_path.iterdir()] == ["TRACE"]


def test_help_and_version(run: Run):
    overview = run("--help")
    assert overview == run()
    assert all(re.search(rf"^  {name} ", overview[1], re.MULTILINE) for name in cli.COMMANDS)
    assert run("--version") == (0, "nsightkit 0.1.0\n", "")
    assert run("capture")[1].count("capture ") == 3
    for name in cli.COMMANDS:
        assert run(*name.split(), "--help") == (0, cli.help_of(name), "")


# ---------------------------------------------------------------- bad input


def _sqlite(path: Path, statements: str):
    with sqlite3.connect(path) as connection:
        connection.executescript(statements)
    connection.close()


def _folder(path: Path):
    path.mkdir()
    (path / "notes.txt").write_text("nothing")


_EVENT = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1.0, "dur": 2.0, "args": {"stream": 7}}
_KINETO = json.dumps({"schemaVersion": 1, "traceEvents": [_EVENT] * 2000}).encode()
_NOISE = random.Random(0).randbytes(100_000)
#: By the file's name: its bytes, or what makes it.
BAD: dict[str, bytes | Callable[[Path], None]] = {
    "empty.sqlite": b"",
    "pointer.nsys-rep": b"version https://git-lfs.github.com/spec/v1\noid",
    "random.json.gz": b"\x1f\x8b" + _NOISE,
    "garbage.sqlite": b"SQLite format 3\x00" + _NOISE[:50_000],
    "foreign.sqlite": lambda path: _sqlite(path, "CREATE TABLE customers (id INTEGER)"),
    "truncated.json": _KINETO[:60_000],
    "object.json": b'{"a": 1}',
    "folder": _folder,
}


@pytest.mark.parametrize("name", ["absent.sqlite", "a\nb\x1b[31m", *BAD])
def test_bad_input_is_one_line_with_the_file_and_a_remedy(name: str, tmp_path: Path, run: Run):
    path = tmp_path / name
    content = BAD.get(name)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        content(path)
    code, out, err = run("summary", str(path), "-f", "json")
    assert (code, out) == (2, ""), err
    line = one_line(err)
    assert str(path).replace("\n", "\\n").replace("\x1b", "\\x1b") in line
    assert ";" in line  # problem; remedy
    assert ("git lfs pull" in line) == name.startswith("pointer")


@pytest.mark.parametrize(("error", "code"), [(ValueError("a\nb"), 3), (MemoryError(), 2), (KeyboardInterrupt(), 130)])
def test_a_mistake_of_our_own_is_not_blamed_on_the_file(
    error: BaseException, code: int, saved: Save, run: Run, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object, **__: object):
        raise error

    path = saved()
    monkeypatch.setattr("nsightkit.analysis.timeline.overview.summary", fail)
    done, out, err = run("summary", path)
    assert (done, out) == (code, "")
    assert code == 130 or one_line(err)
    assert ("bug in nsightkit" in err) is (code == 3)
    assert ("test_cli.py:" in err) is (code == 3)


@pytest.mark.parametrize("name", ["a b 'c' \"d\" $(x) [red]é.parquet", "--help"])
def test_odd_file_names(name: str, saved: Save, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saved(name)
    # From the folder itself, so that the name begins with what it begins with.
    monkeypatch.chdir(tmp_path)
    code, out, err = run("kernels", "-f", "json", "--", name)
    assert (code, err) == (0, "")
    assert len(json.loads(out)) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]


# ---------------------------------------------------------------- what is written


def test_convert_and_back(saved: Save, run: Run, tmp_path: Path):
    names = ("/home/plantedperson/a.py", "/home/plantedperson/b/a.py", "volta_sgemm_32x32_nn")
    path, out = saved(names=names), tmp_path / "part.parquet"
    code, text, err = run("convert", path, str(out), "--last-steps", "3", "-f", "json")
    assert code == 0
    assert "left out: environment" in err
    assert json.loads(text)["out"] == str(out)
    rows = document(run, "kernels", str(out))
    assert {row["name"] for row in rows} == {"a.py", "a.py (2)", "volta_sgemm_32x32_nn"}
    code, text, _ = run("convert", path, str(tmp_path / "folder"), "--within", "step 1")
    assert (code, text) == (0, f"{tmp_path / 'folder'}\n")
    assert document(run, "summary", text.strip())["kernel_count"] == 1
    assert run("convert", path, path)[0] == 2


def test_convert_for_a_viewer(saved: Save, run: Run, tmp_path: Path):
    out = tmp_path / "t.json.gz"
    assert run("convert", saved(), str(out))[0] == 0
    events = json.loads(gzip.decompress(out.read_bytes()))["traceEvents"]
    assert any(event["name"] == "volta_sgemm_32x32_nn" for event in events)
    code, _, err = run("summary", str(out))
    assert code == 2
    assert "open it in Perfetto" in one_line(err)


def test_a_report_of_one_trace_and_of_two(saved: Save, run: Run, tmp_path: Path):
    out, path, other = tmp_path / "r.html", saved(), saved("other.parquet")
    code, text, err = run("report", path, "-o", str(out), "--last-steps", "2", "-f", "json")
    assert code == 0
    assert "left out: environment" in err
    assert json.loads(text) == {"traces": [path], "out": str(out), "bytes": out.stat().st_size}
    assert "<code>--last-steps 2</code>" in out.read_text()
    code, text, _ = run("report", path, "-o", str(out), other, "--overwrite")
    assert (code, text) == (0, f"{out}\n")
    assert "GPU profiles: 2 traces side by side" in out.read_text()


# ---------------------------------------------------------------- diff


def test_diff(saved: Save, run: Run):
    before = saved("before.parquet")
    after = saved("after.parquet", names=("ampere_sgemm_64x64_nn", "triton_poi_fused_add_3", "new"))
    answer = document(run, "diff", before, after, "--also-before", before)
    assert (answer["unit"], answer["before"]["kernel_count"], answer["before"]["captures"]) == ("step", 3, 2)
    assert all(isinstance(row["delta_ns"], int) for row in answer["kernels"])
    code, out, err = run("diff", before, after, "--last-steps", "2")
    assert (code, err) == (0, "")
    assert "\nbefore.parquet → after.parquet · --last-steps 2\n" in out


# ---------------------------------------------------------------- the process


def _environment(**more: str) -> dict[str, str]:
    root = str(Path(cli.__file__).resolve().parent.parent)
    return {**os.environ, "PYTHONPATH": root, "NSIGHTKIT_NO_CACHE": "1", **more}


def test_imports_are_light(saved: Save):
    heavy = {"torch", "matplotlib", "pandas", "numpy", "pyarrow", "mcp", "pydantic", "rich", "nsightkit.mcp"}
    for code, unwanted in (
        ("import nsightkit", heavy),
        ("from nsightkit import cli; cli.run(['--help'])", heavy),
        (f"from nsightkit import cli; cli.run(['gaps', {saved()!r}])", {"torch", "matplotlib"}),
    ):
        command = [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"]
        done = subprocess.run(command, capture_output=True, env=_environment(), check=True, timeout=120)
        assert not set(done.stdout.decode().splitlines()[-1].split()) & unwanted


def test_a_reader_that_leaves_early_is_no_error(saved: Save):
    path = saved(names=tuple(f"k{i}" for i in range(5000)))
    head = shutil.which("head") or pytest.skip("no head")
    command = [sys.executable, "-m", "nsightkit", "kernels", path, "--format", "json"]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=_environment())
    second = subprocess.run([head, "-c", "10"], stdin=first.stdout, capture_output=True, check=True, timeout=120)
    assert first.stdout is not None
    first.stdout.close()
    _, err = first.communicate(timeout=120)
    assert len(second.stdout) == 10
    assert (first.returncode, err) == (0, b"")


def test_a_full_disk_and_a_closed_stdout(saved: Save):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    command = [sys.executable, "-m", "nsightkit", "summary", saved()]
    given: dict[str, Any] = {"env": _environment(), "timeout": 120}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, **given)
    assert done.returncode == 2
    assert "No space left" in one_line(done.stderr)
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    ended = subprocess.run(closed, stderr=subprocess.PIPE, check=False, **given)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_doctor(run: Run):
    rows = document(run, "doctor")
    assert all(list(row) == ["check", "status", "found", "remedy"] for row in rows)


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("ns", "text"),
    [(None, "-"), (0, "0 ns"), (999, "999 ns"), (0.5, "0.5 ns"), (1500, "1.500 µs"), (12_345_678, "12.35 ms"),
     (999_999, "1.000 ms"), (2.5e9, "2.500 s"), (1.2345e12, "1,234.5 s")],
)  # fmt: skip
def test_times_in_words(ns: float | None, text: str):
    assert time_text(ns) == text


def test_values_become_json():
    frame = pd.DataFrame({"a_ns": [1.6], "b": [3], "c": [float("nan")], "d": [pd.NA], "e": [float("inf")]})
    nested = {"a_ns": frame["a_ns"][0], "b": [frame["b"][0], None], "c": pd.NaT, "d": frame["b"].to_numpy()}
    assert list(table.rows_of(frame)) == [{"a_ns": 2, "b": 3, "c": None, "d": None, "e": None}]
    assert table.plain_value(nested) == {"a_ns": 2, "b": [3, None], "c": None, "d": [3]}
