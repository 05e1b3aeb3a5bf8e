"""PyTorch traces of every age open with the sums that plain JSON shows; hostile ones are refused soon, in one line."""

import collections
import contextlib
import gzip
import json
import os
import re
import signal
import struct
import time
import zlib

import make_kineto
import msgspec
import pandas as pd
import pytest
from child import command

import nsightkit
from nsightkit import cli
from nsightkit import text as words
from nsightkit.errors import TraceError
from nsightkit.trace import kineto
from nsightkit.trace.model import EVENT_TABLES, TABLES

MIB = 1 << 20
WHOLE_US = "Times are whole microseconds (PyTorch before 2.4): short kernels last 0 or 1 µs."


def put(tmp_path, document, name="trace.json"):
    path = tmp_path / name
    path.write_bytes(document if isinstance(document, bytes) else json.dumps(document).encode())
    return path


def load(tmp_path, events, **head):
    return nsightkit.load(put(tmp_path, {"schemaVersion": 1, **head, "traceEvents": events}), cache=False)


def event(cat, name="x", *, ts=10, dur=5, pid=100, tid=100, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def kernel(name="k", *, ts=10, dur=5, **args):
    on_gpu = {"device": 0, "stream": 7, "correlation": 1, **args}
    return event("kernel", name, ts=ts, dur=dur, pid=0, tid=7, **on_gpu)


def sizes(trace):
    return {table: trace.size(table) for table in TABLES if trace.size(table)}


def rows(trace, table, *columns):
    return trace[table][list(columns)].astype(object).to_numpy().tolist()


# --- sums known in advance ---


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    path = tmp_path_factory.mktemp("kineto") / "planted.json"
    return path, make_kineto.write(path, 1000, per_step=250)


def test_planted_sums_are_exact(planted):
    path, truth = planted
    trace = nsightkit.load(path, cache=False)
    kernels = trace.table("kernels", ["name", "duration_ns", "start_ns", "end_ns"])
    assert trace.t0_ns == truth["first_ns"]
    assert trace.t0_ns > 2**42 * 1000  # where float64 microseconds no longer hold nanoseconds
    assert len(kernels) == truth["kernel_count"]
    assert kernels["end_ns"].max() - kernels["start_ns"].min() == truth["span_ns"]
    by_name = kernels.groupby("name", observed=True)["duration_ns"].agg(["count", "sum"])
    assert {name: tuple(row) for name, *row in by_name.itertuples()} == truth["by_name"]
    assert trace.table("calls", ["duration_ns"])["duration_ns"].sum() == truth["call_ns"]
    assert trace.table("ops", ["duration_ns"])["duration_ns"].sum() == truth["op_ns"]
    assert trace.size("ranges") == truth["steps"]
    assert trace.meta.notes == []
    assert trace.meta.missing == ["syncs", "os_calls"]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_neither_slices_nor_gzip_change_anything(planted, tmp_path, monkeypatch, pack):
    whole = nsightkit.load(planted[0], cache=False)
    monkeypatch.setattr(kineto, "CHUNK_BYTES", 4096)
    sliced = nsightkit.load(put(tmp_path, pack(planted[0].read_bytes()), "x"), cache=False)
    for table in TABLES:
        pd.testing.assert_frame_equal(sliced.table(table), whole.table(table))
    assert sliced.meta == whole.meta


def test_objects_nested_in_args_do_not_break_the_slices(tmp_path, monkeypatch):
    monkeypatch.setattr(kineto, "CHUNK_BYTES", 600)
    nested = [{"name": "a", "ph": "X"}, {"name": "b"}]
    trace = load(tmp_path, [kernel(ts=i, correlation=i, extra=nested) for i in range(50)])
    assert trace["kernels"]["correlation"].tolist() == list(range(50))
    assert trace.meta.notes == [WHOLE_US]


# --- times ---


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("1623143089861123.456", 1623143089861123456),
        ("7899999999999.999", 7899999999999999),
        ("1623143089861123", 1623143089861123000),
        ("12.5", 12500),
        ('"12.25"', 12250),
        ("1.5e+09", 1500000000000),
        ("1212075528731.1101", 1212075528731110),  # a float's digits, printed by another exporter
        ("1212075528731.1099", 1212075528731110),
        *[(text, None) for text in ("null", "true", "-5", '"soon"', '"nan"', "1e300", "1" + "0" * 17, "1" * 5000)],
    ],
)
def test_times_are_exact_or_left_out_and_counted(tmp_path, text, ns):
    others = [kernel()] if ns is None else []
    document = json.dumps({"schemaVersion": 1, "traceEvents": [kernel(ts="TS", dur=0.001), *others]})
    trace = nsightkit.load(put(tmp_path, document.replace('"TS"', text).encode()), cache=False)
    if ns is None:
        assert trace.size("kernels") == 1
        assert trace.meta.notes == [WHOLE_US, "1 events without a usable start were left out."]
    else:
        assert trace.t0_ns == ns
        assert trace["kernels"]["end_ns"].tolist() == [1]


