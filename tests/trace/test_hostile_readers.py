"""Hostile PyTorch traces, Nsight Compute reports and memory snapshots: an error that names the file, and soon."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import importlib
import json
import os
import pickle
import random
import re
import resource
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal
from make_snapshot import Allocator, random_program
from mcp import Client
from mcp.client.stdio import StdioServerParameters

import nsightkit
from nsightkit import cli
from nsightkit.analysis.core import text
from nsightkit.analysis.memory import snapshot as memory
from nsightkit.analysis.roofline import counters
from nsightkit.errors import NsightkitError, TraceError
from nsightkit.trace import kineto, ncu, snapshot

ROOT = Path(nsightkit.__file__).parents[1]
MIB = 1 << 20
OPEN = b'{"traceEvents":['
EVENT = b'{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":1,"dur":1,"args":{}},'


def event(category: str, name: str, ts: Any, dur: Any = 5, *, tid: Any = 100, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 100, "tid": tid, "ts": ts, "dur": dur, "args": args}


def launches(count: int) -> list[dict[str, Any]]:
    """Steps, operators, launches, kernels, copies and waits."""
    events = []
    for i in range(count):
        ts, numbers = 100 * i, {"device": 0, "stream": 7, "correlation": i + 1}
        events += [
            event("user_annotation", f"ProfilerStep#{i // 10}", ts, 99),
            event("cpu_op", "aten::mm", ts + 1, 30, **{"External id": i + 1, "Input Dims": [[2, 3], [3, 4]]}),
            event("cuda_runtime", "cudaLaunchKernel", ts + 5, 10, correlation=i + 1),
            event("kernel", "void k<int>(float*)", ts + 20, 40, tid=7, grid=[1, 1, 1], block=[32, 1, 1], **numbers),
            event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", ts + 70, 5, tid=7, bytes=64, **numbers),
            event("cuda_sync", "Stream Sync", ts + 80, 5, tid=7, **numbers),
        ]
    return events


def put(path: Path, events: list[Any], **head: Any) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, **head, "traceEvents": events}))
    return path


QUESTIONS = ("summary", "kernels", "gaps", "ranges", "verdict")


def answered(path: Path, questions: Sequence[str] = QUESTIONS) -> None:
    """Ask a trace these questions."""
    trace = nsightkit.load(path, cache=False)
    for question in questions:
        getattr(trace, question)()


def refused(path: Path, question: Callable[[], Any]) -> str:
    """Ask a question of a file, which may end in an error; give that error."""
    try:
        question()
    except NsightkitError as error:
        return str(error)
    return str(path)


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fail where something takes longer."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"over {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def cpu_s(function: Callable[[], Any]) -> float:
    begin = time.process_time()
    function()
    return time.process_time() - begin


def command(*arguments: object, folder: Path | None = None) -> tuple[int, str, float, int]:
    """Run a command: its exit code, its standard error, the processor's time it took and its peak of memory."""
    places = [str(place) for place in (folder, ROOT) if place]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "NSIGHTKIT_NO_CACHE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "nsightkit", *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (20, 20)),  # noqa: PLW1509 - no threads here
    )
    assert process.stderr is not None
    with process.stderr:
        said = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, said, usage.ru_utime + usage.ru_stime, usage.ru_maxrss << 10


# ---------------------------------------------------------------- gzip


def bomb(path: Path, head: bytes, unit: bytes, tail: bytes = b"]}") -> Path:
    """Write a whole gzip file of about 1 MB, most of which is one text again and again."""

    def packed(content: bytes, flush: int) -> bytes:
        deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
        return deflate.compress(content) + deflate.flush(flush)

    unit *= MIB // len(unit)
    piece = packed(unit, zlib.Z_FULL_FLUSH)  # such a piece may stand anywhere, and repeatedly
    times = 1_000_000 // len(piece)
    checksum = zlib.crc32(head)
    for _ in range(times):
        checksum = zlib.crc32(unit, checksum)
    size = len(head) + times * len(unit) + len(tail)
    with path.open("wb") as file:
        file.write(b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + packed(head, zlib.Z_FULL_FLUSH) + piece * times)
        file.write(packed(tail, zlib.Z_FINISH) + struct.pack("<II", zlib.crc32(tail, checksum), size & 0xFFFFFFFF))
    return path


