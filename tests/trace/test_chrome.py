import collections
import gzip
import json

import make_kineto
import numpy as np
import pandas as pd
import pytest
from make_interleaved import interleaved

import nsightkit
from nsightkit.errors import TraceError, UsageError
from nsightkit.trace import chrome
from nsightkit.trace.model import GPU_TABLES, TABLES, Trace, TraceMeta
from nsightkit.trace.nesting import crossings

CATEGORIES = {
    "kernel": "kernels",
    "gpu_memcpy": "memops",
    "gpu_memset": "memops",
    "graph_replay": "graphs",
    "cuda_sync": "syncs",
    "cuda_runtime": "calls",
    "user_annotation": "ranges",
    "nvtx": "ranges",
    "python_function": "frames",
    "cpu_op": "ops",
    "os_call": "os_calls",
    "overhead": "overhead",
}


def read(path):
    """The events of a file, with exact times in nanoseconds."""
    raw = path.read_bytes()
    if path.suffix == ".gz":
        raw = gzip.decompress(raw)
    document = json.loads(raw, parse_float=str)
    for event in document["traceEvents"]:
        for member in {"ts", "dur"} & event.keys():
            whole, _, rest = event[member].partition(".")
            assert len(rest) == 3
            event[member] = int(whole + rest)
    return document["traceEvents"]


def exported(trace, path):
    chrome.write(trace, path)
    return read(path)


def drawn(events):
    """Start, end and name of the slices, by table."""
    slices = collections.defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            table = CATEGORIES[event["cat"]]
            slices[table].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    return slices


def recorded(trace, table):
    frame = trace[table]
    return list(zip(frame["start_ns"], frame["end_ns"], frame["name"], strict=True))


@pytest.fixture(scope="module")
def interleaved_export(tmp_path_factory):
    trace = interleaved()
    return trace, exported(trace, tmp_path_factory.mktemp("chrome") / "out.json")


@pytest.mark.parametrize(
    ("start", "name"),
    [(1_000, "o.json.gz"), (0, "o.json"), (-5_000, "o.json"), (7_100_000_000_123_457, "o.json")],
)
def test_every_event_is_drawn_to_the_nanosecond(tmp_path, start, name):
    trace = interleaved(start)
    slices = drawn(exported(trace, tmp_path / name))
    assert {table: len(rows) for table, rows in slices.items()} == {t: trace.size(t) for t in TABLES if trace.size(t)}
    for table in ("kernels", "calls", "ranges", "frames", "ops", "os_calls", "overhead"):
        assert slices[table] == recorded(trace, table)


def test_arguments_are_named_as_kineto_names_them(tmp_path):
    make_kineto.write(tmp_path / "in.json", 1000)
    trace = nsightkit.load(tmp_path / "in.json", cache=False)
    original = {}
    for event in json.loads((tmp_path / "in.json").read_text())["traceEvents"]:
        if event.get("cat") == "kernel":
            original[event["args"]["correlation"]] = event["args"]
    kernels = [event for event in exported(trace, tmp_path / "o.json") if event.get("cat") == "kernel"]
    assert len(kernels) == 1000
    for kernel in kernels:
        args = original[kernel["args"]["correlation"]] | {"graph node id": 0}
        for key, value in kernel["args"].items():
            assert args[key] == value


def test_an_export_is_not_read_as_a_trace(interleaved_export, tmp_path):
    chrome.write(interleaved_export[0], tmp_path / "o.json.gz")
    with pytest.raises(TraceError, match=r"o\.json\.gz: is a timeline that nsightkit wrote.*Perfetto.*\.parquet"):
        nsightkit.load(tmp_path / "o.json.gz", cache=False)


def test_a_selection_exports_only_itself(tmp_path):
    trace = interleaved()
    chosen = trace.masked({"kernels": (trace["kernels"]["device"] == 1).to_numpy(), "os_calls": np.zeros(9, bool)})
    slices = drawn(exported(chosen, tmp_path / "o.json"))
    assert slices["kernels"] == recorded(chosen, "kernels")
    assert 0 < len(slices["kernels"]) < trace.size("kernels")
    assert not slices["os_calls"]


def test_functions_that_began_before_the_capture_have_no_negative_times(tmp_path):
    frames = {
        "kernels": pd.DataFrame({"start_ns": [5_001], "end_ns": [6_000], "name": ["k"]}),
        "frames": pd.DataFrame({"start_ns": [-4_000], "end_ns": [9_000], "name": ["f"]}),
    }
    slices = drawn(exported(Trace.from_frames(frames), tmp_path / "o.json"))
    assert slices == {"frames": [(0, 13_000, "f")], "kernels": [(9_001, 10_000, "k")]}


def test_streams_are_tracks_on_which_nothing_overlaps(interleaved_export):
    tracks = collections.defaultdict(list)
    for event in interleaved_export[1]:
        if CATEGORIES.get(event.get("cat")) in GPU_TABLES:
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for times in tracks.values():
        starts, ends = np.array(sorted(times)).T
        assert (starts[1:] >= np.maximum.accumulate(ends)[:-1]).all()
    labels = {}
    processes = {}
    for event in interleaved_export[1]:
        if event["name"] == "thread_name":
            labels[event["pid"], event["tid"]] = event["args"]["name"]
        if event["name"] == "process_name":
            processes[event["pid"]] = event["args"]["name"]
    assert tracks.keys() <= labels.keys()
    expected = {"stream 7", "stream 7 overlap 1", "stream 7 graph replays", "main", "main start/end ranges"}
    assert expected <= set(labels.values())
    assert {"GPU 0 A <b>", "process 4242"} <= set(processes.values())


def test_the_trace_itself_is_never_overwritten(tmp_path):
    path = tmp_path / "in.json"
    make_kineto.write(path, 1000)
    before = path.read_bytes()
    trace = nsightkit.load(path, cache=False)
    (tmp_path / "link.json").symlink_to(path)
    for target in (path, tmp_path / "link.json", tmp_path / "." / "in.json"):
        with pytest.raises(UsageError, match="the trace itself"):
            chrome.write(trace, target)
    assert path.read_bytes() == before


def test_the_same_trace_gives_the_same_bytes(tmp_path):
    for name in ("a.json.gz", "b.json.gz"):
        chrome.write(interleaved(), tmp_path / name)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_an_empty_trace_is_a_document_without_events(tmp_path):
    assert exported(Trace.from_frames({}, TraceMeta(missing=["kernels"])), tmp_path / "o.json") == []


def test_without_what_crosses_all_intervals_nest():
    rng = np.random.default_rng(4)
    thread = rng.integers(0, 2, 300)
    start = rng.integers(0, 2000, 300)
    end = start + rng.integers(1, 30, 300)
    crossing = crossings(thread, start, end)
    for i in range(300):
        crossed = (thread == thread[i]) & (start < start[i]) & (end > start[i]) & (end < end[i])
        assert crossing[i] <= crossed.any()
        assert crossing[i] or not (crossed & ~crossing).any()