def test_without_a_usable_time_nothing_is_left(tmp_path):
    trace = load(tmp_path, [kernel(ts=None), kernel(ts=-5)])
    assert trace.size("kernels") == 0


@pytest.mark.parametrize("dur", [-7, None, 1e17, "x"])
def test_a_duration_that_cannot_be_is_0(tmp_path, dur):
    trace = load(tmp_path, [kernel(dur=dur)])
    assert trace.table("kernels", ["duration_ns"])["duration_ns"].tolist() == [0]


def test_starts_clamped_to_zero_are_left_out(tmp_path):
    trace = load(tmp_path, [kernel(ts=1.6e15, dur=3.5), kernel(ts=0), event("cpu_op", ts=1.6e15 + 1)])
    assert sizes(trace) == {"kernels": 1, "ops": 1}
    assert trace.t0_ns == 1600000000000000000
    # in a trace that begins at zero, zero is a time
    assert load(tmp_path, [kernel(ts=0), kernel(ts=5.5)]).size("kernels") == 2


# --- what is what ---


def test_python_functions_are_no_events_of_the_capture(tmp_path):
    """A stack that was open before the capture neither moves its start nor fills a table that may be missing."""
    frame = event("python_function", "train.py(12): forward", ts=1, dur=500.25)
    trace = load(tmp_path, [frame, kernel(ts=10.5, dur=2), event("cpu_op", "aten::mm", ts=10, dur=1)])
    assert rows(trace, "kernels", "start_ns") == [[500]]
    assert rows(trace, "frames", "start_ns", "end_ns", "name") == [[-9000, 491_250, "train.py(12): forward"]]
    assert "frames" not in trace.meta.missing