BOMBS = {
    "events": (OPEN, EVENT),
    "a bare list": (b"[", EVENT),
    "events without a shape": (OPEN, b'{"args":{}},'),
    "numbers for events": (OPEN, b"1,"),
    "white space": (OPEN, b" "),
    "white space first": (b"", b"\n"),
    "a text": (OPEN + b'{"ph":"X","name":"', b"a"),
    "escapes": (OPEN + b'{"ph":"', b"\\"),
    "brackets": (OPEN, b"["),
    "a number": (OPEN + b'{"ph":"X","cat":"kernel","ts":', b"1"),
    "captures": (OPEN, b'{"ph":"X","cat":"Trace","ts":1,"dur":2},'),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_gzip_bomb_is_refused_soon_and_with_little_memory(tmp_path: Path, kind: str) -> None:
    path = bomb(tmp_path / "bomb.json.gz", *BOMBS[kind])
    assert 900_000 < path.stat().st_size < 1_100_000
    code, said, seconds, peak = command("summary", path)
    assert code == 2, said
    why = "(unpacks to more|takes more memory)"
    assert re.fullmatch(rf"nsightkit: {re.escape(str(path))}: .*{why}.*; .*\n", said), said
    assert seconds < 10
    assert peak < 1000 * MIB


def test_gzip_of_many_members_is_read_or_refused_soon(tmp_path: Path) -> None:
    empty, white = gzip.compress(b""), gzip.compress(b" " * MIB)
    for name, member in {"empty": empty, "white": white}.items():
        path = tmp_path / f"{name}.json.gz"
        path.write_bytes(gzip.compress(OPEN) + member * (1_000_000 // len(member)) + gzip.compress(b"]}"))
        code, said, seconds, peak = command("summary", path)
        assert (code, said.count("\n")) == (2, 1), said
        assert seconds < 10
        assert peak < 500 * MIB


def test_an_honest_gzip_may_pack_well_and_need_one_piece(tmp_path: Path) -> None:
    """Wide margins make a trace 60 times its packed size; a broken escape makes it one to mend."""
    events = launches(3000)
    wide = json.dumps({"schemaVersion": 1, "traceEvents": events}, indent=12)
    for name, document in {"wide": wide, "mended": wide.replace("void k", "void \\k")}.items():
        path = tmp_path / f"{name}.json.gz"
        path.write_bytes(gzip.compress(document.encode(), 9))
        assert nsightkit.load(path, cache=False).size("kernels") == 3000


def test_json_in_one_piece_needs_the_memory_to_decode_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path / "odd.json", [{"odd": True, **e} for e in launches(6000)])  # no place between two is known
    assert nsightkit.load(path, cache=False).size("kernels") == 6000
    assert kineto.available_bytes() > 100 * MIB
    monkeypatch.setattr(kineto, "available_bytes", lambda: 10 * MIB)
    with pytest.raises(TraceError, match=re.escape(str(path)) + r".*takes more memory to decode than 0\.01 GB"):
        nsightkit.load(path, cache=False)


@pytest.mark.parametrize("part", ["{},", '{"args":{}},', "1,", '{"ph":"X","cat":"kernel","ts":1,"args":{}},'])
def test_small_events_take_little_memory(tmp_path: Path, part: str) -> None:
    path = tmp_path / "small.json"
    path.write_text('{"schemaVersion":1,"traceEvents":[' + (part * (MIB // len(part)))[:-1] + "]}")
    usual = command("summary", put(tmp_path / "usual.json", launches(10)))[3]
    assert command("summary", path)[3] - usual < 100 * MIB


# ---------------------------------------------------------------- what is no regular file


@pytest.mark.parametrize("question", ["summary", "memory", "ncu"])
@pytest.mark.parametrize("kind", ["fifo", "device", "link to a device", "loop", "folder"])
def test_what_is_no_regular_file_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], question: str, kind: str
) -> None:
    path = tmp_path / "x.json"
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "device":
            path = Path("/dev/zero")
        case "link to a device":
            path.symlink_to("/dev/zero")
        case "loop":
            path.symlink_to(path)
        case "folder":
            path.mkdir()
    with within(2):
        assert cli.run([question, str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"nsightkit: {path}: ")
    assert said.count("\n") == 1


# ---------------------------------------------------------------- values of PyTorch traces

HUGE = 10**400
VALUES = [
    *(None, True, -1, 0, 1 << 31, 1 << 33, 1 << 62, (1 << 63) - 1, 1 << 63, 1 << 64, HUGE, 1e300, -1e300, 1.5),
    *("", "x", "7", "9" * 30, "\u202e\x1b[31m", "nan", "inf", "\0", [], [1], [[1]], {}, {"a": 1}),
]
ARGS = [
    *("device", "stream", "correlation", "grid", "block", "bytes", "External id", "registers per thread"),
    *("shared memory", "cuda_sync_kind", "Collective name", "Seq", "Sequence number", "Fwd thread id", "kernel"),
    *("end thread", "duration_ns", "domain", "kind", "open", "short name", "process", "Input Dims"),
]


@pytest.mark.parametrize("field", ["ph", "cat", "name", "pid", "tid", "ts", "dur", "place", *ARGS])
def test_any_value_of_an_event_is_read(tmp_path: Path, field: str) -> None:
    events = launches(2 * len(VALUES))
    for i, value in enumerate(VALUES):
        for changed in events[6 * i : 6 * i + 6]:
            (changed["args"] if field in ARGS else changed)[field] = value
    path = put(tmp_path / "t.json", events)
    answered(path)
    assert nsightkit.load(path, cache=False).size("kernels") >= len(VALUES)


OURS = ("t0_ns", "window_ns", "missing", "tool", "tool_version", "driver")
GPU = ("id", "name", "numSms", "totalGlobalMem", "computeMajor")
HEADS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(
        ("schemaVersion", "deviceProperties", "distributedInfo", "cuda_driver_version", "nsightkit"), lambda v: v
    ),
    "deviceProperties of": lambda value: [dict.fromkeys(GPU, value)],
    "nsightkit of": lambda value: dict.fromkeys(OURS, value),
    "nsightkit for": lambda value: {"window_ns": [0, value], "missing": [value]},
}


@pytest.mark.parametrize("head", HEADS)
def test_any_value_in_the_head_is_read(tmp_path: Path, head: str) -> None:
    for value in VALUES:
        path = put(tmp_path / "t.json", launches(1), **{head.split(maxsplit=1)[0]: HEADS[head](value)})
        trace = nsightkit.load(path, cache=False)
        assert trace.size("kernels") == 1
        assert json.dumps(dataclasses.asdict(trace.meta))


def test_what_fits_no_column_is_unknown(tmp_path: Path) -> None:
    events = launches(6)
    odd = [e["args"] for e in events if e["cat"] == "kernel"]
    odd[0] |= {"device": 1 << 40, "grid": [1 << 40, -1, 2], "registers per thread": 1 << 31, "shared memory": -1}
    odd[1] |= {"device": [0], "stream": [7], "correlation": 1 << 70, "grid": "x", "block": {"x": 1}}
    odd[2] |= {"device": [0, 1], "stream": [7, 8]}
    kernels = nsightkit.load(put(tmp_path / "t.json", events), cache=False)["kernels"]
    assert kernels["device"].tolist() == [-1, 0, 0, 0, 0, 0]
    assert kernels["stream"].tolist() == [7, 0, 0, 7, 7, 7]
    assert kernels["correlation"].tolist() == [1, 0, 3, 4, 5, 6]
    assert kernels[["grid_x", "grid_y", "grid_z"]].to_numpy()[:2].tolist() == [[0, 0, 2], [0, 0, 0]]
    assert kernels["block_x"].tolist() == [32, 0, 32, 32, 32, 32]
    assert kernels[["registers", "dynamic_shared_bytes"]].to_numpy()[0].tolist() == [0, 0]


def test_lists_of_one_length_in_place_of_numbers_are_unknown(tmp_path: Path) -> None:
    kernels = [event("kernel", "k", 10 * i, stream=[7, 8], device=[0, 0], correlation=[1, 2]) for i in range(4)]
    trace = nsightkit.load(put(tmp_path / "t.json", kernels), cache=False)
    assert trace["kernels"][["stream", "device", "correlation"]].to_numpy().tolist() == [[0, 0, 0]] * 4


@pytest.mark.parametrize(
    ("ts", "dur"),
    [
        ("1" * 5000, "1"), ("1", "1" * 5000), ("1e300", "1"), ("1" + "0" * 17, "1"), ("1", "1" + "0" * 17),
        ('"inf"', "1"), ('"nan"', "1"), ("4611686018427386", "4611686018427386"), ("1e99999999999999999999", "1"),
    ],
)  # fmt: skip
def test_times_beyond_146_years_are_left_out_and_counted(tmp_path: Path, ts: str, dur: str) -> None:
    document = json.dumps({"schemaVersion": 1, "traceEvents": launches(4)})
    odd = f'{{"ph":"X","cat":"kernel","name":"odd","pid":0,"tid":7,"ts":{ts},"dur":{dur},"args":{{}}}}'
    path = tmp_path / "t.json"
    path.write_text(document[:-2] + "," + odd + "]}")
    trace = nsightkit.load(path, cache=False)
    assert set(trace["kernels"]["name"]) - {"odd"} == {"void k<int>(float*)"}
    if "odd" in set(trace["kernels"]["name"]):  # a duration that is no time is none
        assert trace["kernels"]["end_ns"].max() < 10**9
    else:
        assert any(note.startswith("1 malformed event") for note in trace.meta.notes)


def test_exact_durations_and_clocks_of_our_own_export_stay_in_range(tmp_path: Path) -> None:
    ranges = [event("nvtx", f"r{i}", i, 5, duration_ns=n) for i, n in enumerate([5000, (1 << 63) - 1, 1 << 62, -1])]
    for t0_ns in (0, 5, (1 << 62) - 1, -(1 << 62), 1 << 70):
        trace = nsightkit.load(put(tmp_path / "t.json", ranges, nsightkit={"t0_ns": t0_ns}), cache=False)
        assert trace["ranges"]["name"].tolist() == ["r0", "r3"]
        assert abs(trace.t0_ns) < 1 << 62
        assert trace["ranges"]["end_ns"].max() == 5000


def test_text_that_is_no_utf_8_and_halves_of_pairs_become_text(tmp_path: Path) -> None:
    document = json.dumps({"schemaVersion": 1, "traceEvents": launches(4)}).encode()
    for odd in (b"\xff\xfe", b"\\ud800", b"\xed\xa0\x80", b"\\udc00\\ud800"):
        path = tmp_path / "t.json"
        path.write_bytes(document.replace(b"void k", b"void " + odd))
        trace = nsightkit.load(path, cache=False)
        assert "".join(trace["kernels"]["name"]).encode()
        answered(path)


@pytest.mark.parametrize(("column", "count"), [("thread", 20_000), ("process", 2_000), ("device", 2_000)])
def test_more_threads_than_a_capture_has_are_refused(tmp_path: Path, column: str, count: int) -> None:
    """Analyses look at each by itself, and one makes room for each pair of a process and a launch."""
    make = {
        "thread": lambda i: event("cpu_op", "o", i, tid=i),
        "process": lambda i: event("cpu_op", "o", i) | {"pid": i},
        "device": lambda i: event("kernel", "k", i, device=i),
    }[column]
    path = put(tmp_path / "t.json", [make(i) for i in range(count)])
    with pytest.raises(TraceError, match=rf"t\.json: has {count:,} different values in its columns {column}"):
        nsightkit.load(path, cache=False)
    table = "kernels" if column == "device" else "ops"
    assert nsightkit.load(put(path, [make(i) for i in range(900)]), cache=False).size(table) == 900


NAMES = {
    "angles": "<" * 50_000 + ">" * 50_000,
    "open angles": "a" + "<" * 100_000,
    "lambdas": "k" + "::[lambda" * 12_000,
    "other lambdas": "k" + "::{lambda" * 12_000,
    "white space": "a" + " " * 100_000 + "b",
    "parentheses": "k" + "(" * 100_000,
}


@pytest.mark.parametrize("kind", NAMES)
def test_long_names_take_no_time(tmp_path: Path, kind: str) -> None:
    name = NAMES[kind]
    assert cpu_s(lambda: kineto.short_kernel_name(name)) < 1
    assert cpu_s(lambda: text.short_name(name)) < 1
    categories = ("kernel", "gpu_memcpy", "cuda_sync", "nvtx", "cpu_op", "cuda_runtime")
    path = put(tmp_path / "t.json", [event(category, name, 10) for category in categories])
    assert cpu_s(lambda: nsightkit.load(path, cache=False)) < 3


def test_names_are_as_short_as_they_were() -> None:
    """By the plain rule: what stands between angle brackets goes, from the inside out."""
    rng = random.Random(0)
    for _ in range(3000):
        name = "".join(
            rng.choice(["<", ">", "a", "::", "(", " ", "operator()", "x"]) for _ in range(rng.randint(0, 14))
        )
        outer, inner = name.replace("operator()", "operator"), ""
        while outer != inner:
            inner, outer = outer, re.sub("<[^<>]*>", "", outer)
        words = re.split("[<(]", outer)[0].split()
        assert kineto.short_kernel_name(name) == ((words[-1].rsplit("::", 1)[-1] if words else "") or name)
    lambdas = "::[lambda(int) (instance 1)]::operator()() const::[lambda() (instance 2)]"
    assert text.short_name(f"k<f(int){lambdas}>") == "k<f(int)>"


# ---------------------------------------------------------------- Nsight Compute

REPORT = "nsight-training/manual_nvtx.ncu-rep"
#: One bit of this report, with which NVIDIA's reader aborts: it makes the size of a message negative.
FLIPPED = (75_760, 3)


def flipped(shared_traces: Path, path: Path) -> Path:
    data = bytearray((shared_traces / REPORT).read_bytes())
    data[FLIPPED[0]] ^= 1 << FLIPPED[1]
    path.write_bytes(data)
    return path


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Take the place of NVIDIA's package, and give a report for it to read."""

    def make(body: str) -> Path:
        folder = tmp_path / "packages"
        folder.mkdir(exist_ok=True)
        (folder / "ncu_report.py").write_text(f"import os, sys, time\ndef load_report(path):\n    {body}\n")
        monkeypatch.delitem(sys.modules, "ncu_report", raising=False)
        monkeypatch.syspath_prepend(folder)
        importlib.invalidate_caches()
        report = tmp_path / "x.ncu-rep"
        report.write_bytes(b"NVR\0\0\0\0\0")
        return report

    return make


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("os.abort()", r"makes NVIDIA's reader crash \(SIGABRT\)"),
        ("os.kill(os.getpid(), 11)", r"makes NVIDIA's reader crash \(SIGSEGV\)"),
        ("os._exit(7)", r"crash \(exit code 7\)"),
        ("raise RuntimeError('no\\nreport')", r"is not a report that ncu-report can read \(RuntimeError: no report\)"),
        ("sys.stdout.write('[')", "is not a report that ncu-report can read"),
        ("time.sleep(60)", "was not read by NVIDIA's package within 2 s"),
        ("return []", "holds no profiled kernel, or is damaged"),
        ("x = []\n    while True: x.append(bytearray(1 << 26))", r"crash \(|can read \(MemoryError"),
        ("print('x' * 200_000_000)", "crash|can read"),
        ("raise ImportError('no library')", r"can read \(ImportError: no library\)"),
    ],
)
def test_whatever_nvidias_package_does_is_one_line(
    stand_in: Callable[[str], Path],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    body: str,
    words: str,
) -> None:
    report = stand_in(body)
    if "sleep" in body:
        monkeypatch.setattr(ncu, "SECONDS", 1)
    assert cli.run(["ncu", str(report)]) == 2
    out, said = capfd.readouterr()
    assert re.fullmatch(rf"nsightkit: {re.escape(str(report))}: .*({words}).*\n", said), said
    assert out == ""


def test_numbers_and_text_come_back_as_nvidias_package_gives_them(stand_in: Callable[[str], Path]) -> None:
    numbers = [0.1 + 0.2, 1e-300, 1.0, (1 << 64) - 1, 2**53 + 1, -3, 1e22]
    report = stand_in(f"return [[Action({numbers!r})]]")
    module = report.parent / "packages" / "ncu_report.py"
    module.write_text(
        module.read_text()
        + """
class Metric:
    def __init__(self, name, value): self.given = name, value
    def name(self): return self.given[0]
    def value(self): return self.given[1]
    def has_value(self): return True
    def unit(self): return ""
class Action:
    NameBase_DEMANGLED = 1
    def __init__(self, numbers):
        texts = ["", "\\udcff\\u00e9", "nan"]
        values = [*numbers, float("nan"), float("inf"), *texts]
        self.metrics = {f"m{i}": Metric(f"m{i}", value) for i, value in enumerate(values)}
    def metric_names(self): return list(self.metrics)
    def metric_by_name(self, name): return self.metrics[name]
    def name(self, base=0): return "k<\\udc80>"
    def nvtx_state(self): return None
"""
    )
    found = ncu.read(report)
    values = found.metrics[0]
    assert [values[f"m{i}"] for i in range(7)] == numbers
    assert [type(values[f"m{i}"]) for i in range(7)] == [type(number) for number in numbers]
    assert values.keys() == {f"m{i}" for i in (*range(7), 9, 10, 11)}
    assert [values[f"m{i}"] for i in (9, 10, 11)] == ["", "\ufffdé", "nan"]
    assert found.launches["kernel"].tolist() == ["k<\ufffd>"]


def test_a_report_that_makes_nvidias_reader_abort_is_one_line(shared_traces: Path, tmp_path: Path) -> None:
    pytest.importorskip("ncu_report")
    path = flipped(shared_traces, tmp_path / "flipped.ncu-rep")
    code, said, _, _ = command("ncu", path)
    assert code == 2, said
    assert re.fullmatch(rf"nsightkit: {re.escape(str(path))}: .*crash \(SIGABRT\).*; .*\n", said), said


@pytest.mark.parametrize("real", [False, True])
def test_a_report_that_aborts_the_reader_leaves_the_server_alive(
    tmp_path: Path, stand_in: Callable[[str], Path], request: pytest.FixtureRequest, real: bool
) -> None:
    places = [str(ROOT)]
    if real:
        pytest.importorskip("ncu_report")
        report = flipped(request.getfixturevalue("shared_traces"), tmp_path / "flipped.ncu-rep")
    else:
        report = stand_in("os.abort()")
        places.insert(0, str(report.parent / "packages"))
    trace = put(tmp_path / "t.json", launches(4))
    environment = {"PYTHONPATH": os.pathsep.join(places), "NSIGHTKIT_NO_CACHE": "1"}
    server = StdioServerParameters(
        command=sys.executable, args=["-m", "nsightkit", "mcp"], env=environment, cwd=tmp_path
    )
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(Client(server)) as client:
        ask = functools.partial(portal.call, client.call_tool)
        damaged = ask("ncu", {"report": str(report)})
        assert damaged.is_error
        assert "SIGABRT" in damaged.content[0].text
        answer = ask("summary", {"trace": str(trace)})
        assert not answer.is_error
        assert json.loads(answer.content[0].text)["kernel_count"] == 4


@pytest.mark.parametrize(
    "content",
    [
        b"NVR\0\0\0\0\0" + bytes(1_000_000),  # blocks of no length
        b"NVR\0\0\0\0\0" + struct.pack("<I", 1_000_000) + b"\x80" * 1_000_000,  # one number
        b"NVR\0\0\0\0\0" + struct.pack("<I", 1_000_000) + b"\x28\x01" * 500_000,  # many
        b"NVR\0\xff\xff\xff\xff",
    ],
)
def test_frames_of_a_hostile_report_take_no_time(stand_in: Callable[[str], Path], content: bytes) -> None:
    report = stand_in("return []")
    report.write_bytes(content)
    with pytest.raises(TraceError, match=re.escape(str(report))):
        assert cpu_s(lambda: ncu.read(report)) < 5


@pytest.mark.parametrize("cell", ['""' + ":" * 100_000 + '""', '""a:' + "b:" * 50_000 + '""', "a (" + "_" * 100_000])
def test_fields_of_a_hostile_page_take_no_time(tmp_path: Path, cell: str) -> None:
    path = tmp_path / "x.csv"
    ranges = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
    raw = f'"ID","Kernel Name","Stream","CC","{ranges}","a__b.sum"\n"","","","","","ns"\n'
    path.write_text(f'{raw}"0","k","7","8.0","{cell}","1"\n')
    assert cpu_s(lambda: ncu.read(path)) < 2
    details = '"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"\n'
    path.write_text(f'{details}"0","k","S","{cell}","ns","1"\n')
    assert cpu_s(lambda: ncu.read(path)) < 2


# ---------------------------------------------------------------- memory snapshots


def program() -> Any:
    return random_program(1, 30).snapshot()


def circles() -> dict[str, Any]:
    """Snapshots that hold themselves somewhere."""
    made = {}
    for place in ("top", "traces", "segments", "frames", "settings", "metadata", "annotations", "blocks"):
        found = program()
        itself: list[Any] = []
        itself.append(itself)
        match place:
            case "top":
                found["self"] = found
            case "traces":
                found["device_traces"].append(found["device_traces"])
            case "segments":
                found["segments"].append(found["segments"])
            case "frames":
                found["device_traces"][0][0]["frames"] = itself
            case "settings":
                found["allocator_settings"] |= {"x": found, "roundup_power2_divisions": found["allocator_settings"]}
            case "metadata":
                found["device_traces"][0][0]["user_metadata"] = found
            case "annotations":
                found["external_annotations"] = itself
            case "blocks":
                found["segments"][0]["blocks"].append(found["segments"][0])
        made[place] = found
    return made


@pytest.mark.parametrize("place", circles())
def test_a_snapshot_that_holds_itself_is_read_or_refused(tmp_path: Path, place: str) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(circles()[place], 4))
    with within(10):
        with contextlib.suppress(TraceError):
            memory.summary(snapshot.read(path))
        with pytest.raises(TraceError, match=re.escape(str(path))):
            snapshot.plain(path)
        assert cli.run(["scrub", str(path), str(tmp_path / "out.pickle")]) == 2


