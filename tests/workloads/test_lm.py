"""The language model: what it computes, what it counts, and what each switch changes."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math

import pytest

from nsightkit.analysis.roofline.envelope import envelope
from nsightkit.configurations import MATRIX, SIZES, VARIANTS, Configuration, find

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from nsightkit.workloads import lm  # noqa: E402
from nsightkit.workloads.lm import LMConfig, Run, start  # noqa: E402
from nsightkit.workloads.models import rotated  # noqa: E402

SMALL = LMConfig(batch=2, context=8, d_model=16, layers=2, d_ff=24, heads=2, vocabulary=64)
_SIZES = ("batch", "context", "d_model", "layers", "d_ff", "heads", "vocabulary")


def sized(configuration: Configuration, **more: object) -> LMConfig:
    return LMConfig(**{name: getattr(configuration, name) for name in _SIZES}, **more)


def run(steps: int = 3, **changes: object) -> Run:
    with Run(dataclasses.replace(SMALL, **changes)) as running:
        for _ in range(steps):
            running.step()
    return running


def events(steps: int = 1, **changes: object) -> list[tuple[str, float, float]]:
    """Operators and ranges of the steps after the first."""
    with Run(dataclasses.replace(SMALL, **changes)) as running:
        running.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiling:
            for _ in range(steps):
                running.step()
    found = [(e.name, e.time_range.start, e.time_range.end) for e in profiling.events()]
    return sorted(found, key=lambda e: (e[1], -e[2]))


# ---------------------------------------------------------------- the envelope is this model's


@pytest.mark.parametrize("configuration", [*MATRIX, *VARIANTS, *SIZES], ids=lambda c: c.name)
def test_parameters_are_those_of_the_envelope(configuration: Configuration) -> None:
    with torch.device("meta"):
        model = lm.model(sized(configuration))
    assert sum(p.numel() for p in model.parameters()) == envelope(configuration).params


@pytest.mark.parametrize("name", ["model_a", "misaligned_dims", "vocab_bottleneck", "smoke"])
def test_flops_are_those_of_the_envelope(name: str) -> None:
    """torch's counter sees each GEMM of written-out attention; backward has two for every one of the forward."""
    configuration = find(name)
    with torch.device("meta"):
        model = lm.model(sized(configuration, attention="naive"))
        tokens = torch.zeros(configuration.batch, configuration.context, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        logits = model(tokens)
    assert counter.get_total_flops() == envelope(configuration).fwd_flops
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(logits.sum())
    assert counter.get_total_flops() == 2 * envelope(configuration).fwd_flops


def test_the_counter_misses_fused_attention_on_a_cpu() -> None:
    """Why the envelope does not come from the counter."""
    model, configuration = lm.model(sized(find("smoke"))), find("smoke")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.ones(configuration.batch, configuration.context, dtype=torch.int64))
    found = envelope(configuration)
    assert counter.get_total_flops() in (found.fwd_flops - found.attention_flops, found.fwd_flops)


def test_activations_are_near_the_envelopes() -> None:
    """What autograd keeps for backward, under bf16 autocast on the CPU, where the coefficients were fitted."""
    configuration = Configuration("medium-sized", 4, 128, 192, 3, 512, 6, 256, "large enough for the leading terms")
    seen: dict[int, int] = {}
    with Run(sized(configuration, precision="bf16", annotate=False)) as running:
        weights = {p.untyped_storage().data_ptr() for p in running.model.parameters()}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), torch.autocast("cpu", torch.bfloat16):
            tokens = running.tokens[0, :, :-1]
            logits = running.model(tokens)
    found = envelope(configuration)
    assert logits.requires_grad
    expected = found.activation_bytes + found.cache_bytes
    assert sum(seen.values()) == pytest.approx(expected, rel=0.2)


# ---------------------------------------------------------------- what it computes


def test_it_learns_and_stays_finite() -> None:
    losses = run(30).losses()
    assert len(losses) == 30
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])  # four batches in turn can be learned by heart


def test_same_seed_same_losses_other_seed_other_losses() -> None:
    assert run().losses() == run().losses()
    assert run().losses() != run(seed=1).losses()


def test_naive_and_fused_attention_agree() -> None:
    assert run(attention="naive").losses() == pytest.approx(run(attention="sdpa").losses(), rel=1e-5)


def test_a_token_does_not_see_its_future() -> None:
    for attention in ("naive", "sdpa"):
        torch.manual_seed(0)
        model = lm.model(dataclasses.replace(SMALL, attention=attention))
        tokens = torch.randint(1, 64, (1, 8))
        changed = tokens.clone()
        changed[0, -1] = 1 + tokens[0, -1] % 63
        with torch.no_grad():
            one, other = model(tokens), model(changed)
        assert torch.equal(one[:, :-1], other[:, :-1])
        assert not torch.equal(one[:, -1], other[:, -1])


