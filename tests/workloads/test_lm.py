"""The language model: what it computes, that the envelope is this model's, and what each switch changes."""

from __future__ import annotations

import functools

import pytest

from nsightkit.analysis.roofline.envelope import envelope
from nsightkit.configurations import MATRIX, SIZES, VARIANTS, Configuration, find

torch = pytest.importorskip("torch")

import plain_layer  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from nsightkit.workloads import lm  # noqa: E402

SMALL = {"batch": 2, "context": 8, "d_model": 16, "layers": 2, "d_ff": 24, "heads": 2, "vocabulary": 64}


def sizes(configuration: Configuration) -> dict[str, int]:
    return {name: getattr(configuration, name) for name in SMALL}


def losses(steps: int = 3, **changes: object) -> list[float]:
    with lm.run("cpu", **(SMALL | changes)) as run:
        for _ in range(steps):
            run.step()
        return run.samples()["loss"]


def ranges(**changes: object) -> list[tuple[str, float, float]]:
    """Operators and ranges of the second step, in order of their start."""
    with lm.run("cpu", **(SMALL | changes)) as run:
        run.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as watch:
            run.step()
    events = [(event.name, event.time_range.start, event.time_range.end) for event in watch.events()]
    return sorted(events, key=lambda event: (event[1], -event[2]))


# -- the envelope is this model's


@pytest.mark.parametrize("configuration", [*MATRIX, *VARIANTS, *SIZES], ids=lambda configuration: configuration.name)
def test_parameters_are_those_of_the_envelope(configuration: Configuration):
    with torch.device("meta"):
        model = lm.model(lm.LMConfig(**sizes(configuration)))
    assert sum(parameter.numel() for parameter in model.parameters()) == envelope(configuration).params


@pytest.mark.parametrize("name", ["model_a", "misaligned_dims", "vocab_bottleneck", "smoke"])
def test_flops_are_those_of_the_envelope(name: str):
    """PyTorch's counter sees each GEMM of naive attention; backward has two for every one of the forward pass."""
    configuration = find(name)
    with torch.device("meta"):
        model = lm.model(lm.LMConfig(**sizes(configuration), attention="naive"))
        tokens = torch.zeros(configuration.batch, configuration.context, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        logits = model(tokens)
    assert counter.get_total_flops() == envelope(configuration).fwd_flops
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(logits.sum())
    assert counter.get_total_flops() == 2 * envelope(configuration).fwd_flops


def test_activations_are_near_the_envelopes():
    """What autograd keeps under bf16 autocast on the CPU, where the coefficients were fitted."""
    configuration = Configuration("medium-sized", 4, 128, 192, 3, 512, 6, 256, "large enough for the leading terms")
    seen: dict[int, int] = {}
    with lm.run("cpu", **sizes(configuration), precision="bf16", annotate=False) as run:
        weights = {parameter.untyped_storage().data_ptr() for parameter in run.model.parameters()}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu"):
            logits = run.model(run.tokens[0, :, :-1])
    assert logits.requires_grad
    cost = envelope(configuration)
    assert sum(seen.values()) == pytest.approx(cost.activation_bytes + cost.cache_bytes, rel=0.2)


# -- what it computes


def reference_loss(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The loss in float64, by PyTorch's functions."""
    weight = {name: value.double() for name, value in model.state_dict(keep_vars=True).items()}
    x = weight["embedding.weight"][tokens[:, :-1]]
    for number in range(SMALL["layers"]):
        own = {name.removeprefix(f"blocks.{number}."): value for name, value in weight.items()}
        norms = [own["norm_attention.weight"], own["norm_mlp.weight"]]
        qkv = torch.cat([own[f"attention.{part}.weight"] for part in "qkv"])
        gate_up = torch.cat([own["mlp.gate.weight"], own["mlp.up.weight"]])
        ends = own["attention.out.weight"], gate_up, own["mlp.down.weight"]
        x = plain_layer.layer(x, norms, qkv, *ends, SMALL["heads"])
    logits = torch.nn.functional.rms_norm(x, x.shape[-1:], weight["norm.weight"], 1e-6) @ weight["head.weight"].T
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("attention", ["naive", "sdpa"])
def test_loss_and_gradients_are_those_of_the_definitions(attention: str):
    with lm.run("cpu", **SMALL, mode="fwd_bwd", attention=attention) as run:
        parameters = list(run.model.parameters())
        tokens = run.tokens[0]
        expected = reference_loss(run.model, tokens)
        loss = torch.nn.functional.cross_entropy(run.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
        exact = torch.autograd.grad(expected, parameters)
        for gradient, reference in zip(torch.autograd.grad(loss, parameters), exact, strict=True):
            torch.testing.assert_close(gradient, reference.float(), rtol=1e-3, atol=1e-5)
        run.step()
        assert run.samples()["loss"] == [pytest.approx(expected.item(), rel=1e-5)]


def test_it_learns_from_the_seed_on():
    learned = losses(30)
    assert sum(learned[-4:]) < 0.8 * sum(learned[:4])  # four batches in turn can be learned by heart
    assert learned[:3] == losses()
    assert learned[:3] != losses(seed=1)


# -- what a switch changes


def test_modes():
    forward, both, train = (losses(mode=mode) for mode in ("fwd", "fwd_bwd", "train"))
    assert forward == both  # nothing is learned in either
    assert train[0] == both[0]
    assert train[1:] != both[1:]
    assert not any("Backward" in name for name, *_ in ranges(mode="fwd"))


def test_phases_in_order_and_inside_the_step():
    wanted = ["step", "copy", "forward", "backward", "optimizer", "zero_grad"]
    phases = [event for event in ranges(feed="host") if event[0] in wanted]
    assert [name for name, *_ in phases] == wanted
    (_, start_us, end_us), *parts = phases
    assert all(start_us <= start <= end <= end_us for _, start, end in parts)
    assert not [name for name, *_ in ranges(annotate=False) if name in wanted]


@pytest.mark.parametrize(
    ("attention", "between"), [("naive", ["qk_mask", "softmax", "attention_v"]), ("sdpa", ["sdpa"])]
)
def test_parts_of_attention_in_order_in_every_layer(attention: str, between: list[str]):
    expected = ["qkv_projections", "rope", *between, "output_projection"]
    seen = [name for name, *_ in ranges(attention=attention, annotate_mha=True) if name in expected]
    assert seen == SMALL["layers"] * expected


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_precisions(precision: str):
    before = torch.get_float32_matmul_precision()
    logits = []
    with lm.run("cpu", **SMALL, precision=precision) as run:
        assert torch.get_float32_matmul_precision() == ("high" if precision == "tf32" else "highest")
        run.model.head.register_forward_hook(lambda _module, _inputs, output: logits.append(output.dtype))
        run.step()
        assert run.scaler.is_enabled() == (precision == "fp16")
        assert run.samples()["loss"] == pytest.approx(losses(1), rel=0.01)
    assert torch.get_float32_matmul_precision() == before
    assert logits == [{"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)]


def test_it_compiles_in_one_piece(monkeypatch: pytest.MonkeyPatch):
    compile_ = functools.partial(torch.compile, backend="eager", fullgraph=True)  # traced: no compiler is needed
    monkeypatch.setattr(torch, "compile", compile_)
    try:
        compiled = losses(compiled=True)
    finally:
        torch.compiler.reset()
    assert compiled == pytest.approx(losses(), rel=1e-5)