def test_categories(tmp_path):
    trace = load(
        tmp_path,
        [
            kernel(ts=20.5, dur=2),
            event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", device=0, stream=9, bytes=4096),
            event("cuda_runtime", "cudaLaunchKernel_v7000", correlation=1),
            event("cuda_driver", "cuLaunchKernel_ptsz", correlation=2),
            event("hip_runtime", "hipLaunchKernel_v2", kernel="void gemm<4>(int)"),
            event("cuda_sync", "Stream Sync", device=0, stream=7),
            event("cuda_sync", "Stream Wait Event", device=0, stream=7),
            event("user_annotation", "ProfilerStep#3", ts=0, dur=100),
            event("cpu_op", "aten::mm", **{"External id": 77, "Sequence number": 7, "Fwd thread id": 1}),
            event("cpu_op", "triton_", grid="grid(1,)", **{"Sequence number": 2**64 - 1}),
            event("overhead", "Command Buffer Full", pid=-1, tid=0),
            # no work of a GPU, and no event of any table
            event("gpu_user_annotation", "ProfilerStep#3", pid=0, tid=7),
            event("cuda_event", "record", pid=0, tid=7, stream=7),
            event("Trace", "PyTorch Profiler (0)", pid="Spans", tid="PyTorch Profiler", ts=0, dur=200.5),
            {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 1, "pid": 100, "tid": 100, "ts": 10},
        ],
    )
    assert sizes(trace) == {"kernels": 1, "memops": 1, "calls": 3, "syncs": 2, "ranges": 1, "ops": 2, "overhead": 1}
    assert rows(trace, "memops", "kind", "src_kind", "dst_kind", "bytes", "stream") == [
        ["HtoD", "pageable", "device", 4096, 9]
    ]
    assert rows(trace, "calls", "name", "kernel", "correlation") == [
        ["cudaLaunchKernel", "", 1],
        ["cuLaunchKernel", "", 2],
        ["hipLaunchKernel_v2", "void gemm<4>(int)", 0],
    ]
    assert rows(trace, "syncs", "kind") == [["stream"], ["stream-wait-event"]]
    assert rows(trace, "ops", "correlation", "sequence", "forward_thread") == [[77, 7, 1], [0, -1, -1]]
    assert rows(trace, "overhead", "process", "thread") == [[-1, -1]]
    assert rows(trace, "kernels", "process") == [[100]]
    assert trace.meta.window_ns == (0, 200500)
    assert trace.meta.missing == ["os_calls"]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("Memcpy DtoH (Device -> Pinned)", ("DtoH", "device", "pinned")),
        ("Memcpy PtoP (Device -> Device)", ("PtoP", "device", "device")),
        ("Memcpy HtoH (Managed -> Unknown)", ("HtoH", "managed", "unknown")),
        ("Memcpy Unknown (Unknown -> Unknown)", ("other", "unknown", "unknown")),
        ("Memset (Managed)", ("memset", "", "managed")),
        ("CopyHostToDevice", ("HtoD", "unknown", "unknown")),
        ("CopyDeviceToDevice", ("DtoD", "unknown", "unknown")),
        ("FillBuffer", ("memset", "", "unknown")),
        ("", ("other", "unknown", "unknown")),
    ],
)
def test_memop_kinds(tmp_path, name, kinds):
    assert rows(load(tmp_path, [event("gpu_memcpy", name)]), "memops", "kind", "src_kind", "dst_kind") == [list(kinds)]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void at::native::reduce_kernel<512, 1, at::X<a, b> >(at::X<a, b>)", "reduce_kernel"),
        ("void at::native::(anonymous namespace)::softmax_warp_forward<float, 8>(float*, int)", "softmax_warp_forward"),
        ("void at::native::Foo<int>::bar<3>(int (*)(float))", "bar"),
        ("ampere_sgemm_128x64_nn", "ampere_sgemm_128x64_nn"),
        ("", ""),
        ("<<<", "<<<"),
    ],
)
def test_short_kernel_name(name, short):
    assert kineto.short_kernel_name(name) == short


def test_before_2022(tmp_path):
    """Capitalised categories, thread ids as strings, `stream 7` as the thread, steps among the operators."""
    loader = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    trace = load(
        tmp_path,
        [
            event("Operator", "ProfilerStep#5", pid=9, tid="9", ts=0, dur=100),
            event("Operator", loader, pid=9, tid="9", ts=1, dur=30),
            event("Operator", "aten::empty", pid=9, tid="9", ts=2, dur=3),
            event("Runtime", "cudaMemcpyAsync", pid=9, tid="9", ts=40, dur=9, correlation=34486),
            event("Memset", "Memset (Device)", pid=0, tid="stream 7", ts=60, dur=1),
            event("Kernel", "k", pid=0, tid="stream 13", ts=70, dur=0, grid=[50, 1, 1], block=[256, 1, 1]),
            {"ph": "M", "name": "thread_name", "pid": 9, "tid": 9, "args": {"name": "python"}},
        ],
    )
    assert sizes(trace) == {"kernels": 1, "memops": 1, "calls": 1, "ranges": 2, "ops": 1}
    assert rows(trace, "ranges", "name", "level", "parent") == [["ProfilerStep#5", 0, -1], [loader, 1, 0]]
    assert rows(trace, "kernels", "device", "stream", "process", "grid_x") == [[0, 13, 9, 50]]
    assert rows(trace, "memops", "device", "stream", "bytes") == [[0, 7, 0]]
    assert trace.meta.thread_names == {9 << 24 | 9: "python"}
    assert trace.meta.notes == [WHOLE_US]


