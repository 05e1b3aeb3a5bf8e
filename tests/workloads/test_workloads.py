"""The training workload and its planted faults: told apart by what they do, not by how long it takes."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
import subprocess
import sys

import pytest

from nsightkit.configurations import MATRIX, VARIANTS
from nsightkit.errors import UsageError
from nsightkit.investigations import parts as investigations

torch = pytest.importorskip("torch")

from nsightkit.workloads import one_thread  # noqa: E402
from nsightkit.workloads.layer import RUNGS  # noqa: E402
from nsightkit.workloads.training import Documents, Training, TrainingConfig, start  # noqa: E402

SMALL = TrainingConfig(vocabulary=64, hidden=16, layers=2, heads=2, context=8, batch=2, decode_bytes=1000, workers=0)


def run(steps: int = 3, **changes: object) -> Training:
    with Training(dataclasses.replace(SMALL, **changes)) as training:
        for _ in range(steps):
            training.step()
    return training


def operators(**changes: object) -> collections.Counter[str]:
    """How often each operator ran in the third step (the first sets up state)."""
    with Training(dataclasses.replace(SMALL, **changes)) as training:
        training.step()
        training.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as running:
            training.step()
    return collections.Counter(event.name for event in running.events())


def test_it_learns_and_stays_finite() -> None:
    with Training(SMALL) as training:
        for _ in range(30):
            training.step()
    losses = training.losses()
    assert len(losses) == 30
    assert all(math.isfinite(loss) for loss in losses)
    # random tokens hold nothing to learn but that token 0 never comes
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5


def test_same_seed_same_losses_other_seed_other_losses() -> None:
    assert run().losses() == run().losses()
    assert run().losses() != run(seed=1).losses()


@pytest.mark.parametrize("fault", ["starved", "sync", "tiny", "pageable"])
def test_a_fault_changes_the_time_and_not_the_result(fault: str) -> None:
    clean, faulty = run(), run(**{fault: True})
    assert faulty.losses() == pytest.approx(clean.losses(), rel=1e-4)
    assert faulty.largest_activations() == pytest.approx(clean.largest_activations(), rel=1e-4)


def test_workers_prepare_the_same_batches_in_the_same_order() -> None:
    assert run(steps=5, workers=2).losses() == run(steps=5).losses()


def test_every_step_has_its_phases_in_order() -> None:
    with Training(SMALL) as training:
        training.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as running:
            training.step()
    wanted = ["step", "data", "copy", "forward", "backward", "optimizer"]
    ranges = sorted((e for e in running.events() if e.name in wanted), key=lambda e: e.time_range.start)
    assert [e.name for e in ranges] == wanted
    step, *phases = ranges
    assert all(step.time_range.start <= p.time_range.start <= p.time_range.end <= step.time_range.end for p in phases)
    assert all(a.time_range.end <= b.time_range.start for a, b in itertools.pairwise(phases))


def test_sync_reads_a_number_for_every_layer_and_the_loss() -> None:
    clean, faulty = operators(), operators(sync=True)
    assert faulty["aten::item"] - clean["aten::item"] == SMALL.layers + 1
    assert clean["aten::linear"] == faulty["aten::linear"]


def test_tiny_is_many_operators_for_the_same_matmuls() -> None:
    clean, faulty = operators(), operators(tiny=True)
    assert clean["aten::linear"] == faulty["aten::linear"]
    assert clean["aten::scaled_dot_product_attention"] == faulty["aten::scaled_dot_product_attention"] == SMALL.layers
    assert clean["aten::_fused_adamw_"] == 1
    assert faulty["aten::_fused_adamw_"] == 0
    elementwise = ("aten::mul", "aten::mul_", "aten::add_", "aten::div", "aten::sqrt", "aten::sub_")
    tensors = sum(1 for _ in Training(SMALL).model.parameters())
    assert sum(faulty[o] for o in elementwise) - sum(clean[o] for o in elementwise) > 10 * tensors


def test_starved_decodes_between_the_steps_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    original = Documents.sample

    def sample(self: Documents, index: int) -> object:
        decoded.append(index)
        return original(self, index)

    monkeypatch.setattr(Documents, "sample", sample)
    run(steps=2, workers=2)
    assert decoded == []  # in other processes, which this list is not in
    run(steps=2, workers=2, starved=True)
    assert decoded == [0, 1, 2, 3]


def test_the_wait_for_data_is_measured_around_next() -> None:
    training = run(read_ms=5.0)
    assert len(training.data_wait_ns) == 3
    # two samples a batch, 5 ms each: a wait cannot be shorter than the sleep in it
    assert min(training.data_wait_ns) >= 2 * 5_000_000


def test_a_sample_has_no_zero_and_depends_on_its_number_alone() -> None:
    documents = Documents(SMALL)
    first = documents.sample(7)
    assert first.shape == (SMALL.context + 1,)
    assert 0 < int(first.min()) <= int(first.max()) < SMALL.vocabulary
    assert torch.equal(first, Documents(SMALL).sample(7))
    assert not torch.equal(first, documents.sample(8))


def test_bf16_runs_the_matmuls_in_bf16() -> None:
    assert run(precision="bf16").losses() == pytest.approx(run().losses(), rel=0.05)


def test_one_thread_runs_on_a_cpu() -> None:
    with one_thread.start("cpu", step_ms=0.5) as work:
        work.step()
    assert work.losses() == []
    assert work.parameters == {"step_ms": 0.5}


ATTENTIONS = ("naive", "naive-compiled", "math", "efficient")


def test_investigations_name_what_exists() -> None:
    named = {(p.investigation, p.name) for p in investigations.parts()}
    assert named >= {  # a new one needs no entry here
        ("gpu-util", "training"), ("gpu-util", "one-thread"),
        ("starved-input", "before"), ("starved-input", "after"),
        ("hidden-sync", "before"), ("hidden-sync", "after"),
        ("tiny-kernels", "before"), ("tiny-kernels", "after"),
        ("training-step", "before"), ("training-step", "after"),
        ("accumulation", "before"), ("accumulation", "after"),
        ("autocast", "before"), ("autocast", "after"),
        ("bench", "before"), ("bench", "after"), ("bench", "forward"), ("bench", "no-optimizer"),
        ("bench", "context"), ("bench", "size"), ("bench", "precision"),
        ("precision", "before"), ("precision", "tf32"), ("precision", "after"), ("precision", "fp16"),
        ("precision", "again"),
        *(("ceilings", part) for part in ("before", "after", "fp32", "tf32", "fp16", "fp8", "layer")),
        *(("ceilings", part) for part in ("large", "qkv", "out", "down", "copy", "triad", "read")),
        ("roofline", "before"), ("roofline", "after"),
        ("late-rank", "before"), ("late-rank", "after"),
        ("limiters", "before"), ("limiters", "after"),
        *(("ladder", rung) for rung in RUNGS["prefill"]),
        *(("decode", rung) for rung in RUNGS["decode"]),
        *(("matrix", model.name) for model in (*MATRIX, *VARIANTS)),
        ("ledger", "before"), ("ledger", "after"), ("ledger", "naive"), ("ledger", "forward"),
        ("memory-context", "before"), ("memory-context", "after"), ("memory-context", "fp32"),
        ("memory-context", "forward"),
        ("memory-snapshot", "before"), ("memory-snapshot", "after"), ("memory-snapshot", "full"),
        *(("attention-sweep", f"{i}-{p}") for i in ATTENTIONS for p in ("fp32", "tf32", "bf16")),
        ("attention-sweep", "flash-bf16"), ("attention-sweep", "cudnn-bf16"),
        *(("gate", part) for part in ("before", "before-2", "before-3", "before-4", "again", "after")),
        *(("one-change", part) for part in ("before", "after", "again", "after-again")),
    }  # fmt: skip
    for part in investigations.parts():
        assert json.loads(json.dumps(part.parameters("live"))) == part.parameters("live")
        if part.workload.startswith("nsightkit.workloads.training"):
            for mode in ("live", "smoke"):
                TrainingConfig(**part.parameters(mode))  # no unknown field


SWITCHES = {
    "starved-input": "starved", "hidden-sync": "sync", "tiny-kernels": "tiny", "training-step": "attention",
    "accumulation": "block", "autocast": "norm", "memory-snapshot": "keep_graph",
    "limiters": "rows", "one-change": "starved", "gate": "layers",
}  # fmt: skip


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("mode", ["live", "smoke"])
def test_before_and_after_differ_in_one_switch(name: str, mode: str) -> None:
    before, after = (investigations.find(name, part).parameters(mode) for part in ("before", "after"))
    changed = [field for field in before if before[field] != after[field]]
    assert before.keys() == after.keys()
    assert changed == [SWITCHES[name]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"measured": "looked at"}, "measured as 'looked at'"),
        ({"shapes": True}, "shapes are kept of observed parts only"),
        ({"measured": "swept", "utilization": True}, "utilization is read of timed and observed parts only"),
    ],
)
def test_a_part_asks_for_nothing_that_its_way_of_measuring_does_not_know(changes: dict, words: str) -> None:
    part = investigations.find("starved-input", "before")
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(part, **changes)


def test_an_unknown_part_lists_the_known() -> None:
    with pytest.raises(UsageError, match="starved-input/before"):
        investigations.find("starved-input", "between")


def test_start_takes_the_fields_of_the_configuration() -> None:
    with start("cpu", **dataclasses.asdict(SMALL)) as training:
        training.step()
    assert training.parameters == dataclasses.asdict(SMALL)


def test_a_phase_needs_no_torch() -> None:
    program = (
        "import sys\n"
        "from nsightkit.workloads.phases import phase\n"
        "with phase('a'):\n    pass\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_phase_closes_when_its_body_fails() -> None:
    from nsightkit.workloads.phases import phase

    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as running,
        pytest.raises(ZeroDivisionError),
        phase("outer"),
    ):
        _ = 1 / 0
    assert [e.name for e in running.events() if e.name == "outer"] == ["outer"]