NEST = 1_000_000
_SEGMENTS = b"\x80\x04}(\x8c\x08segments]"
DEEP = {
    "lists": b"\x80\x04}\x8c\x08segments" + b"]" * NEST + b"a" * (NEST - 1) + b"s.",
    "settings": _SEGMENTS + b"\x8c\x12allocator_settings}\x8c\x01x" + b"]" * NEST + b"a" * (NEST - 1) + b"su.",
    "dicts": _SEGMENTS + b"\x8c\x01x" + b"}K\x01" * NEST + b"}" + b"s" * NEST + b"u.",
}


@pytest.mark.parametrize("kind", DEEP)
def test_a_snapshot_a_million_deep_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(DEEP[kind])
    code, said, seconds, peak = command("memory", path)
    assert (code, said.count("\n")) == (2, 1), said
    assert seconds < 10
    assert peak < 600 * MIB
    with pytest.raises(TraceError, match=re.escape(str(path))):
        snapshot.plain(path)


def pairs_of_one_hash(count: int) -> list[tuple[int, int]]:
    """Pairs of integers with the same hash: CPython mixes a tuple's items in a way that can be undone."""
    first, second, third, mask = 11400714785074694791, 14029467366897019727, 2870177450012600261, (1 << 64) - 1
    before = (12345 - (2 ^ third ^ 3527539)) * pow(first, -1, 1 << 64) & mask
    wanted = (before << 33 | before >> 31) & mask
    rng, made = random.Random(1), []
    while len(made) < count:
        left = rng.getrandbits(60)
        mixed = (third + left * second) & mask
        mixed = ((mixed << 31 | mixed >> 33) & mask) * first & mask
        right = (wanted - mixed) * pow(second, -1, 1 << 64) & mask
        if right < (1 << 61) - 1:
            made.append((left, right))
    return made