def test_whole_microseconds_nest_within_a_microsecond(tmp_path):
    outer, inner = event("user_annotation", "a", ts=0, dur=10), event("user_annotation", "b", ts=5, dur=6)
    assert rows(load(tmp_path, [outer, inner]), "ranges", "parent") == [[-1], [0]]
    assert rows(load(tmp_path, [outer, inner, event("cpu_op", ts=0.001)]), "ranges", "parent") == [[-1], [-1]]


LAUNCH = event("cuda_runtime", "cudaLaunchKernel", correlation=1)
MTIA = event("mtia_ccp_events")  # work of an accelerator of another kind


@pytest.mark.parametrize(
    ("events", "missing"),
    [
        ([], " ".join(EVENT_TABLES)),
        ([event("cpu_op")], "kernels memops graphs calls syncs os_calls overhead"),
        ([event("cuda_runtime", "cudaMalloc")], "syncs ranges ops os_calls"),
        ([event("mtia_runtime"), MTIA], "kernels memops graphs syncs ranges ops os_calls"),
        # work of a GPU that was lost
        ([LAUNCH, LAUNCH, event("cpu_op")], "kernels memops graphs syncs os_calls"),
        ([LAUNCH, kernel(), event("cpu_op")], "syncs os_calls"),
    ],
)
def test_what_was_not_recorded(tmp_path, events, missing):
    trace = load(tmp_path, events, distributedInfo={"rank": 3})
    assert " ".join(trace.meta.missing) == missing
    assert trace.meta.distributed == {"rank": 3}
    notes = " ".join(trace.meta.notes)
    assert ("2 calls launched work on a GPU" in notes) == (LAUNCH in events and "kernels" in missing)
    assert ("1 events of mtia_ccp_events were not read" in notes) == (MTIA in events)


def test_threads_with_odd_ids(tmp_path):
    tids = [100, "100", 100.0, -1220540864, 140234567890123, "main", "main", 0, 1]
    trace = load(tmp_path, [event("cpu_op", ts=i + 0.5, tid=t) for i, t in enumerate(tids)])
    threads = trace["ops"]["thread"]
    assert (threads.iloc[:3] == (100 << 24 | 100)).all()
    assert threads.iloc[5] == threads.iloc[6]
    assert threads.nunique() == 6
    assert set(threads.to_numpy() >> 24) == {100}
    trace = load(tmp_path, [event("cpu_op", ts=0.5, pid=p, tid=5) for p in (3, "Spans", "3", 2**60)])
    assert trace["ops"]["process"].nunique() == 3


# --- text that is not quite JSON, or not a trace ---


