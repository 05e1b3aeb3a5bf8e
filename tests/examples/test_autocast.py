"""What autocast casts: types and bytes of a model's tensors, against closed formulas and PyTorch's own lists."""

from __future__ import annotations

import pandas as pd
import pytest

torch = pytest.importorskip("torch")

from _lib import autocast, autocast_types  # noqa: E402

SIZES = {"vocabulary": 96, "hidden": 16, "layers": 3, "heads": 2, "context": 8, "batch": 2}
PARAMETERS = 2 * 96 * 16 + 3 * (12 * 16**2 + 4 * 16)
TOKENS = 2 * 8


def look(norm: str) -> pd.DataFrame:
    with autocast.run("cpu", norm=norm, **SIZES) as work:
        return pd.DataFrame(work.rows())


@pytest.fixture(scope="module")
def written() -> pd.DataFrame:
    return look("written")


@pytest.fixture(scope="module")
def fused() -> pd.DataFrame:
    return look("fused")


def only(rows: pd.DataFrame, what: str, precision: str, name: str = "") -> tuple[str, float]:
    """Type and bytes of tensors that have one type."""
    chosen = rows[(rows["what"] == what) & (rows["precision"] == precision) & (rows["name"] == name)]
    assert chosen["type"].nunique() == 1
    return chosen["type"].iloc[0], chosen["bytes"].sum()


def losses(rows: pd.DataFrame, precision: str) -> list[float]:
    return rows[(rows["what"] == "loss") & (rows["precision"] == precision)]["value"].tolist()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_what_the_optimizer_sees_stays_fp32(written: pd.DataFrame, precision: str) -> None:
    assert only(written, "parameter", precision) == ("fp32", 4 * PARAMETERS)
    assert only(written, "parameter gradient", precision) == ("fp32", 4 * PARAMETERS)
    dtype, size = only(written, "optimizer", precision)
    counters = 4 * len(written[(written["what"] == "parameter") & (written["precision"] == precision)])
    assert (dtype, size) == ("fp32", 8 * PARAMETERS + counters)


@pytest.mark.parametrize("norm", ["written", "fused"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_types_are_as_a_cpus_list_says(request: pytest.FixtureRequest, norm: str, precision: str) -> None:
    rows = request.getfixturevalue(norm)
    expected = autocast_types.in_model(autocast_types.CPU, norm)
    for what in ("output", "gradient"):
        seen = autocast_types.types(rows, what)[precision].map(autocast_types.by_bits)
        assert seen.to_dict() == {name: dtype for name, (dtype, _) in expected.items()}


def test_single_operations_are_as_a_cpus_list_says(written: pd.DataFrame) -> None:
    tried = written[written["what"] == "operation"]
    assert len(tried) == 2 * 2 * 15
    for row in tried.itertuples():
        given = autocast_types.by_bits(row.input)
        assert autocast_types.by_bits(row.type) == autocast_types.result(autocast_types.CPU, row.name, given), row.name


def test_bytes_are_those_of_the_shapes(written: pd.DataFrame) -> None:
    assert only(written, "output", "fp32", "logits") == ("fp32", TOKENS * 96 * 4)
    assert only(written, "output", "bf16", "logits") == ("bf16", TOKENS * 96 * 2)
    assert only(written, "output", "bf16", "scores") == ("bf16", 3 * 2 * 2 * 8 * 8 * 2)


def test_what_backward_keeps(written: pd.DataFrame, fused: pd.DataFrame) -> None:
    whole, narrow = autocast_types.kept(written), autocast_types.kept(fused)
    matrices = 96 * 16 + 3 * 12 * 16**2  # the embedding is looked up, not multiplied
    assert whole.loc["weight copy, half precision", "bf16"] == 2 * matrices
    assert whole.loc["weight copy, half precision", "fp32"] == 0
    activations = whole[whole.index.str.startswith("activation")].sum()
    assert activations["fp32"] / 2 < activations["bf16"] < activations["fp32"]
    less = narrow[narrow.index.str.startswith("activation")].sum()
    assert (less < activations).all()


def test_a_fused_norm_is_the_same_norm(written: pd.DataFrame, fused: pd.DataFrame) -> None:
    for precision, close in (("fp32", 1e-5), ("bf16", 2e-2), ("fp16", 2e-3)):
        losses = [
            rows[(rows["what"] == "loss") & (rows["precision"] == precision)]["value"] for rows in (written, fused)
        ]
        assert losses[0].tolist() == pytest.approx(losses[1].tolist(), rel=close)
        assert losses[0].iloc[-1] < losses[0].iloc[0]


def test_saved_storages_are_counted_once() -> None:
    model = autocast.Model(autocast.Sizes(**SIZES))
    x = torch.ones(10, requires_grad=True)
    rows: list[dict[str, object]] = []
    with autocast.saved(model, rows):
        y = x * 2
        (y * y + y.view(2, 5).flatten() * y.exp()).sum().backward()
    # y once, though four operations keep it, and the result of exp.
    assert [(row["name"], row["type"], row["bytes"]) for row in rows] == 2 * [("activation", "fp32", 40)]
