"""A training step whose memory grows: a number that is kept for a plot keeps the graph that made it.

A hook watches how sure the model is of its predictions: their entropy, one number a step. The fault is that the number
is kept as it comes. It still knows how it was computed, and no backward pass runs through it, so what autograd saved
for one stays: the predicted probabilities and their logarithms, a row of the vocabulary for each token, every step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsightkit.workloads import lm

__all__ = ["WatchedRun", "start"]


class WatchedRun(lm.Run):
    """A language model's run with a hook that keeps the entropy of each prediction.

    Parameters
    ----------
    config : LMConfig
    device : str
    keep_graph : bool
        The fault: keep the numbers as they come, each with its graph.

    Attributes
    ----------
    entropies : list of Tensor
        One a forward pass, in nats.
    """

    def __init__(self, config: lm.LMConfig, device: str = "cpu", *, keep_graph: bool = False) -> None:
        super().__init__(config, device)
        self.parameters["keep_graph"] = keep_graph
        self.entropies: list[Tensor] = []
        self.model.register_forward_hook(self._watch)

    def _watch(self, _: torch.nn.Module, __: Any, logits: Tensor) -> None:
        """Called by PyTorch after each forward pass."""
        logarithms = logits.float().log_softmax(-1)
        entropy = -(logarithms.exp() * logarithms).sum(-1).mean()
        self.entropies.append(entropy if self.parameters["keep_graph"] else entropy.detach())


def start(device: str, keep_graph: bool = False, **parameters: Any) -> WatchedRun:
    """Begin to run a model that is watched.

    Parameters
    ----------
    device : str
    keep_graph : bool
        As for :class:`WatchedRun`.
    **parameters
        Fields of :class:`nsightkit.workloads.lm.LMConfig`.

    Returns
    -------
    WatchedRun
    """
    return WatchedRun(lm.LMConfig(**parameters), device, keep_graph=keep_graph)
