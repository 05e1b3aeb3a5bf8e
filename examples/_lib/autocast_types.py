"""Types under autocast: which the lists of a device ask for, and which a run had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

__all__ = ["CPU", "by_bits", "in_model", "kept", "operation", "result", "seen"]

#: What stands on the list of a CPU, as PyTorch 2.13 has it; all else follows its inputs there.
CPU: Mapping[str, str] = {
    **dict.fromkeys(("linear", "matmul", "scaled_dot_product_attention"), "16 bits"),
    "nll_loss": "fp32",
}


def by_bits(kind: str) -> str:
    """Call both 16-bit types the same.

    Parameters
    ----------
    kind : str

    Examples
    --------
    >>> by_bits("bf16"), by_bits("fp32")
    ('16 bits', 'fp32')
    """
    return "16 bits" if kind in ("bf16", "fp16") else kind


def result(rules: Mapping[str, str], operation: str, given: str) -> str:
    """Give the type of an operation's result: what the list says, else that of the input.

    Parameters
    ----------
    rules : mapping of str to str
        ``16 bits`` or ``fp32`` by the name of an operation.
    operation, given : str

    Examples
    --------
    >>> result({"softmax": "fp32"}, "softmax", "16 bits"), result({}, "gelu", "16 bits")
    ('fp32', '16 bits')
    """
    return rules.get(operation, given)


def operation(rules: Mapping[str, str], name: str, given: str) -> str:
    """Give the type of what :func:`nsightkit.workloads.autocast.probe` tries under a name.

    Parameters
    ----------
    rules : mapping of str to str
    name, given : str
    """
    if name == "product with an fp32 weight":
        return "fp32"
    return result(rules, "nll_loss" if name == "cross_entropy" else name, given)


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
    product = "matrix products are on the list"
    fused = result(rules, "layer_norm", "16 bits")
    written = ("fp32", "ends in a product with its fp32 weight")
    return {
        "embedding": ("fp32", "on no list, and its weight is fp32"),
        "linear": (rules["linear"], product),
        "scores": (rules["matmul"], product),
        "softmax": (result(rules, "softmax", "16 bits"), "on the list" if "softmax" in rules else "follows its input"),
        "weighted": (rules["matmul"], product),
        "norm": written if norm == "written" else (fused, "on the list" if fused == "fp32" else "follows its input"),
        "gelu": (result(rules, "gelu", "16 bits"), "on no list, follows its input"),
        "residual": ("fp32", "fp32 of the embedding plus anything"),
        "logits": (rules["linear"], product),
        "loss": ("fp32", "on the list"),
    }


def seen(samples: pd.DataFrame, what: str, names: Sequence[str]) -> pd.DataFrame:
    """Count the tensors of a kind and their bytes, as :class:`nsightkit.workloads.autocast.Autocast` noted them.

    Parameters
    ----------
    samples : DataFrame
        Of a measurement.
    what : str
        The first part of the metrics' names, such as ``output``.
    names : sequence of str
        What the parts after the precision are.

    Returns
    -------
    DataFrame
        ``precision``, `names`, ``tensors``, ``bytes``.
    """
    rows = samples[samples["metric"].str.startswith(f"{what}/")]
    sums = rows.groupby("metric", sort=False)["value"].agg(["count", "sum"])
    frame = pd.DataFrame([metric.split("/")[1:] for metric in sums.index], columns=["precision", *names])
    return frame.join(sums.set_axis(["tensors", "bytes"], axis=1).reset_index(drop=True))


def kept(samples: pd.DataFrame) -> pd.DataFrame:
    """Bytes that are kept for backward, without the parameters.

    Parameters
    ----------
    samples : DataFrame

    Returns
    -------
    DataFrame
        A column for each precision, a row for each kind and type.
    """
    frame = seen(samples, "saved", ["kind", "type"])
    frame = frame[frame["kind"] != "parameter"]
    named = frame["kind"] + ", " + frame["type"].map(by_bits)
    sums = frame["bytes"].groupby([named, frame["precision"]]).sum()
    return sums.unstack(fill_value=0)[list(frame["precision"].unique())]
