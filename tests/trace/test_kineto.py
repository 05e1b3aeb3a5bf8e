import collections
import functools
import gzip
import json
import re

import make_kineto
import msgspec
import numpy as np
import pandas as pd
import pytest

import nsightkit
from nsightkit.errors import TraceError
from nsightkit.trace import kineto
from nsightkit.trace.model import EVENT_TABLES, TABLES


def put(tmp_path, document, name="trace.json"):
    path = tmp_path / name
    path.write_bytes(document if isinstance(document, bytes) else json.dumps(document).encode())
    return path


def load(tmp_path, events, **head):
    return nsightkit.load(put(tmp_path, {"schemaVersion": 1, **head, "traceEvents": events}), cache=False)


def event(cat, name="x", *, ts=10, dur=5, pid=100, tid=100, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def kernel(**args):
    rest = {k: args.pop(k) for k in ("name", "ts", "dur", "pid", "tid") if k in args}
    return event("kernel", **{"pid": 0, "tid": 7, **rest}, **{"device": 0, "stream": 7, "correlation": 1, **args})


# --- sums known in advance ---


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    path = tmp_path_factory.mktemp("kineto") / "planted.json"
    return path, make_kineto.write(path, 1000, per_step=250)


@pytest.fixture(scope="module")
def whole(planted):
    return nsightkit.load(planted[0], cache=False)


def test_planted_sums_are_exact(planted, whole):
    truth, trace = planted[1], whole
    kernels = trace.table("kernels", ["name", "duration_ns", "start_ns", "end_ns"])
    assert trace.t0_ns == truth["first_ns"]
    assert trace.t0_ns > 2**42 * 1000  # where float64 microseconds no longer hold nanoseconds
    assert len(kernels) == truth["kernel_count"]
    assert kernels["duration_ns"].sum() == truth["kernel_ns"]
    assert kernels["end_ns"].max() - kernels["start_ns"].min() == truth["span_ns"]
    by_name = kernels.groupby("name", observed=True)["duration_ns"].agg(["count", "sum"])
    assert {n: tuple(v) for n, v in zip(by_name.index, by_name.to_numpy().tolist(), strict=True)} == truth["by_name"]
    assert trace.table("calls", ["duration_ns"])["duration_ns"].sum() == truth["call_ns"]
    assert trace.table("ops", ["duration_ns"])["duration_ns"].sum() == truth["op_ns"]
    assert trace.size("ranges") == truth["steps"]
    assert trace.meta.notes == []
    assert trace.meta.missing == ["syncs", "os_calls"]


def same(a, b):
    for table in TABLES:
        pd.testing.assert_frame_equal(a.table(table), b.table(table))
    assert a.meta == b.meta


@pytest.mark.parametrize("chunk", [4096, 1 << 26])
def test_slices_change_nothing(planted, whole, monkeypatch, chunk):
    monkeypatch.setattr(kineto, "CHUNK_BYTES", chunk)
    same(nsightkit.load(planted[0], cache=False), whole)


@pytest.mark.parametrize("name", ["packed.json.gz", "packed.json", "packed"])
def test_gzip_is_known_by_its_bytes(planted, whole, tmp_path, name):
    path = put(tmp_path, gzip.compress(planted[0].read_bytes(), 1), name)
    same(nsightkit.load(path, cache=False), whole)


def test_a_bare_list_of_events(planted, tmp_path, monkeypatch):
    events = json.loads(planted[0].read_text())["traceEvents"]
    monkeypatch.setattr(kineto, "CHUNK_BYTES", 8192)
    trace = nsightkit.load(put(tmp_path, events), cache=False)
    assert trace.size("kernels") == planted[1]["kernel_count"]


def test_objects_nested_in_args_do_not_break_the_slices(tmp_path, monkeypatch):
    monkeypatch.setattr(kineto, "CHUNK_BYTES", 600)
    nested = [{"name": "a", "ph": "X"}, {"name": "b"}]
    trace = load(tmp_path, [kernel(ts=i, correlation=i, extra=nested) for i in range(50)])
    assert trace["kernels"]["correlation"].tolist() == list(range(50))
    assert trace.meta.notes == [
        "Times are whole microseconds (PyTorch before 2.4): short kernels last 0 or 1 µs.",
    ]


# --- times ---


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("1623143089861123.456", 1623143089861123456),
        ("1623143089861123.457", 1623143089861123457),
        ("7899999999999.999", 7899999999999999),
        ("1623143089861123", 1623143089861123000),
        ("0.001", 1),
        ("12.5", 12500),
        ("1.5e3", 1500000),
        ('"12.25"', 12250),
        ("1212075528731.1101", 1212075528731110),  # a float's digits, printed by another exporter
        ("1212075528731.1099", 1212075528731110),
    ],
)
def test_times_are_exact(tmp_path, text, ns):
    text = '{"traceEvents":[{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":TS,"dur":0.001}]}'.replace(
        "TS", text
    )
    trace = nsightkit.load(put(tmp_path, text.encode()), cache=False)
    assert trace.t0_ns == ns
    assert trace["kernels"]["end_ns"].tolist() == [1]


