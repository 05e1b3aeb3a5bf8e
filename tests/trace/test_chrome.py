import collections
import gzip
import json
import re

import make_kineto
import numpy as np
import pandas as pd
import pytest
from make_interleaved import interleaved

import nsightkit
from nsightkit.errors import UsageError
from nsightkit.trace import chrome
from nsightkit.trace.model import TABLES, Trace, TraceMeta
from nsightkit.trace.nesting import crossings, lanes


def assert_same(a, b):
    for table in TABLES:
        x, y = a.table(table), b.table(table)
        for column, dtype in TABLES[table].items():
            if dtype == "category":
                x[column], y[column] = x[column].astype(object), y[column].astype(object)
        pd.testing.assert_frame_equal(x, y)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    trace = interleaved()
    path = tmp_path_factory.mktemp("chrome") / "out.json"
    chrome.write(trace, path)
    return trace, path, json.loads(path.read_text())


@pytest.mark.parametrize(
    ("start", "name"),
    [(1_000, "o.json.gz"), (0, "o.json"), (-5_000, "o.json"), (7_100_000_000_123_457, "o.json")],
)
def test_round_trip_to_the_nanosecond(tmp_path, start, name):
    trace = interleaved(start)
    chrome.write(trace, tmp_path / name)
    assert ((tmp_path / name).read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")
    again = nsightkit.load(tmp_path / name, cache=False)
    assert_same(trace, again)
    assert again.t0_ns == trace.t0_ns
    for field in ("tool", "tool_version", "driver", "gpus", "missing", "thread_names", "distributed"):
        assert getattr(again.meta, field) == getattr(trace.meta, field), field
    assert again.meta.window_ns == trace.meta.window_ns


def test_round_trip_of_a_profiler_trace(tmp_path):
    make_kineto.write(tmp_path / "in.json", 1000)
    trace = nsightkit.load(tmp_path / "in.json", cache=False)
    chrome.write(trace, tmp_path / "out.json.gz")
    again = nsightkit.load(tmp_path / "out.json.gz", cache=False)
    assert_same(trace, again)
    assert again.meta == trace.meta


def test_a_selection_exports_only_itself(tmp_path):
    trace = interleaved()
    chosen = trace.masked({"kernels": (trace["kernels"]["device"] == 1).to_numpy(), "os_calls": np.zeros(9, bool)})
    chrome.write(chosen, tmp_path / "o.json")
    again = nsightkit.load(tmp_path / "o.json", cache=False)
    assert again.size("kernels") == chosen.size("kernels") < trace.size("kernels")
    assert again.size("os_calls") == 0
    assert_same(chosen, again)


def test_times_are_microseconds_with_three_decimals(exported):
    _, path, _ = exported
    times = re.findall(r'"(?:ts|dur)":([^,}]*)', path.read_text())
    assert times
    assert all(re.fullmatch(r"\d+\.\d{3}", t) for t in times)


def test_streams_are_tracks_on_which_nothing_overlaps(exported):
    _, _, document = exported
    tracks = collections.defaultdict(list)
    for e in document["traceEvents"]:
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset", "graph_replay"):
            tracks[e["pid"], e["tid"]].append((round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000)))
    for events in tracks.values():
        events.sort()
        ends = np.maximum.accumulate([e for _, e in events])
        overlapping = sum(s < e for (s, _), e in zip(events[1:], ends, strict=False))
        assert overlapping <= 3  # copies and kernels of one stream share a track
    labels = {(e["pid"], e["tid"]): e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    assert set(tracks) <= set(labels)
    assert {"stream 7", "stream 7 overlap 1", "stream 7 graph replays", "main"} <= set(labels.values())
    processes = {e["pid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"}
    assert processes[0] == "GPU 0 A <b>"
    assert processes[4242] == "process 4242"


def test_gpu_and_program_never_share_a_process(tmp_path):
    trace = Trace.from_frames(
        {
            "kernels": pd.DataFrame({"start_ns": [5], "end_ns": [9], "device": [0], "stream": [7], "name": ["k"]}),
            "calls": pd.DataFrame({"start_ns": [1], "end_ns": [2], "process": [0], "thread": [7], "name": ["c"]}),
        }
    )
    chrome.write(trace, tmp_path / "o.json")
    events = json.loads((tmp_path / "o.json").read_text())["traceEvents"]
    assert len({e["pid"] for e in events if e["ph"] == "X"}) == 2
    assert nsightkit.load(tmp_path / "o.json", cache=False)["kernels"]["device"].tolist() == [0]


def test_flows_lead_from_each_launch_to_its_operation(exported):
    trace, _, document = exported
    starts = {e["id"]: e for e in document["traceEvents"] if e["ph"] == "s"}
    ends = {e["id"]: e for e in document["traceEvents"] if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    launched = trace["kernels"].merge(trace["calls"], on=["process", "correlation"])
    graphs = trace["graphs"].merge(trace["calls"], on=["process", "correlation"])
    assert len(starts) == len(launched) + len(graphs) == 303  # the copies belong to a process without calls
    begun = {(round(e["ts"] * 1000), round(ends[i]["ts"] * 1000)) for i, e in starts.items()}
    both = pd.concat([launched, graphs])
    assert begun == set(zip(both["start_ns_y"], both["start_ns_x"], strict=True))
    assert all(e["bp"] == "e" for e in ends.values())


def test_asynchronous_ranges_are_paired(exported):
    _, _, document = exported
    by_id = collections.defaultdict(list)
    for e in document["traceEvents"]:
        if e["ph"] in "be":
            by_id[e["id"], e["cat"]].append(e)
    assert len(by_id) == 2
    for begin, end in by_id.values():
        assert (begin["ph"], end["ph"]) == ("b", "e")
        assert begin["name"] == end["name"]
        assert round((end["ts"] - begin["ts"]) * 1000) == begin["args"]["duration_ns"]


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


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "o.json"
    path.write_text("old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(chrome, "json_text", fail)
    with pytest.raises(UsageError, match="disk full"):
        chrome.write(interleaved(), path, overwrite=True)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["o.json"]


def test_the_same_trace_gives_the_same_bytes(tmp_path):
    for name in ("a.json.gz", "b.json.gz"):
        chrome.write(interleaved(), tmp_path / name)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    assert json.loads(gzip.decompress((tmp_path / "a.json.gz").read_bytes()))["displayTimeUnit"] == "ms"


def test_an_empty_trace(tmp_path):
    chrome.write(Trace.from_frames({}, TraceMeta(missing=["kernels"])), tmp_path / "o.json")
    again = nsightkit.load(tmp_path / "o.json", cache=False)
    assert again.meta.missing == ["kernels"]
    assert all(again.size(t) == 0 for t in TABLES)


@pytest.mark.parametrize(
    "name",
    [
        "nsys-ai/mfu_2gpu_before.sqlite",
        "cs336-zx3xyy/result_2_7B_compile_ro.sqlite",
        "memfusion/report1.sqlite",
        "hta/critical_path__cuda_event_sync_multi_stream__event_sync_trace.json.gz",
        "hta/trace_filter__sampled_rank-0.json.gz",
    ],
)
def test_round_trip_of_real_traces(shared_traces, tmp_path, name):
    trace = nsightkit.load(shared_traces / name, cache=False)
    chrome.write(trace, tmp_path / "o.json")
    again = nsightkit.load(tmp_path / "o.json", cache=False)
    assert_same(trace, again)
    assert again.meta.missing == trace.meta.missing


def test_a_trace_without_names_is_still_a_list_of_events(tmp_path):
    frame = pd.DataFrame({"start_ns": [1], "end_ns": [2], "name": ["k"]})
    chrome.write(Trace.from_frames({"kernels": frame}), tmp_path / "o.json")
    assert nsightkit.load(tmp_path / "o.json", cache=False).size("kernels") == 1
    chrome.write(Trace.from_frames({"ops": frame.assign(process=-1)}), tmp_path / "o.json", overwrite=True)
    json.loads((tmp_path / "o.json").read_text())


def test_lanes_are_as_few_as_overlap():
    rng = np.random.default_rng(3)
    for n, longest in ((0, 9), (1, 9), (400, 5), (400, 60)):
        track, start = rng.integers(0, 3, n), rng.integers(0, 500, n)
        end = start + rng.integers(0, longest, n)
        lane = lanes(track, start, end)
        for t in np.unique(track):
            mine = track == t
            lasting = mine & (end > start)
            depth = max((int(((start <= at) & (at < end))[lasting].sum()) for at in start[lasting]), default=1)
            assert len(set(lane[lasting])) == depth
            for one in np.unique(lane[mine]):
                order = np.lexsort((end[mine & (lane == one)], start[mine & (lane == one)]))
                begin, finish = start[mine & (lane == one)][order], end[mine & (lane == one)][order]
                assert (begin[1:] >= np.maximum.accumulate(finish)[:-1]).all()


def test_crossing_is_what_neither_contains_nor_leaves():
    rng = np.random.default_rng(4)
    thread, start = rng.integers(0, 2, 300), rng.integers(0, 2000, 300)
    end = start + rng.integers(1, 30, 300)
    crossing = crossings(thread, start, end)
    for i in range(300):
        others = (thread == thread[i]) & (start < start[i]) & (end > start[i]) & (end < end[i])
        # What an enclosing event already crosses is found once that one is gone.
        assert crossing[i] <= others.any()
    kept = ~crossing
    while (more := crossings(thread[kept], start[kept], end[kept])).any():
        kept[np.flatnonzero(kept)[more]] = False
    for i in np.flatnonzero(kept):
        others = kept & (thread == thread[i]) & (start < start[i]) & (end > start[i]) & (end < end[i])
        assert not others.any()


def test_what_is_drawn_elsewhere_is_read_where_it_was(tmp_path):
    ranges = pd.DataFrame({"start_ns": [0, 50, 60], "end_ns": [100, 150, 90], "name": list("abc")})
    calls = pd.DataFrame({"start_ns": [1, 2], "end_ns": [4, 9], "name": "c", "process": [0, 1 << 33]})
    frames = {
        "ranges": ranges.assign(process=5, thread=5 << 24 | 5, kind="pushpop", level=[0, 0, 1], parent=[-1, -1, 1]),
        "calls": calls.assign(thread=calls["process"] * (1 << 24)),
    }
    names = {0: "zero", 1 << 57: "far", 5 << 24 | 5: "five"}
    trace = Trace.from_frames(frames, TraceMeta(thread_names=names))
    chrome.write(trace, tmp_path / "o.json")
    again = nsightkit.load(tmp_path / "o.json", cache=False)
    assert_same(trace, again)
    assert again.meta.thread_names == names
    events = json.loads((tmp_path / "o.json").read_text())["traceEvents"]
    assert all(0 < e["pid"] < 1 << 32 and 0 < e["tid"] < 1 << 32 for e in events if e["ph"] == "X")


def test_a_foreign_place_is_not_a_place(tmp_path):
    event = {"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 2, "ts": 3, "dur": 4}
    for place in ([], [1], [1, 2, 3], "x", {}, ["a", "b"]):
        (tmp_path / "i.json").write_text(json.dumps({"traceEvents": [event, {**event, "place": place}]}))
        read = nsightkit.load(tmp_path / "i.json", cache=False)
        assert set(read["ops"]["thread"]) == {1 << 24 | 2}
