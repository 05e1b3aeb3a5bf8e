"""Types under autocast: what a device's lists ask for, what backward keeps, and what a run had (page 06)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

if TYPE_CHECKING:
    from nsightkit.guide import Measurement

#: The operations that the page looks up.
OF_A_TRANSFORMER = (
    *("linear", "matmul", "scaled_dot_product_attention"),
    *("softmax", "log_softmax", "nll_loss", "layer_norm", "rms_norm"),
    *("pow", "rsqrt", "exp", "sum", "mean", "gelu"),
)
#: What a list of PyTorch's header gives.
_GIVES = {"LOWER_PRECISION_FP": "half precision", "FP32": "fp32", "FP32_SET_OPT_DTYPE": "fp32"}

#: The list of a CPU, as PyTorch 2.13 has it; all else follows its inputs there.
CPU = {
    "linear": "half precision",
    "matmul": "half precision",
    "scaled_dot_product_attention": "half precision",
    "nll_loss": "fp32",
}


def cuda_lists() -> dict[str, str]:
    """Read CUDA's lists from the header that PyTorch ships.

    Returns
    -------
    dict of str to str
        ``half precision`` or ``fp32``, by operation.
    """
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    lists = re.findall(r"#define AT_FORALL_(\w+)\(_\)((?:.*\\\n)+.*)", header.read_text(encoding="utf-8"))
    rules = {}
    for name, text in lists:
        if name in _GIVES:
            rules |= dict.fromkeys(re.findall(r"_\((\w+)", text), _GIVES[name])
    return rules


def saved_by(function: Callable[[Tensor], Tensor], x: Tensor) -> pd.Series:
    """Count the bytes that a function's backward pass needs, each storage once.

    Parameters
    ----------
    function : callable
    x : Tensor

    Returns
    -------
    Series
        Bytes by ``fp32`` and ``half precision``.
    """
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        bits = "fp32" if tensor.itemsize == 4 else "half precision"
        storages[storage.data_ptr()] = (bits, storage.nbytes())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        function(x)
    sizes = pd.DataFrame(storages.values(), columns=["type", "bytes"])
    return sizes.groupby("type")["bytes"].sum()


def by_bits(dtype: str) -> str:
    """Give bf16 and fp16 one name.

    Examples
    --------
    >>> by_bits("bf16"), by_bits("fp32")
    ('half precision', 'fp32')
    """
    return "half precision" if dtype in ("bf16", "fp16") else dtype


def result(rules: Mapping[str, str], operation: str, given: str) -> str:
    """Give the type of an operation's result: the list's, or else the input's.

    Parameters
    ----------
    rules : mapping of str to str
        ``half precision`` or ``fp32``, by operation.
    operation, given : str

    Examples
    --------
    >>> result({"softmax": "fp32"}, "softmax", "half precision"), result({}, "gelu", "half precision")
    ('fp32', 'half precision')
    """
    if operation == "product with an fp32 weight":
        return "fp32"
    if operation == "cross_entropy":  # it calls log_softmax, and then this
        operation = "nll_loss"
    return rules.get(operation, given)


def in_model(rules: Mapping[str, str], norm: str) -> dict[str, tuple[str, str]]:
    """Give the types in a model whose norms get what a projection wrote, each with the reason.

    Parameters
    ----------
    rules : mapping of str to str
    norm : {"written", "fused"}

    Returns
    -------
    dict of str to (str, str)
    """
    matmul = (rules["matmul"], "matmuls are on the list")
    if norm == "written":
        normed = ("fp32", "ends in a product with its fp32 weight")
    else:
        normed = _listed_or_following(rules, "layer_norm")
    return {
        "embedding": ("fp32", "on no list, and its weight is fp32"),
        "linear": (rules["linear"], "matmuls are on the list"),
        "scores": matmul,
        "softmax": _listed_or_following(rules, "softmax"),
        "weighted": matmul,
        "norm": normed,
        "gelu": _listed_or_following(rules, "gelu"),
        "residual": ("fp32", "fp32 of the embedding plus anything"),
        "logits": (rules["linear"], "matmuls are on the list"),
        "loss": ("fp32", "on the list"),
    }


def _listed_or_following(rules: Mapping[str, str], operation: str) -> tuple[str, str]:
    reason = "on the list" if operation in rules else "on no list, follows its input"
    return result(rules, operation, "half precision"), reason


def types(rows: pd.DataFrame, what: str) -> pd.DataFrame:
    """Give the types of the tensors of one kind.

    Parameters
    ----------
    rows : DataFrame
        Of :func:`_lib.autocast.run`.
    what : {"output", "gradient"}

    Returns
    -------
    DataFrame
        A column per precision, a row per name; several types are joined by commas.
    """
    chosen = rows[rows["what"] == what]
    joined = chosen.groupby(["name", "precision"], sort=False)["type"].agg(lambda seen: ", ".join(sorted(set(seen))))
    return joined.unstack()[list(dict.fromkeys(chosen["precision"]))]


def kept(rows: pd.DataFrame) -> pd.DataFrame:
    """Add up the bytes that are kept for backward, without the parameters.

    Parameters
    ----------
    rows : DataFrame

    Returns
    -------
    DataFrame
        A column per precision, a row per type (by bits).
    """
    saved = rows[rows["what"] == "saved"]
    sums = saved["bytes"].groupby([saved["type"].map(by_bits), saved["precision"]]).sum()
    return sums.unstack(fill_value=0)[list(dict.fromkeys(saved["precision"]))]


def _rules(run: Measurement, cuda: Mapping[str, str]) -> dict[str, str]:
    """Give the list of the device that ran, as the version that measured has it."""
    if run.gpu is None:
        return dict(CPU)
    rules = dict(cuda)
    listed = run.rows.loc[run.rows["what"] == "listed", "value"]
    if not (listed == 1).any():
        rules.pop("rms_norm", None)
    return rules


def compared(runs: Sequence[Measurement], cuda: Mapping[str, str]) -> pd.DataFrame:
    """Give the expected and the observed types of the model's tensors.

    Parameters
    ----------
    runs : sequence of Measurement
    cuda : mapping of str to str
        Of :func:`cuda_lists`.

    Returns
    -------
    DataFrame
        ``tensor, norm, expected`` and a column for each precision of the outputs and the gradients.
    """
    tables = []
    for run in runs:
        norm = run.parameters["norm"]
        expected = {name: kind for name, (kind, _) in in_model(_rules(run, cuda), norm).items()}
        table = pd.DataFrame({"norm": norm, "expected": expected})
        for what in ("output", "gradient"):
            observed = types(run.rows, what)
            for precision in observed.columns.drop("fp32", errors="ignore"):
                table[f"{what}, {precision}"] = observed[precision]
        tables.append(table.rename_axis("tensor").reset_index())
    return pd.concat(tables) if tables else pd.DataFrame()


def kept_by_run(runs: Sequence[Measurement]) -> dict[str, pd.Series]:
    """Give what each run keeps for backward, by type, for each norm and precision."""
    columns = {}
    for run in runs:
        for precision, sizes in kept(run.rows).items():
            columns[f"{run.parameters['norm']}, {precision}"] = sizes
    return columns


def owned(run: Measurement) -> pd.DataFrame:
    """Give the types and bytes of parameters, their gradients and the optimizer's state; empty if nothing ran."""
    if not run:
        return pd.DataFrame()
    rows = run.rows[run.rows["what"].isin(("parameter", "parameter gradient", "optimizer"))]
    return rows.groupby(["what", "precision", "type"], sort=False)["bytes"].sum().reset_index()


