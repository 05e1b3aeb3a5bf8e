"""What one decode step of a mixture of experts reads, part by part, and how fast (page 18)."""

from __future__ import annotations

import json
import re

import pandas as pd

from nsightkit.api import Trace

#: Of gpt-oss-20b, from its published configuration: width of an expert, experts per token, and tokens that a layer with
#: a sliding window looks at. All else is in the traces.
EXPERT_WIDTH, CHOSEN, WINDOW = 2880, 4, 128
#: mxfp4 stores 32 numbers of 4 bits with a scale of 8.
MXFP4_BYTES = 17 / 32
_BF16_BYTES = 2
#: Kernels of each part, by name; the matmul to the vocabulary is in the trace with its shape.
_KERNELS = {"experts": "matmul_ogs", "caches": "unified_attention", "attention weights": "^Cijk_"}


def parts(decode: Trace, capture: Trace, gb_per_s: float) -> pd.DataFrame:
    """Compare what each part of a step reads with the time of its kernels.

    Parameters
    ----------
    decode : Trace
        One step, replayed from a CUDA graph.
    capture : Trace
        The capture of that graph, which has the shapes.
    gb_per_s : float
        Of the card's memory.

    Returns
    -------
    DataFrame
        By part: ``bytes``, ``time_ns`` and ``share of bandwidth``. The kernels that read neither weights nor caches
        are the last part; their bytes are not known.
    """
    head = decode.sol(gpu="MI300X").iloc[0]
    kernels = decode.kernels()
    names = kernels["name"].astype(str)
    time_ns = {part: kernels.loc[names.str.contains(found), "total_ns"].sum() for part, found in _KERNELS.items()}
    time_ns["attention weights"] -= head["time_ns"]
    rows = {part: {"bytes": size, "time_ns": time_ns[part]} for part, size in _bytes(decode, capture).items()}
    rows["output head"] = {"bytes": head["bytes"], "time_ns": head["time_ns"]}
    table = pd.DataFrame(rows).T
    table.loc["all else"] = float("nan"), kernels["total_ns"].sum() - table["time_ns"].sum()
    table["share of bandwidth"] = table["bytes"] / table["time_ns"] / gb_per_s
    return table


def _bytes(decode: Trace, capture: Trace) -> dict[str, float]:
    """Give the bytes of the weights and caches of all layers."""
    operators = capture["ops"]
    matmuls = operators.loc[operators["name"] == "aten::addmm", "inputs"].astype(str)
    shapes = [json.loads(inputs)[0][2] for inputs in matmuls]  # of the weights: inputs, outputs
    experts = min(outputs for _, outputs in shapes)  # the router has an output for each
    router = [shape for shape in shapes if shape[1] == experts]
    layers, width = len(router), router[0][0]
    tokens = int(re.search(r"generation_\d+\(sq\d+sk(\d+)", str(decode["ranges"]["name"].iloc[0]))[1])
    sequences = int(decode.steps()["sequences"].iloc[0])
    written = operators.loc[operators["name"] == "_C_cache_ops::reshape_and_cache_flash", "inputs"].astype(str)
    _, heads, head_width = json.loads(written.iloc[0])[0][0]
    seen = layers / 2 * tokens + layers / 2 * sequences * min(WINDOW, tokens / sequences)
    return {
        "experts": layers * experts * 3 * width * EXPERT_WIDTH * MXFP4_BYTES,
        "attention weights": _BF16_BYTES * sum(inputs * outputs for inputs, outputs in shapes),
        "caches": 2 * _BF16_BYTES * heads * head_width * seen,
    }
