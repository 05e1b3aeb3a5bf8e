"""The command line: formats, filters, exit codes, bad input, hostile names, light imports."""

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
from synthetic.simulated_programs import PROGRAMS
from synthetic.simulator import play

from nsightkit import cli, show
from nsightkit.analysis.core import text as text_of
from nsightkit.trace import Trace, TraceMeta, store
from nsightkit.trace.model import Gpu
from nsightkit.verbs import QUESTIONS

P = 7
MAIN = P << 24 | 1
TRACE_COMMANDS = ["summary", "verdict", "kernels", "ranges", "gaps", "memops", "calls", "steps"]
#: Those that answer with one object.
OBJECTS = ("summary", "verdict")
COLUMNS = {
    "kernels": "name category count total_ns mean_ns median_ns min_ns max_ns std_ns share",
    "ranges": "name domain count total_ns exclusive_ns median_ns gpu_ns gpu_span_ns kernel_count rule",
    "gaps": "cause count total_ns share_of_span",
    "memops": "kind src_kind dst_kind count bytes total_ns gb_per_s",
    "calls": "name count total_ns mean_ns median_ns min_ns max_ns std_ns",
    "steps": "step start_ns wall_ns busy_ns idle_ns outlier phase tokens sequences",
}


def planted(names: list[str] | None = None, missing: list[str] | None = None) -> Trace:
    """Three steps, each launching a kernel of 40 ns with 60 ns of nothing after it, and a copy."""
    names = names or ["volta_sgemm_32x32_nn", "triton_poi_fused_add_0", "odd"]
    n = len(names)
    at = pd.Series(range(n)) * 100
    frames: dict[str, pd.DataFrame] = {
        "kernels": pd.DataFrame({"start_ns": at + 20, "end_ns": at + 60, "name": pd.Categorical(names)}),
        "calls": pd.DataFrame(
            {"start_ns": at + 5, "end_ns": at + 10, "name": pd.Categorical(["cudaLaunchKernel"] * n)}
        ),
        "ranges": pd.DataFrame(
            {"start_ns": at, "end_ns": at + 90, "name": pd.Categorical([f"step {i}" for i in range(n)])}
        ),
        "os_calls": pd.DataFrame({"start_ns": [0], "end_ns": [n * 100], "name": pd.Categorical(["poll"])}),
    }
    for name in ("calls", "ranges", "os_calls"):
        frames[name] = frames[name].assign(process=P, thread=MAIN)
    for name in ("kernels", "calls"):
        frames[name] = frames[name].assign(process=P, correlation=range(1, n + 1))
    copy = {"start_ns": [n * 100], "end_ns": [n * 100 + 10], "kind": pd.Categorical(["HtoD"]), "bytes": [1000]}
    frames["memops"] = pd.DataFrame({**copy, "src_kind": pd.Categorical(["pinned"]), "process": P})
    frames = {name: frame for name, frame in frames.items() if name not in (missing or [])}
    meta = TraceMeta(
        tool="Nsight Systems", tool_version="2025.1.1", gpus=[Gpu(0, "NVIDIA H200")], missing=missing or []
    )
    return Trace.from_frames(frames, meta)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., str]:
    def save(name: str = "planted.parquet", **options: Any) -> str:
        folder = tmp_path / name
        store.write(planted(**options), folder, overwrite=True)
        return str(folder)

    return save


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = cli.run(list(arguments))
        return code, *capsys.readouterr()

    return call


def one_line(text: str) -> str:
    assert text.endswith("\n")
    assert text.count("\n") == 1, text
    assert "Traceback" not in text
    assert text.startswith("nsightkit: ")
    return text


# ---------------------------------------------------------------- formats


