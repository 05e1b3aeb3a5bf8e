"""A phase is a range for whatever profiler watches, and needs no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest


def test_a_phase_needs_no_torch():
    program = """
import sys
from nsightkit.workloads.phases import phase
with phase('a'):
    pass
assert 'torch' not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_phase_closes_when_its_body_fails():
    torch = pytest.importorskip("torch")
    from nsightkit.workloads.phases import phase

    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as watch, pytest.raises(ZeroDivisionError), phase("outer"):
        _ = 1 / 0
    assert [event.name for event in watch.events() if event.name == "outer"] == ["outer"]
