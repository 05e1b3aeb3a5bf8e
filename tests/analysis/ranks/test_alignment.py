"""Matching collectives over ranks, and aligning clocks by their ends: planted offsets, drifts, losses; a real pair."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from synthetic.planted_ranks import job

import nsightkit
from nsightkit.analysis.ranks import alignment as clocks
from nsightkit.analysis.ranks import collectives as communication
from nsightkit.trace.model import TABLES

#: Collectives end within 3 µs on all ranks: what clocks are known to must be better, by the number of collectives.
END_JITTER_NS = 3_000
OFFSETS = {0: 0, 1: 3_000_000, 2: -1_500_000_000, 3: 250}


def looked_at(truth):
    traces = {rank: nsightkit.load(path, cache=False) for rank, path in enumerate(truth["paths"])}
    tables = {rank: communication.collectives(trace) for rank, trace in traces.items()}
    return tables, {rank: trace.t0_ns for rank, trace in traces.items()}


def offsets(alignment, t0_ns):
    """Of the sources' clocks against that of rank 0."""
    clock = alignment.clocks.set_index("rank")["offset_ns"]
    return {rank: int(clock[rank]) + t0_ns[rank] - t0_ns[0] for rank in t0_ns}


@pytest.mark.parametrize("kind", ["nsys", "kineto"])
def test_planted_offsets(tmp_path, kind):
    truth = job(tmp_path, {2: "data"}, kind=kind, steps=8, layers=2, offsets_ns=OFFSETS, end_jitter_ns=END_JITTER_NS)
    tables, t0_ns = looked_at(truth)
    matched, alignment = clocks.together(tables, t0_ns)
    assert not matched.notes
    assert matched.groups["matched_by"].tolist() == [{"nsys": "order", "kineto": "sequence"}[kind]]
    assert matched.arrivals["collective"].nunique() == len(truth["collectives"])
    found = offsets(alignment, t0_ns)
    for rank, offset in OFFSETS.items():
        assert abs(found[rank] - offset) <= END_JITTER_NS / 2
    # A rank that is always 2 ms late has a clock that is no worse for it.
    clock = alignment.clocks.set_index("rank")
    assert (clock["spread_ns"] < END_JITTER_NS).all()
    assert (clock["error_ns"] < END_JITTER_NS / 2).all()
    assert set(clock["island"]) == {0}
    # Starts and ends on one clock are those planted, but for a constant: that of rank 0's zero.
    for rank, table in tables.items():
        start = alignment.aligned(np.full(len(table), rank), table["start_ns"])
        true = np.array([c["starts"][rank] for c in truth["collectives"]]) - t0_ns[0]
        assert np.abs(start - true).max() <= END_JITTER_NS / 2


def test_a_drift_is_corrected(tmp_path):
    drift = {1: 300.0, 2: -150.0}
    truth = job(tmp_path, kind="kineto", ranks=3, steps=12, layers=2, offsets_ns=OFFSETS, drift_ppm=drift)
    tables, t0_ns = looked_at(truth)
    _, alignment = clocks.together(tables, t0_ns)
    clock = alignment.clocks.set_index("rank")
    for rank, ppm in drift.items():
        assert clock.loc[rank, "drift_ppm"] == pytest.approx(ppm, abs=40)
        table = tables[rank]
        start = alignment.aligned(np.full(len(table), rank), table["start_ns"])
        true = np.array([c["starts"][rank] for c in truth["collectives"]]) - t0_ns[0]
        assert np.abs(start - true).max() <= END_JITTER_NS
        # Which is more than a constant offset could do.
        assert abs(ppm) * 1e-6 * (true[-1] - true[0]) > END_JITTER_NS
    assert clock.loc[0, "drift_ppm"] == 0


def test_one_clock_is_left_as_it_is(tmp_path):
    truth = job(tmp_path, kind="kineto", ranks=2, steps=4, layers=2)
    tables, t0_ns = looked_at(truth)
    _, alignment = clocks.together(tables, t0_ns)
    assert offsets(alignment, t0_ns) == {0: 0, 1: 0}
    # Without the sources' word it is measured, and is what the ends' jitter lets it be.
    _, alignment = clocks.together(tables)
    assert 0 < abs(offsets(alignment, t0_ns)[1]) <= END_JITTER_NS / 2


def test_ranks_are_tied_through_others(tmp_path):
    """Ranks 0 and 3 share no process group; 0 and 1 share layers, 1 and 3 gradients."""
    truth = job(
        tmp_path, {2: "data"}, kind="kineto", steps=6, layers=2, offsets_ns=OFFSETS, tensor_parallel=2, jitter=0.05
    )
    tables, t0_ns = looked_at(truth)
    matched, alignment = clocks.together(tables, t0_ns)
    assert sorted(matched.groups["name"]) == [f"process group {i}" for i in range(4)]
    assert set(matched.groups["ranks"]) == set(matched.groups["group_size"]) == {2}
    assert set(alignment.clocks["island"]) == {0}
    found = offsets(alignment, t0_ns)
    for rank, offset in OFFSETS.items():
        assert abs(found[rank] - offset) <= END_JITTER_NS