@pytest.mark.parametrize("command", TRACE_COMMANDS)
def test_every_command_in_every_format(command: str, saved: Any, run: Any) -> None:
    path = saved()
    code, out, err = run(command, path, "--format", "json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    if command in OBJECTS:
        assert isinstance(document, dict)
        keys = list(document)
    else:
        assert isinstance(document, list)
        keys = COLUMNS[command].split()
        assert all(list(row) == keys for row in document)
    times = [v for row in ([document] if command in OBJECTS else document) for k, v in row.items() if k.endswith("_ns")]
    assert times
    # Of a trace with few operations a verdict says no time.
    assert all(isinstance(value, int) or (command == "verdict" and value is None) for value in times)

    code, out, err = run(command, path, "--format", "csv")
    assert (code, err) == (0, "")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert list(rows[0]) == keys
    assert len(rows) == (1 if command in OBJECTS else len(document))

    code, out, err = run(command, path, "--format", "table")
    assert (code, err) == (0, "")
    assert "NVIDIA H200" in out.splitlines()[0]
    assert "planted.parquet" in out.splitlines()[0]


def test_off_a_terminal_the_default_is_csv(saved: Any, run: Any) -> None:
    path = saved()
    assert run("kernels", path)[1] == run("kernels", path, "-f", "csv")[1]


def test_on_a_terminal_the_default_is_a_table(saved: Any, tmp_path: Path) -> None:
    pty = pytest.importorskip("pty")
    theirs, ours = pty.openpty()
    command = [sys.executable, "-m", "nsightkit", "kernels", saved()]
    done = subprocess.run(
        command, stdout=ours, stderr=subprocess.PIPE, env=_environment(COLUMNS="100"), timeout=120, check=True
    )
    os.close(ours)
    out = os.read(theirs, 100_000).decode()
    os.close(theirs)
    assert done.stderr == b""
    assert "NVIDIA H200" in out
    assert "33.3 %" in out


def test_figures_reach_the_output_unchanged(saved: Any, run: Any) -> None:
    path = saved()
    result = json.loads(run("summary", path, "-f", "json")[1])
    assert (result["busy_ns"], result["idle_ns"], result["span_ns"]) == (130, 160, 290)
    assert result["kernel_count"] == 3
    by_category = json.loads(run("kernels", path, "--by", "category", "-f", "json")[1])
    assert {row["name"]: row["total_ns"] for row in by_category} == {"GEMM": 40, "Triton-fused": 40, "other": 40}
    assert len(json.loads(run("kernels", path, "--top", "2", "-f", "json")[1])) == 2
    gaps = json.loads(run("gaps", path, "-f", "json")[1])
    assert sum(row["total_ns"] for row in gaps) == result["idle_ns"]
    each = json.loads(run("gaps", path, "--each", "-f", "json")[1])
    assert [row["end_ns"] - row["start_ns"] for row in each] == [60, 60, 40]
    assert list(each[0]) == ["device", "start_ns", "end_ns", "cause", "evidence"]
    assert len(json.loads(run("gaps", path, "--each", "--min-us", "0.05", "-f", "json")[1])) == 2
    assert json.loads(run("calls", path, "--os", "-f", "json")[1])[0]["name"] == "poll"
    assert (
        json.loads(run("ranges", path, "--rule", "thread", "--match", "step 1", "-f", "json")[1])[0]["rule"] == "thread"
    )
    assert len(json.loads(run("steps", path, "--match", "step [12]", "-f", "json")[1])) == 2


def test_a_table_shows_twenty_rows_and_says_how_many_more(saved: Any, run: Any) -> None:
    path = saved(names=[f"kernel_{i:02d}" for i in range(25)])
    out = run("kernels", path, "-f", "table")[1]
    assert sum("kernel_" in line for line in out.splitlines()) == 20
    assert "… 5 more" in out
    assert sum("kernel_" in line for line in run("kernels", path, "-f", "table", "--top", "22")[1].splitlines()) == 22
    assert len(json.loads(run("kernels", path, "-f", "json")[1])) == 25


@pytest.mark.parametrize("width", ["40", "80", "120", "200"])
def test_tables_fit_the_terminal(width: str, saved: Any, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", width)
    path = saved(names=["void at::native::elementwise_kernel<" + "x" * 300 + ">(int)", "b", "c"])
    lines = run("kernels", path, "-f", "table")[1].splitlines()
    assert all(len(line) <= int(width) for line in lines[1:6])
    (long,) = (line for line in lines if "xxx" in line)
    assert "…" in long
    assert "40 ns" in long  # figures are never cut for a name


def test_not_recorded_is_null_with_one_line_on_stderr(saved: Any, run: Any) -> None:
    path = saved(missing=["memops", "graphs"])
    code, out, err = run("summary", path, "-f", "json")
    assert code == 0
    result = json.loads(out)
    assert result["memop_ns"] is None
    assert result["memory_overhead"] is None
    assert result["missing"] == ["memops", "graphs"]
    assert "no record of memops or graphs" in one_line(err)
    code, out, err = run("memops", path, "-f", "json")
    assert (code, json.loads(out)) == (0, [])
    assert "no record of memops" in one_line(err)
    assert "not recorded" in run("summary", path, "-f", "table")[1]


def test_a_selection_without_gpu_work_is_null_with_one_line_on_stderr(saved: Any, run: Any) -> None:
    path = saved()
    code, out, err = run("summary", path, "--time", "1ms:2ms", "-f", "json")
    assert (code, json.loads(out)["idle_ns"], json.loads(out)["kernel_count"]) == (0, None, None)
    assert one_line(err).endswith("the filters leave none of its kernels or memops\n")
    code, out, err = run("kernels", path, "--time", "1ms:2ms", "-f", "json")
    assert (code, json.loads(out)) == (0, [])
    assert one_line(err).endswith("the filters leave none of its kernels\n")


def test_a_verdict_is_a_few_readable_lines(
    saved: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    path = str(play(PROGRAMS["item-each-layer"], seed=1).write(tmp_path / "synced.sqlite"))
    document = json.loads(run("verdict", path, "-f", "json")[1])
    code, out, err = run("verdict", path, "-f", "table")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    share = f"{100 * document['share_of_span']:.1f} % of the time"
    assert lines[1] == f"{document['bottleneck']}, {share} (confidence: {document['confidence']})"
    assert [line.split()[0] for line in lines if not line.startswith(" ")][2:] == ["evidence", "against", "next"]
    assert all(len(line) <= 100 for line in lines)
    said = " ".join(out.split())
    for key in ("evidence", "against", "next_steps"):
        assert document[key]
        for text in document[key]:
            assert text in said
    without = run("verdict", saved("none.parquet", missing=["kernels", "memops", "graphs", "calls"]), "-f", "table")
    assert without[::2] == (0, "")
    assert without[1].splitlines()[1] == "not-enough-data (confidence: low)"
    assert "nsightkit capture nsys" in without[1]


def test_a_verdict_about_a_card_that_nobody_knows(saved: Any, run: Any) -> None:
    code, out, err = run("verdict", saved(), "--gpu", "Voodoo 2")
    assert (code, out) == (2, "")
    assert "Voodoo 2" in one_line(err)


# ---------------------------------------------------------------- filters


@pytest.mark.parametrize(
    ("filters", "count"),
    [
        (["--device", "0"], 3),
        (["--within", "step [01]"], 2),
        (["--time", "0:100"], 1),
        (["--time", "0.1us:"], 2),
        (["--time", ":100"], 1),
        (["--time", "100ns:0.2µs"], 1),
        (["--time", "0:1s"], 3),
        (["--last-steps", "2"], 2),
        (["--last-steps", "2", "--within", "step 1"], 1),
    ],
)
@pytest.mark.parametrize("command", ["kernels", "summary"])
def test_filters(command: str, filters: list[str], count: int, saved: Any, run: Any) -> None:
    code, out, err = run(command, saved(), "-f", "json", *filters)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["kernel_count"] if command == "summary" else sum(row["count"] for row in found)) == count


@pytest.mark.parametrize("command", [*TRACE_COMMANDS, "convert"])
def test_every_trace_command_takes_the_filters(command: str, saved: Any, run: Any, tmp_path: Path) -> None:
    out = [str(tmp_path / "out.parquet")] if command == "convert" else []
    filters = ["--device", "0", "--within", "step", "--time", "0:1s", "--last-steps", "3", "--no-cache", "-f", "json"]
    code, _, err = run(command, saved(), *out, *filters)
    says = {"memops": "the filters leave none of its memops\n", "convert": "kernels and files\n"}
    assert (code, err.endswith(says[command]) if command in says else err == "") == (0, True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--device", "9"], "no device 9"),
        (["--within", "("], "not a regular expression"),
        (["--within", "nope"], "no range matches"),
        (["--time", "5:1"], "not after its start"),
        (["--time", "5"], "not a window"),
        (["--time", ":"], "not a window"),
        (["--time", "1h:2h"], "not a window"),
        (["--time", f"{'9' * 5000}:1"], "not a window"),
        (["--time", f"{'9' * 90}:1"], "no trace is so long"),
        (["--time", f"1:{'9' * 30}s"], "no trace is so long"),
        (["--last-steps", "0"], "not a number of steps"),
        (["--device", "x"], "--device"),
        (["--format", "xml"], "--format"),
        (["--by", "stream"], "--by"),
        (["--top", "-1"], "--top"),
        (["--no-such-option"], "--no-such-option"),
        (["extra"], "extra"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(arguments: list[str], says: str, saved: Any, run: Any) -> None:
    code, out, err = run("kernels", saved(), *arguments)
    assert (code, out) == (2, "")
    assert says in one_line(err)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["gaps", "TRACE", "--min-us", "inf"], "--min-us"),
        (["gaps", "TRACE", "--min-us", "nan"], "--min-us"),
        (["whatif", "TRACE", "--scale", f"gemm={'9' * 5000}"], "--scale"),
        (["whatif", "TRACE", "--scale", "gemm=1e9"], "--scale"),
        (["whatif", "TRACE", "--scale", "gemm=1001"], "--scale"),
        (["bench", "--memory-cap-gb", "inf"], "--memory-cap-gb"),
    ],
)
def test_a_number_beyond_reason_is_one_line_and_exit_2(arguments: list[str], says: str, saved: Any, run: Any) -> None:
    code, out, err = run(*[saved() if argument == "TRACE" else argument for argument in arguments])
    assert (code, out) == (2, "")
    assert says in one_line(err)


def test_no_such_command_and_no_command(run: Any) -> None:
    code, out, err = run("frobnicate")
    assert (code, out) == (2, "")
    assert "frobnicate" in one_line(err)
    code, out, err = run()
    assert (code, err) == (0, "")
    assert "summary" in out
    code, out, _ = run("--version")
    assert (code, out) == (0, "nsightkit 0.1.0\n")


# ---------------------------------------------------------------- bad input


def _sqlite(path: Path, statements: str) -> None:
    with sqlite3.connect(path) as connection:
        connection.executescript(statements)
    connection.close()


def _foreign(path: Path) -> None:
    _sqlite(path, "CREATE TABLE customers (id INTEGER, name TEXT); INSERT INTO customers VALUES (1, 'x');")


def _truncated_sqlite(path: Path) -> None:
    _sqlite(
        path,
        "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, demangledName INTEGER);"
        "CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);"
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 20000) "
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL SELECT i * 10, i * 10 + 5, 0, 1 FROM n;",
    )
    path.write_bytes(path.read_bytes()[:20_000])