def test_keys_that_are_slow_to_hash_are_refused(tmp_path: Path) -> None:
    pairs = pairs_of_one_hash(30_000)
    if len({hash(pair) for pair in pairs}) > 1:
        pytest.skip("this Python hashes tuples in another way")
    keys = b"".join(b"\x8a\x08%b\x8a\x08%b\x86N" % (struct.pack("<q", a), struct.pack("<q", b)) for a, b in pairs)
    path = tmp_path / "s.pickle"
    path.write_bytes(_SEGMENTS + b"\x8c\x01x}(" + keys + b"uu.")
    with within(5), pytest.raises(TraceError, match="a pair of anything but integers of 32 bits"):
        snapshot.read(path)


@pytest.mark.parametrize("value", [1 << 70, 1 << 63, -5, 1 << 40, 1.5, float("nan"), float("inf"), True, "4", [1], {}])
def test_settings_of_any_value_are_read(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "s.pickle"
    for setting in ("roundup_power2_divisions", "max_split_size", "divisions", "x"):
        found = program()
        found["allocator_settings"][setting] = value
        if setting == "divisions":
            found["allocator_settings"]["roundup_power2_divisions"] = {str(1 << i): value for i in range(16)}
        path.write_bytes(pickle.dumps(found, 4))
        memory.summary(snapshot.read(path))


@pytest.mark.parametrize(
    "value", [1 << 70, 1 << 62, -1, 1.5, float("nan"), float("inf"), None, "4", [1], {}, "x" * 100]
)
def test_snapshots_of_any_value_are_read_or_refused(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "s.pickle"
    for table in ("device_traces", "segments", "blocks", "external_annotations"):
        found = program()
        found["external_annotations"] = [{"time_us": 5, "name": "a", "stage": "START", "device": 0}]
        rows = {
            "device_traces": found["device_traces"][0],
            "blocks": found["segments"][0]["blocks"],
        }.get(table) or found[table]
        for key in list(rows[0]):
            kept = rows[0][key]
            rows[0][key] = value
            path.write_bytes(pickle.dumps(found, 4))
            rows[0][key] = kept
            assert "\n" not in refused(path, lambda: memory.summary(snapshot.read(path)))


def test_times_of_events_that_no_clock_has_are_refused(tmp_path: Path) -> None:
    found = program()
    found["device_traces"][0][-1]["time_us"] = 1 << 62
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(found, 4))
    with pytest.raises(TraceError, match="time_us"):
        snapshot.read(path)


# ---------------------------------------------------------------- mutations


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Change a file in a place or a few, as damage or an attacker would."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at = rng.randrange(len(data))
        length = rng.choice([1, 1, 2, 4, 16, 100])
        match rng.randrange(6):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at : at + length] = rng.randbytes(length)
            case 2:
                del data[at : at + length]
            case 3:
                data[at:at] = data[at : at + length]
            case 4:
                number = rng.choice([b"-1", b"0", b"1e300", b"9223372036854775808", b"null", b"[]", b'""'])
                numbers = list(re.finditer(rb"-?\d+(?:\.\d+)?", bytes(data)))
                chosen = rng.choice(numbers) if numbers else None
                if chosen:
                    data[chosen.start() : chosen.end()] = number
            case 5:
                other = rng.randrange(len(data))
                data[at : at + length] = data[other : other + length]
        if not data:
            return b"x"
    return bytes(data)


