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
:mod:`nsightkit.analysis.memory.ledger`: 36d as here, but 6 B a score, and no gradients yet when activations are at
their most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pandas as pd

from nsightkit.configurations import MATRIX, Configuration

__all__ = ["ALIGNMENT", "Envelope", "alignment", "envelope", "summary"]

#: Elements. bf16 and fp16 GEMMs load 16 B at a time: K and the leading dimensions must be multiples of this.
ALIGNMENT = 8
#: Widest head flash attention has a kernel for, and the widths it has kernels for.
_FLASH_HEADS = (32, 64, 96, 128, 192, 256)

_COLUMNS = (
    *("config", "params", "state_bytes", "activation_bytes", "logits_bytes", "peak_bytes"),
    *("fwd_flops", "train_flops", "aligned", "notes"),
)


@dataclasses.dataclass(frozen=True)
class Envelope:
    """The cost of one step of a configuration.

    Parameters
    ----------
    configuration : Configuration
    params : int
    gemm_params : int
        Weights that a GEMM reads: all but the embedding and the norms.
    state_bytes, cache_bytes, activation_bytes, score_bytes, logits_bytes : int
        The memory ledger; `activation_bytes` is without scores, `score_bytes` what writing them out adds.
    attention_flops, head_flops, fwd_flops : int
        FLOPs of one forward pass: QKᵀ and attention·V, the output head, and all.
    """

    configuration: Configuration
    params: int
    gemm_params: int
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
        kept = self.activation_bytes + (self.score_bytes if scores else 0)
        return self.state_bytes + self.cache_bytes + kept + self.logits_bytes


def envelope(configuration: Configuration) -> Envelope:
    """Reckon the cost of one step.

    Parameters
    ----------
    configuration : Configuration

    Returns
    -------
    Envelope
    """
    c = configuration
    d, d_ff, layers, tokens, vocabulary = c.d_model, c.d_ff, c.layers, c.tokens, c.vocabulary
    layer_gemm = 4 * d * d + 3 * d * d_ff
    params = 2 * vocabulary * d + layers * (layer_gemm + 2 * d) + d
    gemm_params = layers * layer_gemm + vocabulary * d
    attention_flops = layers * 4 * c.batch * c.context**2 * d
    return Envelope(
        configuration=c,
        params=params,
        gemm_params=gemm_params,
        state_bytes=16 * params,
        cache_bytes=2 * gemm_params,
        activation_bytes=layers * tokens * (36 * d + 8 * d_ff + 4 * c.heads),
        score_bytes=10 * layers * c.batch * c.heads * c.context**2,
        logits_bytes=14 * tokens * vocabulary,
        attention_flops=attention_flops,
        head_flops=2 * tokens * d * vocabulary,
        fwd_flops=2 * tokens * gemm_params + attention_flops,
    )


def alignment(configuration: Configuration) -> dict[str, bool]:
    """Check which dimensions suit bf16 and fp16 tensor cores.

    The rule is 16 bytes, which is 8 elements; larger powers of two only make fuller tiles.

    Parameters
    ----------
    configuration : Configuration

    Returns
    -------
    dict of str to bool
        ``d_model``, ``d_ff`` and ``vocabulary`` are leading dimensions of weights and activations, ``tokens`` is
        the K of each weight gradient, ``d_head`` and ``context`` are dimensions of attention.
    """
    names = ("d_model", "d_ff", "vocabulary", "tokens", "d_head", "context")
    return {name: getattr(configuration, name) % ALIGNMENT == 0 for name in names}


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
        memory = (cost.state_bytes, cost.activation_bytes, cost.logits_bytes, cost.peak_bytes())
        aligned = all(alignment(configuration).values())
        row = (configuration.name, cost.params, *memory, cost.fwd_flops, cost.train_flops, aligned, _notes(cost))
        rows.append(row)
    return pd.DataFrame(rows, columns=pd.Index(_COLUMNS))


def _notes(cost: Envelope) -> list[str]:
    c = cost.configuration
    notes = [c.intent]
    off = [f"{name} {getattr(c, name)}" for name, fits in alignment(c).items() if not fits]
    if off:
        notes.append(f"not a multiple of {ALIGNMENT}: {', '.join(off)}")
    kernels = [width for width in _FLASH_HEADS if width >= c.d_head]
    if not kernels:
        notes.append(
            f"head size {c.d_head} is above {_FLASH_HEADS[-1]}: no flash attention, so scores are stored and the "
            f"peak is {cost.peak_bytes(scores=True) / 1e9:.2f} GB"
        )
    elif kernels[0] != c.d_head:
        notes.append(
            f"head size {c.d_head} runs flash attention's kernel for {kernels[0]}: {1 - c.d_head / kernels[0]:.1%} of "
            f"attention's work is padding, and attention is {cost.attention_flops / cost.fwd_flops:.1%} of the FLOPs"
        )
    if c.rotated != c.d_head:
        notes.append(f"odd head size: {c.rotated} of its {c.d_head} channels are rotated")
    head = cost.head_flops / cost.fwd_flops
    if head > 1 / 3:
        notes.append(f"the output head is {head:.1%} of the FLOPs")
    return notes