def _kineto() -> bytes:
    event = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1.0, "dur": 2.0, "args": {"stream": 7}}
    return json.dumps({"schemaVersion": 1, "traceEvents": [event] * 2000}).encode()


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("nothing")


def _parquet_of_something_else(path: Path) -> None:
    path.mkdir()
    pd.DataFrame({"a": [1]}).to_parquet(path / "StringIds.parquet")


BAD: dict[str, tuple[str, Callable[[Path], object]]] = {
    "absent": ("t.sqlite", lambda path: None),
    "empty": ("t.sqlite", lambda path: path.write_bytes(b"")),
    "empty-json": ("t.json", lambda path: path.write_bytes(b"")),
    "random": ("t.sqlite", lambda path: path.write_bytes(random.Random(0).randbytes(100_000))),
    "random-json": ("t.json", lambda path: path.write_bytes(b"{" + random.Random(0).randbytes(100_000))),
    "random-gz": ("t.json.gz", lambda path: path.write_bytes(b"\x1f\x8b" + random.Random(0).randbytes(100_000))),
    "random-rep": ("t.nsys-rep", lambda path: path.write_bytes(random.Random(0).randbytes(1000))),
    "sqlite-header": ("t.sqlite", lambda path: path.write_bytes(b"SQLite format 3\x00" + b"\x00" * 100)),
    "sqlite-garbage": (
        "t.sqlite",
        lambda path: path.write_bytes(b"SQLite format 3\x00" + random.Random(0).randbytes(50_000)),
    ),
    "truncated-sqlite": ("t.sqlite", _truncated_sqlite),
    "foreign-sqlite": ("t.sqlite", _foreign),
    "truncated-json": ("t.json", lambda path: path.write_bytes(_kineto()[:60_000])),
    "truncated-gz": (
        "t.json.gz",
        lambda path: path.write_bytes(gzip.compress(random.Random(0).randbytes(9999))[:5000]),
    ),
    "truncated-gz-json": ("t.json.gz", lambda path: path.write_bytes(gzip.compress(_kineto(), 0)[:50_000])),
    "json-number": ("t.json", lambda path: path.write_bytes(b"[1, 2, 3]")),
    "json-object": ("t.json", lambda path: path.write_bytes(b'{"a": 1}')),
    "json-wrong-events": ("t.json", lambda path: path.write_bytes(b'{"traceEvents": {"a": 1}}')),
    "folder": ("t", _folder),
    "foreign-parquet": ("t", _parquet_of_something_else),
    "text": ("t.txt", lambda path: path.write_text("hello")),
    "lfs-pointer": ("t.sqlite", lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid …")),
}


@pytest.mark.parametrize(
    ("case", "command"),
    [
        *((case, "summary") for case in BAD),
        *(("json-object", command) for command in QUESTIONS if command != "summary"),
    ],
)
def test_bad_input_is_one_line_with_the_file_and_a_remedy(case: str, command: str, tmp_path: Path, run: Any) -> None:
    name, make = BAD[case]
    path = tmp_path / name
    make(path)
    code, out, err = run(command, str(path), "-f", "json")
    assert (code, out) == (2, ""), err
    line = one_line(err)
    assert str(path) in line
    assert ";" in line  # problem; remedy
    assert ("git lfs pull" in line) == (case == "lfs-pointer")


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("name", ["cs336-zx3xyy/result_2_7B_nvtx.sqlite", "tracelens/h100__facebook"])
def test_a_real_trace_cut_short(name: str, keep: float, shared_traces: Path, tmp_path: Path, run: Any) -> None:
    (source,) = [p for p in (shared_traces / Path(name).parent).iterdir() if p.name.startswith(Path(name).name)]
    data = source.read_bytes()
    cut = tmp_path / source.name
    cut.write_bytes(data[: int(len(data) * keep)])
    code, out, err = run("summary", str(cut), "-f", "json")
    assert (code, out) == (2, "")
    assert str(cut) in one_line(err)


def test_debug_shows_the_traceback(tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSIGHTKIT_DEBUG", "1")
    code, _, err = run("summary", str(tmp_path / "absent"))
    assert code == 2
    assert "Traceback" in err


def test_what_a_library_raises_over_a_file_names_the_file(saved: Any, run: Any, monkeypatch: Any) -> None:
    path, open_store = saved(), store.open_store
    for error in (ValueError("a\nb"), EOFError("x"), KeyError("start"), OSError(5, "I/O")):

        def fail(*_: object, _error: Exception = error, **__: object) -> None:
            raise _error

        def opened(folder: Path, _fail: Any = fail) -> Any:
            source = open_store(folder)
            source.read = _fail
            return source

        monkeypatch.setattr(store, "open_store", opened)
        code, out, err = run("summary", path)
        assert (code, out) == (2, "")
        assert path in one_line(err)


def test_a_mistake_of_our_own_is_not_blamed_on_the_file(saved: Any, run: Any, monkeypatch: Any) -> None:
    path = saved()
    for error, expected in ((ValueError("a\nb"), 3), (KeyError("start"), 3), (MemoryError(), 2)):

        def fail(*_: object, _error: BaseException = error, **__: object) -> None:
            raise _error

        monkeypatch.setattr("nsightkit.analysis.timeline.overview.summary", fail)
        code, out, err = run("summary", path)
        assert (code, out) == (expected, "")
        said = one_line(err)
        assert ("own" in said) is (expected == 3)
        assert expected == 2 or "test_cli.py:" in said


# ---------------------------------------------------------------- odd names


def test_bytes_that_are_no_utf8_come_out_as_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    show.write("json", [{"name": "caf\udce9 π"}], table=lambda _: None)
    assert json.loads(raw.getvalue().decode("utf-8")) == [{"name": "caf\udce9 π"}]


@pytest.mark.parametrize("name", ["-dash.parquet", "a b 'c' \"d\" $(x).parquet", "[red]é.parquet", "--help"])
def test_hostile_file_names(name: str, saved: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(name)
    # From the folder itself, so that the name begins with what it begins with.
    monkeypatch.chdir(tmp_path)
    code, out, err = run("kernels", "-f", "json", "--no-cache", "--", name)
    assert (code, err) == (0, "")
    assert len(json.loads(out)) == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == [name]


def test_an_absent_file_with_a_newline_in_its_name(tmp_path: Path, run: Any) -> None:
    code, _, err = run("summary", str(tmp_path / "a\nb\x1b[31m"))
    assert code == 2
    assert "a\\nb\\x1b" in one_line(err)


# ---------------------------------------------------------------- convert


def test_convert_to_a_folder_and_back(saved: Any, run: Any, tmp_path: Path) -> None:
    out = tmp_path / "part.parquet"
    code, text, err = run("convert", saved(), str(out), "--within", "step 1", "-f", "json")
    assert code == 0
    assert "left out: environment" in err
    assert json.loads(text)["out"] == str(out)
    assert json.loads(run("summary", str(out), "-f", "json")[1])["kernel_count"] == 1


@pytest.mark.parametrize("name", ["t.json.gz", "t.json"])
def test_convert_for_a_viewer(name: str, saved: Any, run: Any, tmp_path: Path) -> None:
    out = tmp_path / name
    assert run("convert", saved(), str(out))[0] == 0
    raw = gzip.decompress(out.read_bytes()) if name.endswith("gz") else out.read_bytes()
    assert any(event["name"] == "volta_sgemm_32x32_nn" for event in json.loads(raw)["traceEvents"])
    assert json.loads(run("summary", str(out), "-f", "json")[1])["kernel_count"] == 3


def test_convert_refuses_what_it_cannot_write(saved: Any, run: Any, tmp_path: Path) -> None:
    path = saved()
    for out in ("t.txt", "no/such/folder/t.json", Path(path).name):
        code, _, err = run("convert", path, str(tmp_path / out))
        assert code == 2, out
        one_line(err)
    assert json.loads(run("summary", path, "-f", "json")[1])["kernel_count"] == 3


# ---------------------------------------------------------------- a report


def test_a_report_of_one_trace_and_of_two(saved: Any, run: Any, tmp_path: Path) -> None:
    out, path = tmp_path / "r.html", saved()
    code, text, err = run("report", path, "-o", str(out), "--last-steps", "2", "--title", "A <run>", "-f", "json")
    assert code == 0
    assert "left out: environment" in err
    said = json.loads(text)
    assert said == {"traces": [path], "out": str(out), "bytes": out.stat().st_size}
    page = out.read_text()
    assert "<title>A &lt;run&gt;</title>" in page
    assert "<code>--last-steps 2</code>" in page
    others = ["report", *(str(tmp_path / name) for name in ("planted.parquet", "other.parquet")), "-o", str(out)]
    saved("other.parquet")
    code, text, err = run(*others)
    assert (code, text) == (2, "")
    assert "--overwrite" in one_line(err)
    code, text, _ = run(*others, "--overwrite", "-f", "table")
    assert (code, text.strip()) == (0, str(out))
    assert "GPU profiles: 2 traces side by side" in out.read_text()


def test_a_report_never_takes_a_traces_place(saved: Any, run: Any, tmp_path: Path) -> None:
    path = tmp_path / "t.html"  # a trace by any name
    assert run("convert", saved(), str(tmp_path / "t.json"))[0] == 0
    path.write_bytes((tmp_path / "t.json").read_bytes())
    before = path.read_bytes()
    fresh, nowhere = tmp_path / "r.html", tmp_path / "no" / "r.html"
    refused = [([path], path), ([saved(), path], path), ([path], tmp_path / "r.txt"), ([path], nowhere)]
    for traces, out in (*refused, ([tmp_path / "absent", path], fresh)):
        code, text, err = run("report", *map(str, traces), "-o", str(out))
        assert (code, text) == (2, "")
        one_line(err)
    assert path.read_bytes() == before
    assert not fresh.exists()
    assert run("report", saved())[0] == 2


def test_a_report_of_a_broken_trace_leaves_the_last_one(saved: Any, run: Any, tmp_path: Path) -> None:
    out, broken = tmp_path / "r.html", tmp_path / "broken.json"
    out.write_text("the last one")
    broken.write_text('{"traceEvents": [{"ph": "X", "name"')
    code, _, err = run("report", saved(), str(broken), "-o", str(out), "--overwrite")
    assert code == 2
    assert "broken.json" in one_line(err)
    assert out.read_text() == "the last one"


@pytest.mark.parametrize("name", ["t.json", "folder"])
def test_a_conversion_holds_no_secrets(name: str, saved: Any, run: Any, tmp_path: Path) -> None:
    path = saved(names=["/home/plantedperson/a.py", "/home/plantedperson/b/a.py", "volta_sgemm_32x32_nn"])
    out = tmp_path / name
    assert run("convert", path, str(out))[0] == 0
    rows = json.loads(run("kernels", str(out), "-f", "json")[1])
    assert {row["name"] for row in rows} == {"a.py", "a.py (2)", "volta_sgemm_32x32_nn"}


# ---------------------------------------------------------------- a gate


def test_a_check_in_every_format(saved: Any, run: Any, tmp_path: Path) -> None:
    before, after = saved(), saved("more.parquet", names=["one", "two", "three", "four"])
    held = str(tmp_path / "baseline.json")
    assert run("check", before, "--baseline", held, "--update")[0] == 0
    code, out, err = run("check", before, "--baseline", held, "--format", "table")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "baseline.json · 1 and 1 runs · tolerance 5 %"
    assert re.search(r"^ok +step/kernel_count +1 +1 +\+0\.0 % +\+5\.0 %$", out, re.MULTILINE)

    document = json.loads(Path(held).read_text())
    document["metrics"]["step/copied_bytes"] |= {"value": 10, "runs": [[10, 10, 10]]}
    document["metrics"]["step/lost_ns"] = document["metrics"]["step/time_ns"]
    Path(held).write_text(json.dumps(document))
    code, out, err = run("check", after, "--baseline", held, "--format", "table")
    assert code == 1
    assert re.search(r"^MISSING +step/lost_ns ", out, re.MULTILINE)
    assert "not in the baseline: " in out
    assert one_line(err) == f"nsightkit: the check against {held} failed: step/lost_ns (missing)\n"

    code, out, err = run("check", after, "--baseline", held, "--format", "csv")
    assert code == 1
    rows = {row["metric"]: row for row in csv.DictReader(io.StringIO(out))}
    assert rows["step/lost_ns"]["status"] == "missing"
    assert rows["step/lost_ns"]["after"] == rows["step/lost_ns"]["ratio"] == ""
    assert rows["step/copied_bytes"]["status"] == "improvement"
    assert rows["step/time_ns"]["before"] == "100"

    code, out, _ = run("check", after, "--baseline", held, "--format", "json")
    answer = json.loads(out)
    assert code == 1
    assert [row["metric"] for row in answer["missing"]] == ["step/lost_ns"]
    assert answer["regressions"] == []
    assert all(isinstance(row["before"], int) for row in answer["gates"] if row["unit"] == "ns")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tolerance", "-1"], "--tolerance: -1"),
        (["--tolerance", "5%"], "--tolerance"),
        (["--command", "make"], "--update or --add"),
        (["--last-steps", "0"], "--last-steps: 0"),
        (["--match", "("], "--match: '('"),
    ],
)
def test_a_check_of_what_cannot_be_checked(
    arguments: list[str], says: str, saved: Any, run: Any, tmp_path: Path
) -> None:
    path, held = saved(), str(tmp_path / "baseline.json")
    assert run("check", path, "--baseline", held, "--update")[0] == 0
    before = Path(held).read_bytes()
    code, out, err = run("check", path, "--baseline", held, *arguments)
    assert (code, out) == (2, "")
    assert says in one_line(err)
    assert Path(held).read_bytes() == before
    code, _, err = run("check", path)
    assert code == 2
    assert "--baseline" in one_line(err)


# ---------------------------------------------------------------- this machine


def test_doctor(run: Any) -> None:
    code, out, err = run("doctor", "-f", "json")
    assert (code, err) == (0, "")
    rows = json.loads(out)
    assert rows
    assert all(list(row) == ["check", "status", "found", "remedy"] for row in rows)


# ---------------------------------------------------------------- the process


def _environment(**more: str) -> dict[str, str]:
    root = str(Path(cli.__file__).resolve().parent.parent)
    return {**os.environ, "PYTHONPATH": root, "NSIGHTKIT_NO_CACHE": "1", **more}


def _python(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=_environment(), check=True, timeout=120
    )
    return set(done.stdout.decode().split())


def test_importing_is_light() -> None:
    loaded = _python("import sys, nsightkit; print(*sys.modules)")
    assert not loaded & {"torch", "matplotlib", "pandas", "numpy", "pyarrow", "typer", "rich"}
    loaded = _python("import sys, nsightkit.cli; print(*sys.modules)")
    assert not loaded & {"torch", "matplotlib", "pandas", "numpy", "pyarrow", "mcp", "pydantic", "nsightkit.mcp"}


def test_reading_a_trace_needs_neither_torch_nor_matplotlib(saved: Any) -> None:
    script = f"import sys; from nsightkit import cli; cli.run(['gaps', {saved()!r}]); print(*sys.modules)"
    assert not _python(script) & {"torch", "matplotlib"}


@pytest.mark.parametrize("format", ["csv", "json", "table"])
def test_a_reader_that_leaves_early_is_no_error(format: str, saved: Any) -> None:  # noqa: A002
    path = saved(names=[f"k{i}" for i in range(5000)])
    head = shutil.which("head") or pytest.skip("no head")
    writer = subprocess.Popen(
        [sys.executable, "-m", "nsightkit", "kernels", path, "--top", "5000", "-f", format],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_environment(),
    )
    subprocess.run([head, "-n", "1"], stdin=writer.stdout, capture_output=True, timeout=120, check=True)
    assert writer.stdout is not None
    writer.stdout.close()
    _, err = writer.communicate(timeout=120)
    assert (writer.returncode, err) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["kernels", "TRACE"], ["verdict", "TRACE", "-f", "table"], ["--help"]])