def test_unusable_times_are_left_out_and_counted(tmp_path):
    good = kernel(ts=1000, dur=3.5)
    bad = [kernel(ts=t) for t in (None, "soon", True, 1e300)] + [{k: v for k, v in good.items() if k != "ts"}]
    trace = load(tmp_path, [good, *bad, kernel(ts=-5), kernel(ts=2000, dur=-7), kernel(ts=3000, dur=None)])
    assert trace.table("kernels", ["duration_ns"])["duration_ns"].tolist() == [3500, 0, 0]
    assert [n.split()[0] for n in trace.meta.notes if n[0].isdigit()] == ["5", "1", "1"]


def test_starts_clamped_to_zero_are_left_out(tmp_path):
    trace = load(tmp_path, [kernel(ts=1.6e15, dur=3.5), kernel(ts=0), event("cpu_op", ts=1.6e15 + 1)])
    assert trace.size("kernels") == trace.size("ops") == 1
    assert trace.t0_ns == 1600000000000000000
    assert any(n.startswith("1 events without a valid start") for n in trace.meta.notes)
    # in a trace that begins at zero, zero is a time
    assert load(tmp_path, [kernel(ts=0), kernel(ts=5.5)]).size("kernels") == 2


# --- what is what ---


def test_python_functions_are_no_events_of_the_capture(tmp_path):
    """A stack that was open before the capture neither moves its start nor fills a table that may be missing."""
    frame = event("python_function", "train.py(12): forward", ts=1, dur=500.25)
    trace = load(tmp_path, [frame, kernel(ts=10.5, dur=2), event("cpu_op", "aten::mm", ts=10, dur=1)])
    assert trace.table("kernels", ["start_ns"])["start_ns"].tolist() == [500]
    assert trace["frames"][["start_ns", "end_ns", "name"]].astype(object).to_numpy().tolist() == [
        [-9000, 491_250, "train.py(12): forward"]
    ]
    assert "frames" not in trace.meta.missing
    assert load(tmp_path, [kernel()]).recorded("frames")


def test_autograd_s_numbers_and_the_kernels_that_calls_name(tmp_path):
    trace = load(
        tmp_path,
        [
            event("cpu_op", "aten::mm", **{"Sequence number": 7, "Fwd thread id": 0}),
            event("cpu_op", "MmBackward0", **{"Sequence number": 7, "Fwd thread id": 1}),
            event("cpu_op", "aten::add", **{"Sequence number": 2**64 - 1}),
            event("cuda_runtime", "hipLaunchKernel", kernel="void gemm<4>(int)"),
            event("cuda_runtime", "cudaLaunchKernel", kernel={"odd": []}),
            event("cuda_runtime", "cudaFree"),
        ],
    )
    assert trace["ops"][["sequence", "forward_thread"]].to_numpy().tolist() == [[7, 0], [7, 1], [-1, -1]]
    assert trace["calls"]["kernel"].tolist() == ["void gemm<4>(int)", "", ""]


