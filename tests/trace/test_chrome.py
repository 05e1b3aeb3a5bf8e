"""What `convert` writes for viewers: every event once, to the nanosecond, on tracks on which nothing crosses."""

import collections
import gzip
import json

import pandas as pd
import pytest
from make_interleaved import interleaved

import nsightkit
from nsightkit.errors import TraceError
from nsightkit.trace import chrome
from nsightkit.trace.model import TABLES, Trace, TraceMeta


def exported(trace, path):
    """The events of a file, with exact times in nanoseconds."""
    chrome.write(trace, path)
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


def drawn(events):
    """Start, end and name of the slices, by table."""
    slices = collections.defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["cat"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    return slices


def recorded(trace, table):
    frame = trace[table]
    return list(zip(frame["start_ns"], frame["end_ns"], frame["name"], strict=True))


@pytest.mark.parametrize(
    ("start", "name"),
    [(1_000, "o.json.gz"), (-5_000, "o.json"), (7_100_000_000_123_457, "o.json")],
)
def test_every_event_is_drawn_to_the_nanosecond(tmp_path, start, name):
    trace = interleaved(start)
    events = exported(trace, tmp_path / name)
    slices = drawn(events)
    assert {table: len(rows) for table, rows in slices.items()} == {t: trace.size(t) for t in TABLES if trace.size(t)}
    for table in ("kernels", "calls", "ranges", "frames", "ops", "os_calls", "overhead"):
        assert slices[table] == recorded(trace, table)
    copies = [event for event in events if event.get("cat") == "memops"]
    assert [copy["args"]["bytes"] for copy in copies] == trace["memops"]["bytes"].tolist()
    assert [copy["name"] for copy in copies] == trace["memops"]["kind"].tolist()


def test_slices_of_a_track_nest_and_tracks_have_names(tmp_path):
    tracks = collections.defaultdict(list)
    labels = {}
    processes = {}
    for event in exported(interleaved(), tmp_path / "o.json"):
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], -event["ts"] - event["dur"]))
        elif event["name"] == "thread_name":
            labels[event["pid"], event["tid"]] = event["args"]["name"]
        else:
            processes[event["pid"]] = event["args"]["name"]
    for slices in tracks.values():
        ends = []
        for start, end in sorted(slices):
            while ends and ends[-1] <= start:
                ends.pop()
            assert not ends or -end <= ends[-1]
            ends.append(-end)
    assert tracks.keys() == labels.keys()
    assert {"stream 7", "stream 7 overlap 1", "main", "main overlap 1"} <= set(labels.values())
    assert {"GPU 0 A <b>", "GPU 1", "process 4242", "process 7", "profiler"} == set(processes.values())


def test_names_stand_as_perfetto_reads_them(tmp_path):
    """It takes no escape but the necessary ones."""
    chrome.write(interleaved(), tmp_path / "o.json")
    text = (tmp_path / "o.json").read_text("utf-8")
    assert '"name":"µs → 時間"' in text
    assert '"name":"</script>{}[],"' in text


def test_an_export_is_reproducible_and_not_read_as_a_trace(tmp_path):
    for name in ("a.json.gz", "b.json.gz"):
        chrome.write(interleaved(), tmp_path / name)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    with pytest.raises(TraceError, match=r"a\.json\.gz: is a timeline that nsightkit wrote.*Perfetto.*\.parquet"):
        nsightkit.load(tmp_path / "a.json.gz", cache=False)


def test_functions_that_began_before_the_capture_have_no_negative_times(tmp_path):
    frames = {
        "kernels": pd.DataFrame({"start_ns": [5_001], "end_ns": [6_000], "name": ["k"]}),
        "frames": pd.DataFrame({"start_ns": [-4_000], "end_ns": [9_000], "name": ["f"]}),
    }
    slices = drawn(exported(Trace.from_frames(frames), tmp_path / "o.json"))
    assert slices == {"frames": [(0, 13_000, "f")], "kernels": [(9_001, 10_000, "k")]}


def test_an_empty_trace_is_a_document_without_events(tmp_path):
    assert exported(Trace.from_frames({}, TraceMeta(missing=["kernels"])), tmp_path / "o.json") == []