def test_a_stdout_that_takes_nothing(arguments: list[str], unbuffered: str, saved: Any) -> None:
    """A full one is one line and exit 2; a closed one is nobody's mistake, and notes do not go there instead."""
    command = [sys.executable, "-m", "nsightkit", *(saved() if a == "TRACE" else a for a in arguments)]
    given: dict[str, Any] = {"env": _environment(PYTHONUNBUFFERED=unbuffered), "timeout": 120}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, **given)
    assert done.returncode == 2
    assert "No space left" in one_line(done.stderr)
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    done = subprocess.run(closed, stderr=subprocess.PIPE, check=False, **given)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_process_ends_with_the_code(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nsightkit", "summary", str(tmp_path / "absent.sqlite")]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment(), timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "absent.sqlite" in one_line(done.stderr)


def test_interrupted(saved: Any, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    path = saved()
    monkeypatch.setattr("nsightkit.analysis.timeline.overview.summary", stop)
    assert run("summary", path)[0] == 130


# ---------------------------------------------------------------- text


@pytest.mark.parametrize(
    ("ns", "text"),
    [(None, "-"), (0, "0 ns"), (999, "999 ns"), (0.5, "0.5 ns"), (1500, "1.500 µs"), (12_345_678, "12.35 ms"),
     (999_999, "1.000 ms"), (2.5e9, "2.500 s"), (1.2345e12, "1,234.5 s")],
)  # fmt: skip
def test_times_in_words(ns: float | None, text: str) -> None:
    assert text_of.time_text(ns) == text


def test_values_become_json() -> None:
    import numpy as np

    values = {
        "a_ns": np.float64(1.6),
        "b": np.int64(3),
        "c": float("nan"),
        "d": pd.NA,
        "e": [np.bool_(True), None],
        "f": {"g_ns": 2.4},
        "h": float("inf"),
        "i": np.array([1, 2]),
        "j": pd.NaT,
    }
    ready = show.ready(values)
    assert ready == {
        "a_ns": 2, "b": 3, "c": None, "d": None, "e": [True, None], "f": {"g_ns": 2}, "h": None, "i": [1, 2], "j": None,
    }  # fmt: skip
    json.dumps(ready, allow_nan=False)


def test_the_checklist_is_printed_whole(run: Any) -> None:
    from nsightkit.checklist import CHECKLIST

    code, shown, _ = run("checklist", "--format", "table")
    assert code == 0
    assert all(item.do.split()[0] in shown and (item.command or "") in shown for item in CHECKLIST)
    rows = json.loads(run("checklist", "--format", "json")[1])
    assert [row["step"] for row in rows] == list(range(1, len(CHECKLIST) + 1))
    assert {row["phase"] for row in rows} == {"before", "change", "after"}


# ---------------------------------------------------------------- diff


@pytest.fixture
def pair(saved: Any) -> list[str]:
    before = saved("before.parquet", names=["volta_sgemm_32x32_nn", "triton_poi_fused_add_0", "odd"])
    return [before, saved("after.parquet", names=["ampere_sgemm_64x64_nn", "triton_poi_fused_add_3", "new"])]


def test_diff_in_every_format(pair: list[str], run: Any) -> None:
    code, out, err = run("diff", *pair, "--format", "json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["unit"] == "step"
    assert (document["before"]["kernel_count"], document["after"]["kernel_count"]) == (3, 3)
    assert {row["match"] for row in document["kernels"]} == {"normalised", "appeared", "disappeared"}
    assert all(isinstance(row["delta_ns"], int) for row in document["kernels"])
    code, out, err = run("diff", *pair, "--format", "csv")
    assert (code, err) == (0, "")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert {row["table"] for row in rows} >= {"figures", "kernels", "categories", "ranges", "gaps", "memops"}
    assert sum(int(row["before_total_ns"]) for row in rows if row["table"] == "kernels") == 120
    code, out, err = run("diff", *pair, "--format", "table")
    assert (code, err) == (0, "")
    assert out.startswith("before.parquet → after.parquet\n")
    assert "inconclusive" in out
    code, out, err = run("diff", *pair, "--markdown")
    assert (code, err) == (0, "")
    assert out.startswith("**")
    assert "| a step | before | after | change | 95 % interval |  |" in out


def test_diff_takes_filters_once_or_for_each_side(pair: list[str], run: Any) -> None:
    def counted(*options: str) -> tuple[int, int]:
        code, out, err = run("diff", *pair, "-f", "json", *options)
        assert (code, err) == (0, "")
        found = json.loads(out)
        return found["before"]["kernel_count"], found["after"]["kernel_count"]

    assert counted("--last-steps", "2", "--device", "0", "--no-cache") == (2, 2)
    assert counted("--last-steps", "1", "--last-steps", "2") == (1, 2)
    assert counted("--within", "step 1", "--within", "") == (1, 3)
    assert counted("--time", "0:100", "--time", "") == (1, 3)
    steps = json.loads(run("diff", *pair, "-f", "json", "--match", "nope", "--steps", "3", "--steps", "6")[1])
    assert (steps["unit"], steps["before"]["steps"], steps["after"]["steps"]) == ("step", 3, 6)


def test_diff_of_several_captures(pair: list[str], run: Any) -> None:
    before, after = pair
    code, out, err = run("diff", *pair, "-f", "json", "--also-before", before, "--also-after", after)
    assert (code, err) == (0, "")
    wall = json.loads(out)["figures"][0]
    assert wall["between_ns"] is not None


def test_diff_of_memory_snapshots(tmp_path: Path, run: Any) -> None:
    import make_snapshot

    from nsightkit.capture import memory

    files = []
    for keep in (True, False):
        made = make_snapshot.leaking_program(tokens=512, vocabulary=2048, parameters=10**6, keep_graph=keep)
        files.append(str(memory.write(made, tmp_path / f"{keep}.pickle")))
    for form in ("json", "csv", "table"):
        code, out, err = run("diff", *files, "--format", form)
        assert (code, err) == (0, "")
        assert out
    document = json.loads(run("diff", *files, "--format", "json")[1])
    assert document["outcome"] == "less"
    assert document["figures"][0]["delta_bytes"] < 0
    assert run("diff", *files, "--markdown")[1].startswith("**At its peak the program holds")
    assert "two of a kind" in one_line(run("diff", files[0], str(tmp_path))[2])
    assert "--match" in one_line(run("diff", *files, "--match", "x")[2])
    assert "--device" in one_line(run("diff", *files, "--device", "0", "--device", "1")[2])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--markdown", "--format", "json"], "leave --format away"),
        (["--within", "a", "--within", "b", "--within", "c"], "3 times is too often"),
        (["--match", "("], "not a regular expression"),
        (["--steps", "0"], "--steps"),
        (["--last-steps", "9", "--last-steps", "0"], "not a number of steps"),
        (["--device", "7"], "no device 7"),
    ],
)
def test_diff_bad_usage(options: list[str], says: str, pair: list[str], run: Any) -> None:
    code, out, err = run("diff", *pair, *options)
    assert (code, out) == (2, "")
    assert says in one_line(err)


def test_diff_of_bad_files(pair: list[str], tmp_path: Path, run: Any) -> None:
    empty = tmp_path / "empty.sqlite"
    empty.touch()
    for files in ([pair[0], str(empty)], [str(empty), pair[1]], [pair[0], str(tmp_path / "absent")]):
        code, out, err = run("diff", *files)
        assert (code, out) == (2, "")
        assert Path(files[0] if "empty" in files[0] else files[1]).name in one_line(err)
