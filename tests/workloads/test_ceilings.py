"""Ceilings of a card: what is run, the rates that follow from a time, and the file that keeps them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nsightkit.analysis.roofline import sol
from nsightkit.capture import utilization
from nsightkit.errors import NsightkitError, TraceError
from nsightkit.hardware import SLOWDOWNS, find, rows, slowed_by
from nsightkit.investigations import child, measure_ceilings
from nsightkit.investigations.parts import INVESTIGATIONS, Part

torch = pytest.importorskip("torch")

PARTS = INVESTIGATIONS["ceilings"]


@pytest.mark.parametrize("part", PARTS)
def test_every_part_runs_small(part: str) -> None:
    from nsightkit.workloads import ceilings

    with ceilings.start("cpu", **PARTS[part].smoke) as run:
        run.step()
        assert sol.ceiling(run.parameters, 1e6)["what"]


def test_what_runs_is_what_it_says() -> None:
    from nsightkit.workloads import ceilings

    with ceilings.start("cpu", kind="gemm", precision="fp32", m=8, n=16, k=32) as run:
        out = run.run()
        torch.manual_seed(0)
        x, w = torch.randn(8, 32), torch.randn(16, 32)
        torch.testing.assert_close(out, x @ w.t())
    with ceilings.start("cpu", kind="read", megabytes=1) as run:
        torch.manual_seed(0)
        torch.testing.assert_close(run.run(), torch.randn(250_000).sum())
    with ceilings.start("cpu", kind="triad", megabytes=1) as run:
        torch.manual_seed(0)
        b, c = torch.randn(250_000), torch.randn(250_000)
        torch.testing.assert_close(run.run(), torch.add(b, c, alpha=3.0))
    with ceilings.start("cpu", kind="gemm", precision="bf16", m=8, n=8, k=8, zeros=True) as run:
        assert not run.run().any()


def test_precision_is_taken_back() -> None:
    from nsightkit.workloads import ceilings

    before = torch.get_float32_matmul_precision()
    with ceilings.start("cpu", precision="tf32"):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before


def test_rates_are_closed_formulas() -> None:
    gemm = sol.ceiling({"kind": "gemm", "precision": "bf16", "m": 8192, "n": 8192, "k": 8192}, 1.4e6)
    assert (gemm["unit"], gemm["tflops"]) == ("bf16", pytest.approx(2 * 8192**3 / 1.4e-3 / 1e12))
    for kind, tensors in (("copy", 2), ("triad", 3), ("read", 1)):
        found = sol.ceiling({"kind": kind, "megabytes": 1000}, 1e6)
        assert (found["unit"], found["gb_per_s"]) == ("memory", pytest.approx(tensors * 1000))


def test_the_best_counts_and_zeros_do_not() -> None:
    cube: dict[str, Any] = {"kind": "gemm", "precision": "bf16", "m": 100, "n": 100, "k": 100}
    measured = [
        sol.ceiling(cube, 200.0), sol.ceiling(cube, 400.0), sol.ceiling({**cube, "zeros": True}, 100.0),
        sol.ceiling({"kind": "copy", "megabytes": 1}, 1e3), sol.ceiling({"kind": "read", "megabytes": 1}, 1e3),
    ]  # fmt: skip
    rates = sol.ceilings(measured, "here")
    assert rates.tflops == {"bf16": 2e6 / 200 / 1e3}
    assert rates.gb_per_s == 2000
    assert np.isnan(sol.ceilings(measured[:1], "here").gb_per_s)


def planted(folders: Mapping[Path, Part], *_: Any, **__: Any) -> list[NsightkitError | None]:
    """What a process leaves of the ceilings, on a card that has no fp8."""
    found: list[NsightkitError | None] = []
    for folder, part in folders.items():
        provenance = {
            "parameters": {"zeros": False, **part.gpu}, "gpu": {"name": "Planted"}, "utc": "2026-01-02T03:04:05"
        }  # fmt: skip
        samples = {
            "step_ns": [1e6, 2e6, 9e6], "sm_clock_mhz": [1500.4], "power_w": [699.6, 698.2], "slowdown_mask": [4, 5]
        }  # fmt: skip
        (folder / child.RESULT).write_text(json.dumps({"samples": samples, "provenance": provenance}))
        found.append(NsightkitError("this card has no fp8") if part.name == "fp8" else None)
    return found


def test_the_list_is_read_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []
    monkeypatch.setattr(measure_ceilings, "has_gpu", lambda: True)
    monkeypatch.setattr(measure_ceilings, "run_children", planted)
    listed = measure_ceilings.measure(echo=said.append)
    assert list(listed[0]) == [*rows(find("H200"))[0], "power_w", "busy_pct", "slowed_by"]
    assert "fp8: this card has no fp8" in said
    assert {row["unit"] for row in listed} == {"bf16", "fp16", "fp32", "tf32", "memory"}
    assert listed[0]["source"] == "measured 2026-01-02: GEMM 8192x8192 8192x8192, median of 3"
    assert (listed[0]["clock_mhz"], listed[0]["power_w"], listed[0]["busy_pct"]) == (1500, 699, None)
    assert listed[0]["slowed_by"] == "idle, power limit"
    path = tmp_path / "ceilings.json"
    path.write_text(json.dumps(listed))
    rates = sol.read_ceilings(path)
    assert rates.tflops["bf16"] == pytest.approx(2 * 16_384**3 / 2e6 / 1e3)  # the largest in the same planted time
    assert rates.tflops["tf32"] == pytest.approx(2 * 8192**3 / 2e6 / 1e3)
    assert rates.gb_per_s == pytest.approx(3 * 4e9 / 2e6)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '[{"gpu": 1}]', json.dumps(rows(find("H200")))])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ceilings.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"ceilings\.json.*peaks --measure"):
        sol.read_ceilings(path)
    with pytest.raises(TraceError, match="check the path"):
        sol.read_ceilings(tmp_path / "absent")


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_ceilings, "has_gpu", lambda: False)
    with pytest.raises(NsightkitError, match="needs a CUDA GPU"):
        measure_ceilings.measure()


def _read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> dict[str, float]:
    """What is read of a GPU where nvidia-smi does what the script says."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n{script}\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: None)
    return utilization.now("cuda")


