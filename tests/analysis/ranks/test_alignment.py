"""Matching collectives over ranks, and aligning clocks by their ends: synthetic offsets and losses; a real pair."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from synthetic.planted_ranks import job

import nsightkit
from nsightkit.analysis.ranks import alignment
from nsightkit.analysis.ranks import collectives as communication

#: Collectives end within 3 µs on all ranks.
END_JITTER_NS = 3_000
OFFSETS = {0: 0, 1: 3_000_000, 2: -1_500_000_000, 3: 250}


@pytest.mark.parametrize(
    ("options", "collectives", "arrivals"),
    [
        # A rank that is late in every step has a clock that is no worse for it.
        ({"kind": "kineto", "late": {2: "data"}}, 12, 48),
        # Ranks 0 and 3 share no process group; 0 and 1 share layers, 1 and 3 gradients.
        ({"kind": "kineto", "tensor_parallel": 2, "jitter": 0.05}, 48, 96),
        # Nothing numbers the collectives of an nsys export: the shift is found by the ends.
        ({"kind": "nsys", "steps": 10, "missing_steps": {1: 3, 2: 1}}, 20, 80 - 6 - 2),
    ],
)
def test_clocks_are_aligned(tmp_path, options, collectives, arrivals):
    truth = job(tmp_path, **{"steps": 6, "layers": 2, "offsets_ns": OFFSETS, **options})
    traces = [nsightkit.load(path, cache=False) for path in truth["paths"]]
    tables = {rank: communication.collectives(trace) for rank, trace in enumerate(traces)}
    matched, clocks, notes = alignment.match_and_align(tables)
    assert not notes
    assert (matched["collective"].nunique(), len(matched)) == (collectives, arrivals)
    assert set(clocks["island"]) == {0}
    assert (clocks["spread_ns"] < END_JITTER_NS).all()
    for rank, offset in OFFSETS.items():
        by_source = clocks.loc[rank, "offset_ns"] + traces[rank].t0_ns - traces[0].t0_ns
        assert abs(by_source - offset) <= END_JITTER_NS
        # All arrivals are on the clock of rank 0.
        true = [c["starts"][rank] for c in truth["collectives"] if rank in c["starts"]]
        found = np.sort(matched["start_ns"][matched["rank"] == rank] + traces[0].t0_ns)
        assert np.abs(found - np.sort(true)[-len(found) :]).max() <= END_JITTER_NS


def test_groups_that_an_export_does_not_name_are_not_made_up(tmp_path):
    """Of four ranks in groups of two, the order of collectives alone cannot tell who belongs to whom."""
    truth = job(tmp_path, {2: "data"}, kind="nsys", steps=8, layers=3, offsets_ns=OFFSETS, tensor_parallel=2)
    traces = [nsightkit.load(path, cache=False) for path in truth["paths"]]
    matched, _, notes = alignment.match_and_align(
        {rank: communication.collectives(trace) for rank, trace in enumerate(traces)}
    )
    assert not len(matched)
    assert "do not fit one process group" in notes[0]


def table(kinds, group="0", start_ns=0):
    """The collectives of a rank, one every millisecond."""
    at = start_ns + np.arange(len(kinds)) * 1_000_000
    numbers = {"device": 0, "group_size": 2, "bytes": -1, "sequence": np.arange(len(kinds)), "exposed_ns": 0}
    times = {"start_ns": at, "end_ns": at + 1_000}
    return pd.DataFrame({"where": "GPU", "kind": kinds, "group": group, "ranks": "", **numbers, **times})


def test_unlike_kinds_and_ranks_that_share_nothing():
    kinds = ["all_reduce", "send/recv", "all_reduce", "all_reduce"]
    other = ["all_reduce", "send/recv", "broadcast", "all_reduce"]
    tables = {0: table(kinds), 1: table(other, start_ns=70), 2: table(kinds, "1"), 3: table(kinds, "1", start_ns=-5)}
    tables[4] = table([])
    matched, clocks, notes = alignment.match_and_align(tables)
    assert matched.groupby("rank")["sequence"].agg(list).to_dict() == {0: [0, 3], 1: [0, 3], 2: [0, 2, 3], 3: [0, 2, 3]}
    assert clocks["island"].tolist() == [0, 0, 2, 2, 4]
    assert clocks["offset_ns"].tolist() == [0, 70, 0, -5, 0]
    assert "6 of 16 collectives have no match" in notes[0]
