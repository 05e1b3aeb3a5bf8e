"""A step that is watched: its figures against autograd's own, closed sums, and a device that is full."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from nsightkit.workloads import lm, memory_steps  # noqa: E402

SMALL = {"batch": 2, "context": 32, "d_model": 64, "layers": 2, "d_ff": 160, "heads": 4, "vocabulary": 300}


def observed(**parameters: object) -> dict[str, list[float]]:
    with memory_steps.start("cpu", **(SMALL | parameters)) as run:
        return run.observed()


def test_moments_are_in_order() -> None:
    found = {name: values[0] for name, values in observed(mode="train").items()}
    assert found["before_the_step_bytes"] < found["forward_end_bytes"] <= found["forward_peak_bytes"]
    assert found["backward_end_bytes"] < found["backward_peak_bytes"]
    peaks = [size for name, size in found.items() if name.endswith("_peak_bytes")]
    assert found["peak_bytes"] == found["tensor_peak_bytes"] == max(peaks)
    parts = [size for name, size in found.items() if name.startswith("at_peak_")]
    assert sum(parts) == found["peak_bytes"]


def test_items_that_are_known_otherwise() -> None:
    with memory_steps.start("cpu", **SMALL, mode="train", precision="bf16") as run:
        run.step()
        found = {name: values[0] for name, values in run.observed().items()}
        parameters = sum(p.nbytes for p in run.model.parameters())
        matrices = sum(p.numel() for n, p in run.model.named_parameters() if p.dim() == 2 and "embedding" not in n)
    assert found["backward_end_bytes"] - found["before_the_step_bytes"] >= parameters
    assert found["at_peak_weights_bytes"] == parameters
    assert found["at_peak_optimizer_states_bytes"] == 2 * parameters
    assert found["at_peak_autocast_cache_bytes"] == 2 * matrices
    assert found["at_peak_gradients_bytes"] == 0  # the peak comes before the first of them
    assert observed(precision="fp32")["at_peak_autocast_cache_bytes"] == [0]


def test_gradients_are_named_where_they_are_at_the_peak() -> None:
    """A batch of one token: the optimizer's step is the highest moment."""
    found = observed(mode="train", batch=1, context=2, d_model=128)
    assert found["peak_bytes"] == found["optimizer_peak_bytes"]
    assert found["at_peak_gradients_bytes"] == found["at_peak_weights_bytes"]
    assert found["at_peak_temporary_buffers_bytes"][0] > 0


def test_watching_changes_nothing() -> None:
    with lm.start("cpu", **SMALL) as run:
        for _ in range(3):
            run.step()
    watched = observed()["loss"]  # its first step, and the watched one
    assert watched == run.losses()[: len(watched)]
    with memory_steps.start("cpu", **SMALL, annotate=True) as watching:
        watching.observed()
        before = watching.losses()
        watching.step()
        assert watching.losses()[: len(before)] == before


def test_a_forward_pass_keeps_nothing() -> None:
    found = {name: values[0] for name, values in observed(mode="fwd").items()}
    assert "backward_peak_bytes" not in found
    assert "optimizer_peak_bytes" not in found
    logits = 4 * SMALL["batch"] * SMALL["context"] * SMALL["vocabulary"]
    assert found["forward_end_bytes"] - found["before_the_step_bytes"] == pytest.approx(logits, abs=64)
    assert found["at_peak_temporary_buffers_bytes"] == 0


@pytest.mark.parametrize(("share", "where"), [(0.8, "backward"), (0.4, "forward")])
def test_a_device_that_is_imagined_full(share: float, where: str) -> None:
    whole = observed(mode="fwd_bwd", vocabulary=4000)
    floor = whole["before_the_step_bytes"][0]
    limit = int(floor + share * (whole["peak_bytes"][0] - floor))
    with memory_steps.start("cpu", limit, **(SMALL | {"mode": "fwd_bwd", "vocabulary": 4000})) as run:
        with pytest.raises(torch.OutOfMemoryError, match="simulated"):
            run.observed()
        assert run.doing == where


COLUMN = {**SMALL, "contexts": [16, 32, 64, 128]}
del COLUMN["context"]


def test_cells_of_a_column_are_those_run_alone() -> None:
    with memory_steps.Column("cpu", **COLUMN, mode="train") as column:
        column.step()
        found = column.observed()
        assert column.parameters["contexts"] == [16, 32, 64, 128]
    assert found["context"] == [16, 32, 64, 128]
    assert "oom_context" not in found
    for position in (0, 2, 3):
        alone = observed(mode="train", context=found["context"][position])
        for name, (value,) in ((n, v) for n, v in alone.items() if n != "loss"):
            assert found[name][position] == value, name


def test_a_column_stops_where_it_does_not_fit_and_says_where() -> None:
    whole = observed(mode="train", context=64)
    limit = int(whole["peak_bytes"][0])
    with memory_steps.Column("cpu", **COLUMN, mode="train", limit_bytes=limit) as column:
        found = column.observed()
    assert found["context"] == [16, 32, 64]
    assert found["peak_bytes"][-1] == limit
    assert found["oom_context"] == [128]
    assert memory_steps.PHASES[int(found["oom_phase"][0])] in ("forward", "backward")
    assert all(len(values) == 3 for name, values in found.items() if not name.startswith("oom_"))
    assert found["limit_bytes"] == [limit] * 3


@pytest.mark.parametrize(
    ("words", "measured", "of"),
    [
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", [16, 32], "oom_context"),
        ("mat1 and mat2 shapes cannot be multiplied", [16, 32, 128], "errors"),
        ("CUDA error: unspecified launch failure", [16, 32], "errors"),
    ],
)
def test_an_error_leaves_what_was_measured(
    words: str, measured: list[int], of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = memory_steps.MemoryRun.run_batch

    def run_batch(run: memory_steps.MemoryRun) -> object:
        if run.config.context == 64:
            raise RuntimeError(words)
        return whole(run)

    monkeypatch.setattr(memory_steps.MemoryRun, "run_batch", run_batch)
    with memory_steps.Column("cpu", **COLUMN, mode="fwd") as column:
        found = column.observed()
    assert found["context"] == measured
    assert found.get("oom_context") == ([64] if of == "oom_context" else None)
    assert column.parameters.get("errors") == ({"64": words} if of == "errors" else None)


def test_an_error_before_anything_was_measured_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with memory_steps.Column("cpu", **COLUMN, mode="fwd") as column:
        monkeypatch.setattr(memory_steps.MemoryRun, "run_batch", lambda _: torch.zeros(2) @ torch.zeros(3))
        with pytest.raises(RuntimeError, match="inconsistent"):
            column.observed()