def answer(runs: Sequence[Measurement], cuda: Mapping[str, str]) -> str:
    """Say what stayed fp32, what backward keeps, and how many types were as the lists have them.

    Parameters
    ----------
    runs : sequence of Measurement
        With the hand-written norm, and with the fused one.
    cuda : mapping of str to str
    """
    first = runs[0]
    total = {name: sizes.sum() for name, sizes in kept_by_run(runs).items()}
    cast = next(precision for precision in first.rows["precision"].unique() if precision != "fp32")
    was, now = (total[f"{norm}, {cast}"] / total["written, fp32"] for norm in ("written", "fused"))
    losses = [run.rows.loc[run.rows["what"] == "loss", "value"].to_numpy() for run in runs]
    apart = abs(losses[0] - losses[1]).max()
    stayed = "stayed" if set(owned(first)["type"]) == {"fp32"} else "did not all stay"
    right = _as_listed(runs, cuda)
    return (
        f"Parameters, their gradients and the optimizer's state {stayed} fp32. What {cast} keeps for backward took "
        f"{was:.0%} of fp32's bytes, and {now:.0%} with a fused norm; the losses differ by at most {apart:.1g}. "
        f"{sum(right)} of {len(right)} types were as the lists for {'a CPU' if first.gpu is None else 'CUDA'} say."
    )


def _as_listed(runs: Sequence[Measurement], cuda: Mapping[str, str]) -> list[bool]:
    """Say for each operation that was tried, and each output of the model, whether the list gave its type."""
    first, right = runs[0], []
    rules = _rules(first, cuda)
    for row in first.rows[first.rows["what"] == "operation"].itertuples():
        right.append(by_bits(row.type) == result(rules, row.name, by_bits(row.input)))
    table = compared(runs, cuda)
    for column in table.filter(like="output"):
        right += list(table[column].map(by_bits) == table["expected"])
    return right