def test_an_odd_head_is_rotated_but_for_one_channel() -> None:
    torch.manual_seed(0)
    model = lm.model(dataclasses.replace(SMALL, d_model=10, heads=2))  # heads of 5
    assert model.cosine.shape == (8, 2)
    x = torch.randn(1, 2, 8, 5)
    turned = rotated(x, model.cosine, model.sine)
    assert turned.shape == x.shape
    assert torch.equal(turned[..., 4], x[..., 4])
    assert torch.equal(turned[:, :, 0], x[:, :, 0])  # position 0 is not turned at all
    assert not torch.allclose(turned[:, :, 1:, :4], x[:, :, 1:, :4])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert all(math.isfinite(loss) for loss in run(d_model=10, heads=2).losses())


def test_relative_positions_only() -> None:
    """Rotary embedding's point: a product of rotated q and k depends on their distance."""
    model = lm.model(SMALL)
    q, k = torch.randn(8), torch.randn(8)
    shape = (1, 1, 8, 8)
    rotated_q = rotated(q.expand(shape), model.cosine, model.sine)
    rotated_k = rotated(k.expand(shape), model.cosine, model.sine)
    products = (rotated_q @ rotated_k.transpose(-2, -1))[0, 0]
    for distance in range(1, 7):
        along = products.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-4, atol=1e-4)


def test_accumulated_gradients_are_those_of_the_whole_batch() -> None:
    with Run(dataclasses.replace(SMALL, mode="fwd_bwd", accumulate=2)) as two:
        two.run_batch()
        two.run_batch()
    with Run(dataclasses.replace(SMALL, mode="fwd_bwd", batch=4)) as one:
        one.model.load_state_dict(two.model.state_dict())
        one.tokens = torch.cat([two.tokens[0], two.tokens[1]]).expand(4, -1, -1)
        one.run_batch()
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


def test_no_token_is_zero() -> None:
    with Run(SMALL) as running:
        assert running.tokens.min() >= 1
        assert running.tokens.max() < SMALL.vocabulary
        assert len({tuple(batch.flatten().tolist()) for batch in running.tokens}) == 4


# ---------------------------------------------------------------- what a switch changes


def test_modes() -> None:
    forward, both, train = (run(mode=mode) for mode in ("fwd", "fwd_bwd", "train"))
    assert forward.losses() == both.losses()  # nothing is learned in either
    assert train.losses()[0] == both.losses()[0]
    assert train.losses()[1:] != both.losses()[1:]
    names = {mode: collections.Counter(name for name, *_ in events(mode=mode)) for mode in ("fwd", "fwd_bwd", "train")}
    assert not any("Backward" in name for name in names["fwd"])
    assert any("Backward" in name for name in names["fwd_bwd"])
    assert [n["Optimizer.step#AdamW.step"] for n in names.values()] == [0, 0, 1]


def test_phases_in_order_and_inside_the_step() -> None:
    wanted = ["step", "forward", "backward", "optimizer", "zero_grad"]
    phases = [event for event in events() if event[0] in wanted]
    assert [name for name, *_ in phases] == wanted
    (_, start_us, end_us), *parts = phases
    assert all(start_us <= a <= b <= end_us for _, a, b in parts)
    assert not [name for name, *_ in events(annotate=False) if name in wanted]
    twice = [name for name, *_ in events(accumulate=2) if name in wanted]
    assert twice == ["step", "forward", "backward", "forward", "backward", "optimizer", "zero_grad"]


def test_attentions_parts_in_order_in_every_layer() -> None:
    first, last = ["qkv_projections", "rope"], ["output_projection"]
    parts = {"naive": ["qk_mask", "softmax", "attention_v"], "sdpa": ["sdpa"]}
    every = {*first, *last, *parts["naive"], *parts["sdpa"]}
    for attention, between in parts.items():
        seen = [name for name, *_ in events(attention=attention, annotate_mha=True) if name in every]
        assert seen == SMALL.layers * [*first, *between, *last]
    assert not [name for name, *_ in events(attention="naive") if name in every]


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_precisions(precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    seen = {}
    with start("cpu", **dataclasses.asdict(dataclasses.replace(SMALL, precision=precision))) as running:
        assert torch.get_float32_matmul_precision() == ("high" if precision == "tf32" else "highest")
        running.model.head.register_forward_hook(lambda _m, _i, out: seen.update(logits=out.dtype))
        running.run_batch()
        seen["grads"] = {p.grad.dtype for p in running.model.parameters()}
        seen["weights"] = {p.dtype for p in running.model.parameters()}
        running.step()
        assert running.scaler.is_enabled() == (precision == "fp16")
    assert torch.get_float32_matmul_precision() == before
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    assert seen == {"logits": low, "grads": {torch.float32}, "weights": {torch.float32}}
    assert run(1, precision=precision).losses() == pytest.approx(run(1).losses(), rel=0.01)


def test_it_compiles_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = functools.partial(torch.compile, backend="eager", fullgraph=True)  # traced, not translated: no compiler
    monkeypatch.setattr(torch, "compile", compile_)
    try:
        compiled = run(compiled=True)
    finally:
        torch.compiler.reset()
    assert compiled.losses() == pytest.approx(run().losses(), rel=1e-5)


def test_it_says_where_it_is() -> None:
    with Run(SMALL) as running:
        assert running.doing == "setup"
        running.step()
        assert running.doing == "zero_grad"

        def stop(*_: object) -> None:
            raise MemoryError

        running.model.head.register_full_backward_hook(stop)
        with pytest.raises(MemoryError):
            running.step()
        assert running.doing == "backward"
