"""Training in several processes, one of which is late: what they record of themselves, and that they all end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import types

import numpy as np
import pytest
import torch

from nsightkit.investigations import parts as investigations
from nsightkit.workloads import late_rank

SMALL = {"hidden": 32, "layers": 2, "batch": 8, "bucket_mb": 0.002, "data_ms": 1.0, "late_ms": 25.0, "profiled": 4}


@pytest.fixture(scope="module")
def crew():
    """Three ranks, of which the last is late: what they recorded, and how they ended after one had been killed."""
    with late_rank.start("cpu", ranks=3, late_rank=2, **SMALL) as made:
        made.step()
        found = made.observed()
        made.children[0].kill()
        made.children[0].wait()
        with pytest.raises(RuntimeError) as ended:
            made.step()
    return types.SimpleNamespace(
        found=found,
        parameters=made.parameters,
        error=str(ended.value),
        children=made.children,
        environment=dict(os.environ),
    )


def lasting(found, rank, what):
    begin, end = (np.array(found[f"rank{rank}_{what}_{side}_ns"]) for side in ("start", "end"))
    assert (end >= begin).all()
    return end - begin


def test_each_rank_records_its_steps(crew):
    found = crew.found
    assert crew.parameters["backend"] == "gloo"
    assert {int(re.match(r"rank(\d)", name)[1]) for name in found} == {0, 1, 2}
    for rank in range(3):
        for what in ("step", "data", "forward", "backward", "optimizer"):
            assert len(lasting(found, rank, what)) == 4
        # Each bucket of gradients is one all-reduce, and all ranks have the same.
        assert len(lasting(found, rank, "gloo")) == len(lasting(found, 0, "gloo")) >= 8
        assert len(lasting(found, rank, "operators"))
    assert min(min(times) for times in found.values()) == 0


def test_only_the_late_rank_waits_for_its_data(crew):
    found = crew.found
    data = [np.median(lasting(found, rank, "data")) for rank in range(3)]
    assert min(data) >= 1e6
    assert data[2] - max(data[:2]) >= 15e6
    # The others wait for it in backward.
    backward = [np.median(lasting(found, rank, "backward")) for rank in range(3)]
    assert min(backward[:2]) - backward[2] >= 10e6


def test_gradients_become_their_means(monkeypatch):
    """Two ranks, of which the other's gradients are thrice one's own; buckets of some parameters each."""
    under_way = []

    class Work:
        def __init__(self, flat):
            self.flat = flat
            under_way.append(len(flat))

        def wait(self):
            self.flat.mul_(4)

    monkeypatch.setattr(late_rank.dist, "all_reduce", lambda flat, async_op: Work(flat))
    monkeypatch.setattr(late_rank.dist, "get_world_size", lambda: 2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    x = torch.randn(3, 8)
    alone = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    gradients = late_rank.Gradients(model, 300.0)
    for _ in range(2):
        under_way.clear()
        model.zero_grad()
        model(x).sum().backward()
        assert len(under_way) > 1
        assert sum(under_way) == 4 * 72
        gradients.wait()
        for parameter, one in zip(model.parameters(), alone, strict=True):
            torch.testing.assert_close(parameter.grad, 2 * one)


def test_a_rank_that_dies_is_an_error(crew):
    assert crew.error == "rank 1 ended with code -9"


def test_children_end_with_their_parent(crew):
    assert len(crew.children) == 2
    for child in crew.children:
        assert child.returncode is not None
        with pytest.raises(ProcessLookupError):
            os.kill(child.pid, 0)
    assert "GLOO_SOCKET_IFNAME" not in crew.environment


def test_when_this_rank_cannot_begin_the_others_end_at_once(monkeypatch):
    begun = []

    class Child(subprocess.Popen):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            begun.append(self)

    def fails(*_, **__):
        raise RuntimeError("no such device")

    monkeypatch.setattr(late_rank.subprocess, "Popen", Child)
    monkeypatch.setattr(late_rank.dist, "init_process_group", fails)
    with pytest.raises(RuntimeError, match="no such device"):
        late_rank.start("cpu", **SMALL)
    assert [child.returncode for child in begun] == [-signal.SIGKILL]


def test_the_parts_differ_in_the_fault_alone():
    before, after = (investigations.INVESTIGATIONS["late-rank"][part] for part in ("before", "after"))
    for mode in ("gpu", "smoke"):
        assert {**getattr(before, mode), "late": False} == dict(getattr(after, mode))
        assert getattr(before, mode)["late"] is True