def test_categories(tmp_path):
    trace = load(
        tmp_path,
        [
            kernel(ts=20.5, dur=2),
            event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", pid=0, tid=7, device=0, stream=9, bytes=4096),
            event("gpu_memset", "Memset (Device)", pid=0, tid=7, device=0, stream=7, bytes=512),
            event("cuda_runtime", "cudaLaunchKernel_v7000", correlation=1),
            event("cuda_driver", "cuLaunchKernel_ptsz", correlation=2),
            event("cuda_runtime", "cudaGetDeviceProperties_v2", correlation=3),
            event("cuda_sync", "Stream Sync", pid=0, tid=7, device=0, stream=7, cuda_sync_kind="Stream Sync"),
            event("cuda_sync", "Stream Wait Event", pid=0, tid=7, device=0, stream=7),
            event("user_annotation", "ProfilerStep#3", ts=0, dur=100),
            event("cpu_op", "aten::mm", **{"External id": 77}),
            event("overhead", "Command Buffer Full", pid=-1, tid=0),
            event("python_function", "train.py(3): step"),
            # none of these is GPU work, or an event of any table
            event("cpu_op", "triton_", stream=7, grid="grid(1,)", **{"External id": 78}),
            event("gpu_user_annotation", "ProfilerStep#3", pid=0, tid=7),
            event("cuda_event", "record", pid=0, tid=7, stream=7),
            event("Trace", "PyTorch Profiler (0)", pid="Spans", tid="PyTorch Profiler", ts=0, dur=200.5),
            {
                "ph": "i",
                "s": "g",
                "name": "Record Window End",
                "pid": "Traces",
                "tid": "Trace PyTorch Profiler",
                "ts": 3,
            },
            {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 1, "pid": 100, "tid": 100, "ts": 10},
            {"ph": "f", "cat": "ac2g", "name": "ac2g", "id": 1, "pid": 0, "tid": 7, "ts": 20, "bp": "e"},
        ],
    )
    assert {t: trace.size(t) for t in TABLES if trace.size(t)} == {
        "kernels": 1, "memops": 2, "calls": 3, "syncs": 2, "ranges": 1, "ops": 2, "frames": 1, "overhead": 1,
    }  # fmt: skip
    assert trace["memops"][["kind", "src_kind", "dst_kind", "bytes", "stream"]].astype(object).to_numpy().tolist() == [
        ["HtoD", "pageable", "device", 4096, 9],
        ["memset", "", "device", 512, 7],
    ]
    assert trace["calls"]["name"].tolist() == ["cudaLaunchKernel", "cuLaunchKernel", "cudaGetDeviceProperties_v2"]
    assert trace["syncs"]["kind"].tolist() == ["stream", "stream-wait-event"]
    assert trace["ops"]["correlation"].tolist() == [77, 78]
    assert trace["ranges"]["kind"].tolist() == ["annotation"]
    assert trace["overhead"][["process", "thread"]].to_numpy().tolist() == [[-1, -1]]
    assert trace.meta.window_ns == (0, 200500)
    assert trace.meta.missing == ["os_calls"]
    assert trace.table("kernels", ["duration_ns"])["duration_ns"].sum() == 2000
    assert (
        set(trace["kernels"]["process"]) == set(trace["memops"]["process"]) == set(trace["syncs"]["process"]) == {100}
    )


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("Memcpy DtoH (Device -> Pinned)", ("DtoH", "device", "pinned")),
        ("Memcpy DtoD (Device -> Device)", ("DtoD", "device", "device")),
        ("Memcpy PtoP (Device -> Device)", ("PtoP", "device", "device")),
        ("Memcpy HtoH (Managed -> Unknown)", ("HtoH", "managed", "unknown")),
        ("Memcpy AtoD (Array -> Device)", ("AtoD", "array", "device")),
        ("Memcpy Unknown (Unknown -> Unknown)", ("other", "unknown", "unknown")),
        ("Memset (Managed)", ("memset", "", "managed")),
        ("Memset (Unknown)", ("memset", "", "unknown")),
        ("CopyHostToDevice", ("HtoD", "unknown", "unknown")),
        ("CopyDeviceToDevice", ("DtoD", "unknown", "unknown")),
        ("FillBuffer", ("memset", "", "unknown")),
        ("", ("other", "unknown", "unknown")),
    ],
)
def test_memop_kinds(tmp_path, name, kinds):
    row = load(tmp_path, [event("gpu_memcpy", name)])["memops"].iloc[0]
    assert (row["kind"], row["src_kind"], row["dst_kind"]) == kinds
    assert row["bytes"] == 0


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void at::native::reduce_kernel<512, 1, at::X<a, b> >(at::X<a, b>)", "reduce_kernel"),
        ("void at::native::(anonymous namespace)::softmax_warp_forward<float, 8>(float*, int)", "softmax_warp_forward"),
        ("void at::native::Foo<int>::bar<3>(int (*)(float))", "bar"),
        ("ampere_sgemm_128x64_nn", "ampere_sgemm_128x64_nn"),
        ("triton_poi_fused_add_cos_sin_0", "triton_poi_fused_add_cos_sin_0"),
        ("void cutlass::Kernel2<cutlass_80_tensorop>(cutlass_80_tensorop::Params)", "Kernel2"),
        ("", ""),
        ("<<<", "<<<"),
    ],
)
def test_short_kernel_name(name, short):
    assert kineto.short_kernel_name(name) == short


