r"""What a model must cost, worked out before it runs: parameters, FLOPs, memory, alignment.

With M = batch · context tokens, d = ``d_model``, F = ``d_ff``, h heads, L layers, S = context, B = batch and
vocabulary V, of a decoder with RMSNorm, rotary positions, a gated MLP, an untied head and no biases::

    parameters   2Vd + L(4d² + 3dF + 2d) + d
    forward      L[2M(4d² + 3dF) + 4BS²d] + 2MdV FLOPs
    training     three times forward: the backward pass has two GEMMs for each of the forward's

Attention is counted as the full square, as every kernel's FLOP count is quoted; a causal kernel may skip
nearly half of it. The embedding is a lookup and has no FLOPs, which is why ``6·parameters·tokens`` is wrong
for small models. The optimizer's 10 to 15 operations a parameter are left out.

Memory is for bf16 autocast with AdamW in fp32, as in :mod:`nsightkit.workloads.lm`::

    state        16 B a parameter: weights 4, gradients 4, AdamW's two moments 8
    cast cache   2 B a weight of a GEMM: autocast keeps its copies until the region ends
    activations  LM(36d + 8F + 4h) B, and 10·LBhS² B more with naive attention
    logits       14·MV B: 2 in bf16, 4 for the fp32 copy, 4 for the softmax, 4 for its gradient

It is a rule of thumb for models of this kind. State, cache and logits are counted; the coefficients of the activations
were fitted to what autograd saves (``torch.autograd.graph.saved_tensors_hooks``), with a margin for the scores. What
:mod:`nsightkit.workloads.lm` itself keeps, operator by operator and moment by moment, is in
page 11 of the guide: 36d as here, but 6 B a score, and no gradients yet when activations are at
their most.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import pandas as pd

from nsightkit.configurations import MATRIX, Configuration

#: In elements of 2 B. bf16 and fp16 GEMMs load 16 B at a time: K and the leading dimensions must be multiples of this.
ALIGNMENT = 8
#: Widest head flash attention has a kernel for.
_FLASH_HEAD = 256

#: Dimensions of GEMMs and attention; `tokens` is the K of each gradient of a weight.
_DIMENSIONS = ("d_model", "d_ff", "vocabulary", "tokens", "d_head", "context")


class Envelope(NamedTuple):
    """The cost of one step of a configuration.

    Parameters
    ----------
    configuration : Configuration
    params : int
    state_bytes, cache_bytes, activation_bytes, score_bytes, logits_bytes : int
        The memory ledger; `activation_bytes` is without scores, `score_bytes` what writing them out adds.
    attention_flops, head_flops, fwd_flops : int
        FLOPs of one forward pass: QKᵀ and attention·V, the output head, and all.
    """

    configuration: Configuration
    params: int
    state_bytes: int
    cache_bytes: int
    activation_bytes: int
    score_bytes: int
    logits_bytes: int
    attention_flops: int
    head_flops: int
    fwd_flops: int

    @property
    def train_flops(self) -> int:
        """FLOPs of forward and backward."""
        return 3 * self.fwd_flops

    def peak_bytes(self, *, scores: bool = False) -> int:
        """Bytes at the end of the forward pass, when everything is alive.

        Parameters
        ----------
        scores : bool
            Whether attention is naive (as in SDPA's math backend) and stores its scores.

        Returns
        -------
        int
        """
        saved_bytes = self.activation_bytes + (self.score_bytes if scores else 0)
        return self.state_bytes + self.cache_bytes + saved_bytes + self.logits_bytes


def envelope(configuration: Configuration) -> Envelope:
    """Reckon the parameters, FLOPs and memory of one step, by the formulas of the module's docstring.

    Parameters
    ----------
    configuration : Configuration

    Returns
    -------
    Envelope
    """
    c = configuration
    # The bytes per parameter, token or logit below are explained in the module's docstring.
    layer_gemm_params = c.d_model * (4 * c.d_model + 3 * c.d_ff)
    head_params = c.vocabulary * c.d_model  # and as many for the embedding, which is no GEMM
    gemm_params = c.layers * layer_gemm_params + head_params
    norm_params = c.layers * 2 * c.d_model + c.d_model
    params = gemm_params + head_params + norm_params
    scores_per_head = c.layers * c.batch * c.context**2
    attention_flops = 4 * scores_per_head * c.d_model
    return Envelope(
        configuration=c,
        params=params,
        state_bytes=16 * params,
        cache_bytes=2 * gemm_params,
        activation_bytes=c.layers * c.tokens * (36 * c.d_model + 8 * c.d_ff + 4 * c.heads),
        score_bytes=10 * scores_per_head * c.heads,
        logits_bytes=14 * c.tokens * c.vocabulary,
        attention_flops=attention_flops,
        head_flops=2 * c.tokens * head_params,
        fwd_flops=2 * c.tokens * gemm_params + attention_flops,
    )


def misaligned(configuration: Configuration) -> list[str]:
    """List the dimensions that do not suit bf16 and fp16 tensor cores.

    The rule is 16 bytes, which is 8 elements; larger powers of two only make fuller tiles.

    Parameters
    ----------
    configuration : Configuration

    Returns
    -------
    list of str
    """
    return [name for name in _DIMENSIONS if getattr(configuration, name) % ALIGNMENT]


def summary(configurations: Iterable[Configuration] = MATRIX) -> pd.DataFrame:
    """Reckon the cost of a step of each configuration.

    Parameters
    ----------
    configurations : iterable of Configuration
        The ten of the matrix by default.

    Returns
    -------
    DataFrame
        ``config, params, state_bytes, activation_bytes, logits_bytes, peak_bytes, fwd_flops, train_flops,
        aligned, notes``. Activations and peak are those of flash attention; where a configuration cannot have
        it, its notes (a list) give the peak with the scores. The peak holds autocast's cast cache too.
    """
    rows = []
    for configuration in configurations:
        cost = envelope(configuration)
        rows.append(
            {
                "config": configuration.name,
                "params": cost.params,
                "state_bytes": cost.state_bytes,
                "activation_bytes": cost.activation_bytes,
                "logits_bytes": cost.logits_bytes,
                "peak_bytes": cost.peak_bytes(),
                "fwd_flops": cost.fwd_flops,
                "train_flops": cost.train_flops,
                "aligned": not misaligned(configuration),
                "notes": _notes_on_configuration(cost),
            }
        )
    return pd.DataFrame(rows)


def _notes_on_configuration(cost: Envelope) -> list[str]:
    """Write what a configuration is for, and what is unusual about its cost."""
    c = cost.configuration
    notes = [c.intent]
    misaligned_dimensions = [f"{name} {getattr(c, name)}" for name in misaligned(c)]
    if misaligned_dimensions:
        notes.append(f"not a multiple of {ALIGNMENT}: {', '.join(misaligned_dimensions)}")
    if c.d_head > _FLASH_HEAD:
        peak = f"{cost.peak_bytes(scores=True) / 1e9:.2f} GB"
        notes.append(f"no flash attention takes heads of {c.d_head}: with the scores stored, the peak is {peak}")
    return notes