def test_mutated_traces_are_read_or_refused(tmp_path: Path) -> None:
    whole = json.dumps({"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "x"}], "traceEvents": launches(6)})
    rng, path = random.Random(1), tmp_path / "t.json"
    for i in range(300):
        path.write_bytes(mutated(whole.encode(), rng))
        said = refused(path, lambda: answered(path, [QUESTIONS[i % 5]]))  # noqa: B023 - called at once
        assert str(path) in said


def test_mutated_gzip_is_read_or_refused(tmp_path: Path) -> None:
    whole = gzip.compress(json.dumps({"schemaVersion": 1, "traceEvents": launches(6)}).encode())
    rng, path = random.Random(2), tmp_path / "t.json.gz"
    for _ in range(300):
        path.write_bytes(b"\x1f\x8b" + mutated(whole, rng)[2:])
        with contextlib.suppress(NsightkitError):
            nsightkit.load(path, cache=False)


@pytest.mark.parametrize("protocol", [2, 4])
def test_mutated_snapshots_are_read_or_refused(tmp_path: Path, protocol: int) -> None:
    allocator = Allocator()
    for size in (500, 5000, 3 * MIB):
        allocator.malloc(size, frames=[{"name": "f", "filename": "x.py", "line": 3}])
    whole = pickle.dumps(allocator.snapshot(), protocol)
    rng, path = random.Random(3), tmp_path / "s.pickle"
    for _ in range(300):
        path.write_bytes(b"\x80" + mutated(whole, rng)[1:])
        with contextlib.suppress(NsightkitError):
            memory.summary(snapshot.read(path))
        with contextlib.suppress(NsightkitError):
            snapshot.plain(path)


def test_mutated_pages_of_ncu_are_read_or_refused(tmp_path: Path) -> None:
    raw = '"ID","Kernel Name","Device","CC","gpu__time_duration.sum","launch__grid_size"\n"","","","","ns",""\n'
    details = '"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"\n'
    pages = [
        raw + "".join(f'"{i}","k<{i}>","0","8.0","1,234.5","{i}"\n' for i in range(5)),
        details + "".join(f'"{i}","k","GPU Speed Of Light Throughput","Duration","us","{i}.5"\n' for i in range(5)),
    ]
    rng, path = random.Random(4), tmp_path / "x.csv"
    for i in range(300):
        path.write_bytes(mutated(pages[i % 2].encode(), rng))
        with contextlib.suppress(NsightkitError):
            counters.summary(ncu.read(path))


def test_mutated_reports_are_read_or_refused(shared_traces: Path, tmp_path: Path) -> None:
    """Most of a report is text: where its blocks begin and end, and what is around them, says more than the rest."""
    pytest.importorskip("ncu_report")
    whole = (shared_traces / REPORT).read_bytes()
    rng, path = random.Random(5), tmp_path / "x.ncu-rep"
    for i in range(300):
        data = whole[: rng.randrange(8, 400)] if i % 2 else whole[:4] + mutated(whole[4:400], rng) + whole[400:]
        path.write_bytes(data)
        with contextlib.suppress(ValueError):
            ncu._cut_short(path)
        if i % 30 == 0:
            with contextlib.suppress(NsightkitError):
                counters.summary(ncu.read(path))
