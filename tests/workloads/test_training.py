"""The training workload and its faults: told apart by what they do, not by how long it takes."""

from __future__ import annotations

import collections
import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from nsightkit.workloads import training  # noqa: E402
from nsightkit.workloads.training import Documents, TrainingConfig  # noqa: E402

SMALL = {"vocabulary": 64, "hidden": 16, "layers": 2, "heads": 2, "context": 8, "batch": 2}
SMALL |= {"decode_bytes": 1000, "workers": 0}


def samples(steps: int = 3, **changes: Any) -> dict[str, list[float]]:
    with training.run("cpu", **(SMALL | changes)) as run:
        for _ in range(steps):
            run.step()
        return run.samples()


def third_step(**changes: Any) -> list[Any]:
    """Operators and ranges of the third step: the first sets up state."""
    with training.run("cpu", **(SMALL | changes)) as run:
        run.step()
        run.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as watch:
            run.step()
    return sorted(watch.events(), key=lambda event: event.time_range.start)


def operators(**changes: Any) -> collections.Counter[str]:
    return collections.Counter(event.name for event in third_step(**changes))


@pytest.mark.parametrize(
    ("change", "close"), [({"sync": True}, 1e-4), ({"tiny": True}, 1e-4), ({"precision": "bf16"}, 0.05)]
)
def test_a_fault_changes_the_time_and_not_the_result(change: dict[str, Any], close: float):
    assert samples(**change)["loss"] == pytest.approx(samples()["loss"], rel=close)


def test_workers_prepare_the_same_batches_in_the_same_order():
    alone = samples(5)["loss"]
    assert samples(5, workers=2)["loss"] == alone
    # Random tokens hold nothing to learn but that token 0 never comes.
    learned = samples(30)["loss"]
    assert learned[:5] == alone
    assert sum(learned[-5:]) < sum(alone)


def test_every_step_has_its_phases_in_order():
    wanted = ["step", "data", "copy", "forward", "backward", "optimizer"]
    step, *phases = [event for event in third_step() if event.name in wanted]
    assert [event.name for event in (step, *phases)] == wanted
    assert phases[-1].time_range.end <= step.time_range.end
    assert all(first.time_range.end <= second.time_range.start for first, second in itertools.pairwise(phases))


def test_what_a_fault_runs():
    clean, sync, tiny = operators(), operators(sync=True), operators(tiny=True)
    assert sync["aten::item"] - clean["aten::item"] == SMALL["layers"] + 1  # a number for every layer, and the loss
    assert clean["aten::linear"] == sync["aten::linear"] == tiny["aten::linear"] > 0
    assert (clean["aten::_fused_adamw_"], tiny["aten::_fused_adamw_"]) == (1, 0)
    parameters = 9 * SMALL["layers"] + 3
    assert (clean["aten::addcdiv_"], tiny["aten::addcdiv_"]) == (0, parameters)  # a chain for each of them


def test_the_wait_for_data_is_measured_around_next():
    waits = samples(read_ms=5.0)["data_wait_ns"]
    assert len(waits) == 3
    # Two samples per batch, 5 ms each: a wait cannot be shorter than the sleep in it.
    assert min(waits) >= 2 * 5_000_000


def test_a_sample_has_no_zero_and_depends_on_its_number_alone():
    config = TrainingConfig(**SMALL)
    first = Documents(config).sample(7)
    assert first.shape == (SMALL["context"] + 1,)
    assert 0 < int(first.min()) <= int(first.max()) < SMALL["vocabulary"]
    assert torch.equal(first, Documents(config).sample(7))
    assert not torch.equal(first, Documents(config).sample(8))
