"""The training workload and its faults: told apart by what they do, not by how long it takes."""

from __future__ import annotations

import collections
import itertools

import pytest

torch = pytest.importorskip("torch")

from nsightkit.workloads import training  # noqa: E402
from nsightkit.workloads.training import Documents, ElementaryAdamW, TrainingConfig  # noqa: E402

SMALL = {
    "vocabulary": 64,
    "hidden": 16,
    "layers": 2,
    "heads": 2,
    "context": 8,
    "batch": 2,
    "decode_bytes": 1000,
    "workers": 0,
}


def trained(steps: int = 3, **changes: object) -> training.Training:
    with training.run("cpu", **(SMALL | changes)) as run:
        for _ in range(steps):
            run.step()
    return run


def losses(steps: int = 3, **changes: object) -> list[float]:
    return trained(steps, **changes).samples()["loss"]


def third_step(**changes: object) -> list[torch.autograd.profiler_util.FunctionEvent]:
    """Operators and ranges of the third step: the first sets up state."""
    with training.run("cpu", **(SMALL | changes)) as run:
        run.step()
        run.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as watch:
            run.step()
    return sorted(watch.events(), key=lambda event: event.time_range.start)


def operators(**changes: object) -> collections.Counter[str]:
    return collections.Counter(event.name for event in third_step(**changes))


@pytest.mark.parametrize("fault", ["sync", "tiny", "pageable"])
def test_a_fault_changes_the_time_and_not_the_result(fault: str) -> None:
    clean, faulty = trained(), trained(**{fault: True})
    assert faulty.samples()["loss"] == pytest.approx(clean.samples()["loss"], rel=1e-4)


def test_workers_prepare_the_same_batches_in_the_same_order() -> None:
    assert losses(5, workers=2) == losses(5)


def test_it_learns() -> None:
    learned = losses(30)
    # Random tokens hold nothing to learn but that token 0 never comes.
    assert sum(learned[-5:]) < sum(learned[:5])


def test_every_step_has_its_phases_in_order() -> None:
    wanted = ["step", "data", "copy", "forward", "backward", "optimizer"]
    step, *phases = [event for event in third_step() if event.name in wanted]
    assert [event.name for event in (step, *phases)] == wanted
    for phase in phases:
        assert step.time_range.start <= phase.time_range.start <= phase.time_range.end <= step.time_range.end
    assert all(first.time_range.end <= second.time_range.start for first, second in itertools.pairwise(phases))


def test_sync_reads_a_number_for_every_layer_and_the_loss() -> None:
    clean, faulty = operators(), operators(sync=True)
    assert faulty["aten::item"] - clean["aten::item"] == SMALL["layers"] + 1
    assert clean["aten::linear"] == faulty["aten::linear"]


def test_tiny_is_many_operators_for_the_same_matmuls() -> None:
    clean, faulty = operators(), operators(tiny=True)
    for name in ("aten::linear", "aten::scaled_dot_product_attention"):
        assert clean[name] == faulty[name] > 0
    assert (clean["aten::_fused_adamw_"], faulty["aten::_fused_adamw_"]) == (1, 0)
    assert faulty["aten::mul"] > 2 * clean["aten::mul"]


def test_elementary_adamw_is_adamw() -> None:
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(4, 3))]
    theirs = [torch.nn.Parameter(ours[0].detach().clone())]
    optimizers = [
        ElementaryAdamW(ours, lr=0.1, weight_decay=0.01),
        torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.01),
    ]
    for _ in range(4):
        gradient = torch.randn(4, 3)
        for parameters, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameters[0].grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(ours[0], theirs[0])


def test_without_workers_the_process_decodes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    original = Documents.sample

    def sample(self: Documents, index: int) -> torch.Tensor:
        decoded.append(index)
        return original(self, index)

    monkeypatch.setattr(Documents, "sample", sample)
    trained(2, workers=2)
    assert decoded == []  # in other processes, which do not share this list
    trained(2, workers=0)
    assert decoded == [0, 1, 2, 3]


def test_the_wait_for_data_is_measured_around_next() -> None:
    waits = trained(read_ms=5.0).samples()["data_wait_ns"]
    assert len(waits) == 3
    # Two samples per batch, 5 ms each: a wait cannot be shorter than the sleep in it.
    assert min(waits) >= 2 * 5_000_000


def test_a_sample_has_no_zero_and_depends_on_its_number_alone() -> None:
    config = TrainingConfig(**SMALL)
    first = Documents(config).sample(7)
    assert first.shape == (SMALL["context"] + 1,)
    assert 0 < int(first.min()) <= int(first.max()) < SMALL["vocabulary"]
    assert torch.equal(first, Documents(config).sample(7))
    assert not torch.equal(first, Documents(config).sample(8))


def test_bf16_learns_the_same() -> None:
    assert losses(precision="bf16") == pytest.approx(losses(), rel=0.05)


def test_an_unknown_parameter_is_an_error() -> None:
    with pytest.raises(TypeError, match="no_such"):
        training.run("cpu", no_such=16)
