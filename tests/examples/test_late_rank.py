"""Data-parallel training under torchrun, one rank of which is late; tests of the pages run it."""

from __future__ import annotations

import subprocess

import pytest

torch = pytest.importorskip("torch")

from _lib import late_rank  # noqa: E402


def test_a_rank_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch):
    failed = subprocess.CompletedProcess([], 1, "", "rank 1: no such device")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with late_rank.run("cpu") as work, pytest.raises(RuntimeError, match="no such device"):
        list(work.rows())
