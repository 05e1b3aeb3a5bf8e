"""Data-parallel training under torchrun, one rank of which is late: every rank's trace, and the late one named."""

from __future__ import annotations

import subprocess

import pandas as pd
import pytest

torch = pytest.importorskip("torch")

from _lib import late_rank  # noqa: E402

from nsightkit.analysis.ranks import job  # noqa: E402

JOB = {"ranks": 2, "hidden": 64, "layers": 2, "batch": 8, "bucket_mb": 0.01, "data_ms": 1.0, "late_ms": 60.0}


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    with late_rank.run("cpu", **JOB, steps=3, profiled=16) as work:
        return pd.DataFrame(work.rows())


def test_each_rank_records_its_steps(rows: pd.DataFrame) -> None:
    assert rows["start_ns"].min() == 0
    assert len(late_rank.step_ns(rows)) == 3
    assert late_rank.step_ns(rows).min() > 60e6  # all wait for the late rank
    traces = late_rank.traces(rows)
    for rank, trace in enumerate(traces):
        assert trace.meta.distributed == {"rank": rank, "world_size": 2}
        assert not trace.recorded("kernels")
        names = trace.table("ranges", ["name"])["name"].value_counts()
        for phase in ("data", "forward", "backward", "optimizer"):
            assert names[phase] == 16
    collectives = [trace.table("ranges", ["name"])["name"].eq("gloo:all_reduce").sum() for trace in traces]
    assert collectives[0] == collectives[1] >= 16


def test_the_late_rank_is_named_with_its_cause(rows: pd.DataFrame) -> None:
    stragglers = job.survey(late_rank.traces(rows)).stragglers
    assert stragglers["rank"].tolist() == [1]
    assert "data" in stragglers["cause"].iloc[0]


def test_a_rank_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "rank 1: no such device")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with late_rank.run("cpu", **JOB) as work, pytest.raises(RuntimeError, match="no such device"):
        list(work.rows())
