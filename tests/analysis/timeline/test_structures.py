"""Random programs of every structure at once, and the truth by brute force.

Two processes with colliding correlation ids, two devices, several streams with overlapping kernels, copies, graph
replays and graph nodes, orphans, forward on one thread with ranges and backward on another without, rows in random
order. Truth is a line of booleans.
"""

import random

import numpy as np
import pytest
from synthetic.planted import Export

import nsightkit
from nsightkit.analysis.timeline import gaps, overview, ranges

SIZE = 60_000
KINDS = ["kernel", "kernel", "kernel", "copy", "replay", "nodes", "orphan"]


def line(parts):
    """The moments that some intervals cover."""
    covered = np.zeros(SIZE, bool)
    for start, end in parts:
        covered[start:end] = True
    return covered


class Program:
    """Writes events and keeps its own account of them."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.out = Export(gpus=2)
        self.parts = {}
        self.ranges = {}
        for pid, device in ((10, 0), (20, 1)):
            self.parts[device] = []
            self.process(pid, device)

    def process(self, pid, device):
        draw = self.random
        main, autograd = Export.thread(pid, pid), Export.thread(pid, pid + 1)
        correlation = 500  # the same ids in both processes
        now = draw.randrange(10, 50)
        for _ in range(6):
            begun, inside = now, []
            for _ in range(draw.randrange(5, 25)):
                now += draw.randrange(2, 20)
                correlation += 1
                kind = draw.choice(KINDS)
                parts = self.operation(kind, now, correlation, Export.process(pid), device)
                self.parts[device] += parts
                if kind != "orphan":
                    thread = draw.choice([main, autograd])
                    self.out.call("cudaLaunchKernel_v7000", thread, now, now + 2, correlation)
                    # the driver call inside the runtime call
                    self.out.call("cuLaunchKernel", thread, now + 1, now + 2, correlation, driver=True)
                    inside += parts
                now += 2
            now += draw.randrange(1, 10)
            self.out.range("step", main, begun, now, registered=draw.random() < 0.5)
            self.ranges[begun, now, pid] = inside
            now += draw.randrange(1, 900)

    def operation(self, kind, now, correlation, owner, device):
        start = now + self.random.randrange(8, 200)
        end = start + self.random.randrange(1, 120)
        options = {"device": device, "stream": self.random.choice([7, 13, 20])}
        if kind == "nodes":
            parts = [(start + 40 * i, start + 40 * i + 25) for i in range(3)]
            for node, (a, b) in enumerate(parts, 1):
                self.out.kernel("k", a, b, correlation, owner, node=node, **options)
            return parts
        if kind == "copy":
            self.out.copy("HtoD", start, end, correlation, owner, 4096, **options)
        elif kind == "replay":
            self.out.graph(start, end, correlation, owner, **options)
        else:
            number = correlation + (9_000_000 if kind == "orphan" else 0)
            self.out.kernel("k", start, end, number, owner, **options)
        return [(start, end)]


@pytest.fixture(params=range(6), scope="module")
def program(request, tmp_path_factory):
    made = Program(request.param)
    path = made.out.write(tmp_path_factory.mktemp("program") / "t.sqlite", shuffle=request.param)
    made.trace = nsightkit.load(path)
    return made


def test_gaps_are_the_idle_intervals_and_have_one_cause_each(program):
    each = gaps.find(program.trace)
    t0 = program.trace.t0_ns
    devices = overview.summary(program.trace)["devices"]
    for device, parts in program.parts.items():
        busy = line(parts)
        low, high = min(a for a, _ in parts), max(b for _, b in parts)
        assert devices[device]["busy_ns"] == busy.sum()
        assert devices[device]["span_ns"] == high - low
        of_device = each[each["device"] == device]
        idle = line(zip(of_device["start_ns"] + t0, of_device["end_ns"] + t0, strict=True))
        assert (idle[low:high] == ~busy[low:high]).all()
        assert idle.sum() == of_device["duration_ns"].sum() == idle[low:high].sum()
    assert set(each["cause"]) <= set(gaps.CAUSES)
    assert gaps.summary(program.trace)["total_ns"].sum() == each["duration_ns"].sum()


def test_ranges(program):
    instances = ranges.instances(program.trace)
    t0 = program.trace.t0_ns
    assert len(instances) == len(program.ranges)
    for row in instances.itertuples():
        parts = program.ranges[row.start_ns + t0, row.end_ns + t0, row.process]
        assert row.gpu_ns == line(parts).sum()
        assert row.gpu_span_ns == (max(b for _, b in parts) - min(a for a, _ in parts) if parts else 0)
    assert ranges.summary(program.trace).loc[0, "gpu_ns"] == instances["gpu_ns"].sum()
