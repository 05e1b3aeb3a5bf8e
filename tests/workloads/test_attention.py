"""Attention by itself: every implementation gives the same values, and says what it cannot do."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from nsightkit.workloads import attention  # noqa: E402
from nsightkit.workloads.attention_samples import ABSENT, SIXTEEN_BITS, TOO_WIDE  # noqa: E402

SIZES = {"batch": 2, "heads": 2}


def passed(implementation: str, **changes: object) -> list[torch.Tensor]:
    options = {**SIZES, "compiler": "eager", **changes}
    with attention.start("cpu", implementation=implementation, **options) as work:
        cell = work.cell(32, 48)
        attended = cell.forward()
        work.forget_compiled()
        return [attended.detach(), *cell.backward(attended)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("implementation", ["naive-compiled", "math", "flash"])
def test_implementations_agree(implementation: str, causal: bool) -> None:
    for one, other in zip(passed("naive", causal=causal), passed(implementation, causal=causal), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_written_out_attention_is_the_formula() -> None:
    with attention.start("cpu", causal=False, batch=1, heads=1) as work:
        cell = work.cell(8, 12)
        q, k, v, _ = (tensor.detach().double()[0, 0] for tensor in cell.tensors)
        weights = torch.exp(q @ k.T / 8**0.5)
        expected = (weights / weights.sum(1, keepdim=True)) @ v
        torch.testing.assert_close(cell.forward()[0, 0].double(), expected, rtol=1e-5, atol=1e-6)


def test_no_query_sees_a_later_key() -> None:
    with attention.start("cpu", batch=1) as work:
        cell = work.cell(8, 12)
        v = cell.tensors[2]
        torch.testing.assert_close(cell.forward()[0, 0, 0], v[0, 0, 0])


def test_a_cell_has_the_same_inputs_whenever_it_is_made() -> None:
    with attention.start("cpu", **SIZES) as work:
        work.cell(16, 8)
        again = work.cell(32, 8)
    with attention.start("cpu", **SIZES) as work:
        for one, other in zip(again.tensors, work.cell(32, 8).tensors, strict=True):
            assert torch.equal(one, other)


def test_bf16_is_bf16_throughout() -> None:
    assert {tensor.dtype for tensor in passed("naive", precision="bf16")} == {torch.bfloat16}


def test_settings_of_the_process_are_taken_back() -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cuda.flash_sdp_enabled()
    with attention.start("cpu", implementation="math", precision="tf32"):
        assert torch.get_float32_matmul_precision() == "high"
        assert not torch.backends.cuda.flash_sdp_enabled()
    assert (torch.get_float32_matmul_precision(), torch.backends.cuda.flash_sdp_enabled()) == before


def test_what_cannot_be_says_why() -> None:
    def refusal(implementation: str, d: int, device: str = "cpu", precision: str = "fp32") -> str | None:
        config = attention.AttentionConfig(implementation=implementation, heads=1, precision=precision)  # type: ignore[arg-type]
        return attention.Attention(config, device).refusal(d)

    assert refusal("flash", 256) is None
    assert refusal("flash", 257) == TOO_WIDE
    assert refusal("naive", 4096) is None
    assert refusal("efficient", 64) == refusal("cudnn", 64) == ABSENT
    # What needs no GPU to be known: a CUDA device is only named here.
    assert refusal("flash", 64, "cuda") == refusal("cudnn", 64, "cuda", "tf32") == SIXTEEN_BITS
