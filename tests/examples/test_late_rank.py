"""Data-parallel training under torchrun, one rank of which is late: every rank's trace, and the late one named."""

from __future__ import annotations

import subprocess

import pandas as pd
import pytest

torch = pytest.importorskip("torch")

from _lib import late_rank  # noqa: E402

from nsightkit.analysis.ranks import job  # noqa: E402

JOB = {"ranks": 2, "hidden": 64, "layers": 2, "batch": 8, "bucket_mb": 0.01, "data_ms": 1.0, "late_ms": 60.0}


def test_each_rank_records_its_steps_and_the_late_one_is_named() -> None:
    with late_rank.run("cpu", **JOB, steps=3, profiled=16) as work:
        rows = pd.DataFrame(work.rows())
    assert rows["start_ns"].min() == 0
    assert len(late_rank.step_ns(rows)) == 3
    assert late_rank.step_ns(rows).median() > 60e6  # all wait for the late rank
    traces = late_rank.traces(rows)
    counts = []
    for rank, trace in enumerate(traces):
        assert trace.meta.distributed == {"rank": rank, "world_size": 2}
        assert not trace.recorded("kernels")
        names = trace.table("ranges", ["name"])["name"].value_counts()
        assert [names[phase] for phase in ("data", "forward", "backward", "optimizer")] == 4 * [16]
        counts.append(names["gloo:all_reduce"])
    assert counts[0] == counts[1] >= 16
    (straggler,) = job.survey(traces).stragglers.to_dict("records")
    assert straggler["rank"] == 1
    assert "data" in straggler["cause"]


def test_a_rank_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "rank 1: no such device")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with late_rank.run("cpu", **JOB) as work, pytest.raises(RuntimeError, match="no such device"):
        list(work.rows())
