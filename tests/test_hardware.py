"""GPU peaks: the arithmetic behind each, and the names drivers and traces give."""

from __future__ import annotations

import json

import pytest

from nsightkit import cli
from nsightkit.errors import UsageError
from nsightkit.hardware import GPUS, find, peak_rows

#: cc, fp32, tf32, fp16, fp8, GB/s, SMs, ridge of fp16 in FLOP/B: a table made independently of this one.
TABLE = {
    "V100 SXM2": ("7.0", 15.7, None, 125, None, 900, 80, 139),
    "V100 DGX Station": ("7.0", 15.7, None, 125, None, 898, 80, 139),
    "T4": ("7.5", 8.1, None, 65, None, 320, 40, 203),
    "RTX 2080 Ti": ("7.5", 14.2, None, 56.9, None, 616, 68, 92),
    "A100 40 GB SXM": ("8.0", 19.5, 156, 312, None, 1555, 108, 201),
    "A100 40 GB PCIe": ("8.0", 19.5, 156, 312, None, 1555, 108, 201),
    "A100 80 GB SXM": ("8.0", 19.5, 156, 312, None, 2039, 108, 153),
    "A100 80 GB PCIe": ("8.0", 19.5, 156, 312, None, 1935, 108, 161),
    "RTX A6000": ("8.6", 38.7, 77.4, 154.8, None, 768, 84, 202),
    "RTX 4090": ("8.9", 82.6, 82.6, 165.2, 330.3, 1008, 128, 164),
    "L4": ("8.9", 30.3, 60, 121, 242, 300, 58, 403),
    "L40S": ("8.9", 91.6, 183, 362, 733, 864, 142, 419),
    "H100 SXM5": ("9.0", 66.9, 494.7, 989.4, 1978.9, 3350, 132, 295),
    "H800 SXM5": ("9.0", 66.9, 494.7, 989.4, 1978.9, 3350, 132, 295),
    "H200 SXM": ("9.0", 66.9, 494.7, 989.4, 1978.9, 4800, 132, 206),
    "MI300X": ("9.4", 163.4, None, 1307.4, 2614.9, 5300, 304, 247),
    "B200": ("10.0", 80, 1125, 2250, 4500, 8000, 148, 281),
    "RTX 5090": ("12.0", 104.8, 104.8, 209.5, 419, 1792, 170, 117),
}


def test_the_table():
    assert [gpu.name for gpu in GPUS] == list(TABLE)
    for gpu in GPUS:
        cc, fp32, tf32, fp16, fp8, bandwidth, multiprocessors, ridge = TABLE[gpu.name]
        rates = tuple(peak.tflops if (peak := gpu.peak(unit)) else None for unit in ("fp32", "tf32", "fp16", "fp8"))
        assert rates == (fp32, tf32, fp16, fp8)
        assert (gpu.compute_capability, gpu.gb_per_s, gpu.multiprocessors) == (cc, bandwidth, multiprocessors)
        assert gpu.ridge("fp16") == pytest.approx(ridge, abs=0.7)


def test_every_rate_is_its_units_times_its_clock():
    """Except those that are only quoted, which say so by having no rate per clock."""
    quoted = []
    for gpu in GPUS:
        for peak in gpu.peaks:
            if peak.clock_mhz is None:
                quoted.append((gpu.name, peak.unit))
                continue
            at_boost = gpu.multiprocessors * peak.flops_per_clock * peak.clock_mhz / 1e6
            # L40S quotes its units at clocks between 2490 and 2520 MHz.
            assert at_boost == pytest.approx(peak.tflops, rel=0.015 if gpu.name == "L40S" else 0.0115), (gpu.name, peak)
    assert quoted == [("B200", "fp32")]


def test_a_card_says_what_its_tensor_cores_do():
    """Advice must not name what the card cannot do: bf16 begins with Ampere, so does TF32, fp8 with Ada and Hopper."""
    for kind, first in (("fp16", 0), ("bf16", 4), ("tf32", 4), ("fp8", 9)):
        without = {"MI300X"} if kind == "tf32" else set()
        expected = [gpu.name for gpu in GPUS[first:] if gpu.name not in without]
        assert [gpu.name for gpu in GPUS if gpu.supports(kind)] == expected
    assert not any(gpu.supports("fp32") for gpu in GPUS)


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA A100-SXM4-80GB", "A100 80 GB SXM"),
        ("Tesla V100-SXM2-16GB", "V100 SXM2"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("h100", "H100 SXM5"),
        ("NVIDIA A100-SXM4-40GB", "A100 40 GB SXM"),
        ("NVIDIA A100 80GB PCIe", "A100 80 GB PCIe"),
        ("Tesla V100-DGXS-32GB", "V100 DGX Station"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX 2080 Ti"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI300X VF", "MI300X"),
        *((gpu.name, gpu.name) for gpu in GPUS),
    ],
)
def test_names_as_they_are_reported(said: str, name: str):
    assert find(said).name == name


@pytest.mark.parametrize(
    "other",
    [
        "NVIDIA A100-PG509-200",
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "Tesla V100-PCIE-16GB",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 2080",
        "AMD Instinct MI300A",
        "AMD Radeon Graphics",
        "",
    ],
)
def test_a_board_with_other_peaks_is_not_mistaken(other: str):
    with pytest.raises(UsageError, match=r"are not known; give the nearest of V100 SXM2"):
        find(other)


def test_the_command(capsys: pytest.CaptureFixture[str]):
    assert cli.run(["peaks", "NVIDIA H200", "--format", "json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {row["gpu"] for row in listed} == {"H200 SXM"}
    assert all(row["source"] for row in listed)
    assert {row["unit"]: row["tflops"] or row["gb_per_s"] for row in listed} == {
        "fp32": 66.9, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4, "fp8": 1978.9, "memory": 4800.0,
    }  # fmt: skip
    assert cli.run(["peaks", "--format", "csv"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("gpu,unit,accumulate,tflops,gb_per_s,clock_mhz,source\n")
    assert out.count("\n") == 1 + sum(len(peak_rows(gpu)) for gpu in GPUS)
    assert cli.run(["peaks"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["RTX", "2080", "Ti", "14.20", "-", "56.90", "-", "-", "-", "616.0"] in lines  # fp16 accumulated in fp32
