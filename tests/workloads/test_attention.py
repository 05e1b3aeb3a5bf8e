"""Attention alone: every implementation gives the same values, and a sweep has a row for every cell."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from nsightkit.workloads import attention  # noqa: E402

SIZES = {"batch": 2, "heads": 2, "d_model": [32], "context": [48], "repetitions": 2}


def sweep(implementation: str, precision: str = "fp32", **changes: object) -> attention.Sweep:
    return attention.run("cpu", implementation=implementation, precision=precision, **(SIZES | changes))


def values(implementation: str, precision: str = "fp32") -> list[torch.Tensor]:
    """Output and gradients of one cell."""
    with sweep(implementation, precision) as work:
        inputs = work.inputs(32, 48)
        attended = work.forward(inputs)
        return [attended.detach(), *work.backward(inputs, attended)]


@pytest.mark.parametrize("implementation", ["naive-compiled", "math", "flash"])
def test_implementations_agree(implementation: str) -> None:
    for expected, value in zip(values("naive"), values(implementation), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)


def test_naive_attention_is_the_formula() -> None:
    with sweep("naive", heads=1, batch=1) as work:
        inputs = work.inputs(8, 12)
        attended = work.forward(inputs)
        q, k, v = (tensor.detach().double()[0, 0] for tensor in inputs[:3])
        for place in range(12):
            weights = torch.exp(k[: place + 1] @ q[place] / math.sqrt(8))
            expected = (weights / weights.sum()) @ v[: place + 1]
            torch.testing.assert_close(attended[0, 0, place].double(), expected, rtol=1e-5, atol=1e-6)


def test_bf16_is_bf16_throughout() -> None:
    assert {tensor.dtype for tensor in values("naive", "bf16")} == {torch.bfloat16}


def test_a_sweep_has_a_row_for_every_cell_and_direction() -> None:
    with sweep("naive", d_model=[8, 16], context=[4, 8]) as work:
        rows = list(work.rows())
    places = [(row["d_model"], row["context"], row["direction"]) for row in rows]
    expected = [(d, context, way) for d in (8, 16) for context in (4, 8) for way in ("forward", "backward")]
    assert places == expected
    for row in rows:
        assert (row["status"], row["batch"]) == ("ok", 2)
        assert 0 < row["low_ms"] <= row["time_ms"] <= row["high_ms"]
        assert math.isnan(row["peak_bytes"])  # only a GPU's allocator knows it


def test_memory_that_runs_out_is_a_row_and_not_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
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
    statuses = {(row["context"], row["direction"]): row["status"] for row in rows}
    assert [statuses[context, "forward"] for context in (4, 8, 16, 32)] == ["ok", "oom", "ok", "ok"]
    assert [statuses[context, "backward"] for context in (4, 8, 16, 32)] == ["ok", "oom", "oom", "ok"]
    assert all(math.isnan(row["time_ms"]) for row in rows if row["status"] == "oom")


def test_a_backend_that_does_not_exist_here_is_said_to_be_unsupported() -> None:
    with sweep("cudnn") as work:
        assert {row["status"] for row in work.rows()} == {"unsupported"}


def test_another_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(attention.Sweep, "forward", fail)
    with sweep("naive") as work, pytest.raises(RuntimeError, match="launch failure"):
        list(work.rows())


def test_settings_of_the_process_are_restored() -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cuda.flash_sdp_enabled()
    with sweep("math", "tf32"):
        assert torch.get_float32_matmul_precision() == "high"
        assert not torch.backends.cuda.flash_sdp_enabled()
    assert (torch.get_float32_matmul_precision(), torch.backends.cuda.flash_sdp_enabled()) == before
