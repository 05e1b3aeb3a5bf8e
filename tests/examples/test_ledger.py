"""The ledger on paper: closed formulas, published figures, and a real step's tensors to the byte."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import pandas as pd
import pytest
from _lib import ledger as memory

from nsightkit import hardware
from nsightkit.analysis.roofline.envelope import envelope
from nsightkit.configurations import Configuration, find
from nsightkit.errors import UsageError

_SIZES = ("batch", "context", "d_model", "layers", "d_ff", "heads", "vocabulary")


def model(**sizes: int) -> Configuration:
    base = {"batch": 2, "context": 64, "d_model": 64, "layers": 2, "d_ff": 192, "heads": 4, "vocabulary": 512}
    return Configuration("model", intent="", **(base | sizes))


def at(configuration: Configuration, moment: str, **how: object) -> pd.Series:
    return memory.moments(configuration, **how).set_index("moment").loc[moment]


# ---------------------------------------------------------------- closed formulas


@pytest.mark.parametrize(
    ("how", "element", "norms", "attention"),
    [
        ({"precision": "fp32", "attention": "sdpa"}, 4, 8, 0),
        ({"precision": "fp32", "attention": "naive"}, 4, 8, 4),
        ({"precision": "bf16", "attention": "sdpa"}, 2, 10, 0),
        ({"precision": "bf16", "attention": "naive"}, 2, 10, 6),
    ],
)
def test_what_a_gpus_forward_pass_keeps_is_the_tables_sum(
    how: dict[str, str], element: int, norms: int, attention: int
):
    c = find("small")  # all its sizes are multiples of the allocator's 512 bytes
    width = c.tokens * c.d_model
    layer = (16 + norms + 4 * element) * width + 8 * c.tokens + 4 * element * c.tokens * c.d_ff
    if attention:
        layer += attention * c.batch * c.heads * c.context**2
    else:  # and of bf16 a copy of its result
        layer += 4 * c.tokens * c.heads + (2 * width if element == 2 else 0)
    found = at(c, "forward end", **how)
    assert found["activations"] == c.layers * layer + (8 + element) * width + 4 * c.tokens
    assert found["logits"] == (element + 4) * c.tokens * c.vocabulary


def test_parameters_gradients_and_states():
    c = find("model_a")
    params = envelope(c).params
    for optimizer, (states, foreach) in memory.OPTIMIZERS.items():
        found = at(c, "optimizer peak", optimizer=optimizer, device="cuda")
        assert found["weights"] == found["gradients"] == 4 * params
        assert found["optimizer states"] == states * params
        assert found["temporary buffers"] == foreach * params
    forward = memory.moments(c, mode="fwd")
    assert list(forward["moment"]) == ["before the step", "forward peak", "forward end"]
    assert not forward[["gradients", "optimizer states", "temporary buffers"]].to_numpy().any()
    assert at(c, "forward peak")["gradients"] == 0  # they come with the backward pass


def test_the_peak_is_a_maximum_over_moments_and_no_sum():
    c = find("medium")
    table, ledger = memory.moments(c), memory.predict(c)
    assert ledger["predicted_bytes"].sum() == table["total_bytes"].max()
    assert ledger["largest_bytes"].sum() > 1.3 * ledger["predicted_bytes"].sum()
    assert (table[list(memory.ITEMS)].sum(axis=1) == table["total_bytes"]).all()
    assert set(ledger["moment"]) == {"backward peak"}
    # A short batch of a large model is highest in the optimizer's step.
    short = dataclasses.replace(c, batch=1, context=16)
    assert set(memory.predict(short)["moment"]) == {"optimizer peak"}


def test_what_it_refuses():
    for wrong in ({"precision": "int8"}, {"stage": 4}, {"ranks": 0}, {"attention": "flash"}, {"optimizer": "lion"}):
        with pytest.raises(UsageError):
            memory.predict(model(), **wrong)
    with pytest.raises(UsageError, match="heads of 257"):
        memory.predict(find("misaligned_dims"))


# ---------------------------------------------------------------- among ranks


def test_zero_divides_what_its_stage_says():
    c, ranks = find("medium"), 8
    params = envelope(c).params
    for stage in range(4):
        found = at(c, "backward end", stage=stage, ranks=ranks)
        # As in the paper's figure 1, but for fp32 weights and gradients: 16 B a parameter, not 2 + 2 + 12.
        for item, a_parameter, divided_from in (("weights", 4, 3), ("gradients", 4, 2), ("optimizer states", 8, 1)):
            share = a_parameter * params / (ranks if stage >= divided_from else 1)
            assert found[item] == pytest.approx(share, rel=1e-3)  # blocks of 512 bytes
    assert at(c, "forward end", ranks=8)["communication buckets"] == 4 * envelope(c).params
    assert at(c, "forward end")["communication buckets"] == 0
    largest = max(4 * c.d_model**2 + 3 * c.d_model * c.d_ff + 2 * c.d_model, c.vocabulary * c.d_model)
    assert at(c, "forward end", ranks=8, stage=3)["communication buckets"] == 12 * largest


# ---------------------------------------------------------------- serving


def test_kv_caches_of_published_models():
    assert memory.kv_bytes_per_token(32, 32, 128) == 512 * 1024  # Llama-2-7B in fp16
    assert memory.kv_bytes_per_token(40, 40, 128) == 800 * 1024  # OPT-13B, in the paper of PagedAttention


def test_a_batch_fits_and_the_next_does_not():
    c, gpu = find("10B"), hardware.find("H200")
    table = memory.serving(c, gpu, [512, 4096, 32_768])
    room = 0.9 * 141e9 - table["weights_bytes"] - table["prefill_bytes"]
    sequence = table["kv_bytes_per_sequence"] + table["decode_bytes"]
    for more, fits in ((0, True), (1, False)):
        assert (((table["largest_batch"] + more) * sequence <= room) == fits).all()
    assert table["largest_batch"].is_monotonic_decreasing
    assert memory.serving(c, hardware.find("T4"), [512])["largest_batch"].isna().all()


@pytest.mark.parametrize("how", [{"device": "cpu", "attention": "naive", "precision": "fp32"}, {"mode": "fwd"}])
def test_the_longest_context_fits_and_the_next_does_not(how: dict[str, str]):
    c, limit = model(), 70e6
    found = memory.largest_context(c, limit, multiple=8, **how)
    for context, fits in ((found, True), (found + 8, False)):
        total = memory.moments(dataclasses.replace(c, context=context), **how)["total_bytes"].max()
        assert (total <= limit) == fits
    assert memory.largest_context(c, 1000.0) == 0


# ---------------------------------------------------------------- against a real step


REAL = [
    {},
    {"d_model": 128, "layers": 3, "d_ff": 384, "context": 128, "vocabulary": 100},
    {"batch": 1, "context": 16, "d_model": 256, "layers": 3, "d_ff": 1024, "vocabulary": 300},
    {"context": 33, "d_model": 130, "d_ff": 100, "heads": 2, "vocabulary": 77},
]


def compare(c: Configuration, device: str, how: dict[str, str], within: dict[str, float], items: Any):
    """Hold the prediction against a step whose tensors were counted."""
    pytest.importorskip("torch")
    from synthetic.tensor_memory import memory_of_a_step

    seen = memory_of_a_step(**{name: getattr(c, name) for name in _SIZES}, **how)
    for _, row in memory.moments(c, device=device, **how).iterrows():
        tensors = row["total_bytes"] - row["library workspaces"]
        assert seen[f"{row['moment'].replace(' ', '_')}_bytes"] == pytest.approx(tensors, **within), row["moment"]
    ledger = memory.predict(c, device=device, **how).set_index("item")["predicted_bytes"]
    for item in items:
        measured = seen.get(f"at_peak_{item.replace(' ', '_')}_bytes", 0)
        assert measured == pytest.approx(float(ledger[item]), rel=within.get("rel"), abs=64), item


#: All ways of one model, and of the others two that have every operator of both kinds between them.
WAYS = [
    *((REAL[0], *way) for way in itertools.product(["fp32", "bf16"], ["sdpa", "naive"], ["train", "fwd"])),
    *((sizes, *way) for sizes in REAL[1:] for way in (("fp32", "sdpa", "train"), ("bf16", "naive", "train"))),
]


@pytest.mark.parametrize(("sizes", "precision", "attention", "mode"), WAYS)
def test_prediction_and_a_cpus_tensors(sizes: dict[str, int], precision: str, attention: str, mode: str):
    """Every moment, and every item at the peak, to within the few scalars of the loss."""
    how = {"precision": precision, "attention": attention, "mode": mode}
    compare(model(**sizes), "cpu", how, {"abs": 64}, memory.ITEMS)


@pytest.mark.parametrize(("precision", "attention"), [("fp32", "naive"), ("bf16", "naive"), ("bf16", "sdpa")])
def test_what_a_gpu_does_otherwise_done_on_a_cpu(monkeypatch: pytest.MonkeyPatch, precision: str, attention: str):
    """Softmax in fp32 under autocast and foreach AdamW: the prediction for a GPU, to 0.1%."""
    torch = pytest.importorskip("torch")
    softmax, adamw = torch.nn.functional.softmax, torch.optim.AdamW
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, **_: softmax(x.float(), dim=dim))
    monkeypatch.setattr(torch.optim, "AdamW", functools.partial(adamw, foreach=True))
    c = model(context=128, d_model=256, d_ff=512, vocabulary=640)
    items = ("weights", "gradients", "optimizer states", "activations", "logits", "autocast cache")
    compare(c, "cuda", {"precision": precision, "attention": attention}, {"rel": 1e-3}, items)