@pytest.mark.parametrize(
    "text",
    [
        b"[1, 2, 3]",
        b'{"traceEvents": []}',
        b'{"traceEvents": 3}',
        b'{"traceEvents": [1, 2]}',
        b'{"traceEvents": [{"name": "x"}]}',
        b'{"metrics": {"x": 1}}',
        b'[{"ph": "X", "name": "[MEMCPY] HtoD", "ts": 1, "dur": 2, "pid": 1, "tid": 7}]',
        b'{"Table": 1}\n{"Table": 2}\n',
        b'{"schemaVersion": 1, "traceEvents": [{"ph": "X", "cat": ["kernel"], "ts": 1}]}',
        b'{"schemaVersion": 1, "traceEvents": [{"ph": "X", "cat": "kernel", "name": "\\d", "ts": 1}]}',
        b'{"schemaVersion": 1, "traceEvents": [{"ph": "X", "cat": "kernel", "name": "\xff", "ts": 1}]}',
        b'{"schemaVersion": 1, "traceEvents": []} garbage',
        b"{" * 100_000,
        b'{"traceEvents": [' + b'{"args":' * 100_000,
        b'{"traceEvents": [' + b'{"odd": 1},' * 2_000_000,  # no place to cut at is known
        gzip.compress(b"", mtime=0),
        b"\x1f\x8b\x08" + bytes(range(256)),
    ],
)
def test_what_is_not_a_trace_is_said_in_one_line(tmp_path, text):
    with pytest.raises(TraceError) as caught:
        nsightkit.load(put(tmp_path, text, "odd.json"), cache=False)
    message = str(caught.value)
    assert "odd.json" in message
    assert "; " in message
    assert "\n" not in message


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("share", [0.02, 0.999])
def test_truncated(planted, tmp_path, share, pack):
    text = pack(planted[0].read_bytes())
    with pytest.raises(TraceError, match="truncated"):
        nsightkit.load(put(tmp_path, text[: int(len(text) * share)]), cache=False)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b'{"schemaVersion": 1}', "no traceEvents"),
        (b'[{"name": "aten::add", "ph": "X", "ts": 1.0, "dur": 2.0, "pid": "CPU functions"}]', r"autograd.*1\.8\.1"),
        (
            b'{"traceEvents": [{"name": "mm", "ph": "X", "ts": 1, "dur": 2, "pid": "CPU functions"}]}',
            r"autograd.*1\.8\.1",
        ),
        (b'{"traceEvents": [{"cat": "blink", "ph": "X", "ts": 1, "dur": 2}]}', "not of PyTorch's profiler"),
    ],
    ids=["no-events", "old-autograd-list", "old-autograd", "browser"],
)
def test_other_json_is_named(tmp_path, text, problem):
    with pytest.raises(TraceError, match=problem):
        nsightkit.load(put(tmp_path, text), cache=False)


# --- real traces ---


@pytest.mark.parametrize(
    "name",
    [
        "hta/cpu_only__rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz",
        "hta/critical_path__cuda_event_sync_multi_stream__event_sync_trace.json.gz",
        "hta/negative_queue_length_values_check__rank0.json.gz",
        "hta/triton_example__triton_example.json.gz",
        "kineto/resnet50_num_workers_4__worker0.1623212756351.pt.trace.json.gz",
        "param/linear_kineto.json.gz",
        "tracelens/h100__facebook_timesformer-base-finetuned-k400__1016002.json.gz",
    ],
)
def test_real_traces_have_the_events_that_plain_json_shows(shared_traces, name):
    path = shared_traces / name
    trace = nsightkit.load(path, cache=False)
    by_category = collections.defaultdict(list)
    for e in msgspec.json.decode(gzip.decompress(path.read_bytes()))["traceEvents"]:
        if e["ph"] == "X":
            by_category[e["cat"].lower()].append(e)
    for table, categories in {
        "kernels": ["kernel"],
        "memops": ["gpu_memcpy", "gpu_memset", "memcpy", "memset"],
        "calls": ["cuda_runtime", "cuda_driver", "runtime"],
        "syncs": ["cuda_sync"],
    }.items():
        expected = [e for c in categories for e in by_category[c]]
        assert trace.size(table) == len(expected)
        total = sum(round(e["dur"] * 1000) for e in expected)
        assert trace.table(table, ["duration_ns"])["duration_ns"].sum() == total
    annotated = sum(len(by_category[c]) for c in ("user_annotation", "cpu_op", "operator"))
    assert trace.size("ranges") + trace.size("ops") == annotated
    assert ("kernels" in trace.meta.missing) == (trace.size("kernels") == 0)
    orphans = ~trace["kernels"]["correlation"].isin(trace["calls"]["correlation"])
    assert orphans.sum() <= 0.12 * len(orphans)  # launched before the profiler began


# --- hostile traces ---

OPEN = b'{"traceEvents":['
BOMBS = {
    "events": (OPEN, b'{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":1,"dur":1,"args":{}},'),
    "events without a shape": (OPEN, b'{"args":{}},'),
    "white space": (OPEN, b" "),
    "a text": (OPEN + b'{"ph":"X","name":"', b"a"),
    "a number": (OPEN + b'{"ph":"X","cat":"kernel","ts":', b"1"),
    "brackets": (OPEN, b"["),
}


