r"""Where the memory of a step goes: predicted item by item, moment by moment.

:mod:`_lib.ledger_step` runs a step through on paper. What is alive, by item, at each moment of the step,
and at the highest of them, is the ledger: a maximum over moments, never the sum of everything there ever is.

With M tokens, width d, MLP width F, h heads, context S, batch B, vocabulary V, L layers, P parameters and G of them
in GEMMs; ``a`` is 4 bytes in fp32 and 2 under bf16 or fp16 autocast. Kept for the backward pass, by a layer:

=====================  ==================  ======================================================================
two norms              16Md + 8M           the residual stream they read (fp32), what they normed, 1/rms
input of q, k, v       4Md, or 3 · 2Md     fp32 is shared; autocast casts the same tensor for each of the three
input of gate, up      4Md, or 2 · 2Md     likewise for two
attention, fused       4aMd + 4Mh          q, k, v, its result; log-sum-exp of each row
   its result, copied  aMd                 where it comes in another layout than the output projection reads
attention, naive       4aMd + 4BhS²        q, k, v, its result; softmax's result. Under autocast 6BhS² on a GPU,
                                           where softmax is fp32 and cast after, and 2BhS² on a CPU
MLP                    4aMF                gate, silu(gate), up, their product
=====================  ==================  ======================================================================

The last norm keeps 8Md + 4M and the input of the head. At the loss another ``aMV`` for the logits and up to 12MV for
copies in fp32: log-softmax and two gradients.

Parameters are fp32: 4P for weights, 4P for gradients (from the backward pass to ``zero_grad``), 8P for AdamW's two
moments. Autocast adds its cast cache, 2G: copies of weights, each kept by the GEMM that read it until its
derivative is done. ``foreach`` AdamW takes another 4P while it steps: the root of all second moments at once.

Sources:

- what each stage of ZeRO divides by the number of ranks: S. Rajbhandari, J. Rasley, O. Ruwase, Y. He, *ZeRO: Memory
  Optimizations Toward Training Trillion Parameter Models*, SC 2020;
- the size of a KV cache, and serving from 0.9 of a GPU's memory: W. Kwon et al., *Efficient Memory Management for Large
  Language Model Serving with PagedAttention*, SOSP 2023, and the default of its implementation, vLLM;
- blocks of multiples of 512 bytes: PyTorch, ``c10/cuda/CUDACachingAllocator.cpp``. One above 1 MiB may be up to 1 MiB
  longer than that, where the rest is not worth splitting off; this is not predicted;
- 32 MiB for a handle of cuBLAS on compute capability 9.0, 8.125 MiB on others: PyTorch,
  ``aten/src/ATen/cuda/CublasHandlePool.cpp``. The forward and the backward thread have a handle each.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import pandas as pd

from _lib.ledger_step import ITEMS, MOMENTS, OPTIMIZERS, WORDS, Options, run
from nsightkit.analysis.roofline.envelope import envelope
from nsightkit.configurations import Configuration
from nsightkit.hardware import Gpu

__all__ = [
    "ITEMS",
    "MOMENTS",
    "OPTIMIZERS",
    "kv_bytes_per_token",
    "largest_context",
    "moments",
    "predict",
    "serving",
]

#: Share of a GPU's memory that serving takes.
_USABLE = 0.9


def moments(configuration: Configuration, **how: Any) -> pd.DataFrame:
    """Predict what is alive at each moment of a step.

    Parameters
    ----------
    configuration : Configuration
    **how
        As for :func:`predict`.

    Returns
    -------
    DataFrame
        A row for each of ``MOMENTS`` that the mode has: ``moment``, ``total_bytes`` and a column for each of
        ``ITEMS``.

    Raises
    ------
    UsageError
        An argument has a value it cannot have.
    """
    return run(configuration, Options(**how))


def predict(configuration: Configuration, **how: Any) -> pd.DataFrame:
    """Predict the ledger of a step: every item at the moment when all together are highest.

    Parameters
    ----------
    configuration : Configuration
    precision : {"fp32", "tf32", "bf16", "fp16"}
        ``bf16`` and ``fp16`` are autocast over fp32 weights, as in :mod:`nsightkit.workloads.lm`.
    attention : {"sdpa", "naive"}
    mode : {"fwd", "fwd_bwd", "train"}
        Forward without a graph; with backward; with an optimizer's step.
    optimizer : {"adamw", "adamw-fused", "sgd-momentum", "sgd"}
        The first and the last two as PyTorch runs them by default on a GPU, with ``foreach``.
    device : {"cuda", "cpu"}
        They differ: a GPU's allocator gives out blocks of 512 bytes, cuBLAS has workspaces, ``foreach`` is the default,
        softmax is fp32 under autocast, and attention has other kernels. A CPU's steps are what TensorMemory counts.
    stage : {0, 1, 2, 3}
        What is divided among the ranks (ZeRO): nothing (DistributedDataParallel); optimizer states; gradients too;
        weights too. Arithmetic: no such run is measured here.
    ranks : int
    capability : str
        Compute capability, for the size of cuBLAS's workspace.

    Returns
    -------
    DataFrame
        ``item, predicted_bytes, largest_bytes, moment, alive, formula``: bytes at the peak, bytes at the item's own
        highest moment, the peak's moment, when the item is alive, and its size in words. The items sum to the peak.
        Slack, fragmentation and context do not follow from the model, so their bytes are missing.

    Raises
    ------
    UsageError
        An argument has a value it cannot have.
    """
    table = moments(configuration, **how).set_index("moment")
    moment = str(table["total_bytes"].idxmax())
    amounts = pd.DataFrame({"predicted_bytes": table.T[moment], "largest_bytes": table.max()}).astype("Int64")
    ledger = amounts.reindex(list(WORDS)).assign(moment=moment)
    words = pd.DataFrame(WORDS).T[["alive", "formula"]]
    return ledger.join(words).rename_axis("item").reset_index()


def largest_context(configuration: Configuration, limit_bytes: float, *, multiple: int = 64, **how: Any) -> int:
    """Forecast the longest context whose step fits.

    Parameters
    ----------
    configuration : Configuration
        Its context is replaced.
    limit_bytes : float
        What the allocator may give out.
    multiple : int
        Contexts are multiples of it.
    **how
        As for :func:`predict`.

    Returns
    -------
    int
        Tokens; 0 when not even `multiple` fits.
    """

    def is_too_long(count: int) -> bool:
        longer = dataclasses.replace(configuration, context=count * multiple)
        return bool(moments(longer, **how)["total_bytes"].max() > limit_bytes)

    too_long = 1
    while not is_too_long(too_long):
        too_long *= 2
    lengths = range(too_long // 2 + 1, too_long)
    return multiple * (too_long // 2 + bisect.bisect_left(lengths, True, key=is_too_long))


def kv_bytes_per_token(layers: int, kv_heads: int, d_head: int) -> int:
    """Size of the keys and values that serving keeps for each token of each sequence.

    Parameters
    ----------
    layers, kv_heads, d_head : int
        With grouped-query attention there are fewer heads of keys and values than of queries.

    Returns
    -------
    int
        In bf16 or fp16: ``2 · layers · kv_heads · d_head · 2``.
    """
    return 4 * layers * kv_heads * d_head


def serving(configuration: Configuration, gpu: Gpu, contexts: Iterable[int]) -> pd.DataFrame:
    """Estimate how many sequences of a length a GPU can serve at once, with weights and cache in bf16.

    Parameters
    ----------
    configuration : Configuration
        Its batch and context are not used.
    gpu : Gpu
        The largest memory it is sold with counts, and 0.9 of that: the rest is for context, libraries and
        fragmentation.
    contexts : iterable of int
        Tokens a sequence, prompt and answer.

    Returns
    -------
    DataFrame
        ``gpu, context, weights_bytes, kv_bytes_per_sequence, prefill_bytes, decode_bytes, largest_batch``. While a
        batch is decoded, one prompt at a time is prefilled; what one layer needs for it (in bf16 three of the width and
        three of the MLP's, or in attention eight of the width) lasts a moment. Decoding needs as much for one token of
        each sequence, and its logits in bf16 and in fp32. Missing when not even the weights fit.
    """
    c = configuration
    weights = 2 * envelope(c).params
    layer = max(16 * c.d_model, 6 * c.d_model + 6 * c.d_ff)  # bytes per token: attention, MLP
    table = pd.DataFrame({"gpu": gpu.name, "context": list(contexts), "weights_bytes": weights})
    table["kv_bytes_per_sequence"] = kv_bytes_per_token(c.layers, c.heads, c.d_head) * table["context"]
    table["prefill_bytes"] = layer * table["context"]
    table["decode_bytes"] = layer + 6 * c.vocabulary
    room = _USABLE * max(gpu.memory_gb) * 1e9 - weights
    if room <= 0:
        room = math.nan
    batch = (room - table["prefill_bytes"]) // (table["kv_bytes_per_sequence"] + table["decode_bytes"])
    table["largest_batch"] = batch.clip(0).astype("Int64")
    return table