def test_before_2022(tmp_path):
    """Capitalised categories, thread ids as strings, `stream 7` as the thread, steps among the operators."""
    trace = load(
        tmp_path,
        [
            {"ph": "X", "cat": "Operator", "name": "ProfilerStep#5", "pid": 9, "tid": "9", "ts": 0, "dur": 100},
            {"ph": "X", "cat": "Operator", "name": "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
             "pid": 9, "tid": "9", "ts": 1, "dur": 30},
            {"ph": "X", "cat": "Operator", "name": "aten::empty", "pid": 9, "tid": "9", "ts": 2, "dur": 3,
             "args": {"External id": 4}},
            {"ph": "X", "cat": "Runtime", "name": "cudaMemcpyAsync", "pid": 9, "tid": "9", "ts": 40, "dur": 9,
             "args": {"cbid": 41, "correlation": 34486, "external id": 43, "external ts": 40}},
            {"ph": "X", "cat": "Memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "pid": 0, "tid": "stream 7",
             "ts": 45, "dur": 8, "args": {"correlation": 34486}},
            {"ph": "X", "cat": "Memset", "name": "Memset (Device)", "pid": 0, "tid": "stream 7", "ts": 60, "dur": 1},
            {"ph": "X", "cat": "Kernel", "name": "k", "pid": 0, "tid": "stream 13", "ts": 70, "dur": 0,
             "args": {"correlation": 34510, "grid": [50, 1, 1], "block": [256, 1, 1]}},
            {"ph": "M", "name": "thread_name", "pid": 9, "tid": 9, "args": {"name": "python"}},
        ],
    )  # fmt: skip
    assert {t: trace.size(t) for t in TABLES if trace.size(t)} == {
        "kernels": 1, "memops": 2, "calls": 1, "ranges": 2, "ops": 1,
    }  # fmt: skip
    assert trace["ranges"][["name", "level", "parent"]].astype(object).to_numpy().tolist() == [
        ["ProfilerStep#5", 0, -1],
        ["enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 1, 0],
    ]
    assert trace["kernels"][["device", "stream", "process", "grid_x"]].to_numpy().tolist() == [[0, 13, 9, 50]]
    assert trace["memops"][["device", "stream", "bytes"]].to_numpy().tolist() == [[0, 7, 0], [0, 7, 0]]
    assert set(trace["ops"]["thread"]) == {9 << 24 | 9}
    assert trace.meta.thread_names == {9 << 24 | 9: "python"}
    assert any("whole microseconds" in n for n in trace.meta.notes)


def test_whole_microseconds_nest_within_a_microsecond(tmp_path):
    outer, inner = event("user_annotation", "a", ts=0, dur=10), event("user_annotation", "b", ts=5, dur=6)
    assert load(tmp_path, [outer, inner])["ranges"]["parent"].tolist() == [-1, 0]
    assert load(tmp_path, [outer, inner, event("cpu_op", ts=0.001)])["ranges"]["parent"].tolist() == [-1, -1]


def test_amd(tmp_path):
    trace = load(
        tmp_path,
        [
            event("cuda_runtime", "hipLaunchKernel", correlation=5, ts=0.25),
            event("hip_runtime", "hipMemcpyWithStream", correlation=6),
            event("kernel", "Cijk_Ailk_Bljk_HHS_BH_MT128x128x32", pid=2, tid=0, device=2, stream=0, correlation=5),
            event("gpu_memcpy", "CopyHostToDevice", pid=2, tid=0, device=2, stream=0, correlation=6, bytes=64),
        ],
        deviceProperties=[{"id": 2, "name": "AMD Instinct MI300X"}],
    )
    assert trace["calls"]["name"].tolist() == ["hipLaunchKernel", "hipMemcpyWithStream"]
    assert trace["kernels"][["device", "process", "grid_x"]].to_numpy().tolist() == [[2, 100, 0]]
    assert trace["memops"]["kind"].tolist() == ["HtoD"]


def test_cpu_only(tmp_path):
    trace = load(tmp_path, [event("cpu_op"), event("user_annotation")], deviceProperties=[])
    assert trace.meta.missing == ["kernels", "memops", "graphs", "calls", "syncs", "os_calls", "overhead"]
    assert trace.meta.distributed == {}
    trace = load(tmp_path, [event("cpu_op")], distributedInfo={"backend": "gloo", "rank": 3, "world_size": 8})
    assert trace.meta.distributed["rank"] == 3


def test_calls_without_gpu_work_say_that_none_happened(tmp_path):
    trace = load(tmp_path, [event("cpu_op"), event("cuda_runtime", "cudaMalloc", correlation=1)])
    assert trace.meta.missing == ["syncs", "os_calls"]


def test_launches_without_any_gpu_work_say_that_it_was_lost(tmp_path):
    launches = [event("cuda_runtime", "cudaLaunchKernel", correlation=n) for n in (1, 2)]
    trace = load(tmp_path, [event("cpu_op"), event("cuda_runtime", "cudaMalloc", correlation=3), *launches])
    assert trace.meta.missing == ["kernels", "memops", "graphs", "syncs", "os_calls"]
    assert any(
        note.startswith("2 calls gave a GPU work, of which the trace holds nothing") for note in trace.meta.notes
    )
    trace = load(tmp_path, [*launches, kernel(correlation=1)])
    assert trace.recorded("memops")
    assert not any("holds nothing" in note for note in trace.meta.notes)


# --- processes and threads ---


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
    assert trace["ops"]["thread"].nunique() == 3


# --- text that is not quite JSON, or not a trace ---


def test_an_empty_profile_is_a_trace(tmp_path):
    trace = load(tmp_path, [])
    assert all(trace.size(t) == 0 for t in TABLES)
    assert set(trace.meta.missing) == set(EVENT_TABLES)


@pytest.mark.parametrize(
    "text",
    [
        b"{}",
        b"[]",
        b"[1, 2, 3]",
        b'[{"a": 1}]',
        b'{"traceEvents": []}',
        b'{"traceEvents": 3}',
        b'{"traceEvents": null}',
        b'{"traceEvents": {"a": 1}}',
        b'{"traceEvents": [1, 2]}',
        b'{"traceEvents": [{"name": "x"}]}',
        b'{"a": {"traceEvents": [',
        b'{"metrics": {"x": 1}}',
        b'[{"ph": "X", "name": "[MEMCPY] HtoD", "ts": 1, "dur": 2, "pid": 1, "tid": 7}]',
        b'{"traceEvents": [{"ph": "b", "cat": "resnet50", "name": "1", "id": "1", "ts": 1, "pid": 0}]}',
        b'{"Table": 1}\n{"Table": 2}\n',
        b'{"schemaVersion": 1, "traceEvents": [3]}',
        b'{"schemaVersion": 1, "traceEvents": [{"ph": "X", "cat": ["kernel"], "ts": 1}]}',
        b'{"schemaVersion": 1, "traceEvents": [{"ph": "X", "cat": "kernel", "name": "\\d", "ts": 1}]}',
        b'{"schemaVersion": 1, "traceEvents": [{"ph": "X", "cat": "kernel", "name": "\xff", "ts": 1}]}',
        b'{"schemaVersion": 1, "traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1, "args": {"x": nan}}]}',
        b'{"schemaVersion": 1, "traceEvents": [],}',
        b'{"schemaVersion": 1, "traceEvents": []} garbage',
        b'[{"ph": "X", "cat": "kernel", "ts": 1},',
        b"{" * 100_000,
        b"[" * 100_000,
        b'{"traceEvents": [' + b'{"args":' * 100_000,
        b"{ this is not JSON",
        gzip.compress(b"not JSON", mtime=0),
        gzip.compress(b"", mtime=0),
        b'[{"name": "aten::mm", "ph": "X", "ts": 1, "dur": 2, "tid": 1, "pid": "CPU functions", "args": {}}]',
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


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.999])
def test_truncated(planted, tmp_path, share, pack):
    text = planted[0].read_bytes()
    text = gzip.compress(text, 1) if pack else text
    with pytest.raises(TraceError, match="truncated"):
        nsightkit.load(put(tmp_path, text[: int(len(text) * share)]), cache=False)


# --- real traces ---

REAL = [
    "hta/cpu_only__rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz",
    "hta/critical_path__cuda_event_sync_multi_stream__event_sync_trace.json.gz",
    "hta/distributed_info_unavailable__distributed_info_not_found.json.gz",
    "hta/negative_queue_length_values_check__rank0.json.gz",
    "hta/trace_diff__control__control.json.gz",
    "hta/trace_diff__test__test.json.gz",
    "hta/trace_filter__sampled_rank-0.json.gz",
    "hta/trace_filter__sampled_rank-1.json.gz",
    "hta/triton_example__triton_example.json.gz",
    "kineto/resnet50_num_workers_0__worker0.1623143089861.pt.trace.json.gz",
    "kineto/resnet50_num_workers_4__worker0.1623212756351.pt.trace.json.gz",
    "param/linear_kineto.json.gz",
    "tracelens/h100__facebook_timesformer-base-finetuned-k400__1016002.json.gz",
]


@pytest.fixture(scope="module")
def real(shared_traces):
    """Open a real trace, each once."""
    return functools.cache(lambda name: nsightkit.load(shared_traces / name, cache=False))


@pytest.mark.parametrize("name", REAL)
def test_real_traces_have_the_events_that_plain_json_shows(shared_traces, real, name):
    path = shared_traces / name
    trace = real(name)
    line = next(x for x in (shared_traces / "MANIFEST.md").read_text().splitlines() if name in x)
    listed = {what: int(n) for what, n in re.findall(r"(events|kernels) (\d+)", line)}
    assert trace.size("kernels") == listed["kernels"]

    events = msgspec.json.decode(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert len(events) == listed["events"]
    by_category = collections.defaultdict(list)
    for e in events:
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
    assert ("kernels" in trace.meta.missing) == (listed["kernels"] == 0)
    ranges = trace["ranges"]
    inside = ranges[ranges["parent"] >= 0]
    parents = ranges.loc[inside["parent"]]
    assert np.array_equal(parents["thread"], inside["thread"])
    assert np.array_equal(parents["level"] + 1, inside["level"])
    if listed["kernels"]:
        launched = set(zip(trace["calls"]["process"], trace["calls"]["correlation"], strict=True))
        orphans = [
            k not in launched for k in zip(trace["kernels"]["process"], trace["kernels"]["correlation"], strict=True)
        ]
        assert np.mean(orphans) < 0.12  # launched before the profiler began
