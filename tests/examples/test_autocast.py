"""What autocast casts: types and bytes of a model's tensors, against closed formulas and PyTorch's own lists."""

from __future__ import annotations

import pandas as pd
import pytest

torch = pytest.importorskip("torch")

from _lib import autocast, autocast_types  # noqa: E402

SIZES = {"vocabulary": 96, "hidden": 16, "layers": 3, "heads": 2, "context": 8, "batch": 2}
PARAMETERS = 2 * 96 * 16 + 3 * (12 * 16**2 + 4 * 16)
TOKENS = 2 * 8


@pytest.fixture(scope="module")
def tables() -> dict[str, pd.DataFrame]:
    tables = {}
    for norm in ("written", "fused"):
        with autocast.run("cpu", norm=norm, **SIZES) as work:
            tables[norm] = pd.DataFrame(work.rows())
    return tables


def only(rows: pd.DataFrame, what: str, precision: str, name: str = "") -> tuple[str, float]:
    """Type and bytes of tensors that have one type."""
    chosen = rows[(rows["what"] == what) & (rows["precision"] == precision) & (rows["name"] == name)]
    assert chosen["type"].nunique() == 1
    return chosen["type"].iloc[0], chosen["bytes"].sum()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_what_the_optimizer_sees_stays_fp32(tables: dict[str, pd.DataFrame], precision: str):
    rows = tables["written"]
    assert only(rows, "parameter", precision) == ("fp32", 4 * PARAMETERS)
    assert only(rows, "parameter gradient", precision) == ("fp32", 4 * PARAMETERS)
    counters = 4 * len(rows[(rows["what"] == "parameter") & (rows["precision"] == precision)])
    assert only(rows, "optimizer", precision) == ("fp32", 8 * PARAMETERS + counters)


@pytest.mark.parametrize("norm", ["written", "fused"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_types_are_as_a_cpus_list_says(tables: dict[str, pd.DataFrame], norm: str, precision: str):
    expected = autocast_types.in_model(autocast_types.CPU, norm)
    for what in ("output", "gradient"):
        seen = autocast_types.types(tables[norm], what)[precision].map(autocast_types.by_bits)
        assert seen.to_dict() == {name: dtype for name, (dtype, _) in expected.items()}


def test_single_operations_are_as_a_cpus_list_says(tables: dict[str, pd.DataFrame]):
    tried = tables["written"].query("what == 'operation'")
    assert len(tried) == 2 * 2 * 15
    for row in tried.itertuples():
        given = autocast_types.by_bits(row.input)
        assert autocast_types.by_bits(row.type) == autocast_types.result(autocast_types.CPU, row.name, given), row.name


def test_bytes_are_those_of_the_shapes(tables: dict[str, pd.DataFrame]):
    for precision, kind, size in (("fp32", "fp32", 4), ("bf16", "bf16", 2)):
        assert only(tables["written"], "output", precision, "logits") == (kind, TOKENS * 96 * size)
        assert only(tables["written"], "output", precision, "scores") == (kind, 3 * 2 * 2 * 8 * 8 * size)


def test_what_backward_keeps(tables: dict[str, pd.DataFrame]):
    whole, narrow = (autocast_types.kept(tables[norm]) for norm in ("written", "fused"))
    matrices = 96 * 16 + 3 * 12 * 16**2  # the embedding is looked up, not multiplied
    assert whole.loc["half precision", "fp32"] == 0
    assert whole.loc["half precision", "bf16"] > 2 * matrices  # the copies of the weights
    assert (narrow.sum() < whole.sum()).all()


@pytest.mark.parametrize(("precision", "close"), [("fp32", 1e-5), ("bf16", 2e-2), ("fp16", 2e-3)])
def test_a_fused_norm_is_the_same_norm(tables: dict[str, pd.DataFrame], precision: str, close: float):
    losses = {}
    for norm, rows in tables.items():
        losses[norm] = rows[(rows["what"] == "loss") & (rows["precision"] == precision)]["value"].tolist()
    assert losses["written"] == pytest.approx(losses["fused"], rel=close)
    assert losses["written"][-1] < losses["written"][0]


def test_saved_storages_are_counted_once():
    model = autocast.Model(autocast.Sizes(**SIZES))
    x = torch.ones(10, requires_grad=True)
    rows: list[dict[str, object]] = []
    with autocast.saved(model, rows):
        y = x * 2
        (y * y + y.view(2, 5).flatten() * y.exp()).sum().backward()
    # y once, though four operations keep it, and the result of exp.
    assert [(row["type"], row["bytes"]) for row in rows] == 2 * [("fp32", 40)]