def bomb(path, head, unit):
    """Write a whole gzip file of about 1 MB, most of which is one text again and again."""

    def packed(content, flush):
        deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
        return deflate.compress(content) + deflate.flush(flush)

    unit *= MIB // len(unit)
    piece = packed(unit, zlib.Z_FULL_FLUSH)  # such a piece may stand anywhere, and repeatedly
    times = 1_000_000 // len(piece)
    checksum = zlib.crc32(head)
    for _ in range(times):
        checksum = zlib.crc32(unit, checksum)
    with path.open("wb") as file:
        file.write(b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + packed(head, zlib.Z_FULL_FLUSH) + piece * times)
        file.write(packed(b"", zlib.Z_FINISH) + struct.pack("<II", checksum, len(head) + times * len(unit)))
    return path


@pytest.mark.parametrize("kind", BOMBS)
def test_a_gzip_bomb_is_refused_soon_and_with_little_memory(tmp_path, kind):
    path = bomb(tmp_path / "bomb.json.gz", *BOMBS[kind])
    ended = command("summary", path)
    assert ended.code == 2, ended.error
    why = "(unpacks to more|of JSON that is broken|is not valid JSON)"
    assert re.fullmatch(rf"nsightkit: {re.escape(str(path))}: .*{why}.*; .*\n", ended.error), ended.error
    assert ended.cpu_s < 10
    assert ended.peak_bytes < 1000 * MIB


@pytest.mark.parametrize("question", ["summary", "memory", "ncu"])
@pytest.mark.parametrize("kind", ["fifo", "device", "loop"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, capsys, question, kind):
    path = tmp_path / "x.json"
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "loop":
            path.symlink_to(path)
    signal.alarm(10)  # reading it would never end
    assert cli.run([question, str(path)]) == 2
    signal.alarm(0)
    said = capsys.readouterr().err
    assert said.startswith(f"nsightkit: {path}: ")
    assert said.count("\n") == 1


VALUES = [None, True, -1, 1 << 33, 1 << 63, 10**400, 1e300, 1.5, "x", "9" * 30, "\u202e\x1b[31m", "\0", [1], {"a": 1}]
FIELDS = [
    "ph", "cat", "name", "pid", "tid", "ts", "dur", "device", "stream", "correlation", "grid", "bytes", "External id",
    "registers per thread", "Collective name", "Seq", "Sequence number", "kernel", "Input Dims",
]  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_any_value_of_an_event_is_read_or_refused(tmp_path, field):
    for value in VALUES:
        events = [
            event("cpu_op", "aten::mm", **{"External id": 1}),
            LAUNCH,
            kernel(),
            event("gpu_memcpy", device=0, stream=7),
            event("cuda_sync"),
            event("user_annotation"),
        ]
        for changed in events:
            part = changed if field in changed else changed["args"]
            part[field] = value
        with contextlib.suppress(TraceError):
            trace = load(tmp_path, json.loads(json.dumps(events)))
            for table in TABLES:
                trace.table(table)


@pytest.mark.parametrize(("column", "member", "count"), [("threads", "tid", 20_000), ("processes", "pid", 2_000)])
def test_more_threads_than_a_capture_has_are_refused(tmp_path, column, member, count):
    with pytest.raises(TraceError, match=rf"has {count:,} {column}"):
        load(tmp_path, [event("cpu_op") | {member: number} for number in range(count)])


NAMES = {
    "angles": "<" * 50_000 + ">" * 50_000,
    "open angles": "a" + "<" * 100_000,
    "lambdas": "k" + "::[lambda" * 12_000,
    "white space": "a" + " " * 100_000 + "b",
    "parentheses": "k" + "(" * 100_000,
}


@pytest.mark.parametrize("kind", NAMES)
def test_long_names_take_no_time(tmp_path, kind):
    name = NAMES[kind]
    begin = time.process_time()
    words.short_name(name)
    load(tmp_path, [event(category, name) for category in ("kernel", "gpu_memcpy", "cuda_sync", "cpu_op")])
    assert time.process_time() - begin < 3
