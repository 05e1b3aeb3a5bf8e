"""Types under autocast: what a device's lists ask for, and what a run had (page 06)."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

#: The list of a CPU, as PyTorch 2.13 has it; all else follows its inputs there.
CPU = {
    "linear": "half precision",
    "matmul": "half precision",
    "scaled_dot_product_attention": "half precision",
    "nll_loss": "fp32",
}


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
