"""Hostile PyTorch traces: an error that names the file, and soon."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from child import command

import nsightkit
from nsightkit import cli
from nsightkit.analysis.core import text
from nsightkit.errors import NsightkitError, TraceError
from nsightkit.trace import kineto
from nsightkit.trace.model import TABLES

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
    ended = command("summary", path)
    assert ended.code == 2, ended.error
    why = "(unpacks to more|takes more memory)"
    assert re.fullmatch(rf"nsightkit: {re.escape(str(path))}: .*{why}.*; .*\n", ended.error), ended.error
    assert ended.cpu_s < 10
    assert ended.peak_bytes < 1000 * MIB


def test_json_in_one_piece_needs_the_memory_to_decode_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path / "odd.json", [{"odd": True, **e} for e in launches(6000)])  # no place between two is known
    assert nsightkit.load(path, cache=False).size("kernels") == 6000
    assert kineto.available_bytes() > 100 * MIB
    monkeypatch.setattr(kineto, "available_bytes", lambda: 10 * MIB)
    with pytest.raises(TraceError, match=re.escape(str(path)) + r".*takes more memory to decode than 0\.01 GB"):
        nsightkit.load(path, cache=False)


# ---------------------------------------------------------------- special files


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
    *(None, True, -1, 1 << 33, 1 << 63, HUGE, 1e300, 1.5, "x", "9" * 30, "\u202e\x1b[31m", "\0", [1], {"a": 1}),
]
ARGS = [
    *("device", "stream", "correlation", "grid", "block", "bytes", "External id", "registers per thread"),
    *("shared memory", "cuda_sync_kind", "Collective name", "Seq", "Sequence number", "Fwd thread id", "kernel"),
    "Input Dims",
]
GPU = ("id", "name", "numSms", "totalGlobalMem", "computeMajor")


def opened(path: Path) -> None:
    """Read a trace, which may be refused in one line that names it."""
    with contextlib.suppress(TraceError):
        trace = nsightkit.load(path, cache=False)
        for table in TABLES:
            trace.table(table)


@pytest.mark.parametrize("field", ["ph", "cat", "name", "pid", "tid", "ts", "dur", *ARGS])
def test_any_value_of_an_event_is_read_or_refused(tmp_path: Path, field: str) -> None:
    for value in VALUES:
        events = launches(2)
        for changed in events[:6]:
            (changed["args"] if field in ARGS else changed)[field] = value
        opened(put(tmp_path / "t.json", events))


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
    if "odd" in set(trace["kernels"]["name"]):  # an unusable duration counts as absent
        assert trace["kernels"]["end_ns"].max() < 10**9
    else:
        assert any(note.startswith("1 malformed event") for note in trace.meta.notes)


@pytest.mark.parametrize(("column", "count"), [("threads", 20_000), ("processes", 2_000)])
def test_more_threads_than_a_capture_has_are_refused(tmp_path: Path, column: str, count: int) -> None:
    """Analyses look at each by itself, and one makes room for each pair of a process and a launch."""
    make = {
        "threads": lambda i: event("cpu_op", "o", i, tid=i),
        "processes": lambda i: event("cpu_op", "o", i) | {"pid": i},
    }[column]
    path = put(tmp_path / "t.json", [make(i) for i in range(count)])
    with pytest.raises(TraceError, match=rf"t\.json: has {count:,} {column}"):
        nsightkit.load(path, cache=False)
    assert nsightkit.load(put(path, [make(i) for i in range(900)]), cache=False).size("ops") == 900


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
