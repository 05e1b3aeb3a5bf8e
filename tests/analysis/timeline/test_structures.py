"""Random programs of every structure at once, and the truth by brute force.

Two processes with colliding correlation ids, two devices, several streams with overlapping kernels, copies, memsets,
graph replays and graph nodes, orphans, forward on one thread with ranges and backward on another without, rows in
random order. Truth is a line of booleans and plain Python sums.
"""

import random
from collections import defaultdict

import numpy as np
import pytest
from synthetic.planted import Export

import nsightkit
from nsightkit.analysis.core import intervals
from nsightkit.analysis.timeline import gaps, kernels, memops, overview, ranges

SIZE = 60_000


class Program:
    """Writes events and keeps its own account of them."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.out = Export(gpus=2)
        self.busy = {0: np.zeros(SIZE, bool), 1: np.zeros(SIZE, bool)}
        self.kernels = defaultdict(list)
        self.copies = defaultdict(lambda: [0, 0, 0])
        self.spans = {}
        self.ranges = []
        for pid, device in ((10, 0), (20, 1)):
            self.correlation = 500  # the same ids in both processes
            self.process(pid, device)

    def on_gpu(self, device, start, end):
        self.busy[device][start:end] = True
        low, high = self.spans.get(device, (start, end))
        self.spans[device] = (min(low, start), max(high, end))

    def process(self, pid, device):
        draw = self.random
        main, autograd = Export.thread(pid, pid), Export.thread(pid, pid + 1)
        owner = Export.process(pid)
        now = draw.randrange(10, 50)
        for _ in range(6):
            begun = now
            inside = []
            for _ in range(draw.randrange(5, 25)):
                now += draw.randrange(2, 20)
                thread = draw.choice([main, autograd])
                self.correlation += 1
                start = now + draw.randrange(8, 200)
                end = start + draw.randrange(1, 120)
                kind = draw.choice(["kernel", "kernel", "kernel", "copy", "memset", "replay", "nodes", "orphan"])
                options = {"device": device, "stream": draw.choice([7, 13, 20])}
                if kind != "orphan":
                    self.out.call("cudaLaunchKernel_v7000", thread, now, now + 2, self.correlation)
                    if draw.random() < 0.3:  # the driver call inside the runtime call
                        self.out.call("cuLaunchKernel", thread, now + 1, now + 2, self.correlation, driver=True)
                number = self.correlation if kind != "orphan" else 9_000_000 + self.correlation
                name = f"void ns::k{draw.randrange(5)}<float>(float*)"
                parts = [(start, end)]
                if kind in ("kernel", "orphan"):
                    self.out.kernel(name, start, end, number, owner, **options)
                    self.kernels[name].append(end - start)
                elif kind == "nodes":
                    parts = [(start + 40 * i, start + 40 * i + 25) for i in range(3)]
                    for i, (a, b) in enumerate(parts):
                        self.out.kernel(name, a, b, number, owner, node=i + 1, **options)
                        self.kernels[name].append(b - a)
                elif kind == "copy":
                    self.out.copy("HtoD", start, end, number, owner, 100 * (end - start), **options)
                    for i, value in enumerate((1, 100 * (end - start), end - start)):
                        self.copies["HtoD"][i] += value
                elif kind == "memset":
                    self.out.memset(start, end, number, owner, 64, **options)
                    for i, value in enumerate((1, 64, end - start)):
                        self.copies["memset"][i] += value
                else:
                    self.out.graph(start, end, number, owner, **options)
                for a, b in parts:
                    self.on_gpu(device, a, b)
                if kind != "orphan":
                    inside += parts
                now += 2
            now += draw.randrange(1, 10)
            self.out.range("step", main, begun, now, registered=draw.random() < 0.5)
            self.ranges.append((begun, now, inside))
            now += draw.randrange(1, 900)


@pytest.fixture(params=range(8), scope="module")
def program(request, tmp_path_factory):
    made = Program(request.param)
    path = made.out.write(tmp_path_factory.mktemp("program") / "t.sqlite", shuffle=request.param)
    made.trace = nsightkit.load(path)
    return made


def line_length(parts):
    line = np.zeros(SIZE, bool)
    for a, b in parts:
        line[a:b] = True
    return int(line.sum())


def test_busy_and_idle(program):
    found = intervals.busy(program.trace).set_index("device")
    for device, (low, high) in program.spans.items():
        busy = int(program.busy[device].sum())
        assert found.loc[device, ["span_ns", "busy_ns", "idle_ns"]].tolist() == [high - low, busy, high - low - busy]
    total = overview.summary(program.trace)
    assert total["busy_ns"] == sum(int(b.sum()) for b in program.busy.values())
    assert total["idle_ns"] == total["span_ns"] - total["busy_ns"]


def test_gaps_are_the_idle_intervals_and_have_one_cause_each(program):
    found = gaps.find(program.trace)
    t0 = program.trace.t0_ns
    for device, (low, high) in program.spans.items():
        idle = np.zeros(SIZE, bool)
        for gap in found[found["device"] == device].itertuples():
            assert not idle[gap.start_ns + t0 : gap.end_ns + t0].any()
            idle[gap.start_ns + t0 : gap.end_ns + t0] = True
        assert (idle[low:high] == ~program.busy[device][low:high]).all()
        assert not idle[:low].any()
        assert not idle[high:].any()
    assert set(found["cause"]) <= set(gaps.CAUSES)
    by_cause = gaps.summary(program.trace)
    assert by_cause["total_ns"].sum() == found["duration_ns"].sum()


def test_kernels_and_copies(program):
    found = kernels.summary(program.trace).set_index("name")
    assert set(found.index) == set(program.kernels)
    for name, durations in program.kernels.items():
        row = found.loc[name]
        assert row[["count", "total_ns", "min_ns", "max_ns"]].tolist() == [
            len(durations),
            sum(durations),
            min(durations),
            max(durations),
        ]
        assert row["median_ns"] == np.median(durations)
        assert row["std_ns"] == pytest.approx(np.std(durations, ddof=1) if len(durations) > 1 else 0)
    for row in memops.summary(program.trace).itertuples():
        assert [row.count, row.bytes, row.total_ns] == program.copies[row.kind]


def test_ranges(program):
    each = ranges.instances(program.trace)
    t0 = program.trace.t0_ns
    found = {(r.start_ns + t0, r.end_ns + t0, r.process): r for r in each.itertuples()}
    assert len(found) == len(program.ranges)
    for number, (begun, ended, parts) in enumerate(program.ranges):
        row = found[begun, ended, 10 if number < 6 else 20]
        assert row.gpu_ns == line_length(parts)
        assert row.gpu_span_ns == (max(b for _, b in parts) - min(a for a, _ in parts) if parts else 0)
    assert ranges.summary(program.trace).loc[0, "gpu_ns"] == sum(line_length(p) for *_, p in program.ranges)
