"""Attention alone: every implementation gives the same values, and a sweep has a row for every cell."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from nsightkit.workloads import attention  # noqa: E402

SIZES = {"batch": 2, "heads": 2, "d_model": [32], "context": [48]}


def sweep(implementation: str, precision: str = "fp32", **changes: object) -> attention.Sweep:
    return attention.run("cpu", implementation=implementation, precision=precision, **(SIZES | changes))


def values(implementation: str, precision: str = "fp32") -> list[torch.Tensor]:
    """Output and gradients of one cell."""
    with sweep(implementation, precision) as work:
        inputs = work.inputs(32, 48)
        attended = work.forward(inputs)
        return [attended.detach(), *work.backward(inputs, attended)]


@pytest.mark.parametrize("implementation", ["naive-compiled", "math", "flash"])
def test_implementations_agree(implementation: str):
    for expected, value in zip(values("naive"), values(implementation), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)


def test_more_sizes_than_pytorch_keeps_compiled():
    with sweep("naive-compiled", context=range(4, 13)) as work:
        list(work.rows())  # an error at the ninth size, unless each is compiled anew


def test_bf16_is_bf16_throughout():
    assert {tensor.dtype for tensor in values("naive", "bf16")} == {torch.bfloat16}


def test_a_row_for_every_cell_and_memory_that_runs_out_is_one(monkeypatch: pytest.MonkeyPatch):
    """Forward fails at one context, backward at the next; the contexts after them are tried all the same."""
    forward, backward = attention.Sweep.forward, attention.Sweep.backward

    def fail_forward(self: attention.Sweep, inputs: list[torch.Tensor]) -> torch.Tensor:
        if inputs[0].shape[2] == 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, inputs)

    def fail_backward(self: attention.Sweep, inputs: list[torch.Tensor], attended: torch.Tensor) -> object:
        if inputs[0].shape[2] == 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return backward(self, inputs, attended)

    monkeypatch.setattr(attention.Sweep, "forward", fail_forward)
    monkeypatch.setattr(attention.Sweep, "backward", fail_backward)
    with sweep("naive", context=[4, 8, 16, 32]) as work:
        rows = list(work.rows())
    cells = [(row["context"], row["direction"], row["status"]) for row in rows]
    failed = {(8, "forward"), (8, "backward"), (16, "backward")}
    expected = [(context, way) for context in (4, 8, 16, 32) for way in ("forward", "backward")]
    assert cells == [(*cell, "oom" if cell in failed else "ok") for cell in expected]
    assert [math.isnan(row["median_ns"]) for row in rows] == [cell in failed for cell in expected]
    assert all(math.isnan(row["peak_bytes"]) for row in rows)  # only a GPU's allocator knows it


def test_a_backend_that_does_not_exist_here_is_unsupported_and_another_error_is_raised(
    monkeypatch: pytest.MonkeyPatch,
):
    with sweep("cudnn") as work:
        assert {row["status"] for row in work.rows()} == {"unsupported"}

    def fail(*_: object):
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(attention.Sweep, "forward", fail)
    with sweep("naive") as work, pytest.raises(RuntimeError, match="launch failure"):
        list(work.rows())


def test_settings_of_the_process_are_restored():
    before = torch.get_float32_matmul_precision(), torch.backends.cuda.flash_sdp_enabled()
    with sweep("math", "tf32"):
        assert torch.get_float32_matmul_precision() == "high"
        assert not torch.backends.cuda.flash_sdp_enabled()
    assert (torch.get_float32_matmul_precision(), torch.backends.cuda.flash_sdp_enabled()) == before