def test_ranks_that_share_nothing_are_not_compared(tmp_path):
    tables = {}
    for half in (0, 1):
        (tmp_path / str(half)).mkdir()
        truth = job(tmp_path / str(half), kind="kineto", ranks=2, steps=3, layers=2, seed=half)
        for rank, table in looked_at(truth)[0].items():
            tables[2 * half + rank] = table.assign(group=f"{table['group'].iloc[0]} of {half}")
    _, alignment = clocks.together(tables)
    assert alignment.clocks["island"].tolist() == [0, 0, 2, 2]
    assert alignment.clocks.loc[alignment.clocks["rank"] == 2, "offset_ns"].tolist() == [0]


def test_captures_that_begin_at_different_steps(tmp_path):
    """Nothing numbers the collectives of an nsys export: the shift is found by the ends."""
    truth = job(tmp_path, kind="nsys", ranks=3, steps=10, layers=2, offsets_ns=OFFSETS, missing_steps={1: 3, 2: 1})
    tables, t0_ns = looked_at(truth)
    assert [len(tables[rank]) for rank in range(3)] == [20, 14, 18]
    matched, alignment = clocks.together(tables, t0_ns)
    assert len(matched.arrivals) == 20 + 14 + 18 - 2  # rank 0 alone saw the first step
    found = offsets(alignment, t0_ns)
    for rank in range(3):
        assert abs(found[rank] - OFFSETS[rank]) <= END_JITTER_NS


def test_ranks_that_lack_some_of_their_collectives(tmp_path):
    truth = job(tmp_path, kind="nsys", ranks=2, steps=10, layers=2, offsets_ns=OFFSETS)
    tables, t0_ns = looked_at(truth)
    rng = np.random.default_rng(5)
    kept = {rank: np.sort(rng.choice(len(table), 13, replace=False)) for rank, table in tables.items()}
    tables = {rank: table.iloc[kept[rank]] for rank, table in tables.items()}
    matched, alignment = clocks.together(tables, t0_ns)
    assert matched.groups["matched_by"].tolist() == ["coincidence"]
    both = matched.arrivals.pivot(index="collective", columns="rank", values="row")
    assert (both[0] == both[1]).all()  # the same row of the whole table
    assert sorted(both[0]) == sorted(set(kept[0]) & set(kept[1]))
    assert abs(offsets(alignment, t0_ns)[1] - OFFSETS[1]) <= END_JITTER_NS
    assert any("match none of another rank" in note for note in matched.notes)


def test_groups_that_an_export_does_not_name_are_not_made_up(tmp_path):
    """Of four ranks in groups of two, streams alone cannot tell who belongs to whom."""
    truth = job(tmp_path, {2: "data"}, kind="nsys", steps=8, layers=3, offsets_ns=OFFSETS, tensor_parallel=2)
    tables, t0_ns = looked_at(truth)
    matched, _ = clocks.together(tables, t0_ns)
    assert not len(matched.arrivals)
    assert any("name no process groups" in note for note in matched.notes)
    assert any("contradict each other" in note for note in matched.notes)


def test_sends_and_unlike_kinds_are_left_out():
    def table(kinds):
        at = np.arange(len(kinds)) * 1_000_000
        return pd.DataFrame(
            {
                "where": "GPU",
                "device": 0,
                "stream": 20,
                "start_ns": at,
                "end_ns": at + 1_000,
                "launch_ns": at,
                "kind": kinds,
                "group": "0",
                "ranks": "[0, 1]",
                "group_size": 2,
                "bytes": -1,
                "sequence": np.arange(len(kinds)),
                "exposed_ns": 0,
            }
        )

    ranks = {
        0: table(["all_reduce", "send/recv", "all_reduce", "all_reduce"]),
        1: table(["all_reduce", "send/recv", "broadcast", "all_reduce"]),
    }
    matched, _ = clocks.together(ranks)
    assert matched.arrivals["row"].tolist() == [0, 0, 3, 3]
    assert any(note.startswith("Sends and receives were left out (2)") for note in matched.notes)
    assert any("different kinds" in note for note in matched.notes)


def test_no_ranks_and_no_collectives():
    empty = communication.collectives(nsightkit.trace.Trace.from_frames({}))
    matched, alignment = clocks.together({0: empty, 1: empty})
    assert not len(matched.arrivals)
    assert alignment.clocks["matched"].tolist() == [0, 0]
    assert alignment.clocks["island"].tolist() == [0, 1]


def test_two_real_gpus_with_one_clock(shared_traces):
    """Both processes are in one capture, so their clocks differ by nothing: what alignment says is its error."""
    trace = nsightkit.load(shared_traces / "nsys-ai/mfu_2gpu_before.sqlite", cache=False)
    processes = trace["kernels"].groupby("process")["device"].min().sort_values().index
    tables = {}
    for rank, process in enumerate(processes):
        masks = {
            name: (trace.table(name, ["process"])["process"] == process).to_numpy()
            for name, columns in TABLES.items()
            if "process" in columns
        }
        tables[rank] = communication.collectives(trace.masked(masks))
    matched, alignment = clocks.together(tables)
    assert matched.arrivals["collective"].nunique() == 32
    offset = alignment.clocks.set_index("rank").loc[1, "offset_ns"]
    assert abs(offset) < 25_000
    _, known = clocks.together(tables, clock={0: "one", 1: "one"})
    assert known.clocks["offset_ns"].tolist() == [0, 0]
