"""A transformer layer in float64 by PyTorch's own functions, with rotary positions as complex numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["layer"]


def layer(
    x: Tensor, norms: list[Tensor], qkv: Tensor, out: Tensor, gate_up: Tensor, down: Tensor, heads: int
) -> Tensor:
    """Pass x (B, T, D), in float64, through a layer whose projections lie side by side."""
    width = x.shape[-1]
    pairs = torch.arange(width // heads // 2, dtype=torch.float64)
    places = torch.arange(x.shape[1], dtype=torch.float64)
    angle = torch.outer(places, 10_000.0 ** (-pairs / len(pairs)))
    turn = torch.polar(torch.ones_like(angle), angle)
    normed = F.rms_norm(x, (width,), norms[0], 1e-6)
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (normed @ qkv.T).chunk(3, -1))
    turned = []
    for part in (q, k):
        rotated = torch.complex(*part.chunk(2, -1)) * turn
        turned.append(torch.cat([rotated.real, rotated.imag], -1))
    mixed = F.scaled_dot_product_attention(*turned, v, is_causal=True)
    x = x + mixed.transpose(1, 2).flatten(2) @ out.T
    gate, up = (F.rms_norm(x, (width,), norms[1], 1e-6) @ gate_up.T).chunk(2, -1)
    return x + (F.silu(gate) * up) @ down.T
