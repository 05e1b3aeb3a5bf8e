"""Sums in several precisions, against exact arithmetic that knows nothing of torch."""

from __future__ import annotations

import functools
from fractions import Fraction

import numpy as np
import pytest

pytest.importorskip("torch")

from nsightkit.workloads import accumulation
from nsightkit.workloads.accumulation import VARIANTS, Accumulation, AccumulationConfig

BITS = {"float32": 24, "float16": 11, "bfloat16": 8}


@functools.cache
def observed(**config: object) -> dict[str, list[float]]:
    with accumulation.start("cpu", **config) as work:
        work.step()
        return work.observed()


def rounded(value: Fraction, bits: int) -> Fraction:
    """Nearest number with so many significant bits, ties to even, by integers alone."""
    if not value:
        return value
    exponent = 0
    while abs(value) * Fraction(2) ** exponent < 2 ** (bits - 1):
        exponent += 1
    while abs(value) * Fraction(2) ** exponent >= 2**bits:
        exponent -= 1
    return Fraction(round(value * Fraction(2) ** exponent)) / Fraction(2) ** exponent


def bits_of(dtype: object) -> int:
    return BITS[str(dtype).removeprefix("torch.")]


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("fp32", 10.0001),
        ("fp16", 9.9531),
        ("fp32 of fp16", 10.0021),
        ("fp32 of widened fp16", 10.0021),
        ("bf16", 4.0),
        ("fp32 of bf16", 10.0098),
    ],
)
def test_the_classic_sums(name: str, total: float) -> None:
    assert observed()[f"sum/{name}"][-1] == pytest.approx(total, abs=5e-5)


def test_widening_first_changes_nothing() -> None:
    found = observed()
    assert found["sum/fp32 of fp16"] == found["sum/fp32 of widened fp16"]


def test_bf16_stops_where_half_a_spacing_is_more_than_the_addend() -> None:
    totals = np.array(observed()["sum/bf16"])
    held = observed()["addend/bf16"][0]
    assert totals[-1] == 4.0
    assert held < 4.0 * 2**-7 / 2  # bf16 has 7 bits behind the first one
    assert held > 2.0 * 2**-7 / 2
    stopped = int(np.argmax(totals == 4.0))
    assert (np.diff(totals)[:stopped] > 0).all()
    assert (totals[stopped:] == 4.0).all()


@pytest.mark.parametrize(("addend", "count", "block"), [(0.01, 500, 1), (0.01, 500, 25), (-0.3, 120, 8), (3.0, 96, 1)])
def test_every_total_is_the_correctly_rounded_one(addend: float, count: int, block: int) -> None:
    found = observed(addend=addend, count=count, block=block)
    for name, variant in VARIANTS.items():
        bits = bits_of(variant.accumulator)
        held = rounded(Fraction(addend), bits_of(variant.addend))
        assert found[f"addend/{name}"] == [float(held)]
        total, totals = Fraction(0), []
        for _ in range(count // block):
            part = Fraction(0)
            for _ in range(block):
                part = rounded(part + held, bits)
            total = rounded(total + part, bits)
            totals.append(float(total))
        assert found[f"sum/{name}"] == totals, name


def test_blocks_repair_a_16_bit_total() -> None:
    plain, blocks = observed(), observed(block=25)
    for name in ("fp16", "bf16"):
        assert abs(blocks[f"sum/{name}"][-1] - 10) < abs(plain[f"sum/{name}"][-1] - 10)
    assert len(blocks["sum/bf16"]) == 40


def test_a_matrix_product_keeps_a_wide_total() -> None:
    found = observed()
    for name, bits in (("fp16", 11), ("bf16", 8)):
        exact = 1000 * Fraction(found[f"addend/{name}"][0])
        assert found[f"matmul/{name}"] == [float(rounded(exact, bits))]


def test_a_step_begins_anew() -> None:
    with accumulation.start("cpu", count=10) as work:
        work.step()
        first = work.observed()
        work.step()
        assert work.observed() == first
    assert work.parameters["count"] == 10
    assert isinstance(work.parameters["allow_bf16_reduced_precision_reduction"], bool)


@pytest.mark.parametrize("block", [0, 7, -1])
def test_blocks_must_divide_the_count(block: int) -> None:
    with pytest.raises(ValueError, match="do not divide"):
        Accumulation(AccumulationConfig(count=10, block=block))


@pytest.mark.gpu
def test_a_gpu_rounds_as_a_cpu_does() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    with accumulation.start("cuda") as work:
        work.step()
        found = work.observed()
    expected = observed()
    assert {k: v for k, v in found.items() if "/" in k} == expected