def test_what_nvidia_smi_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = _read(tmp_path, monkeypatch, "echo 97, 1620, 687.31, 0x0000000000000004")
    assert read == {"gpu_utilization_percent": 97, "sm_clock_mhz": 1620, "power_w": 687.31, "slowdown_mask": 4}
    read = _read(tmp_path, monkeypatch, "echo 97, [N/A], [Not Supported], [N/A]")
    assert read == {"gpu_utilization_percent": 97}
    assert _read(tmp_path, monkeypatch, "exit 2") == {}


@pytest.mark.parametrize("name", ["clocks_event_reasons.active", "clocks_throttle_reasons.active"])
def test_reasons_for_a_low_clock_by_either_name(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Drivers know one name of the mask, or both; one that they do not know fails the whole query."""
    answer = "97, 1620, 687.31, 0x0000000000000024"
    read = _read(tmp_path, monkeypatch, f'case "$*" in *{name}*) echo "{answer}";; *) exit 2;; esac')
    assert read["slowdown_mask"] == 0x24
    assert slowed_by([read["slowdown_mask"]]) == "power limit, heat"


def test_reasons_are_those_of_most_readings() -> None:
    assert slowed_by([4, 4, 0, 1]) == "power limit"
    assert slowed_by([0, 0, 4]) == slowed_by([0x200]) == "nothing"
    assert slowed_by([]) is None
    assert all(bit & bit - 1 == 0 for bit in SLOWDOWNS)
