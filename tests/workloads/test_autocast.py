"""What autocast casts: types and bytes of a model's tensors, against closed formulas and PyTorch's own lists."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from nsightkit.workloads import autocast  # noqa: E402
from nsightkit.workloads.autocast import AutocastConfig, Model  # noqa: E402

SIZES = {"vocabulary": 96, "hidden": 16, "layers": 3, "heads": 2, "context": 8, "batch": 2}
PARAMETERS = 2 * 96 * 16 + 3 * (12 * 16**2 + 4 * 16)
TOKENS = 2 * 8
Found = dict[str, list[float]]


def look(norm: str) -> Found:
    with autocast.start("cpu", norm=norm, **SIZES) as work:
        work.step()
        return work.observed()


@pytest.fixture(scope="module")
def written() -> Found:
    return look("written")


@pytest.fixture(scope="module")
def fused() -> Found:
    return look("fused")


def only(found: Found, start: str) -> tuple[str, float]:
    """Type and bytes of what there is one type of."""
    kinds = [name for name in found if name.startswith(start + "/")]
    assert len(kinds) == 1, kinds
    return kinds[0].rpartition("/")[2], sum(found[kinds[0]])


def kept(found: Found, precision: str, kind: str) -> float:
    return sum(sum(v) for k, v in found.items() if k.startswith(f"saved/{precision}/{kind}/"))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_what_the_optimizer_sees_stays_fp32(written: Found, precision: str) -> None:
    assert only(written, f"parameter/{precision}") == ("fp32", 4 * PARAMETERS)
    assert only(written, f"parameter gradient/{precision}") == ("fp32", 4 * PARAMETERS)
    kind, size = only(written, f"optimizer/{precision}")
    counters = 4 * len(written[f"parameter/{precision}/fp32"])
    assert (kind, size) == ("fp32", 8 * PARAMETERS + counters)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_types_of_a_step(written: Found, fused: Found, precision: str) -> None:
    for role in ("linear", "scores", "weighted", "gelu", "logits"):
        assert only(written, f"output/{precision}/{role}")[0] == precision
        assert only(written, f"gradient/{precision}/{role}")[0] == precision
    for role in ("embedding", "residual", "norm", "loss"):
        assert only(written, f"output/{precision}/{role}")[0] == "fp32"
        assert only(written, f"gradient/{precision}/{role}")[0] == "fp32"
    # a CPU's autocast has neither on a list
    assert only(written, f"output/{precision}/softmax")[0] == precision
    assert only(fused, f"output/{precision}/norm")[0] == precision


def test_bytes_are_those_of_the_shapes(written: Found) -> None:
    assert only(written, "output/fp32/logits") == ("fp32", TOKENS * 96 * 4)
    assert only(written, "output/bf16/logits") == ("bf16", TOKENS * 96 * 2)
    assert only(written, "output/bf16/scores") == ("bf16", 3 * 2 * 2 * 8 * 8 * 2)
    assert len(written["output/bf16/linear/bf16"]) == 3 * 4
    assert len(written["output/bf16/norm/fp32"]) == 3 * 2


def test_activations_shrink_to_no_less_than_half(written: Found) -> None:
    whole, half = kept(written, "fp32", "activation"), kept(written, "bf16", "activation")
    assert whole / 2 < half < whole


def test_casting_keeps_a_copy_of_each_matrix(written: Found) -> None:
    matrices = 96 * 16 + 3 * 12 * 16**2  # the embedding is looked up, not multiplied
    assert kept(written, "bf16", "weight copy") == 2 * matrices
    assert len(written["saved/bf16/weight copy/bf16"]) == 3 * 4 + 1
    assert kept(written, "fp32", "weight copy") == 0


def test_a_fused_norm_is_the_same_norm_and_keeps_less(written: Found, fused: Found) -> None:
    assert kept(fused, "bf16", "activation") < kept(written, "bf16", "activation")
    assert kept(fused, "fp32", "activation") < kept(written, "fp32", "activation")
    for precision, close in (("fp32", 1e-5), ("bf16", 2e-2), ("fp16", 2e-3)):
        assert fused[f"loss/{precision}"] == pytest.approx(written[f"loss/{precision}"], rel=close)


def test_saved_storages_are_counted_once() -> None:
    model = Model(AutocastConfig(**SIZES))
    x = torch.ones(10, requires_grad=True)
    with autocast.saved(model) as found:
        y = x * 2
        (y * y + y.view(2, 5).flatten() * y.exp()).sum().backward()
    # y once, though four operations keep it, and exp's result
    assert found == {("activation", "fp32"): [40, 40]}


def test_operations_of_a_cpu() -> None:
    found = autocast.probe("cpu", "bf16")
    for given in ("bf16", "fp32"):
        for name in ("linear", "matmul", "scaled_dot_product_attention"):
            assert found[name, given] == "bf16"
        assert found["cross_entropy", given] == "fp32"
        assert found["product with an fp32 weight", given] == "fp32"
        for name in ("softmax", "layer_norm", "rms_norm", "pow", "mean", "gelu", "exp"):
            assert found[name, given] == given


def test_hooks_are_taken_off_again() -> None:
    with autocast.start("cpu", **SIZES) as work:
        work.step()
        first = work.observed()
        second = work.observed()
    for name, values in first.items():
        assert name.startswith("loss") or values == second[name]


def test_precisions_of_a_cpu(written: Found) -> None:
    assert autocast.precisions("cpu")[:2] == ["fp32", "bf16"]
    assert {name.split("/")[1] for name in written if name.startswith("output")} == set(autocast.precisions("cpu"))


def test_losses_fall(written: Found) -> None:
    with autocast.start("cpu", **SIZES) as work:
        for _ in range(20):
            work.step()
        losses = work.observed()
    for precision in autocast.precisions("cpu"):
        values = losses[f"loss/{precision}"]
        assert values[-1] < values[0]


@pytest.mark.gpu
def test_operations_of_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    found = autocast.probe("cuda", "fp16")
    for name in ("softmax", "log_softmax", "layer_norm", "pow", "rsqrt", "exp", "sum", "cross_entropy"):
        assert found[name, "fp16"] == "fp32"
    for name in ("linear", "matmul", "scaled_dot_product_attention"):
        assert found[name, "fp32"] == "fp16"
